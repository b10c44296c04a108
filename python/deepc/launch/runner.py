"""Runs a Launch to its end: torch elastic's agent starts the ranks and watches them, this file turns what happens into an exit code, one
report of what failed first, and no process left.

The report comes last, after all the ranks' own output: the traceback of the rank that failed first, not of those that failed because of it."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import CommError
from .options import Launch
from .reaper import become_subreaper, kill_descendants

# Raised on the survivors because a peer failed: never the first cause if there is another.
_CONSEQUENCES = {"RankDiedError", "AbortedError", "CommTimeoutError", "DistNetworkError", "DistBackendError"}
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_LINGER_S = 0.25  # ranks look after their peers every 20 ms
_SHUTDOWN_SECONDS = "10"  # from SIGTERM to SIGKILL of ranks that don't end by themselves


@dataclass(frozen=True)
class Failure:
    """How one rank ended. exit: its exit code, negative = signal, None = it was still running when the report was written."""

    rank: int
    pid: int
    exit: int | None
    time: float
    type: str = ""
    traceback: str = ""

    def headline(self) -> str:
        if self.exit is not None and self.exit < 0:
            name = signal.Signals(-self.exit).name if -self.exit in set(signal.Signals) else f"signal {-self.exit}"
            hint = ". If nobody sent it, the kernel was out of memory: see `dmesg`" if name == "SIGKILL" else ""
            return f"rank {self.rank} (pid {self.pid}) was killed by {name}{hint}"
        if self.traceback:
            return f"rank {self.rank} (pid {self.pid}) raised {self.type}"
        return f"rank {self.rank} (pid {self.pid}) ended with exit code {self.exit}"

    @property
    def is_ours(self) -> bool:
        """The agent ended it, because of another rank."""
        return self.exit == -signal.SIGTERM and not self.traceback

    @property
    def is_consequence(self) -> bool:
        return self.is_ours or self.type in _CONSEQUENCES or (self.type == "RuntimeError" and "Connection closed by peer" in self.traceback)


class _LingeringPopen(subprocess.Popen):
    """A rank that failed stays a zombie for a moment before it is collected: from the zombie the other ranks read how it ended (its signal or exit
    code; before Linux 6.15 there is no other place), and they get the time to say so before they are stopped as well."""

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
        return now - self._seen < _LINGER_S


class _Stopped(Exception):
    def __init__(self, sig: int) -> None:
        self.sigval = sig


def _raise_stopped(sig: int, _frame: object) -> None:
    raise _Stopped(sig)


def _elastic_config(launch: Launch, logs: str):
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    backend, endpoint, configs = "c10d", "127.0.0.1:0", {}
    if launch.master:
        backend, endpoint, configs = "static", "{}:{}".format(*launch.master), {"rank": 0}
    return LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=launch.ranks, run_id=uuid.uuid4().hex, max_restarts=0, monitor_interval=0.1,
                        rdzv_backend=backend, rdzv_endpoint=endpoint, rdzv_configs=configs, local_addr="127.0.0.1",
                        logs_specs=DefaultLogsSpecs(log_dir=logs))


def _command(launch: Launch) -> list[str]:
    """The arguments of the interpreter on every rank. elastic replaces ${local_rank} in them: a dollar of the user's is doubled."""
    own = [str(Path(__file__).with_name("rank.py")), launch.kind]
    last = ["--local_rank=${local_rank}"] if launch.pass_local_rank else []
    return ["-u", *own, *(a.replace("$", "$$") for a in launch.command), *last]


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _recorded(logs: str) -> dict[int, Failure]:
    """What the ranks themselves wrote of their end, by rank."""
    found = {}
    for file in Path(logs).rglob("error.json"):
        try:
            message = json.loads(file.read_text())["message"]
            extra = message["extraInfo"]
            rank = int(extra["rank"])
            found[rank] = Failure(rank, int(extra["pid"]), None, float(extra["time"]), extra["type"], extra["py_callstack"])
        except (OSError, ValueError, KeyError, TypeError):  # a program's own elastic error handler wrote another format
            continue
    return found


def first_failure(failures: list[Failure]) -> Failure:
    """The cause: the earliest that is not the consequence of another rank's failure."""
    return min(failures, key=lambda f: (f.is_consequence, f.time))


def _failures(logs: str, failed: dict) -> list[Failure]:
    """Merges elastic's view (exit codes) with what the ranks wrote (tracebacks)."""
    recorded = _recorded(logs)
    merged = dict(recorded)
    for rank, f in failed.items():
        wrote = recorded.get(rank)
        merged[rank] = Failure(rank, f.pid, f.exitcode, wrote.time if wrote else float(f.timestamp), wrote.type if wrote else "",
                               wrote.traceback if wrote else "")
    return list(merged.values())


def _report(failures: list[Failure]) -> int:
    """Prints why the run ended and returns its exit code: that of the rank that failed first, 128 + n for signal n."""
    first = first_failure(failures)
    others = sorted(f.rank for f in failures if f is not first and not f.is_ours)
    text = ["", "=" * 100, f"deepc run: {first.headline()}. It ended the run."]
    if others:
        text.append(f"Also failed, after it: rank {', '.join(map(str, others))}.")
    if first.traceback:
        text += ["", first.traceback.rstrip()]
    sys.stdout.flush()
    print("\n".join([*text, "=" * 100]), file=sys.stderr, flush=True)
    if first.exit is None:
        return 1
    return 128 - first.exit if first.exit < 0 else first.exit or 1


def _elastic(launch: Launch, logs: str) -> int:
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    for name in list(logging.root.manager.loggerDict):  # each has a level of its own; the report below says it once
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    subprocess_handler.Popen = _LingeringPopen  # elastic has no other way to say how its ranks are waited for
    try:
        elastic_launch(_elastic_config(launch, logs), sys.executable)(*_command(launch))
        return 0
    except ChildFailedError as exc:
        return _report(_failures(logs, exc.failures))
    except (RendezvousError, DistError) as exc:
        where = "{}:{}".format(*launch.master) if launch.master else "127.0.0.1"
        raise CommError(f"the ranks' meeting point on {where} could not be opened: {exc}. Is the loopback network up, and the port free?") from exc
    except SignalException as exc:
        raise _Stopped(exc.sigval) from None


def run(launch: Launch) -> int:
    """Starts the ranks, waits for them and returns the exit code of the run: 0, that of the rank that failed first, or 128 + n when
    signal n ended a rank or stopped the launcher. When it returns no process that the run started is alive. Call it in the main thread."""
    print(launch.describe(), file=sys.stderr, flush=True)
    before = {sig: signal.signal(sig, _raise_stopped) for sig in _STOPPING}
    become_subreaper()
    logs = tempfile.mkdtemp(prefix="deepc-run-")
    inside = {**launch.env, "DEEPC_LAUNCHER_PID": str(os.getpid()), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": _SHUTDOWN_SECONDS}
    try:
        with _environment(inside):
            code = _elastic(launch, logs)
    except (_Stopped, KeyboardInterrupt) as exc:
        sig = signal.Signals(getattr(exc, "sigval", signal.SIGINT))
        print(f"\ndeepc run: stopped by {sig.name}", file=sys.stderr, flush=True)
        code = 128 + sig
    finally:
        for sig in _STOPPING:  # what follows must not be interrupted half-way
            signal.signal(sig, signal.SIG_IGN)
        kill_descendants()
        shutil.rmtree(logs, ignore_errors=True)
        for sig, handler in before.items():
            signal.signal(sig, handler)
    return code
