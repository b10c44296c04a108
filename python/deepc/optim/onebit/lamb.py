"""1-bit LAMB (Li et al., arXiv:2104.06069, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...core import ops as _ops  # noqa: F401  torch.ops.deepc
from ..kinds.lamb import LambStep, trust_ratio
from ..states.norms import sum_in_order
from .adam import Frozen
from .exchange import Exchange
from .method import NO_CORRECTION, Item, Zeros, by_group, gradient_of


class OneBitLambMethod(Frozen):
    """Until the freeze LAMB on averaged gradients, with a running mean of each parameter's ratio. After it momentum is
    averaged in 1 bit and the variance is frozen; a fresh variance goes on, of the gradients that follow from the
    averaged momentum, and the mean ratio is scaled by how much its root has fallen, within bounds."""

    title = "1-bit LAMB"
    names = ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh")

    def __init__(
        self, items: Sequence[Item], exchange: Exchange, zeros: Zeros, options: Mapping[str, Any], wholes: int = 0
    ) -> None:
        super().__init__(items, exchange, zeros, options, wholes)
        self._beta = float(options["coeff_beta"])
        self._least, self._most = float(options["factor_min"]), float(options["factor_max"])
        self._threshold = float(options["factor_threshold"])
        self.means = [0.0] * self.wholes  # of each parameter's ratios
        self.factors = [1.0] * self.wholes  # the last ones
        self.coefficients: list[float] = []  # of the last step

    def step(self, scale: float) -> None:
        self.steps += 1
        self.coefficients = []
        items = self.stepped()
        if not self.frozen_at:
            self._warm(items, scale)
            self.look()
            if self.frozen_at:
                for item in self.items:
                    item.states["exp_avg_sq_fresh"].copy_(item.states["exp_avg_sq"])
            return
        before = [item.states["exp_avg"].clone() for _, item in items]
        moving = [item for _, item in items]
        self.add_gradients(moving, scale)
        self.travel(moving)
        work = [(self.of[i], item, last) for (i, item), last in zip(items, before)]
        # whole parameters one after the other, so that one update is there at a time; pieces of them together
        for some in [work] if self.in_pieces else [[one] for one in work]:
            updates = [self._update(item, last) for _, item, last in some]
            sums = self.over_pieces([(k, row) for (k, _, _), (_, row) in zip(some, updates)], 3, most=1)
            wholes = self.moving() if self.in_pieces else {k: item for k, item, _ in some}
            steps = {k: self._step_of(k, item, sums[k]) for k, item in wholes.items()}
            for (k, item, _), (update, _) in zip(some, updates):
                item.param.add_(update, alpha=-float(item.group["lr"]) * steps[k])

    def _warm(self, items: Sequence[tuple[int, Item]], scale: float) -> None:
        begun = []
        for found in by_group([item for _, item in items]):
            tensors = [(i.param, gradient_of(i), i.states["exp_avg"], i.states["exp_avg_sq"]) for i in found]
            begun.append(LambStep(tensors, found[0].group, [NO_CORRECTION] * len(found), scale))
        number = {id(item): self.of[i] for i, item in items}
        order = [number[id(item)] for found in by_group([item for _, item in items]) for item in found]
        squares = [row for step in begun for row in step.squares]
        sums = self.over_pieces(list(zip(order, squares)), 2)
        ratios = {k: trust_ratio(sums[k][0], sums[k][1], item.group) for k, item in sorted(self.moving().items())}
        for step in begun:
            here, order = order[: len(step.squares)], order[len(step.squares) :]
            step.apply([ratios[k] for k in here])
        for k, ratio in ratios.items():
            self.coefficients.append(ratio)
            if ratio != 1.0:
                self.means[k] = self._beta * self.means[k] + (1 - self._beta) * ratio

    def _update(self, item: Item, last: torch.Tensor) -> tuple[torch.Tensor, tuple[float, float, float]]:
        """([n] the step over lr and ratio, (the squares of it without and with decay: 0 where there is none, the
        largest root of the frozen variance over that of the fresh one)). last: the momentum before this step."""
        group = item.group
        beta1, beta2 = (float(b) for b in group["betas"])
        eps, decay = float(group["eps"]), float(group["weight_decay"])
        m, v, fresh = (item.states[name] for name in self.names)
        item.masked(m)
        self.bound(item, m)
        gradient = last.mul_(-beta1).add_(m).div_(1 - beta1)
        fresh.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = v.sqrt().add_(eps)
        update = m / root
        factor = float((root / fresh.sqrt().add_(eps)).max())
        alone = whole = 0.0
        if decay:
            alone = _square(update)
            update.add_(item.param, alpha=decay)
            whole = _square(update)
        return update, (alone, whole, factor)

    def _step_of(self, k: int, item: Item, sums: Sequence[float]) -> float:
        """The factor on lr of parameter k, of which `item` is: the mean ratio, scaled. sums: of _update."""
        alone, whole, factor = sums
        if item.group["weight_decay"]:
            share = min(1.0, (alone / whole) ** 0.5) if whole > 0 else 1.0
            factor = factor * share + (1.0 - share)
        factor = min(max(factor, self._least), self._most)
        before = self.factors[k]
        factor = min(max(factor, before * (1 - self._threshold)), before * (1 + self._threshold))
        self.factors[k] = factor
        self.coefficients.append(self.means[k] * factor)
        return self.means[k] * factor

    def numbers(self) -> dict[str, Any]:
        return {**super().numbers(), "means": list(self.means), "factors": list(self.factors)}

    def load_numbers(self, saved: Mapping[str, Any]) -> None:
        super().load_numbers(saved)
        if self.frozen_at or not saved["frozen_at"]:
            self.means, self.factors = list(map(float, saved["means"])), list(map(float, saved["factors"]))


def _square(t: torch.Tensor) -> float:
    """Sum of squares that does not depend on the number of threads: ranks may have different ones."""
    return sum_in_order(torch.ops.deepc.norm_squared(t))
