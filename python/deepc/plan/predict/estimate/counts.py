"""By counts alone: model states from the number of parameters, and DeepSpeed's helpers under their names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....errors import ArgumentError, numeric

if TYPE_CHECKING:
    import torch

GIB = 2.0**30


def _counts(model: torch.nn.Module) -> tuple[int, int]:
    """(parameters, those of the largest layer: a module's own, without its children)."""
    total = sum(p.numel() for p in model.parameters())
    return total, max((sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules()), default=0)


@numeric
def model_states_bytes(
    total_params: int, *, stage: int, ranks_per_node: int = 1, nodes: int = 1, dtype: str = "fp32"
) -> tuple[int, int]:
    """(bytes private to a rank, bytes shared by a node's ranks) of model states with AdamW on CPU ranks: parameters,
    fp32 gradients and two moments, and fp32 masters where dtype is 16-bit. Without buckets and activations."""
    if stage not in (0, 1, 2, 3):
        raise ArgumentError(f"stage {stage!r}: it must be 0, 1, 2 or 3")
    if total_params < 0 or ranks_per_node < 1 or nodes < 1:
        raise ArgumentError(
            f"total_params {total_params}, ranks_per_node {ranks_per_node} and nodes {nodes} must be positive"
        )
    item = {"fp32": 4, "bf16": 2, "fp16": 2}[dtype]
    owned = total_params if stage == 0 else -(-total_params // (ranks_per_node * nodes))
    states = owned * (12 if item == 4 else 16)
    params = total_params * item
    return (states, params) if stage == 3 else (states + params, 0)


def _mem_needs(title: str, total: int, largest: int, stage: int, ranks: int, nodes: int, factor: float) -> None:
    print(
        f"Estimated memory needed for params, optim states and gradients for a:\nHW: Setup with {nodes}"
        f" node{'s' * (nodes > 1)}, {ranks} rank{'s' * (ranks > 1)} per node.\nSW: {title}, ZeRO stage {stage}."
    )
    print(
        f"  {'per rank':>10} | {'per node':>10} | Options (private x ranks + shared once a node, then x {factor:g} for"
        " buffers)"
    )
    for dtype in ("fp32", "bf16"):
        private, shared = model_states_bytes(total, stage=stage, ranks_per_node=ranks, nodes=nodes, dtype=dtype)
        largest_gradient = largest * (4 if dtype == "fp32" else 2)
        rank = private + largest_gradient
        print(
            f"  {factor * rank / GIB:>8.2f}GB | {factor * (ranks * rank + shared) / GIB:>8.2f}GB | dtype={dtype},"
            f" largest layer's gradient {largest_gradient / GIB:.2f}GB, shared {shared / GIB:.2f}GB"
        )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """DeepSpeed's helper of this name: prints what model states need at stage 2, from the number of parameters. Ranks
    are the "gpus"."""
    _mem_needs(
        f"Model with {int(total_params / 1e6)}M total params",
        int(total_params),
        0,
        2,
        num_gpus_per_node,
        num_nodes,
        additional_buffer_factor,
    )


def estimate_zero2_model_states_mem_needs_all_live(
    model: torch.nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """The same from a model."""
    estimate_zero2_model_states_mem_needs_all_cold(
        _counts(model)[0], num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """DeepSpeed's helper of this name: prints what model states need at stage 3, from the number of parameters and
    those of the largest layer."""
    _mem_needs(
        f"Model with {int(total_params / 1e6)}M total params, {int(largest_layer_params / 1e6)}M largest layer params",
        int(total_params),
        int(largest_layer_params),
        3,
        num_gpus_per_node,
        num_nodes,
        additional_buffer_factor,
    )


def estimate_zero3_model_states_mem_needs_all_live(
    model: torch.nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """The same from a model."""
    total, largest = _counts(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )
