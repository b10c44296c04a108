"""What goes wrong with one rank's disk is told to all, so that they raise together and none waits for another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
import torch.distributed as dist

from ...errors import DamagedError, DeepcError, DiskError, DiskFullError, OutOfMemoryError


class Gathers(Protocol):
    """Of a comm.groups.Group."""

    def gather_all(self, tensor: torch.Tensor) -> torch.Tensor: ...


_KINDS: tuple[type[DeepcError], ...] = (DeepcError, OutOfMemoryError, DiskError, DiskFullError, DamagedError)
_TEXT_BYTES = 1024


def failures(group: Gathers, failure: Exception | None) -> list[DeepcError]:
    """The failures of the ranks that have one, in the order of ranks; each text begins with the rank that it came
    from. Collective."""
    kind = 0 if failure is None else 1 + max(i for i, k in enumerate(_KINDS) if i == 0 or isinstance(failure, k))
    said = f"{failure}" if getattr(failure, "of_another_rank", False) else f"rank {_rank()}: {failure}"
    row = bytearray([kind]) + bytearray(said.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES))
    out = []
    for kind, *text in group.gather_all(torch.frombuffer(row, dtype=torch.uint8)).tolist():
        if kind:
            out.append(_KINDS[kind - 1](bytes(text).decode(errors="replace").rstrip()))
            out[-1].of_another_rank = True
    return out


def said_once(told: Iterable[DeepcError]) -> str:
    """The texts of `told`, those once that a rank has from another one."""
    return "; ".join(dict.fromkeys(map(str, told)))


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def run_together(group: Gathers, work: Callable[[], object]) -> None:
    """Calls `work`. Where it raises on some rank all raise: their own failure, or the first rank's. Collective."""
    failure: Exception | None = None
    try:
        work()
    except Exception as exc:  # told to the other ranks, then raised
        failure = exc
    together(group, failure)


def together(group: Gathers, failure: Exception | None, across: Gathers | None = None) -> None:
    """If some rank has failed all raise: their own failure, or the first rank's. across: ranks of which each is in
    another such `group`, which is told what they know. Collective, over `group` first."""
    told = failures(group, failure)
    if across is not None:
        told = failures(across, failure or (told[0] if told else None))
    if failure is not None:
        raise failure
    if told:
        raise told[0]
