"""Run folders made by formulas, for the tests of `deepc report`: what a run would have written, without a run."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

MIB = 2**20


def metrics(
    path: Path,
    steps: int = 200,
    *,
    seed: int = 0,
    skipped: tuple[int, ...] = (),
    data_s: float = 0.002,
    peak: int = 800 * MIB,
) -> list[dict]:
    """metrics.jsonl of `steps` steps of about 0.1 s whose loss falls from 7 to about 3. Returns the rows."""
    rng, clock, rows = random.Random(seed), 0.0, []
    for step in range(1, steps + 1):
        took = 0.1 + 0.01 * rng.random() + (0.25 if step == 1 or step % 77 == 0 else 0.0)
        clock += took
        row = {
            "step": step,
            "at": round(clock, 4),
            "time_s": round(took, 5),
            "loss": 3 + 4 * math.exp(-step / (steps / 5)) + 0.06 * rng.gauss(0, 1),
            "lr": 3e-4 * min(1, step / 20) * (0.5 + 0.5 * math.cos(math.pi * step / steps)),
            "grad_norm": 0.4 + 2 * math.exp(-step / 20) + 0.05 * rng.random(),
            "loss_scale": float(2 ** (16 - sum(s <= step for s in skipped))),
            "skipped": step in skipped,
            "tokens_per_s": 16384 / took,
            "samples_per_s": 16 / took,
            "tflops": 0.09 / took,
            "fraction_of_peak": 0.02 / took,
            "wait": {
                "data_s": data_s * (1 + rng.random()),
                "communication_s": 0.008 + 0.004 * rng.random(),
                "disk_s": 0.0,
            },
            "memory": {
                "process": int(peak * (0.8 + 0.1 * rng.random())),
                "process_peak": peak,
                "shared": 116 * MIB,
                "available": 4000 * MIB,
            },
            "eta_s": 1.0,
            "total_steps": steps,
            "samples": 16 * step,
            "tokens": 16384 * step,
            "precision": "bf16",
            "skipped_steps": sum(s <= step for s in skipped),
        }
        if step in skipped:
            row |= {"reason": "a gradient of blocks.3.up.weight is not finite", "grad_norm": None}
        rows.append(row)
    notes = [
        {
            "event": "memory",
            "step": 1,
            "at": rows[0]["at"],
            "text": "memory: this rank's own peak so far",
            "peak_bytes": peak - 576 * MIB,
        },
        {
            "event": "checkpoint",
            "step": steps // 2,
            "at": rows[steps // 2 - 1]["at"],
            "seconds": 0.4,
            "what": "save",
            "path": "checkpoints/step100",
        },
        {"event": "log", "step": steps // 2, "at": rows[steps // 2 - 1]["at"], "scalars": {"eval_loss": 3.4}},
        {"event": "log", "step": steps, "at": rows[-1]["at"], "scalars": {"eval_loss": 3.1}},
    ]
    lines = sorted([*rows, *notes], key=lambda r: r["step"])
    path.write_text("".join(json.dumps(r) + "\n" for r in lines))
    return rows


def info(path: Path, *, name: str = "gpt-25m", stage: int = 3, config: dict | None = None) -> dict:
    """run.json."""
    rows = [
        ("parameters", 0, 100),
        ("gradients (fp32)", 50, 0),
        ("optimizer states", 100, 0),
        ("gradient buckets and control", 0, 16),
        ("activations", 160, 0),
        ("the model's own parameters, freed", -100, 0),
    ]
    value = {
        "started": "2026-11-21T20:00:00+00:00",
        "deepc": "0.1.0",
        "torch": "2.13.0+cpu",
        "python": "3.11.2",
        "ranks": 2,
        "nodes": 1,
        "host": "node-a",
        "device": "cpu",
        "stage": stage,
        "precision": "bf16",
        "model": {"class": "GPT", "parameters": 25_200_000, "trainable": 25_000_000},
        "config": (
            config
            or {
                "train_batch_size": 16,
                "zero_optimization": {"stage": stage},
                "bf16": {"enabled": True},
                "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
            }
        ),
        "plan": {"text": "plan: ZeRO stage 3, 2 ranks", "transport": "node", "mode": "resident"},
        "predicted": {
            "known": True,
            "stage": stage,
            "world": 2,
            "ranks_per_node": 2,
            "nodes": 1,
            "node_peak": 536 * MIB,
            "rank_peak": 210 * MIB,
            "shared": 116 * MIB,
            "notes": [],
            "rows": [{"name": n, "host": h * MIB, "shared": s * MIB, "device": 0} for n, h, s in rows],
        },
    }
    path.write_text(json.dumps(value))
    return value


def trace(path: Path, rank: int, *, steps: int = 4, layers: int = 6, seed: int = 0) -> list[dict]:
    """A Chrome trace: forward and backward of nested modules, bucket reductions beside backward, waiting, the step,
    memory by category."""
    rng = random.Random(seed + rank)
    lanes = ("steps", "compute", "communication", "disk", "waiting")
    out = [{"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}]
    out += [{"ph": "M", "name": "thread_name", "pid": rank, "tid": i, "args": {"name": n}} for i, n in enumerate(lanes)]
    now = 1_000.0

    def span(lane: int, name: str, at: float, length: float, **more) -> None:
        out.append({"ph": "X", "pid": rank, "tid": lane, "name": name, "ts": at, "dur": length, **more})

    for step in range(1, steps + 1):
        begin = now
        span(4, "waiting for data", now, 900 * rng.random())
        now += 1000
        for phase, cost in (("forward", 2500), ("backward", 5200)):
            first = now
            for layer in range(layers) if phase == "forward" else reversed(range(layers)):
                length = cost * (0.9 + 0.2 * rng.random())
                span(1, f"{phase} blocks.{layer}", now, length, args={"step": step})
                span(1, "attention", now + 50, length * 0.4)
                span(1, "mlp", now + 60 + length * 0.4, length * 0.5)
                if phase == "backward":
                    span(2, "reduce bucket", now + length * 0.7, 900 + 500 * rng.random())
                now += length
                out.append(
                    {
                        "ph": "C",
                        "pid": rank,
                        "name": "memory",
                        "ts": now,
                        "args": {
                            "parameters": 100 * MIB,
                            "optimizer states": 200 * MIB,
                            "gradients": 50 * MIB,
                            "activations": (20 * (layer + 1) if phase == "forward" else 20 * layer) * MIB,
                        },
                    }
                )
            span(1, phase, first, now - first)
        span(2, "all_reduce norm", now, 300)
        span(1, "optimizer step", now + 300, 3000)
        if step == 3:
            span(3, "save checkpoint", now + 3300, 9000)
        now += 3400
        span(0, f"step {step}", begin, now - begin, cat="step")
    path.write_text(json.dumps({"traceEvents": out, "displayTimeUnit": "ms"}))
    return out


def batch(kind: str = "1f1b", *, stages: int = 2, micro_batches: int = 4, late: float = 1.0, step: int = 3) -> dict:
    """What a pipeline leaves of a measured batch: stages of 10, 20, ... ms forward, backward twice that. late: how much
    longer than predicted everything took."""
    from deepc.plan.schedule import Costs, Schedule

    plan = Schedule.make(kind, stages=stages, micro_batches=micro_batches)
    costs = [Costs(*(0.01 * (s + 1) for _ in "FIW")) for s in range(plan.stages)]
    spans = plan.simulate(costs).spans
    rows = [[[round(1e6 * s.start), round(1e6 * s.end)] for s in row] for row in spans]
    return {
        "event": "pipeline",
        "step": step,
        "at": 1.0,
        "schedule": str(plan),
        "costs": [[round(1e6 * x) for x in of] for of in costs],
        "predicted": rows,
        "measured": [[[late * a, late * a + b - a] for a, b in row] for row in rows],
    }


def comms(path: Path, rank: int, *, late: bool = True) -> dict:
    """comms_logger's log_all(return_dict=True) as a file."""

    def row(op_count, ms, nbytes, gbps):
        return {
            "count": op_count,
            "total_latency_ms": op_count * ms,
            "avg_latency_ms": ms,
            "tput_avg_gbps": gbps,
            "busbw_avg_gbps": gbps / 2,
            "msg_size_bytes": nbytes,
            "msg_size_str": "x",
        }

    summary = {
        "reduce_bucket": {str(2 * MIB): row(4800, 1.1 + 0.1 * rank, 2 * MIB, 30.0)},
        "all_reduce": {"8": row(200, 0.009, 8, 0.01), "4096": row(400, 0.012, 4096, 5.0)},
        "barrier": {"0": row(400, 0.02, 0, 0.0)},
    }
    strag = {
        "reduce_bucket": {
            str(2 * MIB): {
                "count": 4800,
                "total_comm_lat_ms": 4000.0,
                "total_straggler_ms": 1000.0 * (rank + 1),
                "msg_size_bytes": 2 * MIB,
            }
        }
    }
    value = {
        "summary": summary,
        "straggler_analysis": strag if late else None,
        "metadata": {"world_size": 2, "rank": rank},
    }
    path.write_text(json.dumps(value))
    return value


def whole(folder: Path, *, seed: int = 0, steps: int = 200, ranks: int = 2, **options) -> Path:
    """A run folder with every file."""
    folder.mkdir(parents=True, exist_ok=True)
    info(folder / "run.json", **{k: v for k, v in options.items() if k in ("name", "stage", "config")})
    metrics(
        folder / "metrics.jsonl",
        steps,
        seed=seed,
        **{k: v for k, v in options.items() if k in ("skipped", "data_s", "peak")},
    )
    for rank in range(ranks):
        trace(folder / f"trace.rank{rank}.json", rank, seed=seed)
        comms(folder / f"comms.rank{rank}.json", rank)
    (folder / "flops.txt").write_text("-------- DeepSpeed Flops Profiler --------\nparams per rank: 25.2 M\n")
    return folder
