"""No process outlives the run: what a rank started and left behind (data-loader workers of a killed rank) is found and killed.

The launcher is the subreaper of its descendants: an orphan becomes its child instead of init's, so every process of the run stays in the
tree below the launcher, whatever session or process group it moved to. Linux only."""

from __future__ import annotations

import ctypes
import os
import signal
import time

_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> bool:
    """From now on orphaned descendants are reparented to this process. False where the kernel refuses."""
    return ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def _parents() -> dict[int, int]:
    """pid -> parent's pid, of every process that /proc shows."""
    parents = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as f:
                fields = f.read().rpartition(b")")[2].split()  # the name before it may hold anything
        except OSError:  # it went away meanwhile
            continue
        parents[int(entry)] = int(fields[1])
    return parents


def descendants(root: int) -> set[int]:
    """All processes below `root`, zombies included."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents().items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    todo = [root]
    while todo:
        for pid in children.get(todo.pop(), ()):
            if pid not in found:
                found.add(pid)
                todo.append(pid)
    return found


def _reap() -> None:
    """Collects every child that has ended. Only for when nobody else waits for children of this process any more."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def kill_descendants(timeout: float = 10.0) -> set[int]:
    """SIGKILL to all that is below this process, again until nothing is left (a child may fork while it is being killed).

    Returns the pids that were still running and had to be killed. What outlives `timeout` seconds (stuck in the kernel) is left."""
    killed: set[int] = set()
    deadline = time.monotonic() + timeout
    while True:
        _reap()
        left = descendants(os.getpid())
        if not left or time.monotonic() > deadline:
            return killed
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            killed.add(pid)
        time.sleep(0.01)
