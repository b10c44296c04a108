"""The plan: which parameter lies where, in which form, and how many bytes that takes. Frozen, printable data, made
before anything is allocated (derive.py); the runtime follows it and decides nothing twice. Plans compare, hash and
diff. Dtypes are those of core.dtypes: no framework is imported here."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from ..core.dtypes import FLOAT32, DType
from ..core.lib import call
from .layout import Layout, Segment, Slice
from .mesh import Mesh

MAX_BUCKET_ELEMS = 1 << 20  # larger buckets win nothing in shared memory and cost staging; reduce_bucket_size lowers it
SLOTS = 2  # staging slots per rank
CONTROL_SLOT_BYTES = 256 * 1024  # of the communicator for norms and broadcasts, per rank and slot
QUANTIZED = 64  # elements of a block of quantised gradients or parameters: no block mixes two parameters
RING = 4  # buckets of a rank that may be on their way to other nodes


@dataclass(frozen=True)
class ParamInfo:
    """One parameter of the model. `index` is its place in the flat order, None for one that is not trained."""

    name: str
    shape: tuple[int, ...]
    numel: int
    group: int | None
    index: int | None


class Sizes(Mapping[str, int]):
    """Bytes by what they are for: a dictionary that can't be changed, and that can be hashed."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = dict(sizes)

    def __getitem__(self, name: str) -> int:
        return self._sizes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def __hash__(self) -> int:
        return hash(tuple(self._sizes.items()))

    def __repr__(self) -> str:
        return repr(self._sizes)


def payload_bytes(kind: str, dtype: DType, n: int) -> int:
    """Bytes in which `n` elements travel between nodes: in `dtype`, or as "int4" or "int8" in blocks of QUANTIZED."""
    if not kind:
        return n * dtype.itemsize
    size = ctypes.c_int64()
    call("dc_quantize_bytes", {"int4": 4, "int8": 8}[kind], QUANTIZED, n, ctypes.byref(size))
    return size.value


@dataclass(frozen=True)
class DiskStates:
    """Masters and moments of a rank on disk: `arrays` of them, in fp32 (moments in `form`, if it is not ""), in a
    scratch file of `folder`, moved in cells of `cell_elems` elements of each, of which `slots` are in memory at a time.
    block_bytes and depth: of a transfer, and of those on their way (0: offload's own). disk_bytes, buffer_bytes: of one
    rank."""

    folder: str
    arrays: int
    cell_elems: int
    slots: int
    block_bytes: int
    depth: int
    disk_bytes: int
    buffer_bytes: int
    form: str = ""


