"""1-bit LAMB (Li et al., arXiv:2104.06069, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...core import ops as _ops  # noqa: F401  torch.ops.deepc
from ..kinds.lamb import step_lamb
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

    def __init__(self, items: Sequence[Item], exchange: Exchange, zeros: Zeros, options: Mapping[str, Any]) -> None:
        super().__init__(items, exchange, zeros, options)
        self._beta = float(options["coeff_beta"])
        self._least, self._most = float(options["factor_min"]), float(options["factor_max"])
        self._threshold = float(options["factor_threshold"])
        self.means = [0.0] * len(self.items)  # of each item's ratios
        self.factors = [1.0] * len(self.items)  # the last ones
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
        for (i, item), last in zip(items, before):
            self._apply(i, item, last)

    def _warm(self, items: Sequence[tuple[int, Item]], scale: float) -> None:
        ratios: dict[int, float] = {}
        for found in by_group([item for _, item in items]):
            tensors = [(i.param, gradient_of(i), i.states["exp_avg"], i.states["exp_avg_sq"]) for i in found]
            steps = [NO_CORRECTION] * len(found)
            ratios.update(zip(map(id, found), step_lamb(tensors, found[0].group, steps, scale)))
        for i, item in items:
            ratio = ratios[id(item)]
            self.coefficients.append(ratio)
            if ratio != 1.0:
                self.means[i] = self._beta * self.means[i] + (1 - self._beta) * ratio

    def _apply(self, i: int, item: Item, last: torch.Tensor) -> None:
        """last: the momentum before this step."""
        group = item.group
        beta1, beta2 = (float(b) for b in group["betas"])
        lr, eps, decay = float(group["lr"]), float(group["eps"]), float(group["weight_decay"])
        m, v, fresh = (item.states[name] for name in self.names)
        item.masked(m)
        self.bound(item, m)
        gradient = last.mul_(-beta1).add_(m).div_(1 - beta1)
        fresh.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = v.sqrt().add_(eps)
        update = m / root
        factor = float((root / fresh.sqrt().add_(eps)).max())
        if decay:
            alone = _square(update)
            update.add_(item.param, alpha=decay)
            whole = _square(update)
            share = min(1.0, (alone / whole) ** 0.5) if whole > 0 else 1.0
            factor = factor * share + (1.0 - share)
        factor = min(max(factor, self._least), self._most)
        before = self.factors[i]
        factor = min(max(factor, before * (1 - self._threshold)), before * (1 + self._threshold))
        self.factors[i] = factor
        self.coefficients.append(self.means[i] * factor)
        item.param.add_(update, alpha=-lr * self.means[i] * factor)

    def numbers(self) -> dict[str, Any]:
        return {**super().numbers(), "means": list(self.means), "factors": list(self.factors)}

    def load_numbers(self, saved: Mapping[str, Any]) -> None:
        super().load_numbers(saved)
        if self.frozen_at or not saved["frozen_at"]:
            self.means, self.factors = list(map(float, saved["means"])), list(map(float, saved["factors"]))


def _square(t: torch.Tensor) -> float:
    """Sum of squares that does not depend on the number of threads: ranks may have different ones."""
    return sum_in_order(torch.ops.deepc.norm_squared(t))
