"""Gradients into their owners' accumulators over torch.distributed (GPUs, nodes with different numbers of ranks), while
backward runs.

The flat space's buckets go through an explicit state machine (`BucketStates`): OPEN (gradients are missing) -> COMPLETE
-> BEGUN (its reduction is under way) -> REDUCED. A bucket's reduction begins as soon as this rank has all its
gradients, on all ranks in one order, whatever gradients each has: who lacks one (an expert that it did not use) holds
back what comes behind until its backward ends, and then gives zeros. The order is that in which buckets became complete
on rank 0, told to all after the first, second, fourth, eighth ... pass, so that a parameter that nobody uses holds
nobody back for long. A gradient is dropped when the last of its buckets is reduced.

On the CPU reductions run in a thread, because not every backend has asynchronous ones (groups of the backend "deepc"
over several nodes block); one bucket is copied at a time. The threads tell each other how many buckets their ranks have
begun: while more than AHEAD buckets of gradients wait, a rank waits for the oldest ones that all ranks have begun.
Waiting for one that another rank has not begun could be for ever: it may need this rank for something else first. On a
device reductions are asynchronous Works. The process group is our own: other calls of this rank don't meet them. Sums
have the bits that reductions after backward have: each bucket is one collective, whenever it runs."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from ....comm import start as comm
from ....comm.c10d.progress import Progress
from ....comm.failures import Breaker, break_group
from ....comm.groups import _all_gather, new_group, own_store
from ....core import memory
from ....errors import UnsupportedError
from ....plan.buckets import BucketStates
from ....plan.plan import Plan
from ...tiers.split import squares, stretches
from .base import Tree

AHEAD = 4  # see above
Pieces = list[tuple[int, torch.Tensor]]  # (where in the bucket, [n] a gradient's elements there)
_GRACE_S = 5.0  # that a reduction under way gets when the reducer closes
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13


class Reduction(NamedTuple):
    """A bucket's reduction under way. part: this rank's sum, not added to the accumulators yet, or None if the Work
    adds it; nbytes: of the copy that it reduces."""

    bucket: int
    work: Any
    part: torch.Tensor | None
    nbytes: int


class TorchReducer:
    """The reducer over torch.distributed, on any device; `acc` may lie on the host (offloaded optimizer). The interface
    is base.Reducer. Made and closed collectively by `ranks` of the default group (None: all)."""

    tree: Tree | None = None

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        acc: torch.Tensor,
        partial: torch.Tensor,
        wire: torch.dtype,
        pre_scale: float,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self._plan, self._device, self._acc, self._partial, self._wire, self._pre_scale = (
            plan,
            device,
            acc,
            partial,
            wire,
            pre_scale,
        )
        layout = plan.layout
        self._states = BucketStates(layout.offsets, layout.numels, layout.bucket_elems, layout.nbuckets)
        self._grads: dict[int, torch.Tensor] = {}
        self._released: list[int] = []
        self._seen: set[int] = set()
        self._assign = self._norm = self._open = False
        self._passes = 0
        self._limit = layout.nbuckets  # buckets in order that may begin
        self._told = self._known = (
            # buckets in order that all ranks have begun: as the threads tell each other; as this rank knows from
            # elsewhere
            0
        )
        self._bound = AHEAD * layout.bucket_elems * wire.itemsize
        self._under_way: collections.deque[Reduction] = collections.deque()
        self._breaker: Breaker | None = None
        self._bytes, self._stats = 0, dict.fromkeys(("reductions", "early", "grad_bytes_max", "waits"), 0)
        # where gradients go to the host while backward makes more
        self._side = torch.cuda.Stream(device) if device.type == "cuda" and acc.device.type == "cpu" else None
        self._group: Any = None
        self._progress: Progress | None = None
        if plan.world > 1:
            self._group = new_group(ranks, timeout=comm.DEFAULT_TIMEOUT)
            self._rank, store = dist.get_rank(self._group), own_store("gradients", ranks)[1]
            self._breaker = Breaker("a reduction of gradients", self._rank, plan.world, store, self._cut)
            if device.type == "cpu":
                self._progress = Progress("gradients")
                self._flat = torch.empty(layout.bucket_elems, dtype=wire, device="cpu")
                self._mine = torch.empty(layout.bucket_elems // plan.world, dtype=wire, device="cpu")
                self._bytes = self._flat.nbytes

    # ---- one rank ----------------------------------------------------------------------------------------------------
    def _add_alone(self, index: int, grad: torch.Tensor) -> None:
        """Nothing to wait for: the gradient can go."""
        self._seen.add(index)
        flat = grad.reshape(-1) if self._pre_scale == 1 else grad.reshape(-1) * self._pre_scale
        at = self._plan.layout.offsets[index]
        for target, begin, end in self._targets(index):
            part = flat[begin - at : end - at]
            if self._side is not None and self._assign and target.device != part.device:
                self._send(target, part, self._side)
            else:
                self._put(target, part.to(target.device))
        self._released.append(index)

    def _targets(self, index: int) -> Iterator[tuple[torch.Tensor, int, int]]:
        """(accumulators, where they begin and end in the share) of parameter `index`: of each part, where there are
        two."""
        at = self._plan.layout.offsets[index]
        for begin, end in stretches(self._acc, at, at + self._plan.layout.numels[index]):
            yield self._acc[begin:end], begin, end

    @staticmethod
    def _send(target: torch.Tensor, flat: torch.Tensor, side: torch.cuda.Stream) -> None:
        """`target`, in locked memory of the host, becomes `flat` by the time that `side` is synchronized."""
        side.wait_stream(torch.cuda.current_stream(flat.device))
        with torch.cuda.stream(side):
            target.copy_(flat.to(target.dtype), non_blocking=True)
        flat.record_stream(side)

    def _finish_alone(self) -> None:
        if self._side is not None:
            self._side.synchronize()
        for i in range(self._plan.layout.nparams) if self._assign else ():
            for target, _, _ in self._targets(i) if i not in self._seen else ():
                target.zero_()
        self._seen.clear()

    # ---- a pass ------------------------------------------------------------------------------------------------------
    def begin(self, assign: bool, norm: bool) -> None:
        self._raise_failure()
        self._assign, self._norm, self._open = assign, norm, True
        self._states.begin()
        self._told = self._known = 0
        self._stats["grad_bytes_max"] = self._bytes

    def add(self, index: int, grad: torch.Tensor) -> None:
        if self._plan.world == 1:
            self._add_alone(index, grad)
            return
        self._raise_failure()
        if not self._states.arrived(index):
            self._released.append(index)
            return
        self._grads[index] = grad
        self._count(grad.nbytes)
        self._begin_complete()
        self._take_reduced()
        self._hold_back()

    def released(self) -> list[int]:
        out, self._released = self._released, []
        return out

    def finish(self) -> None:
        if self._plan.world == 1:
            self._finish_alone()
        else:
            self._raise_failure()
            self._stats["early"] += self._states.begun
            self._states.close()
            self._begin_complete()
            self._meet()
            self._begin_complete()
            while self._under_way:
                self._take_oldest()
            self._passes += 1
            if self._passes & (self._passes - 1) == 0:
                self._agree_on_order()
        self._open = False
        if self._norm:
            self._partial.copy_(squares(self._acc))

    def _meet(self) -> None:
        """Before the end of a pass is waited for."""

    def _agree_on_order(self) -> None:
        """Rank 0's order becomes everyone's. Collective."""
        if len(self._states.order) < 2:
            return
        order = torch.tensor(self._states.seen_order(), dtype=torch.int64, device=self._device)
        with self._errors("the order of reductions"):
            dist.broadcast(order, group=self._group, group_src=0)
        self._states.order = order.tolist()

    # ---- a bucket ----------------------------------------------------------------------------------------------------
    def _begin_complete(self) -> None:
        """Begins the reductions of all buckets that may begin."""
        while (b := self._states.take(self._limit)) is not None:
            self._begin(b)

    def _begin(self, b: int) -> None:
        self._stats["reductions"] += 1
        begin, end = self._plan.layout.bucket(b)
        pieces: Pieces = []
        for i in self._states.params_of[b]:
            if i in self._grads:
                at = self._plan.layout.offsets[i]
                lo, hi = max(begin, at), min(end, at + self._plan.layout.numels[i])
                pieces.append((lo - begin, self._grads[i].reshape(-1)[lo - at : hi - at]))
        if self._progress is not None:
            job = functools.partial(self._reduce_here, b, self._states.begun, pieces)
            work = self._progress.submit(job, (), lambda: f"reduction of gradient bucket {b}", b"")
            self._under_way.append(Reduction(b, work, None, 0))
            return
        flat = torch.empty(end - begin, dtype=self._wire, device=self._device)
        with self._errors(f"reduction of gradient bucket {b}"):
            work, part = self._reduce(flat, pieces, torch.empty_like(flat[: flat.numel() // self._plan.world]), True)
        self._count(flat.nbytes)
        self._under_way.append(Reduction(b, work, part, flat.nbytes))

    def _reduce(self, flat: torch.Tensor, pieces: Pieces, mine: torch.Tensor, later: bool) -> tuple[Any, torch.Tensor]:
        """Fills `flat` with this rank's pieces, zeros elsewhere, and adds up all ranks': (Work if later, this rank's
        part of the sum)."""
        flat.zero_()
        for at, piece in pieces:
            flat[at : at + piece.numel()].copy_(piece if self._pre_scale == 1 else piece * self._pre_scale)
        if self._plan.own_all:
            return dist.all_reduce(flat, group=self._group, async_op=later), flat
        return _reduce_scatter(mine, flat, group=self._group, async_op=later), mine

    def _reduce_here(self, b: int, count: int, pieces: Pieces) -> None:
        """In the thread: all of the reduction of bucket b, the `count`th in order."""
        begin, end = self._plan.layout.bucket(b)
        n = end - begin
        with self._errors(f"reduction of gradient bucket {b}"):
            if count > self._told:  # on all ranks alike
                begun = torch.tensor([self._states.begun], dtype=torch.int64, device="cpu")
                dist.all_reduce(begun, dist.ReduceOp.MIN, group=self._group)
                self._told = int(begun)
            _, part = self._reduce(self._flat[:n], pieces, self._mine[: n // self._plan.world], False)
        self._accumulate(b, part)

    def _accumulate(self, b: int, part: torch.Tensor) -> None:
        shard = self._plan.layout.bucket(b)[0] if self._plan.own_all else self._plan.slices[b].shard_begin
        target = self._acc[shard : shard + part.numel()]
        self._put(target, part.to(target.device))

    def _put(self, target: torch.Tensor, part: torch.Tensor) -> None:
        """`target`, of the accumulators, becomes `part` or gets it added, in fp32 and rounded once if it has 16
        bits."""
        if target.dtype == torch.float32:
            no_norm = target.new_empty(0, dtype=torch.float64)  # on its device: accumulators may lie on two
            torch.ops.deepc.accumulate_tensors(target, [part], self._assign, no_norm)
        else:
            target.copy_(part if self._assign else target.float().add_(part))

    def _take_reduced(self) -> None:
        """Drops what reductions that are through have needed. Does not wait."""
        while self._under_way and self._under_way[0].work.is_completed():
            self._take_oldest()

    def _hold_back(self) -> None:
        """Waits for reductions while too many bytes of gradients wait for those that all ranks have begun."""
        while (
            self._bytes > self._bound
            and self._under_way
            and self._states.begun - len(self._under_way) < max(self._told, self._known)
        ):
            self._stats["waits"] += 1
            self._take_oldest()

    def _take_oldest(self) -> None:
        """Waits for the oldest reduction under way."""
        oldest = self._under_way.popleft()
        with self._errors(f"reduction of gradient bucket {oldest.bucket}"):
            oldest.work.wait()
        if oldest.part is not None:
            self._accumulate(oldest.bucket, oldest.part)
        self._count(-oldest.nbytes)
        for i in self._states.reduced(oldest.bucket):
            if (grad := self._grads.pop(i, None)) is not None:
                self._count(-grad.nbytes)
                self._released.append(i)

    def _count(self, nbytes: int) -> None:
        self._bytes += nbytes
        self._stats["grad_bytes_max"] = max(self._stats["grad_bytes_max"], self._bytes)

    def stats(self) -> dict[str, int]:
        """Counted since the start: reductions of buckets, early (those that began before backward had ended), waits
        (for reductions, to bound the bytes of gradients); and of the last pass: grad_bytes_max, the most bytes of
        gradients that waited here for their reduction, copies included.
        """
        return dict(self._stats)

    # ---- failures ----------------------------------------------------------------------------------------------------
    @property
    def broken(self) -> bool:
        """Whether a pass has failed, or is not at its end."""
        return self._open or (self._breaker is not None and self._breaker.failed is not None)

    def _errors(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Makes a failure of the backend a CommError. After one the reducer is broken, on all ranks: every call raises
        it."""
        return cast(Breaker, self._breaker).errors(what)

    def _cut(self, error: BaseException) -> None:
        if self._device.type == "cpu" and (group := self._group) is not None:
            break_group(group, self._rank, self._plan.world)
        self.tell(error)

    def tell(self, error: BaseException) -> None:
        """Called with the first failure, in whichever thread, so that what else waits between these ranks ends too."""

    def _raise_failure(self) -> None:
        if self._breaker is not None:
            self._breaker.check()

    # ---- the rest of the interface -----------------------------------------------------------------------------------
    def borrow(self, lease: memory.Lease | None) -> None:
        """Accumulators stay: plans give leases only where the C core's reducer fills them."""
        if lease is not None:
            raise UnsupportedError("accumulators that come and go are for the C core's reducer (one CPU node)")

    def settle(self) -> None:
        """Nothing is left to do: accumulators are complete."""

    def sums(self, begin: int, length: int) -> torch.Tensor:
        return self._acc[begin : begin + length]

    def gather(self, flat: torch.Tensor) -> None:
        layout = self._plan.layout
        for b, own in enumerate(self._plan.slices):
            begin, end = layout.bucket(b)
            mine = flat[own.flat_begin : own.flat_begin + own.length].clone()
            with self._errors(f"gathering the parameters of bucket {b}"):
                _all_gather(flat[begin:end], mine, group=self._group)

    def close(self) -> None:
        """Ends the thread and leaves the group. Reductions that are under way get a few seconds, none if their pass
        does not come to its end."""
        group, self._group = self._group, None
        if group is None:
            return
        if self._progress is not None and not self._progress.close(0 if self.broken else _GRACE_S):
            group.abort()
        if self._progress is not None:
            self._progress.join()
        self._grads.clear()
        self._under_way.clear()
        if dist.is_initialized():
            dist.destroy_process_group(group)

    def __del__(self) -> None:
        try:
            if self._progress is not None:
                self._progress.close(0)
        except Exception:  # at the end of the process, what it needs may be gone, contextlib too
            pass


