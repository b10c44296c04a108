"""Pipelines: a model as a list of layers over several ranks trains as it does in one process."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from deepc.errors import AbortedError, ArgumentError, UnsupportedError
from ranks import run_ranks as _run_ranks
from tiny import Block
from torch import nn

WIDTH, VOCAB, CONTEXT, MICRO, STEPS = 32, 61, 16, 4, 4


def run_ranks(fn, world, *args):
    return _run_ranks(fn, world, args=args, env={"DEEPC_LOG_LEVEL": "WARNING"})


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)

    @property
    def weight(self):
        return self.tok.weight

    def forward(self, x):
        return self.tok(x) + self.pos(torch.arange(x.shape[1]))


def loss_of(logits, y):
    return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())


def layers(blocks, tied=True):
    from deepc.pipe import LayerSpec, TiedLayerSpec

    head = (
        TiedLayerSpec("embed", Embed, forward_fn=lambda m, h: h @ m.weight.t())
        if tied
        else LayerSpec(nn.Linear, WIDTH, VOCAB, bias=False)
    )
    return [
        TiedLayerSpec("embed", Embed) if tied else LayerSpec(Embed),
        *[LayerSpec(Block, WIDTH) for _ in range(blocks)],
        LayerSpec(nn.LayerNorm, WIDTH),
        head,
    ]


def batches(replica, micro_batches, replicas):
    """Endless: the micro-batches of one replica, the same ones in all whatever number of replicas shares them."""
    generator = torch.Generator().manual_seed(5)
    while True:
        given = [
            torch.randint(0, VOCAB, (2, CONTEXT + 1), generator=generator) for _ in range(micro_batches * replicas)
        ]
        for ids in given[replica * micro_batches : (replica + 1) * micro_batches]:
            yield ids[:, :-1], ids[:, 1:]


def train(rank, world, stages, config, steps=STEPS, micro_batches=MICRO, tied=True, **pipe):
    """(losses, {name: (weight, master gradient's norm)} of this rank's trained parameters)."""
    import deepc
    from deepc.pipe import PipelineModule

    model = PipelineModule(
        layers(4, tied), num_stages=stages, loss_fn=loss_of, seed_layers=True, partition_method="uniform", **pipe
    )
    replicas = world // stages
    engine, *_ = deepc.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": micro_batches // replicas,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4}},  # elements are compared: see plainly
            **config,
        },
    )
    data = batches(engine.global_rank, micro_batches // replicas, replicas)
    losses = [float(engine.train_batch(data)) for _ in range(steps)]
    weights = {n: p.detach().float().clone() for n, p in engine.module.named_parameters()}
    engine.destroy()
    return losses, weights


def one_process(config, **options):
    return run_ranks(train_kw, 1, 1, config, options)[0]


def train_kw(rank, world, stages, config, options):
    return train(rank, world, stages, config, **options)


def test_one_stage_is_no_pipeline():
    """The script of several stages, started with one: 'Linear' object has no attribute 'train_batch'."""
    import deepc

    config = {"train_batch_size": 2, "pipeline": {"stages": 1}}
    engine, *_ = deepc.initialize(model=torch.nn.Linear(2, 2), config=config)
    with pytest.raises(AttributeError, match=r"engine.train_batch is of pipelines.*pipeline.stages to 2 or more"):
        engine.train_batch(iter([]))
    with pytest.raises(AttributeError, match="no attribute 'train_batches'"):
        engine.train_batches
    engine.destroy()


def check(ranks, want, exact=False):
    losses, weights = want
    seen = set()
    for got, parts in ranks:
        assert got == losses if exact else got == pytest.approx(losses, rel=1e-6)
        for name, value in parts.items():
            seen.add(name)
            if exact:
                assert torch.equal(value, weights[name]), name
            else:
                torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-5 * float(weights[name].abs().max()))
    assert seen == set(weights)


FP32: dict = {}
CLIPPED = {"gradient_clipping": 0.5}


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("gpipe", marks=pytest.mark.full)])
def test_two_stages_have_the_bits_of_one_process(schedule):
    """Nothing is tied, so that no sum has another order: every micro-batch's gradients are added as they come."""
    want = one_process(FP32, tied=False)
    check(run_ranks(train_kw, 2, 2, FP32, {"schedule": schedule, "tied": False}), want, exact=True)


@pytest.mark.parametrize(
    ("world", "stages", "zero", "pipe"),
    [
        (2, 2, 0, {}),
        pytest.param(4, 2, 1, {}, marks=pytest.mark.full),
        pytest.param(4, 2, 2, {}, marks=pytest.mark.full),
        pytest.param(4, 2, 3, {}, marks=pytest.mark.full),
        pytest.param(4, 4, 0, {}, marks=pytest.mark.full),
        pytest.param(2, 2, 1, {"schedule": "interleaved"}, marks=pytest.mark.full),
        (4, 2, 2, {"schedule": "interleaved"}),
        pytest.param(2, 2, 1, {"schedule": "zb-h1"}, marks=pytest.mark.full),
        (4, 2, 3, {"schedule": "zb-v"}),
        (4, 4, 1, {"activation_checkpoint_interval": 1}),
        (2, 2, 1, {"schedule": "zb-h1", "activation_checkpoint_interval": 2}),
    ],
)
def test_layouts_train_as_one_process(world, stages, zero, pipe):
    config = {**CLIPPED, "zero_optimization": {"stage": zero}}
    check(run_ranks(train_kw, world, stages, config, pipe), one_process(config))


@pytest.mark.parametrize(
    "precision",
    [
        {"bf16": {"enabled": True}},
        pytest.param({"fp16": {"enabled": True, "initial_scale_power": 8}}, marks=pytest.mark.full),
    ],
    ids=["bf16", "fp16"],
)
def test_16_bits_train_as_in_one_process(precision):
    config = {**precision, **CLIPPED, "zero_optimization": {"stage": 1}}
    (want, _), ranks = one_process(config), run_ranks(train_kw, 4, 2, config, {})
    for got, _ in ranks:
        assert got == pytest.approx(want, rel=2e-2) and got == ranks[0][0]


def test_gradients_of_weights_that_wait_are_summed_in_fp32():
    """In bf16 the sum of so many micro-batches would lose the last ones."""
    config = {"bf16": {"enabled": True}, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
    options = {"tied": False, "micro_batches": 32, "steps": 1}
    want = one_process(config, **options)
    check(run_ranks(train_kw, 2, 2, config, {**options, "schedule": "zb-h1"}), want, exact=True)


def _large(rank, world, stages, config, pipe):
    """The loss of three batches of a model whose messages are too large for the sender's buffers, so that each waits
    for its receiver."""
    import deepc
    from deepc.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    key, size = "matrix", 512  # 1 MiB in fp32
    tied, free = TiedLayerSpec(key, nn.Linear, size, size, bias=False), LayerSpec(nn.Linear, size, size)
    model = PipelineModule(
        [free, tied, tied, free, free],
        num_stages=stages,
        loss_fn=lambda out, y: (out - y).square().mean(),
        seed_layers=True,
        partition_method="uniform",
        **pipe,
    )
    given = {"train_micro_batch_size_per_gpu": size, "gradient_accumulation_steps": 3, **config}
    engine, *_ = deepc.initialize(model=model, config={**given, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}})
    x, y = torch.linspace(-1, 1, 2 * size * size).view(2, size, size)
    losses = [float(engine.train_batch(iter([(x, y)] * 3))) for _ in range(3)]
    engine.destroy()
    return losses


@pytest.mark.parametrize(
    "pipe", [pytest.param({}, marks=pytest.mark.full), {"schedule": "interleaved"}], ids=["1f1b", "interleaved"]
)
def test_ties_of_any_size_and_between_any_stages(pipe):
    """interleaved: the first stage with the tied layer is on a later rank than the next one."""
    (want,) = run_ranks(_large, 1, 1, {}, {})
    for losses in run_ranks(_large, 2, 2, {}, pipe):
        assert losses == pytest.approx(want, rel=1e-5)


# ---- checkpoints -----------------------------------------------------------------------------------------------------
def _engine(stages, config, blocks=4, **pipe):
    import deepc
    from deepc.pipe import PipelineModule

    model = PipelineModule(
        layers(blocks), num_stages=stages, loss_fn=loss_of, seed_layers=True, partition_method="uniform", **pipe
    )
    return deepc.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            **config,
        },
    )[0]


