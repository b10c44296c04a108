"""Data on its way into the model: the DataLoader that deepc.initialize returns (torch's, which counts the time that
next() takes as waiting for data, deals out the same steps to any number of ranks, and goes on where a checkpoint was
saved), and the cast of inputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ..core.foreign import private
from ..core.telemetry import waits
from ..errors import ArgumentError
from ..parallel.sequence.shards import each_tensor

if TYPE_CHECKING:
    from ..zero.step.tree import MicroBatchSampler


class DealtSampler(torch.utils.data.DistributedSampler[Any]):
    """This rank's part of the samples, so that a step has the same ones whatever the number of ranks: the whole order
    is drawn from (seed, epoch) as DistributedSampler draws it, a step takes the next `step` of it, and rank r of those
    the r-th, (r + ranks)-th, ... An epoch is filled up from its beginning to whole steps, or cut to them by drop_last.

    shuffle: False takes the samples in the data's own order. epoch: of the next iteration; each begins the next one by
    itself, or set_epoch chooses. start: how many of this rank's samples the next iteration leaves out, where it goes on
    after load_checkpoint."""

    def __init__(self, data: Any, world: int, rank: int, step: int, drop_last: bool = False, seed: int = 0) -> None:
        super().__init__(data, world, rank, shuffle=True, seed=seed, drop_last=drop_last)
        steps = len(data) // step if drop_last else -(-len(data) // step)
        if steps == 0:
            raise ArgumentError(
                f"the training data has {len(data)} samples, a step takes {step}"
                + (", and dataloader_drop_last drops them" if drop_last and len(data) else "")
            )
        self.total_size = steps * step
        self.num_samples = self.total_size // world
        self.start = 0

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0

    def __iter__(self) -> Iterator[int]:
        draw = torch.Generator()
        draw.manual_seed(self.seed + self.epoch)
        size = len(self.dataset)  # type: ignore[arg-type]  # it has a length
        order = torch.randperm(size, generator=draw, device="cpu").tolist() if self.shuffle else range(size)
        first, self.start = self.start, 0
        self.epoch += 1
        for at in range(first * self.num_replicas + self.rank, self.total_size, self.num_replicas):
            yield order[at % len(order)]


class _TimedIterator:
    """An iterator of a DataLoader; everything but next() is the iterator's own."""

    def __init__(self, inner: Iterator[Any], loader: TimedLoader) -> None:
        self._inner, self._loader = inner, loader

    def __iter__(self) -> _TimedIterator:
        return self

    def __next__(self) -> Any:
        began = time.perf_counter()
        try:
            batch = next(self._inner)
        finally:
            waits.add("data", time.perf_counter() - began)
        self._loader.given(self)
        return batch if self._loader.changes is None else self._loader.changes(batch)

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)


