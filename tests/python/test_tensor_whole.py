"""Whole parameters of a model that tensor parallelism has cut: optimizers whose step is of whole ones, reading and
writing them, saving the model, and models that Megatron's layers have cut."""

from __future__ import annotations

import pytest
import torch
from plainly import in_stages
from ranks import run_ranks as _run_ranks
from torch import nn

SAMPLES, STEPS = 4, 2


def run_ranks(fn, world, *args):
    return _run_ranks(fn, world, args=args, env={"DEEPC_LOG_LEVEL": "WARNING"})


def llama(bias=False, heads=(4, 2)):
    """heads: of queries, and of keys and values."""
    import transformers as t

    torch.manual_seed(1)
    sizes = dict(vocab_size=61, hidden_size=8 * heads[0], intermediate_size=44, num_hidden_layers=2)
    attention = dict(num_attention_heads=heads[0], num_key_value_heads=heads[1], attention_bias=bias)
    config = t.LlamaConfig(**sizes, **attention)
    return t.LlamaForCausalLM(config).train()


def batches(mesh, rank):
    """Endless: the batches of one data-parallel rank; the samples of a step are the same for any number."""
    draw, dp = torch.Generator().manual_seed(5), mesh.coordinates(rank).dp
    while True:
        part = torch.randint(0, 61, (SAMPLES, 17), generator=draw).chunk(mesh.dp)[dp]
        yield {"input_ids": part, "labels": part}


def engine_of(mesh, config, model=None):
    import deepc

    return deepc.initialize(
        model=model or llama(),
        sample_batch=next(batches(mesh, 0)) if mesh.pp > 1 else None,
        config={
            "train_batch_size": SAMPLES,
            "tensor_parallel": {"autotp_size": mesh.tp},
            **in_stages(mesh.pp),
            **config,
        },
    )[0]


def step(engine, data, mesh):
    if mesh.pp > 1:
        return float(engine.train_batch(data))
    loss = engine(**next(data)).loss
    engine.backward(loss)
    engine.step()
    return float(loss)


def near(got, want, name, bound=1e-5):
    torch.testing.assert_close(
        got, want, rtol=0, atol=bound * max(1e-6, float(want.abs().max())), msg=lambda m: f"{name}: {m}"
    )


# ---- optimizers whose step is of whole parameters --------------------------------------------------------------------
# eps where the update would else be the sign of a gradient: that of rounding noise where there is none
OPTIMIZERS = {
    "Lamb": {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1, "min_coeff": 0.01, "max_coeff": 10.0},
    "Muon": {"lr": 1e-3, "ns_method": "gram", "ns_dtype": "float32", "adam_eps": 1e-3},
    "Adafactor": {"lr": 1e-2, "eps": [1e-4, 1e-3]},
}


def _trains(rank, world, mesh, kind, stage, folder, heads):
    """{name: whole weights} and {name/state: whole state}, after STEPS steps."""
    import deepc
    from deepc.plan.mesh import Mesh

    mesh = Mesh.of(mesh)
    engine = engine_of(
        mesh,
        {
            "gradient_clipping": 0.5,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": kind, "params": OPTIMIZERS[kind]},
        },
        llama(heads=heads),
    )
    data = batches(mesh, rank)
    for _ in range(STEPS):
        step(engine, data, mesh)
    weights, states = {}, {}
    for name, p in zip(engine.state.names, engine.state.trained):
        v = deepc.view(p)
        weights[name] = v.fp32
        states.update({f"{name}/{key}": v.state[key] for key in v.state})
    if folder:
        engine.save_checkpoint(folder)
        engine.load_checkpoint(folder)  # in the same layout: nothing moves
        for name, p in zip(engine.state.names, engine.state.trained):
            assert torch.equal(deepc.view(p).fp32, weights[name])
            for key in deepc.view(p).state:
                assert torch.equal(deepc.view(p).state[key], states[f"{name}/{key}"]), (name, key)
    engine.destroy()
    return weights, states


