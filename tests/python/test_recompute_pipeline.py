"""A budget of recomputation in pipelines: every rank keeps what its micro-batches in flight leave room for, stays
within the budget, and no bit differs from no recomputation."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from deepc.errors import ConfigError
from deepc.plan.predict.recompute import choice as recompute
from deepc.plan.predict.recompute.choice import Call
from ranks import for_this_job, run_ranks
from test_recompute import KEY, Held
from torch import nn


# ---- the choice ------------------------------------------------------------------------------------------------------
def drawn(count: int):
    draw = random.Random(7)
    for _ in range(count):
        forwards = [
            (
                [
                    Call(draw.randint(5, 40), draw.randint(0, 6), draw.randint(0, 9), draw.uniform(1, 3))
                    for _ in range(draw.randint(1, 4))
                ],
                draw.randint(0, 15),
            )
            for _ in range(draw.randint(1, 2))
        ]
        yield forwards, draw.randint(2, 5), draw.random()


def needed(forwards, ways, in_flight):
    """What several in flight hold at most, the largest of which computes."""
    ends = max(recompute.held(c, o, w) for (c, o), w in zip(forwards, ways))
    return (in_flight - 1) * ends + max(recompute.peak(c, o, w) for (c, o), w in zip(forwards, ways))


def every_way(forwards):
    return itertools.product(*(itertools.product((False, True), repeat=len(c)) for c, _ in forwards))


def test_forwards_in_flight_share_a_budget():
    """Within it, as small a budget as there is, and nearly as fast as the best of all choices."""
    slower = []
    for forwards, in_flight, part in drawn(150):
        least = min(needed(forwards, ways, in_flight) for ways in every_way(forwards))
        assert recompute.least_together(forwards, in_flight) >= least
        whole = needed(forwards, [[False] * len(c) for c, _ in forwards], in_flight)
        budget = recompute.least_together(forwards, in_flight)
        assert recompute.choose_together(forwards, budget, in_flight) is not None
        assert recompute.choose_together(forwards, least - 1, in_flight) is None
        budget += int(part * (whole - budget))
        ends, choices = recompute.choose_together(forwards, budget, in_flight)
        ways = [c.recomputed for c in choices]
        assert needed(forwards, ways, in_flight) <= budget
        assert all(recompute.held(c, o, w) <= ends for (c, o), w in zip(forwards, ways))
        best = min(
            sum(recompute.cost(c, w) for (c, _), w in zip(forwards, ways))
            for ways in every_way(forwards)
            if needed(forwards, ways, in_flight) <= budget
        )
        slower.append(sum(c.seconds for c in choices) - best)
    assert sum(s < 1e-9 for s in slower) >= 0.9 * len(slower), sorted(slower)[-20:]


def test_one_forward_at_a_time_has_the_whole_budget():
    for forwards, _, part in drawn(50):
        calls, outside = forwards[0]
        budget = int(recompute.least(calls, outside) * (1 + part))
        alone = recompute.choose(calls, outside, budget)
        assert recompute.choose_together([(calls, outside)], budget, 1)[1] == [alone]


# ---- pipelines -------------------------------------------------------------------------------------------------------
WIDTH, MICRO = 32, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + nn.functional.dropout(self.down(torch.tanh(self.up(x))), 0.1)


def train(rank, world, stages, options, config, budgets, batch=16):
    """Of each budget: losses, weights, bytes that lived at most in the last batch above those before, stats."""
    import deepc
    from deepc.pipe import LayerSpec, PipelineModule

    out = []
    for budget in budgets:
        layers = [LayerSpec(nn.Linear, 8, WIDTH), *[LayerSpec(Block) for _ in range(6)], LayerSpec(nn.Linear, WIDTH, 4)]
        model = PipelineModule(
            layers,
            num_stages=stages,
            loss_fn=nn.functional.cross_entropy,
            seed_layers=True,
            partition_method="type:Block",
            **options,
        ).train()
        asked = {} if budget is None else {KEY: {"budget": budget}}
        engine, *_ = deepc.initialize(
            model=model,
            config={
                "train_micro_batch_size_per_gpu": batch,
                "gradient_accumulation_steps": MICRO,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
                **config,
                **asked,
            },
        )
        torch.manual_seed(rank)
        dtype = next(model.parameters()).dtype

        def data():
            g = torch.Generator().manual_seed(11)
            while True:
                yield torch.randn(batch, 8, generator=g).to(dtype), torch.randint(4, (batch,), generator=g)

        it, losses = data(), []
        for _ in range(3):
            with Held(engine.module) as held:
                losses.append(float(engine.train_batch(it)))
        weights = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
        out.append((losses, weights, held.most, engine.recomputation.stats()))
        engine.destroy()
    return out


def alike(numbers, wanted, weights, theirs, options):
    """Bit for bit; to rounding under a zero-bubble schedule, where products add up the gradients of weights that wait,
    and those of blocks that are computed again do not wait."""
    rounds = options.get("schedule", "1f1b").startswith("zb-")
    short = any(t.dtype != torch.float32 for t in theirs.values())
    assert numbers == (pytest.approx(wanted, rel=1e-3 if short else 1e-6) if rounds else wanted)
    for name, t in weights.items():
        bound = (2**-7 if short else 1e-5) * float(theirs[name].abs().max()) if rounds else 0
        torch.testing.assert_close(t, theirs[name], rtol=0, atol=bound, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("world", "stages", "options", "config", "in_flight"),
    [
        (2, 2, {}, {"zero_optimization": {"stage": 1}}, (2, 1)),
        pytest.param(2, 2, {"schedule": "gpipe"}, {}, (4, 4), marks=pytest.mark.full),
        pytest.param(2, 2, {"schedule": "interleaved"}, {}, None, marks=pytest.mark.full),
        pytest.param(2, 2, {"schedule": "zb-h1"}, {"bf16": {"enabled": True}}, None, marks=pytest.mark.full),
        pytest.param(2, 2, {"schedule": "zb-v"}, {}, None, marks=pytest.mark.full),
        pytest.param(4, 2, {}, {"zero_optimization": {"stage": 2}}, (2, 2, 1, 1), marks=pytest.mark.full),
        pytest.param(4, 2, {}, {"zero_optimization": {"stage": 3}}, (2, 2, 1, 1), marks=pytest.mark.full),
        pytest.param(4, 4, {}, {}, (4, 3, 2, 1), marks=pytest.mark.full),
    ],
)
def test_budgets_are_kept_and_no_bit_differs(world, stages, options, config, in_flight):
    ranks = run_ranks(train, world, args=(stages, options, config, [None, "1TB"]))
    stats = [r[1][3] for r in ranks]
    if in_flight is not None:
        assert tuple(s["in_flight"] for s in stats) == in_flight
    assert all(s["recomputed"] == 0 and s["peak_bytes"] == s["whole_bytes"] for s in stats)
    least, whole = max(s["least_bytes"] for s in stats), max(s["whole_bytes"] for s in stats)
    budgets = [least + k * (whole - least) // 3 for k in range(3)]
    bound = run_ranks(train, world, args=(stages, options, config, budgets))
    for (none, most), some in zip(ranks, bound):
        assert most[0] == none[0]
        room = some[0][2] - some[0][3]["peak_bytes"]  # of gradients and messages, and of a backward's own: beside it
        for budget, (losses, weights, held, told) in zip(budgets, some):
            alike(losses, none[0], weights, none[1], options)
            assert told["peak_bytes"] <= budget
            if options.get("schedule", "1f1b") in ("1f1b", "gpipe", "interleaved"):  # gradients of weights that wait
                assert held <= budget + room + 0.02 * whole, (budget, held, room, told)  # are beside it
    # who has more in flight computes more again
    counts = [sum(told["recomputed"] for *_, told in some) for some in bound]
    assert max(counts) > 0
    if in_flight is not None and len(set(in_flight)) > 1:
        assert counts[0] > counts[-1]


def on_disk(rank, world, options, budgets, folder, fast):
    """As train; and bytes that were written, and the longest file."""
    from deepc.engine.states.activations import Moves

    told, close = [], Moves.close
    rates = recompute.Rates(0.0, 0.0, 1e-13) if fast else recompute.Rates(1.0, 1.0, 1.0)

    def noted(self):
        told.append((self.spill.bytes_written, self.spill.most_bytes))
        close(self)

    disk = {"deepc": {"activations": {"nvme_path": folder, "min_bytes": 1024}}}
    for_this_job(Moves, "measure", lambda self: rates)
    for_this_job(Moves, "close", noted)
    found = train(rank, world, 2, options, disk, budgets)
    return [(*f, *t) for f, t in zip(found, told, strict=True)]


@pytest.mark.parametrize(
    ("options", "fast"),
    [
        ({}, True),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ({}, False),
                ({"schedule": "gpipe"}, True),
                ({"schedule": "interleaved"}, True),
                ({"schedule": "zb-h1"}, True),
            )
        ),
    ],
)
def test_what_blocks_saved_may_lie_on_disk(options, fast, tmp_path):
    """Of all micro-batches in flight, whose backwards come in any order."""
    ranks = run_ranks(train, 2, args=(2, options, {}, [None, "1TB"]))
    stats = [r[1][3] for r in ranks]
    least, whole = (max(s[k] for s in stats) for k in ("least_bytes", "whole_bytes"))
    budget = (least + 3 * whole) // 4
    again = run_ranks(train, 2, args=(2, options, {}, [least]))
    bound = run_ranks(on_disk, 2, args=(options, [budget], str(tmp_path), fast))
    for (none, _), [all_again], [(losses, weights, held, told, written, most)] in zip(ranks, again, bound):
        room = all_again[2] - all_again[3]["peak_bytes"]  # of gradients and messages, and of a backward's own
        alike(losses, none[0], weights, none[1], options)
        assert told["peak_bytes"] <= budget and (told["on_disk"] > 0) == fast * (told["whole_bytes"] > budget)
        if "zb" not in options.get("schedule", ""):  # gradients of weights that wait are beside it
            assert held <= budget + room + 0.02 * whole
        if told["on_disk"]:
            of_a_forward = written / (2 * MICRO)  # two batches, behind the one that measured
            assert 0 < most < 1.5 * told["in_flight"] * of_a_forward, "places are used again (they are whole pages)"
    assert any(r[0][4] for r in bound) == fast
    assert list(tmp_path.iterdir()) == []


def disk_fails(rank, world, folder):
    """What a rank says when a read of the first one's fails in a backward."""
    from deepc.errors import DeepcError, DiskError
    from deepc.offload import spill

    def refuses(self):
        raise DiskError("[made by the test]")

    if rank == 0:
        for_this_job(spill.Spilled, "get", refuses)
    with pytest.raises(DeepcError) as told:
        on_disk(rank, world, {}, [61_952], folder, True)
    return type(told.value).__name__, str(told.value)


