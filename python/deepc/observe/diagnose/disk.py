"""`deepc bench io`: what the device under a folder gives to plain system calls, next to what deepc.offload reaches.

Contenders take turns, since a shared disk drifts by the minute: a ratio is the median of the rounds' own ratios. All
move the same aligned memory to and from the same file, past the page cache where the file system has that; a write
ends when it is durable."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ... import offload
from ...core import memory
from ...errors import ArgumentError, DeepcError

_MIB = 1 << 20
_BLOCK = _MIB
_THREADS = 8
PLAIN = f"plain calls ({_THREADS} threads, 1 MiB, O_DIRECT)"

Call = Callable[[str], None]  # with "write" or "read"


class Plain:
    """os.pwritev and os.preadv of 1 MiB blocks in threads: what the device gives without any library."""

    def __init__(self, path: Path, data: torch.Tensor, direct: bool) -> None:
        self._fd = os.open(path, os.O_RDWR | (os.O_DIRECT if direct else 0))
        self._bytes = memoryview(data.view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy arrays are buffers
        self._pool = ThreadPoolExecutor(_THREADS)

    def __call__(self, how: str) -> None:
        size = len(self._bytes)

        def part(first: int) -> None:
            for at in range(first, size, _THREADS * _BLOCK):
                block = self._bytes[at : at + _BLOCK]
                moved = os.pwritev(self._fd, [block], at) if how == "write" else os.preadv(self._fd, [block], at)
                if moved != len(block):
                    raise DeepcError(f"{how} of {len(block)} bytes at {at}: {moved} were moved")

        list(self._pool.map(part, range(0, _THREADS * _BLOCK, _BLOCK)))
        if how == "write":
            os.fdatasync(self._fd)

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._fd)


class Ours:
    """deepc.offload.File over one ring."""

    def __init__(self, path: Path, data: torch.Tensor, ring: str, direct: bool) -> None:
        self._file = offload.File(path, "r+", ring=ring, direct=direct)
        self._file.register(data)
        self._data = data

    def __call__(self, how: str) -> None:
        if how == "read":
            self._file.read(self._data)
        else:
            self._file.write(self._data)
            self._file.sync()

    def close(self) -> None:
        self._file.close()


def size_for(folder: str, wanted: int) -> int:
    """Bytes of the file: `wanted`, but at most a quarter of what is free on the disk and of memory."""
    if not os.path.isdir(folder):
        raise ArgumentError(f"there is no folder {folder!r}")
    nbytes = min(wanted, offload.check(folder).free_bytes // 4, memory.available() // 4) // _BLOCK * _BLOCK
    if nbytes < 8 * _BLOCK:
        raise DeepcError(f"{folder} or memory has less than 32 MiB free: not measured")
    return nbytes


def measure(folder: str, *, seconds: float = 20.0, nbytes: int = 256 * _MIB) -> list[dict[str, Any]]:
    """Rows {"figure": "write" or "read", "what", "unit", "median", "min", "max", "n", "ratio", "peer"}; ratio: of the
    rate to that of plain calls. At least 3 rounds, then as many as fit into `seconds`. The file is removed."""
    nbytes = size_for(folder, nbytes)
    disk = offload.check(folder, need_bytes=nbytes)
    data = offload.empty(nbytes, dtype=torch.uint8)
    data.view(torch.int64).random_()  # what a device compresses would flatter it
    with tempfile.TemporaryDirectory(prefix=".deepc-bench-", dir=folder) as inside:
        path = Path(inside) / "data"
        with offload.File(path, "w", reserve_bytes=nbytes) as f:
            f.write(data)  # blocks exist from here on
        contenders: dict[str, Plain | Ours] = {PLAIN: Plain(path, data, disk.direct)}
        try:
            for ring in ("io_uring", "threads"):
                if ring == "threads" or disk.io_uring:
                    contenders[f"deepc, {ring}"] = Ours(path, data, ring, disk.direct)
            rates = _rounds(contenders, nbytes, seconds)
        finally:
            for c in contenders.values():
                c.close()
    return [_row(how, what, found, rates[how, PLAIN], disk, nbytes) for (how, what), found in rates.items()]


def _rounds(contenders: dict[str, Plain | Ours], nbytes: int, seconds: float) -> dict[tuple[str, str], list[float]]:
    """MB/s by (figure, contender), one for each round."""
    rates: dict[tuple[str, str], list[float]] = {(h, w): [] for h in ("write", "read") for w in contenders}
    end = time.perf_counter() + seconds
    done = 0
    while done < 3 or time.perf_counter() < end:
        for (how, what), found in rates.items():
            began = time.perf_counter()
            contenders[what](how)
            found.append(nbytes / (time.perf_counter() - began) / 1e6)
        done += 1
    return rates


def _row(
    how: str, what: str, found: list[float], plain: list[float], disk: offload.Disk, nbytes: int
) -> dict[str, Any]:
    ratio = None if what == PLAIN else statistics.median(a / b for a, b in zip(found, plain))
    return {
        "figure": how,
        "what": what,
        "unit": "MB/s",
        "median": round(statistics.median(found), 1),
        "min": round(min(found), 1),
        "max": round(max(found), 1),
        "n": len(found),
        "ratio": None if ratio is None else round(ratio, 3),
        "peer": None if ratio is None else PLAIN,
        "bytes": nbytes,
        "file_system": disk.file_system,
        "direct": disk.direct,
        "why_not_io_uring": disk.why_not_io_uring,
    }


def run(folder: str | None, seconds: float) -> int:
    """Prints one JSON line per row; the exit code."""
    if not 0 < seconds <= 3600:
        raise ArgumentError(f"seconds {seconds} must be a positive number of at most 3600")
    for row in measure(folder or os.getcwd(), seconds=seconds):
        print(json.dumps(row), flush=True)
    return 0
