"""The model states of one rank as arrays: flat parameters, fp32 masters, gradient accumulators. Follows the plan. The
model's parameters stay views of them (resident.py), or come and go (streamed/)."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Collection, Container, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import torch
from torch.autograd.graph import increment_version

from ..comm.internode.crossing import requantized
from ..core import memory
from ..core.foreign import private
from ..core.lib import call
from ..core.ops import code, torch_dtype
from ..errors import ConfigError, DiskError, UnsupportedError
from ..plan.layout import BLOCK, Segment
from ..plan.plan import Plan
from .parameters.gathered import Params, Whole
from .parameters.param import Released, share, version_of
from .step.reducers.collective import TorchReducer
from .tiers.agree import together
from .tiers.disk import DiskTier
from .tiers.split import Split, parts_of, squares
from .tiers.windows import PART, Array, Window

if TYPE_CHECKING:
    from ..comm.groups import Group
    from ..comm.shared import Segment as SharedSegment


class Cell(NamedTuple):
    """Elements [begin, end) of a shard, and where they lie in the flat space: (begin, end) of each stretch."""

    begin: int
    end: int
    flat: tuple[tuple[int, int], ...]


class Pass(NamedTuple):
    """What a pass over cells wants of what lies on disk: the old parameters, the new ones on disk, gradients."""

    reads: bool = True
    stores: bool = True
    gradients: bool = True


class Walk(Protocol):
    """See streamed/cells.py."""

    cells: Sequence[Cell]
    at: int

    def begin(self, what: Pass) -> None: ...
    def ready(self) -> Cell: ...
    def done(self) -> None: ...
    def end(self) -> None: ...
    def pause(self) -> None: ...
    def forget(self) -> None: ...


class Addressed(Protocol):
    """An array on disk that has addresses: offload.array.Window."""

    def blocks(self, lo: int, hi: int) -> tuple[int, int]: ...
    def tensor(self, lo: int, hi: int) -> torch.Tensor: ...
    def fetch(self, lo: int, hi: int) -> None: ...
    def ready(self, lo: int) -> None: ...
    def store(self, lo: int, hi: int) -> None: ...
    def flush(self) -> None: ...


class Flats(Protocol):
    """How the flat space of parameters lies on a rank: whole (resident.py), or its own shard alone (streamed/). What it
    makes are `state`'s arrays."""

    def make(self, state: ModelState) -> None:
        """Sets flat and frozen_flat, and segment and flat_host where there are such. Collective."""

    def value(self, state: ModelState, p: torch.nn.Parameter) -> torch.Tensor:
        """[numel] the value that the trained `p` starts with, with the precision of masters where there are any.
        Collective."""

    def put(self, state: ModelState, index: int, value: torch.Tensor, pieces: Sequence[Segment]) -> None:
        """Stores `value`, of which `pieces` are this rank's, as trained parameter `index`."""

    def home(self, state: ModelState, index: int, p: torch.nn.Parameter) -> torch.Tensor:
        """The memory of that parameter from here on."""

    def put_frozen(self, state: ModelState, p: torch.nn.Parameter) -> None:
        """Stores a parameter that is not trained. Collective."""

    def spread(self, state: ModelState) -> None:
        """What was stored is rank 0's, everywhere. Collective."""

    def follow(self, state: ModelState, index: int) -> None:
        """The stored parameter `index` follows what owners wrote into its `piece`s. Collective."""


