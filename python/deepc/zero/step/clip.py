"""Gradient clipping. It is no pass of its own over the gradients: the update multiplies each of them by one factor
anyway (ops/cpu/adamw.c: the mean over ranks, the loss scale), and clipping makes that factor smaller."""

from __future__ import annotations


def clip(unit: float, norm: float, limit: float) -> float:
    """The factor on every accumulated gradient: `unit`, smaller where the norm exceeds `limit` (0: no clipping), by
    torch.nn.utils.clip_grad_norm_'s rule."""
    if limit > 0:
        excess = (norm + 1e-6) / limit
        if excess > 1.0:
            return unit / excess
    return unit
