"""Random numbers of tensor-parallel ranks: equal where activations are, different inside of regions.

Outside, all ranks draw from torch's default generator in the same state. At the entrance of a region one number is
drawn from it (so it goes on equally), and with the rank seeds what is drawn inside; at the exit the state from before
comes back. Nothing else is kept: torch.utils.checkpoint, which restores the default generator, draws the same again."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn

    from .group import TensorGroup

_STEP = 0x9E3779B97F4A7C15  # of splitmix64: neighbouring ranks get distant seeds


def same_state(group: TensorGroup) -> None:
    """All ranks' default generator gets the first one's state. Collective."""
    state = torch.get_rng_state()
    group.spread(state)
    torch.set_rng_state(state)


class Inside:
    """The generator's state while a region runs. drops: modules of the region whose dropout may be on."""

    def __init__(self, owner: nn.Module, group: TensorGroup) -> None:
        self._owner, self._rank = owner, group.rank
        self._outside: torch.Tensor | None = None
        self._inside: torch.Tensor | None = None  # while something steps out
        self._seed: int | None = None  # of the generator inside

    # Looked up when they are asked for: while `owner` is copied, its copy has nothing yet.
    @functools.cached_property
    def _drops(self) -> list[nn.Module]:
        return [m for m in self._owner.modules() if isinstance(m, torch.nn.Dropout)]

    @functools.cached_property
    def _rates(self) -> list[str]:
        return [n for n, v in vars(self._owner).items() if "dropout" in n and isinstance(v, float)]

    def _draws(self) -> bool:
        rates = any(getattr(self._owner, n) > 0 for n in self._rates)
        return self._owner.training and (rates or any(getattr(m, "p", 0.0) > 0 for m in self._drops))

    def enter(self) -> None:
        # What is kept of a pass that was broken off (a recomputation's end) is not wanted any more.
        self._outside = None
        if self._draws():
            seed = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
            self._outside = torch.get_rng_state()
            torch.default_generator.manual_seed((seed + _STEP * (self._rank + 1)) % 2**64 - 2**63)
            self._seed = torch.initial_seed()

    def leave(self) -> None:
        if self._outside is not None:
            torch.set_rng_state(self._outside)
            self._outside = None

    def break_off(self) -> None:
        """A forward raised, maybe inside: leaves. Not what a recomputation has entered, which torch.utils.checkpoint
        has left: the generator has another seed then."""
        if torch.initial_seed() == self._seed:
            self.leave()
        self._outside = self._inside = None

    def step_out(self) -> None:
        """What follows, up to step_in, draws as outside, where ranks draw alike."""
        if self._outside is not None:
            self._inside = torch.get_rng_state()
            torch.set_rng_state(self._outside)

    def step_in(self) -> None:
        if self._inside is not None and self._outside is not None:
            self._outside = torch.get_rng_state()
            torch.set_rng_state(self._inside)
        self._inside = None
