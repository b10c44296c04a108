"""Recomputation by budget (activation_checkpointing.budget): the choice is the best there is, what autograd holds stays
within the budget, and every number is the one of no recomputation."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import gc
import itertools
import pickle
import random
import weakref

import pytest
import tiny
import torch
from deepc.engine.states.recompute import Recomputation
from deepc.errors import ConfigError
from deepc.plan.predict.recompute import choice as recompute
from deepc.plan.predict.recompute.blocks import Hand
from deepc.plan.predict.recompute.choice import Call
from ranks import run_ranks as _run_ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

KEY = "activation_checkpointing"


def run_ranks(fn, world, *args, **kw):
    return _run_ranks(fn, world, args=args, env={"DEEPC_LOG_LEVEL": "WARNING"}, **kw)


# ---- the choice ------------------------------------------------------------------------------------------------------
def cases(n: int):
    rng = random.Random(n)
    for _ in range(n):
        outside, calls = 0, []
        for _ in range(rng.randint(1, 9)):
            outside += rng.choice([0, 0, rng.randint(0, 30)])
            calls.append(Call(rng.randint(0, 50), rng.randint(0, 10), outside, rng.choice([1.0, rng.random()])))
        outside += rng.randint(0, 40)
        lo, hi = recompute.least(calls, outside), recompute.peak(calls, outside, [False] * len(calls))
        yield calls, outside, rng.randint(lo, hi)


def best_of_all(calls, outside, budget):
    return min(
        sum(c.seconds for c, again in zip(calls, way, strict=True) if again)
        for way in itertools.product([False, True], repeat=len(calls))
        if recompute.peak(calls, outside, way) <= budget
    )


def test_the_choice_is_the_best_of_all():
    for calls, outside, budget in cases(400):
        found = recompute.choose(calls, outside, budget)
        assert found.peak == recompute.peak(calls, outside, found.recomputed) <= budget
        assert found.seconds == pytest.approx(best_of_all(calls, outside, budget), abs=1e-12)


def test_with_a_disk_the_choice_is_the_best_of_all():
    rng, moved, waited = random.Random(5), 0, 0
    for calls, outside, budget in cases(250):
        calls = [
            dataclasses.replace(
                c, movable=(m := rng.choice([0, c.saved, c.saved // 2])), moving=min(m, rng.randint(0, 9))
            )
            for c in calls[:6]
        ]
        whole = recompute.peak(calls, outside, [False] * len(calls))
        budget = min(max(budget, recompute.least(calls, outside)), whole)
        rates = recompute.Rates(*(rng.choice([0.0, 0.01, 0.1]) * rng.random() for _ in range(3)))
        found = recompute.choose(calls, outside, budget, rates)
        assert found.peak == recompute.peak(calls, outside, found.recomputed, found.moved) <= budget
        assert found.seconds == pytest.approx(recompute.cost(calls, found.recomputed, found.moved, rates), abs=1e-12)
        ways = itertools.product([0, 1, 2], repeat=len(calls))
        pairs = (([w == 1 for w in way], [w == 2 for w in way]) for way in ways)
        best = min(
            recompute.cost(calls, again, away, rates)
            for again, away in pairs
            if recompute.peak(calls, outside, again, away) <= budget
        )
        assert found.seconds == pytest.approx(best, abs=1e-12)
        moved += any(found.moved)
        waited += any(found.moved) and any(found.recomputed)
    assert moved > 50 and waited > 10


def test_recomputing_everything_needs_the_least_and_less_is_refused():
    for calls, outside, _ in cases(200):
        ways = itertools.product([False, True], repeat=len(calls))
        least = min(recompute.peak(calls, outside, way) for way in ways)
        assert recompute.least(calls, outside) == least
        assert recompute.choose(calls, outside, least - 1) is None
        assert recompute.choose(calls, outside, least).peak == least


def test_many_different_blocks_stay_within_the_budget(monkeypatch):
    """Where states are rounded, the choice is still within the budget and near the best."""
    monkeypatch.setattr(recompute, "MOST_STATES", 64)
    rng = random.Random(1)
    calls = [Call(rng.randint(10**6, 10**8), rng.randint(10**5, 10**6), 0, rng.random()) for _ in range(48)]
    whole, least = recompute.peak(calls, 0, [False] * 48), recompute.least(calls, 0)
    for part in (0.3, 0.5, 0.8):
        budget = max(least, int(part * whole))
        found = recompute.choose(calls, 0, budget)
        assert found.peak <= budget
        assert found.seconds < sum(c.seconds for c in calls) * (1.15 - part)


# ---- the engine ------------------------------------------------------------------------------------------------------
class Held(TorchDispatchMode):
    """Bytes of living storages that were made inside: not those of the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self._take(t.untyped_storage())
        return out

    def _take(self, storage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.now += nbytes
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._gone, key, nbytes)

    def _gone(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


def make(kind: str):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":
        cfg = transformers.GPT2Config(n_embd=64, n_layer=5, n_head=4, vocab_size=97, n_positions=64)
        model = transformers.GPT2LMHeadModel(cfg)  # with dropout
    else:
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                hidden_size=64,
                intermediate_size=160,
                num_hidden_layers=5,
                num_attention_heads=4,
                num_key_value_heads=2,
                vocab_size=97,
            )
        )
    return model.train()


