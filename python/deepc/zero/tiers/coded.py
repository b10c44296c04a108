"""Optimizer states that are kept as codes of 8 or 4 bits (optim/states/formats.py), in memory or on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import torch

from ...core.dtypes import UNIT
from ...errors import UnsupportedError
from ...offload import Cell, Stream
from ...optim.states.formats import SCALE, make_state, pack, scale_units, unpack


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
    _where = ""

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

    def __len__(self) -> int:
        return self._numel

    def nbytes(self) -> int:
        return sum(p.codes.numel() + 4 * p.scale.numel() for p in self.pieces.values())

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


class CodedOnDisk(_Codes):
    """The same where codes and scales are arrays of a stream: one scale for each unit, of which those are used that a
    block begins in."""

    _where = " on disk"

    def __init__(self, stream: Stream, name: str, form: str, stretches: Sequence[tuple[int, int, int]]) -> None:
        """stretches: (begin, length, first) of each piece."""
        self._stream, self._name, self._form = stream, name, form
        self._pieces = {begin: (length, first) for begin, length, first in stretches}

    def __len__(self) -> int:
        return self._stream.elems

    def _first(self, begin: int, length: int) -> int:
        piece = self._pieces.get(begin)
        if piece is None or piece[0] != length:
            self._refuse(f"[{begin}:{begin + length}]")
        return piece[1]

    def read(self, begin: int, out: torch.Tensor) -> torch.Tensor:
        """Fills the fp32 CPU tensor `out` with the piece that begins at `begin`; returns it."""
        n = out.numel()
        first = self._first(begin, n)
        codes, _ = make_state(n, self._form, first)
        self._stream.read(self._name, begin // self._stream.per[self._name], codes)
        units = self._stream.read(self._name + SCALE, begin // UNIT, torch.empty(-(-n // UNIT)))
        scale = units[scale_units(first, n, self._form)]
        return out.copy_(unpack(codes, scale, n, self._form, self._name, first))

    def write(self, begin: int, value: torch.Tensor) -> None:
        """The piece that begins at `begin` is `value` from now on, to nearest."""
        n = value.numel()
        first = self._first(begin, n)
        codes, scale = make_state(n, self._form, first)
        pack(codes, scale, value, self._form, self._name, first)
        self._stream.write(self._name, begin // self._stream.per[self._name], codes)
        units = torch.zeros(-(-n // UNIT))
        units[scale_units(first, n, self._form)] = scale
        self._stream.write(self._name + SCALE, begin // UNIT, units)
