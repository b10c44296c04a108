"""Attention heads, and widths of MLPs, that tensor-parallel ranks do not divide: each rank has whole heads, and models
train as torch does in one process."""

from __future__ import annotations

import copy

import pytest
import torch
from plainly import batch_loss, clipped, first_gradients, in_stages
from ranks import run_ranks as _run_ranks

VOCABULARY, POSITIONS, SAMPLES, MICRO, STEPS, CLIP = 61, 9, 4, 2, 3, 0.5
SGD = {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}}


def run_ranks(fn, world, *args):
    return _run_ranks(fn, world, args=args, env={"DEEPC_LOG_LEVEL": "WARNING"})


def model_of(family, heads, keys=0, inner=5, layers=2):
    """keys: heads of keys and values (0: one for each of queries). inner: width of the MLP."""
    import transformers as t

    torch.manual_seed(1)
    if family == "gpt2":
        off = dict(attn_pdrop=0, resid_pdrop=0, embd_pdrop=0)
        sizes = dict(vocab_size=VOCABULARY, n_embd=4 * heads, n_head=heads, n_inner=inner, n_layer=layers)
        return t.GPT2LMHeadModel(t.GPT2Config(**sizes, n_positions=16, **off)).train()
    sizes = dict(vocab_size=VOCABULARY, hidden_size=4 * heads, num_attention_heads=heads, intermediate_size=inner)
    sizes["num_hidden_layers"] = layers
    if family == "bert":
        off = dict(hidden_dropout_prob=0, attention_probs_dropout_prob=0)
        return t.BertForMaskedLM(t.BertConfig(**sizes, max_position_embeddings=16, **off)).train()
    eager = dict(attention_bias=True, attn_implementation="eager")  # repeats keys by num_key_value_groups
    of, more = {"llama": ("Llama", eager), "qwen3": ("Qwen3", {"sliding_window": None})}[family]
    config = getattr(t, f"{of}Config")(**sizes, num_key_value_heads=keys or heads, head_dim=4, **more)
    return getattr(t, f"{of}ForCausalLM")(config).train()


def micro_batches(replica=0, replicas=1):
    """Endless: those of a replica. The samples of a step are the same for any number of them."""
    draw = torch.Generator().manual_seed(5)
    while True:
        ids = torch.randint(0, VOCABULARY, (SAMPLES, POSITIONS), generator=draw)
        for part in ids.chunk(replicas)[replica].chunk(MICRO):
            yield {"input_ids": part, "labels": part}


def by_torch(model, steps=STEPS):
    """(losses, norms before clipping, {name: gradient of the first step before clipping}); trains `model`."""
    optimizer, data = torch.optim.SGD(model.parameters(), **SGD["params"]), micro_batches()
    return clipped(model, optimizer, lambda: model(**next(data)).loss, MICRO, steps, CLIP)


def engine_of(model, mesh, stage, sample=None, **config):
    """sample: a micro-batch as the model gets them, where that is another."""
    import deepc

    return deepc.initialize(
        model=model,
        sample_batch=(sample or next(micro_batches())) if mesh.pp > 1 else None,
        config={
            "train_batch_size": SAMPLES,
            "gradient_accumulation_steps": MICRO,
            "gradient_clipping": CLIP,
            "tensor_parallel": {"autotp_size": mesh.tp},
            **in_stages(mesh.pp),
            "zero_optimization": {"stage": stage},
            # not Adam: biases of keys have no true gradient, and it turns their rounding noise into steps of size lr
            "optimizer": SGD,
            **config,
        },
    )[0]


def trained(engine, data, steps=STEPS):
    """(losses, norms before clipping)."""
    losses, norms = [], []
    for _ in range(steps):
        losses.append(batch_loss(engine, MICRO, lambda: engine(**next(data)).loss, data, engine.group))
        norms.append(engine.get_global_grad_norm())
    return losses, norms


def near(got, want, name, bound=1e-5):
    torch.testing.assert_close(
        got, want, rtol=0, atol=bound * max(1e-3, float(want.abs().max())), msg=lambda m: f"{name}: {m}"
    )


