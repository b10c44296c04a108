"""The torch.distributed backend "deepc" (also "cpu:deepc"): registration, and clean ends of processes.

The process group itself is in group.py, imported when the first one is made."""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .group import DeepcProcessGroup

_registered = False


def register_backend() -> None:
    """Makes "deepc" known to torch.distributed. Called by `import deepc`; a second call does nothing."""
    global _registered
    import torch.distributed as dist

    if _registered or not dist.is_available():
        return
    dist.Backend.register_backend("deepc", _create, extended_api=True, devices=["cpu", "cuda"])
    atexit.register(_at_exit, os.getpid())
    _registered = True


def _create(options: Any, backend_options: Any) -> DeepcProcessGroup:
    """Called by torch for init_process_group and new_group."""
    from .group import DeepcProcessGroup

    return DeepcProcessGroup(options, backend_options)


def _at_exit(pid: int) -> None:
    """A script that ends without destroy_process_group: leaves the groups, those of engines first, and drops them
    before the interpreter goes, because torch's registry would drop Python objects after it."""
    import sys

    for name in ("groups", "c10d.group"):
        module = sys.modules.get(f"{__package__.rpartition('.')[0]}.{name}")
        if module is not None and os.getpid() == pid:
            module.leave_all()
