"""Which rank this process is where no launcher of torch's kind says so: Slurm's srun, OpenMPI, MPICH and its relatives.

Only the standard library and no import of deepc: rank.py loads this file by its path. Each reader turns what its
launcher sets into torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT); a
MASTER_ADDR or MASTER_PORT that the user has set stays.

Where the launcher tells no meeting point there is one rule: ranks of one host meet on 127.0.0.1, ranks of several on
the first host of the list (Slurm), else MASTER_ADDR must be given. The port is a function of the job, below the
kernel's range of outgoing ports.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Mapping

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

Reader = Callable[[Mapping[str, str]], "dict[str, str] | None"]


class PlaceError(Exception):
    """What the launcher set is incomplete or contradicts itself; the message says what to do."""


def expand(nodes: str) -> list[str]:
    """Slurm's host list: 'gpu[01-03,7],login' -> ['gpu01', 'gpu02', 'gpu03', 'gpu7', 'login']."""
    found: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        names = [""]
        for text, ranges in re.findall(r"([^\[]*)(?:\[([^\]]*)\])?", part):
            endings = [text]
            if ranges:
                endings = [text + number for item in ranges.split(",") for number in _numbers(item)]
            names = [name + ending for name in names for ending in endings]
        found += names
    return found


def _numbers(item: str) -> list[str]:
    """'01-03' -> 01, 02, 03, with the zeros kept."""
    first, dash, last = item.partition("-")
    if not dash:
        return [first]
    return [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]


def tasks_on(node: int, text: str) -> int:
    """Slurm's list of tasks per node: '4(x2),3' on node 2 -> 3."""
    for count, _, times in re.findall(r"(\d+)(\(x(\d+)\))?", text):
        node -= int(times or 1)
        if node < 0:
            return int(count)
    raise PlaceError(f"Slurm's tasks per node {text!r} end before this node")


def _port(*job: object) -> str:
    return str(12000 + zlib.crc32(":".join(map(str, (*job, os.getuid()))).encode()) % 18000)


def _slurm(env: Mapping[str, str]) -> dict[str, str] | None:
    """A task of `srun`. The shell of sbatch or salloc has SLURM_PROCID too, but no step: a program started there is one
    process."""
    if "SLURM_PROCID" not in env or "SLURM_STEP_ID" not in env:
        return None
    size = env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS", "1")
    node = int(env.get("SLURM_NODEID", "0"))
    on_node = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE")
    hosts = expand(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST") or env.get("SLURM_JOB_NODELIST", ""))
    local = size if len(hosts) < 2 else str(tasks_on(node, on_node)) if on_node else "1"
    return {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": size,
        "LOCAL_RANK": env.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": local,
        "MASTER_ADDR": "127.0.0.1" if len(hosts) < 2 else hosts[0],
        "MASTER_PORT": _port("slurm", env.get("SLURM_JOB_ID"), env["SLURM_STEP_ID"]),
    }


def _counted(names: tuple[str, str, str, str], job: str) -> Reader:
    """A launcher that sets rank, size, local rank and local size under these names. job: the variable that names the
    job, if there is one. Rank and size alone, as `srun --mpi=pmi2` sets them, leave the answer to Slurm's variables, if
    those speak of the same rank."""

    def read(env: Mapping[str, str]) -> dict[str, str] | None:
        if names[0] not in env or names[1] not in env:
            return None
        rank, size = env[names[0]], env[names[1]]
        local_rank, local = env.get(names[2]), env.get(names[3])
        if int(size) > 1 and (local_rank is None or local is None):
            slurm = _slurm(env)
            if slurm is not None and (slurm["RANK"], slurm["WORLD_SIZE"]) == (rank, size):
                return None
            raise PlaceError(
                f"{names[0]} and {names[1]} are set, {names[2] if local_rank is None else names[3]} is not: this"
                " launcher doesn't tell which ranks share a host. Set LOCAL_RANK and LOCAL_WORLD_SIZE for each rank,"
                " or start with `deepc run`"
            )
        found = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank or "0", "LOCAL_WORLD_SIZE": local or "1"}
        if found["LOCAL_WORLD_SIZE"] == size:
            found["MASTER_ADDR"] = "127.0.0.1"
            found["MASTER_PORT"] = _port(job, env.get(job) or os.getppid())
        return found

    return read


def _world(prefix: str) -> tuple[str, str, str, str]:
    return f"{prefix}RANK", f"{prefix}SIZE", f"{prefix}LOCAL_RANK", f"{prefix}LOCAL_SIZE"


_LAUNCHERS = {
    "OpenMPI": _counted(_world("OMPI_COMM_WORLD_"), "PMIX_NAMESPACE"),
    "MVAPICH": _counted(_world("MV2_COMM_WORLD_"), "PMI_KVSNAME"),
    "MPICH": _counted(("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), "PMI_KVSNAME"),  # also Intel MPI
    "Slurm": _slurm,  # last: of ranks that an MPI launcher starts inside an allocation its own are the right ones
}


def discover(env: Mapping[str, str]) -> tuple[str, dict[str, str]] | None:
    """(launcher, torchrun's variables) of this process, or None where no launcher set anything. Raises PlaceError."""
    for name, read in _LAUNCHERS.items():
        found = read(env)
        if found is None:
            continue
        found.update({v: env[v] for v in ("MASTER_ADDR", "MASTER_PORT") if v in env})
        if int(found["WORLD_SIZE"]) > 1 and "MASTER_ADDR" not in found:
            raise PlaceError(
                f"{name} started {found['WORLD_SIZE']} ranks on several hosts and names no meeting point: export"
                " MASTER_ADDR, the address of rank 0's host (mpirun -x MASTER_ADDR=host, mpiexec -genv MASTER_ADDR"
                " host), or start with `deepc run --hostfile FILE --launcher openmpi`"
            )
        if "MASTER_ADDR" in found and "MASTER_PORT" not in found:
            found["MASTER_PORT"] = "29500"
        return name, found
    return None
