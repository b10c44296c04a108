"""1-bit optimizers at ZeRO stages 1 and 2: the ranks of a node are one worker and share its states."""

from __future__ import annotations

import numpy as np
import onebit_reference as reference
import pytest
import torch
from ranks import on_nodes, run_ranks
from test_onebit import EXTRA, LOCAL, MORE, OPTIONS, _saved, _total, cfg, snapshot

full = pytest.mark.full
HERE = {"hierarchical": True}
CUT = {"deepc": {"bucket_elems": 8192}}  # several buckets: parameters lie in pieces


# ---- the papers' steps -----------------------------------------------------------------------------------------------
def _steps(rank, world, name, steps, options, more, nodes):
    """For each step what this rank had, its gradients, and what it has after. And the pieces that it has."""
    import deepc
    from tiny import make_batch, make_model

    with on_nodes(rank, world, nodes):
        engine, *_ = deepc.initialize(model=make_model(seed=rank), config=cfg(name, options=options, clip=0.0, **more))
    base, method, out = engine.optimizer.base, engine.optimizer.base.method, []
    step_of = method.step

    def watched(scale):
        before = snapshot(base)
        grads = [(i.grad * scale).double().numpy().copy() for i in method.items]
        step_of(scale)
        out.append((before, grads, snapshot(base)))

    method.step = watched
    replicas = []
    for step in range(steps):
        engine.backward(engine(*(t[rank * 2 : rank * 2 + 2] for t in make_batch(step, 2 * world))))
        engine.step()
        replicas.append(torch.cat([p.detach().float().reshape(-1) for p in engine.module.parameters()]).numpy().copy())
    places = [(method.of[i], item.begin, item.param.numel()) for i, item in enumerate(method.items)]
    norm = engine.get_global_grad_norm()
    engine.destroy()
    return out, places, replicas, norm


def _of_node(ranks, step, when):
    """What the ranks of a node have together, with one part after the other."""
    parts = [r[0][step][when] for r in ranks]
    out = {"numbers": parts[0]["numbers"]}
    for part in parts[1:]:
        assert part["numbers"] == out["numbers"]
    for key in parts[0]:
        if key not in ("numbers", "worker", "server"):
            out[key] = [a.astype(np.float64) for part in parts for a in part[key]]
    return {**out, "worker": [p["worker"] for p in parts], "server": [p["server"] for p in parts]}


def check_shards(name, nodes, per, steps, more, **options):
    """nodes of `per` ranks each."""
    options = {**HERE, **options}
    ranks = run_ranks(_steps, nodes * per, args=(name, steps, options, {"micro": 2, "stage": 1, **more}, nodes))
    of_node = [ranks[n * per : (n + 1) * per] for n in range(nodes)]
    rotated = options.get("rotated", False)
    columns = [
        reference.Exchange([n for _, _, n in ranks[k][1]], nodes, alone=True, rotated=rotated) for k in range(per)
    ]
    exchange = reference.Columns(columns)
    o = {**MORE, **OPTIONS, **EXTRA[name], **options}
    o.update(b1=o["betas"][0], b2=o["betas"][1], wd=o["weight_decay"])
    method = reference.method_of(name, o)(exchange, o)
    method.of = [k for r in of_node[0] for k, _, _ in r[1]]
    assert per == 1 or any(n == 0 for r in ranks for _, _, n in r[1]), "every rank has a piece of every parameter"
    if more.get("deepc"):
        assert len(set(method.of)) < sum(n > 0 for r in of_node[0] for _, _, n in r[1]), "no parameter is cut"
    for step in range(steps):
        had, have = ([_of_node(r, step, when) for r in of_node] for when in (0, 2))
        for states in (*had, *have):  # a server's errors are those of its slice
            worker = [e.astype(np.float64) for e in states["worker"]]
            states["worker"] = np.concatenate(worker)
        for n in range(nodes):
            for states in (had[n], have[n]):
                states["server"] = np.concatenate([np.split(e.astype(np.float64), nodes)[n] for e in states["server"]])
        grads = [[g for r in node for g in r[0][step][1]] for node in of_node]
        want = method.step(had, grads, have)
        for n in range(nodes):
            for key in (k for k in have[n] if k != "numbers"):
                pairs = (
                    zip(have[n][key], want[n][key])
                    if isinstance(have[n][key], list)
                    else [(have[n][key], want[n][key])]
                )
                for got, good in pairs:
                    if good.size:
                        atol = (2e-5 if key in ("worker", "server") else 3e-6) * np.abs(good).max() + 1e-9
                        np.testing.assert_allclose(
                            got, good, rtol=2e-5, atol=atol, err_msg=f"{name} {key} after step {step + 1} of node {n}"
                        )
            for key in ("means", "factors"):
                if key in want[n]["numbers"]:
                    np.testing.assert_allclose(have[n]["numbers"][key], want[n]["numbers"][key], rtol=1e-5)
    assert exchange.seen and exchange.undecided <= 1e-3 * exchange.seen
    assert len({r[3] for r in ranks}) == 1 and ranks[0][3] > 0  # one norm
    for node in of_node:  # every rank of a node computes with the same parameters, and but for 0/1 Adam every rank
        for other in node if name == "ZeroOneAdam" else ranks:
            assert all(np.array_equal(a, b) for a, b in zip(node[0][2], other[2]))
    return ranks


