"""Mixture of experts: against a loop over tokens, and under the engine."""

from __future__ import annotations

import copy
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from deepc.errors import ArgumentError, MisuseError
from deepc.parallel.expert import MoE, capacity_of, has_moe_layers, is_moe_param
from deepc.parallel.expert.gate import route
from ranks import run_ranks as _run_ranks
from torch import nn

HIDDEN, EXPERTS = 8, 4


def run_ranks(fn, world, *args):
    return _run_ranks(fn, world, args=args, env={"DEEPC_LOG_LEVEL": "WARNING"})


def expert():
    return nn.Sequential(nn.Linear(HIDDEN, 12), nn.GELU(), nn.Linear(12, HIDDEN))


def layer(seed=0, **options):
    torch.manual_seed(seed)
    moe = MoE(HIDDEN, expert(), num_experts=EXPERTS, **{"min_capacity": 0, **options})
    with torch.no_grad():
        for p in moe.parameters():
            p.normal_(std=0.5)
    return moe


def by_loop(moe, x, used=None):
    """The layer's formulas, token by token. (output, l_aux, chosen, tokens left out of a choice)"""
    gate, k, tokens = moe.deepspeed_moe.gate, moe.deepspeed_moe.gate.k, x.reshape(-1, HIDDEN)
    n = len(tokens)
    capacity = math.ceil(n * k * gate.capacity_factor / EXPERTS) if gate.drop_tokens else n
    probs = [F.softmax(gate.wg(t), dim=0) for t in tokens]
    wishes = [sorted(range(EXPERTS), key=lambda e: -float(p[e].detach()))[:k] for p in probs]
    wishes = [w if used is None or used[s] else [] for s, w in enumerate(wishes)]
    asked = [[(s, j) for j in range(k) for s in range(n) if w_at(wishes, s, j) == e] for e in range(EXPERTS)]
    places = set()
    for e in range(EXPERTS):
        if k > 2:  # the highest gates
            asked[e].sort(key=lambda r: -float(probs[r[0]][e].detach()))
        places |= set(asked[e][:capacity])
    out = []
    for s, t in enumerate(tokens):
        kept = [wishes[s][j] for j in range(k) if (s, j) in places]
        total = sum(probs[s][e] for e in kept) if k > 1 else 1
        parts = [probs[s][e] / total * moe.deepspeed_moe.experts.deepspeed_experts[e](t) for e in kept]
        out.append(sum(parts) if parts else torch.zeros(HIDDEN))
    counted = k if k > 2 else 1
    share = [sum(e in w[:counted] for w in wishes) / n for e in range(EXPERTS)]
    mean = sum(probs) / n
    l_aux = sum(f * m for f, m in zip(share, mean)) * EXPERTS / counted
    output = torch.stack(out).view(x.shape)
    if moe.use_residual:
        c = F.softmax(moe.coefficient(x), -1)
        output = output * c[..., :1] + moe.mlp(x) * c[..., 1:]
    return output, l_aux, [len(a) for a in asked], sum(map(len, asked)) - len(places)


def w_at(wishes, s, j):
    return wishes[s][j] if wishes[s] else -1


def same(moe, x, used=None):
    """The layer's output, loss, counts and every gradient are those of the loop; returns the choices left out."""
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, l_aux, counts = moe(a, used)
    (got.square().sum() + 0.3 * l_aux).backward()
    mine = {n: p.grad for n, p in moe.named_parameters()}
    moe.zero_grad()
    want, expected, chosen, left_out = by_loop(moe, b, used)
    (want.square().sum() + 0.3 * expected).backward()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(l_aux, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)
    assert counts.tolist() == chosen and counts.dtype == torch.int64
    for name, p in moe.named_parameters():
        assert mine[name] is not None, name  # of an expert that nobody chose: zeros
        torch.testing.assert_close(
            mine[name], torch.zeros_like(p) if p.grad is None else p.grad, rtol=1e-4, atol=1e-4, msg=name
        )
    return left_out


