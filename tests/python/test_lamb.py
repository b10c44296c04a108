"""Lamb: the paper's algorithm for 1,000 steps, in an engine at every stage with equal bits, and what it refuses."""

from __future__ import annotations

import contextlib
import copy
import resource

import deepc
import pytest
import tiny
import torch
from deepc.config import Config
from deepc.core import lib
from deepc.errors import ArgumentError, ConfigError, DiskFullError, UnsupportedError
from formats_on_tiers import train_on_tiers
from ranks import run_ranks

OPTIONS = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}


class PaperLamb(torch.optim.Optimizer):
    """Algorithm 2 of arXiv:1904.00962, line by line, with the bounds on the ratio."""

    def __init__(self, params, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, max_coeff=10.0, min_coeff=0.01):
        super().__init__(
            params,
            dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, max_coeff=max_coeff, min_coeff=min_coeff),
        )
        self.t, self.ratios = 0, []

    @torch.no_grad()
    def step(self):
        self.t, self.ratios = self.t + 1, []
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                s = self.state[p]
                s["exp_avg"] = b1 * s.get("exp_avg", torch.zeros_like(p)) + (1 - b1) * p.grad
                s["exp_avg_sq"] = b2 * s.get("exp_avg_sq", torch.zeros_like(p)) + (1 - b2) * p.grad**2
                m, v = s["exp_avg"] / (1 - b1**self.t), s["exp_avg_sq"] / (1 - b2**self.t)
                u = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * p
                a, b = p.norm().item(), u.norm().item()
                ratio = min(max(a / b, group["min_coeff"]), group["max_coeff"]) if a > 0 and b > 0 else 1.0
                self.ratios.append(ratio)
                p -= group["lr"] * ratio * u


def make(n, seed=0, dtype=torch.float32):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def parameters(dtype=torch.float32):
    found = [torch.nn.Parameter(make(n, n).to(dtype)) for n in (33, 5000, 1)]
    return [*found, torch.nn.Parameter(torch.zeros(17, dtype=dtype))]  # whose norm is zero: ratio 1


def both(mine, opt, theirs, ref, steps):
    for step in range(steps):
        for i, (a, b) in enumerate(zip(mine, theirs)):
            g = make(a.numel(), 10 * step + i)
            a.grad, b.grad = g.to(a.dtype), g.to(b.dtype)
        opt.step()
        ref.step()


@pytest.mark.parametrize("options", [OPTIONS, {**OPTIONS, "max_coeff": 0.5, "min_coeff": 0.4}])
def test_a_thousand_steps_follow_the_paper_in_double(options):
    mine = parameters()
    theirs = [torch.nn.Parameter(p.detach().double()) for p in mine]
    opt, ref = deepc.optim.Lamb(mine, **options), PaperLamb(theirs, **options)
    both(mine, opt, theirs, ref, 1000)
    for a, b in zip(mine, theirs):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4 * float(b.detach().abs().max()))
    torch.testing.assert_close(torch.tensor(opt.get_lamb_coeffs()), torch.tensor(ref.ratios), rtol=1e-4, atol=0)


def test_float64_and_16_bit_parameters():
    mine, theirs = parameters(torch.float64), parameters(torch.float64)
    both(mine, deepc.optim.Lamb(mine, **OPTIONS), theirs, PaperLamb(theirs, **OPTIONS), 5)
    for a, b in zip(mine, theirs):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    low, wide = parameters(torch.bfloat16), [torch.nn.Parameter(p.detach().float()) for p in parameters(torch.bfloat16)]
    opt = deepc.optim.Lamb(low, **OPTIONS)
    both(low, opt, wide, PaperLamb(wide, **OPTIONS), 2)
    for a, b in zip(low, wide):
        torch.testing.assert_close(a.float(), b.detach(), rtol=2e-2, atol=2e-2)
        assert opt.state[a]["exp_avg"].dtype == torch.float32


