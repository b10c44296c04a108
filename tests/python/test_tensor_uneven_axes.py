"""Attention heads that tensor-parallel ranks do not divide, in bf16, over ranks that share sequences, and over several
CPU nodes (a letter for each rank's; test_nodes_axes.py)."""

from __future__ import annotations

import math

import pytest
import torch
from plainly import first_gradients
from ranks import run_ranks as _run_ranks
from test_tensor_uneven import by_torch, engine_of, micro_batches, model_of, near, trained

FULL = pytest.mark.full
STAGES = (0, 1, 2, 3)


def run_ranks(fn, nodes, *args):
    return _run_ranks(fn, len(nodes), args=args, env={"DEEPC_LOG_LEVEL": "WARNING"}, nodes=nodes)


def reference(given):
    model = model_of(*given)
    model.set_attn_implementation("sdpa")  # sequences can't be shared under "eager"
    return model


def _trains(rank, world, sizes, models, stages, precision="fp32"):
    """{(model, stage): (losses, norms, gradients of the first step)} of this rank."""
    from deepc.parallel.sequence import sequence_group, shard, share
    from deepc.plan.mesh import Mesh

    mesh, told = Mesh.of(sizes), {}
    at = mesh.coordinates(rank)
    group = sequence_group(mesh.sp, tensor=mesh.tp) if mesh.sp > 1 else None
    more = {"sequence_parallel_size": mesh.sp, "bf16": {"enabled": precision == "bf16"}}
    for given in models:
        for stage in stages:
            model, sample = reference(given), None
            if group is not None:
                share(model, group)
                sample = shard(next(micro_batches()), group, causal=True)
            engine = engine_of(model, mesh, stage, sample, **more)
            assert all(getattr(engine.mesh, axis) == n for axis, n in sizes.items())
            grads = first_gradients(engine)
            data = micro_batches(at.dp, mesh.dp)
            if group is not None:
                data = (shard(batch, group, causal=True) for batch in data)
            told[given, stage] = *trained(engine, data), grads
            engine.destroy()
    return told


def compared(ranks, models, check):
    """check(case, losses, norms, gradients, torch's in one process in fp32) of every rank's."""
    for given in models:
        want = by_torch(reference(given))
        for case in (c for c in ranks[0] if c[0] == given):
            names = set()
            for rank in ranks:
                losses, norms, grads = rank[case]
                assert (losses, norms) == ranks[0][case][:2], f"{case}: all ranks tell the same"
                check(case, losses, norms, grads, want)
                names |= set(grads)
            assert names == set(want[2])


def equal(case, losses, norms, grads, want):
    assert losses == pytest.approx(want[0], rel=1e-6), case
    assert norms == pytest.approx(want[1], rel=1e-5), case
    for name, grad in grads.items():
        near(grad, want[2][name], f"{case}, {name}")


# Heads: of queries, of keys and values. Over 2 ranks 3 heads are (2, 1), over 4 ranks 6 are (2, 2, 1, 1).
GPT2, ONE_KEY = ("gpt2", 3), ("llama", 3, 1)
SIX, TWO_KEYS = ("gpt2", 6), ("llama", 6, 2)  # over 4 ranks, two of which read the same keys
FIVE, FIVE_ONE = ("gpt2", 5), ("llama", 5, 1)  # (3, 2), of which each of two ranks of a sequence gets 1 or 2


