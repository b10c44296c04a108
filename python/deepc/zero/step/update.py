"""The optimizer of an engine: hyper-parameters where users and LR schedulers expect them, states in the rank's shard.

`ShardedOptimizer.param_groups` hold the model's own parameters; the update runs on this rank's share of the flat space.
Those that optim/rules.py names run in C (one pass: unscale, clip, decay, states, master, 16-bit write-back); other
elementwise torch optimizers run on views of the shard.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple, NoReturn, cast

import torch

from ...core.foreign import private
from ...core.lib import StepArgs
from ...core.ops import code, run_on, torch_dtype
from ...errors import ArgumentError, CheckpointError, ConfigError, DiskError, OutOfMemoryError, UnsupportedError
from ...offload import Cell as DiskCell
from ...optim.factory import (
    check_optimizer,
    form_on_disk,
    moments_of,
    names_on_disk,
    state_bytes_of,
    steps_whole_blocks,
    twin_over,
)
from ...optim.onebit.dropin import OneBitOptimizer
from ...optim.rules import ADAFACTOR, LAMB, MUON, ONEBIT, CoreRule, Scalars, core_rule
from ...optim.states.formats import ADAMW, DECOUPLED, FORMATS, NESTEROV, SGD_RULE, is_coded
from ...plan.layout import Segment
from ...plan.plan import Plan
from ..parameters import owners
from ..state import ModelState, Pass
from ..tiers.coded import Coded, CodedOnDisk, UnitScales
from ..tiers.disk import DiskTier
from ..tiers.parked import AWAY
from ..tiers.split import Split
from ..tiers.windows import Array, Window
from .across.base import StepCounts, stretch_of
from .across.factored import FactoredUpdate
from .across.matrices import MatrixUpdate
from .across.momentum import MomentumUpdate, OwnState
from .across.passes import Passes
from .across.ratios import RatioUpdate
from .across.sharers import Sharers
from .across.stored import MatrixUpdateOnDisk
from .tree import LayoutOrder

logger = logging.getLogger("deepc")

Address = Callable[[str, int], int]  # (name of a state, or "master"; element of this rank's share) -> where it lies


# Optimizers whose step of an element depends on more of its parameter than its shard has, and keep their own states.
ACROSS: dict[int, type[MatrixUpdate] | type[FactoredUpdate] | type[MomentumUpdate]] = {
    MUON: MatrixUpdate,
    ADAFACTOR: FactoredUpdate,
    ONEBIT: MomentumUpdate,
}


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


_PART = 1 << 23  # elements of an offloaded update that go to the device together


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


class Like(NamedTuple):
    """A tensor of a checkpoint, without its values."""

    shape: Sequence[int]
    dtype: torch.dtype


class KindStep(NamedTuple):
    """What one step is made with, of a kind."""

    scalars: Scalars
    grad_scale: float
    step: int


class Home(NamedTuple):
    """What the states of the core's optimizers are kept in."""

    states: dict[str, Array]
    across: MatrixUpdate | FactoredUpdate | MomentumUpdate | None


