"""Who owns which element: a thin view of zero/zero.h, whose arithmetic is C's."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from ..core import lib as _lib
from ..core.lib import C, call

BLOCK = 4096  # DC_BLOCK: slices are multiples of it
ALIGN = 64  # DC_ZERO_ALIGN: a parameter starts at a multiple of it, in elements


def padded(numel: int) -> int:
    """The elements that a parameter of `numel` takes with the padding before the next one."""
    return (numel + ALIGN - 1) // ALIGN * ALIGN


def keep_bytes(p: object) -> None:
    """Of a frozen parameter `p` on disk: its bytes stay as they are, in its own dtype (int8 weights, their scales),
    whatever its engine computes in. There they take the place of elements of the engine's dtype (slots_of)."""
    p._deepc_keeps_bytes = True  # type: ignore[attr-defined]  # a mark; parameters take attributes


def keeps_bytes(p: object) -> bool:
    return getattr(p, "_deepc_keeps_bytes", False)


def slots_of(numel: int, itemsize: int, slot: int) -> int:
    """Elements of `slot` bytes that `numel` elements of `itemsize` bytes take."""
    return -(-numel * itemsize // slot)


class Segment(NamedTuple):
    """`length` consecutive elements of parameter `param`, from `param_begin`, at `flat_begin` of the flat space and
    `shard_begin` of the owner's shard."""

    param: int
    param_begin: int
    flat_begin: int
    shard_begin: int
    length: int


class Slice(NamedTuple):
    """A rank's part of one bucket: [flat_begin, flat_begin + length) of the flat space, at `shard_begin` of its
    shard."""

    flat_begin: int
    shard_begin: int
    length: int


class Layout:
    """The flat space of `numels` (elements per parameter, in flat order) cut into buckets and shards for `world`
    ranks."""

    def __init__(self, numels: Sequence[int], world: int, bucket_elems: int) -> None:
        handle = ctypes.POINTER(_lib.Layout)()
        array = (ctypes.c_int64 * max(1, len(numels)))(*numels)
        call("dc_zero_layout_make", array, len(numels), world, bucket_elems, ctypes.byref(handle))
        self.handle = handle
        raw = handle.contents
        self.world: int = raw.world
        self.total: int = raw.total
        self.bucket_elems: int = raw.bucket_elems
        self.nbuckets: int = raw.nbuckets
        self.shard_elems: int = raw.shard_elems
        self.nparams: int = raw.nparams
        self.offsets: tuple[int, ...] = tuple(raw.offset[i] for i in range(raw.nparams))
        self.numels: tuple[int, ...] = tuple(raw.numel[i] for i in range(raw.nparams))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return (
            f"Layout({self.nparams} parameters, {self.total:,} elements, {self.nbuckets} buckets of"
            f" {self.bucket_elems:,}, {self.world} ranks)"
        )

    def _key(self) -> tuple[object, ...]:
        """What the layout is made of: everything else follows."""
        return self.numels, self.world, self.bucket_elems

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            C.dc_zero_layout_free(self.handle)

    def bucket(self, b: int) -> tuple[int, int]:
        """[begin, end) of bucket `b` in the flat space."""
        begin, end = ctypes.c_int64(), ctypes.c_int64()
        call("dc_zero_bucket", self.handle, b, ctypes.byref(begin), ctypes.byref(end))
        return begin.value, end.value

    def slices(self, rank: int) -> list[Slice]:
        """The slices of `rank`, in bucket order."""
        begin, end, shard = ctypes.c_int64(), ctypes.c_int64(), ctypes.c_int64()
        out = []
        for b in range(self.nbuckets):
            call("dc_zero_slice", self.handle, b, rank, ctypes.byref(begin), ctypes.byref(end), ctypes.byref(shard))
            out.append(Slice(begin.value, shard.value, end.value - begin.value))
        return out

    def segments(self, rank: int) -> list[Segment]:
        """The runs of parameters inside the shard of `rank`, in shard order."""
        count = ctypes.c_int64()
        call("dc_zero_segments", self.handle, rank, None, 0, ctypes.byref(count))
        array = (_lib.Segment * max(1, count.value))()
        call("dc_zero_segments", self.handle, rank, array, count.value, ctypes.byref(count))
        return [Segment(s.param, s.param_begin, s.flat_begin, s.shard_begin, s.len) for s in array[: count.value]]

    def whole_segments(self) -> list[Segment]:
        """The same for a rank that owns everything (stage 0): one segment per parameter."""
        return [Segment(i, 0, o, o, n) for i, (o, n) in enumerate(zip(self.offsets, self.numels)) if n]
