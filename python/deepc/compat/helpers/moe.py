"""deepspeed.moe.utils: questions that have an answer without expert parallelism."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import ArgumentError


def has_moe_layers(module: torch.nn.Module) -> tuple[bool, int]:
    """(False, 0): no module is DeepSpeed's MoE. Other mixtures of experts are ordinary modules."""
    return False, 0


def is_moe_param(param: torch.Tensor) -> bool:
    return hasattr(param, "allreduce") and not param.allreduce


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    return bool(param_group.get("moe"))


def split_params_into_different_moe_groups_for_optimizer(param_groups: Any, max_group_size: float = 0) -> list[Any]:
    """The groups as a list: DeepSpeed's expert parallelism, which would split them, does not exist here."""
    if isinstance(param_groups, dict):
        return [param_groups]
    if not isinstance(param_groups, (list, tuple)):
        raise ArgumentError(
            "split_params_into_different_moe_groups_for_optimizer takes a param group (dict) or a list of them, got"
            f" {type(param_groups).__name__}"
        )
    return list(param_groups)
