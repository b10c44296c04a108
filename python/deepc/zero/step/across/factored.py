"""Adafactor over shards. An element's step depends on its row, its column and its parameter's norms. Each rank finds of
its elements the largest of every row and column, then their sums of squares, then those of the blocks of the flat
space, and the ranks put together what they found. The first two do not depend on the order of elements (ops.h), the
last is added up in the order of the flat space. So all stages and numbers of ranks give equal bits. Of a matrix that
tensor parallelism has cut (`CutFactors`), the ranks of all shards put together in the same way what each found of its.

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
from ....errors import DiskError, UnsupportedError
from ....offload import Cell
from ....optim.kinds.adafactor import FACTORS, Matrices, Scratch, matrices_of, rate_of, set_scalars
from ....optim.states.norms import Norms, Stretch
from ....plan.layout import BLOCK, Segment, padded
from ...state import ModelState
from ...tiers.agree import together
from ...tiers.disk import DiskTier
from ...tiers.windows import Window
from .base import AcrossUpdate
from .sharers import Sharers


class FactoredUpdate(AcrossUpdate):
    """The update of an optimizer of class Adafactor on one rank's share."""

    def __init__(
        self,
        state: ModelState,
        groups: Sequence[dict[str, Any]],
        group_of: Sequence[int],
        sharers: Sharers | None = None,
    ) -> None:
        self._state, self._groups, self._group_of, self._sharers = state, groups, group_of, sharers
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
        self._cut = None if sharers is None else CutFactors(sharers, self._matrices, self._factors_at)
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
        gather = None if self._alone else state.group.gather_all
        return Norms(stretches, 0 if self._alone else plan.rank, gather, self._sharers is not None)

    def _squares(self) -> Mapping[int, tuple[float, float]]:
        """Of whole parameters. Collective."""
        found = self._norms.squares()
        return found if self._sharers is None else self._sharers.squares(found)

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
            if self._cut is not None and param in self._cut:
                yield from self._cut.states_of(param)
                continue
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
        self._factored = [i for i in self._matrices if i not in indices and (self._cut is None or i not in self._cut)]
        if self._cut is not None:
            self._cut.leave_out(indices)
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
        cut = [] if self._cut is None else self._cut.arguments()
        for a, param in (*zip(self._args, (s.param for s in self._stepped)), *zip(self._whole, self._factored), *cut):
            set_scalars(a, self._groups[self._group_of[param]], step, grad_scale, torch.float32)
        self._scratch.clear()
        check(C.dc_adafactor_tops(*stepped))
        if not self._alone:
            self._scratch.tops.copy_(self._state.group.gather_all(self._scratch.tops).amax(0))
        if self._cut is not None:
            self._cut.share_tops(self._scratch)
        check(C.dc_adafactor_sums(*stepped))
        if not self._alone:
            self._scratch.sums.copy_(self._state.group.gather_all(self._scratch.sums).sum(0))
        check(C.dc_adafactor_factors(*factored))
        if self._cut is not None:
            self._cut.make_factors(self._scratch, self._factors)
        self._step = step
        if self._state.tier is not None:
            self.finish()
            return
        check(C.dc_adafactor_norms(*stepped))
        self._set_rates(self._squares(), step)
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
            self._set_rates(self._squares(), self._step)
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
        numels: Sequence[int] = self._state.plan.layout.numels
        if self._sharers is not None:
            numels = self._sharers.numels(numels)
        for a, s in zip(self._args, self._stepped):
            a.rate = rate_of(squares[s.param], numels[s.param], self._groups[self._group_of[s.param]], step)


