"""`deepc bench cluster`: measures this machine and writes what `deepc plan --cluster` reads. All ranks work at the same
time, as in training, so that what they share (memory, caches, clocks) is shared here as well; a figure is the slowest
rank's median. docs/planner.md says which term of the cost model each figure is for."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import ArgumentError
from ...plan.predict.search.cluster import Cluster
from ...plan.predict.search.models import Model
from .ranks import measure_in_ranks

_RANK = (
    "import sys; from deepc.observe.diagnose.calibrate import _rank;"
    " _rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))"
)
_LIMIT_S = 120.0  # of the ranks: much of it is importing torch
_BLOCK = Model("block", layers=1, hidden=512, heads=8, vocab=1, seq=256)
_SAMPLES = 2
_WIDTH, _LAYERS = 2048, 4  # of the model whose gradients and updates are measured


def measure(
    ranks: int, threads: int, seconds: float, machine: dict[str, Any], disk: dict[str, float] | None = None
) -> dict[str, Any]:
    """What Cluster.of takes, of this machine with `ranks` ranks of `threads` threads. machine: its "processor" and
    "available_bytes". disk: bytes/s ("rate") and bytes ("free"). DeepcError if a rank fails."""
    if ranks < 1 or threads < 1:
        raise ArgumentError(f"{ranks} ranks of {threads} threads: both must be at least 1")
    alone = _ranks(1, ranks, threads, seconds / 2)
    together = _ranks(ranks, 1, threads, seconds / 2) if ranks > 1 else alone
    worst = {k: max(r[k] for r in alone) for k in alone[0]}
    joined = {k: max(r[k] for r in together) for k in together[0]}
    return assemble(worst, joined, ranks, machine, disk or {"rate": 0, "free": 0})


def assemble(
    alone: dict[str, float], joined: dict[str, float], ranks: int, machine: dict[str, Any], disk: dict[str, float]
) -> dict[str, Any]:
    """The description, from the seconds that ranks took: alone, each training for itself at the same time as the
    others, and joined, all training one model."""
    flops = {p: product_flops() / alone[f"product_{p}"] for p in ("fp32", "bf16")}
    start = alone["operation"] / 3  # forward, and twice as much backward
    row = _BLOCK.rows()[1]
    moved = 3 * ((row["traffic"] + row["traffic_whole"]) * _SAMPLES + row["params"]) * 4
    rest = alone["block"] - 3 * row["flops"] * _SAMPLES / flops["fp32"] - 3 * row["calls"] * start
    memory = moved / max(rest, 0.05 * alone["block"])
    params = _LAYERS * _WIDTH * _WIDTH
    # a micro-batch of one sample reads and writes the weights three times: the rest is its gradients' way
    gradients = max(0.0, alone["micro"] - 3 * params * 4 / memory)
    reduced = max(1e-9, joined["micro"] - alone["micro"])
    return {
        "name": f"{ranks} ranks of this machine",
        "overlap": 0.0,
        "update_traffic": round(alone["update"] * memory / params, 2),
        "batch_traffic": round(gradients * memory / params, 2),
        "nodes": [
            {
                "name": machine["processor"],
                "count": 1,
                "ranks": ranks,
                "flops": {p: f"{f / 1e9:.4g} GFLOP/s" for p, f in flops.items()},
                "attainable": 1.0,
                "start": f"{start * 1e6:.3g} us",
                "reserve": f"{alone['reserve'] / 2**20:.4g} MiB",
                "memory": {"host": f"{machine['available_bytes'] / 2**30:.4g} GiB", "disk": disk["free"]},
                "bandwidth": {"device": f"{memory / 1e9:.4g} GB/s", "disk": disk["rate"]},
                "link": {
                    "bandwidth": f"{(ranks - 1) / ranks * params * 4 / reduced / 1e9:.4g} GB/s"
                    if ranks > 1
                    else 10**12,
                    "latency": f"{joined.get('message', 1e-6) * 1e6:.3g} us",
                },
            }
        ],
    }


def _ranks(world: int, groups: int, threads: int, budget_s: float) -> list[dict[str, float]]:
    """`groups` groups of `world` ranks at the same time: what each rank measured."""
    env = {"OMP_NUM_THREADS": str(threads), "DEEPC_LOG": "none", "DEEPC_LOG_LEVEL": "ERROR"}
    return measure_in_ranks(_RANK, world, budget_s, limit_s=_LIMIT_S + 2 * budget_s, env=env, groups=groups)


# ---- in a rank -------------------------------------------------------------------------------------------------------
def product_flops() -> float:
    """Of a product of the block's first linear layer, forward and both of backward."""
    return 3 * 2.0 * _SAMPLES * _BLOCK.seq * _BLOCK.hidden * 4 * _BLOCK.hidden


