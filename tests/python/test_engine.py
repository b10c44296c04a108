"""The engine against plain PyTorch, and its stages against each other, on 1, 2 and 4 ranks."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import warnings

import numpy as np
import pytest
import tiny
import torch
from ranks import RankFailure
from ranks import run_ranks as _run_ranks

STEPS = 20
VARIANTS = {
    "plain": {},
    "tied+frozen": {"frozen": True},
    "unused": {"unused": True},
    "reused": {"reuse": True},
    "recompute": {"recompute": "plain"},
    "recompute-reentrant": {"recompute": "reentrant"},
    "all": {"frozen": True, "unused": True, "reuse": True, "recompute": "plain"},
}


def run_ranks(fn, world, *args):
    return _run_ranks(fn, world, args=args, env={"DEEPC_LOG_LEVEL": "WARNING"})


def close_to_plain(losses, first, weights, want_losses, want_first, want_weights):
    for a, b in zip(losses, want_losses, strict=True):
        assert math.isclose(a, b, rel_tol=1e-6), (a, b)
    for name, grad in want_first.items():
        torch.testing.assert_close(
            first[name],
            grad,
            rtol=0,
            atol=1e-5 * float(grad.abs().max()) + 1e-12,
            msg=lambda m, name=name: f"{name}: {m}",
        )
    # Elements with next to no gradient differ in plain PyTorch against itself (Adam divides by their noise): compare
    # the whole, in norm.
    difference = math.sqrt(sum(float((weights[n] - w).double().square().sum()) for n, w in want_weights.items()))
    total = math.sqrt(sum(float(w.double().square().sum()) for w in want_weights.values()))
    assert difference <= 1e-5 * total, difference / total


def same_bits(a: dict, b: dict):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def train_all_stages(rank, world, micro, gas, precision, steps, options):
    """[(losses, first gradients, weights)] per stage, several engines in one process; and what the counters say."""
    import deepc

    out = []
    for stage in range(4):
        before = deepc.counters()
        cfg = tiny.config(stage, micro=micro, gas=gas, precision=precision, deepc={"bucket_elems": 8192})
        losses, first, weights, engine = tiny.engine_training(cfg, steps, rank, world, **options)
        after = deepc.counters()
        counted = {k: after[k] - before[k] for k in after}
        out.append((losses, first, weights, counted, engine.skipped_steps))
        engine.destroy()
    return out


@pytest.mark.parametrize(
    "world, gas",
    [(1, 1), pytest.param(2, 1, marks=pytest.mark.full), pytest.param(4, 1, marks=pytest.mark.full), (2, 2)],
)
def test_stages_equal_plain_pytorch_and_each_other(world, gas):
    want = tiny.plain_training(STEPS)
    ranks = run_ranks(train_all_stages, world, 8 // world // gas, gas, "fp32", STEPS, {})
    for stage in range(4):
        for rank in range(world):
            losses, first, weights, counted, _ = ranks[rank][stage]
            close_to_plain(losses, first, weights, *want)
            same_bits(weights, ranks[0][0][2])
            assert losses == ranks[0][0][0]
            # The C path ran: one AdamW call a step, every gradient reduced by C, no parameter moved at stage 3.
            assert counted["adamw_calls"] == STEPS
            assert counted["buckets_reduced"] > 0
            if stage == 3:
                assert counted["gather_bytes"] == 0
            if world > 1:
                assert counted["bucket_bytes_in"] > 0 and counted["bucket_bytes_reduced"] > 0
            elif stage:
                assert counted["bucket_bytes_in"] == 0
        if world > 1:  # a rank's share of the update shrinks with the ranks
            assert ranks[0][3][3]["adamw_elements"] < ranks[0][0][3]["adamw_elements"]


@pytest.mark.parametrize(
    "variant", ["all", *(pytest.param(v, marks=pytest.mark.full) for v in VARIANTS if v not in ("plain", "all"))]
)
def test_kinds_of_parameters(variant):
    options = VARIANTS[variant]
    want = tiny.plain_training(6, weight_decay=0.0, **options)
    ranks = run_ranks(_train_variant, 2, 6, options)
    for stage in (0, 2, 3):
        for rank in range(2):
            losses, first, weights = ranks[rank][stage]
            close_to_plain(losses, {n: first[n] for n in want[1]}, weights, *want)
            same_bits(weights, ranks[0][0][2])


def _train_variant(rank, world, steps, options):
    out = {}
    for stage in (0, 2, 3):
        cfg = tiny.config(stage, micro=4, weight_decay=0.0, deepc={"bucket_elems": 8192})
        losses, first, weights, engine = tiny.engine_training(cfg, steps, rank, world, **options)
        out[stage] = (losses, first, weights)
        engine.destroy()
    return out


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.full)])
def test_16_bit_stages_are_bit_equal_and_learn(precision):
    ranks = run_ranks(train_all_stages, 2, 2, 2, precision, 12, {"batches": 1})  # one batch again and again: learnable
    how = {"bf16": (torch.bfloat16, 1.0), "fp16": (torch.float16, 2.0**14)}[
        precision
    ]  # no fp32: some processors' bf16 is 0.05 away
    reference = tiny.plain_training_16(12, how[0], micro=2, gas=2, world=2, scale=how[1])
    for stage in range(4):
        for rank in range(2):
            losses, _, weights, counted, skipped = ranks[rank][stage]
            same_bits(weights, ranks[0][0][2])
            assert losses == ranks[0][0][0]
            assert counted["adamw_calls"] == 12 - skipped
    losses, skipped = ranks[0][0][0], ranks[0][0][4]
    assert len(losses) == len(reference) == 12
    assert (skipped == 0 or precision == "fp16") and len(set(losses[: skipped + 1])) == 1  # the scale is found first
    assert losses[skipped] - losses[-1] > 0.1, losses
    worst = max(abs(a - b) for a, b in zip(losses[skipped:], reference[: 12 - skipped], strict=True))
    assert worst < 0.02, worst


def test_losses_do_not_depend_on_how_the_batch_is_cut():
    """The same global batch on 1 rank, 2 ranks, and 2 ranks x 2 micro-batches: within rounding."""
    one = run_ranks(train_all_stages, 1, 8, 1, "fp32", 4, {})[0][2][0]
    two = run_ranks(train_all_stages, 2, 2, 2, "fp32", 4, {})[0][2][0]
    assert len(one) == 4
    for a, b in zip(one, two, strict=True):
        assert math.isclose(a, b, rel_tol=1e-6)


def _uneven_nodes(rank, world):
    """Two ranks on one node and one on another: they reach each other over torch.distributed (Gloo), as GPUs do.
    test_nodes.py has even ones."""
    import os

    os.environ["DEEPC_NODE_ID"] = f"host{rank // 2}"
    try:
        return _on_uneven_nodes(rank, world)
    finally:
        del os.environ["DEEPC_NODE_ID"]  # the process goes on to other tests


def _on_uneven_nodes(rank, world):
    import deepc

    out = {}
    for stage in (0, 1, 2):
        cfg = tiny.config(stage, micro=2, weight_decay=0.0, deepc={"bucket_elems": 8192})
        before = deepc.counters()["buckets_reduced"]
        losses, first, weights, engine = tiny.engine_training(cfg, 6, rank, world, samples=6, unused=True)
        assert engine.plan.transport == "c10d" and deepc.counters()["buckets_reduced"] == before
        out[stage] = losses, first, weights
        engine.destroy()
    return out


def test_nodes_with_different_numbers_of_ranks():
    losses, first, weights = tiny.plain_training(6, samples=6, unused=True, weight_decay=0.0)
    for rank in run_ranks(_uneven_nodes, 3):
        for stage in (0, 1, 2):
            close_to_plain(
                rank[stage][0], {n: rank[stage][1][n] for n in first}, rank[stage][2], losses, first, weights
            )


# ---- accumulation, no_sync, clipping, prescale -----------------------------------------------------------------------


def _no_sync(rank, world):
    import deepc

    out = {}
    for stage in (0, 3):
        engine, _, _, _ = deepc.initialize(model=tiny.make_model(), config=tiny.config(stage, micro=2, clip=0.0))
        for step in range(3):
            x, y = tiny.make_batch(step)
            parts = [(x[(2 * m + rank) * 2 :][:2], y[(2 * m + rank) * 2 :][:2]) for m in range(2)]
            with engine.no_sync():
                engine.backward(engine(*parts[0]) / 2)
            assert any(p.grad is not None for p in engine.module.parameters())
            engine.backward(engine(*parts[1]) / 2)
            assert all(p.grad is None for p in engine.module.parameters())
            assert engine.step().applied
        out[stage] = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
        engine.destroy()
    return out


def test_no_sync_keeps_gradients_local_and_loses_none():
    want = tiny.plain_training(3, clip=None)[2]
    ranks = run_ranks(_no_sync, 2)
    for stage in (0, 3):
        same_bits(ranks[0][stage], ranks[1][stage])
        close_to_plain([], {}, ranks[0][stage], [], {}, want)


def _kept_then_reduced(rank, world):
    """Gradients before the step of two micro-batches, the first in no_sync(), each by engine.backward or a bare
    backward; "direct": of the module itself, of which no output tells."""
    import deepc

    out = {}
    mixed = [("own", "own"), ("own", "bare"), ("bare", "own"), ("bare", "bare"), ("direct", "bare"), ("direct", "own")]
    for precision, cases in (("fp32", mixed), ("fp16", mixed[:2])):
        for ways in cases:
            cfg = tiny.config(2, micro=2, gas=2, clip=0.0)
            if precision == "fp16":
                cfg["fp16"] = {"enabled": True, "initial_scale_power": 8}
            engine, _, _, _ = deepc.initialize(model=tiny.make_model(), config=cfg)
            x, y = tiny.make_batch(0)
            for m, way in enumerate(ways):
                at = (2 * m + rank) * 2
                with engine.no_sync() if m == 0 else contextlib.nullcontext():
                    loss = (engine.module if way == "direct" else engine)(x[at : at + 2], y[at : at + 2])
                    engine.backward(loss) if way == "own" else engine.scale(loss).backward()
                if m == 0:
                    engine.step()
            out[precision, ways] = {n: engine.full_grad(p) for n, p in engine.module.named_parameters()}
            assert engine.step().applied
            engine.destroy()
    return out


def test_what_no_sync_keeps_is_divided_once_whoever_ran_the_backwards():
    for rank in run_ranks(_kept_then_reduced, 2):
        for (precision, ways), grads in rank.items():
            for name, want in rank[precision, ("own", "own")].items():
                largest = (1e-5 if precision == "fp32" else 1e-2) * float(want.abs().max())
                assert float((grads[name] - want).abs().max()) <= largest + 1e-6, (precision, ways, name)


@pytest.mark.parametrize("gas", [1, 2])
def test_autograd_grad_leaves_nothing_and_unscaled_gradients_do_not_stay(gas):
    """fp16, inside of no_sync() and outside, of the engine's outputs and of its module's."""
    import deepc
    from deepc.errors import DeepcError

    cfg = tiny.config(1, micro=8, gas=gas, clip=0.0)
    cfg["fp16"] = {"enabled": True, "initial_scale_power": 8}
    engine, *_ = deepc.initialize(model=tiny.make_model(), config=cfg)
    weight, batch, found = engine.module.ln.weight, tiny.make_batch(0), []
    for outside in (True, False):
        for model in (engine, engine.module):
            with contextlib.nullcontext() if outside else engine.no_sync():
                found.append(torch.autograd.grad(model(*batch), weight)[0])
                with pytest.raises(DeepcError, match="fp16 training scales the loss"):
                    model(*batch).backward()
            assert all(p.grad is None for p in engine.module.parameters())
            engine.restart_step()
    assert all(torch.equal(found[0], g) for g in found)
    for _ in range(gas):
        with engine.no_sync():
            torch.autograd.grad(engine(*batch), weight)
            engine.scale(engine.module(*batch) / 2).backward()
        engine.backward(engine(*batch) / 2)
        result = engine.step()
    want = found[0].float()
    assert result.applied and (result.grad_norm or 0.0) > float(want.norm())
    engine.destroy()


def test_what_a_module_leaves_beside_others_is_refused():
    """Inside of no_sync(): gradients of another scale, of a backward that no output of the engine tells of."""
    import deepc
    from deepc.errors import UnsupportedError

    engine, *_ = deepc.initialize(model=tiny.make_model(), config=tiny.config(1, micro=8, gas=2, clip=0.0))
    batch = tiny.make_batch(0)
    with engine.no_sync():
        engine.backward(engine(*batch))
        with pytest.raises(UnsupportedError, match="called without its engine"):
            engine.module(*batch).backward()
    engine.restart_step()
    engine.destroy()


def _loops(rank, world):
    """The engine's loop, a bare loss.backward(), two losses before a step, and explicit boundaries: all the same
    training."""
    import deepc

    out = {}
    for kind in ("engine", "bare", "two", "boundary"):
        gas = 2 if kind == "boundary" else 1
        engine, _, _, _ = deepc.initialize(
            model=tiny.make_model(), config=tiny.config(2, micro=4 // gas, gas=gas, clip=0.5)
        )
        for step in range(3):
            x, y = tiny.make_batch(step)
            x, y = x[rank * 4 :][:4], y[rank * 4 :][:4]
            if kind == "engine":
                engine.backward(engine(x, y))
            elif kind == "bare":
                engine(x, y).backward()
            elif kind == "two":
                engine.backward(engine(x[:2], y[:2]) / 2)
                engine.backward(engine(x[2:], y[2:]) / 2)
            else:
                for half in range(2):
                    engine.set_gradient_accumulation_boundary(half == 1)
                    engine.backward(engine(x[2 * half :][:2], y[2 * half :][:2]))
                    engine.step()
            if kind != "boundary":
                assert engine.step().applied
        assert engine.global_steps == 3
        out[kind] = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
        engine.destroy()
    return out


def test_every_way_to_write_the_loop_gives_the_same_training():
    want = tiny.plain_training(3, clip=0.5)[2]
    ranks = run_ranks(_loops, 2)
    same_bits(ranks[0]["engine"], ranks[0]["bare"])
    for kind in ranks[0]:
        same_bits(ranks[0][kind], ranks[1][kind])
        close_to_plain([], {}, ranks[0][kind], [], {}, want)


def _first_gradients(rank, world, variants):
    """Of engines with the same model and data; variants: what their configurations have more."""
    out = []
    for extra in variants:
        cfg = tiny.config(2, micro=8 // world, weight_decay=0.0, **extra)
        _, first, _, engine = tiny.engine_training(cfg, 1, rank, world)
        out.append(first)
        engine.destroy()
    return out


def _differ(a: dict, b: dict, largest: float) -> None:
    """Not the same bits, and apart by no more than `largest` of each tensor's largest element."""
    assert any(not torch.equal(a[n], b[n]) for n in b)
    for name, want in b.items():
        torch.testing.assert_close(a[name], want, rtol=0, atol=largest * float(want.abs().max()) + 1e-9)


