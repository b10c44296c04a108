"""Ranks of one node: how they find each other, and the C core's collectives and shared segments on torch CPU tensors."""

from __future__ import annotations

import ctypes
import datetime
import os
import secrets
import sys
import threading
import zlib
from typing import Sequence

import torch

from ._lib import C, CommConfig, call, check
from .dtypes import CODES
from .errors import ArgumentError, UnsupportedError
from .memory import tensor_at

# enum dc_reduce_op (ops/ops.h)
REDUCE_OPS = {"sum": 0, "avg": 1, "min": 2, "max": 3, "prod": 4, "band": 5, "bor": 6, "bxor": 7}
_U8 = CODES[torch.uint8]
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_BOOL_OPS = ("min", "max", "band", "bor")  # of bytes that are 0 or 1 these stay 0 or 1


def node_id() -> str:
    """Names this node: DEEPC_NODE_ID if set, else boot id and network namespace (two namespaces of one machine are two nodes, because
    ranks meet over abstract Unix sockets, which belong to a namespace)."""
    given = os.environ.get("DEEPC_NODE_ID")
    if given:
        return given
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            boot = f.read().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError as exc:
        raise UnsupportedError(f"can't tell which node this is ({exc}); set DEEPC_NODE_ID to one name per machine") from exc


def node_ids(store, rank: int, size: int) -> list[str]:
    """The node of every rank, through `store`. Collective."""
    store.set(f"node{rank}", node_id())
    return [store.get(f"node{r}").decode() for r in range(size)]


# ---- the caller's line ----------------------------------------------------------------------------------------------------
_OWN_FILES: dict[str, bool] = {}  # file -> belongs to torch or deepc
_OWN_DIRS = (os.path.dirname(os.path.abspath(__file__)) + os.sep, os.path.dirname(os.path.abspath(torch.__file__)) + os.sep)
_PYTHON_DIR = os.path.dirname(os.path.abspath(threading.__file__)) + os.sep


def _is_own(filename: str) -> bool:
    own = filename.startswith(_OWN_DIRS) or filename.startswith("<") or os.path.dirname(filename) + os.sep == _PYTHON_DIR
    _OWN_FILES[filename] = own
    return own


class _Caller:
    """Tells a communicator who calls, as "dir/file.py:31": the first frame that is neither torch's nor deepc's. Cheap when the
    same line calls again, as in a training loop."""

    __slots__ = ("_code", "_line", "_note")

    def __init__(self) -> None:
        self._code, self._line, self._note = None, 0, ""

    def tell(self, handle: int, note: str = "") -> None:
        frame = sys._getframe(2)
        while frame is not None:
            name = frame.f_code.co_filename
            own = _OWN_FILES.get(name)
            if not (_is_own(name) if own is None else own):
                break
            frame = frame.f_back
        code, line = (None, 0) if frame is None else (frame.f_code, frame.f_lineno)  # None: called by C++ alone (DDP's reducer)
        if code is self._code and line == self._line and note == self._note:
            return
        self._code, self._line, self._note = code, line, note
        short = "" if code is None else "/".join(code.co_filename.rsplit("/", 2)[-2:]) + f":{line}"
        C.dc_comm_set_caller(handle, (short + note).encode(errors="replace")[-63:])


# ---- tensors --------------------------------------------------------------------------------------------------------------
def _require(tensor: torch.Tensor, what: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"{what} is a {type(tensor).__name__}; expected a torch.Tensor")
    if tensor.device.type != "cpu":
        raise ArgumentError(f"{what} lies on {tensor.device}; the shared-memory collectives take CPU tensors")
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise ArgumentError(f"{what} of shape {tuple(tensor.shape)} is not contiguous; pass {what}.contiguous()")


def reduce_code(dtype: torch.dtype, op: str) -> int | None:
    """The C core's dtype code for a reduction `op` over `dtype`, or None if it has none."""
    if dtype is torch.bool:
        return _U8 if op in _BOOL_OPS else None
    found = CODES.get(dtype)
    if found is None or (op == "avg" and dtype not in _FLOATS) or (op in ("band", "bor", "bxor") and dtype in _FLOATS):
        return None
    return found


def copy_code(dtype: torch.dtype) -> tuple[int, int, int]:
    """How elements of any dtype are moved: (C dtype code, C elements per element, tag). What the core has no name for is moved as bytes,
    and its name goes into the tag, so that ranks that disagree are told."""
    found = CODES.get(dtype)
    if found is not None:
        return found, 1, 0
    if dtype is torch.bool:
        return _U8, 1, 1
    return _U8, dtype.itemsize, zlib.crc32(str(dtype).encode()) | 1 << 32


