"""Arena: values that come and go in one piece of memory, one behind the other (docs/dynamic-tensors.md)."""

from __future__ import annotations

import bisect
import os
from typing import NamedTuple, NoReturn

import torch

from ..core.memory import tensor_at
from ..errors import ArgumentError, UnsupportedError
from .dynamic import _Range

_ALIGN = 64  # bytes, of a value


class ArenaStats(NamedTuple):
    """Bytes: addresses `reserved`; `committed`, what has memory now; `used` by the values that live, and the most that
    was ever used; `extent`, up to where they lie, and the most of it. Values: `puts` so far, and those that live."""

    reserved: int
    committed: int
    used: int
    most_used: int
    extent: int
    most_extent: int
    puts: int
    living: int


class Arena:
    """Memory for CPU tensors that are made in one order and dropped in about the reverse one: what a forward keeps for
    its backward. Addresses are reserved once; a value lies at the first place that has room, at the end if there is
    none, and its place is free again when the last tensor over it has gone. Pages stay for the values to come: what has
    memory is what the longest step had, whatever the lengths between; release() gives back what lies behind the last
    value.

    most: bytes of addresses, which cost no memory (None: the machine's memory). For one thread at a time.
    OutOfMemoryError comes before the kernel would kill, and nothing has changed then."""

    def __init__(self, most: int | None = None) -> None:
        if most is None:
            most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if most < 1:
            raise ArgumentError(f"most is {most}; give the bytes that values could ever take")
        self._range = _Range(most, 1 / 32)
        self._most = most
        self._places: list[tuple[int, int]] = []  # (begin, end) of the living, in order
        self._backed = 0  # bytes from the beginning that have been asked of the system
        self._used = self._most_used = self._most_extent = self._puts = 0

    def put(self, values: torch.Tensor) -> torch.Tensor:
        """A copy of `values` (CPU, any strides) in the arena: dense, in the order of its strides where it has no holes,
        else contiguous. ArgumentError if `most` is too small."""
        out = self.empty(values.numel() * values.element_size()).view(values.dtype)[: values.numel()]
        if torch.ops.aten.is_non_overlapping_and_dense(values):
            out = out.as_strided(values.shape, values.stride())
        else:
            out = out.view(values.shape)
        with torch.no_grad():
            return out.copy_(values)

    def empty(self, nbytes: int) -> torch.Tensor:
        """[nbytes] uint8, of any content."""
        size = max(_ALIGN, -(-nbytes // _ALIGN) * _ALIGN)
        begin = self._room(size)
        if begin + size > self._most:
            raise ArgumentError(
                f"an arena of {self._most} bytes has no room for {nbytes} more: {self._used} are in use, up to"
                f" {self._extent}; give a larger `most`"
            )
        if begin + size > self._backed:
            self._range.resize(begin + size)
            self._backed = begin + size
        bisect.insort(self._places, (begin, begin + size))
        self._used += size
        self._puts += 1
        self._most_used = max(self._most_used, self._used)
        self._most_extent = max(self._most_extent, self._extent)
        place = _Place(self, begin, size)
        return tensor_at(self._range.address + begin, nbytes, torch.uint8, place)

    def ready(self, nbytes: int) -> None:
        """The first `nbytes` have memory from here on."""
        if (nbytes := min(nbytes, self._most)) > self._backed:
            self._range.resize(nbytes)
            self._backed = nbytes

    def release(self) -> None:
        """What lies behind the last value is the system's again."""
        self._range.resize(self._extent)
        self._backed = self._extent

    def stats(self) -> ArenaStats:
        read = self._range.read()
        return ArenaStats(
            read.reserved,
            read.committed,
            self._used,
            self._most_used,
            self._extent,
            self._most_extent,
            self._puts,
            len(self._places),
        )

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            f"an Arena of {self._most} bytes can't be copied or pickled: the values in it lie at its addresses. Make"
            " another with Arena(most), and clone() the values"
        )

    @property
    def _extent(self) -> int:
        return self._places[-1][1] if self._places else 0

    def _room(self, size: int) -> int:
        """Where the first gap of `size` begins, or the end."""
        if not self._places or self._places[0][0] >= size:
            return 0
        if self._extent - self._used >= size:
            for (_, end), (begin, _) in zip(self._places, self._places[1:]):
                if begin - end >= size:
                    return end
        return self._extent

    def _free(self, begin: int, size: int) -> None:
        del self._places[bisect.bisect_left(self._places, (begin, 0))]
        self._used -= size


class _Place:
    """Held by the storage of a value: its bytes are free when this goes."""

    def __init__(self, arena: Arena, begin: int, size: int) -> None:
        self._arena, self._begin, self._size = arena, begin, size

    def __del__(self) -> None:
        self._arena._free(self._begin, self._size)
