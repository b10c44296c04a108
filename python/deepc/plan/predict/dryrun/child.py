"""Work in a forked child, of which nothing but its answer reaches the caller."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from ....core.foreign import patches
from ....errors import DeepcError, UnsupportedError


def forked(
    work: Callable[[], dict[str, Any]], limit_s: float = 300.0, stuck_s: float = 10.0, tries: int = 3
) -> dict[str, Any]:
    """What `work` returns (JSON types) when a forked child calls it. An error of deepc that it raises is raised here,
    by its class and message. Raises UnsupportedError with the reason if it fails otherwise, dies or takes longer.

    A fork may catch another thread of this process with a lock, which no thread of the child will ever release. A child
    that has slept for stuck_s without using its processor once waits for such a lock: it is ended, and another one is
    forked, `tries` in all."""
    for _ in range(tries):
        answer = _forked_once(work, limit_s, stuck_s)
        if answer is not None:
            return answer
        logging.getLogger("deepc").info("a dry run's process waited for a lock that it was forked with; once more")
    raise UnsupportedError(
        f"{tries} processes of the dry run stood still for {stuck_s:g} s each; estimate without a sample batch (model"
        " states only)"
    )


def _forked_once(work: Callable[[], dict[str, Any]], limit_s: float, stuck_s: float) -> dict[str, Any] | None:
    """As forked; None: the child stood still."""
    sys.stdout.flush()
    sys.stderr.flush()
    read, write = os.pipe()
    with contextlib.ExitStack() as stack:
        import warnings

        stack.enter_context(warnings.catch_warnings())
        # Python 3.12 warns of forks beside threads; the child uses none of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        if gc.isenabled():
            stack.callback(gc.enable)
            gc.disable()
        pid = os.fork()
        if pid == 0:
            gc.freeze()
    if pid == 0:
        os.close(read)
        _child(work, write)
    os.close(write)
    try:
        text, stuck = _read_all(read, limit_s, _Standstill(pid, stuck_s))
    finally:
        os.close(read)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if stuck:
        return None
    if text is None:
        raise UnsupportedError(
            f"the dry run took longer than {limit_s:.0f} s; use a smaller sample batch, or estimate without one (model"
            " states only)"
        )
    if not text:
        raise UnsupportedError(
            f"the dry run's process ended without an answer (exit code {code}); estimate without a sample batch (model"
            " states only)"
        )
    answer: dict[str, Any] = json.loads(text)
    if "error" in answer:
        raise _kind_of(answer["kinds"])(answer["error"])
    return answer


def _kind_of(names: list[str]) -> type[DeepcError]:
    """The first of these classes of errors that this process has as well; UnsupportedError where they are none."""
    known: dict[str, type[DeepcError]] = {}
    left: list[type[DeepcError]] = [DeepcError]
    while left:
        kind = left.pop()
        known[_name_of(kind)] = kind
        left += kind.__subclasses__()
    return next((known[n] for n in names if n in known), UnsupportedError)


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


class _Standstill:
    """Tells when process `pid` has slept for `limit_s` without having run in between."""

    def __init__(self, pid: int, limit_s: float) -> None:
        self._path, self._limit_s = f"/proc/{pid}/stat", limit_s
        self._seen, self._since = "", time.monotonic()

    def __call__(self) -> bool:
        try:
            with open(self._path) as f:
                fields = f.read().rpartition(")")[2].split()  # proc(5): state, then utime and stime as 14th and 15th
        except OSError:
            return False
        now, seen = time.monotonic(), " ".join([fields[0], *fields[11:13]])
        if seen != self._seen or fields[0] != "S" or self._has_children():
            self._seen, self._since = seen, now
        return now - self._since >= self._limit_s

    def _has_children(self) -> bool:
        """It waits for a child of its own then."""
        with contextlib.suppress(OSError):
            pid = self._path.split("/")[2]
            with open(f"/proc/{pid}/task/{pid}/children") as f:
                return bool(f.read().strip())
        return False


_CALLS = re.compile(r"missing \d+ required|unexpected keyword argument|takes .*positional argument")


def _child(work: Callable[[], dict[str, Any]], write: int) -> None:
    """Never returns, runs nothing of the parent's exit."""
    try:
        patches.applied("threads")
        torch.set_num_threads(1)  # a forked child has no OpenMP threads to wait for
        # What fails is in the answer, without torch's traceback.
        logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
        answer = work()
    except DeepcError as exc:
        answer = {"error": str(exc), "kinds": [_name_of(k) for k in type(exc).__mro__ if issubclass(k, DeepcError)]}
    except BaseException as exc:
        why = "A dry run has shapes but no values; estimate"
        if isinstance(exc, TypeError) and _CALLS.search(str(exc)):
            why = "Give the batch that the model's forward takes: a tuple by place, a mapping by name; or estimate"
        if "fork-based" in str(exc):  # torch's own sentence
            why = "Autograd has run on a GPU in this process: estimate before the first backward, or"
        answer = {
            "kinds": [],
            "error": (
                f"the dry run failed with {type(exc).__name__}: {str(exc)[:600]} (at {_place(exc)}). {why} without a"
                " sample batch for the model states alone"
            ),
        }
    try:
        with os.fdopen(write, "w") as f:
            f.write(json.dumps(answer))
    finally:
        os._exit(0)


def _place(exc: BaseException) -> str:
    """The innermost frame outside of torch."""
    import traceback

    frames = [
        f
        for f in traceback.extract_tb(exc.__traceback__)
        if f"{os.sep}torch{os.sep}" not in f.filename and os.path.dirname(f.filename) != os.path.dirname(__file__)
    ]
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else "the dry run"


def _read_all(fd: int, limit_s: float, stands_still: _Standstill) -> tuple[str | None, bool]:
    """(what was written until the end, False); (None, False) after limit_s; (None, True): who writes stands still."""
    parts: list[bytes] = []
    end = time.monotonic() + limit_s
    while (left := end - time.monotonic()) > 0:
        if select.select([fd], [], [], min(left, 0.5))[0]:
            part = os.read(fd, 1 << 16)
            if not part:
                return b"".join(parts).decode(), False
            parts.append(part)
        elif stands_still():
            return None, True
    return None, False
