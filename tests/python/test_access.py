"""Parameters as users see them: whole and local values behind them (deepc.view, deepc.utils.safe_*), ds_* attributes,
state_dicts."""

from __future__ import annotations

import copy
import io
import math
import os
import sys

import pytest
import tiny
import torch
from ranks import on_nodes
from ranks import run_quietly as run_ranks
from torch import nn

QUANTIZED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}


def engine_for(stage, precision="fp32", micro=2, gas=1, model=None, zero=None, **extra):
    import deepc

    cfg = tiny.config(stage, micro=micro, gas=gas, precision=precision, clip=0.0, deepc={"bucket_elems": 1}, **extra)
    cfg["zero_optimization"].update(zero or {})
    return deepc.initialize(model=model if model is not None else tiny.make_model(frozen=True), config=cfg)[0]


def backward(engine, rank, world, step=0, micro=2):
    x, y = tiny.make_batch(step, micro * world)
    engine.backward(engine(x[rank * micro :][:micro], y[rank * micro :][:micro]))


def trained(engine):
    return [(n, p) for n, p in engine.module.named_parameters() if p.requires_grad]


# ---- whole and local values ------------------------------------------------------------------------------------------
def _values(rank, world, nodes, stage, precision, zero):
    """Every value of every parameter, before and after it is set. Returns the local ranges and the values that all
    ranks must agree on."""
    import deepc
    from deepc import utils

    exact = not zero
    with on_nodes(rank, world, nodes):
        engine = engine_for(stage, precision, gas=2, zero=zero)
        start = dict(tiny.make_model(frozen=True).named_parameters())
        agreed, ranges = {}, {}
        for n, p in trained(engine):  # before the first step
            v = deepc.view(p)
            assert v.name == n and v.fp32.dtype == torch.float32 and torch.equal(v.fp32, start[n]), n
            assert v.grad is None and v.local.grad is None and utils.safe_get_full_grad(p) is None
            assert (
                torch.equal(v.state["exp_avg"], torch.zeros_like(start[n]))
                and "exp_avg_sq" in v.state
                and "nothing" not in v.state
            )
            ranges[n] = v.local.ranges
            assert v.local.fp32.numel() == sum(b - a for a, b in ranges[n])
            assert torch.equal(
                v.local.fp32, torch.cat([start[n].reshape(-1)[a:b] for a, b in ranges[n]] or [torch.empty(0)])
            )
            assert v.value.dtype == engine.dtype and torch.equal(v.value, p.detach())

        model, total = tiny.make_model(frozen=True), {}
        for m in range(
            2
        ):  # gradients after each micro-batch of an accumulation, against plain PyTorch on all ranks' samples
            backward(engine, rank, world, step=m)
            (model(*tiny.make_batch(m, 2 * world)) / 2).backward()
            want = {n: p.grad for n, p in model.named_parameters()}
            for n, p in trained(engine):
                got = deepc.view(p).grad
                if precision == "fp32" and exact:
                    torch.testing.assert_close(got, want[n], rtol=0, atol=1e-5 * float(want[n].abs().max()) + 1e-9)
                assert torch.equal(utils.safe_get_full_grad(p), got * engine.loss_scale), n
                local = deepc.view(p).local.grad
                assert torch.equal(local, torch.cat([got.reshape(-1)[a:b] for a, b in ranges[n]] or [torch.empty(0)]))
                total[n] = got
            if m == 0:
                assert not engine.step().applied

        # A gradient that is set is the one that the step takes, with its norm and in the first moment.
        square = 0.0
        for i, (n, p) in enumerate(trained(engine)):
            new = torch.arange(p.numel(), dtype=torch.float32).view(p.shape) % 7 * 2.0**-8
            if i % 3 == 0:
                deepc.view(p).grad = new
            elif i % 3 == 1:
                utils.safe_set_full_grad(p, new * engine.loss_scale)
            else:
                v = deepc.view(p)
                v.local.grad = torch.cat([new.reshape(-1)[a:b] for a, b in v.local.ranges] or [torch.empty(0)])
            torch.testing.assert_close(deepc.view(p).grad, new, rtol=1e-6, atol=0)
            total[n] = new
            square += float(new.double().square().sum())
        assert engine.step().applied
        assert math.isclose(engine.get_global_grad_norm(), math.sqrt(square), rel_tol=1e-6)
        for n, p in trained(engine):
            assert deepc.view(p).grad is None
            torch.testing.assert_close(
                utils.safe_get_full_optimizer_state(p, "exp_avg"), 0.1 * total[n], rtol=1e-5, atol=1e-12
            )
            agreed[n] = deepc.view(p).fp32

        # Weights and states that are set: the model computes with them at once, nothing else changes, and they are no
        # stray writes.
        for i, (n, p) in enumerate(trained(engine)):
            new, v = agreed[n] * 0.5 + 0.01, deepc.view(p)
            if i % 3 == 0:
                v.fp32 = new
            elif i % 3 == 1:
                utils.safe_set_full_fp32_param(p, new.double())
            else:
                v.local.fp32 = torch.cat([new.reshape(-1)[a:b] for a, b in v.local.ranges] or [torch.empty(0)])
            assert torch.equal(v.fp32, new) and torch.equal(utils.safe_get_full_fp32_param(p), new), n
            if exact:
                assert torch.equal(p.detach(), new.to(engine.dtype)) and torch.equal(v.value, p.detach()), n
            else:
                torch.testing.assert_close(p.detach().float(), new, rtol=0, atol=float(new.abs().max()) / 64)
            v.state["exp_avg_sq"] = new.abs()
            assert torch.equal(v.state["exp_avg_sq"], new.abs()), n
            v.local.state["exp_avg"] = v.local.state["exp_avg"] * 2
            torch.testing.assert_close(v.state["exp_avg"], 0.2 * total[n], rtol=1e-5, atol=1e-12)
            agreed[n] = p.detach().clone()
        for n, p in trained(engine):
            assert torch.equal(p.detach(), agreed[n]), n
        for m in range(2):
            backward(engine, rank, world, step=5 + m)
            applied = engine.step().applied
        assert applied
        agreed |= {f"after {n}": p.detach().clone() for n, p in engine.module.named_parameters()}
        engine.destroy()
    return ranges, agreed


