"""The ranks that share one model: how they reach each other, and the few control messages the engine sends.

Four kinds, one interface: one rank; the ranks of one node over shared memory (the C core); CPU nodes with equally many
ranks each (shared memory inside, Gloo between the ranks of one local index); anything else over torch.distributed.

A rank's place: `node` (nodes are in the order of their lowest rank), `local_rank` (its place among its node's ranks),
`leader` (local_rank 0), and `part`, its place in the flat space's layout: local_rank * nodes + node, so that a node's
part of a bucket, and the parts of all ranks of one local index, are each one stretch."""

from __future__ import annotations

import contextlib
import datetime
import json
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Union

import torch
import torch.distributed as dist

from ..core.foreign import private
from ..core.telemetry import waits
from ..errors import CommError, MismatchError, UnsupportedError
from ..plan.plan import CONTROL_SLOT_BYTES
from .failures import is_closed, meaning, shortened, translated
from .internode.link import Link
from .place import Places, Topology, discover

if TYPE_CHECKING:
    from .internode.hierarchy import Hierarchy
    from .shared import Comm, Segment

_DYING_S = 1.0  # from when the kernel closes a dying process' connections to when it is dead
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


class _OneNode:
    """What a group without other nodes answers."""

    nodes, node = 1, 0
    rank: int
    world: int
    uneven = ""  # why this is no MultiNodeGroup, if that is because the nodes have different numbers of ranks

    @property
    def node_sizes(self) -> tuple[int, ...]:
        """Ranks of the group on each node."""
        return (self.world,)

    @property
    def sent_bytes(self) -> dict[str, int]:
        """Bytes that this rank sent to other nodes, by what they were."""
        return {}

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        raise NotImplementedError

    def part_of(self, rank: int) -> int:
        """The place of `rank` in the layout."""
        return rank

    def node_barrier(self) -> None:
        """Returns when every rank of this node has called it."""
        self.barrier()

    def spread(self, tensor: torch.Tensor, rank: int = 0) -> None:
        """Node-shared memory `tensor` (the same place on every node) of the node of `rank` to all other nodes. Fences
        are the caller's."""

    def carries(self, rank: int) -> bool:
        """Whether this rank stands for `rank` on its node: what `spread` of that rank's brings comes to it."""
        return rank == self.rank


class SoloGroup(_OneNode):
    """One rank."""

    transport: Literal["local"] = "local"
    leader = True

    def __init__(self) -> None:
        self.rank, self.world, self.ranks_per_node, self.local_rank = 0, 1, 1, 0

    def barrier(self) -> None:
        pass

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        pass

    def gather_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """[n] -> [world, n], rows in rank order. Also a barrier."""
        return tensor.unsqueeze(0)

    def close(self) -> None:
        pass


