"""The memory plan of pipelines: what is added up over stages, what initialize says and refuses on ranks, and what is
not there. Peaks against what the kernel measures are in test_estimate.py."""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace

import deepc
import memory_runs
import pytest
import torch
import torch.nn.functional as F
from deepc.config.tree import Config
from deepc.errors import ArgumentError, ConfigError, UnsupportedError
from deepc.parallel.simulate import onpaper
from deepc.parallel.simulate.stages import StageOnPaper
from deepc.plan.mesh import Mesh
from deepc.plan.predict.estimate import plan_text
from deepc.plan.schedule import Order, Schedule
from ranks import run_ranks
from tiny import Block, TinyGPT, config, make_batch, make_model
from torch import nn

SHAPE = dict(width=128, layers=4, context=64)
MICRO = 8


def pipeline(stage: int = 0, schedule: str = "1f1b", **extra) -> dict:
    asked = {"pipeline": {"stages": 2}, "deepc": {"pipeline": {"schedule": schedule}}}
    return config(stage, micro=MICRO, gas=4, **asked, **extra)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return make_batch(0, MICRO, context=SHAPE["context"])


def estimate(cfg: dict, ranks: int = 2, **options):
    return deepc.estimate(
        lambda: make_model(**SHAPE), cfg, options.pop("batch", batch()), ranks_per_node=ranks, **options
    )


CONTROL = "control of all ranks"


def shared_by(e) -> dict[str, int]:
    """Bytes of a node's shared memory by the row that has them."""
    return {r.name: r.shared for r in e.rows if r.shared}


class Known(TinyGPT):
    @property
    def dummy_inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        return make_batch(0, 2, context=8)


TENSORS = {
    "autotp_size": 2,
    "partition_config": {
        "layer_specs": [
            {"patterns": [r".*\.up$"], "partition_type": "column"},
            {"patterns": [r".*\.down$"], "partition_type": "row"},
        ]
    },
}


# ---- deepc.estimate --------------------------------------------------------------------------------------------------
@pytest.mark.full  # test_a_model_as_layers_has_a_plan_as_well is of every push
def test_the_figures_of_stages_add_up() -> None:
    told = estimate(pipeline())
    whole = estimate(config(0, micro=MICRO, gas=4), ranks=1)
    assert (told.world, told.ranks_per_node, told.known, len(told.stages)) == (2, 2, True, 2)
    assert told.parameters == whole.parameters
    assert told.rank_peak == max(told.stages) and told.node_peak == sum(told.stages) + told.shared
    assert told.notes[0].startswith("stages: blocks.0 to ")
    text = str(told)
    assert f"in pipelines of 2, stage {told.stages.index(told.rank_peak)} of which is shown" in text
    assert f"ranks of each stage: {told.stages[0] / 2**20:.1f}, {told.stages[1] / 2**20:.1f} MiB" in text


@pytest.mark.full
def test_data_parallel_ranks_of_a_stage_share_its_states() -> None:
    alone, shared = estimate(pipeline(2), ranks=2), estimate(pipeline(2), ranks=4)
    assert shared_by(alone) == {CONTROL: alone.shared}
    assert shared.shared > alone.shared
    assert set(shared_by(shared)) == {CONTROL, "gradient buckets and control"}  # the buckets of two groups
    assert sum(shared_by(shared).values()) == shared.shared
    assert shared.node_peak == 2 * sum(shared.stages) + shared.shared
    states = [{r.name: r.host for r in e.rows}["optimizer states"] for e in (alone, shared)]
    assert states[1] < 0.75 * states[0]
    over_nodes = estimate(pipeline(2), ranks=2, nodes=2)
    assert (over_nodes.nodes, over_nodes.world) == (2, 4)
    assert over_nodes.node_peak == 2 * over_nodes.rank_peak + over_nodes.shared  # a stage on each


