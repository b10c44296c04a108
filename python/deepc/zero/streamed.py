"""ZeRO-3's streamed mode: a rank has storage for a unit of parameters only while the unit is used.

Owns the units' storages, the hooks of the modules that use them, and the order of their use. A parameter is a view of
its unit's storage, which is freed (resized to nothing) and filled again; a fill does not touch autograd's version
counters, a step bumps them once.

When a unit is there:
 - **forward**: hooks of the modules that use it (units.py) count its uses. While the count is 0 its parameters are
   `Released` (param.py), so that any other touch arrives in `touched`: inside a running module the unit is gathered and
   is in use until that module ends (parameters used outside of their module), in backward until it ends; elsewhere it
   is an error that names the parameter.
 - **backward**: what autograd saves of a unit's storage is packed as a recipe (which view, which version) and unpacked
   by gathering the unit, so that units come exactly when a node reads them, whatever the graph looks like: outputs of
   any type, losses that don't come from an output, several backward passes. The hooks stand on top of those of whoever
   was there before (checkpointing, offloading of activations) and hand the rest on to them.
 - **release**: after its last use in forward; in backward after the gradients of all its trained parameters have been
   accumulated, and at the end of backward. A storage that anything else still refers to (a view that a user kept, a
   tensor inside a running node) is never freed: torch counts its users.

Tried and left: register_multi_grad_hook on the outputs of modules to gather for backward. It misses what leaves a
module another way than by its output (a loss kept in an attribute), it must gather all that a module used at once, and
what the module saved has to be held until its gradients are there, frozen parameters until the end of backward. The
price of recipes: as under every saved-tensor hook, torch does not notice that an operator's own *result*, saved for its
backward, was changed in place; for inputs it is checked here.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.autograd import Variable
from torch.autograd.graph import increment_version

from ..core import memory
from ..core.lib import C, check
from ..errors import CommError, ReleasedParameterError
from ..plan.layout import ALIGN, padded
from ..plan.order import Order, order_of
from ..plan.units import cut
from .gathered import Params, Whole
from .param import Released, released_class, share
from .shards import give
from .sources import CollectiveSource
from .state import ModelState
from .step.collective import TorchReducer

HONOURED = (
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
)  # keys of zero_optimization that act in this mode, on every device
MAX_TRACE = 1 << 16  # uses of one pass that are remembered
_saved_hooks = torch._C._autograd


@dataclass(eq=False)
class Unit:
    """Parameters with one storage. uses: of running modules and contexts; todo: trained parameters whose gradient has
    not come since the last forward use."""

    index: int
    name: str
    params: list[torch.nn.Parameter]
    offsets: list[int]
    elems: int
    persistent: bool
    flat: torch.Tensor
    kinds: list[type] = field(default_factory=list)
    trained: frozenset[int] = frozenset()
    base_refs: int = 0
    live: bool = False
    fresh: bool = False  # its values are those of the last step
    arriving: bool = False  # its gather is under way
    uses: int = 0
    stamp: int = 0
    keep: bool = False  # the order says that it stays after its present use
    todo: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.storage = self.flat.untyped_storage()
        self.key = self.storage._cdata
        self.nbytes = self.storage.nbytes()


@dataclass(frozen=True)
class _Recipe:
    """A saved view of a unit's storage."""

    unit: Unit
    param: int
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    version: int


class NodeSource:
    """Gathers by copying from the memory where all owners' shards lie side by side (the node's, or that of the one
    rank). One-sided: ranks need not agree on what they gather, nor when."""

    collective = False

    def __init__(self) -> None:
        self._runs: dict[int, list[tuple[int, int, int]]] = {}
        self._views: dict[int, list[torch.Tensor]] = {}

    def add(self, unit: Unit, values: Sequence[torch.Tensor]) -> None:
        """values: per parameter of the unit, what it is gathered from, flat."""
        self._views[unit.index] = list(values)
        runs: list[list[int]] = []
        size = unit.flat.element_size()
        for offset, view in zip(unit.offsets, values):
            at, n, src = offset * size, view.numel() * size, view.data_ptr()
            if (
                runs
                and 0 <= (gap := at - (runs[-1][0] + runs[-1][2])) < ALIGN * size
                and src - (runs[-1][1] + runs[-1][2]) == gap
            ):
                runs[-1][2] = at + n - runs[-1][0]  # the padding between them comes along
            elif n:
                runs.append([at, src, n])
        self._runs[unit.index] = [tuple(r) for r in runs]

    def begin(self, units: Sequence[Unit]) -> None:
        """Starts to fill the units' storages."""
        for unit in units:
            if unit.flat.device.type != "cpu":
                for offset, view in zip(unit.offsets, self._views[unit.index]):
                    unit.flat[offset : offset + view.numel()].copy_(view)
                continue
            base = unit.storage.data_ptr()
            for offset, src, nbytes in self._runs[unit.index]:
                check(C.dc_zero_gather(base + offset, src, nbytes))

    def complete(self, unit: Unit) -> None:
        """Returns when the unit's storage is filled."""

    def read(self, unit: Unit, i: int) -> torch.Tensor | None:
        """[numel] the value of the unit's parameter i without gathering the unit, if that is possible."""
        return self._views[unit.index][i]

    def write(self, unit: Unit, i: int, value: torch.Tensor) -> None:
        """One rank writes parameter i for all; fences are the caller's."""
        self._views[unit.index][i].copy_(value)


