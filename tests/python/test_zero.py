"""zero.Init and zero.GatheredParameters: what models may do while they are built, how much memory that takes, who may
write when; through transformers as well."""

from __future__ import annotations

import base64
import contextlib
import copy
import ctypes
import os
import sys
import time

import pytest
import tiny
import torch
from ranks import on_nodes
from ranks import run_quietly as run_ranks
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

MIB = 1 << 20


def anonymous_bytes() -> int:
    """Private memory of this process that is no file's and no shared segment's."""
    with open("/proc/self/smaps_rollup") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("Anonymous:"))


@contextlib.contextmanager
def watched():
    """Yields a function: bytes of private memory that were held at most, at any registration of a parameter since,
    above now. What malloc keeps of freed blocks is not held: glibc keeps up to twice the largest that it has unmapped,
    here or not by chance of the order."""
    malloc_trim = ctypes.CDLL(None).malloc_trim
    malloc_trim(0)
    base, peak = anonymous_bytes(), 0

    def sample(*_):
        nonlocal peak
        malloc_trim(0)
        peak = max(peak, anonymous_bytes() - base)

    handle = register_module_parameter_registration_hook(sample)  # before zero.Init's: the parameter is still private
    try:
        yield lambda: (sample(), peak)[1]
    finally:
        handle.remove()


def train_a_step(model, rank, world, loss_of, stage=3):
    import deepc

    engine = deepc.initialize(model=model, config=tiny.config(stage, micro=2))[0]
    engine.backward(loss_of(engine))
    assert engine.step().applied
    return engine


