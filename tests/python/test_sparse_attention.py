"""Block-sparse attention: the operator against masked attention in float64, layouts, the module, models."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from deepc.core import ops
from deepc.errors import ArgumentError, ConfigError, UnsupportedError
from deepc.nn import attention as sparse


def dense(layout: torch.Tensor, block: int, rows: int) -> torch.Tensor:
    """bool [heads, rows, rows]"""
    return layout.bool().repeat_interleave(block, 1).repeat_interleave(block, 2)[:, :rows, :rows]


def compare(dtype, layout, block, seen, bias=None, bound=None, **options):
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
        assert (got.double() - exact).abs().max() <= bound * exact.abs().max()


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 4e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("block", [16, 48, 128])
def test_equals_masked_attention(dtype, bound, block):
    rows = 200
    blocks = -(-rows // block)
    torch.manual_seed(0)
    layout = (torch.rand(4, blocks, blocks) < 0.4) | torch.eye(blocks, dtype=torch.bool)
    seen = dense(layout, block, rows) & torch.ones(rows, rows, dtype=torch.bool).tril()
    compare(dtype, layout, block, seen, bound=bound, is_causal=True)


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
        (lambda: module(q, k, v, rpe=q), UnsupportedError, "ALiBi"),
        (lambda: module(q, k, v, attn_mask=torch.eye(48)), UnsupportedError, "all visible or causal"),
        (lambda: module(q, k, v, key_padding_mask=padding + 1), UnsupportedError, "slopes"),
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
