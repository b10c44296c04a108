"""`"deterministic": "layout"`: equal bits for every number of ranks, ZeRO stage and split of the global batch
(docs/determinism.md)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile

import pytest
import tiny
import torch
import torch.nn.functional as F
from deepc.zero.step.tree import MicroBatchSampler, tree_buffers
from ranks import run_ranks as _run_ranks
from torch import nn

MICRO_BATCHES = 8
STEPS = 50
LAYOUTS = [(world, stage) for world in (1, 2, 4, 8) for stage in (0, 1, 2, 3)]


def run_ranks(fn, world, *args, **kw):
    return _run_ranks(fn, world, args=args, env={"DEEPC_LOG_LEVEL": "WARNING"}, **kw)


@contextlib.contextmanager
def on_node(name: str | None):
    if name is not None:
        os.environ["DEEPC_NODE_ID"] = name
    try:
        yield
    finally:
        os.environ.pop("DEEPC_NODE_ID", None)  # the process goes on to other tests


class Dropping(tiny.TinyGPT):
    """Draws from torch's generator three times in a forward."""

    def forward(self, x, y):
        h = F.dropout(self.tok(x) + self.pos(torch.arange(x.shape[1])), 0.2, self.training)
        for block in self.blocks:
            h = F.dropout(block(h), 0.1, self.training)
        return F.cross_entropy(self.head(self.ln(h)).float().flatten(0, 1), y.flatten())


def _config(stage: int, gas: int, case: dict) -> dict:
    cfg = tiny.config(
        stage,
        micro=case.get("micro", 1),
        gas=gas,
        precision=case.get("precision", "fp32"),
        clip=case.get("clip", 0.5),
        weight_decay=0.1,
    )
    cfg["deepc"] = {"bucket_elems": 8192, **({"deterministic": "layout"} if case.get("on", True) else {})}
    for key, value in case.get("config", {}).items():
        cfg[key] = {**cfg[key], **value} if isinstance(value, dict) and isinstance(cfg.get(key), dict) else value
    return cfg


def _model(case: dict) -> nn.Module:
    torch.manual_seed(3)
    return (Dropping if case.get("dropout") else tiny.TinyGPT)(**{"width": 64, **case.get("model", {})})


def _optimizer(case: dict, model: nn.Module):
    if "optimizer" not in case:
        return None
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    kind, options = case["optimizer"]
    return getattr(torch.optim, kind)([{"params": decay}, {"params": rest, "weight_decay": 0.0}], **options)


def _digest(engine, skipped: list[str]) -> tuple:
    """What must be equal in every layout: all weights and states bit by bit, the last norm, which steps were skipped
    and why."""
    digest = hashlib.sha256()
    for name, p in engine.module.named_parameters():
        if not p.requires_grad:
            continue
        digest.update(
            name.encode()
            + engine.full_fp32_param(p).contiguous().numpy().tobytes()
            + p.detach().float().numpy().tobytes()
        )
        for state in engine.optimizer.states if engine.optimizer.core else ():
            digest.update(engine.full_optimizer_state(p, state).numpy().tobytes())
    return digest.hexdigest(), engine.get_global_grad_norm(), tuple(skipped), engine.loss_scale


def _train(engine, case: dict, first: int, last: int, rank: int, world: int, total: int) -> list[str]:
    micro, gas, skipped = case.get("micro", 1), total // world, []
    for step in range(first, last):
        x, y = tiny.make_batch(step, total * micro)
        for m in range(gas):
            at = (m * world + rank) * micro
            engine.backward(engine(x[at : at + micro], y[at : at + micro]))
            result = engine.step()
        if result.reason:
            skipped.append(f"{step}: {result.reason}")
    return skipped


