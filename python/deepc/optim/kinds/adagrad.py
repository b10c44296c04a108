"""Adagrad as a drop-in replacement of torch.optim's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ...errors import ArgumentError, UnsupportedError
from ..states.dense import OneStateOptimizer, check_range, refuse_differentiable
from ..states.formats import ADAGRAD, SCALE, check_state_dtype


class Adagrad(OneStateOptimizer):
    """torch.optim.Adagrad with the same arguments, param_groups, state (`step`, `sum`) and state_dict (Duchi et al.,
    JMLR 2011). The sums are made at the first step or state_dict(), not with the optimizer. Sparse gradients are
    stepped by torch's own operators, which touch their elements alone. state_dtype: as AdamW's."""

    rule, state_name, instead = ADAGRAD, "sum", "torch.optim.Adagrad"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: str | None = None,
    ) -> None:
        self.state_dtype = check_state_dtype("Adagrad", state_dtype)
        refuse_differentiable("Adagrad", differentiable)
        for name, value in (
            ("lr", lr),
            ("lr_decay", lr_decay),
            ("weight_decay", weight_decay),
            ("initial_accumulator_value", initial_accumulator_value),
            ("eps", eps),
        ):
            check_range(name, value)
        super().__init__(
            params,
            dict(
                lr=lr,
                lr_decay=lr_decay,
                eps=eps,
                weight_decay=weight_decay,
                initial_accumulator_value=initial_accumulator_value,
                foreach=foreach,
                maximize=maximize,
                differentiable=False,
                fused=fused,
            ),
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("maximize", False)

    def _make_state(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        if not self.state[p]:
            self.state[p]["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            self._new_state(p, group["initial_accumulator_value"])

    def state_dict(self) -> dict[str, Any]:
        """torch's; as there, it has the sums also before the first step."""
        for group in self.param_groups:
            for p in group["params"]:
                self._make_state(p, group)
        return super().state_dict()

    def share_memory(self) -> None:
        """Moves the sums to shared memory, for several processes that step the same parameters (Hogwild)."""
        for group in self.param_groups:
            for p in group["params"]:
                self._make_state(p, group)
                for name in (self.state_name, self.state_name + SCALE):
                    if name in self.state[p]:
                        self.state[p][name].share_memory_()

    def _scalars(self, group: dict[str, Any], step: int) -> tuple[float, float, float, float, float, bool]:
        lr = float(group["lr"]) / (1 + (step - 1) * float(group["lr_decay"]))
        return lr, 0.0, 0.0, float(group["eps"]), float(group["weight_decay"]), False

    def _begin(self, p: torch.Tensor, group: dict[str, Any]) -> int:
        self._make_state(p, group)
        self.state[p]["step"] += 1
        return int(self.state[p]["step"])

    def _step_float64(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        self._step_torch(p, group)

    def _step_sparse(self, p: torch.Tensor, group: dict[str, Any]) -> bool:
        if self._packed(p):
            raise UnsupportedError(
                f"Adagrad: state_dtype={self.state_dtype!r} with a sparse gradient does not exist: leave it out, or use"
                " nn.Embedding(sparse=False)"
            )
        if group["weight_decay"]:
            raise ArgumentError(
                f"Adagrad: weight_decay {group['weight_decay']} with a sparse gradient, whose elements alone are"
                " stepped; set it to 0, or use nn.Embedding(sparse=False)"
            )
        self._step_torch(p, group)
        return True

    def _step_torch(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        from torch.optim.adagrad import adagrad

        self._make_state(p, group)
        assert p.grad is not None  # the caller has looked
        adagrad(
            [p],
            [p.grad],
            [self.state[p]["sum"]],
            [self.state[p]["step"]],
            foreach=False,
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            lr_decay=group["lr_decay"],
            eps=group["eps"],
            has_sparse_grad=p.grad.is_sparse,
            maximize=group["maximize"],
        )
