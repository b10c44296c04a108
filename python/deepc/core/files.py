"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import stat
from collections.abc import Iterator
from typing import BinaryIO

_ABANDONED_S = 86400.0  # since the last write to a file of another host, whose writer can't be asked


@functools.cache
def boot_id() -> str:
    """Names the kernel that runs here until it is started again. Raises OSError."""
    with open("/proc/sys/kernel/random/boot_id") as f:
        return f.read().strip()


def _boot() -> str:
    try:
        return boot_id().replace("-", "")[:8]
    except OSError:
        return "unknown"


def _create(folder: str, name: str) -> tuple[str, int]:
    """(path, descriptor) of a new file, locked where the file system has locks, by which others on this host see that
    its writer lives."""
    while True:
        path = os.path.join(folder, f".{name}-{_boot()}-{os.urandom(8).hex()}.tmp")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:
                return path, fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # _clear took it before it was locked


def _clear(folder: str, name: str, mine: int) -> None:
    """Removes what writers of the same name left that were killed: of this host (since it was started) those without a
    lock, which goes with its process; of others those that nobody has written to for a day, by the clock of the file
    system that made the file `mine`."""
    pattern = re.compile(rf"\.{re.escape(name)}-(?:(\w{{7,8}})-)?[0-9a-f]{{16}}\.tmp")
    own, now = _boot(), os.fstat(mine).st_mtime
    for found in os.listdir(folder or "."):
        if (match := pattern.fullmatch(found)) is None:
            continue
        path = os.path.join(folder, found)
        with contextlib.suppress(OSError):
            if match[1] != own or own == "unknown":
                if now - os.stat(path).st_mtime > _ABANDONED_S:
                    os.unlink(path)
                continue
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
            finally:
                os.close(fd)


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str], *, durable: bool = False) -> Iterator[BinaryIO]:
    """A file to write bytes to. When the block ends it takes the place of `path` in one instant, with the permissions
    of what was there; if the block or the disk fails, what was there stays and nothing is left beside it. What a kill
    leaves, the next writer of `path` removes.

    durable: content and name outlast a loss of power. Raises OSError."""
    folder, name = os.path.split(os.fspath(path))
    temporary, lock = _create(folder, name)
    try:
        with contextlib.suppress(OSError):
            _clear(folder, name, lock)
        with open(os.dup(lock), "wb") as file:  # closed before the rename, which makes some file systems write
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
    finally:
        os.close(lock)
    if durable:
        fsync_dir(folder or ".")


def fsync_dir(path: str) -> None:
    """Makes the names in a folder durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
