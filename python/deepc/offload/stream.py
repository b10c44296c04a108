"""Arrays on disk that are worked on cell by cell (offload/stream.c)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

import torch

from ..core.lib import C, StreamArray, StreamCell, StreamConfig, StreamInfo, call
from ..core.memory import tensor_at
from ..errors import ArgumentError, DiskError, numeric
from .file import Opened, changed, config
from .place import addresses


@dataclass(frozen=True)
class Cell:
    """Elements [begin, end) of every array of a stream. data: name -> address of its part; the walk's until its next
    cell."""

    stream: Stream
    number: int
    begin: int
    end: int
    data: Mapping[str, int]

    def tensor(self, name: str) -> torch.Tensor:
        """[items of begin..end] the part of array `name`, over the stream's memory: to be used before the next cell."""
        items = -(-(self.end - self.begin) // self.stream.per[name])
        return tensor_at(self.data[name], items, self.stream.arrays[name], self.stream)


class Walk:
    """Cells [first, last) of a stream in their order, each read before it is given and written behind the work on it:

        with stream.walk() as cells:
            for cell in cells: ...

    at: the next cell that is not done. A cell is done when the loop comes back for more; one that the loop leaves (an
    exception, break) keeps the values it had. What the disk refuses is raised where it is noticed, at the end of the
    `with` at the latest; cells that are done are done even then (dc_stream_begin writes them again)."""

    def __init__(self, stream: Stream, first: int, last: int, reads: int, writes: int) -> None:
        self.at = first
        self._stream, self._last, self._reads, self._writes = stream, last, reads, writes
        self._given = False

    def __enter__(self) -> Walk:
        call("dc_stream_begin", self._stream._opened(), self.at, self._last, self._reads)
        return self

    def __iter__(self) -> Walk:
        return self

    def __next__(self) -> Cell:
        stream = self._stream
        if self._given:
            self._given = False
            self.at += 1  # whatever becomes of the write
            call("dc_stream_done", stream._opened(), self._writes)
        if self.at == self._last:
            raise StopIteration
        raw = StreamCell()
        call("dc_stream_next", stream._opened(), ctypes.byref(raw))
        self._given = True
        data = {name: raw.data[i] for i, name in enumerate(stream.arrays)}
        return Cell(stream, raw.cell, raw.begin, raw.begin + raw.elems, data)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            call("dc_stream_end", self._stream._opened())
        else:  # the first failure is the one to tell
            C.dc_stream_end(self._stream._opened())


class Stream(Opened):
    """Arrays of `elems` elements each in a scratch file of `folder`, which has no name and goes with the process,
    however that ends. They begin as zeros. walk(): all of them in order, cell by cell, with the disk at work before and
    behind; read() and write(): any stretch of one.

    arrays: name -> dtype, at most 16. per: name -> elements that share one item of the array (a byte of two codes: 2),
    where that is not 1; its windows count items, and cells are of multiples of it. cell_elems: elements of
    a cell; slots: cells in memory at a time. The rest: as in File. All space, on disk and in memory, is taken here.
    Checksums and generations are in memory, and what is read is what was written last, or a DamagedError that names
    array, elements and generation. A cell that could not be written
    (DiskError, DiskFullError) stays in memory, is what later calls see, and is written again before the next walk. One
    thread at a time."""

    _close_with = "dc_stream_close"

    @numeric
    def __init__(
        self,
        folder: str | os.PathLike[str],
        arrays: Mapping[str, torch.dtype],
        elems: int,
        *,
        cell_elems: int = 1 << 18,
        slots: int = 4,
        ring: str = "auto",
        direct: bool = True,
        depth: int = 0,
        threads: int = 0,
        block_bytes: int = 0,
        per: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        if per is not None and not isinstance(per, Mapping):
            raise ArgumentError(f"per {per!r} must be a mapping from names of arrays to numbers of elements")
        self.folder, self.arrays, self.elems = os.fspath(folder), dict(arrays), elems
        self.per = {name: (per or {}).get(name, 1) for name in self.arrays}
        out = ctypes.c_void_p()
        wanted = config(folder, "nameless", ring, direct, depth, threads, block_bytes, 0)
        shape = _shape(self.arrays, elems, cell_elems, slots, self.per)
        call("dc_stream_open", ctypes.byref(wanted), ctypes.byref(shape), ctypes.byref(out))
        self._address = out.value
        self._places = {name: i for i, name in enumerate(self.arrays)}
        found = self._info()
        self.cells, self.cell_elems = int(found.cells), int(found.cell_elems)
        self.disk_bytes, self.memory_bytes = int(found.disk_bytes), int(found.memory_bytes)

    def __repr__(self) -> str:
        return f"deepc.offload.Stream({self.folder!r}, {', '.join(self.arrays)})"

    def _file(self) -> int:
        return int(C.dc_stream_file(self._opened()))

    def _info(self) -> StreamInfo:
        found = StreamInfo()
        call("dc_stream_get_info", self._opened(), ctypes.byref(found))
        return found

    @property
    def unsaved(self) -> int:
        """Cells with values that are not on disk (yet)."""
        return int(self._info().unsaved)

    @property
    def wait_ns(self) -> int:
        """Nanoseconds that calls waited for the disk so far."""
        return int(self._info().wait_ns)

    def _mask(self, names: list[str] | tuple[str, ...] | None) -> int:
        if names is None:
            return (1 << len(self.arrays)) - 1
        return sum(1 << place for place in {self._place(n) for n in names})  # a set: one may be named twice

    def _place(self, name: str) -> int:
        if name not in self._places:
            raise ArgumentError(f"{self!r} has no array {name!r}")
        return self._places[name]

    @numeric
    def walk(
        self,
        first: int = 0,
        last: int | None = None,
        *,
        reads: list[str] | tuple[str, ...] | None = None,
        writes: list[str] | tuple[str, ...] | None = None,
    ) -> Walk:
        """See Walk. reads: the arrays whose values are wanted, the memory of others holds anything; writes: those that
        the work changes. None: all."""
        return Walk(self, first, self.cells if last is None else last, self._mask(reads), self._mask(writes))

    def read(self, name: str, begin: int, out: torch.Tensor) -> torch.Tensor:
        """Fills the contiguous CPU tensor `out`, of the array's dtype, from element `begin` on. Returns it."""
        self._window("dc_stream_read", name, begin, out)
        return out

    def write(self, name: str, begin: int, value: torch.Tensor) -> None:
        """The elements from `begin` on are those of `value`, a contiguous CPU tensor of the array's dtype. They are on
        disk after flush(), or when their place in memory is needed."""
        self._window("dc_stream_write", name, begin, value)

    def flush(self) -> None:
        """Everything is on disk."""
        call("dc_stream_flush", self._opened())

    def mend(self) -> int:
        """Parts of cells that can't be read, or are damaged, are zeros from now on: before all is written anew. Returns
        how many there were."""
        found = 0
        for cell in range(self.cells):
            for place, (name, dtype) in enumerate(self.arrays.items()):
                try:
                    self.read(name, cell * self.cell_elems // self.per[name], torch.empty(1, dtype=dtype, device="cpu"))
                except DiskError:
                    call("dc_stream_drop", self._opened(), place, cell)
                    found += 1
        return found

    @numeric
    def _window(self, function: str, name: str, begin: int, tensor: torch.Tensor) -> None:
        place = self._place(name)
        ((data, _),) = addresses([tensor], repr(self))
        if tensor.dtype != self.arrays[name]:
            raise ArgumentError(f"{self!r}: array {name!r} is {self.arrays[name]}, the tensor {tensor.dtype}")
        if function == "dc_stream_read":
            changed([tensor])
        call(function, self._opened(), place, begin, tensor.numel(), data)


def _shape(
    arrays: Mapping[str, torch.dtype], elems: int, cell_elems: int, slots: int, per: Mapping[str, int] | None = None
) -> StreamConfig:
    """The core's dc_stream_config. It holds its rows."""
    for name, value in (("elems", elems), ("cell_elems", cell_elems), ("slots", slots)):
        if not 0 <= value < 1 << (31 if name == "slots" else 63):
            raise ArgumentError(f"{name} {value} is out of range")
    rows = (StreamArray * max(1, len(arrays)))()
    for row, (name, dtype) in zip(rows, arrays.items()):
        row.name, row.elem_bytes = name.encode(), dtype.itemsize
    config = StreamConfig(arrays=rows, narrays=len(arrays), elems=elems, cell_elems=cell_elems, slots=slots)
    if any(n != 1 for n in (per or {}).values()):
        config.per = (ctypes.c_int64 * len(arrays))(*((per or {}).get(name, 1) for name in arrays))
    return config


@numeric
def stream_bytes(arrays: Mapping[str, torch.dtype], elems: int, *, cell_elems: int, slots: int) -> tuple[int, int]:
    """(bytes on disk, bytes of memory) that such a Stream takes."""
    disk, memory = ctypes.c_int64(), ctypes.c_int64()
    shape = _shape(arrays, elems, cell_elems, slots)
    call("dc_stream_bytes", ctypes.byref(shape), ctypes.byref(disk), ctypes.byref(memory))
    return disk.value, memory.value
