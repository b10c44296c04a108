"""When the variance is frozen: after a given step, or when it has become stable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...errors import ArgumentError

AUTO = "auto"
STABLE = 0.96  # what arXiv:2102.02888 takes
PARTS = 8  # looks at the norm so many times in 1 / (1 - beta2) steps


def check_freeze_step(name: str, value: Any, auto: bool = True) -> None:
    """ArgumentError unless it is a number of steps, or "auto" where that is possible."""
    if auto and value == AUTO:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArgumentError(f"{name}={value!r}: a number of steps, at least 1{', or auto' if auto else ''}")


class Freeze:
    """freeze_step: the last step of the warm-up. "auto": the norm ||v_t||_1, divided by its bias correction, has
    changed by less than 1 - `stable` in the last 1 / (1 - beta2) steps (the 1-bit Adam paper's rule; it asks for a
    ratio of at least 0.96 to v_(t-1/(1-beta2)) without the correction, which a v that still grows from zero passes at
    once)."""

    def __init__(self, freeze_step: int | str, beta2: float, stable: float = STABLE) -> None:
        self.step, self._beta2, self._stable = freeze_step, beta2, stable
        lag = max(1, round(1 / (1 - beta2)))
        self.every = max(1, lag // PARTS)
        self._parts = max(1, round(lag / self.every))
        self.norms: list[float] = []

    def due(self, steps: int, norm: Callable[[], float]) -> bool:
        """After step number `steps`. norm: ||v||_1, the same on all ranks; asked for now and then, collective."""
        if self.step != AUTO:
            return steps >= int(self.step)
        if steps % self.every:
            return False
        self.norms = [*self.norms, norm() / (1 - self._beta2**steps)][-self._parts - 1 :]
        if len(self.norms) <= self._parts or not self.norms[0] > 0:
            return False
        ratio = self.norms[-1] / self.norms[0]
        return min(ratio, 1 / ratio) >= self._stable if ratio > 0 else False

    @property
    def why(self) -> str:
        if self.step != AUTO:
            return f"freeze_step {self.step}"
        return (
            f"freeze_step auto: the variance's norm changed by {abs(self.norms[-1] / self.norms[0] - 1):.1%} in the"
            f" last {self._parts * self.every} steps"
        )
