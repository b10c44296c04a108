"""How deepc's messages reach people: the logger "deepc" of the standard library.

An application that configures logging has the say: deepc's records go to the root logger's handlers like any library's.
Where nobody has configured it (the root logger has no handlers) they are printed on stderr, as "deepc: message". Which
records there are is the level of the logger, INFO, changed by DEEPC_LOG_LEVEL, the configuration's log_level or
logging.getLogger("deepc").setLevel. The command `deepc` speaks to its user without it (tell)."""

from __future__ import annotations

import logging
import os
import sys

from .. import env
from ..foreign import patches


class _WhereNobodyListens(logging.StreamHandler):  # type: ignore[type-arg]  # generic for type checkers alone
    """stderr, as long as the root logger has no handlers. Looked at for each record: applications configure logging
    when they like."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.root.handlers:
            super().emit(record)


def set_up() -> logging.Logger:
    """Once, at import. A handler that somebody gave the logger before stays, and ours is not added."""
    log = logging.getLogger("deepc")
    if not log.handlers:
        handler = _WhereNobodyListens(sys.stderr)
        handler.setFormatter(logging.Formatter("deepc: %(message)s"))
        log.addHandler(handler)
        log.setLevel(env.text("DEEPC_LOG_LEVEL"))
        patches.applied("logging")
    return log


def tell(text: str) -> None:
    """A message on stderr that the work goes on without: nobody may read it any more (`2>&1 | head`), or the disk of a
    log is full."""
    if sys.stderr is None:  # print would take stdout
        return
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):  # ValueError: closed
        pass


def drop_unread() -> None:
    """At the end of a command, what its readers did not take. The interpreter would try once more, and make the exit
    code 120 instead of the command's own; where a full disk did not take output, it shall."""
    for name, unread in (("stdout", BrokenPipeError), ("stderr", OSError)):
        stream = getattr(sys, name)
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except unread:
            setattr(sys, name, open(os.devnull, "w"))  # the descriptor stays: others may have it