def test_coefficients_are_in_the_order_of_the_parameters():
    found = []
    for wide in (False, True):
        mine = [torch.nn.Parameter(make(7, i) * (i + 1)) for i in range(3)]
        if wide:
            mine[1].data = mine[1].data.double()
        opt = deepc.optim.Lamb(mine, **OPTIONS)
        both(mine, opt, mine, opt, 1)
        found.append(torch.tensor(opt.get_lamb_coeffs()))
    torch.testing.assert_close(*found, rtol=1e-4, atol=0)
    assert len(set(found[0].tolist())) == 3


@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
def test_formats_follow_the_paper(form):
    """The first step is the paper's: states begin as zeros, and are rounded when they are kept."""
    mine, theirs = parameters(), [torch.nn.Parameter(p.detach().double()) for p in parameters()]
    opt, ref = deepc.optim.Lamb(mine, state_dtype=form, **OPTIONS), PaperLamb(theirs, **OPTIONS)
    both(mine, opt, theirs, ref, 1)
    for a, b in zip(mine, theirs):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)
    kept = opt.state[mine[1]]["exp_avg"]
    assert kept.nbytes == {"bf16": 10000, "int8": 5000, "int4": 2500}[form]
    both(mine, opt, theirs, ref, 20)
    ratios = torch.tensor(opt.get_lamb_coeffs()) / torch.tensor(ref.ratios)
    assert float((ratios - 1).abs().max()) < {"bf16": 0.01, "int8": 0.05, "int4": 0.3}[form], ratios


@pytest.mark.parametrize("form", [None, "bf16", "int8", "int4"])
def test_state_dict_goes_on(form):
    mine, twin = parameters(), parameters()
    opt, other = (deepc.optim.Lamb(p, state_dtype=form, **OPTIONS) for p in (mine, twin))
    both(mine, opt, mine, opt, 2)
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    with torch.no_grad():
        for a, b in zip(twin, mine):
            a.copy_(b)
    both(mine, opt, twin, other, 2)
    assert all(torch.equal(a, b) for a, b in zip(mine, twin))


def test_what_is_refused():
    p = [torch.nn.Parameter(torch.zeros(2))]
    for options, text in (
        ({"betas": (1.0, 0.9)}, r"betas\[0\]"),
        ({"lr": -1.0}, "lr must"),
        ({"min_coeff": 3.0, "max_coeff": 2.0}, "min_coeff must"),
        ({"eps": float("nan")}, "eps must"),
    ):
        with pytest.raises(ArgumentError, match=text):
            deepc.optim.Lamb(p, **options)
    raw = {"train_batch_size": 1, "optimizer": {"type": "Lamb", "params": {"max_coef": 2}}}
    with pytest.raises(ConfigError, match="Lamb has no such argument. Did you mean .*max_coeff"):
        Config.load(raw, world_size=1)
    meta = torch.nn.Parameter(torch.zeros(2, 2, device="meta"))
    meta.grad = torch.zeros_like(meta)
    with pytest.raises(UnsupportedError, match="kernels for CPU and CUDA, and a parameter is on meta"):
        deepc.optim.Lamb([meta]).step()


def test_cuda_kernels_that_are_not_there(tmp_path, monkeypatch):
    """Of a build without them, and of a library of another version."""
    library = lib.library_dir() / "libdeepc.so"
    monkeypatch.setenv("DEEPC_LIBRARY_DIR", str(tmp_path))
    lib._cuda.cache_clear()
    try:
        with pytest.raises(UnsupportedError, match="no CUDA kernels .*libdeepc_cuda.so.* DEEPC_CUDA=ON"):
            lib.call_cuda("dc_cuda_lamb_apply", lib.LambArgs.array(1), 0, None)
        (tmp_path / "libdeepc_cuda.so").symlink_to(library)
        with pytest.raises(UnsupportedError, match="lacks dc_cuda_last_error: .* Reinstall deepc-torch"):
            lib.call_cuda("dc_cuda_lamb_apply", lib.LambArgs.array(1), 0, None)
    finally:
        lib._cuda.cache_clear()