@pytest.mark.parametrize(
    ("kind", "mesh", "stage", "heads"),
    [
        ("Lamb", {"tp": 2}, 0, (4, 2)),
        ("Muon", {"tp": 2}, 1, (4, 2)),
        ("Adafactor", {"tp": 2}, 2, (4, 2)),
        *(
            pytest.param(kind, {"dp": 2, "tp": 2}, stage, (4, 2), marks=pytest.mark.full)
            for kind in OPTIMIZERS
            for stage in (0, 3)
        ),
        *(pytest.param(kind, {"pp": 2, "tp": 2}, 1, (4, 2), marks=pytest.mark.full) for kind in OPTIMIZERS),
        *(  # shards of different sizes, and keys that both ranks read
            pytest.param(kind, {"tp": 2}, 1, heads, marks=pytest.mark.full)
            for kind in OPTIMIZERS
            for heads in ((3, 1), (6, 3))
        ),
    ],
)
def test_optimizers_of_whole_parameters_step_shards_as_in_one_process(kind, mesh, stage, heads, tmp_path):
    from deepc.checkpoint import CheckpointReader

    ((want, wanted),) = run_ranks(_trains, 1, {}, kind, stage, "", heads)
    world = mesh.get("dp", 1) * mesh.get("tp", 1) * mesh.get("pp", 1)
    seen = set()
    for weights, states in run_ranks(_trains, world, mesh, kind, stage, str(tmp_path), heads):
        for name, value in weights.items():
            seen.add(name)
            near(value, want[name], name)
        for name, value in states.items():
            near(value, wanted[name], name)
    assert seen == set(want)
    with CheckpointReader(tmp_path) as reader:  # whole, under the names of the model
        for name, value in wanted.items():
            param, key = name.rsplit("/", 1)
            assert tuple(reader[f"{key}/{param}"].shape) == tuple(value.shape)


# ---- views, and the whole model --------------------------------------------------------------------------------------
def _views(rank, world, folder):
    import deepc
    from deepc import utils
    from deepc.plan.mesh import Mesh

    mesh = Mesh(tp=2)
    whole = {n: p.detach().clone() for n, p in llama().named_parameters()}
    adam = {"type": "AdamW", "params": {"lr": 0.1}}
    engine = engine_of(mesh, {"zero_optimization": {"stage": 3}, "optimizer": adam, "gradient_clipping": 0.0})
    named = dict(engine.module.named_parameters())
    cut = {n for n, p in named.items() if id(p) in engine.cuts}
    assert {"model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"} <= cut and len(cut) < len(named)
    for name, p in named.items():
        v = deepc.view(p)
        assert torch.equal(v.fp32, whole[name]) and torch.equal(v.value, whole[name])
        assert sum(b - a for a, b in v.local.ranges) == p.numel()
    # a new value of the whole: each rank keeps its shard, and the model computes with it
    name = "model.layers.1.mlp.down_proj.weight"
    v, new = deepc.view(named[name]), torch.randn(whole[name].shape, generator=torch.Generator().manual_seed(3))
    v.fp32 = new
    assert torch.equal(v.value, new) and torch.equal(named[name].detach(), engine.cuts[id(named[name])].take(new))
    with pytest.raises(deepc.errors.ArgumentError, match=f"{named[name].numel()} elements"):
        v.fp32 = named[name].detach()
    plain = llama()
    plain.load_state_dict({**whole, name: new})
    batch = next(batches(mesh, rank))
    engine.backward(engine(**batch).loss)
    plain(**batch).loss.backward()
    for n, p in plain.named_parameters():
        near(utils.safe_get_full_grad(named[n]), p.grad, n)
    # gradients and states of the whole, read and written
    v.grad = torch.ones_like(new)
    assert torch.equal(utils.safe_get_full_grad(named[name]), torch.ones_like(new))
    engine.step()
    near(v.state["exp_avg"], torch.full_like(new, 0.1), name)
    v.state["exp_avg"] = new
    assert torch.equal(utils.safe_get_full_optimizer_state(named[name], "exp_avg"), new)
    # the model of transformers, written whole: by all ranks, or by one that has it
    model, state = engine.module, engine.module_state_dict()
    model.save_pretrained(f"{folder}/all")
    if rank == 0:
        model.save_pretrained(f"{folder}/one", state_dict=state)
    with pytest.raises(deepc.errors.ArgumentError, match="a rank's shard"):
        model.save_pretrained(f"{folder}/wrong", state_dict=model.state_dict())
    engine.everyone.barrier()
    for form in ("all", "one"):
        read = type(model).from_pretrained(f"{folder}/{form}").state_dict()
        assert all(torch.equal(t, read[n]) for n, t in state.items())
    engine.destroy()


