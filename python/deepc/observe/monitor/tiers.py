"""Memory by tier as it is now: this process's own pages, the pages it shares with the ranks of its node, the GPU's.
Cheap enough for a look a second (about 50 us; smaps_rollup, which knows shares of pages, takes milliseconds in a large
process)."""

from __future__ import annotations

import os

import torch

from ...core import memory

_FIELDS = {b"VmHWM": "peak", b"RssAnon": "anonymous", b"RssFile": "file", b"RssShmem": "shared"}


def read_status(path: str = "/proc/self/status") -> dict[str, int]:
    """{"anonymous", "file", "shared", "peak"} in bytes, from the kernel's status file; what is not there is missing."""
    out: dict[str, int] = {}
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            text = os.read(fd, 1 << 14)
        finally:
            os.close(fd)
    except OSError:
        return out
    for line in text.splitlines():
        key, _, rest = line.partition(b":")
        if key in _FIELDS:
            out[_FIELDS[key]] = int(rest.split()[0]) * 1024
    return out


def process() -> tuple[int, int, int]:
    """(private bytes now, private bytes at the peak, bytes of shared memory) of this process. The peak is the kernel's
    high-water mark less what is shared and what is mapped from files now."""
    s = read_status()
    private, shared = s.get("anonymous", 0), s.get("shared", 0)
    return private, max(private, s.get("peak", 0) - shared - s.get("file", 0)), shared


def device(where: torch.device) -> tuple[int, int] | None:
    """(bytes of tensors now, at the peak) on a GPU; None elsewhere."""
    if where.type != "cuda":
        return None
    return torch.cuda.memory_allocated(where), torch.cuda.max_memory_allocated(where)


def heap() -> dict[str, int]:
    """Bytes of this rank's heap for large tensors: "live", "free", of that "free_resident", "largest_free", the
    "extent" of all, and what has "decayed" (went back to the system unused). Counts of "refusals" and "foreign_frees"
    where there are any. {} where nothing has used it."""
    stats = memory.heap_stats()
    if not stats["extent"]:
        return {}
    out = {"live": stats["in_use"]}
    out |= {name: stats[name] for name in ("free", "free_resident", "largest_free", "extent", "decayed")}
    return out | {name: stats[name] for name in ("refusals", "foreign_frees") if stats[name]}
