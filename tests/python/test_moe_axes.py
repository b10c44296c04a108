"""Experts spread over ranks of models that are cut where they stand, over sequences and over tensor ranks."""

from __future__ import annotations

import json
import math
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from deepc.parallel.expert import MoE, is_moe_param
from deepc.plan.mesh import AXES, Mesh
from plainly import batch_loss, first_gradients, in_stages
from ranks import run_ranks as _run_ranks
from torch import nn

# MICRO: micro-batches of a batch, over all replicas, of SAMPLES x POSITIONS tokens each
WIDTH, EXPERTS, BLOCKS, MICRO, SAMPLES, POSITIONS, STEPS, AUX = 8, 4, 2, 4, 2, 8, 3, 0.3
FULL = pytest.mark.full
ALL_PLACES = {"k": 2, "top2_2nd_expert_sampling": False, "drop_tokens": False}
FEW_PLACES = {"k": 2, "top2_2nd_expert_sampling": False, "capacity_factor": 0.6, "min_capacity": 1}
CUT = {**FEW_PLACES, "enable_expert_tensor_parallelism": True}  # the layer says so, not patterns
DRAWN = {"k": 1, "noisy_gate_policy": "RSample", "capacity_factor": 0.6, "min_capacity": 1}
SGD = {"type": "SGD", "params": {"lr": 0.5}}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0}}


def run_ranks(fn, world, *args):
    return _run_ranks(fn, world, args=args, env={"DEEPC_LOG_LEVEL": "WARNING"})


# ---- the model -------------------------------------------------------------------------------------------------------
class Gated(nn.Module):
    """An expert of three linear layers, named and made in Mixtral's order."""

    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH), nn.Linear(WIDTH, 12)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Attention and experts. group: of the ranks that share sequences. parts: of the positions, in each of which
    experts have places of their own, as on a rank of such a group; the load-balance loss is of all of them."""

    def __init__(self, places, ep, group, parts):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        plain = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))
        places = dict(places)
        expert = Gated() if places.pop("gated", False) else plain
        self.moe = MoE(WIDTH, expert, EXPERTS, ep, use_residual=True, **places)
        self._group, self._parts = group, parts

    def forward(self, x, aux):
        q, k, v = (m(self.norm1(x)).unflatten(2, (-1, 2)) for m in (self.q, self.k, self.v))
        if self._group is None:
            out = attention(q, k, v)
        else:
            from deepc.parallel.sequence import DistributedAttention

            out = DistributedAttention(attention, self._group, scatter_idx=2, gather_idx=1)(q, k, v)
        x = x + self.out(out.flatten(2))
        whole = self.norm2(x)
        made = [self.moe(part)[:2] for part in whole.chunk(self._parts, 1)]
        l_aux = made[0][1] if self._parts == 1 else self.moe(whole)[1]
        return x + torch.cat([out for out, _ in made], 1), aux + l_aux


def attention(q, k, v):
    """[samples, positions, heads, features]"""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Net(nn.Module):
    def __init__(self, places, ep=1, group=None, parts=1):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(places, ep, group, parts) for _ in range(BLOCKS))
        self._group = group

    def forward(self, x, y):
        x, aux = torch.tanh(self.first(x)), x.new_zeros(())
        for block in self.blocks:
            x, aux = block(x, aux)
        errors = (self.last(x) - y).square()
        if self._group is None:
            return errors.mean() + AUX * aux
        from deepc.parallel.sequence import mean_over_ranks

        return mean_over_ranks(errors.sum(), torch.tensor(errors.numel()), self._group) + AUX * aux


def whole_model(places, parts=1):
    torch.manual_seed(3)
    model = Net(places, parts=parts)
    with torch.no_grad():
        for p in model.parameters():
            if is_moe_param(p):  # else all of a layer are alike
                p.copy_(torch.randn(p.shape) / 2)
    return model


def model_of(rank, mesh, places, group):
    """What a rank gives to initialize: its own experts, and other values than those that count where another rank's
    do."""
    whole, model = whole_model(places).state_dict(), Net(places, mesh.ep, group)
    first = mesh.coordinates(rank).ep * EXPERTS // mesh.ep
    with torch.no_grad():
        for name, p in model.named_parameters():
            before, experts, after = name.partition(".deepspeed_experts.")
            number, _, rest = after.partition(".")
            p.copy_(whole[f"{before}{experts}{first + int(number)}.{rest}" if experts else name])
            if rank not in (mesh.group("ep", 0) if experts and mesh.ep > 1 else (0,)):
                p.add_(1)
    return model


# ---- training --------------------------------------------------------------------------------------------------------
def samples(replica=0, replicas=1):
    """Endless: (x, y) of a replica's micro-batches."""
    draw, own = torch.Generator().manual_seed(5), MICRO // replicas
    while True:
        batch = [torch.randn(2, SAMPLES, POSITIONS, WIDTH, generator=draw) for _ in range(MICRO)]
        yield from ((x, y) for x, y in batch[replica * own : (replica + 1) * own])


