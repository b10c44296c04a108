"""The thread that can run asynchronous collectives while autograd computes, and the choice between it and running them
inline.

Where asynchronous calls run is DEEPC_PROGRESS: "inline" (at once, in the caller), "thread" (a thread per process group,
first in first out), or "auto": inline where the node has no core beyond one per rank, else what measure() found faster
when the group was opened. Every rank could choose for itself, since the order of calls is kept either way; the
measurement has to be taken by all, so they decide together, when the communicator opens and not at the first
asynchronous call: whether a call is asynchronous may differ between ranks.

A call that blocks its caller may wait for what the caller would do next: rank 0 begins an all_reduce, receives from
rank 1, then waits for the all_reduce, while rank 1 sends before it comes to its own. So the inline of "auto" is the
thread and a caller that waits for it, but for PATIENCE_S only: then the Work is returned unfinished. Not in a backward
pass, where calls run at once: DDP and FSDP make them there, all ranks in one order and no messages between them, and an
error keeps its type only if the call raises it (as a future's, C++ makes a RuntimeError of it). What was asked for by
DEEPC_PROGRESS=inline has no thread and no such way out.

Why "no core to spare" is inline without measuring: measure() on 2 ranks and 2 cores, 7 times each: the thread took 1.07
times as long as inline with 256 KiB and 1.18 times with 64 KiB (medians; 0.6 to 1.6, since others used the machine):
nothing to gain, and a choice by chance.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import statistics
import struct
import threading
import time
from _thread import get_ident
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ...core import env
from ...core.foreign import private
from ...core.lib import C, Call, check
from ...core.telemetry.caller import speak_for
from ...errors import CommError
from .. import shared
from .works import Pending

MODES = ("auto", "inline", "thread")  # of DEEPC_PROGRESS
GAIN = 0.9  # the thread is taken if it needs at most this share of the time inline
ROUNDS, TRIALS, ROUND_BYTES = 8, 3, 256 << 10
_CALL_USER = 9  # DC_CALL_USER
# Longer than ranks usually come after each other, so that what waits so long may wait for its own caller.
PATIENCE_S = 0.01


# ---- the thread ------------------------------------------------------------------------------------------------------
class Progress:
    """Runs calls in the order in which they were submitted, in a thread that starts with the first. The calls release
    the GIL. patience: seconds that who submits one waits for it."""

    def __init__(self, label: str, patience: float = 0.0) -> None:
        self._label, self._patience, self._lock = label, patience, threading.Lock()
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ident, self._pid, self._closed = 0, os.getpid(), False
        # How many threads wait for what is made here. While none does the caller may be on its way to what a call waits
        # for, so that this is no deadlock.
        self._joined = ctypes.c_int32(0)
        self.last: Pending | None = None  # newest unfinished call; None: nothing is under way

    def here(self) -> bool:
        """True in the thread itself: a callback of a future calls a collective."""
        return get_ident() == self._ident

    def takes(self) -> bool:
        """Whether an asynchronous call of this thread is to be submitted; else it runs in the caller, after all that
        were."""
        return not self.here() and not (self._patience and private.graph_task_id() != -1)

    def submit(
        self, job: Callable[[], None], tensors: Sequence[torch.Tensor], what: Callable[[], str], where: bytes
    ) -> Pending:
        work = Pending(tensors, what, where, self._waiting)
        with self._lock:
            if self._closed:
                raise CommError(f"{what()}: process group {self._label} has been destroyed")
            if self._pid != os.getpid():
                raise CommError(
                    f"{what()}: process group {self._label} was opened before this process was forked; use it in the"
                    " parent"
                )
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=f"deepc {self._label}", daemon=True)
                self._thread.start()
            behind, self.last = self.last, work
            self._queue.put((work, job))
        if self._patience and behind is None:  # behind an overdue one it can't end before that
            work.join(self._patience)
        return work

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Around a thread's wait for a call."""
        with self._lock:
            self._joined.value += 1
        try:
            yield
        finally:
            with self._lock:
                self._joined.value -= 1

    def drain(self, seconds: float = -1) -> bool:
        """Waits until all that was submitted is finished; their errors stay theirs. In the thread itself nothing is
        waited for."""
        last = self.last
        return last is None or self.here() or self._pid != os.getpid() or last.join(seconds)

    def _loop(self) -> None:
        self._ident = get_ident()
        C.dc_comm_thread_serves(ctypes.byref(self._joined))
        while True:
            work, job = self._queue.get()
            if work is None:
                return
            speak_for(work.where)
            error = None
            try:
                with torch.no_grad():
                    job()
            except BaseException as exc:  # the caller's, at wait()
                error = exc
            with self._lock:
                if self.last is work:
                    self.last = None
            work.finish(error)
            del work, job, error

    def close(self, seconds: float) -> bool:
        """Takes no more calls and waits so long for those it has. False if some are not finished: break the
        communicator, then join()."""
        with self._lock:
            closed, self._closed = self._closed, True
            if self._thread is not None and not closed:
                self._queue.put((None, None))
        return self.drain(seconds)

    def join(self, seconds: float = 5) -> None:
        if self._thread is not None and not self.here() and self._pid == os.getpid():
            self._thread.join(seconds)


