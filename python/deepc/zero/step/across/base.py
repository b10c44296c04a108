"""What the updates that go across shards share: those whose step of an element depends on more of its parameter than a
shard has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....optim.states.norms import Norms, Stretch

if TYPE_CHECKING:
    from ....plan.layout import Layout, Segment
    from ...state import ModelState
    from .sharers import Sharers


def stretch_of(layout: Layout, s: Segment) -> Stretch:
    """A segment in the flat space of all ranks."""
    return Stretch(s.param, layout.offsets[s.param] + s.param_begin, s.length)


class ShareNorms(Norms):
    """Of the parameters of a state's share: of whole ones, whoever has their other parts."""

    def __init__(self, state: ModelState, sharers: Sharers | None) -> None:
        plan, layout = state.plan, state.plan.layout
        alone = plan.own_all or plan.world == 1
        ranks = [plan.segments] if alone else [layout.segments(state.group.part_of(r)) for r in range(plan.world)]
        stretches = [[stretch_of(layout, s) for s in one] for one in ranks]
        gather = None if alone else state.group.gather_all
        super().__init__(stretches, 0 if alone else plan.rank, gather, sharers is not None, state.state_device)
        self._sharers = sharers

    def squares(self) -> dict[int, tuple[float, float]]:
        """See Norms. Collective over those that hold the other shards too."""
        found = super().squares()
        return found if self._sharers is None else self._sharers.squares(found)


class AcrossUpdate:
    """The answers of an update whose states are in memory."""

    def finish(self) -> None:
        """The rest of an update that a disk has broken off: there is none in memory."""

    def forget(self) -> None:
        """All states are written anew: there is no rest of an update."""