@dataclass(frozen=True)
class Plan:
    """Everything that the engine does not decide again. Sizes in bytes unless said."""

    stage: int
    mesh: Mesh
    rank: int
    ranks_per_node: int  # of this node; nodes may have different numbers
    device: str
    dtype: DType  # of the parameters that the model computes with
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
    bytes: Sizes
    nodes: int = 1
    part: int = 0  # this rank's place in the layout, see group.py
    node_layout: Layout | None = (
        None  # over several nodes: the same flat space and buckets, cut for the ranks of a node
    )
    gradients_as: str = ""  # between nodes: "int4" (ZeRO++'s qgZ), or "" for the wire dtype
    parameters_as: str = ""  # between nodes: "int8" (ZeRO++'s qwZ), or "" for the parameters' dtype
    wire: DType = FLOAT32  # of gradients
    autocast: DType | None = None  # what forwards compute in under torch.autocast
    accumulator: DType = FLOAT32  # of what a rank accumulates of them (data_types.grad_accum_dtype)
    disk: DiskStates | None = None  # optimizer states on disk (offload_optimizer.device nvme); None: in memory
    gradient_buffers: int = (
        0  # with "deterministic": "layout": fp32 buffers of the tree of micro-batches, see determinism.py; 0: it is off
    )

    parameters_on: str = ""  # the folder of the disk where stage 3's parameters lie, or "" for memory
    gradients_on: str = ""  # the same of the gradients that a rank accumulates
    host_elems: int | None = None  # elements of the share whose states lie on the host of a GPU run; None: all or none
    parameters_in_host: bool = False  # stage 3 on a GPU with offload_param cpu: the device has what is in use
    notes: tuple[str, ...] = ()  # what was asked for and has no effect here, in sentences

    @property
    def world(self) -> int:
        """Data-parallel ranks, over which states are partitioned."""
        return self.mesh.dp

    @property
    def device_type(self) -> str:
        """ "cpu" or "cuda"."""
        return self.device.partition(":")[0]

    @property
    def own_all(self) -> bool:
        """True if this rank keeps whole optimizer states (stage 0)."""
        return self.stage == 0

    @property
    def sharded(self) -> bool:
        """True if a rank holds only its shard of the parameters: streamed mode where ranks share no memory."""
        return self.mode == "streamed" and self.transport == "c10d"

    @property
    def updates_on_disk(self) -> bool:
        """True if an update reads or writes the disk, so that it may fail in the middle."""
        return self.disk is not None or bool(self.parameters_on)

    @property
    def parameters_away(self) -> bool:
        """True if parameters lie on disk, or in the host's memory of a GPU run."""
        return bool(self.parameters_on) or self.parameters_in_host

    @property
    def core_reduces(self) -> bool:
        """True if the C core's reducer fills the accumulators, bucket by bucket: one CPU node."""
        return self.device_type == "cpu" and self.transport in ("local", "node")

    @property
    def owned_elems(self) -> int:
        return self.layout.total if self.own_all else self.layout.shard_elems

    @property
    def has_master(self) -> bool:
        """True if separate fp32 master weights exist (16-bit parameters, or parameters that reach other nodes
        quantised)."""
        return self.dtype != FLOAT32 or bool(self.parameters_as)

    @property
    def computes_in(self) -> DType:
        """What matrix products are of."""
        return self.autocast or self.dtype

    @property
    def crossing_dtype(self) -> DType:
        """Of uncompressed gradients between nodes: the wire's, but parts of the tree are sums and travel unrounded."""
        return FLOAT32 if self.gradient_buffers else self.wire

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
        bucket = self.layout.bucket_elems * self.wire.itemsize
        return self.node_states + self.ranks_per_node * (SLOTS * bucket + largest)

    def crossing(self) -> dict[str, int]:
        """Bytes that one node sends to the others: "gradients" per backward (stage 0: and "sums" per step),
        "parameters" per step."""
        # in slices, which are multiples of a codec's block
        elems, others = self.layout.total // self.nodes, self.nodes - 1
        return {
            "gradients": others * payload_bytes(self.gradients_as, self.crossing_dtype, elems),
            "sums": others * elems * 4 if self.own_all else 0,
            "parameters": 0 if self.own_all else others * payload_bytes(self.parameters_as, self.dtype, elems),
        }

    def describe(self) -> str:
        """A table of where each byte lies."""
        b, mib = self.bytes, 2.0**20
        trained = sum(p.numel for p in self.params if p.index is not None)
        lines = [
            (
                f"plan: ZeRO stage {self.stage}, {self.world} rank{'s' * (self.world > 1)} ({self.ranks_per_node} on"
                f" this node), {self.device}, {self.dtype}"
                f" parameters{' + fp32 masters' if self.has_master else ''}"
                f"{f' under torch.autocast in {self.autocast}' if self.autocast else ''}, transport"
                f" {self.transport}{', parameters streamed' if self.mode == 'streamed' else ''}"
                f"{' from host memory' if self.parameters_in_host else ''}"
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
                f"gradients ({self.accumulator.short})"
                if self.gradient_buffers < 2
                else f"gradients (fp32, {self.gradient_buffers} nodes)",
                b["grads_private"],
                0,
            ),
            ("optimizer states", b["states_private"], 0),
            ("cells of states on disk", self.disk.buffer_bytes if self.disk is not None else 0, 0),
            ("gradient buckets", 0, b["staging_shared"]),
            ("on the way between nodes", b["exchange_private"], 0),
        ]
        for name, private, shared in rows:
            if private or shared:
                lines.append(f"  {name:<26}{private / mib:>12.1f}{shared / mib:>22.1f}")
        for name, nbytes, folder in (
            ("parameters on disk", b["params_disk"], self.parameters_on),
            ("gradients on disk", b["grads_disk"] * self.ranks_per_node, self.gradients_on),
        ):
            if folder:
                lines.append(f"  {name:<26}{nbytes / mib:>12.1f}  (of this node, in {folder})")
        lines.append(
            f"  {'model states of this node':<26}{b['node_total'] / mib:>12.1f}  ({self.ranks_per_node}"
            f" rank{'s' * (self.ranks_per_node != 1)}; activations not included)"
        )
        if self.mode == "resident":
            states, bound = self.node_states, self.backward_bound
            lines.append(
                f"  between steps: model states at most {states / mib:.1f} MiB on this node,"
                f" {states / max(1, trained):.2f} bytes a parameter, whatever the number of ranks; at the peak of"
                f" backward at most {bound / mib:.1f} MiB (per rank two buckets and the largest gradient more)"
            )
        if self.host_elems is not None:
            lines.append(
                f"  masters, gradients and optimizer states of {self.host_elems:,} elements in host memory, of the"
                f" other {self.owned_elems - self.host_elems:,} on the device"
            )
        if self.disk is not None:
            lines.append(
                f"  on disk, {self.disk.folder}: {self.disk.disk_bytes / mib:.1f} MiB each rank"
                f" ({self.disk.arrays} {self._disk_arrays()}), read and"
                f" written in each step, in cells of {self.disk.cell_elems:,} elements"
            )
        if self.nodes > 1:
            lines.extend(self._describe_crossing())
        return "\n".join(lines)

    def _disk_arrays(self) -> str:
        form = self.disk.form if self.disk is not None else ""
        if not form:
            return f"fp32 arrays: {'masters and ' * self.has_master}optimizer states"
        return f"arrays: {'fp32 masters and ' * self.has_master}{form} optimizer states"

    def _describe_crossing(self) -> list[str]:
        sent, mib = self.crossing(), 2.0**20
        lines = [
            f"  between {self.nodes} nodes, MiB that each sends: gradients {sent['gradients'] / mib:.2f} a backward "
            f"({self.gradients_as or self.crossing_dtype}{' blocks, qgZ' if self.gradients_as else ''})"
        ]
        if self.own_all:
            lines[0] += f", their sums {sent['sums'] / mib:.2f} a step (float32)"
        else:
            lines[0] += (
                f", updated parameters {sent['parameters'] / mib:.2f} a step "
                f"({self.parameters_as or self.dtype}{' blocks, qwZ' if self.parameters_as else ''})"
            )
        if self.mode == "resident":
            lines.append(
                f"  secondary partition (hpZ): the node, {self.ranks_per_node} rank{'s' * (self.ranks_per_node > 1)}:"
                " it holds one copy of all parameters in shared memory, so that forward and backward gather 0 bytes"
            )
        return lines

    def diff(self, other: Plan) -> str:
        """What `other` has differently, a line for each: "dtype: float32 -> bfloat16"; "" if they are equal."""
        out = []
        for f in fields(self):
            a, b = getattr(self, f.name), getattr(other, f.name)
            if a == b:
                continue
            if isinstance(a, Sizes):
                out += [f"bytes.{k}: {a[k]:,} -> {b[k]:,}" for k in a if a[k] != b[k]]
            elif isinstance(a, tuple) and f.name != "notes":
                out += _diff_rows(f.name, a, b)
            else:
                out.append(f"{f.name}: {a} -> {b}")
        return "\n".join(out)


def _diff_rows(name: str, a: tuple[object, ...], b: tuple[object, ...]) -> list[str]:
    """At most three rows that differ, and how many more."""
    rows = [
        f"{name}[{i}]: {a[i] if i < len(a) else 'none'} -> {b[i] if i < len(b) else 'none'}"
        for i in range(max(len(a), len(b)))
        if i >= len(a) or i >= len(b) or a[i] != b[i]
    ]
    return [*rows[:3], *([f"{name}: {len(rows) - 3} more"] if len(rows) > 3 else [])]
