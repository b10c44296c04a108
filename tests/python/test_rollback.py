"""What lies between a script and a checkpoint: values that it has written since the last step, gradients of a step that
it gives up, the place in its data, an average in the place of the weights."""

from __future__ import annotations

import itertools

import pytest
import tiny
import torch
from ranks import for_this_job, run_quietly


def make(stage, precision="fp32", gas=1, world=1, **extra):
    import deepc

    cfg = tiny.config(stage, micro=8 // world // gas, gas=gas, precision=precision, **extra)
    return deepc.initialize(model=tiny.make_model(), config=cfg)[0]


def micro_batch(engine, number, rank=0, world=1):
    gas = engine.gradient_accumulation_steps()
    x, y = (t.chunk(world)[rank].chunk(gas)[number % gas] for t in tiny.make_batch(number // gas))
    engine.backward(engine(x, y))
    engine.step()


def values(engine):
    return {n: engine.full_fp32_param(p).clone() for n, p in engine.module.named_parameters()}


def same(found, want):
    assert all(torch.equal(value, want[n]) for n, value in found.items())


# ---- what a script has written ---------------------------------------------------------------------------------------
def _written(rank, world, folder, stage, precision):
    """Saved before a step takes it in; the run goes on as one that loads it."""
    engine = make(stage, precision, world=world)
    micro_batch(engine, 0, rank, world)
    p, q = engine.module.blocks[0].up.weight, engine.module.ln.weight
    with torch.no_grad():
        p.mul_(0.5)
        q.data = torch.full_like(q, 0.75)
    want = p.float().clone()
    engine.save_checkpoint(folder)
    other = make(stage, precision, world=world)
    other.load_checkpoint(folder)
    loaded = values(other)
    assert torch.equal(loaded["ln.weight"], torch.full_like(loaded["ln.weight"], 0.75))
    assert torch.equal(loaded["blocks.0.up.weight"].to(p.dtype).float(), want)
    for e in (engine, other):
        micro_batch(e, 1, rank, world)
    same(values(other), values(engine))
    # A rollback: what was put in a parameter's place is no longer there.
    with torch.no_grad():
        q.data = torch.full_like(q, 7.0)
        p.mul_(3.0)
    for e in (engine, other):
        e.load_checkpoint(folder)
        micro_batch(e, 1, rank, world)
    same(values(other), values(engine))
    assert float(q.detach().float().max()) < 1
    for e in (engine, other):
        e.destroy()
    return True


@pytest.mark.parametrize(
    "world, stage, precision",
    [(2, 2, "bf16"), (1, 1, "fp32"), pytest.param(1, 0, "bf16", marks=pytest.mark.full)],
)
def test_what_a_script_has_written_is_saved_and_rolled_back(tmp_path, world, stage, precision):
    assert all(run_quietly(_written, world, str(tmp_path), stage, precision))


def _missing(rank, world, folder):
    """A checkpoint without the head: what the script made of it stays, in the masters as well."""
    import deepc

    whole = make(1, "bf16")
    whole.save_checkpoint(folder)
    model = tiny.make_model()
    model.extra = torch.nn.Parameter(torch.zeros(8))
    engine = deepc.initialize(model=model, config=tiny.config(1, micro=8, precision="bf16"))[0]
    with torch.no_grad():
        model.extra.fill_(0.5)
    engine.load_checkpoint(folder, load_module_strict=False, load_optimizer_states=False)
    assert (engine.full_fp32_param(model.extra) == 0.5).all()
    for e in (whole, engine):
        e.destroy()
    return True


def test_what_a_checkpoint_lacks_keeps_what_was_written(tmp_path):
    assert all(run_quietly(_missing, 1, str(tmp_path)))


# ---- a step that is given up -----------------------------------------------------------------------------------------
def _given_up(rank, world, folder, stage):
    engine, other = (make(stage, gas=2, world=world) for _ in range(2))
    for number in range(2):
        micro_batch(engine, number, rank, world)
    engine.save_checkpoint(folder)
    with engine.no_sync():  # a loss that is too high: back
        micro_batch(engine, 6, rank, world)
    for e in (engine, other):
        e.load_checkpoint(folder)
        for number in (2, 3):
            micro_batch(e, number, rank, world)
    same(values(engine), values(other))
    assert engine.global_steps == other.global_steps == 2
    for e in (engine, other):
        e.destroy()
    return True


@pytest.mark.parametrize("world, stage", [(2, 2), pytest.param(1, 3, marks=pytest.mark.full)])
def test_gradients_of_a_step_that_is_given_up_do_not_come_back(tmp_path, world, stage):
    assert all(run_quietly(_given_up, world, str(tmp_path), stage))


def test_a_changed_batch_has_all_its_micro_batches(deepspeed):
    engine = deepspeed.initialize(model=tiny.make_model(), config=tiny.config(1, micro=4))[0]
    x, y = tiny.make_batch(0, 4)
    applied = []
    for number in range(12):
        if number in (3, 7):
            engine.set_train_batch_size(8 if number == 3 else 12)
        engine.backward(engine(x, y))
        before = engine.global_steps
        engine.step()
        applied.append(engine.global_steps - before)
    engine.destroy()
    assert applied == [1, 1, 1, 0, 1, 0, 1, 0, 0, 1, 0, 0]


# ---- the place in the data -------------------------------------------------------------------------------------------
class Seen(torch.nn.Linear):
    seen: list[float] = []

    def forward(self, x):
        Seen.seen += x[:, 0].tolist()
        return super().forward(x)


def _data(rank, world, folder):
    import deepc
    from deepc.pipe import PipelineModule

    model = PipelineModule(layers=[Seen(2, 2)], num_stages=1, loss_fn=torch.nn.functional.mse_loss)
    data = [(torch.full((2,), float(i)), torch.zeros(2)) for i in range(24)]
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.01}}}
    engine = deepc.initialize(model=model, config=config, training_data=data)[0]
    Seen.seen.clear()

    def run(steps):
        begin = len(Seen.seen)
        for _ in range(steps):
            engine.train_batch()
        return Seen.seen[begin:]

    run(2)
    engine.save_checkpoint(folder)
    want = run(6)
    engine.load_checkpoint(folder)
    assert run(6) == want and len(set(want)) == 12
    given = itertools.repeat((torch.ones(2, 2), torch.zeros(2, 2)))
    engine.set_dataiterator(given)
    engine.load_checkpoint(folder)
    assert run(1) == [1.0, 1.0], "what the script gives is its own"
    engine.destroy()
    return True