def _layout(rank, world, stages, zero, folder, steps, saves):
    engine = _engine(
        stages, {"gradient_accumulation_steps": MICRO * stages // world, "zero_optimization": {"stage": zero}}
    )
    replicas = world // stages
    data = batches(engine.global_rank, MICRO // replicas, replicas)
    if saves:
        losses = [float(engine.train_batch(data)) for _ in range(steps)]
        engine.save_checkpoint(folder, "half", client_state={"seen": steps})
    else:
        for _ in range(2 * MICRO // replicas):
            next(data)  # what the saved run has trained on
        path, client = engine.load_checkpoint(folder)
        assert path.endswith("half") and client == {"seen": 2} and engine.global_steps == 2
        losses = [float(engine.train_batch(data)) for _ in range(steps)]
    engine.destroy()
    return losses


def test_a_checkpoint_of_one_layout_goes_on_in_another(tmp_path):
    folder = str(tmp_path)
    whole = run_ranks(_layout, 1, 1, 0, folder, 4, True)[0]
    two = run_ranks(_layout, 4, 2, 2, folder, 2, True)
    assert all(losses == pytest.approx(whole[:2], rel=1e-6) for losses in two)
    for world, stages, zero in [(1, 1, 0), (2, 2, 1)]:
        for losses in run_ranks(_layout, world, stages, zero, folder, 2, False):
            assert losses == pytest.approx(whole[2:], rel=1e-5)


def _muon(rank, world, folder):
    """The first stage has no matrix, the second one nothing else."""
    import deepc
    from deepc.pipe import LayerSpec, PipelineModule

    found = []
    for resumes in (False, True):
        specs = [LayerSpec(nn.LayerNorm, 8), LayerSpec(nn.Linear, 8, 8, bias=False)]
        model = PipelineModule(
            specs, num_stages=world, loss_fn=F.mse_loss, seed_layers=True, partition_method="uniform"
        )
        params = {"muon_lr": 0.02, "adam_lr": 0.003}
        config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Muon", "params": params}}
        engine = deepc.initialize(model=model, config=config)[0]
        data = iter([(torch.randn(2, 8), torch.randn(2, 8)) for g in [torch.manual_seed(0)] for _ in range(4)])
        if resumes:
            next(data), next(data)
            engine.load_checkpoint(folder)
        losses = [float(engine.train_batch(data)) for _ in range(2)]
        if not resumes:
            engine.save_checkpoint(folder)
            losses = [float(engine.train_batch(data)) for _ in range(2)]
        found.append((losses, [g["lr"] for g in engine.optimizer.param_groups]))
        engine.destroy()
    return found


@pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.full)])
def test_stages_have_equally_many_param_groups_of_muon(world, tmp_path):
    for once, again in run_ranks(_muon, world, str(tmp_path)):
        assert once == again and once[1] == [0.02, 0.003]


def _wrong_checkpoint(rank, world, folder):
    from deepc.errors import CheckpointError

    engine = _engine(2, {})
    engine.save_checkpoint(folder)
    engine.destroy()
    told = []
    for blocks in (3, 5):
        other = _engine(2, {}, blocks)
        with pytest.raises(CheckpointError) as caught:
            other.load_checkpoint(folder)
        told.append(str(caught.value))
        other.destroy()
    return told