class ModelState:
    """Owns this rank's share of the model states, as `plan` says; the arrays. How the model's parameters relate to them
    is said by the two classes of it, ResidentState and StreamedState.

    flat: of `dtype`, the parameters: [total], node-shared at stage 3 or a private replica, or [owned] where a rank has
    its shard alone; frozen_flat: the same of frozen ones, or None. master, moments: [owned] fp32; acc: [owned] of the
    plan's accumulator dtype. On CPU all lie on huge pages; with `host` (offloaded optimizer on a GPU) all but `flat`
    lie in host memory, with plan.parameters_in_host `flat` too. With a `tier`, masters and moments lie there (OnDisk):
    who reads or writes them asks for a `window`."""

    def __init__(
        self,
        plan: Plan,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        group: Group,
        device: torch.device,
        *,
        host: bool,
        accumulates: bool = False,
        tier: DiskTier | None = None,
    ) -> None:
        self.plan, self.group, self.device, self.tier = plan, group, device, tier
        self.state_device = torch.device("cpu") if host else device
        self.home = torch.device("cpu") if plan.parameters_in_host else device  # of the flat space
        by_index = sorted(
            ((info.index, p, info.name) for info, (_, p) in zip(plan.params, named) if info.index is not None),
            key=lambda t: t[0],
        )
        self.trained: list[torch.nn.Parameter] = [p for _, p, _ in by_index]
        self.names: list[str] = [n for _, _, n in by_index]
        shapes = {info.index: info.shape for info in plan.params}
        self.shapes = [shapes[i] for i in range(len(self.trained))]  # a parameter's own may be gone for a while
        self.frozen: list[tuple[str, torch.nn.Parameter]] = [
            (info.name, p) for info, (_, p) in zip(plan.params, named) if info.index is None
        ]
        owned = plan.owned_elems
        self.segment: SharedSegment | None = None
        self.acc: torch.Tensor
        self.flat: torch.Tensor
        self.frozen_flat: torch.Tensor | None = None
        self.flat_host: torch.Tensor | None = None
        self._owners: list[list[tuple[int, Segment]]] | None = None
        self.lease = (
            memory.Lease(owned, torch_dtype(plan.accumulator), memory.COLORS["acc"])
            if leases_gradients(plan, accumulates) and owned
            else None
        )
        if self.lease is not None:
            self.acc = self.lease.tensor
        elif not plan.gradients_on:  # else the state's class says what stands for them
            self.acc = cast(torch.Tensor, self.share(torch_dtype(plan.accumulator), "acc"))
        self.partial = torch.zeros(owned // BLOCK, dtype=torch.float64, device=self.state_device)
        self.master: Array | None = self.states("master") if plan.has_master else None
        self.flats = self._choose_flats()
        self.flats.make(self)
        self._bind()
        self._note_versions()

    def _choose_flats(self) -> Flats:
        """How the flat space lies on this rank."""
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in, as the plan says."""
        return torch_dtype(self.plan.dtype)

    def zeros(self, numel: int, dtype: torch.dtype, what: str) -> torch.Tensor:
        """A zeroed state array where the states lie; `what` gives it its place among the arrays that are walked
        together."""
        if self.state_device.type == "cpu":
            crosses = what in ("acc", "lowp") and self.device.type == "cuda"  # to or from a GPU in each step
            return memory.zeros(numel, dtype, memory.COLORS[what], locked=self.device if crosses else None)
        return torch.zeros(numel, dtype=dtype, device=self.state_device)

    @property
    def sends_parameters(self) -> bool:
        """Whether the update makes new parameters on the host, and they lie on a device."""
        return self.state_device.type == "cpu" and self.home.type != "cpu"

    def parameters(self, numel: int) -> torch.Tensor:
        """A zeroed array of parameters, where they lie."""
        if self.home.type == "cpu":
            reached = self.device if self.device.type != "cpu" else None
            return memory.zeros(numel, self.dtype, memory.COLORS["params"], locked=reached)
        return torch.zeros(numel, dtype=self.dtype, device=self.home)

    def share(self, dtype: torch.dtype, what: str) -> torch.Tensor | Split:
        """A zeroed array of this rank's share in memory, [owned]: see `zeros`; divided between host and device where
        the plan says so."""
        owned, cut = self.plan.owned_elems, self.plan.host_elems
        if cut is None:
            return self.zeros(owned, dtype, what)
        return Split(self.zeros(cut, dtype, what), torch.zeros(owned - cut, dtype=dtype, device=self.device))

    def states(self, what: str) -> Array:
        """A zeroed fp32 array of masters or moments, in memory or in the tier."""
        if self.tier is not None:
            return self.tier.arrays[what]
        return self.share(torch.float32, what)

    @torch.no_grad()
    def _bind(self) -> None:
        """Moves the parameters' values (rank 0's) into the flat space, one at a time, so that at no time two whole
        copies exist in this process. Collective."""
        self._refuse_shared_memory()
        pieces = self._segments_by_param()
        failure: DiskError | None = None  # of this rank's disk; what comes after it is made for the other ranks alone
        for i, p in enumerate(self.trained):
            value = self.flats.value(self, p)
            try:
                self.flats.put(self, i, value, pieces[i])
                for s in pieces[i] if self.master is not None else ():
                    self.window(s).write(value[s.param_begin : s.param_begin + s.length])
            except DiskError as exc:
                failure = failure or exc
            p.data = self.flats.home(self, i, p)
        for _, p in self.frozen:
            try:
                self.flats.put_frozen(self, p)
            except DiskError as exc:
                failure = failure or exc
        if self.plan.updates_on_disk:
            together(self.group, failure)
        if self.plan.stage == 3 or self.master is not None:  # writes of others must be seen: to refuse, or to follow
            for p in self.trained:
                share(p)
        self.flats.spread(self)
        if self.flat_host is not None:  # without masters it is what the optimizer updates
            self.flat_host.copy_(self.flat[: self.flat_host.numel()])

    def _note_versions(self) -> None:
        """What was written so far is no stray write."""
        self.versions = [version_of(p) for p in self.trained]
        self._frozen_versions = {id(p): (n, p, version_of(p)) for n, p in self.frozen if self.watches(p)}

    def watches(self, p: torch.nn.Parameter) -> bool:
        """Whether writes to the frozen parameter `p` are stray ones: its memory is not this rank's alone."""
        raise NotImplementedError

    def _refuse_shared_memory(self) -> None:
        """Each parameter gets memory of its own, so two objects over the same memory, or over a part of it, would part:
        at least one of them is trained."""
        spans: list[tuple[str, int, int, bool, str]] = []
        for at, (name, p) in enumerate([*zip(self.names, self.trained), *self.frozen]):
            if p.numel() and not p.is_meta and not isinstance(p, Released):
                begin = p.data_ptr()  # of one with holes, where another may lie, the first element
                end = begin + (p.nbytes if p.is_contiguous() else p.itemsize)
                spans.append((str(p.device), begin, end, at >= len(self.trained), name))
        ends: dict[tuple[str, bool], tuple[int, int, str]] = {}  # (device, frozen) -> who has come furthest: end, begin
        for device, begin, end, frozen, name in sorted(spans):
            for others in (False,) if frozen else (False, True):
                far, first, other = ends.get((device, others), (0, 0, ""))
                if begin < far and begin == first:
                    raise ConfigError(
                        f"parameters '{other}' and '{name}' share memory but are different Parameter objects; tie them"
                        " by assigning the same Parameter to both modules"
                    )
                if begin < far:
                    raise ConfigError(
                        f"parameter '{name}' lies in a part of the memory of '{other}', and each gets memory of its"
                        " own: make it a view of that parameter in forward, or copy its values (clone)"
                    )
            ends[device, frozen] = max(ends.get((device, frozen), (0, 0, "")), (end, begin, name))

    def _segments_by_param(self) -> list[list[Segment]]:
        out: list[list[Segment]] = [[] for _ in self.trained]
        for s in self.plan.segments:
            out[s.param].append(s)
        return out

    def runs(self, group_of: Sequence[int]) -> list[tuple[int, int, int, int]]:
        """(optimizer group, flat_begin, owned_begin, length): the longest stretches of this rank's share that belong to
        one group, padding between parameters included (it is zero and stays zero)."""
        runs: list[list[int]] = []
        for s in self.plan.segments:
            g = group_of[s.param]
            if runs:
                last = runs[-1]
                gap = s.flat_begin - (last[1] + last[3])
                if last[0] == g and 0 <= gap < 64 and s.shard_begin - (last[2] + last[3]) == gap:
                    last[3] += gap + s.length
                    continue
            runs.append([g, s.flat_begin, s.shard_begin, s.length])
        return [(g, flat, owned, length) for g, flat, owned, length in runs]

    def owned_windows(self, owned: Array) -> list[tuple[Segment, Window]]:
        """(segment, its part of `owned`) for each of this rank's segments."""
        return [(s, Window(owned, s.shard_begin, s.length)) for s in self.plan.segments]

    def bump_versions(self) -> None:
        """Makes autograd see that the parameters were written (C writes, and other ranks' writes, are invisible to
        it)."""
        increment_version(self.trained)
        self._note_versions()

    def let_go(self, others: Container[int]) -> None:
        """Frozen parameters with an id in `others` are another engine's from now on: it trains them, and has moved
        them."""
        self.frozen = [(n, p) for n, p in self.frozen if id(p) not in others]
        self._frozen_versions = {i: row for i, row in self._frozen_versions.items() if i not in others}

    def stray_write(self) -> int:
        """The first parameter that was written since the last step by someone else, for `name_at`, or -1."""
        frozen = (
            len(self.trained) + i for i, (_, p, v) in enumerate(self._frozen_versions.values()) if p._version != v
        )
        return next(iter(self.changed()), next(frozen, -1))

    def name_at(self, index: int) -> str:
        """Name of the parameter at `index`: trained ones first, then frozen ones."""
        return (
            self.names[index]
            if index < len(self.trained)
            else list(self._frozen_versions.values())[index - len(self.trained)][0]
        )

    def frozen_write(self, among: set[int]) -> str | None:
        """Name of the first frozen parameter with an id in `among` that was written since the last step, or None."""
        return next((n for i, (n, p, v) in self._frozen_versions.items() if i in among and p._version != v), None)

    def changed(self) -> list[int]:
        """Indices of the trained parameters that were written since the last step by someone else, or whose memory was
        replaced (`p.data = tensor`)."""
        replaced = self._replaced()
        return [i for i, p in enumerate(self.trained) if version_of(p) != self.versions[i] or i in replaced]

    def was_written(self, index: int) -> bool:
        """Whether parameter `index` is one of these."""
        return version_of(self.trained[index]) != self.versions[index] or bool(self._replaced([index]))

    def _replaced(self, among: Iterable[int] | None = None) -> set[int]:
        """Indices of those (of `among`) whose memory was replaced."""
        raise NotImplementedError

    def take_in_replaced(self, among: Iterable[int] | None = None) -> None:
        """Stages 0 to 2: values that a user put in place of a parameter's memory (`p.data = tensor`,
        vector_to_parameters) go where that was; of all trained parameters, or of these."""
        raise NotImplementedError

    def recast(self, plan: Plan) -> None:
        """The same states in the dtype of `plan`, which differs from the present one in nothing else. This rank's part
        of the parameters comes from the fp32 masters (in fp32 the parameters are the masters), frozen parameters from
        their present values. Accumulators stay where they are; parameters stay the same objects. Whole replicas, or a
        fence, are the caller's. Collective."""
        raise UnsupportedError(
            f'the dtype of parameters does not change in {self.plan.mode} mode; remove "precision": "auto" and set'
            " bf16.enabled, or nothing for fp32"
        )

    @torch.no_grad()
    def master_from_params(self, indices: Sequence[int]) -> None:
        """fp32 masters of these parameters follow their 16-bit values where a user changed them; elsewhere they keep
        their precision. So does what the host's update makes for a device."""
        if not indices:
            return
        chosen = set(indices)
        for s in self.plan.segments if self.flat_host is not None else ():
            if s.param in chosen and (copy := self.host_copy(s.flat_begin, s.length)) is not None:
                copy.copy_(self.flat[s.flat_begin : s.flat_begin + copy.numel()])
        if self.master is None:
            return
        rounded = (
            requantized(self.plan, cast(torch.Tensor, self.master), self.dtype) if self.plan.parameters_as else None
        )
        for s in self.plan.segments:
            for part in self.window(s).parts() if s.param in chosen else ():
                at, n = part.begin - s.shard_begin, part.length
                master = part.read()
                now = Window(self.flat, s.flat_begin + at, n).read().to(master.device)
                was = master.to(now.dtype) if rounded is None else rounded[part.begin : part.begin + n]
                part.write(torch.where(was == now, master, now.float()))

    def gradients_end(self) -> None:
        """After a step: nobody reads the accumulators until the next pass overwrites them."""
        if self.lease is not None:
            self.lease.end()

    def make_reducer(self, wire: torch.dtype, pre_scale: float) -> TorchReducer:
        """The reducer of gradients over torch.distributed. Collective."""
        return TorchReducer(self.plan, self.device, self.acc, self.partial, wire, pre_scale, ranks_of(self.group))

    def inert(self, rows: Sequence[tuple[str, Any, str]]) -> list[tuple[str, Any, str]]:
        """Of the configuration's rows (key, value, reason) without effect on this device those that have none in this
        mode."""
        return list(rows)

    def keep_gathered(self) -> Whole:
        """See Engine.keep_gathered."""
        return Whole()

    def one_pass(self, trains: bool) -> AbstractContextManager[None]:
        """Around a batch of a pipeline, whose forwards and backwards alternate. trains: with gradients."""
        return nullcontext()

    @private.uncompiled
    def running(self) -> AbstractContextManager[None]:
        """Around a forward or backward of the model: behind it none of its modules runs, whatever has ended it."""
        return nullcontext()

    def meet(self) -> None:
        """Where gathers are collectives: returns when all ranks with the same part of the model are here, and takes
        part in the gathers of those that are not. Before this rank waits for a rank with another part."""

    def fail(self, error: BaseException) -> None:
        """No rank with the same part of the model waits for a gather with this one any more."""

    def break_off(self, why: str) -> None:
        """Until the next call parameters that lie on disk are not read, and this is why: some of what a step was to
        write is not there. "": they are there."""

    def settle(self) -> None:
        """Returns when nothing reads the parameters where they lie, on the host, for a device."""

    def close(self) -> None:
        """The engine ends; parameters stay readable."""
        if self.flat_host is not None:
            torch.cuda.synchronize(self.device)  # no copy from memory that is about to go is under way

    def frozen_value(self, p: torch.nn.Parameter) -> torch.Tensor:
        """The whole value of a parameter that is not trained, to be read before the next call. Collective."""
        return p.detach()

    def set_frozen(self, p: torch.nn.Parameter, value: torch.Tensor) -> None:
        """Writes a parameter that is not trained; the same value on all ranks, a fence is the caller's. Node-shared
        memory is written by the leader."""
        if not self.watches(p) or self.group.leader:
            p.data.copy_(value)

    # ---- whole parameters: what access.py and gathered.py ask for ----------------------------------------------------
    def owners(self, index: int) -> list[tuple[int, Segment]]:
        """(rank, segment) of every piece of parameter `index`, in the order of ranks; at stage 0, where everyone owns
        all, only this rank's."""
        if self._owners is None:
            plan = self.plan
            table: list[list[tuple[int, Segment]]] = [[] for _ in self.trained]
            for rank in [plan.rank] if plan.own_all else range(plan.world):
                for s in plan.segments if rank == plan.rank else plan.layout.segments(self.group.part_of(rank)):
                    table[s.param].append((rank, s))
            self._owners = table
        return self._owners[index]

    def window(self, s: Segment) -> Window:
        """[s.length] fp32: what the optimizer updates for this rank's segment `s`; the master, or the parameter
        itself."""
        if self.master is not None:
            return Window(self.master, s.shard_begin, s.length)
        copy = self.host_copy(s.flat_begin, s.length)
        return Window(self.flat, s.flat_begin, s.length) if copy is None else Window(copy)

    def host_copy(self, begin: int, n: int) -> torch.Tensor | None:
        """[n] elements of the flat space as the host's update makes them, where it makes them for a device."""
        host = self.flat_host
        return None if host is None or begin >= host.numel() else host[begin : begin + n]

    def follow_piece(self, s: Segment) -> None:
        """After `window(s)` was written: this rank's part of the flat space, and what the host's update makes of it for
        a device, follow."""
        copy = self.host_copy(s.flat_begin, s.length)
        if copy is not None and self.master is not None:
            self.window(s).copy_to(copy)
        if copy is not None or self.master is not None:
            self.window(s).copy_to(self.flat[s.flat_begin : s.flat_begin + s.length])

    def piece(self, s: Segment) -> torch.Tensor:
        """The same as a view. UnsupportedError if it lies on disk."""
        return self.window(s).view

    # ---- gradients ---------------------------------------------------------------------------------------------------
    def remake_norm(self) -> None:
        """`partial`, of the accumulators as they are."""
        self.partial.copy_(squares(self.acc))

    def squares_of(self, params: Collection[int]) -> float:
        """Sum of squares of the accumulated gradients of some trained parameters, as far as they are owned here."""
        parts = (
            self._gradients(at, min(PART, s.shard_begin + s.length - at))
            for s in self.plan.segments
            if s.param in params
            for at in range(s.shard_begin, s.shard_begin + s.length, PART)
        )
        return math.fsum(float(part.double().square().sum()) for part in parts)

    def _gradients(self, begin: int, n: int) -> torch.Tensor:
        """[n] what is accumulated there, to be read."""
        return self.acc[begin : begin + n]

    def first_bad_gradient(self) -> int:
        """The first owned element whose accumulated gradient is not finite, or -1."""
        begin = 0
        for part in parts_of(self.acc):
            if (found := _first_not_finite(part)) >= 0:
                return begin + found
            begin += part.numel()
        return -1

    # ---- where the update finds what it walks over -------------------------------------------------------------------
    @property
    def acc_address(self) -> int:
        """Element 0 of the accumulators."""
        return self.acc.data_ptr()

    @property
    def lowp_address(self) -> int:
        """Where the update of the host writes parameters: element 0 of the flat space."""
        return (self.flat if self.flat_host is None else self.flat_host).data_ptr()

    @property
    def flat_on_disk(self) -> Addressed | None:
        """The flat space, where it lies on disk."""
        return None

    def walk(self) -> Walk | None:
        """How the update brings the parameters to `lowp_address` and the gradients to `acc_address`, cell after cell;
        None: they are there."""
        return None

    def full_param(self, index: int) -> torch.Tensor:
        """[numel] in the plan's dtype: the whole value that the model computes with, to be read before the next call.
        Collective."""
        raise NotImplementedError

    def is_available(self, p: torch.nn.Parameter) -> bool:
        """Whether `p` can be read now without a gather."""
        return not isinstance(p, Released)

    @torch.no_grad()
    def follow(self, index: int) -> None:
        """After the owners wrote `piece`s of parameter `index`: what the model computes with follows, on every rank.
        Not for parameters that reach other nodes quantised. Collective."""
        self.flats.follow(self, index)
        increment_version([self.trained[index]])
        self.versions[index] += 1  # this write is no stray one, and a stray one stays seen

    def whole(self, params: Params, writer: int | None) -> Whole:
        """What makes `params` whole for a while, for rank `writer` to write (None: nobody writes). Masters are the
        caller's part."""
        raise NotImplementedError


def _first_not_finite(values: torch.Tensor) -> int:
    """The index of the first, or -1."""
    if values.device.type == "cpu":
        index = ctypes.c_int64()
        call("dc_find_nonfinite", values.data_ptr(), code(values.dtype), values.numel(), ctypes.byref(index))
        return index.value
    for at in range(0, values.numel(), PART):  # what isfinite takes beside a whole accumulator may not be there
        bad = ~torch.isfinite(values[at : at + PART])
        if bad.any():
            return at + int(bad.to(torch.uint8).argmax())
    return -1


def ranks_of(group: Group) -> Sequence[int] | None:
    """Those of the default group that talk over torch.distributed; None: all of them."""
    return group.ranks if group.transport == "c10d" else None


def leases_gradients(plan: Plan, accumulates: bool) -> bool:
    """Whether accumulators borrow their memory from the heap between backward and step: where the C core's reducer
    fills them. Not where they stay through the next micro-batch's forward: among its activations they would cut the
    heap into smaller holes (8 % more memory).
    """
    return not accumulates and plan.core_reduces and not plan.gradients_on and memory.heap_kept()
