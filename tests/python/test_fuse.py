"""deepc.fuse: every family of transformers that it knows against the unfused model elementwise, and under everything
that runs a model."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle

import deepc
import pytest
import torch
from deepc.errors import ArgumentError, UnsupportedError
from ranks import run_ranks
from torch import nn

transformers = pytest.importorskip("transformers")

VOCAB = 131
DECODER = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)


def _tokens(batch=2, length=12, seed=1):
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def _causal(seed=1):
    ids = _tokens(seed=seed)
    labels = ids.clone()
    labels[0, :4] = -100
    return dict(input_ids=ids, labels=labels)


def _gpt2(**more):
    return (
        transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=VOCAB,
                n_positions=64,
                n_embd=32,
                n_layer=2,
                n_head=4,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                **more,
            )
        ),
        _causal(),
    )


def _t5():
    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
    )
    labels = _tokens(length=7, seed=2)
    labels[1, 5:] = -100
    return transformers.T5ForConditionalGeneration(config), dict(input_ids=_tokens(), labels=labels)


def _bert():
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    labels = _tokens(seed=3)
    labels[:, ::2] = -100
    return transformers.BertForMaskedLM(config), dict(input_ids=_tokens(), labels=labels)


def _vit():
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=16,
        patch_size=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=5,
    )
    pixels = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(4))
    return transformers.ViTForImageClassification(config), dict(pixel_values=pixels, labels=torch.tensor([0, 4, 2]))


def _decoder(name, **more):
    config = getattr(transformers, name + "Config")(**{**DECODER, **more})
    return getattr(transformers, name + "ForCausalLM")(config), _causal()


FAMILIES = {  # name -> (makes model and inputs, kinds that must be replaced at least so often)
    "gpt2": (_gpt2, dict(norm=5, mlp=2, attention=2, loss=1)),
    "llama": (functools.partial(_decoder, "Llama"), dict(norm=5, mlp=2, rotary=2, attention=2, loss=1)),
    "mistral": (
        functools.partial(_decoder, "Mistral", tie_word_embeddings=True),
        dict(norm=5, mlp=2, rotary=2, attention=2, loss=1),
    ),
    "qwen2": (functools.partial(_decoder, "Qwen2"), dict(norm=5, mlp=2, rotary=2, attention=2, loss=1)),
    "mixtral": (
        functools.partial(_decoder, "Mixtral", num_local_experts=3, num_experts_per_tok=2, output_router_logits=True),
        dict(norm=5, mlp=2, rotary=2, attention=2, loss=1),
    ),
    "t5": (_t5, dict(norm=12, mlp=4, attention=6, loss=1)),
    "bert": (_bert, dict(norm=6, mlp=3, attention=2, loss=1)),
    "vit": (_vit, dict(norm=5, mlp=2, attention=2)),
}


def make(family: str):
    torch.manual_seed(0)
    model, inputs = FAMILIES[family][0]()
    with torch.no_grad():  # initial norms and biases are ones and zeros: nothing would show
        for p in model.parameters():
            p.add_(torch.randn(p.shape) * 0.05)
    return model.train(), inputs


def loss_and_grads(model, inputs):
    model.zero_grad()
    out = model(**inputs)
    out.loss.backward()
    return out, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(got, want, bound=1e-5) -> None:
    assert got.keys() == want.keys()
    largest = max(w.abs().max() for w in want.values())
    for (
        name,
        wanted,
    ) in want.items():  # gradients that are rounding noise in both (keys' biases) are held to the model's largest
        assert (got[name] - wanted).abs().max() <= bound * max(wanted.abs().max(), 1e-3 * largest), name


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_unfused_model(family):
    model, inputs = make(family)
    plain = copy.deepcopy(model)
    names = list(model.state_dict())
    summary = deepc.fuse(model)
    for kind, count in FAMILIES[family][1].items():
        assert len(summary.replaced[kind]) >= count, str(summary)
    assert list(model.state_dict()) == names and not summary.skipped
    want, want_grads = loss_and_grads(plain, inputs)
    got, got_grads = loss_and_grads(model, inputs)
    assert abs(got.loss.item() - want.loss.item()) <= 1e-6 * abs(want.loss.item())
    assert_same(got_grads, want_grads)
    if "loss" in FAMILIES[family][1]:
        assert got.logits is None and type(got) is type(want)
    for m in (model, plain):
        m.eval()
    with torch.no_grad():
        got, want = model(**inputs), plain(**inputs)
        torch.testing.assert_close(got.logits, want.logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got.loss, want.loss, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["norm", "mlp", "rotary", "attention", "loss"])
def test_one_kind_only(kind):
    model, inputs = make("llama")
    plain = copy.deepcopy(model)
    summary = deepc.fuse(model, only=(kind,))
    assert [k for k, names in summary.replaced.items() if names] == [kind]
    assert str(summary).startswith(f"fused: {kind} ")
    again = deepc.fuse(model)
    assert again.already == len(summary.replaced[kind]) and not again.replaced[kind] and again.total > 0
    assert deepc.fuse(model).total == 0
    want, want_grads = loss_and_grads(plain, inputs)
    got, got_grads = loss_and_grads(model, inputs)
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-6, atol=0)
    assert_same(got_grads, want_grads)


def test_a_forward_with_decorators_keeps_them():
    from transformers.models.llama.modeling_llama import LlamaAttention

    calls = []

    def decorated(times):
        def around(function):
            @functools.wraps(function)
            def forward(*args, **kwargs):
                calls.append(times)
                return function(*args, **kwargs)

            return forward

        return around

    model, inputs = make("llama")
    # a class of its own: what is made of one is kept for all later models
    forward = decorated("outer")(decorated("inner")(LlamaAttention.forward))
    names = {"forward": forward, "__module__": LlamaAttention.__module__}
    kind = type(LlamaAttention)("LlamaAttention", (LlamaAttention,), names)
    for layer in model.model.layers:
        layer.self_attn.__class__ = kind
    plain = copy.deepcopy(model)
    summary = deepc.fuse(model, only=("rotary", "attention"))
    layers = model.config.num_hidden_layers
    assert len(summary.replaced["rotary"]) == len(summary.replaced["attention"]) == layers and not summary.skipped
    want, want_grads = loss_and_grads(plain, inputs)
    on_plain = list(calls)
    got, got_grads = loss_and_grads(model, inputs)
    assert on_plain == ["outer", "inner"] * layers and calls == 2 * on_plain
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-6, atol=0)
    assert_same(got_grads, want_grads)


def test_the_operators_ran_and_the_logits_did_not():
    model, inputs = make("llama")
    deepc.fuse(model)
    before = deepc.counters()
    calls = []
    model.lm_head.register_forward_hook(lambda m, args, out: calls.append(out.shape))
    loss_and_grads(model, inputs)
    after = deepc.counters()
    assert after["xent_calls"] == before["xent_calls"] + 1
    assert sum(after[k] != before[k] for k in after) >= 4  # norms, SwiGLU and rotary count theirs
    assert after["attention_calls"] == before["attention_calls"] + 4  # two layers, there and back
    assert calls == [torch.Size([2, 12, 32]), torch.Size([])]  # handed through, then the loss


def test_masks_are_the_models_own_attention_and_dropout_is_ours():
    model, inputs = make("llama")
    plain = copy.deepcopy(model)
    deepc.fuse(model, only=("attention",))
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][1, :3] = 0
    before = deepc.counters()["attention_calls"]
    want, want_grads = loss_and_grads(plain, inputs)
    got, got_grads = loss_and_grads(model, inputs)
    assert torch.equal(got.loss, want.loss) and all(torch.equal(got_grads[n], g) for n, g in want_grads.items())
    del inputs["attention_mask"]
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    torch.manual_seed(1)
    one, one_grads = loss_and_grads(model, inputs)
    assert deepc.counters()["attention_calls"] == before + 4  # two layers, there and back
    torch.manual_seed(1)
    again, again_grads = loss_and_grads(model, inputs)
    assert torch.equal(again.loss, one.loss) and all(torch.equal(again_grads[n], g) for n, g in one_grads.items())
    model.eval()  # no dropout now
    with torch.no_grad():
        assert not torch.equal(model(**inputs).logits, one.logits)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_loss_options_of_the_trainer(family):
    """num_items_in_batch as the Trainer passes it, shift_labels as sequence parallelism does, labels by position."""
    model, inputs = make(family)
    plain = copy.deepcopy(model)
    deepc.fuse(model)
    ids, labels = inputs["input_ids"], inputs["labels"]
    for more in (
        dict(num_items_in_batch=torch.tensor(40)),
        dict(num_items_in_batch=40),
        dict(labels=labels, shift_labels=labels.roll(-1, 1)),
    ):
        want, want_grads = loss_and_grads(plain, {**inputs, **more})
        got, got_grads = loss_and_grads(model, {**inputs, **more})
        torch.testing.assert_close(got.loss, want.loss, rtol=1e-6, atol=0)
        assert_same(got_grads, want_grads)
    place = list(inspect.signature(type(plain).forward).parameters).index("labels") - 1
    positional = (ids, *(None,) * (place - 1), labels)
    torch.testing.assert_close(model(*positional).loss, plain(*positional).loss, rtol=1e-6, atol=0)
    assert model(*positional).logits is None


def test_a_float64_model_keeps_its_own_loss():
    """The operator has no such numbers; a model may be fused and then made wide, for a check of gradients."""
    model, inputs = make("gpt2")
    plain = copy.deepcopy(model).double()
    deepc.fuse(model)
    model.double()
    got, want = model(**inputs), plain(**inputs)
    assert got.logits.dtype == torch.float64
    torch.testing.assert_close(got.loss, want.loss)


def test_what_needs_logits_gets_them():
    model, inputs = make("llama")
    plain = copy.deepcopy(model)
    deepc.fuse(model)
    for more in (dict(labels=None), dict(return_dict=False), dict(logits_to_keep=12)):
        got, want = model(**{**inputs, **more}), plain(**{**inputs, **more})
        got, want = (x if isinstance(x, tuple) else x.to_tuple() for x in (got, want))
        torch.testing.assert_close(
            [t for t in got if torch.is_tensor(t)], [t for t in want if torch.is_tensor(t)], rtol=1e-5, atol=1e-5
        )
    model.loss_function = plain.loss_function = lambda logits, labels, vocab_size, **kw: logits.logsumexp(-1).mean()
    torch.testing.assert_close(model(**inputs).loss, plain(**inputs).loss, rtol=1e-5, atol=0)


class _Adapted(nn.Module):
    """A layer around another one, as peft's."""

    def __init__(self, base):
        super().__init__()
        self.base_layer, self.more = base, nn.Linear(base.in_features, base.out_features, bias=False)

    def forward(self, x, *args, **kwargs):
        return self.base_layer(x, *args, **kwargs) + self.more(x)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.resize_token_embeddings(VOCAB + 5),
        lambda model: setattr(model, "lm_head", _Adapted(model.lm_head)),
    ],
    ids=["resized", "adapted"],
)
def test_a_head_that_comes_later_gives_its_logits(change):
    model, inputs = make("llama")
    plain = copy.deepcopy(model)
    deepc.fuse(model)
    for one in (plain, model):
        torch.manual_seed(7)
        change(one)
    (got, grads), (want, wanted) = loss_and_grads(model, inputs), loss_and_grads(plain, inputs)
    torch.testing.assert_close([got.loss, got.logits], [want.loss, want.logits], rtol=1e-5, atol=1e-5)
    assert_same(grads, wanted)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_an_activation_that_is_exchanged_later_counts(family):
    model, inputs = make(family)
    plain = copy.deepcopy(model)
    deepc.fuse(model)
    for module in (*plain.modules(), *model.modules()):
        if hasattr(module, "act_fn"):
            module.act_fn = nn.Tanh()
    torch.testing.assert_close(model(**inputs).loss, plain(**inputs).loss, rtol=1e-6, atol=0)


