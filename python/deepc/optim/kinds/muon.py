"""Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon): the momentum of a matrix, made orthogonal by
Newton-Schulz iterations, with AdamW for what is no matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ...errors import ArgumentError, UnsupportedError
from ..states.dense import Optimizer, check_betas, check_range, is_number, loss_of, new_states, packed_item
from ..states.formats import (
    ADAMW,
    DECOUPLED,
    MOMENTS,
    PackedStep,
    check_place,
    check_state_dtype,
    has_codes,
    step_momentum,
    step_packed,
    take_states,
)

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
METHODS = ("standard", "gram")
RESTART = 3  # iterations of "gram" on one Gram matrix, whose rounding grows with them
NOT_FOR_MUON = ("embed", "lm_head")  # parts of names of matrices that AdamW is meant for


def orthogonalize(
    matrix: torch.Tensor,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    steps: int = 5,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
    method: str = "standard",
) -> torch.Tensor:
    """About U V^T of the singular value decomposition U S V^T of a 2-D matrix: a quintic iteration after which all
    singular values are near 1 (0.5 to 1.5), by matrix products in `dtype`. method: one of METHODS."""
    a, b, c = coefficients
    x = matrix.to(dtype)
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    x = x / x.norm().clamp(min=eps)
    if method == "gram" and x.size(0) < x.size(1):
        x = _by_gram(x, coefficients, steps)
    else:
        for _ in range(steps):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def _by_gram(x: torch.Tensor, coefficients: tuple[float, float, float], steps: int) -> torch.Tensor:
    """The same iterations on the small side's Gram matrix G = x x^T: an iteration multiplies x by the polynomial
    q = a + b G + c G^2 of G from the left, and so G by q from both sides. The products of the q meet x every RESTART
    iterations alone."""
    a, b, c = coefficients
    for first in range(0, steps, RESTART):
        gram = x @ x.T
        product: torch.Tensor | None = None
        for i in range(first, min(first + RESTART, steps)):
            q = torch.addmm(gram, gram, gram, beta=b, alpha=c)
            q.diagonal().add_(a)
            product = q if product is None else q @ product
            if i + 1 < min(first + RESTART, steps):
                gram = q @ gram @ q
        assert product is not None  # first < steps
        x = product @ x
    return x


def orthogonalize_as(group: Mapping[str, Any], matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """orthogonalize, with a param group's options."""
    return orthogonalize(
        matrix, group["ns_coefficients"], group["ns_steps"], group["eps"], dtype, group.get("ns_method", "standard")
    )


def scale_of(group: Mapping[str, Any], rows: int, columns: int) -> float:
    """The factor on lr for a matrix of this shape."""
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns)) if columns else 1.0