def test_views_and_saved_models_are_whole(tmp_path):
    run_ranks(_views, 2, str(tmp_path))


def _from_init(rank, world, mesh):
    """A model that exists once per node until it is cut."""
    import deepc
    from deepc.plan.mesh import Mesh

    mesh = Mesh.of(mesh)
    with deepc.zero.Init():
        model = llama()
    engine = engine_of(mesh, {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, model)
    whole = {n: t.clone() for n, t in engine.module_state_dict().items()}
    loss = step(engine, batches(mesh, rank), mesh)
    held = sum(p.numel() for p in engine.state.trained)
    engine.destroy()
    return whole, loss, held


@pytest.mark.parametrize("mesh", [{"tp": 2}, pytest.param({"pp": 2}, marks=pytest.mark.full)])
def test_models_made_under_zero_init_are_cut(mesh):
    plain = llama()
    with torch.no_grad():
        want = float(plain(**next(batches(_one(), 0))).loss)
    total = sum(p.numel() for p in plain.parameters())
    for whole, loss, held in run_ranks(_from_init, 2, mesh):
        assert all(torch.equal(whole[n], p) for n, p in plain.named_parameters())
        assert loss == pytest.approx(want, rel=1e-5) and held < 0.8 * total


def _one():
    from deepc.plan.mesh import Mesh

    return Mesh()


# ---- initialize(mpu=) ------------------------------------------------------------------------------------------------
class Mpu:
    """As Megatron-LM's parallel_state: tensor-parallel ranks next to each other."""

    def __init__(self, tp):
        from torch import distributed as dist

        world, me = dist.get_world_size(), dist.get_rank()
        models = [list(range(i, i + tp)) for i in range(0, world, tp)]
        datas = [list(range(i, world, tp)) for i in range(tp)]
        self._model, self._data = (
            next(made for made in [(r, dist.new_group(r)) for r in groups] if me in made[0])
            for groups in (models, datas)
        )
        self._me = me

    def get_model_parallel_group(self):
        return self._model[1]

    def get_model_parallel_world_size(self):
        return len(self._model[0])

    def get_model_parallel_rank(self):
        return self._model[0].index(self._me)

    def get_data_parallel_group(self):
        return self._data[1]

    def get_data_parallel_world_size(self):
        return len(self._data[0])

    def get_data_parallel_rank(self):
        return self._data[0].index(self._me)


class Summed(torch.autograd.Function):
    """Megatron's g (forward) or f (backward)."""

    @staticmethod
    def forward(ctx, x, group, forward):
        ctx.group, ctx.forwards = group, forward
        if forward:
            x = x.clone()
            torch.distributed.all_reduce(x, group=group)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if not ctx.forwards:
            grad = grad.clone()
            torch.distributed.all_reduce(grad, group=ctx.group)
        return grad, None, None


class Cut(nn.Module):
    """Megatron's MLP: layers of its own, with its marks on parameters."""

    def __init__(self, plain, mpu):
        super().__init__()
        self.group = mpu.get_model_parallel_group()
        ranks, rank = mpu.get_model_parallel_world_size(), mpu.get_model_parallel_rank()
        for name, source, dim in (("up", plain.up, 0), ("down", plain.down, 1)):
            p = nn.Parameter(source.detach().chunk(ranks, dim)[rank].clone())
            p.tensor_model_parallel, p.partition_dim, p.partition_stride = True, dim, 1
            setattr(self, name, p)
        self.bias = nn.Parameter(plain.bias.detach().clone())

    def forward(self, x):
        x = Summed.apply(x, self.group, False)
        return (Summed.apply((x @ self.up.t()).tanh() @ self.down.t(), self.group, True) + self.bias).square().mean()


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Parameter(torch.randn(12, 6)), nn.Parameter(torch.randn(6, 12))
        self.bias = nn.Parameter(torch.zeros(6))

    def forward(self, x):
        return ((x @ self.up.t()).tanh() @ self.down.t() + self.bias).square().mean()


def _mpu(rank, world, folder):
    import deepc
    from deepc.errors import ArgumentError, ConfigError, UnsupportedError

    deepc.init_distributed()
    config = {
        "train_batch_size": 8,
        "gradient_clipping": 0.1,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    mpu = Mpu(2) if world > 1 else None
    model = Plain() if mpu is None else Cut(Plain(), mpu)
    engine, *_ = deepc.initialize(model=model, config=config, mpu=mpu)
    dp, at = (1, 0) if mpu is None else (mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank())
    draw = torch.Generator().manual_seed(7)
    norms = []
    for _ in range(3):
        engine.backward(engine(torch.randn(8, 6, generator=draw).chunk(dp)[at]))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    engine.save_checkpoint(folder)
    weights = {n: deepc.view(p).fp32 for n, p in model.named_parameters()}
    engine.destroy()
    told = []
    if mpu is not None:
        seeded = Plain()
        seeded.down.data[0, 0] += rank % 2
        for given, more in ((seeded, {}), (Cut(Plain(), mpu), {"tensor_parallel": {"autotp_size": 1}})):
            with pytest.raises((ArgumentError, ConfigError)) as caught:
                deepc.initialize(model=given, config={**config, **more}, mpu=mpu)
            told.append(str(caught.value))
        with pytest.raises(ArgumentError) as caught:
            deepc.initialize(model=Plain(), config=config, mpu=object())
        told.append(str(caught.value))
        with deepc.zero.Init():
            lost = Cut(Plain(), mpu)  # both ranks have the first one's shards
        with pytest.raises(UnsupportedError) as caught:
            deepc.initialize(model=lost, config=config, mpu=mpu)
        told.append(str(caught.value))
        if world > 2:  # ranks that share a model far apart
            mpu._model, mpu._data = mpu._data, mpu._model
            with pytest.raises(ConfigError) as caught:
                deepc.initialize(model=Cut(Plain(), mpu), config=config, mpu=mpu)
            told.append(str(caught.value))
    return weights, norms, told


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_a_model_that_megatrons_layers_have_cut(world, tmp_path):
    ((want, norms, _),) = run_ranks(_mpu, 1, str(tmp_path / "one"))
    wants = [
        "no parameter of Plain says that it is cut, but down differs between the ranks 0 and 1",
        "mpu has 2 model-parallel ranks",
        "object lacks get_model",
        "up is cut, and made under zero.Init",
    ]
    wants += ["ranks that share tensors are neighbours"] * (world > 2)
    for weights, got, told in run_ranks(_mpu, world, str(tmp_path / "cut")):
        assert got == pytest.approx(norms, rel=1e-5)
        for name, value in weights.items():
            near(value, want[name], name)
        assert all(w in text for w, text in zip(wants, told, strict=True)), told


def _replicas(rank, world, stage, shards, init=False):
    """Losses and weights of a model without marks; the errors of one whose shards are equal at first. init: made under
    zero.Init."""
    import deepc
    from deepc.errors import MisuseError

    deepc.init_distributed()
    mpu = Mpu(2) if world > 1 else None
    with deepc.zero.Init(enabled=init):
        model = Plain()
    if shards:  # Megatron's layers without their marks, and the same numbers on both ranks
        model = Cut(model, mpu)
        for name, dim in (("up", 0), ("down", 1)):
            p = nn.Parameter(getattr(Plain(), name).detach().chunk(2, dim)[0].clone())
            setattr(model, name, p)
        model.forward = lambda x: Cut.forward(model, x * 1.0) * (1 + mpu.get_model_parallel_rank() * model.up[0, 0])
    config = {
        "train_batch_size": 4,
        "gradient_clipping": 0.1,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    engine, *_ = deepc.initialize(model=model, config=config, mpu=mpu)
    draw = torch.Generator().manual_seed(7)
    told, norms = "", []
    for _ in range(3):
        x = torch.randn(4, 6, generator=draw)
        if shards and norms:
            with pytest.raises(MisuseError) as caught:
                engine(x)
            told = str(caught.value)
            break
        engine.backward(engine(x))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    weights = {n: deepc.view(p).fp32 for n, p in model.named_parameters()}
    engine.destroy()
    return weights, norms, told


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.full)])
def test_a_model_without_marks_is_taken_as_replicas_where_ranks_have_equal_bits(stage):
    ((want, norms, _),) = run_ranks(_replicas, 1, stage, False)
    for weights, got, _ in run_ranks(_replicas, 2, stage, False):
        assert got == pytest.approx(norms, rel=1e-5)  # everything counts once
        for name, value in weights.items():
            near(value, want[name], name)


