"""Gathers over torch.distributed, for ranks that share no memory and need not agree on what they gather (ZeRO-3's
streamed mode).

A round is a message of 128 bytes per rank, in which every rank says what it wants and how many gradient buckets it has
ready; then all give their part of everything that any rank wants. Before any other collective of the engine a rank
takes part in rounds until all ranks are there (`fence`). So a rank that uses another expert, or leaves out a block,
costs time and no deadlock. The groups are our own: what users send on theirs meanwhile does not meet it.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from ..comm import start as comm
from ..comm.groups import _BREAK_TAG, _all_gather
from ..core.lib import C, check
from ..errors import CommError, DeepcError

if TYPE_CHECKING:
    from .streamed import Unit

Piece = tuple[
    int, int, int, "torch.Tensor | None"
]  # rank, first element of the parameter, elements, the values if they are this rank's


class Reductions(Protocol):
    """What reduces gradients meanwhile."""

    def ready(self) -> int:
        """Buckets since the start that this rank has all gradients of; never falls."""

    def agreed(self, least: int) -> None:
        """The smallest `ready` of all ranks in the round that ends."""


class _Started(NamedTuple):
    """The gather of a unit under way: what it fills, elements of a rank's part, what this rank gives."""

    work: Any
    out: torch.Tensor
    most: int
    send: torch.Tensor


