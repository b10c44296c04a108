"""Muon's update with momentum, moments and masters, or parameters and gradients, on disk. A round's parts are read,
stepped and written back a window at a time, between the exchanges of matrices; what of a matrix is in memory is what
the exchange needs of it.

A part is stepped once, whatever the disk does: what could not be written is written again before the work goes on
(`Resumable`), and the ranks agree before each exchange whether all of them have come there."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ....errors import DiskError
from ....optim.states.formats import MOMENTS, is_coded
from ....plan.layout import Segment
from ...state import Addressed, ModelState
from ...tiers.agree import together
from ...tiers.coded import Coded, CodedOnDisk
from ...tiers.windows import PART, Window
from .base import StepCounts
from .matrices import MatrixUpdate, Part, Round
from .sharers import Sharers

Writes = list[Callable[[], None]]  # each puts values where they belong; one that has raised a DiskError is called again


# State -> the tier's array that it lies in (optim/factory.py, names_on_disk).
_ARRAYS = {"momentum_buffer": "first_moment", "exp_avg": "first_moment", "exp_avg_sq": "second_moment"}


class Resumable:
    """Parts of an update: each reads, computes, and says what is to be written where. A part that could not be read has
    changed nothing."""

    def __init__(self, parts: Sequence[Callable[[], Writes]]) -> None:
        self._parts, self._at = parts, 0
        self._made: Writes | None = None  # of part `at`, not written to the end

    def do(self) -> None:
        """All that is left. DiskError: a call goes on there."""
        while self._at < len(self._parts):
            if self._made is None:
                self._made = self._parts[self._at]()
            for write in self._made:
                write()
            self._made = None
            self._at += 1


class _Blocks:
    """Elements [lo, hi) of the flat space on disk, at their addresses, with the rest of their blocks. Read when it is
    made."""

    def __init__(self, flat: Addressed, lo: int, hi: int) -> None:
        flat.flush()  # what was there before shares blocks with it
        self._flat, self._stored = flat, False
        self._begin, self._end = flat.blocks(lo, hi)
        flat.fetch(self._begin, self._end)
        flat.ready(self._begin)
        self.values = flat.tensor(lo, hi)

    def write(self) -> None:
        """`values` go to the disk. What becomes of them the next flush tells; until they are written they stay in
        memory."""
        if not self._stored:
            self._stored = True
            self._flat.store(self._begin, self._end)


class MatrixUpdateOnDisk(MatrixUpdate):
    """The same bits as MatrixUpdate's. With states on disk: first_moment, [owned] the momentum of matrices and AdamW's
    of the rest; second_moment, [owned] of the rest, zeros that nobody moves elsewhere."""

    def __init__(
        self,
        state: ModelState,
        groups: Sequence[Mapping[str, Any]],
        group_of: Sequence[int],
        sharers: Sharers | None = None,
        form: str = "",
    ) -> None:
        self._work: Resumable | None = None
        super().__init__(state, groups, group_of, sharers, form)

    def _make_arrays(self) -> None:
        tier = self._state.tier
        if tier is None:
            super()._make_arrays()
            return
        self._at = {s: s.shard_begin for segments in self._mine.values() for s in segments}
        for name, place in _ARRAYS.items():
            self._arrays[name] = tier.arrays[place]
            if is_coded(self._form):
                pieces = [
                    (at, s.length, self._first(s)) for s, at in self._at.items() if name in self.names_of(s.param)
                ]
                self._arrays[name] = CodedOnDisk(tier.stream, name, self._form, pieces, place)

    # ---- a step ------------------------------------------------------------------------------------------------------
    def update(self, grad_scale: float, counts: StepCounts) -> None:
        """Collective, where there are several ranks. DiskError: `finish` does the rest."""
        self._scale, self._counts, self._round = grad_scale, counts, 0
        self._work = None
        self.finish()

    def forget(self) -> None:
        self._work = None

    def finish(self) -> None:
        if self._work is None:
            self._next([])
        while self._round < len(self._rounds):
            r, pieces = self._rounds[self._round]
            self._do()
            lows = self._lows
            updates = self._orthogonal(r, pieces, lows) if pieces else self._orthogonal_of_all(r, lows)
            self._round += 1
            self._next([part for s, update in updates.items() for part in self._applied(s, update)])
        assert self._work is not None  # made above
        self._work.do()
        self._work = None

    def _do(self) -> None:
        """The work before an exchange; if a disk breaks it off, on all ranks."""
        assert self._work is not None
        failure: DiskError | None = None
        try:
            self._work.do()
        except DiskError as exc:
            failure = exc
        together(self._state.group, failure, self._sharers)

    def _next(self, before: list[Callable[[], Writes]]) -> None:
        """The work until the next exchange: what is left of the last round, and the directions of the next one, or
        after the last all that is no matrix."""
        self._lows: dict[Segment, torch.Tensor] = {}
        if self._round < len(self._rounds):
            r = self._rounds[self._round][0]
            self._work = Resumable([*before, *self._directed(r)])
        else:
            rest = [(g, s) for g, of in zip(self._groups, self._rest) for s in of]
            self._work = Resumable([*before, *(part for g, s in rest for part in self._stepped(g, s)), self._flush])

    def _flush(self) -> Writes:
        """Everything is on disk when the step is made."""
        if self._state.tier is not None:
            self._state.tier.stream.flush()
        if (flat := self._state.flat_on_disk) is not None:
            flat.flush()
        return []

    def _of_parts(self, s: Segment, work: Callable[[int, int], Writes]) -> Iterator[Callable[[], Writes]]:
        """work(begin, end) of each part of a segment that is in memory at a time. Where codes have blocks, none is in
        two parts."""
        edges = [0, *range(PART - self._first(s) % PART, s.length, PART), s.length]
        for lo, hi in itertools.pairwise(edges):
            yield functools.partial(work, lo, hi)

    def _read(self, name: str, s: Segment, lo: int, hi: int) -> tuple[Part, Writes]:
        """A part of a state, and what is to be written of it when it has been stepped."""
        array, at, first = self._arrays[name], self._at[s] + lo, self._first(s) + lo
        if isinstance(array, CodedOnDisk):
            stored = array.part(at, hi - lo).read()
            return Part(stored.codes, [stored.scale], first), [stored.write]
        if isinstance(array, Coded):
            piece = array.part(at, hi - lo)
            return Part(piece.codes, [piece.scale], first), []
        window = Window(array, at, hi - lo)
        values = window.read()
        return Part(values, [], first), [] if window.in_memory else [functools.partial(window.write, values)]

    def _gradient(self, s: Segment, lo: int, hi: int) -> torch.Tensor:
        return Window(self._state.acc, s.shard_begin + lo, hi - lo).read()

    def _target(self, s: Segment, lo: int, hi: int) -> tuple[torch.Tensor, list[torch.Tensor], Writes]:
        """(what is updated, what gets it in 16 bits, what is to be written then)."""
        st = self._state
        written: Writes = []
        if st.flat_on_disk is None:
            flat = (st.flat if st.flat_host is None else st.flat_host)[s.flat_begin + lo : s.flat_begin + hi]
        else:
            blocks = _Blocks(st.flat_on_disk, s.flat_begin + lo, s.flat_begin + hi)
            flat, written = blocks.values, [blocks.write]
        if st.master is None:
            return flat, [], written
        window = Window(st.master, s.shard_begin + lo, hi - lo)
        master = window.read()
        return master, [] if st.plan.parameters_as else [flat], [*written, functools.partial(window.write, master)]

    def _directed(self, r: Round) -> Iterator[Callable[[], Writes]]:
        """The momentum's parts of a round; fills `_lows` with what is to be made orthogonal."""
        for p in r.owner:
            group = self._groups[self._group_of[p]]
            for s in self._mine.get(p, ()):
                self._lows[s] = torch.empty(s.length, dtype=r.dtype, device="cpu")
                yield from self._of_parts(s, functools.partial(self._momentum_part, s, self._lows[s], group))

    def _momentum_part(self, s: Segment, lows: torch.Tensor, group: Mapping[str, Any], lo: int, hi: int) -> Writes:
        momentum, written = self._read("momentum_buffer", s, lo, hi)
        grads = [self._gradient(s, lo, hi)]
        self._step_momentum(group, [momentum], grads, [lows[lo:hi]], self._scale, self._counts.total)
        return written

    def _applied(self, s: Segment, update: torch.Tensor) -> Iterator[Callable[[], Writes]]:
        def part(lo: int, hi: int) -> Writes:
            target, lowps, written = self._target(s, lo, hi)
            self._apply_to([target], lowps, s, update[lo:hi])
            return written

        return self._of_parts(s, part)

    def _stepped(self, group: Mapping[str, Any], s: Segment) -> Iterator[Callable[[], Writes]]:
        def part(lo: int, hi: int) -> Writes:
            (m, first), (v, second) = (self._read(name, s, lo, hi) for name in MOMENTS)
            target, lowps, written = self._target(s, lo, hi)
            grads = [self._gradient(s, lo, hi)]
            self._adamw(group, [target], lowps, grads, ([m], [v]), self._scale, self._counts.of(s.param))
            return [*first, *second, *written]

        return self._of_parts(s, part)