def test_replicas_that_zero_init_has_made():
    ((want, norms, _),) = run_ranks(_replicas, 1, 3, False)
    for weights, got, _ in run_ranks(_replicas, 2, 3, False, True):
        assert got == pytest.approx(norms, rel=1e-5)
        for name, value in weights.items():
            near(value, want[name], name)


def test_shards_without_marks_that_begin_equal_are_found_after_the_first_step():
    for _, _, told in run_ranks(_replicas, 2, 0, True):
        assert "after 1 step differs between model-parallel ranks 0 and 1" in told and "tensor_model_parallel" in told


class Experts(nn.Module):
    """A network of its own kind, which no rule knows, beside experts that ask to be cut."""

    def __init__(self):
        from deepc.parallel.expert import MoE

        super().__init__()
        torch.manual_seed(2)
        self.plain = Plain()
        expert = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))
        self.moe = MoE(6, expert, 2, use_rts=False, drop_tokens=False, enable_expert_tensor_parallelism=True)

    def forward(self, x):
        out, balance, _ = self.moe(x)
        return self.plain(x + out) + 0.1 * balance


def _experts(rank, world):
    import deepc

    deepc.init_distributed()
    model = Experts()
    engine, *_ = deepc.initialize(
        model=model,
        config={
            "train_batch_size": 4,
            "gradient_clipping": 0.1,
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        },
        mpu=Mpu(2) if world > 1 else None,
    )
    names = dict(model.named_parameters())
    cut = sorted(n for n, p in names.items() if id(p) in engine.cuts)
    draw, norms = torch.Generator().manual_seed(7), []
    for _ in range(3):
        engine.backward(engine(torch.randn(4, 6, generator=draw)))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    weights = {n: deepc.view(p).fp32 for n, p in names.items()}
    engine.destroy()
    return weights, norms, cut


