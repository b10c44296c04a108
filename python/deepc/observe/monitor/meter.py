"""The meter of one engine: what a step took and did, from a handful of clock reads, and who is told.

It adds no message and no wait for the device to a step: what the other ranks have to say (losses, tokens, waits,
memory) rides in the message that carries the gradient norm (`row`, `take`). Lines, files and trackers are fed between
steps, in bunches, and never more often than their own cost allows: whoever takes c seconds is not asked again for 1,000
c.

It listens to the engine's events and rides in the message of the norm (row, put, take). Everything else is lazy.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import numbers
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...core import env
from ...core.lib import counters
from ...core.ops import torch_dtype
from ...core.telemetry import waits
from ...engine.events import Listener
from ...errors import ArgumentError
from . import counts, sinks, tiers

logger = logging.getLogger("deepc")
_clock = time.perf_counter
_MEASUREMENTS = 3  # of the peak, after the first
SHARE = 1e-3  # of the time that lines, files and trackers may take together
_FLUSH_S, _KEEP, _SAMPLE_S, _LIVE_S = 1.0, 512, 1.0, 0.5
_meters: weakref.WeakSet[Meter] = weakref.WeakSet()
_made = 0


class Meter(Listener):
    """`engine.monitor`, made at the end of initialize. `last`, `set_total_steps`, `set_flops` and `log` are for users
    and other modules."""

    # loss, has it a loss, tokens, FLOPs, waits for data, communication and disk, private bytes now and at the peak
    ROW = 9

    def __init__(self, engine: Any) -> None:
        global _made
        _made += 1
        self._engine: Any = weakref.proxy(engine)
        self._pid = os.getpid()
        self._config = config = engine._config
        self._rank, self._world = engine.everyone.rank, engine.everyone.world
        self._on_cpu = engine.device.type == "cpu"
        self._prefix = f"engine {_made}: " if len(_meters) else ""
        self._whose = {"engine": _made} if len(_meters) else {}  # the same for lines of JSON
        _meters.add(self)

        at = engine.mesh.coordinates(self._rank)
        self._answers = at.tp == 0  # tensor-parallel ranks run the same tokens: the first of them counts
        self._sequence_ranks = engine.mesh.sp  # each has a part of the positions
        self._count_tokens = counts.TokenCounter(counts.is_encoder_decoder(engine.module))
        # Of a pipeline its whole, since only the first stage sees tokens. Else made at the first step that has some.
        self._token_flops = self._of_all_stages() if engine.mesh.pp > 1 else None
        self.elements, self.trained = self._model_size()
        self._flops_a_step: float | None = None  # of this rank, given by the profiler or the user
        self._flops_a_token: float | None = None
        self._flops_a_sample: float | None = None
        self._peak: float | None = None  # FLOP/s of all ranks
        self._may_measure = _MEASUREMENTS  # more of it
        self._total: int | None = config.deepc.log.total_steps
        self._about = False  # that number is a guess

        # this rank, since the last step
        self._losses: list[torch.Tensor] = []
        self._candidate: list[
            torch.Tensor
        ] = []  # outputs that look like a loss, where the script calls loss.backward() itself
        self._tokens, self._flops = 0, 0.0
        self._data = self._outside = self._forward = self._backward = 0.0
        self._began: float | None = None  # of the step's first forward, less what it waited for data
        self._rested: float | None = None  # when the engine was last left
        self._entered = self._start = _clock()
        self._training = self._in_backward = False
        self._communication_rested = 0.0
        self._loader_seen = waits.seconds["data"]
        self._communication_seen, self._disk_seen = waits.communication(), waits.seconds["disk"]
        self._several = engine.plan.nodes > 1 or len(engine.everyone.node_sizes) > 1
        self._sent, self._sent_seen = 0, -1  # since the first forward: what made the ranks' weights alike is no step's
        self._moved_in: dict[str, float] = {}
        self._moved_seen: dict[str, float] = self._moved() if engine.plan.updates_on_disk else {}
        self._sample_at, self._memory_row, self._shared = 0.0, (0.0, 0.0), 0
        self._memory: dict[str, Any] = {}
        self._row = [0.0] * self.ROW
        self._rows: list[list[float]] = []

        # of the job
        self._raw: tuple[Any, ...] | None = None  # the last step
        self._made_record: dict[str, Any] | None = None
        self._sums = _Sums()
        self._pace: deque[tuple[int, float]] = deque(maxlen=64)
        self._scalars: dict[str, Any] = {}
        self._pending: list[dict[str, Any]] = []
        self._warned = False
        self._disk_began: dict[str, float] = {}
        self._on_begin: dict[str, Callable[[Any], None]] = {
            "forward": self._forward_begins,
            "backward": self._backward_begins,
            "step": self._step_begins,
            "save_checkpoint": lambda _: self._disk_begins("save"),
            "load_checkpoint": lambda _: self._disk_begins("load"),
        }
        self._on_end: dict[str, Callable[[Any], None]] = {
            "forward": self._forward_ends,
            "backward": self._backward_ends,
            "step": self._step_ends,
            "discard": self._discard,
            "save_checkpoint": lambda path: self._disk_ends("save", path),
            "load_checkpoint": lambda path: self._disk_ends("load", path),
            "measure": self._batch_is_measured,
        }
        self._open(engine)

    # ---- set-up ------------------------------------------------------------------------------------------------------
    def _open(self, engine: Any) -> None:
        log = self._config.deepc.log
        self._form = env.text("DEEPC_LOG", config=log.format)
        every_rank = env.text("DEEPC_LOG_RANKS", config=log.ranks) == "all"
        self.speaks = self._form != "none" and (self._rank == 0 or every_rank)
        if every_rank and self._world > 1:
            self._prefix = f"rank {self._rank}: " + self._prefix
            self._whose["rank"] = self._rank
        self._own = every_rank
        asked = "steps_per_print" in self._config.given
        self._every: int | None = self._config.steps_per_print if asked else None
        self._by_time = not asked
        self._seconds = log.seconds
        self._lines: Any = None
        self._line_at = 0.0
        self._shown = 0  # the step of the last line
        self._guard = sinks.Guard()
        self._flush_at = 0.0
        if self._rank == 0:
            self._open_sinks(engine)
        self._writes = bool(self._guard.sinks)

    def _open_sinks(self, engine: Any) -> None:
        config = self._config
        folder = env.text("DEEPC_RUN_DIR", config=config.deepc.run_dir)
        if folder:
            from .run_info import describe

            began = time.time() - (_clock() - self._start)
            self._guard.open(
                f"the run folder {folder}", lambda: sinks.Folder(folder, describe(engine, self, began), began)
            )
        if any(getattr(config, s).enabled for s in ("tensorboard", "wandb", "csv_monitor", "comet")):
            from .experiments import open_enabled

            for monitor in open_enabled(config, self._guard):
                monitor.times = config.wall_clock_breakdown

    # ---- what the engine tells ---------------------------------------------------------------------------------------
    def begin(self, name: str, now: int, what: Any) -> None:
        if (told := self._on_begin.get(name)) is not None:
            told(what)

    def end(self, name: str, now: int, what: Any) -> None:
        if (told := self._on_end.get(name)) is not None:
            told(what)

    def _forward_begins(self, given: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        now = self._entered = _clock()
        if self._sent_seen < 0:
            self._sent_seen = self._engine.comm_bytes["total"] if self._several else 0
        self._training = torch.is_grad_enabled()
        if not self._training:
            self._rested = None  # an evaluation lies between: what was outside of the engine is not waiting for data
            return
        loaded = waits.seconds["data"]
        waited = loaded - self._loader_seen
        if self._rested is not None:  # between stages of a pipeline it waits for other ranks
            gap = now - self._rested - (waits.communication() - self._communication_rested)
            if waited == 0.0:
                waited = gap
            self._outside += max(0.0, gap - waited)
        self._loader_seen = loaded
        self._data += waited
        if self._began is None:
            self._began = now - waited
        tokens, length = self._count_tokens(*given)
        if tokens:
            self._tokens += tokens if self._answers else 0
            self._flops += self._flops_of_a_token().of(tokens, length * self._sequence_ranks)

    def _forward_ends(self, out: Any) -> None:
        now = _clock()
        if not self._training:
            return
        self._forward += now - self._entered
        loss = (
            out
            if isinstance(out, torch.Tensor)
            else out.get("loss")
            if isinstance(out, Mapping)
            else getattr(out, "loss", None)
        )
        if isinstance(loss, torch.Tensor) and loss.dim() == 0 and loss.requires_grad:
            self._candidate.append(loss.detach())
        self._rest()

    def _rest(self) -> float:
        """The engine is left. Returns the time."""
        self._rested, self._communication_rested = _clock(), waits.communication()
        return self._rested

    def _backward_begins(self, loss: torch.Tensor | None) -> None:
        if loss is None:  # a bare one, which counts as time between
            return
        self._in_backward = True
        self._entered = now = _clock()
        if self._began is None:
            self._began = now

    def _backward_ends(self, loss: torch.Tensor | None) -> None:
        """loss: detached, over the accumulation steps; None of a stage of a pipeline but the last."""
        if not self._in_backward:
            return
        self._in_backward = False
        now = self._rest()
        self._backward += now - self._entered
        if loss is not None:
            self._losses.append(loss)

    def _discard(self, _: Any) -> None:
        """What was accumulated since the last step was dropped."""
        self._losses.clear()
        self._candidate.clear()

    # ---- inside the step: one row per rank, in the message of the gradient norm --------------------------------------
    def row(self) -> list[float]:
        """This rank's ROW numbers since the last step. Asking twice in a step gives the same."""
        now = _clock()
        if now >= self._sample_at:
            self._sample(now)
        row = self._row
        row[0], row[1] = self._loss()
        row[2], row[3] = self._tokens, self._flops_of_step()
        row[4] = self._data
        row[5] = waits.communication() - self._communication_seen
        row[6] = waits.seconds["disk"] - self._disk_seen
        row[7], row[8] = self._memory_row
        return row

    def put(self, row: torch.Tensor) -> None:
        """On a GPU the loss goes into the message, whose first element it is, without a wait for the device."""
        if self._on_cpu or not (self._losses or self._candidate):
            return
        losses = self._losses or self._candidate
        total = torch.stack([t.reshape(()).double() for t in losses]).sum()
        row[0:1].copy_((total if self._losses else total / len(losses)).reshape(1))

    def _loss(self) -> tuple[float, float]:
        if losses := self._losses:
            return (sum(map(float, losses)) if self._on_cpu else 0.0), 1.0
        if losses := self._candidate:
            return (sum(map(float, losses)) / len(losses) if self._on_cpu else 0.0), 1.0
        return 0.0, 0.0

    def take(self, rows: torch.Tensor) -> None:
        """rows: [ranks, ROW], what all ranks said."""
        self._rows = rows.tolist()

    # ---- pipelines ---------------------------------------------------------------------------------------------------
    @property
    def writes(self) -> bool:
        """Whether records go anywhere but to lines."""
        return self._writes

    def _batch_is_measured(self, found: Any) -> None:
        """found: parallel/pipeline/measured.py's. Its times in microseconds."""

        def rows(timeline: Any) -> list[list[list[int]]]:
            return [[[round(1e6 * s.start), round(1e6 * s.end)] for s in row] for row in timeline.spans]

        costs = [[round(1e6 * seconds) for seconds in of] for of in found.costs]
        fields = {"measured": rows(found.timeline), "predicted": rows(found.predicted), "costs": costs}
        self.note("pipeline", schedule=str(found.schedule), **fields)

    # ---- after the step ----------------------------------------------------------------------------------------------
    def _step_begins(self, _: Any) -> None:
        self._step_began = _clock()

    _step_began = 0.0

    def _step_ends(self, result: Any) -> None:
        """result: the engine's StepResult; None inside an accumulation."""
        now = self._rest()
        if result is None:
            return
        self._collect(result, now)
        self._begin_next()
        if not self._pace or now - self._pace[-1][1] >= 0.25:
            self._pace.append((self._engine.global_steps, now))
        speaks = self.speaks and (self._by_time or self._every is not None)
        if not (speaks or self._writes):
            return
        try:
            self._tell(speaks, now)
            self._rested = _clock()  # what a line took is no wait for data
        except Exception as exc:  # a broken pipe on stderr, a terminal that is gone: not worth a run
            self.speaks = False
            if not self._warned:
                self._warned = True
                with contextlib.suppress(Exception):
                    logger.warning(f"the log line failed and is off from here on: {type(exc).__name__}: {exc}")

    def _collect(self, result: Any, now: float) -> None:
        """Adds the step up. The record is made of it when somebody asks (most steps of a run that writes no files are
        asked by nobody)."""
        rows = self._rows
        if self._world == 1:
            _, _, tokens, flops, data, communication, disk, _, _ = rows[0]
        else:
            c = list(zip(*rows))
            tokens, flops, data, communication, disk = sum(c[2]), sum(c[3]), max(c[4]), max(c[5]), max(c[6])
        seconds = now - (self._began if self._began is not None else self._entered)
        # Peers also wait for what this rank did between its steps (an evaluation, a print), which is not in `seconds`.
        data, communication = min(data, seconds), min(communication, seconds)
        samples = self._engine.step_samples
        self._engine.global_tokens += int(tokens)
        if self._several:
            sent = self._engine.comm_bytes["total"]
            self._sent, self._sent_seen = sent - max(0, self._sent_seen), sent
        if self._moved_seen:
            moved = self._moved()
            self._moved_in = {name: value - self._moved_seen[name] for name, value in moved.items()}
            self._moved_seen = moved
        self._raw = (
            result,
            now,
            seconds,
            samples,
            tokens,
            flops,
            data,
            communication,
            disk,
            self._forward,
            self._backward,
            now - self._step_began,
            self._outside,
        )
        self._made_record = None
        sums = self._sums
        sums.seconds += seconds
        sums.samples += samples
        sums.tokens += tokens
        sums.flops += flops
        sums.data += data
        sums.communication += communication
        sums.disk += disk

    @property
    def _now(self) -> dict[str, Any]:
        """The record of the last step; {} before the first. To be asked for before the next step ends."""
        if self._made_record is None:
            self._made_record = self._make_record() if self._raw is not None else {}
        return self._made_record

    def _make_record(self) -> dict[str, Any]:
        engine = self._engine
        result, now, seconds, samples, tokens, flops, data, communication, disk, *parts = self._raw  # type: ignore[misc]
        forward, backward, update, outside = parts
        known = sum(r[1] for r in self._rows)
        rates = [float(g["lr"]) for g in engine.optimizer.param_groups]
        out: dict[str, Any] = {
            "step": engine.global_steps,
            "at": now - self._start,
            "time_s": seconds,
            "samples": engine.global_samples,
            "tokens": engine.global_tokens or None,
            "loss": sum(r[0] for r in self._rows) / known if known else None,
            "lr": rates[0] if rates else None,
            "grad_norm": result.grad_norm if result.applied else None,
            "loss_scale": engine.loss_scale if engine.scaler is not None else None,
            "skipped": not result.applied,
            "skipped_steps": engine.skipped_steps,
            "precision": engine.precision_in_words,
            "samples_per_s": samples / seconds,
            "tokens_per_s": tokens / seconds if tokens else None,
            "tflops": flops / seconds / 1e12 if flops else None,
            "memory": self._memory_now(),
            "wait": {"data_s": data, "communication_s": communication, "disk_s": disk},
            "parts": {"forward_s": forward, "backward_s": backward, "step_s": update, "outside_s": outside},
        }
        if len(set(rates)) > 1:
            out["lrs"] = rates
        if not result.applied:
            out["reason"] = result.reason
        if self._peak and flops:
            out["fraction_of_peak"] = flops / seconds / self._peak_above(flops / seconds)
        if engine.plan.nodes > 1 or self._sent_seen > 0:  # stages and tensor shards may lie on nodes of their own
            out["sent_bytes"] = self._sent
        if (exchanged := engine.step_policy.exchanged) is not None:
            out["exchange"] = exchanged
        if self._moved_in:
            out["disk"] = self._moved_in
        return out

    def _moved(self) -> dict[str, float]:
        """What this process has read and written of files of tensors so far, and how long its updates waited for it."""
        count, tier = counters(), self._engine.state.tier
        return {
            "read_bytes": count["disk_bytes_read"],
            "written_bytes": count["disk_bytes_written"],
            "wait_s": tier.stream.wait_ns * 1e-9 if tier is not None else 0.0,
        }

    def _begin_next(self) -> None:
        self._losses.clear()
        self._candidate.clear()
        self._tokens, self._flops = 0, 0.0
        self._data = self._outside = self._forward = self._backward = 0.0
        self._began = None
        self._communication_seen += self._row[5]
        self._disk_seen += self._row[6]

    def _tell(self, speaks: bool, now: float) -> None:
        step = self._engine.global_steps
        if self._writes:
            if change := self._raw[0].precision_change:  # type: ignore[index]
                self._pending.append({"event": "precision", "step": step, "at": now - self._start, "text": change})
            self._pending.append(self._now)
            if now >= self._flush_at or len(self._pending) >= _KEEP:
                self.flush()
        if not speaks:
            return
        keep = self._every is not None and step % self._every == 0
        if not keep and (now < self._line_at or not (self._by_time or self._form == "rich")):
            return
        self._show(keep)

    def _show(self, keep: bool) -> None:
        first = self._lines is None
        if self._lines is None:
            if not logger.isEnabledFor(logging.INFO):
                self.speaks = False
                return
            form = "plain" if self._form == "auto" and not self._by_time else self._form
            self._lines = sinks.choose_lines(form, self._prefix)
        record = self._averaged()
        began = time.thread_time()  # what it cost this thread: a busy machine makes no line dearer
        self._lines.show(record, keep)
        self._sums, self._shown = _Sums(), record["step"]
        pause = _LIVE_S if self._lines.live else self._seconds
        cost = 0.0 if first else time.thread_time() - began  # the first imports, which tells nothing of what follows
        self._line_at = _clock() + max(pause, cost / SHARE)

    def _averaged(self) -> dict[str, Any]:
        """The last step, with rates, times and waits over the steps since the last line."""
        if self._peak is None and self._now.get("tflops"):
            engine = self._engine
            self._peak = counts.job_peak(
                torch_dtype(engine.plan.computes_in), engine.device, engine.everyone.node_sizes
            )
        sums, record = self._sums, {**self._now, **self._ahead(), **self._whose}
        record.update(sums.rates(self._peak and self._peak_above(sums.flops / (sums.seconds or 1e-9))))
        if self._own:
            row = self._rows[self._rank]
            record["memory"] = {**record["memory"], "process": int(row[7]), "process_peak": int(row[8])}
        if self._engine.auto_precision is not None:
            record["mode"] = self._engine.precision
        if self._scalars:
            record["scalars"] = {k: _number(v) for k, v in self._scalars.items()}
        return record

    def _peak_above(self, rate: float) -> float:
        """The peak, beside FLOP/s that were reached. One that was measured, which other work may have slowed, is
        measured again if they are more, a few times, and is at least these."""
        assert self._peak is not None  # the caller has looked
        dtype, device = torch_dtype(self._engine.plan.computes_in), self._engine.device
        if rate > self._peak and counts.is_measured(dtype, device):
            if self._may_measure:
                self._may_measure -= 1
                sizes = self._engine.everyone.node_sizes
                self._peak = counts.job_peak(dtype, device, sizes, counts.measured_again)
            self._peak = max(self._peak, rate)
        return self._peak

    # ---- time left ---------------------------------------------------------------------------------------------------
    def _total_steps(self) -> int | None:
        if self._total is not None:
            return self._total or None
        scheduler = self._engine.lr_scheduler
        for name in ("total_num_steps", "total_steps", "T_max"):
            value = getattr(scheduler, name, None)
            if isinstance(value, int) and value > 0:
                return value
        return None

    def _ahead(self) -> dict[str, Any]:
        total, step = self._total_steps(), self._now["step"]
        eta = None
        if total and self._pace and step > self._pace[0][0]:
            since, at = self._pace[0]
            eta = max(0, total - step) * (self._now["at"] + self._start - at) / (step - since)
        return {"total_steps": total, "eta_s": eta, **({"total_about": True} if total and self._about else {})}

    # ---- for users and other modules ---------------------------------------------------------------------------------
    @property
    def last(self) -> dict[str, Any]:
        """The last finished step, with the names of metrics.jsonl; {} before the first. Figures of all ranks."""
        return {**self._now, **self._ahead()} if self._now else {}

    def set_total_steps(self, steps: int | None, about: bool = False) -> None:
        """Optimizer steps that the run will have made at its end, for the ETA; 0: nobody knows; None: what the LR
        schedule says. about: it is a guess that will change (a run that time limits), and is shown as ~steps."""
        if steps is not None and not (isinstance(steps, numbers.Integral) and steps >= 0):
            raise ArgumentError(f"set_total_steps({steps!r}): a whole number of steps, 0 or more, or None")
        self._total, self._about = None if steps is None else int(steps), about and steps is not None

    def set_flops(
        self, *, per_step: float | None = None, per_token: float | None = None, per_sample: float | None = None
    ) -> None:
        """Model FLOPs, forward and backward, instead of the count by parameters: of this rank's whole step (all its
        micro-batches), of one token, or of one sample."""
        if sum(x is not None for x in (per_step, per_token, per_sample)) != 1:
            raise ArgumentError("set_flops takes one of per_step=, per_token=, per_sample=")
        for name, flops in (("per_step", per_step), ("per_token", per_token), ("per_sample", per_sample)):
            if flops is not None and not (isinstance(flops, numbers.Real) and 0 <= flops < math.inf):
                raise ArgumentError(f"set_flops({name}={flops!r}): a number of FLOPs, 0 or more")
        self._flops_a_step, self._flops_a_token, self._flops_a_sample = per_step, per_token, per_sample

    @property
    def flops_per_token(self) -> float | None:
        """FLOPs of a token without attention's part, forward and backward, by the count of parameters."""
        return self._flops_of_a_token().constant

    def log(self, scalars: Mapping[str, Any]) -> None:
        """The user's own numbers, as they are now (0-d tensors of a GPU are read later): to the trackers and
        metrics.jsonl, and the last ones of each name on the next line."""
        if not isinstance(scalars, Mapping):
            raise ArgumentError(f"engine.log takes {{name: number}}, got {type(scalars).__name__}")
        kept = {}
        for name, value in scalars.items():
            try:
                if not isinstance(name, str) or not _is_number(value):
                    raise TypeError
                kept[name] = _as_it_is(value)
            except (TypeError, ValueError, OverflowError, RuntimeError) as exc:
                raise ArgumentError(
                    f"engine.log takes {{name: number}}, got {name!r}: {type(value).__name__}; a number, a tensor or an"
                    f" array of one element is meant{f' ({exc})' if str(exc) else ''}"
                ) from None
        self._scalars.update(kept)
        if self._writes:
            engine = self._engine
            self._pending.append(
                {
                    "event": "log",
                    "step": engine.global_steps,
                    "at": _clock() - self._start,
                    "samples": engine.global_samples,
                    "scalars": kept,
                }
            )

    def note(self, event: str, **fields: Any) -> None:
        """Something that happened, with JSON values: a line of metrics.jsonl that is no step."""
        if self._writes:
            self._pending.append(
                {"event": event, "step": self._engine.global_steps, "at": _clock() - self._start, **fields}
            )

    def tick(self, lane: str, seconds: float) -> None:
        """Adds to what the current step waited: lane "data", "communication" or "disk"."""
        waits.add(lane, seconds)

    def _disk_begins(self, what: str) -> None:
        self._disk_began[what] = _clock()

    def _disk_ends(self, what: str, path: Any) -> None:
        """Work with files between steps is over. what: "save" or "load"."""
        now = _clock()
        began = self._disk_began.pop(what, now)
        waits.add("disk", now - began)
        if self._writes:
            self._pending.append(
                {
                    "event": "checkpoint",
                    "step": self._engine.global_steps,
                    "at": now - self._start,
                    "seconds": now - began,
                    "what": what,
                    "path": os.fspath(path),
                }
            )
        self._rested = None  # not a wait for data

    def flush(self) -> None:
        """Writes what is waiting to be written."""
        if not self._pending:
            return
        began = _clock()
        records, self._pending = self._pending, []
        for r in records:
            if r.get("event") == "log":
                r["scalars"] = {k: _number(v) for k, v in r["scalars"].items()}
            elif not r.get("event"):
                r.update(self._ahead() if r is self._now else {})
        self._guard.write(records)
        self._writes = bool(self._guard.sinks)
        done = _clock()
        self._flush_at = done + max(_FLUSH_S, min(10.0, (done - began) / SHARE))

    def pause(self) -> None:
        """Ends the live line, before the script prints or asks something of its own; the line of the last step stays.
        The next step begins a new one."""
        if self._lines is None:
            return
        with contextlib.suppress(Exception):  # the stream may be gone
            more = self._by_time and self.speaks and self._shown != self._now["step"]
            more = more and getattr(sys, "last_value", None) is None  # a traceback has just told where it ended
            self._lines.end(self._averaged() if more else None)
            self._shown = self._now["step"]
        self._lines = None

    def close(self) -> None:
        """Writes what is left and closes all sinks. In a fork of the process it does nothing: the files are its
        parent's."""
        if os.getpid() != self._pid:
            return
        with contextlib.suppress(ReferenceError):
            self.flush()
        self.pause()
        self._guard.close()
        self._writes = self.speaks = False
        _meters.discard(self)

    # ---- counting ----------------------------------------------------------------------------------------------------
    def _flops_of_a_token(self) -> counts.TokenFlops:
        if self._token_flops is None:
            self._token_flops = self._estimate_flops()
        return self._token_flops

    def _model_size(self) -> tuple[int, int]:
        """Elements of the parameters of the whole model, and of those that are trained. Collective where ranks hold
        different parts of it."""
        engine, mesh = self._engine, self._engine.mesh
        named, plan = dict(engine.module.named_parameters()), engine.plan
        of_all = mesh.coordinates(self._rank)

        def counts_here(name: str) -> bool:
            """What several tensor or expert ranks hold alike is the first one's."""
            p = id(named.get(name))
            return (of_all.tp == 0 or p in engine.cuts) and (of_all.ep == 0 or p in engine.spread)

        mine = [(p.numel, p.numel * (p.index is not None)) for p in plan.params if counts_here(p.name)]
        total = [sum(column) for column in zip((0, 0), *mine)]
        if engine.parts is not None:
            parts = [mesh.rank(pp=s, tp=t) for s in range(mesh.pp) for t in range(mesh.tp)]
            firsts = [r for part in parts for r in mesh.group("ep", part)]
            rows = engine.everyone.gather_all(torch.tensor(total, dtype=torch.float64, device="cpu"))
            total = rows[firsts].sum(0).tolist()
        return int(total[0]), int(total[1])

    def _of_all_stages(self) -> counts.TokenFlops:
        """The sum over the ranks of this rank's pipeline. Collective."""
        engine = self._engine
        mine = torch.tensor(self._estimate_flops(), dtype=torch.float64, device="cpu")
        rows = engine.everyone.gather_all(mine)[list(engine.mesh.group("pp", self._rank))]
        return counts.TokenFlops(*rows.sum(0).tolist())

    def _estimate_flops(self) -> counts.TokenFlops:
        engine = self._engine
        by_name = {p.name: (p.numel, p.index is not None) for p in engine.plan.params}
        mine = {n: p for n, p in engine.module.named_parameters() if n in by_name}
        numels = {id(p): by_name[n] for n, p in mine.items() if self._answers or id(p) in engine.cuts}
        stage = engine.mesh.coordinates(self._rank).pp
        found = counts.token_flops(engine.module, numels, stage == 0)
        ties = engine.part.ties if engine.part is not None and stage > 0 else ()
        for tie in ties:  # a head that is tied to an embedding of another stage, which only looks up
            if (p := tie.parameter) is not None and stage in tie.holders and (self._answers or id(p) in engine.cuts):
                found = found._replace(constant=found.constant + p.numel() * (6 if p.requires_grad else 4))
        return found if self._answers else found._replace(per_length=0.0)

    def _flops_of_step(self) -> float:
        if self._flops_a_step is not None:
            return self._flops_a_step
        if self._flops_a_sample is not None:
            mine: float = self._flops_a_sample * self._engine.samples_of_step() / self._world
            return mine
        return self._flops if self._flops_a_token is None else self._flops_a_token * self._tokens

    def _sample(self, now: float) -> None:
        private, peak, self._shared = tiers.process()
        self._memory_row = (float(private), float(peak))
        self._memory = {}
        self._sample_at = now + _SAMPLE_S

    def _memory_now(self) -> dict[str, Any]:
        """Of all ranks; one object for the steps between two samples."""
        if not self._memory:
            self._memory = {
                "process": int(sum(r[7] for r in self._rows)),
                "process_peak": int(sum(r[8] for r in self._rows)),
                "shared": self._shared,
            }
            if (gpu := tiers.device(self._engine.device)) is not None:
                self._memory["gpu"], self._memory["gpu_peak"] = gpu
            if heap := tiers.heap():
                self._memory["heap"] = heap
        return self._memory


