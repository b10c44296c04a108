"""Saved activations on disk (activation_checkpointing.cpu_checkpointing with deepc.activations.nvme_path): the same
bits as in memory, what goes there and what stays, and what happens when the disk fails."""

from __future__ import annotations

import copy
import os
import random

import pytest
import tiny
import torch
from benches import rows_of_limited
from ranks import run_ranks as _run_ranks
from test_engine import same_bits


def run_ranks(fn, world, *args, **kw):
    return _run_ranks(fn, world, args=args, env={"DEEPC_LOG_LEVEL": "WARNING"}, **kw)


def spilled(cfg: dict, folder, **keys) -> dict:
    cfg = copy.deepcopy(cfg)
    cfg["activation_checkpointing"] = {"cpu_checkpointing": True}
    cfg.setdefault("deepc", {})["activations"] = {"nvme_path": str(folder), "min_bytes": 1024, **keys}
    return cfg


def _train(rank, world, cfg, model, steps=3):
    import deepc

    engine = deepc.initialize(model=tiny.make_model(layers=3, **model), config=cfg)[0]
    losses, grads = [], None
    for step in range(steps):
        x, y = tiny.make_batch(step, 4 * world)
        loss = engine(x[4 * rank :][:4], y[4 * rank :][:4])
        engine.backward(loss)
        losses.append(loss.item())
        if step == 0:
            grads = {n: engine.full_grad(p).clone() for n, p in engine.module.named_parameters() if p.requires_grad}
        engine.step()
    stats = engine.activations.stats()
    state = {n: t.clone() for n, t in engine.module_state_dict().items()}
    engine.destroy()
    return losses, grads, state, stats


def _pairs(rank, world, rows):
    return [(_train(rank, world, plain, model), _train(rank, world, other, model)) for plain, other, model in rows]


KINDS = {
    "non-reentrant": (dict(recompute="nonreentrant"), {}),
    "reentrant": (dict(recompute="reentrant"), {}),
    "all": ({}, {"all": True}),
    "all-recomputed": (dict(recompute="nonreentrant", frozen=True), {"all": True}),
}


