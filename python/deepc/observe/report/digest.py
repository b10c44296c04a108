"""What a page shows of a Run: curves thinned to what a screen can show, medians, the split of a step's time, memory
against its prediction, the communication table, a timeline of a few steps, and what stands out. Plain data (JSON types)
out; no HTML here.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from ...errors import ArgumentError
from ...plan.schedule import Schedule
from .folder import Run, is_not_finite, number

POINTS = 1600  # of a curve: more than the pixels that it gets
MAX_EVENTS = 30_000  # of the timeline
MAX_LISTED = 1000  # of what happened
MIB = 2.0**20
SPLIT = ("compute", "communication", "data", "disk")
_Span = tuple[float, float, int, int]  # begin and duration in us, lane, name
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
_FIRST = (
    "loss",
    "lr",
    "grad_norm",
    "tokens_per_s",
    "samples_per_s",
    "time_s",
    "loss_scale",
    "tflops",
    "fraction_of_peak",
)


def _once(what: Callable[[Run], Any]) -> Callable[[Run], Any]:
    """Keeps the result with the run: several parts of the page ask for it."""

    @functools.wraps(what)
    def kept(run: Run) -> Any:
        if what.__name__ not in run.kept:
            run.kept[what.__name__] = what(run)
        return run.kept[what.__name__]

    return kept


def digest(run: Run) -> dict[str, Any]:
    """Everything that the page shows of `run`."""
    return {
        "name": run.name,
        "path": run.path,
        "info": _info(run),
        "summary": summary(run),
        "curves": curves(run),
        "split": split(run),
        "skipped": [{"step": s["step"], "reason": str(s.get("reason") or "")} for s in run.steps if s.get("skipped")],
        "memory": memory(run),
        "communication": communication(run),
        "pipeline": pipeline(run),
        "timeline": timeline(run),
        "events": events(run),
        "findings": findings(run),
        "config": run.config,
        "flops": run.flops,
        "restarts": run.restarts,
        "problems": run.problems,
    }


def _info(run: Run) -> dict[str, Any]:
    return {k: v for k, v in run.info.items() if k not in ("config",)}


# ---- curves ----------------------------------------------------------------------------------------------------------
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


def thin(xs: list[float], ys: list[float], limit: int = POINTS) -> tuple[list[float], list[float]]:
    """At most about `limit` points: of each stretch its lowest and highest value, so that no spike is lost; the first
    and the last point stay."""
    kept = _kept(ys, limit)
    return [xs[i] for i in kept], [ys[i] for i in kept]


def _kept(ys: list[float], limit: int = POINTS) -> Sequence[int]:
    """Which points of a curve `thin` keeps, in order."""
    n = len(ys)
    if n <= limit:
        return range(n)
    size = -(-2 * n // limit)
    keep = {0, n - 1}
    for begin in range(0, n, size):
        stretch = range(begin, min(begin + size, n))
        keep.add(min(stretch, key=ys.__getitem__))
        keep.add(max(stretch, key=ys.__getitem__))
    return sorted(keep)


def curves(run: Run) -> dict[str, dict[str, list[float]]]:
    """name -> {"step": [...], "time": [...], "value": [...]}, the well-known ones first, each in the order of its
    steps; a value that is not finite leaves a gap. What a script logs under a name that steps have is a curve of its
    own."""
    found: dict[str, tuple[list[float], list[float], list[float]]] = {}

    def add(row: dict[str, Any], values: dict[str, float], called: Callable[[str], str] = str) -> None:
        for name, value in values.items():
            xs, ts, ys = found.setdefault(called(name), ([], [], []))
            xs.append(row["step"])
            ts.append(max(number(row.get("at")) or 0.0, ts[-1] if ts else 0.0))  # the page looks places up in it
            ys.append(value)

    for row in run.steps:
        add(row, flat({k: v for k, v in row.items() if k not in _NOT_CURVES}))
    taken = set(found)
    for note in sorted(_logged(run), key=lambda n: n["step"]):
        add(note, flat(note["scalars"]), lambda n: f"{n} (engine.log)" if n in taken else n)
    out = {}
    for name in sorted(found, key=lambda n: (_FIRST.index(n) if n in _FIRST else len(_FIRST), n)):
        columns = found[name]
        kept = _kept(columns[2])
        out[name] = dict(zip(("step", "time", "value"), ([column[i] for i in kept] for column in columns)))
    return out


def _logged(run: Run) -> list[dict[str, Any]]:
    """What the script gave to engine.log."""
    return [n for n in run.notes if n["event"] == "log" and isinstance(n.get("scalars"), dict)]


# ---- time ------------------------------------------------------------------------------------------------------------
def step_seconds(run: Run) -> list[float | None]:
    """Duration of each step."""
    return [number(row.get("time_s")) for row in run.steps]


@_once
def split(run: Run) -> dict[str, Any] | None:
    """Seconds per step: computing and waiting for communication, data and disk, a checkpoint before the step included.
    None if no step says how long it waited."""
    xs: list[float] = []
    parts: dict[str, list[float]] = {k: [] for k in SPLIT}
    between: dict[
        int, float
    ] = {}  # a checkpoint is no part of a step's time, but the step after it tells how long the disk took
    for note in run.notes:
        if note["event"] == "checkpoint":
            between[note["step"] + 1] = between.get(note["step"] + 1, 0.0) + (number(note.get("seconds")) or 0.0)
    for row, total in zip(run.steps, step_seconds(run)):
        wait = row.get("wait")
        if total is None or not isinstance(wait, dict):
            continue
        waits = {k: number(wait.get(f"{k}_s")) or 0.0 for k in SPLIT[1:]}
        inside = sum(waits.values()) - min(waits["disk"], between.get(row["step"], 0.0))
        xs.append(row["step"])
        parts["compute"].append(max(0.0, total - inside))
        for k, v in waits.items():
            parts[k].append(v)
    if not xs:
        return None
    # steps are averaged in stretches: parts of one bar must belong together
    size = -(-len(xs) // 400)
    cut = [range(b, min(b + size, len(xs))) for b in range(0, len(xs), size)]
    mean = {k: sum(v) / len(v) for k, v in parts.items()}
    return {
        "step": [xs[c[0]] for c in cut],
        "to": [xs[c[-1]] for c in cut],
        "mean": mean,
        "steps": len(xs),
        "parts": {k: [sum(v[i] for i in c) / len(c) for c in cut] for k, v in parts.items()},
    }


def _warm(values: list[float]) -> list[float]:
    """Without the first step, which is slower, where there are others."""
    return values[1:] if len(values) > 2 else values


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


_VALIDATION = ("eval_loss", "val_loss", "valid_loss", "validation_loss", "test_loss")


def _validation(run: Run) -> tuple[str, list[float]] | None:
    """What a script logged as its validation loss: (its name, the values), under the names that loops give it."""
    found: dict[str, list[float]] = {}
    for note in _logged(run):
        for name, value in flat(note["scalars"]).items():
            found.setdefault(name, []).append(value)
    plain = {name: name.lower().replace("/", "_").replace(" ", "_").replace(".", "_") for name in found}
    return next(((name, found[name]) for wanted in _VALIDATION for name, p in plain.items() if p == wanted), None)


def summary(run: Run) -> dict[str, Any]:
    """The figures of the header and of the comparison."""
    losses, seconds = run.values("loss"), [s for s in step_seconds(run) if s is not None]
    last = next((s["loss"] for s in reversed(run.steps) if s.get("loss") is not None), None)
    lost = is_not_finite(last)  # what it was before says nothing of how this run ended
    model = run.info.get("model")
    model = model if isinstance(model, dict) else {}
    tail = losses[-max(min(5, len(losses)), len(losses) // 20) :] if losses and not lost else []
    validation = _validation(run)
    clock = run.values("at")
    waits, total = split(run), 0.0
    if waits:
        total = sum(waits["mean"].values())
    return {
        "steps": run.steps[-1]["step"] if run.steps else 0,
        "first_step": run.steps[0]["step"] if run.steps else 0,
        "first_loss": losses[0] if losses else None,
        "loss": str(last) if lost else losses[-1] if losses else None,
        "best_loss": min(losses, default=None),
        "tail_loss": sum(tail) / len(tail) if tail else None,
        "tail_steps": len(tail),
        "validation": validation[1][-1] if validation else None,
        "best_validation": min(validation[1]) if validation else None,
        "validation_name": validation[0] if validation else "",
        "skipped": sum(bool(s.get("skipped")) for s in run.steps),
        "step_s": _median(_warm(seconds)),
        "slowest_s": max(_warm(seconds), default=None),
        "duration_s": clock[-1] if clock else None,
        "tokens_per_s": _median(_warm(run.values("tokens_per_s"))),
        "samples_per_s": _median(_warm(run.values("samples_per_s"))),
        "tflops": _median(_warm(run.values("tflops"))),
        "fraction_of_peak": _median(_warm(run.values("fraction_of_peak"))),
        "waiting": 1 - waits["mean"]["compute"] / total if waits and total else None,
        "peak_bytes": peak_bytes(run),
        "parameters": number(model.get("parameters")),
        "trainable": number(model.get("trainable")),
        "model": str(model.get("class") or ""),
        "ranks": run.info.get("ranks"),
        "nodes": run.info.get("nodes"),
        "stage": run.info.get("stage"),
        "precision": run.info.get("precision"),
    }


# ---- memory ----------------------------------------------------------------------------------------------------------
_LEVELS = ("available", "limit")  # not a use of memory
_COUNTS = ("heap.refusals", "heap.foreign_frees")  # no bytes


@_once
def memory(run: Run) -> dict[str, Any] | None:
    """Rows (name, largest, last and least measured bytes), bytes over the steps, the prediction, and what of it was
    measured."""
    told = run.info.get("predicted")
    told = told if isinstance(told, dict) else None
    series: dict[str, tuple[list[float], list[float]]] = {}
    for row in run.steps:
        if isinstance(row.get("memory"), dict):
            for name, value in flat(row["memory"]).items():
                xs, ys = series.setdefault(name, ([], []))
                xs.append(row["step"])
                ys.append(value)
    states = _states(run)
    if not series and told is None and not states:
        return None
    rows = [
        {"name": n, "measured": max(ys), "last": ys[-1], "least": min(ys), "count": n in _COUNTS}
        for n, (_, ys) in series.items()
    ]
    over = {
        n: dict(zip(("step", "value"), thin(xs, ys)))
        for n, (xs, ys) in series.items()
        if n not in _LEVELS and not n.startswith("heap.")
    }
    return {
        "rows": rows,
        "over": over,
        "predicted": told,
        "states": states,
        "rank_peak": rank_peak(run),
        "planned": planned(run),
    }


_STATES = {  # a row of the plan's own table: its bytes of each rank, and those that the ranks of a node share
    "parameters": ("params_private", "params_shared"),
    "fp32 masters": ("master_private", ""),
    "gradients (fp32)": ("grads_private", ""),
    "optimizer states": ("states_private", ""),
    "gradient buckets": ("", "staging_shared"),
    "on the way between nodes": ("exchange_private", ""),
}


def _states(run: Run) -> list[dict[str, Any]]:
    """Where the plan has the model states: rows (name, bytes of each rank, shared once a node). Every run has them;
    activations only a prediction knows."""
    plan = run.info.get("plan")
    sizes = plan.get("bytes") if isinstance(plan, dict) else None
    if not isinstance(sizes, dict):
        return []
    rows = [
        {"name": name, "host": number(sizes.get(own)) or 0.0, "shared": number(sizes.get(shared)) or 0.0}
        for name, (own, shared) in _STATES.items()
    ]
    return [r for r in rows if r["host"] or r["shared"]]


def peak_bytes(run: Run) -> float | None:
    """The most that the ranks took, what they share counted once; of a GPU where there is one."""
    found = [m for s in run.steps if isinstance(m := s.get("memory"), dict)]
    if gpu := [v for m in found if (v := number(m.get("gpu_peak"))) is not None]:
        return max(gpu)
    host = [v + (number(m.get("shared")) or 0.0) for m in found if (v := number(m.get("process_peak"))) is not None]
    return max(host, default=None)


def rank_peak(run: Run) -> float | None:
    """Own bytes of rank 0's peak through the first step above the process before initialize, if the engine could
    tell."""
    return next(
        (v for n in run.notes if n["event"] == "memory" and (v := number(n.get("peak_bytes"))) is not None), None
    )


def planned(run: Run) -> float | None:
    """The prediction's counterpart of rank_peak."""
    told = run.info.get("predicted")
    if not isinstance(told, dict) or not told.get("known"):
        return None
    return number(told.get("rank_peak"))