def test_a_checkpoint_with_other_layers_is_refused_on_every_rank(tmp_path):
    for fewer, more in run_ranks(_wrong_checkpoint, 2, str(tmp_path)):
        assert "no stage has" in fewer or "failed on rank" in fewer
        assert "missing" in more or "failed on rank" in more


# ---- evaluation, data ------------------------------------------------------------------------------------------------
def _evaluate(rank, world):
    engine = _engine(2, {"gradient_accumulation_steps": MICRO})
    before = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
    data = list(zip(range(MICRO), batches(0, MICRO, 1)))
    given = [batch for _, batch in data]
    loss = float(engine.eval_batch(iter(given)))
    alone = engine.eval_batch(iter(given), reduce_output=None)
    both = engine.eval_batch(iter(given), return_logits=True)
    first = float(engine.train_batch(iter(given)))
    assert all(torch.equal(p, before[n]) for n, p in engine.module.named_parameters()) is False
    logits = None if both[1] is None else [loss_of(out, y) for out, (_, y) in zip(both[1], given)]
    return loss, alone, float(both[0]), logits, first


def test_evaluation_gives_the_loss_of_training_and_changes_nothing():
    first, last = run_ranks(_evaluate, 2)
    assert first[0] == last[0] == first[2] == pytest.approx(first[4], rel=1e-6)
    assert first[1] is None and first[3] is None
    assert [float(x) for x in last[1]] == [float(x) for x in last[3]] and len(last[1]) == MICRO


def _without_a_loss(rank, world):
    import deepc
    from deepc.pipe import PipelineModule

    model = PipelineModule([nn.Linear(4, 4), nn.Linear(4, 3)], num_stages=2, partition_method="uniform")
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = deepc.initialize(model=model, config=config)
    data = [(torch.ones(2, 4), None)]
    with pytest.raises(ArgumentError) as caught:
        engine.eval_batch(iter(data))
    outputs = engine.eval_batch(iter(data), compute_loss=False)
    return str(caught.value), outputs if outputs is None else [tuple(out.shape) for out in outputs]


def test_a_mean_of_what_is_no_loss_is_an_error_on_all_ranks():
    """The rank of the last stage alone had one, and the others waited for it."""
    (first, none), (last, outputs) = run_ranks(_without_a_loss, 2)
    assert "float32 [2, 3]" in last and all("compute_loss=False" in said for said in (first, last))
    assert none is None and outputs == [(2, 3)]


class Noisy(nn.Module):
    """Dropout of all, which shows the mode it ran in; fixed: it stays in evaluation mode."""

    def __init__(self, fixed=False):
        super().__init__()
        self.scale, self.drop, self.fixed = nn.Parameter(torch.ones(())), nn.Dropout(1.0), fixed
        self.seen = []

    def train(self, mode=True):
        return super().train(mode and not self.fixed)

    def forward(self, x):
        self.seen.append((self.training, self.drop.training, bool((self.drop(x) == 0).all())))
        return x * self.scale


def _modes(rank, world):
    import deepc
    from deepc.pipe import PipelineModule

    noisy, fixed = ([Noisy(fixed).eval() for _ in range(2)] for fixed in (False, True))
    model = PipelineModule(
        [noisy[0], fixed[0], noisy[1], fixed[1]], num_stages=2, partition_method="uniform", loss_fn=F.mse_loss
    )
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.0}}}
    engine, *_ = deepc.initialize(model=model, config=config)
    data = iter([(torch.ones(1, 4), torch.ones(1, 4))] * 5)
    mine, kept, modes = noisy[rank], fixed[rank], []
    for call in (engine.eval_batch, engine.train_batch, engine.eval_batch, engine.train_batch):
        call(data)
        modes.append((engine.module.training, mine.training, mine.drop.training, kept.training))
    engine.module.eval()
    mine.drop.train()
    engine.eval_batch(data)
    modes.append((engine.module.training, mine.training, mine.drop.training, kept.training))
    return mine.seen, kept.seen, modes


def test_batches_choose_the_mode_and_evaluation_leaves_it():
    on, off = (True, True, True), (False, False, False)
    for seen, kept, modes in run_ranks(_modes, 2):
        assert seen == [off, on, off, on, off] and set(kept) == {off}
        before, after = (True, False, False, False), (True, True, True, False)
        assert modes == [before, after, after, after, (False, False, True, False)]


def test_the_cut_of_a_model_leaves_the_mode_of_each_module():
    from deepc.parallel.pipeline.part import evaluating

    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(), nn.Linear(2, 2)).eval())
    before = [m.training for m in model.modules()]
    with pytest.raises(KeyError), evaluating(model):
        assert not any(m.training for m in model.modules())
        raise KeyError("of the model")
    assert [m.training for m in model.modules()] == before == [True, True, False, False, False]


def _given_loaders(rank, world, folder):
    """Training by data_iter, and by loaders of the script's own, with a checkpoint between."""
    import itertools

    import deepc
    from deepc.pipe import PipelineModule

    data = list(itertools.islice(batches(0, MICRO, 1), 2 * MICRO))
    loader = torch.utils.data.DataLoader(data, batch_size=None)

    def make(training_data=None):
        model = PipelineModule(layers(2, False), num_stages=world, loss_fn=loss_of, seed_layers=True)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": MICRO,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        }
        return deepc.initialize(model=model, config=config, training_data=training_data)[0]

    engine, again = make(), iter(data * 2)
    want = [float(engine.train_batch(again)) for _ in range(4)]
    out = []
    for given, own in ((loader, None), (data, [(x[0], y[0]) for x, y in data])):
        first, second = make(own), make(own)
        first.set_dataloader(given)
        losses = [float(first.train_batch()) for _ in range(2)]
        first.save_checkpoint(f"{folder}/{type(given).__name__}")
        second.set_dataloader(given)
        second.load_checkpoint(f"{folder}/{type(given).__name__}")
        out.append(losses + [float(second.train_batch()) for _ in range(2)])
    return want, out


