"""What a checkpoint holds beside parameters, what must fit before it is loaded, and what is left where it does not."""

from __future__ import annotations

import logging
import os
import types

import pytest
import tiny
import torch
from deepc.errors import ArgumentError, CheckpointError, ConfigError, DeepcError
from ranks import for_this_job, run_quietly, run_ranks
from torch import nn


def make(model, stage=1, optimizer=None, micro=8, precision="fp32", **extra):
    """An engine; optimizer: of torch, or a section of the configuration's."""
    import deepc

    config = tiny.config(stage, micro=micro, precision="fp32" if precision == "auto" else precision, clip=0.0, **extra)
    config |= {"precision": "auto"} if precision == "auto" else {}
    if isinstance(optimizer, dict):
        config["optimizer"], optimizer = optimizer, None
    elif optimizer is not None:
        del config["optimizer"]
    return deepc.initialize(model=model, optimizer=optimizer, config=config)[0]


def step(engine, number, rank=0, world=1):
    x, y = (t.chunk(world)[rank] for t in tiny.make_batch(number))
    engine.backward(engine(x, y))
    return engine.step()


def values(engine):
    return {n: engine.full_fp32_param(p).clone() for n, p in engine.module.named_parameters() if p.requires_grad}


def same(found, want):
    assert found.keys() == want.keys() and all(torch.equal(v, want[n]) for n, v in found.items())


# ---- states of torch's optimizers ------------------------------------------------------------------------------------
class Own(torch.optim.Optimizer):
    """Keeps what no other has: rows of a matrix, a count that is a Python number, a name of nothing."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["count"], state["rows"] = 0, torch.zeros(p.shape[0] if p.dim() > 1 else 3)
                        state["scale"] = torch.ones((), dtype=torch.float64)
                    state["count"] += 1
                    state["scale"] *= 0.5
                    state["rows"] += 1
                    assert isinstance(state["count"], int) and state["scale"].dtype == torch.float64
                    p.sub_(p.grad, alpha=group["lr"] * float(state["rows"].mean()) / state["count"])
                    p.mul_(1 - 0.01 * float(state["scale"]))


def parts_of(model):
    """Two halves of the parameters; of two ranks each has one of them, about."""
    params = list(model.parameters())
    return params[: len(params) // 2], params[len(params) // 2 :]


OPTIMIZERS = {
    "no momentum first": lambda a, b: torch.optim.SGD([{"params": a}, {"params": b, "momentum": 0.9}], lr=1e-2),
    "RMSprop": lambda a, b: torch.optim.RMSprop([*a, *b], lr=1e-3),
    "own": lambda a, b: Own([*a, *b]),
}


def _torch_states(rank, world, name, stage, folder):
    """A resumed run is the uninterrupted one, where only some parameters have states."""
    found = []
    for resumes in (False, True):
        model = tiny.make_model()
        a, b = parts_of(model)
        engine = make(model, stage, OPTIMIZERS[name](a, b), 8 // world)
        if resumes:
            engine.load_checkpoint(folder, 5)  # a number is a tag, as in save_checkpoint
        for p in a if name == "RMSprop" else ():
            p.requires_grad_(False)
        if not resumes:
            engine.save_checkpoint(folder, "fresh")
            for number in range(3):
                step(engine, number, rank, world)
            engine.save_checkpoint(folder, 5)
        for p in a:
            p.requires_grad_(True)
        for number in range(3, 5):
            step(engine, number, rank, world)
        found.append(values(engine))
        if not resumes:  # to before the first step
            engine.load_checkpoint(folder, "fresh")
            assert not engine.optimizer.torch_state_names() and not list(engine.optimizer.scalar_states())
        engine.destroy()
    same(*found)
    return True


@pytest.mark.parametrize("name, world, stage", [("no momentum first", 2, 1), ("RMSprop", 2, 1), ("own", 1, 0)])
def test_states_that_some_parameters_have(name, world, stage, tmp_path):
    assert all(run_quietly(_torch_states, world, name, stage, str(tmp_path)))


class Kept(torch.optim.Optimizer):
    """Keeps numbers of 16 bits and of one; and what Hugging Face's Adafactor does, a number for each column, and SOAP,
    lists of factors and what is nothing yet."""

    def __init__(self, params, columns=False, lists=False):
        super().__init__(params, {"lr": 1e-2})
        self.columns, self.lists = columns, lists

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state["m"], state["up"] = (torch.zeros_like(p, dtype=t) for t in (torch.bfloat16, torch.bool))
                state.update({"columns": torch.zeros(p.shape[-1:])} if self.columns else {})
                state.update({"factors": [torch.ones(2), {"by": 1.0}], "later": None} if self.lists else {})
            assert (state["m"].dtype, state["up"].dtype) == (torch.bfloat16, torch.bool)
            state["m"].mul_(0.9).add_(p.grad)
            state["up"].logical_xor_(p.grad > 0)
            move = state["m"].float() + state["up"].float()
            if self.columns:
                assert state["columns"].shape == p.shape[-1:]
                state["columns"].add_(p.grad.square().view(-1, p.shape[-1]).sum(0))
                move = move / (1 + state["columns"])
            if self.lists:
                state["factors"][0] += 1
                state["factors"][1]["by"] *= float(state["factors"][0].sum())
                state["later"] = "now" if state["later"] is None else state["later"] + "!"
                move = move * state["factors"][1]["by"] / len(state["later"])
            p.sub_(move, alpha=self.param_groups[0]["lr"])


class Reward(nn.Module):
    """Its head has one row."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.body(x).tanh()).square().mean()


