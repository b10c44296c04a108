"""The memory plan of mixtures of experts: gates are taken to choose evenly and to fill the places of experts. Peaks
against what the kernel measures are in test_estimate.py."""

from __future__ import annotations

import gc
import random
import weakref

import deepc
import memory_runs
import pytest
import torch
from deepc.errors import ArgumentError
from deepc.parallel.expert import MoE
from deepc.parallel.expert.gate import capacity_of
from deepc.parallel.expert.spread import connect
from deepc.parallel.simulate.onpaper import ExpertsOnPaper
from ranks import run_ranks
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

CASE = dict(stage=0, width=64, layers=2, vocab=128, context=64, micro=4, experts=4, k=1, capacity=1.0)
TOKENS = CASE["micro"] * CASE["context"]


def estimate(ranks: int = 1, steps: int = 1, **changes):
    case = {**CASE, **changes}
    make, batch = (lambda: memory_runs.make_model(case)), memory_runs.make_batch(case)
    return deepc.estimate(make, memory_runs.make_config(case), batch, ranks_per_node=ranks, steps=steps)


def note_of(told) -> str:
    return next(n for n in told.notes if "mixtures of experts" in n)


def test_places_are_counted_in_fp32() -> None:
    draw = random.Random(3)
    for _ in range(3000):
        tokens, experts = draw.randint(1, 5000), draw.randint(1, 200)
        factor = draw.choice([draw.uniform(0.05, 4), draw.randint(1, 40) / 10])
        wanted = torch.ceil(torch.tensor(factor, dtype=torch.float32) * (tokens / experts))
        assert capacity_of(tokens, experts, factor, 1) == max(1, int(wanted)), (tokens, experts, factor)


