"""Ranks of one node: how they find each other, and the C core's collectives and shared segments on torch CPU
tensors."""

from __future__ import annotations

import ctypes
import datetime
import secrets
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ..core.lib import C, CommConfig, call, check, status_of, without_place
from ..core.memory import tensor_at
from ..core.ops import CODES
from ..core.telemetry.caller import Caller, caller_line
from ..errors import ArgumentError, CommError, RankDiedError, UnsupportedError
from .place import Places, await_keys, discover, ended

if TYPE_CHECKING:
    import torch.distributed as dist

# enum dc_reduce_op (ops/ops.h)
REDUCE_OPS = {"sum": 0, "avg": 1, "min": 2, "max": 3, "prod": 4, "band": 5, "bor": 6, "bxor": 7}
ANY_SOURCE = -1
_U8 = CODES[torch.uint8]
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Bytes that are 0 or 1 stay so: a sum of truth values is "any", a product "all" (Gloo leaves a byte 2, which torch
# reads as True).
_BOOL_OPS = {"sum": "max", "max": "max", "bor": "bor", "prod": "min", "min": "min", "band": "band", "bxor": "bxor"}


def _reductions() -> dict[tuple[torch.dtype, str], tuple[int, int]]:
    """(dtype, operation) -> (C dtype code, C reduction), for all that the core has."""
    table = {(torch.bool, op): (_U8, REDUCE_OPS[done_as]) for op, done_as in _BOOL_OPS.items()}
    for dtype, found in CODES.items():
        for op, number in REDUCE_OPS.items():
            if op not in (("band", "bor", "bxor") if dtype in _FLOATS else ("avg",)):
                table[dtype, op] = (found, number)
    return table


REDUCTIONS = _reductions()


# ---- tensors ---------------------------------------------------------------------------------------------------------
def require(tensor: torch.Tensor | None, what: str) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"{what} is a {type(tensor).__name__}; expected a torch.Tensor")
    if not tensor.is_cpu:
        raise ArgumentError(f"{what} lies on {tensor.device}; the shared-memory collectives take CPU tensors")
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise ArgumentError(f"{what} of shape {tuple(tensor.shape)} is not contiguous; pass {what}.contiguous()")
    return tensor


def require_sizes(out: torch.Tensor, tensor: torch.Tensor, out_per: int, in_per: int, size: int) -> None:
    """out has out_per elements of the same dtype where the input has in_per, on `size` ranks."""
    if out.dtype != tensor.dtype or out.numel() * in_per != tensor.numel() * out_per:
        raise ArgumentError(
            f"out has {out.numel()} elements of {out.dtype} and the input {tensor.numel()} of {tensor.dtype};"
            f" expected the same dtype and a ratio of {out_per} to {in_per} for {size} ranks"
        )


def require_counts(
    out: torch.Tensor, out_counts: Sequence[int], tensor: torch.Tensor, in_counts: Sequence[int], size: int
) -> None:
    """What all_to_allv asks of its arguments on `size` ranks."""
    require(tensor, "tensor")
    require(out, "out")
    if out.dtype != tensor.dtype:
        raise ArgumentError(f"out has dtype {out.dtype} and the input {tensor.dtype}; expected the same")
    for counts, t, what in ((in_counts, tensor, "the input"), (out_counts, out, "out")):
        if len(counts) != size or min(counts) < 0 or sum(counts) != t.numel():
            raise ArgumentError(f"counts {list(counts)} don't fit {what} of {t.numel()} elements and {size} ranks")


_copies: dict[torch.dtype, tuple[int, int, int]] = {dtype: (number, 1, 0) for dtype, number in CODES.items()}
_copies[torch.bool] = (_U8, 1, 1)


def copy_code(dtype: torch.dtype) -> tuple[int, int, int]:
    """How elements of any dtype are moved: (C dtype code, C elements per element, tag). What the core has no name for
    is moved as bytes, and its name goes into the tag, so that ranks that disagree are told."""
    found = _copies.get(dtype)
    if found is None:
        found = _copies[dtype] = (_U8, dtype.itemsize, zlib.crc32(str(dtype).encode()) | 1 << 32)
    return found


