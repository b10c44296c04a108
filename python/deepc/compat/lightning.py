"""What Lightning's DeepSpeedStrategy needs beyond the name `deepspeed`.

Lightning 2.6 runs the strategy on CUDA only: it asks for a CUDAAccelerator and for devices with an index. deepc trains
on CPU ranks as well, so while the compatibility layer is installed those two questions also accept CPUs. On GPUs
nothing changes there. Fabric's strategy calls the step of the optimizer, which here is the engine's to make."""

from __future__ import annotations

import functools
import importlib
import types
import weakref
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
    if hasattr(module.DeepSpeedStrategy, "setup_module_and_optimizers"):
        _teach_fabric(module.DeepSpeedStrategy)


def _teach_fabric(strategy: type[Any]) -> None:
    """A step of an optimizer that Fabric has set up becomes its engine's. One with a closure stays an error."""
    engines: weakref.WeakSet[Any] = weakref.WeakSet()
    set_up, step = strategy.setup_module_and_optimizers, strategy.optimizer_step

    @functools.wraps(set_up)
    def remember(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = set_up(self, *args, **kwargs)
        engines.add(made[0])
        return made

    @functools.wraps(step)
    def optimizer_step(self: Any, optimizer: Any, **kwargs: Any) -> Any:
        engine = None if kwargs else next((e for e in engines if e.optimizer is optimizer), None)
        return step(self, optimizer, **kwargs) if engine is None else engine.step()

    strategy.setup_module_and_optimizers, strategy.optimizer_step = remember, optimizer_step


TEACH = {
    f"{package}.strategies.deepspeed": teach_strategy
    for package in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")
}
