"""An array on disk that is read and written in parts, in a file without a name: nothing is left of it when the last
process that has it open ends, however it ends.

Blocks of BLOCK elements have a checksum (CRC-32C) in memory, which every read compares: what the disk gives is what
was written last, or a DamagedError. Writes are of whole blocks, or make them whole from what is there (`put`).
Processes of a node share an array by its `path` and a table of checksums in memory that they share; a block has one
writer at a time, and fences are the caller's.

Window: addresses for all of the array, of which only the parts under way have memory."""

from __future__ import annotations

import collections
import ctypes
import mmap
import os
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch

from ..core.lib import C, check
from ..core.memory import tensor_at
from ..errors import ArgumentError, DamagedError, DiskError
from .file import File, Handle
from .place import ALIGN, empty

BLOCK = 4096  # elements that have a checksum together
_TRANSFER = 256 << 10  # bytes that are moved at once: small, because unaligned ones have buffers of this size
_PAGE = mmap.PAGESIZE  # 4 KiB, but 16 or 64 KiB on some arm64
_NORESERVE = 0x4000  # MAP_NORESERVE of Linux; Python has the name since 3.13


class Nameless:
    """A file of a folder without a name in it. path: by which any process of this user opens it, as long as this one
    lives or another has it open."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder, self._fd = os.path.expanduser(folder), -1
        try:
            self._fd = os.open(self.folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except (IsADirectoryError, OSError) as exc:  # a file system without such files, or no such folder
            if not os.path.isdir(self.folder):
                raise DiskError(f"{self.folder} is no folder; name one that exists (nvme_path)") from exc
            name = os.path.join(self.folder, f".deepc-{os.getpid()}-{os.urandom(8).hex()}")
            try:
                self._fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
                os.unlink(name)
            except OSError as exc:
                raise DiskError(
                    f"no file can be made in {self.folder}: {exc.strerror} (errno {exc.errno}); choose a folder that"
                    " this user may write to"
                ) from exc
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"

    def place(self) -> Place:
        """For another process."""
        found = os.fstat(self._fd)
        return Place(os.getpid(), self._fd, found.st_dev, found.st_ino)

    def close(self, close: Callable[[int], None] = os.close) -> None:  # an argument: at the end `os` may be gone
        """This process's hold on it ends. A second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close(fd)

    __del__ = close


class Place(NamedTuple):
    """Of a Nameless, for another process: where it is open, and which file that is."""

    process: int
    descriptor: int
    device: int
    inode: int

    def path(self) -> str:
        """By which this process opens it. DiskError: it can't, or another file is there (the process is in another PID
        namespace)."""
        path = f"/proc/{self.process}/fd/{self.descriptor}"
        try:
            found = os.stat(path)
        except OSError as exc:
            raise DiskError(
                f"the file without a name that process {self.process} has made can't be reached ({path}:"
                f" {exc.strerror}, errno {exc.errno}); ranks of a node must see each other's /proc, as one user"
            ) from exc
        if (found.st_dev, found.st_ino) != (self.device, self.inode):
            raise DiskError(
                f"{path} is another file than the one that a rank of this node has made there: the ranks are in"
                " different PID namespaces; start them in one"
            )
        return path


class DiskPlace(NamedTuple):
    """Where a value of DiskPlaces is, bytes, and its CRC-32C."""

    offset: int
    nbytes: int
    crc: int


class DiskRead:
    """A part of an array on its way into memory."""

    def __init__(self, array: DiskArray, handle: Handle, parts: list[tuple[torch.Tensor, int]], copies: Any) -> None:
        self._array, self._handle, self._parts, self._copies = array, handle, parts, copies

    def abandon(self) -> None:
        """Waits, whatever becomes of it."""
        self._handle._free()
        self._parts, self._copies = [], []

    def wait(self) -> None:
        """Until it is there, and checked. DiskError, DamagedError."""
        try:
            self._array._finish(self._handle)
        finally:
            self._handle._free()
        for values, block in self._parts:
            self._array._check(values, block)
        for to, of in self._copies:
            to.copy_(of)
        self._parts, self._copies = [], []


