"""Parameters that are cut over ranks, as torch's DTensors."""

from __future__ import annotations

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
    a group: it makes the DeviceMesh. ArgumentError for a model that is not cut."""
    group = group_of(model)
    mesh = _mesh_of(group)
    cuts = cuts_of(model)
    of_name = {n: cuts.get(id(p)) for n, p in model.named_parameters(remove_duplicate=False)}
    return {
        name: DTensor.from_local(
            t,
            mesh,
            [_placement(of_name.get(name), name)],
            run_check=False,
            shape=t.shape if (cut := of_name.get(name)) is None else torch.Size(cut.shape),
            stride=_strides(t.shape if cut is None else cut.shape),
        )
        for name, t in model.state_dict().items()
    }


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
