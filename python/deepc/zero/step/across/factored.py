"""Adafactor over shards. An element's step depends on its row, its column and its parameter's norms. Each rank finds of
its elements the largest of every row and column, then their sums of squares, then those of the blocks of the flat
space, and the ranks put together what they found. The first two do not depend on the order of elements (ops.h), the
last is added up in the order of the flat space. So all stages and numbers of ranks give equal bits.

Second moments of rows and columns are whole on every rank; `variance`, of what is no matrix, lies in shards. States so
small stay in memory. Where masters, parameters or gradients lie on disk the passes go over cells; after a DiskError
`finish` does the rest."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from ....core.lib import AdafactorArgs, C, check
from ....core.ops import code, torch_dtype
from ....errors import DiskError
from ....offload import Cell
from ....optim.kinds.adafactor import FACTORS, Matrices, Scratch, matrices_of, rate_of, set_scalars
from ....optim.states.norms import Norms, Stretch
from ....plan.layout import BLOCK, Segment, padded
from ...state import ModelState, Pass
from ...tiers.windows import Window
from .base import AcrossUpdate
from .passes import Passes

_PASSES = ("tops", "sums", "norms", "apply")  # dc_adafactor_*: the last two look at parameters
_LAST = len(_PASSES) - 1


class FactoredUpdate(AcrossUpdate):
    """The update of an optimizer of class Adafactor on one rank's share."""

    def __init__(self, state: ModelState, groups: Sequence[dict[str, Any]], group_of: Sequence[int]) -> None:
        self._state, self._groups, self._group_of = state, groups, group_of
        self._segments = list(state.plan.segments)
        self._matrices: dict[int, Matrices] = {}
        self._factors_at: dict[int, int] = {}  # where a parameter's rows begin among all rows and columns
        self._variance_at: dict[Segment, int] = {}
        factors = variances = 0
        for i, (shape, n) in enumerate(zip(state.shapes, state.plan.layout.numels)):
            matrices = matrices_of(shape) if n else None
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
        self._passes = Passes(state)
        self._alone = self._passes.alone
        self._norms = self._make_norms()
        self.forget()
        self.leave_out(frozenset())

    def forget(self) -> None:
        self._at, self._made = 0, False  # the pass that comes next, and whether this rank has made it

    def _make_norms(self) -> Norms:
        state, plan = self._state, self._state.plan
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
            shape = self._state.shapes[param]
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
        # Of a cell, where something lies on disk; the first passes do not look at it.
        a.param = st.piece(s).data_ptr() if self._passes.in_memory else a.grad
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
        for a, param in (*zip(self._args, (s.param for s in self._stepped)), *zip(self._whole, self._factored)):
            set_scalars(a, self._groups[self._group_of[param]], step, grad_scale, torch.float32)
        self._scratch.clear()
        self._step = step
        self.finish()

    def finish(self) -> None:
        """The passes that are left, the first from where it has come to. DiskError; the ranks agree after each that
        another one follows whether all have made it."""
        while self._at < _LAST:
            failure: DiskError | None = None
            try:
                if not self._made:
                    self._pass()
                    self._made = True
            except DiskError as exc:
                failure = exc
            self._passes.agree(failure)
            self._put_together()
            self._at, self._made = self._at + 1, False
        self._pass()
        self.forget()

    def _pass(self) -> None:
        """The pass that comes next, over this rank's share."""
        name, passes, st = _PASSES[self._at], self._passes, self._state
        find, tier = getattr(C, f"dc_adafactor_{name}"), passes.tier
        wants, last = self._at >= _LAST - 1, self._at == _LAST
        if passes.walk is None and (tier is None or not wants):
            check(find(self._args, len(self._stepped)))
            return
        # Where there are masters, parameters are read only to keep what is not stepped.
        reads = wants and (st.master is None or (last and len(self._stepped) < len(self._segments)))

        def work(begin: int, end: int, cell: Cell | None) -> None:
            at = None if cell is None or tier is None else functools.partial(tier.address, cell, "master")
            self._in_cell(find, begin, end, self._param_at(at) if wants else None)

        passes.run(work, Pass(reads, last), states=wants, writes=["master"] if last else [])

    def _param_at(self, master: Callable[[int], int] | None) -> Callable[[Segment, int], int]:
        """Where element `own` of the share, which is of a segment, has its parameter or master. master: in a cell on
        disk, or None."""
        st = self._state
        if master is not None:
            return lambda s, own: master(own)
        if st.master is None:
            return lambda s, own: st.lowp_address + 4 * (s.flat_begin + own - s.shard_begin)
        return lambda s, own: cast(torch.Tensor, st.master).data_ptr() + 4 * own

    def _put_together(self) -> None:
        """What the ranks have found in the pass. Collective."""
        scratch, group = self._scratch, self._state.group
        if self._at == 0 and not self._alone:
            scratch.tops.copy_(group.gather_all(scratch.tops).amax(0))
        elif self._at == 1:
            if not self._alone:
                scratch.sums.copy_(group.gather_all(scratch.sums).sum(0))
            check(C.dc_adafactor_factors(self._whole, len(self._factored)))
        elif self._at == 2:
            self._set_rates(self._norms.squares(), self._step)

    def _in_cell(
        self, find: Callable[[Any, int], int], begin: int, end: int, param_at: Callable[[Segment, int], int] | None
    ) -> None:
        """A pass over the parts of segments in elements [begin, end) of the share, which are cut at edges of blocks.
        param_at: see _param_at; None: the pass does not look at parameters."""
        parts: list[tuple[int, int, int]] = []
        for i in range(bisect.bisect_right(self._ends, begin), len(self._stepped)):
            s = self._stepped[i]
            if s.shard_begin >= end:
                break
            lo = max(s.shard_begin, begin)
            parts.append((i, lo, min(self._ends[i], end) - lo))
        args = AdafactorArgs.array(max(1, len(parts)))
        st, item = self._state, torch_dtype(self._state.plan.accumulator).itemsize
        for a, (i, lo, n) in zip(args, parts):
            whole = self._args[i]
            for name, *_ in whole._fields_:
                setattr(a, name, getattr(whole, name))
            s = self._stepped[i]
            skipped = lo - s.shard_begin
            a.grad, a.n = whole.grad + item * skipped, n
            a.param = a.grad if param_at is None else param_at(s, lo)
            a.begin, a.first = whole.begin + skipped, whole.first + skipped
            if whole.lowp:
                a.lowp = whole.lowp + st.dtype.itemsize * skipped
            if whole.variance:
                a.variance = whole.variance + 4 * skipped
            blocks = 8 * (a.first // BLOCK - whole.first // BLOCK)
            a.param_sums, a.update_sums = whole.param_sums + blocks, whole.update_sums + blocks
        check(find(args, len(parts)))

    def _set_rates(self, squares: Mapping[int, tuple[float, float]], step: int) -> None:
        numels = self._state.plan.layout.numels
        for a, s in zip(self._args, self._stepped):
            a.rate = rate_of(squares[s.param], numels[s.param], self._groups[self._group_of[s.param]], step)
