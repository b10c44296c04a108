"""Whole and local values of a parameter that an engine trains: fp32 weights, gradient, optimizer states; read and
written.

    v = deepc.view(p)                    # p: a parameter of a model that was passed to deepc.initialize
    v.fp32; v.grad; v.state["exp_avg"]   # whole, fp32, p's shape, on every rank; can be assigned
    v.local.fp32; v.local.ranges         # this rank's part, 1-D, and where it lies in the flattened parameter

Every whole value, read or written, is collective: all ranks ask for the same parameters in the same order. So is
writing `local.fp32`, because what the model computes with follows at once. The other local values are this rank's own.
Of a parameter that is cut over tensor-parallel ranks whole values are of the whole, local ones of this rank's shard.

utils.py has DeepSpeed's names for the same (safe_get_full_grad, ...)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ...core.foreign import private
from ...core.ops import casts
from ...errors import ArgumentError, DiskError, ReleasedParameterError, UnsupportedError
from ...parallel.expert.spread import gather_experts, own_experts
from ...parallel.tensor.group import tensor_group, whole_of, whole_state_dict
from ...plan.layout import Segment
from ...zero.parameters import owners
from ...zero.parameters.gathered import GatheredParameters, SharedMemory
from ...zero.tiers.agree import together
from ...zero.tiers.windows import Window
from .stages import of_all_stages

if TYPE_CHECKING:
    from ...comm.groups import Group
    from ..base import EngineBase

_Pieces = Callable[[Segment], Window]


def engine_of(p: torch.Tensor) -> EngineBase | None:
    """The engine that trains `p`, or None."""
    return owners.trainer(p)


def view(p: torch.Tensor) -> View:
    """The values behind parameter `p`; see View. ArgumentError if no engine trains it."""
    if not isinstance(p, torch.Tensor):
        raise ArgumentError(
            f"deepc.view takes a parameter, got {type(p).__name__}; of a name: engine.module.get_parameter(name)"
        )
    engine = engine_of(p)
    if engine is None:
        raise ArgumentError(
            f"no deepc engine trains this parameter of shape {tuple(p.shape)}: it is frozen, not part of a model that"
            " was passed to deepc.initialize, or its engine was destroyed"
        )
    return View(engine, p)


class View:
    """One trained parameter, whole. Values are fp32 copies of the parameter's shape on every rank, and may be assigned
    a tensor (of any floating dtype, with as many elements), the same on all ranks, of which each rank keeps the part
    that it owns. All collective.
    """

    def __init__(self, engine: EngineBase, p: torch.Tensor) -> None:
        self._access = _Access(engine, p)
        self.param, self.name = p, engine.state.names[self._access.index]
        self.state, self.local = States(self._access), Local(self._access)

    @property
    def value(self) -> torch.Tensor:
        """What the model computes with, whole, in its dtype; a copy."""
        return self._access.value()

    @property
    def fp32(self) -> torch.Tensor:
        """The fp32 weights (masters where the model computes in 16 bits). Assigning: the model's values follow at
        once."""
        return self._access.fp32()

    @fp32.setter
    def fp32(self, value: torch.Tensor) -> None:
        self._access.set_fp32(value)

    @property
    def grad(self) -> torch.Tensor | None:
        """Average over ranks and micro-batches so far, unscaled, before clipping; None outside of backward .. step.
        What no_sync() left on the ranks is reduced for it. Assigning: between backward and step; the step uses it, its
        norm and clipping too.
        """
        return self._access.grad(self._access.engine.gradient_unit())

    @grad.setter
    def grad(self, value: torch.Tensor) -> None:
        self._access.set_grad(value, self._access.engine.gradient_unit())

    def __repr__(self) -> str:
        dtype = self._access.engine.plan.dtype.name
        return (
            f"deepc.view('{self.name}', shape {self._access.shape}, {dtype}, states"
            f" {', '.join(self.state) or 'none yet'})"
        )


class States(Mapping[str, torch.Tensor]):
    """Optimizer states of one parameter by name ("exp_avg", ...), whole; see View. `in`, len and iteration are this
    rank's knowledge; reading and writing one is collective."""

    def __init__(self, access: _Access) -> None:
        self._access = access

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._access.state(name)

    def __setitem__(self, name: str, value: torch.Tensor) -> None:
        self._access.set_state(name, value)

    def __iter__(self) -> Iterator[str]:
        return iter(self._access.state_names())

    def __len__(self) -> int:
        return len(self._access.state_names())

    def __contains__(self, name: object) -> bool:  # Mapping's would read it, which is collective
        return name in self._access.state_names()


