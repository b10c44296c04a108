"""OneBitAdam, OneBitLamb and ZeroOneAdam: their papers' algorithms step by step, the engine, checkpoints, and what they
refuse."""

from __future__ import annotations

import copy

import numpy as np
import onebit_reference as reference
import pytest
import tiny
import torch
from ranks import on_nodes, run_ranks

full = pytest.mark.full
SHAPES = [(70, 40), (33,), (2, 2048)]
OPTIONS = dict(lr=2e-3, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.05, hierarchical=False)
EXTRA = {
    "OneBitAdam": dict(freeze_step=6),
    "OneBitLamb": dict(freeze_step=6, factor_min=0.9, factor_max=1.05, factor_threshold=0.03),
    "ZeroOneAdam": dict(var_freeze_step=8, var_update_scaler=2, local_step_scaler=3, local_step_clipper=4),
}
MORE = {"coeff_beta": 0.9}


def make(name, params, **more):
    from deepc import optim

    return getattr(optim, name)(params, **{**OPTIONS, **EXTRA[name], **more})


def gradients(rank, step):
    g = torch.Generator().manual_seed(100 * step + rank)
    common = torch.Generator().manual_seed(7 + step // 20)
    return [torch.randn(s, generator=g) + 0.5 * torch.randn(s, generator=common) for s in SHAPES]


def spread(method):
    """What a rank owes, where it lies in the whole buffer."""
    out = {k: torch.zeros(method.places.total) for k in ("worker", "server")}
    if errors := method.errors():
        for k, spans in method.exchange.owned(method.places.total).items():
            parts = errors[k].split([end - begin for begin, end in spans]) if spans else ()
            for (begin, end), part in zip(spans, parts):
                out[k][begin:end] = part
    return out


def snapshot(opt):
    """What a rank has, as arrays."""
    method, errors = opt.method, spread(opt.method)
    out = {"p": [i.param.numpy().copy() for i in method.items], "numbers": method.numbers()}
    for name in method.names:
        out[name] = [i.states[name].numpy().copy() for i in method.items]
    return {**out, **{k: t.numpy().copy() for k, t in errors.items()}}


def _trace(rank, world, name, steps, options, nodes):
    with on_nodes(rank, world, nodes):
        return _trace_here(rank, name, steps, options)


def _trace_here(rank, name, steps, options):
    params = [torch.nn.Parameter(x) for x in gradients(0, -1)]
    opt = make(name, params, **options)
    opt._made()
    out = [snapshot(opt)]
    for step in range(steps):
        for p, g in zip(params, gradients(rank, step)):
            p.grad = g
        opt.step()
        out.append(snapshot(opt))
    return out


def _worker(ranks, steps, worker, world, per):
    """Of all ranks' traces that of one worker, with the slice of the server's errors that is its in the paper."""
    mine = ranks[worker * per : (worker + 1) * per]
    out = []
    for step in range(steps + 1):
        for other in mine[1:]:
            assert all(np.array_equal(a, b) for a, b in zip(mine[0][step]["p"], other[step]["p"]))
        server = sum(r[step]["server"] for r in ranks)
        owed = {"worker": sum(r[step]["worker"] for r in mine), "server": np.split(server, world)[worker]}
        out.append({**mine[0][step], **owed})
    return out


def check_against_paper(name, world, steps, ranks_per_worker=1, **options):
    """world: of workers."""
    ranks = run_ranks(
        _trace, world * ranks_per_worker, args=(name, steps, options, world if ranks_per_worker > 1 else 1)
    )
    traces = [_worker(ranks, steps, w, world, ranks_per_worker) for w in range(world)]
    exchange = reference.Exchange(
        [int(np.prod(s)) for s in SHAPES], world, world * ranks_per_worker, rotated=options.get("rotated", False)
    )
    o = {**MORE, **OPTIONS, **EXTRA[name], **options}
    o.update(b1=o["betas"][0], b2=o["betas"][1], wd=o["weight_decay"])
    method = reference.method_of(name, o)(exchange, o)
    wide = lambda x: {
        k: v if k == "numbers" else [a.astype(np.float64) for a in v] if isinstance(v, list) else v.astype(np.float64)
        for k, v in x.items()
    }
    for step in range(steps):
        before, after = ([wide(t[k]) for t in traces] for k in (step, step + 1))
        grads = [
            [
                sum(g.numpy().ravel().astype(np.float64) for g in same) / ranks_per_worker
                for same in zip(*(gradients(r * ranks_per_worker + k, step) for k in range(ranks_per_worker)))
            ]
            for r in range(world)
        ]
        want = method.step(before, grads, after)
        for r in range(world):
            for k in ("p", *(k for k in after[r] if k.startswith("exp_avg") or k == "momentum_accumulator")):
                for got, good in zip(after[r][k], want[r][k]):
                    np.testing.assert_allclose(
                        got,
                        good,
                        rtol=2e-5,
                        atol=3e-6 * np.abs(good).max() + 1e-9,
                        err_msg=f"{name} {k} after step {step + 1} on rank {r}",
                    )
            for k in ("worker", "server") if world > 1 else ():
                np.testing.assert_allclose(
                    after[r][k],
                    want[r][k],
                    rtol=2e-5,
                    atol=2e-5 * np.abs(want[r][k]).max(),
                    err_msg=f"{name} {k} error after step {step + 1} on rank {r}",
                )
            for k in ("means", "factors"):
                if k in want[r]["numbers"]:
                    np.testing.assert_allclose(after[r]["numbers"][k], want[r]["numbers"][k], rtol=1e-5)
    if world > 1:
        assert exchange.seen and exchange.undecided <= 1e-3 * exchange.seen
        last = [t[-1]["p"] for t in traces]
        if name != "ZeroOneAdam":  # whose ranks may be between two synchronisations
            assert all(np.array_equal(a, b) for other in last[1:] for a, b in zip(last[0], other))


@pytest.mark.parametrize("name", list(EXTRA))
def test_every_step_is_the_papers(name):
    check_against_paper(name, 2, 20)


LIVE = dict(ratios="live", max_update=0.5)


@pytest.mark.parametrize("world", [pytest.param(1, marks=full), 2])
def test_every_step_with_live_ratios_is_lambs(world):
    """Of the norms of the parameter and of the step that came; some elements are at the bound."""
    check_against_paper("OneBitLamb", world, 20, **LIVE)


@pytest.mark.parametrize(
    ("name", "world", "more"),
    [
        ("OneBitAdam", 2, {}),
        pytest.param("OneBitAdam", 4, {}, marks=full),
        pytest.param("OneBitLamb", 2, {}, marks=full),
        pytest.param("OneBitLamb", 2, LIVE, marks=full),
        pytest.param("OneBitLamb", 4, LIVE, marks=full),
        pytest.param("ZeroOneAdam", 2, {}, marks=full),
    ],
)
def test_every_step_with_rotated_momentum_is_the_papers(name, world, more):
    check_against_paper(name, world, 20, **more, rotated=True)


@pytest.mark.parametrize(
    ("name", "world", "more"),
    [
        ("OneBitAdam", 2, {"max_update": 0.7}),
        ("ZeroOneAdam", 2, {"max_update": 1e6}),
        pytest.param("OneBitAdam", 4, {"rotated": True, "max_update": 0.7}, marks=full),
        pytest.param("ZeroOneAdam", 4, {"rotated": True, "max_update": 1e6}, marks=full),
        pytest.param("ZeroOneAdam", 1, {"max_update": 1e6}, marks=full),
    ],
)
def test_every_step_with_momentum_that_travels_over_the_root(name, world, more):
    check_against_paper(name, world, 20, **more, preconditioned=True)


@full
def test_nodes_rotate_momentum():
    check_against_paper("OneBitAdam", 2, 12, 2, hierarchical=True, rotated=True)


@pytest.mark.parametrize(("name", "more"), [("OneBitAdam", {}), ("OneBitLamb", LIVE), ("ZeroOneAdam", {})])
def test_one_rank_rotates_nothing(name, more):
    """Nothing is sent, so nothing is rounded."""
    plain, rotated = (_trace_here(0, name, 12, {**more, "rotated": r}) for r in (False, True))
    for a, b in zip(plain, rotated):
        assert all(np.array_equal(x, y) for x, y in zip(a["p"], b["p"]))
        assert {**a["numbers"], "rotated": True} == b["numbers"]


def test_max_update_bounds_the_steps_that_a_rank_makes_by_itself():
    """An element that had hardly a gradient in the warm-up, and has one between two synchronisations."""
    from deepc.optim import ZeroOneAdam

    p = torch.nn.Parameter(torch.zeros(64))
    more = dict(lr=0.1, betas=(0.9, 0.99), eps=1e-12, max_update=1.0, hierarchical=False)
    opt = ZeroOneAdam([p], var_freeze_step=3, local_step_scaler=1, local_step_clipper=8, **more)
    for step in range(12):
        before = p.detach().clone()
        p.grad = torch.full((64,), 1e-6 if step < 3 else 1.0)
        opt.step()
        if step >= 3:
            assert (p - before).abs().max() <= 0.1 * 8 * (1 + 1e-5)  # a synchronisation makes all of them anew
            if opt.method.lrs[0]:
                assert (p - before).abs().max() <= 0.1 * (1 + 1e-5)
    assert opt.method.local_interval == 8


@pytest.mark.parametrize("name", ["OneBitAdam", pytest.param("OneBitLamb", marks=full)])
def test_nodes_are_the_papers_workers(name):
    """Two nodes of two ranks: the mean inside is exact, and each rank carries half of the elements across."""
    check_against_paper(name, 2, 12, 2, hierarchical=True)


@full
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", list(EXTRA))
def test_every_step_is_the_papers_for_200_steps(name, world):
    more = dict(var_freeze_step=60, var_update_scaler=4, local_step_scaler=20) if name == "ZeroOneAdam" else {}
    check_against_paper(name, world, 200, **(more or dict(freeze_step=40)))


# ---- the engine ------------------------------------------------------------------------------------------------------
def cfg(name, micro=4, **more):
    from tiny import config

    betas = {k: v for k, v in OPTIONS.items()}
    options = {**betas, **EXTRA[name], "cuda_aware": False, "comm_backend_name": "gloo", **more.pop("options", {})}
    return config(more.pop("stage", 0), micro=micro, optimizer={"type": name, "params": options}, **more)


def _plain(rank, world, name, steps, options):
    """A loop of torch's own, with the drop-in."""
    from tiny import make_batch, make_model

    model = make_model()
    opt = make(name, model.parameters(), **options)
    for step in range(steps):
        x, y = (t[rank * 4 : rank * 4 + 4] for t in make_batch(step, 8))
        opt.zero_grad()
        model(x, y).backward()
        opt.step()
    return {n: p.detach().clone() for n, p in model.named_parameters()}, opt.local_gradients, opt.sent_bytes


def _engine(rank, world, name, steps, options, more):
    from tiny import engine_training

    losses, _, weights, engine = engine_training(cfg(name, options=options, **more), steps, rank, world, grads=False)
    engine.destroy()
    return losses, weights


@pytest.mark.parametrize("name", ["OneBitAdam", *(pytest.param(n, marks=full) for n in list(EXTRA)[1:])])
def test_the_engine_and_a_plain_loop_give_equal_bits(name):
    options = dict(var_freeze_step=3, local_step_scaler=2) if name == "ZeroOneAdam" else dict(freeze_step=3)
    plain = run_ranks(_plain, 2, args=(name, 8, options))
    made = run_ranks(_engine, 2, args=(name, 8, options, {"clip": 0.0}))
    for (want, local, sent), (_, got) in zip(plain, made):
        assert local and sent > 0
        for n, w in want.items():
            assert torch.equal(w, got[n]), n


# ---- checkpoints -----------------------------------------------------------------------------------------------------
def _saved(rank, world, name, folder, options, more, steps, save_after, nodes=1):
    with on_nodes(rank, world, nodes):
        return _saved_here(rank, world, name, folder, options, more, steps, save_after)


def _saved_here(rank, world, name, folder, options, more, steps, save_after):
    """Trains up to step `steps`, with a checkpoint after step `save_after`; 0: from the checkpoint on. Returns weights,
    what this rank owes at the checkpoint and at the end, and its numbers."""
    import deepc
    from tiny import make_batch, make_model

    micro = 8 // world
    engine, *_ = deepc.initialize(model=make_model(), config=cfg(name, micro=micro, options=options, **more))
    method = engine.optimizer.base.method

    def owed():
        share = {"worker_error": 1 / method.exchange.workers, "server_error": 1}
        out = [torch.zeros(n) for n in engine.plan.layout.numels]
        for part in engine.optimizer.own_states():
            end = part.begin + part.values.numel()
            out[part.param][part.begin : end] += part.values * share.get(part.name.split(".")[0], 0)
        return out

    then = None
    if not save_after:
        engine.load_checkpoint(folder)
        then = owed()
    for step in range(engine.global_steps, steps):
        x, y = (t[rank * micro : (rank + 1) * micro] for t in make_batch(step % 3, 8))
        engine.backward(engine(x, y))
        engine.step()
        if step + 1 == save_after:
            engine.save_checkpoint(folder)
            then = owed()
    weights = {n: engine.full_fp32_param(p).clone() for n, p in engine.module.named_parameters()}
    out = weights, then, owed(), method.numbers()
    engine.destroy()
    return out


def _total(results):
    """What all ranks owe to the mean, by tensor."""
    return [sum(parts).double().numpy() for parts in zip(*(r[1] for r in results))]


LOCAL = dict(var_freeze_step=3, local_step_scaler=1, local_step_clipper=4)


@pytest.mark.parametrize(
    ("name", "options", "precision"),
    [
        ("OneBitAdam", {"freeze_step": 2}, "bf16"),
        pytest.param("OneBitAdam", {"freeze_step": 2, "rotated": True}, "bf16", marks=full),
        pytest.param("ZeroOneAdam", {**LOCAL, "rotated": True}, "bf16", marks=full),
        pytest.param("ZeroOneAdam", {**LOCAL, "preconditioned": True, "max_update": 1.0}, "fp32", marks=full),
        pytest.param("OneBitLamb", {"freeze_step": 3}, "fp32", marks=full),
        pytest.param("OneBitLamb", {"freeze_step": 3, "ratios": "live", "max_update": 1.0}, "fp32", marks=full),
        pytest.param("ZeroOneAdam", LOCAL, "bf16", marks=full),  # saved between two synchronisations
        pytest.param("ZeroOneAdam", {"var_freeze_step": 100, "var_update_scaler": 1}, "fp32", marks=full),
    ],
)
def test_a_checkpoint_has_the_errors(name, options, precision, tmp_path):
    more = {"precision": precision}
    whole = run_ranks(_saved, 2, args=(name, str(tmp_path), options, more, 9, 6))
    again = run_ranks(_saved, 2, args=(name, str(tmp_path), options, more, 9, 0))
    if "local_step_scaler" in options:
        assert any(whole[0][3]["lrs"]) or not torch.equal(whole[0][0]["tok.weight"], whole[1][0]["tok.weight"])
    for a, b in zip(whole, again):
        assert a[3] == b[3]
        assert all(torch.equal(w, b[0][n]) for n, w in a[0].items())
        for k in (1, 2):
            assert all(torch.equal(x, y) for x, y in zip(a[k], b[k]))
    owed = _total(whole)
    assert max(abs(x).max() for x in owed) > 0
    if name == "OneBitAdam":
        more_ranks = run_ranks(_saved, 4, args=(name, str(tmp_path), options, more, 8, 0))
        for x, y in zip(owed, _total(more_ranks)):
            np.testing.assert_allclose(y, x, rtol=1e-5, atol=1e-6 * abs(x).max())
        assert all(torch.equal(w, more_ranks[3][0][n]) for n, w in more_ranks[0][0].items())


def _from_rate_zero(rank, world, folder, goes_on):
    """0/1 Adam with steps of a learning rate of 0 after the freeze, of which step 6 is the last; `goes_on`: from a
    checkpoint after step 5. The weights at the end, and the momenta at the checkpoint."""
    import deepc
    from tiny import make_batch, make_model

    engine, *_ = deepc.initialize(model=make_model(), config=cfg("ZeroOneAdam", micro=4, options=LOCAL))
    if goes_on:
        engine.load_checkpoint(folder)
    momenta = []
    for step in range(engine.global_steps, 9):
        if step == 5:
            momenta = [item.states["exp_avg"].clone() for item in engine.optimizer.base.method.items]
            if not goes_on:
                engine.save_checkpoint(folder)
        engine.optimizer.param_groups[0]["lr"] = 0.0 if 3 <= step < 6 else 2e-3
        x, y = (t[rank * 4 : (rank + 1) * 4] for t in make_batch(step % 3, 8))
        engine.backward(engine(x, y))
        engine.step()
    weights = [engine.full_fp32_param(p).clone() for p in engine.module.parameters()]
    engine.destroy()
    return weights, momenta


def test_a_checkpoint_has_the_momentum_of_steps_with_a_rate_of_zero(tmp_path):
    """Nothing has moved, so that the ranks' momenta stay apart until they meet with a rate."""
    whole = run_ranks(_from_rate_zero, 2, args=(str(tmp_path), False))
    again = run_ranks(_from_rate_zero, 2, args=(str(tmp_path), True))
    assert not torch.equal(whole[0][1][0], whole[1][1][0])
    for a, b in zip(whole, again):
        assert all(torch.equal(x, y) for k in (0, 1) for x, y in zip(a[k], b[k]))


def test_whether_gradients_are_compressed_is_settled_at_the_first_step():
    from deepc.errors import ArgumentError

    p = torch.nn.Parameter(torch.linspace(-1, 1, 12))
    p.grad = torch.ones(12)
    opt = make("OneBitAdam", [{"params": [p], "non_freeze": True}])
    opt.step()
    opt.param_groups[0]["non_freeze"] = False
    with pytest.raises(ArgumentError, match=r"non_freeze of a param group .*shape \(12,\)\) is False now"):
        opt.step()


def test_a_checkpoint_of_other_ratios_after_the_freeze_is_refused():
    from deepc.errors import ArgumentError
    from deepc.optim import OneBitLamb

    p = torch.nn.Parameter(torch.linspace(-1, 1, 12))
    saved = OneBitLamb([p], freeze_step=1, max_update=1.0, ratios="live")
    for _ in range(2):
        p.grad = torch.ones(12)
        saved.step()
    again = OneBitLamb([p], freeze_step=1, max_update=1.0, ratios="live")
    again.load_state_dict(saved.state_dict())
    assert again.method.numbers() == saved.method.numbers()
    paper = OneBitLamb([p], freeze_step=1, max_update=1.0)
    paper.step()
    paper.step()
    with pytest.raises(ArgumentError, match="saved after the freeze with ratios='frozen'"):
        OneBitLamb([p], freeze_step=1, max_update=1.0, ratios="live").load_state_dict(paper.state_dict())


def _framed(rank, world, option):
    """state_dicts of the warm-up and of after the freeze, with `option` and without, loaded into either. What was
    refused."""
    from deepc.errors import ArgumentError
    from deepc.optim import OneBitAdam

    def train(p, opt, begin, end):
        for step in range(begin, end):
            p.grad = torch.randn(3000, generator=torch.Generator().manual_seed(10 * step + rank))
            opt.step()

    def fresh(values, on):
        p = torch.nn.Parameter(values.clone())
        return p, OneBitAdam([p], lr=1e-2, freeze_step=2, hierarchical=False, max_update=9.0, **{option: on})

    refused = []
    for on in (False, True):
        p, opt = fresh(torch.linspace(-1, 1, 3000), on)
        for end in (2, 4):
            train(p, opt, opt.method.steps if opt.method else 0, end)
            saved, at = copy.deepcopy(opt.state_dict()), p.detach().clone()
            for other in (False, True):
                q, again = fresh(at, other)
                try:
                    again.load_state_dict(saved)
                except ArgumentError as exc:
                    refused.append((on, end, other, str(exc)))
                    continue
                if other == on and end == 4:
                    train(q, again, 4, 6)
                    went_on = q
        train(p, opt, 4, 6)
        assert torch.equal(p, went_on) and not torch.equal(p, at)
    return refused


@pytest.mark.parametrize("option", ["rotated", "preconditioned"])
def test_a_checkpoint_goes_on_in_the_same_frame_only(option):
    for refused in run_ranks(_framed, 2, args=(option,)):
        assert [r[:3] for r in refused] == [(False, 4, True), (True, 4, False)]
        assert f"saved with {option}=False" in refused[0][3] and f"Load it with {option}=True" in refused[1][3]


def test_a_checkpoint_of_nodes_goes_on_and_loads_into_other_workers(tmp_path):
    options, more = {"freeze_step": 2, "hierarchical": True}, {"precision": "bf16"}
    args = ("OneBitAdam", str(tmp_path), options, more)
    whole = run_ranks(_saved, 4, args=(*args, 8, 5, 2))
    for a, b in zip(whole, run_ranks(_saved, 4, args=(*args, 8, 0, 2))):
        assert all(torch.equal(w, b[0][n]) for n, w in a[0].items())
        assert all(torch.equal(x, y) for k in (1, 2) for x, y in zip(a[k], b[k]))
    owed = _total(whole)
    assert max(abs(x).max() for x in owed) > 0
    for world, own in ((2, True), (2, False)):  # a node is one worker; two ranks are two
        others = run_ranks(_saved, world, args=(*args[:2], {**options, "hierarchical": own}, more, 6, 0))
        for x, y in zip(owed, _total(others)):
            np.testing.assert_allclose(y, x, rtol=1e-5, atol=1e-6 * abs(x).max())


def _overflow(rank, world):
    """fp16: rank 0's loss overflows after the freeze. What the step left as it was, and what the engine said."""
    import deepc
    from tiny import make_batch, make_model

    fp16 = {"enabled": True, "initial_scale_power": 8}
    name, options = "OneBitAdam", {"freeze_step": 2}
    engine, *_ = deepc.initialize(model=make_model(), config={**cfg(name, options=options), "fp16": fp16})
    method, said = engine.optimizer.base.method, []

    def everything():
        tensors = [engine.full_fp32_param(p) for p in engine.module.parameters()]
        tensors += [t for i in method.items for t in i.states.values()] + list(method.errors().values())
        return [t.clone() for t in tensors], method.steps

    for step in range(6):
        before = everything()
        loss = engine(*(t[rank * 4 : rank * 4 + 4] for t in make_batch(step, 8)))
        engine.backward(loss * (1e30 if step == 4 and rank == 0 else 1.0))
        result = engine.step()
        said.append((result.applied, result.reason))
        after = everything()
        same = before[1] == after[1] and all(torch.equal(a, b) for a, b in zip(before[0], after[0]))
        assert same == (step == 4) and len(before[0]) == len(after[0]) or step == 2  # the errors are new after step 3
    norm = engine.get_global_grad_norm()
    engine.destroy()
    return said, norm, [t.clone() for t in after[0][: len(list(make_model().parameters()))]]


def test_a_rank_that_overflows_skips_the_step_on_all():
    one, two = run_ranks(_overflow, 2)
    assert [a for a, _ in one[0]] == [a for a, _ in two[0]] == [True, True, True, True, False, True]
    assert "loss scale 256 -> " in one[0][4][1] and "rank 0" in two[0][4][1]
    assert one[1] == two[1] and one[1] > 0
    assert all(torch.equal(a, b) for a, b in zip(one[2], two[2]))


# ---- the drop-in's own ----------------------------------------------------------------------------------------------
def _loop(rank, world, rotated):
    """A mask, a frozen parameter, one without a gradient on a rank, a group that is not compressed, 16 bits, and
    state_dicts."""
    from deepc.optim import OneBitAdam
    from deepc.optim.onebit.dropin import folded

    def fresh():
        torch.manual_seed(0)
        shapes = [(50, 60), (7,), (30,), (2000,)]
        ps = [torch.nn.Parameter(torch.randn(s, dtype=torch.bfloat16 if s == (2000,) else None)) for s in shapes]
        ps[1].requires_grad_(False)
        mask = torch.ones(50, 1)
        mask[25:] = 0
        groups = [
            {"params": [ps[0]], "exp_avg_mask": mask},
            {"params": ps[1:3]},
            {"params": [ps[3]], "non_freeze": True},
        ]
        more = dict(freeze_step=3, hierarchical=False, rotated=rotated)
        return ps, OneBitAdam(groups, lr=1e-2, betas=(0.9, 0.9), **more)

    def train(ps, opt, begin, end):
        for step in range(begin, end):
            g = torch.Generator().manual_seed(10 * step + rank)
            for p in ps:
                p.grad = torch.randn(p.shape, generator=g).to(p.dtype) if p.requires_grad else None
            ps[0].grad[25:] = 0
            if rank == 1:
                ps[2].grad = None
            opt.step()

    ps, opt = fresh()
    before = ps[0][25:].clone(), ps[1].clone()
    train(ps, opt, 0, 6)
    moved = (ps[0][:25] - torch.zeros(1)).detach().clone()
    assert torch.equal(ps[0][25:], before[0]) and torch.equal(ps[1], before[1])
    assert opt.local_gradients and "1 bit since step 4" in opt.phase
    state = {**opt.state_dict()}
    state["state"] = {i: {k: v.clone() for k, v in s.items()} for i, s in state["state"].items()}
    at = [p.detach().clone() for p in ps]
    train(ps, opt, 6, 9)
    again, opt2 = fresh()
    for p, v in zip(again, at):
        p.data.copy_(v)
    opt2.load_state_dict(state)
    train(again, opt2, 6, 9)
    assert all(torch.equal(a, b) for a, b in zip(ps, again))
    import torch.distributed as dist

    states = [None] * world
    dist.all_gather_object(states, state)
    _, opt3 = fresh()
    opt3.load_state_dict(folded(states))
    worker = opt3.method.errors()["worker"]
    owed = sum(s["onebit"]["errors"]["worker"] for s in states) / world
    owed += torch.cat([s["onebit"]["errors"]["server"] for s in states])
    assert torch.allclose(worker, owed) and worker.abs().max() > 0
    refused = ""
    try:
        opt3.load_state_dict(states[1 - rank])
    except Exception as exc:
        refused = str(exc)
    return [p.detach().clone() for p in ps], moved, refused, opt.state[ps[3]]["exp_avg_sq"].clone()


@pytest.mark.parametrize("rotated", [False, pytest.param(True, marks=full)])
def test_masks_frozen_and_uncompressed_parameters_and_state_dicts(rotated):
    one, two = run_ranks(_loop, 2, args=(rotated,))
    assert all(torch.equal(a, b) for a, b in zip(one[0], two[0]))
    assert "folded" in one[2] and "rank 1 of 2" in one[2]
    assert torch.equal(one[3], two[3])


@pytest.mark.parametrize("how", ["view", "load_module_state_dict", "load_checkpoint"])
def test_weights_that_are_set_between_two_exchanges_stay(how, tmp_path):
    """Ranks of 0/1 Adam that step by themselves go on from where they were equal last: from these."""
    import deepc

    model = torch.nn.Linear(64, 8, bias=False)
    options = dict(var_freeze_step=1, local_step_scaler=1, local_step_clipper=4)
    optimizer = deepc.optim.ZeroOneAdam(model.parameters(), lr=1e-8, **options)
    engine, *_ = deepc.initialize(model=model, optimizer=optimizer, config=tiny.config(0, micro=8, optimizer=None))
    want = torch.full_like(model.weight, 5.0)

    def steps(*numbers):
        for n in numbers:
            engine.backward(engine(torch.randn(8, 64, generator=torch.Generator().manual_seed(n))).square().mean())
            assert engine.step().applied

    steps(1, 2, 3, 4)
    if how == "load_checkpoint":
        deepc.view(model.weight).fp32 = want
        engine.save_checkpoint(tmp_path)
        deepc.view(model.weight).fp32 = torch.zeros_like(want)
    steps(5, 6)
    assert engine.optimizer.across.method.lrs[0] > 0  # the next exchange is at step 8
    if how == "view":
        deepc.view(model.weight).fp32 = want
    elif how == "load_module_state_dict":
        engine.load_module_state_dict({"weight": want})
    else:
        engine.load_checkpoint(tmp_path, load_module_only=True)
    steps(7, 8, 9)
    torch.testing.assert_close(engine.full_fp32_param(model.weight), want, rtol=0, atol=1e-2)
    engine.destroy()


def _paused(rank, world):
    """What a rank owes of each parameter, [before, after] steps that leave it alone: it is frozen, or of 0/1 Adam the
    learning rate of its group is 0."""
    out = {}
    for name, rotated in [(n, r) for n in EXTRA for r in (False, True) if n == "OneBitAdam" or not r]:
        ps = [torch.nn.Parameter(torch.randn(s, generator=torch.Generator().manual_seed(0))) for s in SHAPES]
        opt = make(name, [{"params": [p]} for p in ps], rotated=rotated)

        def train(begin, end, ps=ps, opt=opt):
            for step in range(begin, end):
                for p, g in zip(ps, gradients(rank, step)):
                    p.grad = g if p.requires_grad else None
                opt.step()

        train(0, 11)
        cases = {"frozen": [0], **({"lr": [2], "all": [0, 1, 2]} if name == "ZeroOneAdam" else {})}
        for i, (how, paused) in enumerate(cases.items()):
            begin = 11 + 10 * i
            if name == "ZeroOneAdam":  # until the ranks have just met
                while begin == 11 + 10 * i or any(opt.method.lrs):
                    train(begin, begin + 1)
                    begin += 1
            for k in paused:
                ps[k].requires_grad_(how != "frozen")
                opt.param_groups[k]["lr"] *= how == "frozen"
            before, at = spread(opt.method), [p.detach().clone() for p in ps]
            train(begin, begin + 5)
            after, places = spread(opt.method), opt.method.places
            assert all(torch.equal(ps[k], at[k]) for k in paused)
            for k in paused:
                for kind in before:
                    out[name, rotated, how, k, kind] = [places.of(b, k).clone() for b in (before[kind], after[kind])]
            if 2 not in paused:
                assert not torch.equal(ps[2], at[2]) and not torch.equal(before["worker"], after["worker"])
            for k in paused:
                ps[k].requires_grad_(True)
                opt.param_groups[k]["lr"] = OPTIONS["lr"]
        train(40, 44)
        assert all(bool(torch.isfinite(p).all()) for p in ps)
        out[name, rotated] = [p.detach().clone() for p in ps] if name != "ZeroOneAdam" else []
    return out


def test_steps_that_leave_a_parameter_alone_leave_what_is_owed_of_it():
    one, two = run_ranks(_paused, 2)
    for key, found in one.items():
        if len(key) == 2:
            assert all(torch.equal(a, b) for a, b in zip(found, two[key])), key
            continue
        for before, after in (found, two[key]):
            assert torch.equal(before, after), key
        assert any(float(before.abs().max()) for before, _ in (found, two[key])), key


def _under_ddp(rank, world):
    import contextlib

    from deepc.optim import OneBitAdam
    from tiny import make_batch, make_model
    from torch.nn.parallel import DistributedDataParallel

    ddp, out = DistributedDataParallel(make_model()), []
    opt = OneBitAdam(ddp.parameters(), freeze_step=3, average_gradients=False)
    for step in range(7):
        with ddp.no_sync() if opt.local_gradients else contextlib.nullcontext():
            ddp(*(t[rank * 4 : rank * 4 + 4] for t in make_batch(step, 8))).backward()
        out.append([p.grad.clone() for p in ddp.parameters()])
        opt.step()
        opt.zero_grad()
    return out, [p.detach().clone() for p in ddp.parameters()]


@full
def test_under_ddp_gradients_are_local_after_the_freeze():
    one, two = run_ranks(_under_ddp, 2)
    for step, (a, b) in enumerate(zip(one[0], two[0])):
        assert all(torch.equal(x, y) for x, y in zip(a, b)) == (step < 3)
    assert all(torch.equal(a, b) for a, b in zip(one[1], two[1]))


def test_auto_freezes_when_the_variance_is_stable(caplog):
    """Gradients whose size falls for a while and then stays."""
    from deepc.optim import OneBitAdam

    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(5000))
    opt = OneBitAdam([p], freeze_step="auto", betas=(0.9, 0.95))
    with caplog.at_level("INFO", logger="deepc"):
        for step in range(400):
            p.grad = torch.randn(5000) * max(0.1, 1.0 - step / 100)
            opt.step()
            if opt.local_gradients:
                break
    # v follows with a lag of 1 / (1 - beta2) = 20 steps; it has settled when g has been at 0.1 for a few of them
    assert 120 < opt.method.frozen_at < 300
    assert f"frozen after step {opt.method.frozen_at} (freeze_step auto" in caplog.text
    saved = opt.state_dict()
    other = OneBitAdam([p], freeze_step="auto", betas=(0.9, 0.95))
    other.load_state_dict(saved)
    assert other.local_gradients and other.method.freeze.norms == opt.method.freeze.norms
    from deepc.config import Config

    raw = {**cfg("OneBitAdam", options={"freeze_step": "auto"})}
    assert Config.load(raw, world_size=1).optimizer.params["freeze_step"] == "auto"


