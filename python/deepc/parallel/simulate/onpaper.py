"""What one rank holds of a model that is divided over ranks, without the other ranks: for estimates, in a child that is
thrown away (plan/predict/dryrun)."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...config.tree import Config
from ...errors import UnsupportedError
from ...plan.mesh import Mesh
from ...plan.predict.estimate import ask, command
from ...plan.predict.estimate.case import Divided, numel_trained
from ...plan.predict.estimate.figures import MemoryEstimate
from ..axes import without_values
from ..expert.group import ExpertGroup, mesh_with_experts
from ..expert.spread import connect, ranks_of_experts, refuse_experts, shared_gradients, spread_tensors
from ..pipeline.layers import PipelineModule
from ..tensor.cut import cuts_of
from ..tensor.group import TensorGroup

if TYPE_CHECKING:
    from .stages import CutOnPaper


class OnPaper(TensorGroup):
    """A rank of a group that is not there: what it would get of the others has shapes alone. Where tensors have values
    (a block is tried: where may it be cut?) the others have zeros, or the same: a part computes alike each time."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(None, rank, size)

    def spread(self, t: torch.Tensor) -> None:
        """Every rank has the first one's values."""

    def add_up(self, t: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return t

    def gather(self, t: torch.Tensor, dim: int, widths: Sequence[int]) -> torch.Tensor:
        if without_values(t):
            return super().gather(t, dim, widths)
        return torch.cat([t.narrow(dim, 0, w) for w in widths], dim)  # the first rank's is the widest

    def scatter_sum(self, t: torch.Tensor, dim: int) -> torch.Tensor:
        return super().scatter_sum(t, dim) if without_values(t) else t.chunk(self.size, dim)[self.rank].contiguous()


class ExpertsOnPaper(ExpertGroup):
    """The first of the ranks that share experts, without the others: each sends as many tokens as this one. Where they
    have values, those of others are zeros."""

    def __init__(self, size: int) -> None:
        super().__init__(None, 0, size)

    def exchanged(self, rows: torch.Tensor, given: list[int], got: list[int]) -> torch.Tensor:
        if without_values(rows):
            return super().exchanged(rows, given, got)
        out = rows.new_zeros(sum(got), rows.shape[1])
        out[: got[0]] = rows[: given[0]]  # they are this rank's
        return out


def divide(model: torch.nn.Module, config: Config, replicas: int) -> Divided:
    """The first rank's shard, as deepc.initialize cuts the model; what is cut already stays. Its experts are connected
    with those of the other ranks that share them, which are not there."""
    from ..tensor.model import cut_model

    parameters, ranks = numel_trained(model), config.tensor_parallel.autotp_size or 1
    experts = ranks_of_experts(model)
    refuse_experts(model, experts, torch.device(config.device_type))
    if ranks > 1 and not cuts_of(model):
        cut_model(model, OnPaper(0, ranks), dataclasses.asdict(config.tensor_parallel))
    if experts > 1:
        mesh_with_experts(Mesh(dp=replicas), experts)
        spread = spread_tensors(model)
        parameters += (experts - 1) * sum(p.numel() for p in model.parameters() if p.requires_grad and id(p) in spread)
        connect(model, ExpertsOnPaper(experts))
        if (config.pipeline.stages or 1) == 1 and (shared := shared_gradients(model, config)) is not None:
            shared.hook(model.parameters())
    return Divided(experts, parameters)


def cut(
    model: torch.nn.Module,
    config: Config,
    batch: Any,
    loss_fn: Callable[..., Any] | None,
    world: int,
    dtype: torch.dtype,
) -> CutOnPaper:
    """The model cut into the stages of a pipeline, as deepc.initialize cuts it."""
    from .stages import CutOnPaper

    return CutOnPaper(model, config, batch, loss_fn, world, dtype)


@functools.wraps(ask.estimate)
def estimate(*args: Any, **kwargs: Any) -> MemoryEstimate:
    model = args[0] if args else kwargs.get("model")
    if isinstance(model, PipelineModule) and model.num_stages > 1:
        raise UnsupportedError(
            f"a PipelineModule(num_stages={model.num_stages}) has the layers of its rank alone, so that one process"
            " can't estimate all stages; its ranks do, by deepc.initialize(sample_batch=(inputs, labels))"
        )
    return ask.estimate(*args, divide=divide, cut=cut, **kwargs)


def run_estimate(args: argparse.Namespace) -> int:
    """`deepc estimate`."""
    return command.run_estimate(args, divide, cut)


def run_plan(args: argparse.Namespace) -> int:
    """`deepc plan`."""
    return command.run_plan(args, divide, cut)
