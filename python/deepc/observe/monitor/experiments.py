"""TensorBoard, Weights & Biases, Comet and CSV files, from DeepSpeed's sections of the configuration: the same keys,
files and tags as DeepSpeed 0.19.8's deepspeed/monitor. An event is (tag, value, samples so far).

Packages are imported when their section is enabled, on the rank that writes."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from types import SimpleNamespace
from typing import Any

from ...config.keys import RENAMED_SECTIONS, TABLE
from ...config.values import BadValue, check_value, suggest
from ...errors import ConfigError, UnsupportedError
from .sinks import Guard, Sink, logger

Event = tuple[str, float, int]
SECTIONS = ("tensorboard", "wandb", "csv_monitor", "comet")
# Tag -> name in a record. DeepSpeed's own first, then ours, which are written at most once a second (they are rates and
# change slowly).
TAGS = {
    "Train/Samples/train_loss": "loss",
    "Train/Samples/lr": "lr",
    "Train/Samples/loss_scale": "loss_scale",
    "Train/Samples/grad_norm": "grad_norm",
}
RATES = {
    "Train/Speed/samples_per_s": "samples_per_s",
    "Train/Speed/tokens_per_s": "tokens_per_s",
    "Train/Speed/tflops": "tflops",
    "Train/Speed/fraction_of_peak": "fraction_of_peak",
}
TIMES = {
    "Train/Samples/elapsed_time_ms_forward": "forward_s",
    "Train/Samples/elapsed_time_ms_backward": "backward_s",
    "Train/Samples/elapsed_time_ms_step": "step_s",
}


def events_of(record: Mapping[str, Any], rates: bool, times: bool) -> list[Event]:
    """The events of one record. rates: the throughput as well; times: DeepSpeed's timers (wall_clock_breakdown)."""
    at = record.get("samples", 0)
    if record.get("event") == "log":
        return [(tag, value, at) for tag, value in record["scalars"].items()]
    if record.get("event"):
        return []
    wanted = {**TAGS, **RATES} if rates else TAGS
    out = [(tag, record[name], at) for tag, name in wanted.items() if record.get(name) is not None]
    if times:
        out += [(tag, 1000 * record["parts"][name], at) for tag, name in TIMES.items()]
    if rates:
        memory = record.get("memory") or {}
        out += [(f"Train/Memory/{tier}", memory[tier], at) for tier in ("process", "shared", "gpu") if memory.get(tier)]
    return out


class Monitor(Sink):
    """One tracker; one whose section is not enabled opens and writes nothing. write_events is DeepSpeed's interface,
    write that of a sink."""

    def __init__(self, config: Any) -> None:
        self.monitor_config = config
        self.enabled = bool(config.enabled)
        self.times = False  # wall_clock_breakdown
        self._rates_at = -math.inf

    def write_events(self, event_list: Iterable[Event]) -> None:
        raise NotImplementedError

    def write(self, records: Sequence[dict[str, Any]]) -> None:
        events: list[Event] = []
        for r in records:
            rates = not r.get("event") and r["at"] - self._rates_at >= 1.0
            if rates:
                self._rates_at = r["at"]
            events += events_of(r, rates, self.times)
        if events:
            self.write_events(events)


