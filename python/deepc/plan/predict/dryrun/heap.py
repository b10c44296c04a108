"""What the process's own malloc and the core's heap do with blocks that stand for tensors."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

from ....core import memory
from ....core.foreign import private
from ....core.lib import C, HeapStats, call

PAGE = 4096
_IS_MMAPPED = 2  # in the word before a block of glibc's
THP_BYTES = 2 << 20  # from here on torch aligns to pages where its huge-page switch is on (c10/core/impl/alloc_cpu.cpp)


def load_compiler() -> int:
    """Imports what the first optimizer of torch.optim in a process imports (torch's compiler, some 65 MB; deepc's own
    do without); returns the memory that this took."""
    return _taken_by(private.load_compiler)


def load_symbolic_shapes() -> int:
    """Imports what the ranks of a pipeline do for gradients that come from other stages (some 35 MB); returns the
    memory that this took."""
    return _taken_by(private.load_symbolic_shapes)


def _taken_by(load: Callable[[], bool]) -> int:
    before = anonymous_bytes()
    return max(0, anonymous_bytes() - before) if load() else 0


def anonymous_bytes() -> int:
    """Resident private memory of this process that no file backs."""
    with open("/proc/self/status") as f:
        for line in f:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


class _Pages:
    """Which pages of a range of addresses are resident, from page number `start` on."""

    def __init__(self, start: int, count: int) -> None:
        self.start = start
        self._resident = self._read(count)

    def _read(self, count: int) -> bytearray:
        with open("/proc/self/pagemap", "rb") as f:
            f.seek(8 * self.start)
            entries = f.read(8 * count)
        pages = bytearray(1 if high & 0xC0 else 0 for high in entries[7::8])  # bits 63 and 62: present, swapped out
        pages.extend(bytes(count - len(pages)))
        return pages

    def look(self, count: int) -> None:
        self._resident = self._read(count)

    def touch(self, begin: int, end: int) -> int:
        """Makes pages [begin, end) resident; returns how many were not."""
        begin, end = begin - self.start, end - self.start
        if end > len(self._resident):
            self._resident.extend(bytes(end - len(self._resident) + 16384))
        new = self._resident.count(0, begin, end)
        if new:
            self._resident[begin:end] = b"\1" * (end - begin)
        return new

    def drop(self, begin: int, end: int) -> int:
        """Gives pages [begin, end) back; returns how many were resident."""
        begin, end = begin - self.start, min(end - self.start, len(self._resident))
        gone = self._resident.count(1, begin, end)
        self._resident[begin:end] = bytes(end - begin)
        return gone

    def resident(self) -> int:
        return self._resident.count(1)


class _Core:
    """How much memory the core's heap would have if every block were written from end to end: what was ever written,
    but no more than the huge pages that blocks covered at once, since free ones go where memory is missing
    (ops/base/heap.c)."""

    def __init__(self, huge: bool) -> None:
        stats = memory.heap()
        self._unit = THP_BYTES // PAGE if huge else 1  # a huge page is resident as a whole
        self._pages = _Pages(stats["base"] // PAGE, stats["extent"] // PAGE)
        self._written = self._most = self._has = PAGE * self._pages.resident()
        self._stats = HeapStats(struct_size=ctypes.sizeof(HeapStats))

    def write(self, at: int, nbytes: int) -> int:
        """A block that was taken just now; returns how many bytes more the heap has."""
        unit = self._unit
        self._written += PAGE * self._pages.touch(at // PAGE // unit * unit, -(-(at + nbytes) // (PAGE * unit)) * unit)
        call("dc_heap_stats", ctypes.byref(self._stats))
        self._most = max(self._most, self._stats.covered)
        before, self._has = self._has, min(self._written, self._most)
        return self._has - before


class ShadowHeap:
    """Blocks from this process's malloc, and from the core's heap where the engine uses it, that stand for tensors.
    `resident`: how many more bytes would be resident than at the start if every block were written from end to end;
    `peak`: the most of it. Pages of malloc's heap count from their first use until they go back to the system.

    Only for the main thread of glibc (its mmap flag and program break are read); `usable` says if that is what runs
    here.
    """

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        self.usable = (
            hasattr(libc, "gnu_get_libc_version")
            and hasattr(libc, "posix_memalign")
            and not os.environ.get("LD_PRELOAD")
        )
        self.resident = self.peak = self._mapped = self._heap = self._base = 0
        self._blocks: dict[int, tuple[int, int]] = {}  # key -> (address, or 0 if it has a mapping of its own; bytes)
        self._huge = os.environ.get("THP_MEM_ALLOC_ENABLE") == "1"
        self._core: _Core | None = None
        self._smallest = 0  # of the core's blocks
        self._counts = 1.0  # the part of new pages of malloc's heap that a real run would have as well
        if not self.usable:
            return
        self._free, self._memalign, self._sbrk = libc.free, libc.posix_memalign, libc.sbrk
        self._free.argtypes, self._free.restype = [ctypes.c_void_p], None
        self._memalign.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t]
        self._sbrk.argtypes, self._sbrk.restype = [ctypes.c_ssize_t], ctypes.c_void_p
        self._pointer = ctypes.c_void_p()
        self._top = self._sbrk(0) // PAGE
        start = _heap_start() // PAGE or self._top
        self._pages = _Pages(start, self._top - start)

    def look(self) -> None:
        """Reads from the kernel which pages of the heap are resident now."""
        if self.usable:
            self._top = self._sbrk(0) // PAGE
            self._pages.look(max(0, self._top - self._pages.start))

    def use_core(self) -> None:
        """From here on large blocks come from the core's heap, as the engine's do."""
        if self.usable and memory.keep_heap():
            self._smallest = C.dc_heap_smallest()
            self._core = _Core(self._huge)

    def settle(self) -> None:
        """After a step, where large blocks are the core's. What a dry run itself has made in the meantime lies where a
        real run's next step finds some of what small blocks left free (measured: it takes 1 of 21 MiB of new pages in
        one process, 14 of 20 in a pipeline, where messages come and go)."""
        if self._core is not None:
            self._counts = 0.5

    def alloc(self, key: int, nbytes: int) -> None:
        if nbytes == 0:
            return
        if not self.usable:
            self._blocks[key] = (0, nbytes)
            self._mapped += nbytes
        elif self._core is None or nbytes < self._smallest or not self._from_core(key, nbytes):
            self._from_malloc(key, nbytes)
        self._note()

    @property
    def in_core(self) -> bool:
        """Whether large blocks come from the core's heap."""
        return self._core is not None

    def alloc_high(self, key: int, nbytes: int) -> None:
        """Whole huge pages of the core's heap, as a lease takes them (ops/base/lease.c)."""
        if not self._from_core(key, nbytes, C.dc_heap_take_high):
            self._blocks[key] = (0, nbytes)
            self._mapped += nbytes
        self._note()

    def _from_core(self, key: int, nbytes: int, take: Callable[[int], int | None] = C.dc_heap_take) -> bool:
        at = take(nbytes)
        if not at:
            return False
        self._blocks[key] = (at, -nbytes)
        assert self._core is not None
        self._heap += self._core.write(at, nbytes)
        return True

    def _from_malloc(self, key: int, nbytes: int) -> None:
        huge = self._huge and nbytes >= THP_BYTES
        if self._memalign(ctypes.byref(self._pointer), PAGE if huge else 64, nbytes):  # more than the machine has
            self._blocks[key] = (0, nbytes)
            self._mapped += nbytes
            return
        at = self._pointer.value or 0
        self._follow_top()
        # A mapping of its own, or in another arena than the one that grows by the program break: glibc goes there, and
        # stays there, once the break could not grow. Its addresses are a terabyte away from the heap's, which is no
        # place for a map of pages.
        own = (
            bool(ctypes.c_size_t.from_address(at - 8).value & _IS_MMAPPED)
            or not self._pages.start <= at // PAGE < self._top
        )
        self._blocks[key] = (at, nbytes if own else -nbytes)
        if own:
            self._mapped += nbytes
        else:
            new = self._pages.touch(at // PAGE, (at + nbytes + PAGE - 1) // PAGE)
            self._heap += int(PAGE * new * self._counts)

    def free(self, key: int) -> None:
        if key not in self._blocks:
            return
        at, nbytes = self._blocks.pop(key)
        if nbytes > 0:
            self._mapped -= nbytes
        if at and not (self._core is not None and C.dc_heap_give(at)):
            self._free(at)
            self._follow_top()
        self._note()

    def hold(self, nbytes: int) -> None:
        """A block for a moment: a kernel's workspace."""
        self.alloc(-1, nbytes)
        self.free(-1)

    def rebase(self, keep: int) -> None:
        """Counts from here on, with `keep` bytes that are there already."""
        if self.usable:
            self._follow_top()
        self._base = self._mapped + self._heap - keep
        self.resident = self.peak = keep

    def come_and_go(self, sizes: list[int]) -> int:
        """Blocks that are all allocated and then all freed, as a model's parameters are. Returns how much `resident`
        falls at the end."""
        for i, n in enumerate(sizes):
            self.alloc(-2 - i, n)
        most = self.resident
        for i in reversed(range(len(sizes))):
            self.free(-2 - i)
        return self.resident - most

    def in_turn(self, sizes: list[int]) -> None:
        """Blocks of which each lives until the next is there."""
        for i, n in enumerate(sizes):
            self.alloc(-2 - i, n)
            self.free(-1 - i)
        self.free(-1 - len(sizes))

    def _note(self) -> None:
        self.resident = self._mapped + self._heap - self._base
        self.peak = max(self.peak, self.resident)

    def _follow_top(self) -> None:
        top = self._sbrk(0) // PAGE
        if top < self._top:
            self._heap -= PAGE * self._pages.drop(top, self._top)
        self._top = top


def _heap_start() -> int:
    with open("/proc/self/maps") as f:
        for line in f:
            if line.rstrip().endswith("[heap]"):
                return int(line.split("-")[0], 16)
    return 0
