"""The ways in which scripts train: kinds of backward, several engines on shared modules, models that change,
torch.func, torch.compile, adapters; and what a script may not do, with the error that it gets."""

from __future__ import annotations

import copy
import dataclasses
import functools
import io

import plainly
import pytest
import tiny
import torch
import torch.nn.functional as F
from ranks import run_ranks as _run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

STEPS = 3


def run_ranks(fn, world, *args):
    return _run_ranks(fn, world, args=args, env={"DEEPC_LOG_LEVEL": "WARNING"})


def gpt_batch(step: int) -> dict[str, torch.Tensor]:
    x, y = tiny.make_batch(step, 8)
    return {"x": x, "y": y}


def small(stage: int, optimizer: str = "SGD", gas: int = 1, **extra) -> dict:
    return plainly.config(stage, optimizer, gas, deepc={"bucket_elems": 8192}, **extra)


def weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in module.named_parameters()}


def match(case, ways, world, *, stages=(0, 2, 3), optimizer="SGD", gas=1, parts=True, prepare=None):
    """Every way at every stage against plain PyTorch. case: name of a function of this file that returns (make, batch,
    loss)."""
    make, batch, loss = globals()[case]()
    want = plainly.plain(make, batch, loss, STEPS, optimizer, gas * world if parts else 1, prepare)
    for rank, results in enumerate(run_ranks(_match, world, case, ways, stages, optimizer, gas)):
        for (way, stage), got in results.items():
            plainly.check(got, want, optimizer, f"{case}, {way}, stage {stage}, rank {rank} of {world}")


def _match(rank, world, case, ways, stages, optimizer, gas):
    make, batch, loss = globals()[case]()
    out = {}
    for way in ways:
        for stage in stages:
            *out[way, stage], engine = plainly.engine(
                make, batch, loss, STEPS, small(stage, optimizer, gas), rank, world, way
            )
            engine.destroy()
    return out


# ---- backward --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Outputs:
    loss: torch.Tensor
    hidden: list
    extra: dict


class Wrapped(nn.Module):
    """A dataclass output with the loss inside of it, and a second one in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny.make_model()

    def forward(self, x, y):
        loss = self.model(x, y)
        return Outputs(loss, [loss * 0.5], {"second": loss.square() * 0.1})


def two_losses():
    def loss(model, part, rank, step):
        out = model(**part)
        return [out.loss, out.extra["second"], out.hidden[0]]

    return Wrapped, gpt_batch, loss


@pytest.mark.parametrize("gas", [pytest.param(1, marks=pytest.mark.full), 2])
def test_several_losses_of_one_forward(gas):
    match("two_losses", ["engine", "bare"] + ["no_sync"] * (gas == 1), 2, gas=gas)


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 4])
def test_several_losses_on_other_numbers_of_ranks(world):
    match("two_losses", ["engine", "bare", "no_sync"], world, stages=range(4))


class Recurrent(nn.Module):
    """One block, applied a number of times that differs between ranks, and another on some ranks only; checkpointed."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.block, self.other = nn.Embedding(61, 24), nn.Linear(24, 24), nn.Linear(24, 24)
        self.reentrant = reentrant

    def forward(self, x, y, rank, step):
        h = self.embed(x)
        for _ in range(1 + (rank + step) % 3):
            h = h + 0.5 * checkpoint(self._apply_block, h, use_reentrant=self.reentrant)
        if (rank + step) % 2:
            h = h + self.other(h)
        return F.cross_entropy((h @ self.embed.weight.T).flatten(0, 1), y.flatten())

    def _apply_block(self, h):
        return torch.tanh(self.block(h))


def recurrent(reentrant=True):
    return (
        functools.partial(Recurrent, reentrant),
        gpt_batch,
        lambda model, part, rank, step: model(**part, rank=rank, step=step),
    )


def recurrent_saved():
    return recurrent(False)


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.full), 2, pytest.param(4, marks=pytest.mark.full)])
def test_a_checkpointed_block_is_used_again_and_ranks_differ(world):
    match("recurrent", ["engine", "bare"], world)
    if world == 2:
        match("recurrent_saved", ["engine", "bare"], world, gas=2)
        match("recurrent", ["engine", "bare"], world, gas=2)


def _unused_on_some_ranks(rank, world):
    """A collective of the script between a bare backward and the step; gradients in no_sync() on one rank only."""
    import deepc
    import torch.distributed as dist

    out = {}
    for way in ("bare", "no_sync"):
        for stage in (0, 3):
            engine, _, _, _ = deepc.initialize(model=Recurrent(False), config=small(stage))
            for step in range(STEPS):
                part = plainly.part_of(gpt_batch(step), rank, world)
                loss = engine(**part, rank=rank, step=step)
                if way == "bare":
                    loss.backward()
                else:
                    with engine.no_sync():  # nothing is reduced before the step
                        engine.backward(loss)
                dist.all_reduce(loss.detach())
                assert engine.step().applied
                assert all(p.grad is None for p in engine.module.parameters())
            out[way, stage] = weights_of(engine.module)
            engine.destroy()
    return out


