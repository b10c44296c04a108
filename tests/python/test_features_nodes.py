"""What goes with long sequences, on ranks of one node and of several: losses, gradients and weights are those of one
process, element by element."""

from __future__ import annotations

import os
import random

import pytest
import tiny
import torch
import torch.nn.functional as F
from ranks import placed
from ranks import run_ranks as _run_ranks

SAMPLES, STEPS = 12, 3
SPARSE = {"mode": "local", "block": 16, "num_sliding_window_blocks": 3, "attention": "unidirectional"}
LENGTHS = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 4,
    "max_difficulty": 16,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 3, "difficulty_step": 4},
}


def run_ranks(fn, world, *args, **env):
    return _run_ranks(fn, world, args=args, env={"DEEPC_LOG_LEVEL": "WARNING", **env})


def _gpt2(dropout: float):
    import transformers

    torch.manual_seed(0)
    sizes = dict(vocab_size=61, n_positions=96, n_embd=32, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=dropout)
    )


def _llama():
    import transformers

    torch.manual_seed(0)
    sizes = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, use_cache=False))
    model.set_attn_implementation("sdpa")
    return model


def _sparse(step, part, world):
    """(batch, loss) of this rank's part of a step."""
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(61, (SAMPLES, 80), generator=draw)[part]
    return {"input_ids": ids, "labels": ids}, lambda out: out.loss


def _packed(step, part, world):
    """Rows have different numbers of tokens on each rank: losses are sums, of which ranks' mean is 1 / world."""
    from deepc.nn.packing import PackedCollator

    draw = random.Random(step)
    samples = [{"input_ids": [draw.randrange(61) for _ in range(draw.randint(2, 40))]} for _ in range(SAMPLES)]
    batch = PackedCollator(48)(samples[part])
    labels = batch.pop("labels")

    def loss(out):
        every = out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return F.cross_entropy(*every, reduction="sum", ignore_index=-100) * world / 300

    return batch, loss


def _tiny(step, part, world):
    x, y = tiny.make_batch(step, SAMPLES)
    return {"x": x[part], "y": y[part]}, lambda out: out


FEATURES = {
    "sparse attention": (lambda: _gpt2(0.0), _sparse, {"sparse_attention": SPARSE}),
    "packed samples": (_llama, _packed, {}),
    "activations on disk": (lambda: tiny.make_model(recompute="nonreentrant"), _tiny, {"activation_checkpointing": {}}),
    "curriculum": (tiny.make_model, _tiny, {"curriculum_learning": LENGTHS}),
}


def _train(rank, world, nodes, stage, precision, feature, folder):
    """(losses, first gradients, weights) of a training whose samples are the same for any number of ranks."""
    import deepc
    import torch.distributed as dist

    make, data, section = FEATURES[feature]
    config = tiny.config(stage, micro=SAMPLES // world, precision=precision) | section
    if feature == "activations on disk":
        config["activation_checkpointing"] = {"cpu_checkpointing": True}
        config["deepc"] = {"activations": {"nvme_path": folder, "min_bytes": 256}}
    # a small eps makes steps of size lr of gradients that are rounding noise
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-4}}
    with placed(rank, nodes):
        engine = deepc.initialize(model=make(), config=config)[0]
        own = SAMPLES // world
        losses, first = [], {}
        for step in range(STEPS):
            batch, loss_of = data(step, slice(rank * own, rank * own + own), world)
            loss = loss_of(engine(**batch))
            engine.backward(loss)
            if step == 0:
                first = {n: engine.full_grad(p).clone() for n, p in engine.module.named_parameters()}
            engine.step()
            mean = torch.tensor([loss.item()], dtype=torch.float64)
            if world > 1:
                dist.all_reduce(mean)
            losses.append(mean.item() / world)
        weights = {n: engine.full_fp32_param(p).clone() for n, p in engine.module.named_parameters()}
        said = {"written": engine.activations.stats()["bytes_written"], "length": engine.curriculum.state_dict()}
        engine.destroy()
    return losses, first, weights, said


def same(found, want, rel: float) -> None:
    """Losses within `rel`, gradients and weights within 10 `rel` of their tensor's largest."""
    assert found[0] == pytest.approx(want[0], rel=rel)
    for got, wanted in zip(found[1:3], want[1:3]):
        assert got.keys() == wanted.keys()
        for name, value in wanted.items():
            bound = 10 * rel * max(float(value.abs().max()), 1e-3)
            torch.testing.assert_close(
                got[name].float(), value.float(), rtol=0, atol=bound, msg=lambda m: f"{name}: {m}"
            )


PLACES = [("00", 2, ""), ("01", 3, ""), ("0011", 0, ""), ("0011", 2, ""), ("0011", 3, ""), ("0011", 3, "1")]
PLACES += [("011", 1, ""), ("011", 3, "")]  # unequal nodes
QUICK = ("activations on disk", "curriculum")  # transformers takes seconds to import


@pytest.mark.parametrize(
    "feature, nodes, stage, streamed",
    [
        pytest.param(f, *p, marks=() if f in QUICK and p[0] == "01" else pytest.mark.full)
        for f in FEATURES
        for p in PLACES
    ],
)
def test_ranks_and_nodes_have_the_numbers_of_one_process(feature, nodes, stage, streamed, tmp_path):
    if feature not in QUICK:
        pytest.importorskip("transformers")
    (want,) = run_ranks(_train, 1, "0", 0, "fp32", feature, str(tmp_path))
    env = {"DEEPC_STREAMED": "1"} if streamed else {}
    for found in run_ranks(_train, len(nodes), nodes, stage, "fp32", feature, str(tmp_path), **env):
        same(found, want, 1e-6)
        assert found[3]["length"] == want[3]["length"]
        assert (found[3]["written"] > 0) == (feature == "activations on disk")
    assert os.listdir(tmp_path) == []
