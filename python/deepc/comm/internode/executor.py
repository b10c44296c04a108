"""The one executor of all collectives between nodes: a plan of lanes (lanes.py), small in one frame per peer, or large
in rounds.

Lanes are cut into rounds of at most 2 MiB. Round t is staged and reduced in the node while rounds before it are on the
wire: Gloo's thread moves bytes between sockets and the shared segment, without a copy of ours. A round's slot is used
again `_SLOTS` rounds later; because every round has barriers of the node, the one before says that nobody still reads
it.

Before data moves, leaders exchange a frame: the fingerprint of the call (operation, dtype, count, reduction, root, tag,
number of the call) and who calls. Small calls travel in that frame (up to `_INLINE` bytes per peer): one message each
way between the nodes' first leaders, and every node combines for itself. Large calls exchange frames while the first
round is staged. A frame is received into room for the longest one, because Gloo ends the process at a message longer
than its receive."""

from __future__ import annotations

import ctypes
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ...core.lib import C, check
from ...core.telemetry.caller import caller_line
from ...errors import CommError, MismatchError
from .. import shared
from ..calls import observed
from ..place import Topology
from .call import FINGERPRINT, HEADER, Call, Reduction, header, told
from .lanes import ALIGN, EVERY, Job, Plan, cut
from .link import Link, WireError

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
_FRAME_TAG, _FIRST_TAG, _SECOND_TAG = 1, 2, 3


class _Round(NamedTuple):
    first: dict[tuple[int, int], Any]  # (lane, source) -> receive of phase 1
    second: list[tuple[int, Any]]  # (node, receive of phase 2)
    sends: list[tuple[int, Any]]  # (node, send)


