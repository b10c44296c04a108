"""deepspeed.runtime.torch_autocast: which parameters DeepSpeed would send in the dtype of torch.autocast.

deepc sends them in their own, which loses nothing (docs/precision.md): the mark is for scripts that read it."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable
from typing import Any

import torch

from ....errors import ArgumentError

__all__ = [
    "LOWER_PRECISION_SAFE_MODULES",
    "PARAM_COMM_DTYPE_ATTR_NAME",
    "autocast_if_enabled",
    "get_all_comm_dtypes",
    "get_comm_dtype",
    "get_default_autocast_lower_precision_modules",
    "has_comm_dtype",
    "init_autocast_params",
]

LOWER_PRECISION_SAFE_MODULES = [torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d]
PARAM_COMM_DTYPE_ATTR_NAME = "comm_dtype"


def get_default_autocast_lower_precision_modules() -> list[str]:
    """Names that init_autocast_params takes."""
    return [f"{kind.__module__}.{kind.__name__}" for kind in LOWER_PRECISION_SAFE_MODULES]


def init_autocast_params(
    engine: Any, dtype: torch.dtype, torch_autocast_lower_precision_safe_modules: Iterable[str] | None
) -> None:
    """Marks the parameters of these classes of modules (None: those above). ArgumentError for a name that is none."""
    names = torch_autocast_lower_precision_safe_modules
    kinds = set(LOWER_PRECISION_SAFE_MODULES if names is None else map(_class_of, names))
    for module in engine.module.modules():
        if type(module) in kinds:
            for p in module.parameters(recurse=False):
                setattr(p, PARAM_COMM_DTYPE_ATTR_NAME, dtype)


def _class_of(name: str) -> Any:
    place, _, kind = name.rpartition(".")
    try:
        return getattr(importlib.import_module(place), kind)
    except (ImportError, AttributeError, ValueError) as exc:
        raise ArgumentError(
            f"torch_autocast.lower_precision_safe_modules: {name!r} is no class that can be imported ({exc}); write"
            ' module and class, "torch.nn.Linear"'
        ) from exc


def has_comm_dtype(param: torch.Tensor) -> bool:
    return hasattr(param, PARAM_COMM_DTYPE_ATTR_NAME)


def get_comm_dtype(param: torch.Tensor) -> torch.dtype:
    return getattr(param, PARAM_COMM_DTYPE_ATTR_NAME, param.dtype)


def get_all_comm_dtypes(params: Iterable[torch.Tensor]) -> set[torch.dtype]:
    return {get_comm_dtype(p) for p in params}


def autocast_if_enabled(engine: Any) -> contextlib.AbstractContextManager[Any]:
    """What the engine's forward runs in."""
    return engine.autocast()  # type: ignore[no-any-return]
