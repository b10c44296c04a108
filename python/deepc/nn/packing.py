"""Samples of any length packed into rows, for a DataLoader's collate_fn (docs/packing.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import ArgumentError, numeric

_KEYS = ("input_ids", "labels", "attention_mask")


class PackedCollator:
    """Packs samples into rows, one behind the other; position ids begin again with each, by which attention keeps them
    apart: `attn_implementation="deepc_sparse"`, and transformers' "sdpa", "eager" and (one row) flash attention where
    model.config.use_cache is False (with a cache, transformers doesn't look at the positions).

    length: tokens of a row. Samples go where they leave the least room, longest first (best-fit decreasing; Johnson
    1974), and rows are filled up with pad_id. None: a single row as long as all of them. multiple_of: a row's length is
    rounded up to it (length must be one).

    A sample is a mapping with `input_ids` [tokens] and, if they differ, `labels` [tokens], lists or tensors. Where
    its `attention_mask` is 0 it has padding, which is left out. Of causal language models: the label of a sample's
    first token, which the end of the one before would have to predict, is ignore_index, and so is all of the filling.

    Returns int64 [rows, length] `input_ids`, `labels` and `position_ids`, and no attention mask: with one, transformers
    would not look at the positions. ArgumentError for an empty sample, one longer than a row (cut it in the dataset),
    a wrong number of labels, or a key it does not know."""

    @numeric
    def __init__(
        self, length: int | None = None, *, pad_id: int = 0, ignore_index: int = -100, multiple_of: int = 1
    ) -> None:
        if multiple_of < 1 or (length is not None and (length < 1 or length % multiple_of)):
            raise ArgumentError(
                f"length {length} must be None or >= 1 and a multiple of multiple_of = {multiple_of}, which is >= 1"
            )
        self.length, self.pad_id, self.ignore_index, self.multiple_of = length, pad_id, ignore_index, multiple_of

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        if not samples:
            raise ArgumentError("there are no samples to pack")
        pairs = [self._tokens(i, s) for i, s in enumerate(samples)]
        rows = self._rows([len(ids) for ids, _ in pairs])
        total = sum(len(ids) for ids, _ in pairs)
        length = self.length or -(-total // self.multiple_of) * self.multiple_of
        ids = torch.full((len(rows), length), self.pad_id, dtype=torch.int64, device="cpu")
        labels = torch.full((len(rows), length), self.ignore_index, dtype=torch.int64, device="cpu")
        positions = torch.empty((len(rows), length), dtype=torch.int64, device="cpu")
        for r, row in enumerate(rows):
            at = 0
            for i in row:
                end = at + len(pairs[i][0])
                ids[r, at:end], labels[r, at:end] = pairs[i]
                labels[r, at] = self.ignore_index
                positions[r, at:end] = torch.arange(end - at, device="cpu")
                at = end
            positions[r, at:] = torch.arange(length - at, device="cpu")  # the filling sees itself alone
        return {"input_ids": ids, "labels": labels, "position_ids": positions}

    def _tokens(self, index: int, sample: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        if "input_ids" not in sample or (unknown := [k for k in sample if k not in _KEYS]):
            names = unknown if "input_ids" in sample else list(sample)
            raise ArgumentError(
                f"sample {index} of the batch has {', '.join(map(repr, names))}: expected 'input_ids', and 'labels' and"
                " 'attention_mask' at most; leave other columns out of the dataset"
            )
        found = {k: torch.as_tensor(sample[k], device="cpu") for k in _KEYS if sample.get(k) is not None}
        tokens = [(k, x) for k, x in found.items() if k != "attention_mask"]
        wrong = [f"{k} of {x.dtype}" for k, x in tokens if x.numel() and x.is_floating_point()]
        if wrong := wrong if "input_ids" in found else ["input_ids = None"]:
            raise ArgumentError(f"sample {index} of the batch has {wrong[0]}: expected numbers of tokens, as integers")
        found = {k: x.to(torch.int64) for k, x in found.items()}
        ids = found["input_ids"]
        for name, x in found.items():
            if x.dim() != 1 or len(x) != len(ids):
                raise ArgumentError(
                    f"sample {index} of the batch: {name} has the shape {tuple(x.shape)}; expected ({ids.numel()},)"
                )
        labels = found.get("labels", ids)
        if "attention_mask" in found:
            seen = found["attention_mask"] != 0
            ids, labels = ids[seen], labels[seen]
        if not len(ids) or (self.length is not None and len(ids) > self.length):
            raise ArgumentError(
                f"sample {index} of the batch has {len(ids)} tokens; a row takes 1 to {self.length or 'any number'}:"
                " cut longer samples in the dataset, leave empty ones out, or give a larger length"
            )
        return ids, labels

    def _rows(self, sizes: list[int]) -> list[list[int]]:
        """Which samples lie in which row."""
        if self.length is None:
            return [list(range(len(sizes)))]
        rows: list[list[int]] = []
        room: list[int] = []
        for i in sorted(range(len(sizes)), key=lambda k: -sizes[k]):
            fits = [r for r, left in enumerate(room) if left >= sizes[i]]
            if fits:
                best = min(fits, key=room.__getitem__)
            else:
                best = len(rows)
                rows.append([])
                room.append(self.length)
            rows[best].append(i)
            room[best] -= sizes[i]
        return rows
