"""Gradients' accumulators have memory only between backward and step, and then the heap's (ops/base/lease.c,
state.leases_gradients)."""

from __future__ import annotations

import pytest
from ranks import run_ranks


def train(
    rank: int, world: int, stage: int, steps: int, accumulation: int = 1
) -> tuple[list[dict[str, int]], list[float]]:
    """(after each step: bytes of the lease in and after backward, extent of the heap; losses)."""
    import deepc
    import torch
    from deepc import memory
    from tiny import TinyGPT

    torch.manual_seed(0)
    model = TinyGPT(width=192, layers=2, vocab=8192, context=64)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "gradient_clipping": 1.0,
    }
    engine = deepc.initialize(model=model, config=config)[0]
    lease = engine.state.lease
    x = torch.randint(8192, (4, 65), generator=torch.Generator().manual_seed(rank))
    rows, losses = [], []
    for _ in range(steps):
        for _ in range(accumulation):
            loss = engine(x[:, :-1], x[:, 1:])
            before = lease.nbytes() if lease else -1
            engine.backward(loss)
            during = lease.nbytes() if lease else -1
            grad = deepc.view(engine.state.trained[0]).grad if accumulation == 1 else None
            engine.step()
        rows.append(
            {
                "before": before,
                "during": during,
                "after": lease.nbytes() if lease else -1,
                "extent": memory.heap()["extent"],
                "owned": 4 * engine.plan.owned_elems,
                "zero_after": int(not engine.state.acc.any()),
                "had_grad": int(grad is not None and bool(grad.abs().sum() > 0)),
            }
        )
        losses.append(float(loss.detach()))
    engine.destroy()
    return rows, losses


@pytest.mark.parametrize("stage, world", [(3, 2), pytest.param(0, 1, marks=pytest.mark.full)])
def test_accumulators_take_memory_in_backward_and_give_it_back(stage: int, world: int) -> None:
    for rows, _ in run_ranks(train, world, args=(stage, 4), fresh=True):
        for r in rows:
            assert r["before"] == r["after"] == 0 and r["zero_after"] and r["had_grad"], r
            assert r["owned"] <= r["during"] <= r["owned"] + (4 << 20), r
        assert len({r["extent"] for r in rows[1:]}) == 1, rows


@pytest.mark.full
def test_losses_are_those_of_accumulators_that_stay() -> None:
    ((borrowed, mine),) = run_ranks(train, 1, args=(0, 4), executes=True)
    ((plain, theirs),) = run_ranks(train, 1, args=(0, 4), executes=True, env={"DEEPC_KEEP_HEAP": "0"})
    assert borrowed[0]["during"] > 0 and plain[0]["during"] == -1
    assert mine == theirs


def test_accumulation_keeps_them() -> None:
    ((rows, _),) = run_ranks(train, 1, args=(0, 2, 2), fresh=True)
    assert rows[0]["during"] == -1
