"""Collectives of a group whose ranks lie on several nodes: by memory inside a node, by an existing engine (Gloo)
between nodes.

What crosses the wire is what one rank per node would send: every node reduces or collects in a shared segment, and
local rank i of each node (a leader, i < the smallest number of ranks on a node) carries slice i of it. All collectives
are data for one executor, a Plan of lanes. A lane is a row of elements that some nodes have (sources), one node
combines or takes over (home), and others get from there (dests):

                    lanes                          sources     home            dests
    all_reduce      one per node, N/n elements     all nodes   that node       all others
    reduce          same                           all nodes   that node       the root's node
    reduce_scatter  one per node, its ranks' part  all nodes   that node       -
    all_gather      one per node, its ranks' data  that node   that node       all others
    broadcast       one per node but the root's    root's      that node       all others but the root's
    gather          one per node, its ranks' data  that node   root's          -
    scatter         one per node, its ranks' part  root's      that node       -
    all_to_all(v)   one per pair of nodes          first       second          -

so phase 1 goes from sources to home, phase 2 from home to dests. Bytes that a node sends (n nodes, N bytes, frames of
320 bytes apart): all_reduce 2 (n-1)/n N, reduce_scatter (n-1)/n N, reduce and gather at most N, broadcast at most N,
all_gather (n-1) times its ranks' data.

Lanes are cut into rounds of at most 2 MiB. Round t is staged and reduced in the node while rounds before it are on the
wire: Gloo's thread moves bytes between sockets and the shared segment, without a copy of ours. A round's slot is used
again `_SLOTS` rounds later; because every round has barriers of the node, the one before says that nobody still reads
it.

Before data moves, leaders exchange a frame: the fingerprint of the call (operation, dtype, count, reduction, root, tag,
number of the call) and who calls. Small calls travel in that frame (up to `_INLINE` bytes per peer): one message each
way between the nodes' first leaders, and every node combines for itself. Large calls exchange frames while the first
round is staged. A frame is received into room for the longest one, because Gloo ends the process at a message longer
than its receive.

Floating sums: inside the node and across nodes in fp32 (fp64 for float64), each in rank or node order, with one
rounding to the payload's dtype per node and one at the end; the same bits on all ranks, because one node combines an
element and the others copy it (small calls: all combine the same frames in the same order). 16-bit averages are scaled
before they cross, so that they can't overflow. With DEEPC_WIRE_FP32=1 partial sums of 16-bit dtypes cross as fp32: one
rounding in all, for 1.5 times the bytes of an all_reduce and twice those of a reduce_scatter.

Failures: whoever fails writes why to the store, breaks its node's communicator and closes its connections, so the
failure runs through the group as fast as connections close; who is told by a closed connection alone asks the store
why. A leader that waits for the wire is not in the node's communicator: one thread per process looks after the local
peers of such waits every 50 ms.

Gloo can neither interrupt nor poll a receive, so a wait is broken by a receive that times out on the same pair, which
closes it.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import re
import struct
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .. import errors
from ..core import env
from ..core.caller import caller_line
from ..core.lib import C, call, check
from ..core.memory import tensor_at
from ..errors import AbortedError, ArgumentError, CommError, CommTimeoutError, MismatchError, RankDiedError
from . import shared
from .calls import observed
from .lanes import (
    ALIGN,
    EVERY,
    Job,
    Plan,
    cut,
    longest_pair,
    plan_all_gather,
    plan_all_reduce,
    plan_all_to_all,
    plan_broadcast,
    plan_gather,
    plan_reduce,
    plan_reduce_scatter,
    plan_scatter,
)
from .link import GlooWire, Pids, WireError, shortened, within
from .place import Places, Topology, discover

# Rounds have _SLOTS slots. When round t is staged, round t - _PASS is combined and passed on, round t - _FINISH copied
# out, and receives are posted up to round t + _AHEAD (Gloo's "ready to receive" queues behind data). Slots are free
# then: see the head of this file; _AHEAD + _FINISH < _SLOTS.
_SLOTS, _PASS, _FINISH, _AHEAD = 6, 2, 3, 2
# Tried on 2 hosts x 2 ranks at 1 Gbit/s, on 2 busy cores: rounds of 0.5 to 4 MiB, at least 2, 4 or 8 of them, one round
# less in flight: no difference beyond noise (32 MiB: 285 to 315 ms; limit 268). Lanes of 64 instead of 128 KiB: 10 to
# 20 % slower at 4 MiB.
_ROUND = 2 << 20  # bytes of a round's lanes together, at most
_MIN_LANE = 128 << 10  # bytes of a lane in a round, at least
_ROUNDS = 4  # of a call, at least, as far as _MIN_LANE allows
_INLINE = 64 << 10  # bytes in a frame per peer, at most
_MIN_SLICE = 16 << 10  # bytes for a leader of its own
_HEADER = 320
_FRAME_TAG, _FIRST_TAG, _SECOND_TAG = 1, 2, 3
_NODE_STAGING = (64 << 10, 2)  # slot bytes, slots of the node's communicator: barriers are its work here
_F32 = 0  # enum dc_dtype
_PLACE = re.compile(r"( \(\w+\.c:\d+, \w+\))+$")  # of the C core's errors
_SIXTEEN = (torch.bfloat16, torch.float16)
_NUMBERS = {
    name: i
    for i, name in enumerate(
        (
            "barrier",
            "all_reduce",
            "reduce_scatter",
            "all_gather",
            "broadcast",
            "all_to_all",
            "all_to_allv",
            "reduce",
            "gather",
            "scatter",
        ),
        1,
    )
}


# ---- reductions ------------------------------------------------------------------------------------------------------
class _Reduction:
    """What is computed on the partial results of one call."""

    def __init__(self, dtype: torch.dtype, op: str, size: int, wire_fp32: bool) -> None:
        """size: ranks of the group. Raises ArgumentError where the core has no such reduction."""
        self.code, red = shared.reduction(dtype, op)
        average = op == "avg"
        self._red = shared.REDUCE_OPS["sum"] if average else red
        sixteen = dtype in _SIXTEEN
        self.wide = wire_fp32 and sixteen and op in ("sum", "avg")
        self._scaled_first = average and sixteen and not self.wide
        self._scale = 1.0 / size if average else 1.0
        self._dtype, self.unit = dtype, dtype.itemsize
        self.part_unit = 4 if self.wide else self.unit
        self.plain = not self.wide and not self._scaled_first  # one input is its own partial result

    def local(self, part: int, sources: Sequence[int], count: int) -> None:
        """part = reduction of the inputs of a node's ranks. Addresses."""
        src = _array(sources)
        if self.wide:
            call("dc_reduce_acc", part, src, len(sources), self.code, count, 1, None)
        elif self._scaled_first:
            scratch = torch.empty(count)
            call("dc_reduce_acc", scratch.data_ptr(), src, len(sources), self.code, count, 1, None)
            call("dc_cast", part, self.code, scratch.data_ptr(), _F32, self._scale, count)
        else:
            call("dc_reduce", part, src, len(sources), self.code, self._red, count)

    def across(self, result: int, parts: Sequence[int], own: int, count: int) -> None:
        """result = reduction of the nodes' parts. own: index of this node's part, which may be overwritten."""
        if self.wide:
            call("dc_reduce", parts[own], _array(parts), len(parts), _F32, self._red, count)
            call("dc_cast", result, self.code, parts[own], _F32, self._scale, count)
            return
        call("dc_reduce", result, _array(parts), len(parts), self.code, self._red, count)
        if self._scale != 1.0 and not self._scaled_first:
            tensor_at(result, count, self._dtype, None).mul_(self._scale)