def test_deepspeeds_class():
    from deepc.compat.runtime.optimizers import FusedLamb

    group = FusedLamb([torch.nn.Parameter(torch.zeros(2))], lr=0.1, max_coeff=2.0, min_coeff=0.5).param_groups[0]
    assert (group["lr"], group["max_coeff"], group["min_coeff"]) == (0.1, 2.0, 0.5)
    with pytest.raises(UnsupportedError, match="eps_inside_sqrt"):
        FusedLamb([torch.nn.Parameter(torch.zeros(2))], eps_inside_sqrt=True)


# ---- in an engine ----------------------------------------------------------------------------------------------------
def _config(stage, world, precision="fp32", **extra):
    params = {k: list(v) if isinstance(v, tuple) else v for k, v in OPTIONS.items()}
    extra = {"deepc": {"bucket_elems": 8192}, **extra}
    return tiny.config(
        stage, micro=8 // world, precision=precision, optimizer={"type": "lamb", "params": params}, **extra
    )


def _formed(form):
    return {"optimizer": {"type": "Lamb", "params": {**OPTIONS, "state_dtype": form}}}


def _train(rank, world, precision, form=None):
    return tiny.at_all_stages(lambda stage: {**_config(stage, world, precision), **_formed(form)}, 5, rank, world)


def plain(steps):
    return tiny.stepped_by(lambda p: PaperLamb(p, **OPTIONS), steps)


@pytest.mark.parametrize(
    "world, precision", [(1, "fp32"), pytest.param(2, "fp32", marks=pytest.mark.full), (2, "bf16")]
)
def test_all_stages_have_equal_bits_and_follow_the_paper(world, precision):
    ranks = run_ranks(_train, world, args=(precision,))
    losses, _ = ranks[0][0]
    assert losses[-1] < losses[0]
    if precision == "fp32":
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain(5)), rtol=1e-4, atol=0)
    tiny.check_all_equal(ranks)


@pytest.mark.parametrize("world, precision, form", [(1, "fp32", "int8"), (2, "bf16", "bf16"), (2, "fp32", "int4")])
def test_formats_have_equal_bits_at_all_stages_and_follow_the_paper(world, precision, form):
    ranks = run_ranks(_train, world, args=(precision, form))
    losses, _ = ranks[0][0]
    exact = plain(5)
    assert losses != exact and abs(losses[-1] - exact[-1]) < 0.1 * (exact[0] - exact[-1]), (losses, exact)
    tiny.check_all_equal(ranks)


def _layouts(rank, world, form=None):
    out = []
    for stage in (0, 3):
        cfg = _config(stage, 8, deepc={"bucket_elems": 8192, "deterministic": "layout"}) | _formed(form)
        cfg["gradient_accumulation_steps"] = 8 // world
        _, _, weights, engine = tiny.engine_training(cfg, 3, rank, world, grads=False)
        out.append({n: w.clone() for n, w in weights.items()})
        engine.destroy()
    return out


@pytest.mark.parametrize("form", [pytest.param(None, marks=pytest.mark.full), "int8"])
def test_any_number_of_ranks_gives_equal_bits(form):
    one, four = (run_ranks(_layouts, n, args=(form,))[0] for n in (1, 4))
    for found in (one[1], *four):
        assert all(torch.equal(w, one[0][n]) for n, w in found.items())


def _resume(rank, world, folder, form):
    import torch.distributed as dist

    wanted = None
    for stage in (2, 3, 0):
        engine, *_ = deepc.initialize(model=tiny.make_model(), config=_config(stage, world) | _formed(form))
        if wanted is not None:
            engine.load_checkpoint(folder)
        for step in range(0 if wanted is None else 2, 4):
            if step == 2 and wanted is None:
                engine.save_checkpoint(folder)
            x, y = (t.chunk(world)[rank] for t in tiny.make_batch(step, 8))
            engine.backward(engine(x, y))
            engine.step()
        found = {n: engine.full_fp32_param(p).clone() for n, p in engine.module.named_parameters()}
        engine.destroy()
        dist.barrier()
        assert wanted is None or all(torch.equal(wanted[n], w) for n, w in found.items()), stage
        wanted = wanted or found
    return True


