"""The configuration: a DeepSpeed JSON (file, text, base64 or dict) read into frozen, typed, validated objects.

Owns reading, validation and the typed tree; the keys themselves are rows of config_keys.py. Needs only the standard library: torch is
imported when an optimizer or a schedule of torch is named. Everything that is wrong in a configuration is reported at once, each
with its key, its value, its file and the fix.

    cfg = Config.load("ds_config.json", world_size=2)
    cfg.zero.stage, cfg.fp16.enabled, cfg.gradient_clipping
    print(cfg.explain())

`python -m deepc.config --schema [FILE]` writes the JSON Schema of all keys; `--explain FILE` shows what a configuration means."""

from __future__ import annotations

import base64
import binascii
import copy
import dataclasses
import difflib
import inspect
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from .config_keys import (ANY, AUTO_SCHEDULER_PARAMS, ELEMENTWISE, KEYS, LATER_OPTIMIZERS, OPTIMIZER_PARAMS, RENAMED_SECTIONS, TABLE, Key,
                          State)
from .errors import ConfigError

AUTO = "auto"
_MISSING = object()


class InertKey(NamedTuple):
    """A key that was given and changes nothing here."""

    key: str
    value: Any
    reason: str


# ---- the typed tree (field names are the last parts of the keys' paths) ----------------------------------------------


@dataclass(frozen=True)
class Fp16Config:
    """Section fp16. `loss_scale` 0 means dynamic."""

    enabled: bool
    auto_cast: bool
    loss_scale: float
    initial_scale_power: int
    loss_scale_window: int
    hysteresis: int
    consecutive_hysteresis: bool
    min_loss_scale: float

    @property
    def dynamic(self) -> bool:
        return self.enabled and self.loss_scale == 0


@dataclass(frozen=True)
class Bf16Config:
    """Section bf16."""

    enabled: bool
    check_grad_overflow: bool


@dataclass(frozen=True)
class OffloadOptimizerConfig:
    """Section zero_optimization.offload_optimizer; device is "none" or "cpu"."""

    device: str
    pin_memory: bool


@dataclass(frozen=True)
class OffloadParamConfig:
    """Section zero_optimization.offload_param; device is "none" or "cpu"."""

    device: str
    pin_memory: bool


@dataclass(frozen=True)
class ZeroConfig:
    """Section zero_optimization. Sizes are counts of elements."""

    stage: int
    reduce_bucket_size: int
    allgather_bucket_size: int
    contiguous_gradients: bool
    reduce_scatter: bool
    overlap_comm: bool
    round_robin_gradients: bool
    sub_group_size: int
    stage3_prefetch_bucket_size: int
    stage3_param_persistence_threshold: int
    stage3_model_persistence_threshold: int
    stage3_max_live_parameters: int
    stage3_max_reuse_distance: int
    stage3_gather_16bit_weights_on_model_save: bool
    zero_quantized_weights: bool
    zero_quantized_gradients: bool
    zero_hpz_partition_size: int
    offload_optimizer: OffloadOptimizerConfig
    offload_param: OffloadParamConfig


@dataclass(frozen=True)
class OptimizerConfig:
    """Section optimizer, resolved.

    `backend` is "deepc" (deepc.optim.AdamW, `params` complete: lr, betas, eps, weight_decay, amsgrad; `decoupled` False means Adam
    with L2) or "torch" (torch.optim.<type>(**params), `params` as given)."""

    type: str
    params: dict[str, Any]
    backend: str
    decoupled: bool = True


@dataclass(frozen=True)
class SchedulerConfig:
    """Section scheduler: the name of a class of lr_schedules or of torch.optim.lr_scheduler, and its arguments."""

    type: str
    params: dict[str, Any]


@dataclass(frozen=True)
class DataTypesConfig:
    """Section data_types. Gradients are accumulated in fp32 whatever this says."""

    grad_accum_dtype: str


@dataclass(frozen=True)
class CheckpointConfig:
    """Section checkpoint."""

    tag_validation: str


@dataclass(frozen=True)
class CommsLoggerConfig:
    """Section comms_logger."""

    enabled: bool
    verbose: bool
    prof_all: bool
    prof_ops: tuple[str, ...] | None
    debug: bool


@dataclass(frozen=True)
class TensorBoardConfig:
    """Section tensorboard."""

    enabled: bool
    output_path: str | None
    job_name: str | None


@dataclass(frozen=True)
class CSVConfig:
    """Section csv_monitor."""

    enabled: bool
    output_path: str | None
    job_name: str | None


@dataclass(frozen=True)
class WandbConfig:
    """Section wandb."""

    enabled: bool
    group: str | None
    team: str | None
    project: str | None


@dataclass(frozen=True)
class CometConfig:
    """Section comet."""

    enabled: bool
    samples_log_interval: int
    project: str | None
    workspace: str | None
    api_key: str | None = field(repr=False)
    experiment_name: str | None
    experiment_key: str | None
    online: bool | None
    mode: str | None


@dataclass(frozen=True)
class LogConfig:
    """Section deepc.log: the line that a run prints."""

    format: str
    ranks: str
    seconds: float
    total_steps: int | None


@dataclass(frozen=True)
class FlopsProfilerConfig:
    """Section flops_profiler."""

    enabled: bool
    recompute_fwd_factor: float
    profile_step: int
    module_depth: int
    top_modules: int
    detailed: bool
    output_file: str | None


