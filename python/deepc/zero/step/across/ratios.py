"""LAMB over shards. An element's step depends on the norms of its parameter and of the parameter's step: a pass makes
moments and the sums of blocks of the flat space, the ranks put them together in its order, a second pass makes the
step. So all stages and numbers of ranks give equal bits. States are the engine's arrays of an element each, in memory
or on disk, where each pass goes over cells; after a DiskError `update` is called again and goes on."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from ....core.lib import LambArgs
from ....core.ops import code, run_on, torch_dtype
from ....errors import DiskError
from ....optim.kinds.lamb import set_scalars, set_states, trust_ratio
from ....optim.states.formats import is_coded
from ....plan.layout import BLOCK, Segment
from ...state import ModelState, Pass
from ...tiers.coded import Coded, UnitScales
from ...tiers.windows import Array, Window
from .base import ShareNorms, StepCounts, stretch_of
from .passes import Passes
from .sharers import Sharers

if TYPE_CHECKING:
    from ....offload import Cell

_Address = Callable[[str, int], int]  # (name of a state, or "master"; element of the share) -> where it lies


class _Part(NamedTuple):
    """`n` elements of a segment from `own` of the share on. skipped: of the segment before them."""

    segment: Segment
    own: int
    n: int
    skipped: int


class RatioUpdate:
    """The update of an optimizer of class Lamb on one rank's share. states: exp_avg and exp_avg_sq [owned]; left_out:
    parameters that it does not step; form: how states are stored, where that is not fp32 (optim/states/formats.py)."""

    def __init__(
        self,
        state: ModelState,
        groups: Sequence[Mapping[str, Any]],
        group_of: Sequence[int],
        states: Mapping[str, Array],
        left_out: frozenset[int],
        sharers: Sharers | None = None,
        form: str = "",
    ) -> None:
        self._form = form
        self._state, self._groups, self._group_of = state, groups, group_of
        self._states = states
        self._moments = list(states)
        self._passes = Passes(state, sharers)
        self.norms = ShareNorms(state, sharers)
        self._segments = [s for s in state.plan.segments if s.param not in left_out]
        self._ends = [s.shard_begin + s.length for s in self._segments]
        # Where parameters are written that masters are the truth of, those of the disk are wanted for what is left out.
        self._old = state.master is None or bool(left_out)
        self.forget()
        if self._passes.in_memory:
            arrays = cast("dict[str, torch.Tensor]", {**states, "master": state.master})
            self._parts = [_Part(s, s.shard_begin, s.length, 0) for s in self._segments]
            self._args = self._aimed(self._parts, lambda name, own: arrays[name].data_ptr() + 4 * own)

    def forget(self) -> None:
        """There is no rest of an update."""
        self._squares: dict[int, tuple[float, float]] | None = None  # of whole parameters, once they are known
        self._has_moments = False

    def _aimed(self, parts: Sequence[_Part], at: _Address) -> Any:
        """The arguments of parts, cut at edges of blocks, that do not change from step to step."""
        st, plan = self._state, self._state.plan
        lowp, acc_dtype = st.master is not None, torch_dtype(plan.accumulator)
        args = LambArgs.array(max(1, len(parts)))
        for a, part in zip(args, parts):
            place = stretch_of(plan.layout, part.segment)
            flat = part.segment.flat_begin + part.skipped
            a.param = at("master", part.own) if lowp else st.lowp_address + 4 * flat
            a.grad = st.acc_address + acc_dtype.itemsize * part.own
            set_states(a, self._form, *self._addresses(part, at))
            if lowp and not plan.parameters_as:
                a.lowp, a.lowp_dtype = st.lowp_address + st.dtype.itemsize * flat, code(st.dtype)
            a.n, a.first, a.grad_dtype = part.n, place.first + part.skipped, code(acc_dtype)
            blocks = 8 * (a.first // BLOCK - place.first // BLOCK)
            a.param_sums, a.update_sums = (self.norms.address(kind, place) + blocks for kind in (0, 1))
        return args

    def _addresses(self, part: _Part, at: _Address) -> tuple[list[int], list[int]]:
        """Of a part's states, and of their scales where codes lie in memory."""
        if not self._form or self._passes.tier is not None:
            return [at(name, part.own) for name in self._moments], []
        arrays = [self._states[name] for name in self._moments]
        pieces = [a.part(part.own, part.n) for a in arrays if isinstance(a, Coded)]
        if pieces:
            return [p.codes.data_ptr() for p in pieces], [p.scale.data_ptr() for p in pieces]
        return [Window(a, part.own, part.n).view.data_ptr() for a in arrays], []

    def _scale(self, args: Any, parts: Sequence[_Part], grad_scale: float, counts: StepCounts) -> None:
        """The rest of them, with the ratios if the norms are known."""
        for a, part in zip(args, parts):
            group = self._groups[self._group_of[part.segment.param]]
            set_scalars(a, group, counts.of(part.segment.param), grad_scale)
            if self._squares is not None:
                a.trust = trust_ratio(*self._squares[part.segment.param], group)

    def update(self, grad_scale: float, counts: StepCounts) -> None:
        """Collective, unless every rank has everything. DiskError: `finish` goes on there."""
        if self._passes.in_memory:
            self._squares = None
            self._scale(self._args, self._parts, grad_scale, counts)
            run_on(self._state.state_device, "lamb_moments", self._args, len(self._parts))
            self._squares = self.norms.squares()
            self._scale(self._args, self._parts, grad_scale, counts)
            run_on(self._state.state_device, "lamb_apply", self._args, len(self._parts))
        else:
            self._update_cells(grad_scale, counts)
        self.forget()

    def finish(self, grad_scale: float, counts: StepCounts) -> None:
        """The rest of an update that a disk broke off. Collective as `update`."""
        self.update(grad_scale, counts)

    def _update_cells(self, grad_scale: float, counts: StepCounts) -> None:
        """Between the passes the ranks agree whether all of them have come so far."""
        has_master, form = self._state.master is not None, self._form

        def work(begin: int, end: int, cell: Cell | None) -> None:
            parts = self._within(begin, end)
            args = self._aimed(parts, self._places(cell))
            scales = self._scales_in(args, parts, cell) if is_coded(form) and cell is not None else []
            self._scale(args, parts, grad_scale, counts)
            run_on(
                self._state.state_device, "lamb_moments" if self._squares is None else "lamb_apply", args, len(parts)
            )
            for s in scales if self._squares is not None else ():
                s.put()

        if self._squares is None:
            failure: DiskError | None = None
            try:
                if not self._has_moments:
                    # Moments in a format are read here, and written by the pass that makes the step.
                    self._passes.run(work, Pass(not has_master, False, True), writes=[] if form else self._moments)
                    self._has_moments = True
            except DiskError as exc:
                failure = exc
            self._passes.agree(failure)
            self._squares = self.norms.squares()
        writes = None if form else ["master"] if has_master else []
        self._passes.run(work, Pass(self._old, True, bool(form)), writes=writes)

    def _scales_in(self, args: Any, parts: Sequence[_Part], cell: Cell) -> list[UnitScales]:
        """Gives the arguments the scales that lie in `cell`, which begins at an edge of blocks."""
        out: list[UnitScales] = []
        for a, part in zip(args, parts):
            for k, name in enumerate(self._moments):
                out.append(UnitScales.of(cell, name, part.own, part.n, a.first, self._form))
                a.scale[k] = out[-1].scale.data_ptr()
        return out

    def _places(self, cell: Cell | None) -> _Address:
        """Where states lie in `cell`; None: in memory."""
        tier = self._passes.tier
        if tier is not None and cell is not None:
            return lambda name, own: tier.address(cell, name, own)
        arrays = cast("dict[str, torch.Tensor]", {**self._states, "master": self._state.master})
        return lambda name, own: arrays[name].data_ptr() + 4 * own

    def _within(self, begin: int, end: int) -> list[_Part]:
        """The parts of segments in elements [begin, end) of the share."""
        out: list[_Part] = []
        for i in range(bisect.bisect_right(self._ends, begin), len(self._segments)):
            s = self._segments[i]
            if s.shard_begin >= end:
                break
            lo = max(s.shard_begin, begin)
            out.append(_Part(s, lo, min(self._ends[i], end) - lo, lo - s.shard_begin))
        return out
