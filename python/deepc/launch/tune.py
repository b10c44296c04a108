"""`deepc tune`: short real trials of a training script with changed configurations; the fastest is written as a ready
ds_config.json. A trial is `deepc run` of the script with a configuration of its own in the place of the given one;
what it is worth stands in its metrics.jsonl, so that the script needs no change. Everything that was tried is kept in a
state file: a tuning that was interrupted goes on. docs/tuning.md."""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..config.tree import Config
from ..core.files import atomic_write
from ..errors import ArgumentError, DeepcError
from ..plan.predict.search import planner
from ..plan.predict.search import space as searched
from ..plan.predict.search.cluster import Cluster
from ..plan.predict.search.models import model_of
from .host.rank import die_with_launcher

_GRACE_S = 20.0  # for the ranks of a trial to end
_SCHEDULES = ("1f1b", "zb-h1", "zb-v", "interleaved", "gpipe")
# DeepSpeed's keys of "autotuning" that say something here, with DeepSpeed's defaults where they are sensible
_DEFAULTS: dict[str, Any] = {
    "results_dir": "autotuning_results",
    "overwrite": False,
    "metric": "throughput",
    "start_profile_step": 3,
    "end_profile_step": 8,
    "min_train_micro_batch_size_per_gpu": 1,
    "max_train_micro_batch_size_per_gpu": 1024,
    "tuner_type": "model_based",
    "tuner_early_stopping": 5,
    "tuner_num_trials": 50,
}
_COUNTS = [k for k, v in _DEFAULTS.items() if type(v) is int]
_IGNORED: tuple[str, ...] = (
    "enabled",
    "exps_dir",
    "fast",
    "max_train_batch_size",
    "num_tuning_micro_batch_sizes",
    "mp_size",
)
_IGNORED += ("arg_mappings", "model_info", "model_info_path")


