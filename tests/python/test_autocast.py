"""The section torch_autocast: an engine's numbers are those of plain torch under torch.autocast, which it enters.
managed_gradient_accumulation false: a script's step() says what a step is."""

from __future__ import annotations

import contextlib
import logging

import deepc
import pytest
import torch
from deepc.config import Config
from deepc.errors import ConfigError, MisuseError
from deepc.optim.scaling import AutocastLossScaler
from ranks import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
BASE = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0,
    "zero_allow_untested_optimizer": True,
    "deepc": {"log": {"format": "none"}},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """seen: the dtypes of what its blocks gave. recompute: use_reentrant of a checkpoint around each."""

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(11, 16)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(16, 11, bias=False)
        self.recompute, self.seen = recompute, []
        for b in self.blocks:
            b.up.register_forward_hook(lambda _, args, out: self.seen.append(out.dtype))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute)
        logits = self.head(x)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def data(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 11, (4, 8), generator=torch.Generator().manual_seed(100 * step + rank))


def plainly(
    world: int, counts: tuple[int, ...] = (1, 1, 1), dtype: torch.dtype | None = torch.bfloat16
) -> tuple[list[list[float]], list[torch.Tensor]]:
    """(losses of each rank's micro-batches, weights) of torch alone, with gradients as DDP averages them. counts: the
    steps' micro-batches. dtype: of autocast, None: without it."""
    model, at = Model(), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses: list[list[float]] = [[] for _ in range(world)]
    for count in counts:
        sums = [torch.zeros_like(p) for p in model.parameters()]
        for _ in range(count):
            each = []
            for rank in range(world):
                with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                    loss = model(data(at, rank))
                losses[rank].append(loss.item())
                each.append(torch.autograd.grad(loss / count, list(model.parameters())))
            for total, *grads in zip(sums, *each, strict=True):
                total.add_(sum(grads[1:], grads[0]))
            at += 1
        for p, total in zip(model.parameters(), sums, strict=True):
            p.grad = total / world
        optimizer.step()
    return losses, [p.detach().clone() for p in model.parameters()]


def train(rank: int, world: int, more: dict, model: nn.Module | None = None, steps: int = 3, changed=lambda e: e):
    """(losses, weights) of an engine. changed: what is called in its place."""
    model = Model() if model is None else model
    engine = deepc.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), config={**BASE, **more}
    )[0]
    called = changed(engine)
    losses = []
    for step in range(steps * engine.gradient_accumulation_steps()):
        loss = called(data(step, rank))
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    weights = [engine.full_fp32_param(p).view(p.shape) for p in model.parameters()]
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    engine.destroy()
    return losses, weights


def equal(got, want, rank: int = 0) -> None:
    assert got[0] == want[0][rank]
    assert all(map(torch.equal, got[1], want[1]))


# ---- the numbers -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stage", range(4))
def test_one_rank_trains_as_torch_under_autocast(stage: int) -> None:
    model = Model()
    equal(train(0, 1, {**AUTOCAST, "zero_optimization": {"stage": stage}}, model), plainly(1))
    assert set(model.seen) == {torch.bfloat16}


