"""The ranks among which experts are spread: each has some of them, and tokens travel to theirs and back (GShard,
arXiv:2006.16668, section 3.2; DeepSpeed-MoE, arXiv:2201.05596, section 5)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ...errors import ArgumentError
from ...nn import rows as rows_of
from ...nn.rows import Rows
from ...plan.mesh import Mesh
from ..axes import AxisGroup, axis_group


class ExpertGroup(AxisGroup):
    """The ranks among which one copy of the experts is spread."""

    def through(
        self,
        rows: torch.Tensor,
        counts: torch.Tensor,
        experts: Callable[[torch.Tensor, list[int]], list[torch.Tensor]],
        most: int,
    ) -> torch.Tensor:
        """rows [n, M] by expert, counts [E] of each (int64, on the CPU) -> their experts' outputs [n, M], in the order
        of rows; differentiable: an expert's gradients are those of all ranks' tokens, added up. most: rows that may
        come to this rank. Collective."""
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

        def computed() -> torch.Tensor:
            return torch.cat(experts(arrived.index_select(0, order), asked.sum(0).tolist())).index_select(0, back)

        out = rows_of.of(Rows(len(order), most, len(order)), computed)
        return _Exchange.apply(out, got, given, self.process_group)  # type: ignore[no-any-return,no-untyped-call]


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


def mesh_with_experts(mesh: Mesh, size: int) -> Mesh:
    """The mesh with experts spread over `size` of the ranks with the same part of the model. ArgumentError if these do
    not divide into such."""
    if (replicas := mesh.dp * mesh.sp) % size:
        whole = mesh.size == replicas
        raise ArgumentError(
            f"MoE: ep_size = {size} does not divide the {replicas} rank(s)"
            f"{'' if whole else ' that hold the same part of the model'}; use a size that does"
        )
    return dataclasses.replace(mesh, ep=size)


def expert_group(mesh: Mesh, backend: str = "deepc") -> ExpertGroup:
    """That of this rank along the mesh's expert axis: `ep` neighbours of the data and the sequence axis with the same
    stage and tensor shards; made once for a default group. Collective over all ranks."""
    return axis_group(mesh, "ep", ExpertGroup.of, backend)
