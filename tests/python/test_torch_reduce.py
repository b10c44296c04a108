"""Reductions over torch.distributed during backward (nodes with different numbers of ranks, as GPUs): the same bits as
on one node for every way to run backward, gradients that leave while it runs, and what a rank that dies or leaves does
to the others."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
import tiny
import torch
from ranks import run_ranks as _run_ranks
from test_engine import same_bits
from test_nodes import on_node
from test_streamed import NO_LIMITS, Odd


def run_ranks(fn, world, *args, **kw):
    return _run_ranks(fn, world, args=args, env={"DEEPC_LOG_LEVEL": "WARNING"}, **kw)


def uneven(rank: int):
    return on_node("a" if rank < 2 else "b")


# ---- the states ------------------------------------------------------------------------------------------------------
def test_buckets_begin_in_one_order_whatever_the_order_of_gradients():
    from deepc.plan.buckets import BucketStates

    numels = [30, 0, 5, 100, 1, 17]
    offsets = [0, 30, 30, 35, 135, 136]
    rng = random.Random(3)
    for _ in range(50):
        states = BucketStates(offsets, numels, 20, 9)  # the last one has padding alone
        states.order = rng.sample(range(9), 9)
        want, begun, gone, missing = list(states.order), [], set(), rng.choice([None, *range(6)])
        states.begin()
        for i in rng.sample(range(6), 6):
            if i == missing:
                continue
            assert states.arrived(i) == (numels[i] > 0)
            while (b := states.take(9)) is not None:
                begun.append(b)
                assert all(j != missing and j not in gone for j in states.params_of[b])
        assert begun == want[: len(begun)] and states.ready == len(begun)
        states.close()
        assert states.take(len(begun)) is None or len(begun) == 9
        while (b := states.take(9)) is not None:
            begun.append(b)
        assert begun == want and sorted(states.seen_order()) == list(range(9))
        for b in begun:
            dropped = states.reduced(b)
            assert not gone & set(dropped)
            gone |= set(dropped)
        assert gone == {0, 2, 3, 4, 5}, "each gradient is dropped once, with the last of its buckets"


# ---- the same bits, whatever the way ---------------------------------------------------------------------------------
class _Stop(Exception):
    pass


def _stops(_):
    raise _Stop


def _ways(rank, stage):
    import deepc

    cfg = tiny.config(stage, micro=2, gas=2, deepc={"bucket_elems": 12288})
    cfg["zero_optimization"].update(NO_LIMITS)
    engine = deepc.initialize(
        model=tiny.make_model(layers=3, unused=True, reuse=True, recompute="reentrant"), config=cfg
    )[0]
    losses = []

    def loss_of(k):
        x, y = tiny.make_batch(k, 6)
        losses.append(engine(x[2 * rank :][:2], y[2 * rank :][:2]))
        return losses[-1]

    def accumulate(k):
        engine.backward(loss_of(k))

    def twice(k):
        engine.backward(loss_of(k))
        engine.backward(loss_of(k + 100))

    def no_sync(k):
        with engine.no_sync():
            engine.backward(loss_of(k))
        engine.backward(loss_of(k + 100))

    def bare(k):
        loss_of(k).backward()

    def stopped(k):
        loss = loss_of(k)
        hook = engine.module.blocks[1].up.weight.register_hook(_stops)
        with pytest.raises(_Stop):
            engine.backward(loss)
        hook.remove()
        engine.zero_grad()
        engine.backward(loss_of(k + 100))

    ways = [(way, way) for way in (accumulate, twice, no_sync, bare)]
    for step, both in enumerate((*ways, (stopped, accumulate))):
        for m, way in enumerate(both):
            way(10 * step + m)
            result = engine.step()
        assert result.applied
    weights = {n: engine.full_fp32_param(p).clone() for n, p in engine.module.named_parameters()}
    transport, stats = engine.plan.transport, getattr(engine.reducer, "stats", dict)()
    engine.destroy()
    return [v.item() for v in losses], weights, transport, stats


def _all_ways(rank, world):
    out = [_ways(rank, 2)]
    with uneven(rank):
        return out + [_ways(rank, stage) for stage in (2, 3)]


@pytest.mark.full
def test_every_way_to_run_backward_gives_the_bits_of_one_node():
    for one_node, *others in run_ranks(_all_ways, 3):
        assert one_node[2] == "node"
        for losses, weights, transport, stats in others:
            assert transport == "c10d" and losses == one_node[0]
            same_bits(weights, one_node[1])
            assert 0 < stats["early"] < stats["reductions"]


# ---- gradients leave during backward ---------------------------------------------------------------------------------
def _leaving(rank, world, stage):
    import deepc
    from deepc.errors import ReleasedParameterError

    cfg = tiny.config(stage, micro=2, deepc={"bucket_elems": 12288})
    cfg["zero_optimization"].update(NO_LIMITS)
    with uneven(rank):
        engine = deepc.initialize(model=tiny.make_model(width=64, layers=10, unused=True), config=cfg)[0]
    rows, before = [], engine.reducer.stats()
    for step in range(3):
        x, y = tiny.make_batch(step, 2)
        engine.backward(engine(x, y))
        engine.step()
        now = engine.reducer.stats()
        rows.append({k: now[k] - before[k] for k in now} | {"most": now["grad_bytes_max"]})
        before = now
    out = rows, 4 * sum(engine.plan.layout.numels), engine.plan.layout.nbuckets
    p = engine.module.blocks[1].up.weight
    engine.destroy()
    if stage == 3:
        with pytest.raises(ReleasedParameterError, match="blocks.1.up.weight.*module_state_dict"):
            p + 1
    return out


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.full)])
def test_gradients_leave_during_backward(stage):
    for rows, total, nbuckets in run_ranks(_leaving, 3, stage):
        assert [row["reductions"] for row in rows] == [nbuckets] * 3
        assert rows[0]["early"] == 0, "an unused parameter, registered last, lies in the first bucket"
        for row in rows[1:]:
            assert row["early"] >= nbuckets - 2, "its bucket goes last from then on"
            assert stage == 2 or row["most"] < 0.5 * total, (
                "ranks that gather know what all have begun, and wait for it"
            )


# ---- ranks that differ, delays, and the way of devices ---------------------------------------------------------------
def _differing(rank, world, stage, how, steps):
    import deepc

    rng = random.Random(rank)
    cfg = tiny.config(stage, micro=4, deepc={"bucket_elems": 12288})
    cfg["zero_optimization"].update(NO_LIMITS)
    torch.manual_seed(1)
    model = Odd("rank-dependent", width=64)
    with uneven(rank):
        engine = deepc.initialize(model=model, config=cfg)[0]
    if (
        how == "device"
    ):  # asynchronous Works instead of the thread, and at stage 3 nothing begins before all ranks have it
        engine.reducer._progress, engine.reducer._in_order = None, True
    if how == "delays":
        for module in model.modules():
            module.register_forward_pre_hook(lambda *_: time.sleep(rng.choice((0, 0, 0.02 * rng.random()))))
        for p in model.parameters():
            p.register_hook(lambda _: time.sleep(rng.choice((0, 0, 0.02 * rng.random()))))
    losses = []
    for step in range(steps):
        model.rank = (rank + step) % 3  # another expert each time: ranks never agree on what has a gradient
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(100 * step + rank))
        losses.append(engine(x))
        engine.backward(losses[-1])
        engine.step()
    weights, stats = {n: engine.full_fp32_param(p).clone() for n, p in model.named_parameters()}, engine.reducer.stats()
    engine.destroy()
    return [v.item() for v in losses], weights, stats


def _all_differing(rank, world, stages, steps):
    return {stage: [_differing(rank, world, stage, how, steps) for how in ("", "delays", "device")] for stage in stages}


@pytest.mark.parametrize("stages, steps", [((3,), 5), pytest.param((0, 2, 3), 20, marks=pytest.mark.full)])
def test_ranks_with_other_gradients_and_delays(stages, steps):
    for by_stage in run_ranks(_all_differing, 3, stages, steps, backend="gloo"):
        for stage, (plainly, *others) in by_stage.items():
            for losses, weights, stats in others:
                assert losses == plainly[0], stage
                same_bits(weights, plainly[1])
                assert stats["early"] > 0


# ---- failures --------------------------------------------------------------------------------------------------------
def _fails(rank, world, stage, how):
    import deepc
    from deepc.errors import CommError

    os.environ["DEEPC_NODE_ID"] = "a" if rank < 2 else "b"  # of a process of its own
    cfg = tiny.config(stage, micro=2, deepc={"bucket_elems": 12288})
    cfg["zero_optimization"].update(NO_LIMITS)
    engine = deepc.initialize(model=tiny.make_model(layers=4), config=cfg)[0]
    x, y = tiny.make_batch(0, 2)
    for _ in range(2):
        engine.backward(engine(x, y))
        engine.step()
    if rank == 2:

        def stop(_):
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise _Stop

        engine.module.blocks[1].up.weight.register_hook(stop)
        with pytest.raises(_Stop):
            engine.backward(engine(x, y))
        engine.destroy()
        return "left"
    with pytest.raises(CommError) as caught:
        for _ in range(3):
            engine.backward(engine(x, y))
            engine.step()
    engine.destroy()
    return str(caught.value)


@pytest.mark.parametrize(
    "stage, how", [(3, "dies"), *(pytest.param(*case, marks=pytest.mark.full) for case in ((2, "dies"), (3, "leaves")))]
)
def test_a_rank_that_dies_or_leaves_in_backward_is_an_error_on_the_others(stage, how):
    said = run_ranks(_fails, 3, stage, how, may_die=(2,))
    assert said[2] == ("left" if how == "leaves" else None)
    assert all(text for text in said[:2])


def _replicas_fail(rank, world):
    import deepc
    import torch.distributed as dist
    from deepc.errors import CommError

    os.environ["DEEPC_NODE_ID"] = "a" if rank < 2 else "b"  # of a process of its own
    engine = deepc.initialize(model=tiny.make_model(), config=tiny.config(2, micro=2))[0]
    x, y = tiny.make_batch(0, 2)
    engine.backward(engine(x, y))
    engine.step()
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    said = []
    for _ in range(2):  # and from then on every call says so
        with pytest.raises(CommError) as caught:
            engine.reducer.gather(engine.state.flat)
        said.append(str(caught.value))
    return said


def test_a_rank_that_dies_while_replicas_are_completed_is_an_error_on_the_others():
    for said in run_ranks(_replicas_fail, 3, backend="gloo", may_die=(2,))[:2]:
        assert "parameters of bucket 0" in said[0] and said[1] == said[0]