def check_values(ranks, owns_all):
    for ranges, agreed in ranks:
        for n, t in agreed.items():
            assert torch.equal(t, ranks[0][1][n]), n
    for n in ranks[0][0]:
        numel = ranks[0][1][f"after {n}"].numel()
        if owns_all:
            assert all(ranges[n] == [(0, numel)] for ranges, _ in ranks), n
            continue
        pieces = sorted(r for ranges, _ in ranks for r in ranges[n])
        assert pieces[0][0] == 0 and pieces[-1][1] == numel and all(a[1] == b[0] for a, b in zip(pieces, pieces[1:])), n


@pytest.mark.parametrize(
    "world, stage, precision",
    [
        pytest.param(1, 3, "bf16", marks=pytest.mark.full),
        (2, 0, "bf16"),
        pytest.param(2, 1, "fp32", marks=pytest.mark.full),
        (2, 2, "fp16"),
        pytest.param(2, 2, "bf16", marks=pytest.mark.full),
        (2, 3, "fp32"),
        pytest.param(2, 3, "fp16", marks=pytest.mark.full),
        (3, 3, "bf16"),
    ],
)
def test_values_are_whole_and_can_be_set(world, stage, precision):
    check_values(run_ranks(_values, world, 1, stage, precision, {}), stage == 0)


@pytest.mark.parametrize(
    "stage, precision, zero",
    [
        pytest.param(0, "fp32", {}, marks=pytest.mark.full),
        pytest.param(2, "bf16", {}, marks=pytest.mark.full),
        *(pytest.param(3, p, {}, marks=pytest.mark.full) for p in ("fp32", "bf16")),
        (3, "bf16", QUANTIZED),
    ],
)
def test_values_over_nodes(stage, precision, zero):
    check_values(run_ranks(_values, 4, 2, stage, precision, zero), stage == 0)


