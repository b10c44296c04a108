"""The model states of a rank whose parameters come and go. What they are gathered from: the whole flat space of the
node, as in resident mode, or where ranks share no memory each rank's shard."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import torch

from ...core import memory
from ...core.foreign import private
from ...core.ops import casts
from ...errors import CommError, DiskError
from ...offload.array import Window
from ...plan.layout import Segment, keeps_bytes, padded
from ..parameters.gathered import Params, Whole, broadcast_bytes
from ..parameters.param import as_slots, share
from ..resident import WholeFlats
from ..shards import give
from ..sources import CollectiveSource, HostSource, NodeSource, Piece, Source
from ..state import Flats, ModelState, ranks_of
from ..step.reducers.collective import RoundsReducer, TorchReducer
from ..tiers.agree import together
from .cells import CELL_ELEMS, CellWalk, cells_of
from .disk import DiskFlats
from .gradients import DiskNodeReducer, DiskReducer, GradientStore
from .nodes import DiskNodesReducer
from .units import HONOURED, StreamedUnits

if TYPE_CHECKING:
    from ...comm.groups import MultiNodeGroup, TorchGroup
    from ...comm.shared import Comm
    from ...config.tree import ZeroConfig
    from ..step.reducers.base import Reducer


class NodeFlats(WholeFlats):
    """Whole on the node: gathers copy from it."""

    def source(self, state: StreamedState) -> Source:
        """What units are gathered from. Collective."""
        return NodeSource()

    def pieces(self, state: StreamedState, p: torch.nn.Parameter) -> list[Piece]:
        """Where the values of `p` lie. Called before `p` is a view of its unit."""
        values = p.data.reshape(-1)
        return [Piece(state.plan.rank, 0, values.numel(), values)]

    def take(self, state: StreamedState, params: Params, writer: int) -> None:
        """What gathered `params` hold on rank `writer` is their value from now on. Collective; fences are the
        caller's."""
        for p in params if state.plan.rank == writer else ():
            state.units.write(p, p.detach())

    def spread_written(self, state: StreamedState, params: Params, writer: int) -> None:
        """The same on other nodes."""
        if state.group.nodes > 1:
            for p in params:
                state.group.spread(cast(torch.Tensor, state.units.origin(p)), writer)
            state.group.barrier()


class HostFlats(NodeFlats):
    """The same in the host's memory, of a GPU run: frozen parameters lie there too, and those that keep their bytes."""

    def make(self, state: ModelState) -> None:
        super().make(state)
        state.frozen_flat = state.parameters(state.plan.frozen_elems)
        self._places: dict[int, torch.Tensor] = {}  # id(frozen parameter) -> its place there

    def value(self, state: ModelState, p: torch.nn.Parameter) -> torch.Tensor:
        give(p)
        return super().value(state, p)

    def put_frozen(self, state: ModelState, p: torch.nn.Parameter) -> None:
        give(p)
        if not (casts(p) or keeps_bytes(p)):
            super().put_frozen(state, p)
            return
        value = as_slots(p, p.data, state.dtype)
        place = cast(torch.Tensor, state.frozen_flat)[self._frozen_at : self._frozen_at + value.numel()]
        self._frozen_at += padded(value.numel())
        self._places[id(p)] = place.copy_(value)
        # a view of its unit soon
        p.data = torch.empty(0, dtype=p.dtype if keeps_bytes(p) else state.dtype, device="cpu")

    def source(self, state: StreamedState) -> Source:
        return HostSource(state.device)

    def pieces(self, state: StreamedState, p: torch.nn.Parameter) -> list[Piece]:
        place = self._places.get(id(p))
        return super().pieces(state, p) if place is None else [Piece(state.plan.rank, 0, place.numel(), place)]


