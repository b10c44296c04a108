"""torch.nn.functional.cross_entropy on a CPU by chunks of rows.

torch keeps the log-probabilities for backward, makes their gradient there, zero but for one number a row, and from both
the logits': three arrays of the logits' size, the largest of a language model's step. `install()` overrides aten's
cross_entropy_loss for large CPU logits: what is kept are the logits, and backward makes each chunk's log-probabilities
again, in the cache. The gradient takes the logits' place where nothing else refers to them any more, as far as can be
counted. So there are two arrays where a model's output is kept, else one. Every chunk goes through torch's own kernels,
and rows don't depend on each other: loss and gradient have torch's bits. Process-wide; installed once.

torch's log-probability is (logit - the row's largest) - log(sum of exponentials), in this order, so the row's largest
log-probability is the negative of that logarithm, exactly. With these two numbers a row backward needs no exponential
more than torch's; for dtypes in which that does not hold (16 bits are rounded at the end) it makes them all again.

`widened` is the loss of 16-bit logits as if they had been cast to fp32 before: it casts chunk by chunk, the gradient
back as well, and has the bits of that without the fp32 array (upcast.py puts it where transformers casts).
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ...core import env
from ...core.foreign import patches, private
from ...errors import ArgumentError
from . import without_notice

CHUNK_BYTES = 2 << 20  # of logits, for each thread: two such buffers stay in a cache
LEAST_BYTES = 16 << 20  # of logits, below which torch's own is used: what would be saved is small
IGNORED = -100  # what the labels of one class say of rows that don't count
_aten = torch.ops.aten

_library: torch.library.Library | None = None
_two_numbers: set[torch.dtype] = set()  # of which backward can do with two numbers a row
_sole: dict[tuple[type, bool], tuple[int, ...]] = {}  # what references logits have that only their loss refers to
_learning = False
_logits: contextvars.ContextVar[Tensor | None] = contextvars.ContextVar("deepc_logits", default=None)
calls = 0  # losses that were made so; for tests


def install() -> None:
    """From now on, but for DEEPC_CHUNKED_LOSS=0."""
    global _library
    if _library is not None or not env.switch("DEEPC_CHUNKED_LOSS"):
        return
    patches.applied("cross-entropy")
    _two_numbers.update(dtype for dtype in (torch.float32, torch.float64) if _subtracts(dtype))
    original = torch.library.get_kernel("aten::cross_entropy_loss", "AutogradCPU")

    def kernel(
        keys: Any,
        logits: Tensor,
        labels: Tensor,
        weight: Tensor | None = None,
        reduction: int = 1,
        ignore_index: int = IGNORED,
        label_smoothing: float = 0.0,
    ) -> Any:
        if weight is None and label_smoothing == 0 and _takes(logits, labels, ignore_index, logits.dtype):
            return _by_rows(logits, labels, reduction, ignore_index, logits.dtype)
        return original.call_boxed(keys, logits, labels, weight, reduction, ignore_index, label_smoothing)

    _library = torch.library.Library("aten", "IMPL")
    with without_notice():
        _library.impl("cross_entropy_loss", kernel, "AutogradCPU", with_keyset=True)


def is_installed() -> bool:
    return _library is not None


def widened(logits: Tensor, labels: Tensor, reduction: str, ignore_index: int) -> Tensor | None:
    """torch.nn.functional.cross_entropy(logits.float(), labels, ...) of 16-bit logits [n, classes], with its bits for
    loss and gradient, without an array of theirs in fp32. None where these are not what it is for."""
    code = {"none": 0, "mean": 1, "sum": 2}.get(reduction)
    if code is None or not _takes(logits, labels, ignore_index, torch.float32):
        return None
    return _by_rows(logits, labels, code, ignore_index, torch.float32)


def is_large(logits: Tensor, computes: torch.dtype) -> bool:
    """Whether there is enough to save, in bytes of the dtype that the loss is computed in."""
    return logits.numel() * computes.itemsize >= LEAST_BYTES


def _takes(logits: Tensor, labels: Tensor, ignore_index: int, computes: torch.dtype) -> bool:
    """Rows of classes, large, each with a label that is a class: everything else is torch's, errors too. Not while the
    compiler traces, which fuses better, nor in torch.func's and forward-mode derivatives."""
    if torch.compiler.is_compiling() or is_foreign(logits) or is_foreign(labels):
        return False
    if logits.dim() != 2 or labels.shape != logits.shape[:1] or labels.dtype != torch.int64:
        return False
    if not is_large(logits, computes) or forward_ad.unpack_dual(logits).tangent is not None:
        return False
    if type(logits) is not Tensor or type(labels) is not Tensor:  # a dry run's, without values
        return True
    outside = (labels < 0) | (labels >= logits.shape[1])
    return not bool((outside & (labels != ignore_index)).any())