def test_what_two_calls_have_replaced_is_undone_one_by_one():
    model, _ = make("llama")
    attention = model.model.layers[0].self_attn
    for first in (0, 1):
        calls = [deepc.fuse(model, kind) for kind in ("rotary", "attention")]
        calls[first].undo()
        assert attention._deepc_kinds == (("attention",), ("rotary",))[first]
        calls[1 - first].undo()
        assert type(attention) is transformers.models.llama.modeling_llama.LlamaAttention


def test_what_a_fused_module_adds_hides_nothing_of_the_module():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Sequential(nn.LayerNorm(8), nn.GELU()), nn.LayerNorm(8)

        def forward(self, x):
            return self.head(self.body(x))

    model, seen = Own(), []
    deepc.fuse(model)
    assert model.apply(seen.append) is model and seen == [*model.body, model.body, model.head, model]
    assert (
        isinstance(model.head, nn.LayerNorm)
        and isinstance(model.body, nn.Sequential)
        and model(torch.ones(2, 8)).shape == (2, 8)
    )


def test_a_failed_forward_leaves_no_trace():
    model, inputs = make("llama")
    deepc.fuse(model)
    with pytest.raises(RuntimeError, match="labels"):
        model(**{**inputs, "labels": inputs["labels"] + VOCAB})
    assert model(input_ids=inputs["input_ids"]).logits.shape == (2, 12, VOCAB)


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "qwen2", "mixtral", "t5"])
def test_generate(family):
    model, inputs = make(family)
    plain = copy.deepcopy(model).eval()
    deepc.fuse(model)
    model.eval()
    options = dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(model.generate(inputs["input_ids"], **options), plain.generate(inputs["input_ids"], **options))


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(family, reentrant):
    model, inputs = make(family)
    plain = copy.deepcopy(model)
    deepc.fuse(model)
    want, want_grads = loss_and_grads(plain, inputs)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    got, got_grads = loss_and_grads(model, inputs)
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-6, atol=0)
    assert_same(got_grads, want_grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_as_close_to_fp32_as_the_unfused_model(dtype):
    for family in ("gpt2", "llama"):
        model, inputs = make(family)
        _, exact = loss_and_grads(model, inputs)
        plain = copy.deepcopy(model).to(dtype)
        fused = copy.deepcopy(plain)
        deepc.fuse(fused)
        (_, a), (_, b) = loss_and_grads(fused, inputs), loss_and_grads(plain, inputs)
        far = lambda grads: torch.stack(
            [(grads[n].float() - g).norm() / (g.norm() + 1e-3) for n, g in exact.items()]
        ).mean()
        assert far(a) <= 1.2 * far(b), family


@pytest.mark.parametrize(
    "family", [pytest.param("gpt2", marks=pytest.mark.full), "llama", pytest.param("bert", marks=pytest.mark.full)]
)
def test_compiles_in_one_graph(family):
    torch._dynamo.reset()
    model, inputs = make(family)
    plain = copy.deepcopy(model)
    deepc.fuse(model)
    want, want_grads = loss_and_grads(plain, inputs)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss = compiled(**inputs).loss
    loss.backward()
    torch.testing.assert_close(loss, want.loss, rtol=1e-6, atol=0)
    assert_same({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, want_grads)
    assert model(input_ids=inputs["input_ids"]).logits.shape[-1] == VOCAB


def test_copies_pickles_and_saves(tmp_path):
    model, inputs = make("llama")
    deepc.fuse(model)
    want, want_grads = loss_and_grads(model, inputs)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        got, got_grads = loss_and_grads(other, inputs)
        assert got.logits is None and torch.equal(got.loss, want.loss)
        assert all(torch.equal(got_grads[n], g) for n, g in want_grads.items())
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (
        type(loaded) is transformers.LlamaForCausalLM
        and type(model) is not type(loaded)
        and isinstance(model, type(loaded))
    )
    for (a, p), (b, q) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert a == b and torch.equal(p, q)


def test_modules_of_torch():
    model = nn.Sequential(
        nn.LayerNorm(16),
        nn.Linear(16, 16),
        nn.GELU(),
        nn.GELU("tanh"),
        nn.RMSNorm(16),
        nn.LayerNorm(16, elementwise_affine=False),
    )
    plain, x = copy.deepcopy(model), torch.randn(5, 16)
    assert deepc.fuse(model).replaced == {
        "norm": ["0", "4", "5"],
        "mlp": ["2", "3"],
        "rotary": [],
        "attention": [],
        "loss": [],
    }
    torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        model.double()(x.double()), plain.double()(x.double()), rtol=1e-14, atol=1e-14
    )  # torch's own there


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_rms_norm_without_an_eps_adds_what_torch_adds(dtype):
    """Small inputs, of which the mean square is near the dtype's own eps: the wrong one would halve the result."""
    norm = nn.Sequential(nn.RMSNorm(64)).to(dtype)
    plain, x = copy.deepcopy(norm), (torch.randn(5, 64) * 1e-2).to(dtype).requires_grad_()
    assert deepc.fuse(norm).replaced["norm"] == ["0"]
    torch.testing.assert_close(norm(x), plain(x))
    g = torch.randn(5, 64).to(dtype)
    torch.testing.assert_close(*(torch.autograd.grad(m(x), x, g) for m in (norm, plain)), rtol=1e-5, atol=1e-3)
    with torch.no_grad():
        torch.testing.assert_close(norm(x), plain(x))


def test_a_norm_of_another_dtype_keeps_the_dtype_of_its_result():
    model, _ = make("llama")
    norm, x = model.model.norm, torch.randn(2, 3, 32).bfloat16()
    want = norm(x)
    deepc.fuse(model)
    assert torch.equal(norm(x), want) and want.dtype == torch.float32


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_a_norm_without_a_weight_refuses_other_widths(norm):
    model = nn.Sequential(norm(4, eps=1e-5, elementwise_affine=False))
    deepc.fuse(model)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        model(torch.randn(2, 3))


def test_refuses_what_it_does_not_know():
    with pytest.raises(UnsupportedError, match="nothing in Linear can be fused(.|\n)*GPT-2(.|\n)*apply_rotary_pos_emb"):
        deepc.fuse(nn.Linear(3, 3))
    with pytest.raises(UnsupportedError, match="2 dimensions"):
        deepc.fuse(nn.LayerNorm((3, 4)))
    with pytest.raises(UnsupportedError, match="only=.'rotary',."):
        deepc.fuse(_gpt2()[0], only=("rotary",))
    with pytest.raises(ArgumentError, match="'embedding' is not a kind"):
        deepc.fuse(_gpt2()[0], only=("norm", "embedding"))
    with pytest.raises(ArgumentError, match="takes a torch.nn.Module"):
        deepc.fuse({})


def test_names_what_it_leaves_alone():
    model, inputs = _decoder("Llama", hidden_act="relu")
    model.model.norm.forward = lambda x: x
    model.lm_head = nn.Sequential(model.lm_head)
    summary = deepc.fuse(model)
    assert summary.skipped == {
        "": "its head lm_head is Sequential, not nn.Linear",
        "model.norm": "its forward was replaced by somebody else",
        **{f"model.layers.{k}.mlp": "its activation is ReLU, not SiLU" for k in range(2)},
    }
    assert "not fused: model.norm: its forward" in str(summary)
    assert model(**inputs).logits is not None


# ---- under the engine ------------------------------------------------------------------------------------------------
def _train(rank, world, stage, fused, precision="fp32", compiled=False, steps=4):
    import torch.distributed as dist

    model, _ = make("gpt2")
    if fused:
        deepc.fuse(model)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    engine, *_ = deepc.initialize(model=model, config=config)
    losses = []
    for step in range(steps):
        inputs = _causal(seed=10 * step + rank)
        loss = engine(**inputs).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().double()
        dist.all_reduce(total)
        losses.append(total.item() / world)
    engine.eval()
    with torch.no_grad():
        logits = engine(input_ids=_tokens()).logits
    return losses, logits.float()


@pytest.mark.parametrize("stage", [*(pytest.param(s, marks=pytest.mark.full) for s in (0, 1, 2)), 3])
def test_under_the_engine(stage):
    (want, want_logits), _ = run_ranks(_train, 2, args=(stage, False))
    (got, got_logits), _ = run_ranks(_train, 2, args=(stage, True))
    assert all(abs(a - b) <= 3e-6 * abs(b) for a, b in zip(got, want, strict=True)), (got, want)
    torch.testing.assert_close(got_logits, want_logits, rtol=2e-3, atol=2e-3)


def test_under_the_engine_in_bf16():
    (want, _), _ = run_ranks(_train, 2, args=(3, False, "bf16"))
    (got, _), _ = run_ranks(_train, 2, args=(3, True, "bf16"))
    assert all(abs(a - b) <= 1e-2 * abs(b) for a, b in zip(got, want, strict=True)), (got, want)
