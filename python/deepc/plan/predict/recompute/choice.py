"""Recomputation by budget: which blocks keep what autograd saves, which compute it again in backward, and of which it
lies on disk meanwhile. Data only."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

MOST_STATES = 4096  # of the search, after a call; beyond it bytes are rounded up
TRIED = 32  # bounds of what a forward may hold at its end, where several wait for their backwards


@dataclass(frozen=True)
class Call:
    """A block's call in a forward. Bytes: `saved` by autograd inside, beside `inputs`, which nothing before it held;
    `outside`: what the forward saved before, outside of all blocks; `movable`: of `saved`, what could lie on disk;
    `moving`: of that, what is in memory on its way there or back at most. seconds: of the forward."""

    saved: int
    inputs: int
    outside: int
    seconds: float
    movable: int = 0
    moving: int = 0


@dataclass(frozen=True)
class Rates:
    """Of a disk. Seconds per byte: of a write, of a read, and `busy`, what both take of the processor together."""

    write: float
    read: float
    busy: float


@dataclass(frozen=True)
class Choice:
    """recomputed, moved (to disk): per call; peak: bytes held at most, seconds: spent on computing again and on waiting
    for the disk."""

    recomputed: tuple[bool, ...]
    peak: int
    seconds: float
    moved: tuple[bool, ...] = ()


def peak(calls: Sequence[Call], outside: int, recomputed: Sequence[bool], moved: Sequence[bool] = ()) -> int:
    """Bytes that a forward and its backward hold at most. outside: saved by the whole forward outside of the calls.

    A call that keeps holds its inputs and what it saved, from its forward until its backward; one that is recomputed
    its inputs, and the rest while its backward runs, when all behind it has gone. One whose values lie on disk holds
    them in its forward and in its backward, and beside them what is on its way."""
    moved = moved or (False,) * len(calls)
    held = most = 0
    for call, again, away in zip(calls, recomputed, moved, strict=True):
        if again or away:
            most = max(most, call.outside + held + call.inputs + call.saved)
        held += _held_by(call, again, away)
    return max(most, outside + held) + _on_their_way(calls, moved)


def held(calls: Sequence[Call], outside: int, recomputed: Sequence[bool], moved: Sequence[bool] = ()) -> int:
    """Bytes that a forward has left in memory at its end, which its backward finds."""
    moved = moved or (False,) * len(calls)
    return outside + sum(_held_by(c, again, away) for c, again, away in zip(calls, recomputed, moved, strict=True))


def _held_by(call: Call, again: bool, away: bool) -> int:
    return call.inputs + (0 if again else call.saved - call.movable * away)


def _on_their_way(calls: Sequence[Call], moved: Sequence[bool]) -> int:
    return max((c.moving for c, away in zip(calls, moved) if away), default=0)


def waiting(calls: Sequence[Call], nbytes: int, rates: Rates) -> float:
    """Seconds that `nbytes` on disk cost: writes go on beside the forward, reads beside the backward, which takes twice
    as long; what is more than that is waited for."""
    forward = sum(c.seconds for c in calls)
    late = max(0.0, nbytes * rates.write - forward) + max(0.0, nbytes * rates.read - 2 * forward)
    return late + nbytes * rates.busy


def cost(
    calls: Sequence[Call], recomputed: Sequence[bool], moved: Sequence[bool] = (), rates: Rates | None = None
) -> float:
    """Seconds of a choice."""
    seconds = sum(c.seconds for c, again in zip(calls, recomputed) if again)
    nbytes = sum(c.movable for c, away in zip(calls, moved) if away)
    return seconds + (waiting(calls, nbytes, rates) if rates is not None and nbytes else 0.0)


def least(calls: Sequence[Call], outside: int) -> int:
    """The smallest budget: where every call is recomputed."""
    return peak(calls, outside, [True] * len(calls))


class _State(NamedTuple):
    """Of a prefix of the calls: bytes held, seconds of recomputing, bytes on disk; and the path: (the path before, the
    last call's way), () at the start."""

    held: int
    seconds: float
    away: int
    path: tuple[Any, ...]


def all_again(calls: Sequence[Call], outside: int) -> Choice:
    """Every call recomputed."""
    again = (True,) * len(calls)
    return Choice(again, peak(calls, outside, again), cost(calls, again))


def beside(budget: int, in_flight: int, ends: int) -> int:
    """What of `budget` bytes one forward and its backward may hold at most, where up to `in_flight` forwards wait for
    their backwards, itself among them, and each has `ends` bytes left at its end."""
    return budget - (in_flight - 1) * ends


def peak_together(
    forwards: Sequence[tuple[Sequence[Call], int]],
    ways: Sequence[tuple[Sequence[bool], Sequence[bool]]],
    in_flight: int,
) -> int:
    """Bytes that up to `in_flight` of `forwards` (any of them; (calls, outside)) hold at most: one at its peak, the
    others at their ends. ways: (recomputed, moved) of each."""
    ends = max(held(*forward, *way) for forward, way in zip(forwards, ways, strict=True))
    return (in_flight - 1) * ends + max(peak(*forward, *way) for forward, way in zip(forwards, ways, strict=True))


def choose_together(
    forwards: Sequence[tuple[Sequence[Call], int]], budget: int, in_flight: int, rates: Rates | None = None
) -> tuple[int, list[Choice]] | None:
    """(bytes that a forward holds at its end at most, the choice for each of `forwards`), where up to `in_flight` of
    them, any of them, have run and wait for their backwards; None if the budget is too small. forwards: (calls,
    outside). They cost the least time together, of 1 + TRIED bounds between the least and equal parts."""
    least_end = max(held(calls, outside, [True] * len(calls)) for calls, outside in forwards)
    best: tuple[float, int, list[Choice]] | None = None
    for k in range(TRIED + 1):
        ends = least_end + (budget // in_flight - least_end) * k // TRIED
        most = beside(budget, in_flight, ends)
        found = [choose(calls, outside, most, rates, ends) for calls, outside in forwards]
        choices = [c for c in found if c is not None]
        seconds = sum(c.seconds for c in choices)
        if len(choices) == len(forwards) and (best is None or seconds < best[0]):
            best = seconds, ends, choices
    return None if best is None else best[1:]


def least_together(forwards: Sequence[tuple[Sequence[Call], int]], in_flight: int) -> int:
    """The smallest budget of choose_together."""
    return peak_together(forwards, [([True] * len(calls), ()) for calls, _ in forwards], in_flight)


def choose(
    calls: Sequence[Call], outside: int, budget: int, rates: Rates | None = None, ends: int | None = None
) -> Choice | None:
    """What stays within `budget` bytes and costs the least time, or None if nothing does. rates: of the disk that
    values may go to; None: there is none. ends: bytes at the forward's end, where less than the budget.

    Dynamic programming over the calls in order. What the rest needs to know of a prefix is the bytes that it holds,
    and what it costs: of prefixes that are no better than another in anything, one is enough. Exact as long as no more
    than MOST_STATES of them differ, beyond that bytes are rounded up to 1/MOST_STATES of the budget: still within it.
    (Equal blocks have as many as blocks, with a disk half their square.)"""
    again = [True] * len(calls)
    if least(calls, outside) > budget or (ends is not None and held(calls, outside, again) > ends):
        return None
    ends = budget if ends is None else min(ends, budget)
    best: Choice = _search(calls, outside, budget, None, ends)
    if rates is not None:
        # What is on its way is the largest call's that goes: one search for each such largest, of the calls up to it.
        for most in sorted({c.moving for c in calls if c.movable}):
            some = [c if c.moving <= most else replace(c, movable=0) for c in calls]
            found = _search(some, outside, budget - most, rates, min(ends, budget - most))
            if found is not None and found.seconds < best.seconds:
                best = replace(found, peak=peak(calls, outside, found.recomputed, found.moved))
    return best


def _search(calls: Sequence[Call], outside: int, budget: int, rates: Rates | None, ends: int) -> Any:
    """The best within `budget`, and `ends` at the end, beside which there is what is on its way; None only with
    `rates`."""
    inputs_left = sum(c.inputs for c in calls)
    states = [_State(0, 0.0, 0, ())]
    for call in calls:
        inputs_left -= call.inputs
        after: list[_State] = []
        for held, seconds, away, path in states:
            whole = held + call.inputs + call.saved
            if call.outside + whole <= budget:
                after.append(_State(held + call.inputs, seconds + call.seconds, away, (path, 1)))
                if rates is not None and call.movable:
                    after.append(_State(whole - call.movable, seconds, away + call.movable, (path, 2)))
            if outside + whole + inputs_left <= ends:
                after.append(_State(whole, seconds, away, (path, 0)))
        states = _undominated(after)
        if len(states) > MOST_STATES:
            step = max(1, budget // MOST_STATES)
            states = _undominated([s._replace(held=-(-s.held // step) * step) for s in states])
    fitting = [s for s in states if outside + s.held <= ends]
    if not fitting and rates is not None:
        return None
    if not fitting:  # rounding left nothing: all are recomputed, which fits
        ways = [1] * len(calls)
    else:
        path = min(fitting, key=lambda s: s.seconds + (waiting(calls, s.away, rates) if rates is not None else 0)).path
        ways = []
        while path:
            path, way = path
            ways.append(way)
        ways.reverse()
    again, away_ = tuple(w == 1 for w in ways), tuple(w == 2 for w in ways)
    moved = away_ if any(away_) else ()
    return Choice(again, peak(calls, outside, again, moved), cost(calls, again, moved, rates), moved)


def _undominated(states: list[_State]) -> list[_State]:
    """Those that no other one beats in bytes held, seconds and bytes on disk. Of those that hold less than one at hand
    the best pairs of the other two are kept as a staircase: seconds rise and bytes fall."""
    out: list[_State] = []
    seconds: list[float] = []
    aways: list[int] = []
    for state in sorted(states, key=lambda s: (s.held, s.seconds, s.away)):
        at = bisect.bisect_right(seconds, state.seconds)
        if at and aways[at - 1] <= state.away:
            continue
        end = at
        while end < len(seconds) and aways[end] >= state.away:
            end += 1
        if at and seconds[at - 1] == state.seconds:  # the same time with more bytes
            at -= 1
        seconds[at:end], aways[at:end] = [state.seconds], [state.away]
        out.append(state)
    return out