def plainly(places, optimizer=SGD, parts=(1,) * STEPS):
    """Torch's training in one process, with all experts: (losses, norms, gradients of the first step, weights). parts:
    of sequences, of each step."""
    model = whole_model(places)
    kind = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}[optimizer["type"]]
    steps, data = kind(model.parameters(), **optimizer["params"]), samples()
    losses, norms, grads = [], [], {}
    for n in parts:
        for block in model.blocks:
            block._parts = n
        steps.zero_grad()
        loss = sum(model(*next(data)) for _ in range(MICRO)) / MICRO
        loss.backward()
        grads = grads or {name: p.grad.clone() for name, p in model.named_parameters()}
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        steps.step()
        losses.append(float(loss.detach()))
    return losses, norms, grads, model.state_dict()


RULES = [
    {"patterns": [r".*\.(q|k|v)$"], "partition_type": "column"},
    {"patterns": [r".*\.out$"], "partition_type": "row"},
]
CUT_EXPERTS = [
    {"patterns": [r".*\.deepspeed_experts\.\d+\.0$"], "partition_type": "column"},
    {"patterns": [r".*\.deepspeed_experts\.\d+\.2$"], "partition_type": "row"},
]


def is_cut(name):
    """Whether tensor ranks have parts of a weight of experts, or of the network beside them."""
    return bool(re.search(r"(deepspeed_experts\.\d+|\.mlp)\.\w+\.weight$", name))


