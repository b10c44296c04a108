"""Optimizer states that are kept as codes of 8 or 4 bits (optim/states/formats.py), in memory or on disk."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import torch

from ...core.dtypes import UNIT
from ...errors import UnsupportedError
from ...offload import Cell, Stream
from ...optim.states.formats import SCALE, make_state, pack, scale_units, state_sizes, unpack


class CodedPiece(NamedTuple):
    """The codes of one parameter's stretch, where the states are. first: the number of its first element in the flat
    space of all ranks, so that blocks and random bits do not depend on the layout."""

    codes: torch.Tensor
    scale: torch.Tensor
    length: int
    first: int


class UnitScales(NamedTuple):
    """Scales of a stretch of codes in a stream's cell: `scale`, which a step reads and writes, comes from `units` at
    `places`."""

    units: torch.Tensor
    places: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def of(cls, cell: Cell, name: str, own: int, n: int, first: int, form: str) -> UnitScales:
        """Those of state `name`, elements [own, own + n) of the share; first: the number of the first one."""
        at = (own - cell.begin) // UNIT
        units, places = cell.tensor(name + SCALE)[at : at - (-n // UNIT)], scale_units(first, n, form)
        return cls(units, places, units[places])

    def put(self) -> None:
        """Back into the cell."""
        self.units[self.places] = self.scale


class _Codes:
    """A state that is kept as codes, `_form`. A window reads and writes whole pieces, as fp32: what was read comes back
    as the same codes."""

    dtype = torch.float32
    _name: str
    _form: str
    _begins: list[int]  # of pieces, in order
    _where = ""

    def _piece_of(self, begin: int) -> int:
        """Where the piece begins that element `begin` is in."""
        return self._begins[bisect.bisect_right(self._begins, begin) - 1]

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedError(
            f"{what} of '{self._name}', which is kept as {self._form} codes{self._where}: it is no tensor; read and"
            " write it by deepc.view(p), or by its windows (zero/tiers/windows.py)"
        )

    def __getitem__(self, index: object) -> NoReturn:
        self._refuse("[...]")


class Coded(_Codes):
    """A state array of a rank's share as codes: one piece for each stretch (begin, length, first) of it."""

    def __init__(
        self,
        name: str,
        form: str,
        numel: int,
        stretches: Sequence[tuple[int, int, int]],
        codes: Callable[[int], torch.Tensor],
    ) -> None:
        """codes: makes the zeroed bytes of all pieces."""
        self._name, self._form, self._numel = name, form, numel
        sizes = {begin: make_state(length, form, first) for begin, length, first in stretches}
        whole = codes(sum((c.numel() + 63) // 64 * 64 for c, _ in sizes.values()))  # its device is the scales' too
        self.pieces: dict[int, CodedPiece] = {}
        at = 0
        for begin, length, first in stretches:
            one, scale = sizes[begin]
            self.pieces[begin] = CodedPiece(whole[at : at + one.numel()], scale.to(whole.device), length, first)
            at += (one.numel() + 63) // 64 * 64
        self._begins = sorted(self.pieces)

    def __len__(self) -> int:
        return self._numel

    def nbytes(self) -> int:
        return sum(p.codes.numel() + 4 * p.scale.numel() for p in self.pieces.values())

    def part(self, begin: int, numel: int) -> CodedPiece:
        """Elements [begin, begin + numel), whole blocks of a piece, where they lie."""
        piece = self.pieces[at := self._piece_of(begin)]
        size, scales = state_sizes(begin - at, self._form, piece.first)
        first = piece.first + begin - at
        n, m = state_sizes(numel, self._form, first)
        return CodedPiece(piece.codes[size : size + n], piece.scale[scales : scales + m], numel, first)

    def _whole(self, begin: int, length: int) -> CodedPiece:
        piece = self.pieces.get(begin)
        if piece is None or piece.length != length:
            self._refuse(f"[{begin}:{begin + length}]")
        return piece

    def read(self, begin: int, out: torch.Tensor) -> torch.Tensor:
        """Fills the fp32 CPU tensor `out` with the piece that begins at `begin`; returns it."""
        p = self._whole(begin, out.numel())
        return out.copy_(unpack(p.codes, p.scale, p.length, self._form, self._name, p.first))

    def write(self, begin: int, value: torch.Tensor) -> None:
        """The piece that begins at `begin` is `value` from now on, to nearest."""
        p = self._whole(begin, value.numel())
        pack(p.codes, p.scale, value, self._form, self._name, p.first)


class StoredCodes:
    """Codes and scales of `numel` elements from `begin` on of a stream's array `array`: whole blocks, but for a piece's
    own ends. first: the number of the first one. One scale on disk for each unit, of which those are used that a block
    begins in."""

    def __init__(self, stream: Stream, array: str, form: str, begin: int, numel: int, first: int) -> None:
        self._stream, self._array, self._numel, self.first = stream, array, numel, first
        self._at, self._unit = begin // stream.per[array], begin // UNIT
        self._places = scale_units(first, numel, form)
        self.codes, self.scale = make_state(numel, form, first)

    def read(self) -> StoredCodes:
        """Fills `codes` and `scale`."""
        self._stream.read(self._array, self._at, self.codes)
        self.scale.copy_(self._stream.read(self._array + SCALE, self._unit, self._units())[self._places])
        return self

    def write(self) -> None:
        """They go to the disk."""
        units = self._units()
        units[self._places] = self.scale
        self._stream.write(self._array, self._at, self.codes)
        self._stream.write(self._array + SCALE, self._unit, units)

    def _units(self) -> torch.Tensor:
        return torch.zeros(-(-self._numel // UNIT), dtype=torch.float32, device="cpu")


class CodedOnDisk(_Codes):
    """The same where codes and scales are arrays of a stream."""

    _where = " on disk"

    def __init__(
        self, stream: Stream, name: str, form: str, stretches: Sequence[tuple[int, int, int]], array: str = ""
    ) -> None:
        """stretches: (begin, length, first) of each piece. array: the stream's, where it is not called `name`."""
        self._stream, self._name, self._form, self._array = stream, name, form, array or name
        self._pieces = {begin: (length, first) for begin, length, first in stretches}
        self._begins = sorted(self._pieces)

    def __len__(self) -> int:
        return self._stream.elems

    def part(self, begin: int, numel: int) -> StoredCodes:
        """Elements [begin, begin + numel), whole blocks of a piece."""
        at = self._piece_of(begin)
        return StoredCodes(self._stream, self._array, self._form, begin, numel, self._pieces[at][1] + begin - at)

    def _whole(self, begin: int, length: int) -> StoredCodes:
        piece = self._pieces.get(begin)
        if piece is None or piece[0] != length:
            self._refuse(f"[{begin}:{begin + length}]")
        return self.part(begin, length)

    def read(self, begin: int, out: torch.Tensor) -> torch.Tensor:
        """Fills the fp32 CPU tensor `out` with the piece that begins at `begin`; returns it."""
        stored = self._whole(begin, out.numel()).read()
        return out.copy_(unpack(stored.codes, stored.scale, out.numel(), self._form, self._name, stored.first))

    def write(self, begin: int, value: torch.Tensor) -> None:
        """The piece that begins at `begin` is `value` from now on, to nearest."""
        stored = self._whole(begin, value.numel())
        pack(stored.codes, stored.scale, value, self._form, self._name, stored.first)
        stored.write()
