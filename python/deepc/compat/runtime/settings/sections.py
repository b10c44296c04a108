"""DeepSpeed's classes of configuration sections, for scripts that make or ask one: DeepSpeedZeroConfig(stage=3), and
the monitors' sections. Values are checked; deepc itself reads the configuration (deepc.config), not these."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from enum import Enum, IntEnum
from typing import Any, ClassVar, NamedTuple

from ....errors import ConfigError, MisuseError, did_you_mean
from ...helpers.utils import logger

DEFAULT_LEAF_MODULE_CLASSES = [
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
]
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []


class OffloadDeviceEnum(str, Enum):
    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """What engine.offload_states(include=...) takes."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class ZeroStageEnum(IntEnum):
    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class _Field(NamedTuple):
    """kind: bool, int, float, str, list (of strings), an Enum or a section."""

    default: Any
    kind: Any
    low: float = -math.inf
    high: float = math.inf
    alias: str = ""


def _size(default: float, alias: str = "", low: float = 0) -> _Field:
    return _Field(int(default), int, low=low, alias=alias)


class Section:
    """A section made of keyword arguments: unknown ones, wrong types and values out of range are a ConfigError (a
    ValueError, as pydantic's is). "auto" is the default, as in DeepSpeed."""

    FIELDS: ClassVar[dict[str, _Field]] = {}
    OLD: ClassVar[dict[str, str]] = {}
    """Deprecated field -> what it was replaced by."""

    def __init__(self, strict: bool = False, **given: Any) -> None:
        names = {f.alias: name for name, f in self.FIELDS.items() if f.alias}
        values: dict[str, Any] = {}
        old: dict[str, Any] = {}
        for key, value in given.items():
            name = names.get(key, key)
            if name in self.OLD:
                old[name] = value
            elif name not in self.FIELDS:
                raise ConfigError(
                    f"{type(self).__name__} has no field {key!r}."
                    + did_you_mean(
                        key, [*self.FIELDS, *names, *self.OLD], {**self.OLD, **{n: alias for alias, n in names.items()}}
                    )
                )
            elif value != "auto" or strict:
                values[name] = value
        for name, value in old.items():
            logger.warning("%s.%s is deprecated, use %s", type(self).__name__, name, self.OLD[name])
            for new, meant in self._renamed(name, value).items():
                if new in values:
                    raise MisuseError(f"{type(self).__name__}: {name} is the old name of {new}, and both are given")
                values[new] = meant
        self.__dict__["model_fields_set"] = set(values)
        for name, field in self.FIELDS.items():
            setattr(self, name, values.get(name, field.default))
        self._complete()

    def _renamed(self, name: str, value: Any) -> dict[str, Any]:
        """What the deprecated field `name` means."""
        return {self.OLD[name]: value}

    def _complete(self) -> None:
        """After all fields have values."""

    def __setattr__(self, name: str, value: Any) -> None:
        field = self.FIELDS.get(name)
        if field is None:
            raise ConfigError(f"{type(self).__name__} has no field {name!r}." + did_you_mean(name, self.FIELDS))
        self.__dict__[name] = self._checked(name, field, value)

    def __getattr__(self, name: str) -> Any:
        for field, row in type(self).FIELDS.items():
            if row.alias == name:
                return self.__dict__[field]
        raise AttributeError(f"{type(self).__name__} has no field {name!r}")

    def _checked(self, name: str, field: _Field, value: Any) -> Any:
        kind = field.kind
        if value is None and field.default is None:
            return None
        if isinstance(kind, type) and issubclass(kind, Section):
            if isinstance(value, Mapping):
                return kind(**value)
            right = isinstance(value, kind)
        elif isinstance(kind, type) and issubclass(kind, Enum):
            try:
                return kind(value)
            except ValueError:
                right = False
        elif kind is bool:
            right = isinstance(value, bool)
        elif kind is list:
            value = list(dict.fromkeys([value] if isinstance(value, str) else value or ()))
            right = all(isinstance(v, str) for v in value)
        elif kind is str:
            right = isinstance(value, (str, os.PathLike))
        else:
            right = isinstance(value, (int, float)) and not isinstance(value, bool) and field.low <= value <= field.high
            if right and kind is int:
                right, value = value == int(value), int(value)
        if not right:
            limits = f" from {field.low:g} to {field.high:g}" if field.low > -math.inf else ""
            raise ConfigError(f"{type(self).__name__}.{name} = {value!r} must be {kind.__name__}{limits}")
        return value

    def model_dump(self) -> dict[str, Any]:
        """The fields as a dict; sections as dicts."""
        fields = {name: self.__dict__[name] for name in self.FIELDS}
        return {name: v.model_dump() if isinstance(v, Section) else v for name, v in fields.items()}

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.model_dump() == other.model_dump()  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]  # fields can be set

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={self.__dict__[k]!r}' for k in self.FIELDS)})"


