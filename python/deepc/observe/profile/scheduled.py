"""What an engine's configuration asks for at given steps: the flops profile of one step, and the comms logger's file in
the run folder."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator
from typing import Any

import torch

from ...core.files import atomic_write
from .flops.costs import get_module_flops
from .flops.profiler import FlopsProfiler
from .probe import Listener, Probe, run_folder

_COMMS_EVERY_S = 30.0
_log = logging.getLogger("deepc")


class FlopsAtStep(Listener):
    """Section flops_profiler: profiles the forwards of the step before which `profile_step` steps were done, and prints
    the last of them when it ends, on rank 0. All ranks count, as the log line's FLOP/s are those of all. Nothing of it
    is left afterwards."""

    def __init__(self, probe: Probe) -> None:
        self._probe, engine = probe, probe.engine
        self._section = engine._config.flops_profiler
        self._profiler = FlopsProfiler(engine.module, engine, self._section.recompute_fwd_factor)
        engine.flops_profiler = self._profiler  # DeepSpeed's name
        self._counting, self._flops = False, 0  # the latter of the step's forwards so far

    def begin(self, name: str, now: int) -> None:
        if (
            name == "forward"
            and self._probe.engine.global_steps == self._section.profile_step
            and torch.is_grad_enabled()
        ):
            self._profiler.start_profile()
            self._counting = True

    def end(self, name: str, now: int, stepped: bool) -> None:
        if name == "forward" and self._counting:
            self._profiler.stop_profile()
            self._counting = False
            self._flops += get_module_flops(self._profiler.model)
        elif name == "discard":
            self._flops = 0
        elif name == "step" and stepped and self._profiler.started:
            self._tell()
        if name == "step" and stepped and self._probe.engine.global_steps > self._section.profile_step:
            self._probe.drop(self)

    def _tell(self) -> None:
        engine, s = self._probe.engine, self._section
        if engine.monitor is not None:
            engine.monitor.set_flops(per_step=3 * self._flops)
        if engine.everyone.rank != 0:
            return
        with _worth_no_run(s.output_file or "standard output"):
            self._profiler.print_model_profile(
                engine.global_steps, s.module_depth, s.top_modules, s.detailed, s.output_file
            )
        folder = run_folder(engine._config)
        if folder and not s.output_file:
            path = os.path.join(folder, "flops.txt")
            with _worth_no_run(path):
                self._profiler.print_model_profile(engine.global_steps, s.module_depth, s.top_modules, s.detailed, path)

    def close(self) -> None:
        self._profiler.end_profile()


class CommsFile(Listener):
    """comms.rank<R>.json in the run folder: what the comms logger has seen, every half minute and at the end."""

    def __init__(self, engine: Any, folder: str) -> None:
        self._path = os.path.join(folder, f"comms.rank{engine.everyone.rank}.json")
        self._written = time.monotonic()
        self._failed = False
        atexit.register(self._at_exit)

    def end(self, name: str, now: int, stepped: bool) -> None:
        if name == "step" and stepped and time.monotonic() - self._written > _COMMS_EVERY_S:
            self._write()

    def _write(self) -> None:
        from ...comm.calls import logger

        if self._failed:
            return
        self._written = time.monotonic()
        found = {**(logger.log_all(print_log=False, return_dict=True) or {}), "lost": logger.lost}
        self._failed = True
        with _worth_no_run(self._path):
            write_json(self._path, found)
            self._failed = False

    def _at_exit(self) -> None:
        with contextlib.suppress(Exception):  # the process ends: what is half gone by now must not change how
            self._write()

    def close(self) -> None:
        atexit.unregister(self._at_exit)
        self._write()


@contextlib.contextmanager
def _worth_no_run(path: str) -> Iterator[None]:
    """A file that can't be written is said, as of the run folder's others, and training goes on."""
    try:
        yield
    except OSError as exc:
        _log.warning(f"{path} can't be written, so it is missing or old, and training goes on: {exc}")


def write_json(path: str, value: Any) -> None:
    """Writes a file whole or not at all; its folder is made."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with atomic_write(path) as f:
        f.write(json.dumps(value).encode())
