"""Optimizers: `AdamW` and `Adam`, drop-ins for torch's over the C core."""

from .adamw import Adam, AdamW

__all__ = ["Adam", "AdamW"]
