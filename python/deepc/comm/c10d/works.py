"""Work objects of the process group: of finished calls, of calls in a progress thread, of messages; and the thread that
moves messages on while their rank does something else."""

from __future__ import annotations

import collections
import contextlib
import datetime
import os
import threading
import time
import weakref
from _thread import allocate_lock
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from ...errors import CommError, CommTimeoutError
from .. import shared


class Done(dist.Work):
    """The Work of a call that is finished. `tensors`: what result() and the future hold."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(list(self._tensors))
        return future

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return None

    def result(self) -> list[torch.Tensor]:
        return list(self._tensors)

    def synchronize(self) -> None:
        pass

    def block_current_stream(self) -> None:
        pass


class Pending(dist.Work):
    """The Work of a call that a Progress runs. wait() may be interrupted by Ctrl-C. what(): the call, for messages.
    waiting(): around a wait for it."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        what: Callable[[], str],
        where: bytes,
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        super().__init__()
        self._waiting = waiting
        self._tensors, self._what, self.where = tensors, what, where
        self._gate = allocate_lock()  # held until the call is finished
        self._gate.acquire()
        self._finished = False
        self._error: BaseException | None = None
        self._making = allocate_lock()
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None
        self._root: torch.futures.Future[None] | None = None

    def join(self, seconds: float = -1) -> bool:
        """True when finished; False after so many seconds (-1: none)."""
        if not self._finished:
            with self._waiting():
                if not self._gate.acquire(timeout=seconds):
                    return False
            self._gate.release()
        return True

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        seconds = -1 if timeout is None else timeout.total_seconds()
        if not self.join(seconds if seconds > 0 else -1):  # torch's kNoTimeout is 0
            raise CommTimeoutError(f"{self._what()} was not finished after {seconds:g} s of waiting; it goes on")
        if self._error is not None:
            raise self._error
        return True

    def finish(self, error: BaseException | None) -> None:
        """Called by who ran the call."""
        self._error = error
        with self._making:
            self._finished = True
            self._gate.release()
            root, self._root = self._root, None
        if root is not None:
            root.set_result(None)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Completes with the list of tensors. An error makes it a failed future for C++ as well (DDP waits there),
        which Python can only do by raising in a callback: torch then shows it as a RuntimeError with the text of
        ours."""
        root: torch.futures.Future[None] | None = None
        with self._making:
            if self._future is None:
                root = torch.futures.Future()
                self._future = root.then(self._outcome)
                if not self._finished:
                    self._root, root = root, None
            future = self._future
        if root is not None:
            root.set_result(None)
        return future

    def _outcome(self, _root: torch.futures.Future[None]) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return list(self._tensors)

    def is_completed(self) -> bool:
        return self._finished

    def is_success(self) -> bool:
        return self._finished and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        if not self._finished:
            raise CommError(f"{self._what()} is not finished; wait() before result()")
        return list(self._tensors)

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()


class Carried:
    """A send or receive that the backend beneath carries, as a Message's request. lost: what to raise for its error."""

    def __init__(self, work: Any, lost: Callable[[RuntimeError], BaseException]) -> None:
        self._work, self._lost = work, lost

    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks until it is complete."""
        try:
            self._work.wait() if timeout_s is None else self._work.wait(datetime.timedelta(seconds=timeout_s))
        except RuntimeError as exc:
            raise self._lost(exc) from exc

    def test(self) -> bool:
        """True once complete, which Gloo says of what was waited for."""
        return bool(self._work.is_completed())

    def source(self) -> int:
        """Group rank that a completed receive came from."""
        return int(self._work._source_rank())


class Message(dist.Work):
    """The Work of a send or receive. after: what is left to do when it is complete (a receive into a tensor that is not
    contiguous)."""

    def __init__(
        self,
        request: shared.Request | Carried,
        tensors: Sequence[torch.Tensor],
        what: Callable[[], str],
        explain: Callable[[BaseException], None],
        after: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._request, self._tensors, self._what, self._explain, self._after = request, tensors, what, explain, after
        self._lock = allocate_lock()  # one thread at a time per request
        self.finished = False
        self._error: BaseException | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        seconds = 0 if timeout is None else timeout.total_seconds()
        with self._lock:
            if not self.finished:
                self._run(lambda: self._request.wait(seconds if seconds > 0 else None))
        if self._error is not None:
            raise self._error
        return True

    def _run(self, step: Callable[[], bool | None]) -> None:
        try:
            if step() is False:
                return
            if self._after is not None:
                self._after()
        except Exception as exc:
            self._explain(exc)
            self._error = exc
        self.finished = True

    def is_completed(self) -> bool:
        if not self.finished and self._lock.acquire(blocking=False):  # else another thread waits for it
            try:
                if not self.finished:
                    self._run(self._request.test)
            finally:
                self._lock.release()
        return self.finished

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Completed by a thread of its own, which waits for the message."""
        if self._future is None:
            pending = Pending(self._tensors, self._what, b"", contextlib.nullcontext)
            self._future = pending.get_future()

            def run() -> None:
                with contextlib.suppress(Exception):  # the future's; from here it would only be printed
                    self.wait()
                pending.finish(self._error)

            if self.finished:
                pending.finish(self._error)
            else:
                threading.Thread(target=run, name="deepc message", daemon=True).start()
        return self._future

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        if not self.is_completed():
            raise CommError(f"{self._what()} is not finished; wait() before result()")
        return list(self._tensors)

    def source_rank(self) -> int:
        return self._request.source()

    def _source_rank(self) -> int:
        return self._request.source()

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()


