"""What becomes of gradients: what they are added to, and when they go."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ....core import ops
from ....core.lib import call
from .heap import ShadowHeap

if TYPE_CHECKING:
    from ...layout import Layout


class Accumulators:
    """Accumulators that borrow their memory from the heap, bucket by bucket, until the step ends
    (state.leases_gradients)."""

    _FIRST_KEY = -(1 << 40)

    def __init__(self, heap: ShadowHeap, layout: Layout, own_all: bool, color: int, size: int) -> None:
        self._heap, self._slice = heap, layout.bucket_elems // (1 if own_all else layout.world) * size
        self._bytes = (layout.total if own_all else layout.shard_elems) * size
        begin, piece = ctypes.c_size_t(), ctypes.c_size_t()
        call("dc_lease_layout", self._bytes, color, ctypes.byref(begin), ctypes.byref(piece))
        self._begin, self._piece = begin.value, piece.value
        self._held: set[int] = set()
        self._buckets = range(layout.nbuckets)

    def finish(self) -> None:
        """The end of a pass: zeros stand for what has not come."""
        for b in self._buckets:
            self.need(b)

    def need(self, bucket: int) -> None:
        begin = self._begin + bucket * self._slice
        end = min(begin + self._slice, self._begin + self._bytes)
        for k in range(begin // self._piece, (end - 1) // self._piece + 1):
            if k not in self._held:
                self._held.add(k)
                self._heap.alloc_high(self._FIRST_KEY - k, self._piece)

    def end(self) -> None:
        for k in self._held:
            self._heap.free(self._FIRST_KEY - k)
        self._held.clear()


def buckets_of_params(layout: Layout) -> list[range]:
    """Which buckets each parameter lies in."""
    b = layout.bucket_elems
    return [range(o // b, (o + n - 1) // b + 1) if n else range(0) for o, n in zip(layout.offsets, layout.numels)]


class Window:
    """Which gradients the reducer still holds (comm/bucket_reduce.c) when all ranks are equally far."""

    def __init__(self, layout: Layout, slots: int) -> None:
        self._l, self._slots = layout, slots
        self._buckets = buckets_of_params(layout)
        self.begin()

    def begin(self) -> None:
        self._missing = [0] * self._l.nbuckets
        for buckets in self._buckets:
            for b in buckets:
                self._missing[b] += 1
        self.reduced = 0
        self._given: set[int] = set()

    def add(self, index: int) -> list[int]:
        """Gives the gradient of parameter `index`; returns whose gradients are all written now."""
        self._given.add(index)
        open_until, moved = self.reduced + self._slots, True
        left = {i: self._buckets[i] for i in self._given}
        for b in self._buckets[index]:
            self._missing[b] -= 1
        while moved:
            moved = False
            while self.reduced < self._l.nbuckets and self.reduced < open_until and self._missing[self.reduced] == 0:
                self.reduced += 1
                moved = True
            open_until = self.reduced + self._slots
        done = [i for i, buckets in left.items() if not buckets or buckets[-1] < open_until]
        self._given.difference_update(done)
        return done


class Reducer:
    """What becomes of gradients: they go when the reducer would let them go, and what they are added to gets memory.
    sums_in: they are added up in this dtype instead, and reduced by `flush` (zero/step/hooks.py, a pipeline's)."""

    def __init__(
        self,
        params: list[torch.Tensor],
        layout: Layout,
        slots: int,
        sums: Accumulators | None,
        sums_in: torch.dtype | None = None,
    ) -> None:
        self._params, self._sums, self._buckets = params, sums, buckets_of_params(layout)
        self._window = Window(layout, slots) if slots else None
        self.sums_in = sums_in
        self._waiting: dict[int, torch.Tensor] = {}
        self._lent: dict[int, torch.Tensor] = {}

    def begin(self) -> None:
        if self._window is not None:
            self._window.begin()

    def hook(self, index: int) -> Callable[[torch.Tensor], None]:
        """For the parameter at `index`, when its gradient is there."""

        def take(p: torch.Tensor) -> None:
            if p.grad is not None and self.sums_in is not None:
                grad, p.grad = p.grad, None
                self.bring(index, grad)
                return
            if p.grad is not None:
                grad, p.grad = p.grad, None
                self._lend(index, ops.add_up(self._waiting.pop(index, None), grad))

        return take

    def bring(self, index: int, gradient: torch.Tensor) -> None:
        """A gradient that waits for the next pass."""
        self._waiting[index] = ops.add_up(self._waiting.get(index), gradient, self.sums_in)

    def bring_product(self, index: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """One that is a @ b."""
        late = self._waiting.get(index)
        if late is not None and late.dtype == self.sums_in == a.dtype:
            late.addmm_(a, b)
        else:
            self.bring(index, a @ b)

    def change_left(self, change: Callable[[int, torch.Tensor], torch.Tensor], dtype: torch.dtype) -> None:
        """As GradientHooks.change_left (zero/step/hooks.py), of what waits for the next pass."""
        for i, p in enumerate(self._params):
            waiting = self._waiting.get(i)
            self._waiting[i] = change(
                i, torch.zeros(p.shape, dtype=dtype, device="cpu") if waiting is None else waiting
            )

    def flush(self) -> None:
        """A pass of what waits for one."""
        self.begin()
        self.finish()

    def _lend(self, index: int, gradient: torch.Tensor) -> None:
        self._lent[index] = gradient.contiguous()
        del gradient
        for i in self._take(index):
            self._lent.pop(i, None)

    def _take(self, index: int) -> list[int]:
        if self._window is None:
            self._need(self._buckets[index])
            return [index]
        before = self._window.reduced
        done = self._window.add(index)
        self._need(range(before, self._window.reduced))
        return done

    def _need(self, buckets: range) -> None:
        if self._sums is not None:
            for b in buckets:
                self._sums.need(b)

    def finish(self) -> None:
        for i in list(self._waiting):
            self._lend(i, self._waiting.pop(i))
        if self._sums is not None:
            self._sums.finish()
        self._lent.clear()