class DiskArray:
    """[numel] of dtype, zeros at first, its space reserved. what: its name in messages. path, sums: of the process that
    made it (`path`), and its table of checksums, int32 [blocks]; else a file of its own is made in `folder`."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        numel: int,
        dtype: torch.dtype,
        what: str,
        *,
        path: str = "",
        sums: torch.Tensor | None = None,
    ) -> None:
        self.folder, self.numel, self.dtype, self.what = os.fspath(folder), numel, dtype, what
        self.blocks = -(-numel // BLOCK)
        self._block_bytes = BLOCK * dtype.itemsize
        self.nbytes = self.blocks * self._block_bytes
        self._own = None if path else Nameless(folder)
        self.path = path or (self._own.path if self._own is not None else "")
        self.sums = torch.empty(self.blocks, dtype=torch.int32, device="cpu") if sums is None else sums
        if self.sums.dtype != torch.int32 or self.sums.numel() != self.blocks:
            raise ArgumentError(f"{what}: a table of {self.blocks} int32 checksums is needed, got {self.sums.numel()}")
        try:
            self._file = File(self.path, "r+", block_bytes=_TRANSFER, reserve_bytes=0 if path else max(self.nbytes, 1))
        except DiskError as exc:
            raise type(exc)(self._told(exc)) from exc
        if not path:
            zero = torch.zeros(BLOCK, dtype=dtype, device="cpu")
            self.sums.fill_(ctypes.c_int32(C.dc_crc32c(0, zero.data_ptr(), zero.nbytes)).value)
        self.bytes_read = self.bytes_written = 0
        self.mending = False  # all is about to be written anew: what can't be read is zeros to `put`

    # ---- reading -----------------------------------------------------------------------------------------------------
    def read_async(self, begin: int, out: torch.Tensor) -> DiskRead:
        """Starts to read elements [begin, begin + n) into `out` [n], contiguous. No write to them may be on its way."""
        n = self._n(begin, out)
        first, end = begin // BLOCK, -(-(begin + n) // BLOCK)
        lo, hi = -(-begin // BLOCK) * BLOCK, (begin + n) // BLOCK * BLOCK  # whole blocks go straight to their place
        tensors: list[torch.Tensor] = []
        offsets: list[int] = []
        parts: list[tuple[torch.Tensor, int]] = []
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        if lo < hi:
            self._add(tensors, offsets, parts, out[lo - begin : hi - begin], lo // BLOCK)
        edges = {b for b in (first, end - 1) if n and not lo <= b * BLOCK < hi}
        for b in sorted(edges):
            block = empty(BLOCK, dtype=self.dtype)
            self._add(tensors, offsets, parts, block, b)
            a, z = max(begin, b * BLOCK), min(begin + n, (b + 1) * BLOCK)
            copies.append((out[a - begin : z - begin], block[a - b * BLOCK : z - b * BLOCK]))
        self.bytes_read += sum(t.nbytes for t in tensors)
        return DiskRead(self, self._file.read_async(tensors, offsets), parts, copies)

    def read(self, begin: int, out: torch.Tensor) -> torch.Tensor:
        """read_async, and waits; returns `out`."""
        self.read_async(begin, out).wait()
        return out

    def get(self, begin: int, n: int) -> torch.Tensor:
        """[n] elements in memory of their own."""
        return self.read(begin, torch.empty(n, dtype=self.dtype, device="cpu"))

    # ---- writing -----------------------------------------------------------------------------------------------------
    def write_async(self, begin: int, values: torch.Tensor) -> Handle:
        """Starts to write whole blocks: begin and the number of values are multiples of BLOCK. Leave them alone until
        `finish`; read nothing of them until then."""
        n = self._n(begin, values)
        if begin % BLOCK or n % BLOCK:
            raise ArgumentError(f"{self.what}: elements [{begin}, {begin + n}) are no whole blocks of {BLOCK}; use put")
        first = begin // BLOCK
        check(C.dc_blocks_sum(values.data_ptr(), values.nbytes, self._block_bytes, self.sums[first:].data_ptr()))
        self.bytes_written += values.nbytes
        return self._file.write_async(values, first * self._block_bytes)

    def finish(self, handle: Handle) -> None:
        """Waits for a write_async. DiskError, DiskFullError: its blocks hold anything, which reads tell."""
        try:
            self._finish(handle)
        finally:
            handle._free()

    def put(self, begin: int, values: torch.Tensor) -> None:
        """Writes `values` [n], on any memory and of any floating dtype, at any place, and waits."""
        values = values.detach().reshape(-1)
        n = values.numel()
        if not 0 <= begin <= self.numel - n:
            raise ArgumentError(f"{self.what}: elements [{begin}, {begin + n}) are outside of its {self.numel}")
        writes: collections.deque[tuple[Handle, torch.Tensor]] = collections.deque()
        try:
            self._put(begin, values, writes)
        finally:
            while writes:
                writes.popleft()[0]._free()  # waits

    def _put(self, begin: int, values: torch.Tensor, writes: collections.deque[tuple[Handle, torch.Tensor]]) -> None:
        """writes: gets those under way, with the memory that they are from."""
        at, stop = begin, begin + values.numel()
        while at < stop:
            lo = at // BLOCK * BLOCK
            hi = min(lo + _PUT // BLOCK * BLOCK, -(-stop // BLOCK) * BLOCK)
            room = empty(hi - lo, dtype=self.dtype)
            end = min(hi, stop)
            for edge in {b for b, cut in ((lo, at > lo), (hi - BLOCK, end < hi)) if cut}:
                self._read_block(edge, room[edge - lo : edge - lo + BLOCK])
            _copy(room[at - lo : end - lo], values[at - begin : end - begin])
            writes.append((self.write_async(lo, room), room))
            at = end
            if len(writes) > _PUT_AHEAD:
                self.finish(writes.popleft()[0])
        while writes:
            self.finish(writes.popleft()[0])

    # ---- the rest ----------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Its space goes with the last process that has it open. A second call does nothing."""
        self._file.close()
        if self._own is not None:
            self._own.close()

    def place(self) -> Place:
        """For another process that opens it, where this one has made it."""
        if self._own is None:
            raise ArgumentError(f"{self!r} was made by another process")
        return self._own.place()

    def info(self) -> dict[str, Any]:
        """See File.info."""
        return self._file.info()

    def _n(self, begin: int, values: torch.Tensor) -> int:
        n = values.numel()
        if values.dtype != self.dtype or not values.is_contiguous():
            raise ArgumentError(f"{self.what}: contiguous {self.dtype} is needed, got {values.dtype}")
        if not 0 <= begin <= self.blocks * BLOCK - n:
            raise ArgumentError(f"{self.what}: elements [{begin}, {begin + n}) are outside of its {self.numel}")
        return n

    def _add(
        self,
        tensors: list[torch.Tensor],
        offsets: list[int],
        parts: list[tuple[torch.Tensor, int]],
        values: torch.Tensor,
        block: int,
    ) -> None:
        tensors.append(values)
        offsets.append(block * self._block_bytes)
        parts.append((values, block))

    def _read_block(self, begin: int, out: torch.Tensor) -> None:
        try:
            self.read_async(begin, out).wait()
        except DamagedError:
            if not self.mending:
                raise
            out.zero_()

    def _finish(self, handle: Handle) -> None:
        try:
            handle.wait()
        except DiskError as exc:
            raise type(exc)(self._told(exc)) from exc

    def _check(self, values: torch.Tensor, block: int) -> None:
        bad = ctypes.c_int64()
        table = self.sums[block:].data_ptr()
        check(C.dc_blocks_check(values.data_ptr(), values.nbytes, self._block_bytes, table, ctypes.byref(bad)))
        if bad.value >= 0:
            at = (block + bad.value) * BLOCK
            raise DamagedError(
                f"{self.what} on disk ({self.folder}): elements [{at}, {at + BLOCK}) are not what was written there"
                " last: torn, stale or damaged. Load the last checkpoint; if it comes again, the disk or its memory"
                " fails"
            )

    def _told(self, exc: BaseException) -> str:
        return f"{self.what} on disk (a file without a name in {self.folder}): {exc}"


