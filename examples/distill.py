"""Distillation: a small network learns from a large one, and never sees a label.

The teacher is trained first, as in images.py, and then frozen into the student's model. Under ZeRO-3 it lies once per
node beside the student's weights, in the same precision, and has no gradients, masters or optimizer states: it costs
its weights alone. (deepc.inference(teacher, stage=3) keeps a teacher that is not part of a model in the same way.)"""

from __future__ import annotations

import copy

import deepc
import torch
import torch.nn.functional as F
from example import config, mean_over_ranks, mine, options, say
from images import Net, Pictures, accuracy
from images import make as make_net
from images import train_step as train_teacher
from torch import Tensor, nn

TEMPERATURE = 2.0


class Distilled(nn.Module):
    """student and frozen teacher. forward(pictures) -> the student's distance from the teacher: KL(teacher, student) at
    a temperature, in nats."""

    def __init__(self, student: nn.Module, teacher: nn.Module) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x).float()
        said = (self.student(x).float() / TEMPERATURE).log_softmax(dim=1)
        return TEMPERATURE**2 * F.kl_div(
            said, (target / TEMPERATURE).log_softmax(dim=1), log_target=True, reduction="batchmean"
        )


def make_student(seed: int) -> Net:
    return make_net(seed + 1, width=8)


def train_step(engine, x: Tensor) -> float:
    loss = engine(x.to(next(engine.parameters()).dtype))
    engine.backward(loss)
    engine.step()
    return loss.item()


def taught(args, data: Pictures) -> Net:
    """A trained teacher, with memory of its own."""
    engine, *_ = deepc.initialize(model=make_net(args.seed), config=config(args, lr=3e-3))
    for step in range(args.teacher_steps):
        train_teacher(engine, *mine(*data.batch(step, args.batch)))
    teacher = copy.deepcopy(engine.module)
    engine.destroy()
    return teacher


def main() -> None:
    args = options(__doc__, steps=250, batch=64, data="glyphs", teacher_steps=200)
    data = Pictures(args.data, args.seed)
    teacher = taught(args, data)
    model = Distilled(make_student(args.seed), teacher)
    engine, *_ = deepc.initialize(model=model, config=config(args, lr=5e-3))
    frozen = sum(p.numel() for p in teacher.parameters())
    say(
        f"teacher: {frozen:,} weights, accuracy {accuracy(model.teacher, *data.test):.1%}; student: "
        f"{sum(p.numel() for p in model.student.parameters()):,} weights"
    )
    first = accuracy(model.student, *data.test)
    for step in range(args.steps):
        loss = mean_over_ranks(train_step(engine, *mine(data.batch(10_000 + step, args.batch)[0])))
        if step % 50 == 0:
            say(f"step {step}: distance from the teacher {loss:.3f}")
    say(
        f"the student's accuracy, taught without labels: {first:.1%} before, {accuracy(model.student, *data.test):.1%}"
        " after"
    )


if __name__ == "__main__":
    main()
