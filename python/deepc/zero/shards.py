"""zero.Init where ranks share no memory, or where parameters go to the disk as they are built: each rank keeps its part
of them, in memory or there, so that no rank ever holds the model.

A parameter is whole and this rank's own from its registration until others take its room (`KEEP` bytes, the last one in
any case); then every rank keeps 1/ranks of rank 0's values, and the parameter is released (param.py). A touch inside
the context, of a constructor or a parent's weight init, makes it whole again. Both are collective: all ranks build the
same model, and touch the same parameters in the same order. Each time they compare what they are about to do, so that
ranks which don't raise MismatchError and none waits for the others in vain."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..core.foreign import patches
from ..errors import MismatchError, ReleasedParameterError
from ..offload.array import DiskPlace, DiskPlaces
from .parameters.around import wants_names_alone
from .parameters.gathered import Params, Whole
from .parameters.param import NodeParameter, Released, Unit, UnitState, released_class, set_data, unshare
from .sources import Alone, Exchange

KEEP = 64 << 20  # bytes of parameters that stay whole while a model is built; a quarter of it where they go to disk
_PART, _WHOLE, _END = 1, 2, 3  # what ranks are about to do
_DOING = {_PART: "gives up", _WHOLE: "touches", _END: "is at the end of the context, after"}
_data_of_tensor: Any = torch.Tensor.data  # the C getset descriptor


class _Part(Unit):
    """One parameter. index: counted as they are registered; mine: this rank's part, padded at the last ranks. Whole, it
    is any tensor, of which others may have views: so it is replaced, not resized."""

    def __init__(self, index: int, p: torch.nn.Parameter) -> None:
        super().__init__(index, f"parameter {index}", [p], UnitState.UNSHARDED)
        self._of = weakref.ref(p)  # it lives as long as its module wants
        self.mine: torch.Tensor | DiskPlace | None = None
        self.use()

    @property
    def params(self) -> Sequence[torch.nn.Parameter]:
        p = self._of()
        return [] if p is None else [p]

    def fill(self, value: torch.Tensor) -> None:
        """`value`, of the parameter's shape, is its memory from now on; it is whole, with one user."""
        self.begin()
        for p in self.params:
            set_data(p, value)
        self.finish()
        self.use()

    def become(self, kind: type[torch.nn.Parameter]) -> None:
        """A plain Parameter that is cut is of class `kind` when it is whole again."""
        if self.kinds == [torch.nn.Parameter]:
            self.kinds = [kind]
            self._hide()

    def cut(self) -> None:
        """It has no user any more, and its memory goes."""
        self.kinds = [type(p) for p in self.params]  # a constructor may have changed it
        self.unuse()
        self.reshard()

    def _allocate(self) -> None:
        pass  # `fill` brings its memory

    def _free(self) -> None:
        for p in self.params:
            set_data(p, without_memory(p))


