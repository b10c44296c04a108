"""Memory of the C core as torch tensors: huge pages, staggered start addresses, shared segments."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import Any

import torch

from . import env
from .foreign import patches
from .lib import C, HeapStats, call
from .ops import use_heap

# Arrays that are walked together start at different places within 2 MiB (ops/base/base.h): each has a color of its own.
COLORS = {
    "params": 0,
    "acc": 1,
    "exp_avg": 2,
    "sum": 2,
    "momentum_buffer": 2,
    "exp_avg_sq": 3,
    "master": 4,
    "max_exp_avg_sq": 5,
    "lowp": 6,
    "average": 7,
    "average_flat": 8,
    "tree": 9,
    "slots": 10,
    "received": 11,
    "sent": 12,
}


def tensor_at(address: int, numel: int, dtype: torch.dtype, owner: object) -> torch.Tensor:
    """A 1-D tensor over `numel` elements at `address`. Its storage keeps `owner` alive."""
    if numel == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    raw = (ctypes.c_byte * (numel * dtype.itemsize)).from_address(address)
    # The storage holds `raw`, and `raw` the owner.
    raw._deepc_owner = owner  # type: ignore[attr-defined]  # ctypes objects take attributes
    return torch.frombuffer(raw, dtype=dtype, count=numel)


class _Block:
    """Owns one dc_mem_alloc block."""

    def __init__(self, nbytes: int, color: int) -> None:
        pointer = ctypes.c_void_p()
        call("dc_mem_alloc", nbytes, color, ctypes.byref(pointer))
        self.address: int = pointer.value or 0
        self.begin = self.address  # of what it is for

    def __del__(self) -> None:
        if getattr(self, "address", None):
            C.dc_mem_free(self.address)


class _LockedBlock(_Block):
    """The same, whose pages the CUDA driver has locked, and which are no other block's; where it refuses (too much is
    locked), as any other's. device: the GPU that copies from and to them."""

    def __init__(self, nbytes: int, color: int, device: torch.device) -> None:
        page = mmap.PAGESIZE
        pages = -(-nbytes // page) * page
        super().__init__(pages + page, color)  # small blocks of the heap begin anywhere
        self.begin = -(-self.address // page) * page
        self.locked, self._device = False, device
        driver: Any = torch.cuda.cudart()
        if driver.cudaHostRegister(self.begin, pages, 0) == driver.cudaError.success:
            self.locked = True
            return
        with contextlib.suppress(RuntimeError):
            # takes the error away: torch would find it behind its next kernel
            torch.zeros(1, dtype=torch.uint8, device="cuda")

    def __del__(self) -> None:
        if getattr(self, "locked", False):
            # A copy may be under way, and torch's allocators know nothing of this memory.
            with contextlib.suppress(RuntimeError):
                if not torch.cuda.is_current_stream_capturing():
                    torch.cuda.synchronize(self._device)
            torch.cuda.cudart().cudaHostUnregister(self.begin)  # type: ignore[attr-defined]
        super().__del__()


def zeros(numel: int, dtype: torch.dtype, color: int = 0, locked: torch.device | None = None) -> torch.Tensor:
    """A zeroed, faulted-in 1-D CPU tensor on huge pages where the kernel gives them. `color` (0..15) staggers arrays
    that are walked together. locked: in pages that this GPU reaches: copies run at the bus's rate, and beside the
    host's work with non_blocking=True. Raises OutOfMemoryError before the kernel would kill."""
    if numel == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    nbytes = numel * dtype.itemsize
    block = _Block(nbytes, color) if locked is None else _LockedBlock(nbytes, color, locked)
    return tensor_at(block.begin, numel, dtype, block)


class Lease:
    """A zeroed 1-D CPU tensor that has memory only between `need` and `end`, and then the heap's (ops/base/lease.c):
    for what is dead while a forward needs the most. Contents are lost at `end`; where there was no memory `need` leaves
    anything. tensor: [numel] dtype; valid as long as a reference lives.
    """

    def __init__(self, numel: int, dtype: torch.dtype, color: int = 0) -> None:
        handle, address = ctypes.c_void_p(), ctypes.c_void_p()
        call("dc_lease_open", numel * dtype.itemsize, color, ctypes.byref(handle), ctypes.byref(address))
        self.handle = handle.value
        self.tensor = tensor_at(address.value or 0, numel, dtype, _LeaseOwner(self.handle))

    def end(self) -> None:
        """The memory goes back to the heap, the tensor reads as zeros."""
        call("dc_lease_end", self.handle)

    def nbytes(self) -> int:
        """Bytes that the range has now."""
        borrowed, own = ctypes.c_int64(), ctypes.c_int64()
        call("dc_lease_bytes", self.handle, ctypes.byref(borrowed), ctypes.byref(own))
        return borrowed.value + own.value


class _LeaseOwner:
    """Closes the lease with the last tensor over it."""

    def __init__(self, handle: int | None) -> None:
        self._handle = handle

    def __del__(self) -> None:
        C.dc_lease_close(self._handle)


_heap_kept = False


def heap_kept() -> bool:
    """Whether torch's large tensors live in the core's heap now (keep_heap)."""
    return _heap_kept


def keep_heap(keep: bool = True) -> bool:
    """Large CPU tensors of torch come from the core's heap from now on, which keeps their pages, and malloc keeps what
    smaller ones free: so a step finds the memory of the one before, without page faults (ops/base/heap.c). For the
    whole process. Returns whether they do: not where the user chose otherwise (DEEPC_KEEP_HEAP=0) or where torch is
    built in another way than its wheels. keep=False: from the C library again; tensors that live stay.
    """
    if not env.switch("DEEPC_KEEP_HEAP"):
        return False
    kept = ctypes.c_int()
    call("dc_heap_keep_small", int(keep), ctypes.byref(kept))
    global _heap_kept
    before, _heap_kept = _heap_kept, use_heap(keep)
    if _heap_kept != before:
        (patches.applied if _heap_kept else patches.undone)("heap")
    return _heap_kept


def heap_stats() -> dict[str, int]:
    """The core's heap now (struct dc_heap_stats of ops/base/base.h). Bytes: "extent" of [base, base + limit) was ever
    in use; "in_use", its "peak"; "free", the "largest_free" block, and what of it is "free_resident" (at most);
    "decayed": given back to the system so far, because no step had used it for a while; "covered": huge pages that
    blocks lie on; "moved": free ones that went to blocks without memory, so far. Counts: "free_blocks";
    "refusals" of requests; "foreign_frees" of what is no block; "steps" (heap_step)."""
    stats = HeapStats(struct_size=ctypes.sizeof(HeapStats))
    call("dc_heap_stats", ctypes.byref(stats))
    return {name: getattr(stats, name) or 0 for name, *_ in HeapStats._fields_[1:]}


heap = heap_stats  # its first name


def heap_step() -> None:
    """The end of a training step: what the heap has kept free for 32 steps goes back to the system (dc_heap_step)."""
    C.dc_heap_step()


def trim_heap() -> None:
    """Gives what the heap and malloc hold free back to the system: after something large that will not come again."""
    call("dc_heap_trim")


def available() -> int:
    """Bytes that can still be allocated: the tightest of the memory cgroups and what the machine has."""
    out = ctypes.c_int64()
    call("dc_mem_available", ctypes.byref(out))
    return out.value


def process_bytes() -> dict[str, int]:
    """This process's memory: {"rss_bytes", "pss_bytes", "peak_rss_bytes", "shared_bytes"}; PSS counts a page shared by
    n processes 1/n; shared_bytes: what of rss_bytes is shared memory."""
    out = {"rss_bytes": 0, "pss_bytes": 0, "peak_rss_bytes": 0, "shared_bytes": 0}
    try:
        with open("/proc/self/smaps_rollup") as f:
            for line in f:
                if line.startswith("Rss:"):
                    out["rss_bytes"] = int(line.split()[1]) * 1024
                elif line.startswith("Pss:"):
                    out["pss_bytes"] = int(line.split()[1]) * 1024
        with open("/proc/self/status") as f:
            for line in f:
                if line.startswith("VmHWM:"):
                    out["peak_rss_bytes"] = int(line.split()[1]) * 1024
                elif line.startswith("RssShmem:"):
                    out["shared_bytes"] = int(line.split()[1]) * 1024
    except OSError:
        pass
    return out
