"""`"deterministic": "layout"`: weights that are bit-identical for 1, 2, 4 or 8 ranks, ZeRO 0 to 3 and any split of the
global batch into ranks and accumulation steps (docs/determinism.md).

A step's micro-batches have numbers: micro-batch m of rank r is m * ranks + r. Their gradients, unscaled by
accumulation, are added along a tree over these numbers (comm/bucket_tree.h); the sum is scaled once, in the update.
What else could differ is kept equal here: dropout is keyed by the number, and the threads of torch are fixed. One rank
makes one pass per micro-batch, also for a micro-batch without a loss (its leaf is zero).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence, Sized
from typing import TYPE_CHECKING, cast

import torch

from ...core.foreign import patches, private
from ...errors import ArgumentError, DeepcError, UnsupportedError, numeric
from ...optim.factory import ELEMENTWISE
from ...plan.derive import tree_buffers

if TYPE_CHECKING:
    from ...comm.groups import Group, MultiNodeGroup

KEY = 'deepc.deterministic = "layout"'


class LayoutOrder:
    """One engine's place among the micro-batches, and the rules of the mode. Knows nothing of gradients."""

    def __init__(self, group: Group, device: torch.device, passes: int) -> None:
        if device.type != "cpu":
            raise UnsupportedError(
                f"{KEY} on {device.type} does not exist; kernels of GPUs do not promise equal bits here. Use CPU ranks,"
                " or remove the key"
            )
        if group.transport == "c10d" and group.world > 1:
            raise UnsupportedError(
                f"{KEY} over nodes with different numbers of ranks ({group.uneven}) does not exist; start equally many"
                " ranks on each node"
            )
        if group.nodes > 1:
            self._check_nodes(cast("MultiNodeGroup", group))
        self.world, self.rank, self.passes = group.world, group.rank, passes
        self.buffers = tree_buffers(group.world, passes)
        self.passed = False  # this micro-batch's pass was made
        self.owed = 0  # passes of earlier micro-batches without a loss, to be made before the first one that has one
        self._micro = self._forwards = 0
        self._divided: bool | None = None
        seed = torch.tensor([torch.initial_seed() % 2**63], dtype=torch.int64, device="cpu")
        group.broadcast(seed, 0)
        self._seed = int(seed)
        if (
            "OMP_NUM_THREADS" not in os.environ
        ):  # torchrun sets 1 for several ranks, and one process alone would take all cores
            torch.set_num_threads(1)
            patches.applied("threads")

    @staticmethod
    def _check_nodes(group: MultiNodeGroup) -> None:
        """A node adds up its own ranks' micro-batches before anything crosses: they must be a node of the tree."""
        ranks = group.ranks_per_node
        if ranks & (ranks - 1):
            raise UnsupportedError(
                f"{KEY} over {group.nodes} nodes needs 1, 2, 4, 8, ... ranks on each node, there are {ranks}; "
                "start so many, or one node"
            )
        if not group.in_order:
            raise UnsupportedError(
                f"{KEY} over {group.nodes} nodes needs consecutive ranks on each node (0, 1 on the first, 2, 3 on the"
                " second, ...)"
            )

    @property
    def index(self) -> int:
        """Number of this rank's current micro-batch in the step."""
        return self._micro * self.world + self.rank

    @contextlib.contextmanager
    @private.uncompiled
    def forward(self, step: int, training: bool) -> Iterator[None]:
        """Around a forward in training: torch's generator is seeded by (rank 0's seed, step, micro-batch, how many
        forwards it had), and put back after, so that what the script draws from it does not depend on the layout
        either."""
        if not training or torch.compiler.is_compiling():
            yield
            return
        words = (self._seed, step, self.index, self._forwards)
        self._forwards += 1
        state = torch.get_rng_state()
        torch.default_generator.manual_seed(
            int.from_bytes(hashlib.blake2b(repr(words).encode(), digest_size=8).digest(), "little") >> 1
        )
        try:
            yield
        finally:
            torch.set_rng_state(state)

    def backward(self, divided: bool, synchronising: bool) -> None:
        """Before a backward. divided: the mean over accumulation steps is ours to take."""
        if synchronising and self.passed:
            raise UnsupportedError(
                f"a second backward of the same micro-batch with {KEY}: its gradient would be another leaf of the tree,"
                " in another place in every layout. Add the losses and call backward once, or put all but the last"
                " backward of a micro-batch into engine.no_sync(); and call engine.step() after every micro-batch"
            )
        if self._divided not in (None, divided):
            raise ArgumentError("scale_wrt_gas must be the same for all micro-batches of a step")
        self._divided = divided
        self.passed = self.passed or synchronising

    @property
    def divisor(self) -> int:
        """What the sum over micro-batches is divided by, beside the scales."""
        return self.world * (self.passes if self._divided in (None, True) else 1)

    def end_micro_batch(self, last: bool) -> None:
        """After engine.step(). last: it updated the parameters."""
        self.passed, self._forwards = False, 0
        self._micro += 1
        if last:
            self.begin_anew()

    def begin_anew(self) -> None:
        """The next micro-batch is the first of its step."""
        self._micro = self._forwards = 0
        self.discard()

    def discard(self) -> None:
        """The gradients since the last step are dropped."""
        self.passed, self._divided, self.owed = False, None, 0

    @staticmethod
    def check_optimizer(kind: str, core: bool) -> None:
        """Which optimizers treat an element alike wherever a shard ends."""
        if core:
            return
        if kind not in ELEMENTWISE:
            raise UnsupportedError(
                f"optimizer {kind} with {KEY}: only deepc's optimizers, torch's Adam and AdamW, and torch's"
                f" {', '.join(sorted(ELEMENTWISE))} are known to treat each element alone"
            )
        if torch.get_num_threads() > 1:
            raise UnsupportedError(
                f"optimizer {kind} with {KEY} on {torch.get_num_threads()} threads: torch cuts a tensor's elements"
                " among its threads, and its scalar and vector loops may round differently. Use one thread"
                " (OMP_NUM_THREADS=1), or Adam, AdamW, Lion, Adagrad or SGD of deepc.optim, which run in its core"
            )

    def describe(self) -> str:
        return (
            f"deterministic layout: {self.world * self.passes} micro-batches a step, micro-batch m of rank r is number"
            f" m * {self.world} + r; {torch.get_num_threads()} torch thread{'s' * (torch.get_num_threads() > 1)}"
            " (OMP_NUM_THREADS, else 1), which must be the same in every layout"
        )


