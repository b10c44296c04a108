"""Experts that are spread over ranks beside other ways to share a model: pipelines, tensor and sequence parallelism."""

from __future__ import annotations

import collections

import pytest
import torch
import torch.nn.functional as F
from deepc.parallel.expert import MoE
from plainly import in_stages
from ranks import run_ranks as _run_ranks
from torch import nn

WIDTH, EXPERTS, MICRO, STEPS, AUX = 8, 4, 4, 3, 0.3  # MICRO: micro-batches of a batch, over all replicas
FULL = pytest.mark.full


def run_ranks(fn, world, *args):
    return _run_ranks(fn, world, args=args, env={"DEEPC_LOG_LEVEL": "WARNING"})


def expert():
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))


class Opens(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.linear(x.to(self.linear.weight.dtype))), torch.zeros(())


class Mixed(nn.Module):
    """One of the blocks: hands on its output, and the sum of the load-balance losses up to here."""

    def __init__(self, number, ep, rank):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        plain = dict(k=2, drop_tokens=False, top2_2nd_expert_sampling=False)
        self.moe = MoE(WIDTH, expert(), num_experts=EXPERTS, ep_size=ep, **plain)
        own = EXPERTS // ep
        with torch.no_grad():
            for e, mine in enumerate(self.moe.deepspeed_moe.experts.deepspeed_experts, rank % ep * own):
                values = torch.Generator().manual_seed(10 * number + e)
                for p in mine.parameters():
                    p.copy_(torch.randn(p.shape, generator=values) / 2)

    def forward(self, given):
        x, aux = given
        out, l_aux, _ = self.moe(self.norm(x))
        return x + out, aux + l_aux


class Closes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given):
        return self.linear(given[0]), given[1]


def loss_of(given, y):
    out, aux = given
    return F.mse_loss(out.float(), y) + AUX * aux


def samples():
    """Endless: (x, y) of a micro-batch."""
    draw = torch.Generator().manual_seed(5)
    while True:
        yield torch.randn(2, 5, WIDTH, generator=draw), torch.randn(2, 5, WIDTH, generator=draw)


def of_replica(replica, replicas):
    own, data = MICRO // replicas, samples()
    while True:
        yield from [next(data) for _ in range(MICRO)][replica * own : (replica + 1) * own]


def layers(ep, rank):
    from deepc.pipe import LayerSpec

    return [LayerSpec(Opens), *[LayerSpec(Mixed, i, ep, rank) for i in range(2)], LayerSpec(Closes)]


SGD = {"type": "SGD", "params": {"lr": 0.5}}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0}}


def train(rank, world, stages, ep, config, pipe, folder=None, skip=0, steps=STEPS, stats=None):
    """(losses, norms, the whole model's weights). folder: where a checkpoint goes, or, with skip, comes from: of a run
    that has trained on so many batches. stats: gets those of recomputation."""
    import deepc
    from deepc.pipe import PipelineModule

    tensor = config.get("tensor_parallel", {}).get("autotp_size", 1)
    replicas = world // stages // tensor
    replica = rank // tensor % replicas
    model = PipelineModule(
        layers(ep, replica),
        num_stages=stages,
        loss_fn=loss_of,
        seed_layers=True,
        partition_method="uniform",
        **pipe,
    )
    engine, *_ = deepc.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": MICRO // replicas,
            "gradient_clipping": 0.5,
            "optimizer": SGD,
            **config,
        },
    )
    assert engine.mesh.ep == ep and engine.mesh.pp == stages
    data = of_replica(replica, replicas)
    for _ in range(skip * MICRO // replicas):
        next(data)
    if skip:
        assert engine.load_checkpoint(folder)[0] and engine.global_steps == skip
    losses, norms = [], []
    for _ in range(steps):
        losses.append(float(engine.train_batch(data)))
        norms.append(engine.get_global_grad_norm())
    if folder and not skip:
        engine.save_checkpoint(folder)
    weights = engine.module_state_dict()
    engine.load_module_state_dict(weights, strict=False)  # changes nothing
    assert all(torch.equal(t, weights[n]) for n, t in engine.module_state_dict().items())
    if stats is not None:
        stats.update(engine.recomputation.stats())
    engine.destroy()
    return losses, norms, weights


def plainly(config=SGD, steps=STEPS):
    """Torch's training in one process, with all experts."""
    chain = []
    for i, make in enumerate([Opens, lambda: Mixed(0, 1, 0), lambda: Mixed(1, 1, 0), Closes]):
        torch.manual_seed(1234 + i)
        chain.append(make())
    model = nn.Sequential(*chain)
    kind = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}[config["type"]]
    optimizer, data, losses, norms = kind(model.parameters(), **config["params"]), samples(), [], []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = sum(loss_of(model(x), y) for x, y in (next(data) for _ in range(MICRO))) / MICRO
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms, model.state_dict()


