"""Start-up of torch.distributed for deepc. Collectives themselves are torch.distributed's, on the backend "deepc"."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import importlib.util
import logging
import os
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ConfigError
from .calls import logger
from .place import refuse_few_descriptors

DEFAULT_TIMEOUT = datetime.timedelta(minutes=30)


def init_distributed(
    dist_backend: str | None = None,
    *,
    timeout: datetime.timedelta = DEFAULT_TIMEOUT,
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
    distributed_port: int | None = None,
) -> None:
    """Initialises torch.distributed unless it is. Under a launcher (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are set:
    torchrun, deepc run; or what srun and mpirun set) with those ranks; else one process. dist_backend: default "deepc"
    (shared memory on CPU, NCCL beneath it on GPU). distributed_port: where ranks that mpirun or srun started meet;
    ConfigError if MASTER_PORT, which a launcher sets, names another.
    """
    if not dist.is_initialized():
        _take_port(distributed_port)
    _adopt_place()
    if dist.is_initialized():
        return
    from .c10d.backend import register_backend

    register_backend()
    backend = dist_backend or "deepc"
    if rank >= 0 or world_size > 0 or init_method is not None:
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timeout)
        return
    have = [v for v in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if v in os.environ]
    if len(have) == 4:
        here = os.environ.get("LOCAL_WORLD_SIZE", "")
        refuse_few_descriptors(int(here) if here.isdecimal() else 1)
        with _saying_who_is_waited_for(*_place()):
            dist.init_process_group(backend, init_method="env://", timeout=timeout)
    elif "RANK" in os.environ or _number("WORLD_SIZE", os.environ.get("WORLD_SIZE") or "1") > 1:
        missing = [v for v in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if v not in os.environ]
        raise ConfigError(
            f"some variables of a launcher are set ({', '.join(have)}) and {', '.join(missing)} are missing; start the"
            " script with `deepc run` or `torchrun`, or unset them"
        )
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        atexit.register(_end_alone)


def _end_alone() -> None:
    """The process ends: without this NCCL warns of a group that nobody has ended."""
    if dist.is_initialized() and dist.get_world_size() == 1:
        dist.destroy_process_group()


def _take_port(port: int | None) -> None:
    """MASTER_PORT is `port`, if one is asked for."""
    if port is None:
        return
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
        raise ConfigError(f"distributed_port={port!r}: it is a port number, 1 to 65535")
    if os.environ.setdefault("MASTER_PORT", str(port)) != str(port):
        raise ConfigError(
            f"distributed_port={port}, and the launcher has set MASTER_PORT={os.environ['MASTER_PORT']}, where the"
            " other ranks will be; leave distributed_port out, or start the ranks with that port"
        )


def _number(name: str, text: str) -> int:
    if not text.strip().isdecimal():
        raise ConfigError(f"{name}={text!r}: a launcher sets it to a whole number")
    return int(text)


def _place() -> tuple[int, int]:
    """(RANK, WORLD_SIZE). Raises ConfigError unless they are numbers of a job, and MASTER_PORT one."""
    rank, world, _ = (_number(name, os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if rank >= world:
        raise ConfigError(f"RANK={rank} and WORLD_SIZE={world}: ranks are numbered from 0 to WORLD_SIZE - 1")
    return rank, world


_PATIENCE_S = 10.0
_ATTENDANCE_S = 0.5


@contextlib.contextmanager
def _saying_who_is_waited_for(rank: int, world: int) -> Iterator[None]:
    """Ranks meet at MASTER_ADDR:MASTER_PORT. If they have not after some seconds, each that is there says who is not: a
    rank that was started by hand and one whose peer has failed look alike."""
    met = threading.Event()
    if world > 1:
        threading.Thread(target=_watch_the_door, args=(rank, world, met), daemon=True, name="deepc-start").start()
    try:
        yield
    finally:
        met.set()


def _watch_the_door(rank: int, world: int, met: threading.Event) -> None:
    """Beside a wait in the store of the meeting, whose own wait knows only how many have come: each rank that waits
    longer than a start takes writes its number there over a connection of this thread's, and reads who else has."""
    if met.wait(min(_ATTENDANCE_S, _PATIENCE_S / 2)):
        return
    began, store = time.monotonic(), None
    with contextlib.suppress(Exception):  # nobody may have opened it yet, or will
        store = _open_attendance()
        store.set(_seat(rank), "here")
    if met.wait(max(0.0, _PATIENCE_S - _ATTENDANCE_S - (time.monotonic() - began))):
        return
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} (MASTER_ADDR:MASTER_PORT)"
    missing = _missing(store, rank, world)
    if met.wait(min(_ATTENDANCE_S, _PATIENCE_S / 2)):
        return
    if store is None:
        missing, where = "rank 0", f"{where}, which rank 0 has to open and has not"
    elif missing is not None and (again := _missing(store, rank, world)) is not None:
        missing = again  # who came in the last moment has had the time to say so
    who = missing or (f"rank {1 - rank}" if world == 2 else f"the other {world - 1} ranks")
    logging.getLogger("deepc").warning(f"rank {rank} of {world} has waited {_PATIENCE_S:g} s for {who} at {where}")


def _open_attendance() -> dist.Store:
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        None,
        False,
        timeout=datetime.timedelta(seconds=max(1.0, _PATIENCE_S / 2)),
        wait_for_workers=False,
    )


def _seat(rank: int) -> str:
    """Of a rank in the store: of this start, where a launcher restarts a job beside the same store."""
    return f"deepc/start/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{rank}"


