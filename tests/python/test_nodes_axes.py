"""Tensor, sequence, expert and pipeline parallelism over several CPU nodes: training is that of torch in one process,
wherever the ranks of an axis lie.

A case names the node of each rank by a letter. Ranks are numbered with tensor parallelism fastest, then sequence, data
and pipeline parallelism, so that "aabb" has the tensor-parallel ranks of a 2 x 2 mesh inside of nodes, and "abab"
between them. All groups, the default one too, see these nodes (ranks.py)."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import test_axes_matrix as matrix
import test_moe_axes as moe
import torch
import torch.distributed as dist
from ranks import run_ranks as _run_ranks
from test_streamed import streamed

FULL = pytest.mark.full
STAGES = (0, 1, 2, 3)


def run_ranks(fn, nodes, *args):
    return _run_ranks(fn, len(nodes), args=args, env={"DEEPC_LOG_LEVEL": "WARNING"}, nodes=nodes)


def on_several():
    """Whether the default group has found several nodes."""
    return dist.group.WORLD.live_comm is None


def name_of(value):
    return moe.name_of(value) if isinstance(value, dict) else None


# ---- tensor, data and pipeline parallelism ---------------------------------------------------------------------------
def _layout(rank, world, sizes, heads, wanted, stages, nodes, comes_and_goes=False):
    """test_axes_matrix's comparison with torch. comes_and_goes: parameters of stage 3."""
    assert on_several() == (nodes > 1)
    with streamed() if comes_and_goes else contextlib.nullcontext():
        return matrix._compared(rank, world, sizes, heads, wanted, stages)


def trains_as_torch(sizes, nodes, families, stages, comes_and_goes=False):
    heads = 8 if families == ("own",) and sizes.get("dp", 1) != 3 else 24
    wanted = {family: matrix.by_torch(family, heads) for family in families}
    ranks = run_ranks(_layout, nodes, sizes, heads, wanted, stages, len(set(nodes)), comes_and_goes)
    for case in ranks[0]:
        assert all(r[case][0] == ranks[0][case][0] for r in ranks), "losses are equal on all ranks"
        assert {name for r in ranks for name in r[case][1]} == set(wanted[case[0]][2])


MODELS = ("own", "gpt2", "llama")
MESHES = [
    ({"tp": 2}, "ab"),
    ({"tp": 4}, "aabb"),
    ({"tp": 4}, "abab"),
    ({"tp": 4}, "abcd"),
    ({"dp": 2, "tp": 2}, "aabb"),
    ({"dp": 2, "tp": 2}, "abab"),
    ({"dp": 2, "tp": 2}, "abba"),
    ({"dp": 2, "tp": 2}, "abcd"),
    ({"pp": 2, "tp": 2}, "aabb"),
    ({"pp": 2, "tp": 2}, "abab"),
    ({"pp": 2, "tp": 2}, "abcd"),
    ({"pp": 2, "dp": 2}, "abab"),
    ({"pp": 2, "dp": 2, "tp": 2}, "aaaabbbb"),
    ({"pp": 2, "dp": 2, "tp": 2}, "aabbaabb"),
    ({"pp": 2, "dp": 2, "tp": 2}, "abababab"),
    ({"pp": 2, "dp": 2, "tp": 2}, "aabbccdd"),
    ({"dp": 2, "tp": 4}, "aabbaabb"),
]


@pytest.mark.parametrize(
    ("sizes", "nodes", "families", "stages"),
    [
        ({"dp": 2, "tp": 2}, "abab", ("own",), (3,)),
        *(
            pytest.param(sizes, nodes, families, stages, marks=FULL)
            for sizes, nodes in MESHES
            for families in (("own",), ("gpt2", "llama"))
            # 8 ranks on 2 cores take minutes for a model and a stage
            for stages in (tuple((s,) for s in STAGES) if len(nodes) == 8 and len(families) > 1 else (STAGES,))
        ),
    ],
    ids=name_of,
)
def test_tensor_ranks_inside_of_nodes_and_between_them(sizes, nodes, families, stages):
    if families != ("own",):
        pytest.importorskip("transformers")
    trains_as_torch(sizes, nodes, families, stages)