@dataclass(frozen=True)
class Point:
    """What a trial changes in the configuration. fuse, schedule: None where they are not tuned."""

    micro: int
    accumulation: int
    stage: int
    fuse: bool | None = None
    schedule: str | None = None

    def __str__(self) -> str:
        out = [f"micro-batch {self.micro} x {self.accumulation}", f"ZeRO {self.stage}"]
        out += [] if self.schedule is None else [self.schedule]
        out += ["fused"] if self.fuse else []
        return ", ".join(out)

    def apply(self, base: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration of the trial."""
        config: dict[str, Any] = json.loads(json.dumps(base))
        config["train_micro_batch_size_per_gpu"] = self.micro
        config["gradient_accumulation_steps"] = self.accumulation
        _section(config, "zero_optimization")["stage"] = self.stage
        if self.fuse is not None:
            _section(config, "deepc")["fuse"] = "auto" if self.fuse else False
        if self.schedule is not None:
            _section(_section(config, "deepc"), "pipeline")["schedule"] = self.schedule
        return config


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Of `config`, made where it is missing or null."""
    if config.get(name) is None:
        config[name] = {}
    found: dict[str, Any] = config[name]
    return found


@dataclass(frozen=True)
class Trial:
    """A point and what came of it: "ok", "out of memory", "failed" or "too slow"; samples_per_s: 0 if not ok."""

    point: Point
    status: str
    samples_per_s: float = 0.0
    step_s: float = 0.0
    note: str = ""


class Space:
    """The points that a configuration leaves open. ArgumentError if it says too little."""

    def __init__(self, base: Mapping[str, Any], ranks: int, options: Mapping[str, Any], fuse: bool) -> None:
        config = Config.load(dict(base), world_size=ranks, device_type="cpu")
        self.stages = int((base.get("pipeline") or {}).get("stages") or 1)
        batch, micro, passes = (
            getattr(config, k)
            for k in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        )
        if not (batch and micro and passes):
            raise ArgumentError("tune: the configuration must say train_batch_size or train_micro_batch_size_per_gpu")
        self.batch, self.replicas = int(batch), int(batch) // (int(micro) * int(passes))
        least, most = (int(options[f"{k}_train_micro_batch_size_per_gpu"]) for k in ("min", "max"))
        per_rank = self.batch // self.replicas
        self.micros = [n for n in range(1, per_rank + 1) if per_rank % n == 0 and least <= n <= most]
        if not self.micros:
            raise ArgumentError(
                f"tune: no micro-batch from {least} to {most} divides the {per_rank} samples of a rank and step; widen"
                " autotuning.min_ and max_train_micro_batch_size_per_gpu"
            )
        zero = base.get("zero_optimization") or {}
        offloads = [x.device != "none" for x in (config.zero.offload_param, config.zero.offload_optimizer)]
        self.zero = [3] if offloads[0] else [1, 3] if offloads[1] else [0, 1, 3]  # stage 2 is stage 1 here (design.md)
        given = bool((base.get("deepc") or {}).get("fuse"))  # first, as all of what is given
        self.fuses: list[bool | None] = [given, not given] if fuse else [None]
        self.schedules: list[str | None] = list(_SCHEDULES) if self.stages > 1 else [None]
        own = (base.get("deepc") or {}).get("pipeline") or {}
        self.first = self.point(
            int(micro), int(zero.get("stage", 0)), self.fuses[0],
            own.get("schedule", "1f1b") if self.stages > 1 else None,
        )  # fmt: skip

    def point(self, micro: int, stage: int, fuse: bool | None, schedule: str | None) -> Point:
        return Point(micro, self.batch // self.replicas // micro, stage, fuse, schedule)

    def all(self) -> Iterator[Point]:
        for stage, schedule, fuse, micro in itertools.product(self.zero, self.schedules, self.fuses, self.micros):
            yield self.point(micro, stage, fuse, schedule)

    def neighbours(self, at: Point) -> Iterator[Point]:
        """Points that differ in one thing, those that most often help first."""
        i = min(range(len(self.micros)), key=lambda k: abs(self.micros[k] - at.micro))
        for k in (i + 1, i - 1):
            if 0 <= k < len(self.micros):
                yield self.point(self.micros[k], at.stage, at.fuse, at.schedule)
        for fuse in self.fuses:
            yield replace(at, fuse=fuse)
        for stage in self.zero:
            yield replace(at, stage=stage)
        for schedule in self.schedules:
            yield replace(at, schedule=schedule)


class Tuning:
    """A search with a memory: `trials` are in the state file as soon as they end."""

    def __init__(self, folder: Path, key: str, *, overwrite: bool) -> None:
        self.file, self.key = folder / "state.json", key
        folder.mkdir(parents=True, exist_ok=True)
        self.trials: list[Trial] = []
        if overwrite or not self.file.exists():
            return
        try:
            told = json.loads(self.file.read_text(encoding="utf-8"))
            rows = [Trial(**{**t, "point": Point(**t["point"])}) for t in told["trials"]]
        except (OSError, ValueError, KeyError, TypeError) as exc:
            raise ArgumentError(f"tune: {self.file} can't be read ({exc}); remove it, or give --overwrite") from exc
        if told.get("key") != key:
            raise ArgumentError(
                f"tune: {self.file} is of another configuration, program or number of ranks; give --overwrite to begin"
                " anew, or another --results"
            )
        self.trials = rows

    @property
    def best(self) -> Trial | None:
        return max((t for t in self.trials if t.status == "ok"), key=lambda t: t.samples_per_s, default=None)

    def add(self, trial: Trial) -> None:
        """Kept on disk at once: whole, or as it was."""
        self.trials.append(trial)
        text = json.dumps({"key": self.key, "trials": [asdict(t) for t in self.trials]}, indent=1)
        with atomic_write(self.file) as f:
            f.write((text + "\n").encode())

    def run(
        self,
        space: Space,
        starts: list[Point],
        measure: Callable[[Point], Trial],
        *,
        most: int,
        patience: int,
        grid: bool,
        say: Callable[[str], None],
    ) -> None:
        """Tries `starts`, then (grid) all points or what is next to the best, until nothing next to it is untried,
        `most` trials are done, or `patience` in a row did not get better."""
        known = {t.point: t for t in self.trials}
        if known:
            say(f"going on after {len(known)} trial{'s' * (len(known) != 1)}")
        worse = 0
        queue: Iterator[Point] = iter(starts)
        while len(self.trials) < most and worse < patience:
            point = next((p for p in queue if p not in known), None)
            if point is None:
                best = self.best
                if best is None and not grid:
                    rest = [p for p in space.all() if p not in known]
                    point = min(rest, key=lambda p: (p.micro, -p.stage), default=None)  # what takes least memory
                else:
                    near = space.all() if grid or best is None else space.neighbours(best.point)
                    point = next((p for p in near if p not in known), None)
            if point is None:
                return
            before = self.best
            try:
                trial = measure(point)
            except KeyboardInterrupt:
                if done := len(self.trials):
                    had = f"{done} trial{'s' * (done != 1)}"
                    say(f"stopped in {point}; the same command goes on after the {had} that {self.file} has")
                raise
            known[point] = trial
            self.add(trial)
            better = trial.status == "ok" and (before is None or trial.samples_per_s > before.samples_per_s)
            worse = 0 if better else worse + 1
            what = f"{trial.samples_per_s:.4g} samples/s" if trial.status == "ok" else f"{trial.status}: {trial.note}"
            say(f"trial {len(self.trials)} of at most {most}: {point}: {what}{' (best so far)' if better else ''}")

    def table(self) -> str:
        rows = sorted(self.trials, key=lambda t: -t.samples_per_s)
        lines = ["| configuration | samples/s | s a step | |", "|---|---|---|---|"]
        for t in rows:
            note = "" if t.status == "ok" else f"{t.status}: {t.note}".replace("|", "/")
            lines.append(f"| {t.point} | {t.samples_per_s:.4g} | {t.step_s:.4g} | {note} |")
        return "\n".join(lines)


# ---- a trial ---------------------------------------------------------------------------------------------------------
def _steps(file: Path) -> list[dict[str, Any]]:
    """Whole lines of metrics.jsonl that are steps."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        return []
    rows = []
    for line in text.split("\n")[:-1]:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "step" in row and "event" not in row:
            rows.append(row)
    return rows


def _why(text: str) -> tuple[str, str]:
    """(status, last line that says something) of a trial that ended by itself."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = next((x for x in reversed(lines) if re.search(r"(Error|error|Killed|killed|signal)\b", x)), "")
    memory = re.search(r"OutOfMemoryError|out of memory|MemoryError|can't allocate memory|SIGKILL|signal 9", text)
    return ("out of memory" if memory else "failed", (said or (lines[-1] if lines else "no output"))[:200])


def measure(point: Point, config: Mapping[str, Any], command: list[str], folder: Path, *, first: int, last: int,
            limit_s: float) -> Trial:  # fmt: skip
    """Runs one trial, and ends it when step `last` is done. command: with "{config}" where the configuration's path
    goes. Nothing else is ended than what was started here."""
    folder.mkdir(parents=True, exist_ok=True)
    file, metrics = folder / "ds_config.json", folder / "run" / "metrics.jsonl"
    file.write_text(json.dumps(point.apply(config), indent=2) + "\n", encoding="utf-8")
    if metrics.exists():
        metrics.unlink()
    env = {**os.environ, "DEEPC_RUN_DIR": str(folder / "run"), "DEEPC_LOG": "none"}
    with open(folder / "output.txt", "wb") as out:
        process = subprocess.Popen(
            [str(file) if word == "{config}" else word for word in command],
            stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True,
            preexec_fn=functools.partial(die_with_launcher, signal.SIGTERM),  # it ends with a tuning that is killed
        )  # fmt: skip
        end = time.monotonic() + limit_s
        try:
            while process.poll() is None and time.monotonic() < end:
                rows = _steps(metrics)
                if rows and rows[-1]["step"] >= last:
                    break
                try:
                    process.wait(0.2)
                except subprocess.TimeoutExpired:
                    continue
            late = process.poll() is None and time.monotonic() >= end
        finally:
            code = _end(process)
    rows = [r for r in _steps(metrics) if first < r["step"] <= last]
    seconds = sum(float(r["time_s"]) for r in rows)
    died = not late and code != 0 and not (rows and rows[-1]["step"] == last)  # short of the last step, by itself
    if len(rows) >= min(2, last - first) and seconds > 0 and not died:
        samples = rows[-1]["samples"] - rows[0]["samples"]
        each = samples / (len(rows) - 1) if len(rows) > 1 else rows[0]["samples"] / rows[0]["step"]
        return Trial(point, "ok", each * len(rows) / seconds, seconds / len(rows))
    if late:
        return Trial(point, "too slow", note=f"step {last} was not reached in {limit_s:.0f} s")
    status, note = _why((folder / "output.txt").read_text(encoding="utf-8", errors="replace"))
    if code == 0:
        status, note = "failed", f"the program ended before step {last}"
    return Trial(point, status, note=note)


def _end(process: subprocess.Popen[bytes]) -> int:
    """The launcher ends its ranks when it is asked to; what does not end in time is ended with its session's group."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its own group: start_new_session
    return process.wait()


# ---- the command -----------------------------------------------------------------------------------------------------
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `deepc tune`."""
    parser.add_argument("config", metavar="CONFIG", help="the DeepSpeed JSON to start from; one of ARGS must name it")
    parser.add_argument("program", metavar="PROGRAM", help="the training script")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="of the script")
    parser.add_argument("--num_ranks", type=int, metavar="N", help="ranks of a trial (GPUs, or 2 on CPUs)")
    parser.add_argument("--results", metavar="DIR", help="state file, trials and the result (autotuning.results_dir)")
    parser.add_argument("--trials", type=int, metavar="N", help="at most (autotuning.tuner_num_trials, 50)")
    parser.add_argument("--limit", type=float, default=300.0, metavar="S", help="seconds of a trial (300)")
    parser.add_argument("--grid", action="store_true", help="try everything (autotuning.tuner_type gridsearch)")
    parser.add_argument("--fuse", action="store_true", help="try deepc.fuse as well")
    parser.add_argument("--overwrite", action="store_true", help="forget earlier trials (autotuning.overwrite)")
    parser.add_argument(
        "--cluster", metavar="FILE", help="with --model: start from the planner's best (docs/planner.md)"
    )
    parser.add_argument("--model", metavar="MODEL", help="a name, sizes, or a transformers config.json")
    parser.add_argument("-o", "--output", metavar="FILE", help="the tuned configuration (ds_config.json in --results)")


def options_of(base: Mapping[str, Any], grid: bool = False) -> dict[str, Any]:
    """The section "autotuning" with defaults. grid: everything is tried. ArgumentError for what it can't be."""
    given = base.get("autotuning") or {}
    if not isinstance(given, Mapping):
        raise ArgumentError(f"tune: autotuning must be an object, got {given!r}")
    if unknown := [k for k in given if k not in _DEFAULTS and k not in _IGNORED]:
        raise ArgumentError(f"tune: autotuning.{unknown[0]} is unknown; known are {', '.join(_DEFAULTS)}")
    given = {k: v for k, v in given.items() if k in _DEFAULTS and v is not None}
    # who asks for everything is stopped by what he says alone
    endless = dict.fromkeys(("tuner_early_stopping", "tuner_num_trials"), 10**9)
    out = {**_DEFAULTS, **(endless if grid or given.get("tuner_type") == "gridsearch" else {}), **given}
    if out["metric"] not in ("throughput", "latency"):  # of one batch size, the same order
        raise ArgumentError(f"tune: autotuning.metric {out['metric']!r}: expected throughput or latency")
    for k in _COUNTS:
        if type(out[k]) is not int or out[k] < 1:
            raise ArgumentError(f"tune: autotuning.{k} {out[k]!r} must be a whole number of at least 1")
    if type(out["overwrite"]) is not bool:
        raise ArgumentError(f"tune: autotuning.overwrite {out['overwrite']!r} must be true or false")
    if not isinstance(out["results_dir"], str):
        raise ArgumentError(f"tune: autotuning.results_dir {out['results_dir']!r} must be the name of a folder")
    if out["end_profile_step"] <= out["start_profile_step"]:
        raise ArgumentError("tune: autotuning.end_profile_step must be above start_profile_step")
    return out


def _planned(args: argparse.Namespace, space: Space, precision: str) -> list[Point]:
    """The planner's points, best first: those of this batch and these pipeline stages."""
    if not args.cluster and not args.model:
        return []
    if not (args.cluster and args.model):
        raise ArgumentError("tune: --cluster and --model belong together: the planner needs both")
    case = planner.case_of(Cluster.load(args.cluster), model_of(args.model), space.batch, precision)
    free = searched.Space(tp=1, sp=1, ep=1, pp=space.stages, stages=space.zero, offloads=("none",), recomputes=(False,))
    found = planner.search(case, free, 4)
    return [
        space.point(p.layout.micro, p.layout.stage, space.fuses[0], p.layout.schedule if space.stages > 1 else None)
        for p in found.best
        if p.layout.micro in space.micros
    ]


def run(args: argparse.Namespace) -> int:
    """`deepc tune`. Exit code 1: no trial trained."""
    try:
        base = json.loads(Path(args.config).read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ArgumentError(f"tune: {args.config}: {exc}") from exc
    if not isinstance(base, dict):
        raise ArgumentError(f"tune: {args.config} must hold an object")
    options = options_of(base, args.grid)
    grid = args.grid or options["tuner_type"] == "gridsearch"
    base.pop("autotuning", None)
    base = {k: v for k, v in base.items() if v is not None}  # a section that is null is none
    ranks = args.num_ranks or _default_ranks()
    if ranks < 1 or (args.trials is not None and args.trials < 1) or args.limit <= 0:
        raise ArgumentError("tune: --num_ranks, --trials and --limit must be above 0")
    if args.output and not Path(args.output).parent.is_dir():  # said before anything is tried
        raise ArgumentError(f"tune: --output {args.output}: there is no folder {str(Path(args.output).parent)!r}")
    same = [os.path.abspath(word) == os.path.abspath(args.config) for word in args.args]
    if not any(same):
        raise ArgumentError(
            f"tune: none of the program's arguments is {args.config}, so that trials can't replace it. Have the script"
            f" take it as an option: deepc tune {args.config} {args.program} --deepspeed_config {args.config}"
        )
    words = ["{config}" if hit else word for hit, word in zip(same, args.args)]
    command = [sys.executable, "-m", "deepc", "run", "--num_gpus", str(ranks), args.program, *words]
    space = Space(base, ranks, options, args.fuse)
    folder = Path(args.results or options["results_dir"])
    key = hashlib.sha256(json.dumps([base, ranks, args.program, words], sort_keys=True).encode()).hexdigest()
    tuning = Tuning(folder, key, overwrite=args.overwrite or bool(options["overwrite"]))
    precision = next((p for p in ("bf16", "fp16") if (base.get(p) or {}).get("enabled")), "fp32")
    starts = [space.first, *_planned(args, space, precision)]

    def one(point: Point) -> Trial:
        name = re.sub(r"[^a-z0-9]+", "-", str(point).lower())
        return measure(
            point, base, command, folder / name, limit_s=args.limit,
            first=options["start_profile_step"], last=options["end_profile_step"],
        )  # fmt: skip

    most, patience = args.trials or options["tuner_num_trials"], options["tuner_early_stopping"]
    tuning.run(
        space, starts, one, most=min(most, len({*starts, *space.all()})) if grid else most,
        patience=10**9 if args.grid else patience, grid=grid, say=lambda text: print(text, flush=True),
    )  # fmt: skip
    (folder / "table.md").write_text(tuning.table() + "\n", encoding="utf-8")
    print(f"\n{tuning.table()}\n")
    best = tuning.best
    if best is None:
        print("no trial trained: see output.txt in the trials' folders", file=sys.stderr)
        return 1
    output = Path(args.output or folder / "ds_config.json")
    output.write_text(json.dumps(best.point.apply(base), indent=2) + "\n", encoding="utf-8")
    first = next((t for t in tuning.trials if t.point == space.first and t.status == "ok"), None)
    gain = f", {best.samples_per_s / first.samples_per_s:.2f} times the given one's" if first else ""
    print(f"{output}: {best.point}, {best.samples_per_s:.4g} samples/s{gain}")
    return 0


def _default_ranks() -> int:
    try:
        import torch

        return torch.cuda.device_count() or 2
    except ImportError as exc:
        raise DeepcError(f"torch can't be imported: {exc}") from exc
