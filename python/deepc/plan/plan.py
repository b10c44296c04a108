"""The plan: which parameter lies where, in which form, and how many bytes that takes. Frozen, printable data, made
before anything is allocated; the runtime follows it and decides nothing twice."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..core import lib as _lib
from ..core import memory
from ..errors import OutOfMemoryError
from .layout import Layout, Segment, Slice, padded

MAX_BUCKET_ELEMS = 1 << 20  # larger buckets win nothing in shared memory and cost staging; reduce_bucket_size lowers it
SLOTS = 2  # staging slots per rank
RING = 4  # buckets of a rank that may be on their way to other nodes


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
    # "local" (one rank), "node" (shared memory), "nodes" (CPU nodes) or "c10d" (torch.distributed: GPUs, uneven nodes)
    transport: str
    # "private" (a replica per rank), "resident" (one copy per node) or "streamed" (stage 3: a unit is there while it is
    # used)
    mode: str
    params: tuple[ParamInfo, ...]
    frozen_elems: int
    layout: Layout
    segments: tuple[
        Segment, ...
        # this rank's, in shard order; flat_begin: where it lies in ModelState.flat, which is the shard alone if `sharded`  # noqa: E501
    ]
    slices: tuple[Slice, ...]  # this rank's, in bucket order
    bytes: dict[str, int]
    nodes: int = 1
    part: int = 0  # this rank's place in the layout, see group.py
    node_layout: Layout | None = (
        None  # over several nodes: the same flat space and buckets, cut for the ranks of a node
    )
    gradients_as: str = ""  # between nodes: "int4" (ZeRO++'s qgZ), or "" for the wire dtype
    parameters_as: str = ""  # between nodes: "int8" (ZeRO++'s qwZ), or "" for the parameters' dtype
    wire: torch.dtype | None = None  # of gradients
    gradient_buffers: int = (
        0  # with "deterministic": "layout": fp32 buffers of the tree of micro-batches, see determinism.py; 0: it is off
    )

    @property
    def own_all(self) -> bool:
        """True if this rank keeps whole optimizer states (stage 0)."""
        return self.stage == 0

    @property
    def sharded(self) -> bool:
        """True if a rank holds only its shard of the parameters: streamed mode where ranks share no memory."""
        return self.mode == "streamed" and self.transport == "c10d"

    @property
    def core_reduces(self) -> bool:
        """True if the C core's reducer fills the accumulators, bucket by bucket: one CPU node."""
        return torch.device(self.device).type == "cpu" and self.transport in ("local", "node")

    @property
    def owned_elems(self) -> int:
        return self.layout.total if self.own_all else self.layout.shard_elems

    @property
    def has_master(self) -> bool:
        """True if separate fp32 master weights exist (16-bit parameters, or parameters that reach other nodes
        quantised)."""
        return self.dtype != torch.float32 or bool(self.parameters_as)

    @property
    def crossing_dtype(self) -> torch.dtype | None:
        """Of uncompressed gradients between nodes: the wire's, but parts of the tree are sums and travel unrounded."""
        return torch.float32 if self.gradient_buffers else self.wire

    @property
    def node_states(self) -> int:
        """Bytes of model states of this node between steps: without buckets and what is on the way."""
        b = self.bytes
        return self.ranks_per_node * (b["rank_total"] - b["exchange_private"]) + b["params_shared"]

    @property
    def backward_bound(self) -> int:
        """The most that model states and gradients of this node take during backward: per rank two buckets and the
        largest gradient more."""
        largest = max((p.numel for p in self.params if p.index is not None), default=0) * self.dtype.itemsize
        bucket = self.layout.bucket_elems * (self.wire or self.dtype).itemsize
        return self.node_states + self.ranks_per_node * (SLOTS * bucket + largest)

    def crossing(self) -> dict[str, int]:
        """Bytes that one node sends to the others: "gradients" per backward (stage 0: and "sums" per step),
        "parameters" per step."""
        from ..zero.step.nodes import codec_for

        elems, others = (
            self.layout.total // self.nodes,
            self.nodes - 1,
        )  # in slices, which are multiples of a codec's block
        return {
            "gradients": others * codec_for(self.gradients_as, self.crossing_dtype or self.dtype).nbytes(elems),
            "sums": others * elems * 4 if self.own_all else 0,
            "parameters": 0 if self.own_all else others * codec_for(self.parameters_as, self.dtype).nbytes(elems),
        }

    def describe(self) -> str:
        """A table of where each byte lies."""
        b, mib = self.bytes, 2.0**20
        trained = sum(p.numel for p in self.params if p.index is not None)
        lines = [
            (
                f"plan: ZeRO stage {self.stage}, {self.world} rank{'s' * (self.world > 1)} ({self.ranks_per_node} on"
                f" this node), {self.device}, {str(self.dtype).removeprefix('torch.')}"
                f" parameters{' + fp32 masters' if self.has_master else ''}, transport"
                f" {self.transport}{', parameters streamed' if self.mode == 'streamed' else ''}"
            ),
            (
                f"  {len(self.params)} parameters, {trained:,} elements trained, {self.frozen_elems:,} frozen; flat"
                f" space {self.layout.total:,} in {self.layout.nbuckets} buckets of {self.layout.bucket_elems:,}; a"
                f" rank owns {self.owned_elems:,}"
            ),
            f"  {'MiB':<26}{'each rank':>12}{'shared, once a node':>22}",
        ]
        rows = [
            ("parameters", b["params_private"], b["params_shared"]),
            ("fp32 masters", b["master_private"], 0),
            (
                "gradients (fp32)" if self.gradient_buffers < 2 else f"gradients (fp32, {self.gradient_buffers} nodes)",
                b["grads_private"],
                0,
            ),
            ("optimizer states", b["states_private"], 0),
            ("gradient buckets", 0, b["staging_shared"]),
            ("on the way between nodes", b["exchange_private"], 0),
        ]
        for name, private, shared in rows:
            if private or shared:
                lines.append(f"  {name:<26}{private / mib:>12.1f}{shared / mib:>22.1f}")
        lines.append(
            f"  {'model states of this node':<26}{b['node_total'] / mib:>12.1f}  ({self.ranks_per_node} ranks;"
            " activations not included)"
        )
        if self.mode == "resident":
            states, bound = self.node_states, self.backward_bound
            lines.append(
                f"  between steps: model states at most {states / mib:.1f} MiB on this node,"
                f" {states / max(1, trained):.2f} bytes a parameter, whatever the number of ranks; at the peak of"
                f" backward at most {bound / mib:.1f} MiB (per rank two buckets and the largest gradient more)"
            )
        if self.nodes > 1:
            lines.extend(self._describe_crossing())
        return "\n".join(lines)

    def _describe_crossing(self) -> list[str]:
        sent, mib = self.crossing(), 2.0**20
        lines = [
            f"  between {self.nodes} nodes, MiB that each sends: gradients {sent['gradients'] / mib:.2f} a backward "
            f"({self.gradients_as or str(self.crossing_dtype).removeprefix('torch.')}{' blocks, qgZ' if self.gradients_as else ''})"  # noqa: E501
        ]
        if self.own_all:
            lines[0] += f", their sums {sent['sums'] / mib:.2f} a step (float32)"
        else:
            lines[0] += (
                f", updated parameters {sent['parameters'] / mib:.2f} a step "
                f"({self.parameters_as or str(self.dtype).removeprefix('torch.')}{' blocks, qwZ' if self.parameters_as else ''})"  # noqa: E501
            )
        if self.mode == "resident":
            lines.append(
                f"  secondary partition (hpZ): the node, {self.ranks_per_node} rank{'s' * (self.ranks_per_node > 1)}:"
                " it holds one copy of all parameters in shared memory, so that forward and backward gather 0 bytes"
            )
        return lines


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
    nodes: int = 1,
    part: int | None = None,
    wire: torch.dtype | None = None,
    gradients_as: str = "",
    parameters_as: str = "",
    streamed: bool = False,
    gradient_buffers: int = 0,
) -> Plan:
    """Plans `named` parameters (id(parameter) -> optimizer group in `group_of`; absent: not trained) for this rank.

    The flat order is the reverse of registration, which is about the order in which backward makes gradients."""
    trained = [(n, p) for n, p in reversed(list(named)) if id(p) in group_of]
    index = {id(p): i for i, (_, p) in enumerate(trained)}
    infos = tuple(ParamInfo(n, tuple(p.shape), p.numel(), group_of.get(id(p)), index.get(id(p))) for n, p in named)
    layout = Layout([p.numel() for _, p in trained], world, max(1, min(bucket_elems, MAX_BUCKET_ELEMS)))
    frozen = sum(padded(p.numel) for p in infos if p.index is None)
    part, wire = rank if part is None else part, wire or dtype
    mode = "private" if stage < 3 else "streamed" if streamed else "resident"
    node_layout = _cut_for_node(layout, ranks_per_node) if nodes > 1 else None
    raw = _lib.BytesIn(
        total=layout.total,
        shard=layout.shard_elems,
        frozen=frozen,
        world=world,
        ranks_per_node=ranks_per_node,
        slots=SLOTS if transport in ("node", "nodes") else 0,
        bucket_elems=layout.bucket_elems,
        stage=stage,
        param_size=dtype.itemsize,
        grad_wire_size=wire.itemsize,
        master=int(dtype != torch.float32 or bool(parameters_as)),
        state_size=4,
        nstates=moments,
        resident=int(stage == 3 and not (streamed and transport == "c10d")),
        exchange=_exchange_bytes(layout, nodes, torch.float32 if gradient_buffers else wire, gradients_as),
        grad_buffers=gradient_buffers,
    )
    out = _lib.Bytes()
    _lib.call("dc_zero_estimate", ctypes.byref(raw), ctypes.byref(out))
    segments = layout.whole_segments() if stage == 0 else layout.segments(part)
    slices = [Slice(0, 0, layout.total)] if stage == 0 else layout.slices(part)
    if mode == "streamed" and transport == "c10d":
        segments, slices = (
            [s._replace(flat_begin=s.shard_begin) for s in segments],
            [s._replace(flat_begin=s.shard_begin) for s in slices],
        )
    return Plan(
        stage=stage,
        world=world,
        rank=rank,
        ranks_per_node=ranks_per_node,
        device=str(device),
        dtype=dtype,
        transport=transport,
        mode=mode,
        params=infos,
        frozen_elems=frozen,
        layout=layout,
        segments=tuple(segments),
        slices=tuple(slices),
        bytes={n: getattr(out, n) for n, *_ in _lib.Bytes._fields_},
        nodes=nodes,
        part=part,
        node_layout=node_layout,
        gradients_as=gradients_as,
        parameters_as=parameters_as,
        wire=wire,
        gradient_buffers=gradient_buffers,
    )


