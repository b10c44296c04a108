"""Adafactor (Shazeer & Stern, "Adaptive learning rates with sublinear memory cost", arXiv:1804.04235), as torch has it:
second moments of a matrix are kept as those of its rows and its columns."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...core.lib import AdafactorArgs
from ...core.ops import code, run_on
from ...errors import ArgumentError, UnsupportedError
from ..states.dense import Optimizer, check_beside, check_numel, check_range, check_tensor, is_number, loss_of
from ..states.norms import blocks_of, sum_in_order

FACTORS = ("row_var", "col_var")


class Matrices(NamedTuple):
    """The matrices that a parameter is made of: those of its last two dimensions."""

    number: int
    rows: int
    cols: int

    @property
    def factors(self) -> int:
        """Second moments of all rows and columns."""
        return self.number * (self.rows + self.cols)

    def shape_of(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """torch's, of one of FACTORS; shape: the parameter's."""
        return (*shape[:-1], 1) if name == "row_var" else (*shape[:-2], 1, shape[-1])


def matrices_of(shape: Sequence[int]) -> Matrices | None:
    """None: a parameter of this shape is no matrix."""
    return Matrices(math.prod(shape[:-2]), shape[-2], shape[-1]) if len(shape) > 1 else None


class Scratch:
    """What the passes of a step keep of the rows and columns of parameters, one after another. device: None for the
    CPU's."""

    def __init__(self, factors: int, device: torch.device | None = None) -> None:
        device = device or torch.device("cpu")
        self.tops = torch.zeros(factors, dtype=torch.int32, device=device)
        self.sums = torch.zeros(factors, dtype=torch.float64, device=device)
        self.factors = torch.zeros(factors, device=device, dtype=torch.float32)

    def clear(self) -> None:
        self.tops.zero_()
        self.sums.zero_()

    def aim(self, a: Any, m: Matrices, at: int, row_var: int, col_var: int) -> None:
        """A parameter whose rows begin at `at`, its columns behind them; row_var, col_var: addresses of its states."""
        rows = m.number * m.rows
        a.matrices, a.rows, a.cols, a.row_var, a.col_var = m.number, m.rows, m.cols, row_var, col_var
        a.row_top, a.col_top = (self.tops.data_ptr() + 4 * i for i in (at, at + rows))
        a.row_sum, a.col_sum = (self.sums.data_ptr() + 8 * i for i in (at, at + rows))
        a.row_factor = self.factors.data_ptr() + 4 * at


def set_scalars(a: Any, group: dict[str, Any], step: int, grad_scale: float, dtype: torch.dtype) -> None:
    """What a group says of one tensor's step; dtype: whose precision the first eps is, if it is None."""
    eps = group["eps"][0]
    a.weight, a.eps = step ** float(group["beta2_decay"]), torch.finfo(dtype).eps if eps is None else float(eps)
    a.keep = 1.0 - float(group["lr"]) * float(group["weight_decay"])
    a.grad_scale = -grad_scale if group["maximize"] else grad_scale


def rate_of(squares: tuple[float, float], numel: int, group: dict[str, Any], step: int) -> float:
    """The factor on a parameter's update: relative to its root mean square, the update's cut to `d`. squares: of the
    parameter and of the update."""
    param_square, update_square = squares
    relative = min(float(group["lr"]), 1.0 / math.sqrt(step))
    rate = max(float(group["eps"][1]), math.sqrt(param_square / numel)) * relative
    return rate / max(1.0, math.sqrt(update_square / numel) / float(group["d"]))


def check_group(group: Mapping[str, Any]) -> None:
    """ArgumentError for numbers of a group that no step can be made with."""
    eps, decay, d = group["eps"], group["beta2_decay"], group["d"]
    if not isinstance(eps, (tuple, list)) or len(eps) != 2:
        raise ArgumentError(f"eps must be two numbers, the first may be None, got {eps!r}")
    for name, value in (("eps[0]", eps[0] or 0.0), ("eps[1]", eps[1])):
        check_range(name, value)
    if not is_number(decay) or not -math.inf < float(decay) <= 0.0:
        raise ArgumentError(f"beta2_decay must be <= 0, got {decay!r}")
    if not is_number(d) or not 1.0 <= float(d) < math.inf:
        raise ArgumentError(f"d must be >= 1, got {d!r}")