def same(found, wanted):
    losses, norms, weights = found
    assert losses == pytest.approx(wanted[0], rel=1e-6)
    assert norms == pytest.approx(wanted[1], rel=1e-5)
    assert set(weights) == set(wanted[2])
    for name, t in wanted[2].items():
        torch.testing.assert_close(weights[name], t, rtol=0, atol=1e-5 * float(t.abs().max()), msg=name)


@pytest.mark.parametrize(
    ("world", "stages", "ep", "zero", "pipe"),
    [
        (4, 2, 2, 2, {}),
        *(
            pytest.param(*case, marks=FULL)
            for case in (
                (2, 2, 1, 1, {}),
                (4, 2, 2, 0, {}),
                (4, 2, 2, 1, {"schedule": "gpipe"}),
                (4, 2, 2, 3, {}),
                (4, 2, 2, 1, {"activation_checkpoint_interval": 1}),
                (4, 2, 2, 1, {"schedule": "zb-h1"}),
                (4, 2, 2, 3, {"schedule": "zb-v"}),
                (4, 1, 4, 2, {}),
                (4, 1, 2, 2, {}),
                (8, 2, 2, 1, {}),
                (8, 2, 2, 3, {}),
                (8, 2, 4, 0, {}),
            )
        ),
    ],
)
def test_experts_of_a_stages_ranks_train_as_in_one_process(world, stages, ep, zero, pipe):
    """Losses, norms over stages and experts, and weights after clipped steps; the load-balance losses of all stages
    are in the gradients."""
    wanted = plainly()
    for found in run_ranks(train, world, stages, ep, {"zero_optimization": {"stage": zero}}, pipe):
        same(found, wanted)


@pytest.mark.parametrize("stage", [pytest.param(s, marks=FULL) for s in (0, 3)])
def test_experts_of_a_stage_are_cut_over_its_tensor_ranks(stage):
    rows = [{"patterns": [r".*\.deepspeed_experts\.\d+\.2$"], "partition_type": "row"}]
    rules = [{"patterns": [r".*\.deepspeed_experts\.\d+\.0$"], "partition_type": "column"}, *rows]
    tensor = {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": rules}}
    wanted, config = plainly(), {"tensor_parallel": tensor, "zero_optimization": {"stage": stage}}
    for found in run_ranks(train, 8, 2, 2, config, {}):
        same(found, wanted)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((4, 2, 2, 2), (1, 1, 1, 0)),
        pytest.param((1, 1, 1, 0), (4, 2, 2, 3), marks=FULL),
        pytest.param((4, 2, 2, 3), (4, 1, 4, 1), marks=FULL),
        pytest.param((4, 1, 2, 1), (4, 2, 2, 0), marks=FULL),
        pytest.param((4, 2, 2, 0), (2, 2, 1, 2), marks=FULL),
    ],
)
def test_a_checkpoint_of_stages_and_experts_goes_on_in_another_layout(before, after, tmp_path):
    """Two batches in one layout (ranks, stages, ep_size, ZeRO stage) and one in another are three batches."""

    def run(layout, *more):
        config = {"zero_optimization": {"stage": layout[3]}, "optimizer": ADAMW}
        return run_ranks(train, *layout[:3], config, {}, str(tmp_path), *more)

    run(before, 0, 2)
    losses, norms, weights = plainly(ADAMW)
    for found in run(after, 2, 1):
        same(found, (losses[2:], norms[2:], weights))


def _sixteen_bits(rank, world, stages, ep, precision):
    found = train(rank, world, stages, ep, {**precision, "zero_optimization": {"stage": 1}}, {})
    return found[0], {n: t.float() for n, t in found[2].items()}


@pytest.mark.parametrize(
    "precision", ({"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 8}}), ids=str
)
@pytest.mark.full
def test_sixteen_bits_over_stages_and_experts(precision):
    """Weights are those of the same training in one process, to the rounding of its 16 bits."""
    ((losses, weights),) = run_ranks(_sixteen_bits, 1, 1, 1, precision)
    for found, values in run_ranks(_sixteen_bits, 4, 2, 2, precision):
        assert found == pytest.approx(losses, rel=2e-2)
        for name, t in weights.items():
            torch.testing.assert_close(values[name], t, rtol=0, atol=2e-2 * float(t.abs().max()), msg=name)


def _refused(rank, world, stages, sizes):
    """What is said of layers with these ep_size, one a stage."""
    import deepc
    from deepc.errors import DeepcError
    from deepc.pipe import PipelineModule

    chain = [Opens(), *[Mixed(i, ep, 0) for i, ep in enumerate(sizes)], Closes()]
    model = PipelineModule(chain, num_stages=stages, loss_fn=loss_of, partition_method="uniform")
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": SGD}
    with pytest.raises(DeepcError) as caught:
        deepc.initialize(model=model, config=config)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((2, 2), "ArgumentError: MoE: ep_size = 2 does not divide the 1 rank(s) that hold the same part of the model"),
        pytest.param((2, 4), "UnsupportedError: MoE: layers with ep_size 2 and 4 in one model", marks=FULL),
    ],
)
def test_sizes_that_do_not_fit_are_refused_on_all_ranks(sizes, text):
    for told in run_ranks(_refused, 2, 2, sizes):
        assert text in told