def test_experts_that_ask_to_be_cut_are_with_an_mpu():
    ((want, norms, none),) = run_ranks(_experts, 1)
    assert none == []
    for weights, got, cut in run_ranks(_experts, 2):
        assert got == pytest.approx(norms, rel=1e-5)
        assert len(cut) == 6 and all(".deepspeed_experts." in n for n in cut)  # of two experts: not the last bias
        for name, value in weights.items():
            near(value, want[name], name)


# ---- states on disk --------------------------------------------------------------------------------------------------
def _on_disk(rank, world, mesh, folder):
    """Losses and weights with states in memory, or in `folder`."""
    from deepc.plan.mesh import Mesh

    mesh = Mesh.of(mesh)
    disk = {"offload_optimizer": {"device": "nvme", "nvme_path": folder}} if folder else {}
    engine = engine_of(
        mesh,
        {
            "gradient_clipping": 0.5,
            "zero_optimization": {"stage": 2, **disk},
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        },
    )
    data = batches(mesh, rank)
    losses = [step(engine, data, mesh) for _ in range(3)]
    named = zip(engine.state.names, engine.state.trained)
    moments = {name: engine.full_optimizer_state(p, "exp_avg_sq") for name, p in named}
    tier = engine.state.tier is not None
    engine.destroy()
    return losses, moments, tier


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"pp": 2}, pytest.param({"dp": 2, "pp": 2}, marks=pytest.mark.full)])
def test_states_on_disk_have_the_bits_of_those_in_memory(mesh, tmp_path):
    world = mesh.get("dp", 1) * mesh.get("tp", 1) * mesh.get("pp", 1)
    memory, disk = (run_ranks(_on_disk, world, mesh, folder) for folder in ("", str(tmp_path)))
    assert all(rank[0] == memory[0][0] for rank in (*memory, *disk))
    assert not any(tier for *_, tier in memory) and all(tier for *_, tier in disk)
    want, got = ({n: t for _, moments, _ in ranks for n, t in moments.items()} for ranks in (memory, disk))
    assert set(want) == set(got) and all(torch.equal(t, want[n]) for n, t in got.items())


