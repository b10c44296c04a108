""" "precision": "auto": the policy alone, and engines that change between bf16 and fp32 while they train, against plain
ones of either kind."""

from __future__ import annotations

import contextlib
import math
import tempfile
import weakref

import pytest
import tiny
import torch
from deepc.config import Config
from deepc.errors import CheckpointError, ConfigError
from deepc.precision import AutoPrecision
from ranks import run_ranks as _run_ranks


def run_ranks(fn, world, *args):
    return _run_ranks(fn, world, args=args, env={"DEEPC_LOG_LEVEL": "ERROR"})


# ---- the policy ------------------------------------------------------------------------------------------------------


def drive(policy, steps):
    """Modes after each of the steps, (applied, loss)."""
    return [(policy.after_step(*s), policy.mode)[1] for s in steps]


GOOD, BAD = (True, 1.0), (False, None)


def test_overflow_in_a_row_falls_back_and_the_stay_doubles():
    p = AutoPrecision("bf16", overflow_steps=2, fp32_steps=3)
    assert drive(p, [BAD, GOOD, BAD, BAD]) == ["bf16", "bf16", "bf16", "fp32"]
    assert drive(p, [GOOD] * 3) == ["fp32", "fp32", "bf16"]
    assert drive(p, [BAD, BAD]) == ["bf16", "fp32"]
    assert drive(p, [GOOD] * 6) == ["fp32"] * 5 + ["bf16"]
    assert drive(p, [GOOD] * 6 + [BAD, BAD]) == ["bf16"] * 7 + [
        "fp32"
    ]  # as long in bf16 as the last stay: it begins anew
    assert drive(p, [GOOD] * 3) == ["fp32", "fp32", "bf16"]


def test_it_stays_in_fp32_while_that_goes_wrong_too():
    p = AutoPrecision("bf16", overflow_steps=1, fp32_steps=2)
    assert drive(p, [BAD, BAD, BAD, BAD, (True, math.nan), GOOD]) == ["fp32"] * 5 + ["bf16"]


def test_a_loss_that_is_not_finite_counts_though_the_step_was_applied():
    p = AutoPrecision("bf16", overflow_steps=2)
    assert drive(p, [(True, math.inf), (True, math.nan)]) == ["bf16", "fp32"]


def test_divergence_is_measured_against_the_median():
    p = AutoPrecision("bf16", divergence_factor=2.0, divergence_steps=3)
    assert drive(p, [(True, 9.0)] * 3 + [(True, 1.0 + 0.01 * i) for i in range(40)]) == ["bf16"] * 43
    assert drive(p, [(True, 2.5), (True, 2.5), (True, 1.0), (True, 2.5), (True, 2.5)]) == ["bf16"] * 5
    assert drive(p, [(True, 2.5)]) == ["fp32"]
    q = AutoPrecision("bf16", divergence_factor=0, divergence_steps=1)
    assert set(drive(q, [(True, 1.0)] * 30 + [(True, 1e9)])) == {"bf16"}
    negative = AutoPrecision("bf16", divergence_factor=2.0, divergence_steps=1)
    assert drive(negative, [(True, -1.0)] * 20 + [(True, -0.5), (True, 0.5)])[-2:] == ["bf16", "fp32"]


def test_losses_in_fp32_are_the_next_measure():
    p = AutoPrecision("bf16", divergence_factor=2.0, divergence_steps=1, fp32_steps=50)
    drive(p, [(True, 1.0)] * 20 + [(True, 5.0)])
    assert p.mode == "fp32"
    assert set(drive(p, [(True, 5.0)] * 49)) == {"fp32"}
    assert set(drive(p, [(True, 5.0)] * 20)) == {"bf16"}


def test_a_machine_whose_fastest_is_fp32_never_changes():
    p = AutoPrecision("fp32", overflow_steps=1, divergence_steps=1)
    assert set(drive(p, [GOOD] * 20 + [BAD] * 5 + [(True, 100.0)])) == {"fp32"}


def test_the_state_goes_on_where_it_was():
    steps = [GOOD] * 20 + [BAD, BAD] + [GOOD] * 2
    a, b = AutoPrecision("bf16", fp32_steps=5), AutoPrecision("bf16", fp32_steps=5)
    drive(a, steps)
    b.load_state_dict(a.state_dict())
    rest = [GOOD] * 4 + [BAD] * 2 + [GOOD] * 12
    assert drive(a, rest) == drive(b, rest) and "bf16" in drive(a, rest)
    slow = AutoPrecision("fp32")
    slow.load_state_dict({**a.state_dict(), "mode": "bf16"})
    assert slow.mode == "fp32"
    with pytest.raises(CheckpointError, match="mode"):
        a.load_state_dict({"mode": "bf16"})


