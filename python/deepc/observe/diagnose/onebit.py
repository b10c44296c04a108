"""`deepc bench onebit`: whether a 1-bit optimizer pays here. Measures what packing costs, how fast this machine
computes and, in ranks on several nodes, the network and both exchanges; plan/predict/onebit.py makes step times of it.

    deepc bench onebit --nodes 4 --rate 1gbit                           this machine, and a network on paper
    deepc run --hostfile hosts -m deepc bench onebit --seconds 60       your network, as it is"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import statistics
import time
from typing import Any

from ...errors import ArgumentError
from ...plan.predict.onebit import (
    Kernels,
    Network,
    break_even,
    forecast,
    seconds_fp32,
    seconds_onebit,
)
from .ranks import measure_in_ranks

_RANK = (
    "import sys; from deepc.observe.diagnose.onebit import _rank;"
    " _rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4]), {nodes})"
)
_LIMIT_S = 90.0  # of the ranks: most of it is importing torch
_MOST = 16 << 20  # elements of what is measured, at the most
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
RATES = ("100mbit", "1gbit", "10gbit", "25gbit", "100gbit")  # on paper


def parse_rate(text: str) -> float:
    """ "1gbit" -> bytes/s. ArgumentError for what is no rate."""
    found = re.fullmatch(r"([0-9.]+)\s*([kmgt]?)(bit|bps|bit/s)?", text.strip().lower())
    try:
        rate = float(found[1]) * _UNITS[found[2]] / 8 if found else 0.0
    except ValueError:
        rate = 0.0
    if not rate > 0:
        raise ArgumentError(f"--rate {text!r} is no bandwidth; write 100mbit, 1gbit or 25gbit")
    return rate


def show_rate(rate: float) -> str:
    bits = 8 * rate
    scale, unit = next(
        (s, u) for s, u in ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"), (1, "bit/s")) if bits >= s or s == 1
    )
    return f"{bits / scale:.3g} {unit}"


# ---- what this machine costs -----------------------------------------------------------------------------------------
def machine_costs(budget_s: float, nodes: int) -> dict[str, float]:
    """In this process: seconds an element ("pack", "serve", "unpack", "rotate"; serve: of `nodes` payloads), and
    "flops" of matrix products in fp32 per second."""
    import torch

    from ...optim.codecs import OneBit
    from .calibrate import median_s, product_flops, products

    n, codec = _elements(), OneBit()
    x = torch.randn(n, dtype=torch.float32, device="cpu")
    error, out = torch.zeros_like(x), torch.empty_like(x)
    payload = torch.empty(codec.nbytes(n), dtype=torch.uint8, device="cpu")
    codec.encode(payload, x, error)
    rows, server = payload.repeat(nodes, 1), torch.zeros_like(x)
    each = budget_s / 5
    return {
        "pack": median_s(lambda: codec.encode(payload, x, error), each) / n,
        "serve": median_s(lambda: codec.average(payload, rows, server), each) / n,
        "unpack": median_s(lambda: codec.decode(out, payload), each) / n,
        "rotate": median_s(lambda: torch.ops.deepc.rotate_blocks(out), each) / n,
        "flops": product_flops() / median_s(products(torch.float32), each),
    }


def _elements() -> int:
    from ...core import memory

    return max(1 << 20, min(_MOST, memory.available() // 64 // 4) // 4096 * 4096)


def _rank(rank: int, world: int, folder: str, budget_s: float, nodes: int) -> None:
    """One of several processes that do the same at the same time. Prints its costs as JSON."""
    import torch
    import torch.distributed as dist

    import deepc  # noqa: F401

    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        dist.barrier()
    found = machine_costs(budget_s, nodes)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
    torch.set_num_threads(1)
    print(json.dumps(found), flush=True)


def on_paper(nodes: int, ranks: int, rate: float | None, seconds: float) -> dict[str, Any]:
    """This machine's costs with `ranks` ranks at once; the network is what the caller says. rate: bytes/s, or None."""
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    env = {"OMP_NUM_THREADS": str(threads), "DEEPC_LOG_LEVEL": "ERROR"}
    rows = measure_in_ranks(_RANK.format(nodes=nodes), ranks, 0.8 * seconds, limit_s=_LIMIT_S + 2 * seconds, env=env)
    return {
        "nodes": nodes,
        "ranks_per_node": ranks,
        "costs": _worst(rows),
        "network": None if rate is None else {"bandwidth": rate, "latency": 0.0},
        "exchange": None,
    }


def _worst(rows: list[dict[str, float]]) -> dict[str, float]:
    """Of the slowest rank."""
    return {k: (min if k == "flops" else max)(r[k] for r in rows) for k in rows[0]}


