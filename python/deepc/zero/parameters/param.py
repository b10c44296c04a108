"""The parameters of stage 3 as Python objects: those whose writes by users must be seen (`NodeParameter`), those whose
values are not on this rank now (`Released`), and the state machine of parameters that come and go together (`Unit`)."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from ...core.foreign import private
from ...core.ops import name_of
from ...errors import UnitStateError
from ...plan.layout import keeps_bytes, padded, slots_of

_data: Any = private.data_of_tensor  # the C getset descriptor; torch's stub says that it is a Tensor


class NodeParameter(torch.nn.Parameter):
    """A parameter whose memory is shared by all ranks of the node (resident mode), or with an fp32 master behind it. A
    Parameter in everything, but `.data` shares its version counter: a write through it (`p.data.mul_(...)`, a
    clamp, an EMA copy), which would happen once per rank on shared memory, or be lost under the master, is seen at the
    next step like any other write.
    """

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        if id(self) not in _lent:
            return self.detach()
        if _lent[id(self)] is None:
            self.data = _data.__get__(self).clone()
        private: torch.Tensor = _data.__get__(self)
        return private

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if id(self) in _lent:
            if (memory := _lent[id(self)]) is None:
                memory = _lent[id(self)] = _data.__get__(self)
            if value.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr():
                value = value.detach().clone()  # model.cpu() and model.to() give back what they found
        _data.__set__(self, value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch has no annotation for its own
        return "Parameter containing:\n" + repr(self.detach().requires_grad_(self.requires_grad))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        """An ordinary parameter with memory of its own."""
        if id(self) not in memo:
            memo[id(self)] = torch.nn.Parameter(
                self.detach().clone(memory_format=torch.preserve_format), self.requires_grad
            )
        copy: torch.nn.Parameter = memo[id(self)]
        return copy


# id(NodeParameter) -> its memory, since `.data` was asked for or set and it has a private copy; None: before that
_lent: dict[int, torch.Tensor | None] = {}


def lend(params: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """`.data` of these is a private copy until `take_back`, to read and to write. Those of them that were not lent
    before."""
    new = [p for p in params if id(p) not in _lent]
    _lent.update((id(p), None) for p in new)
    return new


def is_lent(p: torch.nn.Parameter) -> bool:
    return id(p) in _lent


def take_back(params: Iterable[torch.nn.Parameter]) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
    """They have their own memory again. (parameter, private copy) of those that had one."""
    copies = []
    for p in params:
        if (memory := _lent.pop(id(p), None)) is not None:
            copies.append((p, _data.__get__(p)))
            _data.__set__(p, memory)
    return copies


def share(p: torch.nn.Parameter) -> None:
    """Makes `p` a NodeParameter; only plain Parameters change their class."""
    if type(p) is torch.nn.Parameter:
        p.__class__ = NodeParameter


def unshare(p: torch.nn.Parameter) -> None:
    if type(p) is NodeParameter:
        p.__class__ = torch.nn.Parameter  # type: ignore[assignment]  # the other way round is what mypy narrows to


# ---- released parameters (ZeRO-3, streamed mode) ---------------------------------------------------------------------
def _allowed() -> frozenset[Callable[..., Any]]:
    """What may be asked of a parameter whose values are not here: what it is, and its gradient."""
    t = torch.Tensor
    properties = (
        "shape",
        "dtype",
        "device",
        "layout",
        "requires_grad",
        "grad",
        "is_leaf",
        "grad_fn",
        "_version",
        "ndim",
        "name",
        "names",
        "is_cuda",
        "is_cpu",
        "is_meta",
        "is_sparse",
        "is_quantized",
        "is_mkldnn",
        "is_nested",
        "itemsize",
        "nbytes",
        "output_nr",
        "retains_grad",
        "_backward_hooks",
        "_post_accumulate_grad_hooks",
        "is_sparse_csr",
        "is_xpu",
        "is_mps",
        "_base",
        "grad_dtype",
    )
    methods = (
        "numel",
        "nelement",
        "size",
        "dim",
        "ndimension",
        "stride",
        "storage_offset",
        "element_size",
        "is_floating_point",
        "is_complex",
        "is_contiguous",
        "is_inference",
        "is_signed",
        "get_device",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "requires_grad_",
        "__hash__",
        "__len__",
        "is_shared",
        "has_names",
        "dim_order",
        "retain_grad",
    )
    out = set()
    for name in properties:
        attribute = getattr(t, name, None)
        for access in ("__get__", "__set__", "__delete__"):
            if hasattr(attribute, access):
                out.add(getattr(attribute, access))
    functions = {getattr(torch, f) for f in ("numel", "is_floating_point", "is_complex", "is_signed", "get_device")}
    return frozenset(
        out | functions | {getattr(t, m) for m in methods if hasattr(t, m)} | {private.has_compatible_shallow_copy_type}
    )


_ALLOWED = _allowed()
_data_of_tensor: Any = torch.Tensor.data  # as _data
_CONVERSIONS = frozenset(
    {
        torch.Tensor.to,
        torch.Tensor.cpu,
        torch.Tensor.cuda,
        torch.Tensor.float,
        torch.Tensor.half,
        torch.Tensor.bfloat16,
        torch.Tensor.double,
    }
)


def _changes_nothing(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `func` would give the released parameter args[0] back as it is: module.to(device) of what is there
    already."""
    if func not in _CONVERSIONS or sum(1 for _ in _released(args, kwargs)) != 1 or not isinstance(args[0], Released):
        return False
    twin = torch.empty((), dtype=args[0].dtype, device=args[0].device)
    return func(twin, *args[1:], **kwargs) is twin