def test_prescale_changes_nothing_but_the_order_of_division():
    before = [{"prescale_gradients": True}, {"gradient_predivide_factor": 4.0}, {"gradient_predivide_factor": 3.0}]
    for plain, half, quarter, third in run_ranks(_first_gradients, 2, [{}, *before]):
        same_bits(plain, half)  # a power of two is exact
        same_bits(plain, quarter)
        _differ(third, plain, 1e-6)  # a third is not: the key acts


def test_gradients_travel_in_the_type_that_is_asked_for():
    short, wide = {"communication_data_type": "bf16"}, {"communication_data_type": "fp32"}
    for plain, same, rounded in run_ranks(_first_gradients, 2, [{}, wide, short]):
        same_bits(plain, same)
        _differ(rounded, plain, 2**-7)


# ---- skipped steps ---------------------------------------------------------------------------------------------------


def _poison(rank, world, precision):
    import deepc

    engine, optimizer, _, scheduler = deepc.initialize(
        model=tiny.make_model(),
        config=tiny.config(
            2, micro=4, precision=precision, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
        ),
    )
    x, y = tiny.make_batch(0)
    x, y = x[rank * 4 :][:4], y[rank * 4 :][:4]
    before = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
    loss = engine(x, y)
    engine.backward(loss * (float("inf") if rank == 1 else 1.0))
    scale, lr = engine.loss_scale, engine.get_lr()
    result = engine.step()
    assert not result.applied and "finite" in result.reason and result.bad_parameter
    assert engine.skipped_steps == 1 and engine.global_steps == 1 and optimizer.overflow
    assert engine.get_lr() == lr
    for n, p in engine.module.named_parameters():
        assert torch.equal(p, before[n])
    engine.backward(engine(x, y))
    assert engine.step().applied or precision == "fp16"
    engine.destroy()
    return result.bad_parameter, scale, engine.loss_scale


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_gradients_that_are_not_finite_skip_the_step_on_every_rank(precision):
    a, b = run_ranks(_poison, 2, precision)
    assert a == b


