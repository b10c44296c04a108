"""Numbered values on disk that change all at once (offload/extent.c)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..core.lib import C, ExtentInfo, ExtentsInfo, call
from ..errors import ArgumentError, numeric
from .file import Handle, Opened, config
from .place import addresses


@dataclass(frozen=True)
class Extent:
    """What extent i may hold and holds, in bytes. generation 0: it was never written."""

    capacity: int
    nbytes: int
    generation: int


class Extents(Opened):
    """A file of numbered extents. What is written counts from commit() on, all of it or none: a process that is killed
    at any moment leaves the generation before or the one after. Reads check the checksum (CRC-32C) and generation.

    capacities: bytes of each extent; None takes what the file says. mode: as in File; "c" lays a new file out, with
    its space reserved. copies: 2, or 1 for half the space, where a process that is killed while it writes an extent
    leaves it torn (DamagedError when it is read); 0: 2, or what the file says. The rest: as in File.

    DamagedError: torn, stale or damaged. ArgumentError: sizes that do not fit. DeepcError: a request on the extent is
    on its way, or the file is open for writing elsewhere."""

    _close_with = "dc_extents_close"

    @numeric
    def __init__(
        self,
        path: str | os.PathLike[str],
        capacities: Sequence[int] | None = None,
        mode: str = "c",
        *,
        copies: int = 0,
        ring: str = "auto",
        direct: bool = True,
        depth: int = 0,
        threads: int = 0,
        block_bytes: int = 0,
    ) -> None:
        super().__init__()
        self.path = os.fspath(path)
        given = None
        if capacities is not None:
            if not capacities or not all(isinstance(n, int) and 0 <= n < 1 << 63 for n in capacities):
                raise ArgumentError(f"{self!r}: capacities must be numbers of bytes, at least one")
            given = (ctypes.c_int64 * len(capacities))(*capacities)
        out = ctypes.c_void_p()
        wanted = config(path, mode, ring, direct, depth, threads, block_bytes, 0)
        count = len(capacities) if capacities is not None else 0
        call("dc_extents_open", ctypes.byref(wanted), given, count, copies, ctypes.byref(out))
        self._address = out.value

    def __repr__(self) -> str:
        return f"deepc.offload.Extents({self.path!r})"

    def _file(self) -> int:
        return int(C.dc_extents_file(self._opened()))

    def _info(self) -> ExtentsInfo:
        found = ExtentsInfo()
        call("dc_extents_get_info", self._opened(), ctypes.byref(found))
        return found

    def __len__(self) -> int:
        return int(self._info().count)

    @property
    def generation(self) -> int:
        """The last that was committed; 0: none was."""
        return int(self._info().generation)

    @property
    def copies(self) -> int:
        return int(self._info().copies)

    @numeric
    def __getitem__(self, extent: int) -> Extent:
        """What a read of this extent gives now, also before the commit."""
        found = ExtentInfo()
        call("dc_extent_get_info", self._opened(), extent, ctypes.byref(found))
        return Extent(found.capacity, found.bytes, found.generation)

    def __iter__(self) -> Iterator[Extent]:
        return (self[i] for i in range(len(self)))

    def write_async(self, extent: int, tensor: torch.Tensor) -> Handle:
        """Starts writing the extent's next value. Change nothing in the tensor until the handle is done."""
        return self._begin("dc_extent_write_start", extent, tensor, False)

    def read_async(self, extent: int, tensor: torch.Tensor) -> Handle:
        """Starts reading the whole value, which must have the tensor's bytes. The checksum is looked at in
        handle.wait()."""
        return self._begin("dc_extent_read_start", extent, tensor, True)

    def write(self, extent: int, tensor: torch.Tensor) -> None:
        """write_async, and waits."""
        self._whole(self.write_async(extent, tensor))

    def read(self, extent: int, tensor: torch.Tensor) -> None:
        """read_async, and waits."""
        self._whole(self.read_async(extent, tensor))

    def commit(self, durable: bool = True) -> None:
        """Waits for all writes and makes them the file's. durable: also against a loss of power (fdatasync, twice).
        DeepcError, and nothing is changed, if a write failed and was not repeated, or after a commit that failed when
        it made them durable (what it was to bring to disk may be gone: write that again)."""
        call("dc_extents_commit", self._opened(), int(durable))

    def rollback(self) -> None:
        """Back to the last commit."""
        call("dc_extents_rollback", self._opened())

    @numeric
    def _begin(self, name: str, extent: int, tensor: torch.Tensor, reads: bool) -> Handle:
        ((data, nbytes),) = addresses([tensor], f"{self!r}, extent {extent}")
        return self._start(name, self._opened(), extent, data, nbytes, tensors=[tensor], reads=reads)
