"""deepc.fuse in the configuration: losses within the bound that docs/fused.md states, under everything that an engine
does with a model."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from pathlib import Path
from typing import Any

import deepc
import pytest
import torch
import torch.distributed as dist
from deepc.errors import ConfigError, UnsupportedError
from ranks import run_ranks
from tiny import make_batch, make_model
from torch import nn

DOCUMENT = (Path(__file__).parents[2] / "docs/fused.md").read_text()
VOCAB = 131


def bound(precision: str) -> float:
    """Relative, of each of the first steps' losses, as docs/fused.md has it."""
    (found,) = re.findall(rf"\| {precision} \| ([0-9.e-]+) \|", DOCUMENT)
    return float(found)


def config(fuse: Any, stage: int = 3, precision: str = "fp32", **more: Any) -> dict:
    out = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "deepc": {"fuse": fuse, "log": {"format": "none"}},
        **more,
    }
    return out if precision == "fp32" else {**out, precision: {"enabled": True}}


@contextlib.contextmanager
def told():
    """What deepc's logger says inside."""
    lines: list[str] = []
    log, handler = logging.getLogger("deepc"), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    level = log.level
    log.addHandler(handler)
    log.setLevel("INFO")
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def causal(name: str) -> nn.Module:
    """A small model of transformers, all of whose parameters show."""
    import transformers

    torch.manual_seed(0)
    if name == "gpt2":
        made = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=2, n_head=4,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            )
        )  # fmt: skip
    else:
        made = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False,
            )
        )  # fmt: skip
    with torch.no_grad():
        for p in made.parameters():
            p.add_(torch.randn(p.shape) * 0.05)
    return made.train()


def frozen_but_adapters(model: nn.Module) -> nn.Module:
    """As LoRA leaves a model: nothing trains but small layers beside the frozen ones, the head is frozen too."""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.a, self.b = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)
            nn.init.normal_(self.b.weight, std=0.02)

        def forward(self, x):
            return self.base(x) + self.b(self.a(x))

    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj, layer.mlp.gate_proj = Adapted(layer.self_attn.q_proj), Adapted(layer.mlp.gate_proj)
    return model


def losses(engine: Any, feed: Any, steps: int = 4) -> list[float]:
    out = []
    for step in range(steps):
        result = feed(step, engine)
        loss = result if torch.is_tensor(result) else result.loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().double()
        dist.all_reduce(total)
        out.append(total.item() / engine.world_size)
    return out


def tiny(step: int, engine: Any) -> Any:
    return engine(*(t[engine.global_rank :: engine.world_size] for t in make_batch(step)))


def text(step: int, engine: Any) -> Any:
    g = torch.Generator().manual_seed(10 * step + engine.global_rank)
    ids = torch.randint(VOCAB, (4, 12), generator=g)
    return engine(input_ids=ids, labels=ids)


def train(rank: int, world: int, case: dict) -> dict[str, Any]:
    """Four steps of a case for deepc.fuse false and "auto". By value: losses, names of the state, what was logged, how
    many modules have another class meanwhile, whether they have their own afterwards."""
    os.environ["DEEPC_STREAMED"] = str(int(case.get("streamed", False)))
    try:
        return {str(fuse): _train(case, fuse) for fuse in (False, "auto")}
    finally:
        del os.environ["DEEPC_STREAMED"]


def _train(case: dict, fuse: Any) -> tuple:
    hf = "model" in case
    cfg = config(fuse, case["stage"], case.get("precision", "fp32"))
    with deepc.zero.Init(config_dict_or_path=cfg, enabled=case.get("init", False)):
        model = causal(case["model"]) if hf else make_model()
    if case.get("frozen"):
        frozen_but_adapters(model)
    kinds = [type(m) for m in model.modules()]
    with told() as lines:
        engine, *_ = deepc.initialize(model=model, config=cfg)
    assert (engine.plan.mode == "streamed") == case.get("streamed", False)
    if case.get("compile"):
        torch._dynamo.reset()
        engine.compile(backend="aot_eager")
    changed = sum(a is not type(b) for a, b in zip(kinds, model.modules(), strict=True))
    found = losses(engine, text if hf else tiny)
    names = list(engine.module_state_dict())
    engine.destroy()
    back = all(a is type(b) for a, b in zip(kinds, model.modules(), strict=True))
    return found, names, [t for t in lines if t.startswith("fused")], changed, back


def check(case: dict, fused: str, changed: int) -> None:
    (first, *_) = run_ranks(train, 2, args=(case,))
    (plain, names, said, none, _), (got, names_fused, told_fused, some, back) = first["False"], first["auto"]
    limit = bound(case.get("precision", "fp32"))
    assert all(abs(a - b) <= limit * abs(b) for a, b in zip(got, plain, strict=True)), (got, plain)
    assert not said and none == 0
    assert len(told_fused) == 1 and told_fused[0].startswith(f"fused: {fused}"), told_fused
    assert some == changed and back, "destroy() gives the model back as it was"
    assert names == names_fused


TINY = ("norm 5", 5)
FAMILIES = {
    "gpt2": ("norm 5, mlp 2, attention 2, loss 1", 11),
    "llama": ("norm 5, mlp 2, rotary 2, attention 2, loss 1", 11),
}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_model_of_torchs_own_modules(stage):
    check({"stage": stage}, *TINY)