def test_parameters_unused_on_some_ranks_with_a_bare_backward():
    make, batch, loss = recurrent(False)
    for world in (2, 4):
        want = plainly.plain(make, batch, loss, STEPS, "SGD", world)[2]
        for results in run_ranks(_unused_on_some_ranks, world):
            for where, got in results.items():
                plainly.check(([], {}, got), ([], {}, want), "SGD", str(where))


def _scaled_by_hand(rank, world):
    import deepc
    from deepc.errors import DeepcError

    out = {}
    cfg = small(2, gas=2) | {"fp16": {"enabled": True, "initial_scale_power": 8}}
    for way in ("engine", "scale"):
        engine, _, _, _ = deepc.initialize(model=tiny.make_model(), config=cfg)
        for step in range(2):
            for m in range(2):
                loss = engine(**plainly.part_of(gpt_batch(step), m * world + rank, 2 * world))
                if way == "engine":
                    engine.backward(loss)
                else:
                    engine.scale(loss).backward()
                engine.step()
            assert engine.was_step_applied()
        out[way] = weights_of(engine.module)
        if way == "scale":
            with pytest.raises(DeepcError, match="engine.scale"):
                engine(**plainly.part_of(gpt_batch(0), rank, world)).backward()
            engine.zero_grad()
            engine.scale(engine(**plainly.part_of(gpt_batch(0), rank, world))).backward()
        engine.destroy()
    for n, w in out[
        "engine"
    ].items():  # the division by the accumulation steps comes before or after the rounding of gradients
        torch.testing.assert_close(w, out["scale"][n], rtol=2e-3, atol=1e-4)
    return True


def test_engine_scale_is_for_a_bare_backward_in_fp16():
    assert all(run_ranks(_scaled_by_hand, 2))


def _old_graphs(rank, world, stages):
    """Backward of a graph from before the step raises, by either way, and training goes on after zero_grad."""
    import deepc
    from deepc.errors import DeepcError

    for stage in stages:
        for way in ("engine", "bare"):
            engine, _, _, _ = deepc.initialize(model=tiny.make_model(), config=small(stage))
            part = plainly.part_of(gpt_batch(0), rank, world)
            backward = engine.backward if way == "engine" else torch.Tensor.backward
            old = engine(**part)
            backward(engine(**part))
            assert engine.step().applied
            before = weights_of(engine.module)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                backward(old)
            with pytest.raises(DeepcError, match="restart_step"):
                engine.step()
            with pytest.raises(DeepcError, match="restart_step"):
                engine.backward(engine(**part))
            engine.zero_grad()
            assert all(torch.equal(p, before[n]) for n, p in engine.module.named_parameters())
            backward(engine(**part))
            assert engine.step().applied
            engine.destroy()
    return True


@pytest.mark.parametrize("world", [1, 2])
def test_backward_of_an_old_graph_raises_and_zero_grad_repairs(world):
    assert all(run_ranks(_old_graphs, world, (0, 1, 2, 3)))


def _stops(gradient):
    raise ZeroDivisionError("of the script")


def _stopped(rank, world, compat, stages, who):
    """Of three micro-batches the given ones (step, micro-batch) raise in backward on the ranks `who`, which call
    restart_step; then all do, and the step begins anew. Returns the weights, and how many micro-batches a step took."""
    import deepc
    import torch.distributed as dist

    if compat:
        import deepc.compat.deepspeed
        import deepspeed

    out = []
    for stage in stages:
        for bad in (None, (1, 0), (1, 1), (1, 2)):
            cfg = small(0 if stage == "layout" else stage, gas=3)
            if stage == "layout":
                cfg["deepc"]["deterministic"] = "layout"
            make = deepspeed.initialize if compat else deepc.initialize
            engine = make(model=tiny.make_model(), config=cfg)[0]
            taken = []
            for step in range(3):
                m = count = 0
                while m < 3:
                    part = plainly.part_of(gpt_batch(step), m * world + rank, 8)
                    loss = engine(**part)
                    count += 1
                    failed = (step, m) == bad and rank in who
                    hook = engine.module.blocks[0].up.weight.register_hook(_stops) if failed else None
                    try:
                        engine.backward(loss)
                    except ZeroDivisionError:
                        engine.restart_step()
                    if hook is not None:
                        hook.remove()
                    told = torch.tensor([float(failed)])
                    dist.all_reduce(told)
                    if told:
                        bad, m = None, 0
                        engine.restart_step()
                        continue
                    m += 1
                    assert engine.is_gradient_accumulation_boundary() == (m == 3)
                    assert engine.step().applied == (m == 3)
                taken.append(count)
            out.append((weights_of(engine.module), taken))
            engine.destroy()
    return out


