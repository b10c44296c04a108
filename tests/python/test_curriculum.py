"""Curriculum learning: DeepSpeed's schedules value for value, and what a step gets by them."""

from __future__ import annotations

import copy
import dataclasses
import math

import deepc
import numpy as np
import pytest
import tiny
import torch
from deepc.config.curriculum import CurriculumScheduler
from deepc.config.tree import Config
from deepc.engine.states.curriculum import truncated
from deepc.errors import ArgumentError, ConfigError
from ranks import run_ranks as _run_ranks
from test_engine import same_bits
from torch import nn

LINEAR = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 4,
    "max_difficulty": 16,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 6, "difficulty_step": 4},
}


def run_ranks(fn, world, *args):
    return _run_ranks(fn, world, args=args, env={"DEEPC_LOG_LEVEL": "WARNING"})


# ---- schedules -------------------------------------------------------------------------------------------------------
def test_values_of_deepspeeds_own_tests():
    discrete = CurriculumScheduler(
        {
            "min_difficulty": 1,
            "max_difficulty": 5,
            "schedule_type": "fixed_discrete",
            "schedule_config": {"difficulty": [1, 2, 3, 4, 5], "max_step": [2, 4, 6, 8]},
        }
    )
    assert [discrete.update_difficulty(s) for s in range(1, 12)] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 5]
    linear = CurriculumScheduler(
        {
            "min_difficulty": 2,
            "max_difficulty": 10,
            "schedule_type": "fixed_linear",
            "schedule_config": {"total_curriculum_step": 8, "difficulty_step": 2},
        }
    )
    assert [linear.update_difficulty(s) for s in range(1, 11)] == [2, 4, 4, 6, 6, 8, 8, 10, 10, 10]


@pytest.mark.parametrize(("kind", "degree"), [("fixed_linear", 1), ("fixed_root", 2), ("fixed_root", 3.5)])
def test_roots_are_the_formula(kind, degree):
    least, most, total, step = 64, 2048, 1000, 8
    how = {"total_curriculum_step": total, "difficulty_step": step}
    schedule = CurriculumScheduler(
        {
            "min_difficulty": least,
            "max_difficulty": most,
            "schedule_type": kind,
            "schedule_config": {**how, **({"root_degree": degree} if kind == "fixed_root" else {})},
        }
    )
    steps = np.arange(1, total + 100, dtype=np.float64)
    want = np.floor(np.power(steps / total, 1.0 / degree) * (most - least) + least)
    want = np.minimum(want - want % step, most)
    got = [schedule.update_difficulty(int(s)) for s in steps]
    off = [s for s, a, b in zip(steps, got, want) if a != b and not math.isclose(a, b, abs_tol=step)]
    assert not off and sum(a != b for a, b in zip(got, want)) <= 1, "but for a rounding of the power"
    assert got[-1] == most and sorted(got) == got


def test_custom_schedules_and_states():
    schedule = CurriculumScheduler({"min_difficulty": 1, "max_difficulty": 9, "schedule_type": "custom"})
    with pytest.raises(ConfigError, match="has no schedule yet"):
        schedule.update_difficulty(1)
    schedule.set_custom_get_difficulty(lambda step: 3 * step)
    assert [schedule.update_difficulty(s) for s in (1, 2, 3, 1)] == [3, 6, 9, 9], "the most stays"
    state = copy.deepcopy(schedule.get_state())
    assert state["current_difficulty"] == schedule.get_current_difficulty() == 9
    schedule.set_current_difficulty(2)
    schedule.set_state(state)
    assert schedule.get_current_difficulty() == 9


