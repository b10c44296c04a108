"""Squared norms of whole parameters, of sums that the core makes of fixed blocks of the flat space: in one order, so
that they do not depend on who has which block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ...core.lib import C
from ...core.ops import BLOCK


def blocks_of(first: int, length: int) -> int:
    """dc_lamb_blocks."""
    return (first + length - 1) // BLOCK - first // BLOCK + 1 if length else 0


def sum_in_order(values: torch.Tensor) -> float:
    """In index order, in fp64."""
    total: float = C.dc_sum_partials(values.data_ptr(), values.numel())
    return total


class Stretch(NamedTuple):
    """A rank's part of a parameter: `length` elements of it from `first` of the flat space of all ranks on."""

    param: int
    first: int
    length: int


class Norms:
    """Sums of squares for whole parameters, of those of blocks that the ranks have: in the order of the flat space, so
    that they do not depend on who has them."""

    def __init__(
        self,
        ranks: Sequence[Sequence[Stretch]],
        mine: int,
        gather: Callable[[torch.Tensor], torch.Tensor] | None,
        all_parameters: bool = False,
        device: torch.device | None = None,
    ) -> None:
        """ranks: the stretches of each. gather: all ranks' rows of one rank's [n]; None: this rank has everything.
        all_parameters: the norms are wanted of those too of which this rank has nothing. device: where the core makes
        the sums of blocks; None: on the CPU."""
        self._gather = gather
        self._at: dict[tuple[int, Stretch], int] = {}
        sizes = []
        for rank, stretches in enumerate(ranks):
            at = 0
            for s in stretches:
                self._at[rank, s] = at
                at += blocks_of(s.first, s.length)
            sizes.append(at)
        self._size = max(sizes, default=0)
        self.sums = torch.zeros(2, self._size, dtype=torch.float64, device=device or torch.device("cpu"))
        self._mine = mine
        needed = {s.param for of in (ranks if all_parameters else [ranks[mine]]) for s in of}
        self._places: dict[int, list[tuple[int, int, int]]] = {p: [] for p in needed}
        for (rank, s), at in sorted(self._at.items(), key=lambda item: item[0][1].first):
            if s.param in needed:
                self._places[s.param].append((rank, at, blocks_of(s.first, s.length)))

    def address(self, kind: int, s: Stretch) -> int:
        """Where the core writes the sums of blocks of one of this rank's stretches; kind: 0 parameter, 1 update."""
        return int(self.sums[kind].data_ptr() + 8 * self._at[self._mine, s])

    def squares(self) -> dict[int, tuple[float, float]]:
        """parameter -> (its square, the update's). Collective."""
        gathered = self.sums.view(1, -1) if self._gather is None else self._gather(self.sums.view(-1))
        rows = gathered.cpu().view(-1, 2, self._size)
        found = {}
        for param, places in self._places.items():
            rank_of = (lambda rank: rank) if self._gather is not None else (lambda rank: 0)
            parts = [torch.cat([rows[rank_of(r), kind, at : at + n] for r, at, n in places]) for kind in (0, 1)]
            found[param] = (sum_in_order(parts[0].contiguous()), sum_in_order(parts[1].contiguous()))
        return found
