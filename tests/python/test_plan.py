"""plan.derive: plans are values, come from data alone, and are the ones that engine and estimate both have."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import deepc
import pytest
import torch
from deepc.config import Config
from deepc.core.dtypes import BFLOAT16, FLOAT32
from deepc.errors import ArgumentError, ConfigError, UnsupportedError
from deepc.optim.codecs import Int4Blocks, Int8Blocks
from deepc.plan.derive import Machine, ParamMeta, derive, meta_of, transport_of
from deepc.plan.mesh import Mesh
from deepc.plan.plan import QUANTIZED, payload_bytes
from deepc.plan.predict.estimate import plan_text
from ranks import run_ranks

META = (
    ParamMeta("embed", (96, 32), "float32", 0),
    ParamMeta("frozen", (7, 5), "float32", None),
    ParamMeta("norm", (33,), "float32", 1),
    ParamMeta("head", (32, 96), "float32", 0),
)


def config(world=1, device="cpu", stage=2, **keys) -> Config:
    raw = {"train_batch_size": 4 * world, "zero_optimization": {"stage": stage}, **keys}
    return Config.load(raw, world_size=world, device_type=device)


def plan(dp=4, stage=2, ranks_per_node=0, machine=Machine(), meta=META, rank=0, part=None, **keys):  # noqa: B008
    device = machine.device.partition(":")[0]
    return derive(config(dp, device, stage, **keys), meta, Mesh(dp=dp, ranks_per_node=ranks_per_node), machine,
                  rank=rank, part=part)  # fmt: skip


# ---- values ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks_per_node", [4, 2])
def test_equal_questions_give_equal_plans(stage, ranks_per_node):
    a, b = (plan(stage=stage, ranks_per_node=ranks_per_node) for _ in range(2))
    assert a == b and hash(a) == hash(b) and len({a, b}) == 1 and a.diff(b) == "" and a.layout is not b.layout
    assert a.describe() == b.describe() and "torch" not in a.describe() + repr(a)
    other = plan(stage=stage, ranks_per_node=ranks_per_node, rank=1)
    assert a != other and a.diff(other).startswith("rank: 0 -> 1")


def test_cells_on_disk_are_not_too_many():
    """A step takes time for each, and DeepSpeed's sub_group_size may be a few elements."""
    zero = {"stage": 3, "sub_group_size": 100, "offload_optimizer": {"device": "nvme", "nvme_path": "."}}
    small, large = (
        plan(dp=1, meta=(ParamMeta("p", (rows, 1024), "float32", 0),), zero_optimization=zero).disk
        for rows in (128, 8192)
    )
    assert (small.cell_elems, large.cell_elems) == (100, 2048)


def test_a_plan_can_not_be_changed():
    p = plan()
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.stage = 3
    with pytest.raises(TypeError):
        p.bytes["node_total"] = 0
    for f in dataclasses.fields(p):
        hash(getattr(p, f.name))


def test_diff_names_what_differs_and_no_more():
    a, b = plan(), plan(bf16={"enabled": True})
    lines = a.diff(b).splitlines()
    assert "dtype: float32 -> bfloat16" in lines and "wire: float32 -> bfloat16" in lines
    assert any(line.startswith("bytes.params_private: ") for line in lines)
    assert {line.partition(":")[0].partition(".")[0] for line in lines} == {"dtype", "wire", "bytes"}
    more = a.diff(plan(meta=tuple(m._replace(shape=(64,)) for m in META)))
    assert "params[0]: " in more and "params: 1 more" in more and "layout: Layout(3 parameters" in more


def test_the_flat_order_is_the_reverse_of_registration():
    p = plan(dp=1)
    assert [i.index for i in p.params] == [2, None, 1, 0] and p.layout.numels == (32 * 96, 33, 96 * 32)
    assert [(i.name, i.numel, i.group) for i in p.params][1] == ("frozen", 35, None) and p.frozen_elems == 64


# ---- what is decided -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("dp", "ranks_per_node", "stage", "machine", "transport", "mode"),
    [
        (1, 1, 3, Machine(), "local", "resident"),
        (4, 4, 2, Machine(), "node", "private"),
        (4, 4, 3, Machine(), "node", "resident"),
        (4, 2, 3, Machine(), "nodes", "resident"),
        (4, 4, 3, Machine(streamed=True), "node", "streamed"),
        (4, 4, 2, Machine(streamed=True), "node", "private"),
        (4, 1, 3, Machine(transport="c10d", uneven="1 and 3"), "c10d", "streamed"),
        (1, 1, 3, Machine("cuda:0"), "local", "resident"),
        (4, 4, 3, Machine("cuda:0"), "c10d", "streamed"),
        (4, 4, 2, Machine("cuda:0"), "c10d", "private"),
    ],
)
def test_mode_and_transport(dp, ranks_per_node, stage, machine, transport, mode):
    p = plan(dp, stage, ranks_per_node, machine)
    assert (p.transport, p.mode) == (transport, mode)
    assert p.sharded == (mode == "streamed" and transport == "c10d")
    flat = p.layout.shard_elems if p.sharded else p.layout.total
    where = "params_private" if mode == "private" or p.sharded else "params_shared"
    assert 4 * flat <= p.bytes[where] <= 4 * (flat + p.frozen_elems)
    assert p.bytes["params_private"] == 0 or p.bytes["params_shared"] == 0
    if p.sharded:
        assert all(s.flat_begin == s.shard_begin for s in p.segments + p.slices)