# ---- building --------------------------------------------------------------------------------------------------------
class Experts(nn.Module):
    """Makes all its parameters in one constructor, with values from the start."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.experts = nn.ParameterList()
        for _ in range(count):
            self.experts.append(nn.Parameter(torch.randn(width, width)))
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        for w in self.experts:
            x = self.norm(torch.relu(x @ w))
        return x.square().mean()


def _memory(rank, world, nodes):
    import deepc

    width, count = 1024, 20
    with on_nodes(rank, world, nodes), watched() as peak:
        with deepc.zero.Init():
            torch.manual_seed(rank)
            model = Experts(count, width)
            scratch = torch.rand(1)
        top = peak()
        values = [w.detach()[0, 0].item() for w in model.experts]
        if nodes == 1:
            engine = train_a_step(model, rank, world, lambda e: e(torch.ones(2, width)))
            assert all(w.ds_status is deepc.zero.ZeroParamStatus.AVAILABLE for w in model.experts)
            engine.destroy()
    return top, count * width * width * 4, values, float(scratch)


@pytest.mark.parametrize("world, nodes", [(2, 1), pytest.param(4, 2, marks=pytest.mark.full)])
def test_init_holds_one_parameter_at_a_time(world, nodes):
    torch.manual_seed(0)
    want = [w.detach()[0, 0].item() for w in Experts(20, 1024).experts]
    for rank, (top, total, values, scratch) in enumerate(run_ranks(_memory, world, nodes)):
        assert values == want
        assert top <= 2 * total // 20 + 4 * MIB, (
            f"rank {rank}: {top / MIB:.1f} MiB of private memory for a model of {total / MIB:.0f}"
        )


class Copied(nn.Module):
    """Layers that are deep copies of one, as nn.TransformerEncoder's; a weight put again into a parameter of its own.
    over: two Parameter objects over one memory, the second made before the first was registered, or behind it."""

    def __init__(self, over: str = "") -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.first.weight = nn.Parameter(self.first.weight.data)
        self.first.again = self.first.weight
        self.rest = nn.ModuleList(copy.deepcopy(self.first) for _ in range(2))
        if over == "behind":
            self.second = nn.Parameter(self.first.weight.data)
        if over == "before":
            self.third = nn.Parameter(values := torch.rand(3))
            self.second = nn.Parameter(values)

    def forward(self, x):
        return sum(p.square().sum() for p in self.parameters()) + 0 * x.sum()


def copied(rank, world):
    import deepc
    from deepc.errors import ConfigError
    from deepc.zero.parameters.gathered import built

    torch.manual_seed(5)
    for dtype in (torch.bfloat16, torch.float32):
        with deepc.zero.Init(dtype=dtype):
            model = Copied()
        assert all(p in built and p.dtype is dtype for p in model.parameters())
        assert all(m.again is m.weight for m in (model.first, *model.rest))
    engine = train_a_step(model, rank, world, lambda e: e(torch.ones(2)))
    state = {n: engine.full_fp32_param(p).clone() for n, p in model.named_parameters()}
    engine.destroy()
    for over in ("behind", "before"):
        with deepc.zero.Init():
            model = Copied(over)
        with pytest.raises(ConfigError, match="'(first.weight|third)' and 'second' shared? memory"):
            deepc.initialize(model=model, config=tiny.config(3, micro=2))
    return state


def _copied(rank, world, nodes):
    with on_nodes(rank, world, nodes):
        return copied(rank, world)


def check_copied(states):
    for state in states:
        assert all(torch.equal(state[f"rest.{i}.{n}"], state[f"first.{n}"]) for i in (0, 1) for n in ("weight", "bias"))


@pytest.mark.parametrize(
    "world, nodes",
    [(1, 1), (2, 1), pytest.param(2, 2, marks=pytest.mark.full), pytest.param(4, 2, marks=pytest.mark.full)],
)
def test_copies_and_second_objects_over_one_memory(world, nodes):
    check_copied(run_ranks(_copied, world, nodes))


class Odd(nn.Module):
    """What constructors do: weights of parents and children written again, by views, out=, operators, .data; parameters
    replaced and tied."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(17, 8, padding_idx=3)
        self.lin = nn.Linear(8, 8)
        nn.init.orthogonal_(self.lin.weight)
        nn.init.trunc_normal_(self.lin.bias, std=0.02)
        self.lstm = nn.LSTM(8, 8)
        self.free = nn.Parameter(torch.ones(4, 4))
        with torch.no_grad():
            self.free[1] = 2.0
            self.free[2].uniform_()
            self.free *= 3
            torch.add(self.free, 1, out=self.free)
            self.holes = nn.Parameter(torch.zeros(8, 8))
            self.holes[:, :4].normal_()  # a view with holes is drawn one number at a time
        self.free.data.mul_(0.5)
        self.given = nn.Parameter(torch.zeros(3))
        self.given.data = torch.rand(3)
        self.twice = nn.Parameter(torch.rand(2))
        self.twice = nn.Parameter(torch.rand(2))
        self.tied = self.lin.weight
        self.whole = nn.Parameter(torch.arange(5), requires_grad=False)
        self.register_parameter("none", None)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.lazy = nn.LazyLinear(3)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.listed = nn.ParameterDict({"a": nn.Parameter(torch.rand(2, 3))})
        self.register_buffer("running", torch.rand(3))
        self.apply(self._again)

    def _again(self, module) -> None:
        if isinstance(module, nn.Embedding):
            module.weight.data.normal_(std=0.5)
            module.weight.data[module.padding_idx].zero_()
        elif isinstance(module, nn.Linear) and not isinstance(module, nn.LazyLinear):
            nn.init.kaiming_uniform_(
                module.parametrizations.weight.original1 if hasattr(module, "parametrizations") else module.weight
            )


def _odd(rank, world, nodes):
    import deepc

    with on_nodes(rank, world, nodes):
        torch.manual_seed(5)  # as users do: then generators stay equal too
        with deepc.zero.Init():
            model = Odd()
            with deepc.zero.Init(dtype=torch.bfloat16):
                inner = nn.Linear(4, 4)
                with deepc.zero.Init(enabled=False):
                    still = nn.Linear(4, 4)
            outer = nn.Linear(4, 4)
        drawn = float(torch.rand(1))
        assert (
            model.tied is model.lin.weight and nn.parameter.is_lazy(model.lazy.weight) and model.empty.shape == (0, 4)
        )
        assert inner.weight.dtype == still.weight.dtype == torch.bfloat16 and outer.weight.dtype == torch.float32
        assert all(hasattr(p, "ds_id") for p in [*inner.parameters(), *outer.parameters(), model.free, model.given])
        model.lazy = None
        return {n: t.detach().clone() for n, t in model.state_dict().items()}, drawn


@pytest.mark.parametrize("world, nodes", [(1, 1), pytest.param(2, 1, marks=pytest.mark.full), (4, 2)])
def test_init_follows_whatever_constructors_do(world, nodes):
    torch.manual_seed(5)
    model = Odd()
    for shape in (nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)):
        assert shape is not None
    drawn = float(torch.rand(1))
    model.lazy = None
    want = model.state_dict()
    for state, their_draw in run_ranks(_odd, world, nodes):
        assert state.keys() == want.keys()
        for n, t in state.items():
            assert torch.equal(t, want[n]), n
        assert their_draw == drawn


