"""Runs a test function on several ranks, each a fresh process.

    def work(rank, world, x): ...                 # at module level of the test file
    results = run_ranks(work, 2, args=(3,))       # values returned by the ranks, in rank order

A rank's failure raises RankFailure with all tracebacks; a hang ends at the limit, with every rank's stack. Values travel as pickles between our own
processes only."""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Sequence

LIMIT_S = 120.0


class RankFailure(AssertionError):
    """One rank or more failed; `codes`: exit codes (negative: signal), `text`: their output."""

    def __init__(self, message: str, codes: list[int | None], text: list[str]) -> None:
        super().__init__(message)
        self.codes, self.text = codes, text


def run_ranks(fn: Callable, world: int, *, args: Sequence[Any] = (), backend: str | None = "deepc", timeout_s: float = 60.0,
              limit_s: float = LIMIT_S, may_die: Sequence[int] = (), env: dict[str, str] | None = None) -> list[Any]:
    """fn(rank, world, *args) in `world` processes. backend: of torch.distributed's default group, initialised before and destroyed after; None: not
    initialised. timeout_s: of its collectives. may_die: ranks that need not return (their result is None)."""
    with tempfile.TemporaryDirectory() as folder:
        job = {"module": fn.__module__, "name": fn.__qualname__, "world": world, "args": args, "backend": backend, "timeout_s": timeout_s}
        Path(folder, "job").write_bytes(pickle.dumps(job))
        path = [str(Path(sys.modules[fn.__module__].__file__).parent), *sys.path]
        full = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path), **(env or {})}
        procs, logs = [], []
        try:
            for rank in range(world):
                logs.append(open(Path(folder, f"log{rank}"), "w+"))
                procs.append(subprocess.Popen([sys.executable, __file__, folder, str(rank)], stdout=logs[-1], stderr=subprocess.STDOUT,
                                              env={**full, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}))
            hung = _await(procs, limit_s, may_die)
        finally:
            for p in procs:
                if p.poll() is None:
                    p.kill()
                p.wait()
        text = [Path(folder, f"log{r}").read_text(errors="replace") for r in range(world)]
        for log in logs:
            log.close()
        codes = [p.returncode for p in procs]
        bad = [r for r in range(world) if r not in may_die and (codes[r] != 0 or r in hung)]
        if bad:
            parts = [f"---- rank {r} of {world}: {'hung' if r in hung else f'exit code {codes[r]}'}\n{text[r]}" for r in range(world)]
            raise RankFailure("\n".join(parts), codes, text)
        return [pickle.loads(f.read_bytes()) if (f := Path(folder, f"out{r}")).exists() else None for r in range(world)]


def _await(procs: list[subprocess.Popen], limit_s: float, may_die: Sequence[int]) -> set[int]:
    """Waits for all; when one fails the others get 20 s. Returns the ranks that hung, after they were made to dump their stacks."""
    end = time.monotonic() + limit_s
    while any(p.poll() is None for p in procs):
        if any(p.poll() not in (None, 0) and r not in may_die for r, p in enumerate(procs)):
            end = min(end, time.monotonic() + 20)
            may_die = range(len(procs))
        if time.monotonic() > end:
            hung = {r for r, p in enumerate(procs) if p.poll() is None}
            for r in hung:
                procs[r].send_signal(signal.SIGUSR1)  # faulthandler
            time.sleep(1)
            return hung
        time.sleep(0.02)
    return set()


def _main(folder: str, rank: int) -> None:
    import datetime
    import faulthandler

    faulthandler.register(signal.SIGUSR1)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    import deepc  # noqa: F401  registers the backend

    job = pickle.loads(Path(folder, "job").read_bytes())
    fn = importlib.import_module(job["module"])
    for part in job["name"].split("."):
        fn = getattr(fn, part)
    if job["backend"]:
        dist.init_process_group(job["backend"], init_method=f"file://{folder}/store", rank=rank, world_size=job["world"],
                                timeout=datetime.timedelta(seconds=job["timeout_s"]))
    out = fn(rank, job["world"], *job["args"])
    Path(folder, f"out{rank}.new").write_bytes(pickle.dumps(out))
    os.replace(Path(folder, f"out{rank}.new"), Path(folder, f"out{rank}"))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
