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
from ...plan.mesh import shares as as_equal_as_can_be

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
        torch.chunk does: the last ones are smaller where the size does not divide. Where torch.chunk would leave ranks
        with nothing, all have as many as can be, the first ones one more."""
        widths = []
        for size in tuple(blocks) or (shape[dim],):
            each = -(-size // ranks)
            chunks = [max(0, min(size - r * each, each)) for r in range(ranks)]
            widths.append(chunks if all(chunks) else as_equal_as_can_be(size, ranks))
        return cls._of_widths(shape, dim, rank, widths)

    @classmethod
    def shared(
        cls, shape: Sequence[int], dim: int, shares: Sequence[int], rank: int, blocks: Sequence[int] = ()
    ) -> Cut:
        """Every block is cut in proportion to `shares`, one of each rank: 3 heads over ranks of which the first has two
        are (2, 1). ArgumentError for a block that can't be."""
        total, widths = sum(shares), []
        for size in tuple(blocks) or (shape[dim],):
            if uneven := [n for n in shares if size * n % total]:
                raise ArgumentError(
                    f"{size} features can't be cut as {tuple(shares)}: {uneven[0]} of {total} is no number of them"
                )
            widths.append([size * n // total for n in shares])
        return cls._of_widths(shape, dim, rank, widths)

    @classmethod
    def _of_widths(cls, shape: Sequence[int], dim: int, rank: int, widths: Sequence[Sequence[int]]) -> Cut:
        """widths: of each block, what each rank has."""
        parts: list[list[Stretch]] = [[] for _ in widths[0]]
        at = 0
        for block in widths:
            for part, width in zip(parts, block):
                part.append((at, at + width))
                at += width
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
        whole = torch.empty(self.shape, dtype=shards.dtype, device="cpu")
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


@dataclass(frozen=True)
class Heads:
    """How the heads of an attention are shared. queries: how many of the query heads each rank has, in their order.
    keys: for each rank, the heads of keys and values that those read, each once per `groups(rank)` of its query heads;
    None: keys and values are cut as the queries are."""

    queries: tuple[int, ...]
    keys: tuple[tuple[int, ...], ...] | None = None

    @classmethod
    def over(cls, queries: int, keys: int, ranks: int) -> Heads:
        """Of so many heads of queries, and of keys and values, which divide the queries' (1: every head has its own).
        A rank has whole heads of keys with all of their queries, the first ones one more. Where there are fewer of
        these than ranks, the queries are shared alone, and each rank reads the heads of keys that it needs: several
        ranks the same. ArgumentError for fewer heads of queries than ranks."""
        if queries < ranks:
            raise ArgumentError(
                f"{queries} head{'s' * (queries > 1)} of queries can't be shared by {ranks} tensor-parallel ranks; use"
                f" at most {queries}"
            )
        each = queries // keys
        if keys >= ranks:
            return cls(tuple(each * n for n in as_equal_as_can_be(keys, ranks)))
        if ranks % keys == 0:  # the queries of one head of keys on each rank
            counts = as_equal_as_can_be(each, ranks // keys) * keys
        else:
            counts = as_equal_as_can_be(queries, ranks)
        read, at = [], 0
        for n in counts:
            wanted = [h // each for h in range(at, at + n)]
            heads = sorted(set(wanted))
            equal = len({wanted.count(h) for h in heads}) == 1
            read.append(tuple(heads if equal else wanted))
            at += n
        return cls(counts, tuple(read))

    def groups(self, rank: int) -> int:
        """How many of its query heads read each head of keys and values that a rank has (if `keys` says which)."""
        assert self.keys is not None
        return self.queries[rank] // len(self.keys[rank])


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
