"""The configuration: a DeepSpeed JSON (file, text, base64 or dict) read into frozen, typed, validated objects.

Owns the typed tree. The keys are rows of keys.py, source.py reads the text, values.py checks one value and rules.py
what goes together, schema.py writes the JSON Schema, explain.py the words. Needs no framework: torch is imported when
one of its optimizers or schedules is named. All that is wrong in a configuration is reported at once, each with its
key, its value, its file and the fix.

    cfg = Config.load("ds_config.json", world_size=2)
    cfg.zero.stage, cfg.fp16.enabled, cfg.gradient_clipping
    print(cfg.explain())

`python -m deepc.config --schema [FILE]` writes the JSON Schema of all keys; `--explain FILE` shows what a configuration
means.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

from ..core import cpu
from ..core.dtypes import dtype as dtype_named
from ..errors import ConfigError
from .keys import KEYS, OPTIMIZER_PARAMS, TABLE, Key, State
from .rules import TRIANGLE, InertKey, Loader, OptimizerConfig, SchedulerConfig, default_optimizer
from .source import read
from .values import AUTO, _auto_message

_MISSING = object()


# ---- the defaults that change what a training learns -----------------------------------------------------------------
# Most defaults only cost time or memory; these are DeepSpeed's, and who comes from DDP, FSDP or a torch optimizer
# expects others.


class Default(NamedTuple):
    """A key that was not given, the value that it has then, and what that does."""

    key: str
    value: Any
    says: str


def _telling(loaded: Loader) -> tuple[Default, ...]:
    """Those of a configuration that has been read."""
    out = []
    if "gradient_clipping" not in (*loaded.values, *loaded.auto):
        limit = TABLE["gradient_clipping"].default
        out.append(Default("gradient_clipping", limit, "gradients are clipped at this global norm (0: no clipping)"))
    asked, optimizer = loaded.values.get("optimizer.type"), loaded.optimizer
    if asked is None:
        params = default_optimizer().params
        says = (
            f"used where deepc.initialize gets no optimizer: lr {params['lr']}, weight_decay {params['weight_decay']}"
        )
        out.append(Default("optimizer.type", "AdamW", says))
    elif optimizer is not None and optimizer.backend == "deepc" and asked.lower() in ("adam", "adamw"):
        out += _of_adam(asked, loaded.values.get("optimizer.params") or {})
    return tuple(out)


def _of_adam(asked: str, given: Mapping[str, Any]) -> list[Default]:
    decay, mode = "optimizer.params.weight_decay", "optimizer.params.adam_w_mode"
    if asked.lower() == "adamw" and "weight_decay" not in given:
        return [Default(decay, OPTIMIZER_PARAMS["weight_decay"].default, "torch.optim.AdamW has 0.01")]
    if asked.lower() == "adam" and given.get("weight_decay") and "adam_w_mode" not in given:
        return [Default(mode, True, "the decay is decoupled, as AdamW's (false: L2, as torch.optim.Adam's)")]
    return []


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
class TorchAutocastConfig:
    """Section torch_autocast. dtype: "bf16" or "fp16", what autocast computes in."""

    enabled: bool
    dtype: str


@dataclass(frozen=True)
class OffloadOptimizerConfig:
    """Section zero_optimization.offload_optimizer; device is "none", "cpu" or "nvme", which has an nvme_path."""

    device: str
    pin_memory: bool
    nvme_path: str | None
    buffer_count: int
    ratio: float


@dataclass(frozen=True)
class AioConfig:
    """Section aio. block_size in bytes."""

    block_size: int
    queue_depth: int


@dataclass(frozen=True)
class OffloadParamConfig:
    """Section zero_optimization.offload_param; device is "none", "cpu" or "nvme". nvme_path: the folder of parameters
    on disk; max_in_cpu: elements of them that may be in memory at a time."""

    device: str
    nvme_path: str | None
    max_in_cpu: int
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
    ignore_unused_parameters: bool
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

    @property
    def on_disk(self) -> tuple[bool, bool]:
        """Whether optimizer states, and parameters, are asked to lie on disk."""
        return self.offload_optimizer.device == "nvme", self.offload_param.device == "nvme"

    def parameters_leave(self, device_type: str) -> bool:
        """Whether parameters are asked to lie elsewhere than where the model runs: on disk, or of a GPU run in the
        host's memory."""
        place = self.offload_param.device
        return self.stage == 3 and (place == "nvme" or (place == "cpu" and device_type != "cpu"))


@dataclass(frozen=True)
class DataTypesConfig:
    """Section data_types. grad_accum_dtype: "fp32", "bf16" or "fp16"; buffer_dtype too, or None."""

    grad_accum_dtype: str
    buffer_dtype: str | None


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

    steps: tuple[int, int]
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
class ActivationCheckpointingConfig:
    """Section activation_checkpointing. budget: bytes."""

    partition_activations: bool
    cpu_checkpointing: bool
    contiguous_memory_optimization: bool
    number_checkpoints: int | None
    synchronize_checkpoint_boundary: bool
    profile: bool
    budget: int | None


