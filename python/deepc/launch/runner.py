"""Runs a Launch to its end: what happens becomes an exit code, one report of what failed first, and no process left.

The report comes last, after all the ranks' own output: the traceback of the rank that failed first, not of those that
failed because of it."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

from ..core.telemetry.speak import tell
from . import mpi
from .driver import GRACE_S, Driver
from .failure import Failure, first_failure, report
from .host.reaper import LingeringPopen as _LingeringPopen
from .host.reaper import become_subreaper, kill_descendants
from .options import Launch
from .remote.environment import from_files
from .remote.hosts import Host

__all__ = ["Failure", "_LingeringPopen", "first_failure", "run"]

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class _Stopped(Exception):
    def __init__(self, sig: int) -> None:
        self.sigval = sig


def _heeded() -> list[signal.Signals]:
    """Those of _STOPPING that stop this run: nohup ignores SIGHUP, a shell's background job without job control SIGINT
    and SIGQUIT, and so do we."""
    return [sig for sig in _STOPPING if signal.getsignal(sig) is not signal.SIG_IGN]


def _raise_stopped(sig: int, _frame: FrameType | None) -> None:
    raise _Stopped(sig)


def _finish(driver: Driver) -> list[Failure]:
    """A started run to its end; a signal that stops it first ends the ranks in order."""
    try:
        driver.connect()
        driver.start()
        return driver.wait()
    except (_Stopped, KeyboardInterrupt):
        for sig in _heeded():  # what follows must not be interrupted half-way; a second signal shortens it
            signal.signal(sig, lambda *_: driver.stop(0.0))
        driver.stop(GRACE_S)
        driver.wait()
        raise


def _run_ranks(launch: Launch) -> int:
    with Driver(launch) as driver:
        signal.signal(signal.SIGTSTP, lambda *_: setattr(driver, "suspend", True))
        failures = _finish(driver)
    return report(failures) if failures else 0


def _run_through(launch: Launch) -> int:
    """mpirun or srun, as the one process of a local run."""
    with mpi.reports() as reports:
        env = {**from_files(), **mpi.environment(launch, reports.address)}
        command = mpi.command(launch, env)
        if not launch.quiet:
            tell("deepc run: " + " ".join(command[: command.index(mpi.RANK)]) + " ...")
        argv = [sys.executable, "-u", mpi.RANK, "launcher", *command]
        here = replace(launch, hosts=(Host("localhost", (0,), True),), launcher="local", env={}, logs=None)
        with Driver(here, commands=[{"rank": command[0], "argv": argv, "env": env}]) as driver:
            failures = _finish(driver)
        if not failures:
            return 0
        if not reports.failures:
            return report(failures)
        # Of several exit codes srun returns the largest, so the cause's own counts; a rank that was killed could not
        # report.
        ended = failures[0].exit or 1
        theirs = 128 - ended if ended < 0 else ended
        return report(reports.failures, theirs if first_failure(reports.failures).is_consequence else None)


@contextmanager
def _pid_file(wanted: bool) -> Iterator[None]:
    """DeepSpeed's --save_pid: the launcher's pid where its parent can find it by its own."""
    path = Path(tempfile.gettempdir(), f"{os.getppid()}.deepspeed")
    if wanted:
        path.write_text(str(os.getpid()))
    try:
        yield
    finally:
        if wanted:
            path.unlink(missing_ok=True)


def _open_streams() -> None:
    """Descriptors 0 to 2, where who started us has closed them (`<&-`, some daemons): else a pipe or a rank's memory
    would get such a number, and what a library prints would go there."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest, which is this one


def run(launch: Launch) -> int:
    """Starts the ranks, waits for them and returns the exit code of the run: 0, that of the rank that failed first, or
    128 + n when signal n ended a rank or stopped the launcher. When it returns no process that the run started is
    alive, on any host. Raises CommError if a host can't be reached, or the ranks can't be started, ConfigError if
    `ulimit -n` is too small for them. Call it in the main
    thread."""
    from ..comm.place import refuse_few_descriptors  # here: the options above need no torch

    _open_streams()
    refuse_few_descriptors(max((h.ranks for h in launch.hosts if h.local), default=1))
    if not launch.quiet:
        tell(launch.describe())
    before = {sig: signal.signal(sig, _raise_stopped) for sig in _heeded()}
    before[signal.SIGTSTP] = signal.getsignal(signal.SIGTSTP)
    become_subreaper()
    try:
        with _pid_file(launch.pid_file):
            code = _run_ranks(launch) if launch.launcher in ("local", "ssh") else _run_through(launch)
    except (_Stopped, KeyboardInterrupt) as exc:
        sig = signal.Signals(getattr(exc, "sigval", signal.SIGINT))
        tell(f"\ndeepc run: stopped by {sig.name}")
        code = 128 + sig
    finally:
        for sig in _STOPPING:
            signal.signal(sig, signal.SIG_IGN)
        kill_descendants()
        for sig, handler in before.items():
            signal.signal(sig, handler)
    return code
