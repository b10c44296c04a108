"""Parameters of ZeRO-3 that are whole for a while: who holds them (an engine, or a zero.Init until there is one), the
one form in which they are made whole and given back (`Whole`), and users' context for it (`GatheredParameters`)."""

from __future__ import annotations

import contextlib
import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ...core import env
from ...errors import ArgumentError, DiskError, StrayWriteError
from .param import is_lent, lend, memory_of, set_data, share, take_back, unshare

if TYPE_CHECKING:
    from types import TracebackType

    from ...comm.groups import Group

Params = Sequence[torch.nn.Parameter]
logger = logging.getLogger("deepc")


class Whole:
    """Parameters that are whole from `begin` to `end`; both are collective, `end` also after an error inside. This one
    is of parameters that are whole at any time, and which nobody writes."""

    def begin(self) -> None:
        """They can be read now, and the writer may write."""

    def end(self) -> None:
        """What the writer wrote is everyone's; they are what they were before."""

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self.end()


class Broadcasts(Protocol):
    """Of a comm.groups.Group, or of ranks along an axis of a mesh."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> Any: ...


def is_expanded(t: torch.Tensor) -> bool:
    """Whether elements of `t` lie in one place (tensor.expand), so that it can't be written."""
    return t.layout == torch.strided and any(stride == 0 and n > 1 for stride, n in zip(t.stride(), t.shape))


def fill(t: torch.Tensor, value: torch.Tensor) -> None:
    """`t`, of any layout, gets the values of the dense `value` of its shape, as a stored one is."""
    if is_expanded(t):
        t.data = value.to(device=t.device, dtype=t.dtype, copy=True)
    elif t.layout == torch.strided:
        t.data.copy_(value)
    else:
        t.data = value.to(device=t.device, dtype=t.dtype).to_sparse(layout=t.layout)


def broadcast_bytes(group: Broadcasts, tensor: torch.Tensor, root: int) -> None:
    """`tensor`, of any dtype and layout, is rank `root`'s. Collective."""
    if tensor.numel() == 0:
        return
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    wide = (torch.view_as_real(flat) if flat.is_complex() else flat).view(-1).view(torch.uint8)
    group.broadcast(wide, root)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat)


def broadcast_whole(group: Broadcasts, t: torch.Tensor, root: int) -> None:
    """A parameter's or buffer's values are rank `root`'s, whatever its dtype and layout: what can't be written where it
    lies (an expanded or a sparse buffer) gets other memory. Collective."""
    if t.numel() == 0:
        return
    if t.layout == torch.strided and not is_expanded(t):
        broadcast_bytes(group, t.data, root)
        return
    whole = t.data.contiguous() if t.layout == torch.strided else t.to_dense()
    broadcast_bytes(group, whole, root)
    fill(t, whole)


class SharedMemory(Whole):
    """Parameters in memory that the ranks of a node share, readable at any time. Rank `writer` writes (None: nobody);
    the others get private copies meanwhile, so that what they write is dropped, unless `copies` is False: then they
    don't write."""

    def __init__(
        self, group: Group, params: Params, writer: int | None, *, copies: bool = True, private: Params = ()
    ) -> None:
        """private: those of `params` that every rank has in memory of its own, which get the writer's values."""
        self._group, self._params, self._writer, self._private = group, params, writer, private
        self._copies = copies and group.rank != writer
        self._views: list[torch.Tensor] = []

    def begin(self) -> None:
        if self._writer is None:
            return
        self._group.barrier()  # nobody reads any more
        if self._copies:
            self._views = [p.data for p in self._params]
            for p in self._params:
                p.data = p.data.clone()

    def end(self) -> None:
        if self._writer is None:
            return
        for p, view in zip(self._params, self._views):
            p.data = view
        self._views = []
        self._group.barrier()  # the writer's values are visible on its node
        for p in self._private:
            broadcast_bytes(self._group, p.data, self._writer)
        if self._group.nodes > 1:
            private = {id(p) for p in self._private}
            for p in (p for p in self._params if id(p) not in private):
                self._group.spread(p.data.view(-1), self._writer)
            self._group.barrier()


# ---- who holds a parameter -------------------------------------------------------------------------------------------
class Holder(Protocol):
    """Who holds parameters of stage 3."""

    @property
    def group(self) -> Group:
        """The ranks that hold them together."""

    def whole(self, params: Params, writer: int | None) -> Whole:
        """What makes `params` whole, for rank `writer` to write (None: nobody writes)."""

    def written(self, params: Params) -> str | None:
        """Which of `params`, for a message, this rank wrote outside of what `whole` allows; None: none."""

    def is_available(self, p: torch.nn.Parameter) -> bool:
        """Whether `p` can be read now without a gather."""