@pytest.mark.parametrize(
    "stage", [pytest.param(0, marks=pytest.mark.full), 1, pytest.param(2, marks=pytest.mark.full), 3]
)
def test_two_ranks_train_as_ddp_under_autocast(stage: int) -> None:
    more = {**AUTOCAST, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": stage}}
    want = plainly(2, (2, 2, 2))
    for rank, got in enumerate(run_ranks(train, 2, args=(more,))):
        equal(got, want, rank)


@pytest.mark.full
@pytest.mark.parametrize("nodes", ["ab", "aab"])
@pytest.mark.parametrize("stage", [2, 3])
def test_nodes_train_as_ddp_under_autocast(nodes: str, stage: int) -> None:
    more, want = {**AUTOCAST, "zero_optimization": {"stage": stage}}, plainly(len(nodes))
    for rank, (losses, weights) in enumerate(run_ranks(train, len(nodes), args=(more,), nodes=nodes)):
        assert losses == pytest.approx(want[0][rank], rel=1e-6)
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(weights, want[1], strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_runs_under_it_too(reentrant: bool) -> None:
    model = Model(recompute=reentrant)
    if reentrant:  # which needs an input with a gradient
        model.words.register_forward_hook(lambda _, args, out: out if out.requires_grad else out.requires_grad_())
    equal(train(0, 1, AUTOCAST, model), plainly(1))
    assert len(model.seen) == 2 * 3 * 3 and set(model.seen) == {torch.bfloat16}


def test_a_budget_of_recomputation() -> None:
    want, model = plainly(1), Model()
    equal(train(0, 1, {**AUTOCAST, "activation_checkpointing": {"budget": 14_000}}, model), want)
    assert len(model.seen) > 3 * 3 and set(model.seen) == {torch.bfloat16}


def test_a_loss_behind_the_engine_is_the_scripts_own() -> None:
    """As in DeepSpeed: outside of forward there is no autocast, unless the script enters it."""
    model = nn.Linear(8, 4)
    engine = deepc.initialize(model=model, config={**BASE, **AUTOCAST})[0]
    out = engine(torch.randn(4, 8))
    assert out.dtype == torch.bfloat16 and not torch.is_autocast_enabled("cpu")
    engine.eval()
    with torch.no_grad():
        assert engine(torch.randn(4, 8)).dtype == torch.bfloat16
    engine.backward(out.float().sum())
    assert engine.full_grad(model.weight).dtype == torch.float32
    engine.destroy()
    assert model(torch.randn(4, 8)).dtype == torch.float32


@pytest.mark.parametrize(("section", "inside"), [(AUTOCAST, torch.bfloat16), ({}, torch.float16)])
def test_autocast_that_is_entered_around_the_engine(section: dict, inside: torch.dtype, caplog) -> None:
    """The section counts in a forward, and is said once; without it the script's own counts, as under torch."""
    engine = deepc.initialize(model=nn.Linear(8, 4), config={**BASE, **section})[0]
    with caplog.at_level(logging.INFO, "deepc"), torch.autocast("cpu", dtype=torch.float16):
        outs = [engine(torch.randn(4, 8)) for _ in range(2)]
        assert torch.get_autocast_dtype("cpu") == torch.float16
    engine.destroy()
    assert {out.dtype for out in outs} == {inside}
    assert sum("is entered around the engine" in r.message for r in caplog.records) == bool(section)


def test_autocast_around_a_whole_loop_computes_with_the_new_weights() -> None:
    """torch keeps its casts of weights until the outermost autocast ends: they were those of the first step."""

    def around(engine):
        stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
        return engine

    for more in (AUTOCAST, {}):
        with contextlib.ExitStack() as stack:
            got = train(0, 1, more, changed=around)
        equal(got, plainly(1))


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 3])
def test_a_compiled_engine(stage: int) -> None:
    want = plainly(1)
    got = train(0, 1, {**AUTOCAST, "zero_optimization": {"stage": stage}}, changed=lambda e: torch.compile(e))
    assert got[0] == pytest.approx(want[0][0], rel=2e-2)


# ---- fp16 ------------------------------------------------------------------------------------------------------------
def test_fp16_scales_the_loss_as_torchs_scaler() -> None:
    more = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
    model, reference = Model(), Model()
    engine = deepc.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), config={**BASE, **more}
    )[0]
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(reference.parameters(), lr=0.5)
    for step in range(5):
        grow = 3e4 if step in (0, 1) else 1.0  # overflows
        with torch.autocast("cpu", dtype=torch.float16):
            want = reference(data(step, 0)) * grow
        got = engine(data(step, 0)) * grow
        assert float(got) == float(want)
        scaler.scale(want).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        engine.backward(got)
        engine.step()
        assert engine.loss_scale == scaler.get_scale()
    assert engine.skipped_steps == 2 and engine.loss_scale == 2.0**14
    for p, q in zip(model.parameters(), reference.parameters()):
        assert torch.equal(engine.full_fp32_param(p).view(p.shape), q)
    with pytest.raises(deepc.errors.DeepcError, match="engine.scale"):
        engine(data(0, 0)).backward()
    engine.zero_grad()
    engine.scale(engine(data(0, 0))).backward()
    assert engine.step().applied
    engine.destroy()


