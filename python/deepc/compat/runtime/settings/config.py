"""deepspeed.runtime.config: the configuration classes that scripts construct or compare with."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from ....comm.start import default_device
from ....config.tree import CommsLoggerConfig, Config
from ....errors import ConfigError as DeepSpeedConfigError
from .sections import DeepSpeedMonitorConfig, DeepSpeedZeroConfig, get_monitor_config

__all__ = [
    "CommsConfig",
    "CommsLoggerConfig",
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
]

CommsConfig = CommsLoggerConfig


class DeepSpeedConfig:
    """A configuration read and validated (deepc.config.Config), with DeepSpeed's attribute names. The values of
    sections are deepc's frozen objects."""

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        self._config = Config.load(config, world_size=world, device_type=default_device().type, allow_auto=True)
        self._param_dict = self._config.raw
        self.world_size = world

    def _section(self, name: str) -> dict[str, Any]:
        """{} if it is null, or zero_optimization in its oldest form, a bool."""
        section = self._param_dict.get(name)
        if isinstance(section, bool):
            return {"stage": int(section)}
        return section or {}

    @property
    def zero_config(self) -> DeepSpeedZeroConfig:
        return DeepSpeedZeroConfig(**self._section("zero_optimization"))

    @property
    def monitor_config(self) -> DeepSpeedMonitorConfig:
        return get_monitor_config(self._param_dict)

    @property
    def zero_optimization_stage(self) -> int:
        return self._config.zero.stage

    @property
    def zero_enabled(self) -> bool:
        return self._config.zero.stage > 0

    @property
    def optimizer_name(self) -> str | None:
        kind = self._section("optimizer").get("type")
        return kind.lower() if isinstance(kind, str) else None

    @property
    def optimizer_params(self) -> dict[str, Any] | None:
        return self._section("optimizer").get("params")

    @property
    def scheduler_name(self) -> str | None:
        return self._section("scheduler").get("type")

    @property
    def scheduler_params(self) -> dict[str, Any] | None:
        return self._section("scheduler").get("params")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._config, name)
