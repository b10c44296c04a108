"""The fast paths of the process group: one dense CPU tensor, synchronous, one node; see process_group.py for what a
call costs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...core.lib import C
from ...core.ops import CODES
from .. import shared
from .progress import Progress
from .tensors import OPS, PLAIN, STRIDED, is_plain, overlap

_SUM: Any = dist.ReduceOp.SUM
_SUMS = {dtype: row for (dtype, op), row in shared.REDUCTIONS.items() if op == "sum"}
_MOVES = {dtype: shared.copy_code(dtype) for dtype in (*CODES, torch.bool)}  # one C element each
_all_reduce, _broadcast, _all_gather = C.dc_all_reduce, C.dc_broadcast, C.dc_all_gather
_reduce_scatter, _reduce_to = C.dc_reduce_scatter, C.dc_reduce_to
_gather, _scatter, _all_to_allv = C.dc_gather, C.dc_scatter, C.dc_all_to_allv
_LISTS_BYTES = 64 << 10  # up to here a fast path copies a list's tensors through one buffer

Tensors = Sequence[torch.Tensor]


class FastPaths:
    """Of DeepcProcessGroup, which has the attributes. Repeated rather than shared, because each further Python call
    costs as much as all their checks. False, None: take the general way."""

    _size: int
    _rank: int
    _quick: shared.Comm | None
    _progress: Progress | None
    _small: Any  # see _lists_buffer()
    _even: dict[int, Any]  # counts of even all_to_alls, by elements

    def _failed(self, status: int, name: str, tensors: Tensors) -> None:
        """Raises the error of a fast path."""
        raise NotImplementedError

    def _quick_all_reduce(self, core: shared.Comm, tensors: Tensors, opts: Any) -> bool:
        t = tensors[0]
        if not (t.__class__ in PLAIN and t.is_cpu and t.layout is STRIDED and t.is_contiguous() and not t.is_neg()):
            return False
        reduce_op = opts.reduceOp
        found = _SUMS.get(t.dtype) if reduce_op == _SUM else shared.REDUCTIONS.get((t.dtype, OPS.get(reduce_op.op, "")))
        if found is None or opts.timeout.days >= 0:
            return False
        pointer = t.data_ptr()
        with core.lock:
            core.caller.tell(core._handle)
            status = _all_reduce(core._handle, pointer, pointer, t.numel(), found[0], found[1], 0)
        if status:
            self._failed(status, "all_reduce", tensors)
        return True

    def _quick_broadcast(self, core: shared.Comm, tensors: Tensors, opts: Any) -> bool:
        t = tensors[0]
        if not (t.__class__ in PLAIN and t.is_cpu and t.layout is STRIDED and t.is_contiguous() and not t.is_neg()):
            return False
        found = _MOVES.get(t.dtype)
        if found is None or opts.timeout.days >= 0:
            return False
        with core.lock:
            core.caller.tell(core._handle)
            status = _broadcast(core._handle, t.data_ptr(), t.numel(), found[0], opts.rootRank, found[2])
        if status:
            self._failed(status, "broadcast", tensors)
        return True

    def _quick_all_gather(self, core: shared.Comm, out: torch.Tensor, t: torch.Tensor, opts: Any) -> bool:
        if not (t.__class__ in PLAIN and t.is_cpu and t.layout is STRIDED and t.is_contiguous() and not t.is_neg()):
            return False
        if not (
            out.__class__ in PLAIN and out.is_cpu and out.layout is STRIDED and out.is_contiguous() and not out.is_neg()
        ):
            return False
        dtype, n = t.dtype, t.numel()
        found = _MOVES.get(dtype)
        if found is None or out.dtype is not dtype or out.numel() != n * self._size or opts.timeout.days >= 0:
            return False
        pointer, to = t.data_ptr(), out.data_ptr()
        if -t.nbytes < pointer - to < out.nbytes and overlap(t, out, self._rank):
            return False
        with core.lock:
            core.caller.tell(core._handle)
            status = _all_gather(core._handle, pointer, to, n, found[0], found[2])
        if status:
            self._failed(status, "all_gather_into_tensor", (t,))
        return True

    def _quick_reduce_scatter(self, core: shared.Comm, out: torch.Tensor, t: torch.Tensor, opts: Any) -> bool:
        if not (t.__class__ in PLAIN and t.is_cpu and t.layout is STRIDED and t.is_contiguous() and not t.is_neg()):
            return False
        if not (
            out.__class__ in PLAIN and out.is_cpu and out.layout is STRIDED and out.is_contiguous() and not out.is_neg()
        ):
            return False
        dtype, n, reduce_op = t.dtype, out.numel(), opts.reduceOp
        found = _SUMS.get(dtype) if reduce_op == _SUM else shared.REDUCTIONS.get((dtype, OPS.get(reduce_op.op, "")))
        if found is None or out.dtype is not dtype or t.numel() != n * self._size or opts.timeout.days >= 0:
            return False
        pointer, to = t.data_ptr(), out.data_ptr()
        if -out.nbytes < to - pointer < t.nbytes and overlap(out, t, self._rank):
            return False
        with core.lock:
            core.caller.tell(core._handle)
            status = _reduce_scatter(core._handle, pointer, to, n, found[0], found[1], 0)
        if status:
            self._failed(status, "reduce_scatter_tensor", (t,))
        return True

    def _quick_reduce(self, core: shared.Comm, tensors: Tensors, opts: Any) -> bool:
        t, reduce_op = tensors[0], opts.reduceOp
        found = _SUMS.get(t.dtype) if reduce_op == _SUM else shared.REDUCTIONS.get((t.dtype, OPS.get(reduce_op.op, "")))
        if found is None or not is_plain(t) or opts.timeout.days >= 0:
            return False
        pointer = t.data_ptr()
        with core.lock:
            core.caller.tell(core._handle)
            status = _reduce_to(core._handle, pointer, pointer, t.numel(), found[0], found[1], opts.rootRank, 0)
        if status:
            self._failed(status, "reduce", tensors)
        return True

    def _pointers(self, parts: Tensors, t: torch.Tensor, nbytes: int) -> list[int] | None:
        """Where the tensors of a list lie that has one for each rank, each as t; None if a fast path can't take
        them."""
        if len(parts) != self._size or nbytes * self._size > _LISTS_BYTES:
            return None
        for part in parts:
            if not is_plain(part) or part.dtype is not t.dtype or part.nbytes != nbytes:
                return None
        return [part.data_ptr() for part in parts]

    def _lists_buffer(self) -> int:
        """Address of the buffer through which the fast paths of lists copy. With the lock of the communicator."""
        if self._small is None:
            self._small = ctypes.create_string_buffer(_LISTS_BYTES)
        return ctypes.addressof(self._small)

    def _quick_gather(self, core: shared.Comm, outputs: Sequence[Tensors], tensors: Tensors, opts: Any) -> bool:
        t, root = tensors[0], opts.rootRank
        found = _MOVES.get(t.dtype)
        if found is None or not is_plain(t) or opts.timeout.days >= 0 or bool(outputs) != (self._rank == root):
            return False
        nbytes, to = t.nbytes, None
        if outputs:
            to = self._pointers(outputs[0], t, nbytes)
            if to is None:
                return False
        with core.lock:
            core.caller.tell(core._handle)
            room: Any = self._lists_buffer() if to else None
            status = _gather(core._handle, t.data_ptr(), room, t.numel(), found[0], root, found[2])
            if to and not status:
                for i, pointer in enumerate(to):
                    ctypes.memmove(pointer, room + i * nbytes, nbytes)
        if status:
            self._failed(status, "gather", tensors)
        return True

    def _quick_scatter(self, core: shared.Comm, tensors: Tensors, inputs: Sequence[Tensors], opts: Any) -> bool:
        t, root = tensors[0], opts.rootRank
        found = _MOVES.get(t.dtype)
        if found is None or not is_plain(t) or opts.timeout.days >= 0 or bool(inputs) != (self._rank == root):
            return False
        nbytes, given = t.nbytes, None
        if inputs:
            given = self._pointers(inputs[0], t, nbytes)
            if given is None:
                return False
        with core.lock:
            core.caller.tell(core._handle)
            room: Any = self._lists_buffer() if given else None
            for i, pointer in enumerate(given or ()):
                ctypes.memmove(room + i * nbytes, pointer, nbytes)
            status = _scatter(core._handle, room, t.data_ptr(), t.numel(), found[0], root, found[2])
        if status:
            self._failed(status, "scatter", tensors)
        return True

    def _quick_all_to_all(self, core: shared.Comm, out: torch.Tensor, t: torch.Tensor, opts: Any) -> bool:
        """Without split sizes."""
        found, n = _MOVES.get(t.dtype), t.numel()
        if (
            found is None
            or not is_plain(t)
            or not is_plain(out)
            or out.dtype is not t.dtype
            or out.numel() != n
            or opts.timeout.days >= 0
        ):
            return False
        if not t.dim() or not out.dim() or t.shape[0] % self._size or out.shape[0] % self._size:
            return False
        pointer, to = t.data_ptr(), out.data_ptr()
        if 0 < abs(pointer - to) < t.nbytes:
            return False
        counts = self._even.get(n)
        if counts is None:
            if len(self._even) > 64:
                self._even.clear()
            counts = self._even[n] = (ctypes.c_int64 * self._size)(*([n // self._size] * self._size))
        with core.lock:
            core.caller.tell(core._handle)
            status = _all_to_allv(core._handle, pointer, counts, to, counts, found[0], found[2])
        if status:
            self._failed(status, "all_to_all_single", (t,))
        return True

    def _idle(self) -> shared.Comm | None:
        """The communicator if a synchronous call may enter it at once."""
        progress = self._progress
        return self._quick if progress is None or progress.last is None else None
