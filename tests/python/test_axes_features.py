"""What an engine does beside training steps, where ranks share the model: tied parameters that are frozen, checkpoints
of weights alone, averages, writes under GatheredParameters, counts of tokens."""

from __future__ import annotations

import pytest
import test_moe_axes as moe
import torch
import torch.nn.functional as F
from deepc.errors import ArgumentError, MisuseError, UnsupportedError
from deepc.plan.mesh import Mesh
from plainly import batch_loss, in_stages
from ranks import RankFailure, run_quietly
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
    with pytest.raises(UnsupportedError, match=r"no_sync\(\) of a pipeline: .*gradient_accumulation_steps"):
        with engine.no_sync():
            pass
    losses = [float(engine.train_batch(data)) for _ in range(STEPS)]
    assert engine.global_steps == STEPS
    engine.destroy()
    return losses


def test_a_pipeline_owns_the_boundary_of_its_batches():
    first, second = run_quietly(_sets_the_boundary, 2)
    assert first == second


# ---- checkpoints -----------------------------------------------------------------------------------------------------
def _saves(rank, world, stages, folder, trains):
    engine, data = pipeline(world, stages, trains, {"scheduler": WARMUP})
    for _ in range(STEPS):
        engine.train_batch(data)
    engine.save_checkpoint(folder, tag="a")
    weights = engine.module_state_dict()
    engine.destroy()
    return weights


WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": 1e-2, "warmup_type": "linear"}}


def _loads(rank, world, stages, folder, stage, trains, how):
    """(weights after loading, its states' steps, lr, losses from then on, weights at the end)"""
    config = {"zero_optimization": {"stage": stage}, "scheduler": WARMUP}
    engine, data = pipeline(world, stages, trains, config)
    float(engine.train_batch(data))  # states that loading leaves, or doesn't
    path, _ = engine.load_checkpoint(folder, tag="a", **how)
    assert path is not None
    weights, lr = engine.module_state_dict(), engine.get_lr()
    evaluated = float(engine.eval_batch(data))
    losses = [float(engine.train_batch(data)) for _ in range(STEPS)]
    out = weights, lr, engine.global_steps, evaluated, losses, engine.module_state_dict()
    engine.destroy()
    return out


HOW = [{}, {"load_module_only": True}, {"load_optimizer_states": False}]


@pytest.mark.parametrize(
    ("trains", "how"),
    [(False, HOW[1]), *(pytest.param(t, h, marks=pytest.mark.full) for t in (True, False) for h in HOW)],
)
def test_weights_of_another_layout_load_into_a_pipeline(trains, how, tmp_path):
    """All of it, weights alone, or all but the optimizer's states."""
    folder = str(tmp_path)
    saved = run_quietly(_saves, 1, 1, folder, trains)[0]
    (weights, *progress, evaluated, losses, last), *_ = run_quietly(_loads, 1, 1, folder, 0, trains, how)
    same(weights, saved, 0)
    for found in run_quietly(_loads, 4, 2, folder, 3, trains, how):
        same(found[0], saved, 0)
        assert list(found[1:3]) == progress
        assert [found[3], *found[4]] == pytest.approx([evaluated, *losses], rel=1e-5)
        same(found[5], last, 1e-4)


def _takes_weights(rank, world):
    engine, data = pipeline(world, world)
    given = {n: t + 1 for n, t in engine.module_state_dict().items()}
    engine.load_module_state_dict(given)
    found = engine.module_state_dict()
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"9\.up\.weight\""):
        engine.load_module_state_dict({**given, "9.up.weight": torch.zeros(1)})
    loss = float(engine.eval_batch(data))
    engine.destroy()
    assert all(torch.equal(found[n], t) for n, t in given.items())
    return loss


def test_the_weights_of_the_whole_model_load_into_its_stages():
    (want,) = run_quietly(_takes_weights, 1)
    assert run_quietly(_takes_weights, 2) == pytest.approx([want, want], rel=1e-6)


