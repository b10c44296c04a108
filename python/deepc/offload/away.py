"""Values of a GPU that are in the host's memory, or on disk, for a while and come back in the reverse order: what
autograd saves in a forward. Copies run on streams of their own, beside what the device computes.

put() starts the copy to locked memory of the host. At most BEHIND values are held on the device for it: what computes
then waits for the oldest copy, and not the host, unless the value goes on to a disk. Away.get() brings a value back,
and starts to bring those that were put before it."""

from __future__ import annotations

import collections
import weakref

import torch

from .spill import Spill, Spilled

BEHIND = 2  # values that are held on the device while they are copied
AHEAD = 2  # that are brought back before they are asked for


class Away:
    """A value of a DeviceSpill."""

    def __init__(self, of: DeviceSpill, index: int, values: torch.Tensor) -> None:
        self._of, self._index, self._device, self._nbytes = of, index, values.device, values.nbytes
        self._held: torch.Tensor | None = values  # on the device, until it is copied
        self._version = values._version
        self._modified = False
        self._host: torch.Tensor | None = torch.empty(values.nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")
        self._spilled: Spilled | None = None
        self._coming: tuple[torch.Tensor, torch.cuda.Event] | None = None
        # Whose memory it is: what it has next in it waits for the copy, whichever stream lets it go.
        self._stream = torch.cuda.current_stream(values.device)
        of.out.wait_stream(self._stream)
        with torch.cuda.stream(of.out):
            self._host.copy_(values, non_blocking=True)
            self._left = torch.cuda.Event()
            self._left.record(of.out)

    def let_go(self) -> None:
        """The device's memory is free behind the copy; with a disk the value goes on there. DiskError: as Spill.put."""
        if self._held is None:
            return
        self._stream.wait_event(self._left)
        self._modified = self._held._version != self._version
        self._held = None
        if self._of.spill is not None and self._host is not None:
            self._left.synchronize()
            host, self._host = self._host, None
            try:
                self._spilled = self._of.spill.put(host)
            except BaseException:
                self._host = host
                raise

    def get(self) -> torch.Tensor:
        """[bytes] uint8 on the device, for its present stream. DiskError, DamagedError; RuntimeError in torch's words
        if it was changed before it was copied."""
        held = self._held
        if self._modified or (held is not None and held._version != self._version):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation"
                f" (activations, {self._nbytes} bytes, on their way to host memory)"
            )
        if held is None:
            self.bring()
        self._of.bring_before(self._index)
        if held is not None:
            return held
        assert self._coming is not None  # it was brought
        value, there = self._coming
        self._coming = None
        torch.cuda.current_stream(self._device).wait_event(there)
        return value

    @property
    def is_near(self) -> bool:
        """Whether it can be brought without waiting for a disk."""
        return self._host is not None

    def bring(self) -> None:
        """Starts to copy it back, where it is neither there nor on its way."""
        if self._held is not None or self._coming is not None:
            return
        host = self._host if self._spilled is None else self._spilled.get()
        assert host is not None  # in memory or on disk
        self._stream = torch.cuda.current_stream(self._device)
        value = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
        self._of.back.wait_stream(self._stream)  # whose the memory was before
        with torch.cuda.stream(self._of.back):
            value.copy_(host, non_blocking=True)
            there = torch.cuda.Event()
            there.record(self._of.back)
        self._coming = value, there

    def __del__(self) -> None:
        if getattr(self, "_coming", None) is not None:  # nobody asked for it: its memory is free behind the copy
            self._stream.wait_event(self._coming[1])  # type: ignore[index]  # it is not None


class DeviceSpill:
    """spill: where values go on to; None: they stay in the host's memory. One thread at a time."""

    def __init__(self, spill: Spill | None = None) -> None:
        self.spill = spill
        self._all: dict[int, weakref.ref[Away]] = {}
        self._under_way: collections.deque[weakref.ref[Away]] = collections.deque()
        self._next = 0
        self.bytes_out = 0

    def _open(self, device: torch.device) -> None:
        if not hasattr(self, "out"):
            self.out, self.back = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def put(self, values: torch.Tensor) -> Away:
        """`values`: contiguous uint8 on the device."""
        self._open(values.device)
        while len(self._under_way) >= BEHIND:
            if (oldest := self._under_way.popleft()()) is not None:
                oldest.let_go()
        out, index = Away(self, self._next, values), self._next
        self._next += 1
        self._all[index] = weakref.ref(out, lambda _: self._all.pop(index, None))
        self._under_way.append(weakref.ref(out))
        self.bytes_out += values.nbytes
        return out

    def bring_before(self, index: int) -> None:
        for at in range(index - 1, max(-1, index - 1 - AHEAD), -1):
            other = self._all[at]() if at in self._all else None
            if other is not None and other.is_near:
                other.bring()
