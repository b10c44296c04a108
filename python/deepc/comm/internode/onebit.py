"""The exchange of 1-bit optimizers (optim/onebit/exchange.py) over a torch.distributed group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...core.codecs import OneBit
from ...errors import UnsupportedError
from ...optim.onebit.exchange import BLOCK, connect
from ..c10d.compressed import ErrorFeedback, all_reduce


class GroupExchange:
    """See Exchange. CPU tensors."""

    def __init__(self, group: Any = None) -> None:
        self._group, self._feedback, self._codec = group, ErrorFeedback(), OneBit(BLOCK)
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.sent_bytes = 0

    def mean(self, tensors: Sequence[torch.Tensor]) -> None:
        if not tensors:
            return
        flat = torch.cat([t.detach().reshape(-1).float() for t in tensors])
        dist.all_reduce(flat, group=self._group)
        flat.mul_(1.0 / self.world)
        for t, values in zip(tensors, flat.split([t.numel() for t in tensors])):
            t.copy_(values.view(t.shape))
        self.sent_bytes += 2 * (self.world - 1) * flat.numel() * 4 // self.world

    def compressed(self, buffer: torch.Tensor) -> None:
        if buffer.device.type != "cpu":
            raise UnsupportedError(
                f"1-bit exchange of a buffer on {buffer.device} does not exist: parameters must be on the CPU"
            )
        self.sent_bytes += all_reduce(buffer, self._group, self._codec, self._feedback, op="avg")

    def rows(self, values: Sequence[float]) -> list[list[float]]:
        mine = torch.tensor(list(values), dtype=torch.float64)
        out = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(out, mine, group=self._group)
        return [t.tolist() for t in out]

    def errors(self) -> dict[str, torch.Tensor]:
        worker, server = self._feedback.worker, self._feedback.server
        return {} if worker is None or server is None else {"worker": worker, "server": server}

    def set_errors(self, worker: torch.Tensor, server: torch.Tensor) -> None:
        place = {"elements": worker.numel(), "world": self.world, "rank": self.rank}
        self._feedback.load_state_dict({**place, "worker": worker, "server": server})

    def clear_errors(self) -> None:
        self._feedback.reset()


connect(GroupExchange)