def test_a_disk_that_fails_breaks_the_batch_off_on_all_ranks(tmp_path):
    (kind, text), (other, told) = run_ranks(disk_fails, 2, args=(str(tmp_path),))
    assert kind == "DiskError" and text == "[made by the test]"
    assert other == "AbortedError" and "in stage 0 of a pipeline, broke off a batch: DiskError: [made by" in told


def cut_by_key(rank, world, budgets):
    import deepc
    from test_tensor_parallel import transformer

    out = []
    for budget in budgets:
        model = transformer("gpt2", attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1).train()
        asked = {} if budget is None else {KEY: {"budget": budget}}
        torch.manual_seed(0)
        ids = torch.randint(0, 61, (2, 16))
        engine, *_ = deepc.initialize(
            model=model,
            config={
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": MICRO,
                "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
                "pipeline": {"stages": 2},
                **asked,
            },
        )  # without a sample, whose times would cut each engine elsewhere, and give its dropout to another rank
        torch.manual_seed(rank)
        batches = iter([{"input_ids": ids, "labels": ids}] * 3 * MICRO)
        losses = [float(engine.train_batch(batches)) for _ in range(3)]
        out.append((losses, engine.recomputation.stats(), len(engine.part.blocks())))
        engine.destroy()
    return out


def test_a_model_that_was_cut_where_it_stands():
    pytest.importorskip("transformers")
    (first, second) = run_ranks(cut_by_key, 2, args=([None, "1TB"],))
    assert first[0][0] == first[1][0] and first[1][1]["in_flight"] == 2 and second[1][1]["in_flight"] == 1
    middle = (first[1][1]["least_bytes"] + first[1][1]["whole_bytes"]) // 2
    for (losses, stats, blocks), *_ in run_ranks(cut_by_key, 2, args=([middle],)):
        assert losses == first[0][0] and stats["peak_bytes"] <= middle
        assert stats["recomputed"] <= stats["calls"] == blocks


