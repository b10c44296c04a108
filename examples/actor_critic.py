"""Actor-critic on a game of its own, Catch: a ball falls through a grid, a paddle on the lowest row moves left, right
or not, and catches it or does not.

Two engines with two optimizers and one shared trunk: the actor's engine trains trunk and policy, the critic's engine
the value head alone. The critic's loss goes through the trunk, and what it leaves there is part of the actor's step.
With --separate the critic has a trunk of its own."""

from __future__ import annotations

import copy

import deepc
import torch
import torch.nn.functional as F
from example import config, draw, mean_over_ranks, mine, options, say
from torch import Tensor, nn

ROWS, COLUMNS, ACTIONS = 7, 6, 3
DISCOUNT = 0.97


class Head(nn.Module):
    """trunk, then a linear layer: [n, ROWS * COLUMNS] -> [n, outputs]."""

    def __init__(self, trunk: nn.Module, outputs: int) -> None:
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(64, outputs)
        nn.init.zeros_(self.head.weight)

    def forward(self, boards: Tensor) -> Tensor:
        return self.head(self.trunk(boards))


def make(seed: int, separate: bool = False) -> tuple[Head, Head]:
    """(actor, critic), with one trunk or with two that begin alike."""
    torch.manual_seed(seed)
    trunk = nn.Sequential(nn.Linear(ROWS * COLUMNS, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    return Head(trunk, ACTIONS), Head(copy.deepcopy(trunk) if separate else trunk, 1)


class Catch:
    """`games` games at once. ball, paddle, drift: int64 [games], columns; the ball drifts by -1, 0 or 1 column a row,
    and bounces off the walls."""

    def __init__(self, ball: Tensor, paddle: Tensor, drift: Tensor) -> None:
        self.ball, self.paddle, self.drift, self.row = ball.clone(), paddle.clone(), drift.clone(), 0

    def boards(self) -> Tensor:
        """[games, ROWS * COLUMNS], 1 where the ball is, -1 where the paddle is."""
        out = torch.zeros(len(self.ball), ROWS, COLUMNS)
        games = torch.arange(len(self.ball))
        out[games, self.row, self.ball] = 1.0
        out[games, ROWS - 1, self.paddle] -= 1.0
        return out.flatten(1)

    def act(self, actions: Tensor) -> Tensor:
        """Actions 0, 1, 2: left, stay, right. Returns the rewards [games]: 1 or -1 when the ball is down, else 0."""
        self.paddle = (self.paddle + actions - 1).clamp(0, COLUMNS - 1)
        wall = (self.ball + self.drift < 0) | (self.ball + self.drift >= COLUMNS)
        self.drift = torch.where(wall, -self.drift, self.drift)
        self.ball, self.row = self.ball + self.drift, self.row + 1
        if self.row < ROWS - 1:
            return torch.zeros(len(self.ball))
        return torch.where(self.ball == self.paddle, 1.0, -1.0)


def starts(seed: int, step: int, games: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(ball, paddle, drift [games], uniform numbers [games, ROWS - 1] that choose the actions)."""
    g = draw(seed, step)
    ball, paddle = (torch.randint(COLUMNS, (games,), generator=g) for _ in range(2))
    return ball, paddle, torch.randint(-1, 2, (games,), generator=g), torch.rand(games, ROWS - 1, generator=g)


@torch.no_grad()
def play(actor, ball: Tensor, paddle: Tensor, drift: Tensor, chance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A game each. Returns (boards [moves, games, ROWS * COLUMNS], actions and discounted returns [moves, games])."""
    game = Catch(ball, paddle, drift)
    dtype = next(actor.parameters()).dtype
    boards, actions = [], []
    for move in range(ROWS - 1):
        boards.append(game.boards().to(dtype))
        chosen = (
            (actor(boards[-1]).float().softmax(dim=1).cumsum(dim=1) < chance[:, move : move + 1])
            .sum(dim=1)
            .clamp_max(ACTIONS - 1)
        )
        actions.append(chosen)
        reward = game.act(chosen)
    returns = [reward * DISCOUNT ** (ROWS - 2 - move) for move in range(ROWS - 1)]
    return torch.stack(boards), torch.stack(actions), torch.stack(returns)


def train_step(
    actor, critic, ball: Tensor, paddle: Tensor, drift: Tensor, chance: Tensor
) -> tuple[float, float, float]:
    """One game each, one step of both engines. Returns (policy loss, value loss, share of the balls caught)."""
    boards, actions, returns = play(actor, ball, paddle, drift, chance)
    boards, actions, flat = boards.flatten(0, 1), actions.flatten(), returns.flatten()
    value = critic(boards).squeeze(1).float()
    value_loss = F.mse_loss(value, flat)
    critic.backward(value_loss)

    logp = actor(boards).float().log_softmax(dim=1)
    advantage = flat - value.detach()
    entropy = -(logp.exp() * logp).sum(dim=1).mean()
    policy_loss = -(advantage * logp.gather(1, actions[:, None]).squeeze(1)).mean() - 0.01 * entropy
    actor.backward(policy_loss)
    critic.step()
    actor.step()
    return policy_loss.item(), value_loss.item(), (returns[-1] > 0).float().mean().item()


def main() -> None:
    args = options(__doc__, steps=400, batch=256, separate=False)
    actor, critic = make(args.seed, args.separate)
    actor_engine, *_ = deepc.initialize(model=actor, config=config(args, lr=3e-3, weight_decay=0.0))
    heads = critic.parameters() if args.separate else critic.head.parameters()
    critic_engine, *_ = deepc.initialize(
        model=critic, model_parameters=heads, config=config(args, lr=3e-3, weight_decay=0.0)
    )
    caught = []
    for step in range(args.steps):
        policy_loss, value_loss, share = train_step(
            actor_engine, critic_engine, *mine(*starts(args.seed, step, args.batch))
        )
        caught.append(mean_over_ranks(share))
        if step % 50 == 0:
            say(f"step {step}: policy {policy_loss:.3f}, value {value_loss:.3f}, caught {caught[-1]:.1%}")
    say(f"caught: {caught[0]:.1%} of the balls before, {sum(caught[-10:]) / 10:.1%} after")


if __name__ == "__main__":
    main()
