"""A model whose experts are spread over neighbouring data-parallel ranks: which parameters those are, their numbers
among all ranks' experts, and what the others' gradients go through."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from ...errors import UnsupportedError
from .group import ExpertGroup, expert_group
from .layer import MoE


def ranks_of_experts(model: torch.nn.Module) -> int:
    """ep_size of the model's layers; 1 without any. UnsupportedError for several sizes above 1."""
    sizes = sorted({m.ep_size for m in model.modules() if isinstance(m, MoE)} - {1})
    if len(sizes) > 1:
        raise UnsupportedError(
            f"MoE: layers with ep_size {' and '.join(map(str, sizes))} in one model; use one size for all (beside it"
            " ep_size=1 is possible)"
        )
    return sizes[0] if sizes else 1


def spread_parameters(model: torch.nn.Module) -> frozenset[int]:
    """ids of the parameters of experts that are spread over ranks."""
    layers = [m for m in model.modules() if isinstance(m, MoE) and m.ep_size > 1]
    return frozenset(id(p) for m in layers for p in m.deepspeed_moe.experts.parameters())


def _numbered(name: str, model: torch.nn.Module) -> tuple[str, int, str, int, int] | None:
    """(begin of the name, number of the expert in it, its end, first expert of this rank, experts of this rank) of a
    tensor of spread experts."""
    before, mark, after = name.partition(".deepspeed_moe.experts.deepspeed_experts.")
    if not mark and (mark := "deepspeed_moe.experts.deepspeed_experts.") and name.startswith(mark):
        before, after = "", name.removeprefix(mark)
    number, _, rest = after.partition(".")
    try:
        layer = model.get_submodule(before) if mark in name else None
    except AttributeError:
        return None
    if not isinstance(layer, MoE) or layer.deepspeed_moe.group is None or not number.isdecimal():
        return None
    own = layer.num_local_experts
    return before + mark, int(number), f".{rest}", layer.deepspeed_moe.group.rank * own, own


def name_among_all(name: str, model: torch.nn.Module) -> str:
    """Of a parameter: the same with an expert's number among all ranks' experts, which is what checkpoints know."""
    if (found := _numbered(name, model)) is None:
        return name
    before, number, rest, first, _ = found
    return f"{before}{number + first}{rest}"


def gather_experts(state_dict: dict[str, torch.Tensor], model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A state_dict of this rank -> that of the whole model, all experts in it. Collective."""
    whole = {}
    for name, t in state_dict.items():
        if (found := _numbered(name, model)) is None:
            whole[name] = t
            continue
        before, number, rest, _, own = found
        group = expert_group(ranks_of_experts(model))
        parts = [torch.empty_like(t, memory_format=torch.contiguous_format) for _ in range(group.size)]
        dist.all_gather(parts, t.detach().contiguous(), group=group.process_group)
        whole.update({f"{before}{number + r * own}{rest}": part for r, part in enumerate(parts)})
    return whole


def own_experts(state_dict: dict[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    """A state_dict of the whole model -> this rank's: its experts, by their numbers here."""
    mine = {}
    for name, t in state_dict.items():
        if (found := _numbered(name, model)) is None:
            mine[name] = t
            continue
        before, number, rest, first, own = found
        if first <= number < first + own:
            mine[f"{before}{number - first}{rest}"] = t
    return mine


def share_gradients(parameters: Iterable[torch.nn.Parameter], spread: frozenset[int], group: ExpertGroup) -> list[Any]:
    """From now on every gradient that reaches one of `parameters` is averaged over the group's ranks: an expert's,
    which has all their tokens, is divided, the others' go to all. Then the mean over ranks with the same experts is the
    mean over all. Handles whose remove() ends it. Backwards of the ranks must reach the same parameters."""
    handles = []
    for p in parameters:
        if p.requires_grad:
            handles.append(p.register_hook((lambda g: g / group.size) if id(p) in spread else group.mean_of))
    return handles
