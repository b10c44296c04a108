"""A model cut over the ranks of a tensor-parallel group where it stands, by rules (rules.py)."""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch.distributed as dist
from torch import nn

from ...errors import ArgumentError, DeepcError, UnsupportedError
from ...nn.fuse import fuse
from ...nn.int8 import call_modules
from ...zero.parameters.gathered import is_zero_param
from ..judged import refuse_released
from .cut import Cut, Heads, cuts_of
from .group import TensorGroup, group_of, whole_state_dict
from .layers import Region, cut_module, draw_as_layer, is_conv1d, replicate_module
from .random import same_state
from .regions import sum_gradients
from .rules import Rule, adapted, around, is_adapted, is_adapter, own_name, rules_of

_FIX = (
    'Give patterns of module names: "tensor_parallel": {"partition_config": {"layer_specs": [{"patterns":'
    ' [".*\\\\.up$"], "partition_type": "column"}, {"patterns": [".*\\\\.down$"], "partition_type": "row"}]}}'
    " (docs/tensor-parallel.md)"
)

Uneven = dict[str, tuple[int, Heads]]  # name of an attention: features of a head, how its heads are shared


@dataclass
class TensorSummary:
    """What was cut. cut: kind -> names of modules ("replicated": projections to heads of keys and values that several
    ranks read). source: where the rules come from. loss: whether the loss of a language model is computed from its own
    part of the vocabulary."""

    ranks: int
    source: str
    cut: dict[str, list[str]] = field(default_factory=dict)
    loss: bool = False

    def __str__(self) -> str:
        counts = ", ".join(f"{kind} {len(names)}" for kind, names in self.cut.items())
        loss = "; outputs.logits is None while the model trains on labels" if self.loss else ""
        return f"tensor parallelism over {self.ranks} ranks by {self.source}: {counts}{loss}"


def cut_model(
    model: nn.Module, group: TensorGroup, section: Mapping[str, Any] | None = None, sequence: int = 1
) -> TensorSummary:
    """Makes `model` this rank's shard of itself, in place, from the first rank's values: modules get other classes,
    parameters their part of the data, and stay the objects that they are (an optimizer made before keeps them). All
    ranks of the group have then one state of torch's default random generator. section: tensor_parallel of a
    configuration. sequence: ranks that share a sequence, and with it the heads of a rank. Errors leave the model as it
    was, unless they come from a module that can't be cut. Collective."""
    section = section or {}
    rules, source = rules_of(model, section, group.size)
    found = _find(model, rules)
    if not found:
        raise ArgumentError(_unknown(model, source, rules))
    strict = (section.get("partition_config") or {}).get("strict_mode", False)
    strict = strict or (bool(rules) and "partition_config" not in source)
    _check_rest(model, {name for name, _, _ in found}, strict, source)
    uneven = _uneven_heads(model, found, group.size)
    _check_sequence(uneven, sequence)
    refuse_released(model, "tensor_parallel.autotp_size")
    same_state(group)
    _spread(model, group)
    summary = TensorSummary(group.size, source or "enable_expert_tensor_parallelism of MoE")
    done: dict[int, Cut] = {}
    regions = _Regions(model, group, uneven)
    for name, module, rule in found:
        if rule.kind == "skip":
            continue
        kind = rule.kind
        if kind == "shared":
            for p in module.parameters(recurse=False):
                sum_gradients(p, group)
        else:
            kind = _cut_one(model, name, module, rule, regions, done)
        summary.cut.setdefault(kind, []).append(name)
    _check_ties(model, done)
    call_modules(model)
    if summary.cut.get("head") and section.get("vocab_parallel_lm_head") is not False:
        try:
            summary.loss = bool(fuse(model, "loss").total)
        except UnsupportedError:  # a model of whose loss nothing is known gets whole logits
            summary.loss = False
    _save_whole(model)
    return summary


