"""What is open while a zero.Init is: contexts of libraries that must know (compat/hf.py). A file of its own, so that
`import deepc` need not import zero.Init to tell it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

contexts: list[Callable[[], AbstractContextManager[None]]] = []


def around_init(make: Callable[[], AbstractContextManager[None]]) -> None:
    """From now on a context of `make` is open while a zero.Init is."""
    if make not in contexts:
        contexts.append(make)
