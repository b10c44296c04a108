"""The loader of deepc.initialize: the same steps for any number of ranks, and a checkpoint that keeps the place."""

from __future__ import annotations

import pytest
import torch
from deepc.engine.data import DealtSampler
from deepc.errors import ArgumentError
from ranks import run_ranks as _run_ranks
from torch.utils.data import DataLoader, Dataset, DistributedSampler

BATCH, SIZE = 8, 44


def run_ranks(fn, world, *args):
    return _run_ranks(fn, world, args=args, env={"DEEPC_LOG_LEVEL": "WARNING"})


class Numbers(Dataset):
    def __init__(self, size: int = SIZE) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.full((4,), i / 100), i


def _engine(world, drop_last=False, layout=False, size=SIZE, kind=None):
    import deepc

    torch.manual_seed(torch.initial_seed() % 1000 + 1)  # the order of the data does not depend on it
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": 2 if world < 4 else 1,
        "dataloader_drop_last": drop_last,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
    }
    if layout:
        config["deepc"] = {"deterministic": "layout"}
        config["train_micro_batch_size_per_gpu"] = 2
    model = torch.nn.Linear(4, 1)
    if kind is not None:
        import deepc.compat.deepspeed
        import deepspeed

        return deepspeed.initialize(model=model, config=config, training_data=Numbers(size))
    return deepc.initialize(model=model, config=config, training_data=Numbers(size))


def _run(engine, loader, steps):
    """Of each step this rank's samples; a new iteration where one ends."""
    out, mine, it = [], [], iter(loader)
    while len(out) < steps:
        try:
            x, i = next(it)
        except StopIteration:
            it = iter(loader)
            continue
        mine += i.tolist()
        engine.backward(engine(x).square().mean())
        if engine.step().applied:
            out.append(mine)
            mine = []
    return out


def _train(rank, world, steps, save, load, options):
    engine, _, loader, _ = _engine(world, **options)
    if load:
        engine.load_checkpoint(load)
    out = _run(engine, loader, steps)
    if save:
        next(iter(loader))  # fetched and dropped
        engine.save_checkpoint(save)
    length = len(loader)
    engine.destroy()
    return out, length, engine.gradient_accumulation_steps()


def steps_of(world, steps, *, save="", load="", **options):
    """The samples of each step of all ranks."""
    ranks = run_ranks(_train, world, steps, str(save), str(load), options)
    assert all(length == (5 if options.get("drop_last") else 6) * gas for _, length, gas in ranks)
    return [sorted(i for mine, _, _ in ranks for i in mine[k]) for k in range(steps)]


@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"layout": True}], ids=["filled", "cut", "layout"])
def test_steps_have_the_same_samples_for_any_number_of_ranks(options):
    one, two, four = (steps_of(world, 14, **options) for world in (1, 2, 4))
    assert one == two == four
    epoch = 5 if options.get("drop_last") else 6
    first = [i for step in one[:epoch] for i in step]
    assert len(set(first)) == min(SIZE, epoch * BATCH) and one[:epoch] != one[epoch : 2 * epoch]


@pytest.mark.parametrize(
    ("at", "options"),
    [
        (4, {}),
        (9, {"layout": True}),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in ((4, {"layout": True}), (6, {}), (6, {"layout": True}), (9, {}))
        ),
    ],
    ids=str,
)
def test_a_checkpoint_keeps_the_place_in_the_data(tmp_path, at, options):
    whole = steps_of(1, at + 5, **options)
    assert steps_of(2, at, save=tmp_path, **options) == whole[:at]
    for world in (1, 2, 4):
        assert steps_of(world, 5, load=tmp_path, **options) == whole[at:], world


def _weights_alone(rank, world, folder):
    """Weights without the rest, other data, and an engine under DeepSpeed's name begin at the beginning."""
    engine, _, loader, _ = _engine(world)
    first = _run(engine, loader, 3)
    engine.save_checkpoint(folder)
    engine.destroy()
    again = []
    for options, how in (({}, {"load_module_only": True}), ({"kind": "deepspeed"}, {}), ({}, {})):
        engine, _, loader, _ = _engine(world, **options)
        engine.load_checkpoint(folder, **how)
        again.append(_run(engine, loader, 3) == first)
        engine.destroy()
    engine, _, loader, _ = _engine(world, size=SIZE + 8)
    engine.load_checkpoint(folder)
    state = loader.state_dict()
    engine.destroy()
    return again, state


