"""DeepSpeed's names for models that ranks share: sequences (parallel_state_sp, ulysses_sp), cut linear layers
(module_inject.layers) and gates (moe.sharded_moe), against whole models in one process and against definitions."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from deepc.errors import ArgumentError, DeepcError, MisuseError, UnsupportedError
from deepc.parallel.expert import TopKGate
from plainly import adam_config as config
from ranks import run_ranks as _run_ranks
from torch import nn


def run_ranks(fn, world, *args):
    return _run_ranks(fn, world, args=args, env={"DEEPC_LOG_LEVEL": "WARNING"})


# ---- sequences -------------------------------------------------------------------------------------------------------
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 40}
    # one head of keys and values, which two ranks want
    return LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=1, head_dim=4, attn_implementation="sdpa")
    )


def batches():
    """Two ranks' own batches, of unequal lengths."""
    generator = torch.Generator().manual_seed(5)
    out = []
    for length in (6, 10):
        ids = torch.randint(0, 40, (1, length), generator=generator)
        labels = ids.clone()
        labels[0, : length // 2] = -100  # the first rank has hardly any labels
        out.append({"input_ids": ids, "labels": labels, "position_ids": torch.arange(length)[None], "name": length})
    return out


def _ulysses(rank, world, stage):
    """As DeepSpeed's tutorial of sequence parallelism writes the loop."""
    import deepc.compat.deepspeed  # noqa: F401
    import deepspeed
    from deepspeed.runtime.sequence_parallel import parallel_state_sp as sequences
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
    from deepspeed.utils import groups, safe_get_full_grad
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
    deepspeed.init_distributed()
    try:
        model = llama()
        mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", world, micro_batch_size=1)
        with pytest.raises(ValueError, match="sequence_parallel_size = 1, and initialize_sequence_parallel got 2"):
            deepspeed.initialize(model=model, config=config(sequence_parallel_size=1), mpu=mpu)
        with pytest.raises(MisuseError, match="groups of 2 already"):
            mpu.initialize_sequence_parallel(4)
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config(stage), mpu=sequences
        )
        group = groups._get_sequence_parallel_group()
        sizes = (
            groups._get_sequence_parallel_world_size(),
            groups._get_sequence_parallel_rank(),
            groups._get_data_parallel_world_size(),
            groups._get_data_parallel_rank(),
            torch.distributed.get_world_size(engine.data_parallel_group),
            torch.distributed.get_world_size(engine.seq_parallel_group),
            engine.seq_dp_world_size,
            engine.train_batch_size(),
        )
        loader = UlyssesSPDataLoaderAdapter([batches()[rank]], rank, group, world, engine.device)
        losses, gradients, names = [], [], []
        for batch in loader:
            labels = batch.pop("shift_labels")
            names.append(batch.pop("name"))
            logits = engine(**batch).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
            both = torch.distributed.nn.functional.all_gather(loss, group=group)
            counts = [torch.zeros((), dtype=torch.int64) for _ in range(world)]
            torch.distributed.all_gather(counts, (labels != -100).sum(), group=group)
            loss = sum(both) / sum(counts)
            engine.backward(loss)
            losses.append(loss.detach())
            gradients.append(safe_get_full_grad(model.model.layers[0].self_attn.q_proj.weight).clone())
            engine.zero_grad()
        engine.eval()
        with pytest.raises(ArgumentError, match="without position_ids"):
            engine.module.model.layers[0].self_attn(torch.zeros(1, 3, 16), (torch.ones(1, 3, 4),) * 2, None)
        with pytest.raises(UnsupportedError, match="packed samples"):
            engine(input_ids=torch.zeros(1, 4, dtype=torch.int64), position_ids=torch.tensor([[0, 1, 0, 1]]))
        return sizes, len(loader), names, losses, gradients
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = plain


