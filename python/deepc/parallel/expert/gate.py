"""The experts of a token: top-1 (Switch, arXiv:2101.03961), top-2 (GShard, arXiv:2006.16668) and top-k gates, the
places that an expert has, and who is left out. Routes are lists of indices: no tensor has tokens x experts x places."""

from __future__ import annotations

import ctypes
import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from ...errors import ArgumentError, MisuseError, numeric
from ..axes import AxisGroup, without_values
from ..sequence.loss import of_all_ranks

NOISE = (None, "None", "Jitter", "RSample")
JITTER = 1e-2  # Switch, table 11


class Routes(NamedTuple):
    """S tokens, k choices each, E experts, and n rows: the choices that an expert has a place for, by expert."""

    tokens: torch.Tensor
    """[n] int64: the token of each row."""
    slots: torch.Tensor
    """[k, S] int64: the row of a token's j-th choice; n where it was left out."""
    weights: torch.Tensor
    """[k, S] fp32, differentiable: what the row's output counts; 0 where it was left out."""
    rows: torch.Tensor
    """[E] int64: rows of each expert."""
    chosen: torch.Tensor
    """[E] int64: tokens that chose each expert, whether there was a place or not."""
    balance: torch.Tensor
    """Scalar fp32, differentiable: the load-balance loss, 1 for even loads."""
    loads: torch.Tensor
    """[2E + 1] fp32, what it is made of, sums over tokens: their gates, differentiable, their picks, and one each."""

    def of_each(self) -> list[int]:
        """`rows` as numbers. Those of tensors without values (a dry run) are evenly many."""
        if without_values(self.rows):
            each, rest = divmod(len(self.tokens), len(self.rows))
            return [each + (e < rest) for e in range(len(self.rows))]
        found: list[int] = self.rows.tolist()
        return found


def capacity_of(tokens: int, experts: int, factor: float, least: int) -> int:
    """Places of an expert: tokens / experts x factor, rounded up, at least `least`. In fp32, as DeepSpeed counts."""
    single = ctypes.c_float
    return max(math.ceil(single(single(factor).value * single(tokens / experts).value).value), least)


def route(
    logits: torch.Tensor,
    k: int,
    *,
    capacity: int | None = None,
    keep: Literal["position", "random", "probability"] = "position",
    by_choice: bool | None = None,
    used: torch.Tensor | None = None,
    noise: Literal["all", "second"] | None = None,
) -> Routes:
    """From logits [S, E] fp32. capacity: places of an expert; None leaves no token out. keep: who gets them: the first,
    random ones, or those of the highest gate. by_choice: all first choices come before all second ones (GShard; the
    default for k = 2), or tokens one after the other. used [S] bool: tokens that count; the others go nowhere.
    noise: Gumbel noise on the logits, so that experts are drawn by their probability rather than the best taken: for
    "all" choices, or the "second" of two."""
    tokens, experts = logits.shape
    gates = F.softmax(logits, dim=1)
    with torch.no_grad():
        choices = _choices(logits, gates, k, noise)
        if used is not None:
            choices = choices.masked_fill(~used, experts)
        priority = None
        if capacity is not None and keep == "random":
            priority = torch.rand(choices.shape, device=logits.device, dtype=torch.float32)
        elif capacity is not None and keep == "probability":
            priority = gates.gather(1, choices.t().clamp(max=experts - 1)).t()
        first = k == 2 if by_choice is None else by_choice
        order, rows, chosen = _placed(choices, experts, capacity, priority, first)
        n = order.numel()
        slots = order.new_full((k * tokens,), n)
        slots[order] = torch.arange(n, device=order.device)
        slots = slots.view(k, tokens) if first else slots.view(tokens, k).t().contiguous()
        picked = choices if k > 2 else choices[:1]  # the loss of top-2 looks at first choices (GShard, section 2.2)
        picks = _counts(picked.reshape(-1), experts)[:experts].to(gates.dtype) / len(picked)
    loads = torch.cat([gates.sum(0), picks, gates.new_full((1,), tokens)])
    weights = gates.gather(1, choices.t().clamp(max=experts - 1)).t() * (slots < n)
    if k > 1:
        weights = weights / weights.sum(0).clamp(min=torch.finfo(weights.dtype).eps)
    own = order % max(tokens, 1) if first else order // k
    return Routes(own, slots, weights, rows, chosen, balance_of(loads), loads)


def balance_of(loads: torch.Tensor) -> torch.Tensor:
    """The load-balance loss of Routes.loads, or of their sum over calls that are one whole."""
    experts, tokens = len(loads) // 2, loads[-1].clamp(min=1)
    gates, picks = loads[:-1].view(2, experts)
    shares: torch.Tensor = gates / tokens * (picks / tokens)
    return shares.sum() * experts


def _choices(logits: torch.Tensor, gates: torch.Tensor, k: int, noise: str | None) -> torch.Tensor:
    """[k, S] int64: each token's experts, in its order of preference."""
    scores = gates if noise is None else logits + _gumbel(logits)
    if noise != "second":
        return scores.topk(k, dim=1).indices.t() if k > 1 else scores.argmax(1)[None]
    best = gates.argmax(1, keepdim=True)
    return torch.cat([best, scores.scatter(1, best, -math.inf).argmax(1, keepdim=True)], 1).t()


def _gumbel(like: torch.Tensor) -> torch.Tensor:
    """-log(-log(u)): the largest of logits + noise is a draw by their softmax."""
    return -torch.empty_like(like).exponential_().log()


