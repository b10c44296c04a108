"""Plans of collectives between nodes: which element goes where. Pure data, no processes and no memory.

A lane is a row of elements that some nodes have (sources), one node combines or takes over (home), and others get from
there (dests). hierarchy.py says which lanes each collective has, and executes them; a Job is a plan laid out in the
slots of one node's shared segment.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..place import Topology

if TYPE_CHECKING:
    from .call import Reduction

EVERY = -1  # home of a lane that every node combines for itself
ALIGN = 64  # bytes, and elements where work is cut


class Lane(NamedTuple):
    sources: tuple[int, ...]  # nodes
    home: int  # node, or EVERY
    dests: tuple[int, ...]  # nodes
    count: int  # type: ignore[assignment]  # elements (hides tuple.count, which nobody calls)


class Run(NamedTuple):
    """`count` elements that lie at `at` of a lane and at `offset` of a rank's tensor."""

    lane: int
    at: int
    offset: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls


class Plan(NamedTuple):
    lanes: list[Lane]  # those that concern this rank's node
    puts: list[Run]  # this rank's input
    gets: list[Run]  # this rank's output
    longest: int  # elements of the longest lane of any node: all nodes cut alike
    inline: int  # elements that a node sends to a peer at most: small or not is decided alike


def _runs(found: Iterator[tuple[int, int, int, int]]) -> list[Run]:
    """Without empty ones, and adjacent ones joined."""
    out: list[Run] = []
    for lane, at, offset, count in found:
        last = out[-1] if out else None
        if last is not None and last.lane == lane and last.at + last.count == at and last.offset + last.count == offset:
            out[-1] = last._replace(count=last.count + count)
        elif count:
            out.append(Run(lane, at, offset, count))
    return out


