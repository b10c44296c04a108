"""Asynchronous collectives of the backend "deepc" in its progress thread, inline, and the measured choice between
them."""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from ranks import placed, run_ranks
from test_backend import killed_in_ddp


def in_mode(rank, world, folder, mode, work):
    """Runs work(rank, world) with a default group whose asynchronous calls run as `mode` says."""
    os.environ["DEEPC_PROGRESS"] = mode
    try:
        dist.init_process_group(
            "deepc",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=60),
        )
        assert (dist.group.WORLD._progress is not None) == (mode == "thread")
        return work(rank, world)
    finally:
        del os.environ["DEEPC_PROGRESS"]


def run(work, mode: str, tmp_path, **kwargs):
    return run_ranks(in_mode, 2, backend=None, args=(str(tmp_path), mode, work), **kwargs)


both = pytest.mark.parametrize("mode", ["thread", "inline"])


def everything(rank, world):
    """Every asynchronous call gives the same as its synchronous form, in any order of waiting."""
    import deepc

    def values(n: int, salt: int = 0) -> list[torch.Tensor]:
        return [torch.arange(n, dtype=torch.float32) * (r + 1) + salt for r in range(world)]

    total = sum(values(1000))
    works, checks = [], []

    def begin(work, check) -> None:
        works.append(work)
        checks.append(check)

    def equal(got, want) -> None:
        assert torch.equal(got, want), (got, want)

    before = deepc.counters()
    mine = values(1000)[rank]
    a = mine.clone()
    begin(dist.all_reduce(a, async_op=True), lambda: equal(a, total))
    b = mine.clone()
    begin(dist.broadcast(b, world - 1, async_op=True), lambda: equal(b, values(1000)[-1]))
    c = torch.empty(world * 1000)
    begin(dist.all_gather_into_tensor(c, mine, async_op=True), lambda: equal(c, torch.cat(values(1000))))
    d = torch.empty(1000 // world)
    begin(dist.reduce_scatter_tensor(d, mine, async_op=True), lambda: equal(d, total.view(world, -1)[rank]))
    e = [torch.empty(1000) for _ in range(world)]
    begin(dist.all_gather(e, mine, async_op=True), lambda: equal(torch.stack(e), torch.stack(values(1000))))
    f = torch.empty(1000)
    begin(
        dist.all_to_all_single(f, mine, async_op=True),
        lambda: equal(f, torch.cat([v.view(world, -1)[rank] for v in values(1000)])),
    )
    g = mine.clone()
    begin(dist.reduce(g, 0, async_op=True), lambda: equal(g, total if rank == 0 else mine))
    h = [torch.empty(1000) for _ in range(world)] if rank == 0 else None
    begin(
        dist.gather(mine, h, 0, async_op=True), lambda: rank == 0 and equal(torch.stack(h), torch.stack(values(1000)))
    )
    i = torch.empty(1000)
    begin(dist.scatter(i, values(1000) if rank == 0 else None, 0, async_op=True), lambda: equal(i, mine))
    j = torch.empty(1000 // world)
    begin(dist.reduce_scatter(j, list(mine.chunk(world)), async_op=True), lambda: equal(j, total.view(world, -1)[rank]))
    k = torch.zeros(10, 100).t()
    k.copy_(mine.view(100, 10))
    begin(dist.all_reduce(k, async_op=True), lambda: equal(k, total.view(100, 10)))
    begin(dist.barrier(async_op=True), lambda: None)
    for work, check in list(zip(works, checks))[::-1]:
        assert work.wait() is True
        assert work.is_completed() and work.is_success() and work.exception() is None
        check()
        check_future = work.get_future().wait()
        assert [t.data_ptr() for t in check_future] == [t.data_ptr() for t in work.result()]
    after = deepc.counters()
    want = {
        "all_reduce": 2,
        "broadcast": 1,
        "all_gather": 2,
        "reduce_scatter": 2,
        "all_to_all": 1,
        "reduce": 1,
        "gather": 1,
        "scatter": 1,
        "barrier": 1,
    }
    done = {n: after[f"coll_{n}"] - before[f"coll_{n}"] for n in want}
    assert done == want, done
    names = {t.name for t in threading.enumerate()}
    return "deepc default_pg" in names


@both
def test_every_asynchronous_call(mode, tmp_path):
    assert run(everything, mode, tmp_path) == [mode == "thread"] * 2


def order(rank, world):
    """A synchronous call of the group comes after the asynchronous ones before it; futures and callbacks."""
    x = torch.ones(200_000)
    works = [dist.all_reduce(x, async_op=True) for _ in range(3)]
    dist.all_reduce(x)  # waits for them
    assert torch.equal(x, torch.full((200_000,), float(world**4)))
    assert all(w.is_completed() for w in works)
    y = torch.ones(4)
    seen = []
    future = (
        dist.all_reduce(y, async_op=True)
        .get_future()
        .then(lambda f: seen.append(threading.current_thread().name) or f.value()[0] * 2)
    )
    assert torch.equal(future.wait(), torch.full((4,), 2.0 * world)) and len(seen) == 1
    # a callback that itself calls: at once, in the thread that it runs in
    z, inner = torch.ones(3), torch.ones(2)

    def more(f):
        dist.all_reduce(inner)
        work = dist.all_reduce(inner, async_op=True)
        work.wait()
        return f.value()[0]

    if world > 1 and dist.group.WORLD._progress is not None:
        gate = threading.Event()
        dist.group.WORLD._progress.submit(
            gate.wait, (), lambda: "gate", b""
        )  # so that the callback is attached before the call is done
        future = dist.all_reduce(z, async_op=True).get_future().then(more)
        gate.set()
        assert torch.equal(future.wait(), torch.full((3,), float(world)))
        assert torch.equal(inner, torch.full((2,), float(world**2)))
    work = dist.all_reduce(torch.ones(3), async_op=True)
    del work  # nobody waits
    dist.barrier()
    future = dist.all_reduce_coalesced([torch.ones(3), torch.ones(2)], async_op=True)
    assert [t.tolist() for t in future.wait()] == [[world] * 3, [world] * 2]
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(x)
        dist.all_reduce(y)
    manager.wait()
    assert y.tolist() == [world**2] * 4


@both
def test_order_and_futures(mode, tmp_path):
    run(order, mode, tmp_path)


def slow_peer(rank, world):
    """wait(timeout) gives up without breaking anything; what was begun goes on."""
    from deepc.errors import CommError, CommTimeoutError

    dist.barrier()
    x = torch.ones(4)
    go = dist.distributed_c10d._get_default_store()
    if rank == 1:
        go.wait(["go"], datetime.timedelta(seconds=100))  # in vain, where a call of rank 0 waits for this rank
        dist.all_reduce(x)
        return
    work = dist.all_reduce(x, async_op=True)
    assert not work.is_completed() and not work.is_success() and work.exception() is None
    try:
        work.wait(datetime.timedelta(milliseconds=20))
    except CommTimeoutError as exc:
        assert "all_reduce(torch.float32 (4,)) on default_pg" in str(exc) and isinstance(exc, TimeoutError), str(exc)
    else:
        raise AssertionError("no time-out")
    try:
        work.result()
    except CommError as exc:
        assert "not finished" in str(exc)
    else:
        raise AssertionError("a result before the end")
    future = work.get_future()
    assert not future.done()
    go.set("go", "1")
    assert future.wait()[0] is x and work.wait() and x.tolist() == [2] * 4


def test_wait_with_a_limit(tmp_path):
    run(slow_peer, "thread", tmp_path)


def interrupted(rank, world):
    """Ctrl-C reaches a wait."""
    dist.barrier()
    x = torch.ones(4)
    go = dist.distributed_c10d._get_default_store()
    if rank == 1:
        go.wait(["go"], datetime.timedelta(seconds=100))
        dist.all_reduce(x)
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    work = dist.all_reduce(x, async_op=True)
    try:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        work.wait()
    except KeyboardInterrupt:
        assert not work.is_completed()
    else:
        raise AssertionError("no KeyboardInterrupt")
    go.set("go", "1")
    work.wait()
    signal.signal(signal.SIGINT, before)


def test_interrupt(tmp_path):
    run(interrupted, "thread", tmp_path)


def failing(rank, world):
    """A mismatch and an abort: every unfinished Work raises, with op, shape, dtype, group and line; its future fails;
    later calls raise."""
    import sys

    from deepc.errors import AbortedError, CommError, MismatchError

    group = dist.new_group()
    first = dist.all_reduce(torch.ones(4), group=group, async_op=True)
    line = sys._getframe().f_lineno + 1
    bad = dist.all_reduce(torch.ones(2, 5 + rank), group=group, async_op=True)
    behind = dist.all_reduce(torch.ones(4), group=group, async_op=True)
    first.wait()
    for work in (bad, behind):
        try:
            work.wait()
        except MismatchError as exc:
            for part in ("count 10", "count 12", f"test_progress.py:{line}", "on pg"):
                assert part in str(exc), (part, str(exc))
            if work is bad:
                assert f"[in all_reduce(torch.float32 (2, {5 + rank})) on pg" in str(exc), str(exc)
        else:
            raise AssertionError("no error")
        assert work.is_completed() and not work.is_success() and isinstance(work.exception(), MismatchError)
        try:
            work.get_future().wait()
        except RuntimeError as exc:
            assert "count 10" in str(exc)
        else:
            raise AssertionError("the future did not fail")
    other = dist.new_group()
    gone = dist.new_group()
    dist.all_reduce(torch.ones(1), group=gone)
    dist.barrier()
    if rank == 0:
        waiting = dist.all_reduce(torch.ones(4), group=other, async_op=True)
        future = waiting.get_future()
        time.sleep(0.05)
        other.abort()
        try:
            waiting.wait()
        except AbortedError as exc:
            assert "ProcessGroup.abort()" in str(exc)
        else:
            raise AssertionError("no error")
        try:
            future.wait()
        except RuntimeError as exc:
            assert "AbortedError" in str(exc)
        else:
            raise AssertionError("the future did not fail")
    dist.barrier()
    # a group that is destroyed takes no calls
    dist.destroy_process_group(gone)
    for async_op in (False, True):
        try:
            work = gone.allreduce([torch.ones(2)])
            work.wait()
        except CommError as exc:
            assert "destroyed" in str(exc)
        else:
            raise AssertionError("a destroyed group took a call")


def test_errors(tmp_path):
    run(failing, "thread", tmp_path)


def test_killed_rank_in_ddp_with_the_thread(tmp_path):
    assert "RankDiedError" in run(killed_in_ddp, "thread", tmp_path, may_die=[1])[0]


def trained(rank, world):
    """DDP with a hook that chains a callback, in the thread: the same weights as one process."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel

    def model():
        torch.manual_seed(3)
        return torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)])

    def batch(step: int, r: int) -> torch.Tensor:
        return torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + r))

    def train(forward, parameters, parts) -> list[torch.Tensor]:
        opt = torch.optim.SGD(parameters, lr=0.05)
        for step in range(3):
            sum(forward(batch(step, r)).square().mean() / len(parts) for r in parts).backward()
            opt.step()
            opt.zero_grad()
        return [p.detach().clone() for p in parameters]

    alone = model()
    want = train(alone, list(alone.parameters()), range(world))
    for hook in (None, default_hooks.allreduce_hook):
        inner = model()
        ddp = DistributedDataParallel(inner, bucket_cap_mb=0.001)
        if hook is not None:
            ddp.register_comm_hook(None, hook)
        for got, expected in zip(train(ddp, list(inner.parameters()), [rank]), want):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@both
def test_ddp(mode, tmp_path):
    run(trained, mode, tmp_path)


def waits_for_what_comes_later(rank, world, folder, nodes):
    """Legal in c10d: an asynchronous call that ends after what its caller does behind it, here a large message, which
    rank 1 sends before it comes to the call."""
    with placed(rank, nodes):
        dist.init_process_group(
            "deepc",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=30),
        )
    x, y = torch.ones(4), torch.full((1 << 20,), float(rank))
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
        dist.recv(y, 1)
        assert work.wait() and y[-1] == 1
    else:
        dist.send(y, 0)
        dist.all_reduce(x)
    # in two groups, which the ranks call in different orders
    of = {dist.group.WORLD: torch.ones(4), dist.new_group([0, 1]): torch.ones(5)}
    works = [dist.all_reduce(of[g], group=g, async_op=True) for g in list(of)[:: 1 if rank else -1]]
    assert all(work.wait() for work in works)
    assert [t.tolist() for t in of.values()] == [[2] * 4, [2] * 5]


@pytest.mark.parametrize("nodes", ["", "01"])
def test_an_asynchronous_call_does_not_keep_its_caller(nodes, tmp_path):
    run_ranks(waits_for_what_comes_later, 2, backend=None, args=(str(tmp_path), nodes))


def chosen(rank, world, folder):
    """The measurement runs the same on all ranks and gives one answer."""
    from deepc.comm import shared as node
    from deepc.comm.c10d import progress

    comm = node.open_comm(
        dist.FileStore(folder + "/store", world),
        rank,
        world,
        label="measured",
        timeout=datetime.timedelta(seconds=60),
        slot_bytes=256 << 10,
        slots=2,
    )
    times = progress.measure(comm, 64 << 10)
    assert all(t > 0 for t in times)
    rows = progress._swap(comm, b"%03d" % rank)
    assert rows == [b"%03d" % r for r in range(world)]
    mode = progress.choose(comm)
    real = os.sched_getaffinity
    os.sched_getaffinity = lambda pid: {*real(pid), *range(100, 110)}  # as if there were cores to spare
    try:
        measured = progress.choose(comm)
    finally:
        os.sched_getaffinity = real
    comm.barrier()
    comm.close()
    return mode, measured


def test_choice_is_one_for_all_ranks(tmp_path):
    found = run_ranks(chosen, 2, backend=None, args=(str(tmp_path),))
    assert found[0] == found[1] and set(found[0]) <= {"inline", "thread"}
    if len(os.sched_getaffinity(0)) <= 2:
        assert found[0][0] == "inline"  # no core to spare


def test_unknown_mode(monkeypatch):
    from deepc.core import env
    from deepc.errors import ConfigError

    monkeypatch.setenv("DEEPC_PROGRESS", "sometimes")
    with pytest.raises(ConfigError, match="DEEPC_PROGRESS='sometimes'.*auto, inline or thread"):
        env.text("DEEPC_PROGRESS")