@pytest.mark.parametrize("overflows", [(), (0,), (7, 8), (2005,)])
def test_the_scale_of_each_step_is_torchs(overflows: tuple[int, ...]) -> None:
    mine, theirs = AutocastLossScaler(), torch.amp.GradScaler("cpu", enabled=True)
    p = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], lr=0.0)
    for step in range(4100):
        bad = step in overflows
        loss = theirs.scale(p.sum())  # makes its scale, and the state of the first step
        p.grad = torch.full((1,), float("inf") if bad else 1.0)
        theirs.unscale_(optimizer)
        theirs.step(optimizer)
        theirs.update()
        mine.update_scale(bad)
        assert mine.loss_scale == theirs.get_scale(), (step, loss)


# ---- with what is around it ------------------------------------------------------------------------------------------
def staged(rank: int, world: int, stages: int):
    from deepc.pipe import PipelineModule

    model = Model()
    chain = [model.words, *model.blocks, model.head]
    if stages:
        module = PipelineModule(chain, num_stages=stages, loss_fn=lambda out, y: nn.functional.mse_loss(out, y))
        engine = deepc.initialize(model=module, config={**BASE, **AUTOCAST, "gradient_accumulation_steps": 2})[0]
    else:
        module = nn.Sequential(*chain)
        engine = deepc.initialize(model=module, config={**BASE, **AUTOCAST, "gradient_accumulation_steps": 2})[0]
    losses = []
    for step in range(3):
        batches = [(data(2 * step + m, 0), torch.full((4, 8, 11), 0.1 * m)) for m in range(2)]
        if stages:
            losses.append(float(engine.train_batch(iter(batches))))
            continue
        mean = 0.0
        for x, y in batches:
            out = engine(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.mse_loss(out, y)
            mean += float(loss) / 2
            engine.backward(loss)
            engine.step()
        losses.append(mean)
    engine.destroy()
    return losses


def test_stages_of_a_pipeline_and_their_loss() -> None:
    (want,) = run_ranks(staged, 1, args=(0,))
    for got in run_ranks(staged, 2, args=(2,)):
        assert got == pytest.approx(want, rel=1e-6)


def llama(rank: int, world: int, more: dict) -> list[float]:
    from test_tensor_parallel import transformer

    engine = deepc.initialize(
        model=transformer("llama").train(),
        config={**BASE, **AUTOCAST, "gradient_accumulation_steps": 2, **more},
        sample_batch={k: torch.zeros(4, 17, dtype=torch.long) for k in ("input_ids", "labels")},
    )[0]
    losses, draw = [], torch.Generator().manual_seed(5)
    for _ in range(3):
        rows = [torch.randint(0, 61, (4, 17), generator=draw) for _ in range(2)]
        batches = [{"input_ids": ids, "labels": ids} for ids in rows]
        if "pipeline" in more:
            losses.append(engine.train_batch(iter(batches)).item())
            continue
        losses.append(0.0)
        for batch in batches:
            loss = engine(**batch).loss
            losses[-1] += loss.item() / 2
            engine.backward(loss)
            engine.step()
    engine.destroy()
    return losses


@pytest.mark.full
def test_ranks_that_share_a_model_of_transformers() -> None:
    pytest.importorskip("transformers")
    (want,) = run_ranks(llama, 1, args=({},))
    for more, bound in (
        ({"pipeline": {"stages": 2}}, 1e-6),
        ({"sequence_parallel_size": 2}, 1e-6),
        ({"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 3}}, 1e-4),
    ):
        for got in run_ranks(llama, 2, args=(more,)):
            assert got == pytest.approx(want, rel=bound), more


@pytest.mark.parametrize("call", [deepc.ops.attention, deepc.ops.block_sparse_attention])
def test_attention_casts_what_it_gets(call) -> None:
    """Rotary positions leave queries and keys in fp32 beside values in 16 bits."""
    q, k, v = (torch.randn(1, 2, 24, 8, requires_grad=True) for _ in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = call(q, k, v.bfloat16())
    with torch.no_grad():
        assert torch.equal(got, call(q.bfloat16(), k.bfloat16(), v.bfloat16()))
    got.sum().backward()
    assert {t.grad.dtype for t in (q, k, v)} == {torch.float32}


@pytest.mark.parametrize("more", [{"deepc": {"fuse": ["attention"]}}, {"sparse_attention": {"mode": "dense"}}])
def test_models_whose_attention_is_deepcs(more: dict) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=11)
    ids, losses = torch.arange(32).view(2, 16) % 11, []
    for section in ({}, more):
        torch.manual_seed(3)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).train()
        engine = deepc.initialize(model=model, config={**BASE, **AUTOCAST, **section})[0]
        losses.append(engine(input_ids=ids, labels=ids).loss)
        engine.backward(losses[-1])
        assert engine.step().applied
        engine.destroy()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-2)


def resumed(folder: str, first: dict, then: dict) -> list[float]:
    model = Model()
    engine = deepc.initialize(model=model, config={**BASE, **first})[0]
    engine.backward(engine(data(0, 0)))
    engine.step()
    engine.save_checkpoint(folder, tag="a")
    engine.destroy()
    other = Model()
    with torch.no_grad():
        other.head.weight.zero_()
    engine = deepc.initialize(model=other, config={**BASE, **then})[0]
    assert engine.load_checkpoint(folder, tag="a")[0] is not None
    for p, q in zip(other.parameters(), model.parameters()):
        assert torch.equal(p, q)
    loss = engine(data(1, 0))
    engine.backward(loss)
    assert engine.step().applied
    engine.destroy()
    return float(loss)


FP16 = {"torch_autocast": {"enabled": True, "dtype": "fp16"}}


@pytest.mark.parametrize(("first", "then"), [({}, AUTOCAST), (AUTOCAST, {}), (FP16, {}), ({}, FP16), (FP16, AUTOCAST)])
def test_a_checkpoint_goes_on_with_it_and_without(first: dict, then: dict, tmp_path) -> None:
    resumed(str(tmp_path), first, then)


def test_the_plan_and_the_records_name_it() -> None:
    engine = deepc.initialize(model=nn.Linear(8, 4), config={**BASE, **AUTOCAST})[0]
    assert "float32 parameters under torch.autocast in bfloat16" in engine.plan.describe()
    assert engine.precision == "fp32" and engine.precision_in_words == "fp32, autocast bf16"
    engine.destroy()


def test_16_bit_weights_may_run_under_it() -> None:
    """DeepSpeed takes both: what autocast has in fp32 (losses, on CPUs) is in fp32 then."""
    losses = []
    for more in ({}, AUTOCAST):
        model = Model()
        engine = deepc.initialize(model=model, config={**BASE, "bf16": {"enabled": True}, **more})[0]
        losses.append(engine(data(0, 0)))
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        engine.destroy()
    assert [loss.dtype for loss in losses] == [torch.bfloat16, torch.float32]


# ---- the configuration -----------------------------------------------------------------------------------------------
def load(**raw) -> Config:
    return Config.load({"train_batch_size": 1, **raw}, world_size=1)


@pytest.mark.parametrize("name", ["bf16", "bfloat16", "torch.bfloat16", "fp16", "float16", "half", "torch.float16"])
def test_dtypes_by_all_of_deepspeeds_names(name: str) -> None:
    section = load(torch_autocast={"enabled": True, "dtype": name}).torch_autocast
    assert section.dtype == ("bf16" if "b" in name else "fp16")
    assert load(torch_autocast={"enabled": True}).autocast == "bf16" and load(torch_autocast={}).autocast is None


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ({"bf16": {"enabled": True}, **FP16}, ("bf16.enabled", "torch_autocast.dtype")),
        ({"fp16": {"enabled": True}, **AUTOCAST}, ("fp16.enabled", "torch_autocast.dtype")),
        ({"precision": "auto", **AUTOCAST}, ("precision", "torch_autocast.enabled")),
        ({"torch_autocast": {"enabled": True, "dtype": "fp32"}}, ("torch_autocast.dtype", '"fp32"')),
        ({"managed_gradient_accumulation": False, "deepc": {"deterministic": "layout"}}, ("managed", "deterministic")),
        ({"managed_gradient_accumulation": False, "pipeline": {"stages": 1}}, ()),
    ],
)
def test_what_does_not_go_together_is_named(raw: dict, named: tuple[str, ...]) -> None:
    if not named:
        load(**raw)
        return
    with pytest.raises(ConfigError) as caught:
        load(**raw)
    assert all(n in str(caught.value) for n in named)


