"""SparseSelfAttention: DeepSpeed's module over deepc's block-sparse attention, on CPUs, in fp32, bf16 and fp16."""

from __future__ import annotations

import torch

from ...core import ops
from ...errors import ArgumentError
from .layouts import FixedSparsityConfig, SparsityConfig

HIDES = -1e3
"""Additive masks: what is at most this hides (e^-1000 is 0 in every format)."""


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
    bias: torch.Tensor | None = None,
    dropout: float = 0.0,
    seed: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """ops.block_sparse_attention, also with a layout of its own for each entry of the batch ([batch, heads, ..]);
    dropout then counts head h of entry b as head b * heads + h of entry 0."""
    if layout.dim() == 3:
        return ops.block_sparse_attention(
            q, k, v, layout, block, is_causal=is_causal, scale=scale, groups=groups, bias=bias, dropout=dropout,
            seed=seed,
        )  # fmt: skip
    batch, heads, rows, keys = *q.shape[:3], k.shape[2]
    if groups is not None:  # entries become heads, which have no groups of their own
        of_q, of_k = groups if isinstance(groups, tuple) else (groups, groups)
        bias = both(bias, (of_q.unsqueeze(2) == of_k.unsqueeze(1)).unsqueeze(1))
    if bias is not None:
        bias = bias.expand(batch, heads, bias.shape[-2] if bias.dim() > 1 else rows, keys).flatten(0, 1).unsqueeze(0)
    q1, k1, v1 = (x.reshape(1, -1, *x.shape[2:]) for x in (q, k, v))
    out = ops.block_sparse_attention(
        q1, k1, v1, layout.flatten(0, 1), block, is_causal=is_causal, scale=scale, bias=bias, dropout=dropout, seed=seed
    )
    return out.view(q.shape)


def both(a: torch.Tensor | None, b: torch.Tensor) -> torch.Tensor:
    """One bias of two: bools hide where either does, floats are added."""
    if a is None:
        return b
    if a.dtype == b.dtype == torch.bool:
        return a & b
    a, b = (x.new_zeros(x.shape, dtype=torch.float).masked_fill(~x, float("-inf")) if x.dtype == torch.bool else x
            for x in (a, b))  # fmt: skip
    return a + b


def visible_keys(mask: torch.Tensor, mode: str) -> torch.Tensor | None:
    """bool of a mask. mode "mul": 0 hides; "add": what is at most HIDES hides, 0 does not. None: it has other values,
    which are a bias."""
    if mode == "mul":
        return mask.ne(0)
    if mode != "add":
        raise ArgumentError(f"mask mode {mode!r}; there are 'add' and 'mul'")
    return mask.eq(0) if bool(((mask == 0) | (mask <= HIDES)).all()) else None


class SparseSelfAttention(torch.nn.Module):
    """Scaled dot-product self-attention over the visible blocks of a SparsityConfig.

    sparsity_config: default FixedSparsityConfig(4 heads). key_padding_mask_mode, attn_mask_mode: "add" or "mul".
    max_seq_length: the longest sequence. dropout: of the probabilities, in training (ops.block_sparse_attention).
    Unidirectional layouts are causal within blocks too (DeepSpeed leaves that to attn_mask)."""

    def __init__(
        self,
        sparsity_config: SparsityConfig | None = None,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul",
        max_seq_length: int = 2048,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.dropout = dropout
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
        """query, value: [batch, heads, rows, dim]; key: the same, or its last two dimensions exchanged. rpe: added to
        the scores, [1 or batch, 1 or heads, 1 or rows, rows] (leading dimensions may be missing), with a gradient.
        key_padding_mask: [batch, rows]; attn_mask: [rows, rows], or as rpe. By their modes masks are added too ("add",
        any numbers), or hide where they are 0 ("mul"). Returns query's shape; rows that are padding see the other
        padding, where the mask does nothing but hide."""
        rows = query.shape[2]
        if key.shape != query.shape:
            key = key.transpose(2, 3)
        bias, groups, causal = rpe, None, self.sparsity_config.attention == "unidirectional"
        if attn_mask is not None:
            while attn_mask.dim() > 2 and attn_mask.shape[0] == 1:
                attn_mask = attn_mask[0]
            seen = visible_keys(attn_mask, self.attn_mask_mode)
            if seen is None:
                bias = both(bias, attn_mask)
            elif torch.equal(seen, torch.ones(rows, rows, dtype=torch.bool, device=seen.device).tril()):
                causal = True
            elif not bool(seen.all()):
                bias = both(bias, seen)
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask.reshape(query.shape[0], rows)
            seen = visible_keys(key_padding_mask, self.key_padding_mask_mode)
            if seen is None:
                bias = both(bias, key_padding_mask.view(-1, 1, 1, rows))
            else:
                groups = seen.int()
        layout, block = self.get_layout(rows), self.sparsity_config.block
        dropout = self.dropout if self.training else 0.0
        return attend(query, key, value, layout, block, is_causal=causal, groups=groups, bias=bias, dropout=dropout)
