"""After an update: how the owners' new parameters become every rank's. One free function per kind of layout; `choose`
says which, once per engine.

All take (state, group, reducer) and are collective; versions and checksums are those of zero/parameters/guard.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch

    from ...offload.array import Window
    from ...plan.plan import Plan
    from ..state import ModelState
    from .nodes import NodesReducer
    from .reducer import Reducer

Publish = Callable[["ModelState", Any, "Reducer"], None]


def keep(state: ModelState, group: Any, reducer: Reducer) -> None:
    """Every rank has made all of the update itself: one rank, or stage 0."""


def complete_replicas(state: ModelState, group: Any, reducer: Reducer) -> None:
    """Stages 1 and 2: each rank's replica gets the other owners' slices."""
    reducer.gather(state.flat)


def fence(state: ModelState, group: Any, reducer: Reducer) -> None:
    """Stage 3: the owners have written where everybody reads."""
    group.node_barrier()


def _masters(state: ModelState) -> torch.Tensor | None:
    """In memory: what crosses quantised is made of them (derive.py refuses it where they lie on disk)."""
    return cast("torch.Tensor | None", state.master) if state.plan.parameters_as else None


def send_replicas(state: ModelState, group: Any, reducer: Reducer) -> None:
    """Stages 1 and 2 over several nodes: slices cross once per node, and the ranks of a node complete their
    replicas."""
    cast("NodesReducer", reducer).publish(state.flat, _masters(state), False)


def send_shared(state: ModelState, group: Any, reducer: Reducer) -> None:
    """Stage 3 over several nodes."""
    cast("NodesReducer", reducer).publish(state.flat, _masters(state), True)
    group.node_barrier()


def send_on_disk(state: ModelState, group: Any, reducer: Reducer) -> None:
    """Stage 3 over several nodes, each with a file of the parameters. DiskError: of this rank's disk; the ranks agree
    where it is caught."""
    failure = cast("NodesReducer", reducer).publish_on_disk(cast("Window", state.flat_on_disk))
    group.node_barrier()
    if failure is not None:
        raise failure


def choose(plan: Plan) -> Publish:
    if plan.world == 1 or plan.stage == 0:
        return keep
    if plan.nodes > 1:
        return send_replicas if plan.stage < 3 else send_on_disk if plan.parameters_on else send_shared
    return fence if plan.stage == 3 else complete_replicas