def _refused_as_it_stands(rank, world):
    import deepc
    from deepc.errors import ArgumentError

    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": SGD, "pipeline": {"stages": 2}}
    with pytest.raises(ArgumentError, match="ep_size = 2 does not divide the 1 rank"):
        deepc.initialize(model=nn.Sequential(Mixed(0, 2, 0), Mixed(1, 2, 0)), config=config)


def test_a_stage_of_a_model_that_is_cut_where_it_stands_has_ranks_for_its_experts():
    run_ranks(_refused_as_it_stands, 2)


def _with_a_stage_without_experts(rank, world, stages):
    import deepc
    from deepc.pipe import LayerSpec, PipelineModule

    some = [LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(nn.Tanh), *layers(2 if world > 1 else 1, rank)]
    model = PipelineModule(some, num_stages=stages, loss_fn=loss_of, seed_layers=True, partition_method="uniform")
    replicas = world // stages
    engine, *_ = deepc.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": MICRO // replicas,
            "gradient_clipping": 0.5,
            "zero_optimization": {"stage": 1},
            "optimizer": SGD,
        },
    )
    data = of_replica(rank % replicas, replicas)
    losses = [float(engine.train_batch(data)) for _ in range(STEPS)]
    again = [next(data) for _ in range(MICRO // replicas)]
    losses.append(float(engine.eval_batch(iter(again))))
    return losses, [engine.get_global_grad_norm()], engine.module_state_dict()


def test_a_stage_without_experts_and_evaluation():
    (wanted,) = run_ranks(_with_a_stage_without_experts, 1, 1)
    for found in run_ranks(_with_a_stage_without_experts, 4, 2):
        same(found, wanted)


@pytest.mark.parametrize(("world", "stages"), [(2, 1), pytest.param(4, 2, marks=FULL)])
def test_the_sum_of_gradients_is_ranks_times_their_mean(world, stages):
    replicas = world // stages
    (_, norms, mean), (_, twice, total) = (
        run_ranks(train, world, stages, 2, {**given, "gradient_clipping": 0.0}, {})[0]
        for given in (
            {"optimizer": SGD},
            {"optimizer": {"type": "SGD", "params": {"lr": 0.5 / replicas}}, "gradient_allreduce_op": "sum"},
        )
    )
    assert twice == pytest.approx([replicas * n for n in norms], rel=1e-6)
    assert all(torch.equal(t, total[n]) for n, t in mean.items())  # replicas is a power of two


class Collects(nn.Module):
    """A model that reads its layers' losses behind the last of them."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Residual() for _ in range(4))

    def forward(self, x, y):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        aux = sum(block.moe.deepspeed_moe.l_aux for block in self.blocks)
        return F.mse_loss(self.last(x), y) + AUX * aux


class Residual(nn.Module):
    def __init__(self, ep=1):
        super().__init__()
        self.moe = MoE(WIDTH, expert(), num_experts=EXPERTS, ep_size=ep, k=2)

    def forward(self, x):
        return x + self.moe(x)[0]


def cut_where_it_stands(rank, world):
    import deepc

    torch.manual_seed(0)
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "optimizer": SGD}
    try:
        deepc.initialize(model=Collects(), config={**config, **in_stages(2)}, sample_batch=next(samples()))
    except deepc.DeepcError as error:
        return str(error)


def test_losses_of_layers_on_another_stage_are_not_lost_in_silence():
    told = run_ranks(cut_where_it_stands, 2)
    assert any("l_aux of a layer on another stage" in t for t in told) and all(told)


class Standing(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Residual(ep=2) for _ in range(2))

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, y)


def _connected_how_often(rank, world):
    import deepc
    from deepc.engine.assembly import shares
    from deepc.parallel.expert import spread

    calls = collections.Counter()

    def counted(name, function):
        def call(*args):
            calls[name] += 1
            return function(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module in (spread, shares):
            for name in ("refuse_experts", "connect"):
                patch.setattr(module, name, counted(name, getattr(module, name)))
        config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "optimizer": SGD}
        engine, *_ = deepc.initialize(model=Standing(), config={**config, **in_stages(2)}, sample_batch=next(samples()))
    groups = {m.deepspeed_moe.group.size for m in engine.module.modules() if isinstance(m, MoE)}
    ep = engine.mesh.ep
    engine.destroy()
    return dict(calls), groups, ep


def test_experts_of_a_model_that_is_cut_where_it_stands_are_connected_once():
    for told in run_ranks(_connected_how_often, 4):
        assert told == ({"refuse_experts": 1, "connect": 1}, {2}, 2)
