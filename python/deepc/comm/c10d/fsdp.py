"""FSDP2 (fully_shard) with compressed communication: weights gathered and gradients reduced as payloads of
deepc.compress.

    for layer in model.layers: fully_shard(layer)
    fully_shard(model)
    comms = compress(model)                               # 8-bit weights, 8-bit gradients with error feedback
    comms = compress(model, gradients=Int4Blocks())       # as ZeRO++'s qwZ and qgZ (Wang et al., arXiv:2306.10209)

The sharded parameters stay exact; what a forward or backward computes with are the decoded payloads, the same on all
ranks. The two classes fit FSDPModule.set_custom_all_gather and set_custom_reduce_scatter (checked with torch 2.13; the
classes that they derive from are in an underscored module of torch)."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from ...core.foreign.private import AllGather, ReduceScatter
from ...errors import ArgumentError, UnsupportedError
from .compressed import Codec, ErrorFeedback, Int8Blocks, all_gather, all_gather_begin, reduce_scatter


class _Allocate:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gathering(dist.Work):
    """A gather of payloads under way; wait() decodes them."""

    def __init__(self, finish: Callable[[], None]) -> None:
        super().__init__()
        self._finish: Callable[[], None] | None = finish

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        finish, self._finish = self._finish, None
        if finish:
            finish()
        return True

    def is_completed(self) -> bool:
        return self._finish is None


class CompressedAllGather(_Allocate, AllGather):  # type: ignore[misc]  # the ways of asking differ: FSDP gives sizes
    """All-gather of weights as payloads; every rank computes with the decoded numbers, of its own shard too.
    sent_bytes: by this rank, in all."""

    def __init__(self, codec: Codec | None = None) -> None:
        self.codec, self.sent_bytes = codec or Int8Blocks(256), 0

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """output_tensor [world * n], input_tensor [n] (a slice of it or apart), of one dtype: fp32, bf16 or fp16, on
        the CPU."""
        if not output_tensor.dtype.is_floating_point:
            raise UnsupportedError(
                f"FSDP gathers this group as {output_tensor.dtype}: its parameters have several dtypes. Give them one "
                "dtype (or MixedPrecisionPolicy(param_dtype=...)), or don't compress this module's all-gather"
            )
        if not async_op:
            self.sent_bytes += all_gather(output_tensor, input_tensor, group, self.codec)
            return None
        sent, finish = all_gather_begin(output_tensor, input_tensor, group, self.codec)
        self.sent_bytes += sent
        return _Gathering(finish)


class CompressedReduceScatter(_Allocate, ReduceScatter):  # type: ignore[misc]  # as above
    """Reduce-scatter of gradients as payloads, added in fp32 in rank order. One object per FSDP module: it holds the
    errors of that module's gradients (error_feedback=False: none). FSDP leaves out parameters without a gradient, so
    there is one error per number of elements."""

    def __init__(self, codec: Codec | None = None, *, error_feedback: bool = True) -> None:
        self.codec, self.error_feedback, self.sent_bytes = codec or Int8Blocks(), error_feedback, 0
        self._feedback: dict[int, ErrorFeedback] = {}

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """input_tensor [world * n], output_tensor [n], fp32, bf16 or fp16, on the CPU. op: SUM, AVG or PREMUL_SUM.
        Returns when it is done."""
        name, factor = _meaning(op)
        feedback = self._feedback.setdefault(input_tensor.numel(), ErrorFeedback()) if self.error_feedback else None
        self.sent_bytes += reduce_scatter(output_tensor, input_tensor, group, self.codec, feedback, op=name)
        if factor != 1.0:
            output_tensor.mul_(factor)

    def state_dict(self) -> dict[str, Any]:
        """This rank's errors, by number of elements; every rank saves its own."""
        return {str(n): f.state_dict() for n, f in self._feedback.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._feedback = {int(n): ErrorFeedback() for n in state}
        for n, errors in state.items():
            self._feedback[int(n)].load_state_dict(errors)


def _meaning(op: Any) -> tuple[str, float]:
    """("sum" or "avg", factor on the result)."""
    types: Any = dist.ReduceOp.RedOpType  # torch's stub lists no members
    kind = cast(Any, dist.ReduceOp(op)).op if isinstance(op, dist.ReduceOp.RedOpType) else op.op
    if kind == types.SUM:
        return "sum", 1.0
    if kind == types.AVG:
        return "avg", 1.0
    if kind == types.PREMUL_SUM:
        factor = op.__getstate__()[1]
        if isinstance(factor, float):
            return "sum", factor
    raise UnsupportedError(f"compressed reduce-scatter of {kind}: it does SUM, AVG and PREMUL_SUM with a number")


class FSDPComms:
    """What compress() set. Names are those of the FSDP modules."""

    def __init__(self) -> None:
        self.all_gathers: dict[str, CompressedAllGather] = {}
        self.reduce_scatters: dict[str, CompressedReduceScatter] = {}

    @property
    def sent_bytes(self) -> int:
        """By this rank, in all."""
        return sum(c.sent_bytes for c in self.all_gathers.values()) + sum(
            c.sent_bytes for c in self.reduce_scatters.values()
        )

    def state_dict(self) -> dict[str, Any]:
        """This rank's errors of all modules; every rank saves its own."""
        return {name: c.state_dict() for name, c in self.reduce_scatters.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if unknown := set(state) - set(self.reduce_scatters):
            raise ArgumentError(f"error feedback of modules that are not here: {sorted(unknown)}")
        for name, errors in state.items():
            self.reduce_scatters[name].load_state_dict(errors)


def compress(
    model: torch.nn.Module,
    *,
    weights: Codec | None = Int8Blocks(256),  # noqa: B008
    gradients: Codec | None = Int8Blocks(),  # noqa: B008
    error_feedback: bool = True,
) -> FSDPComms:
    """Sets the compressed collectives on every FSDP module in `model` (after fully_shard). weights: codec of the
    all-gather, gradients: of the reduce-scatter; None leaves FSDP's own. Weights get no error feedback: each gather
    carries the weights themselves, not a change of them."""
    comms = FSDPComms()
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        if weights is not None:
            comms.all_gathers[name] = CompressedAllGather(weights)
            module.set_custom_all_gather(comms.all_gathers[name])
        if gradients is not None:
            comms.reduce_scatters[name] = CompressedReduceScatter(gradients, error_feedback=error_feedback)
            module.set_custom_reduce_scatter(comms.reduce_scatters[name])
    if not comms.all_gathers and not comms.reduce_scatters:
        raise ArgumentError("compress: no FSDP module in the model, or no codec; call fully_shard first")
    return comms
