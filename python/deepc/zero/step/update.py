"""The optimizer of an engine: hyper-parameters where users and LR schedulers expect them, states in the rank's shard.

`ShardedOptimizer.param_groups` hold the model's own parameters; the update runs on this rank's share of the flat space.
Those that optim/rules.py names run in C, element by element (elements.py) or with more of a parameter than a shard has
(across/); other elementwise torch optimizers run on views of the shard (twin.py).
"""

from __future__ import annotations

import functools
import logging
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, cast

import torch

from ...core.foreign import private
from ...errors import ArgumentError, CheckpointError, ConfigError, DiskError, UnsupportedError
from ...optim.factory import (
    check_optimizer,
    form_on_disk,
    moments_of,
    names_on_disk,
    state_bytes_of,
    steps_whole_blocks,
)
from ...optim.onebit.dropin import OneBitOptimizer
from ...optim.rules import ADAFACTOR, LAMB, MUON, ONEBIT, CoreRule, core_rule
from ...optim.scaling import DynamicLossScaler, StaticLossScaler
from ...optim.states.formats import SGD_RULE, is_coded
from ...plan.layout import Segment
from ...plan.plan import Plan
from ..parameters import owners
from ..state import ModelState
from ..tiers.coded import Coded, CodedOnDisk
from ..tiers.parked import AWAY
from ..tiers.windows import Array, Window
from .across.base import StepCounts, stretch_of
from .across.factored import FactoredUpdate
from .across.matrices import MatrixUpdate
from .across.momentum import MomentumUpdate, OwnState
from .across.passes import Passes
from .across.ratios import RatioUpdate
from .across.sharers import Sharers
from .across.stored import MatrixUpdateOnDisk
from .elements import ElementUpdate
from .publish import Sender
from .tree import LayoutOrder
from .twin import Like, TwinUpdate, tried

logger = logging.getLogger("deepc")

