"""What a run spends its time and memory on: the flops profiler (flops.py), a timeline for Perfetto (timeline.py),
DeepSpeed's wall clock timers (timers.py).

Nothing here runs while it is off: an engine is instrumented from outside (probe.py), only while something of this is
on. `hook_calls()` counts how often code of this package ran inside a training loop."""

from __future__ import annotations

import contextlib
import importlib
from typing import TYPE_CHECKING, Any, ContextManager  # noqa: UP035

from ...core import env

if TYPE_CHECKING:
    from .flops import FlopsProfiler, get_model_profile
    from .timeline import timeline
    from .trace import check_trace, merge

__all__ = ["FlopsProfiler", "check_trace", "get_model_profile", "hook_calls", "merge", "span", "timeline"]
_WHERE = {
    "FlopsProfiler": "flops",
    "get_model_profile": "flops",
    "timeline": "timeline",
    "merge": "trace",
    "check_trace": "trace",
}

recorder: Any = None
"""The timeline.Recorder that is recording in this process, or None."""

_calls = 0
_NOTHING = contextlib.nullcontext()


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)


def seen() -> None:
    """Called by everything of this package that runs inside a training loop."""
    global _calls
    _calls += 1


def hook_calls() -> int:
    """How often code of this package has run inside training loops of this process: 0 while all of it is off."""
    return _calls


def span(name: str, lane: str = "compute", **args: Any) -> ContextManager[None]:
    """`with span("augment"):` is an event of the timeline, if one is being recorded; otherwise it does nothing. lane:
    "compute", "disk" or "waiting". args: JSON values that the event shows."""
    return _NOTHING if recorder is None else recorder.span(name, lane, args)


def run_folder(config: Any) -> str | None:
    """The run folder of a Config, or None."""
    return env.text("DEEPC_RUN_DIR", config=config.deepc.run_dir) or None


def attach(engine: Any) -> Any:
    """For Engine.__init__: the probe.Probe of this engine if its configuration (or DEEPC_TIMELINE) asks for something
    of this package, else None. Collective."""
    config = engine._config
    if not (
        config.wall_clock_breakdown
        or config.flops_profiler.enabled
        or config.deepc.timeline.steps[1] > 0
        or env.given("DEEPC_TIMELINE")
        or (config.comms_logger.enabled and run_folder(config))
    ):
        return None
    from .probe import attach_configured

    return attach_configured(engine)