def test_batches_come_from_any_loader(tmp_path):
    """Its place is not in checkpoints: that is training_data's alone."""
    for want, found in run_ranks(_given_loaders, 2, str(tmp_path)):
        assert found == [want, want] and want[-1] < want[0]


def _messages(rank, world):
    """A chain whose layers hand on tuples with Nones and indices, in other shapes for each micro-batch."""
    import deepc
    from deepc.pipe import PipelineModule

    class Open(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return x * self.scale, None, torch.arange(x.shape[0])

    class Middle(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, given):
            x, nothing, index = given
            assert nothing is None and index.dtype == torch.int64
            return x * self.scale * index[:, None], index

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(()))

        def forward(self, given):
            x, index = given
            return x.sum() / len(index) + self.shift

    torch.manual_seed(0)
    model = PipelineModule([Open(), Middle(), nn.Identity(), Last()], num_stages=2, partition_method="uniform")
    engine, *_ = deepc.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 3,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        },
    )
    shapes = [(2, 3), (4, 1), (1, 5)]
    loss = engine.train_batch(iter([(torch.ones(s), None) for s in shapes]))
    return float(loss), [float(p) for p in engine.module.parameters()]


def test_stages_hand_on_tuples_of_any_shapes():
    want = sum(sum(i * cols for i in range(rows)) / rows for rows, cols in [(2, 3), (4, 1), (1, 5)]) / 3
    (a, first), (b, last) = run_ranks(_messages, 2)
    assert a == b == pytest.approx(want)
    assert first == pytest.approx([1 - 0.5 * want] * 2) and last == [-0.5]


@pytest.mark.parametrize(
    ("value", "kind", "said"),
    [
        (tuple(torch.ones(1) for _ in range(17)), ArgumentError, "returned 17 values .* 1 to 16"),
        ((), ArgumentError, "returned 0 values"),
        ((torch.ones(1), "text"), ArgumentError, "returned str"),
        ([torch.ones(1)], ArgumentError, "returned list"),
        (torch.ones([1] * 9), UnsupportedError, "with 9 dimensions .* at most 8"),
        (torch.ones(1, dtype=torch.complex64), UnsupportedError, "of torch.complex64"),
        (torch.ones(1).to_sparse(), UnsupportedError, "a torch.sparse_coo tensor"),
    ],
    ids=["tensors", "none", "text", "list", "dimensions", "dtype", "layout"],
)
def test_what_does_not_go_between_stages_is_refused_before_it_is_sent(value, kind, said):
    from deepc.parallel.pipeline.hops import Hops

    with pytest.raises(kind, match=said):
        Hops([0, 1]).send(value, 1, 0)


def _widest(rank, world):
    """16 values of 8 dimensions reach the other rank; then 17, of which both hear."""
    import deepc
    from deepc.pipe import PipelineModule

    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.count, self.scale = 16, nn.Parameter(torch.ones(()))

        def forward(self, x):
            return (*(x.view([1] * 7 + [-1]) * self.scale for _ in range(self.count - 1)), None)

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, given):
            assert len(given) == 16 and given[-1] is None and all(t.dim() == 8 for t in given[:-1])
            return sum(t.sum() for t in given[:-1]) * self.scale

    model = PipelineModule([Many(), Sum()], num_stages=2, partition_method="uniform")
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.0}}}
    engine, *_ = deepc.initialize(model=model, config=config)
    loss = float(engine.train_batch(iter([(torch.ones(3), None)])))
    if rank == 0:
        engine.module.get_submodule("0").count = 17
    with pytest.raises(ArgumentError if rank == 0 else AbortedError) as caught:
        engine.train_batch(iter([(torch.ones(3), None)]))
    return loss, str(caught.value)


def test_as_much_as_goes_between_stages_does_and_more_is_an_error_on_all():
    for loss, said in run_ranks(_widest, 2):
        assert loss == 45.0 and "returned 17 values" in said


class InPlace(nn.Module):
    """A layer that begins by writing what it is given."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x.mul_(0.5).relu_())


def _in_place(rank, world, schedule):
    """Losses and weights."""
    import deepc
    from deepc.pipe import PipelineModule

    torch.manual_seed(0)
    chain = [nn.Linear(8, 8), *[InPlace() for _ in range(7)]]
    model = PipelineModule(chain, num_stages=world, loss_fn=F.mse_loss, partition_method="uniform", schedule=schedule)
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    config["optimizer"] = {"type": "SGD", "params": {"lr": 1.0}}
    engine, *_ = deepc.initialize(model=model, config=config)
    data = iter([(torch.randn(2, 8), torch.randn(2, 8)) for _ in range(12)])
    losses = [float(engine.train_batch(data)) for _ in range(3)]
    return losses, [p.detach().clone() for p in engine.module.parameters()]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_stages_may_begin_in_place(schedule):
    (whole,) = run_ranks(_in_place, 1, "1f1b")
    stages = run_ranks(_in_place, 2, schedule)
    # Where the weights' gradients come later, BLAS adds them to the sum as it makes them: MKL on processors without
    # AVX-512 rounds then otherwise than it does for the product and the sum apart.
    rounding = 1e-6 if schedule == "zb-v" else 0
    assert len(set(whole[0])) == 3
    for losses, _ in stages:
        assert losses == pytest.approx(whole[0], rel=rounding, abs=0)
    parts = [p for _, weights in stages for p in weights]
    if schedule == "zb-v":  # the first rank has the first and the last quarter of the layers
        parts = [*parts[:4], *parts[8:], *parts[4:8]]
    assert len(parts) == len(whole[1])
    for mine, theirs in zip(parts, whole[1]):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=rounding * float(theirs.abs().max()))


def test_what_a_stage_writes_is_told_to_the_one_before():
    """On one rank a stage's output lies where the next one writes."""
    from deepc.parallel.pipeline import runtime

    for output, needed in ((torch.sigmoid, True), (torch.neg, False)):
        weight = torch.rand(3, requires_grad=True)
        out = output(weight)
        leaf = runtime._as_leaves(out)
        given = runtime._handed_on(leaf)
        after = given.mul_(2.0)
        runtime._note_writes(given, leaf)
        after.sum().backward()
        assert torch.equal(leaf.grad, torch.full((3,), 2.0))
        if needed:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.backward(leaf.grad)
        else:
            out.backward(leaf.grad)
            assert torch.equal(weight.grad, torch.full((3,), -2.0))


