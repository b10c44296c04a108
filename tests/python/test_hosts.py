"""Collectives between hosts (comm/internode) on network namespaces joined by a link of 1 Gbit/s: the same answers as
Gloo element by element, the bytes that crossed, and failures that reach every rank of every host."""

from __future__ import annotations

import datetime
import itertools
import os
import re
import signal
import subprocess
import threading
import time
import types
import weakref
import zlib

import nethosts
import pytest
import torch
import torch.distributed as dist
from deepc import errors
from deepc.comm import shared as node
from deepc.comm.internode import hierarchy, lanes, link
from nethosts import Hosts, why_not

REDUCED = (
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
)
GLOO_REDUCES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)
MOVED = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
PLACEMENTS = {
    "2+2": [0, 0, 1, 1],
    "interleaved": [0, 1, 0, 1],
    "3+1": [0, 0, 0, 1],
    "uneven and interleaved": [0, 1, 1, 0, 1],
    "1+1": [0, 1],
    "3 hosts": [0, 1, 2],
    "3 hosts, uneven": [2, 0, 1, 2],
}
QUICK = ("uneven and interleaved", "1+1", "3 hosts, uneven")
SOME_PLACEMENTS = [p if p in QUICK else pytest.param(p, marks=pytest.mark.full) for p in PLACEMENTS]
_opened: dict[str, int] = {}  # job -> hierarchies opened in it


# ---- in the ranks ----------------------------------------------------------------------------------------------------
def opened(rank: int, world: int, timeout_s: float = 30.0) -> hierarchy.Hierarchy:
    """A hierarchy over the default group's ranks."""
    job = os.environ["MASTER_PORT"]
    _opened[job] = _opened.get(job, 0) + 1
    store = dist.PrefixStore(f"test{_opened[job]}/", dist.distributed_c10d._get_default_store())
    return hierarchy.open_hierarchy(store, rank, world, label="test", timeout=datetime.timedelta(seconds=timeout_s))