def choose_by_name(named: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
    """Matrices that are no embeddings and output layers by their names become Muon's, all other parameters AdamW's,
    where nobody has said it (`use_muon`)."""
    for name, p in named:
        if not hasattr(p, "use_muon"):
            p.use_muon = p.dim() == 2 and not any(  # type: ignore[attr-defined]  # DeepSpeed's name
                part in name.lower() for part in NOT_FOR_MUON
            )


def _unnamed(p: Any) -> Any:
    """The parameter of (name, parameter); what is no such pair as it is, which torch judges."""
    return p[1] if isinstance(p, tuple) and len(p) == 2 else p


def _wants_muon(p: Any) -> bool:
    return isinstance(p, torch.Tensor) and bool(getattr(p, "use_muon", p.dim() == 2))


def in_both_kinds(params: Sequence[Any]) -> list[dict[str, Any]]:
    """Parameters, or groups of them, as groups of matrices and of the rest, were one of the two empty: the stages of a
    pipeline have equally many then, whichever layers they have."""
    out: list[dict[str, Any]] = []
    for group in params if params and isinstance(params[0], dict) else [{"params": list(params)}]:
        if "use_muon" in group:
            out.append(group)
            continue
        for use, whose in ((True, "muon_lr"), (False, "adam_lr")):
            part = [p for p in group["params"] if _wants_muon(_unnamed(p)) is use]
            own = {"lr": group[whose]} if whose in group else {}
            out.append({**group, "params": part, "use_muon": use, **own})
    return out


def check_group(group: Mapping[str, Any]) -> None:
    """ArgumentError for what a group says of matrices and no step can be made with."""
    steps, three, method = group["ns_steps"], group["ns_coefficients"], group.get("ns_method", "standard")
    check_range("momentum", group["momentum"], 1.0)
    check_range("eps", group["eps"])
    if group["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
        raise ArgumentError(f"adjust_lr_fn must be 'original' or 'match_rms_adamw', got {group['adjust_lr_fn']!r}")
    are_three = isinstance(three, (tuple, list)) and len(three) == 3 and all(map(is_number, three))
    if not (isinstance(steps, int) and 0 < steps < 100) or not are_three:
        raise ArgumentError(f"ns_steps must be from 1 to 99 with three ns_coefficients, got {steps!r} and {three!r}")
    if method not in METHODS:
        raise ArgumentError(f"ns_method must be 'standard' or 'gram', got {method!r}")
    if group["ns_dtype"] not in ("bfloat16", "float32"):
        raise ArgumentError(f"ns_dtype must be 'bfloat16' or 'float32', got {group['ns_dtype']!r}")


class Muon(Optimizer):
    """torch.optim.Muon's arguments and state (`momentum_buffer`), and parameters of any number of dimensions: matrices
    are stepped by Muon with muon_lr (None: lr), all others by AdamW with adam_lr (None: lr), adam_betas, adam_eps and
    the same weight_decay. A parameter with an attribute `use_muon` decides for itself (DeepSpeed's way): embeddings and
    output layers are matrices that Muon is not meant for. Each param group is divided in two by that, with `use_muon`
    and its own `lr` in each.

    ns_method: "standard", or "gram": the same iterations on the Gram matrix of the smaller side, which takes fewer
    products where the sides differ (https://tridao.me/blog/2026/gram-newton-schulz). ns_dtype: of the products:
    bfloat16, as in torch, or float32, which is faster on processors without instructions for the former; None: bfloat16
    of the standard method, float32 of the other one, whose rounding grows more. state_dtype: as AdamW's but
    "int4", of momentum and of AdamW's moments.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch's; states come from any state_dtype into this one's."""
        super().load_state_dict(state_dict)
        if self.state_dtype is not None or has_codes(state_dict):
            take_states(self, state_dict, ("momentum_buffer", *MOMENTS), self.state_dtype)

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
        muon_lr: float | None = None,
        adam_lr: float | None = None,
        adam_betas: tuple[float, float] = (0.9, 0.999),
        adam_eps: float = 1e-8,
        ns_method: str = "standard",
        ns_dtype: str | None = None,
        state_dtype: str | None = None,
    ) -> None:
        self.state_dtype = check_state_dtype("Muon", state_dtype)
        if state_dtype == "int4":
            raise UnsupportedError(
                "Muon: state_dtype='int4' does not exist: the noise of 4 bits hides small directions of the momentum,"
                " which Muon makes as long as the others (a GPT's loss was 1.12 of what it is). Use 'int8'"
            )
        rates = {k: v for k, v in (("muon_lr", muon_lr), ("adam_lr", adam_lr)) if v is not None}
        for name, value in {"lr": lr, "weight_decay": weight_decay, "adam_eps": adam_eps, **rates}.items():
            check_range(name, value)
        check_betas(adam_betas, "adam_betas")
        defaults: dict[str, Any] = dict(
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_coefficients=ns_coefficients,
            eps=eps,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
            muon_lr=muon_lr,
            adam_lr=adam_lr,
            adam_betas=tuple(adam_betas),
            adam_eps=adam_eps,
            ns_method=ns_method,
            ns_dtype=ns_dtype or ("bfloat16" if ns_method == "standard" else "float32"),
        )
        check_group(defaults)
        super().__init__(params, {**defaults, "ns_coefficients": tuple(ns_coefficients)})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds one or two groups: the matrices of this one, and the rest. Parameters may have their names with them, as
        named_parameters() gives them."""
        given = param_group["params"]
        params = [given] if isinstance(given, torch.Tensor) else list(given)
        told = param_group.get("use_muon")
        muon = [_wants_muon(_unnamed(p)) for p in params]
        parts = [[p for p, m in zip(params, muon) if m is kind] for kind in (True, False)]
        for part in filter(None, parts) if told is None else [params]:
            use = _wants_muon(_unnamed(part[0])) if told is None else told
            if use and any(isinstance(p, torch.Tensor) and p.dim() != 2 for p in map(_unnamed, part)):
                raise ArgumentError("Muon steps matrices: a parameter of a group with use_muon has not 2 dimensions")
            whose = "muon_lr" if use else "adam_lr"
            divided = "use_muon" in param_group and "lr" in param_group  # before, with their rates: a copy of groups
            rate = param_group.get(whose, None if "lr" in param_group else self.defaults[whose])
            own = {} if rate is None or divided else {"lr": rate}
            super().add_param_group({**param_group, "params": part, "use_muon": bool(use), **own})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step over all parameters that have a gradient. `closure` re-evaluates the model and returns the loss."""
        loss = loss_of(closure)
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if any(p.grad.is_sparse or p.is_complex() for p in params):
                raise ArgumentError("Muon takes dense, real gradients")
            if group["use_muon"] and params:
                group["state_steps"] = count = group.get("state_steps", 0) + 1  # which random bits follow from
                for p in params:
                    self._step_matrix(p, group, count)
            elif params:
                self._step_adamw(params, group)
        return loss

    def _momentum(self, p: torch.Tensor, group: dict[str, Any], count: int) -> torch.Tensor:
        """p's momentum after this step, which is not to be written."""
        state, momentum, g, form = self.state[p], group["momentum"], p.grad, self._packed(p)
        assert g is not None  # the caller has looked
        if "momentum_buffer" not in state:
            check_place(p, form)
            new_states(state, ["momentum_buffer"], p, form, self._dtype_of(p))
        if form:
            made = torch.zeros_like(p, dtype=torch.float32, memory_format=torch.preserve_format)
            step_momentum([packed_item(self, p, made, g, ["momentum_buffer"])], form, momentum, 1.0, count)
            return made.to(p.dtype)
        buffer: torch.Tensor = state["momentum_buffer"]
        return buffer.lerp_(g.to(buffer.dtype), 1 - momentum).to(p.dtype)

    def _step_matrix(self, p: torch.Tensor, group: dict[str, Any], count: int) -> None:
        momentum, lr, g = group["momentum"], float(group["lr"]), p.grad
        assert g is not None  # the caller has looked
        buffer = self._momentum(p, group, count)
        update = g.lerp(buffer, momentum) if group["nesterov"] else buffer
        dtype = torch.float64 if p.dtype == torch.float64 else getattr(torch, group["ns_dtype"])
        update = orthogonalize_as(group, update, dtype)
        p.mul_(1 - lr * group["weight_decay"])
        p.add_(update.to(p.dtype), alpha=-lr * scale_of(group, *p.shape))

    def _step_adamw(self, params: list[torch.Tensor], group: dict[str, Any]) -> None:
        from torch.optim.adamw import adamw

        betas, lr = (float(group["adam_betas"][0]), float(group["adam_betas"][1])), float(group["lr"])
        eps, decay = float(group["adam_eps"]), float(group["weight_decay"])
        packed: dict[int, list[Any]] = {}
        plain: list[torch.Tensor] = []
        for p in params:
            form, state = self._packed(p), self.state[p]
            if not state:
                check_place(p, form)
                state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
                new_states(state, MOMENTS, p, form, self._dtype_of(p))
            if form and p.grad is not None:
                state["step"] += 1
                packed.setdefault(int(state["step"]), []).append(packed_item(self, p, p, p.grad, MOMENTS))
            else:
                plain.append(p)
        for step, items in packed.items():
            scalars = (lr, *betas, eps, decay)
            step_packed(items, PackedStep(ADAMW, self.state_dtype or "", scalars, 1.0, step, DECOUPLED))
            torch.autograd.graph.increment_version([p for p, *_ in items])
        if not plain:
            return
        adamw(
            plain,
            [p.grad.to(self._dtype_of(p)) for p in plain if p.grad is not None],
            [self.state[p]["exp_avg"] for p in plain],
            [self.state[p]["exp_avg_sq"] for p in plain],
            [],
            [self.state[p]["step"] for p in plain],
            amsgrad=False,
            beta1=betas[0],
            beta2=betas[1],
            lr=lr,
            weight_decay=decay,
            eps=eps,
            maximize=False,
        )