def _kept(rank, world, stage, folder):
    """A resumed run is the uninterrupted one, and state_dict goes there and back."""
    found = []

    def train(engine, number):
        if stage:
            step(engine, number, rank, world)
            return
        engine.backward(engine(torch.randn(4, 8, generator=torch.Generator().manual_seed(number))))
        engine.step()

    for resumes in (False, True):
        optimizer = lambda params: Kept(params, columns=stage == 0, lists=stage == 0)
        model = tiny.make_model() if stage else Reward()
        engine = make(model, stage, optimizer, 4, zero_allow_untested_optimizer=True)
        if resumes:
            engine.load_checkpoint(folder)
        for number in range(2 if resumes else 0, 4):
            train(engine, number)
            if number == 1:
                engine.save_checkpoint(folder)
        found.append(values(engine))
        saved = engine.optimizer.state_dict()
        train(engine, 5)
        engine.optimizer.load_state_dict(saved)
        again = engine.optimizer.state_dict()
        assert str(again) == str(saved) and ("trees" in saved["hyper"]) == (stage == 0)
        for bad, match in (
            ({"state": {}, "param_groups": []}, "takes what .* of a deepc engine gave, and got state, param_groups"),
            ({**saved, "owned": {"m/head.wight@0": torch.zeros(8)}}, "'m/head.wight@0', of a parameter that this"),
            ({**saved, "owned": {k: v[:1] for k, v in saved["owned"].items()}}, "has no '.*' of .* elements"),
        ):
            with pytest.raises((ArgumentError, ConfigError), match=match):
                engine.optimizer.load_state_dict(bad)
        assert str(engine.optimizer.state_dict()) == str(saved)
        engine.destroy()
    same(*found)
    return True


@pytest.mark.parametrize("world, stage", [(1, 0), (2, 1)])
def test_states_of_other_shapes_dtypes_and_kinds(world, stage, tmp_path):
    assert all(run_quietly(_kept, world, stage, str(tmp_path)))


class Paced(torch.optim.Optimizer):
    """Keeps states in its param group, as Prodigy, D-Adaptation and schedule-free optimizers do: what it was made with,
    and what the first step adds."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "d": 0.5, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if group["k"] == 0:
                group.update(weight_sum=0.0, pace=torch.tensor(1.0, dtype=torch.float64), last=[torch.zeros(2)])
                group["rows"] = torch.ones(3)
            group["k"] += 1
            group["d"] *= 1 + 1 / group["k"]
            group["weight_sum"] += group["d"] * group["lr"]
            group["pace"].mul_(0.9)
            group["rows"].add_(1)
            group["last"].append(group["rows"] * group["k"])
            pace = group["d"] * float(group["pace"]) * float(group["last"][-2].sum() + 1) / float(group["rows"].sum())
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=float(group["lr"]) * pace / (1 + group["weight_sum"]))


def _kept_in_groups(rank, world, stage, folder):
    """Each step goes on with what the one before has left in the groups, as without an engine and after a resume; LR
    schedulers write there as well."""
    plain = tiny.make_model()
    by_hand = Paced(plain.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(by_hand, lambda n: 1 / (1 + n))
    for number in range(5):
        by_hand.zero_grad()
        plain(*tiny.make_batch(number)).backward()
        by_hand.step()
        schedule.step()
    want = by_hand.param_groups[0]
    found = []
    for resumes in (False, True):
        model = tiny.make_model()
        base = Paced(model.parameters())
        engine = make(model, stage, base, 8 // world, zero_allow_untested_optimizer=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(base, lambda n: 1 / (1 + n))
        if resumes:
            engine.load_checkpoint(folder)
            schedule.load_state_dict(torch.load(f"{folder}/schedule{rank}"))
        for number in range(3 if resumes else 0, 5):
            step(engine, number, rank, world)
            schedule.step()
            if number == 2 and not resumes:
                engine.save_checkpoint(folder)
                torch.save(schedule.state_dict(), f"{folder}/schedule{rank}")
        group = engine.optimizer.param_groups[0]
        assert group is base.param_groups[0] and group["params"] == list(model.parameters())
        for name in ("lr", "betas", "d", "k", "weight_sum"):
            assert group[name] == want[name] and type(group[name]) is type(want[name]), name
        assert torch.equal(group["pace"], want["pace"]) and group["pace"].dtype == torch.float64
        assert torch.equal(group["rows"], want["rows"])
        assert all(map(torch.equal, group["last"], want["last"])) and len(group["last"]) == len(want["last"])
        found.append(values(engine))
        engine.destroy()
    same(*found)
    for n, p in plain.named_parameters():
        torch.testing.assert_close(found[0][n], p.detach())
    return True


@pytest.mark.parametrize("world, stage", [(1, 0), pytest.param(2, 1, marks=pytest.mark.full)])
def test_states_that_lie_in_param_groups(world, stage, tmp_path):
    assert all(run_quietly(_kept_in_groups, world, stage, str(tmp_path)))


def _tensors_in_groups(rank, world, folder):
    """A learning rate that is a tensor is one after a resume; one that is a number stays one."""
    for first, then in ((torch.tensor(0.25), 0.5), (0.25, torch.tensor(0.5))):
        for lr, resumes in ((first, False), (then, True)):
            model = tiny.make_model()
            engine = make(model, 0, Paced(model.parameters(), lr=lr))
            if resumes:
                engine.load_checkpoint(folder)
                group = engine.optimizer.param_groups[0]
                assert type(group["lr"]) is type(then) and float(group["lr"]) == 0.25
            else:
                engine.save_checkpoint(folder, "lr")
            engine.destroy()
    return True


def test_a_learning_rate_that_is_a_tensor(tmp_path):
    assert all(run_quietly(_tensors_in_groups, 1, str(tmp_path)))


def _not_in_shards(rank, world, folder):
    """Whichever rank has them."""
    for kind in (Own, lambda params: Kept(params, lists=True), lambda params: Kept(params, columns=rank == 1)):
        model = tiny.make_model()
        engine = make(model, 1, kind(model.parameters()), 8 // world, zero_allow_untested_optimizer=True)
        step(engine, 0, rank, world)
        with pytest.raises(DeepcError, match="does not lie in shards; use zero_optimization.stage 0|gave up as well"):
            engine.save_checkpoint(folder)
        engine.destroy()
    return True


def test_states_that_do_not_lie_in_shards_are_an_error(tmp_path):
    assert all(run_quietly(_not_in_shards, 2, str(tmp_path)))


class Fading(torch.optim.Optimizer):
    """Its only state is a number."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.state[p]["count"] = self.state[p].get("count", 0) + 1
                p.sub_(p.grad, alpha=self.param_groups[0]["lr"] / self.state[p]["count"])