@pytest.mark.parametrize("form", [*(pytest.param(f, marks=pytest.mark.full) for f in (None, "bf16")), "int8"])
def test_a_checkpoint_goes_on_with_equal_bits(tmp_path, form):
    assert all(run_ranks(_resume, 2, args=(str(tmp_path), form)))


# ---- states on disk --------------------------------------------------------------------------------------------------
def _on_tiers(rank, world, folder, form, precision):
    def config(zero):
        return _config(zero["stage"], world, precision, zero_optimization=zero) | _formed(form)

    return train_on_tiers(rank, world, config, form, folder)


@pytest.mark.parametrize(
    "form, precision", [("int4", "bf16"), *(pytest.param(f, "fp32", marks=pytest.mark.full) for f in ("bf16", "int8"))]
)
def test_formats_on_disk_have_the_bits_of_memory(tmp_path, form, precision):
    assert all(run_ranks(_on_tiers, 2, args=(str(tmp_path), form, precision)))


def _step(engine, step, rank, world):
    x, y = (t.chunk(world)[rank] for t in tiny.make_batch(step, 8))
    engine.backward(engine(x, y))


def _values(engine):
    out = {n: engine.full_fp32_param(p).clone() for n, p in engine.module.named_parameters()}
    for name in ("exp_avg", "exp_avg_sq"):
        out |= {f"{n} {name}": deepc.view(p).state[name].clone() for n, p in engine.module.named_parameters()}
    return out


@contextlib.contextmanager
def _full_disk():
    """No file of this process grows or is written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _on_disk(rank, world, folder, stage, precision, form=None):
    """The bits of states in memory, also where the disk of one rank breaks a step off in its first or second pass."""
    disk = {"stage": stage, "sub_group_size": 100, "offload_optimizer": {"device": "nvme", "nvme_path": folder}}
    engines = [
        deepc.initialize(model=tiny.make_model(), config=_config(stage, world, precision, **more) | _formed(form))[0]
        for more in ({}, {"zero_optimization": disk})
    ]
    memory, disk = engines
    assert disk.state.tier.stream.cells > 1
    for step in range(4):
        for e in engines:
            _step(e, step, rank, world)
        memory.step()
        if step == 1:  # the moments
            with _full_disk() if rank == world - 1 else contextlib.nullcontext():
                for _ in range(2):
                    with pytest.raises(DiskFullError, match=rf"done in part.*rank {world - 1}: "):
                        disk.step()
        elif step == 2 and disk.plan.has_master:  # the masters
            squares, limit = disk.optimizer._elements.norms.squares, _full_disk()

            def after_the_norms(squares=squares, limit=limit):
                found = squares()
                if rank == world - 1:
                    limit.__enter__()
                return found

            disk.optimizer._elements.norms.squares = after_the_norms
            with pytest.raises(DiskFullError, match="done in part"):
                disk.step()
            if rank == world - 1:
                limit.__exit__(None, None, None)
            disk.optimizer._elements.norms.squares = squares
        assert disk.step().applied
        found, wanted = _values(disk), _values(memory)
        assert all(torch.equal(v, wanted[n]) for n, v in found.items()), step
    for e in engines:
        e.destroy()
    return True


@pytest.mark.parametrize("stage, precision", [(1, "bf16"), pytest.param(3, "fp32", marks=pytest.mark.full)])
@pytest.mark.parametrize("form", [None, "int8", pytest.param("bf16", marks=pytest.mark.full)])
def test_states_on_disk_have_the_bits_of_memory(tmp_path, stage, precision, form):
    assert all(run_ranks(_on_disk, 2, args=(str(tmp_path), stage, precision, form)))