def config(budget=None, **more):
    cfg = tiny.config(0, micro=4) | more
    return cfg if budget is None else cfg | {KEY: {"budget": budget}}


def run(kind: str, budget, steps: int = 3, **more):
    """Gradients and losses of each step; bytes that lived at the end of the last forward and at most in its backward,
    above what lived before; and the engine's numbers."""
    import deepc

    engine = deepc.initialize(model=make(kind), config=config(budget, **more))[0]
    out = []
    try:
        for step in range(steps):
            torch.manual_seed(100 + step)
            ids = torch.randint(97, (4, 48))
            with Held(engine.module) as held:
                loss = engine(input_ids=ids, labels=ids).loss
                at_end = held.now
                engine.backward(loss)
            grads = {n: engine.full_grad(p).clone() for n, p in engine.module.named_parameters()}
            engine.step()
            out.append((loss.item(), grads))
        return out, at_end, held.most, engine.recomputation.stats()
    finally:
        engine.destroy()


@pytest.mark.parametrize("kind", ["gpt2", pytest.param("llama", marks=pytest.mark.full)])
def test_ten_budgets_are_kept_and_no_bit_differs(kind):
    wanted, end, _, none = run(kind, None)
    assert none == {}
    _, _, _, generous = run(kind, "1TB")
    least, whole = generous["least_bytes"], generous["whole_bytes"]
    assert generous["recomputed"] == 0 and generous["peak_bytes"] == whole
    assert abs(end - whole) < 0.02 * whole, "what is measured is what lives"
    workspace = run(kind, least)[2] - least  # of a block's backward, and gradients: beside the budget
    assert workspace < whole / 4
    counts = set()
    for i in range(10):
        budget = least + i * (whole - least) // 9
        got, at_end, at_most, stats = run(kind, budget)
        for (loss, grads), (loss_before, before) in zip(got, wanted, strict=True):
            assert loss == loss_before
            for name, grad in grads.items():
                assert torch.equal(grad, before[name]), (budget, name)
        assert stats["peak_bytes"] <= budget
        assert at_end <= budget + 0.02 * whole
        assert at_most <= budget + workspace + 0.02 * whole
        counts.add(stats["recomputed"])
    assert counts >= {0, 1, 2, 3, 4}
    assert at_end > 1.3 * run(kind, least)[1], "it does save memory"


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_caches_keep_nothing_beside_autograd(kind, monkeypatch):
    DynamicCache = pytest.importorskip("transformers.cache_utils").DynamicCache

    calls = []
    update = DynamicCache.update
    monkeypatch.setattr(DynamicCache, "update", lambda self, *a, **k: calls.append(1) or update(self, *a, **k))
    run(kind, "1TB", 1)
    assert not calls


