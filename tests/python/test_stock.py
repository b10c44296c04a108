"""Stock PyTorch on the backend "deepc": DDP, FSDP2, HSDP, ZeroRedundancyOptimizer, DTensor, tensor parallel,
pipelining, DCP, functional collectives. Nothing of deepc is named but the backend.

Each job runs twice, with "deepc" and with "gloo" as the backend of all groups, and returns the same losses, weights and
tensors to the last bit: every sum in these jobs is one of two ranks, whose order does not matter (on four ranks the
meshes are 2 x 2), or nothing is summed. Where more than two ranks sum, gradients are compared to the sum in rank order
in fp32. Counters of the C core and Gloo's sequence numbers prove that no call went to Gloo."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conformance import differs
from ranks import run_ranks
from tiny import make_batch, make_model
from torch import nn

LIMIT_S = 240.0


# ---- running on both backends ----------------------------------------------------------------------------------------
def _gloo_calls() -> int:
    """Calls that Gloo has carried beneath the deepc groups that exist."""
    pgs = [pg for pg, (backend, _) in dist.distributed_c10d._world.pg_map.items() if backend == "deepc"]
    return sum(pg._get_backend(torch.device("cpu"))._get_sequence_number_for_group() for pg in pgs)


def job(rank: int, world: int, name: str, args: tuple) -> tuple[Any, dict[str, int], int]:
    import deepc

    warnings.simplefilter("ignore")
    before = deepc.counters()
    torch.manual_seed(100 + rank)
    out = globals()[name](rank, world, *args)
    after = deepc.counters()
    return out, {k: after[k] - before[k] for k in after if after[k] != before[k]}, _gloo_calls()


def equal(got: Any, want: Any, where: str) -> None:
    """Equal to the last bit."""
    if isinstance(want, torch.Tensor):
        bad = differs(got, want, where)
        assert not bad, bad
    elif isinstance(want, dict):
        assert got.keys() == want.keys(), f"{where}: {sorted(got)} for {sorted(want)}"
        for k in want:
            equal(got[k], want[k], f"{where}.{k}")
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want), f"{where}: {len(got)} for {len(want)} entries"
        for i, (g, w) in enumerate(zip(got, want)):
            equal(g, w, f"{where}[{i}]")
    else:
        assert got == want or (got != got and want != want), f"{where}: {got!r} for {want!r}"


def as_on_gloo(fn: Callable, world: int, *args: Any, core: Sequence[str]) -> list[Any]:
    """Runs fn on both backends; all it returns must be equal. core: counters of the C core that must have risen on some
    rank. Returns deepc's results."""
    call = {"args": (fn.__name__, args), "timeout_s": 60, "limit_s": LIMIT_S}
    deepc = run_ranks(job, world, backend="deepc", **call)
    gloo = run_ranks(job, world, backend="gloo", **call)
    for r, ((got, counted, on_gloo), (want, gloo_counted, _)) in enumerate(zip(deepc, gloo)):
        equal(got, want, f"rank {r}")
        assert on_gloo == 0, f"rank {r}: {on_gloo} calls went to Gloo; the C core did {counted}"
        assert not any(k.startswith(("coll_", "p2p_")) for k in gloo_counted), (
            f"the run on Gloo used the core: {gloo_counted}"
        )
    for name in core:
        done = [counted.get(name, 0) for _, counted, _ in deepc]
        assert any(done), f"the C core did no {name}: {[c for _, c, _ in deepc]}"
    return [got for got, _, _ in deepc]