class Shards:
    """The parameters of one zero.Init, and their owner (param.Owner) while they are released. Made collectively.
    Private memory: KEEP bytes or one parameter, and 1/ranks of all, which lie in `folder` if there is one."""

    def __init__(
        self, world: int, folder: str = "", placed: Callable[[torch.nn.Parameter], None] = lambda p: None
    ) -> None:
        """placed: is told of a parameter that a touch has given other memory while the model is built."""
        self._placed = placed
        self._exchange: Exchange | Alone = Exchange("zero.Init", torch.device("cpu")) if world > 1 else Alone()
        self._disk = DiskPlaces(folder, "parameters of zero.Init") if folder else None
        self._world, self._rank = self._exchange.world, self._exchange.rank
        self._parts = WeakIdKeyDictionary()  # parameter -> _Part
        self._whole: dict[int, torch.nn.Parameter] = {}  # by id, the longest whole first
        self._held: set[int] = set()  # ids of those that a GatheredParameters keeps whole
        self._number = 0
        self._building = True

    @property
    def on_disk(self) -> bool:
        """Whether the parts lie there."""
        return self._disk is not None

    # ---- while a model is built --------------------------------------------------------------------------------------
    @torch.no_grad()
    def take(self, p: torch.nn.Parameter, dtype: torch.dtype) -> None:
        """`p` was registered; it becomes `dtype`. Collective."""
        if dtype != p.dtype:
            p.data = p.data.to(dtype)
        self._number += 1
        self._parts[p] = _Part(self._number, p)
        p._deepc_owner = self  # type: ignore[attr-defined]
        self._whole[id(p)] = p
        self.settle()

    def settle(self) -> None:
        """Parameters that have been whole for longest are cut until the others fit. Collective."""
        idle = [p for i, p in self._whole.items() if i not in self._held] if self._building else []
        room = (KEEP if self._disk is None else KEEP // 4) - sum(p.nbytes for p in idle)
        for p in idle[:-1]:
            if room >= 0:
                return
            room += p.nbytes
            self._cut(p, 0)

    def cut_all(self) -> None:
        """What is whole is cut; its values are rank 0's. Collective."""
        for p in list(self._whole.values()):
            self._cut(p, 0)

    def finish(self) -> None:
        """The end of the context. Collective."""
        self._agree(_END, self._number)
        self._building = False
        self.cut_all()
        for part in list(self._parts.values()):
            part.become(NodeParameter)

    @contextlib.contextmanager
    def parameters_of_parameters(self) -> Iterator[None]:
        """Inside, `nn.Parameter(p)` of a released p makes a parameter of its values: torch looks at p's class before it
        touches p."""
        before = torch.nn.Parameter.__dict__["__new__"]

        def new(cls: type[torch.nn.Parameter], data: Any = None, requires_grad: bool = True) -> Any:
            if isinstance(data, Released) and data._deepc_owner is self:
                self._make_whole(data)  # type: ignore[arg-type]  # it is a Parameter as well
            return before.__func__(cls, data, requires_grad)

        torch.nn.Parameter.__new__ = staticmethod(new)  # type: ignore[assignment]
        try:
            with patches.applied_inside("parameter-class"):
                yield
        finally:
            torch.nn.Parameter.__new__ = before  # type: ignore[method-assign]  # what it was

    # ---- released and whole ------------------------------------------------------------------------------------------
    @torch.no_grad()
    def _cut(self, p: torch.nn.Parameter, root: int | None) -> None:
        """`p` is released; its values are those of rank `root` (None: those it was made whole with). Collective with a
        root."""
        part: _Part = self._parts[p]
        if root is not None:
            self._agree(_PART, part.index)
            value = p.detach().contiguous().view(-1)
            if root != self._rank:  # not in place: p may be a view of a mapped file, whose pages a write would copy
                value = torch.empty_like(value)
            if value.numel():
                self._exchange.broadcast(value.view(torch.uint8), root)
            n = -(-value.numel() // self._world)
            mine = value[self._rank * n : (self._rank + 1) * n]
            if mine.numel() < n or self._disk is None:
                padded = torch.zeros(n, dtype=value.dtype, device="cpu")
                padded[: mine.numel()].copy_(mine)
                mine = padded
            if self._disk is not None:
                part.mine = self._disk.put(mine, part.mine if isinstance(part.mine, DiskPlace) else None)
            else:
                part.mine = mine
        part.cut()
        del self._whole[id(p)]

    @torch.no_grad()
    def _make_whole(self, p: torch.nn.Parameter) -> None:
        """The opposite. Collective."""
        self._parts[p].fill(self._value(p))
        self._whole[id(p)] = p
        if self._building:
            self._placed(p)

    def _value(self, p: torch.nn.Parameter) -> torch.Tensor:
        """The values of the released `p`, in memory of their own. Collective."""
        part: _Part = self._parts[p]
        self._agree(_WHOLE, part.index)
        mine = part.mine
        if isinstance(mine, DiskPlace) and self._disk is not None:
            mine = self._disk.get(mine, p.dtype)
        assert isinstance(mine, torch.Tensor)
        whole = self._exchange.whole(mine)
        if whole is part.mine:
            whole = whole.clone()
        return whole[: p.numel()].view(p.shape)

    def _agree(self, doing: int, number: int) -> None:
        """Raises on all ranks if they are about to do different things. Collective."""
        rows = self._exchange.table([doing, number])
        if any(row != rows[0] for row in rows):
            told = ", ".join(f"rank {r} {_DOING[what]} parameter {n}" for r, (what, n) in enumerate(rows))
            raise MismatchError(
                f"zero.Init on ranks that share no memory: {told} (counted as they were registered). All ranks must"
                " build the same model, and read and write the same parameters in the same order while they do; put"
                " what one rank does alone behind the context, under deepc.zero.GatheredParameters"
            )

    # ---- as the owner of released parameters -------------------------------------------------------------------------
    def touched(self, p: torch.nn.Parameter, func: Callable[..., Any]) -> torch.Tensor | None:
        """See param.Owner. In the context `p` becomes whole."""
        if not self._building and wants_names_alone() and func is torch.Tensor.detach:
            return torch.empty(p.shape, dtype=p.dtype, device="meta")
        if not self._building:
            raise ReleasedParameterError(
                f"a parameter of shape {tuple(p.shape)} was touched ({getattr(func, '__name__', func)}) between"
                " zero.Init and deepc.initialize, and its values are not in this rank's memory: ranks that share none"
                " hold parts of them, or they lie on disk. Read"
                " it under deepc.zero.GatheredParameters(params); write it with modifier_rank=0 there"
            )
        self._make_whole(p)
        if func in (_data_of_tensor.__get__, _data_of_tensor.__set__):
            self.settle()  # of an operator's other arguments nothing is known before it is through
        return None

    def copy_of(self, p: torch.nn.Parameter) -> torch.Tensor:
        """The values of `p`, in memory of their own. Collective."""
        return self._value(p)

    # ---- until the engine takes them ---------------------------------------------------------------------------------
    def whole(self, params: Params, writer: int | None) -> Whole:
        """What makes `params` whole for a while, for rank `writer` to write (None: nobody writes)."""
        return _Held(self, params, writer)

    def hold(self, params: Params) -> list[torch.nn.Parameter]:
        """Makes `params` whole until `let_go`, which takes what this returns: those that no context around keeps
        whole. Collective."""
        mine = [p for p in params if id(p) not in self._held]
        for p in mine:
            if not isinstance(p, Released):
                self._cut(p, 0)  # while a model is built, what is whole has this rank's values
            self._make_whole(p)
            self._held.add(id(p))
        return mine

    def let_go(self, params: Params, mine: Params, writer: int | None) -> None:
        """The end of that. writer: whose values count from now on (None: nobody wrote). Collective."""
        self._held.difference_update(id(p) for p in mine)
        for p in params:
            if writer is not None or (id(p) not in self._held and not self._building):
                self._cut(p, writer)
            if id(p) in self._held and isinstance(p, Released):
                self._make_whole(p)  # for the context around
        self.settle()

    def give(self, p: torch.nn.Parameter) -> None:
        """`p` is made whole, and is an ordinary parameter from now on. Collective."""
        self._make_whole(p)
        del self._whole[id(p)], self._parts[p]
        del p._deepc_owner  # type: ignore[attr-defined]
        unshare(p)

    def __del__(self) -> None:
        try:
            self._exchange.close()
            if self._disk is not None:
                self._disk.close()
        except Exception:  # at the end of the process, what it needs may be gone, contextlib too
            pass


class _Held(Whole):
    """Parameters of a zero.Init whose parts lie on all ranks, gathered."""

    def __init__(self, shards: Shards, params: Params, writer: int | None) -> None:
        self._shards, self._params, self._writer = shards, params, writer

    def begin(self) -> None:
        self._mine = self._shards.hold(self._params)

    def end(self) -> None:
        self._shards.let_go(self._params, self._mine, self._writer)


class Late:
    """The owner of parameters whose values come from elsewhere (a file) when an engine takes them, one at a time."""

    def __init__(self) -> None:
        self._read: dict[int, Callable[[], torch.Tensor]] = {}
        self._together: set[int] = set()  # id(parameter) of those whose `read` is collective

    def take(self, p: torch.nn.Parameter, read: Callable[[], torch.Tensor], together: bool = False) -> None:
        """`p` is released, its memory gone; its values will be what `read` returns, of its shape. together: all ranks
        must call it. Collective if a zero.Init has released it."""
        give(p)
        with torch.no_grad():
            set_data(p, without_memory(p))
        p.__class__ = released_class(type(p))
        p._deepc_owner = self  # type: ignore[attr-defined]
        self._read[id(p)] = read
        if together:
            self._together.add(id(p))

    def touched(self, p: torch.nn.Parameter, func: Callable[..., Any]) -> None:
        """See param.Owner."""
        raise ReleasedParameterError(
            f"a parameter of shape {tuple(p.shape)} was touched ({getattr(func, '__name__', func)}) before its values"
            " were read"
        )

    def settle(self) -> None:
        """See param.Owner."""

    def copy_of(self, p: torch.nn.Parameter) -> torch.Tensor:
        """The values of `p`."""
        return self._read[id(p)]()

    def give(self, p: torch.nn.Parameter, read: bool) -> None:
        """`p` is an ordinary parameter from now on, with its values, or unless `read` with any."""
        value, read = self._read.pop(id(p)), read or id(p) in self._together
        p.__class__ = torch.nn.Parameter
        del p._deepc_owner  # type: ignore[attr-defined]
        with torch.no_grad():
            p.data = value() if read else torch.empty(p.shape, dtype=p.dtype, device="cpu")


def without_memory(p: torch.Tensor) -> torch.Tensor:
    """Of the shape and dtype of `p`, with storage of no bytes: it must not be read."""
    empty = torch.empty(p.shape, dtype=p.dtype, device="cpu")
    empty.untyped_storage().resize_(0)
    return empty


def give(p: torch.nn.Parameter, read: bool = True) -> bool:
    """Makes a parameter whole that a zero.Init, or a Late, has released; False if it is not such a one. Collective.
    read: this rank wants the values of a Late."""
    if not isinstance(p, Released):
        return False
    owner = p._deepc_owner
    if isinstance(owner, Late):
        owner.give(p, read)
    elif isinstance(owner, Shards):
        owner.give(p)
    return not isinstance(p, Released)
