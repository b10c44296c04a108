"""Which cut of a chain of blocks is best."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from .. import balance
from .chain import Chain, Unit

_GAIN = 0.98  # of the dearest stage's time, for which a block is cut inside
_EVEN = 1.03  # the dearest stage over the cheapest, up to which a gain of less is not worth finer parts


def costs_of(chain: Chain, units: Sequence[Unit], rounds: Sequence[Sequence[float]]) -> list[float]:
    """Seconds of each unit, of several rounds of clock(): what comes before the first and after the last counts to
    these, and units of one class and size count alike. The least of all rounds: other work, and fresh pages of a large
    gradient that training's heap keeps, only add."""
    before, *costs, after = (min(times) for times in zip(*rounds))
    kinds: dict[Any, list[int]] = {}
    for i, unit in enumerate(units):
        size = sum(p.numel() for p in chain.parameters(unit))
        kinds.setdefault((type(chain.blocks[unit.block]), unit.part, size), []).append(i)
    for alike in kinds.values():
        middle = statistics.median(costs[i] for i in alike)
        for i in alike:
            costs[i] = middle
    costs[0] += before
    costs[-1] += after
    return costs


def joined(
    units: Sequence[Unit], costs: Sequence[float], places: Callable[[int], Collection[int]]
) -> tuple[list[Unit], list[float]]:
    """With the parts of each block counted together between the places places(block), by their numbers; without any it
    is whole."""
    joined: dict[Unit, float] = {}
    for unit, cost in zip(units, costs):
        if unit.part is not None:
            kept = places(unit.block)
            unit = Unit(unit.block, sum(k < unit.part for k in kept) if kept else None)
        joined[unit] = joined.get(unit, 0.0) + cost
    return list(joined), list(joined.values())


class Cutting(NamedTuple):
    """chain: with the places inside of blocks that its units know. cuts: between the units."""

    chain: Chain
    units: list[Unit]
    cuts: list[int]


def best(chain: Chain, units: Sequence[Unit], costs: Sequence[float], stages: int) -> Cutting:
    """Blocks are cut inside, between halves or further, where stages get cheaper by it. ArgumentError for more stages
    than parts."""
    found: tuple[float, float, Cutting] | None = None  # of the dearest stage, and over the cheapest
    levels: list[dict[int, list[int]]] = [
        {},
        {i: [k for k, point in enumerate(points) if point.halves] for i, points in chain.points.items()},
        {i: list(range(len(points))) for i, points in chain.points.items()},
    ]
    for kept in levels:
        coarse, sums = joined(units, costs, lambda i, kept=kept: kept.get(i, ()))  # type: ignore[misc]  # of this turn
        if len(coarse) < stages and kept is not levels[-1]:
            continue
        cuts = balance.cut(sums, stages, balance.ALIKE)
        times = [sum(sums[a:b]) for a, b in zip(cuts, cuts[1:])]
        dearest, uneven = max(times), max(times) / max(min(times), 1e-30)  # of parameters, a stage may have none
        if (
            found is None
            or dearest < _GAIN * found[0]
            or (found[1] > _EVEN and dearest < found[0] and uneven < found[1])
        ):
            known = {i: [chain.points[i][k] for k in numbers] for i, numbers in kept.items()}
            found = dearest, uneven, Cutting(chain._replace(points=known), coarse, cuts)
    assert found is not None  # the last turn always finds one, or raises
    return found[2]