# Optimizers whose step of an element depends on more of its parameter than its shard has, and keep their own states.
ACROSS: dict[int, type[MatrixUpdate] | type[FactoredUpdate] | type[MomentumUpdate]] = {
    MUON: MatrixUpdate,
    ADAFACTOR: FactoredUpdate,
    ONEBIT: MomentumUpdate,
}


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
        self._most = self._keeping  # that groups may ask for
        self._state: ModelState  # from attach on
        self._counts = StepCounts()
        # One of these makes the steps: of the core's rules that look at more than a shard (and keep their states), of
        # its others, of torch's optimizers.
        self._across: MatrixUpdate | FactoredUpdate | MomentumUpdate | None = None
        self._elements: ElementUpdate | RatioUpdate | None = None
        self._twin: TwinUpdate | None = None
        self._sharers: Sharers | None = None
        self._left_out: frozenset[int] = frozenset()
        self._unfinished: float | None = None  # grad_scale of an update that the disk broke off
        self._parked: dict[str, Array] | None = None  # `states` that are in host memory for a while
        self.dropped: Callable[[], None] = lambda: None  # what zero_grad does with gradients that the engine has
        self.around_change: Callable[[Callable[[], None]], None]  # the engine's, of a change of parameters in no step
        self._untouched = True  # by the core's update that was begun last
        self.overflow = False
        self._no_scaler = StaticLossScaler()
        self.loss_scaler: StaticLossScaler | DynamicLossScaler = self._no_scaler  # in fp16 the engine's
        check_optimizer(base, stage, allow_untested)
        # For the plan, of the groups as they are now: a state that they leave out later (amsgrad, momentum) stays.
        self.moments = moments_of(base)  # fp32 tensors per element (torch optimizers other than Adam: counted as 2)
        self.state_bytes = state_bytes_of(base)  # of 256 elements of one of these, with its scales
        self.whole_blocks = steps_whole_blocks(base)  # whether states on disk are stepped in whole blocks alone
        self.form_on_disk = form_on_disk(base)  # (state arrays on disk, bytes of 256 elements of one)
        self.names_on_disk = names_on_disk(base)  # of these arrays
        self._refuse_hooks()
        self._hook_tables()
        self.take_groups()

    @property
    def loss_scale(self) -> float:
        """Of the next backward; 1.0 but in fp16."""
        return self.loss_scaler.loss_scale

    cur_scale = loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        return self.loss_scaler.dynamic

    def needs_scaler(self) -> bool:
        """Whether a bare `loss.backward()` has to be one of `engine.scale(loss)`: in fp16."""
        return self.loss_scaler is not self._no_scaler

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
    def attach(self, state: ModelState, group_of: list[int], sharers: Sharers | None = None) -> None:
        """Binds the update to this rank's share. group_of[i]: param group of flat parameter i. sharers: the ranks that
        hold the other shards of parameters, where these are cut."""
        self._state, self._group_of, self._sharers, self._sender = state, group_of, sharers, Sender(state)
        self._tell_of_states()
        if self.core:
            self._attach_core()
        else:
            self._twin = TwinUpdate(state, self.base, group_of, sharers is not None, self._sender)
            self._take_modes()
        _refuse_calls(self.base)

    def _take_modes(self) -> None:
        """Schedule-free optimizers' train() and eval() change the parameters: those of `base`, and this one's, are made
        of the shards."""
        here = weakref.ref(self)
        for mode in ("train", "eval"):
            if callable(getattr(type(self.base), mode, None)):
                change = functools.partial(_change_mode, here, self.base, mode)
                for one in (self, self.base):
                    setattr(one, mode, change)

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
        self._arrange()

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
        if isinstance(self.base, OneBitOptimizer):
            self.base.check_groups()
        for i, (g, most) in enumerate(zip(self.param_groups, self._most)):
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
            try:
                self._core.check(g)
            except ArgumentError as exc:
                raise ArgumentError(
                    f"engine.step(): of param group {i} {exc}. Set it, and call step() again: nothing was stepped"
                ) from None
            keeps = self._core.keeps(g)
            if keeps > most or (keeps != most and self._core.kind in ACROSS):
                raise ArgumentError(
                    f"engine.step(): param group {i} has asked for other states since the engine was made (momentum,"
                    " amsgrad or use_muon); set that before deepc.initialize"
                )

    def _arrange(self) -> None:
        """What is stepped is not what it was: parameters are left out, or something lies elsewhere."""
        st, rule = self._state, self._core
        self._keeping = self._states_kept()
        if self._across is not None:
            self._across.leave_out(self._left_out)
        elif rule.kind == LAMB:
            self._elements = RatioUpdate(
                st, self.param_groups, self._group_of, self.states, self._left_out, self._sharers, rule.form
            )
        else:
            self._elements = ElementUpdate(
                st,
                rule,
                self.param_groups,
                self._group_of,
                self.states,
                self._counts,
                self._left_out,
                self._sender,
            )

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
        self._arrange()

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
        if self._twin is not None:
            self._twin.move(torch.device("cpu"))

    def unpark(self) -> None:
        """What was moved, of the states or of what they are updated with, is where it was, at other addresses."""
        if self._parked is not None:
            if self.core:
                self.states = self._parked
            self._parked = None
        if self.core:
            self._arrange()

    def bring_twins(self) -> None:
        """States of a torch optimizer are on the device again. OutOfMemoryError: another call goes on."""
        if self._twin is not None:
            self._twin.bring()

    def _require_here(self) -> None:
        if self._parked is not None:
            raise UnsupportedError(AWAY)

    def follow_state(self) -> None:
        """The state's parameters or masters lie elsewhere now (ModelState.recast); accumulators and moments have
        stayed."""
        if self._twin is not None:
            self._twin.follow_state()
        else:
            self._arrange()

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
            self._arrange()

    def rewritten(self, params: Iterable[int]) -> None:
        """All ranks were given equal values of these parameters, in no step."""
        if isinstance(self._across, MomentumUpdate):
            self._across.rewritten(params)

    # ---- the update --------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def update(self, grad_scale: float) -> None:
        """One step on this rank's share; `grad_scale` multiplies every accumulated gradient. After a DiskError a part
        of the share is updated: `finish` does the rest. After another error see `unchanged`."""
        self._untouched = True
        for one in (self, self.base):
            private.note_step(one)
        self._forget_rest()
        self._settle()
        if self._twin is not None:
            self._twin.update(grad_scale, self.param_groups, self._left_out)
            self._counts.begin(self._left_out)
            return
        if self._keeping != self._states_kept():  # a group leaves out a state from here on, or uses it again: amsgrad
            self._arrange()
        self._untouched = False
        self._counts.begin(self._left_out)
        try:
            if self._across is not None:
                self._across.update(grad_scale, self._counts)
            elif self._elements is not None:
                self._elements.update(grad_scale, self._counts)
        except DiskError:
            self._unfinished = grad_scale
            raise
        self._send_rest()

    def _settle(self) -> None:
        self._sender.wait()  # the last step's parameters have left
        self._state.settle()

    @torch.no_grad()
    def finish(self) -> None:
        """The rest of an update that a DiskError broke off; nothing if none was."""
        if self._unfinished is None:
            return
        if self._across is not None:
            self._across.finish()
        elif self._elements is not None:
            self._elements.finish(self._unfinished, self._counts)
        self._send_rest()
        self._unfinished = None

    def _send_rest(self) -> None:
        """Of what makes parameters of a device on the host, ElementUpdate alone sends them as they are made."""
        if not isinstance(self._elements, ElementUpdate):
            self._sender.send_all()

    @property
    def unchanged(self) -> bool:
        """Whether an update that raised, and not for a disk, has left all as it was."""
        return self._untouched if self._twin is None else self._twin.unchanged

    def _forget_rest(self) -> None:
        self._unfinished = None
        if self._elements is not None:
            self._elements.forget()

    def forget_unfinished(self) -> None:
        """All states are written anew: there is no rest."""
        self._forget_rest()
        if self._across is not None:
            self._across.forget()
        Passes(self._state).forget()

    @property
    def written(self) -> Collection[tuple[int, str]]:
        """(param group, key) of what a torch optimizer's steps have set there."""
        return () if self._twin is None else self._twin.written

    def tried(self, seed: int) -> list[dict[str, Any]] | None:
        """See twin.tried; None also of one that is known to treat each element alone, or has whole parameters."""
        if self._twin is None or self._state.plan.own_all or type(self.base).__module__.startswith("torch.optim"):
            return None
        return tried(self.base, self._state.state_device, seed)

    def change_mode(self, mode: str) -> None:
        """`base`'s train() or eval(), of all ranks. Collective where it changes anything."""
        if self._twin is None or all(g.get("train_mode") is (mode == "train") for g in self.param_groups):
            return
        self._require_here()
        twin = self._twin

        def change() -> None:
            self._settle()
            twin.change(mode, self.param_groups)

        self.around_change(change)

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
        yield from self._owned_in(Home(self.states, self._across)) if self._twin is None else self._twin.owned_states()

    def whole_states(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Yields (state name, flat parameter, the state) for every one that all ranks have whole."""
        self._require_here()
        if (found := self._twin or self._across) is not None:
            yield from found.whole_states()

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
        return [] if self._twin is None else self._twin.state_names()

    def prepare_states(self, has: Callable[[int], Mapping[str, Like]]) -> None:
        """Before loading into a torch optimizer: creates its states with dimensions, zeroed. has(parameter): names,
        whole shapes and dtypes of those that there are to load; a parameter that has none was never stepped."""
        if self._twin is not None:
            self._twin.prepare(has)

    def scalar_states(self) -> Iterator[tuple[str, int, Any]]:
        """Yields (state name, parameter, value) of what is one number per parameter, a tensor without dimensions or a
        Python number: the scalar states of a torch optimizer, of parameters that this rank has a part of; of the core's
        the step count of each parameter that some updates left out."""
        if self._twin is not None:
            yield from self._twin.scalar_states()
            return
        counts = self._counts
        yield from (("step", i, counts.of(i)) for i in range(len(self._group_of)) if counts.missed(i))

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
        trees = {} if self._twin is None else self._twin.trees()
        return {**state, "trees": trees} if trees else state

    def load_hyper_state(self, saved: dict[str, Any], scalars: Sequence[tuple[str, int, Any]] = ()) -> None:
        """scalars: (state name, parameter, value) of all trained parameters' scalar_states."""
        for mine, theirs in zip(self.param_groups, saved["param_groups"]):
            for k, v in theirs.items():
                if not self.core or k != "decoupled_weight_decay":  # AdamW or Adam with L2: which, the engine was told
                    mine[k] = _like(mine.get(k), v, self._state.state_device)
        if self._twin is not None:
            self._counts.load(saved["step"], {})
            self._twin.load_scalars(saved, scalars)
            return
        self._counts.load(saved["step"], {i: int(v) for name, i, v in scalars if name == "step"})
        self._most = [max(both) for both in zip(self._most, self._states_kept())]
        self._arrange()

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
        if self._twin is not None:
            found = ((f"{n}/{names[s.param]}", s) for n, s in self._twin.named(there))
            return {f"{key}@{s.param_begin}": s.length for key, s in found if key not in owned}
        shards = {f"{n}/{names[s.param]}@{s.param_begin}": s.length for n, s, _ in self.owned_states()}
        return shards | {f"{n}/{names[i]}": whole.numel() for n, i, whole in self.whole_states()}

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


def _change_mode(here: weakref.ref[ShardedOptimizer], base: torch.optim.Optimizer, mode: str) -> None:
    sharded = here()
    if sharded is not None and _trains(base):
        sharded.change_mode(mode)
    else:
        getattr(type(base), mode)(base)


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


def _plain(value: Any) -> Any:
    """A hyper-parameter, for JSON."""
    if torch.is_tensor(value) and value.dim() == 0:
        return value.item()
    return list(value) if isinstance(value, tuple) else _kept(value)


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
