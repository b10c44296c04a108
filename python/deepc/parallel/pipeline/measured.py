"""When each action of a batch ran, beside what the schedule's simulation says of the same costs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ...plan.schedule import Costs, Load, Schedule, Span, Timeline


class Measured(NamedTuple):
    """Of one batch through one pipeline. timeline: when each action of each rank computed, in seconds from the first;
    receiving what it works on is not counted. costs: of each stage, the medians over its micro-batches. predicted: the
    simulation of `schedule` with these costs and no time for messages. Ranks of several nodes have clocks of their own,
    and their rows are then shifted."""

    loss: torch.Tensor
    schedule: Schedule
    timeline: Timeline
    costs: tuple[Costs, ...]
    predicted: Timeline


def measured(
    loss: torch.Tensor,
    schedule: Schedule,
    mine: Sequence[tuple[float, float]],
    column: Sequence[int],
    gather: Callable[[torch.Tensor], torch.Tensor],
) -> Measured:
    """mine: (begin, end) of this rank's actions. column: the pipeline's ranks among those that `gather` gathers, a row
    of float64 from each. Collective."""
    row = torch.zeros(2 * max(map(len, schedule.ranks)), dtype=torch.float64, device="cpu")
    row[: 2 * len(mine)] = torch.tensor(mine, dtype=torch.float64, device="cpu").flatten()
    rows = gather(row).view(-1, row.numel() // 2, 2)[list(column)]
    start = min(float(rows[r, 0, 0]) for r in range(len(column)))
    spans = tuple(
        tuple(Span(begin - start, end - start) for begin, end in rows[r, : len(actions)].tolist())
        for r, actions in enumerate(schedule.ranks)
    )
    peaks = schedule.check()
    loads = tuple(
        Load(sum(s.end - s.start for s in row_), row_[0].start, row_[-1].end, peak) for row_, peak in zip(spans, peaks)
    )
    timeline = Timeline(loads, max(load.last for load in loads), spans)
    costs = costs_of(schedule, spans)
    return Measured(loss, schedule, timeline, costs, schedule.simulate(costs))


def costs_of(schedule: Schedule, spans: Sequence[Sequence[Span]]) -> tuple[Costs, ...]:
    """The median time of each kind of action in each stage; a whole backward counts as its first half."""
    times: dict[tuple[int, str], list[float]] = {}
    for actions, row in zip(schedule.ranks, spans):
        for action, span in zip(actions, row):
            kind = "I" if action.kind == "B" else action.kind
            times.setdefault((action.stage, kind), []).append(span.end - span.start)
    middle = {key: statistics.median(values) for key, values in times.items()}
    return tuple(Costs(*(middle.get((stage, kind), 0.0) for kind in "FIW")) for stage in range(schedule.stages))
