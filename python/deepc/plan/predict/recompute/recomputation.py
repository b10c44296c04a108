"""Recomputation by budget in a forward: the blocks of a model are measured in a forward that recomputes all of them,
and from then on those are recomputed, or have what they saved on disk, that cost the least time (choice.py). By
torch.utils.checkpoint, so the numbers are those of no recomputation.

The engine has one (engine/states/recompute.py), and the memory plan's dry run has one on tensors without values."""

from __future__ import annotations

import contextlib
import functools
import heapq
import logging
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint

from ....core.foreign import private
from ....errors import ConfigError
from ....nn import rows
from . import choice as recompute
from .blocks import Hand, find_blocks, hand_of, leave, take
from .buffers import Before, Changed
from .choice import Call, Choice, Rates

KEY = "activation_checkpointing.budget"
_SMALLER = 0.8  # a batch of less than this part of what a plan was made for is measured for itself
_Shapes = tuple[tuple[int, ...], ...]

_log = logging.getLogger("deepc")


class Recomputation:
    """The blocks of a model. Without a budget it does nothing. blocks: None: those that find_blocks finds, of which
    there must be some; else these, of a part of a model.

    What differs between an engine and a dry run is in the methods of the first part."""

    def __init__(
        self, module: torch.nn.Module, budget: int | None, blocks: list[torch.nn.Module] | None = None
    ) -> None:
        self.budget = budget
        self._module = module
        self._blocks: list[torch.nn.Module] = []
        # of a stage of a pipeline (else 0), by the shapes that its forward gets
        self._plans: dict[tuple[int, _Shapes], _Plan] = {}
        self._in_flight = 1
        self._ends: int | None = None  # bytes that a forward in flight leaves at most; None: equal parts of the budget
        self._unsettled = False  # some plan was made while others were in flight, not together with them
        self._now: _Measured | Choice | None = None  # of the forward that runs
        self._count = 0
        self._changed = Changed(self.differ)
        if budget is None:
            return
        self._refuse()
        self._blocks = find_blocks(module) if blocks is None else blocks
        if not self._blocks and blocks is None:
            raise ConfigError(
                f"{KEY}: {type(module).__name__} has no torch.nn.ModuleList or Sequential of blocks that could be"
                " recomputed; use torch.utils.checkpoint inside the model, and remove the key"
            )
        if any(h is not None and h.leads for h in map(hand_of, self._blocks)):  # another engine's, of the same model
            self.budget, self._blocks = None, []
            return
        hand = Hand(weakref.ref(self))
        for block in self._blocks:
            take(block, hand)

    # ---- what an engine knows better ---------------------------------------------------------------------------------
    movable_from: int | None = None  # bytes of a saved value that may go to disk; None: there is no disk
    on_their_way = 4  # values that are written, or read ahead, at a time (offload/spill.py)

    def _refuse(self) -> None:
        """Raises for what can't be recomputed."""
        for name, m in self._module.named_modules():
            if getattr(m, "gradient_checkpointing", False) and hand_of(m) is None:
                how = "gradient_checkpointing_enable() (gradient_checkpointing of TrainingArguments)"
                raise _twice(f"{name or 'the model'} recomputes already", how)

    def clock(self, args: tuple[Any, ...]) -> float:
        """Seconds, when what was asked for with `args` has been computed."""
        raise NotImplementedError

    def storage(self, x: torch.Tensor) -> tuple[int, int] | None:
        """(a name that no other living storage has, bytes); None where it has none."""
        if x.layout != torch.strided:
            return None
        s = x.untyped_storage()
        return s.data_ptr(), s.nbytes()

    def held_anyway(self) -> set[int]:
        """Names of the storages of the model itself."""
        held = (self.storage(t) for t in (*self._module.parameters(), *self._module.buffers()))
        return {s[0] for s in held if s is not None}

    def differ(self, was: torch.Tensor, now: torch.Tensor) -> bool:
        """Whether a buffer has other values than its copy. Kernels write without a version, as batch norm's do; into
        sparse tensors none does."""
        return was.layout == torch.strided and not was.is_meta and not torch.equal(was, now)

    def agreed(self, calls: list[Call], outside: int) -> tuple[list[Call], int]:
        """What all ranks that compute a block together make of what each has measured."""
        return calls, outside

    def for_all(self, shapes: _Shapes) -> _Shapes:
        """What a forward gets, of all ranks that take one choice: none of them gets more."""
        return shapes

    def begin(self) -> None:
        """A forward begins."""

    def rates(self) -> Rates | None:
        """Of the disk; None: there is none."""
        return None

    def moved(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """A block's call whose saved values go to disk."""
        return function(*args)

    # ---- around a forward --------------------------------------------------------------------------------------------
    def begin_batch(self, in_flight: Callable[[], int]) -> None:
        """Of a pipeline: up to `in_flight()` forwards of this rank wait for their backwards at a time (asked with a
        budget only). What has been measured is chosen anew, for all of them together. ConfigError where the budget is
        less than that needs."""
        if self.budget is None or ((now := in_flight()) == self._in_flight and not self._unsettled):
            return
        self._in_flight, self._ends, self._unsettled = now, None, bool(self._plans)
        if not self._plans:
            return
        forwards = [plan.forward for plan in self._plans.values()]
        found = recompute.choose_together(forwards, self.budget, now, self.rates())
        if found is None:
            raise self._too_small(recompute.least_together(forwards, now))
        (self._ends, choices), self._unsettled = found, False
        self._plans = {k: p._replace(choice=c) for (k, p), c in zip(self._plans.items(), choices, strict=True)}
        self._say()

    @private.uncompiled
    def around(self, given: Any, stage: int = 0) -> contextlib.AbstractContextManager[Any]:
        """Context of a forward of `given` (any nesting of tensors), of a pipeline's stage. ConfigError at its end where
        the budget is less than recomputing everything needs."""
        if self.budget is None or not torch.is_grad_enabled() or not self._module.training:
            return contextlib.nullcontext()
        return self._forward(self.budget, stage, self.for_all(_shapes(given)))

    @contextlib.contextmanager
    def _forward(self, budget: int, stage: int, shapes: _Shapes) -> Iterator[None]:
        self.begin()
        plan = self._plan_for(stage, shapes)
        measured = _Measured(self) if plan is None else None
        self._now, self._count = plan or measured, 0
        try:
            with contextlib.ExitStack() as stack:
                if measured is not None:
                    stack.enter_context(rows.measured())
                    stack.enter_context(measured.hooks())
                yield
        finally:
            self._now = None
        if measured is not None:
            self._choose(measured, stage, shapes, budget)

    def _plan_for(self, stage: int, shapes: _Shapes) -> Choice | None:
        """The plan of the least batch that was measured and is nowhere smaller, unless it is much larger."""
        size = _numel_of(shapes)
        for larger in sorted((s for at, s in self._plans if at == stage), key=_numel_of):
            if _covers(larger, shapes):
                return self._plans[stage, larger].choice if size >= _SMALLER * _numel_of(larger) else None
        return None

    def _choose(self, measured: _Measured, stage: int, shapes: _Shapes, budget: int) -> None:
        calls, outside = self.agreed(*measured.finish())
        ends = budget // self._in_flight if self._ends is None else self._ends
        most = recompute.beside(budget, self._in_flight, ends)
        found = recompute.choose(calls, outside, most, self.rates(), ends)
        if found is None:
            needed = recompute.least_together([(calls, outside)], self._in_flight)
            if needed > budget:
                raise self._too_small(needed, f" ({outside} of them outside of the {len(calls)} calls of blocks)")
            found = recompute.all_again(calls, outside)  # until the next batch, when all are chosen together
        self._plans[stage, shapes] = _Plan((calls, outside), found)
        self._unsettled = self._in_flight > 1
        if not self._unsettled:
            self._say()

    def _too_small(self, needed: int, of: str = "") -> ConfigError:
        waiting = f", {self._in_flight} of which wait for their backwards at a time," if self._in_flight > 1 else ""
        return ConfigError(
            f"{KEY} = {self.budget} bytes is less than this forward needs{waiting} although it recomputes every block:"
            f" {needed}{of}. Give as much, a smaller micro-batch, or shorter sequences"
        )

    def _say(self) -> None:
        _log.info("recomputation: %s", self.in_words())

    def in_words(self) -> str:
        """The plan; "" before there is one."""
        if not (told := self.stats()):
            return ""
        disk = f", {told['on_disk']} on disk" if told["on_disk"] else ""
        together = f", {self._in_flight} micro-batches at a time" if self._in_flight > 1 else ""
        return (
            f"{told['recomputed']} of {told['calls']} calls of blocks{disk}, {told['peak_bytes'] / 2**20:.1f} MiB held"
            f" of a budget of {(self.budget or 0) / 2**20:.1f} ({told['whole_bytes'] / 2**20:.1f} without){together}"
        )

    def stats(self) -> dict[str, float]:
        """Of the plan for the largest batch yet, of all of this rank's stages: "calls" of blocks, "recomputed" ones,
        those "on_disk"; "in_flight" forwards that wait for their backwards at a time, "peak_bytes" that autograd holds
        at most for them, "least_bytes" and "whole_bytes" with all and none recomputed, "seconds" that the choice costs
        each time."""
        largest: dict[int, _Shapes] = {}
        for stage, shapes in self._plans:
            largest[stage] = max(largest.get(stage, shapes), shapes, key=_numel_of)
        if not largest:
            return {}
        plans = [self._plans[key] for key in largest.items()]
        forwards, choices, n = [p.forward for p in plans], [p.choice for p in plans], self._in_flight
        return {
            "calls": sum(len(calls) for calls, _ in forwards),
            "recomputed": sum(sum(c.recomputed) for c in choices),
            "on_disk": sum(sum(c.moved) for c in choices),
            "in_flight": n,
            "peak_bytes": recompute.peak_together(forwards, [(c.recomputed, c.moved) for c in choices], n),
            "least_bytes": recompute.least_together(forwards, n),
            "whole_bytes": recompute.peak_together(forwards, [([False] * len(calls), ()) for calls, _ in forwards], n),
            "seconds": sum(c.seconds for c in choices),
        }

    def close(self) -> None:
        """The blocks run as they did before."""
        for block in self._blocks:
            leave(block)
        self._blocks = []

    # ---- a block -----------------------------------------------------------------------------------------------------
    @private.uncompiled_itself
    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """A block's forward, in a forward of the engine."""
        now = self._now
        if not torch.is_grad_enabled():
            return function(*args)
        if (now is None and private.graph_task_id() != -1) or (now is not None and _inside_a_checkpoint()):
            kind = type(next(iter(_modules_of(function)), self._module)).__name__
            how = "torch.utils.checkpoint, or deepspeed.checkpointing,"
            raise _twice(f"the model recomputes its {kind} already, by a checkpoint around it", how)
        if now is None:
            return function(*args)
        k, self._count = self._count, self._count + 1
        if isinstance(now, Choice):
            if k < len(now.recomputed) and not now.recomputed[k]:
                return self.moved(function, args) if k < len(now.moved) and now.moved[k] else function(*args)
            return _checkpoint(self._before(function, args), function, args)
        before = now.before[k] = self._before(function, args)
        return _checkpoint(before, functools.partial(now.call, k, function), args)

    def _before(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Before:
        return Before(self._changed, _modules_of(function), tensors_of(function, args))


def _twice(found: str, how: str) -> ConfigError:
    return ConfigError(f"{KEY} chooses what is recomputed, but {found}; leave {how} out, or remove the key")


def _inside_a_checkpoint() -> bool:
    """Whether what is saved now goes to a checkpoint of torch's that does not re-enter."""
    around = private.top_saved_hooks(False)
    return bool(around) and getattr(around[0], "__module__", "") == "torch.utils.checkpoint"


class _Plan(NamedTuple):
    """Of a forward: (calls, bytes outside of them), and what is done."""

    forward: tuple[list[Call], int]
    choice: Choice


class _Measured:
    """What a forward saves, in which all blocks are recomputed."""

    def __init__(self, by: Recomputation) -> None:
        self._by = by
        self._outside: dict[int, int] = {}  # storage -> bytes
        self._calls: dict[int, Call] = {}
        self.before: dict[int, Before] = {}  # of the calls
        self._inputs: set[int] = set()

    def hooks(self) -> contextlib.AbstractContextManager[Any]:
        """Sees what is saved outside of the blocks; what is around keeps it."""
        return seen_by(self._see)

    def _see(self, x: torch.Tensor) -> None:
        found = self._by.storage(x)
        if found is not None and found[0] not in self._outside and found[0] not in self._by.held_anyway():
            self._outside[found[0]] = rows.at_most(found[1], x)

    @private.uncompiled_itself
    def call(self, k: int, function: Callable[..., Any], *args: Any) -> Any:
        """The k-th call, inside its checkpoint: once in the forward, which is measured, and once in backward."""
        if k in self._calls:
            return function(*args)
        by = self._by
        given = dict(s for s in map(by.storage, tensors_of(function, args)) if s is not None)
        held = by.held_anyway()
        mine = {at: n for at, n in given.items() if at not in self._inputs and at not in held}
        self._inputs.update(mine)
        saved: dict[int, tuple[int, torch.Tensor]] = {}  # they live until the end: no name is another's meanwhile

        def see(x: torch.Tensor) -> None:
            if (found := by.storage(x)) is not None:
                nbytes = max(rows.at_most(found[1], x), saved[found[0]][0] if found[0] in saved else 0)
                saved[found[0]] = nbytes, x

        outside = sum(n for at, n in self._outside.items() if at not in self._inputs)
        begin = by.clock(args)
        with seen_by(see):
            out = function(*args)
        seconds = by.clock(args) - begin
        model = by.held_anyway()  # while the block's own parameters are there
        sizes = [n for at, (n, _) in saved.items() if at not in given and at not in model]
        saved.clear()  # the graph holds `see`: a saved tensor knows what has packed it
        movable = [n for n in sizes if by.movable_from is not None and n >= by.movable_from]
        moving = _on_their_way(movable, by.on_their_way)
        self._calls[k] = Call(sum(sizes), sum(mine.values()), outside, seconds, sum(movable), moving)
        return out

    def finish(self) -> tuple[list[Call], int]:
        """The calls in order, and the bytes outside of them. A call that is recomputed holds copies of buffers as well
        as its inputs; one that keeps has no such copies, and saves that much less here."""
        calls = []
        for k, c in sorted(self._calls.items()):
            copies = min(self.before[k].nbytes, c.saved)
            calls.append(replace(c, saved=c.saved - copies, inputs=c.inputs + copies))
        self.before.clear()
        return alike(calls), sum(n for at, n in self._outside.items() if at not in self._inputs)


def _on_their_way(values: list[int], count: int) -> int:
    """Bytes of the `count` largest of a block's values, or, where it has fewer, of those of several such blocks."""
    if not values:
        return 0
    blocks, rest = divmod(count, len(values))
    return blocks * sum(values) + sum(heapq.nlargest(rest, values))


def alike(calls: list[Call]) -> list[Call]:
    """Equal blocks cost the same: what differs is noise, and most of it is the first one's."""
    times: dict[tuple[int, int], list[float]] = {}
    for c in calls:
        times.setdefault((c.saved, c.inputs), []).append(c.seconds)
    median = {key: sorted(found)[len(found) // 2] for key, found in times.items()}
    return [Call(c.saved, c.inputs, c.outside, median[c.saved, c.inputs], c.movable, c.moving) for c in calls]


@contextlib.contextmanager
def seen_by(see: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """What is saved inside goes to the hooks that are there already, or to autograd, and is seen."""
    around = private.top_saved_hooks(False)
    pack, unpack = around if around else (torch.Tensor.detach, lambda x: x)  # x itself would be a cycle

    def seen(x: torch.Tensor) -> Any:
        see(x)
        return pack(x)

    with torch.autograd.graph.saved_tensors_hooks(seen, unpack):
        yield


def tensors_of(function: Callable[..., Any], args: tuple[Any, ...]) -> list[torch.Tensor]:
    """What a block gets; keywords are bound in `function` (transformers' and ours)."""
    keywords = function.keywords if isinstance(function, functools.partial) else {}
    found = private.tree_leaves((args, keywords))
    return [t for t in found if isinstance(t, torch.Tensor)]


def _shapes(given: Any) -> _Shapes:
    return tuple(tuple(t.shape) for t in _inside(given))


def _inside(given: Any, levels: int = 2) -> Iterator[torch.Tensor]:
    """The tensors of a batch, also in what torch's trees take for leaves: a tokenizer's mapping, a dataclass, an object
    of the script's."""
    for leaf in private.tree_leaves(given):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, torch.nn.Module) or isinstance(leaf, type) or not levels:
            continue
        elif isinstance(leaf, Mapping):
            yield from _inside(list(leaf.values()), levels - 1)
        elif isinstance(parts := getattr(leaf, "__dict__", None), dict):
            yield from _inside(list(parts.values()), levels - 1)


def _numel_of(shapes: _Shapes) -> int:
    return sum(map(math.prod, shapes))


def _covers(larger: _Shapes, shapes: _Shapes) -> bool:
    """Whether no size of `shapes` is above the one of `larger`."""
    return [len(s) for s in larger] == [len(s) for s in shapes] and all(
        a >= b for s, t in zip(larger, shapes, strict=True) for a, b in zip(s, t, strict=True)
    )


@private.uncompiled_itself
def _checkpoint(before: Before, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """function(*args), which calls a block. before: of the block."""
    run = functools.partial(_as_in_the_forward, before, function)
    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=False)


@private.uncompiled_itself
def _as_in_the_forward(before: Before, function: Callable[..., Any], *args: Any) -> Any:
    """When it is a recomputation, buffers are those that the forward found (buffers.py), and tensors with a graph that
    modules keep as attributes (a load-balance loss) are those of the forward afterwards: the recomputed ones would hold
    all that was computed for them until the next forward."""
    if private.graph_task_id() == -1:
        before.begin()
        out = function(*args)
        before.end()
        return out
    attributes = [(m, {n: t for n, t in vars(m).items() if isinstance(t, torch.Tensor)}) for m in before.modules]
    before.put()
    try:
        return function(*args)
    finally:
        before.take_back()
        for module, had in attributes:
            for name, t in list(vars(module).items()):
                if isinstance(t, torch.Tensor) and t.grad_fn is not None and t is not had.get(name):
                    if name in had:
                        vars(module)[name] = had[name]
                    else:
                        del vars(module)[name]


def _modules_of(method: Callable[..., Any]) -> list[torch.nn.Module]:
    """Of a block's method, with its keywords bound or not."""
    while isinstance(method, functools.partial):
        method = method.func
    block = getattr(method, "__self__", None)
    return list(block.modules()) if isinstance(block, torch.nn.Module) else []
