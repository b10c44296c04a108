"""The configuration: a DeepSpeed JSON (file, text, base64 or dict) read into frozen, typed, validated objects.

Owns the typed tree and the rules between keys; the keys themselves are rows of config_keys.py, the text is read by
config_source.py, one value is checked by config_value.py, config_schema.py writes the JSON Schema. Needs only the
standard library: torch is imported when an optimizer or a schedule of torch is named. Everything that is wrong in a
configuration is reported at once, each with its key, its value, its file and the fix.

    cfg = Config.load("ds_config.json", world_size=2)
    cfg.zero.stage, cfg.fp16.enabled, cfg.gradient_clipping
    print(cfg.explain())

`python -m deepc.config --schema [FILE]` writes the JSON Schema of all keys; `--explain FILE` shows what a configuration
means.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

from ..core import cpu
from ..errors import ConfigError, did_you_mean
from .keys import (
    ANY,
    AUTO_SCHEDULER_PARAMS,
    KEYS,
    LATER_OPTIMIZERS,
    OPTIMIZER_PARAMS,
    RENAMED_SECTIONS,
    TABLE,
    Key,
    State,
)
from .schema import json_schema, write_schema  # noqa: F401
from .source import _read
from .values import _ALIASES, _KIND_WORDS, _SECTIONS, AUTO, _auto_message, _Bad, _show, check_value, suggest

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

    `backend` is "deepc" (deepc.optim.AdamW, `params` complete: lr, betas, eps, weight_decay, amsgrad; `decoupled` False
    means Adam with L2) or "torch" (torch.optim.<type>(**params), `params` as given)."""

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
        """ "fp16", "bf16" or "fp32": the type of parameters and activations; with precision "auto" the one that
        training starts with."""
        if self.precision == AUTO:
            # On a GPU the engine refuses "auto"; every GPU that torch still runs on since sm_80 has bf16.
            return cpu.recommended_dtype()[0] if self.device_type == "cpu" else "bf16"
        return "fp16" if self.fp16.enabled else "bf16" if self.bf16.enabled else "fp32"

    @property
    def pre_scale(self) -> float:
        """What a gradient is multiplied by before the sum over ranks; the sum times `1 / (world_size * pre_scale)` is
        the mean. As in DeepSpeed: 1 / ranks with prescale_gradients, else 1 / gradient_predivide_factor."""
        return 1.0 / (self.world_size if self.prescale_gradients else self.gradient_predivide_factor)

    @classmethod
    def load(
        cls,
        source: str | os.PathLike[str] | Mapping[str, Any] | Config,
        *,
        world_size: int,
        device_type: str = "cpu",
        allow_auto: bool = False,
        needs_batch: bool = True,
    ) -> Config:
        """Reads and validates a configuration.

        source: path of a JSON file (comments and trailing commas are allowed, as DeepSpeed does), JSON text, base64 of
        JSON text, a dict (copied), or a Config. world_size: number of data-parallel ranks. device_type: "cpu" or
        "cuda", decides which hints are inert. allow_auto: keep "auto" values (the keys are listed in `.auto`, their
        fields hold the default) instead of raising. needs_batch=False: it may leave out the batch sizes,
        for who asks of something else. Raises ConfigError, which lists everything that is wrong."""
        if isinstance(source, Config):
            source = source.raw
        raw, name = _read(source)
        loader = _Loader(raw, name, world_size, device_type, allow_auto)
        loader.needs_batch = needs_batch
        return loader.load()

    def require_resolved(self) -> None:
        """Raises ConfigError, naming them, if "auto" values are left."""
        if self.auto:
            raise ConfigError(_auto_message(self.source, self.auto))

    def describe_inert(self) -> str:
        """One line per given key that changes nothing here; "" if there is none."""
        return "\n".join(f"inert: {i.key} = {json.dumps(i.value, default=str)}: {i.reason}" for i in self.inert)

    def explain(self) -> str:
        """What this configuration means: every active key with its value, where that comes from and what it does; then
        what is inert."""
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
            lines.append('still "auto": ' + ", ".join(self.auto))
        return "\n".join(lines)

    def _value(self, row: Key) -> Any:
        node: Any = self
        for part in row.path.split("."):
            node = getattr(node, "zero" if part == "zero_optimization" else part, _MISSING)
        return node  # an absent section (None) has no attributes, so its keys are _MISSING


_TRIANGLE = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def default_optimizer() -> OptimizerConfig:
    """What is used when neither the configuration nor the caller gives an optimizer: AdamW with DeepSpeed's
    defaults."""
    names = ("lr", "betas", "eps", "weight_decay", "amsgrad")
    return OptimizerConfig("AdamW", {n: OPTIMIZER_PARAMS[n].default for n in names}, "deepc", True)


