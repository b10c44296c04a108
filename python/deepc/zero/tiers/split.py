"""States of a rank that are divided between the host and a device (offload_optimizer.ratio)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...errors import UnsupportedError


class Split:
    """[host + device] of a rank's states: the front in the host's memory, the rest on a device. A slice is a view of
    one part; who may ask for both asks for `stretches` first."""

    def __init__(self, host: torch.Tensor, on_device: torch.Tensor) -> None:
        self.host, self.on_device = host, on_device
        self.dtype, self.device = host.dtype, host.device

    def __len__(self) -> int:
        return self.host.numel() + self.on_device.numel()

    def numel(self) -> int:
        return len(self)

    def data_ptr(self) -> int:
        """Of the host's part."""
        return self.host.data_ptr()

    def part(self, begin: int, end: int) -> tuple[torch.Tensor, int]:
        """(the part that has elements [begin, end), where they begin in it)."""
        cut = self.host.numel()
        if begin < cut < end:
            raise UnsupportedError(
                f"elements [{begin}:{end}] of a state that lies in host memory up to element {cut}, and on the device"
                " from there on (zero_optimization.offload_optimizer.ratio): it is no tensor; read and write it by"
                " deepc.view(p)"
            )
        return (self.host, begin) if end <= cut else (self.on_device, begin - cut)

    def __getitem__(self, index: slice) -> torch.Tensor:
        begin, end, _ = index.indices(len(self))
        whole, at = self.part(begin, end)
        return whole[at : at + end - begin]


def parts_of(array: torch.Tensor | Split) -> list[torch.Tensor]:
    """The tensors that it lies in, in order."""
    return [array.host, array.on_device] if isinstance(array, Split) else [array]


def stretches(array: torch.Tensor | Split, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """[begin, end) of `array`, cut where one part ends."""
    cut = array.host.numel() if isinstance(array, Split) else end
    for lo, hi in ((begin, min(end, cut)), (max(begin, cut), end)):
        if lo < hi:
            yield lo, hi


def squares(array: torch.Tensor | Split) -> torch.Tensor:
    """[blocks] fp64: norm_squared of it, where it lies; a split one is cut at the edge of a block."""
    if not isinstance(array, Split):
        found: torch.Tensor = torch.ops.deepc.norm_squared(array)
        return found
    return torch.cat([torch.ops.deepc.norm_squared(part).to(array.device) for part in parts_of(array)])
