"""deepc.offload: tensors on disk, past the page cache (docs/offload.md).

    with deepc.offload.File("/nvme/states", "w") as f:
        f.write([a, b], [0, a.nbytes])
        handle = f.read_async(c, 0)
        ...
        handle.wait()

File: bytes at offsets. Extents: numbered values that change all at once (commit) and carry checksums. Stream: arrays
that are worked on cell by cell, disk and arithmetic at the same time; the engine keeps optimizer states in it. check:
what a folder gives. empty: tensors that go to disk without a copy. On CPU tensors."""

from .extents import Extent, Extents
from .file import File, Handle
from .place import Disk, check, empty
from .stream import Cell, Stream, Walk, stream_bytes

__all__ = [
    "Cell",
    "Disk",
    "Extent",
    "Extents",
    "File",
    "Handle",
    "Stream",
    "Walk",
    "check",
    "empty",
    "stream_bytes",
]
