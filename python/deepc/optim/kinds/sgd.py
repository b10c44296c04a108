"""SGD as a drop-in replacement of torch.optim's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ...errors import ArgumentError, numeric
from ..states.dense import OneStateOptimizer, check_range, refuse_differentiable
from ..states.formats import SGD_RULE, check_state_dtype


class SGD(OneStateOptimizer):
    """torch.optim.SGD with the same arguments, param_groups, state (`momentum_buffer`) and state_dict: momentum,
    dampening, Nesterov's form (Sutskever et al., ICML 2013), weight decay as L2. state_dtype: as AdamW's, of groups
    with momentum."""

    rule, state_name, instead = SGD_RULE, "momentum_buffer", "torch.optim.SGD"
    packed_from = 1  # dc_step takes step 1 for one that makes the buffer; `_scalars` says so of each parameter

    @numeric
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: str | None = None,
    ) -> None:
        self.state_dtype = check_state_dtype("SGD", state_dtype)
        refuse_differentiable("SGD", differentiable)
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            check_range(name, value)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ArgumentError(
                f"nesterov needs a momentum above 0 and no dampening, got momentum {momentum}, dampening {dampening}"
            )
        super().__init__(
            params,
            dict(
                lr=lr,
                momentum=momentum,
                dampening=dampening,
                weight_decay=weight_decay,
                nesterov=nesterov,
                maximize=maximize,
                foreach=foreach,
                differentiable=False,
                fused=fused,
            ),
        )
        if state_dtype is not None and not any(g["momentum"] for g in self.param_groups):
            raise ArgumentError(f"SGD: state_dtype={state_dtype!r} without momentum, so without a state; leave it out")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("nesterov", False)
            group.setdefault("maximize", False)

    def _keeps(self, group: dict[str, Any]) -> bool:
        return bool(group["momentum"])

    def _scalars(self, group: dict[str, Any], step: int) -> tuple[float, float, float, float, float, bool]:
        return (
            float(group["lr"]),
            float(group["momentum"]),
            0.0 if step == 1 else float(group["dampening"]),
            0.0,
            float(group["weight_decay"]),
            bool(group["nesterov"]),
        )

    def _begin(self, p: torch.Tensor, group: dict[str, Any]) -> int:
        """1 if the buffer is made now: it then becomes the gradient, without dampening."""
        if not group["momentum"] or self.state[p].get("momentum_buffer") is not None:
            return 2
        self._new_state(p)
        return 1

    def _step_float64(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        from torch.optim.sgd import sgd

        assert p.grad is not None  # the caller has looked
        buffers: list[torch.Tensor | None] = [self.state[p].get("momentum_buffer")]
        sgd(
            [p],
            [p.grad],
            buffers,
            foreach=False,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=float(group["lr"]),
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )
        if group["momentum"]:
            self.state[p]["momentum_buffer"] = buffers[0]