@pytest.mark.parametrize(
    ("compat", "who"),
    [
        (True, (0, 1)),
        *(pytest.param(c, w, marks=pytest.mark.full) for c, w in ((False, (0, 1)), (False, (1,)), (True, (1,)))),
    ],
)
def test_a_step_begins_anew_after_a_backward_that_raised(compat, who):
    for rank in run_ranks(_stopped, 2, compat, (0, 2, "layout"), who):
        for whole, *others in (rank[:4], rank[4:8], rank[8:]):
            assert whole[1] == [3, 3, 3] and [taken for _, taken in others] == [[3, 4, 3], [3, 5, 3], [3, 6, 3]]
            for weights, _ in others:
                for name, want in whole[0].items():
                    assert torch.equal(weights[name], want), name


def _gradients_of_gradients(rank, world):
    out = {}
    for stage in (0, 3):
        *out[stage], engine = plainly.engine(*penalty(), STEPS, small(stage), rank, world)
        engine.destroy()
    return out


class Smooth(nn.Module):
    """For a gradient penalty: autograd.grad inside of the loss, which touches no accumulator."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x):
        return self.net(x)


def penalty():
    def loss(model, part, rank, step):
        x = part["x"].requires_grad_(True)
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return (y - part["y"]).square().mean() + (slope.norm(dim=-1) - 1).square().mean()

    def batch(step):
        g = torch.Generator().manual_seed(step)
        return {"x": torch.randn(8, 12, generator=g), "y": torch.randn(8, 1, generator=g)}

    return Smooth, batch, loss


def test_gradient_penalty():
    want = plainly.plain(*penalty(), STEPS, "SGD", 2)
    for results in run_ranks(_gradients_of_gradients, 2):
        for stage, got in results.items():
            plainly.check(got, want, "SGD", f"stage {stage}")


# ---- a parameter whose gradient is None ------------------------------------------------------------------------------
class _Half(torch.autograd.Function):
    """x * w of which only x gets a gradient, as where somebody makes that of w another way."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0], None


def _without_gradient(rank, world):
    import deepc

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Parameter(torch.full((4,), 2.0))

        def forward(self, x):
            return _Half.apply(self.first(x), self.second).sum()

    net = Net()
    engine, *_ = deepc.initialize(model=net, config=small(2))
    before = weights_of(net)
    engine.backward(engine(torch.ones(2, 4)))
    engine.step()
    assert torch.equal(net.second, before["second"]) and not torch.equal(net.first.weight, before["first.weight"])


def test_a_function_may_return_no_gradient_of_a_parameter():
    run_ranks(_without_gradient, 2)


# ---- torch.func, torch.compile ---------------------------------------------------------------------------------------


def _func(rank, world):
    import deepc

    for stage in (0, 2, 3):
        make, batch, _ = penalty()
        engine, _, _, _ = deepc.initialize(model=make(), config=small(stage))
        plain = make()
        part = plainly.part_of(batch(0), rank, world)
        params, their = dict(engine.module.named_parameters()), dict(plain.named_parameters())

        def loss(p, x, y, model):
            return (torch.func.functional_call(model, p, (x,)) - y).square().mean()

        got = torch.func.grad(loss)(params, part["x"], part["y"], engine.module)
        want = torch.func.grad(loss)(their, part["x"], part["y"], plain)
        for n in want:
            torch.testing.assert_close(got[n], want[n])
        each, theirs = (
            torch.func.vmap(torch.func.grad(functools.partial(loss, model=m)), in_dims=(None, 0, 0))(
                p, part["x"], part["y"]
            )
            for m, p in ((engine.module, params), (plain, their))
        )
        for n in want:
            torch.testing.assert_close(each[n], theirs[n])
        slope = torch.func.jacrev(lambda x: engine(x))(part["x"][:1])  # through the engine itself
        torch.testing.assert_close(slope, torch.func.jacrev(plain)(part["x"][:1]))
        for m in (plain, engine):  # shifted parameters: gradients reach the originals
            inner = m if m is plain else engine.module
            shifted = {n: p * 1.5 for n, p in inner.named_parameters()}
            value = loss(shifted, part["x"], part["y"], inner)
            value.backward() if m is plain else engine.backward(value)
        opt = torch.optim.SGD(plain.parameters(), **plainly.OPTIMIZERS["SGD"])
        if world == 1:
            opt.step()
        assert engine.step().applied
        if world == 1:
            plainly.check(([], {}, weights_of(engine.module)), ([], {}, weights_of(plain)), "SGD")
        engine.destroy()
    return True


@pytest.mark.parametrize("world", [1, 2])
def test_torch_func(world):
    assert all(run_ranks(_func, world))


