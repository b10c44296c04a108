"""Gradients into the owner's accumulator, one parameter at a time, from autograd's hooks.

Three reducers with one interface, `Reducer`: C's (comm/bucket.h: shared memory, or one rank), C's inside each of
several CPU nodes (nodes.py), and torch.distributed's (collective.py: GPUs, nodes with different numbers of ranks)."""

from __future__ import annotations

import abc
import collections
import contextlib
import ctypes
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ....core import lib as _lib
from ....core import memory
from ....core.lib import C, call, check
from ....core.ops import code
from ....errors import DeepcError
from ....plan.layout import BLOCK
from ....plan.plan import RING, Plan

if TYPE_CHECKING:
    from ....comm.shared import Comm


class Reducer(Protocol):
    """What the hooks and the engine ask of a reducer."""

    tree: Tree | None
    """The nodes of the tree of micro-batches, where sums don't depend on the layout; else None."""

    def borrow(self, lease: memory.Lease | None) -> None:
        """The accumulators are this lease's tensor, and get its memory bucket by bucket; None: they stay. Before the
        first pass."""

    def begin(self, assign: bool, norm: bool) -> None:
        """Opens a pass. assign: it overwrites the accumulators; norm: it is the step's last, and makes the partial sums
        of the norm."""

    def add(self, index: int, grad: torch.Tensor) -> None:
        """The gradient of parameter `index`, borrowed until released() lists it."""

    def released(self) -> list[int]:
        """Indices whose gradients are no longer needed."""

    def finish(self) -> None:
        """The end of the pass. Collective."""

    def settle(self) -> None:
        """Before accumulators are read that `finish` made without the norm. Collective."""

    def sums(self, begin: int, length: int) -> torch.Tensor:
        """[length]: what has been accumulated for these owned elements, in the plan's accumulator dtype, after
        `settle`."""

    def gather(self, flat: torch.Tensor) -> None:
        """Completes every rank's replica `flat` from the owners' slices."""

    def stats(self) -> dict[str, int]:
        """Counts, for tests and reports."""

    def close(self) -> None:
        """Frees what it holds."""


