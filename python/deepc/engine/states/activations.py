"""What autograd saves in the forward of an engine, on the host or on disk until backward asks for it
(activation_checkpointing.cpu_checkpointing): the inputs of torch.utils.checkpoint's blocks, or with
deepc.activations.all everything. Written behind the forward, read ahead of the backward, in the reverse order. Or in
one piece of memory (contiguous_memory_optimization). Of what tensor-parallel ranks save alike each keeps a part
(partition_activations)."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
import torch.utils.checkpoint
from torch.multiprocessing.reductions import StorageWeakRef

from ...core.foreign import private
from ...nn.arena import Arena
from ...offload.away import DeviceSpill
from ...offload.place import make_folder
from ...offload.spill import Spill, Spilled
from ...parallel.saved import Partition
from ...plan.predict.recompute.choice import Rates
from ...zero.parameters.param import Released

if TYPE_CHECKING:
    from ...config.tree import ActivationCheckpointingConfig, Config
    from ...parallel.tensor.group import TensorGroup

_CHECKPOINT = torch.utils.checkpoint.__file__
_DEPTH = 8  # frames between the checkpoint and the hook: Function.apply, and the hooks of streamed mode


class Activations:
    """The hooks around a forward. Without anything to do they are not there.

    group: the ranks that share the model's tensors; with activation_checkpointing.partition_activations each keeps a
    part of what all of them save alike."""

    def __init__(
        self, module: torch.nn.Module, config: Config, device: torch.device, group: TensorGroup | None = None
    ) -> None:
        asked, section = config.deepc.activations, config.activation_checkpointing
        self._module, self._least = module, asked.min_bytes
        self._place = place = place_for(section, asked.nvme_path, device)
        self._all = asked.all and isinstance(place, (_Disk, _Away))
        cuts = section.partition_activations and group is not None and group.size > 1 and device.type == "cpu"
        self._partition = Partition(group, place.put) if cuts and group is not None else None
        self._kept: set[int] = set()

    @property
    def on_disk(self) -> bool:
        """Whether they go to disk."""
        return self._place.on_disk

    @property
    def cuts(self) -> bool:
        """Whether tensor-parallel ranks keep parts."""
        return self._partition is not None

    def stats(self) -> dict[str, int]:
        """Of the disk, counted since the start: "bytes_written", "bytes_read", and "most_bytes" of the file. Of a GPU:
        "bytes_to_host". Of contiguous memory: "contiguous_used" now, the most of it, "contiguous_committed" and
        "contiguous_reserved". Of tensor-parallel ranks: "bytes_cut", and "bytes_whole" that they don't have alike."""
        cut = self._partition
        shared = {"bytes_cut": 0, "bytes_whole": 0} if cut is None else vars_of(cut, "bytes_cut", "bytes_whole")
        return {**_Disk.nothing, **_Away.nothing, **_Contiguous.nothing, **self._place.stats(), **shared}

    @private.uncompiled
    def around(self) -> contextlib.AbstractContextManager[Any]:
        """Context of a forward."""
        if (self._partition is None and not self._place.moves) or not torch.is_grad_enabled():
            return contextlib.nullcontext()
        if self._all:  # what the model holds anyway
            held = [p for p in self._module.parameters() if not isinstance(p, Released)]
            self._kept = {_address(t) for t in (*held, *self._module.buffers())}
        return self._hooks()

    @contextlib.contextmanager
    def _hooks(self) -> Iterator[None]:
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, unpack):
                yield
        finally:
            if self._partition is not None:
                self._partition.begin()

    def _pack(self, x: torch.Tensor) -> Any:
        checkpointed, strided = _is_of_a_checkpoint(), x.layout == torch.strided
        held = isinstance(x, torch.nn.Parameter) or (strided and self._all and _address(x) in self._kept)
        partition = self._partition if checkpointed and not held else None
        if not strided or x.nbytes < self._least or x.device.type != self._place.of:
            if partition is not None:  # another rank's may be larger
                partition.cut(None)
            return _Here(x)
        if held if self._all else not checkpointed:
            return _Here(x)
        return packed(x, self._place, partition)

    def close(self) -> None:
        """What lies there can't be had any more."""
        self._place.close()