class TimedLoader(torch.utils.data.DataLoader[Any]):
    """torch.utils.data.DataLoader; what its iterators wait is in `waits.seconds["data"]`. It knows its place: the epoch
    and the samples that had been given at the engine's last step, which a checkpoint keeps (state_dict); after
    load_state_dict the next iteration goes on there, in any number of ranks."""

    changes: Callable[[Any], Any] | None = None  # what is made of a batch before it is given
    _dealt: DealtSampler | MicroBatchSampler | None = None  # who deals the samples out; None: a stream
    _ranks = 1
    _micro = 0
    _running: tuple[_TimedIterator, int, int] | None = None  # the last iteration, its epoch, samples of this rank
    _stepped: tuple[int, int] | None = None  # the same two at the last step

    def deal(self, dealt: DealtSampler | MicroBatchSampler, ranks: int, micro: int) -> TimedLoader:
        self._dealt, self._ranks, self._micro = dealt, ranks, micro
        return self

    def keep_order(self) -> None:
        """Samples come in the data's own order from here on."""
        if isinstance(self._dealt, DealtSampler):
            self._dealt.shuffle = False

    def __iter__(self) -> Any:
        began = time.perf_counter()
        epoch, start = (self._dealt.epoch, self._dealt.start) if self._dealt is not None else (0, 0)
        if self._stepped is None:
            self._stepped = epoch, start
        drawn = torch.get_rng_state()
        inner = super().__iter__()
        if start:  # it draws a number for its workers' seeds: the iteration that this one goes on with has drawn it
            torch.set_rng_state(drawn)
        waits.add("data", time.perf_counter() - began)  # workers start here
        iterator = _TimedIterator(inner, self)
        self._running = iterator, epoch, start
        return iterator

    def given(self, iterator: _TimedIterator) -> None:
        """`iterator` has given a micro-batch. Workers may have fetched more: those don't count."""
        if self._running is not None and self._running[0] is iterator:
            self._running = iterator, self._running[1], self._running[2] + self._micro

    def stepped(self) -> None:
        """The engine has made a step of what was given. A batch that is fetched and dropped at a loop's end is not
        lost."""
        if self._running is not None:
            self._stepped = self._running[1:]

    def state_dict(self) -> dict[str, int] | None:
        """{"epoch", "samples" of it that all ranks together have made steps of, "of": samples in the data}; None of a
        stream."""
        dealt = self._dealt
        if dealt is None:
            return None
        epoch, mine = self._stepped if self._stepped is not None else (dealt.epoch, dealt.start)
        return {"epoch": epoch, "samples": mine * self._ranks, "of": len(self.dataset)}  # type: ignore[arg-type]

    def load_state_dict(self, state: dict[str, int]) -> str:
        """The next iteration goes on where that was. Returns what there is to say of it."""
        dealt = self._dealt
        if dealt is None:
            return "the training data is a stream, which begins again"
        size = len(self.dataset)  # type: ignore[arg-type]
        self._running = self._stepped = None
        whole = len(self) * self._micro * self._ranks
        epoch, samples = int(state["epoch"]), int(state["samples"])
        if state["of"] != size:
            dealt.set_epoch(epoch)
            dealt.start = 0
            return f"the training data has {size} samples and had {state['of']}: epoch {epoch} begins again"
        if samples >= whole:
            epoch, samples = epoch + 1, 0
        dealt.set_epoch(epoch)
        dealt.start = samples // (self._micro * self._ranks) * self._micro
        return f"the training data goes on in epoch {epoch}, after {dealt.start * self._ranks} of its {whole} samples"


def make_loader(
    data: Any,
    collate_fn: Callable[..., Any] | None,
    *,
    micro_batch: int,
    step: int,
    drop_last: bool,
    world: int,
    rank: int,
    make_sampler: Callable[[Any], MicroBatchSampler | None],
) -> TimedLoader | None:
    """Micro-batches of this rank's part of `data`, a Dataset; None of None. A stream (IterableDataset) is cut by
    itself; anything else is dealt to the ranks, by make_sampler(data) where that gives something. step: samples of a
    step over all ranks."""
    if data is None:
        return None
    if isinstance(data, torch.utils.data.IterableDataset):
        return TimedLoader(data, batch_size=micro_batch, collate_fn=collate_fn, drop_last=drop_last)
    if (batches := make_sampler(data)) is not None:
        return TimedLoader(data, batch_sampler=batches, collate_fn=collate_fn).deal(batches, world, micro_batch)
    dealt = DealtSampler(data, world, rank, step, drop_last)
    loader = TimedLoader(data, batch_size=micro_batch, sampler=dealt, collate_fn=collate_fn, drop_last=drop_last)
    return loader.deal(dealt, world, micro_batch)


@private.uncompiled
def cast_floats(x: Any, dtype: torch.dtype) -> Any:
    """x with its floating-point tensors cast: see each_tensor."""
    return each_tensor(x, lambda t: t.to(dtype) if t.is_floating_point() else t)
