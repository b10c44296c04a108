"""The parts of a model, in stages of a pipeline and shards of tensors, as the judgement of a step sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..plan.mesh import Mesh
from ..zero.step.norm import Ride

if TYPE_CHECKING:
    from ..comm.groups import Group
    from ..zero.step.norm import Rider


class Parts:
    """zero/step/norm.py's Parts, over a group of all ranks: one part for each pipeline and tensor coordinate, tensors
    fastest. repeated: trained parameters of this rank that the rank of its group with tensor coordinate 0 counts."""

    def __init__(self, everyone: Group, mesh: Mesh) -> None:
        self._everyone, self._mesh = everyone, mesh
        at = mesh.coordinates(everyone.rank)
        self.here = at.pp * mesh.tp + at.tp
        self.repeated: frozenset[int] = frozenset()
        self._firsts = [mesh.rank(pp=s, tp=t) for s in range(mesh.pp) for t in range(mesh.tp)]

    def totals(self, mine: float, riders: Sequence[Rider] = ()) -> list[float]:
        ride = Ride(riders)
        message = ride.message(torch.tensor([mine], dtype=torch.float64), torch.device("cpu"))
        gathered = self._everyone.gather_all(message)
        ride.arrive(gathered)
        return [float(gathered[rank, -1]) for rank in self._firsts]

    def name(self, part: int) -> str:
        stage, shard = divmod(part, self._mesh.tp)
        words = [f"pipeline stage {stage}"] * (self._mesh.pp > 1) + [f"tensor shard {shard}"] * (self._mesh.tp > 1)
        return ", ".join(words)