# ---- communication ---------------------------------------------------------------------------------------------------
def communication(run: Run) -> dict[str, Any] | None:
    """Rows (operation, bytes of a message, calls per rank, and over the ranks: mean time, shares, bandwidth)."""
    if not run.comms:
        return None
    table: dict[tuple[str, int], list[tuple[int, dict[str, Any]]]] = {}
    for rank, ops in sorted(run.comms.items()):
        for op, sizes in ops.items():
            for size, v in sizes.items():
                nbytes = v.get("msg_size_bytes", size)
                table.setdefault((op, int(nbytes) if str(nbytes).isdigit() else 0), []).append((rank, v))
    rows: list[dict[str, Any]] = []
    for (op, nbytes), found in table.items():

        def mean(key: str, found: list[tuple[int, dict[str, Any]]] = found) -> float:
            return sum(number(v.get(key)) or 0.0 for _, v in found) / len(found)

        rows.append(
            {
                "op": op,
                "bytes": nbytes,
                "ranks": len(found),
                "count": mean("count"),
                "total_ms": mean("total_latency_ms"),
                "avg_ms": mean("avg_latency_ms"),
                "slowest_ms": max(number(v.get("avg_latency_ms")) or 0.0 for _, v in found),
                "algorithm_gbps": mean("tput_avg_gbps"),
                "bus_gbps": mean("busbw_avg_gbps"),
                "waiting_ms": _late(run, op, nbytes),
            }
        )
    rows.sort(key=lambda r: -r["total_ms"])
    return {"rows": rows, "ranks": sorted(run.comms), "total_ms": sum(r["total_ms"] for r in rows)}