class Segment:
    """Memory that all ranks of a node map. Freed when neither this object nor a tensor of it is left; the last process frees the pages."""

    def __init__(self, handle: int, base: int, nbytes: int) -> None:
        self._handle, self._base, self.nbytes = handle, base, nbytes

    def tensor(self, dtype: torch.dtype, offset: int, numel: int) -> torch.Tensor:
        """A 1-D view of `numel` elements that start `offset` bytes into the segment. Keeps the segment alive."""
        if offset < 0 or numel < 0 or offset % dtype.itemsize or offset + numel * dtype.itemsize > self.nbytes:
            raise ArgumentError(f"{numel} elements of {dtype} at byte {offset} don't fit a segment of {self.nbytes} bytes "
                                "(or are not aligned)")
        return tensor_at(self._base + offset, numel, dtype, self)

    def info(self) -> tuple[int, int]:
        """(bytes, bytes on huge pages)."""
        nbytes, huge = ctypes.c_int64(), ctypes.c_int64()
        call("dc_segment_info", self._handle, ctypes.byref(nbytes), ctypes.byref(huge))
        return nbytes.value, huge.value

    def __del__(self) -> None:
        handle, self._handle = getattr(self, "_handle", None), None
        if handle:
            C.dc_segment_free(handle)


class Comm:
    """One dc_comm (comm/comm.h). Collectives block, give equal bits on every rank, and raise MismatchError, RankDiedError,
    CommTimeoutError or AbortedError on all ranks alike; after such an error the communicator is broken. Calls from several threads are
    serialised.

    Every tensor is a contiguous CPU tensor, or ArgumentError is raised before anything is shared."""

    def __init__(self, handle: int, rank: int, size: int, label: str) -> None:
        self._handle, self.rank, self.size, self.label = handle, rank, size, label
        self._lock = threading.Lock()
        self._caller = _Caller()

    @property
    def handle(self) -> int:
        """The dc_comm pointer, borrowed."""
        if not self._handle:
            raise ArgumentError(f"communicator {self.label} is closed")
        return self._handle

    def barrier(self, tag: int = 0, note: str = "") -> None:
        """Returns when every rank has called it with the same tag. note: goes behind the caller's line in messages."""
        with self._lock:
            self._caller.tell(self.handle, note)
            check(C.dc_barrier(self._handle, tag))

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", out: torch.Tensor | None = None) -> None:
        """out (default: tensor itself) = the reduction of `tensor` over the ranks; floating sums in fp32 in rank order. Equal shapes."""
        out = tensor if out is None else out
        _require(tensor, "tensor")
        _require(out, "out")
        dtype = self._reduction(tensor, op)
        if out.dtype != tensor.dtype or out.numel() != tensor.numel():
            raise ArgumentError(f"out has {out.numel()} elements of {out.dtype}; expected {tensor.numel()} of {tensor.dtype}")
        with self._lock:
            self._caller.tell(self.handle)
            check(C.dc_all_reduce(self._handle, tensor.data_ptr(), out.data_ptr(), tensor.numel(), dtype, REDUCE_OPS[op], 0))

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, op: str = "sum") -> None:
        """out[n] = slice `rank` of the reduction of tensor[size * n]."""
        _require(tensor, "tensor")
        _require(out, "out")
        dtype = self._reduction(tensor, op)
        self._sizes(out, tensor, 1, self.size)
        with self._lock:
            self._caller.tell(self.handle)
            check(C.dc_reduce_scatter(self._handle, tensor.data_ptr(), out.data_ptr(), out.numel(), dtype, REDUCE_OPS[op], 0))

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """out[size * n] = tensor[n] of every rank in rank order. `tensor` may be this rank's part of `out`."""
        _require(tensor, "tensor")
        _require(out, "out")
        self._sizes(out, tensor, self.size, 1)
        dtype, per, tag = copy_code(tensor.dtype)
        with self._lock:
            self._caller.tell(self.handle)
            check(C.dc_all_gather(self._handle, tensor.data_ptr(), out.data_ptr(), tensor.numel() * per, dtype, tag))

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """tensor of group rank `root` to all."""
        _require(tensor, "tensor")
        dtype, per, tag = copy_code(tensor.dtype)
        with self._lock:
            self._caller.tell(self.handle)
            check(C.dc_broadcast(self._handle, tensor.data_ptr(), tensor.numel() * per, dtype, root, tag))

    def all_to_all(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """Block j of out[size * n] = block `rank` of rank j's tensor[size * n]."""
        _require(tensor, "tensor")
        _require(out, "out")
        self._sizes(out, tensor, 1, 1)
        if tensor.numel() % self.size:
            raise ArgumentError(f"{tensor.numel()} elements can't be cut into {self.size} equal blocks")
        dtype, per, tag = copy_code(tensor.dtype)
        with self._lock:
            self._caller.tell(self.handle)
            check(C.dc_all_to_all(self._handle, tensor.data_ptr(), out.data_ptr(), tensor.numel() // self.size * per, dtype, tag))

    def segment(self, nbytes: int) -> Segment:
        """A zeroed shared segment of at least `nbytes`, the same on all ranks. Collective. OutOfMemoryError on all ranks before anything is
        allocated if it does not fit."""
        handle, base = ctypes.c_void_p(), ctypes.c_void_p()
        with self._lock:
            self._caller.tell(self.handle)
            check(C.dc_segment_create(self._handle, nbytes, ctypes.byref(handle), ctypes.byref(base)))
        return Segment(handle.value, base.value, (nbytes + (2 << 20) - 1) >> 21 << 21)

    def abort(self, reason: str) -> None:
        """Breaks the communicator on every rank; may be called from any thread."""
        check(C.dc_comm_abort(self.handle, reason.encode(errors="replace")))

    def error(self) -> str:
        """"" or what broke the communicator."""
        return C.dc_comm_error(self._handle).decode(errors="replace") if self._handle else ""

    def close(self) -> None:
        """Leaves the group. Peers that still wait for this rank get RankDiedError. Not collective; a second close does nothing."""
        with self._lock:
            handle, self._handle = self._handle, None
        if handle:
            check(C.dc_comm_close(handle))

    def _reduction(self, tensor: torch.Tensor, op: str) -> int:
        if op not in REDUCE_OPS:
            raise ArgumentError(f"unknown reduction '{op}'; expected one of {', '.join(REDUCE_OPS)}")
        found = reduce_code(tensor.dtype, op)
        if found is None:
            raise ArgumentError(f"deepc's core has no {op} of {tensor.dtype}")
        return found

    def _sizes(self, out: torch.Tensor, tensor: torch.Tensor, out_per: int, in_per: int) -> None:
        if out.dtype != tensor.dtype or out.numel() * in_per != tensor.numel() * out_per:
            raise ArgumentError(f"out has {out.numel()} elements of {out.dtype} and the input {tensor.numel()} of {tensor.dtype}; expected "
                                f"the same dtype and a ratio of {out_per} to {in_per} for {self.size} ranks")


def open_comm(store, rank: int, size: int, *, label: str, timeout: datetime.timedelta, slot_bytes: int, slots: int,
              global_ranks: Sequence[int] | None = None) -> Comm:
    """Opens a communicator of `size` ranks of one node. Collective.

    store: a torch.distributed store that is this group's own (use a PrefixStore); ranks exchange their node and a random address
    through it. slot_bytes (a multiple of 4096) and slots (>= 2): staging per rank. timeout: of joining and of every wait. global_ranks:
    names of the ranks in messages. Raises UnsupportedError if the ranks lie on several nodes, CommError and its subclasses if joining
    fails."""
    ids = node_ids(store, rank, size)
    if len(set(ids)) != 1:
        places = ", ".join(f"rank {r}: {i}" for r, i in enumerate(ids))
        raise UnsupportedError(f"group {label} spans several nodes ({places}); shared memory reaches one. If they are one machine, set "
                               "DEEPC_NODE_ID")
    if rank == 0:
        store.set("address", "deepc-" + secrets.token_hex(16))
    address = store.get("address")
    names = (ctypes.c_int32 * size)(*(global_ranks or range(size)))
    config = CommConfig(rank=rank, size=size, address=address, label=label.encode(errors="replace"), global_rank=names,
                        timeout_ms=max(1, int(timeout.total_seconds() * 1000)), slot_bytes=slot_bytes, slots=slots, flags=0)
    handle = ctypes.c_void_p()
    check(C.dc_comm_open(ctypes.byref(config), ctypes.byref(handle)))
    return Comm(handle.value, rank, size, label)
