"""The update of optimizers that step each element by itself: AdamW, Adam, Lion, Adagrad, SGD. One pass in C (unscale,
clip, decay, states, master, 16-bit write-back) over the stretches of this rank's share: in memory, on a device, or cell
after cell where something lies on disk."""

from __future__ import annotations

import bisect
import ctypes
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from ...core.lib import StepArgs
from ...core.ops import code, run_on, torch_dtype
from ...optim.states.formats import ADAMW, DECOUPLED, FORMATS, NESTEROV, is_coded
from ..state import ModelState, Pass
from ..tiers.coded import Coded, UnitScales
from .across.base import StepCounts, stretch_of
from .across.passes import Passes

if TYPE_CHECKING:
    from ...offload import Cell
    from ...optim.rules import CoreRule, Scalars
    from ..tiers.disk import DiskTier
    from ..tiers.split import Split
    from ..tiers.windows import Array
    from .publish import Sender

_Address = Callable[[str, int], int]  # (name of a state, or "master"; element of this rank's share) -> where it lies
_PART = 1 << 23  # elements of an offloaded update that go to the device together


class Kind(NamedTuple):
    """What parameters that are stepped alike have in common: their param group, and how many updates left them out."""

    group: int
    missed: int


class Run(NamedTuple):
    """A stretch of this rank's share that belongs to one kind (its index): `n` elements from `flat` of the flat space
    and `own` of the share on."""

    kind: int
    flat: int
    own: int
    n: int


class KindStep(NamedTuple):
    """What one step is made with, of a kind."""

    scalars: Scalars
    grad_scale: float
    step: int


def _stretches(runs: Sequence[Run]) -> Iterator[tuple[int, int]]:
    """[begin, end) of the flat space, of runs that touch."""
    begin = end = runs[0].flat
    for r in runs:
        if r.flat != end:
            yield begin, end
            begin = r.flat
        end = r.flat + r.n
    yield begin, end


def within(runs: Sequence[Run], begin: int, end: int) -> list[Run]:
    """The parts of `runs`, which are in the order of the share, that lie in its elements [begin, end)."""
    first = bisect.bisect_right(runs, begin, key=lambda r: r.own + r.n)
    cut = []
    for r in runs[first:]:
        if r.own >= end:
            break
        lo, hi = max(r.own, begin), min(r.own + r.n, end)
        cut.append(Run(r.kind, r.flat + lo - r.own, lo, hi - lo))
    return cut