def _resumes(rank, world, kind, folder, more):
    """Of parameters in several pieces, of cut ones, and of states that are numbers alone."""
    found = []
    for resumes in (False, True):
        model = tiny.make_model() if not more.get("tensor_parallel") else gpt2()
        optimizer = (
            Fading(model.parameters()) if kind == "Fading" else getattr(torch.optim, kind)(model.parameters(), 1e-3)
        )
        dp = 1 if more.get("tensor_parallel") else world
        engine = make(model, 0 if kind == "Fading" else 1, optimizer, 8 // dp, **more)
        if resumes:
            engine.load_checkpoint(folder)
        for number in range(2, 4) if resumes else range(4):
            x, y = (t.chunk(dp)[rank % dp] for t in tiny.make_batch(number))
            engine.backward(engine(input_ids=x, labels=y).loss if dp < world else engine(x, y))
            engine.step()
            if number == 1:
                engine.save_checkpoint(folder)
                kept = engine.optimizer.state_dict()["scalars"]
                before = {name: float(value) for name, value in kept.items()}
        assert {name: float(value) for name, value in kept.items()} == before and (before or rank)  # a snapshot
        found.append(values(engine))
        engine.destroy()
    same(*found)
    return True


def gpt2():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 61, "n_positions": 16}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )


@pytest.mark.parametrize(
    "kind, world, more",
    [
        ("NAdam", 2, {"zero_optimization": {"stage": 1, "reduce_bucket_size": 2048}}),
        ("RMSprop", 2, {"tensor_parallel": {"autotp_size": 2}}),
        ("Fading", 1, {}),
    ],
    ids=str,
)
def test_states_of_pieces_of_shards_and_of_numbers(kind, world, more, tmp_path):
    assert all(run_quietly(_resumes, world, kind, str(tmp_path), more))


# ---- buffers, extra states, frozen parameters ------------------------------------------------------------------------
class Extra(nn.Module):
    """A GPT with a table, and modules that say themselves what is to be kept."""

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls, self.sums = 0, torch.zeros(2, 3)

        def get_extra_state(self):
            return {"calls": self.calls, "sums": self.sums, "text": "costs 5 $tensor"}

        def set_extra_state(self, state):
            assert state["text"] == "costs 5 $tensor"
            self.calls, self.sums = state["calls"], state["sums"]

        def forward(self, x):
            self.calls += 1
            self.sums = self.sums + self.calls
            return x

    def __init__(self, table=(8,), more=False, counts=True):
        super().__init__()
        self.gpt = tiny.make_model()
        self.register_buffer(
            "table", torch.arange(8.0).view(table) if table == (8,) or table == (2, 4) else torch.ones(4)
        )
        self.register_buffer("graph", torch.eye(3).to_sparse())
        if more:
            self.register_buffer("more", torch.zeros(2))
        if counts:
            self.counts, self.others = Extra.Counts(), Extra.Counts()

    def forward(self, x, y):
        loss = self.gpt(x, y)
        return self.others(self.counts(self.counts(loss))) if hasattr(self, "counts") else loss


