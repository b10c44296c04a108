"""BertSparseSelfAttention and SparseAttentionUtils, with the arguments and results of deepspeed.ops.sparse_attention:
what takes a BERT or RoBERTa to longer sequences."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.functional import pad

from ...errors import ArgumentError
from .hub import use_layout
from .layouts import FixedSparsityConfig, SparsityConfig
from .module import SparseSelfAttention

log = logging.getLogger("deepc")


class BertSparseSelfAttention(torch.nn.Module):
    """Self-attention of a BERT layer: query, key and value projections around SparseSelfAttention.

    config: hidden_size and num_attention_heads. sparsity_config: default FixedSparsityConfig(4 heads); its heads must
    be the model's. max_seq_length: as SparseSelfAttention has it."""

    def __init__(self, config: Any, sparsity_config: SparsityConfig | None = None, max_seq_length: int = 2048) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.num_attention_heads
        if width % heads:
            raise ArgumentError(f"hidden_size = {width} is no multiple of num_attention_heads = {heads}")
        sparsity_config = sparsity_config or FixedSparsityConfig(num_heads=4)
        if sparsity_config.num_heads != heads:
            raise ArgumentError(f"the layout has {sparsity_config.num_heads} heads; the model has {heads}")
        self.num_attention_heads, self.attention_head_size, self.all_head_size = heads, width // heads, width
        self.query, self.key, self.value = (torch.nn.Linear(width, width) for _ in range(3))
        self.sparse_self_attention = SparseSelfAttention(sparsity_config, max_seq_length=max_seq_length)

    def transpose_for_scores(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, rows, width] as [batch, heads, rows, dim]."""
        return x.view(*x.shape[:-1], self.num_attention_heads, self.attention_head_size).transpose(1, 2)

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """hidden_states: [batch, rows, hidden_size]; attention_mask: [batch, rows] with ones of size 1 between, added
        to the scores: 0, or what is at most -1000 for padding. Returns hidden_states' shape."""
        q, k, v = (self.transpose_for_scores(layer(hidden_states)) for layer in (self.query, self.key, self.value))
        if attention_mask is not None:
            attention_mask = attention_mask.reshape(hidden_states.shape[:2])
        out: torch.Tensor = self.sparse_self_attention(q, k, v, key_padding_mask=attention_mask)
        return out.transpose(1, 2).flatten(2)


def _encoder(model: Any) -> tuple[Any, int]:
    """The BERT or RoBERTa in a model, and how many of its positions are reserved."""
    for name, reserved in (("bert", 0), ("roberta", 2)):
        if hasattr(model, name):
            return getattr(model, name), reserved
    raise ArgumentError(
        f"{type(model).__name__} has neither .bert nor .roberta; deepc.nn.attention.use_layout takes any model of "
        "transformers whose attention can be chosen"
    )


def _longer(table: torch.nn.Module, reserved: int, positions: int) -> None:
    """A table of positions [reserved + old] becomes [reserved + positions]: its rows again and again."""
    old: torch.Tensor = table.position_embeddings.weight.data  # type: ignore[assignment, union-attr]
    own = old[reserved:]
    again = own.repeat(-(-positions // len(own)), 1)[:positions]
    table.position_embeddings = torch.nn.Embedding.from_pretrained(
        torch.cat([old[:reserved], again]),
        freeze=False,
        padding_idx=table.position_embeddings.padding_idx,  # type: ignore[union-attr, arg-type]
    )
    for name, values in (("position_ids", torch.arange(reserved + positions, device="cpu")), ("token_type_ids", None)):
        buffer = getattr(table, name, None)
        if isinstance(buffer, torch.Tensor):
            made = (
                torch.zeros(reserved + positions, dtype=buffer.dtype, device="cpu")
                if values is None
                else values.to(buffer.dtype)
            )
            table.register_buffer(name, made.to(buffer.device).unsqueeze(0), persistent=False)


class SparseAttentionUtils:
    """Static helpers that take a BERT or RoBERTa of transformers to block-sparse attention."""

    @staticmethod
    def extend_position_embedding(model: Any, max_position: int) -> Any:
        """Repeats the learned positions up to max_position, which must be above what the model has. Returns the
        model."""
        encoder, reserved = _encoder(model)
        had = encoder.embeddings.position_embeddings.weight.shape[0] - reserved
        if max_position <= had:
            raise ArgumentError(f"max_position = {max_position}; the model has {had} already")
        _longer(encoder.embeddings, reserved, max_position)
        model.config.max_position_embeddings = max_position + reserved
        log.info("position embeddings go from %d to %d", had, max_position)
        return model

    @staticmethod
    def update_tokenizer_model_max_length(tokenizer: Any, max_position: int) -> Any:
        """Returns the tokenizer, which takes texts of max_position tokens."""
        tokenizer.model_max_length = max_position
        tokenizer.init_kwargs["model_max_length"] = max_position
        return tokenizer

    @staticmethod
    def replace_model_self_attention_with_sparse_self_attention(
        model: Any, max_position: int, sparsity_config: SparsityConfig
    ) -> Any:
        """use_layout of the model, and its longest sequence. Returns the model."""
        _, reserved = _encoder(model)
        use_layout(model, sparsity_config)
        model.config.max_position_embeddings = max_position + reserved
        return model

    @staticmethod
    def replace_self_attention_layer_with_sparse_self_attention_layer(
        config: Any, layers: Iterable[Any], sparsity_config: SparsityConfig
    ) -> Iterable[Any]:
        """For layers of one's own, whose `attention.self` is called with (hidden states, mask) and returns a tensor: it
        becomes a BertSparseSelfAttention with the same projections. Returns the layers."""
        for layer in layers:
            made = BertSparseSelfAttention(config, sparsity_config, getattr(config, "max_position_embeddings", 2048))
            own = layer.attention.self
            made.query, made.key, made.value = own.query, own.key, own.value
            layer.attention.self = made
        return layers

    @staticmethod
    def pad_to_block_size(
        block_size: int,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        token_type_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        pad_token_id: int,
        model_embeddings: Any,
    ) -> tuple[Any, ...]:
        """Pads a batch's rows to a multiple of block_size; masks with 0. Each may be None, but for one of input_ids and
        inputs_embeds (padded by model_embeddings(ids)). Returns (rows added, then the five in this order)."""
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None:
            raise ArgumentError("pad_to_block_size needs input_ids or inputs_embeds")
        batch, rows = given.shape[:2]
        more = -rows % block_size

        def padded(x: torch.Tensor | None, value: int) -> torch.Tensor | None:
            return x if x is None or more == 0 else pad(x, (0, more), value=value)

        if inputs_embeds is not None and more:
            ids = torch.full((batch, more), pad_token_id, dtype=torch.long, device=inputs_embeds.device)
            inputs_embeds = torch.cat([inputs_embeds, model_embeddings(ids)], dim=-2)
        return (
            more,
            padded(input_ids, pad_token_id),
            padded(attention_mask, 0),
            padded(token_type_ids, 0),
            padded(position_ids, pad_token_id),
            inputs_embeds,
        )

    @staticmethod
    def unpad_sequence_output(pad_len: int, sequence_output: torch.Tensor) -> torch.Tensor:
        """[batch, rows, ...] without the last pad_len rows."""
        return sequence_output[:, : sequence_output.shape[1] - pad_len]
