"""deepspeed.runtime.pipe.schedule: a stage's schedule as steps of a common clock, each a list of instructions on
numbered buffers. deepc's own form, with more kinds, is plan/schedule.py; TrainSchedule is its "1f1b", computation for
computation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from ....errors import ArgumentError
from ...helpers.utils import call_to_str


# ---- instructions ----------------------------------------------------------------------------------------------------
class PipeInstruction:
    """One thing to do; keyword arguments become attributes."""

    def __init__(self, **kwargs: Any) -> None:
        self.name, self.kwargs = type(self).__name__, kwargs
        vars(self).update(kwargs)

    def __repr__(self) -> str:
        return call_to_str(self.name, **self.kwargs)


class OptimizerStep(PipeInstruction):
    """Update the weights, and drop the gradients."""


class ReduceGrads(PipeInstruction):
    """Reduce gradients over the copies of this stage."""


class ReduceTiedGrads(PipeInstruction):
    """Reduce gradients of weights that several stages share."""


class BufferOpInstruction(PipeInstruction):
    """Something that is done with the buffer `buffer_id` of a micro-batch."""

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Take the next micro-batch of the data: inputs on the first stage, labels on the last."""


class ForwardPass(BufferOpInstruction):
    """Compute this stage's outputs."""


class BackwardPass(BufferOpInstruction):
    """Compute gradients, and accumulate those of the weights."""


class SendActivation(BufferOpInstruction):
    """Send outputs to the next stage."""


class RecvActivation(BufferOpInstruction):
    """Receive inputs from the stage before."""


class SendGrad(BufferOpInstruction):
    """Send gradients of the inputs to the stage before."""


class RecvGrad(BufferOpInstruction):
    """Receive gradients of the outputs from the next stage."""


# ---- schedules -------------------------------------------------------------------------------------------------------
class PipeSchedule(ABC):
    """What stage `stage_id` of `stages` does with `micro_batches`: iterating gives, step by step, what to do in it."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        if micro_batches < 1 or not 0 <= stage_id < stages:
            raise ArgumentError(
                f"schedule: {micro_batches} micro-batches, stage {stage_id} of {stages}; there is at least one"
                " micro-batch, and stages count from 0"
            )
        self.micro_batches, self.stages, self.stage_id = micro_batches, stages, stage_id
        self.prev_stage, self.next_stage = stage_id - 1, stage_id + 1

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The instructions of one step after the other."""

    def __iter__(self) -> Iterator[list[PipeInstruction]]:
        return self.steps()

    def num_pipe_buffers(self) -> int:
        """Buffers that the stage needs; at most one for each micro-batch."""
        return self.micro_batches

    @property
    def stage(self) -> int:
        return self.stage_id

    @property
    def num_stages(self) -> int:
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage_id == self.stages - 1

    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        return 0 <= micro_batch_id < self.micro_batches

    def _valid_stage(self, stage_id: int) -> bool:
        return 0 <= stage_id < self.stages

    def _buffer_idx(self, micro_batch_id: int) -> int:
        """Buffers are used in turn."""
        return micro_batch_id % self.num_pipe_buffers()


class InferenceSchedule(PipeSchedule):
    """Forward passes alone, with two buffers: one is received while the other is sent."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for step in range(self.micro_batches + self.stages - 1):
            now = step - self.stage_id
            comes, goes = (step + self.stage_id) % 2, (step + self.stage_id + 1) % 2
            here, before = self._valid_micro_batch(now), self._valid_micro_batch(now - 1)
            hops: list[PipeInstruction] = []
            if before and not self.is_last_stage:
                hops.append(SendActivation(goes))
            if here and not self.is_first_stage:
                hops.append(RecvActivation(comes))
            if self.stage_id % 2:  # neighbours meet: one sends while the other receives
                hops.reverse()
            load = here and (self.is_first_stage or self.is_last_stage)
            yield [*([LoadMicroBatch(comes)] if load else []), *hops, *([ForwardPass(comes)] if here else [])]

    def num_pipe_buffers(self) -> int:
        return 2


class TrainSchedule(PipeSchedule):
    """1F1B, and the update at its end. A step is long enough for a forward or a backward pass; stages take turns, so
    that neighbours never compute the same kind in one step."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        total = 2 * (self.micro_batches + self.stages - 1)
        for step in range(total):
            now, forward = self._step_to_micro_batch(step)
            out = self._hops(now, self._step_to_micro_batch(step - 1)[0], forward)
            if self._valid_micro_batch(now):
                buffer = self._buffer_idx(now)
                if forward and (self.is_first_stage or self.is_last_stage):
                    out.append(LoadMicroBatch(buffer))
                out.append(ForwardPass(buffer) if forward else BackwardPass(buffer))
            if step == total - 1:
                out += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            yield out

    def num_pipe_buffers(self) -> int:
        """As many micro-batches as are between their forward and backward pass here at a time, at least two."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def _step_to_micro_batch(self, step: int) -> tuple[int, bool]:
        """Which micro-batch a step computes (perhaps one that there is not), and whether forward. Micro-batch 0 comes
        down after `stage_id` steps, and back when it has been to the last stage and up again; a pair of steps for each
        other one."""
        after = step - self.stage_id
        if after % 2 == 0:
            return after // 2, True
        return (step - (2 * self.stages - 1 - self.stage_id)) // 2, False

    def _hops(self, now: int, before: int, forward: bool) -> list[PipeInstruction]:
        """What the last step computed leaves, and what this one needs comes; in the order in which the neighbour does
        its part."""
        comes, goes = self._valid_micro_batch(now), self._valid_micro_batch(before)
        out: list[PipeInstruction] = []
        if forward and self._valid_stage(self.prev_stage):
            if goes:
                out.append(SendGrad(self._buffer_idx(before)))
            if comes:
                out.append(RecvActivation(self._buffer_idx(now)))
        if not forward and self._valid_stage(self.next_stage):
            if comes:
                out.append(RecvGrad(self._buffer_idx(now)))
            if goes:
                out.append(SendActivation(self._buffer_idx(before)))
        return out


class DataParallelSchedule(PipeSchedule):
    """One stage: gradient accumulation."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for step in range(self.micro_batches):
            out: list[PipeInstruction] = [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
            if step == self.micro_batches - 1:
                out += [ReduceGrads(), OptimizerStep()]
            yield out

    def num_pipe_buffers(self) -> int:
        return 1