def packed(x: torch.Tensor, place: Place, partition: Partition | None) -> Any:
    """What is kept of `x`; its value() is `x` again. Collective over the ranks of `partition`."""
    dense = torch.ops.aten.is_non_overlapping_and_dense(x)
    if partition is not None and not isinstance(x, torch.nn.Parameter):
        if (cut := partition.cut(x if dense else None)) is not None:
            return cut
    return place.put(x) if dense else _Here(x)


def unpack(kept: Any) -> torch.Tensor:
    value: torch.Tensor = kept.value()
    return value


def place_for(section: ActivationCheckpointingConfig, folder: str | None, device: torch.device) -> Place:
    """Where the configuration wants what is saved. DiskError: not in this folder."""
    if section.cpu_checkpointing and device.type != "cpu":
        return _Away(device.type, folder)
    if section.cpu_checkpointing and folder:
        return _Disk(folder)
    if section.contiguous_memory_optimization and device.type == "cpu":
        return _Contiguous(section.number_checkpoints or 1)
    return Place()


def place_of(kind: str, given: Any) -> Place:
    """ "contiguous": for so many values like the first; "host": for tensors of the device type `given`."""
    return _Contiguous(given) if kind == "contiguous" else _Away(given)


def vars_of(value: Any, *names: str) -> dict[str, int]:
    return {n: getattr(value, n) for n in names}


