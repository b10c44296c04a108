"""Models cut into the stages of a pipeline where they stand."""

from .model import CutModel

__all__ = ["CutModel"]
