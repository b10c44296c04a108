"""What the launcher and its agents say to each other: frames over pipes. Only the standard library and no import of
deepc: agent.py loads this file by its path.

A frame is one line of JSON, an object with at least "t" (its type); if it has "n", n bytes follow the line. An agent's
first bytes are MAGIC: what a login shell printed before is no frame.

launcher -> agent   store {port}             open the ranks' meeting point here
                    start {...}              start the ranks (agent.py has the fields)
                    ping                     the launcher is alive; while it is suspended: pause, resume
                    stop {grace_s}           end the ranks: SIGTERM, after grace_s SIGKILL
agent -> launcher   hello {...}              once: what this host is (agent.py)
                    store {port}             it is open
                    out {rank, fd, n}        n bytes that a rank wrote to fd 1 or 2
                    failed {rank}            a rank ended badly; the launcher decides
                    error {text}             what was asked for can't be done; the agent ends
                    ended {failures}         all is over, and no process is left here"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

MAGIC = b"\x01deepc-agent-1\n"
_MOST = 1 << 26  # of one frame


class FrameError(Exception):
    """The bytes are no frames."""


def encode(kind: str, payload: bytes | None = None, **fields: Any) -> bytes:
    head: dict[str, Any] = {"t": kind, **fields}
    if payload is not None:
        head["n"] = len(payload)
    return json.dumps(head).encode() + b"\n" + (payload or b"")


class Decoder:
    """Bytes in whatever pieces -> frames. synced: no MAGIC is awaited. noise: what came before it."""

    def __init__(self, synced: bool = True) -> None:
        self.synced, self.noise = synced, b""
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        """The frames that `data` completes, each with its payload. Raises FrameError."""
        self._buffer += data
        if not self.synced and not self._sync():
            return
        while (end := self._buffer.find(b"\n")) >= 0:
            head = self._head(bytes(self._buffer[:end]))
            stop = end + 1 + head.get("n", 0)
            if len(self._buffer) < stop:
                return
            payload = bytes(self._buffer[end + 1 : stop])
            del self._buffer[:stop]
            yield head, payload
        if len(self._buffer) > _MOST:
            raise FrameError("a line without end")

    def _sync(self) -> bool:
        at = self._buffer.find(MAGIC)
        if at < 0:
            return False
        self.noise = bytes(self._buffer[:at])
        del self._buffer[: at + len(MAGIC)]
        self.synced = True
        return True

    def unsynced(self) -> bytes:
        """What came so far, if MAGIC has not."""
        return b"" if self.synced else bytes(self._buffer)

    @staticmethod
    def _head(line: bytes) -> dict[str, Any]:
        try:
            head = json.loads(line)
        except ValueError:
            head = None
        if not isinstance(head, dict) or not isinstance(head.get("t"), str) or not 0 <= head.get("n", 0) <= _MOST:
            raise FrameError(f"{line[:80]!r} is no frame")
        return head


class Sender:
    """Writes frames to a non-blocking descriptor: what does not fit now waits. told: bytes written; broken: nobody
    reads any more."""

    FULL = 1 << 20  # who has this much waiting should not produce more

    def __init__(self, fd: int) -> None:
        self.fd, self.told, self.broken = fd, 0, False
        self._waiting = bytearray()
        os.set_blocking(fd, False)

    def send(self, kind: str, payload: bytes | None = None, **fields: Any) -> None:
        self._waiting += encode(kind, payload, **fields)
        self.flush()

    def raw(self, data: bytes) -> None:
        self._waiting += data
        self.flush()

    def flush(self) -> None:
        while self._waiting and not self.broken:
            try:
                written = os.write(self.fd, self._waiting)
                del self._waiting[:written]
                self.told += written
            except BlockingIOError:
                return
            except OSError:
                self.broken = True
        if self.broken:
            self._waiting.clear()

    @property
    def waiting(self) -> int:
        return len(self._waiting)
