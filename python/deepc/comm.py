"""Start-up of torch.distributed for deepc. Collectives themselves are torch.distributed's, on the backend "deepc"."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist

from .errors import ConfigError

DEFAULT_TIMEOUT = datetime.timedelta(minutes=30)


def init_distributed(dist_backend: str | None = None, *, timeout: datetime.timedelta = DEFAULT_TIMEOUT, init_method: str | None = None,
                     rank: int = -1, world_size: int = -1, **ignored) -> None:
    """Initialises torch.distributed unless it is. Under a launcher (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are set: torchrun, deepc run)
    with those ranks; else one process. dist_backend: default "deepc" (shared memory on CPU, NCCL beneath it on GPU)."""
    if dist.is_initialized():
        return
    from .backend import register_backend

    register_backend()
    backend = dist_backend or "deepc"
    if rank >= 0 or world_size > 0 or init_method is not None:
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timeout)
        return
    have = [v for v in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if v in os.environ]
    if len(have) == 4:
        dist.init_process_group(backend, init_method="env://", timeout=timeout)
    elif "RANK" in os.environ or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        missing = [v for v in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if v not in os.environ]
        raise ConfigError(f"some variables of a launcher are set ({', '.join(have)}) and {', '.join(missing)} are missing; start the script with "
                          "`deepc run` or `torchrun`, or unset them")
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def default_device() -> torch.device:
    """This rank's device: the GPU of its local rank if there are GPUs, else the CPU."""
    if torch.cuda.is_available():
        index = int(os.environ.get("LOCAL_RANK", "0"))
        if index >= torch.cuda.device_count():
            raise ConfigError(f"local rank {index} has no GPU: this machine shows {torch.cuda.device_count()}; start fewer ranks (--num_gpus)")
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    return torch.device("cpu")
