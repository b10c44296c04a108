"""A small GPT over bytes: pre-norm blocks, causal attention, tied embedding. Plain PyTorch; it knows nothing of deepc.

Owns the model and nothing else. `forward(x, y)` returns the loss, `forward(x)` the logits, so that one module serves
training (`loss = engine(x, y)`), evaluation and sampling."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # every byte is a token


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a model. `width` must be a multiple of `heads`; `context` is the longest sequence in tokens."""

    layers: int = 6
    width: int = 384
    heads: int = 6
    context: int = 256


# What `--size` chooses from. Parameters: tiny 0.1 M, small 3.3 M, base 10.8 M, large 25.4 M.
SIZES = {
    "tiny": GPTConfig(layers=2, width=64, heads=2, context=64),
    "small": GPTConfig(layers=4, width=256, heads=4, context=256),
    "base": GPTConfig(),
    "large": GPTConfig(layers=8, width=512, heads=8, context=256),
}


def look_back(x: Tensor) -> Tensor:
    """Half of the channels come from the token before. (batch, tokens, width) -> the same shape.

    Bytes are short tokens: which pair of them stands here is what a model must learn first, and with this it need not
    learn it by attention. (Token shift: Peng et al., 2023, RWKV.) Validation after 256 k tokens: 2.83 bits per byte,
    without it 3.53.
    """
    own, before = x.chunk(2, dim=-1)
    return torch.cat((own, F.pad(before, (0, 0, 1, -1))), dim=-1)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), on (batch, tokens, width); both look one token back."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.width // config.heads
        self.norm1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def attention(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, -1, self.head_dim)  # -1: the heads that are here of a cut model
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, tokens, -1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(look_back(self.norm1(x)))
        return x + self.down(F.gelu(self.up(look_back(self.norm2(x))), approximate="tanh"))


class GPT(nn.Module):
    """Byte-level language model (Radford et al., 2019: GPT-2, with its initialisation)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self._initialise)
        for block in self.blocks:  # the residual stream adds 2 * layers terms: keep its variance at one
            for linear in (block.proj, block.down):
                nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * config.layers))

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """x, y: int64 (batch, tokens <= context). Without y: logits (batch, tokens, 256); with it: the mean
        cross-entropy of y in nats, in fp32."""
        place = torch.arange(x.shape[1], device=x.device)
        h = self.tokens(x) + self.positions(place)
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))
        if y is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: bytes,
    length: int,
    *,
    context: int,
    device: torch.device | str = "cpu",
    seed: int = 0,
    temperature: float = 0.8,
    top_k: int = 40,
) -> bytes:
    """Continues `prompt` by `length` bytes drawn at `temperature` from the `top_k` likeliest. The same seed gives the
    same text."""
    draw = torch.Generator().manual_seed(seed)
    text = list(prompt or b"\n")
    for _ in range(length):
        x = torch.tensor([text[-context:]], dtype=torch.int64, device=device)
        logits = model(x)[0, -1].float().cpu() / temperature
        best, index = logits.topk(top_k)
        text.append(int(index[torch.multinomial(best.softmax(0), 1, generator=draw)]))
    return bytes(text)
