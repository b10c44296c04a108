"""The ranks among which experts are spread: each has some of them, and tokens travel to theirs and back (GShard,
arXiv:2006.16668, section 3.2; DeepSpeed-MoE, arXiv:2201.05596, section 5)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...errors import ArgumentError
from ...nn import rows as rows_of
from ...nn.rows import Rows
from ...plan.mesh import Mesh
from ..axes import AxisGroup, axis_group, without_values


class ExpertGroup(AxisGroup):
    """The ranks among which one copy of the experts is spread."""

    def through(
        self,
        rows: torch.Tensor,
        counts: Sequence[int],
        experts: Callable[[torch.Tensor, list[int]], list[torch.Tensor]],
        most: int,
    ) -> torch.Tensor:
        """rows [n, M] by expert, counts [E] of each -> their experts' outputs [n, M], in the order of rows;
        differentiable: an expert's gradients are those of all ranks' tokens, added up. most: rows that may come to this
        rank. Collective."""
        each = len(counts) // self.size
        wanted = [list(counts[r * each : (r + 1) * each]) for r in range(self.size)]
        asked = self.asked(wanted, rows)
        given, got = [sum(w) for w in wanted], [sum(a) for a in asked]
        arrived = _Exchange.apply(rows, given, got, self)  # type: ignore[no-untyped-call]
        of_expert = torch.arange(each, device="cpu").repeat(self.size)
        of_expert = of_expert.repeat_interleave(torch.tensor(asked, device="cpu").view(-1), output_size=sum(got))
        order = of_expert.argsort(stable=True).to(rows.device)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=rows.device)

        def computed() -> torch.Tensor:
            mine = [sum(of_one) for of_one in zip(*asked)]
            return torch.cat(experts(arrived.index_select(0, order), mine)).index_select(0, back)

        out = rows_of.of(Rows(len(order), most, len(order)), computed)
        return _Exchange.apply(out, got, given, self)  # type: ignore[no-any-return,no-untyped-call]

    def asked(self, wanted: list[list[int]], rows: torch.Tensor) -> list[list[int]]:
        """wanted[r]: rows for each expert of rank r -> what each rank has for this one's. Of `rows` without values (a
        dry run), and where the other ranks are not there (no process group), all have as many. Collective."""
        if without_values(rows) or self.process_group is None:
            return [wanted[self.rank]] * self.size
        there = torch.tensor(wanted, device="cpu").to(rows.device)
        here = torch.empty_like(there)
        dist.all_to_all_single(here, there, group=self.process_group)
        found: list[list[int]] = here.tolist()
        return found

    def exchanged(self, rows: torch.Tensor, given: list[int], got: list[int]) -> torch.Tensor:
        """given[r] rows one after the other go to rank r, got[r] come from it. Collective."""
        out, rows = rows.new_empty(sum(got), rows.shape[1]), rows.contiguous()
        if not without_values(rows):
            dist.all_to_all_single(out, rows, got, given, group=self.process_group)
        return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, given: list[int], got: list[int], group: ExpertGroup) -> torch.Tensor:
        ctx.given, ctx.got, ctx.group = given, got, group
        return group.exchanged(rows, given, got)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.group.exchanged(gradient, ctx.got, ctx.given), None, None, None


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
