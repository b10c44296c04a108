"""Lines about memory after a step: what the first one shows of a prediction, and memory_breakdown."""

from __future__ import annotations

from typing import Any

from ...core import memory
from ...engine.base import say
from ...engine.events import Listener


class MemoryLines(Listener):
    """After the meter, whose line comes first."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def end(self, name: str, now: int, what: Any) -> None:
        if name != "step" or what is None:
            return
        engine = self._engine
        first, config = engine.first_step, engine._config
        if first is not None and engine.global_steps == 1 and (told := first.report()):
            say(engine, told)
            engine.monitor.note("memory", text=told, peak_bytes=first.measured)
        every = config.steps_per_print
        if config.memory_breakdown and (not every or engine.global_steps % every == 0):
            m = memory.process_bytes()
            say(
                engine,
                f"memory (MiB): rss {m['rss_bytes'] >> 20}, pss {m['pss_bytes'] >> 20}, peak rss"
                f" {m['peak_rss_bytes'] >> 20}",
            )
