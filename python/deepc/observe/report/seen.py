"""One look at all rows and notes of a run's metrics.jsonl, in the order of the file, however many there are: what a
page needs of them. digest.py makes the page's figures of it."""

from __future__ import annotations

import heapq
from typing import Any

from .folder import Run, is_not_finite, number
from .series import POINTS, Blocks, Curve, Pace, Point

MAX_LISTED = 1000  # of what happened
SPLIT = ("compute", "communication", "data", "disk")
_PACES = ("time_s", "tokens_per_s", "samples_per_s", "tflops", "fraction_of_peak")
_BARS = 400  # of the split of the steps' time
_NOT_CURVES = {
    "step",
    "at",
    "skipped",
    "skipped_steps",
    "eta_s",
    "total_steps",
    "total_about",
    "samples",
    "tokens",
    "wait",
    "memory",
    "parts",
}


def flat(row: dict[str, Any]) -> dict[str, float]:
    """Numbers of a step by dotted name ("memory.host")."""
    out: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            out.update({f"{key}.{k}": v for k, v in flat(value).items()})
        elif (v := number(value)) is not None:
            out[key] = v
        elif isinstance(value, list) and value and all(number(x) is not None for x in value):
            out[key] = float(value[0])  # one learning rate per group: the first
    return out


class Losses:
    """The losses, and those that are no numbers."""

    def __init__(self) -> None:
        self.finite = Blocks()
        self.first: float | None = None  # as the two next, of finite ones
        self.last: float | None = None
        self.best: float | None = None
        self.final: Any = None  # of the last step that has one, finite or not
        self.bad = 0
        self.bad_first = self.bad_last = 0  # their steps
        self.since = 0  # steps with a loss from the first bad one on
        self.bad_were_skipped = True  # all of them

    def row(self, step: int, row: dict[str, Any]) -> None:
        loss = row.get("loss")
        if loss is None:
            return
        self.final = loss
        if is_not_finite(loss):
            self.bad_first = self.bad_first if self.bad else step
            self.bad, self.bad_last = self.bad + 1, step
            self.bad_were_skipped = self.bad_were_skipped and bool(row.get("skipped"))
        self.since += bool(self.bad)
        if (value := number(loss)) is None:
            return
        self.first = value if self.first is None else self.first
        self.best = value if self.best is None else min(value, self.best)
        self.last = value
        self.finite.add(step, value)


