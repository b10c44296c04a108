"""Tensor parallelism: a model whose layers are cut over ranks trains as it does in one process."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from plainly import batch_loss, first_gradients, in_stages
from ranks import run_ranks as _run_ranks
from tiny import make_batch, make_model


def run_ranks(fn, world, *args):
    return _run_ranks(fn, world, args=args, env={"DEEPC_LOG_LEVEL": "WARNING"})


# ---- the axes --------------------------------------------------------------------------------------------------------
def _axes(rank, world, sp):
    import deepc

    data = [(x, y) for x, y in zip(*make_batch(0, samples=12))]
    engine, _, loader, _ = deepc.initialize(
        model=make_model(),
        config={
            "train_batch_size": 4,
            "sequence_parallel_size": sp,
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        },
        training_data=data,
    )
    losses, seen = [], []
    for x, y in loader:
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
        seen.append(x)
    norm, micro = engine.get_global_grad_norm(), engine.train_micro_batch_size_per_gpu()
    return losses, torch.cat(seen), norm, micro, engine.mesh.sp, engine.plan.world


def test_ranks_of_one_sequence_get_equal_batches_and_share_states():
    (alone,) = run_ranks(_axes, 1, 1)
    both = run_ranks(_axes, 2, 2)
    for losses, seen, norm, micro, sp, world in both:
        assert losses == pytest.approx(alone[0], rel=1e-6) and torch.equal(seen, alone[1])
        assert norm == pytest.approx(alone[2], rel=1e-5) and (micro, sp, world) == (4, 2, 2)


# ---- layers ----------------------------------------------------------------------------------------------------------
def near(got, want, bound=1e-5):
    torch.testing.assert_close(got, want, rtol=0, atol=bound * max(1e-3, float(want.abs().max())))


def _layers(rank, world):
    import deepc
    from deepc.parallel import tensor
    from deepc.plan.mesh import Mesh
    from torch import nn
    from torch.nn import functional as F

    deepc.init_distributed()
    group = tensor.tensor_group(Mesh(tp=world))
    assert tensor.tensor_group(Mesh(tp=world)) is group
    for sequence in (False, True):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(6, 20), nn.GELU(), nn.Linear(20, 6))
        torch.manual_seed(0)
        region = tensor.Region(group, sequence=sequence)
        up = tensor.ColumnParallelLinear(6, 20, group=group, region=region, blocks=(12, 8))
        down = tensor.RowParallelLinear(20, 6, group=group, region=region, blocks=(12, 8))
        cuts = tensor.cuts_of(nn.ModuleList([up, down]))
        x = torch.randn(2, 4, 6).requires_grad_()
        whole = plain(x)
        whole.square().sum().backward()
        mine, x.grad = x.grad, None
        if sequence:
            tensor.sum_gradients(down.bias, group)
            part = tensor.part(x, group, 1)
            out = down(F.gelu(up(part)))
            near(out, whole.detach().chunk(world, 1)[rank])
        else:
            out = down(F.gelu(up(x)))
            near(out, whole.detach())
        out.square().sum().backward()
        near(x.grad, mine)
        for ours, theirs in ((up.weight, plain[0].weight), (up.bias, plain[0].bias), (down.weight, plain[2].weight)):
            near(tensor.whole_of(ours.grad, cuts[id(ours)], group), theirs.grad)
            assert torch.equal(tensor.whole_of(ours, cuts[id(ours)], group), theirs)
        near(down.bias.grad, plain[2].bias.grad)

    # an uneven vocabulary, a row of padding, ignored labels
    torch.manual_seed(0)
    plain = nn.Embedding(61, 6, padding_idx=40)
    torch.manual_seed(0)
    words = tensor.VocabParallelEmbedding(61, 6, 40, group=group)
    cut = tensor.cuts_of(words)[id(words.weight)]
    ids, labels = torch.randint(0, 61, (2, 9)), torch.randint(0, 61, (2, 9))
    ids[0, :3], labels[1, :4] = 40, -100
    assert torch.equal(words(ids), plain(ids))
    words(ids).square().sum().backward()
    plain(ids).square().sum().backward()
    near(tensor.whole_of(words.weight.grad, cut, group), plain.weight.grad)
    with pytest.raises(IndexError, match="not from 0 to 60"):
        words(torch.tensor([61]))

    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        weight, bias = torch.randn(61, 6).to(dtype), torch.randn(61).to(dtype)
        hidden = torch.randn(2, 9, 6).to(dtype)
        rows = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
        logits = F.linear(*rows)
        want = F.cross_entropy(logits.float().view(-1, 61), labels.view(-1))
        want.backward()
        own = [t.clone().requires_grad_() for t in (hidden, cut.take(weight), bias[slice(*cut.parts[rank][0])])]
        got = tensor.linear_cross_entropy(tensor.enter(own[0], group), own[1], labels, cut, group, own[2])
        got.backward(retain_graph=True)
        for t in own:
            t.grad.zero_()  # in place, and a graph that is kept gives them again
        got.backward()
        near(got, want.detach(), bound)
        near(own[0].grad.float(), rows[0].grad.float(), bound)
        near(tensor.whole_of(own[1].grad, cut, group).float(), rows[1].grad.float(), bound)
        mine = logits.detach().view(-1, 61)[:, slice(*cut.parts[rank][0])].clone().requires_grad_()
        each = tensor.cross_entropy(mine, labels.view(-1), cut, group, reduction="none")
        near(each, F.cross_entropy(logits.detach().float().view(-1, 61), labels.view(-1), reduction="none"), bound)
        total = tensor.cross_entropy(mine, labels.view(-1), cut, group)
        total.backward()
        alone = logits.detach().view(-1, 61).clone().requires_grad_()
        F.cross_entropy(alone.float(), labels.view(-1)).backward()
        near(mine.grad.float(), alone.grad.float()[:, slice(*cut.parts[rank][0])], bound)
    # under autocast a head gets what the layer before made, in 16 bits, and its weight is in fp32
    hidden, weight = torch.randn(2, 9, 6).bfloat16(), torch.randn(61, 6)
    rows = [t.clone().requires_grad_() for t in (hidden, weight)]
    mine16 = [hidden.clone().requires_grad_(), cut.take(weight).requires_grad_()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = F.cross_entropy(F.linear(*rows).float().view(-1, 61), labels.view(-1))
        got = tensor.linear_cross_entropy(tensor.enter(mine16[0], group), mine16[1], labels, cut, group)
    want.backward(), got.backward()
    near(got, want.detach(), 1e-2)
    near(tensor.whole_of(mine16[1].grad, cut, group), rows[1].grad, 3e-2)
    near(mine16[0].grad.float(), rows[0].grad.float(), 3e-2)
    hidden = torch.randn(2, 9, 6).bfloat16()
    own[0] = hidden.clone().requires_grad_()
    for loss, of in (
        (tensor.linear_cross_entropy(tensor.enter(own[0], group), own[1], labels, cut, group, own[2]), own[0]),
        (tensor.cross_entropy(mine, labels.view(-1), cut, group), mine),
    ):
        with pytest.raises(deepc.errors.UnsupportedError, match="no second derivative"):
            torch.autograd.grad(loss, of, create_graph=True)
    # one class has all rows: in fp16 their unscaled sum is no number
    hidden, labels = torch.full((2048, 6), 100.0).half(), torch.zeros(2048, dtype=torch.long)
    weight = cut.take(torch.zeros(61, 6)).half().requires_grad_()
    (tensor.linear_cross_entropy(hidden, weight, labels, cut, group) * 0.5).backward()
    near(weight.grad.float(), cut.take(torch.cat([torch.full((1, 6), -50.0), torch.zeros(60, 6)]) + 50 / 61), 2e-3)
    with pytest.raises(deepc.errors.ArgumentError, match="neither from 0 to 60 nor ignore_index"):
        tensor.cross_entropy(mine, torch.full((18,), 61), cut, group)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_layers_and_losses_equal_those_of_one_rank(world):
    run_ranks(_layers, world)


def _factors(rank, world, dtype, scale, count):
    """Gradients of scale times the mean over `count` equal rows of zeros: probabilities and labels have no rounding."""
    import deepc
    from deepc.parallel import tensor
    from deepc.plan.mesh import Mesh

    deepc.init_distributed()
    group = tensor.tensor_group(Mesh(tp=world))
    cut = tensor.Cut.even((4, 2), 0, world, rank)
    whole = torch.tensor([[4.0, -4.0], [4.0, -4.0], [4.0, 4.0], [-4.0, -4.0]]).to(dtype)
    hidden, labels = torch.zeros(count, 2, dtype=dtype).requires_grad_(), torch.zeros(count, dtype=torch.long)
    weight = cut.take(whole).clone().requires_grad_()
    (scale * tensor.linear_cross_entropy(tensor.enter(hidden, group), weight, labels, cut, group)).backward()
    logits = torch.zeros(count, 4 // world, dtype=dtype).requires_grad_()
    (scale * tensor.cross_entropy(logits, labels, cut, group)).backward()
    return hidden.grad[-1], logits.grad[-1]


@pytest.mark.parametrize(("dtype", "scale", "count"), [(torch.bfloat16, 1.0, 1000), (torch.float16, 65536.0, 1)])
def test_the_factor_of_the_vocabularys_gradients_is_not_rounded(dtype, scale, count):
    """1 / count is no number of bf16; the loss scale is none of fp16, and gradients that are 0 would be NaN."""
    factor = scale / count
    ranks = run_ranks(_factors, 2, dtype, scale, count)
    probabilities = torch.tensor([0.25 - 1, 0.25, 0.25, 0.25])
    for rank, (hidden, logits) in enumerate(ranks):
        # p @ weight: 4 / 4 * (1 + 1 + 1 - 1) - 4, and 4 / 4 * (-1 - 1 + 1 - 1) + 4
        assert torch.equal(hidden, torch.tensor([-2 * factor, 2 * factor]).to(dtype))
        assert torch.equal(logits, (probabilities.chunk(2)[rank] * factor).to(dtype))


# ---- models of transformers ------------------------------------------------------------------------------------------
MICRO, SAMPLES, STEPS = 2, 8, 3


def transformer(family, heads=8, **options):
    import transformers as t

    torch.manual_seed(1)
    if family == "gpt2":
        off = dict(attn_pdrop=0, resid_pdrop=0, embd_pdrop=0)
        sizes = dict(vocab_size=61, n_embd=32, n_layer=4, n_head=heads, n_positions=32)
        config = t.GPT2Config(**{**sizes, **off, **options})
        return t.GPT2LMHeadModel(config)
    sizes = dict(vocab_size=61, hidden_size=32, intermediate_size=44, num_hidden_layers=4, num_attention_heads=heads)
    if family == "bert":
        off = dict(hidden_dropout_prob=0, attention_probs_dropout_prob=0)
        return t.BertForMaskedLM(t.BertConfig(**sizes, max_position_embeddings=32, **{**off, **options}))
    name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    made = getattr(t, f"{name}Config")(**{"num_key_value_heads": heads, "head_dim": 32 // heads, **sizes, **options})
    return getattr(t, f"{name}ForCausalLM")(made)


def batches(mesh, rank):
    """Endless: the micro-batches of one data-parallel rank; the samples of a step are the same for any number."""
    draw = torch.Generator().manual_seed(5)
    dp = mesh.coordinates(rank).dp
    while True:
        ids = torch.randint(0, 61, (SAMPLES, 17), generator=draw)
        for part in ids.chunk(mesh.dp)[dp].split(SAMPLES // mesh.dp // MICRO):
            yield {"input_ids": part, "labels": part}


def train(rank, world, family, mesh, config, options=None):
    """(losses, {name: whole gradient of the first step, average before clipping} of what this rank has)."""
    import deepc
    from deepc.plan.mesh import Mesh

    mesh = Mesh.of(mesh)
    data = batches(mesh, rank)
    model = transformer(family, **(options or {})).train()
    engine, *_ = deepc.initialize(
        model=model,
        sample_batch=next(batches(Mesh(dp=SAMPLES // MICRO), 0)) if mesh.pp > 1 else None,
        config={
            "train_batch_size": SAMPLES,
            "gradient_accumulation_steps": MICRO,
            "gradient_clipping": 0.5,
            "tensor_parallel": {"autotp_size": mesh.tp},
            **in_stages(mesh.pp),
            # not Adam: biases of keys have no true gradient, and it turns their rounding noise into steps of size lr
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
            **config,
        },
    )
    grads, losses = first_gradients(engine), []
    for _ in range(STEPS):
        losses.append(batch_loss(engine, MICRO, lambda: engine(**next(data)).loss, data, engine.group))
    norm = engine.get_global_grad_norm()
    engine.destroy()
    return losses, grads, norm


def in_halves(model):
    """The engine of a model that two ranks share."""
    import deepc

    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    config = {"train_batch_size": 2, "tensor_parallel": {"autotp_size": 2}, "optimizer": sgd}
    return deepc.initialize(model=model, config=config)[0]


def check(family, world, mesh, config, options=None):
    ((want, whole, norm),) = run_ranks(train, 1, family, {}, {}, options)
    names = set()
    for losses, grads, got in run_ranks(train, world, family, mesh, config, options):
        assert losses == pytest.approx(want, rel=1e-6) and got == pytest.approx(norm, rel=1e-5)
        for name, grad in grads.items():
            names.add(name)
            bound = 1e-5 * max(1e-3, float(whole[name].abs().max()))
            torch.testing.assert_close(grad, whole[name], rtol=0, atol=bound, msg=lambda m, n=name: f"{n}: {m}")
    assert names == set(whole)


def zero(stage):
    if stage == "fused":
        return {"zero_optimization": {"stage": 2}, "deepc": {"fuse": "auto"}}
    return {"zero_optimization": {"stage": stage}}


@pytest.mark.parametrize(
    ("family", "mesh", "stage"),
    [
        ("gpt2", {"tp": 2}, 0),
        ("llama", {"dp": 2, "tp": 2}, 3),
        *(pytest.param(f, {"dp": 2, "tp": 2}, "fused", marks=pytest.mark.full) for f in ("gpt2", "llama")),
        *(pytest.param(f, {"tp": 2}, 1, marks=pytest.mark.full) for f in ("bert", "mistral", "qwen2", "qwen3")),
    ],
)
def test_layouts_train_as_one_process(family, mesh, stage):
    """All layouts of up to 8 ranks: test_axes_matrix.py."""
    world = mesh.get("dp", 1) * mesh.get("tp", 1) * mesh.get("pp", 1)
    check(family, world, mesh, zero(stage))


# ---- checkpoints -----------------------------------------------------------------------------------------------------
def _goes_on(rank, world, family, mesh, folder, saves, precision):
    """2 steps in one layout. saves: from the beginning, with a checkpoint at the end; returns the whole weights. Else
    from that checkpoint on; returns the norms."""
    import deepc
    from deepc.plan.mesh import Mesh

    mesh = Mesh.of(mesh)
    data = batches(mesh, rank)
    engine, *_ = deepc.initialize(
        model=transformer(family).train(),
        sample_batch=next(batches(Mesh(dp=SAMPLES // MICRO), 0)) if mesh.pp > 1 else None,
        config={
            "train_batch_size": SAMPLES,
            "gradient_accumulation_steps": MICRO,
            "tensor_parallel": {"autotp_size": mesh.tp},
            "zero_optimization": {"stage": 2},
            "bf16": {"enabled": precision == "bf16"},
            **in_stages(mesh.pp),
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        },
    )
    if not saves:
        assert engine.load_checkpoint(folder)[0]
        engine.save_checkpoint(f"{folder}/again")
    for _ in range(2 * MICRO * (not saves)):
        next(data)
    norms = []
    for _ in range(2):
        if mesh.pp > 1:
            engine.train_batch(data)
        for _ in range(MICRO if mesh.pp == 1 else 0):
            engine.backward(engine(**next(data)).loss)
            engine.step()
        norms.append(engine.get_global_grad_norm())
    if saves:
        engine.save_checkpoint(folder)
        norms = engine.module_state_dict() if mesh.pp == 1 else {}
    engine.destroy()
    return norms


@pytest.mark.parametrize(
    ("family", "saved", "loaded", "precision"),
    [
        ("gpt2", {"tp": 2}, {}, "fp32"),
        pytest.param("gpt2", {"tp": 2}, {}, "bf16", marks=pytest.mark.full),
        pytest.param("gpt2", {}, {"tp": 2}, "fp32", marks=pytest.mark.full),
        pytest.param("llama", {"pp": 2, "tp": 2}, {"tp": 4}, "bf16", marks=pytest.mark.full),
        pytest.param("gpt2", {"tp": 4}, {"dp": 2, "tp": 2}, "fp32", marks=pytest.mark.full),
        pytest.param("gpt2", {"tp": 2}, {"pp": 2, "tp": 2}, "fp32", marks=pytest.mark.full),
        pytest.param("llama", {"dp": 2}, {"tp": 2}, "fp32", marks=pytest.mark.full),
        pytest.param("gpt2", {"dp": 2, "tp": 2}, {"dp": 2, "tp": 2}, "bf16", marks=pytest.mark.full),
    ],
)
def test_a_checkpoint_goes_on_in_another_layout(family, saved, loaded, precision, tmp_path):
    """What is loaded and saved again has the same bits, masters and moments too, under the names and shapes of the
    whole model; and steps go on as in the layout that it was saved in."""
    from deepc.checkpoint import CheckpointReader

    def ranks(mesh):
        return mesh.get("dp", 1) * mesh.get("tp", 1) * mesh.get("pp", 1)

    weights = run_ranks(_goes_on, ranks(saved), family, saved, str(tmp_path), True, precision)[0]
    with CheckpointReader(tmp_path) as reader:
        for name, p in transformer(family).named_parameters():
            for kind in ("fp32", "exp_avg", "exp_avg_sq"):
                assert reader[f"{kind}/{name}"].shape == p.shape
            if weights:
                assert torch.equal(reader.tensor(f"fp32/{name}").to(weights[name].dtype), weights[name]), name
        reader.verify()
    want = run_ranks(_goes_on, ranks(saved), family, saved, str(tmp_path), False, precision)[0]
    near_by = 1e-12 if loaded == saved else 1e-4 if precision == "fp32" else 2e-2
    for got in run_ranks(_goes_on, ranks(loaded), family, loaded, str(tmp_path), False, precision):
        assert got == pytest.approx(want, rel=near_by)
    with CheckpointReader(tmp_path) as reader, CheckpointReader(tmp_path / "again") as again:
        assert set(reader.tensors) == set(again.tensors)
        for name in reader.tensors:
            assert torch.equal(reader.tensor(name), again.tensor(name)), name


def _dtensors(rank, world):
    import deepc
    from deepc.parallel.tensor import dtensors

    model = transformer("gpt2")
    whole = {n: t.clone() for n, t in model.state_dict().items()}
    ids = torch.arange(12).view(2, 6)
    logits = model.eval()(ids).logits
    engine = in_halves(model)
    with pytest.raises(deepc.errors.MisuseError, match="got different batches: tensor-parallel rank 1"):
        engine(ids + rank)
    near(engine(ids).logits, logits.detach())
    assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False)[:, 6], logits[:, -1].argmax(-1))
    made = dtensors(model)
    cut = sum(t.to_local().numel() < t.numel() for t in made.values())
    assert cut > 20 and all(t.to_local().data_ptr() == model.state_dict()[n].data_ptr() for n, t in made.items())
    assert set(made) == set(whole) and all(t.shape == whole[n].shape for n, t in made.items())
    for name, t in made.items():
        assert torch.equal(t.full_tensor(), whole[name]), name
    gathered = engine.module_state_dict()
    assert all(torch.equal(gathered[n], t) for n, t in whole.items())
    engine.load_module_state_dict({n: 2 * t for n, t in whole.items()})
    assert all(torch.equal(t, 2 * whole[n]) for n, t in engine.module_state_dict().items())


def test_shards_are_dtensors_and_come_together():
    run_ranks(_dtensors, 2)


def _by_dcp(rank, world, family, tp, folder, saves):
    """Saves, or loads into other weights: those of all ranks together."""
    import torch.distributed.checkpoint as dcp
    from deepc.parallel.tensor import cut_model, dtensors, tensor_group
    from deepc.plan.mesh import Mesh

    model = transformer(family)
    if not saves:
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(7)
    state = model.state_dict()
    if tp > 1:
        cut_model(model, tensor_group(Mesh(dp=world // tp, tp=tp)))
        state = dtensors(model)
    (dcp.save if saves else dcp.load)(state, checkpoint_id=folder)
    return {n: t.full_tensor() if tp > 1 else t for n, t in state.items()}


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_torchs_checkpoints_hold_the_whole(family, tmp_path):
    """torch.distributed.checkpoint of 2 ranks (GPT-2's q, k and v lie in one weight, of which each rank has three
    stretches), loaded by 2 and by one without tensor parallelism."""
    whole = transformer(family).state_dict()
    run_ranks(_by_dcp, 2, family, 2, str(tmp_path), True)
    for world, tp in ((2, 2), (1, 1)):
        for got in run_ranks(_by_dcp, world, family, tp, str(tmp_path), False):
            assert all(torch.equal(got[n], t) for n, t in whole.items()), (world, tp)


# ---- DeepSpeed's names -----------------------------------------------------------------------------------------------
def _compat(rank, world):
    import deepc
    from deepc.compat import deepspeed
    from deepc.errors import ConfigError, DeepcError
    from deepspeed.utils import groups

    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    model = deepspeed.tp_model_init(transformer("gpt2"), 2, torch.bfloat16)
    engine, *_ = deepspeed.initialize(model=model, config={**config, "optimizer": {"type": "AdamW", "params": {}}})
    assert (engine.autotp_size(), engine.mp_world_size, engine.get_tensor_parallel_rank()) == (2, 2, rank % 2)
    assert groups.get_tensor_model_parallel_world_size() == 2 and groups.get_data_parallel_world_size() == world // 2
    assert groups.get_tensor_model_parallel_src_rank() == rank // 2 * 2
    told = torch.tensor([float(rank)])
    torch.distributed.all_reduce(told, group=groups.get_tensor_model_parallel_group())
    assert told.item() == rank // 2 * 4 + 1
    told = torch.tensor([float(rank)])
    torch.distributed.all_reduce(told, group=groups.get_data_parallel_group())
    assert told.item() == sum(range(rank % 2, world, 2))
    ids = torch.arange(12).view(2, 6)
    out = engine.train()(input_ids=ids, labels=ids)
    assert out.logits.shape == (2, 6, model.config.vocab_size) and out.loss.requires_grad
    engine, *_ = deepspeed.initialize(
        model=transformer("gpt2"),
        config={**config, "tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": True}},
    )
    with torch.no_grad():
        assert engine.train()(input_ids=ids, labels=ids).logits is None
    for dtype, size, want in ((torch.float16, 2, "Conflicting dtype"), (None, 4, "tensor_parallel.autotp_size = 2")):
        model = deepc.tp_model_init(transformer("gpt2"), size, dtype)
        with pytest.raises(ConfigError, match=want):
            deepc.initialize(model=model, config={**config, "tensor_parallel": {"autotp_size": 2}})
    with pytest.raises(DeepcError, match="number of ranks"):
        deepc.tp_model_init(model, 0)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_names_of_deepspeed(world):
    _run_ranks(_compat, world, env={"DEEPC_LOG_LEVEL": "WARNING"})


# ---- what is equal, and what is not ----------------------------------------------------------------------------------
def _dropout(rank, world, again):
    from deepc.parallel.tensor.cut import cuts_of

    torch.manual_seed(7 + rank)  # ranks of one tensor group go on with the first one's numbers
    model = transformer("gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5).train()
    torch.manual_seed(7 + rank)
    if again:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    engine = in_halves(model)
    inside = []
    model.transformer.h[0].attn.c_proj.register_forward_pre_hook(lambda m, args: inside.append(args[0].detach()))
    state = []
    for step in range(2):
        ids = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(step))
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        grads = {n: engine.full_grad(p) for n, p in model.named_parameters() if id(p) not in cuts_of(model)}
        engine.step()
        state.append(torch.rand(1))
    return inside, grads, torch.cat(state)


@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.full)])
def test_dropout_is_equal_outside_and_different_inside(again):
    """Of weights that both ranks have the gradients have equal bits; heads are dropped differently."""
    (one, grads, state), (two, others, its) = run_ranks(_dropout, 2, again)
    assert all(torch.equal(g, others[n]) for n, g in grads.items()) and torch.equal(state, its)
    assert not any(torch.equal(a == 0, b == 0) for a, b in zip(one, two))
    if again:  # computed again with the same numbers
        assert len(one) == 4 and torch.equal(one[0], one[1]) and torch.equal(one[2], one[3])


def _crosses(rank, world, heads):
    from deepc.parallel.tensor.cut import cuts_of

    drops = dict(attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5)
    model = transformer("gpt2", heads, add_cross_attention=True, n_embd=4 * heads, **drops).train()
    engine = in_halves(model)
    inside = []
    model.transformer.h[0].crossattention.c_proj.register_forward_pre_hook(lambda m, args: inside.append(args[0]))
    draw = torch.Generator().manual_seed(0)
    ids, other = torch.randint(0, 61, (2, 16), generator=draw), torch.randn(2, 5, 4 * heads, generator=draw)
    engine.backward(engine(input_ids=ids, encoder_hidden_states=other, labels=ids).loss)
    grads = {n: engine.full_grad(p) for n, p in model.named_parameters() if id(p) not in cuts_of(model)}
    return inside[0].detach() == 0, grads, torch.rand(1)


@pytest.mark.parametrize("heads", [4, 3])
def test_attention_to_another_sequence_drops_as_that_to_its_own(heads):
    """Its queries and its keys are made of different inputs. With 3 heads ranks also draw unequally many numbers."""
    (one, grads, drawn), (two, others, its) = run_ranks(_crosses, 2, heads)
    assert torch.equal(drawn, its) and all(torch.equal(g, others[n]) for n, g in grads.items())
    assert one.shape != two.shape or not torch.equal(one, two)


def _raises_inside(rank, world):
    from deepc.parallel.tensor.cut import cuts_of
    from deepc.parallel.tensor.layers import Column

    model = transformer("gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5).train()
    engine = in_halves(model)
    ids = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(0))

    def fail(module, args):
        raise ValueError("inside")

    handle = model.transformer.h[1].attn.c_proj.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="inside"):
        engine(input_ids=ids, labels=ids)
    handle.remove()
    kept = [m.region._seen for m in model.modules() if isinstance(m, Column)]
    drawn = torch.rand(1)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    grads = {n: engine.full_grad(p) for n, p in model.named_parameters() if id(p) not in cuts_of(model)}
    return drawn, grads, kept


def test_a_forward_that_raises_inside_of_a_region_leaves_equal_random_numbers():
    (drawn, grads, kept), (its, others, _) = run_ranks(_raises_inside, 2)
    assert torch.equal(drawn, its) and all(torch.equal(g, others[n]) for n, g in grads.items())
    assert kept and not any(x is not None for x in kept)


@pytest.mark.parametrize("how", ["evaluates", "raises"])
def test_what_a_recomputation_left_inside_of_a_region_is_not_gone_back_to(how):
    """torch.utils.checkpoint ends one early, and restores the generator itself."""
    from typing import Any

    from deepc.parallel.tensor.random import Inside

    group: Any = SimpleNamespace(rank=1)
    owner = torch.nn.Sequential(torch.nn.Dropout(0.5)).train()
    inside = Inside(owner, group)
    with torch.random.fork_rng():
        inside.enter()
    torch.rand(1)
    state = torch.get_rng_state()
    if how == "raises":
        inside.break_off()
    owner.eval()
    inside.enter()
    inside.leave()
    assert torch.equal(torch.get_rng_state(), state)


def _refusals(rank, world):
    import deepc
    from deepc.errors import DeepcError

    def refused(model, **config):
        tensor = {"autotp_size": 2, **config.pop("tensor_parallel", {})}
        with pytest.raises((DeepcError, ValueError)) as caught:
            deepc.initialize(
                model=model, config={"train_micro_batch_size_per_gpu": 1, "tensor_parallel": tensor, **config}
            )
        return str(caught.value)

    def specs(*rows):
        return {"partition_config": {"use_default_specs": False, "layer_specs": list(rows)}}

    plain = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    up = {"patterns": [r"0\.weight"], "partition_type": "column"}
    adapted = transformer("llama")
    adapted.model.layers[0].mlp.extra = torch.nn.Linear(32, 32)
    return [
        refused(plain),
        refused(plain, tensor_parallel=specs({**up, "patterns": ["7"]})),
        refused(plain, tensor_parallel=specs({**up, "patterns": ["("]})),
        refused(plain, tensor_parallel=specs({**up, "partition_type": "diagonal"})),
        refused(plain, tensor_parallel=specs({**up, "shape": [3, -1]})),
        refused(plain, tensor_parallel={"preset_model": "gpt9"}),
        refused(transformer("gpt2", heads=1)),
        refused(adapted),
        refused(transformer("llama"), optimizer={"type": "OneBitAdam", "params": {"lr": 1e-3}}),
        refused(transformer("llama"), deepc={"deterministic": "layout"}),
    ]


def test_what_can_not_be_is_refused():
    wants = [
        "deepc has no rules for Sequential, so nothing would be cut. What could be: 0 (Linear), 1 (Linear). Give",
        "no module's name matches tensor_parallel.partition_config",
        "no regular expression",
        "partition_type = 'diagonal'",
        "parts of 1 + 1 + 1 don't make the 4",
        "deepc has rules for gpt2",
        "transformer.h.0.attn has 1 head: 1 head of queries can't be shared by 2 tensor-parallel ranks",
        "does not know model.layers.0.mlp.extra",
        "OneBitAdam with tensor_parallel.autotp_size above 1 does not exist",
        "deterministic",
    ]
    for told in run_ranks(_refusals, 2):
        for want, text in zip(wants, told, strict=True):
            assert want in text


class _Scaled(torch.nn.Linear):
    def forward(self, x):
        return 3 * super().forward(x)


class _ScaledWords(torch.nn.Embedding):  # as Gemma's
    def forward(self, ids, *, more=1.0):
        return super().forward(ids) * self.scale.to(self.weight.dtype) * more


class _FoundWords(torch.nn.Embedding):
    def forward(self, ids):
        return 3 * torch.nn.functional.embedding(ids, self.weight)


class _Rescaled(_Scaled):
    """The same forward."""


def _refused_modules(rank, world):
    import deepc
    from deepc.parallel import tensor
    from deepc.plan.mesh import Mesh
    from torch.nn.utils import parametrizations, weight_norm

    deepc.init_distributed()
    group, told = tensor.tensor_group(Mesh(tp=world)), []
    for kind, made in (
        ("column", _Scaled(4, 4)),
        ("row", _Rescaled(4, 4)),
        ("vocabulary", _FoundWords(4, 4)),
        ("column", parametrizations.weight_norm(torch.nn.Linear(4, 4))),
        ("row", weight_norm(torch.nn.Linear(4, 4))),
        ("column", parametrizations.orthogonal(torch.nn.Linear(4, 4))),
    ):
        config = {"layer_specs": [{"patterns": ["0"], "partition_type": kind}]}
        with pytest.raises(deepc.errors.UnsupportedError) as caught:
            tensor.cut_model(torch.nn.Sequential(made), group, {"partition_config": config})
        told.append(str(caught.value))
    for spec, says in (
        ({"patterns": ".*up"}, r"layer_specs\[0\].patterns = '.\*up': it is a list of texts"),
        ({"patterns": ["up", None]}, "it is a list of texts"),
        ({"patterns": ["up"], "model_types": "llama"}, "model_types = 'llama': it is a list of texts"),
    ):
        with pytest.raises(deepc.errors.ConfigError, match=says):
            tensor.cut_model(torch.nn.Linear(4, 4), group, {"partition_config": {"layer_specs": [spec]}})
    with pytest.raises(deepc.errors.ConfigError, match=r"tp_size=2\), and its .*autotp_size = 4"):
        deepc.tp_model_init(torch.nn.Linear(4, 4), 2, config={"tensor_parallel": {"autotp_size": 4}})
    sizes = {"get_model_parallel_world_size": lambda: world, "get_data_parallel_world_size": lambda: 1}
    for lacks, there in (("data_parallel_world_size", 1), ("model_parallel_rank", 2)):
        mpu = SimpleNamespace(**dict(list(sizes.items())[:there]))
        with pytest.raises(deepc.errors.ArgumentError, match=f"SimpleNamespace lacks get_{lacks}"):
            deepc.initialize(model=torch.nn.Linear(4, 4), mpu=mpu, config={"train_micro_batch_size_per_gpu": 1})
    cut = tensor.Cut.even((4, 2), 0, world, rank)
    with pytest.raises(deepc.errors.ArgumentError, match="reduction='avg'"):
        tensor.cross_entropy(torch.zeros(1, 2), torch.tensor([1]), cut, group, reduction="avg")
    row = tensor.RowParallelLinear(4, 3, group=group, split_input=True)
    row(torch.ones(4)).sum().backward()
    assert torch.equal(row.bias.grad, torch.ones(3))
    return told


def test_modules_that_compute_more_than_their_class_are_refused():
    for told in run_ranks(_refused_modules, 2):
        assert all("has a forward of its own" in text for text in told[:3]), told
        assert all("its weight is made of other parameters" in text for text in told[3:]), told


def _scaled(rank, world):
    """A class of embeddings that scales what nn.Embedding gives, cut: what it gives, and the weight's gradient."""
    import deepc
    from deepc.parallel import tensor
    from deepc.plan.mesh import Mesh

    deepc.init_distributed()
    ids, upstream = torch.tensor([[0, 3, 4, 1]]), torch.arange(8.0).view(1, 4, 2)
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        made = _ScaledWords(5, 2)
        made.register_buffer("scale", torch.tensor(3.0), persistent=False)
        models.append(torch.nn.Sequential(made))
    whole, cut = models
    rule = {"layer_specs": [{"patterns": ["0"], "partition_type": "vocabulary"}]}
    tensor.cut_model(cut, tensor.tensor_group(Mesh(tp=world)), {"partition_config": rule})
    again = copy.deepcopy(cut)
    assert isinstance(cut[0], _ScaledWords)
    want = whole[0](ids, more=0.5)
    want.backward(upstream)
    own = cut[0].cuts["weight"]
    for model in (cut, again):
        got = model[0](ids, more=0.5)
        assert torch.equal(got, want)
        got.backward(upstream)
        assert torch.equal(model[0].weight.grad, own.take(whole[0].weight.grad))


def test_embeddings_that_scale_their_rows_are_cut():
    run_ranks(_scaled, 2)


def _encoder(rank, world):
    """How far evaluation is from the whole model's, which takes torch's fast path."""
    import deepc

    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.randn(2, 5, 8), torch.arange(5) >= torch.tensor([[5], [3]])
    with torch.no_grad():
        wanted = model(x), model(x, src_key_padding_mask=padding)
    rows = [
        {"patterns": [r"layers\.\d\.linear1"], "partition_type": "column"},
        {"patterns": [r"layers\.\d\.linear2"], "partition_type": "row"},
    ]
    engine = deepc.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": rows}},
        },
    )[0]
    engine.eval()
    with torch.no_grad():
        found = engine(x), engine(x, src_key_padding_mask=padding)
    for got, want in zip(found, wanted):
        near((got * ~padding[..., None]), (want * ~padding[..., None]))
    engine.destroy()


def test_an_encoder_of_torch_evaluates_what_it_trains():
    run_ranks(_encoder, 2)
