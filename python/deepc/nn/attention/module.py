"""SparseSelfAttention: DeepSpeed's module over deepc's block-sparse attention, on CPUs, in fp32, bf16 and fp16."""

from __future__ import annotations

import torch

from ...core import ops
from ...errors import ArgumentError, UnsupportedError
from .layouts import FixedSparsityConfig, SparsityConfig

HIDES = -1e3
"""Additive masks: what is at most this hides (e^-1000 is 0 in every format); above, only 0 is taken."""


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: torch.Tensor,
    block: int,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    groups: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """ops.block_sparse_attention, also with a layout of its own for each entry of the batch ([batch, heads, ..])."""
    if layout.dim() == 3:
        return ops.block_sparse_attention(q, k, v, layout, block, is_causal=is_causal, scale=scale, groups=groups)
    if groups is not None:
        raise UnsupportedError("a layout per entry of the batch has no groups or padding masks beside it")
    q1, k1, v1 = (x.reshape(1, -1, *x.shape[2:]) for x in (q, k, v))
    out = ops.block_sparse_attention(q1, k1, v1, layout.flatten(0, 1), block, is_causal=is_causal, scale=scale)
    return out.view(q.shape)


def visible_keys(mask: torch.Tensor, mode: str) -> torch.Tensor:
    """bool [batch, keys] of a padding mask. mode "mul": 0 hides; "add": what is at most HIDES hides, 0 does not."""
    if mode == "mul":
        return mask.ne(0)
    if mode != "add":
        raise ArgumentError(f"mask mode {mode!r}; there are 'add' and 'mul'")
    if not bool(((mask == 0) | (mask <= HIDES)).all()):
        raise UnsupportedError(
            "an additive mask with other values than 0 and <= -1000 is a bias, which block-sparse attention has only "
            "as ALiBi slopes (ops.block_sparse_attention(slopes=))"
        )
    return mask.eq(0)


class SparseSelfAttention(torch.nn.Module):
    """Scaled dot-product self-attention over the visible blocks of a SparsityConfig.

    sparsity_config: default FixedSparsityConfig(4 heads). key_padding_mask_mode, attn_mask_mode: "add" or "mul".
    max_seq_length: the longest sequence. Unidirectional layouts are causal within blocks too (DeepSpeed leaves that to
    attn_mask)."""

    def __init__(
        self,
        sparsity_config: SparsityConfig | None = None,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul",
        max_seq_length: int = 2048,
    ) -> None:
        super().__init__()
        self.sparsity_config = sparsity_config or FixedSparsityConfig(num_heads=4)
        self.key_padding_mask_mode, self.attn_mask_mode = key_padding_mask_mode, attn_mask_mode
        # The longest sequence's layout: shorter ones see its upper left part, random blocks included, on every rank.
        self.register_buffer("master_layout", self.sparsity_config.make_layout(max_seq_length))

    def get_layout(self, length: int) -> torch.Tensor:
        """int64 [heads, blocks, blocks] for sequences of `length`, a multiple of the block."""
        block = self.sparsity_config.block
        layout: torch.Tensor = self.master_layout  # type: ignore[assignment]
        if length % block or length > layout.shape[1] * block:
            raise ArgumentError(
                f"a sequence of {length}; it must be a multiple of block = {block} and at most max_seq_length = "
                f"{layout.shape[1] * block} (SparseAttentionUtils.pad_to_block_size pads)"
            )
        return layout[:, : length // block, : length // block]

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rpe: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query, value: [batch, heads, rows, dim]; key: the same, or its last two dimensions exchanged.
        key_padding_mask: [batch, rows]. attn_mask: [rows, rows] that hides nothing, or what is causal. Returns query's
        shape; rows that are padding see the other padding."""
        rows = query.shape[2]
        if key.shape != query.shape:
            key = key.transpose(2, 3)
        if rpe is not None:
            raise UnsupportedError("rpe (relative position embeddings) is not built; ALiBi is: slopes= of "
                                   "ops.block_sparse_attention")  # fmt: skip
        causal = self.sparsity_config.attention == "unidirectional"
        if attn_mask is not None:
            seen = visible_keys(attn_mask.reshape(attn_mask.shape[-2:]), self.attn_mask_mode)
            if not bool(seen.all()):
                if not torch.equal(seen, torch.ones_like(seen).tril()):
                    raise UnsupportedError("attn_mask must be all visible or causal; say other patterns by the layout")
                causal = True
        groups = None
        if key_padding_mask is not None:
            groups = visible_keys(key_padding_mask.reshape(query.shape[0], rows), self.key_padding_mask_mode).int()
        layout, block = self.get_layout(rows), self.sparsity_config.block
        return attend(query, key, value, layout, block, is_causal=causal, groups=groups)
