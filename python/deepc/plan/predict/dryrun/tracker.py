"""Storages of fake tensors, born and gone."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ....core.foreign.private import graph_task_id, references
from ....errors import UnsupportedError
from ....nn import loss
from ....nn.aten import matmul
from ....nn.rows import Seen
from ..shapes import PRODUCTS
from .heap import ShadowHeap

_aten = torch.ops.aten
_MULTIPLIES = {
    overload
    for packet in (_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm)
    for overload in (packet.default, packet.out)
}
_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default, torch.ops.aten.equal.default}


def _guess(func: Any, args: tuple[Any, ...]) -> Any:
    """What a model gets that asks a fake tensor for a value: masks are full, numbers are 1."""
    dtype = args[0].dtype if args and isinstance(args[0], torch.Tensor) else torch.bool
    if "equal" in str(func) or "nonzero" in str(func) or dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1


class _Storages:
    """Storages from their birth to their death, in `heap` meanwhile: how many bytes live, and the most that ever
    did."""

    def __init__(self, heap: ShadowHeap) -> None:
        self.heap, self.live, self.peak = heap, 0, 0
        self.op: Any = None  # what runs
        self._peak_op: Any = None  # what made the peak
        self._sizes: dict[int, int] = {}  # of living storages, by their address
        self._keys: dict[int, int] = {}
        self._count = 0

    @property
    def peak_op(self) -> str:
        """What made the peak."""
        return "" if self._peak_op is None else str(self._peak_op)

    def known(self, tensor: torch.Tensor) -> None:
        """`tensor` lies in memory that is counted elsewhere."""
        storage = tensor.untyped_storage()
        if (address := storage._cdata) not in self._sizes:
            weakref.finalize(storage, self._forgotten, address).atexit = False
        self._sizes[address] = 0

    def add(self, tensor: torch.Tensor) -> None:
        """`tensor` was made."""
        if tensor.device.type == "meta":  # it has no memory in a real run either
            return
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._sizes:
            return
        nbytes = storage.nbytes()
        self._count += 1
        self._sizes[address], self._keys[address] = nbytes, self._count
        self.live += nbytes
        self.heap.alloc(self._count, nbytes)
        weakref.finalize(storage, self._gone, address).atexit = False
        if self.live > self.peak:
            self.peak, self._peak_op = self.live, self.op

    def _forgotten(self, address: int) -> None:
        """What was known is gone: another storage may have its address, and counts."""
        self._sizes.pop(address, None)

    def _gone(self, address: int) -> None:
        self.live -= self._sizes.pop(address)
        self.heap.free(self._keys.pop(address))


class _Sums:
    """Where autograd adds up gradients of a tensor that has several uses, it adds to the sum so far, if that is
    referenced nowhere else; but no tensors of a subclass, such as fake ones (torch/csrc/autograd/input_buffer.cpp)."""

    def __init__(self) -> None:
        self._sole: tuple[int, ...] | None = None  # references to a tensor that autograd alone holds
        self._add = torch.ops.aten.add.Tensor

    def learn(self) -> None:
        """Inside of the modes: what references such a sum has."""
        x = torch.ones((), requires_grad=True, dtype=torch.float32, device="cpu") * 1.0
        (torch.sin(x) + torch.cos(x)).backward()

    def in_place(self, func: Any, args: tuple[Any, ...], kwargs: Any, fake: type[torch.Tensor]) -> bool:
        """Whether autograd would do this operation of tensors of the class `fake` in place."""
        if func is not self._add or graph_task_id() == -1 or kwargs or len(args) != 2 or torch.is_grad_enabled():
            return False
        old, new = args
        if not isinstance(new, fake) or not isinstance(old, fake) or old.shape != new.shape:
            return False
        found = references(old)
        if self._sole is None:
            self._sole = found
        return found == self._sole and old.dtype == new.dtype and old.untyped_storage().nbytes() == old.nbytes


def make_tracker() -> type[Any]:
    """The class Tracker; made here, because what it derives from is imported late."""
    from ....core.foreign.private import FakeTensor, TorchDispatchMode, tree_leaves

    device_of = torch.ops.prim.device.default

    class Tracker(_Storages, TorchDispatchMode):
        """Follows every storage that an operation makes. values: whether tensors have some, which may be read."""

        def __init__(self, heap: ShadowHeap, values: bool = False) -> None:
            TorchDispatchMode.__init__(self)  # type: ignore[no-untyped-call]  # torch
            _Storages.__init__(self, heap)
            self.guesses: list[str] = []
            self._values, self.sums = values, _Sums()
            self.of_experts: Seen | None = None
            self.products = 0  # of experts, in forwards
            self._inside = False  # of an operator that is made of others

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            # two thirds of all calls: torch's C++ asks a fake tensor where it is. The other modes only pass it on.
            if func is device_of and isinstance(args[0], FakeTensor):
                return FakeTensor.__torch_dispatch__(func, types, args)
            if not self._inside:
                self.op = func
            if self.sums.in_place(func, args, kwargs, FakeTensor):
                return args[0].add_(args[1])
            if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
                raise UnsupportedError(
                    f"the model calls the collective {func} in its forward, which a dry run of one rank can't do"
                )
            if func in _READS and not self._values:
                if not self._inside:
                    self.guesses.append(str(func))
                return _guess(func, args)
            of = self.of_experts
            if of is not None and of.parts and graph_task_id() == -1 and func.overloadpacket.__name__ in PRODUCTS:
                self.products += 1
            out = self._made_of_others(func, args) if func in loss.MADE_OF else func(*args, **(kwargs or {}))
            for leaf in (out,) if isinstance(out, torch.Tensor) else tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    self.add(leaf)
            if func in _MULTIPLIES and (held := matmul.copies(*args[-2:])):
                self.heap.come_and_go(held)
            return out

        def _made_of_others(self, func: Any, args: tuple[Any, ...]) -> Any:
            """By the operators that it consists of, whose buffers count: without numbers it has none."""
            outer, self._inside = self._inside, True
            try:
                with self:
                    return loss.MADE_OF[func](*args)
            finally:
                self._inside = outer

    return Tracker
