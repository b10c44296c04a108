"""The timeline's file: Chrome's trace event format as Perfetto reads it (ui.perfetto.dev). Events in memory -> JSON,
lanes, merging ranks, checking.

A process of the trace is a rank, a thread is a lane. Slices of one thread must nest, so what overlaps (collectives
beside each other) goes to further threads of its lane: "communication 2", ..."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import ArgumentError
from .scheduled import write_json

LANES = ("steps", "compute", "modules", "communication", "disk", "waiting")
_ROOM = 100  # threads of a lane


@dataclass
class Event:
    """A slice. Times in ns on the recording rank's own clock."""

    lane: str
    name: str
    begin: int
    end: int
    args: dict[str, Any] = field(default_factory=dict)
    cat: str = ""


def place(events: Iterable[Event]) -> list[tuple[int, Event]]:
    """(thread within its lane, event), sorted by begin: every event on the first thread on which it lies inside or
    behind all others."""
    out: list[tuple[int, Event]] = []
    threads: dict[str, list[list[int]]] = {}  # lane -> per thread the ends of the slices that are open
    for e in sorted(events, key=lambda e: (e.begin, -e.end)):
        lane = threads.setdefault(e.lane, [])
        for i, stack in enumerate(lane):  # noqa: B007
            while stack and stack[-1] <= e.begin:
                stack.pop()
            if not stack or e.end <= stack[-1]:
                break
        else:
            i = len(lane)
            lane.append([])
        lane[i].append(e.end)
        out.append((i, e))
    return out


def to_json(
    rank: int,
    world: int,
    host: str,
    events: Sequence[Event],
    counters: Sequence[tuple[int, dict[str, int]]],
    offset_ns: int,
    start_ns: int,
    other: dict[str, Any],
) -> dict[str, Any]:
    """The trace of one rank. offset_ns, start_ns: see clock.Clock."""

    def us(ns: int) -> float:
        return round((ns + offset_ns - start_ns) / 1000, 3)

    rows: list[dict[str, Any]] = []
    names: dict[int, str] = {}
    for thread, e in place(events):
        lane = LANES.index(e.lane)
        tid = 1 + lane * _ROOM + min(thread, _ROOM - 1)
        names[tid] = e.lane if thread == 0 else f"{e.lane} {thread + 1}"
        rows.append(
            {
                "ph": "X",
                "name": e.name,
                "cat": e.cat or e.lane,
                "pid": rank,
                "tid": tid,
                "ts": us(e.begin),
                "dur": round((e.end - e.begin) / 1000, 3),
                **({"args": e.args} if e.args else {}),
            }
        )
    rows += [{"ph": "C", "name": "memory", "pid": rank, "ts": us(at), "args": values} for at, values in counters]
    rows.sort(key=lambda r: r["ts"])
    return {
        "traceEvents": _metadata(rank, host, names) + rows,
        "displayTimeUnit": "ms",
        "otherData": {"rank": rank, "world_size": world, "host": host, **other},
    }