class Skipped:
    """The skipped steps."""

    def __init__(self) -> None:
        self.count = self.late = self.last = 0
        self.ticks: list[int] = []  # their steps; of very many one in each stretch of `width`
        self._width = 1

    def row(self, step: int, first_step: int) -> None:
        self.count, self.last = self.count + 1, step
        self.late += step > first_step + 30
        if self.ticks and step // self._width == self.ticks[-1] // self._width:
            return
        self.ticks.append(step)
        while len(self.ticks) > 4 * POINTS:
            self._width *= 2
            self.ticks = list({t // self._width: t for t in reversed(self.ticks)}.values())[::-1]


class Happened:
    """The last MAX_LISTED of what happened, in step order, and of the others how many."""

    def __init__(self) -> None:
        self._kept: list[tuple[int, int, dict[str, Any]]] = []  # a heap
        self._count = 0
        self.others = self.others_skipped = 0
        self.last_other: dict[str, Any] | None = None

    def add(self, event: dict[str, Any]) -> None:
        self._count += 1
        heapq.heappush(self._kept, (event["step"], self._count, event))
        if len(self._kept) > MAX_LISTED:
            self.last_other = heapq.heappop(self._kept)[2]
            self.others += 1
            self.others_skipped += self.last_other["kind"] == "skipped"

    def listed(self) -> list[dict[str, Any]]:
        return [event for _, _, event in sorted(self._kept, key=lambda k: k[:2])]


class Exchange:
    """What a 1-bit optimizer's ranks exchanged."""

    def __init__(self) -> None:
        self.count, self.bytes = 0, 0.0
        self.last: dict[str, Any] = {}
        self.uncompressed: float | None = None

    def row(self, found: Any) -> None:
        if isinstance(found, dict):
            self.count, self.last = self.count + 1, found
            self.bytes += number(found.get("bytes")) or 0.0
            self.uncompressed = self.uncompressed or number(found.get("uncompressed_bytes"))


class Seen:
    def __init__(self) -> None:
        self.steps = self.first_step = self.last_step = 0  # the first: how many
        self.clock: float | None = None  # of the last step
        self.curves: dict[str, Curve] = {}
        self.logged: dict[str, Curve] = {}  # by engine.log
        self.memory: dict[str, Curve] = {}
        self.paces: dict[str, Pace] = {}
        self.losses, self.skipped, self.exchange, self.happened = Losses(), Skipped(), Exchange(), Happened()
        self.split = Blocks(_BARS)
        self.totals = [0.0] * len(SPLIT)
        self.gpu_peak: float | None = None
        self.host_peak: float | None = None
        self.rank_peak: float | None = None
        self.batch: dict[str, Any] | None = None  # the last of a pipeline
        self.resumed: set[int] = set()
        # Step -> seconds of the checkpoint before it, which is no part of its time.
        self._between: dict[int, float] = {}

    def row(self, row: dict[str, Any]) -> None:
        step = row["step"]
        self.first_step = self.first_step if self.steps else step
        self.steps, self.last_step = self.steps + 1, step
        at = number(row.get("at"))
        self.clock = self.clock if at is None else at
        for name, value in flat({k: v for k, v in row.items() if k not in _NOT_CURVES}).items():
            _add(self.curves, name, Point(step, at or 0.0, value))
        for name in _PACES:
            if (pace := number(row.get(name))) is not None:
                if name in self.paces:
                    self.paces[name].add(pace, step)
                else:
                    self.paces[name] = Pace(pace)
        self.losses.row(step, row)
        self.exchange.row(row.get("exchange"))
        if row.get("skipped"):
            self.skipped.row(step, self.first_step)
            text = str(row.get("reason") or "") or "the step was skipped"
            self.happened.add({"step": step, "at": at, "kind": "skipped", "text": text})
        if isinstance(row.get("wait"), dict) and (total := number(row.get("time_s"))) is not None:
            self._split(step, total, row["wait"])
        if self._between:
            self._between = {s: v for s, v in self._between.items() if s > step}
        if isinstance(row.get("memory"), dict):
            self._memory(step, row["memory"])

    def _split(self, step: int, total: float, wait: dict[str, Any]) -> None:
        waits = [number(wait.get(f"{k}_s")) or 0.0 for k in SPLIT[1:]]
        inside = sum(waits) - min(waits[-1], self._between.get(step, 0.0))
        parts = [max(0.0, total - inside), *waits]
        self.totals = [a + b for a, b in zip(self.totals, parts, strict=True)]
        self.split.add(step, *parts)

    def _memory(self, step: int, found: dict[str, Any]) -> None:
        for name, value in flat(found).items():
            _add(self.memory, name, Point(step, 0.0, value))
        if (gpu := number(found.get("gpu_peak"))) is not None:
            self.gpu_peak = max(gpu, self.gpu_peak or gpu)
        if (own := number(found.get("process_peak"))) is not None:
            own += number(found.get("shared")) or 0.0
            self.host_peak = max(own, self.host_peak or own)

    def note(self, note: dict[str, Any]) -> None:
        kind, step = note["event"], note["step"]
        if kind == "log":
            if isinstance(note.get("scalars"), dict):
                for name, value in flat(note["scalars"]).items():
                    _add(self.logged, name, Point(step, number(note.get("at")) or 0.0, value))
            return
        if kind == "pipeline":
            self.batch = note
            return
        if kind == "checkpoint":
            self._between[step + 1] = self._between.get(step + 1, 0.0) + (number(note.get("seconds")) or 0.0)
        elif kind == "memory" and self.rank_peak is None:
            self.rank_peak = number(note.get("peak_bytes"))
        elif kind == "resume":
            self.resumed.add(step)
        self.happened.add({"step": step, "at": number(note.get("at")), "kind": str(kind), "text": _told(note)})


def _add(curves: dict[str, Curve], name: str, p: Point) -> None:
    if name in curves:
        curves[name].add(p)
    else:
        curves[name] = Curve(p)


def _told(note: dict[str, Any]) -> str:
    if note["event"] == "checkpoint":
        seconds = number(note.get("seconds"))
        return f"{note.get('what', 'save')} {note.get('path', '')}" + (
            f", {seconds:.3g} s" if seconds is not None else ""
        )
    if note["event"] == "memory":
        return str(note.get("text") or "").removeprefix("memory: ")
    if note["event"] == "resume":
        return "the run went on from here"
    return str(note.get("text") or note.get("message") or "")


def look(run: Run) -> Seen:
    """What is seen of `run`; once."""
    if "seen" not in run.kept:
        seen = Seen()
        for record in run.records:
            (seen.note if "event" in record else seen.row)(record)
        for step in run.restarts:
            if not {step, step - 1} & seen.resumed:
                text = "steps from here on were run again"
                seen.happened.add({"step": step, "at": None, "kind": "resume", "text": text})
        run.kept["seen"] = seen
    found: Seen = run.kept["seen"]
    return found
