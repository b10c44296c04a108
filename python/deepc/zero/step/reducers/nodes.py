"""What crosses the network between CPU nodes: gradients after they were reduced inside the node, and the parameters
that an owner has updated.

A bucket is cut into one slice per local index and a slice into one part per node (group.py: part = local_rank * nodes +
node). Inside the node the C core reduces this rank's slice where the gradients lie (comm/bucket.h, with a ring: the
slice only waits there). Then the ranks of one local index exchange parts: each gets its own part from every node, adds
them up in fp32 in node order, and is its owner. So every gradient crosses once per node, whichever the stage, all
stages see equal bits, and buckets are on the network while backward goes on.

What is sent is written by the codecs of comm/internode/crossing.py (ZeRO++)."""

from __future__ import annotations

import collections
import contextlib
from typing import TYPE_CHECKING, Any, cast

import torch

from ....comm.internode.crossing import Crossing, gradient_codec, parameter_codec
from ....core import lib as _lib
from ....core import memory
from ....core.lib import C, check
from ....core.ops import code
from ....errors import DiskError, UnsupportedError
from ....plan.plan import RING, SLOTS, Plan
from .base import RingReducer, Tree

if TYPE_CHECKING:
    from ....comm.groups import MultiNodeGroup, Sent
    from ....offload.array import Window as Addressed
    from ....plan.layout import Layout