class ShardedOptimizer(torch.optim.Optimizer):
    """Wraps `base` (any torch.optim.Optimizer over the model's parameters): shares its param_groups, so schedulers made
    for either act on both."""

    def __init__(self, base: torch.optim.Optimizer, *, allow_untested: bool, stage: int) -> None:
        # Not Optimizer.__init__: param_groups are base's own list objects, already validated there.
        self.base = base
        self.defaults = base.defaults
        self.param_groups = base.param_groups
        self.rule = core_rule(base)
        self.core = self.rule is not None
        self._keeping = self._states_kept()
        self._state: ModelState  # from attach on
        self._counts = StepCounts()
        self._kinds: list[Kind] = []
        self._passes: Passes | None = None
        self._ratios: RatioUpdate | None = None  # of LAMB
        self._across: MatrixUpdate | FactoredUpdate | MomentumUpdate | None = None
        self._sharers: Sharers | None = None
        self._left_out: frozenset[int] = frozenset()
        self._device_runs: list[Run] = []  # of those whose states are divided between host and device
        self._sent: torch.cuda.Event | None = None  # offloaded states: the new parameters are on the device
        self._unfinished: float | None = None  # grad_scale of an update that the disk broke off
        self._parked: dict[str, Array] | None = None  # `states` that are in host memory for a while
        self.dropped: Callable[[], None] = lambda: None  # what zero_grad does with gradients that the engine has
        self.unchanged = True  # whether an update that raised, and not for a disk, has left all as it was
        self.overflow = False
        self.loss_scale = 1.0
        check_optimizer(base, stage, allow_untested)
        self._refuse_hooks()
        self._hook_tables()
        self.take_groups()

    def take_groups(self) -> None:
        """The param groups are as they are to stay."""
        self._groups, self._laid_out = self.param_groups, self._sizes()

    def _refuse_hooks(self) -> None:
        for when in ("pre", "post"):
            hooks = vars(self.base).get(f"_optimizer_step_{when}_hooks", {})
            if any(h is not _refuse_step for h in hooks.values()):
                raise UnsupportedError(_NO_HOOKS.format(f"what {_name(self.base)}.register_step_{when}_hook was given"))

    def _sizes(self) -> list[int]:
        """Of the param groups, the numbers of parameters."""
        return [len(g["params"]) for g in self.param_groups]

    def check_layout(self) -> None:
        """Raises if the update of an element could depend on where its shard ends ("deterministic": "layout")."""
        LayoutOrder.check_optimizer(type(self.base).__name__, self.core)

    def check_accumulator(self, dtype: str) -> None:
        """Raises if the update can't read gradients that were accumulated in `dtype` (data_types.grad_accum_dtype)."""
        if dtype != "fp32" and not self.core:
            raise UnsupportedError(
                f'data_types.grad_accum_dtype = "{dtype}" with {type(self.base).__name__}: torch\'s optimizers take'
                " gradients in the dtype of the fp32 weights, so nothing would be saved; use Adam or AdamW, Lion,"
                " Adagrad or SGD of deepc.optim, or remove the key"
            )

    def check_places(self, plan: Plan) -> None:
        """Raises, before anything moves, if parameters are to lie on disk, or states to be divided between host and
        device, and can't."""
        rule = self.rule
        if plan.parameters_on and plan.layout.total and rule is None:
            raise UnsupportedError(
                f"zero_optimization.offload_param.device = nvme with {type(self.base).__name__}: torch's optimizers"
                " update parameters in memory; use an optimizer that deepc's core steps (docs/optimizers.md), or device"
                " none"
            )
        if plan.host_elems is not None and (rule is None or rule.kind in ACROSS or rule.kind == LAMB or rule.form):
            what = f"state_dtype {rule.form}" if rule is not None and rule.form else type(self.base).__name__
            raise UnsupportedError(
                f"zero_optimization.offload_optimizer.ratio below 1 with {what} does not exist: Adam and AdamW, Lion,"
                " Adagrad and SGD of deepc.optim, with states in fp32, have it; set the ratio to 1.0"
            )

    def _hook_tables(self: torch.optim.Optimizer) -> None:
        from collections import OrderedDict

        for name in (
            "_optimizer_step_pre_hooks",
            "_optimizer_step_post_hooks",
            "_optimizer_state_dict_pre_hooks",
            "_optimizer_state_dict_post_hooks",
            "_optimizer_load_state_dict_pre_hooks",
            "_optimizer_load_state_dict_post_hooks",
        ):
            setattr(self, name, OrderedDict())

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """`base`, by DeepSpeed's name."""
        return self.base

    # ---- set-up ------------------------------------------------------------------------------------------------------
    @property
    def moments(self) -> int:
        """fp32 state tensors per element (for the plan; torch optimizers other than Adam: their own, counted as 2)."""
        return moments_of(self.base)

    @property
    def state_bytes(self) -> int:
        """Bytes of 256 elements of one of these tensors, with its scales."""
        return state_bytes_of(self.base)

    @property
    def whole_blocks(self) -> bool:
        """Whether states on disk are stepped in whole blocks alone (for the plan)."""
        return steps_whole_blocks(self.base)

    @property
    def form_on_disk(self) -> tuple[int, int]:
        """(state arrays on disk, bytes of 256 elements of one), for the plan."""
        return form_on_disk(self.base)

    def names_on_disk(self) -> tuple[str, ...]:
        """Of the state arrays on disk."""
        return names_on_disk(self.base)

    def attach(self, state: ModelState, group_of: list[int], sharers: Sharers | None = None) -> None:
        """Binds the update to this rank's share. group_of[i]: param group of flat parameter i. sharers: the ranks that
        hold the other shards of parameters, where these are cut."""
        self._state, self._group_of, self._sharers = state, group_of, sharers
        self._tell_of_states()
        _refuse_calls(self.base)
        if self.core:
            self._attach_core()
        else:
            self._attach_torch()

    def _tell_of_states(self) -> None:
        """What `base` has kept of steps of its own is not where the engine's states are."""
        st, kept = self._state, self.base.state
        stepped = [n for n, p in zip(st.names, st.trained) if p in kept and _has_stepped(kept[p])]
        if stepped and st.group.rank == 0:
            logger.warning(
                "%s has stepped %d parameters already ('%s', ...), and the engine begins with fresh states: give it"
                " what was kept by deepc.view(p).state, or load a checkpoint of an engine",
                _name(self.base),
                len(stepped),
                stepped[0],
            )

    @property
    def _core(self) -> CoreRule:
        if self.rule is None:
            raise UnsupportedError(f"{type(self.base).__name__} does not run in the core")
        return self.rule

    def _attach_core(self) -> None:
        st, rule = self._state, self._core
        self.states: dict[str, Array]
        self.states, self._across = self._make_home()
        if self._across is not None:
            return
        for s in st.plan.segments if any(rule.start(g) for g in self.param_groups) else ():
            begin = rule.start(self.param_groups[self._group_of[s.param]])
            for state in self.states.values():
                Window(state, s.shard_begin, s.length).fill(begin)
        self._make_args()

    def _make_home(self) -> Home:
        """For states where the state's tier is: zeros."""
        st, rule = self._state, self._core
        if rule.kind not in ACROSS:
            return Home({n: self._new_state(n, st.plan.owned_elems) for n in rule.names}, None)
        on_disk = st.tier is not None or bool(st.plan.parameters_on)
        kind = MatrixUpdateOnDisk if rule.kind == MUON and on_disk else ACROSS[rule.kind]
        more = cast(OneBitOptimizer, self.base) if rule.kind == ONEBIT else self._sharers
        form = {"form": rule.form} if rule.kind == MUON else {}
        return Home({}, kind(st, self.param_groups, self._group_of, cast(Any, more), **form))

    def _new_state(self, name: str, owned: int) -> Array:
        st, form = self._state, self._core.form
        if form and not is_coded(form) and st.tier is not None:
            return st.tier.arrays[name]
        if is_coded(form):
            stretches = [(s.shard_begin, s.length, stretch_of(st.plan.layout, s).first) for s in st.plan.segments]
            if st.tier is not None:
                return CodedOnDisk(st.tier.stream, name, form, stretches)
            return Coded(name, form, owned, stretches, lambda numel: st.zeros(numel, torch.uint8, name))
        return st.zeros(owned, torch.bfloat16, name) if form else st.states(name)

    def coded_bytes(self) -> int:
        """Of states that are kept as codes, and have no views."""
        if isinstance(self._across, MatrixUpdate):
            return self._across.coded_bytes()
        return sum(a.nbytes() for a in self.states.values() if isinstance(a, Coded)) if self.core else 0

    def _states_kept(self) -> list[int]:
        """Of each param group, how many states its parameters use of those that there are."""
        rule = self.rule
        return [] if rule is None else [min(rule.keeps(g), len(rule.names)) for g in self.param_groups]

    def check_groups(self) -> None:
        """ArgumentError if a param group has a number that the core does not take, or asks for a state that was not
        made: before a step, because one that fails in its midst has been counted. UnsupportedError if `base` has other
        groups, or hooks, than it had."""
        self._refuse_hooks()
        if not (self._groups is self.param_groups is self.base.param_groups):
            raise UnsupportedError(
                "engine.step(): the optimizer's param_groups is another list than at deepc.initialize, which not all"
                " see: change the groups in it (group['lr'] = ...)"
            )
        if (now := self._sizes()) != self._laid_out:
            raise UnsupportedError(
                f"engine.step(): the optimizer had {_groups(self._laid_out)} at deepc.initialize and has {_groups(now)}"
                ": states are laid out once, so that what was added is not trained and what was taken out still is. Put"
                " them back; freeze parameters by requires_grad_(False), and pass all groups to initialize"
            )
        for i, (g, kept) in enumerate(zip(self.param_groups, self._keeping)):
            sgd = self._core.kind == SGD_RULE
            names = {"beta1": "momentum", "beta2": "dampening"} if sgd else {"beta1": "betas[0]", "beta2": "betas[1]"}
            for name, value in self._core.scalars(g, 1)._asdict().items():
                beta = name in names and not sgd
                if not math.isfinite(value) or (beta and not 0 <= value < 1) or (name == "eps" and value < 0):
                    bound = "in [0, 1)" if beta else "finite" if name != "eps" else ">= 0"
                    raise ArgumentError(
                        f"engine.step(): {names.get(name, name)} of param group {i} is {value}, which must be {bound}."
                        " Set it (an LR schedule may have set this), and call step() again: nothing was stepped"
                    )
            if self._core.keeps(g) > kept:
                raise ArgumentError(
                    f"engine.step(): param group {i} has asked for another state since the engine was made (momentum or"
                    " amsgrad); set that before deepc.initialize"
                )

    def _make_args(self) -> None:
        """The stretches that the C step walks, without those of parameters that are left out."""
        st, self._passes = self._state, Passes(self._state)
        self._keeping = self._states_kept()
        if self._across is not None:
            self._across.leave_out(self._left_out)
            return
        if self._core.kind == LAMB:
            self._ratios = RatioUpdate(
                st, self.param_groups, self._group_of, self.states, self._left_out, self._sharers, self._core.form
            )
            return
        # A parameter's count differs from the others' by what it has missed, and that stays until the next call.
        out = self._left_out
        alike = [None if i in out else Kind(g, self._counts.missed(i)) for i, g in enumerate(self._group_of)]
        self._kinds = sorted({kind for kind in alike if kind is not None})
        kinds = [-1 if kind is None else self._kinds.index(kind) for kind in alike]
        self._runs = [Run(*r) for r in st.runs(kinds) if r[0] >= 0]
        if (cut := st.plan.host_elems) is not None:
            self._device_runs = within(self._runs, cut, st.plan.owned_elems)
            self._runs = within(self._runs, 0, cut)
        if st.flat_host is not None:  # what is done of a long one goes to the device meanwhile
            begins = range(0, st.plan.owned_elems, _PART)
            self._runs = [part for at in begins for part in within(self._runs, at, at + _PART)]
        if self._core.form:  # a scale, and a parameter's random bits, are of one parameter's elements
            segments = [s for s in st.plan.segments if kinds[s.param] >= 0]
            self._runs = [Run(kinds[s.param], s.flat_begin, s.shard_begin, s.length) for s in segments]
            self._numbers = [(s.shard_begin, stretch_of(st.plan.layout, s).first) for s in segments]
        if not self._passes.in_memory:
            return  # a cell's arguments are made when it is there
        if st.state_device.type != "cpu" and not self._core.form:
            return  # _update_device takes tensors
        self._args = StepArgs.array(max(1, len(self._runs)))
        self._aim_all(self._args, self._runs, self._in_memory)

    def _aim(self, a: Any, run: Run, at: Address) -> None:
        """The arguments of a run that do not change from step to step."""
        st, rule = self._state, self._core
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
        rule = self._core
        return rule.names[: rule.keeps(self.param_groups[self._kinds[kind].group])]

    def _in_memory(self, name: str, own: int) -> int:
        """Where an element of the share lies, of what is in memory."""
        array = self.states[name] if name != "master" else self._state.master
        if isinstance(array, Coded):
            return array.part(own, 1).codes.data_ptr()
        there = cast("torch.Tensor | Split", array)
        return there.data_ptr() + there.dtype.itemsize * own

    def _aim_all(self, args: Any, runs: Sequence[Run], at: Address, cell: DiskCell | None = None) -> list[UnitScales]:
        """The arguments of runs that do not change from step to step. cell: that the states lie in, which begins at an
        edge of blocks; None: in memory. Returns the scales in it, which are to be put back after the step."""
        rule, out = self._core, []
        for a, r in zip(args, runs):
            self._aim(a, r, at)
            kept = self._kept(r.kind) if rule.form else ()
            if not kept:
                continue
            begin, number = self._numbers[bisect.bisect_right(self._numbers, r.own, key=lambda n: n[0]) - 1]
            a.format, a.first, a.state_dtype = FORMATS[rule.form], number + r.own - begin, code(torch.bfloat16)
            for k, name in enumerate(kept if is_coded(rule.form) else ()):
                if cell is None:
                    scale = cast(Coded, self.states[name]).part(r.own, r.n).scale
                else:
                    out.append(UnitScales.of(cell, name, r.own, r.n, a.first, rule.form))
                    scale = out[-1].scale
                a.scale[k] = scale.data_ptr()
        return out

    def _attach_torch(self) -> None:
        """Gives `base` one fp32 parameter per segment of the shard, with the accumulator as its gradient."""
        st = self._state
        groups: list[list[torch.nn.Parameter]] = [[] for _ in self.param_groups]
        self._shards: list[tuple[Segment, torch.nn.Parameter]] = []
        self._grads: list[torch.Tensor] = []  # what is accumulated of each
        for s in st.plan.segments:
            source = st.piece(s)
            grad = st.acc[s.shard_begin : s.shard_begin + s.length]
            shape = st.trained[s.param].shape
            if s.length == st.plan.layout.numels[s.param] and shape:
                # Whole: it keeps its shape, for optimizers that look at it. One without dimensions is a vector, so that
                # its states are no scalars.
                source, grad = source.view(shape), grad.view(shape)
            shard = torch.nn.Parameter(source)
            groups[self._group_of[s.param]].append(shard)
            self._shards.append((s, shard))
            self._grads.append(grad)
        # A twin of base over the shards: the user's object keeps the model's parameters, so that schedulers and code
        # see them.
        self._twin = twin_over(self.base, groups)

    def new_home(self) -> Home:
        """Another one, where the state's tier is now, that holds what this one holds. Of the core's optimizers.
        DiskError."""
        home = self._make_home()
        for (_, _, window), (_, _, to) in zip(self.owned_states(), self._owned_in(home)):
            window.copy_into(to)
        for (_, _, whole), (_, _, copy) in zip(self.whole_states(), home.across.whole_states() if home.across else ()):
            copy.copy_(whole)
        return home

    def move(self, home: Home, master: Array | None) -> None:
        """States and masters are there from now on."""
        self.states, self._across = home
        if self._state.master is not None and master is not None:
            self._state.master = master
        self._make_args()

    def _owned_in(self, home: Home) -> Iterator[tuple[str, Segment, Window]]:
        """owned_states of the core's."""
        if home.across is not None:
            yield from home.across.owned_states()
            return
        for name, owned in home.states.items():
            for s, window in self._state.owned_windows(owned):
                yield name, s, window

    def device_states(self) -> Iterator[torch.Tensor]:
        """What the states of the core's optimizers lie in, in memory."""
        for _, _, window in self.owned_states():
            if isinstance(window.array, Coded):
                for piece in window.array.pieces.values():
                    yield from (piece.codes, piece.scale)
            elif isinstance(window.array, torch.Tensor):
                yield window.array
        for _, _, whole in self.whole_states():
            yield whole

    def park(self, parked: Mapping[str, Array]) -> None:
        """The states are in host memory, and `parked` stands for the engine's arrays of them, until `unpark`. Those of
        a torch optimizer are moved there."""
        self._parked = {}
        if self.core:
            self._parked, self.states = self.states, dict(parked)
        self._move_twins(torch.device("cpu"))

    def unpark(self) -> None:
        """What was moved, of the states or of what they are updated with, is where it was, at other addresses."""
        if self._parked is not None:
            if self.core:
                self.states = self._parked
            self._parked = None
        if self.core:
            self._make_args()

    def bring_twins(self) -> None:
        """States of a torch optimizer are on the device again. OutOfMemoryError: another call goes on."""
        try:
            self._move_twins(self._state.state_device)
        except torch.OutOfMemoryError as exc:
            raise OutOfMemoryError(
                f"engine.reload_states(): the states of {type(self.base).__name__} do not fit on the device: {exc}."
                " Free memory there, and call it again"
            ) from exc

    def _move_twins(self, device: torch.device) -> None:
        for state in [] if self.core else self._twin.state.values():
            for name, value in state.items():
                if torch.is_tensor(value) and value.dim() > 0:
                    state[name] = value.to(device)

    def _require_here(self) -> None:
        if self._parked is not None:
            raise UnsupportedError(AWAY)

    def follow_state(self) -> None:
        """The state's parameters or masters lie elsewhere now (ModelState.recast); accumulators and moments have
        stayed."""
        if self.core:
            self._make_args()
            return
        for s, shard in self._shards:
            shard.data = self._state.piece(s).view(shard.shape)

    @property
    def across(self) -> MatrixUpdate | FactoredUpdate | MomentumUpdate | None:
        """What steps an optimizer whose step of an element depends on more than its shard."""
        return self._across

    def leave_out(self, indices: frozenset[int]) -> None:
        """These parameters (flat indices) are not updated until the next call: somebody froze them after initialize.
        The same on all ranks."""
        if indices == self._left_out:
            return
        self._left_out = indices
        if self.core:
            self._make_args()

    # ---- the update --------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def update(self, grad_scale: float) -> None:
        """One step on this rank's share; `grad_scale` multiplies every accumulated gradient. After a DiskError a part
        of the share is updated: `finish` does the rest. After another error see `unchanged`."""
        self.unchanged = True
        for one in (self, self.base):
            private.note_step(one)
        self._forget_rest()
        if self._sent is not None:
            self._sent.synchronize()  # the last step's parameters have left
        self._state.settle()
        if not self.core:
            self._update_torch(grad_scale)
            self._counts.begin(self._left_out)
            return
        self.unchanged = False
        self._counts.begin(self._left_out)
        if self._across is not None:
            with self._unfinished_at(grad_scale):
                self._across.update(grad_scale, self._counts)
            self._to_device()
        elif self._ratios is not None or self._core.form or self._state.state_device.type == "cpu":
            if self._device_runs:
                self._update_device(grad_scale, self._device_runs)
            self._update_addressed(grad_scale)
        else:
            self._update_device(grad_scale, self._runs)

    @torch.no_grad()
    def finish(self) -> None:
        """The rest of an update that a DiskError broke off; nothing if none was."""
        if self._unfinished is None:
            return
        if self._across is not None:
            self._across.finish()
            self._to_device()
        else:
            self._update_addressed(self._unfinished)
        self._unfinished = None

    @contextlib.contextmanager
    def _unfinished_at(self, grad_scale: float) -> Iterator[None]:
        try:
            yield
        except DiskError:
            self._unfinished = grad_scale
            raise

    def _forget_rest(self) -> None:
        self._unfinished = None
        if self._ratios is not None:
            self._ratios.forget()

    def forget_unfinished(self) -> None:
        """All states are written anew: there is no rest."""
        self._forget_rest()
        if self._across is not None:
            self._across.forget()
        if self._passes is not None:
            self._passes.forget()

    def _update_addressed(self, grad_scale: float) -> None:
        """What is stepped by addresses: all of the host's, and on a device what torch's operators don't take."""
        with self._unfinished_at(grad_scale):
            if self._ratios is not None:
                self._ratios.update(grad_scale, self._counts)
                self._to_device()
            else:
                self._step_elements(grad_scale)

    def _step_elements(self, grad_scale: float) -> None:
        kinds = [self._step_of(kind, grad_scale) for kind in self._kinds]
        if self._passes is not None and not self._passes.in_memory:
            self._update_cells(self._passes, kinds)
        elif self._state.flat_host is not None:
            self._step_and_send(kinds)
        else:
            self._step_runs(self._args, self._runs, kinds)

    def _step_of(self, kind: Kind, grad_scale: float) -> KindStep:
        g, step = self.param_groups[kind.group], self._counts.total - kind.missed
        return KindStep(self._core.scalars(g, step), -grad_scale if g.get("maximize") else grad_scale, step)

    def _to_device(self) -> None:
        """Where states are offloaded: the new parameters go back to the device."""
        if self._state.flat_host is None:
            return
        for s in self._state.plan.slices:
            if (copy := self._state.host_copy(s.flat_begin, s.length)) is not None:
                self._state.flat[s.flat_begin : s.flat_begin + s.length].copy_(copy, non_blocking=True)
        self._note_sent()

    def _note_sent(self) -> None:
        self._sent = torch.cuda.Event()
        self._sent.record(torch.cuda.current_stream(self._state.device))

    def _step_and_send(self, kinds: Sequence[KindStep]) -> None:
        """The step of offloaded states, part by part: new parameters go to the device while the next ones are made."""
        at = 0
        for _, part in itertools.groupby(self._runs, key=lambda r: r.own // _PART):
            runs = list(part)
            args = (StepArgs * len(runs)).from_buffer(self._args, at * ctypes.sizeof(StepArgs))
            self._step_runs(args, runs, kinds)
            self._send(runs)
            at += len(runs)
        self._note_sent()

    def _send(self, runs: Sequence[Run]) -> None:
        """Offloaded states: the new parameters of `runs` go to the device. Until `_sent` they are not to be written."""
        flat, host = self._state.flat, self._state.flat_host
        if host is None or not runs:
            return
        for begin, end in _stretches(runs):
            flat[begin:end].copy_(host[begin:end], non_blocking=True)

    def _step_runs(self, args: Any, runs: Sequence[Run], kinds: Sequence[KindStep]) -> None:
        for a, run in zip(args, runs):
            (a.lr, a.beta1, a.beta2, a.eps, a.weight_decay, a.flags), a.grad_scale, a.step = kinds[run.kind]
        run_on(self._state.state_device, "step", args, len(runs))

    def _update_cells(self, passes: Passes, kinds: Sequence[KindStep]) -> None:
        """The same where something lies on disk. The update of an element depends on that element alone, so it may be
        cut anywhere."""

        def work(begin: int, end: int, cell: DiskCell | None) -> None:
            runs = within(self._runs, begin, end)
            args = StepArgs.array(max(1, len(runs)))
            at = self._in_memory if cell is None else functools.partial(cast(DiskTier, passes.tier).address, cell)
            scales = self._aim_all(args, runs, at, cell)
            self._step_runs(args, runs, kinds)
            for s in scales:
                s.put()
            self._send(runs)

        passes.run(work, Pass(reads=self._state.master is None or bool(self._left_out)))
        if self._state.flat_host is not None:
            self._note_sent()

    def _update_device(self, grad_scale: float, stretches: Sequence[Run]) -> None:
        st, rule = self._state, self._core
        arrays = cast("dict[str, torch.Tensor]", self.states)
        for index, kind in enumerate(self._kinds):
            runs = [(slice(flat, flat + n), slice(own, own + n)) for k, flat, own, n in stretches if k == index]
            if not runs:
                continue
            master, lowp = cast("torch.Tensor | None", st.master), st.master is not None
            params = [st.flat[f] if master is None else master[o] for f, o in runs]
            grads, lowps = [st.acc[o] for _, o in runs], [st.flat[f] for f, _ in runs] if lowp else []
            kept = self._kept(index)
            states = [[arrays[n][o] for _, o in runs] if n in kept else [] for n in rule.names]
            s, scale, step = self._step_of(kind, grad_scale)
            scalars = (s.lr, s.beta1, s.beta2, s.eps, s.weight_decay, scale, step)
            if rule.kind == ADAMW:
                top = states[2] if len(states) > 2 else []
                decoupled = bool(s.flags & DECOUPLED)
                torch.ops.deepc.step_adamw(params, grads, states[0], states[1], top, lowps, *scalars, decoupled)
            else:
                state = states[0] if states else []
                nesterov = bool(s.flags & NESTEROV)
                torch.ops.deepc.step_rule(params, grads, state, lowps, rule.kind, *scalars, nesterov)

    def _update_torch(self, grad_scale: float) -> None:
        st = self._state
        if grad_scale != 1.0:
            torch.ops.deepc.scale_tensor(st.acc, grad_scale)
        for mine, twin in zip(self.param_groups, self._twin.param_groups):
            twin.update({k: v for k, v in mine.items() if k != "params"})
        # An optimizer may have put another tensor in the place of a gradient, or none.
        for (s, shard), grad in zip(self._shards, self._grads):
            shard.grad = None if s.param in self._left_out else grad
        before = self._marks()
        try:
            self._twin.step()
        except BaseException:  # who tries again scales them again
            self.unchanged = self._marks() == before
            if grad_scale != 1.0:
                torch.ops.deepc.scale_tensor(st.acc, 1.0 / grad_scale)
            raise
        self.unchanged = False
        for mine, twin in zip(self.param_groups, self._twin.param_groups):  # some keep states there: Prodigy its `d`
            mine.update({k: v for k, v in twin.items() if k != "params"})
        for (s, shard), grad in zip(self._shards, self._grads):
            piece = st.piece(s)
            if shard.data_ptr() != piece.data_ptr():  # `p.data = ...`
                piece.copy_(shard.detach().reshape(-1))
                shard.data = piece.view(grad.shape)
        if st.master is not None and not st.plan.parameters_as:
            for s, shard in self._shards:
                st.flat[s.flat_begin : s.flat_begin + s.length].copy_(shard.data.view(-1))
        elif st.flat_host is not None:
            self._to_device()

    def _marks(self) -> list[Any]:
        """They differ from what they were if parameters, gradients, states or groups of a torch optimizer were changed
        in between."""
        twin, places = self._twin, zip(self._shards, self._grads)
        own = [(shard.data_ptr(), shard._version, grad._version) for (_, shard), grad in places]
        states = [_mark(twin.state.get(shard)) for _, shard in self._shards]
        return [own, states, [_mark({k: v for k, v in g.items() if k != "params"}) for g in twin.param_groups]]

    # ---- what users call ---------------------------------------------------------------------------------------------
    def step(self, closure: Callable[[], float] | None = None) -> NoReturn:  # type: ignore[override]  # not how a step is made here
        raise UnsupportedError(
            "call engine.step(), not optimizer.step(): the engine reduces, unscales and clips before the update"
        )

    def register_step_pre_hook(self, hook: Any) -> NoReturn:
        raise UnsupportedError(_NO_HOOKS.format("a hook of the optimizer's steps"))

    def register_step_post_hook(self, hook: Any) -> NoReturn:
        raise UnsupportedError(_NO_HOOKS.format("a hook of the optimizer's steps"))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients: what is in `.grad`, and what the engine has collected for a step of one micro-batch. See
        Engine._dropped_by_optimizer."""
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None
        self.dropped()

    @property
    def state(self) -> Any:  # type: ignore[override]  # torch has a plain attribute; these are its own, of the base
        return self.base.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if getattr(self, "_state", None) is not None:
            raise UnsupportedError(
                "param groups can't be added after deepc.initialize: the flat space is laid out; pass all groups to"
                " initialize"
            )
        self.base.add_param_group(param_group)

    # ---- states by parameter, for checkpoints ------------------------------------------------------------------------
    def owned_states(self) -> Iterator[tuple[str, Segment, Window]]:
        """Yields (state name, segment, this rank's part of it) for every optimizer state tensor."""
        self._require_here()
        if self.core:
            yield from self._owned_in(Home(self.states, self._across))
            return
        for s, shard in self._shards:
            for name, value in self._twin.state.get(shard, {}).items():
                if torch.is_tensor(value) and value.dim() > 0 and self._in_shards(s, shard, value):
                    yield name, s, Window(value.view(-1))

    def _in_shards(self, s: Segment, shard: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether a state of a torch optimizer has a number for each element of the shard of segment `s`. Where every
        rank has whole parameters, of their shape: what Hugging Face's Adafactor keeps of the columns of a matrix of one
        row is as long, and is to be a vector again."""
        whole = self._state.plan.own_all and self._sharers is None
        return value.shape == shard.shape if whole else value.numel() == s.length

    def whole_states(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Yields (state name, flat parameter, the state) for every one that all ranks have whole."""
        self._require_here()
        if self._across is not None:
            yield from self._across.whole_states()
        self._require_shards()
        for s, shard in () if self.core else self._shards:
            for name, value in self._twin.state.get(shard, {}).items():
                if torch.is_tensor(value) and value.dim() > 0 and not self._in_shards(s, shard, value):
                    yield name, s.param, value

    def _require_shards(self) -> None:
        """UnsupportedError if a torch optimizer keeps here what a shard's elements, or a number, are not."""
        for s, shard in () if self.core or self._state.plan.own_all else self._shards:
            for name, value in self._twin.state.get(shard, {}).items():
                has = f"has shape {tuple(value.shape)}" if torch.is_tensor(value) else f"is a {type(value).__name__}"
                fits = value is None or isinstance(value, (int, float))
                if not fits and not (torch.is_tensor(value) and (not value.dim() or self._in_shards(s, shard, value))):
                    raise UnsupportedError(
                        f"optimizer state '{name}' of '{self._state.names[s.param]}' {has} beside {s.length} elements"
                        f" of the parameter: what {_name(self.base)} keeps does not lie in shards; use"
                        " zero_optimization.stage 0"
                    )

    def own_states(self) -> Iterator[OwnState]:
        """Yields what differs between ranks, for checkpoints: errors of 1-bit optimizers."""
        if isinstance(self._across, MomentumUpdate):
            yield from self._across.own_states()

    def take_own(self, saved: Mapping[str, Any], read: Callable[[str, int, torch.Tensor, int], None]) -> None:
        """The reverse, of a checkpoint whose hyper_state is `saved`. read: see MomentumUpdate.take_own."""
        if isinstance(self._across, MomentumUpdate):
            self._across.load_numbers(saved["across"])
            self._across.take_own(saved["across"], read)
            self._across.after_load()

    def states_of(self, index: int) -> list[str]:
        """Names of the states of trained parameter `index`, the same on all ranks (of a torch optimizer: those that it
        has made so far for this rank)."""
        if not self.core:
            return self.torch_state_names()
        return list(self.states if self._across is None else self._across.names_of(index))

    def torch_state_names(self) -> list[str]:
        """Names of the per-element states of a torch optimizer (empty for the C path)."""
        return [] if self.core else sorted({n for n, _, _ in self.owned_states()})

    def prepare_states(self, has: Callable[[int], Mapping[str, Like]]) -> None:
        """Before loading into a torch optimizer: creates its states with dimensions, zeroed. has(parameter): names,
        whole shapes and dtypes of those that there are to load; a parameter that has none was never stepped."""
        plan = self._state.plan
        for s, shard in () if self.core else self._shards:
            self._twin.state.pop(shard, None)
            for name, (shape, dtype) in has(s.param).items():
                alike = tuple(shape) == tuple(self._state.shapes[s.param])
                alike |= not plan.own_all and math.prod(shape) == plan.layout.numels[s.param]
                state = shard.new_zeros(shard.shape if alike else tuple(shape), dtype=dtype)
                self._twin.state[shard][name] = state

    def scalar_states(self) -> Iterator[tuple[str, int, Any]]:
        """Yields (state name, parameter, value) of what is one number per parameter, a tensor without dimensions or a
        Python number: the scalar states of a torch optimizer, of parameters that this rank has a part of; of the core's
        the step count of each parameter that some updates left out."""
        if self.core:
            counts = self._counts
            yield from (("step", i, counts.of(i)) for i in range(len(self._group_of)) if counts.missed(i))
            return
        self._require_shards()
        firsts = {s.param: shard for s, shard in reversed(self._shards)}  # a parameter may lie here in several pieces
        for param, shard in firsts.items():
            for name, value in self._twin.state.get(shard, {}).items():
                if (torch.is_tensor(value) and value.dim() == 0) or isinstance(value, (int, float)):
                    yield name, param, value

    def _kind(self) -> list[Any]:
        """What tells optimizers apart whose states are not each other's."""
        if self.rule is None:
            return [_name(self.base)]
        own = [cast(OneBitOptimizer, self.base).kind.__name__] if self.rule.kind == ONEBIT else []
        return [self.rule.kind, *own, *self.rule.names]

    def check_saved(self, saved: Mapping[str, Any], path: str) -> None:
        """Raises unless a checkpoint's hyper_state is one of this optimizer's kind."""
        kind = saved.get("kind", self._kind() if self.core else [saved["type"]])
        if kind != self._kind():
            raise CheckpointError(
                f"checkpoint {path} was saved with {saved['type']} ({_states(kind)}), whose states are not those of"
                f" {_name(self.base)} ({_states(self._kind())}); pass load_optimizer_states=False"
            )
        if saved.get("trees") and not self._state.plan.own_all:
            raise CheckpointError(
                f"checkpoint {path} has states of {saved['type']} that do not lie in shards; use"
                " zero_optimization.stage 0, or pass load_optimizer_states=False"
            )
        if len(saved["param_groups"]) != len(self.param_groups):
            raise ConfigError(
                f"the checkpoint has {len(saved['param_groups'])} param groups and this optimizer"
                f" {len(self.param_groups)}"
            )

    def hyper_state(self) -> dict[str, Any]:
        """Number of updates, hyper-parameters per group as JSON has them, and what an optimizer keeps beside these."""
        plain = self.defaults
        groups = [
            {k: _plain(v) if k in plain else _kept(v) for k, v in g.items() if k not in _NOT_SAVED}
            for g in self.param_groups
        ]
        state = {"type": _name(self.base), "kind": self._kind(), "step": self._counts.total, "param_groups": groups}
        if isinstance(self._across, MomentumUpdate):
            return {**state, "across": self._across.numbers()}
        return {**state, "trees": trees} if (trees := self._trees()) else state

    def _trees(self) -> dict[str, dict[str, Any]]:
        """Where every rank has all of them: parameter -> states of a torch optimizer that are neither tensors nor
        numbers (a list of factors, None)."""
        out: dict[str, dict[str, Any]] = {}
        for s, shard in self._shards if not self.core and self._state.plan.own_all else ():
            state = self._twin.state.get(shard, {}).items()
            if odd := {k: _copied(v) for k, v in state if not isinstance(v, (torch.Tensor, int, float))}:
                out[self._state.names[s.param]] = odd
        return out

    def load_hyper_state(self, saved: dict[str, Any], scalars: Sequence[tuple[str, int, Any]] = ()) -> None:
        """scalars: (state name, parameter, value) of all trained parameters' scalar_states."""
        for mine, theirs in zip(self.param_groups, saved["param_groups"]):
            for k, v in theirs.items():
                if not self.core or k != "decoupled_weight_decay":  # AdamW or Adam with L2: which, the engine was told
                    mine[k] = _like(mine.get(k), v, self._state.state_device)
        if self.core:
            self._counts.load(saved["step"], {i: int(v) for name, i, v in scalars if name == "step"})
            self._make_args()
            return
        self._counts.load(saved["step"], {})
        # of all, as before 0.1.0
        common = {
            k: torch.tensor(v, dtype=torch.float32 if isinstance(v, float) else None, device="cpu")
            for k, v in saved.get("scalars", {}).items()
        }
        loaded = bool(self.torch_state_names())
        for s, shard in self._shards:
            own = {name: v for name, i, v in scalars if i == s.param}
            if shard in self._twin.state or not loaded:  # one without the others' states was never stepped
                own = {**common, **own}
            if own:
                self._twin.state[shard].update({k: _own(k, v, shard.device) for k, v in own.items()})
            for k, v in saved.get("trees", {}).get(self._state.names[s.param], {}).items():
                self._twin.state[shard][k] = _copied(v, shard.device)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part: hyper-parameters and its shards. Whole states are written by engine.save_checkpoint, which
        calls no hooks."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        out = self._own_state_dict()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, out)
            out = out if changed is None else changed
        return out

    def _own_state_dict(self) -> dict[str, Any]:
        return {
            "hyper": self.hyper_state(),
            "scalars": {f"{n}/{self._state.names[i]}": _kept(value) for n, i, value in self.scalar_states()},
            "owned": {
                f"{n}/{self._state.names[s.param]}@{s.param_begin}": w.read().clone() for n, s, w in self.owned_states()
            }
            | {f"{n}/{self._state.names[i]}": t.clone() for n, i, t in self.whole_states()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = dict(state_dict) if isinstance(state_dict, Mapping) else state_dict  # for hooks to change
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._load_own(state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _load_own(self, state_dict: dict[str, Any]) -> None:
        if isinstance(self._across, MomentumUpdate):
            raise UnsupportedError(
                f"optimizer.load_state_dict of {type(self.base).__name__} does not exist: its phase and the errors that"
                " ranks carry on are not in it; use engine.load_checkpoint"
            )
        if not isinstance(state_dict, Mapping) or not {"hyper", "owned"} <= set(state_dict):
            keys = ", ".join(map(str, state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__
            raise ArgumentError(
                f"optimizer.load_state_dict takes what optimizer.state_dict() of a deepc engine gave, and got {keys}:"
                " what another optimizer saved does not fit; use engine.load_checkpoint, or write states by"
                " deepc.view(p).state"
            )
        self.check_saved(state_dict["hyper"], "of optimizer.state_dict()")
        owned, index = state_dict["owned"], {name: i for i, name in enumerate(self._state.names)}
        there: dict[int, dict[str, Like]] = {}
        for key, value in owned.items():
            state, _, name = key.partition("/")
            part = name if name in index else name.rpartition("@")[0]
            if part not in index:
                raise ConfigError(f"the state_dict has '{key}', of a parameter that this engine does not train")
            shape = value.shape if name in index else self._state.shapes[index[part]]
            there.setdefault(index[part], {})[state] = Like(shape, value.dtype)
        want = self._keys_wanted(there, owned)  # looked for before anything is written
        if lost := next((k for k, n in want.items() if k not in owned or owned[k].numel() != n), None):
            raise ConfigError(
                f"the state_dict has no '{lost}' of {want[lost]} elements: it was made with another stage or number of"
                " ranks; use engine.load_checkpoint"
            )
        self.prepare_states(lambda i: there.get(i, {}))
        scalars = [(k.partition("/"), v) for k, v in state_dict.get("scalars", {}).items()]
        self.load_hyper_state(state_dict["hyper"], [(k[0], index[k[2]], v) for k, v in scalars if k[2] in index])
        for n, s, window in self.owned_states():
            window.write(owned[f"{n}/{self._state.names[s.param]}@{s.param_begin}"])
        for n, i, whole in self.whole_states():
            whole.copy_(owned[f"{n}/{self._state.names[i]}"])

    def _keys_wanted(
        self, there: Mapping[int, Mapping[str, Like]], owned: Mapping[str, torch.Tensor]
    ) -> dict[str, int]:
        """Of a state_dict's states: key -> elements; of a torch optimizer, whose states begin with loading, of those
        that are `there` of a parameter."""
        names = self._state.names
        if self.core:
            shards = {f"{n}/{names[s.param]}@{s.param_begin}": s.length for n, s, _ in self.owned_states()}
            return shards | {f"{n}/{names[i]}": whole.numel() for n, i, whole in self.whole_states()}
        found = ((f"{n}/{names[s.param]}", s) for s, _ in self._shards for n in there.get(s.param, ()))
        return {f"{key}@{s.param_begin}": s.length for key, s in found if key not in owned}

    def __repr__(self) -> str:
        return f"ShardedOptimizer({self.base!r})"


# ---- the user's own optimizer, which steps nothing while an engine trains its parameters -----------------------------
_NO_HOOKS = (
    "{} would not be called: the engine steps shards of the parameters, not by the optimizer's own step. Do its work"
    " behind engine.step()"
)


def _refuse_calls(base: torch.optim.Optimizer) -> None:
    if _refuse_step not in vars(base).get("_optimizer_step_pre_hooks", {}).values():  # else of an engine before
        base.register_step_pre_hook(_refuse_step)
        base.register_load_state_dict_pre_hook(_refuse_load)


def _refuse_step(base: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if _trains(base):
        raise UnsupportedError(f"call engine.step(), not {_name(base)}.step(): gradients and states are the engine's")


def _refuse_load(base: torch.optim.Optimizer, state_dict: Any) -> None:
    if _trains(base):
        raise UnsupportedError(
            f"{_name(base)}.load_state_dict would change nothing: states are the engine's. Use engine.load_checkpoint,"
            " engine.optimizer.load_state_dict, or deepc.view(p).state"
        )


def _trains(base: torch.optim.Optimizer) -> bool:
    """Whether an engine trains what `base` has."""
    return any(owners.trainer(p) is not None for group in base.param_groups for p in group["params"])


def _has_stepped(state: Mapping[str, Any]) -> bool:
    """Whether a parameter's states are not what they begin as: Adagrad makes its own before the first step."""
    values = [state["step"]] if "step" in state else state.values()
    return any(bool(v.count_nonzero()) if isinstance(v, torch.Tensor) else bool(v) for v in values)


_NOT_SAVED = frozenset({"params", "exp_avg_mask"})  # the mask is the script's, as in DeepSpeed


def _name(optimizer: torch.optim.Optimizer) -> str:
    return type(optimizer).__name__


def _states(kind: Sequence[Any]) -> str:
    return ", ".join(str(k) for k in kind[1:]) or "no states of the core's"


def _own(name: str, value: Any, device: torch.device) -> Any:
    """A scalar state that is one parameter's alone; as torch's load_state_dict has it, only `step` may stay on the
    host."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.clone() if name == "step" else value.clone().to(device)


def _plain(value: Any) -> Any:
    """A hyper-parameter, for JSON."""
    if torch.is_tensor(value) and value.dim() == 0:
        return value.item()
    return list(value) if isinstance(value, tuple) else _kept(value)


def _copied(value: Any, device: torch.device | None = None) -> Any:
    """A state that is no tensor, with tensors in it on `device`."""
    if isinstance(value, torch.Tensor):
        return value.to(value.device if device is None else device, copy=True)
    if type(value) in (list, tuple):
        return type(value)(_copied(v, device) for v in value)
    return {k: _copied(v, device) for k, v in value.items()} if type(value) is dict else deepcopy(value)


def _mark(value: Any) -> Any:
    """See ShardedOptimizer._marks."""
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    if isinstance(value, dict):
        return {k: _mark(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mark(v) for v in value]
    return value if isinstance(value, (int, float, str)) else id(value)


def _groups(sizes: Sequence[int]) -> str:
    return f"{len(sizes)} param group{'s' * (len(sizes) != 1)} with {sum(sizes)} parameters"


def _kept(value: Any) -> Any:
    return value.clone() if torch.is_tensor(value) else value


def _like(now: Any, saved: Any, device: torch.device) -> Any:
    """What was saved of a group, as what it has there now: a tuple, a tensor; a tensor that is new there on
    `device`."""
    if torch.is_tensor(saved):
        return saved.to(now if torch.is_tensor(now) else device, copy=True)
    if torch.is_tensor(now) and isinstance(saved, (int, float)):
        return torch.full_like(now, saved)
    return tuple(saved) if isinstance(saved, list) and isinstance(now, tuple) else saved
