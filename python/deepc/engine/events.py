"""The one seam between the loop and all that watches it: the log line, run folders, timelines, timers, profilers.

An engine tells its listeners when something begins and when it has ended; they are added from outside (the top-level
package hands their makers to engine/assembly/), and no method of an engine is ever wrapped. Without listeners telling
costs a loop over an empty tuple.

| name | `what` at its begin | `what` at its end |
|---|---|---|
| initialize | None | None; told only if the engine was made |
| forward | (inputs, kwargs) | what the model returned |
| backward | the loss; None: a loss.backward() of the script, noticed when it came to the hooks; a gradient: of a pipeline's stage | the loss over accumulation steps; None for a bare one, or a stage |
| reduce | None | None: what was left to reduce when autograd was done |
| step | None | StepResult of the step that ended an accumulation, else None |
| gradient norm, update, publish | None | None; parts of such a step |
| discard | (told at once, as an end) | None: gradients were dropped by zero_grad |
| measure | (told at once, as an end) | the times of a pipeline's batch (parallel.pipeline.measured.Measured) |
| save_checkpoint, load_checkpoint, save_16bit_model | the folder | the folder |
| offload_states, reload_states | None | None |
| write shard, publish checkpoint | None | None; parts of save_checkpoint |

What is ended by an exception ends with None. Communication and data waits are told by core/telemetry/waits.py, below all rooms.
"""  # noqa: E501

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from ..core.foreign import private


class Listener:
    """Who is told. Times are time.monotonic_ns(). Runs inside the loop: it must be quick and must not raise."""

    def begin(self, name: str, now: int, what: Any) -> None:
        """`name` of the table above begins."""

    def end(self, name: str, now: int, what: Any) -> None:
        """It has ended."""

    def close(self) -> None:
        """The engine ends."""


# Makes the listeners of an engine (base.EngineBase) that is about to be made, and adds them: its `events` and its
# configuration are there.
Watcher = Callable[[Any], None]


class Events:
    """The listeners of one engine; they hear in the order in which they were added."""

    def __init__(self) -> None:
        self.listeners: tuple[Listener, ...] = ()
        self._bare = False  # a backward is under way that the script's loss.backward() began
        self._backward = False

    def add(self, listener: Listener) -> None:
        self.listeners = (*self.listeners, listener)

    def drop(self, listener: Listener) -> None:
        """Takes a listener away, without closing it."""
        self.listeners = tuple(x for x in self.listeners if x is not listener)

    @private.uncompiled
    def begin(self, name: str, what: Any = None) -> None:
        if self._bare and name in ("forward", "step", "backward"):
            self.end("backward")  # of a backward that raised
        if name == "backward":
            self._backward = True
        if self.listeners:
            now = time.monotonic_ns()
            for listener in self.listeners:
                listener.begin(name, now, what)

    @private.uncompiled
    def end(self, name: str, what: Any = None) -> None:
        if name == "backward":
            self._backward = self._bare = False
        if self.listeners:
            now = time.monotonic_ns()
            for listener in self.listeners:
                listener.end(name, now, what)
        if name == "reduce" and self._bare:
            self.end("backward")

    def notice_backward(self) -> None:
        """For the hooks: autograd has come to one of them. Begins a bare backward if nobody has said that one runs."""
        if not self._backward and private.graph_task_id() != -1:
            self.begin("backward")
            self._bare = True

    @contextlib.contextmanager
    def span(self, name: str, what: Any = None) -> Iterator[None]:
        """Begin and end around a block. Not for the inside of a compiled model."""
        self.begin(name, what)
        try:
            yield
        finally:
            self.end(name, what)

    def close(self) -> None:
        """Closes all listeners, and takes them away."""
        for listener in self.listeners:
            listener.close()
        self.listeners = ()