# ---- a small model ---------------------------------------------------------------------------------------------------
class Net(nn.Module):
    """Linear layers of odd sizes, a norm with buffers, and a branch that some inputs leave unused."""

    def __init__(self, branch: bool = False, buffers: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.a, self.b, self.c = nn.Linear(17, 33), nn.Linear(33, 9), nn.Linear(9, 3)
        self.norm = nn.BatchNorm1d(33) if buffers else nn.LayerNorm(33)
        self.side = nn.Linear(33, 9) if branch else None

    def forward(self, x, use_side: bool = False):
        h = torch.tanh(self.norm(self.a(x)))
        y = self.b(h)
        if use_side:
            y = y + self.side(h)
        return self.c(torch.relu(y))


def batch(step: int, rank: int, rows: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, 17, generator=g), torch.randn(rows, 3, generator=g)


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers; sharded ones whole."""
    out = {}
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        t = t.detach()
        out[name] = (t.full_tensor() if hasattr(t, "full_tensor") else t).clone()
    return out


def train(model, forward, rank: int, steps: int = 3, optimizer=None, clip: float | None = 1.0) -> list[float]:
    opt = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        x, y = batch(step, rank)
        loss = F.mse_loss(forward(x), y)
        loss.backward()
        if clip:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            losses.append((norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item())
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


# ---- DDP -------------------------------------------------------------------------------------------------------------
DDP_FORMS = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "one_bucket": {"bucket_cap_mb": 25},
    "static_views": {"static_graph": True, "gradient_as_bucket_view": True},
    "buffers": {},
}


def ddp(rank, world, form):
    from torch.nn.parallel import DistributedDataParallel

    model = Net(buffers=form == "buffers")
    if rank == 1:  # DDP sends rank 0's
        for p in model.parameters():
            p.data.add_(1)
    wrapped = DistributedDataParallel(model, **{"bucket_cap_mb": 0.001, **DDP_FORMS[form]})
    return train(model, wrapped, rank), tensors(model)


@pytest.mark.parametrize("form", DDP_FORMS)
def test_ddp(form):
    out = as_on_gloo(ddp, 2, form, core=["coll_all_reduce", "coll_broadcast"])
    if form != "buffers":  # each rank of DDP keeps its own running mean until the next forward
        equal(out[0][1], out[1][1], "weights of the ranks")


def ddp_unused(rank, world):
    """The branch is used by one rank in one step, by none in another."""
    from torch.nn.parallel import DistributedDataParallel

    model = Net(branch=True)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=0.001)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        x, y = batch(step, rank)
        loss = F.mse_loss(wrapped(x, use_side=[True, rank == 0, rank == 1, False][step]), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses, tensors(model)


def test_ddp_unused_parameters():
    as_on_gloo(ddp_unused, 2, core=["coll_all_reduce", "coll_broadcast"])


def ddp_no_sync(rank, world):
    from torch.nn.parallel import DistributedDataParallel

    model = Net()
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.001)
    opt, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(3):
        for micro in range(3):
            x, y = batch(10 * step + micro, rank)
            with wrapped.no_sync() if micro < 2 else contextlib.nullcontext():
                loss = F.mse_loss(wrapped(x), y)
                loss.backward()
            losses.append(loss.item())
        opt.step()
        opt.zero_grad()
    return losses, tensors(model)


def test_ddp_no_sync():
    as_on_gloo(ddp_no_sync, 2, core=["coll_all_reduce"])


def ddp_join(rank, world):
    """Rank 1 has more batches."""
    from torch.nn.parallel import DistributedDataParallel

    model = Net()
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.001)
    opt, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    with wrapped.join():
        for step in range(2 + 2 * rank):
            x, y = batch(step, rank)
            loss = F.mse_loss(wrapped(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
    return losses, tensors(model)


def test_ddp_uneven_inputs():
    as_on_gloo(ddp_join, 2, core=["coll_all_reduce", "coll_broadcast"])


def ddp_hooks(rank, world, which):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    model = Net()
    # PowerSGD starts a reduction in the thread that ended the one before: with several buckets their order differs
    # from rank to rank on Gloo, which then waits for ever. One bucket has one order.
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1 if which == "powersgd" else 0.001)
    if which == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
        )
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        wrapped.register_comm_hook(None, getattr(default_hooks, which))
    return train(model, wrapped, rank, steps=4), tensors(model)


@pytest.mark.parametrize(
    "which", ["allreduce_hook", "fp16_compress_hook", pytest.param("powersgd", marks=pytest.mark.full)]
)
def test_ddp_hooks(which):
    as_on_gloo(ddp_hooks, 2, which, core=["coll_all_reduce"])


def ddp_gradients(rank, world):
    """Gradients that DDP left, and every rank's own ones."""
    from torch.nn.parallel import DistributedDataParallel

    def gradients(model, forward, r):
        x, y = batch(0, r)
        F.mse_loss(forward(x), y).backward()
        return {n: p.grad.clone() for n, p in model.named_parameters()}

    model = Net()
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.001)
    return gradients(model, wrapped, rank), [gradients(m := Net(), m, r) for r in range(world)]


