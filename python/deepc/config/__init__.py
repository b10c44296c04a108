"""What is asked: a DeepSpeed configuration, read, checked and typed (`Config.load`), key by key (keys.py)."""

from .tree import Config

__all__ = ["Config"]