def _odds(rank, world):
    """Ways to ask that are not the loop's own: a bare backward, no_sync, wrong arguments, foreign parameters, torch's
    optimizers."""
    import deepc
    from deepc import utils
    from deepc.errors import ArgumentError, StrayWriteError

    engine = engine_for(3, "bf16")
    weight, frozen = engine.module.blocks[0].up.weight, engine.module.pos.weight
    stranger = nn.Parameter(torch.ones(3))
    for p in (frozen, stranger):
        assert (
            utils.safe_get_full_fp32_param(p) is None
            and utils.safe_get_full_grad(p) is None
            and utils.safe_get_local_optimizer_state(p, "exp_avg") is None
        )
        utils.safe_set_full_fp32_param(p, torch.zeros(1))
        with pytest.raises(ArgumentError, match="no deepc engine trains"):
            deepc.view(p)
    with pytest.raises(ArgumentError, match="takes a parameter, got str"):
        deepc.view("blocks.0.up.weight")
    assert torch.equal(stranger, torch.ones(3))
    v = deepc.view(weight)
    assert "blocks.0.up.weight" in repr(v) and "exp_avg_sq" in repr(v) and list(v.state) == ["exp_avg", "exp_avg_sq"]
    for wrong in (torch.zeros(5), 1.0):
        with pytest.raises(ArgumentError, match=f"blocks.0.up.weight.*{weight.numel()}"):
            v.fp32 = wrong
    with pytest.raises(ArgumentError, match="local.ranges"):
        v.local.fp32 = torch.zeros(weight.numel() + 1)
    with pytest.raises(ArgumentError, match="'momentum'; there are exp_avg, exp_avg_sq"):
        v.state["momentum"]
    with pytest.raises(ArgumentError, match="no backward since the last step"):
        v.grad = torch.zeros_like(weight)

    x, y = tiny.make_batch(0)
    x, y = x[rank * 4 :][:4], y[rank * 4 :][:4]
    engine(x, y).backward()  # without the engine
    bare = v.grad
    engine.zero_grad()
    engine.backward(engine(x, y))
    assert torch.equal(v.grad, bare) and float(bare.abs().max()) > 0
    asked = []

    def inside(_):
        with pytest.raises(ArgumentError, match="inside backward"):
            v.grad
        asked.append(True)

    engine.zero_grad()
    h = engine.module.blocks[0](torch.randn(1, 4, 32, dtype=engine.dtype, requires_grad=True))
    h.register_hook(inside)
    engine.backward(h.float().sum())
    assert asked
    engine.zero_grad()
    with engine.no_sync():
        engine.backward(engine(x, y))
        mine = utils.safe_get_full_grad(weight)
        assert mine is weight.grad
        utils.safe_set_full_grad(weight, torch.zeros_like(mine))
        assert not weight.grad.any()
    engine.zero_grad()
    engine.backward(engine(x, y))
    utils.safe_update_full_grad_vectorized([p for _, p in trained(engine)], lambda g, p: g * 2)
    assert torch.equal(v.grad, bare * 2)

    # What is set is no stray write, and does not hide one.
    other = deepc.view(engine.module.ln.weight)
    if rank == 1:
        weight.data.mul_(1.0)
    other.fp32 = other.fp32 + 1
    v.fp32 = v.fp32
    with pytest.raises(StrayWriteError, match="blocks.0.up.weight.*rank 1"):
        engine.step()
    engine.destroy()
    with pytest.raises(ArgumentError, match="no deepc engine trains"):
        deepc.view(weight)

    cfg = tiny.config(2, micro=4, clip=0.0)
    del cfg["optimizer"]
    model = tiny.make_model()
    engine = deepc.initialize(model=model, optimizer=torch.optim.RMSprop(model.parameters(), lr=1e-3), config=cfg)[0]
    v = deepc.view(model.ln.weight)
    assert len(v.state) == 0 and "none yet" in repr(v)
    with pytest.raises(ArgumentError, match="first step"):
        v.state["square_avg"]
    engine.backward(engine(x, y))
    grad = v.grad
    engine.step()
    torch.testing.assert_close(v.state["square_avg"], 0.01 * grad.square(), rtol=1e-5, atol=0)
    v.state["square_avg"] = torch.ones_like(grad)
    assert torch.equal(v.state["square_avg"], torch.ones_like(grad))
    before = v.fp32
    engine.backward(engine(x, y))
    grad = v.grad
    engine.step()
    want = before - 1e-3 * grad / ((0.99 + 0.01 * grad.square()).sqrt() + 1e-8)
    torch.testing.assert_close(v.fp32, want, rtol=1e-6, atol=1e-9)
    with torch.no_grad():
        model.ln.weight.fill_(2.0)  # a replica: this counts, and readers see it at once
    assert torch.equal(v.fp32, torch.full_like(before, 2.0))
    engine.destroy()
    return True


