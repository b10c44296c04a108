"""What is open while a zero.Init is: contexts of libraries that must know (compat/hf.py); and when a library asks for
what zero.Init has built by name alone. A file of its own, so that `import deepc` need not import zero.Init to tell
it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

contexts: list[Callable[[], AbstractContextManager[None]]] = []


def around_init(make: Callable[[], AbstractContextManager[None]]) -> None:
    """From now on a context of `make` is open while a zero.Init is."""
    if make not in contexts:
        contexts.append(make)


_by_name = 0


@contextlib.contextmanager
def names_alone() -> Iterator[None]:
    """Inside, whoever takes the state_dict of a model between zero.Init and deepc.initialize wants its names: tensors
    whose values are not here are on the meta device."""
    global _by_name
    _by_name += 1
    try:
        yield
    finally:
        _by_name -= 1


def wants_names_alone() -> bool:
    """Whether that is so now."""
    return _by_name > 0
