"""How an engine is made: the steps, and what of a model is this rank's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .steps import Given, assemble, initialize

if TYPE_CHECKING:
    from .steps import OptimizerLike

__all__ = ["Given", "OptimizerLike", "assemble", "initialize"]
