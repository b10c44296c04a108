"""get_accelerator(): DeepSpeed's view of the device that this process computes on, the CPU or a CUDA GPU."""

from __future__ import annotations

import contextlib
import functools
import os
from typing import TYPE_CHECKING, Any

import torch

from ....comm.start import default_device
from ....core import memory
from ....core.foreign import private
from ....errors import UnsupportedError
from ...names import VERSION  # noqa: F401
from .aio import AsyncIOBuilder


class DeepSpeedAccelerator:
    """What both devices have in common. Names and meaning are DeepSpeed's; a device index is a GPU's number and ignored
    on a CPU."""

    _name: str
    _communication_backend_name = "deepc"

    if TYPE_CHECKING:  # what each device has in its own way

        def synchronize(self, device_index: int | None = None) -> None: ...
        def manual_seed(self, seed: int) -> Any: ...
        def get_rng_state(self, device_index: int | None = None) -> torch.Tensor: ...
        def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None: ...
        def memory_allocated(self, device_index: int | None = None) -> int: ...
        def max_memory_allocated(self, device_index: int | None = None) -> int: ...

    # ---- the device --------------------------------------------------------------------------------------------------
    def device_name(self, device_index: int | None = None) -> str:
        return self._name

    def communication_backend_name(self) -> str:
        """The torch.distributed backend that init_distributed() takes."""
        return self._communication_backend_name

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float, torch.bfloat16, torch.half]

    def is_bf16_supported(self) -> bool:
        return True

    def is_fp16_supported(self) -> bool:
        return True

    def is_fp64_supported(self) -> bool:
        return True

    def is_triton_supported(self) -> bool:
        return False

    def get_compile_backend(self) -> str:
        return "inductor"

    # ---- tensors: called with values, on the device ------------------------------------------------------------------
    def _tensor(self, kind: type, dtype: torch.dtype) -> Any:
        return kind if self._name == "cpu" else functools.partial(torch.tensor, dtype=dtype, device=self._name)

    @property
    def FloatTensor(self) -> Any:
        return self._tensor(torch.FloatTensor, torch.float)

    @property
    def HalfTensor(self) -> Any:
        return self._tensor(torch.HalfTensor, torch.half)

    @property
    def BFloat16Tensor(self) -> Any:
        return self._tensor(torch.BFloat16Tensor, torch.bfloat16)

    @property
    def DoubleTensor(self) -> Any:
        return self._tensor(torch.DoubleTensor, torch.double)

    @property
    def IntTensor(self) -> Any:
        return self._tensor(torch.IntTensor, torch.int)

    @property
    def LongTensor(self) -> Any:
        return self._tensor(torch.LongTensor, torch.long)

    @property
    def ByteTensor(self) -> Any:
        return self._tensor(torch.ByteTensor, torch.uint8)

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    # ---- what deepc has no counterpart of ----------------------------------------------------------------------------
    def create_op_builder(self, class_name: str) -> Any:
        if class_name == AsyncIOBuilder.NAME or class_name == AsyncIOBuilder.__name__:
            return AsyncIOBuilder()
        raise UnsupportedError(
            f"op builder {class_name}: deepc compiles nothing on your machine; `deepc doctor` shows which kernels run"
        )

    get_op_builder = create_op_builder

    def export_envs(self) -> list[str]:
        return []