@pytest.mark.parametrize("name", ["OneBitAdam", "OneBitLamb", pytest.param("ZeroOneAdam", marks=full)])
def test_every_step_of_shards_is_the_papers(name):
    """Two nodes of two ranks; the models differ at first."""
    more = dict(var_freeze_step=5, local_step_scaler=2) if name == "ZeroOneAdam" else dict(freeze_step=4)
    check_shards(name, 2, 2, 10, CUT, **more)


@full
@pytest.mark.parametrize(("nodes", "per", "more"), [(2, 2, CUT), (1, 2, {"stage": 2})])
def test_live_ratios_are_of_whole_parameters(nodes, per, more):
    check_shards("OneBitLamb", nodes, per, 10, more, freeze_step=4, ratios="live", max_update=0.5)


@full
@pytest.mark.parametrize(
    ("name", "nodes", "per", "more", "options"),
    [
        ("OneBitAdam", 2, 2, CUT, {}),
        ("OneBitLamb", 2, 2, CUT, {"ratios": "live", "max_update": 0.5}),
        ("OneBitLamb", 1, 2, {"stage": 2}, {}),
        ("ZeroOneAdam", 2, 2, CUT, {}),
    ],
)
def test_shards_rotate_their_pieces(name, nodes, per, more, options):
    at = dict(var_freeze_step=5, local_step_scaler=2) if name == "ZeroOneAdam" else dict(freeze_step=4)
    check_shards(name, nodes, per, 10, more, **at, **options, rotated=True)


@full
@pytest.mark.parametrize(
    ("name", "nodes", "per", "more"),
    [
        ("OneBitAdam", 1, 2, {"stage": 2}),
        ("OneBitAdam", 3, 1, {}),
        ("OneBitLamb", 1, 3, CUT),
        ("ZeroOneAdam", 1, 2, {}),
        ("OneBitLamb", 3, 2, {"precision": "bf16"}),
    ],
)
def test_other_nodes_stages_and_dtypes(name, nodes, per, more):
    options = dict(var_freeze_step=5, local_step_scaler=2) if name == "ZeroOneAdam" else dict(freeze_step=4)
    check_shards(name, nodes, per, 10, {"stage": 1, **more}, **options)


