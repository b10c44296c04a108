"""What a page shows of a Run: curves thinned to what a screen can show, medians, the split of a step's time, memory
against its prediction, the communication table, a timeline of a few steps, and what stands out. Plain data (JSON types)
out; no HTML here.
"""

from __future__ import annotations

import bisect
import functools
import re
from collections.abc import Callable
from typing import Any

from ...errors import ArgumentError
from ...plan.schedule import Schedule
from .folder import Run, is_not_finite, number
from .seen import SPLIT, look
from .series import POINTS, Curve

MAX_EVENTS = 30_000  # of the timeline
MIB = 2.0**20
_Span = tuple[float, float, int, int]  # begin and duration in us, lane, name
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
        "skipped": look(run).skipped.ticks,
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
def curves(run: Run) -> dict[str, dict[str, Any]]:
    """name -> Curve.shown(), the well-known ones first; a value that is not finite leaves a gap. What a script logs
    under a name that steps have is a curve of its own."""
    seen = look(run)
    found = dict(seen.curves)
    for name, curve in seen.logged.items():
        found[f"{name} (engine.log)" if name in seen.curves else name] = curve
    order = sorted(found, key=lambda n: (_FIRST.index(n) if n in _FIRST else len(_FIRST), n))
    return {name: found[name].shown() for name in order}


# ---- time ------------------------------------------------------------------------------------------------------------
def split(run: Run) -> dict[str, Any] | None:
    """Seconds per step: computing and waiting for communication, data and disk, a checkpoint before the step included;
    means of stretches of the run, as parts of one bar must belong together. None if no step says how long it waited."""
    seen = look(run)
    found, steps = seen.split.found, seen.split.count
    if not steps:
        return None
    return {
        "step": [first for _, first, _, _ in found],
        "to": [last for _, _, last, _ in found],
        "mean": {k: total / steps for k, total in zip(SPLIT, seen.totals, strict=True)},
        "steps": steps,
        "parts": {k: [sums[i] / n for n, _, _, sums in found] for i, k in enumerate(SPLIT)},
    }


def _median(run: Run, name: str) -> float | None:
    """Of a figure of the steps, without the first one, which is slower, where there are others."""
    pace = look(run).paces.get(name)
    return pace.median() if pace is not None else None


_VALIDATION = ("eval_loss", "val_loss", "valid_loss", "validation_loss", "test_loss")


def _validation(run: Run) -> tuple[str, Curve] | None:
    """What a script logged as its validation loss, and its name, under the names that loops give it."""
    found = look(run).logged
    plain = {name: name.lower().replace("/", "_").replace(" ", "_").replace(".", "_") for name in found}
    return next(((name, found[name]) for wanted in _VALIDATION for name, p in plain.items() if p == wanted), None)


