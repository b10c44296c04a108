"""How the ranks of a 1-bit optimizer talk: what the methods (method.py) ask for, and who answers.

The collectives are comm's, which comes later in the order of layers: it connects itself here
(comm/internode/onebit.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ...errors import MisuseError

BLOCK = 2048  # elements with one scale


class Exchange(Protocol):
    """Between the ranks that train one model. Every method is collective but `errors`, `set_errors` and
    `clear_errors`."""

    world: int
    rank: int
    sent_bytes: int
    """What this rank has put on the wire so far."""

    def mean(self, tensors: Sequence[torch.Tensor]) -> None:
        """Each becomes the mean over ranks, uncompressed, with equal bits on all."""

    def compressed(self, buffer: torch.Tensor) -> None:
        """buffer [world * k * BLOCK] fp32 becomes the mean over ranks of what 1 bit an element carries of it: sign
        times mean magnitude of a block, with a worker's and a server's error feedback (Tang et al., arXiv:2102.02888).
        Equal bits on all ranks. With one rank nothing happens."""

    def rows(self, values: Sequence[float]) -> list[list[float]]:
        """What each rank says, in rank order."""

    def errors(self) -> dict[str, torch.Tensor]:
        """ "worker": [n], "server": [n / world], of elements [rank * n / world, ...); they are borrowed. Empty before
        the first `compressed`."""

    def set_errors(self, worker: torch.Tensor, server: torch.Tensor) -> None:
        """Copies of these."""

    def clear_errors(self) -> None:
        """They begin with zeros again."""


class Alone:
    """One rank."""

    world, rank, sent_bytes = 1, 0, 0

    def mean(self, tensors: Sequence[torch.Tensor]) -> None:
        """It is the mean."""

    def compressed(self, buffer: torch.Tensor) -> None:
        """Nothing is sent, so nothing is rounded."""

    def rows(self, values: Sequence[float]) -> list[list[float]]:
        return [list(values)]

    def errors(self) -> dict[str, torch.Tensor]:
        return {}

    def set_errors(self, worker: torch.Tensor, server: torch.Tensor) -> None:
        """There are none."""

    def clear_errors(self) -> None:
        """There are none."""


_connected: list[Callable[[Any], Exchange]] = []


def connect(make: Callable[[Any], Exchange]) -> None:
    """make(group): over a torch.distributed group (None: the default one) of several ranks."""
    _connected[:] = [make]


def exchange_over(group: Any = None) -> Exchange:
    """The ranks of a torch.distributed group; None: of the default one. One rank where torch.distributed is not
    initialised."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return Alone()
    if dist.get_world_size(group) == 1:
        return Alone()
    if dist.get_rank(group) < 0:
        raise MisuseError("this rank is not in the process group that the 1-bit optimizer was given")
    return _connected[0](group)