class Values(Protocol):
    """What `Held` asks of an engine's model states (state.py)."""

    @property
    def group(self) -> Group: ...
    @property
    def names(self) -> Sequence[str]: ...
    @property
    def trained(self) -> Params: ...
    def whole(self, params: Params, writer: int | None) -> Whole: ...
    def changed(self) -> list[int]: ...
    def frozen_write(self, among: set[int]) -> str | None: ...
    def is_available(self, p: torch.nn.Parameter) -> bool: ...


class Held:
    """Parameters of an engine. before: refuses what was written outside of a context so far; after: makes masters and
    other nodes follow what the writer wrote. Both collective. level: called on the writer alone, before the others see
    what it wrote: gives it the values of the writer that counts, where ranks of other groups hold the same parameter.
    """

    def __init__(
        self,
        state: Values,
        before: Callable[[], None],
        after: Callable[[Params], None],
        level: Callable[[Params], None] = lambda params: None,
    ) -> None:
        self._state, self._before, self._after, self._level = state, before, after, level

    @property
    def group(self) -> Group:
        return self._state.group

    def whole(self, params: Params, writer: int | None) -> Whole:
        inner = self._state.whole(params, writer)
        if writer is None:
            return inner
        writes = self._state.group.rank == writer
        level = (lambda: self._level(params)) if writes else (lambda: None)
        return _Followed(inner, self._before, level, lambda: self._after(params))

    def written(self, params: Params) -> str | None:
        mine = {id(p) for p in params}
        changed = {i for i in self._state.changed() if id(self._state.trained[i]) in mine}
        return self._state.names[min(changed)] if changed else self._state.frozen_write(mine)

    def is_available(self, p: torch.nn.Parameter) -> bool:
        return self._state.is_available(p)


class _Followed(Whole):
    """`inner`, with what an engine does before and after a write."""

    def __init__(
        self, inner: Whole, before: Callable[[], None], level: Callable[[], None], after: Callable[[], None]
    ) -> None:
        self._inner, self._before, self._level, self._after = inner, before, level, after

    def begin(self) -> None:
        self._before()
        self._inner.begin()

    def end(self) -> None:
        failure: DiskError | None = None
        self._level()
        try:
            self._inner.end()
        except DiskError as exc:  # on all ranks: what is there now counts
            failure = exc
        self._after()
        if failure is not None:
            raise failure


# id(parameter) -> who holds it; an entry goes with its holder, which keeps its parameters.
_held: weakref.WeakValueDictionary[int, Holder] = weakref.WeakValueDictionary()
built = WeakIdKeyDictionary()  # parameter -> its Holder, from zero.Init to deepc.initialize
_numbers = WeakIdKeyDictionary()  # parameter -> when it came under stage 3, counted
_next = itertools.count()


def hold(params: Iterable[torch.nn.Parameter], holder: Holder) -> None:
    """`params` are held by `holder` as long as somebody refers to it."""
    for p in params:
        _held[id(p)] = holder
        share(p)
        number(p)


def let_go(params: Iterable[torch.nn.Parameter], holder: Holder) -> None:
    """The end of that: ordinary parameters."""
    for p in params:
        if _held.get(id(p)) is holder:
            del _held[id(p)]
            unshare(p)


def holder_of(p: torch.Tensor) -> Holder | None:
    """Who holds `p`; None: it is not one of stage 3, nor built under zero.Init."""
    found: Holder | None = _held.get(id(p)) or built.get(p)
    return found


def number(p: torch.nn.Parameter) -> int:
    """Of a parameter of stage 3: its number in the order in which they came."""
    if p not in _numbers:
        _numbers[p] = next(_next)
    at: int = _numbers[p]
    return at


def is_zero_param(p: object) -> bool:
    """True if `p` is held by a stage-3 engine or was built under zero.Init."""
    return isinstance(p, torch.Tensor) and holder_of(p) is not None