def test_ulysses_of_transformers_trains_as_whole_sequences():
    pytest.importorskip("transformers")
    ranks = run_ranks(_ulysses, 2, 2)
    for rank, (sizes, length, names, losses, gradients) in enumerate(ranks):
        assert sizes == (2, rank, 1, 0, 1, 2, 2, 1)
        assert length == 2 and names == [6, 10]
        for batch, loss, gradient in zip(batches(), losses, gradients):
            model = llama()
            batch.pop("name")
            whole = model(**batch).loss
            whole.backward()
            wanted = model.model.layers[0].self_attn.q_proj.weight.grad
            assert torch.allclose(loss, whole, rtol=1e-5)
            assert (gradient - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_what_transformers_attention_can_not_be_shared_is_told(deepspeed):
    pytest.importorskip("transformers")
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    register, model = UlyssesSPAttentionHF.register_with_transformers, llama()
    assert register(model, "sdpa", 1, 1) is None
    with pytest.raises(ValueError, match="does not match model config attn_implementation = 'sdpa'"):
        register(model, "flash_attention_2", 2, 1)
    with pytest.raises(ValueError, match="needs seq_length"):
        register(model, "sdpa", 2, 1, seq_length_is_variable=False)
    shared = UlyssesSPAttentionHF.__new__(UlyssesSPAttentionHF)
    torch.nn.Module.__init__(shared)
    shared.core_attn_implementation = "sdpa"
    layer = model.model.layers[0].self_attn
    shared._refuse_masks(layer, torch.ones(1), 8, 8)
    with pytest.raises(UnsupportedError, match="a sliding window of 4 positions in 8"):
        shared._refuse_masks(layer, None, 4, 8)
    for name, error in (("eager", ArgumentError), ("flex_attention", UnsupportedError), ("other", ArgumentError)):
        model.config._attn_implementation = name
        with pytest.raises(error, match=name):
            register(model, name, 2, 1)


def _adapted(rank, world):
    import deepc.compat.deepspeed  # noqa: F401
    import deepspeed
    from deepspeed.runtime.sequence_parallel import parallel_state_sp as state
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter

    deepspeed.init_distributed()
    with pytest.raises(MisuseError, match="not known yet"):
        state.get_sequence_parallel_group()
    with pytest.raises(ValueError, match="2 ranks or more"):
        state.initialize_sequence_parallel(1)
    with pytest.raises(ValueError, match="can't be shared out"):
        state.initialize_sequence_parallel(3)
    state.initialize_sequence_parallel(2)
    group = state.get_sequence_parallel_group()
    told = (
        state.get_sequence_parallel_rank(),
        state.get_sequence_data_parallel_rank(),
        state.get_model_parallel_rank(),
    )
    whole = {"input_ids": torch.arange(4)[None], "position_ids": torch.arange(4)[None]}
    wrong = [
        ({"input_ids": whole["input_ids"]}, "no position_ids"),
        ({"position_ids": whole["position_ids"]}, "no input_ids"),
        ({k: v[:, :3] for k, v in whole.items()}, "3 positions can't be shared by 2"),
        ({**whole, "mask": torch.ones(1, 2)}, r"mask is \[1, 2\]"),
    ]
    for batch, text in wrong:  # one rank's batch is: all ranks say so, none waits
        with pytest.raises(ValueError, match=text):
            next(UlyssesSPDataLoaderAdapter([batch if rank == 0 else whole], rank % 2, group, 2))

    def broken():
        yield from ([whole] if rank else ())
        raise OSError("the disk is gone")

    with pytest.raises(DeepcError if rank else OSError, match="disk is gone"):
        next(UlyssesSPDataLoaderAdapter(broken(), rank % 2, group, 2))

    class Epochs(list):
        def set_epoch(self, epoch):
            self[:] = [{**whole, "labels": torch.full((1, 4), 10 * epoch + i)} for i in range(3)]

    def numbers(loader, count):
        it = iter(loader)
        return [int(next(it)["shift_labels"][0, 0]) for _ in range(count)]

    of_epochs = UlyssesSPDataLoaderAdapter(Epochs(), rank % 2, group, 2)
    of_epochs.set_epoch(0)
    assert numbers(of_epochs, 6) == [0, 0, 1, 1, 2, 2]  # as Trainer does: its end is not asked for
    of_epochs.set_epoch(1)
    assert numbers(of_epochs, 6) == [10, 10, 11, 11, 12, 12]
    assert numbers(of_epochs, 2) == [10, 10]
    skipping = of_epochs.skipping(3, lambda dl, n: Epochs(dl[n:]))
    assert numbers(skipping, 2) == [11, 12]
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    shared = UlyssesSPAttentionHF(None, process_group=group)
    shared.core_attn_implementation, both = "sdpa", nn.Module()
    both.is_causal = False
    with pytest.raises(UnsupportedError, match="looks both ways"):  # the mask of one rank alone: all ranks say so
        shared._refuse_masks(both, torch.ones(1) if rank else None, None, 8)
    short = UlyssesSPDataLoaderAdapter([whole] * (1 + rank), rank % 2, group, 2)
    return told, [b["position_ids"].tolist() for b in short], [b["position_ids"].tolist() for b in short]


def test_the_loader_ends_on_all_ranks_together_and_tells_wrong_batches_to_all():
    for rank, (told, first, second) in enumerate(run_ranks(_adapted, 2)):
        assert told == (rank, rank, rank)
        part = [[[0, 1]], [[2, 3]]][rank]
        assert first == second == [part, part]


def _exchanges(rank, world, heads):
    import deepc.compat.deepspeed  # noqa: F401
    import deepspeed
    from deepspeed.sequence.layer import _SeqAllToAll

    engine, *_ = deepspeed.initialize(model=nn.Linear(2, 2), config=config(), mesh_param=(1, world))
    group = engine.seq_parallel_group
    whole = torch.arange(2 * 4 * heads * 3, dtype=torch.float64).view(2, 4, heads, 3)  # samples, positions, heads
    mine = whole.chunk(world, 1)[rank].clone().requires_grad_()
    out = _SeqAllToAll.apply(group, mine, 2, 1, 0)
    back = _SeqAllToAll.apply(group, out, 1, 2, 0)
    (back * whole.chunk(world, 1)[rank]).sum().backward()
    assert torch.equal(back, mine) and torch.equal(mine.grad, whole.chunk(world, 1)[rank])
    return out.detach()


def test_the_exchange_of_sequences_for_heads_goes_there_and_back():
    from deepc.compat.helpers.parallel.layers import get_shard_size_list

    heads = 3
    whole = torch.arange(2 * 4 * heads * 3, dtype=torch.float64).view(2, 4, heads, 3)
    parts = whole.split(get_shard_size_list(heads, 2), 2)
    for part, out in zip(parts, run_ranks(_exchanges, 2, heads)):
        assert torch.equal(out, part)


def _meshes(rank, world):
    import deepc.compat.deepspeed  # noqa: F401
    import deepspeed

    def made(**options):
        return deepspeed.initialize(model=nn.Linear(2, 2), **options)[0]

    for options, text in (
        ({"config": config(), "mesh_param": (2, 2)}, "are 4 ranks, and there are 2"),
        ({"config": config(data_parallel_size=2, sequence_parallel_size=2)}, "are 4 ranks, and there are 2"),
        ({"config": config(sequence_parallel_size=2), "mesh_param": (2, 1)}, "make them equal"),
        ({"config": config(), "mesh_param": 2}, "it is two numbers"),
    ):
        with pytest.raises(ValueError, match=text):
            made(**options)
    engine = made(config=config(data_parallel_size=1, sequence_parallel_size=2))
    engine.set_train_batch_size(3)
    assert engine.gradient_accumulation_steps() == 3 and engine.mesh.sp == 2
    engine.set_train_micro_batch_size(2)
    assert engine.train_batch_size() == 6


def test_meshes_that_the_ranks_do_not_make_are_errors():
    run_ranks(_meshes, 2)


# ---- a part of the positions at a time ------------------------------------------------------------------------------
class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down, self.most = nn.Linear(4, 8), nn.Linear(8, 4), 0

    def forward(self, x):
        self.most = max(self.most, x.shape[-2])
        return self.down(F.dropout(torch.relu(self.up(x)), 0.0))


def gradients(module, x, out):
    loss = out if out.dim() == 0 else out.pow(2).sum()
    return [loss.detach(), *(g.clone() for g in torch.autograd.grad(loss, [x, *module.parameters()]))]


@pytest.mark.parametrize("shape", [(2, 7, 4), (7, 4)])
def test_a_tiled_mlp_is_the_whole_one(deepspeed, shape):
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    x, mlp = torch.randn(shape, generator=torch.Generator().manual_seed(2)).requires_grad_(), Mlp()
    wanted = gradients(mlp, x, mlp(x))
    mlp.most = 0
    made = gradients(mlp, x, TiledMLP.apply(Mlp.forward, mlp, x, 3, [mlp.up.weight]))
    assert mlp.most == 3  # never more than 7 / 3 positions
    for a, b in zip(made, wanted):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert torch.allclose(TiledMLP.apply(Mlp.forward, mlp, x, 3), mlp(x))
    with pytest.raises(ArgumentError, match="shards = 0"):
        TiledMLP.apply(Mlp.forward, mlp, x, 0)


def test_tiled_computations_and_losses_are_the_whole_ones(deepspeed):
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, sequence_tiled_compute

    generator, mlp = torch.Generator().manual_seed(3), Mlp()
    x = torch.randn(2, 7, 4, generator=generator).requires_grad_()
    y = torch.randint(0, 4, (2, 7), generator=generator)

    def tiled(reduction, fn=lambda module, x, **_: module(x), **more):
        return sequence_tiled_compute(
            fn, 7, 2, {"x": x, **more}, {"module": mlp}, "x", None, output_reduction=reduction
        )

    def entropy(module, x, y):
        return F.cross_entropy(module(x.view(-1, 4)), y.view(-1))

    for made, whole in (
        (tiled(None), mlp(x)),
        (tiled("sum"), mlp(x).sum()),
        (tiled("mean"), mlp(x).mean()),
        (tiled("mean", lambda module, x, y: entropy(module, x, y), y=y), entropy(mlp, x, y)),
        (TiledFusedLogitsLoss.apply(entropy, mlp, x, y, None, 3, [], "mean"), entropy(mlp, x, y)),
        (
            TiledFusedLogitsLoss.apply(lambda m, x, y, k: (m(x)[..., 0] * k).sum(), mlp, x, y, y, 3, [], "sum"),
            (mlp(x)[..., 0] * y).sum(),
        ),
    ):
        for a, b in zip(gradients(mlp, x, made), gradients(mlp, x, whole)):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)
    for wrong, text in (
        (lambda: tiled("max"), "output_reduction = 'max'"),
        (lambda: tiled(None, z=y[:, :3]), r"z is \[2, 3\]"),
        (lambda: TiledFusedLogitsLoss.apply(entropy, mlp, x, y[:, :2], None, 3, [], "mean"), "equally"),
        (lambda: TiledFusedLogitsLoss.apply(entropy, mlp, x, y, y[:1], 3, [], "mean"), "mask is"),
        (lambda: TiledFusedLogitsLoss.apply(entropy, mlp, x, y, None, 3, [], None), "'mean' or 'sum'"),
    ):
        with pytest.raises(ArgumentError, match=text):
            wrong()


