"""What Hugging Face's libraries need beyond the name `deepspeed`.

Accelerate 1.15 takes every rank of a CPU run for a run of its own (a world of 1) when DeepSpeed is asked for: its
choice of a backend knows accelerators only. While the compatibility layer is installed, that one choice answers "deepc"
instead of nothing, and its plug-in leaves the word "auto" alone where it is a value.

transformers builds and loads models under zero.Init one parameter at a time if two things are switched off meanwhile
(`loads_one_by_one`), with or without the compatibility layer. Under an HfDeepSpeedConfig it loads them outside of
zero.Init, and asks for a state_dict for its names (`teach_loading`); a base made inside of a head's constructor it
initializes a second time on all ranks but the first (`teach_initializing`)."""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import inspect
import logging
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, cast

from ..core.foreign import patches
from ..zero.parameters.around import names_alone
from . import lightning


def _is_installed() -> bool:
    """Whether the compatibility layer is; `ask` replaces it by finder.py's answer."""
    return False


def ask(is_installed: Callable[[], bool]) -> None:
    """Whom `teach_accelerate` asks from now on whether the compatibility layer is installed."""
    global _is_installed
    _is_installed = is_installed


def _asks_for_deepspeed() -> bool:
    """Accelerator sets it when it gets a plug-in."""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"


def _on_cpu_ranks() -> bool:
    return int(os.environ.get("LOCAL_RANK", "-1")) != -1 and _asks_for_deepspeed()


def _warn_of_cpu() -> None:
    """Accelerate drops the plug-in then, silently."""
    if os.environ.get("RANK", "0") == "0":
        logging.getLogger("deepc").warning(
            "Accelerator(cpu=True) leaves out its deepspeed_plugin: plain DDP trains, without ZeRO and the"
            " configuration. Leave cpu=True out: ranks without a GPU train on the CPU anyway"
        )


def _wrap(owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
    """owner.name becomes around(owner.name), and a staticmethod stays one. False if it is so already."""
    plain = getattr(owner, name)
    if getattr(plain, "_deepc", False):
        return False
    made: Any = functools.wraps(plain)(around(plain))
    made._deepc = True
    setattr(owner, name, staticmethod(made) if isinstance(inspect.getattr_static(owner, name), staticmethod) else made)
    return True


def teach_accelerate(module: types.ModuleType) -> None:
    """Gives accelerate.state.PartialState a backend for CPU ranks under DeepSpeed. What it chooses itself stays."""

    def around(choose: Callable[..., Any]) -> Callable[..., Any]:
        def prepare(self: Any, cpu: bool = False, *args: Any, **kwargs: Any) -> Any:
            backend, kind = choose(self, cpu, *args, **kwargs)
            if cpu and _is_installed() and _asks_for_deepspeed():
                _warn_of_cpu()
            if backend is None and not cpu and _is_installed() and _on_cpu_ranks():
                backend = "deepc"
            return backend, kind

        return prepare

    if _wrap(module.PartialState, "_prepare_backend", around):
        patches.applied("accelerate")


def teach_plugin(module: types.ModuleType) -> None:
    """accelerate.utils.dataclasses.DeepSpeedPlugin refuses every "auto" that it has nothing to fill in for; of a key
    of deepc's own it is a value (deepc.fuse, precision)."""

    def around(fill: Callable[..., Any]) -> Callable[..., Any]:
        def fill_match(self: Any, ds_key_long: str, *args: Any, **kwargs: Any) -> Any:
            from ..config.keys import TABLE
            from ..config.values import is_auto_a_value

            if (
                _is_installed()
                and ds_key_long in TABLE
                and ds_key_long not in kwargs
                and is_auto_a_value(TABLE[ds_key_long])
            ):
                return None
            return fill(self, ds_key_long, *args, **kwargs)

        return fill_match

    if _wrap(module.DeepSpeedPlugin, "fill_match", around):
        patches.applied("accelerate")


def teach_loading(module: types.ModuleType) -> None:
    """What PreTrainedModel.from_pretrained reads of the state_dict of a model that zero.Init has built is its names."""

    def around(load: Callable[..., Any]) -> Callable[..., Any]:
        def load_pretrained(*args: Any, **kwargs: Any) -> Any:
            with names_alone() if _is_installed() else contextlib.nullcontext():
                return load(*args, **kwargs)

        return load_pretrained

    if _wrap(module.PreTrainedModel, "_load_pretrained_model", around):
        patches.applied("transformers-loading")


def teach_initializing(module: types.ModuleType) -> None:
    """transformers.integrations.deepspeed.initialize_weights_zero3 initializes on rank 0, and notes only there that it
    has: on other ranks the constructor around a base would do it again, in their parameters of no elements under
    DeepSpeed, in what all ranks share here."""

    def around(initialize: Callable[..., Any]) -> Callable[..., Any]:
        def initialize_weights_zero3(model: Any, *args: Any, **kwargs: Any) -> None:
            initialize(model, *args, **kwargs)
            for m in model.modules() if _is_installed() else ():
                m._is_hf_initialized = True

        return initialize_weights_zero3

    if hasattr(module, "initialize_weights_zero3") and _wrap(module, "initialize_weights_zero3", around):
        patches.applied("transformers-initializing")


def teach_skipping(module: types.ModuleType) -> None:
    """accelerate.data_loader.skip_first_batches, by which Trainer resumes, makes a new loader of a loader's dataset:
    one whose batches ranks share (UlyssesSPDataLoaderAdapter) has none, and would be lost."""

    def around(skip: Callable[..., Any]) -> Callable[..., Any]:
        def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
            if hasattr(dataloader, "skipping"):
                return dataloader.skipping(num_batches, skip)
            return skip(dataloader, num_batches)

        return skip_first_batches

    if _wrap(module, "skip_first_batches", around):
        patches.applied("accelerate")


_TEACH: dict[str, Callable[[types.ModuleType], None]] = {
    "transformers.modeling_utils": teach_loading,
    "transformers.integrations.deepspeed": teach_initializing,
    "accelerate.state": teach_accelerate,
    "accelerate.utils.dataclasses": teach_plugin,
    "accelerate.data_loader": teach_skipping,
    **lightning.TEACH,
}


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


@contextlib.contextmanager
def loads_one_by_one() -> Iterator[None]:
    """transformers would take a living HfDeepSpeedConfig as a sign to import deepspeed, and reads checkpoints ahead in
    threads, the whole model if they are faster than its main thread. Both are switched off while a zero.Init is
    open."""
    name, key = "HF_DEACTIVATE_ASYNC_LOAD", "_hf_deepspeed_config_weak_ref"
    before = os.environ.get(name)
    os.environ[name] = "1"
    module = sys.modules.get("transformers.integrations.deepspeed")
    living = getattr(module, key, None)
    if living is not None:
        setattr(module, key, None)
    try:
        with patches.applied_inside("transformers"):
            yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
        if living is not None:
            setattr(module, key, living)
