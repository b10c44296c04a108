"""Streamed parameters on the disk of their node (offload_param.device = "nvme"): the flat space is an array on disk,
one of the node, in a file without a name that all its ranks have open. A unit is read from it straight into the unit's
storage, ahead of its use as the recorded order says; owners write their slices of it in the step. So, as where the
node's memory has the parameters, gathers are one-sided: ranks need not agree on what they gather, nor when."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, cast

import torch

from ...comm.groups import MultiNodeGroup
from ...core import memory
from ...core.ops import casts
from ...errors import DeepcError, DiskError, UnsupportedError
from ...offload.array import BLOCK, DiskArray, DiskRead, Place, Window
from ...plan.layout import ALIGN, Segment, keeps_bytes, padded
from ...plan.plan import Plan
from ..parameters.gathered import Params, broadcast_bytes
from ..parameters.param import FlatUnit, as_slots, slots
from ..shards import give
from ..sources import Piece, Source
from ..state import ModelState
from ..tiers.agree import run_together, together
from ..tiers.windows import OnDisk
from ..tiers.windows import Window as Part

if TYPE_CHECKING:
    from ...comm.groups import NodeGroup


class Streams(Protocol):
    """What is asked of a StreamedState."""

    plan: Plan

    @property
    def units(self) -> Units: ...


class Units(Protocol):
    """What is asked of its StreamedUnits."""

    def write(self, p: torch.nn.Parameter, value: torch.Tensor) -> None: ...


class ArrayOnDisk(OnDisk):
    """A DiskArray where there is a tensor elsewhere: read and written by windows (zero/tiers/windows.py), and nothing
    else."""

    def __init__(self, array: DiskArray) -> None:
        self._array, self.dtype = array, array.dtype

    def read(self, begin: int, out: torch.Tensor) -> torch.Tensor:
        return self._array.read(begin, out)

    def write(self, begin: int, value: torch.Tensor) -> None:
        self._array.put(begin, value)

    def __len__(self) -> int:
        return self._array.numel

    def __repr__(self) -> str:
        return f"ArrayOnDisk({self._array.what}, {self._array.numel:,} elements in {self._array.folder})"

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedError(
            f"{what} of {self._array.what}, which lie on disk (zero_optimization.offload_param.device nvme): it is no"
            " tensor; read and write it under deepc.zero.GatheredParameters or by deepc.view(p)"
        )


class DiskFlats:
    """The whole flat space, and the frozen parameters behind it, in an array on the node's disk. broken: why they are
    not to be read; see ModelState.break_off."""

    broken = ""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def make(self, state: ModelState) -> None:
        plan = state.plan
        self._frozen_at: dict[int, int] = {}
        self._frozen_end = plan.layout.total
        self._place = {id(p): i for i, p in enumerate(state.trained)}
        self._layout = plan.layout
        self.array = self._open(state, plan.layout.total + plan.frozen_elems)
        self.window = Window(self.array)
        state.flat = cast(Any, ArrayOnDisk(self.array))
        state.frozen_flat = state.flat_host = None

    def _open(self, state: ModelState, numel: int) -> DiskArray:
        """The node's first rank makes it, the others open it by its /proc name. Collective; fails on all ranks."""
        group, what = state.group, "the parameters"
        if group.world == 1:
            return DiskArray(self._folder, numel, state.dtype, what)
        node = group.inside if isinstance(group, MultiNodeGroup) else cast("NodeGroup", group)
        blocks = max(1, -(-numel // BLOCK))
        self._segment = node.segment(max(4096, 4 * blocks))
        sums = self._segment.tensor(torch.int32, 0, blocks)
        array: DiskArray | None = None
        failure: DiskError | None = None
        place = torch.zeros(len(Place._fields), dtype=torch.int64, device="cpu")
        try:
            if group.leader:
                array = DiskArray(self._folder, numel, state.dtype, what, sums=sums)
                place = torch.tensor(array.place(), device="cpu")
        except DiskError as exc:
            failure = exc
        node.broadcast(place, 0)
        made = Place(*place.tolist())
        try:
            if not group.leader and made.process:
                array = DiskArray(self._folder, numel, state.dtype, what, path=made.path(), sums=sums)
        except DiskError as exc:
            failure = exc
        try:
            together(group, failure)
        except DeepcError:
            if array is not None:
                array.close()
            raise
        return cast(DiskArray, array)

    # ---- values come -------------------------------------------------------------------------------------------------
    def value(self, state: ModelState, p: torch.nn.Parameter) -> torch.Tensor:
        known = give(p)  # the same on all ranks
        value = p.data.reshape(-1)
        apart = state.master is not None or state.plan.nodes > 1  # else the leader's alone is asked for
        if apart and state.plan.world > 1 and not known:  # rank 0's, unrounded
            value = value.to(dtype=torch.float32, copy=True)
            state.group.broadcast(value, 0)
        return value

    def put(self, state: ModelState, index: int, value: torch.Tensor, pieces: Sequence[Segment]) -> None:
        if state.group.leader:
            self.array.put(state.plan.layout.offsets[index], value)

    def home(self, state: ModelState, index: int, p: torch.nn.Parameter) -> torch.Tensor:
        return torch.empty(0, dtype=state.dtype, device="cpu")  # a view of its unit soon

    def put_frozen(self, state: ModelState, p: torch.nn.Parameter) -> None:
        known = give(p, read=state.group.leader)
        if not casts(p) and not keeps_bytes(p):
            p.data = p.data.to(state.device)
            broadcast_bytes(state.group, p.data, 0)
            return
        self._frozen_at[id(p)] = self._frozen_end
        value = as_slots(p, p.data, state.dtype)
        if state.plan.nodes > 1 and not known:
            value = value.clone()
            state.group.spread(value, 0)
        if state.group.leader:
            self.array.put(self._frozen_end, value)
        self._frozen_end += padded(slots(p, p.numel(), state.dtype))
        p.data = torch.empty(0, dtype=p.dtype if keeps_bytes(p) else state.dtype, device="cpu")

    def spread(self, state: ModelState) -> None:
        state.group.barrier()

    def follow(self, state: ModelState, index: int) -> None:
        failure: DiskError | None = None
        for rank, s in state.owners(index):
            try:
                if rank == state.plan.rank and state.master is not None:
                    state.window(s).copy_into(Part(state.flat, s.flat_begin, s.length))
            except DiskError as exc:
                failure = failure or exc
            failure = self._spread_part(state, rank, s.flat_begin, s.length) or failure
        together(state.group, failure)

    def _spread_part(self, state: ModelState, rank: int, begin: int, n: int) -> DiskError | None:
        """What `rank` has written there goes to the files of other nodes; a failure of this rank's disk. Collective
        between nodes."""
        group = state.group
        if group.nodes == 1 or not group.carries(rank):
            return None
        value = torch.zeros(n, dtype=state.dtype, device="cpu")
        failure: DiskError | None = None
        try:
            if rank == group.rank:
                self.array.read(begin, value)
        except DiskError as exc:
            failure = exc
        group.spread(value, rank)
        try:
            if rank != group.rank:
                self.array.put(begin, value)
        except DiskError as exc:
            failure = exc
        return failure

    # ---- units -------------------------------------------------------------------------------------------------------
    def source(self, state: Streams) -> Source:
        return DiskSource(self.array, self.begin_of, lambda: self.broken)

    def begin_of(self, p: torch.nn.Parameter) -> int:
        """Where the values of `p` begin in the array."""
        layout = self._layout
        return layout.offsets[self._place[id(p)]] if id(p) in self._place else self._frozen_at[id(p)]

    def pieces(self, state: Streams, p: torch.nn.Parameter) -> list[Piece]:
        return []  # the source knows

    def take(self, state: Streams, params: Params, writer: int) -> None:
        def write() -> None:
            for p in params if state.plan.rank == writer else ():
                state.units.write(p, p.detach())

        run_together(cast(ModelState, state).group, write)

    def spread_written(self, state: Streams, params: Params, writer: int) -> None:
        if state.plan.nodes == 1:
            return  # all ranks read the same file
        failure: DiskError | None = None
        for p in params:
            n = slots(p, p.numel(), self.array.dtype)
            failure = self._spread_part(cast(ModelState, state), writer, self.begin_of(p), n) or failure
        together(cast(ModelState, state).group, failure)

    def close(self) -> None:
        self.array.close()


_SPARE = 64 << 20  # bytes of memory below which a gather gives the heap's free pages back first


class _Run(NamedTuple):
    """`n` elements from `begin` of the array, which lie from `offset` on in a unit's storage."""

    offset: int
    begin: int
    n: int


class _Landing:
    """Locked memory of the host, by size, in which what is read for a GPU lies until it is there."""

    def __init__(self) -> None:
        self._free: dict[int, list[tuple[torch.Tensor, torch.cuda.Event | None]]] = {}

    def take(self, unit: FlatUnit) -> torch.Tensor:
        """[elements of the unit's storage]: nobody reads it any more."""
        free = self._free.setdefault(unit.nbytes, [])
        if not free:
            like = unit.flat
            return memory.zeros(like.numel(), like.dtype, memory.COLORS["params"], locked=like.device)
        values, left = free.pop(0)
        if left is not None:
            left.synchronize()
        return values

    def send(self, values: torch.Tensor, unit: FlatUnit) -> None:
        """`values` become the unit's on the device's present stream; the memory can be taken again."""
        unit.flat.copy_(values, non_blocking=True)
        left = torch.cuda.Event()
        left.record(torch.cuda.current_stream(unit.flat.device))
        self._free[unit.nbytes].append((values, left))

    def give_back(self, values: torch.Tensor, unit: FlatUnit) -> None:
        """It can be taken again, and was of no use."""
        self._free[unit.nbytes].append((values, None))


class DiskSource:
    """Gathers by reading from the array on the node's disk, in the background from `begin` to `complete`; for a GPU
    into the host's memory, from where `complete` sends it. One-sided, as NodeSource. A read that fails raises where the
    unit is needed; the unit can be asked for again. One that is dropped is not looked at: what it reads may be written
    meanwhile. broken: why nothing is to be read now, or ""."""

    def __init__(
        self, array: DiskArray, begin_of: Callable[[torch.nn.Parameter], int], broken: Callable[[], str]
    ) -> None:
        self._array, self._begin_of, self._broken = array, begin_of, broken
        self._landing, self._landed = _Landing(), dict[int, torch.Tensor]()
        self._runs: dict[int, list[_Run]] = {}
        self._reads: dict[int, list[DiskRead]] = {}
        weakref.finalize(self, _abandon, self._reads)  # also at the end of a process that closes nothing

    def add(self, unit: FlatUnit, pieces: Sequence[Sequence[Piece]]) -> None:
        runs: list[_Run] = []
        for offset, p, n in zip(unit.offsets, unit.params, unit.numels):
            begin = self._begin_of(p)
            last = runs[-1] if runs else _Run(0, 0, 0)
            gap = offset - (last.offset + last.n)
            if runs and 0 <= gap < ALIGN and begin - (last.begin + last.n) == gap:
                runs[-1] = last._replace(n=last.n + gap + n)  # the padding between them comes along
            elif n:
                runs.append(_Run(offset, begin, n))
        self._runs[unit.index] = runs

    def places(self, params: Sequence[torch.nn.Parameter]) -> list[int] | None:
        return [self._begin_of(p) for p in params]

    def _check(self) -> None:
        """What a step could not write has its checksum already: reads would take it for damage."""
        if why := self._broken():
            raise DiskError(why)

    def begin(self, units: Sequence[FlatUnit]) -> None:
        self._check()
        need = sum(unit.nbytes for unit in units)
        if memory.available() < need + _SPARE:  # what the heap keeps free would be missing: the limit kills
            memory.trim_heap()
        for unit in units:
            to = unit.flat
            if to.device.type != "cpu":
                to = self._landed[unit.index] = self._landing.take(unit)
            reads = self._reads[unit.index] = list[DiskRead]()
            try:
                for r in self._runs[unit.index]:
                    reads.append(self._array.read_async(r.begin, to[r.offset : r.offset + r.n]))
            except BaseException:  # the unit's memory may go now: nothing is to write to it later
                self.drop(unit)
                raise

    def complete(self, unit: FlatUnit) -> None:
        self._check()
        if unit.index not in self._reads:  # the last try failed
            self.begin([unit])
        reads, landed = self._reads.pop(unit.index), self._landed.pop(unit.index, None)
        try:
            while reads:
                reads.pop().wait()
        except BaseException:
            for read in reads:
                read.abandon()
            if landed is not None:
                self._landing.give_back(landed, unit)
            raise
        if landed is not None:
            self._landing.send(landed, unit)

    def drop(self, unit: FlatUnit) -> None:
        for read in self._reads.pop(unit.index, ()):
            read.abandon()
        if (landed := self._landed.pop(unit.index, None)) is not None:
            self._landing.give_back(landed, unit)

    def read(self, unit: FlatUnit, i: int) -> torch.Tensor | None:
        self._check()
        return self._array.get(self._begin_of(unit.params[i]), unit.numels[i])

    def write(self, unit: FlatUnit, i: int, value: torch.Tensor) -> None:
        """One rank writes parameter i for all."""
        self._array.put(self._begin_of(unit.params[i]), value)

    def settle(self) -> None:
        pass  # who writes needs not wait: what is read meanwhile is dropped, as values of before the write are

    def fail(self, error: BaseException) -> None:
        pass  # nobody waits here

    def close(self) -> bool:
        _abandon(self._reads)
        return False


def _abandon(under_way: dict[int, list[DiskRead]]) -> None:
    """Waits for reads that nobody wants any more."""
    for reads in under_way.values():
        for read in reads:
            read.abandon()
    under_way.clear()