def _placed(
    choices: torch.Tensor, experts: int, capacity: int | None, priority: torch.Tensor | None, by_choice: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(the choices that have a place, as indices into the flattened ones, by expert; rows and wishes of each expert).
    choices: E for none."""

    def flat(t: torch.Tensor) -> torch.Tensor:
        return (t if by_choice else t.t()).reshape(-1)

    ids = flat(choices)
    counts = _counts(ids, experts)
    chosen = counts[:experts]
    if priority is None:
        order = ids.argsort(stable=True)
    else:
        order = flat(priority).argsort(stable=True, descending=True)
        order = order[ids[order].argsort(stable=True)]
    expert = ids[order]
    if capacity is None:
        return _those(order, expert < experts, order.numel()), chosen, chosen
    position = torch.arange(order.numel(), device=order.device) - (counts.cumsum(0) - counts)[expert]
    order = _those(order, (position < capacity) & (expert < experts), experts * capacity)
    if priority is not None:  # by token again
        order = order.sort().values
        order = order[ids[order].argsort(stable=True)]
    return order, chosen.clamp(max=capacity), chosen


def _counts(ids: torch.Tensor, experts: int) -> torch.Tensor:
    """[E + 1]: how often each is there."""
    if without_values(ids):
        return ids.new_empty(experts + 1)
    return torch.bincount(ids, minlength=experts + 1)


def _those(order: torch.Tensor, wanted: torch.Tensor, most: int) -> torch.Tensor:
    """order[wanted]; of tensors without values (a dry run) as many as there may be."""
    return order[:most].clone() if without_values(order) else order[wanted]


class TopKGate(torch.nn.Module):
    """A linear gate `wg` [E, M] without bias and the routes that it gives; computed in fp32 whatever the model's dtype
    is (Switch, section 2.4), under autocast too."""

    @numeric
    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        ep_group: object = None,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        """As MoE's; ep_group: DeepSpeed's argument, not looked at (routes need no other rank)."""
        super().__init__()
        if not 1 <= k <= num_experts:
            raise ArgumentError(f"MoE: k = {k} experts for a token must be from 1 to num_experts = {num_experts}")
        if noisy_gate_policy not in NOISE:
            raise MisuseError(f"MoE: noisy_gate_policy = {noisy_gate_policy!r} is none of 'Jitter', 'RSample', None")
        for name, factor in (("capacity_factor", capacity_factor), ("eval_capacity_factor", eval_capacity_factor)):
            if not 0 < factor < math.inf:
                raise ArgumentError(f"MoE: {name} = {factor!r} must be above 0 (drop_tokens=False leaves no token out)")
        self.wg = torch.nn.Linear(model_dim, num_experts, bias=False)
        self.sequence: AxisGroup | None = None  # the ranks whose positions are one sequence; share_sequences
        self.k, self.num_experts = k, num_experts
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor
        self.min_capacity = min_capacity
        self.noisy_gate_policy = None if noisy_gate_policy == "None" else noisy_gate_policy
        self.drop_tokens, self.use_rts = drop_tokens, use_rts
        self.top2_2nd_expert_sampling = top2_2nd_expert_sampling

    def forward(self, input: torch.Tensor, used_token: torch.Tensor | None = None) -> Routes:
        """input [S, M]; used_token: S numbers in any shape, 0 for tokens that don't count."""
        if input.dim() != 2 or input.shape[1] != self.wg.in_features:
            raise ArgumentError(
                f"MoE: input of shape {list(input.shape)}; the last dimension must be hidden_size ="
                f" {self.wg.in_features}"
            )
        if used_token is not None:
            used_token = used_token.reshape(-1) != 0
            if used_token.numel() != len(input):
                raise ArgumentError(f"MoE: used_token has {used_token.numel()} elements for {len(input)} tokens")
        with torch.autocast(input.device.type, enabled=False):
            x = input.float()
            if self.training and self.noisy_gate_policy == "Jitter":
                x = x * torch.empty_like(x).uniform_(1 - JITTER, 1 + JITTER)
            logits = F.linear(x, self.wg.weight.float())
            routes = self._routes(logits, used_token)
            if self.sequence is None or without_values(logits):
                return routes
            everyones = of_all_ranks(routes.loads[None], self.sequence.process_group)
            return routes._replace(balance=balance_of(everyones.sum(0)))

    def places(self, tokens: int) -> int | None:
        """Of an expert, for choices of `tokens` tokens; None: for all."""
        if not self.drop_tokens:
            return None
        factor = (self.capacity_factor if self.training else self.eval_capacity_factor) * self.k
        return capacity_of(tokens, self.num_experts, factor, self.min_capacity)

    def most_rows(self, tokens: int, experts: int, ranks: int = 1) -> int:
        """Of `experts` of the experts, for `tokens` tokens of each of `ranks` ranks."""
        chosen, places = tokens * min(self.k, experts), self.places(tokens)
        return ranks * (chosen if places is None else min(chosen, experts * places))

    def _routes(self, logits: torch.Tensor, used: torch.Tensor | None) -> Routes:
        k, capacity = self.k, self.places(len(logits))
        keep: Literal["position", "random", "probability"] = "probability" if k > 2 else "position"
        if k == 1 and self.use_rts and self.training:
            keep = "random"
        noise: Literal["all", "second"] | None = None
        if self.training and self.noisy_gate_policy == "RSample":
            noise = "all"
        elif self.training and k == 2 and self.top2_2nd_expert_sampling:
            noise = "second"
        return route(logits, k, capacity=capacity, keep=keep, used=used, noise=noise)