@pytest.mark.full  # test_recompute_pipeline.py has one of every push
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_what_blocks_saved_may_lie_on_disk(kind, tmp_path, monkeypatch):
    from deepc.engine.states.activations import Moves

    spilled = []
    close = Moves.close
    monkeypatch.setattr(Moves, "close", lambda self: (spilled.append(self.spill.bytes_written), close(self)))
    disk = {"deepc": {"activations": {"nvme_path": str(tmp_path), "min_bytes": 1024}}}
    wanted = run(kind, None)[0]
    _, _, _, generous = run(kind, "1TB", **disk)
    least, whole = generous["least_bytes"], generous["whole_bytes"]
    assert generous["on_disk"] == 0
    rates = [recompute.Rates(0.0, 0.0, 0.0), recompute.Rates(1.0, 1.0, 1.0)]
    seen = []
    for fast in rates:
        monkeypatch.setattr(Moves, "measure", lambda self, fast=fast: fast)
        for part in (0.0, 0.3, 0.6):
            budget = int(least + part * (whole - least))
            got, at_end, _, stats = run(kind, budget, **disk)
            for (loss, grads), (loss_before, before) in zip(got, wanted, strict=True):
                assert loss == loss_before
                for name, grad in grads.items():
                    assert torch.equal(grad, before[name]), (budget, name)
            assert stats["peak_bytes"] <= budget and at_end <= budget + 0.02 * whole
            seen.append((stats["on_disk"] > 0, spilled.pop() > 0))
    assert seen == [(False, False), (True, True), (True, True), *[(False, False)] * 3], "the faster of both"
    assert list(tmp_path.iterdir()) == []


def test_rates_are_measured(tmp_path):
    from deepc.engine.states.activations import Moves

    moves = Moves(str(tmp_path), 1)
    rates = moves.measure(1 << 16, 6)
    assert 0 < rates.write < 1 and 0 < rates.read < 1 and 0 <= rates.busy < 1
    assert moves.spill.bytes_written == 6 << 16
    moves.close()


def _cut(rank, world, keys, budgets):
    import deepc
    from test_tensor_parallel import transformer

    out = []
    for budget in budgets:
        model = transformer("gpt2", attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1).train()
        asked = {} if budget is None else {KEY: {"budget": budget}}
        sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
        engine, *_ = deepc.initialize(model=model, config={"train_batch_size": 2, **keys, **sgd, **asked})
        if engine.recomputation._most is not None:  # ranks that measure other times take one choice
            own = engine.recomputation.clock
            engine.recomputation.clock = lambda args, own=own: own(args) * (1 + rank)
        losses = []
        for step in range(3):
            torch.manual_seed(step)
            ids = torch.randint(0, 61, (2, 16))
            # a cache, which blocks that are computed again do without, gives keys another layout, and products of those
            # other last bits on some processors
            loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        plans = [plan.choice.recomputed for plan in engine.recomputation._plans.values()]
        out.append((losses, {n: t.clone() for n, t in engine.module_state_dict().items()}, plans))
        stats = engine.recomputation.stats()
        engine.destroy()
    return out, stats


def test_tensor_parallel_ranks_take_one_choice():
    keys = {"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 1}}
    first = run_ranks(_cut, 2, keys, ["1TB"])[0][1]
    middle = int(first["least_bytes"] + 0.5 * (first["whole_bytes"] - first["least_bytes"]))
    found = run_ranks(_cut, 2, keys, [None, first["least_bytes"], middle])
    (_, (_, _, all_), (_, _, some)), _ = found[0]
    assert all(all_[0]) and 0 < sum(some[0]) < len(some[0])
    for (plain, *others), _ in found:
        for losses, state, plans in others:
            assert losses == plain[0]
            assert all(torch.equal(state[n], plain[1][n]) for n in plain[1])
            assert plans in (all_, some)


@pytest.mark.full
def test_sequence_parallel_ranks_take_one_choice():
    found = run_ranks(_cut, 2, {"sequence_parallel_size": 2}, [None, "1TB"])
    (_, _), stats = found[0]
    middle = int(stats["least_bytes"] + 0.5 * (stats["whole_bytes"] - stats["least_bytes"]))
    for (plain, (losses, state, plans)), _ in run_ranks(_cut, 2, {"sequence_parallel_size": 2}, [None, middle]):
        assert losses == plain[0] and 0 < sum(plans[0]) < len(plans[0])
        assert all(torch.equal(state[n], plain[1][n]) for n in plain[1])


class Waves(nn.Module):
    """Blocks whose backward has next to no workspace: six saved tensors of UNIT bytes each, of which three are alive
    beside them at most."""

    UNIT = 256 * 512 * 4

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            for _ in range(3):
                x = torch.sin(torch.exp(-x * x)) * self.scale
            return x

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(self.Block() for _ in range(6)))
        self.inner = nn.Linear(512, 512)

    def forward(self, x):
        return self.blocks(self.inner(x)).mean()