def _compiled(rank, world, how):
    import deepc

    out = {}
    for stage in (0, 3):
        torch._dynamo.reset()
        engine, _, _, _ = deepc.initialize(model=tiny.make_model(), config=small(stage))
        call = engine
        if how == "engine.compile":
            engine.compile(backend="aot_eager", fullgraph=True)
        else:
            call = torch.compile(engine.module, backend="aot_eager", fullgraph=True)
        losses = []
        for step in range(STEPS):
            loss = call(**plainly.part_of(gpt_batch(step), rank, world))
            losses.append(loss.item())
            engine.backward(loss) if step % 2 else loss.backward()
            assert engine.step().applied
        out[stage] = losses, weights_of(engine.module)
        engine.destroy()
    return out


@pytest.mark.full
@pytest.mark.parametrize("how", ["torch.compile", "engine.compile"])
def test_compile_of_the_whole_model_without_a_graph_break(how):
    want = plainly.plain(tiny.make_model, gpt_batch, lambda m, part, r, s: m(**part), STEPS, "SGD", 2)
    for results in run_ranks(_compiled, 2, how):
        for stage, (losses, weights) in results.items():
            plainly.check(([], {}, weights), ([], {}, want[2]), "SGD", f"stage {stage}")


# ---- adapters --------------------------------------------------------------------------------------------------------