def _late(run: Run, op: str, nbytes: int) -> float | None:
    """Milliseconds of these calls that were waiting for a straggler, mean of the ranks."""
    found = [
        number(v.get("total_straggler_ms"))
        for ops in run.late.values()
        for size, v in ops.get(op, {}).items()
        if int(v.get("msg_size_bytes", size) or 0) == nbytes
    ]
    known = [f for f in found if f is not None]
    return sum(known) / len(known) if known else None


# ---- pipeline --------------------------------------------------------------------------------------------------------
_BUBBLE = 0.05  # by which ranks wait longer than the schedule says
_UNEVEN = 1.1  # the dearest stage over the mean of all


@_once
def pipeline(run: Run) -> dict[str, Any] | None:
    """The last batch whose times a pipeline has left: actions [name, kind, stage] of each rank, and for "predicted" and
    "measured" the spans [begin us, end us] of these, the time of all, and which part of it the ranks wait; seconds of
    each stage. None without one, or if it is not whole."""
    noted = [n for n in run.notes if n["event"] == "pipeline"]
    if not noted:
        return None
    try:
        return _batch(noted[-1])
    except (ArgumentError, AttributeError, KeyError, TypeError, ValueError) as exc:
        run.problems.append(
            f"metrics.jsonl: the times of a pipeline's batch can't be read: {type(exc).__name__}: {exc}"
        )
        return None