class MicroBatchSampler(torch.utils.data.Sampler[list[int]]):
    """Batches of indices for a DataLoader's `batch_sampler`, dealt so that every layout sees the same micro-batches:
    micro-batch k of an epoch goes to rank k % world.

    micro_batch: samples of one. per_step: micro-batches of a step over all ranks; an epoch is padded from its beginning
    to whole steps, or cut to them with drop_last. The order is drawn from (seed, epoch); call set_epoch as with
    DistributedSampler, or each iteration is the next epoch.
    """

    @numeric
    def __init__(
        self,
        data: Sized,
        micro_batch: int,
        world: int,
        rank: int,
        *,
        per_step: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        per_step = world if per_step is None else per_step
        if micro_batch < 1 or not 0 <= rank < world or per_step % world or per_step < 1:
            raise ArgumentError(
                f"micro_batch {micro_batch} must be >= 1, rank {rank} in [0, {world}), per_step {per_step} a multiple"
                f" of {world} ranks"
            )
        if len(data) == 0:
            raise ArgumentError("the data has no samples")
        self._samples, self._size, self._world, self._rank = len(data), micro_batch, world, rank
        self._shuffle, self._seed = shuffle, seed
        self.epoch = 0  # of the next iteration
        self.start = 0  # samples of this rank that the next iteration leaves out, whole micro-batches
        whole = micro_batch * per_step
        self._steps = len(data) // whole if drop_last else -(-len(data) // whole)
        if self._steps == 0:
            raise DeepcError(f"{len(data)} samples are less than one step of {whole}, and drop_last drops them")
        self._per_rank = self._steps * per_step // world

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0

    def __len__(self) -> int:
        return self._per_rank

    def _order(self) -> list[int]:
        """The samples in the order of this epoch, each once."""
        if not self._shuffle:
            return list(range(self._samples))
        generator = torch.Generator()
        generator.manual_seed(self._seed + self.epoch)
        order: list[int] = torch.randperm(self._samples, generator=generator, device="cpu").tolist()
        return order

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        self.epoch += 1
        first, self.start = self.start // self._size, 0
        for m in range(first, self._per_rank):
            at = (m * self._world + self._rank) * self._size
            yield [order[i % self._samples] for i in range(at, at + self._size)]


class BucketSampler(MicroBatchSampler):
    """MicroBatchSampler whose steps have samples of similar lengths, so that padding to the longest adds little.

    lengths: of each sample, in tokens. pool: steps whose samples are sorted together; more of them pad less and mix
    less. An epoch is drawn as MicroBatchSampler draws it, each pool of it sorted by length and cut into steps, and the
    order of the pool's steps drawn. All of that comes from (seed, epoch) alone: a step has the same samples in any
    number of ranks whose per_step is the same, and its micro-batches are of similar lengths on all of them. What is
    left of an epoch after whole steps is its last step, a random part of the data.

    To go on after `n` steps of an epoch: set_epoch(epoch), then start = n * per_step // world * micro_batch.
    """

    @numeric
    def __init__(
        self,
        lengths: Sequence[int],
        micro_batch: int,
        world: int,
        rank: int,
        *,
        per_step: int | None = None,
        pool: int = 50,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(
            lengths, micro_batch, world, rank, per_step=per_step, shuffle=shuffle, seed=seed, drop_last=drop_last
        )
        if pool < 1:
            raise ArgumentError(f"pool {pool} must be >= 1 step")
        self._lengths, self._pool = lengths, pool
        self._step = micro_batch * (world if per_step is None else per_step)

    def _order(self) -> list[int]:
        order, step = super()._order(), self._step
        whole = len(order) // step * step
        draw = torch.Generator()
        draw.manual_seed(self._seed + self.epoch)
        out: list[int] = []
        for first in range(0, whole, self._pool * step):
            pool = sorted(order[first : min(first + self._pool * step, whole)], key=self._lengths.__getitem__)
            steps = len(pool) // step
            for k in torch.randperm(steps, generator=draw, device="cpu").tolist() if self._shuffle else range(steps):
                out += pool[k * step : (k + 1) * step]
        return out + sorted(order[whole:], key=self._lengths.__getitem__)