def test_classes_that_are_safe_in_lower_precision_are_without_effect() -> None:
    key = "torch_autocast.lower_precision_safe_modules"
    section = {"enabled": True, "lower_precision_safe_modules": ["torch.nn.Linear"]}
    assert [i.key for i in load(torch_autocast=section).inert] == [key]
    with pytest.raises(ConfigError, match="lower_precision_safe_modules"):
        load(torch_autocast={**section, "lower_precision_safe_modules": [3]})


# ---- whose step is it ------------------------------------------------------------------------------------------------
UNMANAGED = {"managed_gradient_accumulation": False}
COUNTS = (2, 1, 3)  # micro-batches of the steps


def by_counts(rank: int, world: int, more: dict, bare: bool = False):
    """(losses, weights, (applied, samples) of each step) where the script makes steps of so many micro-batches."""
    model = Model()
    engine = deepc.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), config={**BASE, **UNMANAGED, **more}
    )[0]
    losses, steps, at = [], [], 0
    for count in COUNTS:
        for _ in range(count):
            loss = engine(data(at, rank))
            losses.append(float(loss))
            if bare:
                (loss / count).backward()
            else:
                engine.backward(loss / count, scale_wrt_gas=False)
            assert not engine.is_gradient_accumulation_boundary()
            at += 1
        steps.append((engine.step().applied, engine.global_samples))
    weights = [engine.full_fp32_param(p).view(p.shape) for p in model.parameters()]
    assert engine.global_steps == engine.micro_steps == len(COUNTS)
    engine.destroy()
    return losses, weights, steps


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("stage", range(4))
def test_every_step_updates(stage: int, bare: bool) -> None:
    *got, steps = by_counts(0, 1, {"zero_optimization": {"stage": stage}}, bare)
    losses, weights = plainly(1, COUNTS, None)
    assert got[0] == pytest.approx(losses[0], rel=1e-5)
    for a, b in zip(got[1], weights):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)
    assert steps == [(True, 8), (True, 12), (True, 24)]


