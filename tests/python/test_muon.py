"""Muon: torch.optim.Muon's numbers on matrices, AdamW's on the rest, in an engine at every stage with equal bits."""

from __future__ import annotations

import copy
import functools

import deepc
import pytest
import tiny
import torch
from deepc.errors import ArgumentError, UnsupportedError
from deepc.optim.kinds.muon import choose_by_name, orthogonalize
from deepc.zero.step.across.matrices import rounds_of
from formats_on_tiers import train_on_tiers
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


class PaperMuon:
    """Algorithm 2 of the post that optim/kinds/muon.py names, in double, with torch.optim.Muon's momentum, which is a
    mean, and its decay."""

    def __init__(self, params, lr, momentum=0.95, nesterov=True, weight_decay=0.1):
        self.params, self.lr, self.mu, self.nesterov, self.decay = params, lr, momentum, nesterov, weight_decay
        self.momentum = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step(self):
        for p, m in zip(self.params, self.momentum):
            m.copy_(self.mu * m + (1 - self.mu) * p.grad)
            x = self.mu * m + (1 - self.mu) * p.grad if self.nesterov else m.clone()
            tall = x.size(0) > x.size(1)
            x = x.T if tall else x
            x = x / x.norm()
            for _ in range(5):
                g = x @ x.T
                x = 3.4445 * x + (-4.7750 * g + 2.0315 * g @ g) @ x
            x = x.T if tall else x
            p *= 1 - self.lr * self.decay
            p -= self.lr * max(1.0, p.size(0) / p.size(1)) ** 0.5 * x


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"nesterov": False, "weight_decay": 0.0}])
def test_a_thousand_steps_follow_the_formula_in_double(options):
    """The bound: the iterations multiply what is rounded of a small singular value by up to 3.4445^5."""
    mine = matrices()
    theirs = [torch.nn.Parameter(p.detach().double()) for p in mine]
    opt, ref = deepc.optim.Muon(mine, lr=0.02, ns_dtype="float32", **options), PaperMuon(theirs, 0.02, **options)
    for step in range(1000):
        for a, b, g in zip(mine, theirs, grads(mine, step)):
            a.grad, b.grad = g, g.double()
        opt.step()
        ref.step()
    for a, b, m in zip(mine, theirs, ref.momentum):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=3e-4 * float(b.detach().abs().max()))
        torch.testing.assert_close(opt.state[a]["momentum_buffer"].double(), m, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_singular_values_come_near_one(dtype):
    for p in matrices(dtype):
        u, s, v = torch.linalg.svd(p.detach(), full_matrices=False)
        found = orthogonalize(p.detach(), dtype=dtype)
        by_gram = orthogonalize(p.detach(), dtype=dtype, method="gram")
        torch.testing.assert_close(by_gram, found, rtol=0, atol=2e-4 if dtype == torch.float32 else 1e-11)
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


@pytest.mark.parametrize("grouped", [False, True])
def test_named_parameters_are_divided_as_those_without_names(grouped):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.up, self.gain = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 6), torch.nn.Linear(1, 1)
            self.embed.weight.use_muon = False

    def trained(net, params):
        opt = deepc.optim.Muon([{"params": params}] if grouped else params, lr=0.1, adam_lr=0.01)
        for step in range(2):
            for p, g in zip(net.parameters(), grads(list(net.parameters()), step)):
                p.grad = g
            opt.step()
        return opt

    plain, named = Net(), Net()
    opt, other = trained(plain, list(plain.parameters())), trained(named, list(named.named_parameters()))
    assert [(g["use_muon"], len(g["params"])) for g in other.param_groups] == [(True, 2), (False, 3)]
    assert [g["param_names"] for g in other.param_groups] == [
        ["up.weight", "gain.weight"],
        ["embed.weight", "up.bias", "gain.bias"],
    ]
    assert [g["lr"] for g in other.param_groups] == [g["lr"] for g in opt.param_groups]
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), named.parameters()))
    with pytest.raises(ArgumentError, match="has not 2 dimensions"):
        deepc.optim.Muon([{"params": [("b", torch.nn.Parameter(torch.zeros(3)))], "use_muon": True}])


