"""What autograd saves of a unit's storage: a recipe (which view, which version), unpacked by gathering the unit, so
that units come exactly when a node of backward reads them, whatever the graph looks like. Torch's private functions for
saved tensors are called here and nowhere else.

The price of recipes: as under every saved-tensor hook, torch does not notice that an operator's own *result*, saved for
its backward, was changed in place; for inputs it is checked here."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...core.foreign import private
from ...core.ops import name_of
from ..parameters.param import FlatUnit, version_of


@dataclass(frozen=True)
class _Recipe:
    """A saved view of a unit's storage. param: place in the unit; offset and stride in elements of `dtype`."""

    unit: FlatUnit
    param: int
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    version: int


class SavedTensors:
    """Hooks that stand on top of those of whoever was there before (checkpointing, offloading of activations) and hand
    the rest on to them. name_of: a parameter's name; gather: called inside backward before a unit's storage is read."""

    def __init__(
        self,
        units: Sequence[FlatUnit],
        name_of: Callable[[torch.nn.Parameter], str],
        gather: Callable[[FlatUnit], None],
    ) -> None:
        self._by_storage = {u.key: u for u in units}
        self._name_of, self._gather = name_of, gather

    def unit_of(self, x: torch.Tensor) -> FlatUnit | None:
        """The unit whose storage `x` is on."""
        return self._by_storage.get(x.untyped_storage()._cdata) if x.layout == torch.strided else None

    def push(self) -> bool:
        """Puts the hooks on top of those that are there. False if they are on top already, or can't act here."""
        if not torch.is_grad_enabled() or not private.saved_hooks_are_enabled():
            return False
        below = private.top_saved_hooks(True)
        if below is not None and getattr(below[0], "_deepc_owner", None) is self:
            return False
        pack = self._make_pack(below)
        pack._deepc_owner = self  # type: ignore[attr-defined]  # functions take attributes
        private.push_saved_hooks(pack, self._unpack)
        return True

    def pop(self) -> None:
        """Takes away what `push` put there."""
        private.pop_saved_hooks()

    def _make_pack(self, below: Any) -> Callable[[torch.Tensor], Any]:
        def pack(x: torch.Tensor) -> Any:
            unit = self.unit_of(x)
            if unit is not None and not unit.persistent:
                offset = int(x.storage_offset())
                at = offset * x.element_size() // unit.flat.element_size()
                place = bisect.bisect_right(unit.offsets, at) - 1
                return _Recipe(unit, place, x.dtype, offset, x.shape, x.stride(), x._version)
            if unit is None and below is not None:
                return below[1], below[0](x), None
            # x itself would be a cycle through autograd, where it is an operator's result.
            return (
                x.detach(),
                x._version,
            )

        return pack

    def _unpack(self, packed: Any) -> torch.Tensor:
        if type(packed) is _Recipe:
            return self._cook(packed)
        if len(packed) == 3:
            theirs: torch.Tensor = packed[0](packed[1])
            return theirs
        x: torch.Tensor = packed[0]
        if x._version != packed[1]:
            raise RuntimeError(_modified(f"{name_of(x.dtype)} {list(x.shape)}", x._version, packed[1]) + ".")
        return x

    def _cook(self, r: _Recipe) -> torch.Tensor:
        unit, p = r.unit, r.unit.params[r.param]
        if (now := version_of(p)) != r.version:
            raise RuntimeError(
                _modified(f"parameter '{self._name_of(p)}'", now, r.version)
                + " (a step of the engine is such an operation: run backward before it)."
            )
        self._gather(unit)
        return torch.empty(0, dtype=r.dtype, device=unit.flat.device).set_(unit.storage, r.offset, r.shape, r.stride)


def _modified(what: str, now: int, then: int) -> str:
    """In torch's own words, for who looks for them."""
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation:"
        f" {what} is at version {now}; expected version {then} instead"
    )