def reduction(dtype: torch.dtype, op: str) -> tuple[int, int]:
    """(C dtype code, C reduction) of `op` over `dtype`; ArgumentError if the core has none."""
    found = REDUCTIONS.get((dtype, op))
    if found is None:
        if op not in REDUCE_OPS:
            raise ArgumentError(f"unknown reduction '{op}'; expected one of {', '.join(REDUCE_OPS)}")
        possible = ", ".join(o for o in REDUCE_OPS if (dtype, o) in REDUCTIONS)
        fix = f"possible are {possible}" if possible else "convert to a dtype that can be reduced"
        raise ArgumentError(f"there is no {op} of {dtype}; {fix}")
    return found


_LONGEST_MS = (2**63 - 1) // 2_000_000  # the most that the core takes: 146 years


def _milliseconds(timeout: datetime.timedelta) -> int:
    return min(max(1, int(timeout.total_seconds() * 1000)), _LONGEST_MS)


class Segment:
    """Memory that all ranks of a node map. Freed when neither this object nor a tensor of it is left; the last process
    frees the pages."""

    def __init__(self, handle: int, base: int, nbytes: int) -> None:
        self._handle: int | None = handle
        self._base, self.nbytes = base, nbytes

    def tensor(self, dtype: torch.dtype, offset: int, numel: int) -> torch.Tensor:
        """A 1-D view of `numel` elements that start `offset` bytes into the segment. Keeps the segment alive."""
        if offset < 0 or numel < 0 or offset % dtype.itemsize or offset + numel * dtype.itemsize > self.nbytes:
            raise ArgumentError(
                f"{numel} elements of {dtype} at byte {offset} don't fit a segment of {self.nbytes} bytes "
                "(or are not aligned)"
            )
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