class Redrawn(nn.Module):
    """Initializers that read what they have written, and draw by it or keep it. wait: called before each."""

    def __init__(self, wait) -> None:
        super().__init__()
        self.near = nn.Parameter(torch.full((40,), 9.0))  # what lies there before would all be redrawn
        self.far = nn.Parameter(torch.full((40,), 9.0))
        self.views = nn.Parameter(torch.full((6, 8), 9.0))
        self.other = nn.Parameter(torch.full((6, 8), 9.0))
        wait()
        nn.init.trunc_normal_(self.near, std=1.0, a=-1.0, b=1.0)
        wait()
        nn.init.trunc_normal_(self.far, std=0.1, a=0.15, b=1.0)
        wait()
        self.views.data.normal_()
        with torch.no_grad():
            for _ in range(20):
                outside = self.views.abs() > 1
                self.views[outside] = torch.randn(int(outside.sum()))
            self.views[0].zero_()
            while self.views.view(-1)[8:24].sum().abs() < 1:
                self.views.view(3, 16)[1].uniform_(-1, 1)
            torch.mul(self.views, 2, out=self.views)
        assert self.views.data.data_ptr() == self.views.detach().view(-1).data_ptr() == self.views.data_ptr()
        self.register_buffer("norm", self.views.norm().detach())
        wait()
        nn.init.xavier_normal_(self.other)
        with torch.no_grad():
            torch._foreach_mul_([self.other, self.near], 1.0)  # of both: neither is this rank's to read any more
            self.other.mul_(1.0)
            self.other[:, 0].normal_()
        self.register_buffer("running", torch.rand(3))


def _redrawn(rank, world, nodes, late):
    import deepc

    with on_nodes(rank, world, nodes):
        torch.manual_seed(5)
        with deepc.zero.Init():
            model = Redrawn(lambda: time.sleep(0.1 if (rank % 2 == 0) == late else 0.0))
        return {n: t.detach().clone() for n, t in model.state_dict().items()}, float(torch.rand(1))


@pytest.mark.parametrize("late", [True, False], ids=["first_rank_late", "others_late"])
@pytest.mark.parametrize("world, nodes", [(2, 1), pytest.param(4, 2, marks=pytest.mark.full)])
def test_initializers_that_read_what_they_wrote_draw_the_same_on_all_ranks(world, nodes, late):
    torch.manual_seed(5)
    want = Redrawn(lambda: None).state_dict()
    drawn = float(torch.rand(1))
    for state, their_draw in run_ranks(_redrawn, world, nodes, late):
        for n, t in state.items():
            assert torch.equal(t, want[n]), n
        assert their_draw == drawn


def _itself(rank, world):
    """What is asked of the parameter that was made last, while it is being made."""
    import deepc

    with deepc.zero.Init():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        last, seen = model[1].bias, []
        nn.init.normal_(last)
        last.register_hook(lambda grad: seen.append("gradient"))
        known = (last.requires_grad, last.is_leaf, hash(last) == id(last), last in set(model.parameters()))
        trained = [n for n, p in model.named_parameters() if p.requires_grad]
        engine = train_a_step(model, rank, world, lambda engine: engine(torch.ones(2, 3)).square().mean())
    engine.backward(engine(torch.ones(2, 3)).square().mean())
    assert engine.step().applied
    try:
        return known, trained, seen
    finally:
        engine.destroy()


def test_the_parameter_made_last_is_itself_on_all_ranks():
    """Its hooks, its place in sets and whether it is trained; an engine may be made within the context, and trains
    on behind it."""
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    for known, trained, seen in run_ranks(_itself, 2):
        assert known == (True,) * 4 and trained == names and seen == ["gradient"] * 2


def _within(rank, world, folder):
    """An engine whose parameters lie on disk, made before the context ends; the model that was made last goes on."""
    import deepc

    disk = {"device": "nvme", "nvme_path": folder}
    cfg = tiny.config(3, micro=2, zero_optimization={"stage": 3, "offload_param": disk, "offload_optimizer": disk})
    with deepc.zero.Init(config=cfg):
        model = nn.Linear(3, 2)
        if rank == 1:
            model.bias.data.fill_(7.0)  # its values are rank 0's
        engine = deepc.initialize(model=model, config=cfg)[0]
        later = nn.Linear(3, 1)
    with deepc.zero.GatheredParameters([later.weight]):
        assert later.weight.shape == (1, 3) and later.weight.any()
    losses = []
    for _ in range(2):
        losses.append(engine(torch.ones(2, 3)).square().mean())
        engine.backward(losses[-1])
        assert engine.step().applied
    engine.destroy()
    return [float(x) for x in losses]


