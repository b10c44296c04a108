"""Sequence parallelism: each rank has a part of the positions of every sample, and in attention a part of the heads
with all positions (DeepSpeed-Ulysses, arXiv:2309.14509)."""

from .attention import DistributedAttention
from .exchange import sequence_group
from .loss import cross_entropy, mean_over_ranks
from .models import share
from .shards import Shards, shard

__all__ = ["DistributedAttention", "Shards", "cross_entropy", "mean_over_ranks", "sequence_group", "shard", "share"]
