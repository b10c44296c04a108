"""deepspeed.ops.op_builder.OpBuilder: what scripts ask it about the machine before they begin. It builds nothing."""

from __future__ import annotations

import re

import torch

from ....errors import UnsupportedError


class OpBuilder:
    """Its static methods are answered; deepc compiles nothing on the user's machine, so that there is no object."""

    def __init__(self, *_: object, **__: object) -> None:
        raise UnsupportedError(
            "deepspeed.ops.op_builder.OpBuilder: deepc compiles nothing on your machine, so there are no op builders;"
            " `deepc doctor` shows which kernels run"
        )

    @staticmethod
    def is_rocm_pytorch() -> bool:
        """Whether this PyTorch is one for AMD's GPUs."""
        return torch.version.hip is not None

    @staticmethod
    def installed_rocm_version() -> tuple[int, int]:
        """(major, minor) of the ROCm that this PyTorch was made with; (0, 0) without."""
        found = re.match(r"(\d+)\.(\d+)", torch.version.hip or "")
        return (int(found[1]), int(found[2])) if found else (0, 0)
