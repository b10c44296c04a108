"""What the drop-in optimizers share: tensors as the kernels take them, and the step of a rule with one state."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ...core import memory
from ...core.ops import FLOATS
from ...errors import ArgumentError, UnsupportedError
from .formats import (
    NESTEROV,
    SCALE,
    PackedStep,
    check_place,
    check_sizes,
    has_codes,
    is_coded,
    make_state,
    number_of,
    pack,
    step_packed,
    take_states,
)


def zeros_for(p: torch.Tensor, dtype: torch.dtype, color: int) -> torch.Tensor:
    """A zeroed state of `p`, in its order; color: its place among the arrays that are walked together."""
    if p.dtype == torch.float64 or not p.is_contiguous():
        return torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
    if p.device.type == "cpu" and p.numel() >= 1 << 16:
        return memory.zeros(p.numel(), dtype, color).view(p.shape)
    return torch.zeros_like(p, dtype=dtype, memory_format=torch.contiguous_format)


def new_states(
    state: dict[str, torch.Tensor], names: Sequence[str], p: torch.Tensor, form: str, dtype: torch.dtype
) -> None:
    """Makes the zeroed states of `p` in a format, or in `dtype` where that is ""."""
    for color, name in enumerate(names, start=2):
        if is_coded(form):
            state[name], state[name + SCALE] = make_state(p.numel(), form, device=p.device)
        else:
            state[name] = zeros_for(p, torch.bfloat16 if form else dtype, color)


def packed_item(
    optimizer: torch.optim.Optimizer, p: torch.Tensor, moved: torch.Tensor, grad: torch.Tensor, names: Sequence[str]
) -> tuple[Any, ...]:
    """p's states and `grad` for step_packed; moved: what the step is made of, p or a tensor of its order."""
    state, numel = optimizer.state[p], p.numel()
    for name in names:
        if (scale := state.get(name + SCALE)) is not None:
            check_sizes(name, state[name], scale, numel, getattr(optimizer, "state_dtype", None) or "")
        else:
            check_numel(p, name, state[name], numel)
    check_numel(p, "grad", grad, numel)
    scales = [state[n + SCALE] for n in names if n + SCALE in state]
    if scales:  # codes lie in the standard order, whatever has become of p since they were made
        check_place(p, getattr(optimizer, "state_dtype", None) or "")
    states = [state[n] if scales else state_in_order(state, n, p) for n in names]
    check_beside(p, (*states, *scales))
    return in_order(moved, p), in_order(grad, p), states, scales, number_of(optimizer, p)


def check_numel(p: torch.Tensor, name: str, value: torch.Tensor, numel: int) -> None:
    """ArgumentError unless p's `value` has `numel` elements: C sees addresses alone."""
    if value.numel() != numel:
        raise ArgumentError(
            f"'{name}' of a parameter of shape {tuple(p.shape)} has {value.numel()} elements, and its step takes"
            f" {numel}. Was the state another parameter's (a vocabulary of another size), or p.data replaced by one of"
            " another size?"
        )


def check_beside(p: torch.Tensor, states: Iterable[torch.Tensor]) -> None:
    """ArgumentError unless p's states are where p is."""
    for s in states:
        if s.device != p.device:
            raise ArgumentError(
                f"a parameter is on {p.device} and its states are on {s.device}: move the model before the first step,"
                " or load the optimizer's state_dict again"
            )


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """What a step's `closure` returns, evaluated with gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def is_number(value: Any) -> bool:
    """Whether float() takes it, a tensor of one element too; a string is none."""
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    return not isinstance(value, str)


def check_range(name: str, value: Any, below: float = float("inf")) -> None:
    """ArgumentError unless it is a number, 0 <= value < below."""
    if not is_number(value) or not 0.0 <= float(value) < below:
        bound = "be >= 0" if below == float("inf") else f"be in [0, {below:g})"
        raise ArgumentError(f"{name} must {bound}, got {value!r}")


def check_betas(betas: Any, name: str = "betas") -> None:
    """ArgumentError unless these are two numbers in [0, 1)."""
    try:
        pair = () if isinstance(betas, str) else tuple(betas)
    except TypeError:
        pair = ()
    if len(pair) != 2:
        raise ArgumentError(f"{name} must be two numbers in [0, 1), got {betas!r}")
    for i, beta in enumerate(pair):
        check_range(f"{name}[{i}]", beta, 1.0)


def _as_written(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of torch.optim.Optimizer without its wrapper, while that has nothing to do."""
    written: Callable[..., Any] | None = getattr(method, "__wrapped__", None)
    by_torch = getattr(method, "__globals__", {}).get("__name__") == "torch._compile"
    return written if written and by_torch and "torch._dynamo" not in sys.modules else method