def _batch(note: dict[str, Any]) -> dict[str, Any]:
    plan = Schedule.parse(note["schedule"])
    chunks = plan.stages // len(plan.ranks)
    actions = [[[f"{a.kind}{a.micro}", a.kind, a.stage] for a in rank] for rank in plan.ranks]
    found = {"step": note["step"], "ranks": len(plan.ranks), "chunks": chunks, "micro_batches": plan.micro_batches}
    for name in ("predicted", "measured"):
        rows = [[[float(a), float(b)] for a, b in row] for row in note[name]]
        if [len(row) for row in rows] != [len(row) for row in actions]:
            raise ValueError(f"{name} has other actions than the schedule")
        whole = max(end for row in rows for _, end in row)
        busy = sum(b - a for row in rows for a, b in row)
        found[name] = {"spans": rows, "us": whole, "waits": 1 - busy / (whole * len(rows)) if whole else 0.0}
    costs = [[float(x) / 1e6 for x in of] for of in note["costs"]]
    return {**found, "actions": actions, "stages": [dict(zip("FIW", of, strict=True)) for of in costs]}


def _about_pipeline(run: Run, say: Callable[..., None]) -> None:
    found = pipeline(run)
    if found is None:
        return
    predicted, measured = found["predicted"]["waits"], found["measured"]["waits"]
    if measured > predicted + _BUBBLE:
        say(
            "note",
            f"ranks of the pipeline wait {100 * measured:.0f} % of a batch; with these times of stages its schedule has"
            f" {100 * predicted:.0f} %",
            "messages between stages, times that change from micro-batch to micro-batch, or other work on the machine",
        )
    times = [sum(stage.values()) for stage in found["stages"]]
    mean = sum(times) / len(times)
    if mean and max(times) > _UNEVEN * mean:
        say(
            "note",
            f"stage {times.index(max(times))} of the pipeline takes {max(times) / mean:.2f} times the mean of all",
            'cut by time: pipeline.stages with sample_batch=, or PipelineModule(partition_method="time")',
        )


