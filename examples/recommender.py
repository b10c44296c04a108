"""A recommender: will this user click on this item? Embedding tables with sparse gradients, bags of items that a user
liked before, dense features.

The clicks are made here from hidden tastes: items are popular by a power law, and a user clicks on what lies near the
own taste. The tables have sparse=True, as they would under torch's Adagrad; deepc makes the gradients dense when it
reduces them, and with Adagrad a row without a gradient stays as it is."""

from __future__ import annotations

import deepc
import torch
import torch.nn.functional as F
from example import config, draw, mean_over_ranks, mine, options, say
from torch import Tensor, nn

ITEMS, TASTE, HISTORY, DENSE = 20_000, 8, 12, 4


class World:
    """Hidden tastes. item_taste: [ITEMS, TASTE]."""

    def __init__(self, seed: int) -> None:
        self.seed, g = seed, draw(seed, -1)
        self.item_taste = torch.randn(ITEMS, TASTE, generator=g)
        self.popularity = (1.0 / torch.arange(1, ITEMS + 1)).cumsum(0)

    def _items(self, shape: tuple[int, ...], g: torch.Generator) -> Tensor:
        return torch.searchsorted(self.popularity, torch.rand(shape, generator=g) * self.popularity[-1]).clamp_max(
            ITEMS - 1
        )

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(history int64 [size, HISTORY], items that the user liked; item int64 [size]; dense [size, DENSE]; clicked
        fp32 [size])."""
        g = draw(self.seed, step)
        taste = torch.randn(size, TASTE, generator=g)
        seen = self._items((size, 4 * HISTORY), g)
        liked = (self.item_taste[seen] * taste[:, None]).sum(-1).topk(HISTORY, dim=1).indices
        item = self._items((size,), g)
        dense = torch.randn(size, DENSE, generator=g)
        logit = 0.8 * (self.item_taste[item] * taste).sum(-1) + 0.5 * dense[:, 0]
        return seen.gather(1, liked), item, dense, (torch.rand(size, generator=g) < logit.sigmoid()).float()


class Recommender(nn.Module):
    """Logits [n] of a click: the mean of the history's vectors and the item's vector, multiplied; and a network over
    both and the dense features."""

    def __init__(self, width: int = 16, sparse: bool = True) -> None:
        super().__init__()
        self.history = nn.EmbeddingBag(ITEMS, width, mode="mean", sparse=sparse)
        self.item = nn.Embedding(ITEMS, width, sparse=sparse)
        self.net = nn.Sequential(nn.Linear(2 * width + DENSE, 32), nn.ReLU(), nn.Linear(32, 1))
        for table in (self.history, self.item):
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, history: Tensor, item: Tensor, dense: Tensor) -> Tensor:
        user, thing = self.history(history), self.item(item)
        return (user * thing).sum(-1) + self.net(torch.cat((user, thing, dense.to(user.dtype)), dim=-1)).squeeze(-1)


def make(seed: int, sparse: bool = True) -> Recommender:
    torch.manual_seed(seed)
    return Recommender(sparse=sparse)


def train_step(engine, history: Tensor, item: Tensor, dense: Tensor, clicked: Tensor) -> float:
    loss = F.binary_cross_entropy_with_logits(engine(history, item, dense).float(), clicked)
    engine.backward(loss)
    engine.step()
    return loss.item()


@torch.no_grad()
def auc(model, history: Tensor, item: Tensor, dense: Tensor, clicked: Tensor) -> float:
    """Area under the ROC curve: the probability that a click ranks above what was not clicked."""
    rank = torch.empty(len(clicked), dtype=torch.float64)
    rank[model(history, item, dense).float().argsort()] = torch.arange(1, len(clicked) + 1, dtype=torch.float64)
    positive, n = clicked.bool(), int(clicked.sum())
    return ((rank[positive].sum() - n * (n + 1) / 2) / (n * (len(clicked) - n))).item()


def main() -> None:
    args = options(__doc__, steps=250, batch=2048)
    world = World(args.seed)
    engine, *_ = deepc.initialize(model=make(args.seed), config=config(args, "Adagrad", lr=0.05))
    test = world.batch(-2, 8192)
    first = auc(engine, *test)
    for step in range(args.steps):
        loss = mean_over_ranks(train_step(engine, *mine(*world.batch(step, args.batch))))
        if step % 50 == 0:
            say(f"step {step}: loss {loss:.4f}")
    say(f"area under the ROC curve: {first:.3f} before, {auc(engine, *test):.3f} after")


if __name__ == "__main__":
    main()