def test_other_ways_to_ask():
    assert run_ranks(_odds, 2) == [True, True]


def _masters_follow(rank, world):
    """Stage 2 in bf16: a user's write into the replica is seen in the master before the step."""
    import deepc

    engine = engine_for(2, "bf16")
    p = engine.module.ln.weight
    with torch.no_grad():
        p.fill_(0.375)
    whole, local = deepc.view(p).fp32, deepc.view(p).local.fp32
    engine.destroy()
    return whole, local


def test_readers_see_writes_to_replicas_behind_masters():
    for whole, local in run_ranks(_masters_follow, 2):
        assert torch.all(whole == 0.375) and torch.all(local == 0.375)


def _streamed(rank, world, nodes, precision):
    """Values of parameters that are not there (streamed mode)."""
    import deepc
    from deepc import utils
    from deepc.zero import ZeroParamStatus

    os.environ["DEEPC_STREAMED"] = "1"
    try:
        with on_nodes(rank, world, nodes):
            engine = engine_for(3, precision, zero={"stage3_param_persistence_threshold": 0})
            assert engine.plan.mode == "streamed"
            start = dict(tiny.make_model(frozen=True).named_parameters())
            weight = engine.module.blocks[1].up.weight
            assert (
                weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
                and weight.ds_shape == (128, 32)
                and weight.ds_numel == 4096
            )
            with deepc.zero.GatheredParameters(weight):
                assert weight.ds_status is ZeroParamStatus.AVAILABLE and torch.equal(
                    weight, start["blocks.1.up.weight"].to(engine.dtype)
                )
            backward(engine, rank, world)
            grads = {n: deepc.view(p).grad for n, p in trained(engine)}
            (n, p), *_ = trained(engine)
            utils.safe_set_full_grad(p, grads[n] * 2 * engine.loss_scale)
            assert torch.equal(deepc.view(p).grad, grads[n] * 2)
            assert engine.step().applied
            for n, p in trained(engine):
                v = deepc.view(p)
                new = v.fp32 * 0.5
                v.fp32 = new
                v.state["exp_avg"] = new
                assert (
                    torch.equal(v.fp32, new)
                    and torch.equal(v.value, new.to(engine.dtype))
                    and torch.equal(v.state["exp_avg"], new)
                ), n
                assert v.local.fp32.numel() == sum(b - a for a, b in v.local.ranges)
            with deepc.zero.GatheredParameters([weight, engine.module.pos.weight], modifier_rank=world - 1):
                with torch.no_grad():
                    weight.fill_(0.25 if rank == world - 1 else 7.0)
                    engine.module.pos.weight.fill_(0.5 if rank == world - 1 else 7.0)
            assert torch.all(deepc.view(weight).fp32 == 0.25)
            backward(engine, rank, world, step=1)
            assert engine.step().applied
            whole = {n: t.clone() for n, t in engine.module_state_dict().items()}
            assert torch.all(whole["pos.weight"] == 0.5)
            assert all(torch.equal(whole[n], deepc.view(p).value) for n, p in trained(engine))
            on_rank_0 = engine._zero3_consolidated_16bit_state_dict() or {}
            assert on_rank_0.keys() == (whole.keys() if rank == 0 else set())
            assert all(torch.equal(t, whole[n]) for n, t in on_rank_0.items())
            assert all(t.untyped_storage().nbytes() == t.nbytes for t in on_rank_0.values())
            engine.load_module_state_dict({n: torch.full_like(t, 0.125) for n, t in whole.items()})
            assert all(
                torch.all(v.value == 0.125) and torch.equal(v.fp32.to(engine.dtype), v.value)
                for v in map(deepc.view, dict(trained(engine)).values())
            )
            engine.destroy()
    finally:
        del os.environ["DEEPC_STREAMED"]
    return whole


