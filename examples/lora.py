"""LoRA without a library (Hu et al., 2021): a small language model learns Python's source, is frozen, and learns text
of swapped case by low-rank additions.

Only the additions are trained: under ZeRO-3 the frozen weights lie once per node and cost nothing else, and a
checkpoint without them is small. With --out the checkpoint goes there, and the model with its additions merged in, as
safetensors."""

from __future__ import annotations

import copy
import math
import sysconfig
from pathlib import Path

import deepc
import torch
import torch.nn.functional as F
from example import config, draw, mean_over_ranks, mine, options, say
from torch import Tensor, nn

WIDTH, LAYERS, HEADS, CONTEXT = 64, 2, 2, 48


def text(limit: int = 1 << 20) -> Tensor:
    """Bytes of the Python standard library's source, uint8."""
    out = b""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        out += file.read_bytes()
        if len(out) > limit:
            break
    return torch.frombuffer(bytearray(out[:limit]), dtype=torch.uint8)


def swapped(x: Tensor) -> Tensor:
    """a-z and A-Z change places."""
    return torch.frombuffer(bytearray(x.numpy().tobytes().swapcase()), dtype=torch.uint8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        n, t, _ = h.shape
        q, k, v = self.qkv(self.norm1(h)).view(n, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        h = h + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, t, WIDTH))
        return h + self.down(F.gelu(self.up(self.norm2(h))))


class Model(nn.Module):
    """Bytes int64 [n, CONTEXT + 1] -> mean cross-entropy of each byte given those before it, in bits."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x[:, :-1]) + self.places(torch.arange(CONTEXT))
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(self.norm(h)).float().flatten(0, 1), x[:, 1:].flatten()) / math.log(2)


class LoRA(nn.Module):
    """base(x) + scale * up(down(x)); base is frozen. Begins as base: up is zero."""

    def __init__(self, base: nn.Linear, rank: int, scale: float = 2.0) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), scale
        self.down, self.up = (
            nn.Linear(base.in_features, rank, bias=False),
            nn.Linear(rank, base.out_features, bias=False),
        )
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * self.up(self.down(x))

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        self.base.weight += self.scale * self.up.weight @ self.down.weight
        return self.base


def make(seed: int) -> Model:
    torch.manual_seed(seed)
    return Model()


def adapt(model: Model, rank: int, seed: int) -> Model:
    """Freezes the model and puts a LoRA around every linear layer, in place."""
    torch.manual_seed(seed + 1)
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, LoRA(child, rank))
    return model


def merge(model: nn.Module) -> nn.Module:
    """The model without additions, their effect in its weights; in place."""
    for name, child in list(model.named_children()):
        setattr(model, name, child.merged() if isinstance(child, LoRA) else merge(child))
    return model


def windows(source: Tensor, seed: int, step: int, count: int) -> Tensor:
    """[count, CONTEXT + 1] int64: pieces of the first 15/16 of the text, and for step -1 of the rest."""
    split = len(source) // 16 * 15
    lo, hi = (split, len(source) - CONTEXT - 1) if step < 0 else (0, split - CONTEXT - 1)
    starts = torch.randint(lo, hi, (count,), generator=draw(seed, step))
    return source[starts[:, None] + torch.arange(CONTEXT + 1)].long()


def train_step(engine, x: Tensor) -> float:
    loss = engine(x)
    engine.backward(loss)
    engine.step()
    return loss.item()


@torch.no_grad()
def bits(model, source: Tensor, seed: int) -> float:
    return model(windows(source, seed, -1, 256)).item()


def main() -> None:
    args = options(__doc__, steps=200, batch=32, base_steps=200, rank=8, out="")
    python = text()
    other = swapped(python)
    engine, *_ = deepc.initialize(model=make(args.seed), config=config(args, lr=3e-3))
    for step in range(args.base_steps):
        train_step(engine, *mine(windows(python, args.seed, step, args.batch)))
    say(
        f"base: {bits(engine, python, args.seed):.3f} bits per byte of Python, {bits(engine, other, args.seed):.3f}"
        " with case swapped"
    )
    base = copy.deepcopy(engine.module)
    engine.destroy()

    model = adapt(base, args.rank, args.seed)
    trained, total = (sum(p.numel() for p in model.parameters() if p.requires_grad or every) for every in (False, True))
    say(f"adapters: {trained:,} of {total:,} weights are trained")
    engine, *_ = deepc.initialize(model=model, config=config(args, lr=1e-2, weight_decay=0.0))
    first = bits(engine, other, args.seed)
    for step in range(args.steps):
        loss = mean_over_ranks(train_step(engine, *mine(windows(other, args.seed, step, args.batch))))
        if step % 50 == 0:
            say(f"step {step}: {loss:.3f} bits per byte")
    last = bits(engine, other, args.seed)
    whole = merge(copy.deepcopy(engine.module))
    say(
        f"bits per byte with case swapped: {first:.3f} before, {last:.3f} after; merged into the weights "
        f"{bits(whole, other, args.seed):.3f}"
    )
    if args.out:
        engine.save_checkpoint(args.out, exclude_frozen_parameters=True)
        deepc.export(whole, Path(args.out, "merged"), dtype="bf16")


if __name__ == "__main__":
    main()
