"""deepspeed.checkpointing: activation checkpointing with torch.utils.checkpoint.

checkpoint() recomputes as DeepSpeed's does and keeps random states. Partitioned and contiguous activations do not
exist: configure() raises for them; activations on host or disk are the engine's
(activation_checkpointing.cpu_checkpointing of its configuration)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as _checkpoint

from ...errors import UnsupportedError

_configured = False
_layers: int | None = None
_reentrant = True


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Accepts what torch's checkpointing does; UnsupportedError names what it does not."""
    global _configured, _layers
    if deepspeed_config is not None:
        from ...config.tree import Config

        Config.load(
            deepspeed_config,
            world_size=torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
            allow_auto=True,
        )
    asked = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "checkpoint_in_cpu": checkpoint_in_cpu,
    }
    if asked.pop("checkpoint_in_cpu"):
        raise UnsupportedError(
            "checkpointing.configure(checkpoint_in_cpu=True) does not exist in deepc: set"
            " activation_checkpointing.cpu_checkpointing in the configuration of the engine, whose forward moves them"
        )
    for name, value in asked.items():
        if value:
            raise UnsupportedError(
                f"checkpointing.configure({name}=True) does not exist in deepc: activations are recomputed whole, by "
                "torch.utils.checkpoint. Leave it out"
            )
    _configured, _layers = True, num_checkpoints


def is_configured() -> bool:
    return _configured


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args), whose activations are recomputed in backward."""
    return _checkpoint(function, *args, use_reentrant=_reentrant)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    return _checkpoint(function, *args, use_reentrant=False)


def reset() -> None:
    """Nothing is kept between steps."""


def set_num_layers(nlayers: int) -> None:
    global _layers
    _layers = nlayers


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    configure(partition_activations=partition_activation)


class RNGStatesTracker:
    """Named random states (Megatron's): fork(name) runs with one and puts the other back. On the CPU or the current
    GPU."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        if seed in self.seeds_:
            raise ValueError(f"seed {seed} already exists")
        if name in self.states_:
            raise ValueError(f"random state {name} already exists")
        from ..helpers.devices.accelerator import get_accelerator

        device = get_accelerator()
        before = device.get_rng_state()
        device.manual_seed(seed)
        self.seeds_.add(seed)
        self.states_[name] = device.get_rng_state()
        device.set_rng_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        from ..helpers.devices.accelerator import get_accelerator

        if name not in self.states_:
            raise ValueError(f"random state {name} is not added")
        device = get_accelerator()
        before = device.get_rng_state()
        device.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = device.get_rng_state()
            device.set_rng_state(before)


CudaRNGStatesTracker = RNGStatesTracker
_tracker = RNGStatesTracker()


def get_cuda_rng_tracker() -> RNGStatesTracker:
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seeds the default generator with `seed` and the tracker's model-parallel state with another one (model
    parallelism is of size 1)."""
    from ..helpers.devices.accelerator import get_accelerator

    _tracker.reset()
    get_accelerator().manual_seed(seed)
    _tracker.add("model-parallel-rng", seed + 2718)
