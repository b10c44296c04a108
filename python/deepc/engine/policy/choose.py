"""Which policy an engine has."""

from __future__ import annotations

import torch

from ...optim.onebit.dropin import OneBitOptimizer
from ..base import EngineBase, Policy
from .onebit import OneBitShards, OneBitSteps
from .policies import AutomaticPrecision, DeterministicLayout, Plain


def choose_policy(engine: EngineBase, base: torch.optim.Optimizer) -> Policy:
    """The one that the configuration and the optimizer ask for. Collective."""
    config = engine._config
    if isinstance(base, OneBitOptimizer):
        return OneBitSteps(engine) if config.zero.stage == 0 else OneBitShards(engine, base)
    if config.precision is not None:
        return AutomaticPrecision(engine)
    if config.deepc.deterministic is not None:
        return DeterministicLayout(engine)
    return Plain(engine)