@pytest.mark.parametrize("k", (1, 2, 3))
def test_output_loss_and_gradients_are_those_of_a_loop_over_tokens(k):
    x = torch.randn(2, 9, HIDDEN, generator=torch.Generator().manual_seed(k))
    used = torch.ones(18)
    used[[0, 3, 17]] = 0
    plain = dict(k=k, use_rts=False, top2_2nd_expert_sampling=False)
    assert same(layer(**plain, capacity_factor=0.6), x) > 0
    assert same(layer(**plain, capacity_factor=0.6, use_residual=True), x, used) > 0
    assert same(layer(**plain, drop_tokens=False), x) == 0


def test_no_token_at_all_has_no_loss():
    for k in (1, 2, 3):
        moe = layer(k=k)
        out, l_aux, counts = moe(torch.zeros(0, HIDDEN))
        (out.sum() + l_aux).backward()
        assert (out.shape, l_aux.item(), counts.tolist()) == ((0, HIDDEN), 0.0, [0] * EXPERTS)
        assert all(p.grad is not None and not p.grad.any() for p in moe.parameters())


def test_noise_of_the_gate_and_places_by_lot():
    """Draws have the probabilities that they should; evaluation draws nothing."""
    n, logits = 40000, torch.tensor([1.0, 0.0, 2.0, -1.0])
    p = F.softmax(logits, 0)
    torch.manual_seed(0)
    drawn = route(logits.expand(n, 4), 1, noise="all").chosen / n
    torch.testing.assert_close(drawn, p, atol=0.01, rtol=0)
    second = route(logits.expand(n, 4), 2, noise="second").chosen / n
    torch.testing.assert_close(second, torch.where(p == p[2], 1, p / (1 - p[2])), atol=0.01, rtol=0)
    # 100 tokens want one expert of 10 places: each token gets one as often
    kept = torch.zeros(100)
    for _ in range(500):
        kept[route(logits.expand(100, 4), 1, capacity=10, keep="random").tokens] += 1
    assert kept.sum() == 5000 and kept.min() > 20 and kept.max() < 90

    x = torch.randn(64, HIDDEN)
    for options in (
        {"noisy_gate_policy": "Jitter"},
        {"noisy_gate_policy": "RSample"},
        {"k": 2},
        {"capacity_factor": 0.5},
    ):
        moe = layer(**{"k": 1, "use_rts": "capacity_factor" in options, "eval_capacity_factor": 0.5, **options})
        assert not torch.equal(moe(x)[0], moe(x)[0]), options
        moe.eval()
        assert torch.equal(moe(x)[0], moe(x)[0]), options