# ---- between the ranks of a run --------------------------------------------------------------------------------------
def on_the_network(seconds: float) -> dict[str, Any]:
    """Collective: of the ranks that a launcher started. What on_paper returns, with the network and both exchanges as
    they were measured: "exchange" {"elements", "fp32", "onebit": seconds, "sent_fp32", "sent_onebit": bytes of a
    rank}."""
    import torch
    import torch.distributed as dist

    from ...comm import start
    from ...comm.internode.compressed import OneBitAllReduce, grid_of

    start.init_distributed()
    rank, world = dist.get_rank(), dist.get_world_size()
    nodes, _, _, _ = grid_of(None, True)
    ranks = world // nodes

    def slowest(value: float) -> float:
        rows = [torch.zeros(1, dtype=torch.float64, device="cpu") for _ in range(world)]
        dist.all_gather(rows, torch.tensor([value], dtype=torch.float64, device="cpu"))
        return float(max(r.item() for r in rows))

    def timed(what: Any, budget_s: float) -> float:
        """Seconds of a collective on the slowest rank: the median of at least three; all ranks make as many."""
        what()
        once = slowest(_once(what))
        times = [once] + [slowest(_once(what)) for _ in range(max(2, min(200, int(budget_s / max(once, 1e-6))) - 1))]
        return statistics.median(times)

    costs: list[Any] = [None] * world
    dist.barrier()
    dist.all_gather_object(costs, machine_costs(0.3 * seconds, nodes))
    latency = bandwidth = 0.0
    exchange = None
    if nodes > 1:
        small = torch.zeros(1, dtype=torch.float32, device="cpu")
        latency = timed(lambda: dist.all_reduce(small), 0.05 * seconds) / 2
        x = torch.randn(1 << 18, dtype=torch.float32, device="cpu")
        dist.all_reduce(x)
        probe = slowest(_once(lambda: dist.all_reduce(x)))  # 1 MiB: how much is there time for?
        n = int(min(_elements(), max(1 << 18, 0.1 * seconds / probe * (1 << 18)))) // 4096 * 4096
        n = int(-slowest(-n))
        x = torch.randn(n, dtype=torch.float32, device="cpu")
        wire = OneBitAllReduce(n)
        fp32 = timed(lambda: (dist.all_reduce(x), x.mul_(1 / world)), 0.35 * seconds)
        before, dense = wire.sent_bytes, wire.dense_bytes
        wire.all_reduce_(x)
        sent, whole = wire.sent_bytes - before, wire.dense_bytes - dense
        onebit = timed(lambda: wire.all_reduce_(x), 0.2 * seconds)
        volume = 2 * (nodes - 1) / nodes * 4 * n
        bandwidth = volume / max(fp32 - 2 * latency, 0.1 * fp32)
        exchange = {"elements": n, "fp32": fp32, "onebit": onebit, "sent_fp32": whole, "sent_onebit": sent}
    return {
        "nodes": nodes,
        "ranks_per_node": ranks,
        "costs": _worst(costs),
        "network": {"bandwidth": bandwidth, "latency": latency} if nodes > 1 else None,
        "exchange": exchange,
        "rank": rank,
    }


def _once(what: Any) -> float:
    begin = time.perf_counter()
    what()
    return time.perf_counter() - begin


# ---- what follows ----------------------------------------------------------------------------------------------------
def conclude(
    found: dict[str, Any],
    parameters: float,
    compute: float | None,
    tokens: float,
    warm_up: float,
    rotated: bool = False,
) -> dict[str, Any]:
    """`found` with "job" and "rows": a forecast for each bandwidth, first the measured or given one. compute: seconds
    of a step without any exchange; None: 6 operations a parameter and token, at the rate of matrix products here.
    rotated: the optimizer's option."""
    costs, nodes, ranks = found["costs"], found["nodes"], found["ranks_per_node"]
    exchange = Kernels(costs["pack"], costs["serve"], costs["unpack"])
    kernels = dataclasses.replace(exchange, rotate=costs["rotate"]) if rotated else exchange
    step = compute if compute is not None else 6 * parameters * tokens / costs["flops"]
    given = found["network"]
    rates = [given["bandwidth"]] if given else []
    latency = given["latency"] if given else 0.0
    rates += [] if found["exchange"] else [r for r in map(parse_rate, RATES) if r not in rates]
    rows = []
    for rate in rates:
        network = Network(nodes, ranks, rate, latency)
        f = forecast(parameters, step, network, kernels)
        rows.append(
            {
                "bandwidth": rate,
                "fp32": f.fp32,
                "onebit": f.onebit,
                "step_fp32": step + f.fp32,
                "step_onebit": step + f.onebit,
                "speedup": f.speedup,
                "speedup_overlapped": f.least,
                "run": f.of_a_run(warm_up),
                "run_overlapped": f.of_a_run(warm_up, True),
            }
        )
    some = Network(nodes, ranks, 1.0, latency)
    measured = found["exchange"]
    if measured is not None:
        network = Network(nodes, ranks, given["bandwidth"], latency)
        measured = {
            **measured,
            "model_fp32": seconds_fp32(measured["elements"], network),
            "model_onebit": seconds_onebit(measured["elements"], network, exchange),
        }
    return {
        **found,
        "exchange": measured,
        "job": {
            "parameters": parameters,
            "compute": step,
            "tokens": None if compute is not None else tokens,
            "warm_up": warm_up,
            "rotated": rotated,
        },
        "rows": rows,
        "break_even": break_even(parameters, step, some, kernels),
    }