def too_small(rank, world, options, budget):
    with pytest.raises(Exception) as told:
        train(rank, world, 2, options, {}, [budget])
    return type(told.value).__name__, str(told.value)


def test_too_small_a_budget_is_told_to_all_ranks():
    told = run_ranks(too_small, 2, args=({}, 1000))
    assert any(kind == "ConfigError" and "wait for their backwards at a time" in text for kind, text in told), told
    assert all("1000 bytes is less" in text for _, text in told), told


def refused(rank, world):
    import deepc
    from deepc.pipe import LayerSpec, PipelineModule

    out = []
    for layers, options in (
        ([LayerSpec(nn.Linear, 8, 8), LayerSpec(nn.LayerNorm, 8)], {}),
        ([LayerSpec(nn.Linear, 8, 8), LayerSpec(nn.Linear, 8, 8)], {"activation_checkpoint_interval": 1}),
    ):
        model = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, **options)
        with pytest.raises(ConfigError) as told:
            deepc.initialize(
                model=model,
                config={
                    "train_micro_batch_size_per_gpu": 1,
                    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
                    KEY: {"budget": "1GB"},
                },
            )
        out.append(str(told.value))
    return out


def test_what_has_no_blocks_or_recomputes_already():
    for nothing, already in run_ranks(refused, 2):
        assert "no two layers" in nothing and "activation_checkpoint_interval = 1 recomputes already" in already