@pytest.mark.parametrize("world, nodes, precision", [(2, 1, "fp32"), (2, 1, "bf16"), (4, 2, "bf16")])
def test_values_of_released_parameters(world, nodes, precision):
    ranks = run_ranks(_streamed, world, nodes, precision)
    for whole in ranks:
        for n, t in whole.items():
            assert torch.equal(t, ranks[0][n]), n


# ---- a stage-3 parameter looks normal --------------------------------------------------------------------------------
def _looks(rank, world):
    import deepc  # noqa: F401
    from deepc.zero import ZeroParamStatus

    plain = tiny.make_model(frozen=True)
    engine = engine_for(3)
    seen = set()
    for (n, p), (_, q) in zip(engine.module.named_parameters(), plain.named_parameters()):
        assert (p.shape, p.numel(), p.dtype, p.device, p.requires_grad, p.is_leaf) == (
            q.shape,
            q.numel(),
            q.dtype,
            q.device,
            q.requires_grad,
            q.is_leaf,
        )
        assert repr(p) == repr(q) and isinstance(p, nn.Parameter) and isinstance(p.data, torch.Tensor), n
        assert p.ds_shape == q.shape and p.ds_numel == q.numel() and p.ds_status is ZeroParamStatus.AVAILABLE
        seen.add(p.ds_id)
        for missing in ("ds_tensor", "ds_process_group"):
            with pytest.raises(AttributeError, match="deepc.view"):
                getattr(p, missing)
            assert not hasattr(p, missing)
        twin = copy.deepcopy(p)
        assert (
            type(twin) is nn.Parameter
            and torch.equal(twin, p)
            and twin.data_ptr() != p.data_ptr()
            and not hasattr(twin, "ds_id")
        )
    assert len(seen) == len(list(plain.parameters()))
    assert repr(engine.module) == repr(plain)
    clone = copy.deepcopy(engine.module)
    assert all(type(p) is nn.Parameter for p in clone.parameters()) and clone.head.weight is clone.tok.weight
    engine.destroy()
    assert not any(hasattr(p, "ds_id") or type(p) is not nn.Parameter for p in engine.module.parameters())
    engine = engine_for(2, "bf16")
    assert not any(hasattr(p, "ds_id") for p in engine.module.parameters())
    engine.destroy()
    return [i - min(seen) for i in sorted(seen)]  # the processes have other tests behind them


@pytest.mark.parametrize("world", [1, 2])
def test_a_stage_3_parameter_looks_normal(world):
    ids = run_ranks(_looks, world)
    assert all(i == ids[0] for i in ids)


