"""What Lightning's DeepSpeedStrategy needs beyond the name `deepspeed`.

Lightning 2.6 runs the strategy on CUDA only: it asks for a CUDAAccelerator and for devices with an index. deepc trains
on CPU ranks as well, so while the compatibility layer is installed those two questions also accept CPUs. On GPUs
nothing changes."""

from __future__ import annotations

import importlib
import types
from typing import Any

from ..core.foreign import patches


def teach_strategy(module: types.ModuleType) -> None:
    """`module`: {lightning.pytorch,lightning.fabric,pytorch_lightning,lightning_fabric}.strategies.deepspeed."""
    cuda = module.CUDAAccelerator
    if isinstance(cuda, tuple):
        return
    cpu = importlib.import_module(cuda.__module__.rpartition(".")[0]).CPUAccelerator
    module.CUDAAccelerator = (cuda, cpu)  # type: ignore[attr-defined]  # used in isinstance() only
    check = module._validate_device_index_selection

    def validate(parallel_devices: list[Any]) -> None:
        if any(device.type != "cpu" for device in parallel_devices):
            check(parallel_devices)

    patches.applied("lightning")
    module._validate_device_index_selection = validate  # type: ignore[attr-defined]


TEACH = {
    f"{package}.strategies.deepspeed": teach_strategy
    for package in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")
}
