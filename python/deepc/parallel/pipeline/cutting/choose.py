"""Which cut of a chain of blocks is best."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from typing import Any

from .. import balance
from .chain import Chain, Unit

_GAIN = 0.98  # of the dearest stage's time, for which a block is cut inside


def costs_of(chain: Chain, units: Sequence[Unit], rounds: Sequence[Sequence[float]]) -> list[float]:
    """Seconds of each unit, of several rounds of clock(): what comes before the first and after the last counts to
    these, and units of one class and size count alike."""
    before, *costs, after = (statistics.median(times) for times in zip(*rounds))
    kinds: dict[Any, list[int]] = {}
    for i, unit in enumerate(units):
        size = sum(p.numel() for p in chain.parameters(unit))
        kinds.setdefault((type(chain.blocks[unit.block]), unit.half, size), []).append(i)
    for alike in kinds.values():
        middle = statistics.median(costs[i] for i in alike)
        for i in alike:
            costs[i] = middle
    costs[0] += before
    costs[-1] += after
    return costs


def joined(units: list[Unit], costs: list[float], whole: Collection[int]) -> tuple[list[Unit], list[float]]:
    """With the halves of the blocks in `whole` counted together."""
    joined: dict[Unit, float] = {}
    for unit, cost in zip(units, costs):
        unit = Unit(unit.block) if unit.block in whole else unit
        joined[unit] = joined.get(unit, 0.0) + cost
    return list(joined), list(joined.values())


def best(units: list[Unit], costs: list[float], stages: int) -> tuple[list[Unit], list[int]]:
    """The units, and the cuts between them. A block is cut inside where stages get cheaper by it."""
    whole, sums = joined(units, costs, {unit.block for unit in units})
    if len(whole) < stages <= len(units):
        return units, balance.cut(costs, stages)
    cuts, finer = balance.cut(sums, stages), balance.cut(costs, stages)

    def dearest(costs: Sequence[float], cuts: Sequence[int]) -> float:
        return max(sum(costs[a:b]) for a, b in zip(cuts, cuts[1:]))

    return (units, finer) if dearest(costs, finer) < _GAIN * dearest(sums, cuts) else (whole, cuts)
