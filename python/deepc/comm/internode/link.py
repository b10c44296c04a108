"""What ties a rank to the others of a group over several nodes: the communicators of its node, and the wire to the
ranks of its local index on the other nodes. The engine's groups and the backend's hierarchies both stand on it.

If one of the two fails, both do, on every rank: whoever fails first writes why to the store, breaks its node's
communicators and closes its connections, so the failure runs through the group as fast as connections close; who is
told by a closed connection alone asks the store why. A rank that waits for the wire is not in the node's communicators:
one thread per process looks after the local peers of such waits every 50 ms."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.lib import without_place
from ...errors import (
    AbortedError,
    ArgumentError,
    CommError,
    CommTimeoutError,
    DeepcError,
    OutOfMemoryError,
    RankDiedError,
)
from .. import failures
from ..failures import GRACE_S, SHORT_GRACE_S, Reason, Record, is_closed, meaning, shortened
from ..place import Places
from .wire import Wire

if TYPE_CHECKING:
    import datetime

    import torch
    import torch.distributed as dist

    from ..shared import Comm


class WireError(Exception):
    """A wait for node `peer` (None: for all) failed."""

    def __init__(self, peer: int | None, said: str) -> None:
        super().__init__(said)
        self.peer, self.said = peer, said


class Link:
    """doing: what this rank is in, for messages. who: every rank in words."""

    def __init__(
        self,
        places: Places,
        rank: int,
        names: Sequence[int],
        inside: Callable[[], Sequence[Comm]],
        *,
        label: str,
        timeout: datetime.timedelta,
        store: dist.Store,
    ) -> None:
        """Collective: connects, or raises CommError. names: the ranks in messages. inside: the node's communicators.
        store: the group's own; it must live as long as the group, because reasons of failures travel through it.
        timeout: of messages' waits."""
        import torch.distributed as dist

        self.label, self.timeout, self.doing = label, timeout, ""
        self._topology, self._rank, self._inside, self._record = places.topology, rank, inside, Record(store)
        self.who = [places.in_words(r, names[r]) for r in range(self._topology.size)]
        self._node, self._slice = self._topology.node_of[rank], self._topology.local_of[rank]
        self._broken: Reason | None = None
        self._seen: Reason | None = None  # by the watching thread
        self._waiting = False
        self._wire: Wire | None = None
        if self._topology.count > 1 and self._slice < self._topology.leaders:
            slice_store = dist.PrefixStore(f"slice{self._slice}/", store)
            try:
                self._wire = Wire(slice_store, self._node, self._topology.count, timeout)
                # Who is through may close at once (a configuration that all refuse): nobody still connects then.
                self._wire.barrier().wait()
            except RuntimeError as exc:
                said = f"{self.who[rank]} can't reach the other nodes: {shortened(str(exc))}"
                for comm in inside():
                    comm.abort(f"[CommError] {said}")
                raise CommError(f"group {label}: {said}. Is GLOO_SOCKET_IFNAME the interface between them?") from exc
        self._neighbours = Pids(places.neighbours(rank))
        if self._wire is not None:
            _watch(self)

    # ---- the wire ----------------------------------------------------------------------------------------------------
    def send(self, data: torch.Tensor, peer: int, tag: int) -> Any:
        """To this rank's counterpart on node `peer`; see Wire.send."""
        return self._start(peer, lambda wire: wire.send(data, peer, tag))

    def recv(self, data: torch.Tensor, peer: int, tag: int) -> Any:
        return self._start(peer, lambda wire: wire.recv(data, peer, tag))

    def exchange(self, out: torch.Tensor, send: torch.Tensor) -> Any:
        return self._start(None, lambda wire: wire.exchange(out, send))

    def collect(self, out: torch.Tensor, mine: torch.Tensor) -> Any:
        return self._start(None, lambda wire: wire.collect(out, mine))

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """`tensor` of node `root`. Blocks."""
        self.wait(self._start(None, lambda wire: wire.broadcast(tensor, root)))

    def barrier(self) -> None:
        """Of this rank and its counterparts. Blocks."""
        self.wait(self._start(None, lambda wire: wire.barrier()))

    def _start(self, peer: int | None, start: Callable[[Wire], Any]) -> Any:
        self.usable()
        if self._wire is None:
            raise DeepcError(f"group {self.label}: {self.who[self._rank]} has no wire to other nodes")
        try:
            return start(self._wire)
        except RuntimeError as exc:
            raise WireError(peer, str(exc)) from None

    def wait(self, work: Any, peer: int | None = None) -> None:
        """For a message with node `peer`, or for a collective, which has its own time-out."""
        self._waiting = True
        try:
            if peer is None:
                work.wait()
            else:
                work.wait(self.timeout)
        except RuntimeError as exc:
            raise WireError(peer, str(exc)) from None
        finally:
            self._waiting = False

    # ---- failures ----------------------------------------------------------------------------------------------------
    def usable(self) -> None:
        """Raises what broke the group."""
        if self._broken is not None:
            kind, text = self._broken
            raise kind(text)

    def error(self) -> str:
        """ "" or what broke the group."""
        return self._broken[1] if self._broken else next((e for c in self._inside() if (e := c.error())), "")

    @contextlib.contextmanager
    def errors(self, doing: str = "") -> Iterator[None]:
        """Around calls inside the node and across: if one fails, all ranks of the group are told why, and raise it."""
        self.usable()
        if doing:
            self.doing = doing
        try:
            yield
        except (WireError, CommError) as exc:
            raise self.fail(exc) from None

    def fail(self, exc: BaseException, told: bool = False) -> BaseException:
        """Marks the group broken by `exc`, here and everywhere (told: all ranks know). Returns what to raise."""
        if self._broken is not None:
            return self._broken[0](self._broken[1])
        found: Reason | None = None
        if isinstance(exc, WireError):
            found = self._cause(exc)
        elif isinstance(exc, AbortedError):
            found = _passed_on(str(exc))
        if found is None and isinstance(exc, (CommError, OutOfMemoryError)):
            found = (type(exc), without_place(str(exc)))
        ours = found is not None
        if found is None:
            text = f"group {self.label}: {self.who[self._rank]} left a collective with {type(exc).__name__}: {exc}"
            found = (AbortedError, text)
        if not told:
            found = self._record.write(*found)
        self._broken = found
        for comm in self._inside():
            with contextlib.suppress(DeepcError):  # closed
                if issubclass(found[0], CommError):
                    comm.fail(found[0](found[1]))
                else:
                    comm.abort(f"[{found[0].__name__}] {found[1]}")
        if self._wire is not None:
            self._wire.abort()
        return found[0](found[1]) if ours else exc

    def abort(self, why: str) -> None:
        """Breaks the group on every rank; may be called from any thread."""
        self.fail(AbortedError(f"group {self.label}: {self.who[self._rank]} aborted: {why}"))

    def _cause(self, exc: WireError) -> Reason:
        """Why a wait for the wire failed: what this node knows, what somebody wrote to the store, what Gloo said."""
        found = self._seen or self._node_failure()
        if found is not None:
            return found
        nodes = self._topology.others(self._node) if exc.peer is None else (exc.peer,)
        # a neighbour of who died saw how
        grace = GRACE_S if any(len(self._topology.nodes[n]) > 1 for n in nodes) else SHORT_GRACE_S
        found = self._record.read(grace if is_closed(exc.said) else 0.0)
        if found is not None:
            return found
        peers = [self.who[self._topology.nodes[n][self._slice]] for n in nodes]
        peer = peers[0] if len(peers) == 1 else f"one of {', '.join(peers)}"
        doing, kind = f"while {self.who[self._rank]} was in {self.doing}", meaning(exc.said)
        if kind is CommTimeoutError:
            return kind, (
                f"group {self.label}: no word from {peer} within {self.timeout.total_seconds():g} s {doing}. It, or a"
                f" rank of its node, has not joined that call. ({shortened(exc.said)})"
            )
        if kind is RankDiedError:
            return kind, (
                f"group {self.label}: {peer} died or left the group: its connection closed {doing}"
                f" ({shortened(exc.said)})"
            )
        return kind, f"group {self.label}: the connection to {peer} failed {doing}: {shortened(exc.said)}"

    def lost(self, rank: int | None, doing: str, said: str) -> DeepcError:
        """What to raise for a message with `rank` (None: from anyone), that torch's backend carried and ended with
        `said`: what this node knows, what somebody wrote to the store, what the backend said."""
        found = self._node_failure()
        if found is None and is_closed(said):
            alone = rank is not None and len(self._topology.nodes[self._topology.node_of[rank]]) == 1
            found = self._record.read(SHORT_GRACE_S if alone else GRACE_S)
        if found is not None:
            return found[0](found[1])
        whom = "a rank" if rank is None else self.who[rank]
        kind, where = meaning(said), f"{self.who[self._rank]} was in {doing} ({shortened(said)})"
        if kind is RankDiedError:
            return kind(f"group {self.label}: {whom} died or left: its connection closed while {where}")
        return kind(f"group {self.label}: a message with {whom} failed while {where}")

    def _node_failure(self) -> Reason | None:
        """What broke the node's communicators, if one is broken."""
        for comm in self._inside():
            told = comm.error()
            if not told:
                continue
            found = _passed_on(told)
            if found is not None:
                return found
            try:
                comm.barrier()  # raises what broke it
            except CommError as broken:
                return type(broken), without_place(str(broken))
        return None

    def look(self) -> None:
        """By the watching thread: ends a wait for the wire when the node's communicators are broken or a local peer is
        gone."""
        if not self._waiting:
            return
        found = self._node_failure()
        if found is None and (ended := self._neighbours.ended()) is not None:
            pid, how = ended
            names = [self.who[r] for r in self._topology.nodes[self._node] if f"(pid {pid} " in self.who[r]]
            whom = names[0] if names else f"pid {pid}"
            found = (
                RankDiedError,
                f"group {self.label}: {whom} {how}, while {self.who[self._rank]} was in {self.doing}",
            )
        if found is not None and self._waiting and self._wire is not None:
            self._seen = self._record.write(*found)  # before the connections close: peers then look for it
            self._wire.abort()

    def close(self) -> None:
        """Leaves the group: peers that still wait for this rank get RankDiedError. A second call does nothing."""
        _watched.discard(self)
        wire, self._wire = self._wire, None
        if self._broken is None:
            self._broken = (ArgumentError, f"communicator {self.label} is closed")
        if wire is not None:
            wire.close()
        self._neighbours.close()


