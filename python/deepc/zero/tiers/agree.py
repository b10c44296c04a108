"""What goes wrong with one rank's disk is told to all, so that they raise together and none waits for another."""

from __future__ import annotations

from typing import Protocol

import torch

from ...errors import DamagedError, DeepcError, DiskError, DiskFullError, OutOfMemoryError


class Gathers(Protocol):
    """Of a comm.groups.Group."""

    def gather_all(self, tensor: torch.Tensor) -> torch.Tensor: ...


_KINDS: tuple[type[DeepcError], ...] = (DeepcError, OutOfMemoryError, DiskError, DiskFullError, DamagedError)
_TEXT_BYTES = 1024


def failures(group: Gathers, failure: Exception | None, numbered: bool = True) -> list[DeepcError]:
    """The failure of every rank that has one, its text with the rank (numbered), in the order of ranks. Collective."""
    kind = 0 if failure is None else 1 + max(i for i, k in enumerate(_KINDS) if i == 0 or isinstance(failure, k))
    text = f"{failure}".encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES)
    rows = group.gather_all(torch.frombuffer(bytearray([kind]) + bytearray(text), dtype=torch.uint8))
    return [
        _KINDS[row[0] - 1](f"rank {rank}: " * numbered + bytes(row[1:]).decode(errors="replace").rstrip())
        for rank, row in enumerate(rows.tolist())
        if row[0]
    ]


def together(group: Gathers, failure: Exception | None, further: Gathers | None = None) -> None:
    """If some rank has failed all raise: their own failure, or the first rank's. further: ranks of which each is in
    another such `group`, which is told what they know. Collective, over `group` first."""
    told = failures(group, failure)
    if further is not None:
        told = failures(further, failure or (told[0] if told else None), numbered=False)
    if failure is not None:
        raise failure
    if told:
        raise told[0]
