"""deepc.linear_cross_entropy: elementwise against F.linear and F.cross_entropy in float64, what it allocates, and how
it behaves under autograd."""

from __future__ import annotations

import deepc
import pytest
import torch
import torch.nn.functional as F
from deepc.errors import ArgumentError, UnsupportedError
from deepc.nn import loss as fused_loss
from deepc.nn.aten import matmul
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

BOUNDS = {
    torch.float32: (1e-6, 3e-6),
    torch.bfloat16: (2e-3, 1.2e-2),
    torch.float16: (3e-4, 2e-3),
}  # (loss, gradients against the largest)


def subject(dtype=torch.float32, n=50, d=32, v=1003, bias=True, ignore=True, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(n, d, generator=g).to(dtype), (torch.randn(v, d, generator=g) * 0.2).to(dtype)
    labels = torch.randint(v, (n,), generator=g)
    if ignore:
        labels[1::3] = -100
    return hidden, weight, labels, torch.randn(v, generator=g).to(dtype) if bias else None


def plain(hidden, weight, labels, bias=None, ignore_index=-100, label_smoothing=0.0, reduction="mean"):
    return F.cross_entropy(
        F.linear(hidden, weight, bias),
        labels,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )


def grads_of(f, tensors, labels, dtype, factor=3.0, **kw):
    hidden, weight, bias = (None if t is None else t.detach().to(dtype).requires_grad_() for t in tensors)
    loss = f(hidden, weight, labels, bias, **kw)
    loss.backward((torch.arange(1, loss.numel() + 1) * factor).view(loss.shape).to(loss.dtype))
    return loss.detach(), [t.grad for t in (hidden, weight, bias) if t is not None]


def compare(dtype, subject_options, **kw):
    hidden, weight, labels, bias = subject(dtype, **subject_options)
    options = {k: v for k, v in kw.items() if k in ("label_smoothing", "reduction", "ignore_index")}
    loss, grads = grads_of(deepc.linear_cross_entropy, (hidden, weight, bias), labels, dtype, **kw)
    want, want_grads = grads_of(plain, (hidden, weight, bias), labels, torch.float64, **options)
    assert loss.dtype == torch.float32 and loss.shape == want.shape
    assert (loss - want).abs().max() <= BOUNDS[dtype][0] * want.abs().max()
    for got, wanted in zip(grads, want_grads, strict=True):
        assert got.dtype == dtype
        assert (got - wanted).abs().max() <= BOUNDS[dtype][1] * wanted.abs().max()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("chunk_rows", [None, 1, 16, 1000])
def test_equals_torch(dtype, reduction, chunk_rows):
    compare(dtype, {}, reduction=reduction, chunk_rows=chunk_rows)
    compare(
        dtype,
        {"bias": False, "ignore": False, "seed": 1},
        reduction=reduction,
        chunk_rows=chunk_rows,
        label_smoothing=0.1,
    )


@pytest.mark.parametrize("dtype", list(BOUNDS))
def test_equals_torch_when_recomputed_and_with_slabs(dtype, monkeypatch):
    monkeypatch.setattr(
        fused_loss, "SLAB_ROWS", 100
    )  # the fp32 accumulation of 16-bit weight gradients goes over 11 slabs
    compare(dtype, {"seed": 2}, chunk_rows=16)
    compare(dtype, {"seed": 3}, chunk_rows=16, recompute=True, label_smoothing=0.3)
    compare(dtype, {"seed": 3}, chunk_rows=16, recompute=True, reduction="sum")


def test_leading_dimensions_other_ignore_index_and_int32_labels():
    hidden, weight, labels, bias = subject(n=24)
    labels[labels == -100] = 5
    a = deepc.linear_cross_entropy(
        hidden.view(2, 3, 4, 32), weight, labels.view(2, 3, 4).int(), bias, ignore_index=5, reduction="none"
    )
    assert a.shape == (2, 3, 4)
    torch.testing.assert_close(
        a.flatten(), plain(hidden, weight, labels, bias, ignore_index=5, reduction="none"), rtol=1e-6, atol=1e-6
    )


def test_products_of_a_machine_without_that_arithmetic(monkeypatch):
    monkeypatch.setattr(
        matmul, "_least", {torch.bfloat16: 0}
    )  # as install() finds there: fp32 GEMMs of widened operands
    for reduction in ("mean", "none"):
        compare(torch.bfloat16, {}, chunk_rows=16, reduction=reduction)


@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_nothing_to_predict(dtype, reduction):
    hidden, weight, labels, bias = subject(dtype)
    labels.fill_(-100)
    loss, grads = grads_of(deepc.linear_cross_entropy, (hidden, weight, bias), labels, dtype, reduction=reduction)
    assert loss.isnan().all() if reduction == "mean" else (loss == 0).all()  # as torch
    assert all((g == 0).all() for g in grads)
    loss, grads = grads_of(
        deepc.linear_cross_entropy, (hidden[:0], weight, bias), labels[:0], dtype, reduction=reduction
    )
    assert all((g == 0).all() for g in grads)


def test_fp16_survives_loss_scaling():
    """1 / tokens in fp16 would be below the smallest number for most of the vocabulary; with the loss scale it is not
    lost."""
    hidden, weight, labels, _ = subject(torch.float16, n=2000, d=8, v=5000, ignore=False)
    _, grads = grads_of(
        deepc.linear_cross_entropy, (hidden, weight, None), labels, torch.float16, factor=65536.0, chunk_rows=512
    )
    _, want = grads_of(plain, (hidden, weight, None), labels, torch.float64, factor=65536.0)
    for got, wanted in zip(grads, want, strict=True):
        assert (got - wanted).abs().max() <= 2e-3 * wanted.abs().max()
        small = wanted.abs() > 1e-3 * wanted.abs().max()
        assert ((got - wanted).abs() <= 0.05 * wanted.abs())[small].all()


@pytest.mark.parametrize(
    "n, reduction, factor", [(2048, "mean", 1.0), (2048, "mean", 2.0**-10), (4096, "sum", 2.0**-12)]
)
def test_fp16_weight_gradients_are_finite_where_one_class_has_all_rows(n, reduction, factor):
    """The unscaled sum of a chunk of 2048 rows is beyond fp16: it would be infinite whatever the loss scale. Columns of
    small hidden states lose nothing beside those of large ones."""
    g = torch.Generator().manual_seed(0)
    hidden = (100.0 + 2.0 * torch.randn(n, 16, generator=g)) * torch.logspace(0, -5, 16)
    weight = torch.randn(4, 16, generator=g) * 1e-3
    tensors, labels = (hidden.half(), weight.half(), None), torch.zeros(n, dtype=torch.long)
    _, got = grads_of(deepc.linear_cross_entropy, tensors, labels, torch.float16, factor=factor, reduction=reduction)
    _, want = grads_of(plain, tensors, labels, torch.float64, factor=factor, reduction=reduction)
    assert ((got[1] - want[1]).abs() <= BOUNDS[torch.float16][1] * want[1].abs().amax(0) + 2.0**-24).all()


def test_weight_gradient_is_summed_in_fp32():
    """Many chunks in bf16: a bf16 sum would stop growing."""
    n, v = 4096, 64
    hidden, weight = torch.ones(n, 8, dtype=torch.bfloat16), torch.zeros(v, 8, dtype=torch.bfloat16, requires_grad=True)
    deepc.linear_cross_entropy(
        hidden, weight, torch.zeros(n, dtype=torch.long), reduction="sum", chunk_rows=4
    ).backward()
    torch.testing.assert_close(weight.grad[1:].float(), torch.full((v - 1, 8), n / v), rtol=4e-3, atol=0)
    torch.testing.assert_close(weight.grad[0].float(), torch.full((8,), n / v - n), rtol=4e-3, atol=0)


def test_only_the_gradients_that_are_wanted():
    for frozen in range(3):
        hidden, weight, labels, bias = subject()
        leaves = [t.requires_grad_(k != frozen) for k, t in enumerate((hidden, weight, bias))]
        deepc.linear_cross_entropy(hidden, weight, labels, bias).backward()
        assert [t.grad is None for t in leaves] == [k == frozen for k in range(3)]
    before = deepc.counters()["xent_calls"]
    with torch.no_grad():
        assert not deepc.linear_cross_entropy(hidden, weight, labels, bias).requires_grad
    assert deepc.counters()["xent_calls"] == before + 1


def test_backward_twice_and_no_second_derivative():
    hidden, weight, labels, bias = subject()
    loss = deepc.linear_cross_entropy(hidden.requires_grad_(), weight, labels, bias)
    (2.0 * loss).backward(retain_graph=True)
    once = hidden.grad.clone()
    (2.0 * loss).backward()
    torch.testing.assert_close(hidden.grad, 2 * once, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    loss = deepc.linear_cross_entropy(hidden, weight, labels, bias)
    with pytest.raises(UnsupportedError, match="no second derivative"):
        torch.autograd.grad(loss, hidden, grad_outputs=torch.ones((), requires_grad=True), create_graph=True)


def test_gradients_of_a_graph_that_is_kept_are_nobodys_memory():
    """A .grad that is zeroed or added to in place would change what the next backward brings."""
    hidden, weight, labels, _ = subject()
    loss = deepc.linear_cross_entropy(hidden.requires_grad_(), weight.requires_grad_(), labels)
    loss.backward(retain_graph=True)
    once = hidden.grad.clone(), weight.grad.clone()
    for t in (hidden, weight):
        t.grad.zero_()
    (2.0 * loss).backward(retain_graph=True)
    loss.backward()
    for t, g in zip((hidden, weight), once):
        torch.testing.assert_close(t.grad, 3 * g)


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"reduction": "sum"}, {"reduction": "none"}])
def test_a_gradient_penalty_is_refused(options):
    """The gradient of a plain loss as a term of another: without an error it would be a constant to the weight."""
    hidden, weight, labels, _ = subject()
    loss = deepc.linear_cross_entropy(hidden.requires_grad_(), weight.requires_grad_(), labels, **options)
    with pytest.raises(UnsupportedError, match="no second derivative.*create_graph=True"):
        torch.autograd.grad(loss.sum(), hidden, create_graph=True)


