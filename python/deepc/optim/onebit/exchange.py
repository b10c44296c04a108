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
Spans = dict[str, list[tuple[int, int]]]  # "worker", "server": elements [begin, end) of the buffer


class Exchange(Protocol):
    """Between the ranks that train one model, of tensors on the device that it is made for. Every method is collective
    but `errors`, `clear_errors` and `dense_bytes`."""

    world: int
    rank: int
    workers: int
    """Who has errors of its own: nodes, or ranks."""
    worker: int
    """This rank's."""
    copies: int
    """Who has states of its own: ranks, or nodes whose ranks share one copy of them (ZeRO 1 and 2 in an engine)."""
    copy: int
    """This rank's."""
    parts: int
    """Of a buffer, each of which one rank adds up: a buffer has so many times the same number of blocks."""
    sent_bytes: int
    """What this rank has put on the wire so far."""

    def dense_bytes(self, numel: int) -> int:
        """What an uncompressed fp32 all-reduce between the workers puts on the wire on this rank."""

    def mean(self, tensors: Sequence[torch.Tensor]) -> None:
        """Each becomes the mean over ranks, uncompressed, with equal bits on all."""

    def compressed(self, buffer: torch.Tensor) -> None:
        """buffer [parts * k * BLOCK] fp32 becomes the mean over workers of what 1 bit an element carries of it: sign
        times mean magnitude of a block, with a worker's and a server's error feedback (Tang et al., arXiv:2102.02888).
        Ranks of one worker average exactly before. Equal bits on all ranks. With one rank nothing happens."""

    def shared(self, values: Sequence[float]) -> list[list[float]]:
        """What each of the ranks says that share this rank's copy of the states, in their order."""

    def agreed(self, values: Sequence[float]) -> list[float]:
        """The sums over the ranks that share copy 0 of the states, alike on all ranks."""

    def errors(self) -> dict[str, torch.Tensor]:
        """ "worker", "server": of the elements that `owned` names, one after the other; they are borrowed. Empty before
        the first `compressed`."""

    def owned(self, numel: int) -> Spans:
        """The elements of a buffer of `numel` that this rank's errors are of, in ascending order. What the mean still
        lacks is the sum over ranks of worker / workers, and of server."""

    def set_errors(self, numel: int, worker: torch.Tensor, server: torch.Tensor) -> None:
        """Copies of these, of a buffer of `numel` elements."""

    def clear_errors(self) -> None:
        """They begin with zeros again."""


class Alone:
    """One rank."""

    world, rank, workers, worker, copies, copy, parts, sent_bytes = 1, 0, 1, 0, 1, 0, 1, 0

    def dense_bytes(self, numel: int) -> int:
        return 0

    def mean(self, tensors: Sequence[torch.Tensor]) -> None:
        """It is the mean."""

    def compressed(self, buffer: torch.Tensor) -> None:
        """Nothing is sent, so nothing is rounded."""

    def shared(self, values: Sequence[float]) -> list[list[float]]:
        return [list(values)]

    def agreed(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def errors(self) -> dict[str, torch.Tensor]:
        return {}

    def owned(self, numel: int) -> Spans:
        return {"worker": [], "server": []}

    def set_errors(self, numel: int, worker: torch.Tensor, server: torch.Tensor) -> None:
        """There are none."""

    def clear_errors(self) -> None:
        """There are none."""


Make = Callable[[Any, bool, torch.device], Exchange]
_connected: list[Make] = []


def connect(make: Make) -> None:
    """make(group, hierarchical, device): over a torch.distributed group (None: the default one) of several ranks."""
    _connected[:] = [make]


def exchange_over(group: Any, hierarchical: bool, device: torch.device) -> Exchange:
    """The ranks of a torch.distributed group; None: of the default one. One rank where torch.distributed is not
    initialised. hierarchical: a node is a worker, else a rank is. device: of the tensors that they exchange.
    Collective."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return Alone()
    if dist.get_world_size(group) == 1:
        return Alone()
    if dist.get_rank(group) < 0:
        raise MisuseError("this rank is not in the process group that the 1-bit optimizer was given")
    return _connected[0](group, hierarchical, device)