@pytest.mark.parametrize(("positions", "tiles"), [(425, 2), (7, 3), (1000, 7), (99, 99)])
def test_shares_of_tiles_add_up_to_one_in_16_bits(deepspeed, positions, tiles):
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

    x = torch.ones(1, positions, dtype=torch.bfloat16, requires_grad=True)
    loss = TiledFusedLogitsLoss.apply(lambda m, x, y: x[0, 0], None, x, x.detach(), None, tiles, [], "mean")
    loss.backward()
    shares = [float(part[0, 0]) for part in x.grad.chunk(tiles, 1)]
    assert len(shares) == tiles and loss == 1.0
    for share, part in zip(shares, x.grad.chunk(tiles, 1)):
        assert share == pytest.approx(part.numel() / positions, rel=0.02)
    assert abs(sum(shares) - 1.0) <= shares[-1] * 2**-9  # as the last one is rounded; each for itself: 0.002 and more


# ---- linear layers ---------------------------------------------------------------------------------------------------
def linear(inputs: int, outputs: int) -> nn.Linear:
    torch.manual_seed(inputs + outputs)
    return nn.Linear(inputs, outputs)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = linear(6, 9), linear(9, 6)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def _cut_layers(rank, world):
    import deepc.compat.deepspeed  # noqa: F401
    import deepspeed
    from deepspeed.module_inject import layers
    from deepspeed.module_inject.tp_shard import get_shard_size, get_shard_size_list
    from deepspeed.runtime.utils import is_model_parallel_parameter
    from deepspeed.utils import groups

    halves = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([0])]
    model = nn.Linear(2, 2)
    section = {"autotp_size": world}
    skip = {"use_default_specs": False, "layer_specs": [{"patterns": [".*"], "partition_type": "skip"}]}
    skipped = config(tensor_parallel={**section, "partition_config": skip})
    assert deepspeed.tp_model_init(model, 2, tp_group=halves[0]) is model
    with pytest.raises(ValueError, match="tp_model_init provided tp_group; .*must not receive mpu"):
        deepspeed.initialize(model=copy.deepcopy(model), config=skipped, mpu=object())  # what is noted goes with a copy
    unequal, *_ = deepspeed.initialize(model=copy.deepcopy(model), config=skipped)
    text = "Data inconsistency within the TP group. Please check the Dataloader implementation to ensure consistency."
    with pytest.raises(AssertionError) as caught:
        unequal(torch.full((1, 2), float(rank)))
    assert str(caught.value) == text and "tensor-parallel rank 1 another one" in str(caught.value.__cause__)
    unequal(torch.ones(1, 2))
    assert deepspeed.tp_model_init(model, 1, tp_group=halves[1]) is model
    with pytest.raises(UnsupportedError, match=r"rank 1 gave a group of the ranks \[\]"):  # on rank 0 too
        deepspeed.initialize(model=model, config=config())
    group = groups.get_tensor_model_parallel_group()
    whole = Chain()
    model = Chain()
    model.up = layers.LinearLayer(model.up, group)
    model.down = layers.LinearAllreduce(model.down, group)
    assert isinstance(model.up, layers.LinearLayer) and not isinstance(model.up, layers.LinearAllreduce)
    assert isinstance(model.down, layers.LinearAllreduce) and not isinstance(whole.up, layers.LinearLayer)
    assert model.up.weight.shape == (get_shard_size_list(9, world)[rank], 6) and get_shard_size(9, world, rank=0) == 5
    marked = [n for n, p in model.named_parameters() if is_model_parallel_parameter(p)]
    assert marked == ["up.weight", "up.bias", "down.weight"]
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(model(x), whole(x), atol=1e-6)

    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config(1, tensor_parallel=section)
    )
    before = [p.data_ptr() for p in model.parameters()]
    with layers.GatherReplacedLayerParams(model.up.parameters(), model.up):
        assert torch.equal(model.up.weight, whole.up.weight) and torch.equal(model.up.bias, whole.up.bias)
        with torch.no_grad():
            model.up.weight[0] = 1.0  # the first rank's
    model.down.weight.gather_params([model.down.weight])
    assert torch.equal(model.down.weight, whole.down.weight)
    model.down.weight._tp_partition([model.down.weight])
    assert [p.data_ptr() for p in model.parameters()] == before
    with torch.no_grad():
        whole.up.weight[0] = 1.0
    assert torch.allclose(engine(x), whole(x), atol=1e-6)

    parts = layers.SubParamLinearLayer(linear(4, 8), group, shape=((4, 2, 2), -1))
    rows = linear(4, 8).weight.split((4, 2, 2))
    assert torch.equal(parts.weight, torch.cat([r.chunk(world)[rank] for r in rows]))
    parts.gather_params([parts.weight, parts.bias])
    assert torch.equal(parts.weight, linear(4, 8).weight) and torch.equal(parts.bias, linear(4, 8).bias)
    columns = layers.SubParamLinearAllreduce(linear(8, 4), group, shape=(-1, 2))
    halves = linear(8, 4).weight.chunk(2, 1)
    assert torch.equal(columns.weight, torch.cat([h.chunk(world, 1)[rank] for h in halves], 1))
    assert isinstance(parts, layers.SubParamLinearLayer) and isinstance(parts, layers.LinearLayer)
    assert not isinstance(model.up, layers.SubParamLinearLayer)
    packed = layers.GateUpPack_LinearLayer(linear(4, 8), group)
    assert torch.equal(packed.weight, torch.cat([h.chunk(world)[rank] for h in linear(4, 8).weight.chunk(2)]))
    gathered = layers.LinearLayer(linear(4, 9), group, gather_output=True)
    x = torch.ones(2, 4, requires_grad=True)
    out = gathered(x)
    out.sum().backward()
    assert torch.allclose(out, linear(4, 9)(x)) and torch.allclose(x.grad, linear(4, 9).weight.sum(0).expand(2, 4))