@pytest.mark.parametrize("stage", [0, 3])
def test_every_step_updates_on_two_ranks(stage: int) -> None:
    losses, weights = plainly(2, COUNTS, None)
    for rank, (got, mine, steps) in enumerate(run_ranks(by_counts, 2, args=({"zero_optimization": {"stage": stage}},))):
        assert got == pytest.approx(losses[rank], rel=1e-5)
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(mine, weights))
        assert steps == [(True, 16), (True, 24), (True, 48)]


def test_what_a_script_may_do_between_its_steps(tmp_path) -> None:
    model = Model()
    engine = deepc.initialize(model=model, config={**BASE, **UNMANAGED, "gradient_accumulation_steps": 2})[0]
    with pytest.raises(MisuseError, match="managed_gradient_accumulation"):
        engine.set_gradient_accumulation_boundary(True)
    loss = engine(data(0, 0))
    assert float(engine.backward(loss)) == pytest.approx(float(loss) / 2)  # as in DeepSpeed
    assert engine.in_accumulation
    engine.zero_grad()
    with pytest.raises(deepc.errors.DeepcError, match="without a backward"):
        engine.step()
    engine.backward(engine(data(0, 0)))
    assert engine.step().applied and engine.global_samples == 4 and not engine.in_accumulation
    engine.save_checkpoint(str(tmp_path), tag="a")
    engine.backward(engine(data(1, 0)))
    engine.load_checkpoint(str(tmp_path), tag="a")  # which drops it
    assert not engine.in_accumulation and (engine.global_steps, engine.global_samples) == (1, 4)
    engine.backward(engine(data(1, 0)))
    assert engine.step().applied and engine.global_samples == 8
    engine.destroy()
