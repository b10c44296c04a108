"""deepspeed.utils.timer: named wall-clock timers, and the throughput timer, for scripts that use them directly."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ...engine.events import Listener
from .utils import log_dist, logger

FORWARD_MICRO_TIMER, FORWARD_GLOBAL_TIMER = "fwd_microstep", "fwd"
BACKWARD_MICRO_TIMER, BACKWARD_GLOBAL_TIMER = "bwd_microstep", "bwd"
BACKWARD_INNER_MICRO_TIMER, BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner_microstep", "bwd_inner"
BACKWARD_REDUCE_MICRO_TIMER, BACKWARD_REDUCE_GLOBAL_TIMER = "bwd_allreduce_microstep", "bwd_allreduce"
STEP_MICRO_TIMER, STEP_GLOBAL_TIMER = "step_microstep", "step"


def _wait_for_device() -> None:
    from .devices.accelerator import get_accelerator

    get_accelerator().synchronize()


class _Timer:
    """One timer; elapsed times are in milliseconds."""

    def __init__(self, name: str) -> None:
        self.name_, self.started_ = name, False
        self._total, self._count, self._began = 0.0, 0, 0.0
        self._records: list[float] = []

    def start(self) -> None:
        if self.started_:
            raise RuntimeError(f"{self.name_} timer has already been started")
        _wait_for_device()
        self._began, self.started_ = time.perf_counter(), True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        if not self.started_:
            raise RuntimeError("timer is not started")
        _wait_for_device()
        passed = 1000 * (time.perf_counter() - self._began)
        self._total = passed if reset else self._total + passed
        self._count += 1
        if record:
            self._records.append(passed)
        self.started_ = False

    def reset(self) -> None:
        self.started_, self._total, self._count, self._records = False, 0.0, 0, []

    def elapsed(self, reset: bool = True) -> float:
        running = self.started_
        if running:
            self.stop()
        total = self._total
        if reset:
            self.reset()
        if running:
            self.start()
        return total

    def mean(self) -> float:
        values = self._records or ([self._total / self._count] if self._count else [0.0])
        return sum(values) / len(values)


class SynchronizedWallClockTimer:
    """Timers by name: timers("forward").start()."""

    Timer = _Timer

    def __init__(self) -> None:
        self.timers: dict[str, _Timer] = {}

    def __call__(self, name: str) -> _Timer:
        return self.timers.setdefault(name, _Timer(name))

    def get_timers(self) -> dict[str, _Timer]:
        return self.timers

    def has_timer(self, name: str) -> bool:
        return name in self.timers

    @staticmethod
    def memory_usage() -> str:
        from .devices.accelerator import get_accelerator

        device = get_accelerator()
        return (
            f" | mem_allocated: {device.memory_allocated() / 2**30:.4f} GB max_mem_allocated:"
            f" {device.max_memory_allocated() / 2**30:.4f} GB"
        )

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Prints "time (ms) | name: elapsed | ..." of the timers that exist, on rank 0 (or `ranks`)."""
        parts = [f" | {n}: {self.timers[n].elapsed(reset=reset) / normalizer:.2f}" for n in names if n in self.timers]
        if parts:
            log_dist(
                "time (ms)" + "".join(parts) + (self.memory_usage() if memory_breakdown else ""), ranks=ranks or [0]
            )

    def get_mean(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        out = {}
        for n in names:
            if n in self.timers:
                out[n] = self.timers[n].mean() / normalizer
                if reset:
                    self.timers[n].reset()
        return out


class NoopTimer:
    """The same interface, measuring nothing."""

    class Timer:
        def start(self, *args: Any, **kwargs: Any) -> None:
            pass

        stop = reset = start

        def elapsed(self, *args: Any, **kwargs: Any) -> float:
            return 0.0

        mean = elapsed

    def __init__(self) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> NoopTimer.Timer:
        return self.timer

    def get_timers(self) -> dict[str, Any]:
        return {}

    def has_timer(self, name: str) -> bool:
        return True

    def log(self, *args: Any, **kwargs: Any) -> None:
        pass

    def get_mean(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        return {}


class ThroughputTimer:
    """Samples per second over the steps after the first `start_step`, with all their micro-batches."""

    def __init__(
        self,
        config: Any = None,
        batch_size: int = 1,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Any = None,
    ) -> None:
        self.batch_size, self.start_step, self.steps_per_output = max(1, batch_size or 1), start_step, steps_per_output
        self.logging = logging_fn or logger.info
        self.started = False
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = 0.0

    def _wait(self) -> None:
        _wait_for_device()

    def update_epoch_count(self) -> None:
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        self._wait()
        self._began, self.started = time.perf_counter(), True
        self._counts = self.global_step_count >= self.start_step  # it is a micro-batch of the step that follows these

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        if not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        self.global_step_count += global_step
        self._wait()
        if self._counts:
            self.total_elapsed_time += time.perf_counter() - self._began
        if (
            global_step
            and report_speed
            and self.steps_per_output
            and self.global_step_count % self.steps_per_output == 0
        ):
            self.logging(
                f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}, "
                f"RunningAvgSamplesPerSec={self.avg_samples_per_sec():.4f}"
            )

    def avg_samples_per_sec(self) -> float:
        steps = self.global_step_count - self.start_step
        return (
            float("-inf")
            if steps <= 0 or not self.total_elapsed_time
            else self.batch_size * steps / self.total_elapsed_time
        )


class EngineTimer(ThroughputTimer, Listener):
    """The `tput_timer` of an engine, which runs it. It does not wait for a GPU: over many steps the figure is the same,
    and training goes on meanwhile."""

    def __init__(self, module: torch.nn.Module, batch_size: int) -> None:
        super().__init__(batch_size=batch_size)
        self._module = weakref.ref(module)

    def _wait(self) -> None:
        pass

    def begin(self, name: str, now: int, what: Any) -> None:
        module = self._module()
        if name == "forward" and not self.started and module is not None and module.training:
            self.start()

    def end(self, name: str, now: int, what: Any) -> None:
        if name == "step":
            self.stop(global_step=what is not None)
