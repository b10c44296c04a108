"""Weights, gradients and optimizer states of partitioned parameters under DeepSpeed's names (deepspeed.utils.safe_*),
with its behaviour. deepc.view(p) has the same under shorter names, with errors where DeepSpeed returns None.

Full values are fp32, of the parameter's shape, on every rank, and collective: all ranks ask for the same parameters in
the same order. A parameter that no engine trains has none: getters return None, setters do nothing, as in DeepSpeed.

As in DeepSpeed a gradient is the average over ranks of what backward made: with fp16 it is multiplied by the loss scale
(deepc.view(p).grad is not). Local values are this rank's elements of the flattened parameter; which ones differs from
DeepSpeed (deepc.view(p).local.ranges), and some ranks may have none. New fp32 weights are seen by the model at once, in
DeepSpeed after the next step; therefore safe_set_local_fp32_param is collective."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ...engine.states.access import _Access, engine_of


def _access(param: torch.Tensor) -> _Access | None:
    engine = engine_of(param)
    return None if engine is None else _Access(engine, param)


def _scaled(access: _Access) -> float:
    """Factor that turns an accumulated gradient into DeepSpeed's: averaged, not unscaled."""
    return float(access.engine.gradient_unit() * access.engine.loss_scale)


# ---- whole -----------------------------------------------------------------------------------------------------------
def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """fp32 (master) weights of `param`. Collective."""
    access = _access(param)
    return None if access is None else access.fp32()


def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Sets them; each rank takes its own part of `value`. The model's own values follow at once. Collective."""
    if (access := _access(param)) is not None:
        access.set_fp32(value)


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Gradient of `param` between backward and step, averaged over the ranks, summed over the micro-batches so far
    (each counts 1/accumulation steps), times the loss scale, before clipping; None before a backward. A gradient that
    no_sync() left in param.grad is returned as it is. Collective."""
    access = _access(param)
    if param.grad is not None:
        return param.grad if access is None else access.joined(param.grad)
    return None if access is None else access.grad(_scaled(access))


def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Sets it, in the same scale; the step's norm and clipping follow. Between backward and step. Collective."""
    access = _access(param)
    if param.grad is not None:
        param.grad.copy_(value if access is None else access.shard(value))
    elif access is not None:
        access.set_grad(value, _scaled(access))


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """Optimizer state ("exp_avg", "exp_avg_sq", ...) of `param`; ArgumentError, which is a ValueError, if the optimizer
    has none. Collective."""
    access = _access(param)
    return None if access is None else access.state(optim_state_key)


def safe_set_full_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Sets it; each rank takes its own part of `value`. Collective."""
    if (access := _access(param)) is not None:
        access.set_state(optim_state_key, value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[torch.nn.Parameter], update_func: Callable[[torch.Tensor, torch.nn.Parameter], torch.Tensor]
) -> None:
    """gradient = update_func(gradient, param) for each parameter, whole, one after the other. Collective."""
    for p in param_list:
        if (old := safe_get_full_grad(p)) is not None:
            safe_set_full_grad(p, update_func(old, p))


# ---- this rank's part ------------------------------------------------------------------------------------------------
def safe_get_local_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """This rank's fp32 weights of `param`, 1-D; a copy."""
    access = _access(param)
    return None if access is None else access.local_fp32()


def safe_set_local_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Sets them. Collective: the model's own values follow."""
    if (access := _access(param)) is not None:
        access.set_local_fp32(value)


def safe_get_local_grad(param: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of safe_get_full_grad's gradient, 1-D; a copy."""
    access = _access(param)
    return None if access is None else access.local_grad(_scaled(access))


def safe_set_local_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Sets it, in the same scale."""
    if (access := _access(param)) is not None:
        access.set_local_grad(value, _scaled(access))


def safe_get_local_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """This rank's part of an optimizer state, 1-D; a copy."""
    access = _access(param)
    return None if access is None else access.local_state(optim_state_key)


def safe_set_local_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Sets it."""
    if (access := _access(param)) is not None:
        access.set_local_state(optim_state_key, value)
