"""Text, None and fractions where numbers are wanted: an ArgumentError that names the argument, at the call."""

from __future__ import annotations

import inspect

import deepc
import numpy
import pytest
import torch
from deepc import checkpoint, compress, offload, optim
from deepc.checkpoint import tool
from deepc.errors import ArgumentError, numeric
from deepc.nn.packing import PackedCollator
from deepc.parallel.expert import MoE, TopKGate
from deepc.pipe import LayerSpec, PipelineModule
from deepc.plan.predict.estimate.counts import model_states_bytes
from deepc.plan.schedule import Schedule
from deepc.zero.step.tree import BucketSampler

LAYER = torch.nn.Linear(4, 4)
LOSS = {"hidden": torch.ones(4, 8), "weight": torch.ones(16, 8), "labels": torch.zeros(4, dtype=torch.long)}
CALLS = [
    (PackedCollator, {}, "length pad_id ignore_index multiple_of"),
    (BucketSampler, dict(lengths=[3, 4], micro_batch=1, world=1, rank=0), "micro_batch world rank per_step pool seed"),
    (compress.Int8Blocks, {}, "block"),
    (compress.TopK, {}, "fraction block"),
    (deepc.export, dict(source=LAYER, folder="."), "max_shard_bytes"),
    (checkpoint.write_model, dict(folder=".", rows=[]), "max_shard_bytes"),
    (tool.clean, dict(directory="."), "keep least_age_s"),
    (offload.File, dict(path="none"), "depth threads block_bytes reserve_bytes"),
    (offload.Extents, dict(path="none"), "copies depth"),
    (offload.Stream, dict(folder=".", arrays={}, elems=1), "elems cell_elems slots threads"),
    (offload.check, dict(folder="."), "need_bytes lock_bytes"),
    (deepc.DynamicTensor, dict(size=(1,), most=(1,)), "slack"),
    (deepc.linear_cross_entropy, LOSS, "label_smoothing chunk_rows"),
    (deepc.profile.get_model_profile, dict(model=LAYER, input_shape=(1, 4)), "warm_up module_depth"),
    (optim.SGD, dict(params=[LAYER.weight], lr=0.1), "dampening momentum"),
    (optim.OneBitLamb, dict(params=[LAYER.weight]), "max_coeff factor_min max_update"),
    (MoE, dict(hidden_size=4, expert=LAYER, num_experts=2), "k capacity_factor min_capacity"),
    (TopKGate, dict(model_dim=4, num_experts=2), "model_dim num_experts"),
    (PipelineModule, dict(layers=[LayerSpec(torch.nn.Linear, 4, 4)], num_stages=1), "base_seed chunks"),
    (model_states_bytes, dict(total_params=4, stage=1), "total_params nodes"),
    (Schedule.make, dict(kind="1f1b", stages=2, micro_batches=4), "stages micro_batches chunks"),
    (deepc.estimate, dict(model=LAYER, config={"train_micro_batch_size_per_gpu": 2}), "ranks_per_node nodes steps"),
]


@pytest.mark.parametrize(("call", "given", "names"), CALLS, ids=[c[0].__qualname__ for c in CALLS])
def test_what_is_no_number_is_named(call, given, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in names.split():
        values = ["3", "x", [1]]
        parameter = inspect.signature(call).parameters.get(name)
        if parameter is not None and "None" not in str(parameter.annotation):
            values.append(None)
        if parameter is not None and "float" not in str(parameter.annotation):
            values.append(2.5)
        for value in values:
            with pytest.raises(ArgumentError, match=rf"{name}\W+{value!r}".replace("[", r"\[").replace("]", r"\]")):
                call(**{**given, name: value})
    assert list(tmp_path.iterdir()) == []


def test_numbers_of_others_are_numbers():
    @numeric
    def given(n: int, x: float, least: int | None = None, *more: int, rest: float | None = 0.5) -> list:
        return [n, x, least, *more, rest]

    assert given(numpy.int64(3), torch.tensor(1.5), None, 7, rest=None) == [3, 1.5, None, 7, None]
    assert given(3.0, 2, least=numpy.int32(1)) == [3, 2, 1, 0.5] and type(given(3.0, 2)[0]) is int
    with pytest.raises(ArgumentError, match=r"given\(more='7'\): it must be a whole number, and is a str"):
        given(1, 1, 1, "7")
    with pytest.raises(ArgumentError, match=r"given\(rest='a'\): it must be a number or None, and is a str"):
        given(1, 1, rest="a")
    with pytest.raises(ArgumentError, match=r"shape='3'"):
        offload.empty(2, "3")
