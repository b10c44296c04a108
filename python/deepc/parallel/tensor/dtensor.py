"""Parameters that are cut over ranks, as torch's DTensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ...core.foreign import private
from ...errors import UnsupportedError
from .cut import Cut, cuts_of
from .group import TensorGroup, group_of


def dtensors(model: torch.nn.Module) -> dict[str, DTensor]:
    """model.state_dict() with every tensor a DTensor over the ranks that share the model (one dimension, "tp"): shards
    where it is cut, replicas elsewhere. No bytes move, and memory is the model's own. Collective at the first call of
    a group: it makes the DeviceMesh. ArgumentError for a model that is not cut. torch.distributed.checkpoint saves them
    (not async_save) and loads into them; initialize the engine after, or give it what came:
    engine.load_module_state_dict."""
    group = group_of(model)
    mesh = _mesh_of(group)
    cuts = cuts_of(model)
    of_name = {n: cuts.get(id(p)) for n, p in model.named_parameters(remove_duplicate=False)}
    return {name: _dtensor(name, t, of_name.get(name), mesh) for name, t in model.state_dict().items()}


def _dtensor(name: str, local: torch.Tensor, cut: Cut | None, mesh: DeviceMesh) -> DTensor:
    shape = local.shape if cut is None else torch.Size(cut.shape)
    placements = [_placement(cut, name)]
    made = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=_strides(shape))
    if cut is not None and len(cut.parts[cut.rank]) > 1:
        chunks = _Chunks(cut, local.detach())
        for asked, told in (
            ("__create_write_items__", chunks.write_items),
            ("__create_chunk_list__", chunks.chunks),
            ("__get_tensor_shard__", chunks.tensor),
        ):
            setattr(made, asked, told)
    return made


class _Chunks:
    """What torch.distributed.checkpoint asks of a tensor (torch.distributed._checkpointable), of one that consists of
    several stretches of the whole. A DTensor answers with one chunk, whatever its placement."""

    def __init__(self, cut: Cut, local: torch.Tensor) -> None:
        self._whole, self._of_offset = torch.Size(cut.shape), {}
        at = 0
        for begin, end in cut.parts[cut.rank]:
            offset = torch.Size(begin if d == cut.dim else 0 for d in range(len(cut.shape)))
            self._of_offset[offset] = local.narrow(cut.dim, at, end - begin)
            at += end - begin

    def chunks(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(offset, t.size()) for offset, t in self._of_offset.items()]

    def write_items(self, name: str, _: object) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk, TensorProperties.create_from_tensor(self._of_offset[chunk.offsets]), self._whole
                ),
            )
            for chunk in self.chunks()
        ]

    def tensor(self, index: Any) -> torch.Tensor:
        return self._of_offset[index.offset]


def _mesh_of(group: TensorGroup) -> DeviceMesh:
    if group.device_mesh is None:
        assert group.process_group is not None
        group.device_mesh = DeviceMesh.from_group(group.process_group, "cpu", mesh_dim_names=("tp",))
    return group.device_mesh


def _placement(cut: Cut | None, name: str) -> Placement:
    if cut is None:
        return Replicate()
    blocks = {len(part) for part in cut.parts}
    all_of, here = cut.shape[cut.dim], [cut.width(r) for r in range(cut.ranks)]
    each = -(-all_of // cut.ranks)
    if blocks == {1} and here == [max(0, min(each, all_of - r * each)) for r in range(cut.ranks)]:
        return Shard(cut.dim)
    if len(set(here)) > 1:
        raise UnsupportedError(
            f"{name} is cut into parts of {', '.join(map(str, here))}: DTensor has no"
            " placement for parts other than torch.chunk's; deepc.view and module_state_dict() give the whole"
        )
    widths = [end - begin for begin, end in cut.parts[0]]
    if len(set(widths)) == 1:
        return private.StridedShard(cut.dim, split_factor=len(widths))
    raise UnsupportedError(
        f"{name} consists of parts of different sizes, each cut over the ranks: DTensor has no placement for that"
    )


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    out, n = [], 1
    for size in reversed(shape):
        out.append(n)
        n *= size
    return tuple(reversed(out))
