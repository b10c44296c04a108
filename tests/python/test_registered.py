"""Registered buffers through torch.distributed: tensors of comm.empty_registered are reduced and gathered where they
lie."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

N = 1 << 18


def _moved() -> dict[str, int]:
    from deepc.core.lib import counters

    return {k: v for k, v in counters().items() if k.startswith("coll_bytes")}


def _work(rank: int, world: int) -> dict[str, int]:
    from deepc import comm

    x = comm.empty_registered(N)
    parts = comm.empty_registered(world, N // world)
    assert x.shape == (N,) and parts.shape == (world, N // world) and not x.any()
    mine = torch.arange(N, dtype=torch.float32) % 1000 + rank
    total = sum(torch.arange(N, dtype=torch.float32) % 1000 + r for r in range(world))
    before = _moved()
    x.copy_(mine)
    dist.all_reduce(x)
    assert torch.equal(x, total)
    x.copy_(mine)
    own = parts[rank]
    dist.reduce_scatter_tensor(own, x)
    assert torch.equal(own, total.view(world, -1)[rank])
    dist.all_gather_into_tensor(parts.view(-1), own)
    assert torch.equal(parts.view(-1), total)
    after = _moved()
    return {k: after[k] - before[k] for k in after}


@pytest.mark.parametrize("world", [2, 4])
def test_buffers_are_used_where_they_lie(world: int) -> None:
    for moved in run_ranks(_work, world):
        # all_reduce: its slice to the others; all_gather: the others' parts; nothing through staging or the kernel
        assert moved["coll_bytes_mapped"] == 2 * (world - 1) * (N // world) * 4
        assert moved["coll_bytes_in"] == moved["coll_bytes_out"] == moved["coll_bytes_single_copy"] == 0


def _mixed(rank: int, world: int) -> None:
    from deepc import comm

    x = comm.empty_registered(N) if rank == 0 else None
    if rank:
        comm.empty_registered(N)  # collective; dropped at once
        x = torch.empty(N)
    x.fill_(rank + 1.0)
    dist.all_reduce(x)
    assert torch.equal(x, torch.full((N,), 3.0))


def test_a_rank_may_use_ordinary_memory() -> None:
    run_ranks(_mixed, 2)


def _refused(rank: int, world: int) -> None:
    from deepc import comm
    from deepc.errors import OutOfMemoryError, UnsupportedError

    with pytest.raises(UnsupportedError, match="backend 'deepc'"):
        comm.empty_registered(8, group=dist.new_group(backend="gloo"))
    with pytest.raises(OutOfMemoryError):
        comm.empty_registered(1 << 42)
    dist.barrier()


def test_what_can_not_be_is_said() -> None:
    run_ranks(_refused, 2)


def _many(rank: int, world: int) -> None:
    from deepc import comm
    from deepc.errors import DeepcError

    kept = [comm.empty_registered(8) for _ in range(64)]
    with pytest.raises(DeepcError, match="has 64 segments already: free some, or make fewer and larger ones"):
        comm.empty_registered(8)
    del kept[rank]  # of another place on each rank, so none is free on all
    with pytest.raises(DeepcError, match="has 64 segments already"):
        comm.empty_registered(8)
    del kept[1 - rank]
    kept.append(comm.empty_registered(8))
    dist.all_reduce(kept[-1].fill_(1.0))
    assert kept[-1].tolist() == [2.0] * 8


def test_a_group_has_64_at_a_time() -> None:
    run_ranks(_many, 2)
