"""Layouts of block-sparse attention: which blocks of keys each block of queries sees, [heads, blocks, blocks] of 0/1.

Names, arguments and results are those of DeepSpeed's sparsity configurations (deepspeed.ops.sparse_attention).
Sources: Child et al., Sparse Transformers, arXiv:1904.10509 (Fixed, Variable); Zaheer et al., Big Bird,
arXiv:2007.14062; Beltagy et al., Longformer, arXiv:2004.05150; Yuan et al., Native Sparse Attention, arXiv:2502.11089
(choose_blocks)."""

from __future__ import annotations

import inspect
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...errors import ArgumentError, ConfigError, UnsupportedError

ATTENTIONS = ("unidirectional", "bidirectional")


def _positive(name: str, value: int, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ArgumentError(f"{name} = {value!r}; it must be an integer of at least {least}")
    return value


class SparsityConfig:
    """What all layouts share. A pattern of one's own: a subclass with make_layout(seq_len).

    num_heads: heads of the layer. block: queries and keys of a block, a multiple of 16 from 16 to 128.
    different_layout_per_head: False: one layout for all heads. `attention`: "unidirectional" (no query sees a later
    key, also within a block) or "bidirectional"."""

    attention = "bidirectional"
    random: Any = random
    """What draws random blocks: Python's module (seed it equally on all ranks), or a random.Random."""

    def __init__(self, num_heads: int, block: int = 16, different_layout_per_head: bool = False) -> None:
        self.num_heads = _positive("num_heads", num_heads)
        if _positive("block", block) % 16 or block > 128:
            raise ArgumentError(f"block = {block}; it must be a multiple of 16 from 16 to 128")
        self.block = block
        self.different_layout_per_head = different_layout_per_head
        self.num_layout_heads = num_heads if different_layout_per_head else 1

    def setup_layout(self, seq_len: int) -> torch.Tensor:
        """Zeros, int64 [num_heads, blocks, blocks]. ArgumentError if seq_len is no multiple of the block."""
        if _positive("seq_len", seq_len) % self.block:
            raise ArgumentError(
                f"seq_len = {seq_len} is no multiple of block = {self.block}; pad the sequence "
                f"(SparseAttentionUtils.pad_to_block_size) or choose a smaller block"
            )
        blocks = seq_len // self.block
        return torch.zeros((self.num_heads, blocks, blocks), dtype=torch.int64, device="cpu")

    def check_and_propagate_first_head_layout(self, layout: torch.Tensor) -> torch.Tensor:
        """All heads get the first one's layout, unless each has its own."""
        if not self.different_layout_per_head:
            layout[1:] = layout[:1]
        return layout

    def make_layout(self, seq_len: int) -> torch.Tensor:
        """int64 [num_heads, blocks, blocks] of 0 and 1 for sequences of seq_len (a multiple of the block)."""
        layout = self.setup_layout(seq_len)
        row = torch.arange(layout.shape[1], device="cpu").unsqueeze(1)
        for h in range(self.num_layout_heads):
            self._fill(layout[h], h, row, row.T)
        return self.check_and_propagate_first_head_layout(layout)

    def _fill(self, layout: torch.Tensor, head: int, row: torch.Tensor, col: torch.Tensor) -> None:
        """One head's layout [blocks, blocks]; row, col: indices that broadcast to it."""
        raise UnsupportedError(
            f"{type(self).__name__} has no pattern: take one of its subclasses, or write one with make_layout(seq_len)"
        )

    def _take_attention(self, attention: str, horizontal: bool = False) -> None:
        if attention not in ATTENTIONS:
            raise ArgumentError(f"attention = {attention!r}; it must be {' or '.join(map(repr, ATTENTIONS))}")
        if horizontal and attention != "bidirectional":
            raise ArgumentError("horizontal_global_attention needs attention='bidirectional'")
        self.attention = attention

    @property
    def _past(self) -> bool:
        return self.attention == "unidirectional"


class DenseSparsityConfig(SparsityConfig):
    """All blocks; for causal models and others."""

    attention = "either"

    def _fill(self, layout: torch.Tensor, head: int, row: torch.Tensor, col: torch.Tensor) -> None:
        layout.fill_(1)


class FixedSparsityConfig(SparsityConfig):
    """Windows of num_local_blocks side by side. Of each, num_global_blocks are seen by all (the last ones; head h takes
    pattern h modulo num_different_global_patterns, further to the front), and with horizontal_global_attention see
    all."""

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_local_blocks: int = 4,
        num_global_blocks: int = 1,
        attention: str = "bidirectional",
        horizontal_global_attention: bool = False,
        num_different_global_patterns: int = 1,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        if _positive("num_local_blocks", num_local_blocks) % _positive("num_global_blocks", num_global_blocks):
            raise ArgumentError(
                f"num_local_blocks = {num_local_blocks} is no multiple of num_global_blocks = {num_global_blocks}"
            )
        self._take_attention(attention, horizontal_global_attention)
        most = num_local_blocks // num_global_blocks if different_layout_per_head else 1
        if _positive("num_different_global_patterns", num_different_global_patterns) > most:
            raise ArgumentError(
                f"num_different_global_patterns = {num_different_global_patterns}; there are {most} here "
                "(num_local_blocks / num_global_blocks, and 1 without different_layout_per_head)"
            )
        self.num_local_blocks, self.num_global_blocks = num_local_blocks, num_global_blocks
        self.horizontal_global_attention = horizontal_global_attention
        self.num_different_global_patterns = num_different_global_patterns

    def _fill(self, layout: torch.Tensor, head: int, row: torch.Tensor, col: torch.Tensor) -> None:
        wide, many = self.num_local_blocks, self.num_global_blocks
        local = row // wide == col // wide
        layout[local & (col <= row) if self._past else local] = 1
        blocks = layout.shape[0]
        at = wide - (1 + head % self.num_different_global_patterns) * many
        whole = blocks - blocks % wide
        starts = list(range(at, whole, wide))
        if whole < blocks:  # a short last window
            starts.append(max(0, min(whole + at, blocks - many)))
        for start in starts:
            layout[start if self._past else 0 :, start : start + many] = 1
            if self.horizontal_global_attention:
                layout[start : start + many] = 1


class _Globals(SparsityConfig):
    """global_block_indices: blocks that are seen by all; with global_block_end_indices, the first ones of ranges."""

    horizontal_global_attention = True
    global_block_indices: Sequence[int]
    global_block_end_indices: Sequence[int] | None

    def _take_globals(self, begin: Sequence[int], end: Sequence[int] | None) -> None:
        for name, given in (("global_block_indices", begin), ("global_block_end_indices", end)):
            one = given is not None and (isinstance(given, str) or not isinstance(given, Sequence))
            if one or any(type(index) is not int or index < 0 for index in given or ()):
                raise ArgumentError(f"{name} = {given!r}; it must be a list of integers of at least 0")
        if end is not None and (len(begin) != len(end) or any(b >= e for b, e in zip(begin, end))):
            raise ArgumentError(
                f"global_block_indices = {list(begin)} and global_block_end_indices = {list(end)}: there must be as "
                "many ends as beginnings, each above its beginning"
            )
        self.global_block_indices, self.global_block_end_indices = begin, end

    def _fill_globals(self, layout: torch.Tensor) -> None:
        ends = self.global_block_end_indices or [b + 1 for b in self.global_block_indices]
        for begin, end in zip(self.global_block_indices, ends):
            if begin < layout.shape[0]:
                layout[begin if self._past else 0 :, begin:end] = 1
                if self.horizontal_global_attention:
                    layout[begin:end] = 1


def _fill_randomly(layout: torch.Tensor, count: int, past: bool, source: Any) -> None:
    """`count` blocks of each row, drawn by `source`; `past`: of those up to the row's own, as far as there are."""
    blocks = layout.shape[0]
    if count > blocks:
        raise ArgumentError(f"num_random_blocks = {count}; a row has {blocks} blocks")
    for row in range(blocks):
        room = row + 1 if past else blocks
        layout[row, source.sample(range(room), min(count, room))] = 1


def _fill_window(layout: torch.Tensor, count: int, row: torch.Tensor, col: torch.Tensor) -> None:
    if count > layout.shape[0]:
        raise ArgumentError(f"num_sliding_window_blocks = {count}; a row has {layout.shape[0]} blocks")
    layout[(row - col).abs() <= count // 2] = 1


class VariableSparsityConfig(_Globals):
    """Windows of local_window_blocks[0], [1] .. blocks (the last size goes on), blocks for all, and random ones."""

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 0,
        local_window_blocks: Sequence[int] = (4,),
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: str = "bidirectional",
        horizontal_global_attention: bool = False,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        self.num_random_blocks = _positive("num_random_blocks", num_random_blocks, 0)
        if not local_window_blocks:
            raise ArgumentError("local_window_blocks is empty; it must have a size of windows")
        self.local_window_blocks = [_positive("local_window_blocks", n) for n in local_window_blocks]
        self._take_globals(global_block_indices, global_block_end_indices)
        self._take_attention(attention, horizontal_global_attention)
        self.horizontal_global_attention = horizontal_global_attention

    def _fill(self, layout: torch.Tensor, head: int, row: torch.Tensor, col: torch.Tensor) -> None:
        _fill_randomly(layout, self.num_random_blocks, False, self.random)
        window: list[int] = []
        sizes = iter(self.local_window_blocks)
        while len(window) < layout.shape[0]:
            window += [len(window)] * next(sizes, self.local_window_blocks[-1])
        of = torch.tensor(window[: layout.shape[0]], device="cpu")
        local = of.unsqueeze(1) == of
        layout[local & (col <= row) if self._past else local] = 1
        self._fill_globals(layout)


class BigBirdSparsityConfig(SparsityConfig):
    """num_random_blocks drawn, a window of num_sliding_window_blocks around each, and the first num_global_blocks for
    all, which see all."""

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 1,
        num_sliding_window_blocks: int = 3,
        num_global_blocks: int = 1,
        attention: str = "bidirectional",
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        self.num_random_blocks = _positive("num_random_blocks", num_random_blocks, 0)
        self.num_sliding_window_blocks = _positive("num_sliding_window_blocks", num_sliding_window_blocks)
        self.num_global_blocks = _positive("num_global_blocks", num_global_blocks, 0)
        self._take_attention(attention)

    def _fill(self, layout: torch.Tensor, head: int, row: torch.Tensor, col: torch.Tensor) -> None:
        if self.num_global_blocks > layout.shape[0]:
            raise ArgumentError(f"num_global_blocks = {self.num_global_blocks}; a row has {layout.shape[0]} blocks")
        _fill_randomly(layout, self.num_random_blocks, self._past, self.random)
        _fill_window(layout, self.num_sliding_window_blocks, row, col)
        layout[: self.num_global_blocks] = 1
        layout[:, : self.num_global_blocks] = 1
        if self._past:
            layout.tril_()


class BSLongformerSparsityConfig(_Globals):
    """A window of num_sliding_window_blocks around each block, and blocks for all, which see all."""

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_sliding_window_blocks: int = 3,
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: str = "bidirectional",
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        self.num_sliding_window_blocks = _positive("num_sliding_window_blocks", num_sliding_window_blocks)
        self._take_globals(global_block_indices, global_block_end_indices)
        self._take_attention(attention)

    def _fill(self, layout: torch.Tensor, head: int, row: torch.Tensor, col: torch.Tensor) -> None:
        _fill_window(layout, self.num_sliding_window_blocks, row, col)
        self._fill_globals(layout)
        if self._past:
            layout.tril_()


class LocalSlidingWindowSparsityConfig(SparsityConfig):
    """A window of num_sliding_window_blocks around each block; unidirectional: its half up to the block itself."""

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        num_sliding_window_blocks: int = 3,
        attention: str = "unidirectional",
    ) -> None:
        super().__init__(num_heads, block)
        self.num_sliding_window_blocks = _positive("num_sliding_window_blocks", num_sliding_window_blocks)
        self._take_attention(attention)

    def _fill(self, layout: torch.Tensor, head: int, row: torch.Tensor, col: torch.Tensor) -> None:
        _fill_window(layout, self.num_sliding_window_blocks, row, col)
        if self._past:
            layout.tril_()


MODES: dict[str, type[SparsityConfig]] = {
    "dense": DenseSparsityConfig,
    "fixed": FixedSparsityConfig,
    "variable": VariableSparsityConfig,
    "bigbird": BigBirdSparsityConfig,
    "bslongformer": BSLongformerSparsityConfig,
    "local": LocalSlidingWindowSparsityConfig,
}


def from_config(section: Mapping[str, Any], num_heads: int) -> SparsityConfig:
    """The layout of a configuration's `sparse_attention`: {"mode": one of MODES (default fixed), and that class's
    arguments}. ConfigError for others."""
    given = dict(section)
    mode = given.pop("mode", "fixed")
    if mode not in MODES:
        raise ConfigError(f"sparse_attention.mode = {mode!r}; there are {', '.join(MODES)}")
    kind = MODES[mode]
    known = list(inspect.signature(kind).parameters)[1:]
    if unknown := [k for k in given if k not in known]:
        raise ConfigError(f"sparse_attention.{unknown[0]} is unknown for mode {mode!r}; it has {', '.join(known)}")
    try:
        return kind(num_heads, **given)
    except (ArgumentError, TypeError) as exc:
        raise ConfigError(f"sparse_attention: {exc}") from None


def to_section(config: SparsityConfig) -> dict[str, Any] | None:
    """What from_config makes the same layout of, as JSON has it; None for a class of one's own."""
    mode = next((mode for mode, kind in MODES.items() if type(config) is kind), None)
    if mode is None:
        return None
    given = {name: getattr(config, name) for name in list(inspect.signature(MODES[mode]).parameters)[1:]}
    return {
        "mode": mode,
        **{k: list(v) if isinstance(v, Sequence) and k != "attention" else v for k, v in given.items()},
    }


def choose_blocks(
    q: torch.Tensor, k: torch.Tensor, block: int, count: int, is_causal: bool = False, local: int = 1
) -> torch.Tensor:
    """A layout chosen from the data: for each block of queries the `count` blocks of keys whose means fit its own mean
    best (arXiv:2502.11089, without its learned compression), and the `local` blocks up to its own.

    q: [batch, heads, rows, dim]; k: [batch, kv_heads, rows, dim]; rows a multiple of block. Returns bool [batch, heads,
    blocks, blocks], for `attend`. No gradient flows through the choice."""
    batch, heads, rows, dim = q.shape
    if rows % block or k.shape[2] != rows:
        raise ArgumentError(f"q and k have {rows} and {k.shape[2]} rows; both must be one multiple of block = {block}")
    blocks = rows // block
    with torch.no_grad():
        of_q = q.reshape(batch, heads, blocks, block, dim).float().mean(3)
        of_k = k.reshape(batch, k.shape[1], blocks, block, dim).float().mean(3)
        scores = of_q @ of_k.repeat_interleave(heads // k.shape[1], 1).transpose(2, 3)
        row = torch.arange(blocks, device=scores.device).unsqueeze(1)
        if is_causal:
            scores.masked_fill_(row < row.T, float("-inf"))
        best = scores.topk(min(_positive("count", count), blocks), dim=-1).indices
        layout = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
        near = (row - row.T >= 0) & (row - row.T < local)
        return (layout | near) & (row >= row.T) if is_causal else layout | near