def test_backward_stays_within_the_budget_too():
    """The moment that counts is the recomputation of the last block, when all before it are still held."""
    import deepc

    def peaks(budget):
        torch.manual_seed(0)
        engine = deepc.initialize(model=Waves(), config=config(budget))[0]
        most = []
        for _ in range(2):
            with Held(engine.module) as held:
                loss = engine(torch.randn(256, 512))
                engine.backward(loss)
            engine.step()
            most.append(held.most)
        stats = engine.recomputation.stats()
        engine.destroy()
        return *most, stats

    measured, _, all_kept = peaks("1TB")
    least, whole, room = all_kept["least_bytes"], all_kept["whole_bytes"], 4 * Waves.UNIT
    assert whole - least > 3 * room
    assert measured <= least + room, "the forward that measures recomputes all"
    assert peaks(None)[1] > whole - Waves.UNIT
    for i in range(5):
        budget = least + i * (whole - least) // 5
        _, most, stats = peaks(budget)
        assert stats["recomputed"] > 0
        assert most <= budget + room, (i, most / Waves.UNIT, budget / Waves.UNIT, stats)


def test_too_small_a_budget_names_the_least_one():
    import deepc

    engine = deepc.initialize(model=make("gpt2"), config=config(1000))[0]
    ids = torch.randint(97, (4, 48))
    with pytest.raises(ConfigError, match=r"budget = 1000 bytes.*Give as much") as told:
        engine(input_ids=ids, labels=ids)
    engine.destroy()
    least = int(str(told.value).split("recomputes every block: ")[1].split()[0])
    assert run("gpt2", least, 1)[3]["recomputed"] == 5
    with pytest.raises(ConfigError, match=str(least)):
        run("gpt2", least - 1, 1)


class Blocks(nn.Module):
    """Blocks of the user's own: keywords, several outputs, dropout, one that is called twice."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.drop = nn.Linear(16, 64), nn.Linear(64, 16), nn.Dropout(0.2)

        def forward(self, x, *, scale=None, carry=()):
            y = self.drop(torch.tanh(self.up(x)))
            return x + self.down(y) * scale, (*carry, y.mean())

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))

    def forward(self, x):
        x, carry = self.first(x), ()
        for block in (*self.blocks, self.blocks[1]):
            x, carry = block(x, scale=torch.ones(16) * 0.5, carry=carry)
        return self.last(x).square().mean() + sum(carry)


def _own_blocks(rank, world, stage, budgets, extra):
    import deepc

    out = []
    for budget in budgets:
        torch.manual_seed(0)
        cfg = tiny.config(stage, micro=32) | extra | ({} if budget is None else {KEY: {"budget": budget}})
        engine = deepc.initialize(model=Blocks(), config=cfg)[0]
        losses = []
        for step in range(4):
            torch.manual_seed(10 * step + rank)
            loss = engine(torch.randn(32, 8))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        state = {n: t.clone() for n, t in engine.module_state_dict().items()}
        out.append((losses, state, engine.recomputation.stats()))
        copied = copy.deepcopy(engine.module) if stage == 0 else None
        if copied is not None:  # runs with weights of its own
            with torch.no_grad():
                copied.blocks[0].down.weight.zero_()
            assert copied(torch.ones(2, 8)).requires_grad
        assert {type(b).__name__ for b in engine.module.blocks} == {"Block"}
        engine.destroy()
        assert all(type(b) is Blocks.Block for b in engine.module.blocks), "destroy leaves them as they were"
    return out


@pytest.mark.parametrize(
    "stage, world, streamed",
    [
        (0, 1, False),
        *(pytest.param(stage, 2, False, marks=pytest.mark.full) for stage in (1, 2)),
        (3, 2, False),
        (3, 2, True),
    ],
)
def test_zero_stages_have_the_same_bits(stage, world, streamed):
    budgets = (None, "1GB", 50_000, 100_000)
    env = {"DEEPC_LOG_LEVEL": "WARNING"} | ({"DEEPC_STREAMED": "1"} if streamed else {})
    extra = {"gradient_accumulation_steps": 2, "train_batch_size": 64 * world}
    for plain, *others in _run_ranks(_own_blocks, world, args=(stage, budgets, extra), env=env):
        counts = [stats["recomputed"] for _, _, stats in others]
        assert counts[0] == 0 < counts[2] < counts[1] <= 5
        for losses, state, _ in others:
            assert losses == plain[0]
            for name, value in state.items():
                assert torch.equal(value, plain[1][name]), name


class Stateful(nn.Module):
    """Blocks with state in buffers that a training forward changes: in place by a kernel and by operators, by a new
    tensor, from None, and shared by two modules."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=0.3)
            self.zero, self.still = (
                nn.Linear(8, 8),
                nn.BatchNorm1d(8),
            )  # whose mean stays what it is in the first forward
            nn.init.zeros_(self.zero.weight)
            nn.init.zeros_(self.zero.bias)
            self.register_buffer("graph", torch.eye(8).to_sparse())
            self.old = nn.utils.spectral_norm(nn.Linear(8, 8))
            self.new = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
            self.register_buffer("mean", torch.ones(8))
            self.register_buffer("last", None)
            self.register_buffer("constant", torch.tensor([float("nan"), 1.0]))
            self.norm.register_buffer("seen", torch.zeros(()))
            self.old.register_buffer("seen", self.norm.seen)

        def forward(self, x):
            x = x + self.still(self.zero(torch.sparse.mm(self.graph, x.t()).t()))
            h = self.new(self.old(self.norm(self.lin(x)).tanh()).tanh())
            if self.training:
                self.mean = 0.5 * self.mean + 0.5 * h.detach().mean(0)
                self.norm.seen += 1.0
                h = h if self.last is None else h + self.last
                self.last = h.detach().mean(0)
            return x + (h - self.mean) / self.old.seen.clamp(min=1) * self.constant[1]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def _stateful(rank, world, budgets, extra):
    import deepc

    out = []
    for budget in budgets:
        torch.manual_seed(0)
        engine = deepc.initialize(model=Stateful(), config=config(budget) | extra)[0]
        losses = []
        for step in range(8):
            torch.manual_seed(step + 8 * rank)
            loss = engine(torch.randn(32, 8))
            engine.backward(loss)
            losses.append(loss.item())
            engine.step()
        buffers = {n: t.clone() for n, t in engine.module.named_buffers()}
        state = {n: t.clone() for n, t in engine.module_state_dict().items()}
        out.append((losses, buffers, state, engine.recomputation.stats()))
        engine.destroy()
    return out