def _check_sequence(uneven: Uneven, sequence: int) -> None:
    for parent, (_, shared) in uneven.items():
        if min(shared.queries) < sequence:  # only some ranks would fail in forward
            raise ArgumentError(
                f"sequence_parallel_size = {sequence}, and the heads of {parent}, which ranks of a sequence share, are"
                f" {', '.join(map(str, shared.queries))} on tensor-parallel ranks; use at most {min(shared.queries)}"
                " ranks of a sequence, or fewer tensor-parallel ones"
            )


def _spread(model: nn.Module, group: TensorGroup) -> None:
    """The first rank's values become all ranks'. Collective."""
    seen: set[int] = set()
    for t in (*model.parameters(), *model.buffers()):
        if id(t) not in seen:
            seen.add(id(t))
            if not is_zero_param(t):  # zero.Init: the first rank's already, in memory that ranks share
                group.spread(t)


class _Regions:
    """The regions of a model whose modules come in their order. uneven: see _uneven_heads."""

    def __init__(self, model: nn.Module, group: TensorGroup, uneven: Uneven) -> None:
        self.group, self.uneven = group, uneven
        self._model = model
        self._open: dict[str, Region] = {}  # by the module around
        self._last = self._ended = Region(group)

    def of(self, name: str, rule: Rule) -> Region:
        """The one that the next module, `name`, begins, goes on or ends."""
        parent, kind = around(name), rule.kind
        if is_adapter(name):  # its input is not the layer's, its cut is
            of_layer = self._ended if kind == "row" else self._open.get(parent, self._last)
            region = Region(self.group)
            region.heads = of_layer.heads
            return region
        if kind == "column" and not rule.gathers:
            if parent not in self._open:
                self._open[parent] = Region(self.group, self._model.get_submodule(parent))
            self._last = region = self._open[parent]
            if parent in self.uneven:
                region.heads = self.uneven[parent][1]
            return region
        if kind != "row":
            return Region(self.group)
        self._ended, self._last = self._last, Region(self.group)
        self._open.clear()  # another that the module around begins is its own
        return self._ended


def _cut_one(
    model: nn.Module, name: str, module: nn.Module, rule: Rule, regions: _Regions, done: dict[int, Cut]
) -> str:
    """What was made of the module: the rule's kind, or "replicated"."""
    parent, kind, group = around(name), rule.kind, regions.group
    owner, region = model.get_submodule(parent), regions.of(name, rule)
    shares = () if region.heads is None else region.heads.queries
    try:
        if kind == "column" and region.heads is not None and _reads(module, *regions.uneven[parent]):
            _replicate(cast(Any, owner), module, region, regions.uneven[parent][0])
            kind = "replicated"
        else:
            cut_module(module, kind, region, _blocks(module, rule), rule.gathers, done, shares)
    except DeepcError as exc:
        raise type(exc)(f"{name} can't be cut as {rule.kind}: {exc}") from None
    if is_adapted(layer := model.get_submodule(own_name(name))) and not is_adapter(name):
        draw_as_layer(layer, rule.kind, region)
    mine, of = (shares[group.rank], sum(shares)) if shares else (1, group.size)
    for attribute in rule.divided:
        if isinstance(n := getattr(owner, attribute, None), int):
            setattr(owner, attribute, n * mine // of)
    return kind


def _can_be_cut(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, nn.Embedding)) or is_conv1d(module)


def _find(model: nn.Module, rules: tuple[Rule, ...]) -> list[tuple[str, nn.Module, Rule]]:
    """In the order of modules, each by the first rule that matches it; then experts that are to be cut with them."""
    from ..expert.linears import kinds_of_linears

    found = []
    taken: set[str] = set()  # parts of adapted layers, which other rules may match as well
    experts = kinds_of_linears(model, lambda name: any(r.matches(name) for r in rules))
    for name, module in model.named_modules():
        rule = next((r for r in rules if r.matches(name)), None)
        if rule is None and name in experts:
            rule = Rule(re.escape(name), experts[name])
        if name in taken:
            continue
        if rule is not None and is_adapted(module):
            found += (parts := adapted(name, module, rule))
            taken.update(part for part, _, _ in parts)
            continue
        if rule is None or not (_can_be_cut(module) or (rule.kind == "shared" and list(module.parameters(False)))):
            continue
        if rule.kind == "column" and isinstance(module, nn.Embedding):
            rule = Rule(rule.pattern, "vocabulary")
        found.append((name, module, rule))
    order = list(experts)  # which has what begins a region before what ends it, however a network names them
    places = [i for i, (name, _, _) in enumerate(found) if name in experts]
    for i, one in zip(places, sorted((found[i] for i in places), key=lambda f: order.index(f[0]))):
        found[i] = one
    return found


