"""Where ranks stand: a frozen mesh of axis sizes, and the way between a rank and its coordinates. Data only.

Axes from the slowest to the fastest: pipeline (pp), data (dp), sequence (sp) and tensor (tp) parallelism, so that the
ranks that talk most are neighbours. Experts (ep) are no axis of their own: they are spread over `ep` neighbours among
the ranks that hold the same part of a model (those of the data and the sequence axis), and replicated over the others
(DeepSpeed-MoE, arXiv:2201.05596, section 5)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import ArgumentError, UnsupportedError

AXES = ("pp", "dp", "sp", "tp")  # slowest first
NAMES = {
    "pp": "pipeline parallelism",
    "dp": "data parallelism",
    "sp": "sequence parallelism",
    "tp": "tensor parallelism",
    "ep": "expert parallelism",
}


class Coordinates(NamedTuple):
    """A rank's index along each axis; `ep` follows from `dp` and `sp`."""

    pp: int
    dp: int
    sp: int
    tp: int
    ep: int


def shares(n: int, ranks: int) -> tuple[int, ...]:
    """n things for `ranks`, as equal as can be, the first getting more."""
    return tuple(n // ranks + (r < n % ranks) for r in range(ranks))


@dataclass(frozen=True)
class Mesh:
    """Ranks 0 to `size` - 1 in the order of AXES, `ranks_per_node` consecutive ones on each node (0: all on one).
    ArgumentError for a size below 1, `ep` that does not divide `dp` x `sp`, or more ranks on a node than there are."""

    dp: int = 1
    pp: int = 1
    sp: int = 1
    tp: int = 1
    ep: int = 1
    ranks_per_node: int = 0

    def __post_init__(self) -> None:
        for axis in NAMES:
            if type(n := getattr(self, axis)) is not int or n < 1:
                raise ArgumentError(f"mesh: {axis} = {n!r} ({NAMES[axis]}) must be an integer of at least 1")
        if self.dp * self.sp % self.ep:
            of = f"dp = {self.dp}" if self.sp == 1 else f"dp x sp = {self.dp} x {self.sp}"
            raise ArgumentError(
                f"mesh: ep = {self.ep} does not divide {of}: experts are spread over the ranks that hold the same part"
                " of a model"
            )
        if self.ranks_per_node == 0:
            object.__setattr__(self, "ranks_per_node", self.size)
        if type(self.ranks_per_node) is not int or not 1 <= self.ranks_per_node <= self.size:
            raise ArgumentError(
                f"mesh: ranks_per_node = {self.ranks_per_node!r} must be an integer from 1 to the {self.size} rank(s)"
            )
        if self.size % self.ranks_per_node:
            raise ArgumentError(
                f"mesh: {self.ranks_per_node} ranks on each node don't make {self.size}; the number of ranks must be a"
                " multiple of ranks_per_node"
            )

    @classmethod
    def of(cls, sizes: Mapping[str, int], ranks_per_node: int = 0) -> Mesh:
        """From {"dp": 4, "tp": 2}. ArgumentError for a name that is no axis."""
        if unknown := [a for a in sizes if a not in NAMES]:
            raise ArgumentError(f"mesh: {unknown[0]!r} is no axis; the axes are {', '.join(NAMES)}")
        return cls(**dict(sizes), ranks_per_node=ranks_per_node)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes in the order of AXES."""
        return tuple(getattr(self, a) for a in AXES)

    @property
    def size(self) -> int:
        """Ranks."""
        return self.pp * self.dp * self.sp * self.tp

    @property
    def nodes(self) -> int:
        return self.size // self.ranks_per_node

    def node_of(self, rank: int) -> int:
        return self._checked(rank) // self.ranks_per_node

    def coordinates(self, rank: int) -> Coordinates:
        """ArgumentError for a rank that the mesh has not."""
        rest, at = self._checked(rank), []
        for n in reversed(self.shape):
            rest, i = divmod(rest, n)
            at.append(i)
        pp, dp, sp, tp = reversed(at)
        return Coordinates(pp, dp, sp, tp, (dp * self.sp + sp) % self.ep)

    def rank(self, *, pp: int = 0, dp: int = 0, sp: int = 0, tp: int = 0) -> int:
        """The rank at these coordinates. ArgumentError if one is outside of its axis."""
        out = 0
        for axis, i, n in zip(AXES, (pp, dp, sp, tp), self.shape):
            if not 0 <= i < n:
                raise ArgumentError(f"mesh: {axis} coordinate {i} is not from 0 to {n - 1}")
            out = out * n + i
        return out

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` in this axis only, itself included, in order. "ep": those among which one
        copy of the experts is spread. ArgumentError for another name."""
        at = self.coordinates(rank)._asdict()
        ep = at.pop("ep")
        if axis == "ep":
            first = at["dp"] * self.sp + at["sp"] - ep
            return self.replicas(rank)[first : first + self.ep]
        if axis not in AXES:
            raise ArgumentError(f"mesh: {axis!r} is no axis; the axes are {', '.join(NAMES)}")
        return tuple(self.rank(**{**at, axis: i}) for i in range(getattr(self, axis)))

    def replicas(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same part of the model as `rank`, in order: those that differ from it along the data
        and the sequence axis. ZeRO's states are partitioned over them."""
        at = self.coordinates(rank)
        return tuple(self.rank(pp=at.pp, dp=d, sp=s, tp=at.tp) for d in range(self.dp) for s in range(self.sp))

    def holders(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same part of the model and the same experts as `rank`, in order."""
        mine = self.coordinates(rank).ep
        return tuple(r for r in self.replicas(rank) if self.coordinates(r).ep == mine)

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """All groups along an axis, by their first rank: each rank is in one."""
        return _groups(self, axis)

    def require_data_parallel(self) -> Mesh:
        """This mesh; UnsupportedError if another axis than dp is longer than 1."""
        for axis in NAMES:
            if axis != "dp" and getattr(self, axis) > 1:
                raise UnsupportedError(
                    f"mesh: {axis} = {getattr(self, axis)} asks for {NAMES[axis]}, which deepc does not have yet; use"
                    f" {axis} = 1 and more data-parallel ranks"
                )
        return self

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.size:
            raise ArgumentError(f"mesh: rank {rank} is not from 0 to {self.size - 1}")
        return rank

    def array(self) -> list[list[list[list[int]]]]:
        """The ranks nested as [pp][dp][sp][tp]: what other libraries make their meshes of."""
        pp, dp, sp, tp = self.shape
        return [
            [[[self.rank(pp=a, dp=b, sp=c, tp=d) for d in range(tp)] for c in range(sp)] for b in range(dp)]
            for a in range(pp)
        ]

    def __str__(self) -> str:
        sizes = " x ".join(f"{a} {getattr(self, a)}" for a in (*AXES, "ep") if getattr(self, a) > 1 or a == "dp")
        return f"{sizes}, {self.ranks_per_node} rank{'s' * (self.ranks_per_node > 1)} a node"


@functools.lru_cache(maxsize=64)
def _groups(mesh: Mesh, axis: str) -> tuple[tuple[int, ...], ...]:
    """Kept: a step may ask, and it is work for each rank that there is."""
    return tuple(sorted({mesh.group(axis, r) for r in range(mesh.size)}))
