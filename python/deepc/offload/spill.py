"""Values that lie on disk for a while and come back in the reverse order: what autograd saves in a forward.

Spill: a file without a name. put() starts to write a value and holds it until that is done; Spilled.get() gives it
back, from memory if it is still held, and starts to read those that were put before it. A place is used again when
nothing lies in the file any more."""

from __future__ import annotations

import collections
import os
import weakref

import torch

from ..core.lib import C
from ..errors import DamagedError, DiskError
from .array import Nameless
from .file import File, Handle
from .place import ALIGN

BEHIND = 4  # writes that may be on their way
AHEAD = 2  # values that are read before they are asked for


class Spilled:
    """A value of a Spill; its place is free when this object goes."""

    def __init__(self, spill: Spill, index: int, offset: int, values: torch.Tensor) -> None:
        self._spill, self._index, self._offset = spill, index, offset
        self._nbytes = values.nbytes
        self._crc = C.dc_crc32c(0, values.data_ptr(), values.nbytes)
        self._held: torch.Tensor | None = values  # until it is on disk
        self._version = values._version
        self._modified = False
        self._io: Handle | None = None
        self._coming: torch.Tensor | None = None
        self.failure: DiskError | None = None  # of its write, which leaves it in memory

    def get(self) -> torch.Tensor:
        """[bytes] uint8. DiskError, DamagedError; RuntimeError in torch's words if it was changed before it was on
        disk."""
        if self._held is None:
            self._fetch()
        elif self._held._version != self._version:
            self._modified = True
        if self._modified:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation"
                f" ({self._spill.what}, {self._nbytes} bytes, on their way to {self._spill.folder})"
            )
        self._spill._fetch_before(self._index)
        if self._held is not None:
            return self._held
        io, self._io = self._io, None
        value, self._coming = self._coming, None
        assert io is not None and value is not None
        try:
            io.wait()
        except DiskError as exc:
            raise self._spill._told(exc) from exc
        finally:
            io._free()
        self._spill.bytes_read += value.nbytes
        if C.dc_crc32c(0, value.data_ptr(), value.nbytes) != self._crc:
            raise DamagedError(
                f"{self._spill.what} on disk ({self._spill.folder}): {self._nbytes} bytes are not what was written"
                " there: torn or damaged; the disk or its memory fails"
            )
        return value

    def _fetch(self) -> None:
        """Starts to read it, where it is neither in memory nor on its way."""
        if self._held is None and self._io is None:
            self._coming = torch.empty(self._nbytes, dtype=torch.uint8)
            self._io = self._spill._file.read_async(self._coming, self._offset)

    def _settle(self) -> None:
        """Waits for its write. If it fails, the value stays in memory."""
        io, self._io = self._io, None
        if io is None or self._held is None:
            return
        try:
            io.wait()
            self._modified = self._held._version != self._version
            self._held = None
        except DiskError as exc:
            self.failure = self._spill._told(exc)
        finally:
            io._free()

    def __del__(self) -> None:
        if self._io is not None:
            self._io._free()  # waits
        self._spill._gone(self._index)


class Spill:
    """what: its values' name in messages. One thread at a time. DiskError: no file can be made in `folder`."""

    def __init__(self, folder: str | os.PathLike[str], what: str) -> None:
        self.folder, self.what = os.path.expanduser(folder), what
        self._own = Nameless(self.folder)
        self._file = File(self._own.path, "r+")
        self._all: dict[int, weakref.ref[Spilled]] = {}
        self._writes: collections.deque[weakref.ref[Spilled]] = collections.deque()
        self._next = self._end = 0
        self.bytes_written = self.bytes_read = self.most_bytes = 0

    def put(self, values: torch.Tensor) -> Spilled:
        """`values`: contiguous uint8 on the CPU, which nobody changes before they are on disk. DiskError,
        DiskFullError: an earlier write has failed; nothing is lost, its value is in memory."""
        self._settle(BEHIND - 1)
        out = Spilled(self, self._next, self._end, values)
        self._all[self._next] = weakref.ref(out)
        self._next += 1
        self._end += -(-values.nbytes // ALIGN) * ALIGN
        self.most_bytes = max(self.most_bytes, self._end)
        out._io = self._file.write_async(values, out._offset)
        self._writes.append(weakref.ref(out))
        self.bytes_written += values.nbytes
        return out

    def _settle(self, most: int) -> None:
        while len(self._writes) > most:
            done = self._writes.popleft()()
            if done is not None and done._held is not None:
                done._settle()
                if done.failure is not None:
                    failure, done.failure = done.failure, None
                    raise failure

    def settle(self) -> None:
        """Everything is on disk; else as put."""
        self._settle(0)

    def _fetch_before(self, index: int) -> None:
        """Starts to read what was put before number `index` and is not in memory."""
        for at in range(index - 1, max(-1, index - 1 - AHEAD), -1):
            if at in self._all and (other := self._all[at]()) is not None:
                other._fetch()

    def _gone(self, index: int) -> None:
        self._all.pop(index, None)
        if not self._all:
            self._next = self._end = 0

    def _told(self, exc: DiskError) -> DiskError:
        return type(exc)(f"{self.what} on disk (a file without a name in {self.folder}): {exc}")

    def close(self) -> None:
        """Its space goes; what lies there can't be had any more. A second call does nothing."""
        for ref in list(self._all.values()):
            if (value := ref()) is not None and value._io is not None:
                value._io._free()
                value._io = None
        self._file.close()
        self._own.close()
