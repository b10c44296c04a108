"""A pytest plugin, and a module for other programs: a GPU without hardware. Under it `torch.mtia` stands where torch
has `torch.cuda`, device.cpp behind it, and deepc is imported with the one name in the place of the other, so that what
the engine does for a GPU runs on any machine: `python -m pytest -p plugin test_gpu_engine.py` with this folder on
PYTHONPATH. What its kernels compute there is not shown by this: operators run on the CPU."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

NAME = "mtia"
_HERE = Path(__file__).parent


def _build() -> Any:
    from torch.utils import cpp_extension

    folder = Path(os.environ.get("DEEPC_SIMGPU_DIR") or _HERE.parents[1] / "build" / f"simgpu-{torch.__version__}")
    folder.mkdir(parents=True, exist_ok=True)
    return cpp_extension.load(
        name="deepc_simgpu",
        sources=[str(_HERE / "device.cpp")],
        build_directory=str(folder),
        extra_cflags=["-O0", "-Wno-attributes"],
        verbose=False,
    )


class Stream(torch.Stream):
    """stream_id: 0 is the default stream."""

    _ids = itertools.count(1)

    def __new__(cls, device: Any = None, priority: int = 0, of: int | None = None) -> Stream:
        number = next(cls._ids) if of is None else of
        return super().__new__(cls, stream_id=number, device_index=0, device_type=core.kind)  # type: ignore[call-overload]

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def wait_stream(self, other: Stream) -> None:
        core.drain(other.stream_id)

    def wait_event(self, event: Event) -> None:
        event.synchronize()

    def synchronize(self) -> None:
        core.drain(self.stream_id)


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self._stream, self._mark, self._time = 0, 0, 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._stream = core.current() if stream is None else stream.stream_id
        self._mark, self._time = core.mark(self._stream), time.perf_counter()

    def synchronize(self) -> None:
        core.reach(self._stream, self._mark)

    def elapsed_time(self, end: Event) -> float:
        return (end._time - self._time) * 1e3


class _Runtime:
    """Of cudart() what deepc calls."""

    class cudaError:
        success = 0

    @staticmethod
    def cudaHostRegister(address: int, nbytes: int, flags: int) -> int:
        core.lock(address, nbytes)
        return 0

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        core.unlock(address)
        return 0


@contextlib.contextmanager
def _on(stream: Stream) -> Iterator[None]:
    before = core.current()
    core.set_current(stream.stream_id)
    try:
        yield
    finally:
        core.set_current(before)


def _names() -> dict[str, Any]:
    """Of torch.cuda, as far as deepc, its tests and torch itself ask for them."""
    return {
        "Stream": Stream,
        "Event": Event,
        "stream": _on,
        "is_current_stream_capturing": lambda: False,
        "current_stream": lambda device=None: Stream(of=core.current()),
        "synchronize": lambda device=None: core.drain_all(),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda function: function(),
        "empty_cache": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state_all": list,
        "set_rng_state_all": lambda states: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: None,
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_device_name": lambda device=None: "NVIDIA H200",  # whose rate is known: it is measured else
        "mem_get_info": lambda device=None: (8 << 30, 8 << 30),
        "memory_allocated": lambda device=None: core.allocated(),
        "max_memory_allocated": lambda device=None: core.most(),
        "reset_peak_memory_stats": lambda device=None: core.reset_most(),
        "cudart": lambda: _Runtime,
        "is_locked": lambda tensor: core.is_locked(tensor.data_ptr()),
    }


# What calls libdeepc_cuda.so gets the CPU's function, whose bits that has, when the stream is through.
_CALLS = """

def call_cuda(name, *args):
    import plugin

    plugin.core.drain(args[-1])
    call(name.replace("dc_cuda_", "dc_"), *args[:-1])
"""


class _Renamed(importlib.machinery.SourceFileLoader):
    """Reads deepc's modules with this device in the place of CUDA's."""

    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self.get_data(self.path), self.path)  # never the file of compiled code

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> Any:
        text = bytes(data).decode()
        for old, new in (("torch.cuda", f"torch.{NAME}"), ('"cuda"', f'"{NAME}"')):
            text = text.replace(old, new)
        if self.name == "deepc.core.lib":
            text += _CALLS
        return super().source_to_code(text.encode(), path)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name.partition(".")[0] != "deepc":
            return None
        others: list[Any] = [f for f in sys.meta_path if f is not self]  # of an editable install, and the path's
        spec = next((s for f in others if (s := f.find_spec(name, path, target)) is not None), None)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Renamed(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Before deepc is imported."""
    assert "deepc" not in sys.modules, "the device comes too late"
    for name, value in _names().items():
        setattr(torch.mtia, name, value)  # what else torch looks for there stays
    sys.meta_path.insert(0, _Finder())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test in which memory went while a late copy used it has failed."""
    core.races()  # of what came before
    yield
    if found := core.races():
        pytest.fail("; ".join(sorted(set(found))))


core = _build()
install()
