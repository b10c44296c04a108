"""The one place where a plan comes from: configuration, parameters, mesh and machine in, a frozen Plan out. The engine,
`deepc.estimate` and `deepc plan` all call `derive`, so that they can't disagree. No tensors, no processes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple, Protocol, TypeVar

from ..config.tree import Config
from ..core import env
from ..core import lib as _lib
from ..core.dtypes import FLOAT32, STATE_FORMATS, DType
from ..core.dtypes import dtype as dtype_named
from ..errors import ConfigError, UnsupportedError
from .layout import BLOCK, Layout, Segment, Slice, keeps_bytes, padded, slots_of
from .mesh import Mesh
from .plan import MAX_BUCKET_ELEMS, RING, SLOTS, DiskStates, ParamInfo, Plan, Sizes, payload_bytes

# Of states on disk. A cell: 512 KiB of each array; with less than about 24 MiB of them in memory the disk idles (12, 24
# and 48 MiB give 0.60, 0.73 and 0.87 of its rate beside other work: tests/bench/nvme.py).
CELL_ELEMS, CELL_SLOTS, CELL_BYTES = 1 << 17, 32, 24 << 20  # the bytes bound what the slots take together
MOST_CELLS = 4096  # a step takes time for each; sub_group_size is DeepSpeed's, which never cuts a parameter
_Row = TypeVar("_Row", Segment, Slice)
QUANTIZING = ("zero_quantized_weights", "zero_quantized_gradients")


class ParamMeta(NamedTuple):
    """What a plan needs to know of a parameter. group: the optimizer's group that trains it, None if it is frozen."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # as the model has it; a plan's own dtype is the configuration's
    group: int | None
    keeps_bytes: bool = False  # see layout.keep_bytes


def meta_of(named: Iterable[tuple[str, Any]], group_of: Mapping[int, int]) -> tuple[ParamMeta, ...]:
    """Of (name, parameter) pairs of any framework, in the order of registration; group_of: id(parameter) -> group."""
    return tuple(
        ParamMeta(n, tuple(p.shape), str(p.dtype).removeprefix("torch."), group_of.get(id(p)), keeps_bytes(p))
        for n, p in named
    )