def _logged(rank, world, folder):
    engine = _engine(2, {"gradient_accumulation_steps": 2, "deepc": {"run_dir": folder}})
    data = batches(engine.global_rank, 2, 2)
    losses = [float(engine.train_batch(data)) for _ in range(2)]
    engine.destroy()
    return losses


def test_a_run_is_logged_once(tmp_path):
    """By the first rank, with the loss, and the tokens of all pipelines."""
    import json

    losses = run_ranks(_logged, 4, str(tmp_path))[0]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert [line["loss"] for line in lines] == pytest.approx(losses)
    assert [line["tokens"] for line in lines] == [2 * 2 * 2 * CONTEXT, 4 * 2 * 2 * CONTEXT]


# ---- what goes wrong -------------------------------------------------------------------------------------------------
def _poison(rank, world):
    """The weights of the first stage are not finite: all ranks skip, and are told."""
    engine = _engine(2, {"gradient_accumulation_steps": 2, "deepc": {"max_lost_steps": 3}})
    data, told = batches(0, 2, 1), []
    engine.train_batch(data)
    if engine.stage_id == 0:
        with torch.no_grad():
            next(engine.module.parameters()).fill_(float("inf"))
    from deepc.errors import NonFiniteError

    with pytest.raises(NonFiniteError) as caught:
        for _ in range(4):
            engine.train_batch(data)
            told.append((engine.last_step.applied, engine.last_step.reason))
    return told, str(caught.value)


def test_what_is_not_finite_in_one_stage_skips_the_step_of_all():
    for told, end in run_ranks(_poison, 2):
        assert len(told) == 2 and not any(applied for applied, _ in told)
        assert "not finite" in end and all("not finite" in reason for _, reason in told)


def _refusals(rank, world):
    import deepc
    from deepc.errors import ArgumentError, ConfigError, MisuseError, UnsupportedError
    from deepc.pipe import LayerSpec, PipelineModule

    def refused(kind, make):
        with pytest.raises(kind) as caught:
            make()
        return str(caught.value)

    specs = [LayerSpec(nn.Linear, 4, 4) for _ in range(3)]
    told = [
        refused(ConfigError, lambda: PipelineModule(specs, num_stages=3)),
        refused(ArgumentError, lambda: PipelineModule(specs[:1], num_stages=2)),
        refused(ArgumentError, lambda: PipelineModule(specs, num_stages=2, partition_method="type:conv")),
        refused(ArgumentError, lambda: PipelineModule(specs, num_stages=2, schedule="2f2b")),
    ]
    shared = nn.Linear(4, 4)
    told += [
        refused(ArgumentError, lambda: PipelineModule([shared, nn.Linear(4, 4), nn.Tanh(), shared], num_stages=2)),
        refused(ArgumentError, lambda: PipelineModule(specs, num_stages=2, activation_checkpoint_interval=-1)),
        refused(ArgumentError, lambda: PipelineModule(specs, num_stages=2).set_checkpoint_interval(1.5)),
    ]
    PipelineModule([shared, shared, *specs[:2]], num_stages=2, partition_method="uniform")  # on one rank
    empty = PipelineModule([*specs, torch.relu], num_stages=2, partition_method="type:relu|Linear")
    empty.requires_grad_(rank == 0)
    told.append(
        refused(ArgumentError, lambda: deepc.initialize(model=empty, config={"train_micro_batch_size_per_gpu": 1}))
    )
    engine = _engine(2, {"gradient_accumulation_steps": 2})
    told += [
        refused(MisuseError, lambda: engine.train_batch(iter([]))),
        refused(ArgumentError, lambda: engine.train_batch([1, 2])),
        refused(UnsupportedError, lambda: engine(torch.zeros(1))),
        refused(UnsupportedError, lambda: engine.step()),
    ]
    config = {"deepc": {"deterministic": "layout"}}
    told.append(refused(UnsupportedError, lambda: _engine(2, config)))
    assert deepc.__version__
    return told


def test_what_can_not_be_is_refused():
    wants = [
        "num_stages=3",
        "1 layer can't be cut into 2",
        "no layer's class matches 'conv'",
        "2f2b",
        "layers 0 and 3 of PipelineModule share a parameter, and are on the ranks 0 and 1",
        "activation_checkpoint_interval = -1",
        "activation_checkpoint_interval = 1.5",
        "pipeline stage 1 has no parameter",
        "ended after 0 of the 2",
        "write iter",
        "train_batch",
        "train_batch",
        "deterministic",
    ]
    for told in run_ranks(_refusals, 2):
        assert all(want in text for want, text in zip(wants, told, strict=True)), told