@pytest.mark.parametrize(
    ("sizes", "nodes"),
    [
        ({"dp": 2, "tp": 2}, "abab"),
        *(
            pytest.param(sizes, nodes, marks=FULL)
            for sizes, nodes in (
                ({"dp": 2, "tp": 2}, "aaaa"),
                ({"dp": 2, "tp": 2}, "aabb"),
                ({"tp": 4}, "aabb"),
                ({"pp": 2, "tp": 2}, "abab"),
                ({"pp": 2, "dp": 2, "tp": 2}, "aabbaabb"),
            )
        ),
    ],
    ids=name_of,
)
def test_parameters_that_come_and_go_beside_tensor_ranks(sizes, nodes):
    trains_as_torch(sizes, nodes, ("own",), (3,), True)


# ---- sequence and expert parallelism ---------------------------------------------------------------------------------
def _experts(rank, world, sizes, places, stages, rules, comes_and_goes=False):
    with streamed() if comes_and_goes else contextlib.nullcontext():
        return [moe.train(rank, world, sizes, places, stage, rules=rules) for stage in stages]


def experts_train_as_torch(sizes, nodes, places, stages, rules, comes_and_goes=False):
    assert moe.ranks_of(sizes) == len(nodes)
    wanted = moe.plainly(places, parts=(sizes.get("sp", 1),) * moe.STEPS)
    for found in zip(*run_ranks(_experts, nodes, sizes, places, stages, rules, comes_and_goes), strict=True):
        moe.same(found, wanted)


FEW, ALL, RULES = moe.FEW_PLACES, moe.ALL_PLACES, moe.RULES
SHARED = [
    ({"sp": 2}, "ab", FEW, RULES),
    ({"sp": 4}, "aabb", ALL, RULES),
    ({"dp": 2, "sp": 2}, "aabb", FEW, RULES),
    ({"dp": 2, "sp": 2}, "abab", ALL, RULES),
    ({"sp": 2, "tp": 2}, "aabb", FEW, RULES),
    ({"sp": 2, "tp": 2}, "abab", FEW, RULES),
    ({"sp": 2, "tp": 2}, "abcd", FEW, RULES),
    ({"pp": 2, "sp": 2}, "aabb", ALL, RULES),
    ({"pp": 2, "sp": 2}, "abab", ALL, RULES),
    ({"pp": 2, "sp": 2, "tp": 2}, "aabbaabb", FEW, RULES),
    ({"pp": 2, "sp": 2, "tp": 2}, "aaaabbbb", FEW, RULES),
    ({"dp": 2, "sp": 2, "tp": 2}, "aabbaabb", FEW, RULES),
]
SPREAD = [
    ({"dp": 2, "ep": 2}, "ab", FEW, RULES),
    ({"dp": 4, "ep": 2}, "aabb", ALL, RULES),
    ({"dp": 4, "ep": 2}, "abab", FEW, RULES),
    ({"dp": 4, "ep": 2}, "aabb", FEW, RULES),
    ({"dp": 4, "ep": 4}, "aabb", FEW, RULES),
    ({"dp": 4, "ep": 4}, "abcd", ALL, RULES),
    ({"sp": 2, "ep": 2}, "ab", FEW, RULES),
    ({"dp": 2, "sp": 2, "ep": 4}, "aabb", ALL, RULES),
    ({"dp": 2, "sp": 2, "ep": 2}, "abab", FEW, RULES),
    ({"pp": 2, "dp": 2, "ep": 2}, "abab", FEW, RULES),
    ({"pp": 2, "dp": 2, "ep": 2}, "aabb", ALL, RULES),
    ({"dp": 2, "tp": 2, "ep": 2}, "aabb", FEW, RULES),
    ({"dp": 2, "tp": 2, "ep": 2}, "abab", FEW, RULES + moe.CUT_EXPERTS),
    ({"pp": 2, "dp": 2, "tp": 2, "ep": 2}, "aabbaabb", FEW, RULES),
    ({"pp": 2, "dp": 2, "tp": 2, "ep": 2}, "aaaabbbb", FEW, RULES + moe.CUT_EXPERTS),
    ({"dp": 2, "sp": 2, "tp": 2, "ep": 4}, "aaaabbbb", ALL, RULES),
]


@pytest.mark.parametrize(
    ("sizes", "nodes", "places", "stages", "rules"),
    [
        ({"dp": 2, "sp": 2, "ep": 2}, "abab", FEW, (1,), RULES),  # sequences and experts between nodes
        *(
            pytest.param(sizes, nodes, places, STAGES, rules, marks=FULL)
            for sizes, nodes, places, rules in SHARED + SPREAD
        ),
    ],
    ids=name_of,
)
def test_sequences_and_experts_inside_of_nodes_and_between_them(sizes, nodes, places, stages, rules):
    experts_train_as_torch(sizes, nodes, places, stages, rules)


