"""The ranks that share one model: how they reach each other, and the few control messages the engine sends.

Three kinds, one interface: one rank; the ranks of one node over shared memory (the C core); anything else over torch.distributed."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

CONTROL_SLOT_BYTES = 256 * 1024


class SoloGroup:
    """One rank."""

    transport = "local"

    def __init__(self) -> None:
        self.rank, self.world, self.ranks_per_node = 0, 1, 1

    def barrier(self) -> None:
        pass

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        pass

    def gather_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """[n] -> [world, n], rows in rank order. Also a barrier."""
        return tensor.unsqueeze(0)

    def close(self) -> None:
        pass


class NodeGroup:
    """The ranks of one node, over dc_comm. Owns its control communicator; buckets get one of their own (`open_comm`)."""

    transport = "node"

    def __init__(self, store, rank: int, world: int, label: str, timeout: datetime.timedelta) -> None:
        self.rank, self.world, self.ranks_per_node = rank, world, world
        self._store, self._label, self._timeout, self._opened = store, label, timeout, 0
        self._comms: list = []
        self.comm = self.open_comm("control", CONTROL_SLOT_BYTES, 2)

    def open_comm(self, what: str, slot_bytes: int, slots: int):
        """A further communicator of the same ranks (collective). Closed with the group."""
        from . import node

        self._opened += 1
        store = dist.PrefixStore(f"{self._label}/{what}/{self._opened}", self._store)
        comm = node.open_comm(store, self.rank, self.world, label=f"{self._label}/{what}", timeout=self._timeout,
                              slot_bytes=(slot_bytes + 4095) // 4096 * 4096, slots=slots)
        self._comms.append(comm)
        return comm

    def barrier(self) -> None:
        self.comm.barrier()

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        self.comm.broadcast(tensor, root)

    def gather_all(self, tensor: torch.Tensor) -> torch.Tensor:
        out = torch.empty(self.world * tensor.numel(), dtype=tensor.dtype)
        self.comm.all_gather(out, tensor)
        return out.view(self.world, tensor.numel())

    def segment(self, nbytes: int):
        """A shared segment (collective), see dc_segment_create."""
        return self.comm.segment(nbytes)

    def close(self) -> None:
        comms, self._comms = self._comms, []
        for comm in comms:
            comm.close()


class TorchGroup:
    """Ranks on several nodes or GPUs, over torch.distributed's default group."""

    transport = "c10d"

    def __init__(self, device: torch.device) -> None:
        self.rank, self.world, self.device = dist.get_rank(), dist.get_world_size(), device
        self.ranks_per_node = 1

    def barrier(self) -> None:
        dist.barrier()

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        dist.broadcast(tensor, root)

    def gather_all(self, tensor: torch.Tensor) -> torch.Tensor:
        send = tensor.to(self.device)
        out = [torch.empty_like(send) for _ in range(self.world)]
        dist.all_gather(out, send)
        return torch.stack(out).to(tensor.device)

    def close(self) -> None:
        pass


def open_group(device: torch.device, timeout: datetime.timedelta, label: str = "engine"):
    """The group of all ranks for one engine. Collective: engines are made in the same order on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return SoloGroup()
    if device.type != "cpu":
        return TorchGroup(device)
    from . import node

    rank, world = dist.get_rank(), dist.get_world_size()
    shared = dist.distributed_c10d._get_default_store()
    number = shared.add(f"deepc/{label}/made by {rank}", 1)  # counted in the store: it belongs to this default group, not to the process
    store = dist.PrefixStore(f"deepc/{label}{number}", shared)
    if len(set(node.node_ids(store, rank, world))) > 1:
        return TorchGroup(device)
    return NodeGroup(store, rank, world, f"{label}{number}", timeout)