def _blocks(module: Any, rule: Rule) -> tuple[int, ...]:
    if rule.kind not in ("column", "row"):
        return ()
    outputs = _outputs(module)
    features = outputs if rule.kind == "column" else module.weight.numel() // outputs
    return rule.sizes(features)


def _unknown(model: nn.Module, source: str, rules: tuple[Rule, ...]) -> str:
    others = [
        f"{n} ({type(m).__name__})"
        for n, m in model.named_modules()
        if any(r.matches(n) for r in rules)
        and isinstance(w := m._parameters.get("weight"), nn.Parameter)
        and w.dim() > 1
    ]
    if others:
        return (
            f"tensor_parallel.autotp_size: by {source} {', '.join(others[:8])} would be cut, of which deepc cannot know"
            " what its forward does with a part of the weight; make it a torch.nn.Linear, torch.nn.Embedding or"
            " transformers' Conv1D"
        )
    names = [f"{n or 'the model'} ({type(m).__name__})" for n, m in model.named_modules() if _can_be_cut(m)]
    shown = ", ".join(names[:12]) + (f", ... ({len(names)} in all)" if len(names) > 12 else "")
    why = f"no module's name matches {source}" if source else f"deepc has no rules for {type(model).__name__}"
    return f"tensor_parallel.autotp_size: {why}, so nothing would be cut. What could be: {shown or 'nothing'}. {_FIX}"


def _check_rest(model: nn.Module, found: set[str], strict: bool, source: str) -> None:
    """Of modules that no rule knows, those in the blocks (elements of a ModuleList) would get shards without being
    one."""
    if not strict:
        return
    rest = [
        n for n, m in model.named_modules() if _can_be_cut(m) and n not in found and re.search(r"(^|\.)\d+\.", n + ".")
    ]
    if rest:
        raise UnsupportedError(
            f"tensor parallelism by {source} does not know {', '.join(rest[:8])}{', ...' * (len(rest) > 8)}"
            f" ({len(rest)} modules in blocks that are cut). {_FIX}; partition_type skip leaves a module as it is"
        )


