"""Adafactor over shards. An element's step depends on its row, its column and its parameter's norms. Each rank finds of
its elements the largest of every row and column, then their sums of squares, then those of the blocks of the flat
space, and the ranks put together what they found. The first two do not depend on the order of elements (ops.h), the
last is added up in the order of the flat space. So all stages and numbers of ranks give equal bits.

Second moments of rows and columns are whole on every rank; `variance`, of what is no matrix, lies in shards. With a
tier only masters lie on disk, the states that are so small stay in memory: the passes over masters, norms and steps,
go through its cells. After a DiskError `finish` does the rest."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ....core.lib import AdafactorArgs, C, check
from ....core.ops import code, torch_dtype
from ....errors import DiskError
from ....offload import Cell
from ....optim.kinds.adafactor import FACTORS, Matrices, Scratch, matrices_of, rate_of, set_scalars
from ....optim.states.norms import Norms, Stretch
from ....plan.layout import BLOCK, Segment, padded
from ...state import ModelState
from ...tiers.agree import together
from ...tiers.disk import DiskTier
from ...tiers.windows import Window
from .base import AcrossUpdate


class FactoredUpdate(AcrossUpdate):
    """The update of an optimizer of class Adafactor on one rank's share."""

    def __init__(self, state: ModelState, groups: Sequence[dict[str, Any]], group_of: Sequence[int]) -> None:
        self._state, self._groups, self._group_of = state, groups, group_of
        self._segments = list(state.plan.segments)
        self._matrices: dict[int, Matrices] = {}
        self._factors_at: dict[int, int] = {}  # where a parameter's rows begin among all rows and columns
        self._variance_at: dict[Segment, int] = {}
        factors = variances = 0
        for i, (p, n) in enumerate(zip(state.trained, state.plan.layout.numels)):
            matrices = matrices_of(p.shape) if n else None
            if matrices is not None:
                self._matrices[i], self._factors_at[i] = matrices, factors
                factors += matrices.factors
        for s in self._segments:
            if s.param not in self._matrices:
                self._variance_at[s] = variances
                variances += padded(s.length)
        self._factors = torch.zeros(factors)
        self._variance = state.zeros(variances, torch.float32, "exp_avg_sq")
        self._scratch = Scratch(factors)
        self._norms = self._make_norms()
        self.forget()
        self.leave_out(frozenset())

    def forget(self) -> None:
        self._has_norms = self._has_rates = False

    def _make_norms(self) -> Norms:
        state, plan = self._state, self._state.plan
        self._alone = plan.own_all or plan.world == 1
        ranks = [plan.segments] if self._alone else [self._segments_of(rank) for rank in range(plan.world)]
        stretches = [[self._stretch(s) for s in one] for one in ranks]
        return Norms(stretches, 0 if self._alone else plan.rank, None if self._alone else state.group.gather_all)

    def _segments_of(self, rank: int) -> Sequence[Segment]:
        return self._state.plan.layout.segments(self._state.group.part_of(rank))

    def _stretch(self, s: Segment) -> Stretch:
        return Stretch(s.param, self._state.plan.layout.offsets[s.param] + s.param_begin, s.length)

    # ---- states ------------------------------------------------------------------------------------------------------
    def names_of(self, param: int) -> tuple[str, ...]:
        """Of the states of a parameter."""
        return FACTORS if param in self._matrices else ("variance",)

    def owned_states(self) -> Iterator[tuple[str, Segment, Window]]:
        """(name, segment, this rank's part of it) of every state that lies in shards."""
        for s, at in self._variance_at.items():
            yield "variance", s, Window(self._variance, at, s.length)

    def whole_states(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """(name, parameter, the state) of every state that all ranks have whole."""
        for param, m in self._matrices.items():
            shape = self._state.trained[param].shape
            begin, rows = self._factors_at[param], m.number * m.rows
            for name, at, n in (("row_var", begin, rows), ("col_var", begin + rows, m.number * m.cols)):
                yield name, param, self._factors[at : at + n].view(m.shape_of(name, shape))

    # ---- a step ------------------------------------------------------------------------------------------------------
    def leave_out(self, indices: frozenset[int]) -> None:
        """These parameters are not updated until the next call; the same on all ranks."""
        self._stepped = [s for s in self._segments if s.param not in indices]
        self._ends = [s.shard_begin + s.length for s in self._stepped]
        self._args = AdafactorArgs.array(max(1, len(self._stepped)))
        for a, s in zip(self._args, self._stepped):
            self._aim(a, s)
        self._factored = [i for i in self._matrices if i not in indices]
        self._whole = AdafactorArgs.array(max(1, len(self._factored)))
        for a, param in zip(self._whole, self._factored):
            self._aim_factors(a, param)

    def _aim(self, a: Any, s: Segment) -> None:
        """The arguments of a segment that do not change from step to step."""
        st, acc_dtype, place = self._state, torch_dtype(self._state.plan.accumulator), self._stretch(s)
        a.grad = st.acc_address + acc_dtype.itemsize * s.shard_begin
        a.param = st.piece(s).data_ptr() if st.tier is None else a.grad  # of a cell later; no other pass looks at it
        if st.master is not None and not st.plan.parameters_as:
            a.lowp, a.lowp_dtype = st.lowp_address + st.dtype.itemsize * s.flat_begin, code(st.dtype)
        a.n, a.begin, a.first = s.length, s.param_begin, place.first
        a.param_dtype, a.grad_dtype = code(torch.float32), code(acc_dtype)
        a.param_sums, a.update_sums = (self._norms.address(kind, place) for kind in (0, 1))
        if s.param in self._matrices:
            self._aim_factors(a, s.param)
        else:
            a.variance = self._variance.data_ptr() + 4 * self._variance_at[s]

    def _aim_factors(self, a: Any, param: int) -> None:
        m, at = self._matrices[param], self._factors_at[param]
        row = self._factors.data_ptr() + 4 * at
        self._scratch.aim(a, m, at, row, row + 4 * m.number * m.rows)

    def update(self, grad_scale: float, step: int) -> None:
        """Collective, where there are several ranks."""
        self.forget()
        stepped, factored = (self._args, len(self._stepped)), (self._whole, len(self._factored))
        for a, param in (*zip(self._args, (s.param for s in self._stepped)), *zip(self._whole, self._factored)):
            set_scalars(a, self._groups[self._group_of[param]], step, grad_scale, torch.float32)
        self._scratch.clear()
        check(C.dc_adafactor_tops(*stepped))
        if not self._alone:
            self._scratch.tops.copy_(self._state.group.gather_all(self._scratch.tops).amax(0))
        check(C.dc_adafactor_sums(*stepped))
        if not self._alone:
            self._scratch.sums.copy_(self._state.group.gather_all(self._scratch.sums).sum(0))
        check(C.dc_adafactor_factors(*factored))
        self._step = step
        if self._state.tier is not None:
            self.finish()
            return
        check(C.dc_adafactor_norms(*stepped))
        self._set_rates(self._norms.squares(), step)
        check(C.dc_adafactor_apply(*stepped))

    def finish(self) -> None:
        """The passes over masters on disk, from where the last call has come to. DiskError; the ranks agree between the
        two whether all have made the first one."""
        tier, failure = self._state.tier, None
        assert tier is not None  # nothing else is ever unfinished
        if not self._has_rates:
            try:
                if not self._has_norms:
                    tier.update(lambda cell: self._in_cell(C.dc_adafactor_norms, tier, cell), [])
                    self._has_norms = True
            except DiskError as exc:
                failure = exc
            if failure is not None and self._alone:
                raise failure
            if not self._alone:
                together(self._state.group, failure)
            self._set_rates(self._norms.squares(), self._step)
            self._has_rates = True
        tier.update(lambda cell: self._in_cell(C.dc_adafactor_apply, tier, cell), ["master"])
        self.forget()

    def _in_cell(self, find: Callable[[Any, int], int], tier: DiskTier, cell: Cell) -> None:
        """A pass over the parts of segments in `cell`, which is cut at edges of blocks."""
        parts: list[tuple[int, int, int]] = []
        for i in range(bisect.bisect_right(self._ends, cell.begin), len(self._stepped)):
            s = self._stepped[i]
            if s.shard_begin >= cell.end:
                break
            lo = max(s.shard_begin, cell.begin)
            parts.append((i, lo, min(self._ends[i], cell.end) - lo))
        args = AdafactorArgs.array(max(1, len(parts)))
        item = torch_dtype(self._state.plan.accumulator).itemsize
        for a, (i, lo, n) in zip(args, parts):
            whole = self._args[i]
            for name, *_ in whole._fields_:
                setattr(a, name, getattr(whole, name))
            skipped = lo - self._stepped[i].shard_begin
            a.param, a.grad, a.n = tier.address(cell, "master", lo), whole.grad + item * skipped, n
            a.begin, a.first = whole.begin + skipped, whole.first + skipped
            if whole.lowp:
                a.lowp = whole.lowp + self._state.dtype.itemsize * skipped
            if whole.variance:
                a.variance = whole.variance + 4 * skipped
            blocks = 8 * (a.first // BLOCK - whole.first // BLOCK)
            a.param_sums, a.update_sums = whole.param_sums + blocks, whole.update_sums + blocks
        check(find(args, len(parts)))

    def _set_rates(self, squares: Mapping[int, tuple[float, float]], step: int) -> None:
        numels = self._state.plan.layout.numels
        for a, s in zip(self._args, self._stepped):
            a.rate = rate_of(squares[s.param], numels[s.param], self._groups[self._group_of[s.param]], step)