def test_what_is_refused():
    p = [torch.nn.Parameter(torch.zeros(2, 2))]
    for options, text in (
        ({"lr": -1.0}, "lr must"),
        ({"momentum": 1.0}, "momentum must"),
        ({"ns_steps": 100}, "ns_steps must"),
        ({"ns_coefficients": (1.0, 2.0)}, "three ns_coefficients"),
        ({"adjust_lr_fn": "x"}, "adjust_lr_fn must"),
        ({"ns_dtype": "float16"}, "ns_dtype must"),
        ({"ns_method": "svd"}, "ns_method must"),
        ({"muon_lr": -1.0}, "muon_lr must"),
    ):
        with pytest.raises(ArgumentError, match=text):
            deepc.optim.Muon(p, **options)
    with pytest.raises(ArgumentError, match="has not 2 dimensions"):
        deepc.optim.Muon([{"params": [torch.nn.Parameter(torch.zeros(3))], "use_muon": True}])
    p[0].grad = torch.zeros(2, 2).to_sparse()
    with pytest.raises(ArgumentError, match="dense"):
        deepc.optim.Muon(p).step()


def test_rates_of_both_parts():
    params = [torch.nn.Parameter(torch.zeros(s)) for s in ((2, 2), (2,), (3, 2), (3,))]
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.5, "adam_lr": 0.25}]
    opt = deepc.optim.Muon(groups, lr=0.1, muon_lr=0.2, adam_lr=0.3)
    assert [g["lr"] for g in opt.param_groups] == [0.2, 0.3, 0.5, 0.25]


def test_embeddings_are_known_by_their_names():
    names = ("model.embed_tokens.weight", "lm_head.weight", "up.weight", "up.bias", "conv.weight", "mine.weight")
    shapes = ((2, 2), (2, 2), (2, 2), (2,), (2, 2, 2), (2, 2))
    params = [torch.nn.Parameter(torch.zeros(s)) for s in shapes]
    params[-1].use_muon = False
    choose_by_name(zip(names, params))
    assert [p.use_muon for p in params] == [False, False, True, False, False, False]


# ---- formats ---------------------------------------------------------------------------------------------------------
FORMS = ["bf16", "int8"]


def _pair(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(*s, generator=generator).to(dtype)) for s in ((40, 96), (300,))]


def _step(optimizer, params, seed):
    for p, g in zip(params, _pair(1000 + seed)):
        p.grad = g.detach().to(p.dtype)
    optimizer.step()


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_the_first_step_of_a_format_is_that_of_fp32(form, nesterov):
    """States are rounded when they are kept, and begin as zeros."""
    mine, theirs = _pair(0), _pair(0)
    options = {"lr": 0.02, "ns_dtype": "float32", "nesterov": nesterov}
    one, other = deepc.optim.Muon(mine, state_dtype=form, **options), deepc.optim.Muon(theirs, **options)
    _step(one, mine, 0), _step(other, theirs, 0)
    for a, b in zip(mine, theirs):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    _step(one, mine, 1), _step(other, theirs, 1)
    assert all(not torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(mine, theirs))


@pytest.mark.parametrize("form", FORMS)
def test_momentum_in_a_format_is_the_formula_rounded_by_less_than_a_code(form):
    from deepc.optim.states.formats import is_coded, unpack

    p = _pair(0)[:1]
    opt, momentum = deepc.optim.Muon(p, lr=0.02, momentum=0.9, state_dtype=form), torch.zeros(40, 96)

    def kept():
        state = opt.state[p[0]]
        if not is_coded(form):
            return state["momentum_buffer"].float()
        scale = state["momentum_buffer_scale"]
        return unpack(state["momentum_buffer"], scale, 40 * 96, form, "momentum_buffer", 0).view(40, 96)

    block, gap, least = {"bf16": (1, 2**-7, 0), "int8": (256, 0, 1 / 127)}[form]
    for step in range(5):
        _step(opt, p, step)
        exact = 0.9 * momentum + 0.1 * p[0].grad
        top = exact.view(-1, block).abs().amax(1, keepdim=True).expand(-1, block).reshape(40, 96)
        momentum = kept()
        off = (momentum - exact).abs() / torch.maximum(gap * exact.abs(), least * top)
        assert float(off.max()) <= 1 and float(off.mean()) > 0.01, (step, off.max(), off.mean())


