"""An update's passes over a share of which something lies on disk: masters and moments (the tier), parameters and
gradients (the walk), cell after cell. What an update does there with an element depends on that element and on numbers
that all have, so the share may be cut anywhere (at edges of blocks where it sums over these)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...state import ModelState, Pass, Walk
from ...tiers.agree import together

if TYPE_CHECKING:
    from ....errors import DiskError
    from ....offload import Cell
    from ...tiers.disk import DiskTier
    from .sharers import Sharers

Work = Callable[[int, int, "Cell | None"], None]  # elements [begin, end) of the share, and the tier's cell of them


class Passes:
    """tier, walk: of the state, or None. sharers: the ranks that hold the other shards of parameters, where these are
    cut."""

    def __init__(self, state: ModelState, sharers: Sharers | None = None) -> None:
        self._state, self._sharers = state, sharers
        self.walk: Walk | None = state.walk() if state.state_device.type == "cpu" else None
        self.alone = state.plan.own_all or state.plan.world == 1

    @property
    def tier(self) -> DiskTier | None:
        return self._state.tier

    @property
    def in_memory(self) -> bool:
        """Nothing lies on disk: there are no cells."""
        return self.tier is None and self.walk is None

    def run(self, work: Work, what: Pass, states: bool = True, writes: Sequence[str] | None = None) -> None:
        """Calls `work` on every cell, in order, when what the pass wants is in memory. states: it wants the tier's
        arrays; writes: those that it changes (None: all). After a DiskError another call goes on where this one has
        failed."""
        tier, walk = self.tier if states else None, self.walk

        def one(begin: int, end: int, cell: Cell | None) -> None:
            if walk is not None:
                walk.ready()
            work(begin, end, cell)
            if walk is not None:
                walk.done()

        try:
            if walk is not None:
                walk.begin(what)
            if tier is not None:
                tier.update(lambda c: one(c.begin, c.end, c), writes)
            else:
                for cell in walk.cells[walk.at :] if walk is not None else ():
                    one(cell.begin, cell.end, None)
            if walk is not None:
                walk.end()
        except BaseException:
            if walk is not None:
                walk.pause()
                if tier is not None:
                    tier.at = walk.at
            raise

    def agree(self, failure: DiskError | None) -> None:
        """After a pass that the next one depends on: raises unless all ranks have made it. Collective where something
        lies on disk and shards are of several ranks."""
        if not self._state.plan.updates_on_disk:
            return
        if not self.alone:
            together(self._state.group, failure, self._sharers)
        elif self._sharers is not None:
            together(self._sharers, failure)
        elif failure is not None:
            raise failure

    def forget(self) -> None:
        """All is about to be written anew: there is nothing to go on with."""
        if self.walk is not None:
            self.walk.forget()
