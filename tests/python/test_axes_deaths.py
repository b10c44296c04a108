"""A rank that dies is an error on all ranks of its model at once, whichever of them wait for it themselves: along the
axes of a mesh most ranks wait for others, which wait for the dead one, and won't come either.

Survivors stay alive until all have been told, as a notebook's or a script's that catches errors would: nobody is told
by the end of another one. A case that hangs fails at the limit of run_ranks; the engine's own time-out is longer."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import test_moe_axes as moe
import torch
from plainly import in_stages
from ranks import run_ranks
from test_axes_matrix import RULES, Block, Own

FULL = pytest.mark.full
STEPS = 3
FATAL_STEP = 1


class _Fatal:
    """Kills this process at a moment of a step: "forward", "backward" of the model's first parameter that it has here,
    "step" (before gradients are reduced or used), or "between" two steps."""

    def __init__(self, moment: str) -> None:
        self.moment, self.armed = moment, False

    def at(self, moment: str) -> None:
        if self.armed and moment == self.moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, module: torch.nn.Module) -> None:
        for m in module.modules():
            if not list(m.children()):
                m.register_forward_pre_hook(lambda *_: self.at("forward"))
                m.register_full_backward_pre_hook(lambda *_: self.at("backward"))


def _engine(rank, mesh, stage, experts):
    import deepc

    if experts:
        from deepc.parallel.sequence import sequence_group

        at, group = mesh.coordinates(rank), sequence_group(mesh.sp) if mesh.sp > 1 else None
        batch = tuple(t.chunk(mesh.sp, 1)[at.sp] for t in next(moe.samples(at.dp, mesh.dp)))
        model, samples = moe.model_of(rank, mesh, moe.FEW_PLACES, group), moe.SAMPLES
    else:
        torch.manual_seed(1)
        ids = torch.randint(0, 61, (2, 9))
        batch, model, samples = {"input_ids": ids, "labels": ids}, Own(8), 2
        model.blocks.extend(Block(16) for _ in range(2))  # a stage of 4 has one
    rules = {"partition_config": {"use_default_specs": False, "layer_specs": RULES}}
    engine = deepc.initialize(
        model=model,
        sample_batch=batch if mesh.pp > 1 else None,
        config={
            "train_micro_batch_size_per_gpu": samples,
            "gradient_accumulation_steps": 2,
            "sequence_parallel_size": mesh.sp,
            **({"tensor_parallel": {"autotp_size": mesh.tp, **rules}} if mesh.tp > 1 else {}),
            **in_stages(mesh.pp),
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        },
    )[0]
    return engine, batch


def _train(engine, batch, fatal):
    def loss():
        return engine(**batch) if isinstance(batch, dict) else engine(*batch)

    for number in range(STEPS):
        fatal.armed = number == FATAL_STEP
        fatal.at("between")
        if engine.part is not None:
            engine.train_batch(iter([batch, batch]))
            continue
        for _ in range(2):
            engine.backward(loss())
            fatal.at("step")
            engine.step()


def _dying(rank, world, sizes, stage, experts, victim, moment, folder):
    from deepc.errors import CommError, DeepcError
    from deepc.plan.mesh import Mesh

    mesh = Mesh.of(sizes)
    engine, batch = _engine(rank, mesh, stage, experts)
    fatal = _Fatal(moment if rank == victim else "")
    fatal.watch(engine.module)
    try:
        _train(engine, batch, fatal)
    except DeepcError as exc:
        told = f"{type(exc).__name__}: {exc}"
        assert isinstance(exc, CommError), told
    else:
        raise AssertionError(f"rank {rank} trained on without rank {victim}")
    _until_all_are_told(folder, rank, told, world - 1)
    return told


def _until_all_are_told(folder, rank, told, ranks):
    Path(folder, str(rank)).write_text(told)
    while len(list(Path(folder).iterdir())) < ranks:
        time.sleep(0.01)


def dies(sizes, stage, victim, moment, folder, nodes="", backend="deepc"):
    ranks = run_ranks(
        _dying,
        moe.ranks_of(sizes),
        args=(sizes, stage, "ep" in sizes, victim, moment, str(folder)),
        env={"DEEPC_LOG_LEVEL": "WARNING"},
        may_die=[victim],
        timeout_s=1800.0,
        nodes=nodes,
        backend=backend,
    )
    assert ranks[victim] is None
    for rank, told in enumerate(ranks):
        if rank != victim:
            assert told.startswith("RankDiedError: "), (rank, told)
            who = rf"rank {victim} (\(\d+ in the group\) )?\(pid \d+"
            assert re.search(who, told) and "died" in told, (rank, told)


CASES = [
    ({"pp": 2, "dp": 2}, 0, 3, "forward"),
    ({"pp": 2, "dp": 2}, 2, 0, "backward"),
    ({"pp": 2, "dp": 2}, 3, 1, "forward"),
    ({"pp": 2, "dp": 2}, 1, 2, "between"),
    ({"pp": 4}, 0, 3, "forward"),
    ({"pp": 4}, 1, 1, "backward"),
    ({"pp": 4}, 0, 0, "between"),
    ({"dp": 2, "tp": 2}, 0, 3, "forward"),
    ({"dp": 2, "tp": 2}, 1, 0, "backward"),
    ({"dp": 2, "tp": 2}, 2, 1, "step"),
    ({"dp": 2, "tp": 2}, 3, 2, "forward"),
    ({"dp": 2, "tp": 2}, 0, 2, "between"),
    ({"pp": 2, "tp": 2}, 0, 3, "forward"),
    ({"pp": 2, "tp": 2}, 1, 1, "backward"),
    ({"pp": 2, "tp": 2}, 0, 0, "between"),
    ({"tp": 4}, 0, 2, "forward"),
    ({"tp": 4}, 3, 1, "step"),
    ({"pp": 2, "dp": 2, "tp": 2}, 2, 7, "forward"),
    ({"pp": 2, "dp": 2, "tp": 2}, 1, 0, "backward"),
]


@pytest.mark.parametrize(
    ("sizes", "stage", "victim", "moment"),
    [case if i == 0 else pytest.param(*case, marks=FULL) for i, case in enumerate(CASES)],
    ids=moe.name_of,
)
def test_all_ranks_of_a_node_are_told_of_a_death(sizes, stage, victim, moment, tmp_path):
    dies(sizes, stage, victim, moment, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(
    ("sizes", "stage", "victim", "moment"),
    [
        ({"dp": 4, "ep": 2}, 1, 3, "forward"),
        ({"dp": 4, "ep": 2}, 2, 0, "backward"),
        ({"pp": 2, "dp": 2, "ep": 2}, 1, 3, "forward"),
        ({"dp": 4, "ep": 2}, 3, 1, "step"),
        ({"dp": 2, "sp": 2, "ep": 2}, 1, 3, "forward"),
        ({"dp": 2, "sp": 2, "ep": 2}, 3, 0, "backward"),
    ],
    ids=moe.name_of,
)
def test_all_ranks_with_spread_experts_are_told_of_a_death(sizes, stage, victim, moment, tmp_path):
    dies(sizes, stage, victim, moment, tmp_path)


BETWEEN = [
    ({"pp": 2, "dp": 2}, 0, 3, "forward", "aabb"),
    ({"pp": 2, "dp": 2}, 1, 0, "backward", "abab"),
    ({"pp": 2, "dp": 2}, 2, 1, "forward", "abcd"),
    ({"pp": 4}, 0, 3, "forward", "aabb"),
    ({"pp": 4}, 1, 0, "between", "abab"),
    ({"dp": 2, "tp": 2}, 0, 3, "forward", "aabb"),
    ({"dp": 2, "tp": 2}, 2, 0, "backward", "abab"),
    ({"dp": 2, "tp": 2}, 3, 1, "step", "aabb"),
    ({"pp": 2, "tp": 2}, 0, 3, "forward", "abab"),
    ({"pp": 2, "tp": 2}, 1, 1, "backward", "aabb"),
    ({"dp": 4, "ep": 2}, 1, 2, "forward", "aabb"),
    ({"dp": 2, "tp": 2}, 0, 2, "between", "abcd"),
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("sizes", "stage", "victim", "moment", "nodes"),
    BETWEEN,
    ids=moe.name_of,
)
def test_all_nodes_are_told_of_a_death(sizes, stage, victim, moment, nodes, tmp_path):
    dies(sizes, stage, victim, moment, tmp_path, nodes=nodes)


@pytest.mark.full
@pytest.mark.parametrize(
    ("sizes", "stage", "victim", "moment"),
    [({"pp": 2, "dp": 2}, 1, 3, "forward"), ({"pp": 4}, 0, 1, "backward"), ({"dp": 2, "tp": 2}, 2, 0, "step")],
    ids=moe.name_of,
)
def test_all_ranks_are_told_where_gloo_carries_messages(sizes, stage, victim, moment, tmp_path):
    dies(sizes, stage, victim, moment, tmp_path, backend="gloo")


def _raising(rank, world, sizes, culprit, folder):
    """What a rank is told of one whose forward raises."""
    from deepc.plan.mesh import Mesh

    engine, batch = _engine(rank, Mesh.of(sizes), 1, False)

    def no_label(*_):
        raise ValueError("no such label")

    if rank == culprit:
        next(m for m in engine.module.modules() if not list(m.children())).register_forward_pre_hook(no_label)
    try:
        engine.train_batch(iter([batch, batch]))
    except Exception as exc:
        told = f"{type(exc).__name__}: {exc}"
    _until_all_are_told(folder, rank, told, world)
    return told


@pytest.mark.full
@pytest.mark.parametrize(
    ("sizes", "culprit", "nodes"),
    [({"pp": 2, "dp": 2}, 3, "aabb"), ({"pp": 2, "dp": 2}, 0, "abab"), ({"pp": 4}, 2, "abcd"), ({"pp": 4}, 1, "aabb")],
    ids=moe.name_of,
)
def test_all_nodes_are_told_of_an_error_in_a_batch(sizes, culprit, nodes, tmp_path):
    env = {"DEEPC_LOG_LEVEL": "WARNING"}
    ranks = run_ranks(
        _raising, len(nodes), args=(sizes, culprit, str(tmp_path)), env=env, timeout_s=1800.0, fresh=True, nodes=nodes
    )
    for rank, told in enumerate(ranks):
        if rank == culprit:
            assert told == "ValueError: no such label"
        else:
            assert told.startswith("AbortedError: "), told
            assert f"rank {culprit}, in stage " in told and "ValueError: no such label" in told, told
