"""Where tensors go into a region of layers that is cut over ranks, and where they come out, as autograd functions.

Outside, all ranks have equal activations; inside, each has its part of the features (Megatron-LM, arXiv:1909.08053,
section 3: f is `enter`, g is `leave`). With sequence regions (arXiv:2205.05198, section 4.2.2) each rank has a part of
the positions outside, and the whole comes together at the entrance: the same bytes, activations of 1 / ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .group import TensorGroup


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.sum_of(grad), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, group: TensorGroup) -> Tensor:
        out = group.sum_of(x)
        return out if bias is None else out.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        return grad, grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, widths: tuple[int, ...], summed: bool, group: TensorGroup) -> Tensor:
        ctx.dim, ctx.widths, ctx.summed, ctx.group = dim, widths, summed, group
        return group.gather(x, dim, widths)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        group: TensorGroup = ctx.group
        if ctx.summed:
            return group.scatter_sum(grad, ctx.dim), None, None, None, None
        return group.part(grad, ctx.dim, ctx.widths), None, None, None, None


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, widths: tuple[int, ...], group: TensorGroup) -> Tensor:
        ctx.dim, ctx.widths, ctx.group = dim, widths, group
        return group.part(x, dim, widths)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.group.gather(grad, ctx.dim, ctx.widths), None, None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: TensorGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return group.scatter_sum(x, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        group: TensorGroup = ctx.group
        return group.gather(grad, ctx.dim, (grad.shape[ctx.dim],) * group.size), None, None


def enter(x: Tensor, group: TensorGroup) -> Tensor:
    """x, equal on all ranks, into a region where each computes its part with it: its gradient is the sum of theirs."""
    if group.size == 1 or not (x.requires_grad and torch.is_grad_enabled()):
        return x
    return _Enter.apply(x, group)  # type: ignore[no-any-return,no-untyped-call]


def leave(x: Tensor, group: TensorGroup, bias: Tensor | None = None) -> Tensor:
    """The sum of all ranks' x, plus `bias` once."""
    if group.size == 1:
        return x if bias is None else x + bias
    return _Leave.apply(x, bias, group)  # type: ignore[no-any-return,no-untyped-call]


def gather(x: Tensor, group: TensorGroup, dim: int = -1, widths: tuple[int, ...] = ()) -> Tensor:
    """All ranks' x one after the other along `dim`, for computations that are the same on all ranks. widths: of each
    rank (none: all as here)."""
    if group.size == 1:
        return x
    return _Gather.apply(x, dim, widths or (x.shape[dim],) * group.size, False, group)  # type: ignore[no-any-return,no-untyped-call]


def part(x: Tensor, group: TensorGroup, dim: int = -1, widths: tuple[int, ...] = ()) -> Tensor:
    """This rank's part of x, which is equal on all ranks. widths: of each rank (none: equal ones)."""
    if group.size == 1:
        return x
    return _Part.apply(x, dim, widths or (x.shape[dim] // group.size,) * group.size, group)  # type: ignore[no-any-return,no-untyped-call]


def enter_from_sequence(x: Tensor, group: TensorGroup, dim: int = 1) -> Tensor:
    """x, of which each rank has an equal part of the positions, whole into a region."""
    if group.size == 1:
        return x
    return _Gather.apply(x, dim, (x.shape[dim],) * group.size, True, group)  # type: ignore[no-any-return,no-untyped-call]


def leave_to_sequence(x: Tensor, group: TensorGroup, dim: int = 1) -> Tensor:
    """This rank's part of the positions of the sum of all ranks' x."""
    if group.size == 1:
        return x
    return _ScatterSum.apply(x, dim, group)  # type: ignore[no-any-return,no-untyped-call]


def sum_gradients(p: torch.nn.Parameter, group: TensorGroup) -> None:
    """The gradient of `p`, which every rank has, and computes a part of the gradient of, is the sum of theirs. In every
    backward pass: passes are in one order on all ranks."""
    if group.size > 1 and p.requires_grad:
        p.register_hook(group.sum_of)
