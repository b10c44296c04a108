"""The listener that makes the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..engine.events import Listener

if TYPE_CHECKING:
    from ..engine.base import EngineBase


class Observers(Listener):
    """Makes the others: the comms logger is on before the first call of the engine's group, and the meter and what the
    configuration asks for of profile/ come when the engine is complete. At the end of a step the calls that the C core
    has recorded go to the comms logger, before anybody reads them."""

    def __init__(self, engine: EngineBase) -> None:
        self._engine = engine
        self._calls: Any = None

    def begin(self, name: str, now: int, what: Any) -> None:
        if name == "initialize":
            from ..comm.calls import logger

            self._calls = logger
            log = self._engine._config.comms_logger
            if log.enabled:
                logger.configure(True, log.prof_all, log.prof_ops, log.verbose, log.debug)

    def end(self, name: str, now: int, what: Any) -> None:
        if name == "step" and what is not None:
            self._calls.drain()
        elif name == "initialize":
            self._complete()

    def _complete(self) -> None:
        from .monitor.memory import MemoryLines
        from .monitor.meter import Meter
        from .profile import attach

        engine = self._engine
        engine.monitor = Meter(engine)
        engine.events.add(engine.monitor)
        engine.norm_riders.insert(0, engine.monitor)
        if engine.first_step is not None or engine._config.memory_breakdown:
            engine.events.add(MemoryLines(engine))
        attach(engine)