@pytest.mark.parametrize("form", ["fp32", *FORMS])
def test_states_in_a_format_come_back_from_state_dict(form):
    dtype = torch.bfloat16 if form == "fp32" else torch.float32
    mine, twins, plain = (_pair(0, dtype) for _ in range(3))
    opt, other = (deepc.optim.Muon(p, lr=0.02, state_dtype=form) for p in (mine, twins))
    for step in range(3):
        _step(opt, mine, step)
    momentum = opt.state[mine[0]]["momentum_buffer"]
    assert momentum.nbytes == 40 * 96 * {"fp32": 4, "bf16": 2, "int8": 1}[form]
    with torch.no_grad():
        for a, b in zip(twins, mine):
            a.copy_(b)
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    copied = copy.deepcopy(opt)
    for step in range(3, 5):
        _step(opt, mine, step), _step(other, twins, step)
        _step(copied, [p for g in copied.param_groups for p in g["params"]], step)
    for a, b, c in zip(mine, twins, (p for g in copied.param_groups for p in g["params"])):
        assert torch.equal(a, b) and torch.equal(a, c)
    exact = deepc.optim.Muon(plain, lr=0.02)  # into the parameter's dtype
    exact.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert {t.dtype for s in exact.state.values() for n, t in s.items() if n != "step"} == {dtype}
    _step(exact, plain, 5)


def test_formats_of_muon_that_do_not_exist():
    p = torch.nn.Parameter(torch.zeros(4, 6).T)
    with pytest.raises(UnsupportedError, match="state_dtype='int4' does not exist: .*Use 'int8'"):
        deepc.optim.Muon([p], state_dtype="int4")
    p.grad = torch.zeros_like(p)
    with pytest.raises(UnsupportedError, match="state_dtype='int8' needs parameters in the standard memory format"):
        deepc.optim.Muon([p], state_dtype="int8").step()
    deepc.optim.Muon([p], state_dtype="bf16").step()


# ---- in an engine ----------------------------------------------------------------------------------------------------
PARAMS = {"lr": 0.02, "adam_lr": 3e-3, "ns_dtype": "float32"}


def _config(stage, world, precision="fp32", form=None, **extra):
    extra = {"deepc": {"bucket_elems": 8192}, **extra}  # a matrix lies in several shards
    params = PARAMS if form is None else {**PARAMS, "state_dtype": form}
    return tiny.config(
        stage, micro=8 // world, precision=precision, optimizer={"type": "muon", "params": params}, **extra
    )


def _train(rank, world, precision, form=None):
    return tiny.at_all_stages(lambda stage: _config(stage, world, precision, form), 5, rank, world)


def plain(steps):
    return tiny.stepped_by(lambda p: deepc.optim.Muon(p, weight_decay=0.0, **PARAMS), steps)


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.full), "bf16"])
def test_all_stages_have_equal_bits_and_follow_the_drop_in(precision):
    ranks = run_ranks(_train, 2, args=(precision,))
    losses, _ = ranks[0][0]
    assert losses[-1] < losses[0]
    if precision == "fp32":
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain(5)), rtol=1e-3, atol=0)
    tiny.check_all_equal(ranks)


@pytest.mark.parametrize(
    "precision, form",
    [*(pytest.param(*c, marks=pytest.mark.full) for c in (("fp32", "int8"), ("bf16", "bf16"))), ("bf16", "int8")],
)
def test_formats_have_equal_bits_at_all_stages_and_follow_fp32(precision, form):
    ranks = run_ranks(_train, 2, args=(precision, form))
    losses, _ = ranks[0][0]
    exact = plain(5)
    assert losses != exact and abs(losses[-1] - exact[-1]) < 0.1 * (exact[0] - exact[-1]), (losses, exact)
    tiny.check_all_equal(ranks)


