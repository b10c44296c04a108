"""Recomputation by budget: which blocks keep what autograd saves, and which compute it again in backward. Data only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# bytes held, seconds, and the path: (the path before, whether the last call is recomputed), () at the start
_State = tuple[int, float, tuple[Any, ...]]
MOST_STATES = 4096  # of the search, after a call; beyond it bytes are rounded up


@dataclass(frozen=True)
class Call:
    """A block's call in a forward. Bytes: `saved` by autograd inside, beside `inputs`, which nothing before it held;
    `outside`: what the forward saved before, outside of all blocks. seconds: of the forward."""

    saved: int
    inputs: int
    outside: int
    seconds: float


@dataclass(frozen=True)
class Choice:
    """recomputed: per call; peak: bytes held at most, seconds: spent on computing again."""

    recomputed: tuple[bool, ...]
    peak: int
    seconds: float


def peak(calls: Sequence[Call], outside: int, recomputed: Sequence[bool]) -> int:
    """Bytes that a forward and its backward hold at most. outside: saved by the whole forward outside of the calls.

    A call that keeps holds its inputs and what it saved, from its forward until its backward; one that is recomputed
    its inputs, and the rest while its backward runs, when all behind it has gone."""
    held = most = 0
    for call, again in zip(calls, recomputed, strict=True):
        if again:
            most = max(most, call.outside + held + call.inputs + call.saved)
        held += call.inputs + (0 if again else call.saved)
    return max(most, outside + held)


def least(calls: Sequence[Call], outside: int) -> int:
    """The smallest budget: where every call is recomputed."""
    return peak(calls, outside, [True] * len(calls))


def choose(calls: Sequence[Call], outside: int, budget: int) -> Choice | None:
    """What stays within `budget` bytes and costs the least time, or None if nothing does.

    Dynamic programming over the calls in order. What the rest needs to know of a prefix is the bytes that it holds; of
    prefixes that hold no more than another and cost no more, one is enough. Exact as long as no more than MOST_STATES
    of them differ (equal blocks have as many as blocks), beyond that bytes are rounded up to 1/MOST_STATES of the
    budget: still within it."""
    if least(calls, outside) > budget:
        return None
    inputs_left = sum(c.inputs for c in calls)
    states: list[_State] = [(0, 0.0, ())]
    for call in calls:
        inputs_left -= call.inputs
        after: list[_State] = []
        for held, seconds, path in states:
            if call.outside + held + call.inputs + call.saved <= budget:
                after.append((held + call.inputs, seconds + call.seconds, (path, True)))
            kept = held + call.inputs + call.saved
            if outside + kept + inputs_left <= budget:
                after.append((kept, seconds, (path, False)))
        states = _undominated(after)
        if len(states) > MOST_STATES:
            step = max(1, budget // MOST_STATES)
            states = _undominated([(-(-held // step) * step, s, path) for held, s, path in states])
    fitting = [s for s in states if outside + s[0] <= budget]
    if not fitting:  # rounding left nothing: all are recomputed, which fits
        best: tuple[bool, ...] = (True,) * len(calls)
    else:
        path = min(fitting, key=lambda s: s[1])[2]
        found: list[bool] = []
        while path:
            path, again = path
            found.append(again)
        best = tuple(reversed(found))
    return Choice(best, peak(calls, outside, best), sum(c.seconds for c, again in zip(calls, best) if again))


def _undominated(states: list[_State]) -> list[_State]:
    out: list[_State] = []
    for state in sorted(states, key=lambda s: (s[0], s[1])):
        if not out or state[1] < out[-1][1]:
            out.append(state)
    return out
