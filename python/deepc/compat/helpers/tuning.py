"""deepspeed.add_tuning_arguments: command-line arguments of the learning-rate schedules (DeepSpeed's names and
defaults)."""

from __future__ import annotations

import argparse

_ARGUMENTS: tuple[tuple[str, type, object, str], ...] = (
    ("lr_schedule", str, None, "LR schedule for training."),
    ("lr_range_test_min_lr", float, 0.001, "Starting lr value."),
    ("lr_range_test_step_rate", float, 1.0, "Scaling rate for LR range test."),
    ("lr_range_test_step_size", int, 1000, "Training steps per LR change."),
    ("lr_range_test_staircase", bool, False, "Use staircase scaling for LR range test."),
    ("cycle_first_step_size", int, 1000, "Size of first step of 1Cycle schedule (training steps)."),
    ("cycle_first_stair_count", int, -1, "First stair count for 1Cycle schedule."),
    ("cycle_second_step_size", int, -1, "Size of second step of 1Cycle schedule (default first_step_size)."),
    ("cycle_second_stair_count", int, -1, "Second stair count for 1Cycle schedule."),
    ("decay_step_size", int, 1000, "Size of intervals for applying post cycle decay (training steps)."),
    ("cycle_min_lr", float, 0.01, "1Cycle LR lower bound."),
    ("cycle_max_lr", float, 0.1, "1Cycle LR upper bound."),
    ("decay_lr_rate", float, 0.0, "Post cycle LR decay rate."),
    ("cycle_momentum", bool, False, "Enable 1Cycle momentum schedule."),
    ("cycle_min_mom", float, 0.8, "1Cycle momentum lower bound."),
    ("cycle_max_mom", float, 0.9, "1Cycle momentum upper bound."),
    ("decay_mom_rate", float, 0.0, "Post cycle momentum decay rate."),
    ("warmup_min_lr", float, 0.0, "WarmupLR minimum/initial LR value"),
    ("warmup_max_lr", float, 0.001, "WarmupLR maximum LR value."),
    ("warmup_num_steps", int, 1000, "WarmupLR step count for LR warmup."),
    ("warmup_type", str, "log", "WarmupLR increasing function during warmup"),
    ("warmup_min_ratio", float, 0.01, "Cosine LR lower bound."),
    ("cos_min_ratio", float, 0.01, "Cosine LR lower bound."),
)


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds them to `parser` and returns it."""
    group = parser.add_argument_group("Convergence Tuning", "Convergence tuning configurations")
    for name, kind, default, text in _ARGUMENTS:
        if kind is bool:
            group.add_argument(f"--{name}", default=default, action="store_true", help=text)
        else:
            group.add_argument(f"--{name}", type=kind, default=default, help=text)
    return parser