# ---- the whole -------------------------------------------------------------------------------------------------------


_T = TypeVar("_T")


class _Loader:
    """One load: walks the raw dict, checks each value against its row, applies the rules between keys, builds the
    tree."""

    def __init__(self, raw: dict[str, Any], name: str, world_size: int, device_type: str, allow_auto: bool) -> None:
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise ConfigError(
                f"world_size {world_size!r} must be a positive integer: the number of data-parallel ranks"
            )
        if device_type not in ("cpu", "cuda"):
            raise ConfigError(f'device_type {device_type!r} must be "cpu" or "cuda"')
        self.raw, self.name, self.world, self.device, self.allow_auto = raw, name, world_size, device_type, allow_auto
        self.values: dict[str, Any] = {}
        self.auto: list[str] = []
        self.inert: list[InertKey] = []
        self.errors: list[str] = []
        self.needs_batch = True

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
            raise ConfigError(
                self.errors[0]
                if len(self.errors) == 1
                else f"{len(self.errors)} things are wrong in the configuration:\n"
                + "\n".join(f"- {e}" for e in self.errors)
            )
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
        if (
            value == AUTO
            and isinstance(value, str)
            and row.kind != "any"
            and not (row.kind == "str" and (row.ok is ANY or AUTO in row.choices))
        ):
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
        if (
            row.state in (State.LATER, State.REMOVED)
            and row.ok is not ANY
            and not any(_same(checked, o) for o in row.ok)
        ):
            self._refuse(row, path, value)
            return
        self.values[path] = checked
        if row.state is State.INERT and row.inert_on in ("", self.device):
            self.inert.append(InertKey(path, value, row.why))

    def _take_auto(self, row: Key) -> None:
        if row.auto:
            self.auto.append(row.path)
        else:
            self.fail(
                row.path,
                AUTO,
                f"is not possible: no integration fills this key. Write {_KIND_WORDS.get(row.kind, 'a value')}, or "
                f"remove the key to get the default, {_show(row.default)}.",
            )

    def _gated(self, row: Key, section: Any) -> None:
        """A section that is off unless `enabled` says otherwise; a section without `enabled` is off only if it is
        empty."""
        if section is None or section == {}:
            return
        enabled = section.get("enabled", True)
        if enabled == AUTO:
            self.auto.append(f"{row.path}.enabled")
        elif enabled is not False:
            self._refuse(
                row, f"{row.path}.enabled" if "enabled" in section else row.path, section.get("enabled", section)
            )

    def _refuse(self, row: Key, path: str, value: Any) -> None:
        off = " or ".join(_show(o) for o in row.ok if o is not None) if row.ok is not ANY else ""
        if row.kind == "gated":
            off = '{"enabled": false}' if not path.endswith(".enabled") else "false"
        fix = f"Remove the key{' or set it to ' + off if off else ''}."
        if row.state is State.LATER:
            self.fail(path, value, f"asks for {row.why}, which deepc does not have yet. {fix}")
        else:
            self.fail(
                path,
                value,
                f"asks for a feature that DeepSpeed removed and deepc does not have; instead: {row.why}. {fix}",
            )

    # -- rules between keys --

    def _legacy(self) -> None:
        """Old names whose value goes to a new key."""
        for old, new in (("cpu_offload", "offload_optimizer.device"), ("cpu_offload_param", "offload_param.device")):
            old, new = f"zero_optimization.{old}", f"zero_optimization.{new}"
            if old in self.values and self.values[old] is not None:
                if new in self.values or new in self.auto:
                    self.errors.append(
                        f"{self.name}: {old} and {new} are both given; {old} is the old name. Remove it."
                    )
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
                self.fail(
                    "precision",
                    AUTO,
                    f"chooses between bf16 and fp32 by itself, and {path} is given too. Remove one of them.",
                )
        for path in (k.path for k in KEYS if k.section == "deepc.precision"):
            if path in self.values and not auto:
                self.inert.append(InertKey(path, self.values[path], 'it needs "precision": "auto"'))

    def _offload_rules(self) -> None:
        stage = self.get("zero_optimization.stage")
        for what, needs in (("offload_optimizer", 1), ("offload_param", 3)):
            path = f"zero_optimization.{what}.device"
            device = self.get(path)
            if device == "nvme":
                self.fail(
                    path,
                    device,
                    'asks for offload to disk (NVMe), which deepc does not have yet. Set it to "cpu" or "none".',
                )
            elif device == "cpu" and self.device == "cpu":
                self.inert.append(InertKey(path, device, "a CPU run keeps everything in host memory anyway"))
            elif device == "cpu" and stage < needs:
                self.inert.append(
                    InertKey(path, device, f"it needs ZeRO stage {needs} or higher, the stage is {stage}")
                )
            elif device == "cpu" and what == "offload_param":
                self.fail(
                    path,
                    device,
                    "asks for stage-3 parameters of a GPU run in host memory, which deepc does not have yet. Set it "
                    'to "none".',
                )
        pin = "zero_optimization.offload_optimizer.pin_memory"
        if pin in self.values and self.device == "cpu":
            self.inert.append(InertKey(pin, self.values[pin], "page-locked memory serves copies to a GPU"))

    def _zeropp_rules(self) -> None:
        """ZeRO++ acts on what crosses between CPU nodes; how many there are the engine knows."""
        stage = self.get("zero_optimization.stage")
        for leaf, needs, why in (
            ("zero_quantized_gradients", 0, ""),
            ("zero_quantized_weights", 1, "stage 0 sends no parameters"),
            ("zero_hpz_partition_size", 3, "parameters are partitioned at stage 3 only"),
        ):
            path = f"zero_optimization.{leaf}"
            value = self.get(path)
            if value <= (leaf == "zero_hpz_partition_size"):  # 0, 1 or false: not asked for
                continue
            if stage < needs:
                self.inert.append(InertKey(path, value, why))
            elif self.device == "cuda":
                self.fail(
                    path,
                    value,
                    "asks for ZeRO++ on GPUs, which deepc does not have yet (CPU nodes have it). Remove the key.",
                )
            elif leaf == "zero_hpz_partition_size" and self.world % value:
                self.fail(
                    path,
                    value,
                    f"does not divide the {self.world} rank(s). Set it to the number of ranks of a node, or to 1.",
                )

    def _timeline_rules(self) -> None:
        path = "deepc.timeline.steps"
        first, last = self.get(path)
        if path in self.values and (
            first != int(first) or last != int(last) or not first <= last or (last > 0 and first < 1)
        ):
            self.fail(
                path, self.values[path], "must be two whole numbers, [first, last], 1 <= first <= last ([0, 0]: off)."
            )

    def _triangle(self) -> None:
        if any(f"{k}" in self.auto for k in _TRIANGLE):
            return
        train, micro, accum = (self.values.get(k) for k in _TRIANGLE)
        if train is None and micro is None:
            if self.needs_batch and not any(f" {k} = " in e for e in self.errors for k in _TRIANGLE[:2]):
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
                "Change one of them, or remove one: it is then derived."
            )
            return
        self.triangle = triangle

    # -- optimizer and scheduler --

    def _optimizer(self) -> OptimizerConfig | None:
        kind, params = self.values.get("optimizer.type"), self.values.get("optimizer.params")
        if kind is None:
            if params:
                self.fail(
                    "optimizer.params",
                    params,
                    'is given without optimizer.type. Add "type": "AdamW", or remove the section.',
                )
            return None
        params = dict(params or {})
        if "max_grad_norm" in params:
            self.fail(
                "optimizer.params.max_grad_norm",
                params.pop("max_grad_norm"),
                "is not an argument of an optimizer. Use gradient_clipping.",
            )
        lower = kind.lower()
        if lower in ("adam", "adamw"):
            return self._adam(lower, params)
        if lower in LATER_OPTIMIZERS:
            self.fail(
                "optimizer.type",
                kind,
                f"asks for {LATER_OPTIMIZERS[lower]}, which deepc does not have yet. Use AdamW or a torch.optim class.",
            )
            return None
        return self._torch_optimizer("Adagrad" if lower == "adagrad" else kind, params)

    def _adam(self, lower: str, params: dict[str, Any]) -> OptimizerConfig:
        checked: dict[str, Any] = {}
        for key, value in params.items():
            path = f"optimizer.params.{key}"
            row = OPTIMIZER_PARAMS.get(key)
            if row is None:
                self.errors.append(f"{self.name}: unknown key {json.dumps(path)}.{did_you_mean(key, OPTIMIZER_PARAMS)}")
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
        return OptimizerConfig(
            "AdamW" if decoupled else "Adam", {**default_optimizer().params, **checked}, "deepc", decoupled
        )

    def _torch_optimizer(self, kind: str, params: dict[str, Any]) -> OptimizerConfig | None:
        from ..optim.factory import ELEMENTWISE, torch_classes  # torch, for its classes' signatures

        classes = torch_classes()
        path = "optimizer.type"
        if kind not in classes:
            self.fail(
                path,
                kind,
                f"is neither Adam, AdamW nor a class of torch.optim.{did_you_mean(kind, ['Adam', 'AdamW', *classes])}",
            )
            return None
        if kind == "LBFGS":
            self.fail(
                path,
                kind,
                "needs a closure that runs the model again, which an engine's step() has not. Use another optimizer.",
            )
            return None
        stage = self.get("zero_optimization.stage")
        if kind not in ELEMENTWISE and stage > 0 and not self.get("zero_allow_untested_optimizer"):
            self.fail(
                path,
                kind,
                f"does not work element by element, so that ZeRO stage {stage} would change its result. Use stage 0, "
                "another optimizer, or set zero_allow_untested_optimizer to true.",
            )
        self._check_signature(
            classes[kind], "optimizer.params", params, auto=("lr", "betas", "eps", "weight_decay"), skip=1
        )
        return OptimizerConfig(kind, {k: v for k, v in params.items() if v != AUTO}, "torch", kind != "Adam")

    def _scheduler(self) -> SchedulerConfig | None:
        kind, params = self.values.get("scheduler.type"), self.values.get("scheduler.params")
        if kind is None:
            if params:
                self.fail("scheduler.params", params, "is given without scheduler.type. Add it, or remove the section.")
            return None
        from ..optim import schedules as lr_schedules

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
                self.errors.append(
                    f"{self.name}: unknown key {json.dumps(f'{prefix}.{key}')}: {cls.__name__} has no such "
                    f"argument.{did_you_mean(key, names)}"
                )
            elif isinstance(value, str) and value == AUTO:
                if key in auto:
                    self.auto.append(f"{prefix}.{key}")
                else:
                    self.fail(
                        f"{prefix}.{key}",
                        value,
                        "is not possible: no integration fills this key. Write a value or remove it.",
                    )
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
        batch = dict(
            zip(_TRIANGLE, getattr(self, "triangle", None) or (self.values.get(k) for k in _TRIANGLE), strict=True)
        )
        return self._fill(
            Config,
            "",
            **batch,
            optimizer=optimizer,
            scheduler=scheduler,
            fp16=self._fill(Fp16Config, "fp16"),
            bf16=self._fill(Bf16Config, "bf16"),
            zero=self._fill(
                ZeroConfig,
                zero,
                overlap_comm=stage == 3 if overlap is None else overlap,
                offload_optimizer=self._fill(OffloadOptimizerConfig, f"{zero}.offload_optimizer"),
                offload_param=self._fill(OffloadParamConfig, f"{zero}.offload_param"),
            ),
            data_types=DataTypesConfig("fp32"),
            checkpoint=self._fill(CheckpointConfig, "checkpoint"),
            comms_logger=self._fill(CommsLoggerConfig, "comms_logger"),
            flops_profiler=self._fill(FlopsProfilerConfig, "flops_profiler"),
            tensorboard=self._fill(TensorBoardConfig, "tensorboard"),
            csv_monitor=self._fill(CSVConfig, "csv_monitor"),
            wandb=self._fill(WandbConfig, "wandb"),
            comet=self._fill(CometConfig, "comet"),
            deepc=self._fill(
                DeepcConfig,
                "deepc",
                precision=self._fill(PrecisionConfig, "deepc.precision"),
                log=self._fill(LogConfig, "deepc.log"),
                timeline=self._fill(TimelineConfig, "deepc.timeline"),
            ),
            world_size=self.world,
            device_type=self.device,
            source=self.name,
            raw=self.raw,
            inert=tuple(self.inert),
            auto=tuple(self.auto),
            given=frozenset(self.values),
        )


def _same(a: Any, b: Any) -> bool:
    """Equality that does not take False for 0 or True for 1."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def resolve_batch(train: int | None, micro: int | None, accum: int | None, world: int) -> tuple[int, int, int]:
    """(train_batch_size, micro batch, accumulation) with the missing ones derived, by DeepSpeed's integer arithmetic.
    At least one of `train` and `micro` is given. The result need not fit together: the caller checks train == micro *
    accum * world."""
    if train is not None and micro is not None:
        return train, micro, accum if accum is not None else train // micro // world
    if train is not None:
        accum = 1 if accum is None else accum
        return train, train // world // accum, accum
    assert micro is not None  # the caller's contract, not input
    accum = 1 if accum is None else accum
    return micro * accum * world, micro, accum


# ---- the command -----------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """`python -m deepc.config`."""
    import argparse
    import sys

    parser = argparse.ArgumentParser(prog="python -m deepc.config", description="The keys of a deepc configuration.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--schema", nargs="?", const="-", metavar="FILE", help="write the JSON Schema of all keys to FILE, or print it"
    )
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