def test_autocast_and_checkpoint():
    hidden, weight, labels, bias = subject(n=64)
    for t in (hidden, weight, bias):
        t.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = deepc.linear_cross_entropy(hidden, weight, labels, bias)
    loss.backward()
    assert weight.grad.dtype == torch.float32
    torch.testing.assert_close(loss.detach(), plain(hidden, weight, labels, bias).detach(), rtol=5e-3, atol=0)
    exact = deepc.linear_cross_entropy(hidden, weight, labels, bias)
    again = torch.utils.checkpoint.checkpoint(
        deepc.linear_cross_entropy, hidden, weight, labels, bias, use_reentrant=False
    )
    a, b = torch.autograd.grad(exact, (hidden, weight)), torch.autograd.grad(again, (hidden, weight))
    assert all(torch.equal(x, y) for x, y in zip(a, b))


class _Watch(TorchDispatchMode):
    """The new storages that operators return: the largest, and how much is alive at once."""

    def __init__(self, known) -> None:
        super().__init__()
        self._known = {t.untyped_storage()._cdata for t in known}
        self._alive = {}
        self.largest = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in self._known:
                self._note(t.untyped_storage())
        return out

    def _note(self, storage) -> None:
        self._alive = {k: (ref, size) for k, (ref, size) in self._alive.items() if not ref.expired()}
        self._alive.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.largest = max(self.largest, storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wants", [(True, True, False), (False, False, False)])
def test_never_makes_all_logits(dtype, wants):
    """The forward pass below its operator, seen op by op: one buffer of chunk x v, and nothing near tokens x v."""
    n, d, v, chunk = 1024, 16, 4001, 64
    hidden, weight, labels, _ = subject(dtype, n=n, d=d, v=v, bias=False, ignore=False)
    watch = _Watch([hidden, weight, labels])
    with watch, torch.no_grad():
        fused_loss._forward(hidden, weight, labels, None, -100, 0.0, 1, chunk, False, *wants)
    size = dtype.itemsize
    buffer = chunk * fused_loss._row_stride(v, dtype) * size
    assert watch.largest == buffer
    gradients = (
        v * d * (4 + (0 if dtype == torch.float32 else 2 + 2)) + n * d * size if any(wants) else 0
    )  # the fp32 sum, a slab, the result
    assert buffer <= watch.peak <= buffer + gradients + 64 * n
    assert watch.peak < n * v * size / 4


@pytest.mark.full
def test_compiles_in_one_graph_with_dynamic_lengths():
    hidden, weight, labels, bias = subject(n=64)

    def f(hidden, weight, labels, bias):
        return deepc.linear_cross_entropy(hidden * 2.0, weight, labels, bias) * 3.0

    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (64, 40, 7):
        got, want = (grads_of(g, (hidden[:n], weight, bias), labels[:n], torch.float32) for g in (compiled, f))
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "reduction, recompute",
    [(1, True), (0, False), *(pytest.param(r, False, marks=pytest.mark.full) for r in (1, 2))],
)
def test_opcheck(reduction, recompute):
    hidden, weight, labels, bias = subject(n=12, v=33)
    leaves = [t.requires_grad_() for t in (hidden, weight, bias)]
    torch.library.opcheck(
        torch.ops.deepc.linear_cross_entropy.default,
        (hidden, weight, labels, bias, -100, 0.1, reduction, 5, recompute, True, True, True),
    )
    with torch.no_grad():
        torch.library.opcheck(
            torch.ops.deepc.linear_cross_entropy_backward.default,
            (hidden, weight, labels, bias, torch.ones(12), -100, 0.1, 5, True, True, True),
            test_utils=("test_schema", "test_faketensor"),
        )
    assert all(t.requires_grad for t in leaves)


