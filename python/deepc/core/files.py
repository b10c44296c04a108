"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import BinaryIO


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str], *, durable: bool = False) -> Iterator[BinaryIO]:
    """A file to write bytes to. When the block ends it takes the place of `path` in one instant, with the permissions
    of what was there; if the block or the disk fails, what was there stays and nothing is left beside it.

    durable: content and name outlast a loss of power. Raises OSError."""
    folder, name = os.path.split(os.fspath(path))
    temporary = os.path.join(folder, f".{name}-{os.urandom(8).hex()}.tmp")
    try:
        with open(temporary, "xb") as file:
            with contextlib.suppress(OSError):  # nothing was there, or the file system has no permissions
                os.fchmod(file.fileno(), stat.S_IMODE(os.stat(path).st_mode))
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if durable:
        fsync_dir(folder or ".")


def fsync_dir(path: str) -> None:
    """Makes the names in a folder durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