class Optimizer(torch.optim.Optimizer):
    """torch's, without its import of the compiler. torch wraps three methods so that torch.compile leaves them alone;
    the wrapper's first call imports torch._dynamo, half of the CPU time until an engine is ready (1.8 of 3.5 s). Where
    nobody has imported it there is nothing that could trace them."""

    state_dtype: str | None = None  # how states are stored (formats.py)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "state_dtype": self.state_dtype}

    def _packed(self, p: torch.Tensor) -> str:
        """The format of p's states, where they have one; "": their dtype."""
        return self.state_dtype or "" if self.state_dtype != "fp32" and p.dtype != torch.float64 else ""

    def _dtype_of(self, p: torch.Tensor) -> torch.dtype:
        """The dtype of p's states without a format."""
        return torch.float32 if self.state_dtype == "fp32" and p.dtype != torch.float64 else p.dtype

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _as_written(torch.optim.Optimizer.add_param_group)(self, param_group)

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = _as_written(torch.optim.Optimizer.state_dict)(self)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        _as_written(torch.optim.Optimizer.load_state_dict)(self, state_dict)


class OneStateOptimizer(Optimizer):
    """An optimizer with one state of the parameter's shape and dtype at most, stepped by one call of dc_step a group.

    Parameters: dense fp32, bf16 or fp16 tensors on CPU or CUDA, contiguous or in another order without holes
    (channels_last); gradients of any of these dtypes. float64 parameters are stepped by torch's own operators.
    `foreach`, `fused` and `differentiable=False` are accepted and change nothing: there is one path.
    """

    rule: int  # dc_step_rule
    state_name: str
    instead: str  # torch's class that takes sparse gradients
    packed_from = 0  # what the count of steps of states with a format begins after

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

    def _step_sparse(self, p: torch.Tensor, group: dict[str, Any]) -> bool:
        """Steps `p` with its sparse gradient; False: the rule takes none."""
        return False

    def _new_state(self, p: torch.Tensor, value: float = 0.0) -> None:
        """Makes p's state, of `value` throughout."""
        state, form, name = self.state[p], self._packed(p), self.state_name
        new_states(state, [name], p, form, self._dtype_of(p))
        if value != 0 and is_coded(form):
            values = torch.full((p.numel(),), value, dtype=torch.float32, device="cpu")
            pack(state[name], state[name + SCALE], values, form, name, 0)
        elif value != 0:
            state[name].fill_(value)

    def _step_packed(self, calls: dict[int, list[Any]], group: dict[str, Any]) -> None:
        """calls: by the number of their step. The random bits of a state are those of its group's count of steps, which
        state_dict keeps."""
        if not calls:
            return
        group["state_steps"] = count = group.get("state_steps", self.packed_from) + 1
        for step, items in calls.items():
            *scalars, nesterov = self._scalars(group, step)
            sign = -1.0 if group["maximize"] else 1.0
            flags = NESTEROV if nesterov else 0
            step_packed(items, PackedStep(self.rule, self.state_dtype or "", scalars, sign, count, flags))
            torch.autograd.graph.increment_version([p for p, *_ in items])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch's; states come from any state_dtype into this one's."""
        super().load_state_dict(state_dict)
        if self.state_dtype is not None or has_codes(state_dict):
            take_states(self, state_dict, [self.state_name], self.state_dtype)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step over all parameters that have a gradient. `closure` re-evaluates the model and returns the loss."""
        loss = loss_of(closure)
        for group in self.param_groups:
            calls: dict[tuple[Any, ...], list[torch.Tensor]] = {}
            packed: dict[int, list[Any]] = {}
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.is_sparse and self._step_sparse(p, group):
                    continue
                check_tensor(p, type(self).__name__, self.instead)
                if p.dtype == torch.float64:
                    self._step_float64(p, group)
                    continue
                if self._keeps(group) and (form := self._packed(p)):
                    check_place(p, form)
                    packed.setdefault(self._begin(p, group), []).append(
                        packed_item(self, p, p, p.grad, [self.state_name])
                    )
                    continue
                calls.setdefault((p.device, self._begin(p, group)), []).append(p)
            self._step_packed(packed, group)
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
        return t if t.is_contiguous() else t.contiguous()
    if t.stride() != p.stride():
        t = torch.empty_like(p, dtype=t.dtype, memory_format=torch.preserve_format).copy_(t)
    return t.as_strided((t.numel(),), (1,))


def state_in_order(state: dict[str, torch.Tensor], name: str, p: torch.Tensor) -> torch.Tensor:
    """The same of a moment, which stays what it is made to (a loaded one may lie otherwise)."""
    kept = state[name]
    if p.is_contiguous() and kept.is_contiguous():
        return kept
    if kept.stride() != p.stride():
        state[name] = kept = torch.empty_like(p, dtype=kept.dtype, memory_format=torch.preserve_format).copy_(kept)
    return in_order(kept, p)