def _extra(rank, world, folder):
    engine = make(Extra(), 1, micro=8 // world)
    for number in range(2):
        step(engine, number, rank, world)
    engine.save_checkpoint(folder, client_state={"note": "costs 5 $tensor", "more": "$ndarray"})
    engine.save_16bit_model(os.path.join(folder, "model"))
    module = engine.module
    module.counts.calls = module.others.calls = 0
    module.counts.sums = torch.zeros(1)
    module.graph = torch.zeros(3, 3).to_sparse()
    _, client = engine.load_checkpoint(folder)
    assert client == {"note": "costs 5 $tensor", "more": "$ndarray"}
    assert (module.counts.calls, module.others.calls) == (4, 2)
    assert torch.equal(module.graph.to_dense(), torch.eye(3)) and module.graph.is_sparse
    assert torch.equal(module.counts.sums, torch.full((2, 3), 10.0))
    engine.destroy()
    for wrong, text in (
        (Extra(table=(2, 4)), r"buffer 'table' has shape \(8,\) there and \(2, 4\) in the model"),
        (Extra(table=(4,)), r"buffer 'table' has shape \(8,\) there and \(4,\) in the model"),
        (Extra(more=True), r"does not fit the model: missing \['more'\], unexpected \[\]"),
        (Extra(counts=False), r"missing \[\], unexpected \['counts._extra_state', 'others._extra_state'\]"),
    ):
        engine = make(wrong, 1, micro=8 // world)
        with pytest.raises(CheckpointError, match=text):
            engine.load_checkpoint(folder)
        assert engine.global_steps == 0 and step(engine, 0, rank, world).applied
        if wrong.table.shape == (8,):
            engine.load_checkpoint(folder, load_module_strict=False)
            assert engine.global_steps == 2
        engine.destroy()
    return True


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.full)])
def test_buffers_and_extra_states(world, tmp_path):
    assert all(run_quietly(_extra, world, str(tmp_path)))


class Odd(torch.nn.Module):
    """Buffers that can't be written where they lie, or are no floats of memory order."""

    def __init__(self, filled=True):
        super().__init__()
        torch.manual_seed(1)
        self.linear = torch.nn.Linear(4, 4)
        turn = torch.polar(torch.ones(3), torch.arange(3.0)) * filled
        self.register_buffer("expanded", (torch.arange(4.0) * filled).expand(3, 4))
        self.register_buffer("turn", turn)
        self.register_buffer("back", turn.clone().conj())
        self.register_buffer("graph", (torch.eye(3) * filled).to_sparse())
        self.spin = torch.nn.Parameter(turn.clone(), requires_grad=False)
        codes = (torch.arange(7.0) * filled).to(torch.float8_e4m3fn)
        self.register_buffer("scaled", codes)
        self.codes = torch.nn.Parameter(codes.clone(), requires_grad=False)

    def forward(self, x):
        return self.linear(x.to(self.linear.weight.dtype)).float().square().mean() * self.turn.abs().mean()


def odd_values(module):
    named = [*module.named_buffers(), *module.named_parameters()]
    whole = {n: t.detach().to_dense() if t.layout != torch.strided else t.detach().clone() for n, t in named}
    return {n: t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t for n, t in whole.items()}


def _odd(rank, world, folder):
    import deepc

    engine = make(Odd(), 1, micro=8 // world)
    engine.backward(engine(torch.ones(2, 4)))
    assert engine.step().applied
    want = odd_values(engine.module)
    engine.save_checkpoint(folder)
    deepc.export(engine, os.path.join(folder, "model"))
    engine.save_16bit_model(os.path.join(folder, "hf"))
    engine.destroy()
    engine = make(Odd(filled=False), 1, micro=8 // world)
    engine.load_checkpoint(folder)
    served = [deepc.inference(Odd(filled=False), checkpoint=f) for f in (folder, os.path.join(folder, "model"))]
    for module in (engine.module, *(s.module for s in served)):
        got = odd_values(module)
        assert got.keys() == want.keys() and all(torch.equal(got[n], want[n]) for n in want)
        assert module.graph.is_sparse and module.turn.dtype == torch.complex64
    engine.module.register_buffer("wide", torch.ones(2, dtype=torch.complex128))
    with pytest.raises(CheckpointError, match="'buffer/wide' is torch.complex128.*persistent=False|failed on rank 0"):
        engine.save_checkpoint(folder, tag="wide")
    engine.destroy()
    return True


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.full)])
def test_buffers_of_any_layout_and_complex_ones(world, tmp_path):
    assert all(run_quietly(_odd, world, str(tmp_path)))


def _as_they_are(rank, world, streamed):
    """What is no float of 16 bits or more keeps its dtype whatever the model computes in, with rank 0's values."""
    import deepc

    want = {n: v for n, v in odd_values(Odd()).items() if n in ("codes", "scaled", "spin", "turn")}
    for stage in (3,) if streamed else (0, 3):
        cfg = tiny.config(stage, micro=4, precision="bf16", clip=0.0)
        engine, *_ = deepc.initialize(model=Odd(filled=rank == 0), config=cfg)
        engine.backward(engine(torch.ones(2, 4)))
        assert engine.step().applied and engine.module.linear.weight.dtype == torch.bfloat16
        got = odd_values(engine.module)
        assert all(torch.equal(got[n], v) and got[n].dtype == v.dtype for n, v in want.items())
        state = engine.module_state_dict()
        assert state["codes"].dtype == state["scaled"].dtype == torch.float8_e4m3fn
        engine.load_module_state_dict({n: t if t.dtype != torch.bfloat16 else t * 0 for n, t in state.items()})
        got = odd_values(engine.module)
        assert all(torch.equal(got[n], v) for n, v in want.items())
        engine.destroy()
    model = Odd()
    model.codes.requires_grad_(True)
    with pytest.raises(ConfigError, match="'codes' is torch.float8_e4m3fn; .* 16 bits and more"):
        deepc.initialize(model=model, config=tiny.config(0, micro=4, precision="bf16"))
    return True


