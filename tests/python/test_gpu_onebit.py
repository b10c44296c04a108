"""1-bit Adam, 1-bit LAMB and 0/1 Adam on a GPU against the CPU, with the same gradients: the all-reduce bit for bit,
the optimizers as near as torch's own kernels are. Needs a CUDA device, which two ranks share."""

from __future__ import annotations

import contextlib
import copy
import math
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import on_nodes, run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SHAPES = [(70, 40), (33,), (2, 2048)]
OPTIONS = dict(lr=2e-3, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.05)
EXTRA = {
    "OneBitAdam": dict(freeze_step=4),
    "OneBitLamb": dict(freeze_step=4),
    # no decay: what ranks move by themselves would depend on bits of the parameters
    "ZeroOneAdam": dict(
        var_freeze_step=4, var_update_scaler=1, local_step_scaler=2, local_step_clipper=2, weight_decay=0.0
    ),
}
STEPS, SAVED = 12, 7
# Of the largest number of a tensor. Kernels of torch for CUDA contract a product and a sum (add_ with alpha, addcmul_,
# addcdiv_) where those for the CPU round in between, or the other way around: a bit of a step, so some of a parameter
# after 12 steps. What 1 bit sends is the same all the same, but for signs of numbers as small as that.
TOLERANCE = 1e-6
BF16 = 2**-7  # a rounding to bf16 can fall on either side: one unit of its last place


