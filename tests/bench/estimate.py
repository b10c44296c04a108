"""Predicted against measured peak memory of training runs, one JSON line each and one with the errors of all.

    python tests/bench/estimate.py [--only TEXT] [--cases N]

A run is fresh processes, see tests/python/memory_runs.py. Error: predicted / measured - 1 of the node's peak above the
processes before initialize.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys

from common import REPO, require_deepc, skip

MIB = 2.0**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="runs whose name contains this")
    parser.add_argument("--cases", type=int, default=None, metavar="N", help="the first N of them")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="leave out the first N")
    args = parser.parse_args()
    require_deepc()
    sys.path.insert(0, str(REPO / "tests" / "python"))
    import memory_runs

    errors = []
    chosen = [(n, c) for n, c in memory_runs.CASES.items() if args.only in n][args.first :][: args.cases]
    for name, case in chosen:
        if case.get("hf") and importlib.util.find_spec("transformers") is None:
            skip("estimate", name, "transformers is not installed")
            continue
        r = memory_runs.run(case)
        errors.append(r["predicted"] / r["measured"] - 1)
        print(
            json.dumps(
                {
                    "bench": "estimate",
                    "figure": "peak memory of the node",
                    "what": name,
                    "unit": "MiB",
                    **{k: round(v / MIB, 1) for k, v in r.items() if isinstance(v, int)},
                    "error": round(errors[-1], 4),
                }
            ),
            flush=True,
        )
    if errors:
        size = sorted(abs(e) for e in errors)
        print(
            json.dumps(
                {
                    "bench": "estimate",
                    "figure": "error of the predicted peak",
                    "n": len(size),
                    "median": round(statistics.median(size), 4),
                    "worst": round(size[-1], 4),
                    "within_5_percent": sum(e <= 0.05 for e in size),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
