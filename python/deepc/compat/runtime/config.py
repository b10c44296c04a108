"""deepspeed.runtime.config: the configuration classes that scripts construct or compare with."""

from __future__ import annotations

import os
from enum import Enum, IntEnum
from typing import Any

import torch.distributed as dist

from ...comm.start import default_device
from ...config.tree import CommsLoggerConfig, Config
from ...config.tree import ZeroConfig as DeepSpeedZeroConfig
from ...errors import ConfigError as DeepSpeedConfigError

__all__ = [
    "CommsConfig",
    "CommsLoggerConfig",
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedZeroConfig",
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
    "ZeroStageEnum",
]

CommsConfig = CommsLoggerConfig


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


class DeepSpeedConfig:
    """A configuration read and validated (deepc.config.Config), with DeepSpeed's attribute names. The values of
    sections are deepc's frozen objects."""

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        self._config = Config.load(config, world_size=world, device_type=default_device().type, allow_auto=True)
        self._param_dict = self._config.raw
        self.world_size = world

    @property
    def zero_config(self) -> DeepSpeedZeroConfig:
        return self._config.zero

    @property
    def zero_optimization_stage(self) -> int:
        return self._config.zero.stage

    @property
    def zero_enabled(self) -> bool:
        return self._config.zero.stage > 0

    @property
    def optimizer_name(self) -> str | None:
        kind = self._param_dict.get("optimizer", {}).get("type")
        return kind.lower() if isinstance(kind, str) else None

    @property
    def optimizer_params(self) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self._param_dict.get("optimizer", {}).get("params")
        return found

    @property
    def scheduler_name(self) -> str | None:
        found: str | None = self._param_dict.get("scheduler", {}).get("type")
        return found

    @property
    def scheduler_params(self) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self._param_dict.get("scheduler", {}).get("params")
        return found

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._config, name)