def data(seed: int, rank: int, count: int, dtype: torch.dtype, op: str = "sum") -> torch.Tensor:
    """The input of `rank`: any rank can make it. Sums and products of a few of them are exact in every dtype."""
    made = torch.Generator().manual_seed(1000 * seed + rank)
    low, high = (-1, 3) if op == "prod" else (0, 9)
    if not dtype.is_signed:
        low = 0
    values = torch.randint(low, high, (count,), generator=made)
    return (values > (high - 2) // 2) if dtype is torch.bool else values.to(dtype)


def reduced(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    """The reduction, computed here."""
    dtype = inputs[0].dtype
    wide = torch.stack([x.to(torch.float64 if dtype.is_floating_point else torch.int64) for x in inputs])
    if dtype is torch.bool:
        found = {
            "sum": wide.amax(0),
            "max": wide.amax(0),
            "bor": wide.amax(0),
            "prod": wide.amin(0),
            "min": wide.amin(0),
            "band": wide.amin(0),
            "bxor": wide.sum(0) % 2,
        }[op]
        return found.to(torch.bool)
    if op in ("band", "bor", "bxor"):
        found = wide[0]
        for x in wide[1:]:
            found = found & x if op == "band" else found | x if op == "bor" else found ^ x
        return found.to(dtype)
    return {
        "sum": lambda: wide.sum(0),
        "avg": lambda: wide.mean(0),
        "min": lambda: wide.amin(0),
        "max": lambda: wide.amax(0),
        "prod": lambda: wide.prod(0),
    }[op]().to(dtype)


def same(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Bit for bit."""
    assert got.dtype == expected.dtype and got.shape == expected.shape, what
    if got.numel():
        different = (got.view(torch.uint8) != expected.view(torch.uint8)).nonzero()
        at = int(different[0]) // got.element_size() if len(different) else 0
        assert not len(different), (
            f"{what}: element {at} is {got[at]}, expected {expected[at]} ({len(different)} bytes differ)"
        )


def reduce_everything(rank: int, world: int, counts: list[int], dtypes: list[torch.dtype], ops: list[str]) -> int:
    group = opened(rank, world)
    done = 0
    for seed, (count, dtype, op) in enumerate(itertools.product(counts, dtypes, ops)):
        if (dtype, op) not in node.REDUCTIONS:
            continue
        exact = op != "avg" or world & (world - 1) == 0
        root = seed % world
        total = data(seed, 0, count * world, dtype, op)
        inputs = [data(seed, r, count, dtype, op) for r in range(world)]
        expected = reduced(inputs, op)
        check = same if exact else close
        x = inputs[rank].clone()
        group.all_reduce(x, op)
        check(x, expected, f"all_reduce {op} {dtype}[{count}]")
        if dtype in GLOO_REDUCES and op != "avg" and exact:
            y = inputs[rank].clone()
            dist.all_reduce(y, getattr(dist.ReduceOp, {"prod": "PRODUCT"}.get(op, op.upper())))
            same(x, y, f"all_reduce {op} {dtype}[{count}] against Gloo")
        out = torch.empty_like(x)
        group.all_reduce(inputs[rank], op, out=out)
        same(out, x, f"all_reduce out of place {op} {dtype}[{count}]")
        crcs = [None] * world
        dist.all_gather_object(crcs, zlib.crc32(x.view(torch.uint8).numpy().tobytes()) if count else 0)
        assert len(set(crcs)) == 1, f"ranks differ: all_reduce {op} {dtype}[{count}]"
        x = inputs[rank].clone()
        group.reduce(x, root, op)
        check(x, expected if rank == root else inputs[rank], f"reduce {op} {dtype}[{count}] to {root}")
        inputs = [data(seed, r, count * world, dtype, op) for r in range(world)]
        out = torch.empty(count, dtype=dtype)
        group.reduce_scatter(out, inputs[rank], op)
        check(out, reduced(inputs, op)[rank * count : (rank + 1) * count], f"reduce_scatter {op} {dtype}[{count}]")
        done += total.numel() > 0
    nodes = [list(n) for n in group.topology.nodes]
    group.close()
    return done, nodes


def close(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Averages of 3 or 5: each node's part and the result are rounded once."""
    off = (got.double() - expected.double()).abs() > 4 * torch.finfo(got.dtype).eps * expected.double().abs() + 1e-300
    assert not off.any(), f"{what}: element {int(off.nonzero()[0])} is {got[off][0]}, expected {expected[off][0]}"


def move_everything(rank: int, world: int, counts: list[int], dtypes: list[torch.dtype]) -> None:
    group = opened(rank, world)
    for seed, (count, dtype) in enumerate(itertools.product(counts, dtypes)):
        what, root = f"{dtype}[{count}]", seed % world
        blocks = [data(seed, r, count, dtype) for r in range(world)]
        wholes = [data(seed, 50 + r, count * world, dtype) for r in range(world)]
        everything = torch.cat([b.view(torch.uint8) for b in blocks]).view(dtype)
        out = torch.empty(count * world, dtype=dtype)
        group.all_gather(out, blocks[rank])
        same(out, everything, f"all_gather {what}")
        out.view(torch.uint8).zero_()
        out.view(torch.uint8).view(world, -1)[rank].copy_(blocks[rank].view(torch.uint8))
        group.all_gather(out, out[rank * count : (rank + 1) * count])
        same(out, everything, f"all_gather in place {what}")
        x = blocks[rank].clone()
        group.broadcast(x, root)
        same(x, blocks[root], f"broadcast {what} of {root}")
        out = torch.empty(count * world, dtype=dtype) if rank == root else None
        group.gather(out, blocks[rank], root)
        if rank == root:
            same(out, everything, f"gather {what} to {root}")
        out = torch.empty(count, dtype=dtype)
        group.scatter(out, wholes[root] if rank == root else None, root)
        same(out, wholes[root][rank * count : (rank + 1) * count], f"scatter {what} of {root}")
        out = torch.empty(count * world, dtype=dtype)
        group.all_to_all(out, wholes[rank])
        parts = [w.view(torch.uint8).view(world, -1)[rank] for w in wholes]
        same(out, torch.cat(parts).view(dtype), f"all_to_all {what}")
        table = [[(i * 7 + j * 3 + seed) % 5 * count // 4 for j in range(world)] for i in range(world)]  # some are 0
        sent = [data(seed, 90 + i, sum(table[i]), dtype) for i in range(world)]
        got = [row[rank] for row in table]
        out = torch.empty(sum(got), dtype=dtype)
        group.all_to_allv(out, got, sent[rank], table[rank])
        pieces = [s.view(torch.uint8).split([n * dtype.itemsize for n in row])[rank] for s, row in zip(sent, table)]
        same(out, torch.cat(pieces).view(dtype), f"all_to_allv {what}")
        group.barrier()
    group.close()


def same_as_gloo(rank: int, world: int, seeds: int) -> None:
    """Random shapes and operations beside torch's own backend; elementwise, with nothing computed here."""
    import random

    group = opened(rank, world)
    for seed in range(seeds):
        pick = random.Random(seed)
        count, dtype, root = pick.choice((1, 7, 1000, 8191, 70001)), pick.choice(GLOO_REDUCES), pick.randrange(world)
        op = pick.choice(("sum", "min", "max", "prod"))
        gloo_op = getattr(dist.ReduceOp, {"prod": "PRODUCT"}.get(op, op.upper()))
        mine, whole = data(seed, rank, count, dtype, op), data(seed, 50 + rank, count * world, dtype, op)
        a, b = mine.clone(), mine.clone()
        group.all_reduce(a, op)
        dist.all_reduce(b, gloo_op)
        same(a, b, f"{seed}: all_reduce {op} {dtype}[{count}]")
        a, b = mine.clone(), mine.clone()
        group.reduce(a, root, op)
        dist.reduce(b, root, gloo_op)
        if rank == root:  # elsewhere Gloo leaves parts of sums
            same(a, b, f"{seed}: reduce {op} {dtype}[{count}]")
        a, b = mine.clone(), mine.clone()
        group.broadcast(a, root)
        dist.broadcast(b, root)
        same(a, b, f"{seed}: broadcast {dtype}[{count}]")
        a, b = torch.empty_like(whole), torch.empty_like(whole)
        group.all_gather(a, mine)
        dist.all_gather_into_tensor(b, mine)
        same(a, b, f"{seed}: all_gather {dtype}[{count}]")
        group.all_to_all(a, whole)
        dist.all_to_all_single(b, whole)
        same(a, b, f"{seed}: all_to_all {dtype}[{count}]")
        a, b = torch.empty_like(mine), torch.empty_like(mine)
        group.reduce_scatter(a, whole, op)
        dist.reduce_scatter_tensor(b, whole, gloo_op)
        same(a, b, f"{seed}: reduce_scatter {op} {dtype}[{count}]")
        group.scatter(a, whole if rank == root else None, root)
        dist.scatter(b, list(whole.chunk(world)) if rank == root else None, root)
        same(a, b, f"{seed}: scatter {dtype}[{count}]")
        parts = [torch.empty_like(mine) for _ in range(world)] if rank == root else None
        a = torch.empty_like(whole) if rank == root else None
        group.gather(a, mine, root)
        dist.gather(mine, parts, root)
        if rank == root:
            same(a, torch.cat(parts), f"{seed}: gather {dtype}[{count}]")
    group.close()


# ---- right results ---------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def hosts_of():
    """hosts_of(n): n hosts. They, and the processes in them, serve all tests of this file."""
    made: dict[int, Hosts] = {}

    def get(count: int) -> Hosts:
        if count not in made:
            if why_not():
                pytest.skip(why_not())
            made[count] = Hosts(count)
        return made[count]

    yield get
    for hosts in made.values():
        hosts.close()


@pytest.fixture
def two(hosts_of) -> Hosts:
    return hosts_of(2)


@pytest.fixture
def on_hosts(hosts_of):
    """Runs ranks on as many hosts as the placement names, beside a default group of Gloo; all hosts must have sent
    bytes."""

    def run(placement: list[int], fn, *args, **more):
        hosts = hosts_of(max(placement) + 1)
        before = hosts.sent()
        results = hosts.run(fn, placement, args=args, backend="gloo", **more)
        assert all(b > a for a, b in zip(before, hosts.sent())), "a host sent nothing"
        return results

    return run


@pytest.mark.parametrize("name", SOME_PLACEMENTS)
def test_reductions(on_hosts, name: str) -> None:
    placement = PLACEMENTS[name]
    results = on_hosts(
        placement, reduce_everything, [0, 5, 1003, 70001], [torch.float32, torch.bfloat16], ["sum", "avg", "max"]
    )
    seen: dict[int, list[int]] = {}
    for rank, host in enumerate(placement):
        seen.setdefault(host, []).append(rank)
    for done, nodes in results:
        assert done > 0 and nodes == list(seen.values())


@pytest.mark.full
def test_every_dtype_and_reduction(on_hosts) -> None:
    on_hosts([0, 1, 0, 1], reduce_everything, [3, 20011], list(REDUCED), list(node.REDUCE_OPS))


@pytest.mark.parametrize("name", SOME_PLACEMENTS)
def test_moves(on_hosts, name: str) -> None:
    on_hosts(PLACEMENTS[name], move_everything, [0, 5, 1003, 40001], list(MOVED))


@pytest.mark.parametrize("placement", [[0, 0, 1, 1], pytest.param([0, 1, 2], marks=pytest.mark.full)])
def test_same_as_gloo(on_hosts, placement: list[int]) -> None:
    on_hosts(placement, same_as_gloo, 12)


def rounding(rank: int, world: int, count: int) -> None:
    """Sums of random bf16 values against fp64, element by element, with and without fp32 on the wire."""
    inputs = [torch.randn(count, generator=torch.Generator().manual_seed(r)).to(torch.bfloat16) for r in range(world)]
    wide = torch.stack([x.double() for x in inputs])
    exact = wide.sum(0)
    for fp32 in (False, True):
        os.environ["DEEPC_WIRE_FP32"] = "1" if fp32 else "0"
        group = opened(rank, world)
        for op, scale in (("sum", 1.0), ("avg", 1.0 / world)):
            x = inputs[rank].clone()
            group.all_reduce(x, op)
            whole = torch.empty(count // world, dtype=torch.bfloat16)
            group.reduce_scatter(whole, inputs[rank][: count // world * world], op)
            assert torch.equal(whole, x[rank * (count // world) : (rank + 1) * (count // world)])
            half_ulp = torch.finfo(torch.bfloat16).eps / 2
            # One rounding at the end; without fp32 on the wire one more per node, each of at most half an ulp of that
            # node's sum.
            room = half_ulp * (exact.abs() if fp32 else exact.abs() + wide.abs().sum(0)) * scale * 1.01 + 1e-6
            off = (x.double() - exact * scale).abs() > room
            assert not off.any(), (
                f"{op}, fp32 {fp32}: element {int(off.nonzero()[0])} is {x[off][0]}, exact {(exact * scale)[off][0]}"
            )
        group.close()


def test_rounding_of_16_bit_sums(on_hosts) -> None:
    on_hosts([0, 0, 1, 1], rounding, 200_000)


def no_overflow(rank: int, world: int) -> float:
    group = opened(rank, world)
    x = torch.full((100_000,), 60000.0, dtype=torch.float16)
    group.all_reduce(x, "avg")
    group.close()
    return float(x.max())


def test_averages_of_fp16_do_not_overflow(on_hosts) -> None:
    assert on_hosts([0, 0, 1, 1], no_overflow) == [60000.0] * 4


# ---- bytes on the wire -----------------------------------------------------------------------------------------------
def settle() -> None:
    """Until acknowledgements have crossed: this host has sent nothing for a while."""
    sent = None
    while sent != (sent := nethosts.traffic()[1]):
        time.sleep(0.05)


def measured(rank: int, world: int, op: str, count: int, flat: bool) -> tuple[int, int]:
    """(bytes that this host's interface sent during one call, bytes that this rank says it sent)."""
    group = None if flat else opened(rank, world)
    x, out = torch.ones(count), torch.empty(count // world if op == "reduce_scatter" else count * world)

    def run() -> None:
        if op == "all_reduce":
            group.all_reduce(x) if group else dist.all_reduce(x)
        elif op == "reduce_scatter":
            group.reduce_scatter(out, x) if group else dist.reduce_scatter_tensor(out, x)
        elif op == "all_gather":
            group.all_gather(out, x)
        elif op == "broadcast":
            group.broadcast(x, 1)

    run()  # connects
    dist.barrier()
    settle()
    before, said = nethosts.traffic()[1], group.sent_bytes if group else 0
    dist.barrier()
    run()
    dist.barrier()
    settle()
    after, said = nethosts.traffic()[1], (group.sent_bytes if group else 0) - said
    if group:
        group.close()
    return after - before, said


def sent_by_hosts(hosts: Hosts, placement: list[int], *args) -> list[tuple[int, int]]:
    """Per host: (bytes on its interface, bytes that its ranks say they sent)."""
    results = hosts.run(measured, placement, args=args, backend="gloo")
    on = [[r for r, p in zip(results, placement) if p == h] for h in sorted(set(placement))]
    return [(max(r[0] for r in of), sum(r[1] for r in of)) for of in on]


def test_bytes_of_an_all_reduce_are_those_of_one_rank_per_host(two: Hosts) -> None:
    count = 4 << 20  # 16 MiB
    least = sent_by_hosts(two, [0, 1], "all_reduce", count, True)  # Gloo, one rank per host
    alone = sent_by_hosts(two, [0, 1], "all_reduce", count, False)
    ours = sent_by_hosts(two, [0, 0, 1, 1], "all_reduce", count, False)
    mixed = sent_by_hosts(two, [0, 1, 0, 1], "all_reduce", count, False)
    flat = sent_by_hosts(two, [0, 0, 1, 1], "all_reduce", count, True)
    flat_mixed = sent_by_hosts(two, [0, 1, 0, 1], "all_reduce", count, True)
    print(
        {
            "Gloo 1+1": least,
            "1+1": alone,
            "2+2": ours,
            "interleaved": mixed,
            "Gloo 2+2": flat,
            "Gloo interleaved": flat_mixed,
        }
    )
    payload = 4 * count
    for found in (alone, ours, mixed):
        for wire, said in found:
            assert payload <= said <= payload + 16 * 1024  # the frames of two leaders
            low, high = nethosts.wire_bytes(payload)
            # the other direction's acknowledgements that ride on no data, and two barriers of the test
            assert low * 0.99 <= wire <= high + payload // 100, (wire, low, high)
    for (wire, _), (smallest, _) in zip(ours, least):
        assert abs(wire - smallest) <= payload // 50  # the same but for headers and acknowledgements
    assert sum(w for w, _ in flat) >= 1.45 * sum(w for w, _ in ours)  # a ring over 4 ranks crosses twice with 3/4 each
    assert sum(w for w, _ in flat_mixed) >= 2.9 * sum(w for w, _ in mixed)  # and 4 times where its order alternates


@pytest.mark.parametrize("op, crossing", [("reduce_scatter", 0.5), ("all_gather", 2.0), ("broadcast", 1.0)])
def test_bytes_of_other_collectives(two: Hosts, op: str, crossing: float) -> None:
    """crossing: bytes that the busier host sends over the bytes of `x`, 2 ranks on each of 2 hosts."""
    count = 2 << 20
    found = sent_by_hosts(two, [0, 0, 1, 1], op, count, False)
    wire, said = max(found)
    payload = int(4 * count * crossing)
    assert payload <= said <= payload + 16 * 1024
    assert payload * 0.99 <= wire <= nethosts.wire_bytes(payload)[1] + payload // 50


# ---- through torch.distributed ---------------------------------------------------------------------------------------
def through_torch(rank: int, world: int, count: int) -> tuple[int, int, int]:
    """(bytes that this host sent during an all_reduce, during one of a sub-group inside the host, reductions of the C
    core)."""
    import deepc

    inputs = [data(1, r, count, torch.float32) for r in range(world)]
    x = inputs[rank].clone()
    dist.all_reduce(x)
    same(x, reduced(inputs, "sum"), "dist.all_reduce")
    out = torch.empty(count // world)
    dist.reduce_scatter_tensor(out, inputs[rank])
    same(
        out,
        reduced(inputs, "sum")[rank * (count // world) : (rank + 1) * (count // world)],
        "dist.reduce_scatter_tensor",
    )
    whole = torch.empty(count * world)
    dist.all_gather_into_tensor(whole, inputs[rank])
    same(whole, torch.cat(inputs), "dist.all_gather_into_tensor")
    everyone: list = [None] * world
    dist.all_gather_object(everyone, rank)
    assert everyone == list(range(world))
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dist.barrier()
    settle()
    begin, reductions = nethosts.traffic()[1], deepc.counters()
    dist.barrier()
    dist.all_reduce(x)
    dist.barrier()
    settle()
    middle, counted = nethosts.traffic()[1], deepc.counters()
    dist.all_reduce(x, group=halves[rank // 2])
    end = nethosts.traffic()[1]
    dist.barrier()
    return middle - begin, end - middle, sum(counted[k] - reductions[k] for k in counted if "reduce" in k)


def test_through_torch_distributed(two: Hosts) -> None:
    count = 2 << 20
    for crossed, inside, reductions in two.run(through_torch, [0, 0, 1, 1], args=(count,), backend="deepc"):
        assert (
            4 * count * 0.99 <= crossed <= nethosts.wire_bytes(4 * count)[1] + 4 * count // 50
        )  # flat Gloo: 1.5 times that
        assert inside < 64 << 10  # memory (a few acknowledgements)
        assert reductions > 0


# ---- failures --------------------------------------------------------------------------------------------------------
def failing(
    rank: int, world: int, victim: int, count: int, late: int | None, seconds: float
) -> tuple[str, str, float] | None:
    """All-reduces until `victim` is killed by itself; (error, text, seconds after the kill at the earliest). late: a
    rank that stays away from the last call until the others know."""
    group, store = opened(rank, world, 60.0), dist.distributed_c10d._get_default_store()
    x = torch.ones(count)
    group.all_reduce(x)
    if rank == victim:
        threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    end = time.monotonic() + seconds
    try:
        for _ in range(1_000_000):
            if rank == late:
                store.wait(["told"])
            group.all_reduce(x)
            if late is None:
                x.fill_(1)
    except errors.CommError as exc:
        took = time.monotonic() - end
        if late not in (None, rank):
            store.set("told", "")
        again = ""
        try:
            group.barrier()
        except errors.CommError as second:
            again = str(second)
        assert again == str(exc), "the second error is another one"
        return type(exc).__name__, str(exc), took
    return None


def _killed(hosts: Hosts, placement: list[int], victim: int, count: int, late: int | None = None) -> list:
    out = hosts.run(failing, placement, args=(victim, count, late, 1.5), backend="gloo", may_die=[victim])
    for rank, told in enumerate(out):
        if rank != victim:
            assert told is not None and told[0] == "RankDiedError", (rank, told)  # and not after a time-out
            assert re.search(rf"rank {victim} \(", told[1]), (rank, told)
    return out


@pytest.mark.parametrize(
    "victim, count",
    [
        (3, 1 << 20),
        pytest.param(1, 1 << 20, marks=pytest.mark.full),
        pytest.param(3, 2, marks=pytest.mark.full),
        pytest.param(1, 2, marks=pytest.mark.full),
    ],
)
def test_a_killed_rank_raises_on_all_survivors(two: Hosts, victim: int, count: int) -> None:
    _killed(two, [0, 0, 1, 1], victim, count)


@pytest.mark.full
def test_a_killed_rank_that_leads_no_slice(two: Hosts) -> None:
    _killed(two, [0, 0, 0, 1], 2, 1 << 20)


@pytest.mark.full
def test_the_store_host_is_killed(two: Hosts) -> None:
    out = two.run(failing, [0, 0, 1, 1], args=(0, 1 << 20, None, 1.5), backend="gloo", may_die=[0])
    assert [t[0] for t in out[1:]] == ["RankDiedError"] * 3, out


def test_a_leader_that_waits_for_a_late_host_sees_its_own_node(two: Hosts) -> None:
    """Rank 2 dies on host 0 while rank 0 waits for host 1, which has not joined the call."""
    out = _killed(two, [0, 0, 0, 1], 2, 1 << 20, late=3)
    assert "rank 2" in out[3][1]


def mismatched(rank: int, world: int, odd: list[int], kind: str) -> tuple[str, str]:
    group = opened(rank, world, 60.0)
    x = torch.ones(50_000)
    group.all_reduce(x)
    try:
        if kind == "count":
            group.all_reduce(torch.ones(60_000 if rank in odd else 50_000))
        elif kind == "small":
            group.all_reduce(torch.ones(6 if rank in odd else 50_000))
        elif kind == "op":
            group.barrier() if rank in odd else group.all_reduce(x)
        elif kind == "dtype":
            group.broadcast(torch.ones(8, dtype=torch.int32 if rank in odd else torch.float32), 0)
        elif kind == "counts":
            out = [2] * world
            if rank in odd:
                out[0] = 3
            group.all_to_allv(torch.empty(sum(out)), out, torch.ones(2 * world), [2] * world)
    except errors.CommError as exc:
        return type(exc).__name__, str(exc)
    return "", ""


@pytest.mark.parametrize(
    "kind, odd",
    [
        *(("count", [2, 3]), ("op", [2, 3]), ("dtype", [3]), ("counts", [2, 3])),
        *(pytest.param(k, [3], marks=pytest.mark.full) for k in ("count", "small", "op", "counts")),
        *(pytest.param(k, [2, 3], marks=pytest.mark.full) for k in ("small", "dtype")),
    ],
)
def test_a_mismatch_raises_everywhere(two: Hosts, kind: str, odd: list[int]) -> None:
    out = two.run(mismatched, [0, 0, 1, 1], args=(odd, kind), backend="gloo")
    assert [o[0] for o in out] == ["MismatchError"] * 4, out
    for _, text in out:
        assert (
            re.search(r"rank [01] ", text) and re.search(r"rank [23] ", text) if odd == [2, 3] else "rank 3 " in text
        ), text
        assert (
            "test_hosts.py:" in text and {"counts": "all_to_allv", "dtype": "broadcast"}.get(kind, "all_reduce") in text
        ), text


def timed_out(rank: int, world: int) -> tuple[str, str]:
    group, store = opened(rank, world, 2.0), dist.distributed_c10d._get_default_store()
    group.barrier()
    if rank == 3:
        store.wait([f"told {r}" for r in range(3)])
    try:
        group.barrier()
    except errors.CommError as exc:
        store.set(f"told {rank}", "")
        return type(exc).__name__, str(exc)
    return "", ""


def test_a_rank_that_stays_away(two: Hosts) -> None:
    out = two.run(timed_out, [0, 0, 1, 1], backend="gloo")
    assert [o[0] for o in out] == ["CommTimeoutError"] * 4, out


def aborted(rank: int, world: int) -> tuple[str, str]:
    group = opened(rank, world, 60.0)
    group.barrier()
    if rank == 0:
        time.sleep(0.5)
        group.abort("enough of it")
        time.sleep(1)
        return "AbortedError", group.error()
    try:
        group.all_reduce(torch.ones(100_000))
    except errors.CommError as exc:
        return type(exc).__name__, str(exc)
    return "", ""


def test_abort(two: Hosts) -> None:
    out = two.run(aborted, [0, 0, 1, 1], backend="gloo")
    assert [o[0] for o in out] == ["AbortedError"] * 4 and all(
        "enough of it" in o[1] and "rank 0" in o[1] for o in out
    ), out


def wrong_arguments(rank: int, world: int) -> float:
    group = opened(rank, world)
    x = torch.ones(8)
    for wrong in (
        lambda: group.all_reduce(x, "mean"),
        lambda: group.all_reduce(torch.ones(4, 4).t()),
        lambda: group.all_gather(torch.empty(7), x),
        lambda: group.broadcast(x, world),
        lambda: group.all_reduce(torch.ones(2, dtype=torch.int32), "avg"),
        lambda: group.all_to_all(x[:7], x[:7].clone()),
        lambda: group.all_to_allv(x, [8] * world, x, [1] * world),
    ):
        with pytest.raises(errors.ArgumentError):
            wrong()
    group.all_reduce(x)  # still usable
    group.close()
    with pytest.raises(errors.ArgumentError, match="closed"):
        group.all_reduce(x)
    return float(x[0])


def test_wrong_arguments_leave_the_group_usable(two: Hosts) -> None:
    assert two.run(wrong_arguments, [0, 0, 1, 1], backend="gloo") == [4.0] * 4


def test_how_a_neighbour_ended() -> None:
    """The detail where it can still be read: of a zombie, always."""
    for command, how in (
        ("kill -9 $$", "died: killed by signal 9 (Killed)"),
        ("exit 3", "died: it exited with code 3 "),
    ):
        process = subprocess.Popen(["sh", "-c", f"read line; {command}"], stdin=subprocess.PIPE)
        pids = link.Pids([process.pid])
        assert pids.ended() is None
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        pid, said = pids.ended()
        assert pid == process.pid and said.startswith(how)
        process.wait()
        assert pids.ended()[1].startswith("died")
        pids.close()


def test_the_watch_over_neighbours_outlives_groups_that_open_and_close(monkeypatch) -> None:
    """Another thread opens a group while the watching one lists them."""
    looked, rounds = [], []

    class Group:
        def look(self) -> None:
            looked.append(self)

    class Opening(weakref.WeakSet):
        def __iter__(self):
            for group in super().__iter__():
                yield group
                self.add(late)

    def sleep(seconds: float) -> None:
        rounds.append(seconds)
        if len(rounds) == 3:
            raise StopIteration

    early, late = Group(), Group()
    monkeypatch.setattr(link, "_watched", Opening([early]))
    monkeypatch.setattr(link, "time", types.SimpleNamespace(sleep=sleep))
    with pytest.raises(StopIteration):
        link._look_after()
    assert set(looked) == {early, late}


# ---- without hosts: plans are data -----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("count", [0, 1, 64, 1003])
def test_plans_agree_between_nodes(name: str, count: int) -> None:
    """Every element is put where it is needed exactly once, and nodes agree on what they send each other."""
    topology = hierarchy.Topology([str(h) for h in PLACEMENTS[name]])
    world = topology.size
    makers = {"all_gather": lanes.plan_all_gather, "reduce_scatter": lanes.plan_reduce_scatter}
    for small in (False, True):
        for make in makers.values():
            plans = [make(topology, r, count, small) for r in range(world)]
            assert len({tuple(p.lanes) for p in plans}) == 1
            for p in plans:
                gathers = make is lanes.plan_all_gather
                for runs, total in (
                    (p.puts, count * (1 if gathers else world)),
                    (p.gets, count * (world if gathers else 1)),
                ):
                    assert sorted(x for r in runs for x in range(r.offset, r.offset + r.count)) == list(range(total))
                    assert all(r.count > 0 and r.at + r.count <= p.lanes[r.lane].count for r in runs)
        plan = lanes.plan_all_reduce(topology, count, small)
        assert sorted(x for r in plan.puts for x in range(r.offset, r.offset + r.count)) == list(range(count))
        assert sum(lane.count for lane in plan.lanes) == count


def test_topology_of_interleaved_ranks() -> None:
    topology = hierarchy.Topology(["b", "a", "b", "a", "b"])
    assert (
        topology.nodes == ((0, 2, 4), (1, 3))
        and topology.node_of == [0, 1, 0, 1, 0]
        and topology.local_of == [0, 0, 1, 1, 2]
    )
    assert topology.leaders == 2 and topology.most == 3 and topology.others(0) == (1,)
