"""Models of transformers over sequences that are spread over ranks, without a line of theirs rewritten."""

from __future__ import annotations

import inspect
import itertools
import re
from typing import Any, cast

import torch
import torch.distributed as dist

from ...errors import ArgumentError, MisuseError, UnsupportedError
from ...nn.fuse import calls
from ..axes import without_values
from .attention import DistributedAttention, attend
from .loss import cross_entropy, of_all_ranks
from .shards import ROUTER_MASK, mask_for_routers

_PREFIX = "deepc_ulysses_"  # of the names of attentions here
_names = itertools.count()


class Grouped:
    """An attention module whose keys and values have other numbers of heads than it says."""

    def __init__(self, module: Any, groups: int) -> None:
        self._module, self.num_key_value_groups = module, groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def share(model: torch.nn.Module, group: Any) -> torch.nn.Module:
    """A model of transformers (such as Llama, Mistral, Qwen2, GPT-2) so changed that each rank of `group` gives it its
    own positions (shard()): attention sees all of them, by the model's attention implementation so far ("sdpa",
    "flash_attention_2", ...), and the loss of a causal language model is the mean over all tokens (with
    num_items_in_batch, of whole sequences and equal on all ranks, their sum over that); router_logits of a mixture of
    experts, which its load-balance loss is made of, become those of all positions that count (shard()'s router_mask).
    Returns the model; to be called once. MisuseError at the second call; ArgumentError for "eager", which wants a mask
    of all pairs, a model without a choice of implementations, and fewer heads than ranks; UnsupportedError for sliding
    windows, and for layers that mix positions otherwise (state spaces)."""
    config = getattr(model, "config", None)
    implementation = getattr(config, "_attn_implementation", None)
    ranks = dist.get_world_size(group)
    if config is None or implementation is None:
        raise ArgumentError(
            f"sequence parallelism: {type(model).__name__} is no model of transformers with attention implementations;"
            " give its attention to deepc.parallel.sequence.DistributedAttention"
        )
    text = config.get_text_config()
    if str(implementation).startswith(_PREFIX):
        raise MisuseError(f"sequence parallelism: {type(model).__name__} is share()d already; it is called once")
    if implementation == "eager":
        raise ArgumentError(
            'sequence parallelism: attn_implementation="eager" wants a mask of all pairs of positions; use "sdpa"'
        )
    if text.num_attention_heads < ranks:
        raise ArgumentError(
            f"sequence parallelism: {text.num_attention_heads} heads can't be shared by {ranks} ranks of one sequence"
        )
    if (window := getattr(text, "sliding_window", None)) and getattr(text, "use_sliding_window", True):
        raise UnsupportedError(
            f"sequence parallelism: sliding_window = {window} is a mask, which does not come along; set it to None"
        )
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if (found := sum(calls(m, "ALL_ATTENTION_FUNCTIONS") for m in model.modules())) < text.num_hidden_layers:
        raise UnsupportedError(
            f"sequence parallelism: of the {text.num_hidden_layers} layers of {type(model).__name__} {found} have an"
            " attention whose implementation can be chosen; the others (an attention of their own, a state space, a"
            " recurrence) would see this rank's positions alone. Take a model whose layers all have one, or give the"
            " attention of your own model to deepc.parallel.sequence.DistributedAttention"
        )
    local = ALL_ATTENTION_FUNCTIONS[str(implementation)]

    def attention(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """query, key, value [samples, heads, positions, features]; returns [samples, positions, heads, features]."""

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            return local(Grouped(module, q.shape[1] // k.shape[1]), q, k, v, attention_mask, *args, **kwargs)[0]

        out = attend(run, (query, key, value), group, heads=1, positions=2, out_heads=2, out_positions=1)
        return out, None

    def loss(logits: torch.Tensor, labels: Any, *_: Any, shift_labels: Any, **kwargs: Any) -> torch.Tensor:
        ignore, items = kwargs.get("ignore_index", -100), kwargs.get("num_items_in_batch")
        return cross_entropy(logits, shift_labels, group, ignore_index=ignore, items=items)

    name = f"{_PREFIX}{next(_names)}"
    ALL_ATTENTION_FUNCTIONS.register(name, attention)
    for part in {id(c): c for c in (config, text)}.values():
        part._attn_implementation = name
    model.loss_function = loss  # type: ignore[assignment]
    routers = _Routers(group)
    model.register_forward_pre_hook(_check, with_kwargs=True)
    model.register_forward_pre_hook(routers.take_mask, with_kwargs=True)
    cast(torch.nn.Module, model.base_model).register_forward_hook(routers.routed)
    if hasattr(text, "output_router_logits") or hasattr(config, "output_router_logits"):
        mask_for_routers(group)
    return model


def attends_alone(model: torch.nn.Module) -> bool:
    """Whether attention of a model of transformers is as transformers has it, so that a rank of a sequence would see
    its own positions alone; False also where nobody can tell (attention of the model's own)."""
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if not isinstance(implementation, str) or any(isinstance(m, DistributedAttention) for m in model.modules()):
        return False
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    chosen = ALL_ATTENTION_FUNCTIONS.get(implementation)  # None: "eager", which each model has for itself
    return str(getattr(chosen, "__module__", "transformers.")).startswith("transformers.")


class _Routers:
    """The load-balance loss is of the experts' shares of all tokens that count: no mean of what it is for each rank's.
    transformers would leave out those of padding by attention_mask, which is none here."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._mask: torch.Tensor | None = None  # of the call that runs; this rank's positions

    def take_mask(self, _: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self._mask = kwargs.get(ROUTER_MASK)
        return args, {k: v for k, v in kwargs.items() if k != ROUTER_MASK}

    def routed(self, _: Any, __: Any, out: Any) -> Any:
        mask, self._mask = self._mask, None
        if isinstance(found := getattr(out, "router_logits", None), tuple):
            counted = None if mask is None else of_all_ranks(mask.flatten(), self._group) != 0
            out.router_logits = tuple(self._of_all(t, counted) for t in found)
        return out

    def _of_all(self, logits: torch.Tensor, counted: torch.Tensor | None) -> torch.Tensor:
        everyones = of_all_ranks(logits, self._group)
        if counted is None or without_values(everyones):
            return everyones
        rows = everyones.flatten(0, -2)
        if len(rows) != len(counted):
            raise UnsupportedError(
                f"sequence parallelism: router_logits of {list(logits.shape)} are not one row for each of this rank's"
                f" {len(counted) // dist.get_world_size(self._group)} positions, so that padding can't be left out of"
                " the load-balance loss; give batches without padding, of a length that the ranks divide"
            )
        return rows[counted]


def _check(model: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """That what would be silently wrong on a part of the positions is not asked for."""
    kwargs = {**dict(zip(inspect.signature(model.forward).parameters, args)), **kwargs}
    if kwargs.get("attention_mask") is not None:
        raise UnsupportedError(
            "sequence parallelism: an attention_mask of this rank's positions says nothing of the others';"
            " deepc.parallel.sequence.shard leaves it out where it is not needed"
        )
    if kwargs.get("position_ids") is None:
        raise ArgumentError(
            "sequence parallelism: without position_ids every rank would take its positions for the first ones;"
            " deepc.parallel.sequence.shard makes them"
        )
    if kwargs.get("labels") is None:
        return
    if not re.search("(ForCausalLM|LMHeadModel)$", type(model).__name__):
        raise UnsupportedError(
            f"sequence parallelism: {type(model).__name__} takes the mean over this rank's labels only; call it without"
            " labels, and deepc.parallel.sequence.cross_entropy with its logits"
        )
    if kwargs.get("shift_labels") is None:
        raise ArgumentError(
            "sequence parallelism: labels are shifted before sequences are cut, since the label of a rank's last"
            " position is with the next rank; deepc.parallel.sequence.shard makes shift_labels"
        )
