"""Where ranks lie: which of them share a node, how many a node has, and who leads. One discovery, through the store of
whoever opens a group, for the engine's groups, the process group and its hierarchy."""

from __future__ import annotations

import json
import os
import resource
import select
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..core import env
from ..core.files import boot_id
from ..errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    import torch.distributed as dist

LATE_S = 10.0  # until a rank that waits for others says so
_LOOK_S = 0.05


def refuse_few_descriptors(ranks: int) -> None:
    """ConfigError where a process may open too few files to be one of `ranks` ranks of this node. Without this, what
    fails first says nothing of it: a hang in torch's store, or an abort."""
    # Two for each rank; 9 of Python, torch's store and the sockets; the rest while modules are imported (measured).
    need, (limit, _) = 18 + 2 * ranks, resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < need:
        raise ConfigError(
            f"ulimit -n is {limit}, and one of {ranks} rank{'s' * (ranks > 1)} on a node needs {need} open files and"
            " more for what the script opens; raise it (ulimit -n 1024)"
        )


def node_id() -> str:
    """Names this node: DEEPC_NODE_ID if set, else boot id and network namespace (two namespaces of one machine are two
    nodes, because ranks meet over abstract Unix sockets, which belong to a namespace)."""
    given = env.text("DEEPC_NODE_ID")
    if given:
        return given
    try:
        return f"{boot_id()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError as exc:
        raise UnsupportedError(
            f"can't tell which node this is ({exc}); set DEEPC_NODE_ID to one name per machine"
        ) from exc


class Topology:
    """Which ranks share a node. Nodes are numbered in the order of their first ranks; the ranks of a node in rank
    order. Pure data."""

    def __init__(self, ids: Sequence[str]) -> None:
        """ids: the node's name per rank."""
        found: dict[str, list[int]] = {}
        for rank, name in enumerate(ids):
            found.setdefault(name, []).append(rank)
        self.names = tuple(found)
        self.nodes = tuple(tuple(ranks) for ranks in found.values())
        self.size, self.count = len(ids), len(found)
        self.node_of, self.local_of = [0] * self.size, [0] * self.size
        for n, ranks in enumerate(self.nodes):
            for local, rank in enumerate(ranks):
                self.node_of[rank], self.local_of[rank] = n, local
        self.leaders = min(len(ranks) for ranks in self.nodes)  # local ranks below it talk to other nodes
        self.most = max(len(ranks) for ranks in self.nodes)

    @property
    def even(self) -> bool:
        """Every node has as many ranks as any other."""
        return self.leaders == self.most

    def others(self, *but: int) -> tuple[int, ...]:
        """The nodes besides these."""
        return tuple(n for n in range(self.count) if n not in but)


class Process(NamedTuple):
    """What a rank tells of itself."""

    node: str
    host: str
    pid: int
    pid_namespace: int  # 0: unknown


class Places:
    """All ranks of a group, as `discover` found them."""

    def __init__(self, processes: Sequence[Process]) -> None:
        self.processes = list(processes)
        self.topology = Topology([p.node for p in processes])

    def in_words(self, rank: int, name: int) -> str:
        """A rank in messages. name: what users call it, its rank in the default group."""
        p = self.processes[rank]
        return f"rank {name} (pid {p.pid} on {p.host}, node {self.topology.node_of[rank]})"

    def of(self, ranks: Sequence[int]) -> Places:
        """Those of a part of the ranks, numbered as they are given."""
        return Places([self.processes[r] for r in ranks])

    def pids(self, rank: int) -> list[int]:
        """The ranks' processes as `rank` numbers them; 0: on another node, or not seen from its pid namespace."""
        mine = self.processes[rank]
        return [p.pid if p.node == mine.node and p.pid_namespace == mine.pid_namespace else 0 for p in self.processes]

    def neighbours(self, rank: int) -> list[int]:
        """Pids of the other ranks of its node, as far as `rank` can see processes of their names."""
        return [pid for r, pid in enumerate(self.pids(rank)) if pid and r != rank]


def ended(pid: int) -> bool:
    """Whether this process of our pid namespace has ended, be it waited for by its parent or not."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except (OSError, AttributeError):  # no descriptor is left, or a Python without: not known to have ended
        return False
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(fd)


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def discover(
    store: dist.Store, rank: int, size: int, watch: Callable[[int], None] | None = None, what: str = "a group"
) -> Places:
    """Tells `store`, which is the group's own, where this rank is, and reads where the others are. Collective: waits
    for all, as long as the store does. watch: called with a missing rank a few times a second; raises if that will
    never come. what: the group, for the line that names who is missing after LATE_S."""
    store.set(f"place{rank}", json.dumps(Process(node_id(), socket.gethostname(), os.getpid(), _pid_namespace())))
    if watch is not None:
        await_keys(store, rank, {r: f"place{r}" for r in range(size) if r != rank}, watch, what)
    return Places([Process(*json.loads(store.get(f"place{r}"))) for r in range(size)])


def await_keys(store: dist.Store, rank: int, keys: dict[int, str], watch: Callable[[int], None], what: str) -> None:
    """Returns when each of these other ranks has set its key in the store, or the store's time is over. watch, what:
    as of `discover`."""
    missing = dict(keys)
    began, pause, told = time.monotonic(), 0.0005, False
    while time.monotonic() - began < store.timeout.total_seconds():  # type: ignore[attr-defined]  # torch's stub lacks it
        missing = {r: key for r, key in missing.items() if not store.check([key])}
        if not missing:
            break
        if pause >= _LOOK_S:
            watch(next(iter(missing)))
        if not told and time.monotonic() - began > LATE_S:
            told = True
            names = ", ".join(map(str, list(missing)[:8])) + (" ..." if len(missing) > 8 else "")
            print(f"deepc: rank {rank} waits for rank {names} to open {what}", file=sys.stderr, flush=True)
        time.sleep(pause)
        pause = min(2 * pause, _LOOK_S)
