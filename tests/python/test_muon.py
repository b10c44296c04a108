"""Muon: torch.optim.Muon's numbers on matrices, AdamW's on the rest, in an engine at stage 0, and what is refused."""

from __future__ import annotations

import copy

import deepc
import pytest
import tiny
import torch
from deepc.config import Config
from deepc.errors import ArgumentError, ConfigError
from deepc.optim.kinds.muon import orthogonalize
from ranks import run_ranks

SHAPES = [(16, 40), (40, 16), (24, 24)]


def matrices(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s, generator=g).to(dtype)) for s in SHAPES]


def grads(params, step):
    g = torch.Generator().manual_seed(100 + step)
    return [torch.randn(p.shape, generator=g).to(p.dtype) for p in params]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon is of torch 2.9")
@pytest.mark.parametrize("options", [{}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0}])
def test_equals_torch_for_a_hundred_steps(options):
    mine, theirs = matrices(), matrices()
    opt, ref = deepc.optim.Muon(mine, lr=0.02, **options), torch.optim.Muon(theirs, lr=0.02, **options)
    for step in range(100):
        for a, b, g in zip(mine, theirs, grads(mine, step)):
            a.grad, b.grad = g, g.clone()
        opt.step()
        ref.step()
        if step == 50:
            opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    for a, b in zip(mine, theirs):
        # The products are rounded to bf16 and summed in an order that may differ.
        torch.testing.assert_close(a, b, rtol=0, atol=2e-2 * float(b.detach().abs().max()))
        torch.testing.assert_close(
            opt.state[a]["momentum_buffer"], ref.state[b]["momentum_buffer"], rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_singular_values_come_near_one(dtype):
    for p in matrices(dtype):
        u, s, v = torch.linalg.svd(p.detach(), full_matrices=False)
        found = orthogonalize(p.detach(), dtype=dtype)
        assert found.shape == p.shape
        values = torch.linalg.svdvals(found)
        assert float(values.min()) > 0.3 and float(values.max()) < 1.4
        # The iteration keeps the singular vectors: in their basis the result is diagonal.
        inside = u.T @ found @ v.T
        off = inside - torch.diag(torch.diagonal(inside))
        assert float(off.abs().max()) < 1e-4


def test_what_is_no_matrix_is_stepped_by_adamw():
    table, matrix, bias = (torch.nn.Parameter(torch.ones(s)) for s in ((8, 4), (4, 4), (4,)))
    table.use_muon = False
    twin = [torch.nn.Parameter(p.detach().clone()) for p in (table, bias)]
    opt = deepc.optim.Muon([table, matrix, bias], lr=0.1, adam_lr=0.01, weight_decay=0.2)
    ref = torch.optim.AdamW(twin, lr=0.01, weight_decay=0.2)
    assert [(g["use_muon"], len(g["params"])) for g in opt.param_groups] == [(True, 1), (False, 2)]
    for step in range(3):
        for p, g in zip((table, matrix, bias), grads((table, matrix, bias), step)):
            p.grad = g
        twin[0].grad, twin[1].grad = table.grad.clone(), bias.grad.clone()
        opt.step()
        ref.step()
    torch.testing.assert_close(table, twin[0])
    torch.testing.assert_close(bias, twin[1])
    assert "momentum_buffer" in opt.state[matrix] and "exp_avg" in opt.state[table]


def test_what_is_refused():
    p = [torch.nn.Parameter(torch.zeros(2, 2))]
    for options, text in (
        ({"lr": -1.0}, "lr must"),
        ({"momentum": 1.0}, "momentum must"),
        ({"ns_steps": 100}, "ns_steps must"),
        ({"ns_coefficients": (1.0, 2.0)}, "three ns_coefficients"),
        ({"adjust_lr_fn": "x"}, "adjust_lr_fn must"),
        ({"ns_dtype": "float16"}, "ns_dtype must"),
    ):
        with pytest.raises(ArgumentError, match=text):
            deepc.optim.Muon(p, **options)
    with pytest.raises(ArgumentError, match="has not 2 dimensions"):
        deepc.optim.Muon([{"params": [torch.nn.Parameter(torch.zeros(3))], "use_muon": True}])
    p[0].grad = torch.zeros(2, 2).to_sparse()
    with pytest.raises(ArgumentError, match="dense"):
        deepc.optim.Muon(p).step()
    raw = {"train_batch_size": 1, "optimizer": {"type": "muon"}, "zero_optimization": {"stage": 1}}
    with pytest.raises(ConfigError, match="Muon.*does not work element by element.*stage 0"):
        Config.load(raw, world_size=1)


def _train(rank, world):
    optimizer = {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 3e-3, "ns_dtype": "float32"}}
    cfg = tiny.config(0, micro=8 // world, optimizer=optimizer)
    losses, _, weights, engine = tiny.engine_training(cfg, 6, rank, world, batches=1)
    assert len(engine.optimizer.param_groups) == 2
    engine.destroy()
    return losses, {n: w.clone() for n, w in weights.items()}


def test_an_engine_trains_with_it_at_stage_0():
    model = tiny.make_model()
    opt = deepc.optim.Muon(model.parameters(), lr=0.02, adam_lr=3e-3, ns_dtype="float32")
    plain = []
    for _ in range(6):
        loss = model(*tiny.make_batch(0, 8))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        plain.append(loss.item())
    (losses, weights), (other, same) = run_ranks(_train, 2)
    assert losses == other and all(torch.equal(w, same[n]) for n, w in weights.items())
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain), rtol=1e-3, atol=0)
    assert losses[-1] < losses[0]
