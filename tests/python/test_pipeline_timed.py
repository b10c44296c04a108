"""PipelineModule(partition_method="time"): what layers cost is counted right, and nothing of the counting stays."""

from __future__ import annotations

import random
import weakref

import pytest
import torch
from ranks import run_ranks as _run_ranks
from torch import nn

WIDTH = 4


def run_ranks(fn, world, *args):
    return _run_ranks(fn, world, args=args, env={"DEEPC_LOG_LEVEL": "WARNING"})


class Clock:
    """Goes on where layers say so, and nowhere else."""

    now = 0.0
    slow_first = 0.0  # how much more the first run of a layer takes


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        Clock.now += ctx.seconds
        return g, None


class Takes(nn.Module):
    """Takes so many seconds forward and backward by Clock, and draws random numbers of all kinds."""

    alive: weakref.WeakSet = weakref.WeakSet()
    most = 0

    def __init__(self, forward, backward):
        super().__init__()
        import numpy

        self.linear = nn.Linear(WIDTH, WIDTH)
        self.forward_s, self.backward_s, self.runs = forward, backward, 0
        random.random(), numpy.random.rand()
        Takes.alive.add(self)
        Takes.most = max(Takes.most, len(Takes.alive))

    def forward(self, x):
        Clock.now += self.forward_s + (Clock.slow_first if not self.runs else 0.0)
        self.runs += 1
        return _Pass.apply(self.linear(nn.functional.dropout(x, 0.5)), self.backward_s)


