"""A GAN on a mixture of six Gaussians in the plane: two engines, each with a model and an optimizer of its own.

The generator's loss goes through the critic. It reaches the critic's weights too, and their engine takes those
gradients, as autograd would leave them in `.grad`; critic.zero_grad() drops them, as in any GAN loop. Non-saturating
loss with R1 penalty (Mescheder et al., 2018).
"""

from __future__ import annotations

import math

import deepc
import torch
import torch.nn.functional as F
from example import config, draw, mean_over_ranks, mine, options, say
from torch import Tensor, nn

NOISE, MODES, SPREAD = 8, 6, 0.2
CENTRES = 2.0 * torch.tensor(
    [[math.cos(2 * math.pi * k / MODES), math.sin(2 * math.pi * k / MODES)] for k in range(MODES)]
)


def make(seed: int) -> tuple[nn.Module, nn.Module]:
    """(generator: noise [n, 8] -> points [n, 2], critic: points [n, 2] -> logits [n, 1])."""
    torch.manual_seed(seed)
    generator = nn.Sequential(nn.Linear(NOISE, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 2))
    critic = nn.Sequential(nn.Linear(2, 96), nn.LeakyReLU(0.2), nn.Linear(96, 96), nn.LeakyReLU(0.2), nn.Linear(96, 1))
    return generator, critic


def batch(seed: int, step: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(real points [size, 2], noise for the critic's turn and for the generator's [size, 8] each)."""
    g = draw(seed, step)
    real = CENTRES[torch.randint(MODES, (size,), generator=g)] + SPREAD * torch.randn(size, 2, generator=g)
    return real, torch.randn(size, NOISE, generator=g), torch.randn(size, NOISE, generator=g)


def train_step(
    generator, critic, real: Tensor, noise: Tensor, noise2: Tensor, penalty: float = 0.2
) -> tuple[float, float]:
    """One step of each. generator, critic: engines. Returns (critic's loss, generator's loss)."""
    with torch.no_grad():
        fake = generator(noise)
    real = real.to(fake.dtype).requires_grad_(True)
    on_real = critic(real)
    (slope,) = torch.autograd.grad(on_real.sum(), real, create_graph=True)
    loss = (
        F.softplus(-on_real).mean() + F.softplus(critic(fake)).mean() + penalty / 2 * slope.square().sum(dim=1).mean()
    )
    critic.backward(loss)
    critic.step()

    fooled = F.softplus(-critic(generator(noise2))).mean()
    generator.backward(fooled)
    generator.step()
    critic.zero_grad()  # what the generator's loss left there
    return loss.item(), fooled.item()


@torch.no_grad()
def quality(generator, seed: int = 0, n: int = 2000) -> tuple[float, int]:
    """(share of the points that lie within 3 spreads of a centre, centres that have at least a third of their fair
    share of them)."""
    points = generator(torch.randn(n, NOISE, generator=draw(seed, -1)).to(next(generator.parameters()).dtype)).float()
    distance, nearest = torch.cdist(points, CENTRES).min(dim=1)
    close = distance < 3 * SPREAD
    return close.float().mean().item(), int((torch.bincount(nearest[close], minlength=MODES) > n / MODES / 3).sum())


def main() -> None:
    args = options(__doc__, steps=800, batch=256)
    generator, critic = make(args.seed)
    adam = {"betas": [0.0, 0.99], "eps": 1e-8, "weight_decay": 0.0}
    critic_engine, *_ = deepc.initialize(model=critic, config=config(args, lr=2e-3, **adam))
    generator_engine, *_ = deepc.initialize(model=generator, config=config(args, lr=1e-3, **adam))
    first = quality(generator_engine)
    for step in range(args.steps):
        losses = train_step(generator_engine, critic_engine, *mine(*batch(args.seed, step, args.batch)))
        if step % 200 == 0:
            say(f"step {step}: critic {mean_over_ranks(losses[0]):.3f}, generator {mean_over_ranks(losses[1]):.3f}")
    last = quality(generator_engine)
    say(
        f"points near a centre: {first[0]:.1%} before, {last[0]:.1%} after; centres covered: {first[1]} before,"
        f" {last[1]} of {MODES} after"
    )


if __name__ == "__main__":
    main()