def is_foreign(t: Tensor) -> bool:
    """Neither a CPU tensor nor a dry run's without values: a subclass, or one of torch.func's or the compiler's."""
    known = type(t) is Tensor or isinstance(t, private.FakeTensor)
    return not known or not private.has_value(t) or t.device.type != "cpu"


def _rows(logits: Tensor, computes: torch.dtype) -> int:
    """Of a chunk: for each thread as much."""
    return max(1, torch.get_num_threads() * CHUNK_BYTES // (logits.shape[1] * computes.itemsize))


def _chunks(computes: torch.dtype, *of_rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of all, the logits first. Cut at once: a view costs as much as the small kernels."""
    return zip(*(t.split(_rows(of_rows[0], computes)) for t in of_rows), strict=True)


def _chunk_like(logits: Tensor, computes: torch.dtype) -> Tensor:
    return logits.new_empty(min(_rows(logits, computes), len(logits)), logits.shape[1], dtype=computes)


def _casts(logits: Tensor, computes: torch.dtype) -> Tensor | None:
    """What chunks of the logits are cast into; None where `computes` is their own dtype."""
    return None if computes == logits.dtype else _chunk_like(logits, computes)


def _cast_into(buffer: Tensor | None, part: Tensor) -> Tensor:
    """A chunk of logits in the dtype that is computed in; buffer: of _casts."""
    return part if buffer is None else buffer[: len(part)].copy_(part)


class CrossEntropyByRows(torch.autograd.Function):
    """Of logits [n, classes] and labels [n], as aten's cross_entropy_loss without weights and smoothing. computes: the
    dtype of the loss, of the logits or wider."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, reduction: int, ignore_index: int, computes: torch.dtype
    ) -> Tensor:
        counted = labels != ignore_index
        at = torch.where(counted, labels, 0)[:, None]
        picked, buffer = logits.new_empty(len(logits), 1, dtype=computes), _chunk_like(logits, computes)
        wide = _casts(logits, computes)
        largest, log_sum = picked.new_empty(picked.shape), picked.new_empty(picked.shape)
        for given, at_part, picked_part, largest_part, log_sum_part in _chunks(
            computes, logits, at, picked, largest, log_sum
        ):
            part, some = _cast_into(wide, given), buffer[: len(given)]
            _aten._log_softmax.out(part, 1, False, out=some)
            torch.gather(some, 1, at_part, out=picked_part)
            if computes in _two_numbers:
                torch.amax(part, 1, True, out=largest_part)
                torch.amax(some, 1, True, out=log_sum_part)
        # The rows' own numbers are those of the only class, so that torch adds them up in its order.
        loss: Tensor
        only = torch.where(counted, 0, IGNORED)
        loss, count = _aten.nll_loss_forward(picked, only, None, reduction, IGNORED)
        ctx.save_for_backward(logits, labels, count, picked, only, largest, log_sum.neg_())
        ctx.reduction, ctx.ignore_index, ctx.computes = reduction, ignore_index, computes
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, count, picked, only, largest, log_sum = _saved(ctx)
        if torch.is_grad_enabled():  # create_graph: this is to be differentiated
            return _differentiable(ctx, logits, labels, grad), None, None, None, None
        of_picked = _aten.nll_loss_backward(grad, picked, only, None, ctx.reduction, IGNORED, count)
        at = torch.where(only == 0, labels, 0)[:, None]
        computes = ctx.computes
        buffer, zeros = _chunk_like(logits, computes), _chunk_like(logits, computes).zero_()
        wide = _casts(logits, computes)
        result = logits.detach() if _may_overwrite(logits) else logits.new_empty(logits.shape)
        for given, at_part, of_picked_part, largest_part, log_sum_part, result_part in _chunks(
            computes, logits, at, of_picked, largest, log_sum, result
        ):
            part, some, of_some = _cast_into(wide, given), buffer[: len(given)], zeros[: len(given)]
            if computes in _two_numbers:
                torch.sub(part, largest_part, out=some).sub_(log_sum_part)
            else:
                _aten._log_softmax.out(part, 1, False, out=some)
            of_some.scatter_(1, at_part, of_picked_part)
            _aten._log_softmax_backward_data.out(of_some, some, 1, computes, out=result_part if wide is None else part)
            if wide is not None:
                result_part.copy_(part)
            of_some.scatter_(1, at_part, 0)
        return result, None, None, None, None


def _by_rows(logits: Tensor, labels: Tensor, reduction: int, ignore_index: int, computes: torch.dtype) -> Tensor:
    global calls
    calls += not _learning
    _learn(type(logits))
    token = _logits.set(logits)
    try:
        loss: Tensor = CrossEntropyByRows.apply(  # type: ignore[no-untyped-call]
            logits, labels, reduction, ignore_index, computes
        )
    finally:
        _logits.reset(token)
    return loss


def logits_inside() -> Tensor | None:
    """For who counts operators: the logits of the loss whose forward runs now."""
    return _logits.get()


def _may_overwrite(logits: Tensor) -> bool:
    """In a backward: whether nothing will read the logits after it."""
    base = logits._base  # a view keeps what it is one of
    key = type(logits), base is not None
    found = (*private.references(logits), *(() if base is None else private.references(base)))
    if _learning:
        _sole[key] = found
    whole = logits.is_contiguous() and logits.untyped_storage().nbytes() == logits.nbytes
    return whole and 0 not in found and found == _sole.get(key) and not private.backward_keeps_graph()


def _subtracts(dtype: torch.dtype) -> bool:
    """Whether torch's log-probabilities are what the module says; a width that leaves numbers beside its vectors."""
    logits = torch.linspace(-9, 12, 5 * 77, dtype=torch.float64, device="cpu").sin().mul(6).to(dtype).view(5, 77)
    made = _aten._log_softmax(logits, 1, False)
    return torch.equal((logits - logits.amax(1, True)) + made.amax(1, True), made)


def _learn(kind: type) -> None:
    """What _may_overwrite finds of logits that are nobody's: counts differ between versions of Python and torch. Hooks
    of what backward keeps would hold them."""
    global _learning
    if _learning or (kind, True) in _sole or private.top_saved_hooks(False) is not None:
        return
    _learning = True
    try:
        with torch.enable_grad():
            for view in (False, True):
                logits = torch.zeros(1, 2, device="cpu", dtype=torch.float32, requires_grad=True) * 1.0
                labels = torch.zeros(1, device="cpu", dtype=torch.int64)
                loss = _by_rows(logits.view(1, 2) if view else logits, labels, 1, IGNORED, torch.float32)
                del logits
                loss.backward()
    finally:
        _learning = False


def _saved(ctx: Any) -> tuple[Any, ...]:
    try:
        return tuple(ctx.saved_tensors)
    except RuntimeError as exc:
        if "modified by an inplace operation" not in str(exc):
            raise
        raise ArgumentError(
            "the logits or labels of a cross_entropy were changed in place after it, and its backward needs them:"
            " change a copy of them, or set DEEPC_CHUNKED_LOSS=0, for torch's own, which has two arrays more"
        ) from exc


def _differentiable(ctx: Any, logits: Tensor, labels: Tensor, grad: Tensor) -> Tensor:
    loss = _aten.nll_loss(
        torch.log_softmax(logits, 1, dtype=ctx.computes), labels, None, ctx.reduction, ctx.ignore_index
    )
    return torch.autograd.grad(loss, logits, grad, create_graph=True)[0]
