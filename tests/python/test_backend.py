"""The torch.distributed backend "deepc": against Gloo elementwise, with counters that prove the C path ran; stock DDP
and FSDP2; errors."""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import RankFailure, run_ranks

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
INTS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
OPS = ["SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR"]
SHAPES = [(), (1,), (7,), (3, 5), (0,), (33, 41)]
BIG = (300_001,)  # more than one chunk


def make(rank: int, shape, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype == torch.bool:
        return torch.rand(shape, generator=g) < 0.5
    if dtype.is_floating_point:
        return (torch.rand(shape, generator=g) * 4 - 2).to(dtype)
    return torch.randint(0 if dtype == torch.uint8 else -5, 6, shape, generator=g).to(dtype)


def expected_reduction(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    """In fp32 (fp64) in rank order, one rounding at the end; integers in their own type."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    acc = parts[0].to(wide)
    for p in parts[1:]:
        p = p.to(wide)
        acc = {
            "SUM": torch.add,
            "AVG": torch.add,
            "PRODUCT": torch.mul,
            "MIN": torch.minimum,
            "MAX": torch.maximum,
            "BAND": torch.bitwise_and,
            "BOR": torch.bitwise_or,
            "BXOR": torch.bitwise_xor,
        }[op](acc, p)
    if op == "AVG":
        acc = acc * (1.0 / len(parts))
    return acc.to(dtype)


def core_has(dtype: torch.dtype, op: str) -> bool:
    if dtype == torch.bool:
        return op in ("MIN", "MAX", "BAND", "BOR")
    return op not in ("BAND", "BOR", "BXOR") if dtype.is_floating_point else op != "AVG"


def same(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    assert (got.dtype, got.shape) == (
        want.dtype,
        want.shape,
    ), f"{what}: {got.dtype} {got.shape}, expected {want.dtype} {want.shape}"
    wrong = (got != want).nonzero() if got.numel() else []
    if len(wrong):
        at = tuple(wrong[0].tolist())
        raise AssertionError(f"{what}: {len(wrong)} elements differ, first at {at}: {got[at]} for {want[at]}")


class counted:
    """Asserts that the C core did exactly these collectives inside."""

    def __init__(self, **want: int) -> None:
        self.want = want

    def __enter__(self):
        import deepc

        self.before = deepc.counters()

    def __exit__(self, *exc) -> None:
        import deepc

        if exc[0] is None:
            after = deepc.counters()
            names = (
                "barrier",
                "all_reduce",
                "reduce_scatter",
                "all_gather",
                "broadcast",
                "all_to_all",
                "reduce",
                "gather",
                "scatter",
            )
            names = {n: f"coll_{n}" for n in names} | {"sends": "p2p_sends", "recvs": "p2p_recvs"}
            got = {n: after[row] - self.before[row] for n, row in names.items()}
            assert got == {n: self.want.get(n, 0) for n in names}, f"the C core did {got}, expected {self.want}"


# ---- every collective ------------------------------------------------------------------------------------------------
def reductions(rank, world):
    for dtype in [*FLOATS, *INTS, torch.bool]:
        for op in OPS:
            if not core_has(dtype, op):
                continue
            for salt, shape in enumerate([*SHAPES, BIG] if op == "SUM" else SHAPES[1:4]):
                parts = [make(r, shape, dtype, salt) for r in range(world)]
                what = f"{dtype} {op} {shape}"
                x = parts[rank].clone()
                with counted(all_reduce=1):
                    dist.all_reduce(x, getattr(dist.ReduceOp, op))
                same(x, expected_reduction(parts, op), "all_reduce " + what)
                if not shape:
                    continue
                whole = [make(r, (world * shape[0], *shape[1:]), dtype, salt + 50) for r in range(world)]
                out = torch.empty(shape, dtype=dtype)
                with counted(reduce_scatter=1):
                    dist.reduce_scatter_tensor(out, whole[rank], getattr(dist.ReduceOp, op))
                want = expected_reduction(whole, op).view(world, *shape)[rank]
                same(out, want, "reduce_scatter_tensor " + what)
                with counted(reduce_scatter=1):
                    dist.reduce_scatter(
                        out.zero_(), [t.clone() for t in whole[rank].view(world, *shape)], getattr(dist.ReduceOp, op)
                    )
                same(out, want, "reduce_scatter " + what)


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.full), 3])
def test_reductions_of_every_type_op_and_shape(world):
    run_ranks(reductions, world)


def movements(rank, world):
    gloo = dist.new_group(backend="gloo")
    for dtype in [*FLOATS, *INTS, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16]:
        exotic = dtype not in (*FLOATS, *INTS, torch.bool)
        for salt, shape in enumerate([*SHAPES[1:], BIG]):
            src = [make(r, shape, torch.float32 if exotic else dtype, salt).to(dtype) for r in range(world)]
            what = f"{dtype} {shape}"

            def bits(t):
                return (
                    t.view(torch.uint8)
                    if dtype == torch.float8_e4m3fn
                    else torch.view_as_real(t)
                    if t.is_complex()
                    else t
                )

            for root in range(world):
                x = src[rank].clone()
                with counted(broadcast=1):
                    dist.broadcast(x, root)
                same(bits(x), bits(src[root]), f"broadcast {what} from {root}")
            out = torch.empty((world * shape[0], *shape[1:]), dtype=dtype)
            with counted(all_gather=1):
                dist.all_gather_into_tensor(out, src[rank])
            same(bits(out), torch.cat([bits(s) for s in src]), "all_gather_into_tensor " + what)
            outs = [torch.empty(shape, dtype=dtype) for _ in range(world)]
            with counted(all_gather=1):
                dist.all_gather(outs, src[rank])
            for got, want in zip(outs, src):
                same(bits(got), bits(want), "all_gather " + what)
            if not exotic and dtype not in (torch.bool, torch.int16, torch.uint16, torch.bfloat16):
                theirs = [torch.empty(shape, dtype=dtype) for _ in range(world)]
                dist.all_gather(theirs, src[rank], group=gloo)
                for got, want in zip(outs, theirs):
                    same(got, want, "Gloo's all_gather " + what)
            made = torch.float32 if exotic else dtype
            blocks = [
                torch.cat([bits(make(100 * r + j, shape, made, salt).to(dtype)) for j in range(world)])
                for r in range(world)
            ]
            if dtype == torch.complex64:
                blocks = [torch.view_as_complex(b) for b in blocks]
            elif exotic:
                blocks = [b.view(dtype) for b in blocks]
            out = torch.empty_like(blocks[rank])
            with counted(all_to_all=1):
                dist.all_to_all_single(out, blocks[rank])
            want = torch.cat([bits(b).view(world, -1)[rank] for b in blocks])
            same(bits(out).reshape(-1), want, "all_to_all_single " + what)
    # views of one buffer need no copy; neither does a gather in place
    flat = torch.zeros(world * 4)
    dist.all_gather(list(flat.chunk(world)), make(rank, (4,), torch.float32))
    same(flat, torch.cat([make(r, (4,), torch.float32) for r in range(world)]), "all_gather into chunks")
    flat = torch.zeros(world, 4)
    flat[rank] = make(rank, (4,), torch.float32)
    dist.all_gather_into_tensor(flat, flat[rank])
    same(flat.view(-1), torch.cat([make(r, (4,), torch.float32) for r in range(world)]), "all_gather in place")
    with counted(barrier=1):
        dist.barrier()


def test_movements_of_every_type_and_shape():
    run_ranks(movements, 2)


def forms(rank, world):
    """Non-contiguous tensors, asynchronous calls, coalescing, functional collectives, calls with a root, messages,
    objects."""
    import torch.distributed._functional_collectives as fc

    base = [make(r, (6, 8), torch.float32) for r in range(world)]
    x = base[rank].clone().t()
    with counted(all_reduce=1):
        dist.all_reduce(x)
    same(x, (base[0] + base[1]).t(), "all_reduce of a transpose")
    x = base[rank].clone()
    dist.broadcast(x[:, ::2], 1)
    want = base[rank].clone()
    want[:, ::2] = base[1][:, ::2]
    same(x, want, "broadcast into every other column")
    out = torch.zeros(8, 6 * world)
    dist.all_gather_into_tensor(out.t(), base[rank])
    same(out.t(), torch.cat(base), "all_gather into a transpose")
    out = torch.zeros(8, 3)
    dist.reduce_scatter_tensor(out.t(), base[rank])
    same(out.t(), (base[0] + base[1]).view(2, 3, 8)[rank], "reduce_scatter into a transpose")
    out = torch.zeros(8, 6)
    dist.all_to_all_single(out.t(), base[rank].t().contiguous().t())
    same(out.t(), torch.cat([b.view(2, 3, 8)[rank] for b in base]), "all_to_all_single of transposes")

    a, b = make(rank, (5,), torch.float32), make(rank, (9,), torch.float32, 1)
    work = dist.all_reduce(a, async_op=True)
    assert work.wait() and work.is_completed()
    assert work.get_future().wait()[0] is a or torch.equal(work.get_future().wait()[0], a)
    assert work.get_future().then(lambda f: f.value()[0].sum()).wait() == a.sum()

    a, b = make(rank, (5,), torch.float32), make(rank, (9,), torch.float32, 1)
    with counted(all_reduce=2):
        with dist._coalescing_manager():
            dist.all_reduce(a)
            dist.all_reduce(b)
    same(a, make(0, (5,), torch.float32) + make(1, (5,), torch.float32), "coalesced all_reduce")
    same(b, make(0, (9,), torch.float32, 1) + make(1, (9,), torch.float32, 1), "coalesced all_reduce")
    outs = [torch.empty(6), torch.empty(4)]
    with counted(all_gather=2):
        with dist._coalescing_manager():
            dist.all_gather_into_tensor(outs[0], torch.full((3,), float(rank)))
            dist.all_gather_into_tensor(outs[1], torch.full((2,), float(rank) + 5))
    assert outs[0].tolist() == [0, 0, 0, 1, 1, 1] and outs[1].tolist() == [5, 5, 6, 6]
    outs = [torch.empty(3), torch.empty(2)]
    with counted(reduce_scatter=2):
        with dist._coalescing_manager():
            dist.reduce_scatter_tensor(outs[0], torch.arange(6.0))
            dist.reduce_scatter_tensor(outs[1], torch.arange(4.0))
    assert outs[0].tolist() == [x * 2 for x in range(3 * rank, 3 * rank + 3)]
    assert outs[1].tolist() == [x * 2 for x in range(2 * rank, 2 * rank + 2)]

    group = dist.group.WORLD
    mine = make(rank, (4,), torch.float32)
    total = make(0, (4,), torch.float32) + make(1, (4,), torch.float32)
    with counted(all_reduce=1):
        got = fc.all_reduce(mine, "sum", group)
        same(got + 0, total, "functional all_reduce")
    with counted(all_gather=1):
        got = fc.all_gather_tensor(mine, 0, group)
        same(got + 0, torch.cat([make(r, (4,), torch.float32) for r in range(2)]), "functional all_gather")
    with counted(reduce_scatter=1):
        got = fc.reduce_scatter_tensor(mine, "sum", 0, group)
        same(got + 0, total.view(2, 2)[rank], "functional reduce_scatter")
    with counted(broadcast=1):
        same(fc.broadcast(mine, 1, group) + 0, make(1, (4,), torch.float32), "functional broadcast")
    compiled = torch.compile(lambda t: fc.all_reduce(t * 2, "sum", group) + 1, backend="aot_eager", fullgraph=True)
    with counted(all_reduce=1):
        same(
            compiled(mine),
            make(0, (4,), torch.float32) * 2 + make(1, (4,), torch.float32) * 2 + 1,
            "compiled all_reduce",
        )

    with counted(reduce=1):
        y = mine.clone()
        dist.reduce(y, 0)
    same(y, total if rank == 0 else mine, "reduce")
    with counted(gather=1):
        got = [torch.empty(4) for _ in range(2)] if rank == 1 else None
        dist.gather(mine, got, dst=1)
    if rank == 1:
        same(torch.cat(got), torch.cat([make(r, (4,), torch.float32) for r in range(2)]), "gather")
    with counted(scatter=1):
        y = torch.empty(2)
        dist.scatter(y, [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])] if rank == 0 else None, src=0)
    assert y.tolist() == [[1, 2], [3, 4]][rank]
    with counted(all_to_all=1):
        y = torch.empty(3 if rank == 0 else 3)
        dist.all_to_all_single(
            y, torch.arange(3.0) + 10 * rank, [1, 2] if rank == 0 else [2, 1], [1, 2] if rank == 0 else [2, 1]
        )
    assert y.tolist() == ([0, 10, 11] if rank == 0 else [1, 2, 12])
    with counted(sends=1 - rank, recvs=rank):
        y = torch.tensor([float(rank)])
        dist.send(y, 1) if rank == 0 else dist.recv(y, 0)
    assert y.item() == 0
    said = [None, None]
    dist.all_gather_object(said, {"rank": rank})
    assert said == [{"rank": 0}, {"rank": 1}]
    box = [("from", 1)] if rank == 1 else [None]
    dist.broadcast_object_list(box, src=1)
    assert box == [("from", 1)]
    assert dist.get_backend() == "deepc" and dist.get_rank() == rank and dist.get_world_size() == world


def test_forms_of_calls():
    run_ranks(forms, 2)


def subgroups(rank, world):
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = halves[rank % 2]
    x = torch.tensor([float(rank)])
    with counted(all_reduce=1):
        dist.all_reduce(x, group=mine)
    assert x.item() == (2 if rank % 2 == 0 else 4)
    x = torch.tensor([float(rank)])
    dist.broadcast(x, src=2 if rank % 2 == 0 else 3, group=mine)
    assert x.item() == (2 if rank % 2 == 0 else 3)
    dist.all_reduce(x)
    assert x.item() == 2 + 2 + 3 + 3
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for name in ("a", "b"):
        y = torch.tensor([float(rank)])
        dist.all_reduce(y, group=mesh.get_group(name))
        assert y.item() == ({"a": rank % 2 * 2 + 2, "b": rank // 2 * 4 + 1})[name]
    dist.destroy_process_group(mine)
    dist.barrier()


def test_subgroups():
    run_ranks(subgroups, 4)


def device_string(rank, world):
    x = torch.ones(3)
    with counted(all_reduce=1):
        dist.all_reduce(x)
    assert x.tolist() == [2, 2, 2]


def test_cpu_device_string():
    run_ranks(device_string, 2, backend="cpu:deepc")


def one_rank(rank, world):
    from deepc.errors import MismatchError

    x = make(0, (5,), torch.bfloat16)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        y = x.clone()
        with counted(all_reduce=1):
            dist.all_reduce(y, op)
        same(y, x, "alone")
    out = torch.empty_like(x)
    dist.all_gather_into_tensor(out, x)
    same(out, x, "alone")
    dist.reduce_scatter_tensor(out.zero_(), x)
    same(out, x, "alone")
    dist.all_to_all_single(out.zero_(), x)
    same(out, x, "alone")
    whole = torch.zeros(8)
    for call in (
        lambda: dist.all_to_all_single(whole[:2], torch.ones(8)),
        lambda: dist.all_to_all_single(whole[:8], torch.ones(2)),
        lambda: dist.all_to_all([whole[:2]], [torch.ones(8)]),
    ):
        with pytest.raises(MismatchError, match="the only rank sends [28] elements to itself and expects [28]"):
            call()
    assert not whole.any()
    dist.barrier()


def test_one_rank():
    run_ranks(one_rank, 1)


def two_nodes(rank, world):
    os.environ["DEEPC_NODE_ID"] = f"node{rank}"
    try:
        group = dist.new_group()
        x = torch.ones(3) + rank
        with counted(barrier=8):  # of the ranks inside a node: the hierarchy carries all four
            dist.all_reduce(x, group=group)
            dist.barrier(group)
            out = torch.empty(6)
            dist.all_gather_into_tensor(out, torch.full((3,), float(rank)), group=group)
            part = torch.empty(1)
            dist.reduce_scatter_tensor(part, torch.ones(2), group=group)
        with counted():  # messages between nodes are Gloo's
            y = torch.tensor([float(rank)])
            dist.send(y, 1, group=group) if rank == 0 else dist.recv(y, 0, group=group)
    finally:
        del os.environ["DEEPC_NODE_ID"]
    assert x.tolist() == [3, 3, 3] and out.tolist() == [0, 0, 0, 1, 1, 1] and part.item() == 2 and y.item() == 0


def test_groups_that_span_nodes():
    run_ranks(two_nodes, 2)


# ---- what c10d has besides -------------------------------------------------------------------------------------------
def layouts(rank, world):
    """Outputs and inputs that are not contiguous, expanded, empty, views, of other classes."""
    base = [make(r, (6, 8), torch.float32, 3) for r in range(world)]
    total = base[0] + base[1]

    def hole(t: torch.Tensor) -> torch.Tensor:
        """The same values in every other column of a larger tensor."""
        out = torch.full((t.shape[0], 2 * t.shape[1]), -7.0)[:, ::2]
        out.copy_(t)
        return out

    mine = hole(base[rank])
    x = hole(base[rank])
    dist.all_reduce(x)
    same(x, total, "all_reduce")
    assert x._base[:, 1].eq(-7).all(), "wrote between the columns"
    x = hole(base[rank])
    dist.reduce(x, 1)
    same(x, total if rank == 1 else base[rank], "reduce")
    outs = [hole(torch.zeros(6, 8)) for _ in range(world)]
    dist.all_gather(outs, mine)
    same(torch.stack(outs), torch.stack(base), "all_gather")
    outs = [hole(torch.zeros(6, 8)) for _ in range(world)] if rank == 1 else None
    dist.gather(mine, outs, 1)
    assert rank != 1 or torch.equal(torch.stack(outs), torch.stack(base))
    x = hole(torch.zeros(6, 8))
    dist.scatter(x, [hole(b) for b in base] if rank == 0 else None, 0)
    same(x, base[rank], "scatter")
    x = hole(torch.zeros(3, 8))
    dist.reduce_scatter(x, [hole(t) for t in base[rank].chunk(2)])
    same(x, total.chunk(2)[rank], "reduce_scatter")
    outs = [hole(torch.zeros(3, 8)) for _ in range(world)]
    dist.all_to_all(outs, [hole(t) for t in base[rank].chunk(2)])
    same(torch.stack(outs), torch.stack([b.chunk(2)[rank] for b in base]), "all_to_all")
    x = hole(torch.zeros(6, 8))
    with counted(sends=1 - rank, recvs=rank):
        dist.send(mine, 1) if rank == 0 else dist.recv(x, 0)
    same(x, base[0] if rank == 1 else torch.zeros(6, 8), "recv")
    x = torch.full((1,), rank + 1.0).expand(4)
    dist.all_reduce(x)
    assert x.tolist() == [3.0] * 4
    x = torch.zeros(2, 3, dtype=torch.complex64).conj()
    x += torch.complex(torch.ones(2, 3), torch.full((2, 3), rank + 1.0))
    dist.group.WORLD.allreduce([x]).wait()
    assert x.tolist() == [[2 + 3j] * 3] * 2, "conj view"
    with torch.inference_mode():
        frozen = hole(base[rank])
    dist.all_reduce(frozen)
    same(frozen, total, "inference tensor")
    leaf = base[rank].clone().requires_grad_()
    dist.all_reduce(leaf)
    same(leaf.detach(), total, "leaf")
    leaf = torch.nn.Parameter(base[rank].clone())
    dist.broadcast(leaf, 1)
    same(leaf.detach(), base[1], "parameter")

    # empty tensors, scalars
    empty = torch.empty(0, 3)
    dist.all_reduce(empty)
    dist.broadcast(empty, 1)
    dist.reduce(empty, 0)
    dist.all_gather([torch.empty(0, 3)] * 2, empty)
    dist.all_gather_into_tensor(torch.empty(0, 3), empty)
    dist.reduce_scatter_tensor(torch.empty(0, 3), empty)
    dist.reduce_scatter(torch.empty(0, 3), [empty, empty])
    dist.all_to_all_single(torch.empty(0, 3), empty)
    dist.all_to_all_single(torch.empty(0, 3), empty, [0, 0], [0, 0])
    dist.all_to_all([torch.empty(0)] * 2, [torch.empty(0)] * 2)
    dist.gather(empty, [torch.empty(0, 3)] * 2 if rank == 0 else None, 0)
    dist.scatter(torch.empty(0, 3), [empty, empty] if rank == 0 else None, 0)
    dist.send(empty, 1) if rank == 0 else dist.recv(empty, 0)
    two = torch.zeros(2)
    dist.all_gather_into_tensor(two, torch.tensor(rank + 1.0))
    assert two.tolist() == [1, 2]
    one = torch.tensor(0.0)
    dist.reduce_scatter_tensor(one, two)
    assert one.item() == [2, 4][rank]

    # split sizes on one rank only, zeros among them, rows of more than one element
    out = torch.zeros(2)
    dist.all_to_all_single(out, torch.arange(2.0) + 5 * rank, [1, 1] if rank else None, None)
    assert out.tolist() == [rank, 5.0 + rank]
    rows = [[2, 0], [3, 1]][rank]
    got = [[2, 3], [0, 1]][rank]
    out = torch.zeros(sum(got), 3)
    dist.all_to_all_single(out, torch.arange(3.0 * sum(rows)).view(-1, 3) + 100 * rank, got, rows)
    theirs = torch.arange(12.0).view(-1, 3) + 100
    same(
        out,
        torch.cat([torch.arange(6.0).view(-1, 3), theirs[:3]]) if rank == 0 else theirs[3:],
        "all_to_all_single of rows",
    )
    outs = [torch.zeros(n) for n in got]
    dist.all_to_all(outs, [torch.full((n,), 10.0 * rank + j) for j, n in enumerate(rows)])
    assert [t.tolist() for t in outs] == [[10.0 * r + rank] * n for r, n in enumerate(got)]

    lists = [[torch.zeros(2), torch.zeros(2, 3)] for _ in range(world)]
    dist.all_gather_coalesced(lists, [torch.full((2,), float(rank)), torch.full((2, 3), rank + 5.0)])
    assert [t.unique().tolist() for outs in lists for t in outs] == [[0.0], [5.0], [1.0], [6.0]]

    # an AsyncCollectiveTensor is waited for; tensors without values pass
    import torch.distributed._functional_collectives as fc
    from torch._subclasses.fake_tensor import FakeTensorMode

    pending = fc.all_reduce(torch.ones(3), "sum", dist.group.WORLD)
    dist.all_reduce(pending)
    assert pending.tolist() == [4, 4, 4]
    with FakeTensorMode():
        fake = torch.ones(3)
        with counted():
            dist.all_reduce(fake)


def test_layouts():
    run_ranks(layouts, 2)


def reductions_more(rank, world):
    """Truth values, complex numbers, premultiplied sums, several tensors at once."""
    bits = torch.tensor([[True, True, False, False], [True, False, True, False]])
    for op, want in {
        "SUM": [1, 1, 1, 0],
        "MAX": [1, 1, 1, 0],
        "BOR": [1, 1, 1, 0],
        "PRODUCT": [1, 0, 0, 0],
        "MIN": [1, 0, 0, 0],
        "BAND": [1, 0, 0, 0],
        "BXOR": [0, 1, 1, 0],
    }.items():
        x = bits[rank].clone()
        dist.all_reduce(x, getattr(dist.ReduceOp, op))
        assert x.view(torch.uint8).tolist() == want, f"{op}: {x.view(torch.uint8).tolist()}"
    x = torch.complex(torch.ones(3), torch.full((3,), float(rank)))
    dist.all_reduce(x)
    assert x.tolist() == [2 + 1j] * 3
    part = torch.zeros(2, dtype=torch.complex64)
    dist.group.WORLD._reduce_scatter_base(part, torch.arange(4) + 1j * torch.ones(4)).wait()
    assert part.tolist() == [[2j, 2 + 2j], [4 + 2j, 6 + 2j]][rank]
    half = dist._make_nccl_premul_sum(0.5)
    own = dist._make_nccl_premul_sum(torch.tensor([rank + 1.0]))
    for op, want in ((half, 1.5), (own, 5.0)):
        x = torch.full((4,), rank + 1.0)
        with counted(all_reduce=1):
            dist.all_reduce(x, op)
        assert x.tolist() == [want] * 4
        out = torch.zeros(2)
        dist.reduce_scatter_tensor(out, torch.full((4,), rank + 1.0), op)
        assert out.tolist() == [want] * 2
        x = torch.full((4,), rank + 1.0)
        dist.reduce(x, 1, op)
        assert x.tolist() == [want if rank == 1 else 1.0] * 4
    several = [torch.ones(3), torch.ones(4, 2).t(), torch.ones((), dtype=torch.float64)]
    with counted(all_reduce=3):
        dist.group.WORLD.allreduce_coalesced(several).wait()
    assert [t.unique().tolist() for t in several] == [[2.0]] * 3
    for wrong, text in (
        (lambda: dist.all_reduce(torch.ones(2, dtype=torch.int64), half), "premultiplied"),
        (
            lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND),
            "there is no band of torch.float32; possible are sum",
        ),
        (lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e5m2)), "there is no sum of torch.float8_e5m2"),
        (lambda: dist.all_reduce(torch.ones(2).bool(), dist.ReduceOp.AVG), "no avg of torch.bool"),
        (lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), [1, 1], None), "split sizes [1, 1]"),
        (lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), None, [5, -1]), "split sizes [5, -1]"),
        (lambda: dist.group.WORLD.gather([[torch.ones(1)]], [torch.ones(1)], _root(1 - rank)), "expected none"),
        (lambda: dist.group.WORLD.gather([[torch.ones(1)]], [torch.ones(1)], _root(rank)), "expected 2 tensors"),
        (lambda: dist.all_to_all([torch.ones(1)], [torch.ones(1)]), "expected 2 inputs and outputs"),
    ):
        with pytest.raises(Exception) as caught:
            wrong()
        from deepc.errors import ArgumentError

        assert isinstance(caught.value, ArgumentError) and text in str(caught.value), repr(caught.value)
    dist.barrier()  # nothing was broken


def _root(rank: int):
    opts = torch._C._distributed_c10d.GatherOptions()
    opts.rootRank = rank
    return opts


def test_more_reductions_and_wrong_arguments():
    run_ranks(reductions_more, 2)


def messages(rank, world):
    """isend, irecv, any source, tags, batches, sub-groups, the coalescing manager with a device, objects."""
    right, left = (rank + 1) % world, (rank - 1) % world
    x, y = torch.full((3,), float(rank)), torch.zeros(3)
    with counted(sends=1, recvs=1):
        works = [dist.isend(x, right), dist.irecv(y, left)]
        for w in works:
            w.wait()
            assert w.is_completed() and w.is_success() and w.exception() is None
    assert y.tolist() == [left] * 3 and works[1].result()[0] is y and works[1].source_rank() == left
    with counted(sends=2, recvs=2):
        a, b = torch.zeros(3), torch.zeros(50_000, dtype=torch.bfloat16)
        big = torch.full((50_000,), rank + 1.0, dtype=torch.bfloat16)
        ops = [
            dist.P2POp(dist.isend, x, right, tag=1),
            dist.P2POp(dist.irecv, a, left, tag=1),
            dist.P2POp(dist.isend, big, left, tag=2),
            dist.P2POp(dist.irecv, b, right, tag=2),
        ]
        for w in dist.batch_isend_irecv(ops):
            w.wait()
    assert a.tolist() == [left] * 3 and b.eq(right + 1.0).all()
    # tags in another order than they were sent
    if rank == 0:
        sent = [dist.isend(torch.full((2,), float(tag)), 1, tag=tag) for tag in (5, 6)]
        for w in sent:
            w.wait()
    elif rank == 1:
        got = {tag: torch.zeros(2) for tag in (6, 5)}
        for tag, t in got.items():
            dist.recv(t, 0, tag=tag)
            assert t.tolist() == [tag] * 2
    # from anyone
    if rank == 0:
        seen = set()
        for _ in range(world - 1):
            t = torch.zeros(1)
            who = dist.recv(t)
            assert t.item() == who
            seen.add(who)
        assert seen == set(range(1, world))
    else:
        dist.send(torch.tensor([float(rank)]), 0)
    # futures, types that are only moved
    for dtype in (torch.float8_e4m3fn, torch.bool, torch.uint16, torch.complex128, torch.int64):
        t = torch.ones(4).to(dtype)
        if rank == 0:
            dist.send(t, 1)
        elif rank == 1:
            t = torch.zeros(4).to(dtype)
            future = dist.irecv(t, 0).get_future()
            assert future.wait()[0] is not None and t.to(torch.complex128).eq(1).all()
    # a sub-group names global ranks
    pair = dist.new_group([1, 2])
    if rank == 1:
        dist.send(torch.ones(2), 2, group=pair)
    elif rank == 2:
        t = torch.zeros(2)
        assert dist.recv(t, 1, group=pair) == 1 and t.tolist() == [1, 1]
        w = dist.irecv(t, group=pair)
        dist.barrier(pair)
        w.wait()
        assert t.tolist() == [7, 7]
    if rank == 1:
        dist.barrier(pair)
        dist.send(torch.full((2,), 7.0), 2, group=pair)
    # torch's coalescing manager with a device
    t = torch.zeros(3)
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.isend(x, right)
        dist.irecv(t, left)
    manager.wait()
    assert t.tolist() == [left] * 3
    objects = [None]
    dist.scatter_object_list(objects, [{"for": r} for r in range(world)] if rank == 0 else None, src=0)
    assert objects == [{"for": rank}]
    gathered = [None] * world if rank == 1 else None
    dist.gather_object(("rank", rank), gathered, dst=1)
    assert rank != 1 or gathered == [("rank", r) for r in range(world)]
    if rank == 0:
        dist.send_object_list([1, "two"], dst=1)
    elif rank == 1:
        received = [None, None]
        assert dist.recv_object_list(received, src=0) == 0 and received == [1, "two"]
    dist.barrier()


def test_messages():
    run_ranks(messages, 3)


def messages_over_nodes(rank, world):
    """Gloo carries them: in any layout, from anyone, with our errors."""
    from deepc.errors import RankDiedError

    sent, got = torch.arange(12.0).view(3, 4), torch.zeros(4, 6)[:, ::2]
    if rank == 0:
        dist.send(sent.T, 1)
        assert dist.recv(got) == 1 and got.eq(5).all() and got._base[:, 1::2].eq(0).all()
    else:
        work = dist.irecv(got, 0)
        work.get_future().wait()
        assert work.is_completed() and torch.equal(got, sent.T)
        dist.send(torch.tensor(5.0).expand(4, 3), 0)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for call in (
        lambda: dist.recv(torch.zeros(3), 1),
        lambda: dist.send(torch.zeros(3), 1),
        lambda: dist.irecv(torch.zeros(3), 1).wait(),
    ):
        with pytest.raises(RankDiedError, match=r"rank 1 \(pid \d+ on .*node 1\) died.*at python/test_backend.py:"):
            call()


def test_messages_over_nodes_lie_anyhow_and_tell_of_a_dead_rank():
    run_ranks(messages_over_nodes, 2, nodes="ab", may_die=[1])


def test_a_message_that_fails_is_told_by_its_future_alone(monkeypatch):
    import threading

    from deepc.comm.c10d.works import Message
    from deepc.errors import CommError

    class Request:
        def wait(self, timeout_s=None):
            raise CommError("the peer is gone")

    printed = []
    monkeypatch.setattr(threading, "excepthook", printed.append)
    future = Message(Request(), [], lambda: "recv", lambda exc: None).get_future()
    with pytest.raises(RuntimeError, match="the peer is gone"):
        future.wait()
    for thread in threading.enumerate():
        if thread.name == "deepc message":
            thread.join()
    assert not printed


def first_message(rank, world):
    """A first call between two ranks does not wait for the third; a sender that forgets its Work loses nothing."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 2:
        assert store.get("received") == b"yes"
    elif rank == 0:
        dist.isend(torch.ones(100_000), 1)
    else:
        t = torch.zeros(100_000)
        dist.recv(t, 0)
        assert t.eq(1).all()
        store.set("received", "yes")
    dist.barrier()


def test_first_message_waits_for_its_two_ranks_only():
    run_ranks(first_message, 3)


def message_errors(rank, world, folder):
    from deepc.errors import ArgumentError, MismatchError

    line = sys._getframe().f_lineno + 2
    try:
        dist.send(torch.ones(4), 1) if rank == 0 else dist.recv(torch.ones(2, 3), 0)
        dist.barrier()
    except MismatchError as exc:
        for part in ("count 4", "count 6", f"test_backend.py:{line}"):
            assert part in str(exc), (part, str(exc))
    else:
        raise AssertionError("no error")
    _again(rank, folder + "/store1")
    with pytest.raises(ArgumentError):
        dist.group.WORLD.send([torch.ones(1)], rank, 0)
    with pytest.raises(ArgumentError, match="expected one tensor, got 2"):
        dist.group.WORLD.send([torch.ones(1)] * 2, 1 - rank, 0)
    dist.barrier()


def test_errors_of_messages(tmp_path):
    run_ranks(message_errors, 2, args=(str(tmp_path),))


def groups(rank, world):
    """split_group, monitored_barrier: torch's own words where torch refuses, else ours; limits of single calls."""

    from deepc.errors import CommError, CommTimeoutError

    with pytest.raises(RuntimeError, match="No device associated|does not support splitting|No backend"):
        dist.split_group(split_ranks=[[0, 1], [2]])
    with pytest.raises(ValueError, match="only implemented for GLOO"):
        dist.monitored_barrier()
    world_group = dist.group.WORLD
    part = world_group.split_group([0, 2], group_name="halves")
    assert (part is None) == (rank == 1)
    if part is not None:
        x = torch.ones(3)
        with counted(all_reduce=1):
            part.allreduce([x]).wait()
        assert x.tolist() == [2, 2, 2] and part.size() == 2 and part.group_name == "halves"
        part.shutdown()
        with pytest.raises(CommError, match="has been destroyed"):
            part.allreduce([x])
    with counted(barrier=1):
        world_group.monitored_barrier(datetime.timedelta(seconds=200))
    with counted(barrier=1):
        dist.barrier(timeout=datetime.timedelta(seconds=200))
    dist.barrier()
    if rank == 0:
        time.sleep(2)  # does not come in time
        return
    began = time.monotonic()
    with pytest.raises(CommTimeoutError, match="rank 0 did not arrive"):
        dist.barrier(timeout=datetime.timedelta(milliseconds=300))
    assert time.monotonic() - began < 30


def test_splitting_and_limits_of_calls():
    run_ranks(groups, 3, fresh=True)


# ---- stock trainers --------------------------------------------------------------------------------------------------
def _model() -> torch.nn.Module:
    torch.manual_seed(5)
    nn = torch.nn
    return nn.Sequential(nn.Linear(17, 33), nn.Tanh(), nn.Linear(33, 9), nn.LayerNorm(9), nn.Linear(9, 3))


def _train(model, forward, rank) -> list[float]:
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(4):
        g = torch.Generator().manual_seed(10 * step + rank)
        x, y = torch.randn(6, 17, generator=g), torch.randn(6, 3, generator=g)
        loss = (forward(x) - y).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def trainers(rank, world):
    import deepc
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    gloo = dist.new_group(backend="gloo")
    for kind in ("ddp", "fsdp2"):
        seen = {}
        for name, group in (("deepc", dist.group.WORLD), ("gloo", gloo)):
            before = deepc.counters()
            model = _model()
            if kind == "ddp":
                wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.001)
                losses = _train(wrapped, wrapped, rank)
                weights = [p.detach().clone() for p in model.parameters()]
            else:
                mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
                for layer in (model[0], model[2], model):
                    fully_shard(layer, mesh=mesh)
                losses = _train(model, model, rank)
                weights = [p.full_tensor().detach().clone() for p in model.parameters()]
            after = deepc.counters()
            moved = {k: after[k] - before[k] for k in after if k.startswith("coll_")}
            if name == "gloo":
                # DTensor takes a mesh of all ranks to the default group for the norm and for full_tensor
                assert moved["coll_reduce_scatter"] == 0, f"Gloo's group used the core: {moved}"
                assert kind == "fsdp2" or not any(moved.values()), moved
            elif kind == "ddp":
                assert moved["coll_all_reduce"] >= 4 and moved["coll_broadcast"] > 0, moved
            else:
                assert moved["coll_all_gather"] >= 4 * 3 and moved["coll_reduce_scatter"] >= 4 * 3, moved
            seen[name] = (losses, weights)
        assert seen["deepc"][0] == seen["gloo"][0], f"{kind}: losses {seen['deepc'][0]} and {seen['gloo'][0]}"
        for i, (got, want) in enumerate(zip(seen["deepc"][1], seen["gloo"][1])):
            same(got, want, f"{kind} parameter {i}")


def test_ddp_and_fsdp2_train_as_on_gloo():
    run_ranks(trainers, 2)


# ---- errors ----------------------------------------------------------------------------------------------------------
def _again(rank, store: Path, timeout_s: float = 60.0) -> None:
    """A new default group after an error broke the old one."""
    import datetime

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        "deepc", init_method=f"file://{store}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=timeout_s)
    )