def test_what_crosses_between_nodes():
    keys = {"zero_optimization": {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True}}
    p = plan(4, 3, 2, **keys)
    assert (p.gradients_as, p.parameters_as, p.has_master, p.notes) == ("int4", "int8", True, ())
    one = plan(4, 3, 4, **keys)
    assert (one.gradients_as, one.parameters_as, one.has_master) == ("", "", False)
    assert len(one.notes) == 2 and all("there is one node" in n for n in one.notes)
    with pytest.raises(UnsupportedError, match="2 and 1.*equally many"):
        plan(3, 3, 1, Machine(transport="c10d", uneven="2 and 1"), **keys)
    for kind, codec in (("int4", Int4Blocks(block=QUANTIZED)), ("int8", Int8Blocks(block=QUANTIZED))):
        for n in (0, 1, 63, 64, 65, 4096, 100_001):
            assert payload_bytes(kind, FLOAT32, n) == codec.nbytes(n)
    assert payload_bytes("", BFLOAT16, 5) == 10


def test_the_secondary_partition_fits_a_node():
    with pytest.raises(ConfigError, match="does not divide the 2 ranks of a node"):
        plan(4, 3, 2, zero_optimization={"stage": 3, "zero_hpz_partition_size": 4})


@pytest.mark.parametrize("axis", ["pp", "sp", "tp", "ep"])
def test_other_axes_are_refused_by_name(axis):
    with pytest.raises(UnsupportedError, match=f"{axis} = 2 asks for"):
        derive(config(2), META, Mesh(**{"dp": 2, axis: 2}), Machine())


def test_a_dtype_is_a_name():
    assert plan(dp=1).dtype is FLOAT32
    assert derive(config(), META, Mesh(), Machine(), dtype="bfloat16").dtype is BFLOAT16
    with pytest.raises(ArgumentError, match="'fp7' is not one of"):
        derive(config(), META, Mesh(), Machine(), dtype="fp7")


def test_transport_of_ranks_and_devices():
    assert [transport_of("cpu", Mesh(dp=d, ranks_per_node=r)) for d, r in ((1, 1), (2, 2), (2, 1))] == [
        "local", "node", "nodes"]  # fmt: skip
    assert transport_of("cuda:3", Mesh(dp=2)) == "c10d" and transport_of("cuda", Mesh()) == "local"


# ---- one place -------------------------------------------------------------------------------------------------------
def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256))


def test_the_estimate_of_several_gpus_shards_the_parameters():
    """Each GPU holds its part of the model at stage 3; the estimate once put the whole model on each."""
    raw = {"train_batch_size": 8, "zero_optimization": {"stage": 3}}
    e = deepc.estimate(_model, raw, ranks_per_node=8, device="cuda")
    total = sum(p.numel() for p in _model().parameters())
    row = next(r for r in e.rows if r.name == "parameters")
    assert total / 8 * 4 <= row.device < total * 4 / 4, row
    assert "parameters streamed" in plan_text(_model, raw, ranks_per_node=8, device="cuda")
    assert "parameters streamed" not in plan_text(_model, raw, ranks_per_node=8)


def _same_plan(rank, world, raw):
    engine = deepc.initialize(model=_model(), config=raw)[0]
    named = list(_model().named_parameters())
    meta = meta_of(named, {id(p): 0 for _, p in named})
    mine = derive(Config.load(raw, world_size=world), meta, Mesh(dp=world), Machine(), rank=rank)
    assert engine.plan == mine, engine.plan.diff(mine)
    if rank == 0:
        assert plan_text(_model, raw, ranks_per_node=world) == engine.plan.describe()
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
def test_engine_and_estimate_have_one_plan(stage):
    raw = {"train_batch_size": 4, "zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
    run_ranks(_same_plan, 2, args=(raw,))


def test_a_plan_needs_no_torch():
    """JAX and TensorFlow will stand on core, config and plan: they come without torch."""
    code = """
import importlib.util, sys, types
sys.modules["torch"] = None  # an import of it fails
package = types.ModuleType("deepc")  # its own __init__ is torch's door
package.__path__ = importlib.util.find_spec("deepc").submodule_search_locations
sys.modules["deepc"] = package
from deepc.config import Config
from deepc.plan.derive import Machine, ParamMeta, derive
from deepc.plan.mesh import Mesh
raw = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "bf16": {"enabled": True},
       "zero_optimization": {"stage": 3}}
meta = [ParamMeta("w", (64, 64), "float32", 0), ParamMeta("b", (64,), "float32", 0)]
print(derive(Config.load(raw, world_size=4), meta, Mesh(dp=4), Machine()).describe())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "ZeRO stage 3, 4 ranks (4 on this node), cpu, bfloat16 parameters + fp32 masters" in done.stdout