def test_cut_linear_layers_of_deepspeeds_names():
    run_ranks(_cut_layers, 2)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))


def test_a_module_with_a_forward_of_its_own_is_told_by_its_name():
    from deepc.parallel.tensor import TensorGroup, cut_model

    specs = [{"patterns": [r".*custom\.weight$"], "partition_type": "column"}]
    with pytest.raises(ArgumentError, match=r"custom \(Own\) would be cut, .* make it a torch.nn.Linear"):
        cut_model(
            nn.ModuleDict({"custom": Own()}), TensorGroup(None, 0, 2), {"partition_config": {"layer_specs": specs}}
        )


def test_linear_layers_that_can_not_be_are_errors(deepspeed):
    from deepspeed.module_inject import layers

    alone = layers.LinearLayer(linear(2, 3))
    assert isinstance(alone, layers.LinearLayer) and alone.weight.shape == (3, 2)
    for wrong, text in (
        (lambda: layers.LinearLayer(linear(2, 3), skip_partition=True), "skip_partition"),
        (lambda: layers.SubParamLinearLayer(linear(2, 3), None, (2, -1)), "shape = "),
        (lambda: layers.SubParamLinearLayer(linear(2, 3), None, (-1, 3), 1), "partition_dim"),
        (lambda: layers.SubParamLinearAllreduce(linear(2, 3), None, (-1, 3), 0), "partition_dim"),
        (lambda: layers.LinearAllreduce(nn.ReLU(), None), "neither"),
    ):
        with pytest.raises((ArgumentError, UnsupportedError), match=text):
            wrong()
    deepspeed.set_autotp_mode()
    assert not layers.is_autotp_training_mode()
    assert deepspeed.tp_model_init(alone, 1) is alone and layers.is_autotp_training_mode()
    deepspeed.set_autotp_mode(training=False)
    assert not layers.is_autotp_training_mode()


