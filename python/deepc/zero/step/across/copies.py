"""Gradients where every node has all states, cut over its ranks: a reducer inside the node, and for the steps that
average them over all ranks what its accumulators lack of the other nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ....comm.internode.crossing import gradient_codec, sum_over_nodes

if TYPE_CHECKING:
    from ....comm.groups import MultiNodeGroup
    from ....core import memory
    from ....plan.plan import Plan
    from ..reducers.base import Reducer, Tree


class CopiesReducer:
    """Reducer. keeps: sums stay those of this node; changes between steps. Else they become those of all nodes, equal
    bits on all, when the step's last pass ends or somebody looks."""

    tree: Tree | None = None

    def __init__(
        self, inside: Reducer, plan: Plan, group: MultiNodeGroup, acc: torch.Tensor, partial: torch.Tensor
    ) -> None:
        """inside: of this node's ranks, with the accumulators `acc` and `partial`, by `plan`. group: of all ranks."""
        self._inside, self._group, self._acc, self._partial = inside, group, acc, partial
        self._codec = gradient_codec(plan)
        self.keeps = self._norm = self._complete = False

    def borrow(self, lease: memory.Lease | None) -> None:
        self._inside.borrow(lease)

    def begin(self, assign: bool, norm: bool) -> None:
        if self._complete and not assign and self._group.node:
            self._acc.zero_()  # what is complete already is node 0's in what follows
        self._norm, self._complete = norm, False
        self._inside.begin(assign, norm and self.keeps)

    def add(self, index: int, grad: torch.Tensor) -> None:
        self._inside.add(index, grad)

    def released(self) -> list[int]:
        return self._inside.released()

    def finish(self) -> None:
        with self._group.errors():
            self._inside.finish()
        if self._norm and not self.keeps:
            self.settle()
            self._partial.copy_(torch.ops.deepc.norm_squared(self._acc))

    def settle(self) -> None:
        self._inside.settle()
        if not self.keeps and not self._complete:
            self._complete = True
            sum_over_nodes(self._group, self._acc, self._codec)

    def sums(self, begin: int, length: int) -> torch.Tensor:
        return self._inside.sums(begin, length)

    def gather(self, flat: torch.Tensor) -> None:
        with self._group.errors():
            self._inside.gather(flat)

    def stats(self) -> dict[str, int]:
        return self._inside.stats()

    def close(self) -> None:
        self._inside.close()
