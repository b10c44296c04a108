"""Recomputation by budget (activation_checkpointing.budget): the blocks of a model are measured in a forward that
recomputes all of them, and from then on those are recomputed that cost the least time for what has to go
(plan/predict/recompute.py). By torch.utils.checkpoint, so the numbers are those of no recomputation."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint

from ...core.foreign import private
from ...errors import ConfigError, UnsupportedError
from ...parallel.expert.layer import MoE
from ...plan.predict import recompute
from ...plan.predict.recompute import Call, Choice
from ...zero.parameters.param import Released

KEY = "activation_checkpointing.budget"
_SMALLER = 0.8  # a batch of less than this part of what a plan was made for is measured for itself
_Shapes = tuple[tuple[int, ...], ...]

_log = logging.getLogger("deepc")


def find_blocks(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The elements of the outermost lists and sequences of `module` that repeat a class: half of a list's parameters or
    more are in elements of one class, of which there are at least two. Those without parameters are left out."""
    found: dict[torch.nn.Module, None] = {}

    def walk(parent: torch.nn.Module) -> None:
        for child in parent.children():
            if isinstance(child, (torch.nn.ModuleList, torch.nn.Sequential)) and _repeats(child):
                found.update((b, None) for b in child if _numel(b))
            else:
                walk(child)

    if isinstance(module, torch.nn.Sequential) and _repeats(module):
        found.update((b, None) for b in module if _numel(b))
    else:
        walk(module)
    return list(found)