# ---- every axis: the model of test_moe_axes.py -----------------------------------------------------------------------
def spread(rank, sizes, stage, **more):
    """(engine, a function that trains one batch)"""
    import deepc
    from deepc.parallel.sequence import sequence_group

    mesh = Mesh.of(sizes)
    group = sequence_group(mesh.sp, tensor=mesh.tp) if mesh.sp > 1 else None
    at = mesh.coordinates(rank)
    draws = moe.samples(at.dp, mesh.dp)
    data = (tuple(t.chunk(mesh.sp, 1)[at.sp] for t in pair) for pair in draws)
    specs = {"partition_config": {"use_default_specs": False, "layer_specs": moe.RULES + moe.CUT_EXPERTS}}
    micro = moe.MICRO // mesh.dp
    engine, *_ = deepc.initialize(
        model=moe.model_of(rank, mesh, moe.ALL_PLACES, group),
        sample_batch=next(data) if mesh.pp > 1 else None,
        config={
            "train_micro_batch_size_per_gpu": moe.SAMPLES,
            "gradient_accumulation_steps": micro,
            "sequence_parallel_size": mesh.sp,
            "zero_optimization": {"stage": stage},
            "optimizer": SGD,
            **({"tensor_parallel": {"autotp_size": mesh.tp, **specs}} if mesh.tp > 1 else {}),
            **in_stages(mesh.pp),
            **more,
        },
    )
    cast = (tuple(t.to(engine.dtype) for t in pair) for pair in data)
    return engine, lambda: batch_loss(engine, micro, lambda: engine(*next(cast)), cast, engine.everyone)


def whole(engine):
    return {n: t.detach().float().clone() for n, t in engine.module_state_dict().items()}


# ---- averages --------------------------------------------------------------------------------------------------------
def _averages(rank, world, sizes, stage, folder):
    import deepc

    engine, train = spread(rank, sizes, stage)
    average = deepc.EMA(engine, 0.5)
    want = whole(engine)
    for _ in range(STEPS):
        train()
        assert average.update()
        want = {n: t.lerp(now, 0.5) for (n, t), now in zip(want.items(), whole(engine).values())}
    same(found := average.state_dict(), want)
    live = whole(engine)
    with average.applied():
        same(whole(engine), want)
    same(whole(engine), live, 0)
    engine.save_checkpoint(folder, tag="a")
    if engine.part is not None:
        with pytest.raises(UnsupportedError, match=r"as_module=True\) of a pipeline .*eval_batch"):
            deepc.EMA(engine, 0.5, as_module=True, label="other")
    else:
        with torch.no_grad():
            module = deepc.EMA(engine, 0.0, as_module=True, label="other").module
            x, y = next(moe.samples())
            at = engine.mesh.coordinates(rank)
            # contiguous: products of views with gaps round otherwise on some processors
            x, y = (t.chunk(engine.mesh.sp, 1)[at.sp].contiguous() for t in (x, y))
            assert torch.equal(module(x, y), engine(x, y))
    engine.destroy()
    return found


def _averages_again(rank, world, sizes, stage, folder):
    import deepc

    engine, train = spread(rank, sizes, stage)
    average = deepc.EMA(engine, 0.5)
    engine.load_checkpoint(folder, tag="a")
    found = average.state_dict()
    assert average.updates == STEPS
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("sizes", "stage"),
    [
        ({"pp": 2, "dp": 2, "ep": 2}, 0),
        ({"sp": 2}, 1),
        pytest.param({"dp": 2, "tp": 2}, 3, marks=pytest.mark.full),
        *(pytest.param({"dp": 2, "ep": 2, **s}, 1, marks=pytest.mark.full) for s in ({}, {"tp": 2}, {"sp": 2})),
    ],
    ids=str,
)
def test_an_average_is_of_the_whole_model(sizes, stage, tmp_path):
    """All ranks have the averages of all stages, shards and experts, and another layout goes on with them."""
    ranks = run_quietly(_averages, size_of(sizes), sizes, stage, str(tmp_path))
    for found in (*ranks[1:], *run_quietly(_averages_again, 1, {}, 0, str(tmp_path))):
        same(found, ranks[0], 0)


