"""LAMB (You et al., "Large batch optimization for deep learning", arXiv:1904.00962): Adam's step, scaled for each
parameter by the ratio of the parameter's norm to the step's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...core.lib import LambArgs
from ...core.ops import code, run_on
from ...errors import ArgumentError, UnsupportedError
from ..states.dense import Optimizer, check_betas, check_range, check_tensor, loss_of, new_states, packed_item
from ..states.formats import FORMATS, MOMENTS, check_place, check_state_dtype, take_states
from ..states.norms import blocks_of, sum_in_order


def trust_ratio(param_square: float, update_square: float, group: Mapping[str, Any]) -> float:
    """The factor on lr: |p| / |u| within [min_coeff, max_coeff]; 1 where a norm is zero or not finite."""
    if not (0 < param_square < math.inf and 0 < update_square < math.inf):
        return 1.0
    ratio = math.sqrt(param_square) / math.sqrt(update_square)
    return min(max(ratio, float(group["min_coeff"])), float(group["max_coeff"]))


def set_scalars(a: Any, group: Mapping[str, Any], step: int, grad_scale: float) -> None:
    """What a group says of one tensor's step."""
    a.lr, (a.beta1, a.beta2) = float(group["lr"]), (float(b) for b in group["betas"])
    a.eps, a.weight_decay = float(group["eps"]), float(group["weight_decay"])
    a.grad_scale, a.step = -grad_scale if group.get("maximize") else grad_scale, step


def set_states(a: Any, form: str, states: Sequence[int], scales: Sequence[int]) -> None:
    """Where exp_avg and exp_avg_sq lie, and in a format their scales."""
    if not form:
        a.exp_avg, a.exp_avg_sq = states
        return
    a.format = FORMATS[form]
    for k, at in enumerate(states):
        a.state[k] = at
    for k, at in enumerate(scales):
        a.scale[k] = at


class LambItem(NamedTuple):
    """A parameter or a piece of one, flat. states: exp_avg, exp_avg_sq, in fp32 or in a format, with their scales and
    the number of the first element (optim/states/formats.py)."""

    param: torch.Tensor
    grad: torch.Tensor
    states: Sequence[torch.Tensor]
    scales: Sequence[torch.Tensor] = ()
    first: int = 0


class LambStep:
    """One step of tensors of one param group, all on one device and stored in one way, each with the number of its
    step. Its making has read or made the moments; squares: of each parameter and of its step, from which the caller
    makes the ratios."""

    def __init__(
        self,
        items: Sequence[LambItem],
        group: Mapping[str, Any],
        steps: Sequence[int],
        grad_scale: float,
        form: str = "",
    ) -> None:
        self._args, self._items = LambArgs.array(max(1, len(items))), items
        self._device = items[0].param.device if items else torch.device("cpu")
        blocks = [blocks_of(i.first, i.param.numel()) for i in items]
        sums = torch.empty(2, sum(blocks), dtype=torch.float64, device=self._device)
        for a, item, step, of_p, of_u in zip(self._args, items, steps, *(row.split(blocks) for row in sums)):
            p, g = item.param, item.grad
            a.param, a.grad, a.first = p.data_ptr(), g.data_ptr(), item.first
            set_states(a, form, [s.data_ptr() for s in item.states], [s.data_ptr() for s in item.scales])
            a.param_sums, a.update_sums = of_p.data_ptr(), of_u.data_ptr()
            a.n, a.param_dtype, a.grad_dtype = p.numel(), code(p.dtype), code(g.dtype)
            set_scalars(a, group, step, grad_scale)
        run_on(self._device, "lamb_moments", self._args, len(items))
        param, update = ([sum_in_order(found) for found in row.split(blocks)] for row in sums.cpu())
        self.squares = list(zip(param, update))

    def apply(self, ratios: Sequence[float]) -> None:
        for a, ratio in zip(self._args, ratios):
            a.trust = ratio
        run_on(self._device, "lamb_apply", self._args, len(self._items))


def step_lamb(
    items: Sequence[LambItem], group: Mapping[str, Any], steps: Sequence[int], grad_scale: float, form: str = ""
) -> list[float]:
    """One step of whole parameters of one param group (see LambStep), on one device or several. Returns their
    ratios."""
    ratios = [1.0] * len(items)
    for device in dict.fromkeys(i.param.device for i in items):
        here = [k for k, i in enumerate(items) if i.param.device == device]
        step = LambStep([items[k] for k in here], group, [steps[k] for k in here], grad_scale, form)
        found = [trust_ratio(*squares, group) for squares in step.squares]
        step.apply(found)
        for k, ratio in zip(here, found):
            ratios[k] = ratio
    return ratios


