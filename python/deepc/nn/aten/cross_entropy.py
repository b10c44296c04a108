"""torch.nn.functional.cross_entropy on a CPU by chunks of rows.

torch keeps the log-probabilities for backward, makes their gradient there, zero but for one number a row, and from both
the logits': three arrays of the logits' size, the largest of a language model's step. `install()` overrides aten's
cross_entropy_loss for large CPU logits: what is kept are the logits, and backward makes each chunk's log-probabilities
again, in the cache. The gradient takes the logits' place where nothing else refers to them any more, as far as can be
counted. So there are two arrays where a model's output is kept, else one. It costs one more exponential a number: 180
ms where torch takes 134 (512 x 50,257 on one AVX2 thread). Every chunk goes through torch's own kernels, and rows don't
depend on each other: loss and gradient have torch's bits. Process-wide; installed once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ...core import env
from ...core.foreign import patches, private
from ...errors import ArgumentError
from . import without_notice

CHUNK_BYTES = 1 << 20  # of logits, for each thread: two such buffers fit in a core's cache
LEAST_BYTES = 16 << 20  # of logits, below which torch's own is used: what would be saved is small
IGNORED = -100  # what the labels of one class say of rows that don't count
_NONE = 0  # of torch's numbers for reductions, the one whose gradient has a number for each row
_aten = torch.ops.aten

_library: torch.library.Library | None = None
_sole: dict[tuple[type, bool], tuple[int, ...]] = {}  # what references logits have that only their loss refers to
_learning = False
calls = 0  # losses that were made so; for tests


def install() -> None:
    """From now on, with DEEPC_CHUNKED_LOSS=1."""
    global _library
    if _library is not None or not env.switch("DEEPC_CHUNKED_LOSS"):
        return
    patches.applied("cross-entropy")
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
        if weight is None and label_smoothing == 0 and _takes(logits, labels, ignore_index):
            global calls
            calls += 1
            _learn(type(logits))
            return _by_rows(logits, labels, reduction, ignore_index)
        return original.call_boxed(keys, logits, labels, weight, reduction, ignore_index, label_smoothing)

    _library = torch.library.Library("aten", "IMPL")
    with without_notice():
        _library.impl("cross_entropy_loss", kernel, "AutogradCPU", with_keyset=True)


def _takes(logits: Tensor, labels: Tensor, ignore_index: int) -> bool:
    """Rows of classes, large, each with a label that is a class: everything else is torch's, errors too. Not while the
    compiler traces, which fuses better, nor in torch.func's and forward-mode derivatives."""
    if torch.compiler.is_compiling() or _is_foreign(logits) or _is_foreign(labels):
        return False
    if logits.dim() != 2 or labels.shape != logits.shape[:1] or labels.dtype != torch.int64:
        return False
    if logits.numel() * logits.itemsize < LEAST_BYTES or forward_ad.unpack_dual(logits).tangent is not None:
        return False
    if type(logits) is not Tensor or type(labels) is not Tensor:  # a dry run's, without values
        return True
    outside = (labels < 0) | (labels >= logits.shape[1])
    return not bool((outside & (labels != ignore_index)).any())


def _is_foreign(t: Tensor) -> bool:
    known = type(t) is Tensor or isinstance(t, private.FakeTensor)
    return not known or not private.has_value(t) or t.device.type != "cpu"


