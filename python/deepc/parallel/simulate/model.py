"""A tiny GPT twice: as one process has it, in plain PyTorch, and as the parts that tensor-parallel ranks have of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ...errors import ArgumentError
from .collectives import Traffic, largest, spread, summed

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Tiny:
    """Sizes. A layer is "embed", "0", "1", ... or "head"."""

    layers: int = 8
    hidden: int = 64
    heads: int = 8
    vocab: int = 64
    seq: int = 8

    def names(self) -> list[str]:
        return ["embed", *map(str, range(self.layers)), "head"]

    def require(self, tp: int) -> None:
        """ArgumentError if tp ranks can't share it."""
        if self.heads % tp or self.vocab % tp or self.hidden % self.heads:
            raise ArgumentError(
                f"simulate: {self.heads} heads and {self.vocab} words can't be cut into tp = {tp}, or {self.hidden}"
                " into heads; use --hidden, --heads, --vocab"
            )

    def shapes(self, layer: str) -> dict[str, tuple[tuple[int, ...], int | None]]:
        """Of each weight: its shape, and the dimension that tensor parallelism cuts (None: every rank has all)."""
        h, v = self.hidden, self.vocab
        if layer == "embed":
            return {"tokens": ((v, h), 0), "places": ((self.seq, h), None)}
        if layer == "head":
            return {"norm": ((h,), None), "norm_bias": ((h,), None), "words": ((v, h), 0)}
        norms = {n: ((h,), None) for n in ("norm1", "norm1_bias", "norm2", "norm2_bias")}
        return {
            **norms,
            "q": ((h, h), 0),
            "k": ((h, h), 0),
            "v": ((h, h), 0),
            "mix": ((h, h), 1),
            "mix_bias": ((h,), None),
            "up": ((4 * h, h), 0),
            "up_bias": ((4 * h,), 0),
            "down": ((h, 4 * h), 1),
            "down_bias": ((h,), None),
        }

    def made(self, seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
        """Weights of all layers."""
        draw = torch.Generator().manual_seed(seed)
        out: dict[str, dict[str, torch.Tensor]] = {}
        for layer in self.names():
            out[layer] = {
                name: torch.ones(shape) if name.startswith("norm") and "bias" not in name
                else 0.05 * torch.randn(shape, generator=draw)
                for name, (shape, _) in self.shapes(layer).items()
            }  # fmt: skip
        return out

    def part(self, layer: str, name: str, whole: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
        """What rank `rank` of `tp` has of a weight."""
        dim = self.shapes(layer)[name][1]
        return whole if dim is None else whole.chunk(tp, dim)[rank].contiguous()


# ---- one process -----------------------------------------------------------------------------------------------------
def whole_loss(tiny: Tiny, weights: Mapping[str, Weights], ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean loss of a micro-batch: plain PyTorch."""
    w = weights["embed"]
    x = F.embedding(ids, w["tokens"]) + w["places"]
    b, s, h = x.shape
    for i in range(tiny.layers):
        w = weights[str(i)]
        y = F.layer_norm(x, (h,), w["norm1"], w["norm1_bias"])
        q, k, v = (F.linear(y, w[n]).view(b, s, tiny.heads, -1).transpose(1, 2) for n in "qkv")
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, h)
        x = x + F.linear(mixed, w["mix"], w["mix_bias"])
        y = F.layer_norm(x, (h,), w["norm2"], w["norm2_bias"])
        x = x + F.linear(F.gelu(F.linear(y, w["up"], w["up_bias"])), w["down"], w["down_bias"])
    w = weights["head"]
    logits = F.linear(F.layer_norm(x, (h,), w["norm"], w["norm_bias"]), w["words"])
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


# ---- tensor-parallel ranks -------------------------------------------------------------------------------------------
def embedded(parts: Sequence[Weights], ids: torch.Tensor, traffic: Traffic) -> list[torch.Tensor]:
    """The embedding's output on each rank, whose words are a slice of the vocabulary."""
    each = parts[0]["tokens"].shape[0]
    found = []
    for rank, w in enumerate(parts):
        mine = (ids >= rank * each) & (ids < (rank + 1) * each)
        local = torch.where(mine, ids - rank * each, torch.zeros_like(ids))
        found.append(F.embedding(local, w["tokens"]) * mine.unsqueeze(-1))
    return [x + w["places"] for x, w in zip(summed(traffic, found), parts)]


def block(tiny: Tiny, parts: Sequence[Weights], given: Sequence[torch.Tensor], traffic: Traffic) -> list[torch.Tensor]:
    """A block on each rank: columns of its first products, rows of its second (arXiv:1909.08053, section 3)."""
    xs, heads = list(given), tiny.heads // len(parts)
    b, s, h = xs[0].shape
    normed = [F.layer_norm(x, (h,), w["norm1"], w["norm1_bias"]) for x, w in zip(xs, parts)]
    mixed = []
    for y, w in zip(spread(traffic, normed), parts):
        q, k, v = (F.linear(y, w[n]).view(b, s, heads, -1).transpose(1, 2) for n in "qkv")
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, -1)
        mixed.append(F.linear(z, w["mix"]))
    xs = [x + z + w["mix_bias"] for x, z, w in zip(xs, summed(traffic, mixed), parts)]
    normed = [F.layer_norm(x, (h,), w["norm2"], w["norm2_bias"]) for x, w in zip(xs, parts)]
    inner = [
        F.linear(F.gelu(F.linear(y, w["up"], w["up_bias"])), w["down"]) for y, w in zip(spread(traffic, normed), parts)
    ]
    return [x + z + w["down_bias"] for x, z, w in zip(xs, summed(traffic, inner), parts)]


def losses(
    parts: Sequence[Weights], xs: Sequence[torch.Tensor], labels: torch.Tensor, traffic: Traffic
) -> list[torch.Tensor]:
    """The mean loss on each rank, whose logits are a slice of the vocabulary: no rank has all of them."""
    each = parts[0]["words"].shape[0]
    h = xs[0].shape[-1]
    normed = [F.layer_norm(x, (h,), w["norm"], w["norm_bias"]) for x, w in zip(xs, parts)]
    logits = [F.linear(y, w["words"]) for y, w in zip(spread(traffic, normed), parts)]
    top = largest([z.detach().amax(-1) for z in logits])
    traffic.add("tp", len(parts), top.nbytes, passes=2)
    shifted = [z - top.unsqueeze(-1) for z in logits]
    sums = summed(traffic, [z.exp().sum(-1) for z in shifted])
    targets = []
    for rank, z in enumerate(shifted):
        mine = (labels >= rank * each) & (labels < (rank + 1) * each)
        local = torch.where(mine, labels - rank * each, torch.zeros_like(labels))
        targets.append(z.gather(-1, local.unsqueeze(-1)).squeeze(-1) * mine)
    return [(total.log() - t).mean() for total, t in zip(sums, summed(traffic, targets))]
