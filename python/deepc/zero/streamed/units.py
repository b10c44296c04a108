"""The units of one engine in ZeRO-3's streamed mode: which are there, in which order they come, and the hooks of the
modules that use them. A unit's own states are param.Unit's; a fill of its storage does not touch autograd's version
counters, a step bumps them once.

When a unit is there:
 - **forward**: hooks of the modules that use it (plan/units.py) count its uses. While the count is 0 its parameters are
   `Released` (param.py), so that any other touch arrives in `touched`: inside a running module the unit is gathered and
   is in use until that module ends (parameters used outside of their module), in backward until it ends; elsewhere it
   is an error that names the parameter.
 - **backward**: when a node reads what was saved of it (saved.py): outputs of any type, losses that don't come from an
   output, several backward passes.
 - **release**: after its last use in forward; in backward after the gradients of all its trained parameters have been
   accumulated in this backward, and at the end of backward. A storage that anything else still refers to (a view that a
   user kept, a tensor inside a running node) is never freed: torch counts its users.

Tried and left: register_multi_grad_hook on the outputs of modules to gather for backward. It misses what leaves a
module another way than by its output (a loss kept in an attribute), it must gather all that a module used at once, and
what the module saved has to be held until its gradients are there, frozen parameters until the end of backward."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...core.foreign import private
from ...core.ops import casts
from ...core.telemetry import waits
from ...errors import DiskError, ReleasedParameterError, UnsupportedError
from ...plan.layout import keeps_bytes
from ...plan.order import Order, order_of
from ...plan.units import Node, cut
from ..parameters.param import FlatUnit, UnitState, as_slots, of_slots, slots
from ..sources import Piece, Source
from .saved import SavedTensors

if TYPE_CHECKING:
    from ...config.tree import ZeroConfig
    from ...plan.plan import Plan

# Keys of zero_optimization that act in this mode, on every device.
HONOURED = (
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
)
MAX_TRACE = 1 << 16  # uses of one pass that are remembered
_EVALUATION = -1  # among the keys of orders: a pass that is told as one, without gradients
_COUNTED = (
    "gathers",
    "gathered_elems",
    "prefetched",
    "releases",
    "blocked",
    "touches",
    "order_misses",
    "live_elems_max",
)
Params = Sequence[torch.nn.Parameter]


class StreamedUnits:
    """The streamed parameters of one engine. stats: see `stats()`.

    trained, frozen: name and parameter, which are released from here on (but the persistent ones). pieces_of: where the
    values of a parameter lie. like: a tensor of the parameters' dtype and device. max_live: elements that may be
    gathered at a time. distant: gathers are this rank's own reads of what is slower than its memory: of a disk, or of
    the host's memory where the model runs on a GPU. Then what the next pass begins with is
    read at the end of one that repeats (generation); and where nothing is trained, so that values stay what they are,
    as many units as there is room for are persistent, and two are read ahead in any case."""

    def __init__(
        self,
        model: torch.nn.Module,
        plan: Plan,
        trained: Sequence[tuple[str, torch.nn.Parameter]],
        frozen: Sequence[tuple[str, torch.nn.Parameter]],
        source: Source,
        pieces_of: Callable[[torch.nn.Parameter], Sequence[Piece]],
        like: torch.Tensor,
        config: ZeroConfig,
        max_live: int,
        distant: bool = False,
    ) -> None:
        self._model, self._source = model, source
        self._distant, self._pins = distant, distant and not trained
        self._prefetch, self._max_reuse = config.stage3_prefetch_bucket_size, config.stage3_max_reuse_distance
        self._max_live = max_live
        # Per running module: units in use, whether it pushed saved-tensor hooks, the backward in which it runs.
        self._frames: list[tuple[list[FlatUnit], bool, int]] = []
        self._holds = 0  # keep-gathered contexts
        self._whole = 0  # state_dict calls under way
        self._tasks: dict[int, list[FlatUnit]] = {}  # backward passes under way, with the units that were touched
        self._backwards = 0  # outermost ones so far: units count their gradients anew in each
        self._told = False  # inside of `one_pass`
        self._calls = 0  # `running` that are under way
        self._clock = 0
        self._copied: FlatUnit | None = None
        self._blocked: set[FlatUnit] = set()  # to be released as soon as nothing else refers to them
        self._trace: list[int] = []
        self._trace_key: int | None = None
        self._backward_seen = False
        self._last_backward: FlatUnit | None = None
        self._orders: dict[int | None, Order] = {}  # None: with gradients; else the identity of the outermost module
        self._order: Order | None = None
        self._at = 0
        self._closed = False
        self.live_elems = self.persistent_elems = 0
        self._stats = dict.fromkeys(_COUNTED, 0)
        self._name = {id(p): n for n, p in [*trained, *frozen]}
        shapes = {i.name: i.shape for i in plan.params}
        self._shapes = {i: shapes[n] for i, n in self._name.items()}  # a parameter's own may be gone by now
        self._unit_of: dict[int, FlatUnit] = {}
        self._units: list[FlatUnit] = []
        self._make_units([p for _, p in trained], [p for _, p in frozen], pieces_of, like, config)
        self._saved = SavedTensors(self._units, lambda p: self._name[id(p)], self._gather_for_backward)
        self._handles: list[Any] = []
        self._hook([p for _, p in trained])

    # ---- units -------------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def _make_units(
        self,
        trained: Params,
        frozen: Params,
        pieces_of: Callable[[torch.nn.Parameter], Sequence[Piece]],
        like: torch.Tensor,
        config: ZeroConfig,
    ) -> None:
        place = {id(p): i for i, p in enumerate(trained)}
        wanted = {*place, *(id(p) for p in frozen if casts(p) or keeps_bytes(p))}
        elems = {
            id(p): slots(p, math.prod(self._shapes[id(p)]), like.dtype) for p in (*trained, *frozen) if id(p) in wanted
        }
        kept = self._persistent(elems, config)
        tree, modules = tree_of(self._model)
        made = cut(tree, {i: n for i, n in elems.items() if i not in kept})
        stay = self._pinned([sum(elems[i] for i in u.params) for u in made.units], sum(elems[i] for i in kept))
        groups = [(u.name, u.params, at in stay) for at, u in enumerate(made.units)]
        known = {id(p): p for p in self._model.parameters()}
        if kept:
            groups.append(("(persistent)", [i for i in known if i in kept], True))
        for name, members, persistent in groups:
            order = [known[i] for i in sorted(members, key=lambda i: (i not in place, place.get(i, 0)))]
            pieces = [pieces_of(p) for p in order]  # before they are views of the unit
            shapes = [self._shapes[id(p)] for p in order]
            mine = frozenset(id(p) for p in order if id(p) in place)
            places = self._source.places(order)
            unit = FlatUnit(len(self._units), name, order, shapes, like, mine, persistent, places)
            self._source.add(unit, pieces)
            for p in order:
                p._deepc_owner = self  # type: ignore[attr-defined]
                self._unit_of[id(p)] = unit
            self._units.append(unit)
            if not persistent:
                unit.reshard()  # before the next one has storage
        self._needs = {modules[m]: [self._units[i] for i in used] for m, used in made.needs.items()}
        self.blocks = [modules[m] for m in made.blocks]
        self.persistent_elems = self.live_elems = sum(u.elems for u in self._units if u.persistent)
        self.total_elems = sum(u.elems for u in self._units)
        for unit in self._units:
            if unit.persistent:
                self._ensure(unit)

    def _persistent(self, elems: dict[int, int], config: ZeroConfig) -> set[int]:
        """Small parameters stay: those up to stage3_param_persistence_threshold elements, until they are
        stage3_model_persistence_threshold."""
        out: set[int] = set()
        room = config.stage3_model_persistence_threshold
        for p in sorted((p for p in self._model.parameters() if id(p) in elems), key=lambda p: elems[id(p)]):
            n = elems[id(p)]
            if n > config.stage3_param_persistence_threshold or n > room:
                break
            room -= n
            out.add(id(p))
        return out

    def _pinned(self, sizes: Sequence[int], kept: int) -> set[int]:
        """Which units of `sizes` elements stay for good, beside `kept` elements that do: all, or as many as leave room
        for one in use and two on their way, spread over the model, so that there is time to read those between them."""
        if not self._pins or not sizes:
            return set()
        room, total = self._max_live - kept, sum(sizes)
        if total <= room:
            return set(range(len(sizes)))
        self._prefetch = max(self._prefetch, 2 * max(sizes)) if self._prefetch else 0
        share = max(0, room - 3 * max(sizes)) / total
        out, due = set(), 0.0
        for at, n in enumerate(sizes):
            due += n * share
            if n <= due:
                due -= n
                out.add(at)
        return out

    # ---- gather and release ------------------------------------------------------------------------------------------
    def _ensure(self, unit: FlatUnit) -> None:
        """Returns when the unit's values are there."""
        self._clock += 1
        unit.stamp = self._clock
        if unit.ready:
            return
        with waits.span(f"gather {unit.name}", kind="parameters", elements=unit.elems):
            if unit.state in (UnitState.SHARDED, UnitState.STALE):
                self._begin(unit)
                self._start([unit])
            if unit.state is UnitState.ARRIVING:
                self._finish(unit)

    def _begin(self, unit: FlatUnit) -> None:
        """Storage for a unit; it counts as live from here on."""
        new = not unit.live
        if new:
            self._make_room(unit.elems)
        unit.begin()
        if new:  # else there was no memory for it
            self.live_elems += unit.elems
            self._stats["live_elems_max"] = max(self._stats["live_elems_max"], self.live_elems)

    def _start(self, units: Sequence[FlatUnit]) -> None:
        """Begins the gathers of units that have storage."""
        self._stats["gathers"] += len(units)
        self._stats["gathered_elems"] += sum(unit.elems for unit in units)
        try:
            with torch.no_grad():
                self._source.begin(units)
        except BaseException:  # they are begun again when they are needed: nothing fills them now
            for unit in units:
                self._drop(unit)
            raise

    def _finish(self, unit: FlatUnit) -> None:
        self._source.complete(unit)
        unit.finish()

    def _drop(self, unit: FlatUnit) -> None:
        """Of what was gathered ahead, and nobody has come for: the owners may have written since."""
        self._source.drop(unit)
        unit.drop()

    def _make_room(self, elems: int) -> None:
        """Releases idle units, least recently used first, until `elems` more are within stage3_max_live_parameters.
        What is needed now comes in any case."""
        if self.live_elems + elems <= self._max_live:
            return
        idle = (u for u in self._units if u.live and not u.uses and not u.persistent)
        for unit in sorted(idle, key=lambda u: u.stamp):
            self._release(unit)
            if self.live_elems + elems <= self._max_live:
                return

    def _release(self, unit: FlatUnit) -> bool:
        """Frees the unit's storage unless it is in use, or something else than the unit's own tensors refers to it."""
        if unit.persistent or not unit.live or unit.uses or self._holds:
            return False
        if unit.state is UnitState.ARRIVING:
            self._drop(unit)
        if unit.referred:
            self._stats["blocked"] += unit not in self._blocked
            self._blocked.add(unit)
            return False
        self._blocked.discard(unit)
        unit.reshard()
        self.live_elems -= unit.elems
        self._stats["releases"] += 1
        return True

    def _use(self, unit: FlatUnit) -> None:
        """One more running user; the unit's parameters can be read."""
        self._ensure(unit)
        unit.use()

    def _unuse(self, unit: FlatUnit) -> None:
        unit.unuse()
        if unit.uses == 0 and not unit.persistent and not unit.keep:
            self._release(unit)

    # ---- the order of use --------------------------------------------------------------------------------------------
    def _begin_pass_if_new(self, outermost: int) -> None:
        """A pass is what runs from the first use after a backward (or without gradients: from each outermost call) to
        the next such. outermost: identity of the module whose call begins."""
        if self._told or self._frames or private.graph_task_id() != -1 or self._holds:
            return
        key = None if torch.is_grad_enabled() else outermost
        self._end_tasks()
        same = key == self._trace_key
        if self._trace and not self._backward_seen and same and key is None and len(self._trace) < MAX_TRACE:
            return  # a further forward before the backward
        repeats = self._distant and same and key is not None
        expected = repeats and self._order is not None and self._order.repeats and self._at == len(self._order.uses)
        self._end_pass(repeats)
        self._trace_key, self._order = key, self._orders.get(key)
        if not expected:  # else what is there was gathered for this pass
            self.release_idle()

    @contextlib.contextmanager
    def one_pass(self, trains: bool) -> Iterator[None]:
        """All forwards and backwards inside are one pass, whatever their order: the batch of a pipeline, in which those
        of several micro-batches alternate. trains: with gradients."""
        key = None if trains else _EVALUATION
        self._end_tasks()
        self._end_pass(False)
        self._trace_key, self._order = key, self._orders.get(key)
        self.release_idle()
        self._told = True
        try:
            with self.running():
                yield
        finally:
            self._told = False
        self.release_idle()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around a forward or backward. torch calls `leave` of modules that an Exception ends, and not of those that a
        KeyboardInterrupt does, which end here; those of an earlier call that was not made inside of this, too."""
        if not self._calls and private.graph_task_id() == -1:
            self._end_modules(0)
        depth = len(self._frames)
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._end_modules(depth)

    def _end_modules(self, depth: int) -> None:
        """The end of all running modules but the outermost `depth`. What stood on top of a module's saved-tensor hooks
        has taken these away in place of its own: their number is right again when all are gone."""
        while len(self._frames) > depth:
            self.leave()

    def _end_tasks(self) -> None:
        """Of backwards that raised: autograd has not told their end."""
        for task in list(self._tasks):
            self._end_task(task)

    def _end_pass(self, repeats: bool) -> None:
        """Makes the order of the pass that ended, if it was another one than last time. repeats: such a pass
        follows."""
        known = self._orders.get(self._trace_key)
        new = known is None or known.uses != tuple(self._trace) or (repeats and not known.repeats)
        if self._trace and len(self._trace) < MAX_TRACE and new:
            room = max(0, self._max_live - self.persistent_elems)
            elems = [u.elems for u in self._units]
            made = order_of(self._trace, elems, self._prefetch, room, self._max_reuse, repeats)
            self._orders[self._trace_key] = made
        self._trace, self._at, self._backward_seen, self._last_backward = [], 0, False, None

    def _note(self, unit: FlatUnit) -> None:
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
        try:
            for v in order.ahead[i]:
                coming = self._units[v]
                if not coming.live and self.live_elems + coming.elems <= self._max_live:
                    self._begin(coming)
                    coming.keep = True
                    ahead.append(coming)
        finally:  # also where there was no memory for one more
            if ahead:
                self._start(ahead)
                self._stats["prefetched"] += len(ahead)
        unit.keep = order.keep[i]

    def _stays(self, unit: FlatUnit) -> bool:
        """Behind a backward in the middle of a pass: whether the order wants the unit for what comes."""
        return self._told and self._order is not None and unit.keep

    def release_idle(self) -> None:
        """Releases what nothing uses, unless it is kept."""
        for unit in self._units:
            if unit.live and not unit.uses and not self._stays(unit):
                self._release(unit)

    # ---- hooks -------------------------------------------------------------------------------------------------------
    def _hook(self, trained: Params) -> None:
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
        for p in trained:
            self._handles.append(p.register_post_accumulate_grad_hook(self._accumulated))

    def _make_enter(self, of: int, units: list[FlatUnit]) -> Callable[..., None]:
        def enter(module: torch.nn.Module, args: Any) -> None:
            if id(module) == of:
                self.enter(units, of)

        return _outside_of_graphs(enter)

    def _make_leave(self, of: int) -> Callable[..., None]:
        def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
            if id(module) == of:
                self.leave()

        return _outside_of_graphs(leave)

    def _make_state_dict_hooks(self, of: int) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
            self._whole += id(module) == of

        def after(module: torch.nn.Module, state_dict: Any, prefix: str, local_metadata: Any) -> None:
            if id(module) == of:
                self._after_state_dict()

        return before, after

    def enter(self, units: Sequence[FlatUnit], of: int) -> None:
        """The module with the identity `of`, which uses `units`, begins."""
        self._begin_pass_if_new(of)
        used: list[FlatUnit] = []
        try:
            for unit in units:
                self._use(unit)
                used.append(unit)
                self._note(unit)
        except BaseException:  # a disk that fails, or no memory; the module will not end
            for unit in used:
                self._unuse(unit)
            raise
        self._frames.append((list(units), self._saved.push(), private.graph_task_id()))

    def leave(self) -> None:
        """The module that began last ends."""
        if not self._frames:
            return
        held, pushed, task = self._frames.pop()
        if pushed and task == private.graph_task_id():  # a backward that was broken off has put back what was there
            self._saved.pop()
        for unit in reversed(held):
            self._unuse(unit)
        if not self._frames and not torch.is_grad_enabled():
            self.settle_reads()

    def settle_reads(self) -> None:
        """Returns when nothing reads what units are gathered from. After a forward without gradients, a backward, and
        gathers outside of both: who writes parameters then needs not wait."""
        self._source.settle()

    def touched(self, p: torch.nn.Parameter, func: Callable[..., Any]) -> torch.Tensor | None:
        """`func` is about to read or write the released `p`: gathers it where it can know until when, else raises.
        Returns a value to take instead, or None."""
        unit = self._unit_of[id(p)]
        if self._whole and func is torch.Tensor.detach:
            try:
                return self.copy_of(p)
            except DiskError:  # which ends that call, without its hooks
                self._whole = 1
                self._after_state_dict()
                raise
        self._stats["touches"] += 1
        task = private.graph_task_id()
        if not self._frames and task == -1:
            raise ReleasedParameterError(self._explain(p, func))
        self._use(unit)
        (self._frames[-1][0] if self._frames else self._in_task(task, unit)).append(unit)
        self._note(unit)
        return None

    def viewed(self, x: torch.Tensor) -> torch.nn.Parameter | None:
        """The parameter that all of `x` is, where `x` is no parameter and its values are there: what a node of
        backward gets that saved one."""
        unit = self._saved.unit_of(x)
        if unit is None or not unit.ready:
            return None
        at = x.storage_offset() * x.element_size() // unit.flat.element_size()
        return next((p for p, o in zip(unit.params, unit.offsets) if o == at and self._shapes[id(p)] == x.shape), None)

    def settle(self) -> None:
        """See param.Owner: units are released by what ends their use."""

    def _explain(self, p: torch.nn.Parameter, func: Callable[..., Any]) -> str:
        what = getattr(func, "__name__", str(func))
        if what in ("__get__", "__set__"):
            what = getattr(getattr(func, "__self__", None), "__name__", what)
        if self._closed:
            return (
                f"parameter '{self._name[id(p)]}' was touched ({what}) after engine.destroy(), and its values were not"
                " in this rank's memory: ranks share none here, or they lay on disk. Take engine.module_state_dict()"
                " before, or save a checkpoint"
            )
        return (
            f"parameter '{self._name[id(p)]}' {tuple(p.shape)} was touched ({what}) while it is released: at ZeRO stage"
            " 3 in streamed mode its values are on this rank only while the model runs forward or backward. Read it"
            " inside the forward of the model (any module of it), or under deepc.zero.GatheredParameters(params);"
            " write it with modifier_rank=0 there."
        )

    # ---- backward ----------------------------------------------------------------------------------------------------
    def _gather_for_backward(self, unit: FlatUnit) -> None:
        """A node of backward is about to read what was saved of `unit`."""
        task = private.graph_task_id()
        if task != -1:
            self._in_task(task, unit)
        self._ensure(unit)
        if unit is not self._last_backward:
            before, self._last_backward = self._last_backward, unit
            self._note(unit)
            if before is not None and not before.todo and not self._stays(before):
                self._release(before)  # nothing will say that its last gradient has come

    def _in_task(self, task: int, unit: FlatUnit) -> list[FlatUnit]:
        """Backward comes to `unit`. With several micro-batches in flight another backward may have been there since the
        forward: what is to come is counted from the first time in this one."""
        if task not in self._tasks:
            self._backwards += not self._tasks
            self._backward_seen = True
            self._tasks[task] = []
            private.at_end_of_backward(lambda: self._end_task(task))
        if unit.backward != self._backwards:
            unit.backward, unit.todo = self._backwards, set(unit.trained)
        return self._tasks[task]

    def _end_task(self, task: int) -> None:
        for unit in self._tasks.pop(task, ()):
            self._unuse(unit)
        if not self._tasks:
            self._last_backward = None
        self.release_idle()
        if not self._tasks:
            self.settle_reads()

    def _accumulated(self, p: torch.Tensor) -> None:
        """Backward is through with `p`; its gradient may come later, from elsewhere (pipeline/deferred.py)."""
        unit, task = self._unit_of[id(p)], private.graph_task_id()
        if task != -1:
            self._in_task(task, unit)
        unit.todo.discard(id(p))
        if unit.todo or not unit.live:
            return
        for touched in self._tasks.values():
            # A recomputation without the module's hooks; what it saved keeps the storage as long as needed.
            while unit in touched:
                touched.remove(unit)
                self._unuse(unit)
        if unit is self._last_backward:
            self._last_backward = None
        for waiting in [*self._blocked, unit]:
            if not self._stays(waiting):
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
        i = unit.place(p)
        if (value := self._source.read(unit, i)) is None:
            self._ensure(unit)
            value = unit.flat[unit.offsets[i] : unit.offsets[i] + unit.numels[i]]
            if self._copied is not unit:  # the last one stays: parameters of a unit are asked for one after the other
                if self._copied is not None:
                    self._release(self._copied)
                self._copied = unit
        return of_slots(p, p.shape, value).clone()

    @torch.no_grad()
    def write(self, p: torch.nn.Parameter, value: torch.Tensor) -> None:
        """Changes what `p` is gathered from; see the source's `write`. What is gathered now stays as it is until
        `refresh`."""
        unit = self._unit_of[id(p)]
        self._source.write(unit, unit.place(p), as_slots(p, value, unit.flat.dtype))

    def replaced(self, p: torch.nn.Parameter) -> bool:
        """Whether a user put other memory under `p`."""
        with private.without_torch_function():
            return bool(p.untyped_storage()._cdata != self._unit_of[id(p)].key)

    def keep(self, on: bool) -> None:
        """While on (it may be nested) nothing is released, and uses are not recorded."""
        self._holds += 1 if on else -1

    def holds(self, p: torch.nn.Parameter) -> bool:
        """Whether `p` comes and goes, or is persistent; False for parameters that are not floating-point, unless they
        keep their bytes."""
        return id(p) in self._unit_of

    def origin(self, p: torch.nn.Parameter) -> torch.Tensor | None:
        """[numel] what `p` is gathered from, where that is one piece of memory."""
        unit = self._unit_of[id(p)]
        return self._source.read(unit, unit.place(p))

    def hold(self, params: Iterable[torch.nn.Parameter] | None = None) -> list[FlatUnit]:
        """Gathers the units of `params` (all units: None) until `let_go`, which takes what this returns."""
        if params is None:
            units = list(self._units)
        else:
            units = list({u.index: u for p in params if (u := self._unit_of.get(id(p))) is not None}.values())
        for at, unit in enumerate(units):
            try:
                self._use(unit)
            except BaseException:  # a disk that fails
                self.let_go(units[:at])
                raise
            unit.keep = False
        self.settle_reads()
        return units

    def let_go(self, units: Sequence[FlatUnit]) -> None:
        """The end of a `hold`."""
        for unit in units:
            self._unuse(unit)

    def refresh(self) -> None:
        """After a step, or another change of the owners' values: what is gathered goes, or is gathered again where it
        is in use."""
        for unit in self._units:
            if unit.live and not self._release(unit):
                if unit.state is UnitState.ARRIVING:
                    self._drop(unit)
                if unit.ready:
                    unit.outdate()
                if unit.uses or unit.persistent:
                    self._ensure(unit)
        self.settle_reads()

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

    def fail(self, error: BaseException) -> None:
        """No rank waits for a gather with this one any more. From any thread."""
        self._source.fail(error)

    def close(self) -> None:
        """Removes the hooks. Where gathers are one-sided every parameter gets its values back, for good; where those
        are in host memory, which a device may have no room for, on the host."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._end_modules(0)
        again, self._closed = self._closed, True
        if not self._source.close() or again:
            return
        for unit in self._units:
            if self._distant:
                unit.leave([self._source.read(unit, i) for i in range(len(unit.params))])
            else:
                self._ensure(unit)
                unit.use()
            for p in unit.params:  # nobody asks any more, and with it all that values are gathered from would stay
                del p._deepc_owner  # type: ignore[attr-defined]