class Adafactor(Optimizer):
    """torch.optim.Adafactor's arguments, groups and states: `step`, of parameters with two dimensions or more `row_var`
    and `col_var`, of others `variance`, all fp32 (float64 of float64 parameters). CPU and CUDA. Four passes over the
    gradient: an element's step depends on its row, its column and the norms of the whole. `foreach` changes nothing."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
    ) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            check_range(name, value)
        check_group({"eps": eps, "beta2_decay": beta2_decay, "d": d})
        defaults = dict(lr=lr, beta2_decay=beta2_decay, eps=tuple(eps), d=d, weight_decay=weight_decay)
        super().__init__(params, {**defaults, "foreach": foreach, "maximize": maximize})

    def _state_of(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            dtype, matrices = torch.float64 if p.dtype == torch.float64 else torch.float32, matrices_of(p.shape)
            zeros = functools.partial(torch.zeros, dtype=dtype, device=p.device)
            if matrices is None:
                state["variance"] = zeros(p.shape)
            else:
                state.update({n: zeros(matrices.shape_of(n, p.shape)) for n in FACTORS})
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch's, which casts states to the parameter's dtype; they come unrounded here."""
        from ..states.formats import take_states

        super().load_state_dict(state_dict)
        take_states(self, state_dict, (*FACTORS, "variance"), "fp32", alike=False)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step over all parameters that have a gradient. `closure` re-evaluates the model and returns the loss."""
        loss = loss_of(closure)
        for group in self.param_groups:
            params: list[torch.Tensor] = []
            for p in group["params"]:
                if p.grad is None:
                    continue
                check_tensor(p, "Adafactor", "torch.optim.SparseAdam")
                if p.device.type not in ("cpu", "cuda"):
                    raise UnsupportedError(
                        f"Adafactor has kernels for CPU and CUDA, and a parameter is on {p.device}; move the model to"
                        " one of them"
                    )
                state = self._state_of(p)
                if p.dtype == torch.float64:
                    self._step_float64(p, state, group)
                elif p.numel():
                    state["step"] += 1
                    params.append(p)
            for device in dict.fromkeys(p.device for p in params):
                self._step_core([p for p in params if p.device == device], device, group)
        return loss

    def _step_core(self, params: Sequence[torch.Tensor], device: torch.device, group: dict[str, Any]) -> None:
        args = AdafactorArgs.array(len(params))
        dense = [p.detach().contiguous() for p in params]  # rows and columns lie as the kernels count them
        grads = [p.grad.contiguous() for p in params if p.grad is not None]
        shapes = [matrices_of(p.shape) for p in params]
        scratch, at = Scratch(sum(m.factors for m in shapes if m is not None), device), 0
        blocks = [blocks_of(0, p.numel()) for p in params]
        sums = torch.empty(2, sum(blocks), dtype=torch.float64, device=device)
        for a, p, q, g, m, of_p, of_u in zip(args, params, dense, grads, shapes, *(row.split(blocks) for row in sums)):
            state = self.state[p]
            a.param, a.grad, a.n = q.data_ptr(), g.data_ptr(), p.numel()
            a.param_dtype, a.grad_dtype = code(q.dtype), code(g.dtype)
            a.param_sums, a.update_sums = of_p.data_ptr(), of_u.data_ptr()
            set_scalars(a, group, int(state["step"]), 1.0, p.dtype)
            check_beside(p, (s for n, s in state.items() if n != "step"))
            check_numel(p, "grad", g, p.numel())
            sizes = {"variance": p.numel()} if m is None else dict(zip(FACTORS, (m.number * m.rows, m.number * m.cols)))
            for n, size in sizes.items():
                check_numel(p, n, state[n], size)
                state[n] = state[n].contiguous()
            if m is None:
                a.variance = state["variance"].data_ptr()
            else:
                scratch.aim(a, m, at, *(state[n].data_ptr() for n in FACTORS))
                at += m.factors
        for which in ("tops", "sums", "factors", "norms"):
            run_on(device, f"adafactor_{which}", args, len(params))
        for a, p, *found in zip(args, params, *(row.split(blocks) for row in sums.cpu())):
            squares = sum_in_order(found[0]), sum_in_order(found[1])
            a.rate = rate_of(squares, p.numel(), group, int(self.state[p]["step"]))
        run_on(device, "adafactor_apply", args, len(params))
        for p, q in zip(params, dense):
            if q.data_ptr() != p.data_ptr():
                p.copy_(q)
        torch.autograd.graph.increment_version(list(params))

    def _step_float64(self, p: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any]) -> None:
        from ...core.foreign.private import adafactor

        assert p.grad is not None  # the caller has looked
        adafactor(
            [p],
            [p.grad],
            [state.get("row_var")],
            [state.get("col_var")],
            [state.get("variance")],
            [state["step"]],
            d=float(group["d"]),
            lr=group["lr"],
            beta2_decay=float(group["beta2_decay"]),
            weight_decay=float(group["weight_decay"]),
            eps1=group["eps"][0],
            eps2=float(group["eps"][1]),
            maximize=group["maximize"],
        )
