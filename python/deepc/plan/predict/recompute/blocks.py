"""The blocks of a model, and how each asks before it runs: what recomputation by budget takes hold of."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ....core.foreign import private


def find_blocks(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The elements of the outermost lists and sequences of `module` that repeat a class: half of a list's parameters or
    more are in elements of one class, of which there are at least two. Those without parameters are left out, and what
    is in modules with has_no_blocks."""
    found: dict[torch.nn.Module, None] = {}

    def walk(parent: torch.nn.Module) -> None:
        for child in parent.children():
            if isinstance(child, (torch.nn.ModuleList, torch.nn.Sequential)) and _repeats(child):
                found.update((b, None) for b in child if _numel(b))
            elif not getattr(child, "has_no_blocks", False):
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


# ---- how a block asks ------------------------------------------------------------------------------------------------
_HAND = "_deepc_recompute"


class Hand:
    """Leads from a block to who is asked. Copies of a block (torch, averages, saved models) run as they are."""

    def __init__(self, owner: weakref.ref[Any] | None = None) -> None:
        self._owner = owner

    @property
    def leads(self) -> bool:
        """Whether there is somebody to ask."""
        return self._owner is not None and self._owner() is not None

    @private.uncompiled_itself
    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        owner = self._owner() if self._owner is not None else None
        function = functools.partial(function, **kwargs) if kwargs else function
        if owner is None:
            return function(*args)
        return owner.run(function, tuple(None if _is_cache(a) else a for a in args))

    def __deepcopy__(self, memo: dict[int, Any]) -> Hand:
        return Hand()

    def __reduce__(self) -> tuple[type[Hand], tuple[()]]:
        return Hand, ()


def _is_cache(value: Any) -> bool:
    """Of transformers, in which a block keeps keys and values beside autograd, and would again when it is recomputed.
    GradientCheckpointingLayer leaves out those that have a name in the call."""
    return any(k.__name__ == "Cache" and k.__module__ == "transformers.cache_utils" for k in type(value).__mro__)


class _Asks(torch.nn.Module):
    """In front of a block's class: its forward asks first."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hand = self.__dict__.get(_HAND)
        own = super().forward
        return own(*args, **kwargs) if hand is None else hand(own, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and what is pickled (torch.save of a whole model) are of the block's own class: nobody finds this one
        under its name."""
        found = super().__reduce_ex__(protocol)
        if not isinstance(found, tuple):
            return found
        asking, kind = type(self), type(self).__mro__[2]
        make, args, state, *more = (*found, None) if len(found) == 2 else found
        if getattr(make, "__name__", "") == "__newobj__":  # pickle wants it with the object's own class
            make = kind.__new__
        args = tuple(kind if a is asking else a for a in args)
        if isinstance(state, dict):
            state = {k: v for k, v in state.items() if k != _HAND}
        return (kind if make is asking else make, args, state, *more)


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


def take(block: torch.nn.Module, hand: Hand) -> None:
    """The block asks from here on."""
    if _by_itself(block):
        block.gradient_checkpointing, block._gradient_checkpointing_func = True, hand  # type: ignore[assignment]
        return
    block.__dict__[_HAND] = hand
    if not isinstance(block, _Asks):
        block.__class__ = _asking(type(block))


def hand_of(block: torch.nn.Module) -> Hand | None:
    """None: it does not ask."""
    hands = (block.__dict__.get(n) for n in (_HAND, "_gradient_checkpointing_func"))
    return next((h for h in hands if isinstance(h, Hand)), None)


def leave(block: torch.nn.Module) -> None:
    """It runs as it did before."""
    if _by_itself(block):
        for name in ("gradient_checkpointing", "_gradient_checkpointing_func"):
            block.__dict__.pop(name, None)
    elif block.__dict__.pop(_HAND, None) is not None:
        block.__class__ = type(block).__mro__[2]
