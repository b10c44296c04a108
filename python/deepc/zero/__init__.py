"""ZeRO: where parameters, gradients and optimizer states lie while training runs (Rajbhandari et al.,
arXiv:1910.02054).

Users' part is re-exported here. step/ is what happens between a backward and the next forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .parameters.gathered import (
    GatheredParameters,
    is_zero_param,
    register_external_parameter,
    unregister_external_parameter,
)

if TYPE_CHECKING:
    from .init import Init

__all__ = [
    "GatheredParameters",
    "Init",
    "is_zero_param",
    "register_external_parameter",
    "unregister_external_parameter",
]


def _init() -> Any:
    from .init import Init

    return Init


_further: dict[str, Callable[[], Any]] = {"Init": _init}  # with the groups and the configuration that it needs


def add_name(name: str, load: Callable[[], Any]) -> None:
    """`deepc.zero.<name>` is what `load` gives when it is first asked for: names of this module for things whose home
    is above this room (DeepSpeed's ZeroParamStatus)."""
    _further[name] = load


def __getattr__(name: str) -> Any:
    if name not in _further:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = _further[name]()
    return found
