"""What a search may choose: the sizes and ways to train that are given, and those that are free."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ....core import lib as _lib
from ....errors import ArgumentError
from ...schedule import KINDS

OFFLOADS = ("none", "cpu", "nvme", "nvme+parameters")
SIZES = ("dp", "tp", "pp", "sp", "ep", "micro")
MOST = 1 << 17  # DC_PLANNER_MAX_RANKS: of ranks, of a layout's sizes


@dataclass(frozen=True)
class Space:
    """What may be chosen: sizes (0: any), and of ZeRO stages, offloads and schedules those that are listed. uneven:
    replicas on unequal nodes may take different numbers of micro-batches. Stage 2 is left out where nobody asks for it:
    here it holds and moves what stage 1 does (docs/design.md)."""

    dp: int = 0
    tp: int = 0
    pp: int = 0
    sp: int = 0
    ep: int = 0
    micro: int = 0
    stages: Collection[int] = (0, 1, 3)
    offloads: Collection[str] = OFFLOADS
    recomputes: Collection[bool] = (False, True)
    schedules: Collection[str] = KINDS
    uneven: bool = True
    exhaustive: bool = False

    def fixed(self) -> dict[str, int]:
        """The sizes that are not to be chosen."""
        return {n: getattr(self, n) for n in SIZES if getattr(self, n)}

    def core(self) -> _lib.PlannerSpace:
        """As C takes it. ArgumentError for a name or a size that is none, and for a list that leaves nothing."""
        for name in SIZES:
            size = getattr(self, name)
            if type(size) is not int or not 0 <= size <= MOST:
                raise ArgumentError(f"{name} {size!r} must be a whole number from 1 to {MOST}, or 0 for any")
        for kind, given, known in (
            ("ZeRO stage", self.stages, (0, 1, 2, 3)),
            ("offload", self.offloads, OFFLOADS),
            ("recomputation", self.recomputes, (False, True)),
            ("schedule", self.schedules, KINDS),
        ):
            if unknown := [x for x in given if x not in known]:
                raise ArgumentError(f"{kind} {unknown[0]!r} is none of {', '.join(map(str, known))}")
            if not given:
                raise ArgumentError(f"{kind}: the list of what may be chosen is empty; it may have {known}")

        def mask(given: Collection[Any], known: Collection[Any]) -> int:
            return sum(1 << i for i, k in enumerate(known) if k in given)

        return _lib.PlannerSpace(
            **{k: getattr(self, k) for k in SIZES},
            stages=mask(self.stages, range(4)),
            offloads=mask(self.offloads, OFFLOADS),
            recomputes=mask(self.recomputes, (False, True)),
            schedules=mask(self.schedules, KINDS),
            uneven=int(self.uneven),
            exhaustive=int(self.exhaustive),
        )