class Executor:
    """One rank's part in the collectives of a group over several nodes: stages in a shared segment of its node, and
    carries its slice over the link if it is a leader. Calls from several threads are serialised."""

    def __init__(self, comm: shared.Comm, link: Link, topology: Topology, rank: int) -> None:
        """comm: of this node's ranks (local rank order = rank order), free for others' use between calls."""
        self.rank, self.size, self.label, self.topology, self.node = rank, topology.size, link.label, topology, comm
        self.sent_bytes = self.received_bytes = 0
        self.link = link
        self._host, self._slice = topology.node_of[rank], topology.local_of[rank]
        self._local = len(topology.nodes[self._host])
        # rotated: not all to node 0 first
        self._peers = [(self._host + k) % topology.count for k in range(1, topology.count)]
        self._inline = max(1 << 10, min(_INLINE, (256 << 10) // topology.count))
        self._frame = -(-(HEADER + self._inline + 16 * topology.count) // ALIGN) * ALIGN
        self._leads = self._slice < topology.leaders
        # frames of large calls
        self._heads = torch.zeros(
            (topology.count + 1) * self._frame if self._leads else 0, dtype=torch.uint8, device="cpu"
        )
        self._head, self._tag, self._note = b"", 0, ""
        self._jobs: dict[tuple[str, str], Job] = {}
        self._segment: shared.Segment | None = None
        self._base = self._slot_bytes = self._slot = self._seq = 0
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._lock = threading.RLock()

    # ---- execution ---------------------------------------------------------------------------------------------------
    @observed
    def _run(
        self,
        c: Call,
        plan_of: Callable[[bool], Plan],
        source: int,
        target: int,
        unit: int,
        red: Reduction | None = None,
    ) -> None:
        """One collective: addresses of the input and the output of this rank, bytes per element."""
        with self._lock:
            self.link.usable()
            self._seq += 1
            try:
                job = self._job(c, plan_of, unit, red)
                self._head = header(c, self._seq, caller_line(2))
                self.link.doing = told(self._head)
                self._tag = zlib.crc32(self._head[: FINGERPRINT.size])
                self._note = f" ({c.text} #{self._seq})"
                self._room(job.end)
                if job.small:
                    self._small(job, source, target)
                else:
                    self._large(job, source, target)
            except (WireError, CommError) as exc:
                raise self.link.fail(exc) from None
            except BaseException as exc:
                self.link.fail(exc)
                raise

    def _job(self, c: Call, plan_of: Callable[[bool], Plan], unit: int, red: Reduction | None) -> Job:
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
                plan, self._host, self._local, per_round, unit, part_unit, red, self._frames(), HEADER, self._frame
            )
        else:
            most = max(_MIN_LANE, _ROUND // self.topology.count)
            lane_bytes = min(most, max(_MIN_LANE, plan.longest * part_unit // _ROUNDS))
            per_round = max(ALIGN, lane_bytes // part_unit // ALIGN * ALIGN)
            job = Job(plan, self._host, self._local, per_round, unit, part_unit, red, self._frames(), HEADER, None)
        if c.name != "all_to_allv":  # its plan depends on all counts
            if len(self._jobs) >= 512:
                self._jobs.clear()
            self._jobs[key] = job
        return job

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
                self._reduce_local(job, job.red, 0, slot, whole=True)
            sends = []
            for peer in self._peers:
                at = slot + (self.topology.count + peer) * self._frame
                sends.append((peer, self._send(peer, self._bytes, at, self._fill_frame(job, slot, peer), _FRAME_TAG)))
            self._check_frames(receives, self._bytes[slot:])
            for peer in self._peers:
                self.received_bytes += job.framed.get(peer, HEADER)
            if job.red is not None:
                for k, lane in enumerate(job.plan.lanes):
                    if lane.home in (self._host, EVERY) and lane.count:
                        self._combine(job, job.red, k, slot, 0, lane.count)
            self._wait_all(sends)
        self.node.barrier(self._tag, self._note)
        self._get(job, 0, slot, target)

    def _fill_frame(self, job: Job, slot: int, peer: int) -> int:
        """Header and data for `peer`. Returns its bytes."""
        start = self._base + slot + (self.topology.count + peer) * self._frame
        _write(start, self._head)
        at = HEADER
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
            self.link.wait(work, peer)
            at = peer * self._frame
            other = frames[at : at + HEADER].numpy().tobytes()
            if other[: FINGERPRINT.size] != self._head[: FINGERPRINT.size]:
                raise MismatchError(
                    f"group {self.label}: ranks called different collectives: {self.link.who[self.rank]}:"
                    f" {told(self._head)}; {self.link.who[self._leader(peer)]}: {told(other)}"
                )

    def _exchange_heads(self) -> tuple[list[tuple[int, Any]], list[tuple[int, Any]]]:
        """Starts the exchange of this call's header with the leaders of this slice. (receives, sends)"""
        own = self.topology.count * self._frame
        _write(self._heads.data_ptr() + own, self._head)
        receives = [
            (peer, self._receive(peer, self._heads, peer * self._frame, self._frame, _FRAME_TAG))
            for peer in self._peers
        ]
        self.received_bytes += HEADER * len(receives)
        return receives, [(peer, self._send(peer, self._heads, own, HEADER, _FRAME_TAG)) for peer in self._peers]

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
                if job.red is not None and self._reduce_local(job, job.red, t, slots[t]):
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
                    self._wait_all(rounds[done].second)
                    self._wait_all(rounds[done].sends)
                self.node.barrier(self._tag, self._note)
                self._get(job, done, slots[done], target)
        self._wait_all(sends)

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

    def _reduce_local(self, job: Job, red: Reduction, t: int, slot: int, whole: bool = False) -> bool:
        """This rank's slice of the node's partial results (whole: all of it). True if a leader sends what others have
        reduced."""
        carried = False  # by a leader that has not reduced it itself
        for k, area in enumerate(job.areas):
            count = job.interval(k, t) if area.inputs else 0
            if not count:
                continue
            if not whole:
                carried |= self._parts(job, count) != self._local
            low, high = (
                (0, count)
                if whole
                else (cut(count, self._local, self._slice), cut(count, self._local, self._slice + 1))
            )
            if low == high or (self._local == 1 and red.plain):  # one input is the part already
                continue
            here = self._base + slot
            red.local(
                here + area.part + low * job.part_unit, [here + i + low * job.unit for i in area.inputs], high - low
            )
        return carried

    def _combine(self, job: Job, red: Reduction, lane: int, slot: int, low: int, high: int) -> None:
        area, unit, here = job.areas[lane], job.part_unit, self._base + slot
        sources = job.plan.lanes[lane].sources
        parts = [here + (area.part if s == self._host else area.parts[s]) + low * unit for s in sources]
        red.across(here + area.result + low * job.unit, parts, sources.index(self._host), high - low)

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
                    self.link.wait(r.first[k, s], s)
            if job.red is not None:
                self._combine(job, job.red, k, slot, low, high)
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
        return self.link.send(memory.narrow(0, offset, nbytes), peer, tag)

    def _receive(self, peer: int, memory: torch.Tensor, offset: int, nbytes: int, tag: int) -> Any:
        if tag != _FRAME_TAG:
            self.received_bytes += nbytes
        return self.link.recv(memory.narrow(0, offset, nbytes), peer, tag)

    def _wait_all(self, works: Sequence[tuple[int, Any]]) -> None:
        for peer, work in works:
            self.link.wait(work, peer)


def _write(address: int, data: bytes) -> None:
    ctypes.memmove(address, data, len(data))
