"""What Hugging Face's libraries need beyond the name `deepspeed`.

Accelerate 1.15 takes every rank of a CPU run for a run of its own (a world of 1) when DeepSpeed is asked for: its
choice of a backend knows accelerators only. While the compatibility layer is installed, that one choice answers "deepc"
instead of nothing."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable
from typing import Any, cast

from . import lightning


def _on_cpu_ranks() -> bool:
    return (
        int(os.environ.get("LOCAL_RANK", "-1")) != -1
        and os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    )


def teach_accelerate(module: types.ModuleType) -> None:
    """Gives accelerate.state.PartialState a backend for CPU ranks under DeepSpeed. What it chooses itself stays."""
    state = module.PartialState
    choose = state._prepare_backend
    if getattr(choose, "_deepc", False):
        return

    @functools.wraps(choose)
    def prepare(self: Any, cpu: bool = False, *args: Any, **kwargs: Any) -> Any:
        from .finder import is_installed

        backend, kind = choose(self, cpu, *args, **kwargs)
        if backend is None and not cpu and is_installed() and _on_cpu_ranks():
            backend = "deepc"
        return backend, kind

    prepare._deepc = True  # type: ignore[attr-defined]
    state._prepare_backend = prepare


_TEACH: dict[str, Callable[[types.ModuleType], None]] = {"accelerate.state": teach_accelerate, **lightning.TEACH}


class _Teacher(importlib.abc.Loader):
    """Runs the module's own loader, then the function of _TEACH."""

    def __init__(self, loader: Any, name: str) -> None:
        self._loader, self._name = loader, name

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        made: types.ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        cast(importlib.machinery.ModuleSpec, module.__spec__).loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _TEACH[self._name](module)


def find_spec(fullname: str, path: Any = None) -> importlib.machinery.ModuleSpec | None:
    """The spec of a module of _TEACH, with a loader that changes it after it is loaded; None for any other."""
    if fullname not in _TEACH:
        return None
    spec = importlib.machinery.PathFinder.find_spec(fullname, path)
    if spec is None or spec.loader is None:
        return None
    spec.loader = _Teacher(spec.loader, fullname)
    return spec


def teach_loaded() -> None:
    """The same for modules that are imported already."""
    for name, teach in _TEACH.items():
        if name in sys.modules:
            teach(sys.modules[name])
