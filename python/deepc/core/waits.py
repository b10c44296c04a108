"""Seconds that this process has waited so far, by lane: "data" (loaders), "communication" (peers and the network),
"disk" (checkpoints, offload). Totals that only grow; who wants a step's share takes the difference. What the C core
waited for peers is its counter `wait_ns`.

Knows nothing of the rest of the package but the core's counters, so that every module may feed it."""

from __future__ import annotations

from .lib import C

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