class NodesReducer(RingReducer):
    """The reducer of several nodes. The interface of base.py, and `publish`."""

    def __init__(
        self,
        plan: Plan,
        group: MultiNodeGroup,
        acc: torch.Tensor,
        partial: torch.Tensor,
        wire: torch.dtype,
        pre_scale: float,
    ) -> None:
        super().__init__()
        self._plan, self._group, self._acc, self._partial = plan, group, acc, partial
        self._nodes, self._here = plan.nodes, plan.part % plan.nodes
        # With a tree a node's slice is the sum of its ranks' micro-batches, a node of the tree: it crosses unrounded
        # and is pushed (determinism.py).
        self.tree = Tree(acc, plan.gradient_buffers) if plan.gradient_buffers else None
        self._crossing = Crossing(gradient_codec(plan), self._nodes, self._here)
        self._nbytes, self._parameters = self._crossing.codec.nbytes, parameter_codec(plan)
        per_slice = plan.layout.bucket_elems // plan.ranks_per_node
        self._slots = memory.zeros(RING * per_slice, torch.float32, memory.COLORS["slots"]).view(RING, -1)
        room = self._nodes * self._nbytes(plan.layout.bucket_elems // plan.world)
        self._in = memory.zeros(RING * room, torch.uint8, memory.COLORS["received"]).view(RING, -1)
        self._out = (
            None
            if self._crossing.straight
            else memory.zeros(RING * room, torch.uint8, memory.COLORS["sent"]).view(RING, -1)
        )
        self._unsettled = False
        comm = group.open_comm("buckets", plan.layout.bucket_elems * max(wire.itemsize, plan.dtype.itemsize), SLOTS)
        self._keep = (plan.node_layout, comm, self._slots)  # borrowed by the C side
        self._make(
            _lib.ReducerConfig(
                comm=comm.handle,
                layout=cast("Layout", plan.node_layout).handle,
                dtype=code(wire),
                own_all=0,
                rank=group.local_rank,
                ring=RING,
                tree=int(self.tree is not None),
                pre_scale=pre_scale,
                pending_limit_bytes=2 * plan.layout.bucket_elems * wire.itemsize,
                acc=self._slots.data_ptr(),
                partial=None,
            )
        )

    # ---- gradients ---------------------------------------------------------------------------------------------------
    def begin(self, assign: bool, norm: bool) -> None:
        if self.tree is not None:
            self.tree.check(assign)
        super().begin(assign, norm)
        if self.tree is not None:
            self.tree.begin(assign)

    def _errors(self) -> contextlib.AbstractContextManager[None]:
        return self._group.errors()

    def finish(self) -> None:
        super().finish()
        self._unsettled = self._plan.own_all
        if self.tree is not None:
            self.tree.end(self._plan.world, self._norm)
        if self._norm:
            self.settle()
            self._partial.copy_(torch.ops.deepc.norm_squared(self._acc))

    def settle(self) -> None:
        """Stage 0: every rank gets the sums that others own. Collective."""
        if not self._unsettled:
            return
        self._unsettled = False
        pending: collections.deque[Any] = collections.deque()
        for b in range(self._plan.layout.nbuckets):
            at, part, m = self._part(b)
            if len(pending) == RING:
                pending.popleft().wait()
            pending.append(
                self._group.collect(
                    self._acc[at : at + self._nodes * m], self._acc[part : part + m].clone(), "gradients"
                )
            )
        for sent in pending:
            sent.wait()
        self._inside(self._acc)

    def sums(self, begin: int, length: int) -> torch.Tensor:
        if self.tree is None:
            return super().sums(begin, length)
        if self._plan.own_all and not self.tree.closed:
            raise UnsupportedError(
                "gradients at stage 0 over several nodes can be read after the step's last micro-batch only with"
                ' deepc.deterministic = "layout"; use stage 1, 2 or 3, or ask later'
            )
        return self.tree.sums(begin, length)

    def _advance(self) -> None:
        """Sends the slices that are ready inside the node, and takes the parts that have arrived. Does not wait."""
        with self._group.errors():
            check(C.dc_reducer_reduced(self.handle, self._count_ref))
        ready = self._count.value
        while self._launched < ready:
            self._send(self._launched)
            self._launched += 1
        while self._under_way and self._under_way[0][1].done():
            self._take_oldest()

    def _part(self, b: int) -> tuple[int, int, int]:
        """(start of this rank's slice of bucket b in the flat space, start of its part there, elements of a part)."""
        begin, end = self._plan.layout.bucket(b)
        m = (end - begin) // self._plan.world
        at = begin + self._group.local_rank * self._nodes * m
        return at, at + self._here * m, m

    def _send(self, b: int) -> None:
        m = self._part(b)[2]
        k, size = b % RING, self._nbytes(m)
        slot = self._slots[k, : self._nodes * m]
        received = self._in[k, : self._nodes * size]
        if self._out is None:
            payload = slot.view(torch.uint8)
        else:
            payload = self._out[k, : self._nodes * size]
            self._crossing.encode(payload, slot)
        self._under_way.append((b, self._group.exchange(received, payload, "gradients")))

    def _take_oldest(self) -> None:
        """Waits for the parts of the oldest bucket under way and adds them to the accumulator."""
        b, sent = self._under_way.popleft()
        sent.wait()
        _, part, m = self._part(b)
        k, size = b % RING, self._nbytes(m)
        start = part if self._plan.own_all else self._plan.slices[b].shard_begin
        target, received = self._acc[start : start + m], self._in[k, : self._nodes * size]
        if self.tree is not None:
            leaves = self.tree.leaves // self._plan.ranks_per_node
            self.tree.push(start, self._crossing.decode(received), leaves, self._norm)
        else:
            own = self._slots[k, self._here * m : (self._here + 1) * m]
            self._crossing.add(target, received, own, self._assign)
        self._taken += 1
        check(C.dc_reducer_give_back(self.handle, self._taken))

    # ---- parameters --------------------------------------------------------------------------------------------------
    def publish(self, flat: torch.Tensor, master: torch.Tensor | None, resident: bool) -> None:
        """Makes `flat` whole on every node: the owners' slices cross once per node. With qwZ they are made from
        `master` and every node, the owner's too, gets the dequantised values, so that all nodes hold equal bits.
        resident: `flat` is node-shared and a fence of the node is the caller's; otherwise the ranks of the node
        complete their replicas. Collective."""
        pending: collections.deque[Any] = collections.deque()
        for b in range(self._plan.layout.nbuckets):
            if len(pending) == RING:
                self._arrived(flat, *pending.popleft())
            pending.append((b, *self._offer(flat, master, b)))
        while pending:
            self._arrived(flat, *pending.popleft())
        if not resident:
            self._inside(flat)

    def publish_on_disk(self, flat: Addressed) -> DiskError | None:
        """The same where each node has a file of all parameters: the owners' slices are read there, cross once per
        node, and go to the files of the others. A fence of the node is the caller's. A failure of this rank's disk is
        returned, so that nobody waits for it; a call after that does all of it again. Collective."""
        flat.forget()  # what could not be written before comes again
        failure: DiskError | None = None
        reads: collections.deque[tuple[torch.Tensor, Any]] = collections.deque()
        pending: collections.deque[Any] = collections.deque()

        def ask(b: int) -> None:
            nonlocal failure
            _, part, m = self._part(b)
            mine = torch.empty(m, dtype=flat.array.dtype, device="cpu")
            try:
                reads.append((mine, flat.array.read_async(part, mine)))
            except DiskError as exc:
                failure = failure or exc
                reads.append((mine, None))

        def arrived(b: int, sent: Sent) -> None:
            sent.wait()
            at, part, m = self._part(b)
            flat.store(at, part)
            flat.drop(part, part + m)  # it is there
            flat.store(part + m, at + self._nodes * m)
            flat.settle(2 * RING)

        buckets = self._plan.layout.nbuckets
        for b in range(min(RING, buckets)):
            ask(b)
        for b in range(buckets):
            if len(pending) == RING:
                arrived(*pending.popleft())
            mine, read = reads.popleft()
            try:
                if read is not None:
                    read.wait()
            except DiskError as exc:  # the others get anything instead, and the step is not whole
                failure = failure or exc
            at, _, m = self._part(b)
            pending.append((b, self._group.collect(flat.tensor(at, at + self._nodes * m), mine, "parameters")))
            if b + RING < buckets:
                ask(b + RING)
        while pending:
            arrived(*pending.popleft())
        try:
            flat.flush()
        except DiskError as exc:
            failure = failure or exc
        return failure

    def _offer(self, flat: torch.Tensor, master: torch.Tensor | None, b: int) -> tuple[Sent, torch.Tensor | None]:
        at, part, m = self._part(b)
        codec = self._parameters
        if codec is None:
            return (
                self._group.collect(flat[at : at + self._nodes * m], flat[part : part + m].clone(), "parameters"),
                None,
            )
        mine = torch.empty(codec.nbytes(m), dtype=torch.uint8, device="cpu")
        everyone = torch.empty(self._nodes * mine.numel(), dtype=torch.uint8, device="cpu")
        shard = self._plan.slices[b].shard_begin
        codec.encode(mine, cast(torch.Tensor, master)[shard : shard + m])
        return self._group.collect(everyone, mine, "parameters"), everyone

    def _arrived(self, flat: torch.Tensor, b: int, sent: Sent, everyone: torch.Tensor | None) -> None:
        sent.wait()
        codec = self._parameters
        if everyone is None or codec is None:
            return
        at, _, m = self._part(b)
        for n, payload in enumerate(everyone.view(self._nodes, -1)):
            codec.decode(flat[at + n * m : at + (n + 1) * m], payload)

    def _inside(self, flat: torch.Tensor) -> None:
        """Completes the node's replicas from its ranks' slices."""
        if self._plan.ranks_per_node > 1:
            with self._group.errors():
                self.gather(flat)

    def close(self) -> None:
        self._under_way.clear()
        super().close()

    __del__ = close
