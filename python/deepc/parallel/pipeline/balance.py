"""Where a chain of layers is cut into stages."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from operator import add

from ...errors import ArgumentError

METHODS = "uniform, parameters, type:REGEX, time"
ALIKE = 0.005  # of a stage's time, which clocks do not tell apart
_ROUNDING = 1e-12  # of sums in another order


def cut(costs: Sequence[float], stages: int, slack: float = 0.0) -> list[int]:
    """[0, ..., len(costs)]: stage s has the layers from cuts[s] to cuts[s + 1], at least one, so that the dearest stage
    is as cheap as can be, or dearer by the fraction slack at most; among such cuts, the one whose stages differ least
    (sum of squares), and of equal ones the first. Dynamic programming over the cuts that the dearest stage leaves:
    O(stages x layers x layers of such a stage). ArgumentError for more stages than layers, and for a cost that is
    negative or not finite."""
    n = len(costs)
    if not 1 <= stages <= n:
        raise ArgumentError(
            f"{n} layer{'s' * (n != 1)} can't be cut into {stages} stages of at least one; use fewer stages"
        )
    for i, cost in enumerate(costs):
        if not 0 <= cost < math.inf:
            raise ArgumentError(f"layer {i} can't cost {cost}: costs are finite and at least 0")
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    bound = (1 + slack + _ROUNDING) * _dearest(total, stages)

    # The two are not one search: what is the dearest so far does not matter behind a dearer one.
    # least[s][end]: the sum of squares of the first `end` layers in s stages
    least = [[0.0] + [math.inf] * n] + [[math.inf] * (n + 1) for _ in range(stages)]
    first = 0  # where a stage that ends at `end` begins at the earliest

    def squares(first: int, end: int) -> list[float]:
        return [cost * cost for cost in map(total[end].__sub__, total[first:end])]

    starts = [0] * (n + 1)
    for end in range(1, n + 1):
        while total[end] - total[first] > bound:
            first += 1
        starts[end], own = first, squares(first, end)
        for stage in range(max(1, stages - n + end), min(stages, end) + 1):
            begin = max(first, stage - 1)
            if begin < end:
                # add and min over whole slices: nothing of a loop's step is Python's
                least[stage][end] = min(map(add, least[stage - 1][begin:end], own[begin - first :]))

    cuts = [n]
    for stage in range(stages, 0, -1):
        end = cuts[-1]
        begin = max(starts[end], stage - 1)
        sums = list(map(add, least[stage - 1][begin:end], squares(begin, end)))
        cuts.append(begin + sums.index(least[stage][end]))
    return cuts[::-1]


def _dearest(total: Sequence[float], stages: int) -> float:
    """What the dearest stage costs at least; total: sums of the first 0, 1, ... layers' costs. A stage of more layers
    costs no less, so where the earlier ones begin to be dearer than the last only moves on with the end:
    O(stages x layers)."""
    n = len(total) - 1
    before = [total[end] - total[0] for end in range(n + 1)]  # of one stage
    for stage in range(2, stages + 1):
        following, begin = [math.inf] * (n + 1), stage - 1
        for end in range(stage, n - (stages - stage) + 1):
            while begin < end - 1 and before[begin] < total[end] - total[begin]:
                begin += 1
            following[end] = max(before[begin], total[end] - total[begin])
            if begin > stage - 1:  # there the last stage is the dearer one
                following[end] = min(following[end], total[end] - total[begin - 1])
        before = following
    return before[n]


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