# ---- timeline --------------------------------------------------------------------------------------------------------
def timeline(run: Run) -> dict[str, Any] | None:
    """The trace in a compact form: names once, lanes per rank, events [lane, name, begin us, duration us] sorted by
    begin; whole steps, the last ones, where the trace is longer than MAX_EVENTS."""
    lanes: list[dict[str, Any]] = []
    index: dict[tuple[int, str], int] = {}
    names: dict[str, int] = {}
    spans: list[tuple[float, float, int, int]] = []
    steps: list[tuple[float, float, str]] = []
    counters: dict[tuple[int, str], list[tuple[float, dict[str, float]]]] = {}
    for rank, found in sorted(run.traces.items()):
        labels = {
            str(e.get("tid")): str(_args(e).get("name"))
            for e in found
            if e.get("ph") == "M" and e.get("name") == "thread_name"
        }
        order = {
            str(e.get("tid")): number(_args(e).get("sort_index")) or 0.0
            for e in found
            if e.get("ph") == "M" and e.get("name") == "thread_sort_index"
        }
        present = {str(e.get("tid")) for e in found if e.get("ph") == "X"}
        for tid in sorted(present, key=lambda t: (order.get(t, 0.0), t)):
            index[rank, tid] = len(lanes)
            lanes.append({"rank": rank, "name": labels.get(tid, tid)})
        for e in found:
            begin = number(e.get("ts"))
            if begin is None:
                continue
            if e.get("ph") == "X":
                name, length = str(e.get("name")), number(e.get("dur")) or 0.0
                spans.append((begin, length, index[rank, str(e.get("tid"))], names.setdefault(name, len(names))))
                if rank == min(run.traces) and (e.get("cat") == "step" or _is_step(name)):
                    steps.append((begin, begin + length, name))
            elif e.get("ph") == "C":
                values = {k: v for k, x in _args(e).items() if (v := number(x)) is not None}
                counters.setdefault((rank, str(e.get("name"))), []).append((begin, values))
    if not spans:
        return None
    spans.sort(key=lambda s: (s[0], -s[1]))  # of those that begin together the one that holds the others first
    shown, left_out, whole_steps = _window(spans, steps)
    begin = shown[0][0]
    end = max(s[0] + s[1] for s in shown)
    return {
        "names": list(names),
        "lanes": lanes,
        "total": len(spans),
        "left_out": left_out,
        "whole_steps": whole_steps,
        "events": [[lane, name, round(b - begin, 2), round(d, 2)] for b, d, lane, name in shown],
        "steps": [[round(b - begin, 2), round(e - b, 2), n] for b, e, n in sorted(steps) if e > begin and b < end],
        "counters": [_counter(rank, name, points, spans[0][0]) for (rank, name), points in counters.items()],
        "origin": round(begin - spans[0][0], 2),
    }


def _args(event: dict[str, Any]) -> dict[str, Any]:
    args = event.get("args")
    return args if isinstance(args, dict) else {}


def _is_step(name: str) -> bool:
    return re.fullmatch(r"(step |ProfilerStep#)\d+", name) is not None


def _window(spans: list[_Span], steps: list[tuple[float, float, str]]) -> tuple[list[_Span], int, bool]:
    """What is shown of sorted spans, how many are not, and whether it is whole steps: where one alone is too long, it
    is the first spans of all."""
    if len(spans) <= MAX_EVENTS:
        return spans, 0, True
    chosen: list[_Span] = []
    for begin, _, _ in sorted(steps, reverse=True):
        first = bisect.bisect_left(spans, begin, key=lambda s: s[0])
        if len(spans) - first > MAX_EVENTS:
            break
        chosen = spans[first:]
    whole = bool(chosen)
    chosen = chosen or spans[:MAX_EVENTS]
    return chosen, len(spans) - len(chosen), whole


