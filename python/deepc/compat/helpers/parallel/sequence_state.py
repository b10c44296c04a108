"""deepspeed.runtime.sequence_parallel.parallel_state_sp: the ranks that share sequences, in Megatron-LM's form, without
an engine. `initialize(mpu=)` takes the module. Ranks that are next to each other share a sequence, as in deepc's
mesh."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ....errors import ArgumentError, MisuseError
from ....parallel.sequence import sequence_group

_size = 0  # ranks of a sequence
_of: Any = None  # the default group in which that is so


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """All ranks in groups of so many. Collective. ArgumentError for a size of 1 or one that does not divide the ranks,
    MisuseError without a process group and for another size than before."""
    global _size, _of
    if not dist.is_initialized():
        raise MisuseError(
            "initialize_sequence_parallel needs a process group; call deepspeed.init_distributed() before it"
        )
    if sequence_parallel_size <= 1:
        raise ArgumentError(
            f"initialize_sequence_parallel({sequence_parallel_size}): a sequence is shared by 2 ranks or more; without"
            " sequence parallelism leave the call out"
        )
    if is_initialized() and _size != sequence_parallel_size:
        raise MisuseError(
            f"initialize_sequence_parallel({sequence_parallel_size}): the ranks share sequences in groups of {_size}"
            " already; one process has one size"
        )
    sequence_group(sequence_parallel_size)
    _size, _of = sequence_parallel_size, dist.group.WORLD


def is_initialized() -> bool:
    return _size > 0 and dist.is_initialized() and _of is dist.group.WORLD


def _known() -> int:
    if not is_initialized():
        raise MisuseError("the ranks of a sequence are not known yet; call initialize_sequence_parallel(size) before")
    return _size


def get_sequence_parallel_group() -> Any:
    return sequence_group(_known())


def get_sequence_parallel_world_size() -> int:
    return _known()


def get_sequence_parallel_rank() -> int:
    return dist.get_rank() % _known()


def get_sequence_data_parallel_group() -> Any:
    """All ranks: gradients are averaged over them."""
    _known()
    return dist.group.WORLD


def get_sequence_data_parallel_world_size() -> int:
    _known()
    return dist.get_world_size()


def get_sequence_data_parallel_rank() -> int:
    _known()
    return dist.get_rank()


# DeepSpeed's module has these names for the same ranks.
get_model_parallel_group = get_sequence_parallel_group
get_model_parallel_world_size = get_sequence_parallel_world_size
get_model_parallel_rank = get_sequence_parallel_rank
