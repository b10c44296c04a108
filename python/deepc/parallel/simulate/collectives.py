"""Collectives between virtual ranks: memory operations of the C core on the ranks' own tensors, in rank order as
between real ranks. Each counts the bytes that a rank would send (ring algorithms)."""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...core.lib import call

_F32, _SUM, _MAX = 0, 0, 3  # DC_F32, DC_RED_SUM, DC_RED_MAX


class Traffic:
    """Bytes that ranks have sent so far, over all ranks, by axis."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self._counts = True

    def add(self, axis: str, ranks: int, nbytes: int, *, passes: int) -> None:
        """passes: 2 for all_reduce, 1 for all_gather and reduce_scatter of `nbytes` in all."""
        self.sent(axis, passes * (ranks - 1) * nbytes)

    def sent(self, axis: str, nbytes: int) -> None:
        if nbytes and self._counts:
            self.bytes[axis] += nbytes

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Inside, ranks do again what they have done, for want of a memory of it, and send nothing."""
        self._counts, before = False, self._counts
        try:
            yield
        finally:
            self._counts = before


def reduced(tensors: Sequence[torch.Tensor], op: int = _SUM) -> torch.Tensor:
    """Their sum (or largest), element by element, in rank order: fp32, contiguous, of one shape."""
    given = [t.contiguous() for t in tensors]
    out = torch.empty_like(given[0])
    if not out.numel():
        return out
    pointers = (ctypes.c_void_p * len(given))(*(t.data_ptr() for t in given))
    call("dc_reduce", out.data_ptr(), pointers, len(given), _F32, op, out.numel())
    return out


def largest(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return reduced(tensors, _MAX)


def copied(to: torch.Tensor, at: int, source: torch.Tensor, begin: int, length: int) -> None:
    """to[at:at + length] = source[begin:begin + length], of flat fp32 tensors."""
    call("dc_copy", to.data_ptr() + 4 * at, source.data_ptr() + 4 * begin, 4 * length)


class _Spread(torch.autograd.Function):
    """What all tensor-parallel ranks have goes on unchanged; its gradients are summed (Megatron-LM's f)."""

    @staticmethod
    def forward(ctx: Any, traffic: Traffic, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.traffic = traffic
        return tuple(p.view_as(p) for p in parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        total = reduced(grads)
        ctx.traffic.add("tp", len(grads), total.nbytes, passes=2)
        return None, *(total.clone() for _ in grads)


class _Summed(torch.autograd.Function):
    """Parts of a sum become the sum, on every rank; its gradient goes back unchanged (Megatron-LM's g)."""

    @staticmethod
    def forward(ctx: Any, traffic: Traffic, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = reduced(parts)
        traffic.add("tp", len(parts), total.nbytes, passes=2)
        return tuple(total.clone() for _ in parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return None, *grads


class _Exchanged(torch.autograd.Function):
    """All-to-all: what each rank has for each, one after the other, goes there."""

    @staticmethod
    def forward(
        ctx: Any, traffic: Traffic, axis: str, counts: list[list[int]], *rows: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.traffic, ctx.axis, ctx.counts = traffic, axis, counts
        return _moved(traffic, axis, counts, rows)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        back = [list(to) for to in zip(*ctx.counts)]
        return None, None, None, *_moved(ctx.traffic, ctx.axis, back, grads)


def _moved(
    traffic: Traffic, axis: str, counts: list[list[int]], rows: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    given = [t.contiguous() for t in rows]
    width = math.prod(given[0].shape[1:])
    out = tuple(given[0].new_empty(sum(to), *given[0].shape[1:]) for to in zip(*counts))
    filled = [0] * len(out)
    for source, t in enumerate(given):
        at = 0
        for target, n in enumerate(counts[source]):
            if n:
                copied(out[target], filled[target] * width, t, at * width, n * width)
            if source != target:
                traffic.sent(axis, 4 * n * width)
            at += n
            filled[target] += n
    return out


def exchanged(
    traffic: Traffic, axis: str, rows: Sequence[torch.Tensor], counts: list[list[int]]
) -> tuple[torch.Tensor, ...]:
    """All-to-all of ranks: counts[a][b] rows (along the first dimension) of rank a go to rank b, in order; each rank
    gets them in the order of ranks. Its gradients go the way back. Bytes: what does not stay where it is."""
    if len(rows) == 1:
        return tuple(rows)
    return _Exchanged.apply(traffic, axis, counts, *rows)  # type: ignore[no-any-return,no-untyped-call]


def spread(traffic: Traffic, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Megatron-LM's f."""
    out: tuple[torch.Tensor, ...] = _Spread.apply(traffic, *parts)  # type: ignore[no-untyped-call]
    return out


def summed(traffic: Traffic, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Megatron-LM's g."""
    out: tuple[torch.Tensor, ...] = _Summed.apply(traffic, *parts)  # type: ignore[no-untyped-call]
    return out
