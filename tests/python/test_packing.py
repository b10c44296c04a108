"""Packing of samples into rows, and batches by length."""

from __future__ import annotations

import pytest
import torch
from deepc.errors import ArgumentError
from deepc.nn.packing import PackedCollator
from deepc.zero.step.tree import BucketSampler

SIZES = [5, 17, 3, 40, 9, 22, 1, 31]


def _samples() -> list[dict[str, list[int]]]:
    draw = torch.Generator().manual_seed(3)
    return [{"input_ids": torch.randint(1, 50, (n,), generator=draw).tolist()} for n in SIZES]


@pytest.mark.parametrize("attention", ["sdpa", "deepc_sparse"])
def test_a_packed_batch_has_the_loss_and_gradients_of_its_samples_alone(attention):
    """Against each sample in a row of its own, summed; rows of 48, so that some are filled up and some hold several."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    config.use_cache = False  # with a cache, transformers' sdpa does not look at positions
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    if attention == "deepc_sparse":
        from deepc.nn.attention import use_layout

        use_layout(model, {"mode": "dense", "block": 16})
    else:
        model.set_attn_implementation(attention)

    def gradients(batches):
        model.zero_grad()
        total = 0.0
        for batch in batches:
            logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum", ignore_index=-100
            )
            loss.backward()
            total += loss.item()
        return total, [p.grad.clone() for p in model.parameters()]

    samples = _samples()
    packed = PackedCollator(48)(samples)
    assert packed["input_ids"].shape[0] < len(samples)
    long = [s for s in samples if len(s["input_ids"]) > 1]  # one token predicts nothing
    loss, grads = gradients([packed])
    alone, expected = gradients([PackedCollator()([s]) for s in long])
    assert loss == pytest.approx(alone, rel=1e-5)
    for g, e in zip(grads, expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-4)


def test_rows_hold_every_token_once_with_its_position_and_label():
    samples = _samples()
    samples[1] |= {"attention_mask": [0] * 4 + [1] * 13, "labels": [7] * 17}
    whole = PackedCollator(multiple_of=16)(samples)
    assert whole["input_ids"].shape == (1, 128)  # 124 tokens
    rows = PackedCollator(40, pad_id=63)(samples)
    for batch, pad in ((whole, 0), (rows, 63)):
        starts = (batch["position_ids"] == 0).nonzero().tolist() + [[-1, 0]]
        found = []
        for (r, a), (after, b) in zip(starts[:-1], starts[1:], strict=True):
            part = slice(a, b if after == r else None)
            ids, labels = batch["input_ids"][r, part].tolist(), batch["labels"][r, part].tolist()
            assert batch["position_ids"][r, part].tolist() == list(range(len(ids)))
            assert labels[0] == -100
            if set(ids) == {pad}:
                assert set(labels) == {-100}
            else:
                found.append((ids, labels[1:]))
        expected = [(s["input_ids"], s["input_ids"][1:]) for s in samples]
        expected[1] = (samples[1]["input_ids"][4:], [7] * 12)
        assert sorted(found) == sorted(expected)
    for bad, words in (
        ({"input_ids": [1] * 41}, "sample 0 of the batch has 41 tokens; a row takes 1 to 40"),
        ({"input_ids": []}, "has 0 tokens"),
        ({"input_ids": [1, 2], "labels": [1]}, "labels has the shape"),
        ({"input_ids": [1], "text": "a"}, "'text'"),
        ({"text": "a"}, "expected 'input_ids'"),
        ({"input_ids": [1.5, 2.0]}, "input_ids of torch.float32: expected numbers of tokens"),
        ({"input_ids": [1], "labels": [0.5]}, "labels of torch.float32"),
        ({"input_ids": None}, "input_ids = None"),
    ):
        with pytest.raises(ArgumentError, match=words):
            PackedCollator(40)([bad])
    columns = {"input_ids": [1, 2], "labels": None, "attention_mask": None}  # as datasets have what is not there
    assert PackedCollator()([columns])["labels"].tolist() == [[-100, 2]]
    with pytest.raises(ArgumentError, match="multiple_of = 16"):
        PackedCollator(40, multiple_of=16)


@pytest.mark.parametrize("shuffle", [True, False])
def test_buckets_are_equal_in_any_number_of_ranks_pad_little_and_go_on(shuffle):
    lengths = torch.randint(1, 1000, (1003,), generator=torch.Generator().manual_seed(1)).tolist()

    def sampler(world, rank, **options):
        return BucketSampler(lengths, 4, world, rank, per_step=8, pool=10, shuffle=shuffle, seed=5, **options)

    def steps(world, epoch, **options):
        """The samples of each step, in the order of micro-batch numbers."""
        dealt = [sampler(world, r, **options) for r in range(world)]
        for s in dealt:
            s.set_epoch(epoch)
        micro = [m for group in zip(*dealt, strict=True) for m in group]
        return [sum(micro[k : k + 8], []) for k in range(0, len(micro), 8)]

    one = steps(1, 0)
    assert steps(2, 0) == one and steps(8, 0) == one
    assert len(one) == 32 and sorted(set(sum(one, []))) == list(range(1003))
    assert (steps(1, 1) != one) == shuffle
    cut = steps(2, 0, drop_last=True)
    assert len(cut) == 31 and len(set(sum(cut, []))) == 31 * 32
    padded = sum(len(m) * max(lengths[i] for i in m) for m in sampler(1, 0))
    real = sum(lengths[i] for m in sampler(1, 0) for i in m)
    assert padded < 1.05 * real
    again = sampler(2, 1)
    again.set_epoch(0)
    again.start = 3 * 8 // 2 * 4
    assert list(again) == list(sampler(2, 1))[12:]
    with pytest.raises(ArgumentError, match="pool 0"):
        BucketSampler(lengths, 4, 1, 0, pool=0)