def test_streamed_after_zero_init():
    check({"stage": 3, "init": True, "streamed": True}, *TINY)


@pytest.mark.parametrize("streamed", [pytest.param(False, marks=pytest.mark.full), True])
def test_compiled(streamed):
    check({"stage": 3, "compile": True, "streamed": streamed}, *TINY)


@pytest.mark.parametrize(
    ("model", "precision"),
    [
        pytest.param(model, precision, marks=() if (k + (precision == "bf16")) % 2 else pytest.mark.full)
        for k, model in enumerate(FAMILIES)
        for precision in ("fp32", "bf16")
    ],
)
def test_models_of_transformers(model, precision):
    pytest.importorskip("transformers")
    check({"stage": 3, "model": model, "precision": precision}, *FAMILIES[model])


@pytest.mark.parametrize("more", [{"init": True}, {"frozen": True}], ids=["zero.Init", "adapters"])
@pytest.mark.parametrize("streamed", [False, True])
def test_llama_under_init_and_with_adapters(more, streamed):
    pytest.importorskip("transformers")
    check({"stage": 3, "model": "llama", "streamed": streamed, **more}, *FAMILIES["llama"])


@pytest.mark.full
def test_compiled_with_the_loss():
    pytest.importorskip("transformers")
    check({"stage": 2, "model": "gpt2", "compile": True}, *FAMILIES["gpt2"])


# ---- checkpoints -----------------------------------------------------------------------------------------------------
def _resume(rank: int, world: int, folder: str) -> dict[str, list[float]]:
    """Two steps, a checkpoint, two more; and those again from the checkpoint, fused and not."""
    out = {}
    for written in (False, "auto"):
        engine, *_ = deepc.initialize(model=make_model(), config=config(written))
        losses(engine, tiny, 2)
        engine.save_checkpoint(f"{folder}/{written}")
        engine.destroy()
        for read in (False, "auto"):
            again, *_ = deepc.initialize(model=make_model(seed=1), config=config(read))
            again.load_checkpoint(f"{folder}/{written}")
            out[f"{written} -> {read}"] = losses(again, lambda step, engine: tiny(step + 2, engine), 2)
            again.destroy()
    return out


def test_checkpoints_are_the_same_fused_or_not(tmp_path):
    (found, _) = run_ranks(_resume, 2, args=(str(tmp_path),))
    want = found["False -> False"]
    for how, got in found.items():
        assert all(abs(a - b) <= bound("fp32") * abs(b) for a, b in zip(got, want, strict=True)), (how, found)


# ---- what can't be fused ---------------------------------------------------------------------------------------------
def _refusals(rank: int, world: int) -> dict[str, Any]:
    out: dict[str, Any] = {}

    def attempt(name: str, model: nn.Module, fuse: Any) -> None:
        try:
            engine, *_ = deepc.initialize(model=model, config=config(fuse))
            out[name] = type(engine).__name__
            engine.destroy()
        except Exception as exc:
            out[name] = (type(exc).__name__, str(exc))

    with told() as lines:
        attempt("auto", nn.Linear(3, 3), "auto")
    out["told"] = [t for t in lines if t.startswith("fused")]
    attempt("true", nn.Linear(3, 3), True)
    model = make_model()
    attempt("kinds", model, ["norm", "loss"])
    out["left alone"] = type(model.ln) is nn.LayerNorm
    attempt("kind", model, ["norm"])
    attempt("true of some", make_model(), True)
    return out


def test_what_cannot_be_fused_is_refused_or_said():
    (found,) = run_ranks(_refusals, 1)
    assert found["auto"] == found["kind"] == found["true of some"] == "Engine"
    assert found["told"] == ["fused: nothing new\n  not fused: the model: nothing in Linear can be fused"]
    kind, text = found["true"]
    assert kind == UnsupportedError.__name__ and 'Set it to "auto" or false.' in text
    assert "deepc.fuse = true" in text and "nothing in Linear can be fused" in text
    kind, text = found["kinds"]
    assert kind == UnsupportedError.__name__ and "nothing in TinyGPT can be fused as loss" in text
    assert found["left alone"]


@pytest.mark.parametrize("value", ["on", 1, [], ["norm", "embedding"], {"norm": True}])
def test_other_values_are_refused(value):
    with pytest.raises(ConfigError, match=r'deepc\.fuse = .* must be true, false, "auto" or a list of norm, mlp'):
        deepc.initialize(model=nn.Linear(2, 2), config=config(value))


def test_the_estimate_knows_the_logits_that_are_not_made():
    """What is held for backward, of a model whose logits are most of it."""
    transformers = pytest.importorskip("transformers")
    made = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=8192, n_positions=64, n_embd=32, n_layer=1, n_head=2)
    ).train()
    ids = torch.zeros(4, 64, dtype=torch.long)
    kinds = [type(m) for m in made.modules()]
    plain, fused = (
        deepc.estimate(made, config(fuse), {"input_ids": ids, "labels": ids}).live_peak for fuse in (False, "auto")
    )
    logits = 4 * 64 * 8192 * 4
    assert plain - fused > logits
    assert kinds == [type(m) for m in made.modules()]
