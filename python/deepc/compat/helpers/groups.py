"""deepspeed.utils.groups: the ranks that share a model's tensors, those that share sequences, and those that hold the
same shards of the model, as the last engine has them. Before it all ranks are data-parallel, but for the sequences of
parallel_state_sp. Expert parallelism is of size 1, its groups this rank alone."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ...errors import UnsupportedError
from ...parallel.axes import axis_process_group
from ...parallel.sequence import sequence_group
from ...parallel.tensor.group import tensor_group
from ...plan.mesh import Mesh
from .comm import get_rank, get_world_size
from .parallel import sequence_state

_mesh = Mesh()  # of the last engine
_experts_cut = False  # whether its experts are cut over tensor-parallel ranks
_replicas: dict[Any, Any] = {}  # ranks -> their group, in the default group of `_replicas_of`
_replicas_of: Any = None
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


def engine_has(mesh: Mesh, experts_cut: bool = False) -> None:
    """Of the engine that was made now."""
    global _mesh, _experts_cut
    _mesh, _experts_cut = mesh, experts_cut


def _known() -> bool:
    """Whether the last engine's ranks are those of this default group."""
    return dist.is_initialized() and _mesh.size == dist.get_world_size()


def _cut() -> bool:
    """Whether the last engine, in this default group, has tensor-parallel ranks."""
    return _mesh.tp > 1 and _known()


def _parted() -> bool:
    """Whether its ranks have different parts of the model: shards of tensors, or stages."""
    return _mesh.pp * _mesh.tp > 1 and _known()


def _shared() -> bool:
    """Whether its ranks share sequences."""
    return _mesh.sp > 1 and _known()


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """For expert parallelism of size 1: nothing to do."""
    if ep_size != 1:
        raise UnsupportedError(
            f"groups.initialize(ep_size={ep_size}): experts are spread by their layers; remove the call, and make them"
            " with deepspeed.moe.layer.MoE(ep_size=...)"
        )


def _get_sequence_data_parallel_group() -> Any:
    """Those with the same shards. Made by all ranks at the first call: collective."""
    global _replicas_of
    if not _parted():
        return dist.group.WORLD if dist.is_initialized() else None
    if _replicas_of is not dist.group.WORLD:
        _replicas.clear()
        _replicas_of = dist.group.WORLD
    mine = _mesh.replicas(get_rank())
    if mine not in _replicas:
        for ranks in sorted({_mesh.replicas(r) for r in range(_mesh.size)}):
            _replicas[ranks] = dist.new_group(list(ranks))
    return _replicas[mine]


def _get_sequence_data_parallel_world_size() -> int:
    return len(_get_sequence_data_parallel_ranks())


def _get_sequence_data_parallel_rank() -> int:
    return _get_sequence_data_parallel_ranks().index(get_rank())


def _get_sequence_data_parallel_ranks() -> list[int]:
    return list(_mesh.replicas(get_rank()) if _parted() else range(get_world_size()))


def _get_data_parallel_group() -> Any:
    """Those of them with other samples: without the ranks of a sequence. Collective at the first call."""
    return axis_process_group(_mesh, "dp") if _shared() else _get_sequence_data_parallel_group()


def _get_data_parallel_world_size() -> int:
    return _mesh.dp if _shared() else _get_sequence_data_parallel_world_size()


def _get_data_parallel_rank() -> int:
    return _get_data_parallel_group_ranks().index(get_rank())


def _get_data_parallel_group_ranks() -> list[int]:
    if _shared():
        return list(_mesh.group("dp", get_rank()))
    return _get_sequence_data_parallel_ranks()


def _get_sequence_parallel_group() -> Any:
    """Collective at the first call."""
    if _shared():
        return sequence_group(_mesh.sp, _mesh.tp)
    return sequence_state.get_sequence_parallel_group() if sequence_state.is_initialized() else _only_me()


def _get_sequence_parallel_world_size() -> int:
    if _shared():
        return _mesh.sp
    return sequence_state.get_sequence_parallel_world_size() if sequence_state.is_initialized() else 1


def _get_sequence_parallel_rank() -> int:
    if _shared():
        return _mesh.coordinates(get_rank()).sp
    return sequence_state.get_sequence_parallel_rank() if sequence_state.is_initialized() else 0


def get_tensor_model_parallel_group() -> Any:
    return tensor_group(_mesh).process_group if _cut() else _only_me()


def get_tensor_model_parallel_world_size() -> int:
    return _mesh.tp if _cut() else 1


def get_tensor_model_parallel_rank() -> int:
    return _mesh.coordinates(get_rank()).tp if _cut() else 0


def _get_expert_model_parallel_world_size() -> int:
    return _mesh.tp if _experts_cut and _cut() else 1


def _get_broadcast_src_rank() -> int:
    return _get_sequence_data_parallel_ranks()[0]


get_data_parallel_group = _get_data_parallel_group
get_data_parallel_world_size = _get_data_parallel_world_size
get_data_parallel_rank = _get_data_parallel_rank
get_model_parallel_group = get_tensor_model_parallel_group
get_model_parallel_world_size = _get_model_parallel_world_size = get_tensor_model_parallel_world_size
get_model_parallel_rank = get_tensor_model_parallel_rank


def get_tensor_model_parallel_src_rank() -> int:
    return _mesh.group("tp", get_rank())[0] if _cut() else get_rank()


def _zero_param_parallel_is_initialized() -> bool:
    return False


def _get_zero_param_intra_parallel_group() -> None:
    return None


def _get_expert_parallel_group_dict() -> dict[str, Any]:
    return {}


_get_expert_data_parallel_group_dict = _get_expert_parallel_group_dict


def _get_max_expert_size() -> int:
    return 1