class Owner(Protocol):
    """Who gathers released parameters (streamed/units.py, shards.py)."""

    def touched(self, p: Any, func: Callable[..., Any]) -> Any:
        """`func` is about to run on the released parameter `p`: gathers it or raises. What is not None is func's
        result."""

    def settle(self) -> None:
        """The operator is through."""

    def copy_of(self, p: Any) -> torch.Tensor:
        """The whole value of `p`, in memory of its own."""


class Released:
    """Mixin of the class that a parameter has while its values are not here: what it is can be asked; any other touch
    goes to its owner, which gathers it or raises. Without this an operator would read freed memory."""

    _deepc_owner: Owner
    shape: torch.Size  # the parameter's own, whose class comes behind this one
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _changes_nothing(func, args, kwargs):
            return args[0]
        owners: dict[int, Owner] = {}
        if func not in _ALLOWED:
            for p in {id(p): p for p in _released(args, kwargs)}.values():
                answer = p._deepc_owner.touched(p, func)
                if answer is not None:
                    return answer
                owners[id(p._deepc_owner)] = p._deepc_owner
        with private.without_torch_function():
            out = func(*args, **kwargs)
        for owner in owners.values():
            owner.settle()
        return out

    @property
    def data(self) -> torch.Tensor:
        self._deepc_owner.touched(self, _data_of_tensor.__get__)
        return self.data  # its class is another one now

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value is self:  # type: ignore[comparison-overlap]  # a parameter as well; module.to(device) of what is there
            return
        self._deepc_owner.touched(self, _data_of_tensor.__set__)
        self.data = value

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        dtype = name_of(self.dtype)
        return (
            f"Parameter(released by ZeRO-3: shape={tuple(self.shape)}, dtype={dtype}, device={self.device},"
            f" requires_grad={self.requires_grad})"
        )

    __str__ = __repr__

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        """An ordinary parameter with the whole value. Collective where ranks share no memory."""
        if id(self) not in memo:
            memo[id(self)] = torch.nn.Parameter(self._deepc_owner.copy_of(self).to(self.device), self.requires_grad)
        copy: torch.nn.Parameter = memo[id(self)]
        return copy


def _released(*values: Any) -> Iterator[Any]:
    for v in values:
        if isinstance(v, Released):
            yield v
        elif isinstance(v, (list, tuple)):
            yield from _released(*v)
        elif isinstance(v, dict):
            yield from _released(*v.values())


_classes: dict[type[torch.nn.Parameter], type[torch.nn.Parameter]] = {}


def released_class(kind: type[torch.nn.Parameter]) -> type[torch.nn.Parameter]:
    """The class of released parameters of class `kind`."""
    if kind not in _classes:
        _classes[kind] = type(f"Released{kind.__name__}", (Released, kind), {})
    return _classes[kind]


def set_data(p: torch.nn.Parameter, value: torch.Tensor) -> None:
    """`p.data = value`, also if `p` is released."""
    with private.without_torch_function():
        _data.__set__(p, value)


def memory_of(p: torch.nn.Parameter) -> torch.Tensor:
    """Where the values of `p`, which is not released, lie: `p.data` with a version counter of its own."""
    with private.without_torch_function():
        memory: torch.Tensor = _data.__get__(p)
    return memory