def _numel(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _repeats(blocks: torch.nn.ModuleList | torch.nn.Sequential) -> bool:
    kinds: dict[type, list[int]] = {}
    for block in blocks:
        kinds.setdefault(type(block), []).append(_numel(block))
    most = max(kinds.values(), key=sum, default=[])
    return len(most) > 1 and sum(most) > 0 and 2 * sum(most) >= sum(map(sum, kinds.values()))


class Recomputation:
    """The blocks of an engine's model. Without a budget it does nothing. Each rank decides for itself."""

    def __init__(self, module: torch.nn.Module, budget: int | None) -> None:
        self.budget = budget
        self._module = module
        self._blocks: list[torch.nn.Module] = []
        self._plans: dict[_Shapes, tuple[list[Call], int, Choice]] = {}  # by the shapes that the forward gets
        self._now: _Measured | Choice | None = None  # of the forward that runs
        self._count = 0
        if budget is None:
            return
        self._refuse()
        self._blocks = find_blocks(module)
        if not self._blocks:
            raise ConfigError(
                f"{KEY}: {type(module).__name__} has no torch.nn.ModuleList or Sequential of blocks that could be"
                " recomputed; use torch.utils.checkpoint inside the model, and remove the key"
            )
        if any(h is not None and h.leads for h in map(_hand_of, self._blocks)):  # another engine's, of the same model
            self.budget, self._blocks = None, []
            return
        hand = _Hand(weakref.ref(self))
        for block in self._blocks:
            _take(block, hand)

    def _refuse(self) -> None:
        for name, m in self._module.named_modules():
            if getattr(m, "gradient_checkpointing", False) and _hand_of(m) is None:
                raise ConfigError(
                    f"{KEY} chooses what is recomputed, but {name or 'the model'} recomputes already; leave"
                    " gradient_checkpointing_enable() (gradient_checkpointing of TrainingArguments) out, or remove the"
                    " key"
                )
            if isinstance(m, MoE):
                raise UnsupportedError(
                    f"{KEY} does not exist for mixtures of experts ({name}): what ranks exchange inside a block would"
                    " have to be recomputed by all of them. Use torch.utils.checkpoint inside the model"
                )

    # ---- around a forward --------------------------------------------------------------------------------------------
    @private.uncompiled
    def around(self, given: Any) -> contextlib.AbstractContextManager[Any]:
        """Context of a forward of `given` (any nesting of tensors). ConfigError at its end where the budget is less
        than recomputing everything needs."""
        if self.budget is None or not torch.is_grad_enabled() or not self._module.training:
            return contextlib.nullcontext()
        return self._forward(self.budget, _shapes(given))

    @contextlib.contextmanager
    def _forward(self, budget: int, shapes: _Shapes) -> Iterator[None]:
        plan = self._plan_for(shapes)
        measured = _Measured(self._held_anyway) if plan is None else None
        self._now, self._count = plan or measured, 0
        try:
            with contextlib.nullcontext() if measured is None else measured.hooks():
                yield
        finally:
            self._now = None
        if measured is not None:
            self._choose(measured, shapes, budget)

    def _plan_for(self, shapes: _Shapes) -> Choice | None:
        """The plan of the least batch that was measured and is nowhere smaller, unless it is much larger."""
        size = _numel_of(shapes)
        for larger in sorted(self._plans, key=_numel_of):
            if _covers(larger, shapes):
                return self._plans[larger][2] if size >= _SMALLER * _numel_of(larger) else None
        return None

    def _held_anyway(self) -> set[int]:
        """Storages of the model itself, as far as they are there (streamed parameters come and go)."""
        held = [p for p in self._module.parameters() if not isinstance(p, Released)]
        return {t.untyped_storage().data_ptr() for t in (*held, *self._module.buffers())}

    def _choose(self, measured: _Measured, shapes: _Shapes, budget: int) -> None:
        calls, outside = measured.finish()
        found = recompute.choose(calls, outside, budget)
        if found is None:
            least = recompute.least(calls, outside)
            raise ConfigError(
                f"{KEY} = {budget} bytes is less than this forward needs although it recomputes every block: {least}"
                f" ({outside} of them outside of the {len(calls)} calls of blocks). Give as much, a smaller"
                " micro-batch, or shorter sequences"
            )
        self._plans[shapes] = (calls, outside, found)
        whole = recompute.peak(calls, outside, [False] * len(calls))
        _log.info(
            "recomputation: %d of %d calls of blocks, %.1f MiB held of a budget of %.1f (%.1f without)",
            sum(found.recomputed),
            len(calls),
            found.peak / 2**20,
            budget / 2**20,
            whole / 2**20,
        )

    def stats(self) -> dict[str, float]:
        """Of the plan for the largest batch yet: "calls" of blocks, "recomputed" ones, "peak_bytes" that autograd holds
        at most, "least_bytes" and "whole_bytes" with all and none recomputed, "seconds" that recomputing costs."""
        if not self._plans:
            return {}
        calls, outside, found = self._plans[max(self._plans, key=_numel_of)]
        return {
            "calls": len(calls),
            "recomputed": sum(found.recomputed),
            "peak_bytes": found.peak,
            "least_bytes": recompute.least(calls, outside),
            "whole_bytes": recompute.peak(calls, outside, [False] * len(calls)),
            "seconds": found.seconds,
        }

    def close(self) -> None:
        """The blocks run as they did before."""
        for block in self._blocks:
            _leave(block)
        self._blocks = []

    # ---- a block -----------------------------------------------------------------------------------------------------
    @private.uncompiled_itself
    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """A block's forward, in a forward of the engine."""
        now = self._now
        if now is None or not torch.is_grad_enabled():
            return function(*args)
        k, self._count = self._count, self._count + 1
        if isinstance(now, Choice):
            if k < len(now.recomputed) and not now.recomputed[k]:
                return function(*args)
            return _checkpoint(function, *args)
        return _checkpoint(functools.partial(now.call, k, function), *args)


class _Measured:
    """What a forward saves, in which all blocks are recomputed. held: tells the storages of the model itself."""

    def __init__(self, held: Callable[[], set[int]]) -> None:
        self._held = held
        self._outside: dict[int, int] = {}  # storage -> bytes
        self._calls: dict[int, Call] = {}
        self._inputs: set[int] = set()

    def hooks(self) -> contextlib.AbstractContextManager[Any]:
        """Sees what is saved outside of the blocks; what is around keeps it."""
        return _seen_by(self._see)

    def _see(self, x: torch.Tensor) -> None:
        storage = _storage(x)
        if storage is not None and (at := storage.data_ptr()) not in self._outside and at not in self._held():
            self._outside[at] = storage.nbytes()

    @private.uncompiled_itself
    def call(self, k: int, function: Callable[..., Any], *args: Any) -> Any:
        """The k-th call, inside its checkpoint: once in the forward, which is measured, and once in backward."""
        if k in self._calls:
            return function(*args)
        storages = map(_storage, _tensors(function, args))
        given = {s.data_ptr(): s.nbytes() for s in storages if s is not None}
        held = self._held()
        mine = {at: n for at, n in given.items() if at not in self._inputs and at not in held}
        self._inputs.update(mine)
        saved: dict[int, torch.UntypedStorage] = {}  # they live until the end: no address is another's meanwhile

        def see(x: torch.Tensor) -> None:
            if (storage := _storage(x)) is not None:
                saved[storage.data_ptr()] = storage

        outside = sum(n for at, n in self._outside.items() if at not in self._inputs)
        _wait(args)
        begin = time.perf_counter()
        with _seen_by(see):
            out = function(*args)
        _wait(args)
        seconds = time.perf_counter() - begin
        model = self._held()  # while the block's own parameters are there
        nbytes = sum(s.nbytes() for at, s in saved.items() if at not in given and at not in model)
        self._calls[k] = Call(nbytes, sum(mine.values()), outside, seconds)
        return out

    def finish(self) -> tuple[list[Call], int]:
        """The calls in order, and the bytes outside of them."""
        calls = [self._calls[k] for k in sorted(self._calls)]
        alike: dict[tuple[int, int], list[float]] = {}
        for c in calls:
            alike.setdefault((c.saved, c.inputs), []).append(c.seconds)
        # equal blocks cost the same: what differs is noise, and most of it is the first one's
        calls = [Call(c.saved, c.inputs, c.outside, _median(alike[c.saved, c.inputs])) for c in calls]
        return calls, sum(n for at, n in self._outside.items() if at not in self._inputs)


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


@contextlib.contextmanager
def _seen_by(see: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """What is saved inside goes to the hooks that are there already, or to autograd, and is seen."""
    around = private.top_saved_hooks(False)
    pack, unpack = around if around else (lambda x: x, lambda x: x)

    def seen(x: torch.Tensor) -> Any:
        see(x)
        return pack(x)

    with torch.autograd.graph.saved_tensors_hooks(seen, unpack):
        yield


def _wait(args: tuple[Any, ...]) -> None:
    if any(isinstance(a, torch.Tensor) and a.is_cuda for a in args):
        torch.cuda.synchronize()


def _tensors(function: Callable[..., Any], args: tuple[Any, ...]) -> list[torch.Tensor]:
    """What a block gets; keywords are bound in `function` (transformers' and ours)."""
    keywords = function.keywords if isinstance(function, functools.partial) else {}
    found = private.tree_leaves((args, keywords))
    return [t for t in found if isinstance(t, torch.Tensor)]


def _storage(x: torch.Tensor) -> torch.UntypedStorage | None:
    """None where it has none: sparse, or a parameter that is released."""
    return None if isinstance(x, Released) or x.layout != torch.strided else x.untyped_storage()


def _shapes(given: Any) -> _Shapes:
    return tuple(tuple(t.shape) for t in private.tree_leaves(given) if isinstance(t, torch.Tensor))


def _numel_of(shapes: _Shapes) -> int:
    return sum(map(math.prod, shapes))


def _covers(larger: _Shapes, shapes: _Shapes) -> bool:
    """Whether no size of `shapes` is above the one of `larger`."""
    return [len(s) for s in larger] == [len(s) for s in shapes] and all(
        a >= b for s, t in zip(larger, shapes, strict=True) for a, b in zip(s, t, strict=True)
    )


@private.uncompiled_itself
def _checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


# ---- how a block asks ------------------------------------------------------------------------------------------------
_HAND = "_deepc_recompute"


class _Hand:
    """Leads from a block to the Recomputation of its engine. Copies of a block (torch, averages, saved models) run as
    they are."""

    def __init__(self, owner: weakref.ref[Recomputation] | None = None) -> None:
        self._owner = owner

    @property
    def leads(self) -> bool:
        """Whether there is somebody to ask."""
        return self._owner is not None and self._owner() is not None

    @private.uncompiled_itself
    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        owner = self._owner() if self._owner is not None else None
        function = functools.partial(function, **kwargs) if kwargs else function
        return function(*args) if owner is None else owner.run(function, args)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hand:
        return _Hand()

    def __reduce__(self) -> tuple[type[_Hand], tuple[()]]:
        return _Hand, ()


class _Asks(torch.nn.Module):
    """In front of a block's class: its forward asks first."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hand = self.__dict__.get(_HAND)
        own = super().forward
        return own(*args, **kwargs) if hand is None else hand(own, *args, **kwargs)


_asking_kinds: dict[type, type[torch.nn.Module]] = {}


def _asking(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """`kind` behind _Asks, under its own name, always the same."""
    if kind not in _asking_kinds:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        _asking_kinds[kind] = type(kind.__name__, (_Asks, kind), names)
    return _asking_kinds[kind]


def _by_itself(block: torch.nn.Module) -> bool:
    """transformers' layers have a place for a checkpointing function, and leave their caches out then."""
    return any(k.__name__ == "GradientCheckpointingLayer" for k in type(block).__mro__)


def _take(block: torch.nn.Module, hand: _Hand) -> None:
    if _by_itself(block):
        block.gradient_checkpointing, block._gradient_checkpointing_func = True, hand  # type: ignore[assignment]
        return
    block.__dict__[_HAND] = hand
    if not isinstance(block, _Asks):
        block.__class__ = _asking(type(block))


def _hand_of(block: torch.nn.Module) -> _Hand | None:
    hands = (block.__dict__.get(n) for n in (_HAND, "_gradient_checkpointing_func"))
    return next((h for h in hands if isinstance(h, _Hand)), None)


def _leave(block: torch.nn.Module) -> None:
    if _by_itself(block):
        for name in ("gradient_checkpointing", "_gradient_checkpointing_func"):
            block.__dict__.pop(name, None)
    elif block.__dict__.pop(_HAND, None) is not None:
        block.__class__ = type(block).__mro__[2]
