"""Mixture of experts: layers whose tokens each run through a few of many networks, under DeepSpeed's names."""

from .gate import Routes, TopKGate, capacity_of
from .layer import Experts, MoE, MOELayer
from .params import (
    configure_moe_param_groups,
    has_moe_layers,
    is_moe_param,
    is_moe_param_group,
    split_params_into_different_moe_groups_for_optimizer,
    split_params_into_shared_and_expert_params,
)

__all__ = [
    "Experts",
    "MOELayer",
    "MoE",
    "Routes",
    "TopKGate",
    "capacity_of",
    "configure_moe_param_groups",
    "has_moe_layers",
    "is_moe_param",
    "is_moe_param_group",
    "split_params_into_different_moe_groups_for_optimizer",
    "split_params_into_shared_and_expert_params",
]