class CPU_Accelerator(DeepSpeedAccelerator):
    """The CPU. Memory is this process's: "allocated" is its proportional set size."""

    _name = "cpu"

    def is_available(self) -> bool:
        return True

    def is_synchronized_device(self) -> bool:
        return True

    def use_host_timers(self) -> bool:
        return True

    resolves_data_dependency = handles_memory_backpressure = use_host_timers

    def device(self, device_index: int | None = None) -> Any:
        return contextlib.nullcontext()

    def set_device(self, device_index: int) -> None:
        pass

    def current_device(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    def current_device_name(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        """Ranks of this node: LOCAL_SIZE, which DeepSpeed's launcher sets, else torchrun's LOCAL_WORLD_SIZE. (DeepSpeed
        counts a CPU's NUMA nodes as devices, one rank each.)"""
        return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or "1")

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    empty_cache = reset_peak_memory_stats = reset_max_memory_allocated = reset_max_memory_cached = synchronize

    def random(self) -> Any:
        return torch.random

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        torch.set_rng_state(new_state)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return torch.get_rng_state()

    def manual_seed(self, seed: int) -> Any:
        return torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def default_generator(self, device_index: int | None = None) -> torch.Generator:
        return torch.default_generator

    @property
    def Stream(self) -> None:
        return None

    @property
    def Event(self) -> None:
        return None

    def stream(self, stream: Any) -> Any:
        return contextlib.nullcontext()

    def current_stream(self, device_index: int | None = None) -> None:
        return None

    default_stream = current_stream

    def memory_allocated(self, device_index: int | None = None) -> int:
        return memory.process_bytes()["pss_bytes"]

    memory_reserved = memory_cached = memory_allocated

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return memory.process_bytes()["peak_rss_bytes"]

    max_memory_reserved = max_memory_cached = max_memory_allocated

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        now = memory.process_bytes()
        return {"allocated_bytes.all.current": now["pss_bytes"], "allocated_bytes.all.peak": now["peak_rss_bytes"]}

    def total_memory(self, device_index: int | None = None) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def available_memory(self, device_index: int | None = None) -> int:
        return memory.available()

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> None:
        pass

    def range_pop(self, domain: Any = None) -> None:
        pass

    def lazy_call(self, callback: Any) -> Any:
        return callback()

    def pin_memory(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return True

    def visible_devices_envs(self) -> list[str]:
        return []


class CUDA_Accelerator(DeepSpeedAccelerator):
    """A CUDA GPU: torch.cuda under DeepSpeed's names. What is not written here is torch.cuda's function of the same
    name."""

    _name = "cuda"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cuda, name)

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def is_synchronized_device(self) -> bool:
        return False

    def use_host_timers(self) -> bool:
        return False

    resolves_data_dependency = handles_memory_backpressure = use_host_timers

    def device_name(self, device_index: int | None = None) -> str:
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def current_device_name(self) -> str:
        return f"cuda:{torch.cuda.current_device()}"

    def random(self) -> Any:
        return torch.random

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        torch.cuda.set_rng_state(new_state, torch.cuda.current_device() if device_index is None else device_index)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return torch.cuda.get_rng_state(torch.cuda.current_device() if device_index is None else device_index)

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.cuda.default_generators[device_index]

    def total_memory(self, device_index: int | None = None) -> int:
        return torch.cuda.get_device_properties(device_index).total_memory

    def available_memory(self, device_index: int | None = None) -> int:
        return torch.cuda.mem_get_info(device_index)[0]

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> None:
        torch.cuda.nvtx.range_push(msg)

    def range_pop(self, domain: Any = None) -> None:
        torch.cuda.nvtx.range_pop()

    def lazy_call(self, callback: Any) -> Any:
        return private.cuda_lazy_call(callback)

    def pin_memory(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor.pin_memory()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def is_bf16_supported(self) -> bool:
        return bool(torch.cuda.is_bf16_supported())

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]


_accelerator: DeepSpeedAccelerator | None = None


def get_accelerator() -> DeepSpeedAccelerator:
    """The accelerator of this process, the one that deepc's engines take by default."""
    global _accelerator
    if _accelerator is None:
        gpu = os.environ.get("DS_ACCELERATOR", "") != "cpu" and torch.cuda.is_available()
        _accelerator = CUDA_Accelerator() if gpu else CPU_Accelerator()
    return _accelerator


def set_accelerator(accel_obj: DeepSpeedAccelerator) -> None:
    global _accelerator
    if not isinstance(accel_obj, DeepSpeedAccelerator):
        raise UnsupportedError(f"set_accelerator({type(accel_obj).__name__}): deepc runs on CPUs and CUDA GPUs only")
    _accelerator = accel_obj


def is_current_accelerator_supported() -> bool:
    return get_accelerator().device_name() in ("cpu", "cuda")


__all__ = [
    "CPU_Accelerator",
    "CUDA_Accelerator",
    "DeepSpeedAccelerator",
    "default_device",
    "get_accelerator",
    "is_current_accelerator_supported",
    "set_accelerator",
]