def _refused(rank, world, raw):
    import deepc
    from deepc.errors import DeepcError
    from tiny import make_model

    try:
        deepc.initialize(model=make_model(), config=raw)
    except DeepcError as exc:
        return type(exc).__name__, str(exc)
    return "", ""


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"zero_optimization": {"stage": 3}}, "OneBitAdam|stage 3|Use zero_optimization.stage 1"),
        ({"deepc": {"deterministic": "layout"}}, "deepc.deterministic does not exist"),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}, "grad_accum_dtype bf16"),
        ({"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 0}}}, "freeze_step=0"),
        ({"optimizer": {"type": "OneBitAdam", "params": {"max_update": 0}}}, "max_update=0"),
        ({"optimizer": {"type": "OneBitAdam", "params": {"rotated": "yes"}}}, 'rotated = "yes"|true or false'),
        ({"optimizer": {"type": "ZeroOneAdam", "params": {"preconditioned": 1}}}, "preconditioned = 1|true or false"),
        ({"optimizer": {"type": "OneBitAdam", "params": {"preconditioned": True}}}, "needs max_update|Set it"),
        ({"optimizer": {"type": "OneBitLamb", "params": {"frozen_step": 1}}}, "frozen_step|freeze_step"),
        ({"optimizer": {"type": "OneBitLamb", "params": {"ratios": "life"}}}, "ratios='life'|frozen, live"),
        ({"optimizer": {"type": "OneBitLamb", "params": {"ratios": "live"}}}, "needs max_update|Set it"),
        ({"optimizer": {"type": "ZeroOneAdam", "params": {"amsgrad": True}}}, "amsgrad=True"),
    ],
)
def test_what_does_not_exist_says_so(more, says):
    kind, text = _refused(0, 1, {**cfg("OneBitAdam"), **more})
    assert kind in ("ConfigError", "UnsupportedError", "ArgumentError")
    for part in says.split("|"):
        assert part in text, text