def tree_of(model: torch.nn.Module) -> tuple[Node, dict[Node, torch.nn.Module]]:
    """The model as plan/units.py takes it, and the module of every node. Parameters whose own module no hook sees the
    use of are their parent's: those in a ParameterList or ParameterDict, and those below a traced module."""
    nodes: dict[torch.nn.Module, Node] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.RecursiveScriptModule) and any(True for _ in module.parameters()):
            raise UnsupportedError(
                f"{repr(name) if name else 'the model'} is of torch.jit.script, whose modules take no hooks: at ZeRO"
                " stage 3 in streamed mode its parameters can't come and go. Leave the module as it was"
                " (engine.compile() makes it fast), or use stage 2"
            )
        listed = isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict))
        sequence = isinstance(module, torch.nn.Sequential) or getattr(module, "calls_in_turn", False)
        nodes[module] = Node("list" if listed else "sequence" if sequence else "call", [id(p) for p in _own(module)])
    for module, node in nodes.items():
        if not isinstance(module, torch.jit.ScriptModule):
            node.children = [(name, nodes[child]) for name, child in module._modules.items() if child is not None]
    return nodes[model], {node: module for module, node in nodes.items()}


def _own(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    if isinstance(module, torch.jit.ScriptModule):
        return list(module.parameters())
    own = [p for p in module._parameters.values() if p is not None]
    if not isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):
        held = (m for m in module._modules.values() if isinstance(m, (torch.nn.ParameterList, torch.nn.ParameterDict)))
        own += [p for m in held for p in _own(m)]
    return own


def _outside_of_graphs(fn: Callable[..., None]) -> Callable[..., None]:
    wrapped: Callable[..., None] = private.outside_of_graphs(
        fn,
        reason=(
            "ZeRO-3's streamed mode gathers and releases parameters around each block, which can't be part of a graph: "
            "compile per block, with engine.compile(), instead of the whole model"
        ),
    )
    return wrapped