class TensorBoardMonitor(Monitor):
    """output_path/job_name holds the event file."""

    def __init__(self, tensorboard_config: Any) -> None:
        super().__init__(tensorboard_config)
        self.output_path, self.job_name = tensorboard_config.output_path, tensorboard_config.job_name
        self.name = "tensorboard"
        if self.enabled:
            _need("tensorboard", "tensorboard")
        self.summary_writer = self.get_summary_writer() if self.enabled else None

    def get_summary_writer(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        where = os.path.join(self.output_path or "", self.job_name or "")
        os.makedirs(where, exist_ok=True)
        return SummaryWriter(log_dir=where)

    def write_events(self, event_list: Iterable[Event], flush: bool = True) -> None:
        if self.summary_writer is None:
            return
        for tag, value, at in event_list:
            self.summary_writer.add_scalar(tag, value, at)
        if flush:
            self.summary_writer.flush()

    def flush(self) -> None:
        if self.summary_writer is not None:
            self.summary_writer.flush()

    def close(self) -> None:
        if self.summary_writer is not None:
            self.summary_writer.close()


class WandbMonitor(Monitor):
    """wandb.init(project, group, entity=team). WANDB_MODE=offline writes to ./wandb without a server."""

    def __init__(self, wandb_config: Any) -> None:
        super().__init__(wandb_config)
        self.name = "wandb"
        self.group, self.team, self.project = wandb_config.group, wandb_config.team, wandb_config.project
        if not self.enabled:
            return
        _need("wandb", "wandb")
        import wandb

        self._wandb = wandb
        self._run = wandb.init(project=self.project, group=self.group, entity=self.team)

    def log(self, data: Mapping[str, Any], step: int | None = None, commit: bool | None = None) -> Any:
        return self._wandb.log(dict(data), step=step, commit=commit) if self.enabled else None

    def write_events(self, event_list: Iterable[Event]) -> None:
        together: dict[int, dict[str, float]] = {}
        for tag, value, at in event_list:
            together.setdefault(at, {})[tag] = value
        for at, data in together.items():
            self.log(data, step=at)

    def close(self) -> None:
        if self.enabled:
            self._run.finish()


class CometMonitor(Monitor):
    """comet_ml.start with the section's keys; online=false writes a zip to COMET_OFFLINE_DIRECTORY. A tag is logged
    once in samples_log_interval samples."""

    def __init__(self, comet_config: Any) -> None:
        super().__init__(comet_config)
        self.name = "comet"
        c = comet_config
        self.samples_log_interval = c.samples_log_interval
        if not self.enabled:
            return
        _need("comet", "comet_ml")
        import comet_ml

        self._experiment = comet_ml.start(
            api_key=c.api_key,
            project=c.project,
            workspace=c.workspace,
            experiment_key=c.experiment_key,
            mode=c.mode,
            online=c.online,
        )
        if c.experiment_name is not None:
            self._experiment.set_name(c.experiment_name)
        self._last: dict[str, int] = {}

    @property
    def experiment(self) -> Any:
        return self._experiment

    def _due(self, tag: str, at: int) -> bool:
        if tag in self._last and at - self._last[tag] < self.samples_log_interval:
            return False
        self._last[tag] = at
        return True

    def write_events(self, event_list: Iterable[Event]) -> None:
        for tag, value, at in event_list if self.enabled else ():
            if self._due(tag, at):
                self._experiment.__internal_api__log_metric__(name=tag, value=value, step=at)

    def close(self) -> None:
        if self.enabled:
            self._experiment.end()


class csvMonitor(Monitor):
    """output_path/job_name/<tag with _ for / and space>.csv: a header "step,<last part of the tag>", then one row per
    event."""

    def __init__(self, csv_config: Any) -> None:
        super().__init__(csv_config)
        self.name = "csv_monitor"
        self.filenames: list[str] = []
        self.output_path, self.job_name = csv_config.output_path, csv_config.job_name
        self.log_dir = os.path.join(self.output_path or "", self.job_name or "")
        if self.enabled:
            os.makedirs(self.log_dir, exist_ok=True)

    def write_events(self, event_list: Iterable[Event]) -> None:
        rows: dict[str, list[Event]] = {}
        for event in event_list if self.enabled else ():
            rows.setdefault(event[0], []).append(event)
        for tag, events in rows.items():
            self._append(tag, events)

    def _append(self, tag: str, events: Sequence[Event]) -> None:
        filename = tag.replace("/", "_").replace(" ", "_")
        with open(os.path.join(self.log_dir, filename + ".csv"), "a+", newline="") as f:
            writer = csv.writer(f)
            if filename not in self.filenames:
                self.filenames.append(filename)
                writer.writerow(["step", tag.rsplit("/", 1)[-1]])
            writer.writerows([at, value] for _, value, at in events)


_MAKERS = {"tensorboard": TensorBoardMonitor, "wandb": WandbMonitor, "csv_monitor": csvMonitor, "comet": CometMonitor}


def _need(section: str, package: str) -> None:
    import importlib.util

    if importlib.util.find_spec(package) is None:
        raise UnsupportedError(
            f"the configuration's {section} section needs the package {package}: pip install {package}"
        )


def open_enabled(config: Any, guard: Guard) -> list[Monitor]:
    """Opens the trackers whose section of `config` (attributes tensorboard, wandb, csv_monitor, comet) is enabled. On
    the rank that writes only."""
    out = []
    for section in SECTIONS:
        if getattr(config, section).enabled:
            made = guard.open(section, _MAKERS[section], getattr(config, section))
            if made is not None:
                out.append(made)
    return out  # type: ignore[return-value]


# ---- DeepSpeed's MonitorMaster ---------------------------------------------------------------------------------------
_DEFAULTS: dict[str, dict[str, Any]] = {
    "tensorboard": {"enabled": False, "output_path": "", "job_name": "DeepSpeedJobName"},
    "csv_monitor": {"enabled": False, "output_path": "", "job_name": "DeepSpeedJobName"},
    "wandb": {"enabled": False, "group": None, "team": None, "project": "deepspeed"},
    "comet": {
        "enabled": False,
        "samples_log_interval": 100,
        "project": None,
        "workspace": None,
        "api_key": None,
        "experiment_name": None,
        "experiment_key": None,
        "online": None,
        "mode": None,
    },
}


def _sections(config: Any) -> SimpleNamespace:
    """The four sections of a dict, a Config or an object with such attributes, complete."""
    if isinstance(config, Mapping):
        _check(config)
    out = {}
    for name, defaults in _DEFAULTS.items():
        given = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if given is None:
            given = {}
        elif is_dataclass(given) and not isinstance(given, type):
            given = asdict(given)
        elif not isinstance(given, Mapping):
            given = {k: getattr(given, k) for k in defaults if hasattr(given, k)}
        out[name] = SimpleNamespace(**{**defaults, **given})
    return SimpleNamespace(**out)


def _check(config: Mapping[str, Any]) -> None:
    """Of a dict: what is wrong in the four sections is an error, as in DeepSpeed; a section that no configuration has
    is told, as nothing would be written there."""
    known = {path.split(".")[0] for path in TABLE} | set(RENAMED_SECTIONS)
    for name, given in config.items():
        if name not in known:
            logger.warning(
                f"MonitorMaster: unknown section {json.dumps(str(name))}, which is ignored.{suggest(str(name))} Events"
                f" go to {', '.join(SECTIONS)}"
            )
        if name not in SECTIONS or given is None:
            continue
        if isinstance(given, (bool, int, float, str, list, tuple)):
            raise ConfigError(
                f'MonitorMaster: {name} = {json.dumps(given)} must be an object, {{"enabled": true, ...}}'
            )
        for key, value in given.items() if isinstance(given, Mapping) else ():
            path = f"{name}.{key}"
            if path not in TABLE:
                raise ConfigError(f"MonitorMaster: unknown key {json.dumps(path)}.{suggest(path)}")
            try:
                check_value(TABLE[path], value)
            except BadValue as exc:
                raise ConfigError(f"MonitorMaster: {path} = {json.dumps(value, default=str)} {exc}") from None


class MonitorMaster(Monitor):
    """DeepSpeed's interface for the user's own scalars, without an engine:

        monitor = MonitorMaster({"csv_monitor": {"enabled": True, "output_path": "logs/", "job_name": "eval"}})
        monitor.write_events([("Eval/accuracy", 0.9, engine.global_samples)])

    monitor_config: a configuration dict, a Config, or an object with the four sections. Only rank 0 writes. Of a dict,
    a section that no configuration has is warned of; ConfigError for unknown keys and values of the four."""

    def __init__(self, monitor_config: Any) -> None:
        import torch.distributed as dist

        sections = _sections(monitor_config)
        self.monitor_config = monitor_config
        self.enabled = any(getattr(sections, s).enabled for s in SECTIONS)
        self._guard = Guard()
        if not dist.is_initialized() or dist.get_rank() == 0:
            open_enabled(sections, self._guard)
        by_type = {type(s): s for s in self._guard.sinks}
        self.tb_monitor, self.wandb_monitor = by_type.get(TensorBoardMonitor), by_type.get(WandbMonitor)
        self.csv_monitor, self.comet_monitor = by_type.get(csvMonitor), by_type.get(CometMonitor)

    def write_events(self, event_list: Iterable[Event]) -> None:
        events = list(event_list)
        for sink in list(self._guard.sinks):
            self._guard._try(sink, sink.write_events, events)  # type: ignore[attr-defined]

    def close(self) -> None:
        self._guard.close()
