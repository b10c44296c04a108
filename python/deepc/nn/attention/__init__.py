"""Block-sparse attention: layouts (which blocks a query sees), a module, and an attention of transformers' models.

docs/sparse-attention.md."""

from .bert import BertSparseSelfAttention, SparseAttentionUtils
from .hub import NAME, use_asked, use_layout
from .layouts import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
    choose_blocks,
    from_config,
)
from .module import SparseSelfAttention, attend

__all__ = [
    "NAME",
    "BSLongformerSparsityConfig",
    "BertSparseSelfAttention",
    "BigBirdSparsityConfig",
    "DenseSparsityConfig",
    "FixedSparsityConfig",
    "LocalSlidingWindowSparsityConfig",
    "SparseAttentionUtils",
    "SparseSelfAttention",
    "SparsityConfig",
    "VariableSparsityConfig",
    "attend",
    "choose_blocks",
    "from_config",
    "use_asked",
    "use_layout",
]
