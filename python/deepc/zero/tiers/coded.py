"""Optimizer states that are kept as codes of 8 or 4 bits (optim/states/formats.py), in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import torch

from ...errors import UnsupportedError
from ...optim.states.formats import make_state, pack, unpack


class CodedPiece(NamedTuple):
    """The codes of one parameter's stretch. first: the number of its first element in the flat space of all ranks, so
    that blocks and random bits do not depend on the layout."""

    codes: torch.Tensor
    scale: torch.Tensor
    length: int
    first: int


class Coded:
    """A state array of a rank's share as codes: one piece for each stretch (begin, length, first) of it. A window reads
    and writes whole pieces, as fp32: what was read comes back as the same codes."""

    dtype = torch.float32

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
        whole = codes(sum((c.numel() + 63) // 64 * 64 for c, _ in sizes.values()))
        self.pieces: dict[int, CodedPiece] = {}
        at = 0
        for begin, length, first in stretches:
            one, scale = sizes[begin]
            self.pieces[begin] = CodedPiece(whole[at : at + one.numel()], scale, length, first)
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

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedError(
            f"{what} of '{self._name}', which is kept as {self._form} codes: it is no tensor; read and write it by"
            " deepc.view(p), or by its windows (zero/tiers/windows.py)"
        )

    def __getitem__(self, index: object) -> NoReturn:
        self._refuse("[...]")