class Place(Protocol):
    """What a plan asks of a group of ranks (comm/groups.py)."""

    @property
    def transport(self) -> str: ...

    @property
    def uneven(self) -> str: ...

    @property
    def node(self) -> int: ...

    @property
    def node_sizes(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Machine:
    """Facts about where the ranks run. device: "cpu", "cuda:1". transport: what their group found ("local", "node",
    "nodes", "c10d"); "": what follows from device and mesh. uneven: why nodes with different numbers of ranks make one
    group, in words, or "". streamed: stage 3 streams its parameters though the ranks share memory (DEEPC_STREAMED).
    ranks_here: those of the group on this node; 0: as many as on every other, the mesh says how many."""

    device: str = "cpu"
    transport: str = ""
    uneven: str = ""
    streamed: bool = False
    ranks_here: int = 0

    @property
    def kind(self) -> str:
        """Of the device: "cpu" or "cuda"."""
        return self.device.partition(":")[0]

    @classmethod
    def here(cls, device: object, group: Place | None = None) -> Machine:
        """This machine, with what the environment says. group: the ranks', if they are there already."""
        streamed = env.switch("DEEPC_STREAMED")
        if group is None:
            return cls(str(device), streamed=streamed)
        return cls(str(device), group.transport, group.uneven, streamed, group.node_sizes[group.node])


def transport_of(device: str, mesh: Mesh) -> str:
    """How gradients and parameters travel between these ranks, where all nodes have equally many."""
    if mesh.size == 1:
        return "local"
    if not device.startswith("cpu"):
        return "c10d"
    return "nodes" if mesh.nodes > 1 else "node"


def tree_buffers(world: int, passes: int) -> int:
    """fp32 gradient buffers of a step of `passes` micro-batches on each of `world` ranks: the tree has a node for every
    bit of the number of micro-batches so far, and the last pass adds to what is there. 1 with one pass, log2(passes)
    with 2, 4, 8, ... on 1, 2, 4, ... ranks.
    """
    return max((bin(world * p).count("1") for p in range(1, passes)), default=1)


def is_streamed(config: Config, mesh: Mesh, machine: Machine) -> bool:
    """Stage 3's parameters come and go where the ranks share no memory for them, or where the machine says so."""
    transport = machine.transport or transport_of(machine.device, mesh)
    alone = machine.streamed or (transport == "c10d" and mesh.dp > 1)
    return config.zero.stage == 3 and (alone or config.zero.parameters_leave(machine.kind))


def beside_onebit(config: Config, *, staged: bool, tp: int, sp: int, ep: int) -> dict[str, bool]:
    """What 1-bit optimizers do not go with, and whether it is there: ranks that share the model (in a pipeline: staged;
    tp, sp, ep of them), other keys."""
    dtype = config.data_types.grad_accum_dtype
    return {
        "pipeline.stages above 1": staged,
        "tensor_parallel.autotp_size above 1": tp > 1,
        "sequence_parallel_size above 1": sp > 1,
        "MoE with ep_size above 1": ep > 1,
        '"precision": "auto"': config.precision is not None,
        "deepc.deterministic": config.deepc.deterministic is not None,
        "states or parameters on disk": any(config.zero.on_disk),
        "gradient_allreduce_op sum": config.gradient_allreduce_op == "sum",
        f"data_types.grad_accum_dtype {dtype}": dtype != "fp32",
    }


def derive(
    config: Config,
    meta: Iterable[ParamMeta],
    mesh: Mesh,
    machine: Machine,
    *,
    rank: int = 0,
    part: int | None = None,
    moments: int = 2,
    state_bytes: int = 1024,
    on_disk: tuple[int, int] | None = None,
    whole_blocks: bool = False,
    dtype: str | DType = "",
) -> Plan:
    """The plan of one rank. meta: all parameters of the model in the order of registration. part: the rank's place in
    the layout (default: the rank itself; see comm/groups.py). moments: state arrays of the optimizer per element.
    state_bytes: of 256 elements of one of them. on_disk: both of those that go to disk, if they are others (where these
    are none, states stay in memory). whole_blocks: on disk it steps whole blocks alone. dtype: what the model computes
    in, if it is not what the configuration says (precision "auto").

    Raises UnsupportedError or ConfigError for what these ranks and this machine rule out."""
    mesh.require_data_parallel()
    transport = machine.transport or transport_of(machine.device, mesh)
    zero, stage = config.zero, config.zero.stage
    _check_places(config, mesh, machine, transport)
    kind = dtype_named(dtype or config.dtype)
    wire = dtype_named(config.communication_data_type) if config.communication_data_type else kind
    nodes = mesh.nodes if transport == "nodes" else 1
    gradients_as = "int4" if nodes > 1 and zero.zero_quantized_gradients else ""
    parameters_as = "int8" if nodes > 1 and zero.zero_quantized_weights and stage > 0 else ""
    accumulator = dtype_named(config.data_types.grad_accum_dtype)
    tree = tree_buffers(mesh.dp, config.gradient_accumulation_steps or 1) if config.deepc.deterministic else 0
    mode = "private" if stage < 3 else "streamed" if is_streamed(config, mesh, machine) else "resident"
    sharded = mode == "streamed" and transport == "c10d"
    part = rank if part is None else part
    ranks_here = machine.ranks_here or mesh.ranks_per_node
    share = _share(config, tuple(meta), mesh, machine, kind, part, sharded)
    layout = share.layout
    on_device, leave = machine.kind != "cpu", zero.parameters_leave(machine.kind)
    if on_device and leave and layout.total and zero.offload_optimizer.device == "none":
        raise ConfigError(
            f'zero_optimization.offload_param.device = "{zero.offload_param.device}" keeps the parameters of a GPU run'
            ' off the device, and the host updates them, but offload_optimizer.device is "none": set that to "cpu" too,'
            ' or to "nvme"'
        )
    has_master = kind != FLOAT32 or bool(parameters_as)
    offload = config.zero.offload_optimizer
    arrays, array_bytes = on_disk or (moments, state_bytes)
    disk = (
        disk_states(config, arrays, has_master, share.owned, offload.nvme_path or "", array_bytes, whole_blocks)
        if offload.device == "nvme"
        else None
    )
    parameters_on = zero.offload_param.nvme_path or "" if zero.offload_param.device == "nvme" else ""
    # Of a GPU run they come to the host's memory, and stay there.
    far = zero.offload_optimizer.device == "nvme" and layout.total and not on_device
    gradients_on = parameters_on if far else ""
    here = moments if disk is None or not arrays else 0
    raw = _lib.BytesIn(
        total=layout.total,
        shard=layout.shard_elems,
        frozen=share.frozen,
        world=mesh.dp,
        ranks_per_node=ranks_here,
        slots=SLOTS if transport in ("node", "nodes") else 0,
        bucket_elems=layout.bucket_elems,
        stage=stage,
        param_size=kind.itemsize,
        grad_wire_size=wire.itemsize,
        master=int(has_master and disk is None),
        state_size=4,
        nstates=here,
        state_block=here * state_bytes if state_bytes != 1024 else 0,
        resident=int(stage == 3 and not sharded),
        exchange=_exchange_bytes(layout, nodes, FLOAT32 if tree else wire, gradients_as),
        grad_buffers=tree,
        acc_size=accumulator.itemsize,
    )
    return Plan(
        stage=stage,
        mesh=mesh,
        rank=rank,
        ranks_per_node=ranks_here,
        device=machine.device,
        dtype=kind,
        transport=transport,
        mode=mode,
        params=share.params,
        frozen_elems=share.frozen,
        layout=layout,
        segments=tuple(share.segments),
        slices=tuple(share.slices),
        bytes=_sizes(raw, disk, bool(parameters_on), bool(gradients_on)),
        parameters_on=parameters_on,
        gradients_on=gradients_on,
        host_elems=share.host_elems,
        parameters_in_host=leave and not parameters_on,
        nodes=nodes,
        part=part,
        node_layout=_cut_for_node(layout, mesh.ranks_per_node) if nodes > 1 else None,
        gradients_as=gradients_as,
        parameters_as=parameters_as,
        wire=wire,
        autocast=dtype_named(config.autocast) if config.autocast else None,
        accumulator=accumulator,
        disk=disk,
        gradient_buffers=tree,
        notes=_notes(config, nodes),
    )


class _Share(NamedTuple):
    """How parameters lie in the flat space, and what of it is a rank's. frozen: elements of those that are not
    trained; owned: of the rank's share, the first host_elems of them on the host (None: all where they are)."""

    params: tuple[ParamInfo, ...]
    layout: Layout
    frozen: int
    segments: list[Segment]
    slices: list[Slice]
    owned: int
    host_elems: int | None


def _share(
    config: Config,
    rows: Sequence[ParamMeta],
    mesh: Mesh,
    machine: Machine,
    kind: DType,
    part: int,
    sharded: bool,
) -> _Share:
    """kind: what the model computes in; part: the rank's place in the layout; sharded: its share is all that it
    holds."""
    whole = config.zero.stage == 0
    # The flat order is the reverse of registration, which is about the order in which backward makes gradients.
    trained = [i for i in reversed(range(len(rows))) if rows[i].group is not None]
    index = {i: k for k, i in enumerate(trained)}
    params = tuple(ParamInfo(m.name, m.shape, prod(m.shape), m.group, index.get(i)) for i, m in enumerate(rows))
    asked = config.deepc.bucket_elems or config.zero.reduce_bucket_size
    layout = Layout([params[i].numel for i in trained], mesh.dp, max(1, min(asked, MAX_BUCKET_ELEMS)))
    frozen = sum(
        padded(slots_of(p.numel, dtype_named(m.dtype).itemsize, kind.itemsize) if m.keeps_bytes else p.numel)
        for p, m in zip(params, rows)
        if p.index is None
    )
    segments = layout.whole_segments() if whole else layout.segments(part)
    slices = [Slice(0, 0, layout.total)] if whole else layout.slices(part)
    if sharded:  # flat_begin: in the shard
        segments = [s._replace(flat_begin=s.shard_begin) for s in segments]
        slices = [s._replace(flat_begin=s.shard_begin) for s in slices]
    owned = layout.total if whole else layout.shard_elems
    host_elems = _host_elems(config, mesh, machine, owned)
    if host_elems is not None:
        segments, slices = _cut(segments, host_elems), _cut(slices, host_elems)
    return _Share(params, layout, frozen, segments, slices, owned, host_elems)


def _sizes(raw: Any, disk: DiskStates | None, parameters_on_disk: bool, gradients_on_disk: bool) -> Sizes:
    """Bytes by kind, of `raw` (a BytesIn) and of what lies on disk."""
    out = _lib.Bytes()
    _lib.call("dc_zero_estimate", ctypes.byref(raw), ctypes.byref(out))
    sizes = {n: getattr(out, n) for n, *_ in _lib.Bytes._fields_}
    sizes["disk"], sizes["disk_buffers"] = (disk.disk_bytes, disk.buffer_bytes) if disk is not None else (0, 0)
    sizes["rank_total"] += sizes["disk_buffers"]
    sizes["node_total"] += sizes["disk_buffers"] * raw.ranks_per_node
    sizes["params_disk"] = sizes["grads_disk"] = 0
    if parameters_on_disk:
        sizes["params_disk"], sizes["params_shared"] = sizes["params_shared"], 0
        sizes["node_total"] -= sizes["params_disk"]
    if gradients_on_disk:
        sizes["grads_disk"], sizes["grads_private"] = sizes["grads_private"], 0
        sizes["rank_total"] -= sizes["grads_disk"]
        sizes["node_total"] -= sizes["grads_disk"] * raw.ranks_per_node
    return Sizes(sizes)


def with_states(plan: Plan, states: int, disk: DiskStates | None) -> Plan:
    """The same plan with masters on this disk, or (None) in memory, and `states` bytes of optimizer states in
    memory."""
    sizes, elems = dict(plan.bytes), plan.owned_elems * FLOAT32.itemsize
    kinds = ("master_private", "states_private", "disk_buffers")
    before = sum(sizes[k] for k in kinds)
    here = (plan.has_master * elems, states, 0) if disk is None else (0, states, disk.buffer_bytes)
    sizes.update(zip(kinds, here))
    sizes["disk"] = 0 if disk is None else disk.disk_bytes
    sizes["rank_total"] += sum(here) - before
    sizes["node_total"] += (sum(here) - before) * plan.ranks_per_node
    return replace(plan, disk=disk, bytes=Sizes(sizes))


def disk_states(
    config: Config,
    moments: int,
    has_master: bool,
    elems: int,
    folder: str,
    state_bytes: int = 1024,
    whole_blocks: bool = False,
) -> DiskStates | None:
    """How masters and moments lie in a folder; None if there are none. state_bytes, whole_blocks: as of derive."""
    asked, arrays = config.zero.offload_optimizer, moments + has_master
    form, states = next((n, f.arrays) for n, f in STATE_FORMATS.items() if f.bytes_of_256 == state_bytes)
    form = "" if form == "fp32" else form
    if not arrays or not elems:
        return None
    cell = min(max(config.zero.sub_group_size or CELL_ELEMS, -(-elems // MOST_CELLS)), CELL_ELEMS)
    if config.zero.offload_param.device == "nvme" or form or whole_blocks:  # as of what lies beside them, and of scales
        cell = max(BLOCK, cell // BLOCK * BLOCK)
    kinds = [(FLOAT32, 1)] * has_master + list(states) * moments
    cell_bytes = sum(cell * dtype.itemsize // per for dtype, per in kinds)
    slots = max(4, min(CELL_SLOTS, CELL_BYTES // cell_bytes), asked.buffer_count)
    rows = (_lib.StreamArray * len(kinds))(*(_lib.StreamArray(b"", dtype.itemsize) for dtype, _ in kinds))
    shape = _lib.StreamConfig(arrays=rows, narrays=len(kinds), elems=elems, cell_elems=cell, slots=slots)
    if form:
        shape.per = (ctypes.c_int64 * len(kinds))(*(per for _, per in kinds))
    on_disk, buffers = ctypes.c_int64(), ctypes.c_int64()
    _lib.call("dc_stream_bytes", ctypes.byref(shape), ctypes.byref(on_disk), ctypes.byref(buffers))
    return DiskStates(
        folder=folder,
        arrays=arrays,
        cell_elems=cell,
        slots=slots,
        block_bytes=config.aio.block_size,
        depth=config.aio.queue_depth if "aio.queue_depth" in config.given else 0,
        disk_bytes=on_disk.value,
        buffer_bytes=buffers.value,
        form=form,
    )


def _host_elems(config: Config, mesh: Mesh, machine: Machine, owned: int) -> int | None:
    """The front of a share, whole blocks, whose states lie on the host where they are divided: gradients come in the
    flat order, so the front's cross beside backward."""
    offload = config.zero.offload_optimizer
    if machine.kind == "cpu" or offload.device == "none" or offload.ratio >= 1:
        return None
    for why in (
        "over several GPUs" * (mesh.dp > 1),
        "with states on disk" * (offload.device == "nvme"),
        "with offload_param" * config.zero.parameters_leave(machine.kind),
    ):
        if why:
            raise UnsupportedError(
                f"zero_optimization.offload_optimizer.ratio = {offload.ratio} {why} does not exist: set it to 1.0, with"
                " all states off the device"
            )
    return min(owned, round(offload.ratio * owned / BLOCK) * BLOCK)


def _cut(rows: Iterable[_Row], cut: int) -> list[_Row]:
    """Segments or slices, with none over element `cut` of the share."""
    out: list[_Row] = []
    for s in rows:
        front = cut - s.shard_begin
        if not 0 < front < s.length:
            out.append(s)
            continue
        rest = s._replace(flat_begin=s.flat_begin + front, shard_begin=cut, length=s.length - front)
        if isinstance(rest, Segment):
            rest = rest._replace(param_begin=rest.param_begin + front)
        out += [s._replace(length=front), rest]
    return out


def _check_places(config: Config, mesh: Mesh, machine: Machine, transport: str) -> None:
    """What the ranks' places rule out, which the configuration alone does not show."""
    zero, uneven = config.zero, f"nodes with different numbers of ranks ({machine.uneven})"
    asked = [k for k in QUANTIZING if getattr(zero, k)]
    if transport == "nodes" and config.data_types.grad_accum_dtype != "fp32":
        raise UnsupportedError(
            f'data_types.grad_accum_dtype = "{config.data_types.grad_accum_dtype}" over several CPU nodes does not'
            " exist: what comes from other nodes is added in fp32, where it arrives; remove the key"
        )
    if transport == "c10d" and mesh.dp > 1 and asked:
        raise UnsupportedError(
            f"zero_optimization.{asked[0]} over {uneven if machine.uneven else 'several GPUs'} does not exist; "
            f"{'start equally many ranks on each node' if machine.uneven else 'use CPU nodes'}, or remove the key"
        )
    if zero.offload_param.device == "nvme" and transport not in ("local", "node", "nodes"):
        where = "over several GPUs" if machine.kind != "cpu" else f"over {uneven}"
        raise UnsupportedError(
            f'zero_optimization.offload_param.device = "nvme" {where} does not exist yet: one GPU, and CPU nodes with'
            ' equally many ranks each, have it; set it to "none"'
        )
    if zero.offload_param.device == zero.offload_optimizer.device == "nvme":
        if config.data_types.grad_accum_dtype != "fp32":
            raise UnsupportedError(
                f'data_types.grad_accum_dtype = "{config.data_types.grad_accum_dtype}" with parameters and optimizer'
                " states on NVMe does not exist: gradients on disk are fp32; remove the key"
            )
        if config.deepc.deterministic:
            raise UnsupportedError(
                'deepc.deterministic = "layout" with parameters and optimizer states on NVMe does not exist: the tree'
                ' of gradients lies in memory; set offload_param.device or offload_optimizer.device to "none"'
            )
    size, ranks = zero.zero_hpz_partition_size, mesh.ranks_per_node
    if size > 1 and zero.stage == 3 and ranks % size:
        raise ConfigError(
            f"zero_optimization.zero_hpz_partition_size = {size} does not divide the {ranks}"
            f" rank{'s' * (ranks > 1)} of a node. The secondary partition is always the node here (its memory holds"
            " the parameters once, whichever rank reads them); a partition over several nodes would bring back the"
            f" traffic that hpZ is there to avoid. Set it to {ranks}, or to 1."
        )


def _notes(config: Config, nodes: int) -> tuple[str, ...]:
    return tuple(
        f"config: zero_optimization.{key} has no effect here: there is one node, and inside it"
        " gradients are reduced where they lie and parameters are shared, uncompressed"
        for key in QUANTIZING
        if nodes == 1 and getattr(config.zero, key)
    )


def _cut_for_node(layout: Layout, ranks: int) -> Layout:
    """The same flat space, in the same buckets, for the ranks of a node. A parameter that no one has stands for the
    padding, which is longer than a layout of fewer ranks would make it."""
    if not layout.total:  # nothing is trained
        return Layout([], ranks, layout.bucket_elems)
    numels = list(layout.numels)
    end = padded(layout.offsets[-1] + numels[-1]) if numels else 0
    cut = Layout([*numels, layout.total - end], ranks, layout.bucket_elems)
    assert (cut.total, cut.bucket_elems) == (layout.total, layout.bucket_elems)
    return cut


def _exchange_bytes(layout: Layout, nodes: int, wire: DType, gradients_as: str) -> int:
    """Bytes of a rank's buffers for what is on its way between nodes: the reduced slices, and what is sent and received
    for them."""
    if nodes == 1:
        return 0
    ranks = layout.world // nodes
    payload = nodes * payload_bytes(gradients_as, wire, layout.bucket_elems // layout.world)
    straight = not gradients_as and wire == FLOAT32
    return RING * (layout.bucket_elems // ranks * 4 + payload * (1 if straight else 2))
