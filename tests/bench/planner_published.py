"""Predicted against published step times: the ten runs of Megatron-LM on A100s in arXiv:2104.04473, table 1.

    python tests/bench/planner_published.py

FLOP/s are those of the paper's formula (recomputation counted), so a step of B sequences took 96 B s l h^2 (1 + s/6h +
V/16lh) / (GPUs x FLOP/s). Layouts are the table's; the micro-batch, which it does not give, is the one that is
predicted fastest."""

from __future__ import annotations

import json

from common import require_deepc

SEQ, VOCAB = 2048, 51200
# hidden, layers, heads, tp, pp, GPUs, batch, TFLOP/s of a GPU
RUNS = {
    "1.7B": (2304, 24, 24, 1, 1, 32, 512, 137),
    "3.6B": (3072, 30, 32, 2, 1, 64, 512, 138),
    "7.5B": (4096, 36, 32, 4, 1, 128, 512, 142),
    "18.4B": (6144, 40, 48, 8, 1, 256, 1024, 135),
    "39.1B": (8192, 48, 64, 8, 2, 512, 1536, 138),
    "76.1B": (10240, 60, 80, 8, 4, 1024, 1792, 140),
    "145.6B": (12288, 80, 96, 8, 8, 1536, 2304, 148),
    "310.1B": (16384, 96, 128, 8, 16, 1920, 2160, 155),
    "529.6B": (20480, 105, 128, 8, 35, 2520, 2520, 163),
    "1008B": (25600, 128, 160, 8, 64, 3072, 3072, 163),
}


def main() -> None:
    require_deepc()
    from deepc.plan.predict.search.cluster import Cluster
    from deepc.plan.predict.search.models import Model
    from deepc.plan.predict.search.planner import Space, case_of, search

    worst = 0.0
    for name, (h, layers, heads, tp, pp, gpus, batch, rate) in RUNS.items():
        node = {"type": "a100-80gb", "count": gpus // 8, "ranks": 8, "memory": {"host": "1 TiB"}}
        cluster = Cluster.of({"nodes": [node], "network": {"bandwidth": "200 GB/s", "latency": "5 us"}})
        model = Model(name, layers, h, heads, VOCAB, SEQ, tied=True, positions=SEQ, scores=True)
        space = Space(
            tp=tp, pp=pp, sp=1, stages=(0,), offloads=("none",), recomputes=(True,), schedules=("1f1b", "interleaved")
        )
        best = search(case_of(cluster, model, batch, "bf16"), space).fastest
        flops = 96 * batch * SEQ * layers * h**2 * (1 + SEQ / (6 * h) + VOCAB / (16 * layers * h))
        took = flops / (gpus * rate * 1e12)
        ratio = best.cost.step / took
        worst = max(worst, abs(ratio - 1))
        row = {"bench": "planner_published", "what": name, "published_s": round(took, 2)}
        row |= {"predicted_s": round(best.cost.step, 2), "ratio": round(ratio, 3), "layout": str(best.layout)}
        print(json.dumps(row), flush=True)
    print(json.dumps({"bench": "planner_published", "what": "worst error", "ratio": round(worst, 3)}))


if __name__ == "__main__":
    main()