@dataclass(frozen=True)
class TimelineConfig:
    """Section deepc.timeline: steps [first, last], (0, 0) is off."""

    steps: tuple[float, float]
    modules: bool
    memory_ms: float
    folder: str | None


@dataclass(frozen=True)
class PrecisionConfig:
    """Section deepc.precision: when `"precision": "auto"` changes the precision, see precision.AutoPrecision."""

    overflow_steps: int
    divergence_factor: float
    divergence_steps: int
    fp32_steps: int


@dataclass(frozen=True)
class DeepcConfig:
    """Section deepc: our own keys."""

    bucket_elems: int | None
    deterministic: str | None
    run_dir: str | None
    log: LogConfig
    precision: PrecisionConfig
    timeline: TimelineConfig


@dataclass(frozen=True)
class Config:
    """A whole configuration. Batch sizes are None only where `auto` says that an integration still has to fill them."""

    train_batch_size: int | None
    train_micro_batch_size_per_gpu: int | None
    gradient_accumulation_steps: int | None
    steps_per_print: int | None
    wall_clock_breakdown: bool
    memory_breakdown: bool
    dump_state: bool
    log_level: str | None
    dataloader_drop_last: bool
    zero_allow_untested_optimizer: bool
    gradient_clipping: float
    prescale_gradients: bool
    gradient_predivide_factor: float
    communication_data_type: str | None
    optimizer: OptimizerConfig | None
    scheduler: SchedulerConfig | None
    precision: str | None
    fp16: Fp16Config
    bf16: Bf16Config
    zero: ZeroConfig
    data_types: DataTypesConfig
    checkpoint: CheckpointConfig
    comms_logger: CommsLoggerConfig
    flops_profiler: FlopsProfilerConfig
    tensorboard: TensorBoardConfig
    csv_monitor: CSVConfig
    wandb: WandbConfig
    comet: CometConfig
    deepc: DeepcConfig
    world_size: int
    device_type: str
    source: str
    raw: dict[str, Any] = field(repr=False)
    inert: tuple[InertKey, ...] = field(repr=False)
    auto: tuple[str, ...]
    given: frozenset[str] = field(repr=False)

    @property
    def dtype(self) -> str:
        """ "fp16", "bf16" or "fp32": the type of parameters and activations; with precision "auto" the one that training starts with."""
        if self.precision == AUTO:
            from .precision import recommended_dtype

            return recommended_dtype(self.device_type)[0]
        return "fp16" if self.fp16.enabled else "bf16" if self.bf16.enabled else "fp32"

    @property
    def pre_scale(self) -> float:
        """What a gradient is multiplied by before the sum over ranks; the sum times `1 / (world_size * pre_scale)` is the mean. As in
        DeepSpeed: 1 / ranks with prescale_gradients, else 1 / gradient_predivide_factor."""
        return 1.0 / (self.world_size if self.prescale_gradients else self.gradient_predivide_factor)

    @classmethod
    def load(cls, source: str | os.PathLike[str] | Mapping[str, Any] | Config, *, world_size: int, device_type: str = "cpu",
             allow_auto: bool = False) -> Config:
        """Reads and validates a configuration.

        source: path of a JSON file (comments and trailing commas are allowed, as DeepSpeed does), JSON text, base64 of JSON text, a dict
        (copied), or a Config. world_size: number of data-parallel ranks. device_type: "cpu" or "cuda", decides which hints are
        inert. allow_auto: keep "auto" values (the keys are listed in `.auto`, their fields hold the default) instead of raising.
        Raises ConfigError, which lists everything that is wrong."""
        if isinstance(source, Config):
            source = source.raw
        raw, name = _read(source)
        return _Loader(raw, name, world_size, device_type, allow_auto).load()

    def require_resolved(self) -> None:
        """Raises ConfigError, naming them, if "auto" values are left."""
        if self.auto:
            raise ConfigError(_auto_message(self.source, self.auto))

    def describe_inert(self) -> str:
        """One line per given key that changes nothing here; "" if there is none."""
        return "\n".join(f"inert: {i.key} = {json.dumps(i.value, default=str)}: {i.reason}" for i in self.inert)

    def explain(self) -> str:
        """What this configuration means: every active key with its value, where that comes from and what it does; then what is inert."""
        lines = [f"configuration from {self.source}, {self.world_size} rank(s) on {self.device_type}, {self.dtype}"]
        for row in KEYS:
            value = _MISSING if row.state is not State.ACTIVE else self._value(row)
            if value is _MISSING:
                continue
            origin = "auto" if row.path in self.auto else "given" if row.path in self.given else "default"
            if origin == "default" and row.path in _TRIANGLE:
                origin = "derived"
            shown = "(hidden)" if row.path == "comet.api_key" and value else json.dumps(value, default=str)
            lines.append(f"  {row.path} = {shown} ({origin}): {row.help}")
        if self.inert:
            lines += ["without effect here:", *("  " + line for line in self.describe_inert().splitlines())]
        if self.auto:
            lines.append("still \"auto\": " + ", ".join(self.auto))
        return "\n".join(lines)

    def _value(self, row: Key) -> Any:
        node: Any = self
        for part in row.path.split("."):
            node = getattr(node, "zero" if part == "zero_optimization" else part, _MISSING)
        return node  # an absent section (None) has no attributes, so its keys are _MISSING


