"""Memory of the C core as torch tensors: huge pages, staggered start addresses, shared segments."""

from __future__ import annotations

import ctypes
import os

import torch

from ._lib import C, HeapStats, call
from .ops import use_heap


def tensor_at(address: int, numel: int, dtype: torch.dtype, owner: object) -> torch.Tensor:
    """A 1-D tensor over `numel` elements at `address`. Its storage keeps `owner` alive."""
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    raw = (ctypes.c_byte * (numel * dtype.itemsize)).from_address(address)
    raw._deepc_owner = owner  # the storage holds `raw`, `raw` holds the owner
    return torch.frombuffer(raw, dtype=dtype, count=numel)


class _Block:
    """Owns one dc_mem_alloc block."""

    def __init__(self, nbytes: int, color: int) -> None:
        pointer = ctypes.c_void_p()
        call("dc_mem_alloc", nbytes, color, ctypes.byref(pointer))
        self.address = pointer.value

    def __del__(self) -> None:
        if getattr(self, "address", None):
            C.dc_mem_free(self.address)


def zeros(numel: int, dtype: torch.dtype, color: int = 0) -> torch.Tensor:
    """A zeroed, faulted-in 1-D CPU tensor on huge pages where the kernel gives them. `color` (0..15) staggers arrays that are
    walked together. Raises OutOfMemoryError before the kernel would kill."""
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    block = _Block(numel * dtype.itemsize, color)
    return tensor_at(block.address, numel, dtype, block)


def keep_heap(keep: bool = True) -> bool:
    """Large CPU tensors of torch come from the core's heap from now on, which keeps their pages, and malloc keeps what smaller ones free: so a step finds
    the memory of the one before, without page faults (ops/base/heap.c). For the whole process. Returns whether they do: not where the user chose
    otherwise (DEEPC_KEEP_HEAP=0) or where torch is built in another way than its wheels. keep=False: from the C library again; tensors that live stay."""
    if os.environ.get("DEEPC_KEEP_HEAP", "1") == "0":
        return False
    kept = ctypes.c_int()
    call("dc_heap_keep_small", int(keep), ctypes.byref(kept))
    return use_heap(keep)


def heap() -> dict[str, int]:
    """Bytes of the core's heap: "extent" was ever in use and may be resident, "in_use", its "peak", "free" in "free_blocks" holes, the "largest_free"."""
    stats = HeapStats()
    call("dc_heap_stats", ctypes.byref(stats))
    return {name: getattr(stats, name) or 0 for name, _ in HeapStats._fields_}


def trim_heap() -> None:
    """Gives what the heap and malloc hold free back to the system: after something large that will not come again."""
    call("dc_heap_trim")


def available() -> int:
    """Bytes that can still be allocated: the tightest of the memory cgroups and what the machine has."""
    out = ctypes.c_int64()
    call("dc_mem_available", ctypes.byref(out))
    return out.value


def process_bytes() -> dict[str, int]:
    """This process's memory: {"rss_bytes", "pss_bytes", "peak_rss_bytes"}; PSS counts a page shared by n processes 1/n."""
    out = {"rss_bytes": 0, "pss_bytes": 0, "peak_rss_bytes": 0}
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
    except OSError:
        pass
    return out