def _state_dicts(rank, world, nodes, folder):
    import deepc

    out = {}
    with on_nodes(rank, world, nodes):
        for stage in (2, 3):
            engine = engine_for(stage, "bf16", model=tiny.make_model(frozen=True))
            backward(engine, rank, world)
            engine.step()
            whole = engine.module_state_dict()
            assert whole.keys() == tiny.make_model(frozen=True).state_dict().keys() and all(
                t.dtype == torch.bfloat16 for t in whole.values()
            )
            for n, p in engine.module.named_parameters():
                assert torch.equal(whole[n], p.detach())
            trained_only = engine.module_state_dict(exclude_frozen_parameters=True)
            assert (
                whole.keys() - trained_only.keys() == {"pos.weight", "blocks.0.ln1.weight"}
                and "head.weight" in trained_only
            )
            on_rank_0 = engine._zero3_consolidated_16bit_state_dict()
            assert (on_rank_0 is None) == (rank != 0)
            for n, t in (on_rank_0 or {}).items():  # else accelerator.save_model leaves it out, as tied
                assert t.untyped_storage().nbytes() == t.nbytes, n
            file = io.BytesIO()
            torch.save(engine.module.state_dict(), file)
            file.seek(0)
            fresh = tiny.make_model(seed=3, frozen=True).bfloat16()
            fresh.load_state_dict(torch.load(file, weights_only=True))
            assert all(torch.equal(a, b) for a, b in zip(fresh.state_dict().values(), whole.values()))
            out[stage] = {n: t.clone() for n, t in whole.items()}
            state = {n: torch.full_like(t, 0.25) for n, t in whole.items()}
            with pytest.raises(RuntimeError, match="Missing key"):
                engine.load_module_state_dict({})
            engine.load_module_state_dict(state if rank == 0 or stage == 2 else {n: t + 1 for n, t in state.items()})
            assert all(torch.all(p == 0.25) for p in engine.module.parameters())
            assert on_rank_0 is None or all(torch.equal(t, out[stage][n]) for n, t in on_rank_0.items())
            assert torch.all(deepc.view(engine.module.ln.weight).fp32 == 0.25)
            engine.destroy()
    return out


@pytest.mark.parametrize("world, nodes", [(2, 1), (4, 2)])
def test_state_dicts_are_whole_on_every_rank(world, nodes, tmp_path):
    ranks = run_ranks(_state_dicts, world, nodes, str(tmp_path))
    for out in ranks:
        for n, t in out[3].items():
            assert torch.equal(t, ranks[0][2][n]), n


# ---- DeepSpeed's own functions ---------------------------------------------------------------------------------------
def _as_deepspeed(rank, world):
    """The same script on DeepSpeed and on deepc; what its functions return after each call, elementwise."""
    import deepc
    import deepspeed
    import deepspeed.utils as theirs
    import torch.distributed as dist
    from deepc import utils as ours

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it would be compiled here and now
    deepspeed.init_distributed("gloo", dist_init_required=False)

    def script(api, initialize, stage, precision):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)
        )  # its setters need sizes that the ranks divide
        cfg = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": stage},
            "gradient_clipping": 0.5,
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": 0.01, "weight_decay": 0.1, **({"torch_adam": True} if api is theirs else {})},
            },
        }
        if precision != "fp32":
            cfg[precision] = {"enabled": True}
        engine = initialize(model=model, model_parameters=list(model.parameters()), config=cfg)[0]
        params, seen = list(model.parameters()), []
        torch.manual_seed(5 + rank)

        def see(what, values):
            seen.extend(
                (f"{what} {i}", None if v is None else v.detach().float().clone()) for i, v in enumerate(values)
            )

        for step in range(4):
            for m in range(2):
                engine.backward(engine(torch.randn(2, 8).to(params[0].dtype)).float().square().mean())
                if m == 1 or stage == 3:  # DeepSpeed's stages 1 and 2 have them at the boundary only
                    see(f"step {step} micro {m} grad", [api.safe_get_full_grad(p) for p in params])
                if m == 0:
                    engine.step()
            if step == 1:
                for p in params:
                    api.safe_set_full_grad(p, api.safe_get_full_grad(p) * 0.5)
            if step == 2:
                for p in params:
                    api.safe_set_full_fp32_param(p, api.safe_get_full_fp32_param(p) * 0.5)
                    api.safe_set_full_optimizer_state(p, torch.full_like(p, 0.25, dtype=torch.float32), "exp_avg_sq")
            if step == 3 and stage == 3:
                for p in params:
                    api.safe_set_local_grad(p, api.safe_get_local_grad(p) * 3)
                    api.safe_set_local_fp32_param(p, api.safe_get_local_fp32_param(p) + 1)
                    api.safe_set_local_optimizer_state(
                        p, api.safe_get_local_optimizer_state(p, "exp_avg") * 2, "exp_avg"
                    )
            engine.step()
            see(f"step {step} fp32", [api.safe_get_full_fp32_param(p) for p in params])
            for key in ("exp_avg", "exp_avg_sq"):
                see(f"step {step} {key}", [api.safe_get_full_optimizer_state(p, key) for p in params])
            if stage == 3:
                parts = [api.safe_get_local_fp32_param(p).double().sum().view(1) for p in params]
                for part in parts:
                    dist.all_reduce(part)
                see(f"step {step} local sums", parts)
        frozen = nn.Parameter(torch.ones(1))
        see("foreign", [api.safe_get_full_fp32_param(frozen), api.safe_get_full_optimizer_state(frozen, "exp_avg")])
        if api is ours:
            engine.destroy()
        return seen

    compared = 0
    for stage, precision in ((1, "bf16"), (2, "fp32"), (3, "fp32"), (3, "bf16")):
        want = script(theirs, deepspeed.initialize, stage, precision)
        got = script(ours, deepc.initialize, stage, precision)
        assert [n for n, _ in got] == [n for n, _ in want]
        for (name, a), (_, b) in zip(got, want):
            assert (a is None) == (b is None), (stage, precision, name)
            if a is not None and (precision == "fp32" or "step 0" in name):
                torch.testing.assert_close(
                    a,
                    b,
                    rtol=0,
                    atol=(1e-5 if precision == "fp32" else 0.02) * float(b.abs().max()) + 1e-9,
                    msg=lambda m: f"stage {stage} {precision} {name}: {m}",
                )
            elif (
                a is not None
            ):  # DeepSpeed accumulates in bf16, and Adam makes full steps of small differences: the whole, in norm
                assert float((a - b).norm()) <= 0.05 * float(b.norm()), (
                    stage,
                    precision,
                    name,
                    float((a - b).norm()),
                    float(b.norm()),
                )
            if a is not None:
                compared += a.numel()
    return compared


