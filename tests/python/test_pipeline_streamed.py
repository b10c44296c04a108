"""Pipelines at ZeRO stage 3 whose parameters come and go: the bits of resident mode, and no more gathers than the
schedule needs."""

from __future__ import annotations

import collections

import pytest
import torch
from failing_disk import FailingDisk
from ranks import run_quietly as run_ranks
from test_nodes import on_node
from test_pipeline import CLIPPED, Embed, batches, loss_of
from test_pipeline_cut import batches as cut_batches
from test_pipeline_cut import tiny_gpt
from test_streamed import NO_LIMITS, streamed
from tiny import Block
from torch import nn

MICRO, STEPS, WIDTH, VOCAB, BLOCKS = 4, 3, 32, 61, 6
LIMITED = {
    "stage3_param_persistence_threshold": 40,
    "stage3_prefetch_bucket_size": 14000,
    "stage3_max_live_parameters": 30000,
    "stage3_max_reuse_distance": 0,
}


class Shifted(nn.Module):
    """A block with a parameter that is used last: its gradient comes before backward has read any other."""

    def __init__(self):
        super().__init__()
        self.block, self.shift = Block(WIDTH), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return self.block(x) + self.shift


class Choosy(nn.Module):
    """One replica uses more than the others."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Block(WIDTH) for _ in range(2))

    def forward(self, x):
        x = self.experts[0](x)
        return self.experts[1](x) if torch.distributed.get_rank() in (0, 3) else x


def layers(tied, choosy=False):
    from deepc.pipe import LayerSpec, TiedLayerSpec

    head = (
        TiedLayerSpec("embed", Embed, forward_fn=lambda m, h: h @ m.weight.t())
        if tied
        else LayerSpec(nn.Linear, WIDTH, VOCAB, bias=False)
    )
    first = TiedLayerSpec("embed", Embed) if tied else LayerSpec(Embed)
    blocks = [LayerSpec(Choosy if choosy and i == 1 else Shifted) for i in range(BLOCKS)]
    return [first, *blocks, LayerSpec(nn.LayerNorm, WIDTH), head]


def engine_of(config, zero, tied=True, choosy=False, **pipe):
    import deepc
    from deepc.pipe import PipelineModule

    model = PipelineModule(
        layers(tied, choosy), num_stages=2, loss_fn=loss_of, seed_layers=True, partition_method="uniform", **pipe
    )
    given = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4}},
        "zero_optimization": {"stage": 3, **zero},
        **config,
    }
    return deepc.initialize(model=model, config=given)[0]


def counted(units):
    """unit -> how often it was gathered from here on."""
    counts, start = collections.Counter(), units._start

    def counting(some):
        counts.update(unit.name for unit in some)
        start(some)

    units._start = counting
    return counts


def trained(engine, data, steps=STEPS):
    """(losses and evaluations, weights of the whole model, the last batch's counters of this rank's units with
    `by_unit` and that of the `first` batch, counters since the start with the `sizes` of units)."""
    import deepc

    units = engine.state.streamed if engine.plan.mode == "streamed" else None
    counts = counted(units) if units is not None else {}
    losses, before, moved, first = [], {}, 0, {}
    for step in range(steps):
        if units is not None:
            counts.clear()
            before, moved = units.stats(), deepc.counters()["gather_bytes"]
        losses.append(float(engine.train_batch(data)))
        first = dict(counts) if step == 0 else first
    row = {k: n - before[k] for k, n in units.stats().items()} if units is not None else {}
    row.update(by_unit=dict(counts), first=first, bytes=deepc.counters()["gather_bytes"] - moved)
    losses.append(float(engine.eval_batch(data)))
    for _, p, _ in engine._lent:  # set, a tied weight reaches its copies
        with deepc.zero.GatheredParameters([p], modifier_rank=0), torch.no_grad():
            p.mul_(0.5)
    losses.append(float(engine.eval_batch(data)))
    whole = {n: t.clone() for n, t in engine.module_state_dict().items()}
    stats = {**units.stats(), "sizes": {u.name: u.elems for u in units._units}} if units is not None else {}
    engine.destroy()
    return losses, whole, row, stats


def _both(rank, world, cases, nodes="aa"):
    """{name: (resident, streamed)} of trainings, two replicas of two stages. nodes: of the replicas."""
    out = {}
    for name, (config, zero, options) in cases.items():
        runs = []
        for on in (False, True):
            with streamed(on), on_node(nodes[rank % 2]):
                engine = engine_of(config, zero, **options)
                assert engine.plan.mode == ("streamed" if on else "resident") and engine.plan.nodes == len(set(nodes))
                runs.append(trained(engine, batches(rank % 2, MICRO, 2)))
        out[name] = runs
    return out


def same(resident, run):
    assert run[0] == resident[0] and len(set(run[0])) == len(run[0])
    assert run[1].keys() == resident[1].keys()
    for name, value in resident[1].items():
        assert torch.equal(run[1][name], value), name


def as_often_as_needed(by_unit, stages):
    """In a batch: once for each forward and each backward. stages: of the rank, which may all use a tied layer, and
    what is too small for a unit of its own. A unit that is used twice in a row stays; one more gather of a tied one is
    for its copies, which get its values."""
    blocks = [n for name, n in by_unit.items() if name.isdecimal()]
    assert len(blocks) >= 2 and max(blocks) == 2 * MICRO and min(blocks) > 0, by_unit
    assert all(n <= 2 * MICRO * stages for n in by_unit.values()), by_unit


@pytest.mark.parametrize(
    "schedules",
    [["1f1b", "zb-v"], pytest.param(["gpipe", "interleaved", "zb-h1"], marks=pytest.mark.full)],
    ids=["1f1b+zb-v", "others"],
)
def test_the_bits_of_resident_mode_and_two_gathers_a_micro_batch(schedules):
    """Every unit is there once for the forward of a micro-batch and once for its backward, whatever lies between them,
    and a part of the stage at a time."""
    cases = {s: (CLIPPED, NO_LIMITS, {"schedule": s}) for s in schedules}
    for rank, by_name in enumerate(run_ranks(_both, 4, cases)):
        for name, (resident, run) in by_name.items():
            same(resident, run)
            _, _, row, stats = run
            assert stats["blocked"] == 0 and stats["live_elems"] == 0, name
            sizes = stats["sizes"]  # one block at a time, beside what is used all through a stage
            blocks = [n for unit, n in sizes.items() if unit.isdecimal()]
            assert stats["live_elems_max"] <= max(blocks) + sum(sizes.values()) - sum(blocks), (name, stats)
            assert row["live_elems"] == 0 and row["prefetched"] == 0
            stages = 2 if name in ("zb-v", "interleaved") else 1
            for counts in (row["first"], row["by_unit"]):
                as_often_as_needed(counts, stages)
            assert {n for unit, n in row["first"].items() if unit.isdecimal()} == {2 * MICRO}, "no order is known yet"
            moved = row["gathered_elems"]
            assert 4 * moved <= row["bytes"] < 4.1 * moved, "padding between parameters comes along"


@pytest.mark.parametrize(
    "precision", [{}, pytest.param({"bf16": {"enabled": True}}, marks=pytest.mark.full)], ids=["fp32", "bf16"]
)
def test_prefetch_follows_the_order_of_the_batch(precision):
    cases = {
        "limits": ({**CLIPPED, **precision}, LIMITED, {}),
        "recomputed": ({**CLIPPED, **precision}, LIMITED, {"schedule": "zb-h1", "activation_checkpoint_interval": 1}),
    }
    for by_name in run_ranks(_both, 4, cases):
        for name, (resident, run) in by_name.items():
            same(resident, run)
            _, _, row, stats = run
            assert stats["live_elems_max"] <= LIMITED["stage3_max_live_parameters"], (name, stats)
            assert stats["live_elems"] == stats["persistent_elems"] > 0
            assert row["order_misses"] == 0 and row["prefetched"] > row["gathers"] // 2, (name, row)
            if name == "limits":  # what is computed again may come three times
                as_often_as_needed(row["by_unit"], 1)


@pytest.mark.full
def test_several_nodes():
    cases = {"zb-h1": ({**CLIPPED, "bf16": {"enabled": True}}, LIMITED, {"schedule": "zb-h1"})}
    for by_name in run_ranks(_both, 4, cases, "ab"):
        same(*by_name["zb-h1"])


def _cut(rank, world):
    import deepc

    runs = []
    for on in (False, True):
        model, form = tiny_gpt()
        model.dummy_inputs = next(cut_batches(form, 0, 1, 1))  # without a sample: cut by parameters, alike each time
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": MICRO,
            "gradient_clipping": 0.5,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": 3, **NO_LIMITS},
            "pipeline": {"stages": 2},
        }
        with streamed(on):
            engine = deepc.initialize(model=model, config=config)[0]
            runs.append(trained(engine, cut_batches(form, rank % 2, MICRO, 2)))
    return runs


def test_a_model_that_is_cut_where_it_stands():
    for resident, run in run_ranks(_cut, 4):
        same(resident, run)
        by_unit = run[2]["by_unit"]
        assert len(by_unit) > 2 and max(by_unit.values()) <= 2 * MICRO, by_unit


def _saves(rank, world, folder):
    """(the loss after a checkpoint, as it goes on, and from it in streamed and in resident mode)."""

    def data():
        return batches(rank % 2, MICRO, 2)

    with streamed():
        engine, given = engine_of(CLIPPED, NO_LIMITS), data()
        for _ in range(2):
            engine.train_batch(given)
        engine.save_checkpoint(folder)
        losses = [float(engine.train_batch(given))]
        engine.destroy()
    for on in (True, False):
        with streamed(on):
            engine, given = engine_of(CLIPPED, NO_LIMITS, schedule="1f1b"), data()
            engine.load_checkpoint(folder)
            for _ in range(2 * MICRO):
                next(given)
            losses.append(float(engine.train_batch(given)))
            engine.destroy()
    return losses


def test_checkpoints_go_on_in_either_mode(tmp_path):
    for losses in run_ranks(_saves, 4, str(tmp_path)):
        assert len(losses) == 3 and len(set(losses)) == 1


# ---- nodes with different numbers of ranks ---------------------------------------------------------------------------
def _uneven(rank, world, stage, options):
    """Two stages of three ranks, of which two share a node, and all three."""
    runs = []
    for nodes in ("aab", "aaa"):
        with on_node(nodes[rank % 3]):
            engine = engine_of(CLIPPED, {**NO_LIMITS, "stage": stage}, choosy=True, **options)
            assert engine.plan.transport == ("c10d" if "b" in nodes else "node")
            assert engine.plan.sharded == (stage == 3 and "b" in nodes)
            runs.append(trained(engine, batches(rank % 3, MICRO, 3), steps=2))
    return runs


@pytest.mark.parametrize(
    ("stage", "schedule"),
    [
        pytest.param(3, "zb-v", marks=pytest.mark.full),
        (3, "1f1b"),
        pytest.param(1, "1f1b", marks=pytest.mark.full),
        pytest.param(0, "zb-h1", marks=pytest.mark.full),
    ],
)
def test_nodes_with_different_numbers_of_ranks(stage, schedule):
    """Where a gather is a collective nobody waits for a rank that does not come: replicas differ in what they use."""
    for run, whole in run_ranks(_uneven, 6, stage, {"schedule": schedule}, limit_s=120):
        assert run[0] == pytest.approx(whole[0], rel=1e-6)
        for name, value in whole[1].items():
            torch.testing.assert_close(run[1][name], value, rtol=0, atol=1e-5 * float(value.abs().max()))
        if stage == 3:
            assert run[3]["live_elems"] == 0
            as_often_as_needed(run[2]["by_unit"], 2 if schedule == "zb-v" else 1)


# ---- what goes wrong -------------------------------------------------------------------------------------------------
def _raises(rank, world, nodes):
    """The loss of the last rank raises in the second batch."""
    import deepc  # noqa: F401
    from deepc.errors import CommError

    def loss(out, labels):
        if rank == world - 1 and len(done) == MICRO + 1:
            raise ValueError("no such label")
        done.append(1)
        return loss_of(out, labels)

    done, replicas = [], world // 2
    with on_node(nodes[rank % replicas]), streamed():
        engine = engine_of({}, NO_LIMITS)
        engine.module.loss_fn = loss
        data = batches(rank % replicas, MICRO, replicas)
        engine.train_batch(data)
        with pytest.raises(ValueError if rank == world - 1 else CommError) as caught:
            engine.train_batch(data)
    return str(caught.value)


@pytest.mark.parametrize(
    "nodes", ["aa", pytest.param("aab", marks=pytest.mark.full)], ids=["one node", "different numbers of ranks"]
)
def test_an_error_of_one_rank_is_one_of_all(nodes):
    *others, last = run_ranks(_raises, 2 * len(nodes), nodes)
    assert last == "no such label" and all("no such label" in text for text in others), others


# ---- parameters on disk ----------------------------------------------------------------------------------------------
def on_disk(folder, states):
    """states: and optimizer states, and so gradients."""
    place = {"device": "nvme", "nvme_path": str(folder)}
    return {"offload_param": place, **({"offload_optimizer": place, "sub_group_size": 5000} if states else {})}


def _against_memory(rank, world, cases, folder, nodes):
    """{name: (in memory, parameters on disk, all on disk)}"""
    out = {}
    for name, (config, zero, options) in cases.items():
        runs = []
        for place in ({}, on_disk(folder, False), on_disk(folder, True)):
            with on_node(nodes[rank % 2]):
                engine = engine_of(config, {**zero, **place}, **options)
                assert (engine.plan.parameters_on == folder) == bool(place)
                runs.append(trained(engine, batches(rank % (world // 2), MICRO, world // 2)))
        out[name] = runs
    return out


@pytest.mark.parametrize(
    ("world", "config", "schedules", "nodes"),
    [
        (4, CLIPPED, ["zb-v"], "aa"),
        pytest.param(2, {"bf16": {"enabled": True}}, ["1f1b"], "aa", marks=pytest.mark.full),
        pytest.param(4, CLIPPED, ["1f1b", "gpipe", "interleaved", "zb-h1"], "aa", marks=pytest.mark.full),
        pytest.param(4, {"bf16": {"enabled": True}}, ["1f1b"], "ab", marks=pytest.mark.full),
    ],
    ids=["4", "2", "4-others", "4-on-2-nodes"],
)
def test_parameters_on_disk_have_the_bits_of_memory(world, config, schedules, nodes, tmp_path):
    cases = {s: (config, LIMITED, {"schedule": s}) for s in schedules}
    for by_name in run_ranks(_against_memory, world, cases, str(tmp_path), nodes):
        for memory, *disk in by_name.values():
            for run in disk:
                same(memory, run)
                assert run[3]["live_elems_max"] <= LIMITED["stage3_max_live_parameters"]
                assert run[2]["prefetched"] > 0 and run[2]["order_misses"] == 0
    assert list(tmp_path.iterdir()) == []


def _failing(rank, world, folder, place):
    """A transfer of the last rank fails once, in turn where gradients go to the disk, in the step, and where tied
    weights are read for their copies; then all goes on. Then one fails inside of a batch."""
    from deepc.errors import CommError, DeepcError, DiskError

    engine, data = engine_of(CLIPPED, {**LIMITED, **place}), batches(rank % 2, MICRO, 2)
    losses, said = [], []

    with FailingDisk() as disk:
        for name, owner, culprit in (
            ("", engine, 0),
            ("flush", engine.hooks, 3),
            ("update", engine.optimizer, 3),
            ("hold", engine.state.streamed, 1),
        ):
            if name:
                setattr(owner, name, disk.around(getattr(owner, name), rank == culprit))
            try:
                losses.append(float(engine.train_batch(data)))
            except DiskError as exc:
                said.append((name, str(exc)))
                if name == "flush":
                    with pytest.raises(DeepcError, match="zero_grad"):
                        engine.train_batch(data)
                    engine.zero_grad()
                elif name == "update":
                    engine.step()
            finally:
                if name:
                    delattr(owner, name)
            losses.append(float(engine.train_batch(data)))
        disk.failing = rank == 3
        with pytest.raises(DiskError if rank == 3 else CommError) as caught:
            engine.train_batch(data)
        said.append(("batch", str(caught.value)))
    return losses, said


@pytest.mark.full  # test_axes_disk.py has some of every push
def test_a_transfer_that_fails_is_an_error_on_all_ranks(tmp_path):
    ranks = run_ranks(_failing, 4, str(tmp_path), on_disk(tmp_path, True))
    for losses, said in ranks:
        assert losses == ranks[0][0] and len(losses) == 5
        assert [name for name, _ in said] == ["flush", "update", "hold", "batch"]
        assert all("[made by the test]" in text for _, text in said), said


def _refused(rank, world, folder):
    """The disk has no room for the second stage's parameters, then for its gradients; then all is well."""
    from deepc.errors import DiskFullError
    from deepc.zero.streamed import disk, gradients

    def full(*_, **__):
        raise DiskFullError("[made by the test]")

    told = []
    for place in (disk, gradients):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(DiskFullError) as caught:
            if rank >= 2:
                patch.setattr(place, "DiskArray", full)
            engine_of({}, on_disk(folder, True))
        told.append(str(caught.value))
    engine = engine_of({}, on_disk(folder, True))
    loss = float(engine.train_batch(batches(rank % 2, MICRO, 2)))
    engine.destroy()
    return told, loss


@pytest.mark.full
def test_a_disk_without_room_for_one_stage_is_an_error_on_all(tmp_path):
    ranks = run_ranks(_refused, 4, str(tmp_path))
    for told, loss in ranks:
        assert all("[made by the test]" in text for text in told), told
        assert loss == ranks[0][1] > 0
    assert list(tmp_path.iterdir()) == []
