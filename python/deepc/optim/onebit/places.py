"""Where tensors lie in the buffer that the ranks exchange."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .exchange import BLOCK


class Places:
    """`begins[i]`: where tensor i of `numels` begins in a buffer of `total` elements. Each begins a block of its own,
    so that no block's one magnitude is that of two tensors; what is left of its last block is filled with repeats of
    the elements there (fill), whose mean magnitude then is theirs. `used` is the end of the last tensor's last block;
    each of `parts` parts gets the same number of blocks."""

    def __init__(self, numels: Sequence[int], parts: int) -> None:
        self.numels, self.begins = list(numels), []
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        at, to, source = 0, [none], [none]
        for n in numels:
            self.begins.append(at)
            end, tail = at + n, n % BLOCK
            at += -(-n // BLOCK) * BLOCK
            if tail:
                to.append(torch.arange(end, at, device="cpu"))
                source.append(end - tail + torch.arange(at - end, device="cpu") % tail)
        host = torch.cat(to), torch.cat(source)
        self._filled = {host[0].device: host}  # by device: the elements of the rests, and those that they repeat
        self.used = at
        self.total = -(-at // (parts * BLOCK)) * parts * BLOCK

    def of(self, buffer: torch.Tensor, i: int) -> torch.Tensor:
        """[numels[i]], a view."""
        return buffer[self.begins[i] : self.begins[i] + self.numels[i]]

    def fill(self, buffer: torch.Tensor) -> None:
        """Puts repeats of its elements into the rest of each tensor's last block."""
        to, source = self._filled[torch.device("cpu")]
        if not to.numel():
            return
        if buffer.device not in self._filled:
            self._filled[buffer.device] = to.to(buffer.device), source.to(buffer.device)
        to, source = self._filled[buffer.device]
        buffer[to] = buffer[source]

    def shares(self, spans: Sequence[tuple[int, int]], rests: bool = False) -> list[tuple[int, int, int, int]]:
        """(tensor, its element, where in the spans put one after the other, how many) of every tensor's part in
        elements [begin, end) of the buffer. rests: with the rest of its last block."""
        out, before = [], 0
        for begin, end in spans:
            for i, (at, n) in enumerate(zip(self.begins, self.numels)):
                n = -(-n // BLOCK) * BLOCK if rests else n
                lo, hi = max(begin, at), min(end, at + n)
                if lo < hi:
                    out.append((i, lo - at, before + lo - begin, hi - lo))
            before += end - begin
        return out


def taken(whole: torch.Tensor, spans: Sequence[tuple[int, int]]) -> torch.Tensor:
    """The spans' elements, one after the other."""
    return torch.cat([whole[begin:end] for begin, end in spans]) if spans else whole[:0].clone()