def _work(rank: int, world: int, case: dict, stages, steps: int, total: int, nodes: int) -> list[tuple]:
    import deepc

    out = []
    with on_node(f"host{rank // (world // nodes)}" if nodes > 1 else None), pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEPC_STREAMED", str(case.get("streamed", 0)))
        for stage in stages:
            torch.manual_seed(1234 + rank * case.get("seed_by_rank", 0))
            model = _model(case)
            torch.manual_seed(77)
            engine, *_ = deepc.initialize(
                model=model, config=_config(stage, total // world, case), optimizer=_optimizer(case, model)
            )
            assert engine.plan.layout.nbuckets > 2
            skipped = _train(engine, case, 0, steps, rank, world, total)
            out.append(_digest(engine, skipped))
            engine.destroy()
    return out


def results(
    case: dict, worlds, *, stages=(0, 1, 2, 3), steps: int = STEPS, total: int = MICRO_BATCHES, nodes: int = 1
) -> list[tuple]:
    """The digests of all ranks and stages for each number of ranks."""
    return [d for world in worlds for rank in run_ranks(_work, world, case, stages, steps, total, nodes) for d in rank]


def assert_same(case: dict, worlds, **kw) -> tuple:
    found = results(case, worlds, **kw)
    assert len(set(found)) == 1, f"{len(set(found))} different results: {found}"
    return found[0]


# ---- the claim -------------------------------------------------------------------------------------------------------
def test_same_bits_in_every_layout_and_not_without_the_option():
    first = assert_same({}, (1, 2, 4), steps=5)
    assert first[1] > 0
    assert len(set(results({"on": False}, (1, 2, 4), stages=(2,), steps=5))) == 3


@pytest.mark.full
def test_gradients_that_cross_in_16_bits_alone():
    assert_same({"config": {"communication_data_type": "bf16"}}, (1, 4), stages=(0, 2), steps=3)  # rounded alone too


def test_bf16_wire_fp16_and_skipped_steps():
    assert_same({"precision": "bf16"}, (1, 4), stages=(1, 3), steps=3)
    found = assert_same(
        {"precision": "fp16", "config": {"fp16": {"initial_scale_power": 24, "loss_scale_window": 4, "hysteresis": 1}}},
        (1, 4),
        stages=(0, 3),
        steps=14,
    )
    assert len(found[2]) >= 3 and "not finite" in found[2][0]


@pytest.mark.parametrize("total, worlds", [(6, (1, 2, 3)), pytest.param(12, (4, 3), marks=pytest.mark.full)])
def test_numbers_of_micro_batches_that_are_no_power_of_two(total, worlds):
    assert_same({"micro": 2}, worlds, stages=(0, 3), steps=5, total=total)


def test_dropout_belongs_to_the_micro_batch_and_leaves_the_generator_alone():
    a = assert_same({"dropout": True, "seed_by_rank": 1}, (1, 4), stages=(0, 3), steps=5)
    b = assert_same({"dropout": True, "config": {"gradient_clipping": 0.5}}, (2,), stages=(1,), steps=5)
    assert a == b
    assert a != assert_same({}, (1,), stages=(0,), steps=5)
    assert run_ranks(_draws, 2) == run_ranks(_draws, 1) * 2


def _draws(rank, world):
    import deepc

    case = {"dropout": True}
    engine, *_ = deepc.initialize(model=_model(case), config=_config(1, 2 // world, case))
    torch.manual_seed(5)
    before = torch.rand(3).tolist()
    _train(engine, case, 0, 2, rank, world, 2)
    losses = []
    engine.eval()
    with torch.no_grad():
        losses = [engine(*tiny.make_batch(0, 1)).item() for _ in range(2)]
    after = torch.rand(3).tolist()
    engine.destroy()
    return before, after, losses[0] == losses[1]


@pytest.mark.parametrize(
    "kind, options",
    [
        ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        pytest.param("Adagrad", {"lr": 0.02}, marks=pytest.mark.full),
        pytest.param("AdamW", {"lr": 1e-3, "amsgrad": True}, marks=pytest.mark.full),
    ],
)
def test_optimizers_and_param_groups(kind, options):
    assert_same({"optimizer": (kind, options), "config": {"optimizer": None}}, (1, 4), stages=(0, 3), steps=5)


@pytest.mark.parametrize(
    "options",
    [
        {"frozen": True, "unused": True},
        pytest.param({"reuse": True, "recompute": "plain"}, marks=pytest.mark.full),
        {"recompute": "reentrant"},
    ],
    ids=["frozen-unused", "reuse-checkpointed", "reentrant"],
)
def test_models(options):
    assert_same({"model": options}, (1, 2), stages=(0, 3), steps=4)


# ---- ways to train ---------------------------------------------------------------------------------------------------
def _ways(rank, world, way):
    import deepc

    total, case = 4, {}
    cfg = _config(2, total // world, case)
    model = _model(case)
    engine, *_ = deepc.initialize(model=model, config=cfg)
    for step in range(4):
        x, y = tiny.make_batch(step, total)
        for m in range(total // world):
            i = m * world + rank
            a, b = (x[i : i + 1, :8], y[i : i + 1, :8]), (x[i : i + 1, 8:], y[i : i + 1, 8:])
            if way == "one":
                engine.backward(engine(*a) + engine(*b))
            elif way == "no_sync, then the other":
                with engine.no_sync():
                    engine.backward(engine(*a))
                engine.backward(engine(*b))
            elif way == "all in no_sync":
                with engine.no_sync():
                    engine.backward(engine(*a))
                    engine.backward(engine(*b))
            elif way == "bare":
                (engine(*a) + engine(*b)).backward()
            elif way == "without a loss" and i % 2:
                engine.backward(engine(*a))
            engine.step()
    out = _digest(engine, [])
    engine.destroy()
    return out


@pytest.mark.parametrize(
    "way",
    [
        *(pytest.param(way, marks=pytest.mark.full) for way in ("one", "all in no_sync")),
        "no_sync, then the other",
        "bare",
    ],
)
def test_ways_to_train(way):
    found = {d for world in (1, 2, 4) for d in run_ranks(_ways, world, way)}
    assert len(found) == 1
    if way == "bare":
        assert found == set(run_ranks(_ways, 1, "one"))


def test_a_micro_batch_without_a_loss_is_a_leaf_of_zeros():
    assert len({d for world in (1, 2) for d in run_ranks(_ways, world, "without a loss")}) == 1


def _gradients(rank, world, total):
    import deepc

    engine, *_ = deepc.initialize(model=_model({}), config=_config(3, total // world, {"clip": 0}))
    p = engine.module.head.weight
    x, y = tiny.make_batch(0, total)
    out, refused = [], 0
    for m in range(total // world):
        i = m * world + rank
        engine.backward(engine(x[i : i + 1], y[i : i + 1]))
        if (m + 1) * world in (4, total):
            out.append(engine.full_grad(p))
        if m + 1 < total // world:
            try:
                deepc.view(p).grad = torch.zeros_like(p)
            except deepc.errors.UnsupportedError:
                refused += 1
        engine.step()
    engine.destroy()
    return [g.numpy().tobytes() for g in out], refused


def test_gradients_can_be_read_on_the_way():
    alone = run_ranks(_gradients, 1, 6)[0]
    assert len(alone[0]) == 2 and alone[1] == 5 and alone[0][0] != alone[0][1]
    assert all(r == (alone[0], 2) for r in run_ranks(_gradients, 2, 6))


def _gradients_against_plain(rank, world):
    import deepc

    engine, *_ = deepc.initialize(model=_model({}), config=_config(2, 4 // world, {}))
    model, worst = _model({}), 0.0
    x, y = tiny.make_batch(0, 4)
    sum(model(x[i : i + 1], y[i : i + 1]) / 4 for i in range(4)).backward()
    for m in range(4 // world):
        i = m * world + rank
        shown = engine.backward(engine(x[i : i + 1], y[i : i + 1]))
        assert shown.item() == pytest.approx(model(x[i : i + 1], y[i : i + 1]).item() * world / 4, rel=1e-6)
        if m < 4 // world - 1:
            engine.step()
    for (_, p), (_, q) in zip(engine.module.named_parameters(), model.named_parameters()):
        worst = max(worst, ((engine.full_grad(p) - q.grad).abs().max() / q.grad.abs().max()).item())
    engine.step()
    engine.destroy()
    return worst


def test_gradients_are_the_mean():
    assert max(run_ranks(_gradients_against_plain, 2)) < 1e-5


# ---- several nodes, checkpoints, data --------------------------------------------------------------------------------
def test_nodes():
    alone = assert_same({}, (1,), stages=(0,), steps=5)
    assert assert_same({}, (4,), stages=(0, 2, 3), steps=5, nodes=2) == alone
    wire = {"config": {"communication_data_type": "bf16"}}
    assert assert_same(wire, (2,), stages=(3,), steps=5, nodes=2) == assert_same(wire, (1,), stages=(0,), steps=5)


def test_streamed_mode():
    assert assert_same({"streamed": 1}, (1, 2), stages=(3,), steps=4) == assert_same({}, (1,), stages=(0,), steps=4)


def _resumed(rank, world, folder, stage, first, last):
    import deepc

    case = {"dropout": True}
    torch.manual_seed(9)
    model = _model(case)
    torch.manual_seed(77)
    engine, *_ = deepc.initialize(model=model, config=_config(stage, MICRO_BATCHES // world, case))
    if first:
        engine.load_checkpoint(folder)
    _train(engine, case, first, last, rank, world, MICRO_BATCHES)
    if not first:
        engine.save_checkpoint(folder)
    out = _digest(engine, [])
    engine.destroy()
    return out


def test_a_checkpoint_goes_on_in_another_layout():
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(_resumed, 2, folder, 3, 0, 3)
        other = run_ranks(_resumed, 4, folder, 1, 3, 6)
    assert set(other) == set(run_ranks(_work, 1, {"dropout": True}, (0,), 6, MICRO_BATCHES, 1)[0])


def test_sampler_deals_the_same_micro_batches():
    data = range(37)
    for drop_last in (False, True):
        dealt = {}
        for world in (1, 2, 4):
            epoch = [
                list(MicroBatchSampler(data, 2, world, r, per_step=4, seed=1, drop_last=drop_last))
                for r in range(world)
            ]
            assert all(
                len(e) == len(MicroBatchSampler(data, 2, world, 0, per_step=4, drop_last=drop_last)) for e in epoch
            )
            dealt[world] = [epoch[k % world][k // world] for k in range(sum(map(len, epoch)))]
        assert dealt[1] == dealt[2] == dealt[4] and len(dealt[1]) == (16 if drop_last else 20)
        seen = [i for b in dealt[1] for i in b]
        assert len(set(seen)) == (32 if drop_last else 37)
    sampler = MicroBatchSampler(data, 2, 1, 0)
    one, two = list(sampler), list(sampler)
    sampler.set_epoch(0)
    assert one != two and list(sampler) == one


def _loaded(rank, world):
    import deepc

    data = torch.utils.data.TensorDataset(*tiny.make_batch(0, 24))
    engine, _, loader, _ = deepc.initialize(
        model=_model({}), config=_config(1, 4 // world, {"micro": 2}), training_data=data
    )
    for _ in range(2):
        for x, y in loader:
            engine.backward(engine(x, y))
            engine.step()
    out = _digest(engine, []), engine.global_steps
    engine.destroy()
    return out


def test_the_engines_loader():
    found = {d for world in (1, 2) for d in run_ranks(_loaded, world)}
    assert len(found) == 1 and found.pop()[1] == 6


# ---- the plan, refusals ----------------------------------------------------------------------------------------------
def test_buffers():
    assert [tree_buffers(1, p) for p in (1, 2, 3, 4, 7, 8, 9, 16)] == [1, 1, 1, 2, 2, 3, 3, 4]
    assert [tree_buffers(8, p) for p in (1, 2, 4, 8)] == [1, 1, 2, 3]
    assert tree_buffers(3, 1) == 1 and tree_buffers(3, 3) == 2


def _planned(rank, world):
    import deepc

    out = []
    for on in (True, False):
        engine, *_ = deepc.initialize(model=_model({}), config=_config(2, 8, {"on": on}))
        out.append(
            (
                engine.plan.bytes["grads_private"] // (4 * engine.plan.owned_elems),
                "3 nodes" in engine.plan.describe(),
                engine.plan.bytes["rank_total"],
            )
        )
        engine.destroy()
    return out, engine.plan.owned_elems


def test_the_plan_shows_the_buffers():
    (on, off), owned = run_ranks(_planned, 1)[0]
    assert on[:2] == (3, True) and off[:2] == (1, False) and on[2] - off[2] == 2 * 4 * owned


def _refused(rank, world, what):
    import deepc

    try:
        _do_wrong(what)
    except (deepc.DeepcError, RuntimeError) as exc:
        return f"{type(exc).__name__}: {exc}"
    return "nothing was raised"


def _do_wrong(what):
    import deepc

    case = {"config": {"zero_optimization": {"zero_quantized_gradients": True}}} if what == "quantized" else {}
    if what == "custom optimizer":

        class Mine(torch.optim.SGD):
            pass

        deepc.initialize(
            model=_model(case), config={**_config(0, 1, case), "optimizer": None}, optimizer=lambda ps: Mine(ps, lr=0.1)
        )
    engine, *_ = deepc.initialize(
        model=_model({"model": {"reuse": True, "recompute": "reentrant"}} if what == "reentrant" else case),
        config=_config(2, 2, case),
    )
    x, y = tiny.make_batch(0, 1)
    if what == "second backward":
        engine.backward(engine(x, y))
    if what == "mixed scaling":
        engine.backward(engine(x, y))
        engine.step()
        engine.backward(engine(x, y), scale_wrt_gas=False)
    if what == "longer":
        engine.set_gradient_accumulation_boundary(False)
        for _ in range(4):
            engine.backward(engine(x, y))
            engine.step()
    engine.backward(engine(x, y))
    engine.step()
    if what == "no backward":
        engine.backward(engine(x, y))
        for _ in range(3):
            engine.step()


@pytest.mark.parametrize(
    "what, words",
    [
        ("second backward", "UnsupportedError: a second backward of the same micro-batch"),
        ("mixed scaling", "ArgumentError: scale_wrt_gas must be the same"),
        ("no backward", "DeepcError: engine.step() at an accumulation boundary without a backward"),
        ("longer", "DeepcError: after 3 micro-batches the tree has 2 nodes"),
        ("quantized", "ConfigError: zero_optimization.zero_quantized_gradients rounds"),
        ("custom optimizer", "UnsupportedError: optimizer Mine with deepc.deterministic"),
        ("reentrant", "UnsupportedError: 'blocks.1.down.bias' got two gradients in one backward"),
    ],
)
def test_refusals(what, words):
    assert words in run_ranks(_refused, 1, what)[0]


# ---- all of it -------------------------------------------------------------------------------------------------------
_reference: dict[str, tuple] = {}


def _same_as_reference(name: str, case: dict, world: int, stage: int) -> None:
    if name not in _reference:
        _reference[name] = assert_same(
            {**case, "config": {k: v for k, v in case.get("config", {}).items() if k != "zero_optimization"}},
            (1,),
            stages=(0,),
        )
    assert assert_same(case, (world,), stages=(stage,)) == _reference[name]


@pytest.mark.full
@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
@pytest.mark.parametrize("world, stage", LAYOUTS)
def test_fifty_steps(world, stage, offload):
    case = {"config": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}} if offload else {}
    _same_as_reference("fp32", case, world, stage)


@pytest.mark.full
@pytest.mark.parametrize("world, stage", LAYOUTS)
@pytest.mark.parametrize("precision", ["bf16", "fp16", "wire"])
def test_fifty_steps_in_16_bits(world, stage, precision):
    case = {
        "bf16": {"precision": "bf16"},
        "wire": {"config": {"communication_data_type": "bf16"}},
        "fp16": {
            "precision": "fp16",
            "config": {"fp16": {"initial_scale_power": 24, "loss_scale_window": 8, "hysteresis": 1}},
        },
    }[precision]
    _same_as_reference(precision, {**case, "dropout": True}, world, stage)