def test_a_pipelines_data_go_back_with_a_checkpoint(tmp_path):
    assert all(run_quietly(_data, 1, str(tmp_path)))


# ---- an average in the place of the weights --------------------------------------------------------------------------
def _average(rank, world, folder):
    import deepc

    engine = make(1, "bf16")
    average = deepc.EMA(engine, 0.5)
    for number in range(2):
        micro_batch(engine, number)
        average.update()
    engine.save_checkpoint(folder)
    want, weights = values(engine), engine.module_state_dict()
    with average.applied():
        for call in (
            lambda: engine.save_checkpoint(folder),
            lambda: engine.load_checkpoint(folder),
            lambda: engine.load_module_state_dict(weights),
        ):
            with pytest.raises(deepc.DeepcError, match=r"inside of applied\(\) of average 'ema'.*leave the context"):
                call()
        engine.save_16bit_model(folder)
        engine.zero_grad()  # which has nothing to do with weights
    same(values(engine), want)
    engine.load_checkpoint(folder)
    same(values(engine), want)
    engine.destroy()
    other, said = make(1, "bf16"), []
    for_this_job(deepc.engine.states.saving.logger, "warning", lambda text, *more: said.append(text % more))
    other.load_checkpoint(folder)
    assert any("has the average 'ema', and this engine has none" in text for text in said), said
    other.destroy()
    return True


