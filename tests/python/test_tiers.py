"""Optimizer states on disk (offload_optimizer.device nvme): the same bits as in memory at every stage, in every
precision; states are read and written through windows; what the disk refuses is an error on all ranks, after which the
step goes on or a checkpoint brings everything back."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from deepc import errors
from ranks import on_nodes, run_quietly, run_ranks

CELL = 1500  # elements: a rank has some cells, and parameters begin and end inside of them


def config(stage, folder, *, world=1, gas=1, precision="fp32", disk=True, **extra):
    """Of an engine with its states on disk, or the same in memory."""
    zero = {"stage": stage, **extra.pop("zero_optimization", {})}
    if disk:
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": str(folder)}
        zero["sub_group_size"] = CELL
    return tiny.config(
        stage,
        micro=8 // world // gas,
        gas=gas,
        precision=precision,
        zero_optimization=zero,
        deepc={"bucket_elems": 8192},
        **extra,
    )


def make_engine(cfg, groups=False, optimizer=None, **options):
    import deepc

    model = tiny.make_model(**options)
    given = {}
    if groups:
        trained = [p for p in model.parameters() if p.requires_grad]
        given["model_parameters"] = [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0, "lr": 3e-4},
        ]
    if optimizer:
        cfg = {**cfg, "optimizer": optimizer}
    return deepc.initialize(model=model, config=cfg, **given)[0]


def backward(engine, step, rank, world):
    gas = engine.gradient_accumulation_steps()
    micro = engine.train_micro_batch_size_per_gpu()
    x, y = tiny.make_batch(step)
    losses = []
    for m in range(gas):
        at = (m * world + rank) * micro
        loss = engine(x[at : at + micro], y[at : at + micro])
        engine.backward(loss)
        losses.append(loss.item())
        if m < gas - 1:
            engine.step()
    return losses


def train(engine, steps, rank, world, first=0):
    losses = []
    for step in range(first, first + steps):
        losses += backward(engine, step, rank, world)
        engine.step()
    return losses


def values(engine):
    """All that a step changes, whole: weights, masters and moments."""
    import deepc

    found = {}
    for name, p in engine.module.named_parameters():
        if not p.requires_grad:
            continue
        v = deepc.view(p)
        found[name], found[f"{name}/fp32"] = v.value, v.fp32
        for state in v.state:
            found[f"{name}/{state}"] = v.state[state]
    return found


def expect_equal(found, wanted):
    assert found.keys() == wanted.keys()
    wrong = [n for n in wanted if not torch.equal(found[n], wanted[n])]
    assert not wrong, f"{len(wrong)} of {len(wanted)} differ: {wrong[:5]}"


def cells(engine):
    return engine.state.tier.stream.cells


# ---- the same bits ---------------------------------------------------------------------------------------------------
CASES = {
    "plain": {},
    "accumulation": {"gas": 2},
    "groups": {"groups": True},
    "frozen": {"frozen": True},
    "amsgrad": {"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "amsgrad": True, "weight_decay": 0.01}}},
    "lion": {"optimizer": {"type": "Lion", "params": {"lr": 1e-3, "weight_decay": 0.01}}},
    "adagrad": {"optimizer": {"type": "Adagrad", "params": {"lr": 1e-2, "initial_accumulator_value": 0.1}}},
    "sgd": {"optimizer": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9, "nesterov": True}}},
    "muon": {"optimizer": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 3e-3, "ns_dtype": "float32"}}},
    "muon, plain": {"optimizer": {"type": "Muon", "params": {"lr": 0.02, "nesterov": False, "weight_decay": 0.0}}},
    "adafactor": {"optimizer": {"type": "Adafactor", "params": {"lr": 0.05, "weight_decay": 0.01}}},
    "schedule": {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 2e-3}}},
}


def _same_bits(rank, world, folder, stage, precision, case, steps=3):
    options = dict(CASES[case])
    how = {k: options.pop(k) for k in ("groups", "optimizer", "frozen") if k in options}
    if precision == "fp16":
        options["fp16"] = {"enabled": True, "initial_scale_power": 18, "hysteresis": 1}  # some steps are skipped
    engines = [
        make_engine(config(stage, folder, world=world, precision=precision, disk=disk, **options), **how)
        for disk in (False, True)
    ]
    if case == "adafactor" and precision == "fp32":  # has nothing that would lie there
        assert engines[1].plan.disk is None
    else:
        assert [e.plan.disk is not None for e in engines] == [False, True] and cells(engines[1]) > 3
    memory, disk = ([train(e, steps, rank, world), values(e)] for e in engines)
    assert memory[0] == disk[0]
    expect_equal(disk[1], memory[1])
    assert engines[0].skipped_steps == engines[1].skipped_steps
    assert not os.listdir(folder)  # the files have no names
    for e in engines:
        e.destroy()


@pytest.mark.parametrize(
    "precision, stage",
    [
        pytest.param(p, s, marks=() if (i + s) % 2 else pytest.mark.full)
        for i, p in enumerate(("fp32", "bf16", "fp16"))
        for s in range(4)
    ],
)
def test_two_ranks_give_the_bits_of_states_in_memory(tmp_path, stage, precision):
    run_quietly(_same_bits, 2, str(tmp_path), stage, precision, "plain")


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=pytest.mark.full) if c in ("amsgrad", "sgd") else c for c in CASES if c != "plain"],
)
@pytest.mark.parametrize("stage, precision", [pytest.param(1, "bf16", marks=pytest.mark.full), (3, "fp32")])
def test_whatever_the_step_does(tmp_path, stage, precision, case):
    run_quietly(_same_bits, 2, str(tmp_path), stage, precision, case)


@pytest.mark.parametrize("world, stage", [(1, 0), (1, 3), pytest.param(4, 2, marks=pytest.mark.full), (4, 3)])
def test_other_numbers_of_ranks(tmp_path, world, stage):
    run_quietly(_same_bits, world, str(tmp_path / "made for it"), stage, "bf16", "plain", 2)


def _streamed(rank, world, folder):
    os.environ["DEEPC_STREAMED"] = "1"
    try:
        _same_bits(rank, world, folder, 3, "bf16", "plain")
    finally:
        os.environ.pop("DEEPC_STREAMED")


def test_streamed_parameters(tmp_path):
    run_quietly(_streamed, 2, str(tmp_path))


def _nodes(rank, world, folder, stage):
    with on_nodes(rank, world, 2):
        _same_bits(rank, world, folder, stage, "bf16", "plain", 2)


@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.full), 3])
def test_several_nodes(tmp_path, stage):
    run_quietly(_nodes, 4, str(tmp_path), stage)


# ---- windows ---------------------------------------------------------------------------------------------------------
def _access(rank, world, folder, stage, precision):
    """What is read is what in-memory states have, what is written counts in the next step; EMA, state_dict and stray
    writes too."""
    import deepc

    engines = [make_engine(config(stage, folder, world=world, precision=precision, disk=d)) for d in (False, True)]
    averages = [deepc.EMA(e, 0.9) for e in engines]
    for e, average in zip(engines, averages):
        train(e, 2, rank, world)
        average.update()
        for i, (_, p) in enumerate(e.module.named_parameters()):
            v = deepc.view(p)
            if i % 3 == 0:
                v.fp32 = v.fp32 * 1.5 + 0.01
                v.state["exp_avg"] = v.state["exp_avg"] * 2
            elif i % 3 == 1:
                v.local.fp32 = v.local.fp32 * 0.5
                v.local.state["exp_avg_sq"] = v.local.state["exp_avg_sq"] + 1e-6
        if stage < 3:  # a user's write to the weights
            with torch.no_grad():
                next(e.module.parameters()).data.mul_(0.75)
        train(e, 1, rank, world, first=2)
        average.update()
        with average.applied():
            pass
        train(e, 1, rank, world, first=3)
        average.update()
    expect_equal(values(engines[1]), values(engines[0]))
    expect_equal(averages[1].state_dict(), averages[0].state_dict())
    kept = [e.optimizer.state_dict()["owned"] for e in engines]
    expect_equal(kept[1], kept[0])
    engines[1].optimizer.load_state_dict(engines[0].optimizer.state_dict())
    for e in engines:
        train(e, 1, rank, world, first=4)
    expect_equal(values(engines[1]), values(engines[0]))
    for e in engines:
        e.destroy()


@pytest.mark.parametrize(
    "stage, precision",
    [*(pytest.param(*c, marks=pytest.mark.full) for c in ((0, "bf16"), (2, "bf16"), (1, "fp32"))), (3, "bf16")],
)
def test_states_are_read_and_written_through_windows(tmp_path, stage, precision):
    run_quietly(_access, 2, str(tmp_path), stage, precision)


def test_what_lies_on_disk_is_no_tensor(tmp_path):
    run_quietly(_no_tensor, 1, str(tmp_path))


def _no_tensor(rank, world, folder):
    engine = make_engine(config(2, folder, precision="bf16"))
    for array in (engine.state.master, *engine.optimizer.states.values()):
        for use in (
            lambda a=array: a[0],
            lambda a=array: a[:5],
            lambda a=array: a.float(),
            lambda a=array: a.data_ptr(),
            lambda a=array: torch.sum(a),
            lambda a=array: torch.cat([torch.ones(2), a]),
            lambda a=array: list(a),
        ):
            with pytest.raises(errors.UnsupportedError, match="lies on disk"):
                use()
        assert "OnDisk('" in repr(array)
    engine.destroy()


# ---- to disk and back ------------------------------------------------------------------------------------------------
MOVED = {
    "int8": {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "state_dtype": "int8"}}},
    "muon, int8": {"optimizer": {"type": "Muon", "params": {"lr": 2e-2, "state_dtype": "int8"}}},
    "muon, bf16": {"optimizer": {"type": "Muon", "params": {"lr": 2e-2, "state_dtype": "bf16"}}},
    "lamb": {"optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}},
    "lamb, bf16": {"optimizer": {"type": "Lamb", "params": {"lr": 1e-3, "state_dtype": "bf16"}}},
}


def _moved(rank, world, folder, stage, precision, case):
    import deepc

    options = dict({**CASES, **MOVED}[case])
    how = {k: options.pop(k) for k in ("groups", "optimizer", "frozen") if k in options}
    cfg = config(stage, folder, world=world, precision=precision, disk=False, **options)
    memory, moved = (make_engine(cfg, **how) for _ in range(2))
    average = deepc.EMA(moved, 0.9)
    before = moved.plan
    for turn in range(2):
        for e in (memory, moved):
            train(e, 1, rank, world, first=3 * turn)
        moved.offload_states(folder)
        moved.offload_states(folder)  # it is there
        stay = before.bytes["states_private"] if case == "adafactor" else 0
        assert moved.plan.disk is not None and moved.plan.bytes["states_private"] == stay and not os.listdir(folder)
        assert moved.plan.bytes["disk"] == moved.state.tier.stream.disk_bytes
        expect_equal(values(moved), values(memory))
        for e in (memory, moved):
            train(e, 1, rank, world, first=3 * turn + 1)
        average.update()
        moved.reload_states()
        moved.reload_states()
        assert moved.plan == before and moved.state.tier is None
        for e in (memory, moved):
            train(e, 1, rank, world, first=3 * turn + 2)
        expect_equal(values(moved), values(memory))
    with pytest.raises(errors.ArgumentError, match="nvme_path"):
        moved.offload_states()
    with pytest.raises(errors.ArgumentError, match="include= is for a run on a GPU"):
        moved.offload_states(folder, include=["optim_states"])
    with pytest.raises(errors.DiskError, match="nowhere"):
        moved.offload_states(os.path.join(folder, "nowhere", "below"))
    assert moved.plan == before
    for e in (memory, moved):
        train(e, 1, rank, world, first=9)
    expect_equal(values(moved), values(memory))
    moved.offload_states(folder)
    for e in (memory, moved):
        e.destroy()
    assert not any(
        "(deleted)" in os.readlink(f"/proc/self/fd/{fd}") and folder in os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{fd}")
    )


@pytest.mark.parametrize(
    "stage, precision, case",
    [
        (0, "fp32", "plain"),
        (3, "bf16", "plain"),
        (3, "bf16", "muon"),
        (2, "bf16", "int8"),
        *(
            pytest.param(*row, marks=pytest.mark.full)
            for row in (
                (2, "bf16", "plain"),
                (0, "fp32", "muon"),
                (1, "fp32", "muon, plain"),
                (2, "bf16", "muon, int8"),
                (3, "fp32", "muon, bf16"),
                (0, "bf16", "adafactor"),
                (3, "bf16", "adafactor"),
                (3, "fp32", "int8"),
                (1, "bf16", "lamb"),
                (3, "bf16", "lamb, bf16"),
                (2, "fp32", "adagrad"),
                (2, "bf16", "amsgrad"),
            )
        ),
    ],
)
def test_states_move_to_disk_and_back_between_steps(tmp_path, stage, precision, case):
    run_quietly(_moved, 2, str(tmp_path), stage, precision, case)


def _move_fails(rank, world, folder, precision, case):
    """One rank's disk refuses on the way out, another's on the way back."""
    from deepc.offload import Stream

    options = dict({**CASES, **MOVED}[case])
    how = {k: options.pop(k) for k in ("optimizer",) if k in options}
    cfg = config(2, folder, world=world, precision=precision, disk=False, **options)
    memory, moved = (make_engine(cfg, **how) for _ in range(2))
    step = 0

    def both_train():
        nonlocal step
        for e in (memory, moved):
            train(e, 1, rank, world, first=step)
        step += 1
        expect_equal(values(moved), values(memory))

    def refused(call, name, here):
        whole, left = getattr(Stream, name), 3

        def transfer(*args):
            nonlocal left
            left -= 1
            if here and left == 0:
                raise errors.DiskFullError("[made by the test]")
            return whole(*args)

        setattr(Stream, name, transfer)
        try:
            with pytest.raises(errors.DiskFullError, match="made by the test"):
                call()
        finally:
            setattr(Stream, name, whole)

    both_train()
    refused(lambda: moved.offload_states(folder), "write", rank == 1)
    assert moved.plan.disk is None and moved.state.tier is None and not os.listdir(folder)
    both_train()
    moved.offload_states(folder)
    both_train()
    refused(moved.reload_states, "read", rank == 0)
    assert moved.plan.disk is not None and moved.state.tier is not None
    both_train()
    moved.reload_states()
    both_train()
    for e in (memory, moved):
        e.destroy()


@pytest.mark.parametrize("precision, case", [("bf16", "muon"), pytest.param("fp32", "lamb", marks=pytest.mark.full)])
def test_states_stay_where_they_are_when_a_disk_refuses_them(tmp_path, precision, case):
    run_quietly(_move_fails, 2, str(tmp_path), precision, case)


# ---- checkpoints -----------------------------------------------------------------------------------------------------
def _checkpoints(rank, world, folder, saves, stage, precision):
    """From disk into memory, or the reverse, and on with the same bits."""
    engines = [make_engine(config(stage, folder, world=world, precision=precision, disk=d)) for d in (False, True)]
    saver, loader = engines[saves], engines[1 - saves]
    place = os.path.join(folder, "checkpoint")
    train(saver, 2, rank, world)
    saver.save_checkpoint(place)
    loader.load_checkpoint(place)
    expect_equal(values(loader), values(saver))
    for e in engines:
        train(e, 2, rank, world, first=2)
    expect_equal(values(loader), values(saver))
    for e in engines:
        e.destroy()


@pytest.mark.parametrize(
    "stage, precision, saves",
    [
        (0, "bf16", 1),
        (3, "bf16", 0),
        *(
            pytest.param(*row, marks=pytest.mark.full)
            for row in ((0, "bf16", 0), (3, "bf16", 1), (3, "fp32", 0), (3, "fp32", 1))
        ),
    ],
)
def test_checkpoints_go_from_disk_to_memory_and_back(tmp_path, saves, stage, precision):
    run_quietly(_checkpoints, 2, str(tmp_path), saves, stage, precision)


def _save(rank, world, folder, disk):
    engine = make_engine(config(3, folder, world=world, precision="bf16", disk=disk))
    train(engine, 2, rank, world)
    engine.save_checkpoint(os.path.join(folder, f"disk{disk}"), tag="a")
    engine.destroy()


def test_a_checkpoint_from_disk_is_byte_for_byte_the_one_from_memory(tmp_path):
    for disk in (False, True):
        run_quietly(_save, 2, str(tmp_path), disk)
    names = sorted(p.name for p in (tmp_path / "diskTrue/a").glob("rank_*.safetensors"))
    assert len(names) == 2
    for name in names:
        one, other = ((tmp_path / f"disk{d}/a" / name).read_bytes() for d in (False, True))
        token = re.compile(rb'"deepc\.token":"[0-9a-zA-Z]*"')
        assert token.sub(b"", one) == token.sub(b"", other)


# ---- the disk refuses ------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def file_limit(nbytes):
    """No file of this process grows or is written beyond (EFBIG); a signal tells, which Python ignores."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _goes_on(rank, world, folder, stage, precision, bad_rank, share, case="plain"):
    how = {k: v for k, v in CASES[case].items() if k == "optimizer"}
    cfgs = [config(stage, folder, world=world, precision=precision, disk=d) for d in (False, True)]
    if case != "plain":
        cfgs[1]["zero_optimization"]["sub_group_size"] = 50  # many cells
    engines = [make_engine(cfg, **how) for cfg in cfgs]
    memory, disk = engines
    for e in engines:
        train(e, 1, rank, world)
        backward(e, 1, rank, world)
    memory.step()
    tier = disk.state.tier
    limit = file_limit(int(tier.stream.disk_bytes * share) // 4096 * 4096)
    with limit if rank == bad_rank else contextlib.nullcontext():
        for _ in range(2):  # again while the disk still refuses
            with pytest.raises(
                errors.DiskFullError, match=rf"step 2 is done in part.*rank {bad_rank}: .*engine.step\(\)"
            ):
                disk.step()
        with pytest.raises(errors.DeepcError, match="is done in part"):
            backward(disk, 2, rank, world)
        with pytest.raises(errors.DeepcError, match="is done in part"):
            disk.zero_grad()
        with pytest.raises(errors.CheckpointError, match="is done in part"):
            disk.save_checkpoint(os.path.join(folder, "no"))
    if rank == bad_rank:
        assert tier.stream.unsaved > 0
    assert disk.step().applied
    assert tier.stream.unsaved == 0 and tier.at == 0 and disk.global_steps == memory.global_steps == 2
    expect_equal(values(disk), values(memory))
    for e in engines:
        train(e, 2, rank, world, first=2)
    expect_equal(values(disk), values(memory))
    for e in engines:
        e.destroy()


@pytest.mark.parametrize(
    "stage, precision, share",
    [
        *((1, "bf16", 0.5), (3, "fp32", 0.5)),
        *(pytest.param(*c, s, marks=pytest.mark.full) for c in ((1, "bf16"), (3, "fp32")) for s in (0.0, 0.95)),
    ],
)
def test_a_step_that_the_disk_broke_off_goes_on(tmp_path, stage, precision, share):
    run_quietly(_goes_on, 2, str(tmp_path), stage, precision, 1, share)


@pytest.mark.parametrize(
    "case, stage, precision, share",
    [
        ("adafactor", 3, "bf16", 0.5),
        *(
            pytest.param(*row, marks=pytest.mark.full)
            for row in (
                ("muon", 3, "bf16", 0.5),
                ("muon", 0, "bf16", 0.3),
                ("muon", 2, "fp32", 0.0),
                ("muon", 1, "bf16", 0.4),
                ("muon, plain", 3, "bf16", 0.7),
                ("adafactor", 0, "bf16", 0.0),
                ("adafactor", 1, "bf16", 0.95),
            )
        ),
    ],
)
def test_what_looks_at_whole_matrices_goes_on_too(tmp_path, case, stage, precision, share):
    run_quietly(_goes_on, 2, str(tmp_path), stage, precision, 1, share, case)


def nameless_file(folder):
    """The path under /proc of the scratch file that this process has in the folder."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith(f"{folder}/") and "(deleted)" in os.readlink(
                f"/proc/self/fd/{fd}"
            ):
                return f"/proc/self/fd/{fd}"
    raise AssertionError("there is none")


def _damaged(rank, world, folder, where):
    engine = make_engine(config(3, os.path.join(folder, "nvme"), world=world, precision="bf16"))
    train(engine, 2, rank, world)
    engine.save_checkpoint(os.path.join(folder, "checkpoint"))
    train(engine, 2, rank, world, first=2)
    wanted = values(engine)
    stream = engine.state.tier.stream
    with stream.walk(writes=[]) as every:  # nothing of them is in memory any more
        for _ in every:
            pass
    if rank == 0:
        with open(nameless_file(os.path.join(folder, "nvme")), "r+b", buffering=0) as f:
            f.seek(int(stream.disk_bytes * where) // 4096 * 4096 + 17)
            f.write(b"\xff\x00\xff")
    with pytest.raises(errors.DamagedError, match=r"rank 0: .*elements \[.*torn or damaged.*load the last checkpoint"):
        train(engine, 1, rank, world, first=4)
    with pytest.raises(errors.DamagedError):  # it does not heal
        engine.step()
    with pytest.raises(errors.CheckpointError, match="load_optimizer_states=True"):
        engine.load_checkpoint(os.path.join(folder, "checkpoint"), load_module_only=True)
    engine.load_checkpoint(os.path.join(folder, "checkpoint"))
    train(engine, 2, rank, world, first=2)
    expect_equal(values(engine), wanted)
    engine.destroy()


@pytest.mark.parametrize("where", [0.0, 0.3])
def test_damaged_states_are_said_and_a_checkpoint_brings_them_back(tmp_path, where):
    (tmp_path / "nvme").mkdir()
    run_quietly(_damaged, 2, str(tmp_path), where)


def _damage(engine, folder):
    """Every page of this rank's states."""
    stream = engine.state.tier.stream
    with stream.walk(writes=[]) as every:  # nothing of them is in memory any more
        for _ in every:
            pass
    with open(nameless_file(folder), "r+b", buffering=0) as f:
        for at in range(0, stream.disk_bytes, 4096):
            f.seek(at + 17)
            f.write(b"\xff\x00\xff")


def _damaged_view(rank, world, folder):
    """A window that can't be read is an error on all ranks."""
    import deepc

    engine = make_engine(config(3, folder, world=world))
    train(engine, 1, rank, world)
    if rank == 0:
        _damage(engine, folder)
    found = 0
    for _, p in engine.module.named_parameters():
        try:
            deepc.view(p).state["exp_avg"]
        except errors.DamagedError:
            found += 1
    engine.destroy()
    return found


def test_a_damaged_window_is_an_error_on_all_ranks(tmp_path):
    found = run_quietly(_damaged_view, 2, str(tmp_path))
    assert found[0] == found[1] > 0


def _damaged_write(rank, world, folder):
    """What a script has written into its replicas is compared with masters that can't be read."""
    engine = make_engine(config(1, folder, world=world, precision="bf16"))
    train(engine, 1, rank, world)
    with torch.no_grad():
        for p in engine.module.parameters():
            p.mul_(0.5)
    backward(engine, 1, rank, world)
    if rank == 0:
        _damage(engine, folder)
    for _ in range(2):
        with pytest.raises(errors.DamagedError, match="torn or damaged" if rank == 0 else "rank 0: .*torn or damaged"):
            engine.step()
    with pytest.raises(errors.DamagedError):
        engine.save_checkpoint(os.path.join(folder, "no"))
    engine.destroy()


def test_a_master_that_can_not_follow_a_write_is_an_error_on_all_ranks(tmp_path):
    run_quietly(_damaged_write, 2, str(tmp_path))


def _damaged_average(rank, world, folder, way):
    import deepc

    engine = make_engine(config(1, os.path.join(folder, "nvme"), world=world, precision="bf16"))
    ema = deepc.EMA(engine, 0.5)

    def averaged(steps, first):
        for step in range(first, first + steps):
            train(engine, 1, rank, world, first=step)
            ema.update()
        return {n: ema.value(p) for n, p in engine.module.named_parameters()}

    averaged(2, 0)
    engine.save_checkpoint(os.path.join(folder, "checkpoint"))
    wanted = averaged(2, 2), values(engine)
    train(engine, 1, rank, world, first=4)
    if rank == 0:
        _damage(engine, os.path.join(folder, "nvme"))
    with pytest.raises(errors.DamagedError, match="torn or damaged" if rank == 0 else "rank 0: .*torn or damaged"):
        if way == "update":
            ema.update()
        else:
            with ema.applied():
                raise AssertionError("the model has the average in part")
    with pytest.raises(errors.DeepcError, match="average 'ema' .*is changed in part.*load a checkpoint"):
        backward(engine, 5, rank, world)
    with pytest.raises(errors.CheckpointError, match="is changed in part"):
        engine.save_checkpoint(os.path.join(folder, "no"))
    engine.load_checkpoint(os.path.join(folder, "checkpoint"))
    expect_equal(averaged(2, 2), wanted[0])
    expect_equal(values(engine), wanted[1])
    engine.destroy()


@pytest.mark.parametrize("way", ["update", "applied"])
def test_an_average_of_weights_that_can_not_be_read_is_an_error_on_all_ranks(tmp_path, way):
    (tmp_path / "nvme").mkdir()
    run_quietly(_damaged_average, 2, str(tmp_path), way)


# ---- before the run --------------------------------------------------------------------------------------------------
def _refused(rank, world, folder, what):
    cfg, options = config(1, folder, world=world), {}
    offload = cfg["zero_optimization"]["offload_optimizer"]
    if what == "no folder":
        offload["nvme_path"] = os.path.join(folder, "nowhere", "below")
        error, text = errors.DiskError, "nowhere"
    elif what == "no room":
        # enough for shared memory, not for the states of a larger model
        resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        options["width"] = 512
        error, text = errors.DiskFullError, "raise ulimit -f"
    elif what == "optimizer":
        cfg["optimizer"] = {"type": "RMSprop", "params": {"lr": 1e-3}}
        cfg["zero_allow_untested_optimizer"] = True
        error, text = errors.UnsupportedError, "nvme with RMSprop"
    before = len(os.listdir("/proc/self/fd"))
    try:
        with pytest.raises(error, match=text):
            make_engine(cfg, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # nothing is left open but what a group keeps


@pytest.mark.parametrize("what", ["no folder", "no room", "optimizer"])
def test_what_can_not_be_is_refused_before_anything_is_there(tmp_path, what):
    run_quietly(_refused, 2, str(tmp_path), what)


@pytest.mark.parametrize(
    "change, text",
    [
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}}, "nvme_path"),
        ({"precision": "auto"}, "does not go with"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "zero_quantized_weights"),
        ({"aio": {"block_size": 5000}}, "multiple of 4096"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "offload_param.nvme_path"),
    ],
)
def test_configurations_that_contradict_themselves(tmp_path, change, text):
    cfg = config(3, tmp_path)
    for key, value in change.items():
        cfg[key] = {**cfg[key], **value} if isinstance(cfg.get(key), dict) else value
    with pytest.raises(errors.ConfigError, match=text):
        make_engine(cfg)