class DiskPlaces:
    """Values of any sizes, each at a place of its own in a nameless file that grows. what: their name in messages."""

    def __init__(self, folder: str | os.PathLike[str], what: str) -> None:
        self.folder, self.what = os.fspath(folder), what
        self._own = Nameless(folder)
        self._file = File(self._own.path, "r+", block_bytes=_TRANSFER)
        self._end = 0

    def put(self, values: torch.Tensor, place: DiskPlace | None = None) -> DiskPlace:
        """Writes a contiguous tensor, and waits: to `place` if it is one of that size, else to a new one."""
        raw = values.detach().reshape(-1).view(torch.uint8)
        if place is None or place.nbytes != raw.nbytes:
            place = DiskPlace(self._end, raw.nbytes, 0)
            self._end += -(-raw.nbytes // ALIGN) * ALIGN
        crc = C.dc_crc32c(0, raw.data_ptr(), raw.nbytes) if raw.nbytes else 0
        if raw.nbytes:
            self._tell(lambda: self._file.write(raw, place.offset))
        return place._replace(crc=crc)

    def get(self, place: DiskPlace, dtype: torch.dtype) -> torch.Tensor:
        """The values at `place`, 1-D, in memory of their own."""
        out = torch.empty(place.nbytes // dtype.itemsize, dtype=dtype, device="cpu")
        if not place.nbytes:
            return out
        self._tell(lambda: self._file.read(out.view(torch.uint8), place.offset))
        if C.dc_crc32c(0, out.data_ptr(), out.nbytes) != place.crc:
            raise DamagedError(
                f"{self.what} on disk ({self.folder}): bytes [{place.offset}, {place.offset + place.nbytes}) are not"
                " what was written there: torn, stale or damaged; the disk or its memory fails"
            )
        return out

    def close(self) -> None:
        """Its space goes. A second call does nothing."""
        self._file.close()
        self._own.close()

    def _tell(self, do: Callable[[], None]) -> None:
        try:
            do()
        except DiskError as exc:
            raise type(exc)(f"{self.what} on disk (a file without a name in {self.folder}): {exc}") from exc


def _copy(to: torch.Tensor, of: torch.Tensor) -> None:
    """On this thread alone where nothing is converted: torch's threads wait for each other, which beside other work
    takes longer than the copy."""
    if to.dtype == of.dtype and of.device.type == "cpu" and of.is_contiguous():
        ctypes.memmove(to.data_ptr(), of.data_ptr(), to.nbytes)
    else:
        to.copy_(of)


_PUT = 1 << 20  # elements that `put` copies at a time
_PUT_AHEAD = 3  # such pieces that may be on their way beside it


class Window:
    """The addresses of a DiskArray. fetch -> ready -> store or drop: between them elements [lo, hi), whole blocks, have
    memory from `base` + lo elements on; outside of that there is none, and reading gives zeros.

    unsaved: what could not be written. It keeps its memory until `flush` has written it."""

    def __init__(self, array: DiskArray) -> None:
        self.array = array
        nbytes = max(mmap.PAGESIZE, array.nbytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        self._map = mmap.mmap(-1, nbytes, flags=flags)
        self._size = array.dtype.itemsize
        self.base = ctypes.addressof(ctypes.c_byte.from_buffer(self._map))
        self._reads: dict[int, tuple[int, DiskRead]] = {}
        self._writes: collections.deque[tuple[int, int, Handle]] = collections.deque()
        self.unsaved: dict[int, int] = {}  # lo -> hi
        self._failure: DiskError | None = None

    @staticmethod
    def blocks(lo: int, hi: int) -> tuple[int, int]:
        """The whole blocks that elements [lo, hi) lie in."""
        return lo // BLOCK * BLOCK, -(-hi // BLOCK) * BLOCK

    def tensor(self, lo: int, hi: int) -> torch.Tensor:
        """[hi - lo]: the memory of these elements."""
        return tensor_at(self.base + lo * self._size, hi - lo, self.array.dtype, self._map)

    def fetch(self, lo: int, hi: int) -> None:
        """Starts to read them."""
        if lo < hi and lo not in self._reads:
            self._reads[lo] = hi, self.array.read_async(lo, self.tensor(lo, hi))

    def ready(self, lo: int) -> None:
        """Waits for the fetch that began at lo; without one it does nothing. DiskError, DamagedError."""
        if lo in self._reads:
            hi, read = self._reads.pop(lo)
            try:
                read.wait()
            except BaseException:
                self.drop(lo, hi)
                raise

    def store(self, lo: int, hi: int) -> None:
        """Starts to write them; their memory goes when that is done. A failure is told by `flush`."""
        if lo < hi:
            try:
                self._writes.append((lo, hi, self.array.write_async(lo, self.tensor(lo, hi))))
            except DiskError as exc:
                self._fail(lo, hi, exc)

    def settle(self, most: int = 0) -> None:
        """Waits until at most so many writes are on their way."""
        while len(self._writes) > most:
            lo, hi, handle = self._writes.popleft()
            try:
                self.array.finish(handle)
            except DiskError as exc:
                self._fail(lo, hi, exc)
            else:
                self.drop(lo, hi)

    def _fail(self, lo: int, hi: int, exc: DiskError) -> None:
        self.unsaved[lo] = hi
        self._failure = self._failure or exc

    def flush(self) -> None:
        """Writes what could not be written, once more. DiskError, DiskFullError: it could not, and stays."""
        self.array.mending = False
        failure, self._failure = self._failure, None
        for lo, hi in list(self.unsaved.items()):
            del self.unsaved[lo]
            self.store(lo, hi)
        self.settle()
        if self.unsaved:
            raise failure or cast(DiskError, self._failure)
        self._failure = None

    def drop(self, lo: int, hi: int) -> None:
        """Their memory goes, unwritten; where their first and last pages have other elements too, these stay."""
        begin, end = lo * self._size, hi * self._size
        first, last = -(-begin // _PAGE) * _PAGE, end // _PAGE * _PAGE
        if first < last:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)
        else:  # no whole page
            first = last = end
        for at, to in ((begin, first), (last, end)):
            if at < to:
                ctypes.memset(self.base + at, 0, to - at)

    def abandon(self) -> None:
        """Fetches that nobody waits for any more."""
        reads, self._reads = self._reads, {}
        for lo, (hi, read) in reads.items():
            read.abandon()
            self.drop(lo, hi)

    def forget(self) -> None:
        """Everything is about to be written anew: what could not be is given up, and what can't be read is zeros."""
        self.array.mending = True
        self.settle()
        self.abandon()
        unsaved, self.unsaved, self._failure = self.unsaved, {}, None
        for lo, hi in unsaved.items():
            self.drop(lo, hi)