def _replaced(rank, world, stage, precision):
    """What a script has put in the place of a parameter's memory is read and written as what it wrote in place."""
    import deepc

    engine = deepc.initialize(
        model=tiny.make_model(), config=tiny.config(stage, micro=8 // world, precision=precision)
    )[0]
    p, q = engine.module.ln.weight, engine.module.ln.bias
    p.data, q.data = torch.full_like(p, 0.75), torch.full_like(q, 0.5)
    v = deepc.view(p)
    assert (v.value == 0.75).all() and (v.fp32 == 0.75).all() and (v.local.fp32 == 0.75).all()
    q.data = torch.full_like(q, 0.25)
    deepc.view(q).fp32 = torch.full(q.shape, 2.0)
    assert (q == 2).all() and (deepc.view(q).fp32 == 2).all()
    x, y = (t.chunk(world)[rank] for t in tiny.make_batch(0))
    engine.backward(engine(x, y))
    engine.step()
    with torch.no_grad():
        for written in engine.module.parameters():
            written.mul_(1.0)
    looked, follow = [], engine.state.master_from_params
    engine.state.master_from_params = lambda indices: (looked.append(len(indices)), follow(indices))
    for read in (p, q):
        deepc.view(read).fp32
    assert all(n <= 1 for n in looked)  # not all that were written, at each look
    del engine.state.master_from_params
    for now, was in ((p, 0.75), (q, 2.0)):
        assert 0 < float((deepc.view(now).fp32 - was).abs().max()) < 0.01
        assert float((now.detach().float() - was).abs().max()) < 0.02
    engine.destroy()
    return True


@pytest.mark.parametrize("world, stage, precision", [(2, 1, "bf16"), (1, 0, "fp32")])
def test_memory_that_a_script_replaced_is_seen(world, stage, precision):
    assert all(run_ranks(_replaced, world, stage, precision))


def test_functions_return_what_deepspeeds_return():
    pytest.importorskip("deepspeed", reason="deepspeed is not installed: safe_* are not compared with its own")
    assert min(run_ranks(_as_deepspeed, 2, backend="gloo", fresh=True)) > 10_000