@pytest.mark.parametrize(
    ("sizes", "nodes", "models", "stages"),
    [
        ({"tp": 2}, "ab", [ONE_KEY], (2,)),
        *(
            pytest.param(*case, STAGES, marks=FULL)
            for case in (
                ({"sp": 2, "tp": 2}, "aaaa", [FIVE, FIVE_ONE]),
                ({"sp": 2, "tp": 2}, "abab", [FIVE, FIVE_ONE]),
                ({"sp": 2, "tp": 2}, "aabb", [FIVE, FIVE_ONE]),
                ({"sp": 3, "tp": 2}, "aabbcc", [("gpt2", 7), ("llama", 10, 2)]),
                ({"pp": 2, "sp": 2, "tp": 2}, "aabbaabb", [FIVE, FIVE_ONE]),
                ({"tp": 4}, "aabb", [SIX, TWO_KEYS, ("llama", 14, 2)]),
                ({"tp": 4}, "abab", [SIX, TWO_KEYS]),
                ({"dp": 2, "tp": 2}, "aabb", [GPT2, ONE_KEY, ("bert", 3)]),
                ({"dp": 2, "tp": 2}, "abab", [GPT2, ONE_KEY, ("qwen3", 3, 1)]),
                ({"pp": 2, "tp": 2}, "abab", [GPT2, ONE_KEY]),
                ({"dp": 2, "tp": 4}, "aabbaabb", [SIX, TWO_KEYS]),
            )
        ),
    ],
    ids=lambda v: "x".join(f"{k}{n}" for k, n in v.items()) if isinstance(v, dict) else None,
)
def test_uneven_heads_over_nodes_and_sequences_train_as_torch_in_one_process(sizes, nodes, models, stages):
    pytest.importorskip("transformers")
    compared(run_ranks(_trains, nodes, sizes, models, stages), models, equal)


# ---- bf16 ------------------------------------------------------------------------------------------------------------
EPS = torch.finfo(torch.bfloat16).eps


def lengths(grads, less=None):
    """Norms of gradients, or of what parts them from others of the same names."""
    return {n: float((g if less is None else g - less[n]).double().norm()) for n, g in grads.items()}


@pytest.mark.parametrize(
    ("sizes", "nodes", "models", "stages"),
    [
        ({"tp": 4}, "aabb", [TWO_KEYS], (3,)),
        *(
            pytest.param(*case, STAGES, marks=FULL)
            for case in (
                ({"tp": 2}, "aa", [GPT2, ONE_KEY, ("bert", 3)]),
                ({"tp": 4}, "aaaa", [SIX, TWO_KEYS]),
                ({"tp": 4}, "aabb", [SIX, TWO_KEYS]),
                ({"tp": 4}, "abcd", [SIX, TWO_KEYS]),
                ({"dp": 2, "tp": 2}, "aabb", [GPT2, ONE_KEY]),
                ({"dp": 2, "tp": 2}, "abab", [GPT2, ONE_KEY]),
                ({"sp": 2, "tp": 2}, "abab", [FIVE, FIVE_ONE]),
                ({"sp": 2, "tp": 2}, "aaaa", [FIVE, FIVE_ONE]),
                ({"pp": 2, "tp": 2}, "abab", [GPT2, ONE_KEY]),
            )
        ),
    ],
    ids=lambda v: "x".join(f"{k}{n}" for k, n in v.items()) if isinstance(v, dict) else None,
)
def test_uneven_heads_in_bf16_are_as_near_to_fp32_as_one_process_in_bf16(sizes, nodes, models, stages):
    """What parts a run in bf16 from fp32 are its roundings, of which ranks that share tensors have one more for each
    sum between them, so no block has twice as many. A gradient is then at most twice as far from fp32's as one
    process' in bf16 is, and one rounding; a part that was missing or counted twice would be as far off as it is long.
    Of few numbers one process may have rounded better by chance than it does on the whole, so that counts if it is
    more. A norm is no further off than all gradients together. A token's loss is the difference of two numbers below
    2 (it is near log(VOCABULARY)), of which each is off by EPS / 2 when it is rounded."""
    pytest.importorskip("transformers")
    (alone,) = run_ranks(_trains, "a", {}, models, (0,), "bf16")
    told = run_ranks(_trains, nodes, sizes, models, stages, "bf16")

    def check(case, losses, norms, grads, want):
        long, theirs = lengths(want[2]), lengths(alone[case[0], 0][2], want[2])
        part = math.hypot(*theirs.values()) / math.hypot(*long.values())
        assert losses == pytest.approx(want[0], rel=0, abs=EPS), case
        assert norms == pytest.approx(want[1], rel=2 * part + EPS / 2), case
        for name, far in lengths(grads, want[2]).items():
            # keys' biases change no probability: what their gradient is summed from is as long as that of queries'
            size = long[name.replace("key.bias", "query.bias")]
            assert far <= 2 * max(theirs[name], part * size) + EPS / 2 * size, f"{case}, {name}"

    compared(told, models, check)
