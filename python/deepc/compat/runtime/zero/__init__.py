"""Names of deepspeed.zero beyond Init (deepc.zero has that)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import torch

from ....plan.predict.estimate import model_states_bytes
from ....zero.parameters import gathered

_orig_torch_tensor, _orig_torch_empty, _orig_torch_zeros, _orig_torch_ones = (
    torch.tensor,
    torch.empty,
    torch.zeros,
    torch.ones,
)
_orig_torch_full, _orig_torch_arange, _orig_torch_eye, _orig_torch_randn = (
    torch.full,
    torch.arange,
    torch.eye,
    torch.randn,
)


class GatheredParameters(gathered.GatheredParameters):
    """deepc's. DeepSpeed's gathers copies of each rank's own, and scripts write them for a while without a
    modifier_rank: peft's merge_adapter and merge_and_unload do it through `.data`."""

    private_data = True


class ZeRORuntimeException(Exception):
    """What DeepSpeed's ZeRO raises at run time. deepc's own errors are DeepcError's."""


class ZeroParamType(Enum):
    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class DeepSpeedTensorOverride(Enum):
    """Values of zero.Init(tensor_overrides=...), which has no meaning here: deepc does not replace torch's
    constructors."""

    dtype = "dtype"
    device = "device"


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Any], target_fp_dtype: torch.dtype | None = None, target_device: Any = None, **kwargs: Any
) -> Callable[..., Any]:
    """`fn` itself. DeepSpeed's zero.Init makes torch's constructors give the training dtype; deepc's leaves them
    alone, and buffers keep their dtype. (transformers replaces this name while it builds a model.)"""
    return fn


def shutdown_init_context() -> None:
    """For code that DeepSpeed runs inside zero.Init: there is nothing to suspend."""


restore_init_context = shutdown_init_context


@contextlib.contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """The engine with ZeRO-3's parameters gathered once, for many forward calls in a row. Collective."""
    with model.keep_gathered():
        yield model


def is_zero_supported_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """True if the optimizer runs on shards without zero_allow_untested_optimizer."""
    from ....optim.factory import ELEMENTWISE, takes_core_path

    return takes_core_path(optimizer) or type(optimizer).__name__ in ELEMENTWISE


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """(bytes of the node's host memory, bytes of one rank's device memory) of model states at stage 2. deepc on CPUs:
    all is host memory."""
    private, shared = model_states_bytes(
        int(total_params), stage=2, ranks_per_node=num_gpus_per_node, nodes=num_nodes, dtype="bf16"
    )
    return int(additional_buffer_factor * (private * num_gpus_per_node + shared)), 0


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """(host bytes of the node, device bytes of a rank, bytes of the largest layer) at stage 3. deepc on CPUs: all is
    host memory."""
    private, shared = model_states_bytes(
        int(total_params), stage=3, ranks_per_node=num_gpus_per_node, nodes=num_nodes, dtype="bf16"
    )
    return int(additional_buffer_factor * (private * num_gpus_per_node + shared)), 0, 2 * int(largest_layer_params)
