"""Cross-entropy over a vocabulary that is cut over ranks: logits are never gathered, and of the whole only some numbers
for each row go between ranks (its largest logit, the sum of exponentials, the label's logit).

`linear_cross_entropy` has the head's product in it and goes through the rows in chunks, whose logits are gone before
the next: memory is a chunk's, whatever the number of tokens. Gradients are computed with the loss, while the chunk's
logits are there (as deepc.linear_cross_entropy does in one process)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.foreign import private
from ...errors import ArgumentError, UnsupportedError
from ...nn.loss import REDUCTIONS, WeightGradient, as_autocast, refuse_graph, rows_per_chunk
from ..axes import without_values
from .cut import Cut
from .group import TensorGroup

_INSTEAD = "a model whose head is whole (tensor_parallel.autotp_size 1)"


def _probabilities(logits: Tensor, labels: Tensor, cut: Cut, group: TensorGroup, ignore: int) -> tuple[Tensor, Tensor]:
    """(losses fp32 [n], 0 of ignored rows; gradients of their sum, in the memory of `logits`, fp32 [n, here])."""
    ((begin, end),) = cut.parts[cut.rank]
    kept = labels != ignore
    here = kept & (labels >= begin) & (labels < end)
    place = (labels - begin).masked_fill(~here, 0).unsqueeze(1)
    peak = group.add_up(logits.amax(1), "max")
    logits.sub_(peak.unsqueeze(1))
    sums = torch.empty(2, labels.numel(), dtype=torch.float32, device=logits.device)
    sums[1] = logits.gather(1, place).squeeze(1).masked_fill(~here, 0.0)
    torch.sum(logits.exp_(), 1, out=sums[0])
    group.add_up(sums)
    losses = (sums[0].log() - sums[1]).masked_fill(~kept, 0.0)
    logits.mul_((kept / sums[0]).unsqueeze(1))
    logits.scatter_add_(1, place, -here.float().unsqueeze(1))
    return losses, logits


_WIDE_BYTES = 16 << 20  # of 16-bit gradients that are multiplied in fp32 at a time


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, cut: Cut, group: TensorGroup, ignore: int) -> Tensor:
        # amax and what follows write: a copy, unless the cast makes one
        wide = logits.float() if logits.dtype != torch.float32 else logits.clone()
        losses, gradients = _probabilities(wide, labels, cut, group, ignore)
        ctx.save_for_backward(gradients.to(logits.dtype))
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        refuse_graph("the cross-entropy of a vocabulary that is cut", _INSTEAD)
        (gradients,) = ctx.saved_tensors
        # In fp32: 16 bits round 1 / labels, and the loss scale is infinite in fp16. Some rows at a time, so that this
        # takes little memory.
        out, rows = torch.empty_like(gradients), max(1, _WIDE_BYTES // 4 // max(1, gradients.shape[1]))
        for made, part, factor in zip(out.split(rows), gradients.split(rows), grad.split(rows)):
            made.copy_(part * factor.unsqueeze(1))
        return out, None, None, None, None


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    cut: Cut,
    group: TensorGroup,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """torch.nn.functional.cross_entropy of logits [n, this rank's classes] and labels [n] (of all classes, equal on all
    ranks), equal on all ranks. cut: of the head's weight, [classes, ...] along dimension 0."""
    if reduction not in REDUCTIONS:
        raise ArgumentError(f"reduction={reduction!r}: it is one of {', '.join(REDUCTIONS)}")
    check_labels(labels, cut, ignore_index)
    losses: Tensor = _CrossEntropy.apply(logits, labels, cut, group, ignore_index)  # type: ignore[no-untyped-call]
    return _reduced(losses, labels, ignore_index, reduction)


def check_labels(labels: Tensor, cut: Cut, ignore: int) -> None:
    if not without_values(labels) and bool((((labels < 0) | (labels >= cut.shape[0])) & (labels != ignore)).any()):
        raise ArgumentError(f"a label is neither from 0 to {cut.shape[0] - 1} nor ignore_index ({ignore})")


def _reduced(losses: Tensor, labels: Tensor, ignore: int, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (labels != ignore).sum()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        cut: Cut,
        group: TensorGroup,
        ignore: int,
    ) -> Tensor:
        n, classes = hidden.shape[0], weight.shape[0]
        wants = ctx.needs_input_grad[:3]
        rows = rows_per_chunk(n, max(map(cut.width, range(cut.ranks))), 4)
        losses = torch.empty(n, dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if wants[0] else None
        sum_weight = WeightGradient(weight, hidden.dtype) if wants[1] else None
        if sum_weight is not None:
            sum_weight.shrink(hidden, rows)
        grad_bias = torch.zeros(classes, dtype=torch.float32, device=weight.device) if wants[2] else None
        for begin in range(0, n, rows):
            chunk = slice(begin, begin + rows)
            h = hidden[chunk]
            logits = torch.nn.functional.linear(h, weight, bias).float()
            losses[chunk], gradients = _probabilities(logits, labels[chunk], cut, group, ignore)
            narrow = gradients.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(narrow, weight, out=grad_hidden[chunk])
            if sum_weight is not None:
                sum_weight.add(narrow, h)
            if grad_bias is not None:
                grad_bias += gradients.sum(0)
        grad_weight = None if sum_weight is None else sum_weight.result(torch.float32)
        ctx.grads, ctx.dtypes = (grad_hidden, grad_weight, grad_bias), (hidden.dtype, weight.dtype)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_graph("the cross-entropy of a vocabulary that is cut", _INSTEAD)
        if ctx.grads is None:
            raise UnsupportedError("the gradients of this loss were used up by its first backward; compute it again")
        keeps, grads = private.backward_keeps_graph(), ctx.grads
        ctx.grads = grads if keeps else None
        wide, narrow = ctx.dtypes[1], ctx.dtypes[0]
        # a number multiplies in fp32: 16 bits round 1 / labels, and the loss scale is infinite in fp16
        factor = grad if without_values(grad) else grad.item()
        h, w, b = (g if g is None else g * factor if keeps else g.mul_(factor) for g in grads)
        return (
            h if h is None else h.to(narrow),
            w if w is None else w.to(wide),
            b if b is None else b.to(wide),
            None,
            None,
            None,
            None,
        )


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    cut: Cut,
    group: TensorGroup,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """cross_entropy of hidden [..., d] @ weight^T + bias, of which this rank has `cut`'s classes; labels [...]. hidden
    comes out of regions.enter: its gradient is this rank's part of the sum. reduction: "mean" or "sum"."""
    if reduction not in ("mean", "sum"):
        raise ArgumentError(f'reduction={reduction!r}: it is "mean" or "sum" over a vocabulary that is cut')
    labels = labels.reshape(-1)
    check_labels(labels, cut, ignore_index)
    hidden, weight, bias = as_autocast(hidden, weight, bias)
    rows = hidden.reshape(-1, hidden.shape[-1])
    total: Tensor = _LinearCrossEntropy.apply(rows, weight, bias, labels, cut, group, ignore_index)  # type: ignore[no-untyped-call]
    return total if reduction == "sum" else total / (labels != ignore_index).sum()
