"""What parameters are gathered from: the memory of the node (`NodeSource`), or all ranks' parts over torch.distributed
(`CollectiveSource`); and the groups of our own on which parts travel (`Exchange`), those of zero.Init as well.

A round of CollectiveSource is a message of 128 bytes per rank, in which every rank says what it wants and how many
gradient buckets it has ready; then all give their part of everything that any rank wants. Before any other collective
of the engine a rank takes part in rounds until all ranks are there (`fence`). So a rank that uses another expert, or
leaves out a block, costs time and no deadlock. What users send on their groups meanwhile does not meet ours."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist

from ..comm import start as comm
from ..comm.failures import Breaker, break_pairs
from ..comm.groups import _all_gather, new_group, own_store
from ..core import memory
from ..core.lib import C, check
from ..plan.layout import ALIGN
from .parameters.param import FlatUnit


class Piece(NamedTuple):
    """[begin, begin + length) of a parameter lies on `rank`; mine: those values if this rank can read them, 1-D, in the
    parameter's dtype."""

    rank: int
    begin: int
    length: int
    mine: torch.Tensor | None


class Reductions(Protocol):
    """What reduces gradients meanwhile."""

    def ready(self) -> int:
        """Buckets since the start that this rank has all gradients of; never falls."""

    def agreed(self, least: int) -> None:
        """The smallest `ready` of all ranks in the round that ends."""


class Source(Protocol):
    """Where units are gathered from."""

    def add(self, unit: FlatUnit, pieces: Sequence[Sequence[Piece]]) -> None:
        """pieces: per parameter of the unit, where its values lie. Units come in the order of their index."""

    def places(self, params: Sequence[torch.nn.Parameter]) -> list[int] | None:
        """Elements: where the values of each begin in what is read a page at a time; None: nowhere."""

    def begin(self, units: Sequence[FlatUnit]) -> None:
        """Starts to fill the storages of units."""

    def complete(self, unit: FlatUnit) -> None:
        """Returns when the unit's storage is filled."""

    def drop(self, unit: FlatUnit) -> None:
        """Instead of `complete`, where nobody wants the values any more: they may have changed since `begin`. Returns
        when nothing writes to the unit's storage."""

    def read(self, unit: FlatUnit, i: int) -> torch.Tensor | None:
        """[numel] the value of the unit's parameter i without gathering the unit; None where that is not possible."""

    def write(self, unit: FlatUnit, i: int, value: torch.Tensor) -> None:
        """`value` [numel] is what parameter i is gathered from now on; fences are the caller's."""

    def settle(self) -> None:
        """Returns when nothing reads what units are gathered from."""

    def fail(self, error: BaseException) -> None:
        """Breaks it on all ranks: none waits for this one any more. From any thread."""

    def close(self) -> bool:
        """The end. Whether values can still be read, on this rank alone. A second call does nothing."""


class NodeSource:
    """Gathers by copying from the memory where all owners' shards lie side by side (the node's, or that of the one
    rank). One-sided: ranks need not agree on what they gather, nor when. A parameter is one piece."""

    def __init__(self) -> None:
        self._runs: dict[int, list[tuple[int, int, int]]] = {}  # (place in the unit, address, bytes)
        self._views: dict[int, list[torch.Tensor]] = {}

    def add(self, unit: FlatUnit, pieces: Sequence[Sequence[Piece]]) -> None:
        views = [cast(torch.Tensor, whole.mine) for (whole,) in pieces]
        self._views[unit.index] = views
        runs: list[tuple[int, int, int]] = []
        size = unit.flat.element_size()
        for offset, view in zip(unit.offsets, views):
            at, n, src = offset * size, view.numel() * size, view.data_ptr()
            begin, address, nbytes = runs[-1] if runs else (0, 0, 0)
            gap = at - (begin + nbytes)
            if runs and 0 <= gap < ALIGN * size and src - (address + nbytes) == gap:
                runs[-1] = (begin, address, at + n - begin)  # the padding between them comes along
            elif n:
                runs.append((at, src, n))
        self._runs[unit.index] = runs

    def places(self, params: Sequence[torch.nn.Parameter]) -> list[int] | None:
        return None

    def begin(self, units: Sequence[FlatUnit]) -> None:
        for unit in units:
            if unit.flat.device.type != "cpu":
                for offset, view in zip(unit.offsets, self._views[unit.index]):
                    unit.flat[offset : offset + view.numel()].copy_(view)
                continue
            base = unit.storage.data_ptr()
            for offset, src, nbytes in self._runs[unit.index]:
                check(C.dc_zero_gather(base + offset, src, nbytes))

    def complete(self, unit: FlatUnit) -> None:
        pass

    def drop(self, unit: FlatUnit) -> None:
        self.complete(unit)

    def read(self, unit: FlatUnit, i: int) -> torch.Tensor | None:
        return self._views[unit.index][i]

    def write(self, unit: FlatUnit, i: int, value: torch.Tensor) -> None:
        """One rank writes parameter i for all."""
        self._views[unit.index][i].copy_(value)

    def settle(self) -> None:
        pass  # `begin` has copied

    def fail(self, error: BaseException) -> None:
        pass  # nobody waits here

    def close(self) -> bool:
        return True


