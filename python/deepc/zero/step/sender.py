"""Where an update on the host makes parameters of a device (offloaded states): how these get there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..state import ModelState


class Sender:
    """Sends what the host's update has made of `state`'s flat space; does nothing where it is no copy of a device's."""

    def __init__(self, state: ModelState) -> None:
        self._state = state
        self._sent: torch.cuda.Event | None = None  # all of the last update is on the device

    def wait(self) -> None:
        """Returns when the host's copy may be written: what was sent has left."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self, stretches: Iterable[tuple[int, int]]) -> None:
        """Elements [begin, end) of the flat space. Until `wait` they are not to be written; `end` comes after the
        last."""
        flat, host = self._state.flat, self._state.flat_host
        if host is None:
            return
        for begin, end in stretches:
            flat[begin:end].copy_(host[begin:end], non_blocking=True)

    def end(self) -> None:
        """An update has sent what it made."""
        if self._state.flat_host is not None:
            self._sent = torch.cuda.Event()
            self._sent.record(torch.cuda.current_stream(self._state.device))

    def send_all(self) -> None:
        """All that this rank's update makes on the host."""
        st = self._state
        made = [s for s in st.plan.slices if st.host_copy(s.flat_begin, s.length) is not None]
        self.send((s.flat_begin, s.flat_begin + s.length) for s in made)
        self.end()
