"""Ranks forked from processes that have imported torch and transformers, which is most of the time that a rank needs to
start. There is one such process per environment that only a new program gets (GLIBC_TUNABLES, LD_PRELOAD); it has one
thread and has computed nothing, so a rank is what a program of its own would be once it has imported the same."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from typing import IO, Any

from common import status_mib
from peers import environment

FLAG, FILES = "--nursery", "BENCH_FILES"


class Child:
    """A rank, as subprocess.Popen shows one: pid, stdin, wait. It leads a session of its own."""

    def __init__(self, pid: int, stdin: IO[bytes], files: float) -> None:
        self.pid, self.stdin, self.files = pid, stdin, files
        self._end = os.pidfd_open(pid)  # its parent keeps ended ones until it ends itself: no other process has the pid

    def wait(self, timeout: float | None = None) -> None:
        if not select.select([self._end], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout or 0.0)


class Nursery:
    """Context: its processes end, with what they forked, where it ends."""

    def __init__(self) -> None:
        self._mothers: dict[str, tuple[socket.socket, Any]] = {}

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        for ours, process in self._mothers.values():
            ours.close()
            process.wait()

    def fork(self, special: dict[str, str], command: list[str], env: dict[str, str], log: IO[bytes], answer: int):
        """A rank: `command` is its arguments, `env` its environment, `special` what of it a program must be started
        with. `log` becomes its output, `answer` its descriptor BENCH_RESULT."""
        ours = self._mother(special)
        read, write = os.pipe()
        try:
            # a message of its length and the descriptors first: descriptors come with the first byte that is read
            text = json.dumps({"command": command, "env": env}).encode()
            socket.send_fds(ours, [len(text).to_bytes(8, "little")], [read, log.fileno(), answer])
            ours.sendall(text)
        finally:
            os.close(read)
        pid, files = (int.from_bytes(_exactly(ours, 8), "little") for _ in range(2))
        return Child(pid, os.fdopen(write, "wb"), files)

    def _mother(self, special: dict[str, str]) -> socket.socket:
        key = json.dumps(special, sort_keys=True)
        if key not in self._mothers:
            ours, theirs = socket.socketpair()
            with theirs:
                program = [sys.executable, sys.argv[0], FLAG, str(theirs.fileno())]
                env = {**environment(1), "PYTHONWARNINGS": "ignore", **special}
                process = subprocess.Popen(program, env=env, pass_fds=[theirs.fileno()])
            self._mothers[key] = ours, process
        return self._mothers[key][0]


def serve() -> list[str] | None:
    """None in an ordinary program. In a process of a nursery: imports, and forks; returns in each rank, with its
    arguments."""
    if sys.argv[1:2] != [FLAG]:
        return None
    import torch.distributed  # noqa: F401
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: F401

    asked = socket.socket(fileno=int(sys.argv[2]))
    while True:
        head, fds, *_ = socket.recv_fds(asked, 8, 3)
        if not head:
            os._exit(0)  # the driver has ended, or needs no more
        told = json.loads(_exactly(asked, int.from_bytes(head, "little")))
        # A fork does not inherit the mapped pages of files (libraries); a program of its own has these at least.
        files = int(status_mib("self", "RssFile"))
        pid = os.fork()
        if pid == 0:
            asked.close()
            told["env"][FILES] = str(files)
            return _become(told, *fds)
        for fd in fds:
            os.close(fd)
        asked.sendall(pid.to_bytes(8, "little") + files.to_bytes(8, "little"))


def _become(told: dict[str, Any], stdin: int, log: int, answer: int) -> list[str]:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for fd, place in ((stdin, 0), (log, 1), (log, 2)):
        os.dup2(fd, place)
    for fd in (stdin, log):
        os.close(fd)
    os.environ.clear()
    os.environ.update(told["env"], BENCH_RESULT=str(answer))
    return list(told["command"])


def _exactly(of: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        part = of.recv(count - len(found))
        if not part:
            raise RuntimeError("a process of the nursery has ended: what it printed says why")
        found += part
    return found
