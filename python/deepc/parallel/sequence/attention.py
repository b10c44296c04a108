"""Attention over sequences that are spread over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ...errors import ArgumentError
from ...plan.mesh import shares
from .exchange import Way, exchange


class DistributedAttention(torch.nn.Module):
    """local_attention(query, key, value, *args, **kwargs) of all positions and some of the heads, on each rank of
    `sequence_process_group`: heads are exchanged for positions before it, and back after it (DeepSpeed-Ulysses,
    arXiv:2309.14509). scatter_idx: the dimension of heads; gather_idx: of positions, of which every rank of the group
    has as many (of keys and values another number, if they are another sequence's). Names and order are
    deepspeed.sequence.layer's; its streams (sp_stream) are without effect.

    Heads need not be divisible by the ranks: the first ranks then take one more. Where keys and values have fewer heads
    (grouped queries), each rank gets those that its queries want, repeated where two ranks want the same; the
    local attention sees equally many queries for each."""

    def __init__(
        self,
        local_attention: Callable[..., torch.Tensor],
        sequence_process_group: Any,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
    ) -> None:
        super().__init__()
        self.local_attn, self.spg = local_attention, sequence_process_group
        self.scatter_idx, self.gather_idx = scatter_idx, gather_idx

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch_dim_idx: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """query, key, value: this rank's positions. batch_dim_idx: not needed; taken where DeepSpeed has it. Returns
        local_attention's output, of query's layout, as this rank's positions."""
        return attend(
            lambda q, k, v: self.local_attn(q, k, v, *args, **kwargs),
            (query, key, value),
            self.spg,
            heads=self.scatter_idx,
            positions=self.gather_idx,
        )


def attend(
    local: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any],
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    group: Any,
    *,
    heads: int,
    positions: int,
    out_heads: int | None = None,
    out_positions: int | None = None,
) -> torch.Tensor:
    """local(q, k, v) with all positions and this rank's heads, and its output brought back. heads, positions: their
    dimensions in qkv; out_*: in the output, if others. Collective over the group. ArgumentError for fewer heads than
    ranks."""
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    query = qkv[0]
    heads, positions = heads % query.dim(), positions % query.dim()
    key, value = (repeated(t, heads, query.shape[heads], ranks) for t in qkv[1:])
    n, length = query.shape[heads], (query.shape[positions],) * ranks
    ways = [  # keys and values of another sequence have their own number of positions
        Way(heads, positions, shares(t.shape[heads], ranks), (t.shape[positions],) * ranks) for t in (query, key, value)
    ]
    out = local(*exchange((query, key, value), ways, group))
    out_heads = heads if out_heads is None else out_heads
    out_positions = positions if out_positions is None else out_positions
    if out.shape[out_heads] != shares(n, ranks)[me] or out.shape[out_positions] != sum(length):
        raise ArgumentError(
            f"the local attention returned {list(out.shape)}; expected {shares(n, ranks)[me]} heads in dimension"
            f" {out_heads} and {sum(length)} positions in dimension {out_positions}"
        )
    (back,) = exchange((out,), (Way(out_positions, out_heads, length, shares(n, ranks)),), group)
    return back


def repeated(t: torch.Tensor, heads: int, queries: int, ranks: int) -> torch.Tensor:
    """Keys or values with so many heads that each of `ranks` gets what its share of `queries` heads wants, equally
    many queries for each head."""
    n = t.shape[heads]
    if queries < ranks:
        raise ArgumentError(
            f"attention with {queries} heads can't be shared by {ranks} ranks of one sequence; use at most {queries}"
        )
    if queries % n:
        raise ArgumentError(f"attention with {queries} heads of queries and {n} of keys: the one must divide the other")
    if queries % ranks == 0 and n % ranks == 0:
        return t
    if queries % ranks == 0 and ranks % n == 0:
        return t.repeat_interleave(ranks // n, heads)
    return t.repeat_interleave(queries // n, heads)