def _exports(rank, world, sizes, stage, folder):
    """Weights and averages of an engine, and of its checkpoint."""
    import deepc

    engine, train = spread(rank, sizes, stage, bf16={"enabled": True})
    average = deepc.EMA(engine, 0.5)
    for _ in range(STEPS):
        train()
        average.update()
    engine.save_checkpoint(f"{folder}/saved")
    written = [deepc.export(s, f"{folder}/{n}") for n, s in (("weights", engine), ("averages", average))]
    assert all(written) == (rank == 0) and len(set(map(tuple, written))) == 1
    deepc.export(engine, f"{folder}/short", dtype="bf16")
    if engine.mesh.sp == 1:
        with pytest.raises(UnsupportedError, match="int8 does not exist: no rank has all layers"):
            deepc.export(engine, f"{folder}/int8", dtype="int8")
    engine.destroy()


@pytest.mark.parametrize(
    ("sizes", "stage"),
    [
        ({"pp": 2, "dp": 2, "ep": 2}, 1),
        pytest.param({"pp": 2, "tp": 2}, 3, marks=pytest.mark.full),
        pytest.param({"dp": 2, "tp": 2, "ep": 2}, 2, marks=pytest.mark.full),
        pytest.param({"dp": 2, "sp": 2}, 3, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_an_export_is_of_the_whole_model(sizes, stage, tmp_path):
    """Bit for bit what the checkpoint has, from which one process exports."""
    import deepc
    from deepc.checkpoint import SafetensorsFile

    def read(folder):
        with SafetensorsFile(str(tmp_path / folder / "model.safetensors")) as f:
            return {n: f.tensor(n).clone() for n in f.keys()}

    run_quietly(_exports, size_of(sizes), sizes, stage, str(tmp_path))
    for name, average in (("weights", None), ("averages", "ema")):
        deepc.export(tmp_path / "saved", tmp_path / f"{name} of the checkpoint", average=average)
        same(read(name), read(f"{name} of the checkpoint"), 0)
    same(read("short"), {n: t.bfloat16() for n, t in read("weights").items()}, 0)


def _exports_a_language_model(rank, world, sizes, folder):
    import deepc
    import transformers as t

    torch.manual_seed(3)
    model = t.LlamaForCausalLM(
        t.LlamaConfig(
            hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCAB,
            num_hidden_layers=4, tie_word_embeddings=True,
        )
    )  # fmt: skip
    want = {n: p.detach().clone() for n, p in model.state_dict().items()}
    ids = torch.arange(8).view(1, 8)
    engine, *_ = deepc.initialize(
        model=model,
        sample_batch={"input_ids": ids, "labels": ids},
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": SGD,
            **({"tensor_parallel": {"autotp_size": sizes["tp"]}} if "tp" in sizes else {}),
            **in_stages(sizes.get("pp", 1)),
        },
    )
    deepc.export(engine, folder)
    engine.destroy()
    return want


@pytest.mark.parametrize("sizes", [{"pp": 2}, pytest.param({"tp": 2}, marks=pytest.mark.full)], ids=str)
def test_from_pretrained_loads_what_a_cut_model_exports(sizes, tmp_path):
    t = pytest.importorskip("transformers")
    want, _ = run_quietly(_exports_a_language_model, 2, sizes, str(tmp_path))
    found = t.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(found) is t.LlamaForCausalLM and found.config.tie_word_embeddings
    same(found.state_dict(), want, 0)


def size_of(sizes):
    return Mesh.of({"dp": 1, **sizes}).size


# ---- writes ----------------------------------------------------------------------------------------------------------
def _writes(rank, world, sizes):
    """This rank's values of what it has alike with others, before and after rank 0 has written, and after a step."""
    import deepc

    engine, train = spread(rank, sizes, 3)
    alike = {
        n: p for n, p in engine.module.named_parameters() if id(p) not in engine.cuts and id(p) not in engine.spread
    }
    before = {n: p.detach().clone() for n, p in alike.items()}
    with deepc.zero.GatheredParameters(engine.module, modifier_rank=0):
        if rank == 0:
            for p in engine.module.parameters():
                p.data.add_(1)
    after = {n: p.detach().clone() for n, p in alike.items()}
    masters = {n: engine.full_fp32_param(p).clone() for n, p in alike.items()}
    same(masters, after, 0)
    train()
    last = {n: p.detach().clone() for n, p in alike.items()}
    engine.destroy()
    return before, after, last


@pytest.mark.parametrize(
    "sizes",
    [
        {"dp": 2, "ep": 2},
        {"dp": 2, "tp": 2},
        *(pytest.param({"dp": 2, "ep": 2, **s}, marks=pytest.mark.full) for s in ({"tp": 2}, {"sp": 2})),
    ],
    ids=str,
)
def test_what_rank_0_writes_is_written_wherever_it_is(sizes):
    ranks = run_quietly(_writes, size_of(sizes), sizes)
    assert {"first.weight", "blocks.0.norm1.weight"} <= ranks[0][0].keys()
    for before, after, last in ranks:
        same(after, {n: t + 1 for n, t in before.items()}, 0)
        same(last, ranks[0][2], 0)


# ---- ranks that share samples ----------------------------------------------------------------------------------------
class Tokens(nn.Module):
    """A loss of tokens, whole or of this rank's positions. seen: what it was given."""

    def __init__(self, group=None):
        super().__init__()
        self.words, self.out = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self._group, self.seen = group, []

    def forward(self, input_ids, labels):
        from deepc.parallel.sequence import cross_entropy

        self.seen.append(input_ids.clone())
        logits = self.out(self.down(torch.tanh(self.up(self.words(input_ids)))))
        return loss_of(logits, labels) if self._group is None else cross_entropy(logits, labels, self._group)


CUT = [
    {"patterns": [r"up$"], "partition_type": "column"},
    {"patterns": [r"down$"], "partition_type": "row"},
]
SAMPLES = torch.randint(0, VOCAB, (8, POSITIONS), generator=torch.Generator().manual_seed(6))


def _trains_on_samples(rank, world, sizes, more):
    """(samples that came, as the model saw them; the average gradients of the first step; the meter's last record)"""
    import deepc
    from deepc.parallel.sequence import sequence_group

    mesh = Mesh.of({"dp": 1, **sizes})
    at = mesh.coordinates(rank)
    torch.manual_seed(2)
    model = Tokens(sequence_group(mesh.sp, tensor=mesh.tp) if mesh.sp > 1 else None)
    specs = {"partition_config": {"use_default_specs": False, "layer_specs": CUT}}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2 // mesh.dp,
        "sequence_parallel_size": mesh.sp,
        "optimizer": SGD,
        **({"tensor_parallel": {"autotp_size": mesh.tp, **specs}} if mesh.tp > 1 else {}),
        **more,
    }
    engine, _, loader, _ = deepc.initialize(model=model, config=config, training_data=list(SAMPLES))
    grads, records = {}, []
    for ids in loader:
        mine = ids.chunk(mesh.sp, 1)[at.sp]
        engine.backward(engine(mine, mine))
        if engine.is_gradient_accumulation_boundary() and not grads:
            grads = {n: engine.full_grad(p).clone() for n, p in engine.module.named_parameters()}
        if engine.step().applied:
            records.append(engine.monitor.last)
    engine.destroy()
    return (at.dp, at.sp, at.tp), model.seen, grads, records


def of_samples(sizes, more):
    return run_quietly(_trains_on_samples, size_of(sizes), sizes, more)


@pytest.mark.parametrize(
    "sizes", [{"sp": 2}, *(pytest.param({"dp": 2, **s}, marks=pytest.mark.full) for s in ({}, {"sp": 2}))], ids=str
)
def test_a_sum_of_gradients_is_over_samples(sizes):
    """As many times the mean as there are data-parallel ranks, whatever shares their sequences."""
    ((_, _, want, _),) = of_samples({}, {})
    for _, _, grads, _ in of_samples(sizes, {"gradient_allreduce_op": "sum"}):
        same(grads, {n: t * sizes.get("dp", 1) for n, t in want.items()}, 1e-5)


def test_ranks_of_a_sequence_get_the_same_samples_where_the_layout_is_deterministic():
    layout = {"deepc": {"deterministic": "layout"}}
    ((_, want, _, _),) = of_samples({}, layout)
    ranks = of_samples({"sp": 2}, layout)
    assert len(want) == 4
    for i, ids in enumerate(want):
        assert torch.equal(torch.cat([seen[i] for _, seen, _, _ in ranks], 1), ids)


def test_a_curriculum_by_length_is_of_whole_sequences():
    schedule = {"total_curriculum_step": 2, "difficulty_step": 2}
    curriculum = {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": 4,
        "max_difficulty": POSITIONS,
        "schedule_type": "fixed_linear",
        "schedule_config": schedule,
    }
    more = {"curriculum_learning": curriculum, "deepc": {"curriculum": "truncate"}}
    ((_, want, grads, _),) = of_samples({}, more)
    ranks = of_samples({"sp": 2}, more)
    assert {ids.shape[1] for ids in want} == {6, POSITIONS}
    for i, ids in enumerate(want):
        assert torch.equal(torch.cat([seen[i] for _, seen, _, _ in ranks], 1), ids)
    for _, _, found, _ in ranks:
        same(found, grads, 1e-5)
    schedule["difficulty_step"], curriculum["min_difficulty"] = 1, 3
    with pytest.raises(RankFailure, match="comes to 5 positions, which 2 ranks that share sequences do not divide"):
        of_samples({"sp": 2}, more)


@pytest.mark.parametrize(
    "sizes", [{"tp": 2}, {"sp": 2}, pytest.param({"dp": 2, "tp": 2}, marks=pytest.mark.full)], ids=str
)
def test_a_token_counts_once(sizes):
    ((_, _, _, want),) = of_samples({}, {})
    assert [r["tokens"] for r in want] == [4 * POSITIONS, 8 * POSITIONS]
    for _, _, _, found in of_samples(sizes, {}):
        assert [r["tokens"] for r in found] == [r["tokens"] for r in want]
        for record, one in zip(found, want):
            assert record["tflops"] * record["time_s"] == pytest.approx(one["tflops"] * one["time_s"], rel=1e-6)
            assert record["tokens_per_s"] == pytest.approx(4 * POSITIONS / record["time_s"])


# ---- replicas --------------------------------------------------------------------------------------------------------
class Mixture(nn.Module):
    """Experts of a width that 2 ranks share unevenly, among layers that they have alike."""

    def __init__(self, ep):
        from deepc.parallel.expert import MoE

        super().__init__()
        expert = nn.Sequential(nn.Linear(WIDTH, 13), nn.GELU(), nn.Linear(13, WIDTH))
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.moe = MoE(WIDTH, expert, 2, ep, k=1, enable_expert_tensor_parallelism=True)

    def forward(self, x):
        out, aux, _ = self.moe(torch.tanh(self.first(x)))
        return self.last(out).square().mean() + 0.1 * aux


def _compares_replicas(rank, world, ep, stage):
    """(steps at which replicas were compared, what the error said once one had been changed)"""
    import deepc
    from test_tensor_whole import Mpu

    deepc.init_distributed()
    torch.manual_seed(0)
    config = {"train_batch_size": 8, "zero_optimization": {"stage": stage}, "optimizer": SGD}
    engine, *_ = deepc.initialize(model=Mixture(ep), config=config, mpu=(mpu := Mpu(2)))
    assert engine.mesh.shape == (1, 2, 1, 2) and engine.mesh.ep == ep
    draw, looked, told = torch.Generator().manual_seed(7), [], ""
    look = engine.unequal_replicas
    engine.unequal_replicas = lambda steps: (looked.append(steps), look(steps))
    for step in range(5):
        if step == 4 and stage < 3 and rank == 1:
            engine.module.last.bias.data.add_(1)
        x = torch.randn(8, 4, WIDTH, generator=draw).chunk(2)[mpu.get_data_parallel_rank()]
        try:
            loss = engine(x)
        except MisuseError as exc:
            told = str(exc)
            break
        engine.backward(loss)
        engine.step()
    engine.destroy()
    return looked, told


@pytest.mark.parametrize(
    ("ep", "stage"), [(1, 1), *(pytest.param(ep, s, marks=pytest.mark.full) for ep, s in ((1, 3), (2, 0), (2, 3)))]
)
def test_replicas_are_compared_where_cut_experts_make_other_shards_of_states(ep, stage):
    """Ranks with more of an expert own other elements of what all have alike; that is no difference."""
    for looked, told in run_quietly(_compares_replicas, 4, ep, stage):
        assert looked == [0, 1, 2, 3, 4]
        assert stage == 3 or "last.bias was equal on the ranks that share the model, and after 4 steps differs" in told
