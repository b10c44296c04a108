"""What lies on a device and is in host memory for a while (engine.offload_states of a GPU run)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from ...core import memory
from ...errors import OutOfMemoryError

AWAY = "optimizer states are in host memory since engine.offload_states(); call engine.reload_states() first"


class _Row(NamedTuple):
    """A storage without memory, and what it held; host None: nothing that is wanted."""

    storage: torch.UntypedStorage
    host: torch.Tensor | None
    nbytes: int


class HostCopies:
    """Tensors on a device whose memory is free. They are the same objects, with the same views, before and after
    `bring_back`; their addresses are not."""

    def __init__(self, tensors: Iterable[tuple[torch.Tensor, bool]], locked: bool = True) -> None:
        """tensors: with whether their contents are wanted again, else they come back as zeros; each goes with all of
        its storage. locked: in pages that the device reaches. OutOfMemoryError of the host: nothing has been moved."""
        found: dict[int, tuple[torch.UntypedStorage, bool]] = {}
        for tensor, wanted in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                known = found.get(storage.data_ptr())
                found[storage.data_ptr()] = storage, wanted or (known is not None and known[1])
        self._rows: list[_Row] = []
        self._devices = {storage.device for storage, _ in found.values()}
        try:
            for storage, wanted in found.values():
                n = storage.nbytes()
                host = memory.zeros(n, torch.uint8, locked=storage.device if locked else None) if wanted else None
                if host is not None:
                    host.copy_(_bytes_of(storage), non_blocking=True)
                self._rows.append(_Row(storage, host, n))
        finally:
            self._settle()
        for row in self._rows:
            row.storage.resize_(0)
        self.release()

    @staticmethod
    def release() -> None:
        """Whoever needs the memory of the device now may have it."""
        torch.cuda.empty_cache()

    @property
    def nbytes(self) -> int:
        """Of the device, that are free."""
        return sum(row.nbytes for row in self._rows)

    def bring_back(self) -> None:
        """OutOfMemoryError of the device: another call goes on."""
        done: list[_Row] = []
        try:
            while self._rows:
                row = self._rows[-1]
                row.storage.resize_(row.nbytes)
                if row.host is None:
                    _bytes_of(row.storage).zero_()
                else:
                    _bytes_of(row.storage).copy_(row.host, non_blocking=True)
                done.append(self._rows.pop())
        except torch.OutOfMemoryError as exc:
            raise OutOfMemoryError(
                f"engine.reload_states(): {self.nbytes:,} bytes of optimizer states do not fit on the device: {exc}."
                " Free memory there, and call it again"
            ) from exc
        finally:
            self._settle()
            done.clear()

    def _settle(self) -> None:
        """No copy is under way: host memory that it reads or writes may go."""
        for device in self._devices:
            torch.cuda.synchronize(device)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]  # a storage
