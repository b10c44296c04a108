"""Adafactor: torch.optim.Adafactor's numbers, in an engine at every stage with equal bits, and what it refuses."""

from __future__ import annotations

import copy

import deepc
import pytest
import tiny
import torch
from deepc.config import Config
from deepc.errors import ArgumentError, ConfigError, UnsupportedError
from deepc.optim.factory import state_bytes_of
from ranks import run_ranks

SHAPES = [(), (7,), (5000,), (33, 65), (3, 1500), (4, 3, 5, 3), (1, 1)]


def parameters(dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def both(mine, opt, theirs, ref, steps, first=0):
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for a, b in zip(mine, theirs):
            g = torch.randn(a.shape, generator=generator) * 10.0 ** (step % 5 - 3)
            a.grad, b.grad = g.to(a.dtype), g.to(b.dtype)
        opt.step()
        ref.step()


def close(mine, theirs, rtol=1e-5):
    for a, b in zip(mine, theirs):
        torch.testing.assert_close(a.double(), b.double(), rtol=rtol, atol=rtol * float(b.detach().abs().max()))


@pytest.mark.parametrize("steps", [50, pytest.param(1000, marks=pytest.mark.full)])
@pytest.mark.parametrize("options", [{}, dict(lr=0.3, weight_decay=0.05, d=1.5, eps=(1e-6, 1e-2), maximize=True)])
def test_the_numbers_are_torchs(options, steps):
    mine, theirs = parameters(), parameters(torch.float64)
    eps = {"eps": (torch.finfo(torch.float32).eps, 1e-3), **options}  # None is that of the parameters' dtype
    opt, ref = deepc.optim.Adafactor(mine, **options), torch.optim.Adafactor(theirs, **eps)
    both(mine, opt, theirs, ref, steps)
    close(mine, theirs)
    for a, b in zip(mine, theirs):
        assert opt.state[a].keys() == ref.state[b].keys()
        for name, value in ref.state[b].items():
            assert opt.state[a][name].shape == value.shape, name
            torch.testing.assert_close(opt.state[a][name].double(), value.double(), rtol=1e-5, atol=0)


def test_float64_and_16_bit_and_strided_parameters():
    mine, theirs = parameters(torch.float64), parameters(torch.float64)
    both(mine, deepc.optim.Adafactor(mine), theirs, torch.optim.Adafactor(theirs), 3)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs))
    low, wide = (
        parameters(torch.bfloat16),
        [torch.nn.Parameter(p.detach().double()) for p in parameters(torch.bfloat16)],
    )
    opt = deepc.optim.Adafactor(low, lr=0.1)
    both(low, opt, wide, torch.optim.Adafactor(wide, lr=0.1, eps=(torch.finfo(torch.bfloat16).eps, 1e-3)), 2)
    close(low, wide, rtol=2e-2)
    assert opt.state[low[-1]]["row_var"].dtype == torch.float32
    plain, turned = parameters(shapes=[(33, 65)]), parameters(shapes=[(33, 65)])
    turned[0].data = turned[0].data.t().contiguous().t()
    both(plain, deepc.optim.Adafactor(plain), turned, deepc.optim.Adafactor(turned), 2)
    assert torch.equal(plain[0], turned[0]) and not turned[0].is_contiguous()


def test_state_dict_goes_on_and_takes_torchs():
    mine, twin, theirs = parameters(), parameters(), parameters()
    opt, other = deepc.optim.Adafactor(mine, lr=0.1), deepc.optim.Adafactor(twin, lr=0.1)
    ref = torch.optim.Adafactor(theirs, lr=0.1)
    both(mine, opt, theirs, ref, 2)
    for source, weights in ((ref, theirs), (opt, mine)):
        other.load_state_dict(copy.deepcopy(source.state_dict()))
        with torch.no_grad():
            for a, b in zip(twin, weights):
                a.copy_(b)
    both(mine, opt, twin, other, 2, first=2)
    assert all(torch.equal(a, b) for a, b in zip(mine, twin))


def test_what_is_refused():
    p = [torch.nn.Parameter(torch.zeros(2))]
    for options, text in (
        ({"beta2_decay": 0.1}, "beta2_decay must"),
        ({"lr": -1.0}, "lr must"),
        ({"d": 0.5}, "d must"),
        ({"eps": 1e-8}, "eps must be two numbers"),
        ({"eps": (None, float("nan"))}, r"eps\[1\] must"),
    ):
        with pytest.raises(ArgumentError, match=text):
            deepc.optim.Adafactor(p, **options)
    raw = {"train_batch_size": 1, "optimizer": {"type": "AdaFactor", "params": {"beta2_deca": -0.5}}}
    with pytest.raises(ConfigError, match="Adafactor has no such argument. Did you mean .*beta2_decay"):
        Config.load(raw, world_size=1)
    meta = torch.nn.Parameter(torch.zeros(2, 2, device="meta"))
    meta.grad = torch.zeros_like(meta)
    with pytest.raises(UnsupportedError, match="kernels for CPU and CUDA, and a parameter is on meta"):
        deepc.optim.Adafactor([meta]).step()
    moved = torch.nn.Parameter(torch.zeros(2, 2))
    moved.grad = torch.ones(2, 2)
    opt = deepc.optim.Adafactor([moved])
    opt.state[moved] = {"step": torch.tensor(1.0), "row_var": meta.detach()[:, :1], "col_var": meta.detach()[:1]}
    with pytest.raises(ArgumentError, match="on cpu and its states are on meta: move the model before the first step"):
        opt.step()


