"""Values that lie on disk for a while and come back in the reverse order: what autograd saves in a forward.

Spill: a file without a name. put() starts to write a value and holds it until that is done; Spilled.get() gives it
back, from memory if it is still held, and starts to read those of the same forward that were put before it. A place is
used again when its value has gone: forwards in flight may come back in any order."""

from __future__ import annotations

import bisect
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

    def __init__(self, spill: Spill, index: int, forward: int, offset: int, values: torch.Tensor) -> None:
        self._spill, self._index, self._forward, self._offset = spill, index, forward, offset
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
        self._spill._fetch_before(self)
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
            self._coming = torch.empty(self._nbytes, dtype=torch.uint8, pin_memory=self._spill.locked, device="cpu")
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
        self._spill._gone(self)


class Spill:
    """what: its values' name in messages. locked: they come back in memory that a GPU reaches. One thread at a time.
    DiskError: no file can be made in `folder`."""

    def __init__(self, folder: str | os.PathLike[str], what: str, locked: bool = False) -> None:
        self.folder, self.what, self.locked = os.path.expanduser(folder), what, locked
        self._own = Nameless(self.folder)
        self._file = File(self._own.path, "r+")
        self._all: dict[int, weakref.ref[Spilled]] = {}
        self._writes: collections.deque[weakref.ref[Spilled]] = collections.deque()
        self._next = self._forward = 0
        self._places = _Places()
        self.bytes_written = self.bytes_read = self.most_bytes = 0

    def put(self, values: torch.Tensor) -> Spilled:
        """`values`: contiguous uint8 on the CPU, which nobody changes before they are on disk. DiskError,
        DiskFullError: an earlier write has failed; nothing is lost, its value is in memory."""
        self._settle(BEHIND - 1)
        out = Spilled(self, self._next, self._forward, self._places.take(values.nbytes), values)
        self._all[self._next] = weakref.ref(out)
        self._next += 1
        self.most_bytes = max(self.most_bytes, self._places.end)
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

    def begin(self) -> None:
        """A forward begins: its values, and those of others that wait meanwhile, are not read ahead for each other."""
        self._forward += 1

    def _fetch_before(self, value: Spilled) -> None:
        """Starts to read what was put before it in its forward and is not in memory."""
        for at in range(value._index - 1, max(-1, value._index - 1 - AHEAD), -1):
            other = self._all[at]() if at in self._all else None
            if other is not None and other._forward == value._forward:
                other._fetch()

    def _gone(self, value: Spilled) -> None:
        self._all.pop(value._index, None)
        self._places.give(value._offset, value._nbytes)
        if not self._all:
            self._next = 0

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


class _Places:
    """Of a file: the first gap that is large enough, else behind `end`."""

    def __init__(self) -> None:
        self.end = 0
        self._gaps: list[tuple[int, int]] = []  # (begin, end), in order, none next to another or to the end

    def take(self, nbytes: int) -> int:
        """The place of so many bytes."""
        size = -(-nbytes // ALIGN) * ALIGN
        for i, (begin, end) in enumerate(self._gaps):
            if end - begin >= size:
                self._gaps[i : i + 1] = [(begin + size, end)] if end - begin > size else []
                return begin
        self.end += size
        return self.end - size

    def give(self, begin: int, nbytes: int) -> None:
        """It is free again."""
        end = begin + -(-nbytes // ALIGN) * ALIGN
        i = bisect.bisect(self._gaps, (begin, end))
        if i < len(self._gaps) and self._gaps[i][0] == end:
            end = self._gaps.pop(i)[1]
        if i and self._gaps[i - 1][1] == begin:
            i -= 1
            begin = self._gaps.pop(i)[0]
        if end == self.end:
            self.end = begin
        elif end > begin:
            self._gaps.insert(i, (begin, end))
