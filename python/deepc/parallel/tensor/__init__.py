"""Tensor parallelism: weights cut over ranks that compute one layer together. `deepc.initialize` cuts models
(tensor_parallel.autotp_size); these are the parts, for models that are made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

_HOMES = {
    "ColumnParallelLinear": "layers",
    "RowParallelLinear": "layers",
    "VocabParallelEmbedding": "layers",
    "Region": "layers",
    "Cut": "cut",
    "cuts_of": "cut",
    "TensorGroup": "group",
    "tensor_group": "group",
    "whole_of": "group",
    "cut_model": "model",
    "tp_model_init": "rules",
    "dtensors": "dtensor",
    "cross_entropy": "loss",
    "linear_cross_entropy": "loss",
    "enter": "regions",
    "leave": "regions",
    "gather": "regions",
    "part": "regions",
    "enter_from_sequence": "regions",
    "leave_to_sequence": "regions",
    "sum_gradients": "regions",
}


if TYPE_CHECKING:
    from .cut import Cut, cuts_of
    from .dtensor import dtensors
    from .group import TensorGroup, tensor_group, whole_of
    from .layers import ColumnParallelLinear, Region, RowParallelLinear, VocabParallelEmbedding
    from .loss import cross_entropy, linear_cross_entropy
    from .model import cut_model
    from .regions import enter, enter_from_sequence, gather, leave, leave_to_sequence, part, sum_gradients
    from .rules import tp_model_init


__all__ = [
    "ColumnParallelLinear",
    "Cut",
    "Region",
    "RowParallelLinear",
    "TensorGroup",
    "VocabParallelEmbedding",
    "cross_entropy",
    "cut_model",
    "cuts_of",
    "dtensors",
    "enter",
    "enter_from_sequence",
    "gather",
    "leave",
    "leave_to_sequence",
    "linear_cross_entropy",
    "part",
    "sum_gradients",
    "tensor_group",
    "tp_model_init",
    "whole_of",
]


def __getattr__(name: str) -> Any:
    """Each at its first use: checkpoints need cuts, and no layers."""
    if name not in _HOMES:
        raise AttributeError(f"module 'deepc.parallel.tensor' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