@dataclass(frozen=True)
class CurriculumConfig:
    """Section curriculum_learning."""

    enabled: bool
    curriculum_type: str
    min_difficulty: int | None
    max_difficulty: int | None
    schedule_type: str | None
    schedule_config: dict[str, Any] | None

    @property
    def schedule(self) -> dict[str, Any]:
        """As config/curriculum.py takes it."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class DataCurriculumConfig:
    """Section data_efficiency.data_sampling.curriculum_learning."""

    enabled: bool
    curriculum_metrics: dict[str, Any] | None


@dataclass(frozen=True)
class DataSamplingConfig:
    """Section data_efficiency.data_sampling."""

    enabled: bool
    curriculum_learning: DataCurriculumConfig


@dataclass(frozen=True)
class DataEfficiencyConfig:
    """Section data_efficiency."""

    enabled: bool
    data_sampling: DataSamplingConfig

    @property
    def metrics(self) -> dict[str, Any]:
        """The schedules to follow, by the metric's name; {} if something is off."""
        sampling = self.data_sampling
        on = self.enabled and sampling.enabled and sampling.curriculum_learning.enabled
        return (sampling.curriculum_learning.curriculum_metrics or {}) if on else {}


@dataclass(frozen=True)
class PipelineConfig:
    """Section pipeline."""

    stages: int | None
    activation_checkpoint_interval: int


@dataclass(frozen=True)
class TensorParallelConfig:
    """Section tensor_parallel."""

    autotp_size: int
    partition_config: dict[str, Any] | None
    preset_model: str | None
    vocab_parallel_lm_head: bool | None


@dataclass(frozen=True)
class ScheduleConfig:
    """Section deepc.pipeline."""

    schedule: str
    chunks: int | None


@dataclass(frozen=True)
class ActivationsConfig:
    """Section deepc.activations: see engine/states/activations.py."""

    nvme_path: str | None
    all: bool
    min_bytes: int


@dataclass(frozen=True)
class DeepcConfig:
    """Section deepc: our own keys."""

    bucket_elems: int | None
    curriculum: str
    deterministic: str | None
    fuse: bool | str | tuple[str, ...]
    max_lost_steps: int
    memory_plan: str
    pipeline: ScheduleConfig
    run_dir: str | None
    activations: ActivationsConfig
    log: LogConfig
    precision: PrecisionConfig
    timeline: TimelineConfig