_TRIANGLE = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def default_optimizer() -> OptimizerConfig:
    """What is used when neither the configuration nor the caller gives an optimizer: AdamW with DeepSpeed's defaults."""
    names = ("lr", "betas", "eps", "weight_decay", "amsgrad")
    return OptimizerConfig("AdamW", {n: OPTIMIZER_PARAMS[n].default for n in names}, "deepc", True)


# ---- reading ---------------------------------------------------------------------------------------------------------


def _read(source: Any) -> tuple[dict[str, Any], str]:
    """The raw dict and a name of its source for messages."""
    if isinstance(source, Mapping):
        return _plain(source, "the configuration dict"), "the configuration dict"
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(f"the configuration must be a path, JSON text or a dict, not {type(source).__name__}")
    text = os.fspath(source)
    if isinstance(source, str) and text.lstrip().startswith("{"):
        return _parse(text, "the configuration text"), "the configuration text"
    try:
        content = Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as exc:
        decoded = _from_base64(text)
        if decoded is not None:
            return _parse(decoded, "the base64 configuration"), "the base64 configuration"
        shown = text if len(text) <= 200 else text[:200] + "..."
        raise ConfigError(f"can't read the configuration file {shown!r}: {getattr(exc, 'strerror', None) or exc}. Give the path of a JSON "
                          "file, JSON text or a dict.") from exc
    return _parse(content, text), text


def _from_base64(text: str) -> str | None:
    try:
        decoded = base64.b64decode(text.encode("ascii"), altchars=b"-_", validate=True).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def _plain(value: Any, where: str) -> Any:
    """A deep copy of dicts and lists, so that the caller's object is never changed; keys must be strings."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"{where}: key {key!r} is {type(key).__name__}, keys are strings")
        return {k: _plain(v, where) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(v, where) for v in value) if type(value) in (list, tuple) else [_plain(v, where) for v in value]
    return copy.copy(value)


_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|#[^\n]*|/\*.*?\*/', re.S)
_TRAILING = re.compile(r'("(?:\\.|[^"\\])*")|,(?=\s*[}\]])', re.S)


def _blank(match: re.Match[str]) -> str:
    token = match.group()
    return token if token.startswith('"') else re.sub(r"[^\n]", " ", token)  # keeps line and column of everything else


def _parse(text: str, name: str) -> dict[str, Any]:
    """JSON with comments and trailing commas; duplicate keys, NaN and Infinity are errors."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        seen = dict(items)
        if len(seen) != len(items):
            keys = [k for k, _ in items]
            twice = sorted({k for k in keys if keys.count(k) > 1})
            raise ConfigError(f"{name}: the key {', '.join(map(repr, twice))} stands twice in one section. Remove one of them.")
        return seen

    def constant(word: str) -> None:
        raise ConfigError(f"{name}: {word} is not a JSON number. Write a finite number.")

    clean = _TRAILING.sub(lambda m: m.group(1) or " ", _TOKEN.sub(_blank, text.lstrip("\ufeff")))
    try:
        value = json.loads(clean, object_pairs_hook=pairs, parse_constant=constant)
    except json.JSONDecodeError as exc:
        raise ConfigError(f"{name}, line {exc.lineno}, column {exc.colno}: not JSON: {exc.msg}.") from exc
    except RecursionError as exc:
        raise ConfigError(f"{name}: nested too deeply to be a configuration") from exc
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: the configuration must be a JSON object {{...}}, not {type(value).__name__}")
    return value


# ---- names -----------------------------------------------------------------------------------------------------------

_ALIASES = {f"{k.section}.{k.alias}": k.path for k in KEYS if k.alias}
_SECTIONS = {".".join(k.path.split(".")[:i]) for k in KEYS for i in range(1, k.path.count(".") + 1)}


def suggest(key: str, known: Any = None) -> str:
    """' Did you mean "..."?' or ''."""
    paths = list(known) if known is not None else [*TABLE, *_ALIASES, *_SECTIONS]
    lower = {p.lower(): p for p in reversed(paths)}
    found = [lower[m] for m in difflib.get_close_matches(key.lower(), lower, n=2, cutoff=0.75)]
    leaves: dict[str, list[str]] = {}
    for path in paths:
        leaves.setdefault(path.rsplit(".", 1)[-1].lower(), []).append(path)
    for leaf in difflib.get_close_matches(key.rsplit(".", 1)[-1].lower(), leaves, n=2, cutoff=0.8):
        found += [p for p in leaves[leaf] if p not in found]
    found = list(dict.fromkeys(found))[:3]
    return f" Did you mean {' or '.join(json.dumps(f) for f in found)}?" if found else ""


def _auto_message(source: str, keys: Any) -> str:
    return (f"{source}: these keys are still \"auto\": {', '.join(keys)}. An integration (Hugging Face Trainer, Accelerate) fills them "
            "before initialize(); without one, write values, or remove the keys to get the defaults.")


# ---- one value -------------------------------------------------------------------------------------------------------

_KIND_WORDS = {"bool": "true or false", "int": "an integer", "number": "a number", "str": "a string", "strings": "a list of strings",
               "numbers": "a list of numbers", "object": "an object {...}", "gated": "an object {...}"}


