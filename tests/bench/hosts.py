"""All-reduce between two test hosts (network namespaces, tests/python/nethosts.py) of two ranks each, beside flat Gloo
over the same ranks and beside the limit: the bytes that one rank per host must send, over the rate of the link.

    python tests/bench/hosts.py                                4, 32 and 128 MiB at 1 Gbit/s, under a minute
    python tests/bench/hosts.py --rounds 9 --rate 10gbit --mib 1 16 --placement 0 1 0 1

Prints JSON lines (common.emit): milliseconds per contender, the slowest rank's, and MiB that the busier host sent. The
limit has no headers in it: TCP over Ethernet of 1,500 bytes carries 95.6 % payload. Needs root, ip and tc; says so in a
line if it can't run.
"""

from __future__ import annotations

import argparse
import sys
import time

from common import REPO, emit, paired, skip

sys.path.insert(0, str(REPO / "tests" / "python"))


def measure(rank: int, world: int, sizes: list[int], rounds: int) -> dict[tuple[int, str], list[tuple[float, int]]]:
    """(seconds, bytes that this host's interface sent) per size, contender and round."""
    import nethosts
    import torch
    import torch.distributed as dist

    flat = dist.new_group(backend="gloo")
    out: dict[tuple[int, str], list[tuple[float, int]]] = {}
    for size in sizes:
        tensor = torch.ones(size // 4)
        for r in range(-1, rounds):
            for name, group in (("deepc", None), ("Gloo", flat)):
                time.sleep(0.05)  # acknowledgements of what was before
                before = nethosts.traffic()[1]
                dist.barrier()
                begin = time.perf_counter()
                dist.all_reduce(tensor, group=group)
                took = time.perf_counter() - begin
                dist.barrier()
                if r >= 0:
                    out.setdefault((size, name), []).append((took, nethosts.traffic()[1] - before))
                tensor.fill_(1)
    return out


def bits_per_second(rate: str) -> float:
    """Of tc's notation: "1gbit", "500mbit"."""
    for unit, factor in (("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)):
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * factor
    raise SystemExit(f"--rate {rate}: expected a number and gbit, mbit or kbit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--mib", type=float, nargs="+", default=[4, 32, 128])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--placement", type=int, nargs="+", default=[0, 0, 1, 1], help="host of every rank")
    args = parser.parse_args()
    import hosts  # this file as a module: what the ranks import
    import nethosts

    if nethosts.why_not():
        skip("hosts", "all_reduce between hosts", nethosts.why_not())
        return
    sizes = [int(m * (1 << 20)) for m in args.mib]
    count = len(set(args.placement))
    with nethosts.Hosts(max(args.placement) + 1, args.rate) as between:
        ranks = between.run(hosts.measure, args.placement, args=(sizes, args.rounds), backend="deepc", limit_s=600)
    for size in sizes:
        figure = (
            f"all_reduce of {size / (1 << 20):g} MiB, ranks on hosts {' '.join(map(str, args.placement))}, {args.rate}"
        )
        times = {
            n: [1e3 * max(found[0] for found in row) for row in zip(*(r[size, n] for r in ranks))]
            for n in ("deepc", "Gloo")
        }
        sent = {
            n: [max(found[1] for found in row) / (1 << 20) for row in zip(*(r[size, n] for r in ranks))]
            for n in ("deepc", "Gloo")
        }
        least = 2 * (count - 1) / count * size
        limit = 1e3 * 8 * least / bits_per_second(args.rate)
        emit(
            "hosts",
            figure,
            "deepc",
            "ms",
            times["deepc"],
            ratio=limit / sorted(times["deepc"])[args.rounds // 2],
            peer="bytes / rate",
        )
        emit("hosts", figure, "deepc", "ms", times["deepc"], ratio=paired(times["Gloo"], times["deepc"]), peer="Gloo")
        emit("hosts", figure, "Gloo", "ms", times["Gloo"])
        emit(
            "hosts",
            figure,
            "deepc",
            "MiB sent by the busier host",
            sent["deepc"],
            ratio=least / (1 << 20) / max(sent["deepc"]),
            peer="one rank per host, without headers",
        )
        emit("hosts", figure, "Gloo", "MiB sent by the busier host", sent["Gloo"])


if __name__ == "__main__":
    main()