# ---- heads that the ranks do not divide ------------------------------------------------------------------------------
def _uneven_heads(model: nn.Module, found: list[tuple[str, nn.Module, Rule]], ranks: int) -> Uneven:
    """The attentions whose heads the ranks do not divide: a part of q, k or v has whole heads. ArgumentError,
    UnsupportedError for one that can't be shared."""
    attentions: dict[str, dict[str, list[int]]] = {}
    for name, module, rule in found:
        parent, _, short = own_name(name).rpartition(".")
        if (
            rule.kind != "column"
            or rule.gathers
            or is_adapter(name)
            or not (size := _head_size(model.get_submodule(parent)))
        ):
            continue
        parts = _blocks(module, rule) or (_outputs(module),)
        if heads := [part // size for part in parts if part % size == 0]:
            attentions.setdefault(parent, {})[short] = heads
    out = {}
    for parent, projections in attentions.items():
        if any(n % ranks for heads in projections.values() for n in heads):
            owner = model.get_submodule(parent)
            out[parent] = _head_size(owner), _shared_heads(owner, parent, projections, ranks)
    return out


def _shared_heads(owner: Any, name: str, projections: dict[str, list[int]], ranks: int) -> Heads:
    """projections: name -> how many heads each part of its outputs has."""
    every = sorted({n for heads in projections.values() for n in heads})
    keys, queries = every[0], every[-1]
    counted = f"{' and '.join(map(str, every))} head{'s' * (every != [1])}"
    told = f"tensor_parallel.autotp_size = {ranks}, and {name} has {counted}"
    if wrong := [n for n in every if n % keys or (keys < ranks and n not in (keys, queries))]:
        raise ArgumentError(
            f"{told} in {', '.join(projections)}: {wrong[0]} is neither the number of keys and values nor of queries,"
            " so which heads belong together can't be told; use a number of ranks that divides all of them"
        )
    try:
        heads = Heads.over(queries, keys, ranks)
    except ArgumentError as exc:
        raise ArgumentError(f"{told}: {exc}") from None
    if heads.keys is None:
        return heads
    why = None
    if fused := [n for n, parts in projections.items() if len(parts) > 1]:
        why = f"{fused[0]} has queries, keys and values in one weight"
    elif getattr(owner, "num_key_value_groups", None) != queries // keys:
        why = f"{type(owner).__name__} has no num_key_value_groups = {queries // keys}, which would say so on each rank"
    if why is not None:
        raise UnsupportedError(
            f"{told}: several ranks would read one head of keys and values, but {why}; use at most {keys} ranks"
        )
    return heads


def _head_size(owner: Any) -> int:
    """Features of a head of an attention; 0 for a module that is none."""
    size = next((getattr(owner, a) for a in ("head_dim", "attention_head_size") if hasattr(owner, a)), 0)
    return size if isinstance(size, int) else 0


def _outputs(module: Any) -> int:
    return int(module.weight.shape[1 if is_conv1d(module) else 0])


def _reads(module: nn.Module, size: int, heads: Heads) -> bool:
    """Whether a projection makes keys or values that several ranks read."""
    return heads.keys is not None and _outputs(module) != size * sum(heads.queries)


def _replicate(owner: Any, module: nn.Module, region: Region, size: int) -> None:
    heads, rank = region.heads, region.group.rank
    assert heads is not None and heads.keys is not None
    replicate_module(module, region, heads.keys[rank], size)
    owner.num_key_value_groups = heads.groups(rank)


def _check_ties(model: nn.Module, done: dict[int, Cut]) -> None:
    """Whatever has a parameter that is cut must know it."""
    known = cuts_of(model)
    for name, module in model.named_modules():
        for key, p in module._parameters.items():
            if p is not None and id(p) in done and (id(p) not in known or not hasattr(module, "cuts")):
                if _can_be_cut(module):
                    raise ArgumentError(
                        f"{name}.{key} is shared with a module that is cut, and no rule knows {name}; give one"
                        " (partition_type head for the output layer of a tied embedding)"
                    )


def _save_whole(model: nn.Module) -> None:
    """transformers' save_pretrained would write the shards of one rank under the names of the whole."""
    if hasattr(model, "save_pretrained"):
        cast(Any, model).save_pretrained = types.MethodType(_save_pretrained, model)  # a copy of the model has its own


def _save_pretrained(
    model: Any,
    save_directory: Any,
    is_main_process: bool | None = None,
    state_dict: Mapping[str, Any] | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """transformers' save_pretrained of the whole model. Without state_dict it comes from all ranks' shards: collective
    over all ranks, of which rank 0 writes (is_main_process says who, as there). With one, which has the whole
    (engine.module_state_dict()), it writes that, and nobody else is needed."""
    cuts = cuts_of(model)
    if state_dict is None:
        state_dict = model.state_dict()
        state_dict = {**state_dict, **whole_state_dict(model, state_dict, group_of(model))}
    else:
        for name, p in model.named_parameters(remove_duplicate=False):
            given, cut = state_dict.get(name), cuts.get(id(p))
            if cut is not None and given is not None and tuple(given.shape) != cut.shape:
                raise ArgumentError(
                    f"save_pretrained(state_dict=...): {name} has shape {tuple(given.shape)} there, a rank's shard of"
                    f" {cut.shape}; pass engine.module_state_dict(), or nothing, on all ranks"
                )
    if not (dist.get_rank() == 0 if is_main_process is None else is_main_process):
        return None
    if not args:  # peft's has other places for what follows
        kwargs |= {"is_main_process": True, "state_dict": state_dict}
        return type(model).save_pretrained(model, save_directory, **kwargs)
    return type(model).save_pretrained(model, save_directory, True, state_dict, *args, **kwargs)