BAD = [
    ({"min_difficulty": None}, "needs min_difficulty"),
    ({"max_difficulty": 2}, "below min_difficulty"),
    ({"schedule_config": None}, "must be an object"),
    ({"schedule_config": {"difficulty_step": 4}}, "schedule_config.total_curriculum_step"),
    ({"schedule_config": {"total_curriculum_step": 0, "difficulty_step": 4}}, "integer >= 1"),
    ({"schedule_type": "fixed_root"}, "schedule_config.root_degree"),
    ({"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [1], "max_step": [1]}}, "needs one less"),
]


@pytest.mark.parametrize(("change", "text"), BAD)
def test_what_is_wrong_is_told_when_the_configuration_is_read(change, text):
    raw = {"train_batch_size": 1, "curriculum_learning": {**LINEAR, **change}}
    with pytest.raises(ConfigError, match=text) as told:
        Config.load(raw, world_size=1)
    assert "curriculum_learning" in str(told.value)
    metrics = {"curriculum_metrics": {"len": {**LINEAR, **change}}, "enabled": True}
    sampling = {"enabled": True, "data_sampling": {"enabled": True, "curriculum_learning": metrics}}
    with pytest.raises(ConfigError, match=text):
        Config.load({"train_batch_size": 1, "data_efficiency": sampling}, world_size=1)
    metrics["curriculum_metrics"] = {"len": {**LINEAR, "clustering_type": "schedule_based"}}
    with pytest.raises(ConfigError, match="drawn by their difficulty"):
        Config.load({"train_batch_size": 1, "data_efficiency": sampling}, world_size=1)


def test_a_first_step_without_positions_is_an_error():
    """Rounding down to a multiple of difficulty_step, which is DeepSpeed's, may leave nothing of min_difficulty."""
    short = {**LINEAR, "min_difficulty": 4, "schedule_config": {"total_curriculum_step": 100, "difficulty_step": 8}}

    def load(metric=None, **more):
        if metric is None:
            return Config.load({"train_batch_size": 1, "curriculum_learning": {**short, **more}}, world_size=1)
        learning = {"enabled": True, "curriculum_metrics": {metric: short}}
        sampling = {"enabled": True, "curriculum_learning": learning}
        raw = {"train_batch_size": 1, "data_efficiency": {"enabled": True, "data_sampling": sampling}}
        return Config.load(raw, world_size=1)

    for wrong in ({}, {"metric": "seqlen_truncate"}):
        with pytest.raises(ConfigError, match=r"first step would have 0 positions \(min_difficulty 4, .*step.: 8"):
            load(**wrong)
    assert load(curriculum_type="rarity").curriculum_learning.enabled and load("len").data_efficiency.enabled
    assert load(min_difficulty=8).curriculum_learning.min_difficulty == 8


# ---- batches ---------------------------------------------------------------------------------------------------------
def test_truncation_cuts_sequences_and_nothing_else():
    ids, hidden, image = torch.arange(24).view(2, 12), torch.randn(2, 12, 12), torch.randn(2, 3)
    mask, dense = torch.ones(2, 1, 12, 12, dtype=torch.bool), torch.randn(2, 1, 12, 12)
    given = ((image, {"ids": ids, "mask": mask}), [dense, hidden, "text", None])
    (image_, inside), (dense_, hidden_, *rest) = truncated(given, 5)
    assert torch.equal(inside["ids"], ids[:, :5]) and torch.equal(inside["mask"], mask[..., :5, :5])
    assert torch.equal(dense_, dense[..., :5, :5]) and torch.equal(hidden_, hidden[:, :5])
    assert image_ is image and rest == ["text", None]
    assert truncated(given, 12) is given
    batch = dataclasses.make_dataclass("Batch", ["name", "ids"])("text", ids)
    assert torch.equal(truncated(batch, 5).ids, ids[:, :5]) and torch.equal(batch.ids, ids)
    with pytest.raises(ArgumentError, match="no tensor of integers"):
        truncated((image,), 5)


def _train(config, batches, told=False, folder=None, resume=None):
    engine = deepc.initialize(model=tiny.make_model(), config=config)[0]
    if resume is not None:
        engine.load_checkpoint(resume)
    losses = []
    for x, y in batches:
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if folder is not None:
        engine.save_checkpoint(folder)
    state = {n: t.clone() for n, t in engine.module_state_dict().items()}
    lengths = engine.curriculum.state_dict()
    engine.destroy()
    return losses, state, lengths


def test_a_step_trains_on_its_length_and_a_checkpoint_goes_on(tmp_path):
    base = tiny.config(0, micro=4)
    base["gradient_accumulation_steps"] = 2
    base["train_batch_size"] = 8
    lengths = [4, 8, 8, 12, 12, 16, 16, 16]  # floor(4 + 12 step / 6), by fours
    full = [tiny.make_batch(i, 4) for i in range(16)]
    by_hand = [(x[:, : lengths[i // 2]], y[:, : lengths[i // 2]]) for i, (x, y) in enumerate(full)]
    losses, state, none = _train(base, by_hand)
    asked = {**base, "curriculum_learning": LINEAR}
    got, found, at = _train(asked, full)
    assert got == losses and none == {} and at == {"seqlen": 16}
    same_bits(found, state)
    first, _, at = _train(asked, full[:6], folder=tmp_path)
    assert at == {"seqlen": 8}
    rest, found, _ = _train(asked, full[6:], resume=tmp_path)
    assert first + rest == losses
    same_bits(found, state)


class Told(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(3, 1), []

    def forward(self, x, **kwargs):
        self.seen.append(kwargs.get("curriculum_seqlen"))
        return self.linear(x).mean()


def test_a_forward_that_takes_the_length_gets_it():
    config = {**tiny.config(0, micro=4), "curriculum_learning": LINEAR}
    engine = deepc.initialize(model=Told(), config=config)[0]
    for _ in range(3):
        engine.backward(engine(torch.randn(4, 3)))
        engine.step()
    engine.eval()
    engine(torch.randn(4, 3))
    assert engine.module.seen == [4, 8, 8, None], "training only"
    engine.destroy()
    with pytest.raises(ConfigError, match="takes no curriculum_seqlen"):
        deepc.initialize(model=tiny.make_model(), config={**config, "deepc": {"curriculum": "forward"}})


class PreTrainedModel(nn.Module):
    """Takes any keyword and looks at none, as a model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.seen = nn.Embedding(8, 1), []

    def forward(self, input_ids, **kwargs):
        self.seen.append(input_ids.shape[1])
        return self.embed(input_ids).mean()


class Around(nn.Module):
    """Hands everything on to the model inside, as peft's."""

    def __init__(self) -> None:
        super().__init__()
        self.model = PreTrainedModel()

    def forward(self, *args, **kwargs):
        return self.model(*args, **kwargs)


class Named(PreTrainedModel):
    def forward(self, input_ids):
        return super().forward(input_ids)


def _compiled():
    return torch.compile(Named(), backend="eager")


@pytest.mark.parametrize("kind", [PreTrainedModel, Around, _compiled])
def test_batches_of_models_that_look_at_no_keyword_are_truncated(kind):
    model = kind()
    engine = deepc.initialize(model=model, config={**tiny.config(0, micro=4), "curriculum_learning": LINEAR})[0]
    for _ in range(2):
        engine.backward(engine(torch.zeros(4, 16, dtype=torch.int64)))
        engine.step()
    engine.destroy()
    assert getattr(model, "model", model).seen == [4, 8]


def test_a_custom_schedule_is_given_to_the_engine():
    custom = {**LINEAR, "schedule_type": "custom"}
    engine = deepc.initialize(model=Told(), config={**tiny.config(0, micro=4), "curriculum_learning": custom})[0]
    with pytest.raises(ConfigError, match="set_custom_curriculum_learning_schedule"):
        engine(torch.randn(4, 3))
    with pytest.raises(ArgumentError, match="'other' is no curriculum"):
        engine.set_custom_curriculum_learning_schedule({"other": lambda step: 1})
    with pytest.raises(ArgumentError, match="takes a function"):
        engine.set_custom_curriculum_learning_schedule(3)
    engine.set_custom_curriculum_learning_schedule({"seqlen": lambda step: 5 + step})
    engine(torch.randn(4, 3))
    assert engine.module.seen == [6]
    for wrong in (0, -4, 2.5):  # 0: also where min_difficulty is below difficulty_step
        engine.set_custom_curriculum_learning_schedule(lambda step, wrong=wrong: wrong)
        with pytest.raises(ConfigError, match=f"comes to {wrong} positions at step 1"):
            engine(torch.randn(4, 3))
    engine.destroy()


def test_metrics_of_data_efficiency_are_told_to_the_user():
    metric = {**LINEAR, "difficulty_type": "value", "clustering_type": "single_cluster"}
    sampling = {"enabled": True, "curriculum_learning": {"enabled": True, "curriculum_metrics": {"words": metric}}}
    config = {**tiny.config(0, micro=4), "data_efficiency": {"enabled": True, "data_sampling": sampling}}
    data = [tuple(t[0] for t in tiny.make_batch(i, 1)) for i in range(20)]
    engine, _, loader, _ = deepc.initialize(model=tiny.make_model(), config=config, training_data=data)
    told = []

    def cut(batch, state):
        told.append((state["curriculum_step"], state["current_difficulties"]["words"]))
        return [t[:, : told[-1][1]] for t in batch]

    engine.set_data_post_process_func(cut)
    shapes = []
    for x, y in loader:
        shapes.append(x.shape[1])
        engine.backward(engine(x, y))
        engine.step()
    assert told == [(1, 4), (2, 8), (3, 8), (4, 12), (5, 12)] and shapes == [d for _, d in told]
    engine.destroy()


def _pipelined(rank, world, config, batches):
    model = tiny.make_model(layers=4)
    engine = (
        deepc.initialize(model=model, config=config, sample_batch=batches[0], loss_fn=None)[0]
        if world > 1
        else deepc.initialize(model=model, config=config)[0]
    )
    losses, data = [], iter(batches)
    for _ in range(len(batches) // 2):
        if world > 1:
            losses.append(float(engine.train_batch(data)))
            continue
        total = 0.0
        for _ in range(2):
            loss = engine(*next(data))
            engine.backward(loss)
            engine.step()
            total += loss.item() / 2
        losses.append(total)
    engine.destroy()
    return losses


@pytest.mark.full
def test_pipelines_train_on_the_length_of_the_step():
    base = tiny.config(0, micro=4)
    base |= {"gradient_accumulation_steps": 2, "train_batch_size": 8, "curriculum_learning": LINEAR}
    batches = [tiny.make_batch(i, 4) for i in range(8)]
    (want,) = run_ranks(_pipelined, 1, base, batches)
    for got in run_ranks(_pipelined, 2, {**base, "pipeline": {"stages": 2}}, batches):
        assert got == pytest.approx(want, rel=1e-5)


def _read_by_some(rank, world):
    """The error of a batch without sequences, which the stage in the middle does not read."""
    from deepc.errors import DeepcError
    from deepc.pipe import LayerSpec, PipelineModule

    model = PipelineModule([LayerSpec(nn.Linear, 4, 4)] * 3, num_stages=3, loss_fn=nn.functional.mse_loss)
    config = {"train_micro_batch_size_per_gpu": 1, "curriculum_learning": LINEAR}
    engine = deepc.initialize(model=model, config=config)[0]
    with pytest.raises(DeepcError) as caught:
        engine.train_batch(iter([(torch.ones(1, 4), torch.ones(1, 4))]))
    engine.destroy()
    return type(caught.value).__name__, str(caught.value)


def test_a_batch_that_can_not_be_cut_is_an_error_on_all_stages():
    first, middle, last = run_ranks(_read_by_some, 3)
    assert first == last and first[0] == "ArgumentError" and "no tensor of integers" in first[1]
    assert middle[1].startswith("rank 0: ") and "no tensor of integers" in middle[1]
