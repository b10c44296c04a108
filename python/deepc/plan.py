"""The plan: which parameter lies where, in which form, and how many bytes that takes. Frozen, printable data, made before
anything is allocated; the runtime follows it and decides nothing twice."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Sequence

import torch

from . import _lib, memory
from .errors import OutOfMemoryError
from .partition import Layout, Segment, Slice

MAX_BUCKET_ELEMS = 1 << 20  # larger buckets win nothing in shared memory and cost staging; reduce_bucket_size lowers it
SLOTS = 2  # staging slots per rank


@dataclass(frozen=True)
class ParamInfo:
    """One parameter of the model. `index` is its place in the flat order, None for one that is not trained."""

    name: str
    shape: tuple[int, ...]
    numel: int
    group: int | None
    index: int | None


@dataclass(frozen=True)
class Plan:
    """Everything that the engine does not decide again. Sizes in bytes unless said."""

    stage: int
    world: int
    rank: int
    ranks_per_node: int
    device: str
    dtype: torch.dtype  # of the parameters that the model computes with
    transport: str  # "local" (one rank), "node" (shared memory) or "c10d" (torch.distributed: GPUs, several nodes)
    mode: str  # "private" (a replica per rank) or "resident" (one copy per node)
    params: tuple[ParamInfo, ...]
    frozen_elems: int
    layout: Layout
    segments: tuple[Segment, ...]  # this rank's, in shard order
    slices: tuple[Slice, ...]  # this rank's, in bucket order
    bytes: dict[str, int]

    @property
    def own_all(self) -> bool:
        """True if this rank keeps whole optimizer states (stage 0)."""
        return self.stage == 0

    @property
    def owned_elems(self) -> int:
        return self.layout.total if self.own_all else self.layout.shard_elems

    @property
    def has_master(self) -> bool:
        """True if separate fp32 master weights exist (16-bit parameters)."""
        return self.dtype != torch.float32

    def describe(self) -> str:
        """A table of where each byte lies."""
        b, mib = self.bytes, 2.0**20
        trained = sum(p.numel for p in self.params if p.index is not None)
        lines = [
            f"plan: ZeRO stage {self.stage}, {self.world} rank{'s' * (self.world > 1)} ({self.ranks_per_node} on this node), {self.device}, "
            f"{str(self.dtype).removeprefix('torch.')} parameters{' + fp32 masters' if self.has_master else ''}, transport {self.transport}",
            f"  {len(self.params)} parameters, {trained:,} elements trained, {self.frozen_elems:,} frozen; flat space {self.layout.total:,} in "
            f"{self.layout.nbuckets} buckets of {self.layout.bucket_elems:,}; a rank owns {self.owned_elems:,}",
            f"  {'MiB':<26}{'each rank':>12}{'shared, once a node':>22}",
        ]
        rows = [
            ("parameters", b["params_private"], b["params_shared"]),
            ("fp32 masters", b["master_private"], 0),
            ("gradients (fp32)", b["grads_private"], 0),
            ("optimizer states", b["states_private"], 0),
            ("gradient buckets", 0, b["staging_shared"]),
        ]
        for name, private, shared in rows:
            if private or shared:
                lines.append(f"  {name:<26}{private / mib:>12.1f}{shared / mib:>22.1f}")
        lines.append(f"  {'model states of this node':<26}{b['node_total'] / mib:>12.1f}  ({self.ranks_per_node} ranks; activations not included)")
        return "\n".join(lines)


def make_plan(
    named: Sequence[tuple[str, torch.nn.Parameter]],
    group_of: dict[int, int],
    *,
    stage: int,
    world: int,
    rank: int,
    ranks_per_node: int,
    device: torch.device,
    dtype: torch.dtype,
    transport: str,
    bucket_elems: int,
    moments: int,
) -> Plan:
    """Plans `named` parameters (id(parameter) -> optimizer group in `group_of`; absent: not trained) for this rank.

    The flat order is the reverse of registration, which is about the order in which backward makes gradients."""
    trained = [(n, p) for n, p in reversed(list(named)) if id(p) in group_of]
    index = {id(p): i for i, (_, p) in enumerate(trained)}
    infos = tuple(ParamInfo(n, tuple(p.shape), p.numel(), group_of.get(id(p)), index.get(id(p))) for n, p in named)
    layout = Layout([p.numel() for _, p in trained], world, max(1, min(bucket_elems, MAX_BUCKET_ELEMS)))
    frozen = sum((p.numel + 63) // 64 * 64 for p in infos if p.index is None)
    resident = stage == 3
    raw = _lib.BytesIn(
        total=layout.total, shard=layout.shard_elems, frozen=frozen, world=world, ranks_per_node=ranks_per_node,
        slots=SLOTS if transport == "node" else 0, bucket_elems=layout.bucket_elems, stage=stage, param_size=dtype.itemsize,
        grad_wire_size=dtype.itemsize, master=int(dtype != torch.float32), state_size=4, nstates=moments, resident=int(resident))
    out = _lib.Bytes()
    _lib.call("dc_zero_estimate", ctypes.byref(raw), ctypes.byref(out))
    return Plan(
        stage=stage, world=world, rank=rank, ranks_per_node=ranks_per_node, device=str(device), dtype=dtype, transport=transport,
        mode="resident" if resident else "private", params=infos, frozen_elems=frozen, layout=layout,
        segments=tuple(layout.whole_segments() if stage == 0 else layout.segments(rank)),
        slices=tuple([Slice(0, 0, layout.total)] if stage == 0 else layout.slices(rank)),
        bytes={n: getattr(out, n) for n, _ in _lib.Bytes._fields_})


def refuse_if_too_big(plan: Plan) -> None:
    """Raises OutOfMemoryError, before anything is allocated, if the model states don't fit into what this node has left."""
    if plan.device != "cpu":
        return
    have = memory.available()
    if plan.bytes["node_total"] > have:
        raise OutOfMemoryError(
            f"the plan needs {plan.bytes['node_total'] / 2**30:.2f} GiB on this node for model states and {have / 2**30:.2f} GiB are left (memory cgroup "
            f"and MemAvailable). Use a higher zero_optimization.stage (now {plan.stage}), bf16, or fewer ranks.\n{plan.describe()}")
