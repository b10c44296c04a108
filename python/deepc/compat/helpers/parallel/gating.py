"""deepspeed.moe.sharded_moe's gates as functions, for scripts with experts of their own: over the routes of
parallel.expert.gate, which are lists of indices, in DeepSpeed's two forms."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ....errors import ArgumentError
from ....parallel.expert.gate import Routes, capacity_of, route

TUTEL_INSTALLED = False  # what scripts ask before use_tutel=True, which is without effect
Gating = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""(l_aux, combine_weights [tokens, experts, places], dispatch_mask of the same shape, exp_counts)."""
Sparse = tuple[torch.Tensor, torch.Tensor, int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""(l_aux, places, experts, the experts [k, tokens] int32 (-1: left out), places there, weights, exp_counts)."""


def top1gating(
    logits: torch.Tensor,
    capacity_factor: float,
    min_capacity: int,
    used_token: torch.Tensor | None = None,
    noisy_gate_policy: str | None = None,
    drop_tokens: bool = True,
    use_rts: bool = True,
    ep_group: Any = None,
    sparse_routes: bool = False,
    use_tutel: bool = False,
) -> Gating | Sparse:
    """Each token's likeliest expert (noisy_gate_policy "RSample": drawn). use_rts: the places of an expert go by lot,
    else to the first. drop_tokens=False: places for all, equally many on the ranks of ep_group (collective).
    use_tutel: without effect."""
    capacity = capacity_of(len(logits), logits.shape[1], capacity_factor, min_capacity) if drop_tokens else None
    routes = route(
        logits.float(),
        1,
        capacity=capacity,
        keep="random" if use_rts else "position",
        used=None if used_token is None else used_token.reshape(-1) != 0,
        noise="all" if noisy_gate_policy == "RSample" else None,
    )
    return _told(routes, capacity, ep_group, sparse_routes)


def top2gating(
    logits: torch.Tensor,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: Any = None,
    top2_2nd_expert_sampling: bool = True,
    sparse_routes: bool = False,
) -> Gating | Sparse:
    """The two likeliest, or (top2_2nd_expert_sampling) the second drawn; first choices have the first places."""
    capacity = capacity_of(len(logits), logits.shape[1], 2 * capacity_factor, min_capacity) if drop_tokens else None
    noise = "second" if top2_2nd_expert_sampling else None
    routes = route(logits.float(), 2, capacity=capacity, noise=noise)  # type: ignore[arg-type]
    return _told(routes, capacity, ep_group, sparse_routes)


def topkgating(
    logits: torch.Tensor,
    k: int,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: Any = None,
    drop_policy: str = "probs",
    sparse_routes: bool = False,
) -> Gating | Sparse:
    """The likeliest k. drop_policy: places go to the highest probabilities ("probs") or to the first tokens
    ("position")."""
    if drop_policy not in ("probs", "position"):
        raise ArgumentError(f"topkgating(drop_policy={drop_policy!r}): it is 'probs' or 'position'")
    capacity = capacity_of(len(logits), logits.shape[1], k * capacity_factor, min_capacity) if drop_tokens else None
    routes = route(
        logits.float(),
        k,
        capacity=capacity,
        keep="probability" if drop_policy == "probs" else "position",
        by_choice=False,
    )
    balance = (logits.float().softmax(1).mean(0) * routes.chosen).sum() * (logits.shape[1] / (k * max(len(logits), 1)))
    weights = routes.weights if k > 1 else (routes.slots < len(routes.tokens)).to(routes.weights.dtype)
    return _told(routes._replace(balance=balance, weights=weights), capacity, ep_group, sparse_routes)


def _told(routes: Routes, capacity: int | None, ep_group: Any, sparse: bool) -> Gating | Sparse:
    """capacity None: as many places as the fullest expert has tokens."""
    slots, rows, experts = routes.slots, routes.rows, len(routes.rows)
    if capacity is None:
        fullest = rows.max()
        if ep_group is not None and dist.get_world_size(ep_group) > 1:
            dist.all_reduce(fullest, dist.ReduceOp.MAX, group=ep_group)
        capacity = int(fullest)
    n = len(routes.tokens)
    of_row = torch.arange(experts, device=slots.device).repeat_interleave(rows)
    place = torch.arange(n, device=slots.device) - (rows.cumsum(0) - rows)[of_row]
    kept = slots < n
    there = slots.clamp(max=max(n - 1, 0))
    expert, at = (of_row[there], place[there]) if n else (torch.zeros_like(slots), torch.zeros_like(slots))
    if sparse:
        return (
            routes.balance,
            torch.tensor(capacity, device="cpu"),
            experts,
            expert.masked_fill(~kept, -1).int(),
            at.masked_fill(~kept, 0).int(),
            routes.weights,
            routes.chosen,
        )
    token = torch.arange(slots.shape[1], device=slots.device).expand_as(slots)
    where = (token[kept], expert[kept], at[kept])
    shape = (slots.shape[1], experts, capacity)
    combine = routes.weights.new_zeros(shape).index_put(where, routes.weights[kept])
    mask = torch.zeros(shape, dtype=torch.bool, device=slots.device)
    mask[where] = True
    return routes.balance, combine, mask, routes.chosen
