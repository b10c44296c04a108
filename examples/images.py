"""An image classifier: a small convolutional network on pictures of the ten digits.

The pictures are made here: 5 x 3 glyphs, enlarged, shifted, of random contrast, under noise. With --data digits they
are scikit-learn's 8 x 8 scans of handwriting, where that package is installed."""

from __future__ import annotations

import deepc
import torch
import torch.nn.functional as F
from example import config, draw, mean_over_ranks, mine, options, say
from torch import Tensor, nn

SIDE = 16
_GLYPHS = [
    "111101101101111",
    "010110010010111",
    "111001111100111",
    "111001111001111",
    "101101111001001",
    "111100111001111",
    "111100111101111",
    "111001001001001",
    "111101111101111",
    "111101111001111",
]
GLYPHS = torch.tensor([[float(c) for c in g] for g in _GLYPHS]).view(10, 1, 5, 3)


def pictures(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """(pictures [count, 1, 16, 16], digits int64 [count])."""
    digits = torch.randint(10, (count,), generator=g)
    large = GLYPHS[digits].repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)  # 10 x 6
    canvas = torch.zeros(count, 1, SIDE, SIDE)
    top, left = torch.randint(SIDE - 9, (count,), generator=g), torch.randint(SIDE - 5, (count,), generator=g)
    rows, columns = top[:, None] + torch.arange(10), left[:, None] + torch.arange(6)
    canvas[torch.arange(count)[:, None, None], 0, rows[:, :, None], columns[:, None, :]] = large[:, 0]
    contrast = 0.5 + torch.rand(count, 1, 1, 1, generator=g)
    return canvas * contrast + 0.4 * torch.randn(canvas.shape, generator=g), digits


class Pictures:
    """Batches by step, and a set to test on that is never trained on."""

    def __init__(self, data: str, seed: int) -> None:
        self.seed, self.scans = seed, None
        if data == "digits":
            from sklearn.datasets import load_digits

            images, digits = (torch.as_tensor(x) for x in load_digits(return_X_y=True))
            images = F.interpolate(images.float().view(-1, 1, 8, 8) / 16, size=(SIDE, SIDE))
            order = torch.randperm(len(digits), generator=draw(0, 0))
            self.scans = images[order], digits.long()[order]
            self.test = tuple(t[:300] for t in self.scans)
        else:
            self.test = pictures(1000, draw(seed, -1))

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        if self.scans is None:
            return pictures(size, draw(self.seed, step))
        index = torch.randint(300, len(self.scans[0]), (size,), generator=draw(self.seed, step))
        return self.scans[0][index], self.scans[1][index]


class Net(nn.Module):
    """[n, 1, 16, 16] -> logits [n, 10]. Three residual stages; GroupNorm, so that a picture's result does not depend on
    its batch."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.GroupNorm(4, width),
                nn.SiLU(),
                nn.Conv2d(width, width, 3, padding=1),
                nn.GroupNorm(4, width),
                nn.SiLU(),
                nn.Conv2d(width, width, 3, padding=1),
            )
            for _ in range(3)
        )
        self.head = nn.Linear(width * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for i, block in enumerate(self.blocks):  # noqa: B007
            h = h + block(h)
            h = F.max_pool2d(h, 2)
        return self.head(h.flatten(1))


def make(seed: int, width: int = 16) -> Net:
    torch.manual_seed(seed)
    return Net(width)


def train_step(engine, x: Tensor, y: Tensor) -> float:
    loss = F.cross_entropy(engine(x.to(next(engine.parameters()).dtype)).float(), y)
    engine.backward(loss)
    engine.step()
    return loss.item()


@torch.no_grad()
def accuracy(model, x: Tensor, y: Tensor) -> float:
    model.eval()
    right = (model(x.to(next(model.parameters()).dtype)).argmax(dim=1) == y).float().mean().item()
    model.train()
    return right


def main() -> None:
    args = options(__doc__, steps=200, batch=128, data="glyphs")
    data = Pictures(args.data, args.seed)
    engine, *_ = deepc.initialize(model=make(args.seed), config=config(args, lr=3e-3))
    first = accuracy(engine, *data.test)
    for step in range(args.steps):
        loss = mean_over_ranks(train_step(engine, *mine(*data.batch(step, args.batch))))
        if step % 50 == 0:
            say(f"step {step}: loss {loss:.3f}")
    say(f"accuracy on {len(data.test[0])} pictures: {first:.1%} before, {accuracy(engine, *data.test):.1%} after")


if __name__ == "__main__":
    main()