class Streamed:
    """The streamed parameters of one engine. stats: see `stats()`."""

    def __init__(self, model: torch.nn.Module, state, zero_config) -> None:
        self._model, self._state = model, state
        plan = state.plan
        self._prefetch, self._max_reuse = zero_config.stage3_prefetch_bucket_size, zero_config.stage3_max_reuse_distance
        self._max_live = zero_config.stage3_max_live_parameters
        self._frames: list[
            tuple[list[Unit], bool]
        ] = []  # per running module: units in use, whether it pushed saved-tensor hooks
        self._holds = 0  # keep-gathered contexts
        self._whole = 0  # state_dict calls under way
        self._tasks: dict[int, list[Unit]] = {}  # backward passes under way, with the units that were touched in them
        self._clock = 0
        self._copied: Unit | None = None
        self._blocked: set[Unit] = set()  # to be released as soon as nothing else refers to them
        self._trace: list[int] = []
        self._trace_key = True
        self._backward_seen = False
        self._last_backward: Unit | None = None
        self._orders: dict[bool, Order] = {}
        self._order: Order | None = None
        self._at = 0
        self._closed = False
        self.live_elems = self.persistent_elems = 0
        self._stats = dict.fromkeys(
            (
                "gathers",
                "gathered_elems",
                "prefetched",
                "releases",
                "blocked",
                "touches",
                "order_misses",
                "live_elems_max",
            ),
            0,
        )
        self._name = {id(p): n for n, p in [*zip(state.names, state.trained), *state.frozen]}
        self._unit_of: dict[int, Unit] = {}
        self._units: list[Unit] = []
        self._make_units(plan, zero_config)
        self._by_storage = {u.key: u for u in self._units}
        self._handles: list = []
        self._hook()

    # ---- units -------------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def _make_units(self, plan, zero_config) -> None:
        state = self._state
        self._source = state.source()
        if self._source.collective:
            state.group.before = self._source.fence
            self._source.reductions = state.reducer
        place = {id(p): i for i, p in enumerate(state.trained)}
        shapes = {n: i.shape for n, i in ((i.name, i) for i in plan.params)}
        wanted = {id(p) for p in state.trained} | {id(p) for _, p in state.frozen if p.is_floating_point()}
        kept = self._persistent(wanted, shapes, zero_config)
        made = cut(self._model, {i: _numel(shapes[self._name[i]]) for i in wanted if i not in kept})
        groups = [(u.name, u.params, False) for u in made.units]
        if kept:
            groups.append(("(persistent)", [p for p in self._model.parameters() if id(p) in kept], True))
        for name, params, persistent in groups:
            order = sorted(params, key=lambda p: (id(p) not in place, place.get(id(p), 0)))
            self._units.append(self._make_unit(name, order, shapes, persistent, place))
        self._needs = {m: [self._units[i] for i in wanted] for m, wanted in made.needs.items()}
        self.blocks = made.blocks
        self.persistent_elems = self.live_elems = sum(u.elems for u in self._units if u.persistent)
        self.total_elems = sum(u.elems for u in self._units)
        for u in self._units:
            if u.persistent:
                self._ensure(u)
            else:
                u.storage.resize_(0)
                self._hide(u)

    def _persistent(self, wanted: set[int], shapes, zero_config) -> set[int]:
        """Small parameters stay: those up to stage3_param_persistence_threshold elements, until they are
        stage3_model_persistence_threshold."""
        out, room = set(), zero_config.stage3_model_persistence_threshold
        for p in sorted(
            (p for p in self._model.parameters() if id(p) in wanted), key=lambda p: _numel(shapes[self._name[id(p)]])
        ):
            n = _numel(shapes[self._name[id(p)]])
            if n > zero_config.stage3_param_persistence_threshold or n > room:
                break
            room -= n
            out.add(id(p))
        return out

    def _make_unit(self, name: str, params, shapes, persistent: bool, place) -> Unit:
        offsets, at = [], 0
        for p in params:
            offsets.append(at)
            at += padded(_numel(shapes[self._name[id(p)]]))
        flat = torch.zeros(at, dtype=self._state.dtype, device=self._state.device)
        unit = Unit(
            len(self._units),
            name,
            list(params),
            offsets,
            sum(_numel(shapes[self._name[id(p)]]) for p in params),
            persistent,
            flat,
        )
        self._source.add(unit, [self._state.source_of(p) for p in params])
        for p, offset in zip(params, offsets):
            shape = shapes[self._name[id(p)]]
            p.data = flat[offset : offset + _numel(shape)].view(shape)
            unit.kinds.append(type(p))
            p._deepc_owner = self
            self._unit_of[id(p)] = unit
        unit.trained = frozenset(id(p) for p in params if id(p) in place)
        unit.live = persistent
        unit.base_refs = torch._C._storage_Use_Count(unit.key)
        return unit

    def _show(self, unit: Unit) -> None:
        for p, kind in zip(unit.params, unit.kinds):
            p.__class__ = kind

    def _hide(self, unit: Unit) -> None:
        for p, kind in zip(unit.params, unit.kinds):
            p.__class__ = released_class(kind)

    # ---- gather and release ------------------------------------------------------------------------------------------
    def _ensure(self, unit: Unit) -> None:
        """Returns when the unit's values are there."""
        self._clock += 1
        unit.stamp = self._clock
        if not unit.live or not unit.fresh:
            self._allocate(unit)
            self._start([unit])
        if unit.arriving:
            unit.arriving = False
            self._source.complete(unit)

    def _allocate(self, unit: Unit) -> None:
        """Storage for a unit; it counts as live from here on."""
        if unit.live:
            return
        self._make_room(unit.elems)
        unit.storage.resize_(unit.nbytes)
        unit.live = True
        self.live_elems += unit.elems
        self._stats["live_elems_max"] = max(self._stats["live_elems_max"], self.live_elems)

    def _start(self, units: Sequence[Unit]) -> None:
        """Begins the gathers of units that have storage."""
        for unit in units:
            unit.fresh = unit.arriving = True
            self._stats["gathers"] += 1
            self._stats["gathered_elems"] += unit.elems
        with torch.no_grad():
            self._source.begin(units)

    def _make_room(self, elems: int) -> None:
        """Releases idle units, least recently used first, until `elems` more are within stage3_max_live_parameters.
        What is needed now comes in any case."""
        if self.live_elems + elems <= self._max_live:
            return
        for unit in sorted(
            (u for u in self._units if u.live and not u.uses and not u.persistent), key=lambda u: u.stamp
        ):
            self._release(unit)
            if self.live_elems + elems <= self._max_live:
                return

    def _release(self, unit: Unit) -> bool:
        """Frees the unit's storage unless it is in use, or something else than the unit's own tensors refers to it."""
        if unit.persistent or not unit.live or unit.uses or self._holds:
            return False
        if unit.arriving:
            unit.arriving = False
            self._source.complete(unit)
        if torch._C._storage_Use_Count(unit.key) > unit.base_refs:
            self._stats["blocked"] += unit not in self._blocked
            self._blocked.add(unit)
            return False
        self._blocked.discard(unit)
        unit.storage.resize_(0)
        unit.live = unit.fresh = False
        self.live_elems -= unit.elems
        self._stats["releases"] += 1
        return True

    def _use(self, unit: Unit) -> None:
        """One more running user; the unit's parameters can be read."""
        self._ensure(unit)
        if torch._C._current_graph_task_id() == -1:
            unit.todo = set(unit.trained)
        if unit.uses == 0 and not unit.persistent:
            self._show(unit)
        unit.uses += 1

    def _unuse(self, unit: Unit) -> None:
        unit.uses -= 1
        if unit.uses == 0 and not unit.persistent:
            self._hide(unit)
            if not unit.keep:
                self._release(unit)

    # ---- the order of use --------------------------------------------------------------------------------------------
    def _begin_pass_if_new(self) -> None:
        """A pass is what runs from the first use after a backward (or without gradients: from each outermost call) to
        the next such."""
        key = torch.is_grad_enabled()
        if self._frames or torch._C._current_graph_task_id() != -1 or self._holds:
            return
        if self._trace and not self._backward_seen and key and self._trace_key and len(self._trace) < MAX_TRACE:
            return  # a further forward before the backward
        self._end_pass()
        self._trace_key, self._order = key, self._orders.get(key)
        self._release_idle()

    def _end_pass(self) -> None:
        """Makes the order of the pass that ended, if it was another one than last time."""
        known = self._orders.get(self._trace_key)
        if self._trace and len(self._trace) < MAX_TRACE and (known is None or known.uses != tuple(self._trace)):
            room = max(0, self._max_live - self.persistent_elems)
            elems = [u.elems for u in self._units]
            self._orders[self._trace_key] = order_of(self._trace, elems, self._prefetch, room, self._max_reuse)
        self._trace, self._at, self._backward_seen, self._last_backward = [], 0, False, None

    def _note(self, unit: Unit) -> None:
        """Records a use and does what the order says: gathers ahead what comes, and says whether the unit stays after
        this use."""
        unit.keep = False
        if unit.persistent or self._holds:
            return
        if len(self._trace) < MAX_TRACE:
            self._trace.append(unit.index)
        order, i = self._order, self._at
        if order is None:
            return
        if i >= len(order.uses) or order.uses[i] != unit.index:
            self._order = None
            self._stats["order_misses"] += 1
            return
        self._at += 1
        for v in order.drop[i]:
            if v != unit.index:
                self._release(self._units[v])
        ahead = []
        for v in order.ahead[i]:
            coming = self._units[v]
            if not coming.live and self.live_elems + coming.elems <= self._max_live:
                self._allocate(coming)
                ahead.append(coming)
        if ahead:
            self._start(ahead)
            self._stats["prefetched"] += len(ahead)
        unit.keep = order.keep[i]

    def _release_idle(self) -> None:
        for unit in self._units:
            if unit.live and not unit.uses:
                self._release(unit)

    # ---- hooks -------------------------------------------------------------------------------------------------------
    def _hook(self) -> None:
        # Functions, not methods, and each for one module: a deep copy of the model takes them along, and they do
        # nothing there.
        for module, units in self._needs.items():
            self._handles.append(module.register_forward_pre_hook(self._make_enter(id(module), units), prepend=True))
            self._handles.append(module.register_forward_hook(self._make_leave(id(module)), always_call=True))
        for module in self._model.modules():
            if any(p is not None for p in module._parameters.values()):
                before, after = self._make_state_dict_hooks(id(module))
                self._handles.append(module.register_state_dict_pre_hook(before))
                self._handles.append(module._register_state_dict_hook(after))
        for p in self._state.trained:
            self._handles.append(p.register_post_accumulate_grad_hook(self._accumulated))

    def _make_enter(self, of: int, units: list[Unit]):
        @_outside_of_graphs
        def enter(module, args) -> None:
            if id(module) == of:
                self.enter(units)

        return enter

    def _make_leave(self, of: int):
        @_outside_of_graphs
        def leave(module, args, output) -> None:
            if id(module) == of:
                self.leave()

        return leave

    def _make_state_dict_hooks(self, of: int):
        def before(module, prefix, keep_vars) -> None:
            self._whole += id(module) == of

        def after(module, state_dict, prefix, local_metadata) -> None:
            if id(module) == of:
                self._after_state_dict()

        return before, after

    def enter(self, units: Sequence[Unit]) -> None:
        """A module that uses `units` begins."""
        self._begin_pass_if_new()
        for unit in units:
            self._use(unit)
            self._note(unit)
        self._frames.append((list(units), self._push()))

    def leave(self) -> None:
        if not self._frames:
            return
        held, pushed = self._frames.pop()
        if pushed:
            _saved_hooks._pop_saved_tensors_default_hooks()
        for unit in reversed(held):
            self._unuse(unit)

    def touched(self, p: torch.nn.Parameter, func) -> torch.Tensor | None:
        """`func` is about to read or write the released `p`: gathers it where it can know until when, else raises.
        Returns a value to take instead, or None."""
        unit = self._unit_of[id(p)]
        if self._whole and func is torch.Tensor.detach:
            return self.copy_of(p)
        self._stats["touches"] += 1
        task = torch._C._current_graph_task_id()
        if self._frames:
            self._use(unit)
            self._note(unit)
            self._frames[-1][0].append(unit)
        elif task != -1:
            self._use(unit)
            self._note(unit)
            self._in_task(task).append(unit)
        else:
            raise ReleasedParameterError(self._explain(p, func))
        return None

    def settle(self) -> None:
        """See param.Owner: units are released by what ends their use."""

    def _explain(self, p, func) -> str:
        what = getattr(func, "__name__", str(func))
        if what in ("__get__", "__set__"):
            what = getattr(getattr(func, "__self__", None), "__name__", what)
        if self._closed:
            return (
                f"parameter '{self._name[id(p)]}' was touched ({what}) after engine.destroy(), and its values were not"
                " on this rank: ranks share no memory here. Take engine.module_state_dict() before, or save a"
                " checkpoint"
            )
        return (
            f"parameter '{self._name[id(p)]}' {tuple(p.shape)} was touched ({what}) while it is released: at ZeRO stage"
            " 3 in streamed mode its values are on this rank only while the model runs forward or backward. Read it"
            " inside the forward of the model (any module of it), or under deepc.zero.GatheredParameters(params);"
            " write it with modifier_rank=0 there."
        )

    # ---- what autograd saves -----------------------------------------------------------------------------------------
    def _push(self) -> bool:
        """Puts our saved-tensor hooks on top of those that are there. False if they are on top already, or can't act
        here."""
        if not torch.is_grad_enabled() or not _saved_hooks._saved_tensors_hooks_is_enabled():
            return False
        below = _saved_hooks._top_saved_tensors_default_hooks(True)
        if below is not None and getattr(below[0], "_deepc_owner", None) is self:
            return False
        pack = self._make_pack(below)
        pack._deepc_owner = self
        _saved_hooks._push_saved_tensors_default_hooks(pack, self._unpack)
        return True

    def _make_pack(self, below):
        def pack(x: torch.Tensor):
            unit = self._by_storage.get(x.untyped_storage()._cdata) if x.layout == torch.strided else None
            if unit is not None:
                if unit.persistent:
                    return x, x._version
                at = x.storage_offset() * x.element_size() // unit.flat.element_size()
                return _Recipe(
                    unit,
                    bisect.bisect_right(unit.offsets, at) - 1,
                    x.dtype,
                    x.storage_offset(),
                    x.shape,
                    x.stride(),
                    x._version,
                )
            if below is not None:
                return below[1], below[0](x), None
            return x, x._version

        return pack

    def _unpack(self, packed):
        if type(packed) is _Recipe:
            return self._cook(packed)
        if len(packed) == 3:
            return packed[0](packed[1])
        x, version = packed
        if x._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation:"
                f" {str(x.dtype).removeprefix('torch.')} {list(x.shape)} is at version {x._version}; expected version"
                f" {version} instead."
            )
        return x

    def _cook(self, r: _Recipe) -> torch.Tensor:
        unit = r.unit
        p = unit.params[r.param]
        if version_of(p) != r.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation:"
                f" parameter '{self._name[id(p)]}' is at version {version_of(p)}; expected version {r.version} instead"
                " (a step of the engine is such an operation: run backward before it)."
            )
        task = torch._C._current_graph_task_id()
        if task != -1:
            self._in_task(task)
        self._ensure(unit)
        if unit is not self._last_backward:
            before, self._last_backward = self._last_backward, unit
            self._note(unit)
            if before is not None and not before.todo:
                self._release(before)  # nothing will say that its last gradient has come
        return torch.empty(0, dtype=r.dtype, device=unit.flat.device).set_(unit.storage, r.offset, r.shape, r.stride)

    # ---- backward ----------------------------------------------------------------------------------------------------
    def _in_task(self, task: int) -> list[Unit]:
        if task not in self._tasks:
            self._backward_seen = True
            self._tasks[task] = []
            Variable._execution_engine.queue_callback(lambda: self._end_task(task))
        return self._tasks[task]

    def _end_task(self, task: int) -> None:
        for unit in self._tasks.pop(task, ()):
            self._unuse(unit)
        if not self._tasks:
            self._last_backward = None
        self._release_idle()

    def _accumulated(self, p: torch.Tensor) -> None:
        unit = self._unit_of[id(p)]
        unit.todo.discard(id(p))
        if unit.todo or not unit.live:
            return
        for touched in self._tasks.values():
            while (
                unit in touched
            ):  # a recomputation without the module's hooks; what it saved keeps the storage as long as needed
                touched.remove(unit)
                self._unuse(unit)
        if unit is self._last_backward:
            self._last_backward = None
        for waiting in [*self._blocked, unit]:
            self._release(waiting)

    # ---- whole parameters --------------------------------------------------------------------------------------------
    def _after_state_dict(self) -> None:
        self._whole = max(0, self._whole - 1)
        if not self._whole:
            copied, self._copied = self._copied, None
            if copied is not None:
                self._release(copied)

    @torch.no_grad()
    def copy_of(self, p: torch.nn.Parameter) -> torch.Tensor:
        """A whole copy of `p`'s values."""
        unit = self._unit_of[id(p)]
        i = next(i for i, q in enumerate(unit.params) if q is p)
        if (value := self._source.read(unit, i)) is None:
            self._ensure(unit)
            value = unit.flat[unit.offsets[i] : unit.offsets[i] + _numel(p.shape)]
            if self._copied is not unit:  # the last one stays: parameters of a unit are asked for one after the other
                if self._copied is not None:
                    self._release(self._copied)
                self._copied = unit
        return value.view(p.shape).clone()

    @torch.no_grad()
    def write(self, p: torch.nn.Parameter, value: torch.Tensor) -> None:
        """Changes what `p` is gathered from; see the source's `write`. What is gathered now stays as it is until
        `refresh`."""
        unit = self._unit_of[id(p)]
        self._source.write(unit, next(i for i, q in enumerate(unit.params) if q is p), value.reshape(-1))

    def replaced(self, p: torch.nn.Parameter) -> bool:
        """Whether a user put other memory under `p`."""
        with torch._C.DisableTorchFunctionSubclass():
            return p.untyped_storage()._cdata != self._unit_of[id(p)].key

    def keep(self, on: bool) -> None:
        """While on (it may be nested) nothing is released, and uses are not recorded."""
        self._holds += 1 if on else -1

    def settle_idle(self) -> None:
        """Releases what nothing uses, unless it is kept."""
        if not self._holds:
            self._release_idle()

    def holds(self, p: torch.nn.Parameter) -> bool:
        """Whether `p` comes and goes, or is persistent; False for parameters that are not floating-point."""
        return id(p) in self._unit_of

    def origin(self, p: torch.nn.Parameter) -> torch.Tensor:
        """[numel] what `p` is gathered from, where that is one piece of memory."""
        unit = self._unit_of[id(p)]
        return self._source.read(unit, next(i for i, q in enumerate(unit.params) if q is p))

    def hold(self, units: Sequence[Unit] | None = None) -> list[Unit]:
        """Gathers units (all of them: None) until `let_go`."""
        units = list(self._units if units is None else units)
        for unit in units:
            self._use(unit)
            unit.keep = False
        return units

    def let_go(self, units: Sequence[Unit]) -> None:
        for unit in units:
            self._unuse(unit)

    def units_of(self, params) -> list[Unit]:
        return list({u.index: u for p in params if (u := self._unit_of.get(id(p))) is not None}.values())

    def refresh(self) -> None:
        """After a step, or another change of the owners' values: what is gathered goes, or is gathered again where it
        is in use."""
        for unit in self._units:
            if unit.live and not self._release(unit):
                unit.fresh = False
                if unit.uses or unit.persistent:
                    self._ensure(unit)

    def stats(self) -> dict[str, int]:
        """Counted since the start: gathers, gathered_elems, prefetched (gathers begun ahead of use), releases, blocked
        (releases put off because something still referred to the storage), touches (uses outside of the parameter's
        module), order_misses (passes that left the recorded order), live_elems_max; and as they are: live_elems,
        persistent_elems, total_elems, units."""
        return {
            **self._stats,
            "live_elems": self.live_elems,
            "persistent_elems": self.persistent_elems,
            "total_elems": self.total_elems,
            "units": len(self._units),
        }

    def close(self) -> None:
        """Removes the hooks. Where gathers are one-sided every parameter gets its values back, for good."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._closed = True
        if self._source.collective:
            self._source.close()
            return
        for unit in self._units:
            self._ensure(unit)
            if not unit.persistent:
                self._show(unit)
                unit.uses += 1


class StreamedState(ModelState):
    """The model states of a rank in streamed mode. Where ranks share memory `flat` is the node's whole flat space, as
    in resident mode, and is what units are gathered from; else `flat` is this rank's shard alone [owned], and
    `frozen_flat` its part of the frozen parameters.
    """

    streamed: Streamed | None = None
    reducer: _RoundsReducer

    def stream(self, model: torch.nn.Module, zero_config) -> None:
        """From here on parameters come and go. After the hooks of the gradients."""
        for _, p in self.frozen:
            share(p)
        self.streamed = Streamed(model, self, zero_config)
        self.versions = [version_of(p) for p in self.trained]
        self._frozen_versions = self._versions_of_frozen()

    def _versions_of_frozen(self) -> dict[int, tuple[str, torch.nn.Parameter, int]]:
        return {
            id(p): (n, p, version_of(p)) for n, p in self.frozen if self.streamed is not None and self.streamed.holds(p)
        }

    def source(self):
        return CollectiveSource(self.plan.world, self.plan.rank, self.device) if self.plan.sharded else NodeSource()

    def source_of(self, p: torch.nn.Parameter):
        """What the source's `add` takes for `p`. Called before `p` is a view of its unit."""
        if not self.plan.sharded:
            return p.data.reshape(-1)
        if (index := self._place.get(id(p))) is None:
            return self._frozen_pieces(p)
        mine = {
            s.param_begin: self.flat[s.shard_begin : s.shard_begin + s.length]
            for s in self.plan.segments
            if s.param == index
        }
        return [
            (rank, s.param_begin, s.length, mine[s.param_begin] if rank == self.plan.rank else None)
            for rank, s in self.owners(index)
        ]

    # ---- the shard alone ---------------------------------------------------------------------------------------------
    def _make_flat(self) -> None:
        if not self.plan.sharded:
            super()._make_flat()
            return
        plan = self.plan
        self._part = (plan.frozen_elems // plan.world + ALIGN) // ALIGN * ALIGN  # of the frozen parameters, per rank
        zeros = (
            partial(memory.zeros, color=0) if self.device.type == "cpu" else partial(torch.zeros, device=self.device)
        )
        self.flat = zeros(plan.owned_elems, dtype=self.dtype)
        self.frozen_flat = zeros(self._part, dtype=self.dtype)
        self.flat_host = memory.zeros(plan.owned_elems, self.dtype, 6) if self.state_device != self.device else None

    def _frozen_pieces(self, p) -> list[tuple[int, int, int, torch.Tensor | None]]:
        """(rank, first element, elements, values if this rank's) of a frozen parameter: the frozen space is cut into
        one part per rank."""
        out, (at, n) = [], self._frozen_at[id(p)]
        for rank in range(at // self._part, (at + max(n, 1) - 1) // self._part + 1):
            lo, hi = max(at, rank * self._part), min(at + n, (rank + 1) * self._part)
            if lo < hi:
                mine = (
                    self.frozen_flat[lo - rank * self._part : hi - rank * self._part]
                    if rank == self.plan.rank
                    else None
                )
                out.append((rank, lo - at, hi - lo, mine))
        return out

    @torch.no_grad()
    def _bind(self) -> None:
        self._place = {id(p): i for i, p in enumerate(self.trained)}
        if not self.plan.sharded:
            super()._bind()
            return
        at = 0
        self._refuse_shared_memory()
        self._frozen_at: dict[int, tuple[int, int]] = {}
        pieces = self._segments_by_param()
        for i, p in enumerate(self.trained):
            value = self._from_rank_0(p, torch.float32 if self.master is not None else self.dtype)
            for s in pieces[i]:
                piece = value[s.param_begin : s.param_begin + s.length]
                self.flat[s.shard_begin : s.shard_begin + s.length].copy_(piece)
                if self.master is not None:
                    self.master[s.shard_begin : s.shard_begin + s.length].copy_(piece)
            p.data = torch.empty(0, dtype=self.dtype, device=self.device)  # a view of its unit soon
        for _, p in self.frozen:
            if not p.is_floating_point():
                give(p)
                p.data = p.data.to(self.device)
                self._broadcast_any(p.data)
                continue
            value = self._from_rank_0(p, self.dtype)
            self._frozen_at[id(p)] = (at, p.numel())
            at += padded(p.numel())
            for _, begin, n, mine in self._frozen_pieces(p):
                if mine is not None:
                    mine.copy_(value[begin : begin + n])
            p.data = torch.empty(0, dtype=self.dtype, device=self.device)
        if self.flat_host is not None:
            self.flat_host.copy_(self.flat)
        for p in self.trained:
            share(p)
        self.versions = [p._version for p in self.trained]

    def _from_rank_0(self, p, dtype: torch.dtype) -> torch.Tensor:
        known = give(p)
        value = p.data.reshape(-1).to(device=self.device, dtype=dtype, copy=not known)
        if not known:
            self.group.broadcast(value, 0)
        return value

    def make_reducer(self, wire: torch.dtype, pre_scale: float) -> TorchReducer:
        """The reducer over torch.distributed, whose reductions and the gathers go along. Collective."""
        self.reducer = _RoundsReducer(self, wire, pre_scale)
        return self.reducer

    # ---- the interface of ModelState ---------------------------------------------------------------------------------
    def bump_versions(self) -> None:
        super().bump_versions()
        if self.streamed is not None:
            self.streamed.refresh()

    def changed(self) -> list[int]:
        if self.streamed is None:
            return super().changed()
        return [i for i, p in enumerate(self.trained) if version_of(p) != self.versions[i] or self.streamed.replaced(p)]

    def inert(self, rows: Sequence) -> list:
        return [r for r in rows if r[0].removeprefix("zero_optimization.") not in HONOURED]

    def keep_gathered(self) -> Whole:
        return _Kept(self.streamed)

    def compile(self, *args, **kwargs) -> None:
        """Compiles the forward of every block (units.py); hooks run around it."""
        for block in self.streamed.blocks:
            block.forward = torch.compile(block.forward, *args, **kwargs)

    def is_available(self, p: torch.nn.Parameter) -> bool:
        return not isinstance(p, Released)

    def full_param(self, index: int) -> torch.Tensor:
        return self.streamed.copy_of(self.trained[index]).view(-1) if self.plan.sharded else super().full_param(index)

    @torch.no_grad()
    def follow(self, index: int) -> None:
        if not self.plan.sharded:
            super().follow(index)
        else:
            for s in self.plan.segments:
                if s.param == index and self.master is not None:
                    self.flat[s.shard_begin : s.shard_begin + s.length].copy_(self.piece(s))
            self.group.barrier()
            increment_version([self.trained[index]])
            self.versions[index] += 1
        self.streamed.refresh()

    def frozen_value(self, p: torch.nn.Parameter) -> torch.Tensor:
        return self.streamed.copy_of(p) if self.streamed.holds(p) else super().frozen_value(p)

    def set_frozen(self, p: torch.nn.Parameter, value: torch.Tensor) -> None:
        if not self.streamed.holds(p):
            super().set_frozen(p, value)
        elif self.segment is None or self.group.leader:
            self.streamed.write(p, value)

    def whole(self, params: Params, writer: int | None) -> Whole:
        return _Gathered(self, [p for p in params if self.streamed.holds(p)], writer)

    def close(self) -> None:
        if self.streamed is not None:
            if self.plan.sharded and self.reducer.broken:
                self.reducer.tell(
                    CommError(f"rank {self.plan.rank} left in the middle of a backward (engine.destroy())")
                )
            self.streamed.close()


class _Gathered(Whole):
    """Parameters in streamed mode, gathered, and written by rank `writer` (None: nobody)."""

    def __init__(self, state: StreamedState, params: Params, writer: int | None) -> None:
        self._state, self._params, self._writer = state, params, writer

    def begin(self) -> None:
        streamed = self._state.streamed
        self._units = streamed.hold(streamed.units_of(self._params))

    @torch.no_grad()
    def end(self) -> None:
        if self._writer is not None:
            self._take(self._writer)
        self._state.streamed.let_go(self._units)
        if self._writer is not None:
            self._state.streamed.refresh()

    def _take(self, writer: int) -> None:
        """What the writer's parameters hold goes to where they are gathered from."""
        state, group = self._state, self._state.group
        group.barrier()  # nobody gathers any more
        for p in self._params:
            if state.plan.sharded:
                value = p.detach().clone().view(-1)
                group.broadcast(value, writer)
                state.streamed.write(p, value)
            elif state.plan.rank == writer:
                state.streamed.write(p, p.detach())
        group.barrier()
        for p in self._params if group.nodes > 1 else ():
            group.spread(state.streamed.origin(p), writer)
        if group.nodes > 1:
            group.barrier()


class _Kept(Whole):
    """All units of streamed mode, gathered once for many forward calls."""

    def __init__(self, streamed: Streamed) -> None:
        self._streamed = streamed

    def begin(self) -> None:
        self._units = self._streamed.hold()
        self._streamed.keep(True)

    def end(self) -> None:
        self._streamed.keep(False)
        self._streamed.let_go(self._units)
        self._streamed.settle_idle()


class _RoundsReducer(TorchReducer):
    """TorchReducer of ranks whose gathers are rounds (rounds.py). At the end of a pass, to which ranks come from
    different gathers, they meet before they wait for it. In each round they say how many buckets they have ready. On a
    device, where a collective occupies its queue until all ranks have come to it, reductions begin when all ranks have
    the bucket, behind the round's gathers: in one order on all ranks."""

    def __init__(self, state: StreamedState, wire: torch.dtype, pre_scale: float) -> None:
        super().__init__(state.plan, state.device, state.acc, state.partial, wire, pre_scale)
        self._state, self._in_order = state, state.device.type != "cpu" and state.plan.sharded

    def begin(self, assign: bool, norm: bool) -> None:
        super().begin(assign, norm)
        if self._in_order:
            self._limit = 0

    def _meet(self) -> None:
        self._state.group.before()

    def ready(self) -> int:
        """Buckets since the start that this rank has all gradients of, from the front of their order."""
        return self._passes * self._plan.layout.nbuckets + (self._states.ready if self._open else 0)

    def agreed(self, least: int) -> None:
        """All ranks are at least so far."""
        if not self._open:
            return
        self._known = max(0, least - self._passes * self._plan.layout.nbuckets)
        if self._in_order:
            self._limit = self._known
            self._begin_complete()
        self._hold_back()

    def tell(self, error: BaseException) -> None:
        source = self._state.streamed._source if self._state.streamed is not None else None
        if isinstance(source, CollectiveSource):
            source.fail(error)


def version_of(p: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return p._version


def _numel(shape: Sequence[int]) -> int:
    n = 1
    for s in shape:
        n *= s
    return n


def _outside_of_graphs(fn):
    return torch._dynamo.disable(
        fn,
        reason=(
            "ZeRO-3's streamed mode gathers and releases parameters around each block, which can't be part of a graph: "
            "compile per block, with engine.compile(), instead of the whole model"
        ),
    )
