"""Groups of the backend "deepc": meshes, sub-groups, split_group, destroy and start again, several groups from several
threads, abort; calls that Gloo refuses. Everything that Gloo does, deepc does with the same answer; what torch refuses
for Gloo is an error, never a crash."""

from __future__ import annotations

import datetime
import os
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks


def total(group, value: float) -> float:
    """Sum of the members' values."""
    x = torch.tensor([value, 1.0])
    dist.all_reduce(x, group=group)
    return x[0].item()


def on_both(fn: Callable, world: int, *args: Any, **options: Any) -> list[Any]:
    """The same results on deepc and on Gloo. Returns them."""
    got = run_ranks(fn, world, args=args, backend="deepc", **options)
    want = run_ranks(fn, world, args=args, backend="gloo", **options)
    assert got == want, f"deepc: {got}\ngloo:  {want}"
    return got


def core_calls() -> int:
    import deepc

    return sum(v for k, v in deepc.counters().items() if k.startswith(("coll_", "p2p_")) and "bytes" not in k)


def gloo_calls(group) -> int:
    return group._get_backend(torch.device("cpu"))._get_sequence_number_for_group()


# ---- meshes and sub-groups -------------------------------------------------------------------------------------------
def meshes(rank, world):
    warnings.simplefilter("ignore")
    before, out = core_calls(), []
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for name in ("a", "b"):
        group = mesh.get_group(name)
        out += [
            total(group, rank),
            dist.get_process_group_ranks(group),
            dist.get_rank(group),
            mesh.get_local_rank(name),
        ]
    out += [total(mesh["a"].get_group(), 10 * rank), mesh.get_coordinate()]
    flat = mesh._flatten("whole")
    out += [total(flat.get_group(), rank), flat.size()]
    back = dist.device_mesh.DeviceMesh.from_group(mesh.get_group("b"), "cpu")
    out += [total(back.get_group(), rank), back.mesh.tolist()]
    if dist.get_backend() == "deepc":
        assert core_calls() - before >= 5
        assert all(gloo_calls(g) == 0 for g in (mesh.get_group("a"), mesh.get_group("b"), flat.get_group()))
    return out


def test_device_meshes():
    on_both(meshes, 4)


def subgroups(rank, world):
    warnings.simplefilter("ignore")
    out: list[Any] = []
    mine, _ = dist.new_subgroups(2)
    out.append((total(mine, rank), dist.get_process_group_ranks(mine)))
    mine, _ = dist.new_subgroups_by_enumeration([[0, 3], [2, 1]])
    out.append((total(mine, rank), dist.get_process_group_ranks(mine)))
    if rank in (3, 1):  # only the members make it
        group = dist.new_group([3, 1], use_local_synchronization=True)
        out.append((total(group, rank), dist.get_group_rank(group, rank), dist.get_global_rank(group, 0)))
    alone = dist.new_group([2])
    if rank == 2:
        out.append((total(alone, 7), dist.get_world_size(alone)))
        dist.destroy_process_group(alone)
    else:
        out.append(dist.get_rank(alone))  # -1: not a member
    described = dist.new_group(group_desc="mine", timeout=datetime.timedelta(seconds=200))
    out += [total(described, rank), described.group_desc, described.size(), described.rank()]
    for _ in range(8):  # many short-lived groups
        group = dist.new_group([0, 1, 2])
        if rank < 3:
            out.append(total(group, rank))
            dist.destroy_process_group(group)
    out += [total(None, rank), dist.get_world_size(), dist.get_rank()]
    return out


def test_subgroups():
    on_both(subgroups, 4)


def names(rank, world):
    group = dist.new_group([0, 1])
    assert dist.get_backend(group) == dist.get_backend() == "deepc"
    assert "deepc" in repr(dist.distributed_c10d.get_backend_config(group))
    assert group.group_name != dist.group.WORLD.group_name and group.rank() == rank and group.size() == world
    assert dist.distributed_c10d._resolve_process_group(group.group_name) is group
    return None


def test_names():
    run_ranks(names, 2)


# ---- what torch does not give to Python backends ---------------------------------------------------------------------
def outcome(call: Callable, use: Callable | None = None) -> str:
    """What it gave (used, if use is given) or the error."""
    try:
        got = call()
        return f"gave {type(got).__name__}" + (f" {use(got)}" if use is not None and got is not None else "")
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"