def version_of(p: torch.Tensor) -> int:
    """The version counter of `p`, released or not."""
    with private.without_torch_function():
        return p._version


# ---- parameters that keep their bytes (plan/layout.py) among those of the engine's dtype -----------------------------
def slots(p: torch.nn.Parameter, numel: int, dtype: torch.dtype) -> int:
    """Elements of `dtype`, the engine's, that `p` of `numel` elements takes."""
    return slots_of(numel, p.dtype.itemsize, dtype.itemsize) if keeps_bytes(p) else numel


def as_slots(p: torch.nn.Parameter, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[slots] of `dtype`: the bytes of `value`, of p's dtype, behind which there may be some that nobody reads; of
    another parameter its elements as they are."""
    flat = value.detach().reshape(-1)
    if not keeps_bytes(p):
        return flat
    out = torch.zeros(slots(p, flat.numel(), dtype), dtype=dtype, device="cpu")
    out.view(torch.uint8)[: flat.nbytes].copy_(flat.view(torch.uint8))
    return out


def of_slots(p: torch.nn.Parameter, shape: Sequence[int], flat: torch.Tensor) -> torch.Tensor:
    """The opposite: a view of `flat` [slots], of p's dtype and the shape."""
    return (flat.view(p.dtype)[: math.prod(shape)] if keeps_bytes(p) else flat).view(tuple(shape))


# ---- parameters that come and go together ----------------------------------------------------------------------------
class UnitState(enum.Enum):
    """Of a Unit: what this rank has of its parameters."""

    SHARDED = "sharded"  # no storage
    ARRIVING = "arriving"  # storage that is being filled
    UNSHARDED = "unsharded"  # storage with the values
    STALE = "stale"  # storage, but not with the values of the last step: something still refers to it


class Unit:
    """Parameters that are gathered and given up together: a state machine.

        SHARDED --begin--> ARRIVING --finish--> UNSHARDED --reshard--> SHARDED
        UNSHARDED --outdate--> STALE --begin--> ARRIVING    STALE --reshard--> SHARDED
        ARRIVING --drop--> STALE

    Only these five change `state` and storage, and only `use`, `unuse` and `reshard` the parameters' class: while
    nothing uses the unit its parameters are Released, also when it is there (gathered ahead, or kept), because it may
    go at any moment. A step that the state does not allow is a UnitStateError. persistent: it is never given up, and
    its parameters are never Released."""

    def __init__(self, index: int, name: str, params: Sequence[torch.nn.Parameter], state: UnitState) -> None:
        self.index, self.name, self.state = index, name, state
        self.kinds = [type(p) for p in params]  # the parameters' own classes
        self.elems = sum(p.numel() for p in params)
        self.uses = 0
        self.persistent = False

    @property
    def params(self) -> Sequence[torch.nn.Parameter]:
        """Its parameters, in their order."""
        raise NotImplementedError

    def begin(self) -> None:
        """It has storage from here on, which somebody fills."""
        if self._leave("begin", UnitState.SHARDED, UnitState.STALE) is UnitState.SHARDED:
            self._allocate()
        self.state = UnitState.ARRIVING

    def finish(self) -> None:
        """The values are there."""
        self._leave("finish", UnitState.ARRIVING)
        self.state = UnitState.UNSHARDED

    def drop(self) -> None:
        """Nobody fills it any more, and its values are not there."""
        self._leave("drop", UnitState.ARRIVING)
        self.state = UnitState.STALE

    def outdate(self) -> None:
        """The owners' values have changed."""
        self._leave("outdate", UnitState.UNSHARDED)
        self.state = UnitState.STALE

    def reshard(self) -> None:
        """Its storage goes."""
        self._leave("reshard", UnitState.UNSHARDED, UnitState.STALE)
        if self.uses or self.persistent:
            raise UnitStateError(f"{self} is given up while it is {'persistent' if self.persistent else 'in use'}")
        self._hide()
        self._free()
        self.state = UnitState.SHARDED

    def use(self) -> None:
        """One more user: its parameters can be read."""
        self._leave("use", UnitState.UNSHARDED)
        if self.uses == 0 and not self.persistent:
            for p, kind in zip(self.params, self.kinds):
                p.__class__ = kind
        self.uses += 1

    def unuse(self) -> None:
        """One user less."""
        if self.uses == 0:
            raise UnitStateError(f"{self} has no user that could end")
        self.uses -= 1
        if self.uses == 0 and not self.persistent:
            self._hide()

    @property
    def live(self) -> bool:
        """Whether it has storage."""
        return self.state is not UnitState.SHARDED

    @property
    def ready(self) -> bool:
        """Whether it has its values."""
        return self.state is UnitState.UNSHARDED

    def _leave(self, what: str, *allowed: UnitState) -> UnitState:
        if self.state not in allowed:
            raise UnitStateError(f"{self} can't {what}: that is for {' or '.join(s.value for s in allowed)} units")
        return self.state

    def _hide(self) -> None:
        for p, kind in zip(self.params, self.kinds):
            p.__class__ = released_class(kind)

    def _allocate(self) -> None:
        """Gives the parameters storage."""
        raise NotImplementedError

    def _free(self) -> None:
        """Takes it away. The parameters are Released already."""
        raise NotImplementedError

    def __repr__(self) -> str:
        users = f", {self.uses} use{'s' * (self.uses != 1)}" if self.uses else ""
        kept = ", persistent" if self.persistent else ""
        return (
            f"<unit {self.index} '{self.name}': {self.state.value}{users}{kept}, {len(self.kinds)}"
            f" parameter{'s' * (len(self.kinds) != 1)} of {self.elems:,} elements>"
        )


_PAGE = 4096


def _offsets(numels: Sequence[int], places: Sequence[int] | None, page: int) -> tuple[list[int], int]:
    """Where parameters of `numels` begin in a storage, and its elements. With places: congruent to them modulo `page`,
    but for those that are smaller than two pages."""
    offsets: list[int] = []
    at = 0
    for i, n in enumerate(numels):
        if places is not None and n >= 2 * page:
            at += (places[i] - at) % page
        offsets.append(at)
        at += padded(n)
    return offsets, at


class FlatUnit(Unit):
    """A unit with one storage, which is resized to nothing and back: its parameters stay the same views of it.

    flat: [elements and padding] dtype; offsets: where each parameter starts in it; storage, nbytes, key: of `flat`, for
    torch's own count of who refers to it; trained: id(parameter) of those that get gradients. For who schedules units:
    stamp (when it was used last), keep (it stays after its present use), backward (the number of the last one that came
    to it), todo (id(parameter) of trained ones whose gradient has not come in that one)."""

    def __init__(
        self,
        index: int,
        name: str,
        params: Sequence[torch.nn.Parameter],
        shapes: Sequence[Sequence[int]],
        like: torch.Tensor,
        trained: frozenset[int],
        persistent: bool,
        places: Sequence[int] | None = None,
    ) -> None:
        """`params` become views of the unit's storage, of the `shapes`; it is STALE. like: its dtype and device.
        places: elements, where the values of each begin on a disk: they begin as far from a page in the storage."""
        super().__init__(index, name, params, UnitState.STALE)
        self._params = list(params)
        self.numels = numels = [slots(p, math.prod(shape), like.dtype) for p, shape in zip(params, shapes)]
        self.offsets, total = _offsets(numels, places, _PAGE // like.element_size())
        self.elems, self.persistent, self.trained = sum(numels), persistent, trained
        self.flat = like.new_zeros(total)
        for p, shape, offset, n in zip(params, shapes, self.offsets, numels):
            p.data = of_slots(p, shape, self.flat[offset : offset + n])
        self.storage = self.flat.untyped_storage()
        self.nbytes, self.key = self.storage.nbytes(), self.storage._cdata
        self._own_references = private.storage_use_count(self.key)
        self.stamp, self.keep, self.backward = 0, False, 0
        self.todo: set[int] = set()

    @property
    def params(self) -> Sequence[torch.nn.Parameter]:
        return self._params

    @property
    def referred(self) -> bool:
        """Whether something else than its own tensors refers to its storage: a view that a user kept, a tensor inside
        a running node."""
        count: int = private.storage_use_count(self.key)
        return count > self._own_references

    def place(self, p: torch.nn.Parameter) -> int:
        """The place of `p` among its parameters."""
        return next(i for i, q in enumerate(self.params) if q is p)

    def leave(self, values: Sequence[torch.Tensor | None]) -> None:
        """For good: `values` [numel] are the parameters' memory from now on, and the unit gathers nothing any more."""
        for p, kind, value in zip(self.params, self.kinds, values):
            p.__class__ = kind
            if value is not None:
                set_data(p, of_slots(p, p.shape, value))

    def _allocate(self) -> None:
        self.storage.resize_(self.nbytes)

    def _free(self) -> None:
        self.storage.resize_(0)
