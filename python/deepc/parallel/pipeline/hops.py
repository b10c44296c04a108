"""Messages between the stages of a pipeline: activations down, their gradients up, in any shapes.

An activation is a tensor or a tuple of tensors and Nones. A header of fixed size goes before it, so that shapes may
change from one micro-batch to the next; a gradient needs none, for it has the shape of what was sent. Sends return at
once. The default group of torch.distributed carries them: within a node the receiver reads the sender's memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...core.telemetry import waits
from ...errors import ArgumentError, DeepcError, UnsupportedError

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_MOST_TENSORS, _MOST_DIMS = 16, 8
_ROW = 3 + _MOST_DIMS  # dtype (-1: None), requires_grad, dimensions, their sizes
_LONE = -1  # a tensor that is in no tuple


class Hops:
    """ranks: the pipeline's, first stage first, in the default group. Tags tell messages between the same two ranks
    apart; those of one tag come in the order in which they were sent. lost: the error of a message with a rank of the
    default group that another backend than ours carried, of what it was and what the backend said. far: the ranks of
    the pipeline that are on other nodes; sent_bytes: what went to them."""

    def __init__(
        self,
        ranks: Sequence[int],
        lost: Callable[[int, str, RuntimeError], BaseException] | None = None,
        far: Collection[int] = (),
    ) -> None:
        self._ranks, self._lost, self._far = ranks, lost, far
        self._under_way: list[tuple[Any, int]] = []  # and to whom
        self.sent_bytes = 0

    def send(self, value: Any, to: int, tag: int) -> None:
        """An activation, to a rank of the pipeline. ArgumentError if it is none."""
        tensors = value if isinstance(value, tuple) else (value,)
        self._start(_header(value, tensors), to, 2 * tag)
        for t in tensors:
            if t is not None:
                self._start(t.detach(), to, 2 * tag + 1)

    def receive(self, source: int, tag: int) -> Any:
        """What `send` sent; a tensor that depended on parameters requires a gradient here."""
        header = self._take(
            torch.empty(1 + _MOST_TENSORS * _ROW, dtype=torch.int64, device="cpu"), source, 2 * tag
        ).tolist()
        out: list[torch.Tensor | None] = []
        for i in range(abs(header[0])):
            dtype, grad, dims, *shape = header[1 + i * _ROW : 1 + (i + 1) * _ROW]
            if dtype < 0:
                out.append(None)
                continue
            tensor = self._take(torch.empty(shape[:dims], dtype=_DTYPES[dtype], device="cpu"), source, 2 * tag + 1)
            out.append(tensor.requires_grad_(bool(grad)))
        return out[0] if header[0] == _LONE else tuple(out)

    def send_tensors(self, tensors: Sequence[torch.Tensor], to: int, tag: int) -> None:
        """Tensors whose shapes the receiver knows."""
        for t in tensors:
            self._start(t, to, 2 * tag + 1)

    def receive_like(self, tensors: Sequence[torch.Tensor], source: int, tag: int) -> list[torch.Tensor]:
        """What `send_tensors` sent, of these shapes and dtypes."""
        return [self._take(torch.empty(t.shape, dtype=t.dtype, device="cpu"), source, 2 * tag + 1) for t in tensors]

    def finish(self) -> None:
        """Returns when all that was sent has left."""
        under_way, self._under_way = self._under_way, []
        began = time.perf_counter()
        for work, to in under_way:
            with self._named(to, "to"):
                work.wait()
        waits.add("communication", time.perf_counter() - began)

    @contextlib.contextmanager
    def _named(self, peer: int, way: str) -> Iterator[None]:
        """Around a message: an error tells whose it was."""
        try:
            yield
        except RuntimeError as exc:
            said = exc.__cause__ if isinstance(exc, DeepcError) else exc  # by another backend than ours, or None
            if self._lost is None or not isinstance(said, RuntimeError):
                raise
            raise self._lost(self._ranks[peer], f"a message {way} stage {peer} of a pipeline", said) from said

    def _start(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        if tensor.numel():
            if to in self._far:
                self.sent_bytes += tensor.numel() * tensor.element_size()
            self._under_way = [(w, rank) for w, rank in self._under_way if not w.is_completed()]
            with self._named(to, "to"):
                self._under_way.append((dist.isend(tensor.contiguous(), self._ranks[to], tag=tag), to))

    def _take(self, tensor: torch.Tensor, source: int, tag: int) -> torch.Tensor:
        if tensor.numel():
            began = time.perf_counter()
            with self._named(source, "from"):
                dist.recv(tensor, self._ranks[source], tag=tag)
            waits.add("communication", time.perf_counter() - began)
        return tensor


def in_words(value: Any) -> str:
    """What goes between stages, for messages: "(float32 [2, 8], None)"."""
    if isinstance(value, tuple):
        return f"({', '.join(map(in_words, value))})"
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return str(value)


def _header(value: Any, tensors: Sequence[Any]) -> torch.Tensor:
    if len(tensors) > _MOST_TENSORS or not tensors:
        raise ArgumentError(
            f"a stage returned {len(tensors)} values for the next one; a message takes 1 to {_MOST_TENSORS}"
        )
    header = [_LONE if not isinstance(value, tuple) else len(tensors)]
    for t in tensors:
        if t is None:
            header += [-1] + [0] * (_ROW - 1)
            continue
        if not isinstance(t, torch.Tensor):
            raise ArgumentError(
                f"a stage returned {type(t).__name__} for the next one; between stages go a tensor, or a tuple of"
                " tensors and None"
            )
        if t.dim() > _MOST_DIMS or t.dtype not in _DTYPES or t.layout != torch.strided:
            raise UnsupportedError(
                f"a stage returned a {t.layout} tensor of {t.dtype} with {t.dim()} dimensions for the next one; between"
                f" stages go dense tensors of at most {_MOST_DIMS} dimensions, of"
                f" {', '.join(str(d).removeprefix('torch.') for d in _DTYPES)}"
            )
        header += [_DTYPES.index(t.dtype), t.requires_grad, t.dim(), *t.shape, *([0] * (_MOST_DIMS - t.dim()))]
    header += [0] * (1 + _MOST_TENSORS * _ROW - len(header))
    return torch.tensor(header, dtype=torch.int64, device="cpu")
