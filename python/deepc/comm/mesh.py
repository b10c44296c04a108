"""plan.Mesh <-> torch's DeviceMesh."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from ..errors import ArgumentError
from ..plan.mesh import AXES, Mesh


def to_device_mesh(mesh: Mesh, device_type: str = "cpu") -> DeviceMesh:
    """The DeviceMesh of the axes that are longer than 1 (of "dp" if none is), in the order of AXES. Collective over all
    ranks: it makes the groups. `ep` has no dimension of its own."""
    import torch

    kept = tuple(a for a in AXES if getattr(mesh, a) > 1) or ("dp",)
    ranks = torch.tensor(mesh.array(), device="cpu").view([getattr(mesh, a) for a in kept])
    return DeviceMesh(device_type, ranks, mesh_dim_names=kept)


def from_device_mesh(device_mesh: DeviceMesh, ranks_per_node: int = 0, ep: int = 1) -> Mesh:
    """The Mesh of a DeviceMesh whose dimensions are named by AXES. ArgumentError if one has another name, or if the
    ranks are not laid out as Mesh has them (the last of AXES fastest, from rank 0 on)."""
    names = device_mesh.mesh_dim_names or ()
    if not names or any(n not in AXES for n in names):
        raise ArgumentError(f"the DeviceMesh's dimensions are named {names or None}; deepc knows {', '.join(AXES)}")
    sizes = dict(zip(names, device_mesh.mesh.shape))
    mesh = Mesh.of({**sizes, "ep": ep}, ranks_per_node)
    ranks = device_mesh.mesh.flatten().tolist()
    if list(names) != [a for a in AXES if a in names] or ranks != list(range(mesh.size)):
        raise ArgumentError(
            f"the DeviceMesh {dict(zip(names, device_mesh.mesh.shape))} has ranks {ranks[:8]}...; deepc lays dimensions"
            f" out in the order {', '.join(AXES)}, the last fastest, over ranks 0, 1, 2, ..."
        )
    return mesh