def test_an_engine_on_disk_may_be_made_within_the_context(tmp_path):
    ours, theirs = run_ranks(_within, 2, str(tmp_path))
    assert ours == theirs and ours[1] < ours[0] < 7


def _replaced(rank, world, nodes):
    import deepc

    with on_nodes(rank, world, nodes), deepc.zero.Init():
        model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)])
        for at in range(world):
            if rank == at:  # as a script that loads on rank 0 what the others are to get
                model[at % 3].weight.data = torch.full((3, 3), 1.0 + at)
        if rank == 1:
            model[0].bias.data = torch.zeros(5)
    return [m.weight.flatten().tolist() for m in model]


@pytest.mark.parametrize("world, nodes", [(2, 1), pytest.param(4, 2, marks=pytest.mark.full)])
def test_memory_that_one_rank_has_replaced_holds_the_first_ranks_values(world, nodes):
    found = run_ranks(_replaced, world, nodes)
    assert found[0][0] == [1.0] * 9 and all(f == found[0] for f in found)


def _arguments(rank, world):
    import deepc
    import torch.distributed as dist
    from deepc.errors import ArgumentError, ConfigError, StrayWriteError, UnsupportedError

    zero = deepc.zero
    for config, dtype in (
        ({"bf16": {"enabled": True}}, torch.bfloat16),
        ('{"fp16": {"enabled": true}}', torch.float16),
        ({}, torch.float32),
    ):
        with zero.Init(
            config_dict_or_path=config,
            mem_efficient_linear=False,
            pin_memory=True,
            remote_device="cpu",
            data_parallel_group=dist.group.WORLD,
        ):
            assert nn.Linear(2, 2).weight.dtype == dtype
    with pytest.raises(ConfigError, match="nowhere.json"):
        zero.Init(config_dict_or_path="nowhere.json")
    with pytest.raises(ArgumentError, match="dtype"):
        zero.Init(dtype="half")
    with pytest.raises(ArgumentError, match="nvme_path"):
        zero.Init(remote_device="nvme")
    alone = [dist.new_group([r]) for r in range(world)][rank]
    with pytest.raises(UnsupportedError, match="group of 1 of the 2 ranks"):
        zero.Init(data_parallel_group=alone)
    zero.Init(enabled=False, dtype="anything", remote_device="nvme")

    model = tiny.make_model(seed=rank)  # converts, rank 0's values
    zero.Init(module=model, dtype=torch.bfloat16)
    want = tiny.make_model(seed=0)
    assert all(
        torch.equal(p, q.bfloat16()) and zero.is_zero_param(p) for p, q in zip(model.parameters(), want.parameters())
    )

    context = zero.Init()  # may be used again, also after an error inside
    with pytest.raises(KeyError):
        with context:
            nn.Linear(2, 2)
            raise KeyError
    hooks = torch.nn.modules.module._global_parameter_registration_hooks
    assert not hooks and not zero.init._active and os.environ.get("HF_DEACTIVATE_ASYNC_LOAD") is None
    with context:
        model = tiny.make_model(seed=rank)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), want.parameters()))

    # Between Init and initialize: one writer counts, over every rank; a write of another rank is found.
    with zero.GatheredParameters([model.ln.weight, model.ln.bias], modifier_rank=1, fwd_module=model):
        with torch.no_grad():
            model.ln.weight.fill_(0.5 if rank == 1 else 7.0)
    assert torch.all(model.ln.weight == 0.5) and id(model.ln.bias) in model._external_params
    with pytest.raises(StrayWriteError, match="shape \\(32,\\).*modifier_rank"):
        with zero.GatheredParameters(model.ln.parameters()):
            model.ln.bias.data.zero_()
    with zero.GatheredParameters(model.ln, modifier_rank=0):
        pass  # rank 0's values it is, whoever wrote
    if rank == 0:
        model.tok.weight.data.mul_(1.0)  # the first rank of a node may
    x, y = tiny.make_batch(0)
    engine = train_a_step(model, rank, world, lambda e: e(x[rank * 2 :][:2], y[rank * 2 :][:2]))
    engine.destroy()
    with zero.Init():
        model = tiny.make_model()
    if rank == 1:
        nn.init.ones_(model.blocks[1].up.weight)
    with pytest.raises(StrayWriteError, match="blocks.1.up.weight.*rank 1 after zero.Init"):
        deepc.initialize(model=model, config=tiny.config(3, micro=2))
    with zero.Init():
        model = tiny.make_model()
    engine = train_a_step(
        model, rank, world, lambda e: e(x[rank * 2 :][:2], y[rank * 2 :][:2]), stage=1
    )  # for another stage it is a place like any
    assert not any(zero.is_zero_param(p) or type(p) is not nn.Parameter for p in model.parameters())
    engine.destroy()
    return True


