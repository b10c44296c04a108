"""How a parameter is cut over the ranks of a tensor-parallel group: data only, and the way between a shard and the
whole.

A module whose parameters are shards says so in its attribute `cuts`, {name of the parameter in it: Cut}: it stays with
the module when that is copied, and parameters are found by their modules."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ...errors import ArgumentError

Stretch = tuple[int, int]  # [begin, end) of a dimension


@dataclass(frozen=True)
class Cut:
    """shape: of the whole. parts: for each rank of the group, in order, the stretches of dimension `dim` that it holds,
    one after the other (several where q, k and v lie in one weight: each is cut for itself). Over all ranks they cover
    the dimension exactly once. rank: whose shard this is."""

    shape: tuple[int, ...]
    dim: int
    parts: tuple[tuple[Stretch, ...], ...]
    rank: int

    def __post_init__(self) -> None:
        at = 0
        for begin, end in sorted(s for part in self.parts for s in part if s[0] < s[1]):
            if begin != at:
                break
            at = end
        if at != self.shape[self.dim] or not 0 <= self.rank < len(self.parts):
            raise ArgumentError(f"{self} does not cover dimension {self.dim} exactly once")

    @classmethod
    def even(cls, shape: Sequence[int], dim: int, ranks: int, rank: int, blocks: Sequence[int] = ()) -> Cut:
        """Every one of the consecutive `blocks` (sizes; none: the whole dimension) is cut into equal parts, as
        torch.chunk does: the last ones are smaller where the size does not divide."""
        sizes = tuple(blocks) or (shape[dim],)
        parts: list[list[Stretch]] = [[] for _ in range(ranks)]
        at = 0
        for size in sizes:
            each = -(-size // ranks)
            for r, part in enumerate(parts):
                part.append((at + min(size, r * each), at + min(size, (r + 1) * each)))
            at += size
        return cls(tuple(shape), dim, tuple(map(tuple, parts)), rank)

    @property
    def ranks(self) -> int:
        return len(self.parts)

    def width(self, rank: int) -> int:
        """Of dimension `dim` on a rank."""
        return sum(end - begin for begin, end in self.parts[rank])

    def local_shape(self, rank: int) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.width(rank), *self.shape[self.dim + 1 :])

    @cached_property
    def begins(self) -> tuple[int, ...]:
        """The first element of each rank's shard where all shards lie one after the other; at the end the number of
        all."""
        sizes = [math.prod(self.local_shape(r)) for r in range(self.ranks)]
        return tuple(sum(sizes[:r]) for r in range(self.ranks + 1))

    @property
    def is_plain(self) -> bool:
        """Whether the shards, one after the other, are the whole in its own order."""
        return self.dim == 0 and all(len(part) == 1 for part in self.parts)

    def same_order(self, other: Cut | None) -> bool:
        """Whether elements have the same places where all shards of `other` lie one after the other (None: in the whole
        itself)."""
        if other is None or other.is_plain:
            return self.is_plain
        return (self.shape, self.dim, self.parts) == (other.shape, other.dim, other.parts)

    def in_order(self, whole: torch.Tensor) -> torch.Tensor:
        """[n]: all shards one after the other."""
        return torch.cat([self.take(whole, r).view(-1) for r in range(self.ranks)])

    def from_order(self, shards: torch.Tensor) -> torch.Tensor:
        """The whole, from all shards one after the other."""
        whole = torch.empty(self.shape, dtype=shards.dtype)
        for r, (begin, end) in enumerate(zip(self.begins, self.begins[1:])):
            self.put(whole, shards[begin:end].view(self.local_shape(r)), r)
        return whole

    def to_json(self) -> dict[str, Any]:
        return {"dim": self.dim, "parts": [[list(s) for s in part] for part in self.parts]}

    @classmethod
    def from_json(cls, shape: tuple[int, ...], given: Any) -> Cut:
        """Checked; ArgumentError for what is no cut of a tensor of this shape."""
        try:
            parts = tuple(tuple((int(b), int(e)) for b, e in part) for part in given["parts"])
            dim = int(given["dim"])
        except (KeyError, TypeError, ValueError):
            raise ArgumentError(f"{str(given)[:200]} is no cut") from None
        if not 0 <= dim < len(shape) or not parts or any(not 0 <= b <= e for part in parts for b, e in part):
            raise ArgumentError(f"{str(given)[:200]} is no cut of a tensor of shape {shape}")
        return cls(shape, dim, parts, 0)

    def take(self, whole: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """The shard of `whole` of a rank (None: this one), in memory of its own."""
        part = self.parts[self.rank if rank is None else rank]
        return torch.cat([whole.narrow(self.dim, begin, end - begin) for begin, end in part], self.dim).contiguous()

    def put(self, whole: torch.Tensor, shard: torch.Tensor, rank: int) -> None:
        """`shard` of a rank goes to its place in `whole`."""
        at = 0
        for begin, end in self.parts[rank]:
            whole.narrow(self.dim, begin, end - begin).copy_(shard.narrow(self.dim, at, end - begin))
            at += end - begin


def cuts_of(model: torch.nn.Module) -> dict[int, Cut]:
    """id(parameter) -> how it is cut, of those of the model that are."""
    found: dict[int, Cut] = {}
    for module in model.modules():
        cuts: Mapping[str, Cut] = getattr(module, "cuts", None) or {}
        if isinstance(cuts, Mapping):
            found.update(
                {id(module._parameters[n]): c for n, c in cuts.items() if module._parameters.get(n) is not None}
            )
    return found