def ranks_here(work, world, *args, backend):
    """On one GPU, the first that this process sees."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return run_ranks(work, world, args=args, backend=backend, env={"CUDA_VISIBLE_DEVICES": first})


@contextlib.contextmanager
def one_gpu_for_all():
    """NCCL refuses ranks that share a GPU: uncompressed means go through the host here, as with a group that takes CPU
    tensors alone."""
    with mock.patch("deepc.comm.internode.onebit.takes", lambda group, device: device.type == "cpu"):
        yield


# ---- the all-reduce --------------------------------------------------------------------------------------------------
def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.detach().cpu().view(torch.uint8)


def wires(rank, world, hierarchical, nodes):
    """Three calls on either device: equal bits of x and of errors; a state of one goes into the other."""
    from deepc.compress import OneBitAllReduce
    from deepc.errors import ArgumentError

    with on_nodes(rank, world, nodes):
        for n, block, chunk in ((1, 64, 128), (65, 64, 128), (1000, 64, 384), (4096, 64, 1024), (50_000, 2048, 16384)):
            for dtype in (torch.float32, torch.bfloat16):
                for mask in (None, torch.arange(n) % 5 != 2):
                    options = dict(block=block, chunk=chunk, hierarchical=hierarchical)
                    one = OneBitAllReduce(n, mask=mask, **options)
                    other = OneBitAllReduce(n, mask=mask, device="cuda", **options)
                    for step in range(3):
                        if step == 2:
                            saved = one.state_dict()
                            one.load_state_dict(other.state_dict())
                            other.load_state_dict(saved)
                        x = torch.randn(n, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)
                        y = x.cuda()
                        assert one.all_reduce_(x) == other.all_reduce_(y)
                        assert torch.equal(_bits(x), _bits(y)), (n, dtype, mask is None, step)
                        for kind, error in one.errors.items():
                            assert other.errors[kind].is_cuda
                            assert torch.equal(_bits(error), _bits(other.errors[kind])), (n, dtype, kind, step)
                    assert torch.equal(one.owed(), other.owed().cpu())
        with pytest.raises(ArgumentError, match="on cpu; expected .* on cuda:0"):
            other.all_reduce_(x)
        with pytest.raises(ArgumentError, match="on cuda:0; expected .* on cpu"):
            one.all_reduce_(y)


@pytest.mark.parametrize("backend", ["gloo", "deepc"])
@pytest.mark.parametrize(("hierarchical", "nodes"), [(False, 1), (True, 1), (True, 2)])
def test_the_all_reduce_has_the_bits_of_the_cpus(hierarchical, nodes, backend):
    ranks_here(wires, 2, hierarchical, nodes, backend=backend)


def test_one_process_has_the_bits_of_the_cpus():
    wires(0, 1, True, 1)


# ---- the drop-ins ----------------------------------------------------------------------------------------------------
def gradients(rank, step):
    g = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(s, generator=g) + 0.3 for s in SHAPES]


class Run:
    """A drop-in and its parameters on one device."""

    def __init__(self, device, name, dtype, options, values=None):
        from deepc import optim

        values = gradients(0, -1) if values is None else values
        self.params = [torch.nn.Parameter(v.detach().to(device, dtype)) for v in values]
        mask = torch.ones(SHAPES[1])
        mask[3:7] = 0  # elements that never have a gradient
        groups = [{"params": self.params[::2]}, {"params": self.params[1:2], "exp_avg_mask": mask}]
        self.opt = getattr(optim, name)(groups, **{**OPTIONS, **EXTRA[name], **options})

    def steps(self, rank, begin, end):
        for step in range(begin, end):
            for p, g in zip(self.params, gradients(rank, step)):
                g = g.clone()
                if g.shape == SHAPES[1]:
                    g[3:7] = 0
                p.grad = g.to(p.device, p.dtype)
            self.opt.step()
        return self


def near(got, want, tolerance, what):
    assert got.dtype == want.dtype, what
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    most = tolerance * float(want.abs().max()) if want.numel() else 0.0
    torch.testing.assert_close(got, want, rtol=tolerance, atol=most, msg=lambda text: f"{what}: {text}")


def same(one, other):
    """Parameters, states, errors and numbers of two runs."""
    for i, (p, q) in enumerate(zip(one.params, other.params)):
        near(q, p, TOLERANCE if p.dtype == torch.float32 else BF16, f"parameter {i}")
    a, b = one.opt.method, other.opt.method
    for name in a.names:
        for i, (x, y) in enumerate(zip(a.items, b.items)):
            assert y.states[name].device == other.params[0].device
            near(y.states[name], x.states[name], TOLERANCE, f"{name} of {i}")
    assert a.errors().keys() == b.errors().keys()
    for kind, error in a.errors().items():
        near(b.errors()[kind], error, TOLERANCE, f"{kind} errors")
    for key, value in a.numbers().items():
        if isinstance(value, list):
            assert all(math.isclose(x, y, rel_tol=1e-5) for x, y in zip(value, b.numbers()[key])), key
        else:
            assert value == b.numbers()[key], key


def drop_in(rank, world, name, options, nodes, dtype):
    """On the GPU as on the CPU; saved on either and loaded on the other both go on as without."""
    with on_nodes(rank, world, nodes), one_gpu_for_all() if world > 1 else contextlib.nullcontext():
        runs = {d: Run(d, name, dtype, options).steps(rank, 0, SAVED) for d in ("cpu", "cuda")}
        same(runs["cpu"], runs["cuda"])
        loaded = {}
        for here, there in (("cpu", "cuda"), ("cuda", "cpu")):
            saved = copy.deepcopy(runs[here].opt.state_dict())
            loaded[there] = Run(there, name, dtype, options, runs[here].params)
            loaded[there].opt.load_state_dict(saved)
        for run in (*runs.values(), *loaded.values()):
            run.steps(rank, SAVED, STEPS)
        for other in (runs["cuda"], loaded["cuda"], loaded["cpu"]):
            same(runs["cpu"], other)
        if world > 1:
            assert runs["cuda"].opt.sent_bytes == runs["cpu"].opt.sent_bytes
            assert bool(runs["cuda"].opt.method.errors()) and runs["cuda"].opt.local_gradients
    return [p.detach().cpu().float() for p in runs["cuda"].params]


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
LIVE = dict(ratios="live", max_update=1.0)
CASES = [(name, {}) for name in EXTRA]
CASES += [("OneBitLamb", LIVE), ("OneBitAdam", {"rotated": True, "max_update": 1.0})]
IDS = ["adam", "lamb", "zeroone", "live lamb", "rotated adam"]


@DTYPES
@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_one_rank_equals_the_cpu(name, options, dtype):
    drop_in(0, 1, name, options, 1, dtype)


@DTYPES
@pytest.mark.parametrize("backend", ["gloo", "deepc"])
@pytest.mark.parametrize(("hierarchical", "nodes"), [(False, 1), (True, 1), (True, 2)])
@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_two_ranks_equal_the_cpus(name, options, hierarchical, nodes, backend, dtype):
    options = {**options, "hierarchical": hierarchical}
    found = ranks_here(drop_in, 2, name, options, nodes, dtype, backend=backend)
    if name != "ZeroOneAdam" or STEPS % 2 == 0:  # after a synchronisation
        assert all(torch.equal(a, b) for a, b in zip(*found))


def folds(rank, world):
    """Every rank's state_dict, of errors on the GPU."""
    with one_gpu_for_all():
        run = Run("cuda", "OneBitAdam", torch.float32, {"hierarchical": False}).steps(rank, 0, SAVED)
    state = copy.deepcopy(run.opt.state_dict())
    assert state["onebit"]["errors"]["worker"].is_cuda
    return [p.detach().cpu() for p in run.params], _on_host(state)


def _on_host(x):
    """Tensors of other processes' GPUs can't be pickled between them."""
    if isinstance(x, torch.Tensor):
        return x.cpu()
    if isinstance(x, dict):
        return {k: _on_host(v) for k, v in x.items()}
    return type(x)(map(_on_host, x)) if isinstance(x, (list, tuple)) else x