def _s(t: float) -> str:
    return f"{t * 1e6:.3g} us" if t < 1e-3 else f"{t * 1e3:.3g} ms" if t < 1 else f"{t:.3g} s"


def show(found: dict[str, Any]) -> str:
    """For people."""
    c, job, nodes, ranks = found["costs"], found["job"], found["nodes"], found["ranks_per_node"]
    lines = [
        f"{nodes} nodes of {ranks} rank{'s' * (ranks > 1)}" + ("" if found["exchange"] else ", on paper"),
        (
            f"packing on each rank, ns an element: pack {c['pack'] * 1e9:.2f}, average of {nodes}"
            f" {c['serve'] * 1e9:.2f}, unpack {c['unpack'] * 1e9:.2f}, rotate {c['rotate'] * 1e9:.2f}"
            f" ({'twice a step' if job['rotated'] else 'not counted'}); matrix products {c['flops'] / 1e9:.3g} GFLOP/s"
        ),
    ]
    if (x := found["exchange"]) is not None:
        net = found["network"]
        lines += [
            f"network: {show_rate(net['bandwidth'])} of a node, {_s(net['latency'])} a message",
            (
                f"all-reduce of {x['elements'] / 1e6:.3g} M elements, measured (as the model has it): fp32"
                f" {_s(x['fp32'])} ({_s(x['model_fp32'])}), 1 bit {_s(x['onebit'])} ({_s(x['model_onebit'])});"
                f" bytes sent by a rank: 1 / {x['sent_fp32'] / max(1, x['sent_onebit']):.1f}"
            ),
        ]
    how = "given" if job["tokens"] is None else f"{job['tokens']:,.0f} tokens on each rank"
    lines += [
        f"model: {job['parameters'] / 1e6:.4g} M parameters; a step computes for {_s(job['compute'])} ({how})",
        "",
        f"{'bandwidth':>12}{'fp32':>10}{'1 bit':>10}{'step':>10}{'in 1 bit':>10}{'speed-up':>14}{'whole run':>14}",
    ]
    for r in found["rows"]:
        times = [r["fp32"], r["onebit"], r["step_fp32"], r["step_onebit"]]
        both = [f"{r[k + '_overlapped']:.2f} - {r[k]:.2f}" for k in ("speedup", "run")]
        lines.append(
            f"{show_rate(r['bandwidth']):>12}"
            + "".join(f"{_s(t):>10}" for t in times)
            + "".join(f"{b:>14}" for b in both)
        )
    limit = found["break_even"]
    lines += [
        "",
        (
            "speed-up of a step after the warm-up: if uncompressed gradients cross beside backward as far as they can -"
            f" if not. Whole run: with {job['warm_up']:.0%} of warm-up."
        ),
        (
            f"It pays (1.1 times and more, overlapped) up to {show_rate(limit)} a node."
            if limit
            else "It does not pay at any bandwidth."
        ),
    ]
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `deepc bench onebit`, beside those of bench."""
    parser.add_argument("--parameters", type=float, default=25e6, metavar="N", help="of the model, with onebit (25e6)")
    parser.add_argument(
        "--tokens", type=float, default=1024, metavar="N", help="of a rank and step, with onebit (1024)"
    )
    parser.add_argument("--step", type=float, metavar="S", help="seconds that a step computes, instead of --tokens")
    parser.add_argument("--nodes", type=int, metavar="N", help="of the network on paper, with onebit (2)")
    parser.add_argument("--rate", metavar="RATE", help="what a node sends there, with onebit: 1gbit (several)")
    parser.add_argument("--rotated", action="store_true", help="count what the option `rotated` costs, with onebit")
    parser.add_argument(
        "--warm-up", type=float, default=0.15, metavar="SHARE", help="of a run's steps, with onebit (0.15)"
    )


def run(args: argparse.Namespace) -> int:
    """The exit code."""
    for name, value in (("--parameters", args.parameters), ("--tokens", args.tokens), ("--step", args.step)):
        if value is not None and not 0 < value < float("inf"):
            raise ArgumentError(f"{name} {value} must be above 0")
    if not 0 <= args.warm_up <= 1:
        raise ArgumentError(f"--warm-up {args.warm_up} is a share of the steps, from 0 to 1")
    in_a_run = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if in_a_run:
        if args.nodes or args.rate:
            raise ArgumentError("--nodes and --rate are of a network on paper; ranks of a run measure theirs")
        found = on_the_network(args.seconds)
    else:
        nodes = 2 if args.nodes is None else args.nodes
        if nodes < 2 or args.ranks < 1:
            raise ArgumentError(f"--nodes {nodes} --ranks {args.ranks}: a network has at least 2 nodes of 1 rank")
        found = on_paper(nodes, args.ranks, parse_rate(args.rate) if args.rate else None, args.seconds)
    done = conclude(found, args.parameters, args.step, args.tokens, args.warm_up, args.rotated)
    if found.get("rank", 0) == 0:
        print(json.dumps(done, indent=1) if args.json else show(done), flush=True)
    if in_a_run:
        import torch.distributed as dist

        dist.barrier()
        dist.destroy_process_group()
    return 0