# ---- stage 3: node-shared parameters ---------------------------------------------------------------------------------


def _stray(rank, world):
    import deepc
    from deepc.errors import StrayWriteError

    said = []
    for kind in ("data", "no_grad", "init", "clamp"):
        engine, _, _, _ = deepc.initialize(model=tiny.make_model(), config=tiny.config(3, micro=4))
        x, y = tiny.make_batch(0)
        engine.backward(engine(x[:4], y[:4]))
        weight = engine.module.blocks[1].up.weight
        if rank == 1:  # on one rank only: all must hear of it
            with torch.no_grad():
                if kind == "data":
                    weight.data.mul_(1.0)
                elif kind == "no_grad":
                    weight.add_(0.0)
                elif kind == "init":
                    torch.nn.init.ones_(weight)
                else:
                    weight.data.clamp_(-1, 1)
        with pytest.raises(StrayWriteError, match=r"blocks.1.up.weight.*rank 1"):
            engine.step()
        said.append(kind)
        engine.destroy()
    return said


def test_stray_writes_raise_on_all_ranks_and_name_the_parameter():
    assert run_ranks(_stray, 2) == [["data", "no_grad", "init", "clamp"]] * 2


def _replica_writes(rank, world, precision):
    """Stages 0 to 2: what every rank writes into its replica counts, as under DDP, also behind fp32 masters."""
    import deepc

    for stage in (0, 2):
        engine, _, _, _ = deepc.initialize(
            model=tiny.make_model(), config=tiny.config(stage, micro=4, precision=precision)
        )
        x, y = tiny.make_batch(0)
        weight, other = engine.module.blocks[1].up.weight, engine.module.ln.weight
        before = engine.full_fp32_param(other).clone()
        engine.backward(engine(x[:4], y[:4]))
        weight.data.fill_(0.5)
        assert engine.step().applied
        assert float((engine.full_fp32_param(weight) - 0.5).abs().max()) < 0.01
        assert float((weight.float() - 0.5).abs().max()) < 0.01
        assert 0 < float((engine.full_fp32_param(other) - before).abs().max()) < 0.01
        state = {n: torch.full_like(t, 0.125) for n, t in engine.module.state_dict().items()}
        engine.load_module_state_dict(state)
        assert torch.all(engine.full_fp32_param(weight) == 0.125)
        engine.destroy()
    engine, _, _, _ = deepc.initialize(model=tiny.make_model(), config=tiny.config(3, micro=4, precision=precision))
    engine.load_module_state_dict({n: torch.full_like(t, 0.125) for n, t in engine.module.state_dict().items()})
    assert torch.all(engine.full_fp32_param(engine.module.ln.weight) == 0.125)
    x, y = tiny.make_batch(0)
    engine.backward(engine(x[:4], y[:4]))
    assert engine.step().applied
    engine.destroy()
    return True


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_writes_to_replicas_count_at_stages_0_to_2(precision):
    assert all(run_ranks(_replica_writes, 2, precision))


@pytest.mark.parametrize("stage", [1, 3])
def test_data_of_another_shape_or_order_is_no_parameters(stage):
    """As many elements, and for a transposed square even the same memory: gradients would be added to others'."""
    import deepc
    from deepc.errors import ArgumentError, StrayWriteError

    engine, *_ = deepc.initialize(model=tiny.make_model(), config=tiny.config(stage, micro=8))
    block = engine.module.blocks[0]
    engine.backward(engine(*tiny.make_batch(0)))
    up, proj = block.up.weight.data, block.proj.weight.data
    wrong = StrayWriteError if stage == 3 else ArgumentError
    for other in (up.view(32, 128), up.clone().view(32, 128), up[:, :16]):
        block.up.weight.data = other
        with pytest.raises(wrong, match="blocks.0.up.weight" if stage == 3 else r"must stay \(128, 32\)"):
            engine.step()
    block.up.weight.data = up
    before = proj.clone()
    block.proj.weight.data = proj.t()
    if stage == 3:
        with pytest.raises(wrong, match="blocks.0.proj.weight"):
            engine.step()
    else:  # its values count, as those of any other tensor
        assert engine.step().applied and block.proj.weight.is_contiguous()
        assert float((block.proj.weight.detach() - before.t()).abs().max()) < 0.01
    engine.destroy()


def _gathered(rank, world, precision):
    import deepc

    engine, _, _, _ = deepc.initialize(model=tiny.make_model(), config=tiny.config(3, micro=4, precision=precision))
    weight = engine.module.blocks[0].up.weight
    original = weight.detach().clone()
    with deepc.zero.GatheredParameters([weight], modifier_rank=1):
        with torch.no_grad():
            weight.fill_(0.25 if rank == 1 else 99.0)  # only rank 1's counts
    assert torch.all(weight == 0.25) and not torch.equal(weight, original)
    assert torch.all(engine.full_fp32_param(weight) == 0.25)
    with deepc.zero.GatheredParameters(engine.module.parameters()):
        assert all(p.numel() and p.shape for p in engine.module.parameters())
    x, y = tiny.make_batch(0)
    engine.backward(engine(x[:4], y[:4]))
    assert engine.step().applied
    assert float((engine.full_fp32_param(weight) - 0.25).abs().max()) < 0.01
    engine.destroy()
    return True


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gathered_parameters_modifier(precision):
    assert all(run_ranks(_gathered, 2, precision))


def _old_graph(rank, world):
    import deepc

    for stage in (0, 3):
        engine, _, _, _ = deepc.initialize(model=tiny.make_model(), config=tiny.config(stage, micro=4))
        x, y = tiny.make_batch(0)
        old = engine(x[:4], y[:4])
        engine.backward(engine(x[:4], y[:4]))
        engine.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            engine.backward(old)
        engine.destroy()
    return True


def test_backward_of_a_graph_from_before_the_step_raises():
    assert all(run_ranks(_old_graph, 2))


def _shared_memory(rank, world):
    import deepc

    engine, _, _, _ = deepc.initialize(model=tiny.make_model(width=128, layers=4), config=tiny.config(3, micro=4))
    bytes_ = engine.plan.bytes
    assert bytes_["params_private"] == 0 and bytes_["params_shared"] == engine.plan.layout.total * 4
    with torch.no_grad():  # evaluation moves nothing and touches no version
        versions = [p._version for p in engine.module.parameters()]
        x, y = tiny.make_batch(0)
        losses = [engine(x, y).item() for _ in range(2)]
        assert versions == [p._version for p in engine.module.parameters()]
    mapped = [line for line in open("/proc/self/maps") if "memfd:" in line]
    engine.destroy()
    return losses, len(mapped) > 0


def test_stage_3_parameters_are_one_copy_per_node():
    a, b = run_ranks(_shared_memory, 2)
    assert a == b and a[1]