@pytest.mark.parametrize("name", list(EXTRA))
def test_a_copy_is_refused_and_a_state_dict_makes_one(name):
    import pickle

    from deepc.errors import UnsupportedError

    p = torch.nn.Parameter(torch.linspace(-1, 1, 12))
    opt = make(name, [p])
    for _ in range(3):
        (p * 2).sin().sum().backward()
        opt.step()
        for copied in (copy.deepcopy, copy.copy, pickle.dumps):
            with pytest.raises(UnsupportedError, match=f"{name} can't be copied or pickled.*load_state_dict"):
                copied(opt)
    twin = torch.nn.Parameter(p.detach().clone())
    other = make(name, [twin])
    other.load_state_dict(opt.state_dict())
    twin.grad = p.grad
    opt.step(), other.step()
    assert torch.equal(twin, p)


def test_loading_leaves_the_state_dict_as_it_was():
    """A mask is of the optimizer that has it: another one that loads the same state_dict has none."""
    p, q = (torch.nn.Parameter(torch.linspace(-1, 1, 4)) for _ in range(2))
    opt = make("OneBitAdam", [{"params": [p], "exp_avg_mask": torch.tensor([1.0, 0.0, 1.0, 1.0])}])
    p.grad = torch.ones(4)
    opt.step()
    saved = opt.state_dict()
    for one in (opt, other := make("OneBitAdam", [q])):
        one.load_state_dict(saved)
    assert "exp_avg_mask" in opt.param_groups[0] and "exp_avg_mask" not in other.param_groups[0]
    assert "exp_avg_mask" not in saved["param_groups"][0]