def test_ddp_on_four_ranks_sums_in_rank_order():
    out = run_ranks(job, 4, args=("ddp_gradients", ()))
    for r, ((got, each), counted, on_gloo) in enumerate(out):
        assert on_gloo == 0 and counted["coll_all_reduce"] > 0, (on_gloo, counted)
        for name in got:
            want = each[0][name] / 4  # DDP divides, then sums
            for g in each[1:]:
                want = want + g[name] / 4
            equal(got[name], want, f"rank {r} gradient of {name}")


# ---- FSDP2, HSDP -----------------------------------------------------------------------------------------------------
def _sharded(model: Net, **options) -> Net:
    from torch.distributed.fsdp import fully_shard

    for layer in (model.a, model.b, model):
        fully_shard(layer, **options)
    return model


def fsdp(rank, world, form):
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
        set_model_state_dict,
    )
    from torch.distributed.fsdp import MixedPrecisionPolicy

    mesh = (
        dist.init_device_mesh("cpu", (world,))
        if not form.startswith("hsdp")
        else dist.init_device_mesh(
            "cpu", {"hsdp22": (2, 2), "hsdp12": (1, 2), "hsdp21": (2, 1)}[form], mesh_dim_names=("replicate", "shard")
        )
    )
    options: dict[str, Any] = {"mesh": mesh}
    if form == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    elif form == "bf16_reduce":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    elif form == "kept":
        options["reshard_after_forward"] = False
    model = _sharded(Net(), **options)
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = train(model, model, rank, optimizer=opt)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    states = get_optimizer_state_dict(model, opt, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    weights = tensors(model)
    # and back: rank 0's whole weights into a new model
    again = _sharded(Net(), **options)
    source = {k: v + 1 for k, v in weights.items()} if rank == 0 else {}
    set_model_state_dict(again, source, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return losses, weights, whole, states, tensors(again)


@pytest.mark.parametrize(
    "form",
    [
        "fp32",
        "bf16",
        "kept",
        pytest.param("bf16_reduce", marks=pytest.mark.full),
        pytest.param("hsdp12", marks=pytest.mark.full),
        pytest.param("hsdp21", marks=pytest.mark.full),
    ],
)
def test_fsdp2(form):
    sharded = ["coll_all_gather", "coll_reduce_scatter"]
    out = as_on_gloo(fsdp, 2, form, core=["coll_broadcast", *(["coll_all_reduce"] if form == "hsdp21" else sharded)])
    equal(out[0][1], out[1][1], "weights of the ranks")
    equal(out[0][4], {k: v + 1 for k, v in out[0][1].items()}, "weights that rank 0 sent")


@pytest.mark.full
def test_hsdp():
    as_on_gloo(fsdp, 4, "hsdp22", core=["coll_all_gather", "coll_reduce_scatter", "coll_all_reduce"])


def fsdp_gradients(rank, world, dtype):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model = _sharded(
        Net(), mesh=dist.init_device_mesh("cpu", (world,)), mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype)
    )
    x, y = batch(0, rank)
    F.mse_loss(model(x), y).backward()
    got = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
    each = []
    for r in range(world):
        plain = Net()
        x, y = batch(0, r)
        F.mse_loss(plain(x), y).backward()
        each.append({n: p.grad.clone() for n, p in plain.named_parameters()})
    return got, each


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fsdp2_on_four_ranks_sums_in_rank_order(dtype):
    """Within 1 ulp of the reduced dtype of the mean that fp32 adds up in rank order."""
    from conformance import outside, ulp

    out = run_ranks(job, 4, args=("fsdp_gradients", (dtype,)))
    for r, ((got, each), counted, on_gloo) in enumerate(out):
        assert on_gloo == 0 and counted["coll_reduce_scatter"] > 0, (on_gloo, counted)
        for name in got:
            want = each[0][name].to(dtype).float()
            for g in each[1:]:
                want = want + g[name].to(dtype).float()
            want = want.double() / 4
            bad = outside(got[name].to(dtype), want, ulp(want, dtype), f"rank {r} gradient of {name}")
            assert not bad, bad


# ---- ZeroRedundancyOptimizer -----------------------------------------------------------------------------------------
def zero_redundancy(rank, world):
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = Net()
    wrapped = DistributedDataParallel(model)
    opt = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    losses = train(model, wrapped, rank, optimizer=opt, clip=None)
    opt.consolidate_state_dict(to=0)
    return losses, tensors(model), opt.state_dict() if rank == 0 else None


def test_zero_redundancy_optimizer():
    as_on_gloo(zero_redundancy, 2, core=["coll_all_reduce", "coll_broadcast"])


# ---- DTensor, tensor parallel ----------------------------------------------------------------------------------------
def dtensors(rank, world, shape, mesh_shape):
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", mesh_shape)
    g = torch.Generator().manual_seed(3)
    whole = torch.randn(shape, generator=g)
    places = [[Replicate()], [Shard(0)], [Shard(1)]]
    if len(mesh_shape) == 2:
        places = [
            [Replicate(), Replicate()],
            [Shard(0), Shard(1)],
            [Shard(1), Shard(0)],
            [Shard(0), Shard(0)],
            [Replicate(), Shard(1)],
        ]
    out = []
    for a in places:
        x = distribute_tensor(whole, mesh, a)
        for b in places:
            y = x.redistribute(mesh, b)
            equal(y.full_tensor(), whole, f"{shape} {a} to {b}")
            out.append(y.to_local().clone())
    # partial sums: to every placement
    part = torch.randn(shape, generator=torch.Generator().manual_seed(10 + rank))
    for b in places:
        y = DTensor.from_local(part, mesh, [Partial()] * len(mesh_shape), run_check=False).redistribute(mesh, b)
        out.append(y.full_tensor() if b == places[1] else y.to_local().clone())
    for op in ("avg", "max", "min", "product"):
        out.append(DTensor.from_local(part, mesh, [Partial(op)] * len(mesh_shape), run_check=False).full_tensor())
    # arithmetic that communicates, with gradients
    a = distribute_tensor(whole, mesh, places[1]).requires_grad_()
    b = distribute_tensor(whole.t().contiguous(), mesh, places[0])
    z = (a @ b).square().mean()
    z.backward()
    return out, z.full_tensor().detach(), a.grad.full_tensor(), torch.linalg.vector_norm(a).full_tensor().detach()


@pytest.mark.parametrize("shape", [(8, 6), (7, 5)])
def test_dtensor(shape):
    as_on_gloo(dtensors, 2, shape, (2,), core=["coll_all_gather", "coll_all_reduce", "coll_reduce_scatter"])


@pytest.mark.full
@pytest.mark.parametrize("shape", [(8, 6), (7, 5), (3, 1)])
def test_dtensor_on_a_mesh_of_2x2(shape):
    as_on_gloo(dtensors, 4, shape, (2, 2), core=["coll_all_gather", "coll_all_reduce", "coll_reduce_scatter"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def tensor_parallel(rank, world, form):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    two = form == "with_fsdp2"
    mesh = dist.init_device_mesh("cpu", (2, 2) if two else (world,), mesh_dim_names=("dp", "tp") if two else ("tp",))
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if form == "sequence":
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
            "": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Shard(1), use_local_output=False),
        }
        plan = {k: v for k, v in plan.items() if k}
    model = nn.Sequential(Block(), Block())
    for block in model:
        parallelize_module(block, mesh["tp"], plan)
    if two:
        for block in (*model, model):
            fully_shard(block, mesh=mesh["dp"])
    opt, losses = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False), []
    data = rank // 2 if two else 0
    for step in range(3):
        x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(10 * step + data))
        if form == "sequence":
            x = x.chunk(world, 1)[rank]
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses, tensors(model)