def _with_statistics(rank, world, budget, schedule):
    import deepc
    from deepc.parallel.pipeline.cutting.model import CutModel
    from test_pipeline_cut import batches, normed

    model, form = normed()
    cfg = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "pipeline": {"stages": world},
        "deepc": {"pipeline": {"schedule": schedule}},
    }
    cfg |= {KEY: {"budget": budget}} if budget is not None else {}
    with pytest.MonkeyPatch.context() as m:  # each unit costs the same, so that every run cuts alike, and holds as much
        ticks = itertools.count()
        m.setattr(CutModel, "_now_s", lambda _: float(next(ticks)))
        engine = deepc.initialize(model=model, config=cfg, sample_batch=next(batches(form, 0, 1, 1)))[0]
    data = batches(form, 0, MICRO, 1)
    losses = [float(engine.train_batch(data)) for _ in range(3)]
    buffers = {n: t.clone() for n, t in engine.module.named_buffers() if not t.is_meta}
    stats = engine.recomputation.stats()
    engine.destroy()
    return losses, buffers, stats


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_statistics_of_micro_batches_in_flight_are_each_its_own(schedule):
    """Several have gone forward through a block, and changed its buffers, before the first is computed again."""
    plain = run_ranks(_with_statistics, 2, args=(None, schedule))
    generous = run_ranks(_with_statistics, 2, args=("1TB", schedule))
    least = max(stats["least_bytes"] for _, _, stats in generous)
    found = run_ranks(_with_statistics, 2, args=(least + 256, schedule))
    assert found[0][-1]["recomputed"] > 0
    for (losses, buffers, _), (wanted, before, _) in zip(found, plain, strict=True):
        assert losses == wanted and buffers.keys() == before.keys()
        assert all(torch.equal(t, before[n]) for n, t in buffers.items())
