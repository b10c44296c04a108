"""Masters and moments of an engine between memory and disk, while it trains (engine.offload_states, reload_states)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from ...core import memory
from ...errors import ArgumentError, DeepcError, UnsupportedError
from ...optim.factory import check_format
from ...optim.rules import LAMB
from ...plan.derive import disk_states, with_states
from ...zero.tiers.agree import together
from ...zero.tiers.disk import DiskTier, preflight
from ...zero.tiers.windows import Array, Window

if TYPE_CHECKING:
    from ...plan.plan import Plan
    from ..base import EngineBase


def offload(engine: EngineBase, folder: str | None) -> None:
    """Collective. See Engine.offload_states."""
    plan, optimizer = engine.plan, engine.optimizer
    if plan.disk is not None:
        return
    _check(engine)
    folder = folder or engine._config.zero.offload_optimizer.nvme_path
    if not folder:
        raise ArgumentError(
            "offload_states: no folder; pass nvme_path=, or set zero_optimization.offload_optimizer.nvme_path"
        )
    master = engine.state.master
    arrays: dict[str, Array] = {**({} if master is None else {"master": master}), **optimizer.states}
    disk = disk_states(
        engine._config,
        optimizer.moments,
        plan.has_master,
        plan.owned_elems,
        folder,
        whole_blocks=optimizer.whole_blocks,
    )
    if disk is None:
        return
    moved = with_states(plan, optimizer.moments, disk)
    with contextlib.ExitStack() as undo:
        failure: Exception | None = None
        try:
            preflight(moved)
            tier = DiskTier(disk, list(arrays), plan.owned_elems)
            undo.callback(tier.close)
            _copy(arrays, dict(tier.arrays))
            tier.stream.flush()
        except DeepcError as exc:
            failure = exc
        together(engine.everyone, failure)
        undo.pop_all()
    engine._undo.callback(tier.close)
    engine.state.tier = tier
    _take(engine, moved, dict(tier.arrays))


def reload(engine: EngineBase) -> None:
    """Collective. See Engine.reload_states."""
    tier, state = engine.state.tier, engine.state
    if engine.plan.disk is None or tier is None:
        return
    _check(engine)
    arrays: dict[str, Array] = {}
    failure: Exception | None = None
    try:
        for name in tier.arrays:
            arrays[name] = state.zeros(engine.plan.owned_elems, torch.float32, name)
        _copy(dict(tier.arrays), arrays)
    except DeepcError as exc:
        failure = exc
    together(engine.everyone, failure)
    state.tier = None
    _take(engine, with_states(engine.plan, engine.optimizer.moments, None), arrays)
    tier.close()


def _check(engine: EngineBase) -> None:
    """What states can't be moved."""
    if engine.broken_step:
        raise DeepcError(engine.broken_step)
    check_format(engine.optimizer.base, engine.device.type, True)
    form = engine.optimizer.rule.form if engine.optimizer.rule is not None else ""
    why = (
        "on a GPU"
        if engine.device.type != "cpu"
        else f"of {type(engine.optimizer.base).__name__}, which torch steps in memory"
        if not engine.optimizer.core
        else f"of {type(engine.optimizer.base).__name__}, which keeps them for rows, columns or matrices"
        if not engine.optimizer.states and engine.optimizer.moments
        else f"of {type(engine.optimizer.base).__name__} over tensor-parallel ranks"
        if engine.cuts and engine.optimizer.rule is not None and engine.optimizer.rule.kind == LAMB
        else f"of state_dtype {form}"
        if form
        else 'with "precision": "auto"'
        if engine.auto_precision is not None
        else "with zero_quantized_weights"
        if engine.plan.parameters_as
        else "where parameters lie on disk (offload_param nvme)"
        if engine.plan.parameters_on
        else ""
    )
    if why:
        raise UnsupportedError(
            f"optimizer states {why} can't be moved between memory and disk while an engine is there; set"
            " zero_optimization.offload_optimizer in its configuration where that is possible (docs/tiers.md)"
        )


def _copy(given: dict[str, Array], taken: dict[str, Array]) -> None:
    for name, array in given.items():
        for part in Window(taken[name] if isinstance(array, torch.Tensor) else array).parts():
            source, target = (Window(a[name], part.begin, part.length) for a in (given, taken))
            target.write(source.read())


def _take(engine: EngineBase, plan: Plan, arrays: dict[str, Array]) -> None:
    engine.plan = engine.state.plan = plan
    engine.optimizer.take_states(arrays)
    if engine.device.type == "cpu":
        memory.trim_heap()