# ---- zero_optimization -----------------------------------------------------------------------------------------------
class DeepSpeedZeroOffloadParamConfig(Section):
    """Section zero_optimization.offload_param."""

    FIELDS: ClassVar[dict[str, _Field]] = {
        "device": _Field(OffloadDeviceEnum.none, OffloadDeviceEnum),
        "nvme_path": _Field(None, str),
        "buffer_count": _size(5),
        "buffer_size": _size(1e8),
        "max_in_cpu": _size(1e9),
        "pin_memory": _Field(True, bool),
    }


class DeepSpeedZeroOffloadOptimizerConfig(Section):
    """Section zero_optimization.offload_optimizer."""

    FIELDS: ClassVar[dict[str, _Field]] = {
        "device": _Field(OffloadDeviceEnum.none, OffloadDeviceEnum),
        "nvme_path": _Field(None, str),
        "buffer_count": _size(4),
        "pin_memory": _Field(True, bool),
        "pipeline_read": _Field(False, bool),
        "pipeline_write": _Field(False, bool),
        "fast_init": _Field(False, bool),
        "ratio": _Field(1.0, float, 0.0, 1.0),
        "super_offload": _Field(False, bool),
        "cpuadam_cores_perc": _Field(0.8, float, 0.0, 1.0),
    }

    @property
    def pipeline(self) -> bool:
        return bool(self.pipeline_read or self.pipeline_write)


class DeepSpeedZeroLeafModuleConfig(Section):
    """Section zero_optimization.leaf_module."""

    FIELDS: ClassVar[dict[str, _Field]] = {
        "classes": _Field(DEFAULT_LEAF_MODULE_CLASSES, list),
        "names": _Field(DEFAULT_LEAF_MODULE_NAMES, list),
        "name_suffixes": _Field(DEFAULT_LEAF_MODULE_NAME_SUFFIXES, list),
    }


_CPU = {"device": "cpu"}


