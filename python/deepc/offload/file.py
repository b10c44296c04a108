"""Bytes at offsets of a file: tensors in and out, at once or in the background (offload/file.c)."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch

from ..core.lib import C, FileConfig, FileInfo, Piece, call, check, in_python
from ..errors import ArgumentError, DiskTimeoutError, numeric
from .place import addresses

_RINGS = {"auto": 0, "io_uring": 1, "threads": 2}
_WRITE, _CREATE, _TRUNCATE, _BUFFERED, _NAMELESS = 1, 2, 4, 8, 16
_MODES = {
    "r": 0,
    "r+": _WRITE,
    "c": _WRITE | _CREATE,
    "w": _WRITE | _CREATE | _TRUNCATE,
    "nameless": _WRITE | _NAMELESS,
}


_AGES_S = 1e9  # as good as no limit, and a number of milliseconds that the core takes


class Handle:
    """A request in the background. It keeps its tensors alive; one that is dropped is waited for."""

    def __init__(self, io: int | None, tensors: Sequence[torch.Tensor], owner: object) -> None:
        self._io, self._tensors, self._owner = io, tensors, owner

    def done(self) -> bool:
        """Whether it is complete, well or not. Never blocks."""
        out = ctypes.c_int()
        call("dc_io_test", self._open(), ctypes.byref(out))
        return bool(out.value)

    @numeric
    def wait(self, timeout: float | None = None) -> None:
        """Until it is complete; raises what became of it, also when asked again. timeout in seconds: DiskTimeoutError
        after so long, and the request goes on."""
        if timeout is not None and timeout <= 0:
            raise ArgumentError(f"timeout {timeout} must be positive, or None for no limit")
        io = self._open()
        status = C.dc_io_wait(io, 0 if timeout is None else max(1, int(min(timeout, _AGES_S) * 1000)))
        if C.dc_status_name(status) == b"E_TIMEOUT":
            raise DiskTimeoutError(C.dc_last_error().decode(errors="replace"))
        check(status)

    def _open(self) -> int:
        if self._io is None:
            raise ArgumentError("the file of this request is closed")
        return self._io

    def _free(self) -> None:
        """Waits, whatever becomes of it."""
        io, self._io = self._io, None
        if io is not None:
            C.dc_io_free(io)
            self._tensors = ()

    def __del__(self) -> None:
        if getattr(self, "_io", None) is not None:
            self._free()


class Opened:
    """What File and Extents share: an open file of the core and its requests."""

    _address: int | None = None
    _close_with = ""

    def __init__(self) -> None:
        self._handles: weakref.WeakSet[Handle] = weakref.WeakSet()

    def _opened(self) -> int:
        if self._address is None:
            raise ArgumentError(f"{self!r} is closed")
        return self._address

    def _file(self) -> int:
        """The core's dc_file."""
        return self._opened()

    def _start(self, name: str, *args: Any, tensors: Sequence[torch.Tensor], reads: bool) -> Handle:
        io = ctypes.c_void_p()
        call(name, *args, ctypes.byref(io))
        if reads:
            changed(tensors)
        handle = Handle(io.value, tensors, self)
        self._handles.add(handle)
        return handle

    def _whole(self, handle: Handle) -> None:
        try:
            handle.wait()
        finally:
            handle._free()

    def info(self) -> dict[str, Any]:
        """{"size_bytes", "block_bytes", "registered_bytes", "depth", "direct", "ring": "io_uring" or "threads",
        "why": the reason for anything slower than it could be, or ""}."""
        found = FileInfo()
        call("dc_file_get_info", self._file(), ctypes.byref(found))
        out = {name: getattr(found, name) for name, *_ in FileInfo._fields_[1:]}
        return {**out, "direct": bool(found.direct), "ring": found.ring.decode(), "why": in_python(found.why.decode())}

    def register(self, tensor: torch.Tensor) -> bool:
        """Registers a tensor's memory (deepc.offload.empty, a multiple of 4096 bytes) with io_uring, which then need
        not look its pages up for every block. It must live as long as the file, which holds it. False where that can't
        be; info()["why"] has the reason."""
        ((data, nbytes),) = addresses([tensor], "register")
        out = ctypes.c_int()
        call("dc_file_register", self._file(), data, nbytes, ctypes.byref(out))
        if out.value:
            self.__dict__.setdefault("_registered", []).append(tensor)
        return bool(out.value)

    def close(self) -> None:
        """Waits for what is on its way; what became of it is not told. A second call does nothing."""
        for handle in list(self._handles):
            handle._free()
        address, self._address = self._address, None
        if address is not None:
            call(self._close_with, address)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if self._address is not None:
            self.close()


