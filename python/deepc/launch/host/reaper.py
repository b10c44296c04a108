"""No process outlives the run: what a rank started and left behind (data-loader workers of a killed rank) is found and
killed.

The agent is the subreaper of its descendants: an orphan becomes its child instead of init's, so every process of the
run stays in the tree below the agent, whatever session or process group it moved to. Linux only. Only the standard
library and no import of deepc: agent.py loads this file by its path."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Container

LINGER_S = 0.25  # ranks look after their peers every 20 ms
_PR_SET_CHILD_SUBREAPER = 36


class LingeringPopen(subprocess.Popen[bytes]):
    """A rank that failed stays a zombie for a moment before it is collected: from the zombie the other ranks read how
    it ended (its signal or exit code; before Linux 6.15 there is no other place), and they get the time to say so
    before they are stopped as well.
    """

    _seen: float | None = None

    def poll(self) -> int | None:
        if self.returncode is None and self._is_fresh():
            return None
        return super().poll()

    def _is_fresh(self) -> bool:
        try:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        if ended is None or (ended.si_code == os.CLD_EXITED and ended.si_status == 0):
            return False
        now = time.monotonic()
        self._seen = self._seen or now
        return now - self._seen < LINGER_S


def become_subreaper() -> bool:
    """From now on orphaned descendants are reparented to this process. False where the kernel refuses."""
    return bool(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


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


def reap_orphans(own: Container[int] = ()) -> None:
    """Collects the children that have ended, but those in `own`, whose end somebody else asks for: a run of weeks whose
    script starts a helper in the background at each checkpoint would else fill the system's table of processes. Without
    `own` only for when nobody else waits for children of this process any more."""
    try:
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in own:
            os.waitpid(ended.si_pid, os.WNOHANG)
    except ChildProcessError:
        pass


def kill_descendants(timeout: float = 10.0) -> set[int]:
    """SIGKILL to all that is below this process, again until nothing is left (a child may fork while it is being
    killed).

    Returns the pids that were still running and had to be killed. What outlives `timeout` seconds (stuck in the kernel)
    is left.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + timeout
    while True:
        reap_orphans()
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
