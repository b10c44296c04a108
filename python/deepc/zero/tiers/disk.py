"""Optimizer states of a rank on disk: its scratch file, and a step over it."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ...core.telemetry import waits
from ...errors import DiskError, DiskFullError
from ...offload import Cell, Disk, Stream, check
from ...offload.place import make_folder
from ...optim.states.formats import arrays_of
from .windows import OnDisk

if TYPE_CHECKING:
    from ...plan.plan import DiskStates, Plan


def preflight(plan: Plan) -> list[Disk]:
    """What the folders give that the plan names; raises a DiskError if what this node puts there does not fit, or
    nothing can be written. Before anything is allocated."""
    ranks, b = plan.ranks_per_node, plan.bytes
    if plan.device_type != "cpu":  # whose groups don't know which ranks share a host
        ranks = max(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    files = [(plan.parameters_on, b["params_disk"], 1), (plan.gradients_on, b["grads_disk"], ranks)]
    if plan.disk is not None:
        files.append((plan.disk.folder, plan.disk.disk_bytes, ranks))
    need = collections.Counter[str]()
    largest: dict[str, int] = {}
    for folder, nbytes, count in files:
        if folder:
            folder = make_folder(folder)
            need[folder] += nbytes * count
            largest[folder] = max(nbytes, largest.get(folder, 0))
    out = []
    for folder, nbytes in need.items():
        out.append(found := check(folder, need_bytes=largest[folder]))
        if nbytes > found.free_bytes:
            raise DiskFullError(
                f"{folder} ({found.file_system}) has {found.free_bytes / 1e9:.3f} GB free, and the node's ranks"
                f" ({ranks}) need {nbytes / 1e9:.3f} GB there: free {(nbytes - found.free_bytes) / 1e9:.3f} GB, or"
                " choose another folder (nvme_path of zero_optimization.offload_optimizer and offload_param)"
            )
    return out


def open_tier(plan: Plan, states: Sequence[str]) -> DiskTier:
    """For masters, where the plan has any, and `states`, on the plan's disk."""
    assert plan.disk is not None  # the caller has looked
    return DiskTier(plan.disk, [*["master"] * plan.has_master, *states], plan.owned_elems)


class DiskTier:
    """The states `names` of a rank, [elems] each, masters in fp32 and moments in the plan's format, in a scratch file
    without a name. They begin as zeros.

    at: the first cell of the update under way that is not done; 0 outside of one that has failed."""

    def __init__(self, place: DiskStates, names: Sequence[str], elems: int) -> None:
        self.at = 0
        kinds: dict[str, tuple[torch.dtype, int]] = {}
        for name in names:
            kinds.update(arrays_of(name, "" if name == "master" else place.form))
        self.stream = Stream(
            os.path.expanduser(place.folder),
            {name: dtype for name, (dtype, _) in kinds.items()},
            elems,
            per={name: per for name, (_, per) in kinds.items()},
            cell_elems=place.cell_elems,
            slots=place.slots,
            block_bytes=place.block_bytes,
            depth=place.depth,
        )
        self.arrays = {name: OnDisk(self.stream, name) for name in names}

    def address(self, cell: Cell, name: str, element: int) -> int:
        """Where an element of the share lies in `cell`."""
        return cell.data[name] + self.stream.arrays[name].itemsize * ((element - cell.begin) // self.stream.per[name])

    def update(self, work: Callable[[Cell], None], writes: Sequence[str] | None = None) -> None:
        """Calls `work` on every cell, in order; what it changes is written behind it (writes: the arrays, None: all).
        After a DiskError another call goes on where this one has failed."""
        walk = self.stream.walk(self.at, writes=None if writes is None else tuple(writes))
        try:
            with walk as cells:
                while True:
                    with waits.span("states on disk", kind="disk", cell=walk.at):
                        cell = next(cells, None)
                    if cell is None:
                        break
                    work(cell)
        except DiskError:
            self.at = walk.at
            raise
        self.at = 0

    def begin_anew(self) -> None:
        """All states are about to be written: an update that failed is forgotten, and what can't be read is zeros."""
        self.at = 0
        self.stream.mend()

    def close(self) -> None:
        self.stream.close()