def splits(rank, world):
    """split_group, shrink_group, monitored_barrier: torch's errors, or they work. Then the group works on."""
    warnings.simplefilter("ignore")
    world_group = dist.group.WORLD
    total(world_group, 1)
    short = datetime.timedelta(seconds=100)

    def use(group) -> str:
        return f"with a sum of {total(group, rank + 1)}"

    said = {
        "split_group": outcome(lambda: dist.split_group(split_ranks=[[0], [1]]), use),
        "split_group of all": outcome(lambda: dist.split_group(world_group, [[0, 1]], timeout=short), use),
        "the method": outcome(lambda: world_group.split_group([0, 1], short, None, "part", "of two"), use),
        "merge": outcome(
            lambda: world_group.merge_remote_group(dist.HashStore(), 2, datetime.timedelta(seconds=1), "merged", "both")
        ),
        "monitored_barrier": outcome(lambda: dist.monitored_barrier(timeout=datetime.timedelta(seconds=100))),
    }
    if hasattr(dist, "shrink_group"):
        said["shrink_group"] = outcome(lambda: dist.shrink_group([1]))
    for name, text in said.items():
        print(name, "->", text)
    assert total(world_group, rank + 1) == 3
    return said


def test_split_group_is_an_error_and_no_crash():
    said = run_ranks(splits, 2, fresh=True)
    assert said[0].keys() == said[1].keys()
    for name in said[0]:
        for text in (said[0][name], said[1][name]):
            works = {
                "split_group of all": "with a sum of 3.0",
                "the method": "with a sum of 3.0",
                "split_group": "with a sum of",
            }
            fine = (
                works.get(name, "with nothing") in text
                if text.startswith("gave")
                else len(text.partition(": ")[2]) > 10
            )
            assert fine, f"{name}: {text}"
    assert not said[0]["monitored_barrier"].startswith("gave"), said[0]["monitored_barrier"]


