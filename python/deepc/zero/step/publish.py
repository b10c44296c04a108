"""After an update: how the owners' new parameters become every rank's. One free function per kind of layout; `choose`
says which, once per engine. Before that: how parameters that the host makes for a device get there (`Sender`).

The functions take (state, group, reducer) and are collective; versions and checksums are those of
zero/parameters/guard.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from ...offload.array import Window
    from ...plan.plan import Plan
    from ..state import ModelState
    from .reducers.base import Reducer
    from .reducers.nodes import NodesReducer

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


class Sender:
    """Sends what the host's update has made of `state`'s flat space; does nothing where it is no copy of a device's."""

    def __init__(self, state: ModelState) -> None:
        self._state = state
        self._sent: torch.cuda.Event | None = None  # all of the last update is on the device

    def wait(self) -> None:
        """Returns when the host's copy may be written: what was sent has left."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self, stretches: Iterable[tuple[int, int]]) -> None:
        """Elements [begin, end) of the flat space. Until `wait` they are not to be written; `end` comes after the
        last."""
        flat, host = self._state.flat, self._state.flat_host
        if host is None:
            return
        for begin, end in stretches:
            flat[begin:end].copy_(host[begin:end], non_blocking=True)

    def end(self) -> None:
        """An update has sent what it made."""
        if self._state.flat_host is not None:
            self._sent = torch.cuda.Event()
            self._sent.record(torch.cuda.current_stream(self._state.device))

    def send_all(self) -> None:
        """All that this rank's update makes on the host."""
        st = self._state
        made = [s for s in st.plan.slices if st.host_copy(s.flat_begin, s.length) is not None]
        self.send((s.flat_begin, s.flat_begin + s.length) for s in made)
        self.end()