def _zero_init(rank, world):
    import deepc

    torch.manual_seed(rank)  # rank 0's values count
    with deepc.zero.Init():
        torch.manual_seed(rank)
        model = tiny.TinyGPT()
    built = {n: p.detach().clone() for n, p in model.named_parameters()}
    engine, _, _, _ = deepc.initialize(model=model, config=tiny.config(3, micro=4))
    for n, p in model.named_parameters():
        assert torch.equal(p, built[n]), n
    x, y = tiny.make_batch(0)
    engine.backward(engine(x[:4], y[:4]))
    assert engine.step().applied
    engine.destroy()
    assert "_deepc_building" not in model.__dict__ and torch.nn.Linear.__init__.__name__ == "__init__"
    assert not hasattr(torch.nn.Linear.__init__, "_deepc_original")
    return built


def test_zero_init_builds_into_shared_memory_with_rank_0s_values():
    a, b = run_ranks(_zero_init, 2)
    same_bits(a, b)
    same_bits(a, {n: p.detach() for n, p in tiny.make_model(0).named_parameters()})


# ---- optimizers and schedules ----------------------------------------------------------------------------------------


def _two_groups(model, name):
    """eps: see plainly.OPTIMIZERS; RMSprop's first step is ten times lr where a gradient is above eps."""
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    eps = {} if name == "SGD" else {"eps": 1e-4}
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 2e-3}]
    return getattr(torch.optim, name)(groups, lr=1e-3, **eps)


def _client_optimizer(rank, world, name, stage):
    import deepc

    model = tiny.make_model()
    base = _two_groups(model, name)
    cfg = tiny.config(stage, micro=8 // world, clip=0.0)
    del cfg["optimizer"]
    engine, optimizer, _, _ = deepc.initialize(model=model, optimizer=base, config=cfg)
    for step in range(3):
        x, y = tiny.make_batch(step)
        n = 8 // world
        engine.backward(engine(x[rank * n :][:n], y[rank * n :][:n]))
        engine.step()
    out = {n: engine.full_fp32_param(p).clone() for n, p in model.named_parameters()}
    engine.destroy()
    return out


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("AdamW", 0),
        ("SGD", 2),
        ("RMSprop", 3),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (("AdamW", 2), ("AdamW", 3), ("SGD", 0), ("SGD", 3), ("RMSprop", 0), ("RMSprop", 2))
        ),
    ],
)
def test_client_optimizers_and_groups(name, stage):
    model = tiny.make_model()
    ref = _two_groups(model, name)
    for step in range(3):
        model(*tiny.make_batch(step)).backward()
        ref.step()
        ref.zero_grad()
    want = {n: p.detach() for n, p in model.named_parameters()}
    for weights in run_ranks(_client_optimizer, 2, name, stage):
        close_to_plain([], {}, weights, [], {}, want)


def test_stage_above_zero_refuses_an_optimizer_that_mixes_elements():
    import deepc
    from deepc.errors import ConfigError

    class Odd(torch.optim.SGD):
        pass

    model = tiny.make_model()
    cfg = tiny.config(2, micro=8)
    del cfg["optimizer"]
    with pytest.raises(ConfigError, match="zero_allow_untested_optimizer"):
        deepc.initialize(model=model, optimizer=Odd(model.parameters(), lr=0.1), config=cfg)


@pytest.mark.parametrize(
    ("kind", "key", "value", "text"),
    [
        ("AdamW", "lr", float("nan"), "lr of param group 0 is nan, which must be finite"),
        ("AdamW", "betas", (1.2, 0.99), r"betas\[0\] of param group 0 is 1.2, which must be in \[0, 1\)"),
        ("AdamW", "amsgrad", True, "param group 0 has asked for other states"),
        ("SGD", "momentum", 0.9, "param group 0 has asked for other states"),
        ("Muon", "use_muon", False, "param group 0 has asked for other states"),
        ("Muon", "momentum", 1.5, r"of param group 0 momentum must be in \[0, 1\), got 1.5"),
        ("Adafactor", "d", 0.0, "of param group 0 d must be >= 1, got 0.0"),
        ("Adafactor", "beta2_decay", float("nan"), "of param group 0 beta2_decay must be <= 0, got nan"),
        ("Adafactor", "eps", (None, -1.0), r"of param group 0 eps\[1\] must be >= 0, got -1.0"),
        ("Adafactor", "eps", 1e-8, "of param group 0 eps must be two numbers"),
        ("Lamb", "max_coeff", float("nan"), "of param group 0 max_coeff must be >= 0, got nan"),
        ("Adagrad", "lr_decay", -1.0, "of param group 0 lr_decay must be >= 0, got -1.0"),
    ],
)
def test_a_number_that_no_step_can_be_made_with_counts_no_step(kind, key, value, text):
    """Set between two steps, by a script or a schedule. The step after it is mended is the one that it would have been:
    of Adam the correction of young moments goes by the count."""
    import deepc
    from deepc.errors import ArgumentError

    found = []
    for wrong in (False, True):
        model = tiny.make_model()
        optimizer = getattr(deepc.optim, kind)(model.parameters(), lr=1e-2)
        engine, *_ = deepc.initialize(model=model, optimizer=optimizer, config=tiny.config(1, micro=8, optimizer=None))
        engine.backward(engine(*tiny.make_batch(0)))
        if wrong:
            right = optimizer.param_groups[0][key]
            optimizer.param_groups[0][key] = value
            with pytest.raises(ArgumentError, match=text):
                engine.step()
            optimizer.param_groups[0][key] = right
            assert engine.global_steps == 0
        assert engine.step().applied
        found.append([engine.full_fp32_param(p).clone() for p in model.parameters()])
        engine.destroy()
    assert all(torch.equal(a, b) for a, b in zip(*found))


# optimizer, its arguments, what is set in flight
SETTINGS = [
    ("AdamW", {"amsgrad": True, "betas": (0.9, 0.1)}, {"amsgrad": False}),
    ("AdamW", {"amsgrad": True}, {"betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": 0.3, "maximize": True}),
    ("Adam", {}, {"weight_decay": 0.3, "decoupled_weight_decay": True}),
    ("SGD", {"momentum": 0.9}, {"momentum": 0.0}),
    ("SGD", {"momentum": 0.9}, {"momentum": 0.5, "nesterov": True, "weight_decay": 0.3, "maximize": True}),
    ("SGD", {"momentum": 0.9, "nesterov": True}, {"nesterov": False, "dampening": 0.5}),
    ("Adagrad", {}, {"lr_decay": 0.2, "eps": 1e-3, "weight_decay": 0.3, "maximize": True}),
    ("Adafactor", {}, {"d": 2.0, "beta2_decay": -0.5, "eps": (1e-4, 1e-2), "weight_decay": 0.3, "maximize": True}),
]


@pytest.mark.parametrize(("name", "options", "change"), SETTINGS)
def test_what_is_set_of_a_param_group_in_flight_acts(name, options, change):
    """At steps 2 and 3 of 6, as torch's own optimizer has it."""
    import deepc

    model = tiny.make_model()
    plain = copy.deepcopy(model)
    made, torchs = (
        getattr(m, name)(n.parameters(), **options) for m, n in ((deepc.optim, model), (torch.optim, plain))
    )
    engine, *_ = deepc.initialize(model=model, optimizer=made, config=tiny.config(1, micro=8, optimizer=None, clip=0.0))
    for step in range(6):
        for opt in (made, torchs):
            opt.param_groups[0].update(change if 2 <= step < 4 else {k: opt.defaults[k] for k in change})
        x, y = tiny.make_batch(step)
        engine.backward(engine(x, y))
        engine.step()
        torchs.zero_grad()
        plain(x, y).backward()
        torchs.step()
    for (n, p), want in zip(model.named_parameters(), plain.parameters()):
        np.testing.assert_allclose(
            engine.full_fp32_param(p).numpy(), want.detach().numpy(), rtol=2e-4, atol=2e-6, err_msg=n
        )
    engine.destroy()