def test_an_average_is_not_taken_for_the_weights(tmp_path):
    assert all(run_quietly(_average, 1, str(tmp_path)))


def _onebit(rank, world):
    import deepc

    cfg = {**tiny.config(0, micro=8), "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 2}}}
    engine = deepc.initialize(model=tiny.make_model(), config=cfg)[0]
    with pytest.raises(deepc.errors.UnsupportedError, match=r"OneBitAdam does not exist: .*engine.load_checkpoint"):
        engine.optimizer.load_state_dict(engine.optimizer.state_dict())
    engine.destroy()
    return True


def test_a_phase_is_not_loaded_without_its_errors():
    assert all(run_quietly(_onebit, 1))


# ---- backwards of the script's own inside of no_sync -----------------------------------------------------------------
def _own_backwards(rank, world, stage):
    """In each way the same steps as engine.backward makes."""
    import contextlib

    def train(ways):
        cfg = tiny.config(stage, micro=8 // world // 2, gas=2, clip=0)
        cfg["optimizer"] = {"type": "SGD", "params": {"lr": 0.5}}
        import deepc

        engine = deepc.initialize(model=tiny.make_model(), config=cfg)[0]
        for number, way in enumerate(ways * 2):
            x, y = (t.chunk(world)[rank].chunk(2)[number % 2] for t in tiny.make_batch(number // 2))
            with engine.no_sync() if "kept" in way else contextlib.nullcontext():
                loss = engine(x, y)
                loss.backward() if "bare" in way else engine.backward(loss)
            engine.step()
        found = values(engine)
        engine.destroy()
        return found

    want = train(["", ""])
    for ways in (["kept bare", "bare"], ["kept bare", ""], ["kept", "kept bare"], ["kept bare", "kept"]):
        for n, value in train(ways).items():
            torch.testing.assert_close(value, want[n], rtol=1e-5, atol=1e-6, msg=lambda m, w=ways, n=n: f"{w} {n}: {m}")
    return True


@pytest.mark.parametrize("world, stage", [(1, 1), pytest.param(2, 3, marks=pytest.mark.full)])
def test_own_backwards_inside_of_no_sync_are_divided_once(world, stage):
    assert all(run_quietly(_own_backwards, world, stage))


def _unscaled(rank, world):
    import deepc

    engine = make(1, "fp16")
    x, y = tiny.make_batch(0, 8)
    with engine.no_sync():
        with pytest.raises(deepc.DeepcError, match="loss.backward.. was called without; call engine.backward"):
            engine(x, y).backward()
        engine.zero_grad()
        engine.scale(engine(x, y)).backward()
    assert not engine._scaled
    engine.destroy()
    return True


def test_an_unscaled_backward_inside_of_no_sync_is_an_error():
    assert all(run_quietly(_unscaled, 1))


def _trunk(rank, world):
    """Another engine's loss through this one's module, with and without no_sync there: divided once, by the other."""
    import contextlib

    import deepc

    found = []
    for quiet in (False, True):
        torch.manual_seed(0)
        trunk, head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0,
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
            "zero_optimization": {"stage": 1},
        }
        actor, critic = (deepc.initialize(model=m, config=config)[0] for m in (trunk, head))
        for _ in range(2):
            with critic.no_sync() if quiet else contextlib.nullcontext():
                critic.backward(critic(actor(torch.ones(2, 4))).sum())
            for e in (actor, critic):
                e.step()
        found.append([e.full_fp32_param(p).clone() for e in (actor, critic) for p in e.module.parameters()])
        for e in (actor, critic):
            e.destroy()
    assert all(torch.allclose(a, b) for a, b in zip(*found)), found
    return True


def test_another_engines_backward_inside_of_no_sync():
    assert all(run_quietly(_trunk, 1))