class NodeGroup(_OneNode):
    """The ranks of one node, over dc_comm. Owns its control communicator; buckets get one of their own (`open_comm`).
    names: the ranks in messages."""

    transport: Literal["node"] = "node"

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world: int,
        label: str,
        timeout: datetime.timedelta,
        names: list[int] | None = None,
        places: Places | None = None,
    ) -> None:
        """names: the ranks in messages. places: where they lie, from a caller that has asked already."""
        self.rank, self.world, self.ranks_per_node, self.local_rank, self.leader = rank, world, world, rank, rank == 0
        self._store, self._label, self._timeout, self._opened = store, label, timeout, 0
        self._places = places
        self.names = list(range(world)) if names is None else names
        self._comms: list[Comm] = []
        self._model: list[Comm] = []  # of other groups
        self._of = _default_group()
        self.comm = self.open_comm("control", CONTROL_SLOT_BYTES, 2)
        _open_groups.add(self)

    def is_of_now(self) -> bool:
        """Whether `names` are ranks of the default group that there is now: an engine that nobody has ended may be of
        an earlier one."""
        return self._of == _default_group()

    def open_comm(self, what: str, slot_bytes: int, slots: int) -> Comm:
        """A further communicator of the same ranks (collective). Closed with the group."""
        from . import shared

        self._opened += 1
        store = dist.PrefixStore(f"{self._label}/{what}/{self._opened}", self._store)
        comm = shared.open_comm(
            store,
            self.rank,
            self.world,
            label=f"{self._label}/{what}",
            timeout=self._timeout,
            slot_bytes=(slot_bytes + 4095) // 4096 * 4096,
            slots=slots,
            global_ranks=self.names,
            places=self._places,
        )
        if self._comms:  # one loop calls them all, so ranks that wait in different ones are told
            comm.relate(self._comms[0])
        self._comms.append(comm)
        depend([comm, *self._model])
        return comm

    def belong(self, model: Iterable[Comm]) -> None:
        """To a model whose other communicators these are."""
        self._model = [c for c in model if c not in self._comms]

    def close_comm(self, comm: Comm) -> None:
        """The end of one that `open_comm` made (collective)."""
        self.barrier()  # a peer that still waits in it would be told that this rank died
        self._comms.remove(comm)
        comm.close()

    def barrier(self) -> None:
        self.comm.barrier()

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        self.comm.broadcast(tensor, root)

    def gather_all(self, tensor: torch.Tensor) -> torch.Tensor:
        out = torch.empty(self.world * tensor.numel(), dtype=tensor.dtype, device="cpu")
        self.comm.all_gather(out, tensor)
        return out.view(self.world, tensor.numel())

    def segment(self, nbytes: int) -> Segment:
        """A shared segment (collective), see dc_segment_create."""
        return self.comm.segment(nbytes)

    def comms(self) -> list[Comm]:
        """All of them that are open."""
        return list(self._comms)

    def close(self) -> None:
        _open_groups.discard(self)
        comms, self._comms = self._comms, []
        for comm in comms:
            comm.close()


