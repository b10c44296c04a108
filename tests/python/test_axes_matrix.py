"""Every (data, tensor, pipeline) layout of up to 8 ranks trains tiny models as torch does in one process."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from plainly import batch_loss, clipped, first_gradients, in_stages
from ranks import run_ranks as _run_ranks
from torch import nn

STEPS, LAYERS, VOCABULARY, POSITIONS, CLIP, LR = 3, 8, 61, 9, 0.5, 0.5
FAMILIES, STAGES = ("gpt2", "llama"), (0, 1, 2, 3)
# Heads and samples of a step, which the axes must divide, -> micro-batches of a replica, by the number of replicas
SIZES = {24: {1: 6, 2: 6, 3: 4, 4: 3, 6: 2, 8: 3}, 35: {1: 5, 5: 7, 7: 5}, 8: {1: 4, 2: 2}}
UP_TO = 8


def run_ranks(fn, world, *args):
    return _run_ranks(fn, world, args=args, env={"DEEPC_LOG_LEVEL": "WARNING"})


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 20), nn.Linear(20, width)

    def forward(self, x):
        q, k, v = (m(self.ln1(x)).unflatten(2, (-1, 2)).transpose(1, 2) for m in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class Own(nn.Module):
    """A model of one's own, for 8 ranks that need not import transformers; RULES say how it is cut."""

    def __init__(self, heads):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 2 * heads)
        self.blocks = nn.ModuleList(Block(2 * heads) for _ in range(2))
        self.head = nn.Linear(2 * heads, VOCABULARY)

    def forward(self, input_ids, labels):
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


RULES = [
    {"patterns": [r".*\.(q|k|v|up)$"], "partition_type": "column"},
    {"patterns": [r".*\.(out|down)$"], "partition_type": "row"},
]


def model_of(family, heads):
    torch.manual_seed(1)
    if family == "own":
        return Own(heads)
    import transformers as t

    if family == "gpt2":
        off = dict(attn_pdrop=0, resid_pdrop=0, embd_pdrop=0)
        sizes = dict(vocab_size=VOCABULARY, n_embd=2 * heads, n_head=heads, n_layer=LAYERS, n_positions=POSITIONS)
        return t.GPT2LMHeadModel(t.GPT2Config(**sizes, **off)).train()
    sizes = dict(hidden_size=2 * heads, num_attention_heads=heads, num_key_value_heads=heads, head_dim=2)
    shape = dict(vocab_size=VOCABULARY, intermediate_size=44, num_hidden_layers=LAYERS)
    return t.LlamaForCausalLM(t.LlamaConfig(**sizes, **shape)).train()


def loss_in(out):
    return out if isinstance(out, torch.Tensor) else out.loss


def micro_batches(heads, replica=0, replicas=1):
    """Endless: those of a replica. The samples of a step are the same for any number of them."""
    draw = torch.Generator().manual_seed(5)
    while True:
        ids = torch.randint(0, VOCABULARY, (heads, POSITIONS), generator=draw)
        for part in ids.chunk(replicas)[replica].chunk(SIZES[heads][replicas]):
            yield {"input_ids": part, "labels": part}


def _by_torch(rank, world, family, heads):
    """(losses, norms before clipping, {name: gradient of the first step before clipping})."""
    model, data = model_of(family, heads), micro_batches(heads)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    return clipped(model, optimizer, lambda: loss_in(model(**next(data))), SIZES[heads][1], STEPS, CLIP)


@functools.cache
def by_torch(family, heads):
    return run_ranks(_by_torch, 1, family, heads)[0]


def _by_deepc(rank, mesh, family, heads, stage):
    """The same of a rank, with the gradients that it has, whole."""
    import deepc

    data = micro_batches(heads, mesh.coordinates(rank).dp, mesh.dp)
    rules = {"partition_config": {"use_default_specs": False, "layer_specs": RULES}}
    engine, *_ = deepc.initialize(
        model=model_of(family, heads),
        sample_batch=next(micro_batches(heads)) if mesh.pp > 1 else None,
        config={
            "train_batch_size": heads,
            "gradient_accumulation_steps": SIZES[heads][mesh.dp],
            "gradient_clipping": CLIP,
            "tensor_parallel": {"autotp_size": mesh.tp, **(rules if family == "own" and mesh.tp > 1 else {})},
            **in_stages(mesh.pp),
            "zero_optimization": {"stage": stage},
            # not Adam: biases of keys have no true gradient, and it turns their rounding noise into steps of size lr
            "optimizer": {"type": "SGD", "params": {"lr": LR}},
        },
    )
    assert (engine.mesh.dp, engine.mesh.tp, engine.mesh.pp) == (mesh.dp, mesh.tp, mesh.pp)
    grads, losses, norms = first_gradients(engine), [], []
    for _ in range(STEPS):
        loss = batch_loss(engine, SIZES[heads][mesh.dp], lambda: loss_in(engine(**next(data))), data, engine.group)
        losses.append(loss)
        norms.append(engine.get_global_grad_norm())
    engine.destroy()
    return losses, norms, grads


def _compared(rank, world, sizes, heads, wanted, stages):
    """Trains every model at every stage of ZeRO: {(family, stage): (losses, names of the gradients that were here)}."""
    from deepc.plan.mesh import Mesh

    mesh, found = Mesh.of(sizes), {}
    for (family, (losses, norms, grads)), stage in itertools.product(wanted.items(), stages):
        mine, its_norms, here = _by_deepc(rank, mesh, family, heads, stage)
        case = f"{mesh}, {family}, ZeRO {stage}"
        assert mine == pytest.approx(losses, rel=1e-6), case
        assert its_norms == pytest.approx(norms, rel=1e-5), case
        for name, grad in here.items():
            bound = 1e-5 * max(1e-3, float(grads[name].abs().max()))  # biases of keys: rounding around 0
            torch.testing.assert_close(
                grad, grads[name], rtol=0, atol=bound, msg=lambda m, n=name, c=case: f"{c}, {n}: {m}"
            )
        found[family, stage] = mine, sorted(here)
    return found


LAYOUTS = [
    {"dp": dp, "tp": tp, "pp": pp}
    for dp, tp, pp in itertools.product(range(1, UP_TO + 1), repeat=3)
    if dp * tp * pp <= UP_TO
]


@pytest.mark.parametrize(
    ("sizes", "families", "stages"),
    [
        ({"dp": 2, "tp": 2, "pp": 2}, ("own",), (2,)),
        *(pytest.param(sizes, FAMILIES, STAGES, marks=pytest.mark.full) for sizes in LAYOUTS),
    ],
    ids=lambda v: "x".join(map(str, v.values())) if isinstance(v, dict) else None,
)
def test_a_layout_trains_as_torch_in_one_process(sizes, families, stages):
    """Losses to 1e-6, gradients to 1e-5 of their largest element, at each stage of ZeRO; all ranks tell the same."""
    world = sizes["dp"] * sizes["tp"] * sizes["pp"]
    if families == ("own",):
        heads = 8
    else:
        pytest.importorskip("transformers")
        heads = next(n for n, replicas in SIZES.items() if n % sizes["tp"] == 0 and sizes["dp"] in replicas)
    wanted = {family: by_torch(family, heads) for family in families}
    ranks = run_ranks(_compared, world, sizes, heads, wanted, stages)
    for family, stage in itertools.product(families, stages):
        losses = ranks[0][family, stage][0]
        assert all(r[family, stage][0] == losses for r in ranks)
        assert losses == ranks[0][family, stages[0]][0]  # the order of sums is the layout's, not the stage's
        assert {name for r in ranks for name in r[family, stage][1]} == set(wanted[family][2])
