"""What tensor-parallel ranks save alike, each a part of it: the inputs of recomputed blocks, which outside of regions
are equal on all of them (Rajbhandari et al., arXiv:1910.02054, section 6.1: partitioned activation checkpointing).
They come together again in backward, over the node's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..core.lib import C
from .tensor.group import TensorGroup

_LINE = 64  # bytes: a rank's part begins on a cache line
_STAYS = -1  # in place of a checksum


class Saved:
    """This rank's part of a tensor that all ranks of the group have. value(): the whole, in the strides that it had, on
    all of them: collective."""

    def __init__(self, x: torch.Tensor, group: TensorGroup, keep: Callable[[torch.Tensor], Any]) -> None:
        self._dtype, self._shape, self._stride, self._group = x.dtype, x.shape, x.stride(), group
        self.nbytes = x.numel() * x.element_size()
        per = -(-self.nbytes // group.size // _LINE) * _LINE
        begin = min(group.rank * per, self.nbytes)
        part = torch.empty(per, dtype=torch.uint8, device="cpu")
        mine = _bytes(x)[begin : begin + per]
        part[: mine.numel()].copy_(mine)
        self._part = keep(part)
        self._of = StorageWeakRef(x.untyped_storage())  # while it is held, no other storage has this one's identity

    def value(self) -> torch.Tensor:
        whole = self._group.rows_of(self._part.value())[: self.nbytes]
        return whole.view(self._dtype).as_strided(self._shape, self._stride)


class Partition:
    """Cuts what is saved. What the ranks do not have alike (which they find out by a checksum of each) stays whole, so
    any model is trained as without. keep: what is done with a part, [bytes] uint8; what it returns has value().

    Counts: bytes_cut, bytes_whole: of the tensors that were cut, and of those that differ between ranks."""

    def __init__(self, group: TensorGroup, keep: Callable[[torch.Tensor], Any]) -> None:
        self._group, self._keep = group, keep
        self._known: dict[tuple[Any, ...], Saved] = {}
        self.bytes_cut = self.bytes_whole = 0

    def begin(self) -> None:
        """A forward begins or ends. What is saved several times in one (a mask, by every block) is cut once."""
        self._known.clear()

    def cut(self, x: torch.Tensor | None) -> Saved | None:
        """None: it differs between ranks. x: dense, on the CPU; None: what this rank has to save stays as it is, which
        it tells the others, who may have more (shards of unequal widths). Collective, for all that is saved."""
        if x is None:
            self._group.rows_of(torch.tensor([_STAYS, 0], dtype=torch.int64, device="cpu"))
            return None
        key = (x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride(), x.dtype, x._version)
        if (known := self._known.get(key)) is not None:
            return known
        word = C.dc_crc32c(0, x.data_ptr(), x.numel() * x.element_size())
        mine = torch.tensor(
            [word, hash((tuple(x.shape), tuple(x.stride()), x.element_size()))], dtype=torch.int64, device="cpu"
        )
        if not bool((self._group.rows_of(mine).view(-1, 2) == mine).all()):
            self.bytes_whole += x.numel() * x.element_size()
            return None
        saved = self._known[key] = Saved(x, self._group, self._keep)
        self.bytes_cut += saved.nbytes
        return saved


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in memory order."""
    return x.detach().as_strided((x.numel(),), (1,)).view(torch.uint8)