@pytest.mark.parametrize(("name", "state"), [("AdamW", {"amsgrad": True}), ("SGD", {"momentum": 0.9})])
def test_a_state_that_is_left_out_in_flight_moves_too(name, state, tmp_path):
    """To disk and back: when it is used again, it has what it had."""
    import deepc

    found = []
    for moves in (True, False):
        model = tiny.make_model()
        made = getattr(deepc.optim, name)(model.parameters(), **state)
        cfg = tiny.config(1, micro=8, precision="bf16", optimizer=None, clip=0.0)
        engine, *_ = deepc.initialize(model=model, optimizer=made, config=cfg)
        for step in range(4):
            made.param_groups[0].update({k: made.defaults[k] if step != 1 else type(v)(0) for k, v in state.items()})
            if moves and step == 1:
                engine.offload_states(str(tmp_path))
            elif moves and step == 3:
                engine.reload_states()
            engine.backward(engine(*tiny.make_batch(step)))
            assert engine.step().applied
        found.append([engine.full_fp32_param(p).clone() for p in model.parameters()])
        engine.destroy()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_step_of_ones_own_is_made():
    """A class that is derived from deepc's: the core does not step in its place."""
    import deepc
    from deepc.errors import ConfigError

    class Bounded(deepc.optim.AdamW):
        @torch.no_grad()
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                for p in group["params"]:
                    p.clamp_(-0.01, 0.01)

    model = tiny.make_model()
    with pytest.raises(ConfigError, match="optimizer Bounded at ZeRO stage 1"):
        deepc.initialize(model=model, optimizer=Bounded(model.parameters()), config=tiny.config(1, micro=8))
    engine, *_ = deepc.initialize(
        model=model, optimizer=Bounded(model.parameters()), config=tiny.config(0, micro=8, optimizer=None)
    )
    engine.backward(engine(*tiny.make_batch(0)))
    engine.step()
    assert max(float(p.detach().abs().max()) for p in model.parameters()) == torch.tensor(0.01).item()
    engine.destroy()


class _Raises(torch.optim.Optimizer):
    """Its second call raises, before it has changed the `at`th parameter."""

    def __init__(self, params, at, **group):
        super().__init__(params, {"lr": 1e-3, **group})
        self.at, self.calls = at, 0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if self.calls == 2 and i == self.at:
                    raise torch.OutOfMemoryError("[made by the test]")
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                p.sub_(p.grad, alpha=group["lr"])


class _ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD (Defazio et al., arXiv:2405.15682): gradients are taken at y, and eval() makes x of it."""

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": True})

    @torch.no_grad()
    def _to(self, weight, train):
        for group in self.param_groups:
            for p in group["params"] if group["train_mode"] != train else ():
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], weight(group["beta"]))
            group["train_mode"] = train

    def eval(self):
        self._to(lambda beta: 1 - 1 / beta, False)

    def train(self):
        self._to(lambda beta: 1 - beta, True)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["train_mode"]
            group["k"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                x = p.lerp(z, 1 - 1 / group["beta"])
                z.sub_(p.grad, alpha=group["lr"])
                p.copy_(x.lerp_(z, 1 / group["k"]).lerp_(z, 1 - group["beta"]))


class _Estimates(torch.optim.Optimizer):
    """Its step is as long as what it keeps of all gradients, as Prodigy's and D-Adaptation's."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "d": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["d"] += sum(p.grad.double().square().sum().item() for p in group["params"])
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] / group["d"] ** 0.5)


class _Counts(torch.optim.Optimizer):
    """Takes each element alone, and counts its steps in a tensor of its group."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "steps": torch.zeros(())})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] / float(group["steps"]))


def _own_optimizer(rank, world, kind, stage, precision):
    """What the parameters are after two steps, after eval(), and after train() and another step."""
    import deepc

    model = tiny.make_model()
    base = kind(model.parameters())
    more = dict(clip=0.0, optimizer=None, zero_allow_untested_optimizer=True, precision=precision)
    engine, *_ = deepc.initialize(model=model, optimizer=base, config=tiny.config(stage, micro=8 // world, **more))
    found = []
    for number in range(3):
        x, y = (t[rank * 8 // world : (rank + 1) * 8 // world] for t in tiny.make_batch(number, 8))
        engine.backward(engine(x, y))
        engine.step()
        if number == 1 and kind is _ScheduleFree:
            found.append([engine.full_fp32_param(p).clone() for p in model.parameters()])
            engine.optimizer.eval()
            base.eval()  # which it is
            with deepc.zero.GatheredParameters(list(model.parameters())):
                found.append([p.detach().float().clone() for p in model.parameters()])
            base.train()
    found.append([engine.full_fp32_param(p).clone() for p in model.parameters()])
    engine.destroy()
    if kind is _ScheduleFree:
        base.eval()  # nobody's any more
        assert not base.param_groups[0]["train_mode"]
    return found


def _by_itself(kind):
    model = tiny.make_model()
    opt = kind(model.parameters())
    found = []
    for number in range(3):
        opt.zero_grad()
        model(*tiny.make_batch(number, 8)).backward()
        opt.step()
        if number == 1 and kind is _ScheduleFree:
            found.append([p.detach().clone() for p in model.parameters()])
            opt.eval()
            found.append([p.detach().clone() for p in model.parameters()])
            opt.train()
    return [*found, [p.detach().clone() for p in model.parameters()]]


@pytest.mark.parametrize(
    ("kind", "stage", "precision"),
    [
        (_ScheduleFree, 0, "fp32"),
        (_ScheduleFree, 3, "bf16"),
        pytest.param(_ScheduleFree, 2, "bf16", marks=pytest.mark.full),
        pytest.param(_ScheduleFree, 3, "fp32", marks=pytest.mark.full),
        (_Estimates, 0, "fp32"),
        (_Counts, 1, "fp32"),
    ],
)
def test_optimizers_that_keep_numbers_in_groups_and_have_modes(kind, stage, precision):
    """Of one with modes, train() and eval() reach the model, at every stage."""
    close = dict(rtol=1e-5, atol=1e-6) if precision == "fp32" else dict(rtol=2e-2, atol=4e-3)
    for found in run_ranks(_own_optimizer, 2, kind, stage, precision):
        for got, want in zip(found, _by_itself(kind), strict=True):
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, **close)


def test_an_optimizer_that_sums_over_parameters_is_told_at_stage_1():
    said = r"deepc.initialize: _Estimates steps each rank's .* d of param group 0 .* use zero_optim.*0"
    with pytest.raises(RankFailure, match=said):  # before a step
        run_ranks(_own_optimizer, 2, _Estimates, 1, "fp32")


def test_a_step_that_raised_part_way_is_not_made_again(tmp_path):
    """Some parameters and states would have it twice. Of one that has changed nothing another call makes it."""
    import deepc
    from deepc.errors import DeepcError

    cfg = tiny.config(0, micro=8, clip=0.0, optimizer=None, zero_allow_untested_optimizer=True)
    cfg["fp16"] = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 1}
    found = []
    for at in (0, 3, -1):
        model = tiny.make_model()
        engine, *_ = deepc.initialize(model=model, config=cfg, optimizer=_Raises(model.parameters(), at))
        for number in range(3):
            engine.backward(engine(*tiny.make_batch(number)))
            if number == 1 and at >= 0:
                with pytest.raises(torch.OutOfMemoryError):
                    engine.step()
            if number == 1 and at > 0:
                for call in (engine.step, lambda: engine.backward(engine(*tiny.make_batch(2)))):
                    with pytest.raises(DeepcError, match=r"step 2 was broken off in its update \(OutOfMemoryError\)"):
                        call()
                engine.load_checkpoint(tmp_path)
                engine.backward(engine(*tiny.make_batch(1)))
            assert engine.step().applied
            if number == 0:
                engine.save_checkpoint(tmp_path)
        assert engine.global_steps == 3 and engine.optimizer.state_dict()["hyper"]["step"] == 3
        found.append(
            [*(engine.full_fp32_param(p).clone() for p in model.parameters()), torch.tensor(engine.loss_scale)]
        )
        engine.destroy()
    for other in found[:2]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[2], strict=True))


def test_a_step_whose_weights_can_not_be_taken_is_not_made_again():
    """Its optimizer has stepped, and states are changed."""
    import deepc
    from deepc.errors import DeepcError

    class Shrinks(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            for p in self.param_groups[0]["params"]:
                p.data = p.data.reshape(-1)[1:].clone()

    model = tiny.make_model()
    cfg = tiny.config(0, micro=8, optimizer=None, zero_allow_untested_optimizer=True)
    engine, *_ = deepc.initialize(model=model, config=cfg, optimizer=Shrinks(model.parameters(), lr=0.1))
    engine.backward(engine(*tiny.make_batch(0)))
    with pytest.raises(RuntimeError, match="must match the size"):
        engine.step()
    with pytest.raises(DeepcError, match="step 1 was broken off in its update"):
        engine.step()
    engine.destroy()


def test_hooks_of_the_optimizers_state_dict_are_called():
    import deepc

    engine, optimizer, *_ = deepc.initialize(model=tiny.make_model(), config=tiny.config(1, micro=8))
    seen = []

    def more(opt, state):
        assert opt is optimizer
        return {**state, "mine": 1}

    def less(opt, state):
        assert opt is optimizer and state.pop("mine") == 1

    optimizer.register_state_dict_pre_hook(lambda opt: seen.append(("save", opt is optimizer)))
    optimizer.register_state_dict_post_hook(more)
    optimizer.register_load_state_dict_pre_hook(less)
    optimizer.register_load_state_dict_post_hook(lambda opt: seen.append(("load", opt is optimizer)))
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert saved["mine"] == 1 and seen == [("save", True), ("load", True)]
    engine.destroy()


def test_groups_and_hooks_that_come_later_are_refused():
    """The script's own optimizer has the same groups: what is added to it would not be trained."""
    import deepc
    from deepc.errors import UnsupportedError

    model = tiny.make_model()
    base = torch.optim.SGD(model.parameters(), lr=1e-3)
    engine, *_ = deepc.initialize(model=model, config=tiny.config(1, micro=8, optimizer=None), optimizer=base)
    engine.backward(engine(*tiny.make_batch(0)))
    base.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    with pytest.raises(
        UnsupportedError, match="the optimizer had 1 param group with 26 parameters .* 2 param groups with 27"
    ):
        engine.step()
    del base.param_groups[1:]
    taken = base.param_groups[0]["params"].pop()
    with pytest.raises(UnsupportedError, match=r"requires_grad_\(False\)"):
        engine.step()
    base.param_groups[0]["params"].append(taken)
    handle = base.register_step_post_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match="would not be called"):
        engine.step()
    handle.remove()
    groups = base.param_groups
    base.param_groups = [{**groups[0], "lr": 0.0}]
    with pytest.raises(UnsupportedError, match="another list than at deepc.initialize"):
        engine.step()
    base.param_groups = groups
    assert engine.step().applied
    engine.destroy()


