"""run.json: what a run was started with, as data."""

from __future__ import annotations

import datetime
import os
import platform
import socket
import sys
from collections.abc import Mapping
from typing import Any

import torch

from ...core.lib import VERSION
from . import tiers

_SECRET = ("api_key", "token", "password", "secret")


def _masked(value: Any, key: str = "") -> Any:
    """A copy without keys of services."""
    if isinstance(value, Mapping):
        return {str(k): _masked(v, str(k)) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_masked(v) for v in value]
    if isinstance(value, str) and value and any(s in key.lower() for s in _SECRET):
        return "***"
    return value


def _private_before(engine: Any) -> int | None:
    """Private bytes of all ranks before initialize (rank 0's, times the ranks): what a prediction is above. None
    without a prediction."""
    if engine.first_step is None:
        return None
    before: int = engine.first_step.before["rss_bytes"]
    ranks: int = engine.everyone.world
    return max(0, before - tiers.read_status().get("file", 0)) * ranks


def describe(engine: Any, meter: Any, began: float) -> dict[str, Any]:
    """began: seconds since the epoch at time 0 of the records."""
    config, everyone = engine._config, engine.everyone
    plan = engine.plan  # of this rank's part of the model
    return {
        "started": datetime.datetime.fromtimestamp(began, datetime.timezone.utc).isoformat(timespec="seconds"),
        "began": began,
        "deepc": VERSION,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "argv0": os.path.basename(sys.argv[0]) if sys.argv else "",
        "host": socket.gethostname(),
        "ranks": everyone.world,
        "nodes": len(everyone.node_sizes),
        "ranks_per_node": everyone.node_sizes[everyone.node],
        "device": plan.device,
        "threads": torch.get_num_threads(),
        "model": {
            "class": type(engine.module).__name__,
            "parameters": meter.elements,
            "trainable": meter.trained,
            "flops_per_token": meter.flops_per_token,
        },
        "stage": plan.stage,
        "precision": engine.precision_in_words,
        "batch": {
            "train": config.train_batch_size,
            "micro": config.train_micro_batch_size_per_gpu,
            "accumulation": config.gradient_accumulation_steps,
        },
        "config": _masked(config.raw),
        "inert": [{"key": i.key, "value": i.value, "reason": i.reason} for i in config.inert],
        "plan": {
            "text": plan.describe(),
            "bytes": dict(plan.bytes),
            "mode": plan.mode,
            "transport": plan.transport,
            "buckets": plan.layout.nbuckets,
            "bucket_elems": plan.layout.bucket_elems,
            "dtype": plan.dtype.name,
        },
        "predicted": engine.memory_plan.to_dict() if engine.memory_plan is not None else None,
        "process_before": _private_before(engine),
        "log": {
            "steps_per_print": config.steps_per_print,
            "format": config.deepc.log.format,
            "seconds": config.deepc.log.seconds,
        },
    }
