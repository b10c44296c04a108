"""The 1-bit all-reduce of 1-bit Adam (Tang et al., arXiv:2102.02888, section 4): an average over workers that sends the
sign of every element and one fp32 scale a block, with an error of the worker's and one of the server's.

    wire = OneBitAllReduce(momentum.numel(), group)
    wire.all_reduce_(momentum)                         # once a step

    worker i:   v_i = x_i + e_i,   sent: C(v_i),   e_i = v_i - C(v_i)
    server:     u = (1/N) sum_i C(v_i) + e,   sent: C(u),   e = u - C(u);   x = C(u) on every rank

N workers; each is the server of one slice. C is the codec OneBit (ops/ops.h): scale = mean |v| of the block.

A worker is a node: its ranks average exactly through shared memory, and each of them carries its own column of the
elements over the wire, to the ranks of its local index on the other nodes (link.py). hierarchical=False makes every
rank a worker, as in the paper and in DeepSpeed. One worker alone compresses too, twice, with both errors: training does
not change its character with the number of nodes.

x is cut into chunks, each a compressed all-reduce of its own: chunk t is packed while t - 1 is on its way to the
servers and t - 2 on its way back.

On a GPU x, the errors and all packing stay there, with the bits of the CPU: what crosses to the host and back are
payloads, and where a node has several ranks the fp32 numbers that they average."""

from __future__ import annotations

import contextlib
import datetime
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist

from ...errors import ArgumentError, MismatchError
from ...optim.codecs import OneBit
from ..failures import translated
from ..groups import MultiNodeGroup, NodeGroup, SoloGroup, own_store
from ..place import discover
from .hierarchy import open_hierarchy
from .link import Link

Group = Optional[dist.ProcessGroup]  # None: the default group  # noqa: UP045

ALIGN = 64  # elements: slices of a chunk begin at multiples of it
CHUNK = 4 << 20  # elements
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_AHEAD = 3  # chunks under way: packed, at the servers, on their way back
_STAGING = (512 << 10, 3)  # slot bytes, slots of the node's communicator
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


# ---- where the elements of a chunk go --------------------------------------------------------------------------------
class Span(NamedTuple):
    """Elements [begin, begin + length)."""

    begin: int
    length: int

    @property
    def slice(self) -> slice:
        return slice(self.begin, self.begin + self.length)


