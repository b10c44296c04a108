"""Runs a function of a test file on several ranks, each a process of its own.

    def work(rank, world, x): ...                 # at module level of the test file
    results = run_ranks(work, 2, args=(3,))       # what the ranks returned, in rank order

Importing torch takes seconds, so the processes of passed tests are used again (each job gets a fresh default group;
its variables end with it, and what it changes by for_this_job), but those that have the name deepspeed (_after); a
job that may not take it, because transformers had looked for it in an earlier one, is done again in new ones.
fresh=True starts new ones, for tests that change the process otherwise. New ones are forked from a process that has
imported torch and nothing of deepc (multiprocessing's forkserver; preloaded.py). executes=True starts a program
instead: for what counts memory, or depends on how a process begins; so does RANKS_EXECUTE=1 for all, and a variable
that is not deepc's. A rank's failure raises RankFailure with every rank's output and traceback; a hang ends at the
limit with every rank's stack. Jobs and results travel as pickles between our own processes only."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import multiprocessing.reduction
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import leftovers
import pytest

LIMIT_S = 300.0  # of a hang; a busy machine must not look like one
EXECUTES = bool(os.environ.get("RANKS_EXECUTE"))


class RankFailure(AssertionError):
    """A rank failed. codes: per rank, 0 fine, 1 an exception, negative a signal, None hung. text: per rank, what it
    printed."""

    def __init__(self, codes: list[int | None], text: list[str]) -> None:
        self.codes, self.text = codes, text
        super().__init__(
            "\n".join(
                f"---- rank {r} of {len(codes)}: {'hung' if c is None else 'fine' if c == 0 else f'failed ({c})'}\n{t}"
                for r, (c, t) in enumerate(zip(codes, text))
            )
        )


class _Program:
    """A process with the interface that _Worker needs: a program, which gets the number of `result` as its last
    argument."""

    def __init__(self, stdin: int, log: int, result: int, env: dict[str, str], command: Sequence[str] = ()) -> None:
        self._process = subprocess.Popen(
            [*(command or (sys.executable, __file__)), str(result)],
            stdin=stdin,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env,
            pass_fds=[result],
        )
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def wait(self) -> int:
        """The exit code, when it has ended."""
        return self._process.wait()


class Descriptors:
    """Descriptors that a process gets while it starts."""

    def __init__(self, *fds: int) -> None:
        self.fds = fds

    def __getstate__(self) -> list[Any]:
        return [multiprocessing.reduction.DupFd(fd) for fd in self.fds]

    def __setstate__(self, passed: list[Any]) -> None:
        self.fds = tuple(p.detach() for p in passed)


_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["preloaded"])


def start_fork(function: Callable, args: tuple) -> multiprocessing.process.BaseProcess:
    """function(*args) in a process that is forked from one that has imported torch."""
    process = _forks.Process(target=function, args=args)
    before = dict(os.environ)
    os.environ.update(_of_ranks())  # for the process that forks, where this is the first
    try:
        process.start()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return process


def _of_ranks() -> dict[str, str]:
    path = [str(Path(__file__).parent), *(p for p in sys.path if p)]
    one = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return {**one, "PYTHONPATH": os.pathsep.join(path)}


def become(fds: Sequence[int], env: dict[str, str]) -> None:
    """A forked process gets its standard streams and its environment."""
    gc.enable()  # see preloaded.py
    gc.callbacks.clear()  # hypothesis's, of pytest's process: a Ctrl-C that met it would be lost
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    for theirs, ours in zip(fds, (0, 1, 2)):
        os.dup2(theirs, ours)
    for fd in {*fds} - {0, 1, 2}:
        os.close(fd)
    sys.stdin = open(0, closefd=False)  # multiprocessing has closed the one that was
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p and p not in sys.path]


class _Fork:
    """The same, forked from a process that has imported torch. host: see _Worker."""

    def __init__(self, stdin: int, log: int, result: int, env: dict[str, str], host: int) -> None:
        self._process = start_fork(_forked, (Descriptors(stdin, log, result), env, host))
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """See _Program."""
        return self._process.exitcode

    def wait(self) -> int:
        """See _Program."""
        self._process.join()
        return self._process.exitcode


def _forked(descriptors: Descriptors, env: dict[str, str], host: int) -> None:
    stdin, log, result = descriptors.fds
    become((stdin, log, log), env)
    if host:
        _enter(host)
        _serve(result, importlib.import_module("nethosts").run_job)
    else:
        _serve(result)
    atexit._run_exitfuncs()  # multiprocessing leaves them out


def _enter(host: int) -> None:
    """This process moves into the network of process `host`."""
    with open(f"/proc/{host}/ns/net") as network:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(network.fileno(), 0):  # os.setns comes with Python 3.12
            raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")


class _Worker:
    """One process that runs jobs, one after the other. executes: a program of its own; command: that one. host: a
    process in whose network a forked one runs the jobs of nethosts.py."""

    def __init__(self, env: dict[str, str], executes: bool = False, command: Sequence[str] = (), host: int = 0) -> None:
        self._log = tempfile.TemporaryFile("w+b")
        self.result, theirs = os.pipe()
        stdin, self._jobs = os.pipe()
        full = {**os.environ, **_of_ranks(), **env}
        executes = executes or EXECUTES or any(not k.startswith(("DEEPC_", "RANKS_")) for k in env)
        if executes or command:
            self.process = _Program(stdin, self._log.fileno(), theirs, full, command)
        else:
            self.process = _Fork(stdin, self._log.fileno(), theirs, full, host)
        os.close(stdin)
        os.close(theirs)
        self._mark = 0
        self.spent = False  # its last job is its last
        self.has_looked = False  # a job of it: transformers has, which it does once, and there was no DeepSpeed

    def start(self, folder: str, rank: int) -> None:
        self._mark = self._log.seek(0, os.SEEK_END)
        with contextlib.suppress(BrokenPipeError):  # it is gone: its result says so
            os.write(self._jobs, f"{rank} {folder}\n".encode())

    def text(self) -> str:
        """What the current job printed."""
        self._log.seek(self._mark)
        return self._log.read().decode(errors="replace")

    def end(self) -> int:
        """Kills what still runs. Returns the exit code."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        os.close(self._jobs)
        os.close(self.result)
        return code


