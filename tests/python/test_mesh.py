"""plan/mesh.py: coordinates against counting, groups against their definition, what is refused, and torch's meshes."""

from __future__ import annotations

import itertools

import pytest
import torch
from deepc.comm.mesh import from_device_mesh, to_device_mesh
from deepc.errors import ArgumentError, UnsupportedError
from deepc.plan.mesh import AXES, Coordinates, Mesh
from ranks import run_ranks

MESHES = [
    Mesh(),
    Mesh(dp=6, ep=3, ranks_per_node=2),
    Mesh(pp=2, dp=4, sp=3, tp=2, ep=2, ranks_per_node=8),
    Mesh(dp=2, sp=4, tp=2, ep=8),
    Mesh(dp=2, tp=4),
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_coordinates_count_the_last_axis_fastest(mesh):
    places = itertools.product(*(range(getattr(mesh, a)) for a in AXES))
    counted = [Coordinates(*at, (at[1] * mesh.sp + at[2]) % mesh.ep) for at in places]
    assert [mesh.coordinates(r) for r in range(mesh.size)] == counted
    for rank, (pp, dp, sp, tp, _) in enumerate(counted):
        assert mesh.rank(pp=pp, dp=dp, sp=sp, tp=tp) == rank and mesh.array()[pp][dp][sp][tp] == rank
        assert mesh.node_of(rank) == rank // mesh.ranks_per_node < mesh.nodes


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_groups_are_what_differs_in_one_axis(mesh):
    for axis in AXES:
        for rank in range(mesh.size):
            mine = mesh.coordinates(rank)._replace(**{axis: 0}, ep=0)
            same = [r for r in range(mesh.size) if mesh.coordinates(r)._replace(**{axis: 0}, ep=0) == mine]
            assert mesh.group(axis, rank) == tuple(same)
        assert sorted(r for g in mesh.groups(axis) for r in g) == list(range(mesh.size))
    for group in mesh.groups("ep"):
        assert [mesh.coordinates(r).ep for r in group] == list(range(mesh.ep))
        assert len({mesh.replicas(r) for r in group}) == 1  # the same stage and tensor shards
        assert len({mesh.replicas(r).index(r) // mesh.ep for r in group}) == 1  # neighbours
    assert sorted(r for g in mesh.groups("ep") for r in g) == list(range(mesh.size))


def test_a_mesh_is_a_value():
    assert Mesh(dp=4) == Mesh(dp=4, ranks_per_node=4) != Mesh(dp=4, ranks_per_node=2)
    assert len({Mesh(dp=4), Mesh(dp=4), Mesh(tp=4)}) == 2 and Mesh.of({"tp": 2, "dp": 3}) == Mesh(dp=3, tp=2)
    assert str(Mesh(dp=4, tp=2, ranks_per_node=2)) == "dp 4 x tp 2, 2 ranks a node"


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"dp": 0}, "dp = 0"),
        ({"tp": 1.0}, "tp = 1.0"),
        ({"dp": True}, "dp = True"),
        ({"dp": 4, "ep": 3}, "ep = 3 does not divide dp = 4"),
        ({"dp": 4, "sp": 2, "ep": 3}, "ep = 3 does not divide dp x sp = 4 x 2"),
        ({"dp": 4, "ranks_per_node": 5}, "from 1 to the 4"),
        ({"dp": 4, "ranks_per_node": 3}, "3 ranks on each node don't make 4"),
    ],
)
def test_what_is_no_mesh_is_refused(sizes, said):
    with pytest.raises(ArgumentError, match=said):
        Mesh(**sizes)


def test_names_and_ranks_that_are_not_there():
    with pytest.raises(ArgumentError, match="'cp' is no axis"):
        Mesh.of({"cp": 2})
    with pytest.raises(ArgumentError, match="'cp' is no axis"):
        Mesh(dp=2).group("cp", 0)
    with pytest.raises(ArgumentError, match="rank 2"):
        Mesh(dp=2).coordinates(2)
    with pytest.raises(ArgumentError, match="tp coordinate 1"):
        Mesh(dp=2).rank(tp=1)
    assert Mesh(dp=2).require_data_parallel() == Mesh(dp=2)
    for axis in ("pp", "sp", "tp"):
        with pytest.raises(UnsupportedError, match=f"{axis} = 2 asks for"):
            Mesh(**{axis: 2}).require_data_parallel()


def _device_meshes(rank, world):
    for mesh in (Mesh(dp=4), Mesh(dp=2, tp=2), Mesh(pp=2, sp=2, ranks_per_node=2)):
        made = to_device_mesh(mesh)
        assert made.mesh_dim_names == (tuple(a for a in AXES if getattr(mesh, a) > 1))
        for axis in made.mesh_dim_names:
            along = made[axis].mesh.flatten().tolist() if made.ndim > 1 else made.mesh.tolist()
            assert tuple(along) == mesh.group(axis, rank)
        assert from_device_mesh(made, mesh.ranks_per_node) == mesh
    from torch.distributed.device_mesh import DeviceMesh

    for ranks, names, said in (
        ([[0, 2], [1, 3]], ("dp", "tp"), "the last fastest"),
        ([[0, 1], [2, 3]], ("tp", "dp"), "in the order"),
        ([[0, 1], [2, 3]], ("dp", "x"), "are named"),
    ):
        with pytest.raises(ArgumentError, match=said):
            from_device_mesh(DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=names))


def test_torchs_meshes():
    run_ranks(_device_meshes, 4)


def _of_an_engine(rank, world):
    """(what the axes' groups of the DeviceMesh sum up, the ranks that they should have)."""
    import deepc
    from deepc.pipe import LayerSpec, PipelineModule

    specs = [LayerSpec(torch.nn.Linear, 2, 2) for _ in range(2)]
    model = PipelineModule(specs, num_stages=2, loss_fn=torch.nn.functional.mse_loss)
    engine, *_ = deepc.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1})
    made = to_device_mesh(engine.mesh)
    assert from_device_mesh(made, engine.mesh.ranks_per_node, engine.mesh.ep) == engine.mesh
    found = {}
    for axis in made.mesh_dim_names:
        total = torch.tensor(2.0**rank)
        torch.distributed.all_reduce(total, group=made[axis].get_group())
        found[axis] = float(total), sum(2.0**r for r in engine.mesh.group(axis, rank))
    return found


def test_an_engines_mesh_as_torchs():
    for found in run_ranks(_of_an_engine, 4):
        assert list(found) == ["pp", "dp"] and all(got == want for got, want in found.values())


def _experts(rank, world):
    mesh = Mesh(dp=2, ep=2)
    made = to_device_mesh(mesh)
    assert made.mesh_dim_names == ("dp",) and from_device_mesh(made) == Mesh(dp=2)
    with pytest.raises(ArgumentError, match="ep = 3 does not divide dp = 2"):
        from_device_mesh(made, ep=3)
    return from_device_mesh(made, ep=mesh.ep) == mesh


def test_experts_are_no_dimension_of_torchs():
    assert run_ranks(_experts, 2) == [True, True]
