"""What ranks that hold the other shards of this rank's parameters (tensor parallelism) tell each other in a step whose
arithmetic is of whole parameters: squared norms, sums over rows and columns, whole matrices. All that is added up is
added in the order of these ranks, so that they have equal bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch


class Cut(Protocol):
    """parallel/tensor/cut.py's, as far as a step needs it."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dim(self) -> int: ...
    @property
    def parts(self) -> tuple[tuple[tuple[int, int], ...], ...]: ...
    def local_shape(self, rank: int) -> tuple[int, ...]: ...
    def take(self, whole: torch.Tensor, rank: int | None = None) -> torch.Tensor: ...
    def from_order(self, shards: torch.Tensor) -> torch.Tensor: ...


class Sharers:
    """cuts: trained parameter (its flat index, the same on all these ranks) -> how it is cut. gather: ([n] of this
    rank, n of each) -> those of all, one after another; collective over them."""

    def __init__(
        self,
        cuts: Mapping[int, Cut],
        rank: int,
        size: int,
        gather: Callable[[torch.Tensor, Sequence[int]], torch.Tensor],
    ) -> None:
        self.cuts, self.rank, self.size, self._gather = dict(sorted(cuts.items())), rank, size, gather

    def gather_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """[size, n] all ranks' [n]. Collective."""
        return self._gather(tensor, (tensor.numel(),) * self.size).view(self.size, -1)

    def shape(self, param: int, local: Sequence[int]) -> tuple[int, ...]:
        """Of a whole parameter; local: of what is here."""
        return self.cuts[param].shape if param in self.cuts else tuple(local)

    def numels(self, local: Sequence[int]) -> list[int]:
        """Elements of the whole parameters; local: of what is here of each."""
        return [math.prod(self.cuts[i].shape) if i in self.cuts else n for i, n in enumerate(local)]

    def squares(self, found: Mapping[int, tuple[float, float]]) -> dict[int, tuple[float, float]]:
        """The squares of whole parameters from those of the shards here, of which every one must be there; of what is
        not cut those of the first rank, for shards of unequal sizes have it in other blocks, which are added up in
        another order. Collective."""
        mine = torch.tensor([found[p] for p in sorted(found)], dtype=torch.float64, device="cpu")
        rows = self.gather_all(mine.view(-1)).view(self.size, -1, 2)
        total = torch.zeros_like(mine)
        for row in rows:
            total += row
        sums = zip(total.tolist(), rows[0].tolist())
        return {p: tuple(added if p in self.cuts else first) for p, (added, first) in zip(sorted(found), sums)}

    def wholes(self, shards: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Whole parameters of this rank's shards ([n] each, of equal dtypes); the ranks ask for the same ones.
        Collective."""
        sizes = [[math.prod(self.cuts[p].local_shape(r)) for p in shards] for r in range(self.size)]
        rows = self._gather(torch.cat(list(shards.values())), [sum(s) for s in sizes]).split([sum(s) for s in sizes])
        parts = [dict(zip(shards, row.split(s))) for row, s in zip(rows, sizes)]
        return {p: self.cuts[p].from_order(torch.cat([part[p] for part in parts])) for p in shards}

    def shared_out(
        self, matrices: Iterable[int], make: Callable[[int], torch.Tensor], like: torch.dtype
    ) -> dict[int, torch.Tensor]:
        """[n] this rank's shard of make(p), a whole parameter, for each of `matrices`: each is made by one rank, the
        dearest first by the one that has least to do. Collective."""
        loads, owner = [0.0] * self.size, dict[int, int]()
        cost = {p: float(min(self.cuts[p].shape)) * math.prod(self.cuts[p].shape) for p in matrices}
        for p in sorted(cost, key=lambda p: (-cost[p], p)):
            owner[p] = loads.index(min(loads))
            loads[owner[p]] += cost[p]
        of = [[p for p in cost if owner[p] == r] for r in range(self.size)]
        numels = [[math.prod(self.cuts[p].shape) for p in some] for some in of]
        made = [make(p).reshape(-1) for p in of[self.rank]]
        mine = torch.cat(made) if made else torch.empty(0, dtype=like, device="cpu")
        widths = [sum(n) for n in numels]
        out = {}
        for some, sizes, row in zip(of, numels, self._gather(mine, widths).split(widths)):
            for p, whole in zip(some, row.split(sizes)):
                out[p] = self.cuts[p].take(whole.view(self.cuts[p].shape)).view(-1)
        return out