# ---- destroy and start again -----------------------------------------------------------------------------------------
def _start(rank: int, world: int, store: str, timeout_s: float = 200.0) -> None:
    dist.init_process_group(
        "deepc",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


def _deepc_maps() -> list[str]:
    """Mappings of groups' shared memory (staging and segments); the process's flight record stays."""
    with open("/proc/self/maps") as f:
        return [line.split(None, 5)[-1].strip() for line in f if "memfd:deepc" in line and "deepc-flight" not in line]


def _open_files(at_most: int) -> int:
    """Open files of this process, once they are at_most. Gloo, beneath every group, closes those of its device from a
    thread of its own: up to some milliseconds after the group is gone."""
    end = time.monotonic() + 10
    while (n := len(os.listdir("/proc/self/fd"))) > at_most and time.monotonic() < end:
        time.sleep(0.01)
    return n


def again(rank, world, folder):
    def use() -> None:
        sub = dist.new_group([0, 1])
        assert total(None, rank) == 1 and total(sub, 1 + rank) == 3
        if rank == 0:
            dist.send(torch.ones(3), 1, group=sub)
        else:
            dist.recv(torch.zeros(3), 0, group=sub)

    before = len(os.listdir("/proc/self/fd"))
    fds, maps = [], []
    for i in range(5):
        _start(rank, world, f"{folder}/store{i}")
        use()
        mapped = _deepc_maps()  # proves that the names are still what we look for
        if i == 3:
            work = dist.all_reduce(torch.ones(4), async_op=True)  # destroyed without a look at it
            del work
        dist.destroy_process_group()
        assert not dist.is_initialized() and mapped
        maps.append(_deepc_maps())
        fds.append(_open_files(before + 1) - before)  # the flight record stays
    return fds, maps


def test_destroy_and_start_again(tmp_path):
    for fds, maps in run_ranks(again, 2, args=(str(tmp_path),), backend=None, fresh=True):
        assert maps == [[]] * 5, f"shared memory left after each destroy: {maps}"
        assert fds == [1] * 5, f"more open files than before the first start, after each destroy: {fds}"


def again_in_one_store(rank, world, path):
    """What is made again has the name of what was there before, and so the same place in the store: whoever came first
    would find what the peers had left there for that one."""
    from deepc.comm.c10d import group as c10d

    store, looks = dist.FileStore(path, world), c10d.discover

    def looks_first(own, *args):
        assert not own.check(["address"])  # rank 0 sets it when all have looked
        return looks(own, *args)

    with mock.patch.object(c10d, "discover", looks_first):
        for _ in range(2):
            dist.init_process_group("deepc", store=dist.PrefixStore("all", store), rank=rank, world_size=world)
            for _ in range(2):
                sub = dist.new_group([0, 1], use_local_synchronization=True)
                assert total(sub, 1 + rank) == 3
                dist.destroy_process_group(sub)
            assert total(None, rank) == 1
            dist.destroy_process_group()


def test_groups_that_are_made_again_in_one_store(tmp_path):
    """torchrun's agent keeps one store for all that its workers make."""
    run_ranks(again_in_one_store, 2, args=(str(tmp_path / "store"),), backend=None, fresh=True)


def destroyed(rank, world):
    group = dist.new_group([0, 1])
    total(group, 1)
    dist.destroy_process_group(group)
    said = outcome(lambda: dist.all_reduce(torch.ones(2), group=group))
    assert not said.startswith("gave"), said
    return total(None, rank)


def test_a_destroyed_group_is_refused():
    assert run_ranks(destroyed, 2) == [1, 1]


# ---- threads ---------------------------------------------------------------------------------------------------------
def threads(rank, world, rounds):
    """Collectives on two groups from two threads, messages on one of the same groups from a third, the default group
    from a fourth."""
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    failures: list[str] = []

    def reductions(group, salt: int) -> None:
        for i in range(rounds):
            x = torch.full((7 + 997 * (i % 5),), float(rank + salt + i))
            work = dist.all_reduce(x, group=group, async_op=i % 2 == 0)
            if work is not None:
                work.wait()
            assert x.eq(2 * (salt + i) + 1).all(), (salt, i, x[:3])

    def gathers(group) -> None:
        for i in range(rounds):
            out = torch.zeros(2, 5 + i % 3)
            dist.all_gather_into_tensor(out, torch.full((5 + i % 3,), float(10 * i + rank)), group=group)
            assert out[0].eq(10 * i).all() and out[1].eq(10 * i + 1).all(), (i, out)

    def messages(group) -> None:
        for i in range(rounds):
            mine, theirs = torch.full((1 + 5000 * (i % 4),), float(100 * i + rank)), torch.zeros(1 + 5000 * (i % 4))
            ops = [dist.P2POp(dist.isend, mine, 1 - rank, group, i), dist.P2POp(dist.irecv, theirs, 1 - rank, group, i)]
            for w in dist.batch_isend_irecv(ops):
                w.wait()
            assert theirs.eq(100 * i + 1 - rank).all(), (i, theirs[:3])

    def guarded(fn: Callable, *args: Any) -> None:
        try:
            fn(*args)
        except BaseException as exc:
            failures.append(f"{fn.__name__}: {type(exc).__name__}: {exc}")

    jobs = ((reductions, first, 0), (gathers, second), (messages, second), (reductions, None, 5))
    running = [threading.Thread(target=guarded, args=a) for a in jobs]
    for t in running:
        t.start()
    for t in running:
        t.join(60)
    assert not failures and not any(t.is_alive() for t in running), failures or "a thread hangs"
    if dist.get_backend() == "deepc":
        assert gloo_calls(first) == gloo_calls(second) == gloo_calls(dist.group.WORLD) == 0


@pytest.mark.parametrize("rounds", [40, pytest.param(1500, marks=pytest.mark.full)])
def test_groups_from_several_threads(rounds):
    run_ranks(threads, 2, args=(rounds,))


# ---- abort -----------------------------------------------------------------------------------------------------------
def aborts(rank, world, folder, who, how):
    """Ranks 1 and up wait for a call that rank 0 never makes. who aborts: "peer" rank 0, "self" each waiting rank from
    another thread."""
    from deepc.errors import CommError

    dist.barrier()
    group = dist.group.WORLD

    def abort() -> None:
        time.sleep(0.3)
        group.abort()

    began = time.monotonic()
    if rank == 0 and who == "peer":
        abort()
    elif rank > 0:
        if who == "self":
            threading.Thread(target=abort, daemon=True).start()
        try:
            if how == "blocking":
                dist.all_reduce(torch.ones(3))
            elif how == "async":
                dist.all_reduce(torch.ones(3), async_op=True).wait()
            elif how == "receive":
                dist.recv(torch.ones(3), src=0)
            else:
                dist.irecv(torch.ones(3), src=0).wait()
        except CommError as exc:
            assert "abort" in str(exc).lower(), str(exc)
        else:
            raise AssertionError(f"{how} returned after the abort")
    else:
        time.sleep(1.0)
    waited = time.monotonic() - began
    dist.destroy_process_group()
    _start(rank, world, f"{folder}/again")
    assert total(None, rank) == sum(range(world))
    return waited


@pytest.mark.parametrize("who", ["peer", "self"])
@pytest.mark.parametrize("how", ["blocking", "async", "receive", "nonblocking receive"])
def test_abort(tmp_path, who, how):
    for waited in run_ranks(aborts, 2, args=(str(tmp_path), who, how), timeout_s=50):
        assert waited < 25  # long before the time-out


def waits_briefly(rank, world):
    """wait(timeout) of a receive that nobody answers."""
    if rank == 1:
        began = time.monotonic()
        said = outcome(lambda: dist.irecv(torch.zeros(3), src=0, tag=5).wait(datetime.timedelta(seconds=0.5)))
        assert not said.startswith("gave"), said
        assert time.monotonic() - began < 25, said
    return None


def test_wait_with_a_timeout():
    run_ranks(waits_briefly, 2, timeout_s=50)


# ---- calls that are wrong on every rank ------------------------------------------------------------------------------
def wrong_calls(rank, world):
    """Each is refused with an exception on every rank, and the group works on. Returns which were refused."""
    warnings.simplefilter("ignore")
    z = torch.zeros
    meta = torch.zeros(4, device="meta")

    def cz(n: int) -> torch.Tensor:
        return torch.zeros(n, dtype=torch.complex64)

    calls = {
        "no such root": lambda: dist.broadcast(z(2), 7),
        "negative root": lambda: dist.broadcast(z(2), -1),
        "root of reduce": lambda: dist.reduce(z(2), 5),
        "not a tensor": lambda: dist.all_reduce([1.0]),
        "meta all_reduce": lambda: dist.all_reduce(meta),
        "meta broadcast": lambda: dist.broadcast(meta, 0),
        "meta all_gather": lambda: dist.all_gather([meta, meta], meta),
        "all_gather: one output": lambda: dist.all_gather([z(2)], z(2)),
        "all_gather: three outputs": lambda: dist.all_gather([z(2), z(2), z(2)], z(2)),
        "all_gather: other size": lambda: dist.all_gather([z(2), z(3)], z(2)),
        "all_gather: other dtype": lambda: dist.all_gather([z(2), z(2).int()], z(2)),
        "all_gather_into_tensor: size": lambda: dist.all_gather_into_tensor(z(5), z(2)),
        "all_gather_into_tensor: dtype": lambda: dist.all_gather_into_tensor(z(4).int(), z(2)),
        "reduce_scatter: one input": lambda: dist.reduce_scatter(z(2), [z(2)]),
        "reduce_scatter: other size": lambda: dist.reduce_scatter(z(2), [z(2), z(3)]),
        "reduce_scatter_tensor: size": lambda: dist.reduce_scatter_tensor(z(2), z(5)),
        "reduce_scatter_tensor: dtype": lambda: dist.reduce_scatter_tensor(z(2).double(), z(4)),
        "all_to_all_single: odd": lambda: dist.all_to_all_single(z(3), z(3)),
        "all_to_all_single: sums": lambda: dist.all_to_all_single(z(4), z(4), [1, 2], [2, 2]),
        "all_to_all_single: three splits": lambda: dist.all_to_all_single(z(4), z(4), [1, 1, 2], [1, 1, 2]),
        "all_to_all_single: dtype": lambda: dist.all_to_all_single(z(4).int(), z(4)),
        "all_to_all: one input": lambda: dist.all_to_all([z(2), z(2)], [z(4)]),
        "send to oneself": lambda: dist.send(z(2), rank),
        "send to nobody": lambda: dist.send(z(2), 9),
        "receive from nobody": lambda: dist.recv(z(2), 9),
        "isend of meta": lambda: dist.isend(meta, 1 - rank),
        "bitwise of floats": lambda: dist.all_reduce(z(2), dist.ReduceOp.BAND),
        "average of integers": lambda: dist.all_reduce(torch.ones(2, dtype=torch.int64), dist.ReduceOp.AVG),
        "maximum of complex": lambda: dist.all_reduce(z(2, dtype=torch.complex64), dist.ReduceOp.MAX),
        "minimum of complex": lambda: dist.reduce_scatter_tensor(cz(1), cz(2), dist.ReduceOp.MIN),
        "sparse gather": lambda: dist.all_gather([z(2).to_sparse()] * 2, z(2).to_sparse()),
        "empty batch": lambda: dist.batch_isend_irecv([]),
    }
    said = {name: outcome(call) for name, call in calls.items()}
    assert total(None, rank + 1) == 3
    out = torch.zeros(2)
    dist.reduce(torch.ones(2), 0)
    dist.all_gather_into_tensor(out, torch.tensor([float(rank)]))
    assert out.tolist() == [0, 1]
    return said


def test_wrong_calls_are_refused_on_every_rank():
    said = run_ranks(wrong_calls, 2)
    for name in said[0]:
        refused = [not s[name].startswith("gave") for s in said]
        assert refused == [True, True], f"{name}: {[s[name] for s in said]}"


def sparse(rank, world):
    """Gloo reduces sparse tensors; so must the group (Gloo may carry it)."""
    x = torch.sparse_coo_tensor([[rank, 2]], [1.0 + rank, 5.0], (4,))
    dist.all_reduce(x)
    return x.to_dense().tolist()


def test_sparse_all_reduce():
    assert on_both(sparse, 2)[0] == [1.0, 2.0, 10.0, 0.0]
