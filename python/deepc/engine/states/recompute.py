"""Recomputation by budget (activation_checkpointing.budget) in an engine: that of plan/predict/recompute with its
clock, its disk, and the ranks that compute a block together, which all take the same choice."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable
from typing import Any

import torch

from ...core.foreign import private
from ...errors import ConfigError
from ...offload.spill import AHEAD
from ...parallel.axes import AxisGroup, axis_group
from ...parallel.expert.group import expert_group
from ...parallel.tensor.group import TensorGroup, tensor_group
from ...plan.mesh import Mesh
from ...plan.predict.recompute import recomputation
from ...plan.predict.recompute.blocks import find_blocks
from ...plan.predict.recompute.choice import Call, Rates
from ...zero.parameters.param import Released
from .activations import Moves

__all__ = ["KEY", "Recomputation", "find_blocks", "largest_over"]

KEY = recomputation.KEY


def largest_over(mesh: Mesh) -> Callable[[torch.Tensor], None] | None:
    """What makes of a tensor (fp64) the largest of its elements over the ranks that compute blocks together with this
    one: that share tensors, sequences or experts. None: there are no others. Collective over all ranks."""
    groups: list[AxisGroup] = [tensor_group(mesh)] if mesh.tp > 1 else []
    if mesh.sp > 1:
        groups.append(axis_group(mesh, "sp", TensorGroup.of))
    if mesh.ep > 1:
        groups.append(expert_group(mesh))

    def largest(t: torch.Tensor) -> None:
        for _ in range(rounds(mesh)):
            for group in groups:
                group.add_up(t, "max")

    return largest if groups else None


def rounds(mesh: Mesh) -> int:
    """How often groups of a sequence and of experts, one after the other, tell what they know until all of them know
    it: where neither lie in the other they overlap like bricks, and it comes a brick further each time."""
    return math.lcm(mesh.sp, mesh.ep) // max(mesh.sp, mesh.ep)


class Recomputation(recomputation.Recomputation):
    """most: makes of a tensor the largest of its elements over the ranks that compute a block together (in its memory;
    collective over them); None: each rank decides for itself. moves: what takes saved values to a disk, or None.
    blocks: what may be recomputed of a pipeline's part; None: find them. own_data: those ranks get batches of their own
    (they share experts): each forward asks all of them what they got."""

    def __init__(
        self,
        module: torch.nn.Module,
        budget: int | None,
        most: Callable[[torch.Tensor], Any] | None = None,
        moves: Moves | None = None,
        blocks: list[torch.nn.Module] | None = None,
        own_data: bool = False,
    ) -> None:
        self._most, self._moves, self._own_data = most, moves, own_data
        self._rates: Rates | None = None
        if moves is not None:
            self.movable_from = moves.least
        if blocks is not None:  # of a pipeline, where a backward reads while another forward's values are written
            self.on_their_way += AHEAD
        super().__init__(module, budget, blocks)

    @property
    def on_disk(self) -> bool:
        """Whether what blocks save may go to disk."""
        return self._moves is not None

    def clock(self, args: tuple[Any, ...]) -> float:
        for device in {a.device for a in args if isinstance(a, torch.Tensor) and a.device.type == "cuda"}:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def storage(self, x: torch.Tensor) -> tuple[int, int] | None:
        return None if isinstance(x, Released) else super().storage(x)

    def for_all(self, shapes: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        if self._most is None or not self._own_data:
            return shapes
        kind = zlib.crc32(repr([len(s) for s in shapes]).encode())
        told = torch.tensor([kind, -kind, sum(map(math.prod, shapes))], dtype=torch.float64, device="cpu")
        self._most(told)
        if told[0] != -told[1]:  # other tensors on other ranks: their elements are counted
            return ((int(told[2]),),)
        sizes = torch.tensor([n for s in shapes for n in s], dtype=torch.float64, device="cpu")
        self._most(sizes)
        largest = iter(sizes.long().tolist())
        return tuple(tuple(next(largest) for _ in s) for s in shapes)

    def agreed(self, calls: list[Call], outside: int) -> tuple[list[Call], int]:
        if self._most is None:
            return calls, outside
        if self._own_data:
            counts = torch.tensor([len(calls), -len(calls)], dtype=torch.float64, device="cpu")
            self._most(counts)
            if counts[0] != -counts[1]:
                raise ConfigError(
                    f"{KEY}: ranks that share experts have called from {int(-counts[1])} to {int(counts[0])} blocks in"
                    f" one forward (this one {len(calls)}), and what is recomputed must be the same on all of them. Let"
                    " all call the same blocks, or remove the key"
                )
        rows = [[c.saved, c.inputs, c.outside, c.seconds, c.movable, c.moving] for c in calls]
        # float64 is exact up to 2**53 bytes
        told = torch.tensor([*rows, [outside, 0, 0, 0, 0, 0]], dtype=torch.float64, device="cpu")
        self._most(told)
        *rows, last = told.tolist()
        found = [Call(int(s), int(i), int(o), t, int(m), int(g)) for s, i, o, t, m, g in rows]
        return recomputation.alike(found), int(last[0])

    def begin(self) -> None:
        if self._moves is not None:
            self._moves.begin()

    def rates(self) -> Rates | None:
        if self._moves is None:
            return None
        if self._rates is None:
            self._rates = self._moves.measure()
            if self._most is not None:
                told = torch.tensor(
                    [self._rates.write, self._rates.read, self._rates.busy], dtype=torch.float64, device="cpu"
                )
                self._most(told)
                self._rates = Rates(*told.tolist())
        return self._rates

    @private.uncompiled_itself
    def moved(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        assert self._moves is not None
        stay = {s[0] for s in map(self.storage, recomputation.tensors_of(function, args)) if s is not None}
        with self._moves.hooks(stay, self):
            return function(*args)