def _cut_for_node(layout: Layout, ranks: int) -> Layout:
    """The same flat space, in the same buckets, for the ranks of a node. A parameter that no one has stands for the
    padding, which is longer than a layout of fewer ranks would make it."""
    numels = list(layout.numels)
    end = padded(layout.offsets[-1] + numels[-1]) if numels else 0
    cut = Layout([*numels, layout.total - end], ranks, layout.bucket_elems)
    assert (cut.total, cut.bucket_elems) == (layout.total, layout.bucket_elems)
    return cut


def _exchange_bytes(layout: Layout, nodes: int, wire: torch.dtype, gradients_as: str) -> int:
    """Bytes of a rank's buffers for what is on its way between nodes: the reduced slices, and what is sent and received
    for them."""
    if nodes == 1:
        return 0
    from ..zero.step.nodes import Plain, codec_for

    codec, ranks = codec_for(gradients_as, wire), layout.world // nodes
    payload = nodes * codec.nbytes(layout.bucket_elems // layout.world)
    straight = isinstance(codec, Plain) and wire == torch.float32
    return RING * (layout.bucket_elems // ranks * 4 + payload * (1 if straight else 2))


def refuse_if_too_big(plan: Plan, further: int = 0) -> None:
    """Raises OutOfMemoryError, before anything is allocated, if the model states (and `further` bytes) don't fit into
    what this node has left; says what would."""
    if plan.device != "cpu":
        return
    have = memory.available()
    if plan.bytes["node_total"] + further > have:
        from .predict.estimate import options_by_counts

        fix = " or ".join(options_by_counts(plan, have)) or "nothing on this node; use more nodes, or raise the limit"
        raise OutOfMemoryError(
            f"the plan needs {plan.bytes['node_total'] / 2**30:.2f} GiB on this node for model"
            f" states{f' and {further / 2**30:.2f} GiB to change the precision' if further else ''}, and"
            f" {have / 2**30:.2f} GiB are left (memory cgroup and MemAvailable). What would fit:"
            f" {fix}.\n{plan.describe()}"
        )
