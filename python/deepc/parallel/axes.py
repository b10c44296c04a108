"""The process groups of a mesh."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from ..comm.c10d.tensors import are_fake
from ..plan.mesh import Mesh
from ..zero.parameters.gathered import broadcast_whole

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..comm.internode.hierarchy import Hierarchy
    from ..comm.shared import Comm

T = TypeVar("T")
_opened: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def axis_group(mesh: Mesh, axis: str, of: Callable[[Any], T], backend: str = "deepc") -> T:
    """of(the process group of this rank along an axis of the mesh), each made once for a default group, an axis and
    what ranks it joins. Collective over all ranks."""
    process_group = axis_process_group(mesh, axis, backend)
    made = _opened[dist.group.WORLD]
    if (key := (axis, mesh.groups(axis), of)) not in made:
        made[key] = of(process_group)
    found: T = made[key]
    return found


def axis_process_group(mesh: Mesh, axis: str, backend: str = "deepc") -> Any:
    """The process group itself."""
    groups = mesh.groups(axis)
    made = _opened.setdefault(dist.group.WORLD, {})
    if (key := (axis, groups)) not in made:
        me = dist.get_rank()
        for ranks in groups:
            opened = dist.new_group(list(ranks), backend=backend)
            if me in ranks:
                made[key] = opened
    return made[key]


def opened_comms(mesh: Mesh) -> list[Comm | Hierarchy]:
    """Of this rank's groups along the axes of the mesh that exist by now: what breaks if a rank gives up."""
    made = _opened.get(dist.group.WORLD, {})
    shared = (axis for axis in ("tp", "sp", "ep") if getattr(mesh, axis) > 1)
    groups = (made.get((axis, mesh.groups(axis))) for axis in shared)
    return [comm for g in groups if (comm := getattr(g, "open_comm", None)) is not None]


class AxisGroup:
    """A process group (backend "deepc", or any other that has the device) of the ranks along an axis. On one node its
    sums go to the C core: they run where the tensors lie, in fp32 in the order of ranks, with equal bits on all of
    them. Meta tensors (of a pipeline's other stages) and fake ones (of a dry run) go nowhere. Layers refer to it;
    copies of a model share it."""

    def __init__(self, process_group: dist.ProcessGroup | None, rank: int, size: int) -> None:
        """process_group: None for one rank."""
        self.process_group, self.rank, self.size = process_group, rank, size
        self._comm: Comm | None = getattr(process_group, "live_comm", None)

    @classmethod
    def of(cls, process_group: dist.ProcessGroup) -> Self:
        return cls(process_group, dist.get_rank(process_group), dist.get_world_size(process_group))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def comms(self) -> list[Comm]:
        """What breaks if a rank gives up."""
        return [self._comm] if self._comm is not None else []

    def _core(self, t: torch.Tensor) -> Comm | None:
        return self._comm if t.device.type == "cpu" and type(t) in (torch.Tensor, torch.nn.Parameter) else None

    def add_up(self, t: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """All ranks' `t` (contiguous) added up, in its memory. op: "sum" or "max"."""
        if self.size > 1 and not without_values(t):
            if (core := self._core(t)) is not None:
                core.all_reduce(t, op)
            else:
                dist.all_reduce(t, dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX, group=self.process_group)
        return t

    def sum_of(self, t: torch.Tensor) -> torch.Tensor:
        """All ranks' `t` added up, in new memory."""
        if self.size == 1:
            return t
        if without_values(t):
            return torch.empty_like(t)
        t = t.contiguous()
        if (core := self._core(t)) is not None:
            core.all_reduce(t, out=(out := torch.empty_like(t)))
            return out
        return self.add_up(t.clone())

    def spread(self, t: torch.Tensor) -> None:
        """The first rank's `t`, a parameter's or buffer's, comes to all."""
        if self.size > 1:
            broadcast_whole(self, t, 0)

    def broadcast(self, t: torch.Tensor, root: int) -> None:
        """`t` (contiguous) is that of rank `root` of the group."""
        dist.broadcast(t, group_src=root, group=self.process_group)


def without_values(t: torch.Tensor) -> bool:
    return t.is_meta or are_fake([t])