def train(
    rank, world, sizes, places, stage, more=None, folder=None, skip=0, steps=STEPS, rules=RULES, stats=None, cut=False
):
    """As plainly, of this rank. folder: where a checkpoint goes, or, with skip, comes from: of a run that has trained
    on so many batches. stats: gets those of recomputation. cut: every network of experts is in parts."""
    import deepc
    from deepc.parallel.expert.spread import name_among_all
    from deepc.parallel.sequence import sequence_group

    mesh = Mesh.of(sizes)
    group = sequence_group(mesh.sp, tensor=mesh.tp) if mesh.sp > 1 else None
    at = mesh.coordinates(rank)

    def mine():
        for pair in samples(at.dp, mesh.dp):
            yield tuple(t.chunk(mesh.sp, 1)[at.sp] for t in pair)

    data = mine()
    specs = {"partition_config": {"use_default_specs": False, "layer_specs": rules}}
    engine, *_ = deepc.initialize(
        model=model_of(rank, mesh, places, group),
        sample_batch=next(mine()) if mesh.pp > 1 else None,
        config={
            "train_micro_batch_size_per_gpu": SAMPLES,
            "gradient_accumulation_steps": MICRO // mesh.dp,
            "gradient_clipping": 0.5,
            "sequence_parallel_size": mesh.sp,
            "zero_optimization": {"stage": stage},
            "optimizer": SGD,
            **({"tensor_parallel": {"autotp_size": mesh.tp, **specs}} if mesh.tp > 1 else {}),
            **in_stages(mesh.pp),
            **(more or {}),
        },
    )
    assert all(getattr(engine.mesh, axis) == n for axis, n in sizes.items())
    if cut:
        of_experts = {n: id(p) in engine.cuts for n, p in engine.module.named_parameters() if is_cut(n)}
        assert of_experts and all(of_experts.values()), of_experts
    grads = first_gradients(engine, lambda name: name_among_all(name, engine.module))
    for _ in range(skip * MICRO // mesh.dp):
        next(data)
    if skip:
        assert engine.load_checkpoint(folder)[0] and engine.global_steps == skip
    losses, norms = [], []
    for _ in range(steps):
        losses.append(batch_loss(engine, MICRO // mesh.dp, lambda: engine(*next(data)), data, engine.everyone))
        norms.append(engine.get_global_grad_norm())
    if folder and not skip:
        engine.save_checkpoint(folder)
    weights = {n: t.clone() for n, t in engine.module_state_dict().items()}
    engine.load_module_state_dict(weights, strict=False)  # changes nothing
    if mesh.sp > 1 and mesh.ep == 1 and engine.plan.mode != "streamed":  # whose hooks belong to their process
        pickle.dumps(engine.module.blocks[0].moe)
    assert all(torch.equal(t, weights[n]) for n, t in engine.module_state_dict().items())
    if stats is not None:
        stats.update(engine.recomputation.stats())
    engine.destroy()
    return losses, norms, grads, weights


def same(ranks, wanted, grads=True):
    """All ranks tell the losses, norms, weights and, each some, gradients of the one process."""
    names = set()
    for losses, norms, found, weights in ranks:
        assert losses == pytest.approx(wanted[0], rel=1e-6)
        assert norms == pytest.approx(wanted[1], rel=1e-5)
        assert set(weights) == set(wanted[3])
        # A gradient whose terms cancel (of residual coefficients, by a softmax) has the rounding of its terms.
        for mine, theirs, least in ((found if grads else {}, wanted[2], 2**-24 * norms[0]), (weights, wanted[3], 0)):
            for name, t in mine.items():
                bound = max(1e-5 * float(theirs[name].abs().max()), least)
                torch.testing.assert_close(t, theirs[name], rtol=0, atol=bound, msg=lambda m, n=name: f"{n}: {m}")
        names |= set(found)
    assert names == set(wanted[3])


def name_of(value):
    if isinstance(value, dict) and value.keys() <= {*AXES, "ep"}:
        return "x".join(f"{axis}{n}" for axis, n in value.items()) or "one"
    if isinstance(value, list):
        return "cut" if value != RULES else "whole"
    return "few" if value == FEW_PLACES else "all" if value == ALL_PLACES else None


def ranks_of(sizes):
    return math.prod(n for axis, n in sizes.items() if axis != "ep")


def cases(*rows):
    """The first one is for the quick class."""
    return [pytest.param(*row, marks=() if i == 0 else FULL) for i, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("sizes", "stage", "places"),
    [
        *cases(
            ({"pp": 2, "dp": 2, "ep": 2}, 2, FEW_PLACES),
            *(({"pp": 2, "dp": 2, "ep": 2}, stage, ALL_PLACES) for stage in (0, 1, 3)),
            ({"pp": 2, "dp": 4, "ep": 2}, 1, FEW_PLACES),
            ({"pp": 2, "dp": 4, "ep": 4}, 3, ALL_PLACES),
        ),
    ],
    ids=name_of,
)
def test_experts_of_a_model_that_is_cut_where_it_stands(sizes, stage, places):
    same(run_ranks(train, ranks_of(sizes), sizes, places, stage), plainly(places))


@pytest.mark.parametrize(
    ("sizes", "stage", "places"),
    [
        *cases(
            ({"sp": 2, "ep": 2}, 2, FEW_PLACES),
            *(({"sp": 2, "ep": 2}, stage, ALL_PLACES) for stage in (0, 1, 3)),
            ({"dp": 2, "sp": 2, "ep": 2}, 1, FEW_PLACES),
            ({"dp": 2, "sp": 2, "ep": 4}, 3, ALL_PLACES),
            ({"dp": 4, "sp": 2, "ep": 4}, 2, ALL_PLACES),
            ({"pp": 2, "dp": 2, "sp": 2, "ep": 2}, 1, FEW_PLACES),
            ({"pp": 2, "sp": 2, "ep": 2}, 3, ALL_PLACES),
            ({"dp": 2, "sp": 2, "ep": 1}, 1, FEW_PLACES),
        ),
    ],
    ids=name_of,
)
def test_experts_are_spread_over_ranks_that_share_sequences(sizes, stage, places):
    """Each rank gates its own positions."""
    same(run_ranks(train, ranks_of(sizes), sizes, places, stage), plainly(places, parts=(sizes["sp"],) * STEPS))


@pytest.mark.parametrize(
    ("sizes", "stage", "places", "rules"),
    [
        *cases(
            ({"dp": 2, "tp": 2, "ep": 2}, 2, FEW_PLACES, RULES),
            *(({"dp": 2, "tp": 2, "ep": 2}, stage, ALL_PLACES, RULES) for stage in (0, 1, 3)),
            *(({"dp": 2, "tp": 2, "ep": 2}, stage, FEW_PLACES, RULES + CUT_EXPERTS) for stage in range(4)),
            ({"dp": 4, "tp": 2, "ep": 2}, 1, FEW_PLACES, RULES + CUT_EXPERTS),
            ({"dp": 2, "tp": 4, "ep": 2}, 3, ALL_PLACES, RULES),
            ({"pp": 2, "dp": 2, "tp": 2, "ep": 2}, 1, FEW_PLACES, RULES),
            ({"pp": 2, "dp": 2, "tp": 2, "ep": 2}, 3, ALL_PLACES, RULES + CUT_EXPERTS),
            ({"dp": 2, "sp": 2, "tp": 2, "ep": 4}, 2, ALL_PLACES, RULES),
            ({"pp": 2, "sp": 2, "tp": 2, "ep": 2}, 1, FEW_PLACES, RULES),
            ({"dp": 2, "tp": 2, "ep": 1}, 1, FEW_PLACES, RULES),
        ),
    ],
    ids=name_of,
)
def test_experts_beside_tensor_parallel_layers(sizes, stage, places, rules):
    """Experts whole on each tensor-parallel rank, or cut over these as well."""
    found = run_ranks(train, ranks_of(sizes), sizes, places, stage, None, None, 0, STEPS, rules)
    same(found, plainly(places, parts=(sizes.get("sp", 1),) * STEPS))


@pytest.mark.parametrize(
    ("sizes", "stage", "places"),
    [
        *cases(
            ({"tp": 2}, 1, {**CUT, "gated": True}),
            *(({"dp": 2, "tp": 2, "ep": 2}, stage, {**CUT, "gated": stage > 1}) for stage in range(4)),
            ({"pp": 2, "tp": 2}, 2, CUT),
            ({"pp": 2, "dp": 2, "tp": 2, "ep": 2}, 3, CUT),
            ({"dp": 2, "tp": 4, "ep": 2}, 1, {**CUT, "gated": True}),
        ),
    ],
    ids=name_of,
)
def test_experts_that_ask_for_it_are_cut_over_tensor_ranks(sizes, stage, places):
    """And the network beside them."""
    found = run_ranks(train, ranks_of(sizes), sizes, places, stage, None, None, 0, STEPS, RULES, None, True)
    same(found, plainly(places))


def _asked(rank, world):
    """What is cut of a model that has no rules but its experts' wish, and networks that can't be."""
    import deepc
    from deepc.errors import UnsupportedError

    def engine_of(expert, **tensor):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), MoE(WIDTH, expert, 2, enable_expert_tensor_parallelism=True))
        config = {"train_batch_size": 2, "optimizer": SGD, "tensor_parallel": {"autotp_size": 2, **tensor}}
        return deepc.initialize(model=model, config=config)[0]

    def refused(*layers):
        with pytest.raises(UnsupportedError) as caught:
            engine_of(nn.Sequential(*layers))
        return str(caught.value)

    def shapes(engine):
        found = {n.rpartition("experts.")[2]: tuple(p.shape) for n, p in engine.module.named_parameters()}
        engine.destroy()
        return found

    inner = [nn.Linear(WIDTH, 12), nn.LayerNorm(12), nn.Linear(12, WIDTH)]
    texts = [
        refused(*inner),
        refused(nn.Linear(WIDTH, WIDTH)),
        refused(nn.Linear(WIDTH, 12), nn.Linear(12, 12), nn.Linear(12, WIDTH)),
        refused(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))),
    ]
    own = [{"patterns": [rf".*experts\.\d+\.{i}$"], "partition_type": t} for i, t in ((0, "column"), (2, "row"))]
    known = engine_of(nn.Sequential(*inner), partition_config={"use_default_specs": False, "layer_specs": own})
    return texts, shapes(engine_of(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2))))), shapes(known)


