"""Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon): the momentum of a matrix, made orthogonal by
Newton-Schulz iterations, with AdamW for what is no matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ...errors import ArgumentError
from ..states.dense import check_range, loss_of

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(
    matrix: torch.Tensor,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    steps: int = 5,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """About U V^T of the singular value decomposition U S V^T of a 2-D matrix: a quintic iteration after which all
    singular values are near 1 (0.5 to 1.5), by matrix products in `dtype`."""
    a, b, c = coefficients
    x = matrix.to(dtype)
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon's arguments and state (`momentum_buffer`), and parameters of any number of dimensions: matrices
    are stepped by Muon, all others by AdamW with adam_lr (None: lr), adam_betas, adam_eps and the same weight_decay.
    A parameter with an attribute `use_muon` decides for itself (DeepSpeed's way): embeddings and output layers are
    matrices that Muon is not meant for. Each param group is divided in two by that, with `use_muon` in each.

    ns_dtype: of the iterations' products: bfloat16, as in torch, or float32, which is faster on processors without
    instructions for the former. An engine runs it at ZeRO stage 0, where matrices are whole.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        adam_lr: float | None = None,
        adam_betas: tuple[float, float] = (0.9, 0.999),
        adam_eps: float = 1e-8,
        ns_dtype: str = "bfloat16",
    ) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("eps", eps), ("adam_eps", adam_eps)):
            check_range(name, value)
        for name, value in (("momentum", momentum), ("adam_betas[0]", adam_betas[0]), ("adam_betas[1]", adam_betas[1])):
            check_range(name, value, 1.0)
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise ArgumentError(f"adjust_lr_fn must be 'original' or 'match_rms_adamw', got {adjust_lr_fn!r}")
        if not (isinstance(ns_steps, int) and 0 < ns_steps < 100) or len(ns_coefficients) != 3:
            raise ArgumentError(
                f"ns_steps must be from 1 to 99 with three ns_coefficients, got {ns_steps!r} and {ns_coefficients!r}"
            )
        if ns_dtype not in ("bfloat16", "float32"):
            raise ArgumentError(f"ns_dtype must be 'bfloat16' or 'float32', got {ns_dtype!r}")
        super().__init__(
            params,
            dict(
                lr=lr,
                weight_decay=weight_decay,
                momentum=momentum,
                nesterov=nesterov,
                ns_coefficients=tuple(ns_coefficients),
                eps=eps,
                ns_steps=ns_steps,
                adjust_lr_fn=adjust_lr_fn,
                adam_lr=adam_lr,
                adam_betas=tuple(adam_betas),
                adam_eps=adam_eps,
                ns_dtype=ns_dtype,
            ),
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds one or two groups: the matrices of this one, and the rest."""
        given = param_group["params"]
        params = [given] if isinstance(given, torch.Tensor) else list(given)
        if "use_muon" in param_group or not params or isinstance(params[0], tuple):
            parts = [params]
        else:
            muon = [bool(getattr(p, "use_muon", p.dim() == 2)) for p in params]
            parts = [[p for p, m in zip(params, muon) if m is kind] for kind in (True, False)]
        for part in filter(None, parts):
            first = part[0]
            use = param_group.get(
                "use_muon", isinstance(first, torch.Tensor) and getattr(first, "use_muon", first.dim() == 2)
            )
            if use and any(isinstance(p, torch.Tensor) and p.dim() != 2 for p in part):
                raise ArgumentError("Muon steps matrices: a parameter of a group with use_muon has not 2 dimensions")
            super().add_param_group({**param_group, "params": part, "use_muon": bool(use)})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step over all parameters that have a gradient. `closure` re-evaluates the model and returns the loss."""
        loss = loss_of(closure)
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if any(p.grad.is_sparse or p.is_complex() for p in params):
                raise ArgumentError("Muon takes dense, real gradients")
            if group["use_muon"]:
                for p in params:
                    self._step_matrix(p, group)
            elif params:
                self._step_adamw(params, group)
        return loss

    def _step_matrix(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        state, momentum, lr = self.state[p], group["momentum"], float(group["lr"])
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        buffer, g = state["momentum_buffer"], p.grad
        assert g is not None  # the caller has looked
        buffer.lerp_(g, 1 - momentum)
        update = g.lerp(buffer, momentum) if group["nesterov"] else buffer
        dtype = torch.float64 if p.dtype == torch.float64 else getattr(torch, group["ns_dtype"])
        update = orthogonalize(update, group["ns_coefficients"], group["ns_steps"], group["eps"], dtype)
        rows, cols = p.shape
        if group["adjust_lr_fn"] == "match_rms_adamw":
            ratio = 0.2 * math.sqrt(max(rows, cols))
        else:
            ratio = math.sqrt(max(1, rows / cols)) if cols else 1.0
        p.mul_(1 - lr * group["weight_decay"])
        p.add_(update.to(p.dtype), alpha=-lr * ratio)

    def _step_adamw(self, params: list[torch.Tensor], group: dict[str, Any]) -> None:
        from torch.optim.adamw import adamw

        for p in params:
            if not self.state[p]:
                self.state[p]["step"] = torch.tensor(0.0)
                for name in ("exp_avg", "exp_avg_sq"):
                    self.state[p][name] = torch.zeros_like(p, memory_format=torch.preserve_format)
        lr = group["lr"] if group["adam_lr"] is None else group["adam_lr"]
        adamw(
            params,
            [p.grad for p in params if p.grad is not None],
            [self.state[p]["exp_avg"] for p in params],
            [self.state[p]["exp_avg_sq"] for p in params],
            [],
            [self.state[p]["step"] for p in params],
            amsgrad=False,
            beta1=float(group["adam_betas"][0]),
            beta2=float(group["adam_betas"][1]),
            lr=float(lr),
            weight_decay=float(group["weight_decay"]),
            eps=float(group["adam_eps"]),
            maximize=False,
        )