# ---- inline or thread ------------------------------------------------------------------------------------------------
def make_progress(label: str, size: int, mode: str) -> Progress | None:
    """What runs the asynchronous calls of a group, by what choose() says; None: they run inline, whatever they wait
    for."""
    if mode == "thread":
        return Progress(label)
    return None if size == 1 or env.text("DEEPC_PROGRESS") == "inline" else Progress(label, PATIENCE_S)


def choose(comm: shared.Comm) -> str:
    """ "inline" or "thread" for a communicator that was just opened. Collective if any rank has DEEPC_PROGRESS=auto, so
    always."""
    mode = env.text("DEEPC_PROGRESS")
    if comm.size == 1:
        return "inline" if mode == "auto" else mode
    cores = os.sched_getaffinity(0)
    mask = sum(1 << c for c in cores if c < 512)
    rows = [
        (row[0], int.from_bytes(row[1:65], "little"))
        for row in _swap(comm, bytes([MODES.index(mode)]) + mask.to_bytes(64, "little"))
    ]
    together = 0
    for _, theirs in rows:
        together |= theirs
    if mode != "auto" or any(m != 0 for m, _ in rows) or together.bit_count() <= comm.size:
        return "inline" if mode == "auto" else mode
    inline, thread = measure(comm)
    times = [struct.unpack("dd", row) for row in _swap(comm, struct.pack("dd", inline, thread))]
    return "thread" if max(t for _, t in times) <= GAIN * max(i for i, _ in times) else "inline"


def _step(comm: shared.Comm, fill: Callable[[int], object], read: Callable[[list[int]], Any]) -> Any:
    """One step of the exchange (comm.h): fill(address of this rank's slot), then read(addresses of all ranks'
    slots)."""
    step, slot = ctypes.c_int64(), ctypes.c_void_p()
    with comm.lock:
        handle = comm.handle
        check(C.dc_exchange_begin(handle, ctypes.byref(step), ctypes.byref(slot)))
        fill(slot.value or 0)
        check(C.dc_exchange_post(handle, ctypes.byref(Call(op=_CALL_USER))))
        check(C.dc_exchange_wait(handle, step))
        out = read([C.dc_exchange_peer(handle, r, step) for r in range(comm.size)])
        check(C.dc_exchange_done(handle, step))
    return out


def _swap(comm: shared.Comm, row: bytes) -> list[bytes]:
    """Every rank's row, in rank order. Rows are of one length. (Not a collective that is counted: tests count those of
    the user.)"""
    rows: list[bytes] = _step(
        comm,
        lambda slot: ctypes.memmove(slot, row, len(row)),
        lambda slots: [ctypes.string_at(s, len(row)) for s in slots],
    )
    return rows


def measure(comm: shared.Comm, nbytes: int = ROUND_BYTES) -> tuple[float, float]:
    """Seconds of ROUNDS times a computation and a reduction of nbytes (at most a slot): inline, and with the reductions
    in a thread. The computation takes about as long as the reduction, where overlap can gain most. Collective; takes
    about ten milliseconds.
    """
    source = torch.ones(nbytes // 4, dtype=torch.float32, device="cpu")
    out = torch.empty_like(source)
    address, count, size = source.data_ptr(), source.numel(), comm.size

    def reduce() -> None:
        def read(slots: list[int]) -> None:
            check(C.dc_reduce(out.data_ptr(), (ctypes.c_void_p * size)(*slots), size, 0, 0, count))

        _step(comm, lambda slot: ctypes.memmove(slot, address, nbytes), read)

    a = torch.ones(128, 128, dtype=torch.float32, device="cpu")
    b, c = torch.ones_like(a), torch.empty_like(a)

    def seconds(fn: Callable[[], Any]) -> float:
        began = time.perf_counter()
        fn()
        return time.perf_counter() - began

    reduce()
    torch.mm(a, b, out=c)
    one = statistics.median([seconds(lambda: torch.mm(a, b, out=c)) for _ in range(5)])
    products = max(1, min(64, round(statistics.median([seconds(reduce) for _ in range(5)]) / one)))

    def compute() -> None:
        for _ in range(products):
            torch.mm(a, b, out=c)

    progress = Progress("measurement")

    def inline() -> None:
        for _ in range(ROUNDS):
            compute()
            reduce()

    def thread() -> None:
        for _ in range(ROUNDS):
            compute()
            progress.submit(reduce, (), lambda: "measurement", b"")
        work = progress.last
        if work is not None:
            work.wait()

    try:
        with torch.no_grad():
            times = [(seconds(inline), seconds(thread)) for _ in range(TRIALS)]
    finally:
        progress.close(-1)
        progress.join()
    return min(t for t, _ in times), min(t for _, t in times)
