"""The rest of activation_checkpointing: parts on tensor-parallel ranks, one piece of memory, deepspeed.checkpointing
with its options. Every number is the one of training without."""

from __future__ import annotations

import gc
import logging
import random

import pytest
import tiny
import torch
from deepc.errors import ArgumentError, ConfigError
from deepc.nn.arena import Arena
from ranks import run_ranks as _run_ranks
from test_engine import same_bits
from torch import nn
from torch.utils.checkpoint import checkpoint

KEY = "activation_checkpointing"


def run_ranks(fn, world, *args):
    return _run_ranks(fn, world, args=args, env={"DEEPC_LOG_LEVEL": "WARNING"})


# ---- the arena -------------------------------------------------------------------------------------------------------
def test_values_come_and_go_and_keep_what_they_are():
    arena, rng = Arena(64 << 20), random.Random(0)
    living: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(600):
        if living and rng.random() < 0.5:
            at = rng.choice([-1, rng.randrange(len(living))])  # mostly the last one, as backward does
            copy, value = living.pop(at)
            assert torch.equal(copy, value) and copy.stride() == value.stride()
            del copy, value
        else:
            value = torch.full(
                (rng.randint(1, 40), rng.randint(1, 300)), step, dtype=rng.choice([torch.float32, torch.bool])
            )
            value = value.t() if rng.random() < 0.3 else value
            living.append((arena.put(value), value))
        stats = arena.stats()
        assert stats.living == len(living)
        assert stats.used == sum(-(-max(1, v.nbytes) // 64) * 64 for _, v in living)
        begins = sorted((c.data_ptr(), c.nbytes) for c, _ in living)
        assert all(a + n <= b for (a, n), (b, _) in zip(begins, begins[1:])), "nothing overlaps"
        assert stats.used <= stats.extent <= stats.committed <= stats.reserved
    assert all(torch.equal(c, v) for c, v in living)


def test_the_memory_of_a_step_is_that_of_the_next():
    arena = Arena(64 << 20)
    for length in (1000, 100, 700, 1000):
        kept = [arena.put(torch.ones(length, 64)) for _ in range(8)]
        assert arena.stats().extent == 8 * length * 256, "one behind the other"
        while kept:
            kept.pop()
    stats = arena.stats()
    assert stats.used == 0 and stats.most_extent == 8 * 256_000
    assert 8 * 256_000 <= stats.committed <= 1.05 * 8 * 256_000, "what the longest one had"
    arena.release()
    assert arena.stats().committed < 4096 * 2
    outlives = arena.put(torch.arange(5.0)).view(5, 1)
    del arena
    gc.collect()
    assert outlives.flatten().tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ArgumentError, match="has no room for"):
        Arena(1000).put(torch.zeros(1000))


# ---- the engine ------------------------------------------------------------------------------------------------------
def asked(base: dict, **keys) -> dict:
    return {**base, KEY: keys, "deepc": {"activations": {"min_bytes": 1024}}}


CONTIGUOUS = dict(contiguous_memory_optimization=True, number_checkpoints=3)


def _train(config, model, micro=4, context=16, steps=3):
    import deepc

    engine = deepc.initialize(model=tiny.make_model(layers=3, **model), config=config)[0]
    out = []
    for step in range(steps):
        x, y = tiny.make_batch(step, micro, context=16 if step != 1 else context)
        loss = engine(x, y)
        now = engine.activations.stats()
        engine.backward(loss)
        grads = {n: engine.full_grad(p).clone() for n, p in engine.module.named_parameters() if p.requires_grad}
        engine.step()
        out.append((loss.item(), grads))
        del loss
    stats = engine.activations.stats()
    engine.destroy()
    return out, now, stats


@pytest.mark.parametrize("kind", ["nonreentrant", pytest.param("reentrant", marks=pytest.mark.full)])
def test_contiguous_memory_changes_no_bit(kind):
    base = tiny.config(0, micro=4)
    (wanted, _, none), (got, now, stats) = (
        _train(c, dict(recompute=kind), context=8) for c in (base, asked(base, **CONTIGUOUS))
    )
    for (loss, grads), (loss_before, before) in zip(got, wanted, strict=True):
        assert loss == loss_before
        same_bits(grads, before)
    block_input = 4 * 16 * 32 * 4
    assert set(none.values()) == {0}
    assert now["contiguous_used"] == now["contiguous_most_used"] == 3 * block_input
    assert stats["contiguous_used"] == 0 and stats["contiguous_committed"] >= 3 * block_input


def test_what_is_asked_for_together():
    from deepc.config.tree import Config

    def load(**keys):
        return Config.load(asked(tiny.config(0, micro=4), **keys), world_size=1)

    assert load(partition_activations=True).inert[0].key == f"{KEY}.partition_activations"
    assert [i.key for i in load(number_checkpoints=2).inert] == [
        f"{KEY}.number_checkpoints",
        "deepc.activations.min_bytes",
    ]
    assert load(**CONTIGUOUS).inert == ()
    with pytest.raises(ConfigError, match="needs activation_checkpointing.number_checkpoints"):
        load(contiguous_memory_optimization=True)


# ---- tensor-parallel ranks -------------------------------------------------------------------------------------------
def _cut(rank, world, keys, options, nodes="", tensor=0):
    """nodes: of each rank a digit; tensor: ranks that share a model (0: all)."""
    import deepc
    from ranks import placed
    from test_tensor_parallel import transformer

    out, tensor = [], tensor or world
    with placed(rank, nodes):
        for section in ({}, keys):
            model = transformer("gpt2", **options).train()
            model.gradient_checkpointing_enable()
            base = {
                "train_batch_size": 2,
                "tensor_parallel": {"autotp_size": tensor},
                "zero_optimization": {"stage": 1},
            }
            engine, *_ = deepc.initialize(
                model=model, config=asked({**base, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}, **section)
            )
            own, mine = 2 * tensor // world, rank // tensor
            losses = []
            for step in range(3):
                torch.manual_seed(step)
                ids = torch.randint(0, 61, (2, 17 if step != 1 else 9))[mine * own :][:own]
                loss = engine(input_ids=ids, labels=ids).loss
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            stats = engine.activations.stats()
            out.append((losses, {n: t.clone() for n, t in engine.module_state_dict().items()}, stats))
            engine.destroy()
    return out


TOGETHER = dict(partition_activations=True, **CONTIGUOUS)


@pytest.mark.parametrize(
    ("world", "keys", "nodes", "tensor"),
    [
        (2, dict(partition_activations=True), "", 2),
        pytest.param(2, TOGETHER, "", 2, marks=pytest.mark.full),
        pytest.param(4, dict(partition_activations=True), "", 4, marks=pytest.mark.full),
        pytest.param(2, TOGETHER, "01", 2, marks=pytest.mark.full),
        pytest.param(4, TOGETHER, "0011", 2, marks=pytest.mark.full),
        pytest.param(4, TOGETHER, "0111", 2, marks=pytest.mark.full),
        pytest.param(4, TOGETHER, "0011", 4, marks=pytest.mark.full),
    ],
)
def test_tensor_ranks_keep_parts_of_checkpoints(world, keys, nodes, tensor):
    dropout = dict(attn_pdrop=0, resid_pdrop=0.1, embd_pdrop=0.1)
    for (losses, state, none), (got, found, stats) in run_ranks(_cut, world, keys, dropout, nodes, tensor):
        assert got == losses
        same_bits(found, state)
        samples = 2 * tensor // world
        hidden = samples * (17 + 9 + 17) * 32 * 4
        assert none["bytes_cut"] == 0 and stats["bytes_cut"] == 4 * hidden, "the inputs of four blocks"
        if "contiguous_memory_optimization" in keys:
            per = -(-samples * 17 * 32 * 4 // tensor // 64) * 64
            assert stats["contiguous_most_used"] == 4 * per


class Inside(nn.Module):
    """What is recomputed lies inside of a region, where ranks have unequal parts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict(dict(up=nn.Linear(8, 193), down=nn.Linear(193, 8))) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            h = checkpoint(torch.tanh, block["up"](x), use_reentrant=False)
            x = x + block["down"](h)
        return x.square().mean()


def _unequal(rank, world):
    import deepc

    rules = [("column", ".*up.weight$"), ("row", ".*down.weight$")]
    specs = [{"patterns": [pattern], "partition_type": kind} for kind, pattern in rules]
    out = []
    for keys in ({}, dict(partition_activations=True)):
        torch.manual_seed(1)
        config = {
            "train_batch_size": 10,
            "tensor_parallel": {
                "autotp_size": 2,
                "partition_config": {"use_default_specs": False, "layer_specs": specs},
            },
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
            # 10 rows of 97 fp32 on the first rank and of 96 on the second
            "deepc": {"activations": {"min_bytes": 3860}},
        }
        engine, *_ = deepc.initialize(model=Inside(), config={**config, KEY: keys})
        losses = []
        for step in range(2):
            loss = engine(torch.randn(10, 8, generator=torch.Generator().manual_seed(step)))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        out.append(losses)
        engine.destroy()
    return out


def test_ranks_with_unequal_parts_agree_on_what_stays_whole():
    """The first rank's part was large enough to be cut, and waited for the second one, whose was not."""
    for plain, cut in run_ranks(_unequal, 2):
        assert cut == plain


class Alike(nn.Module):
    """Inputs of checkpoints that tensor ranks have alike, that they have not, and one that comes twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, mask):
        return torch.tanh(self.linear(x)) * mask


def _parts(rank, world, reentrant):
    import deepc
    import torch.distributed as dist
    from deepc.compat.runtime import checkpointing

    deepc.init_distributed()

    class Mpu:
        def get_model_parallel_group(self):
            return dist.group.WORLD

        def get_model_parallel_rank(self):
            return rank

    ran = checkpointing.checkpoint if reentrant else checkpointing.non_reentrant_checkpoint
    torch.manual_seed(3)
    model, x, mask = Alike(), torch.randn(6, 5, 8), torch.rand(6, 5, 8)
    own = torch.randn(6, 5, 8) + rank
    out = []
    for asks in (None, dict(), dict(contiguous_checkpointing=True, num_checkpoints=4)):
        if asks is not None:
            checkpointing.configure(Mpu(), partition_activations=True, **asks)
        inputs = [t.clone().requires_grad_() for t in (x, x.transpose(0, 2).contiguous().transpose(0, 2), own)]
        model.zero_grad()
        total = sum(ran(model, t * 1, mask).square().sum() for t in inputs)
        total.backward()
        out.append([total.detach(), *(t.grad for t in inputs), *(p.grad.clone() for p in model.parameters())])
    checkpointing.configure(None)
    checkpointing.mpu = None
    return out


@pytest.mark.parametrize("reentrant", [True, pytest.param(False, marks=pytest.mark.full)])
def test_deepspeed_checkpointing_cuts_over_an_mpus_ranks(reentrant):
    for plain, cut, contiguous in run_ranks(_parts, 2, reentrant):
        for got in (cut, contiguous):
            for a, b in zip(got, plain, strict=True):
                assert torch.equal(a, b)


# ---- deepspeed.checkpointing -----------------------------------------------------------------------------------------
@pytest.fixture
def checkpointing():
    from deepc.compat.runtime import checkpointing

    names = ("PARTITION_ACTIVATIONS", "CONTIGUOUS_CHECKPOINTING", "num_layers", "CPU_CHECKPOINT", "SYNCHRONIZE")
    saved = {n: getattr(checkpointing, n) for n in (*names, "PROFILE_TIME", "mpu", "deepspeed_checkpointing_enabled")}
    yield checkpointing
    for name, value in saved.items():
        setattr(checkpointing, name, value)
    checkpointing.get_cuda_rng_tracker().reset()


@pytest.mark.parametrize("kind", ["checkpoint", "non_reentrant_checkpoint"])
def test_named_random_states_are_those_of_the_forward(checkpointing, kind):
    x = torch.randn(64, 8, requires_grad=True)

    def block(t):
        with checkpointing.get_cuda_rng_tracker().fork():
            t = nn.functional.dropout(t.cos() + 1, 0.5)
        return nn.functional.dropout(t * t, 0.5)

    found = []
    for run in (lambda t: block(t), lambda t: getattr(checkpointing, kind)(block, t)):
        checkpointing.model_parallel_cuda_manual_seed(7)
        out = run(run(x))
        states = {k: v.clone() for k, v in checkpointing.get_cuda_rng_tracker().get_states().items()}
        (grad,) = torch.autograd.grad(out.sum(), x) if kind != "checkpoint" else (None,)
        if grad is None:
            x.grad = None
            out.sum().backward()
            grad = x.grad.clone()
        after = checkpointing.get_cuda_rng_tracker().get_states()
        assert all(torch.equal(after[k], v) for k, v in states.items()), "backward leaves them as they were"
        found.append((out.detach(), grad, states["model-parallel-rng"], torch.get_rng_state()))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_seeds_of_tensor_parallel_ranks(checkpointing):
    class Mpu:
        def get_tensor_model_parallel_rank(self):
            return 3

    checkpointing.mpu = Mpu()
    checkpointing.model_parallel_cuda_manual_seed(11)
    assert torch.initial_seed() == 11
    with checkpointing.get_cuda_rng_tracker().fork():
        drawn = torch.rand(4)
    assert torch.equal(drawn, torch.rand(4, generator=torch.Generator().manual_seed(11 + 2718 + 3)))
    outside = torch.get_rng_state()
    checkpointing.model_parallel_reconfigure_tp_seed(23)
    assert torch.equal(outside, torch.get_rng_state())
    with checkpointing.get_cuda_rng_tracker().fork():
        drawn = torch.rand(4)
    assert torch.equal(drawn, torch.rand(4, generator=torch.Generator().manual_seed(23 + 2718 + 3)))


def test_keywords_and_outputs_that_are_no_tensors(checkpointing):
    a, b = torch.randn(5, requires_grad=True), torch.randn(5, requires_grad=True)
    out, rest = checkpointing.checkpoint(lambda x, *, by, plus: ((x * by).sin() + plus, (None, 2)), a, by=b, plus=1.5)
    assert rest == (None, 2)
    out.sum().backward()
    x, y = (t.detach().clone().requires_grad_() for t in (a, b))
    want = (x * y).sin() + 1.5
    want.sum().backward()
    assert torch.equal(out, want) and torch.equal(a.grad, x.grad) and torch.equal(b.grad, y.grad)
    assert isinstance(checkpointing.checkpoint(lambda t: (t * 2,), a), torch.Tensor), "as in DeepSpeed"


def test_configure_reads_a_section_and_arguments_replace_it(checkpointing, caplog):
    section = {"train_batch_size": 1, KEY: {"partition_activations": True, **CONTIGUOUS, "profile": True}}
    checkpointing.configure(None, deepspeed_config=section, profile=False)
    assert checkpointing.is_configured() and checkpointing.num_layers == 3
    assert checkpointing.PARTITION_ACTIVATIONS and checkpointing.CONTIGUOUS_CHECKPOINTING
    assert not checkpointing.PROFILE_TIME and not checkpointing.SYNCHRONIZE
    with pytest.raises(AssertionError, match="number of layers"):
        checkpointing.configure(None, partition_activations=True, contiguous_checkpointing=True)
    with pytest.raises(ConfigError, match="partition_activations=True"):
        checkpointing.configure(None, contiguous_checkpointing=True, num_checkpoints=2)
    checkpointing._told.clear()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            checkpointing.configure(None, partition_activations=True, checkpoint_in_cpu=True)
            x = torch.randn(4, requires_grad=True)
            checkpointing.checkpoint(torch.sin, x).sum().backward()
            assert torch.equal(x.grad, x.detach().cos())
    told = [r.getMessage() for r in caplog.records]
    assert sum("no tensor-parallel ranks" in t for t in told) == 1, "said once"
    assert sum("keeps everything in host memory" in t for t in told) == 1


def test_profile_tells_each_call(checkpointing, caplog):
    checkpointing.configure(None, profile=True)
    with caplog.at_level(logging.INFO):
        x = torch.randn(4, requires_grad=True)
        y = checkpointing.checkpoint(torch.sin, x * 2)
        checkpointing.non_reentrant_checkpoint(torch.sin, y).sum().backward()
    told = [r.getMessage().split(":")[0] for r in caplog.records if "checkpoint " in r.getMessage()]
    assert told == ["checkpoint forward"] * 2 + ["checkpoint backward"] * 2


def test_a_saved_tensor_that_is_changed_is_an_error(tmp_path):
    """What stays in memory beside what is moved: torch does not look at it, behind a hook."""
    import deepc

    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            y = self.linear(x).exp()
            y.add_(1)
            return y.sum()

    engine = deepc.initialize(model=Changes(), config=asked(tiny.config(0, micro=4), **CONTIGUOUS))[0]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(engine(torch.randn(4, 4)))
    engine.destroy()
