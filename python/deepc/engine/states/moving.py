"""States of an engine between memory and disk, and between a GPU and host memory, while it trains
(engine.offload_states, reload_states)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch

from ...core import memory
from ...errors import ArgumentError, DeepcError, MisuseError, UnsupportedError
from ...optim.factory import check_on_disk
from ...optim.rules import ONEBIT
from ...plan.derive import disk_states, with_states
from ...zero.tiers.agree import run_together, together
from ...zero.tiers.disk import open_tier, preflight
from ...zero.tiers.parked import AWAY, HostCopies
from ...zero.tiers.split import parts_of
from ...zero.tiers.windows import Array, Parked, Window

if TYPE_CHECKING:
    from ...plan.plan import Plan
    from ..base import EngineBase

# Of a GPU run, by DeepSpeed's names. Its two buffers of gradients are one here.
MOVABLE = ("optim_states", "hp_params", "lp_grads", "contiguous_grad_buffer")


def offload(engine: EngineBase, folder: str | None, include: Iterable[str] | None = None, locked: bool = True) -> None:
    """Collective. See Engine.offload_states."""
    plan, optimizer = engine.plan, engine.optimizer
    if engine.device.type != "cpu" and not folder:
        _park(engine, include, locked)
        return
    if include is not None:
        raise ArgumentError("offload_states: include= is for a run on a GPU; masters and moments go to disk together")
    if plan.disk is not None:
        return
    _check(engine)
    folder = folder or engine._config.zero.offload_optimizer.nvme_path
    if not folder:
        raise ArgumentError(
            "offload_states: no folder; pass nvme_path=, or set zero_optimization.offload_optimizer.nvme_path"
        )
    arrays, nbytes = optimizer.form_on_disk
    disk = disk_states(
        engine._config, arrays, plan.has_master, plan.owned_elems, folder, nbytes, whole_blocks=optimizer.whole_blocks
    )
    if disk is None:
        return
    _move(engine, with_states(plan, 0 if arrays else plan.bytes["states_private"], disk))
    if engine.state.tier is not None:
        engine._undo.callback(engine.state.tier.close)


def reload(engine: EngineBase) -> None:
    """Collective. See Engine.reload_states."""
    tier, optimizer = engine.state.tier, engine.optimizer
    if engine.parked is not None:
        _unpark(engine)
        return
    if engine.plan.disk is None or tier is None:
        return
    if engine._config.zero.offload_optimizer.device == "nvme":
        return  # the configuration put them there, not offload_states
    _check(engine)
    states = engine.plan.owned_elems * optimizer.moments * optimizer.state_bytes // 256
    _move(engine, with_states(engine.plan, states, None))
    tier.close()


def _move(engine: EngineBase, plan: Plan) -> None:
    """Masters and states go where `plan` has them, to disk or into memory. On all ranks, or on none. Collective."""
    state, optimizer = engine.state, engine.optimizer
    before, master, tier = state.tier, state.master, None
    with contextlib.ExitStack() as undo:
        failure: Exception | None = None
        try:
            if plan.disk is not None:
                preflight(plan)
                tier = open_tier(plan, optimizer.names_on_disk)
                undo.callback(tier.close)
            state.tier = tier
            there = state.states("master") if master is not None else None
            if master is not None and there is not None:
                Window(master).copy_into(Window(there))
                state.master = there
            home = optimizer.new_home()
            if tier is not None:
                tier.stream.flush()
        except DeepcError as exc:
            failure = exc
        finally:
            state.tier, state.master = before, master
        together(engine.everyone, failure)
        undo.pop_all()
    state.tier = tier
    engine.plan = state.plan = plan
    optimizer.move(home, there)
    memory.trim_heap()


def _check(engine: EngineBase) -> None:
    """What states can't be moved."""
    if engine.broken_step:
        raise DeepcError(engine.broken_step)
    check_on_disk(engine.optimizer.base)
    why = (
        "of a GPU run"
        if engine.device.type != "cpu"
        else f"of {type(engine.optimizer.base).__name__}, which torch steps in memory"
        if not engine.optimizer.core
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


# ---- of a GPU run ----------------------------------------------------------------------------------------------------
def _park(engine: EngineBase, include: Iterable[str] | None, locked: bool) -> None:
    names = _names(include)
    if engine.parked is not None or (engine.state.state_device.type == "cpu" and engine.plan.host_elems is None):
        return
    if engine.broken_step:
        raise DeepcError(engine.broken_step)
    if engine.hooks.blocked:
        raise DeepcError(engine.hooks.blocked)
    if engine.hooks.open:
        raise MisuseError("offload_states inside of a backward pass; call it behind one")
    rule, state, optimizer = engine.optimizer.rule, engine.state, engine.optimizer
    if rule is not None and rule.kind == ONEBIT and "optim_states" in names:
        raise UnsupportedError(
            f"optimizer states of {type(optimizer.base).__name__} can't be moved: they are exchanged from where they"
            " lie"
        )
    tensors = [(t, wanted) for t, wanted in _on_device(engine, names) if t.device.type == engine.device.type]
    failure: Exception | None = None
    copies = None
    try:
        copies = HostCopies(tensors, locked)
    except DeepcError as exc:
        failure = exc
    try:
        together(engine.everyone, failure)
    except DeepcError:
        if copies is not None:
            copies.bring_back()
        raise
    assert copies is not None  # else there was a failure
    engine.parked, engine._stands = copies, {}
    if "hp_params" in names and state.master is not None:
        engine._stands["master"], state.master = state.master, _parked("master", state.master)
    if names & {"lp_grads", "contiguous_grad_buffer"}:
        engine._stands["acc"], state.acc = state.acc, cast(torch.Tensor, _parked("acc", state.acc))
    if "optim_states" in names:
        optimizer.park({n: _parked(n, a) for n, a in optimizer.states.items()} if optimizer.core else {})
        copies.release()  # what torch's optimizers had there
    engine.hooks.blocked = AWAY


def _unpark(engine: EngineBase) -> None:
    parked = engine.parked
    assert parked is not None  # the caller has looked

    def bring() -> None:
        parked.bring_back()
        engine.optimizer.bring_twins()

    run_together(engine.everyone, bring)
    for name, array in engine._stands.items():
        setattr(engine.state, name, array)
    engine._stands.clear()
    engine.parked, engine.hooks.blocked = None, ""
    engine.optimizer.unpark()


def _names(include: Iterable[str] | None) -> set[str]:
    if include is None:
        return set(MOVABLE)
    names = {str(getattr(n, "value", n)) for n in include}
    if "lp_params" in names:
        raise UnsupportedError(
            "offload_states: parameters in the model's dtype (lp_params) stay on the GPU, where a forward needs them;"
            f" move {', '.join(MOVABLE[:3])}, or keep parameters in host memory from the start"
            " (zero_optimization.offload_param, docs/gpu-memory.md)"
        )
    if unknown := sorted(names - set(MOVABLE)):
        raise ArgumentError(f"offload_states: include has {unknown[0]!r}; there are {', '.join(MOVABLE)}")
    return names


def _on_device(engine: EngineBase, names: set[str]) -> Iterator[tuple[torch.Tensor, bool]]:
    """(a tensor, whether its contents are wanted again) of what is named."""
    state: Any = engine.state
    if "hp_params" in names and state.master is not None and engine.plan.disk is None:
        yield from ((t, True) for t in parts_of(state.master))
    if names & {"lp_grads", "contiguous_grad_buffer"}:
        yield from ((t, engine.hooks.accumulated) for t in parts_of(state.acc))
    if "optim_states" in names and engine.optimizer.core:
        yield from ((t, True) for t in engine.optimizer.device_states())


def _parked(name: str, array: Array) -> Parked:
    return Parked(name, len(array), array.dtype)