def _passed_on(text: str) -> Reason | None:
    """The error of another rank of the node, from the reason that it aborted the node's communicators with."""
    found = re.search(r"\[(\w+Error)\] (.*)", text, re.DOTALL)
    return failures.reason(found[1], without_place(found[2])) if found else None


# ---- who looks after ranks that wait for the wire --------------------------------------------------------------------
_watched: weakref.WeakSet[Link] = weakref.WeakSet()
_watcher: tuple[int, threading.Thread] | None = None  # (pid, thread): a forked child starts its own


def _watch(link: Link) -> None:
    global _watcher
    _watched.add(link)
    if _watcher is None or _watcher[0] != os.getpid():
        thread = threading.Thread(target=_look_after, name="deepc-watch", daemon=True)
        _watcher = (os.getpid(), thread)
        thread.start()


def _look_after() -> None:
    while True:
        time.sleep(0.05)
        _look_at_all()


def _look_at_all() -> None:
    links: list[Link] = []
    with contextlib.suppress(RuntimeError):  # another thread opened or closed one while they were listed: next time
        links = list(_watched)
    for link in links:
        with contextlib.suppress(Exception):  # closed meanwhile
            link.look()


def _how(pid: int, pidfd: int) -> str:
    """As comm/tell.c: the wait status of a zombie is the last field of its /proc/PID/stat; that of a collected process
    is kept by its pidfd since Linux 6.15."""
    try:
        state, *_, last = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        status = int(last) if state == "Z" else None
    except (OSError, ValueError):
        status = None
    if status is None:
        info = struct.pack("QQ44xi", 1 << 3, 0, 0)  # struct pidfd_info: mask, cgroup, ids, exit_code
        with contextlib.suppress(OSError):
            mask, _, code = struct.unpack("QQ44xi", fcntl.ioctl(pidfd, 0xC040FF0B, info))  # PIDFD_GET_INFO
            status = code if mask & 1 << 3 else None
    if status is None:
        return "died"
    if (number := status & 0x7F) != 0:
        return f"died: killed by signal {number} ({signal.strsignal(number)})"
    return f"died: it exited with code {status >> 8 & 0xFF} without leaving the group"


class Pids:
    """Processes whose end can be seen (pidfd)."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._fds: dict[int, int] = {}
        self._poll = select.poll()
        self._lock = threading.Lock()
        for pid in pids:
            try:
                fd = os.pidfd_open(pid)
            except (OSError, AttributeError):
                continue  # gone already, or a kernel without: the node's communicator tells
            self._fds[fd] = pid
            self._poll.register(fd, select.POLLIN)

    def ended(self) -> tuple[int, str] | None:
        """(pid, how it ended, as far as that can be read) of one that has ended."""
        with self._lock:
            found = self._poll.poll(0) if self._fds else []
            fd = found[0][0] if found else -1
            return (self._fds[fd], _how(self._fds[fd], fd)) if fd in self._fds else None

    def close(self) -> None:
        with self._lock:
            for fd in self._fds:
                os.close(fd)
            self._fds.clear()
            self._poll = select.poll()
