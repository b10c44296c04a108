"""`deepc bench`: what this machine gives, in about 20 seconds: matrix products, memory, the optimizer step against
memory, collectives between ranks, disk.

Each figure is the median of repetitions in the time that its part has; another process on the machine makes all of them
worse. The comparison with other libraries is the repository's `make bench`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import ArgumentError, DeepcError
from . import onebit
from .ranks import measure_in_ranks

PARTS = ("gemm", "memory", "optimizer", "collectives", "disk")
_SHARE = {"gemm": 0.2, "memory": 0.1, "optimizer": 0.2, "collectives": 0.3, "disk": 0.2}
_SIZES = (8, 4096, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
_OPS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
_LIMIT_S = 90.0  # of the ranks: most of it is importing torch
_MIB = 1 << 20


def _median_s(what: Callable[[], Any], budget_s: float, least: int = 3, most: int = 2000) -> float:
    """Seconds of one call: median of what fits into the budget, after one to warm up."""
    what()
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while len(times) < least or (time.perf_counter() < end and len(times) < most):
        begin = time.perf_counter()
        what()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


# ---- parts -----------------------------------------------------------------------------------------------------------
def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import ctypes

    import torch

    from ...core import memory
    from ...core.lib import C

    isa = ctypes.c_int(-1)
    model = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    return {
        "host": platform.node(),
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "available_bytes": memory.available(),
        "isa": C.dc_isa_name(isa.value).decode() if C.dc_isa_current(ctypes.byref(isa)) == 0 else "?",
        "torch": str(torch.__version__),
        "deepc": C.dc_version().decode(),
        "gpus": (
            [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
            if torch.cuda.is_available()
            else []
        ),
        "load": os.getloadavg()[0],
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def gemm(budget_s: float) -> list[dict[str, Any]]:
    """TFLOP/s of square matrix products of torch: {"dtype", "n", "device", "seconds", "tflops"}."""
    import torch

    from ...core import ops

    out = []
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    cases = [
        (d, t, n)
        for d in devices
        for t in (torch.float32, torch.bfloat16)
        for n in ((1024,) if d == "cpu" else (8192,))
    ]
    for device, dtype, n in cases:
        a, b = (torch.randn(n, n, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
        c = torch.empty(n, n, dtype=dtype, device=device)

        def product(a: torch.Tensor = a, b: torch.Tensor = b, c: torch.Tensor = c, device: str = device) -> None:
            torch.mm(a, b, out=c)
            if device == "cuda":
                torch.cuda.synchronize()

        took = _median_s(product, budget_s / len(cases))
        out.append(
            {
                "dtype": ops.name_of(dtype),
                "n": n,
                "device": device,
                "seconds": took,
                "tflops": 2 * n**3 / took / 1e12,
            }
        )
    return out


def memory_rate(budget_s: float) -> dict[str, Any]:
    """GB/s of c = a + b on arrays far larger than the caches (2 reads, 1 write; memory itself moves more where a write
    reads first)."""
    import torch

    n = _elements(3 * 4, 32 * _MIB)
    a = torch.ones(n, dtype=torch.float32, device="cpu")
    b, c = torch.ones_like(a), torch.empty_like(a)
    took = _median_s(lambda: torch.add(a, b, out=c), budget_s)
    return {"bytes": 12 * n, "seconds": took, "gb_per_s": 12 * n / took / 1e9}


def _elements(per: int, wanted: int) -> int:
    """Elements of arrays of `per` bytes each in all, at most a quarter of what is left."""
    from ...core import memory

    n = min(wanted, memory.available() // 4 // per)
    if n < _MIB:
        raise DeepcError(f"less than {4 * per * _MIB >> 20} MiB of memory are left: not measured")
    return n


def optimizer(budget_s: float) -> dict[str, Any]:
    """deepc.optim.AdamW on fp32 parameters: 28 bytes of traffic a parameter (4 reads, 3 writes)."""
    import torch

    from ...optim import AdamW

    n = _elements(5 * 4, 16 * _MIB)
    p = torch.nn.Parameter(torch.ones(n, dtype=torch.float32, device="cpu"))
    p.grad = torch.full_like(p, 1e-3)
    opt = AdamW([p], lr=1e-3)
    took = _median_s(opt.step, budget_s)
    return {"parameters": n, "seconds": took, "parameters_per_s": n / took, "gb_per_s": 28 * n / took / 1e9}


def disk(budget_s: float, folder: str) -> dict[str, Any]:
    """MB/s of writing (made durable) and reading a file past the page cache. direct: False where the file system has no
    O_DIRECT: then reading may come from memory."""
    import mmap

    stat = os.statvfs(folder)
    nbytes = min(256 * _MIB, stat.f_bavail * stat.f_frsize // 4) // (8 * _MIB) * (8 * _MIB)
    if nbytes < 8 * _MIB:
        raise DeepcError(f"{folder} has less than 32 MiB free: not measured")
    block = mmap.mmap(-1, 8 * _MIB)  # aligned, as O_DIRECT wants it
    block.write(os.urandom(1 << 16) * (8 * _MIB >> 16))
    fd, name = tempfile.mkstemp(prefix=".deepc-bench-", dir=folder)
    os.close(fd)
    try:
        writes: list[float] = []
        reads: list[float] = []
        end = time.perf_counter() + budget_s
        while not writes or (time.perf_counter() < end and len(writes) < 5):
            fd, direct = _open_direct(name, os.O_WRONLY)
            try:
                begin = time.perf_counter()
                for _ in range(nbytes // len(block)):
                    os.write(fd, block)
                os.fsync(fd)
                writes.append(time.perf_counter() - begin)
            finally:
                os.close(fd)
            fd, direct = _open_direct(name, os.O_RDONLY)
            try:
                if not direct:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                begin = time.perf_counter()
                while os.readv(fd, [block]):
                    pass
                reads.append(time.perf_counter() - begin)
            finally:
                os.close(fd)
    finally:
        os.unlink(name)
    return {
        "folder": os.path.abspath(folder),
        "bytes": nbytes,
        "direct": direct,
        "write_mb_per_s": nbytes / statistics.median(writes) / 1e6,
        "read_mb_per_s": nbytes / statistics.median(reads) / 1e6,
    }


def _open_direct(name: str, flags: int) -> tuple[int, bool]:
    try:
        return os.open(name, flags | os.O_DIRECT), True
    except OSError:
        return os.open(name, flags), False


# ---- collectives -----------------------------------------------------------------------------------------------------
_RANK = (
    "import sys; from deepc.observe.diagnose.bench import _bench_rank;"
    " _bench_rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))"
)


def collectives(budget_s: float, ranks: int) -> list[dict[str, Any]]:
    """Rows {"op", "bytes", "seconds", "bus_gb_per_s", "gloo_seconds"} of torch.distributed's calls on the backend
    "deepc" between `ranks` processes of this machine, one thread each; gloo_seconds: the same on Gloo, of some sizes of
    all_reduce, else None.
    """
    env = {"DEEPC_LOG_LEVEL": "WARNING"}
    results = measure_in_ranks(_RANK, ranks, budget_s, limit_s=_LIMIT_S + budget_s, env=env)
    return [{**row, **{k: max(r[i][k] for r in results) for k in ("seconds",)}} for i, row in enumerate(results[0])]


def _bench_rank(rank: int, ranks: int, folder: str, budget_s: float) -> None:
    """One rank. Prints its rows as JSON."""
    import datetime

    import torch
    import torch.distributed as dist

    import deepc  # noqa: F401

    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("deepc", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=limit)
    gloo = dist.new_group(backend="gloo", timeout=limit)
    each = budget_s / (len(_OPS) * len(_SIZES) + 3)
    rows = []
    for op in _OPS:
        for nbytes in _SIZES:
            call = _call(op, nbytes, ranks)
            took = _agreed(call, each)
            share = 2 * (ranks - 1) / ranks if op == "all_reduce" else 1.0 if op == "broadcast" else (ranks - 1) / ranks
            with_gloo = (
                _agreed(_call(op, nbytes, ranks, gloo), each / 2)
                if op == "all_reduce" and nbytes in (4096, 16 << 20)
                else None
            )
            rows.append(
                {
                    "op": op,
                    "bytes": nbytes,
                    "seconds": took,
                    "bus_gb_per_s": nbytes * share / took / 1e9,
                    "gloo_seconds": with_gloo,
                }
            )
    rows.append(
        {"op": "barrier", "bytes": 0, "seconds": _agreed(dist.barrier, each), "bus_gb_per_s": 0.0, "gloo_seconds": None}
    )
    dist.destroy_process_group()
    torch.set_num_threads(1)
    print(json.dumps(rows), flush=True)


def _call(op: str, nbytes: int, ranks: int, group: Any = None) -> Callable[[], Any]:
    """A call whose whole tensor (that of all ranks for all_gather and reduce_scatter) has about `nbytes`."""
    import torch
    import torch.distributed as dist

    n = max(ranks, nbytes // 4 // ranks * ranks)
    whole = torch.zeros(n, dtype=torch.float32, device="cpu")
    part = whole.new_zeros(n // ranks)
    if op == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if op == "broadcast":
        return lambda: dist.broadcast(whole, 0, group=group)
    if op == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)
    return lambda: dist.reduce_scatter_tensor(part, whole, group=group)


def _agreed(what: Callable[[], Any], budget_s: float) -> float:
    """Median seconds of a collective; the ranks agree on how often they call it."""
    import torch
    import torch.distributed as dist

    begin = time.perf_counter()
    for _ in range(3):
        what()
    times = torch.tensor([(time.perf_counter() - begin) / 3], dtype=torch.float64, device="cpu")
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    count = int(min(2000, max(5, budget_s / max(1e-7, times.item()))))
    found = []
    for _ in range(count):
        begin = time.perf_counter()
        what()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


# ---- all -------------------------------------------------------------------------------------------------------------
def measure(
    parts: tuple[str, ...] = PARTS,
    *,
    seconds: float = 20.0,
    ranks: int = 2,
    folder: str | None = None,
    say: Callable[[str, Any], None] | None = None,
) -> dict[str, Any]:
    """{"machine", part: result or {"error"}}; say(part, result) is called as each is there. folder: for the disk part;
    default the current one."""
    if unknown := [p for p in parts if p not in PARTS]:
        raise ArgumentError(f"unknown part {unknown[0]!r}; expected some of {', '.join(PARTS)}")
    if ranks < 2:
        raise ArgumentError(f"ranks {ranks}: collectives need at least 2")
    if not 0 < seconds <= 3600:
        raise ArgumentError(f"seconds {seconds} must be a positive number of at most 3600")
    where = folder or os.getcwd()
    if "disk" in parts and not os.path.isdir(where):
        raise ArgumentError(f"there is no folder {where!r}")
    total = sum(_SHARE[p] for p in parts)
    run: dict[str, Callable[[float], Any]] = {
        "gemm": gemm,
        "memory": memory_rate,
        "optimizer": optimizer,
        "collectives": lambda s: collectives(s, ranks),
        "disk": lambda s: disk(s, where),
    }
    out: dict[str, Any] = {"machine": machine()}
    if say:
        say("machine", out["machine"])
    for part in PARTS:
        if part not in parts:
            continue
        try:
            out[part] = run[part](seconds * 0.8 * _SHARE[part] / total)
        except (DeepcError, OSError) as exc:
            out[part] = {"error": str(exc)}
        if part == "optimizer" and "gb_per_s" in out.get("memory", {}) and "gb_per_s" in out[part]:
            out[part]["of_memory_rate"] = out[part]["gb_per_s"] / out["memory"]["gb_per_s"]
        if say:
            say(part, out[part])
    return out


def _seconds(s: float) -> str:
    return f"{s * 1e6:.3g} us" if s < 1e-3 else f"{s * 1e3:.3g} ms" if s < 1 else f"{s:.3g} s"


def _bytes(n: int) -> str:
    return f"{n >> 20} MiB" if n >= _MIB else f"{n >> 10} KiB" if n >= 1024 else f"{n} B"


def _print(part: str, found: Any) -> None:
    if isinstance(found, dict) and "error" in found:
        print(f"{part}: {found['error']}", flush=True)
    elif part == "machine":
        gpus = f"; GPUs: {', '.join(found['gpus'])}" if found["gpus"] else ""
        print(
            f"{found['processor']}: {found['cores']} cores, {found['isa']}, {found['available_bytes'] / 2**30:.1f} GiB"
            f" available{gpus}\ndeepc {found['deepc']}, torch {found['torch']}, {found['threads']} threads"
            + (f"; load {found['load']:.1f}: other processes run, figures will be low" if found["load"] > 1 else ""),
            flush=True,
        )
    elif part == "gemm":
        for r in found:
            print(
                f"matrix product, {r['n']} x {r['n']}, {r['dtype']}, {r['device']}:  {_seconds(r['seconds'])},"
                f" {r['tflops']:.3g} TFLOP/s",
                flush=True,
            )
    elif part == "memory":
        print(f"memory, c = a + b on {_bytes(found['bytes'])}:  {found['gb_per_s']:.3g} GB/s", flush=True)
    elif part == "optimizer":
        share = f", {found['of_memory_rate']:.2f} of the rate of c = a + b" if "of_memory_rate" in found else ""
        print(
            f"AdamW step on {found['parameters'] / 1e6:.3g} M fp32 parameters:  {_seconds(found['seconds'])},"
            f" {found['gb_per_s']:.3g} GB/s{share}",
            flush=True,
        )
    elif part == "disk":
        print(
            f"disk at {found['folder']}:  write {found['write_mb_per_s']:,.0f} MB/s, read {found['read_mb_per_s']:,.0f}"
            " MB/s" + ("" if found["direct"] else " (no O_DIRECT here: reading may come from memory)"),
            flush=True,
        )
    else:
        _print_collectives(found)


def _cell(row: dict[str, Any]) -> str:
    return _seconds(row["seconds"]) + (f" ({row['bus_gb_per_s']:.3g})" if row["bytes"] >= 65536 else "")


def _print_collectives(rows: list[dict[str, Any]]) -> None:
    sizes = list(dict.fromkeys(r["bytes"] for r in rows if r["op"] != "barrier"))
    print("collectives through torch.distributed, one thread a rank; time of a call (bus GB/s):", flush=True)
    print(" " * 18 + "".join(f"{_bytes(s):>18}" for s in sizes))
    found = {(r["op"], r["bytes"]): r for r in rows}
    for op in _OPS:
        print(f"  {op:<16}" + "".join(f"{_cell(found[op, s]):>18}" for s in sizes))
    slow = [found["all_reduce", s]["gloo_seconds"] for s in sizes]
    print(f"  {'all_reduce Gloo':<16}" + "".join(f"{_seconds(g) if g is not None else '':>18}" for g in slow))
    print(f"  barrier {_seconds(next(r for r in rows if r['op'] == 'barrier')['seconds'])}", flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="?",
        choices=["io", "cluster", "onebit"],
        help=(
            "io: one file, written and read by plain calls and by deepc.offload, in turns; one JSON line per figure."
            " cluster: a description of this machine for deepc plan --cluster (docs/planner.md). onebit: whether a"
            " 1-bit optimizer pays here; in ranks of deepc run on your network (docs/onebit.md)"
        ),
    )
    parser.add_argument("--only", metavar="PART,...", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="ranks of the collectives (2)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        metavar="S",
        help="about how long it may take, without starting the ranks (20)",
    )
    parser.add_argument(
        "--folder", metavar="DIR", help="where the disk is measured; up to 256 MiB are written and removed (here)"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--threads", type=int, metavar="N", help="of each rank, with cluster (cores / ranks)")
    parser.add_argument("-o", "--output", metavar="FILE", help="of cluster (cluster.yaml; -: printed)")
    onebit.add_arguments(parser)


def _describe(args: argparse.Namespace) -> int:
    """`deepc bench cluster`."""
    from . import calibrate

    if args.ranks < 1:
        raise ArgumentError(f"--ranks {args.ranks} must be at least 1")
    if not 0 < args.seconds <= 3600:
        raise ArgumentError(f"seconds {args.seconds} must be a positive number of at most 3600")
    output = args.output or "cluster.yaml"
    if not (output == "-" or Path(output).parent.is_dir()):  # said before it is measured
        raise ArgumentError(f"--output {output}: there is no folder {str(Path(output).parent)!r}")
    folder = args.folder or os.getcwd()
    try:
        found = disk(args.seconds / 10, folder)
        rate, stat = min(found["write_mb_per_s"], found["read_mb_per_s"]) * 1e6, os.statvfs(folder)
        tier = {"rate": float(round(rate)), "free": float(stat.f_bavail * stat.f_frsize // 2)}
    except (DeepcError, OSError):
        tier = {"rate": 0.0, "free": 0.0}
    threads = args.threads or max(1, len(os.sched_getaffinity(0)) // args.ranks)
    calibrate.write(calibrate.measure(args.ranks, threads, args.seconds, machine(), tier), output)
    return 0


def run(args: argparse.Namespace) -> int:
    """The exit code."""
    if args.what == "io":
        from . import disk

        return disk.run(args.folder, args.seconds)
    if args.what == "cluster":
        return _describe(args)
    if args.threads or args.output:
        raise ArgumentError("--threads and --output are options of `deepc bench cluster`")
    if args.what == "onebit":
        if not 0 < args.seconds <= 3600:
            raise ArgumentError(f"seconds {args.seconds} must be a positive number of at most 3600")
        return onebit.run(args)
    if args.nodes or args.rate or args.step:
        raise ArgumentError("--nodes, --rate and --step are options of `deepc bench onebit`")
    parts = tuple(args.only.split(",")) if args.only else PARTS
    found = measure(
        parts, seconds=args.seconds, ranks=args.ranks, folder=args.folder, say=None if args.json else _print
    )
    if args.json:
        print(json.dumps(found, indent=1))
    return 1 if any(isinstance(v, dict) and "error" in v for v in found.values()) else 0