def _uneven(rank, world):
    """Rank 1 is out of data, then asks for another batch; then all goes on; then its loss function raises."""
    from deepc.errors import MisuseError

    engine, told = _engine(2, {"gradient_accumulation_steps": 2}), []
    data = batches(0, 2, 1)
    engine.train_batch(data)
    with pytest.raises(MisuseError) as caught:
        engine.train_batch(iter([]) if rank == 1 else data)
    told.append(str(caught.value))
    with pytest.raises(MisuseError) as caught:
        engine.eval_batch(data, num_micro_batches=1 + rank)
    told.append(str(caught.value))
    engine.train_batch(data)

    def raises(*_):
        raise ValueError("no such label")

    engine.module.loss_fn = raises
    with pytest.raises(ValueError if rank == 1 else AbortedError) as caught:
        engine.train_batch(data)
    return [*told, str(caught.value)]


def test_what_one_rank_can_not_do_is_an_error_on_all():
    first, last = run_ranks(_uneven, 2)
    assert "rank 1 could not begin this batch" in first[0] and "ended after 0 of the 2" in last[0]
    assert first[1] == last[1] and "rank 0 eval_batch of 1, rank 1 eval_batch of 2" in first[1]
    assert "stage 1 of a pipeline, broke off a batch: ValueError: no such label" in first[2]
    assert last[2] == "no such label"


class _Numbers(torch.utils.data.Dataset):
    """Equal numbers as inputs and labels. On rank 0 the third that is asked for can't be read, once."""

    def __init__(self, rank):
        self._left = 3 if rank == 0 else 0

    def __len__(self):
        return 8

    def __getitem__(self, i):
        self._left -= 1
        if self._left == 0:
            raise ValueError("can't be read")
        return torch.tensor([float(i)]), torch.tensor([float(i)])


def _reads(rank, world):
    """The losses of batches in which inputs and labels differ if they are of other samples; one batch raises."""
    import deepc
    from deepc.errors import MisuseError
    from deepc.pipe import PipelineModule

    chain = [nn.Linear(1, 1), nn.Linear(1, 1)]
    with torch.no_grad():
        for layer in chain:
            layer.weight.fill_(1), layer.bias.zero_()
    model = PipelineModule(chain, num_stages=2, loss_fn=F.mse_loss, partition_method="uniform")
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.0}}
    engine, *_ = deepc.initialize(model=model, config=config, training_data=_Numbers(rank))
    losses = [float(engine.train_batch())]
    with pytest.raises(ValueError if rank == 0 else MisuseError, match="can't be read|rank 0 could not begin"):
        engine.train_batch()
    with torch.no_grad(), pytest.raises(MisuseError, match="no_grad"):
        engine.train_batch()
    losses += [float(engine.train_batch()) for _ in range(4)]  # into the next epoch
    for wrong in (0, -1, 1.5):
        with pytest.raises(ArgumentError, match=f"num_micro_batches={wrong}"):
            engine.eval_batch(num_micro_batches=wrong)
    with pytest.raises(ArgumentError if rank == 0 else MisuseError, match="=0.: it is|rank 0 could not begin"):
        engine.eval_batch(num_micro_batches=0 if rank == 0 else 1)  # on one rank alone
    engine.destroy()
    with pytest.raises(MisuseError, match="eval_batch.. of an engine that was destroyed"):
        engine.eval_batch()
    return losses


def _evaluates_on_training_data(rank, world, folder):
    """The samples of the batches behind an evaluation: of the run that was saved there, and of one that resumes it."""
    import deepc
    from deepc.pipe import PipelineModule

    def made():
        chain = [nn.Linear(1, 1), nn.Linear(1, 1)]
        with torch.no_grad():
            for layer in chain:
                layer.weight.fill_(1), layer.bias.zero_()
        model = PipelineModule(chain, num_stages=2, loss_fn=lambda x, _: x.mean(), partition_method="uniform")
        config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}
        config["optimizer"] = {"type": "SGD", "params": {"lr": 0.0}}
        return deepc.initialize(model=model, config=config, training_data=_Numbers(1))[0]

    first, second = made(), made()
    first.train_batch()
    first.eval_batch()
    first.save_checkpoint(folder)
    second.load_checkpoint(folder)
    return [[float(engine.train_batch()) for _ in range(3)] for engine in (first, second)]


def test_evaluation_on_training_data_is_behind_what_a_checkpoint_resumes(tmp_path):
    for goes_on, resumes in run_ranks(_evaluates_on_training_data, 2, str(tmp_path)):
        assert goes_on == resumes


def test_data_that_raises_on_one_rank_is_passed_over_on_all():
    """The ranks that read go on with the same samples: the first stage's inputs are those of the last one's labels."""
    for losses in run_ranks(_reads, 2):
        assert losses == [0.0] * 5


def _does_not_fit(rank, world, casts):
    """Stage 1 of a pipeline takes 9 features, and gets 8; or was cast since the engine was made."""
    import deepc
    from deepc.pipe import PipelineModule

    chain = [nn.Linear(8, 8), nn.Linear(8, 8) if casts else nn.Linear(9, 9)]
    model = PipelineModule(chain, num_stages=2, loss_fn=F.mse_loss, partition_method="uniform")
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    engine, *_ = deepc.initialize(model=model, config={**config, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}})
    if casts and rank == 1:
        engine.module.double()
    with pytest.raises((ArgumentError if casts else RuntimeError) if rank == 1 else AbortedError) as caught:
        engine.train_batch(iter([(torch.ones(2, 8), torch.ones(2, 8))] * 2))
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


def test_what_a_stage_can_not_take_from_the_one_before_is_named_on_all_ranks():
    first, last = run_ranks(_does_not_fit, 2, False)
    assert "rank 1, in stage 1 of a pipeline, broke off a batch: RuntimeError: mat1 and mat2 shapes" in first
    assert "(its forward got float32 [2, 8] from the stage before)" in first
    if sys.version_info >= (3, 11):
        assert last.endswith("in stage 1 of a pipeline: its forward got float32 [2, 8] from the stage before")


def test_a_stage_that_was_cast_is_named_on_all_ranks():
    for told in run_ranks(_does_not_fit, 2, True):
        assert "weight' is torch.float64 on cpu, which the engine has made torch.float32 on cpu: it was cast" in told