class DeepSpeedZeroConfig(Section):
    """Section zero_optimization, with DeepSpeed's names and defaults; the stage3_ forms name the same fields."""

    overlap_comm: bool | None
    FIELDS: ClassVar[dict[str, _Field]] = {
        "stage": _Field(ZeroStageEnum.disabled, ZeroStageEnum),
        "contiguous_gradients": _Field(True, bool),
        "reduce_scatter": _Field(True, bool),
        "reduce_bucket_size": _size(5e8, low=1),
        "use_multi_rank_bucket_allreduce": _Field(True, bool),
        "allgather_partitions": _Field(True, bool),
        "allgather_bucket_size": _size(5e8),
        "overlap_comm": _Field(None, bool),
        "compute_grad_norm": _Field(True, bool),
        "load_from_fp32_weights": _Field(True, bool),
        "elastic_checkpoint": _Field(False, bool),
        "offload_param": _Field(None, DeepSpeedZeroOffloadParamConfig),
        "offload_optimizer": _Field(None, DeepSpeedZeroOffloadOptimizerConfig),
        "sub_group_size": _size(1e9),
        "prefetch_bucket_size": _size(5e7, "stage3_prefetch_bucket_size"),
        "param_persistence_threshold": _size(1e5, "stage3_param_persistence_threshold"),
        "model_persistence_threshold": _size(sys.maxsize, "stage3_model_persistence_threshold"),
        "max_live_parameters": _size(1e9, "stage3_max_live_parameters"),
        "max_reuse_distance": _size(1e9, "stage3_max_reuse_distance"),
        "gather_16bit_weights_on_model_save": _Field(False, bool, alias="stage3_gather_16bit_weights_on_model_save"),
        "module_granularity_threshold": _size(0, "stage3_module_granularity_threshold"),
        "use_all_reduce_for_fetch_params": _Field(False, bool, alias="stage3_use_all_reduce_for_fetch_params"),
        "allgather_sequential": _Field(False, bool, alias="stage3_allgather_sequential"),
        "ignore_unused_parameters": _Field(True, bool),
        "legacy_stage1": _Field(False, bool),
        "round_robin_gradients": _Field(False, bool),
        "parameter_alignment": _Field(False, bool),
        "zero_hpz_partition_size": _size(1),
        "zero_quantized_weights": _Field(False, bool),
        "zero_quantized_nontrainable_weights": _Field(False, bool),
        "zero_quantized_gradients": _Field(False, bool),
        "memory_efficient_linear": _Field(True, bool),
        "pipeline_loading_checkpoint": _Field(False, bool),
        "override_module_apply": _Field(True, bool),
        "log_trace_cache_warnings": _Field(False, bool),
        "enable_sanity_checks": _Field(False, bool),
        "save_muon_momentum_buffer_in_memory": _Field(False, bool),
        "leaf_module": _Field({}, DeepSpeedZeroLeafModuleConfig),
    }
    OLD: ClassVar[dict[str, str]] = {
        "cpu_offload": "offload_optimizer",
        "cpu_offload_param": "offload_param",
        "cpu_offload_use_pin_memory": "offload_param or offload_optimizer",
        "stage3_gather_fp16_weights_on_model_save": "gather_16bit_weights_on_model_save",
    }

    def _renamed(self, name: str, value: Any) -> dict[str, Any]:
        if name == "cpu_offload_use_pin_memory":
            return {}  # without effect in DeepSpeed as well
        if name in ("cpu_offload", "cpu_offload_param"):
            return {self.OLD[name]: _CPU if value else None}
        return super()._renamed(name, value)

    def _complete(self) -> None:
        if self.overlap_comm is None:
            self.overlap_comm = self.stage == ZeroStageEnum.weights
        if self.offload_optimizer is not None and self.offload_optimizer.ratio < 1 and self.stage != 3:
            raise MisuseError("DeepSpeedZeroConfig: offload_optimizer.ratio < 1 needs stage 3")
        if self.elastic_checkpoint and self.stage == ZeroStageEnum.weights:
            logger.warning("elastic checkpointing is deprecated at stage 3, and every checkpoint of deepc is elastic")


# ---- monitors --------------------------------------------------------------------------------------------------------
_JOB = "DeepSpeedJobName"


class TensorBoardConfig(Section):
    FIELDS: ClassVar[dict[str, _Field]] = {
        "enabled": _Field(False, bool),
        "output_path": _Field("", str),
        "job_name": _Field(_JOB, str),
    }


class CSVConfig(TensorBoardConfig):
    pass


class WandbConfig(Section):
    FIELDS: ClassVar[dict[str, _Field]] = {
        "enabled": _Field(False, bool),
        "group": _Field(None, str),
        "team": _Field(None, str),
        "project": _Field("deepspeed", str),
    }


class CometConfig(Section):
    FIELDS: ClassVar[dict[str, _Field]] = {
        "enabled": _Field(False, bool),
        "samples_log_interval": _size(100),
        **{k: _Field(None, str) for k in ("project", "workspace", "api_key", "experiment_name", "experiment_key")},
        "online": _Field(None, bool),
        "mode": _Field(None, str),
    }

    def __repr__(self) -> str:
        return f"CometConfig(enabled={self.enabled}, project={self.project!r})"  # without the key


class DeepSpeedMonitorConfig(Section):
    """The monitors' sections: what MonitorMaster and the monitors of deepspeed.monitor take."""

    FIELDS: ClassVar[dict[str, _Field]] = {
        "tensorboard": _Field({}, TensorBoardConfig),
        "comet": _Field({}, CometConfig),
        "wandb": _Field({}, WandbConfig),
        "csv_monitor": _Field({}, CSVConfig),
    }

    @property
    def enabled(self) -> bool:
        return any(self.__dict__[name].enabled for name in self.FIELDS)


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    """The monitors' sections of a configuration dict."""
    given: dict[str, Any] = {k: param_dict.get(k) or {} for k in DeepSpeedMonitorConfig.FIELDS}
    return DeepSpeedMonitorConfig(**given)