def test_who_begins_at_the_beginning(tmp_path):
    again, state = run_ranks(_weights_alone, 1, str(tmp_path))[0]
    assert again == [True, True, False] and state == {"epoch": 0, "samples": 0, "of": SIZE + 8}


def _draws(rank, world, folder):
    """What the loop draws from torch's generator in 9 steps, and in those that a checkpoint of the first 3 goes on
    with: 3 in the midst of an epoch and one of its own."""
    out = []
    for load in (False, True):
        engine, _, loader, _ = _engine(world)
        if load:
            engine.load_checkpoint(folder)
        drawn = []
        while engine.global_steps < 9:
            for x, _ in loader:
                engine.backward(engine(x).square().mean())
                if not engine.step().applied:
                    continue
                drawn.append(torch.rand(()).item())
                if engine.global_steps == 3 and not load:
                    engine.save_checkpoint(folder)
        engine.destroy()
        out.append(drawn)
    return out


def test_an_epoch_that_goes_on_draws_what_it_would_have_drawn(tmp_path):
    """The iterator of a DataLoader draws a number where it begins: dropout would be another one."""
    straight, resumed = run_ranks(_draws, 1, str(tmp_path))[0]
    assert resumed == straight[3:]


def _inside_an_accumulation(rank, world, folder):
    engine, _, loader, _ = _engine(world)
    whole = _run(engine, loader, 3)
    engine.destroy()
    engine, _, loader, _ = _engine(world)
    it = iter(loader)
    for _ in range(engine.gradient_accumulation_steps() + 1):
        engine.backward(engine(next(it)[0]).square().mean())
        engine.step()
    engine.save_checkpoint(folder)
    engine.destroy()
    engine, _, loader, _ = _engine(world)
    engine.load_checkpoint(folder)
    rest = _run(engine, loader, 2)
    engine.destroy()
    return whole[1:], rest


def test_a_step_that_was_not_made_gets_its_samples_again(tmp_path):
    for straight, resumed in run_ranks(_inside_an_accumulation, 2, str(tmp_path)):
        assert resumed == straight


def test_fetched_ahead_is_not_given():
    from deepc.engine.data import TimedLoader

    dealt = DealtSampler(Numbers(), 1, 0, BATCH)
    loader = TimedLoader(Numbers(), batch_size=2, sampler=dealt, num_workers=1, prefetch_factor=4).deal(dealt, 1, 2)
    assert loader.state_dict() == {"epoch": 0, "samples": 0, "of": SIZE}
    it = iter(loader)
    seen = [i for _ in range(3) for i in next(it)[1].tolist()]
    assert loader.state_dict()["samples"] == 0
    loader.stepped()
    assert loader.state_dict() == {"epoch": 0, "samples": 6, "of": SIZE}
    other = TimedLoader(Numbers(), batch_size=2, sampler=(d := DealtSampler(Numbers(), 1, 0, BATCH))).deal(d, 1, 2)
    assert "epoch 0, after 6 of its 48" in other.load_state_dict(loader.state_dict())
    rest = [i for b in it for i in b[1].tolist()]
    loader.stepped()
    assert [i for b in other for i in b[1].tolist()] == rest and sorted({*seen, *rest}) == list(range(SIZE))
    assert loader.state_dict() == {"epoch": 0, "samples": 48, "of": SIZE}


def test_the_sampler_is_a_distributed_sampler():
    """The order is DistributedSampler's where the samples go up in whole steps; set_epoch works as there."""
    mine, torchs = DealtSampler(range(32), 2, 1, 8), DistributedSampler(range(32), 2, 1)
    assert isinstance(mine, DistributedSampler) and list(mine) == list(torchs) and len(mine) == len(torchs) == 16
    torchs.set_epoch(1)
    assert list(mine) == list(torchs)
    for sampler in (mine, torchs):
        sampler.set_epoch(0)
    assert list(mine) == list(torchs)
    assert len(DataLoader(range(32), batch_size=4, sampler=mine)) == 4
    with pytest.raises(ArgumentError, match="5 samples, a step takes 8, and dataloader_drop_last"):
        DealtSampler(range(5), 1, 0, 8, drop_last=True)
    with pytest.raises(ArgumentError, match="0 samples"):
        DealtSampler([], 1, 0, 8)
