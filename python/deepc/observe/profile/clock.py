"""One clock for the ranks of a timeline. Ranks of one machine share CLOCK_MONOTONIC; the first rank of every other
machine exchanges its time with rank 0: of `ROUNDS` round trips the fastest tells the difference of the clocks to half
its duration."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...core.files import boot_id

ROUNDS = 16


@dataclass(frozen=True)
class Clock:
    """own time + offset_ns is rank 0's time, within bound_ns (0: it is the same clock). start_ns: when the recording
    began, on rank 0's clock."""

    offset_ns: int = 0
    bound_ns: int = 0
    start_ns: int = 0


def identity() -> str:
    """The same for processes that read the same CLOCK_MONOTONIC: the boot, and the time namespace."""
    try:
        return f"{boot_id()} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return socket.gethostname()


def align(now: Callable[[], int] = time.monotonic_ns, who: str | None = None) -> Clock:
    """The clock of this rank. Collective over all ranks of the default group. now: this rank's clock; who: its
    identity."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Clock(start_ns=now())
    rank, world = dist.get_rank(), dist.get_world_size()
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, who or identity())
    first = {key: r for r, key in reversed(list(enumerate(everyone)))}
    others = sorted(r for key, r in first.items() if key != everyone[0])
    mine = Clock()
    for other in others:
        if rank == 0:
            _answer(other, now)
        elif rank == other:
            mine = _ask(now)
    told: list[Any] = [None] * world
    dist.all_gather_object(told, (mine.offset_ns, mine.bound_ns, now()))
    offset, bound, _ = told[first[everyone[rank]]]
    return Clock(offset, bound, told[0][2])


def _answer(other: int, now: Callable[[], int]) -> None:
    ping, pong = torch.zeros(1, dtype=torch.int64, device="cpu"), torch.zeros(2, dtype=torch.int64, device="cpu")
    for _ in range(ROUNDS):
        dist.recv(ping, other)
        pong[0] = now()
        pong[1] = now()
        dist.send(pong, other)


def _ask(now: Callable[[], int]) -> Clock:
    ping, pong = torch.zeros(1, dtype=torch.int64, device="cpu"), torch.zeros(2, dtype=torch.int64, device="cpu")
    best = Clock(0, 1 << 62)
    for _ in range(ROUNDS):
        sent = now()
        dist.send(ping, 0)
        dist.recv(pong, 0)
        got = now()
        came, went = pong.tolist()
        bound = (got - sent - (went - came) + 1) // 2
        if bound < best.bound_ns:
            best = Clock((came - sent + went - got) // 2, bound)
    return best
