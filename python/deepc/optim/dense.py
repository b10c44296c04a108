"""What the drop-in optimizers share: tensors as the kernels take them, and the step of a rule with one state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..core import memory
from ..core.ops import FLOATS
from ..errors import ArgumentError, UnsupportedError


def zeros_for(p: torch.Tensor, dtype: torch.dtype, color: int) -> torch.Tensor:
    """A zeroed state of `p`, in its order; color: its place among the arrays that are walked together."""
    if p.dtype == torch.float64 or not p.is_contiguous():
        return torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
    if p.device.type == "cpu" and p.numel() >= 1 << 16:
        return memory.zeros(p.numel(), dtype, color).view(p.shape)
    return torch.zeros_like(p, dtype=dtype, memory_format=torch.contiguous_format)


def check_range(name: str, value: Any, below: float = float("inf")) -> None:
    """ArgumentError unless 0 <= value < below."""
    if not 0.0 <= float(value) < below:
        bound = "be >= 0" if below == float("inf") else f"be in [0, {below:g})"
        raise ArgumentError(f"{name} must {bound}, got {value}")


class OneStateOptimizer(torch.optim.Optimizer):
    """An optimizer with one state of the parameter's shape and dtype at most, stepped by one call of dc_step a group.

    Parameters: dense fp32, bf16 or fp16 tensors on CPU or CUDA, contiguous or in another order without holes
    (channels_last); gradients of any of these dtypes. float64 parameters are stepped by torch's own operators.
    `foreach`, `fused` and `differentiable=False` are accepted and change nothing: there is one path.
    """

    rule: int  # dc_step_rule
    state_name: str
    instead: str  # torch's class that takes sparse gradients

    def _scalars(self, group: dict[str, Any], step: int) -> tuple[float, float, float, float, float, bool]:
        """(lr, beta1, beta2, eps, weight_decay, nesterov) of dc_step_args."""
        raise NotImplementedError

    def _begin(self, p: torch.Tensor, group: dict[str, Any]) -> int:
        """Makes the state of `p` if it is not there; the number of this step."""
        raise NotImplementedError

    def _keeps(self, group: dict[str, Any]) -> bool:
        """Whether the group's parameters have a state."""
        return True

    def _step_float64(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step over all parameters that have a gradient. `closure` re-evaluates the model and returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            calls: dict[tuple[Any, ...], list[torch.Tensor]] = {}
            for p in group["params"]:
                if p.grad is None:
                    continue
                check_tensor(p, type(self).__name__, self.instead)
                if p.dtype == torch.float64:
                    self._step_float64(p, group)
                    continue
                calls.setdefault((p.device, self._begin(p, group)), []).append(p)
            for (_, step), params in calls.items():
                lr, beta1, beta2, eps, decay, nesterov = self._scalars(group, step)
                torch.ops.deepc.step_rule(
                    [in_order(p, p) for p in params],
                    [in_order(p.grad, p) for p in params if p.grad is not None],
                    [state_in_order(self.state[p], self.state_name, p) for p in params] if self._keeps(group) else [],
                    [],
                    self.rule,
                    lr,
                    beta1,
                    beta2,
                    eps,
                    decay,
                    -1.0 if group["maximize"] else 1.0,
                    step,
                    nesterov,
                )
                torch.autograd.graph.increment_version(params)
        return loss


def refuse_differentiable(name: str, differentiable: bool) -> None:
    if differentiable:
        raise UnsupportedError(
            f"differentiable=True: deepc's {name} can't be differentiated through; use torch.optim's for that"
        )


def check_tensor(p: torch.Tensor, name: str, instead: str) -> None:
    if p.grad is not None and p.grad.is_sparse:
        raise ArgumentError(f"{name} does not take sparse gradients; use nn.Embedding(sparse=False) or {instead}")
    if p.dtype not in FLOATS and p.dtype != torch.float64:
        raise ArgumentError(f"{name} steps float32, bfloat16, float16 and float64 parameters, got {p.dtype}")
    if not is_dense(p):
        raise ArgumentError(
            f"a parameter of shape {tuple(p.shape)} and strides {p.stride()} has holes or overlaps; make it dense with"
            " p.data = p.data.contiguous()"
        )


def is_dense(p: torch.Tensor) -> bool:
    """Whether its elements fill one piece of memory, in whatever order of the dimensions."""
    if p.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(p.stride(), p.shape) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def in_order(t: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """`t`, of the shape of the dense `p`, as it lies in p's memory: the step treats each element alone, so it may go
    through them in p's order if all its tensors do. A copy where `t` lies otherwise."""
    if p.is_contiguous():
        return t.contiguous()
    if t.stride() != p.stride():
        t = torch.empty_like(p, dtype=t.dtype, memory_format=torch.preserve_format).copy_(t)
    return t.as_strided((t.numel(),), (1,))


def state_in_order(state: dict[str, torch.Tensor], name: str, p: torch.Tensor) -> torch.Tensor:
    """The same of a moment, which stays what it is made to (a loaded one may lie otherwise)."""
    if state[name].stride() != p.stride() and not (p.is_contiguous() and state[name].is_contiguous()):
        state[name] = torch.empty_like(p, dtype=state[name].dtype, memory_format=torch.preserve_format).copy_(
            state[name]
        )
    return in_order(state[name], p)
