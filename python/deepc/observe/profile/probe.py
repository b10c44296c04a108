"""Instruments one engine from outside: while somebody listens, methods of this one engine (and of its hooks and
optimizer) are replaced on the instance by ones that tell when they begin and end. When nobody listens any more, they
are taken away again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ...core import env
from ...core.foreign import private
from . import run_folder, seen

# What is told: (name, where the method is, method)
_METHODS = (
    ("forward", "", "forward"),
    ("backward", "", "backward"),
    ("step", "", "step"),
    ("reduce", "hooks", "end_pass"),
    ("gradient norm", "", "_judge"),
    ("update", "optimizer", "update"),
    ("publish", "", "_publish"),
    ("save_checkpoint", "", "save_checkpoint"),
    ("load_checkpoint", "", "load_checkpoint"),
    ("save_16bit_model", "", "save_16bit_model"),
)


class Listener:
    """What a probe tells. Times are time.monotonic_ns()."""

    def begin(self, name: str, now: int) -> None:
        """`name` begins: forward, backward, step, or a part of these (reduce: what is left to reduce after
        autograd)."""

    def end(self, name: str, now: int, stepped: bool) -> None:
        """It ended. stepped: it was the step() that ends an accumulation, and global_steps has grown."""

    def close(self) -> None:
        """The probe goes, with the engine or before."""


class Probe:
    """The instrumentation of `engine`. Listeners hear of a begin in the order in which they were added, of an end in
    the reverse order."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.listeners: list[Listener] = []
        self._put: list[tuple[Any, str, Callable[..., Any], Callable[..., Any] | None]] = []
        self._bare = False  # a backward is under way that the user's loss.backward() began
        self._backward = False

    def add(self, listener: Listener) -> None:
        if not self.listeners:
            self._install()
        self.listeners.append(listener)

    def drop(self, listener: Listener) -> None:
        """Takes a listener away; with the last one the engine is as it was."""
        if listener in self.listeners:
            self.listeners.remove(listener)
            listener.close()
        if not self.listeners:
            self._remove()

    def close(self) -> None:
        """Takes all away."""
        for listener in list(self.listeners):
            self.drop(listener)

    # ---- methods -----------------------------------------------------------------------------------------------------
    def _install(self) -> None:
        engine = self.engine
        for name, where, method in _METHODS:
            self._replace(
                getattr(engine, where) if where else engine,
                method,
                self._wrapped(name, getattr(getattr(engine, where) if where else engine, method)),
            )
        self._replace(engine.hooks, "begin_pass", self._before(engine.hooks.begin_pass))
        self._replace(engine.hooks, "_on_output", self._before(engine.hooks._on_output))
        self._replace(engine, "destroy", self._destroying(engine.destroy))

    def _replace(self, owner: Any, name: str, value: Callable[..., Any]) -> None:
        self._put.append((owner, name, value, owner.__dict__.get(name)))
        owner.__dict__[name] = value

    def _remove(self) -> None:
        for owner, name, ours, before in self._put:
            if owner.__dict__.get(name) is not ours:  # replaced once more by somebody else, who calls ours
                continue
            if before is None:
                del owner.__dict__[name]
            else:
                owner.__dict__[name] = before
        self._put.clear()
        if self.engine.__dict__.get("profile") is self:
            self.engine.profile = None

    def _wrapped(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def told(*args: Any, **kwargs: Any) -> Any:
            before = self.engine.global_steps
            self._begin(name)
            try:
                return method(*args, **kwargs)
            finally:
                self._end(name, self.engine.global_steps != before and name == "step")

        return told

    def _before(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def noticed(*args: Any, **kwargs: Any) -> Any:
            if not self._backward and private.graph_task_id() != -1:
                self._bare = True
                self._begin("backward")
            return method(*args, **kwargs)

        return noticed

    def _destroying(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def destroy(*args: Any, **kwargs: Any) -> Any:
            self.close()
            return method(*args, **kwargs)

        return destroy

    # ---- telling -----------------------------------------------------------------------------------------------------
    def _begin(self, name: str) -> None:
        seen()
        if self._bare and name in ("forward", "step", "backward") and self._backward:
            self._end("backward", False)  # of a backward that raised
        if name == "backward":
            self._backward = True
        now = time.monotonic_ns()
        for listener in tuple(self.listeners):
            listener.begin(name, now)

    def _end(self, name: str, stepped: bool) -> None:
        now = time.monotonic_ns()
        if name == "backward":
            self._backward = self._bare = False
        for listener in reversed(tuple(self.listeners)):
            listener.end(name, now, stepped)
        if name == "reduce" and self._bare:
            self._end("backward", False)


def probe_of(engine: Any) -> Probe:
    """The engine's probe; makes one."""
    probe: Probe | None = engine.__dict__.get("profile")
    if probe is None:
        probe = engine.profile = Probe(engine)
    return probe


def attach_configured(engine: Any) -> Probe | None:
    """What the engine's configuration and the environment ask for. Collective."""
    from . import recorder

    config = engine._config
    probe = engine.profile = Probe(engine)
    if config.deepc.timeline.steps[1] > 0 or env.given("DEEPC_TIMELINE"):
        from .timeline import AtSteps

        AtSteps(probe)
    if config.comms_logger.enabled and (folder := run_folder(config)):
        from .scheduled import CommsFile

        probe.add(CommsFile(engine, folder))
    if config.flops_profiler.enabled and engine.global_rank == 0:
        from .scheduled import FlopsAtStep

        probe.add(FlopsAtStep(probe))
    if config.wall_clock_breakdown:  # last: the profile that is printed at the end of a step has its times
        from .timers import WallClock

        probe.add(WallClock(engine))
    if recorder is not None:
        recorder.watch(engine)
    return probe if probe.listeners else None
