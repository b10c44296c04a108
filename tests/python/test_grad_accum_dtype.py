"""data_types.grad_accum_dtype: gradients of micro-batches are summed in 16 bits, rounded once a micro-batch; at every
stage and on every way that gradients go, elementwise against plain torch."""

from __future__ import annotations

import contextlib

import pytest
import tiny
import torch
from deepc.errors import ConfigError, UnsupportedError
from ranks import run_quietly as run_ranks
from test_nodes import on_node

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GAS = 4


def config(stage: int, dtype: str | None, **more) -> dict:
    return tiny.config(stage, micro=2, gas=GAS, clip=0.0, data_types={"grad_accum_dtype": dtype}, **more)


def part(step: int, micro: int, rank: int, world: int):
    x, y = tiny.make_batch(step, 2 * GAS * world)
    return tuple(t[(micro * world + rank) * 2 :][:2] for t in (x, y))


def reference(dtype: torch.dtype, world: int) -> dict[str, torch.Tensor]:
    """The average gradient of the first step: sums over ranks in fp32, added to what is kept, rounded."""
    model, kept = tiny.make_model(), {}
    for micro in range(GAS):
        sums: dict[str, torch.Tensor] = {}
        for rank in range(world):
            (model(*part(0, micro, rank, world)) / GAS).backward()
            for n, p in model.named_parameters():
                sums[n] = p.grad.clone() if rank == 0 else sums[n] + p.grad
            model.zero_grad()
        kept = {n: (s if micro == 0 else kept[n].float() + s).to(dtype) for n, s in sums.items()}
    return {n: k.float() / world for n, k in kept.items()}


def _train(rank, world, stage, dtype, nodes=None):
    import deepc

    with on_node(nodes[rank]) if nodes else contextlib.nullcontext():
        engine = deepc.initialize(model=tiny.make_model(), config=config(stage, dtype))[0]
    losses, first = [], {}
    for step in range(3):
        for micro in range(GAS):
            loss = engine(*part(step, micro, rank, world))
            engine.backward(loss)
            losses.append(loss.item())
            if step == 0 and micro == GAS - 1:
                first = {n: engine.full_grad(p) for n, p in engine.module.named_parameters()}
            engine.step()
    weights = {n: engine.full_fp32_param(p) for n, p in engine.module.named_parameters()}
    kept = engine.state.acc.dtype, engine.state.acc.nbytes
    planned, transport = engine.plan.bytes["grads_private"], engine.plan.transport
    engine.destroy()
    return losses, first, weights, kept, planned, transport


@pytest.mark.parametrize(
    "world, dtype",
    [(1, "fp16"), (2, "bf16"), *(pytest.param(*case, marks=pytest.mark.full) for case in ((1, "bf16"), (2, "fp16")))],
)
def test_sums_are_rounded_once_a_micro_batch(world, dtype):
    want = reference(DTYPES[dtype], world)
    stages = [run_ranks(_train, world, stage, dtype) for stage in (0, 1, 2, 3)]
    for stage, ranks in enumerate(stages):
        losses, first, weights, (kept, nbytes), planned, _ = ranks[0]
        assert kept is DTYPES[dtype] and nbytes == planned, stage
        for n, grad in want.items():
            assert torch.equal(first[n], grad), (stage, n)
        assert losses == stages[0][0][0], stage
        for n, p in stages[0][0][2].items():
            assert torch.equal(weights[n], p), (stage, n)


def test_it_takes_half_the_memory_and_other_values():
    (*_, wide, wide_plan, _), (*_, narrow, narrow_plan, _) = (run_ranks(_train, 2, 2, d)[0] for d in (None, "bf16"))
    assert wide == (torch.float32, 2 * narrow[1]) and wide_plan == 2 * narrow_plan
    exact, rounded = reference(torch.float32, 2), reference(torch.bfloat16, 2)
    assert any(not torch.equal(exact[n], rounded[n]) for n in exact)