def _weights(rank, world, stage, nodes, gas, more, looks=False, folder="", steps=6):
    import deepc
    from tiny import make_batch, make_model

    config = cfg("OneBitAdam", micro=2 // gas, stage=stage, gas=gas, options={"freeze_step": 100, **HERE}, **more)
    with on_nodes(rank, world, nodes):
        engine, *_ = deepc.initialize(model=make_model(), config=config)
    for step in range(steps):
        for part in range(gas):
            at, n = 2 * rank + part, 2 // gas
            engine.backward(engine(*(t[at : at + n] for t in make_batch(step, 2 * world))))
            if looks and part == 0:
                seen = engine.full_grad(engine.module.ln.weight)
                assert seen is not None and torch.isfinite(seen).all()
            engine.step()
    weights = {n: engine.full_fp32_param(p).clone() for n, p in engine.module.named_parameters()}
    sent, norm, plan = engine.comm_bytes, engine.get_global_grad_norm(), dict(engine.plan.bytes)
    if folder:
        deepc.export(engine, f"{folder}/of{engine.everyone.rank}")
    engine.destroy()
    return weights, sent, norm, plan


def test_the_warm_up_of_shards_has_the_bits_of_stage_0_and_a_part_of_its_memory(tmp_path):
    whole = run_ranks(_weights, 4, args=(0, 2, 1, {"precision": "bf16"}))
    shards = run_ranks(_weights, 4, args=(1, 2, 1, {"precision": "bf16"}, False, str(tmp_path)))
    assert [f.name for f in tmp_path.iterdir()] == ["of0"]  # one rank of all writes what is exported
    for other in shards:
        assert all(torch.equal(w, other[0][n]) for n, w in whole[0][0].items())
        assert other[1]["gradients"] > 0 and other[2] == whole[0][2]
    states = [r[0][3] for r in (whole, shards)]
    for what in ("master_private", "states_private", "grads_private"):
        assert states[1][what] <= 0.6 * states[0][what]


def _one_rank(rank, world, name, options, folder):
    """The weights after 6 steps: at stage 0, at stage 1, and there of a run that went on from its 4th step."""
    import deepc
    from tiny import make_batch, make_model

    out = []
    for stage, load in ((0, False), (1, False), (1, True)):
        config = cfg(name, stage=stage, options={**options, **HERE})
        engine, *_ = deepc.initialize(model=make_model(), config=config)
        if load:
            engine.load_checkpoint(folder)
        while engine.global_steps < 6:
            engine.backward(engine(*make_batch(engine.global_steps, 2)))
            engine.step()
            if engine.global_steps == 4 and stage == 1:
                engine.save_checkpoint(folder)
        out.append({n: engine.full_fp32_param(p).clone() for n, p in engine.module.named_parameters()})
        engine.destroy()
    return out


@pytest.mark.parametrize(
    ("name", "options"), [("OneBitAdam", {"freeze_step": 2}), pytest.param("ZeroOneAdam", LOCAL, marks=full)]
)
def test_one_rank_rounds_nothing_at_any_stage(name, options, tmp_path):
    whole, shards, resumed = run_ranks(_one_rank, 1, args=(name, options, str(tmp_path)))[0]
    for n, w in whole.items():
        assert torch.equal(w, shards[n]) and torch.equal(w, resumed[n]), n


@full
def test_gradients_that_somebody_looked_at_before_the_last_micro_batch_go_on():
    """They are summed over the nodes then, and again at the end; without accumulation everything crosses once."""
    once, twice, looked = (
        run_ranks(_weights, 4, args=(1, 2, gas, {}, looks)) for gas, looks in ((1, 0), (2, 0), (2, 1))
    )
    for n, w in once[0][0].items():
        for other in (*twice, *looked):
            torch.testing.assert_close(other[0][n], w, rtol=0, atol=1e-5)
    assert looked[0][1]["gradients"] == 2 * twice[0][1]["gradients"] == 2 * once[0][1]["gradients"]


# ---- checkpoints -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "options", "precision"),
    [
        ("OneBitAdam", {"freeze_step": 2}, "bf16"),
        pytest.param("OneBitLamb", {"freeze_step": 3}, "fp32", marks=full),
        pytest.param("ZeroOneAdam", LOCAL, "fp32", marks=full),
    ],
)
def test_a_checkpoint_of_shards_goes_on_and_loads_into_stage_0(name, options, precision, tmp_path):
    options, more = {**options, **HERE}, {"precision": precision, "stage": 1, **CUT}
    args = (name, str(tmp_path), options)
    whole = run_ranks(_saved, 4, args=(*args, more, 8, 5, 2))
    for a, b in zip(whole, run_ranks(_saved, 4, args=(*args, more, 8, 0, 2))):
        assert a[3] == b[3]
        assert all(torch.equal(w, b[0][n]) for n, w in a[0].items())
        assert all(torch.equal(x, y) for k in (1, 2) for x, y in zip(a[k], b[k]))
    owed = _total(whole)
    assert max(abs(x).max() for x in owed) > 0
    for world, stage, nodes in ((2, 0, 1), (2, 1, 2), (4, 0, 2)):
        others = run_ranks(_saved, world, args=(*args, {**more, "stage": stage}, 6, 0, nodes))
        for x, y in zip(owed, _total(others)):
            np.testing.assert_allclose(y, x, rtol=1e-5, atol=1e-6 * abs(x).max())


