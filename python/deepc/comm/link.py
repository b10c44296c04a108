"""What carries bytes between nodes (Gloo), and what is needed around it when something fails."""

from __future__ import annotations

import datetime
import os
import re
import select
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import torch.distributed as dist

_ABORT_TAG = 0x7FFFFFF0


class GlooWire:
    """Messages between the leaders of one slice, one process per node: a Gloo group of its own. The engine that
    Hierarchy takes is any class with this constructor and these methods; a work has wait(timeout) that raises
    RuntimeError."""

    def __init__(self, store: dist.Store, index: int, count: int, timeout: datetime.timedelta) -> None:
        """Collective over the `count` leaders. store: of this slice."""
        import torch.distributed as dist

        self._index, self._count = index, count
        self._group: Any = dist.ProcessGroupGloo(store, index, count, timeout)  # torch's stub lacks send and recv

    def send(self, data: torch.Tensor, peer: int, tag: int) -> Any:
        """Starts sending bytes (uint8, contiguous; untouched until the work is done)."""
        return self._group.send([data], peer, tag)

    def recv(self, data: torch.Tensor, peer: int, tag: int) -> Any:
        """Starts a receive of at most data.numel() bytes. Messages of one peer and tag arrive in order."""
        return self._group.recv([data], peer, tag)

    def abort(self) -> None:
        """Makes every wait raise, here and at the peers. From any thread."""
        for peer in range(self._count):
            if peer != self._index:
                try:
                    self._group.recv([torch.empty(1, dtype=torch.uint8)], peer, _ABORT_TAG).wait(
                        datetime.timedelta(milliseconds=1)
                    )
                except RuntimeError:
                    pass

    def close(self) -> None:
        self._group = None


class WireError(Exception):
    """A wait for node `peer` failed."""

    def __init__(self, peer: int, slice_: int, said: str) -> None:
        super().__init__(said)
        self.peer, self.slice, self.said = peer, slice_, said


def shortened(said: str) -> str:
    """Without the source line and the advice that Gloo puts around it."""
    said = re.sub(r"^\[[^\]]*/([\w.]+:\d+)\]", r"Gloo, \1:", said)
    return said.split(" This is typically")[0].strip()


def within(seconds: float, ask: Callable[[], Any]) -> Any:
    """ask(), or None if it fails or takes longer: the store may have gone with its host."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(ask())
        except Exception:
            pass

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


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

    def ended(self) -> int | None:
        with self._lock:
            found = self._poll.poll(0) if self._fds else []
            return self._fds.get(found[0][0]) if found else None

    def close(self) -> None:
        with self._lock:
            for fd in self._fds:
                os.close(fd)
            self._fds.clear()
            self._poll = select.poll()
