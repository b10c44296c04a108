"""Losses over sequences that are spread over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ...errors import ArgumentError


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: torch.Tensor, count: torch.Tensor, group: Any) -> torch.Tensor:
        both = torch.stack((total.double(), count.to(total.device, torch.float64)))
        dist.all_reduce(both, group=group)
        ctx.scale = dist.get_world_size(group) / both[1]  # a tensor: infinite without labels, and no wait for a device
        return (both[0] / both[1]).to(total.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return (gradient * ctx.scale).to(gradient.dtype), None, None


class _Everyones(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.ranks, ctx.me = dist.get_world_size(group), dist.get_rank(group)
        parts = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in range(ctx.ranks)]
        dist.all_gather(parts, mine.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.chunk(ctx.ranks)[ctx.me] * ctx.ranks, None


def of_all_ranks(rows: torch.Tensor, group: Any) -> torch.Tensor:
    """[n, ...] of each rank, equally many, as [ranks x n, ...] of all: for a loss that is no mean over tokens, and is
    equal on every rank. Its gradient is that of ranks whose gradients are averaged (mean_over_ranks). Collective."""
    return _Everyones.apply(rows, group)  # type: ignore[no-any-return,no-untyped-call]


def mean_over_ranks(total: torch.Tensor, count: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum of all ranks' `total` over that of all their `count` (tensors of one element): the mean over the tokens
    of whole sequences, equal on every rank, however many each has. Its gradient is that of ranks whose gradients are
    averaged, as an engine with sequence_parallel_size averages them: for sums (no engine) divide by the ranks.
    Collective over the group. NaN where no rank counts any."""
    return _Mean.apply(total, count, group)  # type: ignore[no-any-return,no-untyped-call]


def cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, group: Any, *, ignore_index: int = -100, items: Any = None
) -> torch.Tensor:
    """Of this rank's positions: logits [..., vocabulary], labels [...] already shifted (a position's label is the next
    token, which may be another rank's: shard() does it). Returns the mean over all ranks' labels that are not
    `ignore_index`, or their sum over `items` (a number or a tensor of one element, equal on all ranks: transformers'
    num_items_in_batch, of whole sequences); see mean_over_ranks."""
    if logits.shape[:-1] != labels.shape:
        raise ArgumentError(f"logits {list(logits.shape)} and labels {list(labels.shape)} have other positions")
    labels = labels.flatten()
    total = F.cross_entropy(logits.flatten(0, -2).float(), labels, ignore_index=ignore_index, reduction="sum")
    count = (labels != ignore_index).sum()
    if items is not None:  # each rank brings its part of them
        whole = torch.as_tensor(items, dtype=torch.float64, device=count.device).reshape(())
        count = whole / dist.get_world_size(group)
    return mean_over_ranks(total, count, group)
