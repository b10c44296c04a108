"""Tensor parallelism: a model whose layers are cut over ranks trains as it does in one process."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks as _run_ranks
from tiny import make_batch, make_model


def run_ranks(fn, world, *args):
    return _run_ranks(fn, world, args=args, env={"DEEPC_LOG_LEVEL": "WARNING"})


# ---- the axes --------------------------------------------------------------------------------------------------------
def _axes(rank, world, sp):
    import deepc

    data = [(x, y) for x, y in zip(*make_batch(0, samples=12))]
    engine, _, loader, _ = deepc.initialize(
        model=make_model(),
        config={
            "train_batch_size": 4,
            "sequence_parallel_size": sp,
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        },
        training_data=data,
    )
    losses, seen = [], []
    for x, y in loader:
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
        seen.append(x)
    norm, micro = engine.get_global_grad_norm(), engine.train_micro_batch_size_per_gpu()
    return losses, torch.cat(seen), norm, micro, engine.mesh.sp, engine.plan.world


def test_ranks_of_one_sequence_get_equal_batches_and_share_states():
    (alone,) = run_ranks(_axes, 1, 1)
    both = run_ranks(_axes, 2, 2)
    for losses, seen, norm, micro, sp, world in both:
        assert losses == pytest.approx(alone[0], rel=1e-6) and torch.equal(seen, alone[1])
        assert norm == pytest.approx(alone[2], rel=1e-5) and (micro, sp, world) == (4, 2, 2)


def _uncut(rank, world):
    import deepc
    from deepc.errors import ArgumentError

    with pytest.raises(ArgumentError, match="autotp_size is 2, and no parameter of the model is cut"):
        deepc.initialize(
            model=torch.nn.Linear(2, 2),
            config={"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2}},
        )


def test_a_model_that_is_not_cut_is_refused():
    run_ranks(_uncut, 2)
