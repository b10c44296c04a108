"""Which engine trains a parameter, and which engines there are: the one table of a process. Who reads a parameter's
states or makes an engine asks here; entries go with their engine, which holds its parameters.

Knows an engine by its model states (`Owner`)."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .param import unshare

if TYPE_CHECKING:
    from ..state import ModelState


class Owner(Protocol):
    """An engine, as far as this folder knows one. Read only."""

    @property
    def state(self) -> ModelState: ...


# Values are engines; Any, because a WeakValueDictionary of a Protocol can't be read as the class that was put in.
_trainers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # id(parameter) -> who trains it
_alive: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # in the order of their making
_numbers = itertools.count()


def trainer(p: torch.Tensor) -> Any | None:
    """The engine that trains `p`, or None."""
    return _trainers.get(id(p))


def alive() -> list[Any]:
    """The engines of this process that are complete and not destroyed, in the order of their making, which is the same
    on all ranks: what is done with each may be collective."""
    return list(_alive.values())


def enter(owner: Owner) -> None:
    """A complete engine. What was frozen in another engine and is trained in this one has moved here, and the other
    one lets go of it."""
    for p in owner.state.trained:
        _trainers[id(p)] = owner
    for other in alive():
        other.state.let_go(_trainers)
    _alive[next(_numbers)] = owner


def leave(owner: Owner) -> None:
    """The engine ends, or was never complete: its parameters are ordinary ones."""
    for number in [n for n, other in _alive.items() if other is owner]:
        del _alive[number]
    state: ModelState | None = owner.__dict__.get("state")
    if state is None:
        return
    for p in state.trained:
        if (other := _trainers.get(id(p))) is None or other is owner:
            _trainers.pop(id(p), None)
            unshare(p)
