"""Sequence parallelism: ranks that share every sequence train as one process does."""

from __future__ import annotations

import copy
import importlib.util
import types

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from plainly import in_stages
from ranks import for_this_job
from ranks import run_ranks as _run_ranks


def run_ranks(fn, world, *args):
    return _run_ranks(fn, world, args=args, env={"DEEPC_LOG_LEVEL": "WARNING"})


# ---- attention -------------------------------------------------------------------------------------------------------
def _local(q, k, v):
    """Layout [positions, samples, heads, features], grouped queries."""
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3)


def _qkv(heads, kv):
    generator = torch.Generator().manual_seed(heads * 10 + kv)
    return [torch.randn(12, 2, h, 4, generator=generator, dtype=torch.float64) for h in (heads, kv, kv)]


def _attends(rank, world, cases):
    from deepc.parallel.sequence import DistributedAttention, sequence_group

    group = sequence_group(world)
    out = []
    for heads, kv in cases:
        mine = [t.chunk(world)[rank].clone().requires_grad_() for t in _qkv(heads, kv)]
        made = DistributedAttention(_local, group)(*mine)
        made.pow(2).sum().backward()
        out.append((made.detach(), [t.grad for t in mine]))
    return out


CASES = [(4, 4), (4, 2), (4, 1), (5, 5), (6, 2), (7, 1)]


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full), pytest.param(4, marks=pytest.mark.full)])
def test_attention_is_that_of_whole_sequences(world):
    cases = [c for c in CASES if c[0] >= world]
    ranks = run_ranks(_attends, world, cases)
    for i, (heads, kv) in enumerate(cases):
        whole = [t.requires_grad_() for t in _qkv(heads, kv)]
        want = _local(*whole)
        want.pow(2).sum().backward()
        torch.testing.assert_close(torch.cat([r[i][0] for r in ranks]), want.detach(), rtol=1e-12, atol=1e-12)
        for t, *parts in zip(whole, *(r[i][1] for r in ranks)):
            torch.testing.assert_close(torch.cat(parts), t.grad, rtol=1e-11, atol=1e-12)


def _others(rank, world):
    """Keys and values of another sequence, and in another dtype than the queries."""
    from deepc.parallel.sequence import DistributedAttention, sequence_group

    def local(q, k, v):
        q, k, v = (t.double().permute(1, 2, 0, 3) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3)

    q, k, v = _qkv(4, 4)
    given = [q.bfloat16(), k[:6].bfloat16(), v[:6].float()]
    mine = [t.chunk(world)[rank].clone().requires_grad_() for t in given]
    made = DistributedAttention(local, sequence_group(world))(*mine)
    made.pow(2).sum().backward()
    want = local(*given).chunk(world)[rank]
    torch.testing.assert_close(made.detach(), want, rtol=1e-12, atol=1e-12)
    assert all(t.grad.dtype == t.dtype and t.grad.any() for t in mine)


def test_keys_of_another_sequence_and_values_of_another_dtype():
    run_ranks(_others, 2)


def _calls(rank, world):
    """Calls and bytes of one attention, forward and backward."""
    from deepc.parallel.sequence import DistributedAttention, sequence_group

    group = sequence_group(world)
    seen = []
    real = dist.all_to_all_single

    def counted(out, given, *args, **kwargs):
        seen.append(given.numel())
        return real(out, given, *args, **kwargs)

    for_this_job(dist, "all_to_all_single", counted)
    mine = [t.chunk(world)[rank].clone().requires_grad_() for t in _qkv(4, 2)]
    DistributedAttention(_local, group)(*mine).sum().backward()
    return seen


def test_queries_keys_and_values_go_in_one_exchange():
    each = 12 * 2 * 4 // 2  # elements of a head on a rank: positions, samples, features
    for seen in run_ranks(_calls, 2):
        assert seen == [each * (4 + 2 + 2), each * 4] + [each * 4, each * (4 + 2 + 2)]


