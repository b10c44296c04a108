"""Where tensors are before they go to disk, and what the disk gives."""

from __future__ import annotations

import contextlib
import ctypes
import os
from dataclasses import dataclass
from math import prod

import torch

from ..core import memory
from ..core.lib import DiskInfo, call
from ..errors import ArgumentError, numeric

ALIGN = 4096  # DC_DISK_ALIGN


@numeric
def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A CPU tensor of this shape whose memory begins on a page: File reads and writes it without a copy, where its
    offset and size are multiples of 4096 too (what is not goes through the page cache). From 1 MiB on it is zeroed and
    on huge pages where the kernel gives them; smaller ones hold anything."""
    if any(n < 0 for n in shape):
        raise ArgumentError(f"empty{shape}: a size is negative")
    numel = prod(shape)
    nbytes = numel * dtype.itemsize
    if nbytes >= 1 << 20:
        return memory.zeros(numel, dtype).view(shape)
    raw = torch.empty(nbytes + ALIGN, dtype=torch.uint8, device="cpu")
    skip = -raw.data_ptr() % ALIGN
    return raw[skip : skip + nbytes].view(dtype).view(shape)


def make_folder(path: str) -> str:
    """`path` with the user's home in place of ~. It is made if its parent is there; else whoever opens it says what is
    wrong: a place where no disk is mounted is not filled by accident."""
    path = os.path.expanduser(path)
    with contextlib.suppress(OSError):
        os.mkdir(path)
    return path


def addresses(tensors: list[torch.Tensor], what: str) -> list[tuple[int, int]]:
    """(address, bytes) of each. ArgumentError for what is no contiguous CPU tensor."""
    found = []
    for i, t in enumerate(tensors):
        if not isinstance(t, torch.Tensor):
            raise ArgumentError(f"{what}: number {i} is a {type(t).__name__}, not a tensor")
        if t.device.type != "cpu" or t.layout is not torch.strided or not t.is_contiguous():
            raise ArgumentError(
                f"{what}: tensor {i} ({tuple(t.shape)}, {t.dtype}, {t.device}) must be contiguous and on the CPU; pass"
                " t.contiguous(), or a buffer on the CPU that you copy from and to"
            )
        if t.is_conj() or t.is_neg():  # its memory holds other numbers than it has
            raise ArgumentError(
                f"{what}: tensor {i} ({tuple(t.shape)}, {t.dtype}) is a view that conjugates or negates what is read"
                " through it; pass t.resolve_conj().resolve_neg()"
            )
        found.append((t.data_ptr(), t.nbytes))
    return found


@dataclass(frozen=True)
class Disk:
    """What a folder gives. Bytes where it says so; the reasons are "" if there is nothing to explain."""

    file_system: str
    free_bytes: int
    lock_bytes: int  # RLIMIT_MEMLOCK; 2**63 - 1: no limit
    direct: bool  # O_DIRECT works
    io_uring: bool
    why_not_direct: str
    why_not_io_uring: str


@numeric
def check(folder: str | os.PathLike[str], *, need_bytes: int = 0, lock_bytes: int = 0) -> Disk:
    """Looks at a folder before a run begins (a file without a name is made there and removed). DiskFullError: less than
    need_bytes are free, or a file may not be so large. DiskError: no such folder, no permission. OutOfMemoryError: less
    than lock_bytes of memory may be locked. Each with what to do."""
    for name, value in (("need_bytes", need_bytes), ("lock_bytes", lock_bytes)):
        if not 0 <= value < 1 << 63:
            raise ArgumentError(f"{name} {value} is out of range")
    info = DiskInfo()
    call("dc_disk_check", os.fsencode(folder), need_bytes, lock_bytes, ctypes.byref(info))
    return Disk(
        file_system=info.file_system.decode(),
        free_bytes=info.free_bytes,
        lock_bytes=info.lock_bytes,
        direct=bool(info.direct),
        io_uring=bool(info.uring),
        why_not_direct=info.why_not_direct.decode(),
        why_not_io_uring=info.why_not_uring.decode(),
    )
