"""What a run spends its time and memory on: the flops profiler (flops/), a timeline for Perfetto (recording.py),
DeepSpeed's wall clock timers (timers.py).

Nothing here runs while it is off: it listens to an engine's events (probe.py) only while something of this is on.
`hook_calls()` counts how often code of this package ran inside a training loop."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ...core import env
from . import probe as _probe
from .probe import hook_calls, probe_of, run_folder, span

if TYPE_CHECKING:
    from .flops import FlopsProfiler, get_model_profile
    from .recording import timeline
    from .trace import check_trace, merge

__all__ = ["FlopsProfiler", "check_trace", "get_model_profile", "hook_calls", "merge", "span", "timeline"]
_WHERE = {
    "FlopsProfiler": "flops",
    "get_model_profile": "flops",
    "timeline": "recording",  # no module has the name of what is imported from it: it would take its place
    "merge": "trace",
    "check_trace": "trace",
}


def __getattr__(name: str) -> Any:
    if name == "recorder":
        return _probe.recorder
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)


def attach(engine: Any) -> None:
    """What the engine's configuration (or DEEPC_TIMELINE) asks for of this folder. Collective."""
    config, was_recording = engine._config, _probe.recorder
    folder = run_folder(config)
    if not (
        config.wall_clock_breakdown
        or config.flops_profiler.enabled
        or config.deepc.timeline.steps[1] > 0
        or env.given("DEEPC_TIMELINE")
        or (config.comms_logger.enabled and folder)
        or was_recording is not None
    ):
        return
    if config.deepc.timeline.steps[1] > 0 or env.given("DEEPC_TIMELINE"):
        from .recording import AtSteps

        AtSteps(probe_of(engine))
    if config.comms_logger.enabled and folder:
        from .scheduled import CommsFile

        probe_of(engine).add(CommsFile(engine, folder))
    if config.flops_profiler.enabled:
        from .scheduled import FlopsAtStep

        probe = probe_of(engine)
        probe.add(FlopsAtStep(probe))
    if config.wall_clock_breakdown:  # last: the profile that is printed at the end of a step has its times
        from .timers import WallClock

        probe_of(engine).add(WallClock(engine))
    if was_recording is not None:
        was_recording.watch(engine)
    if engine.profile is not None and not engine.profile.listeners:
        engine.profile = None