@pytest.mark.full
def test_tensor_parallel_ranks_share_a_stage() -> None:
    """Two thirds of a block are cut in two."""
    whole, cut = estimate(pipeline(), ranks=2), estimate(pipeline(tensor_parallel=TENSORS), ranks=4)
    assert (cut.world, cut.tensor, cut.parameters) == (4, 2, whole.parameters)
    assert len(cut.stages) == 2 and cut.rank_peak == max(cut.stages)
    assert 1.2 < cut.between_steps / whole.between_steps < 1.5  # twice as many ranks, each with two thirds
    assert cut.activations < 0.85 * whole.activations
    sums = shared_by(cut)["sums over tensor-parallel ranks"]
    assert cut.shared == sums + shared_by(cut)[CONTROL] > sums > 0  # a group's for each stage
    assert cut.node_peak == 2 * sum(cut.stages) + cut.shared
    doubled = estimate(pipeline(2, tensor_parallel=TENSORS), ranks=8)
    assert shared_by(doubled)["sums over tensor-parallel ranks"] == 2 * sums
    assert doubled.between_steps < 1.4 * cut.between_steps  # twice the parameters, once the states
    over_nodes = estimate(pipeline(tensor_parallel=TENSORS), ranks=2, nodes=2)  # a stage on each
    assert over_nodes.node_peak == 2 * over_nodes.rank_peak + over_nodes.shared
    assert over_nodes.shared == sums // 2 + shared_by(over_nodes)[CONTROL]


def small_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = dict(vocab_size=2048, n_positions=32, n_embd=64, n_layer=6, n_head=2)
    return GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0, use_cache=False))


def _cut_by_the_engine(rank: int, world: int, cfg: dict) -> str:
    engine, *_ = deepc.initialize(model=small_gpt2(), config=cfg)
    text = engine.part.describe()
    engine.destroy()
    return text


@pytest.mark.full
def test_a_model_is_cut_as_initialize_cuts_it() -> None:
    """Inside of a block: whether a place is one is seen by values, which the estimate gives to a block of each kind."""
    pytest.importorskip("transformers")
    x = torch.zeros(2, 16, dtype=torch.int64)
    cfg = config(0, micro=2, gas=2, pipeline={"stages": 2})
    told = deepc.estimate(small_gpt2(), cfg, dict(input_ids=x, labels=x), ranks_per_node=2)
    assert " before " in told.notes[0]
    assert set(run_ranks(_cut_by_the_engine, 2, args=(cfg,))) == {told.notes[0].removeprefix("stages: ")}


def test_a_block_that_is_cut_can_be_copied() -> None:
    """As the estimate does to see where it can be cut inside."""
    model = make_model(**SHAPE)
    onpaper.divide(model, Config.load(pipeline(tensor_parallel=TENSORS), world_size=4), 1)
    x = torch.randn(2, 8, SHAPE["width"])
    block, copied = model.blocks[0], copy.deepcopy(model.blocks[0])
    assert copied.up.weight.shape == (2 * SHAPE["width"], SHAPE["width"])
    assert copied.up.region is copied.down.region is not block.up.region
    assert torch.equal(copied(x), block(x))


def note_of(told, *words: str) -> str:
    return next(n for n in told.notes if all(w in n for w in words))


@pytest.mark.full
def test_a_budget_is_for_all_micro_batches_in_flight() -> None:
    """The first rank of 1F1B holds two of them, the second one; GPipe has all four on both."""
    kept = estimate(pipeline(schedule="gpipe"))
    budget = {"activation_checkpointing": {"budget": "24MB"}}
    again, one = estimate(pipeline(schedule="gpipe", **budget)), estimate(pipeline(**budget))
    assert again.activations < 0.75 * kept.activations
    assert "4 micro-batches at a time" in note_of(again, "stage 0", "recomputed")
    assert "4 micro-batches at a time" in note_of(again, "stage 1", "recomputed")
    assert "2 micro-batches at a time" in note_of(one, "stage 0", "recomputed")
    assert "at a time" not in note_of(one, "stage 1", "recomputed")


