"""deepspeed.comm: torch.distributed's functions by the same names, with the few that DeepSpeed adds.

Without a process group get_rank() is the launcher's RANK and get_world_size() its WORLD_SIZE, as integrations that ask
early expect.
"""

from __future__ import annotations

import datetime
import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import *  # noqa: F403
from torch.distributed import ReduceOp

from ...comm import start as _own
from ...comm.start import (  # noqa: F401  # some are here for who imports this
    configure,
    get_comm_operation_count,
    get_logged_comm_ops,
    has_comm_data,
    log_summary,
    reset_log,
)
from ...errors import ConfigError, MisuseError
from .values import TORCH_DISTRIBUTED_DEFAULT_PORT

logger = logging.getLogger("deepc")


def __getattr__(name: str) -> Any:
    return getattr(dist, name)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    verbose: bool = True,
    timeout: datetime.timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Initialises torch.distributed unless it is: with the launcher's ranks, else those of MPI (OMPI_*, PMI_*) or
    Slurm, else one process. dist_backend: None, "nccl" and "ccl" mean deepc's backend (shared memory on CPU, NCCL
    beneath it on GPUs); others are torch's. distributed_port: where ranks of MPI or Slurm meet, unless MASTER_PORT says
    so; the default: a port of the job's own. auto_mpi_discovery: without effect, those ranks are known as they are.
    """
    if config is not None:
        configure(config)
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise MisuseError(
            "init_distributed(dist_init_required=False): there is no process group yet. Call"
            " torch.distributed.init_process_group first, or leave the argument out"
        )
    if "RANK" not in os.environ and distributed_port != TORCH_DISTRIBUTED_DEFAULT_PORT:
        os.environ.setdefault("MASTER_PORT", str(distributed_port))  # where ranks of MPI or Slurm meet
    backend = None if dist_backend in (None, "nccl", "ccl", "deepc") else dist_backend
    _own.init_distributed(
        backend, timeout=timeout or _timeout(), init_method=init_method, rank=rank, world_size=world_size
    )


def _timeout() -> datetime.timedelta:
    if not (minutes := os.environ.get("DEEPSPEED_TIMEOUT")):
        return _own.DEFAULT_TIMEOUT
    try:
        if (given := datetime.timedelta(minutes=float(minutes))) > datetime.timedelta():
            return given
    except (ValueError, OverflowError):  # no number; one of more days than there are
        pass
    raise ConfigError(f"DEEPSPEED_TIMEOUT={minutes!r} must be a number of minutes above 0; set it so, or unset it")


def is_available() -> bool:  # type: ignore[no-redef]  # over torch's
    return dist.is_available()


def is_initialized() -> bool:  # type: ignore[no-redef]  # over torch's
    return dist.is_initialized()


def get_rank(group: Any = None) -> int:  # type: ignore[no-redef]  # over torch's
    return dist.get_rank(group) if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def get_world_size(group: Any = None) -> int:  # type: ignore[no-redef]  # over torch's
    return dist.get_world_size(group) if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def get_local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", str(get_rank())))


def get_world_group() -> Any:
    return dist.group.WORLD


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:  # type: ignore[no-redef]  # over torch's
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    return dist.get_process_group_ranks(dist.group.WORLD if group is None else group)


def new_group(ranks: Sequence[int] | None = None, **kwargs: Any) -> Any:  # type: ignore[no-redef]  # over torch's
    return dist.new_group(ranks, **kwargs)


def inference_all_reduce(tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None) -> Any:
    return dist.all_reduce(tensor, op, group)


def has_all_gather_into_tensor() -> bool:
    return True


def has_reduce_scatter_tensor() -> bool:
    return True


def has_all_reduce_coalesced() -> bool:
    return hasattr(dist, "all_reduce_coalesced")


def has_coalescing_manager() -> bool:
    return hasattr(dist.distributed_c10d, "_coalescing_manager")


def allgather_fn(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
    debug: Any = None,
) -> Any:
    return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


def reduce_scatter_fn(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    prof: bool = False,
    debug: Any = None,
) -> Any:
    return dist.reduce_scatter_tensor(output_tensor, tensor, op, group, async_op)