class CoreReducer:
    """The C core's reducer. Gradients are CPU tensors; each is borrowed until released() lists it."""

    tree: Tree | None = None

    def __init__(
        self,
        plan: Plan,
        comm: Comm | None,
        acc: torch.Tensor,
        partial: torch.Tensor,
        wire: torch.dtype,
        pre_scale: float,
    ) -> None:
        self._keep: tuple[object, ...] = (plan.layout, comm, acc, partial)  # borrowed by the C side
        self._acc = acc
        bucket_bytes = plan.layout.bucket_elems * wire.itemsize
        config = _lib.ReducerConfig(
            comm=comm.handle if comm is not None else None,
            layout=plan.layout.handle,
            dtype=code(wire),
            own_all=int(plan.own_all),
            rank=plan.part,
            pre_scale=pre_scale,
            pending_limit_bytes=2 * bucket_bytes,
            acc=acc.data_ptr(),
            partial=partial.data_ptr(),
            acc_dtype=code(acc.dtype),
        )
        self._configure(config)
        self._make(config)

    def _configure(self, config: _lib.ReducerConfig) -> None:
        """For reducers with more to say."""

    def _make(self, config: _lib.ReducerConfig) -> None:
        handle = ctypes.c_void_p()
        call("dc_reducer_create", ctypes.byref(config), ctypes.byref(handle))
        self.handle: int | None = handle.value
        self._indices = (ctypes.c_int64 * 64)()
        self._count = ctypes.c_int64()
        self._count_ref = ctypes.byref(self._count)

    def begin(self, assign: bool, norm: bool) -> None:
        check(C.dc_reducer_begin(self.handle, assign, norm))

    def borrow(self, lease: memory.Lease | None) -> None:
        if lease is not None:
            call("dc_reducer_lease", self.handle, lease.handle)

    def add(self, index: int, grad: torch.Tensor) -> None:
        check(C.dc_reducer_add(self.handle, index, grad.data_ptr(), code(grad.dtype)))

    def released(self) -> list[int]:
        out: list[int] = []
        while True:
            check(C.dc_reducer_released(self.handle, self._indices, 64, self._count_ref))
            out.extend(self._indices[: self._count.value])
            if self._count.value < 64:
                return out

    def finish(self) -> None:
        check(C.dc_reducer_finish(self.handle))

    def settle(self) -> None:
        """Before accumulators are read that `finish` made without the norm. Collective."""

    def sums(self, begin: int, length: int) -> torch.Tensor:
        """[length]: what has been accumulated for these owned elements, after `settle`. A view where it can be written,
        else a copy."""
        return self._acc[begin : begin + length]

    def gather(self, flat: torch.Tensor) -> None:
        """Completes every rank's replica `flat` from the owners' slices."""
        check(C.dc_reducer_gather(self.handle, flat.data_ptr(), code(flat.dtype)))

    def stats(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        if getattr(self, "handle", None):
            C.dc_reducer_free(self.handle)
            self.handle = None

    __del__ = close


class RingReducer(CoreReducer, abc.ABC):
    """The C core's reducer with a ring (comm/bucket.h): the slices of up to RING buckets wait there, reduced, until the
    class has moved them on. Its `_under_way` has those that are being moved, the oldest first."""

    def __init__(self) -> None:
        self._under_way: collections.deque[Any] = collections.deque()
        self._launched = self._taken = 0  # buckets of the pass that have begun to move, and that are through
        self._assign = self._norm = False

    def begin(self, assign: bool, norm: bool) -> None:
        self._assign, self._norm = assign, norm
        self._launched = self._taken = 0
        super().begin(True, False)

    def add(self, index: int, grad: torch.Tensor) -> None:
        with self._errors():
            super().add(index, grad)
        self._advance()

    def finish(self) -> None:
        while True:
            if self._launched - self._taken == RING:
                self._take_oldest()
            with self._errors():
                super().finish()
            self._advance()
            if not C.dc_reducer_in_pass(self.handle):
                break
        while self._under_way:
            self._take_oldest()

    def _errors(self) -> contextlib.AbstractContextManager[None]:
        """Around calls of the core that wait for other ranks."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def _advance(self) -> None:
        """Begins to move the slices that are reduced."""

    @abc.abstractmethod
    def _take_oldest(self) -> None:
        """Waits for the oldest bucket under way, and gives its place back."""


class Tree:
    """The nodes of the tree of micro-batches (comm/bucket_tree.h) as tensors: acc and the `extra` buffers, largest node
    first. Which hold something follows from the number of leaves so far."""

    def __init__(self, acc: torch.Tensor, buffers: int) -> None:
        self._all = [
            acc,
            *(
                memory.zeros(acc.numel() * (buffers - 1), acc.dtype, memory.COLORS["tree"]).view(buffers - 1, -1)
                if buffers > 1
                else ()
            ),
        ]
        self._none = torch.empty(0, dtype=torch.float64, device="cpu")
        self.leaves, self.closed = 0, False

    def check(self, assign: bool) -> None:
        """Before a pass."""
        if self.closed and not assign:
            raise DeepcError("the gradients of this step were complete, and another backward came before engine.step()")

    def begin(self, assign: bool) -> None:
        self.leaves, self.closed = 0 if assign else self.leaves, False

    def end(self, leaves: int, last: bool) -> None:
        self.leaves, self.closed = self.leaves + leaves, last

    @property
    def nodes(self) -> list[torch.Tensor]:
        return self._all[:1] if self.closed else self._all[: bin(self.leaves).count("1")]

    def extra(self) -> int | None:
        """Address of the buffers after acc."""
        return self._all[1].data_ptr() if len(self._all) > 1 else None

    def sums(self, begin: int, length: int) -> torch.Tensor:
        """The sum of what is there; a copy while there are several nodes."""
        parts = [n[begin : begin + length] for n in self.nodes]
        total = parts[-1]
        for left in reversed(parts[:-1]):
            total = left + total
        return total

    def push(self, begin: int, parts: list[torch.Tensor], before: int, last: bool) -> None:
        """For elements from `begin`: the next parts, each the sum of equally many micro-batches (a power of two), after
        `before` such parts. [m] fp32 each; overwritten."""
        m = parts[0].numel()
        place = [n[begin : begin + m] for n in self._all]
        stack = place[: bin(before).count("1")]
        for k, right in enumerate(parts):
            count = before + k + 1
            merges = len(stack) if last and k == len(parts) - 1 else (count & -count).bit_length() - 1
            for _ in range(merges):
                left = stack.pop()
                torch.ops.deepc.accumulate_tensors(left, [right], False, self._none)
                right = left
            stack.append(right)
        for to, node in zip(place, stack, strict=False):
            if node.data_ptr() != to.data_ptr():
                to.copy_(node)

    def fold(self) -> None:
        """acc becomes the whole sum: the step has no more micro-batches."""
        nodes = self.nodes
        for left, right in reversed(list(zip(nodes, nodes[1:]))):
            torch.ops.deepc.accumulate_tensors(left, [right], False, self._none)
        self.closed = True


class TreeReducer(CoreReducer):
    """CoreReducer whose sums do not depend on the layout: `"deterministic": "layout"`, see determinism.py. A pass is
    one micro-batch of every rank; norm says that it is the step's last. Gradients are not prescaled."""

    def __init__(
        self, plan: Plan, comm: Comm | None, acc: torch.Tensor, partial: torch.Tensor, wire: torch.dtype
    ) -> None:
        self.tree: Tree = Tree(acc, plan.gradient_buffers)
        self._world, self._buffers, self._norm = plan.world, plan.gradient_buffers, False
        super().__init__(plan, comm, acc, partial, wire, 1.0)

    def _configure(self, config: _lib.ReducerConfig) -> None:
        config.tree, config.tree_acc = self._buffers, self.tree.extra()

    def begin(self, assign: bool, norm: bool) -> None:
        self.tree.check(assign)
        super().begin(assign, norm)
        self._norm = norm
        self.tree.begin(assign)

    def finish(self) -> None:
        super().finish()
        self.tree.end(self._world, self._norm)

    def sums(self, begin: int, length: int) -> torch.Tensor:
        return self.tree.sums(begin, length)


def norm_order(plan: Plan, gathered: torch.Tensor) -> torch.Tensor:
    """Partial sums of all ranks [world, blocks of a shard], in the order of parts -> the order of the flat space, so
    that their sum does not depend on the partition."""
    layout, world = plan.layout, plan.world
    full = layout.total // layout.bucket_elems
    per_slice = layout.bucket_elems // world // BLOCK
    head = gathered[:, : full * per_slice].reshape(world, full, per_slice).permute(1, 0, 2).reshape(-1)
    return torch.cat([head, gathered[:, full * per_slice :].reshape(-1)])