@pytest.mark.parametrize("gas", [1, 2])
def test_zero_grad_of_the_optimizer_drops_what_no_accumulation_has_begun(gas):
    """As a GAN's loop has it: what another loss left is not of the step. A loop that calls it for each micro-batch goes
    on."""
    import deepc

    found = []
    for other in (False, True):
        engine, optimizer, *_ = deepc.initialize(
            model=tiny.make_model(), config=tiny.config(1, micro=8, gas=gas, clip=0.0)
        )
        for number in range(2 * gas):
            if other and number % gas == 0:
                with engine.no_sync() if number else contextlib.nullcontext():
                    engine.backward(engine(*tiny.make_batch(9)))
            optimizer.zero_grad()
            engine.backward(engine(*tiny.make_batch(number)))
            result = engine.step()
        assert result.applied and engine.global_steps == 2
        found.append([p.detach().clone() for p in engine.module.parameters()])
        engine.destroy()
    assert all(torch.equal(a, b) for a, b in zip(*found))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_gradient_that_no_backward_has_left_is_refused(stage):
    import deepc
    from deepc.errors import ArgumentError

    engine, *_ = deepc.initialize(model=tiny.make_model(), config=tiny.config(stage, micro=8, clip=0.0))
    weight = engine.module.ln.weight
    engine.backward(engine(*tiny.make_batch(0)))
    weight.grad = torch.ones_like(weight)
    with pytest.raises(ArgumentError, match=r"'ln.weight' has a \.grad that no backward has left"):
        engine.step()
    weight.grad = None
    deepc.view(weight).grad = torch.full_like(weight, 100.0)
    assert engine.step().grad_norm > 500
    engine.destroy()


def test_schedules_and_groups_follow_the_config():
    import deepc

    cfg = tiny.config(
        2,
        micro=8,
        scheduler={
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 5, "warmup_type": "linear"},
        },
    )
    engine, optimizer, _, scheduler = deepc.initialize(model=tiny.make_model(), config=cfg)
    rates = []
    for step in range(6):
        engine.backward(engine(*tiny.make_batch(step)))
        engine.step()
        rates.append(engine.get_lr()[0])
    assert rates[0] == 0.0 and rates == sorted(rates) and math.isclose(rates[-1], 0.01)
    assert scheduler is engine.lr_scheduler and optimizer.param_groups[0]["lr"] == rates[-1]
    engine.destroy()