@pytest.mark.full
def test_what_waits_for_backward_follows_the_schedule() -> None:
    """1F1B keeps 2 micro-batches on the first of 2 ranks, GPipe all 4."""
    one, all_ = estimate(pipeline()), estimate(pipeline(schedule="gpipe"))
    assert all_.stages[0] > one.stages[0] and all_.activations > 1.6 * one.activations


GIVEN = Schedule.parse(str(Schedule.make("1f1b", stages=2, micro_batches=64)))


@pytest.mark.parametrize("schedule, enough", [("1f1b", 4), ("zb-h1", 4), ("gpipe", 64), (GIVEN, 64)])
def test_a_dry_run_takes_the_micro_batches_that_matter(schedule: str | Schedule, enough: int) -> None:
    """What 1F1B holds at once does not grow with them; what GPipe holds does. A schedule that was given is for its
    number alone: a dry run with fewer failed by that, and initialize planned no activations."""
    part = SimpleNamespace(order=Order.of(schedule, 2), mesh=Mesh(pp=2), ties=[], elsewhere=frozenset())
    for rank in range(2):
        assert StageOnPaper(part, rank, 64, 1, []).micro_batches == enough


def test_the_plan_in_words() -> None:
    """Of a model that brings inputs along, as transformers' do; others need a sample."""
    text = plan_text(lambda: Known(**SHAPE), pipeline(), ranks_per_node=2, cut=onpaper.cut)
    assert text.startswith("Pipelines of 2 ranks: blocks.0") and "Stage 1, and its data-parallel ranks:" in text
    with pytest.raises(ArgumentError, match="needs sample_batch="):
        plan_text(lambda: make_model(**SHAPE), pipeline(), ranks_per_node=2, cut=onpaper.cut)


def test_a_tie_may_be_frozen() -> None:
    """No gradient of it goes from stage to stage: a KeyError of the dry run, and initialize planned no peak."""

    def frozen() -> nn.Module:
        model = make_model(**SHAPE)
        model.tok.requires_grad_(False)
        return model

    told = deepc.estimate(frozen, pipeline(), batch(), ranks_per_node=2)
    assert told.known and told.parameters == sum(p.numel() for p in frozen().parameters() if p.requires_grad)


def test_what_is_not_there_says_so() -> None:
    with pytest.raises(ConfigError, match=r"activation_checkpointing\.budget = \d+ bytes is less than"):
        estimate(pipeline(activation_checkpointing={"budget": "1MB"}))
    with pytest.raises(UnsupportedError, match="share nodes unevenly"):
        estimate(pipeline(tensor_parallel=TENSORS), ranks=3, nodes=4)
    with pytest.raises(UnsupportedError, match="pipelines are for CPUs only"):
        estimate(pipeline(), device="cuda")
    with pytest.raises(UnsupportedError, match="share nodes unevenly"):
        estimate(pipeline(), ranks=4, nodes=3)


# ---- deepc.initialize ------------------------------------------------------------------------------------------------
def planned(rank: int, world: int, cfg: dict) -> dict:
    engine = deepc.initialize(model=make_model(**SHAPE), config=cfg, sample_batch=batch())[0]
    told = engine.memory_plan
    if told.known:
        assert engine.train_batch(itertools.repeat(batch())).isfinite()
    engine.destroy()
    return told.to_dict()


def test_initialize_with_a_sample_batch_knows_the_peak_of_each_stage() -> None:
    each = run_ranks(planned, 4, args=(pipeline(2),))
    for told in each:
        assert told["known"] and told["fits"] and told["available"] > told["node_peak"]
        assert (told["world"], told["stages"], told["shared"]) == (4, each[0]["stages"], each[0]["shared"])
        assert told["node_peak"] == sum(e["rank_peak"] for e in each) + told["shared"]
        assert sum(r["shared"] for r in told["rows"]) == told["shared"]
    assert each[0]["stages"] == (max(e["rank_peak"] for e in each[:2]), max(e["rank_peak"] for e in each[2:]))