class CutFactors:
    """The second moments of matrices whose shards several ranks hold: whole on each of them. Rows that are cut (or
    columns) are one rank's; what all have a part of, the others, is put together."""

    def __init__(self, sharers: Sharers, matrices: Mapping[int, Matrices], at: Mapping[int, int]) -> None:
        """matrices: of the shards here. at: where each one's rows begin among all rows and columns here."""
        self._sharers, self._at = sharers, at
        self._local = {p: matrices[p] for p in sharers.cuts if p in matrices}
        self._whole: dict[int, Matrices] = {}
        self._whole_at: dict[int, int] = {}
        factors = 0
        for p in self._local:
            cut = sharers.cuts[p]
            m = matrices_of(cut.shape)
            if m is None or m.number != 1:
                raise UnsupportedError(
                    f"Adafactor with tensor parallelism steps weights of two dimensions, and one of shape {cut.shape}"
                    " is cut; use AdamW, or leave that weight whole (partition_type skip)"
                )
            self._whole[p], self._whole_at[p] = m, factors
            factors += m.factors
        self._factors, self._scratch = torch.zeros(factors), Scratch(factors)
        self.leave_out(frozenset())

    def __contains__(self, param: int) -> bool:
        return param in self._whole

    def states_of(self, param: int) -> Iterator[tuple[str, int, torch.Tensor]]:
        """(name, parameter, the state), whole."""
        m, begin, shape = self._whole[param], self._whole_at[param], self._sharers.cuts[param].shape
        for name, at, n in (("row_var", begin, m.rows), ("col_var", begin + m.rows, m.cols)):
            yield name, param, self._factors[at : at + n].view(m.shape_of(name, shape))

    def leave_out(self, indices: frozenset[int]) -> None:
        self._stepped = [p for p in self._whole if p not in indices]
        self._args = AdafactorArgs.array(max(1, len(self._stepped)))
        for a, p in zip(self._args, self._stepped):
            m, at = self._whole[p], self._whole_at[p]
            row = self._factors.data_ptr() + 4 * at
            self._scratch.aim(a, m, at, row, row + 4 * m.rows)

    def arguments(self) -> list[tuple[Any, int]]:
        """(those of dc_adafactor_factors, parameter)."""
        return list(zip(self._args, self._stepped))

    def _halves(self, p: int) -> tuple[slice, slice]:
        """Where the rows and the columns of a shard lie among all here."""
        m, at = self._local[p], self._at[p]
        return slice(at, at + m.rows), slice(at + m.rows, at + m.factors)

    def share_tops(self, scratch: Scratch) -> None:
        """Of what all ranks have a part of, the largest. Collective."""
        shared = [self._halves(p)[1 - self._sharers.cuts[p].dim] for p in self._stepped]
        if not shared:
            return
        tops = self._sharers.rows(torch.cat([scratch.tops[s] for s in shared])).amax(0)
        for s, row in zip(shared, tops.split([s.stop - s.start for s in shared])):
            scratch.tops[s] = row

    def make_factors(self, scratch: Scratch, factors: torch.Tensor) -> None:
        """From the sums here (`scratch`) to those of whole matrices, their second moments, and to what the shards'
        steps read of these: `scratch` and `factors`. Collective."""
        if not self._stepped:
            return
        ranks = range(self._sharers.size)
        sizes = [[sum(self._local_sizes(p, r)) for p in self._stepped] for r in ranks]
        mine = torch.cat([scratch.sums[self._at[p] : self._at[p] + self._local[p].factors] for p in self._stepped])
        found = mine.new_zeros(max(map(sum, sizes)))
        found[: mine.numel()] = mine
        self._scratch.sums.zero_()
        for r, row in zip(ranks, self._sharers.rows(found)):
            for p, sums in zip(self._stepped, row[: sum(sizes[r])].split(sizes[r])):
                self._add(p, r, sums)
        check(C.dc_adafactor_factors(self._args, len(self._stepped)))
        for p in self._stepped:
            rows, cols = self._halves(p)
            at, whole = self._whole_at[p], self._whole[p]
            scratch.factors[rows] = self._here(p, 0, self._scratch.factors[at : at + whole.rows])
            factors[cols] = self._here(p, 1, self._factors[at + whole.rows : at + whole.factors])

    def _local_sizes(self, p: int, rank: int) -> tuple[int, int]:
        rows, cols = self._sharers.cuts[p].local_shape(rank)
        return rows, cols

    def _add(self, p: int, rank: int, sums: torch.Tensor) -> None:
        """A rank's sums of its rows and columns to those of the whole matrix."""
        cut, m, at = self._sharers.cuts[p], self._whole[p], self._whole_at[p]
        whole = self._scratch.sums[at : at + m.rows], self._scratch.sums[at + m.rows : at + m.factors]
        halves = sums.split(self._local_sizes(p, rank))
        whole[1 - cut.dim].add_(halves[1 - cut.dim])
        begin = 0
        for lo, hi in cut.parts[rank]:
            whole[cut.dim][lo:hi] = halves[cut.dim][begin : begin + hi - lo]
            begin += hi - lo

    def _here(self, p: int, dim: int, whole: torch.Tensor) -> torch.Tensor:
        """Of values of all rows (dim 0) or columns (1) those of the shard."""
        cut = self._sharers.cuts[p]
        return whole if dim != cut.dim else torch.cat([whole[lo:hi] for lo, hi in cut.parts[self._sharers.rank]])
