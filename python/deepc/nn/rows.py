"""How many rows parts of a model compute on now, and how many they may: what a mixture of experts saves in one forward
says what it may save in another one, in which its gate chooses otherwise. Told while somebody measures."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ..core.foreign import private


class Rows(NamedTuple):
    """now, most: of a layer, on this rank. part: of them, those that what runs inside has (an expert's)."""

    now: int
    most: int
    part: int

    def scaled(self, nbytes: int, x: torch.Tensor) -> int:
        """Bytes that a storage of `nbytes` may have at most, of which `x` was saved: more where `x` has a row for each
        of the part's, or one beside them."""
        if self.now == 0 or not any(d in (self.part, self.part + 1) for d in x.shape):
            return nbytes
        return max(nbytes, -(-nbytes * self.most // self.now))


class Seen:
    """What calls of `of` said; parts: calls of `of_part` that run now."""

    def __init__(self) -> None:
        self.rows: set[Rows] = set()
        self.parts = 0


_seen: contextvars.ContextVar[Seen | None] = contextvars.ContextVar("deepc_rows_seen", default=None)
_told: contextvars.ContextVar[list[Rows] | None] = contextvars.ContextVar("deepc_rows", default=None)


@contextmanager
def measured() -> Iterator[None]:
    """Inside, calls of `of` are seen by `at_most`."""
    token = _told.set([])
    try:
        yield
    finally:
        _told.reset(token)


@contextmanager
def seen() -> Iterator[Seen]:
    """Inside, calls of `of` and of_part are seen."""
    found = Seen()
    token = _seen.set(found)
    try:
        yield found
    finally:
        _seen.reset(token)


def at_most(nbytes: int, x: torch.Tensor) -> int:
    """Bytes of a storage that is saved now, of which `x` is a view, in a forward with as many rows as there may be."""
    told = _told.get()
    return told[-1].scaled(nbytes, x) if told else nbytes


@private.uncompiled_itself
def of(rows: Rows, function: Callable[..., Any], *args: Any) -> Any:
    """function(*args), which computes on so many rows."""
    told = _told.get()
    if (found := _seen.get()) is not None:
        found.rows.add(rows)
    if told is None:
        return function(*args)
    told.append(rows)
    try:
        return function(*args)
    finally:
        told.pop()


@private.uncompiled_itself
def of_part(part: int, function: Callable[..., Any], *args: Any) -> Any:
    """function(*args), which computes on so many of the rows told around."""
    told, found = _told.get(), _seen.get()
    if found is not None:
        found.parts += 1
    try:
        return of(told[-1]._replace(part=part), function, *args) if told else function(*args)
    finally:
        if found is not None:
            found.parts -= 1
