"""Lion (Chen et al., "Symbolic discovery of optimization algorithms", arXiv:2302.06675)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..states.dense import OneStateOptimizer, check_betas, check_range
from ..states.formats import LION, check_state_dtype


class Lion(OneStateOptimizer):
    """The sign of an interpolated momentum, with decoupled weight decay: u = beta1 m + (1 - beta1) g; p = p (1 - lr
    weight_decay) - lr sign(u); m = beta2 m + (1 - beta2) g. State: `exp_avg`. Its lr is 3 to 10 times smaller than
    AdamW's, and its weight_decay as many times larger (section 5 of the paper). state_dtype: as AdamW's."""

    rule, state_name, instead = LION, "exp_avg", "AdamW with dense gradients"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        state_dtype: str | None = None,
    ) -> None:
        self.state_dtype = check_state_dtype("Lion", state_dtype)
        check_range("lr", lr)
        check_range("weight_decay", weight_decay)
        check_betas(betas)
        super().__init__(params, dict(lr=lr, betas=tuple(betas), weight_decay=weight_decay, maximize=maximize))

    def _scalars(self, group: dict[str, Any], step: int) -> tuple[float, float, float, float, float, bool]:
        beta1, beta2 = group["betas"]
        return float(group["lr"]), float(beta1), float(beta2), 0.0, float(group["weight_decay"]), False

    def _begin(self, p: torch.Tensor, group: dict[str, Any]) -> int:
        if not self.state[p]:
            self._new_state(p)
        return 1

    def _step_float64(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        self._begin(p, group)
        (beta1, beta2), lr, m = group["betas"], float(group["lr"]), self.state[p]["exp_avg"]
        assert p.grad is not None  # the caller has looked
        g = -p.grad if group["maximize"] else p.grad
        p.mul_(1 - lr * group["weight_decay"]).add_(m.mul(beta1).add_(g, alpha=1 - beta1).sign_(), alpha=-lr)
        m.mul_(beta2).add_(g, alpha=1 - beta2)