def _losses(dtype: str) -> list[float]:
    import deepc

    cfg = tiny.config(1, micro=1, gas=8, data_types={"grad_accum_dtype": dtype})
    engine, losses = deepc.initialize(model=tiny.make_model(), config=cfg)[0], []
    for step in range(20):
        x, y = tiny.make_batch(step)
        for m in range(8):
            losses.append(engine(x[m : m + 1], y[m : m + 1]))
            engine.backward(losses[-1])
            engine.step()
    engine.destroy()
    return [loss.item() for loss in losses]


def test_losses_are_those_of_fp32_within_the_bound_of_the_docs():
    exact = _losses("fp32")
    for dtype, bound in (("bf16", 2e-4), ("fp16", 1e-4)):
        losses = _losses(dtype)
        assert losses != exact
        assert max(abs(a - b) / b for a, b in zip(losses, exact)) < bound, dtype


def test_over_torch_distributed():
    """Nodes with different numbers of ranks: sums come in another order, so they are equal within one rounding."""
    want = reference(torch.bfloat16, 3)
    ranks = run_ranks(_train, 3, 2, "bf16", "aab")
    _, first, _, (kept, nbytes), planned, transport = ranks[0]
    assert transport == "c10d" and kept is torch.bfloat16 and nbytes == planned
    for n, grad in want.items():
        torch.testing.assert_close(first[n], grad, rtol=2**-6, atol=2e-5)


def test_a_gradient_can_be_set():
    import deepc

    engine = deepc.initialize(model=tiny.make_model(), config=config(0, "bf16"))[0]
    for micro in range(GAS):
        engine.backward(engine(*part(0, micro, 0, 1)))
        if micro < GAS - 1:
            engine.step()
    p = engine.module.ln.weight
    deepc.view(p).grad = torch.full_like(p, 3.0)
    assert deepc.view(p).grad.eq(3.0).all() and deepc.view(p).local.grad.dtype is torch.float32
    assert engine.step().applied and engine.get_global_grad_norm() >= 3.0
    engine.destroy()


def test_overflow_in_fp16_skips_the_step():
    import deepc

    engine = deepc.initialize(model=tiny.make_model(), config=config(2, "fp16"))[0]
    for micro in range(GAS):
        engine.backward(engine(*part(0, micro, 0, 1)) * 1e7)
        result = engine.step()
    assert not result.applied and "not finite" in result.reason
    engine.destroy()


def _two_nodes(rank, world):
    import deepc

    with on_node(f"host{rank}"), pytest.raises(UnsupportedError, match="grad_accum_dtype.*several CPU nodes.*remove"):
        deepc.initialize(model=tiny.make_model(), config=config(2, "bf16"))


def test_what_it_does_not_go_with():
    import deepc

    with pytest.raises(UnsupportedError, match="grad_accum_dtype.*NAdam.*use Adam or AdamW"):
        deepc.initialize(
            model=tiny.make_model(), config={**config(1, "bf16"), "optimizer": {"type": "NAdam", "params": {"lr": 0.1}}}
        )
    with pytest.raises(ConfigError, match="grad_accum_dtype.*deterministic.*Remove one"):
        deepc.initialize(model=tiny.make_model(), config={**config(1, "bf16"), "deepc": {"deterministic": "layout"}})
    with pytest.raises(ConfigError, match="grad_accum_dtype"):
        deepc.initialize(model=tiny.make_model(), config=config(1, "fp64"))
    run_ranks(_two_nodes, 2)


def test_the_estimate_knows():
    import deepc

    wide, narrow = (
        {r.name: r.host for r in deepc.estimate(tiny.make_model(), config(2, d), ranks_per_node=2).rows}
        for d in ("fp32", "bf16")
    )
    assert "gradients (fp32)" in wide and "gradients (bf16)" in narrow and "gradients (fp32)" not in narrow
    assert narrow["gradients (bf16)"] < wide["gradients (fp32)"]
