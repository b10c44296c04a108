"""In which order ZeRO-3's streamed mode uses its units, and what follows: what is gathered ahead, what goes. Frozen
data, made without tensors and processes; the rules are C's (zero/prefetch.c)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from ..core import lib as _lib
from ..core.lib import C, check


@dataclass(frozen=True)
class Order:
    """The recorded uses of a pass, and what the C core made of them (zero/prefetch.c): per use, what goes before it,
    and what is gathered ahead while it runs; keep: whether its unit stays after it. repeats: the same pass follows, and
    its first units are among those that are gathered ahead."""

    uses: tuple[int, ...]
    drop: tuple[tuple[int, ...], ...]
    ahead: tuple[tuple[int, ...], ...]
    keep: tuple[bool, ...]
    repeats: bool = False


def order_of(
    uses: Sequence[int], elems: Sequence[int], prefetch: int, max_live: int, max_reuse: int, repeats: bool = False
) -> Order:
    """The prefetch order of recorded `uses` of units with `elems` elements, under the limits of zero/zero.h
    (dc_zero_prefetch). repeats: pass after pass is the same. Where they don't all fit then, units are kept only as
    long as there is room beside them for what is gathered ahead: those that fill the room would let nothing come."""
    once = len(uses)
    if repeats:
        if sum(elems[u] for u in set(uses)) > max_live:
            max_reuse = min(max_reuse, max(0, max_live - prefetch - max(elems[u] for u in uses)))
        uses = [*uses, *uses]
    n, units = len(uses), len(elems)
    count = ctypes.c_int64()
    actions = (_lib.Action * max(1, 3 * n))()
    limits = [min(x, (1 << 62) - 1) for x in (prefetch, max_live, max_reuse)]
    use, size = (ctypes.c_int64 * max(1, n))(*uses), (ctypes.c_int64 * max(1, units))(*elems)
    check(C.dc_zero_prefetch(use, n, size, units, *limits, actions, 3 * n, ctypes.byref(count)))
    drop: list[tuple[int, ...]] = []
    ahead: list[tuple[int, ...]] = []
    keep: list[bool] = []
    dropped: list[int] = []
    gathered: list[int] = []
    for a in actions[: count.value]:
        if a.kind == 1:
            gathered.append(a.unit)
        elif a.kind == 3 and keep and a.unit == uses[len(keep) - 1] and keep[-1] and not gathered and not dropped:
            keep[-1] = False
        elif a.kind == 3:
            dropped.append(a.unit)
        else:
            drop.append(tuple(dropped))
            ahead.append(tuple(u for u in gathered if u != a.unit))
            keep.append(True)
            dropped, gathered = [], []
    return Order(tuple(uses[:once]), tuple(drop[:once]), tuple(ahead[:once]), tuple(keep[:once]), repeats)