@pytest.mark.parametrize(
    "world, stage",
    [(1, 0), *(pytest.param(*on, marks=pytest.mark.full) for on in ((2, 1), (2, 2), (2, 3)))],
)
def test_buffers_that_forwards_change_are_those_of_no_recomputation(world, stage):
    """Blocks wrote into them a second time in backward, and a spectral norm's weight was another one there."""
    extra = {"gradient_accumulation_steps": 2, "train_batch_size": 8 * world, "zero_optimization": {"stage": stage}}
    generous = run_ranks(_stateful, world, ["1TB"], extra)[0][0][-1]
    least, whole = generous["least_bytes"], generous["whole_bytes"]
    for plain, *others in run_ranks(_stateful, world, [None, least, (least + whole) // 2], extra):
        assert plain[1]["blocks.0.norm.num_batches_tracked"] == plain[1]["blocks.0.norm.seen"] == 8
        for (losses, buffers, state, stats), least_of in zip(others, (4, 1), strict=True):
            assert stats["recomputed"] >= least_of
            assert losses == plain[0]
            for got, before in ((buffers, plain[1]), (state, plain[2])):
                assert got.keys() == before.keys()
                for name, value in got.items():
                    assert torch.equal(value.to_dense().nan_to_num(9), before[name].to_dense().nan_to_num(9)), name


def test_a_backward_that_is_run_twice_finds_the_same_buffers():
    torch.manual_seed(0)
    model = Stateful()
    by = Recomputation(model, 10**9)
    x = torch.randn(32, 8)
    with by.around(x):  # the first forward, which recomputes all
        loss = model(x)
    seen = {n: (t, t._version, t.clone()) for n, t in model.named_buffers()}
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    by.close()
    assert all(map(torch.equal, first, second))
    for name, t in model.named_buffers():
        was, version, values = seen[name]
        assert (
            t is was
            and t._version == version
            and torch.equal(t.to_dense().nan_to_num(9), values.to_dense().nan_to_num(9))
        ), name


def test_modules_that_begin_to_train_are_looked_at_again():
    """A batch norm whose statistics were frozen at first."""

    def losses(recomputed):
        torch.manual_seed(0)
        model = Stateful()
        by = Recomputation(model, 10**9) if recomputed else None
        out = []
        for step in range(4):
            for block in model.blocks:
                block.norm.train(step > 1)
            x = torch.randn(32, 8)
            if by is not None:
                by._plans.clear()  # each forward recomputes all
            with by.around(x) if by is not None else contextlib.nullcontext():
                loss = model(x)
            loss.backward()
            out += [loss.item(), *(p.grad.sum().item() for p in model.parameters())]
        if by is not None:
            by.close()
        return out, [t.to_dense().nan_to_num(9).tolist() for t in model.buffers()]

    assert losses(True) == losses(False)


def test_a_buffer_that_some_forwards_change_is_an_error():
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.calls = nn.Linear(8, 8), 0
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x):
            self.calls += 1
            if self.calls == 3:  # the second forward's: the first one has run twice
                self.scale.mul_(2)
            return self.lin(x) * self.scale

    model = nn.Sequential(Counts(), Counts())
    by = Recomputation(model, 10**9)
    x = torch.randn(4, 8)
    with by.around(x):
        loss = model(x).sum()
    loss.backward()
    by._plans.clear()
    with pytest.raises(ConfigError, match="a forward of Counts has changed its buffer 'scale'"), by.around(x):
        model(x)
    by.close()


def test_inputs_of_recomputed_blocks_may_lie_on_disk(tmp_path):
    """Together with cpu_checkpointing on a folder: the same bits."""
    found = []
    for more in ({}, {"cpu_checkpointing": True}):
        import deepc

        torch.manual_seed(0)
        cfg = config(40_000) | {"deepc": {"activations": {"nvme_path": str(tmp_path), "min_bytes": 1024}}}
        cfg[KEY] |= more
        engine = deepc.initialize(model=Blocks(), config=cfg)[0]
        for step in range(3):
            torch.manual_seed(step)
            engine.backward(engine(torch.randn(32, 8)))
            engine.step()
        assert engine.recomputation.stats()["recomputed"] >= 4
        found.append({n: t.clone() for n, t in engine.module_state_dict().items()})
        assert (engine.activations.stats()["bytes_written"] > 0) == bool(more)
        engine.destroy()
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])


