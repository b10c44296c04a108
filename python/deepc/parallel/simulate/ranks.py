"""A virtual rank's memory: weights, gradients and states, cut as a real run cuts them (plan/layout.py)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...optim import AdamW
from ...plan.layout import Layout
from .collectives import copied
from .reference import DECAY, LR


class Rank:
    """names: (layer, weight) in flat order; whole: their values; experts: those that are experts'. world: ranks that
    hold the same, of which this is the index-th. `flat` has the whole weights between steps, with stage 3 `shard`
    alone is kept. What only fills up the flat space and its shards is cut as well, but not there: of models so small
    that is most of them."""

    def __init__(
        self,
        names: list[tuple[str, str]],
        whole: Mapping[tuple[str, str], torch.Tensor],
        experts: frozenset[tuple[str, str]],
        world: int,
        index: int,
        stage: int,
    ) -> None:
        self.names, self.shapes, self.stage = names, [whole[n].shape for n in names], stage
        self.layout = Layout([whole[n].numel() for n in names], world, 1 << 20)
        self.experts = [
            (at, n) for at, n, name in zip(self.layout.offsets, self.layout.numels, names) if name in experts
        ]
        self.used = self.layout.offsets[-1] + self.layout.numels[-1]
        flat = torch.zeros(self.used, dtype=torch.float32, device="cpu")
        for at, name in zip(self.layout.offsets, names):
            copied(flat, at, whole[name].contiguous(), 0, whole[name].numel())
        slices = [(s.flat_begin, s.shard_begin, s.length) for s in self.layout.slices(index)]
        if stage == 0:
            slices = [(0, 0, self.used)]
        self.slices = [(begin, at, min(n, self.used - begin)) for begin, at, n in slices if begin < self.used]
        self.shard = torch.nn.Parameter(
            torch.zeros(sum(n for _, _, n in self.slices), dtype=torch.float32, device="cpu")
        )
        for begin, at, n in self.slices:
            copied(self.shard.data, at, flat, begin, n)
        self.optimizer = AdamW([self.shard], lr=LR, weight_decay=DECAY) if self.slices else None
        self.flat = flat if stage < 3 else None
        self.grad: torch.Tensor | None = None
        self.leaves: dict[str, dict[str, torch.Tensor]] = {}

    @property
    def state_bytes(self) -> int:
        """Between steps, with what fills up: weights, gradients, two moments."""
        whole, shard = 4 * self.layout.total, 4 * self.layout.shard_elems
        weights, gradients, moments = (shard if self.stage >= least else whole for least in (3, 2, 1))
        return weights + gradients + 2 * moments

    @property
    def nbytes(self) -> int:
        """Of its weights, without what fills up the flat space."""
        return 4 * sum(self.layout.numels)

    @property
    def expert_nbytes(self) -> int:
        return 4 * sum(n for _, n in self.experts)

    def lend(self, flat: torch.Tensor) -> None:
        """Leaves for autograd, as views of the whole weights, and room for their gradients."""
        self.leaves, self.grad = {}, torch.zeros(self.used, dtype=torch.float32, device="cpu")
        for at, (layer, name), shape in zip(self.layout.offsets, self.names, self.shapes):
            view = flat[at : at + shape.numel()].view(shape)
            self.leaves.setdefault(layer, {})[name] = view.detach().requires_grad_()

    def collect(self) -> None:
        """Gradients of a micro-batch are added to what there is."""
        assert self.grad is not None
        for at, (layer, name) in zip(self.layout.offsets, self.names):
            leaf = self.leaves[layer][name]
            if leaf.grad is not None:
                self.grad[at : at + leaf.numel()] += leaf.grad.flatten()
                leaf.grad = None

    def take_gradients(self) -> torch.Tensor:
        """Those of all micro-batches. What was lent goes back."""
        assert self.grad is not None
        found, self.grad, self.leaves = self.grad, None, {}
        return found

    def update(self, gradients: torch.Tensor) -> None:
        """gradients: of the whole flat space."""
        if self.optimizer is None:
            return
        self.shard.grad = torch.empty_like(self.shard)
        for begin, at, n in self.slices:
            copied(self.shard.grad, at, gradients, begin, n)
        self.optimizer.step()
        self.shard.grad = None

    def gather(self, holders: list[Rank], flat: torch.Tensor) -> torch.Tensor:
        """flat, filled with the weights that the ranks which hold the same have in their shards."""
        for other in [self] if self.stage == 0 else holders:
            for begin, at, n in other.slices:
                copied(flat, begin, other.shard.data, at, n)
        return flat