def test_the_gate_stays_in_fp32_and_outputs_have_the_models_dtype():
    moe, x = layer(k=2, top2_2nd_expert_sampling=False), torch.randn(30, HIDDEN)
    wanted, l_aux, counts = moe(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(moe(x)[2], counts) and torch.equal(moe(x)[1], l_aux)
    half = copy.deepcopy(moe).bfloat16()  # a copy after a call: without the graph of its results
    out, l_aux, _ = half(x.bfloat16())
    assert out.dtype == torch.bfloat16 and l_aux.dtype == torch.float32
    assert (out - wanted).abs().max() < 0.1 * wanted.abs().max()


def test_names_of_parameters_and_errors():
    moe = layer(use_residual=True)
    assert set(dict(moe.named_parameters())) == {
        "deepspeed_moe.gate.wg.weight",
        *(f"deepspeed_moe.experts.deepspeed_experts.{e}.{i}.{w}" for e in range(4) for i in (0, 2) for w in WB),
        *(f"mlp.{i}.{w}" for i in (0, 2) for w in WB),
        *(f"coefficient.{w}" for w in WB),
    }
    assert sum(map(is_moe_param, moe.parameters())) == 16 and has_moe_layers(nn.Sequential(moe)) == (True, 4)
    assert (capacity_of(100, 10, 1.1, 4), capacity_of(10, 4, 1.0, 4), capacity_of(10, 4, 1.0, 0)) == (11, 4, 3)
    for wrong, error, text in (
        (dict(ep_size=3), MisuseError, "ep_size = 3 ranks can't share 4 experts"),
        (dict(k=5), ArgumentError, "k = 5 .* from 1 to num_experts = 4"),
        (dict(noisy_gate_policy="loud"), MisuseError, "'loud' is none of"),
        (dict(capacity_factor=0), ArgumentError, "capacity_factor = 0 must be above 0"),
    ):
        with pytest.raises(error, match=text):
            layer(**wrong)
    with pytest.raises(ArgumentError, match=r"\[3, 7\]; the last dimension must be hidden_size = 8"):
        moe(torch.zeros(3, 7))
    with pytest.raises(ArgumentError, match="used_token has 2 elements for 3 tokens"):
        moe(torch.zeros(3, HIDDEN), torch.ones(2))
    with pytest.raises(ArgumentError, match=r"expert 0 made \[\d+, 3\] of its input"):
        MoE(HIDDEN, nn.Linear(HIDDEN, 3))(torch.zeros(3, HIDDEN))
    with pytest.raises(MisuseError, match="ep_size = 2 ranks that are not connected yet; call deepc.initialize"):
        layer(ep_size=2)(torch.zeros(3, HIDDEN))
    out, l_aux, counts = moe(torch.zeros(0, HIDDEN))
    assert out.shape == (0, HIDDEN) and counts.tolist() == [0] * 4


WB = ("weight", "bias")


# ---- under the engine ------------------------------------------------------------------------------------------------
class Net(nn.Module):
    """Two layers, of which one is residual. rank: of those that share the experts."""

    def __init__(self, ep=1, rank=0):
        super().__init__()
        torch.manual_seed(3)
        plain = dict(num_experts=EXPERTS, k=2, drop_tokens=False, top2_2nd_expert_sampling=False, ep_size=ep)
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.moe = MoE(HIDDEN, expert(), **plain)
        self.last = MoE(HIDDEN, expert(), use_residual=True, **{**plain, "k": 1, "use_rts": False})
        own = EXPERTS // ep
        for i, moe in enumerate((self.moe, self.last)):
            for e in range(EXPERTS):
                values = torch.Generator().manual_seed(10 * i + e)
                for j, p in enumerate(expert().parameters()):
                    value = torch.randn(p.shape, generator=values) / 2
                    if rank * own <= e < (rank + 1) * own:
                        mine = moe.deepspeed_moe.experts.deepspeed_experts[e - rank * own]
                        with torch.no_grad():
                            list(mine.parameters())[j].copy_(value)

    def forward(self, x, y):
        out, l_aux, _ = self.moe(torch.tanh(self.first(x)))
        out, other, _ = self.last(out)
        return F.mse_loss(out, y) + 0.01 * (l_aux + other)


def samples(step):
    draw = torch.Generator().manual_seed(step)
    return torch.randn(4, 5, HIDDEN, generator=draw), torch.randn(4, 5, HIDDEN, generator=draw)


def trained(rank, world, stage, ep, steps=(0, 1, 2), folder=None, load=False):
    """(losses, norms, parameters by name, those of experts by their number among all). Each micro-batch has two of the
    four samples, or one in more ranks. folder: of a checkpoint, which is loaded before or saved afterwards."""
    import deepc
    from deepc.parallel.expert import configure_moe_param_groups

    model = Net(ep, rank % ep)
    if rank:  # what ranks share is rank 0's
        with torch.no_grad():
            model.first.weight.add_(1)
    micro = min(2, 4 // world)
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_clipping": 0.05,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0}},
    }
    groups = configure_moe_param_groups(list(model.parameters()))
    assert [bool(g.get("moe")) for g in groups] == [False, True]
    engine, *_ = deepc.initialize(model=model, model_parameters=groups, config=config)
    if load:
        assert engine.load_checkpoint(folder)[0]
    losses, norms = [], []
    for step in steps:
        for x, y in zip(*(t.chunk(world)[rank].split(micro) for t in samples(step))):
            loss = engine(x, y)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        norms.append(engine.get_global_grad_norm())
    if folder and not load:
        engine.save_checkpoint(folder)
    found = {n: t.clone() for n, t in engine.module_state_dict().items()}
    assert set(found) == set(Net().state_dict())
    engine.load_module_state_dict(found)  # changes nothing
    again = engine.module_state_dict()
    assert all(torch.equal(t, again[n]) for n, t in found.items())
    return losses, norms, found


def as_one_process(world):
    """Torch's training: every rank gates its own tokens, and the loss is the mean of the ranks' losses."""
    model, losses, norms = Net(), [], []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0)
    for step in range(3):
        parts = [model(*part) for part in zip(*(t.chunk(world) for t in samples(step)))]
        optimizer.zero_grad()
        (sum(parts) / world).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
        optimizer.step()
        losses.append([float(part.detach()) for part in parts])
    return losses, norms, {n: p.detach() for n, p in model.named_parameters()}