class HostSource(NodeSource):
    """The same from locked memory of the host to a GPU: copies run on a stream of their own, beside what the device
    computes, from when it is through with what it was told before: until then the storage of a unit may be somebody
    else's."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device, self._side = device, torch.cuda.Stream(device)
        self._parts: dict[int, list[tuple[int, torch.Tensor]]] = {}  # (place in the unit, bytes)
        self._arrived: dict[int, torch.cuda.Event] = {}

    def add(self, unit: FlatUnit, pieces: Sequence[Sequence[Piece]]) -> None:
        super().add(unit, pieces)
        owners = self._views[unit.index]
        self._parts[unit.index] = [
            (at, memory.tensor_at(address, nbytes, torch.uint8, owners))
            for at, address, nbytes in self._runs.pop(unit.index)
        ]

    def begin(self, units: Sequence[FlatUnit]) -> None:
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            for unit in units:
                storage = unit.flat.view(torch.uint8)
                for at, values in self._parts[unit.index]:
                    storage[at : at + values.numel()].copy_(values, non_blocking=True)
                self._arrived[unit.index] = torch.cuda.Event()
                self._arrived[unit.index].record(self._side)

    def complete(self, unit: FlatUnit) -> None:
        """On the device's present stream."""
        if (event := self._arrived.pop(unit.index, None)) is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def settle(self) -> None:
        self._side.synchronize()

    def write(self, unit: FlatUnit, i: int, value: torch.Tensor) -> None:
        self.settle()
        super().write(unit, i, value)

    def close(self) -> bool:
        # Units that nobody came for (a forward was broken off): the device's allocator knows nothing of this stream,
        # and would give their memory to others while it is written.
        self.settle()
        return super().close()


class Exchange:
    """Groups of our own over `ranks` (None: all), for parts of parameters. `what`: whose they are, for messages. After
    a failure every call raises it, a CommError, on all ranks. Made and closed collectively."""

    def __init__(self, what: str, device: torch.device, ranks: Sequence[int] | None = None) -> None:
        store = own_store("exchange", ranks)[1]
        self._control: Any = new_group(ranks, backend="gloo", timeout=comm.DEFAULT_TIMEOUT)
        self._data: Any = self._control if device.type == "cpu" else new_group(ranks, timeout=comm.DEFAULT_TIMEOUT)
        self.world, self.rank = dist.get_world_size(self._control), dist.get_rank(self._control)
        self._breaker = Breaker(what, self.rank, self.world, store, self._cut)

    def table(self, row: Sequence[int]) -> list[list[int]]:
        """Every rank's row of numbers, in rank order."""
        mine = torch.tensor(row, dtype=torch.int64, device="cpu")
        rows = torch.empty(self.world * mine.numel(), dtype=torch.int64, device="cpu")
        with self.errors():
            _all_gather(rows, mine, group=self._control)
        return cast("list[list[int]]", rows.view(self.world, -1).tolist())

    def gather(self, out: torch.Tensor, mine: torch.Tensor) -> Any:
        """Starts out [ranks * n] = every rank's mine [n]; a Work whose wait belongs under `errors`."""
        with self.errors():
            return _all_gather(out, mine, group=self._data, async_op=True)

    def whole(self, mine: torch.Tensor) -> torch.Tensor:
        """[ranks * n] every rank's mine [n]."""
        out = torch.empty(self.world * mine.numel(), dtype=mine.dtype, device="cpu")
        if out.numel():
            work = self.gather(out.view(torch.uint8), mine.view(torch.uint8))
            with self.errors():
                work.wait()
        return out

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """`tensor` of rank `root` on all ranks."""
        with self.errors():
            dist.broadcast(tensor, group=self._data, group_src=root)

    def errors(self) -> contextlib.AbstractContextManager[None]:
        """Around calls of the backend: turns its error into one of ours."""
        return self._breaker.errors()

    def fail(self, error: BaseException) -> None:
        """Breaks it on all ranks: none waits for this one any more. From any thread."""
        self._breaker.fail(error)

    def _cut(self, error: BaseException) -> None:
        if (control := self._control) is not None:
            break_pairs(control, self.rank, self.world)

    def close(self) -> None:
        """Leaves the groups. A second call does nothing."""
        groups = {id(g): g for g in (self._control, self._data) if g is not None}
        self._control = self._data = None
        for group in groups.values():
            if dist.is_initialized():
                dist.destroy_process_group(group)


class Alone:
    """Of an Exchange what one rank needs."""

    world, rank = 1, 0

    def table(self, row: Sequence[int]) -> list[list[int]]:
        return [list(row)]

    def whole(self, mine: torch.Tensor) -> torch.Tensor:
        return mine

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        pass

    def close(self) -> None:
        pass


class _Started(NamedTuple):
    """The gather of a unit under way: what it fills, elements of a rank's part, what this rank gives."""

    work: Any
    out: torch.Tensor
    most: int
    send: torch.Tensor


