"""wall_clock_breakdown: DeepSpeed's timers of forward, backward and step, and its lines.

    time (ms) | fwd_microstep: 4.12 | bwd_microstep: 9.87 | bwd_inner_microstep: 9.01 | bwd_allreduce_microstep: 0.86 |
    step_microstep: 2.20 time (ms) | fwd: 8.20 | bwd: 19.73 | bwd_inner: 18.00 | bwd_allreduce: 1.73 | step: 2.22

The first line is printed after every step() and is of that micro-batch, the second at the end of an accumulation and is
the sum over it. fwd: engine(...). bwd: the whole backward. bwd_inner: autograd, in which gradients go to their buckets
and full buckets are reduced. bwd_allreduce: what of the reduction was left when autograd was done, waiting for other
ranks included. step: engine.step().
"""

from __future__ import annotations

from typing import Any

import torch

from ...engine.base import say
from .probe import Listener

_NAMES = {"forward": "fwd", "backward": "bwd", "reduce": "bwd_allreduce", "step": "step"}
_ORDER = ("fwd", "bwd", "bwd_inner", "bwd_allreduce", "step")


class WallClock(Listener):
    """The timers of one engine. On a GPU they are CUDA events, read when a line is printed."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._cuda = engine, engine.device.type == "cuda"
        self._open: dict[str, Any] = {}
        self._micro: dict[str, list[tuple[Any, Any]]] = {}
        self._sum: dict[str, float] = dict.fromkeys(_ORDER, 0.0)
        self.last: dict[str, float] = {}

    def _mark(self, now: int) -> Any:
        if not self._cuda:
            return now
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._engine.device))  # which may not be the current device
        return event

    def begin(self, name: str, now: int) -> None:
        if name in _NAMES:
            self._open[name] = self._mark(now)

    def end(self, name: str, now: int, stepped: bool) -> None:
        if name not in _NAMES or (began := self._open.pop(name, None)) is None:
            return
        if name != "reduce" or "backward" in self._open:  # not one that step() makes
            self._micro.setdefault(_NAMES[name], []).append((began, self._mark(now)))
        if name == "step":
            self._print(stepped)

    def _elapsed(self, pairs: list[tuple[Any, Any]]) -> float:
        if not self._cuda:
            return float(sum(b - a for a, b in pairs)) / 1e6
        for _, b in pairs:
            b.synchronize()
        return float(sum(a.elapsed_time(b) for a, b in pairs))

    def _print(self, stepped: bool) -> None:
        micro = {name: self._elapsed(pairs) for name, pairs in self._micro.items()}
        self._micro.clear()
        micro["bwd_inner"] = micro.get("bwd", 0.0) - micro.get("bwd_allreduce", 0.0)
        for name in _ORDER:
            self._sum[name] += micro.get(name, 0.0)
        self.last = {**{f"{n}_microstep": micro.get(n, 0.0) for n in _ORDER}, **self._sum}
        self._say("_microstep")
        if stepped:
            self._say("")
            self._sum = dict.fromkeys(_ORDER, 0.0)

    def _say(self, suffix: str) -> None:
        say(self._engine, "time (ms)" + "".join(f" | {n}{suffix}: {self.last[n + suffix]:.2f}" for n in _ORDER))