def mismatches(rank, world, folder):
    import deepc
    from deepc.errors import ArgumentError, MismatchError

    def raises(kind, call, *parts):
        began = time.monotonic()
        try:
            call()
        except kind as exc:
            for part in parts:
                assert part in str(exc), f"'{part}' is not in: {exc}"
        else:
            raise AssertionError(f"no {kind.__name__}")
        return time.monotonic() - began

    line = sys._getframe().f_lineno
    raises(
        MismatchError,
        lambda: dist.all_reduce(torch.ones(4)) if rank == 0 else dist.broadcast(torch.ones(4), 0),
        "rank 0 called all_reduce(fp32, count 4, sum)",
        "rank 1 called broadcast(fp32, count 4, root 0)",
        f"test_backend.py:{line + 3}",
    )
    raises(MismatchError, lambda: dist.barrier(), "rank 0 called all_reduce")  # broken for good
    other = dist.new_group()  # other groups still work
    _again(rank, folder + "/store1")
    raises(MismatchError, lambda: dist.all_reduce(torch.ones(4 + rank)), "count 4", "count 5")
    _again(rank, folder + "/store2")
    raises(
        MismatchError, lambda: dist.all_reduce(torch.ones(4, dtype=[torch.float32, torch.int32][rank])), "fp32", "int32"
    )
    _again(rank, folder + "/store3")
    sparse = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1), (4,))
    line = sys._getframe().f_lineno
    raises(
        MismatchError,
        lambda: dist.all_gather_into_tensor(torch.ones(8), torch.ones(4)) if rank == 0 else dist.all_reduce(sparse),
        f"rank 0 called all_gather(fp32, count 4) [call 2 at python/test_backend.py:{line + 3}]",
        "rank 1 called barrier(tag",
        "(all_reduce, on Gloo)",
    )
    _again(rank, folder + "/store4")
    narrow = torch.zeros(4, dtype=[torch.float8_e4m3fn, torch.float8_e5m2][rank])
    raises(
        MismatchError, lambda: (dist.broadcast(narrow, 0), dist.barrier()), "broadcast", "tag"
    )  # the root need not wait for the others
    _again(rank, folder + "/store5")
    # arguments that are wrong on every rank: refused before anything is shared, the group stays sound
    raises(ArgumentError, lambda: dist.all_gather_into_tensor(torch.ones(5), torch.ones(4)), "5 elements", "4")
    raises(ArgumentError, lambda: dist.reduce_scatter_tensor(torch.ones(4), torch.ones(7)), "7")
    raises(ArgumentError, lambda: dist.all_gather([torch.ones(3), torch.ones(4)], torch.ones(4)), "all_gather")
    raises(ArgumentError, lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3)), "2 equal blocks")
    raises((RuntimeError, ValueError), lambda: dist.all_reduce(torch.ones(4, dtype=torch.int64), dist.ReduceOp.AVG))
    raises((RuntimeError, ValueError, TypeError), lambda: dist.all_reduce(torch.ones(4, dtype=torch.float8_e4m3fn)))
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [2, 2]
    assert issubclass(MismatchError, deepc.DeepcError)
    del other