FULL = pytest.mark.full


@pytest.mark.parametrize(
    "world, stage, ep",
    (
        (2, 3, 1),
        (2, 1, 2),
        *(
            pytest.param(*case, marks=FULL)
            for case in ((2, 0, 1), (2, 1, 1), (2, 0, 2), (2, 3, 2), (4, 0, 2), (4, 2, 2), (4, 3, 2), (4, 1, 4))
        ),
    ),
)
def test_experts_train_under_zero_as_in_one_process(world, stage, ep):
    losses, norms, parameters = as_one_process(world)
    for rank, (mine, my_norms, found) in enumerate(run_ranks(trained, world, stage, ep)):
        assert mine == pytest.approx([row[rank] for row in losses], rel=1e-6)
        assert my_norms == pytest.approx(norms, rel=1e-5)
        same_values(found, parameters)


def same_values(found, wanted):
    for name, t in wanted.items():
        torch.testing.assert_close(found[name], t, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "before, after",
    (
        pytest.param((2, 2, 2), (1, 1, 1)),
        pytest.param((1, 0, 1), (2, 3, 2), marks=FULL),
        pytest.param((2, 3, 2), (2, 0, 1), marks=FULL),
    ),
)
def test_a_checkpoint_knows_no_ranks_of_experts(before, after, tmp_path):
    """Two steps in one layout (ranks, stage, ep_size) and one in another are three steps."""
    run_ranks(trained, *before, (0, 1), str(tmp_path))
    _, _, wanted = as_one_process(2)
    for _, norms, found in run_ranks(trained, *after, (2,), str(tmp_path), True):
        same_values(found, wanted)


class Counting(nn.Module):
    """An expert that knows how many tokens it has seen."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen = self.seen + x.shape[0]  # another tensor, as running averages are often written
        self.calls += 1
        return self.linear(x)


def counted(rank, world, ep, folder, load):
    """{buffer of an expert, by its number among all: value}, saved or loaded."""
    import deepc

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), MoE(HIDDEN, Counting(), EXPERTS, ep_size=ep, k=1, use_rts=False))
    config = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    engine = deepc.initialize(model=model, config=config)[0]
    if load:
        engine.load_checkpoint(folder)
    else:
        out, l_aux, _ = engine(samples(0)[0].chunk(world)[rank])
        engine.backward(out.square().mean() + l_aux)
        engine.step()
        engine.save_checkpoint(folder)
    own = EXPERTS // ep
    experts = model[1].deepspeed_moe.experts.deepspeed_experts
    found = {f"{n} of {i + rank % ep * own}": t.item() for i, e in enumerate(experts) for n, t in e.named_buffers()}
    engine.destroy()
    return found


class Numbered(nn.Linear):
    """Has a state that is no tensor."""

    number = -1

    def get_extra_state(self):
        return {"number": self.number}

    def set_extra_state(self, state):
        self.number = state["number"]


class Words(nn.Module):
    def __init__(self, ep):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(11, HIDDEN, sparse=True)
        self.moe = MoE(HIDDEN, Numbered(HIDDEN, HIDDEN), EXPERTS, ep_size=ep, use_rts=False, drop_tokens=False)

    def forward(self, ids):
        return self.moe(self.words(ids))[0].square().mean()


def _sparse_gradients(rank, world):
    """(the words' weights after a step, {name: further state of an expert}), in the end as loaded."""
    import deepc

    model = Words(world)
    experts = model.moe.deepspeed_moe.experts.deepspeed_experts
    for i, e in enumerate(experts):
        e.number = 10 + rank * len(experts) + i
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
    engine = deepc.initialize(model=model, config=config)[0]
    ids = torch.tensor([[1, 2, 3], [3, 4, 5]]).chunk(world)[rank]
    engine.backward(engine(ids))
    engine.step()
    words, whole = model.words.weight.detach().clone(), engine.module_state_dict()
    for e in experts:
        e.number = -1
    engine.load_module_state_dict(whole)
    numbers = [e.number for e in experts]
    engine.destroy()
    return words, {n: s for n, s in whole.items() if n.endswith("extra_state")}, numbers


def test_sparse_gradients_and_further_states_beside_spread_experts():
    ((words, states, _),) = run_ranks(_sparse_gradients, 1)
    first, second = run_ranks(_sparse_gradients, 2)
    for found in (first, second):
        torch.testing.assert_close(found[0], words)
        assert found[1] == states and len(states) == EXPERTS
    assert (first[2], second[2]) == ([10, 11], [12, 13])


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN))

    def forward(self, x):
        return self.blocks(x).sum()