class Counts(nn.Module):
    """Has buffers that a forward writes, and that it replaces."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        self.last = torch.ones(())
        Clock.now += 1
        return x.mul_(self.weight)  # in place, as a layer may


def _loss(out, labels):
    Clock.now += 7
    return (out - labels).square().mean()


def _sample():
    return torch.ones(2, WIDTH), torch.zeros(2, WIDTH)


def _model(specs, stages, **options):
    from deepc.pipe import PipelineModule

    class Timed(PipelineModule):
        def _now_s(self):
            return Clock.now

    options = {"loss_fn": _loss, "partition_method": "time", "sample_batch": _sample(), **options}
    return Timed(specs, num_stages=stages, **options)


def _seconds(specs, **options):
    """What each layer is said to cost."""
    from deepc.parallel.pipeline import balance

    said, cut = [], balance.cut
    balance.cut = lambda costs, stages, slack=0.0: said.append(costs) or cut(costs, stages, slack)
    try:
        _model(specs, 1, **options)
    finally:
        balance.cut = cut
    return said[0]


def _costs(rank, world):
    from deepc.pipe import LayerSpec, TiedLayerSpec

    def twice(module, x):
        return module(module(x))

    Clock.slow_first = 100.0
    embedding = nn.Embedding(3, WIDTH)
    specs = [
        LayerSpec(Takes, 1, 2),
        TiedLayerSpec("key", Takes, 10, 20),
        lambda x: (x, None),
        lambda pair: pair[0],
        torch.relu,
        TiedLayerSpec("key", Takes, 10, 20, forward_fn=twice),
        LayerSpec(Takes, 1, 2),
    ]
    return {
        "chain": _seconds(specs),
        "recomputed": _seconds(specs, activation_checkpoint_interval=1, checkpointable_layers=["Takes"]),
        "integers": _seconds(
            [embedding, LayerSpec(Takes, 1, 2)], sample_batch=(torch.zeros(2, dtype=torch.int64), torch.zeros(2, WIDTH))
        ),
        "no loss": _seconds([LayerSpec(Takes, 1, 2)], loss_fn=None),
        # this rank's clock only: all cut by the sum
        "both": _seconds([LayerSpec(Takes, 1 + rank, 2), LayerSpec(Takes, 5, 5)]),
    }


def test_what_layers_cost():
    """The first round, which finds nothing warm, is not the least; ties do at every use, the loss to the last layer."""
    first, second = run_ranks(_costs, 2)
    assert first == second
    assert first == {
        "chain": [6, 60, 0, 0, 0, 120, 20],
        "recomputed": [8, 80, 0, 0, 0, 160, 36],
        "integers": [0, 20],
        "no loss": [6],
        "both": [7, 34],
    }


def _cuts(rank, world):
    """Rank 1 finds other times than rank 0."""
    import deepc
    from deepc.pipe import LayerSpec, PipelineModule

    times = [(10, 10), (1, 1), (1, 1), (1, 1)] if rank == 0 else [(1, 1), (1, 1), (1, 1), (10, 10)]
    specs = [LayerSpec(Takes, *t) for t in times]
    model = _model(specs, 2, seed_layers=True)
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
    engine, *_ = deepc.initialize(model=model.eval(), config=config)
    loss = float(engine.eval_batch(iter([_sample()])))
    whole = PipelineModule(specs, num_stages=1, seed_layers=True, loss_fn=_loss).eval()
    x, y = _sample()
    return model.cuts, loss, float(_loss(whole(x), y))


def test_all_ranks_cut_by_what_all_have_measured():
    ranks = run_ranks(_cuts, 2)
    # 20, 2, 2, 9 on rank 0, which alone would cut behind the first layer, and 2, 2, 2, 27 on rank 1
    assert [cuts for cuts, *_ in ranks] == [[0, 3, 4]] * 2
    assert ranks[0][1] == ranks[1][1] > 0


def _untouched(rank, world):
    import numpy
    from deepc.pipe import LayerSpec

    def build(method):
        torch.manual_seed(3), random.seed(3), numpy.random.seed(3)
        given = Counts()
        given.weight.grad = torch.full((WIDTH,), 2.0)
        given.last.fill_(5.0)
        before = dict(given.named_buffers())
        Takes.alive, Takes.most = weakref.WeakSet(), 0
        specs = [LayerSpec(Takes, 1, 2), LayerSpec(Takes, 1, 2), given, LayerSpec(Takes, 1, 1), LayerSpec(Takes, 1, 1)]
        model = _model(specs, 2, partition_method=method, loss_fn=None)
        drawn = float(torch.rand(())), random.random(), float(numpy.random.rand())
        assert all(value is before[name] for name, value in given.named_buffers())
        state = (float(given.seen), float(given.last), given.weight.grad.tolist())
        weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        return model.cuts, drawn, state, weights, Takes.most

    return build("time"), build("uniform")


def test_timing_leaves_nothing_behind():
    """The same initial values, random numbers, buffers and gradients; and no second layer in memory meanwhile."""
    for timed, plain in run_ranks(_untouched, 2):
        assert timed[0] == plain[0] and timed[1] == plain[1]
        assert timed[2] == plain[2] == (0.0, 5.0, [2.0] * WIDTH)
        assert timed[3].keys() == plain[3].keys() and all(torch.equal(w, plain[3][n]) for n, w in timed[3].items())
        assert timed[4] == plain[4] == 2


def _refusals(rank, world):
    from deepc.errors import ArgumentError, MisuseError
    from deepc.pipe import LayerSpec, PipelineModule

    specs = [LayerSpec(Takes, 1, 1), LayerSpec(nn.Linear, WIDTH, 1), LayerSpec(nn.Linear, 1, 1)]

    def refused(kind, specs=specs, **options):
        with pytest.raises(kind) as caught:
            PipelineModule(specs, num_stages=2, loss_fn=_loss, partition_method="time", **options)
        return str(caught.value)

    from deepc.parallel.expert import MoE

    spread = [LayerSpec(MoE, WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=2, ep_size=2), torch.relu]
    wrong = torch.ones(2, WIDTH + 1), torch.zeros(2, 1)
    one = {"sample_batch": wrong if rank == 1 else (torch.ones(2, WIDTH), torch.zeros(2, 1))}
    return [
        refused(ArgumentError),
        refused(ArgumentError, sample_batch=_sample()[0]),
        refused(ArgumentError if rank == 1 else MisuseError, **one),
        refused(ArgumentError, spread, sample_batch=_sample()),
    ]


def test_what_can_not_be_timed_is_an_error_on_all_ranks():
    first, second = run_ranks(_refusals, 2)
    for told in (first, second):
        assert "pass sample_batch=(inputs, labels)" in told[0] and "got Tensor" in told[1]
        assert "layer 0 (MoE) can't be timed" in told[3] and "not connected yet" in told[3]
    assert "rank 1 could not time the layers" in first[2]
    assert "layer 0 (Takes) can't be timed with sample_batch: RuntimeError" in second[2]