# ---- a layer without values ------------------------------------------------------------------------------------------
def saved_bytes(layer: nn.Module, x: torch.Tensor) -> int:
    """Of what autograd keeps of a forward, and of nothing that the layer has anyway."""
    sizes: dict[int, int] = {}
    held = {t.untyped_storage()._cdata for t in (*layer.parameters(), x)}
    keep = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        keep.append(t)
        if t.untyped_storage()._cdata not in held:
            sizes[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out, balance, _ = layer(x)
    (out.sum() + balance).backward()
    return sum(sizes.values())


def layer_of(k: int, capacity: float, ep: int = 1) -> MoE:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    layer = MoE(16, network, 4, ep_size=ep, k=k, capacity_factor=capacity)
    if ep > 1:
        connect(layer, ExpertsOnPaper(ep))
    return layer


@pytest.mark.parametrize("k, capacity, ep", [(1, 0.25, 1), (2, 0.2, 1), (3, 0.2, 1), (2, 0.2, 2), (2, 0.2, 4)])
def test_a_layer_keeps_without_values_what_it_keeps_with_full_places(k: int, capacity: float, ep: int) -> None:
    """So few places that every expert's are taken, so that what is assumed is so. ep: the other ranks are not there,
    and send as many."""
    x = torch.randn(512, 16, requires_grad=True)
    layer = layer_of(k, capacity, ep)
    real = saved_bytes(layer, x)
    assert layer.deepspeed_moe.exp_counts.min() >= capacity_of(512, 4, capacity * k, 4)
    with FakeTensorMode():
        for module in layer.modules():
            there = {n: p for n, p in module._parameters.items() if p is not None}
            module._parameters.update({n: nn.Parameter(torch.empty(p.shape)) for n, p in there.items()})
        assert saved_bytes(layer, torch.empty(512, 16, requires_grad=True)) == real


# ---- deepc.estimate --------------------------------------------------------------------------------------------------
def test_the_plan_says_what_it_assumes() -> None:
    told = estimate(capacity=1.25)
    assert told.known and told.experts == 1
    text = note_of(told)
    assert "choose evenly" in text and text.endswith(
        f" {TOKENS} rows for a layer's experts on this rank, and no more than that can be"
    )
    few = estimate(capacity=0.5)
    assert f" {TOKENS // 2} rows " in note_of(few)
    two = estimate(k=2, keeps=True)
    assert f" {2 * TOKENS} rows " in note_of(two)
    assert few.activations < told.activations < two.activations


@pytest.mark.full  # test_experts_over_ranks_of_a_stage is of every push
def test_experts_over_ranks() -> None:
    whole, spread = estimate(2, stage=2), estimate(2, stage=2, ep=2)
    assert (spread.world, spread.experts, spread.parameters) == (2, 2, whole.parameters)
    assert "2 of them share a model's experts" in str(spread)
    assert spread.node_peak == 2 * spread.rank_peak + spread.shared
    experts = CASE["layers"] * CASE["experts"] * (2 * 4 * 64 * 64 + 5 * 64)
    # 4 bytes of a parameter on both ranks and 12 of its states on one; where ranks share experts all of an expert are
    # on one, and all of the rest on both
    assert whole.between_steps == pytest.approx(20 * whole.parameters, rel=0.02)
    assert spread.between_steps == pytest.approx(16 * (2 * whole.parameters - experts), rel=0.02)
    assert f" {TOKENS} rows " in note_of(spread) and "no more than that" in note_of(spread)
    more = note_of(estimate(2, ep=2, capacity=1.25))
    assert f" {TOKENS} rows " in more and more.endswith(f"may send up to {TOKENS * 5 // 4}")
    four = estimate(4, stage=2, ep=2)
    assert four.between_steps == pytest.approx(20 * (2 * whole.parameters - experts), rel=0.02)
    assert four.shared >= 2 * spread.shared > 0  # two groups that share experts
    with pytest.raises(ArgumentError, match="ep_size = 2 does not divide the 3 rank"):
        estimate(3, ep=2)


def test_experts_over_ranks_of_a_stage() -> None:
    told = estimate(4, stages=2, ep=2, gas=4)
    assert told.known and (told.experts, len(told.stages)) == (2, 2)
    assert told.parameters == estimate(1).parameters
    assert told.node_peak == 2 * sum(told.stages) + told.shared
    assert any("stage 1 of 2: mixtures of experts" in n for n in told.notes)


def test_what_hooks_make_of_gradients_has_memory() -> None:
    """Sums over ranks, of experts and of tensors, are made so."""
    model = nn.Linear(8, 8)
    plain = deepc.estimate(model, {"train_micro_batch_size_per_gpu": 4}, (torch.ones(4, 8),), lambda out, _: out.sum())
    model.weight.register_hook(lambda g: torch.empty(16 << 20)[:64].view(8, 8))
    hooked = deepc.estimate(model, {"train_micro_batch_size_per_gpu": 4}, (torch.ones(4, 8),), lambda out, _: out.sum())
    assert hooked.live_peak - plain.live_peak >= 63 << 20


# ---- deepc.initialize ------------------------------------------------------------------------------------------------
def planned(rank: int, world: int, case: dict) -> dict:
    batch = memory_runs.make_batch(case)
    engine = deepc.initialize(
        model=memory_runs.make_model(case), config=memory_runs.make_config(case), sample_batch=batch
    )[0]
    told = engine.memory_plan
    engine.backward(engine(*batch))
    engine.step()
    engine.destroy()
    return told.to_dict()


def held(rank: int, world: int, case: dict) -> list[str]:
    """Names of parameters that are not this rank's and are there still."""
    model = memory_runs.make_model(case)
    parameters = {n: weakref.ref(p) for n, p in model.named_parameters()}
    engine = deepc.initialize(model=model, config=memory_runs.make_config(case))[0]
    gc.collect()
    own = {id(p) for p in engine.module.parameters()}
    found = [n for n, r in parameters.items() if (p := r()) is not None and id(p) not in own]
    engine.destroy()
    return found


def test_parameters_of_other_stages_go() -> None:
    """Though layers keep the load-balance losses of the runs that showed how the model is cut."""
    assert run_ranks(held, 2, args=({**CASE, "stages": 2, "gas": 2},)) == [[], []]


def test_initialize_knows_the_peak_of_ranks_that_share_experts() -> None:
    each = run_ranks(planned, 2, args=({**CASE, "ep": 2, "capacity": 1.25},))
    for told in each:
        assert told["known"], told["notes"]
        assert told["node_peak"] >= sum(e["rank_peak"] for e in each)
        assert any(f"may send up to {TOKENS * 5 // 4}" in n for n in told["notes"]), told["notes"]
