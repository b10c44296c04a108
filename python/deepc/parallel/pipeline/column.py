"""The stages of a pipeline as the judgement of a step sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ...plan.mesh import Mesh
from ...zero.step.norm import Ride

if TYPE_CHECKING:
    from ...comm.groups import Group
    from ...zero.step.norm import Rider


class Column:
    """zero/step/norm.py's Stages, over a group of all ranks."""

    def __init__(self, everyone: Group, mesh: Mesh) -> None:
        self._everyone = everyone
        self.here = mesh.coordinates(everyone.rank).pp
        self._firsts = [mesh.rank(pp=s) for s in range(mesh.pp)]

    def totals(self, mine: float, riders: Sequence[Rider] = ()) -> list[float]:
        ride = Ride(riders)
        message = ride.message(torch.tensor([mine], dtype=torch.float64), torch.device("cpu"))
        gathered = self._everyone.gather_all(message)
        ride.arrive(gathered)
        return [float(gathered[rank, -1]) for rank in self._firsts]
