"""DynamicTensor: a tensor whose leading sizes change where it lies (docs/dynamic-tensors.md)."""

from __future__ import annotations

import copy
import ctypes
import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn
from weakref import WeakSet

import torch

from ..core.lib import C, DynamicStats, call
from ..core.memory import tensor_at
from ..errors import ArgumentError, OutOfMemoryError, UnsupportedError, numeric


class Stats(NamedTuple):
    """Bytes: addresses `reserved`; `used` by the tensor's elements; `committed`, what has memory now, and
    `most_committed` at any time; `granted` by the system and `released` to it since the start. Calls: `grows` and
    `shrinks`, and `commits` and `releases`, where the system was asked. No byte is ever moved."""

    reserved: int
    used: int
    committed: int
    most_committed: int
    granted: int
    released: int
    grows: int
    shrinks: int
    commits: int
    releases: int


class DynamicTensor:
    """A tensor whose leading sizes change at run time without a copy: addresses are reserved once, for `most`, and
    their pages are given and taken as it grows and shrinks (ops/base/dynamic.c; on a GPU CUDA's virtual memory
    management, ops/base/dynamic_cuda.c).

    size: its shape now. most: a shape whose number of elements it never exceeds; addresses cost no memory, so be
    generous. dtype: torch's default if None. slack: the memory that it may keep without using it, as a part of what it
    uses (or less than a page). Pages are dear to take: with more, a small tensor whose length goes up and down is
    faster (math.inf: what it once had it keeps). device: the CPU or a GPU ("cuda": the current one), whose pages are of
    2 MiB.

    `tensor` is a plain, contiguous tensor, and torch's functions take the DynamicTensor itself for it:

        cache = DynamicTensor((0, 768), most=(1_000_000, 768))
        cache.append(keys)                      # [n, 768]
        scores = torch.matmul(query, cache.tensor.T)
        cache.resize(0)                         # its memory is the system's again

    What it holds keeps its place in memory order (as with Tensor.resize_): rows stay when the first size changes. What
    it grows by is zero. What was made of it before stays valid when it grows, in autograd too; when it shrinks, the
    tensors of before must not be read (they would read zeros; on a GPU the kernel fails) nor written, and a backward
    that needs one raises torch's "modified by an inplace operation".

    On a GPU zeros are written in the order of the current stream. Growing waits for nothing; giving memory back waits
    for all work of the device, so a length that goes up and down wants slack. torch's allocator is asked for what it
    keeps unused before a size is refused.

    ArgumentError names a size that does not fit; OutOfMemoryError comes before the kernel would kill, and nothing has
    changed then. UnsupportedError: another device, or no GPU here. Memory is freed with the last tensor over it. A copy
    (copy.deepcopy, pickle, torch.save) has addresses of its own, for as many elements, and the same contents. For one
    thread at a time.
    """

    _living: ClassVar[WeakSet[DynamicTensor]] = WeakSet()

    @numeric
    def __init__(
        self,
        size: Sequence[int],
        most: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        slack: float = 1 / 32,
        device: torch.device | str = "cpu",
    ) -> None:
        of = _checked_device(device)
        self._dtype = dtype or torch.get_default_dtype()
        self._shape = _checked(size, "size")
        self._most = math.prod(_checked(most, "most"))
        if not self._most:
            raise ArgumentError(f"most is {tuple(most)}, of no elements; give the largest shape that may come")
        if not slack >= 0:
            raise ArgumentError(f"slack is {slack}; it must be a number >= 0 (math.inf: nothing is given back)")
        if not isinstance(self._dtype, torch.dtype):
            raise ArgumentError(f"dtype is {self._dtype!r}; it must be a torch.dtype, such as torch.float32")
        nbytes = self._most * self._dtype.itemsize
        if nbytes >= 1 << 63:
            raise ArgumentError(f"most is {tuple(most)}, of {nbytes} bytes, for which there are no addresses")
        self._slack = slack
        self._range = _Range(nbytes, slack) if of.type == "cpu" else _CudaRange(nbytes, slack, of)
        self._base = self._range.tensor(self._most, self._dtype)
        # Writes of append: with a version of their own, since they change nothing that anybody has seen.
        self._unseen = self._range.tensor(self._most, self._dtype)
        self._tensor = self._sized(self._shape, 0)
        self._living.add(self)

    def resize(self, *size: int) -> torch.Tensor:
        """The tensor with other leading sizes: as many as are given are replaced, the sizes behind them stay. Returns
        `tensor`. ArgumentError for more sizes than it has, or more elements than `most`."""
        given = _checked(size, "resize")
        if not given or len(given) > len(self._shape):
            raise ArgumentError(f"resize{given}: give 1 to {len(self._shape)} leading sizes of {tuple(self._shape)}")
        shape = (*given, *self._shape[len(given) :])
        self._tensor = self._sized(shape, math.prod(self._shape))
        self._shape = shape
        return self._tensor

    def append(self, rows: torch.Tensor) -> torch.Tensor:
        """Grows the first size by rows.shape[0] and copies `rows` [n, *shape[1:]] there (cast to its dtype; nothing
        flows back to them). Returns `tensor`. ArgumentError for rows of another shape."""
        if rows.dim() != len(self._shape) or tuple(rows.shape[1:]) != self._shape[1:]:
            raise ArgumentError(
                f"append: rows of shape {tuple(rows.shape)} do not go behind a tensor of shape {self._shape}; give"
                f" [n, {', '.join(map(str, self._shape[1:]))}]"
            )
        at = math.prod(self._shape)
        self.resize(self._shape[0] + rows.shape[0])
        with torch.no_grad():
            self._unseen[at : at + rows.numel()].view(rows.shape).copy_(rows)
        return self._tensor

    @property
    def tensor(self) -> torch.Tensor:
        """As it is now: contiguous, no gradient (requires_grad_() makes this one a leaf, until the next resize)."""
        return self._tensor

    @property
    def shape(self) -> torch.Size:
        return self._tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def device(self) -> torch.device:
        return self._tensor.device

    def __len__(self) -> int:
        return self._shape[0]

    def __repr__(self) -> str:
        where = "" if self.device.type == "cpu" else f", device='{self.device}'"
        return f"DynamicTensor({tuple(self._shape)}, most={self._most} elements, dtype={self._dtype}{where})"

    def stats(self) -> Stats:
        """Bytes and calls of this tensor."""
        read = self._range.read()
        return Stats(*(getattr(read, name) for name in Stats._fields))

    @classmethod
    def stats_of_all(cls, device: str | None = None) -> Stats:
        """The sums over all that live (device: on a device of this type, "cpu" or "cuda"); `most_committed` is each
        one's own most."""
        each = [d.stats() for d in cls._living if device in (None, d.device.type)]
        return Stats(*map(sum, zip(*each, strict=True))) if each else Stats(*[0] * len(Stats._fields))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """torch's functions take it for its tensor."""
        kwargs = {k: _plain(v) for k, v in (kwargs or {}).items()}
        return function(*map(_plain, args), **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> DynamicTensor:
        made = memo[id(self)] = _copied(*self._recipe(), self._tensor)
        vars(made).update(copy.deepcopy(self._further(), memo))
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        # a clone: the tensor's own storage is all addresses
        return _copied, (*self._recipe(), self._tensor.detach().clone()), self._further()

    def _recipe(self) -> tuple[type[DynamicTensor], int, float, str, bool]:
        leaf = self._tensor.is_leaf and self._tensor.requires_grad
        return type(self), self._most, self._slack, str(self.device), leaf

    def _further(self) -> dict[str, Any]:
        """Attributes that somebody has given it."""
        return {name: value for name, value in vars(self).items() if name not in _OWN}

    def _sized(self, shape: tuple[int, ...], before: int) -> torch.Tensor:
        count = math.prod(shape)
        if count > self._most:
            raise ArgumentError(
                f"a DynamicTensor of shape {shape} has {count} elements, more than the {self._most} that addresses were"
                " reserved for; give a larger `most`"
            )
        self._range.resize(count * self._dtype.itemsize)
        if count < before:  # a graph that saved one of before would read what is no longer there
            torch.autograd.graph.increment_version(self._base)
        with torch.no_grad():
            return self._base[:count].view(shape).detach()


_OWN = frozenset(("_dtype", "_shape", "_most", "_slack", "_range", "_base", "_unseen", "_tensor"))


def _copied(
    of: type[DynamicTensor], most: int, slack: float, device: str, requires_grad: bool, contents: torch.Tensor
) -> DynamicTensor:
    made = of.__new__(of)
    DynamicTensor.__init__(made, contents.shape, (most,), dtype=contents.dtype, slack=slack, device=device)
    with torch.no_grad():
        made.tensor.copy_(contents)
    made.tensor.requires_grad_(requires_grad)
    return made


class _Range:
    """Owns one dc_dynamic."""

    _kind = "dc_dynamic"

    def __init__(self, nbytes: int, slack: float, *of: int) -> None:
        self.handle: int | None = None
        handle, address = ctypes.c_void_p(), ctypes.c_void_p()
        call(f"{self._kind}_open", *of, nbytes, slack, ctypes.byref(handle), ctypes.byref(address))
        self.handle, self.address = handle.value, address.value or 0

    def resize(self, nbytes: int) -> None:
        """The first `nbytes` have memory, zeros where they had none."""
        call("dc_dynamic_resize", self.handle, nbytes)

    def read(self) -> DynamicStats:
        read = DynamicStats()
        call(f"{self._kind}_read", self.handle, ctypes.byref(read))
        return read

    def tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel], over its addresses from the first; it keeps the range alive."""
        return tensor_at(self.address, numel, dtype, self)

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            f"a {type(self).__name__} is one piece of addresses: it can't be copied or pickled, since two owners would"
            " free it. Copy the DynamicTensor itself, or its tensor.clone()"
        )

    def __del__(self) -> None:
        getattr(C, f"{self._kind}_close")(self.handle)


class _CudaRange(_Range):
    """Owns one dc_dynamic_cuda."""

    _kind = "dc_dynamic_cuda"

    def __init__(self, nbytes: int, slack: float, device: torch.device) -> None:
        self._device, self._nbytes = device, nbytes
        super().__init__(nbytes, slack, device.index)
        self.resize(1)  # torch asks the driver whose memory lies at the first address

    def resize(self, nbytes: int) -> None:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        try:
            call("dc_dynamic_cuda_resize", self.handle, nbytes, stream)
        except OutOfMemoryError:
            torch.cuda.empty_cache()
            call("dc_dynamic_cuda_resize", self.handle, nbytes, stream)

    def tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(self, device=self._device).view(dtype)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Bytes: NumPy's types, which it speaks of, lack bfloat16."""
        return {
            "shape": (self._nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "version": 2,
        }


def _checked_device(device: torch.device | str) -> torch.device:
    of = torch.device(device)
    if of.type == "cpu":
        return of
    if of.type != "cuda":
        raise UnsupportedError(f"DynamicTensor(device={str(device)!r}): it lives on the CPU or on an NVIDIA GPU")
    if not torch.cuda.is_available():
        raise UnsupportedError(f"DynamicTensor(device={str(device)!r}): torch {torch.__version__} sees no GPU here")
    torch.cuda.init()
    return torch.device("cuda", torch.cuda.current_device() if of.index is None else of.index)


def _checked(size: Sequence[int], what: str) -> tuple[int, ...]:
    try:
        shape = tuple(torch.Size(size))
    except TypeError as e:
        raise ArgumentError(f"{what}: {size!r} is no sequence of sizes") from e
    if any(n < 0 for n in shape) or (what != "resize" and not shape):
        raise ArgumentError(f"{what}: {shape} must be one or more sizes, each >= 0")
    return shape


def _plain(value: Any) -> Any:
    if isinstance(value, DynamicTensor):
        return value.tensor
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return value
