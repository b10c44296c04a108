"""What of this folder listens to one engine (`engine.profile`): timelines, wall clock timers, the flops profile of a
step. A probe is a listener of the engine's events while it has listeners of its own; without any nothing of this folder
runs in the loop."""

from __future__ import annotations

import contextlib
from typing import Any, ContextManager  # noqa: UP035

from ...core import env
from ...engine.events import Listener as EngineListener

recorder: Any = None
"""The timeline.Recorder that is recording in this process, or None."""

_calls = 0
_NOTHING = contextlib.nullcontext()


def seen() -> None:
    """Called by everything of this folder that runs inside a training loop."""
    global _calls
    _calls += 1


def hook_calls() -> int:
    """How often code of this folder has run inside training loops of this process: 0 while all of it is off."""
    return _calls


def span(name: str, lane: str = "compute", **args: Any) -> ContextManager[None]:
    """`with span("augment"):` is an event of the timeline, if one is being recorded; otherwise it does nothing. lane:
    "compute", "disk" or "waiting". args: JSON values that the event shows."""
    return _NOTHING if recorder is None else recorder.span(name, lane, args)


def run_folder(config: Any) -> str | None:
    """The run folder of a Config (DEEPC_RUN_DIR replaces it), or None."""
    return env.text("DEEPC_RUN_DIR", config=config.deepc.run_dir) or None


class Listener:
    """What a probe tells. Times are time.monotonic_ns()."""

    def begin(self, name: str, now: int) -> None:
        """`name` begins: an event of engine/events.py."""

    def end(self, name: str, now: int, stepped: bool) -> None:
        """It ended. stepped: it was the step() that ends an accumulation, and global_steps has grown."""

    def close(self) -> None:
        """The probe goes, with the engine or before."""


class Probe(EngineListener):
    """Listeners hear of a begin in the order in which they were added, of an end in the reverse order."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.listeners: list[Listener] = []

    def add(self, listener: Listener) -> None:
        if not self.listeners:
            self.engine.events.add(self)
        self.listeners.append(listener)

    def drop(self, listener: Listener) -> None:
        """Takes a listener away; with the last one the engine has no probe any more."""
        if listener in self.listeners:
            self.listeners.remove(listener)
            listener.close()
        if not self.listeners:
            self.engine.events.drop(self)
            if self.engine.profile is self:
                self.engine.profile = None

    def close(self) -> None:
        for listener in list(self.listeners):
            self.drop(listener)

    def begin(self, name: str, now: int, what: Any) -> None:
        seen()
        for listener in tuple(self.listeners):
            listener.begin(name, now)

    def end(self, name: str, now: int, what: Any) -> None:
        stepped = name == "step" and what is not None
        for listener in reversed(tuple(self.listeners)):
            listener.end(name, now, stepped)

    def wall_clock(self) -> dict[str, float]:
        """Milliseconds by timer, of the last step(): see Engine.get_wall_clock_timers."""
        times: dict[str, float] = next((x.last for x in self.listeners if hasattr(x, "last")), {})
        return dict(times)


def probe_of(engine: Any) -> Probe:
    """The engine's probe; makes one."""
    if engine.profile is None:
        engine.profile = Probe(engine)
    probe: Probe = engine.profile
    return probe