class _Bad(Exception):
    """The text after 'key = value'."""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _range_text(row: Key) -> str:
    return " and ".join(f"{op} {b:g}" for op, b in ((">=", row.ge), (">", row.gt), ("<=", row.le), ("<", row.lt)) if b is not None)


def _in_range(row: Key, value: float) -> bool:
    return not ((row.ge is not None and value < row.ge) or (row.gt is not None and value <= row.gt)
                or (row.le is not None and value > row.le) or (row.lt is not None and value >= row.lt))


def _check_number(row: Key, value: Any, integer: bool) -> Any:
    word = _KIND_WORDS["int" if integer else "number"]
    if isinstance(value, str):
        raise _Bad(f"is a string, but must be {word}; write it without quotes")
    if not _is_number(value):
        raise _Bad(f"must be {word}")
    if not math.isfinite(value):
        raise _Bad("must be finite")
    if integer and value != int(value):
        raise _Bad("must be an integer")
    if not _in_range(row, value):
        raise _Bad(f"is out of range, it must be {_range_text(row)}")
    return int(value) if integer else float(value)


def check_value(row: Key, value: Any) -> Any:
    """The value in its canonical form. Raises _Bad."""
    if value is None and (row.default is None or row.null):
        return None
    kind = row.kind
    if kind == "any":
        return value
    if kind in ("int", "number"):
        return _check_number(row, value, kind == "int")
    if kind == "bool":
        if not isinstance(value, bool):
            raise _Bad("must be true or false" + (", without quotes" if isinstance(value, str) else ""))
        return value
    if kind == "str":
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if not isinstance(value, str):
            raise _Bad("must be a string" + (f", one of {', '.join(row.choices)}" if row.choices else ""))
        if row.choices:
            spelled = {c.lower(): c for c in row.choices}
            if value.lower() not in spelled:
                raise _Bad(f"must be one of {', '.join(row.choices)}")
            return spelled[value.lower()]
        return value
    if kind == "strings":
        if isinstance(value, str):
            return [value]
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            raise _Bad("must be a list of strings")
        return list(value)
    if kind == "numbers":
        if not isinstance(value, (list, tuple)) or len(value) != len(row.default):
            raise _Bad(f"must be a list of {len(row.default)} numbers")
        return tuple(_check_number(row, v, False) for v in value)
    if not isinstance(value, Mapping):
        raise _Bad("must be an object {...}")
    return dict(value)


