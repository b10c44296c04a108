"""deepc: DeepSpeed-class training for PyTorch with its core in plain C.

engine, optimizer, loader, scheduler = deepc.initialize(model=model, config="ds_config.json")
loss = engine(x); engine.backward(loss); engine.step()
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any, overload

from .core import env
from .core.foreign import patches
from .core.lib import VERSION, counters
from .core.telemetry import speak
from .errors import DeepcError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from . import checkpoint, offload, optim, zero  # noqa: F401
    from .comm.start import init_distributed
    from .compat.helpers import safe as utils
    from .engine.assembly import OptimizerLike
    from .engine.data import TimedLoader
    from .engine.engine import Engine
    from .engine.serve.export import export
    from .engine.serve.inference import InferenceEngine, inference
    from .engine.states.access import view
    from .engine.states.averages import EMA
    from .launch import notebook
    from .nn.dynamic import DynamicTensor
    from .nn.fuse import fuse
    from .nn.loss import linear_cross_entropy
    from .observe import profile
    from .optim.schedules import Scheduler
    from .parallel.tensor.rules import tp_model_init
    from .plan.predict.estimate import estimate
    from .zero.step.update import ShardedOptimizer

    ConfigSource = str | os.PathLike[str] | dict[str, Any]
    Schedule = Scheduler | torch.optim.lr_scheduler.LRScheduler | Callable[[torch.optim.Optimizer], Any]

__version__ = VERSION
__all__ = [
    "EMA",
    "DeepcError",
    "DynamicTensor",
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
    "offload",
    "optim",
    "profile",
    "tp_model_init",
    "utils",
    "view",
    "zero",
]

_log = speak.set_up()
_is_complete = False


def complete() -> None:
    """Imports what needs torch, and registers it there: the backend, operators, parameters. `import deepc` does this,
    but in the process of the command `deepc`, which does it when it has understood what is asked."""
    global _is_complete
    if _is_complete:
        return
    _is_complete = True
    if env.switch("DEEPC_HUGEPAGES"):
        # torch maps and unmaps its large activations every step; on 4 KiB pages a quarter of a CPU step is page faults.
        # torch has a switch for huge pages and reads it at its first CPU allocation. A value that the user set stays.
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        patches.applied("thp")

    from . import optim, zero
    from .comm.c10d.backend import register_backend
    from .comm.internode import onebit  # noqa: F401  which connects itself to optim
    from .comm.start import init_distributed
    from .compat import hf
    from .compat.runtime import parameters
    from .core import ops
    from .nn.loss import linear_cross_entropy  # which registers operators
    from .zero.parameters.around import around_init

    register_backend()
    parameters.install()
    around_init(hf.loads_one_by_one)
    globals().update(
        init_distributed=init_distributed, linear_cross_entropy=linear_cross_entropy, ops=ops, optim=optim, zero=zero
    )


def _is_the_command() -> bool:
    """Whether this is the process of `deepc` or `python -m deepc`. Not one that multiprocessing starts for it, whose
    sys.argv is the same: what the system was given tells."""
    name, given = sys.argv[0] if sys.argv else "", sys.orig_argv
    if name == "-m":  # while Python looks for the package that it is to run
        return "-m" in given and given[given.index("-m") + 1 :][:1] == [__name__]
    return os.path.basename(name) == "deepc" and name in given


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
    none. distributed_port: of the meeting of ranks that mpirun or srun started. dist_init_required: False says that
    torch.distributed is initialised already; else it is made so if it is not. mpu: Megatron-LM's, of
    a model whose layers it has cut, or that deepc is to cut over its ranks (parallel/mpu.py).

    Returns (engine, optimizer, data loader or None, LR scheduler or None). Raises ConfigError for a wrong
    configuration, OutOfMemoryError before anything is allocated if the plan does not fit."""
    from . import observe
    from .engine import assembly
    from .engine.engine import Engine
    from .engine.pipelined import PipelineEngine

    return assembly.initialize(
        Engine,
        PipelineEngine,
        watchers=(observe.watch,),
        args=args,
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        distributed_port=distributed_port,
        mpu=mpu,
        dist_init_required=dist_init_required,
        collate_fn=collate_fn,
        config=config if config is not None else config_params,
        device=device,
        sample_batch=sample_batch,
        loss_fn=loss_fn,
    )


_LATER = {
    "DynamicTensor": ("nn.dynamic", "DynamicTensor"),
    "EMA": ("engine.states.averages", "EMA"),
    "InferenceEngine": ("engine.serve.inference", "InferenceEngine"),
    "checkpoint": ("checkpoint", None),
    "estimate": ("parallel.simulate.onpaper", "estimate"),
    "export": ("engine.serve.export", "export"),
    "fuse": ("nn.fuse", "fuse"),
    "inference": ("engine.serve.inference", "inference"),
    "notebook": ("notebook", None),
    "offload": ("offload", None),
    "profile": ("observe.profile", None),
    "tp_model_init": ("parallel.tensor.rules", "tp_model_init"),
    "utils": ("compat.helpers.safe", None),
    "view": ("engine.states.access", "view"),
}
# Modules by their own names; `import deepc` alone is enough for them.
_FACES = ("compress", "ddp_hooks", "fsdp", "lr_schedules", "memory", "monitor", "pipe", "precision", "report")


def __getattr__(name: str) -> Any:
    """What is imported when it is asked for: name -> (module, its attribute)."""
    if not _is_complete and not name.startswith("_"):
        complete()
        if name in globals():
            return globals()[name]
    if name not in _LATER and name not in _FACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    where, what = _LATER.get(name, (name, None))
    module = importlib.import_module(f".{where}", __name__)
    found = globals()[name] = module if what is None else getattr(module, what)
    return found


def __dir__() -> list[str]:
    """What is meant to be used, also what is not imported yet."""
    return sorted({*__all__, *_LATER, *_FACES, "__version__"})


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


if not _is_the_command():
    complete()