@dataclass(frozen=True)
class Config:
    """A whole configuration. Batch sizes are None only where `auto` says that an integration still has to fill them."""

    train_batch_size: int | None
    train_micro_batch_size_per_gpu: int | None
    gradient_accumulation_steps: int | None
    managed_gradient_accumulation: bool
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
    gradient_allreduce_op: str
    communication_data_type: str | None
    optimizer: OptimizerConfig | None
    scheduler: SchedulerConfig | None
    precision: str | None
    fp16: Fp16Config
    bf16: Bf16Config
    torch_autocast: TorchAutocastConfig
    zero: ZeroConfig
    aio: AioConfig
    activation_checkpointing: ActivationCheckpointingConfig
    data_types: DataTypesConfig
    pipeline: PipelineConfig
    tensor_parallel: TensorParallelConfig
    sequence_parallel_size: int
    curriculum_learning: CurriculumConfig
    data_efficiency: DataEfficiencyConfig
    sparse_attention: dict[str, Any] | None
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
    defaults: tuple[Default, ...] = field(repr=False)

    @property
    def dtype(self) -> str:
        """ "fp16", "bf16" or "fp32": the type of parameters and activations; with precision "auto" the one that
        training starts with."""
        if self.precision == AUTO:
            # On a GPU the engine refuses "auto"; every GPU that torch still runs on since sm_80 has bf16.
            return cpu.recommended_dtype()[0] if self.device_type == "cpu" else "bf16"
        return "fp16" if self.fp16.enabled else "bf16" if self.bf16.enabled else "fp32"

    @property
    def autocast(self) -> str | None:
        """ "bf16" or "fp16": what forwards compute in under torch.autocast; None where they do not run under it."""
        return self.torch_autocast.dtype if self.torch_autocast.enabled else None

    @property
    def precision_in_words(self) -> str:
        """`dtype`, with what forwards compute in under torch.autocast."""
        return f"{self.dtype}, autocast {self.autocast}" if self.autocast else self.dtype

    @property
    def accumulates(self) -> bool:
        """Whether a step may be of several micro-batches."""
        return not self.managed_gradient_accumulation or (self.gradient_accumulation_steps or 1) > 1

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
        JSON text, a dict (copied), or a Config. world_size: number of ranks, of pipelines of pipeline.stages where
        that is given, else data-parallel ones. device_type: "cpu" or
        "cuda", decides which hints are inert. allow_auto: keep "auto" values (the keys are listed in `.auto`, their
        fields hold the default) instead of raising. needs_batch=False: it may leave out the batch sizes,
        for who asks of something else. Raises ConfigError, which lists everything that is wrong."""
        if isinstance(source, Config):
            source = source.raw
        raw, name = read(source)
        loader = Loader(raw, name, world_size, device_type, allow_auto)
        loader.needs_batch = needs_batch
        return cls.read(loader)

    @classmethod
    def read(cls, asked: Loader) -> Config:
        """The tree of what a loader reads. Raises ConfigError, after which the loader has all of it."""
        return _build(asked.load())

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
        where = f"{self.world_size} rank(s) on {self.device_type}"
        lines = [f"configuration from {self.source}, {where}, {self.precision_in_words}"]
        for row in KEYS:
            value = _MISSING if row.state is not State.ACTIVE else self._value(row)
            if value is _MISSING:
                continue
            origin = "auto" if row.path in self.auto else "given" if row.path in self.given else "default"
            if origin == "default" and row.path in TRIANGLE:
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


# ---- from values to the tree -----------------------------------------------------------------------------------------
_T = TypeVar("_T")


def _fill(asked: Loader, cls: type[_T], prefix: str, **given: Any) -> _T:
    """One dataclass of the tree from the values below `prefix`, but for the fields in `given`."""
    names = [f.name for f in dataclasses.fields(cast(Any, cls)) if f.name not in given]
    return cls(**{n: asked.get(f"{prefix}.{n}" if prefix else n) for n in names}, **given)


def _build(asked: Loader) -> Config:
    zero, sampling = "zero_optimization", "data_efficiency.data_sampling"
    stage, overlap = asked.get(f"{zero}.stage"), asked.get(f"{zero}.overlap_comm")
    batch = dict(zip(TRIANGLE, asked.triangle or (asked.values.get(k) for k in TRIANGLE), strict=True))
    return _fill(
        asked,
        Config,
        "",
        **batch,
        optimizer=asked.optimizer,
        scheduler=asked.scheduler,
        fp16=_fill(asked, Fp16Config, "fp16"),
        bf16=_fill(asked, Bf16Config, "bf16"),
        torch_autocast=_fill(
            asked, TorchAutocastConfig, "torch_autocast", dtype=dtype_named(asked.get("torch_autocast.dtype")).short
        ),
        zero=_fill(
            asked,
            ZeroConfig,
            zero,
            overlap_comm=stage == 3 if overlap is None else overlap,
            offload_optimizer=_fill(asked, OffloadOptimizerConfig, f"{zero}.offload_optimizer"),
            offload_param=_fill(asked, OffloadParamConfig, f"{zero}.offload_param"),
        ),
        aio=_fill(asked, AioConfig, "aio"),
        activation_checkpointing=_fill(asked, ActivationCheckpointingConfig, "activation_checkpointing"),
        data_types=_fill(
            asked,
            DataTypesConfig,
            "data_types",
            grad_accum_dtype=asked.get("data_types.grad_accum_dtype") or "fp32",
        ),
        pipeline=_fill(asked, PipelineConfig, "pipeline"),
        tensor_parallel=_fill(asked, TensorParallelConfig, "tensor_parallel"),
        curriculum_learning=_fill(asked, CurriculumConfig, "curriculum_learning"),
        data_efficiency=_fill(
            asked,
            DataEfficiencyConfig,
            "data_efficiency",
            data_sampling=_fill(
                asked,
                DataSamplingConfig,
                sampling,
                curriculum_learning=_fill(asked, DataCurriculumConfig, f"{sampling}.curriculum_learning"),
            ),
        ),
        checkpoint=_fill(asked, CheckpointConfig, "checkpoint"),
        comms_logger=_fill(asked, CommsLoggerConfig, "comms_logger"),
        flops_profiler=_fill(asked, FlopsProfilerConfig, "flops_profiler"),
        tensorboard=_fill(asked, TensorBoardConfig, "tensorboard"),
        csv_monitor=_fill(asked, CSVConfig, "csv_monitor"),
        wandb=_fill(asked, WandbConfig, "wandb"),
        comet=_fill(asked, CometConfig, "comet"),
        deepc=_fill(
            asked,
            DeepcConfig,
            "deepc",
            activations=_fill(asked, ActivationsConfig, "deepc.activations"),
            pipeline=_fill(asked, ScheduleConfig, "deepc.pipeline"),
            precision=_fill(asked, PrecisionConfig, "deepc.precision"),
            log=_fill(asked, LogConfig, "deepc.log"),
            timeline=_fill(asked, TimelineConfig, "deepc.timeline"),
        ),
        world_size=asked.world,
        device_type=asked.device,
        source=asked.name,
        raw=asked.raw,
        inert=tuple(asked.inert),
        auto=tuple(asked.auto),
        given=frozenset(asked.values),
        defaults=_telling(asked),
    )


def stages_asked(source: Any) -> int:
    """pipeline.stages of a configuration, before the number of ranks is known; 1 if it has none, or none that can be
    read: Config.load says what is wrong."""
    section = read(source.raw if isinstance(source, Config) else source)[0].get("pipeline")
    stages = section.get("stages") if isinstance(section, Mapping) else None
    return stages if isinstance(stages, int) and stages > 1 else 1
