"""`module.zero_grad()` on a module that an engine of the compatibility layer trains.

Scripts for DeepSpeed call it on the module itself (a GAN drops what the generator's loss left in the discriminator),
and there it clears the `.grad`s that the engine would step with. deepc takes gradients out of `.grad` as they come, so
the call is passed on to the engine. Owned here: the table from modules to engines and the one replacement of
torch.nn.Module.zero_grad, made with the first engine.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

from ....core.foreign import patches

_engines: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def follow(engine: Any) -> None:
    """From now on `engine.module.zero_grad()` also calls `engine.module_zero_grad()`."""
    _engines[engine.module] = weakref.ref(engine)
    _replace()


def _replace() -> None:
    original = torch.nn.Module.zero_grad
    if getattr(original, "_deepc", False):
        return

    @functools.wraps(original)
    def zero_grad(self: torch.nn.Module, set_to_none: bool = True) -> None:
        original(self, set_to_none)
        engine = _engines.get(self)
        engine = engine() if engine is not None else None
        if engine is not None and not engine.destroyed:  # else the model is an ordinary one again
            engine.module_zero_grad()

    zero_grad._deepc = True  # type: ignore[attr-defined]
    patches.applied("module-zero-grad")
    torch.nn.Module.zero_grad = zero_grad  # type: ignore[method-assign]