class LoRA(nn.Module):
    """A frozen linear layer with a low-rank addition that is trained."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = (
            nn.Linear(base.in_features, rank, bias=False),
            nn.Linear(rank, base.out_features, bias=False),
        )
        nn.init.normal_(self.up.weight, std=0.02)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapted():
    def make():
        model = tiny.make_model()
        model.requires_grad_(False)
        torch.manual_seed(9)
        for block in model.blocks:
            block.qkv, block.up = LoRA(block.qkv, 2), LoRA(block.up, 3)
        return model

    return make, gpt_batch, lambda model, part, rank, step: model(**part)


def adapted_by_peft():
    def make():
        import peft
        import transformers

        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
        lora = peft.LoraConfig(
            r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True
        )
        return peft.get_peft_model(transformers.GPT2LMHeadModel(config), lora)

    return make, gpt_batch, lambda model, part, rank, step: model(input_ids=part["x"], labels=part["x"]).loss


def test_lora():
    match("adapted", ["engine", "bare"], 2)


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 4])
def test_lora_on_other_numbers_of_ranks(world):
    match("adapted", ["engine", "bare"], world, stages=range(4))


def test_lora_of_peft():
    pytest.importorskip("transformers", reason="needs transformers")
    pytest.importorskip("peft", reason="needs peft")
    match("adapted_by_peft", ["engine"], 2, parts=False)


# ---- two engines -----------------------------------------------------------------------------------------------------


def gan_parts():
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 8)), nn.Sequential(
        nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 1)
    )


class WithCritic(nn.Module):
    """The generator and, frozen or not trained here, its critic."""

    def __init__(self, generator, critic) -> None:
        super().__init__()
        self.generator, self.critic = generator, critic

    def forward(self, z):
        return F.softplus(-self.critic(self.generator(z))).mean()


def gan_data(step):
    g = torch.Generator().manual_seed(step)
    return {"z": torch.randn(8, 6, generator=g), "real": torch.randn(8, 8, generator=g)}


def critic_loss(critic, fake, real):
    return F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()


def plain_gan(parts):
    generator, critic = gan_parts()
    opt_g, opt_d = (torch.optim.SGD(m.parameters(), **plainly.OPTIMIZERS["SGD"]) for m in (generator, critic))
    for step in range(STEPS):
        for r in range(parts):
            part = plainly.part_of(gan_data(step), r, parts)
            (critic_loss(critic, generator(part["z"]).detach(), part["real"]) / parts).backward()
        opt_d.step()
        generator.zero_grad()
        for r in range(parts):
            part = plainly.part_of(gan_data(step), r, parts)
            (WithCritic(generator, critic)(part["z"]) / parts).backward()
        opt_g.step()
        critic.zero_grad()
    return weights_of(generator), weights_of(critic)


def _gan(rank, world, order, style):
    import deepc

    out = {}
    for stage in (0, 2, 3):
        generator, critic = gan_parts()
        both = WithCritic(generator, critic)
        makers = {
            "critic": lambda: deepc.initialize(model=critic, config=small(stage))[0],
            "generator": lambda: deepc.initialize(
                model=both, model_parameters=generator.parameters(), config=small(stage)
            )[0],
        }
        made = {name: makers[name]() for name in order}
        eg, ed = made["generator"], made["critic"]
        for step in range(STEPS):
            part = plainly.part_of(gan_data(step), rank, world)
            with torch.no_grad():
                fake = generator(part["z"])
            ed.backward(critic_loss(ed, fake, part["real"]))
            assert ed.step().applied
            if style == "frozen":
                critic.requires_grad_(False)
            if style == "bare":
                eg(part["z"]).backward()
            else:
                eg.backward(eg(part["z"]))
            assert eg.step().applied
            if style == "frozen":
                critic.requires_grad_(True)
            else:
                ed.zero_grad()  # what the generator's loss left in the critic
        out[stage] = weights_of(generator), weights_of(critic)
        eg.destroy()
        ed.destroy()
    return out


@pytest.mark.parametrize(
    ("style", "order"),
    [
        pytest.param(style, order, marks=() if (style == "bare") == (order[0] == "generator") else pytest.mark.full)
        for style in ("frozen", "through", "bare")
        for order in (("critic", "generator"), ("generator", "critic"))
    ],
)
def test_two_engines_share_a_module_that_one_trains(order, style):
    for world in (1, 2):
        want = plain_gan(world)
        for results in run_ranks(_gan, world, order, style):
            for stage, got in results.items():
                for a, b in zip(got, want):
                    plainly.check(([], {}, a), ([], {}, b), "SGD", f"stage {stage}")


def test_two_engines_can_not_train_one_parameter():
    import deepc
    from deepc.errors import ConfigError, UnsupportedError

    generator, critic = gan_parts()
    engine = deepc.initialize(model=critic, config=small(2))[0]
    with pytest.raises(UnsupportedError, match="'critic.0.weight' is already trained by another engine.*frozen"):
        deepc.initialize(model=WithCritic(generator, critic), config=small(2))
    with pytest.raises(ConfigError, match="'critic.0.weight' is trained by another engine in torch.float32"):
        bf16 = small(2) | {"bf16": {"enabled": True}}
        deepc.initialize(model=WithCritic(generator, critic), model_parameters=generator.parameters(), config=bf16)
    engine.destroy()
    deepc.initialize(model=WithCritic(generator, critic), config=small(2))[0].destroy()


# ---- models that change ----------------------------------------------------------------------------------------------


def test_modules_that_come_late():
    import deepc
    from deepc.errors import ArgumentError, UnsupportedError

    with pytest.raises(ArgumentError, match="'0.weight' of a lazy module"):
        deepc.initialize(model=nn.Sequential(nn.LazyLinear(4)), config=small(2))

    def engine_after(change):
        model = tiny.make_model()
        engine = deepc.initialize(model=model, config=small(2))[0]
        change(model)
        engine.backward(engine(**gpt_batch(0)))
        return engine

    def replace(model):
        model.ln.weight = nn.Parameter(torch.ones(32))

    for change, name in (
        (lambda m: m.blocks[0].add_module("late", nn.Linear(2, 2)), "blocks.0.late.weight"),
        (replace, "ln.weight"),
        (lambda m: setattr(m.blocks[1], "scale", nn.Parameter(torch.ones(1))), "blocks.1.scale"),
    ):
        engine = engine_after(change)
        with pytest.raises(UnsupportedError, match=f"'{name}' was added"):
            engine.step()
        engine.destroy()
    engine = engine_after(lambda m: m.add_module("late", nn.Linear(2, 2).requires_grad_(False)))
    assert engine.step().applied
    engine.module.late.requires_grad_(True)  # it has no gradient: nothing is lost
    engine.backward(engine(**gpt_batch(1)))
    assert engine.step().applied
    engine.destroy()


def test_a_parameter_that_is_thawed_after_initialize_is_refused():
    import deepc
    from deepc.errors import UnsupportedError

    engine = deepc.initialize(model=tiny.make_model(frozen=True), config=small(2))[0]
    engine.backward(engine(**gpt_batch(0)))
    assert engine.step().applied
    engine.module.pos.weight.requires_grad_(True)
    engine.backward(engine(**gpt_batch(1)))
    with pytest.raises(UnsupportedError, match="'pos.weight' was frozen at deepc.initialize"):
        engine.step()
    engine.destroy()


def _freeze(model, step):
    """From step 1 on block 0 is frozen, at step 3 it is not."""
    model.blocks[0].requires_grad_(step in (0, 3))


def _frozen_later(rank, world, optimizer):
    import deepc

    out = {}
    for stage in range(4):
        engine, _, _, _ = deepc.initialize(model=tiny.make_model(), config=small(stage, optimizer))
        for step in range(4):
            _freeze(engine.module, step)
            engine.backward(engine(**plainly.part_of(gpt_batch(step), rank, world)))
            assert engine.step().applied
        out[stage] = weights_of(engine.module)
        engine.destroy()
    return out


def test_a_parameter_that_is_frozen_after_initialize_does_not_move():
    world = 2
    model = (
        tiny.make_model()
    )  # plainly.plain gives zeros where there is no gradient: here plain PyTorch leaves them out
    opt = torch.optim.SGD(model.parameters(), **plainly.OPTIMIZERS["SGD"])
    for step in range(4):
        _freeze(model, step)
        for r in range(world):
            (model(**plainly.part_of(gpt_batch(step), r, world)) / world).backward()
        opt.step()
        opt.zero_grad()
    for results in run_ranks(_frozen_later, world, "SGD"):
        for stage, got in results.items():
            plainly.check(([], {}, got), ([], {}, weights_of(model)), "SGD", f"stage {stage}")
    for results in run_ranks(_frozen_later, world, "AdamW"):
        for stage in range(1, 4):
            assert all(torch.equal(w, results[0][n]) for n, w in results[stage].items()), stage


def _left_alone(rank, world):
    import deepc

    for stage in (0, 3):
        engine, _, _, _ = deepc.initialize(model=tiny.make_model(), config=small(stage, "AdamW"))
        for step in range(3):
            _freeze(engine.module, step)
            before = weights_of(engine.module)
            engine.backward(engine(**plainly.part_of(gpt_batch(step), rank, world)))
            assert engine.step().applied
            for n, p in engine.module.named_parameters():
                moved = not torch.equal(p, before[n])
                assert moved == (step == 0 or not n.startswith("blocks.0")), (stage, step, n)
        engine.destroy()
    return True


def test_the_c_step_leaves_frozen_parameters_alone():
    assert all(run_ranks(_left_alone, 2))


def _nested_init(rank, world):
    """zero.Init inside of zero.Init, and modules built outside joined with them."""
    import deepc

    with deepc.zero.Init():
        torch.manual_seed(rank)
        outer = nn.ModuleDict({"a": nn.Linear(8, 8)})
        with deepc.zero.Init():
            outer["b"] = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        outer["c"] = nn.Linear(8, 1)
    outer["d"] = nn.Linear(1, 1)
    torch.manual_seed(0)
    plain = nn.ModuleDict(
        {"a": nn.Linear(8, 8), "b": nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), "c": nn.Linear(8, 1)}
    )
    for n, p in plain.named_parameters():
        assert torch.equal(dict(outer.named_parameters())[n], p), n

    engine, _, _, _ = deepc.initialize(model=outer, config=small(3))
    x = torch.ones(2, 8)
    m = engine.module
    loss = m["d"](m["c"](m["b"](m["a"](x)))).square().mean()
    loss.backward()
    before = weights_of(m)
    assert engine.step().applied
    assert all(not torch.equal(p, before[n]) for n, p in m.named_parameters())
    engine.destroy()
    return True


def test_nested_zero_init():
    assert all(run_ranks(_nested_init, 2))


# ---- stray writes ----------------------------------------------------------------------------------------------------


def _ema(p, old):
    p.data.copy_(0.5 * p.data + 0.5 * old)


def _swap(p, old):
    p.data = p.data * 0.5


def _vector(p, old):
    torch.nn.utils.vector_to_parameters(0.5 * p.detach().reshape(-1).clone(), [p])


def _foreach(p, old):
    torch._foreach_mul_([p.data], 0.5)


def _under_no_grad(p, old):
    with torch.no_grad():
        p.mul_(0.5)


WRITES = {
    "mul": lambda p, old: p.data.mul_(0.5),
    "clamp": lambda p, old: p.data.clamp_(-0.01, 0.01),
    "ema": _ema,
    "slice": lambda p, old: p.data[0].zero_(),
    "item": lambda p, old: p.data.__setitem__(0, 0.25),
    "detach": lambda p, old: p.detach().mul_(0.5),
    "swap": _swap,
    "vector": _vector,
    "foreach": _foreach,
    "no_grad": _under_no_grad,
    "init": lambda p, old: nn.init.constant_(p, 0.125),
}


def _writes_at_stage_3(rank, world):
    import deepc
    from deepc.errors import StrayWriteError

    for kind, write in WRITES.items():
        engine, _, _, _ = deepc.initialize(model=tiny.make_model(), config=small(3))
        engine.backward(engine(**plainly.part_of(gpt_batch(0), rank, world)))
        weight = engine.module.blocks[1].up.weight
        if rank == world - 1:
            write(weight, torch.zeros_like(weight))
        with pytest.raises(StrayWriteError, match=rf"'blocks.1.up.weight' was written.*rank {world - 1} "):
            engine.step()
        engine.destroy()
    return True


@pytest.mark.parametrize("world", [1, 2])
def test_each_stray_write_at_stage_3_raises_on_all_ranks_and_names_the_parameter(world):
    assert all(run_ranks(_writes_at_stage_3, world))


def _writes_below_stage_3(rank, world, precision):
    import deepc

    out = {}
    for kind, write in WRITES.items():
        for stage in (0, 1, 2):
            cfg = small(stage) | ({precision: {"enabled": True}} if precision != "fp32" else {})
            engine, _, _, _ = deepc.initialize(model=tiny.make_model(), config=cfg)
            for step in range(2):
                engine.backward(engine(**plainly.part_of(gpt_batch(step), rank, world)))
                if step == 0:
                    weight = engine.module.blocks[1].up.weight
                    write(weight, torch.zeros_like(weight))
                assert engine.step().applied
            out[kind, stage] = weights_of(engine.module)
            engine.destroy()
    return out


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.full)])
def test_writes_below_stage_3_act_as_under_ddp(precision):
    want = {}
    for kind, write in WRITES.items():
        model = tiny.make_model()
        opt = torch.optim.SGD(model.parameters(), **plainly.OPTIMIZERS["SGD"])
        for step in range(2):
            for r in range(2):
                (model(**plainly.part_of(gpt_batch(step), r, 2)) / 2).backward()
            if step == 0:
                write(model.blocks[1].up.weight, torch.zeros_like(model.blocks[1].up.weight))
            opt.step()
            opt.zero_grad()
        want[kind] = weights_of(model)
    for results in run_ranks(_writes_below_stage_3, 2, precision):
        for (kind, stage), got in results.items():
            if precision == "fp32":
                plainly.check(([], {}, got), ([], {}, want[kind]), "SGD", f"{kind} at stage {stage}")
            for n, w in got.items():
                torch.testing.assert_close(w.float(), want[kind][n], rtol=0.02, atol=0.01)
                assert torch.equal(w, results[kind, 0][n])


def _max_norm(rank, world):
    import logging

    import deepc
    from deepc.errors import StrayWriteError

    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("deepc").addHandler(handler)
    for stage in (2, 3):
        told.clear()
        model = nn.Sequential(nn.Embedding(4, 3, max_norm=0.5), nn.Linear(3, 1))
        engine = deepc.initialize(model=model, config=small(stage))[0]
        assert any("'0' has max_norm" in t for t in told) == (stage == 2 and rank == 0 and world > 1)
        engine.backward(engine(torch.tensor([rank, 2 + rank])).mean())
        if stage == 2:
            assert engine.step().applied
        else:
            with pytest.raises(StrayWriteError, match=r"'0.weight' was written.*an nn.Embedding with max_norm"):
                engine.step()
        engine.destroy()
    logging.getLogger("deepc").removeHandler(handler)
    return True


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.full), 2])
def test_an_embedding_that_norms_its_weight_in_the_forward_is_told(world):
    assert all(run_ranks(_max_norm, world))


def test_data_of_another_shape_or_dtype_is_refused():
    import deepc
    from deepc.errors import ArgumentError

    for change in (lambda m: m.half(), lambda m: setattr(m.ln.weight, "data", torch.ones(3))):
        engine = deepc.initialize(model=tiny.make_model(), config=small(2))[0]
        engine.backward(engine(**gpt_batch(0)))
        change(engine.module)
        with pytest.raises(ArgumentError, match="the data of parameter .* was replaced"):
            engine.step()
        engine.destroy()


def test_aliases_of_a_trained_parameter_are_refused_and_expanded_buffers_are_not():
    import deepc
    from deepc.errors import ConfigError

    model = tiny.make_model()
    model.head.weight = nn.Parameter(model.tok.weight.data, requires_grad=False)  # another object over the same memory
    with pytest.raises(ConfigError, match="'tok.weight' and 'head.weight' share memory"):
        deepc.initialize(model=model, config=small(2))
    assert all(run_ranks(_expanded_buffer, 2))


def _expanded_buffer(rank, world):
    import deepc

    model = nn.Linear(4, 4)
    model.register_buffer("expanded", torch.full((1, 4), float(rank)).expand(3, 4))
    model.register_buffer("turned", torch.full((2, 3), float(rank)).t())
    engine = deepc.initialize(model=model, config=small(3))[0]
    assert engine.expanded.shape == (3, 4) and not engine.expanded.any() and not engine.turned.any()  # rank 0's
    engine.destroy()
    return True


class Sparsely(nn.Module):
    """Embeddings with sparse gradients, one of them tied to a dense use; rows that occur twice."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words, self.bag = nn.Embedding(61, 16, sparse=sparse), nn.EmbeddingBag(61, 16, mode="sum", sparse=sparse)

    def forward(self, x, y):
        h = torch.tanh(self.words(x) + self.bag(x).unsqueeze(1))
        return F.cross_entropy((h @ self.words.weight.T).flatten(0, 1), y.flatten())