# ---- a PipelineModule whose topology has a model axis ----------------------------------------------------------------
class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


def _topology(rank, world):
    import deepc
    from deepc.compat.runtime.pipe.topology import PipeModelDataParallelTopology
    from deepc.pipe import LayerSpec, PipelineModule

    stages, tensor = (2, 2) if world > 1 else (1, 1)
    topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=tensor, num_dp=1)
    model = PipelineModule(
        layers=[LayerSpec(Mlp) for _ in range(4)],
        topology=topology,
        loss_fn=lambda out, y: (out - y).square().mean(),
        seed_layers=True,
    )
    column = {"patterns": [r".*up"], "partition_type": "column"}
    row = {"patterns": [r".*down"], "partition_type": "row"}
    if world > 1:  # an mpu whose model-parallel ranks hold replicas
        deepc.init_distributed()
        staged = {"train_batch_size": 2, "pipeline": {"stages": 2}, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
        with pytest.raises(deepc.errors.UnsupportedError, match=r"initialize\(mpu=...\) of a pipeline has several"):
            deepc.initialize(model=Plain(), config=staged, mpu=Mpu(2))
    engine, *_ = deepc.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
            "tensor_parallel": {"partition_config": {"use_default_specs": False, "layer_specs": [column, row]}},
        },
    )
    draw = torch.Generator().manual_seed(4)
    data = iter([(torch.randn(2, 6, generator=draw), torch.randn(2, 6, generator=draw)) for _ in range(4)])
    losses = [float(engine.train_batch(data)) for _ in range(2)]
    weights = {n: deepc.view(p).fp32 for n, p in zip(engine.state.names, engine.state.trained)}
    mesh = engine.mesh
    engine.destroy()
    return losses, weights, (mesh.pp, mesh.dp, mesh.tp)


def test_a_topology_with_a_model_axis():
    ((want, whole, _),) = run_ranks(_topology, 1)
    seen = set()
    for losses, weights, mesh in run_ranks(_topology, 4):
        assert losses == pytest.approx(want, rel=1e-6) and mesh == (2, 1, 2)
        for name, value in weights.items():
            seen.add(name)
            near(value, whole[name], name)
    assert seen == set(whole)
