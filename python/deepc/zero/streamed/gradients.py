"""Gradients on disk, where parameters and optimizer states are there as well: a bucket that is reduced goes to the disk
behind backward, and comes back for the update. What a rank has in memory of them is a few buckets.

The partial sums of the norm are made while the bucket is in memory. A later micro-batch's bucket is added to what is
read back, so that every element has the sum that an accumulator in memory has: old + new, in fp32."""

from __future__ import annotations

import collections
import ctypes
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...core import lib as _lib
from ...core import memory
from ...core.lib import C, call, check
from ...core.ops import code
from ...errors import DiskError, UnsupportedError
from ...offload.array import DiskArray, DiskRead, Window
from ...offload.file import Handle
from ...offload.place import empty
from ...plan.buckets import BucketStates
from ...plan.layout import BLOCK
from ...plan.plan import RING
from ..step.reducers.base import RingReducer, Tree
from .disk import ArrayOnDisk

if TYPE_CHECKING:
    from ...comm.shared import Comm
    from ...plan.plan import Plan

Ranges = list[tuple[int, int]]  # [begin, end) of elements


class GradientStore:
    """This rank's sums [owned] fp32 on disk, and `partial`, the squares of each block of them."""

    def __init__(self, folder: str, owned: int, partial: torch.Tensor) -> None:
        self.array = DiskArray(folder, owned, torch.float32, "the gradients")
        self.values = ArrayOnDisk(self.array)
        self.window = Window(self.array)
        self._owned, self._partial = owned, partial
        self._failure: DiskError | None = None

    def fold(self, begin: int, values: torch.Tensor, old: torch.Tensor | None, given: Ranges | None) -> None:
        """values: the sums of a pass for the elements from `begin` on; old: what was there, which they are added to in
        the ranges `given` (of `values`; None: everywhere) and which stays elsewhere. Makes the norm's partial sums."""
        if old is not None:
            if given is None:
                values.add_(old)
            else:
                at = 0
                for lo, hi in [*given, (values.numel(), values.numel())]:
                    values[at:lo].copy_(old[at:lo])
                    values[lo:hi].add_(old[lo:hi])
                    at = hi
        block = begin // BLOCK
        self._partial[block : block + values.numel() // BLOCK].copy_(torch.ops.deepc.norm_squared(values))

    # ---- transfers of a pass: a failure is told at its end, so that the pass comes to it on all ranks ---------------
    def write(self, begin: int, values: torch.Tensor) -> Handle | None:
        """Starts to write; None if that failed."""
        try:
            return self.array.write_async(begin, values)
        except DiskError as exc:
            self._failure = self._failure or exc
            return None

    def wait(self, transfer: Handle | DiskRead | None) -> bool:
        """For a write or a read; whether it went well."""
        try:
            if isinstance(transfer, DiskRead):
                transfer.wait()
            elif transfer is not None:
                self.array.finish(transfer)
            return transfer is not None
        except DiskError as exc:
            self._failure = self._failure or exc
            return False

    def ask(self, begin: int, n: int, room: torch.Tensor) -> DiskRead | None:
        """Starts to read into `room`; None if that failed."""
        try:
            return self.array.read_async(begin, room[:n])
        except DiskError as exc:
            self._failure = self._failure or exc
            return None

    def begin(self) -> None:
        """A pass begins."""
        self._failure = None

    def end(self) -> None:
        """A pass ends. DiskError: what it has accumulated is lost."""
        if self._failure is not None:
            raise self._failure

    def sums(self, begin: int, length: int) -> torch.Tensor:
        """[length], a copy."""
        return self.array.get(begin, length)

    def cells(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(begin, values) of all of them, in order; each to be used before the next."""
        step = 1 << 20
        room = empty(min(step, self._owned))
        for at in range(0, self._owned, step):
            n = min(step, self._owned - at)
            yield at, self.array.read(at, room[:n])

    def remake_norm(self) -> None:
        """The partial sums of what is there, after somebody has changed it."""
        for at, values in self.cells():
            part = torch.ops.deepc.norm_squared(values)
            self._partial[at // BLOCK : at // BLOCK + part.numel()].copy_(part)

    def first_not_finite(self) -> int:
        """The first element that is not finite, or -1."""
        index = ctypes.c_int64()
        for at, values in self.cells():
            call("dc_find_nonfinite", values.data_ptr(), code(values.dtype), values.numel(), ctypes.byref(index))
            if index.value >= 0:
                return at + index.value
        return -1

    def close(self) -> None:
        self.array.close()


class _Bucket(NamedTuple):
    """A bucket that is being filled. old: on its way from the disk, into the tensor beside it."""

    values: torch.Tensor
    old: tuple[DiskRead | None, torch.Tensor] | None


class DiskReducer:
    """The reducer of one rank (reducers/base.Reducer). A bucket opens with its first gradient and is written with its
    last."""

    tree: Tree | None = None

    def __init__(self, plan: Plan, store: GradientStore, pre_scale: float) -> None:
        self._layout, self._store, self._pre_scale = plan.layout, store, pre_scale
        self._buckets_of: list[range] = []
        layout = plan.layout
        for at, n in zip(layout.offsets, layout.numels):
            last = (at + max(n, 1) - 1) // layout.bucket_elems
            self._buckets_of.append(range(at // layout.bucket_elems, last + 1) if n else range(0))
        self._params_of = BucketStates(layout.offsets, layout.numels, layout.bucket_elems, layout.nbuckets).params_of
        self._open: dict[int, _Bucket] = {}
        self._writes: collections.deque[tuple[Handle | None, torch.Tensor]] = collections.deque()
        self._room: list[torch.Tensor] = []
        self._released: list[int] = []
        self._given: set[int] = set()
        self._assign = True
        self._most = 0

    # ---- memory ------------------------------------------------------------------------------------------------------
    def _take(self) -> torch.Tensor:
        """Memory for a bucket: one that is free, or that a write has left."""
        if not self._room and len(self._writes) >= RING:
            self._reap()
        if self._room:
            return self._room.pop()
        self._most += 1
        return empty(self._layout.bucket_elems)

    def _reap(self) -> None:
        """Waits for the oldest write."""
        handle, room = self._writes.popleft()
        self._store.wait(handle)
        self._room.append(room)

    # ---- a pass ------------------------------------------------------------------------------------------------------
    def begin(self, assign: bool, norm: bool) -> None:
        self._abandon()
        self._store.begin()
        self._assign = assign
        self._given.clear()
        self._missing = [len(p) for p in self._params_of]
        self._written: set[int] = set()

    def _at(self, b: int) -> _Bucket:
        if b not in self._open:
            begin, end = self._layout.bucket(b)
            values, old = self._take()[: end - begin], None
            values.zero_()
            if not self._assign:
                before = self._take()
                old = self._store.ask(begin, end - begin, before), before[: end - begin]
            self._open[b] = _Bucket(values, old)
        return self._open[b]

    def add(self, index: int, grad: torch.Tensor) -> None:
        self._given.add(index)
        self._released.append(index)
        flat, at = grad.reshape(-1), self._layout.offsets[index]
        for b in self._buckets_of[index]:
            begin, end = self._layout.bucket(b)
            lo, hi = max(begin, at), min(end, at + self._layout.numels[index])
            target = self._at(b).values[lo - begin : hi - begin]
            target.copy_(flat[lo - at : hi - at])
            if self._pre_scale != 1.0:
                target.mul_(self._pre_scale)
            self._missing[b] -= 1
            if not self._missing[b]:
                self._write(b)

    def _write(self, b: int) -> None:
        begin, end = self._layout.bucket(b)
        values, old = self._open.pop(b)
        before: torch.Tensor | None = None
        if old is not None:
            read, before = old
            self._store.wait(read)
            self._room.append(_whole(before, self._layout.bucket_elems))
        self._store.fold(begin, values, before, self._ranges(b, begin, end) if before is not None else None)
        self._writes.append((self._store.write(begin, values), _whole(values, self._layout.bucket_elems)))
        self._written.add(b)

    def _ranges(self, b: int, begin: int, end: int) -> Ranges:
        """What of the bucket has got gradients in this pass."""
        out: Ranges = []
        for i in self._params_of[b]:
            if i in self._given:
                at = self._layout.offsets[i]
                out.append((max(begin, at) - begin, min(end, at + self._layout.numels[i]) - begin))
        return out

    def released(self) -> list[int]:
        out, self._released = self._released, []
        return out

    def finish(self) -> None:
        for b in range(self._layout.nbuckets):
            if b in self._open:
                self._write(b)
            elif self._assign and b not in self._written:  # nobody has a gradient there
                self._at(b)
                self._write(b)
        while self._writes:
            self._reap()
        del self._room[2 * RING :]
        self._store.end()

    def _abandon(self) -> None:
        """What a pass that failed has left."""
        for bucket in self._open.values():
            if bucket.old is not None and bucket.old[0] is not None:
                bucket.old[0].abandon()
        self._open.clear()
        while self._writes:
            self._store.wait(self._writes.popleft()[0])

    # ---- the rest of the interface -----------------------------------------------------------------------------------
    def borrow(self, lease: memory.Lease | None) -> None:
        if lease is not None:
            raise UnsupportedError("gradients on disk have no lease")

    def settle(self) -> None:
        pass

    def sums(self, begin: int, length: int) -> torch.Tensor:
        return self._store.sums(begin, length)

    def gather(self, flat: torch.Tensor) -> None:
        raise UnsupportedError("replicas of parameters are for ZeRO stages 1 and 2")

    def stats(self) -> dict[str, int]:
        """buckets: the most that were in memory."""
        return {"buckets": self._most}

    def close(self) -> None:
        self._abandon()


def _whole(part: torch.Tensor, n: int) -> torch.Tensor:
    """All of the memory that `part` is the beginning of."""
    return torch.as_strided(part, (n,), (1,), part.storage_offset())


class ReadsAhead(RingReducer):
    """A reducer that adds a later micro-batch's bucket to what is read back, RING buckets ahead."""

    _plan: Plan
    _store: GradientStore

    def __init__(self) -> None:
        super().__init__()
        self._old: dict[int, tuple[DiskRead | None, torch.Tensor]] = {}

    def begin(self, assign: bool, norm: bool) -> None:
        self._abandon()
        self._store.begin()
        super().begin(assign, norm)
        for b in range(min(RING, self._plan.layout.nbuckets)):
            self._ask(b)

    def _ask(self, b: int) -> None:
        """Starts to read what bucket b is added to."""
        if not self._assign and b < self._plan.layout.nbuckets:
            own = self._plan.slices[b]
            before = empty(own.length)
            self._old[b] = self._store.ask(own.shard_begin, own.length, before), before

    def _abandon(self) -> None:
        """What a pass that failed has left."""
        for read, _ in self._old.values():
            if read is not None:
                read.abandon()
        self._old.clear()


class DiskNodeReducer(ReadsAhead):
    """The reducer of the ranks of a node: the C core's, with a ring (comm/bucket.h): this rank's slice of a bucket
    waits there until it is on disk."""

    def __init__(self, plan: Plan, comm: Comm, store: GradientStore, wire: torch.dtype, pre_scale: float) -> None:
        super().__init__()
        self._plan, self._store = plan, store
        self._per_slice = plan.layout.bucket_elems // plan.world
        self._slots = memory.zeros(RING * self._per_slice, torch.float32, memory.COLORS["slots"]).view(RING, -1)
        self._keep = (plan.layout, comm, self._slots)  # borrowed by the C side
        self._make(
            _lib.ReducerConfig(
                comm=comm.handle,
                layout=plan.layout.handle,
                dtype=code(wire),
                own_all=0,
                rank=plan.part,
                ring=RING,
                pre_scale=pre_scale,
                pending_limit_bytes=2 * plan.layout.bucket_elems * wire.itemsize,
                acc=self._slots.data_ptr(),
                partial=None,
            )
        )

    def finish(self) -> None:
        super().finish()
        self._store.end()

    def _advance(self) -> None:
        """Writes the slices that are reduced. Waits for the disk only where the ring is full."""
        check(C.dc_reducer_reduced(self.handle, self._count_ref))
        while self._launched < self._count.value:
            b, own = self._launched, self._plan.slices[self._launched]
            values, before = self._slots[b % RING, : own.length], None
            if (old := self._old.pop(b, None)) is not None:
                self._store.wait(old[0])
                before = old[1]
            self._store.fold(own.shard_begin, values, before, None)
            self._under_way.append(self._store.write(own.shard_begin, values))
            self._launched += 1
            self._ask(b + RING)
            if self._launched - self._taken == RING:
                self._take_oldest()

    def _take_oldest(self) -> None:
        self._store.wait(self._under_way.popleft())
        self._taken += 1
        if C.dc_reducer_in_pass(self.handle):
            check(C.dc_reducer_give_back(self.handle, self._taken))

    def _abandon(self) -> None:
        super()._abandon()
        while self._under_way:
            self._store.wait(self._under_way.popleft())

    def borrow(self, lease: memory.Lease | None) -> None:
        if lease is not None:
            raise UnsupportedError("gradients on disk have no lease")

    def sums(self, begin: int, length: int) -> torch.Tensor:
        return self._store.sums(begin, length)

    def close(self) -> None:
        self._abandon()
        super().close()