def _array(addresses: Sequence[int]):
    return (ctypes.c_void_p * len(addresses))(*addresses)


# ---- one call --------------------------------------------------------------------------------------------------------
class _Call(NamedTuple):
    name: str
    text: str  # for messages
    red: int
    root: int
    count: int
    dtype: int
    tag: int


_FINGERPRINT = struct.Struct("<IIiiqqqq")
_MAGIC = 0x44435748


def _header(c: _Call, seq: int, where: bytes) -> bytes:
    told = f"{c.text} (call {seq})".encode() + (b" at " + where if where else b"")
    room = _HEADER - _FINGERPRINT.size
    return _FINGERPRINT.pack(_MAGIC, _NUMBERS[c.name], c.red, c.root, c.count, c.dtype, c.tag, seq) + told[:room].ljust(
        room, b"\0"
    )


def _told(header: bytes) -> str:
    return header[_FINGERPRINT.size : _HEADER].rstrip(b"\0").decode(errors="replace")


class _Round(NamedTuple):
    first: dict[tuple[int, int], Any]  # (lane, source) -> receive of phase 1
    second: list[tuple[int, Any]]  # (node, receive of phase 2)
    sends: list[tuple[int, Any]]  # (node, send)


# ---- the communicator ------------------------------------------------------------------------------------------------
class Hierarchy:
    """A group over several nodes, used as shared.Comm: collectives block, give equal bits on every rank, and raise
    MismatchError, RankDiedError, CommTimeoutError or AbortedError on all ranks; after such an error it is broken. Calls
    from several threads are serialised. Tensors are contiguous CPU tensors, or ArgumentError is raised before anything
    is shared.

    topology: which ranks share a node. node: the shared.Comm of this node's ranks (local rank order = rank order), free
    for others' use between calls. sent_bytes, received_bytes: what this rank moved between nodes, without TCP's
    headers; zero on ranks that are not leaders."""

    def __init__(
        self,
        comm: shared.Comm,
        wire: Any | None,
        topology: Topology,
        rank: int,
        label: str,
        timeout: datetime.timedelta,
        store,
        who: Sequence[str],
        pids: Sequence[int],
    ) -> None:
        """By open_hierarchy. wire: None on ranks that lead no slice. who: every rank in words. pids: of this node's
        other ranks, as far as they can be watched."""
        self.rank, self.size, self.label, self.topology, self.node = rank, topology.size, label, topology, comm
        self.sent_bytes = self.received_bytes = 0
        self._wire, self._timeout, self._store, self._who = wire, timeout, store, who
        self._host, self._slice, self._local = (
            topology.node_of[rank],
            topology.local_of[rank],
            len(topology.nodes[topology.node_of[rank]]),
        )
        self._peers = [
            (self._host + k) % topology.count for k in range(1, topology.count)
        ]  # rotated: not all to node 0 first
        self._wire_fp32 = env.switch("DEEPC_WIRE_FP32")
        self._inline = max(1 << 10, min(_INLINE, (256 << 10) // topology.count))
        self._frame = -(-(_HEADER + self._inline + 16 * topology.count) // ALIGN) * ALIGN
        self._leads = self._slice < topology.leaders
        self._heads = (
            torch.zeros((topology.count + 1) * self._frame, dtype=torch.uint8) if self._leads else None
        )  # frames of large calls
        self._head, self._tag, self._note = b"", 0, ""
        self._jobs: dict[tuple, Job] = {}
        self._segment: shared.Segment | None = None
        self._base = self._slot_bytes = self._slot = self._seq = 0
        self._bytes: torch.Tensor | None = None
        self._lock = threading.RLock()
        self._broken: tuple[type[Exception], str] | None = None
        self._waiting = False
        self._dead = ""
        self._pidfds = Pids(pids)
        _watch(self)

    # ---- collectives -------------------------------------------------------------------------------------------------
    def barrier(self, tag: int = 0, note: str = "") -> None:
        """Returns when every rank has called it with the same tag. note: for messages."""
        self._run(_Call("barrier", f"barrier{note}", 0, 0, 0, 0, tag), lambda small: Plan([], [], [], 0, 0), 0, 0, 1)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", out: torch.Tensor | None = None, tag: int = 0) -> None:
        """out (default: tensor itself) = the reduction of `tensor` over the ranks. Equal shapes."""
        out = tensor if out is None else out
        red = self._reduction(tensor, op)
        self._sizes(out, tensor, 1, 1)
        count = tensor.numel()
        self._run(
            self._call("all_reduce", tensor, count, op, tag=tag),
            lambda small: plan_all_reduce(self.topology, count, small),
            tensor.data_ptr(),
            out.data_ptr(),
            red.unit,
            red,
        )

    def reduce(
        self, tensor: torch.Tensor, root: int, op: str = "sum", out: torch.Tensor | None = None, tag: int = 0
    ) -> None:
        """On group rank `root`: out (default: tensor itself) = the reduction of `tensor` over the ranks; elsewhere
        nothing is written."""
        out = tensor if out is None else out
        red = self._reduction(tensor, op)
        self._sizes(out, tensor, 1, 1)
        self._rooted(root)
        count = tensor.numel()
        self._run(
            self._call("reduce", tensor, count, op, root, tag),
            lambda small: plan_reduce(self.topology, self.rank, root, count, small),
            tensor.data_ptr(),
            out.data_ptr(),
            red.unit,
            red,
        )

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, op: str = "sum", tag: int = 0) -> None:
        """out[n] = slice `rank` of the reduction of tensor[size * n]. `out` may be that slice of `tensor`, no other
        part of it."""
        red = self._reduction(tensor, op)
        self._sizes(out, tensor, 1, self.size)
        count = out.numel()
        self._run(
            self._call("reduce_scatter", tensor, count, op, tag=tag),
            lambda small: plan_reduce_scatter(self.topology, self.rank, count, small),
            tensor.data_ptr(),
            out.data_ptr(),
            red.unit,
            red,
        )

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """out[size * n] = tensor[n] of every rank in rank order. `tensor` may be this rank's part of `out`."""
        shared._require(tensor, "tensor")
        self._sizes(out, tensor, self.size, 1)
        count = tensor.numel()
        self._run(
            self._call("all_gather", tensor, count),
            lambda small: plan_all_gather(self.topology, self.rank, count, small),
            tensor.data_ptr(),
            out.data_ptr(),
            tensor.element_size(),
        )

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """tensor of group rank `root` to all."""
        shared._require(tensor, "tensor")
        self._rooted(root)
        count = tensor.numel()
        self._run(
            self._call("broadcast", tensor, count, root=root),
            lambda small: plan_broadcast(self.topology, self.rank, root, count, small),
            tensor.data_ptr(),
            tensor.data_ptr(),
            tensor.element_size(),
        )

    def gather(self, out: torch.Tensor | None, tensor: torch.Tensor, root: int) -> None:
        """On group rank `root`: out[size * n] = tensor[n] of every rank in rank order; elsewhere `out` is None."""
        shared._require(tensor, "tensor")
        self._rooted(root)
        if self.rank == root:
            self._sizes(out, tensor, self.size, 1)
        count = tensor.numel()
        self._run(
            self._call("gather", tensor, count, root=root),
            lambda small: plan_gather(self.topology, self.rank, root, count, small),
            tensor.data_ptr(),
            0 if out is None else out.data_ptr(),
            tensor.element_size(),
        )

    def scatter(self, out: torch.Tensor, tensor: torch.Tensor | None, root: int) -> None:
        """out[n] = part `rank` of the tensor[size * n] of group rank `root`; elsewhere `tensor` is None."""
        shared._require(out, "out")
        self._rooted(root)
        if self.rank == root:
            shared._require(tensor, "tensor")
            self._sizes(out, tensor, 1, self.size)
        count = out.numel()
        self._run(
            self._call("scatter", out, count, root=root),
            lambda small: plan_scatter(self.topology, self.rank, root, count, small),
            0 if tensor is None else tensor.data_ptr(),
            out.data_ptr(),
            out.element_size(),
        )

    def all_to_all(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """Block j of out[size * n] = block `rank` of rank j's tensor[size * n]. The tensors don't overlap."""
        shared._require(tensor, "tensor")
        self._sizes(out, tensor, 1, 1)
        if tensor.numel() % self.size:
            raise ArgumentError(f"{tensor.numel()} elements can't be cut into {self.size} equal blocks")
        count = tensor.numel() // self.size
        longest = self.topology.most**2 * count
        self._run(
            self._call("all_to_all", tensor, count),
            lambda small: plan_all_to_all(self.topology, self.rank, lambda i, j: count, longest),
            tensor.data_ptr(),
            out.data_ptr(),
            tensor.element_size(),
        )

    def all_to_allv(
        self, out: torch.Tensor, out_counts: Sequence[int], tensor: torch.Tensor, in_counts: Sequence[int]
    ) -> None:
        """As all_to_all with blocks of any sizes: in_counts[j] elements of `tensor` go to rank j, out_counts[j] of
        `out` come from rank j, in rank order. The ranks exchange their counts first: MismatchError on all ranks where
        those of two ranks disagree.
        """
        shared._require(tensor, "tensor")
        shared._require(out, "out")
        if out.dtype != tensor.dtype:
            raise ArgumentError(f"out has dtype {out.dtype} and the input {tensor.dtype}; expected the same")
        for counts, t, what in ((in_counts, tensor, "the input"), (out_counts, out, "out")):
            if len(counts) != self.size or min(counts) < 0 or sum(counts) != t.numel():
                raise ArgumentError(
                    f"counts {list(counts)} don't fit {what} of {t.numel()} elements and {self.size} ranks"
                )
        with self._lock:
            mine = torch.tensor([*in_counts, *out_counts], dtype=torch.int64)
            everyone = torch.empty(self.size * 2 * self.size, dtype=torch.int64)
            self._run(
                self._call("all_to_allv", tensor, mine.numel()),
                lambda small: plan_all_gather(self.topology, self.rank, mine.numel(), small),
                mine.data_ptr(),
                everyone.data_ptr(),
                8,
            )
            table = everyone.view(self.size, 2, self.size).tolist()
            for i in range(self.size):
                for j in range(self.size):
                    if table[i][0][j] != table[j][1][i]:
                        raise self._break(
                            MismatchError(
                                f"group {self.label}: all_to_allv at {caller_line().decode(errors='replace')}:"
                                f" {self._who[i]} sends {table[i][0][j]} elements to {self._who[j]}, which expects"
                                f" {table[j][1][i]}"
                            ),
                            told=True,
                        )
            counts = [row[0] for row in table]
            longest = longest_pair(self.topology, lambda i, j: counts[i][j])
            self._run(
                self._call("all_to_allv", tensor, longest),
                lambda small: plan_all_to_all(self.topology, self.rank, lambda i, j: counts[i][j], longest),
                tensor.data_ptr(),
                out.data_ptr(),
                tensor.element_size(),
            )

    # ---- state -------------------------------------------------------------------------------------------------------
    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Of the calls that follow."""
        with self._lock:
            self._timeout = timeout
            self.node.set_timeout(timeout)

    def abort(self, reason: str) -> None:
        """Breaks the group on every rank; may be called from any thread."""
        self._break(AbortedError(f"group {self.label}: {self._who[self.rank]} aborted: {reason}"))

    def error(self) -> str:
        """ "" or what broke the group."""
        return self._broken[1] if self._broken else self.node.error()

    def close(self) -> None:
        """Leaves the group. Peers that still wait for this rank get RankDiedError. Not collective; a second close does
        nothing."""
        _watched.discard(self)
        with self._lock:
            wire, self._wire = self._wire, None
            self._segment = self._bytes = None
            if self._broken is None:
                self._broken = (ArgumentError, f"communicator {self.label} is closed")
            if wire is not None:
                wire.close()
            self.node.close()
            self._pidfds.close()

    # ---- arguments ---------------------------------------------------------------------------------------------------
    def _reduction(self, tensor: torch.Tensor, op: str) -> _Reduction:
        shared._require(tensor, "tensor")
        return _Reduction(tensor.dtype, op, self.size, self._wire_fp32)

    def _sizes(self, out: torch.Tensor, tensor: torch.Tensor, out_per: int, in_per: int) -> None:
        shared._require(out, "out")
        if out.dtype != tensor.dtype or out.numel() * in_per != tensor.numel() * out_per:
            raise ArgumentError(
                f"out has {out.numel()} elements of {out.dtype} and the input {tensor.numel()} of {tensor.dtype};"
                f" expected the same dtype and a ratio of {out_per} to {in_per} for {self.size} ranks"
            )

    def _rooted(self, root: int) -> None:
        if not 0 <= root < self.size:
            raise ArgumentError(f"root {root} is not a rank of group {self.label} of {self.size} ranks")

    def _call(self, name: str, tensor: torch.Tensor, count: int, op: str = "", root: int = -1, tag: int = 0) -> _Call:
        dtype = str(tensor.dtype)
        text = (
            f"{name}{' ' + op if op else ''} of"
            f" {dtype.removeprefix('torch.')}[{count}]{f' root {root}' if root >= 0 else ''}"
        )
        return _Call(name, text, shared.REDUCE_OPS.get(op, -1), root, count, zlib.crc32(dtype.encode()), tag)

    # ---- execution ---------------------------------------------------------------------------------------------------
    @observed
    def _run(
        self,
        c: _Call,
        plan_of: Callable[[bool], Plan],
        source: int,
        target: int,
        unit: int,
        red: _Reduction | None = None,
    ) -> None:
        """One collective: addresses of the input and the output of this rank, bytes per element."""
        with self._lock:
            self._usable()
            self._seq += 1
            try:
                job = self._job(c, plan_of, unit, red)
                self._head = _header(c, self._seq, caller_line(2))
                self._tag = zlib.crc32(self._head[: _FINGERPRINT.size])
                self._note = f" ({c.text} #{self._seq})"
                self._room(job.end)
                if job.small:
                    self._small(job, source, target)
                else:
                    self._large(job, source, target)
            except (WireError, CommError) as exc:
                raise self._break(exc) from None
            except BaseException as exc:
                self._break(exc)
                raise

    def _job(self, c: _Call, plan_of: Callable[[bool], Plan], unit: int, red: _Reduction | None) -> Job:
        """The call laid out; remembered, because a training loop makes the same calls over and over."""
        key = (c.name, c.text)
        job = self._jobs.get(key)
        if job is not None:
            return job
        plan = plan_of(False)
        part_unit = red.part_unit if red else unit
        if plan.inline * part_unit <= self._inline:
            plan = plan_of(True)
            per_round = -(-max([0, *(lane.count for lane in plan.lanes)]) // ALIGN) * ALIGN
            job = Job(
                plan, self._host, self._local, per_round, unit, part_unit, red, self._frames(), _HEADER, self._frame
            )
        else:
            most = max(_MIN_LANE, _ROUND // self.topology.count)
            lane_bytes = min(most, max(_MIN_LANE, plan.longest * part_unit // _ROUNDS))
            per_round = max(ALIGN, lane_bytes // part_unit // ALIGN * ALIGN)
            job = Job(plan, self._host, self._local, per_round, unit, part_unit, red, self._frames(), _HEADER, None)
        if c.name != "all_to_allv":  # its plan depends on all counts
            if len(self._jobs) >= 512:
                self._jobs.clear()
            self._jobs[key] = job
        return job

    def _usable(self) -> None:
        if self._broken is not None:
            kind, text = self._broken
            raise kind(text)

    def _next_slot(self) -> int:
        """Offset of the next round's slot."""
        self._slot += 1
        return self._slot % _SLOTS * self._slot_bytes

    def _room(self, nbytes: int) -> None:
        """Slots of at least `nbytes`. Collective in the node."""
        if nbytes <= self._slot_bytes:
            return
        total = (
            max(2 << 20, 1 << (nbytes * _SLOTS - 1).bit_length())
            if nbytes * _SLOTS < 16 << 20
            else -(-nbytes * _SLOTS >> 21) << 21
        )
        self._segment = self.node.segment(total)
        self._slot_bytes = total // _SLOTS // 4096 * 4096
        self._bytes = self._segment.tensor(torch.uint8, 0, total)
        self._base = self._bytes.data_ptr()

    def _frames(self) -> int:
        """Bytes at the start of a slot: a frame from and one to every node."""
        return (2 * self.topology.count * self._frame + ALIGN - 1) // ALIGN * ALIGN

    def _small(self, job: Job, source: int, target: int) -> None:
        """All data in the frames of the nodes' first leaders."""
        slot = self._next_slot()
        leads = self._slice == 0
        receives = [
            (peer, self._receive(peer, self._bytes, slot + peer * self._frame, self._frame, _FRAME_TAG))
            for peer in (self._peers if leads else ())
        ]
        self._put(job, 0, slot, source)
        self.node.barrier(self._tag, self._note)
        if leads:
            if job.red is not None:
                self._reduce_local(job, 0, slot, whole=True)
            sends = []
            for peer in self._peers:
                at = slot + (self.topology.count + peer) * self._frame
                sends.append((peer, self._send(peer, self._bytes, at, self._fill_frame(job, slot, peer), _FRAME_TAG)))
            self._check_frames(receives, self._bytes[slot:])
            for peer in self._peers:
                self.received_bytes += job.framed.get(peer, _HEADER)
            if job.red is not None:
                for k, lane in enumerate(job.plan.lanes):
                    if lane.home in (self._host, EVERY) and lane.count:
                        self._combine(job, k, slot, 0, lane.count)
            self._await_all(sends)
        self.node.barrier(self._tag, self._note)
        self._get(job, 0, slot, target)

    def _fill_frame(self, job: Job, slot: int, peer: int) -> int:
        """Header and data for `peer`. Returns its bytes."""
        start = self._base + slot + (self.topology.count + peer) * self._frame
        _write(start, self._head)
        at = _HEADER
        unit = job.part_unit
        for lane, area in zip(job.plan.lanes, job.areas):
            if self._host in lane.sources and lane.home in (peer, EVERY):
                nbytes = lane.count * unit
                if nbytes:
                    check(C.dc_copy(start + at, self._base + slot + area.part, nbytes))
                at += -(-nbytes // 16) * 16
        return at

    def _check_frames(self, receives: Sequence[tuple[int, Any]], frames: torch.Tensor) -> None:
        """Waits for the peers' frames (frame of node n at n * self._frame) and compares their fingerprints with this
        call's."""
        for peer, work in receives:
            self._await(work, peer)
            at = peer * self._frame
            other = frames[at : at + _HEADER].numpy().tobytes()
            if other[: _FINGERPRINT.size] != self._head[: _FINGERPRINT.size]:
                raise MismatchError(
                    f"group {self.label}: ranks called different collectives: {self._who[self.rank]}:"
                    f" {_told(self._head)}; {self._who[self._leader(peer)]}: {_told(other)}"
                )

    def _exchange_heads(self) -> tuple[list[tuple[int, Any]], list[tuple[int, Any]]]:
        """Starts the exchange of this call's header with the leaders of this slice. (receives, sends)"""
        own = self.topology.count * self._frame
        _write(self._heads.data_ptr() + own, self._head)
        receives = [
            (peer, self._receive(peer, self._heads, peer * self._frame, self._frame, _FRAME_TAG))
            for peer in self._peers
        ]
        self.received_bytes += _HEADER * len(receives)
        return receives, [(peer, self._send(peer, self._heads, own, _HEADER, _FRAME_TAG)) for peer in self._peers]

    def _large(self, job: Job, source: int, target: int) -> None:
        slots = [self._next_slot() for _ in range(job.rounds)]
        rounds: list[_Round] = []
        receives, sends = self._exchange_heads() if self._leads else ([], [])

        def receive_until(end: int) -> None:
            """No peer sends before it has found our header equal to its own: what comes fits."""
            while len(rounds) < min(end, job.rounds):
                rounds.append(self._post_receives(job, len(rounds), slots[len(rounds)]))

        if self._leads:
            receive_until(_AHEAD)
        for t in range(job.rounds + _FINISH):
            if t < job.rounds:
                self._put(job, t, slots[t], source)
                self.node.barrier(self._tag, self._note)
                if job.red is not None and self._reduce_local(job, t, slots[t]):
                    self.node.barrier(self._tag, self._note)
                if self._leads:
                    if t == 0:
                        self._check_frames(receives, self._heads)
                    receive_until(t + _AHEAD + 1)
                    self._post_first(job, t, slots[t], rounds[t])
            passed, done = t - _PASS, t - _FINISH
            if self._leads and 0 <= passed < job.rounds:
                self._pass_on(job, passed, slots[passed], rounds[passed])
            if done >= 0:
                if self._leads:
                    self._await_all(rounds[done].second)
                    self._await_all(rounds[done].sends)
                self.node.barrier(self._tag, self._note)
                self._get(job, done, slots[done], target)
        self._await_all(sends)

    # ---- steps of a round --------------------------------------------------------------------------------------------
    def _put(self, job: Job, t: int, slot: int, source: int) -> None:
        for lane in job.puts:
            area = job.areas[lane]
            at = self._base + slot + (area.inputs[self._slice] if job.red else area.result)
            for into, offset, count in job.pieces(job.puts, lane, t):
                check(C.dc_copy(at + into * job.unit, source + offset * job.unit, count * job.unit))

    def _get(self, job: Job, t: int, slot: int, target: int) -> None:
        for lane in job.gets:
            at = self._base + slot + job.areas[lane].result
            for into, offset, count in job.pieces(job.gets, lane, t):
                check(C.dc_copy(target + offset * job.unit, at + into * job.unit, count * job.unit))

    def _parts(self, job: Job, count: int) -> int:
        """Leaders that share `count` elements."""
        return max(1, min(self.topology.leaders, count * job.unit // _MIN_SLICE))

    def _slice_of(self, job: Job, count: int) -> tuple[int, int]:
        """(first, end) element of `count` that this leader carries."""
        parts = self._parts(job, count)
        return (0, 0) if self._slice >= parts else (cut(count, parts, self._slice), cut(count, parts, self._slice + 1))

    def _reduce_local(self, job: Job, t: int, slot: int, whole: bool = False) -> bool:
        """This rank's slice of the node's partial results (whole: all of it). True if a leader sends what others have
        reduced."""
        carried = False  # by a leader that has not reduced it itself
        for k, area in enumerate(job.areas):
            count = job.interval(k, t) if area is not None and area.inputs else 0
            if not count:
                continue
            if not whole:
                carried |= self._parts(job, count) != self._local
            low, high = (
                (0, count)
                if whole
                else (cut(count, self._local, self._slice), cut(count, self._local, self._slice + 1))
            )
            if low == high or (self._local == 1 and job.red.plain):  # one input is the part already
                continue
            here = self._base + slot
            job.red.local(
                here + area.part + low * job.part_unit, [here + i + low * job.unit for i in area.inputs], high - low
            )
        return carried

    def _combine(self, job: Job, lane: int, slot: int, low: int, high: int) -> None:
        area, unit, here = job.areas[lane], job.part_unit, self._base + slot
        sources = job.plan.lanes[lane].sources
        parts = [here + (area.part if s == self._host else area.parts[s]) + low * unit for s in sources]
        job.red.across(here + area.result + low * job.unit, parts, sources.index(self._host), high - low)

    def _post_receives(self, job: Job, t: int, slot: int) -> _Round:
        out = _Round({}, [], [])
        for k, lane in enumerate(job.plan.lanes):
            low, high = self._slice_of(job, job.interval(k, t))
            if low == high:
                continue
            area = job.areas[k]
            if lane.home == self._host:
                unit = job.part_unit
                for s in lane.sources:
                    if s != self._host:
                        at = area.parts[s] if job.red else area.result
                        out.first[k, s] = self._receive(
                            s, self._bytes, slot + at + low * unit, (high - low) * unit, _FIRST_TAG
                        )
            elif self._host in lane.dests:
                at = slot + area.result + low * job.unit
                out.second.append(
                    (lane.home, self._receive(lane.home, self._bytes, at, (high - low) * job.unit, _SECOND_TAG))
                )
        return out

    def _post_first(self, job: Job, t: int, slot: int, r: _Round) -> None:
        """Phase 1: this node's part of the lanes that another node is home of; and what needs nobody else's part."""
        unit = job.part_unit
        lanes = job.plan.lanes
        for k in sorted(range(len(lanes)), key=lambda k: (lanes[k].home - self._host) % self.topology.count):
            lane, (low, high) = lanes[k], self._slice_of(job, job.interval(k, t))
            if low == high or self._host not in lane.sources:
                continue
            if lane.home != self._host:
                at = slot + job.areas[k].part + low * unit
                r.sends.append((lane.home, self._send(lane.home, self._bytes, at, (high - low) * unit, _FIRST_TAG)))
            elif not job.red:
                self._send_to_dests(job, k, slot, low, high, r)

    def _pass_on(self, job: Job, t: int, slot: int, r: _Round) -> None:
        """Phase 2: lanes that this node is home of, when all parts are here."""
        for k, lane in enumerate(job.plan.lanes):
            low, high = self._slice_of(job, job.interval(k, t))
            if lane.home != self._host or low == high:
                continue
            for s in lane.sources:
                if s != self._host:
                    self._await(r.first[k, s], s)
            if job.red:
                self._combine(job, k, slot, low, high)
                self._send_to_dests(job, k, slot, low, high, r)
            elif self._host not in lane.sources:
                self._send_to_dests(job, k, slot, low, high, r)

    def _send_to_dests(self, job: Job, lane: int, slot: int, low: int, high: int, r: _Round) -> None:
        dests, at = job.plan.lanes[lane].dests, slot + job.areas[lane].result + low * job.unit
        for peer in self._peers:
            if peer in dests:
                r.sends.append((peer, self._send(peer, self._bytes, at, (high - low) * job.unit, _SECOND_TAG)))

    # ---- the wire ----------------------------------------------------------------------------------------------------
    def _leader(self, peer: int) -> int:
        """Rank that this rank talks to on node `peer`."""
        return self.topology.nodes[peer][self._slice]

    def _send(self, peer: int, memory: torch.Tensor, offset: int, nbytes: int, tag: int) -> Any:
        self.sent_bytes += nbytes
        try:
            return self._wire.send(memory.narrow(0, offset, nbytes), peer, tag)
        except RuntimeError as exc:
            raise WireError(peer, self._slice, str(exc)) from None

    def _receive(self, peer: int, memory: torch.Tensor, offset: int, nbytes: int, tag: int) -> Any:
        if tag != _FRAME_TAG:
            self.received_bytes += nbytes
        try:
            return self._wire.recv(memory.narrow(0, offset, nbytes), peer, tag)
        except RuntimeError as exc:
            raise WireError(peer, self._slice, str(exc)) from None

    def _await(self, work: Any, peer: int) -> None:
        self._waiting = True
        try:
            work.wait(self._timeout)
        except RuntimeError as exc:
            raise WireError(peer, self._slice, str(exc)) from None
        finally:
            self._waiting = False

    def _await_all(self, works: Sequence[tuple[int, Any]]) -> None:
        for peer, work in works:
            self._await(work, peer)

    # ---- failures ----------------------------------------------------------------------------------------------------
    def look(self) -> None:
        """By the watching thread: ends a wait for the wire when this node's communicator is broken or a local peer is
        gone."""
        if not self._waiting:
            return
        pid = self._pidfds.ended()
        if pid is not None:
            names = [self._who[r] for r in self.topology.nodes[self._host] if f"(pid {pid} " in self._who[r]]
            whom = names[0] if names else f"pid {pid}"
            self._dead = f"group {self.label}: {whom} died while {self._who[self.rank]} was in {_told(self._head)}"
        found = (RankDiedError, self._dead) if self._dead else self._node_failure()
        if found is not None and self._waiting:
            self._publish(*found)  # before the connections close: peers then look for it
            self._wire.abort()

    def _node_failure(self) -> tuple[type[Exception], str] | None:
        """What broke the node's communicator, if it is broken."""
        told = self.node.error()
        found = self._learned(told) if told else None
        if told and found is None:
            try:
                self.node.barrier()  # raises what broke it
            except CommError as broken:
                found = type(broken), _PLACE.sub("", str(broken))
        return found

    def _break(self, exc: BaseException, told: bool = False) -> BaseException:
        """Marks the group broken by `exc`, here and everywhere (told: all ranks know). Returns what to raise."""
        if self._broken is not None:
            return self._broken[0](self._broken[1])
        learned = (
            self._cause(exc)
            if isinstance(exc, WireError)
            else self._learned(str(exc))
            if isinstance(exc, AbortedError)
            else None
        )
        if learned is None and isinstance(exc, (CommError, errors.OutOfMemoryError)):
            learned = (type(exc), _PLACE.sub("", str(exc)))
        if learned is None:
            learned = (
                AbortedError,
                f"group {self.label}: {self._who[self.rank]} left a collective with {type(exc).__name__}: {exc}",
            )
            raised: BaseException = exc
        else:
            raised = learned[0](learned[1])
        self._broken = learned
        if not told:
            self._publish(*learned)
        try:
            self.node.abort(f"[{learned[0].__name__}] {learned[1]}")
        except errors.DeepcError:
            pass  # closed
        if self._wire is not None:
            self._wire.abort()
        return raised

    def _cause(self, exc: WireError) -> tuple[type[Exception], str]:
        """Why a wait for the wire failed: what this node knows, what somebody wrote to the store, what the engine
        said."""
        if self._dead:
            return RankDiedError, self._dead
        found = self._node_failure()
        if found is not None:
            return found
        closed = re.search("closed|reset|refused|broken pipe|EOF", exc.said, re.IGNORECASE) is not None
        record = within(1.0, lambda: self._record(0.05 if closed else 0.0))
        if record:
            name, text = json.loads(record)
            return getattr(errors, name, CommError), text
        peer, doing = (
            self._who[self.topology.nodes[exc.peer][exc.slice]],
            f"while {self._who[self.rank]} was in {_told(self._head)}",
        )
        if "imed out" in exc.said or "timeout" in exc.said:
            return (
                CommTimeoutError,
                (
                    f"group {self.label}: no word from {peer} within {self._timeout.total_seconds():g} s {doing}. It, "
                    f"or a rank of its node, has not joined that call. ({shortened(exc.said)})"
                ),
            )
        if closed:
            return (
                RankDiedError,
                (
                    f"group {self.label}: {peer} died or left the group: its connection closed {doing} "
                    f"({shortened(exc.said)})"
                ),
            )
        return CommError, f"group {self.label}: the connection to {peer} failed {doing}: {shortened(exc.said)}"

    def _record(self, grace_s: float) -> bytes | None:
        """What somebody wrote to the store. grace_s: to wait for it, because the kernel closes a dead process's
        connections before its node has noticed."""
        end = time.monotonic() + grace_s
        while not self._store.check(["error"]):
            if time.monotonic() >= end:
                return None
            time.sleep(0.005)
        return self._store.get("error")

    @staticmethod
    def _learned(text: str) -> tuple[type[Exception], str] | None:
        """The error of another rank of the node, from the reason that it aborted the node's communicator with."""
        found = re.search(r"\[(\w+Error)\] (.*)", text, re.DOTALL)
        return (getattr(errors, found[1], CommError), _PLACE.sub("", found[2])) if found else None

    def _publish(self, kind: type[Exception], text: str) -> None:
        """The first one's reason stays."""
        within(1.0, lambda: self._store.compare_set("error", "", json.dumps([kind.__name__, text])))


def _write(address: int, data: bytes) -> None:
    ctypes.memmove(address, data, len(data))


_watched: weakref.WeakSet[Hierarchy] = weakref.WeakSet()
_watcher: tuple[int, threading.Thread] | None = None  # (pid, thread): a forked child starts its own


def _watch(group: Hierarchy) -> None:
    global _watcher
    if group._wire is None or group.topology.count < 2:
        return
    _watched.add(group)
    if _watcher is None or _watcher[0] != os.getpid():
        thread = threading.Thread(target=_look_after, name="deepc-watch", daemon=True)
        _watcher = (os.getpid(), thread)
        thread.start()


def _look_after() -> None:
    while True:
        time.sleep(0.05)
        for group in list(_watched):
            try:
                group.look()
            except Exception:  # closed meanwhile
                pass


# ---- opening ---------------------------------------------------------------------------------------------------------
def open_hierarchy(
    store,
    rank: int,
    size: int,
    *,
    label: str,
    timeout: datetime.timedelta,
    global_ranks: Sequence[int] | None = None,
    gloo: Callable[..., Any] | None = None,
    staging: tuple[int, int] = _NODE_STAGING,
    places: Places | None = None,
) -> Hierarchy:
    """Opens a group of `size` ranks on any number of nodes. Collective.

    store: a torch.distributed store that is this group's own (use a PrefixStore); it must live as long as the group,
    because reasons of failures travel through it. timeout: of joining and of every wait. global_ranks: names of the
    ranks in messages. gloo: what makes the engine between nodes, a class as GlooWire, which is the default (it uses the
    interface that Gloo does: GLOO_SOCKET_IFNAME). staging: slot bytes and slots of the node's own communicator,
    Hierarchy.node. places: where the ranks lie, from a caller that has asked already."""
    import torch.distributed as dist

    places = discover(store, rank, size) if places is None else places
    topology = places.topology
    names = list(global_ranks or range(size))
    host, local = topology.node_of[rank], topology.local_of[rank]
    who = [places.in_words(r, names[r]) for r in range(size)]
    mine = topology.nodes[host]
    comm = shared.open_comm(
        dist.PrefixStore(f"node{host}/", store),
        local,
        len(mine),
        label=label,
        timeout=timeout,
        slot_bytes=staging[0],
        slots=staging[1],
        global_ranks=[names[r] for r in mine],
    )
    wire = None
    if topology.count > 1 and local < topology.leaders:
        try:
            wire = (gloo or GlooWire)(dist.PrefixStore(f"slice{local}/", store), host, topology.count, timeout)
        except RuntimeError as exc:
            comm.abort(f"[CommError] {who[rank]} can't reach the other nodes: {shortened(str(exc))}")
            comm.close()
            raise CommError(
                f"group {label}: {who[rank]} can't reach the other nodes: {shortened(str(exc))}. Is GLOO_SOCKET_IFNAME "
                "the interface between them?"
            ) from exc
    return Hierarchy(comm, wire, topology, rank, label, timeout, store, who, places.neighbours(rank))