class Local:
    """This rank's part of one parameter: 1-D fp32 copies, empty where it owns nothing of it. `ranges`: which elements
    of the flattened parameter (of its shard, where tensor parallelism cuts it) they are, as [begin, end), in this
    order. At stage 0 every rank owns all."""

    def __init__(self, access: _Access) -> None:
        self._access = access
        self.state = LocalStates(access)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        return [(s.param_begin, s.param_begin + s.length) for s in self._access.mine]

    @property
    def fp32(self) -> torch.Tensor:
        return self._access.local_fp32()

    @fp32.setter
    def fp32(self, value: torch.Tensor) -> None:
        """Collective, unlike the others: the model's values follow at once."""
        self._access.set_local_fp32(value)

    @property
    def grad(self) -> torch.Tensor | None:
        """As View.grad; None outside of backward .. step. Over several nodes at stage 0, where sums are completed when
        someone looks, collective."""
        return self._access.local_grad(self._access.engine.gradient_unit())

    @grad.setter
    def grad(self, value: torch.Tensor) -> None:
        self._access.set_local_grad(value, self._access.engine.gradient_unit())


class LocalStates(States):
    """States, this rank's part; nothing here is collective."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._access.local_state(name)

    def __setitem__(self, name: str, value: torch.Tensor) -> None:
        self._access.set_local_state(name, value)


class _Access:
    """Reads and writes the states of one parameter. `mine`: this rank's segments of it, in the parameter's order."""

    def __init__(self, engine: EngineBase, p: torch.Tensor) -> None:
        self.engine, self.param, self.cut = engine, p, engine.cuts.get(id(p))
        self.shape = tuple(p.shape) if self.cut is None else self.cut.shape
        self.index: int = next((i for i, q in enumerate(engine.state.trained) if q is p), -1)
        if self.index < 0:
            raise ArgumentError(f"this parameter of shape {tuple(p.shape)} is not trained by this engine")
        self.name = engine.state.names[self.index]
        self.mine = sorted(
            (s for r, s in engine.state.owners(self.index) if r == engine.group.rank), key=lambda s: s.param_begin
        )

    # ---- pieces <-> tensors ------------------------------------------------------------------------------------------
    def _whole(self, pieces: _Pieces) -> torch.Tensor:
        """The owners' pieces on every rank. [shape] fp32 on the engine's device. No rank holds more than this one
        tensor."""
        return self.joined(self.here(pieces))

    @torch.no_grad()
    def here(self, pieces: _Pieces) -> torch.Tensor:
        """The same of the shard that this rank has of the parameter, which is the whole where nothing is cut."""
        engine = self.engine
        out = torch.empty(self.param.numel(), dtype=torch.float32, device=engine.device)
        alone = engine.plan.own_all or engine.group.world == 1
        failure: DiskError | None = None
        for rank, s in engine.state.owners(self.index):
            part = out[s.param_begin : s.param_begin + s.length]
            if rank == engine.group.rank:
                try:
                    pieces(s).copy_to(part)
                except DiskError as exc:  # the others wait for the broadcast
                    failure = exc
            if not alone:
                engine.group.broadcast(part, rank)
        self._together(failure)
        return out.view(self.param.shape)

    def joined(self, shard: torch.Tensor) -> torch.Tensor:
        """The whole parameter (or a tensor of its shape) of this rank's shard of it, which is the whole where nothing
        is cut. Collective."""
        return shard if self.cut is None else whole_of(shard, self.cut, tensor_group(self.engine.mesh))

    def shard(self, value: torch.Tensor) -> torch.Tensor:
        """The reverse."""
        return value if self.cut is None else self.cut.take(value.detach().view(self.shape))

    @property
    def numel(self) -> int:
        """Of the whole parameter."""
        return math.prod(self.shape)

    def _together(self, failure: DiskError | None) -> None:
        """What the disk of some rank refused is an error on all. Collective, where something lies on disk."""
        engine = self.engine
        if not engine.plan.updates_on_disk:
            return
        # Those with other shards wait for this one's.
        together(engine.group, failure, tensor_group(engine.mesh) if self.cut is not None else None)

    def _write_together(self, write: Callable[[], None]) -> None:
        failure: DiskError | None = None
        try:
            write()
        except DiskError as exc:
            failure = exc
        self._together(failure)

    @torch.no_grad()
    def _mine(self, pieces: _Pieces) -> torch.Tensor:
        device = self.engine.state.state_device
        parts = [pieces(s).read().to(device) for s in self.mine]  # codes are read on the CPU
        return torch.cat(parts).float() if parts else torch.empty(0, dtype=torch.float32, device=device)

    @torch.no_grad()
    def _put(self, pieces: _Pieces, value: torch.Tensor, factor: float = 1.0) -> None:
        """This rank's pieces = its elements of the whole `value` * factor."""
        flat = self.shard(self._checked(value, self.numel, "the parameter's")).reshape(-1)
        for s in self.mine:
            pieces(s).write(flat[s.param_begin : s.param_begin + s.length], factor)

    @torch.no_grad()
    def _put_mine(self, pieces: _Pieces, value: torch.Tensor, factor: float = 1.0) -> None:
        flat, at = (
            self._checked(
                value, sum(s.length for s in self.mine), "this rank's part of the parameter, view(p).local.ranges, has"
            ).reshape(-1),
            0,
        )
        for s in self.mine:
            pieces(s).write(flat[at : at + s.length], factor)
            at += s.length

    def _checked(self, value: torch.Tensor, numel: int, whose: str) -> torch.Tensor:
        if not isinstance(value, torch.Tensor) or value.numel() != numel:
            got = f"{value.numel()} elements" if isinstance(value, torch.Tensor) else type(value).__name__
            raise ArgumentError(f"the new value for '{self.name}' has {got}; {whose} {numel}")
        return value.detach()

    # ---- fp32 weights ------------------------------------------------------------------------------------------------
    def value(self) -> torch.Tensor:
        failure: DiskError | None = None
        found = torch.empty(0, dtype=torch.float32, device="cpu")
        try:
            self._catch_up()
            found = self.engine.state.full_param(self.index)
        except DiskError as exc:
            failure = exc
        self._together(failure)
        return self.joined(found.clone().view(self.param.shape))

    def _catch_up(self) -> None:
        """Stages 0 to 2: what the user wrote into the replica counts, also by another memory; the step would make the
        master follow, a reader wants it now. And on disk a step may have been broken off."""
        self.engine.require_whole_step()
        state = self.engine.state
        if self.engine.plan.stage < 3 and state.was_written(self.index):
            state.take_in_replaced([self.index])
            state.master_from_params([self.index])

    def fp32(self) -> torch.Tensor:
        self._write_together(self._catch_up)
        if self.engine.state.master is None and self.engine.state.flat_host is None:
            return self.value().float()
        return self._whole(self.engine.state.window)

    def shard_fp32(self) -> torch.Tensor:
        """Of the shard that this rank has, of which others may own parts. Collective."""
        self._write_together(self._catch_up)
        return self.here(self.engine.state.window)

    def local_fp32(self) -> torch.Tensor:
        self._catch_up()
        return self._mine(self.engine.state.window)

    def set_fp32(self, value: torch.Tensor) -> None:
        self._checked(value, self.numel, "the parameter's")
        self._write_fp32(lambda: self._put(self.engine.state.window, value))

    def set_local_fp32(self, value: torch.Tensor) -> None:
        self._write_fp32(lambda: self._put_mine(self.engine.state.window, value))

    def _write_fp32(self, write: Callable[[], None]) -> None:
        engine = self.engine
        engine.guard.verify()
        self._write_together(self._catch_up)
        engine.group.barrier()  # nobody reads the old values any more
        self._write_together(write)
        engine.optimizer.rewritten([self.index])
        if engine.plan.parameters_as:  # quantised blocks are made of whole shards
            strays = [i for i in engine.state.changed() if i != self.index]
            engine.guard.publish()
            for i in strays:
                engine.state.versions[i] -= 1  # still to be seen at the step
            return
        self._write_together(lambda: engine.state.follow(self.index))
        engine.guard.remember()

    # ---- gradient ----------------------------------------------------------------------------------------------------
    def _grad_piece(self, s: Segment) -> Window:
        if self.engine.plan.gradients_on:
            return Window(self.engine.state.acc, s.shard_begin, s.length)
        return Window(self.engine.reducer.sums(s.shard_begin, s.length))

    def _have_grad(self) -> bool:
        """Whether there is one; completes sums that wait for someone to look. Collective where needed."""
        self._outside_of_backward()
        self.engine.hooks.check()
        if not self.engine.hooks.accumulated:
            return False
        self.engine.reducer.settle()
        return True

    def _take_left_behind(self) -> None:
        self._outside_of_backward()
        self.engine.hooks.take_left_behind(self.engine.averaging)

    def _outside_of_backward(self) -> None:
        if private.graph_task_id() != -1:
            raise ArgumentError(
                f"the gradient of '{self.name}' was asked for inside backward: it is not reduced yet. Ask after "
                "engine.backward(loss)"
            )

    def grad(self, factor: float) -> torch.Tensor | None:
        self._take_left_behind()
        return self._whole(self._grad_piece) * factor if self._have_grad() else None

    def local_grad(self, factor: float) -> torch.Tensor | None:
        return self._mine(self._grad_piece) * factor if self._have_grad() else None

    def _need_grad(self) -> None:
        if not self._have_grad():
            raise ArgumentError(
                f"'{self.name}' has no gradient to set: there was no backward since the last step. Set it between "
                "engine.backward(loss) and "
                "engine.step()"
            )
        tree = self.engine.reducer.tree
        if tree is not None and not tree.closed:
            raise UnsupportedError(
                f"the gradient of '{self.name}' can't be set before the step's last micro-batch with "
                'deepc.deterministic = "layout": it '
                "lies in parts that have their order. Set it after the last backward"
            )
        self.engine.hooks.norm_ready = False  # the norm was made of the old one

    def set_grad(self, value: torch.Tensor, factor: float) -> None:
        self._checked(value, self.numel, "the parameter's")
        self._take_left_behind()
        self._need_grad()
        self._write_together(lambda: self._put(self._grad_piece, value, 1.0 / factor))

    def set_local_grad(self, value: torch.Tensor, factor: float) -> None:
        self._need_grad()
        self._put_mine(self._grad_piece, value, 1.0 / factor)

    # ---- optimizer states --------------------------------------------------------------------------------------------
    def state_names(self) -> list[str]:
        return self.engine.optimizer.states_of(self.index)

    def _whole_state(self, name: str) -> torch.Tensor | None:
        """A state that every rank has whole; None: it lies in shards, if it is there."""
        found = self.engine.optimizer.whole_states()
        return next((t for n, i, t in found if n == name and i == self.index), None)

    def _state_views(self, name: str) -> dict[Segment, Window]:
        return {s: w for n, s, w in self.engine.optimizer.owned_states() if n == name and s.param == self.index}

    def _raise_without(self, name: str) -> NoReturn:
        names = self.state_names()
        raise ArgumentError(
            f"'{self.name}' has no optimizer state '{name}'; there "
            f"{'is none yet' if not names else 'are ' + ', '.join(names)}"
            + ("" if self.engine.optimizer.core else " (torch's optimizers make theirs at the first step)")
        )

    def _agreed_views(self, name: str) -> dict[Segment, Window]:
        """As _state_views; an error on all ranks if an owner lacks the state. Collective."""
        optimizer, engine = self.engine.optimizer, self.engine
        views = self._state_views(name)
        missing = any(s not in views for s in self.mine)
        if not optimizer.core and engine.group.world > 1:
            missing = bool(engine.group.gather_all(torch.tensor([int(missing)], dtype=torch.int64, device="cpu")).any())
        elif optimizer.core:
            missing = name not in self.state_names()
        if missing:
            self._raise_without(name)
        return views

    def state(self, name: str) -> torch.Tensor:
        if (whole := self._whole_state(name)) is not None:
            return whole.clone()
        return self._whole(self._agreed_views(name).__getitem__)

    def set_state(self, name: str, value: torch.Tensor) -> None:
        if (whole := self._whole_state(name)) is not None:
            self._checked(value, whole.numel(), "the state's")
            whole.view(-1).copy_(value.reshape(-1))
            return
        self._checked(value, self.numel, "the parameter's")
        views = self._agreed_views(name)
        self._write_together(lambda: self._put(views.__getitem__, value))

    def _local_views(self, name: str) -> dict[Segment, Window]:
        if self._whole_state(name) is not None:
            raise UnsupportedError(
                f"optimizer state '{name}' of '{self.name}' has no part that is this rank's: every rank has it whole,"
                " as deepc.view(p).state"
            )
        views = self._state_views(name)
        if any(s not in views for s in self.mine) or (self.engine.optimizer.core and name not in self.state_names()):
            self._raise_without(name)
        return views

    def local_state(self, name: str) -> torch.Tensor:
        return self._mine(self._local_views(name).__getitem__)

    def set_local_state(self, name: str, value: torch.Tensor) -> None:
        self._put_mine(self._local_views(name).__getitem__, value)


