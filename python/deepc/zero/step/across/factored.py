"""Adafactor over shards. An element's step depends on its row, its column and its parameter's norms. Each rank finds of
its elements the largest of every row and column, then their sums of squares, then those of the blocks of the flat
space, and the ranks put together what they found. The first two do not depend on the order of elements (ops.h), the
last is added up in the order of the flat space. So all stages and numbers of ranks give equal bits. Of a matrix that
tensor parallelism has cut (`CutFactors`), the ranks of all shards put together in the same way what each found of its.

Second moments of rows and columns are whole on every rank; `variance`, of what is no matrix, lies in shards. States so
small stay in memory. Where masters, parameters or gradients lie on disk the passes go over cells; after a DiskError
`finish` does the rest."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from ....core.lib import AdafactorArgs
from ....core.ops import code, run_on, torch_dtype
from ....errors import DiskError, UnsupportedError
from ....offload import Cell
from ....optim.kinds.adafactor import FACTORS, Matrices, Scratch, matrices_of, rate_of, set_scalars
from ....plan.layout import BLOCK, Segment, padded
from ...state import ModelState, Pass
from ...tiers.windows import Window
from .base import AcrossUpdate, ShareNorms, StepCounts, stretch_of
from .passes import Passes
from .sharers import Sharers

_PASSES = ("tops", "sums", "norms", "apply")  # dc_adafactor_*: the last two look at parameters
_LAST = len(_PASSES) - 1


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
        for i, (shape, n) in enumerate(zip(state.shapes, state.plan.layout.numels)):
            matrices = matrices_of(shape) if n else None
            if matrices is not None:
                self._matrices[i], self._factors_at[i] = matrices, factors
                factors += matrices.factors
        for s in self._segments:
            if s.param not in self._matrices:
                self._variance_at[s] = variances
                variances += padded(s.length)
        self._factors = torch.zeros(factors, device=state.state_device, dtype=torch.float32)
        self._variance = state.zeros(variances, torch.float32, "exp_avg_sq")
        self._scratch = Scratch(factors, state.state_device)
        self._passes = Passes(state, sharers)
        self._alone = self._passes.alone
        self._cut = None if sharers is None else CutFactors(sharers, self._matrices, self._factors_at)
        self._norms = ShareNorms(state, sharers)
        self.forget()
        self.leave_out(frozenset())

    def forget(self) -> None:
        self._at, self._made = 0, False  # the pass that comes next, and whether this rank has made it

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
        self._factored = [i for i in self._matrices if i not in indices and (self._cut is None or i not in self._cut)]
        if self._cut is not None:
            self._cut.leave_out(indices)
        self._whole = AdafactorArgs.array(max(1, len(self._factored)))
        for a, param in zip(self._whole, self._factored):
            self._aim_factors(a, param)

    def _aim(self, a: Any, s: Segment) -> None:
        """The arguments of a segment that do not change from step to step."""
        st, acc_dtype, place = (
            self._state,
            torch_dtype(self._state.plan.accumulator),
            stretch_of(self._state.plan.layout, s),
        )
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

    def update(self, grad_scale: float, counts: StepCounts) -> None:
        """Collective, where there are several ranks."""
        self.forget()
        cut = [] if self._cut is None else self._cut.arguments()
        stepped, factored = zip(self._args, (s.param for s in self._stepped)), zip(self._whole, self._factored)
        for a, param in (*stepped, *factored, *cut):
            set_scalars(a, self._groups[self._group_of[param]], counts.of(param), grad_scale, torch.float32)
        self._scratch.clear()
        self._counts = counts
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

    def _run(self, name: str, args: Any, count: int) -> None:
        run_on(self._state.state_device, f"adafactor_{name}", args, count)

    def _pass(self) -> None:
        """The pass that comes next, over this rank's share."""
        name, passes, st = _PASSES[self._at], self._passes, self._state
        tier = passes.tier
        wants, last = self._at >= _LAST - 1, self._at == _LAST
        if passes.walk is None and (tier is None or not wants):
            self._run(name, self._args, len(self._stepped))
            return
        # Where there are masters, parameters are read only to keep what is not stepped.
        reads = wants and (st.master is None or (last and len(self._stepped) < len(self._segments)))

        def work(begin: int, end: int, cell: Cell | None) -> None:
            at = None if cell is None or tier is None else functools.partial(tier.address, cell, "master")
            self._in_cell(name, begin, end, self._param_at(at) if wants else None)

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
        if self._at == 0:
            if not self._alone:
                scratch.tops.copy_(group.gather_all(scratch.tops).amax(0))
            if self._cut is not None:
                self._cut.share_tops(scratch)
        elif self._at == 1:
            if not self._alone:
                scratch.sums.copy_(group.gather_all(scratch.sums).sum(0))
            self._run("factors", self._whole, len(self._factored))
            if self._cut is not None:
                self._cut.make_factors(scratch, self._factors)
        elif self._at == 2:
            self._set_rates(self._norms.squares())

    def _in_cell(self, name: str, begin: int, end: int, param_at: Callable[[Segment, int], int] | None) -> None:
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
            for field, *_ in whole._fields_:
                setattr(a, field, getattr(whole, field))
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
        self._run(name, args, len(parts))

    def _set_rates(self, squares: Mapping[int, tuple[float, float]]) -> None:
        numels: Sequence[int] = self._state.plan.layout.numels
        if self._sharers is not None:
            numels = self._sharers.numels(numels)
        for a, s in zip(self._args, self._stepped):
            group, step = self._groups[self._group_of[s.param]], self._counts.of(s.param)
            a.rate = rate_of(squares[s.param], numels[s.param], group, step)


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
        self._factors, self._scratch = torch.zeros(factors, dtype=torch.float32, device="cpu"), Scratch(factors)
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
        tops = self._sharers.gather_all(torch.cat([scratch.tops[s] for s in shared])).amax(0)
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
        for r, row in zip(ranks, self._sharers.gather_all(found)):
            for p, sums in zip(self._stepped, row[: sum(sizes[r])].split(sizes[r])):
                self._add(p, r, sums)
        run_on(torch.device("cpu"), "adafactor_factors", self._args, len(self._stepped))
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
