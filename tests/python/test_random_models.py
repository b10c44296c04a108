"""Small models drawn from a seed (depth, ties, reuse, freezes, branches that ranks take differently, experts,
checkpointing, parameters used by others) train as in plain PyTorch, on 2 and 4 ranks, while every collective starts
after a random delay."""

from __future__ import annotations

import functools
import random
import time

import plainly
import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

STEPS = 4
QUICK = [3, 20, 27, 65, 76, 85, 89]  # between them: most pairs of what can be drawn
ALL = range(100)
PER_JOB = 10
KINDS = ("linear", "mlp", "experts", "conv", "attention", "gate", "borrow")


class Linear(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a = nn.Linear(width, width)

    def forward(self, x, where):
        return torch.tanh(self.a(x))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width, bias=False)

    def forward(self, x, where):
        return self.down(F.gelu(self.up(self.norm(x))))


class Experts(nn.Module):
    """Rows go to one of four experts, by what is in the batch: some get none, on some ranks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x, where):
        weight = self.gate(x).softmax(-1)
        chosen = (where["tokens"] + where["step"]) % 5  # 4: the identity
        out = x.clone()
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero(as_tuple=True)
            if rows[0].numel():
                out = out.index_put(rows, expert(x[rows]) * weight[rows][:, i : i + 1])
        return out


class Conv(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.conv.weight = nn.Parameter(
            self.conv.weight.detach().transpose(0, 1).contiguous().transpose(0, 1)
        )  # not contiguous

    def forward(self, x, where):
        return torch.tanh(self.conv(x.transpose(1, 2)).transpose(1, 2))


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x, where):
        return self.attention(x, x, x, need_weights=False)[0]


class Gate(nn.Module):
    """Parameters of the module itself: a scalar, a vector, an empty one; in a ParameterList too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.strength, self.empty = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.zeros(0, width))
        self.shifts = nn.ParameterList([nn.Parameter(torch.randn(width) / 4) for _ in range(3)])

    def forward(self, x, where):
        return x * self.strength + self.shifts[where["step"] % 3] + self.empty.sum()


class Borrow(nn.Module):
    """Uses a weight of another module, outside of that module, and never calls its own `holder`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.holder = nn.Linear(width, width)
        self.lent: list[nn.Module] = []  # not a submodule

    def forward(self, x, where):
        weight = self.lent[0].weight if self.lent else self.holder.weight
        return torch.tanh(F.linear(x, weight * 0.5) + self.holder.bias)


MAKERS = {
    "linear": Linear,
    "mlp": Mlp,
    "experts": Experts,
    "conv": Conv,
    "attention": Attention,
    "gate": Gate,
    "borrow": Borrow,
}


class Random(nn.Module):
    """The model of one seed. The structure is drawn from `draw`, the values from torch's generator."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.width, self.vocab = 2 * draw.randint(3, 9), 23
        self.embed = nn.Embedding(self.vocab, self.width)
        self.kinds = [draw.choice(KINDS) for _ in range(draw.randint(1, 6))]
        self.blocks = nn.ModuleList(MAKERS[k](self.width) for k in self.kinds)
        self.norm = nn.LayerNorm(self.width)
        self.head = nn.Linear(self.width, self.vocab, bias=draw.random() < 0.5)
        if draw.random() < 0.5:
            self.head.weight = self.embed.weight
        linears = [
            m for m in self.blocks.modules() if type(m) is nn.Linear and m.weight.shape == (self.width, self.width)
        ]
        if len(linears) > 1 and draw.random() < 0.5:
            a, b = draw.sample(linears, 2)
            b.weight = a.weight
        for block in self.blocks:
            if isinstance(block, Borrow) and linears:
                block.lent.append(draw.choice(linears))
        if draw.random() < 0.3:
            self.spare = nn.Linear(self.width, self.width)
        # How the blocks are called: (block, checkpointing, when). A block may come again.
        calls = list(range(len(self.blocks)))
        if draw.random() < 0.5:
            calls += draw.choices(calls, k=draw.randint(1, 2))
        how = draw.choice([["no"], ["no"], ["plain"], ["reentrant"], ["no", "plain", "reentrant"]])
        self.calls = [(i, draw.choice(how), draw.choice(["always"] * 4 + ["by rank", "by step"])) for i in calls]
        for p in self.parameters():
            if p is not self.embed.weight and draw.random() < 0.15:
                p.requires_grad_(False)
        if draw.random() < 0.15:
            self.embed.weight.requires_grad_(False)
        self.norm.weight.requires_grad_(True)  # something is always trained
        self.losses = draw.choice([1, 1, 1, 2, 3])
        self.output = draw.choice(["tensor", "dict", "tuple"])

    def forward(self, tokens, rank: int, step: int):
        where = {"tokens": tokens, "step": step}
        x = self.embed(tokens)
        for n, (i, how, when) in enumerate(self.calls):
            if when == "by rank" and (rank + step + n) % 2 or when == "by step" and (step + n) % 2:
                continue
            block = self.blocks[i]
            if how == "no":
                x = x + 0.5 * block(x, where)
            else:
                if how == "reentrant" and not x.requires_grad:
                    x = x.detach().requires_grad_(True)
                x = x + 0.5 * checkpoint(block, x, where, use_reentrant=how == "reentrant", preserve_rng_state=False)
        logits = self.head(self.norm(x))
        return {"tensor": logits, "dict": {"logits": logits, "hidden": [x]}, "tuple": (logits, x)}[self.output]


