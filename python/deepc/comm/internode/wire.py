"""What carries bytes between nodes: a Gloo group of the ranks of one local index, one on each node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..failures import break_pairs

if TYPE_CHECKING:
    import datetime

    import torch
    import torch.distributed as dist


class Wire:
    """One process per node. Nothing blocks but `abort`: what starts returns a work, and RuntimeError comes from it or
    from the start. A message's wait takes a time-out; whether a collective is through can be asked."""

    def __init__(self, store: dist.Store, index: int, count: int, timeout: datetime.timedelta) -> None:
        """Collective over the `count` processes. store: their own."""
        import torch.distributed as dist

        self._index, self._count = index, count
        group: Any = dist.ProcessGroupGloo(store, index, count, timeout)  # torch's stub lacks most methods
        self._group: Any = group
        # renamed in torch 2.13, where both names are there
        self._gather = getattr(self._group, "all_gather_single", None) or group._allgather_base
        self._all_to_all = getattr(self._group, "all_to_all_single", None) or group.alltoall_base

    # ---- messages ----------------------------------------------------------------------------------------------------
    def send(self, data: torch.Tensor, peer: int, tag: int) -> Any:
        """Starts sending bytes (uint8, contiguous; untouched until the work is done)."""
        return self._group.send([data], peer, tag)

    def recv(self, data: torch.Tensor, peer: int, tag: int) -> Any:
        """Starts a receive of at most data.numel() bytes. Messages of one peer and tag arrive in order."""
        return self._group.recv([data], peer, tag)

    # ---- collectives -------------------------------------------------------------------------------------------------
    def exchange(self, out: torch.Tensor, send: torch.Tensor) -> Any:
        """Block n of send [count * k] goes to process n, and block n of out comes from there."""
        return self._all_to_all(out, send, [], [])

    def collect(self, out: torch.Tensor, mine: torch.Tensor) -> Any:
        """out [count * k] = mine [k] of all in order."""
        return self._gather(out, mine)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Any:
        return self._group.broadcast(tensor, root)

    def barrier(self) -> Any:
        return self._group.barrier()

    # ---- the end -----------------------------------------------------------------------------------------------------
    def abort(self) -> None:
        """Makes every wait raise, here and at the peers. From any thread."""
        if (group := self._group) is not None:
            break_pairs(group, self._index, self._count)

    def close(self) -> None:
        self._group = self._gather = self._all_to_all = None