class ShardFlats:
    """This rank's shard [owned] alone, and its part of the frozen parameters, whose space is cut into equal parts."""

    def make(self, state: ModelState) -> None:
        plan = state.plan
        self._part = padded(plan.frozen_elems // plan.world + 1)  # of the frozen parameters, per rank
        self._frozen_at: dict[int, tuple[int, int]] = {}  # id(parameter) -> its place in their space, elements
        self._frozen_end = 0
        self._place = {id(p): i for i, p in enumerate(state.trained)}
        state.flat, state.frozen_flat = state.parameters(plan.owned_elems), state.parameters(self._part)
        state.flat_host = state.zeros(plan.owned_elems, state.dtype, "lowp") if state.sends_parameters else None

    def _from_rank_0(self, state: ModelState, p: torch.nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
        known = give(p)
        value = p.data.reshape(-1).to(device=state.device, dtype=dtype, copy=not known)
        if not known:
            state.group.broadcast(value, 0)
        return value

    def value(self, state: ModelState, p: torch.nn.Parameter) -> torch.Tensor:
        return self._from_rank_0(state, p, torch.float32 if state.master is not None else state.dtype)

    def put(self, state: ModelState, index: int, value: torch.Tensor, pieces: Sequence[Segment]) -> None:
        for s in pieces:
            state.flat[s.shard_begin : s.shard_begin + s.length].copy_(value[s.param_begin : s.param_begin + s.length])

    def home(self, state: ModelState, index: int, p: torch.nn.Parameter) -> torch.Tensor:
        return torch.empty(0, dtype=state.dtype, device=state.device)  # a view of its unit soon

    def put_frozen(self, state: ModelState, p: torch.nn.Parameter) -> None:
        if not casts(p):
            give(p)
            p.data = p.data.to(state.device)
            broadcast_bytes(state.group, p.data, 0)
            return
        value = self._from_rank_0(state, p, state.dtype)
        self._frozen_at[id(p)] = (self._frozen_end, p.numel())
        self._frozen_end += padded(p.numel())
        for _, begin, n, mine in self._frozen_pieces(state, p):
            if mine is not None:
                mine.copy_(value[begin : begin + n])
        p.data = torch.empty(0, dtype=state.dtype, device=state.device)

    def spread(self, state: ModelState) -> None:
        """A shard is this rank's alone: nothing is to do."""

    def follow(self, state: ModelState, index: int) -> None:
        for s in state.plan.segments:
            if s.param == index:
                state.follow_piece(s)
        state.group.barrier()

    def source(self, state: StreamedState) -> Source:
        source = CollectiveSource(state.device, state.reducer, ranks_of(state.group))
        cast("TorchGroup", state.group).before = source.fence
        return source

    def pieces(self, state: StreamedState, p: torch.nn.Parameter) -> list[Piece]:
        if (index := self._place.get(id(p))) is None:
            return self._frozen_pieces(state, p)
        mine = {
            s.param_begin: state.flat[s.shard_begin : s.shard_begin + s.length]
            for s in state.plan.segments
            if s.param == index
        }
        return [
            Piece(rank, s.param_begin, s.length, mine[s.param_begin] if rank == state.plan.rank else None)
            for rank, s in state.owners(index)
        ]

    def _frozen_pieces(self, state: ModelState, p: torch.nn.Parameter) -> list[Piece]:
        out: list[Piece] = []
        at, n = self._frozen_at[id(p)]
        for rank in range(at // self._part, (at + max(n, 1) - 1) // self._part + 1):
            first = rank * self._part
            lo, hi = max(at, first), min(at + n, first + self._part)
            if lo < hi:
                own = cast(torch.Tensor, state.frozen_flat)[lo - first : hi - first]
                out.append(Piece(rank, lo - at, hi - lo, own if rank == state.plan.rank else None))
        return out

    def take(self, state: StreamedState, params: Params, writer: int) -> None:
        for p in params:
            value = p.detach().clone().view(-1)
            state.group.broadcast(value, writer)
            state.units.write(p, value)

    def spread_written(self, state: StreamedState, params: Params, writer: int) -> None:
        pass  # every rank has written its part


class StreamedState(ModelState):
    """The model states of a rank in streamed mode. streamed: its units, from `stream` on."""

    streamed: StreamedUnits | None = None
    store: GradientStore | None = None  # of gradients on disk
    _walk: CellWalk | None = None
    reducer: RoundsReducer
    flats: NodeFlats | ShardFlats | DiskFlats

    def _choose_flats(self) -> Flats:
        if self.plan.gradients_on:
            failure: DiskError | None = None
            try:
                self.store = GradientStore(self.plan.gradients_on, self.plan.owned_elems, self.partial)
            except DiskError as exc:
                failure = exc
            together(self.group, failure)
            self.acc = cast(Any, cast(GradientStore, self.store).values)
        if self.plan.parameters_on:
            return DiskFlats(self.plan.parameters_on)
        if self.plan.sharded:
            return ShardFlats()
        return HostFlats() if self.plan.parameters_in_host else NodeFlats()

    @property
    def disk(self) -> DiskFlats | None:
        """The parameters on disk, or None."""
        return self.flats if isinstance(self.flats, DiskFlats) else None

    @property
    def units(self) -> StreamedUnits:
        assert self.streamed is not None, "after stream()"
        return self.streamed

    def stream(self, model: torch.nn.Module, config: ZeroConfig, ranks_here: int) -> None:
        """From here on parameters come and go. After the hooks of the gradients. ranks_here: on this node, of all parts
        of the model. Collective."""
        for _, p in self.frozen:
            share(p)
        trained = list(zip(self.names, self.trained))
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        source = self.flats.source(self)
        self.streamed = StreamedUnits(
            model,
            self.plan,
            trained,
            self.frozen,
            source,
            lambda p: self.flats.pieces(self, p),
            like,
            config,
            self._most_live(config, ranks_here),
            distant=self.plan.parameters_away,
        )
        self._note_versions()

    def _most_live(self, config: ZeroConfig, ranks_here: int) -> int:
        """Elements that may be gathered at a time. With parameters on disk the limit is also max_in_cpu, and a third
        of the memory that is left: activations and gradients want some; half of it where nothing is trained. Where
        the parameters of a GPU run lie elsewhere, so much of the GPU's memory."""
        most = config.stage3_max_live_parameters
        parts = 3 if self.trained else 2
        if self.device.type != "cpu" and self.plan.parameters_away:
            most = min(most, torch.cuda.mem_get_info(self.device)[0] // (parts * self.dtype.itemsize))
        if self.disk is None:
            return most
        room = memory.available() // (parts * ranks_here * self.dtype.itemsize)
        least = torch.tensor(
            [float(min(most, config.offload_param.max_in_cpu, room))], dtype=torch.float64, device="cpu"
        )
        return int(self.group.gather_all(least).min())

    def watches(self, p: torch.nn.Parameter) -> bool:
        return self.streamed is not None and self.streamed.holds(p)

    def make_reducer(self, wire: torch.dtype, pre_scale: float) -> TorchReducer:
        """The reducer over torch.distributed, whose reductions and the gathers go along. Collective."""
        self.reducer = RoundsReducer(
            self.plan,
            self.device,
            self.acc,
            self.partial,
            wire,
            pre_scale,
            meet=lambda: cast("TorchGroup", self.group).before(),
            tell=self.fail,
            ranks=ranks_of(self.group),
        )
        return self.reducer

    def fail(self, error: BaseException) -> None:
        if self.streamed is not None:
            self.streamed.fail(error)

    def break_off(self, why: str) -> None:
        if self.disk is not None:
            self.disk.broken = why

    def settle(self) -> None:
        if self.streamed is not None:
            self.streamed.settle_reads()

    def meet(self) -> None:
        if self.plan.sharded:
            cast("TorchGroup", self.group).before()

    # ---- parameters on disk ------------------------------------------------------------------------------------------
    @property
    def lowp_address(self) -> int:
        return super().lowp_address if self.disk is None else self.disk.window.base

    @property
    def acc_address(self) -> int:
        return super().acc_address if self.store is None else self.store.window.base

    @property
    def flat_on_disk(self) -> Window | None:
        return None if self.disk is None else self.disk.window

    def walk(self) -> CellWalk | None:
        if self.disk is None:
            return None
        if self._walk is None:
            elems = self.plan.disk.cell_elems if self.plan.disk is not None else CELL_ELEMS
            cells = cells_of(self.plan.slices, elems)
            self._walk = CellWalk(cells, self.disk.window, None if self.store is None else self.store.window)
        return self._walk

    def remake_norm(self) -> None:
        super().remake_norm() if self.store is None else self.store.remake_norm()

    def _gradients(self, begin: int, n: int) -> torch.Tensor:
        return super()._gradients(begin, n) if self.store is None else self.store.sums(begin, n)

    def first_bad_gradient(self) -> int:
        return super().first_bad_gradient() if self.store is None else self.store.first_not_finite()

    def disk_reducer(self, comm: Comm | None, wire: torch.dtype, pre_scale: float) -> Reducer:
        """The reducer whose sums lie on disk. comm: of the node's ranks; None: this one is alone. Collective."""
        assert self.store is not None
        if comm is None:
            return DiskReducer(self.plan, self.store, pre_scale)
        return DiskNodeReducer(self.plan, comm, self.store, wire, pre_scale)

    def disk_reducer_over_nodes(self, group: MultiNodeGroup, wire: torch.dtype, pre_scale: float) -> Reducer:
        """The same over several nodes. Collective."""
        assert self.store is not None
        return DiskNodesReducer(self.plan, group, self.store, self.partial, wire, pre_scale)

    # ---- the interface of ModelState ---------------------------------------------------------------------------------
    def bump_versions(self) -> None:
        super().bump_versions()
        if self.streamed is not None:
            self.streamed.refresh()

    def _replaced(self, among: Iterable[int] | None = None) -> set[int]:
        indices = range(len(self.trained)) if among is None else among
        return {i for i in indices if self.units.replaced(self.trained[i])}

    def inert(self, rows: Sequence[tuple[str, Any, str]]) -> list[tuple[str, Any, str]]:
        return [r for r in rows if r[0].removeprefix("zero_optimization.") not in HONOURED]

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the forward of every block (plan/units.py); hooks run around it."""
        for block in self.units.blocks:
            block.forward = torch.compile(block.forward, *args, **kwargs)

    def full_param(self, index: int) -> torch.Tensor:
        value = self.units.copy_of(self.trained[index]).view(-1)
        self.meet()  # a rank where it was there does not leave those that gather it
        return value

    def follow(self, index: int) -> None:
        super().follow(index)
        self.units.refresh()

    def frozen_value(self, p: torch.nn.Parameter) -> torch.Tensor:
        return self.units.copy_of(p) if self.units.holds(p) else super().frozen_value(p)

    def set_frozen(self, p: torch.nn.Parameter, value: torch.Tensor) -> None:
        if not self.units.holds(p):
            super().set_frozen(p, value)
        elif self.group.leader or (self.segment is None and self.disk is None):
            self.units.write(p, value)

    def whole(self, params: Params, writer: int | None) -> Whole:
        held = [p for p in params if self.units.holds(p)]
        own = [p for p in params if not self.units.holds(p)]  # frozen, of every rank: not cast
        return _Gathered(self, held, writer, own)

    def keep_gathered(self) -> Whole:
        return _Kept(self.units)

    def one_pass(self, trains: bool) -> AbstractContextManager[None]:
        return self.units.one_pass(trains)

    @private.uncompiled
    def running(self) -> AbstractContextManager[None]:
        return self.units.running()

    def close(self) -> None:
        if self.streamed is not None:
            if self.plan.sharded and self.reducer.broken:
                self.fail(CommError(f"rank {self.plan.rank} left in the middle of a backward (engine.destroy())"))
            self.streamed.close()
        if self.disk is not None:
            self.disk.close()
        if self.store is not None:
            self.store.close()


class _Gathered(Whole):
    """Parameters in streamed mode, gathered, and written by rank `writer` (None: nobody). private: those that every
    rank has in memory of its own, which get the writer's values."""

    def __init__(self, state: StreamedState, params: Params, writer: int | None, private: Params = ()) -> None:
        self._state, self._params, self._writer, self._private = state, params, writer, private

    def begin(self) -> None:
        self._units = self._state.units.hold(self._params)

    @torch.no_grad()
    def end(self) -> None:
        failure: DiskError | None = None
        try:
            if self._writer is not None:
                self._write(self._writer)
        except DiskError as exc:  # on all ranks
            failure = exc
        self._state.units.let_go(self._units)
        if self._writer is not None:
            self._state.units.refresh()
        if failure is not None:
            raise failure

    def _write(self, writer: int) -> None:
        state = self._state
        state.group.barrier()  # nobody gathers any more
        state.flats.take(state, self._params, writer)
        state.group.barrier()
        state.flats.spread_written(state, self._params, writer)
        for p in self._private:
            broadcast_bytes(state.group, p.data, writer)


class _Kept(Whole):
    """All units of streamed mode, gathered once for many forward calls."""

    def __init__(self, units: StreamedUnits) -> None:
        self._all = units

    def begin(self) -> None:
        self._units = self._all.hold()
        self._all.keep(True)

    def end(self) -> None:
        self._all.keep(False)
        self._all.let_go(self._units)
        self._all.release_idle()
