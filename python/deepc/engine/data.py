"""The DataLoader that deepc.initialize returns: torch's, with the time that next() takes counted as waiting for
data."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from ..core import waits


class _TimedIterator:
    """An iterator of a DataLoader; everything but next() is the iterator's own."""

    def __init__(self, inner: Iterator[Any]) -> None:
        self._inner = inner

    def __iter__(self) -> _TimedIterator:
        return self

    def __next__(self) -> Any:
        began = time.perf_counter()
        try:
            return next(self._inner)
        finally:
            waits.add("data", time.perf_counter() - began)

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)


class TimedLoader(torch.utils.data.DataLoader[Any]):
    """torch.utils.data.DataLoader; what its iterators wait is in `waits.seconds["data"]`."""

    def __iter__(self) -> Any:
        began = time.perf_counter()
        inner = super().__iter__()
        waits.add("data", time.perf_counter() - began)  # workers start here
        return _TimedIterator(inner)
