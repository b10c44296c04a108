"""The update where parameters, and perhaps gradients, lie on disk: cell after cell of the rank's shard, whose values
come to the addresses of their windows before their turn, and are written behind it."""

from __future__ import annotations

from collections.abc import Sequence

from ...offload.array import Window
from ...plan.layout import Slice
from ..state import Cell, Pass

AHEAD = 6  # cells that are read before their turn; as many may wait for their writes
CELL_ELEMS = 1 << 18  # where the plan says nothing


def cells_of(slices: Sequence[Slice], elems: int) -> list[Cell]:
    """A shard in cells of `elems` elements, whole blocks."""
    total = sum(s.length for s in slices)
    out: list[Cell] = []
    for lo in range(0, total, elems):
        hi = min(total, lo + elems)
        parts: list[tuple[int, int]] = []
        for s in slices:
            a, z = max(lo, s.shard_begin), min(hi, s.shard_begin + s.length)
            if a < z:
                at = s.flat_begin + a - s.shard_begin
                if parts and parts[-1][1] == at:
                    parts[-1] = (parts[-1][0], at + z - a)
                else:
                    parts.append((at, at + z - a))
        out.append(Cell(lo, hi, tuple(parts)))
    return out


class CellWalk:
    """begin; for each cell from `at` on { ready; work on it; done }; end. After a DiskError `pause`: cells that are
    done are done, what could not be written stays in memory, and `begin` goes on from `at`. A step has one walk or
    several, whose passes (state.Pass) say what each wants.

    flat: the window of the flat space; sums: of the shard's gradients on disk, or None."""

    def __init__(self, cells: Sequence[Cell], flat: Window, sums: Window | None) -> None:
        self.cells, self.at = cells, 0
        self._flat, self._sums = flat, sums
        self._what = Pass()

    def begin(self, what: Pass) -> None:
        """Where parameters are stored that are not wanted, they are overwritten whole."""
        self._what = what
        self._flat.flush()
        for cell in self.cells[self.at : self.at + AHEAD]:
            self._fetch(cell)

    def _fetch(self, cell: Cell) -> None:
        for lo, hi in cell.flat if self._what.reads else ():
            self._flat.fetch(lo, hi)
        if self._sums is not None and self._what.gradients:
            self._sums.fetch(cell.begin, cell.end)

    def ready(self) -> Cell:
        """The next cell, when its values are there."""
        if self.at + AHEAD < len(self.cells):
            self._fetch(self.cells[self.at + AHEAD])
        cell = self.cells[self.at]
        for lo, _ in cell.flat:
            self._flat.ready(lo)
        if self._sums is not None:
            self._sums.ready(cell.begin)
        return cell

    def done(self) -> None:
        """It goes to the disk, if the pass stores it. Raises nothing: what becomes of the write, `end` tells."""
        cell = self.cells[self.at]
        self.at += 1
        leave = self._flat.store if self._what.stores else self._flat.drop
        for lo, hi in cell.flat:
            leave(lo, hi)
        self._flat.settle(AHEAD * len(cell.flat))
        if self._sums is not None:
            self._sums.drop(cell.begin, cell.end)

    def end(self) -> None:
        """All cells are done: when this returns they are on disk."""
        self._flat.settle()
        self._flat.flush()
        self.at = 0

    def forget(self) -> None:
        """All parameters are about to be written: there is nothing to go on with."""
        self.at = 0
        self._flat.forget()

    def pause(self) -> None:
        """After a failure."""
        self._flat.settle()
        self._flat.abandon()
        if self._sums is not None:
            self._sums.abandon()