def planned_and_chosen(rank: int, world: int, cfg: dict) -> tuple[dict, str]:
    engine = deepc.initialize(model=make_model(**SHAPE), config=cfg, sample_batch=batch())[0]
    for _ in range(2):  # in the second the choice is made for all together
        engine.train_batch(itertools.repeat(batch()))
    told, chosen = engine.memory_plan.to_dict(), engine.recomputation.in_words()
    engine.destroy()
    return told, chosen


@pytest.mark.full
def test_the_plan_knows_what_a_budget_will_recompute() -> None:
    """Blocks are alike: whatever they take, as few as can be are recomputed."""
    cfg = pipeline(schedule="gpipe", activation_checkpointing={"budget": "24MB"})
    for told, chosen in run_ranks(planned_and_chosen, 2, args=(cfg,)):
        assert told["known"] and told["stages"], told["notes"]
        assert any(n.endswith(f": {chosen}") for n in told["notes"]), (chosen, told["notes"])


@pytest.mark.full
def test_initialize_knows_the_peak_of_tensor_parallel_stages() -> None:
    each = run_ranks(planned, 4, args=(pipeline(tensor_parallel=TENSORS),))
    whole = run_ranks(planned, 2, args=(pipeline(),))
    for told in each:
        assert told["known"] and (told["world"], told["stages"]) == (4, each[0]["stages"])
        assert told["node_peak"] == sum(e["rank_peak"] for e in each) + told["shared"]
    assert max(e["activations"] for e in each) < 0.9 * max(e["activations"] for e in whole)


def refused(rank: int, world: int) -> str:
    return memory_runs.refusal(32 << 20, model=make_model(**SHAPE), config=pipeline(), sample_batch=batch())


def test_initialize_refuses_on_every_rank() -> None:
    for text in run_ranks(refused, 2):
        assert "the run needs " in text and "in pipelines of 2" in text and "more stages" in text, text


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(61, SHAPE["width"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tok(x)


def as_layers(rank: int, world: int, given_as_modules: bool, interval: int = 0) -> dict:
    from deepc.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    width = SHAPE["width"]
    blocks = [Block(width) if given_as_modules else LayerSpec(Block, width) for _ in range(4)]
    model = PipelineModule(
        [
            TiedLayerSpec("embed", Embed),
            *blocks,
            TiedLayerSpec("embed", Embed, forward_fn=lambda m, h: h @ m.tok.weight.t()),
        ],
        num_stages=2,
        loss_fn=lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()),
    )
    cfg = config(1, micro=MICRO, gas=4)
    if interval:
        cfg["pipeline"] = {"activation_checkpoint_interval": interval}
    engine = deepc.initialize(model=model, config=cfg, sample_batch=batch())[0]
    told = engine.memory_plan
    assert engine.train_batch(itertools.repeat(batch())).isfinite()
    engine.destroy()
    return told.to_dict()


def test_a_model_as_layers_has_a_plan_as_well() -> None:
    kept = run_ranks(as_layers, 2, args=(False,))
    again = run_ranks(as_layers, 2, args=(False, 1))
    for told, less in zip(kept, again):
        assert told["known"] and less["known"], told["notes"]
        assert told["activations"] > 1.5 * less["activations"]
    for told in run_ranks(as_layers, 2, args=(True,)):
        assert not told["known"]  # rank 0 can't make what rank 1 has, nor does rank 1 see what it will get
        assert any("give it as a LayerSpec" in note for note in told["notes"]), told["notes"]


def asked_of_layers(rank: int, world: int) -> str:
    from deepc.pipe import LayerSpec, PipelineModule

    model = PipelineModule([LayerSpec(nn.Linear, 4, 4) for _ in range(2)], num_stages=2)
    try:
        deepc.estimate(model, config(1, micro=2), (torch.ones(2, 4), torch.ones(2, 4)), ranks_per_node=2)
    except UnsupportedError as exc:
        return str(exc)
    return ""


def test_an_estimate_of_a_model_as_layers_sends_to_initialize() -> None:
    for text in run_ranks(asked_of_layers, 2):
        assert "initialize(sample_batch=" in text
