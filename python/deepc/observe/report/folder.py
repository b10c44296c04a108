"""Reads a run folder (docs/report.md lists its files) into a Run. Takes what is there: each file may be missing, be cut
off by a kill, or be written while it is read; what could not be read is listed in `problems`, and nothing else of the
run is lost by it. Standard library only."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from ...errors import ArgumentError

FILES = ("run.json", "metrics.jsonl", "trace.rank*.json", "comms.rank*.json", "flops.txt")
_RANK = re.compile(r"(trace|comms)\.rank(\d+)\.json")
_ENGINE = re.compile(r"(?:run\.(\d+)\.json|metrics\.(\d+)\.jsonl)")


@dataclass
class Run:
    """What one engine of a run left in the run's folder. records: the lines of metrics.jsonl; traces: rank -> Chrome
    trace events; comms: rank -> summary of the communication logger (operation -> message bytes -> figures)."""

    path: str
    name: str
    engine: int = 1
    info: dict[str, Any] = field(default_factory=dict)
    records: Records | tuple[()] = ()
    restarts: list[int] = field(default_factory=list)  # steps at which a resumed run went on
    traces: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    comms: dict[int, dict[str, dict[str, dict[str, Any]]]] = field(default_factory=dict)
    late: dict[int, dict[str, dict[str, dict[str, Any]]]] = field(default_factory=dict)  # rank -> straggler analysis
    flops: str = ""
    problems: list[str] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict, repr=False)  # what digest.py has found out already

    @property
    def config(self) -> dict[str, Any]:
        found = self.info.get("config")
        return found if isinstance(found, dict) else {}

    @property
    def steps(self) -> Iterator[dict[str, Any]]:
        """One dict a step, in order."""
        return (r for r in self.records if "event" not in r)


def number(value: Any) -> float | None:
    """A finite number, or None (also for "nan", "inf" and "-inf", which stand for numbers in metrics.jsonl)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer that is none
        return None


def is_not_finite(value: Any) -> bool:
    """A number that is none any more: NaN or infinite, also as text."""
    return value in ("nan", "inf", "-inf") or (isinstance(value, float) and not math.isfinite(value))


def read_runs(path: str | os.PathLike[str]) -> list[Run]:
    """Reads a run folder: a Run per engine that wrote there, mostly one. ArgumentError if it is no run folder."""
    folder = Path(path)
    names = _names(folder)
    first = _read_engine(folder, names, 1)
    for name in names:
        if match := _RANK.fullmatch(name):
            _read_rank_file(folder / name, match[1], int(match[2]), first)
    if "flops.txt" in names:
        with _opened(folder / "flops.txt", first) as f:
            first.flops = f.read(400_000)
    others = sorted({int(m[1] or m[2]) for n in names if (m := _ENGINE.fullmatch(n))})
    return [first, *(_read_engine(folder, names, k) for k in others)]


def _names(folder: Path) -> list[str]:
    """The files in a run folder. ArgumentError if it is none."""
    if folder.is_file():
        raise ArgumentError(
            f"{folder} is a file: give the folder of the run, the one with run.json and metrics.jsonl in it"
        )
    if not folder.is_dir():
        raise ArgumentError(f"there is no run folder {str(folder)!r} (looked in {os.getcwd()}). {_hint(Path('runs'))}")
    names = sorted(p.name for p in folder.iterdir())
    if not any(n in FILES or _RANK.fullmatch(n) or _ENGINE.fullmatch(n) for n in names):
        inside = [p.name for p in sorted(folder.iterdir()) if p.is_dir() and any((p / n).exists() for n in FILES)]
        more = (
            f" Its folders {', '.join(inside[:5])} are runs: give one or more of them."
            if inside
            else " " + _hint(Path("runs"))
        )
        raise ArgumentError(f"{folder} holds no run: none of {', '.join(FILES)} is in it.{more}")
    return names