@pytest.mark.parametrize("name", list(EXTRA))
def test_memory_of_another_size_or_order_is_refused(name):
    """The kernels see addresses alone. A state_dict that does not fit leaves what there is."""
    from deepc.errors import ArgumentError

    p, q, twin = (torch.nn.Parameter(torch.linspace(-1, 1, n).view(2, -1)) for n in (8, 6, 8))
    opt, other, same = make(name, [p]), make(name, [q]), make(name, [twin])
    for one in (p, q, twin):
        one.grad = torch.ones_like(one)
    opt.step(), other.step(), same.step()
    with pytest.raises(ArgumentError, match=r"'exp_avg' of a parameter of shape \(2, 4\) has 6 elements"):
        opt.load_state_dict(other.state_dict())
    with pytest.raises(ArgumentError, match=r"no 'exp_avg_sq' of a parameter of shape \(2, 4\)"):
        opt.load_state_dict({**opt.state_dict(), "state": {0: {"exp_avg": torch.ones(8)}}})
    held = p.data
    for data, said in (
        (torch.ones(50, 70), r"shape \(50, 70\) has 8 elements"),
        (held.t().contiguous().t(), "not contiguous"),
    ):
        p.grad, p.data = None, data
        with pytest.raises(ArgumentError, match=said):
            opt.step()
        p.data = held
    p.grad = twin.grad.clone()
    opt.step(), same.step()
    assert torch.equal(p, twin)


