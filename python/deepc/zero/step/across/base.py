"""What the updates that go across shards share: those whose step of an element depends on more of its parameter than a
shard has."""

from __future__ import annotations

from collections.abc import Iterable
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


class StepCounts:
    """How often each trained parameter was updated. Corrections of young moments and decaying weights go by a
    parameter's own count, as in torch.optim: one that was left out for a while is behind."""

    def __init__(self) -> None:
        self.total = 0  # updates
        self._missed: dict[int, int] = {}  # parameter -> those that left it out

    def begin(self, left_out: Iterable[int]) -> None:
        """Another update, without these."""
        self.total += 1
        for i in left_out:
            self._missed[i] = self.missed(i) + 1

    def missed(self, param: int) -> int:
        return self._missed.get(param, 0)

    def of(self, param: int) -> int:
        """Of the update that is made, the number among those of `param`, from 1 on."""
        return self.total - self.missed(param)

    def load(self, total: int, own: dict[int, int]) -> None:
        """total: updates; own: of parameters that have not had all of them, how many."""
        self.total, self._missed = total, {i: total - n for i, n in own.items() if n != total}


class AcrossUpdate:
    """The answers of an update whose states are in memory."""

    def finish(self) -> None:
        """The rest of an update that a disk has broken off: there is none in memory."""

    def forget(self) -> None:
        """All states are written anew: there is no rest of an update."""
