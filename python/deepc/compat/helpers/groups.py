"""deepspeed.utils.groups: all ranks are data-parallel. Tensor, sequence and expert parallelism are of size 1, their
groups this rank alone."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ...errors import UnsupportedError
from .comm import get_rank, get_world_size

_alone: Any = None
_alone_of: Any = None


def _only_me() -> Any:
    """A group of this rank alone. Made by all ranks at the first call: collective."""
    global _alone, _alone_of
    if not dist.is_initialized():
        return None
    if _alone is None or _alone_of is not dist.group.WORLD:
        if dist.get_world_size() == 1:
            _alone = dist.group.WORLD
        else:
            _alone = [dist.new_group([r]) for r in range(dist.get_world_size())][dist.get_rank()]
        _alone_of = dist.group.WORLD
    return _alone


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """For expert parallelism of size 1: nothing to do."""
    if ep_size != 1:
        raise UnsupportedError(
            f"groups.initialize(ep_size={ep_size}): expert parallelism is not built yet; any mixture of experts that is"
            " plain PyTorch trains under every ZeRO stage"
        )


def _get_data_parallel_group() -> Any:
    return dist.group.WORLD if dist.is_initialized() else None


def _get_data_parallel_world_size() -> int:
    return get_world_size()


def _get_data_parallel_rank() -> int:
    return get_rank()


def _get_data_parallel_group_ranks() -> list[int]:
    return list(range(get_world_size()))


def _one() -> int:
    return 1


def _zero() -> int:
    return 0


def _get_broadcast_src_rank() -> int:
    return 0


get_data_parallel_group = _get_sequence_data_parallel_group = _get_data_parallel_group
get_data_parallel_world_size = _get_sequence_data_parallel_world_size = _get_data_parallel_world_size
get_data_parallel_rank = _get_sequence_data_parallel_rank = _get_data_parallel_rank
get_model_parallel_group = get_tensor_model_parallel_group = _get_sequence_parallel_group = _only_me
get_model_parallel_world_size = get_tensor_model_parallel_world_size = _get_model_parallel_world_size = (
    _get_sequence_parallel_world_size
) = _one
_get_expert_model_parallel_world_size = _one
get_model_parallel_rank = get_tensor_model_parallel_rank = _get_sequence_parallel_rank = _zero


def get_tensor_model_parallel_src_rank() -> int:
    return get_rank()


def _zero_param_parallel_is_initialized() -> bool:
    return False


def _get_zero_param_intra_parallel_group() -> None:
    return None


def _get_expert_parallel_group_dict() -> dict[str, Any]:
    return {}


_get_expert_data_parallel_group_dict = _get_expert_parallel_group_dict


def _get_max_expert_size() -> int:
    return 1