@pytest.mark.parametrize("whose", ["config", "script"])
def test_torchs_schedules_do_not_warn_of_a_step_that_was_made(whose):
    import deepc

    model, cfg = tiny.make_model(), tiny.config(1, micro=8)
    given = {}
    if whose == "config":
        cfg["scheduler"] = {"type": "StepLR", "params": {"step_size": 1}}
    else:
        given["optimizer"] = torch.optim.AdamW(model.parameters())
        given["lr_scheduler"] = torch.optim.lr_scheduler.StepLR(given["optimizer"], 1)
    engine, *_ = deepc.initialize(model=model, config=cfg, **given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(2):
            engine.backward(engine(*tiny.make_batch(step)))
            engine.step()
    assert math.isclose(engine.get_lr()[0], 1e-5)
    engine.destroy()


def test_a_schedule_that_acts_on_nothing_is_told(caplog):
    import deepc

    cfg = tiny.config(1, micro=8, scheduler={"type": "WarmupLR", "params": {}})
    for passed in (False, True):
        model = tiny.make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        given = {"optimizer": optimizer} if passed else {}
        caplog.clear()
        with caplog.at_level(logging.INFO, "deepc"):
            engine, *_ = deepc.initialize(model=model, config=cfg, lr_scheduler=schedule, **given)
        assert ("StepLR that was passed is of another optimizer" in caplog.text) is not passed
        assert "the config's scheduler section is not used" in caplog.text
        engine.destroy()


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adagrad"])
def test_states_of_an_optimizer_that_are_not_taken_are_told(kind, caplog):
    import deepc

    cfg = tiny.config(1, micro=8, optimizer=None)
    for stepped in (False, True):
        model = tiny.make_model()
        options = {"momentum": 0.9} if kind == "SGD" else {}
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options)
        if stepped:
            model(*tiny.make_batch(0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        caplog.clear()
        engine, *_ = deepc.initialize(model=model, config=cfg, optimizer=optimizer)
        assert (f"{kind} has stepped" in caplog.text) is stepped
        engine.destroy()


def test_an_optimizer_whose_step_needs_a_closure_is_refused():
    import deepc
    from deepc.errors import UnsupportedError

    model = tiny.make_model()
    optimizer = torch.optim.LBFGS(model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(UnsupportedError, match=r"LBFGS.step\(\) needs closure"):
        deepc.initialize(model=model, config=tiny.config(0, micro=8, optimizer=None), optimizer=optimizer)


def test_a_micro_batch_inside_an_accumulation_applies_no_step():
    import deepc

    engine, *_ = deepc.initialize(model=tiny.make_model(), config=tiny.config(1, micro=8, gas=2))
    for _ in range(2):
        for applied in (False, True):
            engine.backward(engine(*tiny.make_batch(0)))
            result = engine.step()
            assert result.applied is applied is engine.was_step_applied() and engine.last_step == result
    engine.destroy()


def test_a_param_group_may_be_one_tensor():
    import deepc

    model = tiny.make_model()
    first, *rest = model.parameters()
    groups = [{"params": first, "lr": 0.5}, {"params": iter(rest)}]
    engine, *_ = deepc.initialize(model=model, model_parameters=groups, config=tiny.config(2, micro=8))
    found = engine.optimizer.param_groups
    assert found[0]["params"] == [first] and found[0]["lr"] == 0.5 and len(found[1]["params"]) == len(rest)
    engine.backward(engine(*tiny.make_batch(0)))
    assert engine.step().applied
    engine.destroy()


def test_a_schedule_that_raises_leaves_a_whole_step():
    """As torch's OneCycleLR does beyond its total_steps: the update is made, and the next accumulation is whole."""
    import deepc

    class Over:
        def step(self):
            raise ValueError("the schedule is over")

    cfg = tiny.config(1, micro=8, gas=2)
    engine, *_ = deepc.initialize(model=tiny.make_model(), config=cfg, lr_scheduler=Over())
    for step in range(3):
        for last in (False, True):
            engine.backward(engine(*tiny.make_batch(step)))
            assert engine.is_gradient_accumulation_boundary() is last
            with pytest.raises(ValueError, match="over") if last else contextlib.nullcontext():
                engine.step()
        assert engine.global_steps == step + 1 and engine.micro_steps == 2 * step + 2 and engine.was_step_applied()
    engine.destroy()


def test_arguments_for_the_schedule_are_looked_at_before_the_step():
    import deepc

    cycle = {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 10}}
    cfg = tiny.config(1, micro=8, scheduler=cycle)
    engine, *_ = deepc.initialize(model=tiny.make_model(), config=cfg)
    engine.backward(engine(*tiny.make_batch(0)))
    with pytest.raises(deepc.errors.ArgumentError, match="OneCycle.*'epoch'.*its arguments are batch_iteration"):
        engine.step({"epoch": 4})
    assert engine.global_steps == 0
    assert engine.step({"batch_iteration": 4}).applied and engine.lr_scheduler.last_batch_iteration == 4
    assert engine.get_lr() == [pytest.approx(0.55)]
    engine.destroy()


def test_data_loader_and_defaults(caplog):
    import logging

    import deepc

    with caplog.at_level(logging.INFO, "deepc"):
        cfg = {"train_batch_size": 4, "gradient_clipping": 1.0}
        data = torch.utils.data.TensorDataset(*tiny.make_batch(0, 12))
        engine, optimizer, loader, _ = deepc.initialize(model=tiny.make_model(), config=cfg, training_data=data)
    assert "no optimizer in the config" in caplog.text and "0.001" in caplog.text
    group = optimizer.param_groups[0]
    assert (group["lr"], tuple(group["betas"]), group["eps"], group["weight_decay"]) == (1e-3, (0.9, 0.999), 1e-8, 0.0)
    assert sum(1 for _ in loader) == 3
    for x, y in loader:
        engine.backward(engine(x, y))
        assert engine.step().applied
    assert engine.global_steps == 3
    engine.destroy()


# ---- bad input -------------------------------------------------------------------------------------------------------


def test_bad_input_is_a_clear_error():
    import deepc
    from deepc.errors import ArgumentError, ConfigError, DeepcError

    cfg = tiny.config(2, micro=8)
    with pytest.raises(ArgumentError, match="model="):
        deepc.initialize(model=None, config=cfg)
    with pytest.raises(ConfigError, match="no configuration"):
        deepc.initialize(model=tiny.make_model())
    with pytest.raises(ConfigError, match="bf16.enabled"):
        deepc.initialize(model=tiny.make_model().bfloat16(), config=cfg)
    with torch.device("meta"):
        meta = tiny.TinyGPT()
    with pytest.raises(ArgumentError, match="meta device"):
        deepc.initialize(model=meta, config=cfg)
    with pytest.raises(ConfigError, match="is not what RMSprop takes: Invalid learning rate"):
        deepc.initialize(
            model=tiny.make_model(), config={**cfg, "optimizer": {"type": "RMSprop", "params": {"lr": -1}}}
        )
    frozen = tiny.make_model()
    frozen.requires_grad_(False)
    with pytest.raises(ArgumentError, match="no parameters"):
        deepc.initialize(model=frozen, config=cfg)
    twin = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
    twin[1].weight.data = twin[0].weight.data
    with pytest.raises(ConfigError, match="share memory"):
        deepc.initialize(model=twin, config=cfg)
    for trained in (True, False):
        part = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
        part[1].bias = torch.nn.Parameter(part[0].weight.data.view(-1)[4:8], trained)
        with pytest.raises(ConfigError, match="'1.bias' lies in a part of the memory of '0.weight'"):
            deepc.initialize(model=part, config=cfg)

    engine, _, _, _ = deepc.initialize(model=tiny.make_model(), config=cfg)
    x, y = tiny.make_batch(0)
    with pytest.raises(DeepcError, match="without a backward"):
        engine.step()
    with pytest.raises(ArgumentError, match="scalar"):
        engine.backward(torch.zeros(3, requires_grad=True))
    with torch.no_grad():
        loss = engine(x, y)
    with pytest.raises(ArgumentError, match="no_grad"):
        engine.backward(loss)
    with pytest.raises(DeepcError, match="another engine"):
        deepc.initialize(model=engine.module, config=cfg)
    engine.destroy()


@pytest.mark.full
def test_compile_of_a_stage_3_model():
    import deepc

    engine, _, _, _ = deepc.initialize(model=tiny.make_model(), config=tiny.config(3, micro=8))
    x, y = tiny.make_batch(0)
    eager = engine(x, y).item()
    compiled = torch.compile(engine.module, fullgraph=True, backend="aot_eager")
    loss = compiled(x, y)
    assert math.isclose(loss.item(), eager, rel_tol=1e-6)
    engine.backward(loss)
    assert engine.step().applied
    engine2, _, _, _ = deepc.initialize(model=tiny.make_model(), config=tiny.config(3, micro=8))
    engine2.backward(engine2(x, y))
    engine2.step()
    after = engine2(x, y).item()
    assert after < eager and math.isclose(compiled(x, y).item(), after, rel_tol=1e-5)  # both have learnt the same
    for a, b in zip(engine.module.parameters(), engine2.module.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    engine.destroy()
    engine2.destroy()


def _told(rank, world):
    import logging

    import deepc

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("deepc").addHandler(handler)
    out = []
    adamw = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    for raw, optimizer in (
        (adamw, None),
        ({**adamw, "gradient_clipping": 1.0}, None),
        ({}, torch.optim.SGD),
        ({"gradient_clipping": 0.0}, torch.optim.SGD),
    ):
        said.clear()
        model = torch.nn.Linear(4, 2)
        given = optimizer(model.parameters(), 0.1) if optimizer else None
        config = {"train_micro_batch_size_per_gpu": 1, **raw}
        deepc.initialize(model=model, config=config, optimizer=given)[0].destroy()
        out.append([line for line in said if line.startswith("by default: ")])
    logging.getLogger("deepc").removeHandler(handler)
    return out


def test_defaults_that_change_results_are_said_at_start():
    both, decay, clip, nothing = _run_ranks(_told, 1)[0]
    assert "gradient_clipping 1.0" in both[0] and "0: no clipping" in both[0] and "weight_decay 0.0" in both[0]
    assert "clipping" not in decay[0] and "torch.optim.AdamW has 0.01" in decay[0]
    assert "gradient_clipping 1.0" in clip[0] and "weight_decay" not in clip[0]
    assert nothing == []


def _lost(rank, world, stage, precision, where):
    import deepc
    from deepc.errors import NonFiniteError

    model = tiny.make_model(frozen=True)
    value = dict(model.named_parameters())[where]
    with torch.no_grad():
        value.view(-1)[3] = float("nan")
    cfg = tiny.config(stage, micro=4, precision=precision, deepc={"max_lost_steps": 12})
    engine = deepc.initialize(model=model, config=cfg)[0]
    x, y = tiny.make_batch(0, 4 * world)
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("deepc").addHandler(handler)
    results, error = [], ""
    try:
        for _ in range(20):
            engine.backward(engine(x[4 * rank :][:4], y[4 * rank :][:4]))
            results.append(engine.step())
    except NonFiniteError as exc:
        error = str(exc)
    logging.getLogger("deepc").removeHandler(handler)
    engine.destroy()
    return results, error, [text for text in said if "skipped" in text]


@pytest.mark.parametrize(
    "stage, precision, where, env",
    [
        (0, "fp32", "blocks.0.up.weight", {}),
        (2, "bf16", "blocks.1.down.bias", {}),
        (3, "fp32", "pos.weight", {}),  # frozen
        pytest.param(3, "fp32", "pos.weight", {"DEEPC_STREAMED": "1"}, marks=pytest.mark.full),
        (3, "bf16", "tok.weight", {"DEEPC_STREAMED": "1"}),
    ],
)
def test_weights_that_are_not_finite_are_named_and_end_the_run_on_all_ranks(stage, precision, where, env):
    ranks = _run_ranks(_lost, 2, args=(stage, precision, where), env={"DEEPC_LOG_LEVEL": "WARNING", **env})
    for results, error, _ in ranks:
        assert len(results) == 11 and not any(r.applied for r in results)
        assert all(r.reason.endswith(f"the weights themselves are not finite: {where}") for r in results)
        assert "the last 12 steps" in error and f"'{where}'" in error
    told = ranks[0][2]
    assert [text.split(":")[0] for text in told] == ["step 1 skipped", "step 10 skipped, as the 9 before it"]
    assert where in told[0] and ranks[1][2] == []


def _mended(rank, world):
    """Gradients that are not finite say nothing of the weights, and a weight that is mended in time is forgotten."""
    import deepc

    model = torch.nn.Linear(4, 2)
    cfg = {"train_micro_batch_size_per_gpu": 1, "deepc": {"max_lost_steps": 3}}
    engine = deepc.initialize(model=model, config=cfg)[0]

    def step(factor=1.0):
        engine.backward(engine(torch.ones(1, 4)).square().sum() * factor)
        return engine.step()

    out = [step(float("inf")).reason for _ in range(5)] + [step().applied]
    with torch.no_grad():
        model.bias[0] = float("inf")
    out += [step().reason for _ in range(2)]
    with torch.no_grad():
        model.bias[0] = 0.0
    out += [step().applied]
    engine.destroy()
    return out


def test_weights_that_were_mended_do_not_end_the_run():
    out = run_ranks(_mended, 1)[0]
    assert not any("weights themselves" in reason for reason in out[:5]) and out[5] is True
    assert all("the weights themselves are not finite: bias" in reason for reason in out[6:8]) and out[8] is True


def test_a_run_that_ends_leaves_a_whole_step():
    """Who mends the weights and goes on has whole accumulations."""
    import deepc
    from deepc.errors import NonFiniteError

    cfg = tiny.config(1, micro=8, gas=2, deepc={"max_lost_steps": 1})
    engine, *_ = deepc.initialize(model=tiny.make_model(), config=cfg)
    right = engine.module.ln.weight.detach().clone()
    for wrong in (True, False):
        with torch.no_grad():
            engine.module.ln.weight.copy_(right * (float("inf") if wrong else 1.0))
        for last in (False, True):
            engine.backward(engine(*tiny.make_batch(0)))
            assert engine.is_gradient_accumulation_boundary() is last
            with pytest.raises(NonFiniteError) if wrong and last else contextlib.nullcontext():
                engine.step()
    assert engine.global_steps == 2 and engine.was_step_applied()
    engine.destroy()


def _compiled(rank, world, cfg, how):
    """Losses, files whose frames the compiler has looked at, graph breaks."""
    import deepc
    import torch._dynamo as dynamo

    dynamo.reset()
    dynamo.utils.clear_compilation_metrics()
    dynamo.utils.counters.clear()
    engine = deepc.initialize(model=tiny.make_model(), config=cfg)[0]
    call = engine
    if how == "engine.compile":
        engine.compile(backend="aot_eager")
    elif how == "torch.compile":
        call = torch.compile(engine, backend="aot_eager")
    elif how == "inside":
        call = torch.compile(lambda x, y: engine(x, y) * 1.0, backend="aot_eager")
    losses = []
    for step in range(4):
        loss = call(*tiny.make_batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    seen = {(m.co_filename, m.co_name) for m in dynamo.utils.get_compilation_metrics() if m.co_filename}
    engine.destroy()
    return losses, seen, dict(dynamo.utils.counters["graph_break"])


@pytest.mark.parametrize(
    "name, extra, env",
    [
        pytest.param("stage 0", {}, {}, marks=pytest.mark.full),
        ("stage 3", {"zero_optimization": {"stage": 3}}, {}),
        pytest.param("streamed", {"zero_optimization": {"stage": 3}}, {"DEEPC_STREAMED": "1"}, marks=pytest.mark.full),
        pytest.param("layout", {"deepc": {"deterministic": "layout"}}, {}, marks=pytest.mark.full),
        pytest.param(
            "watched",
            {"wall_clock_breakdown": True, "deepc": {"timeline": {"steps": [1, 2]}}},
            {},
            marks=pytest.mark.full,
        ),
    ],
)
def test_torch_compile_of_the_engine_compiles_the_model_alone(name, extra, env, tmp_path, monkeypatch):
    cfg = {**tiny.config(0, micro=8), **extra}
    if "timeline" in cfg.get("deepc", {}):
        cfg["deepc"]["timeline"]["folder"] = str(tmp_path)
    runs = {
        how: _run_ranks(_compiled, 1, args=(cfg, how), env={"DEEPC_LOG_LEVEL": "WARNING", **env})[0]
        for how in ("", "engine.compile", "torch.compile", "inside")
    }
    for how, (losses, seen, breaks) in runs.items():
        assert losses == pytest.approx(runs[""][0], rel=1e-5), how
        ours = {f"{file}:{function}" for file, function in seen if "/deepc/" in file}
        assert ours == set(), (how, ours)
        blocks = not (name == "streamed" and how == "engine.compile")  # which is per block, and this model has none
        assert bool(seen) == (how != "" and blocks), how
        if how == "torch.compile" and name != "streamed":  # whose blocks have their gathers between graphs
            assert breaks == {}


def _compiled_of_torchs_own(rank, world, cfg):
    """Of a model that is a bare nn.Sequential: losses without and with torch.compile of the engine, operators of the
    graphs, and code that the compiler took."""
    import deepc
    import torch._dynamo as dynamo

    graphs, losses = [], {}

    def backend(graph, inputs):
        graphs.extend(n.target.__name__ for n in graph.graph.nodes if n.op == "call_function")
        return graph.forward

    for compiled in (False, True):
        dynamo.reset()
        dynamo.utils.clear_compilation_metrics()
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
        engine = deepc.initialize(model=model, config=cfg)[0]
        call = torch.compile(engine, backend=backend) if compiled else engine
        for step in range(3):
            torch.manual_seed(step)
            loss = call(torch.randn(8, 8)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.setdefault(compiled, []).append(loss.item())
        engine.destroy()
    return losses, graphs, {m.co_filename for m in dynamo.utils.get_compilation_metrics() if m.co_filename}


@pytest.mark.parametrize(
    "extra, env",
    [
        ({"zero_optimization": {"stage": 3}}, {}),
        pytest.param({"fp16": {"enabled": True, "auto_cast": True}}, {}, marks=pytest.mark.full),
        pytest.param({"zero_optimization": {"stage": 3}}, {"DEEPC_STREAMED": "1"}, marks=pytest.mark.full),
    ],
)
def test_torch_compile_of_the_engine_compiles_a_model_whose_forward_is_torchs_own(extra, env):
    """The compiler passes over frames of torch's own files; it takes the one before."""
    cfg = {**tiny.config(0, micro=8), **extra}
    losses, graphs, files = _run_ranks(
        _compiled_of_torchs_own, 1, args=(cfg,), env={"DEEPC_LOG_LEVEL": "WARNING", **env}
    )[0]
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)
    assert graphs.count("linear") == 2 and graphs.count("gelu") == 1, graphs
    assert files and not [f for f in files if "/deepc/" in f], files


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_told():
    import deepc
    from deepc.errors import ArgumentError

    with pytest.raises(ArgumentError, match="device='cuda'.*torch .* (is built without CUDA|sees no GPU)"):
        deepc.initialize(model=tiny.make_model(), config=tiny.config(3, micro=2), device="cuda")