def sparse_embeddings(sparse=True):
    return functools.partial(Sparsely, sparse), gpt_batch, lambda model, part, rank, step: model(**part)


def dense_embeddings():
    return sparse_embeddings(False)


def test_sparse_gradients_are_made_dense():
    for optimizer, ways in (("SGD", ["engine", "bare", "no_sync"]), ("AdamW", ["engine"])):
        make, batch, loss = dense_embeddings()
        want = plainly.plain(make, batch, loss, STEPS, optimizer, 2)
        for rank, results in enumerate(run_ranks(_match, 2, "sparse_embeddings", ways, (0, 2, 3), optimizer, 1)):
            for where, got in results.items():
                plainly.check(got, want, optimizer, f"{where}, rank {rank}")


def test_sparse_adam_is_refused_and_the_error_names_what_works():
    import deepc
    from deepc.errors import UnsupportedError

    model = nn.Embedding(5, 4, sparse=True)
    with pytest.raises(UnsupportedError, match="SparseAdam.*Adagrad"):
        deepc.initialize(model=model, optimizer=torch.optim.SparseAdam(model.parameters()), config=small(0))


def test_a_complex_parameter_is_refused_and_the_error_names_what_works():
    import deepc

    def model(w):
        return nn.ParameterDict({"real": nn.Parameter(torch.ones(2)), "w": nn.Parameter(w)})

    with pytest.raises(deepc.errors.ConfigError, match=r"'w' is torch.complex64.*\[..., 2\] \(torch.view_as_real\)"):
        deepc.initialize(model=model(torch.ones(3, dtype=torch.complex64)), config=small(0))
    net = model(torch.view_as_real(torch.ones(3, dtype=torch.complex64)))
    engine = deepc.initialize(model=net, config=small(0))[0]
    engine.backward(torch.view_as_complex(net["w"]).abs().sum() + net["real"].sum())
    assert engine.step().applied
    engine.destroy()


