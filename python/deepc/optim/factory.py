"""Optimizers by name: which there are, how one is made, and what may be done with it under ZeRO."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..errors import ArgumentError
from .adamw import Adam, AdamW

OURS: dict[str, type[torch.optim.Optimizer]] = {"Adam": Adam, "AdamW": AdamW}

# Classes whose update of an element depends on that element only: ZeRO may cut their tensors anywhere.
ELEMENTWISE = frozenset(
    {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)


def torch_classes() -> dict[str, type[torch.optim.Optimizer]]:
    """torch.optim's optimizers by name."""
    return {
        n: c
        for n, c in vars(torch.optim).items()
        if inspect.isclass(c) and issubclass(c, torch.optim.Optimizer) and c is not torch.optim.Optimizer
    }


def make_optimizer(
    kind: str, params: Mapping[str, Any], parameters: Iterable[Any], *, backend: str = "deepc"
) -> torch.optim.Optimizer:
    """The optimizer of class `kind`, of deepc.optim (`backend` "deepc") or torch.optim ("torch"), over `parameters`
    with the arguments `params`. ArgumentError for a class that is not there."""
    classes = OURS if backend == "deepc" else torch_classes()
    if kind not in classes:
        raise ArgumentError(f"optimizer {kind!r}: {backend}.optim has {', '.join(sorted(classes))}")
    return classes[kind](parameters, **params)


def takes_core_path(optimizer: torch.optim.Optimizer) -> bool:
    """True if `optimizer` is Adam or AdamW, torch's or ours, with options that the C step has."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) and not isinstance(optimizer, AdamW):
        return False
    return not any(g.get("differentiable") for g in optimizer.param_groups)