def test_experts_that_are_no_usual_networks_are_refused():
    wants = [
        "(0 from 8 to 12, 2 from 12 to 8): it has parameters beside them",
        "these are neither two nor three",
        "just one must lead to the 8 features",
        "(0 from 8 to 8, 1 from 8 to 8, 2 from 8 to 8): just one must lead",
    ]
    for texts, asked, by_patterns in run_ranks(_asked, 2):
        for text, want in zip(texts, wants, strict=True):
            assert want in text and "partition_config" in text
        assert asked["0.weight"] == (8, 8)  # outside of experts: whole
        assert (asked["1.0.weight"], asked["1.0.bias"], asked["1.1.weight"]) == ((4, 8), (4,), (8, 4))
        assert (by_patterns["1.0.weight"], by_patterns["1.2.weight"]) == ((6, 8), (8, 6))


def _drawn(rank, world):
    torch.manual_seed(7 + rank)  # ranks of one tensor group go on with the first one's numbers
    losses, _, grads, _ = train(rank, world, {"dp": 2, "tp": 2, "ep": 2}, DRAWN, 1, None, None, 0, 1)
    return losses, grads


def test_tensor_ranks_draw_the_same_experts_and_places():
    """Of what they hold alike, gradients have equal bits."""
    ranks = run_ranks(_drawn, 4)
    for (_, mine), (_, theirs) in (ranks[:2], ranks[2:]):
        assert mine.keys() == theirs.keys() and all(torch.equal(g, theirs[n]) for n, g in mine.items())


