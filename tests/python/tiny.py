"""Small models and data for the tests, and plain PyTorch's training of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from ranks import on_nodes
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # No bias on the keys: it has no true gradient (softmax ignores it), and Adam turns its rounding noise into
        # steps of size lr.
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class TinyGPT(nn.Module):
    """A causal language model with a tied embedding. Options: a frozen parameter, an unused one, a block applied twice,
    and activation checkpointing (reentrant or not)."""

    def __init__(
        self,
        width=32,
        layers=2,
        vocab=61,
        context=16,
        frozen=False,
        unused=False,
        reuse=False,
        recompute: str | None = None,
    ) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tok.weight
        if unused:
            self.spare = nn.Linear(width, width)
        if frozen:
            self.pos.weight.requires_grad_(False)
            self.blocks[0].ln1.weight.requires_grad_(False)
        self.reuse, self.recompute = reuse, recompute

    def forward(self, x, y):
        h = self.tok(x) + self.pos(torch.arange(x.shape[1], device=x.device))
        for _ in range(2 if self.reuse else 1):
            for block in self.blocks:
                h = checkpoint(block, h, use_reentrant=self.recompute == "reentrant") if self.recompute else block(h)
        return F.cross_entropy(self.head(self.ln(h)).float().flatten(0, 1), y.flatten())


def make_model(seed: int = 0, **options) -> TinyGPT:
    torch.manual_seed(seed)
    return TinyGPT(**options)


def make_batch(step: int, samples: int = 8, vocab: int = 61, context: int = 16):
    g = torch.Generator().manual_seed(1000 + step)
    data = torch.randint(vocab, (samples, context + 1), generator=g)
    return data[:, :-1], data[:, 1:]


def plain_training(steps: int, *, lr=1e-3, weight_decay=0.01, clip=1.0, samples=8, batches=None, **options):
    """Reference: plain PyTorch AdamW on the whole batch. Returns (losses, first gradients by name, weights by name).
    batches: how many there are, which repeat (None: each step has its own, of which nothing can be learnt)."""
    model = make_model(**options)
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=weight_decay)
    losses, first = [], {}
    for step in range(steps):
        loss = model(*make_batch(step % (batches or steps), samples))
        loss.backward()
        if step == 0:
            first = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        if clip:
            torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], clip)
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses, first, {n: p.detach().clone() for n, p in model.named_parameters()}


def plain_training_16(
    steps: int, dtype: torch.dtype, *, micro: int, gas: int, world: int, scale=1.0, lr=1e-3, weight_decay=0.01, clip=1.0
) -> list[float]:
    """Losses of plain PyTorch that trains a 16-bit model with fp32 masters on one batch, cut into micro-batches as
    engine_training cuts it, whose gradients (of scale / gas times the loss) are added up in fp32."""
    masters = [p.detach().clone().requires_grad_() for p in make_model().parameters()]
    model = make_model().to(dtype)
    opt = torch.optim.AdamW(masters, lr=lr, weight_decay=weight_decay)
    x, y = make_batch(0, micro * gas * world)
    losses = []
    for _ in range(steps):
        for master in masters:
            master.grad = torch.zeros_like(master)
        total = 0.0
        for part, labels in zip(x.split(micro), y.split(micro), strict=True):
            loss = model(part, labels)
            model.zero_grad()
            (loss * (scale / gas)).backward()
            for master, p in zip(masters, model.parameters(), strict=True):
                master.grad += p.grad.float() / (scale * world)
            total += loss.item() / (gas * world)
        torch.nn.utils.clip_grad_norm_(masters, clip)
        opt.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
        losses.append(total)
    return losses


def config(
    stage: int, *, micro: int, gas: int = 1, precision: str = "fp32", clip=1.0, lr=1e-3, weight_decay=0.01, **extra
) -> dict:
    out = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": clip,
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "weight_decay": weight_decay}},
        "zero_optimization": {"stage": stage},
    }
    if precision != "fp32":
        out[precision] = {"enabled": True}
    out.update(extra)
    return out


def engine_training(
    cfg: dict, steps: int, rank: int, world: int, *, samples: int = 8, grads: bool = True, batches=None, **options
):
    """The same on a deepc engine: this rank's part of each batch, in micro-batches. Returns (losses averaged over ranks
    and micro-batches, first gradients, weights, engine)."""
    import deepc
    import torch.distributed as dist

    engine, _, _, _ = deepc.initialize(model=make_model(**options), config=cfg)
    micro, gas = cfg["train_micro_batch_size_per_gpu"], cfg["gradient_accumulation_steps"]
    assert micro * gas * world == samples
    losses, first = [], {}
    for step in range(steps):
        x, y = make_batch(step % (batches or steps), samples)
        total = 0.0
        for m in range(gas):
            at = (m * world + rank) * micro
            loss = engine(x[at : at + micro], y[at : at + micro])
            engine.backward(loss)
            total += loss.item() / gas
            if grads and step == 0 and m == gas - 1:
                for n, p in engine.module.named_parameters():
                    if p.requires_grad:
                        first[n] = engine.full_grad(p)
            engine.step()
        mean = torch.tensor([total], dtype=torch.float64)
        dist.all_reduce(mean)
        losses.append(mean.item() / world)
    weights = {
        n: engine.full_fp32_param(p).clone() if p.requires_grad else p.detach().clone()
        for n, p in engine.module.named_parameters()
    }
    return losses, first, weights, engine


def stepped_by(opt_of, steps: int) -> list[float]:
    """Losses of plain PyTorch with the optimizer opt_of(parameters), clipped at 1, on one batch."""
    model, losses = make_model(), []
    opt = opt_of(model.parameters())
    for _ in range(steps):
        loss = model(*make_batch(0, 8))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def at_all_stages(config_of, steps: int, rank: int, world: int):
    """(losses, weights) of `steps` on one batch at each ZeRO stage; config_of: stage -> configuration."""
    out = []
    for stage in range(4):
        losses, _, weights, engine = engine_training(config_of(stage), steps, rank, world, batches=1)
        out.append((losses, {n: w.clone() for n, w in weights.items()}))
        engine.destroy()
    return out


def check_all_equal(ranks) -> None:
    """What all ranks have of at_all_stages is the same, bit for bit, at every stage."""
    losses, weights = ranks[0][0]
    for found in ranks:
        for stage in range(4):
            assert found[stage][0] == losses, stage
            assert all(torch.equal(w, weights[n]) for n, w in found[stage][1].items()), stage


def at_layouts(config_of, rank: int, world: int, places):
    """Weights after 3 steps of 8 micro-batches in the order of "deterministic", at each of places, (ZeRO stage, nodes);
    config_of: (stage, ranks, further sections) -> configuration."""
    out = []
    for stage, nodes in places:
        cfg = config_of(stage, 8, deepc={"bucket_elems": 8192, "deterministic": "layout"})
        cfg["gradient_accumulation_steps"] = 8 // world
        with on_nodes(rank, world, nodes):
            _, _, weights, engine = engine_training(cfg, 3, rank, world, grads=False)
            assert engine.plan.nodes == nodes
            out.append({n: w.clone() for n, w in weights.items()})
            engine.destroy()
    return out
