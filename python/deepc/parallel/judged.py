"""The parts of a model (stages of a pipeline, shards of tensors, experts) as the judgement of a step sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..errors import UnsupportedError
from ..plan.mesh import Mesh
from ..zero.parameters.param import Released
from ..zero.step.norm import Ride
from ..zero.tiers.agree import together

if TYPE_CHECKING:
    from ..comm.groups import Group
    from ..errors import DiskError
    from ..zero.step.norm import Rider


class Parts:
    """zero/step/norm.py's Parts, over a group of all ranks: one part for each pipeline, tensor and expert
    coordinate, experts fastest. repeated: trained parameters of this rank that the rank with tensor and expert
    coordinate 0 counts."""

    def __init__(self, everyone: Group, mesh: Mesh) -> None:
        self._everyone, self._mesh = everyone, mesh
        at = mesh.coordinates(everyone.rank)
        self.here = (at.pp * mesh.tp + at.tp) * mesh.ep + at.ep
        self.repeated: frozenset[int] = frozenset()
        self._firsts = [
            r for s in range(mesh.pp) for t in range(mesh.tp) for r in mesh.group("ep", mesh.rank(pp=s, tp=t))
        ]

    def together(self, failure: DiskError | None) -> None:
        together(self._everyone, failure)

    def totals(self, mine: float, riders: Sequence[Rider] = ()) -> list[float]:
        ride = Ride(riders)
        message = ride.message(torch.tensor([mine], dtype=torch.float64, device="cpu"), torch.device("cpu"))
        gathered = self._everyone.gather_all(message)
        ride.arrive(gathered)
        return [float(gathered[rank, -1]) for rank in self._firsts]

    def name(self, part: int) -> str:
        mesh = self._mesh
        stage, shard, experts = part // mesh.ep // mesh.tp, part // mesh.ep % mesh.tp, part % mesh.ep
        words = [f"pipeline stage {stage}"] * (mesh.pp > 1) + [f"tensor shard {shard}"] * (mesh.tp > 1)
        words += [f"experts of rank {experts}"] * (mesh.ep > 1)
        return ", ".join(words)


def refuse_released(model: torch.nn.Module, key: str) -> None:
    """UnsupportedError for a model of whose parameters this rank has no values, where it is to be cut."""
    if name := next((n for n, p in model.named_parameters() if isinstance(p, Released) or p.is_meta), ""):
        raise UnsupportedError(
            f"{key}: parameter '{name}' has no values on this rank, so nothing can be cut (it is on the meta device,"
            " or zero.Init has put it on disk or on nodes with different numbers of ranks); make the model under"
            " deepc.zero.Init on ranks that share memory, where it exists once a node, or without it"
        )
