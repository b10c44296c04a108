"""Compressed collectives: all_gather, reduce_scatter and all_reduce over any torch.distributed group that move payloads
of a codec (optim/codecs.py).

    codec = Int8Blocks()
    state = ErrorFeedback()                                        # one per tensor (or bucket) and call site
    sent = all_reduce(grad, group, codec, state, op="avg")         # bytes that this rank put on the wire

They move uint8, decode on every rank from the same bytes, and add in fp32 in rank order: results are equal bit for bit
on all ranks. A NaN or an infinity in a block arrives as NaN on every rank (top-k: as it is), never as a number."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist

from ...errors import ArgumentError
from ...optim.codecs import Codec, Int4Blocks, Int8Blocks, OneBit, TopK
from ..internode.compressed import OneBitAllReduce

__all__ = [
    "Codec",
    "ErrorFeedback",
    "Int4Blocks",
    "Int8Blocks",
    "OneBit",
    "OneBitAllReduce",
    "TopK",
    "Traffic",
    "all_gather",
    "all_gather_begin",
    "all_reduce",
    "reduce_scatter",
    "reset_traffic",
    "traffic",
]

ALIGN = 64  # elements: slices of a tensor begin at multiples of it, so that vectors and bytes of packed codes are whole


# ---- error feedback --------------------------------------------------------------------------------------------------
class ErrorFeedback:
    """What earlier calls did not carry, of one tensor at one call site. worker: fp32 [n], of this rank's own
    contribution. server: fp32, of the slice that this rank reduces (all_reduce only). Both begin as zeros, at the first
    call. Each rank's are its own: a checkpoint saves them per rank."""

    def __init__(self) -> None:
        self.worker: torch.Tensor | None = None
        self.server: torch.Tensor | None = None
        self._key: tuple[int, int, int] | None = None  # elements, world, rank

    def _open(self, n: int, world: int, rank: int, server: int) -> None:
        if self._key is None:
            self._key = (n, world, rank)
        if self._key != (n, world, rank):
            raise ArgumentError(
                f"error feedback of {self._key[0]} elements, rank {self._key[2]} of {self._key[1]}, used for {n}"
                f" elements, rank {rank} of {world}: one ErrorFeedback belongs to one tensor; call reset() if the"
                " tensor or the group has changed"
            )
        if self.worker is None:
            self.worker = torch.zeros(n, dtype=torch.float32, device="cpu")
        if server and self.server is None:
            self.server = torch.zeros(server, dtype=torch.float32, device="cpu")

    def reset(self) -> None:
        """Forgets the errors; the next call begins with zeros, of any size."""
        self.worker = self.server = self._key = None

    def folded(self, average: bool) -> torch.Tensor | None:
        """A copy of the worker error with the server's added where this rank's slice lies (average: of op "avg").
        Summed over ranks it is all that is owed to the result, so it can be cut up and used for other tensors of the
        same elements. None before the first call.
        """
        if self.worker is None or self._key is None:
            return None
        out, (n, world, rank) = self.worker.clone(), self._key
        if self.server is not None:
            begin, length = _slice(n, world, rank)
            out[begin : begin + length] += self.server[:length] * (world if average else 1)
        return out

    def state_dict(self) -> dict[str, Any]:
        """{"elements", "world", "rank", "worker", "server"}: this rank's; copies. Empty before the first call."""
        if self._key is None:
            return {}
        out: dict[str, Any] = dict(zip(("elements", "world", "rank"), self._key))
        out.update((k, t.clone()) for k, t in (("worker", self.worker), ("server", self.server)) if t is not None)
        return out

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The reverse. The next call must be of the same tensor, rank and world size, else it raises ArgumentError."""
        self.reset()
        if not state:
            return
        n, world, rank = (int(state[k]) for k in ("elements", "world", "rank"))
        sizes = {"worker": n, "server": _slice_elements(n, world)}
        for name, size in sizes.items():
            if (t := state.get(name)) is not None and (t.dtype != torch.float32 or t.numel() != size):
                raise ArgumentError(
                    f"error feedback: '{name}' is {t.dtype} of {t.numel()} elements; expected torch.float32 of {size}"
                )
        self._key = (n, world, rank)
        self.worker, self.server = (
            None if (t := state.get(k)) is None else t.detach().clone().flatten() for k in sizes
        )


# ---- bytes on the wire -----------------------------------------------------------------------------------------------
class Traffic(NamedTuple):
    """calls, bytes that this rank sent to others, and what the uncompressed collective of the tensor's dtype would have
    sent."""

    calls: int = 0
    sent_bytes: int = 0
    dense_bytes: int = 0


_traffic: dict[str, Traffic] = {}
_traffic_lock = threading.Lock()  # DDP hooks may run on a thread


def traffic() -> dict[str, Traffic]:
    """Totals of this process by collective ("all_gather", "reduce_scatter", "all_reduce") and "total"."""
    return {**_traffic, "total": Traffic(*(sum(t[i] for t in _traffic.values()) for i in range(3)))}


def reset_traffic() -> None:
    _traffic.clear()


def _count(name: str, sent: int, dense: int) -> int:
    with _traffic_lock:
        t = _traffic.get(name, Traffic())
        _traffic[name] = Traffic(t.calls + 1, t.sent_bytes + sent, t.dense_bytes + dense)
    return sent


# ---- collectives -----------------------------------------------------------------------------------------------------
Group = Optional[dist.ProcessGroup]  # None: the default group  # noqa: UP045
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _slice_elements(n: int, world: int) -> int:
    """Elements of a rank's slice of an all_reduce: the last ones may be shorter, or empty."""
    return -(-n // (world * ALIGN)) * ALIGN


def _slice(n: int, world: int, rank: int) -> tuple[int, int]:
    """(begin, length) of a rank's slice."""
    size = _slice_elements(n, world)
    begin = min(n, rank * size)
    return begin, min(n, begin + size) - begin


def _slices(n: int, world: int) -> Iterator[tuple[int, int, int]]:
    for rank in range(world):
        yield (rank, *_slice(n, world, rank))


def _place(group: Group) -> tuple[int, int]:
    rank = dist.get_rank(group)
    if rank < 0:
        raise ArgumentError("a compressed collective of a group that this process is no rank of; call it on its ranks")
    return rank, dist.get_world_size(group)


def _check_op(op: str) -> None:
    if op not in ("sum", "avg"):
        raise ArgumentError(f"op={op!r}: compressed reductions are 'sum' and 'avg'")


def _flat(t: torch.Tensor, what: str) -> torch.Tensor:
    if not t.is_contiguous():
        raise ArgumentError(f"{what} is not contiguous; pass {what}.contiguous()")
    return t.detach().view(-1)


def _encode_slices(
    x: torch.Tensor, world: int, codec: Codec, error: torch.Tensor | None, spans: Sequence[tuple[int, int, int]]
) -> torch.Tensor:
    """One payload per destination, uint8 [world, nbytes of the longest]."""
    lengths = [length for _, _, length in spans]
    make = torch.empty if min(lengths) == max(lengths) else torch.zeros  # bytes that no slice fills are sent too
    out = make(world, codec.nbytes(max(lengths)), dtype=torch.uint8, device="cpu")
    for rank, begin, length in spans:
        if length:
            piece = slice(begin, begin + length)
            codec.encode(out[rank, : codec.nbytes(length)], x[piece], None if error is None else error[piece])
    return out


def _exchange(payloads: torch.Tensor, group: Group) -> torch.Tensor:
    """Row r goes to rank r; row r of the result is from rank r."""
    got = torch.empty_like(payloads)
    dist.all_to_all_single(got.view(-1), payloads.view(-1), group=group)
    return got


def _sum_rows(acc: torch.Tensor, rows: torch.Tensor, codec: Codec, op: str) -> None:
    """acc [n], fp32 = the sum (or average) of what the rows hold, added in rank order."""
    size = codec.nbytes(acc.numel())
    codec.decode(acc, rows[0, :size])
    for row in rows[1:]:
        codec.decode_add(acc, row[:size])
    if op == "avg":
        acc.mul_(1.0 / len(rows))


def all_gather_begin(
    out: torch.Tensor,
    x: torch.Tensor,
    group: Group,
    codec: Codec,
    state: ErrorFeedback | None = None,
    *,
    async_op: bool = True,
) -> tuple[int, Callable[[], None]]:
    """all_gather in two parts: x is encoded and on its way when this returns (sent bytes, finish); out holds the result
    after finish(), which waits for the payloads and decodes them. x may be overwritten in between, out may not be
    read."""
    rank, world = _place(group)
    out, x = _flat(out, "out"), _flat(x, "x")
    n = x.numel()
    if out.numel() != world * n:
        raise ArgumentError(f"all_gather: out has {out.numel()} elements; {world} ranks of {n} need {world * n}")
    if world == 1:
        out.copy_(x)
        return _count("all_gather", 0, 0), lambda: None
    if state is not None:
        state._open(n, world, rank, 0)
    mine = torch.empty(codec.nbytes(n), dtype=torch.uint8, device="cpu")
    codec.encode(mine, x, state.worker if state else None)
    rows = torch.empty(world, mine.numel(), dtype=torch.uint8, device="cpu")
    work = _gather(rows.view(-1), mine, group=group, async_op=async_op)

    def finish(sending: torch.Tensor = mine) -> None:  # lives until it has been sent
        if work is not None:
            work.wait()
        for r in range(world):
            codec.decode(out[r * n : (r + 1) * n], rows[r])

    return _count("all_gather", (world - 1) * mine.numel(), (world - 1) * n * x.element_size()), finish


def all_gather(
    out: torch.Tensor, x: torch.Tensor, group: Group, codec: Codec, state: ErrorFeedback | None = None
) -> int:
    """out [world * n] = the x [n] of all ranks in rank order, each as its payload carries it: also this rank's own
    part, so that out is equal on all ranks. out: fp32, bf16 or fp16, also of another dtype than x; x may lie in out.
    Returns the bytes that this rank sent: (world - 1) * nbytes(n). With one rank out = x. Collective; CPU tensors;
    group: a torch.distributed group or None.
    """
    sent, finish = all_gather_begin(out, x, group, codec, state, async_op=False)
    finish()
    return sent


def reduce_scatter(
    out: torch.Tensor, x: torch.Tensor, group: Group, codec: Codec, state: ErrorFeedback | None = None, op: str = "sum"
) -> int:
    """out [n] = this rank's n elements of the sum (or "avg") over ranks of their x [world * n], each as its payload
    carries it, added in fp32 in rank order. Returns the bytes that this rank sent: (world - 1) * nbytes(n). With one
    rank out = x. Collective; CPU tensors.
    """
    _check_op(op)
    rank, world = _place(group)
    out, x = _flat(out, "out"), _flat(x, "x")
    n = out.numel()
    if x.numel() != world * n:
        raise ArgumentError(f"reduce_scatter: x has {x.numel()} elements; {world} ranks of {n} need {world * n}")
    if world == 1:
        out.copy_(x)
        return _count("reduce_scatter", 0, 0)
    if state is not None:
        state._open(x.numel(), world, rank, 0)
    payloads = _encode_slices(x, world, codec, state.worker if state else None, [(r, r * n, n) for r in range(world)])
    got = _exchange(payloads, group)
    acc = out if out.dtype == torch.float32 else torch.empty(n, dtype=torch.float32, device="cpu")
    _sum_rows(acc, got, codec, op)
    if acc is not out:
        torch.ops.deepc.cast_tensor(acc, out, 1.0)
    return _count("reduce_scatter", (world - 1) * codec.nbytes(n), (world - 1) * n * x.element_size())


def all_reduce(x: torch.Tensor, group: Group, codec: Codec, state: ErrorFeedback | None = None, op: str = "sum") -> int:
    """x [n] = the sum (or "avg") of all ranks' x, in place; equal bits on all ranks. Two steps, as in 1-bit Adam (Tang
    et al., arXiv:2102.02888) and ZeRO++ (Wang et al., arXiv:2306.10209): each rank sends slice r of its x, compressed,
    to rank r, which adds them in fp32 in rank order, compresses the sum again (state: with an error of its own), and
    sends that to all. Slices are equal, rounded up to 64 elements. Returns the bytes that this rank sent: 2 * (world -
    1) * nbytes(the longest slice). With one rank x stays. Collective; CPU tensors."""
    _check_op(op)
    rank, world = _place(group)
    x = _flat(x, "x")
    n = x.numel()
    if world == 1 or n == 0:
        return _count("all_reduce", 0, 0)
    size, (_, length) = _slice_elements(n, world), _slice(n, world, rank)
    if state is not None:
        state._open(n, world, rank, size)
    spans = list(_slices(n, world))
    got = _exchange(_encode_slices(x, world, codec, state.worker if state else None, spans), group)
    mine = torch.zeros(got.shape[1], dtype=torch.uint8, device="cpu")
    if length:
        acc = torch.empty(length, dtype=torch.float32, device="cpu")
        _sum_rows(acc, got, codec, op)
        server = state.server if state else None
        codec.encode(mine[: codec.nbytes(length)], acc, None if server is None else server[:length])
    rows = got  # as large as what comes back
    _gather(rows.view(-1), mine, group=group)
    for r, begin, length in spans:
        if length:
            codec.decode(x[begin : begin + length], rows[r, : codec.nbytes(length)])
    return _count("all_reduce", 2 * (world - 1) * mine.numel(), 2 * (world - 1) * min(size, n) * x.element_size())
