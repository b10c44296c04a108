"""A parameter whose writes by users must be seen: its memory is shared by all ranks of the node (ZeRO-3, resident mode), or an fp32
master stands behind it."""

from __future__ import annotations

import torch

_data = torch._C.TensorBase.data


class NodeParameter(torch.nn.Parameter):
    """A Parameter in everything, but `.data` shares its version counter: a write through it (`p.data.mul_(...)`, a clamp, an EMA copy), which would
    happen once per rank on shared memory, or be lost under the master, is seen at the next step like any other write."""

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _data.__set__(self, value)


def share(p: torch.nn.Parameter) -> None:
    """Makes `p` a NodeParameter; only plain Parameters change their class."""
    if type(p) is torch.nn.Parameter:
        p.__class__ = NodeParameter


def unshare(p: torch.nn.Parameter) -> None:
    if type(p) is NodeParameter:
        p.__class__ = torch.nn.Parameter