def test_a_copy_of_a_trained_model_is_its_own():
    """copy.deepcopy of an engine's module (an EMA, a snapshot) is a plain module over memory of its own."""
    import deepc

    engine = deepc.initialize(model=tiny.make_model(), config=small(3))[0]
    twin = copy.deepcopy(engine.module)
    engine.backward(engine(**gpt_batch(0)))
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(0.0)
    assert engine.step().applied
    assert all(float(p.detach().abs().max()) > 0 for p in engine.module.parameters() if p.dim() > 1)
    with pytest.raises(
        deepc.errors.UnsupportedError, match=r"an engine can't be copied.*copy.deepcopy\(engine.module\)"
    ):
        copy.deepcopy(engine)  # it was a TypeError about a lock
    with pytest.raises(deepc.errors.UnsupportedError, match="pickled.*engine.save_checkpoint"):
        torch.save(engine, io.BytesIO())
    engine.destroy()


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise RuntimeError("half way")


def _raised_without_reduction(rank, world):
    """A backward inside of no_sync that raises leaves half of its gradients: no step is made of them."""
    import deepc
    from deepc.errors import DeepcError

    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine = deepc.initialize(model=net, config=small(2))[0]
    x = torch.ones(2, 4)
    with engine.no_sync():
        late = _Raises.apply(net[0](x))
        loss = (engine(x) + late).sum()
        with pytest.raises(RuntimeError, match="half way"):
            engine.backward(loss)
    with pytest.raises(DeepcError, match="raised an error part way"):
        engine.backward(engine(x).sum())
    engine.zero_grad()
    before = weights_of(net)
    engine.backward(engine(x).sum())
    assert engine.step().applied and not torch.equal(net[0].weight, before["0.weight"])
    engine.destroy()
    return True


