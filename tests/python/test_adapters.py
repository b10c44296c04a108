"""Adapters (LoRA of peft) on models that are cut over tensor-parallel ranks and stages of a pipeline: what is trained,
how much of it is where, what is saved."""

from __future__ import annotations

import pytest
import torch
from plainly import batch_loss, in_stages
from ranks import run_quietly

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

MICRO, STEPS, VOCABULARY = 2, 3, 61
FULL = pytest.mark.full


def model_of(family, dropout=0.0, **more):
    torch.manual_seed(3)
    if family == "llama":
        heads = dict(num_attention_heads=4, num_key_value_heads=more.pop("keys", 2))
        config = transformers.LlamaConfig(
            hidden_size=16, intermediate_size=24, vocab_size=VOCABULARY, num_hidden_layers=4, **heads
        )
        base, targets = transformers.LlamaForCausalLM(config), ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]
    else:
        config = transformers.GPT2Config(
            n_embd=16, n_head=4, n_layer=4, n_positions=16, vocab_size=VOCABULARY,
            attn_pdrop=0, resid_pdrop=0, embd_pdrop=0,
        )  # fmt: skip
        base, targets = transformers.GPT2LMHeadModel(config), ["c_attn", "attn.c_proj"]
    lora = peft.LoraConfig(
        r=4, target_modules=more.pop("targets", targets), lora_dropout=dropout, init_lora_weights=False, **more
    )
    return peft.get_peft_model(base, lora)


def micro_batches():
    draw = torch.Generator().manual_seed(5)
    while True:
        ids = torch.randint(0, VOCABULARY, (2, 9), generator=draw)
        yield {"input_ids": ids, "labels": ids}


def _train(rank, world, family, sizes, stage, more=None, folder=None):
    """Losses, and the adapters' weights, whole."""
    import deepc

    model, data = model_of(family, **(more or {})), micro_batches()
    engine, *_ = deepc.initialize(
        model=model,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
        sample_batch=next(micro_batches()),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": MICRO,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
            "tensor_parallel": {"autotp_size": sizes.get("tp", 1)},
            **in_stages(sizes.get("pp", 1)),
        },
    )
    losses = [batch_loss(engine, MICRO, lambda: engine(**next(data)).loss, data, engine.everyone) for _ in range(STEPS)]
    whole = engine.module_state_dict()
    weights = {n: t.clone() for n, t in whole.items() if "lora_" in n}
    if folder and "tp" in sizes:
        model.save_pretrained(folder)
    elif folder and rank == 0:
        model.save_pretrained(folder, state_dict=whole)
    engine.destroy()
    return losses, weights


@pytest.mark.parametrize(
    ("family", "sizes", "stage", "more"),
    [
        ("llama", {"tp": 2}, 0, {}),
        *(
            pytest.param(*case, marks=FULL)
            for case in (
                ("llama", {"pp": 2}, 0, {}),
                ("llama", {"tp": 2}, 3, {}),
                ("llama", {"tp": 4}, 1, {}),
                ("llama", {"tp": 3}, 0, {"keys": 4}),
                ("gpt2", {"tp": 2}, 0, {}),
                ("gpt2", {"tp": 2}, 2, {}),
                ("gpt2", {"pp": 2}, 3, {}),
                ("llama", {"tp": 2, "pp": 2}, 1, {}),
            )
        ),
    ],
    ids=str,
)
def test_adapters_train_as_in_one_process(family, sizes, stage, more):
    ((losses, weights),) = run_quietly(_train, 1, family, {}, 0, more)
    assert len(set(losses)) == STEPS
    world = sizes.get("tp", 1) * sizes.get("pp", 1)
    for found, parts in run_quietly(_train, world, family, sizes, stage, more):
        assert found == pytest.approx(losses, rel=1e-6)
        assert parts.keys() == weights.keys()
        for name, t in parts.items():
            bound = 1e-5 * float(weights[name].abs().max())
            torch.testing.assert_close(t, weights[name], rtol=0, atol=bound, msg=lambda m, n=name: f"{n}: {m}")


def _drops(rank, world):
    """The adapters' weights that this rank has whole, and what the dropouts of two layers left out."""
    import deepc

    model, data, left_out = model_of("llama", dropout=0.5), micro_batches(), {}
    engine, *_ = deepc.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
            "tensor_parallel": {"autotp_size": world},
        },
    )
    for name, module in engine.module.named_modules():
        if name.endswith(("0.self_attn.v_proj.lora_dropout.default", "0.self_attn.o_proj.lora_dropout.default")):

            def look(m, x, out, n=name):
                left_out.setdefault(n, (out == 0) & (x[0] != 0))

            module.register_forward_hook(look)
    for _ in range(STEPS):
        engine.backward(engine(**next(data)).loss)
        engine.step()
    whole = {
        n: p.detach().clone() for n, p in engine.module.named_parameters() if "lora_" in n and id(p) not in engine.cuts
    }
    engine.destroy()
    return whole, left_out


def test_dropout_of_adapters_is_alike_where_inputs_are_whole_and_not_where_they_are_parts():
    (first, drops), (other, others) = run_quietly(_drops, 2)
    assert {n.split(".lora_")[1][0] for n in first if ".v_proj." in n} == {"A"}
    assert {n.split(".lora_")[1][0] for n in first if ".o_proj." in n} == {"B"}
    assert first.keys() == other.keys() and all(torch.equal(t, other[n]) for n, t in first.items())
    (whole, part), (whole_there, part_there) = ([d[n] for n in sorted(d, reverse=True)] for d in (drops, others))
    assert whole.any() and torch.equal(whole, whole_there)
    assert part.any() and not torch.equal(part, part_there)


@pytest.mark.full
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}], ids=str)
def test_adapters_are_saved_whole(sizes, tmp_path):
    """By peft's save_pretrained: of stages with engine.module_state_dict(), of shards also without."""
    from safetensors.torch import load_file

    (_, weights), _ = run_quietly(_train, 2, "llama", sizes, 0, {}, str(tmp_path))
    found = load_file(tmp_path / "adapter_model.safetensors")
    assert found.keys() == {n.replace(".default", "") for n in weights}
    assert all(torch.equal(t, found[n.replace(".default", "")]) for n, t in weights.items())


def _refused(rank, world, more, kind):
    import deepc

    model = model_of("llama", **more)
    section = {"autotp_size": world}
    with pytest.raises(kind[0], match=kind[1]):
        deepc.initialize(
            model=model,
            config={"train_micro_batch_size_per_gpu": 1, "tensor_parallel": section, "optimizer": {"type": "SGD"}},
        )


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"use_dora": True}, "is a variant of LoRA"),
        ({"targets": ["embed_tokens"]}, "embed_tokens has adapters .LoRA., and is cut as vocabulary"),
    ],
    ids=str,
)
def test_adapters_that_need_whole_weights_are_refused(more, said):
    from deepc.errors import UnsupportedError

    run_quietly(_refused, 2, more, (UnsupportedError, said))
