"""1-bit Adam (Tang et al., arXiv:2102.02888, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .exchange import Exchange
from .freeze import AUTO, Freeze
from .method import Item, Method, Zeros, apply_momentum, root_of


class Frozen(Method):
    """A method with a warm-up, of which the variance stays as it is from its end on."""

    def __init__(
        self, items: Sequence[Item], exchange: Exchange, zeros: Zeros, options: Mapping[str, Any], wholes: int = 0
    ) -> None:
        super().__init__(items, exchange, zeros, options, wholes)
        self.frozen_at = 0  # the last step of the warm-up; 0: it is not over
        beta2 = float(items[0].group["betas"][1]) if items else 0.999
        self.freeze = Freeze(options["freeze_step"], beta2, float(options["var_freeze_threshold"]))

    @property
    def averages(self) -> bool:
        return not self.frozen_at

    @property
    def phase(self) -> str:
        return f"momentum in 1 bit since step {self.frozen_at + 1}" if self.frozen_at else "gradients, uncompressed"

    def look(self) -> None:
        """The end of a step of the warm-up."""
        if self.freeze.due(self.steps, self._norm):
            self.frozen_at = self.steps
            self.tell(
                f"the variance is frozen after step {self.steps} ({self.freeze.why}); from here on the ranks exchange"
                " their momentum in 1 bit an element"
            )

    def travel_as_steps(self, moving: Sequence[Item]) -> None:
        """What travels is the bounded momentum over the frozen variance's root, and comes back as momentum: linear, so
        its mean is the mean step. What is left out is sent in the same units, and then is as it was."""
        there = set(map(id, moving))
        before = [(i.states["exp_avg"], i.states["exp_avg"].clone()) for i in self.sent if id(i) not in there]
        for item in self.sent:
            self.bound(item, item.states["exp_avg"])
            item.states["exp_avg"].div_(root_of(item))
        self.travel(moving)
        for item in moving:
            item.states["exp_avg"].mul_(root_of(item))
        for state, values in before:
            state.copy_(values)

    def _norm(self) -> float:
        mine = sum(float(i.states["exp_avg_sq"].sum(dtype=torch.float64)) for i in self.sent)
        return self.exchange.agreed([mine])[0]

    def numbers(self) -> dict[str, Any]:
        found = {"steps": self.steps, "frozen_at": self.frozen_at, "norms": list(self.freeze.norms)}
        return {**found, **self.frame()}

    def load_numbers(self, saved: Mapping[str, Any]) -> None:
        self.steps, self.frozen_at = int(saved["steps"]), int(saved["frozen_at"])
        if self.freeze.step != AUTO and (self.steps >= int(self.freeze.step)) != bool(self.frozen_at):
            self.frozen_at = self.steps if self.steps >= int(self.freeze.step) else 0  # another freeze_step than then
        self.freeze.norms = list(map(float, saved["norms"]))


class OneBitAdamMethod(Frozen):
    """Until the freeze Adam on averaged gradients; after it each rank adds its own gradient to the momentum, the ranks
    average that in 1 bit, and the step divides it by the frozen variance's root; preconditioned: they average that
    quotient. Groups with non_freeze: Adam on gradients that are averaged without compression throughout."""

    title = "1-bit Adam"

    def step(self, scale: float) -> None:
        self.steps += 1
        items = [item for _, item in self.stepped()]
        if not self.frozen_at:
            self.adam(items, scale)
            self.look()
            return
        whole = [i for i in items if i.group.get("non_freeze")]
        items = [i for i in items if not i.group.get("non_freeze")]
        if whole:
            self.exchange.mean([i.grad for i in whole if i.grad is not None])
            self.adam(whole, scale)
        self.add_gradients(items, scale)
        if self.preconditioned:
            self.travel_as_steps(items)
        else:
            self.travel(items)
        for item in items:
            item.masked(item.states["exp_avg"])
            self.bound(item, item.states["exp_avg"])
            apply_momentum(item)