def test_a_backward_that_raises_in_no_sync_is_noticed():
    assert all(run_ranks(_raised_without_reduction, 1))


def _alone(rank, world, bare):
    """One rank's first backward raises inside of no_sync; then one alone runs the model; the model of an engine that is
    destroyed."""
    import deepc
    from deepc.errors import DeepcError

    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine = deepc.initialize(model=net, config={**small(1), "gradient_accumulation_steps": 2})[0]
    x = torch.ones(2, 4)

    def micro_batch():
        loss = engine(x).sum()
        loss.backward() if bare else engine.backward(loss)
        return engine.step()

    def loss_that_raises():
        late = _Raises.apply(net[0](x)) if rank == 0 else 0  # made first, so that autograd comes to it last
        return (engine(x) + late).sum()

    with engine.no_sync():
        if rank == 0:
            with pytest.raises(RuntimeError, match="half way"):
                loss_that_raises().backward() if bare else engine.backward(loss_that_raises())
            with pytest.raises(DeepcError, match="raised an error part way"):
                engine.step()
        else:
            loss_that_raises().backward() if bare else engine.backward(loss_that_raises())
    engine.restart_step()
    assert [micro_batch().applied for _ in range(2)] == [False, True]
    micro_batch()
    engine.zero_grad()
    if rank == 0:  # to look at something
        engine(x)
    assert [micro_batch().applied for _ in range(2)] == [True, False]
    engine.zero_grad()
    engine.destroy()
    engine(x)
    return True


@pytest.mark.parametrize("bare", [False, True])
def test_a_rank_that_is_alone_with_what_it_has_seen(bare):
    assert all(run_ranks(_alone, 2, bare))