def test_the_plan_says_what_lies_where(tmp_path):
    from deepc.plan.predict.estimate import plan_text

    def of(disk):
        return plan_text(tiny.make_model, config(3, tmp_path, world=2, precision="bf16", disk=disk), ranks_per_node=2)

    text = of(True)
    assert f"on disk, {tmp_path}: " in text and "3 fp32 arrays: masters and optimizer states" in text
    assert "cells of states on disk" in text and "fp32 masters  " not in text
    assert "on disk" not in of(False)


def _bytes(rank, world, folder):
    from deepc import counters

    found = []
    for disk in (False, True):
        zero = {"sub_group_size": 100} if disk else {}
        cfg = config(3, folder, world=world, precision="bf16", disk=disk)
        cfg["zero_optimization"].update(zero)
        engine = make_engine(cfg)
        train(engine, 1, rank, world)
        before = counters()
        train(engine, 1, rank, world, first=1)
        after = counters()
        moved = tuple(after[f"disk_bytes_{w}"] - before[f"disk_bytes_{w}"] for w in ("read", "written"))
        found.append((engine.plan.bytes, engine.plan.disk, moved, cells(engine) if disk else 0))
        engine.destroy()
    return found


def test_bytes_follow_the_plan(tmp_path):
    for (memory, _, none, _), (disk, place, moved, count) in run_quietly(_bytes, 2, str(tmp_path)):
        size = place.disk_bytes
        assert none == (0, 0) and disk["disk"] == size and count > 2 * place.slots
        assert memory["master_private"] > 0 and memory["states_private"] > 0
        assert disk["master_private"] == disk["states_private"] == 0 and disk["disk_buffers"] > 0
        assert disk["rank_total"] == memory["rank_total"] - 12 * (memory["master_private"] // 4) + disk["disk_buffers"]
        # once a step, but for cells that are still in memory
        assert moved[1] == size and size * (1 - place.slots / count) <= moved[0] <= size


def _metrics(rank, world, folder):
    cfg = config(2, folder, precision="bf16")
    cfg["zero_optimization"]["sub_group_size"] = 100  # more cells than are in memory
    cfg["deepc"]["run_dir"] = os.path.join(folder, "run")
    cfg["deepc"]["timeline"] = {"steps": [1, 2], "folder": os.path.join(folder, "run")}
    engine = make_engine(cfg)
    train(engine, 3, rank, world)
    size = engine.plan.disk.disk_bytes
    engine.destroy()
    return size


def test_the_metrics_and_the_timeline_show_the_disk(tmp_path):
    (size,) = run_quietly(_metrics, 1, str(tmp_path))
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    disk = [row["disk"] for row in rows if "step" in row]
    assert len(disk) == 3 and all(0.9 * size < d["written_bytes"] <= size for d in disk[1:])
    assert all(d["wait_s"] >= 0 for d in disk) and sum(d["read_bytes"] for d in disk) > 0
    traces = "".join(p.read_text() for p in (tmp_path / "run").rglob("*.json") if "metrics" not in p.name)
    assert "states on disk" in traces


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import test_tiers
engine = test_tiers.make_engine(test_tiers.config(2, {folder!r}, precision="bf16"))
test_tiers.train(engine, 1, 0, 1)
free = os.statvfs({folder!r})
print("ready", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_nothing(tmp_path):
    program = KILLED.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -9 and "ready" in done.stdout, done.stderr
    assert not list(tmp_path.iterdir())


def test_several_ranks_on_one_folder_have_a_file_each(tmp_path):
    assert run_ranks(_own_file, 2, args=(str(tmp_path),)) == [True, True]


def _own_file(rank, world, folder):
    engine = make_engine(config(1, folder, world=world))
    mine = os.stat(nameless_file(folder)).st_ino
    both = engine.group.gather_all(torch.tensor([mine])).view(-1).tolist()
    engine.destroy()
    return len(set(both)) == 2