def takes_folded(rank, world, values, state):
    with one_gpu_for_all():
        runs = [Run(d, "OneBitAdam", torch.float32, {"hierarchical": False}, values) for d in ("cpu", "cuda")]
        for run in runs:
            run.opt.load_state_dict(copy.deepcopy(state))
            run.steps(rank, SAVED, STEPS)
        same(*runs)


def test_folded_states_load_on_a_gpu():
    from deepc.optim.onebit.dropin import folded

    found = ranks_here(folds, 2, backend="gloo")
    values, state = found[0][0], folded([s for _, s in found])
    on_gpu = {"onebit": {**found[0][1]["onebit"], "errors": {k: t.cuda() for k, t in _errors(found[0][1]).items()}}}
    again = folded([{**found[0][1], **on_gpu}, found[1][1]])  # of errors on two devices
    assert torch.equal(_errors(again)["worker"], _errors(state)["worker"])
    ranks_here(takes_folded, 2, values, state, backend="gloo")


def _errors(state):
    return state["onebit"]["errors"]


def test_parameters_on_two_devices_are_refused():
    from deepc.errors import ArgumentError
    from deepc.optim import OneBitAdam

    params = [torch.nn.Parameter(torch.ones(4, device=d)) for d in ("cuda", "cpu")]
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises(ArgumentError, match="one parameter is on cuda:0, another on cpu"):
        OneBitAdam(params).step()


# ---- the engine ------------------------------------------------------------------------------------------------------
def _optimizer(name, **more):
    options = {**OPTIONS, **EXTRA[name], "betas": list(OPTIONS["betas"]), **more}
    return {"type": name, "params": options}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", list(EXTRA))
def test_an_engine_equals_the_cpus(name, precision):
    from test_gpu_engine import on

    want, got = (on(d, 0, precision, steps=8, optimizer=_optimizer(name)) for d in ("cpu", "cuda"))
    for a, b in zip(want[0], got[0]):
        assert math.isclose(a, b, rel_tol=1e-3 if precision == "fp32" else 3e-2)


@pytest.mark.parametrize("stage", [1, 2])
def test_one_rank_at_stages_1_and_2_equals_the_cpus(stage):
    """One worker compresses there: a gradient as small as rounding may get either sign."""
    from test_gpu_engine import on

    optimizer = _optimizer("OneBitAdam", max_update=1.0)
    want, got = (on(d, stage, "fp32", steps=8, optimizer=optimizer) for d in ("cpu", "cuda"))
    for a, b in zip(want[0], got[0]):
        assert math.isclose(a, b, rel_tol=3e-2)


def engines(rank, world, name, folder):
    """Losses on the GPU as on the CPU; what a rank owes goes from the one to the other."""
    import tiny

    losses, options = {}, dict(max_update=1.0, hierarchical=False)
    for device in ("cpu", "cuda"):
        engine = _engine(device, name, 0, micro=4, **options)
        losses[device] = []
        for step in range(8):
            x, y = (t[rank * 4 : rank * 4 + 4].to(engine.device) for t in tiny.make_batch(step))
            loss = engine(x, y)
            engine.backward(loss)
            engine.step()
            losses[device].append(loss.item())
        assert engine.optimizer.base.method.exchange.sent_bytes > 0
        weights = {n: engine.full_fp32_param(p).cpu() for n, p in engine.module.named_parameters()}
        owed = {k: t.cpu().clone() for k, t in engine.optimizer.base.method.errors().items()}
        engine.save_checkpoint(os.path.join(folder, device))
        engine.destroy()
    again = _engine("cpu", name, 0, seed=1, micro=4, **options)
    again.load_checkpoint(os.path.join(folder, "cuda"))
    for n, p in again.module.named_parameters():
        assert torch.equal(again.full_fp32_param(p), weights[n])
    assert owed and all(torch.equal(t, owed[k]) for k, t in again.optimizer.base.method.errors().items())
    again.destroy()
    return losses, weights


@pytest.mark.parametrize("name", list(EXTRA))
def test_two_ranks_of_an_engine_equal_the_cpus(name, tmp_path):
    """Over Gloo, which takes ranks that share a GPU."""
    found = ranks_here(engines, 2, name, str(tmp_path), backend="gloo")
    for losses, _ in found:
        for a, b in zip(losses["cpu"], losses["cuda"]):
            assert math.isclose(a, b, rel_tol=3e-2)
    (_, one), (_, other) = found
    assert all(torch.equal(w, other[n]) for n, w in one.items())