# ---- models ----------------------------------------------------------------------------------------------------------
def _model(kind):
    import transformers as t

    torch.manual_seed(1)
    if kind == "gpt2":
        config = t.GPT2Config(
            n_layer=2, n_embd=32, n_head=4, n_positions=64, vocab_size=61, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
        return t.GPT2LMHeadModel(config)
    sizes = dict(num_hidden_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=2)
    if kind == "mixtral":
        routed = dict(num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5, sliding_window=None)
        return t.MixtralForCausalLM(t.MixtralConfig(**sizes, **routed, intermediate_size=48, vocab_size=61))
    return t.LlamaForCausalLM(t.LlamaConfig(**sizes, intermediate_size=64, vocab_size=61, max_position_embeddings=64))


def _batches(steps, samples, length, padded=True):
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        ids = torch.randint(1, 61, (samples, length), generator=generator)
        labels, mask = ids.clone(), torch.ones_like(ids)
        for row in range(samples):  # so that ranks have other numbers of labels
            end = int(torch.randint(length // 2, length + 1, (), generator=generator))
            labels[row, end:], mask[row, end:] = -100, int(not padded)
        yield {"input_ids": ids, "labels": labels, "attention_mask": mask}


def _trains(rank, world, kind, sp, stage, length):
    import deepc

    model, samples = _model(kind), 2
    dp = world // sp
    config = {
        "train_micro_batch_size_per_gpu": samples,
        "sequence_parallel_size": sp,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
    }
    if sp > 1:
        from deepc.parallel.sequence import Shards, sequence_group, share

        group = sequence_group(sp)
        share(model, group)
    engine, *_ = deepc.initialize(model=model, config=config)
    whole = _batches(3, samples * dp, length)
    data = [{k: v.chunk(dp)[rank // sp] for k, v in b.items()} for b in whole]
    if sp > 1:
        data = Shards(data, group, causal=True)
    losses = []
    for step, batch in enumerate(data):
        items = [{}, {"num_items_in_batch": torch.tensor(97)}, {"num_items_in_batch": 41}][
            step
        ]  # as transformers' Trainer
        loss = engine(**batch, **items).loss
        engine.backward(loss)
        engine.step()
        losses += [float(loss), engine.get_global_grad_norm()]
    with deepc.zero.GatheredParameters(list(engine.module.parameters())):
        weights = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
    engine.destroy()
    return losses, weights


def _check(kind, world, sp, stage, length=16):
    pytest.importorskip("transformers")
    dp = world // sp
    want = run_ranks(_trains, dp, kind, 1, stage, length)
    for rank, (losses, weights) in enumerate(run_ranks(_trains, world, kind, sp, stage, length)):
        assert losses == pytest.approx(want[rank // sp][0], rel=5e-6)
        for name, value in weights.items():
            whole = want[0][1][name]
            bound = 1e-5 * max(1e-2, float(whole.abs().max()))
            torch.testing.assert_close(value, whole, rtol=0, atol=bound, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("kind", "world", "sp", "stage", "length"),
    [
        ("llama", 2, 2, 3, 15),  # filled up
        ("mixtral", 2, 2, 1, 15),  # its load-balance loss was of a rank's own positions, and of padding
        pytest.param("mixtral", 4, 2, 3, 16, marks=pytest.mark.full),
        pytest.param("gpt2", 4, 2, 2, 16, marks=pytest.mark.full),
        pytest.param("llama", 4, 4, 1, 16, marks=pytest.mark.full),
        pytest.param("llama", 3, 3, 0, 16, marks=pytest.mark.full),
        pytest.param("llama", 4, 2, 3, 16, marks=pytest.mark.full),
    ],
)
def test_a_model_of_transformers_trains_as_on_whole_sequences(kind, world, sp, stage, length):
    _check(kind, world, sp, stage, length)


def _no_labels(rank, world):
    from deepc.parallel.sequence import cross_entropy, sequence_group

    logits = torch.randn(1, 3, 5, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    loss = cross_entropy(logits, torch.full((1, 3), -100), sequence_group(world))
    loss.backward()
    return loss.detach(), logits.grad


def test_a_loss_without_labels_on_any_rank_is_nan():
    """As torch's is in one process."""
    logits = torch.randn(3, 5).requires_grad_()
    want = F.cross_entropy(logits, torch.full((3,), -100))
    want.backward()
    for loss, grad in run_ranks(_no_labels, 2):
        assert want.isnan() and loss.isnan() and loss.dtype == torch.float32
        assert torch.equal(grad.isnan(), logits.grad.isnan()[None]) and grad.dtype == torch.float32


# ---- what goes wrong -------------------------------------------------------------------------------------------------
def _refusals(rank, world):
    from deepc.errors import ArgumentError, MisuseError, UnsupportedError
    from deepc.parallel.sequence import DistributedAttention, Shards, sequence_group, shard, share
    from deepc.parallel.sequence.models import _check

    with pytest.raises(ArgumentError, match="2 ranks can't be shared out in groups of 3"):
        sequence_group(3)
    group = sequence_group(2)
    one = torch.randn(4, 2, 1, 4)
    with pytest.raises(ArgumentError, match="1 heads can't be shared by 2 ranks"):
        DistributedAttention(_local, group)(one, one, one)
    two = torch.randn(4, 2, 2, 4)
    with pytest.raises(ArgumentError, match="the local attention returned"):
        DistributedAttention(lambda q, k, v: q[:2], group)(two, two, two)
    with pytest.raises(ArgumentError, match="no model of transformers"):
        share(torch.nn.Linear(2, 2), group)
    ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(ArgumentError, match="zeros that are not at the end"):
        shard({"input_ids": ids, "attention_mask": torch.tensor([[0, 1, 1, 1]])}, group)
    padded = {"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1, 0]])}
    with pytest.raises(ArgumentError, match="causal=True"):
        shard(padded, group)
    with pytest.raises(ArgumentError, match="padded positions have labels"):
        shard({**padded, "labels": ids}, group, causal=True)
    with pytest.raises(UnsupportedError, match="token_type_ids"):
        shard({"input_ids": ids, "token_type_ids": ids}, group)
    with pytest.raises(ArgumentError, match=r"labels is \[1, 3\]"):
        shard({"input_ids": ids, "labels": ids[:, :3]}, group)
    positions = torch.arange(4)
    for packed in ([0, 1, 0, 1], [0, 1, 2, 0], [0, 0, 1, 2], [0, 1, 3, 4]):
        with pytest.raises(UnsupportedError, match="position_ids of row 1 go from .* packed samples"):
            shard(
                {"input_ids": ids.expand(2, 4), "position_ids": torch.stack((positions, torch.tensor(packed)))}, group
            )
    rank_part = positions.chunk(2)[rank][None]
    assert torch.equal(
        shard({"input_ids": ids, "position_ids": positions[None] + 3}, group)["position_ids"] - 3, rank_part
    )
    padding = {**padded, "position_ids": torch.tensor([[0, 1, 2, 1]])}  # as of transformers' generation
    assert torch.equal(shard(padding, group, causal=True)["position_ids"], padding["position_ids"].chunk(2, 1)[rank])
    loader = Shards([{"input_ids": ids}], group)
    assert len(copy.copy(loader)) == 1 and copy.copy(loader).group is group

    class Takes(torch.nn.Module):
        def forward(self, input_ids=None, attention_mask=None, position_ids=None):
            return None

    takes = Takes()
    takes.register_forward_pre_hook(_check, with_kwargs=True)
    assert takes(ids, None, positions) is None
    with pytest.raises(UnsupportedError, match="attention_mask"):
        takes(ids, torch.ones(1, 4), position_ids=positions)
    takes.config = types.SimpleNamespace(_attn_implementation="deepc_ulysses_0", get_text_config=lambda: None)
    with pytest.raises(MisuseError, match="share\\(\\)d already"):
        share(takes, group)
    if importlib.util.find_spec("transformers"):
        import transformers

        sizes = dict(num_hidden_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=61, pad_token_id=0)
        mixed = dict(
            attn_layer_period=2, attn_layer_offset=1, intermediate_size=64, num_experts=1, num_experts_per_tok=1
        )
        for config, found in ((transformers.JambaConfig(**sizes, **mixed), 1), (transformers.FalconConfig(**sizes), 0)):
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
            with pytest.raises(UnsupportedError, match=f"of the 2 layers of .*ForCausalLM {found} have"):
                share(model, group)  # Jamba's state spaces saw a part of the positions, without a word
        model = share(_model("llama"), group)
        part = shard({"input_ids": ids, "labels": ids}, group)
        for wrong, match in (
            ({**part, "attention_mask": ids[:, :2]}, "attention_mask"),
            ({"input_ids": ids[:, :2]}, "position_ids"),
            ({k: v for k, v in part.items() if k != "shift_labels"}, "shift_labels"),
        ):
            with pytest.raises((ArgumentError, UnsupportedError), match=match):
                model(**wrong)


def test_what_would_be_wrong_in_silence_is_refused():
    run_ranks(_refusals, 2)


def _initialized(rank, world, share_it):
    """What initialize logs of a model of transformers."""
    import io
    import logging

    import deepc
    from deepc.parallel.sequence import sequence_group, share

    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger("deepc").addHandler(handler)
    model = _model("gpt2")
    if share_it:
        share(model, sequence_group(2))
    engine, *_ = deepc.initialize(
        model=model, config={"train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": 2}
    )
    engine.destroy()
    logging.getLogger("deepc").removeHandler(handler)
    return stream.getvalue()


def test_a_model_that_nobody_has_shared_is_told():
    """It trained, each rank with attention to its own positions, without a word."""
    told = "the attention of GPT2LMHeadModel is not shared"
    assert told in run_ranks(_initialized, 2, False)[0]
    assert told not in run_ranks(_initialized, 2, True)[0]


def _in_stages(rank, world, kind, mesh):
    """As _trains, of two micro-batches a step; weights are those of this rank's stage."""
    import deepc
    from deepc.parallel.sequence import sequence_group, shard, share
    from deepc.plan.mesh import Mesh

    mesh, samples = Mesh.of(mesh), 2
    config = {
        "train_micro_batch_size_per_gpu": samples,
        "gradient_accumulation_steps": 2,
        "sequence_parallel_size": mesh.sp,
        **in_stages(mesh.pp),
        "tensor_parallel": {"autotp_size": mesh.tp},
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
    }
    model, cut = _model(kind).train(), lambda batch: batch
    if mesh.sp > 1:
        group = sequence_group(mesh.sp, tensor=mesh.tp)
        share(model, group)
        cut = lambda batch: shard(batch, group, causal=True)
    at = mesh.coordinates(rank).dp
    data = [cut({k: v.chunk(mesh.dp)[at] for k, v in b.items()}) for b in _batches(6, samples * mesh.dp, 16)]
    sample = data[0] if mesh.pp > 1 else None
    engine, *_ = deepc.initialize(model=model, config=config, sample_batch=sample)
    losses, given = [], iter(data)
    for _ in range(3):
        if mesh.pp > 1:
            loss = float(engine.train_batch(given))
        else:
            loss = 0.0
            for _ in range(2):
                out = engine(**next(given)).loss
                engine.backward(out)
                engine.step()
                loss += float(out) / 2
        losses += [loss, engine.get_global_grad_norm()]
    weights = {n: deepc.view(p).fp32 for n, p in zip(engine.state.names, engine.state.trained)}
    engine.destroy()
    return losses, weights


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("llama", {"pp": 2, "sp": 2}),
        pytest.param("gpt2", {"pp": 2, "dp": 2, "sp": 2}, marks=pytest.mark.full),
        pytest.param("llama", {"pp": 2, "sp": 2, "tp": 2}, marks=pytest.mark.full),
        pytest.param("gpt2", {"sp": 2, "tp": 2}, marks=pytest.mark.full),
    ],
)
def test_sequences_are_shared_in_stages_and_by_tensor_parallel_ranks(kind, mesh):
    pytest.importorskip("transformers")
    world = mesh.get("pp", 1) * mesh.get("dp", 1) * mesh.get("sp", 1) * mesh.get("tp", 1)
    want = run_ranks(_in_stages, mesh.get("dp", 1), kind, {"dp": mesh.get("dp", 1)})
    mean = [sum(r[0][i] for r in want) / len(want) for i in range(0, 6, 2)]
    seen = set()
    for losses, weights in run_ranks(_in_stages, world, kind, mesh):
        assert losses[1::2] == pytest.approx(want[0][0][1::2], rel=1e-5)
        if mesh.get("pp", 1) > 1:  # of all replicas
            assert losses[::2] == pytest.approx(mean, rel=5e-6)
        for name, value in weights.items():
            seen.add(name)
            whole = want[0][1][name]
            bound = 1e-5 * max(1e-2, float(whole.abs().max()))
            torch.testing.assert_close(value, whole, rtol=0, atol=bound, msg=lambda m, n=name: f"{n}: {m}")
    assert seen == set(want[0][1])
