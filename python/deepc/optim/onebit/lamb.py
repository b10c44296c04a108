"""1-bit LAMB (Li et al., arXiv:2104.06069, Algorithm 1), and deepc's own with LAMB's ratios after the freeze."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...core import ops as _ops  # noqa: F401  torch.ops.deepc
from ...errors import ArgumentError
from ..kinds.lamb import LambItem, LambStep, trust_ratio
from ..states.formats import MOMENTS
from ..states.norms import sum_in_order
from .adam import Frozen
from .exchange import Exchange
from .method import NO_CORRECTION, Item, Zeros, by_group, gradient_of, root_of


class OneBitLambMethod(Frozen):
    """Until the freeze LAMB on averaged gradients, with a running mean of each parameter's ratio. After it momentum is
    averaged in 1 bit and the variance is frozen; a fresh variance goes on, of the gradients that follow from the
    averaged momentum, and the mean ratio is scaled by how much its root has fallen, within bounds."""

    title = "1-bit LAMB"
    names: tuple[str, ...] = ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh")
    ratios = "frozen"

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
                self._begin()
            return
        self._after(items, scale)

    def _begin(self) -> None:
        """The end of the warm-up."""
        for item in self.items:
            item.states["exp_avg_sq_fresh"].copy_(item.states["exp_avg_sq"])

    def _after(self, items: Sequence[tuple[int, Item]], scale: float) -> None:
        """A step after the freeze."""
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
            tensors = [LambItem(i.param, gradient_of(i), [i.states[n] for n in MOMENTS]) for i in found]
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
        found = {**super().numbers(), "means": list(self.means), "factors": list(self.factors)}
        return found if self.ratios == OneBitLambMethod.ratios else {**found, "ratios": self.ratios}

    def load_numbers(self, saved: Mapping[str, Any]) -> None:
        then = saved.get("ratios", OneBitLambMethod.ratios)
        if then != self.ratios and saved["frozen_at"]:
            raise ArgumentError(
                f"OneBitLamb(ratios={self.ratios!r}): the checkpoint was saved after the freeze with ratios={then!r},"
                f" and what its ranks owe is in other units. Load it with ratios={then!r}, or one of the warm-up"
            )
        super().load_numbers(saved)
        if self.frozen_at or not saved["frozen_at"]:
            self.means, self.factors = list(map(float, saved["means"])), list(map(float, saved["factors"]))


class LiveLambMethod(OneBitLambMethod):
    """The warm-up is 1-bit LAMB's. After it the variance is frozen, and each step has LAMB's own ratio: of the norms of
    the parameter and of the step that came, which all ranks have alike. What travels is the bounded momentum over the
    frozen variance's root (linear in the momentum, so its mean is the mean step): a block's one magnitude is then that
    of steps, and no element's step is another's momentum over a small root of its own. max_update must be above 0."""

    names = ("exp_avg", "exp_avg_sq")
    ratios = "live"

    def _begin(self) -> None:
        """No other variance goes on."""

    def _after(self, items: Sequence[tuple[int, Item]], scale: float) -> None:
        moving = [item for _, item in items]
        self.add_gradients(moving, scale)
        self.travel_as_steps(moving)
        work = [(self.of[i], item) for i, item in items]
        # whole parameters one after the other, so that one update is there at a time; pieces of them together
        for some in [work] if self.in_pieces else [[one] for one in work]:
            updates = [self._live_update(item) for _, item in some]
            squares = [(k, (_square(item.param), _square(update))) for (k, item), update in zip(some, updates)]
            sums = self.over_pieces(squares, 2)
            wholes = self.moving() if self.in_pieces else dict(some)
            ratios = {k: trust_ratio(sums[k][0], sums[k][1], item.group) for k, item in wholes.items()}
            self.coefficients += ratios.values()
            for (k, item), update in zip(some, updates):
                item.param.add_(update, alpha=-float(item.group["lr"]) * ratios[k])

    def _live_update(self, item: Item) -> torch.Tensor:
        """[n] the step over lr and ratio."""
        m = item.states["exp_avg"]
        item.masked(m)
        self.bound(item, m)
        update = m / root_of(item)
        return update.add_(item.param, alpha=float(item.group["weight_decay"]))


def _square(t: torch.Tensor) -> float:
    """Sum of squares that does not depend on the number of threads: ranks may have different ones."""
    return sum_in_order(torch.ops.deepc.norm_squared(t).cpu())
