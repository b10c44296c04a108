"""The tiny GPT as one process has it, in plain PyTorch: what virtual ranks are compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from .model import BALANCE, Tiny, Weights

CLIP, LR, DECAY = 1.0, 1e-3, 0.01
Gradients = dict[str, dict[str, torch.Tensor]]


def alone(
    tiny: Tiny, batches: Sequence[tuple[torch.Tensor, torch.Tensor]], parts: int = 1
) -> tuple[list[float], Gradients]:
    """(losses, gradients of the first step before clipping) of steps on [dp, micro-batches, samples, seq] tokens.
    parts: of a sequence, in each of which experts have places of their own."""
    weights = {k: {n: w.requires_grad_() for n, w in v.items()} for k, v in tiny.made().items()}
    every = [w for v in weights.values() for w in v.values()]
    optimizer = torch.optim.AdamW(every, lr=LR, weight_decay=DECAY)
    out: list[float] = []
    gradients: Gradients = {}
    for ids, labels in batches:
        loss = whole_loss(tiny, weights, ids.flatten(0, 1), labels.flatten(0, 1), parts)
        loss.backward()
        if not out:
            gradients = {k: {n: w.grad.clone() for n, w in v.items() if w.grad is not None} for k, v in weights.items()}
        torch.nn.utils.clip_grad_norm_(every, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        out.append(loss.item())
    return out, gradients


def whole_loss(
    tiny: Tiny, weights: Mapping[str, Weights], ids: torch.Tensor, labels: torch.Tensor, parts: int
) -> torch.Tensor:
    """Mean loss of [micro-batches, samples, seq] tokens."""
    w = weights["embed"]
    x = F.embedding(ids.flatten(0, 1), w["tokens"]) + w["places"]
    b, s, h = x.shape
    balance = x.new_zeros(())
    for i in range(tiny.layers):
        w = weights[str(i)]
        y = F.layer_norm(x, (h,), w["norm1"], w["norm1_bias"])
        q, k, v = (F.linear(y, w[n]).view(b, s, tiny.heads, -1).transpose(1, 2) for n in "qkv")
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, h)
        x = x + F.linear(mixed, w["mix"], w["mix_bias"])
        y = F.layer_norm(x, (h,), w["norm2"], w["norm2_bias"])
        if tiny.experts:
            # a gate sees the positions of a rank in a micro-batch
            calls = y.view(len(ids), -1, parts, s // parts, h).transpose(1, 2).flatten(0, 1)
            out, loss = _mixture(tiny, w, calls.flatten(1, 2), parts)
            out = out.view(calls.shape).unflatten(0, (len(ids), parts)).transpose(1, 2)
            x, balance = x + out.reshape(b, s, h), balance + loss
        else:
            x = x + F.linear(F.gelu(F.linear(y, w["up"], w["up_bias"])), w["down"], w["down_bias"])
    w = weights["head"]
    logits = F.linear(F.layer_norm(x, (h,), w["norm"], w["norm_bias"]), w["words"])
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + BALANCE * balance


def _mixture(tiny: Tiny, w: Weights, x: torch.Tensor, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, mean load-balance loss, of `parts` calls together) of [calls, tokens, hidden], with masks of tokens x
    experts (arXiv:2006.16668, algorithm 1; arXiv:2101.03961, section 2.2): each expert computes all tokens, and counts
    where it was chosen and had a place."""
    probabilities = F.linear(x, w["gate"]).softmax(-1)
    order = probabilities.argsort(-1, descending=True)
    counted = torch.zeros_like(probabilities)
    taken = torch.zeros_like(probabilities[:, :1])
    first = F.one_hot(order[..., 0], tiny.experts).to(x.dtype)
    for j in range(tiny.top):
        chosen = F.one_hot(order[..., j], tiny.experts).to(x.dtype)
        place = chosen.cumsum(1) - 1 + taken
        taken = taken + chosen.sum(1, keepdim=True)
        counted = counted + probabilities * chosen * (place < tiny.places(x.shape[1]))
    if tiny.top > 1:
        counted = counted / counted.sum(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).eps)
    out = torch.zeros_like(x)
    for e in range(tiny.experts):
        inner = F.gelu(F.linear(x, w["up"][e], w["up_bias"][e]))
        out = out + F.linear(inner, w["down"][e], w["down_bias"][e]) * counted[..., e : e + 1]
    probabilities, first = (t.unflatten(0, (-1, parts)).flatten(1, 2).mean(1) for t in (probabilities, first))
    return out, tiny.experts * (probabilities * first).sum(-1).mean()