class Layout(NamedTuple):
    """A chunk of `length` elements, cut into `columns` columns (one per rank of a node that has a wire) of `workers`
    slices each (one per worker, whose server it is). Slices are `size` elements; the last ones shorter, or empty."""

    length: int
    columns: int
    workers: int

    @property
    def size(self) -> int:
        return -(-self.length // (self.columns * self.workers * ALIGN)) * ALIGN

    def column(self, k: int) -> Span:
        return self._span(k * self.workers * self.size, self.workers * self.size)

    def slice(self, k: int, worker: int) -> Span:
        """Within the chunk."""
        return self._span((k * self.workers + worker) * self.size, self.size)

    def _span(self, begin: int, length: int) -> Span:
        begin = min(self.length, begin)
        return Span(begin, min(self.length, begin + length) - begin)


class _Chunk(NamedTuple):
    at: Span  # of x
    layout: Layout
    worker: Span  # this rank's column, within its worker error
    server: Span  # this rank's slice, within its server error


# ---- what carries payloads -------------------------------------------------------------------------------------------
class _Nobody:
    """One worker: what it sends is what it gets."""

    on_host = False  # whether it carries the host's memory alone

    def exchange(self, out: torch.Tensor, send: torch.Tensor) -> Callable[[], None]:
        out.copy_(send)
        return _nothing

    collect = exchange


class _Ranks:
    """Every rank a worker: the collectives of a torch.distributed group."""

    def __init__(self, group: Group, rank: int, world: int, device: torch.device) -> None:
        self._group, self._rank, self._world = group, rank, world
        self.on_host = carrier_of(group, device).type == "cpu"

    def exchange(self, out: torch.Tensor, send: torch.Tensor) -> Callable[[], None]:
        with self._errors():
            return self._waiting(dist.all_to_all_single(out, send, group=self._group, async_op=True), out, send)

    def collect(self, out: torch.Tensor, send: torch.Tensor) -> Callable[[], None]:
        with self._errors():
            return self._waiting(_gather(out, send, group=self._group, async_op=True), out, send)

    def _waiting(self, work: Any, *tensors: torch.Tensor) -> Callable[[], None]:
        def wait(held: Sequence[torch.Tensor] = tensors) -> None:  # they live until they have been sent
            with self._errors():
                work.wait()

        return wait

    def _errors(self) -> contextlib.AbstractContextManager[None]:
        return translated("a 1-bit all_reduce", self._rank, self._world)


class _OverLink:
    """Messages to this rank's counterparts on the other nodes."""

    on_host = True
    link: Link

    def exchange(self, out: torch.Tensor, send: torch.Tensor) -> Callable[[], None]:
        return self._waiting(self.link.exchange(out, send), out, send)

    def collect(self, out: torch.Tensor, send: torch.Tensor) -> Callable[[], None]:
        return self._waiting(self.link.collect(out, send), out, send)

    def _waiting(self, work: Any, *tensors: torch.Tensor) -> Callable[[], None]:
        def wait(held: Sequence[torch.Tensor] = tensors) -> None:
            self.link.wait(work)

        return wait


class _Nodes(_OverLink):
    """A communicator of this node's ranks, and a link to their counterparts on the other nodes. One per group, for all
    OneBitAllReduce of it."""

    def __init__(self, ranks: Sequence[int], timeout: datetime.timedelta) -> None:
        """Collective over `ranks`, numbers in the default group."""
        names = list(ranks)
        label, store = own_store("onebit", names)
        self.rank, size = names.index(dist.get_rank()), len(names)
        places = discover(store, self.rank, size, what=f"group {label}")
        self.topology = places.topology
        self.node, self.local = self.topology.node_of[self.rank], self.topology.local_of[self.rank]
        self._opened = open_hierarchy(
            store, self.rank, size, label=label, timeout=timeout, global_ranks=names, staging=_STAGING, places=places
        )
        self.comm, self.link = self._opened.node, self._opened.link

    def close(self) -> None:
        self._opened.close()


class _Counterparts(_OverLink):
    """The ranks of this one's local index on the other nodes of an engine's group, which has the link to them."""

    def __init__(self, group: MultiNodeGroup) -> None:
        self.link = group.link


def _nothing() -> None:
    return None


_opened: weakref.WeakKeyDictionary[dist.ProcessGroup, _Nodes] = weakref.WeakKeyDictionary()


def _nodes_of(group: Group, timeout: datetime.timedelta) -> _Nodes:
    """Opened once per group; closed when the group is gone, or the process ends."""
    of = dist.group.WORLD if group is None else group
    assert of is not None
    found = _opened.get(of)
    if found is None or found.link.error():
        found = _opened[of] = _Nodes(dist.get_process_group_ranks(of), timeout)
        weakref.finalize(of, found.close)
    return found


def takes(group: Group, device: torch.device) -> bool:
    """Whether the group's collectives take tensors on such a device."""
    return device.type in {part.split(":")[0] for part in dist.get_backend_config(group).split(",")}


def carrier_of(group: Group, device: torch.device) -> torch.device:
    """Where the group's collectives get what is on `device`: in the host's memory, if they take that (Gloo, "deepc", a
    backend for each device), else where it is (NCCL alone)."""
    host = torch.device("cpu")
    return host if takes(group, host) else device


def grid_of(group: Group, hierarchical: bool, timeout: datetime.timedelta | None = None) -> tuple[int, int, int, bool]:
    """(workers, this rank's, columns, whether this rank carries one) of a OneBitAllReduce over a group of several
    ranks. Collective."""
    if not hierarchical:
        return dist.get_world_size(group), dist.get_rank(group), 1, True
    nodes = _nodes_of(group, timeout or dist.default_pg_timeout)
    return nodes.topology.count, nodes.node, nodes.topology.leaders, nodes.local < nodes.topology.leaders


# ---- the collective --------------------------------------------------------------------------------------------------
class OneBitAllReduce:
    """Averages of tensors of `numel` elements over a group, 1 bit an element across. See the module.

    Owns the errors: worker, fp32 [the elements that this rank packs], and server, fp32 [the elements whose server it
    is]; both lie on `device` and begin as zeros. sent_bytes: put on the wire by this rank so far; dense_bytes: what an
    uncompressed fp32 all-reduce between the same workers would have put there. One call at a time, in one order on all
    ranks; not from two threads."""

    def __init__(
        self,
        numel: int,
        group: Group = None,
        *,
        block: int = 2048,
        hierarchical: bool = True,
        mask: torch.Tensor | None = None,
        chunk: int = CHUNK,
        timeout: datetime.timedelta | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Collective over `group`, any torch.distributed group of CPU tensors or of those of `device` (None: the
        default one, or this process alone where there is none).

        block: elements of a scale, a multiple of 64 up to 2^20. hierarchical: a node is a worker; False: a rank is.
        mask [numel]: where it is 0 the result is 0, and nothing is owed (the momentum masks of DeepSpeed, for
        parameters whose gradient is always 0: 1 bit can't say 0). chunk: elements of a round, at least 64 per rank;
        part of the result. timeout: of waits between nodes; default torch.distributed's. device: of the tensors, the
        CPU or a GPU of CUDA.

        MismatchError on every rank where ranks pass different sizes, blocks, chunks or masks."""
        self.numel, self.codec, self.chunk, self.hierarchical = int(numel), OneBit(block), int(chunk), hierarchical
        if self.numel < 0:
            raise ArgumentError(f"numel={numel}: it is a number of elements")
        if self.chunk < block or self.chunk % block:
            raise ArgumentError(f"chunk={chunk}: it must be a multiple of the block of {block}")
        self.device = torch.empty(0, device=device, dtype=torch.float32).device  # with its index
        if self.device.type not in ("cpu", "cuda"):
            raise ArgumentError(f"OneBitAllReduce on {self.device}: tensors are on the CPU or on a GPU of CUDA")
        self._alone = not dist.is_initialized()
        self._rank, self._world = (0, 1) if self._alone else (dist.get_rank(group), dist.get_world_size(group))
        if self._rank < 0:
            raise ArgumentError("OneBitAllReduce: this process is no rank of the group")
        self._holes = self._inverted(mask)
        self._agree(group)
        self._node: _Nodes | None = None
        self._wire: _Nodes | _Ranks | _Nobody | _Counterparts = _Nobody()
        self.workers, self._columns, self._column, self._worker = 1, 1, 0, 0
        if self._world > 1 and hierarchical:
            nodes = _nodes_of(group, timeout or dist.default_pg_timeout)
            self._node, self.workers, self._columns = nodes, nodes.topology.count, nodes.topology.leaders
            self._column, self._worker = nodes.local, nodes.node
            if self.workers > 1:
                self._wire = nodes
        elif self._world > 1:
            self._wire = _Ranks(group, self._rank, self._world, self.device)
            self.workers, self._worker = self._world, self._rank
        self._lay_out()

    @property
    def _copies(self) -> bool:
        """Whether the host's memory is another than that of the tensors."""
        return self.device.type != "cpu"

    def _lay_out(self) -> None:
        """The rest of the constructor."""
        self._carries = self._column < self._columns  # others of this node take part in its average only
        self._apart = self._copies and (self._wire.on_host or self._node is not None)
        self._chunks = self._cut()
        last = self._chunks[-1] if self._chunks else None
        self._errors = {
            "worker": torch.zeros(last.worker.slice.stop if last else 0, device=self.device, dtype=torch.float32),
            "server": torch.zeros(last.server.slice.stop if last else 0, device=self.device, dtype=torch.float32),
        }
        self._buffers: dict[tuple[str, bool, int], torch.Tensor] = {}
        self.sent_bytes = self.dense_bytes = 0

    # ---- making it ---------------------------------------------------------------------------------------------------
    def _inverted(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        if mask is None:
            return None
        if mask.numel() != self.numel:
            raise ArgumentError(f"mask has {mask.numel()} elements; expected {self.numel}, one each")
        return (mask.detach().reshape(-1) == 0).to(self.device)

    def _agree(self, group: Group) -> None:
        """MismatchError on all ranks if their arguments differ."""
        if self._world == 1:
            return
        holes = 0 if self._holes is None else 1 + zlib.crc32(self._holes.cpu().numpy().tobytes())
        names = ("numel", "block", "chunk", "hierarchical", "mask")
        mine = torch.tensor(
            [self.numel, self.codec.block, self.chunk, int(self.hierarchical), holes],
            device=carrier_of(group, self.device),
            dtype=torch.int64,
        )
        rows = [torch.empty_like(mine) for _ in range(self._world)]
        dist.all_gather(rows, mine, group=group)
        for i, name in enumerate(names):
            said = [int(row[i]) for row in rows]
            if len(set(said)) > 1:
                told = "differs between ranks" if name == "mask" else f"by rank: {said}"
                raise MismatchError(f"OneBitAllReduce: {name} {told}; all ranks of the group pass the same")

    def _cut(self) -> list[_Chunk]:
        out: list[_Chunk] = []
        worker = server = 0
        for begin in range(0, self.numel, self.chunk):
            at = Span(begin, min(self.chunk, self.numel - begin))
            layout = Layout(at.length, self._columns, self.workers)
            w, s = (
                (layout.column(self._column).length, layout.slice(self._column, self._worker).length)
                if self._carries
                else (0, 0)
            )
            out.append(_Chunk(at, layout, Span(worker, w), Span(server, s)))
            worker, server = worker + w, server + s
        return out

    # ---- the call ----------------------------------------------------------------------------------------------------
    def all_reduce_(self, x: torch.Tensor) -> int:
        """x (contiguous, numel elements, fp32, bf16 or fp16 on `device`) = its compressed average over the workers, in
        place, with equal bits on all ranks of one dtype. Sums are made in fp32, in worker order. A NaN or an infinity
        makes its block arrive as NaN everywhere and leaves the errors of the block as they were. Returns the bytes that
        this rank put on the wire. Collective.

        ArgumentError for a tensor that does not fit, before anything is sent: ranks that had a good one then wait until
        this one leaves or the time is out. The errors of comm are raised on all ranks, and the group is broken then."""
        x = self._checked(x)
        before = self.sent_bytes
        with self._guard():
            count = len(self._chunks)
            arriving: dict[int, Callable[[], None]] = {}
            returning: dict[int, Callable[[], None]] = {}
            for t in range(count + _AHEAD - 1):
                if t < count:
                    arriving[t] = self._pack(t, x)
                if 0 <= t - 1 < count:
                    returning[t - 1] = self._serve(t - 1, arriving.pop(t - 1))
                if t - 2 >= 0:
                    self._unpack(t - 2, x, returning.pop(t - 2))
        return self.sent_bytes - before

    def _checked(self, x: torch.Tensor) -> torch.Tensor:
        fits = isinstance(x, torch.Tensor) and x.dtype in _FLOATS and x.device == self.device
        if not fits or x.numel() != self.numel:
            what = (
                f"{x.numel()} elements of {x.dtype} on {x.device}"
                if isinstance(x, torch.Tensor)
                else f"a {type(x).__name__}"
            )
            raise ArgumentError(
                f"1-bit all_reduce of {what}; expected {self.numel} elements of torch.float32, torch.bfloat16 or"
                f" torch.float16 on {self.device}"
            )
        if not x.is_contiguous():
            raise ArgumentError(f"1-bit all_reduce of a tensor of shape {tuple(x.shape)} that is not contiguous")
        return x.detach().view(-1)

    def _guard(self) -> contextlib.AbstractContextManager[None]:
        if self._node is None:
            return contextlib.nullcontext()
        return self._node.link.errors(f"a 1-bit all_reduce of {self.numel} elements")

    def _buffer(
        self, what: str, t: int, numel: int, dtype: torch.dtype = torch.uint8, host: bool = False
    ) -> torch.Tensor:
        """[numel] on the device, the same every _AHEAD chunks. host: in the host's memory, locked where a device copies
        from it, if what is carried lies apart; else the same as without."""
        key = (what, host and self._apart, t % _AHEAD)
        found = self._buffers.get(key)
        if found is None or found.numel() < numel or found.dtype != dtype:
            device = torch.device("cpu") if key[1] else self.device
            locked = key[1] and self.device.type == "cuda"
            found = self._buffers[key] = torch.zeros(numel, dtype=dtype, device=device, pin_memory=locked)
        return found[:numel]

    def _outside(self, what: str, t: int, mine: torch.Tensor) -> torch.Tensor:
        """What is carried in the place of a working buffer, which has what was carried once `_come` has taken it."""
        return self._buffer(what, t, mine.numel(), mine.dtype, host=True) if self._apart else mine

    def _gone(self, what: str, t: int, mine: torch.Tensor) -> torch.Tensor:
        """What is carried, with the values of a working buffer."""
        return self._outside(what, t, mine).copy_(mine) if self._apart else mine

    def _come(self, what: str, t: int, mine: torch.Tensor) -> torch.Tensor:
        """A working buffer, with what was carried in its place."""
        return mine.copy_(self._outside(what, t, mine)) if self._apart else mine

    def _payload(self, layout: Layout) -> int:
        """Bytes of a slice on the wire."""
        return self.codec.nbytes(min(layout.size, layout.length))

    def _pack(self, t: int, x: torch.Tensor) -> Callable[[], None]:
        """Averages chunk t in the node, packs this rank's column of it, and sends each slice to its server."""
        chunk = self._chunks[t]
        part = self._inside(t, x[chunk.at.slice])
        if not self._carries:
            return _nothing
        layout, size, error = chunk.layout, self._payload(chunk.layout), self._errors["worker"]
        begin = layout.column(self._column).begin
        send, got = (self._buffer(what, t, self.workers * size).view(self.workers, -1) for what in ("send", "got"))
        for n in range(self.workers):
            span = layout.slice(self._column, n)
            if span.length:
                within = Span(span.begin - begin, span.length)
                at = Span(chunk.worker.begin + within.begin, span.length)
                self.codec.encode(send[n, : self.codec.nbytes(span.length)], part[within.slice], error[at.slice])
        self._punch(error[chunk.worker.slice], chunk.at.begin + begin)
        self.sent_bytes += (self.workers - 1) * size
        self.dense_bytes += 2 * (self.workers - 1) * min(layout.size, layout.length) * 4
        return self._wire.exchange(self._outside("got", t, got.view(-1)), self._gone("send", t, send.view(-1)))

    def _inside(self, t: int, x: torch.Tensor) -> torch.Tensor:
        """What this rank's worker brings of its column: of a chunk x, holes punched. x itself where a worker is one
        rank."""
        chunk = self._chunks[t]
        span = chunk.layout.column(self._column) if self._carries else Span(0, 0)
        node = self._node
        if node is None or node.topology.most == 1:
            part = x[span.slice]
        else:
            local, even = node.comm.size, node.topology.even
            op, whole = ("avg", x) if even else ("sum", x)
            if self._apart:
                whole = self._buffer("wide", t, x.numel(), torch.float32, host=True).copy_(x)
            elif x.dtype != torch.float32:
                whole = self._buffer("wide", t, x.numel(), torch.float32)
                torch.ops.deepc.cast_tensor(x, whole, 1.0)
            if even and x.numel() == chunk.layout.columns * chunk.layout.column(0).length:
                part = self._buffer("part", t, x.numel() // local, torch.float32, host=True)
                node.comm.reduce_scatter(part, whole, op)
            else:
                total = self._buffer("total", t, x.numel(), torch.float32, host=True)
                node.comm.all_reduce(whole, op, out=total)
                part = total[span.slice]
            if not even:  # the average over ranks as one over nodes
                part.mul_(node.topology.count / node.topology.size)
            if self._apart:
                part = self._buffer("column", t, part.numel(), torch.float32).copy_(part)
        self._punch(part, chunk.at.begin + span.begin)
        return part

    def _serve(self, t: int, arrived: Callable[[], None]) -> Callable[[], None]:
        """As server of a slice of chunk t: averages what came, packs it, and sends it to all."""
        arrived()
        if not self._carries:
            return _nothing
        chunk = self._chunks[t]
        layout, size, error = chunk.layout, self._payload(chunk.layout), self._errors["server"][chunk.server.slice]
        got = self._come("got", t, self._buffer("got", t, self.workers * size)).view(self.workers, -1)
        mine, rows = self._buffer("mine", t, size), self._buffer("rows", t, self.workers * size)
        span = layout.slice(self._column, self._worker)
        if span.length:
            used, begin = self.codec.nbytes(span.length), chunk.at.begin + span.begin
            if self._holes is None:
                self.codec.average(mine[:used], got, error)
            else:
                total = self._buffer("served", 0, span.length, torch.float32)
                self.codec.decode(total, got[0, :used])
                for row in got[1:]:
                    self.codec.decode_add(total, row[:used])
                self._punch(total.mul_(1.0 / self.workers), begin)
                self.codec.encode(mine[:used], total, error)
                self._punch(error, begin)
        self.sent_bytes += (self.workers - 1) * size
        return self._wire.collect(self._outside("rows", t, rows), self._gone("mine", t, mine))

    def _unpack(self, t: int, x: torch.Tensor, returned: Callable[[], None]) -> None:
        """Chunk t of x = what the servers sent, which a node's ranks share."""
        returned()
        chunk = self._chunks[t]
        layout, size = chunk.layout, self._payload(chunk.layout)
        rows = self._buffer("rows", t, self.workers * size)
        node = self._node
        if node is not None and node.comm.size > 1:
            shared_rows = self._buffer("shared", t, node.comm.size * rows.numel())
            node.comm.all_gather(self._outside("shared", t, shared_rows), self._outside("rows", t, rows))
            rows = self._come("shared", t, shared_rows)
        else:
            rows = self._come("rows", t, rows)
        for k in range(layout.columns):
            for n in range(self.workers):
                span = layout.slice(k, n)
                if span.length:
                    at = (k * self.workers + n) * size
                    out = Span(chunk.at.begin + span.begin, span.length)
                    self.codec.decode(x[out.slice], rows[at : at + self.codec.nbytes(span.length)])
        self._punch(x[chunk.at.slice], chunk.at.begin)

    def _punch(self, part: torch.Tensor, begin: int) -> None:
        """Zeros in `part`, elements `begin` and on of x, where the mask has holes."""
        if self._holes is not None:
            part.masked_fill_(self._holes[begin : begin + part.numel()], 0.0)

    # ---- errors ------------------------------------------------------------------------------------------------------
    @property
    def errors(self) -> dict[str, torch.Tensor]:
        """ "worker", "server", fp32: of the elements that `owned` names. Borrowed."""
        return self._errors

    def reset(self) -> None:
        """Forgets what is owed."""
        for error in self._errors.values():
            error.zero_()

    def owed(self) -> torch.Tensor:
        """[numel], fp32, on `device`: what the averages of these calls still lack, as an input of this rank: its
        average over the ranks is all of it, so that it can be added to other tensors of the same elements."""
        out = torch.zeros(self.numel, device=self.device, dtype=torch.float32)
        shares = {"worker": self._world / self.workers, "server": float(self._world)}
        for name, spans in self.owned().items():
            parts = self._errors[name].split([end - begin for begin, end in spans]) if spans else ()
            for (begin, end), part in zip(spans, parts):
                out[begin:end].add_(part, alpha=shares[name])
        return out

    def state_dict(self) -> dict[str, Any]:
        """This rank's: {"key": what the errors belong to, "worker", "server": copies, fp32}. Tensors, numbers and
        strings; every rank saves its own."""
        return {"key": self._key(), **{name: error.clone() for name, error in self._errors.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The reverse, bit for bit. ArgumentError where the errors are of other elements or another rank: they can't be
        carried over to a layout that differs; start without them then."""
        mine, theirs = self._key(), dict(state["key"])
        differ = [k for k in mine if theirs.get(k) != mine[k]]
        if differ:
            told = ", ".join(f"{k} {theirs.get(k)} (here {mine[k]})" for k in differ)
            raise ArgumentError(f"errors of a 1-bit all_reduce of {told}: load each rank's own, or call reset()")
        for name, error in self._errors.items():
            if (t := state[name]).dtype != error.dtype or t.numel() != error.numel():
                raise ArgumentError(
                    f"errors of a 1-bit all_reduce: '{name}' is {t.dtype} of {t.numel()} elements; expected"
                    f" torch.float32 of {error.numel()}"
                )
        for name, error in self._errors.items():
            error.copy_(state[name].view(-1))

    def owned(self) -> dict[str, list[tuple[int, int]]]:
        """{"worker", "server"}: the elements [begin, end) of x that this rank's errors are of, in the order of the
        errors. What the average still lacks is the sum over ranks of worker / workers, and of server."""
        out: dict[str, list[tuple[int, int]]] = {"worker": [], "server": []}
        for c in self._chunks if self._carries else ():
            spans = c.layout.column(self._column), c.layout.slice(self._column, self._worker)
            for name, span in zip(out, spans):
                if span.length:
                    out[name].append((c.at.begin + span.begin, c.at.begin + span.slice.stop))
        return out

    def _key(self) -> dict[str, int]:
        return {
            "numel": self.numel,
            "block": self.codec.block,
            "chunk": self.chunk,
            "workers": self.workers,
            "worker": self._worker,
            "columns": self._columns,
            "column": self._column,
        }


class OneBitColumn(OneBitAllReduce):
    """The same between this rank and its counterparts on the other nodes alone: what a rank brings is a column of its
    own (the elements whose states it has, ZeRO's partition inside the node), averaged over its node already. Its errors
    are of `numel` elements and of its slice of them. One node: what is sent is what comes, as everywhere."""

    def __init__(
        self,
        numel: int,
        group: NodeGroup | MultiNodeGroup | SoloGroup,
        *,
        block: int = 2048,
        chunk: int = CHUNK,
        device: torch.device | str = "cpu",
    ) -> None:
        """group: an engine's of all ranks; its counterparts pass the same numbers. chunk: a multiple of `block`.
        device: see OneBitAllReduce."""
        self.numel, self.codec, self.chunk, self.hierarchical = int(numel), OneBit(block), int(chunk), True
        self.device = torch.empty(0, device=device, dtype=torch.float32).device
        self._rank, self._world, self._holes, self._node = group.rank, group.world, None, None
        self._alone = group.world == 1
        self._columns, self._column, self.workers, self._worker = 1, 0, group.nodes, group.node
        self._wire = _Nobody()
        if isinstance(group, MultiNodeGroup):
            self._wire = _Counterparts(group)
        self._lay_out()

    def _guard(self) -> contextlib.AbstractContextManager[None]:
        if not isinstance(self._wire, _Counterparts):
            return contextlib.nullcontext()
        return self._wire.link.errors(f"a 1-bit all_reduce of {self.numel} elements")