def test_mismatches_and_wrong_arguments(tmp_path):
    run_ranks(mismatches, 2, args=(str(tmp_path),))


def late(rank, world):
    from deepc.errors import CommTimeoutError

    dist.barrier()  # all were here, however long that took
    dist.group.WORLD.set_timeout(datetime.timedelta(seconds=1))
    if rank == 1:
        time.sleep(2.5)
    try:
        dist.all_reduce(torch.ones(3))
    except CommTimeoutError as exc:
        assert (
            "rank 1 did not arrive" in str(exc) and "rank 1 (pid" in str(exc) and "has finished barrier()" in str(exc)
        ), str(exc)
        assert isinstance(exc, TimeoutError)
        return
    raise AssertionError("no time-out")


def test_timeout_says_where_every_rank_is():
    run_ranks(late, 2)


def killed(rank, world):
    from deepc.errors import RankDiedError

    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        dist.all_reduce(torch.ones(100_000))
    except RankDiedError as exc:
        for part in ("rank 1 (pid", "died", "all_reduce(fp32, count 100000, sum)", "test_backend.py:"):
            assert part in str(exc), str(exc)
        return time.monotonic() - began
    raise AssertionError("no error")


def test_killed_rank_is_told_to_the_survivors():
    out = run_ranks(killed, 3, may_die=[1], timeout_s=60)
    assert out[1] is None and out[0] is not None and out[2] is not None
    assert max(out[0], out[2]) < 30  # long before the time-out


