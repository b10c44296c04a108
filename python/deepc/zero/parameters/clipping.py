"""torch.nn.utils.clip_grad_norm_ and clip_grad_value_ on parameters that an engine trains.

Gradients are with the engine, not in `.grad`, so that both find nothing to clip. Scripts written for DDP (or for
DeepSpeed, which leaves them in `.grad` at stage 0) call these between backward and step: a line of the log says that
they clip nothing, and what does. Replaced while there is an engine, and while the name deepspeed is deepc's: the
latter, which a script may have imported before, and of the former what it calls, which every name of it reaches."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import clip_grad

from ...core.foreign import patches, private
from . import owners

logger = logging.getLogger("deepc")
_PLACES: dict[str, list[tuple[Any, str]]] = {
    "clip_grad_norm_": private.norm_clipper(),
    "clip_grad_value_": [(module, "clip_grad_value_") for module in (clip_grad, torch.nn.utils)],
}
_originals: dict[str, Callable[..., Any]] = {}
_told: set[str] = set()
_watching = 0


def watch(on: bool) -> None:
    """Calls of both are looked at from now on, or, when as many have said so, no longer."""
    global _watching
    before, _watching = _watching, _watching + (1 if on else -1)
    if bool(before) == bool(_watching):
        return
    for name, places in _PLACES.items():
        for module, at in places:
            if on:
                _originals[name] = getattr(module, at)
            setattr(module, at, _telling(name, _originals[name]) if on else _originals[name])
    if not on:
        _originals.clear()
    (patches.applied if on else patches.undone)("clip-grad")


def _telling(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    keyword = next(iter(inspect.signature(original).parameters))

    @functools.wraps(original)
    def clip(*args: Any, **kwargs: Any) -> Any:
        params = args[0] if args else kwargs.get(keyword)
        if not isinstance(params, (torch.Tensor, list, tuple)) and params is not None:  # a generator gives them once
            params = list(params)
            args, kwargs = ((params, *args[1:]), kwargs) if args else (args, {**kwargs, keyword: params})
        _tell(name, [params] if isinstance(params, torch.Tensor) else params or ())
        return original(*args, **kwargs)

    clip._deepc = True  # type: ignore[attr-defined]
    return clip


def _tell(name: str, params: Any) -> None:
    """Once a process for each of them."""
    if name in _told or any(getattr(p, "grad", None) is not None for p in params):
        return
    if any(isinstance(p, torch.Tensor) and owners.trainer(p) is not None for p in params):
        _told.add(name)
        if torch.distributed.get_rank():  # there is an engine, so there are ranks
            return
        logger.warning(
            "torch.nn.utils.%s clips nothing here: the gradients of these parameters are with their engine, not in"
            " .grad. The configuration's gradient_clipping (1.0 unless given; 0: none) clips by the norm of all ranks'"
            " average, and engine.get_global_grad_norm() gives it",
            name,
        )
