"""A batch through the stages of one rank: the actions of the schedule, one after the other.

F runs a stage forward, on what the stage before sent, and sends its output on. B runs it backward, on the gradient of
that output; or I and W do so in two halves (deferred.py). Between stages of one rank nothing is sent."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ...plan.schedule import Action
from .deferred import Deferring, Later, Sums
from .hops import Hops
from .part import Part

_ACTIVATION, _GRADIENT, _TIED = 0, 1, 2


class Forward(Protocol):
    """Who runs a stage."""

    def run_stage(self, stage: int, received: Any, batch: Any) -> Any:
        """Forward. In training the last stage's is the loss."""


class Loop(Forward, Sums, Protocol):
    """The engine, as far as a batch of training needs one."""

    def backward_stage(self, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """Backward of a stage but the last, from the gradients of its outputs."""

    def backward_loss(self, loss: torch.Tensor) -> None:
        """Backward of the last stage."""

    def last_backward_comes(self) -> None:
        """Before the last backward of the batch on this rank."""


class _Passed(NamedTuple):
    """A micro-batch that went forward through a stage."""

    inputs: Any
    output: Any
    later: Later | None


class Stages:
    """The stages of this rank. column: the ranks of the pipeline in the default group, first to last. hops: what
    carries messages between them, if another does."""

    KINDS = 3  # of messages: activations, gradients, ties

    def __init__(self, part: Part, column: Sequence[int], here: int, hops: Hops | None = None) -> None:
        self._part, self._here = part, here
        self.hops = hops or Hops(column)
        self.count = part.order.stages
        self._rank_of = [part.order.rank_of(s) for s in range(self.count)]
        self._passed: dict[tuple[int, int], _Passed] = {}
        self._local: dict[tuple[int, int, int], Any] = {}  # what goes from a stage to another of this rank
        self.times: list[tuple[float, float]] = []  # of the actions of the last `train`
        self._begun = 0.0  # when what an action works on was there

    def is_first(self) -> bool:
        return self._rank_of[0] == self._here

    def is_last(self) -> bool:
        return self._rank_of[-1] == self._here

    def actions(self, micro_batches: int) -> tuple[Action, ...]:
        """This rank's."""
        return self._part.order.actions(self._here, micro_batches)

    def in_flight(self, micro_batches: int) -> int:
        """Forwards of this rank's stages that wait for the end of their backwards at most."""
        now = most = 0
        for action in self.actions(micro_batches):
            now += {"F": 1, "I": 0}.get(action.kind, -1)
            most = max(most, now)
        return most

    def splits(self, micro_batches: int) -> bool:
        """Whether backward comes in two halves."""
        return _splits(self.actions(micro_batches))

    # ---- a batch -----------------------------------------------------------------------------------------------------
    def train(self, loop: Loop, batches: Sequence[Any], indices: Mapping[int, int]) -> list[torch.Tensor]:
        """Forward and backward of all micro-batches. indices: id -> index of the trained parameters. Returns the
        losses, detached, on the rank of the last stage. What was sent may be under way still (hops.finish): another
        rank may take it only after something that this one has yet to send."""
        losses: list[torch.Tensor] = []
        plan = self.actions(len(batches))
        self.times = []
        splits = _splits(plan)
        last = max(i for i, action in enumerate(plan) if action.kind != "F")
        try:
            for at, (kind, stage, micro) in enumerate(plan):
                self._begun = time.monotonic()
                if at == last:
                    loop.last_backward_comes()
                if kind == "F":
                    later = Later() if splits else None
                    with contextlib.nullcontext() if later is None else Deferring(indices, loop, later):
                        out = self._forward(loop, stage, micro, batches[micro], later)
                    if stage == self.count - 1:
                        losses.append(out.detach())
                elif kind == "W":
                    later = self._passed.pop((stage, micro)).later
                    assert later is not None
                    later.run()
                else:
                    self._backward(loop, stage, micro, keep=kind == "I")
                self.times.append((self._begun, time.monotonic()))
        finally:
            self._passed.clear()
            self._local.clear()
        return losses

    def evaluate(self, loop: Forward, batches: Sequence[Any]) -> list[Any]:
        """Forward of all micro-batches: what the last stage returned, on its rank."""
        outputs = []
        try:
            for _, stage, micro in self._part.order.forwards(self._here, len(batches)):
                out = self._forward(loop, stage, micro, batches[micro])
                if stage == self.count - 1:
                    outputs.append(out)
                self._passed.clear()
            self.hops.finish()
        finally:
            self._passed.clear()
            self._local.clear()
        return outputs

    def _forward(self, loop: Forward, stage: int, micro: int, batch: Any, later: Later | None = None) -> Any:
        received = None if stage == 0 else self._receive(stage, micro)
        self._begun = time.monotonic()
        given = _handed_on(received)
        out = loop.run_stage(stage, given, batch)
        _note_writes(given, received)
        self._passed[stage, micro] = _Passed(received, out, later)
        if stage < self.count - 1:
            self._send(out, stage, micro)
        return out

    def _backward(self, loop: Loop, stage: int, micro: int, keep: bool) -> None:
        """keep: the other half of it comes later."""
        passed = self._passed[stage, micro]
        if stage == self.count - 1:
            loop.backward_loss(passed.output)
        else:
            outputs = _grown(passed.output)
            gradients = self._receive_gradients(stage, micro, outputs)
            self._begun = time.monotonic()
            loop.backward_stage(outputs, gradients)
        if stage > 0:
            self._send_gradients(_leaves(passed.inputs), stage, micro)
        if keep:
            self._passed[stage, micro] = passed._replace(inputs=None, output=None)
        else:
            del self._passed[stage, micro]

    # ---- messages ----------------------------------------------------------------------------------------------------
    def _tag(self, stage: int, micro: int, kind: int) -> int:
        """Of what goes between stages `stage` and `stage + 1`."""
        return (micro * self.count + stage) * self.KINDS + kind

    def _send(self, out: Any, stage: int, micro: int) -> None:
        to = self._rank_of[stage + 1]
        if to != self._here:
            self.hops.send(out, to, self._tag(stage, micro, _ACTIVATION))
        else:
            self._local[stage, micro, _ACTIVATION] = _as_leaves(out)

    def _receive(self, stage: int, micro: int) -> Any:
        source = self._rank_of[stage - 1]
        if source == self._here:
            return self._local.pop((stage - 1, micro, _ACTIVATION))
        return self.hops.receive(source, self._tag(stage - 1, micro, _ACTIVATION))

    def _send_gradients(self, inputs: Sequence[torch.Tensor], stage: int, micro: int) -> None:
        gradients = [torch.zeros_like(t) if t.grad is None else t.grad for t in inputs]
        to = self._rank_of[stage - 1]
        if to != self._here:
            self.hops.send_tensors(gradients, to, self._tag(stage - 1, micro, _GRADIENT))
        else:
            self._local[stage - 1, micro, _GRADIENT] = gradients

    def _receive_gradients(self, stage: int, micro: int, like: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        source = self._rank_of[stage + 1]
        if source == self._here:
            gradients: Sequence[torch.Tensor] = self._local.pop((stage, micro, _GRADIENT))
            return gradients
        return self.hops.receive_like(like, source, self._tag(stage, micro, _GRADIENT))

    # ---- ties --------------------------------------------------------------------------------------------------------
    def send_tie(self, index: int, tensor: torch.Tensor, to: int) -> None:
        """Of the tie number `index`."""
        self.hops.send_tensors([tensor], to, index * self.KINDS + _TIED)

    def receive_tie(self, index: int, like: torch.Tensor, source: int) -> torch.Tensor:
        return self.hops.receive_like([like], source, index * self.KINDS + _TIED)[0]


def _splits(plan: Sequence[Action]) -> bool:
    return any(action.kind == "W" for action in plan)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in (value if isinstance(value, tuple) else (value,)) if isinstance(t, torch.Tensor)]


def _grown(output: Any) -> list[torch.Tensor]:
    """The tensors of an output that depend on parameters."""
    return [t for t in _tensors(output) if t.requires_grad]


_leaves = _grown  # of what was received: those that want a gradient


class _HandedOn(torch.autograd.Function):
    """A leaf's memory in a tensor that is no leaf: a stage may begin with an operation in place, as a layer may in one
    process. No view either (of a leaf it could not be written), so that its version counter is its own."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.data

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


def _handed_on(received: Any) -> Any:
    """What a stage is given of what was received."""
    if isinstance(received, tuple):
        return tuple(map(_handed_on, received))
    wants = isinstance(received, torch.Tensor) and received.requires_grad
    return _HandedOn.apply(received) if wants else received  # type: ignore[no-untyped-call]


def _note_writes(given: Any, received: Any) -> None:
    """What a stage wrote in place was the output of another one of this rank: if its gradient needs what was there,
    autograd says so then, as in one process."""
    for alias, leaf in zip(_tensors(given), _tensors(received)):
        if alias is not leaf and alias._version:
            torch.autograd.graph.increment_version(leaf)


def _as_leaves(value: Any) -> Any:
    """What the next stage of the same rank gets of an output."""
    if isinstance(value, tuple):
        return tuple(map(_as_leaves, value))
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value
