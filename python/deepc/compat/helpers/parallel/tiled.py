"""Computations over long sequences a part of the positions at a time: deepspeed.runtime.sequence_parallel.ulysses_sp's
TiledMLP, sequence_tiled_compute and TiledFusedLogitsLoss, whose arguments these take.

A tile's inner values are made again in backward (torch.utils.checkpoint), one tile at a time, so that memory holds
those of one. Parameters get their gradients from autograd, as without tiles: `compute_params`, by which DeepSpeed's
backward knows the last of a parameter's gradients, is not needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ....errors import ArgumentError


def _part(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    return checkpoint(fn, *args, use_reentrant=False, **kwargs)


def _tiles(t: torch.Tensor, shards: int, dim: int) -> list[torch.Tensor]:
    """In memory of their own, as what a function gets that makes views of its input."""
    return [tile.contiguous() for tile in t.chunk(shards, dim=dim)]


def _refuse_shards(shards: Any) -> None:
    if not isinstance(shards, int) or shards < 1:
        raise ArgumentError(f"shards = {shards!r}: it is a number of parts, 1 or more")


class TiledMLP:
    """TiledMLP.apply(fn, module, x, shards, compute_params): fn(module, x) of a function that sees each position for
    itself."""

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor],
        module: Any,
        x: torch.Tensor,
        shards: int,
        compute_params: Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """x [..., positions, features], cut into at most `shards` parts of the positions."""
        _refuse_shards(shards)
        return torch.cat([_part(fn, module, tile) for tile in _tiles(x, shards, -2)], dim=-2)


def sequence_tiled_compute(
    fn: Callable[..., torch.Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: dict[str, Any],
    kwargs_to_pass: dict[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Sequence[torch.Tensor] | None = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> torch.Tensor:
    """fn(**kwargs_to_shard, **kwargs_to_pass), the former (tensors [samples, positions, ...]) a part of the positions
    at a time. output_reduction: None puts the outputs together along output_unshard_dimension; "mean" and "sum" are of
    all of them. grad_requiring_tensor_key: one of kwargs_to_shard."""
    _refuse_shards(shards)
    if output_reduction not in (None, "mean", "sum"):
        raise ArgumentError(f"output_reduction = {output_reduction!r}: it is None, 'mean' or 'sum'")
    if grad_requiring_tensor_key not in kwargs_to_shard:
        raise ArgumentError(
            f"grad_requiring_tensor_key = {grad_requiring_tensor_key!r} is none of kwargs_to_shard:"
            f" {', '.join(kwargs_to_shard)}"
        )
    for name, t in kwargs_to_shard.items():
        if not isinstance(t, torch.Tensor) or t.dim() < 2 or t.shape[1] != seqlen:
            shape = list(t.shape) if isinstance(t, torch.Tensor) else type(t).__name__
            raise ArgumentError(f"kwargs_to_shard: {name} is {shape}; dimension 1 must be seqlen = {seqlen}")
    tiles = [_tiles(t, shards, 1) for t in kwargs_to_shard.values()]
    outputs = [_part(fn, **dict(zip(kwargs_to_shard, tile)), **kwargs_to_pass) for tile in zip(*tiles)]
    if output_reduction is None:
        return torch.cat(outputs, dim=output_unshard_dimension)
    if outputs[0].dim() == 0:
        return _joined(outputs, [t.shape[1] for t in tiles[0]], output_reduction)
    whole = torch.cat(outputs, dim=output_unshard_dimension)
    return whole.mean() if output_reduction == "mean" else whole.sum()


class TiledFusedLogitsLoss:
    """TiledFusedLogitsLoss.apply(fn, module, x, y, mask, shards, compute_params, output_reduction): the loss fn(module,
    x, y) without the logits of all positions in memory."""

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor],
        module: Any,
        x: torch.Tensor,
        y: torch.Tensor,
        mask: torch.Tensor | None,
        shards: int,
        compute_params: Sequence[torch.Tensor] | None,
        output_reduction: str,
    ) -> torch.Tensor:
        """x [samples, positions, features], y and mask [samples, positions]; fn gets a part of each (mask as a last
        argument, if there is one) and returns a scalar. output_reduction: "sum" adds the parts' up; "mean" weights each
        with its positions, so that labels that fn leaves out must be as frequent in all parts: else use "sum"."""
        _refuse_shards(shards)
        if output_reduction not in ("mean", "sum"):
            raise ArgumentError(f"output_reduction = {output_reduction!r}: it is 'mean' or 'sum'")
        if x.dim() < 2 or y.dim() < 2 or x.shape[:2] != y.shape[:2]:
            raise ArgumentError(
                f"x is {list(x.shape)} and y {list(y.shape)}: both begin with [samples, positions], and equally"
            )
        if mask is not None and mask.shape != x.shape[:2]:
            raise ArgumentError(f"mask is {list(mask.shape)}, and x has [samples, positions] = {list(x.shape[:2])}")
        parts = [_tiles(t, shards, 1) for t in (x, y, *(() if mask is None else (mask,)))]
        losses = [_part(fn, module, *tile) for tile in zip(*parts)]
        return _joined(losses, [t.shape[1] for t in parts[0]], output_reduction)


def _joined(outputs: Sequence[torch.Tensor], positions: Sequence[int], reduction: str) -> torch.Tensor:
    """Of scalars, one for so many positions each."""
    if reduction == "sum":
        return torch.stack(list(outputs)).sum()
    return (torch.stack(list(outputs)) * _weights(positions, outputs[0])).sum()


def _weights(positions: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Each tile's share of the positions, in `like`'s dtype, in which its gradient is multiplied with it. A tile takes
    over what rounding took from those before it: else the weights of 213 and 212 positions add up to 0.998 in bf16, and
    all gradients shrink by that."""
    weights, total = torch.empty(len(positions), dtype=like.dtype, device="cpu"), sum(positions)
    want = got = 0.0
    for i, n in enumerate(positions):
        want += n / total
        weights[i] = want - got
        got += float(weights[i])
    return weights.to(like.device)