# ---- the model's values, for saving ----------------------------------------------------------------------------------
def module_state_dict(
    engine: EngineBase, exclude_frozen_parameters: bool = False, keeps: bool = True
) -> dict[str, torch.Tensor]:
    """The module's state_dict, whole, on every rank, in the training precision; at every stage. As with torch, its
    tensors are the model's own memory (of released parameters, of those that are cut over tensor-parallel ranks, and of
    the stages of a pipeline: copies). keeps: this rank wants it; else the result is empty. Collective."""
    engine.group.barrier()  # other ranks' updates are complete
    own = _own_state_dict(engine)
    out = of_all_ranks(engine, own, exclude_frozen_parameters, keeps)
    if engine.part is None and exclude_frozen_parameters:
        frozen = {id(p) for p in engine.module.parameters() if not p.requires_grad}
        names = {n for n, p in engine.module.named_parameters(remove_duplicate=False) if id(p) in frozen}
        if engine.spread:
            names = set(
                gather_experts(
                    {n: torch.zeros(1, dtype=torch.float32, device="cpu") for n in sorted(names)}, engine.module
                )
            )
        for name in names:
            out.pop(name, None)
    return out


def of_all_ranks(
    engine: EngineBase, own: dict[str, torch.Tensor], exclude_frozen_parameters: bool = False, keeps: bool = True
) -> dict[str, torch.Tensor]:
    """own: tensors of the shapes of the module's, which this rank has of them, by their names -> the whole model's: of
    all stages, all shards and all experts. exclude_frozen_parameters is without effect where there are no stages.
    Collective."""
    if engine.part is not None:
        return of_all_stages(engine, own, exclude_frozen_parameters, keeps)
    if engine.cuts:
        own.update(whole_state_dict(engine.module, own, tensor_group(engine.mesh)))
    return gather_experts(own, engine.module) if engine.spread else own


