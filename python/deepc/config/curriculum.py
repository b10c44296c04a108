"""Schedules of a curriculum: how difficult (how long) samples are at a step, with DeepSpeed's names and values.

Sequence-length warmup: C. Li et al., "The Stability-Efficiency Dilemma" (arXiv:2108.06084). A value is a pure function
of the step, but for a schedule of the user's own; one that has reached the most difficulty stays there."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ConfigError

SCHEDULES = ("fixed_linear", "fixed_root", "fixed_discrete", "custom")
_NEEDS = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
    "custom": (),
}


class CurriculumScheduler:
    """config: min_difficulty, max_difficulty, schedule_type and its schedule_config, as in DeepSpeed:

    fixed_linear, fixed_root: min + (max - min) * (step / total_curriculum_step) ** (1 / root_degree), rounded down to
    a multiple of difficulty_step, at most max. fixed_discrete: difficulty[i] up to step max_step[i], the last behind.
    custom: set_custom_get_difficulty(function of the step). ConfigError names what is missing or wrong.

    state: a dict that a checkpoint can hold, with "current_difficulty"."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        for name in ("min_difficulty", "max_difficulty", "schedule_type"):
            if config.get(name) is None:
                raise ConfigError(f"a curriculum needs {name}; add it")
        self.kind = config["schedule_type"]
        if self.kind not in SCHEDULES:
            raise ConfigError(f"schedule_type {self.kind!r} must be one of {', '.join(SCHEDULES)}")
        self.custom_get_difficulty: Callable[[int], Any] | None = None
        self.first_step = True
        self.state: dict[str, Any] = {
            "min_difficulty": _whole("min_difficulty", config["min_difficulty"]),
            "max_difficulty": _whole("max_difficulty", config["max_difficulty"]),
            "current_difficulty": config["min_difficulty"],
            "schedule_type": self.kind,
        }
        if self.state["max_difficulty"] < self.state["min_difficulty"]:
            raise ConfigError(
                f"max_difficulty {config['max_difficulty']} is below min_difficulty {config['min_difficulty']}"
            )
        if self.kind != "custom":
            self.state["schedule_config"] = _checked(self.kind, config.get("schedule_config"))

    def get_current_difficulty(self) -> Any:
        return self.state["current_difficulty"]

    def set_current_difficulty(self, difficulty: Any) -> None:
        self.state["current_difficulty"] = difficulty

    def set_custom_get_difficulty(self, schedule_function: Callable[[int], Any]) -> None:
        """The schedule of type custom: the difficulty of a step; the first is 1."""
        self.custom_get_difficulty = schedule_function

    def get_state(self) -> dict[str, Any]:
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        self.state = state

    def get_difficulty(self, global_steps: int) -> Any:
        """Of a step, whatever was before. ConfigError: a custom schedule that nobody has given."""
        if self.kind == "custom":
            if self.custom_get_difficulty is None:
                raise ConfigError(
                    "a curriculum of schedule_type custom has no schedule yet; call"
                    " engine.set_custom_curriculum_learning_schedule(function) before the first step"
                )
            return self.custom_get_difficulty(global_steps)
        how = self.state["schedule_config"]
        if self.kind == "fixed_discrete":
            return next(
                (d for d, end in zip(how["difficulty"], how["max_step"]) if global_steps <= end), how["difficulty"][-1]
            )
        least, most = self.state["min_difficulty"], self.state["max_difficulty"]
        degree = how["root_degree"] if self.kind == "fixed_root" else 1
        part = (float(global_steps) / how["total_curriculum_step"]) ** (1.0 / degree)
        value = math.floor(part * (most - least) + least)
        return min(value - value % how["difficulty_step"], most)

    def update_difficulty(self, global_steps: int) -> Any:
        """Goes to the difficulty of a step, unless the most has been reached."""
        if self.state["current_difficulty"] < self.state["max_difficulty"]:
            self.state["current_difficulty"] = self.get_difficulty(global_steps)
        return self.state["current_difficulty"]


def _checked(kind: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise ConfigError(f"schedule_config {given!r} must be an object with {', '.join(_NEEDS[kind])}")
    for name in _NEEDS[kind]:
        if name not in given:
            raise ConfigError(f"a {kind} curriculum needs schedule_config.{name}; add it")
    if kind == "fixed_discrete":
        for name in ("difficulty", "max_step"):
            if not isinstance(given[name], (list, tuple)) or not given[name]:
                raise ConfigError(f"schedule_config.{name} {given[name]!r} must be a list of integers")
            for value in given[name]:
                _whole(f"schedule_config.{name}", value)
        if len(given["difficulty"]) != len(given["max_step"]) + 1:
            raise ConfigError(
                f"schedule_config.difficulty has {len(given['difficulty'])} values and max_step"
                f" {len(given['max_step'])}: it needs one less, since the last difficulty stays"
            )
        return dict(given)
    for name in _NEEDS[kind]:
        if name == "root_degree":
            if isinstance(given[name], bool) or not isinstance(given[name], (int, float)) or not given[name] > 0:
                raise ConfigError(f"schedule_config.root_degree {given[name]!r} must be a number above 0")
        else:
            _whole(f"schedule_config.{name}", given[name], 1)
    return dict(given)


def _whole(name: str, value: Any, least: int = 0) -> Any:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} {value!r} must be an integer >= {least}")
    return value