def loss_of(model, part, rank, step):
    """One to three losses, each with a backward of its own."""
    out = model(part["tokens"], rank, step)
    logits = out["logits"] if isinstance(out, dict) else out[0] if isinstance(out, tuple) else out
    pieces = [
        F.cross_entropy(logits.flatten(0, 1), part["targets"].flatten()),
        0.1 * logits.square().mean(),
        0.1 * logits[:, 0].tanh().sum(-1).mean(),
    ]
    return pieces[: model.losses]


def batch_of(seed: int, samples: int, step: int):
    g = torch.Generator().manual_seed(1000 * seed + step)
    data = torch.randint(23, (samples, 7), generator=g)
    return {"tokens": data[:, :-1], "targets": data[:, 1:]}


def drawn(seed: int, world: int) -> dict:
    """How the model of a seed is trained: the rest of what a seed decides."""
    draw = random.Random(seed + 7777)
    out = {
        "stage": draw.choice([0, 1, 2, 3, 3]),
        "optimizer": draw.choice(["AdamW", "SGD"]),
        "gas": draw.choice([1, 1, 2]),
        "way": draw.choice(["engine", "engine", "bare", "no_sync"]),
        "bucket": draw.choice([4096, 8192, 1 << 20]),
    }
    if Random(seed).losses > 1 and out["way"] == "no_sync":
        out["gas"] = 1
    return out | {"parts": out["gas"] * world}


class Delays:
    """Sleeps up to 2 ms before every call of the C core that waits for peers or moves data between ranks."""

    def __init__(self, seed: int) -> None:
        self.calls, self._draw, self._original = 0, random.Random(seed), {}

    def __enter__(self) -> Delays:
        from deepc.core import lib as _lib

        waits = (
            "dc_barrier",
            "dc_broadcast",
            "dc_all_reduce",
            "dc_all_gather",
            "dc_reduce_scatter",
            "dc_segment_create",
            "dc_comm_open",
            "dc_comm_close",
            "dc_reducer_begin",
            "dc_reducer_add",
            "dc_reducer_finish",
            "dc_reducer_gather",
        )
        for name in waits:
            self._original[name] = original = getattr(_lib.C, name)
            setattr(_lib.C, name, functools.partial(self._late, original))
        return self

    def _late(self, original, *args):
        self.calls += 1
        time.sleep(self._draw.random() * 0.002)
        return original(*args)

    def __exit__(self, *exc) -> None:
        from deepc.core import lib as _lib

        for name, original in self._original.items():
            setattr(_lib.C, name, original)


def _drawn(seed: int, world: int, optimizer: str | None) -> dict:
    """What is drawn, with this optimizer if one is given."""
    d = drawn(seed, world)
    return d if optimizer is None else {**d, "optimizer": optimizer}


def _train(rank, world, seeds, optimizer=None):
    out = []
    for seed in seeds:
        d = _drawn(seed, world, optimizer)
        cfg = plainly.config(d["stage"], d["optimizer"], d["gas"], deepc={"bucket_elems": d["bucket"]})
        with Delays(97 * seed + rank) as delays:
            losses, first, weights, engine = plainly.engine(
                lambda: Random(seed),
                lambda step: batch_of(seed, 2 * d["parts"], step),
                loss_of,
                STEPS,
                cfg,
                rank,
                world,
                way=d["way"],
            )
            engine.destroy()
        assert delays.calls > 3 * STEPS
        out.append((losses, first, weights))
    return out


def compare(seeds, world: int, optimizer: str | None = None) -> None:
    ranks = run_ranks(_train, world, args=(list(seeds), optimizer), env={"DEEPC_LOG_LEVEL": "WARNING"})
    torch.set_num_threads(1)
    wrong = []
    for k, seed in enumerate(seeds):
        d = _drawn(seed, world, optimizer)
        want = plainly.plain(
            lambda: Random(seed),
            lambda step: batch_of(seed, 2 * d["parts"], step),
            loss_of,
            STEPS,
            d["optimizer"],
            d["parts"],
        )
        try:
            for rank in range(world):
                plainly.check(ranks[rank][k], want, d["optimizer"], f"seed {seed} on rank {rank} of {world}, {d}")
                assert all(torch.equal(w, ranks[0][k][2][n]) for n, w in ranks[rank][k][2].items()), (
                    f"seed {seed}: ranks differ"
                )
        except AssertionError as exc:
            wrong.append(str(exc))
    assert not wrong, f"{len(wrong)} of {len(seeds)}:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    "world, seeds",
    [
        (4, QUICK[::2]),
        pytest.param(4, QUICK[1::2], marks=pytest.mark.full),
        pytest.param(2, QUICK, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_some_random_models_match_plain_pytorch(world, seeds):
    compare(seeds, world)


def test_random_models_with_the_eps_that_users_have():
    compare(QUICK[:2], 2, "AdamW eps=1e-8")


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("at", range(0, len(ALL), PER_JOB))
def test_all_random_models_match_plain_pytorch(world, at):
    compare(ALL[at : at + PER_JOB], world)