class ElementUpdate:
    """The update by `rule` on one rank's share. states: by name, arrays of an element each; counts: of the updates so
    far; left_out: flat parameters that it does not step; sender: of the state."""

    def __init__(
        self,
        state: ModelState,
        rule: CoreRule,
        groups: Sequence[Mapping[str, Any]],
        group_of: Sequence[int],
        states: Mapping[str, Array],
        counts: StepCounts,
        left_out: frozenset[int],
        sender: Sender,
    ) -> None:
        self._state, self._rule, self._groups, self._states, self._sender = state, rule, groups, states, sender
        self._passes = Passes(state)
        # Where parameters are written that masters are the truth of, those of the disk are wanted for what is left out.
        self._old = state.master is None or bool(left_out)
        self._device_runs: list[Run] = []  # of those whose states are divided between host and device
        # A parameter's count differs from the others' by what it has missed, and that stays until the next of these.
        alike = [None if i in left_out else Kind(g, counts.missed(i)) for i, g in enumerate(group_of)]
        self._kinds = sorted({kind for kind in alike if kind is not None})
        kinds = [-1 if kind is None else self._kinds.index(kind) for kind in alike]
        self._lay_out(kinds)
        self._in_tensors = state.state_device.type != "cpu" and not rule.form  # the update takes tensors, not addresses
        if self._passes.in_memory and not self._in_tensors:  # a cell's arguments are made when it is there
            self._args = StepArgs.array(max(1, len(self._runs)))
            self._aim_all(self._args, self._runs, self._in_memory)

    def _lay_out(self, kinds: Sequence[int]) -> None:
        """The stretches that the step walks. kinds: of each flat parameter, -1 where it is not stepped."""
        st, plan = self._state, self._state.plan
        self._runs = [Run(*r) for r in st.runs(list(kinds)) if r[0] >= 0]
        if (cut := plan.host_elems) is not None:
            self._device_runs = within(self._runs, cut, plan.owned_elems)
            self._runs = within(self._runs, 0, cut)
        if st.flat_host is not None:  # what is done of a long one goes to the device meanwhile
            begins = range(0, plan.owned_elems, _PART)
            self._runs = [part for at in begins for part in within(self._runs, at, at + _PART)]
        if self._rule.form:  # a scale, and a parameter's random bits, are of one parameter's elements
            segments = [s for s in plan.segments if kinds[s.param] >= 0]
            self._runs = [Run(kinds[s.param], s.flat_begin, s.shard_begin, s.length) for s in segments]
            self._numbers = [(s.shard_begin, stretch_of(plan.layout, s).first) for s in segments]

    # ---- what C is given ---------------------------------------------------------------------------------------------
    def _aim(self, a: Any, run: Run, at: _Address) -> None:
        """The arguments of a run that do not change from step to step."""
        st, rule = self._state, self._rule
        lowp, acc_dtype = st.master is not None, torch_dtype(st.plan.accumulator)
        direct = not st.plan.parameters_as  # else the engine makes the parameters from the masters when it publishes
        a.param = at("master", run.own) if lowp else st.lowp_address + 4 * run.flat
        a.grad = st.acc_address + acc_dtype.itemsize * run.own
        for k, name in enumerate(self._kept(run.kind)):
            a.state[k] = at(name, run.own)
        if lowp and direct:
            a.lowp, a.lowp_dtype = st.lowp_address + st.dtype.itemsize * run.flat, code(st.dtype)
        a.n, a.rule = run.n, rule.kind
        a.param_dtype = a.state_dtype = code(torch.float32)
        a.grad_dtype = code(acc_dtype)

    def _kept(self, kind: int) -> tuple[str, ...]:
        """Names of the states that parameters of a kind use."""
        return self._rule.names[: self._rule.keeps(self._groups[self._kinds[kind].group])]

    def _in_memory(self, name: str, own: int) -> int:
        """Where an element of the share lies, of what is in memory."""
        array = self._states[name] if name != "master" else self._state.master
        if isinstance(array, Coded):
            return array.part(own, 1).codes.data_ptr()
        there = cast("torch.Tensor | Split", array)
        return there.data_ptr() + there.dtype.itemsize * own

    def _aim_all(self, args: Any, runs: Sequence[Run], at: _Address, cell: Cell | None = None) -> list[UnitScales]:
        """The arguments of runs that do not change from step to step. cell: that the states lie in, which begins at an
        edge of blocks; None: in memory. Returns the scales in it, which are to be put back after the step."""
        form, out = self._rule.form, []
        for a, r in zip(args, runs):
            self._aim(a, r, at)
            kept = self._kept(r.kind) if form else ()
            if not kept:
                continue
            begin, number = self._numbers[bisect.bisect_right(self._numbers, r.own, key=lambda n: n[0]) - 1]
            a.format, a.first, a.state_dtype = FORMATS[form], number + r.own - begin, code(torch.bfloat16)
            for k, name in enumerate(kept if is_coded(form) else ()):
                if cell is None:
                    scale = cast(Coded, self._states[name]).part(r.own, r.n).scale
                else:
                    out.append(UnitScales.of(cell, name, r.own, r.n, a.first, form))
                    scale = out[-1].scale
                a.scale[k] = scale.data_ptr()
        return out

    # ---- the update --------------------------------------------------------------------------------------------------
    def update(self, grad_scale: float, counts: StepCounts) -> None:
        """One step; `grad_scale` multiplies every accumulated gradient. DiskError: `finish` does the rest."""
        if self._in_tensors:
            self._update_device(self._runs, self._steps(grad_scale, counts))
            return
        if self._device_runs:
            self._update_device(self._device_runs, self._steps(grad_scale, counts))
        self.finish(grad_scale, counts)

    def finish(self, grad_scale: float, counts: StepCounts) -> None:
        """What is stepped by addresses, all of the host's: of an update that a disk broke off, the rest."""
        kinds = self._steps(grad_scale, counts)
        if not self._passes.in_memory:
            self._update_cells(kinds)
        elif self._state.flat_host is not None:
            self._step_and_send(kinds)
        else:
            self._step_runs(self._args, self._runs, kinds)

    def forget(self) -> None:
        """There is no rest of an update: what knows of one are the walk and the tier."""

    def _steps(self, grad_scale: float, counts: StepCounts) -> list[KindStep]:
        """What the step is made with, by kind."""
        out = []
        for group, missed in self._kinds:
            g, step = self._groups[group], counts.total - missed
            out.append(KindStep(self._rule.scalars(g, step), -grad_scale if g.get("maximize") else grad_scale, step))
        return out

    def _step_runs(self, args: Any, runs: Sequence[Run], kinds: Sequence[KindStep]) -> None:
        for a, run in zip(args, runs):
            (a.lr, a.beta1, a.beta2, a.eps, a.weight_decay, a.flags), a.grad_scale, a.step = kinds[run.kind]
        run_on(self._state.state_device, "step", args, len(runs))

    def _step_and_send(self, kinds: Sequence[KindStep]) -> None:
        """The step of offloaded states, part by part: new parameters go to the device while the next ones are made."""
        at = 0
        for _, part in itertools.groupby(self._runs, key=lambda r: r.own // _PART):
            runs = list(part)
            args = (StepArgs * len(runs)).from_buffer(self._args, at * ctypes.sizeof(StepArgs))
            self._step_runs(args, runs, kinds)
            self._sender.send(_stretches(runs))
            at += len(runs)
        self._sender.end()

    def _update_cells(self, kinds: Sequence[KindStep]) -> None:
        """The same where something lies on disk. The update of an element depends on that element alone, so it may be
        cut anywhere."""

        def work(begin: int, end: int, cell: Cell | None) -> None:
            runs = within(self._runs, begin, end)
            if not runs:
                return
            args = StepArgs.array(len(runs))
            at = (
                self._in_memory
                if cell is None
                else functools.partial(cast("DiskTier", self._passes.tier).address, cell)
            )
            scales = self._aim_all(args, runs, at, cell)
            self._step_runs(args, runs, kinds)
            for s in scales:
                s.put()
            self._sender.send(_stretches(runs))

        self._passes.run(work, Pass(reads=self._old))
        self._sender.end()

    def _update_device(self, stretches: Sequence[Run], kinds: Sequence[KindStep]) -> None:
        st, rule = self._state, self._rule
        arrays = cast("dict[str, torch.Tensor]", self._states)
        for index, (s, scale, step) in enumerate(kinds):
            runs = [(slice(flat, flat + n), slice(own, own + n)) for k, flat, own, n in stretches if k == index]
            if not runs:
                continue
            master, lowp = cast("torch.Tensor | None", st.master), st.master is not None
            params = [st.flat[f] if master is None else master[o] for f, o in runs]
            grads, lowps = [st.acc[o] for _, o in runs], [st.flat[f] for f, _ in runs] if lowp else []
            kept = self._kept(index)
            states = [[arrays[n][o] for _, o in runs] if n in kept else [] for n in rule.names]
            scalars = (s.lr, s.beta1, s.beta2, s.eps, s.weight_decay, scale, step)
            if rule.kind == ADAMW:
                top = states[2] if len(states) > 2 else []
                decoupled = bool(s.flags & DECOUPLED)
                torch.ops.deepc.step_adamw(params, grads, states[0], states[1], top, lowps, *scalars, decoupled)
            else:
                state = states[0] if states else []
                nesterov = bool(s.flags & NESTEROV)
                torch.ops.deepc.step_rule(params, grads, state, lowps, rule.kind, *scalars, nesterov)
