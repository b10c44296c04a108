"""Block-sparse attention: the operator against masked attention in float64, layouts, the module, models."""

from __future__ import annotations

import copy
import math
import pickle
import random

import deepc
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from deepc.core import ops
from deepc.errors import ArgumentError, ConfigError, UnsupportedError
from deepc.nn import attention as sparse


def dense(layout: torch.Tensor, block: int, rows: int) -> torch.Tensor:
    """bool [heads, rows, rows]"""
    return layout.bool().repeat_interleave(block, 1).repeat_interleave(block, 2)[:, :rows, :rows]


def compare(dtype, layout, block, seen, bias=None, bound=None, floor=0.0, **options):
    """Result and gradients against scaled_dot_product_attention in float64 with a mask, heads shared by two."""
    rows, heads = seen.shape[-1], layout.shape[0] if layout.shape[0] > 1 else 4
    torch.manual_seed(1)
    q = torch.randn(2, heads, rows, 24, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(2, heads // 2, rows, 24, dtype=dtype, requires_grad=True) for _ in range(2))
    out = ops.block_sparse_attention(q, k, v, layout, block, **options)
    g = torch.randn_like(out)
    out.backward(g)
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    mask = torch.zeros(seen.shape, dtype=torch.double).masked_fill(~seen, float("-inf"))
    want = F.scaled_dot_product_attention(*wide, attn_mask=mask if bias is None else mask + bias, enable_gqa=True)
    want = want.nan_to_num(0.0)
    alive = seen.any(-1, keepdim=True).expand(2, heads, rows, 1)
    (want * g.double() * alive).sum().backward()
    for got, exact in zip((out, q.grad, k.grad, v.grad), (want, *(t.grad.nan_to_num(0.0) for t in wide))):
        assert (got.double() - exact).abs().max() <= bound * max(exact.abs().max().item(), floor)


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 4e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("block", [16, 48, 128])
def test_equals_masked_attention(dtype, bound, block):
    rows = 200
    blocks = -(-rows // block)
    torch.manual_seed(0)
    layout = (torch.rand(4, blocks, blocks) < 0.4) | torch.eye(blocks, dtype=torch.bool)
    seen = dense(layout, block, rows) & torch.ones(rows, rows, dtype=torch.bool).tril()
    compare(dtype, layout, block, seen, bound=bound, is_causal=True)


def _one_random_layout(seed: int) -> None:
    """A layout, block, length and shape drawn from the seed, in fp32 against float64 with a dense mask: result and
    gradients within 64 roundings of fp32 of the tensor's largest, or of 1 (where each row sees one key, q and k have
    gradients of 0 that are differences of such)."""
    rng = random.Random(seed)
    block, rows, heads = rng.choice(range(16, 129, 16)), rng.randint(1, 260), rng.choice((2, 4))
    blocks = -(-rows // block)
    torch.manual_seed(seed)
    layout = torch.rand(rng.choice((1, heads)), blocks, blocks) < rng.random()
    causal = rng.random() < 0.5
    seen = dense(layout, block, rows).expand(heads, rows, rows)
    if causal:
        seen = seen & torch.ones(rows, rows, dtype=torch.bool).tril()
    if layout.shape[0] == 1 and heads == 2:
        layout = layout.expand(2, -1, -1)
    compare(torch.float32, layout, block, seen, bound=64 * 2**-24, floor=1.0, is_causal=causal)


@pytest.mark.parametrize("first, count", [(0, 12), pytest.param(12, 988, marks=pytest.mark.full)])
def test_random_layouts(first, count):
    for seed in range(first, first + count):
        _one_random_layout(seed)


def test_gradient_is_that_of_the_function():
    """Central differences of the float64 function that the operator is compared with would say nothing of the operator,
    which has no float64: directional differences of the operator itself, in fp32."""
    torch.manual_seed(0)
    layout = torch.rand(1, 5, 5) < 0.6
    q, k, v, g = (torch.randn(1, 2, 80, 16, requires_grad=True) for _ in range(4))
    (ops.block_sparse_attention(q, k, v, layout, 16, is_causal=True) * g.detach()).sum().backward()
    for x in (q, k, v):
        way = torch.randn_like(x) * 1e-2
        at = [
            (ops.block_sparse_attention(*(y + s * way if y is x else y for y in (q, k, v)), layout, 16, is_causal=True)
             .double() * g.double()).sum()
            for s in (1, -1)
        ]  # fmt: skip
        torch.testing.assert_close((at[0] - at[1]) / 2, (x.grad * way).double().sum(), rtol=1e-3, atol=1e-3)


def test_compiles_whole():
    layout = torch.rand(1, 4, 4) < 0.6

    def block(x, w):
        q, k, v = (x @ w).view(1, 64, 3, 2, 8).permute(2, 0, 3, 1, 4)
        return ops.block_sparse_attention(q, k, v, layout, 16, is_causal=True).square().sum()

    x, w = torch.randn(1, 64, 16), torch.randn(16, 48, requires_grad=True)
    want = block(x, w)
    want.backward()
    grad, w.grad = w.grad, None
    got = torch.compile(block, fullgraph=True, backend="aot_eager")(x, w)
    got.backward()
    assert torch.equal(got, want) and torch.equal(w.grad, grad)


def test_packed_sequences_slopes_and_rows_that_see_nothing():
    rows, layout = 100, torch.ones(1, 4, 4)
    layout[0, 3] = 0  # the last rows see nothing
    groups = (torch.arange(rows) // 30).int().expand(2, rows)
    position = torch.arange(rows)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    seen = dense(layout, 32, rows)[0] & (groups[0].unsqueeze(1) == groups[0])
    bias = slopes.view(4, 1, 1).double() * (position - position.unsqueeze(1))
    compare(torch.float32, layout, 32, seen.expand(4, rows, rows), bias, 4e-6, groups=groups, slopes=slopes)
    q = torch.randn(1, 2, 64, 8)
    assert not ops.block_sparse_attention(q, q, q, torch.zeros(1, 4, 4), 16).any()


# ---- dropout and biases ----------------------------------------------------------------------------------------------
def philox(counter: list[np.ndarray], seed: int) -> list[np.ndarray]:
    """Philox4x32-10 (Salmon et al., SC 2011) of uint64 arrays below 2^32, by its definition."""
    low = np.uint64(0xFFFFFFFF)
    c, key = [x.astype(np.uint64) for x in counter], [np.uint64(seed % 2**32), np.uint64(seed % 2**64 >> 32)]
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        high = np.uint64(32)
        c = [(b >> high) ^ c[1] ^ key[0], b & low, (a >> high) ^ c[3] ^ key[1], a & low]
        key = [(key[0] + np.uint64(0x9E3779B9)) & low, (key[1] + np.uint64(0xBB67AE85)) & low]
    return c


def kept(shape: tuple[int, ...], rate: float, seed: int, first: tuple[int, int] = (0, 0)) -> torch.Tensor:
    """float64 [batch, heads, rows, keys]: 0, or 1 / (1 - rate), as ops.block_sparse_attention documents it."""
    b, h, i, j = np.indices(shape)
    words = np.stack(philox([j // 8, i, h + first[1], b + first[0]], seed))
    word = np.take_along_axis(words, (j % 8 // 2)[None], 0)[0]
    below = round(rate * 2**16)
    keep = (word >> (16 * (j % 2)).astype(np.uint64) & np.uint64(0xFFFF)) >= below
    return torch.from_numpy(keep * (2**16 / (2**16 - below)))


def exact(q, k, v, seen, bias=None, factor=1.0):
    """Attention in float64 by its definition; rows that see nothing are 0."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    s = (s if bias is None else s + bias).masked_fill(~seen, float("-inf"))
    return (s.softmax(-1).nan_to_num(0.0) * factor) @ v


def against_exact(dtype, bound, seen, bias=None, factor=1.0, rows=90, keys=None, heads=4, **options):
    """Result and gradients of the operator against `exact`'s; bias: of the operator, learnt if it is a float."""
    keys = keys or rows
    torch.manual_seed(1)
    q = torch.randn(2, heads, rows, 24, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(2, heads // 2, keys, 24, dtype=dtype, requires_grad=True) for _ in range(2))
    leaves, more = [q, k, v], None
    if bias is not None and bias.is_floating_point():
        leaves.append(bias.requires_grad_())
    out = ops.block_sparse_attention(q, k, v, bias=bias, **options)
    g = torch.randn_like(out)
    out.backward(g)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    if len(leaves) > 3:
        more = wide[3]
    elif bias is not None:
        seen = seen & bias
    want = exact(*wide[:3], seen, more, factor)
    want.backward(g.double())
    for got, right in zip((out, *(t.grad for t in leaves)), (want, *(t.grad for t in wide))):
        assert (got.double() - right).abs().max() <= bound * max(right.abs().max().item(), 1.0)


FP32, BF16 = (torch.float32, 1e-5), (torch.bfloat16, 2e-2)


@pytest.mark.parametrize(
    "kind, block, rate",
    [(FP32, 16, 0.25), (BF16, 64, 0.1)]
    + [pytest.param(*c, marks=pytest.mark.full) for c in ((FP32, 64, 0.5), (BF16, 16, 0.5), (BF16, 32, 0.9))],
)
def test_dropout_equals_the_same_mask(kind, block, rate):
    rows, blocks = 90, -(-90 // block)
    torch.manual_seed(0)
    layout = (torch.rand(4, blocks, blocks) < 0.6) | torch.eye(blocks, dtype=torch.bool)
    seen = dense(layout, block, rows) & torch.ones(rows, rows, dtype=torch.bool).tril()
    factor = kept((2, 4, rows, rows), rate, 2**40 + 7, (5, 9))
    against_exact(*kind, seen, factor=factor, layout=layout, block=block, is_causal=True, dropout=rate, seed=2**40 + 7,
                  first=(5, 9))  # fmt: skip


def _mask_of(rate, seed, **options):
    """What dropout makes of each pair, read off the operator: all probabilities are equal and v is the identity."""
    q = torch.zeros(1, 2, 128, 256)
    v = torch.eye(256).expand(1, 2, 256, 256)
    return ops.block_sparse_attention(q, torch.zeros(1, 2, 256, 256), v, dropout=rate, seed=seed, **options) * 256


def test_dropouts_mask_is_the_seeds_alone():
    one = _mask_of(0.3, -5)
    factor = kept((1, 2, 128, 256), 0.3, -5)
    torch.testing.assert_close(one.double(), factor, rtol=1e-5, atol=0)
    whole = torch.ones(1, 8, 16)
    assert torch.equal(_mask_of(0.3, -5, layout=whole, block=16), one)
    assert torch.equal(_mask_of(0.3, torch.tensor(-5)) != 0, one != 0)
    assert torch.equal(_mask_of(0.3, 2**64 - 5), one)  # the same 64 bits
    # of another rank that has head 1 of entry 0 as its first
    assert torch.equal((_mask_of(0.3, -5, first=(0, 1))[:, 0] != 0), one[:, 1] != 0)
    # as many are dropped as asked for, each key's and each query's independently of its neighbours': 5 deviations
    drop = (one == 0).double()
    n = drop.numel()
    assert abs(drop.mean() - 0.3) < 5 * math.sqrt(0.3 * 0.7 / n)
    for a, b in ((drop[..., 1:], drop[..., :-1]), (drop[:, :, 1:], drop[:, :, :-1]), (drop[:, :1], drop[:, 1:])):
        assert abs(((a - 0.3) * (b - 0.3)).mean()) < 5 * 0.3 * 0.7 / math.sqrt(a.numel())
    other = (_mask_of(0.3, -4) == 0).double()
    assert abs(((drop - 0.3) * (other - 0.3)).mean()) < 5 * 0.3 * 0.7 / math.sqrt(n)


def test_dropout_draws_its_seed_from_torch():
    q = torch.randn(1, 2, 40, 8)
    torch.manual_seed(3)
    a, b = ops.attention(q, q, q, dropout=0.5), ops.attention(q, q, q, dropout=0.5)
    torch.manual_seed(3)
    assert torch.equal(ops.attention(q, q, q, dropout=0.5), a) and not torch.equal(a, b)
    assert torch.equal(ops.attention(q, q, q, dropout=0.0), ops.attention(q, q, q))
    x, seed = torch.randn(2, 32, 16, requires_grad=True), torch.tensor([11])

    def block(x, bias):
        q = x.view(2, 32, 2, 8).transpose(1, 2)
        return ops.block_sparse_attention(q, q, q, bias=bias, dropout=0.25, seed=seed, window=9).square().sum()

    bias = torch.randn(1, 2, 32, 32, requires_grad=True)
    block(x, bias).backward()
    grads = x.grad, bias.grad
    x.grad = bias.grad = None
    torch.compile(block, fullgraph=True, backend="aot_eager")(x, bias).backward()
    torch.testing.assert_close(x.grad, grads[0])  # sums of three, in any order
    assert torch.equal(bias.grad, grads[1])
    none = torch.empty(0, dtype=torch.int32)
    q, k, v = (torch.randn(1, 2, 32, 8, requires_grad=True) for _ in range(3))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    args = (q, k, v, none.to(torch.uint8), 64, none, none, none.float(), bias, seed, 0.25, 0, 0, True, 0, 9, 0.5)
    torch.library.opcheck(torch.ops.deepc.block_sparse_attention.default, args, test_utils=checks)


@pytest.mark.parametrize(
    "kind, shape, block",
    [(FP32, (1, 4, 90, 90), 32), (BF16, (2, 1, 90, 90), 64)]
    + [pytest.param(*c, marks=pytest.mark.full)
       for c in ((FP32, (2, 4, 90, 90), 16), (FP32, (2, 1, 1, 90), 64), (BF16, (1, 1, 90, 90), 16))],
)  # fmt: skip
def test_a_bias_and_its_gradient(kind, shape, block):
    blocks = -(-90 // block)
    torch.manual_seed(0)
    layout = (torch.rand(1, blocks, blocks) < 0.6) | torch.eye(blocks, dtype=torch.bool)
    seen = dense(layout, block, 90).expand(4, 90, 90)
    against_exact(*kind, seen, bias=torch.randn(shape).to(kind[0]), layout=layout, block=block)
    # what is hidden has no gradient, and is not read
    bias = torch.full((90, 90), float("nan"))
    bias[seen[0]] = 0.0
    bias.requires_grad_()
    q = torch.randn(1, 2, 90, 8, requires_grad=True)
    ops.block_sparse_attention(q, q, q, layout, block, bias=bias).sum().backward()
    assert not q.grad.isnan().any() and not bias.grad[~seen[0]].any()


def test_boolean_masks_and_windows():
    torch.manual_seed(0)
    some = torch.rand(2, 1, 90, 120) < 0.5
    every = torch.ones(90, 120, dtype=torch.bool)
    against_exact(*FP32, every, bias=some, keys=120)
    against_exact(*BF16, every, bias=torch.rand(120) < 0.5, keys=120)
    row, col = torch.arange(90).unsqueeze(1), torch.arange(120)
    for kind, window in ((FP32, 20), (BF16, 70)):
        seen = (col <= row + 30) & (col > row + 30 - window)
        against_exact(*kind, seen, keys=120, is_causal=True, window=window, diagonal=30)
    long = (col.view(1, 120) - row).abs() < 50
    against_exact(*FP32, long & (col > row - 50), keys=120, bias=long, window=50)


def test_the_module_adds_and_multiplies():
    """rpe, attn_mask and key_padding_mask by DeepSpeed's formula: scores + rpe + masks ("add"), or hidden ("mul")."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 48, 8) for _ in range(3))
    rpe = torch.randn(2, 48, 48, requires_grad=True)
    add, padding = torch.randn(48, 48), torch.randn(2, 48)
    some = torch.rand(48, 48) < 0.7
    some |= torch.eye(48, dtype=torch.bool)
    half = torch.ones(2, 48)
    half[1, 30:] = 0
    config = sparse.DenseSparsityConfig(2, 16)
    both = sparse.SparseSelfAttention(config, "add", "add", max_seq_length=64)
    every = torch.ones(48, 48, dtype=torch.bool)
    wide = [x.double() for x in (q, k, v)]
    want = exact(*wide, every, rpe.double() + add + padding.view(2, 1, 1, 48))
    out = both(q, k, v, rpe=rpe, attn_mask=add, key_padding_mask=padding)
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)
    (ours,) = torch.autograd.grad(out.sum(), rpe, retain_graph=True)
    (theirs,) = torch.autograd.grad(want.sum(), rpe)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    hide = sparse.SparseSelfAttention(config, "mul", "mul", max_seq_length=64)
    got = hide(q, k, v, rpe=rpe, attn_mask=some, key_padding_mask=half)
    want = exact(*wide, some & half.bool().view(2, 1, 1, 48), rpe.double())
    torch.testing.assert_close(got[:, :, :30].double(), want[:, :, :30], rtol=1e-4, atol=1e-5)
    own = torch.rand(2, 2, 3, 3) < 0.7
    got = sparse.attend(q, k, v, own, 16, bias=rpe, groups=half.int())
    seen = own.repeat_interleave(16, 2).repeat_interleave(16, 3) & (half.unsqueeze(1) == half.unsqueeze(2)).unsqueeze(1)
    torch.testing.assert_close(got.double(), exact(*wide, seen, rpe.double()), rtol=1e-4, atol=1e-5)
    dropping = sparse.SparseSelfAttention(config, max_seq_length=64, dropout=0.5)
    torch.manual_seed(1)
    a = dropping(q, k, v)
    torch.manual_seed(1)
    assert torch.equal(dropping(q, k, v), a) and not torch.allclose(dropping.eval()(q, k, v), a)


def test_layouts():
    fixed = sparse.FixedSparsityConfig(2, 16, True, 4, 1, "unidirectional", num_different_global_patterns=2)
    got = fixed.make_layout(16 * 8)
    assert got.shape == (2, 8, 8) and got.dtype == torch.int64 and not got.triu(1).any()
    assert got[0, 7].tolist() == [0, 0, 0, 1, 1, 1, 1, 1] and got[1, 7].tolist() == [0, 0, 1, 0, 1, 1, 1, 1]
    variable = sparse.VariableSparsityConfig(1, local_window_blocks=[1, 3], global_block_indices=[2])
    rows = variable.make_layout(16 * 6)[0].tolist()
    assert rows[0] == [1, 0, 1, 0, 0, 0] and rows[1] == [0, 1, 1, 1, 0, 0] and rows[5] == [0, 0, 1, 0, 1, 1]
    random.seed(3)
    bird = sparse.BigBirdSparsityConfig(1, num_random_blocks=2, attention="unidirectional").make_layout(16 * 8)[0]
    assert not bird.triu(1).any() and bird[:, 0].all() and bird.diagonal().all() and bird.diagonal(-1).all()
    former = sparse.BSLongformerSparsityConfig(1, global_block_indices=[1], global_block_end_indices=[3]).make_layout(
        96
    )
    assert former[0, 5].tolist() == [0, 1, 1, 0, 1, 1] and former[0, 2].all()
    local = sparse.LocalSlidingWindowSparsityConfig(1, num_sliding_window_blocks=5).make_layout(96)[0]
    assert local[4].tolist() == [0, 0, 1, 1, 1, 0]
    assert sparse.DenseSparsityConfig(3).make_layout(32).all()
    for wrong in ({"global_block_indices": [-1]}, {"global_block_indices": 0}, {"global_block_end_indices": [1.5]}):
        with pytest.raises(ArgumentError, match="must be a list of integers of at least 0"):
            sparse.BSLongformerSparsityConfig(1, **wrong)


def test_attention_of_models_without_a_model():
    """Position ids of one row for all, and heads of which other ranks have the others."""
    from deepc.nn.attention.hub import attention_forward

    def module(**section):
        made = torch.nn.Module()
        made.config, made.is_causal = torch.nn.Module(), False
        made.config.num_attention_heads, made.config.sparse_attention = 4, section
        return made

    dense, q = module(mode="dense"), torch.randn(2, 4, 32, 8)
    positions = torch.cat([torch.arange(20), torch.arange(12)])[None]
    packed = attention_forward(dense, q, q, q, None, position_ids=positions)[0]
    assert torch.equal(packed, attention_forward(dense, q, q, q, None, position_ids=positions.expand(2, 32))[0])
    alone = attention_forward(dense, *[q[:, :, :20]] * 3, None)[0]
    torch.testing.assert_close(packed[:, :20], alone)
    each = module(mode="fixed", num_local_blocks=2, different_layout_per_head=True, num_different_global_patterns=2)
    assert attention_forward(each, q, q, q, None)[0].shape == (2, 32, 4, 8)
    with pytest.raises(UnsupportedError, match="2 of the 4 heads are here"):
        attention_forward(each, *[q[:, :2]] * 3, None)


def test_choosing_blocks_by_the_data():
    q = torch.randn(2, 2, 64, 8)
    k = q.clone()
    layout = sparse.choose_blocks(q, k, 16, 1, is_causal=True)
    assert layout.shape == (2, 2, 4, 4) and layout.diagonal(dim1=2, dim2=3).all() and not layout.triu(1).any()
    out = sparse.attend(q, k, k, layout, 16, is_causal=True)
    for b in range(2):
        one = ops.block_sparse_attention(q[b : b + 1], k[b : b + 1], k[b : b + 1], layout[b], 16, is_causal=True)
        assert torch.equal(out[b : b + 1], one)


def test_the_module_pads_hides_and_refuses():
    module = sparse.SparseSelfAttention(
        sparse.FixedSparsityConfig(2, 16, attention="unidirectional"), max_seq_length=64
    )
    q, k, v = (torch.randn(2, 2, 48, 8) for _ in range(3))
    padding = torch.zeros(2, 48)
    padding[:, 40:] = -10000.0
    out = module(q, k.transpose(2, 3), v, key_padding_mask=padding)
    seen = dense(module.get_layout(48), 16, 48) & torch.ones(48, 48, dtype=torch.bool).tril()
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    torch.testing.assert_close(out[:, :, :40], want[:, :, :40])
    assert torch.equal(module(q, k, v, attn_mask=torch.ones(48, 48).tril()), module(q, k, v))
    for call, error, said in (
        (lambda: module(q[:, :, :40], k[:, :, :40], v[:, :, :40]), ArgumentError, "must be a multiple of block = 16"),
        (lambda: module(q, k, v, rpe=q), RuntimeError, "'bias' must be .1 or 2, 1 or 2, 1 or 48, 48."),
        (lambda: module(q, k, v, rpe=torch.zeros(48, 48, dtype=torch.double)), ArgumentError, "bias is torch.float64"),
        (lambda: ops.block_sparse_attention(q, k, v, dropout=1.0), RuntimeError, "dropout.rate = 1;"),
        (lambda: ops.block_sparse_attention(q, k, v, window=-2), RuntimeError, "window = -2"),
        (lambda: sparse.FixedSparsityConfig(2, 24), ArgumentError, "block = 24"),
        (lambda: sparse.FixedSparsityConfig(2, attention="both"), ArgumentError, "attention = 'both'"),
        (lambda: sparse.from_config({"mode": "fix"}, 2), ConfigError, "there are dense, fixed"),
        (lambda: sparse.from_config({"windows": 2}, 2), ConfigError, "sparse_attention.windows is unknown"),
        (lambda: ops.block_sparse_attention(q, k, v, torch.ones(1, 2, 3), 16), RuntimeError, "'layout' must be"),
        (lambda: sparse.use_layout(torch.nn.Linear(2, 2), {}), UnsupportedError, "SparseSelfAttention"),
    ):
        with pytest.raises(error, match=said):
            call()


def test_models_of_transformers_take_it():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=96,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=0,
        )  # fmt: skip
    ).eval()
    x = torch.randint(1, 96, (2, 80))
    mask = torch.ones(2, 80, dtype=torch.long)
    mask[0, :20] = 0
    with torch.no_grad():
        want, padded = model(x).logits, model(x, attention_mask=mask).logits
        said = model.generate(x[:, :20], max_new_tokens=20, do_sample=False)
        section = {"mode": "fixed", "block": 32, "num_local_blocks": 3, "attention": "unidirectional"}
        sparse.use_layout(model, section)
        torch.testing.assert_close(model(x).logits, want, rtol=1e-4, atol=1e-5)  # one window: all is seen
        torch.testing.assert_close(model(x, attention_mask=mask).logits[0, 20:], padded[0, 20:], rtol=1e-4, atol=1e-5)
        assert torch.equal(model.generate(x[:, :20], max_new_tokens=20, do_sample=False), said)
        assert model.config.to_dict()["sparse_attention"] == section
        sparse.use_layout(model, {"mode": "local", "block": 16, "num_sliding_window_blocks": 1})
        far = model(x).logits  # each row sees its own block alone
        x[:, :48] = 1
        torch.testing.assert_close(model(x).logits[:, 48:], far[:, 48:])
        model.config.sparse_attention = {"mode": "fixed", "attention": "bidirectional"}
        with pytest.raises(ConfigError, match="take 'unidirectional'"):
            model(x)


class Near(sparse.SparsityConfig):
    """A layout of one's own: each block sees itself and `back` before it."""

    attention = "unidirectional"

    def __init__(self, num_heads, back):
        super().__init__(num_heads, 16)
        self.back = back

    def make_layout(self, seq_len):
        layout = self.setup_layout(seq_len) + 1
        return layout.tril().triu(-self.back)


LAYOUTS = {
    "dense": lambda: sparse.DenseSparsityConfig(4, 32),
    "fixed": lambda: sparse.FixedSparsityConfig(4, 16, True, 4, 1, "unidirectional", num_different_global_patterns=2),
    "variable": lambda: sparse.VariableSparsityConfig(
        4, 16, num_random_blocks=1, local_window_blocks=(1, 2), global_block_indices=(1,), attention="unidirectional"
    ),
    "bigbird": lambda: sparse.BigBirdSparsityConfig(4, 16, True, 2, 1, 0, "unidirectional"),
    "bslongformer": lambda: sparse.BSLongformerSparsityConfig(
        4, 16, global_block_indices=(1,), global_block_end_indices=(3,), attention="unidirectional"
    ),
    "local": lambda: sparse.LocalSlidingWindowSparsityConfig(4, 16, 3),
    "own": lambda: Near(4, 1),
}


def _small_llama(transformers):
    sizes = dict(vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, pad_token_id=0)).eval()


@pytest.mark.parametrize("kind", list(LAYOUTS))
@torch.no_grad()
def test_copies_and_saved_models_have_the_layout_of_a_config(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    model, x = _small_llama(transformers), torch.randint(1, 96, (1, 160))
    whole = model(x).logits
    want = sparse.use_layout(model, LAYOUTS[kind]())(x).logits
    assert kind == "dense" or not torch.allclose(want, whole, atol=1e-4), "the layout hides something"
    assert torch.equal(copy.deepcopy(copy.deepcopy(model))(x).logits, want)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation=model.config._attn_implementation)
    pickled = pickle.loads(pickle.dumps(model))
    for other in (loaded, pickled):
        if kind == "own":
            with pytest.raises(ConfigError, match=r"mode 'Near'.*set it again.*use_layout\(model, Near"):
                other(x)
            sparse.use_layout(other, LAYOUTS[kind]())
        assert torch.equal(other(x).logits, want)


def test_models_windows_dropout_masks_and_learnt_positions():
    """Mistral's sliding window, T5's relative positions, a mask of one's own, and dropout in training."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(vocab_size=96, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
    config = transformers.MistralConfig(**sizes, num_key_value_heads=2, sliding_window=20, attention_dropout=0.5)
    model = transformers.MistralForCausalLM(config).eval()
    x = torch.randint(1, 96, (2, 70))
    whole = {"mode": "dense", "block": 16}
    with torch.no_grad():
        want = model(x).logits
        said = model.generate(x[:, :40], max_new_tokens=8, do_sample=False, pad_token_id=0)
        sparse.use_layout(model, whole)
        torch.testing.assert_close(model(x).logits, want, rtol=1e-4, atol=1e-5)
        assert torch.equal(model.generate(x[:, :40], max_new_tokens=8, do_sample=False, pad_token_id=0), said)
        mask = torch.ones(2, 1, 70, 70, dtype=torch.bool).tril()
        mask[:, :, :, 3] = False
        got = model(x, attention_mask=mask).logits
        model.set_attn_implementation("sdpa")
        mask = mask & (torch.arange(70) > torch.arange(70).unsqueeze(1) - 20)
        torch.testing.assert_close(got[:, 4:], model(x, attention_mask=mask).logits[:, 4:], rtol=1e-4, atol=1e-5)
        model.set_attn_implementation(sparse.NAME)
        model.train()
        torch.manual_seed(5)
        one = model(x).logits
        torch.manual_seed(5)
        assert torch.equal(model(x).logits, one) and not torch.allclose(one, want, rtol=1e-2, atol=1e-2)
    config = transformers.T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4)
    model = transformers.T5EncoderModel(config).eval()
    grads = []
    for ours in (False, True):
        if ours:
            sparse.use_layout(model, whole)
        model.zero_grad()
        out = model(x).last_hidden_state
        out.square().mean().backward()
        grads.append((out.detach(), model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad))
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-6)


def _gpt2(**more):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=96, n_positions=128, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
    )


def test_the_configuration_key():
    """Trains with the layout, beside deepc.fuse, and gives the model its own attention back."""
    section = {"mode": "local", "block": 16, "num_sliding_window_blocks": 3, "attention": "unidirectional"}
    x = torch.randint(96, (2, 80))
    model, same = _gpt2(), sparse.use_layout(_gpt2(), section)
    before = model.config._attn_implementation
    want = same(x, labels=x).loss
    want.backward()
    config = {"train_micro_batch_size_per_gpu": 2, "sparse_attention": section, "deepc": {"fuse": "auto"}}
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.5}}
    engine, *_ = deepc.initialize(model=model, config=config)
    loss = engine(x, labels=x).loss
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(_gpt2()(x, labels=x).loss, want)
    engine.backward(loss)
    engine.step()
    torch.testing.assert_close(
        model.transformer.h[0].attn.c_attn.weight.detach(),
        (same.transformer.h[0].attn.c_attn.weight - 0.5 * same.transformer.h[0].attn.c_attn.weight.grad).detach(),
    )
    engine.destroy()
    assert model.config._attn_implementation == before and not hasattr(model.config, "sparse_attention")
    with pytest.raises(ConfigError, match="sparse_attention.mode = 'fix'"):
        deepc.initialize(model=model, config=config | {"sparse_attention": {"mode": "fix"}})


def test_bert_under_deepspeeds_names(deepspeed):
    from deepspeed.ops.sparse_attention import BertSparseSelfAttention, DenseSparsityConfig, SparseAttentionUtils

    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, max_position_embeddings=32, pad_token_id=0))
    model.eval()
    old = model.bert.embeddings.position_embeddings.weight.detach().clone()
    utils = SparseAttentionUtils
    assert utils.extend_position_embedding(model, 80) is model
    table = model.bert.embeddings.position_embeddings.weight
    assert torch.equal(table, torch.cat([old, old, old[:16]])) and table.requires_grad
    x = torch.randint(1, 64, (2, 70))
    mask = torch.ones_like(x)
    mask[0, 50:] = 0
    want = model(x, attention_mask=mask).logits
    utils.replace_model_self_attention_with_sparse_self_attention(model, 80, DenseSparsityConfig(2, block=16))
    added, ids, seen, types, positions, none = utils.pad_to_block_size(16, x, mask, None, None, None, 0, None)
    assert added == 10 and ids.shape == seen.shape == (2, 80) and types is positions is none is None
    got = utils.unpad_sequence_output(added, model(ids, attention_mask=seen).logits)
    assert got.shape == want.shape
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()], rtol=1e-4, atol=1e-5)
    layer = BertSparseSelfAttention(model.config, DenseSparsityConfig(2, block=16), max_seq_length=80)
    h, own = torch.randn(2, 80, 32), model.bert.encoder.layer[0].attention.self
    layer.load_state_dict(own.state_dict(), strict=False)
    q, k, v = (layer.transpose_for_scores(f(h)) for f in (own.query, own.key, own.value))
    padding = torch.zeros(2, 1, 1, 80).masked_fill(seen.view(2, 1, 1, 80) == 0, -10000.0)
    exact = F.scaled_dot_product_attention(q, k, v, attn_mask=padding).transpose(1, 2).flatten(2)
    torch.testing.assert_close(layer(h, padding)[seen.bool()], exact[seen.bool()], rtol=1e-4, atol=1e-5)
    with pytest.raises(ArgumentError, match="neither .bert nor .roberta"):
        utils.extend_position_embedding(torch.nn.Linear(2, 2), 80)