@pytest.mark.parametrize("streamed", [False, True])
def test_codes_and_complex_numbers_are_not_cast(streamed):
    assert all(run_ranks(_as_they_are, 2, args=(streamed,), env={"DEEPC_STREAMED": str(int(streamed))}))


def _old(rank, world, folder):
    """What checkpoints before extra states lack stays as the model has it."""
    from deepc.engine.states import saving
    from deepc.zero.step.update import ShardedOptimizer

    hyper = ShardedOptimizer.hyper_state
    for_this_job(ShardedOptimizer, "hyper_state", lambda self: {k: v for k, v in hyper(self).items() if k != "kind"})
    for_this_job(saving, "_add_extra", lambda *_: None)
    engine = make(Extra(), 1)
    step(engine, 0)
    engine.save_checkpoint(folder)
    engine.module.counts.calls = 7
    engine.load_checkpoint(folder)
    assert engine.module.counts.calls == 7
    engine.destroy()
    return True


def test_a_checkpoint_without_extra_states_is_loaded_as_before(tmp_path):
    assert all(run_quietly(_old, 1, str(tmp_path)))


def _staged(rank, world, folder):
    """Each stage writes its own, once."""
    import deepc

    class Layer(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.calls = 0

        def get_extra_state(self):
            return self.calls

        def set_extra_state(self, state):
            self.calls = state

        def forward(self, x):
            self.calls += 1
            return torch.tanh(super().forward(x))

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Layer() for _ in range(4))

        def forward(self, x, y):
            for block in self.blocks:
                x = block(x)
            return nn.functional.mse_loss(x, y)

    torch.manual_seed(0)
    config = tiny.config(1, micro=4, clip=0.0, pipeline={"stages": 2})
    data = (torch.randn(4, 4), torch.zeros(4, 4))
    engine = deepc.initialize(model=Chain(), config=config, sample_batch=data)[0]
    for layer in engine.module.modules():
        if isinstance(layer, Layer):  # the cut has run all of them
            layer.calls = 0
    engine.train_batch(iter([data]))
    engine.save_checkpoint(folder)
    mine = [b for b in engine.module.modules() if isinstance(b, Layer) and b.calls]
    counts = [b.calls for b in mine]
    for b in mine:
        b.calls = 0
    engine.load_checkpoint(folder)
    assert [b.calls for b in mine] == counts and counts
    engine.destroy()
    return True


def test_extra_states_of_stages(tmp_path):
    assert all(run_quietly(_staged, 2, str(tmp_path)))