def test_streamed_parameters_are_not_counted():
    """What autograd saves of a parameter is a recipe there: the plan is the one of parameters that stay."""
    for kept, streamed in zip(
        _run_ranks(_one_plan, 2, env={"DEEPC_LOG_LEVEL": "WARNING"}),
        _run_ranks(_one_plan, 2, env={"DEEPC_LOG_LEVEL": "WARNING", "DEEPC_STREAMED": "1"}),
        strict=True,
    ):
        assert {k: v for k, v in kept.items() if k != "seconds"} == {
            k: v for k, v in streamed.items() if k != "seconds"
        }


def _one_plan(rank, world):
    return _own_blocks(rank, world, 3, ("1GB",), {})[0][2]


def test_two_engines_of_one_model_are_one_recomputation():
    """A second one (Trainer's for evaluation) leaves the blocks to the first."""
    import deepc

    engine = deepc.initialize(model=make("llama"), config=config("1GB"))[0]
    other = Recomputation(engine.module, 10**9)
    assert other.budget is None
    other.close()
    ids = torch.randint(97, (4, 48))
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    assert engine.recomputation.stats()["calls"] == 5
    engine.destroy()


@pytest.mark.parametrize("model", [Blocks, lambda: make("llama")])
def test_blocks_of_an_owner_that_is_gone_are_taken_again(model):
    model = model()
    blocks = len(Recomputation(model, 10**9)._blocks)  # never closed
    gc.collect()
    again = Recomputation(model, 10**9)
    assert again.budget == 10**9 and len(again._blocks) == blocks >= 4
    again.close()
    assert not any(isinstance(v, Hand) for m in model.modules() for v in m.__dict__.values())


def test_longer_batches_are_measured_and_shorter_ones_keep_more():
    import deepc

    torch.manual_seed(0)
    engine = deepc.initialize(model=Blocks(), config=config(200_000))[0]

    def peak(rows):
        engine.backward(engine(torch.randn(rows, 8)))
        engine.step()
        return engine.recomputation.stats()

    small = peak(4)
    assert small["recomputed"] == 0
    large = peak(64)
    assert large["recomputed"] > 0 and large["peak_bytes"] <= 200_000 < large["whole_bytes"]
    assert peak(60) == large, "one that is a little smaller has its plan"
    with torch.no_grad():
        engine(torch.randn(64, 8))
    with pytest.raises(ConfigError, match="less than this forward needs"):
        engine(torch.randn(4096, 8))
    assert peak(64)["recomputed"] == large["recomputed"], "and the engine goes on"
    engine.destroy()


