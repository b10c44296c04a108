"""An exponential moving average of an engine's weights, sharded as the weights are (mean teachers, BYOL, diffusion,
Polyak averages).

A rank keeps and updates the fp32 average of the elements that its optimizer step updates: at ZeRO stages 1 to 3 one
part in `world`, and an update moves no bytes. Two ways to compute with it:

    ema = deepc.EMA(engine, decay=0.999)                     # 4 bytes per element and node; works in every mode
    with ema.applied(): evaluate(engine)                     # the engine's model has the average meanwhile

    ema = deepc.EMA(engine, decay=0.999, as_module=True)     # a second model beside it: at stage 3 once per node, in
    shared memory
    target = ema.module(x)                                   # a teacher in the training loop

engine.save_checkpoint and load_checkpoint carry the averages along, into any number of ranks and any stage."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.autograd.graph import increment_version

from ...core import memory
from ...errors import ArgumentError, DeepcError, StrayWriteError, UnsupportedError
from ...plan.layout import Segment
from ...zero.parameters.gathered import is_expanded
from ...zero.parameters.param import share
from ...zero.tiers.agree import run_together
from ...zero.tiers.windows import Window
from .access import _Access, of_all_ranks
from .saving import take_in_writes

if TYPE_CHECKING:
    from ...comm.groups import MemoryGroup
    from ...zero.step.reducers.nodes import NodesReducer
    from ..base import EngineBase

_CHUNK = 1 << 18  # elements that are swapped at a time


class EMA:
    """average = decay * average + (1 - decay) * weights, in fp32, at each `update()`; starts as the weights are.

    engine: the one that trains the weights. decay: a number in [0, 1), or a function of the number of updates so far.
    as_module: also keep a model with the average, `module`, in the engine's precision. label: its name in checkpoints,
    for an engine with several. Collective."""

    def __init__(
        self,
        engine: EngineBase,
        decay: float | Callable[[int], float] = 0.999,
        *,
        as_module: bool = False,
        label: str = "ema",
    ) -> None:
        if not callable(decay):
            _checked_decay(decay)
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", label):
            raise ArgumentError(f"EMA(label={label!r}): a label is 1 to 64 letters, digits, '_' or '-'")
        if engine.plan.host_elems is not None:
            raise UnsupportedError(
                "EMA with zero_optimization.offload_optimizer.ratio below 1 does not exist: an average lies in one"
                " place; set the ratio to 1.0"
            )
        if label in engine.averages:
            raise ArgumentError(
                f"this engine has an average with label {label!r} already; give this one another label="
            )
        self.engine, self.decay, self.label = engine, decay, label
        self.updates = self.resets = 0
        self._seen = -1  # applied steps at the last update; reset() sets it
        self._flat: torch.Tensor | None = None  # of the module: [total], node-shared at stage 3
        self.inside = False
        self._module: torch.nn.Module | None = None
        self._values: torch.Tensor | None = None  # [owned] fp32; None: the module's own memory is the average
        if as_module:
            self._make_flat()
        if self._flat is None or engine.plan.has_master or engine.state.state_device != engine.device:
            owned, where = engine.plan.owned_elems, engine.state.state_device
            self._values = (
                memory.zeros(owned, torch.float32, memory.COLORS["average"])
                if where.type == "cpu"
                else torch.zeros(owned, device=where, dtype=torch.float32)
            )
        if as_module:
            self._make_module()
        self.reset()
        engine.averages[label] = self

    # ---- the average -------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def update(self) -> bool:
        """After engine.step(). False, and nothing happens, if no step was applied since the last update: inside an
        accumulation, or after a step that was skipped. On all ranks: collective with as_module (it fences) and where
        something lies on disk, else without a message, and the next step says which rank left it out."""
        self._outside("update()")
        applied = self._applied_steps()
        if applied == self._seen:
            return False
        decay = _checked_decay(self.decay(self.updates)) if callable(self.decay) else self.decay
        self._fence()
        self._each(lambda mine, live: mine.lerp_(live, 1.0 - decay))
        self._seen = applied
        self.updates += 1
        self._tell(decay)
        self._publish()
        return True

    @torch.no_grad()
    def reset(self) -> None:
        """The average is what the weights are now. On all ranks, as update()."""
        self._outside("reset()")
        self._seen = self._applied_steps()
        self._fence()
        self._each(torch.Tensor.copy_)
        self.resets += 1
        self._tell(self.decay)
        self._publish()

    def value(self, p: torch.Tensor) -> torch.Tensor:
        """The average of parameter `p` of the engine's model: whole, fp32, of its shape, a copy on every rank that has
        it (in a pipeline those of a stage). Collective over them."""
        self._outside("value()")
        return _Access(self.engine, p)._whole(lambda s: Window(self.piece(s)))

    def shard(self, p: torch.Tensor) -> torch.Tensor:
        """The same of the shard that this rank has of `p`, where tensor-parallel ranks cut it. Collective over those
        that own parts of it."""
        self._outside("shard()")
        return _Access(self.engine, p).here(lambda s: Window(self.piece(s)))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The averages of all trained parameters by name, whole, fp32, on every rank: those of all stages of a pipeline
        and of all ranks' experts, under the names that a checkpoint has. Collective."""
        self._outside("state_dict()")
        engine = self.engine
        trained = {id(p) for p in engine.state.trained}
        own = {n: self.shard(p) for n, p in engine.module.named_parameters() if id(p) in trained}
        whole = of_all_ranks(engine, own)
        ties = engine.ties()
        return {n: t for n, t in whole.items() if n not in ties}

    def piece(self, s: Segment) -> torch.Tensor:
        """[s.length] fp32: the average of this rank's segment `s`. A view."""
        if self._values is None:
            return self._own_flat()[s.flat_begin : s.flat_begin + s.length]
        return self._values[s.shard_begin : s.shard_begin + s.length]

    def _own_flat(self) -> torch.Tensor:
        """The module's memory; it is there with as_module."""
        assert self._flat is not None
        return self._flat

    def _tell(self, decay: float | Callable[[int], float]) -> None:
        """The next step compares the updates of all ranks (EqualSteps)."""
        said = "a function" if callable(decay) else decay
        self.engine.equal_steps.averages[self.label] = (self.updates, self.resets, said)

    def _applied_steps(self) -> int:
        return self.engine.global_steps - self.engine.skipped_steps

    def _outside(self, what: str) -> None:
        if self.inside:
            raise DeepcError(
                f"{what} of average '{self.label}' inside its applied(): the model holds the average now. Call it after"
                " the context"
            )

    def _pairs(self, writes: bool = False) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(average, weights) of this rank's share, in long 1-D stretches of fp32. writes: the weights that the caller
        has changed, when it comes for the next, are the weights."""
        state, plan = self.engine.state, self.engine.plan
        live = state.flat if state.flat_host is None else state.flat_host
        for flat, shard, n in plan.slices:
            mine = self._own_flat()[flat : flat + n] if self._values is None else self._values[shard : shard + n]
            weights = Window(live, flat, n) if state.master is None else Window(state.master, shard, n)
            for part in weights.parts():
                values, at = part.read(), part.begin - weights.begin
                yield mine[at : at + part.length], values
                if writes and part.on_disk:
                    part.write(values)

    # ---- the engine's model with the average -------------------------------------------------------------------------
    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the engine's model has the average for weights, in its precision: to evaluate, generate, or
        save them. Weights and average change places in memory, so it needs none; afterwards the weights have the bits
        they had. backward, step and update are errors inside. Collective at both ends."""
        if self._module is not None:
            raise ArgumentError(
                "applied() of an EMA with as_module=True: its `module` has the average all the time; evaluate that"
            )
        engine = self.engine
        if engine.hooks.blocked:
            raise DeepcError(f"applied() of average '{self.label}': {engine.hooks.blocked}")
        engine.guard.refuse_writes()
        take_in_writes(engine)
        self._swap()
        self.inside = True
        engine.hooks.blocked = (
            f"the model has the values of the average '{self.label}' (EMA.applied), and training would change that "
            "instead of the "
            "weights; leave the context first"
        )
        try:
            yield
        finally:
            engine.hooks.blocked = ""
            self.inside = False
            self._swap()

    def _each(self, change: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        """change(average, weights) of all of this rank's share."""

        def run() -> None:
            for mine, live in self._pairs():
                change(mine, live)

        self._on_disk(run)

    def _on_disk(self, part: Callable[[], None]) -> None:
        """`part` goes through the weights. What the disk of some rank breaks off is an error on all, and what has been
        changed in part comes from a checkpoint. Collective, where something lies on disk."""
        engine = self.engine
        if not engine.plan.updates_on_disk:
            part()
            return
        try:
            run_together(engine.everyone, part)
        except DeepcError as exc:
            if engine.averages.get(self.label) is self:
                why = f"average '{self.label}' (in applied() the weights as well) is changed in part ({exc})"
                engine.left_in_part(f"{why}: load a checkpoint, or make the engine anew.", True)
            raise

    @torch.no_grad()
    def _swap(self) -> None:
        self.engine.group.barrier()  # nobody reads the old values any more
        self._on_disk(self._exchange)
        self._on_disk(self.engine.publish)

    def _exchange(self) -> None:
        engine, state = self.engine, self.engine.state
        for mine, live in self._pairs(writes=True):
            for a, b in zip(mine.split(_CHUNK), live.split(_CHUNK)):
                kept = a.clone()
                a.copy_(b)
                b.copy_(kept)
        for flat, shard, n in engine.plan.slices:
            if state.master is not None:
                Window(state.master, shard, n).copy_into(Window(state.flat, flat, n))
                if (copy := state.host_copy(flat, n)) is not None:
                    Window(state.master, shard, n).copy_to(copy)
            elif (copy := state.host_copy(flat, n)) is not None:
                state.flat[flat : flat + n].copy_(copy)

    # ---- a model of its own ------------------------------------------------------------------------------------------
    @property
    def module(self) -> torch.nn.Module:
        """The model with the average, not trainable; a copy of the engine's with its own buffers, which follow at each
        update. Write neither: at stage 3 its memory is the node's."""
        if self._module is None:
            raise ArgumentError(
                f"average '{self.label}' was made without as_module=True and has no model of its own; use `with "
                "ema.applied():`"
            )
        return self._module

    def _make_flat(self) -> None:
        engine, plan = self.engine, self.engine.plan
        if engine.part is not None:
            raise UnsupportedError(
                "EMA(as_module=True) of a pipeline does not exist: its model would be a stage, which only the engine"
                " runs; make it without and call engine.eval_batch in `with ema.applied():`"
            )
        if plan.mode == "streamed":
            raise UnsupportedError(
                "EMA(as_module=True) where ZeRO-3 streams its parameters does not exist; make it without and compute "
                "the teacher's "
                "outputs in `with ema.applied():` before the forward of the student"
            )
        if engine.auto_precision is not None:
            raise UnsupportedError(
                'EMA(as_module=True) with precision "auto" does not exist: its model would not follow a change of '
                "precision; set "
                "bf16.enabled (or nothing, for fp32), or use `with ema.applied():`"
            )
        total = plan.layout.total
        if engine.state.segment is not None:
            self._segment = cast("MemoryGroup", engine.group).segment(total * plan.dtype.itemsize)
            self._flat = self._segment.tensor(engine.state.dtype, 0, total)
        elif engine.device.type == "cpu":
            self._flat = memory.zeros(total, engine.state.dtype, memory.COLORS["average_flat"])
        else:
            self._flat = torch.zeros(total, dtype=engine.state.dtype, device=engine.device)

    def _make_module(self) -> None:
        """A copy of the engine's module whose trained parameters are views of this average; what is frozen is the
        engine's own memory."""
        state, layout = self.engine.state, self.engine.plan.layout
        memo: dict[int, torch.nn.Parameter] = {}
        self._params: list[torch.nn.Parameter] = []
        for p, offset, n in zip(state.trained, layout.offsets, layout.numels):
            memo[id(p)] = mine = torch.nn.Parameter(
                torch.empty(0, dtype=torch.float32, device="cpu"), requires_grad=False
            )
            mine.data = self._own_flat()[offset : offset + n].view(p.shape)  # a version counter of its own
            self._params.append(mine)
        for _, p in state.frozen:
            memo[id(p)] = torch.nn.Parameter(p.detach(), requires_grad=False)
        self._module = copy.deepcopy(self.engine.module, memo)
        if state.segment is not None:
            for p in self._params:
                share(p)
        self._versions = [p._version for p in self._params]

    def _fence(self) -> None:
        """Before the module's memory is written: nobody reads it any more, and nobody has written it. Collective with
        as_module."""
        if self._module is None:
            take_in_writes(self.engine)
            return
        stray = next((i for i, (p, v) in enumerate(zip(self._params, self._versions)) if p._version != v), -1)
        take_in_writes(self.engine)
        for rank, i in enumerate(
            self.engine.group.gather_all(torch.tensor([stray], dtype=torch.int64, device="cpu")).view(-1).tolist()
        ):
            if i >= 0:
                raise StrayWriteError(
                    f"parameter '{self.engine.state.names[i]}' of the average '{self.label}' was written on rank "
                    f"{rank}; its values are "
                    "made by update() alone. Set the engine's weights (deepc.view(p).fp32 = ...) and call ema.reset()"
                )

    @torch.no_grad()
    def _publish(self) -> None:
        """The module has the average, on every rank; its buffers are the engine's."""
        if self._module is None:
            return
        engine, plan = self.engine, self.engine.plan
        if self._values is not None:
            for flat, shard, n in plan.slices:
                self._own_flat()[flat : flat + n].copy_(self._values[shard : shard + n])
        if plan.stage > 0 and engine.group.world > 1:
            if plan.nodes > 1:
                cast("NodesReducer", engine.reducer).publish(self._own_flat(), self._values, plan.stage == 3)
            elif plan.stage < 3:
                engine.reducer.gather(self._own_flat())
            engine.group.node_barrier()
        if self._params:
            increment_version(self._params)
        self._versions = [p._version for p in self._params]
        self._follow_buffers(self._module, engine.module)

    def _follow_buffers(self, module: torch.nn.Module, live: torch.nn.Module) -> None:
        """By name: a model may make a buffer, or a longer one, in any forward (a mask for the longest sample)."""
        mine = dict(module.named_modules(remove_duplicate=False))
        made: dict[int, torch.Tensor] = {}  # modules may share one
        for prefix, source in live.named_modules():
            if (target := mine.get(prefix)) is None:
                continue
            for name, b in source._buffers.items():
                own = target._buffers.get(name)
                if b is None:
                    if own is not None:
                        target._buffers[name] = None
                elif own is not None and _takes(own, b):
                    own.copy_(b)
                else:
                    if id(b) not in made:
                        made[id(b)] = copy.deepcopy(b.detach())
                    target.__dict__.pop(name, None)  # what the name was before, as in the engine's model
                    target._buffers[name] = made[id(b)]
            target._non_persistent_buffers_set = set(source._non_persistent_buffers_set)

    # ---- checkpoints: saving.py -----------------------------------------------------------------------------------
    def loaded(self, updates: int) -> None:
        """After the checkpoint's values were put into the pieces. Collective with as_module."""
        self.updates, self.resets, self._seen = updates, 0, self._applied_steps()
        self._tell(self.decay)
        self._publish()

    def __repr__(self) -> str:
        return f"EMA('{self.label}', decay {self.decay}, {self.updates} updates)"


def _takes(own: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the buffer `own` can be given the values of `b` where it lies."""
    alike = (own.shape, own.dtype, own.layout, own.device) == (b.shape, b.dtype, b.layout, b.device)
    return alike and not is_expanded(own)


def _checked_decay(decay: float) -> float:
    if not isinstance(decay, (int, float)) or not 0.0 <= decay < 1.0:
        raise ArgumentError(f"EMA: decay {decay!r} is not a number in [0, 1)")
    return float(decay)
