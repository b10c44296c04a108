"""Which optimizers the core steps inside an engine, and what dc_step is told for each (ops/ops.h)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .adamw import AdamW
from .kinds import adafactor, lamb, muon
from .kinds.adafactor import Adafactor
from .kinds.adagrad import Adagrad
from .kinds.lamb import Lamb
from .kinds.lion import Lion
from .kinds.muon import Muon
from .kinds.sgd import SGD
from .onebit.dropin import OneBitOptimizer
from .states.dense import check_range
from .states.formats import ADAGRAD, ADAMW, DECOUPLED, LION, NESTEROV, SGD_RULE, check_state_dtype

LAMB = -1  # dc_lamb_moments and dc_lamb_apply
MUON = -2  # zero/step/across/matrices.py
ADAFACTOR = -3  # zero/step/across/factored.py
ONEBIT = -4  # zero/step/across/momentum.py


class Scalars(NamedTuple):
    """What of dc_step_args a param group says at one step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    flags: int


@dataclass(frozen=True)
class CoreRule:
    """An optimizer as dc_step knows it. names: all states, in the order of dc_step_args.state; keeps(group): how many
    of them its parameters use; scalars(group, step); start(group): what the states begin as; form: how they are stored,
    where that is not fp32 (optim/states/formats.py); check(group): ArgumentError for what else a group has that no step
    can be made with."""

    kind: int
    names: tuple[str, ...]
    keeps: Callable[[Mapping[str, Any]], int]
    scalars: Callable[[Mapping[str, Any], int], Scalars]
    start: Callable[[Mapping[str, Any]], float] = lambda group: 0.0
    form: str = ""
    check: Callable[[Mapping[str, Any]], None] = lambda group: None


def _form(base: torch.optim.Optimizer) -> str:
    form = getattr(base, "state_dtype", None) or ""
    return "" if form == "fp32" else form


def _adamw(base: torch.optim.Optimizer) -> CoreRule:
    decoupled = isinstance(base, torch.optim.AdamW)

    def scalars(g: Mapping[str, Any], step: int) -> Scalars:
        flags = DECOUPLED if g.get("decoupled_weight_decay", decoupled) else 0
        beta1, beta2 = (float(b) for b in g["betas"])
        return Scalars(float(g["lr"]), beta1, beta2, float(g["eps"]), float(g["weight_decay"]), flags)

    amsgrad = any(g.get("amsgrad") for g in base.param_groups)
    check_state_dtype(type(base).__name__, _form(base) or None, amsgrad)
    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 3 if amsgrad else 2]
    return CoreRule(ADAMW, names, lambda g: 3 if g.get("amsgrad") else 2, scalars, form=_form(base))


def _lion(base: torch.optim.Optimizer) -> CoreRule:
    def scalars(g: Mapping[str, Any], step: int) -> Scalars:
        beta1, beta2 = (float(b) for b in g["betas"])
        return Scalars(float(g["lr"]), beta1, beta2, 0.0, float(g["weight_decay"]), 0)

    return CoreRule(LION, ("exp_avg",), lambda g: 1, scalars, form=_form(base))


def _adagrad(base: torch.optim.Optimizer) -> CoreRule:
    def scalars(g: Mapping[str, Any], step: int) -> Scalars:
        lr = float(g["lr"]) / (1 + (step - 1) * float(g["lr_decay"]))
        return Scalars(lr, 0.0, 0.0, float(g["eps"]), float(g["weight_decay"]), 0)

    return CoreRule(
        ADAGRAD,
        ("sum",),
        lambda g: 1,
        scalars,
        lambda g: float(g["initial_accumulator_value"]),
        _form(base),
        lambda g: check_range("lr_decay", g["lr_decay"]),
    )


def _sgd(base: torch.optim.Optimizer) -> CoreRule:
    def scalars(g: Mapping[str, Any], step: int) -> Scalars:
        flags = NESTEROV if g["nesterov"] else 0
        return Scalars(
            float(g["lr"]), float(g["momentum"]), float(g["dampening"]), 0.0, float(g["weight_decay"]), flags
        )

    names = ("momentum_buffer",) if any(g["momentum"] for g in base.param_groups) else ()
    return CoreRule(SGD_RULE, names, lambda g: int(bool(g["momentum"])), scalars, form=_form(base) if names else "")


def _lamb(base: torch.optim.Optimizer) -> CoreRule:
    def scalars(g: Mapping[str, Any], step: int) -> Scalars:
        beta1, beta2 = (float(b) for b in g["betas"])
        return Scalars(float(g["lr"]), beta1, beta2, float(g["eps"]), float(g["weight_decay"]), 0)

    return CoreRule(LAMB, ("exp_avg", "exp_avg_sq"), lambda g: 2, scalars, form=_form(base), check=lamb.check_group)


def _muon(base: torch.optim.Optimizer) -> CoreRule:
    def scalars(g: Mapping[str, Any], step: int) -> Scalars:
        beta1, beta2 = (float(b) for b in g["adam_betas"])
        return Scalars(float(g["lr"]), beta1, beta2, float(g["adam_eps"]), float(g["weight_decay"]), DECOUPLED)

    return CoreRule(
        MUON,
        ("momentum_buffer", "exp_avg", "exp_avg_sq"),
        lambda g: 1 if g["use_muon"] else 2,
        scalars,
        form=_form(base),
        check=muon.check_group,
    )


def _adafactor(base: torch.optim.Optimizer) -> CoreRule:
    def scalars(g: Mapping[str, Any], step: int) -> Scalars:
        return Scalars(float(g["lr"]), 0.0, 0.0, 0.0, float(g["weight_decay"]), 0)

    return CoreRule(ADAFACTOR, ("row_var", "col_var", "variance"), lambda g: 3, scalars, check=adafactor.check_group)


def _onebit(base: OneBitOptimizer) -> CoreRule:
    def scalars(g: Mapping[str, Any], step: int) -> Scalars:
        beta1, beta2 = (float(b) for b in g["betas"])
        return Scalars(float(g["lr"]), beta1, beta2, float(g["eps"]), float(g["weight_decay"]), DECOUPLED)

    names = base.kind.names
    return CoreRule(ONEBIT, names, lambda g: len(names), scalars)


def _steps_as(base: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> bool:
    """Whether `base` is of this class of deepc's, or of one derived from it that has no step of its own."""
    return isinstance(base, kind) and inspect.unwrap(type(base).step) is inspect.unwrap(kind.step)


def core_rule(base: torch.optim.Optimizer) -> CoreRule | None:
    """The rule that steps `base` in C: deepc's, and torch's Adam, AdamW and Adafactor. None: its own step() does."""
    if any(g.get("differentiable") for g in base.param_groups):
        return None
    if _steps_as(base, AdamW) or type(base) in (torch.optim.Adam, torch.optim.AdamW):
        return _adamw(base)
    if _steps_as(base, Adafactor) or type(base) is torch.optim.Adafactor:
        return _adafactor(base)
    if isinstance(base, OneBitOptimizer):
        return _onebit(base)
    for kind, make in ((Lion, _lion), (Adagrad, _adagrad), (SGD, _sgd), (Lamb, _lamb), (Muon, _muon)):
        if _steps_as(base, kind):
            return make(base)
    return None
