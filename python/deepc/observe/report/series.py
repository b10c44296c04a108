"""Figures of a run of any length in memory of a bounded size: exact up to some thousand values, and of more what a page
can show of them. Standard library only."""

from __future__ import annotations

import heapq
import math
import statistics
from typing import Any, NamedTuple

POINTS = 1600  # of a curve: more than the pixels that it gets
EXACT = 4096  # values whose median is exact
BLOCKS = 4096  # stretches of a series whose sums are kept
_FINE = 1000.0  # bins of a Quantiles in a factor of e: 0.05 % to each side
_SLOWEST = 64


class Point(NamedTuple):
    step: int
    time: float
    value: float


class Bucket:
    """The points of a stretch of steps."""

    __slots__ = ("count", "high", "low", "steps", "times", "values")

    def __init__(self, p: Point) -> None:
        self.low = self.high = p
        self.count, self.steps, self.times, self.values = 1, p.step, p.time, p.value

    def put(self, p: Point) -> None:
        step, time, value = p
        if value < self.low.value:
            self.low = p
        if value > self.high.value:
            self.high = p
        self.count += 1
        self.steps += step
        self.times += time
        self.values += value

    def add(self, other: Bucket) -> None:
        if other.low.value < self.low.value:
            self.low = other.low
        if other.high.value > self.high.value:
            self.high = other.high
        self.count += other.count
        self.steps += other.steps
        self.times += other.times
        self.values += other.values

    @property
    def mean(self) -> Point:
        n = self.count
        return Point(self.steps // n, round(self.times / n, 3), float(f"{self.values / n:.9g}"))


class Curve:
    """A curve over the steps. Up to POINTS points it has all of them; a longer one has the lowest, the highest and the
    mean of each stretch of `width` steps, and its ends, so that no spike is lost."""

    __slots__ = ("buckets", "first", "high", "last", "low", "points", "width")

    def __init__(self, p: Point) -> None:
        self.points = [p]
        self.buckets: dict[int, Bucket] = {}
        self.first = self.last = self.low = self.high = p
        self.width = 1

    def add(self, p: Point) -> None:
        if p.step < self.first.step:
            self.first = p
        if p.step >= self.last.step:
            self.last = p
        if p.value < self.low.value:
            self.low = p
        if p.value > self.high.value:
            self.high = p
        if self.buckets:
            self._put(p)
        elif len(self.points) < POINTS:
            self.points.append(p)
        else:
            for kept in (*self.points, p):
                self._put(kept)
            self.points.clear()
        while len(self.buckets) > POINTS // 2:
            self.width *= 2
            halves, self.buckets = self.buckets, {}
            for key, bucket in sorted(halves.items()):
                if (found := self.buckets.setdefault(key // 2, bucket)) is not bucket:
                    found.add(bucket)

    def _put(self, p: Point) -> None:
        key = p.step // self.width
        if (found := self.buckets.get(key)) is None:
            self.buckets[key] = Bucket(p)
        else:
            found.put(p)

    def shown(self) -> dict[str, Any]:
        """{"step", "time", "value"} in the order of the steps; where stretches stand for their points, "mean" has the
        same of their means and "per" is how many steps one has."""
        if not self.buckets:
            return _columns(sorted(self.points, key=lambda p: p.step))
        stretches = [b for _, b in sorted(self.buckets.items())]
        ends = {self.first, self.last, *(p for b in stretches for p in (b.low, b.high))}
        means = _columns([b.mean for b in stretches])
        return {**_columns(sorted(ends, key=lambda p: p.step)), "mean": means, "per": self.width}


def _columns(points: list[Point]) -> dict[str, list[float]]:
    times: list[float] = []
    for p in points:
        times.append(max(p.time, times[-1] if times else 0.0))  # the page looks places up in it
    return {"step": [p.step for p in points], "time": times, "value": [p.value for p in points]}


class Quantiles:
    """How many values lie where: their median to 0.05 %, exact of up to EXACT of them."""

    __slots__ = ("bins", "count", "values")

    def __init__(self) -> None:
        self.values: list[float] = []
        self.bins: dict[int, int] = {}  # by logarithm; of no value > 0: -inf's, one that no other has
        self.count = 0

    def add(self, value: float) -> None:
        self.count += 1
        if self.count <= EXACT:
            self.values.append(value)
            return
        for kept in (*self.values, value):
            key = round(_FINE * math.log(kept)) if kept > 0 else -(10**9)
            self.bins[key] = self.bins.get(key, 0) + 1
        self.values.clear()

    def median(self) -> float | None:
        if not self.bins:
            return statistics.median(self.values) if self.values else None
        left = self.count // 2
        for key in sorted(self.bins):
            left -= self.bins[key]
            if left < 0:
                return math.exp(key / _FINE)
        return None

    def above(self, value: float) -> int:
        """How many are larger."""
        if not self.bins:
            return sum(v > value for v in self.values)
        return sum(n for key, n in self.bins.items() if math.exp(key / _FINE) > value)


class Pace:
    """A figure of the steps whose first one is another matter: it counts where there are no more than two."""

    __slots__ = ("first", "rest", "slowest")

    def __init__(self, first: float) -> None:
        self.first = first
        self.rest = Quantiles()
        self.slowest: list[tuple[float, int]] = []  # the _SLOWEST largest with their steps, a heap

    def add(self, value: float, step: int) -> None:
        self.rest.add(value)
        if len(self.slowest) < _SLOWEST:
            heapq.heappush(self.slowest, (value, -step))
        else:
            heapq.heappushpop(self.slowest, (value, -step))

    def median(self) -> float | None:
        if self.rest.count > 1:
            return self.rest.median()
        return statistics.median([self.first, *self.rest.values])

    def most(self) -> float:
        rest = [v for v, _ in self.slowest]
        return max(rest) if self.rest.count > 1 else max([self.first, *rest])

    def above(self, value: float) -> tuple[int, list[int]]:
        """How many but the first are larger, and the steps of (the largest of) them, in order."""
        return self.rest.above(value), sorted(-step for v, step in self.slowest if v > value)


class Blocks:
    """Sums of a series over stretches of equal length, at most `most` of them: (how many, first step, last step, sum of
    each of the values)."""

    __slots__ = ("count", "found", "least", "most", "size")

    def __init__(self, most: int = BLOCKS) -> None:
        self.most, self.size, self.count = most, 1, 0
        self.found: list[tuple[int, int, int, tuple[float, ...]]] = []

    def add(self, step: int, *values: float) -> None:
        if self.count % self.size:
            self.found[-1] = _join(self.found[-1], (1, step, step, values))
        else:
            if len(self.found) == self.most:  # all of them are full
                self.size *= 2
                pairs = zip(self.found[::2], self.found[1::2], strict=True)
                self.found = [_join(a, b) for a, b in pairs]
            self.found.append((1, step, step, values))
        self.count += 1

    def tail(self, count: int) -> tuple[int, float]:
        """(how many, the mean) of the first of the values over the last stretches that hold `count`."""
        have, total = 0, 0.0
        for n, _, _, sums in reversed(self.found):
            if have >= count:
                break
            have, total = have + n, total + sums[0]
        return have, total / have

    def means(self, count: int) -> tuple[int, list[float]]:
        """(how many, the means) of the first of the values over each run of full stretches that hold about `count`; the
        last one is of the last values."""
        m = max(1, round(count / self.size))
        sums = [0.0]
        for n, _, _, of in self.found:
            if n == self.size:
                sums.append(sums[-1] + of[0])
        means = [(sums[i] - sums[i - m]) / (m * self.size) for i in range(m, len(sums))]
        return m * self.size, means if self.count % self.size == 0 else [*means, self.tail(m * self.size)[1]]


def _join(
    a: tuple[int, int, int, tuple[float, ...]], b: tuple[int, int, int, tuple[float, ...]]
) -> tuple[int, int, int, tuple[float, ...]]:
    return a[0] + b[0], a[1], b[2], tuple(x + y for x, y in zip(a[3], b[3], strict=True))