def check_group(group: Mapping[str, Any]) -> None:
    """ArgumentError for bounds of the ratio that no step can be made with."""
    least, most = group["min_coeff"], group["max_coeff"]
    check_range("max_coeff", most)
    check_range("min_coeff", least)
    if not float(least) <= float(most):
        raise ArgumentError(f"min_coeff must be in [0, max_coeff], got {least} with max_coeff {most}")


class Lamb(Optimizer):
    """param_groups as AdamW's with `max_coeff` and `min_coeff`, the bounds of the ratio (DeepSpeed's FusedLamb); state
    `step`, `exp_avg`, `exp_avg_sq`, which are fp32 (float64 of float64 parameters). Weight decay is part of the step
    whose norm is taken, as in the paper. CPU and CUDA; one pass makes moments and norms, a second one the step.
    state_dtype: as AdamW's, None for "fp32"."""

    _coefficients: list[float]  # from the first step on

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        maximize: bool = False,
        state_dtype: str | None = None,
    ) -> None:
        self.state_dtype = check_state_dtype("Lamb", state_dtype)
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            check_range(name, value)
        check_group({"min_coeff": min_coeff, "max_coeff": max_coeff})
        check_betas(betas)
        super().__init__(
            params,
            dict(
                lr=lr,
                betas=tuple(betas),
                eps=eps,
                weight_decay=weight_decay,
                max_coeff=max_coeff,
                min_coeff=min_coeff,
                maximize=maximize,
            ),
        )

    def get_lamb_coeffs(self) -> list[float]:
        """The last step's ratios, in the order of the parameters that had a gradient."""
        return list(getattr(self, "_coefficients", []))

    def _state_of(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[p]
        if not state:
            form = self._packed(p)
            check_place(p, form)
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            new_states(state, MOMENTS, p, form, torch.float64 if p.dtype == torch.float64 else torch.float32)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch's, which casts states to the parameter's dtype; they come unrounded here."""
        super().load_state_dict(state_dict)
        take_states(self, state_dict, MOMENTS, self.state_dtype or "fp32")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step over all parameters that have a gradient. `closure` re-evaluates the model and returns the loss."""
        loss = loss_of(closure)
        self._coefficients = []
        for group in self.param_groups:
            items: list[torch.nn.Parameter] = []
            ratios: dict[int, float] = {}  # by id: those of float64 are made first
            for p in group["params"]:
                if p.grad is None:
                    continue
                check_tensor(p, "Lamb", "torch.optim.SparseAdam")
                if p.device.type not in ("cpu", "cuda"):
                    raise UnsupportedError(
                        f"Lamb has kernels for CPU and CUDA, and a parameter is on {p.device}; move the model to one of"
                        " them"
                    )
                state = self._state_of(p)
                state["step"] += 1
                if p.dtype == torch.float64:
                    ratios[id(p)] = self._step_float64(p, state, group)
                elif p.numel():
                    items.append(p)
            ratios.update(zip(map(id, items), self._step_core(items, group)))
            self._coefficients += [ratios[id(p)] for p in group["params"] if id(p) in ratios]
        return loss

    def _step_core(self, params: Sequence[torch.nn.Parameter], group: dict[str, Any]) -> list[float]:
        if not params:
            return []
        items = [LambItem(*packed_item(self, p, p, p.grad, MOMENTS)) for p in params if p.grad is not None]
        form, steps = self._packed(params[0]), [int(self.state[p]["step"]) for p in params]
        ratios = step_lamb(items, group, steps, 1.0, form)
        torch.autograd.graph.increment_version(params)
        return ratios

    def _step_float64(self, p: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any]) -> float:
        """Algorithm 2 of the paper in torch's operators. The ratio."""
        (beta1, beta2), step, m, v = group["betas"], int(state["step"]), state["exp_avg"], state["exp_avg_sq"]
        assert p.grad is not None  # the caller has looked
        g = -p.grad if group["maximize"] else p.grad
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        u = m / (1 - beta1**step) / ((v / (1 - beta2**step)).sqrt() + group["eps"]) + group["weight_decay"] * p
        trust = trust_ratio(float(p.square().sum()), float(u.square().sum()), group)
        p.add_(u, alpha=-float(group["lr"]) * trust)
        return trust
