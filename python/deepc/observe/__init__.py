"""What watches a run: the log line and its files (monitor/), times and memory (profile/), the report of a run folder
(report/), and what went wrong (diagnose/).

All of it listens to an engine's events (engine/events.py). `watch` is the maker of listeners that the package hands to
every engine; nothing in the rooms below imports this folder. Importing the package imports no torch: the command line's
help comes from its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..engine.base import EngineBase


def watch(engine: EngineBase) -> None:
    """Adds this folder's listeners to an engine that is being made."""
    from .observers import Observers

    engine.events.add(Observers(engine))
