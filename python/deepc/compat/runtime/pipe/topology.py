"""deepspeed.runtime.pipe.topology: ranks as points of a grid with named axes, and the process groups along them.

Ranks are numbered row by row, the last axis fastest; what plan/mesh.py does for deepc's own axes. A pipeline with data
and tensor parallelism has the axes pipe, data and model, so it numbers its ranks as Mesh does."""

from __future__ import annotations

import itertools
from collections import namedtuple
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist

from ....errors import ArgumentError
from ...helpers.comm import get_rank, get_world_size


class ProcessTopology:
    """Ranks 0, 1, ... at the coordinates of a grid: `dims` of the axes of these names, from the slowest to the fastest.
    ProcessCoord is the named tuple of coordinates, mapping the rank of each."""

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if len(axes) != len(dims) or any(d < 1 for d in dims):
            raise ArgumentError(f"topology: axes {axes} of sizes {dims}; each axis has one size, of at least 1")
        self.axes, self.dims = axes, dims
        coordinate: Any = namedtuple("ProcessCoord", axes)  # type: ignore[misc]
        self.ProcessCoord = coordinate
        coordinates = itertools.product(*map(range, dims))
        self.mapping: dict[Any, int] = {coordinate(*at): rank for rank, at in enumerate(coordinates)}

    def world_size(self) -> int:
        """Ranks."""
        return len(self.mapping)

    def get_axis_names(self) -> Sequence[str]:
        return self.axes

    def get_dim(self, axis: str) -> int:
        """Size of an axis; 0 if there is none of that name."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """The coordinates of a rank: get_coord(3).pipe. ArgumentError, a ValueError, for a rank that there is not."""
        for at, found in self.mapping.items():
            if found == rank:
                return at
        raise ArgumentError(f"topology: rank {rank} is not from 0 to {self.world_size() - 1}")

    def get_rank(self, **coordinates: int) -> int:
        """The rank at these coordinates, one for each axis: get_rank(pipe=0, data=1)."""
        if set(coordinates) != set(self.axes):
            raise ArgumentError(
                f"topology: get_rank({', '.join(coordinates)}) needs a coordinate for each of the axes"
                f" {', '.join(self.axes)}; filter_match takes some of them"
            )
        at = self.ProcessCoord(**coordinates)
        if at not in self.mapping:
            raise ArgumentError(f"topology: {at} is outside of the sizes {self.dims}")
        return self.mapping[at]

    def filter_match(self, **coordinates: int) -> list[int]:
        """The ranks that have these coordinates: filter_match(pipe=0)."""
        return [r for at, r in self.mapping.items() if all(getattr(at, a) == i for a, i in coordinates.items())]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """The ranks whose coordinate along `axis` is `idx`. ArgumentError, a ValueError, for another name."""
        if axis not in self.axes:
            raise ArgumentError(f"topology: {axis!r} is no axis; the axes are {', '.join(self.axes)}")
        return self.filter_match(**{axis: idx})

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """All groups along an axis: ranks that differ in it alone. None if there is no such axis."""
        if axis not in self.axes:
            return []
        others = [a for a in self.axes if a != axis]
        places = itertools.product(*(range(self.get_dim(a)) for a in others))
        return [self.filter_match(**dict(zip(others, at))) for at in places]

    def get_rank_repr(
        self, rank: int, omit_axes: Iterable[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """ "model_01": the coordinates of a rank along all but some axes, for the name of a file."""
        omitted, at = set(omit_axes), self.get_coord(rank)
        return outer_sep.join(f"{a}{inner_sep}{getattr(at, a):02d}" for a in self.axes if a not in omitted)

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Stages of a pipeline, and copies of each next to each other, whose gradients are reduced."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """The same with tensor parallelism, whose ranks are the nearest."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])


def _prime_factors(N: int) -> list[int]:
    """From the smallest. ArgumentError, a ValueError, below 1."""
    if N < 1:
        raise ArgumentError(f"prime factors of {N}: the number must be at least 1")
    found, candidate = [], 2
    while N > 1:
        while N % candidate:
            candidate += 1
        found.append(candidate)
        N //= candidate
    return found


def _square(world: int) -> PipeDataParallelTopology:
    """As many stages as copies of each, or nearly."""
    primes = _prime_factors(world)
    sizes = [1, 1]
    for i, prime in enumerate(primes):
        sizes[i % 2] *= prime
    return PipeDataParallelTopology(num_pp=sizes[0], num_dp=sizes[1])