class CollectiveSource:
    """What streamed.py gathers from. After a failure every call raises it, a CommError, on all ranks."""

    collective = True
    WANTS = 15  # units that a round can carry for a rank
    _NOTHING, _AT_FENCE = -2, -1

    def __init__(self, world: int, rank: int, device: torch.device) -> None:
        self._world, self._rank = world, rank
        self._cpu = device.type == "cpu"
        self._control: Any = dist.new_group(backend="gloo", timeout=comm.DEFAULT_TIMEOUT)
        self._data: Any = self._control if self._cpu else dist.new_group(timeout=comm.DEFAULT_TIMEOUT)
        self._units: list[Unit] = []
        self._pieces: list[
            list[list[tuple[int, torch.Tensor | None, int]]]
        ] = []  # [unit][rank]: (offset in the unit, this rank's values, elements)
        self._arriving: dict[int, _Started] = {}
        self._others: list[_Started] = []  # gathers that only other ranks wanted
        self._failed: BaseException | None = None
        self.reductions: Reductions | None = None
        self.rounds = 0

    def add(self, unit: Unit, values: Sequence[Sequence[Piece]]) -> None:
        """values: per parameter of the unit its pieces."""
        rows: list[list[tuple[int, torch.Tensor | None, int]]] = [[] for _ in range(self._world)]
        for offset, pieces in zip(unit.offsets, values):
            for rank, begin, n, mine in pieces:
                rows[rank].append((offset + begin, mine, n))
        self._units.append(unit)
        self._pieces.append(rows)

    # ---- rounds ------------------------------------------------------------------------------------------------------
    def begin(self, units: Sequence[Unit]) -> None:
        """Starts to gather units. Ranks may ask for different ones."""
        for at in range(0, len(units), self.WANTS):
            self._round([u.index for u in units[at : at + self.WANTS]])

    def fence(self) -> None:
        """Returns when all ranks have called it; serves the others' gathers until then."""
        while not self._round([], fence=True):
            pass
        for started in self._others:
            with self._errors():
                started.work.wait()
        self._others.clear()

    def _round(self, wanted: list[int], fence: bool = False) -> bool:
        """Every rank's wishes, fulfilled. True if all ranks are at a fence."""
        self.rounds += 1
        table = self._table(wanted, fence)
        for index in dict.fromkeys(r[k] for k in range(self.WANTS) for r in table if r[k] >= 0):
            with self._errors():
                started = self._start(index)
            if index in wanted:
                self._arriving[index] = started
            else:
                self._others.append(started)
        self._others = [s for s in self._others if not s.work.is_completed()]
        if self.reductions is not None:
            self.reductions.agreed(min(r[self.WANTS] for r in table))
        return all(r[0] == self._AT_FENCE for r in table)

    def _table(self, wanted: list[int], fence: bool) -> list[list[int]]:
        """Per rank: what it wants, or that it is at a fence; and how many buckets it has ready."""
        nothing = self._AT_FENCE if fence else self._NOTHING
        ready = self.reductions.ready() if self.reductions is not None else 0
        row = torch.tensor([*wanted, *[nothing] * (self.WANTS - len(wanted)), ready], dtype=torch.int64)
        rows = torch.empty(self._world * row.numel(), dtype=torch.int64)
        with self._errors():
            _all_gather(rows, row, group=self._control)
        return rows.view(self._world, row.numel()).tolist()

    def _start(self, index: int) -> _Started:
        unit, rows = self._units[index], self._pieces[index]
        most = max(sum(n for _, _, n in row) for row in rows)
        send = torch.zeros(most, dtype=unit.flat.dtype, device=unit.flat.device)
        at = 0
        for _, mine, n in rows[self._rank]:
            send[at : at + n].copy_(mine)  # type: ignore[arg-type]  # its own pieces are there
            at += n
        out = torch.empty(self._world * most, dtype=send.dtype, device=send.device)
        return _Started(_all_gather(out, send, group=self._data, async_op=True), out, most, send)

    def complete(self, unit: Unit) -> None:
        """Returns when the unit's storage is filled."""
        if (started := self._arriving.pop(unit.index, None)) is None:
            return
        with self._errors():
            started.work.wait()
        size, base = unit.flat.element_size(), unit.storage.data_ptr()
        for rank, row in enumerate(self._pieces[unit.index]):
            at = rank * started.most
            for offset, _, n in row:
                if self._cpu:
                    check(C.dc_zero_gather(base + offset * size, started.out.data_ptr() + at * size, n * size))
                else:
                    unit.flat[offset : offset + n].copy_(started.out[at : at + n])
                at += n

    # ---- failures: who fails closes its connections, so that an error runs through all ranks -------------------------
    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Around calls of the backend: turns its error into one of ours."""
        if self._failed is not None:
            raise self._failed
        try:
            yield
        except DeepcError:
            raise
        except RuntimeError as exc:
            if self._failed is None:
                self.fail(
                    CommError(
                        f"a gather of ZeRO-3's parameters over {self._world} ranks failed on rank {self._rank}: a rank"
                        f" died, left, raised an error, or can't be reached ({exc})"
                    )
                )
            raise self._failed from exc  # type: ignore[misc]  # set above

    def fail(self, error: BaseException) -> None:
        """Breaks it on all ranks: none waits for this one any more. From any thread. A receive that times out is what
        closes a connection: Gloo's abort leaves them open (torch 2.13)."""
        if self._failed is not None:
            return
        self._failed = error
        control = self._control
        for peer in range(self._world):
            if control is not None and peer != self._rank:
                with contextlib.suppress(RuntimeError):
                    control.recv([torch.empty(1)], peer, _BREAK_TAG).wait(datetime.timedelta(milliseconds=1))

    # ---- single parameters -------------------------------------------------------------------------------------------
    def read(self, unit: Unit, i: int) -> torch.Tensor | None:
        """Its values without a gather of the unit: there are none."""
        return None

    def write(self, unit: Unit, i: int, value: torch.Tensor) -> None:
        """Every rank writes its part of parameter i; the same `value` on all."""
        begin, end = unit.offsets[i], unit.offsets[i] + value.numel()
        for offset, mine, n in self._pieces[unit.index][self._rank]:
            if begin <= offset < end:
                mine.copy_(value[offset - begin : offset - begin + n])  # type: ignore[union-attr]

    def close(self) -> None:
        """Leaves the groups. A second call does nothing."""
        groups = {id(g): g for g in (self._control, self._data) if g is not None}
        self._control = self._data = None
        for group in groups.values():
            if dist.is_initialized():
                dist.destroy_process_group(group)
