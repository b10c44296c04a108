"""Cores and memory nodes of ranks: which cores a rank gets, and giving them to the calling process.

Only the standard library and no import of deepc: rank.py loads this file by its path before anything else. The options
are DeepSpeed's: --bind_cores_to_rank shares out the physical cores, --bind_core_list says which ("0-3,8,10-12").

A rank's cores are a contiguous run of that list, which goes memory node by memory node, so a rank lies within one node
where that is possible. Its memory is then taken from that node first (not only: with a hard limit a rank is killed
while the other node has space left)."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

_SYS = "/sys/devices/system"
_MPOL_PREFERRED = 1
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # system call numbers; libnuma need not be there


def parse_cores(text: str) -> list[int]:
    """'1,3-5,7' -> [1, 3, 4, 5, 7]. Raises ValueError with the reason: ascending, without overlap, as in DeepSpeed."""
    cores: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"{part.strip()!r} is neither a core nor a range of cores such as 0-3")
        run = list(range(int(first), int(last if dash else first) + 1))
        if not run:
            raise ValueError(f"the range {part.strip()!r} ends before it begins")
        if cores and run[0] <= cores[-1]:
            raise ValueError(f"{part.strip()!r} is not above the cores before it")
        cores += run
    return cores


def _list(path: str) -> list[int]:
    """A list file of sysfs; empty where there is none."""
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return []
    return parse_cores(text) if text else []


def memory_nodes(sys: str = _SYS) -> dict[int, list[int]]:
    """Memory node -> its cores; empty where the kernel knows of none. Nodes without cores (HBM, CXL) are left out."""
    found = {}
    for entry in sorted(Path(sys, "node").glob("node[0-9]*"), key=lambda p: int(p.name[4:])):
        if cores := _list(str(entry / "cpulist")):
            found[int(entry.name[4:])] = cores
    return found


def physical_cores(allowed: set[int], sys: str = _SYS) -> list[int]:
    """One hardware thread of each core that this process may use, memory node by memory node."""
    nodes = memory_nodes(sys)
    node_of = {core: node for node, cores in nodes.items() for core in cores}
    kept, taken = [], set()
    for core in sorted(allowed, key=lambda c: (node_of.get(c, 0), c)):
        siblings = _list(f"{sys}/cpu/cpu{core}/topology/thread_siblings_list") or [core]
        first = min((s for s in siblings if s in allowed), default=core)
        if first not in taken:
            taken.add(first)
            kept.append(first)
    return kept


def cores_of(local_rank: int, local_ranks: int, core_list: str, allowed: set[int], sys: str = _SYS) -> list[int]:
    """The cores of one rank: equal contiguous shares of `core_list`, or of all physical cores if it is "all". Raises
    ValueError with the reason."""
    if core_list == "all":
        cores = physical_cores(allowed, sys)
    else:
        cores = parse_cores(core_list)
        if missing := [c for c in cores if c not in allowed]:
            raise ValueError(f"core {missing[0]} is not among the cores that this process may use ({compact(allowed)})")
    share = len(cores) // local_ranks
    if not share:
        have = f"{len(cores)} core{'s' if len(cores) != 1 else ''}"
        raise ValueError(f"{local_ranks} ranks can't be bound to {have}: each needs at least one")
    return cores[share * local_rank : share * (local_rank + 1)]


def compact(cores: set[int] | list[int]) -> str:
    """{0, 1, 2, 5} -> '0-2,5'."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and runs[-1][1] == core - 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def node_of(cores: list[int], sys: str = _SYS) -> int | None:
    """The memory node that has all of `cores`; None if there is only one node, or they lie on several."""
    nodes = memory_nodes(sys)
    if len(nodes) < 2:
        return None
    return next((node for node, its in nodes.items() if set(cores) <= set(its)), None)


def _prefer_memory_of(node: int) -> None:
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return
    words = (ctypes.c_ulong * (node // 64 + 1))()
    words[node // 64] = 1 << node % 64
    # Best effort: a container may forbid it.
    ctypes.CDLL(None).syscall(number, _MPOL_PREFERRED, words, 64 * len(words) + 1)


def bind(cores: list[int]) -> None:
    """Binds the calling process, and what it starts, to `cores` and the memory beside them."""
    os.sched_setaffinity(0, cores)
    node = node_of(cores)
    if node is not None:
        _prefer_memory_of(node)
