"""Tokens to the rows of their experts, and back: both ways, forward and backward, are gathers by index, which read what
they move and nothing else, and add nothing up in an order that depends on threads."""

from __future__ import annotations

from typing import Any

import torch

from ...core.ops import add_up
from .gate import Routes


def dispatch(x: torch.Tensor, routes: Routes) -> torch.Tensor:
    """x [S, M] -> [n, M]: the rows of the experts."""
    return _Dispatch.apply(x, routes.tokens, routes.slots)  # type: ignore[no-any-return,no-untyped-call]


def combine(rows: torch.Tensor, routes: Routes) -> torch.Tensor:
    """rows [n + 1, M], the last one 0 -> [S, M]: each token's rows, weighted, added up in fp32, in the dtype of rows.
    A token without a row gets 0."""
    return _Combine.apply(rows, routes.weights, routes.tokens, routes.slots)  # type: ignore[no-any-return,no-untyped-call]


def _gathered(rows: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """sum over j of weights[j] x rows[slots[j]]: [S, M]."""
    if len(slots) == 1 and weights is None:
        return rows.index_select(0, slots[0])
    out = torch.zeros((slots.shape[1], rows.shape[1]), dtype=torch.float32, device=rows.device)
    for j, slot in enumerate(slots):
        part = rows.index_select(0, slot)
        if weights is None:
            add_up(out, part, out.dtype)
        else:
            out.addcmul_(part.float(), weights[j][:, None])
    return out.to(rows.dtype)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tokens: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(slots)
        return x.index_select(0, tokens)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (slots,) = ctx.saved_tensors
        return _gathered(torch.cat([gradient, gradient.new_zeros(1, gradient.shape[1])]), slots, None), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weights: torch.Tensor, tokens: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weights, tokens, slots)
        return _gathered(rows, slots, weights)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        rows, weights, tokens, slots = ctx.saved_tensors
        of_row = weights.new_zeros(len(rows))  # each row's weight; the last is nobody's
        of_row.scatter_(0, slots.reshape(-1), weights.reshape(-1))
        to_rows = gradient.new_zeros(rows.shape)
        to_rows[:-1] = gradient.index_select(0, tokens) * of_row[:-1, None]
        whole = gradient.float()
        to_weights = torch.stack([(rows.index_select(0, slot).float() * whole).sum(1) for slot in slots])
        return to_rows, to_weights, None, None
