"""The process group of the backend "deepc": torch.distributed.ProcessGroup with the C core's collectives on CPU
tensors.

A group of one node runs everything that c10d has on dense CPU tensors in the C core (shared.py). One that spans nodes
runs its collectives on a Hierarchy (internode/hierarchy.py) and its messages on Gloo. Gloo (and NCCL for CUDA) is
registered beneath it as torch expects, and takes other devices and layouts. Which of them carries a call is decided
only from what is equal on all ranks (operation, device, layout, number of tensors), never from what may differ
(contiguity, values).
Before a collective of CPU tensors goes to Gloo the ranks of a one-node group meet in a fence of the core, so that a
mismatch or a death is told there as well.

The communicator is opened with the group, which is collective already: a first send between two ranks can't wait for
the others.

Asynchronous calls run in the group's progress thread or, with DEEPC_PROGRESS=inline, at once (progress.py). Inline an
error is raised by the call itself, in the thread by Work.wait() and by the future. A synchronous call waits for all
asynchronous ones before it.

What a call costs here besides the C core's work: the five calls that training makes have a fast path for one strided,
contiguous CPU tensor and no async_op. dist.all_reduce of 4 KiB, one rank, microseconds of CPU time, best of 40 x 500
calls on a machine that others used:
    first form: options copied, detach(), reduceOp hashed, a Work made, all frames walked, checks twice     11.6
    of which torch's own dist.all_reduce around an allreduce() that does nothing                             1.7
    of which the C call with its seven arguments converted                                                   0.9
    fast path                                                                                                5.2
    barrier 3.4, broadcast 4.8, all_gather_single 4.4, reduce_scatter_single 5.7; general path, asynchronous  12
Two ranks pinned to two cores, same machine: 7.0 to 9.0, of which the core's 2.2 to 2.5 (smallest of 100 and 20 batches
of 100). What gave it: comparing reduceOp with SUM (0.3) instead of hashing its enum (0.9); one finished Work for all
synchronous calls (0.6); data_ptr() of the tensor itself, no detach() or view (0.7); the caller's line by (code,
instruction) and one frame at a known depth (Caller; f_lineno alone is 2.4); dtype tables of tuples; tensor checks
once (1.0). Tried and dropped: ctypes without argtypes (c_void_p objects cost as much as the conversion), PyDLL (0.04
less, but would keep the GIL while waiting). all_gather_into_tensor and reduce_scatter_tensor cost 1.9 more since torch
2.13 calls them deprecated: its warning is looked up at every call."""

from __future__ import annotations

import contextlib
import datetime
import logging
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...core import env
from ...core.foreign import private
from ...core.lib import C, check
from ...core.telemetry.caller import caller_line
from ...errors import ArgumentError, CommError, DeepcError, UnsupportedError
from .. import shared
from ..calls import backend_method
from ..failures import meaning, shortened
from ..place import Places, discover
from .fast import FastPaths
from .progress import Progress, choose, make_progress
from .tensors import (
    adjacent,
    are_fake,
    as_real,
    blocks_of,
    dense_of,
    joined,
    limit_of,
    local_of,
    on_core,
    options_of,
    overlap,
    reduce_options,
    reduction_of,
    room_for,
    store_into,
)
from .works import Carried, Done, Message, Messages, Pending, Several, stop_moving

_log = logging.getLogger("deepc")

# Staging per rank: the core cuts calls into chunks of at most 512 KiB; a second and third slot let a rank fill the next
# chunk while peers read. Sub-groups are often many and small. So 1.5 MiB a rank for the default group, 0.5 MiB for
# others.
DEFAULT_STAGING, SUBGROUP_STAGING = (512 << 10, 3), (256 << 10, 2)  # slot bytes, slots
SPARE_BYTES = 32 << 20  # a buffer of at most so much is kept for lists of tensors
PREMUL_TAG = 1 << 33  # of a premultiplied sum, so that a rank that calls a plain one is told
EXIT_GRACE_S = 5.0  # that unfinished asynchronous calls get when the interpreter ends

# Tags of the fences before calls that Gloo carries.
_FENCES = {
    name: 1000 + i
    for i, name in enumerate(
        (
            "all_reduce",
            "all_gather",
            "reduce_scatter",
            "broadcast",
            "all_to_all",
            "reduce",
            "gather",
            "scatter",
            "all_gather_coalesced",
            "reduce_scatter_coalesced",
            "all_reduce_coalesced",
            "all_gather_into_tensor",
            "reduce_scatter_tensor",
            "all_to_all_single",
        )
    )
}

_DONE = Done(())
_c10d = private.c10d
_AllreduceOptions, _BroadcastOptions, _BarrierOptions = (
    _c10d.AllreduceOptions,
    _c10d.BroadcastOptions,
    _c10d.BarrierOptions,
)
_AllgatherOptions, _ReduceScatterOptions = _c10d.AllgatherOptions, _c10d.ReduceScatterOptions
_ReduceOptions, _GatherOptions, _ScatterOptions = (
    _c10d.ReduceOptions,
    _c10d.GatherOptions,
    _c10d.ScatterOptions,
)
_AllToAllOptions = _c10d.AllToAllOptions
_barrier = C.dc_barrier

_groups: weakref.WeakSet[DeepcProcessGroup] = weakref.WeakSet()


