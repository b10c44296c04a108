"""Predicted against measured: step time and memory of 20 layouts of a GPT on 2 ranks of 1 thread.

    python tests/bench/planner.py                       # measures the machine first, as `deepc bench cluster` does
    python tests/bench/planner.py --cluster cluster.yaml --only pp

The model is that of pipelines.py with 6 blocks and a smaller vocabulary. A run is fresh processes; time is the median
of its steps, memory the kernel's high-water marks with shared pages once. The speed of a shared machine drifts: before
and after its steps each run measures the matrix products by which the machine was described, and the prediction is
multiplied by how much slower they are (`drift`). A JSON line for each layout, one for all."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import pipelines
from common import die_with_parent, free_port, require_deepc

pipelines.BLOCKS, pipelines.VOCAB = 6, 4096
SEQ, RANKS = 256, 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2 stage 0, micro 2": {"dp": 2, "stage": 0, "micro": 2},
    "dp2 stage 1, micro 2": {"dp": 2, "stage": 1, "micro": 2},
    "dp2 stage 3, micro 2": {"dp": 2, "stage": 3, "micro": 2},
    "dp2 stage 3, micro 1": {"dp": 2, "stage": 3, "micro": 1},
    "dp2 stage 1, micro 4": {"dp": 2, "stage": 1, "micro": 4},
    "dp2 stage 3, micro 8": {"dp": 2, "stage": 3, "micro": 8},
    "dp2 stage 0, micro 1 x 4": {"dp": 2, "stage": 0, "micro": 1, "accumulation": 4},
    "dp2 stage 1, micro 2 x 4": {"dp": 2, "stage": 1, "micro": 2, "accumulation": 4},
    "dp2 stage 3, micro 2 x 2": {"dp": 2, "stage": 3, "micro": 2, "accumulation": 2},
    "dp2 stage 1, micro 4, recompute": {"dp": 2, "stage": 1, "micro": 4, "recompute": True},
    "dp2 stage 3, micro 2 x 4, recompute": {"dp": 2, "stage": 3, "micro": 2, "accumulation": 4, "recompute": True},
    "pp2 1f1b, micro 1 x 8": {"pp": 2, "micro": 1, "accumulation": 8},
    "pp2 1f1b, micro 2 x 8": {"pp": 2, "micro": 2, "accumulation": 8},
    "pp2 1f1b, micro 2 x 4, stage 3": {"pp": 2, "micro": 2, "accumulation": 4, "stage": 3},
    "pp2 gpipe, micro 2 x 4": {"pp": 2, "micro": 2, "accumulation": 4, "schedule": "gpipe"},
    "pp2 zb-h1, micro 2 x 8": {"pp": 2, "micro": 2, "accumulation": 8, "schedule": "zb-h1"},
    "pp2 zb-v, micro 2 x 8": {"pp": 2, "micro": 2, "accumulation": 8, "schedule": "zb-v"},
    "pp2 interleaved, micro 2 x 4": {"pp": 2, "micro": 2, "accumulation": 4, "schedule": "interleaved"},
    "pp2 1f1b, micro 4 x 4": {"pp": 2, "micro": 4, "accumulation": 4},
    "pp2 1f1b, micro 4 x 4, recompute": {"pp": 2, "micro": 4, "accumulation": 4, "recompute": True},
}


def shape() -> Any:
    from deepc.plan.predict.search.models import Model

    return Model("bench", pipelines.BLOCKS, pipelines.WIDTH, pipelines.HEADS, pipelines.VOCAB, SEQ, positions=1024)


# ---- a rank ----------------------------------------------------------------------------------------------------------
def resident() -> dict[str, int]:
    with open("/proc/self/status") as f:
        rows = dict(line.split(":", 1) for line in f)
    return {n: int(rows[n].split()[0]) * 1024 for n in ("VmHWM", "RssShmem")}


def product_s() -> float:
    """Seconds of the products by which the machine was described, now, on all ranks at about the same time."""
    import torch
    from deepc.observe.diagnose import calibrate

    return calibrate.median_s(calibrate.products(torch.float32), 0.7)


def trained(layout: Any) -> Any:
    """A function that trains one batch."""
    import torch
    from torch.utils.checkpoint import checkpoint

    deepc = require_deepc()
    config = {
        "train_micro_batch_size_per_gpu": layout.micro,
        "gradient_accumulation_steps": layout.accumulation,
        "zero_optimization": {"stage": layout.stage},
        "optimizer": {"type": "AdamW", "params": pipelines.HYPER},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
    }
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, pipelines.VOCAB, (layout.micro, SEQ + 1), generator=draw)
    inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    if layout.pp > 1:
        model = deepc.pipe.PipelineModule(
            pipelines.parts(),
            num_stages=layout.pp,
            loss_fn=pipelines.loss_of,
            schedule=layout.schedule,
            partition_method="parameters",
            activation_checkpoint_interval=int(layout.recompute),
        )
        engine = deepc.initialize(model=model, config=config)[0]
        return lambda: engine.train_batch(iter([(inputs, labels)] * layout.accumulation))
    model = pipelines.chain()
    if layout.recompute:
        for block in model.blocks:
            block.forward = (lambda f: lambda x: checkpoint(f, x, use_reentrant=False))(block.forward)
    engine = deepc.initialize(model=model, config=config)[0]

    def batch() -> None:
        for _ in range(layout.accumulation):
            engine.backward(engine(inputs, labels))
            engine.step()

    return batch


def rank(args: argparse.Namespace) -> None:
    die_with_parent()
    require_deepc()
    import torch
    import torch._dynamo  # some layouts import it, others not: 68 MiB
    from deepc.plan.predict.search.planner import Layout

    torch.set_num_threads(1)
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")
    batch = trained(Layout(**json.loads(args.layout)))
    for _ in range(2):
        batch()
    before = product_s()
    times: list[float] = []
    for _ in range(args.steps):
        begin = time.perf_counter()
        batch()
        times.append(time.perf_counter() - begin)
    held = resident()
    print("\n" + json.dumps({"times": times, "product_s": (before + product_s()) / 2, **held}), flush=True)


def measured(layout: Any, steps: int) -> tuple[float, float, float]:
    """(seconds of a step, bytes of the node at the peak, seconds of the products beside it)."""
    port = free_port()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DEEPC_LOG": "none", "DEEPC_LOG_LEVEL": "WARNING"}
    command = [sys.executable, __file__, "--steps", str(steps), "--layout", json.dumps(as_dict(layout))]
    ranks = [
        subprocess.Popen(command, env={**env, "RANK": str(r), "LOCAL_RANK": str(r)}, stdout=subprocess.PIPE, text=True)
        for r in range(RANKS)
    ]
    told = []
    for p in ranks:
        text = p.communicate(timeout=300)[0]
        if p.returncode:
            raise SystemExit(f"a rank of {layout} failed")
        told.append(json.loads(text.strip().splitlines()[-1]))
    steps_s = [max(t) for t in zip(*(r["times"] for r in told))]
    private = sum(r["VmHWM"] - r["RssShmem"] for r in told)
    product = max(r["product_s"] for r in told)
    return statistics.median(steps_s), private + max(r["RssShmem"] for r in told), product


def as_dict(layout: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(layout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cluster", metavar="FILE", help="a description of this machine (default: measured first)")
    parser.add_argument("--only", default="", help="layouts whose name contains this")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a layout, after three")
    parser.add_argument("--layout", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.layout:
        rank(args)
        return
    require_deepc()
    from deepc.observe.diagnose import bench, calibrate
    from deepc.plan.predict.search.cluster import Cluster
    from deepc.plan.predict.search.planner import case_of, default_layout, price

    if args.cluster:
        cluster = Cluster.load(args.cluster)
    else:
        described = calibrate.measure(RANKS, 1, 24.0, bench.machine())
        print(json.dumps({"bench": "planner", "what": "cluster", **described}), flush=True)
        cluster = Cluster.of(described)
    errors: dict[str, list[float]] = {"time": [], "memory": []}
    for name, sizes in LAYOUTS.items():
        if args.only not in name:
            continue
        layout = default_layout(**sizes)
        case = case_of(cluster, shape(), layout.dp * layout.micro * layout.accumulation, "fp32")
        told = price(case, layout)
        seconds, nbytes, product = measured(layout, args.steps)
        drift = product / (calibrate.product_flops() / cluster.nodes[0].flops["fp32"])
        predicted = told.cost.step * drift
        row = {"bench": "planner", "what": name, "predicted_s": round(predicted, 4), "measured_s": round(seconds, 4)}
        row |= {"ratio": round(predicted / seconds, 3), "drift": round(drift, 3)}
        row |= {"predicted_mib": round(told.cost.host_bytes / 2**20), "measured_mib": round(nbytes / 2**20)}
        row |= {"memory_ratio": round(told.cost.host_bytes / nbytes, 3)}
        print(json.dumps(row), flush=True)
        errors["time"].append(abs(row["ratio"] - 1))
        errors["memory"].append(abs(row["memory_ratio"] - 1))
    for what, bound in (("time", 0.15), ("memory", 0.05)):
        e = sorted(errors[what])
        row = {"bench": "planner", "what": f"error of {what}", "n": len(e), "median": round(statistics.median(e), 3)}
        print(json.dumps({**row, "worst": round(e[-1], 3), f"within_{bound}": sum(x <= bound for x in e)}), flush=True)


if __name__ == "__main__":
    main()
