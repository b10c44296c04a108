"""What every bench shares: statistics of interleaved rounds, JSON lines, GPT-2's shapes, the machine in words, build of
small C helpers.

A figure is the median over rounds. Contenders take turns (A B C, A B C, ...), and a ratio is the median of the rounds'
own ratios, because the bandwidth of a shared machine drifts by 2x within minutes."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import random
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]
EXTENSIONS = HERE / ".extensions"  # what peers compile, and our own helpers; git-ignored


# ---- results ---------------------------------------------------------------------------------------------------------
def emit(
    bench: str,
    figure: str,
    what: str,
    unit: str,
    values: Sequence[float],
    *,
    ratio: float | None = None,
    peer: str | None = None,
    **more,
) -> None:
    """Prints one JSON line. ratio: > 1 means better than `peer` (for a limit: the fraction of it that is reached)."""
    print(json.dumps(row(bench, figure, what, unit, values, ratio=ratio, peer=peer, **more)), flush=True)


def row(
    bench: str,
    figure: str,
    what: str,
    unit: str,
    values: Sequence[float],
    *,
    ratio: float | None = None,
    peer: str | None = None,
    **more,
) -> dict:
    """The JSON line of `emit`, not printed."""
    low, high = quartiles(values)
    return {
        "bench": bench,
        "figure": figure,
        "what": what,
        "unit": unit,
        "median": _short(statistics.median(values)),
        "min": _short(min(values)),
        "q1": _short(low),
        "q3": _short(high),
        "max": _short(max(values)),
        "n": len(values),
        "ratio": None if ratio is None else float(f"{ratio:.4g}"),
        "peer": peer,
        **more,
    }


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third."""
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _short(x: float) -> float:
    return float(f"{x:.5g}")


def number(x: float) -> str:
    """As the tables show it."""
    return f"{x:,.0f}" if x >= 1000 else f"{x:.4g}"


def value(r: Mapping[str, Any]) -> str:
    """A row's median, with the quartiles where it has more than one value."""
    return number(r["median"]) + (f" ({number(r['q1'])} to {number(r['q3'])})" if r["n"] > 1 else "")


def skip(bench: str, what: str, why: str) -> None:
    """Says that `what` was not measured."""
    print(json.dumps({"bench": bench, "skipped": what, "why": why}), flush=True)


def paired(of: Sequence[float], over: Sequence[float]) -> float:
    """Median of the rounds' ratios of / over."""
    return statistics.median(a / b for a, b in zip(of, over))


def paired_row(of: Sequence[float], over: Sequence[float]) -> dict[str, float]:
    """The same as fields of a row, with the quartiles of the rounds' ratios."""
    low, high = quartiles([a / b for a, b in zip(of, over)])
    return {"ratio": paired(of, over), "ratio_q1": float(f"{low:.4g}"), "ratio_q3": float(f"{high:.4g}")}


def best_of(times: Mapping[str, Sequence[float]], names: Iterable[str]) -> list[float]:
    """Per round the smallest of `names`."""
    return [min(row) for row in zip(*(times[n] for n in names))]


def report(
    bench: str,
    figure: str,
    unit: str,
    times: Mapping[str, Sequence[float]],
    ours: Mapping[str, Sequence[Sequence[str]]],
    *,
    limit: str | None = None,
    **more,
) -> None:
    """One line per contender; per contender of `ours` one more for each of its peers, for the best of each list of
    them, and for the limit."""
    for name, values in times.items():
        emit(bench, figure, name, unit, values, **more)
    for mine, lists in ours.items():
        for rivals in lists:
            rivals = [p for p in rivals if p in times]
            for peer in rivals:
                emit(bench, figure, mine, unit, times[mine], ratio=paired(times[peer], times[mine]), peer=peer, **more)
            if len(rivals) > 1:
                emit(
                    bench,
                    figure,
                    mine,
                    unit,
                    times[mine],
                    ratio=paired(best_of(times, rivals), times[mine]),
                    peer="best of: " + "; ".join(rivals),
                    **more,
                )
        if limit is not None:
            emit(bench, figure, mine, unit, times[mine], ratio=paired(times[limit], times[mine]), peer=limit, **more)


def fastest(times: Mapping[str, Sequence[float]], prefix: str) -> str | None:
    """Of the contenders whose names begin so, the one with the smallest median."""
    return min((n for n in times if n.startswith(prefix)), key=lambda n: statistics.median(times[n]), default=None)


def rounds(
    contenders: Mapping[str, Callable[[], None]], count: int, *, pause: float = 0.02, warmup: int = 1
) -> dict[str, list[float]]:
    """Milliseconds per contender and round, in turns. pause: lets the previous contender's threads fall asleep (two
    OpenMP libraries in one process spin for a while after each job)."""
    times: dict[str, list[float]] = {n: [] for n in contenders}
    for r in range(-warmup, count):
        for name, run in contenders.items():
            time.sleep(pause)
            started = time.perf_counter()
            run()
            elapsed = 1e3 * (time.perf_counter() - started)
            if r >= 0:
                times[name].append(elapsed)
    return times


# ---- subjects --------------------------------------------------------------------------------------------------------
def gpt2_shapes(vocab: int = 50257, width: int = 768, layers: int = 12, positions: int = 1024) -> list[tuple[int, ...]]:
    """GPT-2's 148 tensors, 124.4 M elements, in the order of the model."""
    block = [
        (width,),
        (width,),
        (width, 3 * width),
        (3 * width,),
        (width, width),
        (width,),
        (width,),
        (width,),
        (width, 4 * width),
        (4 * width,),
        (4 * width, width),
        (width,),
    ]
    return [(vocab, width), (positions, width), *(layers * block), (width,), (width,)]