def _metadata(rank: int, host: str, names: dict[int, str]) -> list[dict[str, Any]]:
    def meta(what: str, tid: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": rank, "tid": tid, "ts": 0, "args": args}

    rows = [meta("process_name", 0, name=f"rank {rank} ({host})"), meta("process_sort_index", 0, sort_index=rank)]
    for tid, name in sorted(names.items()):
        rows += [meta("thread_name", tid, name=name), meta("thread_sort_index", tid, sort_index=tid)]
    return rows


def merge(traces: Iterable[Any], path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """One trace of several ranks' (paths of trace.rank<R>.json files, or what they contain), which were recorded
    together; written to `path` if given. A folder stands for all such files in it."""
    if isinstance(traces, (str, os.PathLike)):
        folder = os.fspath(traces)
        try:
            names = sorted(n for n in os.listdir(folder) if n.startswith("trace.rank") and n.endswith(".json"))
        except OSError as exc:
            raise ArgumentError(
                f"merge: {folder}: {exc.strerror}; give the folder that a timeline was written to"
            ) from exc
        traces = [os.path.join(folder, n) for n in names]
    loaded = [_load(t) if isinstance(t, (str, os.PathLike)) else t for t in traces]
    if not loaded:
        raise ArgumentError("merge: there are no traces (trace.rank<R>.json)")
    rows = [e for t in loaded for e in t["traceEvents"]]
    meta = [e for e in rows if e["ph"] == "M"]
    out: dict[str, Any] = {
        "traceEvents": meta + sorted((e for e in rows if e["ph"] != "M"), key=lambda e: e["ts"]),
        "displayTimeUnit": "ms",
        "otherData": {**loaded[0].get("otherData", {}), "ranks": [t.get("otherData", {}).get("rank") for t in loaded]},
    }
    out["otherData"].pop("rank", None)
    if path is not None:
        write_json(os.fspath(path), out)
    return out


def _load(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as f:
            found: dict[str, Any] = json.load(f)
    except (OSError, ValueError) as exc:
        raise ArgumentError(f"{os.fspath(path)} can't be read as a trace: {exc}") from exc
    check_trace(found, os.fspath(path))
    return found


def check_trace(trace: dict[str, Any], name: str = "the trace") -> None:
    """Raises ArgumentError, saying what and where, unless Perfetto reads this as it is meant: complete events, in order
    of time, with a name and a duration; slices of a thread nested; every process and thread named; counters of
    numbers."""
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list):
        raise ArgumentError(f'{name}: a trace is {{"traceEvents": [...]}}')
    named = {(e.get("pid"), e.get("tid")) for e in events if e.get("ph") == "M" and e.get("name") == "thread_name"}
    processes = {e.get("pid") for e in events if e.get("ph") == "M" and e.get("name") == "process_name"}
    last: float | None = None
    open_slices: dict[tuple[int, int], list[float]] = {}
    for i, e in enumerate(events):
        if (wrong := _wrong(e, named, processes)) is not None:
            raise ArgumentError(f"{name}: event {i} ({json.dumps(e)[:200]}) {wrong}")
        if e["ph"] == "M":
            continue
        if last is not None and e["ts"] < last:
            raise ArgumentError(
                f"{name}: event {i} begins at {e['ts']}, before the one in front of it ({last}): events must be sorted"
            )
        last = e["ts"]
        if e["ph"] == "X" and not _nests(open_slices.setdefault((e["pid"], e["tid"]), []), e):
            raise ArgumentError(
                f"{name}: event {i} ('{e['name']}') overlaps another of its thread without lying inside it"
            )


def _nests(stack: list[float], e: dict[str, Any]) -> bool:
    tolerance = 0.0015  # times are rounded to ns
    while stack and stack[-1] <= e["ts"] + tolerance:
        stack.pop()
    end = e["ts"] + e["dur"]
    if stack and end > stack[-1] + tolerance:
        return False
    stack.append(end)
    return True


def _wrong(e: Any, named: set[Any], processes: set[Any]) -> str | None:
    if not isinstance(e, dict) or e.get("ph") not in ("M", "X", "C"):
        return "is no metadata (M), complete (X) or counter (C) event"
    if not isinstance(e.get("name"), str) or not e["name"] or not isinstance(e.get("pid"), int):
        return "has no name or pid"
    if e["ph"] == "M":
        return None
    if not isinstance(e.get("ts"), (int, float)) or isinstance(e["ts"], bool):
        return "has no time"
    if e["pid"] not in processes:
        return f"is of process {e['pid']}, which has no name"
    if e["ph"] == "C":
        values = e.get("args")
        fine = isinstance(values, dict) and values and all(isinstance(v, (int, float)) for v in values.values())
        return None if fine else "is a counter without numbers"
    if not isinstance(e.get("dur"), (int, float)) or e["dur"] < 0:
        return "has no duration"
    return None if (e["pid"], e.get("tid")) in named else f"is on thread {e.get('tid')}, which has no name"
