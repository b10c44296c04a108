"""One collective between nodes: what it is, as all ranks must agree on it, and what is computed on its partial
results."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...core.lib import call
from ...core.memory import tensor_at
from .. import shared

HEADER = 320  # bytes of a frame before its data
_F32 = 0  # enum dc_dtype
_SIXTEEN = (torch.bfloat16, torch.float16)
_NUMBERS = {
    name: i
    for i, name in enumerate(
        (
            "barrier",
            "all_reduce",
            "reduce_scatter",
            "all_gather",
            "broadcast",
            "all_to_all",
            "all_to_allv",
            "reduce",
            "gather",
            "scatter",
        ),
        1,
    )
}


# ---- the call --------------------------------------------------------------------------------------------------------
class Call(NamedTuple):
    """What all ranks must agree on."""

    name: str
    text: str  # for messages
    red: int
    root: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls
    dtype: int
    tag: int


FINGERPRINT = struct.Struct("<IIiiqqqq")
_MAGIC = 0x44435748


def header(c: Call, seq: int, where: bytes) -> bytes:
    """[HEADER] what a rank tells of its call: the fingerprint, and words."""
    words = f"{c.text} (call {seq})".encode() + (b" at " + where if where else b"")
    room = HEADER - FINGERPRINT.size
    return FINGERPRINT.pack(_MAGIC, _NUMBERS[c.name], c.red, c.root, c.count, c.dtype, c.tag, seq) + words[:room].ljust(
        room, b"\0"
    )


def told(frame: bytes) -> str:
    """The words."""
    return frame[FINGERPRINT.size : HEADER].rstrip(b"\0").decode(errors="replace")


# ---- reductions ------------------------------------------------------------------------------------------------------
class Reduction:
    """What is computed on the partial results of one call."""

    def __init__(self, dtype: torch.dtype, op: str, size: int, wire_fp32: bool) -> None:
        """size: ranks of the group. Raises ArgumentError where the core has no such reduction."""
        self.code, red = shared.reduction(dtype, op)
        average = op == "avg"
        self._red = shared.REDUCE_OPS["sum"] if average else red
        sixteen = dtype in _SIXTEEN
        self.wide = wire_fp32 and sixteen and op in ("sum", "avg")
        self._scaled_first = average and sixteen and not self.wide
        self._scale = 1.0 / size if average else 1.0
        self._dtype, self.unit = dtype, dtype.itemsize
        self.part_unit = 4 if self.wide else self.unit
        self.plain = not self.wide and not self._scaled_first  # one input is its own partial result

    def local(self, part: int, sources: Sequence[int], count: int) -> None:
        """part = reduction of the inputs of a node's ranks. Addresses."""
        src = _array(sources)
        if self.wide:
            call("dc_reduce_acc", part, src, len(sources), self.code, count, 1, None)
        elif self._scaled_first:
            scratch = torch.empty(count, dtype=torch.float32, device="cpu")
            call("dc_reduce_acc", scratch.data_ptr(), src, len(sources), self.code, count, 1, None)
            call("dc_cast", part, self.code, scratch.data_ptr(), _F32, self._scale, count)
        else:
            call("dc_reduce", part, src, len(sources), self.code, self._red, count)

    def across(self, result: int, parts: Sequence[int], own: int, count: int) -> None:
        """result = reduction of the nodes' parts. own: index of this node's part, which may be overwritten."""
        if self.wide:
            call("dc_reduce", parts[own], _array(parts), len(parts), _F32, self._red, count)
            call("dc_cast", result, self.code, parts[own], _F32, self._scale, count)
            return
        call("dc_reduce", result, _array(parts), len(parts), self.code, self._red, count)
        if self._scale != 1.0 and not self._scaled_first:
            tensor_at(result, count, self._dtype, None).mul_(self._scale)


def _array(addresses: Sequence[int]) -> Any:
    return (ctypes.c_void_p * len(addresses))(*addresses)