def test_arguments_and_the_time_before_initialize():
    assert run_ranks(_arguments, 2) == [True, True]


@pytest.mark.parametrize(
    "given",
    [
        '{"bf16": {"enabled": true,}, // as deepc.initialize takes it\n "train_batch_size": 8,}',
        "base64",
        "path",
        {"bfloat16": {"enabled": True}, "train_batch_size": "auto", "gradient_accumulation_steps": "auto"},
    ],
)
def test_init_reads_a_configuration_as_initialize_does(given, tmp_path):
    import deepc

    text = '# ours\n{"bf16": {"enabled": true}, "train_micro_batch_size_per_gpu": 2,}'
    if given == "base64":
        given = base64.urlsafe_b64encode(text.partition("\n")[2].encode()).decode()
    elif given == "path":
        (tmp_path / "config.json").write_text(text)
        given = tmp_path / "config.json"
    assert deepc.zero.Init(config_dict_or_path=given).dtype == torch.bfloat16


def test_init_refuses_what_initialize_refuses():
    import deepc
    from deepc.errors import ConfigError

    with pytest.raises(ConfigError, match='unknown key "bf61"'):
        deepc.zero.Init(config={"bf61": {"enabled": True}})
    with pytest.raises(ConfigError, match="line 1, column"):
        deepc.zero.Init(config='{"bf16": }')


def _second_holder_refuses(rank, world):
    import deepc
    from deepc.errors import StrayWriteError

    first, second = (deepc.initialize(model=tiny.make_model(), config=tiny.config(3, micro=2))[0] for _ in range(2))
    a, b = first.module.ln.weight, second.module.ln.weight
    shared = a.data_ptr()
    if rank == 1:
        with torch.no_grad():
            second.module.ln.bias.add_(1.0)
    for writer in (0, 1):
        with pytest.raises(StrayWriteError, match="ln.bias.*rank 1"):
            with deepc.zero.GatheredParameters([a, b], modifier_rank=writer):
                raise AssertionError("it is not open")
        assert a.data_ptr() == shared, "no rank keeps a private copy"
    with deepc.zero.GatheredParameters(a, modifier_rank=1), torch.no_grad():
        a.fill_(0.5 if rank == 1 else 7.0)
    assert torch.all(a == 0.5)
    for engine in (first, second):
        engine.destroy()
    return True


def test_a_holder_that_refuses_leaves_the_others_closed():
    assert run_ranks(_second_holder_refuses, 2) == [True, True]


def test_finalizers_say_nothing_when_modules_are_gone(monkeypatch):
    """At its end the interpreter sets the names of a module to None; what a finalizer raises then is printed."""
    from deepc.zero import init, shards
    from deepc.zero.step.reducers import collective

    for module, kind in ((init, init.Home), (shards, shards.Shards), (collective, collective.TorchReducer)):
        monkeypatch.setattr(module, "contextlib", None)
        object.__new__(kind).__del__()


def _then_streamed(rank, world, nodes):
    import deepc

    os.environ["DEEPC_STREAMED"] = "1"
    try:
        with on_nodes(rank, world, nodes):
            with deepc.zero.Init():
                torch.manual_seed(rank)
                model = tiny.TinyGPT(frozen=True)
            x, y = tiny.make_batch(0, 2 * world)
            engine = deepc.initialize(model=model, config=tiny.config(3, micro=2))[0]
            start = {n: t.clone() for n, t in engine.module_state_dict().items()}
            engine.backward(engine(x[rank * 2 :][:2], y[rank * 2 :][:2]))
            assert engine.step().applied
            engine.destroy()
    finally:
        del os.environ["DEEPC_STREAMED"]
    return start


