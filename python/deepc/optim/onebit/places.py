"""Where tensors lie in the buffer that the ranks exchange."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .exchange import BLOCK


class Places:
    """`begins[i]`: where tensor i of `numels` begins in a buffer of `total` elements. Each begins a block of its own,
    so that no block's one magnitude is that of two tensors; what is left of its last block is filled with repeats of
    the elements there (fill), whose mean magnitude then is theirs. `used` is the end of the last tensor's last block;
    each of `world` ranks gets the same number of blocks."""

    def __init__(self, numels: Sequence[int], world: int) -> None:
        self.numels, self.begins = list(numels), []
        at, to, source = 0, [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
        for n in numels:
            self.begins.append(at)
            end, tail = at + n, n % BLOCK
            at += -(-n // BLOCK) * BLOCK
            if tail:
                to.append(torch.arange(end, at))
                source.append(end - tail + torch.arange(at - end) % tail)
        self._to, self._source = torch.cat(to), torch.cat(source)
        self.used, self.world = at, world
        self.total = -(-at // (world * BLOCK)) * world * BLOCK

    def of(self, buffer: torch.Tensor, i: int) -> torch.Tensor:
        """[numels[i]], a view."""
        return buffer[self.begins[i] : self.begins[i] + self.numels[i]]

    def fill(self, buffer: torch.Tensor) -> None:
        """Puts repeats of its elements into the rest of each tensor's last block."""
        if self._to.numel():
            buffer[self._to] = buffer[self._source]

    def slice_of(self, rank: int) -> tuple[int, int]:
        """[begin, end) of the elements that a rank adds up."""
        return self.total // self.world * rank, self.total // self.world * (rank + 1)

    def shares(self, rank: int) -> list[tuple[int, int, int, int]]:
        """(tensor, its element, where in the rank's slice, how many) of every tensor's part in it."""
        begin, end = self.slice_of(rank)
        out = []
        for i, (at, n) in enumerate(zip(self.begins, self.numels)):
            lo, hi = max(begin, at), min(end, at + n)
            if lo < hi:
                out.append((i, lo - at, lo - begin, hi - lo))
        return out