class _Sums:
    """Since the last line."""

    __slots__ = ("seconds", "samples", "tokens", "flops", "data", "communication", "disk")

    def __init__(self) -> None:
        self.seconds = self.tokens = self.flops = self.data = self.communication = self.disk = 0.0
        self.samples = 0

    def rates(self, peak: float | None) -> dict[str, Any]:
        s = self.seconds or 1e-9
        out: dict[str, Any] = {
            "time_s": s,
            "samples_per_s": self.samples / s,
            "wait": {"data_s": self.data, "communication_s": self.communication, "disk_s": self.disk},
        }
        if self.tokens:
            out["tokens_per_s"] = self.tokens / s
        if self.flops:
            out["tflops"] = self.flops / s / 1e12
            if peak:
                out["fraction_of_peak"] = self.flops / s / peak
        return out


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, (int, float)) or getattr(value, "size", None) == 1


def _as_it_is(value: Any) -> Any:
    """A copy: the script may go on adding to its own. That of a tensor on a device is there, so that nothing waits."""
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        return value.detach().clone()
    return _number(value)


def _number(value: Any) -> float:
    return float(value.item() if hasattr(value, "item") else value)


@atexit.register
def _close_all() -> None:
    # A test runner's, say: a line would be an error.
    silent = any(
        getattr(getattr(h, "stream", None), "closed", False) for h in [*logger.handlers, *logging.root.handlers]
    )
    for meter in list(_meters):
        meter.speaks = meter.speaks and not silent
        with contextlib.suppress(Exception):
            meter.close()