@pytest.mark.parametrize(
    "change, says",
    [
        (dict(hidden=torch.zeros(4, 9)), "does not fit weight"),
        (dict(weight=torch.zeros(0, 8)), "v at least 1"),
        (dict(labels=torch.zeros(5, dtype=torch.long)), "one label per row"),
        (dict(labels=torch.zeros(4)), "not probabilities"),
        (dict(bias=torch.zeros(3)), "bias .3. does not fit"),
        (dict(hidden=torch.zeros(4, 8, dtype=torch.float64)), "float64"),
        (dict(weight=torch.zeros(6, 8).half()), "float16"),
        (dict(reduction="max"), "reduction='max'"),
        (dict(label_smoothing=2.0), "label_smoothing=2.0"),
        (dict(chunk_rows=0), "chunk_rows=0"),
    ],
)
def test_wrong_arguments(change, says):
    good = dict(hidden=torch.zeros(4, 8), weight=torch.zeros(6, 8), labels=torch.zeros(4, dtype=torch.long), bias=None)
    with pytest.raises(ArgumentError, match=says):
        deepc.linear_cross_entropy(**{**good, **change})


def test_label_out_of_range_is_named():
    with pytest.raises(RuntimeError, match=r"labels\[2\] = 6 is outside \[0, 6\)"):
        deepc.linear_cross_entropy(torch.zeros(4, 8), torch.zeros(6, 8), torch.tensor([0, 1, 6, 2]))


def test_chunks_are_even():
    assert fused_loss.rows_per_chunk(4096, 50257, 4) == 320  # 64 MiB hold 333
    assert fused_loss.rows_per_chunk(340, 50257, 4) == 176  # not 333 and 7
    assert fused_loss.rows_per_chunk(7, 50257, 4) == 7
    assert fused_loss.rows_per_chunk(4096, 50257, 4, 100) == 100
    assert fused_loss.rows_per_chunk(10_000, 2_000_000, 4) == 64