@pytest.mark.parametrize("world, nodes", [pytest.param(2, 1, marks=pytest.mark.full), (4, 2)])
def test_init_then_streamed_mode(world, nodes):
    want = tiny.make_model(0, frozen=True).state_dict()
    for start in run_ranks(_then_streamed, world, nodes):
        assert start.keys() == want.keys()
        assert [n for n, t in start.items() if not torch.equal(t, want[n])] == []


# ---- reading and writing ---------------------------------------------------------------------------------------------
def _gathered(rank, world, precision):
    import deepc
    from deepc.errors import ArgumentError, StrayWriteError

    zero = deepc.zero
    make = lambda: deepc.initialize(
        model=tiny.make_model(frozen=True), config=tiny.config(3, micro=2, precision=precision)
    )[0]
    first, second = make(), make()
    a, b, frozen, plain = (
        first.module.ln.weight,
        second.module.ln.weight,
        first.module.pos.weight,
        nn.Parameter(torch.ones(2)),
    )
    with zero.GatheredParameters(
        [a, b, a, frozen, plain, None], modifier_rank=0
    ):  # two engines, a repeated one, ones of nobody
        with torch.no_grad():
            for p in (a, b, frozen):
                p.fill_(0.25 if rank == 0 else 9.0)
        with zero.GatheredParameters([a, frozen]):
            pass
        with pytest.raises(ArgumentError, match="inside another one"):
            with zero.GatheredParameters(a, modifier_rank=1):
                pass
    with zero.GatheredParameters(b, modifier_rank=0):  # an engine's that is opened goes home if the next one's can't be
        with pytest.raises(ArgumentError, match="inside another one"):
            with zero.GatheredParameters([a, b], modifier_rank=0):
                pass
        with zero.GatheredParameters(a, modifier_rank=0):
            pass
    for p, engine in ((a, first), (b, second)):
        assert torch.all(p == 0.25) and torch.all(engine.full_fp32_param(p) == 0.25)
    assert torch.all(frozen == 0.25)
    with zero.GatheredParameters([a], modifier_rank=1, enabled=False):
        pass
    with pytest.raises(ArgumentError, match="modifier_rank 2 is not one of 2 ranks"):
        with zero.GatheredParameters([a], modifier_rank=2):
            pass
    with pytest.raises(ArgumentError, match="takes parameters, got str"):
        zero.GatheredParameters(["ln.weight"])
    with pytest.raises(KeyError):  # an error inside does not leave others waiting
        with zero.GatheredParameters([a], modifier_rank=1):
            raise KeyError
    os.environ["DEEPC_DEBUG"] = "1"
    with pytest.raises(StrayWriteError, match="rank 1, but modifier_rank is 0"):
        with zero.GatheredParameters([b, a], modifier_rank=0):
            a.data.fill_(1.0)
    del os.environ["DEEPC_DEBUG"]
    assert torch.all(a == 1.0)

    module = second.module
    zero.register_external_parameter(module, b)
    zero.unregister_external_parameter(module, b)
    for wrong in ((module, b), (module, torch.ones(1))):
        with pytest.raises(ArgumentError):
            zero.unregister_external_parameter(*wrong)
    with pytest.raises(ArgumentError, match="takes a torch.nn.Parameter"):
        zero.register_external_parameter(module, torch.ones(1))

    x, y = tiny.make_batch(0)
    x, y = x[rank * 2 :][:2], y[rank * 2 :][:2]
    for engine in (first, second):
        engine.backward(engine(x, y))
        assert engine.step().applied

    # Writes that are no one's to make are found: under a context for reading at its end, frozen ones as well.
    if rank == 1:
        with pytest.raises(StrayWriteError, match="'?ln.weight.*which is for reading"):
            with zero.GatheredParameters([a]):
                a.data.clamp_(-1, 1)
    first.backward(first(x, y))
    with pytest.raises(StrayWriteError, match="'ln.weight'.*rank 1"):
        first.step()
    with pytest.raises(StrayWriteError, match="'ln.weight'.*rank 1"):
        with zero.GatheredParameters([frozen], modifier_rank=0):
            pass
    if rank == 1:
        second.module.pos.weight.mul_(
            0.5
        )  # an average of a frozen part, as teachers have: on every rank it would act twice
    second.backward(second(x, y))
    with pytest.raises(StrayWriteError, match="'pos.weight'.*rank 1"):
        second.step()
    first.destroy()
    second.destroy()
    return True


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gathered_parameters(precision):
    assert run_ranks(_gathered, 2, precision) == [True, True]