def killed_in_ddp(rank, world):
    """The error of a collective that C++ (DDP's reducer, in autograd's thread) calls."""
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        model(torch.ones(2, 4)).sum().backward()
    except RuntimeError as exc:
        assert "rank 1 (pid" in str(exc) and "died" in str(exc), str(exc)
        return f"{type(exc).__name__}: {exc}"
    raise AssertionError("no error")


def test_killed_rank_in_ddp():
    assert run_ranks(killed_in_ddp, 2, may_die=[1])[0].startswith("RankDiedError: ")


SCRIPT = """
import os, sys, torch, torch.distributed as dist
import deepc
rank = int(sys.argv[1])
dist.init_process_group("deepc", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
sub = dist.new_group([0, 1])
for g in (None, sub):
    x = torch.ones(3)
    dist.all_reduce(x, group=g)
pid = os.fork()
if pid == 0:
    try:
        dist.all_reduce(torch.ones(3))
    except deepc.DeepcError as exc:
        os._exit(7 if "forked" in str(exc) else 8)  # as data loader workers end; Gloo can't be finalised in a forked child
    os._exit(9)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
dist.barrier()
print("fine", x.tolist())
"""  # noqa: E501


def test_exit_without_destroy_and_forked_child(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    procs = [
        subprocess.Popen(
            [sys.executable, str(script), str(r), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
        )
        for r in range(2)
    ]
    try:
        for p in procs:
            out, _ = p.communicate(timeout=100)
            assert p.returncode == 0 and "fine [2.0, 2.0, 2.0]" in out, out
    finally:
        for p in procs:
            p.kill()


# ---- node.py ---------------------------------------------------------------------------------------------------------
def comm_and_segments(rank, world, folder):
    import datetime

    from deepc.comm import shared as node
    from deepc.errors import ArgumentError, CommError, UnsupportedError

    store = dist.FileStore(folder + "/store", world)

    def opened(label: str, seconds: float = 30) -> node.Comm:
        return node.open_comm(
            dist.PrefixStore(label, store),
            rank,
            world,
            label=label,
            timeout=datetime.timedelta(seconds=seconds),
            slot_bytes=4096,
            slots=2,
        )

    comm = opened("mine")
    x = torch.arange(3000, dtype=torch.float32) * (rank + 1)
    out = torch.empty(3000)
    comm.all_reduce(x, "max", out=out)
    same(out, torch.arange(3000, dtype=torch.float32) * 2, "max")
    flat = torch.empty(6000)
    comm.all_gather(flat, x)
    same(flat.view(2, 3000)[1], torch.arange(3000, dtype=torch.float32) * 2, "gather")
    part = torch.empty(1500)
    comm.reduce_scatter(part, x)
    same(part, torch.arange(3000, dtype=torch.float32).view(2, 1500)[rank] * 3, "reduce_scatter")
    comm.broadcast(x, 1)
    comm.all_to_all(out, x)
    comm.barrier()
    for wrong, text in (
        (lambda: comm.all_reduce(x.view(2, 1500).t()), "contiguous"),
        (lambda: comm.all_reduce(x, "median"), "median"),
        (lambda: comm.all_reduce(x.to(torch.complex64)), "complex64"),
        (lambda: comm.all_reduce(x.to("meta")), "meta"),
        (lambda: comm.all_reduce([1.0]), "list"),
        (lambda: comm.all_gather(flat, x[:7]), "ratio"),
        (lambda: comm.broadcast(x, 5), "root 5"),
        (lambda: comm.all_reduce(x, out=out[:3]), "3 elements"),
        (lambda: comm.segment(0), "0 bytes"),
    ):
        try:
            wrong()
        except ArgumentError as exc:
            assert text in str(exc), str(exc)
        else:
            raise AssertionError(f"no ArgumentError about {text}")
    segment = comm.segment(3 << 20)
    assert segment.nbytes == 4 << 20 and segment.info()[0] == 4 << 20
    view = segment.tensor(torch.float32, 4096, 1000)
    assert view.sum() == 0
    comm.barrier()
    view[rank * 500 : (rank + 1) * 500] = rank + 1.0
    comm.barrier()
    assert view.sum() == 1500
    for bad in ((torch.float32, 2, 1), (torch.float32, 4 << 20, 1), (torch.float32, -4, 1), (torch.float32, 0, -1)):
        try:
            segment.tensor(*bad)
        except ArgumentError:
            continue
        raise AssertionError(f"segment.tensor{bad} was accepted")
    comm.barrier()
    comm.close()
    comm.close()
    del segment
    view.add_(1)  # the tensor keeps the memory
    assert view[rank * 500].item() >= 2
    try:
        comm.barrier()
    except ArgumentError as exc:
        assert "closed" in str(exc)
    os.environ["DEEPC_NODE_ID"] = f"n{rank}"
    try:
        opened("far", 5)
    except UnsupportedError as exc:
        assert "rank 0: n0, rank 1: n1" in str(exc)
    else:
        raise AssertionError("ranks of two nodes shared memory")
    finally:
        del os.environ["DEEPC_NODE_ID"]
    comm = opened("again")
    if rank == 0:
        comm.abort("enough")
    try:
        while True:
            comm.barrier()
    except CommError as exc:
        assert "rank 0" in str(exc) and "enough" in str(exc) and "enough" in comm.error()
    comm.close()


def test_comm_and_segments(tmp_path):
    run_ranks(comm_and_segments, 2, args=(str(tmp_path),), backend=None)


def in_one_buffer(rank, world):
    """Inputs and outputs that lie in each other, not only where this rank's part is: large enough for peers to read
    and write them where they lie."""
    n = 100_000

    def of(r: int, parts: int = 1) -> torch.Tensor:
        return torch.arange(parts * n, dtype=torch.float32) * (r + 1) + r

    gathered, mine = torch.cat([of(r) for r in range(world)]), slice(rank * n, (rank + 1) * n)
    summed = sum(of(r, world) for r in range(world))[mine]
    for _ in range(3):
        for calls in range(3):
            buf = torch.zeros(world * n)
            buf[:n] = of(rank)
            outs = list(buf.chunk(world))
            if calls == 0:
                dist.all_gather_into_tensor(buf, buf[:n])
            elif calls == 1:
                dist.all_gather(outs, outs[0])
            else:
                buf[-n:] = of(rank)
                dist.gather(outs[-1], outs if rank == 0 else None, 0)
            assert calls == 2 and rank or torch.equal(buf, gathered), calls
        for calls in range(3):
            buf = of(rank, world)
            parts = list(buf.chunk(world))
            if calls == 0:
                dist.reduce_scatter_tensor(buf[:n], buf)
            elif calls == 1:
                dist.reduce_scatter(parts[0], parts)
            else:
                whole = torch.cat([buf, torch.zeros(n)])
                dist.all_to_all_single(whole[n:], whole[:-n])
                assert torch.equal(whole[n:], torch.cat([of(r, world)[mine] for r in range(world)]))
                continue
            assert torch.equal(buf[:n], summed), calls


def test_inputs_and_outputs_in_one_buffer():
    run_ranks(in_one_buffer, 2)


def test_a_time_out_may_be_of_any_length():
    from deepc.comm import shared

    ages = datetime.timedelta.max
    comm = shared.open_comm(dist.HashStore(), 0, 1, label="alone", timeout=ages, slot_bytes=4096, slots=2)
    comm.set_timeout(ages)
    comm.barrier()
    comm.close()


def test_a_communicator_is_not_freed_under_a_message_that_starts():
    import threading

    from deepc.comm import shared
    from deepc.errors import ArgumentError

    timeout = datetime.timedelta(seconds=60)
    comm = shared.open_comm(dist.HashStore(), 0, 1, label="alone", timeout=timeout, slot_bytes=4096, slots=2)
    closing = threading.Thread(target=comm.close)

    def start(handle, *_):
        closing.start()
        closing.join(0.05)
        assert closing.is_alive() and handle
        return 0

    comm._message(start, torch.zeros(1), 0, 0)
    closing.join()
    assert not comm.is_sound
    with pytest.raises(ArgumentError, match="communicator alone is closed"):
        comm.isend(torch.zeros(1), 0)


def test_node_id(monkeypatch):
    from deepc.comm import place

    monkeypatch.delenv("DEEPC_NODE_ID", raising=False)
    boot, net = place.node_id().split("/")
    assert len(boot) == 36 and int(net) > 0
    monkeypatch.setenv("DEEPC_NODE_ID", "here")
    assert place.node_id() == "here"


# ---- the helper of these tests ---------------------------------------------------------------------------------------
def failing(rank, world):
    if rank == 1:
        raise ValueError("number one is unwell")
    return rank


def test_run_ranks_tells_failures():
    with pytest.raises(RankFailure, match="number one is unwell") as info:
        run_ranks(failing, 2, backend=None)
    assert info.value.codes == [0, 1]
    assert run_ranks(fine, 2, args=(4,), backend=None) == [0, 4]


def fine(rank, world, x):
    return rank * x