class _Mover:
    """One thread per process that tests the unfinished messages every POLL_S, so that they get on while their rank
    computes or waits for something outside the core (Gloo has threads for that; waits inside the core serve messages
    themselves). When there was nothing to test for IDLE_S it sleeps until the next message."""

    POLL_S, IDLE_S = 0.005, 0.1

    def __init__(self) -> None:
        self._messages: collections.deque[Message] = collections.deque()
        self._wake = allocate_lock()
        self._wake.acquire()
        self._asleep, self._ending, self._lock = True, False, threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, message: Message) -> None:
        self._messages.append(message)
        if self._asleep:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._loop, name="deepc messages", daemon=True)
                    self._thread.start()
                self._rouse()

    def _rouse(self) -> None:
        if self._asleep:
            self._asleep = False
            self._wake.release()

    def stop(self) -> None:
        """Ends the thread: the interpreter must not end under it."""
        with self._lock:
            thread, self._thread, self._ending = self._thread, None, True
            self._rouse()
        if thread is not None:
            thread.join(5)

    def _loop(self) -> None:
        while True:
            self._wake.acquire()
            idle_since = time.monotonic()
            while not self._ending:
                time.sleep(self.POLL_S)
                now = time.monotonic()
                if self._sweep():
                    idle_since = now
                elif now - idle_since > self.IDLE_S:
                    with self._lock:
                        if not self._messages and not self._ending:
                            self._asleep = True
                            break
            if self._ending:
                return

    def _sweep(self) -> bool:
        """Drops what is finished. True if anything is left."""
        for _ in range(len(self._messages)):
            message = self._messages.popleft()
            if not message.is_completed():
                self._messages.append(message)
        return bool(self._messages)


_mover = _Mover()


def stop_moving() -> None:
    """At interpreter exit, when all groups are closed."""
    _mover.stop()


def _forked() -> None:
    global _mover
    _mover = _Mover()


os.register_at_fork(after_in_child=_forked)


class Messages:
    """The messages of one process group that are under way. The mover has them until they are finished: here they
    would keep what was sent until the next message."""

    def __init__(self) -> None:
        self._sends: collections.deque[weakref.ref[Message]] = collections.deque()

    def add(self, message: Message, keep: bool) -> None:
        """keep: a send, which closing the group has to wait for, whoever has dropped its Work."""
        if message.is_completed():
            return
        _mover.add(message)
        if keep:
            while self._sends and ((first := self._sends[0]()) is None or first.finished):
                self._sends.popleft()
            self._sends.append(weakref.ref(message))

    def flush(self, seconds: float | None) -> None:
        """Waits until the sends are out (None: with their own time-outs). Errors are their callers', who have been told
        or did not ask."""
        end = None if seconds is None else time.monotonic() + seconds
        while self._sends:
            left = 0.0 if end is None else end - time.monotonic()
            if end is None or left > 0:
                message = self._sends.popleft()()
                if message is not None:
                    with contextlib.suppress(Exception):
                        message.wait(datetime.timedelta(seconds=left))
            else:
                self._sends.clear()


class Several(dist.Work):
    """The Work of several that were started together."""

    def __init__(self, works: Sequence[dist.Work | None]) -> None:
        """None: what NCCL gives for a synchronous call."""
        super().__init__()
        self._works = [work for work in works if work is not None]

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return torch.futures.collect_all([work.get_future() for work in self._works]).then(
            lambda done: [t for future in done.value() for t in future.value()]
        )

    def is_completed(self) -> bool:
        return all([work.is_completed() for work in self._works])

    def is_success(self) -> bool:
        return all([work.is_success() for work in self._works])

    def exception(self) -> BaseException | None:
        return next((e for e in (work.exception() for work in self._works) if e is not None), None)

    def result(self) -> list[torch.Tensor]:
        return [t for work in self._works for t in work.result()]

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()
