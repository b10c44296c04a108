"""deepspeed.moe.utils: questions that have an answer without expert parallelism."""

from __future__ import annotations

from typing import Any

import torch


def has_moe_layers(module: torch.nn.Module) -> tuple[bool, int]:
    """(False, 0): no module is DeepSpeed's MoE. Other mixtures of experts are ordinary modules."""
    return False, 0


def is_moe_param(param: torch.Tensor) -> bool:
    return hasattr(param, "allreduce") and not param.allreduce


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    return bool(param_group.get("moe"))