def _own_state_dict(engine: EngineBase) -> dict[str, torch.Tensor]:
    """The module's, as this rank has it; an error of the disk of some rank is one on all that wait for its values.
    Collective."""
    out: dict[str, torch.Tensor] = {}
    failure: DiskError | None = None
    try:
        out = engine.module.state_dict()
        engine.state.meet()  # a rank where units were there does not leave those that gather them
    except DiskError as exc:
        failure = exc
    if engine.plan.parameters_on:
        together(engine.everyone, failure)
    elif failure is not None:
        raise failure
    return out


def consolidated_state_dict(
    engine: EngineBase, exclude_frozen_parameters: bool = False, copies: bool = True
) -> dict[str, torch.Tensor] | None:
    """module_state_dict on the CPU on rank 0, None on the others; copies: that training does not change, each in memory
    of its own (who writes safetensors takes what shares a storage for tied, and leaves it out), of tied ones one.
    Collective."""
    whole = module_state_dict(engine, exclude_frozen_parameters, engine.everyone.rank == 0)
    if engine.everyone.rank != 0:
        return None
    taken = _copier(engine.module) if copies else lambda t: t.detach().cpu()
    return type(whole)((n, taken(t) if isinstance(t, torch.Tensor) else t) for n, t in whole.items())


def _copier(module: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """What gives a tensor of the model's state_dict on the CPU, in memory that is neither the model's nor another
    tensor's; tied ones are given one."""
    living = set()
    for own in (*module.parameters(), *module.buffers()):
        with contextlib.suppress(ReleasedParameterError):  # its values in the state_dict are a copy
            living.add(own.untyped_storage().data_ptr())
    made: dict[tuple[Any, ...], torch.Tensor] = {}

    def copied(t: torch.Tensor) -> torch.Tensor:
        key = (t.data_ptr(), t.shape, t.stride(), t.dtype, t.device)
        if key not in made:
            found, storage = t.detach().cpu(), t.untyped_storage()
            shares = storage.data_ptr() in living or storage.nbytes() > t.nbytes
            made[key] = found.clone() if shares and found.data_ptr() == t.data_ptr() else found
        return made[key]

    return copied


def load_module_state_dict(engine: EngineBase, state_dict: dict[str, Any], strict: bool) -> None:
    """The module's load_state_dict; fp32 masters follow. At stage 3 rank 0's values count, and it alone writes, so that
    no rank makes a copy; buffers are every rank's own. What it raises is raised on all ranks. Collective."""
    params = [*engine.state.trained, *(p for _, p in engine.state.frozen)]
    if engine.spread:
        state_dict = own_experts(state_dict, engine.module)
    if engine.cuts:
        state_dict = dict(state_dict)
        for name, p in engine.module.named_parameters(remove_duplicate=False):
            given, cut = state_dict.get(name), engine.cuts.get(id(p))
            if cut is not None and isinstance(given, torch.Tensor) and tuple(given.shape) == cut.shape:
                state_dict[name] = cut.take(given)
    if engine.plan.mode != "resident" or engine.group.world == 1:
        with GatheredParameters(params, modifier_rank=0):
            engine.module.load_state_dict(state_dict, strict=strict)
        if engine.plan.stage < 3:
            engine.guard.modified(params)
            engine.optimizer.rewritten(i for i, n in enumerate(engine.state.names) if n in state_dict)
        return
    engine.guard.refuse_writes()
    private = [p for p in params if not casts(p)]
    whole = SharedMemory(engine.group, params, 0, copies=False, private=private)
    whole.begin()
    error: Exception | None = None
    try:
        if engine.group.rank == 0:
            engine.module.load_state_dict(state_dict, strict=strict)
        else:
            own = {n for n, _ in engine.module.named_buffers(remove_duplicate=False)}
            known = {id(p) for p in params}  # others have joined the model late
            own |= {n for n, p in engine.module.named_parameters(remove_duplicate=False) if id(p) not in known}
            engine.module.load_state_dict({n: t for n, t in state_dict.items() if n in own}, strict=False)
    except Exception as exc:
        error = exc
    whole.end()
    engine.guard.modified(params)
    _raise_everywhere(engine.group, error)


def _raise_everywhere(group: Group, error: Exception | None) -> None:
    """If some rank has an error, all raise: their own, or the first rank's text. Collective."""
    text = "" if error is None else f"rank {group.rank}: {type(error).__name__}: {error}"
    data = torch.frombuffer(bytearray(text.encode()[:4096].ljust(4096)), dtype=torch.uint8)
    texts = [bytes(row.tolist()).decode(errors="replace").rstrip() for row in group.gather_all(data)]
    if error is not None:
        raise error
    if first := next((t for t in texts if t), ""):
        raise RuntimeError(first)
