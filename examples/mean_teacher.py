"""Semi-supervised learning with a mean teacher (Tarvainen and Valpola, 2017): few labels, many points without, two
moons in the plane.

The teacher is the moving average of the student. deepc.EMA keeps it beside the student under ZeRO-3: every rank
averages the part of the weights that it owns, and the teacher's model lies once per node. Checkpoints of the engine
hold the teacher too: --out DIR --stop 300 leaves one at step 300, --out DIR --resume goes on from it."""

from __future__ import annotations

import math

import deepc
import torch
import torch.nn.functional as F
from example import config, draw, mean_over_ranks, mine, options, say
from torch import Tensor, nn

LABELLED = 6  # per moon


def moons(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """(points [count, 2], moon 0 or 1 [count])."""
    moon = torch.randint(2, (count,), generator=g)
    angle = math.pi * torch.rand(count, generator=g)
    x = torch.where(moon == 0, angle.cos(), 1 - angle.cos())
    y = torch.where(moon == 0, angle.sin(), 0.5 - angle.sin())
    return torch.stack((x, y), dim=1) + 0.08 * torch.randn(count, 2, generator=g), moon


def labelled(seed: int) -> tuple[Tensor, Tensor]:
    """The few points that have labels."""
    x, y = moons(200, draw(seed, -1))
    index = torch.cat([(y == k).nonzero().squeeze(1)[:LABELLED] for k in (0, 1)])
    return x[index], y[index]


def batch(seed: int, step: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(points without labels, and two noises for them, [size, 2] each)."""
    g = draw(seed, step)
    return moons(size, g)[0], 0.15 * torch.randn(size, 2, generator=g), 0.15 * torch.randn(size, 2, generator=g)


def make(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))


def train_step(
    student, average, few: tuple[Tensor, Tensor], points: Tensor, noise: Tensor, noise2: Tensor, weight: float
) -> tuple[float, float]:
    """student: engine; average: its EMA; weight: of the teacher's part. Returns (loss of the labels, disagreement with
    the teacher)."""
    dtype = next(student.parameters()).dtype
    with torch.no_grad():
        target = average.module((points + noise2).to(dtype)).float().softmax(dim=1)
    supervised = F.cross_entropy(student(few[0].to(dtype)).float(), few[1])
    disagreement = (student((points + noise).to(dtype)).float().softmax(dim=1) - target).square().sum(dim=1).mean()
    student.backward(supervised + weight * disagreement)
    student.step()
    average.update()
    return supervised.item(), disagreement.item()


@torch.no_grad()
def accuracy(model, seed: int) -> float:
    x, y = moons(2000, draw(seed, -3))
    return (model(x.to(next(model.parameters()).dtype)).argmax(dim=1) == y).float().mean().item()


def ramp(step: int, steps: int) -> float:
    """The teacher counts little while it knows little."""
    return 10.0 * min(1.0, step / (0.4 * steps))


def main() -> None:
    args = options(__doc__, steps=600, batch=256, out="", resume=False, stop=0)
    engine, *_ = deepc.initialize(model=make(args.seed), config=config(args, lr=3e-3, weight_decay=0.0))
    average = deepc.EMA(engine, decay=0.98, as_module=True)
    if args.resume:
        path, _ = engine.load_checkpoint(args.out)
        say(f"resumed at step {engine.global_steps} from {path}")
    few = labelled(args.seed)
    first = accuracy(average.module, args.seed)
    for step in range(engine.global_steps, args.stop or args.steps):
        loss, apart = train_step(
            engine, average, few, *mine(*batch(args.seed, step, args.batch)), ramp(step, args.steps)
        )
        if step % 100 == 0:
            say(
                f"step {step}: labels {mean_over_ranks(loss):.4f}, disagreement {mean_over_ranks(apart):.4f}, teacher's"
                f" accuracy {accuracy(average.module, args.seed):.1%}"
            )
    if args.out:
        engine.save_checkpoint(args.out)
    say(
        f"accuracy with {2 * LABELLED} labels: {first:.1%} before, student {accuracy(engine, args.seed):.1%}, teacher "
        f"{accuracy(average.module, args.seed):.1%} after"
    )


if __name__ == "__main__":
    main()
