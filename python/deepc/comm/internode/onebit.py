"""The exchange of 1-bit optimizers (optim/onebit/exchange.py) over a torch.distributed group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...optim.codecs import Plain
from ...optim.onebit.exchange import BLOCK, Spans, connect
from ..groups import MultiNodeGroup, NodeGroup, SoloGroup
from .compressed import CHUNK, OneBitAllReduce, OneBitColumn, carrier_of, grid_of, takes
from .crossing import sum_over_nodes


class GroupExchange:
    """See Exchange. device: of the tensors."""

    def __init__(self, group: Any, hierarchical: bool, device: torch.device) -> None:
        self._group, self._hierarchical, self._device = group, hierarchical, device
        self._wire: OneBitAllReduce | None = None  # from the first call on: its errors are as large as the buffer
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.workers, self.worker, self._columns, self._carries = grid_of(group, hierarchical)
        self.copies, self.copy = self.world, self.rank
        self.parts = self.workers * self._columns
        self.sent_bytes = 0

    def dense_bytes(self, numel: int) -> int:
        return 2 * (self.workers - 1) * numel * 4 // self.parts if self._carries else 0

    def mean(self, tensors: Sequence[torch.Tensor]) -> None:
        if not tensors:
            return
        flat = torch.cat([t.detach().reshape(-1).float() for t in tensors])
        if takes(self._group, flat.device):
            dist.all_reduce(flat, group=self._group)
        else:
            host = flat.cpu()
            dist.all_reduce(host, group=self._group)
            flat.copy_(host)
        flat.mul_(1.0 / self.world)
        for t, values in zip(tensors, flat.split([t.numel() for t in tensors])):
            t.copy_(values.view(t.shape))
        self.sent_bytes += self.dense_bytes(flat.numel())

    def compressed(self, buffer: torch.Tensor) -> None:
        self.sent_bytes += self._made(buffer.numel()).all_reduce_(buffer)

    def _made(self, numel: int) -> OneBitAllReduce:
        """Collective."""
        if self._wire is None or self._wire.numel != numel:
            self._wire = self._make(numel, chunk_of(self.parts))
        return self._wire

    def _make(self, numel: int, chunk: int) -> OneBitAllReduce:
        return OneBitAllReduce(
            numel, self._group, block=BLOCK, hierarchical=self._hierarchical, chunk=chunk, device=self._device
        )

    def shared(self, values: Sequence[float]) -> list[list[float]]:
        return [list(values)]

    def agreed(self, values: Sequence[float]) -> list[float]:
        mine = torch.tensor(list(values), dtype=torch.float64, device=carrier_of(self._group, self._device))
        out = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(out, mine, group=self._group)
        return list(map(float, out[0].tolist()))

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


class NodeExchange(GroupExchange):
    """Of ranks that share their node's copy of the states: what a rank brings is of the elements whose states it has,
    averaged over its node, and its counterparts on the other nodes have the same ones."""

    def __init__(self, group: SoloGroup | NodeGroup | MultiNodeGroup, device: torch.device) -> None:
        """group: an engine's, of all ranks. device: of the tensors; a GPU's where there is one rank."""
        self._nodes, self._wire, self.sent_bytes, self._device = group, None, 0, device
        self._inside: Any = group.inside if isinstance(group, MultiNodeGroup) else group
        self.world, self.rank = group.world, group.rank
        self.workers = self.copies = self.parts = group.nodes
        self.worker = self.copy = group.node

    def dense_bytes(self, numel: int) -> int:
        return 2 * (self.workers - 1) * numel * 4 // self.world

    def mean(self, tensors: Sequence[torch.Tensor]) -> None:
        if not isinstance(self._nodes, MultiNodeGroup):
            return
        flat = (
            torch.cat([t.detach().reshape(-1) for t in tensors])
            if tensors
            else torch.empty(0, dtype=torch.float32, device="cpu")
        )
        sum_over_nodes(self._nodes, flat, Plain(torch.float32))
        flat.mul_(1.0 / self.workers)
        for t, values in zip(tensors, flat.split([t.numel() for t in tensors])):
            t.copy_(values.view(t.shape))
        self.sent_bytes += 2 * (self.workers - 1) * flat.numel() * 4 // self.workers

    def _make(self, numel: int, chunk: int) -> OneBitAllReduce:
        return OneBitColumn(numel, self._nodes, block=BLOCK, chunk=chunk, device=self._device)

    def shared(self, values: Sequence[float]) -> list[list[float]]:
        rows: list[list[float]] = self._inside.gather_all(
            torch.tensor(list(values), dtype=torch.float64, device="cpu")
        ).tolist()
        return rows

    def agreed(self, values: Sequence[float]) -> list[float]:
        rows = self._nodes.gather_all(torch.tensor(list(values), dtype=torch.float64, device="cpu")).tolist()
        first = self._nodes.ranks_of(0) if isinstance(self._nodes, MultiNodeGroup) else range(self.world)
        return [float(sum(rows[r][i] for r in first)) for i in range(len(values))]


def chunk_of(parts: int) -> int:
    """Elements of a round: chunks and their slices are whole blocks, so that no tensor shares a magnitude with
    another."""
    whole = parts * BLOCK
    return max(1, CHUNK // whole) * whole


connect(GroupExchange)