def _show(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 120 else text[:117] + "..."


# ---- the whole -------------------------------------------------------------------------------------------------------


_T = TypeVar("_T")


class _Loader:
    """One load: walks the raw dict, checks each value against its row, applies the rules between keys, builds the tree."""

    def __init__(self, raw: dict[str, Any], name: str, world_size: int, device_type: str, allow_auto: bool) -> None:
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise ConfigError(f"world_size {world_size!r} must be a positive integer: the number of data-parallel ranks")
        if device_type not in ("cpu", "cuda"):
            raise ConfigError(f"device_type {device_type!r} must be \"cpu\" or \"cuda\"")
        self.raw, self.name, self.world, self.device, self.allow_auto = raw, name, world_size, device_type, allow_auto
        self.values: dict[str, Any] = {}
        self.auto: list[str] = []
        self.inert: list[InertKey] = []
        self.errors: list[str] = []

    def load(self) -> Config:
        self._walk(self.raw, "")
        self._legacy()
        optimizer, scheduler = self._optimizer(), self._scheduler()
        self._precision_rules()
        self._offload_rules()
        self._zeropp_rules()
        self._timeline_rules()
        self._triangle()
        if self.auto and not self.allow_auto:
            self.errors.append(_auto_message(self.name, self.auto))
        if self.errors:
            raise ConfigError(self.errors[0] if len(self.errors) == 1 else
                              f"{len(self.errors)} things are wrong in the configuration:\n" + "\n".join(f"- {e}" for e in self.errors))
        return self._build(optimizer, scheduler)

    def get(self, path: str) -> Any:
        return self.values.get(path, TABLE[path].default)

    def fail(self, path: str, value: Any, text: str) -> None:
        self.errors.append(f"{self.name}: {path} = {_show(value)} {text}")

    # -- walking --

    def _walk(self, node: Mapping[str, Any], prefix: str) -> None:
        for key, value in node.items():
            path = f"{prefix}.{key}" if prefix else key
            canonical = RENAMED_SECTIONS.get(path, path)
            canonical = _ALIASES.get(canonical, canonical)
            if canonical in TABLE:
                self._take(canonical, value)
            elif canonical in _SECTIONS:
                self._section(canonical, value)
            else:
                self.errors.append(f"{self.name}: unknown key {json.dumps(path)}.{suggest(path)}")

    def _section(self, path: str, value: Any) -> None:
        if isinstance(value, Mapping):
            self._walk(value, path)
        elif path == "zero_optimization" and isinstance(value, bool):
            self.values["zero_optimization.stage"] = int(value)  # DeepSpeed's oldest form
        elif value is not None:
            inside = ", ".join(k.leaf for k in KEYS if k.section == path)
            self.fail(path, value, f"must be an object {{...}} with keys of: {inside}")

    def _take(self, path: str, value: Any) -> None:
        row = TABLE[path]
        if path in self.values or path in self.auto:
            self.errors.append(f"{self.name}: {path} is given twice, under its old and its new name. Remove one.")
            return
        if value == AUTO and isinstance(value, str) and row.kind != "any" and not (row.kind == "str" and (row.ok is ANY or AUTO in row.choices)):
            self._take_auto(row)
            return
        if path == "steps_per_print" and value == math.inf:
            value = None  # never, as accelerate writes it
        try:
            checked = check_value(row, value)
        except _Bad as exc:
            self.fail(path, value, f"{exc}.")
            return
        if row.kind == "gated":
            self._gated(row, checked)
            return
        if row.state in (State.LATER, State.REMOVED) and row.ok is not ANY and not any(_same(checked, o) for o in row.ok):
            self._refuse(row, path, value)
            return
        self.values[path] = checked
        if row.state is State.INERT and row.inert_on in ("", self.device):
            self.inert.append(InertKey(path, value, row.why))

    def _take_auto(self, row: Key) -> None:
        if row.auto:
            self.auto.append(row.path)
        else:
            self.fail(row.path, AUTO, f"is not possible: no integration fills this key. Write {_KIND_WORDS.get(row.kind, 'a value')}, or "
                                      f"remove the key to get the default, {_show(row.default)}.")

    def _gated(self, row: Key, section: Any) -> None:
        """A section that is off unless `enabled` says otherwise; a section without `enabled` is off only if it is empty."""
        if section is None or section == {}:
            return
        enabled = section.get("enabled", True)
        if enabled == AUTO:
            self.auto.append(f"{row.path}.enabled")
        elif enabled is not False:
            self._refuse(row, f"{row.path}.enabled" if "enabled" in section else row.path, section.get("enabled", section))

    def _refuse(self, row: Key, path: str, value: Any) -> None:
        off = " or ".join(_show(o) for o in row.ok if o is not None) if row.ok is not ANY else ""
        if row.kind == "gated":
            off = "{\"enabled\": false}" if not path.endswith(".enabled") else "false"
        fix = f"Remove the key{' or set it to ' + off if off else ''}."
        if row.state is State.LATER:
            self.fail(path, value, f"asks for {row.why}, which deepc does not have yet. {fix}")
        else:
            self.fail(path, value, f"asks for a feature that DeepSpeed removed and deepc does not have; instead: {row.why}. {fix}")

    # -- rules between keys --

    def _legacy(self) -> None:
        """Old names whose value goes to a new key."""
        for old, new in (("cpu_offload", "offload_optimizer.device"), ("cpu_offload_param", "offload_param.device")):
            old, new = f"zero_optimization.{old}", f"zero_optimization.{new}"
            if old in self.values and self.values[old] is not None:
                if new in self.values or new in self.auto:
                    self.errors.append(f"{self.name}: {old} and {new} are both given; {old} is the old name. Remove it.")
                self.values[new] = "cpu" if self.values[old] else "none"
        old, new = "stage3_gather_fp16_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save"
        old, new = f"zero_optimization.{old}", f"zero_optimization.{new}"
        if old in self.values:
            if new in self.values or new in self.auto:
                self.errors.append(f"{self.name}: {old} and {new} are both given; {old} is the old name. Remove it.")
            self.values.setdefault(new, self.values[old])

    def _precision_rules(self) -> None:
        if self.get("fp16.enabled") and self.get("bf16.enabled"):
            self.errors.append(f"{self.name}: fp16.enabled and bf16.enabled are both true. Set one of them to false.")
        auto = self.get("precision") == AUTO
        for path in ("fp16.enabled", "bf16.enabled"):
            if auto and (path in self.auto or (path in self.values and (self.values[path] or path == "bf16.enabled"))):
                self.fail("precision", AUTO, f"chooses between bf16 and fp32 by itself, and {path} is given too. Remove one of them.")
        for path in (k.path for k in KEYS if k.section == "deepc.precision"):
            if path in self.values and not auto:
                self.inert.append(InertKey(path, self.values[path], "it needs \"precision\": \"auto\""))

    def _offload_rules(self) -> None:
        stage = self.get("zero_optimization.stage")
        for what, needs in (("offload_optimizer", 1), ("offload_param", 3)):
            path = f"zero_optimization.{what}.device"
            device = self.get(path)
            if device == "nvme":
                self.fail(path, device, "asks for offload to disk (NVMe), which deepc does not have yet. Set it to \"cpu\" or \"none\".")
            elif device == "cpu" and self.device == "cpu":
                self.inert.append(InertKey(path, device, "a CPU run keeps everything in host memory anyway"))
            elif device == "cpu" and stage < needs:
                self.inert.append(InertKey(path, device, f"it needs ZeRO stage {needs} or higher, the stage is {stage}"))
            elif device == "cpu" and what == "offload_param":
                self.fail(path, device, "asks for stage-3 parameters of a GPU run in host memory, which deepc does not have yet. Set it "
                                        "to \"none\".")
        pin = "zero_optimization.offload_optimizer.pin_memory"
        if pin in self.values and self.device == "cpu":
            self.inert.append(InertKey(pin, self.values[pin], "page-locked memory serves copies to a GPU"))

    def _zeropp_rules(self) -> None:
        """ZeRO++ acts on what crosses between CPU nodes; how many there are the engine knows."""
        stage = self.get("zero_optimization.stage")
        for leaf, needs, why in (("zero_quantized_gradients", 0, ""), ("zero_quantized_weights", 1, "stage 0 sends no parameters"),
                                 ("zero_hpz_partition_size", 3, "parameters are partitioned at stage 3 only")):
            path = f"zero_optimization.{leaf}"
            value = self.get(path)
            if value <= (leaf == "zero_hpz_partition_size"):  # 0, 1 or false: not asked for
                continue
            if stage < needs:
                self.inert.append(InertKey(path, value, why))
            elif self.device == "cuda":
                self.fail(path, value, "asks for ZeRO++ on GPUs, which deepc does not have yet (CPU nodes have it). Remove the key.")
            elif leaf == "zero_hpz_partition_size" and self.world % value:
                self.fail(path, value, f"does not divide the {self.world} rank(s). Set it to the number of ranks of a node, or to 1.")

    def _timeline_rules(self) -> None:
        path = "deepc.timeline.steps"
        first, last = self.get(path)
        if path in self.values and (first != int(first) or last != int(last) or not first <= last or (last > 0 and first < 1)):
            self.fail(path, self.values[path], "must be two whole numbers, [first, last], 1 <= first <= last ([0, 0]: off).")

    def _triangle(self) -> None:
        if any(f"{k}" in self.auto for k in _TRIANGLE):
            return
        train, micro, accum = (self.values.get(k) for k in _TRIANGLE)
        if train is None and micro is None:
            if not any(f" {k} = " in e for e in self.errors for k in _TRIANGLE[:2]):
                self.errors.append(f"{self.name}: give train_batch_size or train_micro_batch_size_per_gpu (or both).")
            return
        triangle = resolve_batch(train, micro, accum, self.world)
        train2, micro2, accum2 = triangle
        if min(triangle) < 1 or train2 != micro2 * accum2 * self.world:
            def shown(key: str, given: int | None, now: int) -> str:
                return f"{key} {now}{'' if given is not None else ' (derived)'}"

            self.errors.append(
                f"{self.name}: {shown(_TRIANGLE[0], train, train2)} is not {shown(_TRIANGLE[1], micro, micro2)} * "
                f"{shown(_TRIANGLE[2], accum, accum2)} * {self.world} rank(s) = {micro2 * accum2 * self.world}. "
                "Change one of them, or remove one: it is then derived.")
            return
        self.triangle = triangle

    # -- optimizer and scheduler --

    def _optimizer(self) -> OptimizerConfig | None:
        kind, params = self.values.get("optimizer.type"), self.values.get("optimizer.params")
        if kind is None:
            if params:
                self.fail("optimizer.params", params, "is given without optimizer.type. Add \"type\": \"AdamW\", or remove the section.")
            return None
        params = dict(params or {})
        if "max_grad_norm" in params:
            self.fail("optimizer.params.max_grad_norm", params.pop("max_grad_norm"),
                      "is not an argument of an optimizer. Use gradient_clipping.")
        lower = kind.lower()
        if lower in ("adam", "adamw"):
            return self._adam(lower, params)
        if lower in LATER_OPTIMIZERS:
            self.fail("optimizer.type", kind, f"asks for {LATER_OPTIMIZERS[lower]}, which deepc does not have yet. Use AdamW or a "
                                              "torch.optim class.")
            return None
        return self._torch_optimizer("Adagrad" if lower == "adagrad" else kind, params)

    def _adam(self, lower: str, params: dict[str, Any]) -> OptimizerConfig:
        checked: dict[str, Any] = {}
        for key, value in params.items():
            path = f"optimizer.params.{key}"
            row = OPTIMIZER_PARAMS.get(key)
            if row is None:
                self.errors.append(f"{self.name}: unknown key {json.dumps(path)}.{suggest(key, OPTIMIZER_PARAMS)}")
                continue
            if value == AUTO and row.auto:
                self.auto.append(path)
                continue
            try:
                checked[key] = check_value(row, value)
            except _Bad as exc:
                self.fail(path, value, f"{exc}.")
                continue
            if row.state is State.LATER and checked[key] not in row.ok:
                self._refuse(row, path, value)
            elif row.state is State.INERT and not checked.get("torch_adam", params.get("torch_adam")):
                self.inert.append(InertKey(path, value, row.why))
        decoupled = lower == "adamw" or checked.pop("adam_w_mode", True)
        checked.pop("adam_w_mode", None)
        for key in ("bias_correction", "fp32_optimizer_states", "set_grad_none"):
            checked.pop(key, None)
        if checked.pop("torch_adam", False):
            return OptimizerConfig("AdamW" if decoupled else "Adam", checked, "torch", decoupled)
        checked.pop("foreach", None), checked.pop("fused", None)
        return OptimizerConfig("AdamW" if decoupled else "Adam", {**default_optimizer().params, **checked}, "deepc", decoupled)

    def _torch_optimizer(self, kind: str, params: dict[str, Any]) -> OptimizerConfig | None:
        import torch

        classes = {n: c for n, c in vars(torch.optim).items()
                   if inspect.isclass(c) and issubclass(c, torch.optim.Optimizer) and c is not torch.optim.Optimizer}
        path = "optimizer.type"
        if kind not in classes:
            self.fail(path, kind, f"is neither Adam, AdamW nor a class of torch.optim.{suggest(kind, ['Adam', 'AdamW', *classes])}")
            return None
        if kind == "LBFGS":
            self.fail(path, kind, "needs a closure that runs the model again, which an engine's step() has not. Use another optimizer.")
            return None
        stage = self.get("zero_optimization.stage")
        if kind not in ELEMENTWISE and stage > 0 and not self.get("zero_allow_untested_optimizer"):
            self.fail(path, kind, f"does not work element by element, so that ZeRO stage {stage} would change its result. Use stage 0, "
                                  "another optimizer, or set zero_allow_untested_optimizer to true.")
        self._check_signature(classes[kind], "optimizer.params", params, auto=("lr", "betas", "eps", "weight_decay"), skip=1)
        return OptimizerConfig(kind, {k: v for k, v in params.items() if v != AUTO}, "torch", kind != "Adam")

    def _scheduler(self) -> SchedulerConfig | None:
        kind, params = self.values.get("scheduler.type"), self.values.get("scheduler.params")
        if kind is None:
            if params:
                self.fail("scheduler.params", params, "is given without scheduler.type. Add it, or remove the section.")
            return None
        from . import lr_schedules

        try:
            schedule = lr_schedules.scheduler_class(kind)
        except ConfigError as exc:
            self.errors.append(f"{self.name}: {exc}")
            return None
        params = dict(params or {})
        self._check_signature(schedule, "scheduler.params", params, auto=AUTO_SCHEDULER_PARAMS, skip=1)
        params = {k: v for k, v in params.items() if not (isinstance(v, str) and v == AUTO)}
        if not any(a.startswith("scheduler.params.") for a in self.auto):
            try:
                lr_schedules.check_params(kind, params)
            except ConfigError as exc:
                self.errors.append(f"{self.name}: {exc}")
        return SchedulerConfig(kind, params)

    def _check_signature(self, cls: type, prefix: str, params: dict[str, Any], auto: Any, skip: int) -> None:
        """Names of the arguments against the class's own signature; missing ones that have no default."""
        arguments = list(inspect.signature(cls).parameters.values())[skip:]
        names = {a.name for a in arguments}
        for key, value in params.items():
            if key not in names:
                self.errors.append(f"{self.name}: unknown key {json.dumps(f'{prefix}.{key}')}: {cls.__name__} has no such "
                                   f"argument.{suggest(key, names)}")
            elif isinstance(value, str) and value == AUTO:
                if key in auto:
                    self.auto.append(f"{prefix}.{key}")
                else:
                    self.fail(f"{prefix}.{key}", value, "is not possible: no integration fills this key. Write a value or remove it.")
        for a in arguments:
            if a.default is a.empty and a.kind is a.POSITIONAL_OR_KEYWORD and a.name not in params:
                self.errors.append(f"{self.name}: {prefix}.{a.name} is missing: {cls.__name__} needs it.")

    # -- building --

    def _fill(self, cls: type[_T], prefix: str, **given: Any) -> _T:
        names = [f.name for f in dataclasses.fields(cast(Any, cls)) if f.name not in given]
        return cls(**{n: self.get(f"{prefix}.{n}" if prefix else n) for n in names}, **given)

    def _build(self, optimizer: OptimizerConfig | None, scheduler: SchedulerConfig | None) -> Config:
        zero = "zero_optimization"
        stage, overlap = self.get(f"{zero}.stage"), self.get(f"{zero}.overlap_comm")
        batch = dict(zip(_TRIANGLE, getattr(self, "triangle", None) or (self.values.get(k) for k in _TRIANGLE), strict=True))
        return self._fill(
            Config, "", **batch, optimizer=optimizer, scheduler=scheduler,
            fp16=self._fill(Fp16Config, "fp16"), bf16=self._fill(Bf16Config, "bf16"),
            zero=self._fill(ZeroConfig, zero, overlap_comm=stage == 3 if overlap is None else overlap,
                            offload_optimizer=self._fill(OffloadOptimizerConfig, f"{zero}.offload_optimizer"),
                            offload_param=self._fill(OffloadParamConfig, f"{zero}.offload_param")),
            data_types=DataTypesConfig("fp32"), checkpoint=self._fill(CheckpointConfig, "checkpoint"),
            comms_logger=self._fill(CommsLoggerConfig, "comms_logger"), flops_profiler=self._fill(FlopsProfilerConfig, "flops_profiler"),
            tensorboard=self._fill(TensorBoardConfig, "tensorboard"), csv_monitor=self._fill(CSVConfig, "csv_monitor"),
            wandb=self._fill(WandbConfig, "wandb"), comet=self._fill(CometConfig, "comet"),
            deepc=self._fill(DeepcConfig, "deepc", precision=self._fill(PrecisionConfig, "deepc.precision"), log=self._fill(LogConfig, "deepc.log"),
                             timeline=self._fill(TimelineConfig, "deepc.timeline")),
            world_size=self.world, device_type=self.device, source=self.name, raw=self.raw,
            inert=tuple(self.inert), auto=tuple(self.auto), given=frozenset(self.values))


def _same(a: Any, b: Any) -> bool:
    """Equality that does not take False for 0 or True for 1."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def resolve_batch(train: int | None, micro: int | None, accum: int | None, world: int) -> tuple[int, int, int]:
    """(train_batch_size, micro batch, accumulation) with the missing ones derived, by DeepSpeed's integer arithmetic. At least one of
    `train` and `micro` is given. The result need not fit together: the caller checks train == micro * accum * world."""
    if train is not None and micro is not None:
        return train, micro, accum if accum is not None else train // micro // world
    if train is not None:
        accum = 1 if accum is None else accum
        return train, train // world // accum, accum
    assert micro is not None  # the caller's contract, not input
    accum = 1 if accum is None else accum
    return micro * accum * world, micro, accum


# ---- JSON Schema -----------------------------------------------------------------------------------------------------

_JSON_TYPES = {"bool": "boolean", "int": "integer", "number": "number", "str": "string", "object": "object", "gated": "object"}


def _row_schema(row: Key) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if row.kind in ("strings", "numbers"):
        item: dict[str, Any] = {"type": "string" if row.kind == "strings" else "number"}
        if row.kind == "numbers":
            item.update(_bounds(row))
            out.update(minItems=len(row.default), maxItems=len(row.default))
        out.update(type="array", items=item)
        if row.kind == "strings":
            out = {"anyOf": [out, {"type": "string"}]}
    elif row.kind == "str" and row.choices:
        out.update(type="string", pattern="^(?:" + "|".join(_any_case(c) for c in row.choices) + ")$")
    elif row.kind != "any":
        out.update(type=_JSON_TYPES[row.kind], **(_bounds(row) if row.kind in ("int", "number") else {}))
    if row.kind == "gated":
        out = {"anyOf": [{"type": "object", "required": ["enabled"], "properties": {"enabled": {"const": False}}}, {"const": {}}]}
    elif row.state in (State.LATER, State.REMOVED) and row.ok is not ANY:
        accepted = [o for o in row.ok if o is not None]
        out = {"enum": accepted} if not row.choices else ({"allOf": [out, {"pattern": "^(?:" + "|".join(map(_any_case, accepted)) + ")$"}]}
                                                          if accepted else {"enum": []})
    options = [o for o in (out,) if o.get("enum", True) != []]
    if row.auto:
        options.append({"const": AUTO})
    if row.default is None or row.null:
        options.append({"type": "null"})
    schema: dict[str, Any] = dict(options[0]) if len(options) == 1 else {"anyOf": options}
    if row.path == "optimizer.params":
        schema = {"anyOf": [{"type": "object", "properties": {k: _row_schema(r) for k, r in OPTIMIZER_PARAMS.items()}}, {"type": "null"}]}
        schema["anyOf"][0]["description"] = "For Adam and AdamW; other optimizers take the arguments of their torch class."
        for r in OPTIMIZER_PARAMS.values():  # a torch class may use the same name for something wider
            if r.state is State.LATER:
                schema["anyOf"][0]["properties"].pop(r.path)
    schema["description"] = row.help + (f" Inert: {row.why}." if row.state is State.INERT else "")
    schema["x-deepc-state"] = row.state.value
    if row.default is not None and row.state is not State.REMOVED:
        schema["default"] = list(row.default) if isinstance(row.default, tuple) else row.default
    return schema


def _any_case(word: str) -> str:
    return "".join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else re.escape(c) for c in word)


def _bounds(row: Key) -> dict[str, float]:
    names = {"minimum": row.ge, "exclusiveMinimum": row.gt, "maximum": row.le, "exclusiveMaximum": row.lt}
    return {k: v for k, v in names.items() if v is not None}


def json_schema() -> dict[str, Any]:
    """A JSON Schema (draft 2020-12) of everything that Config.load accepts, for editors and CI."""
    root: dict[str, Any] = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "deepc configuration (DeepSpeed JSON)",
                            "type": "object", "additionalProperties": False, "properties": {}}
    for row in KEYS:
        node = root
        for part in row.path.split(".")[:-1]:
            entry = node["properties"].setdefault(part, {"anyOf": [{"type": "object", "additionalProperties": False, "properties": {}},
                                                                   {"type": "null"}]})
            node = entry["anyOf"][0]
        node["properties"][row.leaf] = _row_schema(row)
        if row.alias:
            node["properties"][row.alias] = {**_row_schema(row), "deprecated": True}
    root["properties"]["zero_optimization"]["anyOf"].append({"type": "boolean"})
    for old, new in RENAMED_SECTIONS.items():
        root["properties"][old] = {**root["properties"][new], "deprecated": True}
    return root


def write_schema(path: str | os.PathLike[str] | None = None) -> str:
    """The schema as JSON text; written to `path` if given."""
    text = json.dumps(json_schema(), indent=2) + "\n"
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


def main(argv: list[str] | None = None) -> int:
    """`python -m deepc.config`."""
    import argparse
    import sys

    parser = argparse.ArgumentParser(prog="python -m deepc.config", description="The keys of a deepc configuration.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--schema", nargs="?", const="-", metavar="FILE", help="write the JSON Schema of all keys to FILE, or print it")
    what.add_argument("--explain", metavar="CONFIG", help="check a configuration and show what it means")
    parser.add_argument("--world-size", type=int, default=1, help="data-parallel ranks (default 1)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args(argv)
    if args.schema:
        text = write_schema(None if args.schema == "-" else args.schema)
        if args.schema == "-":
            print(text, end="")
        return 0
    try:
        print(Config.load(args.explain, world_size=args.world_size, device_type=args.device, allow_auto=True).explain())
    except ConfigError as exc:
        print(exc, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