def summary(run: Run) -> dict[str, Any]:
    """The figures of the header and of the comparison."""
    seen = look(run)
    losses, count = seen.losses, seen.losses.finite.count
    lost = is_not_finite(losses.final)  # what it was before says nothing of how this run ended
    model = run.info.get("model")
    model = model if isinstance(model, dict) else {}
    tail = losses.finite.tail(max(min(5, count), count // 20)) if count and not lost else None
    validation = _validation(run)
    waits, total = split(run), 0.0
    if waits:
        total = sum(waits["mean"].values())
    return {
        "steps": seen.last_step,
        "first_step": seen.first_step,
        "first_loss": losses.first,
        "loss": str(losses.final) if lost else losses.last,
        "best_loss": losses.best,
        "tail_loss": tail[1] if tail else None,
        "tail_steps": tail[0] if tail else 0,
        "validation": validation[1].last.value if validation else None,
        "best_validation": validation[1].low.value if validation else None,
        "validation_name": validation[0] if validation else "",
        "skipped": seen.skipped.count,
        "step_s": _median(run, "time_s"),
        "slowest_s": seen.paces["time_s"].most() if "time_s" in seen.paces else None,
        "duration_s": seen.clock,
        "tokens_per_s": _median(run, "tokens_per_s"),
        "samples_per_s": _median(run, "samples_per_s"),
        "tflops": _median(run, "tflops"),
        "fraction_of_peak": _median(run, "fraction_of_peak"),
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


def memory(run: Run) -> dict[str, Any] | None:
    """Rows (name, largest, last and least measured bytes), bytes over the steps, the prediction, and what of it was
    measured."""
    told = run.info.get("predicted")
    told = told if isinstance(told, dict) else None
    series = look(run).memory
    states = _states(run)
    if not series and told is None and not states:
        return None
    rows = [
        {"name": n, "measured": c.high.value, "last": c.last.value, "least": c.low.value, "count": n in _COUNTS}
        for n, c in series.items()
    ]
    over = {
        n: {k: v for k, v in c.shown().items() if k in ("step", "value")}
        for n, c in series.items()
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
    seen = look(run)
    return seen.host_peak if seen.gpu_peak is None else seen.gpu_peak


def rank_peak(run: Run) -> float | None:
    """Own bytes of rank 0's peak through the first step above the process before initialize, if the engine could
    tell."""
    return look(run).rank_peak


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
    noted = look(run).batch
    if noted is None:
        return None
    try:
        return _batch(noted)
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
    happened = look(run).happened
    out, more = happened.listed(), happened.last_other
    if more is not None:
        text = f"{happened.others} earlier ones are not listed ({happened.others_skipped} skipped steps)"
        out = [{"step": more["step"], "at": more["at"], "kind": "more", "text": text}, *out]
    return out


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
    if not look(run).steps:
        say(
            "note",
            "metrics.jsonl has no steps: the curves are missing",
            "set deepc.run_dir in the configuration (or DEEPC_RUN_DIR) and run again",
        )
    return out


def _about_exchange(run: Run, say: Callable[..., None]) -> None:
    """1-bit optimizers."""
    found = look(run).exchange
    whole, last = found.uncompressed, number(found.last.get("bytes")) or 0.0
    if not whole:
        return
    frozen = int(number(found.last.get("frozen_after")) or 0)
    when = f"; the variance was frozen after step {frozen}" if frozen else ""
    say(
        "note",
        f"1-bit optimizer: a rank exchanged {found.bytes / found.count / 2**20:.3g} MiB a step,"
        f" {last / 2**20:.3g} MiB at the last, and {whole / 2**20:.3g} MiB uncompressed{when}",
    )


def _about_loss(run: Run, say: Callable[..., None]) -> None:
    seen = look(run)
    losses, skipped = seen.losses, seen.skipped
    if losses.bad:
        first, last = losses.bad_first, losses.bad_last
        for_good = losses.bad == losses.since
        which = f"at step {first}" if first == last else f"at {losses.bad} steps, from {first} to {last}"
        say(
            "bad" if for_good or not losses.bad_were_skipped else "note",
            f"the loss is not finite from step {first} on" if for_good else f"the loss was not finite {which}",
            "lower the learning rate, add gradient_clipping, or look at the data of that step",
        )
    if skipped.count:
        often = skipped.late > 0.02 * seen.steps
        fix = (
            "gradients overflow again and again: try bf16, a lower learning rate, or clipping"
            if often
            else (
                "once in a while that is normal with a dynamic loss scale"
                if skipped.late
                else "normal while the loss scale finds its value"
            )
        )
        say(
            "bad" if often else "note",
            f"{skipped.count} of {seen.steps} steps were skipped ({100 * skipped.count / seen.steps:.1f} %), the last"
            f" at step {skipped.last}",
            fix,
        )
    if losses.finite.count >= 20:
        k, means = losses.finite.means(losses.finite.count // 10)
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
    pace = look(run).paces.get("time_s")
    if pace is not None and pace.rest.count >= 10:
        middle = pace.rest.median() or 0.0
        count, slow = pace.above(2 * middle)
        if count:
            say(
                "note",
                f"{count} step{'s' * (count > 1)} took more than twice the median of {middle:.3g} s: "
                f"{', '.join(map(str, slow[:8]))}"
                f"{' ...' if count > 8 else ''}",
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