def _counter(rank: int, name: str, points: list[tuple[float, dict[str, float]]], origin: float) -> dict[str, Any]:
    """Values over time (us from the trace's begin) by category; a category that a point lacks keeps its value."""
    keys = list(dict.fromkeys(k for _, v in points for k in v))
    points.sort(key=lambda p: p[0])
    size = -(-len(points) // POINTS)
    last, times, values = dict.fromkeys(keys, 0.0), [], []
    best: dict[str, float] = {}
    for i, (at, found) in enumerate(points):
        last.update(found)
        if not best or sum(last.values()) > sum(best.values()):
            best = dict(last)
        if i % size == size - 1 or i == len(points) - 1:  # of a stretch the point with the most bytes
            times.append(round(at - origin, 2))
            values.append([best[k] for k in keys])
            best = {}
    return {"rank": rank, "name": name, "keys": keys, "time": times, "values": values}


# ---- what happened, what stands out ----------------------------------------------------------------------------------
def events(run: Run) -> list[dict[str, Any]]:
    """Skipped steps, warnings, checkpoints and changes, in step order; of very many the last, and how many others there
    are."""
    out: list[dict[str, Any]] = []
    for row in run.steps:
        if row.get("skipped"):
            out.append(
                {
                    "step": row["step"],
                    "at": number(row.get("at")),
                    "kind": "skipped",
                    "text": str(row.get("reason") or "") or "the step was skipped",
                }
            )
    for note in run.notes:
        if note["event"] not in ("log", "pipeline"):
            out.append(
                {"step": note["step"], "at": number(note.get("at")), "kind": str(note["event"]), "text": _told(note)}
            )
    known = {n["step"] for n in run.notes if n["event"] == "resume"}
    out += [
        {"step": s, "at": None, "kind": "resume", "text": "steps from here on were run again"}
        for s in run.restarts
        if not {s, s - 1} & known
    ]
    out.sort(key=lambda e: e["step"])
    if more := out[:-MAX_LISTED]:
        text = f"{len(more)} earlier ones are not listed ({sum(e['kind'] == 'skipped' for e in more)} skipped steps)"
        out = [{"step": more[-1]["step"], "at": more[-1]["at"], "kind": "more", "text": text}, *out[-MAX_LISTED:]]
    return out


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


def findings(run: Run) -> list[dict[str, str]]:
    """What a reader should look at first: {"level": "bad" | "note" | "good", "text", "fix"}."""
    out: list[dict[str, str]] = []

    def say(level: str, text: str, fix: str = "") -> None:
        out.append({"level": level, "text": text, "fix": fix})

    _about_loss(run, say)
    _about_time(run, say)
    _about_memory(run, say)
    _about_pipeline(run, say)
    _about_exchange(run, say)
    for p in run.problems:
        say("note", p)
    if not run.steps:
        say(
            "note",
            "metrics.jsonl has no steps: the curves are missing",
            "set deepc.run_dir in the configuration (or DEEPC_RUN_DIR) and run again",
        )
    return out


def _about_exchange(run: Run, say: Callable[..., None]) -> None:
    """1-bit optimizers."""
    rows = [s["exchange"] for s in run.steps if isinstance(s.get("exchange"), dict)]
    whole = next((x for r in rows if (x := number(r.get("uncompressed_bytes")))), None)
    if whole is None:
        return
    sent = [number(r.get("bytes")) or 0.0 for r in rows]
    frozen = int(number(rows[-1].get("frozen_after")) or 0)
    when = f"; the variance was frozen after step {frozen}" if frozen else ""
    say(
        "note",
        f"1-bit optimizer: a rank exchanged {sum(sent) / len(sent) / 2**20:.3g} MiB a step,"
        f" {sent[-1] / 2**20:.3g} MiB at the last, and {whole / 2**20:.3g} MiB uncompressed{when}",
    )


def _about_loss(run: Run, say: Callable[..., None]) -> None:
    known = [s for s in run.steps if s.get("loss") is not None]
    bad = [s for s in known if is_not_finite(s["loss"])]
    if bad:
        first, last = bad[0]["step"], bad[-1]["step"]
        for_good = len(bad) == sum(s["step"] >= first for s in known)
        which = f"at step {first}" if first == last else f"at {len(bad)} steps, from {first} to {last}"
        say(
            "bad" if for_good or not all(s.get("skipped") for s in bad) else "note",
            f"the loss is not finite from step {first} on" if for_good else f"the loss was not finite {which}",
            "lower the learning rate, add gradient_clipping, or look at the data of that step",
        )
    skipped = [s["step"] for s in run.steps if s.get("skipped")]
    if skipped:
        late = [s for s in skipped if s > run.steps[0]["step"] + 30]
        often = len(late) > 0.02 * len(run.steps)
        fix = (
            "gradients overflow again and again: try bf16, a lower learning rate, or clipping"
            if often
            else (
                "once in a while that is normal with a dynamic loss scale"
                if late
                else "normal while the loss scale finds its value"
            )
        )
        say(
            "bad" if often else "note",
            f"{len(skipped)} of {len(run.steps)} steps were skipped ({100 * len(skipped) / len(run.steps):.1f} %), the"
            f" last at step {skipped[-1]}",
            fix,
        )
    losses = run.values("loss")
    if len(losses) >= 20:
        k = len(losses) // 10
        upto = [0.0, *itertools.accumulate(losses)]
        means = [(upto[i + k] - upto[i]) / k for i in range(len(losses) - k + 1)]
        begin, end, best = means[0], means[-1], min(means)
        if end > begin:
            say(
                "bad",
                f"the loss ends higher ({end:.4g}) than it began ({begin:.4g})",
                "lower the learning rate, or warm up longer",
            )
        elif end - best > 0.25 * (begin - best):
            say("note", f"the loss rose again at the end: {end:.4g}, after a best of {best:.4g} (means of {k} steps)")


def _about_time(run: Run, say: Callable[..., None]) -> None:
    parts = split(run)
    if parts:
        mean, total = parts["mean"], sum(parts["mean"].values())
        advice = {
            "data": "more workers in the data loader, or data that is tokenised beforehand",
            "communication": (
                "look at the ranks in the timeline: one that is late makes all wait; between nodes ZeRO++'s keys send"
                " less"
            ),
            "disk": "a faster disk for checkpoints and offload, or fewer checkpoints",
        }
        for kind, fix in advice.items():
            if total and mean[kind] / total > 0.1:
                say(
                    "bad" if mean[kind] / total > 0.25 else "note",
                    f"{100 * mean[kind] / total:.0f} % of a step is waiting for {kind}",
                    fix,
                )
        if total and mean["compute"] / total > 0.9:
            say("good", f"{100 * mean['compute'] / total:.0f} % of a step is computing")
    seconds = [(row["step"], s) for row, s in zip(run.steps, step_seconds(run)) if s is not None][1:]
    if len(seconds) >= 10:
        middle = statistics.median(s for _, s in seconds)
        slow = [n for n, s in seconds if s > 2 * middle]
        if slow:
            say(
                "note",
                f"{len(slow)} step{'s' * (len(slow) > 1)} took more than twice the median of {middle:.3g} s: "
                f"{', '.join(map(str, slow[:8]))}"
                f"{' ...' if len(slow) > 8 else ''}",
                "checkpoints, evaluation, another process on the machine, or memory that is written back",
            )


def _about_memory(run: Run, say: Callable[..., None]) -> None:
    mem = memory(run)
    if mem is None:
        return
    plan, measured = mem["planned"], mem["rank_peak"]
    if plan and measured:
        off, text = (
            measured / plan - 1,
            (
                f"rank 0 took {measured / MIB:,.0f} MiB of its own at the peak of the first step, the memory plan said"
                f" {plan / MIB:,.0f}"
            ),
        )
        if off > 0.1:
            say(
                "note",
                f"{text} ({100 * off:+.1f} %)",
                "another batch shape than the sample's, or memory that something else in the process took",
            )
        elif off > -0.1:
            say("good", f"{text} ({100 * off:+.1f} %)")
    left = next((r["least"] for r in mem["rows"] if r["name"] == "available"), None)
    peak = peak_bytes(run)
    if left is not None and peak and left < 0.1 * peak:
        say(
            "bad",
            f"at one point {left / MIB:,.0f} MiB were left on the node",
            "docs/memory-plan.md tells what makes a run smaller",
        )
