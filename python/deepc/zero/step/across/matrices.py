"""Muon over shards. An element's step depends on its whole matrix, so each matrix is made whole on one rank: the owners
of its elements step the momentum where it lies, send their parts to the rank that has the matrix this round, and get
their parts of the orthogonal matrix back. What is no matrix is stepped by AdamW where it lies.

The arithmetic per element is the core's, whose bits do not depend on where a shard ends, and a matrix is multiplied
whole, so that all stages and numbers of ranks give equal bits (with equally many threads of torch). Where tensor
parallelism has cut it, the rank that would have it whole has its shard, and the ranks of all shards put it together and
divide the products among them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch

from ....comm.groups import swap
from ....optim.kinds.muon import orthogonalize_as, scale_of
from ....optim.states.formats import (
    ADAMW,
    DECOUPLED,
    MOMENTS,
    SGD_RULE,
    PackedStep,
    is_coded,
    step_momentum,
    step_packed,
)
from ....plan.layout import Segment, padded
from ...state import ModelState
from ...tiers.coded import Coded
from ...tiers.windows import Array, Window
from .base import AcrossUpdate, StepCounts, stretch_of
from .sharers import Sharers

ROUND_BYTES = 32 << 20  # of matrices on their way at a time, over all ranks; more where one a rank is more


class Round(NamedTuple):
    """Matrices that are multiplied at the same time. owner: parameter -> the rank that has it whole."""

    dtype: torch.dtype
    owner: dict[int, int]

    def of(self, rank: int) -> list[int]:
        return [p for p, r in self.owner.items() if r == rank]


def rounds_of(matrices: Sequence[tuple[int, int, int, torch.dtype]], world: int) -> list[Round]:
    """(parameter, rows, columns, dtype of products) of each matrix, dealt to the ranks of a world: the dearest first,
    each to the rank that has least to do in its round."""
    out: list[Round] = []
    loads: list[float] = []
    nbytes = 0
    for param, rows, columns, dtype in sorted(
        matrices, key=lambda m: (str(m[3]), -(float(min(m[1:3])) ** 2) * max(m[1:3]), m[0])
    ):
        size = rows * columns * dtype.itemsize
        if not out or out[-1].dtype != dtype or (nbytes + size > ROUND_BYTES and len(out[-1].owner) >= world):
            out.append(Round(dtype, {}))
            loads, nbytes = [0.0] * world, 0
        rank = loads.index(min(loads))
        out[-1].owner[param] = rank
        loads[rank] += float(min(rows, columns)) ** 2 * max(rows, columns)
        nbytes += size
    return out


class Part(NamedTuple):
    """Of a state, what a step reads and writes: numbers, or codes and their scales. first: the number of the first
    element, which random bits and blocks follow from."""

    values: torch.Tensor
    scales: list[torch.Tensor]
    first: int


class MatrixUpdate(AcrossUpdate):
    """The update of an optimizer of class Muon on one rank's share. States: momentum for matrices, AdamW's two for the
    rest, in arrays without room for what a parameter has not."""

    def __init__(
        self,
        state: ModelState,
        groups: Sequence[Mapping[str, Any]],
        group_of: Sequence[int],
        sharers: Sharers | None = None,
        form: str = "",
    ) -> None:
        """form: how states are stored, where that is not fp32 (optim/states/formats.py)."""
        self._state, self._groups, self._group_of, self._sharers = state, groups, group_of, sharers
        self._form = form
        segments = sorted(state.plan.segments, key=lambda s: (s.param, s.param_begin))
        self._mine: dict[int, list[Segment]] = {}
        for s in segments:
            self._mine.setdefault(s.param, []).append(s)
        self._at: dict[Segment, int] = {}  # where a segment's states begin in their arrays
        self._arrays: dict[str, Array] = {}
        self._make_arrays()
        self.leave_out(frozenset())

    def _make_arrays(self) -> None:
        ends = {True: 0, False: 0}
        stretches: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}
        for segments in self._mine.values():
            for s in segments:
                kind = self.is_matrix(s.param)
                stretches[kind].append((ends[kind], s.length, self._first(s)))
                self._at[s], ends[kind] = ends[kind], ends[kind] + padded(s.length)
        for name, kind, place in (("momentum_buffer", True, "exp_avg"), *((n, False, n) for n in MOMENTS)):
            self._arrays[name] = self._new_array(name, ends[kind], stretches[kind], place)

    def _first(self, s: Segment) -> int:
        """The number of a segment's first element in the flat space of all ranks."""
        return stretch_of(self._state.plan.layout, s).first

    def _new_array(self, name: str, n: int, stretches: Sequence[tuple[int, int, int]], place: str) -> Array:
        state = self._state
        if is_coded(self._form):
            return Coded(name, self._form, n, stretches, lambda numel: state.zeros(numel, torch.uint8, place))
        return state.zeros(n, torch.bfloat16 if self._form else torch.float32, place)

    def coded_bytes(self) -> int:
        """Of states that are kept as codes, and have no views."""
        return sum(a.nbytes() for a in self._arrays.values() if isinstance(a, Coded))

    def is_matrix(self, param: int) -> bool:
        return bool(self._groups[self._group_of[param]]["use_muon"])

    def names_of(self, param: int) -> tuple[str, ...]:
        """Of the states of a parameter."""
        return ("momentum_buffer",) if self.is_matrix(param) else MOMENTS

    def owned_states(self) -> Iterator[tuple[str, Segment, Window]]:
        """(name, segment, this rank's part of it) of every state."""
        for s, at in self._at.items():
            for name in self.names_of(s.param):
                yield name, s, Window(self._arrays[name], at, s.length)

    def whole_states(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """States that all ranks have whole: none."""
        return iter(())

    def leave_out(self, indices: frozenset[int]) -> None:
        """These parameters are not updated until the next call; the same on all ranks."""
        found = [
            (i, *self._shape(i), self._products(i))  # of whole matrices: ranks with other shards deal them alike
            for i, n in enumerate(self._state.plan.layout.numels)
            if n and i not in indices and self.is_matrix(i)
        ]
        plan = self._state.plan
        self._rounds = []
        for r in rounds_of(found, plan.world):
            alone = plan.own_all or plan.world == 1
            self._rounds.append((r, [] if alone else [self._pieces(r, rank) for rank in range(plan.world)]))
        self._rest: list[list[Segment]] = [[] for _ in self._groups]
        for s in self._at:
            if s.param not in indices and not self.is_matrix(s.param):
                self._rest[self._group_of[s.param]].append(s)

    def _shape(self, param: int) -> tuple[int, int]:
        """Of the whole matrix."""
        local = tuple(self._state.shapes[param])
        return cast("tuple[int, int]", local if self._sharers is None else self._sharers.shape(param, local))

    def _products(self, param: int) -> torch.dtype:
        return cast(torch.dtype, getattr(torch, self._groups[self._group_of[param]]["ns_dtype"]))

    # ---- a step ------------------------------------------------------------------------------------------------------
    def update(self, grad_scale: float, counts: StepCounts) -> None:
        """Collective, where there are several ranks."""
        for r, pieces in self._rounds:
            directions = self._directions(r, grad_scale, counts.total)
            self._apply(self._orthogonal(r, pieces, directions) if pieces else self._orthogonal_of_all(r, directions))
        for group, segments in zip(self._groups, self._rest):
            by_step: dict[int, list[Segment]] = {}
            for s in segments:
                by_step.setdefault(counts.of(s.param), []).append(s)
            for step, alike in by_step.items():
                self._step_rest(group, alike, grad_scale, step)

    def _directions(self, r: Round, grad_scale: float, step: int) -> dict[Segment, torch.Tensor]:
        """Steps the momentum of this rank's parts of the round's matrices. What is to be made orthogonal of each."""
        out: dict[Segment, torch.Tensor] = {}
        by_group: dict[int, list[Segment]] = {}
        for p in r.owner:
            by_group.setdefault(self._group_of[p], []).extend(self._mine.get(p, ()))
        for g, segments in by_group.items():
            if not segments:
                continue
            lows = [torch.empty(s.length, dtype=r.dtype, device=self._state.state_device) for s in segments]
            grads = [self._state.acc[s.shard_begin : s.shard_begin + s.length] for s in segments]
            momentum = [self._part("momentum_buffer", s) for s in segments]
            self._step_momentum(self._groups[g], momentum, grads, lows, grad_scale, step)
            out.update(zip(segments, lows))
        return out

    def _step_momentum(
        self,
        group: Mapping[str, Any],
        momentum: Sequence[Part],
        grads: list[torch.Tensor],
        lows: list[torch.Tensor],
        grad_scale: float,
        step: int,
    ) -> None:
        """Steps the momentum of parts of matrices; `lows` become what is to be made orthogonal of them."""
        nesterov = bool(group["nesterov"])
        if self._form:
            ahead = [torch.zeros_like(g, dtype=torch.float32) for g in grads]
            items = [(m, g, [p.values], p.scales, p.first) for m, g, p in zip(ahead, grads, momentum)]
            step_momentum(items, self._form, float(group["momentum"]), grad_scale, step)
        else:
            values = [p.values for p in momentum]
            ahead = [torch.empty_like(m) for m in values] if nesterov else lows
            self._lerp(values, grads, ahead, group, grad_scale)
        if nesterov:
            self._lerp(ahead, grads, lows, group, grad_scale)
        elif self._form:
            for low, m in zip(lows, ahead):
                low.copy_(m)

    @staticmethod
    def _lerp(
        values: list[torch.Tensor],
        grads: list[torch.Tensor],
        copies: list[torch.Tensor],
        group: Mapping[str, Any],
        grad_scale: float,
    ) -> None:
        """values += (1 - momentum) * (grad_scale * grads - values), and rounded into `copies`: it is a step of SGD
        without momentum, with the rate momentum - 1 and the decay -1."""
        rate = float(group["momentum"]) - 1.0
        torch.ops.deepc.step_rule(values, grads, [], copies, SGD_RULE, rate, 0.0, 0.0, 0.0, -1.0, grad_scale, 2, False)

    def _orthogonal(
        self, r: Round, pieces: list[list[list[Segment]]], mine: dict[Segment, torch.Tensor]
    ) -> dict[Segment, torch.Tensor]:
        """The same of the orthogonal matrices. pieces: of each rank, by who has the matrix. Collective."""
        state, plan = self._state, self._state.plan
        counts = [[sum(s.length for s in of) for of in by_owner] for by_owner in pieces]
        rank = plan.rank
        came = swap(
            state.group, _row([mine[s] for of in pieces[rank] for s in of], r.dtype, state.state_device), counts
        )
        whole: dict[int, torch.Tensor] = {}
        for p in r.of(rank):
            whole[p] = torch.empty(plan.layout.numels[p], dtype=r.dtype, device=state.state_device)
        for source, block in enumerate(came):
            for s, part in _parts(pieces[source][rank], block):
                whole[s.param][s.param_begin : s.param_begin + s.length].copy_(part)
        whole = self._multiply(r, whole)
        back = [whole[s.param][s.param_begin : s.param_begin + s.length] for of in pieces for s in of[rank]]
        row = _row(back, r.dtype, state.state_device)
        blocks = swap(state.group, row, [list(column) for column in zip(*counts)])
        return {s: part for of, block in zip(pieces[rank], blocks) for s, part in _parts(of, block)}

    def _orthogonal_of_all(self, r: Round, mine: dict[Segment, torch.Tensor]) -> dict[Segment, torch.Tensor]:
        """The same where every rank has every gradient: each rank makes its matrices, and all get them."""
        state, plan = self._state, self._state.plan
        segments = {s.param: s for s in mine}
        made = self._multiply(r, {p: mine[segments[p]] for p in r.of(plan.rank)})
        if plan.world == 1:
            return {segments[p]: value for p, value in made.items()}
        sizes = [[plan.layout.numels[p] for p in r.of(rank)] for rank in range(plan.world)]
        most = max(map(sum, sizes))
        row = torch.zeros(most, dtype=r.dtype, device=state.state_device)
        row[: sum(sizes[plan.rank])].copy_(_row(list(made.values()), r.dtype, state.state_device))
        rows = state.group.gather_all(row.view(torch.uint8)).view(r.dtype)
        out: dict[Segment, torch.Tensor] = {}
        for rank in range(plan.world):
            out.update(_parts([segments[p] for p in r.of(rank)], rows[rank]))
        return out

    def _pieces(self, r: Round, rank: int) -> list[list[Segment]]:
        """The segments that `rank` owns of the round's matrices, by who has the matrix."""
        out: list[list[Segment]] = [[] for _ in range(self._state.plan.world)]
        for p, owner in r.owner.items():
            found = [s for q, s in self._state.owners(p) if q == rank]
            out[owner].extend(sorted(found, key=lambda s: s.param_begin))
        return out

    def _multiply(self, r: Round, given: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """[numel] the orthogonal matrix of each, of what is here of it. Collective over the ranks that have the other
        shards."""
        sharers = self._sharers
        cut = {p: flat for p, flat in given.items() if sharers is not None and p in sharers.cuts}
        made = {p: self._orthogonal_to(p, flat) for p, flat in given.items() if p not in cut}
        if sharers is not None and cut:
            whole = sharers.wholes(cut)
            made.update(sharers.shared_out(whole, lambda p: self._orthogonal_to(p, whole[p]), r.dtype))
        return {p: made[p] for p in given}

    def _orthogonal_to(self, param: int, matrix: torch.Tensor) -> torch.Tensor:
        """[numel] of the whole matrix."""
        group, state = self._groups[self._group_of[param]], self._state
        matrix = matrix.to(state.device).view(self._shape(param))
        return orthogonalize_as(group, matrix, matrix.dtype).contiguous().view(-1).to(state.state_device)

    def _apply(self, updates: dict[Segment, torch.Tensor]) -> None:
        """p = p - lr * (scale * update + decay * p), on this rank's parts."""
        for s, update in updates.items():
            self._apply_to(*self._targets([s]), s, update)

    def _apply_to(
        self, params: list[torch.Tensor], lowps: list[torch.Tensor], s: Segment, update: torch.Tensor
    ) -> None:
        group = self._groups[self._group_of[s.param]]
        lr, scale = float(group["lr"]), scale_of(group, *self._shape(s.param))
        decay = float(group["weight_decay"]) / scale
        torch.ops.deepc.step_rule(
            params, [update], [], lowps, SGD_RULE, lr * scale, 0.0, 0.0, 0.0, decay, 1.0, 2, False
        )

    def _step_rest(self, group: Mapping[str, Any], segments: list[Segment], grad_scale: float, step: int) -> None:
        params, lowps = self._targets(segments)
        grads = [self._state.acc[s.shard_begin : s.shard_begin + s.length] for s in segments]
        m, v = ([self._part(name, s) for s in segments] for name in MOMENTS)
        self._adamw(group, params, lowps, grads, (m, v), grad_scale, step)

    def _adamw(
        self,
        group: Mapping[str, Any],
        params: list[torch.Tensor],
        lowps: list[torch.Tensor],
        grads: list[torch.Tensor],
        moments: tuple[Sequence[Part], Sequence[Part]],
        grad_scale: float,
        step: int,
    ) -> None:
        """Of parts of what is no matrix."""
        beta1, beta2 = (float(b) for b in group["adam_betas"])
        scalars = (float(group["lr"]), beta1, beta2, float(group["adam_eps"]), float(group["weight_decay"]))
        if self._form:
            items = [
                (p, g, [m.values, v.values], [*m.scales, *v.scales], m.first)
                for p, g, m, v in zip(params, grads, *moments)
            ]
            step_packed(items, PackedStep(ADAMW, self._form, scalars, grad_scale, step, DECOUPLED), lowps)
        else:
            m, v = ([part.values for part in parts] for parts in moments)
            torch.ops.deepc.step_adamw(params, grads, m, v, [], lowps, *scalars, grad_scale, step, True)

    def _part(self, name: str, s: Segment) -> Part:
        array, at, first = self._arrays[name], self._at[s], self._first(s)
        if isinstance(array, Coded):
            piece = array.pieces[at]
            return Part(piece.codes, [piece.scale], first)
        return Part(Window(array, at, s.length).view, [], first)

    def _targets(self, segments: Sequence[Segment]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(what is updated of each, what gets it in 16 bits: none if there are no masters, or the engine makes the
        parameters of them when it publishes)."""
        st = self._state
        flat = st.flat if st.flat_host is None else st.flat_host
        flats = [flat[s.flat_begin : s.flat_begin + s.length] for s in segments]
        if st.master is None:
            return flats, []
        masters = [cast(torch.Tensor, st.master)[s.shard_begin : s.shard_begin + s.length] for s in segments]
        return masters, [] if st.plan.parameters_as else flats


def _row(parts: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.cat(list(parts)) if parts else torch.empty(0, dtype=dtype, device=device)


def _parts(segments: Sequence[Segment], block: torch.Tensor) -> Iterator[tuple[Segment, torch.Tensor]]:
    """Each segment with its stretch of `block`, where they lie one after another."""
    at = 0
    for s in segments:
        yield s, block[at : at + s.length]
        at += s.length
