"""Linear layer and cross-entropy in one, by chunks of tokens: the logits of all tokens never exist.

A chunk's logits are one GEMM into a buffer that every chunk uses again; torch.ops.deepc.cross_entropy_rows turns them
into losses and, in place, into their gradient; two more GEMMs take that to the gradients of the hidden states and of
the weight. So the gradients exist when forward ends, and backward only scales them (Liger Kernel, arXiv:2410.10989; Cut
Cross-Entropy, arXiv:2411.09009). Where that is not possible (reduction "none" gives every row its own factor) or not
wanted (`recompute`), backward makes the logits of each chunk a second time.

Rows whose label is ignored are left out before the first GEMM on the CPU: they cost nothing. The weight's gradient is
accumulated in fp32 whatever its dtype. In fp16 the gradients are kept unscaled until backward brings the loss scale: 1
/ tokens would be lost below 6e-8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: F401
from torch import Tensor

from ..core import ops
from ..core.foreign import private
from ..core.ops import fake
from ..errors import ArgumentError, UnsupportedError
from .aten import matmul

# Of the logits' buffer. On a CPU GEMMs of 300 to 700 rows at GPT-2's vocabulary run at full speed (measured); on a GPU
# a chunk's launches, and the pass over the weight's gradient, are shared by more of them.
CHUNK_BYTES, CUDA_CHUNK_BYTES = 64 << 20, 256 << 20
MIN_ROWS, MAX_ROWS, ROW_MULTIPLE = 64, 2048, 16
SLAB_ROWS = 8192  # rows of a 16-bit weight gradient that are made at a time before they are added in fp32
HALF_ROOM = 32752.0  # half of fp16's largest number
REDUCTIONS = ("none", "mean", "sum")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

dry = False  # in a dry run's process: losses of fake tensors, whose factors are taken for 1


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    *,
    chunk_rows: int | None = None,
    recompute: bool = False,
) -> Tensor:
    """cross_entropy(hidden @ weight.T + bias, labels) without the logits of all tokens.

    hidden: [..., d]; weight: [v, d] of the same dtype (fp32, bf16 or fp16; autocast casts both); bias: [v] or None;
    labels: integers of hidden's leading shape, in [0, v) or ignore_index. reduction: "mean" over the labels that are
    not ignored (NaN if all are), "sum", or "none". Returns fp32: a scalar, or labels' shape. chunk_rows: tokens per
    chunk (default: what makes a buffer of 64 MiB, on a GPU of 256). recompute: keep no gradients between forward and
    backward; one more GEMM, d x v numbers less.

    Differentiable in hidden, weight and bias, once (a backward with create_graph=True raises UnsupportedError). Raises
    ArgumentError for shapes, dtypes and values that don't fit; a label out of range raises RuntimeError on the CPU and
    gives NaN on CUDA."""
    ops.refuse_tangents("linear_cross_entropy", hidden, weight, bias)
    hidden, weight, bias = as_autocast(hidden, weight, bias)
    _check(hidden, weight, labels, bias, label_smoothing, reduction, chunk_rows)
    rows = hidden.reshape(-1, hidden.shape[-1])
    wants = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias)]
    loss: Tensor = torch.ops.deepc.linear_cross_entropy(
        rows,
        weight,
        labels.reshape(-1).long(),
        bias,
        ignore_index,
        float(label_smoothing),
        REDUCTIONS.index(reduction),
        chunk_rows or 0,
        recompute,
        *wants,
    )[0]
    return loss.view(labels.shape) if reduction == "none" else loss


def as_autocast(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """As torch.autocast has them of F.linear, where it is on."""
    hidden, weight, *more = ops.as_autocast(hidden, weight, *(() if bias is None else (bias,)))
    return hidden, weight, more[0] if more else None


def _check(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    label_smoothing: float,
    reduction: str,
    chunk_rows: int | None,
) -> None:
    if hidden.dtype not in _DTYPES or weight.dtype != hidden.dtype or (bias is not None and bias.dtype != hidden.dtype):
        raise ArgumentError(
            f"linear_cross_entropy takes hidden, weight and bias of one dtype, fp32, bf16 or fp16; got {hidden.dtype},"
            f" {weight.dtype}" + (f", {bias.dtype}" if bias is not None else "") + "; cast them, or use torch.autocast"
        )
    if weight.dim() != 2 or not len(weight) or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ArgumentError(
            f"hidden {list(hidden.shape)} does not fit weight {list(weight.shape)}: it takes [..., d] and [v, d], v at"
            " least 1"
        )
    if labels.shape != hidden.shape[:-1]:
        raise ArgumentError(
            f"labels {list(labels.shape)} do not fit hidden {list(hidden.shape)}: one label per row is needed"
        )
    if labels.dtype.is_floating_point or labels.dtype.is_complex or labels.dtype == torch.bool:
        raise ArgumentError(f"labels are {labels.dtype}; linear_cross_entropy takes class indices, not probabilities")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ArgumentError(
            f"bias {list(bias.shape)} does not fit weight {list(weight.shape)}: it takes [{weight.shape[0]}]"
        )
    if reduction not in REDUCTIONS:
        raise ArgumentError(f"reduction={reduction!r}; it must be one of {', '.join(REDUCTIONS)}")
    if not isinstance(label_smoothing, (int, float)) or not 0.0 <= label_smoothing <= 1.0:
        raise ArgumentError(f"label_smoothing={label_smoothing!r}; it must be from 0 to 1")
    if chunk_rows is not None and (not isinstance(chunk_rows, int) or chunk_rows < 1):
        raise ArgumentError(f"chunk_rows={chunk_rows!r}; it must be at least 1, or None for the default")


# ---- chunks ----------------------------------------------------------------------------------------------------------
def rows_per_chunk(tokens: int, classes: int, size: int, wanted: int = 0, nbytes: int = CHUNK_BYTES) -> int:
    """Tokens of one chunk: `wanted`, or what fits `nbytes` with logits of `size` bytes, evened out over the chunks."""
    if wanted:
        return max(1, min(wanted, tokens))
    most = min(MAX_ROWS, max(MIN_ROWS, nbytes // (classes * size)))
    chunks = max(1, -(-tokens // most))
    even = -(-tokens // chunks)
    return max(1, min(tokens, -(-even // ROW_MULTIPLE) * ROW_MULTIPLE))


def _row_stride(classes: int, dtype: torch.dtype) -> int:
    """16-bit GEMMs want rows that start on a cache line (logits of GPT-2 in bf16: 33 ms instead of 45 per 512 rows);
    fp32 ones don't."""
    return classes if dtype == torch.float32 else -(-classes // 32) * 32


class WeightGradient:
    """Sum over chunks of gradient^T @ hidden, [v, d]."""

    def __init__(self, weight: Tensor, dtype: torch.dtype, sums: torch.dtype = torch.float32) -> None:
        """dtype: of the operands. sums: fp32, or that of the operands, for a single chunk."""
        self._sum = torch.empty(weight.shape, dtype=sums, device=weight.device)
        self._first = True
        self._direct = self._sum.dtype == dtype
        self._slab = (
            None if self._direct else weight.new_empty((min(SLAB_ROWS, weight.shape[0]), weight.shape[1]), dtype=dtype)
        )
        self._shrunk: Tensor | None = None  # [d]: what the columns of the hidden states are multiplied by

    def shrink(self, hidden: Tensor, rows: int) -> None:
        """Before the first chunk: all hidden states [n, d], which come by at most `rows` at a time. A chunk's product
        of fp16 is in fp16 before it is added in fp32, and gradients of the unscaled loss are up to 1. Columns of which
        `rows` could add up to more than fp16 has are multiplied by a power of two, which `result` takes back. Their
        largest stays above 8 for up to 2048 rows: what gets too small is far below what their sum is rounded to."""
        if self._direct or hidden.dtype != torch.float16 or not hidden.numel():
            return
        largest = torch.maximum(hidden.amax(0), -hidden.amin(0)).float()
        room = HALF_ROOM / rows / largest.clamp(min=1.0)
        shrunk = (room / torch.frexp(room)[0] / 2).clamp(max=1.0)  # the mantissa is from 1 / 2 to 1
        if hidden.is_cuda or bool((shrunk != 1.0).any()):  # a GPU is not waited for
            self._shrunk = shrunk

    def add(self, gradient: Tensor, hidden: Tensor) -> None:
        if self._shrunk is not None:
            hidden = hidden * self._shrunk.to(hidden.dtype)
        if self._direct:
            torch.addmm(self._sum, gradient.t(), hidden, beta=0 if self._first else 1, out=self._sum)
        else:
            for begin in range(0, self._sum.shape[0], SLAB_ROWS):
                self._add_slab(begin, gradient[:, begin : begin + SLAB_ROWS].t(), hidden)
        self._first = False

    def _add_slab(self, begin: int, gradient: Tensor, hidden: Tensor) -> None:
        slab = cast(Tensor, self._slab)[: gradient.shape[0]]
        torch.mm(gradient, hidden, out=slab)
        into = self._sum[begin : begin + gradient.shape[0]]
        if self._first:
            torch.ops.deepc.cast_tensor(slab, into, 1.0)
        else:
            torch.ops.deepc.add_scaled(into, slab, 1.0)

    def result(self, dtype: torch.dtype) -> Tensor:
        self._slab = None
        if self._first:
            self._sum.zero_()
        elif self._shrunk is not None:
            self._sum.div_(self._shrunk)
        return self._sum.to(dtype)


def _run(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None,
    scale: float,
    ignore_index: int,
    label_smoothing: float,
    chunk_rows: int,
    losses: Tensor | None,
    wants: Sequence[bool],
    weight_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """All chunks. losses: fp32 [n] to fill, or None. scale, row_scale (fp32 [n] or None): factors of the gradients.
    wants: of (hidden, weight, bias). Returns the three gradients, empty where not wanted; the weight's and the bias's
    are of weight_dtype."""
    n, classes = hidden.shape[0], weight.shape[0]
    # This machine has no arithmetic in that dtype.
    wide = hidden.device.type == "cpu" and matmul.emulated(hidden.dtype)
    dtype = torch.float32 if wide else hidden.dtype
    matrix = weight.to(dtype)
    extra = None if bias is None else bias.to(dtype)
    nbytes = CUDA_CHUNK_BYTES if hidden.is_cuda else CHUNK_BYTES
    rows = rows_per_chunk(n, classes, dtype.itemsize, chunk_rows, nbytes)
    logits = torch.empty(min(rows, n), _row_stride(classes, dtype), dtype=dtype, device=hidden.device)
    logits[
        :, classes:
    ].zero_()  # oneDNN's bf16 product reads to the end of its tile: a NaN that lies there would come through
    none = torch.empty(0, device=hidden.device, dtype=torch.float32)
    grad_hidden = torch.empty_like(hidden) if wants[0] else hidden.new_empty(0)
    # a single chunk needs no accumulator, unless what is wanted of it is wider
    sums = dtype if n <= rows and dtype == weight_dtype else torch.float32
    grad_weight = WeightGradient(weight, dtype, sums) if wants[1] else None
    if grad_weight is not None:
        grad_weight.shrink(hidden, rows)
    grad_bias = torch.zeros(classes, dtype=torch.float32, device=hidden.device) if wants[2] else None
    for begin in range(0, n, rows):
        part = slice(begin, min(n, begin + rows))
        h = hidden[part].to(dtype)
        buffer = logits[: h.shape[0]]
        out = buffer[:, :classes]
        if extra is None:
            torch.mm(h, matrix.t(), out=out)
        else:
            torch.addmm(extra, h, matrix.t(), out=out)
        torch.ops.deepc.cross_entropy_rows(
            buffer,
            labels[part],
            none if row_scale is None else row_scale[part],
            none if losses is None else losses[part],
            classes,
            scale,
            label_smoothing,
            ignore_index,
            any(wants),
        )
        if wants[0]:
            if wide:
                grad_hidden[part] = out @ matrix
            else:
                torch.mm(out, matrix, out=grad_hidden[part])
        if grad_weight is not None:
            grad_weight.add(out, h)
        if grad_bias is not None:
            grad_bias += torch.mm(out.new_ones(1, h.shape[0]), out)[0]
    return (
        grad_hidden,
        grad_weight.result(weight_dtype) if grad_weight is not None else weight.new_empty(0, dtype=weight_dtype),
        grad_bias.to(weight_dtype) if grad_bias is not None else weight.new_empty(0, dtype=weight_dtype),
    )


def _compact(hidden: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """(hidden, labels, index) of the rows that count; index is None where all do. On the CPU only: elsewhere it would
    wait for the device."""
    if hidden.device.type != "cpu":
        return hidden, labels, None
    kept = labels != ignore_index
    if bool(kept.all()):
        return hidden, labels, None
    index = kept.nonzero()[:, 0]
    return hidden[index], labels[index], index


def refuse_graph(name: str, instead: str) -> None:
    """In a backward: UnsupportedError if it runs to be differentiated itself. Its results hold no graph to the hidden
    states and weights they were made of: they would count as constants, whatever the incoming gradient is."""
    if torch.is_grad_enabled():
        raise UnsupportedError(
            f"{name} has no second derivative, and its backward runs with create_graph=True; use {instead} there, or"
            " leave create_graph away"
        )


def _spread(rows: Tensor, index: Tensor | None, like: Tensor) -> Tensor:
    """The inverse of _compact, zeros elsewhere."""
    return rows if index is None else torch.zeros_like(like).index_copy_(0, index, rows)


# ---- operators -------------------------------------------------------------------------------------------------------
_SCHEMA = (
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor labels, Tensor? bias, int ignore_index, float"
    " label_smoothing, int reduction, int chunk_rows, bool recompute, bool hidden_grad, bool weight_grad, bool"
    " bias_grad) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_BACKWARD_SCHEMA = (
    "linear_cross_entropy_backward(Tensor hidden, Tensor weight, Tensor labels, Tensor? bias, Tensor row_scale, int"
    " ignore_index, float label_smoothing, int chunk_rows, bool hidden_grad, bool weight_grad, bool bias_grad) ->"
    " (Tensor, Tensor, Tensor)"
)


def _kept_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the weight's gradient between forward and backward: in fp16 it is unscaled, and sums of thousands of tokens
    could overflow."""
    return torch.float32 if dtype == torch.float16 else dtype


def _forward(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    reduction: int,
    chunk_rows: int,
    recompute: bool,
    *wants: bool,
) -> tuple[Tensor, ...]:
    """(loss, gradients of hidden, weight and bias or empty, the factor that backward applies to them). Rows [n, d] and
    [n]."""
    hidden, weight, labels = hidden.contiguous(), weight.contiguous(), labels.contiguous()
    h, y, index = _compact(hidden, labels, ignore_index)
    losses = torch.empty(y.shape, dtype=torch.float32, device=h.device)
    mean = REDUCTIONS[reduction] == "mean"
    if h.device.type == "cpu":
        scale = 1.0 / max(1, y.numel()) if mean else 1.0
    else:
        scale = 1.0  # the number of labels is on the device
    late = mean and (h.device.type != "cpu" or h.dtype == torch.float16)
    now = (False, False, False) if recompute or REDUCTIONS[reduction] == "none" else wants
    grads = _run(
        h,
        weight,
        y,
        bias,
        None,
        1.0 if late else scale,
        ignore_index,
        label_smoothing,
        chunk_rows,
        losses,
        now,
        _kept_dtype(h.dtype),
    )
    count = (y != ignore_index).sum() if mean else None
    factor = (
        (1.0 / count.clamp(min=1)).float()
        if late and count is not None
        else torch.ones((), device=h.device, dtype=torch.float32)
    )
    if REDUCTIONS[reduction] == "none":
        loss = _spread(losses, index, torch.empty(labels.shape, dtype=torch.float32, device=h.device))
    else:
        loss = losses.sum(dtype=torch.float64)
        loss = (loss if count is None else loss / count).float()
    grad_hidden = _spread(grads[0], index, hidden) if now[0] else grads[0]
    return loss, grad_hidden, grads[1], grads[2], factor


def _again(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    row_scale: Tensor,
    ignore_index: int,
    label_smoothing: float,
    chunk_rows: int,
    *wants: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients from scratch. row_scale: fp32 [n], the gradient of every row's loss."""
    hidden, weight, labels = hidden.contiguous(), weight.contiguous(), labels.contiguous()
    h, y, index = _compact(hidden, labels, ignore_index)
    scales = row_scale if index is None else row_scale[index]
    grads = _run(
        h, weight, y, bias, scales.contiguous(), 1.0, ignore_index, label_smoothing, chunk_rows, None, wants, h.dtype
    )
    return (_spread(grads[0], index, hidden) if wants[0] else grads[0]), grads[1], grads[2]


_library = torch.library.Library("deepc", "FRAGMENT")
_library.define(_SCHEMA)
_library.define(_BACKWARD_SCHEMA)
for _key in ("CPU", "CUDA"):
    _library.impl("linear_cross_entropy", _forward, _key)
    _library.impl("linear_cross_entropy_backward", _again, _key)
MADE_OF: dict[Any, Callable[..., Any]] = {
    torch.ops.deepc.linear_cross_entropy.default: _forward,
    torch.ops.deepc.linear_cross_entropy_backward.default: _again,
}
"""For a dry run, whose tensors have no values: what the operators do, by smaller ones."""


@fake("linear_cross_entropy")
def _(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    reduction: int,
    chunk_rows: int,
    recompute: bool,
    *wants: bool,
) -> tuple[Tensor, ...]:
    none = REDUCTIONS[reduction] == "none"
    now = [w and not (recompute or none) for w in wants]
    kept = _kept_dtype(hidden.dtype)
    return (
        hidden.new_empty(labels.shape if none else (), dtype=torch.float32),
        hidden.new_empty(hidden.shape if now[0] else (0,)),
        weight.new_empty(weight.shape if now[1] else (0,), dtype=kept),
        weight.new_empty(weight.shape[:1] if now[2] else (0,), dtype=kept),
        hidden.new_empty((), dtype=torch.float32),
    )


@fake("linear_cross_entropy_backward")
def _(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    row_scale: Tensor,
    ignore_index: int,
    label_smoothing: float,
    chunk_rows: int,
    *wants: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        hidden.new_empty(hidden.shape if wants[0] else (0,)),
        weight.new_empty(weight.shape if wants[1] else (0,)),
        weight.new_empty(weight.shape[:1] if wants[2] else (0,)),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    (
        hidden,
        weight,
        labels,
        bias,
        ctx.ignore_index,
        ctx.label_smoothing,
        reduction,
        ctx.chunk_rows,
        recompute,
        *ctx.wants,
    ) = inputs
    ctx.reduction = REDUCTIONS[reduction]
    ctx.again = recompute or ctx.reduction == "none"
    ctx.dtype, ctx.count = hidden.dtype, len(inputs)
    ctx.set_materialize_grads(False)
    if ctx.again:
        ctx.save_for_backward(hidden, weight, labels, bias)
    else:
        ctx.save_for_backward(*output[1:])


def _backward(ctx: Any, grad: Tensor | None, *_unused: Any) -> tuple[Tensor | None, ...]:
    refuse_graph("linear_cross_entropy", "torch.nn.functional.linear and cross_entropy")
    if grad is None:
        nothing: tuple[None, ...] = (None,) * ctx.count
        return nothing
    grads = _from_scratch(ctx, grad) if ctx.again else _scaled(ctx, grad)
    picked = [g if want else None for g, want in zip(grads, ctx.wants)]
    return (picked[0], picked[1], None, picked[2], *(None,) * (ctx.count - 4))


def _from_scratch(ctx: Any, grad: Tensor) -> Sequence[Tensor]:
    hidden, weight, labels, bias = ctx.saved_tensors
    row_scale = grad.float()
    if ctx.reduction == "mean":
        row_scale = row_scale / (labels != ctx.ignore_index).sum().clamp(min=1)
    grads: Sequence[Tensor] = torch.ops.deepc.linear_cross_entropy_backward(
        hidden,
        weight,
        labels,
        bias,
        row_scale.expand(labels.shape),
        ctx.ignore_index,
        ctx.label_smoothing,
        ctx.chunk_rows,
        *ctx.wants,
    )
    return grads


def _scaled(ctx: Any, grad: Tensor) -> list[Tensor]:
    *grads, factor = ctx.saved_tensors
    scale = grad.float() * factor
    if dry and isinstance(scale, private.FakeTensor):
        value = 1.0
    elif torch.compiler.is_compiling() or not _plain(scale):
        return [(g * scale).to(ctx.dtype) for g in grads]
    else:
        value = scale.item()
    if private.backward_keeps_graph():  # they are needed again: what a .grad becomes is not their memory
        return [(g * value).to(ctx.dtype) for g in grads]
    if value == 1.0:
        return [g.to(ctx.dtype) for g in grads]
    return [g.mul_(value).to(ctx.dtype) for g in grads]


def _plain(t: Tensor) -> bool:
    """A CPU tensor with a value: not fake (tracing), not a transform's wrapper, and no device to wait for."""
    return type(t) is Tensor and t.device.type == "cpu" and private.has_value(t)


torch.library.register_autograd("deepc::linear_cross_entropy", _backward, setup_context=_setup)