def _leaves_out(rank, world, folder):
    """Rank 1 saves a checkpoint where rank 0 trains."""
    from deepc.errors import MismatchError

    engine = _engine(2, {"gradient_accumulation_steps": 2})
    with pytest.raises(MismatchError) as caught:
        engine.save_checkpoint(folder) if rank == 1 else engine.train_batch(batches(0, 2, 1))
    return str(caught.value)


def test_a_rank_that_does_not_train_is_named(tmp_path):
    assert all("rank 0" in text and "rank 1" in text for text in run_ranks(_leaves_out, 2, str(tmp_path)))


def _dies(rank, world):
    import os

    engine = _engine(2, {"gradient_accumulation_steps": 2})
    data = batches(0, 2, 1)
    engine.train_batch(data)
    if rank == 1:
        os._exit(3)
    from deepc.errors import CommError

    with pytest.raises(CommError) as caught:
        for _ in range(3):
            engine.train_batch(data)
    return str(caught.value)


def test_a_stage_that_dies_is_named_by_the_others():
    from ranks import RankFailure

    with pytest.raises(RankFailure) as caught:
        run_ranks(_dies, 2)
    assert caught.value.codes == [0, 3], caught.value


class Masked(nn.Linear):
    """One input and one output stay as they are: hooks of the script's mask their gradients."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.weight.data[:, 0] = 0.25
        for p in (self.weight, self.bias):
            mask = torch.ones_like(p)
            mask[..., 0] = 0
            p.register_hook(lambda g, mask=mask: g * mask)


def _masked(rank, world, stages, schedule):
    import deepc
    from deepc.pipe import LayerSpec, PipelineModule

    made = [
        LayerSpec(Embed),
        LayerSpec(Masked),
        LayerSpec(nn.Tanh),
        LayerSpec(Masked),
        LayerSpec(nn.Linear, WIDTH, VOCAB),
    ]
    model = PipelineModule(
        made, num_stages=stages, loss_fn=loss_of, seed_layers=True, partition_method="uniform", schedule=schedule
    )
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": MICRO}
    engine, *_ = deepc.initialize(model=model, config={**config, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}})
    data = batches(0, MICRO, 1)
    losses = [float(engine.train_batch(data)) for _ in range(2)]
    weights = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
    engine.destroy()
    return losses, weights


@pytest.mark.parametrize("schedule", ["zb-h1", pytest.param("zb-v", marks=pytest.mark.full)])
def test_hooks_of_parameters_see_gradients_that_would_wait(schedule):
    want = run_ranks(_masked, 1, 1, "1f1b")[0]
    ranks = run_ranks(_masked, 2, 2, schedule)
    for _, weights in (want, *ranks):
        assert all((w[:, 0] == 0.25).all() for w in weights.values() if w.shape == (WIDTH, WIDTH))
    check(ranks, want)


def test_sums_of_products_that_waited_keep_no_graph():
    """Else what each micro-batch has saved would stay until the batch ends."""
    from deepc.parallel.pipeline.deferred import Deferring, Later

    sums: dict[int, torch.Tensor] = {}

    class Sums:
        def bring(self, index, gradient):
            sums[index] = gradient if index not in sums else sums[index] + gradient

        def bring_product(self, index, a, b):
            self.bring(index, a @ b)

    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    indices = {id(p): i for i, p in enumerate(net.parameters())}
    for _ in range(2):
        later, x = Later(), torch.randn(5, 3)
        with Deferring(indices, Sums(), later):
            out = net(x)
        out.sum().backward()
        later.run()
    assert len(sums) == 4 and not any(t.requires_grad for t in sums.values())
    assert all(p.grad is None for p in net.parameters())


# ---- what is measured ------------------------------------------------------------------------------------------------
def _measures(rank, world, schedule):
    engine = _engine(2, {}, schedule=schedule)
    data = batches(0, MICRO, 1)
    engine.train_batch(data)
    found = engine.measure_batch(data)
    assert len(engine._stages.times) == len(found.schedule.ranks[rank])
    return float(found.loss), str(found.schedule), found.timeline, found.costs, found.predicted


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb-v", marks=pytest.mark.full)])
def test_a_measured_batch_has_the_times_of_every_rank(schedule):
    from deepc.plan.predict import timeline as drawing
    from deepc.plan.schedule import Schedule

    first, second = run_ranks(_measures, 2, schedule)
    assert first == second
    _, text, timeline, costs, predicted = first
    plan = Schedule.parse(text)
    assert len(costs) == plan.stages and [len(r) for r in timeline.spans] == [len(r) for r in plan.ranks]
    ends = {}
    for actions, spans in zip(plan.ranks, timeline.spans):
        assert all(a.end <= b.start for a, b in zip(spans, spans[1:]))
        ends.update((action, span) for action, span in zip(actions, spans))
    for action, span in ends.items():  # what an action works on was made before
        if action.kind == "F" and action.stage:
            assert ends[action._replace(stage=action.stage - 1)].start < span.start
    assert all(c.F > 0 and c.I > 0 and (c.W > 0) == (schedule == "zb-v") for c in costs)
    assert 0 < predicted.makespan <= timeline.makespan * 1.5 and timeline.peak == predicted.peak
    assert "F0" in drawing.svg(plan, timeline, "measured")


def _leaves_times(rank, world, folder):
    config = {"gradient_accumulation_steps": MICRO, "deepc": {"run_dir": folder}} if rank == 0 else {}
    engine = _engine(2, {"gradient_accumulation_steps": MICRO, **config})
    data = batches(0, MICRO, 1)
    for _ in range(4):
        engine.train_batch(data)
    found = engine.measure_batch(data)
    engine.destroy()
    return found.timeline.spans, found.predicted.spans


def test_a_run_folder_gets_the_times_of_its_third_batch_and_of_those_that_are_measured(tmp_path):
    """Though one rank alone knows that there is a folder."""
    import json

    from deepc.observe.report import digest, folder

    spans, predicted = run_ranks(_leaves_times, 2, str(tmp_path))[0]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line.get("event") == "pipeline"] == [3, 5]
    (run,) = folder.read_runs(tmp_path)
    shown = digest.pipeline(run)
    assert run.problems == [] and (shown["step"], shown["ranks"], shown["micro_batches"]) == (5, 2, MICRO)
    for name, rows in (("measured", spans), ("predicted", predicted)):
        assert shown[name]["spans"] == [[[round(1e6 * s.start), round(1e6 * s.end)] for s in row] for row in rows]


# ---- schedules that are given ----------------------------------------------------------------------------------------
def _theirs(rank, world, kind, file):
    """Trains by a schedule that torch.distributed.pipelining made."""
    from deepc.errors import ArgumentError
    from deepc.pipe import PipelineModule
    from deepc.plan.schedule import Schedule
    from torch.distributed import pipelining as peer

    mine = (rank, 3 - rank) if "ZBV" in kind else (rank, rank + 2)
    stages = [peer.PipelineStage(nn.Linear(2, 2), s, 4, torch.device("cpu")) for s in mine]
    getattr(peer, kind)(stages, MICRO)._dump_csv(f"{file}.{rank}", format="compute_only")
    with open(f"{file}.{rank}", encoding="utf-8") as f:
        given = Schedule.parse(f.read())
    with pytest.raises(ArgumentError, match="of 4 stages on 2 ranks; expected one for 1 ranks"):
        PipelineModule(layers(4), num_stages=1, schedule=given)
    return train(rank, world, 2, {}, tied=False, schedule=given), given.check()


@pytest.mark.parametrize(
    "kind",
    [
        "ScheduleInterleavedZeroBubble",
        *(
            pytest.param(f"Schedule{k}", marks=pytest.mark.full)
            for k in ("ZBVZeroBubble", "Interleaved1F1B", "LoopedBFS")
        ),
    ],
)
def test_torchs_schedules_train_as_one_process(kind, tmp_path):
    ranks = run_ranks(_theirs, 2, kind, str(tmp_path / "theirs"))
    check([found for found, _ in ranks], one_process({}, tied=False))
    assert ranks[0][1] == ranks[1][1]


def _another_number(rank, world):
    from deepc.errors import ArgumentError
    from deepc.plan.schedule import Schedule

    gas = {"gradient_accumulation_steps": MICRO}
    with pytest.raises(ArgumentError, match=f"for {MICRO + 1} micro-batches, and a batch has {MICRO}"):
        _engine(2, gas, schedule=Schedule.make("1f1b", stages=2, micro_batches=MICRO + 1))
    engine = _engine(2, gas, schedule=Schedule.make("zb-v", stages=2, micro_batches=MICRO))
    return float(engine.eval_batch(batches(0, MICRO, 1), num_micro_batches=2))


def test_a_given_schedule_for_other_micro_batches_is_refused():
    first, second = run_ranks(_another_number, 2)
    assert first == second > 0


class _Autocast(nn.Linear):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).float()


class _Weighted(nn.Module):
    """A loss with a parameter, and a buffer that differs between ranks."""

    def __init__(self, rank):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("of", torch.tensor(float(rank)))

    def forward(self, out, y):
        return (out * self.scale - y).square().mean() + 0 * self.of


def _of_the_last_stage(rank, world, schedule):
    import deepc
    from deepc.pipe import LayerSpec, PipelineModule

    layers = [LayerSpec(_Autocast, 4, 4) for _ in range(4)]
    plainly = dict(seed_layers=True, partition_method="uniform")
    model = PipelineModule(layers, num_stages=world, loss_fn=_Weighted(rank), schedule=schedule, **plainly)
    draw = torch.Generator().manual_seed(1)
    data = ((torch.randn(2, 4, generator=draw), torch.randn(2, 4, generator=draw)) for _ in range(4))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.5}},
    }
    sample = (torch.zeros(2, 4), torch.zeros(2, 4))
    engine = deepc.initialize(model=model, config=config, sample_batch=sample if schedule == "1f1b" else None)[0]
    losses = [float(engine.train_batch(data)) for _ in range(2)]
    here = [n for n, _ in engine.module.named_parameters() if n.startswith("loss_fn")]
    whole = engine.module_state_dict()
    engine.destroy()
    return losses, here, {n: t.tolist() for n, t in whole.items()}


def test_a_losss_parameters_are_the_last_stages_and_autocast_does_not_wait():
    ((losses, _, whole),) = run_ranks(_of_the_last_stage, 1, "1f1b")
    for schedule in ("1f1b", "zb-h1"):
        first, last = run_ranks(_of_the_last_stage, 2, schedule)
        assert (first[1], last[1]) == ([], ["loss_fn.scale"])
        assert first[0] == last[0] == pytest.approx(losses, rel=1e-5)
        for name, values in whole.items():
            if name != "loss_fn.of":
                torch.testing.assert_close(torch.tensor(last[2][name]), torch.tensor(values), rtol=1e-4, atol=1e-5)
        assert first[2] == last[2] and last[2]["loss_fn.of"] == 1.0


def _copied(rank, world):
    import copy

    from deepc.pipe import PipelineModule, TiedLayerSpec

    tied = TiedLayerSpec("one", nn.Linear, 4, 4, forward_fn=lambda module, x: x @ module.weight)
    model = PipelineModule([tied, tied], num_stages=1)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.tied_modules["one"].weight.zero_()
    return bool(model(torch.ones(1, 4)).any()), bool(other(torch.ones(1, 4)).any())


def test_a_copy_calls_its_own_tied_layers():
    assert run_ranks(_copied, 1) == [(True, False)]
