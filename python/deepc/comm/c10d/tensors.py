"""What the process group asks of the tensors and options that torch.distributed hands it: dense memory, adjacency,
reductions, blocks."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...core.foreign import private
from ...errors import ArgumentError

STRIDED = torch.strided
PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_Type: Any = dist.ReduceOp.RedOpType  # torch's stub lists no members
OPS = {
    _Type.SUM: "sum",
    _Type.AVG: "avg",
    _Type.MIN: "min",
    _Type.MAX: "max",
    _Type.PRODUCT: "prod",
    _Type.BAND: "band",
    _Type.BOR: "bor",
    _Type.BXOR: "bxor",
}


# ---- tensors ---------------------------------------------------------------------------------------------------------
def is_dense(t: torch.Tensor) -> bool:
    """Its memory holds its values, one behind the other."""
    return t.is_contiguous() and not t.is_neg() and not t.is_conj()


def dense_of(t: torch.Tensor) -> torch.Tensor:
    """Its values in dense memory: itself if it is dense. Not for autograd: only its memory is used."""
    return t if is_dense(t) else t.detach().resolve_conj().resolve_neg().contiguous()


def room_for(t: torch.Tensor) -> torch.Tensor:
    """Dense memory for an output of its shape: itself if it is dense."""
    return t if is_dense(t) else torch.empty(t.shape, dtype=t.dtype, device="cpu")


def store_into(t: torch.Tensor, dense: torch.Tensor) -> None:
    """t = dense, if that is not t's own memory."""
    if dense is t or dense.data_ptr() == t.data_ptr():
        return
    with torch.inference_mode(t.is_inference()):
        t, dense = t.detach(), dense.view(t.shape)
        for d, stride in enumerate(t.stride()):
            if stride == 0 and t.shape[d] > 1:  # an expanded tensor: one element of memory
                t, dense = t.narrow(d, 0, 1), dense.narrow(d, 0, 1)
        t.copy_(dense)


def overlap(small: torch.Tensor, large: torch.Tensor, part: int) -> bool:
    """Whether these dense tensors share memory otherwise than that `small` is part number `part` of `large`, of as many
    bytes each: peers that read one while the other is written would get anything. Gloo copies what it is given."""
    away = small.data_ptr() - large.data_ptr()
    return -small.nbytes < away < large.nbytes and away != part * small.nbytes


def is_plain(t: torch.Tensor) -> bool:
    """What the fast paths take."""
    return t.__class__ in PLAIN and t.is_cpu and t.layout is STRIDED and t.is_contiguous() and not t.is_neg()


def as_real(t: torch.Tensor, op: str) -> torch.Tensor:
    """What the core reduces for a dense t: complex sums are sums of their parts."""
    return torch.view_as_real(t.detach()) if t.is_complex() and op in ("sum", "avg") else t


def adjacent(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One flat view over tensors that lie behind each other in one storage (torch.chunk of a buffer), or None."""
    first = tensors[0]
    storage, at = first.untyped_storage().data_ptr(), first.storage_offset()
    begin = at
    for t in tensors:
        if not is_dense(t) or t.storage_offset() != at or t.untyped_storage().data_ptr() != storage:
            return None
        at += t.numel()
    return first.detach().as_strided((at - begin,), (1,), begin)


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The values of all, flat."""
    flat = adjacent(tensors)
    return torch.cat([dense_of(t).detach().reshape(-1) for t in tensors]) if flat is None else flat


def on_core(*lists: Sequence[torch.Tensor]) -> bool:
    for tensors in lists:
        for t in tensors:
            if not t.is_cpu or t.layout is not STRIDED:
                return False
    return True


def local_of(t: torch.Tensor) -> torch.Tensor:
    """The tensor whose memory is meant: subclasses that stand for others are asked."""
    if t.__class__ in PLAIN or t.__class__.__torch_dispatch__ is private.no_dispatch:
        return t
    if hasattr(t, "trigger_wait"):  # AsyncCollectiveTensor
        waited: torch.Tensor = t.trigger_wait()
        return waited
    if hasattr(t, "to_local"):
        raise ArgumentError(f"collectives take plain tensors, got a {type(t).__name__}; pass its to_local()")
    return t


def are_fake(tensors: Sequence[torch.Tensor]) -> bool:
    """Tensors without values, as torch.export and the compiler use them."""
    for t in tensors:
        if t.__class__ not in PLAIN:
            from ...core.foreign.private import FakeTensor

            return any(isinstance(t, FakeTensor) for t in tensors)
    return False


def blocks_of(t: torch.Tensor, splits: Sequence[int], size: int, what: str) -> list[int]:
    """Elements of each rank's block of t, which is cut along its first dimension as torch.distributed.all_to_all_single
    says."""
    if t.dim() == 0:
        raise ArgumentError(f"all_to_all_single: {what} has no dimension to be cut")
    rows = t.shape[0]
    row = t.numel() // rows if rows else 0
    if not splits:
        if rows % size:
            raise ArgumentError(
                f"all_to_all_single: the first dimension of {what}, {rows}, can't be cut into {size} equal blocks; give"
                " split sizes"
            )
        return [rows // size * row] * size
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        raise ArgumentError(
            f"all_to_all_single: split sizes {list(splits)} of {what} don't cut its first dimension of {rows} for"
            f" {size} ranks"
        )
    return [n * row for n in splits]


# ---- options ---------------------------------------------------------------------------------------------------------
def reduction_of(reduce_op: Any) -> tuple[str, Any]:
    """("sum", None), ("sum", factor) for a premultiplied sum. Never compare RedOpType == ReduceOp: that way round it is
    False."""
    kind = getattr(reduce_op, "op", reduce_op)
    name = OPS.get(kind)
    if name is not None:
        return name, None
    if kind == _Type.PREMUL_SUM:
        return "sum", reduce_op.__getstate__()[1]
    raise ArgumentError(f"unknown reduction {reduce_op}; expected one of torch.distributed.ReduceOp")


def options_of(given: Any, kind: type, **fields: Any) -> Any:
    """The options object of a call: as given, or made of the fields of torch's short forms, such as broadcast(tensor,
    root)."""
    if isinstance(given, kind):
        return given
    made = kind()
    for name, value in fields.items():
        if value is not None:
            setattr(made, name, value)
    return made


def reduce_options(given: Any, kind: type, op: Any, **fields: Any) -> Any:
    """As options_of; torch's short forms have the reduction in the place of the options."""
    if not isinstance(given, kind) and given is not None:
        op = given
    return options_of(given, kind, reduceOp=op, **fields)


def limit_of(opts: Any) -> datetime.timedelta | None:
    """The time-out that the call asks for, if any (torch's "unset" is -1 ms)."""
    given = getattr(opts, "timeout", None)
    return given if given is not None and given.days >= 0 and given else None