# The workers that are kept, by the variables that they were started with, those that were used last at the end. Forked
# ones share torch's memory; each program holds a torch of its own.
_pools: dict[tuple, list[_Worker]] = {}
_POOLS = 1 if EXECUTES else 3


def _end_pools() -> None:
    while _pools:
        _end_pool(_pools.popitem()[1])


def _end_pool(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().end()


def _pool_for(env: dict[str, str]) -> list[_Worker]:
    key = tuple(sorted(env.items()))
    _pools[key] = _pools.pop(key, [])
    while len(_pools) > _POOLS:
        _end_pool(_pools.pop(next(iter(_pools))))
    return _pools[key]


atexit.register(_end_pools)


def run_ranks(
    fn: Callable,
    world: int,
    *,
    args: Sequence[Any] = (),
    backend: str | None = "deepc",
    timeout_s: float = 60.0,
    limit_s: float = LIMIT_S,
    may_die: Sequence[int] = (),
    fresh: bool = False,
    executes: bool = False,
    env: dict[str, str] | None = None,
    nodes: str = "",
) -> list[Any]:
    """fn(rank, world, *args) in `world` processes; returns what they returned. backend: of the default process group,
    made before and destroyed after (None: no group; torchrun's variables but MASTER_* are set then too). timeout_s: of
    its collectives. may_die: ranks that may end or be killed (their result is None; implies fresh). executes: implies
    fresh. env: further variables; RANKS_SIMGPU: each has the device of tests/simgpu. nodes: the node of each rank, a
    letter each, for all groups, also the default one."""
    fresh = fresh or executes or bool(may_die)
    workers = [] if fresh else _pool_for(env or {})
    while len(workers) < world:
        workers.append(_Worker(env or {}, executes))
    has_looked = any(w.has_looked for w in workers[:world])
    with tempfile.TemporaryDirectory() as folder:
        job = {
            "module": fn.__module__,
            "name": fn.__qualname__,
            "world": world,
            "args": tuple(args),
            "backend": backend,
            "timeout_s": timeout_s,
            "nodes": nodes,
        }
        Path(folder, "job").write_bytes(pickle.dumps(job))
        if fresh:
            Path(folder, "last").touch()
        codes: list[int | None] = [None] * world
        try:
            for rank in range(world):
                workers[rank].start(folder, rank)
            codes = _await(workers[:world], limit_s, may_die)
            text = [w.text() for w in workers[:world]]
        finally:
            if fresh or any(c != 0 for c in codes):
                _end_pool(workers)
            for w in [w for w in workers if w.spent]:
                workers.remove(w)
                w.end()
        failed = [r for r, c in enumerate(codes) if c != 0 and r not in may_die]
        if failed and all((why := Path(folder, f"skipped{r}")).exists() for r in failed):
            pytest.skip(why.read_text())
        if failed and not (has_looked and any("deepc.compat.finder.ShadowedError" in t for t in text)):
            raise RankFailure(codes, text)
        if not failed:
            return [
                pickle.loads(f.read_bytes()) if (f := Path(folder, f"out{r}")).exists() else None for r in range(world)
            ]
    return run_ranks(
        fn,
        world,
        args=args,
        backend=backend,
        timeout_s=timeout_s,
        limit_s=limit_s,
        may_die=may_die,
        env=env,
        nodes=nodes,
    )  # by now the pool is empty


def run_quietly(fn: Callable, world: int, *args: Any, **options: Any) -> list[Any]:
    """run_ranks(fn, world, args=args) without the engine's reports."""
    return run_ranks(fn, world, args=args, env={"DEEPC_LOG_LEVEL": "WARNING"}, **options)


_changes = pytest.MonkeyPatch()  # what ends with the job


def for_this_job(owner: Any, name: str, value: Any) -> None:
    """owner.name = value, in a rank, until its job has ended: the process goes on to others."""
    _changes.setattr(owner, name, value)


def _restore(env: dict[str, str]) -> None:
    """The variables as they were, one by one: libraries' threads may be reading others."""
    for name in {*os.environ} - {*env}:
        del os.environ[name]
    for name, value in env.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


@contextlib.contextmanager
def placed(rank: int, nodes: str):
    """Groups that are opened inside see this rank on the node of its digit: "011" is a node of one rank and one of two.
    Empty: where it really is."""
    if nodes:
        os.environ["DEEPC_NODE_ID"] = f"host{nodes[rank]}"
    try:
        yield
    finally:
        os.environ.pop("DEEPC_NODE_ID", None)


def on_nodes(rank: int, world: int, nodes: int):
    """Groups that are opened inside see `nodes` hosts with equally many ranks."""
    return placed(rank, "".join(str(r // (world // nodes)) for r in range(world)) if nodes > 1 else "")


def _await(workers: list[_Worker], limit_s: float, may_die: Sequence[int]) -> list[int | None]:
    """Waits for all results. Once a rank has failed, the others get 20 s more; who hangs dumps its stacks."""
    codes: list[int | None] = [None] * len(workers)
    end = time.monotonic() + limit_s
    open_fds = {w.result: r for r, w in enumerate(workers)}
    while open_fds and (left := end - time.monotonic()) > 0:
        for fd in select.select(list(open_fds), [], [], left)[0]:
            rank = open_fds.pop(fd)
            said = os.read(fd, 1)
            codes[rank] = said[0] if said else workers[rank].process.wait() or 1  # end of file: it is gone
            if said and codes[rank] in (_SPENT, _HAS_LOOKED):
                workers[rank].spent, workers[rank].has_looked = codes[rank] == _SPENT, True
                codes[rank] = 0
            if codes[rank] != 0 and rank not in may_die:
                end = min(end, time.monotonic() + 20)
    for rank in open_fds.values():
        os.kill(workers[rank].process.pid, signal.SIGUSR1)
    if open_fds:
        time.sleep(1)
    return codes


# ---- the worker ------------------------------------------------------------------------------------------------------
_SPENT, _HAS_LOOKED = 2, 3  # what a worker says instead of 0


def _after() -> int:
    """What a job has made of the name `deepspeed` in this process: deepc's or DeepSpeed's, with which no other job
    should begin; or transformers has looked for it, which most jobs do not mind, but deepc can't take it any more
    (deepc.compat.finder.ShadowedError)."""
    finder = sys.modules.get("deepc.compat.finder")
    if not {"deepspeed", "deepc.compat.deepspeed"}.isdisjoint(sys.modules) or (finder and finder.is_installed()):
        return _SPENT
    return _HAS_LOOKED if "transformers.integrations.deepspeed" in sys.modules else 0


def _run_job(rank: int, folder: str) -> None:
    import datetime

    import torch.distributed as dist

    job = pickle.loads(Path(folder, "job").read_bytes())
    world = job["world"]
    nodes = job["nodes"] or "a" * world
    here = [r for r in range(world) if nodes[r] == nodes[rank]]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(LOCAL_RANK=str(here.index(rank)), LOCAL_WORLD_SIZE=str(len(here)))
    os.environ.pop("DEEPC_NODE_ID", None)
    if job["nodes"]:
        os.environ["DEEPC_NODE_ID"] = f"node {nodes[rank]}"
    fn = importlib.import_module(job["module"])
    for part in job["name"].split("."):
        fn = getattr(fn, part)
    if job["backend"]:
        dist.init_process_group(
            job["backend"],
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=job["timeout_s"]),
        )
    out = fn(rank, world, *job["args"])
    Path(folder, f"out{rank}.new").write_bytes(pickle.dumps(out))
    os.replace(Path(folder, f"out{rank}.new"), Path(folder, f"out{rank}"))
    if dist.is_initialized():
        dist.destroy_process_group()


OPTIONAL = (
    "transformers",
    "accelerate",
    "peft",
    "safetensors",
    "lightning",
)  # what a machine without a network may lack


def _serve(result_fd: int, run: Callable[[int, str], None] = _run_job) -> None:
    import faulthandler
    import traceback

    faulthandler.register(signal.SIGUSR1)
    import torch

    torch.set_num_threads(1)
    if os.environ.get("RANKS_SIMGPU"):  # a device without hardware, which comes before deepc
        sys.path.insert(0, str(Path(__file__).parents[1] / "simgpu"))
        importlib.import_module("plugin")
    import deepc  # noqa: F401

    env = dict(os.environ)
    for line in sys.stdin:
        rank, folder = line.rstrip("\n").split(" ", 1)
        code, goes_on = 0, leftovers.LOOKED_FOR and not Path(folder, "last").exists()
        before = leftovers.state() if goes_on else {}
        try:
            run(int(rank), folder)
        except BaseException as exc:
            traceback.print_exc()
            lacks = isinstance(exc, ModuleNotFoundError) and exc.name in OPTIONAL
            if lacks or type(exc).__name__ == "Skipped":  # pytest.importorskip in the job
                Path(folder, f"skipped{rank}").write_text(str(exc))
            code = 1
        _changes.undo()
        _restore(env)
        if goes_on and code == 0 and (left := leftovers.changed(before, leftovers.state())):
            print(f"the job has changed {', '.join(left)}: see for_this_job", file=sys.stderr)
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(result_fd, bytes([code or _after()]))


if __name__ == "__main__":  # as the module that tests import
    importlib.import_module("ranks")._serve(int(sys.argv[1]))