@pytest.mark.parametrize("world, stage, precision", [(1, 0, "fp32"), (2, 3, "bf16")])
def test_the_same_bits_as_in_memory(world, stage, precision, tmp_path):
    base = tiny.config(stage, micro=4, precision=precision)
    rows = [(base, spilled(base, tmp_path, **keys), model) for model, keys in KINDS.values()]
    if stage == 3:  # parameters come and go as well
        disk = copy.deepcopy(base)
        disk["zero_optimization"]["offload_param"] = {"device": "nvme", "nvme_path": str(tmp_path)}
        disk["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        rows += [(base, spilled(disk, tmp_path, **keys), model) for model, keys in KINDS.values()]
    block_input = 4 * 16 * 32 * (4 if precision == "fp32" else 2)
    for pairs in run_ranks(_pairs, world, rows):
        for at, ((losses, grads, state, none), (found, found_grads, found_state, stats)) in enumerate(pairs):
            assert found == losses
            same_bits(found_grads, grads)
            same_bits(found_state, state)
            assert none["bytes_written"] == 0 and stats["bytes_written"] >= 3 * 3 * block_input
            if at % len(KINDS) < 2:
                assert stats["bytes_written"] == 3 * 3 * block_input, "the inputs of the checkpointed blocks alone"
                assert stats["most_bytes"] == 3 * block_input, "each step's place is used again"
            else:
                assert stats["bytes_written"] > 4 * 3 * block_input
    assert os.listdir(tmp_path) == []


# ---- the file --------------------------------------------------------------------------------------------------------
def _values(spill, n, size=70_000):
    values = [torch.full((size + 13 * i,), i, dtype=torch.uint8) for i in range(n)]
    return values, [spill.put(v.clone()) for v in values]


def test_values_come_back_in_any_order_and_places_are_used_again(tmp_path):
    from deepc.offload.spill import Spill

    spill = Spill(tmp_path, "values")
    for order in (reversed(range(9)), range(9), [3, 3, 8, 0]):
        values, there = _values(spill, 9)
        spill.settle()
        for i in order:
            assert torch.equal(there[i].get(), values[i])
        del there
    assert spill.most_bytes == sum(-(-v.nbytes // 4096) * 4096 for v in values)
    assert 0 < spill.bytes_read < spill.bytes_written * 2
    spill.close()
    spill.close()


def test_places_of_values_that_go_in_any_order():
    """No two overlap, the file is no longer than it must be for the first gap that fits, and nothing is lost."""
    from deepc.offload.spill import _Places

    draw, places, there, page = random.Random(3), _Places(), {}, 4096
    for step in range(3000):
        if there and draw.random() < 0.5:
            places.give(*there.popitem() if step % 3 else (k := draw.choice(list(there)), there.pop(k)))
        else:
            nbytes = draw.choice([1, page, page + 1, draw.randint(1, 20 * page)])
            begin = places.take(nbytes)
            assert begin % page == 0 and begin not in there
            there[begin] = nbytes
        taken = sorted((b, b + -(-n // page) * page) for b, n in there.items())
        assert all(a[1] <= b[0] for a, b in zip(taken, taken[1:]))
        assert places.end == (taken[-1][1] if taken else 0)
        free = [(a[1], b[0]) for a, b in zip([(0, 0), *taken], taken) if a[1] < b[0]]
        assert places._gaps == free
    assert len(there) > 3


def test_forwards_that_wait_at_a_time_share_the_file(tmp_path):
    """The first one's places are used by the third one, and no value is read ahead for another forward."""
    from deepc.offload.spill import Spill

    spill = Spill(tmp_path, "values")
    waiting = []
    for k in range(6):
        spill.begin()
        waiting.append(_values(spill, 4))
        spill.settle()
        if k >= 2:
            values, there = waiting.pop(0)
            before = spill.bytes_read
            for i in reversed(range(4)):
                assert torch.equal(there.pop().get(), values[i])
            assert spill.bytes_read - before == sum(v.nbytes for v in values)
            assert all(t._coming is None for _, others in waiting for t in others)
    pages = sum(-(-v.nbytes // 4096) for v in values)
    assert spill.most_bytes == 3 * 4096 * pages
    del there, waiting
    spill.close()


def test_a_change_in_place_is_an_error(tmp_path):
    from deepc.offload.spill import Spill

    spill = Spill(tmp_path, "values")
    values, changed = torch.zeros(70_000, dtype=torch.uint8), torch.zeros(70_000, dtype=torch.uint8)
    there = [spill.put(v) for v in (values, changed)]
    changed.add_(1)
    spill.settle()
    values.add_(1)  # it is on disk
    assert not there[0].get().any()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        there[1].get()
    del there
    spill.close()


def test_damage_and_refused_writes(tmp_path):
    from deepc.errors import DamagedError, DiskFullError
    from deepc.offload import file
    from deepc.offload.spill import Spill

    spill = Spill(tmp_path, "values")
    values, there = _values(spill, 3)
    spill.settle()
    with open(spill._own.path, "r+b", buffering=0) as f:
        f.seek(there[1]._offset + 5)
        f.write(b"x")
    assert torch.equal(there[2].get(), values[2])
    with pytest.raises(DamagedError, match="values on disk"):
        there[1].get()
    del there
    wait, full = file.Handle.wait, [True]

    def refuse(self):
        wait(self)
        if full.pop() if full else False:
            raise DiskFullError("[made by the test]")

    file.Handle.wait = refuse
    try:
        values, there = _values(spill, 3)
        with pytest.raises(DiskFullError, match=r"values on disk .*\[made by the test\]"):
            spill.settle()
        spill.settle()
    finally:
        file.Handle.wait = wait
    for v, t in zip(values, there):
        assert torch.equal(t.get(), v), "what could not be written is still in memory"
    del there, t
    spill.close()


# ---- failures in training --------------------------------------------------------------------------------------------
def _failing(rank, world, cfg, steps):
    """Transfers of the last rank fail in turn, in forward and in backward; what was refused is done again."""
    import deepc
    from deepc.errors import DeepcError, DiskError, DiskFullError
    from deepc.offload import file

    engine = deepc.initialize(model=tiny.make_model(layers=8, recompute="nonreentrant"), config=cfg)[0]
    wait, count, at, said, losses = file.Handle.wait, 0, -1, [], []

    def failing(self):
        nonlocal count
        wait(self)
        count += 1
        if count == at and rank == world - 1:
            raise DiskFullError("[made by the test]")

    file.Handle.wait = failing
    try:
        for step in range(steps):
            x, y = tiny.make_batch(step, 4 * world)
            x, y = x[4 * rank :][:4], y[4 * rank :][:4]
            count, at = 0, 1 + step
            try:
                loss = engine(x, y)
            except DiskError:
                said.append("forward")
                loss = engine(x, y)
            count = 0
            at = 1 + step if said[-1:] != ["forward"] or step % 2 else -1
            try:
                engine.backward(loss)
            except DiskError as exc:  # on all ranks
                assert f"rank {world - 1}: " in str(exc) and "[made by the test]" in str(exc)
                said.append("backward")
                with pytest.raises(DeepcError, match="zero_grad"):
                    engine.step()
                engine.zero_grad()
                at = -1
                loss = engine(x, y)
                engine.backward(loss)
            at = -1
            losses.append(loss.item())
            engine.step()
    finally:
        file.Handle.wait = wait
    state = {n: t.clone() for n, t in engine.module_state_dict().items()}
    engine.destroy()
    return losses, state, said


def _unfailing(rank, world, cfg, steps):
    import deepc

    engine = deepc.initialize(model=tiny.make_model(layers=8, recompute="nonreentrant"), config=cfg)[0]
    losses = []
    for step in range(steps):
        x, y = tiny.make_batch(step, 4 * world)
        loss = engine(x[4 * rank :][:4], y[4 * rank :][:4])
        engine.backward(loss)
        losses.append(loss.item())
        engine.step()
    state = {n: t.clone() for n, t in engine.module_state_dict().items()}
    engine.destroy()
    return losses, state


@pytest.mark.parametrize("world, stage", [(1, 0), (2, 2)])
def test_a_transfer_that_fails_loses_nothing(world, stage, tmp_path):
    base = tiny.config(stage, micro=4)
    failing = run_ranks(_failing, world, spilled(base, tmp_path), 6)
    for (losses, state, said), (wanted, wanted_state) in zip(failing, run_ranks(_unfailing, world, base, 6)):
        assert losses == wanted
        same_bits(state, wanted_state)
        assert said.count("backward") >= 2
        assert said.count("backward") == failing[0][2].count("backward"), "on all ranks alike"
    assert "forward" in failing[-1][2]


# ---- the configuration -----------------------------------------------------------------------------------------------
def test_what_the_configuration_says(tmp_path):
    from deepc.config.tree import Config

    cfg = spilled(tiny.config(0, micro=1), tmp_path)
    asked = Config.load(cfg, world_size=1, device_type="cpu")
    assert asked.activation_checkpointing.cpu_checkpointing and asked.deepc.activations.nvme_path == str(tmp_path)
    assert not any("activation" in i.key for i in asked.inert)
    assert not any("activation" in i.key for i in Config.load(cfg, world_size=1, device_type="cuda").inert)
    del cfg["deepc"]
    (told,) = (i for i in Config.load(cfg, world_size=1, device_type="cpu").inert if "activation" in i.key)
    assert "host memory anyway" in told.reason
    assert not any("activation" in i.key for i in Config.load(cfg, world_size=1, device_type="cuda").inert)
    del cfg["activation_checkpointing"]
    cfg["deepc"] = {"activations": {"nvme_path": str(tmp_path)}}
    (told,) = (i for i in Config.load(cfg, world_size=1, device_type="cpu").inert if "activation" in i.key)
    assert "needs activation_checkpointing.cpu_checkpointing" in told.reason


def _no_folder(rank, world, cfg):
    import deepc
    from deepc.errors import DiskError

    with pytest.raises(DiskError, match="missing"):
        deepc.initialize(model=tiny.make_model(), config=cfg)


def test_a_folder_that_is_not_there(tmp_path):
    run_ranks(_no_folder, 2, spilled(tiny.config(2, micro=2), tmp_path / "missing" / "below"))


# ---- more than the memory --------------------------------------------------------------------------------------------
@pytest.mark.full
def test_activations_larger_than_the_memory(tmp_path):
    """In a cgroup whose limit the inputs of the blocks alone would break: the same losses as without a limit, and in
    memory it is killed."""
    disk, memory, limited = rows_of_limited(
        "activations.py", tmp_path / "out", "--folder", str(tmp_path), "--steps", "2"
    )
    assert disk["ended"] == memory["ended"] == "fine" and limited["ended"] == "killed"
    assert disk["losses"] == memory["losses"] and disk["peak"] <= disk["limit"] < disk["inputs"]
