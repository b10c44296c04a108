"""deepc: DeepSpeed-class training for PyTorch with its core in plain C.

engine, optimizer, loader, scheduler = deepc.initialize(model=model, config="ds_config.json")
loss = engine(x); engine.backward(loss); engine.step()
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from typing import TYPE_CHECKING, Any, TypeVar, overload

from .core import env
from .core.foreign import patches

if env.switch("DEEPC_HUGEPAGES"):
    # torch maps and unmaps its large activations every step; on 4 KiB pages a quarter of a CPU step is page faults.
    # torch has a switch for huge pages and reads it at its first CPU allocation. A value that the user set stays.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    patches.applied("thp")

from . import optim, zero
from .comm.c10d.backend import register_backend
from .comm.start import init_distributed
from .compat import hf as _hf
from .compat.helpers import safe as utils
from .compat.runtime import parameters as _parameters
from .core import ops  # noqa: F401
from .core.lib import VERSION, counters
from .engine.access import view
from .engine.serve.export import export
from .engine.serve.inference import InferenceEngine, inference
from .errors import DeepcError
from .nn.fuse import fuse
from .nn.loss import linear_cross_entropy
from .observe import profile
from .plan.predict.estimate import estimate

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from . import checkpoint  # noqa: F401
    from .engine.averages import EMA
    from .engine.data import TimedLoader
    from .engine.engine import Engine, OptimizerLike
    from .launch import notebook
    from .optim.schedules import Scheduler
    from .zero.step.update import ShardedOptimizer

    ConfigSource = str | os.PathLike[str] | dict[str, Any]
    Schedule = Scheduler | torch.optim.lr_scheduler.LRScheduler | Callable[[torch.optim.Optimizer], Any]

__version__ = VERSION
__all__ = [
    "EMA",
    "DeepcError",
    "InferenceEngine",
    "add_config_arguments",
    "counters",
    "estimate",
    "export",
    "fuse",
    "inference",
    "init_distributed",
    "initialize",
    "linear_cross_entropy",
    "notebook",
    "optim",
    "profile",
    "utils",
    "view",
    "zero",
]

register_backend()
_parameters.install()
zero.init.around_init(_hf.loads_one_by_one)

_log = logging.getLogger("deepc")
if not _log.handlers:
    _handler = logging.StreamHandler(sys.stderr)
    _handler.setFormatter(logging.Formatter("deepc: %(message)s"))
    _log.addHandler(_handler)
    _log.setLevel(env.text("DEEPC_LOG_LEVEL"))
    _log.propagate = False
    patches.applied("logging")


@overload
def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: OptimizerLike | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: None = None,
    lr_scheduler: Schedule | None = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: ConfigSource | None = None,
    config_params: ConfigSource | None = None,
    *,
    device: torch.device | str | None = None,
    sample_batch: Any = None,
    loss_fn: Callable[..., Any] | None = None,
) -> tuple[Engine, ShardedOptimizer, None, Scheduler | None]: ...


@overload
def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: OptimizerLike | None = None,
    model_parameters: Iterable[Any] | None = None,
    *,
    training_data: torch.utils.data.Dataset[Any],
    lr_scheduler: Schedule | None = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: ConfigSource | None = None,
    config_params: ConfigSource | None = None,
    device: torch.device | str | None = None,
    sample_batch: Any = None,
    loss_fn: Callable[..., Any] | None = None,
) -> tuple[Engine, ShardedOptimizer, TimedLoader, Scheduler | None]: ...


@overload
def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: OptimizerLike | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Sequence[Any] | torch.utils.data.Dataset[Any] | None = None,
    lr_scheduler: Schedule | None = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: ConfigSource | None = None,
    config_params: ConfigSource | None = None,
    *,
    device: torch.device | str | None = None,
    sample_batch: Any = None,
    loss_fn: Callable[..., Any] | None = None,
) -> tuple[Engine, ShardedOptimizer, TimedLoader | None, Scheduler | None]: ...


def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: OptimizerLike | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Schedule | None = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: ConfigSource | None = None,
    config_params: ConfigSource | None = None,
    *,
    device: torch.device | str | None = None,
    sample_batch: Any = None,
    loss_fn: Callable[..., Any] | None = None,
) -> tuple[Engine, ShardedOptimizer, TimedLoader | None, Scheduler | None]:
    """Makes an engine of a model and a configuration. Collective over the ranks.

    model: torch.nn.Module; it is cast to the config's precision and its parameters move into deepc's flat memory.
    config: path of a DeepSpeed JSON, JSON text or a dict (also args.deepspeed_config). optimizer: a
    torch.optim.Optimizer over the model's parameters, a function that makes one from parameters, or None (the config's,
    else AdamW with DeepSpeed's defaults). model_parameters: parameters or param groups to train (default: all that
    require a gradient). lr_scheduler: an object with step(), a function of the optimizer, or None (the config's).
    training_data: a Dataset; collate_fn: for its DataLoader. sample_batch: one rank's micro-batch, passed as in
    model(*batch) or model(**batch); with it the peak memory is predicted, activations included (deepc.estimate),
    printed, and refused if the node has not so much left. loss_fn(output, batch): its loss, where the model's output is
    none.

    Returns (engine, optimizer, data loader or None, LR scheduler or None). Raises ConfigError for a wrong
    configuration, OutOfMemoryError before anything is allocated if the plan does not fit."""
    from .engine.engine import Engine

    return _initialize(
        Engine,
        args=args,
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        mpu=mpu,
        collate_fn=collate_fn,
        config=config if config is not None else config_params,
        device=device,
        sample_batch=sample_batch,
        loss_fn=loss_fn,
    )


_E = TypeVar("_E", bound="Engine")


def _initialize(
    kind: type[_E],
    *,
    args: Any,
    model: Any,
    optimizer: Any,
    model_parameters: Any,
    training_data: Any,
    lr_scheduler: Any,
    mpu: Any,
    collate_fn: Any,
    config: Any,
    device: Any = None,
    sample_batch: Any = None,
    loss_fn: Any = None,
) -> tuple[_E, ShardedOptimizer, TimedLoader | None, Scheduler | None]:
    """initialize, with the engine's class (deepc.compat has its own)."""
    import torch
    import torch.distributed as dist

    from .comm import start as comm
    from .config.tree import Config
    from .errors import ArgumentError, ConfigError, UnsupportedError

    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(f"initialize needs model=, a torch.nn.Module, got {type(model).__name__}")
    if mpu is not None:
        raise UnsupportedError("mpu= (Megatron model parallelism) does not exist in deepc yet; see docs/status.md")
    source = config
    if source is None and args is not None:
        source = getattr(args, "deepspeed_config", None)
    if source is None:
        raise ConfigError(
            "no configuration: pass config= (a DeepSpeed JSON path or dict), or args with deepspeed_config"
        )
    init_distributed()
    device = torch.device(device) if device is not None else comm.default_device()
    parsed = Config.load(source, world_size=dist.get_world_size(), device_type=device.type)
    parsed.require_resolved()
    if parsed.log_level:
        _log.setLevel(env.text("DEEPC_LOG_LEVEL", config=parsed.log_level.upper()))
    if device.type != "cpu":
        model.to(device)
    engine = kind(
        model,
        parsed,
        optimizer=optimizer,
        model_parameters=model_parameters,
        lr_scheduler=lr_scheduler,
        training_data=training_data,
        collate_fn=collate_fn,
        device=device,
        sample_batch=sample_batch,
        loss_fn=loss_fn,
    )
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


_LATER = {"EMA": ("engine.averages", "EMA"), "checkpoint": ("checkpoint", None), "notebook": ("notebook", None)}


def __getattr__(name: str) -> Any:
    """What is imported when it is asked for: name -> (module, its attribute)."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    where, what = _LATER[name]
    module = importlib.import_module(f".{where}", __name__)
    found = globals()[name] = module if what is None else getattr(module, what)
    return found


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds DeepSpeed's command-line arguments (--deepspeed, --deepspeed_config) to an argparse parser."""
    group = parser.add_argument_group("deepc", "configuration of deepc (DeepSpeed's argument names)")
    group.add_argument(
        "--deepspeed",
        default=False,
        action="store_true",
        help="accepted for compatibility; deepc is on when initialize is called",
    )
    group.add_argument("--deepspeed_config", default=None, type=str, help="path of the JSON configuration")
    return parser