# ---- gates -----------------------------------------------------------------------------------------------------------
def dense(sparse):
    _, places, experts, expert, place, weights, _ = sparse
    out = torch.zeros(expert.shape[1], experts, int(places))
    for e, p, w in zip(expert, place, weights):
        for token in range(len(e)):
            if e[token] >= 0:
                out[token, e[token], p[token]] += w[token]
    return out


@pytest.mark.parametrize("k", [1, 2, 3])
def test_gates_are_those_of_the_layer(deepspeed, k):
    from deepspeed.moe.sharded_moe import top1gating, top2gating, topkgating

    generator = torch.Generator().manual_seed(k)
    logits = torch.randn(12, 4, generator=generator).requires_grad_()
    gate = TopKGate(4, 4, k, min_capacity=1, use_rts=False, top2_2nd_expert_sampling=False)
    with torch.no_grad():
        gate.wg.weight.copy_(torch.eye(4))
    routes = gate(logits)

    def gated(**more):
        if k == 1:
            return top1gating(logits, 1.0, 1, use_rts=False, **more)
        return (
            top2gating(logits, 1.0, 1, top2_2nd_expert_sampling=False, **more)
            if k == 2
            else topkgating(logits, 3, 1.0, 1, **more)
        )

    loss, combine, mask, counts = gated()
    assert combine.shape == mask.shape == (12, 4, 3 * k) and torch.equal(counts, routes.chosen)
    assert torch.allclose(loss, routes.balance)
    assert torch.allclose(combine.sum((1, 2)), routes.weights.sum(0)) and torch.equal(mask.any(2).sum(0), routes.rows)
    assert bool((mask.sum(0) <= 1).all())  # one token in a place
    assert torch.equal(mask, combine > 0) and torch.allclose(dense(gated(sparse_routes=True)), combine)
    combine.sum().backward()
    assert logits.grad is not None
    fullest = gated(drop_tokens=False)[2]
    assert fullest.shape[2] == int(counts.max()) and int(fullest.sum()) == 12 * k