def _layouts(rank, world, places, form=None):
    return tiny.at_layouts(functools.partial(_config, form=form), rank, world, places)


@pytest.mark.parametrize("form", [pytest.param(None, marks=pytest.mark.full), "int8"])
def test_any_number_of_ranks_and_nodes_gives_equal_bits(form):
    one = run_ranks(_layouts, 1, args=([(0, 1), (3, 1)], form))[0]
    four = run_ranks(_layouts, 4, args=([(0, 1), (3, 1), (2, 2), (0, 2)], form))
    for found in (one[1], *four[0], *four[3]):
        assert all(torch.equal(w, one[0][n]) for n, w in found.items())


def _resume(rank, world, folder, form):
    import torch.distributed as dist

    wanted = None
    for stage in (2, 3, 0):
        engine, *_ = deepc.initialize(model=tiny.make_model(), config=_config(stage, world, form=form))
        if wanted is not None:
            engine.load_checkpoint(folder)
        for step in range(0 if wanted is None else 2, 4):
            if step == 2 and wanted is None:
                engine.save_checkpoint(folder)
            engine.module.ln.weight.requires_grad_(step != 3)  # one of AdamW's and one of Muon's are left out
            engine.module.blocks[1].up.weight.requires_grad_(step != 3)
            x, y = (t.chunk(world)[rank] for t in tiny.make_batch(step, 8))
            engine.backward(engine(x, y))
            engine.step()
        found = {n: engine.full_fp32_param(p).clone() for n, p in engine.module.named_parameters()}
        matrix, rest = (deepc.view(p).state for p in (engine.module.blocks[0].up.weight, engine.module.ln.weight))
        assert (list(matrix), list(rest)) == (["momentum_buffer"], ["exp_avg", "exp_avg_sq"])
        found["momentum"] = matrix["momentum_buffer"].clone()
        with pytest.raises(ArgumentError, match="no optimizer state 'exp_avg'"):  # on every rank: nobody waits
            matrix["exp_avg"]
        engine.destroy()
        dist.barrier()
        assert wanted is None or all(torch.equal(wanted[n], w) for n, w in found.items()), stage
        wanted = wanted or found
    return bool(found["momentum"].any())


@pytest.mark.parametrize("form", [*(pytest.param(f, marks=pytest.mark.full) for f in (None, "bf16")), "int8"])
def test_a_checkpoint_goes_on_with_equal_bits(tmp_path, form):
    assert all(run_ranks(_resume, 2, args=(str(tmp_path), form)))


def _on_tiers(rank, world, folder, form, precision):
    def config(zero):
        return _config(zero["stage"], world, precision, form, zero_optimization=zero)

    return train_on_tiers(rank, world, config, form, folder)


@pytest.mark.parametrize(
    "world, form, precision",
    [
        (2, "int8", "bf16"),
        *(pytest.param(*row, marks=pytest.mark.full) for row in ((2, "bf16", "fp32"), (1, "int8", "fp32"))),
    ],
)
def test_formats_on_disk_have_the_bits_of_memory(tmp_path, world, form, precision):
    assert all(run_ranks(_on_tiers, world, args=(str(tmp_path), form, precision)))


def test_matrices_are_dealt_by_their_cost():
    sizes = [(i, 64 * (1 + i % 3), 256, torch.float32) for i in range(12)]
    rounds = rounds_of(sizes, 4)
    assert sorted(p for r in rounds for p in r.owner) == list(range(12)) and len(rounds) == 1
    cost = [sum(sizes[p][1] ** 2 for p in rounds[0].of(rank)) for rank in range(4)]
    assert max(cost) <= 1.5 * min(cost)
    large = [(i, 4096, 4096, torch.bfloat16) for i in range(6)]  # one is the limit of bytes
    assert [[r.of(rank) for rank in range(2)] for r in rounds_of(large, 2)] == [[[0], [1]], [[2], [3]], [[4], [5]]]
