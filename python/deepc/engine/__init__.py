"""The loop: `deepc.initialize` makes an Engine, which wires configuration, plan, states and optimizer together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import Engine, StepResult

__all__ = ["Engine", "StepResult"]


def __getattr__(name: str) -> Any:
    """Imported when it is asked for: `import deepc` needs only a part of this folder."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import engine

    return getattr(engine, name)