def test_places_go_by_probability_or_by_position(deepspeed):
    from deepspeed.moe.sharded_moe import top1gating, topkgating

    logits = torch.tensor([[1.0, 0.0], [3.0, 0.0], [2.0, 0.0], [0.0, 1.0]])
    for policy, tokens in (("probs", [1]), ("position", [0])):
        mask = topkgating(logits, 1, 0.5, 1, drop_policy=policy)[2]
        assert mask[:, 0, 0].nonzero().flatten().tolist() == tokens
    with pytest.raises(ValueError, match="drop_policy='other'"):
        topkgating(logits, 1, 1.0, 1, drop_policy="other")
    both = topkgating(logits, 2, 1.0, 0, drop_policy="position")
    assert both[0] == pytest.approx(1.0)  # every token has chosen both experts: even loads
    used = top1gating(logits, 1.0, 0, used_token=torch.tensor([1, 0, 0, 1]), use_rts=True)
    assert used[3].tolist() == [1, 1] and used[2].any(2).any(1).tolist() == [True, False, False, True]
    drawn = {int(top1gating(torch.zeros(1, 4), 4.0, 0, noisy_gate_policy="RSample")[3].argmax()) for _ in range(60)}
    assert len(drawn) > 1


def _places(rank, world):
    import deepc.compat.deepspeed  # noqa: F401
    import deepspeed
    from deepspeed.moe.sharded_moe import top1gating

    deepspeed.init_distributed()
    logits = torch.zeros(3 + 4 * rank, 2)
    return top1gating(logits, 1.0, 0, drop_tokens=False, ep_group=torch.distributed.group.WORLD)[2].shape


def test_without_left_out_tokens_all_ranks_have_as_many_places():
    assert [tuple(s) for s in run_ranks(_places, 2)] == [(3, 2, 7), (7, 2, 7)]
