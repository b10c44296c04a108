"""Stretches of a rank's state arrays, wherever these lie: in memory or on disk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from ...errors import UnsupportedError
from ...offload import Stream
from .coded import Coded, CodedOnDisk
from .split import Split

PART = 1 << 20  # elements of what is on disk that are in memory at a time


class NoTensor:
    """What stands for an array that lies elsewhere: what takes it for a tensor by mistake is told so (`_refuse`), and
    gets no tensor of zeros."""

    def _refuse(self, what: str) -> NoReturn:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy, pickle and others ask whether there is such a method
            raise AttributeError(name)
        self._refuse(f".{name}")

    def __getitem__(self, index: object) -> NoReturn:
        self._refuse("[...]")

    def __setitem__(self, index: object, value: object) -> NoReturn:
        self._refuse("[...] =")

    def __iter__(self) -> NoReturn:
        self._refuse("iteration")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        given = [
            a for group in (*args, *(kwargs or {}).values()) for a in (group if isinstance(group, list) else [group])
        ]
        found = next((a for a in given if isinstance(a, cls)), None)
        if found is None:
            raise UnsupportedError("an array that lies elsewhere was passed to torch as a tensor")
        found._refuse(f"torch's {getattr(function, '__name__', function)}")


class Parked(NoTensor):
    """An array that offload_states() has moved from a device to host memory, until reload_states()."""

    def __init__(self, name: str, elems: int, dtype: torch.dtype) -> None:
        self._name, self._elems, self.dtype = name, elems, dtype

    def __len__(self) -> int:
        return self._elems

    def __repr__(self) -> str:
        return f"Parked('{self._name}', {self._elems:,} elements)"

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedError(
            f"{what} of '{self._name}', which engine.offload_states() has moved to host memory: call"
            " engine.reload_states() first"
        )


class OnDisk(NoTensor):
    """[numel] of `dtype`: an array of a rank's states that lies on disk. See Window."""

    def __init__(self, stream: Stream, name: str) -> None:
        self._stream, self._name, self.dtype = stream, name, stream.arrays[name]

    def read(self, begin: int, out: torch.Tensor) -> torch.Tensor:
        """Fills the contiguous CPU tensor `out`, of the array's dtype, from element `begin` on; returns it."""
        return self._stream.read(self._name, begin, out)

    def write(self, begin: int, value: torch.Tensor) -> None:
        """The elements from `begin` on are those of the contiguous CPU tensor `value`, of the array's dtype."""
        self._stream.write(self._name, begin, value)

    def __len__(self) -> int:
        return self._stream.elems

    def __repr__(self) -> str:
        return f"OnDisk('{self._name}', {self._stream.elems:,} elements in {self._stream.folder})"

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedError(
            f"{what} of '{self._name}', which lies on disk (zero_optimization.offload_optimizer.device nvme): it is no"
            " tensor; read and write it by deepc.view(p), or by its windows (zero/tiers/windows.py)"
        )


Array = torch.Tensor | OnDisk | Coded | CodedOnDisk | Split | Parked


class Window:
    """Elements [begin, begin + length) of a state array. Values go in and out as 1-D tensors of `length` elements, of
    any floating dtype and device."""

    __slots__ = ("array", "begin", "length")

    def __init__(self, array: Array, begin: int = 0, length: int | None = None) -> None:
        self.length = len(array) - begin if length is None else length
        if isinstance(array, Split):
            array, begin = array.part(begin, begin + self.length)
        self.array: torch.Tensor | OnDisk | Coded | CodedOnDisk | Parked = array
        self.begin = begin

    @property
    def view(self) -> torch.Tensor:
        """The elements where they lie, to be read and written. UnsupportedError on disk, and of codes."""
        return self.array[self.begin : self.begin + self.length]

    @property
    def in_memory(self) -> bool:
        """Whether there is a view: the numbers lie in memory as such."""
        return isinstance(self.array, torch.Tensor)

    @property
    def on_disk(self) -> bool:
        return isinstance(self.array, OnDisk)

    def read(self) -> torch.Tensor:
        """The values; not to be written: a view of them in memory, a copy from disk and of codes."""
        if not isinstance(self.array, torch.Tensor):
            return self.array.read(self.begin, torch.empty(self.length, dtype=self.array.dtype, device="cpu"))
        return self.view

    def copy_to(self, out: torch.Tensor) -> None:
        """The values go to `out`."""
        if isinstance(self.array, torch.Tensor):
            out.copy_(self.view)
        elif out.dtype == self.array.dtype and out.device.type == "cpu" and out.is_contiguous():
            self.array.read(self.begin, out)
        else:
            for at, part in self._offsets():
                out[at : at + part.length].copy_(part.read())

    def write(self, value: torch.Tensor, factor: float = 1.0) -> None:
        """The values are `value * factor` from now on."""
        if isinstance(self.array, torch.Tensor):
            self.view.copy_(value if factor == 1.0 else value.float() * factor)
            return
        for at, part in self._offsets():
            mine = value[at : at + part.length].detach().to(device="cpu", dtype=self.array.dtype).contiguous()
            self.array.write(part.begin, mine if factor == 1.0 else mine * factor)

    def fill(self, value: float) -> None:
        """All elements are `value`."""
        for part in self.parts():
            if not part.in_memory:
                part.write(torch.full((part.length,), value, dtype=torch.float32, device="cpu"))
            else:
                part.view.fill_(value)

    def copy_into(self, to: Window) -> None:
        """The values go to `to`, of equally many elements, wherever both lie."""
        for at, part in self._offsets():
            Window(to.array, to.begin + at, part.length).write(part.read())

    def parts(self, most: int = PART) -> Iterator[Window]:
        """The window in pieces that memory has room for: itself where it lies there already."""
        for _, part in self._offsets(most):
            yield part

    def _offsets(self, most: int = PART) -> Iterator[tuple[int, Window]]:
        step = most if self.on_disk else max(1, self.length)
        for at in range(0, self.length, step):
            yield at, Window(self.array, self.begin + at, min(step, self.length - at))

    def __repr__(self) -> str:
        return f"Window({type(self.array).__name__}, {self.begin}, {self.length})"