def leave_all() -> None:
    """At interpreter exit: closes what is open."""
    groups = [g for g in _groups if not g.closed]
    for group in groups:
        group.close(EXIT_GRACE_S)
    stop_moving()
    default = dist.group.WORLD if dist.is_initialized() else None
    if default in groups and not default.has_nccl:  # NCCL's shutdown may wait for peers that are gone
        dist.destroy_process_group()


class DeepcProcessGroup(dist.ProcessGroup, FastPaths):
    """See the module. Made by torch.distributed only. Types: torch calls its methods in several forms (options, or a
    root and an operation in their place), which its stub has as overloads; here they are one method each, hence the
    ignored overrides."""

    def __init__(self, options: Any, backend_options: Any) -> None:
        # torch lets Python subclasses use this form only
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        self._store, self._rank, self._size, self._timeout = (
            options.store,
            options.group_rank,
            options.group_size,
            options.timeout,
        )
        ranks = list(options.global_ranks_in_group)
        self._is_default, self._global_ranks = not ranks, ranks or list(range(self._size))
        self._label = "default_pg" if self._is_default else f"pg {options.group_id}"
        self._comm: Any = None  # shared.Comm, Hierarchy or None
        self._quick: shared.Comm | None = None  # for the fast paths: an open communicator of one node
        self._progress: Progress | None = None
        self._batch: list[dist.Work] | None = None
        self._spare: list[torch.Tensor] = []
        self._small, self._even = None, {}  # of FastPaths
        self._messages = Messages()
        self.closed, self.has_nccl = False, False
        # A group that is made again after its end may get the same store under the same name (torchrun's agent keeps
        # one for all that a worker makes): what the one before has left there would be taken for the peers' of now.
        made = self._store.add(f"deepc/made by {self._rank}", 1)
        self._meeting = dist.PrefixStore(f"{made}/", self._store)
        self._register_inner(options, backend_options)
        self._open()
        _groups.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> DeepcProcessGroup:
        """Copies of a module that refers to its ranks (an average with as_module) talk to the same ones."""
        return self

    def _register_inner(self, options: Any, backend_options: Any) -> None:
        gloo = dist.ProcessGroupGloo(
            dist.PrefixStore("gloo/", self._meeting), self._rank, self._size, timeout=self._timeout
        )
        gloo.options.global_ranks_in_group = list(options.global_ranks_in_group)
        gloo.options.group_name = options.group_id
        gloo._set_sequence_number_for_group()
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        if torch.cuda.is_available() and dist.is_nccl_available():
            settings = backend_options
            if settings is None:
                settings = dist.ProcessGroupNCCL.Options()
                settings.is_high_priority_stream = False
            settings._timeout = self._timeout
            settings.global_ranks_in_group = list(options.global_ranks_in_group)
            settings.group_name = options.group_id
            nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl/", self._meeting), self._rank, self._size, settings)
            nccl._set_sequence_number_for_group()
            self._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)
            self.has_nccl = True
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)

    # ---- the communicator --------------------------------------------------------------------------------------------
    def _open(self) -> None:
        store = dist.PrefixStore("deepc/", self._meeting)
        places = discover(store, self._rank, self._size)
        if places.topology.count > 1:
            self._comm = self._open_hierarchy(store, places)
            if self._comm is not None:
                self._progress = make_progress(self._label, self._size, env.text("DEEPC_PROGRESS"))
            return
        slot_bytes, slots = DEFAULT_STAGING if self._is_default else SUBGROUP_STAGING
        comm = shared.open_comm(
            store,
            self._rank,
            self._size,
            label=self._label,
            timeout=self._timeout,
            slot_bytes=slot_bytes,
            slots=slots,
            global_ranks=self._global_ranks,
            places=places,
        )
        mode = choose(comm)
        _log.debug("group %s: %d ranks of one node, asynchronous calls run %s", self._label, self._size, mode)
        self._progress = make_progress(self._label, self._size, mode)
        self._comm = self._quick = comm

    @property
    def live_comm(self) -> shared.Comm | None:
        """The communicator of a group whose ranks are all on one node, whatever is in progress; else None."""
        return self._quick

    @property
    def open_comm(self) -> Any:
        """The communicator, a shared.Comm or Hierarchy, whatever is in progress; None after the end."""
        return self._comm

    @property
    def messages_of_gloo(self) -> Any:
        """Gloo's group beneath, if that carries this one's messages."""
        return None if self._quick is not None or self.closed else self._get_backend(torch.device("cpu"))

    @property
    def node_comm(self) -> shared.Comm | None:
        """The communicator of a group whose ranks are all on one node, with nothing of it in progress; else None."""
        if self._progress is not None:
            self._progress.drain()
        return self._quick

    def _open_hierarchy(self, store: dist.Store, places: Places) -> Any:
        from ..internode.hierarchy import open_hierarchy

        try:
            return open_hierarchy(
                store,
                self._rank,
                self._size,
                label=self._label,
                timeout=self._timeout,
                global_ranks=self._global_ranks,
                places=places,
            )
        except UnsupportedError as exc:
            _log.info(
                "group %s spans %d nodes: its collectives on CPU tensors run on Gloo (%s)",
                self._label,
                places.topology.count,
                exc,
            )
            return None

    def _core(self, *lists: Sequence[torch.Tensor]) -> Any:
        """What carries a collective of these tensors: a shared.Comm or Hierarchy; None: the backend beneath."""
        if not on_core(*lists):
            return None
        if self.closed:
            raise CommError(f"process group {self._label} has been destroyed")
        return self._comm

    def _fence(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """Before Gloo carries a collective. Not for devices: it would wait for nothing that they do."""
        if self._quick is not None and tensors and all(t.is_cpu for t in tensors):
            if self._progress is not None:
                self._progress.drain()
            self._quick.barrier(_FENCES[name], note=f" ({name}, on Gloo)")

    def get_group_store(self) -> dist.Store:
        store: dist.Store = self._store
        return store

    def _inner(self, device: torch.device, *names: str) -> Callable[..., Any]:
        """The bound method of the backend beneath (Gloo, NCCL), by the first of its names that this torch has. Never
        through super(): torch's C++ base calls back into the overrides of this class, under names that change between
        versions."""
        backend = self._get_backend(device)
        for name in names:
            method = getattr(backend, name, None)
            if method is not None:
                return backend_method(names[0], method, device, self._size)
        raise UnsupportedError(f"torch {torch.__version__}: {type(backend).__name__} has no {names[0]}")

    def close(self, grace_s: float | None = None) -> None:
        """Leaves the communicator. Asynchronous calls that are not finished get grace_s (default: their own time-outs),
        then they are aborted; calls that come later raise CommError."""
        self.closed = True
        comm, self._comm, self._quick = self._comm, None, None
        progress = self._progress
        if progress is not None and not progress.close(-1 if grace_s is None else grace_s) and comm is not None:
            comm.abort("the process group was destroyed before its asynchronous calls were finished")
        self._messages.flush(grace_s)
        if progress is not None:
            progress.join()
        if comm is not None:
            comm.close()

    def shutdown(self) -> None:
        self.close()
        super().shutdown()

    def abort(self) -> None:
        """Breaks the communicator on every rank: waiting calls, unfinished asynchronous ones and later ones raise
        AbortedError."""
        comm = self._comm
        if comm is not None:
            comm.abort("ProcessGroup.abort()")
        super().abort()

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._timeout = timeout
        if self._comm is not None and hasattr(self._comm, "set_timeout"):
            self._comm.set_timeout(timeout)
        super().set_timeout(timeout)

    def split_group(
        self,
        new_ranks: Any,
        timeout: datetime.timedelta | None = None,
        opts: Any = None,
        group_name: Any = None,
        group_desc: Any = None,
        device_types: Any = None,
    ) -> Any:
        """A new group of these group ranks, made afresh (torch's own splitting of such a class crashes). None for ranks
        outside."""
        if self._rank not in new_ranks:
            return None
        name = group_name or f"{self._label}/split/{','.join(map(str, new_ranks))}"

        class options:  # what torch hands to a backend's maker
            timeout: datetime.timedelta
            store = dist.PrefixStore(f"{name}/", self._store)
            group_rank, group_size, group_id = list(new_ranks).index(self._rank), len(new_ranks), name
            global_ranks_in_group = [self._global_ranks[r] for r in new_ranks]

        options.timeout = self._timeout if timeout is None else timeout
        group = DeepcProcessGroup(
            options, opts if self.has_nccl and isinstance(opts, dist.ProcessGroupNCCL.Options) else None
        )
        group._set_group_name(name)  # type: ignore[arg-type]  # torch's GroupName is a str
        group._set_group_desc(group_desc or "undefined")
        return group

    splitGroup = split_group

    # ---- running a call ----------------------------------------------------------------------------------------------
    def _what(self, name: str, tensors: Sequence[torch.Tensor]) -> str:
        shapes = ", ".join(f"{t.dtype} {tuple(t.shape)}" for t in tensors[:3])
        if len(tensors) > 3:
            shapes += f" and {len(tensors) - 3} more"
        return f"{name}({shapes}) on {self._label}"

    def _explain(self, exc: BaseException, name: str, tensors: Sequence[torch.Tensor], where: bytes) -> None:
        """Adds to the text of one of our errors what this rank had called."""
        if isinstance(exc, DeepcError):
            at = f" at {where.decode(errors='replace')}" if where else ""
            exc.args = (f"{exc} [in {self._what(name, tensors)}{at}]",)

    def _failed(self, status: int, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """Raises the error of a fast path."""
        try:
            check(status)
        except DeepcError as exc:
            self._explain(exc, name, tensors, caller_line(2))
            raise

    def _run(
        self,
        name: str,
        opts: Any,
        core: Any,
        tensors: Sequence[torch.Tensor],
        result: Sequence[torch.Tensor],
        job: Callable[[], None],
    ) -> dist.Work:
        """Runs job() now, or in the progress thread if the call is asynchronous. tensors: for messages. result: what
        the Work holds."""
        if are_fake(tensors):
            return Done(result)
        limit, progress = limit_of(opts), self._progress
        if limit is not None and hasattr(core, "set_timeout"):
            job = self._limited(core, limit, job)
        if progress is not None and getattr(opts, "asyncOp", True) and progress.takes():
            where = caller_line(2)
            work: dist.Work = progress.submit(
                lambda: self._explained(job, name, tensors, where), result, lambda: self._what(name, tensors), where
            )
        else:
            if progress is not None:
                progress.drain()
            try:
                job()
            except DeepcError as exc:
                self._explain(exc, name, tensors, caller_line(2))
                raise
            work = Done(result)
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _explained(self, job: Callable[[], None], name: str, tensors: Sequence[torch.Tensor], where: bytes) -> None:
        try:
            job()
        except DeepcError as exc:
            self._explain(exc, name, tensors, where)
            raise

    def _limited(self, core: Any, limit: datetime.timedelta, job: Callable[[], None]) -> Callable[[], None]:
        def limited() -> None:
            core.set_timeout(limit)
            try:
                job()
            finally:
                with contextlib.suppress(DeepcError):  # a broken communicator has no further calls
                    core.set_timeout(self._timeout)

        return limited

    @contextlib.contextmanager
    def _scratch(self, numel: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """A flat buffer for one call; small ones are used again, because touching fresh memory costs more than copying
        it."""
        nbytes = numel * dtype.itemsize
        try:
            kept = self._spare.pop()
        except IndexError:
            kept = None
        if kept is None or kept.numel() < nbytes:
            kept = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        try:
            yield kept[:nbytes].view(dtype)
        finally:
            if kept.numel() <= SPARE_BYTES and not self._spare:
                self._spare.append(kept)

    # ---- all_reduce, reduce ------------------------------------------------------------------------------------------
    def _prepare(
        self, core: Any, reduce_op: Any, dtypes: Sequence[torch.dtype]
    ) -> tuple[str, Callable[[torch.Tensor], torch.Tensor], dict[str, int]]:
        """Checks the reduction. Returns (operation, prepare, further arguments of the core's method); prepare(dense
        input) is the tensor to be reduced: itself, or for a premultiplied sum a scaled copy, in fp32 for 16-bit types,
        so that only the result is rounded.
        """
        op, factor = reduction_of(reduce_op)
        for dtype in dtypes:
            shared.reduction(dtype.to_real() if dtype.is_complex and op in ("sum", "avg") else dtype, op)
            if factor is not None and not (dtype.is_floating_point or dtype.is_complex):
                raise ArgumentError(f"a premultiplied sum of {dtype}: only floating types can be scaled")
        if factor is None:
            return op, lambda dense: dense, {}

        def scaled(dense: torch.Tensor) -> torch.Tensor:
            wide = torch.float32 if dense.dtype in (torch.float16, torch.bfloat16) else dense.dtype
            return torch.mul(
                dense.detach().to(wide), factor.detach() if isinstance(factor, torch.Tensor) else factor
            ).to(wide)

        return op, scaled, {"tag": PREMUL_TAG}

    def _all_reduce(self, name: str, tensors: Sequence[torch.Tensor], opts: Any) -> dist.Work | None:
        """None if the backend beneath has to do it."""
        core = self._core(tensors)
        if core is None:
            return None
        tensors = [local_of(t) for t in tensors]
        op, prepare, more = self._prepare(core, opts.reduceOp, [t.dtype for t in tensors])

        def job() -> None:
            for t in tensors:
                dense = prepare(dense_of(t))
                core.all_reduce(as_real(dense, op), op, **more)
                store_into(t, dense)

        return self._run(name, opts, core, tensors, tensors, job)

    def allreduce(  # type: ignore[override]
        self,
        tensors: Any,
        opts: Any = None,
        op: Any = None,
        timeout: datetime.timedelta | None = None,
    ) -> Any:
        if opts.__class__ is _AllreduceOptions and not opts.asyncOp and len(tensors) == 1:
            core = self._idle()
            if core is not None and self._quick_all_reduce(core, tensors, opts):
                return _DONE
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        opts = reduce_options(opts, _AllreduceOptions, op, timeout=timeout)
        work = self._all_reduce("all_reduce", tensors, opts)
        if work is None:
            self._fence("all_reduce", tensors)
            work = self._inner(tensors[0].device, "allreduce")(tensors, opts)
        return work

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        opts = options_of(opts, _c10d.AllreduceCoalescedOptions)
        work = self._all_reduce("all_reduce_coalesced", tensors, opts)
        if work is None:
            self._fence("all_reduce_coalesced", tensors)
            work = self._inner(tensors[0].device, "allreduce_coalesced")(tensors, opts)
        return work

    def reduce(  # type: ignore[override]
        self,
        tensors: Any,
        opts: Any = None,
        op: Any = None,
        timeout: datetime.timedelta | None = None,
        root: int | None = None,
    ) -> Any:
        """The result lies on the root alone; other ranks' tensors keep their values."""
        if opts.__class__ is _ReduceOptions and not getattr(opts, "asyncOp", True) and len(tensors) == 1:
            core = self._idle()
            if core is not None and self._quick_reduce(core, tensors, opts):
                return _DONE
        if isinstance(tensors, torch.Tensor):  # reduce(tensor, root, op)
            tensors = [tensors]
            if isinstance(opts, int):
                root, opts = opts, None
        opts = reduce_options(opts, _c10d.ReduceOptions, op, rootRank=root, timeout=timeout)
        core = self._core(tensors)
        if core is None:
            self._fence("reduce", tensors)
            return self._inner(tensors[0].device, "reduce")(tensors, opts)
        tensors = [local_of(t) for t in tensors]
        op, prepare, more = self._prepare(core, opts.reduceOp, [t.dtype for t in tensors])
        to = opts.rootRank

        def job() -> None:
            for t in tensors:
                dense = prepare(dense_of(t))
                core.reduce(as_real(dense, op), to, op, **more)
                if self._rank == to:
                    store_into(t, dense)

        return self._run("reduce", opts, core, tensors, tensors, job)

    # ---- all_gather --------------------------------------------------------------------------------------------------
    def _check_parts(self, name: str, parts: Sequence[torch.Tensor], whole: torch.Tensor, of: str) -> None:
        if len(parts) != self._size or any(t.dtype != whole.dtype or t.numel() != whole.numel() for t in parts):
            raise ArgumentError(
                f"{name}: expected {self._size} tensors with the {of}'s {whole.numel()} elements of {whole.dtype}, got "
                f"{[(t.numel(), str(t.dtype)) for t in parts]}"
            )

    def _check_ratio(self, name: str, large: torch.Tensor, small: torch.Tensor) -> None:
        if large.dtype != small.dtype or large.numel() != small.numel() * self._size:
            raise ArgumentError(
                f"{name}: {large.numel()} elements of {large.dtype} against {small.numel()} of {small.dtype}; expected"
                f" one dtype and {self._size} times as many, one part per rank"
            )

    def _gather_tensors(
        self, name: str, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any
    ) -> dist.Work | None:
        core = self._core(outputs, inputs)
        if core is None:
            return None
        outputs, inputs = [local_of(t) for t in outputs], [local_of(t) for t in inputs]
        for output, tensor in zip(outputs, inputs):
            self._check_ratio(name, output, tensor)

        def job() -> None:
            for output, tensor in zip(outputs, inputs):
                room = room_for(output)
                core.all_gather(room, self._apart(tensor, room))
                store_into(output, room)

        return self._run(name, opts, core, inputs, outputs, job)

    def _apart(self, tensor: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """What this rank gives for a gathered `output`, dense: in it only as this rank's part."""
        dense = dense_of(tensor)
        return dense.detach().clone() if overlap(dense, output, self._rank) else dense

    def _room_apart(self, output: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Room for what this rank gets of `given`, which is dense: in it only as this rank's part."""
        room = room_for(output)
        return torch.empty_like(room) if overlap(room, given, self._rank) else room

    def _spread(self, outs: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
        for out, part in zip(outs, flat.split([t.numel() for t in outs])):
            store_into(out, part)

    def _gather_lists(
        self, name: str, lists: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any
    ) -> dist.Work | None:
        everything = [t for outs in lists for t in outs]
        core = self._core(everything, inputs)
        if core is None:
            return None
        for outs, tensor in zip(lists, inputs):
            self._check_parts(name, outs, tensor, "input")
        inputs = [local_of(t) for t in inputs]

        def job() -> None:
            for outs, tensor in zip(lists, inputs):
                flat = adjacent(outs)
                if flat is not None:
                    core.all_gather(flat, self._apart(tensor, flat))
                    continue
                with self._scratch(self._size * tensor.numel(), tensor.dtype) as flat:
                    core.all_gather(flat, dense_of(tensor))
                    self._spread(outs, flat)

        return self._run(name, opts, core, inputs, everything, job)

    def allgather(  # type: ignore[override]
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: datetime.timedelta | None = None,
    ) -> Any:
        if isinstance(input_tensors, torch.Tensor):  # allgather(list, tensor)
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        opts = options_of(opts, _AllgatherOptions, timeout=timeout)
        work = self._gather_lists("all_gather", output_tensors, input_tensors, opts)
        if work is None:
            self._fence("all_gather", input_tensors)
            work = self._inner(input_tensors[0].device, "allgather")(output_tensors, input_tensors, opts)
        return work

    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[torch.Tensor]], input_list: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        """output_lists[r][i] = input i of rank r."""
        opts = options_of(opts, _AllgatherOptions)
        by_input = [list(outs) for outs in zip(*output_lists)]
        if len(output_lists) != self._size or len(by_input) != len(input_list):
            raise ArgumentError(
                f"all_gather_coalesced: expected {self._size} lists of {len(input_list)} outputs, got lists of "
                f"{[len(o) for o in output_lists]}"
            )
        work = self._gather_lists("all_gather_coalesced", by_input, input_list, opts)
        if work is None:
            self._fence("all_gather_coalesced", input_list)
            work = self._inner(input_list[0].device, "allgather_coalesced")(output_lists, input_list, opts)
        return work

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        if opts.__class__ is _AllgatherOptions and not opts.asyncOp:
            core = self._idle()
            if core is not None and self._quick_all_gather(core, output, input, opts):
                return _DONE
        opts = options_of(opts, _AllgatherOptions)
        work = self._gather_tensors("all_gather_into_tensor", [output], [input], opts)
        if work is None:
            self._fence("all_gather_into_tensor", [input])
            work = self._inner(input.device, "_allgather_base", "all_gather_single")(output, input, opts)
        return work

    all_gather_single = _allgather_base  # since torch 2.13

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        opts = options_of(opts, _AllgatherOptions)
        work = self._gather_tensors("all_gather_into_tensor_coalesced", outputs, inputs, opts)
        if work is None:
            self._fence("all_gather_coalesced", inputs)
            gather = self._inner(inputs[0].device, "_allgather_base", "all_gather_single")
            work = Several([gather(output, tensor, opts) for output, tensor in zip(outputs, inputs)])
        return work

    all_gather_single_coalesced = allgather_into_tensor_coalesced  # type: ignore[assignment]

    # ---- reduce_scatter ----------------------------------------------------------------------------------------------
    def _scatter_tensors(
        self, name: str, outputs: Sequence[torch.Tensor], inputs: Sequence[Any], opts: Any
    ) -> dist.Work | None:
        """inputs: per output one tensor of all ranks' parts, or a list of them."""
        lists = [[t] if isinstance(t, torch.Tensor) else t for t in inputs]
        core = self._core(outputs, *lists)
        if core is None:
            return None
        outputs, lists = [local_of(t) for t in outputs], [[local_of(t) for t in parts] for parts in lists]
        for output, given, parts in zip(outputs, inputs, lists):
            if isinstance(given, torch.Tensor):
                self._check_ratio(name, given, output)
            else:
                self._check_parts(name, parts, output, "output")
        op, prepare, more = self._prepare(core, opts.reduceOp, [t.dtype for t in outputs])

        def job() -> None:
            for output, parts in zip(outputs, lists):
                whole = prepare(dense_of(parts[0]) if len(parts) == 1 else joined(parts))
                room = (
                    self._room_apart(output, whole)
                    if whole.dtype == output.dtype
                    else torch.empty(output.shape, dtype=whole.dtype, device="cpu")
                )
                core.reduce_scatter(as_real(room, op), as_real(whole, op), op, **more)
                store_into(output, room)

        return self._run(name, opts, core, outputs, outputs, job)

    def reduce_scatter(  # type: ignore[override]
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        op: Any = None,
        timeout: datetime.timedelta | None = None,
    ) -> Any:
        if isinstance(output_tensors, torch.Tensor):  # reduce_scatter(tensor, list, op)
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        opts = reduce_options(opts, _ReduceScatterOptions, op, timeout=timeout)
        work = self._scatter_tensors("reduce_scatter", output_tensors, input_tensors, opts)
        if work is None:
            self._fence("reduce_scatter", output_tensors)
            work = self._inner(output_tensors[0].device, "reduce_scatter")(output_tensors, input_tensors, opts)
        return work

    def _reduce_scatter_base(
        self,
        outputTensor: torch.Tensor,
        inputTensor: torch.Tensor,
        opts: Any = None,
    ) -> Any:
        if opts.__class__ is _ReduceScatterOptions and not opts.asyncOp:
            core = self._idle()
            if core is not None and self._quick_reduce_scatter(core, outputTensor, inputTensor, opts):
                return _DONE
        opts = options_of(opts, _ReduceScatterOptions)
        work = self._scatter_tensors("reduce_scatter_tensor", [outputTensor], [inputTensor], opts)
        if work is None:
            self._fence("reduce_scatter_tensor", [inputTensor])
            work = self._inner(inputTensor.device, "_reduce_scatter_base", "reduce_scatter_single")(
                outputTensor, inputTensor, opts
            )
        return work

    reduce_scatter_single = _reduce_scatter_base  # since torch 2.13

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        opts = options_of(opts, _ReduceScatterOptions)
        work = self._scatter_tensors("reduce_scatter_tensor_coalesced", outputs, inputs, opts)
        if work is None:
            self._fence("reduce_scatter_coalesced", inputs)
            scatter = self._inner(inputs[0].device, "_reduce_scatter_base", "reduce_scatter_single")
            work = Several([scatter(output, tensor, opts) for output, tensor in zip(outputs, inputs)])
        return work

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced  # type: ignore[assignment]

    # ---- broadcast, gather, scatter ----------------------------------------------------------------------------------
    def broadcast(  # type: ignore[override]
        self,
        tensors: Any,
        opts: Any = None,
        timeout: datetime.timedelta | None = None,
        root: int | None = None,
    ) -> Any:
        if opts.__class__ is _BroadcastOptions and not opts.asyncOp and len(tensors) == 1:
            core = self._idle()
            if core is not None and self._quick_broadcast(core, tensors, opts):
                return _DONE
        if isinstance(tensors, torch.Tensor):  # broadcast(tensor, root)
            tensors = [tensors]
            if isinstance(opts, int):
                root, opts = opts, None
        opts = options_of(opts, _BroadcastOptions, rootRank=root, timeout=timeout)
        core = self._core(tensors)
        if core is None:
            self._fence("broadcast", tensors)
            return self._inner(tensors[0].device, "broadcast")(tensors, opts)
        tensors, source = [local_of(t) for t in tensors], opts.rootRank

        def job() -> None:
            for t in tensors:
                dense = dense_of(t)
                core.broadcast(dense, source)
                if self._rank != source:
                    store_into(t, dense)

        return self._run("broadcast", opts, core, tensors, tensors, job)

    def gather(  # type: ignore[override]
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: datetime.timedelta | None = None,
        root: int | None = None,
    ) -> Any:
        """output_tensors: on the root one list with a tensor per rank, elsewhere empty."""
        if opts.__class__ is _GatherOptions and not getattr(opts, "asyncOp", True) and len(input_tensors) == 1:
            core = self._idle()
            if core is not None and self._quick_gather(core, output_tensors, input_tensors, opts):
                return _DONE
        if isinstance(input_tensors, torch.Tensor):  # gather(list, tensor, root)
            output_tensors, input_tensors = [output_tensors] if output_tensors else [], [input_tensors]
            if isinstance(opts, int):
                root, opts = opts, None
        opts = options_of(opts, _c10d.GatherOptions, rootRank=root, timeout=timeout)
        core = self._core(input_tensors)
        if core is None:
            self._fence("gather", input_tensors)
            return self._inner(input_tensors[0].device, "gather")(output_tensors, input_tensors, opts)
        tensor, to = local_of(input_tensors[0]), opts.rootRank
        outs = list(output_tensors[0]) if output_tensors else []
        if self._rank == to:
            self._check_parts("gather", outs, tensor, "input")
        elif outs:
            raise ArgumentError(
                f"gather: rank {self._rank} is not the root ({to}) and gave {len(outs)} outputs; expected none"
            )

        def job() -> None:
            if self._rank != to:
                core.gather(None, dense_of(tensor), to)
                return
            flat = adjacent(outs)
            if flat is not None:
                core.gather(flat, self._apart(tensor, flat), to)
                return
            with self._scratch(self._size * tensor.numel(), tensor.dtype) as flat:
                core.gather(flat, dense_of(tensor), to)
                self._spread(outs, flat)

        return self._run("gather", opts, core, [tensor], outs, job)

    def scatter(  # type: ignore[override]
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: datetime.timedelta | None = None,
        root: int | None = None,
    ) -> Any:
        """input_tensors: on the root one list with a tensor per rank, elsewhere empty."""
        if opts.__class__ is _ScatterOptions and not getattr(opts, "asyncOp", True) and len(output_tensors) == 1:
            core = self._idle()
            if core is not None and self._quick_scatter(core, output_tensors, input_tensors, opts):
                return _DONE
        if isinstance(output_tensors, torch.Tensor):  # scatter(tensor, list, root)
            output_tensors, input_tensors = [output_tensors], [input_tensors] if input_tensors else []
            if isinstance(opts, int):
                root, opts = opts, None
        opts = options_of(opts, _c10d.ScatterOptions, rootRank=root, timeout=timeout)
        core = self._core(output_tensors)
        if core is None:
            self._fence("scatter", output_tensors)
            return self._inner(output_tensors[0].device, "scatter")(output_tensors, input_tensors, opts)
        output, source = local_of(output_tensors[0]), opts.rootRank
        parts = [local_of(t) for t in input_tensors[0]] if input_tensors else []
        if self._rank == source:
            self._check_parts("scatter", parts, output, "output")
        elif parts:
            raise ArgumentError(
                f"scatter: rank {self._rank} is not the root ({source}) and gave {len(parts)} inputs; expected none"
            )

        def job() -> None:
            whole = joined(parts) if self._rank == source else None
            room = room_for(output) if whole is None else self._room_apart(output, whole)
            core.scatter(room, whole, source)
            store_into(output, room)

        return self._run("scatter", opts, core, [output], [output], job)

    # ---- all_to_all --------------------------------------------------------------------------------------------------
    def alltoall_base(  # type: ignore[override]
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        timeout: datetime.timedelta | None = None,
    ) -> Any:
        """Always with counts, which ranks exchange first: one rank may leave out split sizes that another one gives."""
        if (
            opts.__class__ is _AllToAllOptions
            and not getattr(opts, "asyncOp", True)
            and not output_split_sizes
            and not input_split_sizes
        ):
            core = self._idle()
            if core is not None and self._quick_all_to_all(core, output, input, opts):
                return _DONE
        opts = options_of(opts, _c10d.AllToAllOptions, timeout=timeout)
        core = self._core((output, input))
        if core is None:
            self._fence("all_to_all_single", [output, input])
            method = self._inner(input.device, "alltoall_base", "all_to_all_single")
            return method(output, input, list(output_split_sizes), list(input_split_sizes), opts)
        output, input = local_of(output), local_of(input)
        got = blocks_of(output, output_split_sizes, self._size, "the output")
        sent = blocks_of(input, input_split_sizes, self._size, "the input")

        def job() -> None:
            room, dense = room_for(output), dense_of(input)
            if overlap(room, dense, 0):  # in place is refused by the core
                room = torch.empty_like(room)
            core.all_to_allv(room, got, dense, sent)
            store_into(output, room)

        return self._run("all_to_all_single", opts, core, [input], [output], job)

    all_to_all_single = alltoall_base  # type: ignore[assignment]  # since torch 2.13

    def alltoall(  # type: ignore[override]
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: datetime.timedelta | None = None,
    ) -> Any:
        opts = options_of(opts, _c10d.AllToAllOptions, timeout=timeout)
        core = self._core(output_tensors, input_tensors)
        if core is None:
            self._fence("all_to_all", input_tensors)
            return self._inner(input_tensors[0].device, "alltoall")(output_tensors, input_tensors, opts)
        inputs = [local_of(t) for t in input_tensors]
        if len(inputs) != self._size or len(output_tensors) != self._size:
            raise ArgumentError(
                f"all_to_all: expected {self._size} inputs and outputs, got {len(inputs)} and {len(output_tensors)}"
            )
        sent, got = [t.numel() for t in inputs], [t.numel() for t in output_tensors]

        def job() -> None:
            whole, flat = joined(inputs), adjacent(output_tensors)
            if flat is not None and not overlap(flat, whole, 0):
                core.all_to_allv(flat, got, whole, sent)
                return
            with self._scratch(sum(got), output_tensors[0].dtype) as flat:
                core.all_to_allv(flat, got, whole, sent)
                self._spread(output_tensors, flat)

        return self._run("all_to_all", opts, core, inputs, list(output_tensors), job)

    # ---- barrier -----------------------------------------------------------------------------------------------------
    def barrier(self, opts: Any = None, timeout: datetime.timedelta | None = None) -> Any:  # type: ignore[override]
        if (
            not self.has_nccl
            and opts.__class__ is _BarrierOptions
            and not getattr(opts, "asyncOp", True)
            and opts.timeout.days < 0
        ):
            core = self._idle()
            if core is not None:
                with core.lock:
                    core.caller.tell(core._handle)
                    status = _barrier(core._handle, 0)
                if status:
                    self._failed(status, "barrier", ())
                return _DONE
        opts = options_of(opts, _BarrierOptions, timeout=timeout)
        device = getattr(opts, "device", None)
        core = self._core() if device is None or device.type == "cpu" else None
        if core is None:
            return self._inner(torch.device("cpu") if device is None else device, "barrier")(opts)
        return self._run("barrier", opts, core, (), (), core.barrier)

    def monitored_barrier(self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier; the core's time-out error says which ranks have not come, all of them.
        torch.distributed.monitored_barrier itself takes Gloo groups only."""
        opts = options_of(None, _BarrierOptions, timeout=timeout)
        if hasattr(opts, "asyncOp"):
            opts.asyncOp = False
        self.barrier(opts).wait()

    # ---- messages ----------------------------------------------------------------------------------------------------
    def _message(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        peer: int | None,
        tag: int,
        start: Callable[[shared.Comm, torch.Tensor], shared.Request],
    ) -> dist.Work:
        """peer: None for anyone. start: in a group of one node; in one that spans nodes the backend beneath carries it,
        as it does for other devices and layouts."""
        core = self._core(tensors)
        args = (tag,) if peer is None else (peer, tag)
        beneath = "recv_anysource" if peer is None else name
        if not on_core(tensors):
            work: dist.Work = self._inner(tensors[0].device, beneath)(tensors, *args)
            return work
        if len(tensors) != 1:
            raise ArgumentError(f"{name}: expected one tensor, got {len(tensors)}")
        t = local_of(tensors[0])
        where, receives = caller_line(2), name == "recv"

        def explain(exc: BaseException) -> None:
            self._explain(exc, name, [t], where)

        def lost(exc: RuntimeError) -> BaseException:
            return self._lost(name, peer, str(exc))

        dense = room_for(t) if receives else dense_of(t)
        request: shared.Request | Carried
        try:
            if isinstance(core, shared.Comm):
                request = start(core, dense)
            else:
                request = Carried(self._inner(dense.device, beneath)([dense], *args), lost)
        except DeepcError as exc:
            explain(exc)
            raise
        except RuntimeError as exc:
            error = lost(exc)
            explain(error)
            raise error from exc
        after = (lambda: store_into(t, dense)) if receives and dense is not t else None
        work = Message(request, [t], lambda: self._what(name, [t]), explain, after)
        if isinstance(request, shared.Request):  # Gloo has a thread for its own
            self._messages.add(work, keep=not receives)
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _lost(self, name: str, peer: int | None, said: str) -> BaseException:
        """What to raise for a message that Gloo carried and ended with these words."""
        link = getattr(self._comm, "link", None)
        if link is not None:
            found: BaseException = link.lost(peer, f"a {name}", said)
            return found
        whom = "" if peer is None else f" with rank {self._global_ranks[peer]}"
        return meaning(said)(f"group {self._label}: a message{whom} failed ({shortened(said)})")

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> Any:
        return self._message("send", tensors, dstRank, tag, lambda core, t: core.isend(t, dstRank, tag))

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> Any:
        return self._message("recv", tensors, srcRank, tag, lambda core, t: core.irecv(t, srcRank, tag))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        return self._message("recv", tensors, None, tag, lambda core, t: core.irecv(t, None, tag))

    # ---- torch's coalescing manager with a device --------------------------------------------------------------------
    def _start_coalescing(self, device: torch.device) -> None:
        if device.type != "cpu":
            super()._start_coalescing(device)
            return
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> Any:
        """One Work of all that was called since _start_coalescing()."""
        if device.type != "cpu":
            return super()._end_coalescing(device)
        works, self._batch = self._batch or [], None
        return Several(works)


private.skip_in_compiler(  # DDP's broadcasts come back from C++ into these
    [
        method.__code__
        for cls in (DeepcProcessGroup, FastPaths, Done, Pending, Message, Several)
        for method in vars(cls).values()
        if isinstance(method, types.FunctionType)
    ]
)
