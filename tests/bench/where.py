"""Where the time of a training step goes: milliseconds a step of every operator itself, beside the same step of other
contenders (contenders.py), by torch's profiler on rank 0, in bursts by turns.

    python tests/bench/where.py --precision fp32 --rounds 5 --contenders independent+keep ddp+keep deepc-3

A row is an operator, a figure the median of the rounds; "rest" is what no operator covers: Python, hooks, autograd, and
waits for other ranks. The profiler costs a few percent of a step."""

from __future__ import annotations

import argparse
import json
import statistics
import sys

from common import load_average, machine
from contenders import MODELS, Contender
from train import BURST_S, READY_S, Pair

REST = "rest"


def measured(args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Per contender and round: operator -> ms a step, "rest" and "step" with them."""
    pairs = [Pair(c, args) for c in args.contenders]
    found: dict[str, list[dict[str, float]]] = {p.name: [] for p in pairs}
    try:
        for p in pairs:
            p.answers(READY_S)
        for p in pairs:
            p.burst(2)
        for _ in range(args.rounds):
            for p in pairs:
                p.send("profile", args.steps)
                first = p.answers(BURST_S)[0]
                step = 1e3 * first["seconds"] / args.steps
                found[p.name].append({**first["ops"], REST: step - sum(first["ops"].values()), "step": step})
    finally:
        for p in pairs:
            p.end()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--contenders", nargs="+", type=Contender.parse, required=True, metavar="BASE[+ALLOCATOR]")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="profiled steps per burst")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--model", choices=tuple(MODELS), default="25M")
    parser.add_argument("--least", type=float, default=1.0, help="leave out operators below so many ms (default 1)")
    args = parser.parse_args()
    found = measured(args)
    names = [str(c) for c in args.contenders]
    ops = sorted({op for rounds in found.values() for r in rounds for op in r})
    rows = {op: [statistics.median(r.get(op, 0.0) for r in found[n]) for n in names] for op in ops}
    print(json.dumps({"bench": "where", **machine(), "load": load_average()}))
    print("| ms a step | " + " | ".join(names) + " |\n|---" * 1 + "|---" * len(names) + "|")
    for op, row in sorted(rows.items(), key=lambda item: -max(item[1])):
        if max(row) >= args.least:
            print(f"| {op} | " + " | ".join(f"{x:.1f}" for x in row) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
