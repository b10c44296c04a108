"""AdamW and Adam as drop-in replacements of torch.optim's, one C call per step over all tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch

from ..core.foreign import private
from ..errors import UnsupportedError
from .states.dense import (
    Optimizer,
    check_betas,
    check_range,
    check_tensor,
    in_order,
    loss_of,
    new_states,
    packed_item,
    state_in_order,
)
from .states.formats import (
    ADAMW,
    MOMENTS,
    PackedStep,
    check_place,
    check_state_dtype,
    has_codes,
    step_packed,
    take_states,
)


class AdamW(Optimizer):
    """torch.optim.AdamW with the same arguments, param_groups, state and state_dict (Loshchilov & Hutter,
    arXiv:1711.05101).

    Parameters: dense fp32, bf16 or fp16 tensors on CPU or CUDA, contiguous or in another order without holes
    (channels_last); gradients of any of these dtypes; moments have the parameter's dtype and order, as in torch. The
    kernel has no fp64 form: float64 parameters are stepped by torch's own function. `foreach`, `fused` and
    `capturable` are accepted and change nothing: there is one path. Raises ArgumentError for what it can't step.

    state_dtype: how moments are stored (docs/optimizers.md): "fp32"; "bf16" with stochastic rounding; "int8" or "int4",
    codes with a scale for each block, beside which state has `exp_avg_scale` and `exp_avg_sq_scale`; None: the
    parameter's dtype.
    """

    _decoupled = True
    _fp32_moments = False  # whatever the parameter's dtype
    state_dtype: str | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: str | None = None,
    ) -> None:
        if differentiable:
            raise UnsupportedError(
                "differentiable=True: deepc's AdamW can't be differentiated through; use torch.optim.AdamW for that"
            )
        _check(lr, betas, eps, weight_decay)
        self.state_dtype = check_state_dtype(type(self).__name__, state_dtype, amsgrad)
        if state_dtype == "fp32":
            self._fp32_moments = True
        super().__init__(
            params,
            dict(
                lr=lr,
                betas=betas,
                eps=eps,
                weight_decay=weight_decay,
                amsgrad=amsgrad,
                maximize=maximize,
                foreach=foreach,
                capturable=capturable,
                differentiable=False,
                fused=fused,
                decoupled_weight_decay=self._decoupled,
            ),
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_fp32_moments": self._fp32_moments}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("amsgrad", False)
            group.setdefault("maximize", False)
            # Which of the two it is belongs to the object: as in torch, states of Adam make no Adam of AdamW.
            group.setdefault("decoupled_weight_decay", False)
            group["decoupled_weight_decay"] |= self.defaults.get("decoupled_weight_decay", self._decoupled)
        for kept in self.state.values():
            if "step" in kept and not torch.is_tensor(kept["step"]):  # of torch before 1.12
                kept["step"] = torch.tensor(float(kept["step"]), dtype=torch.float32, device="cpu")

    def _state_of(self, p: torch.Tensor, amsgrad: bool) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            names = (*MOMENTS, "max_exp_avg_sq") if amsgrad else MOMENTS
            dtype = torch.float32 if self._fp32_moments and p.dtype != torch.float64 else p.dtype
            form = self._packed(p)
            new_states(state, names, p, form, dtype)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch's. It casts moments to the parameter's dtype; here they come unrounded where they are fp32, and from
        any state_dtype into this one's."""
        super().load_state_dict(state_dict)
        if self._fp32_moments or self.state_dtype is not None or has_codes(state_dict):
            names = (*MOMENTS, "max_exp_avg_sq")
            take_states(self, state_dict, names, "fp32" if self._fp32_moments else self.state_dtype)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step over all parameters that have a gradient. `closure` re-evaluates the model and returns the loss."""
        loss = loss_of(closure)
        for group in self.param_groups:
            # Tensors of one call share device and step number; most often there is one call per group.
            check_state_dtype(type(self).__name__, self.state_dtype, group["amsgrad"])  # it may be of this group alone
            calls: dict[tuple[Any, ...], list[Any]] = {}
            packed: dict[int, list[Any]] = {}
            given = [p for p in group["params"] if p.grad is not None]
            for p in given:
                check_tensor(p, "AdamW", "torch.optim.SparseAdam")
            states = [self._state_of(p, group["amsgrad"]) for p in given]
            counts = [s["step"] for p, s in zip(given, states) if p.dtype != torch.float64]
            if counts:
                private.add_to_each(counts, 1.0)  # one by one they took a quarter of a step of GPT-2's 148 tensors
            for p, state in zip(given, states):
                if p.dtype == torch.float64:
                    _step_float64(p, state, group)
                    continue
                step = int(state["step"].item())
                if form := self._packed(p):
                    check_place(p, form)
                    packed.setdefault(step, []).append(packed_item(self, p, p, p.grad, MOMENTS))
                    continue
                calls.setdefault((p.device, step), []).append((p, p.grad, state))
            for step, packed_items in packed.items():
                beta1, beta2 = (float(b) for b in group["betas"])
                scalars = (float(group["lr"]), beta1, beta2, float(group["eps"]), float(group["weight_decay"]))
                scale, flags = -1.0 if group["maximize"] else 1.0, int(group["decoupled_weight_decay"])
                step_packed(packed_items, PackedStep(ADAMW, self.state_dtype or "", scalars, scale, step, flags))
                torch.autograd.graph.increment_version([p for p, *_ in packed_items])
            for (_, step), items in calls.items():
                params = [p for p, _, _ in items]
                torch.ops.deepc.step_adamw(
                    [in_order(p, p) for p in params],
                    [in_order(g, p) for p, g, _ in items],
                    [state_in_order(s, "exp_avg", p) for p, _, s in items],
                    [state_in_order(s, "exp_avg_sq", p) for p, _, s in items],
                    [state_in_order(s, "max_exp_avg_sq", p) for p, _, s in items] if group["amsgrad"] else [],
                    [],
                    float(group["lr"]),
                    float(group["betas"][0]),
                    float(group["betas"][1]),
                    float(group["eps"]),
                    float(group["weight_decay"]),
                    -1.0 if group["maximize"] else 1.0,
                    step,
                    bool(group["decoupled_weight_decay"]),
                )
                torch.autograd.graph.increment_version(params)
        return loss


class Adam(AdamW):
    """torch.optim.Adam: weight decay, if any, is added to the gradient (L2; Kingma & Ba, arXiv:1412.6980)."""

    _decoupled = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **kwargs)


def _check(lr: Any, betas: Any, eps: float, weight_decay: float) -> None:
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        check_range(name, value)
    check_betas(betas)


def _step_float64(p: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any]) -> None:
    """torch's own single-tensor step, whose bits a drop-in has to give."""
    from torch.optim.adam import adam

    adam(
        [p],
        [cast(torch.Tensor, p.grad)],
        [state["exp_avg"]],
        [state["exp_avg_sq"]],
        [state["max_exp_avg_sq"]] if group["amsgrad"] else [],
        [state["step"]],
        foreach=False,
        amsgrad=group["amsgrad"],
        beta1=float(group["betas"][0]),
        beta2=float(group["betas"][1]),
        lr=float(group["lr"]),
        weight_decay=float(group["weight_decay"]),
        eps=float(group["eps"]),
        maximize=group["maximize"],
        decoupled_weight_decay=group["decoupled_weight_decay"],
    )