# ---- parameters used outside of their module -------------------------------------------------------------------------
def register_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Accepted as in DeepSpeed, and not needed: parameters that are used outside of their module are found without
    it."""
    if not isinstance(parameter, torch.nn.Parameter):
        raise ArgumentError(f"register_external_parameter takes a torch.nn.Parameter, got {type(parameter).__name__}")
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(f"register_external_parameter takes a torch.nn.Module, got {type(module).__name__}")
    module.__dict__.setdefault("_external_params", {})[id(parameter)] = parameter


def unregister_external_parameter(module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
    """Takes it back. ArgumentError if it was not registered."""
    if not isinstance(parameter, torch.nn.Parameter):
        raise ArgumentError(f"unregister_external_parameter takes a torch.nn.Parameter, got {type(parameter).__name__}")
    if getattr(module, "_external_params", {}).pop(id(parameter), None) is None:
        raise ArgumentError(
            f"parameter of shape {tuple(parameter.shape)} was not registered as an external parameter of "
            f"{type(module).__name__}"
        )


# ---- users' context --------------------------------------------------------------------------------------------------
class GatheredParameters:
    """Context for reading, and with `modifier_rank` writing, parameters of a stage-3 model, or of one that was built
    under zero.Init and has no engine yet. Collective over the ranks; parameters are whole inside.

    modifier_rank=None: for reading; a write inside raises StrayWriteError at the end. modifier_rank=r: what rank r
    writes (in place, or by `p.data = tensor` of its shape and dtype) is seen by all ranks after the context, and the
    fp32 masters follow; what other ranks write is private and dropped, as in DeepSpeed, where scripts often run the
    same code on all ranks (with DEEPC_DEBUG=1 it is an error that names rank and parameter). Rank r is counted among
    the ranks that hold the parameter together (the same stage, tensor shards and experts); what tensor- or
    expert-parallel ranks have alike is that of the first of them. fwd_module: the parameters become external parameters
    of it. Parameters that are neither are left alone. Contexts that write may not overlap in parameters."""

    private_data = False
    """Whether, without a modifier_rank, `.data` inside is a copy of each rank's own, whose writes end with the
    context."""

    def __init__(
        self,
        params: torch.Tensor | torch.nn.Module | Iterable[torch.Tensor | None],
        modifier_rank: int | None = None,
        fwd_module: torch.nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given: Iterable[Any]
        if isinstance(params, torch.Tensor):
            given = [params]
        elif isinstance(params, torch.nn.Module):
            given = params.parameters()
        else:
            given = params
        given = [p for p in given if p is not None]
        for p in given:
            if not isinstance(p, torch.Tensor):
                raise ArgumentError(f"GatheredParameters takes parameters, got {type(p).__name__}")
        unique = {id(p): p for p in given} if enabled else {}
        # All ranks take them in one order, whatever order they are given in: transformers gives a set.
        self._params = sorted((p for p in unique.values() if is_zero_param(p)), key=number)
        self._modifier = modifier_rank
        self._open: list[contextlib.ExitStack] = []  # one for each time that it is entered
        if modifier_rank is not None and not (isinstance(modifier_rank, int) and not isinstance(modifier_rank, bool)):
            raise ArgumentError(f"modifier_rank is a rank or None, got {modifier_rank!r}")
        if fwd_module is not None:
            for p in self._params:
                register_external_parameter(fwd_module, p)

    def __enter__(self) -> None:
        by_holder: dict[int, tuple[Holder, list[torch.nn.Parameter]]] = {}
        for p in self._params:
            if (holder := holder_of(p)) is not None:
                by_holder.setdefault(id(holder), (holder, []))[1].append(p)
        with contextlib.ExitStack() as stack:  # if one can't be opened, those before it are closed
            for holder, params in by_holder.values():
                stack.enter_context(_Opened(holder, params, self._modifier, self.private_data))
            self._open.append(stack.pop_all())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.pop().__exit__(kind, error, trace)  # all go home, also if one of them has an error to tell


class _Opened:
    """One GatheredParameters over the parameters of one holder."""

    _writing: set[int] = set()  # id(parameter) of all contexts that write now, which hold theirs

    def __init__(self, holder: Holder, params: list[torch.nn.Parameter], writer: int | None, private: bool) -> None:
        self._holder, self._params, self._writer = holder, params, writer
        self._private, self._lent = private and writer is None, list[torch.nn.Parameter]()

    def __enter__(self) -> None:
        group = self._holder.group
        if self._writer is not None:
            if not 0 <= self._writer < group.world:
                raise ArgumentError(f"modifier_rank {self._writer} is not one of {group.world} ranks")
            if _Opened._writing & {id(p) for p in self._params}:
                raise ArgumentError(
                    "GatheredParameters with a modifier_rank inside another one over the same parameter; close the"
                    " outer one first"
                )
            take_back(self._params)
        self._whole = self._holder.whole(self._params, self._writer)
        self._whole.begin()
        if self._private:
            self._lent = lend(p for p in self._params if id(p) not in _Opened._writing)
        if self._writer is not None:
            _Opened._writing.update(id(p) for p in self._params)
            self._memory = [memory_of(p) for p in self._params]
        self._versions = [p._version for p in self._params]

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if self._writer is None:
            _tell_of_lost(take_back(self._lent))
            self._whole.end()
            if kind is None:
                self._raise_if_written()
            return
        _Opened._writing.difference_update(id(p) for p in self._params)
        replaced, misfit = self._take_in_replaced()
        written = (i for i, (p, v) in enumerate(zip(self._params, self._versions)) if p._version != v or i in replaced)
        stray = next(written, -1)
        self._whole.end()
        if env.switch("DEEPC_DEBUG") and self._holder.group.world > 1:
            self._raise_if_others_wrote(stray, self._writer)
        if misfit is not None and kind is None:
            raise misfit

    @torch.no_grad()
    def _take_in_replaced(self) -> tuple[set[int], ArgumentError | None]:
        """`p.data = tensor` is a write: the values go to where the parameter lies, which has it again. The indices of
        such parameters, and what is wrong with a tensor that does not fit, whose values are dropped."""
        replaced: dict[int, torch.Tensor] = {}
        misfit: ArgumentError | None = None
        for i, (p, memory) in enumerate(zip(self._params, self._memory)):
            value = memory_of(p)
            if _form(value) != _form(memory):
                misfit = misfit or ArgumentError(
                    f"the data of parameter {i} of GatheredParameters was replaced by a tensor of shape"
                    f" {tuple(value.shape)} in {value.dtype} on {value.device}; its shape must stay"
                    f" {tuple(memory.shape)}, in {memory.dtype} on {memory.device}. The parameter keeps its values"
                )
                replaced[i] = memory
            elif value.layout == torch.strided and _place(value) != _place(memory):
                replaced[i] = value
        own = {m.untyped_storage().data_ptr() for m in self._memory if m.layout == torch.strided}
        for i, value in replaced.items():  # two that change places, one that is transposed: all are read before
            if value is not self._memory[i] and value.untyped_storage().data_ptr() in own:
                replaced[i] = value.clone()
        for i, value in replaced.items():
            if value is not self._memory[i]:
                self._memory[i].copy_(value)
            set_data(self._params[i], self._memory[i])
        self._memory = []  # a unit's storage is not given up while somebody has it
        return set(replaced), misfit

    def _raise_if_written(self) -> None:
        # those of a context around this one are looked at by that
        mine = [p for p in self._params if id(p) not in _Opened._writing and not is_lent(p)]
        name = self._holder.written(mine)
        if name is not None:
            raise StrayWriteError(
                f"parameter {name} was written under GatheredParameters without modifier_rank (or before it), which"
                " is for reading. Its memory is shared by all ranks of the node: pass modifier_rank=r, and what"
                " rank r writes counts"
            )

    def _raise_if_others_wrote(self, stray: int, writer: int) -> None:
        """stray: index of the first parameter that this rank wrote, or -1. Collective."""
        for rank, i in enumerate(self._holder.group.gather_all(torch.tensor([stray], device="cpu")).view(-1).tolist()):
            if i >= 0 and rank != writer:
                raise StrayWriteError(
                    f"parameter {i} of GatheredParameters, of shape {tuple(self._params[i].shape)}, was written on "
                    f"rank {rank}, but modifier_rank is {writer}: that write was dropped. Guard it by"
                    f" `if rank == {writer}:`"
                )


def _form(t: torch.Tensor) -> tuple[Any, ...]:
    return t.shape, t.dtype, t.device, t.layout


def _place(t: torch.Tensor) -> tuple[Any, ...]:
    return t.data_ptr(), t.stride()


_told: set[str] = set()


def _tell_of_lost(copies: Iterable[tuple[torch.nn.Parameter, torch.Tensor]]) -> None:
    """A line of the log, once a process, if a private copy had other values at the end."""
    for p, private in copies if "lost" not in _told else ():
        if _differs(p.detach(), private):
            _told.add("lost")
            logger.warning(
                "a parameter of shape %s was written under GatheredParameters without modifier_rank: that was each"
                " rank's own copy, and is dropped at the end, as in DeepSpeed. To keep it, pass modifier_rank=r, and"
                " what rank r writes counts",
                tuple(p.shape),
            )
            return


def _differs(own: torch.Tensor, private: torch.Tensor) -> bool:
    """By more than what adapters that were merged and unmerged leave of rounding; of what is no floats it is not
    asked."""
    if own.shape != private.shape or not own.is_floating_point() or not own.numel():
        return own.shape != private.shape
    exact = own.float()
    return bool((private.float() - exact).abs().amax() > exact.abs().amax() / 64)