@pytest.mark.parametrize("form", ["plain", "sequence"])
def test_tensor_parallel(form):
    core = ["coll_all_reduce"] if form == "plain" else ["coll_all_gather", "coll_reduce_scatter"]
    as_on_gloo(tensor_parallel, 2, form, core=core)


@pytest.mark.full
def test_tensor_parallel_with_fsdp2():
    as_on_gloo(tensor_parallel, 4, "with_fsdp2", core=["coll_all_reduce", "coll_all_gather", "coll_reduce_scatter"])


# ---- checkpoints -----------------------------------------------------------------------------------------------------
def checkpoints(rank, world, folder, asynchronous):
    """Trains, saves, trains on (while the save runs), then loads and trains the same steps again."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    folder = os.path.join(folder, dist.get_backend())

    def fresh():
        model = _sharded(Net(), mesh=dist.init_device_mesh("cpu", (world,)))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    savers = dist.new_group()
    model, opt = fresh()
    first = train(model, model, rank, optimizer=opt)
    at_save = tensors(model)
    state = dict(zip(("model", "optim"), get_state_dict(model, opt)))
    if asynchronous:
        saving = dcp.async_save(state, checkpoint_id=folder, process_group=savers)
    else:
        dcp.save(state, checkpoint_id=folder, process_group=savers)
    second = train(model, model, rank, optimizer=opt)
    if asynchronous:
        saving.result()
    model, opt = fresh()
    train(model, model, rank, steps=1, optimizer=opt)  # states must exist, with other values
    state = dict(zip(("model", "optim"), get_state_dict(model, opt)))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
    equal(tensors(model), at_save, "loaded weights")
    again = train(model, model, rank, optimizer=opt)
    equal(again, second, "training after loading")
    return first, second, tensors(model)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["save", "async_save"])
def test_checkpoints(tmp_path, asynchronous):
    as_on_gloo(checkpoints, 2, str(tmp_path), asynchronous, core=["coll_all_gather", "coll_gather", "coll_scatter"])


# ---- pipelining ------------------------------------------------------------------------------------------------------
def pipeline(rank, world, schedule, micro, chunks):
    from torch.distributed import pipelining
    from torch.distributed.pipelining import PipelineStage

    def part(index):
        torch.manual_seed(20 + index)
        return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 12))

    indices = [rank + c * world for c in range(chunks)]
    modules = [part(i) for i in indices]
    stages = [PipelineStage(m, i, world * chunks, torch.device("cpu")) for m, i in zip(modules, indices)]
    run = getattr(pipelining, schedule)(stages if chunks > 1 else stages[0], n_microbatches=micro, loss_fn=F.mse_loss)
    opt, seen = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.1), []
    for step in range(3):
        g = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 12, generator=g), torch.randn(8, 12, generator=g)
        losses: list[torch.Tensor] = []
        last = indices[-1] == world * chunks - 1
        run.step(*([x] if rank == 0 else []), **({"target": y, "losses": losses} if last else {}))
        opt.step()
        opt.zero_grad()
        seen.append([x.item() for x in losses])
    return seen, [tensors(m) for m in modules]


@pytest.mark.parametrize(
    "schedule, world, micro, chunks",
    [
        ("ScheduleGPipe", 2, 4, 1),
        ("Schedule1F1B", 2, 4, 1),
        ("Schedule1F1B", 4, 8, 1),
        *(
            pytest.param(*p, marks=pytest.mark.full)
            for p in (
                ("ScheduleGPipe", 4, 4, 1),
                ("ScheduleInterleaved1F1B", 2, 4, 2),
                ("ScheduleLoopedBFS", 2, 4, 2),
                ("ScheduleInterleavedZeroBubble", 4, 8, 2),
            )
        ),
    ],
)
def test_pipelining(schedule, world, micro, chunks):
    out = as_on_gloo(pipeline, world, schedule, micro, chunks, core=["p2p_sends", "p2p_recvs"])
    assert any(len(losses) == micro for losses in out[-1][0]), out[-1][0]
    # and as one process computes it
    torch.manual_seed(0)
    model = nn.Sequential(*[_pipeline_part(i) for i in range(world * chunks)])
    x, y = torch.randn(8, 12, generator=(g := torch.Generator().manual_seed(0))), torch.randn(8, 12, generator=g)
    want = [F.mse_loss(model(a), b).item() for a, b in zip(x.chunk(micro), y.chunk(micro))]
    equal(out[-1][0][0], want, "losses of the first step")


def _pipeline_part(index: int) -> nn.Module:
    torch.manual_seed(20 + index)
    return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 12))


# ---- functional collectives ------------------------------------------------------------------------------------------
def functional(rank, world, compiler):
    import torch.distributed._functional_collectives as fc

    group = dist.group.WORLD
    mine = torch.randn(8, 6, generator=torch.Generator().manual_seed(rank))
    rows = [[2, 6], [5, 3]]

    def program(x):
        a = fc.all_reduce(x * 2, "sum", group) + 1
        b = fc.all_gather_tensor(x + 1, 0, group) * 2
        c = fc.all_gather_tensor(x, 1, group).sin()
        d = fc.reduce_scatter_tensor(b, "avg", 0, group)
        e = fc.reduce_scatter_tensor(x, "max", 1, group)
        f = fc.all_to_all_single(x, None, None, group) - 3
        g = fc.all_to_all_single(x.contiguous(), [r[rank] for r in rows], rows[rank], group) * 1
        h = fc.broadcast(x * 3, 1, group) + 0
        i = [t + 0 for t in fc.all_reduce_coalesced([x, x[0]], "min", group)]
        j = [t + 0 for t in fc.all_gather_into_tensor_coalesced([x, x[0]], group)]
        k = [t + 0 for t in fc.reduce_scatter_tensor_coalesced([x, b], "sum", [0, 0], group)]
        return [a, b, c, d, e, f, g, h, *i, *j, *k]

    def loss(x):
        y = fc.all_gather_tensor_autograd(x, 0, group)
        z = fc.reduce_scatter_tensor_autograd(y * y, "sum", 0, group)
        w = fc.all_to_all_single_autograd(z, None, None, group)
        return (w * w).sum()

    if compiler:
        torch._dynamo.reset()
        program, loss = (torch.compile(f, backend=compiler, fullgraph=True) for f in (program, loss))
    out = [t.clone() for t in program(mine)]
    x = mine.clone().requires_grad_()
    value = loss(x)
    value.backward()
    return out, value.detach(), x.grad


@pytest.mark.parametrize(
    "compiler", [None, *(pytest.param(c, marks=pytest.mark.full) for c in ("aot_eager", "inductor"))]
)
def test_functional_collectives(compiler):
    core = [f"coll_{n}" for n in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")]
    as_on_gloo(functional, 2, compiler, core=core)


def differentiable(rank, world):
    """torch.distributed.nn: collectives with gradients."""
    import torch.distributed.nn.functional as dnn

    group = dist.group.WORLD  # its own default is the group that was there when it was imported
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    halves = [torch.empty(2, 3), torch.empty(2, 3)]
    calls = [
        lambda: dnn.all_reduce(x * 1, group=group),
        lambda: torch.cat(dnn.all_gather(x * 2, group=group)),
        lambda: torch.cat(dnn.all_to_all(halves, list(x.chunk(2)), group=group)),
        lambda: dnn.broadcast(x * 3, src=1, group=group),
        lambda: dnn.reduce(x * 4, dst=0, group=group),
        lambda: dnn.reduce_scatter(torch.empty(2, 3), list(x.chunk(2)), group=group),
        lambda: dnn.all_to_all_single(torch.empty(4, 3), x * 5, group=group),
        lambda: dnn.scatter(list((x * 6).chunk(2)), src=1, group=group),
        lambda: torch.cat(dnn.gather(x * 7, dst=0, group=group)),
    ]
    out = []
    for i, call in enumerate(calls):  # one graph at a time: backward of one graph calls in an order of its own
        y = call()
        (y * y).sum().backward()
        at_root_only = i in (4, 8)  # Gloo leaves anything elsewhere
        out += [x.grad.clone()] + ([y.detach()] if rank == 0 or not at_root_only else [])
    return out


def test_differentiable_collectives():
    as_on_gloo(
        differentiable, 2, core=["coll_all_reduce", "coll_all_gather", "coll_broadcast", "coll_reduce", "coll_scatter"]
    )


def compiled_ddp(rank, world, backend):
    from torch.nn.parallel import DistributedDataParallel

    torch._dynamo.reset()
    model = make_model()
    wrapped = torch.compile(DistributedDataParallel(model), backend=backend)
    opt, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(2):
        x, y = make_batch(2 * step + rank)
        loss = wrapped(x, y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses, tensors(model)


@pytest.mark.full
def test_compiled_ddp():
    as_on_gloo(compiled_ddp, 2, "aot_eager", core=["coll_all_reduce"])


# ---- what data loading does ------------------------------------------------------------------------------------------
def objects(rank, world):
    """Seeds from rank 0, samples by DistributedSampler, results back as objects."""
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    box = [{"seed": 41, "files": ["a", "b"]} if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    data = TensorDataset(torch.arange(23))
    sampler = DistributedSampler(data, seed=box[0]["seed"])
    seen = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        seen.append([x.tolist() for (x,) in DataLoader(data, batch_size=4, sampler=sampler)])
    every: list[Any] = [None] * world
    dist.all_gather_object(every, seen)
    whole = {x for one in every for b in one[0] for x in b}
    assert whole == set(range(23)), whole
    got: list[Any] | None = [None] * world if rank == 1 else None
    dist.gather_object({"rank": rank, "text": "x" * (1000 * rank)}, got, dst=1)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [("shard", r, bytes(10**r)) for r in range(world)] if rank == 0 else None, src=0)
    return every, got, mine


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_objects_of_data_loading(world):
    as_on_gloo(objects, world, core=["coll_broadcast", "coll_all_gather", "coll_gather", "coll_scatter"])
