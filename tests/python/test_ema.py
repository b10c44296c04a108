"""deepc.EMA: the average against torch's arithmetic, at every stage and precision; applied() and a model of its own;
checkpoints across layouts; what it refuses."""

from __future__ import annotations

import pytest
import tiny
import torch
from ranks import run_quietly, run_ranks

STEPS, DECAY = 4, 0.9


def _train(engine, step, rank, world):
    x, y = tiny.make_batch(step)
    n = len(x) // world
    engine.backward(engine(x[rank * n : (rank + 1) * n], y[rank * n : (rank + 1) * n]))
    return engine.step()


def _config(stage, precision="fp32", world=1, **extra):
    return tiny.config(stage, micro=8 // world, precision=precision, deepc={"bucket_elems": 8192}, **extra)


def _whole(engine):
    return {n: engine.full_fp32_param(p).clone() for n, p in engine.module.named_parameters() if p.requires_grad}


def _follow(rank, world, stage, precision, frozen):
    """Trains with an average, beside torch's lerp of the whole weights; every value equals that bit for bit."""
    import deepc

    engine, *_ = deepc.initialize(model=tiny.make_model(frozen=frozen), config=_config(stage, precision, world))
    kept = deepc.EMA(engine, DECAY, label="kept")
    model = deepc.EMA(engine, DECAY, as_module=True, label="model") if engine.plan.mode != "streamed" else None
    want = _whole(engine)
    probe = tiny.make_batch(99)
    for step in range(STEPS):
        assert _train(engine, step, rank, world).applied
        assert kept.update() and not kept.update()
        assert model is None or model.update()
        now = _whole(engine)
        for n in want:
            want[n].lerp_(now[n], 1 - DECAY)
    average = kept.state_dict()
    assert average.keys() == want.keys()
    for n in want:
        assert torch.equal(average[n], want[n]), (n, stage)

    before, live = _whole(engine), engine(*probe).item()
    twin = tiny.make_model(frozen=frozen)
    twin.load_state_dict({**twin.state_dict(), **want})
    twin.to(engine.dtype)
    with kept.applied():
        inside = engine(*probe).item()
        with pytest.raises(deepc.DeepcError, match="values of the average 'kept'"):
            engine.backward(engine(*probe))
        with pytest.raises(deepc.DeepcError, match="values of the average 'kept'"):
            engine.step()
        with pytest.raises(deepc.DeepcError, match="inside its applied"):
            kept.update()
    assert inside == twin(*probe).item() and inside != live
    assert engine(*probe).item() == live
    assert all(torch.equal(w, before[n]) for n, w in _whole(engine).items())
    if model is not None:
        assert model.module(*probe).item() == inside
        assert model.module.head.weight is model.module.tok.weight and not any(
            p.requires_grad for p in model.module.parameters()
        )
        for n, p in model.module.named_parameters():
            if n in want:
                assert torch.equal(p, want[n].to(engine.dtype))
    assert _train(engine, STEPS, rank, world).applied  # training goes on
    engine.destroy()
    return {n: t for n, t in average.items()} if rank == 0 else None


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_average_has_the_bits_of_the_whole_weights_average(stage):
    run_quietly(_follow, 2, stage, "fp32", False)


def test_in_bf16_it_averages_the_masters():
    run_quietly(_follow, 2, 3, "bf16", True)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world", [1, 4])
def test_the_average_on_other_numbers_of_ranks(world, stage, precision):
    run_quietly(_follow, world, stage, precision, True)


@pytest.mark.full
def test_the_average_where_parameters_are_streamed():
    env = {"DEEPC_LOG_LEVEL": "WARNING", "DEEPC_STREAMED": "1"}
    for world in (1, 2):
        run_ranks(_follow, world, args=(3, "bf16", True), env=env)


def _on_nodes(rank, world, stage):
    from ranks import on_nodes

    with on_nodes(rank, world, 2):
        return _follow(rank, world, stage, "fp32", True)


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_average_on_two_nodes(stage):
    run_quietly(_on_nodes, 4, stage)


def _save(rank, world, folder, stage, precision):
    import deepc

    engine, *_ = deepc.initialize(model=tiny.make_model(), config=_config(stage, precision, world))
    average = deepc.EMA(engine, lambda n: DECAY if n else 0.5, as_module=True)
    for step in range(STEPS):
        _train(engine, step, rank, world)
        average.update()
    engine.save_checkpoint(folder)
    values = average.state_dict()
    engine.destroy()
    return values


def _load(rank, world, folder, stage, precision):
    import deepc

    engine, *_ = deepc.initialize(model=tiny.make_model(seed=5), config=_config(stage, precision, world))
    average, other = deepc.EMA(engine, DECAY, as_module=True), deepc.EMA(engine, label="other")
    engine.load_checkpoint(folder)
    assert average.updates == STEPS and other.updates == 0
    assert not average.update()  # no step since
    _equal(other.state_dict(), _whole(engine))  # not in the checkpoint: it begins anew
    values = average.state_dict()
    for n, p in average.module.named_parameters():
        assert torch.equal(p, values[n].to(p.dtype))
    engine.destroy()
    return values


def _equal(a, b):
    assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def test_a_checkpoint_carries_the_average_into_another_layout(tmp_path):
    saved = run_quietly(_save, 2, str(tmp_path), 3, "bf16")
    for got in run_quietly(_load, 1, str(tmp_path), 0, "fp32") + run_quietly(_load, 2, str(tmp_path), 2, "bf16"):
        _equal(got, saved[0])


def _skipped(rank, world):
    import deepc

    engine, *_ = deepc.initialize(
        model=tiny.make_model(), config=_config(2, world=world) | {"gradient_accumulation_steps": 2}
    )
    average = deepc.EMA(engine, DECAY)
    _train(engine, 0, rank, world)
    assert not average.update()  # inside of an accumulation
    _train(engine, 1, rank, world)
    assert average.update() and average.updates == 1
    x, y = tiny.make_batch(0)
    for _ in range(2):
        engine.backward(engine(x, y) * float("nan"))
        engine.step()
    assert not engine.was_step_applied() and not average.update()
    engine.destroy()
    return True


def test_a_step_that_was_not_applied_is_not_averaged():
    assert all(run_quietly(_skipped, 1))


def test_what_it_refuses():
    import deepc
    from deepc.errors import ArgumentError, StrayWriteError

    engine, *_ = deepc.initialize(model=tiny.make_model(), config=_config(3))
    for bad in (1.0, -0.1, "0.9"):
        with pytest.raises(ArgumentError, match=r"not a number in \[0, 1\)"):
            deepc.EMA(engine, bad)
    with pytest.raises(ArgumentError, match="label"):
        deepc.EMA(engine, label="a/b")
    average = deepc.EMA(engine)
    with pytest.raises(ArgumentError, match="has an average with label 'ema' already"):
        deepc.EMA(engine)
    with pytest.raises(ArgumentError, match="as_module=True"):
        average.module
    model = deepc.EMA(engine, as_module=True, label="model")
    with pytest.raises(ArgumentError, match="evaluate that"), model.applied():
        pass
    with (
        average.applied(),
        pytest.raises(deepc.DeepcError, match="the model has the values of the average"),
        average.applied(),
    ):
        pass
    with average.applied(), engine.no_sync():  # whose gradients would be the next step's
        loss = engine(*tiny.make_batch(0))
        for backward in (lambda: engine.backward(loss), loss.backward):
            with pytest.raises(deepc.DeepcError, match="the model has the values of the average"):
                backward()
    assert all(p.grad is None for p in engine.module.parameters())
    engine.destroy()
    assert StrayWriteError


def _stray(rank, world):
    import deepc
    from deepc.errors import StrayWriteError

    engine, *_ = deepc.initialize(model=tiny.make_model(), config=_config(3, world=world))
    average = deepc.EMA(engine, as_module=True)
    if rank == world - 1:
        average.module.ln.weight.data.mul_(2)
    _train(engine, 0, rank, world)
    with pytest.raises(StrayWriteError, match=rf"'ln.weight' of the average 'ema' was written on rank {world - 1}"):
        average.update()
    engine.destroy()
    return True


def test_a_write_to_the_shared_average_is_seen_on_all_ranks():
    assert all(run_quietly(_stray, 2))


def _unequal(rank, world, stage):
    """Rank 0 alone updates, or resets; decays that differ."""
    import deepc
    from deepc.errors import ArgumentError

    engine, *_ = deepc.initialize(model=tiny.make_model(), config=_config(stage, world=world))
    average = deepc.EMA(engine, DECAY)
    want = _whole(engine)
    for step in range(3):
        _train(engine, step, rank, world)
        if rank == 0 or step != 1:
            average.update()
        want = {n: want[n].lerp(w, 1.0 - DECAY) for n, w in _whole(engine).items()}
        if step == 1:
            told = r"updates of average 'ema' is 2 on rank 0 and 1 on rank 1.*call its update\(\) and reset\(\) on all"
            with pytest.raises(ArgumentError, match=told):
                _train(engine, 2, rank, world)
            engine.zero_grad()
            assert average.update() == (rank == 1)  # nothing was stepped: it comes in time
    _equal(average.state_dict(), want)
    if rank == 0:
        average.reset()
    with pytest.raises(ArgumentError, match=r"resets of average 'ema' is 2 on rank 0 and 1 on rank 1"):
        _train(engine, 3, rank, world)
    engine.zero_grad()
    if rank == 1:
        average.reset()
    _train(engine, 3, rank, world)
    deepc.EMA(engine, (0.5, 0.75)[rank], label="other")
    with pytest.raises(ArgumentError, match=r"decay of average 'other' is 0.5 on rank 0 and 0.75 on rank 1"):
        _train(engine, 3, rank, world)
    engine.destroy()
    return True


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.full), 2])
def test_ranks_that_average_differently_are_told_at_the_next_step(stage):
    assert all(run_quietly(_unequal, 2, stage))