def _data_replaced(rank, world, mode):
    import deepc
    from deepc.errors import ArgumentError, StrayWriteError

    writer, gathered = world - 1, deepc.zero.GatheredParameters
    with deepc.zero.Init() if mode == "init" else contextlib.nullcontext():
        model = tiny.make_model(frozen=True)

    def write(*params, by_all):
        with gathered(params, modifier_rank=writer):
            for i, p in enumerate(params):
                if by_all or rank == writer:
                    p.data = torch.full((p.shape[1], p.shape[0]), i + rank + 0.5, dtype=p.dtype).t()
        with gathered(params):
            return all(torch.all(p == i + writer + 0.5) for i, p in enumerate(params))

    if mode == "init":
        assert write(model.blocks[0].up.weight, model.pos.weight, by_all=False)
        assert write(model.blocks[0].up.weight, by_all=True)
    os.environ["DEEPC_STREAMED"] = "1" if mode == "streamed" else "0"
    try:
        engine = deepc.initialize(model=model, config=tiny.config(3, micro=2, precision="bf16"))[0]
    finally:
        del os.environ["DEEPC_STREAMED"]
    weight, frozen = model.blocks[1].down.weight, model.pos.weight
    for by_all in (False, True):
        assert write(weight, frozen, by_all=by_all)
        assert torch.all(deepc.view(weight).fp32 == writer + 0.5)
    with (
        contextlib.nullcontext() if rank != writer else pytest.raises(ArgumentError, match=r"shape \(3,\).*\(32, 128\)")
    ):
        with gathered([frozen, weight], modifier_rank=writer):
            if rank == writer:
                weight.data = torch.zeros(3, dtype=torch.bfloat16)
    if world > 1:
        os.environ["DEEPC_DEBUG"] = "1"
        with pytest.raises(StrayWriteError, match="rank 1, but modifier_rank is 0"):
            with gathered([frozen, weight], modifier_rank=0):
                weight.data = torch.full_like(weight, 9.0) if rank else weight.data
        del os.environ["DEEPC_DEBUG"]
    assert torch.all(deepc.view(weight).fp32 == writer + 0.5)
    first, second, square = (model.blocks[i].get_submodule(n).weight for i, n in ((0, "up"), (1, "up"), (0, "proj")))
    before = [deepc.view(p).fp32 for p in (first, second, square)]
    with gathered([first, second, square], modifier_rank=writer):
        first.data, second.data = second.data, first.data
        square.data = square.data.t()
    for p, value in zip((first, second, square), (before[1], before[0], before[2].t()), strict=True):
        assert torch.equal(deepc.view(p).fp32.bfloat16(), value.bfloat16())
    x, y = tiny.make_batch(rank, 2)
    engine.backward(engine(x, y))
    assert engine.step().applied
    engine.destroy()
    return True


@pytest.mark.parametrize(
    "mode, world",
    [("resident", 1), ("resident", 2), ("streamed", 2), pytest.param("init", 2, marks=pytest.mark.full)],
)
def test_replaced_data_is_a_write_of_the_modifiers(mode, world):
    """`p.data = tensor` was lost under a modifier_rank, and a stray write at the next step."""
    assert run_ranks(_data_replaced, world, mode) == [True] * world


# ---- transformers ----------------------------------------------------------------------------------------------------
def llama(**options):
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaConfig(
        **{
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 6000,
            "tie_word_embeddings": False,
            "pad_token_id": None,
            **options,
        }
    )


class Zero3:
    """Stands for a living HfDeepSpeedConfig."""

    config = {"zero_optimization": {"stage": 3}}

    def is_zero3(self) -> bool:
        return True


