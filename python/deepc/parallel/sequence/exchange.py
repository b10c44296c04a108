"""The exchange before and after attention: from a part of the positions with all heads to all positions with a part of
the heads, and back. Each rank sends (ranks - 1) / ranks of its tensors once, however many ranks there are."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...errors import ArgumentError
from ...plan.mesh import Mesh
from ..axes import axis_process_group


def sequence_group(size: int, tensor: int = 1, backend: str = "deepc") -> Any:
    """The process group of this rank's neighbours that share every sequence: `size` ranks, `tensor` apart, as
    `sequence_parallel_size` of the configuration has them. Made once. Collective over all ranks. ArgumentError for a
    size that does not divide the number of ranks."""
    world = dist.get_world_size()
    if size < 1 or world % (size * tensor):
        raise ArgumentError(
            f"sequence parallelism over {size} ranks: {world} ranks can't be shared out in groups of {size * tensor};"
            " use a size that divides them"
        )
    return axis_process_group(Mesh(dp=world // (size * tensor), sp=size, tp=tensor), "sp", backend)


class Way(NamedTuple):
    """Of one tensor. scatter, gather: the dimension that is given away in parts, and the one that gets whole.
    given[r], got[r]: what of these dimensions is rank r's."""

    scatter: int
    gather: int
    given: tuple[int, ...]
    got: tuple[int, ...]

    def back(self) -> Way:
        return Way(self.gather, self.scatter, self.got, self.given)


def exchange(tensors: Sequence[torch.Tensor], ways: Sequence[Way], group: Any) -> tuple[torch.Tensor, ...]:
    """Each tensor [..., gather: got[me], ..., scatter: sum(given), ...] comes out as [..., gather: sum(got), ...,
    scatter: given[me], ...], in one call of all-to-all for all of them; differentiable. Collective over the group;
    tensors of one device; those of different dtypes travel in one that holds all of them."""
    if dist.get_world_size(group) == 1:
        return tuple(tensors)
    return _Exchange.apply(group, tuple(ways), *tensors)  # type: ignore[no-any-return,no-untyped-call]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Any, ways: tuple[Way, ...], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.ways = group, ways
        return _exchanged(tensors, ways, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, *_exchanged(gradients, tuple(way.back() for way in ctx.ways), ctx.group)


def _exchanged(tensors: Sequence[torch.Tensor], ways: Sequence[Way], group: Any) -> tuple[torch.Tensor, ...]:
    ranks, me = dist.get_world_size(group), dist.get_rank(group)

    def sent(t: torch.Tensor, way: Way, to: int) -> list[int]:
        return [way.given[to] if d == way.scatter else n for d, n in enumerate(t.shape)]

    def received(t: torch.Tensor, way: Way, source: int) -> list[int]:
        sizes = [way.given[me] if d == way.scatter else n for d, n in enumerate(t.shape)]
        sizes[way.gather] = way.got[source]
        return sizes

    pairs = list(zip(tensors, ways))
    out_counts = [sum(math.prod(sent(t, way, r)) for t, way in pairs) for r in range(ranks)]
    in_counts = [sum(math.prod(received(t, way, r)) for t, way in pairs) for r in range(ranks)]
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors))
    out = tensors[0].new_empty(sum(out_counts), dtype=dtype)
    at = 0
    for r in range(ranks):
        for t, way in pairs:
            sizes = sent(t, way, r)
            begin, n = sum(way.given[:r]), math.prod(sizes)
            out[at : at + n].view(sizes).copy_(t.narrow(way.scatter, begin, way.given[r]))
            at += n
    got = out.new_empty(sum(in_counts))
    dist.all_to_all_single(got, out, in_counts, out_counts, group=group)
    whole = [t.new_empty([sum(way.got) if d == way.gather else n for d, n in enumerate(received(t, way, 0))])
             for t, way in pairs]  # fmt: skip
    starts = [list(accumulate(way.got, initial=0)) for way in ways]
    at = 0
    for r in range(ranks):
        for i, (t, way) in enumerate(pairs):
            sizes = received(t, way, r)
            n = math.prod(sizes)
            whole[i].narrow(way.gather, starts[i][r], way.got[r]).copy_(got[at : at + n].view(sizes))
            at += n
    return tuple(whole)
