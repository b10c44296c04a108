"""Comm.isend, Comm.irecv and Request (node.py): the C core's messages as Python has them. The protocol itself is tested
in tests/c/test_p2p.cpp."""

from __future__ import annotations

import datetime
import gc
import os
import signal
import subprocess
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


def _comm(folder: str, rank: int, world: int, seconds: float = 30):
    from deepc.comm import shared as node

    return node.open_comm(
        dist.FileStore(folder + "/store", world),
        rank,
        world,
        label="messages",
        timeout=datetime.timedelta(seconds=seconds),
        slot_bytes=4096,
        slots=2,
    )


def _data(dtype: torch.dtype, n: int, seed: int) -> torch.Tensor:
    raw = torch.randint(
        0,
        2 if dtype is torch.bool else 256,
        (n * dtype.itemsize,),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(seed),
    )
    return raw.view(dtype)


def _every_dtype(rank: int, world: int, folder: str) -> None:
    from deepc.core import lib as _lib

    comm = _comm(folder, rank, world)
    before = _lib.counters()
    moved = 0
    for i, dtype in enumerate(DTYPES):
        for n in (0, 1, 3, 4000, 70_000):
            sent, got = _data(dtype, n, rank), torch.empty(n, dtype=dtype)
            requests = [comm.isend(sent, 1 - rank, tag=i), comm.irecv(got, None if n % 2 else 1 - rank, tag=i)]
            for r in requests:
                r.wait(200)
            assert requests[1].source() == 1 - rank and all(r.test() for r in requests)
            assert torch.equal(got.view(torch.uint8), _data(dtype, n, 1 - rank).view(torch.uint8)), (dtype, n)
            moved += n * dtype.itemsize
    after = _lib.counters()
    assert after["p2p_sends"] - before["p2p_sends"] == after["p2p_recvs"] - before["p2p_recvs"] == 5 * len(DTYPES)
    assert (
        sum(after[k] - before[k] for k in ("p2p_bytes_ring", "p2p_bytes_single_copy")) == moved
    )  # what we sent eagerly and what we copied
    comm.barrier()
    comm.close()


def test_every_dtype(tmp_path):
    run_ranks(_every_dtype, 2, args=(str(tmp_path),), backend=None)


def _tensors_live_as_long_as_their_requests(rank: int, world: int, folder: str) -> None:
    comm = _comm(folder, rank, world)
    tensor = torch.full((50_000,), float(rank))
    kept = weakref.ref(tensor)
    request = comm.isend(tensor, 1 - rank)
    del tensor
    gc.collect()
    assert kept() is not None
    got = torch.empty(50_000)
    comm.irecv(got, 1 - rank).wait()
    request.wait()
    assert torch.equal(got, torch.full((50_000,), float(1 - rank)))
    del request
    assert kept() is None

    never = torch.zeros(4)
    dropped = comm.irecv(never, 1 - rank, tag=5)
    assert not dropped.test()
    del dropped  # withdrawn: the message goes to the next
    comm.barrier()
    first = comm.isend(torch.full((4,), 9.0), 1 - rank, tag=5)
    comm.irecv(got[:4], tag=5).wait()
    assert got[:4].tolist() == [9.0] * 4 and never.tolist() == [0.0] * 4
    first.wait()

    outlives = comm.irecv(never, 1 - rank, tag=6)
    comm.barrier()
    comm.close()
    with pytest.raises(Exception, match="closed"):
        outlives.wait()


def test_tensors_live_as_long_as_their_requests(tmp_path):
    run_ranks(_tensors_live_as_long_as_their_requests, 2, args=(str(tmp_path),), backend=None)


def _errors(rank: int, world: int, folder: str) -> None:
    from deepc.errors import ArgumentError, CommTimeoutError, MismatchError

    comm = _comm(folder, rank, world)
    with pytest.raises(ArgumentError, match="this rank itself"):
        comm.isend(torch.zeros(1), rank)
    with pytest.raises(ArgumentError, match="dst is 2"):
        comm.isend(torch.zeros(1), 2)
    with pytest.raises(ArgumentError, match="not contiguous"):
        comm.irecv(torch.zeros(4, 4).t(), 1 - rank)
    with pytest.raises(ArgumentError, match="expected a torch.Tensor"):
        comm.isend([1.0], 1 - rank)
    comm.barrier()  # none of these broke anything
    with pytest.raises(MismatchError) as told:
        if rank == 0:
            comm.isend(torch.zeros(4), 1)
            comm.irecv(torch.zeros(1), 1).wait()
        else:
            comm.irecv(torch.zeros(5), 0).wait()
    assert "rank 0 called send(fp32, count 4" in str(told.value) and "rank 1 called recv(fp32, count 5" in str(
        told.value
    )
    assert str(told.value).count("python/test_messages.py:") == 2
    comm.close()

    comm = _comm(folder + "/late", rank, world)
    comm.barrier()
    with pytest.raises(
        CommTimeoutError, match=r"time-out after 200 ms: rank 0 waits in recv\(fp32, count 1, tag 0, from rank 1\)"
    ):
        if rank == 0:
            comm.irecv(torch.zeros(1), 1).wait(0.2)
        else:
            comm.barrier()  # which rank 0 never comes to
    comm.close()


def test_errors(tmp_path):
    (tmp_path / "late").mkdir()
    run_ranks(_errors, 2, args=(str(tmp_path),), backend=None)


def _never_comes(rank: int, world: int, victim: int, folder: str) -> str:
    """The victim is killed when the others know of it and before they can meet it."""
    from deepc.comm import place, shared
    from deepc.errors import RankDiedError

    store = dist.FileStore(folder + "/store", world)
    store.set_timeout(datetime.timedelta(minutes=30))
    places = place.discover(store, rank, world)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankDiedError) as told:
        shared.open_comm(
            store,
            rank,
            world,
            label="late",
            timeout=datetime.timedelta(minutes=30),
            slot_bytes=4096,
            slots=2,
            places=places,
        )
    return str(told.value)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_before_it_joins_is_told_to_all(tmp_path, victim):
    # rank 0: before it leaves the address that the others wait for; rank 1: before it connects there
    told = run_ranks(_never_comes, 3, args=(victim, str(tmp_path)), backend=None, may_die=[victim])
    for rank, text in enumerate(told):
        assert (text is None) == (rank == victim)
        assert text is None or f"group late: rank {victim} (pid " in text and "died before it joined" in text, text


def test_what_has_ended(monkeypatch):
    from deepc.comm.place import ended

    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert not ended(child.pid) and not ended(os.getpid())
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert ended(child.pid), "as a zombie"
    monkeypatch.delattr(os, "pidfd_open")  # a Python that was built with an old kernel's headers
    assert not ended(child.pid), "not known"
    monkeypatch.undo()
    child.wait()
    assert ended(child.pid), "waited for"
