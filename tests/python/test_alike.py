"""Ranks that were given different models, settings or steps: all are told what differs, where training went on with
different numbers before (zero/parameters/alike.py)."""

import pytest
import torch
from ranks import run_ranks
from torch import nn


class Two(nn.Module):
    def __init__(self, names="ab"):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({n: nn.Linear(4, 4) for n in names})

    def forward(self, x):
        return self.layers["b"](self.layers["a"](x)).square().mean()


def config(stage=2, **more):
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2}}
    zero = {"stage": stage}
    return {"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer, "zero_optimization": zero, **more}


def make_unequal_engines(rank, world):
    import deepc

    def told(model, settings, **more):
        with pytest.raises(deepc.errors.ArgumentError, match="different models or settings") as error:
            deepc.initialize(model=model, config=settings, **more)
        return str(error.value)

    frozen, other = Two(), Two()
    frozen.layers["a"].weight.requires_grad_(rank == 0)
    sgd = {"optimizer": torch.optim.SGD(other.parameters(), 0.1)} if rank else {}
    found = [
        told(Two("ab" if rank == 0 else "ba"), config()),
        told(frozen, config()),
        told(Two(), config(gradient_accumulation_steps=1 + rank)),
        told(Two(), config(gradient_clipping=1.0 + rank)),
        told(other, config(), **sgd),
        told(Two(), config(optimizer={"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.5 + 0.25 * rank]}})),
    ]
    engine, *_ = deepc.initialize(model=Two(), config=config())  # nothing was left behind
    engine.backward(engine(torch.ones(2, 4)))
    assert engine.step().applied
    return found


def test_ranks_that_were_given_different_things_are_told():
    for found in run_ranks(make_unequal_engines, 2):
        order, frozen, accumulation, clipping, optimizer, betas = found
        assert "parameter 0 is 'layers.a.weight' (4, 4), of param group 0 on rank 0 and 'layers.b.weight'" in order
        assert "'layers.a.weight' (4, 4), frozen on rank 1" in frozen
        assert "gradient_accumulation_steps is 1 on rank 0 and 2 on rank 1" in accumulation
        assert "gradient_clipping is 1.0 on rank 0 and 2.0 on rank 1" in clipping
        assert "the optimizer is AdamW on rank 0 and SGD on rank 1" in optimizer
        assert "betas of param group 0 is [0.9, 0.5] on rank 0 and [0.9, 0.75] on rank 1" in betas


def make_unequal_steps(rank, world, stage):
    """A schedule that follows each rank's own loss; a layer that is frozen on one rank."""
    import deepc

    def train(unequal):
        model = Two()
        engine, *_ = deepc.initialize(model=model, config=config(stage))
        group, weight = engine.optimizer.param_groups[0], model.layers["a"].weight
        found = []
        for i in range(4):
            engine.backward(engine(torch.full((2, 4), 1.0 + i + rank)))
            if unequal and i == 1:
                group["lr"] *= 1 + rank
                with pytest.raises(deepc.errors.ArgumentError, match="different steps") as error:
                    engine.step()
                found.append(str(error.value))
                group["lr"] /= 1 + rank
            if unequal and i == 2:
                weight.requires_grad_(rank == 1)
                with pytest.raises(deepc.errors.ArgumentError, match="different steps") as error:
                    engine.step()
                found.append(str(error.value))
                weight.requires_grad_(True)
            assert engine.step().applied  # once they are equal again
        values = [p.detach().clone() for p in model.parameters()]
        engine.destroy()
        return found, values

    found, values = train(True)
    assert all(map(torch.equal, values, train(False)[1]))  # nothing was stepped where it raised
    return found


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.full), 2])
def test_ranks_that_would_make_different_steps_are_told(stage):
    for rate, frozen in run_ranks(make_unequal_steps, 2, args=(stage,)):
        assert "lr of param group 0 is 0.01 on rank 0 and 0.02 on rank 1" in rate
        assert "what is frozen is layers.a.weight on rank 0 and nothing on rank 1" in frozen


class Spare(Two):
    def __init__(self):
        super().__init__("abc")

    def forward(self, x, all_of_them):
        return super().forward(self.layers["c"](x) if all_of_them else x)


def train_with_unused(rank, world, stage, ignored):
    """Rank 1 leaves a layer out in one of two micro-batches, in both, and then all do in both."""
    import deepc

    settings = config(stage, gradient_accumulation_steps=2)
    settings["zero_optimization"]["ignore_unused_parameters"] = ignored
    engine, *_ = deepc.initialize(model=Spare(), config=settings)
    found = []
    for used in ((True, rank == 0), (rank == 0, rank == 0), (False, False), (True, True)):
        try:
            for all_of_them in used:
                engine.backward(engine(torch.ones(2, 4), all_of_them))
                engine.step()
        except deepc.errors.MisuseError as error:
            found.append(str(error))
            engine.zero_grad()
    steps = engine.global_steps
    engine.destroy()
    return steps, found


@pytest.mark.parametrize(
    ("stage", "ignored"), [(2, False), *(pytest.param(*x, marks=pytest.mark.full) for x in ((2, True), (1, False)))]
)
def test_unused_parameters_are_told_at_stage_2_where_they_are_not_ignored(stage, ignored):
    for steps, found in run_ranks(train_with_unused, 2, args=(stage, ignored)):
        if (stage, ignored) != (2, False):
            assert (steps, found) == (4, [])
            continue
        one, both = found
        assert steps == 2 and "parameter 'layers.c.bias' got no gradient on rank 1" in one
        assert "on rank 0" in both and "ignore_unused_parameters is false" in both