def _address(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


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


# ---- places ----------------------------------------------------------------------------------------------------------
class Place:
    """Where it is. moves: whether what is put goes somewhere else, on_disk: to a disk. of: the device of what is put
    there."""

    moves = on_disk = False
    of = "cpu"

    def put(self, x: torch.Tensor) -> Any:
        """Keeps a dense tensor: what it returns has value()."""
        return _Here(x)

    def stats(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        """Nothing is put there from here on."""


class _Here:
    """A saved tensor as it is. torch does not look whether what went through a hook was changed since."""

    __slots__ = ("_value", "_version")

    def __init__(self, x: torch.Tensor) -> None:
        # Not x itself: of an operator that saves its result it would be a cycle through autograd, which only a backward
        # breaks.
        self._value, self._version = x.detach(), x._version

    def value(self) -> torch.Tensor:
        if self._value._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a"
                f" saved tensor of shape {list(self._value.shape)} is at version {self._value._version}, expected"
                f" version {self._version}"
            )
        return self._value


class _Disk(Place):
    moves = on_disk = True
    nothing: ClassVar[dict[str, int]] = dict.fromkeys(("bytes_written", "bytes_read", "most_bytes"), 0)

    def __init__(self, folder: str) -> None:
        self._spill = Spill(make_folder(folder), "activations")

    def put(self, x: torch.Tensor) -> Any:
        return _Dense(self._spill, x)

    def stats(self) -> dict[str, int]:
        return vars_of(self._spill, *self.nothing)

    def close(self) -> None:
        self._spill.close()


class _Away(Place):
    """of: the device whose tensors go to the host's memory, or to disk through it."""

    moves = True
    nothing: ClassVar[dict[str, int]] = {"bytes_to_host": 0}

    def __init__(self, of: str, folder: str | None = None) -> None:
        self.of, self.on_disk = of, folder is not None
        self._spill = None if folder is None else Spill(make_folder(folder), "activations", locked=True)
        self._device = DeviceSpill(self._spill)

    def put(self, x: torch.Tensor) -> Any:
        return _Dense(self._device, x)

    def stats(self) -> dict[str, int]:
        of_disk = {} if self._spill is None else vars_of(self._spill, *_Disk.nothing)
        return {**of_disk, "bytes_to_host": self._device.bytes_out}

    def close(self) -> None:
        if self._spill is not None:
            self._spill.close()


class _Contiguous(Place):
    """One piece of memory, which stays from step to step. count: how many values like the first one it has memory for
    from the start."""

    moves = True
    _names = ("used", "most_used", "committed", "reserved")
    nothing: ClassVar[dict[str, int]] = {f"contiguous_{n}": 0 for n in _names}

    def __init__(self, count: int) -> None:
        self._arena, self._count = Arena(), count

    def put(self, x: torch.Tensor) -> Any:
        if self._count:
            self._arena.ready(self._count * x.nbytes)
            self._count = 0
        return _Here(self._arena.put(x.detach()))

    def stats(self) -> dict[str, int]:
        now = self._arena.stats()
        return {f"contiguous_{n}": getattr(now, n) for n in self._names}


class _Dense:
    """A saved tensor elsewhere, dense, in its own order of strides."""

    def __init__(self, spill: Spill | DeviceSpill, x: torch.Tensor) -> None:
        self._dtype, self._shape, self._stride = x.dtype, x.shape, x.stride()
        flat = x.detach().as_strided((x.numel(),), (1,)).view(torch.uint8)
        self._value = spill.put(flat)

    def value(self) -> torch.Tensor:
        return self._value.get().view(self._dtype).as_strided(self._shape, self._stride)


class _Stored:
    """A saved storage on disk, whole, of which any number of saved tensors are views."""

    def __init__(self, spill: Spill, x: torch.Tensor) -> None:
        whole = x.detach().as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
        self._value: Spilled = spill.put(whole.view(torch.uint8))
        self.version = x._version
        self._of = StorageWeakRef(x.untyped_storage())  # while it is held, no other storage has this one's identity
        self._views = self._left = 0  # of them, and how many have not been asked for since it was read
        self._read: torch.Tensor | None = None

    def view(self, x: torch.Tensor) -> _View:
        self._views += 1
        return _View(self, x)

    def get(self) -> torch.Tensor:
        if self._read is None:
            self._read, self._left = self._value.get(), self._views
        read, self._left = self._read, self._left - 1
        if self._left <= 0:
            self._read = None
        return read


class _View:
    """A saved tensor whose storage lies on disk."""

    def __init__(self, stored: _Stored, x: torch.Tensor) -> None:
        self._stored, self._dtype = stored, x.dtype
        self._shape, self._stride, self._offset = x.shape, x.stride(), x.storage_offset()

    def value(self) -> torch.Tensor:
        return self._stored.get().view(self._dtype).as_strided(self._shape, self._stride, self._offset)


class _Elsewhere:
    """What the hooks around have made of a saved tensor."""

    __slots__ = ("_kept", "_unpack")

    def __init__(self, kept: Any, unpack: Any) -> None:
        self._kept, self._unpack = kept, unpack

    def value(self) -> torch.Tensor:
        value: torch.Tensor = self._unpack(self._kept)
        return value


class Moves:
    """Takes to a disk what single blocks save: each storage once, whole. least: smaller ones (bytes) stay."""

    def __init__(self, folder: str, least: int) -> None:
        self.least = least
        self.spill = Spill(make_folder(folder), "activations")

    def hooks(self, stay: set[int], by: Knows) -> contextlib.AbstractContextManager[Any]:
        """Context of a block's forward; its inputs `stay`, and what the model holds anyway, with the hooks that are
        there already. by: names the storages."""
        known: dict[int, _Stored] = {}
        stay = stay | by.held_anyway()
        around = private.top_saved_hooks(False)

        def pack(x: torch.Tensor) -> Any:
            found = by.storage(x)
            if found is not None and not isinstance(x, torch.nn.Parameter) and x.device.type == "cpu":
                name, nbytes = found
                if nbytes >= self.least and name not in stay and nbytes % x.element_size() == 0:
                    if (of := x.untyped_storage()._cdata) not in known:
                        known[of] = _Stored(self.spill, x)
                    if known[of].version == x._version:
                        return known[of].view(x)
            return _Here(x) if not around else _Elsewhere(around[0](x), around[1])

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def begin(self) -> None:
        """Of a forward."""
        self.spill.begin()

    def measure(self, nbytes: int = 2 << 20, count: int = 12) -> Rates:
        """What the disk does with values like a block's, written one behind the other and read in the reverse order."""
        values = [torch.zeros(nbytes, dtype=torch.uint8, device="cpu") for _ in range(count)]
        begin, busy, there = time.perf_counter(), 0.0, []
        for value in values:
            now = time.process_time()
            there.append(self.spill.put(value))
            busy += time.process_time() - now
        self.spill.settle()
        written = time.perf_counter()
        now = time.process_time()
        while there:
            there.pop().get()
        busy += time.process_time() - now
        total = nbytes * count
        return Rates((written - begin) / total, (time.perf_counter() - written) / total, busy / total)

    def close(self) -> None:
        self.spill.close()


class Knows(Protocol):
    """Of storages: plan/predict/recompute/recomputation.py."""

    def storage(self, x: torch.Tensor) -> tuple[int, int] | None: ...
    def held_anyway(self) -> set[int]: ...
