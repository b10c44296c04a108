"""Runs a command and, while it runs, stops its processes at random and lets them go on: a machine on which any process
may wait at any point, as a busy one, at the price of an idle one. What must not depend on who comes first, and does, is
found within minutes (a rank that reads shared memory before another has written it).

    python tests/fault/stops.py [--seed N] [--most SECONDS] -- make test

Each is stopped for up to SECONDS (0.25), a few at a time. Its exit code is the command's."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time

# A variable: what the command starts has it, and whatever that starts, also where its parent has gone.
MARK = "STOPS_OF"


def marked(mark: bytes) -> list[int]:
    """The living processes that have the variable."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/environ", "rb") as f:
                    if mark in f.read().split(b"\0"):
                        found.append(int(entry))
            except OSError:
                pass
    return found


def stop(pid: int, seconds: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=float, default=0.25, metavar="SECONDS")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    draw = random.Random(args.seed)
    own = str(os.getpid())
    mark = f"{MARK}={own}".encode()
    command = subprocess.Popen(args.command, env={**os.environ, MARK: own})
    while command.poll() is None:
        alive = [pid for pid in marked(mark) if pid != command.pid]
        for _ in range(min(6, len(alive))):
            seconds = args.most * draw.random() ** 2  # short ones mostly
            threading.Thread(target=stop, args=(draw.choice(alive), seconds)).start()
            time.sleep(0.03)
        time.sleep(0.03)
    return command.returncode if command.returncode >= 0 else 128 - command.returncode


if __name__ == "__main__":
    sys.exit(main())