@pytest.mark.parametrize(
    ("sizes", "nodes"),
    [
        pytest.param(sizes, nodes, marks=FULL)
        for sizes, nodes in (
            ({"dp": 2, "sp": 2}, "abab"),
            ({"dp": 2, "sp": 2, "ep": 2}, "aabb"),
            ({"dp": 4, "ep": 2}, "abab"),
            ({"dp": 2, "tp": 2, "ep": 2}, "abab"),
        )
    ],
    ids=name_of,
)
def test_parameters_that_come_and_go_beside_sequences_and_experts(sizes, nodes):
    experts_train_as_torch(sizes, nodes, ALL, (3,), RULES, True)


# ---- what goes wrong -------------------------------------------------------------------------------------------------
def _left(rank, world, sizes, gone, folder):
    """Rank `gone` ends after a step, and each of the others with what it is told then, as a script would."""
    from deepc.errors import DeepcError

    before = moe.samples

    def samples(*args):
        for i, pair in enumerate(before(*args)):
            if i == moe.MICRO // args[1] and rank == gone:
                os._exit(3)
            yield pair

    moe.samples = samples
    try:
        moe.train(rank, world, sizes, ALL, 1)
    except DeepcError as error:
        Path(folder, str(rank)).write_text(f"{type(error).__name__}: {error}")
    os._exit(4)


@pytest.mark.full
@pytest.mark.parametrize("sizes", [{"dp": 2, "tp": 2}, {"dp": 2, "sp": 2}, {"dp": 4, "ep": 2}], ids=name_of)
def test_a_rank_that_dies_is_an_error_on_all_nodes(sizes, tmp_path):
    """In place of ranks that wait for it."""
    options = dict(env={"DEEPC_LOG_LEVEL": "WARNING"}, nodes="abab", may_die=range(4))
    _run_ranks(_left, 4, args=(sizes, 3, str(tmp_path)), **options)
    told = [(tmp_path / str(rank)).read_text() for rank in range(3)]
    assert all("Error: " in text for text in told)
    assert any("rank 3" in text for text in told), told


def _other_batches(rank, world):
    import deepc
    from deepc.errors import MisuseError

    config = {
        "train_batch_size": 2,
        "tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": matrix.RULES}},
        "optimizer": moe.SGD,
    }
    engine, *_ = deepc.initialize(model=matrix.model_of("own", 8), config=config)
    ids = torch.full((2, 5), rank)
    with pytest.raises(MisuseError, match="tensor-parallel rank 1 another one than rank 0"):
        engine(ids, ids)


def test_tensor_ranks_of_other_nodes_with_other_batches_are_told():
    run_ranks(_other_batches, "ab")


# ---- checkpoints -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("before", "nodes", "after", "others"),
    [
        ({"dp": 2, "tp": 2, "ep": 2}, "abab", {}, "a"),
        *(
            pytest.param(*case, marks=FULL)
            for case in (
                ({}, "a", {"dp": 2, "tp": 2, "ep": 2}, "abab"),
                ({"pp": 2, "sp": 2, "tp": 2, "ep": 2}, "aabbaabb", {"dp": 2}, "aa"),
                ({"sp": 2, "tp": 2, "ep": 2}, "abab", {"sp": 2, "tp": 2, "ep": 2}, "aabb"),
                ({"dp": 4, "ep": 4}, "aabb", {"pp": 2, "dp": 2, "ep": 2}, "aaaa"),
            )
        ),
    ],
    ids=name_of,
)
def test_a_checkpoint_goes_on_on_other_nodes(before, nodes, after, others, tmp_path):
    """Two batches in one layout and one in another are three batches."""
    more = {"optimizer": moe.ADAMW}
    run_ranks(moe.train, nodes, before, ALL, 2, more, str(tmp_path), 0, 2)
    found = run_ranks(moe.train, others, after, ALL, 1, more, str(tmp_path), 2, 1)
    parts = (before.get("sp", 1),) * 2 + (after.get("sp", 1),)
    losses, norms, grads, weights = moe.plainly(ALL, moe.ADAMW, parts)
    moe.same(found, (losses[2:], norms[2:], grads, weights), grads=False)