class CollectiveSource:
    """Gathers over `ranks` of the default group (None: all), each of which has its shard alone. reductions: of
    gradients, told of every round."""

    WANTS = 15  # units that a round can carry for a rank
    _NOTHING, _AT_FENCE = -2, -1

    def __init__(self, device: torch.device, reductions: Reductions, ranks: Sequence[int] | None = None) -> None:
        self._exchange = Exchange("a gather of ZeRO-3's parameters", device, ranks)
        self._cpu, self._reductions = device.type == "cpu", reductions
        self._units: list[FlatUnit] = []
        # [unit][rank]: (offset in the unit, this rank's values, elements)
        self._pieces: list[list[list[tuple[int, torch.Tensor | None, int]]]] = []
        self._arriving: dict[int, _Started] = {}
        self._others: list[_Started] = []  # gathers that only other ranks wanted
        self.rounds = 0

    def add(self, unit: FlatUnit, pieces: Sequence[Sequence[Piece]]) -> None:
        rows: list[list[tuple[int, torch.Tensor | None, int]]] = [[] for _ in range(self._exchange.world)]
        for offset, own in zip(unit.offsets, pieces):
            for piece in own:
                rows[piece.rank].append((offset + piece.begin, piece.mine, piece.length))
        self._units.append(unit)
        self._pieces.append(rows)

    def places(self, params: Sequence[torch.nn.Parameter]) -> list[int] | None:
        return None

    # ---- rounds ------------------------------------------------------------------------------------------------------
    def begin(self, units: Sequence[FlatUnit]) -> None:
        """Ranks may ask for different ones."""
        for at in range(0, len(units), self.WANTS):
            self._round([u.index for u in units[at : at + self.WANTS]])

    def fence(self) -> None:
        """Returns when all ranks have called it; serves the others' gathers until then."""
        while not self._round([], fence=True):
            pass
        for started in self._others:
            with self._exchange.errors():
                started.work.wait()
        self._others.clear()

    def _round(self, wanted: list[int], fence: bool = False) -> bool:
        """Every rank's wishes, fulfilled. True if all ranks are at a fence."""
        self.rounds += 1
        nothing = self._AT_FENCE if fence else self._NOTHING
        row = [*wanted, *[nothing] * (self.WANTS - len(wanted)), self._reductions.ready()]
        table = self._exchange.table(row)
        for index in dict.fromkeys(r[k] for k in range(self.WANTS) for r in table if r[k] >= 0):
            started = self._start(index)
            if index in wanted:
                self._arriving[index] = started
            else:
                self._others.append(started)
        self._others = [s for s in self._others if not s.work.is_completed()]
        self._reductions.agreed(min(r[self.WANTS] for r in table))
        return all(r[0] == self._AT_FENCE for r in table)

    def _start(self, index: int) -> _Started:
        """One collective for a unit: every rank's pieces, padded to the most that one has."""
        unit, rows = self._units[index], self._pieces[index]
        most = max(sum(n for _, _, n in row) for row in rows)
        send = torch.zeros(most, dtype=unit.flat.dtype, device=unit.flat.device)
        at = 0
        for _, mine, n in rows[self._exchange.rank]:
            send[at : at + n].copy_(cast(torch.Tensor, mine))
            at += n
        out = torch.empty(self._exchange.world * most, dtype=send.dtype, device=send.device)
        return _Started(self._exchange.gather(out, send), out, most, send)

    def complete(self, unit: FlatUnit) -> None:
        if (started := self._arriving.pop(unit.index, None)) is None:
            return
        with self._exchange.errors():
            started.work.wait()
        size, base = unit.flat.element_size(), unit.storage.data_ptr()
        for rank, row in enumerate(self._pieces[unit.index]):
            at = rank * started.most
            for offset, _, n in row:
                if self._cpu:
                    check(C.dc_zero_gather(base + offset * size, started.out.data_ptr() + at * size, n * size))
                else:
                    unit.flat[offset : offset + n].copy_(started.out[at : at + n])
                at += n

    def drop(self, unit: FlatUnit) -> None:
        if (started := self._arriving.pop(unit.index, None)) is not None:
            self._others.append(started)  # the other ranks take theirs of it

    # ---- single parameters -------------------------------------------------------------------------------------------
    def read(self, unit: FlatUnit, i: int) -> torch.Tensor | None:
        return None

    def write(self, unit: FlatUnit, i: int, value: torch.Tensor) -> None:
        """Every rank writes its part of parameter i; the same `value` on all."""
        begin, end = unit.offsets[i], unit.offsets[i] + value.numel()
        for offset, mine, n in self._pieces[unit.index][self._exchange.rank]:
            if begin <= offset < end:
                cast(torch.Tensor, mine).copy_(value[offset - begin : offset - begin + n])

    def settle(self) -> None:
        pass  # `begin` has copied what this rank gives

    def fail(self, error: BaseException) -> None:
        self._exchange.fail(error)

    def close(self) -> bool:
        self._exchange.close()
        return False