class Sent:
    """What is under way between nodes. wait() returns when it and what comes back have arrived; holds the tensors until
    then."""

    def __init__(self, link: Link, what: str, work: Any, *tensors: torch.Tensor) -> None:
        self._link, self._what, self._work, self._tensors = link, what, work, tensors

    def done(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> None:
        began = time.perf_counter()
        with self._link.errors(self._what):
            self._link.wait(self._work)
        self._tensors = ()
        waits.add("communication", time.perf_counter() - began)


class MultiNodeGroup:
    """CPU nodes with `ranks_per_node` ranks each: a NodeGroup inside each, and a link to the ranks of its local index
    on the other nodes. What crosses the network does so once per node."""

    transport: Literal["nodes"] = "nodes"
    uneven = ""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        places: Places,
        label: str,
        timeout: datetime.timedelta,
        names: Sequence[int],
    ) -> None:
        """names: the ranks in messages."""
        self._nodes = [list(ranks) for ranks in places.topology.nodes]  # the ranks of each node
        self.rank, self.nodes, self.ranks_per_node = rank, len(self._nodes), len(self._nodes[0])
        self.world = self.nodes * self.ranks_per_node
        # Each node's ranks are consecutive.
        self.in_order = [r for ranks in self._nodes for r in ranks] == list(range(self.world))
        self.node, self.local_rank = places.topology.node_of[rank], places.topology.local_of[rank]
        self.leader = self.local_rank == 0
        self.sent_bytes = {"gradients": 0, "parameters": 0, "control": 0}
        self._parts = {r: i * self.nodes + n for n, ranks in enumerate(self._nodes) for i, r in enumerate(ranks)}
        self.inside = NodeGroup(
            dist.PrefixStore(f"node{self.node}", store),
            self.local_rank,
            self.ranks_per_node,
            f"{label} on node {self.node}",
            timeout,
            [names[r] for r in self._nodes[self.node]],
            places.of(self._nodes[self.node]),
        )
        try:
            self.link = Link(places, rank, names, self.inside.comms, label=label, timeout=timeout, store=store)
        except BaseException:
            self.inside.close()
            raise

    @property
    def node_sizes(self) -> tuple[int, ...]:
        return (self.ranks_per_node,) * self.nodes

    def part_of(self, rank: int) -> int:
        return self._parts[rank]

    def ranks_of(self, node: int) -> list[int]:
        """Of a node, in the order of their local ranks."""
        return list(self._nodes[node])

    def open_comm(self, what: str, slot_bytes: int, slots: int) -> Comm:
        return self.inside.open_comm(what, slot_bytes, slots)

    def segment(self, nbytes: int) -> Segment:
        return self.inside.segment(nbytes)

    def errors(self) -> contextlib.AbstractContextManager[None]:
        """Around calls inside the node: if one fails, all nodes are told."""
        return self.link.errors("a call inside the node")

    def node_barrier(self) -> None:
        with self.errors():
            self.inside.barrier()

    def exchange(self, out: torch.Tensor, send: torch.Tensor, what: str) -> Sent:
        """Block n of send[nodes * k] goes to this rank's counterpart on node n, and block n of out comes from there.
        Returns at once."""
        self.sent_bytes[what] += send.numel() * send.element_size() // self.nodes * (self.nodes - 1)
        doing = f"an exchange of {what}"
        with self.link.errors(doing):
            return Sent(self.link, doing, self.link.exchange(out, send), out, send)

    def collect(self, out: torch.Tensor, mine: torch.Tensor, what: str) -> Sent:
        """out[nodes * k] = mine[k] of this rank's counterparts, in node order. `mine` does not lie in `out`. Returns at
        once."""
        self.sent_bytes[what] += mine.numel() * mine.element_size() * (self.nodes - 1)
        doing = f"a gather of {what}"
        with self.link.errors(doing):
            return Sent(self.link, doing, self.link.collect(out, mine), out, mine)

    def carries(self, rank: int) -> bool:
        return self._nodes[self._node_of(rank)].index(rank) == self.local_rank

    def spread(self, tensor: torch.Tensor, rank: int = 0) -> None:
        root = self._node_of(rank)
        if self._nodes[root].index(rank) != self.local_rank:
            return
        if self.node == root:
            self.sent_bytes["control"] += tensor.numel() * tensor.element_size() * (self.nodes - 1)
        with self.link.errors("a broadcast"):
            self.link.broadcast(tensor, root)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        self.spread(tensor, root)
        with self.errors():
            self.inside.broadcast(tensor, self._nodes[self._node_of(root)].index(root))

    def _node_of(self, rank: int) -> int:
        return next(n for n, ranks in enumerate(self._nodes) if rank in ranks)

    def barrier(self) -> None:
        self.node_barrier()
        if self.leader:
            with self.link.errors("a barrier"):
                self.link.barrier()
        self.node_barrier()

    def gather_all(self, tensor: torch.Tensor) -> torch.Tensor:
        n = tensor.numel()
        column = torch.empty(self.nodes * n, dtype=tensor.dtype, device="cpu")
        self.collect(column, tensor.contiguous().view(-1), "control").wait()
        with self.errors():
            rows = self.inside.gather_all(column).view(self.world, n)  # in the order of parts
        return rows[[self._parts[r] for r in range(self.world)]]

    def close(self) -> None:
        self.link.close()
        self.inside.close()


class TorchGroup(_OneNode):
    """Ranks on several nodes or GPUs, over torch.distributed's default group, or a group of `ranks` of it (then made
    collectively by these). ranks: None for all. places: where they lie."""

    transport: Literal["c10d"] = "c10d"

    def __init__(
        self,
        device: torch.device,
        uneven: str = "",
        ranks: Sequence[int] | None = None,
        timeout: datetime.timedelta | None = None,
        places: Topology | None = None,
    ) -> None:
        self.device, self.uneven, self.ranks = device, uneven, ranks
        self._group = None if ranks is None else new_group(ranks, timeout=timeout)
        self.rank, self.world = dist.get_rank(self._group), dist.get_world_size(self._group)
        self.ranks_per_node, self.local_rank, self.leader = 1, 0, True  # each shares memory with itself alone
        self._node_sizes = (1,) * self.world
        if places is not None:
            self.node, self._node_sizes = places.node_of[self.rank], tuple(map(len, places.nodes))
        # Called before every collective of the group (streamed.py: ranks may be at different gathers).
        self.before: Callable[[], None] = lambda: None

    def barrier(self) -> None:
        self.before()
        with self._errors("a barrier"):
            dist.barrier(self._group)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        self.before()
        with self._errors("a broadcast"):
            dist.broadcast(tensor, group=self._group, group_src=root)

    @property
    def node_sizes(self) -> tuple[int, ...]:
        return self._node_sizes

    def _errors(self, what: str) -> contextlib.AbstractContextManager[None]:
        return translated(f"{what} of the engine", self.rank, self.world)

    def gather_all(self, tensor: torch.Tensor) -> torch.Tensor:
        self.before()
        send = tensor.to(self.device)
        out = [torch.empty_like(send) for _ in range(self.world)]
        with self._errors("a gather"):
            dist.all_gather(out, send, group=self._group)
        return torch.stack(out).to(tensor.device)

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


