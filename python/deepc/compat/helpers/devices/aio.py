"""DeepNVMe's handle (deepspeed.ops.aio, deepspeed.ops.op_builder.AsyncIOBuilder) over deepc.offload: files read and
written past the page cache, in the background. Nothing is compiled.

Where DeepSpeed returns -1 and prints, a DiskError says what failed. single_submit, overlap_events and
intra_op_parallelism have no effect: blocks of all requests are on their way together."""

from __future__ import annotations

import ctypes
import os
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ....errors import ArgumentError, DamagedError
from ....offload import File, empty
from ....offload.file import Handle
from ....offload.place import ALIGN

_libc = ctypes.CDLL(None, use_errno=True)
_handles: weakref.WeakSet[aio_handle] = weakref.WeakSet()  # each knows the locked memory of all


class aio_handle:  # the name that scripts use
    """Reads and writes between tensors and files. A request is a contiguous tensor and a place in a file, by its name
    or its descriptor; `wait` completes those that were started."""

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        for name, value in (
            ("block_size", block_size),
            ("queue_depth", queue_depth),
            ("intra_op_parallelism", intra_op_parallelism),
        ):
            if value < 1:
                raise ArgumentError(f"aio_handle: {name} {value} must be at least 1")
        self._block_size, self._queue_depth, self._parallelism = block_size, queue_depth, intra_op_parallelism
        self._single_submit, self._overlap_events = single_submit, overlap_events
        self._started: list[tuple[File, Handle, Callable[[], None]]] = []
        self._locked: dict[int, torch.Tensor] = {}  # by address
        _handles.add(self)

    def get_block_size(self) -> int:
        return self._block_size

    def get_queue_depth(self) -> int:
        return self._queue_depth

    def get_single_submit(self) -> bool:
        return self._single_submit

    def get_overlap_events(self) -> bool:
        return self._overlap_events

    def get_intra_op_parallelism(self) -> int:
        return self._parallelism

    def get_alignment(self) -> int:
        """Bytes that sizes should be a multiple of."""
        return ALIGN * self._parallelism

    # ---- requests ----------------------------------------------------------------------------------------------------
    def async_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Starts to read buffer.nbytes bytes; leave it alone until `wait`. 0."""
        into = buffer if buffer.device.type == "cpu" else torch.empty_like(buffer, device="cpu")

        def finish() -> None:
            if into is not buffer:
                buffer.copy_(into)

        file = self._open(filename, "r")
        self._start(file, lambda: file.read_async(into, file_offset), finish)
        return 0

    def async_pwrite(
        self,
        buffer: torch.Tensor,
        filename: str | int | None = None,
        file_offset: int = 0,
        *,
        fd: int | None = None,
    ) -> int:
        """Starts to write; the file is made where it is missing. 0."""
        target = filename if fd is None else fd
        if target is None:
            raise ArgumentError("async_pwrite: name a file (filename=), or an open one (fd=)")
        held = buffer.detach().to("cpu").contiguous()
        if isinstance(target, int):
            file = self._open(f"/proc/self/fd/{target}", "r+")
        else:
            file = self._open(target, "c")
        self._start(file, lambda: file.write_async(held, file_offset), lambda: None)
        return 0

    def wait(self) -> int:
        """Completes what was started and returns how many requests that were. The first failure, after all are
        through."""
        started, self._started = self._started, []
        failure: BaseException | None = None
        for file, handle, finish in started:
            try:
                handle.wait()
                finish()
            except Exception as exc:
                failure = failure or exc
            finally:
                file.close()
        if failure is not None:
            raise failure
        return len(started)

    def sync_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """async_pread of this one alone, and its wait. 1."""
        return self._alone(lambda h: h.async_pread(buffer, filename, file_offset))

    def sync_pwrite(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """async_pwrite of this one alone, and its wait. 1."""
        return self._alone(lambda h: h.async_pwrite(buffer, filename, file_offset))

    def read(self, buffer: torch.Tensor, filename: str, validate: bool, file_offset: int = 0) -> int:
        """sync_pread. validate: and compares with what an ordinary read gives."""
        done = self.sync_pread(buffer, filename, file_offset)
        if validate:
            self._compare(buffer, filename, file_offset)
        return done

    def write(self, buffer: torch.Tensor, filename: str, validate: bool, file_offset: int = 0) -> int:
        """sync_pwrite. validate: and compares with what an ordinary read gives."""
        done = self.sync_pwrite(buffer, filename, file_offset)
        if validate:
            self._compare(buffer, filename, file_offset)
        return done

    def pread(self, buffer: torch.Tensor, filename: str, validate: bool, async_: bool, file_offset: int = 0) -> int:
        """`read`, or async_pread (nothing is compared then)."""
        if async_:
            return self.async_pread(buffer, filename, file_offset)
        return self.read(buffer, filename, validate, file_offset)

    def pwrite(self, buffer: torch.Tensor, filename: str, validate: bool, async_: bool, file_offset: int = 0) -> int:
        """`write`, or async_pwrite (nothing is compared then)."""
        if async_:
            return self.async_pwrite(buffer, filename, file_offset)
        return self.write(buffer, filename, validate, file_offset)

    # ---- memory ------------------------------------------------------------------------------------------------------
    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """[num_elem] of the example's dtype that begins on a page: moved without a copy. Locked in memory where
        RLIMIT_MEMLOCK allows it."""
        out = empty(num_elem, dtype=example_tensor.dtype)
        _libc.mlock(ctypes.c_void_p(out.data_ptr()), ctypes.c_size_t(out.nbytes))
        self._locked[out.data_ptr()] = out
        return out

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Its memory is ordinary again, and goes with the last tensor on it. False if it is no handle's."""
        whose = next((h for h in _handles if tensor.data_ptr() in h._locked), None)
        if whose is None:
            return False
        found = whose._locked.pop(tensor.data_ptr())
        _libc.munlock(ctypes.c_void_p(found.data_ptr()), ctypes.c_size_t(found.nbytes))
        return True

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Whether it lies in memory of some handle's new_cpu_locked_tensor, or is pinned for a GPU."""
        at = buffer.data_ptr()
        locked = [item for h in _handles for item in h._locked.items()]
        inside = any(base <= at and at + buffer.nbytes <= base + t.nbytes for base, t in locked)
        return inside or bool(buffer.is_pinned())

    # ------------------------------------------------------------------------------------------------------------------
    def _open(self, path: str | os.PathLike[str], mode: str) -> File:
        block = -(-self._block_size // ALIGN) * ALIGN
        return File(path, mode, block_bytes=block, depth=min(4096, self._queue_depth))

    def _start(self, file: File, begin: Callable[[], Handle], finish: Callable[[], None]) -> None:
        try:
            self._started.append((file, begin(), finish))
        except BaseException:
            file.close()
            raise

    def _alone(self, begin: Callable[[aio_handle], int]) -> int:
        others, self._started = self._started, []
        try:
            begin(self)
            return self.wait()
        finally:
            self._started = others

    def _compare(self, buffer: torch.Tensor, filename: str, file_offset: int) -> None:
        there = torch.empty_like(buffer, device="cpu")
        with File(filename, "r", direct=False) as file:
            file.read(there, file_offset)
        if not torch.equal(there.view(-1).view(torch.uint8), buffer.detach().cpu().reshape(-1).view(torch.uint8)):
            raise DamagedError(
                f"{filename}: bytes [{file_offset}, {file_offset + buffer.nbytes}) differ from the tensor"
            )


def aio_read(
    buffer: torch.Tensor,
    filename: str,
    block_size: int = 1 << 20,
    queue_depth: int = 128,
    single_submit: bool = False,
    overlap_events: bool = False,
    validate: bool = False,
) -> int:
    """aio_handle(...).read."""
    return aio_handle(block_size, queue_depth, single_submit, overlap_events).read(buffer, filename, validate)


def aio_write(
    buffer: torch.Tensor,
    filename: str,
    block_size: int = 1 << 20,
    queue_depth: int = 128,
    single_submit: bool = False,
    overlap_events: bool = False,
    validate: bool = False,
) -> int:
    """aio_handle(...).write."""
    return aio_handle(block_size, queue_depth, single_submit, overlap_events).write(buffer, filename, validate)


def deepspeed_memcpy(dest: torch.Tensor, src: torch.Tensor) -> int:
    """Copies between CPU tensors of equal size. 0."""
    dest.view(-1).copy_(src.view(-1))
    return 0


class AsyncIOBuilder:
    """deepspeed.ops.op_builder.AsyncIOBuilder: `load()` gives what DeepSpeed compiles, here without compiling."""

    NAME = "async_io"

    def is_compatible(self, verbose: bool = False) -> bool:
        return True

    def load(self, verbose: bool = False) -> Any:
        """What has aio_handle, aio_read, aio_write and deepspeed_memcpy."""
        return types.SimpleNamespace(
            aio_handle=aio_handle, aio_read=aio_read, aio_write=aio_write, deepspeed_memcpy=deepspeed_memcpy
        )