# ---- the configuration -----------------------------------------------------------------------------------------------


def load(**extra):
    return Config.load({"train_batch_size": 2, **extra}, world_size=1)


def test_configuration():
    from deepc.precision import recommended_dtype

    cfg = load(precision="auto", deepc={"precision": {"fp32_steps": 7}}, fp16={"enabled": False})
    assert cfg.precision == "auto" and cfg.auto == () and cfg.inert == ()
    assert cfg.dtype == recommended_dtype()[0]
    policy = cfg.deepc.precision
    assert (policy.overflow_steps, policy.divergence_factor, policy.divergence_steps, policy.fp32_steps) == (
        2,
        2.0,
        10,
        7,
    )
    assert load().precision is None and load().dtype == "fp32"
    assert [i.key for i in load(deepc={"precision": {"overflow_steps": 3}}).inert] == ["deepc.precision.overflow_steps"]


@pytest.mark.parametrize(
    "extra",
    [
        {"bf16": {"enabled": True}},
        {"bf16": {"enabled": False}},
        {"fp16": {"enabled": True}},
        {"bf16": {"enabled": "auto"}},
    ],
)
def test_another_precision_beside_it_is_refused(extra):
    with pytest.raises(ConfigError, match='precision = "auto" chooses between'):
        load(precision="auto", **extra)


@pytest.mark.parametrize(
    "extra", [{"precision": "bf16"}, {"precision": 1}, {"deepc": {"precision": {"overflow_steps": 0}}}]
)
def test_other_values_are_refused(extra):
    with pytest.raises(ConfigError, match="precision"):
        load(**extra)


# ---- engines ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def fast_bf16():
    """Also on machines that would start in fp32."""
    from deepc.core import cpu

    before, cpu.recommended_dtype = cpu.recommended_dtype, lambda: ("bf16", "the test says so")
    try:
        yield
    finally:
        cpu.recommended_dtype = before


def make_model(**options):
    model = tiny.make_model(**options)
    model.register_buffer("third", torch.tensor([1 / 3, 2.0]))
    model.norm = torch.nn.BatchNorm1d(2).requires_grad_(False)  # its statistics follow the precision
    model.norm.running_mean.copy_(model.third)
    return model


def make_engine(stage, kind, optimizer=None, *, world, model=None, policy=None, **options):
    """kind: "auto", "bf16" or "fp32"."""
    import deepc

    cfg = tiny.config(
        stage,
        micro=4 // world,
        gas=2,
        precision="fp32" if kind == "auto" else kind,
        deepc={"bucket_elems": 8192, "precision": {"overflow_steps": 2, "fp32_steps": 3, **(policy or {})}},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 1e-3}},
    )
    if kind == "auto":
        cfg["precision"] = "auto"
    if optimizer is not None:
        cfg["optimizer"] = optimizer
    return deepc.initialize(model=model or make_model(frozen=True, **options), config=cfg)[0]