class TestRefusals:
    @pytest.mark.parametrize("wrong", ["8 apples", 0, -1, True, "", [1], "GB"])
    def test_what_is_no_size(self, wrong):
        import deepc

        with pytest.raises(ConfigError, match=r"activation_checkpointing.budget.*number of bytes"):
            deepc.initialize(model=Blocks(), config=config() | {KEY: {"budget": wrong}})

    @pytest.mark.parametrize(
        "text, nbytes", [("8GB", 8 * 10**9), ("1.5 GiB", 3 << 29), ("500 mib", 500 << 20), (12345, 12345), ("7", 7)]
    )
    def test_what_is_one(self, text, nbytes):
        from deepc.config.tree import Config

        assert Config.load(config() | {KEY: {"budget": text}}, world_size=1).activation_checkpointing.budget == nbytes

    def test_a_model_that_recomputes_already(self):
        import deepc

        model = make("llama")
        model.gradient_checkpointing_enable()
        with pytest.raises(ConfigError, match="recomputes already"):
            deepc.initialize(model=model, config=config("1GB"))

    @pytest.mark.parametrize("how", ["plain", "reentrant"])
    def test_a_model_that_calls_a_checkpoint_around_its_blocks(self, how):
        import deepc

        engine = deepc.initialize(model=tiny.make_model(recompute=how), config=config("1GB"))[0]
        with pytest.raises(ConfigError, match="recomputes its Block already, by a checkpoint around it; leave torch"):
            engine.backward(engine(*tiny.make_batch(0, 4)))
        engine.destroy()

    def test_a_model_without_blocks(self):
        import deepc

        with pytest.raises(ConfigError, match="no torch.nn.ModuleList"):
            deepc.initialize(model=nn.Linear(3, 3), config=config("1GB"))


class InPlace(nn.Module):
    """Blocks that write into what they get: autograd takes that without a checkpoint."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.shift = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

        def forward(self, x, *, other=None):
            (x if other is None else other).add_(self.shift)
            return x + torch.tanh(self.lin(x))

    def __init__(self, named: bool) -> None:
        super().__init__()
        self.first, self.blocks, self.named = nn.Linear(8, 8), nn.ModuleList(self.Block() for _ in range(3)), named

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, other=x * 1.0) if self.named else block(x)
        return x.square().mean()


@pytest.mark.parametrize("named", [False, True])
def test_a_block_that_changes_what_it_gets_is_an_error(named):
    """Gradients were silently those of other values."""
    model, x = InPlace(named), torch.randn(4, 8)
    by = Recomputation(model, 10**9)
    with pytest.raises(ConfigError, match="forward of Block has changed a tensor that it was given"), by.around(x):
        model(x)
    model(x).backward()  # without a budget it trains
    by.close()


def test_batches_of_the_scripts_own_kinds_are_measured_too():
    """One that is larger followed the plan of a small one, whose tensors nobody had seen, beyond the budget."""

    @dataclasses.dataclass
    class Batch:
        rows: list

    class Own:
        def __init__(self, x):
            self.inside = {"x": collections.UserDict(x=x)}

    model = Blocks()
    model.forward = lambda b: Blocks.forward(model, b.rows[0] if isinstance(b, Batch) else b.inside["x"]["x"])
    for kind in (lambda x: Batch([x]), Own):
        by = Recomputation(model, 200_000)
        for rows, recomputed in ((4, False), (64, True)):
            batch = kind(torch.randn(rows, 8))
            with by.around(batch):
                loss = model(batch)
            loss.backward()
            assert (by.stats()["recomputed"] > 0) == recomputed
        by.close()


def test_a_whole_model_can_be_saved():
    model = Blocks()
    by = Recomputation(model, 10**9)
    for copied in (copy.deepcopy(model), *(pickle.loads(pickle.dumps(model, n)) for n in (2, 5))):
        assert [type(b) for b in copied.blocks] == [Blocks.Block] * 4
        assert not any(isinstance(v, Hand) for b in copied.blocks for v in b.__dict__.values())
        assert copied(torch.ones(2, 8)).requires_grad
    by.close()