class _Masked(torch.nn.Module):
    """A mask that grows with the longest sample so far, one that is expanded, and behind them the statistics of a
    norm."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("scale", torch.ones(1).expand(3))
        self.linear = torch.nn.Linear(4, 4)
        self.mask = None
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x):
        if self.mask is None or len(self.mask) < x.shape[1]:
            self.__dict__.pop("mask", None)
            self.register_buffer("mask", torch.ones(x.shape[1], x.shape[1]).tril(), persistent=False)
        mask = self.mask[: x.shape[1], : x.shape[1]]
        return self.norm((mask @ self.linear(x) * self.scale[0]).transpose(1, 2)).square().mean()


def _buffers(rank, world, stage):
    import deepc

    engine, *_ = deepc.initialize(model=_Masked(), config=_config(stage, world=world))
    average = deepc.EMA(engine, DECAY, as_module=True)
    for length in (3, 5, 2):
        engine.backward(engine(torch.randn(4, length, 4)))
        assert engine.step().applied and average.update()
        want, got = dict(engine.module.named_buffers()), dict(average.module.named_buffers())
        assert want.keys() == got.keys() and want["mask"].shape == (max(3, length, 5 * (length < 3)),) * 2
        for name, b in want.items():
            assert torch.equal(b, got[name]) and b.data_ptr() != got[name].data_ptr(), name
        assert average.module.state_dict().keys() == engine.module.state_dict().keys()
        average.module(torch.randn(4, 7, 4))  # makes a longer mask of its own
    engine.destroy()
    return True


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.full), 3])
def test_buffers_that_the_model_makes_in_a_forward_follow_by_name(stage):
    assert all(run_quietly(_buffers, 1, stage))
