"""Measures the rows of the core's algorithm table (comm/coll.c) per op, number of ranks, kind of memory and size, and
writes from which size on each is the fastest: the file that coll.c includes.

    python tests/bench/thresholds.py --ranks 2 4 --output thresholds.def
    python tests/bench/thresholds.py --ranks 2 --ops all_reduce --bytes 4096 65536 1048576

Rows are forced by DEEPC_ALGO, all in the same processes and in interleaved rounds. Between neighbouring sizes the table
changes its row only where that gains more than --worth (noise would else write a row per size). Run it on a quiet
machine."""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import re
import statistics
import sys
import time
from pathlib import Path

from coll_rank import ROOTED, TURNS
from collectives import Set, size_name
from common import machine, require_deepc, row

SIZES = [256 << 2 * i for i in range(9)]  # 256 B to 16 MiB
HEAD = """/* thresholds.def: which row of the algorithm table (coll.c) runs a call. Written by tests/bench/thresholds.py; measure again instead of editing.
 * DC_THRESHOLD(OP, ranks, registered, bytes, row): DC_CALL_##OP, groups of up to `ranks` ranks (the last number: any), buffers registered (1) or not (0), from `bytes`
 * of the call's larger buffer on. Rows of one op, ranks and memory stand in rising order of bytes; the last one that applies is taken.
 * Measured on {processor}, {cores} cores, {date}. */
"""  # noqa: E501


def known_rows() -> dict[str, list[str]]:
    """op -> the names of its rows, from the library: what it does not know it answers with what it knows."""
    require_deepc()
    from deepc.core.lib import C, CommConfig

    os.environ["DEEPC_ALGO"] = "?"
    try:
        config = CommConfig(
            rank=0,
            size=1,
            address=b"deepc-thresholds-%d" % os.getpid(),
            label=b"rows",
            timeout_ms=1000,
            slot_bytes=4096,
            slots=2,
        )
        handle = ctypes.c_void_p()
        if C.dc_comm_open(ctypes.byref(config), ctypes.byref(handle)) == 0:
            C.dc_comm_close(handle)
            sys.exit("thresholds: this libdeepc.so does not look at DEEPC_ALGO")
    finally:
        del os.environ["DEEPC_ALGO"]
    out: dict[str, list[str]] = {}
    for op, name in re.findall(r"(\w+)=(\w+)", C.dc_last_error().decode()):
        if name not in out.setdefault(op, []):
            out[op].append(name)
    return out


def measure(ranks: Set, op: str, names: list[str], nbytes: int, args: argparse.Namespace) -> dict[str, list[float]]:
    """Microseconds per contender and round ("direct, registered")."""
    contenders = [c for c in ranks.ask("prepare_forced", op, args.dtype, nbytes, names)[0]]
    for name in list(contenders):
        said = ranks.ask("verify", name)
        if any(t.startswith("wrong") for t in said):
            sys.exit(f"thresholds: {op} {size_name(nbytes)} by row {name} gives a wrong answer: {said}")
        if said[0]:
            contenders.remove(name)
    loops = {}
    for name in contenders:
        once = max(ranks.ask("run", name, 5, 1)) / 5
        loops[name] = max(
            1,
            min(
                50 if op == "all_reduce" and nbytes > 1 << 20 else 100_000, int(args.target_ms / 1e3 / max(1e-8, once))
            ),
        )
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(args.rounds):
        for name in contenders:
            times[name].append(1e6 * max(ranks.ask("run", name, loops[name], 1)) / loops[name])
    return times


def steps(times: dict[int, dict[str, float]], worth: float) -> list[tuple[int, str]]:
    """From which size on which row: the assignment with the least sum of log(time / best time), where each change of
    row costs `worth`."""
    sizes = sorted(times)
    names = [n for n in dict.fromkeys(n for t in times.values() for n in t)]
    cost: dict[str, tuple[float, list[str]]] = {n: (0.0, []) for n in names}
    for size in sizes:
        here, best = times[size], min(times[size].values())
        fresh = {}
        for n in names:
            lost = math.log(here[n] / best) if n in here else math.inf
            before = min(cost, key=lambda m: cost[m][0] + (worth if m != n and cost[m][1] else 0.0))
            fresh[n] = (
                cost[before][0] + (worth if before != n and cost[before][1] else 0.0) + lost,
                [*cost[before][1], n],
            )
        cost = fresh
    path = min(cost.values())[1]
    return [(0 if i == 0 else size, n) for i, (size, n) in enumerate(zip(sizes, path)) if i == 0 or path[i - 1] != n]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--ops", nargs="+", help="default: all that have more than one row")
    parser.add_argument("--bytes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--target-ms", type=float, default=5.0)
    parser.add_argument(
        "--worth", type=float, default=0.05, help="gain (a fraction) for which the table changes its row"
    )
    parser.add_argument(
        "--best", action="store_true", help="by the smallest times, for a busy machine; not for results"
    )
    parser.add_argument(
        "--limit", type=int, default=120, help="seconds until a command that hangs ends the measurement"
    )
    parser.add_argument("--output", type=Path, help="write the table here (comm/thresholds.def); default: print it")
    args = parser.parse_args()
    known = known_rows()
    ops = args.ops or [op for op, names in known.items() if len(names) > 1 and op != "all_to_allv"]
    names = list(dict.fromkeys(n for op in ops for n in known[op]))
    args.contenders, args.deepspeed = ["registered"], False
    args.rows_forced = [f"{n}:" + ",".join(f"{op}={n}" for op in ops if n in known[op]) for n in names]
    started, lines = time.monotonic(), []
    for world in args.ranks:
        args.ranks = world
        ranks = Set("main", None, args)
        try:
            for op in ops:
                medians: dict[str, dict[int, dict[str, float]]] = {"": {}, ", registered": {}}
                for nbytes in sorted(args.bytes):
                    times = measure(ranks, op + TURNS if op in ROOTED else op, known[op], nbytes, args)
                    for name, values in times.items():
                        print(
                            json.dumps(
                                row(
                                    "thresholds",
                                    f"{op} {size_name(nbytes)} {args.dtype}, {world} ranks",
                                    name,
                                    "us",
                                    values,
                                )
                            ),
                            flush=True,
                        )
                        where = ", registered" if name.endswith(", registered") else ""
                        medians[where].setdefault(nbytes, {})[name.removesuffix(where)] = (
                            min(values) if args.best else statistics.median(values)
                        )
                for registered, where in enumerate(("", ", registered")):
                    lines += [
                        f"DC_THRESHOLD({op.upper()}, {world}, {registered}, {size}, {name})"
                        for size, name in steps(medians[where], args.worth)
                    ]
            ranks.close()
        finally:
            ranks.kill()
    text = HEAD.format(**machine()) + "\n".join(lines) + "\n"
    if args.output:
        args.output.write_text(text)
    else:
        print(text)
    print(f"thresholds: {time.monotonic() - started:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
