"""ZeRO-3's streamed mode: the same bits as resident mode (one node, by DEEPC_STREAMED=1) and as stage 2 (ranks that
share no memory), with units of parameters that come and go; and what a touch of a released parameter does."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle

import pytest
import tiny
import torch
import torch.nn.functional as F
from nethosts import Hosts, needs_hosts
from ranks import run_ranks as _run_ranks
from test_engine import same_bits
from test_nodes import on_node
from torch import nn
from torch.utils.checkpoint import checkpoint

NO_LIMITS = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
LIMITS = {
    "stage3_param_persistence_threshold": 100,
    "stage3_max_live_parameters": 30000,
    "stage3_prefetch_bucket_size": 15000,
    "stage3_max_reuse_distance": 20000,
}
TINY = {
    "plain": {},
    "tied+frozen": {"frozen": True},
    "unused": {"unused": True},
    "reused": {"reuse": True},
    "recompute": {"recompute": "plain"},
    "recompute-reentrant": {"recompute": "reentrant"},
    "all": {"frozen": True, "unused": True, "reuse": True, "recompute": "plain"},
    "all-reentrant": {"frozen": True, "unused": True, "reuse": True, "recompute": "reentrant"},
}


def run_ranks(fn, world, *args, **kw):
    return _run_ranks(fn, world, args=args, env={"DEEPC_LOG_LEVEL": "WARNING"}, **kw)


@contextlib.contextmanager
def streamed(on: bool = True):
    before = os.environ.get("DEEPC_STREAMED")
    os.environ["DEEPC_STREAMED"] = "1" if on else "0"
    try:
        yield
    finally:
        os.environ.pop("DEEPC_STREAMED")
        if before is not None:
            os.environ["DEEPC_STREAMED"] = before


# ---- models that use parameters in odd places ------------------------------------------------------------------------
class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Odd(nn.Module):
    """Options name what is odd. Input [b, 8]; returns the loss, by itself or in a dict."""

    def __init__(self, kind: str, width: int = 8) -> None:
        super().__init__()
        self.kind, self.rank = kind, 0
        self.inp = nn.Linear(width, width)
        self.experts = nn.ModuleList(Expert(width) for _ in range(4))
        self.table = nn.Parameter(torch.randn(width, width) * 0.1)
        self.scale = nn.ParameterList([nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))])
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.out = nn.Linear(width, width)
        if kind == "frozen base":
            for p in self.experts.parameters():
                p.requires_grad_(False)
        if kind == "tied across":
            self.experts[2].down.weight = self.experts[0].down.weight
            self.out.weight = self.inp.weight
        if kind == "members under vmap":
            self.members = nn.ParameterDict({"w": nn.Parameter(torch.randn(3, width, width) * 0.1)})
        if kind == "traced":
            self.traced = torch.jit.trace(Expert(width), torch.zeros(4, width))

    def _use(self, x):
        kind = self.kind
        if kind == "members under vmap":
            x = x + torch.vmap(lambda w: F.linear(x, w))(self.members["w"]).sum(0)
        if kind == "traced":
            x = x + self.traced(x)
        if kind == "rank-dependent":
            x = x + self.experts[self.rank](x)
            return x + self.experts[3](x) if self.rank else x
        for i, expert in enumerate(self.experts):
            if kind == "outside":
                x = (
                    x
                    + F.linear(F.gelu(F.linear(x, expert.up.weight, expert.up.bias)), expert.down.weight)
                    * self.experts[0].down.bias
                )
            elif kind == "recompute a lambda":
                x = x + checkpoint(
                    lambda h, e=expert: F.linear(h, e.up.weight)[..., : h.shape[-1]] @ self.table,
                    x,
                    use_reentrant=i % 2 == 0,
                )
            else:
                x = x + expert(x)
        return x

    def forward(self, x):
        h = self.inp(x)
        h = h + self.attention(h[None], h[None], h[None], need_weights=False)[0][0]
        h = self._use(h)
        h = h * self.scale[0] + self.scale[1] + h @ self.table.t()
        if self.kind == "loss in an attribute":
            self.extra = sum(e.up.weight.square().mean() * e(h).square().mean() for e in self.experts)
            h = h.detach()
        if self.kind == "in place":
            h = self.out(h)
            h += 1
            h.mul_(2)
        else:
            h = self.out(h)
        loss = (h - x).square().mean()
        return {"loss": loss, "rest": [h, None]} if self.kind == "dict" else loss


ODD = [
    "outside",
    "rank-dependent",
    "loss in an attribute",
    "dict",
    "in place",
    "tied across",
    "frozen base",
    "recompute a lambda",
    "two losses",
    "evaluated between",
    "members under vmap",
    "traced",
]


def _odd_training(rank, world, cfg, kind, steps=3):
    """(losses, weights, first gradients, streamed stats or {})."""
    import deepc

    torch.manual_seed(1)
    model = Odd(kind)
    model.rank = rank
    engine = deepc.initialize(model=model, config=cfg)[0]
    losses, grads = [], {}
    for step in range(steps):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))
        out = engine(x)
        loss = out["loss"] if kind == "dict" else out
        if kind == "loss in an attribute":
            loss = loss + model.extra
        if kind == "two losses":
            engine.backward(loss, retain_graph=True)
            loss = engine(x * 2) + loss
        if kind == "evaluated between":
            with torch.no_grad():
                losses.append(engine(x + 1).item())
                losses.append(engine.module.experts[1](x).sum().item())
        engine.backward(loss)
        losses.append(loss.item())
        if step == 0:
            grads = {n: engine.full_grad(p) for n, p in model.named_parameters() if p.requires_grad}
        engine.step()
    state = {n: t.clone() for n, t in model.state_dict().items()}
    stats = engine.state.streamed.stats() if engine.plan.mode == "streamed" else {}
    engine.destroy()
    return losses, state, grads, stats


def _tiny_training(rank, world, cfg, options, steps=3):
    import deepc

    engine = deepc.initialize(model=tiny.make_model(layers=4, **options), config=cfg)[0]
    micro, gas = cfg["train_micro_batch_size_per_gpu"], cfg["gradient_accumulation_steps"]
    losses, grads = [], {}
    for step in range(steps):
        for m in range(gas):
            x, y = tiny.make_batch(gas * step + m, micro * world)
            loss = engine(x[rank * micro :][:micro], y[rank * micro :][:micro])
            engine.backward(loss)
            losses.append(loss.item())
            if step == 0 and m == gas - 1:
                grads = {n: engine.full_grad(p) for n, p in engine.module.named_parameters() if p.requires_grad}
            engine.step()
    state = {n: t.clone() for n, t in engine.module.state_dict().items()}
    stats = engine.state.streamed.stats() if engine.plan.mode == "streamed" else {}
    engine.destroy()
    return losses, state, grads, stats


def same(a, b):
    assert a[0] == b[0]
    same_bits(a[1], b[1])
    same_bits(a[2], b[2])


# ---- the same bits ---------------------------------------------------------------------------------------------------
def _against_resident(rank, world, train, cases, base, zero):
    import deepc

    out = {}
    for name, case in cases.items():
        runs = []
        for on in (False, True):
            cfg = {**base, "zero_optimization": {**base["zero_optimization"], **zero}}
            before = deepc.counters()["gather_bytes"]
            with streamed(on):
                runs.append(train(rank, world, cfg, case))
            runs.append(deepc.counters()["gather_bytes"] - before)
        out[name] = runs
    return out


def check(ranks, persistent=False):
    for by_name in ranks:
        for name, (resident, none, run, moved) in by_name.items():
            try:
                same(resident, run)
            except AssertionError as exc:
                raise AssertionError(f"{name}: {exc}") from exc
            stats = run[3]
            assert none == 0 and moved > 0, name
            assert stats["live_elems"] == stats["persistent_elems"], (name, stats)
            assert (stats["persistent_elems"] > 0) == persistent


@pytest.mark.parametrize(
    "world, zero, kinds",
    [
        pytest.param(2, NO_LIMITS, list(TINY), marks=pytest.mark.full),
        (2, LIMITS, ["plain", "unused", "recompute", "all-reentrant"]),
        (1, LIMITS, ["all"]),
        pytest.param(3, LIMITS, ["all"], marks=pytest.mark.full),
    ],
    ids=["2", "2-limits", "1-limits", "3-limits"],
)
def test_the_same_bits_as_resident_mode(world, zero, kinds):
    cases = {n: TINY[n] for n in kinds}
    ranks = run_ranks(
        _against_resident, world, _tiny_training, cases, tiny.config(3, micro=2, deepc={"bucket_elems": 8192}), zero
    )
    check(ranks, persistent=zero is LIMITS)
    for by_name in ranks:
        for name, (_, _, (_, _, _, stats), _) in by_name.items():
            if zero is LIMITS:
                assert stats["live_elems_max"] <= zero["stage3_max_live_parameters"] and stats["prefetched"] > 0, (
                    name,
                    stats,
                )


@pytest.mark.parametrize("precision, gas", [("bf16", 2), pytest.param("fp16", 1, marks=pytest.mark.full)])
def test_16_bit_and_accumulation(precision, gas):
    base = tiny.config(3, micro=2, gas=gas, precision=precision, deepc={"bucket_elems": 8192})
    check(
        run_ranks(_against_resident, 2, _tiny_training, {n: TINY[n] for n in ("plain", "all")}, base, LIMITS),
        persistent=True,
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "zero",
    [
        NO_LIMITS,
        {**LIMITS, "stage3_max_live_parameters": 600, "stage3_param_persistence_threshold": 8},
    ],
    ids=["none", "limits"],
)
def test_parameters_in_odd_places(zero):
    ranks = run_ranks(
        _against_resident,
        2,
        _odd_training,
        {k: k for k in ODD},
        tiny.config(3, micro=4, deepc={"bucket_elems": 8192}),
        zero,
    )
    check(ranks, persistent=zero is not NO_LIMITS)
    touched = ranks[0]["outside"][2][3]["touches"]
    assert touched > 0, "parameters outside of their modules are found when they are touched"
    assert ranks[0]["dict"][2][3]["blocked"] == 0, "nothing but the unit refers to its storage"


# ---- what is there, and when -----------------------------------------------------------------------------------------
def _memory(rank, world, zero, recompute):
    import deepc

    cfg = tiny.config(3, micro=2)
    cfg["zero_optimization"].update(zero)
    with streamed():
        engine = deepc.initialize(model=tiny.make_model(width=64, layers=8, recompute=recompute), config=cfg)[0]
    manager, rows = engine.state.streamed, []
    for step in range(4):
        x, y = tiny.make_batch(step, 2 * world)
        before = manager.stats()
        loss = engine(x[2 * rank :][:2], y[2 * rank :][:2])
        held = {n for n, p in engine.module.named_parameters() if engine.state.is_available(p)}
        storages = sum(u.storage.nbytes() for u in manager._units)
        engine.backward(loss)
        engine.step()
        after = manager.stats()
        rows.append(
            {
                "held": held,
                "storages": storages,
                **{k: after[k] - before[k] for k in ("gathers", "prefetched", "order_misses", "gathered_elems")},
            }
        )
    stats = manager.stats()
    engine.destroy()
    return stats, rows


@pytest.mark.parametrize("recompute", [None, pytest.param("plain", marks=pytest.mark.full), "reentrant"])
def test_a_fraction_of_the_model_is_gathered_at_a_time(recompute):
    for stats, rows in run_ranks(_memory, 2, NO_LIMITS, recompute):
        assert stats["units"] == 9 and stats["live_elems_max"] < 0.3 * stats["total_elems"]
        assert stats["blocked"] == 0
        assert rows[0]["storages"] == 0, "after forward all is released"
        for row in rows:
            assert not row["held"] and row["prefetched"] == 0
            assert row["storages"] < 0.05 * 4 * stats["total_elems"], "but for what backward uses first"


def test_prefetch_follows_the_recorded_order_within_its_limits():
    total = run_ranks(_memory, 1, NO_LIMITS, None)[0][0]["total_elems"]
    limit = total // 3
    zero = {**NO_LIMITS, "stage3_prefetch_bucket_size": total // 8, "stage3_max_live_parameters": limit}
    for stats, rows in run_ranks(_memory, 2, zero, None):
        assert rows[0]["prefetched"] == 0
        for row in rows[1:]:
            assert row["prefetched"] >= 8 and row["order_misses"] == 0
        assert stats["live_elems_max"] <= limit
    small = {
        **NO_LIMITS,
        "stage3_prefetch_bucket_size": 10**9,
        "stage3_param_persistence_threshold": 4000,
    }  # the root's unit has nothing left
    for stats, rows in run_ranks(_memory, 2, small, None):
        assert (
            stats["units"] == 9 and stats["persistent_elems"] > 4000 and all(row["prefetched"] >= 7 for row in rows[1:])
        )
    keep = {**NO_LIMITS, "stage3_max_reuse_distance": 10**9}
    for stats, rows in run_ranks(_memory, 2, keep, None):
        assert rows[-1]["gathers"] == stats["units"], "with room for all each unit comes once a step"
        assert stats["live_elems_max"] == stats["total_elems"]
        assert all(len(row["held"]) == 0 for row in rows), "kept units are guarded as well"


def test_order_of_uses():
    from deepc.plan.order import order_of

    order = order_of([0, 1, 2, 1, 0], [10, 10, 10], 10, 30, 0)
    assert order.ahead == ((1,), (2,), (), (0,), ()) or all(len(a) <= 1 for a in order.ahead)
    assert order.keep[-1] is False and not any(order.drop)
    kept = order_of([0, 1, 2, 1, 0], [10, 10, 10], 0, 30, 100)
    assert kept.keep == (True, True, False, False, False) and not any(kept.ahead)


def test_units():
    from deepc.plan.units import cut
    from deepc.zero.streamed.units import tree_of

    def units_of(model):
        tree, modules = tree_of(model)
        made = cut(tree, {id(p): p.numel() for p in model.parameters()})
        return made, modules, {modules[node]: used for node, used in made.needs.items()}

    model = Odd("tied across")
    made, modules, needs = units_of(model)
    names = [u.name for u in made.units]
    assert names[0] == "(root)" and {f"experts.{i}" for i in range(4)} <= set(names)
    assert sum(len(u.params) for u in made.units) == len(list(model.parameters()))
    assert [modules[b] for b in made.blocks] == list(model.experts)
    first = names.index("experts.0")
    assert needs[model.experts[2].down] == [first], "a tied parameter's unit is used by the module that has it as well"
    assert model.out in needs
    for kind in ("members under vmap", "traced"):  # nothing sees the use of such parameters but their parent's hooks
        odd = Odd(kind)
        made, _, needs = units_of(odd)
        mine = {id(p) for n, p in odd.named_parameters() if n.startswith(("members", "traced", "scale"))}
        of_call = [p for m in (odd, getattr(odd, "traced", odd)) for i in needs[m] for p in made.units[i].params]
        assert mine <= set(of_call), kind


@pytest.mark.parametrize("root", [False, True])
def test_modules_without_hooks_are_told(root):
    import deepc
    from deepc.errors import UnsupportedError

    scripted, config = torch.jit.script(nn.Linear(8, 8)), tiny.config(3, micro=4)
    with (
        streamed(),
        pytest.raises(UnsupportedError, match="the model is of torch" if root else r"'1'.*torch\.jit\.script"),
    ):
        deepc.initialize(model=scripted if root else nn.Sequential(nn.Linear(8, 8), scripted), config=config)


# ---- touches ---------------------------------------------------------------------------------------------------------
def _touches(rank, world):
    import deepc
    from deepc.errors import ReleasedParameterError, StrayWriteError

    cfg = tiny.config(3, micro=4)
    cfg["zero_optimization"].update(NO_LIMITS)
    with streamed():
        engine = deepc.initialize(model=Odd("plain"), config=cfg)[0]
    p = engine.module.experts[1].up.weight
    x = torch.randn(4, 8)
    expert = {"up.weight": (16, 8), "up.bias": (16,), "down.weight": (8, 16), "down.bias": (8,)}
    touches = {
        "add": lambda: p + 1,
        "radd": lambda: 1 + p,
        "mul": lambda: torch.mul(x[:1], p),
        "linear": lambda: F.linear(x, p),
        "matmul": lambda: x @ p.t(),
        "data": lambda: p.data,
        "set data": lambda: setattr(p, "data", x),
        "data_ptr": lambda: p.data_ptr(),
        "numpy": lambda: p.detach().numpy(),
        "clone": lambda: p.clone(),
        "in place": lambda: nn.init.zeros_(p),
        "foreach": lambda: torch._foreach_add([p], 1),
        "stack": lambda: torch.stack([p, p]),
        "item": lambda: p[0, 0].item(),
        "iterate": lambda: list(p),
        "tolist": lambda: p.tolist(),
        "vector": lambda: nn.utils.parameters_to_vector([p]),
        "storage": lambda: p.untyped_storage(),
        "to": lambda: p.to(torch.float64),
        "copy": lambda: x.new_zeros(16, 8).copy_(p),
        "bool": lambda: bool(p.sum() > 0),
        "equal": lambda: torch.equal(p, p),
        "out": lambda: torch.add(x[0], 1, out=p),
        "load": lambda: engine.module.experts[1].load_state_dict({k: torch.zeros(s) for k, s in expert.items()}),
    }
    wrong = {}
    for name, touch in touches.items():
        try:
            wrong[name] = repr(touch())
        except (ReleasedParameterError, RuntimeError) as exc:  # Module.load_state_dict wraps it
            if "experts.1.up.weight" not in str(exc) or "GatheredParameters" not in str(exc):
                wrong[name] = str(exc)
    assert not wrong, wrong
    # What a parameter is can be asked.
    assert (
        p.shape == (16, 8)
        and p.dtype == torch.float32
        and p.numel() == 128
        and p.size(0) == 16
        and p.dim() == 2
        and len(p) == 16
    )
    assert (
        isinstance(p, nn.Parameter)
        and "released" in repr(p)
        and p.is_leaf
        and p.device.type == "cpu"
        and p.requires_grad
        and p.grad is None
    )
    assert (
        "Odd" in repr(engine.module)
        and p.stride() == (8, 1)
        and p.is_contiguous()
        and p in {p}
        and p.is_floating_point()
        and torch.is_floating_point(p)
        and torch.numel(p) == 128
    )
    twin = copy.deepcopy(engine.module)
    assert type(twin.experts[1].up.weight) is nn.Parameter and twin(x).item() == engine(x).item()
    # Views that outlive their unit's use keep its storage, and the values stay readable.
    hook = engine.module.experts[1].register_forward_hook(
        lambda m, a, o: setattr(engine, "kept", m.up.weight.detach().t())
    )
    loss = engine(x)
    hook.remove()
    kept = engine.__dict__.pop("kept")
    with deepc.zero.GatheredParameters([p]):
        assert torch.equal(kept, p.t())
    assert kept.sum().isfinite() and engine.state.streamed.stats()["blocked"] > 0
    del kept
    engine.backward(loss)
    assert engine.step().applied
    assert engine.state.streamed.stats()["live_elems"] == 0
    # One context that is entered twice is left twice.
    gathered = deepc.zero.GatheredParameters([p])
    with gathered:
        with gathered:
            p + 1
        p + 1
    assert engine.state.streamed.stats()["live_elems"] == 0
    # A forward that raises leaves nothing behind.
    with pytest.raises(RuntimeError, match="mat1"):
        engine(torch.randn(4, 9))
    assert not engine.state.streamed._frames and not any(u.uses for u in engine.state.streamed._units)
    with pytest.raises(ReleasedParameterError):
        p + 1
    # An old graph, and a write that is no one's.
    loss = engine(x)
    engine.backward(loss, retain_graph=True)
    engine.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    engine.zero_grad()
    with pytest.raises(StrayWriteError, match="experts.1.up.weight"):
        with deepc.zero.GatheredParameters([p]), torch.no_grad():
            p.mul_(2)
    engine.destroy()
    assert torch.equal(pickle.loads(pickle.dumps(p)), p)  # an ordinary one, which refers to nothing of the engine's
    return p.sum().item()  # readable again


def test_a_touch_of_a_released_parameter_raises_and_names_it():
    a, b = run_ranks(_touches, 2)
    assert a == b


# ---- a call that does not come to its end ----------------------------------------------------------------------------
def _interrupted(rank, world, recompute):
    """^C inside of a module: in engines' forwards and backwards, in a call of the model by itself, without gradients.
    Behind each none of its modules is taken for a running one, and training goes on as if there had been none."""
    import deepc
    from deepc.core.foreign import private
    from deepc.errors import ReleasedParameterError

    countdown, runs = 0, []

    def interrupt(module, args, output):
        nonlocal countdown
        countdown -= 1
        if countdown == 0:
            raise KeyboardInterrupt

    def after(calls, what):
        nonlocal countdown
        countdown = calls
        with pytest.raises(KeyboardInterrupt):
            what()

    cfg = tiny.config(3, micro=2)
    cfg["zero_optimization"].update(NO_LIMITS)
    for stops in (False, True):
        model = tiny.make_model(recompute=recompute, layers=3)
        with streamed():
            engine = deepc.initialize(model=model, config=cfg)[0]
        units = engine.state.streamed
        model.blocks[1].up.register_forward_hook(interrupt)

        def idle(model=model, units=units):
            assert not units._frames and private.top_saved_hooks(True) is None
            assert units.stats()["live_elems"] == 0 and not any(u.uses for u in units._units)
            with pytest.raises(ReleasedParameterError):
                model.blocks[0].up.weight.sum()

        losses = []
        for step in range(3):
            x, y = tiny.make_batch(step, 2)
            if stops:
                after(1, lambda x=x, y=y: engine(x, y))
                idle()
                after(1, torch.no_grad()(lambda x=x, y=y: engine(x, y)))
                idle()
                after(1, lambda x=x, y=y: deepc.inference(engine)(x, y))
                idle()
                after(1, lambda x=x, y=y: model(x, y))
                if recompute:
                    loss = engine(x, y)  # the call before ends here at the latest
                    after(1, lambda loss=loss: engine.backward(loss))
                    assert not units._frames and private.top_saved_hooks(True) is None
                    engine.zero_grad()
            loss = engine(x, y)
            engine.backward(loss)
            idle()
            engine.step()
            losses.append(loss.item())
        runs.append(losses)
        if stops:
            after(1, lambda x=x, y=y: model(x, y))
        engine.destroy()
        assert private.top_saved_hooks(True) is None
    assert runs[0] == runs[1]
    return True


@pytest.mark.parametrize("recompute", [None, "plain", pytest.param("reentrant", marks=pytest.mark.full)])
def test_a_call_that_is_interrupted_leaves_nothing(recompute):
    assert all(run_ranks(_interrupted, 1, recompute))


# ---- reading and writing from outside --------------------------------------------------------------------------------
def _no_memory(rank, world):
    """A forward for which there is no memory, of a unit that it needs or of one that is gathered ahead: run again it
    has the values that it has without that, and nothing stays."""
    import deepc
    from deepc.zero.parameters.param import FlatUnit

    countdown, allocate, found = 0, FlatUnit._allocate, []

    def no_room(unit):
        nonlocal countdown
        countdown -= 1
        if countdown == 0:
            raise torch.OutOfMemoryError("[made by the test]")
        unit.storage.resize_(unit.nbytes)
        unit.flat.fill_(float("nan"))

    cfg = tiny.config(3, micro=2)
    cfg["zero_optimization"].update({**NO_LIMITS, "stage3_prefetch_bucket_size": 30000})
    FlatUnit._allocate = no_room
    try:
        for fails_at in range(7):
            with streamed():
                engine = deepc.initialize(model=tiny.make_model(layers=4), config=cfg)[0]
            units, losses, failed = engine.state.streamed, [], 0
            for step in range(4):
                x, y = tiny.make_batch(step, 2)
                countdown = fails_at if step > 1 else 0
                try:
                    loss = engine(x, y)
                except torch.OutOfMemoryError:
                    failed += 1
                    assert not any(u.uses for u in units._units)
                    assert units.live_elems == sum(u.elems for u in units._units if u.live)
                    loss = engine(x, y)
                countdown = 0
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
                assert units.stats()["live_elems"] == 0
            found.append(losses)
            assert failed == (2 if fails_at else 0)
            engine.destroy()
    finally:
        FlatUnit._allocate = allocate
    assert found == found[:1] * 7
    return True


def test_a_forward_without_memory_is_run_again():
    assert all(run_ranks(_no_memory, 1))


def _access(rank, world, folder, transport):
    import deepc

    cfg = tiny.config(3, micro=2, precision="bf16")
    cfg["zero_optimization"].update(NO_LIMITS)
    place = on_node("a" if rank < 2 else "b") if transport == "c10d" else contextlib.nullcontext()
    with streamed(transport == "node"), place:
        engine = deepc.initialize(model=tiny.make_model(frozen=True, layers=3), config=cfg)[0]
        assert engine.plan.mode == "streamed" and engine.plan.transport == transport
        want = {n: t.to(torch.bfloat16) for n, t in tiny.make_model(frozen=True, layers=3).state_dict().items()}
        same_bits(dict(engine.module.state_dict()), want)
        same_bits({k: v for k, v in engine.module_state_dict().items()}, want)
        names = ["blocks.1.up.weight", "pos.weight", "blocks.0.ln1.weight"]
        params = [engine.module.get_parameter(n) for n in names]
        with deepc.zero.GatheredParameters(params):
            for n, p in zip(names, params):
                assert torch.equal(p.detach(), want[n]) and engine.state.is_available(p)
        assert not any(engine.state.is_available(p) for p in params)
        with deepc.zero.GatheredParameters(params, modifier_rank=1), torch.no_grad():
            for i, p in enumerate(params):
                p.fill_(i + 0.5 if rank == 1 else 77.0)
        for i, n in enumerate(names):
            want[n] = torch.full_like(want[n], i + 0.5)
        same_bits(dict(engine.module.state_dict()), want)
        assert torch.equal(engine.full_fp32_param(params[0]), want[names[0]].float())
        deepc.utils.safe_set_full_fp32_param(params[0], torch.full(params[0].shape, 0.25))
        want[names[0]] = torch.full_like(want[names[0]], 0.25)
        assert torch.equal(deepc.utils.safe_get_full_fp32_param(params[0]), want[names[0]].float())
        same_bits(dict(engine.module.state_dict()), want)
        # through a checkpoint, and from one of another stage
        x, y = tiny.make_batch(0, 2 * world)
        x, y = x[2 * rank :][:2], y[2 * rank :][:2]

        def train(e, steps=2):
            out = []
            for _ in range(steps):
                out.append(e(x, y))
                e.backward(out[-1])
                e.step()
            return [v.item() for v in out]

        train(engine)
        engine.save_checkpoint(folder, "streamed")
        engine.save_16bit_model(os.path.join(folder, "model"))
        saved, after = {n: t.clone() for n, t in engine.module.state_dict().items()}, train(engine)
        engine.load_checkpoint(folder, "streamed")
        same_bits(dict(engine.module.state_dict()), saved)
        assert train(engine) == after
        engine.load_module_state_dict(saved)
        same_bits(dict(engine.module.state_dict()), saved)
        engine.destroy()
    with streamed(False), on_node("a" if rank < 2 else "b") if transport == "c10d" else contextlib.nullcontext():
        cfg["zero_optimization"]["stage"] = 2
        other = deepc.initialize(model=tiny.make_model(5, frozen=True, layers=3), config=cfg)[0]
        other.load_checkpoint(folder, "streamed")
        same_bits(dict(other.module.state_dict()), saved)
        assert train(other) == after
        other.destroy()


def test_access_and_checkpoints(tmp_path):
    run_ranks(_access, 2, str(tmp_path), "node")


def test_access_and_checkpoints_without_shared_memory(tmp_path):
    run_ranks(_access, 3, str(tmp_path), "c10d")


# ---- many forwards ---------------------------------------------------------------------------------------------------
def _generate(rank, world):
    import deepc

    cfg = tiny.config(3, micro=2)
    cfg["zero_optimization"].update(NO_LIMITS)
    with streamed():
        engine = deepc.initialize(model=tiny.make_model(layers=3), config=cfg)[0]
    manager, (x, y) = engine.state.streamed, tiny.make_batch(0, 2)
    with torch.no_grad():
        want = engine(x, y).item()
        before = manager.stats()
        with engine.keep_gathered():
            with torch.inference_mode():
                assert engine(x, y).item() == want
            for _ in range(5 + rank):
                assert engine(x, y).item() == want
        after = manager.stats()
    assert after["gathers"] - before["gathers"] == after["units"] and after["live_elems"] == 0
    loss = engine(x, y)
    with engine.keep_gathered():
        engine.backward(loss)
        engine.step()
        now = engine(x, y).item()
    assert engine(x, y).item() == now != want, "a step inside: what is held is gathered again"
    engine.destroy()


def test_keep_gathered():
    run_ranks(_generate, 2)


# ---- torch.compile ---------------------------------------------------------------------------------------------------
def _compiled(rank, world):
    import deepc

    cfg = tiny.config(3, micro=2)
    cfg["zero_optimization"].update(NO_LIMITS)
    runs = {}
    for compiled in (False, True):
        with streamed():
            engine = deepc.initialize(model=tiny.make_model(layers=3), config=cfg)[0]
        if compiled:
            engine.compile(backend="aot_eager", fullgraph=True)
        runs[compiled] = []
        for step in range(3):
            x, y = tiny.make_batch(step, 2)
            loss = engine(x, y)
            engine.backward(loss)
            engine.step()
            runs[compiled].append(loss.item())
        stats = engine.state.streamed.stats()
        assert stats["live_elems_max"] < stats["total_elems"] and stats["live_elems"] == 0, stats
        if not compiled:
            with pytest.raises(Exception, match="per block"):
                torch.compile(engine.module, backend="aot_eager", fullgraph=True)(x, y)
            torch._dynamo.reset()
        engine.destroy()
    for a, b in zip(runs[False], runs[True]):
        assert abs(a - b) <= 1e-5 * abs(a), runs


def test_compile_per_block():
    run_ranks(_compiled, 1)


# ---- ranks that share no memory (nodes with different numbers of ranks): gathers are collective ----------------------
def _against_stage_2(rank, world, train, cases, zero, precision):
    import deepc

    out = {}
    with on_node("a" if rank < 2 else "b"), streamed(False):
        for name, case in cases.items():
            runs = []
            for stage in (2, 3):
                cfg = tiny.config(stage, micro=2, precision=precision, deepc={"bucket_elems": 12288})
                cfg["zero_optimization"].update(zero)
                before = deepc.counters()["gather_bytes"]
                runs.append(train(rank, world, cfg, case))
                runs.append(deepc.counters()["gather_bytes"] - before)
            out[name] = runs
    return out


@pytest.mark.parametrize(
    "precision, zero, names",
    [
        ("bf16", LIMITS, ["tied+frozen", "all-reentrant"]),
        pytest.param("bf16", LIMITS, ["plain"], marks=pytest.mark.full),
        pytest.param("fp32", NO_LIMITS, ["plain", "tied+frozen", "all-reentrant"], marks=pytest.mark.full),
    ],
)
def test_uneven_nodes_give_the_same_bits_as_stage_2(precision, zero, names):
    ranks = run_ranks(
        _against_stage_2,
        3,
        _tiny_training,
        {n: TINY[n] for n in names},
        zero,
        precision,
    )
    check(ranks, persistent=zero is LIMITS)


@pytest.mark.full
def test_uneven_nodes_and_parameters_in_odd_places():
    cases = {k: k for k in ("rank-dependent", "outside", "loss in an attribute", "frozen base", "evaluated between")}
    check(run_ranks(_against_stage_2, 3, _odd_training, cases, NO_LIMITS, "fp32"))


def _read_and_left(rank, world):
    """The sums of all parameters, twice: of ranks that have had other units last, and end when they have read."""
    import deepc

    class Turns(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x, which):
            for i in which:
                x = self.blocks[i](x)
            return x

    out = []
    cfg = tiny.config(3, micro=2)
    cfg["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    with on_node("a" if rank < 2 else "b"), streamed(False):
        for read in (
            lambda engine: [deepc.view(p).value for p in engine.module.parameters()],
            lambda engine: engine.module_state_dict().values(),
        ):
            torch.manual_seed(0)
            engine = deepc.initialize(model=Turns(), config=cfg)[0]
            assert engine.plan.sharded
            # backward has released all of them but the last ones
            engine(torch.ones(2, 8), [0, 1, 2, 3][: 4 if rank == 0 else 1])
            out.append([float(t.sum()) for t in read(engine)])
            engine.destroy()
    return out


def test_uneven_nodes_read_whole_parameters_together_whatever_each_has_of_them():
    first, *others = run_ranks(_read_and_left, 3)
    assert first[0] == first[1] and all(other == first for other in others)


def _over_nodes(rank, world, cases, zero):
    with on_node(f"n{rank}"):
        return _against_resident(
            rank, world, _tiny_training, cases, tiny.config(3, micro=2, deepc={"bucket_elems": 8192}), zero
        )


def test_equal_nodes():
    check(run_ranks(_over_nodes, 2, {n: TINY[n] for n in ("plain", "all")}, LIMITS), persistent=True)


def _over_a_network(rank, world, cases):
    return _against_stage_2(rank, world, _tiny_training, cases, LIMITS, "bf16")


@pytest.mark.full
@needs_hosts
def test_uneven_hosts():
    """Two ranks on one host and one on another, with a network between them."""
    with Hosts(2) as hosts:
        check(hosts.run(_over_a_network, [0, 0, 1], args=({"plain": {}},)), persistent=True)


# ---- models of transformers ------------------------------------------------------------------------------------------
def _transformer(kind):
    import transformers as tr

    torch.manual_seed(0)
    if kind == "gpt2":
        return tr.GPT2LMHeadModel(
            tr.GPT2Config(
                n_embd=32,
                n_layer=6,
                n_head=2,
                vocab_size=64,
                n_positions=32,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
            )
        )
    if kind == "mixtral":
        return tr.MixtralForCausalLM(
            tr.MixtralConfig(
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                vocab_size=64,
                max_position_embeddings=32,
                num_local_experts=4,
                num_experts_per_tok=2,
            )
        )
    return tr.T5ForConditionalGeneration(
        tr.T5Config(
            d_model=32,
            d_ff=64,
            num_layers=3,
            num_heads=2,
            d_kv=16,
            vocab_size=64,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


def _transformer_training(rank, world, cfg, case):
    import deepc

    kind, recompute = case
    model = _transformer(kind)
    if recompute is not None:
        model.gradient_checkpointing_enable({"use_reentrant": recompute == "reentrant"})
    engine = deepc.initialize(model=model.train(), config=cfg)[0]
    losses = []
    for step in range(2):
        x = torch.randint(1, 64, (2, 16), generator=torch.Generator().manual_seed(10 * step + rank))
        out = engine(input_ids=x, labels=x)
        engine.backward(out.loss)
        engine.step()
        losses.append(out.loss.item())
    del out
    stats = engine.state.streamed.stats() if engine.plan.mode == "streamed" else {}
    if kind == "gpt2":
        model.eval()
        with engine.keep_gathered():
            losses.append(model.generate(x[:, :4], max_new_tokens=4, do_sample=False, pad_token_id=0).tolist())
    state = {n: t.clone() for n, t in model.state_dict().items()}
    engine.destroy()
    return losses, state, {}, stats


@pytest.mark.full
def test_models_of_transformers():
    pytest.importorskip("transformers")
    cases = {f"{k} {r}": (k, r) for k in ("gpt2", "t5") for r in (None, "plain", "reentrant")} | {
        "mixtral": ("mixtral", None)
    }
    ranks = run_ranks(
        _against_resident,
        2,
        _transformer_training,
        cases,
        tiny.config(3, micro=2, deepc={"bucket_elems": 8192}),
        NO_LIMITS,
    )
    check(ranks)
    for name, (_, _, (_, _, _, stats), _) in ranks[0].items():
        if name != "mixtral":
            assert stats["live_elems_max"] < 0.5 * stats["total_elems"], (name, stats)
