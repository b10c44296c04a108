"""What autograd saves in the forward of an engine, on the host or on disk until backward asks for it
(activation_checkpointing.cpu_checkpointing): the inputs of torch.utils.checkpoint's blocks, or with
deepc.activations.all everything. Written behind the forward, read ahead of the backward, in the reverse order."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint

from ...core.foreign import private
from ...offload.place import make_folder
from ...offload.spill import Spill, Spilled
from ...zero.parameters.param import Released

if TYPE_CHECKING:
    from ...config.tree import Config

_CHECKPOINT = torch.utils.checkpoint.__file__
_DEPTH = 8  # frames between the checkpoint and the hook: Function.apply, and the hooks of streamed mode


class Activations:
    """The hooks around a forward. Without a place to put them to it does nothing."""

    def __init__(self, module: torch.nn.Module, config: Config, device: torch.device) -> None:
        asked = config.deepc.activations
        on = config.activation_checkpointing.cpu_checkpointing
        self._module, self._all, self._least = module, asked.all, asked.min_bytes
        self._spill = Spill(make_folder(asked.nvme_path), "activations") if on and asked.nvme_path else None
        self._host = on and self._spill is None and device.type != "cpu"
        self._kept: set[int] = set()

    @property
    def on_disk(self) -> bool:
        """Whether they go to disk."""
        return self._spill is not None

    def stats(self) -> dict[str, int]:
        """Counted since the start: "bytes_written", "bytes_read", and "most_bytes" of the file."""
        s = self._spill
        names = ("bytes_written", "bytes_read", "most_bytes")
        return {n: 0 if s is None else getattr(s, n) for n in names}

    @private.uncompiled
    def around(self) -> contextlib.AbstractContextManager[Any]:
        """Context of a forward."""
        if not (self.on_disk or self._host) or not torch.is_grad_enabled():
            return contextlib.nullcontext()
        if self._all:  # what the model holds anyway
            held = [p for p in self._module.parameters() if not isinstance(p, Released)]
            self._kept = {t.untyped_storage().data_ptr() for t in (*held, *self._module.buffers())}
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, x: torch.Tensor) -> Any:
        if x.layout != torch.strided or x.nbytes < self._least or (x.device.type == "cpu") == self._host:
            return x
        if self._all:
            if x.untyped_storage().data_ptr() in self._kept or isinstance(x, torch.nn.Parameter):
                return x
        elif not _is_of_a_checkpoint():
            return x
        if not torch.ops.aten.is_non_overlapping_and_dense(x):
            return x
        return _OnHost(x) if self._spill is None else _OnDisk(self._spill, x)

    def close(self) -> None:
        """What lies there can't be had any more."""
        if self._spill is not None:
            self._spill.close()


def _is_of_a_checkpoint() -> bool:
    """Whether what is being saved is an input of a checkpointed block: its save is called from checkpoint.py."""
    frame = sys._getframe(2)
    for _ in range(_DEPTH):
        if frame.f_code.co_filename == _CHECKPOINT:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def _unpack(packed: Any) -> torch.Tensor:
    value: torch.Tensor = packed.value() if isinstance(packed, (_OnDisk, _OnHost)) else packed
    return value


class _OnDisk:
    """A saved tensor on disk, dense, in its own order of strides."""

    def __init__(self, spill: Spill, x: torch.Tensor) -> None:
        self._dtype, self._shape, self._stride = x.dtype, x.shape, x.stride()
        flat = x.detach().as_strided((x.numel(),), (1,)).view(torch.uint8)
        self._value: Spilled = spill.put(flat)

    def value(self) -> torch.Tensor:
        return self._value.get().view(self._dtype).as_strided(self._shape, self._stride)


class _OnHost:
    """A saved tensor of a GPU in pinned host memory. Both copies are on the stream that computes."""

    def __init__(self, x: torch.Tensor) -> None:
        self._device, self._shape, self._stride = x.device, x.shape, x.stride()
        flat = x.detach().as_strided((x.numel(),), (1,))
        self._flat = torch.empty(flat.shape, dtype=x.dtype, pin_memory=True)
        self._flat.copy_(flat, non_blocking=True)

    def value(self) -> torch.Tensor:
        return self._flat.to(self._device, non_blocking=True).as_strided(self._shape, self._stride)