def _other_buffers(rank, world, config, experts):
    """What `initialize` makes of buffers that differ between ranks."""
    import deepc

    model = Blocks()
    if experts:
        model.moe = MoE(HIDDEN, nn.Linear(HIDDEN, HIDDEN), EXPERTS, ep_size=2)
    buffers = {
        "bool": torch.tensor([rank == 0, True]),
        "uint8": torch.tensor([rank], dtype=torch.uint8),
        "complex": torch.tensor([complex(rank)]),
        "turned": (torch.arange(6.0) + rank).view(2, 3).t(),
        "expanded": torch.tensor([float(rank)]).expand(3),
        "sparse": (torch.eye(2) * (rank + 1)).to_sparse(),
    }
    for name, b in buffers.items():
        model.register_buffer(name, b)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **config}
    engine = deepc.initialize(model=model, config=config, sample_batch=(torch.ones(1, HIDDEN),))[0]
    found = {name: getattr(model, name).to_dense().tolist() for name in buffers}
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("config", "experts"),
    [
        ({}, True),
        (
            {
                "tensor_parallel": {
                    "autotp_size": 2,
                    "partition_config": {"layer_specs": [{"patterns": ["blocks"], "gather_output": True}]},
                }
            },
            False,
        ),
        ({"pipeline": {"stages": 2}}, False),
    ],
    ids=["experts", "tensors", "stages"],
)
def test_buffers_of_any_kind_are_the_first_ranks_along_every_axis(config, experts):
    first, second = run_ranks(_other_buffers, 2, config, experts)
    assert first == second
    assert (first["bool"], first["expanded"]) == ([True, True], [0.0, 0.0, 0.0])
    assert (first["turned"][1], first["sparse"]) == ([1.0, 4.0], [[1.0, 0.0], [0.0, 1.0]])


def test_buffers_of_spread_experts_are_each_ones_own(tmp_path):
    first, second = run_ranks(counted, 2, 2, str(tmp_path), False)
    assert len(first) == len(second) == 4 and not first.keys() & second.keys()
    assert first["seen of 0"] + first["seen of 1"] != second["seen of 2"] + second["seen of 3"]  # it shows
    assert run_ranks(counted, 1, 1, str(tmp_path), True) == [{**first, **second}]
    assert run_ranks(counted, 2, 2, str(tmp_path), True) == [first, second]


def test_a_recomputed_layer_keeps_the_results_of_its_forward():
    """Its load-balance loss is the one that counts: not what backward computes again, which nothing holds then."""
    from torch.utils.checkpoint import checkpoint

    moe, x, made = layer(k=2, noisy_gate_policy="Jitter"), torch.randn(10, HIDDEN, requires_grad=True), []
    moe.deepspeed_moe.gate.register_forward_hook(lambda module, args, routes: made.append(weakref.ref(routes.balance)))

    def gradients(way):
        torch.manual_seed(5)
        out, balance, chosen = way(moe, x)
        kept = moe.deepspeed_moe.l_aux, moe.deepspeed_moe.exp_counts
        (out.square().sum() + moe.deepspeed_moe.l_aux).backward()
        assert all(now is then for now, then in zip((moe.deepspeed_moe.l_aux, moe.deepspeed_moe.exp_counts), kept))
        assert kept[0] is balance and kept[1] is chosen
        found, x.grad = [x.grad, moe.deepspeed_moe.gate.wg.weight.grad], None
        moe.zero_grad()
        return found

    wanted = gradients(lambda layer, x: layer(x))
    assert all(map(torch.equal, gradients(lambda layer, x: checkpoint(layer, x, use_reentrant=False)), wanted))
    assert len(made) == 3, "once, and again"
    assert [ref() is None for ref in made] == [True, False, True], "the one of the last forward is held"