def _told(rank, world, *args):
    """_saved, and what the log said."""
    import logging

    said = []

    class Kept(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    logger, kept = logging.getLogger("deepc"), Kept()
    level = logger.level
    logger.addHandler(kept)
    logger.setLevel(logging.INFO)
    try:
        return (*_saved(rank, world, *args), [t for t in said if "in other pieces" in t])
    finally:
        logger.removeHandler(kept)
        logger.setLevel(level)


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=full)])
def test_rotated_errors_of_other_pieces_begin_with_zeros(stage, tmp_path):
    """Saved by two nodes of two ranks; blocks of a parameter that is cut are of its pieces."""
    options = {"freeze_step": 2, "rotated": True, **HERE}
    more = {"precision": "bf16", "stage": 1, **CUT}
    args = ("OneBitAdam", str(tmp_path), options)
    owed = _total(run_ranks(_saved, 4, args=(*args, more, 6, 5, 2)))
    again = run_ranks(_told, 4, args=(*args, more, 6, 0, 2))
    assert not any(r[4] for r in again)
    for x, y in zip(owed, _total(again)):
        np.testing.assert_array_equal(y, x)
    world = 2 if stage == 0 else 3
    others = run_ranks(_told, world, args=(*args, {**more, "stage": stage}, 5, 0, 1 if stage == 0 else world))
    dropped = [not y.any() for y in _total(others)]
    assert any(dropped) and not all(dropped) and all(x.any() for x in owed)
    for x, y, none in zip(owed, _total(others), dropped):
        if not none:
            np.testing.assert_allclose(y, x, rtol=1e-5, atol=1e-6 * abs(x).max())
    assert len(others[0][4]) == 1 and f"had {sum(dropped)} of {len(owed)} parameters" in others[0][4][0]
    assert not any(r[4] for r in others[1:])


@full
def test_rotated_errors_go_on_with_their_pieces_and_are_refused_without(tmp_path):
    options, more = {"freeze_step": 3, "rotated": True, **HERE}, {"stage": 1, **CUT}
    args = ("OneBitLamb", str(tmp_path))
    whole = run_ranks(_saved, 4, args=(*args, options, more, 8, 5, 2))
    for a, b in zip(whole, run_ranks(_saved, 4, args=(*args, options, more, 8, 0, 2))):
        assert a[3] == b[3]
        assert all(torch.equal(w, b[0][n]) for n, w in a[0].items())
        assert all(torch.equal(x, y) for k in (1, 2) for x, y in zip(a[k], b[k]))
    with pytest.raises(Exception, match="saved with rotated=True"):
        run_ranks(_saved, 4, args=(*args, {**options, "rotated": False}, more, 8, 0, 2))


@full
def test_a_checkpoint_of_stage_0_loads_into_shards(tmp_path):
    args = ("OneBitLamb", str(tmp_path), {"freeze_step": 3, **HERE})
    owed = _total(run_ranks(_saved, 4, args=(*args, {}, 6, 5, 2)))
    others = run_ranks(_saved, 4, args=(*args, {"stage": 1, **CUT}, 6, 0, 2))
    for x, y in zip(owed, _total(others)):
        np.testing.assert_allclose(y, x, rtol=1e-5, atol=1e-6 * abs(x).max())
    assert others[0][3]["frozen_at"] == 3 and len(others[0][3]["means"]) == len(owed)