def cut(count: int, parts: int, i: int) -> int:
    """Where part i of `parts` begins; i == parts: the end."""
    return count if i >= parts else min(count, (count * i // parts + ALIGN - 1) // ALIGN * ALIGN)


def plan_all_reduce(topology: Topology, count: int, small: bool) -> Plan:
    every = tuple(range(topology.count))
    if small:
        return _whole(Lane(every, EVERY, (), count), True, True)
    return _shares(topology, count, [Lane(every, n, topology.others(n), 0) for n in every], True, True)


def plan_reduce(topology: Topology, rank: int, root: int, count: int, small: bool) -> Plan:
    every, home = tuple(range(topology.count)), topology.node_of[root]
    if small:
        return _whole(Lane(every, home, (), count), True, rank == root)
    return _shares(
        topology, count, [Lane(every, n, () if n == home else (home,), 0) for n in every], True, rank == root
    )


def plan_broadcast(topology: Topology, rank: int, root: int, count: int, small: bool) -> Plan:
    home = topology.node_of[root]
    if small or topology.count == 1:
        return _whole(Lane((home,), EVERY, (), count), rank == root, rank != root)
    lanes = [Lane((home,), n, topology.others(home, n), 0) for n in topology.others(home)]
    return _shares(topology, count, lanes, rank == root, rank != root)


def _whole(lane: Lane, put: bool, get: bool) -> Plan:
    runs = _runs(iter([(0, 0, 0, lane.count)]))
    return Plan([lane], runs if put else [], runs if get else [], lane.count, lane.count)


def _shares(topology: Topology, count: int, lanes: list[Lane], put: bool, get: bool) -> Plan:
    """Lane k is share k of the tensor."""
    cuts = [cut(count, len(lanes), k) for k in range(len(lanes) + 1)]
    lanes = [lane._replace(count=cuts[k + 1] - cuts[k]) for k, lane in enumerate(lanes)]
    runs = _runs((k, 0, cuts[k], lane.count) for k, lane in enumerate(lanes))
    return Plan(lanes, runs if put else [], runs if get else [], max(lane.count for lane in lanes), count)


def _blocks(topology: Topology, count: int) -> Iterator[tuple[int, int, int, int]]:
    """Lane n is the blocks of node n's ranks; block r of `count` elements lies at r * count of the tensor."""
    return (
        (n, local * count, rank * count, count)
        for n, ranks in enumerate(topology.nodes)
        for local, rank in enumerate(ranks)
    )


def _own_block(topology: Topology, rank: int, count: int) -> list[Run]:
    return _runs(iter([(topology.node_of[rank], topology.local_of[rank] * count, 0, count)]))


def plan_reduce_scatter(topology: Topology, rank: int, count: int, small: bool) -> Plan:
    every = tuple(range(topology.count))
    lanes = [Lane(every, n, (), len(topology.nodes[n]) * count) for n in every]
    return Plan(
        lanes,
        _runs(_blocks(topology, count)),
        _own_block(topology, rank, count),
        topology.most * count,
        topology.most * count,
    )


def plan_all_gather(topology: Topology, rank: int, count: int, small: bool) -> Plan:
    lanes = [
        Lane((n,), EVERY if small else n, () if small else topology.others(n), len(topology.nodes[n]) * count)
        for n in range(topology.count)
    ]
    return Plan(
        lanes,
        _own_block(topology, rank, count),
        _runs(_blocks(topology, count)),
        topology.most * count,
        topology.most * count,
    )


def plan_gather(topology: Topology, rank: int, root: int, count: int, small: bool) -> Plan:
    lanes = [Lane((n,), topology.node_of[root], (), len(topology.nodes[n]) * count) for n in range(topology.count)]
    gets = _runs(_blocks(topology, count)) if rank == root else []
    return Plan(lanes, _own_block(topology, rank, count), gets, topology.most * count, topology.most * count)


def plan_scatter(topology: Topology, rank: int, root: int, count: int, small: bool) -> Plan:
    lanes = [Lane((topology.node_of[root],), n, (), len(topology.nodes[n]) * count) for n in range(topology.count)]
    puts = _runs(_blocks(topology, count)) if rank == root else []
    return Plan(lanes, puts, _own_block(topology, rank, count), topology.most * count, topology.most * count)


def plan_all_to_all(topology: Topology, rank: int, counts: Callable[[int, int], int], longest: int) -> Plan:
    """counts(i, j): elements from rank i to rank j. longest: of the lanes of all nodes."""
    me, nodes = topology.node_of[rank], topology.nodes
    lanes, puts, gets = [], [], []
    sent, got = [0], [0]
    for r in range(topology.size):
        sent.append(sent[-1] + counts(rank, r))
        got.append(got[-1] + counts(r, rank))
    pairs = [(s, d) for s in range(topology.count) for d in range(topology.count) if me in (s, d)]
    for k, (s, d) in enumerate(pairs):
        at = 0
        for i in nodes[s]:
            for j in nodes[d]:
                if i == rank:
                    puts.append((k, at, sent[j], counts(i, j)))
                if j == rank:
                    gets.append((k, at, got[i], counts(i, j)))
                at += counts(i, j)
        lanes.append(Lane((s,), d, (), at))
    return Plan(lanes, _runs(iter(puts)), _runs(iter(gets)), longest, longest)


def longest_pair(topology: Topology, counts: Callable[[int, int], int]) -> int:
    return max(sum(counts(i, j) for i in s for j in d) for s in topology.nodes for d in topology.nodes)


# ---- a plan in the slots of a node -----------------------------------------------------------------------------------
class Area(NamedTuple):
    """Where a lane's data lies in a slot of this node (offsets). Copied lanes have one place for all of it: `result`;
    lanes that don't concern the node have none (NOWHERE)."""

    inputs: list[int]  # per local rank (reductions)
    part: int  # this node's partial result
    parts: dict[int, int]  # per other source
    result: int


NOWHERE = Area([], -1, {}, -1)


class Job:
    """The plan of one call, laid out in this node's slots."""

    def __init__(
        self,
        plan: Plan,
        me: int,
        ranks: int,
        per_round: int,
        unit: int,
        part_unit: int,
        red: Reduction | None,
        first_byte: int,
        header: int,
        frame: int | None,
    ) -> None:
        """me, ranks: this node and how many ranks it has. per_round: elements of a lane in a round. unit, part_unit:
        bytes of an element and of a partial result. red: None or the reduction (all nodes are sources), kept for the
        executor. first_byte: where areas begin in a slot. frame: bytes between the received frames of two nodes, which
        then hold the data of other sources behind `header` bytes; None: they get areas."""
        self.plan, self.unit, self.part_unit, self.red, self.per_round = plan, unit, part_unit, red, per_round
        self.small, self._header = frame is not None, header
        self.rounds = max([1, *(-(-lane.count // per_round) for lane in plan.lanes)]) if per_round else 1
        self.puts, self.gets = _by_lane(plan.puts), _by_lane(plan.gets)
        self.end = first_byte
        self.areas: list[Area] = []
        self.framed: dict[int, int] = {}  # per other source: bytes of its frame that are laid out
        for lane in plan.lanes:
            home, source = lane.home in (me, EVERY), me in lane.sources
            if not home and not source and me not in lane.dests:
                self.areas.append(NOWHERE)
                continue
            parts: dict[int, int] = {}
            if red is None:
                result = (
                    self._framed(lane, lane.sources[0], unit, frame)
                    if frame and home and not source
                    else self._take(unit)
                )
                self.areas.append(Area([], result, parts, result))
                continue
            # One place for the first input, the node's part and the result, if they are of one width: each is written
            # after the one before was read, slice by slice (a result arrives only after its home has received this
            # node's part).
            inputs = [self._take(unit) for _ in range(ranks)]
            part = inputs[0] if part_unit == unit else self._take(part_unit)
            if home:
                parts = {
                    s: self._framed(lane, s, part_unit, frame) if frame else self._take(part_unit)
                    for s in lane.sources
                    if s != me
                }
            self.areas.append(Area(inputs, part, parts, inputs[0]))

    def _take(self, unit: int) -> int:
        at = self.end
        self.end += (self.per_round * unit + ALIGN - 1) // ALIGN * ALIGN
        return at

    def _framed(self, lane: Lane, source: int, unit: int, frame: int) -> int:
        at = self.framed.get(source, self._header)
        self.framed[source] = at + -(-lane.count * unit // 16) * 16
        return source * frame + at

    def interval(self, lane: int, t: int) -> int:
        """Elements of a lane in round t."""
        return max(0, min(self.per_round, self.plan.lanes[lane].count - t * self.per_round))

    def pieces(self, of: dict[int, tuple[list[int], list[Run]]], lane: int, t: int) -> Iterator[tuple[int, int, int]]:
        """(elements into the round, elements into the tensor, elements) of a rank's runs."""
        found = of.get(lane)
        if found is None:
            return
        low = t * self.per_round
        high = low + self.interval(lane, t)
        starts, runs = found
        for run in runs[max(0, bisect_right(starts, low) - 1) :]:
            if run.at >= high:
                return
            begin, end = max(run.at, low), min(run.at + run.count, high)
            if begin < end:
                yield begin - low, run.offset + begin - run.at, end - begin


def _by_lane(runs: Sequence[Run]) -> dict[int, tuple[list[int], list[Run]]]:
    out: dict[int, tuple[list[int], list[Run]]] = {}
    for run in sorted(runs):
        starts, found = out.setdefault(run.lane, ([], []))
        starts.append(run.at)
        found.append(run)
    return out