def test_the_plan_counts_its_states():
    matrix, vector = torch.nn.Parameter(torch.zeros(64, 32)), torch.nn.Parameter(torch.zeros(2048))
    assert state_bytes_of(deepc.optim.Adafactor([matrix])) == 1024 * 96 // 2048
    assert state_bytes_of(deepc.optim.Adafactor([matrix, vector])) == 1024 * (96 + 2048) // 4096


# ---- in an engine ----------------------------------------------------------------------------------------------------
PARAMS = {"lr": 0.05, "eps": [None, 1e-3], "weight_decay": 0.01}


def _config(stage, world, precision="fp32", **extra):
    extra = {"deepc": {"bucket_elems": 8192}, **extra}  # a matrix lies in several shards
    return tiny.config(
        stage, micro=8 // world, precision=precision, optimizer={"type": "Adafactor", "params": PARAMS}, **extra
    )


def _train(rank, world, precision):
    return tiny.at_all_stages(lambda stage: _config(stage, world, precision), 5, rank, world)


@pytest.mark.parametrize(
    "world, precision", [(2, "fp32"), (2, "bf16"), pytest.param(1, "fp32", marks=pytest.mark.full)]
)
def test_all_stages_have_equal_bits_and_follow_torch(world, precision):
    ranks = run_ranks(_train, world, args=(precision,))
    losses, _ = ranks[0][0]
    assert losses[-1] < losses[0]
    if precision == "fp32":
        plain = tiny.stepped_by(lambda p: torch.optim.Adafactor(p, lr=0.05, weight_decay=0.01), 5)
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain), rtol=1e-4, atol=0)
    tiny.check_all_equal(ranks)


def _layouts(rank, world, places):
    return tiny.at_layouts(_config, rank, world, places)


def test_any_number_of_ranks_and_nodes_gives_equal_bits():
    one = run_ranks(_layouts, 1, args=([(0, 1), (3, 1)],))[0]
    four = run_ranks(_layouts, 4, args=([(3, 1), (2, 2)],))[0]
    for found in (one[1], *four):
        assert all(torch.equal(w, one[0][n]) for n, w in found.items())


def _resume(rank, world, folder):
    import torch.distributed as dist

    wanted = None
    for stage in (2, 3, 0):
        torch_object = lambda p: torch.optim.Adafactor(p, **{**PARAMS, "eps": (None, 1e-3)})
        cfg = _config(stage, world)
        if stage == 0:  # an object of torch's class takes the same path
            cfg.pop("optimizer")
        engine, *_ = deepc.initialize(
            model=tiny.make_model(), config=cfg, optimizer=torch_object if stage == 0 else None
        )
        if wanted is not None:
            engine.load_checkpoint(folder)
        for step in range(0 if wanted is None else 2, 4):
            if step == 2 and wanted is None:
                engine.save_checkpoint(folder)
                saved = engine.optimizer.state_dict()
                engine.optimizer.load_state_dict(copy.deepcopy(saved))
            engine.module.ln.weight.requires_grad_(step != 3)  # a vector and a matrix are left out
            engine.module.blocks[1].up.weight.requires_grad_(step != 3)
            x, y = (t.chunk(world)[rank] for t in tiny.make_batch(step, 8))
            engine.backward(engine(x, y))
            engine.step()
        found = {n: engine.full_fp32_param(p).clone() for n, p in engine.module.named_parameters()}
        up = engine.module.blocks[0].up.weight
        matrix, vector = (deepc.view(p).state for p in (up, engine.module.ln.weight))
        assert (list(matrix), list(vector)) == (["row_var", "col_var"], ["variance"])
        assert matrix["row_var"].shape == (up.shape[0], 1) and matrix["col_var"].shape == (1, up.shape[1])
        found |= {"rows": matrix["row_var"], "variance": vector["variance"].clone()}
        matrix["row_var"] = 2 * found["rows"]
        assert torch.equal(matrix["row_var"], 2 * found["rows"])
        with pytest.raises(UnsupportedError, match="every rank has it whole"):
            _ = deepc.view(up).local.state["row_var"]
        engine.destroy()
        dist.barrier()
        assert wanted is None or all(torch.equal(wanted[n], w) for n, w in found.items()), stage
        wanted = wanted or found
    return bool(found["rows"].all())


def test_a_checkpoint_goes_on_with_equal_bits(tmp_path):
    assert all(run_ranks(_resume, 2, args=(str(tmp_path),)))