def _missing(store: dist.Store | None, rank: int, world: int) -> str | None:
    """Who has not come, in words; None where nobody can tell, or all have and something else takes long."""
    if store is None:
        return None
    with contextlib.suppress(Exception):
        gone = [r for r in range(world) if r != rank and not store.check([_seat(r)])]
        return _ranks(gone) if gone else None
    return None


def _ranks(numbers: list[int]) -> str:
    """ "rank 3", "ranks 1, 3 to 6 and 9"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    parts = []
    for run in runs:
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else [str(n) for n in run]
    if len(numbers) == 1:
        return f"rank {parts[0]}"
    return f"ranks {', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else f"ranks {parts[0]}"


def _adopt_place() -> None:
    """Under srun or mpirun: torchrun's variables from theirs, LOCAL_RANK among them. Raises ConfigError if they don't
    suffice."""
    if "RANK" in os.environ:
        return
    places = _launchers_places()
    try:
        found = places.discover(os.environ)
    except places.PlaceError as exc:
        raise ConfigError(str(exc)) from None
    if found is not None and found[1]["WORLD_SIZE"] != "1":
        os.environ.update(found[1])


def _launchers_places() -> types.ModuleType:
    """launch/host/places.py, by its path as the launcher's own ranks load it: a plain file that belongs to no room."""
    path = Path(__file__).parents[1] / "launch/host/places.py"
    spec = importlib.util.spec_from_file_location("_deepc_launch_places", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} can't be loaded; reinstall deepc-torch, or set RANK and WORLD_SIZE")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def empty_registered(
    *size: int, dtype: torch.dtype | None = None, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """A CPU tensor of this rank's own, in memory that the ranks of `group` (default: all) share: the group's large
    collectives read and write it where it lies, which saves a copy of every byte. Zeroed. Collective: every rank of the
    group asks for the same size and dtype.

    Raises UnsupportedError if the group is not of the backend "deepc", or spans nodes; DeepcError, on all ranks, if it
    has 64 of them. The memory goes when the last tensor on it does.
    """
    from ..errors import UnsupportedError

    group = dist.group.WORLD if group is None else group
    comm = getattr(group, "node_comm", None)
    if comm is None:
        raise UnsupportedError(
            "registered buffers need a group of the backend 'deepc' whose ranks are all on one node; this one is"
            f" {type(group).__name__} or spans nodes"
        )
    if len(size) == 1 and not isinstance(size[0], int):
        size = tuple(size[0])
    dtype = torch.get_default_dtype() if dtype is None else dtype
    registered: torch.Tensor = comm.registered(torch.Size(size).numel(), dtype)
    return registered.view(size)


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> Any:
    """Prints, on rank 0, what the comms logger has seen there: per operation and message size the calls, latency and
    bandwidth, in DeepSpeed's form (calls.py has the units). Logging is on with the config section comms_logger
    {enabled: true}, or configure(). show_straggler: also how long the rank waited for the slowest one. return_dict:
    every rank gets its own tables. Collective over all ranks."""
    if dist.is_initialized():
        dist.barrier()
    out = logger.log_all(not dist.is_initialized() or dist.get_rank() == 0, show_straggler, return_dict)
    if dist.is_initialized():
        dist.barrier()
    return out


def reset_log() -> None:
    """Forgets what the comms logger of this rank has seen, for figures of one epoch or interval."""
    logger.reset()


def has_comm_data() -> bool:
    """Whether the comms logger of this rank has seen a call."""
    return bool(logger.summary())


def get_comm_operation_count() -> int:
    """How many calls the comms logger of this rank has seen."""
    return sum(v["count"] for sizes in logger.summary().values() for v in sizes.values())


def get_logged_comm_ops() -> list[str]:
    """The names of the operations that the comms logger of this rank has seen."""
    return list(logger.summary())


def configure(
    deepspeed_config: Any = None,
    *,
    enabled: bool | None = None,
    prof_all: bool = True,
    prof_ops: Any = None,
    verbose: bool = False,
    debug: bool = False,
) -> None:
    """Starts or stops the comms logger without an engine. deepspeed_config: a configuration (path, JSON text or dict),
    whose section comms_logger is taken; the other arguments are that section's keys."""
    if deepspeed_config is not None:
        from ..config.tree import Config

        log = Config.load(
            deepspeed_config, world_size=dist.get_world_size() if dist.is_initialized() else 1, allow_auto=True
        ).comms_logger
        logger.configure(log.enabled, log.prof_all, log.prof_ops, log.verbose, log.debug)
    else:
        logger.configure(logger.enabled if enabled is None else enabled, prof_all, prof_ops, verbose, debug)


def default_device() -> torch.device:
    """This rank's device: the GPU of its local rank if there are GPUs, else the CPU. Without LOCAL_RANK the one that
    the script has chosen (torch.cuda.set_device); the only one, where each rank sees its own."""
    if torch.cuda.is_available():
        index = int(os.environ.get("LOCAL_RANK", torch.cuda.current_device()))
        if torch.cuda.device_count() == 1 and "," not in os.environ.get("CUDA_VISIBLE_DEVICES", ","):
            index = 0
        if index >= torch.cuda.device_count():
            raise ConfigError(
                f"local rank {index} has no GPU: this machine shows {torch.cuda.device_count()}; start fewer ranks"
                " (--num_gpus)"
            )
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    return torch.device("cpu")
