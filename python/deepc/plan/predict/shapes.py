"""Recomputation by budget in a dry run: on tensors that have shapes and no values."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...core.foreign.private import TorchDispatchMode
from .recompute.recomputation import Recomputation

_FLOPS, _BYTES = 1e11, 1e10  # of a second: only what blocks take beside each other counts
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear")


class WithoutValues(Recomputation):
    """What is measured is arithmetic instead of time: multiplications and bytes of what operators return. Ranks of one
    model see the same, and there is no disk: what goes there stays within the same budget."""

    def __init__(
        self,
        module: torch.nn.Module,
        budget: int | None,
        work: Work,
        blocks: list[torch.nn.Module] | None = None,
    ) -> None:
        self._work = work
        super().__init__(module, budget, blocks)

    def clock(self, args: tuple[Any, ...]) -> float:
        return self._work.seconds

    def storage(self, x: torch.Tensor) -> tuple[int, int] | None:
        if x.layout != torch.strided:
            return None
        s = x.untyped_storage()
        return s._cdata, s.nbytes()

    def differ(self, was: torch.Tensor, now: torch.Tensor) -> bool:
        return False  # nothing to compare: buffers that change without a version are small (batch norm's statistics)


class Work(TorchDispatchMode):
    """Counts what operators do inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        whole = [t for t in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(t, torch.Tensor)]
        given = [a for a in args if isinstance(a, torch.Tensor)]
        numel = sum(t.numel() for t in whole)
        name = func.overloadpacket.__name__
        self.seconds += sum(t.numel() * t.element_size() for t in whole) / _BYTES
        if name == "linear":  # as it is under inference_mode: weight and bias
            self.seconds += 2 * numel * given[1].shape[-1] / _FLOPS
        elif name in PRODUCTS and len(given) > 1:
            self.seconds += 2 * numel * given[-1].shape[-2] / _FLOPS
        elif "convolution" in name and len(given) > 1:
            self.seconds += 2 * numel * math.prod(given[1].shape[1:]) / _FLOPS
        elif "attention" in name and len(given) > 1 and given[0].dim() > 2:
            self.seconds += 4 * given[0].numel() * given[1].shape[-2] / _FLOPS
        return out
