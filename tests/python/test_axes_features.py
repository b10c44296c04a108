"""What an engine does beside training steps, where ranks share the model: tied parameters that are frozen, checkpoints
of weights alone, averages, writes under GatheredParameters, counts of tokens."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from deepc.errors import ArgumentError, UnsupportedError
from ranks import run_quietly
from torch import nn

WIDTH, VOCAB, POSITIONS, MICRO, STEPS = 8, 13, 8, 2, 2
SGD = {"type": "SGD", "params": {"lr": 0.5}}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4}}


# ---- pipelines -------------------------------------------------------------------------------------------------------
class Embed(nn.Module):
    def __init__(self, trains=True):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, WIDTH)
        self.tok.weight.requires_grad_(trains)

    def forward(self, x):
        return self.tok(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.up(x))


def head(module, x):
    return x @ module.tok.weight.t()


def loss_of(logits, y):
    return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())


def chain(stages, trains=True, **options):
    """A PipelineModule whose embedding is its head too."""
    from deepc.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    layers = [
        TiedLayerSpec("embed", Embed, trains),
        *[LayerSpec(Block) for _ in range(4)],
        TiedLayerSpec("embed", Embed, trains, forward_fn=head),
    ]
    return PipelineModule(
        layers, num_stages=stages, loss_fn=loss_of, seed_layers=True, partition_method="uniform", **options
    )


def micro_batches(replica=0, replicas=1):
    """Endless. A batch has MICRO micro-batches of each of 2 replicas, or all of them of one."""
    draw = torch.Generator().manual_seed(5)
    while True:
        ids = torch.randint(0, VOCAB, (2 * MICRO, 2, POSITIONS + 1), generator=draw)
        for part in ids.chunk(replicas)[replica]:
            yield part[:, :-1], part[:, 1:]


def pipeline(world, stages, trains=True, config=None, **options):
    """(engine, its data)"""
    import deepc

    replicas = world // stages
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2 * MICRO // replicas,
        "optimizer": ADAMW,
        **(config or {}),
    }
    engine, *_ = deepc.initialize(model=chain(stages, trains, **options), config=config)
    return engine, micro_batches(engine.global_rank, replicas)


def same(found, want, rel=1e-6):
    assert found.keys() == want.keys()
    for name, value in found.items():
        torch.testing.assert_close(
            value, want[name], rtol=0, atol=rel * float(want[name].abs().max()), msg=lambda m, n=name: f"{n}: {m}"
        )


def _trains_beside_what_is_frozen(rank, world, stages, stage, schedule):
    config = {"zero_optimization": {"stage": stage}}
    engine, data = pipeline(world, stages, trains=False, config=config, schedule=schedule)
    before = engine.module_state_dict()["tied_modules.embed.tok.weight"]
    losses = [float(engine.train_batch(data)) for _ in range(STEPS)]
    weights = engine.module_state_dict()
    assert torch.equal(weights["tied_modules.embed.tok.weight"], before)
    engine.destroy()
    return losses, weights


@pytest.mark.parametrize(
    ("world", "stage", "schedule"),
    [
        (2, 0, "1f1b"),
        (4, 3, "1f1b"),
        pytest.param(2, 2, "zb-h1", marks=pytest.mark.full),
        pytest.param(2, 1, "interleaved", marks=pytest.mark.full),
    ],
)
def test_a_tie_that_is_frozen_stays_and_the_rest_trains(world, stage, schedule):
    (losses, weights), *_ = run_quietly(_trains_beside_what_is_frozen, 1, 1, 0, "1f1b")
    for found, parts in run_quietly(_trains_beside_what_is_frozen, world, 2, stage, schedule):
        assert found == pytest.approx(losses, rel=1e-6)
        same(parts, weights, 1e-5)


def _frozen_on_one_stage(rank, world):
    import deepc

    model = chain(2)
    if rank == 1:
        model.tied_modules.requires_grad_(False)
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "optimizer": ADAMW}
    with pytest.raises(ArgumentError, match=r"tok\.weight' requires a gradient in stage 0 and none in stage 1"):
        deepc.initialize(model=model, config=config)


def test_a_tie_that_is_frozen_on_one_stage_is_an_error_on_all():
    run_quietly(_frozen_on_one_stage, 2)


def _sets_the_boundary(rank, world):
    engine, data = pipeline(world, 2)
    for value in (True, False):
        with pytest.raises(
            UnsupportedError, match=rf"boundary\({value}\) of a pipeline: .*gradient_accumulation_steps"
        ):
            engine.set_gradient_accumulation_boundary(value)
    losses = [float(engine.train_batch(data)) for _ in range(STEPS)]
    assert engine.global_steps == STEPS
    engine.destroy()
    return losses


def test_a_pipeline_owns_the_boundary_of_its_batches():
    first, second = run_quietly(_sets_the_boundary, 2)
    assert first == second
