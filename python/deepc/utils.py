"""Whole gradients, masters and optimizer states of partitioned parameters, under DeepSpeed's names. All are collective."""

from __future__ import annotations

import torch

from .errors import ArgumentError


def _engine(p: torch.nn.Parameter):
    from .engine import _owner_of

    engine = _owner_of.get(id(p))
    if engine is None:
        raise ArgumentError("this parameter is not trained by a deepc engine")
    return engine


def safe_get_full_grad(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Average gradient of `param` over ranks and micro-batches so far, unscaled, before clipping; fp32, its shape, on every
    rank. None before a backward. Valid between backward and step."""
    return _engine(param).full_grad(param)


def safe_get_full_fp32_param(param: torch.nn.Parameter) -> torch.Tensor:
    """fp32 master weights of `param`, its shape, on every rank."""
    return _engine(param).full_fp32_param(param)


def safe_get_full_optimizer_state(param: torch.nn.Parameter, optim_state_key: str) -> torch.Tensor:
    """Optimizer state ("exp_avg", "exp_avg_sq", ...) of `param`, fp32, its shape, on every rank."""
    return _engine(param).full_optimizer_state(param, optim_state_key)
