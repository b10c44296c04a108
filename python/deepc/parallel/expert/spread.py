"""Experts spread over neighbouring data-parallel ranks: each has some of them, and tokens travel to theirs and back
(GShard, arXiv:2006.16668, section 3.2; DeepSpeed-MoE, arXiv:2201.05596, section 5)."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from ...errors import ArgumentError, UnsupportedError
from ...plan.mesh import Mesh
from .layer import Experts, MoE

_opened: weakref.WeakKeyDictionary[Any, dict[int, ExpertGroup]] = weakref.WeakKeyDictionary()


class ExpertGroup:
    """The ranks among which one copy of the experts is spread. Layers refer to it; copies of a model share it."""

    def __init__(self, process_group: Any) -> None:
        self.process_group = process_group
        self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertGroup:
        return self

    def through(self, rows: torch.Tensor, counts: torch.Tensor, experts: Experts) -> torch.Tensor:
        """rows [n, M] by expert, counts [E] of each (int64, on the CPU) -> their experts' outputs [n, M], in the order
        of rows; differentiable: an expert's gradients are those of all ranks' tokens, added up. Collective."""
        wanted = counts.view(self.size, -1)
        asked = torch.empty_like(wanted)  # [source, expert of this rank]
        device = rows.device
        here = asked.to(device)
        dist.all_to_all_single(here, wanted.to(device), group=self.process_group)
        asked.copy_(here)
        given, got = wanted.sum(1).tolist(), asked.sum(1).tolist()
        arrived = _Exchange.apply(rows, given, got, self.process_group)  # type: ignore[no-untyped-call]
        of_expert = torch.arange(asked.shape[1]).repeat(self.size).repeat_interleave(asked.view(-1))
        order = of_expert.argsort(stable=True).to(device)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=device)
        out = torch.cat(experts(arrived.index_select(0, order), asked.sum(0).tolist())).index_select(0, back)
        return _Exchange.apply(out, got, given, self.process_group)  # type: ignore[no-any-return,no-untyped-call]

    def mean_of(self, t: torch.Tensor) -> torch.Tensor:
        """All ranks' `t`, averaged, in new memory. Collective."""
        out = t.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, group=self.process_group)
        return out.div_(self.size)


class _Exchange(torch.autograd.Function):
    """given[r] rows one after the other go to rank r, got[r] come from it."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, given: list[int], got: list[int], group: Any) -> torch.Tensor:
        ctx.given, ctx.got, ctx.group = given, got, group
        return _exchanged(rows, given, got, group)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _exchanged(gradient, ctx.got, ctx.given, ctx.group), None, None, None


def _exchanged(rows: torch.Tensor, given: list[int], got: list[int], group: Any) -> torch.Tensor:
    out = rows.new_empty(sum(got), rows.shape[1])
    dist.all_to_all_single(out, rows.contiguous(), got, given, group=group)
    return out


def expert_group(size: int, backend: str = "deepc") -> ExpertGroup:
    """The group of this rank and its neighbours, `size` ranks; made once. Collective over all ranks. ArgumentError for
    a size that does not divide the number of ranks."""
    world = dist.get_world_size()
    if world % size:
        raise ArgumentError(f"MoE: ep_size = {size} does not divide the {world} rank(s); use a size that does")
    made = _opened.setdefault(dist.group.WORLD, {})
    if size not in made:
        mesh, me = Mesh(dp=world, ep=size), dist.get_rank()
        for ranks in mesh.groups("ep"):
            opened = dist.new_group(list(ranks), backend=backend)
            if me in ranks:
                made[size] = ExpertGroup(opened)
    return made[size]


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