@pytest.mark.full
@pytest.mark.parametrize("sizes", [{"dp": 2, "tp": 2, "ep": 2}, {"pp": 2, "sp": 2, "ep": 2}], ids=name_of)
def test_run_json_counts_the_whole_model_and_all_ranks(sizes, tmp_path):
    more, rules = {"deepc": {"run_dir": str(tmp_path)}}, RULES + CUT_EXPERTS
    run_ranks(train, ranks_of(sizes), sizes, FEW_PLACES, 2, more, None, 0, 1, rules)
    told = json.loads((tmp_path / "run.json").read_text())
    whole = sum(p.numel() for p in whole_model(FEW_PLACES).parameters())
    assert told["ranks"] == ranks_of(sizes)
    assert told["model"]["parameters"] == told["model"]["trainable"] == whole


@pytest.mark.parametrize(
    ("before", "after"),
    [
        *cases(
            ({"pp": 2, "dp": 2, "ep": 2}, {}),
            ({}, {"pp": 2, "dp": 2, "ep": 2}),
            ({"sp": 2, "ep": 2}, {"dp": 2, "tp": 2, "ep": 2}),
            ({"dp": 2, "tp": 2, "ep": 2}, {"pp": 2, "sp": 2, "ep": 2}),
            ({"pp": 2, "dp": 2, "tp": 2, "ep": 2}, {"dp": 2, "sp": 2, "ep": 4}),
            ({"dp": 4, "ep": 4}, {"pp": 2, "sp": 2, "tp": 2, "ep": 2}),
        ),
    ],
    ids=name_of,
)
def test_a_checkpoint_goes_on_in_another_layout(before, after, tmp_path):
    """Two batches in one layout and one in another are three batches."""
    more = {"optimizer": ADAMW}
    run_ranks(train, ranks_of(before), before, ALL_PLACES, 2, more, str(tmp_path), 0, 2)
    found = run_ranks(train, ranks_of(after), after, ALL_PLACES, 1, more, str(tmp_path), 2, 1)
    parts = (before.get("sp", 1),) * 2 + (after.get("sp", 1),)
    losses, norms, grads, weights = plainly(ALL_PLACES, ADAMW, parts)
    same(found, (losses[2:], norms[2:], grads, weights), grads=False)