def _rank(rank: int, world: int, folder: str, budget_s: float) -> None:
    """One rank. Prints its seconds as JSON."""
    import torch

    import deepc
    from deepc.core import memory
    from deepc.core.foreign import private

    private.load_compiler()  # which torch's optimizers and checkpoints import sooner or later: 68 MiB

    if world > 1:
        import torch.distributed as dist

        dist.init_process_group("deepc", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    memory.keep_heap()
    each = budget_s / 8
    found = {
        "product_fp32": median_s(products(torch.float32), each),
        "product_bf16": median_s(products(torch.bfloat16), each),
        "operation": median_s(_operations(), each / 4) / 20,
        "block": median_s(_block(), each),
        "reserve": float(memory.process_bytes()["rss_bytes"]),
    }
    found |= _engine(deepc, world, each)
    if world > 1:
        found["message"] = _message(rank, each / 4)
        dist.destroy_process_group()
    print(json.dumps(found), flush=True)


def median_s(what: Callable[[], Any], budget_s: float) -> float:
    """Seconds of a call: the median of at least five, after three."""
    for _ in range(3):
        what()
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while len(times) < 5 or time.perf_counter() < end:
        begin = time.perf_counter()
        what()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def products(dtype: Any) -> Callable[[], None]:
    """Those of the block's first linear layer, forward and backward: product_flops() of them."""
    import torch

    n, k = _BLOCK.hidden, 4 * _BLOCK.hidden
    x = torch.randn(_SAMPLES * _BLOCK.seq, n, dtype=torch.float32, device="cpu").to(dtype)
    w = torch.randn(k, n, dtype=torch.float32, device="cpu").to(dtype)
    g = torch.randn(_SAMPLES * _BLOCK.seq, k, dtype=torch.float32, device="cpu").to(dtype)

    def run() -> None:
        torch.mm(x, w.t())
        torch.mm(g, w)
        torch.mm(g.t(), x)

    return run


def _operations() -> Callable[[], None]:
    """20 operations on hardly any data, forward and backward."""
    import torch

    x = torch.ones(16, requires_grad=True, dtype=torch.float32, device="cpu")

    def run() -> None:
        y = x
        for _ in range(20):
            y = y * 1.0
        y.sum().backward()

    return run


def _block() -> Callable[[], None]:
    """A transformer's block as people write it, forward and backward."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    h, heads = _BLOCK.hidden, _BLOCK.heads
    ln1, ln2, qkv, proj = nn.LayerNorm(h), nn.LayerNorm(h), nn.Linear(h, 3 * h), nn.Linear(h, h)
    up, down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)
    x = torch.randn(_SAMPLES, _BLOCK.seq, h, requires_grad=True, dtype=torch.float32, device="cpu")
    parameters = [p for m in (ln1, ln2, qkv, proj, up, down) for p in m.parameters()]

    def run() -> None:
        b, t, c = x.shape
        q, k, v = qkv(ln1(x)).view(b, t, 3, heads, c // heads).permute(2, 0, 3, 1, 4)
        y = x + proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c))
        y = y + down(F.gelu(up(ln2(y))))
        y.sum().backward()
        for p in parameters:
            p.grad = None

    return run


def _engine(deepc: Any, world: int, budget_s: float) -> dict[str, float]:
    """Seconds of a micro-batch and of an update of a model that hardly computes: what gradients and states cost."""
    import torch
    from torch import nn

    def made(accumulation: int) -> Callable[[], None]:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_LAYERS)])
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 0 if world == 1 else 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-6}},
            "steps_per_print": 10**9,
        }
        engine, *_ = deepc.initialize(model=model, config=config)
        x = torch.randn(1, _WIDTH, dtype=torch.float32, device="cpu")

        def run() -> None:
            for _ in range(accumulation):
                engine.backward(engine(x).square().mean())
                engine.step()

        return run

    count = max(4, int(budget_s / 0.1))  # the same in all ranks: steps wait for each other
    one, five = (_times(made(a), count) for a in (1, 5))
    micro = (five - one) / 4
    return {"micro": micro, "update": max(0.0, one - micro)}


def _times(what: Callable[[], None], count: int) -> float:
    """Median seconds of `count` calls, after three."""
    for _ in range(3):
        what()
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        what()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _message(rank: int, budget_s: float) -> float:
    """Seconds of a small message from one rank to another."""
    import torch
    import torch.distributed as dist

    x = torch.zeros(16, dtype=torch.float32, device="cpu")

    def run() -> None:
        if rank == 0:
            dist.send(x, 1)
            dist.recv(x, 1)
        elif rank == 1:
            dist.recv(x, 0)
            dist.send(x, 0)

    return _times(run, 200) / 2


# ---- the command -----------------------------------------------------------------------------------------------------
def write(found: dict[str, Any], output: str) -> None:
    """To a file (JSON, which is YAML as well); "-": printed."""
    Cluster.of(found)  # what is written can be read
    text = json.dumps(found, indent=2)
    if output == "-":
        print(text)
        return
    Path(output).write_text(text + "\n", encoding="utf-8")
    node = found["nodes"][0]
    rates = ", ".join(f"{p} {f}" for p, f in node["flops"].items())
    print(f"{output}: {node['ranks']} ranks; each has {rates}, memory {node['bandwidth']['device']}")