# ---- the edges -------------------------------------------------------------------------------------------------------
def _overflow(rank, world, nodes):
    """fp16: the loss of the last rank overflows once in the warm-up and once after the freeze; one rank keeps gradients
    from its first micro-batch."""
    import contextlib

    import deepc
    from tiny import make_batch, make_model

    fp16 = {"enabled": True, "initial_scale_power": 8}
    mask = torch.ones(61, 1)
    mask[40:] = 0
    model, said = make_model(), []
    groups = [
        {"params": [model.tok.weight], "exp_avg_mask": mask},
        {"params": list(model.ln.parameters()), "non_freeze": True},
        {"params": [p for n, p in model.named_parameters() if not n.startswith(("tok", "ln."))]},
    ]
    raw = {**cfg("OneBitAdam", micro=1, gas=2, stage=1, options={"freeze_step": 3, **HERE}), "fp16": fp16, **CUT}
    with on_nodes(rank, world, nodes):
        engine, *_ = deepc.initialize(model=model, config=raw, model_parameters=groups)
    for step in range(7):
        for half in range(2):
            x, y = (t[2 * rank + half : 2 * rank + half + 1] % 40 for t in make_batch(step, 2 * world))
            with engine.no_sync() if rank == 0 and half == 0 else contextlib.nullcontext():
                engine.backward(engine(x, y) * (1e30 if step in (1, 5) and rank == world - 1 else 1.0))
            if rank == 0 and half == 0:  # the others have a pass here
                engine.hooks.begin_pass(False)
                engine.hooks.end_pass()
            result = engine.step()
        said.append((result.applied, result.reason))
    weights = [engine.full_fp32_param(p).clone() for p in engine.module.parameters()]
    momentum = engine.full_optimizer_state(engine.module.tok.weight, "exp_avg")
    norm = engine.get_global_grad_norm()
    engine.destroy()
    return said, weights, momentum, norm


def test_overflows_masks_and_gradients_that_were_kept():
    ranks = run_ranks(_overflow, 4, args=(2,))
    assert ["node 1" in said[5][1] for said, *_ in ranks] == [True, True, False, False]
    for said, weights, momentum, norm in ranks:
        assert [applied for applied, _ in said] == [True, False, True, True, True, False, True]
        assert "loss scale 256 -> 256" in said[1][1] and "loss scale 256 -> 128" in said[5][1]
        assert all(torch.equal(a, b) for a, b in zip(weights, ranks[0][1])) and norm == ranks[0][3]
        assert momentum[40:].abs().max() == 0 and momentum[:40].abs().max() > 0


def _auto(rank, world):
    import deepc
    from tiny import make_batch, make_model

    options = {"freeze_step": "auto", "betas": (0.9, 0.9), "var_freeze_threshold": 0.5, **HERE}
    with on_nodes(rank, world, 2):
        engine, *_ = deepc.initialize(model=make_model(), config=cfg("OneBitAdam", micro=1, stage=1, options=options))
    for step in range(40):
        engine.backward(engine(*(t[rank : rank + 1] for t in make_batch(step, world))))
        engine.step()
    frozen, exchanged = engine.optimizer.base.method.frozen_at, engine.step_policy.exchanged
    engine.destroy()
    return frozen, exchanged


def test_the_freeze_of_shards_is_one_and_their_bytes_are_counted():
    found = run_ranks(_auto, 4)
    assert len({frozen for frozen, _ in found}) == 1 and 0 < found[0][0] < 40
    for _, exchanged in found:
        assert 0 < exchanged["bytes"] < exchanged["uncompressed_bytes"] / 8  # small tensors fill blocks


def _uneven(rank, world):
    import os

    import deepc
    from deepc.errors import DeepcError
    from tiny import make_model

    os.environ["DEEPC_NODE_ID"] = f"host{int(rank == 2)}"
    try:
        deepc.initialize(model=make_model(), config=cfg("OneBitAdam", stage=1, options=HERE))
    except DeepcError as exc:
        return str(exc)
    finally:
        del os.environ["DEEPC_NODE_ID"]
    return ""


def test_unequal_nodes_and_workers_inside_a_node_are_refused():
    assert all("different numbers of ranks" in said for said in run_ranks(_uneven, 3))
    from test_onebit import _refused

    said = run_ranks(_refused, 2, args=(cfg("OneBitAdam", stage=1),))
    assert all("hierarchical=False" in text for _, text in said)