# ---- which rank has which heads --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("queries", "keys", "ranks", "shared", "read"),
    [
        (6, 6, 4, (2, 2, 1, 1), None),
        (12, 3, 2, (8, 4), None),  # whole heads of keys with all of their queries, as DeepSpeed shares them
        (14, 2, 4, (4, 3, 4, 3), ((0,), (0,), (1,), (1,))),
        (3, 1, 2, (2, 1), ((0,), (0,))),
        (6, 2, 4, (2, 1, 2, 1), ((0,), (0,), (1,), (1,))),
        (6, 2, 3, (2, 2, 2), ((0,), (0, 1), (1,))),  # the second one's queries read a head each
        (10, 2, 3, (4, 3, 3), ((0,), (0, 1, 1), (1,))),
    ],
)
def test_heads_are_shared_whole(queries, keys, ranks, shared, read):
    from deepc.errors import ArgumentError
    from deepc.parallel.tensor.cut import Heads

    heads = Heads.over(queries, keys, ranks)
    assert (heads.queries, heads.keys) == (shared, read)
    if read is not None:  # query i of a rank reads what it has at i // groups: its own head of the whole
        of = [k for r, some in enumerate(read) for k in some for _ in range(heads.groups(r))]
        assert of == [q // (queries // keys) for q in range(queries)]
    with pytest.raises(ArgumentError, match=f"{queries} heads of queries can't be shared by {queries + 1}"):
        Heads.over(queries, keys, queries + 1)


def test_every_rank_gets_some_of_a_width():
    from deepc.compat.helpers.parallel.layers import get_shard_size_list
    from deepc.errors import ArgumentError
    from deepc.parallel.tensor.cut import Cut

    def widths(cut):
        return [cut.width(r) for r in range(cut.ranks)]

    assert widths(Cut.even((61, 4), 0, 4, 0)) == [16, 16, 16, 13]  # torch.chunk's
    assert widths(Cut.even((4, 9), 1, 8, 0)) == [2, 1, 1, 1, 1, 1, 1, 1]  # where torch.chunk leaves ranks with nothing
    fused = Cut.shared((12, 4), 0, (2, 1), 0, (6, 3, 3))
    assert fused.parts == (((0, 4), (6, 8), (9, 11)), ((4, 6), (8, 9), (11, 12)))
    assert get_shard_size_list(24, 4, num_kv_heads=6) == [8, 8, 4, 4]  # DeepSpeed's question
    with pytest.raises(ArgumentError, match="7 features can't be cut"):
        Cut.shared((7, 4), 0, (2, 1), 0)


# ---- training --------------------------------------------------------------------------------------------------------
def _trains(rank, world, sizes, models, stages):
    """Every model at every stage of ZeRO against torch in this process; the losses."""
    from deepc.plan.mesh import Mesh

    mesh, told = Mesh.of(sizes), {}
    for given in models:
        plain = model_of(*given)
        made = [copy.deepcopy(plain) for _ in stages]
        losses, norms, grads = by_torch(plain)
        for stage, model in zip(stages, made):
            case = f"{mesh}, {given}, ZeRO {stage}"
            engine = engine_of(model, mesh, stage)
            assert (engine.mesh.dp, engine.mesh.tp, engine.mesh.pp) == (mesh.dp, mesh.tp, mesh.pp)
            here = first_gradients(engine)
            its_losses, its_norms = trained(engine, micro_batches(mesh.coordinates(rank).dp, mesh.dp))
            assert its_losses == pytest.approx(losses, rel=1e-6), case
            assert its_norms == pytest.approx(norms, rel=1e-5), case
            for name, grad in here.items():
                near(grad, grads[name], f"{case}, {name}")
            told[given, stage] = its_losses, sorted(here)
            if mesh.pp == 1:
                assert set(here) == set(grads)
            engine.destroy()
    return told


LLAMA = ("llama", 3, 1)  # one head of keys, which both of 2 ranks read


@pytest.mark.parametrize(
    ("sizes", "models", "stages"),
    [
        ({"tp": 2}, [("gpt2", 3), LLAMA], (3,)),
        pytest.param({"tp": 2}, [("bert", 3), ("llama", 6, 3), ("qwen3", 3, 1)], (0, 1, 2, 3), marks=pytest.mark.full),
        pytest.param(
            {"tp": 3}, [("gpt2", 4, 0, 4), ("llama", 6, 2), ("llama", 10, 2)], (0, 2, 3), marks=pytest.mark.full
        ),
        pytest.param({"tp": 4}, [("gpt2", 6), ("llama", 14, 2), ("llama", 6, 2)], (1, 3), marks=pytest.mark.full),
        pytest.param({"dp": 2, "tp": 2}, [("gpt2", 3), LLAMA, ("bert", 3)], (0, 1, 2, 3), marks=pytest.mark.full),
        pytest.param({"tp": 2, "pp": 2}, [("gpt2", 3), LLAMA], (0, 1, 2, 3), marks=pytest.mark.full),
        pytest.param({"dp": 2, "tp": 2, "pp": 2}, [("gpt2", 3), LLAMA], (2, 3), marks=pytest.mark.full),
    ],
    ids=lambda v: "x".join(f"{k}{n}" for k, n in v.items()) if isinstance(v, dict) else None,
)
def test_uneven_heads_train_as_torch_in_one_process(sizes, models, stages):
    """Losses to 1e-6, norms and gradients to 1e-5 of the largest element; all ranks tell the same losses."""
    world = sizes.get("dp", 1) * sizes["tp"] * sizes.get("pp", 1)
    ranks = run_ranks(_trains, world, sizes, models, stages)
    for case, (losses, _) in ranks[0].items():
        assert all(r[case][0] == losses for r in ranks)
    if sizes.get("pp", 1) > 1:
        names = {n for n, _ in model_of(*models[0]).named_parameters()}
        assert {n for r in ranks for n in r[models[0], stages[0]][1]} == names


# ---- the whole -------------------------------------------------------------------------------------------------------
def _whole(rank, world, folder):
    """2 steps over tensor-parallel ranks, 2 in another layout from their checkpoint, 2 more as before."""
    import deepc
    from deepc.checkpoint import CheckpointReader
    from deepc.errors import UnsupportedError
    from deepc.parallel.simulate.onpaper import OnPaper
    from deepc.parallel.tensor import cut_model, dtensors
    from deepc.plan.mesh import Mesh

    for given in (("gpt2", 3), LLAMA):
        at = f"{folder}/{given[0]}"
        plain = model_of(*given)
        whole = {n: t.clone() for n, t in plain.state_dict().items()}
        losses, norms, _ = by_torch(plain, 6)
        got_losses, got_norms = [], []
        for i, sizes in enumerate(({"tp": 2}, {"dp": 2}, {"tp": 2})):
            mesh = Mesh.of(sizes)
            engine = engine_of(model_of(*given), mesh, 2)
            if i:
                assert engine.load_checkpoint(f"{at}/{i - 1}")[0]
            data = micro_batches(mesh.coordinates(rank).dp, mesh.dp)
            for _ in range(2 * i * MICRO):
                next(data)
            if i == 0:
                named = dict(engine.module.named_parameters())
                for name, p in named.items():
                    assert torch.equal(deepc.view(p).value, whole[name]), name
                divided = model_of(*given)  # as an estimate does, in one process
                cut_model(divided, OnPaper(rank, 2))
                assert {n: p.shape for n, p in divided.named_parameters()} == {n: p.shape for n, p in named.items()}
                with pytest.raises(UnsupportedError, match="DTensor has no placement"):
                    dtensors(engine.module)
            for found, more in zip((got_losses, got_norms), trained(engine, data, 2)):
                found += more
            engine.save_checkpoint(f"{at}/{i}")
            if i == 2:
                state = engine.module_state_dict()
                engine.module.save_pretrained(f"{at}/hf")
                engine.everyone.barrier()
                read = type(plain).from_pretrained(f"{at}/hf").state_dict()
                for name, p in plain.named_parameters():
                    near(state[name], p.detach(), name)
                    assert torch.equal(read[name], state[name])
                # a new value of the whole, with which the model computes
                for name, p in engine.module.named_parameters():
                    deepc.view(p).fp32 = whole[name]
                ids = next(micro_batches())["input_ids"]
                fresh = model_of(*given).eval()
                near(engine.module.eval()(ids).logits, fresh(ids).logits.detach(), "logits")
                options = dict(max_new_tokens=3, do_sample=False, pad_token_id=0)
                assert torch.equal(engine.module.generate(ids, **options), fresh.generate(ids, **options))
            engine.destroy()
        assert got_losses == pytest.approx(losses, rel=1e-6) and got_norms == pytest.approx(norms, rel=1e-5)
        with CheckpointReader(f"{at}/0") as reader:
            for name, p in plain.named_parameters():
                assert tuple(reader[f"fp32/{name}"].shape) == tuple(p.shape)


def test_checkpoints_views_and_saved_models_are_of_the_whole(tmp_path):
    run_ranks(_whole, 2, str(tmp_path))


# ---- what can't be ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rank", [0, 1])
def test_heads_that_can_not_be_shared_are_refused(rank):
    from deepc.errors import DeepcError
    from deepc.parallel.simulate.onpaper import OnPaper
    from deepc.parallel.tensor import cut_model

    unnamed, unlike, fused = model_of(*LLAMA), model_of("llama", 6, 3), torch.nn.Module()
    for block in unnamed.model.layers:
        del block.self_attn.num_key_value_groups
    unlike.model.layers[0].self_attn.k_proj = torch.nn.Linear(24, 16)
    fused.attention = torch.nn.Module()
    fused.attention.head_dim, fused.attention.qkv = 4, torch.nn.Linear(12, 20)
    spec = {"patterns": [r".*\.qkv$"], "partition_type": "column", "shape": [[12, 4, 4], -1]}
    for model, sequence, want in (
        (
            model_of("gpt2", 1),
            1,
            "has 1 head: 1 head of queries can't be shared by 2 tensor-parallel ranks; use at most 1",
        ),
        (unnamed, 1, "LlamaAttention has no num_key_value_groups = 3"),
        (unlike, 1, "4 is neither the number of keys and values nor of queries"),
        (fused, 1, "qkv has queries, keys and values in one weight; use at most 1 ranks"),
        (model_of("gpt2", 3), 2, "sequence_parallel_size = 2, and the heads of transformer.h.0.attn, which ranks of a"),
    ):
        before = {n: p.shape for n, p in model.named_parameters()}
        with pytest.raises(DeepcError) as caught:
            cut_model(model, OnPaper(rank, 2), {"partition_config": {"layer_specs": [spec]}}, sequence)
        assert want in str(caught.value)
        assert {n: p.shape for n, p in model.named_parameters()} == before  # nothing was cut


# ---- what is not cut is alike on all ranks ---------------------------------------------------------------------------
def _replicas(rank, world, heads, inner, optimizer):
    """What the ranks hold alike after some steps, or the error."""
    from deepc.errors import UnsupportedError
    from deepc.plan.mesh import Mesh

    try:
        engine = engine_of(model_of("llama", heads, inner=inner), Mesh.of({"tp": world}), 1, optimizer=optimizer)
    except UnsupportedError as exc:
        return str(exc)
    trained(engine, micro_batches())
    alike = {n: p for n, p in engine.module.named_parameters() if id(p) not in engine.cuts}
    found = {n: engine.full_fp32_param(p).clone() for n, p in alike.items()}
    engine.destroy()
    return found


@pytest.mark.parametrize("kind, form", [("AdamW", "int8"), ("Muon", "bf16")])
def test_states_in_a_format_want_shards_of_equal_sizes(kind, form):
    """Blocks and random bits follow a place in the flat space, which shards of other sizes shift."""
    optimizer = {"type": kind, "params": {"lr": 1e-2, "state_dtype": form}}
    for text in run_ranks(_replicas, 2, 3, 131, optimizer):
        assert f'state_dtype "{form}" with shards of unequal sizes' in text
    first, second = run_ranks(_replicas, 2, 4, 128, optimizer)
    assert len(first) > 4 and all(torch.equal(value, second[n]) for n, value in first.items())


def test_norms_of_what_is_not_cut_are_the_first_ranks():
    from deepc.zero.step.across.sharers import Sharers

    found = [{0: (1.0, 2.0), 1: (3.0, 4.0)}, {0: (10.0, 20.0), 1: (3.0 + 1e-15, 4.5)}]

    def gather(mine, widths):
        return torch.cat([torch.tensor([rank[p] for p in (0, 1)], dtype=torch.float64).view(-1) for rank in found])

    for rank in (0, 1):
        assert Sharers({0: None}, rank, 2, gather).squares(found[rank]) == {0: (11.0, 22.0), 1: (3.0, 4.0)}
