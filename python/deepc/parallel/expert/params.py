"""Parameters of experts: told from others, and in groups of their own for an optimizer (deepspeed.moe.utils)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ...errors import ArgumentError
from .layer import MoE


def has_moe_layers(module: torch.nn.Module) -> tuple[bool, int]:
    """(whether there is a MoE, the number of experts of the first)."""
    for m in module.modules():
        if isinstance(m, MoE):
            return True, m.num_experts
    return False, 0


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether it is an expert's."""
    return not getattr(param, "allreduce", True)


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    return bool(param_group.get("moe"))


def split_params_into_shared_and_expert_params(
    params: Iterable[torch.Tensor],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(those that are no expert's, those of experts)."""
    params = list(params)
    return [p for p in params if not is_moe_param(p)], [p for p in params if is_moe_param(p)]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Sequence[dict[str, Any]], max_group_size: float | None = 178956971
) -> list[dict[str, Any]]:
    """One group or several -> the same without the parameters of experts, then these in groups with the same options
    and `moe` True, named by their `group_name`, of at most max_group_size elements each (None: one; a larger parameter
    is a group alone). ArgumentError for what is no group."""
    groups = [param_groups] if isinstance(param_groups, dict) else param_groups
    if not isinstance(groups, (list, tuple)) or not all(isinstance(g, dict) and "params" in g for g in groups):
        raise ArgumentError(
            "split_params_into_different_moe_groups_for_optimizer takes a param group (a dict with params) or a list of"
            f" them, got {type(param_groups).__name__}"
        )
    out, of_experts = [], []
    for group in groups:
        shared, experts = split_params_into_shared_and_expert_params(group["params"])
        group["params"] = shared
        out.append(group)
        for name in dict.fromkeys(p.group_name for p in experts):  # type: ignore[attr-defined]
            of_name = [p for p in experts if p.group_name == name]  # type: ignore[attr-defined]
            for part in _in_parts(of_name, max_group_size):
                of_experts.append({**group, "name": name, "moe": True, "params": part})
    return out + of_experts


def _in_parts(params: list[torch.Tensor], limit: float | None) -> list[list[torch.Tensor]]:
    parts: list[list[torch.Tensor]] = []
    size = 0
    for p in params:
        if not parts or (limit is not None and size + p.numel() > limit):
            parts.append([])
            size = 0
        parts[-1].append(p)
        size += p.numel()
    return parts


def configure_moe_param_groups(model_parameters: list[Any]) -> list[dict[str, Any]]:
    """Parameters or groups -> groups, those of experts apart; groups that are apart already stay as they are."""
    if not isinstance(model_parameters, list) or not model_parameters:
        raise ArgumentError(
            "configure_moe_param_groups takes a list of parameters or of param groups that is not empty"
        )
    if any(not isinstance(p, (torch.Tensor, dict)) for p in model_parameters):
        raise ArgumentError(
            "configure_moe_param_groups takes parameters or param groups, and nothing else, in its list"
        )
    if isinstance(model_parameters[0], torch.Tensor):
        return split_params_into_different_moe_groups_for_optimizer(
            {"params": model_parameters, "name": "dense-params"}
        )
    if any("moe" in group for group in model_parameters):
        return model_parameters
    return split_params_into_different_moe_groups_for_optimizer(model_parameters)
