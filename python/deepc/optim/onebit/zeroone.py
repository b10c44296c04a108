"""0/1 Adam (Lu et al., arXiv:2202.06009, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from .exchange import Exchange
from .method import Item, Method, Zeros, apply_momentum, gradient_of, root_of

_COUNTS = ("steps", "var_interval", "var_counter", "local_interval", "local_counter")


class ZeroOneAdamMethod(Method):
    """Up to step var_freeze_step gradients are averaged uncompressed at the steps that update the variance, which come
    ever more rarely (an interval doubles after var_update_scaler of them), and in 1 bit at the others. After it ranks
    step by themselves, and average what they have moved (momentum_accumulator, in units of momentum) in 1 bit at every
    k-th step; k doubles after local_step_scaler steps, up to local_step_clipper. preconditioned: they average what they
    have moved as it is."""

    title = "0/1 Adam"
    names = ("exp_avg", "exp_avg_sq", "momentum_accumulator")
    travels = "momentum_accumulator"
    errors_in_warm_up = True

    def __init__(
        self, items: Sequence[Item], exchange: Exchange, zeros: Zeros, options: Mapping[str, Any], wholes: int = 0
    ) -> None:
        super().__init__(items, exchange, zeros, options, wholes)
        self._last = int(options["var_freeze_step"])
        self._kappa = int(options["var_update_scaler"])
        self._scaler, self._most = int(options["local_step_scaler"]), int(options["local_step_clipper"])
        self.var_interval, self.var_counter = 1, 0
        self.local_interval, self.local_counter = 1, 0
        self.lrs = [0.0] * self.wholes  # of each parameter, since the ranks were last equal
        self._apart: set[int] = set()  # parameters whose momentum has gradients of this rank's own
        self._anchors: dict[int, torch.Tensor] = {}  # item -> its parameter when they were

    @property
    def frozen(self) -> bool:
        return self.steps >= self._last

    @property
    def averages(self) -> bool:
        return not self.frozen and (self.steps + 1) % self.var_interval == 0

    @property
    def phase(self) -> str:
        if not self.frozen:
            return f"gradients, uncompressed at every {self.var_interval}. step, else in 1 bit"
        return f"momentum in 1 bit at every {self.local_interval}. step"

    def step(self, scale: float) -> None:
        averaged, frozen = self.averages, self.frozen
        self.steps += 1
        items = self.stepped()
        if frozen:
            self._local(items, scale)
            return
        found = [item for _, item in items]
        if averaged:
            self.adam(found, scale)
        else:
            for i, item in items:
                torch.mul(gradient_of(item), scale, out=self.places.of(self.buffer, i))
            self.travel(found)
            for i, item in items:
                beta1, mean = float(item.group["betas"][0]), self.places.of(self.buffer, i)
                item.masked(mean)
                item.states["exp_avg"].mul_(beta1).add_(mean, alpha=1 - beta1)
                self.bound(item, item.states["exp_avg"])
                apply_momentum(item)
            self.buffer.zero_()
        if self.steps % self.var_interval == 0:
            self.var_counter += 1
            if self.var_counter == self._kappa:
                self.var_counter, self.var_interval = 0, self.var_interval * 2
        if self.frozen:
            self.exchange.clear_errors()  # of gradients; from here on they are of momentum
            self.tell(f"the variance is frozen after step {self.steps}; from here on ranks exchange momentum in 1 bit")

    # ---- steps of each rank's own ------------------------------------------------------------------------------------
    def _local(self, items: Sequence[tuple[int, Item]], scale: float) -> None:
        self.add_gradients([item for _, item in items], scale)
        begin = {k for k in self.moving() if not self.lrs[k]}
        for k, item in self.moving().items():
            self.lrs[k] += float(item.group["lr"])
            self._apart.add(k)
        for i, item in items:
            if self.of[i] in begin:
                if self._anchors.get(i) is None:
                    self._anchors[i] = item.param.clone()
                else:
                    self._anchors[i].copy_(item.param)
            self.bound(item, item.states["exp_avg"])
            self._move(item)
        if self.steps % self.local_interval == 0:
            self._meet()
        self.local_counter += 1
        if self.local_counter == self._scaler:
            self.local_counter, self.local_interval = 0, min(self._most, self.local_interval * 2)

    def _move(self, item: Item) -> None:
        group, lr = item.group, float(item.group["lr"])
        update = item.states["exp_avg"] / root_of(item)
        if group["weight_decay"]:
            update.add_(item.param, alpha=float(group["weight_decay"]))
        item.param.add_(update, alpha=-lr)
        item.states["momentum_accumulator"].add_(update, alpha=-lr)

    def _meet(self) -> None:
        """All ranks go on from where they last were equal, by the mean of what they have moved since. What was stepped
        with a learning rate of 0 alone has not moved, which says nothing of its momentum (a mean of the steps' momenta
        by their rates: 0 / 0), and keeps each rank's own: it counts from the first step with a rate on."""
        if not any(self.lrs):
            return
        moved = self._moved()
        for _, item in () if self.preconditioned else moved:
            item.states["momentum_accumulator"].mul_(root_of(item))
        self.travel([item for _, item in moved])
        for i, item in moved:
            mean = item.states["momentum_accumulator"]
            if self.preconditioned:  # the mean of the steps: from here on of momentum, as without
                mean.mul_(root_of(item))
            item.masked(mean)
            lrs = self.lrs[self.of[i]]
            self.bound(item, mean, lrs)
            torch.mul(mean, -1.0 / lrs, out=item.states["exp_avg"])
            torch.addcdiv(self._anchors[i], mean, root_of(item), out=item.param)
            mean.zero_()
        self._apart = {k for k in self._apart if not self.lrs[k]}
        self.lrs = [0.0] * self.wholes

    def rewritten(self, whole: int) -> None:
        """All ranks were given equal values of that parameter, in no step: what they have moved before is of others."""
        self.lrs[whole] = 0.0
        for k, item in zip(self.of, self.items):
            if k == whole:
                item.states["momentum_accumulator"].zero_()

    def _moved(self) -> list[tuple[int, Item]]:
        """(its index, item) of what has moved since the ranks were last equal."""
        return [(i, item) for i, item in enumerate(self.items) if self.lrs[self.of[i]] and item.param.numel()]

    # ---- checkpoints -------------------------------------------------------------------------------------------------
    def own(self) -> Iterator[tuple[str, Item, torch.Tensor]]:
        for i, item in self._moved():
            yield "param", item, item.param
            yield "anchor", item, self._anchors[i]
            yield "momentum_accumulator", item, item.states["momentum_accumulator"]
        for i, item in enumerate(self.items):
            if self.of[i] in self._apart and item.param.numel():
                yield "exp_avg", item, item.states["exp_avg"]

    def numbers(self) -> dict[str, Any]:
        counts = {name: getattr(self, name) for name in _COUNTS}
        return {**counts, "lrs": list(self.lrs), "apart": sorted(self._apart), **self.frame()}

    def load_numbers(self, saved: Mapping[str, Any]) -> None:
        for name in _COUNTS:
            setattr(self, name, int(saved[name]))
        self.lrs = list(map(float, saved["lrs"]))
        self._apart = set(saved.get("apart", (k for k, lr in enumerate(self.lrs) if lr)))  # older ones have none
        for i, item in self._moved():
            if i not in self._anchors:
                self._anchors[i] = item.param.clone()
