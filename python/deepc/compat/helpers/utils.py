"""deepspeed.utils and deepspeed.runtime.utils: logging, data loading and small helpers that scripts import."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, cast

import torch
import torch.distributed as dist

from ...errors import ArgumentError, UnsupportedError
from ...parallel.pipeline.balance import cut
from ...parallel.sequence.shards import each_tensor

logger = logging.getLogger("deepc")
"""deepc's logger under DeepSpeed's name. Trainer sets its level to its own."""


# ---- logging ---------------------------------------------------------------------------------------------------------
def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def _speaks(ranks: Sequence[int] | None) -> bool:
    return not ranks or -1 in ranks or _rank() in ranks


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Logs on the given ranks only; on all with None, [] or [-1]."""
    if _speaks(ranks):
        logger.log(level, "[Rank %s] %s", _rank(), message)


@functools.lru_cache(None)
def _once(message: str, ranks: tuple[int, ...], level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    _once(message, tuple(ranks or ()), level)


@functools.lru_cache(None)
def warning_once(message: str) -> None:
    logger.warning(message)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    if _speaks(ranks):
        print(f"[Rank {_rank()}] {message}", flush=True)


def print_json_dist(message: dict[str, Any], ranks: Sequence[int] | None = None, path: str | None = None) -> None:
    """Writes `message` as JSON to `path` on the given ranks."""
    if _speaks(ranks) and path is not None:
        with open(path, "w") as f:
            json.dump({**message, "rank": _rank()}, f)


LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


def get_log_level_from_string(log_level_str: str) -> int:
    level = LEVELS.get(log_level_str.lower())
    if level is None:
        raise ArgumentError(f"{log_level_str!r} is not a log level; one of {', '.join(LEVELS)}")
    return level


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    (custom_logger or logger).setLevel(get_log_level_from_string(log_level_str))


def get_current_level() -> int:
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    return get_current_level() <= get_log_level_from_string(max_log_level_str)


def instrument_w_nvtx(func: Callable[..., Any]) -> Callable[..., Any]:
    """Marks `func` as a range for torch's profilers."""

    @functools.wraps(func)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(func.__qualname__):
            return func(*args, **kwargs)

    return wrapped


# ---- modules ---------------------------------------------------------------------------------------------------------
def recursive_getattr(model: Any, module_name: str) -> Any:
    return functools.reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    *path, last = module_name.split(".")
    setattr(functools.reduce(getattr, path, model), last, module)


def z3_leaf_module(model: torch.nn.Module) -> bool:
    return getattr(model, "_z3_leaf", False)


def z3_leaf_parameter(param: torch.nn.Parameter) -> bool:
    return getattr(param, "ds_z3_leaf_module", None) is not None


def get_z3_leaf_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [m for m in model.modules() if z3_leaf_module(m)]


def set_z3_leaf_module(model: torch.nn.Module, flag: bool) -> None:
    model._z3_leaf = flag  # type: ignore[assignment]  # torch declares modules and tensors alone


def _mark(modules: Iterable[torch.nn.Module], flag: bool) -> list[torch.nn.Module]:
    found = list(modules)
    for m in found:
        set_z3_leaf_module(m, flag)
    return found


def _of_class(module: torch.nn.Module, classes: Sequence[type | str]) -> bool:
    kind = type(module)
    return any(
        isinstance(module, c) if isinstance(c, type) else c in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
        for c in classes
    )


def _leaves(
    model: torch.nn.Module, classes: Sequence[type | str], flag: bool, raise_if_not_found: bool
) -> list[torch.nn.Module]:
    found = _mark((m for m in model.modules() if _of_class(m, classes)), flag)
    if not found and raise_if_not_found:
        raise ArgumentError(f"no modules of type {list(classes)} found in {type(model).__name__}")
    return found


def set_z3_leaf_modules(
    model: torch.nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[torch.nn.Module]:
    """Marks modules of these classes, as DeepSpeed does, and returns them. deepc needs no marks: parameters lie in
    shared memory, or are gathered where they are used, whichever experts a rank runs."""
    return _leaves(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: torch.nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[torch.nn.Module]:
    return _leaves(model, leaf_module_classes, False, raise_if_not_found)


def _missing(missing: list[str], raise_if_not_found: bool, model: torch.nn.Module) -> None:
    if missing and raise_if_not_found:
        raise ArgumentError(f"no modules {missing} found in {type(model).__name__}")


def set_z3_leaf_modules_by_name(
    model: torch.nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[torch.nn.Module], list[str]]:
    by_name = dict(model.named_modules())
    missing = [n for n in module_names if n not in by_name]
    _missing(missing, raise_if_not_found, model)
    return _mark((by_name[n] for n in module_names if n in by_name), flag), missing


def set_z3_leaf_modules_by_suffix(
    model: torch.nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[torch.nn.Module], list[str]]:
    names = dict(model.named_modules())
    missing = [s for s in module_name_suffixes if not any(n.endswith(s) for n in names)]
    _missing(missing, raise_if_not_found, model)
    return _mark((m for n, m in names.items() if any(n.endswith(s) for s in module_name_suffixes)), flag), missing


class OnDevice:
    """Context that builds modules on a device in a dtype: deepspeed.OnDevice(dtype=torch.float16, device="meta")."""

    def __init__(self, dtype: torch.dtype | None, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, device, enabled

    def __enter__(self) -> None:
        if not self.enabled:
            return
        self._before = torch.get_default_dtype()
        self._device = torch.device(self.device)
        self._device.__enter__()
        if self.dtype is not None and self.dtype.is_floating_point:
            torch.set_default_dtype(self.dtype)

    def __exit__(self, *exc: Any) -> None:
        if self.enabled:
            torch.set_default_dtype(self._before)
            self._device.__exit__(*exc)


# ---- data ------------------------------------------------------------------------------------------------------------
class RepeatingLoader:
    """Wraps an iterable so that it starts again when it ends."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(cast(Sized, self.loader))

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


def DeepSpeedDataLoader(
    dataset: Any,
    batch_size: int,
    pin_memory: bool = False,
    local_rank: int = 0,
    tput_timer: Any = None,
    collate_fn: Callable[..., Any] | None = None,
    num_local_io_workers: int | None = None,
    data_sampler: Any = None,
    data_parallel_world_size: int | None = None,
    data_parallel_rank: int | None = None,
    dataloader_drop_last: bool = False,
    deepspeed_dataloader_config: dict[str, Any] | None = None,
) -> Any:
    """A torch DataLoader over this rank's part of the data: shuffled by a DistributedSampler unless `data_sampler` is
    given."""
    world = (
        dist.get_world_size()
        if data_parallel_world_size is None and dist.is_initialized()
        else data_parallel_world_size or 1
    )
    rank = _rank() if data_parallel_rank is None else data_parallel_rank
    iterable = isinstance(dataset, torch.utils.data.IterableDataset)
    if data_sampler is None and not iterable:
        data_sampler = (
            torch.utils.data.DistributedSampler(dataset, num_replicas=world, rank=rank)
            if world > 1
            else torch.utils.data.RandomSampler(dataset)
        )
    return torch.utils.data.DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=data_sampler,
        collate_fn=collate_fn,
        num_workers=num_local_io_workers or 0,
        pin_memory=pin_memory and torch.cuda.is_available(),
        drop_last=dataloader_drop_last,
    )


# ---- tensors and memory ----------------------------------------------------------------------------------------------
def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """`item` (a tensor, or lists, tuples and dicts of them) with every tensor copied to `device`."""
    device = torch.device(device)
    if isinstance(item, dict):
        return type(item)({k: clone_tensors_for_torch_save(v, device) for k, v in item.items()})
    return each_tensor(item, lambda t: t.detach().clone() if t.device == device else t.detach().to(device))


def move_to_device(item: Any, device: Any, criterion_func: Callable[[torch.Tensor], bool] | None = None) -> Any:
    return each_tensor(item, lambda t: t.to(device) if criterion_func is None or criterion_func(t) else t)


def copy_to_device(item: Any, device: Any, criterion_func: Callable[[torch.Tensor], bool]) -> Any:
    return each_tensor(item, lambda t: t.detach().clone().to(device) if criterion_func(t) else t)


def see_memory_usage(message: str, force: bool = False) -> None:
    """With force: prints, on rank 0, this process's memory and the machine's."""
    if not force or _rank() != 0:
        return
    from ...core import memory

    now = memory.process_bytes()
    print(
        f"{message}\nrss {now['rss_bytes'] / 2**30:.2f} GB, pss {now['pss_bytes'] / 2**30:.2f} GB, peak rss"
        f" {now['peak_rss_bytes'] / 2**30:.2f} GB, {memory.available() / 2**30:.2f} GB left",
        flush=True,
    )


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    if print_rank in (-1, _rank()):
        print(f"RANK={_rank()} MEMSTATS", end=" ")
        see_memory_usage(msg, force=_rank() == 0)


def empty_cache() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def set_random_seed(seed: int) -> None:
    import numpy

    numpy.random.seed(seed)
    random.seed(seed)
    torch.manual_seed(seed)


def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2, mpu: Any = None) -> torch.Tensor:
    """torch's clip_grad_norm_ of `.grad`s. An engine clips by itself (gradient_clipping)."""
    if mpu is not None:
        raise UnsupportedError(
            "clip_grad_norm_(mpu=...) does not exist in deepc; an engine clips by itself (gradient_clipping), over all"
            " ranks that share the model"
        )
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def ensure_directory_exists(filename: str) -> None:
    os.makedirs(os.path.dirname(filename) or ".", exist_ok=True)


def is_model_parallel_parameter(p: torch.Tensor) -> bool:
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def get_inactive_params(param_list: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Stage-3 parameters whose values are not on this rank now."""
    from ...zero.parameters.gathered import is_zero_param
    from ..runtime.parameters import ZeroParamStatus, describe

    return [p for p in param_list if is_zero_param(p) and describe(p, "ds_status") == ZeroParamStatus.NOT_AVAILABLE]


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """ "name(arg, key=value)"."""
    return f"{base}({', '.join([*map(repr, args), *(f'{k}={v!r}' for k, v in kwargs.items())])})"


def noop_decorator(func: Callable[..., Any]) -> Callable[..., Any]:
    return func


noop_context = contextlib.nullcontext


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Bounds of `num_parts` parts of nearly equal length: num_parts + 1 indices."""
    if num_items <= num_parts:
        return [min(p, num_items) for p in range(num_parts + 1)]
    small, more = divmod(num_items, num_parts)
    bounds = [0]
    for part in range(num_parts):
        bounds.append(bounds[-1] + small + (part < more))
    return bounds


def partition_balanced(weights: Sequence[int], num_parts: int) -> list[int]:
    """Bounds of `num_parts` contiguous parts, as a PipelineModule's layers are cut: the heaviest is as light as
    possible, and none is empty where there are more weights than parts."""
    if len(weights) <= num_parts:
        return partition_uniform(len(weights), num_parts)
    return cut([float(w) for w in weights], num_parts)  # numpy's numbers are narrower