def test_parameters_on_other_devices_are_refused():
    from deepc.errors import ArgumentError, UnsupportedError

    here, there = (torch.nn.Parameter(torch.ones(4, device=d)) for d in ("cpu", "meta"))
    with pytest.raises(ArgumentError, match="one parameter is on cpu, another on meta"):
        make("OneBitAdam", [here, there]).step()
    with pytest.raises(UnsupportedError, match="the parameters are on meta"):
        make("OneBitAdam", [there]).step()


@pytest.mark.parametrize("name", list(EXTRA))
def test_an_empty_parameter_changes_nothing(name):
    found = []
    for more in ([], [torch.nn.Parameter(torch.empty(0, 3))]):
        p = torch.nn.Parameter(torch.linspace(-1, 1, 12).view(4, 3))
        opt = make(name, [p, *more])
        for i in range(12):
            (p * (i + 1.0)).sin().sum().backward()
            for empty in more:
                empty.grad = torch.empty(0, 3)
            opt.step()
            opt.zero_grad()
        found.append(p.detach().clone())
    assert torch.equal(*found)


def test_deepspeeds_names():
    import subprocess
    import sys

    program = """
import torch
import deepc.compat.deepspeed
from deepspeed.runtime.fp16.onebit.adam import OnebitAdam
from deepspeed.runtime.fp16.onebit.lamb import OnebitLamb
from deepspeed.runtime.fp16.onebit.zoadam import ZeroOneAdam
import deepspeed
model = torch.nn.Linear(10, 10)
mask = torch.zeros(10, 10)
mask[0] = 1
groups = [{"params": [model.weight], "exp_avg_mask": mask.flatten()}, {"params": [model.bias]}]
config = {"train_batch_size": 2, "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 2,
    "cuda_aware": False, "comm_backend_name": "nccl"}}}
engine, optimizer, _, _ = deepspeed.initialize(config=config, model=model, model_parameters=groups)
for _ in range(4):
    engine.backward(engine(torch.ones(2, 10)).square().sum())
    engine.step()
assert isinstance(optimizer.optimizer, OnebitAdam) and optimizer.optimizer.adam_freeze_key is True
assert engine.full_optimizer_state(model.weight, "exp_avg")[1:].abs().max() == 0
assert [e.numel() for e in (*optimizer.optimizer.worker_errors, *optimizer.optimizer.server_errors)] == []  # one rank
copied = OnebitLamb.__new__(OnebitLamb)
copied.lamb_coeffs = [0.5, 1.5]
told = copied.get_lamb_coeffs()
del copied.lamb_coeffs[:]
assert told == [0.5, 1.5]
model = torch.nn.Linear(4, 4)
model.empty = torch.nn.Parameter(torch.empty(0, 3))
fp16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": 1, "hysteresis": 1}
said = []
for stage in (0, 1):
    config = {"train_batch_size": 2, "fp16": fp16, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "OneBitLamb", "params": {"freeze_step": 2}}}
    engine, optimizer, _, _ = deepspeed.initialize(config=config, model=model, model_parameters=model.parameters())
    assert [p.numel() for g in optimizer.optimizer.param_groups for p in g["params"]] == [16, 4]
    try:
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 4).half()).float().square().sum() * 1e30)
            engine.step()
        said.append((engine.loss_scale, engine.skipped_steps))
    except Exception as exc:
        said.append(type(exc).__name__)
    assert len(optimizer.optimizer.get_lamb_coeffs()) == 0
assert said == [(1.0, 3), "LossScaleError"], said
for cls, key in ((OnebitAdam, "adam_freeze_key"), (OnebitLamb, "lamb_freeze_key"), (ZeroOneAdam, "freeze_key")):
    made = cls(torch.nn.Linear(2, 2).parameters(), engine, 1e-3)
    assert made.deepspeed is engine and getattr(made, key) is False
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _reported(rank, world, folder):
    import json
    from pathlib import Path

    import deepc
    from tiny import make_batch, make_model

    raw = {**cfg("OneBitAdam", options={"freeze_step": 2}), "deepc": {"run_dir": folder}}
    engine, *_ = deepc.initialize(model=make_model(), config=raw)
    n = sum(p.numel() for p in engine.module.parameters())
    for step in range(5):
        engine.backward(engine(*(t[rank * 4 : rank * 4 + 4] for t in make_batch(step, 8))))
        engine.step()
    engine.destroy()
    if rank:
        return None
    rows = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return n, [r["exchange"] for r in rows if "exchange" in r]


def test_metrics_and_the_report_have_what_was_exchanged(tmp_path):
    from deepc.observe.report.digest import findings
    from deepc.observe.report.folder import read_runs

    n, rows = run_ranks(_reported, 2, args=(str(tmp_path / "run"),))[0]
    assert [r["bytes"] == r["uncompressed_bytes"] == 4 * n for r in rows] == [True, True, False, False, False]
    assert 0 < rows[-1]["bytes"] < 4 * n / 10 and rows[-1]["frozen_after"] == 2
    said = [f["text"] for f in findings(read_runs(tmp_path / "run")[0])]
    assert any("1-bit optimizer" in t and "frozen after step 2" in t for t in said)


def _accumulated(rank, world, name, gas, precision):
    from tiny import engine_training

    options = {**EXTRA[name], "max_update": 1.0}
    more = cfg(name, micro=4 // gas, gas=gas, precision=precision, clip=0.5, options=options)
    losses, _, weights, engine = engine_training(more, 12, rank, world, grads=False, batches=1)
    try:
        engine.offload_states("/nonexistent")
        refused = ""
    except Exception as exc:
        refused = str(exc)
    norm = engine.get_global_grad_norm()
    engine.destroy()
    return losses, weights, norm, refused


@full
@pytest.mark.parametrize(
    ("name", "precision"), [("OneBitAdam", "bf16"), ("OneBitLamb", "fp32"), ("ZeroOneAdam", "fp32")]
)
def test_accumulation_and_clipping(name, precision):
    once, twice = (run_ranks(_accumulated, 2, args=(name, gas, precision)) for gas in (1, 2))
    for runs in (once, twice):
        assert "does not exist" in runs[0][3] and runs[0][2] == runs[1][2]
        if name != "ZeroOneAdam":
            assert all(torch.equal(w, runs[1][1][n]) for n, w in runs[0][1].items())
        assert runs[0][0][-1] < runs[0][0][0]
    np.testing.assert_allclose(twice[0][0], once[0][0], rtol=2e-2)
