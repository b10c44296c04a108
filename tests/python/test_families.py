"""Model families of transformers, tiny ones from their configurations, train as in plain PyTorch at every stage."""

from __future__ import annotations

import functools

import plainly
import pytest
import torch
from ranks import run_ranks

pytest.importorskip("transformers", reason="needs transformers")

STEPS, SAMPLES, VOCAB, LENGTH = 5, 4, 67, 10
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def _gpt2(t):
    config = t.GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=16,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        bos_token_id=0,
        eos_token_id=1,
    )
    return t.GPT2LMHeadModel(config)


def _llama(t):
    return t.LlamaForCausalLM(
        t.LlamaConfig(**SMALL, num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True)
    )


def _mixtral(t):
    config = t.MixtralConfig(
        **SMALL, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=32
    )
    return t.MixtralForCausalLM(config)


def _t5(t):
    config = t.T5Config(
        vocab_size=VOCAB,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
    )
    return t.T5ForConditionalGeneration(config)


def _bert(t):
    return t.BertForMaskedLM(
        t.BertConfig(**SMALL, max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    )


def _vit(t):
    config = t.ViTConfig(
        image_size=16,
        patch_size=8,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=5,
    )
    return t.ViTForImageClassification(config)


def _whisper(t):
    config = t.WhisperConfig(
        vocab_size=VOCAB,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=8,
        max_target_positions=16,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    return t.WhisperForConditionalGeneration(config)


FAMILIES = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mixtral": _mixtral,
    "t5": _t5,
    "bert": _bert,
    "vit": _vit,
    "whisper": _whisper,
}
STATES = {
    "gpt2": "AdamW",
    "llama": "SGD",
    "mixtral": "AdamW",
    "t5": "SGD",
    "bert": "AdamW",
    "vit": "SGD",
    "whisper": "AdamW",
}


def make(family: str, recompute: bool = False):
    import transformers

    torch.manual_seed(0)
    model = FAMILIES[family](transformers)
    model.train()
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": recompute == "reentrant"})
    return model


def batch(family: str, step: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(500 + step)
    tokens = torch.randint(4, VOCAB, (SAMPLES, LENGTH), generator=g)
    if family == "vit":
        return {
            "pixel_values": torch.randn(SAMPLES, 3, 16, 16, generator=g),
            "labels": torch.randint(5, (SAMPLES,), generator=g),
        }
    if family == "whisper":
        return {"input_features": torch.randn(SAMPLES, 8, 16, generator=g), "labels": tokens}
    return {"input_ids": tokens, "labels": tokens.roll(1, 1) if family in ("t5", "bert") else tokens}


def loss(model, part, rank, step):
    return model(**part).loss


def _train(rank, world, cases):
    """cases: (family, stage, optimizer, recompute). [(losses, first gradients, weights, what the model generates)]."""
    out = []
    for family, stage, optimizer, recompute in cases:
        cfg = plainly.config(stage, optimizer, deepc={"bucket_elems": 8192})
        losses, first, weights, engine = plainly.engine(
            functools.partial(make, family, recompute), functools.partial(batch, family), loss, STEPS, cfg, rank, world
        )
        said = None
        if hasattr(engine.module, "generate") and family not in ("bert", "vit"):
            said = _generate(engine, family)
        out.append((losses, first, weights, said))
        engine.destroy()
    return out


def _generate(model, family):
    """Greedy continuation of the first sample, on an engine or a plain model."""
    model.eval()
    start = {k: v[:1] for k, v in batch(family, 0).items() if k != "labels"}
    return model.generate(**start, max_new_tokens=4, do_sample=False).tolist()


def _compare(world, cases):
    quiet = {"DEEPC_LOG_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    ranks = run_ranks(_train, world, args=(cases,), env=quiet)
    for k, (family, stage, optimizer, recompute) in enumerate(cases):
        want = plainly.plain(
            functools.partial(make, family, recompute), functools.partial(batch, family), loss, STEPS, optimizer
        )
        for rank in range(world):
            where = f"{family}, stage {stage}, {optimizer}, rank {rank} of {world}"
            plainly.check(ranks[rank][k], want, optimizer, where)
            assert ranks[rank][k][3] == ranks[0][k][3], where
            if (said := ranks[rank][k][3]) is not None:
                model = make(family)
                model.load_state_dict(ranks[rank][k][2], strict=False)
                assert said == _generate(model, family), where


@pytest.mark.parametrize(
    "stages",
    [
        {"t5": 3, "mixtral": 2},
        pytest.param({"llama": 3, "bert": 1, "vit": 2, "whisper": 3}, marks=pytest.mark.full),
        pytest.param({"gpt2": 3, "vit": 1}, marks=pytest.mark.full),
    ],
    ids=lambda s: "+".join(s),
)
def test_families_match_plain_pytorch_on_two_ranks(stages):
    """Each stage above 0 with some family; the optimizer alternates. One with the eps that users have."""
    cases = [(f, stage, STATES[f], False) for f, stage in stages.items()]
    _compare(2, [*cases, ("gpt2", 3, "AdamW eps=1e-8", False)])


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("optimizer", ["AdamW", "AdamW eps=1e-8", "SGD"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_at_every_stage(family, optimizer, world):
    _compare(world, [(family, stage, optimizer, False) for stage in range(4)])


@pytest.mark.full
@pytest.mark.parametrize("recompute", ["plain", "reentrant"])
def test_families_with_their_own_checkpointing(recompute):
    _compare(2, [(f, 3, "SGD", recompute) for f in ("gpt2", "llama", "mixtral", "bert", "vit")])
