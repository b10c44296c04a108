"""A parameter whose writes by users must be seen: its memory is shared by all ranks of the node (ZeRO-3, resident
mode), or an fp32 master stands behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from ..core.ops import name_of

_data: Any = torch._C.TensorBase.data  # the C getset descriptor; torch's stub says that it is a Tensor


class NodeParameter(torch.nn.Parameter):
    """A Parameter in everything, but `.data` shares its version counter: a write through it (`p.data.mul_(...)`, a
    clamp, an EMA copy), which would happen once per rank on shared memory, or be lost under the master, is seen at the
    next step like any other write.
    """

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
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
    return frozenset(
        out | {getattr(t, m) for m in methods if hasattr(t, m)} | {torch._has_compatible_shallow_copy_type}
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
    """Who gathers released parameters (streamed.py, shards.py)."""

    def touched(self, p: Any, func: Callable[..., Any]) -> Any:
        """`func` is about to run on the released parameter `p`: gathers it or raises. What is not None is func's
        result."""

    def settle(self) -> None:
        """The operator is through."""

    def copy_of(self, p: Any) -> torch.Tensor:
        """The whole value of `p`, in memory of its own."""


class Released:
    """Mixin of the class that a parameter has while its values are not here: what it is can be asked; any other touch
    goes to its owner (streamed.py), which gathers it or raises. Without this an operator would read freed memory."""

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
        with torch._C.DisableTorchFunctionSubclass():
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
            memo[id(self)] = torch.nn.Parameter(self._deepc_owner.copy_of(self), self.requires_grad)
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