def _read_engine(folder: Path, names: list[str], number_: int) -> Run:
    """run.json and metrics.jsonl of the number_-th engine of the process (run.2.json and metrics.2.jsonl of the
    second)."""
    dot = f".{number_}" if number_ > 1 else ""
    run = Run(str(folder), folder.resolve().name + (f" (engine {number_})" if number_ > 1 else ""), engine=number_)
    info = _json(folder / f"run{dot}.json", run) if f"run{dot}.json" in names else {}
    if isinstance(info, dict):
        run.info = info
    else:
        run.problems.append(f"run{dot}.json is no JSON object")
    if f"metrics{dot}.jsonl" in names:
        run.records = Records(folder / f"metrics{dot}.jsonl")
        run.records.read(run)
    return run


def _hint(runs: Path) -> str:
    found = sorted(p.parent for p in runs.glob("*/run.json")) if runs.is_dir() else []
    if found:
        return f"Runs here: {', '.join(map(str, found[:8]))}."
    return (
        'A run writes its folder when the configuration has {"deepc": {"run_dir": "runs/name"}} or'
        " DEEPC_RUN_DIR=runs/name is set."
    )


def _json(path: Path, run: Run) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError) as exc:
        run.problems.append(f"{path.name} can't be read: {exc}")
        return {}


def _opened(path: Path, run: Run) -> TextIO:
    """The file; an empty one, and a problem noted, where it can't be read."""
    try:
        return path.open(encoding="utf-8", errors="replace")
    except OSError as exc:
        run.problems.append(f"{path.name} can't be read: {exc.strerror}")
        return io.StringIO()


class Records:
    """The lines of metrics.jsonl, one dict each, read anew at each look, since a run may have any number of them: each
    step once (a resumed run replaces what it repeats, and what the script logged there), in order, and between them
    what are no steps ("event")."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = 0
        self._restarts: list[tuple[int, int]] = []  # (line, step), both rising: what is before it, from this step on

    def __iter__(self) -> Iterator[dict[str, Any]]:
        restarts = self._restarts
        k = 0
        with contextlib.suppress(OSError), self._path.open(encoding="utf-8", errors="replace") as f:
            for i, line in enumerate(itertools.islice(f, self._lines)):
                if (row := _record(line)) is None:
                    continue
                while k < len(restarts) and restarts[k][0] <= i:
                    k += 1
                replaced = k < len(restarts) and row["step"] >= restarts[k][1]
                if not replaced or row.get("event", "log") != "log":
                    yield row

    def read(self, run: Run) -> None:
        """Finds where a resumed run went on, and what is no record."""
        last, bad, ended = None, 0, True
        with _opened(self._path, run) as f:
            for i, line in enumerate(f):
                self._lines, ended = i + 1, line.endswith("\n")
                if not line.strip():
                    continue
                if (row := _record(line)) is None:
                    bad += 1
                    continue
                if "event" in row:
                    continue
                step = row["step"]
                if last is not None and step <= last:
                    run.restarts += [] if step in run.restarts else [step]
                    while self._restarts and self._restarts[-1][1] >= step:
                        self._restarts.pop()
                    self._restarts.append((i, step))
                last = step
        if bad:
            run.problems.append(
                f"{self._path.name}: {bad} line{'s are' if bad > 1 else ' is'} no record of a"
                f" step{'' if ended else ' (the last one is cut off)'}"
            )


def _record(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


def _read_rank_file(path: Path, kind: str, rank: int, run: Run) -> None:
    value = _json(path, run)
    if kind == "trace":
        events = value.get("traceEvents", []) if isinstance(value, dict) else value
        if isinstance(events, list):
            run.traces[rank] = [e for e in events if isinstance(e, dict)]
        return
    if not isinstance(value, dict):
        run.problems.append(f"{path.name} is no JSON object")
        return
    summary = value.get("summary", value)
    run.comms[rank] = _table(summary)
    if isinstance(value.get("straggler_analysis"), dict):
        run.late[rank] = _table(value["straggler_analysis"])


def _table(value: Any) -> dict[str, dict[str, dict[str, Any]]]:
    """operation -> bytes -> figures; whatever has another form is left out."""
    if not isinstance(value, dict):
        return {}
    return {
        op: {n: v for n, v in sizes.items() if isinstance(v, dict)}
        for op, sizes in value.items()
        if isinstance(sizes, dict)
    }
