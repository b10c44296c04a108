"""Data on its way into the model: the DataLoader that deepc.initialize returns (torch's, with the time that next()
takes counted as waiting for data), and the cast of inputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..core import waits
from ..core.foreign import private


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


def make_loader(
    data: Any,
    collate_fn: Callable[..., Any] | None,
    *,
    micro_batch: int | None,
    drop_last: bool,
    world: int,
    rank: int,
    make_sampler: Callable[[Any], torch.utils.data.Sampler[list[int]] | None],
) -> TimedLoader | None:
    """Micro-batches of this rank's part of `data`, a Dataset; None of None. A stream (IterableDataset) is cut by
    itself; anything else is dealt to the ranks by make_sampler(data), or shuffled where that gives None."""
    if data is None:
        return None
    stream = isinstance(data, torch.utils.data.IterableDataset)
    if not stream and (dealt := make_sampler(data)) is not None:
        return TimedLoader(data, batch_sampler=dealt, collate_fn=collate_fn)
    sampler: torch.utils.data.Sampler[int] | None = None
    if world > 1 and not stream:
        sampler = torch.utils.data.DistributedSampler(data, world, rank, shuffle=True)
    return TimedLoader(
        data,
        batch_size=micro_batch,
        sampler=sampler,
        shuffle=None if stream or sampler is not None else True,
        collate_fn=collate_fn,
        drop_last=drop_last,
    )


@private.uncompiled
def cast_floats(x: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in nested tuples, lists and dicts, cast."""
    if isinstance(x, torch.Tensor) and x.is_floating_point():
        return x.to(dtype)
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*(cast_floats(v, dtype) for v in x))
    if isinstance(x, (list, tuple)):
        return type(x)(cast_floats(v, dtype) for v in x)
    if isinstance(x, dict):
        return {k: cast_floats(v, dtype) for k, v in x.items()}
    return x
