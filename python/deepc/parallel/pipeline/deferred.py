"""The gradient of a layer in two halves, for zero-bubble schedules (arXiv:2401.10241): backward makes that of the
inputs, which the stage before waits for, and leaves the matrix product that makes the weight's for later.

Linear layers are found where they are called, whatever module they belong to: F.linear, and addmm as transformers'
Conv1D calls it. What the weight's gradient needs (inputs, and gradients of outputs) is kept until then. All other
parameters (norms, embeddings, those with hooks, what runs under autocast, and what activation checkpointing computes
again) get theirs in backward."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

_PRODUCTS = (torch.nn.functional.linear, torch.addmm)


class Sums(Protocol):
    """Who adds up gradients of trained parameters, by their indices."""

    def bring(self, index: int, gradient: torch.Tensor) -> None:
        """A gradient, which is the callee's from here on."""

    def bring_product(self, index: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """One that is a @ b."""


def in_checkpoint() -> bool:
    """Whether what runs is a function that torch.utils.checkpoint was given."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


class Later:
    """The products that the backward of one micro-batch through one stage has left."""

    def __init__(self) -> None:
        self._left: list[Callable[[], None]] = []

    def add(self, product: Callable[[], None]) -> None:
        self._left.append(product)

    @torch.no_grad()  # what backward has saved still requires a gradient, and sums would keep it to the batch's end
    def run(self) -> None:
        """Makes them, in the order in which backward came to them."""
        left, self._left = self._left, []
        for product in left:
            product()


class Deferring(TorchFunctionMode):
    """Around a forward. indices: id(parameter) -> index; others are left to autograd, and so is what activation
    checkpointing runs again, outside of this."""

    def __init__(self, indices: Mapping[int, int], sums: Sums, later: Later) -> None:
        super().__init__()
        self._indices, self._sums, self._later = indices, sums, later

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func not in _PRODUCTS
            or not torch.is_grad_enabled()
            or torch.is_autocast_enabled("cpu")  # its products are of other tensors than the weights
            or in_checkpoint()
        ):
            return func(*args, **kwargs)
        if func is torch.nn.functional.linear:
            x, weight, bias = (*args, *(kwargs.get(k) for k in ("input", "weight", "bias")[len(args) :]))
            if self._takes(weight) and (bias is None or self._takes(bias)):
                return self._linear(x, weight, bias, False)
        elif len(args) == 3 and not kwargs:
            bias, x, weight = args
            if self._takes(weight) and self._takes(bias) and bias.dim() == 1:
                return self._linear(x, weight, bias, True)
        return func(*args, **kwargs)

    def _linear(self, *given: Any) -> Any:
        return _Linear.apply(self, *given)  # type: ignore[no-untyped-call]  # torch has no annotation for it

    def _takes(self, p: Any) -> bool:
        """Not one with hooks, which are to see its gradient, and may change it: autograd calls them."""
        return isinstance(p, torch.Tensor) and id(p) in self._indices and not p._backward_hooks

    def index_of(self, p: torch.Tensor | None) -> int | None:
        return None if p is None else self._indices[id(p)]

    def leave(self, x: torch.Tensor, g: torch.Tensor, weight: int, bias: int | None, transposed: bool) -> None:
        """The products of one layer: x [.., in], g [.., out]; weight, bias: indices of its parameters, [out, in], or
        [in, out] if transposed, and [out]."""

        def product() -> None:
            rows, out = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
            self._sums.bring_product(weight, *((rows.t(), out) if transposed else (out.t(), rows)))
            if bias is not None:
                self._sums.bring(bias, out.sum(0))

        self._later.add(product)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mode: Deferring, x: torch.Tensor, weight: Any, bias: Any, transposed: bool) -> torch.Tensor:
        # The weight is saved as autograd saves it: where ZeRO-3 streams it, it comes when backward reads it.
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[1] else None)
        ctx.weight, ctx.bias, ctx.mode, ctx.transposed = mode.index_of(weight), mode.index_of(bias), mode, transposed
        return torch.addmm(bias, x, weight) if transposed else torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        back = None if weight is None else g @ (weight.t() if ctx.transposed else weight)
        ctx.mode.leave(x.detach(), g, ctx.weight, ctx.bias, ctx.transposed)
        return None, back, None, None, None