def config(
    path: str | os.PathLike[str], mode: str, ring: str, direct: bool, depth: int, threads: int, block: int, reserve: int
) -> FileConfig:
    """The core's dc_file_config."""
    if mode not in _MODES:
        raise ArgumentError(f"mode {mode!r}: expected one of {', '.join(_MODES)}")
    if ring not in _RINGS:
        raise ArgumentError(f"ring {ring!r}: expected one of {', '.join(_RINGS)}")
    for name, value in (("depth", depth), ("threads", threads), ("block_bytes", block), ("reserve_bytes", reserve)):
        if not 0 <= value < 1 << (31 if name in ("depth", "threads") else 63):
            raise ArgumentError(f"{name} {value} is out of range")
    return FileConfig(
        path=os.fsencode(path),
        flags=_MODES[mode] | (0 if direct else _BUFFERED),
        ring=_RINGS[ring],
        depth=depth,
        threads=threads,
        block_bytes=block,
        reserve_bytes=reserve,
    )


def changed(tensors: Sequence[torch.Tensor]) -> None:
    """The core writes to them, which autograd does not see: what it has saved of them is no longer their value."""
    torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


class File(Opened):
    """A file that contiguous CPU tensors are read from and written to, past the page cache where that is possible.

    mode: "r" to read, "r+" to read and write what is there, "c" the same and made where it is missing, "w" made or
    emptied, "nameless" a new one without a name in the folder `path`, which goes with the process. direct=False:
    through the page cache. ring: "auto" (DEEPC_RING, else io_uring where the kernel allows it, else threads),
    "io_uring", "threads". depth blocks of block_bytes are on their way at a time (0: 64 of 1 MiB);
    threads: of the ring of threads (0: 8). reserve_bytes: the file gets this size and its space on the disk at once.
    A block device is a file whose size nothing changes.

    Any number, size and alignment of tensors and offsets (bytes). What begins on a page in memory (deepc.offload.empty)
    is not copied. Calls release the GIL and may come from any thread. DiskError, DiskFullError: the file stays usable.
    """

    _close_with = "dc_file_close"

    @numeric
    def __init__(
        self,
        path: str | os.PathLike[str],
        mode: str = "r",
        *,
        ring: str = "auto",
        direct: bool = True,
        depth: int = 0,
        threads: int = 0,
        block_bytes: int = 0,
        reserve_bytes: int = 0,
    ) -> None:
        super().__init__()
        self.path = os.fspath(path)
        out = ctypes.c_void_p()
        wanted = config(path, mode, ring, direct, depth, threads, block_bytes, reserve_bytes)
        call("dc_file_open", ctypes.byref(wanted), ctypes.byref(out))
        self._address = out.value

    def __repr__(self) -> str:
        return f"deepc.offload.File({self.path!r})"

    def read_async(self, tensors: torch.Tensor | Sequence[torch.Tensor], offsets: int | Sequence[int] = 0) -> Handle:
        """Starts reading into a tensor at a byte offset, or into several, each at its own. Leave them alone until the
        handle is done."""
        return self._begin("dc_file_read_start", tensors, offsets, True)

    def write_async(self, tensors: torch.Tensor | Sequence[torch.Tensor], offsets: int | Sequence[int] = 0) -> Handle:
        """Starts writing. Change nothing in the tensors until the handle is done."""
        return self._begin("dc_file_write_start", tensors, offsets, False)

    def read(self, tensors: torch.Tensor | Sequence[torch.Tensor], offsets: int | Sequence[int] = 0) -> None:
        """read_async, and waits."""
        self._whole(self.read_async(tensors, offsets))

    def write(self, tensors: torch.Tensor | Sequence[torch.Tensor], offsets: int | Sequence[int] = 0) -> None:
        """write_async, and waits."""
        self._whole(self.write_async(tensors, offsets))

    def sync(self) -> None:
        """Waits for what was started, and makes what was written durable against a loss of power (fdatasync)."""
        call("dc_file_sync", self._opened())

    def _begin(
        self, name: str, tensors: torch.Tensor | Sequence[torch.Tensor], offsets: int | Sequence[int], reads: bool
    ) -> Handle:
        held = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        places = [offsets] if isinstance(offsets, int) else list(offsets)
        if len(held) != len(places):
            raise ArgumentError(f"{self!r}: {len(held)} tensors and {len(places)} offsets")
        pieces = (Piece * len(held))()
        for piece, (data, nbytes), offset in zip(pieces, addresses(held, repr(self)), places):
            if not isinstance(offset, int) or not 0 <= offset < 1 << 63:
                raise ArgumentError(f"{self!r}: offset {offset!r} must be a number of bytes, not negative")
            piece.data, piece.bytes, piece.offset = data, nbytes, offset
        return self._start(name, self._opened(), pieces, len(held), tensors=held, reads=reads)
