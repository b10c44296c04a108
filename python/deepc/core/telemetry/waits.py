"""Seconds that this process has waited so far, by lane: "data" (loaders), "communication" (peers and the network),
"disk" (checkpoints, offload). Totals that only grow; who wants a step's share takes the difference. What the C core
waited for peers is its counter `wait_ns`.

Knows nothing of the rest of the package but the core's counters, so that every module may feed it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from ..lib import C

LANES = ("data", "communication", "disk")
seconds: dict[str, float] = dict.fromkeys(LANES, 0.0)


def _index_of(name: str) -> int:
    i = 0
    while (found := C.dc_counter_name(i)) is not None:
        if found.decode() == name:
            return i
        i += 1
    return -1


_WAIT_NS = _index_of("wait_ns")


def add(lane: str, duration: float) -> None:
    """Adds `duration` seconds to a lane of LANES."""
    seconds[lane] += duration


def communication() -> float:
    """Seconds spent waiting for other ranks so far: in the C core (beyond its brief spin), and for messages to other
    nodes."""
    return seconds["communication"] + (C.dc_counter_get(_WAIT_NS) * 1e-9 if _WAIT_NS >= 0 else 0.0)


# ---- single waits, for who shows when they were ----------------------------------------------------------------------
# (name, begin, end: time.monotonic_ns(), what: JSON values)
Tap = Callable[[str, int, int, dict[str, Any]], None]
_taps: tuple[Tap, ...] = ()
_NOTHING = contextlib.nullcontext()


def tap(take: Tap) -> None:
    """From now on `take` is told of every wait that is told by `span`, in the thread that waited."""
    global _taps
    _taps = (*_taps, take)


def untap(take: Tap) -> None:
    """The end of that."""
    global _taps
    _taps = tuple(t for t in _taps if t != take)


def span(name: str, **what: Any) -> contextlib.AbstractContextManager[None]:
    """Around a wait. Nothing happens while nobody has tapped."""
    return _told(name, what) if _taps else _NOTHING


@contextlib.contextmanager
def _told(name: str, what: dict[str, Any]) -> Iterator[None]:
    begin = time.monotonic_ns()
    try:
        yield
    finally:
        end = time.monotonic_ns()
        for take in _taps:
            take(name, begin, end, what)