class RoundsReducer(TorchReducer):
    """TorchReducer of ranks whose gathers are rounds (sources.py). At the end of a pass, to which ranks come from
    different gathers, they meet before they wait for it. In each round they say how many buckets they have ready. On a
    device, where a collective occupies its queue until all ranks have come to it, reductions begin when all ranks have
    the bucket, behind the round's gathers: in one order on all ranks.

    meet: returns when all ranks are there; tell: is called with the first failure, from any thread."""

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        acc: torch.Tensor,
        partial: torch.Tensor,
        wire: torch.dtype,
        pre_scale: float,
        *,
        meet: Callable[[], None],
        tell: Callable[[BaseException], None],
        ranks: Sequence[int] | None = None,
    ) -> None:
        super().__init__(plan, device, acc, partial, wire, pre_scale, ranks)
        self._meet_all, self._tell_all = meet, tell
        self._in_order = device.type != "cpu" and plan.sharded

    def begin(self, assign: bool, norm: bool) -> None:
        super().begin(assign, norm)
        if self._in_order:
            self._limit = 0

    def _meet(self) -> None:
        self._meet_all()

    def ready(self) -> int:
        """Buckets since the start that this rank has all gradients of, from the front of their order."""
        return self._passes * self._plan.layout.nbuckets + (self._states.ready if self._open else 0)

    def agreed(self, least: int) -> None:
        """All ranks are at least so far."""
        if not self._open:
            return
        self._known = max(0, least - self._passes * self._plan.layout.nbuckets)
        if self._in_order:
            self._limit = self._known
            self._begin_complete()
        self._hold_back()

    def tell(self, error: BaseException) -> None:
        self._tell_all(error)
