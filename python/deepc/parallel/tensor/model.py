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
from ...zero.parameters.gathered import is_zero_param
from ..judged import refuse_released
from .cut import Cut, cuts_of
from .group import TensorGroup, group_of, whole_state_dict
from .layers import Region, cut_module, is_conv1d
from .random import same_state
from .regions import sum_gradients
from .rules import Rule, rules_of

_FIX = (
    'Give patterns of module names: "tensor_parallel": {"partition_config": {"layer_specs": [{"patterns":'
    ' [".*\\\\.up$"], "partition_type": "column"}, {"patterns": [".*\\\\.down$"], "partition_type": "row"}]}}'
    " (docs/tensor-parallel.md)"
)


@dataclass
class TensorSummary:
    """What was cut. cut: kind -> names of modules. source: where the rules come from. loss: whether the loss of a
    language model is computed from its own part of the vocabulary."""

    ranks: int
    source: str
    cut: dict[str, list[str]] = field(default_factory=dict)
    loss: bool = False

    def __str__(self) -> str:
        counts = ", ".join(f"{kind} {len(names)}" for kind, names in self.cut.items())
        loss = "; outputs.logits is None while the model trains on labels" if self.loss else ""
        return f"tensor parallelism over {self.ranks} ranks by {self.source}: {counts}{loss}"


def cut_model(model: nn.Module, group: TensorGroup, section: Mapping[str, Any] | None = None) -> TensorSummary:
    """Makes `model` this rank's shard of itself, in place, from the first rank's values: modules get other classes,
    parameters their part of the data, and stay the objects that they are (an optimizer made before keeps them). All
    ranks of the group have then one state of torch's default random generator. section: tensor_parallel of a
    configuration. Errors leave the model as it was, unless they come from a module that can't be cut. Collective."""
    section = section or {}
    rules, source = rules_of(model, section, group.size)
    found = _find(model, rules)
    if not found:
        raise ArgumentError(_unknown(model, source, rules))
    strict = (section.get("partition_config") or {}).get("strict_mode", False)
    _check_rest(model, {name for name, _, _ in found}, strict or "partition_config" not in source, source)
    for name, module, rule in found:
        _check_heads(model, name, module, rule, group.size)
    refuse_released(model, "tensor_parallel.autotp_size")
    same_state(group)
    seen: set[int] = set()
    for t in (*model.parameters(), *model.buffers()):
        if id(t) not in seen and t.numel():
            seen.add(id(t))
            if not is_zero_param(t):  # zero.Init: the first rank's already, in memory that ranks share
                group.spread(t.data)
    summary = TensorSummary(group.size, source)
    done: dict[int, Cut] = {}
    regions: dict[str, Region] = {}
    last = Region(group)
    for name, module, rule in found:
        if rule.kind == "skip":
            continue
        if rule.kind == "shared":
            for p in module.parameters(recurse=False):
                sum_gradients(p, group)
        else:
            parent = name.rpartition(".")[0]
            owner = model.get_submodule(parent)
            if rule.kind == "column" and not rule.gathers:
                if parent not in regions:
                    regions[parent] = Region(group, owner)
                last = region = regions[parent]
            else:
                region = last if rule.kind == "row" else Region(group)
            if rule.kind == "row":  # ends the region: another that the module around begins is its own
                last = Region(group)
                regions.clear()
            try:
                cut_module(module, rule.kind, region, _blocks(module, rule), rule.gathers, done)
            except DeepcError as exc:
                raise type(exc)(f"{name} can't be cut as {rule.kind}: {exc}") from None
            for attribute in rule.divided:
                if isinstance(n := getattr(owner, attribute, None), int):
                    setattr(owner, attribute, n // group.size)
        summary.cut.setdefault(rule.kind, []).append(name)
    _check_ties(model, done)
    if summary.cut.get("head") and section.get("vocab_parallel_lm_head") is not False:
        try:
            summary.loss = bool(fuse(model, "loss").total)
        except UnsupportedError:  # a model of whose loss nothing is known gets whole logits
            summary.loss = False
    _save_whole(model)
    return summary


def _can_be_cut(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, nn.Embedding)) or is_conv1d(module)


def _find(model: nn.Module, rules: tuple[Rule, ...]) -> list[tuple[str, nn.Module, Rule]]:
    """In the order of modules, each by the first rule that matches it."""
    found = []
    for name, module in model.named_modules():
        rule = next((r for r in rules if r.matches(name)), None)
        if rule is None or not (_can_be_cut(module) or (rule.kind == "shared" and list(module.parameters(False)))):
            continue
        if rule.kind == "column" and isinstance(module, nn.Embedding):
            rule = Rule(rule.pattern, "vocabulary")
        found.append((name, module, rule))
    return found


def _blocks(module: Any, rule: Rule) -> tuple[int, ...]:
    if rule.kind not in ("column", "row"):
        return ()
    outputs = module.weight.shape[1 if is_conv1d(module) else 0]
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


def _check_heads(model: nn.Module, name: str, module: Any, rule: Rule, ranks: int) -> None:
    """A part of q, k or v has whole heads."""
    parent = model.get_submodule(name.rpartition(".")[0])
    size = next((getattr(parent, a) for a in ("head_dim", "attention_head_size") if hasattr(parent, a)), None)
    if rule.kind != "column" or rule.gathers or not isinstance(size, int):
        return
    features = module.weight.shape[1 if is_conv1d(module) else 0]
    for part in rule.sizes(features) or (features,):
        if part % size == 0 and part // size % ranks:
            heads = part // size
            raise ArgumentError(
                f"tensor_parallel.autotp_size = {ranks} does not divide the {heads} head{'s' * (heads > 1)} of {name}"
                f" ({part} features, {size} a head); use a number of ranks that divides the heads, of keys and values"
                " too"
            )


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
    return type(model).save_pretrained(model, save_directory, True, state_dict, *args, **kwargs)
