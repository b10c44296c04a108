"""Processes in a memory cgroup, for the benches of what is larger than the memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


class Cgroup:
    """A memory cgroup with a limit; limit 0: that only counts."""

    def __init__(self, limit: int) -> None:
        self._v1 = (CGROUP / "memory").is_dir()
        self.path = (CGROUP / "memory" if self._v1 else CGROUP) / f"deepc-bench-{os.getpid()}"
        self.path.mkdir()
        if not self._v1:
            (self.path / "memory.swap.max").write_text("0")
        if limit:
            (self.path / ("memory.limit_in_bytes" if self._v1 else "memory.max")).write_text(str(limit))

    def join(self) -> None:
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def peak(self) -> int:
        """The most bytes that were charged: with cached pages of files, which the kernel drops when it needs room."""
        name = "memory.max_usage_in_bytes" if self._v1 else "memory.peak"
        return int((self.path / name).read_text())

    def close(self) -> None:
        for _ in range(50):
            try:
                return self.path.rmdir()
            except OSError:
                time.sleep(0.1)


def run_limited(
    limit: int, more: list[str], ranks: int = 1, port: int = 0, watch: Callable[[list[int]], None] = lambda pids: None
) -> tuple[str, int]:
    """Runs the bench that runs, with the arguments `more` behind its own, under a limit for all its ranks together. If
    one ends badly the others end after 5 s. port: of the ranks' master; 0: one process that is no rank. watch: is
    called with the pids meanwhile. Returns ("fine", "killed" or "failed" and the codes, the peak in bytes)."""
    group = Cgroup(limit)
    env = {**os.environ, "DEEPC_LOG_LEVEL": os.environ.get("DEEPC_LOG_LEVEL", "WARNING")}
    if port:
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        env |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    processes = [
        subprocess.Popen(
            [sys.executable, *sys.argv, *more],
            env=env | ({"RANK": str(r), "LOCAL_RANK": str(r)} if port else {}),
            preexec_fn=group.join,
        )
        for r in range(ranks)
    ]
    while any(p.poll() is None for p in processes):
        watch([p.pid for p in processes])
        if any(p.poll() not in (None, 0) for p in processes):
            time.sleep(5)
            for p in processes:
                p.kill()
        time.sleep(0.05)
    codes = [p.wait() for p in processes]
    peak = group.peak()
    group.close()
    return "fine" if not any(codes) else "killed" if -signal.SIGKILL in codes else f"failed {codes}", peak