def _late(rank, world, stage, folder):
    """A frozen adapter that joins the model after initialize, and a script that is written anew."""
    model = tiny.make_model()
    engine = make(model, stage, micro=8 // world)
    step(engine, 0, rank, world)
    torch.manual_seed(7 + rank)  # rank 0's count
    model.add_module("adapter", nn.Linear(4, 4).requires_grad_(False))
    want = nn.Linear(4, 4)
    torch.manual_seed(7)
    want = nn.Linear(4, 4).weight.detach()
    engine.save_checkpoint(folder)
    with torch.no_grad():
        model.adapter.weight.zero_()
    engine.load_checkpoint(folder)
    assert torch.equal(model.adapter.weight, want)
    engine.destroy()
    model = tiny.make_model()
    model.add_module("adapter", nn.Linear(4, 4).requires_grad_(False))
    engine = make(model, stage, micro=8 // world)
    engine.load_checkpoint(folder)
    assert torch.equal(model.adapter.weight, want)
    engine.destroy()
    return True


@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_parameters_that_join_the_model_late(stage, tmp_path):
    assert all(run_quietly(_late, 2, stage, str(tmp_path)))


def _private(rank, world, folder, streamed):
    """Frozen numbers that are not floating-point, and buffers of any dtype: every rank has its own memory of them."""
    import deepc

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.gpt = tiny.make_model()
            self.table = nn.Parameter(torch.full((4,), rank, dtype=torch.int8), requires_grad=False)
            self.mask = nn.Parameter(torch.tensor([rank == 0, True]), requires_grad=False)
            self.register_buffer("drawn", torch.tensor([rank == 1, False]))
            self.register_buffer("turned", torch.tensor([rank * 1j, 2.0]), persistent=False)
            self.register_buffer("short", torch.full((2, 3), rank, dtype=torch.int16).t())

        def forward(self, x, y):
            return self.gpt(x, y)

    if streamed:
        os.environ["DEEPC_STREAMED"] = "1"
    model = Net()
    engine = make(model, 3, micro=8 // world)
    assert model.drawn.tolist() == [False, False] and model.turned[0] == 0 and not model.short.any()
    assert model.table.tolist() == [0] * 4 and model.mask.tolist() == [True, True]
    engine.save_checkpoint(folder)
    with deepc.zero.GatheredParameters([model.table, model.mask], modifier_rank=0):
        if rank == 0:
            model.table.fill_(7)
            model.mask.fill_(False)
    assert model.table.tolist() == [7] * 4 and model.mask.tolist() == [False] * 2
    kept = {n: t.clone() for n, t in engine.module_state_dict().items()}
    engine.load_checkpoint(folder)
    assert model.table.tolist() == [0] * 4 and model.mask.tolist() == [True, True]
    engine.load_module_state_dict(kept if rank == 0 or streamed else {})
    assert model.table.tolist() == [7] * 4 and model.mask.tolist() == [False] * 2
    engine.destroy()
    return True


@pytest.mark.parametrize("streamed", [False, True])
def test_what_is_no_floating_point_number_is_the_same_on_all_ranks(streamed, tmp_path):
    assert all(run_quietly(_private, 2, str(tmp_path), streamed))


def _stays_on_disk(rank, world, folder):
    disk = {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": folder}}
    engine = make(tiny.make_model(), 1, zero_optimization=disk)
    for number in range(2):
        step(engine, number)
        engine.offload_states()  # around something that wants memory: they are there
        engine.reload_states()
        assert engine.plan.disk is not None and engine.state.tier is not None
    engine.destroy()
    return True


def test_what_the_configuration_has_on_disk_stays_there(tmp_path):
    assert all(run_quietly(_stays_on_disk, 1, str(tmp_path)))


def _refused_in_its_precision(rank, world, folder):
    """A checkpoint that does not fit changes no precision."""
    from deepc.core import cpu

    for_this_job(cpu, "recommended_dtype", lambda: ("bf16", "the test says so"))  # whatever this processor can do
    engine = make(tiny.make_model(), 1, precision="auto")
    engine.auto_precision.mode = "fp32"
    engine.step_policy.resume()
    engine.save_checkpoint(folder)
    engine.destroy()
    other = make(tiny.make_model(width=16), 1, precision="auto")
    was = other.dtype, other.auto_precision.state_dict()
    assert was[0] == torch.bfloat16
    with pytest.raises(CheckpointError, match="shape"):
        other.load_checkpoint(folder)
    assert (other.dtype, other.auto_precision.state_dict()) == was
    other.destroy()
    return True


def test_a_checkpoint_that_does_not_fit_changes_no_precision(tmp_path):
    assert all(run_quietly(_refused_in_its_precision, 1, str(tmp_path)))


# ---- what does not fit, and what is loaded in part -------------------------------------------------------------------
def _refused(rank, world, folder):
    """Nothing is overwritten by a checkpoint that does not fit."""
    source = make(tiny.make_model(), 1, {"type": "AdamW", "params": {"lr": 1e-2}})
    for number in range(3):
        step(source, number)
    source.save_checkpoint(folder)
    source.destroy()
    model = tiny.make_model()
    groups = torch.optim.AdamW([{"params": part} for part in parts_of(model)], lr=1e-3)
    for optimizer, kind, text in (
        (groups, ConfigError, "the checkpoint has 1 param groups and this optimizer 2"),
        ({"type": "Lion", "params": {"lr": 1e-4}}, CheckpointError, "was saved with AdamW .*not those of Lion"),
        ({"type": "Lamb", "params": {"lr": 1e-4}}, CheckpointError, "not those of Lamb"),
        ({"type": "OneBitAdam", "params": {"lr": 1e-4}}, CheckpointError, "not those of OneBitAdam"),
    ):
        if isinstance(optimizer, dict):
            model = tiny.make_model()
        engine = make(model, 0, optimizer)
        step(engine, 0)
        before, states = values(engine), {k: v.clone() for k, v in engine.optimizer.state_dict()["owned"].items()}
        with pytest.raises(kind, match=text):
            engine.load_checkpoint(folder)
        same(values(engine), before)
        after = engine.optimizer.state_dict()
        same(after["owned"], states)
        assert after["hyper"]["step"] == engine.global_steps == 1 and step(engine, 1).applied
        engine.load_checkpoint(folder, load_optimizer_states=False)
        assert engine.global_steps == 3 and engine.optimizer.state_dict()["hyper"]["step"] == 2
        engine.destroy()
    return True


def _interrupted(rank, world, folder, disk):
    """^C within an update, as in a notebook that goes on: what is changed in part is not trained with, nor saved."""
    place = {"offload_optimizer": {"device": "nvme", "nvme_path": folder}} if disk else {}
    engine = make(tiny.make_model(), 1, zero_optimization={"stage": 1, **place})
    step(engine, 0)
    engine.save_checkpoint(folder)
    step(engine, 1)
    want = values(engine)
    of = type(engine.state.tier) if disk else type(engine.optimizer)
    update = of.update

    def interrupted(self, work, *more):
        def one(cell):
            work(cell)
            raise KeyboardInterrupt

        if disk:
            return update(self, one, *more)
        update(self, work, *more)
        raise KeyboardInterrupt

    of.update = interrupted
    with pytest.raises(KeyboardInterrupt):
        step(engine, 2)
    of.update = update
    for call in (lambda: step(engine, 2), engine.step, lambda: engine.save_checkpoint(folder)):
        with pytest.raises(DeepcError, match=r"step 3 was broken off in its update \(KeyboardInterrupt\)"):
            call()
    engine.load_checkpoint(folder)
    step(engine, 1)
    same(values(engine), want)
    engine.destroy()
    return True


@pytest.mark.parametrize("disk", [False, True])
def test_a_step_that_is_interrupted_is_not_trained_on_with(disk, tmp_path):
    assert all(run_quietly(_interrupted, 1, str(tmp_path), disk))


def test_what_does_not_fit_changes_nothing(tmp_path):
    assert all(run_quietly(_refused, 1, str(tmp_path)))


def _decays(rank, world, folder):
    """Adam with L2 and AdamW have the same states, and which of them an engine has its configuration says."""
    found = []
    kinds = {"AdamW": True, "Adam": False}
    for saved in kinds:  # without decay the two are one until here
        params = {"lr": 1e-2, "weight_decay": 0.0, "betas": [0.9, 0.99]}
        engine = make(tiny.make_model(), 1, {"type": saved, "params": {**params, "adam_w_mode": kinds[saved]}})
        step(engine, 0)
        engine.save_checkpoint(folder, saved)
        engine.destroy()
    for kind in kinds:
        for saved in kinds:
            params = {"lr": 1e-2, "weight_decay": 0.5, "betas": [0.9, 0.99], "adam_w_mode": kinds[kind]}
            engine = make(tiny.make_model(), 1, {"type": kind, "params": params})
            engine.load_checkpoint(folder, saved)
            engine.optimizer.param_groups[0]["weight_decay"] = 0.5
            step(engine, 1)
            found.append(values(engine))
            engine.destroy()
    same(found[0], found[1])
    same(found[2], found[3])
    assert any(not torch.equal(v, found[2][n]) for n, v in found[0].items())
    return True


def test_adam_and_adamw_stay_what_they_are(tmp_path):
    assert all(run_quietly(_decays, 1, str(tmp_path)))


def _schedules(rank, world, folder):
    """A schedule that keeps other numbers is no schedule's continuation."""
    import deepc

    config = tiny.config(1, micro=8)
    kinds = {
        "deepc": lambda o: deepc.lr_schedules.WarmupLR(o, warmup_max_lr=1e-2, warmup_num_steps=10),
        "torch": lambda o: torch.optim.lr_scheduler.StepLR(o, 3),
        "own": lambda o: types.SimpleNamespace(step=lambda: None),
    }

    def make(kind):
        return deepc.initialize(model=tiny.make_model(), config=config, lr_scheduler=kinds[kind])[0]

    for kind in ("deepc", "torch"):
        engine = make(kind)
        for number in range(4):
            step(engine, number)
        engine.save_checkpoint(folder, kind)
        engine.destroy()
    for kind, tag in (("torch", "deepc"), ("deepc", "torch"), ("own", "torch")):
        engine = make(kind)
        before = values(engine)
        with pytest.raises(CheckpointError, match="another LR schedule, which keeps .*load_lr_scheduler_states=False"):
            engine.load_checkpoint(folder, tag)
        same(values(engine), before)
        assert engine.global_steps == 0 and step(engine, 0).applied
        engine.load_checkpoint(folder, tag, load_lr_scheduler_states=False)
        assert engine.global_steps == 4 and step(engine, 4).applied
        engine.destroy()
    said: list[str] = []  # where one side has none, rates go on otherwise than they would have
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("deepc").addHandler(handler)
    engine = deepc.initialize(model=tiny.make_model(), config=config)[0]
    engine.load_checkpoint(folder, "torch")
    engine.save_checkpoint(folder, "none")
    engine.destroy()
    engine = make("torch")
    engine.load_checkpoint(folder, "none")
    logging.getLogger("deepc").removeHandler(handler)
    engine.destroy()
    assert [text for text in said if "saved with an LR schedule, and this engine has none" in text]
    assert [text for text in said if "has no state of an LR schedule" in text]
    return True


def test_a_schedule_of_another_kind_changes_nothing(tmp_path):
    assert all(run_quietly(_schedules, 1, str(tmp_path)))


@pytest.mark.parametrize("kind", ["WarmupLR", "OneCycle", "torch"])
def test_a_schedule_without_the_optimizers_states_brings_its_rate(kind, tmp_path):
    """The rates of an optimizer whose states stay would be those of another step, for one step."""
    import deepc

    params = {"WarmupLR": {"warmup_num_steps": 9}, "OneCycle": {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2}}
    config = {**tiny.config(0, micro=4), "optimizer": {"type": "AdamW", "params": {"lr": 0.5}}}
    if kind in params:
        config["scheduler"] = {"type": kind, "params": params[kind]}

    def made():
        falling = (lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)) if kind == "torch" else None
        return deepc.initialize(model=tiny.make_model(), config=config, lr_scheduler=falling)[0]

    engine, other = made(), made()
    for i in range(3):
        step(engine, i)
    engine.save_checkpoint(tmp_path)
    assert other.get_lr() != engine.get_lr()
    other.load_checkpoint(tmp_path, load_optimizer_states=False)
    for i in range(3, 5):
        assert other.get_lr() == engine.get_lr()
        step(engine, i), step(other, i)
    with pytest.raises(ArgumentError, match="load_dir=None"):
        other.load_checkpoint(None)
    engine.destroy(), other.destroy()


def _in_part(rank, world, folder, only):
    """One wrong byte in the last tensor: on all ranks nothing is trained with what came before it."""
    engine = make(tiny.make_model(), 1, micro=8 // world)
    step(engine, 0, rank, world)
    for tag in ("good", "bad"):
        engine.save_checkpoint(folder, tag)
    want = values(engine)
    if rank == 0:
        name = os.path.join(
            folder, "bad", sorted(f for f in os.listdir(os.path.join(folder, "bad")) if "rank" in f)[-1]
        )
        with open(name, "r+b") as f:
            f.seek(-3, os.SEEK_END)
            byte = f.read(1)[0]
            f.seek(-3, os.SEEK_END)
            f.write(bytes([byte ^ 1]))
    engine.everyone.barrier()
    step(engine, 1, rank, world)
    with pytest.raises(CheckpointError, match="CRC-32C|this rank gave up as well"):
        engine.load_checkpoint(folder, "bad", load_module_only=only)
    text = "broke off when a part of it was loaded"
    with pytest.raises(DeepcError, match=text):
        step(engine, 2, rank, world)
    with pytest.raises(CheckpointError, match=text):
        engine.save_checkpoint(folder, "third")
    with pytest.raises(CheckpointError, match=f"{text}.*load_module_strict=True"):
        engine.load_checkpoint(folder, "good", load_module_strict=False)
    engine.load_checkpoint(folder, "good")
    same(values(engine), want)
    assert step(engine, 1, rank, world).applied
    engine.destroy()
    return True


@pytest.mark.parametrize("only", [False])
def test_a_checkpoint_that_is_loaded_in_part_is_not_trained_with(only, tmp_path):
    assert all(run_quietly(_in_part, 2, str(tmp_path), only))


def _module_only(rank, world, folder):
    engine = make(tiny.make_model(), 1)
    for number in range(3):
        step(engine, number)
    engine.save_checkpoint(folder)
    want = values(engine)
    engine.destroy()
    torch.manual_seed(123)
    engine = make(tiny.make_model(), 1)
    step(engine, 0)
    before = torch.get_rng_state().clone()
    engine.load_checkpoint(folder, load_module_only=True)
    same(values(engine), want)
    assert torch.equal(torch.get_rng_state(), before)
    assert (engine.global_steps, engine.global_samples, engine.optimizer.state_dict()["hyper"]["step"]) == (1, 8, 1)
    engine.destroy()
    return True


def test_weights_alone_bring_no_counts_and_no_random_numbers(tmp_path):
    assert all(run_quietly(_module_only, 1, str(tmp_path)))


# ---- data, export, bytes ---------------------------------------------------------------------------------------------
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([tuple(t[0] for t in tiny.make_batch(0))] * 8)


def _stream(rank, world, folder):
    import deepc

    data = torch.utils.data.TensorDataset(*tiny.make_batch(0))
    for given in (data, Stream()):
        engine = deepc.initialize(model=tiny.make_model(), config=tiny.config(1, micro=8), training_data=given)[0]
        if given is data:
            step(engine, 0)
            engine.save_checkpoint(folder)
        else:
            engine.load_checkpoint(folder)
            assert engine.global_steps == 1 and step(engine, 1).applied
        engine.destroy()
    return True


def test_a_stream_goes_on_where_data_was_dealt(tmp_path):
    assert all(run_quietly(_stream, 1, str(tmp_path)))


def _tags(rank, world, folder):
    import deepc

    engine = make(tiny.make_model(), 1, precision="bf16")
    step(engine, 0)
    engine.save_checkpoint(folder, "one")
    engine.save_16bit_model(folder)
    step(engine, 1)
    engine.save_checkpoint(folder, "three")
    want = values(engine)
    engine.destroy()
    model = tiny.make_model()
    served = deepc.inference(model, checkpoint=folder, tag="three", dtype="fp32")
    assert all(torch.equal(p.float(), want[n]) for n, p in served.module.named_parameters())
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        deepc.inference(tiny.make_model(), checkpoint=folder, tag="no-such-tag")
    with pytest.raises(CheckpointError, match="has no average 'ema'"):
        deepc.inference(tiny.make_model(), checkpoint=folder, average="ema")
    return True


def test_a_tag_is_what_is_served_whatever_lies_beside_it(tmp_path):
    assert all(run_quietly(_tags, 1, str(tmp_path)))


def test_a_tensor_that_is_read_in_parts_is_checked_once(tmp_path, monkeypatch):
    """Counted in bytes."""
    from deepc.checkpoint import files

    whole = torch.randn(1 << 16)
    path = str(tmp_path / "x.safetensors")
    files.write_safetensors(path, {"x": whole})
    read, before = [], os.preadv

    def preadv(fd, views, offset):
        n = before(fd, views, offset)
        read.append(n)
        return n

    with files.SafetensorsFile(path) as f:
        monkeypatch.setattr(os, "preadv", preadv)
        out = torch.empty(1 << 10)
        for begin in range(0, whole.numel(), out.numel()):
            f.read_into("x", out, begin)
            assert torch.equal(out, whole[begin : begin + out.numel()])
    assert sum(read) < 2.1 * whole.nbytes
