"""Steps that were skipped one after the other: what there is to say of them, and when there is no use in going on.

A skipped step leaves the weights as they are. If those are not finite themselves, every further step is skipped too: it
is said which weight it is, and after some steps the run ends, on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...errors import NonFiniteError

if TYPE_CHECKING:
    from ..parameters.guard import Guard
    from ..state import ModelState


class Skips:
    """in_row: so many steps were skipped since the last that was applied. weight: the first parameter that was not
    finite when they began, or ""."""

    def __init__(self, most: int) -> None:
        """most: skipped steps in a row with weights that are not finite until NonFiniteError; 0: any number."""
        self._most = most
        self.in_row, self.weight = 0, ""

    def applied(self) -> None:
        """A step was, or other weights were loaded."""
        self.in_row, self.weight = 0, ""

    def skipped(self, reason: str, state: ModelState, guard: Guard) -> str:
        """The reason with all that is known of it. Looks at the weights at the first skip of a row, and again before
        end() would raise. Collective."""
        self.in_row += 1
        if self.in_row == 1 or (self.weight and self.in_row == self._most):
            self.weight = first_weight_not_finite(state, guard)
        return f"{reason}; the weights themselves are not finite: {self.weight}" if self.weight else reason

    @property
    def telling(self) -> bool:
        """Whether a line of the same reason tells something new: the 1st, 10th, 100th ... of a row."""
        return str(self.in_row).strip("0") == "1"

    def end(self) -> None:
        """Raises NonFiniteError if it is time, on all ranks alike."""
        if self.weight and self.in_row == self._most:
            raise NonFiniteError(
                f"the last {self._most} steps were skipped, and parameter '{self.weight}' is not finite: no step can"
                " mend that. Load a checkpoint from before, or find what wrote it (a bad initialization, a bad file, a"
                " learning rate that is too high); deepc.max_lost_steps = 0 goes on all the same"
            )


def first_weight_not_finite(state: ModelState, guard: Guard) -> str:
    """Name of a parameter, trained or frozen, that is not finite; "" if there is none. Every rank looks at its part.
    Collective."""
    plan, group = state.plan, guard.group
    own = (s.param for s in plan.segments if not _finite(state.flat[s.flat_begin : s.flat_begin + s.length]))
    found = next(own, -1)
    # Streamed parameters are read by all ranks together, others lie on every node.
    mine = range(len(state.frozen)) if plan.mode == "streamed" else range(group.rank, len(state.frozen), group.world)
    at = next((i for i in mine if not _finite(state.frozen_value(state.frozen[i][1]))), -1)
    if found < 0 <= at:
        found = len(state.names) + at
    everyone = group.gather_all(torch.tensor([found], dtype=torch.int64)).view(-1).tolist()
    found = min((f for f in everyone if f >= 0), default=-1)
    names = [*state.names, *(name for name, _ in state.frozen)]
    return names[found] if found >= 0 else ""


def _finite(values: torch.Tensor) -> bool:
    return not values.is_floating_point() or bool(torch.isfinite(values).all())
