"""Where a chain of layers is cut into stages."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

from ...errors import ArgumentError

METHODS = "uniform, parameters, type:REGEX, time"
ALIKE = 0.005  # of a stage's time, which clocks do not tell apart
_ROUNDING = 1e-12  # of sums in another order


def cut(costs: Sequence[float], stages: int, slack: float = 0.0) -> list[int]:
    """[0, ..., len(costs)]: stage s has the layers from cuts[s] to cuts[s + 1], at least one, so that the dearest stage
    is as cheap as can be, or dearer by the fraction slack at most; among such cuts, the one whose stages differ least
    (sum of squares), and of equal ones the first. Dynamic programming, O(stages x layers^2). ArgumentError for more
    stages than layers."""
    n = len(costs)
    if not 1 <= stages <= n:
        raise ArgumentError(
            f"{n} layer{'s' * (n != 1)} can't be cut into {stages} stages of at least one; use fewer stages"
        )
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)

    def least(cost_of: Callable[[float, float], float]) -> tuple[float, list[int]]:
        """The cut whose stages' costs, put together by cost_of(those before, next), are least."""
        # best[i]: (that, cuts) of the first i layers in the stages so far
        best: list[tuple[float, list[int]]] = [(0.0, [0])] + [(math.inf, [])] * n
        for stage in range(1, stages + 1):
            following: list[tuple[float, list[int]]] = [(math.inf, [])] * (n + 1)
            for end in range(stage, n - (stages - stage) + 1):
                for begin in range(stage - 1, end):
                    found = cost_of(best[begin][0], total[end] - total[begin])
                    if found < following[end][0]:
                        following[end] = found, [*best[begin][1], end]
            best = following
        return best[n]

    # the two are not one search: what is the dearest so far does not matter behind a dearer one
    bound = (1 + slack + _ROUNDING) * least(max)[0]
    return least(lambda before, cost: before + cost * cost if cost <= bound else math.inf)[1]


def costs_of(method: str, parameters: Sequence[int], names: Sequence[str]) -> list[float]:
    """What layers weigh by a method of METHODS but "time", which timed.py measures. parameters: how many each has;
    names: of their classes. ArgumentError for another method, or a REGEX that no class matches."""
    wanted = method.lower()
    if wanted == "uniform":
        return [1.0] * len(names)
    if wanted == "parameters":
        return [float(n) for n in parameters]
    if wanted.startswith("type:"):
        pattern = method.split(":", 1)[1]
        try:
            matches = [1.0 if re.search(pattern, name, re.IGNORECASE) else 0.0 for name in names]
        except re.error as exc:
            raise ArgumentError(f"partition_method={method!r}: {pattern!r} is no regular expression: {exc}") from None
        if not any(matches):
            raise ArgumentError(
                f"partition_method={method!r}: no layer's class matches {pattern!r}; there are"
                f" {', '.join(sorted(set(names)))}"
            )
        return matches
    raise ArgumentError(f"partition_method={method!r} does not exist; there are {METHODS}")