def _engine(device, name, stage, seed=0, micro=8, **more):
    import deepc
    import tiny

    cfg = tiny.config(stage, micro=micro, precision="bf16", optimizer=_optimizer(name, **more))
    return deepc.initialize(model=tiny.make_model(seed), config=cfg, device=device)[0]


def _states(engine):
    named = [engine.state.names[s.param] for _, s, _ in engine.optimizer.owned_states()]
    found = engine.optimizer.owned_states()
    return {f"{name}/{n}": window.read().cpu().clone() for n, (name, _, window) in zip(named, found)}


@pytest.mark.parametrize("name", list(EXTRA))
@pytest.mark.parametrize(("stage", "other"), [(0, 0), (1, 1)])
@pytest.mark.parametrize(("here", "there"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_checkpoint_goes_from_one_device_to_the_other(here, there, stage, other, name, tmp_path):
    import tiny

    engine = _engine(here, name, stage)
    for step in range(6):
        x, y = (t.to(engine.device) for t in tiny.make_batch(step))
        engine.backward(engine(x, y))
        engine.step()
    engine.save_checkpoint(tmp_path)
    weights = {n: engine.full_fp32_param(p).cpu() for n, p in engine.module.named_parameters()}
    states, numbers = _states(engine), engine.optimizer.base.method.numbers()
    owed = {k: t.cpu().clone() for k, t in engine.optimizer.base.method.errors().items()}
    engine.destroy()
    again = _engine(there, name, other, seed=1)
    again.load_checkpoint(tmp_path)
    for n, p in again.module.named_parameters():
        assert torch.equal(again.full_fp32_param(p).cpu(), weights[n])
    found = _states(again)
    assert found.keys() == states.keys() and all(torch.equal(t, states[k]) for k, t in found.items())
    assert again.optimizer.base.method.numbers() == numbers
    assert all(torch.equal(t.cpu(), owed[k]) for k, t in again.optimizer.base.method.errors().items())
    x, y = (t.to(again.device) for t in tiny.make_batch(6))
    again.backward(again(x, y))
    again.step()
    again.destroy()


def test_offloaded_states_are_refused():
    import deepc
    import tiny
    from deepc.errors import UnsupportedError

    cfg = tiny.config(0, micro=8, optimizer=_optimizer("OneBitAdam"))
    cfg["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    with pytest.raises(UnsupportedError, match="offload_optimizer on a GPU does not exist"):
        deepc.initialize(model=tiny.make_model(), config=cfg, device="cuda")


# ---- DDP -------------------------------------------------------------------------------------------------------------
class Products(torch.nn.Module):
    """Its gradients are what it is given, on whichever device."""

    def __init__(self, device):
        super().__init__()
        sizes = (300, 7001, 90)
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(n, device=device)) for n in sizes)

    def forward(self, given):
        return sum((p * g).sum() for p, g in zip(self.weights, given))


def hooked(rank, world, nodes):
    from deepc import ddp_hooks
    from deepc.compress import OneBit
    from deepc.errors import UnsupportedError

    with on_nodes(rank, world, nodes):
        models = [torch.nn.parallel.DistributedDataParallel(Products(d), bucket_cap_mb=0.01) for d in ("cpu", "cuda")]
        states = [ddp_hooks.register(m, OneBit(256), hierarchical=True) for m in models]
        for step in range(4):  # buckets are made anew after the first
            g = torch.Generator().manual_seed(10 * step + rank)
            given = [torch.randn(p.numel(), generator=g) for p in models[0].parameters()]
            for m in models:
                m.zero_grad()
                device = next(m.parameters()).device
                m([t.to(device) for t in given]).backward()
            for p, q in zip(*(m.parameters() for m in models)):
                assert q.grad.is_cuda and torch.equal(p.grad, q.grad.cpu()), step
        saved = [s.state_dict(m)["errors"] for s, m in zip(states, models)]
        assert all(torch.equal(t, saved[1][n].cpu()) for n, t in saved[0].items())
        assert states[0].sent_bytes == states[1].sent_bytes
        again = ddp_hooks.HookState(OneBit(256), hierarchical=True)
        again.load_state_dict(states[0].state_dict(models[0]), models[1])  # the CPU's into the GPU's
        assert set(again.state_dict(models[1])["errors"]) == set(saved[0])
        late = torch.nn.parallel.DistributedDataParallel(Products("cuda"))
        ddp_hooks.register(late, OneBit(256), hierarchical=True, overlap=True)
        with pytest.raises(UnsupportedError, match="overlap=True of a compressed bucket on cuda"):
            late([t.cuda() for t in given]).backward()
        dist.barrier()


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_hierarchical_ddp_hook_has_the_bits_of_the_cpus(nodes):
    ranks_here(hooked, 2, nodes, backend="gloo")