def numel(shape: Sequence[int]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out


def free_port() -> int:
    """Of this host, which nobody listens on; below those that the kernel gives outgoing connections, of which one could
    take it before the ranks do."""
    while True:
        port = random.SystemRandom().randrange(20000, 30000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


# ---- machine ---------------------------------------------------------------------------------------------------------
def version(distribution: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def cpu_flags() -> set[str]:
    """What /proc/cpuinfo says that the processor can do; empty where there is none, or none of x86's."""
    return set(_cpu_info().get("flags", "").split())


def _cpu_info() -> dict[str, str]:
    try:
        with open("/proc/cpuinfo") as f:
            return dict((k.strip(), v.strip()) for k, _, v in (line.partition(":") for line in f) if v)
    except OSError:
        return {}


def slow_bf16() -> str:
    """Why 16-bit steps are left out here, "" where they are not: torch's bf16 products (oneDNN) need AVX-512."""
    flags = cpu_flags()
    if not flags or {"avx512bw", "avx512vl", "avx512dq"} <= flags:
        return ""
    return "torch has no fast bf16 products on a processor without AVX-512: such a step takes 15 times fp32's, anyone's"


def cpu_model() -> str:
    info, flags = _cpu_info(), cpu_flags()
    names = [
        n
        for f, n in (
            ("avx2", "AVX2"),
            ("avx512f", "AVX-512"),
            ("avx512_bf16", "AVX-512 BF16"),
            ("amx_bf16", "AMX BF16"),
        )
        if f in flags
    ]
    return f"{info.get('model name', platform.machine())} ({', '.join(names) or 'no AVX2'})"


def machine() -> dict[str, str]:
    """The machine and the software in words, without names or paths."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "processor": cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory:.0f} GiB",
        "Python": platform.python_version(),
        "torch": version("torch") or "absent",
        "DeepSpeed": version("deepspeed") or "not installed",
        "transformers": version("transformers") or "not installed",
        "date": time.strftime("%Y-%m-%d"),
    }


def status_mib(pid: int | str, *keys: str) -> float:
    """Sum of these fields of /proc/PID/status."""
    with open(f"/proc/{pid}/status") as f:
        fields = dict(line.split(":", 1) for line in f)
    return sum(int(fields[key].split()[0]) for key in keys) / 1024


def load_average() -> float:
    return os.getloadavg()[0]


def cores_in_use(seconds: float = 2.0) -> float:
    """By whatever runs now: the load average still has what ended a minute ago."""

    def busy() -> int:
        user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
        return user + nice + system + irq + softirq

    before = busy()
    time.sleep(seconds)
    return (busy() - before) / os.sysconf("SC_CLK_TCK") / seconds


def die_with_parent() -> None:
    """Linux: this process is killed when its parent ends, however that happens. A rank may spin in a peer's library,
    and nobody is left to measure for."""
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL


# ---- helpers in C ----------------------------------------------------------------------------------------------------
def compiled(source: str, output: str, *flags: str) -> Path | None:
    """Compiles HERE/source into EXTENSIONS/output unless that is newer; None without a C compiler. Raises
    CalledProcessError if it fails."""
    target, path = EXTENSIONS / output, HERE / source
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    EXTENSIONS.mkdir(exist_ok=True)
    if not target.exists() or target.stat().st_mtime < path.stat().st_mtime:
        fresh = target.with_suffix(f".{os.getpid()}")
        subprocess.run(
            [compiler, "-O3", "-std=gnu17", f"-I{REPO}", f"-I{REPO / 'ops'}", str(path), "-o", str(fresh), *flags],
            check=True,
        )
        fresh.replace(target)
    return target


class Limit:
    """The machine's limit for AdamW's traffic: 4 reads and 3 writes in place per element and one addition each, in
    several WAYS, of which the fastest counts: on the threads and in the pieces that dc_adamw uses or one piece per
    thread, as the compiler makes the loop or with all arrays fetched ahead, as hand-written kernels do."""

    WAYS = {  # (in pieces, bytes ahead)
        "limit (4 reads, 3 writes)": (True, 0),
        "limit, one stretch a thread": (False, 0),
        "limit, fetched 2 KiB ahead": (True, 2048),
        "limit, fetched 128 B ahead": (True, 128),
    }

    def __init__(self, core: ctypes.CDLL) -> None:
        """core: libdeepc.so (its thread pool runs the loop)."""
        path = compiled("limit.c", "limit.so", "-shared", "-fPIC")
        if path is None:
            raise FileNotFoundError("no C compiler: the machine's limit is not measured")
        self._lib = ctypes.CDLL(str(path))
        self._lib.bench_limit.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_int64] * 3
        self._pool = ctypes.cast(core.dc_parallel_for, ctypes.c_void_p)
        self._threads = core.dc_num_threads

    def __call__(self, p: int, g: int, m: int, v: int, n: int, low: int | None, way: str) -> None:
        """Walks n fp32 elements at these addresses (low: 2 bytes each, written only), in one of WAYS."""
        pieces, ahead = self.WAYS[way]
        threads = self._threads()
        grain = 8 * 4096 if pieces else -(-n // (threads * 4096)) * 4096
        self._lib.bench_limit(self._pool, p, g, m, v, low, n, grain, ahead)


def require_deepc():
    """The deepc package, or an exit that says how to get it."""
    try:
        import deepc
    except ImportError as exc:
        sys.exit(
            f"bench: can't import deepc ({exc}). Build first (make bench does), or set PYTHONPATH=python and"
            " DEEPC_LIBRARY_DIR=<build>/lib"
        )
    return deepc