def new_group(ranks: Sequence[int] | None, **given: Any) -> Any:
    """dist.new_group, collective over `ranks` alone."""
    return dist.new_group(None if ranks is None else list(ranks), use_local_synchronization=ranks is not None, **given)


# What `transport` tells apart.
Group = Union[SoloGroup, NodeGroup, MultiNodeGroup, TorchGroup]  # noqa: UP007
MemoryGroup = Union[NodeGroup, MultiNodeGroup]  # its ranks map the same pages  # noqa: UP007


def _default_group() -> weakref.ref[Any] | None:
    return weakref.ref(dist.group.WORLD) if dist.is_initialized() else None


_open_groups: weakref.WeakSet[NodeGroup] = weakref.WeakSet()


def leave_all() -> None:
    """At interpreter exit. A rank whose script has come to its end leaves its groups: others may still work among
    themselves, and must not take it for dead. One that ends by an error does not: they have to be told (`make_one`)."""
    if getattr(sys, "last_value", None) is None:
        for comm in [c for group in _open_groups for c in group.comms()]:
            if not comm.lock.locked():
                comm.close()


def swap(group: Group, row: torch.Tensor, counts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """All ranks send to all: counts[a][b] elements of rank a's 1-D `row`, which has them in the order of b, go to rank
    b. Returns what came from each rank. Collective: all pass the same counts."""
    rank = group.rank
    incoming = [mine[rank] for mine in counts]
    if isinstance(group, NodeGroup):
        out = torch.empty(sum(incoming), dtype=row.dtype, device="cpu")
        group.comm.all_to_allv(out, incoming, row, list(counts[rank]))
        return list(out.split(incoming))
    padded = torch.zeros(max(map(sum, counts)), dtype=row.dtype, device=row.device)
    padded[: row.numel()].copy_(row)
    rows = group.gather_all(padded.view(torch.uint8)).view(row.dtype)
    starts = [sum(mine[:rank]) for mine in counts]
    return [rows[a, at : at + n] for a, (at, n) in enumerate(zip(starts, incoming))]


def gather_texts(group: Group, text: str) -> list[str]:
    """Each rank's text. Collective."""
    mine = text.encode()
    sizes = group.gather_all(torch.tensor([len(mine)], dtype=torch.int64, device="cpu")).view(-1).tolist()
    padded = torch.frombuffer(bytearray(mine.ljust(max(sizes))), dtype=torch.uint8)
    return [bytes(row[:n].tolist()).decode() for row, n in zip(group.gather_all(padded), sizes)]


class _Wait(NamedTuple):
    """What a rank tells the others while it waits for one of them to open a group. of: the group's own store in that of
    the default group; place, rank: the one that is missing, in the group and in the default group."""

    what: str
    of: str
    place: int
    rank: int


class _Watch:
    """Over the ranks that one waits for while it opens a group: whether they can still come, as far as the groups that
    it has with them tell, or, where there are none, what they wait for themselves. names: the group's ranks in the
    default group; of: the group's own store in that of the default group."""

    def __init__(self, what: str, names: Sequence[int], of: str) -> None:
        self.what, self._names, self._of = what, names, of
        comms = [(g.comm, g.names) for g in _open_groups if g.is_of_now()]
        world: Comm | None = getattr(dist.group.WORLD, "live_comm", None)
        if world is not None:  # last: what broke an engine says more than how its rank ended then
            comms.append((world, list(range(world.size))))
        self._comms = [(c, names) for c, names in comms if c.is_sound]
        self._store = dist.PrefixStore("deepc/opens", private.default_store())
        self._told: _Wait | None = None
        self._stays = False  # what was told: the others of the circle are to see it
        self._tell(None)

    def __call__(self, rank: int) -> None:
        name = self._names[rank]
        shared = [(comm, names.index(name)) for comm, names in self._comms if name in names]
        for comm, place in shared:
            comm.waits(place, f"to open {self.what}: deepc.initialize() and zero.Init are for all ranks")
        if shared:
            return
        self._tell(_Wait(self.what, self._of, rank, name))
        if circle := self._circle():
            self._stays = True
            raise MismatchError(
                f"ranks wait for each other to open different groups, so none can be opened: {'; '.join(circle)}. All"
                " ranks must make the same calls in the same order. Does one rank alone make or load a model under"
                " zero.Init, or initialize an engine?"
            )

    def end(self) -> None:
        if not self._stays:
            self._tell(None)
        for comm, _ in self._comms:
            if comm.is_sound:
                comm.waits(-1, "")

    def _tell(self, wait: _Wait | None) -> None:
        key = str(dist.get_rank())
        if wait != self._told or (wait is None and self._store.check([key])):
            self._store.set(key, json.dumps(wait))
        self._told = wait

    def _circle(self) -> list[str]:
        """The waits of ranks of which each waits for the next one, and the last for this; empty: there is no such."""
        at, found = dist.get_rank(), list[str]()
        while len(found) < dist.get_world_size() and self._store.check([str(at)]):
            told = json.loads(self._store.get(str(at)))
            if told is None:
                break
            wait = _Wait(*told)
            if dist.PrefixStore(wait.of, private.default_store()).check([f"place{wait.place}"]):
                break  # it has come, and who waited for it has not said so yet
            found.append(f"rank {at} waits for rank {wait.rank} to open {wait.what}")
            at = wait.rank
            if at == dist.get_rank():
                return found
        return []


def depend(comms: Sequence[Comm]) -> None:
    """These are of one model: a wait in one of them ends with the ranks and the errors of all."""
    for comm in comms:
        for other in comms:
            comm.depend(other)


def _in_nodes(groups: Iterable[Group]) -> list[NodeGroup]:
    """What they have in this node, each once."""
    found = [g.inside if isinstance(g, MultiNodeGroup) else g for g in groups]
    return list(dict.fromkeys(g for g in found if isinstance(g, NodeGroup)))


def _default_comms() -> list[Comm | Hierarchy]:
    """The default group's communicator, if it is ours."""
    world: Comm | Hierarchy | None = getattr(dist.group.WORLD, "open_comm", None)
    return [] if world is None else [world]


def make_one(groups: Iterable[Group], comms: Iterable[Comm | Hierarchy]) -> None:
    """These groups, what they open later, these communicators and the default group are of one model (`depend`). A rank
    of this thread that waits in the default group, of a script's own calls, while others wait in these is told."""
    of_nodes = _in_nodes(groups)
    everything = [*(c for g in of_nodes for c in g.comms()), *(c.node for c in (*comms, *_default_comms()))]
    depend(everything)
    for group in of_nodes:
        group.belong(everything)
        for world in _default_comms():
            if world.node is world and group.names == list(range(world.size)):
                group.comms()[0].meet(world.node)


def end_with(
    groups: Iterable[Group], comms: Iterable[Comm | Hierarchy], error: BaseException, reason: str
) -> BaseException:
    """Breaks these groups, these communicators and the default group, so that nobody waits for a rank that does not
    come any more: with `error` as it is, if that came from a group, so that all are told what happened and not who was
    told first; else with an AbortedError of `reason`. Returns `error`, or what another node knows of its cause."""
    groups = list(groups)
    for link in (g.link for g in groups if isinstance(g, MultiNodeGroup)):
        if not isinstance(error, CommError):
            link.abort(reason)
        elif isinstance(told := link.fail(error), CommError):
            error = told
    for comm in (*comms, *_default_comms(), *(c for g in _in_nodes(groups) for c in g.comms())):
        if isinstance(error, CommError):
            comm.fail(error)
        else:
            comm.abort(reason)
    return error


def lost(group: Group, rank: int, doing: str, error: RuntimeError) -> BaseException:
    """What to raise for a message with `rank` of `group` that torch's backend carried and ended with `error`."""
    if isinstance(group, MultiNodeGroup):
        return group.link.lost(rank, doing, str(error))
    said = str(error)
    if isinstance(group, NodeGroup):
        end = time.monotonic() + (_DYING_S if is_closed(said) else 0.0)
        try:
            group.comm.waits(rank, f"in {doing}")
            while time.monotonic() < end:
                time.sleep(0.01)
                group.comm.waits(rank, f"in {doing}")
            group.comm.waits(-1, "")
        except CommError as found:
            return found
    return meaning(said)(f"rank {group.rank} was in {doing}: rank {rank} died, left or broke off ({shortened(said)})")


def own_store(label: str, ranks: Sequence[int] | None = None) -> tuple[str, dist.Store]:
    """(label with a number, a store for what these ranks of the default group make now; None: all). Collective: in one
    order on all of them."""
    name, prefix = _own_prefix(label, ranks)
    return name, dist.PrefixStore(prefix, private.default_store())


def _own_prefix(label: str, ranks: Sequence[int] | None) -> tuple[str, str]:
    """`own_store`'s label, and of its store in that of the default group."""
    common = private.default_store()
    of = "" if ranks is None else f" of ranks {', '.join(map(str, ranks))}"
    # counted in the store: it belongs to this default group, not to the process
    number = common.add(f"deepc/{label}{of}/made by {dist.get_rank()}", 1)
    name = f"{label}{number}"
    return name + _in_short(ranks), f"deepc/{name}{of}"


def _in_short(ranks: Sequence[int] | None) -> str:
    """Of a label, which the C core cuts."""
    if ranks is None:
        return ""
    return f" of ranks {', '.join(map(str, ranks))}" if len(ranks) < 5 else f" of ranks {ranks[0]} to {ranks[-1]}"


def open_group(
    device: torch.device,
    timeout: datetime.timedelta,
    label: str = "engine",
    ranks: Sequence[int] | None = None,
    uneven_parts: bool = False,
) -> Group:
    """The group of `ranks` of the default group (None: all) for one engine; a rank's number in it is its place among
    them. Collective over these: groups of the same ranks are made in the same order on every rank. UnsupportedError for
    a part of the ranks on GPUs, or (but with uneven_parts) on nodes with different numbers of them."""
    if not dist.is_initialized() or len(names := ranks or range(dist.get_world_size())) == 1:
        return SoloGroup()
    if device.type != "cpu" and ranks is not None:
        raise UnsupportedError(
            f"an engine of ranks {list(ranks)} of {dist.get_world_size()} on {device.type}: engines of a part of"
            " the ranks exist on CPUs; see docs/status.md"
        )
    rank, world = names.index(dist.get_rank()), len(names)
    label, prefix = _own_prefix(label, ranks)
    store = dist.PrefixStore(prefix, private.default_store())
    watch = _Watch(f"group {label}", names, prefix)
    try:
        found = discover(store, rank, world, watch, watch.what)
    finally:
        watch.end()
    places = found.topology
    if device.type != "cpu":
        return TorchGroup(device, places=places)
    if places.count == 1:
        return NodeGroup(store, rank, world, label, timeout, list(names), found)
    if places.even:
        return MultiNodeGroup(store, rank, found, label, timeout, names)
    uneven = "; ".join(
        f"node {name} has rank{'s' * (len(at) > 1)} {', '.join(str(names[r]) for r in at)}"
        for name, at in zip(places.names, places.nodes)
    )
    if ranks is not None and not uneven_parts:
        raise UnsupportedError(
            f"an engine of ranks {list(ranks)} of {dist.get_world_size()} needs nodes with equally many of them:"
            f" {uneven}"
        )
    return TorchGroup(device, uneven, ranks, timeout, places)
