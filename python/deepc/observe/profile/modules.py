"""Per-module events of a timeline: forward from the hooks of nn.Module; backward from when the gradient of a module's
output is known until that of its input is. Only tensors are hooked for that, so that the graph stays as it is."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from ...core.foreign import private
from .probe import seen

_log = logging.getLogger("deepc")


def hook(root: torch.nn.Module, recorder: Any) -> Callable[[], None]:
    """Hooks all modules of `root`. Returns what takes the hooks away again."""
    if any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in root.modules()):
        _log.warning("timeline: a compiled model has no modules at run time, their events are left out")
        return lambda: None
    handles: list[Any] = []
    for name, module in root.named_modules():
        one = _Module(name or type(root).__name__, type(module).__name__, recorder)
        handles += [
            module.register_forward_pre_hook(one.enter),
            module.register_forward_hook(one.leave, always_call=True),
        ]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def _with_grad(value: Any) -> list[torch.Tensor]:
    from ...zero.step.hooks import tensors_in

    if not torch.is_grad_enabled() or private.functorch_is_active():
        return []
    return [t for t in tensors_in(value) if t.requires_grad and t.grad_fn is not None]


class _Module:
    def __init__(self, name: str, kind: str, recorder: Any) -> None:
        self._name, self._kind, self._recorder = name, kind, recorder
        self._began: list[int] = []
        self._backward: int | None = None

    def enter(self, module: torch.nn.Module, inputs: Any) -> None:
        seen()
        self._began.append(time.monotonic_ns())
        for t in _with_grad(inputs):
            t.register_hook(self._input_gradient)

    def leave(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        again = private.graph_task_id() != -1
        if self._began:
            name = f"{self._name} (recomputed)" if again else self._name
            self._recorder.add("modules", name, self._began.pop(), time.monotonic_ns(), {"class": self._kind})
        for t in _with_grad(output):
            t.register_hook(self._output_gradient)

    def _output_gradient(self, _: torch.Tensor) -> None:
        if self._backward is None:
            self._backward = time.monotonic_ns()

    def _input_gradient(self, _: torch.Tensor) -> None:
        if self._backward is not None:
            self._recorder.add(
                "modules", f"{self._name} backward", self._backward, time.monotonic_ns(), {"class": self._kind}
            )
            self._backward = None