def _from_hub(rank, world, nodes, folder, alive):
    import deepc
    import transformers
    from transformers.integrations import deepspeed as integration

    with on_nodes(rank, world, nodes):
        transformers.AutoModelForCausalLM.from_pretrained(f"{folder}-small")  # all that is imported at the first use
        had = "deepspeed" in sys.modules
        living = Zero3()
        if alive:
            integration.set_hf_deepspeed_config(living)
        with watched() as peak:
            with deepc.zero.Init():
                model = transformers.AutoModelForCausalLM.from_pretrained(folder)
            loaded = peak()
        assert integration.is_deepspeed_zero3_enabled() == alive
        with watched() as peak:
            with deepc.zero.Init(config_dict_or_path={"bf16": {"enabled": True}}):
                torch.manual_seed(3 + rank)
                built = transformers.AutoModelForCausalLM.from_config(model.config)
            made = peak()
        integration.unset_hf_deepspeed_config()
        assert ("deepspeed" in sys.modules) == had
        assert all(deepc.zero.is_zero_param(p) for m in (model, built) for p in m.parameters())
        values = (
            {n: t.clone() for n, t in model.state_dict().items()},
            {n: t.clone() for n, t in built.state_dict().items()},
        )
        total = sum(p.numel() for p in model.parameters()) * 4
        largest = max(p.numel() for p in model.parameters()) * 4
        ids = torch.arange(2 * 7).view(2, 7) + rank
        engine = train_a_step(model.train(), rank, world, lambda e: e(input_ids=ids, labels=ids).loss)
        if rank == 0:
            model.save_pretrained(f"{folder}-again-{nodes}-{alive}", max_shard_size="10MB")
        after = engine.module_state_dict()
        after = {n: t.clone() for n, t in after.items()}
        engine.destroy()
    return loaded, made, total, largest, values, after


@pytest.mark.parametrize(
    "world, nodes, alive, tied", [(2, 1, True, False), pytest.param(4, 2, False, True, marks=pytest.mark.full)]
)
def test_transformers_builds_and_loads_one_parameter_at_a_time(tmp_path, world, nodes, alive, tied):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    source = transformers.AutoModelForCausalLM.from_config(llama(tie_word_embeddings=tied))
    folder = str(tmp_path / "model")
    source.save_pretrained(folder, max_shard_size="8MB")
    small = llama(num_hidden_layers=1, vocab_size=50, hidden_size=64, intermediate_size=64)
    transformers.AutoModelForCausalLM.from_config(small).save_pretrained(f"{folder}-small")
    assert len([f for f in os.listdir(folder) if f.endswith(".safetensors")]) > 3
    torch.manual_seed(3)
    fresh = transformers.AutoModelForCausalLM.from_config(llama(tie_word_embeddings=tied)).state_dict()
    ranks = run_ranks(_from_hub, world, nodes, folder, alive)
    for rank, (loaded, made, total, largest, (model, built), after) in enumerate(ranks):
        want = source.state_dict()
        assert model.keys() == built.keys() == want.keys()
        for n, t in model.items():
            assert torch.equal(t, want[n]), n
            assert torch.equal(built[n], fresh[n].bfloat16()), n
        assert loaded <= 2 * largest + 8 * MIB < total, (
            f"rank {rank}: {loaded / MIB:.1f} MiB private to load {total / MIB:.0f}"
        )
        assert made <= 2 * largest + 8 * MIB, f"rank {rank}: {made / MIB:.1f} MiB private to build {total / MIB:.0f}"
    again = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}-again-{nodes}-{alive}").state_dict()
    for n, t in again.items():
        assert torch.equal(t, ranks[0][5][n]) and torch.equal(t, ranks[-1][5][n]), n
        assert not torch.equal(t, source.state_dict()[n]), n


def _by_constructor(rank, world):
    import deepc.compat.deepspeed as deepspeed
    import transformers
    from transformers.integrations import deepspeed as integration

    living = Zero3()
    integration.set_hf_deepspeed_config(living)
    small = llama(num_hidden_layers=2, vocab_size=50, hidden_size=64, intermediate_size=64, num_labels=3)
    torch.manual_seed(3 + rank)
    model = transformers.LlamaForSequenceClassification(small)
    built = {n: t.clone() for n, t in model.model.state_dict().items()}
    integration.unset_hf_deepspeed_config()
    cfg = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    engine = deepspeed.initialize(model=model, config=cfg)[0]
    after = {n: t.clone() for n, t in engine.module_state_dict().items()}
    engine.destroy()
    return built, after


def test_a_head_of_transformers_made_by_its_constructor_leaves_its_base_alone():
    """The base is made under zero.Init inside of the constructor, whose weight init visits it once more."""
    pytest.importorskip("transformers")
    for _, after in (ranks := run_ranks(_by_constructor, 2)):
        assert after.keys() == ranks[0][1].keys() and torch.equal(after["score.weight"], ranks[0][1]["score.weight"])
        for n, t in ranks[0][0].items():
            assert torch.equal(after[f"model.{n}"], t), n
            assert n.endswith("norm.weight") or "layernorm" in n or t.std() > 0.01, n
