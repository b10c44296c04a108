"""deepspeed.runtime.sequence_parallel.ulysses_sp (sequence parallelism of transformers' models, as its Trainer and
Accelerate ask for it) and the exchange of deepspeed.sequence.layer, over deepc.parallel.sequence."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ....errors import ArgumentError, DeepcError, UnsupportedError
from ....parallel.sequence.attention import attend
from ....parallel.sequence.exchange import Way, exchange
from ....parallel.sequence.models import Grouped
from ....plan.mesh import shares
from . import sequence_state


class SeqAllToAll:
    """deepspeed.sequence.layer's _SeqAllToAll: from a part of dimension `gather_idx` to the whole of it, with a part of
    dimension `scatter_idx` instead, and back. Differentiable."""

    @staticmethod
    def apply(
        group: Any, input: torch.Tensor, scatter_idx: int, gather_idx: int, batch_dim_idx: int = 0, *streams: Any
    ) -> torch.Tensor:
        """batch_dim_idx and streams, DeepSpeed's, are not needed. Parts need not be equal: the first ranks have one
        more. Collective over the group."""
        ranks = dist.get_world_size(group)
        if ranks == 1:
            return input
        sizes = torch.zeros(ranks, dtype=torch.int64, device=input.device)
        sizes[dist.get_rank(group)] = input.shape[gather_idx]
        dist.all_reduce(sizes, group=group)
        way = Way(
            scatter_idx % input.dim(),
            gather_idx % input.dim(),
            shares(input.shape[scatter_idx], ranks),
            tuple(sizes.tolist()),
        )
        return exchange((input,), (way,), group)[0]


class UlyssesSPAttentionHF(torch.nn.Module):
    """attn, one of transformers' attention functions, over all positions of sequences of which each rank of
    process_group has a part."""

    def __init__(
        self,
        attn: Callable[..., Any],
        batch_size: int | None = None,
        attn_head_count: int | None = None,
        attn_head_size: int | None = None,
        kv_head_count: int | None = None,
        num_hidden_layers: int | None = None,
        process_group: Any = None,
        seq_length_is_variable: bool = True,
        local_seq_length: int | None = None,
        global_seq_length: int | None = None,
        disable_in_eval: bool = False,
    ) -> None:
        """local_seq_length: of every batch, unless seq_length_is_variable. disable_in_eval: modules in evaluation see
        their own positions alone. The other numbers are DeepSpeed's arguments, and come from the tensors here."""
        super().__init__()
        self.attn, self.process_group, self.disable_in_eval = attn, process_group, disable_in_eval
        self.local_seq_length = None if seq_length_is_variable else local_seq_length
        self.core_attn_implementation = ""

    def forward(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """query, key, value [samples, heads, positions, features] -> [samples, positions, heads, features]. The mask,
        of this rank's positions, is left out: position_ids say what is looked at, padding at the end has no labels.
        ArgumentError without position_ids; UnsupportedError for packed samples with an attention that needs a mask for
        them."""
        if self.disable_in_eval and not module.training:
            return self.attn(module, query, key, value, attention_mask, *args, **kwargs)  # type: ignore[no-any-return]
        if (positions := kwargs.get("position_ids")) is None:
            raise ArgumentError(
                "sequence parallelism: without position_ids every rank would take its positions for the first ones; the"
                " batch needs them, as UlyssesSPDataLoaderAdapter hands them on"
            )
        if self.local_seq_length not in (None, query.shape[2]):
            raise ArgumentError(
                f"sequence parallelism: {query.shape[2]} positions on this rank, and register_with_transformers was"
                f" told {self.local_seq_length} (seq_length / ranks); pass seq_length_is_variable=True"
            )
        parts = [torch.empty_like(positions) for _ in range(dist.get_world_size(self.process_group))]
        dist.all_gather(parts, positions.contiguous(), group=self.process_group)
        kwargs["position_ids"] = whole = torch.cat(parts, dim=-1)
        self._refuse_masks(module, attention_mask, kwargs.get("sliding_window"), whole.shape[-1])
        if "flash" not in self.core_attn_implementation and bool((whole[..., 1:] < whole[..., :-1]).any()):
            raise UnsupportedError(
                "sequence parallelism: position_ids begin again inside of a sample (packed samples), which"
                f" {self.core_attn_implementation or 'this attention'} sees by a mask alone; use flash_attention_2"
            )

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            return self.attn(Grouped(module, q.shape[1] // k.shape[1]), q, k, v, None, *args, **kwargs)[0]

        qkv = (query, key, value)
        out = attend(run, qkv, self.process_group, heads=1, positions=2, out_heads=2, out_positions=1)
        return out, None

    def _refuse_masks(self, module: Any, mask: Any, window: int | None, length: int) -> None:
        """UnsupportedError where the mask that is left out says more than padding at the end of what looks back."""
        if "flash" in self.core_attn_implementation:
            return
        name = self.core_attn_implementation or "this attention"
        if window is not None and window < length:
            raise UnsupportedError(
                f"sequence parallelism: a sliding window of {window} positions in {length} is a mask for {name}, which"
                " does not come along; use flash_attention_2"
            )
        if getattr(module, "is_causal", True):
            return
        masked = torch.tensor([float(mask is not None)], dtype=torch.float32, device="cpu")  # a mask of ones is None
        dist.all_reduce(masked, group=self.process_group)
        if masked.item():
            raise UnsupportedError(
                "sequence parallelism: an attention_mask of a model that looks both ways does not come along with"
                f" {name}; use samples of one length, without padding"
            )

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int | None = None,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> Any:
        """From here on models of transformers with this attention implementation share sequences over so many
        neighbouring ranks. Returns what deepspeed.initialize takes as mpu; None for a size of 1. model_name_or_path: a
        model (or what has its `config`), or where AutoConfig finds it. max_length: DeepSpeed's older seq_length.
        Collective. ArgumentError for an implementation that the model does not use or transformers does not have, and
        for "eager", which wants a mask of all pairs; UnsupportedError for "flex_attention", whose mask says what is
        looked at."""
        if sequence_parallel_size == 1:
            return None
        seq_length = max_length if seq_length is None else seq_length
        if not seq_length_is_variable and seq_length is None:
            raise ArgumentError("register_with_transformers: seq_length_is_variable=False needs seq_length")
        from transformers import AutoConfig
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        config = getattr(model_name_or_path, "config", None) or AutoConfig.from_pretrained(model_name_or_path)
        has = getattr(config, "_attn_implementation", None)
        if has is not None and has != core_attn_implementation:
            raise ArgumentError(
                f"core_attn_implementation = {core_attn_implementation!r} does not match model config"
                f" attn_implementation = {has!r}; make them equal, for attention that the model does not use is never"
                " called"
            )
        if "eager" in core_attn_implementation:
            raise ArgumentError(
                f"core_attn_implementation = {core_attn_implementation!r} wants a mask of all pairs of positions; use"
                ' "sdpa"'
            )
        if core_attn_implementation == "flex_attention":
            raise UnsupportedError(
                'core_attn_implementation = "flex_attention" has its mask from the model, which makes it of the'
                ' positions of one rank; use "sdpa"'
            )
        if "/" in core_attn_implementation and core_attn_implementation not in ALL_ATTENTION_FUNCTIONS:
            from transformers.modeling_flash_attention_utils import lazy_import_flash_attention

            lazy_import_flash_attention(core_attn_implementation)  # a kernel of the hub: registers itself
        if core_attn_implementation not in ALL_ATTENTION_FUNCTIONS:
            raise ArgumentError(
                f"core_attn_implementation = {core_attn_implementation!r} is none of transformers':"
                f" {', '.join(ALL_ATTENTION_FUNCTIONS.valid_keys())}"
            )
        sequence_state.initialize_sequence_parallel(sequence_parallel_size)
        core = ALL_ATTENTION_FUNCTIONS[core_attn_implementation]
        while isinstance(earlier := getattr(core, "__self__", None), UlyssesSPAttentionHF):  # registered again
            core = earlier.attn
        shared = cls(
            core,
            process_group=sequence_state.get_sequence_parallel_group(),
            seq_length_is_variable=seq_length_is_variable,
            local_seq_length=None if seq_length is None else seq_length // sequence_parallel_size,
            disable_in_eval=disable_in_eval,
        )
        shared.core_attn_implementation = core_attn_implementation
        ALL_ATTENTION_FUNCTIONS[core_attn_implementation] = shared.forward
        return sequence_state


class UlyssesSPDataLoaderAdapter:
    """A loader of this rank's own batches -> one whose batches the ranks of sp_group share: each rank's next batch in
    turn, of which every rank gets its part of the positions."""

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any = None) -> None:
        """dl: gives dicts with input_ids, position_ids and labels [samples, positions, ...], and other entries; tensors
        are all cut. device: DeepSpeed's argument; batches stay on the CPU."""
        self.dl, self.sp_rank, self.sp_group, self.sp_world_size = dl, sp_rank, sp_group, sp_world_size
        self.device = device
        self._source: Iterator[Any] | None = None  # begun with the first batch: a sampler draws its order there
        self._skip = 0  # batches that are left out then
        self._ready: deque[dict[str, Any]] = deque()

    def __len__(self) -> int:
        return len(self.dl) * self.sp_world_size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """From the first batch on, also where the last epoch was not drained."""
        if self._source is not None:
            self._begin_anew()
        return self

    def set_epoch(self, epoch: int) -> None:
        """The loader's, which begins anew."""
        if hasattr(self.dl, "set_epoch"):
            self.dl.set_epoch(epoch)
        if self._source is not None:
            self._begin_anew()

    def _begin_anew(self) -> None:
        self._source, self._skip = None, 0
        self._ready.clear()

    def skipping(self, batches: int, skip: Callable[[Any, int], Any]) -> UlyssesSPDataLoaderAdapter:
        """This without the first so many batches. skip: makes a loader without its first ones (accelerate's
        skip_first_batches, which knows no adapter)."""
        whole, rest = divmod(batches, self.sp_world_size)
        left = type(self)(skip(self.dl, whole), self.sp_rank, self.sp_group, self.sp_world_size, self.device)
        left._skip = rest
        return left

    def __next__(self) -> dict[str, Any]:
        if self._source is None:
            self._source, skipped = iter(self.dl), self._skip
            for _ in range(skipped):
                next(self, None)
        if not self._ready:
            self._fill()
        return self._ready.popleft()

    def _fill(self) -> None:
        """Ends where the first rank's loader does, and begins again after that."""
        assert self._source is not None  # begun by who calls
        parts: Any
        failure: Exception | None = None
        try:
            batch = next(self._source, None)
            parts = None if batch is None else self._parts(batch)
        except Exception as exc:  # told to the others, who wait for this rank's parts
            failure, said = exc, f"rank {dist.get_rank()} has no batch: {type(exc).__name__}: {exc}"
            parts = exc if isinstance(exc, ArgumentError) else DeepcError(f"UlyssesSPDataLoaderAdapter: {said}")
        given: list[Any] = [None] * self.sp_world_size
        dist.all_gather_object(given, parts, group=self.sp_group)
        if failure is not None:
            raise failure
        if bad := next((g for g in given if isinstance(g, DeepcError)), None):
            raise bad
        if any(g is None for g in given):
            self._begin_anew()
            raise StopIteration
        self._ready.extend(of_rank[self.sp_rank] for of_rank in given)

    def _parts(self, batch: dict[str, Any]) -> list[dict[str, Any]]:
        """For each rank."""
        if "position_ids" not in batch:
            raise ArgumentError(
                "UlyssesSPDataLoaderAdapter: the batch has no position_ids, by which a rank knows where its part"
                " stands; torch.arange(positions) for each sample, from the collator"
            )
        if "input_ids" not in batch:
            raise ArgumentError("UlyssesSPDataLoaderAdapter: the batch has no input_ids, whose positions are cut")
        length = batch["input_ids"].shape[1]
        if length % self.sp_world_size:
            raise ArgumentError(
                f"UlyssesSPDataLoaderAdapter: {length} positions can't be shared by {self.sp_world_size} ranks; pad"
                " batches to a multiple"
            )
        whole = dict(batch)
        if "labels" in whole:  # the label of a rank's last position is with the next rank
            whole["shift_labels"] = torch.nn.functional.pad(whole.pop("labels")[..., 1:], (0, 1), value=-100)
        parts: list[dict[str, Any]] = [{} for _ in range(self.sp_world_size)]
        for name, value in whole.items():
            if not isinstance(value, torch.Tensor):
                pieces: Any = [value] * self.sp_world_size
            elif value.dim() < 2 or value.shape[1] != length:
                raise ArgumentError(
                    f"UlyssesSPDataLoaderAdapter: {name} is {list(value.shape)}, and input_ids"
                    f" {list(batch['input_ids'].shape)}: tensors have the same positions in dimension 1"
                )
            else:
                pieces = [p.detach().cpu().clone() for p in value.chunk(self.sp_world_size, dim=1)]
            for part, piece in zip(parts, pieces):
                part[name] = piece
        return parts