def train(engine, rank, world, steps, poison=(), bare=False, factor=1.0):
    """Returns the losses and what step said. Poisoned steps have a loss that is not finite, on the last rank."""
    losses, said = [], []
    for step in steps:
        x, y = tiny.make_batch(step)
        for m in range(2):
            at = (m * world + rank) * (4 // world)
            loss = engine(x[at : at + 4 // world], y[at : at + 4 // world])
            losses.append(loss.item())
            loss = loss * (math.inf if step in poison and rank == world - 1 else factor)
            loss.backward() if bare else engine.backward(loss)
            result = engine.step()
        said.append(result)
    return losses, said


def everything(engine):
    """Masters, optimizer states, frozen parameters and buffers, and the schedule."""
    out = {
        n: engine.full_fp32_param(p).clone() if p.requires_grad else p.detach().float().clone()
        for n, p in engine.module.named_parameters()
    }
    out.update({f"buffer {n}": b.detach().float().clone() for n, b in engine.module.named_buffers()})
    for name in list(engine.optimizer.states) if engine.optimizer.core else ("momentum_buffer",):
        out.update(
            {
                f"{name} {n}": engine.full_optimizer_state(p, name).clone()
                for n, p in engine.module.named_parameters()
                if p.requires_grad
            }
        )
    return out, engine.get_lr(), engine.global_steps, engine.skipped_steps


def same(a, b):
    assert a[1:] == b[1:], (a[1:], b[1:])
    assert a[0].keys() == b[0].keys()
    for name in a[0]:
        assert torch.equal(a[0][name], b[0][name]), name


def values(engine):
    return {n: p.detach().clone() for n, p in engine.module.named_parameters()}


SGD = {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}


def _there_and_back(rank, world, stage, optimizer, folder):
    with fast_bf16():
        auto = make_engine(stage, "auto", optimizer, world=world)
        plain = make_engine(stage, "bf16", optimizer, world=world)
        objects = dict(auto.module.named_parameters())
        exact = torch.tensor([1 / 3, 2.0])
        segment = weakref.ref(auto.state.segment) if auto.state.segment is not None else None
        assert auto.precision == "bf16" and auto.module.norm.running_mean.dtype == torch.bfloat16
        assert torch.equal(auto.module.third, exact)

        # bf16 until the second poisoned step in a row: a plain bf16 engine
        a, said = train(auto, rank, world, range(6), poison=(2, 4, 5))
        b, _ = train(plain, rank, world, range(6), poison=(2, 4, 5))
        assert a == b
        assert [s.applied for s in said] == [True, True, False, True, False, False]
        assert [bool(s.precision_change) for s in said] == [False] * 5 + [True] and said[
            -1
        ].precision_change.startswith("bf16 -> fp32: 2 steps in a row")
        assert auto.last_step == said[-1]
        before = everything(plain)
        torch.testing.assert_close(auto.module.norm.running_mean, exact, rtol=0, atol=0)  # in fp32 again
        before[0]["buffer norm.running_mean"] = exact
        same(everything(auto), before)
        plain.destroy()

        if stage == 3 and world > 1:
            assert segment() is None  # the memory of the 16-bit parameters is free

        # fp32: parameters are the masters; a plain fp32 engine with the same states
        assert (
            auto.precision == "fp32" and auto.dtype == auto.state.dtype == torch.float32 and auto.state.master is None
        )
        for n, p in auto.module.named_parameters():
            assert p is objects[n] and p.dtype == torch.float32 and p.grad is None
            assert not p.requires_grad or torch.equal(p.detach(), before[0][n]), n
        auto.save_checkpoint(folder, "in_fp32")
        plain = make_engine(stage, "fp32", optimizer, world=world)
        plain.load_checkpoint(folder, "in_fp32")
        a, said = train(auto, rank, world, range(6, 9))
        b, _ = train(plain, rank, world, range(6, 9))
        assert a == b and all(s.applied for s in said)
        assert [s.precision_change for s in said] == ["", "", "fp32 -> bf16: 3 steps in fp32 are over"]
        after = everything(plain)
        after[0]["buffer norm.running_mean"] = exact.bfloat16().float()
        same(everything(auto), after)
        plain.destroy()

        # bf16 again: a plain bf16 engine with the same states
        assert auto.precision == "bf16" and auto.state.master is not None
        for n, p in auto.module.named_parameters():
            assert p is objects[n] and p.dtype == torch.bfloat16
            assert not p.requires_grad or torch.equal(p.detach(), after[0][n].bfloat16()), n
        auto.save_checkpoint(folder, "in_bf16")
        plain = make_engine(stage, "bf16", optimizer, world=world)
        plain.load_checkpoint(folder, "in_bf16")
        a, said = train(auto, rank, world, range(9, 13), poison=(11, 12))
        b, _ = train(plain, rank, world, range(9, 13), poison=(11, 12))
        assert (
            a == b
            and said[-1].precision_change.startswith("bf16 -> fp32: 2 steps in a row")
            and "6 steps in fp32" in said[-1].precision_change
        )
        plain.destroy()
        end, end_values = everything(auto), values(auto)
        torch.testing.assert_close(auto.module.norm.running_mean, exact, rtol=0, atol=0)

        # checkpoints of both modes go on as the engine did
        auto.load_checkpoint(folder, "in_bf16")  # in place, from fp32
        assert auto.precision == "bf16"
        train(auto, rank, world, range(9, 13), poison=(11, 12))
        same(everything(auto), end)
        auto.destroy()
        fresh = make_engine(stage, "auto", optimizer, world=world, model=make_model(seed=5, frozen=True))
        fresh.load_checkpoint(folder, "in_fp32")
        assert fresh.precision == "fp32" and fresh.dtype == torch.float32
        _, said = train(fresh, rank, world, range(6, 13), poison=(11, 12))
        assert [s.precision_change[:12] for s in said] == ["", "", "fp32 -> bf16", "", "", "", "bf16 -> fp32"]
        same(everything(fresh), end)
        same_values = values(fresh)
        assert all(torch.equal(same_values[n], v) for n, v in end_values.items())
        fresh.destroy()
        return end[0]


CASES = [
    (2, 3, None),
    *(
        pytest.param(*c, marks=pytest.mark.full)
        for c in ((1, 3, None), (2, 0, None), (2, 2, SGD), (2, 1, None), (2, 2, None), (1, 0, None), (2, 3, SGD))
    ),
]


@pytest.mark.parametrize(("world", "stage", "optimizer"), CASES)
def test_equal_to_plain_engines_of_either_kind(world, stage, optimizer, tmp_path):
    ranks = run_ranks(_there_and_back, world, stage, optimizer, str(tmp_path))
    for other in ranks[1:]:
        for n, v in other.items():
            assert torch.equal(v, ranks[0][n]), n


def _divergence(rank, world):
    with fast_bf16():
        engine = make_engine(2, "auto", world=world, policy={"divergence_steps": 3, "divergence_factor": 3.0})
        train(engine, rank, world, range(20))
        assert engine.precision == "bf16"
        _, said = train(
            engine, rank, world, range(20, 23), factor=8.0 if rank == 0 else 1.0
        )  # the mean is 4.5 times as high, on one rank's account
        assert all(s.applied for s in said)
        assert "the loss has been above 3 times the median" in said[-1].precision_change, said
        assert engine.precision == "fp32"
        engine.destroy()


def test_divergence_of_the_mean_loss_falls_back_on_all_ranks():
    run_ranks(_divergence, 2)


def _ways(rank, world, stage):
    """A user's write before the change counts; an old graph raises; a bare backward; gradients in no_sync."""
    with fast_bf16():
        engine = make_engine(stage, "auto", world=world)
        train(engine, rank, world, range(2), bare=True)
        weight = engine.module.blocks[1].up.weight
        if stage < 3:
            weight.data.mul_(3.0)
            want = weight.detach().float().clone()
        else:
            want = engine.full_fp32_param(weight).clone()
        x, y = tiny.make_batch(0)
        old = engine(x[:2], y[:2])
        _, said = train(engine, rank, world, range(2, 4), poison=(2, 3), bare=True)
        assert said[-1].precision_change and engine.precision == "fp32"
        assert torch.equal(weight.detach(), want)
        assert torch.equal(engine.full_fp32_param(weight), want)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            old.backward()
        engine.zero_grad()
        with engine.no_sync():
            engine.backward(engine(x[:2], y[:2]))
            assert weight.grad.dtype == torch.float32
        engine.step()
        engine.backward(engine(x[:2], y[:2]))
        assert engine.step().applied
        if stage < 3:
            weight.data.mul_(2.0)
            want = weight.detach().clone()
            engine.set_gradient_accumulation_boundary(True)
            engine.backward(engine(x[:2], y[:2]) * math.inf)
            engine.step()
            assert torch.equal(weight.detach(), want)
        else:
            import deepc

            with deepc.zero.GatheredParameters([weight], modifier_rank=0):
                if rank == 0:
                    weight.data.fill_(0.1)
            assert torch.equal(engine.full_fp32_param(weight), torch.full_like(weight, 0.1))
            with torch.no_grad():
                weight.mul_(1.0) if rank == 1 else None
            engine.set_gradient_accumulation_boundary(True)
            engine.backward(engine(x[:2], y[:2]))
            with pytest.raises(deepc.errors.StrayWriteError, match="blocks.1.up.weight"):
                engine.step()
        engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_writes_graphs_and_bare_backwards_across_a_change(stage):
    run_ranks(_ways, 2, stage)


def _inputs(rank, world):
    """Floating-point inputs follow the mode; a module that joined later too; torch.compile sees the change."""
    import deepc

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.b = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
            self.seen = []

        def forward(self, x):
            self.seen.append(x.dtype)
            return self.b(self.norm(self.a(x))).float().square().mean()

    with fast_bf16():
        torch.manual_seed(0)
        net = Net()
        cfg = {
            **tiny.config(2, micro=4),
            "precision": "auto",
            "deepc": {"precision": {"overflow_steps": 1, "fp32_steps": 1}},
        }
        engine = deepc.initialize(model=net, config=cfg)[0]
        net.late = torch.nn.Linear(2, 2).bfloat16().requires_grad_(False)
        engine.compile(backend="eager")
        said = []
        for factor in (1, math.inf, 1, 1):
            engine.backward(engine(torch.randn(4, 8)) * factor)
            said.append(engine.step().precision_change[:12])
            assert {p.dtype for p in net.parameters()} == {engine.dtype} == {net.norm.running_mean.dtype}
            assert net.norm.num_batches_tracked.dtype == torch.int64
        assert said == ["", "bf16 -> fp32", "fp32 -> bf16", ""]
        engine.module.eval()
        assert torch.isfinite(engine(torch.randn(4, 8, dtype=torch.float64)))
        engine.destroy()


def test_inputs_late_modules_and_compile():
    run_ranks(_inputs, 1)


def _no_memory(rank, world):
    """One rank sees no memory left: all stay as they are, and go on."""
    from deepc import memory
    from deepc.errors import OutOfMemoryError

    with fast_bf16(), tempfile.TemporaryDirectory() as folder:
        engine = make_engine(1, "auto", world=world)
        before, memory.available = memory.available, lambda: 1000 if rank == 0 else 1 << 40
        try:
            _, said = train(engine, rank, world, range(4), poison=(1, 2))
            assert engine.precision == "bf16" and [s.precision_change for s in said] == [""] * 4 and said[-1].applied
            memory.available = before
            _, said = train(engine, rank, world, range(4, 6), poison=(4, 5))
            assert engine.precision == "fp32" and said[-1].precision_change
            paths = [None] * world
            torch.distributed.all_gather_object(paths, folder)
            engine.save_checkpoint(paths[0], "a")
            engine.destroy()
            fresh = make_engine(1, "auto", world=world)
            memory.available = lambda: 1000 if rank == 0 else 1 << 40
            with pytest.raises(OutOfMemoryError, match="saved in fp32"):
                fresh.load_checkpoint(paths[0], "a")
            fresh.destroy()
        finally:
            memory.available = before
        torch.distributed.barrier()


def test_a_change_that_does_not_fit_is_left_out_on_all_ranks():
    run_ranks(_no_memory, 2)


def _fp32_only(rank, world):
    """One rank's machine has no bf16: all start in fp32, and nothing changes."""
    from deepc.core import cpu

    found = ("bf16" if rank == 0 else "fp32", "the test says so")
    before, cpu.recommended_dtype = cpu.recommended_dtype, lambda: found
    try:
        engine = make_engine(3, "auto", world=world, model=make_model().bfloat16())
    finally:
        cpu.recommended_dtype = before
    _, said = train(engine, rank, world, range(4), poison=(1, 2, 3))
    assert engine.precision == "fp32" and not any(s.precision_change for s in said) and said[0].applied
    assert {p.dtype for p in engine.module.parameters()} == {torch.float32}
    engine.destroy()


def test_all_ranks_start_in_what_all_machines_have():
    run_ranks(_fp32_only, 2)


def _refused(rank, world):
    import os

    import deepc
    from deepc.errors import UnsupportedError

    auto = {"train_micro_batch_size_per_gpu": 4, "precision": "auto"}

    def refuse_auto(match, **extra):
        with pytest.raises(UnsupportedError, match=match):
            deepc.initialize(model=tiny.make_model(), config={**auto, "zero_optimization": {"stage": 3}, **extra})

    refuse_auto("deterministic", deepc={"deterministic": "layout"})
    os.environ["DEEPC_STREAMED"] = "1"
    try:
        refuse_auto("streamed")
    finally:
        del os.environ["DEEPC_STREAMED"]
    os.environ["DEEPC_NODE_ID"] = f"host{rank}"
    try:
        refuse_auto("several nodes")
    finally:
        del os.environ["DEEPC_NODE_ID"]
    model = tiny.make_model()
    model.tok.weight.requires_grad_(False)
    first = deepc.initialize(model=model, config=auto)[0]
    second = torch.nn.Sequential(model.tok, torch.nn.Linear(32, 2))
    with pytest.raises(UnsupportedError, match="belongs to two engines"):
        deepc.initialize(model=second, config={"train_micro_batch_size_per_gpu": 4})
    first.destroy()


def test_where_it_does_not_exist():
    run_ranks(_refused, 2)
