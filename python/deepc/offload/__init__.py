"""deepc.offload: tensors on disk, past the page cache (docs/offload.md).

    with deepc.offload.File("/nvme/states", "w") as f:
        f.write([a, b], [0, a.nbytes])
        handle = f.read_async(c, 0)
        ...
        handle.wait()

File: bytes at offsets. Extents: numbered values that change all at once (commit) and carry checksums. check: what a
folder gives. empty: tensors that go to disk without a copy. On CPU tensors; nothing of the engine uses it yet."""

from .extents import Extent, Extents
from .file import File, Handle
from .place import Disk, check, empty

__all__ = ["Disk", "Extent", "Extents", "File", "Handle", "check", "empty"]