class Request:
    """A send or receive that was started (Comm.isend, Comm.irecv). Keeps its tensor alive. One thread at a time per
    request. Dropping an incomplete receive withdraws it; dropping an incomplete send waits for it."""

    __slots__ = ("_handle", "_tensor", "_done")

    def __init__(self, handle: int, tensor: torch.Tensor) -> None:
        self._handle: int | None = handle
        self._tensor, self._done = tensor, False

    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks until the message is sent (the tensor may be written again) or received. timeout_s: default the
        communicator's; a time-out breaks the communicator. Raises MismatchError, RankDiedError, CommTimeoutError or
        AbortedError, and the same again on every later call.
        """
        ms = 0 if timeout_s is None else max(1, int(timeout_s * 1000))
        check(C.dc_request_wait(self._handle, ms))
        self._done = True

    def test(self) -> bool:
        """True once complete; never blocks. Progresses all messages of the communicator. Raises as wait()."""
        if not self._done:
            done = ctypes.c_int()
            check(C.dc_request_test(self._handle, ctypes.byref(done)))
            self._done = bool(done.value)
        return self._done

    def source(self) -> int:
        """Group rank that a completed receive came from."""
        found: int = C.dc_request_source(self._handle)
        if found < 0:
            check(found)
        return found

    def __del__(self) -> None:
        handle, self._handle = getattr(self, "_handle", None), None
        if handle:
            C.dc_request_free(handle)


_SECRET_BYTES = 16  # DC_COMM_SECRET
_STAGGER = 68 * 64  # between the ranks' parts of a segment: arrays congruent modulo 2 MiB evict each other


class Comm:
    """One dc_comm (comm/comm.h). Collectives block, give equal bits on every rank, and raise MismatchError,
    RankDiedError, CommTimeoutError or AbortedError on all ranks alike; after such an error the communicator is broken.
    Calls from several threads are serialised.

    Every tensor is a contiguous CPU tensor, or ArgumentError is raised before anything is shared."""

    def __init__(self, handle: int, rank: int, size: int, label: str) -> None:
        self._handle: int | None = handle
        self.rank, self.size, self.label = rank, size, label
        self.lock, self.caller = threading.Lock(), Caller()
        # Of calls that may come while another is inside: the handle is not freed under them.
        self._alive = threading.Lock()

    @property
    def handle(self) -> int:
        """The dc_comm pointer, borrowed."""
        if not self._handle:
            raise ArgumentError(f"communicator {self.label} is closed")
        return self._handle

    def relate(self, to: Comm) -> None:
        """This and `to`, of the same ranks, are called in one order on all ranks, one call at a time: ranks that
        wait for each other in different ones get MismatchError (dc_comm_relate)."""
        call("dc_comm_relate", self.handle, to.handle)

    def meet(self, to: Comm) -> None:
        """This (with what is related to it) and `to`, of the same ranks, are called by the calling thread, and maybe by
        others: ranks whose training threads wait for each other in both get MismatchError (dc_comm_meet)."""
        call("dc_comm_meet", self.handle, to.handle)

    def depend(self, on: Comm) -> None:
        """This and `on` are groups of one model: a wait here also ends with the error that breaks `on`, or soon after a
        rank of it has died (dc_comm_depend). Of a closed one: nothing."""
        with self._alive:
            mine = self._handle
        with on._alive:
            if mine and on._handle:
                call("dc_comm_depend", mine, on._handle)

    def waits(self, rank: int, what: str) -> None:
        """For who waits for group rank `rank` elsewhere, again and again meanwhile: RankDiedError if its process has
        ended, MismatchError if it waits for this rank here (dc_comm_waits), or the error that broke this communicator.
        Does nothing while a call is in progress here. rank -1: the wait is over, whatever is in progress."""
        if rank < 0:
            with self._alive:
                if self._handle:
                    check(C.dc_comm_waits(self._handle, rank, b""))
        elif self.lock.acquire(blocking=False):
            try:
                check(C.dc_comm_waits(self.handle, rank, what.encode()))
            finally:
                self.lock.release()

    @property
    def node(self) -> Comm:
        """What it has in this node, as of a Hierarchy."""
        return self

    @property
    def is_sound(self) -> bool:
        """Open, and no error has broken it."""
        with self._alive:
            return bool(self._handle) and not C.dc_comm_error(self._handle)

    def barrier(self, tag: int = 0, note: str = "") -> None:
        """Returns when every rank has called it with the same tag. note: goes behind the caller's line in messages."""
        with self.lock:
            self.caller.tell(self.handle, note)
            check(C.dc_barrier(self._handle, tag))

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", out: torch.Tensor | None = None, tag: int = 0) -> None:
        """out (default: tensor itself) = the reduction of `tensor` over the ranks; floating sums in fp32 in rank order.
        Equal shapes."""
        out = tensor if out is None else out
        require(tensor, "tensor")
        require(out, "out")
        dtype, red = reduction(tensor.dtype, op)
        require_sizes(out, tensor, 1, 1, self.size)
        with self.lock:
            self.caller.tell(self.handle)
            check(C.dc_all_reduce(self._handle, tensor.data_ptr(), out.data_ptr(), tensor.numel(), dtype, red, tag))

    def reduce(
        self, tensor: torch.Tensor, root: int, op: str = "sum", out: torch.Tensor | None = None, tag: int = 0
    ) -> None:
        """On group rank `root`: out (default: tensor itself) = the reduction of `tensor` over the ranks; elsewhere
        nothing is written."""
        out = tensor if out is None else out
        require(tensor, "tensor")
        require(out, "out")
        dtype, red = reduction(tensor.dtype, op)
        require_sizes(out, tensor, 1, 1, self.size)
        with self.lock:
            self.caller.tell(self.handle)
            check(
                C.dc_reduce_to(self._handle, tensor.data_ptr(), out.data_ptr(), tensor.numel(), dtype, red, root, tag)
            )

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, op: str = "sum", tag: int = 0) -> None:
        """out[n] = slice `rank` of the reduction of tensor[size * n]."""
        require(tensor, "tensor")
        require(out, "out")
        dtype, red = reduction(tensor.dtype, op)
        require_sizes(out, tensor, 1, self.size, self.size)
        with self.lock:
            self.caller.tell(self.handle)
            check(C.dc_reduce_scatter(self._handle, tensor.data_ptr(), out.data_ptr(), out.numel(), dtype, red, tag))

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """out[size * n] = tensor[n] of every rank in rank order. `tensor` may be this rank's part of `out`."""
        require(tensor, "tensor")
        require(out, "out")
        require_sizes(out, tensor, self.size, 1, self.size)
        dtype, per, tag = copy_code(tensor.dtype)
        with self.lock:
            self.caller.tell(self.handle)
            check(C.dc_all_gather(self._handle, tensor.data_ptr(), out.data_ptr(), tensor.numel() * per, dtype, tag))

    def gather(self, out: torch.Tensor | None, tensor: torch.Tensor, root: int) -> None:
        """On group rank `root`: out[size * n] = tensor[n] of every rank in rank order; elsewhere `out` is None."""
        require(tensor, "tensor")
        if self.rank == root:
            out = require(out, "out")
            require_sizes(out, tensor, self.size, 1, self.size)
        dtype, per, tag = copy_code(tensor.dtype)
        with self.lock:
            self.caller.tell(self.handle)
            into = None if out is None else out.data_ptr()
            check(C.dc_gather(self._handle, tensor.data_ptr(), into, tensor.numel() * per, dtype, root, tag))

    def scatter(self, out: torch.Tensor, tensor: torch.Tensor | None, root: int) -> None:
        """out[n] = part `rank` of the tensor[size * n] of group rank `root`; elsewhere `tensor` is None."""
        require(out, "out")
        if self.rank == root:
            tensor = require(tensor, "tensor")
            require_sizes(out, tensor, 1, self.size, self.size)
        dtype, per, tag = copy_code(out.dtype)
        with self.lock:
            self.caller.tell(self.handle)
            source = None if tensor is None else tensor.data_ptr()
            check(C.dc_scatter(self._handle, source, out.data_ptr(), out.numel() * per, dtype, root, tag))

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """tensor of group rank `root` to all."""
        require(tensor, "tensor")
        dtype, per, tag = copy_code(tensor.dtype)
        with self.lock:
            self.caller.tell(self.handle)
            check(C.dc_broadcast(self._handle, tensor.data_ptr(), tensor.numel() * per, dtype, root, tag))

    def all_to_all(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """Block j of out[size * n] = block `rank` of rank j's tensor[size * n]."""
        require(tensor, "tensor")
        require(out, "out")
        require_sizes(out, tensor, 1, 1, self.size)
        if tensor.numel() % self.size:
            raise ArgumentError(f"{tensor.numel()} elements can't be cut into {self.size} equal blocks")
        dtype, per, tag = copy_code(tensor.dtype)
        with self.lock:
            self.caller.tell(self.handle)
            check(
                C.dc_all_to_all(
                    self._handle, tensor.data_ptr(), out.data_ptr(), tensor.numel() // self.size * per, dtype, tag
                )
            )

    def all_to_allv(
        self, out: torch.Tensor, out_counts: Sequence[int], tensor: torch.Tensor, in_counts: Sequence[int]
    ) -> None:
        """As all_to_all with blocks of any sizes: in_counts[j] elements of `tensor` go to rank j, out_counts[j] of
        `out` come from rank j, in rank order. MismatchError on all ranks where the counts of two ranks disagree."""
        require_counts(out, out_counts, tensor, in_counts, self.size)
        dtype, per, tag = copy_code(tensor.dtype)
        array = ctypes.c_int64 * self.size
        sent, got = array(*(n * per for n in in_counts)), array(*(n * per for n in out_counts))
        with self.lock:
            self.caller.tell(self.handle)
            check(C.dc_all_to_allv(self._handle, tensor.data_ptr(), sent, out.data_ptr(), got, dtype, tag))

    def isend(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> Request:
        """Starts a message to group rank `dst`. May run beside collectives in other threads. The request keeps `tensor`
        alive; don't write it before the request is complete."""
        return self._message(C.dc_isend, tensor, dst, tag)

    def irecv(self, tensor: torch.Tensor, src: int | None = None, tag: int = 0) -> Request:
        """Starts a receive of exactly tensor.numel() elements from group rank `src` (None: anyone). Don't read `tensor`
        before the request is complete."""
        return self._message(C.dc_irecv, tensor, ANY_SOURCE if src is None else src, tag)

    def _message(self, start: Callable[..., int], tensor: torch.Tensor, peer: int, tag: int) -> Request:
        require(tensor, "tensor")
        dtype, per, _ = copy_code(tensor.dtype)
        numel, where, handle = tensor.numel() * per, caller_line(2)[-63:], ctypes.c_void_p()
        with self._alive:  # starting waits for nobody
            check(start(self.handle, tensor.data_ptr(), numel, dtype, peer, tag, where, ctypes.byref(handle)))
        return Request(handle.value or 0, tensor)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Of the calls that follow."""
        with self.lock:
            check(C.dc_comm_set_timeout(self.handle, _milliseconds(timeout)))

    def segment(self, nbytes: int) -> Segment:
        """A zeroed shared segment of at least `nbytes`, the same on all ranks. Collective. OutOfMemoryError on all
        ranks before anything is allocated if it does not fit."""
        handle, base = ctypes.c_void_p(), ctypes.c_void_p()
        with self.lock:
            self.caller.tell(self.handle)
            check(C.dc_segment_create(self._handle, nbytes, ctypes.byref(handle), ctypes.byref(base)))
        return Segment(handle.value or 0, base.value or 0, (nbytes + (2 << 20) - 1) >> 21 << 21)

    def registered(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A zeroed 1-D tensor of this rank's own that lies in shared memory: large collectives of this communicator
        read and write it where it is, instead of staging or copying it. Collective: the same numel and dtype on all
        ranks. A communicator has 64 such segments, whose places are free again when all ranks have dropped theirs;
        without one all ranks get DeepcError. OutOfMemoryError on all ranks before anything is allocated if it does not
        fit. The communicator stays sound after both."""
        line = 64
        stride = (numel * dtype.itemsize + line - 1) // line * line + _STAGGER
        return self.segment(max(1, self.size * stride)).tensor(dtype, self.rank * stride, numel)

    def abort(self, reason: str) -> None:
        """Breaks the communicator on every rank; may be called from any thread. Of a closed one: nothing."""
        with self._alive:  # who gets the error may close at once
            if self._handle:
                check(C.dc_comm_abort(self._handle, reason.encode(errors="replace")))

    def fail(self, error: CommError) -> None:
        """As abort with an error of another group, which all ranks get as it is (dc_comm_fail)."""
        with self._alive:
            if self._handle:
                text = without_place(str(error)).encode(errors="replace")
                check(C.dc_comm_fail(self._handle, status_of(type(error)), text))

    def error(self) -> str:
        """ "" or what broke the communicator."""
        with self._alive:
            return C.dc_comm_error(self._handle).decode(errors="replace") if self._handle else ""

    def close(self) -> None:
        """Leaves the group. Peers that still wait for this rank get RankDiedError. Not collective; a second close does
        nothing."""
        with self.lock, self._alive:
            handle, self._handle = self._handle, None
        if handle:
            check(C.dc_comm_close(handle))


def open_comm(
    store: dist.Store,
    rank: int,
    size: int,
    *,
    label: str,
    timeout: datetime.timedelta,
    slot_bytes: int,
    slots: int,
    global_ranks: Sequence[int] | None = None,
    places: Places | None = None,
) -> Comm:
    """Opens a communicator of `size` ranks of one node. Collective.

    store: a torch.distributed store that is this group's own (use a PrefixStore); ranks exchange their node, a random
    address, and a secret that lets only them in, through it. slot_bytes (a multiple of 4096) and slots (>= 2): staging
    per rank. timeout: of joining and of every wait. global_ranks: names of the ranks in messages. places: where these
    ranks lie, from a caller that has asked already. Raises UnsupportedError if the ranks lie on several nodes,
    CommError and its subclasses if joining fails, RankDiedError as soon as one whose place is known has ended."""
    found = discover(store, rank, size) if places is None else places
    if found.topology.count != 1:
        where = ", ".join(f"rank {r}: {p.node}" for r, p in enumerate(found.processes))
        raise UnsupportedError(
            f"group {label} spans several nodes ({where}); shared memory reaches one. If they are one machine, set "
            "DEEPC_NODE_ID"
        )
    if rank == 0:
        store.set("address", f"deepc-{secrets.token_hex(16)} {secrets.token_hex(_SECRET_BYTES)}")
    names = (ctypes.c_int32 * size)(*(global_ranks or range(size)))
    pids = found.pids(rank)

    def watch(missing: int) -> None:
        if pids[missing] and ended(pids[missing]):
            raise RankDiedError(
                f"group {label}: rank {names[missing]} (pid {pids[missing]}) died before it joined the group"
            )

    if rank != 0:
        await_keys(store, rank, {0: "address"}, watch, f"group {label}")
    address, secret = store.get("address").split()
    config = CommConfig(
        rank=rank,
        size=size,
        address=address,
        label=label.encode(errors="replace"),
        global_rank=names,
        timeout_ms=_milliseconds(timeout),
        slot_bytes=slot_bytes,
        slots=slots,
        flags=0,
        secret=bytes.fromhex(secret.decode()),
        pid=(ctypes.c_int32 * size)(*pids),
    )
    handle = ctypes.c_void_p()
    check(C.dc_comm_open(ctypes.byref(config), ctypes.byref(handle)))
    return Comm(handle.value or 0, rank, size, label)
