"""The exchange of 1-bit optimizers (optim/onebit/exchange.py) over a torch.distributed group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...errors import UnsupportedError
from ...optim.onebit.exchange import BLOCK, Spans, connect
from .compressed import CHUNK, OneBitAllReduce, grid_of


class GroupExchange:
    """See Exchange. CPU tensors."""

    def __init__(self, group: Any = None, hierarchical: bool = True) -> None:
        self._group, self._hierarchical = group, hierarchical
        self._wire: OneBitAllReduce | None = None  # from the first call on: its errors are as large as the buffer
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.workers, self.worker, self._columns, self._carries = grid_of(group, hierarchical)
        self.parts = self.workers * self._columns
        self.sent_bytes = 0

    def dense_bytes(self, numel: int) -> int:
        return 2 * (self.workers - 1) * numel * 4 // self.parts if self._carries else 0

    def mean(self, tensors: Sequence[torch.Tensor]) -> None:
        if not tensors:
            return
        flat = torch.cat([t.detach().reshape(-1).float() for t in tensors])
        dist.all_reduce(flat, group=self._group)
        flat.mul_(1.0 / self.world)
        for t, values in zip(tensors, flat.split([t.numel() for t in tensors])):
            t.copy_(values.view(t.shape))
        self.sent_bytes += self.dense_bytes(flat.numel())

    def compressed(self, buffer: torch.Tensor) -> None:
        if buffer.device.type != "cpu":
            raise UnsupportedError(
                f"1-bit exchange of a buffer on {buffer.device} does not exist: parameters must be on the CPU"
            )
        self.sent_bytes += self._made(buffer.numel()).all_reduce_(buffer)

    def _made(self, numel: int) -> OneBitAllReduce:
        """Chunks and their slices are whole blocks, so that no tensor shares a magnitude with another. Collective."""
        if self._wire is None or self._wire.numel != numel:
            whole = self.parts * BLOCK
            chunk = max(1, CHUNK // whole) * whole
            self._wire = OneBitAllReduce(numel, self._group, block=BLOCK, hierarchical=self._hierarchical, chunk=chunk)
        return self._wire

    def rows(self, values: Sequence[float]) -> list[list[float]]:
        mine = torch.tensor(list(values), dtype=torch.float64)
        out = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(out, mine, group=self._group)
        return [t.tolist() for t in out]

    def errors(self) -> dict[str, torch.Tensor]:
        return {} if self._wire is None else self._wire.errors

    def owned(self, numel: int) -> Spans:
        return self._made(numel).owned()

    def set_errors(self, numel: int, worker: torch.Tensor, server: torch.Tensor) -> None:
        mine = self._made(numel).errors
        mine["worker"].copy_(worker)
        mine["server"].copy_(server)

    def clear_errors(self) -> None:
        if self._wire is not None:
            self._wire.reset()


connect(GroupExchange)