def _rows(logits: Tensor) -> int:
    """Of a chunk: for each thread as much."""
    return max(1, torch.get_num_threads() * CHUNK_BYTES // (logits.shape[1] * logits.itemsize))


def _chunks(logits: Tensor) -> list[slice]:
    rows = _rows(logits)
    return [slice(i, min(i + rows, len(logits))) for i in range(0, len(logits), rows)]


def _chunk_like(logits: Tensor) -> Tensor:
    return logits.new_empty(min(_rows(logits), len(logits)), logits.shape[1])


class CrossEntropyByRows(torch.autograd.Function):
    """Of logits [n, classes] and labels [n], as aten's cross_entropy_loss without weights and smoothing."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, reduction: int, ignore_index: int) -> Tensor:
        counted = labels != ignore_index
        at = torch.where(counted, labels, 0)[:, None]
        picked, buffer = logits.new_empty(len(logits), 1), _chunk_like(logits)
        for part in _chunks(logits):
            some = buffer[: part.stop - part.start]
            _aten._log_softmax.out(logits[part], 1, False, out=some)
            torch.gather(some, 1, at[part], out=picked[part])
        # The rows' own numbers are those of the only class, so that torch adds them up in its order.
        loss: Tensor
        loss, count = _aten.nll_loss_forward(picked, torch.where(counted, 0, IGNORED), None, reduction, IGNORED)
        ctx.save_for_backward(logits, labels, count)
        ctx.reduction, ctx.ignore_index = reduction, ignore_index
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, count = _saved(ctx)
        if torch.is_grad_enabled():  # create_graph: this is to be differentiated
            return _differentiable(ctx, logits, labels, grad), None, None, None
        some, of_some = _chunk_like(logits), _chunk_like(logits)
        result = logits.detach() if _may_overwrite(logits) else logits.new_empty(logits.shape)
        for part in _chunks(logits):
            n = part.stop - part.start
            own = grad[part] if ctx.reduction == _NONE else grad
            _aten._log_softmax.out(logits[part], 1, False, out=some[:n])
            _aten.nll_loss_backward.grad_input(
                own, some[:n], labels[part], None, ctx.reduction, ctx.ignore_index, count, grad_input=of_some[:n]
            )
            _aten._log_softmax_backward_data.out(of_some[:n], some[:n], 1, logits.dtype, out=result[part])
        return result, None, None, None


def _by_rows(logits: Tensor, labels: Tensor, reduction: int, ignore_index: int) -> Tensor:
    loss: Tensor = CrossEntropyByRows.apply(logits, labels, reduction, ignore_index)  # type: ignore[no-untyped-call]
    return loss


def _may_overwrite(logits: Tensor) -> bool:
    """In a backward: whether nothing will read the logits after it."""
    base = logits._base  # a view keeps what it is one of
    key = type(logits), base is not None
    found = (*private.references(logits), *(() if base is None else private.references(base)))
    if _learning:
        _sole[key] = found
    whole = logits.is_contiguous() and logits.untyped_storage().nbytes() == logits.nbytes
    return whole and 0 not in found and found == _sole.get(key) and not private.backward_keeps_graph()


def _learn(kind: type) -> None:
    """What _may_overwrite finds of logits that are nobody's: counts differ between versions of Python and torch. Hooks
    of what backward keeps would hold them."""
    global _learning
    if (kind, True) in _sole or private.top_saved_hooks(False) is not None:
        return
    _learning = True
    try:
        with torch.enable_grad():
            for view in (False, True):
                logits = torch.zeros(1, 2, device="cpu", dtype=torch.float32, requires_grad=True) * 1.0
                labels = torch.zeros(1, device="cpu", dtype=torch.int64)
                loss = _by_rows(logits.view(1, 2) if view else logits, labels, 1, IGNORED)
                del logits
                loss.backward()
    finally:
        _learning = False


def _saved(ctx: Any) -> tuple[Tensor, Tensor, Tensor]:
    try:
        logits, labels, count = ctx.saved_tensors
    except RuntimeError as exc:
        if "modified by an inplace operation" not in str(exc):
            raise
        raise ArgumentError(
            "the logits or labels of a cross_entropy were changed in place after it, and its backward needs them:"
            " change a copy of them, or leave DEEPC_CHUNKED_LOSS unset, for torch's own, which has an array more"
        ) from exc
    return logits, labels, count


def _differentiable(ctx: Any, logits: Tensor, labels: Tensor, grad: Tensor) -> Tensor:
    loss = _aten.nll_loss(torch.log_softmax(logits, 1), labels, None, ctx.reduction, ctx.ignore_index)
    return torch.autograd.grad(loss, logits, grad, create_graph=True)[0]
