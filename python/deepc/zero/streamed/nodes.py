"""Gradients on disk where the ranks lie on several CPU nodes: a part that has come from all nodes is added up and goes
to the owner's disk, as the accumulator in memory would have it, bit for bit."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

import torch

from ...core.lib import C, check
from ...offload.file import Handle
from ...offload.place import empty
from ...plan.plan import RING
from ..step.reducers.base import RingReducer
from ..step.reducers.nodes import NodesReducer
from .gradients import ReadsAhead

if TYPE_CHECKING:
    from ...comm.groups import MultiNodeGroup
    from ...plan.plan import Plan
    from .gradients import GradientStore


class DiskNodesReducer(NodesReducer, ReadsAhead):
    """The reducer of several nodes (step/reducers/nodes.py) whose sums lie on disk. A later micro-batch's part is added
    to what is read back, RING buckets ahead."""

    def __init__(
        self,
        plan: Plan,
        group: MultiNodeGroup,
        store: GradientStore,
        partial: torch.Tensor,
        wire: torch.dtype,
        pre_scale: float,
    ) -> None:
        super().__init__(plan, group, torch.empty(0, dtype=torch.float32, device="cpu"), partial, wire, pre_scale)
        self._store = store
        self._writes: collections.deque[tuple[Handle | None, torch.Tensor]] = collections.deque()

    def _take_oldest(self) -> None:
        b, sent = self._under_way.popleft()
        sent.wait()
        own, m = self._plan.slices[b], self._part(b)[2]
        k, size = b % RING, self._nbytes(m)
        if (old := self._old.pop(b, None)) is not None:
            self._store.wait(old[0])
        values = old[1] if old is not None else self._room(m)
        slot = self._slots[k, self._here * m : (self._here + 1) * m]
        self._crossing.add(values, self._in[k, : self._nodes * size], slot, self._assign)
        self._store.fold(own.shard_begin, values, None, None)
        self._writes.append((self._store.write(own.shard_begin, values), values))
        if len(self._writes) > RING:  # as far as they have not made room for this one
            self._written()
        self._taken += 1
        check(C.dc_reducer_give_back(self.handle, self._taken))
        self._ask(b + RING)

    def _room(self, m: int) -> torch.Tensor:
        """Memory for a part: that of the oldest write, once there are RING."""
        values = self._written() if len(self._writes) == RING else empty(0)
        return values if values.numel() == m else empty(m)

    def _written(self) -> torch.Tensor:
        """Waits for the oldest write; the memory that it was from."""
        handle, values = self._writes.popleft()
        self._store.wait(handle)
        return values

    def finish(self) -> None:
        RingReducer.finish(self)
        while self._writes:
            self._written()
        self._store.end()

    def settle(self) -> None:
        pass

    def sums(self, begin: int, length: int) -> torch.Tensor:
        return self._store.sums(begin, length)

    def _abandon(self) -> None:
        super()._abandon()
        while self._writes:
            self._written()

    def close(self) -> None:
        if hasattr(self, "_store"):  # else its making has failed
            self._abandon()
        super().close()

    __del__ = close