class PipelineParallelGrid:
    """This rank's place in a topology with an axis "pipe", perhaps "data" and "model" (tensors), and its process groups
    along each: the `mpu` that scripts of Megatron's kind ask. Collective: all ranks of the default group make it
    together. Without a topology, stages and copies of each are as even as the number of ranks allows."""

    def __init__(self, topology: ProcessTopology | None = None, process_group: Any = None) -> None:
        self.global_rank, self.world_size = get_rank(), get_world_size()
        self._topo = topo = _square(self.world_size) if topology is None else topology
        if not self._is_grid_valid():
            raise ArgumentError(
                f"grid: a topology of {topo.world_size()} ranks ({dict(zip(topo.axes, topo.dims))}) for"
                f" {self.world_size}; start as many, or change a size"
            )
        self.pipe_parallel_size = max(topo.get_dim("pipe"), 1)
        self.data_parallel_size = max(topo.get_dim("data"), 1)
        self.model_parallel_size = self.slice_parallel_size = max(topo.get_dim("model"), 1)
        self.stage_id, self.data_parallel_id = self.get_stage_id(), self.get_data_parallel_id()
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1

        # one copy of the model: all stages, and all parts of their tensors
        copies = [topo.filter_match(data=i) for i in range(topo.get_dim("data"))] or [list(topo.mapping.values())]
        ranks, self.ds_model_proc_group = self._mine(copies)
        self.ds_model_world_size, self.ds_model_rank = len(ranks), ranks.index(self.global_rank)
        self.dp_groups = self._along("data")
        self.dp_group, self.dp_proc_group = self._mine(self.dp_groups)
        self.pipe_groups = self._along("pipe")
        self.pp_group, self.pp_proc_group = self._mine(self.pipe_groups)
        self.model_groups = self._along("model")
        self.slice_group, self.slice_proc_group = self._mine(self.model_groups)
        self.p2p_groups = self._build_p2p_groups()

    def _along(self, axis: str) -> list[list[int]]:
        """The groups along an axis; each rank alone if there is no such axis."""
        return self._topo.get_axis_comm_lists(axis) or [[r] for r in range(self.world_size)]

    def _mine(self, groups: list[list[int]]) -> tuple[list[int], Any]:
        """Makes process groups of lists that share no rank: this rank's list, and its group."""
        group, _ = dist.new_subgroups_by_enumeration(groups)
        return next(ranks for ranks in groups if self.global_rank in ranks), group

    def _build_p2p_groups(self) -> list[list[int]]:
        """For each rank: itself, and the one that holds the next stage (of the last stage: the first)."""
        after = {rank: row[(i + 1) % len(row)] for row in self._along("pipe") for i, rank in enumerate(row)}
        return [[rank, after[rank]] for rank in range(self.world_size)]

    def _is_grid_valid(self) -> bool:
        return self._topo.world_size() == get_world_size()

    def _coordinate(self, axis: str) -> int:
        return getattr(self._topo.get_coord(self.global_rank), axis, 0)

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """The rank that holds a stage at this rank's other coordinates, or at those that are given."""
        return self._topo.get_rank(**{**self._topo.get_coord(self.global_rank)._asdict(), "pipe": stage_id, **kwargs})

    def topology(self) -> ProcessTopology:
        return self._topo

    def get_global_rank(self) -> int:
        return self.global_rank

    # ---- stages ----
    def get_stage_id(self) -> int:
        return self._coordinate("pipe")

    def get_pipe_parallel_world_size(self) -> int:
        """Stages."""
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> Any:
        """All stages of this rank's pipeline."""
        return self.pp_proc_group

    get_pipe_parallel_rank = get_pipeline_model_parallel_rank = get_stage_id
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size

    # ---- copies of a stage ----
    def get_data_parallel_id(self) -> int:
        return self._coordinate("data")

    get_data_parallel_rank = get_data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        return self.data_parallel_size

    def get_data_parallel_group(self) -> Any:
        return self.dp_proc_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self.dp_group

    # ---- one copy of the model: all stages and their parts ----
    def get_model_parallel_rank(self) -> int:
        return self.ds_model_rank

    def get_model_parallel_world_size(self) -> int:
        return self.ds_model_world_size

    def get_model_parallel_group(self) -> Any:
        return self.ds_model_proc_group

    # ---- parts of a stage's tensors ----
    def get_slice_parallel_rank(self) -> int:
        return self._coordinate("model")

    def get_slice_parallel_world_size(self) -> int:
        return self.slice_parallel_size

    def get_slice_parallel_group(self) -> Any:
        return self.slice_proc_group

    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size
