"""Memory of the C core as torch tensors: huge pages, staggered start addresses, shared segments."""

from __future__ import annotations

import ctypes

import torch

from ._lib import C, call


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
