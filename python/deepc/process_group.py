"""The process group of the backend "deepc": torch.distributed.ProcessGroup with the C core's collectives on CPU tensors of one node.

Gloo (and NCCL for CUDA) is registered beneath it as torch expects, and takes everything else: other devices and layouts, reductions that
the core does not have, send and recv, uneven all_to_all, groups that span nodes. Which of them carries a call is decided only from what is
equal on all ranks (operation, dtype, device, reduction, number of tensors), never from what may differ (contiguity, values). Before a
collective goes to Gloo the ranks of a one-node group meet in a fence of the core, so that a mismatch or a death is told there as well.

Calls run inline and return a completed Work, also with async_op=True; an error is raised by the call itself. Each group opens its
communicator at its first collective (see DEFAULT_STAGING for what it takes)."""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Any, Sequence

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d

from . import node
from .errors import ArgumentError, CommError, UnsupportedError

_log = logging.getLogger("deepc")

# Staging per rank: the core cuts calls into chunks of at most 512 KiB; a second and third slot let a rank fill the next chunk while peers
# read. Sub-groups are often many and small. So 1.5 MiB a rank for the default group, 0.5 MiB for others.
DEFAULT_STAGING, SUBGROUP_STAGING = (512 << 10, 3), (256 << 10, 2)  # slot bytes, slots

_OPS = {dist.ReduceOp.RedOpType.SUM: "sum", dist.ReduceOp.RedOpType.AVG: "avg", dist.ReduceOp.RedOpType.MIN: "min",
        dist.ReduceOp.RedOpType.MAX: "max", dist.ReduceOp.RedOpType.PRODUCT: "prod", dist.ReduceOp.RedOpType.BAND: "band",
        dist.ReduceOp.RedOpType.BOR: "bor", dist.ReduceOp.RedOpType.BXOR: "bxor"}
# Tags of the fences before calls that Gloo carries.
_FENCES = {name: 1000 + i for i, name in enumerate((
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "reduce", "gather", "scatter", "all_gather_coalesced",
    "reduce_scatter_coalesced", "all_reduce_coalesced", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"))}

_groups: "weakref.WeakSet[DeepcProcessGroup]" = weakref.WeakSet()


def leave_all() -> None:
    """At interpreter exit: closes what is open."""
    groups = [g for g in _groups if not g.closed]
    for group in groups:
        group.close()
    default = dist.group.WORLD if dist.is_initialized() else None
    if default in groups and not default.has_nccl:  # NCCL's shutdown may wait for peers that are gone
        dist.destroy_process_group()


class _Done(dist.Work):
    """The Work of a call that is finished. `tensors`: what its future holds."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = list(tensors)

    def wait(self, timeout=None) -> bool:
        return True

    def get_future(self):
        future = torch.futures.Future()
        future.set_result(self._tensors)
        return future

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self):
        return None

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def synchronize(self) -> None:
        pass

    def block_current_stream(self) -> None:
        pass


def _op_name(reduce_op: Any) -> str | None:
    """"sum", ...; None for what the core does not have (PREMUL_SUM). Never compare a ReduceOp itself: RedOpType == ReduceOp is False."""
    return _OPS.get(getattr(reduce_op, "op", reduce_op))


def _on_core(tensors: Sequence[torch.Tensor]) -> bool:
    return all(t.device.type == "cpu" and t.layout is torch.strided for t in tensors)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _adjacent(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One flat view over tensors that lie behind each other in one storage (torch.chunk of a buffer), or None."""
    first = tensors[0]
    if not first.is_contiguous():
        return None
    storage, at, step = first.untyped_storage().data_ptr(), first.storage_offset(), first.numel()
    for i, t in enumerate(tensors):
        if not t.is_contiguous() or t.storage_offset() != at + i * step or t.untyped_storage().data_ptr() != storage:
            return None
    return first.detach().as_strided((step * len(tensors),), (1,), at)


class DeepcProcessGroup(dist.ProcessGroup):
    """See the module. Made by torch.distributed only."""

    def __init__(self, options, backend_options) -> None:
        super().__init__(options.group_rank, options.group_size)  # torch lets Python subclasses use this form only
        self._store, self._rank, self._size, self._timeout = options.store, options.group_rank, options.group_size, options.timeout
        ranks = list(options.global_ranks_in_group)
        self._is_default, self._global_ranks = not ranks, ranks or list(range(self._size))
        self._label = "default_pg" if self._is_default else f"pg {options.group_id}"
        self._lock = threading.Lock()
        self._comm: node.Comm | None = None
        self._comm_tried, self.closed, self.has_nccl = False, False, False
        self._register_inner(options, backend_options)
        _groups.add(self)

    def _register_inner(self, options, backend_options) -> None:
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo/", self._store), self._rank, self._size, timeout=self._timeout)
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
            nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl/", self._store), self._rank, self._size, settings)
            nccl._set_sequence_number_for_group()
            self._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)
            self.has_nccl = True
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)

    # ---- the communicator ------------------------------------------------------------------------------------------------
    def _core(self) -> node.Comm | None:
        """The communicator, opened at the first call; None if the group spans nodes."""
        if self._comm is not None or self._comm_tried:
            if self.closed:
                raise CommError(f"process group {self._label} has been destroyed")
            return self._comm
        with self._lock:
            if not self._comm_tried:
                store = dist.PrefixStore("deepc/", self._store)
                nodes = len(set(node.node_ids(store, self._rank, self._size)))
                if nodes == 1:
                    slot_bytes, slots = DEFAULT_STAGING if self._is_default else SUBGROUP_STAGING
                    self._comm = node.open_comm(store, self._rank, self._size, label=self._label, timeout=self._timeout,
                                                slot_bytes=slot_bytes, slots=slots, global_ranks=self._global_ranks)
                else:
                    _log.info("group %s spans %d nodes: its collectives on CPU tensors run on Gloo", self._label, nodes)
                self._comm_tried = True
        return self._comm

    def _fence(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """Before Gloo carries a collective. Not for devices: it would wait for nothing that they do."""
        if tensors and all(t.device.type == "cpu" for t in tensors):
            core = self._core()
            if core is not None:
                core.barrier(_FENCES[name], note=f" ({name}, on Gloo)")

    def get_group_store(self):
        return self._store

    def _inner(self, device: torch.device, *names: str):
        """The bound method of the backend beneath (Gloo, NCCL), by the first of its names that this torch has. Never through super():
        torch's C++ base calls back into the overrides of this class, under names that change between versions."""
        backend = self._get_backend(device)
        for name in names:
            method = getattr(backend, name, None)
            if method is not None:
                return method
        raise UnsupportedError(f"torch {torch.__version__}: {type(backend).__name__} has no {names[0]}")

    def close(self) -> None:
        """Leaves the communicator."""
        self.closed, self._comm_tried = True, True
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.close()

    def shutdown(self) -> None:
        self.close()
        super().shutdown()

    def abort(self) -> None:
        if self._comm is not None:
            self._comm.abort("ProcessGroup.abort()")
        super().abort()

    def split_group(self, *args, **kwargs):
        raise NotImplementedError("split_group is not supported by the deepc backend; use torch.distributed.new_group")

    # ---- all_reduce --------------------------------------------------------------------------------------------------------
    def _reduce_all(self, tensors: Sequence[torch.Tensor], reduce_op: Any) -> _Done | None:
        """None if Gloo has to do it."""
        op = _op_name(reduce_op)
        if op is None or not _on_core(tensors) or any(node.reduce_code(t.dtype, op) is None for t in tensors):
            return None
        core = self._core()
        if core is None:
            return None
        for t in tensors:
            dense = _dense(t)
            core.all_reduce(dense.detach(), op)
            if dense is not t:
                t.detach().copy_(dense)
        return _Done(tensors)

    def allreduce(self, tensors, opts=None, op=None, timeout=None):
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        if not isinstance(opts, _c10d.AllreduceOptions):  # allreduce(tensor, op)
            op = opts if opts is not None else op
            opts = _c10d.AllreduceOptions()
            if op is not None:
                opts.reduceOp = op
        work = self._reduce_all(tensors, opts.reduceOp)
        if work is None:
            self._fence("all_reduce", tensors)
            work = self._inner(tensors[0].device, "allreduce")(tensors, opts)
        return work

    def allreduce_coalesced(self, tensors, opts=None):
        opts = _c10d.AllreduceCoalescedOptions() if opts is None else opts
        work = self._reduce_all(tensors, opts.reduceOp)
        if work is None:
            self._fence("all_reduce_coalesced", tensors)
            work = self._inner(tensors[0].device, "allreduce_coalesced")(tensors, opts)
        return work

    # ---- all_gather --------------------------------------------------------------------------------------------------------
    def _gather_flat(self, core: node.Comm, output: torch.Tensor, tensor: torch.Tensor) -> None:
        out = output.detach() if output.is_contiguous() else torch.empty(output.shape, dtype=output.dtype)
        core.all_gather(out, _dense(tensor).detach())
        if not output.is_contiguous():
            output.detach().copy_(out)

    def _gather_tensors(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> _Done | None:
        if not _on_core(outputs) or not _on_core(inputs):
            return None
        core = self._core()
        if core is None:
            return None
        for output, tensor in zip(outputs, inputs):
            self._gather_flat(core, output, tensor)
        return _Done(outputs)

    def _gather_lists(self, lists: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]) -> _Done | None:
        everything = [t for outs in lists for t in outs]
        if not _on_core(inputs) or not _on_core(everything):
            return None
        core = self._core()
        if core is None:
            return None
        for outs, tensor in zip(lists, inputs):
            if len(outs) != self._size or any(t.dtype != tensor.dtype or t.numel() != tensor.numel() for t in outs):
                raise ArgumentError(f"all_gather: expected {self._size} output tensors with the input's {tensor.numel()} elements of "
                                    f"{tensor.dtype}, got {[(t.numel(), str(t.dtype)) for t in outs]}")
            flat = _adjacent(outs)
            if flat is not None:
                core.all_gather(flat, _dense(tensor).detach())
                continue
            flat = torch.empty(self._size * tensor.numel(), dtype=tensor.dtype)
            core.all_gather(flat, _dense(tensor).detach())
            for out, part in zip(outs, flat.view(self._size, tensor.numel())):
                out.detach().copy_(part.view(out.shape))
        return _Done(everything)

    def allgather(self, output_tensors, input_tensors, opts=None, timeout=None):
        if isinstance(input_tensors, torch.Tensor):  # allgather(list, tensor)
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        work = self._gather_lists(output_tensors, input_tensors)
        if work is None:
            self._fence("all_gather", input_tensors)
            work = self._inner(input_tensors[0].device, "allgather")(output_tensors, input_tensors, _options(opts, _c10d.AllgatherOptions))
        return work

    def allgather_coalesced(self, output_lists, input_list, opts=None):
        """output_lists[i][j] = input i of rank j."""
        work = self._gather_lists(output_lists, input_list)
        if work is None:
            self._fence("all_gather_coalesced", input_list)
            method = self._inner(input_list[0].device, "allgather_coalesced")
            work = method(output_lists, input_list, _options(opts, _c10d.AllgatherOptions))
        return work

    def _allgather_base(self, output, input, opts=None):  # noqa: A002  torch's names
        work = self._gather_tensors([output], [input])
        if work is None:
            self._fence("all_gather_into_tensor", [input])
            work = self._inner(input.device, "_allgather_base", "all_gather_single")(output, input, _options(opts, _c10d.AllgatherOptions))
        return work

    def all_gather_single(self, output, input, opts=None):  # noqa: A002  since torch 2.13
        return self._allgather_base(output, input, opts)

    def allgather_into_tensor_coalesced(self, outputs, inputs, opts=None):
        work = self._gather_tensors(outputs, inputs)
        if work is None:
            self._fence("all_gather_coalesced", inputs)
            gather = self._inner(inputs[0].device, "_allgather_base", "all_gather_single")
            for w in [gather(output, tensor, _options(opts, _c10d.AllgatherOptions)) for output, tensor in zip(outputs, inputs)]:
                w.wait()
            work = _Done(outputs)
        return work

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        return self.allgather_into_tensor_coalesced(outputs, inputs, opts)

    # ---- reduce_scatter ----------------------------------------------------------------------------------------------------
    def _scatter_flat(self, core: node.Comm, output: torch.Tensor, tensor: torch.Tensor, op: str) -> None:
        out = output.detach() if output.is_contiguous() else torch.empty(output.shape, dtype=output.dtype)
        core.reduce_scatter(out, _dense(tensor).detach(), op)
        if not output.is_contiguous():
            output.detach().copy_(out)

    def _scatter_tensors(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], reduce_op: Any) -> _Done | None:
        op = _op_name(reduce_op)
        if op is None or not _on_core(outputs) or not _on_core(inputs) or any(node.reduce_code(t.dtype, op) is None for t in inputs):
            return None
        core = self._core()
        if core is None:
            return None
        for output, tensor in zip(outputs, inputs):
            self._scatter_flat(core, output, tensor, op)
        return _Done(outputs)

    def _flatten_parts(self, output: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        if len(parts) != self._size or any(t.dtype != output.dtype or t.numel() != output.numel() for t in parts):
            raise ArgumentError(f"reduce_scatter: expected {self._size} input tensors with the output's {output.numel()} elements of "
                                f"{output.dtype}, got {[(t.numel(), str(t.dtype)) for t in parts]}")
        flat = _adjacent(parts)
        return torch.cat([t.detach().reshape(-1) for t in parts]) if flat is None else flat

    def reduce_scatter(self, output_tensors, input_tensors, opts=None, op=None, timeout=None):
        if isinstance(output_tensors, torch.Tensor):  # reduce_scatter(tensor, list, op)
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        if not isinstance(opts, _c10d.ReduceScatterOptions):
            op = opts if opts is not None else op
            opts = _c10d.ReduceScatterOptions()
            if op is not None:
                opts.reduceOp = op
        work = None
        everything = [t for parts in input_tensors for t in parts]
        if _on_core(output_tensors) and _on_core(everything):
            flat = [self._flatten_parts(out, parts) for out, parts in zip(output_tensors, input_tensors)]
            work = self._scatter_tensors(output_tensors, flat, opts.reduceOp)
        if work is None:
            self._fence("reduce_scatter", output_tensors)
            work = self._inner(output_tensors[0].device, "reduce_scatter")(output_tensors, input_tensors, opts)
        return work

    def _reduce_scatter_base(self, outputTensor, inputTensor, opts=None):  # noqa: N803  torch's names
        opts = _options(opts, _c10d.ReduceScatterOptions)
        work = self._scatter_tensors([outputTensor], [inputTensor], opts.reduceOp)
        if work is None:
            self._fence("reduce_scatter_tensor", [inputTensor])
            work = self._inner(inputTensor.device, "_reduce_scatter_base", "reduce_scatter_single")(outputTensor, inputTensor, opts)
        return work

    def reduce_scatter_single(self, outputTensor, inputTensor, opts=None):  # noqa: N803  since torch 2.13
        return self._reduce_scatter_base(outputTensor, inputTensor, opts)

    def reduce_scatter_tensor_coalesced(self, outputs, inputs, opts=None):
        opts = _options(opts, _c10d.ReduceScatterOptions)
        work = self._scatter_tensors(outputs, inputs, opts.reduceOp)
        if work is None:
            self._fence("reduce_scatter_coalesced", inputs)
            scatter = self._inner(inputs[0].device, "_reduce_scatter_base", "reduce_scatter_single")
            for w in [scatter(output, tensor, opts) for output, tensor in zip(outputs, inputs)]:
                w.wait()
            work = _Done(outputs)
        return work

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None):
        return self.reduce_scatter_tensor_coalesced(outputs, inputs, opts)

    # ---- broadcast, all_to_all, barrier ------------------------------------------------------------------------------------
    def broadcast(self, tensors, opts=None, root=None, timeout=None):
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        if not isinstance(opts, _c10d.BroadcastOptions):  # broadcast(tensor, root)
            root = opts if opts is not None else root
            opts = _c10d.BroadcastOptions()
            opts.rootRank = 0 if root is None else root
        core = self._core() if _on_core(tensors) else None
        if core is None:
            self._fence("broadcast", tensors)
            return self._inner(tensors[0].device, "broadcast")(tensors, opts)
        for t in tensors:
            dense = _dense(t)
            core.broadcast(dense.detach(), opts.rootRank)
            if dense is not t:
                t.detach().copy_(dense)
        return _Done(tensors)

    def alltoall_base(self, output, input, output_split_sizes=(), input_split_sizes=(), opts=None, timeout=None):  # noqa: A002
        """On the core when both lists of split sizes are empty (equal blocks); lists of sizes may differ between ranks and go to Gloo."""
        core = self._core() if not output_split_sizes and not input_split_sizes and _on_core((output, input)) else None
        if core is None:
            self._fence("all_to_all_single", [output, input])
            method = self._inner(input.device, "alltoall_base", "all_to_all_single")
            return method(output, input, list(output_split_sizes), list(input_split_sizes), _options(opts, _c10d.AllToAllOptions))
        out = output.detach() if output.is_contiguous() else torch.empty(output.shape, dtype=output.dtype)
        core.all_to_all(out, _dense(input).detach())
        if not output.is_contiguous():
            output.detach().copy_(out)
        return _Done([output])

    def all_to_all_single(self, output, input, output_split_sizes=(), input_split_sizes=(), opts=None, timeout=None):  # noqa: A002  2.13
        return self.alltoall_base(output, input, output_split_sizes, input_split_sizes, opts)

    def barrier(self, opts=None, timeout=None):
        opts = _options(opts, _c10d.BarrierOptions)
        device = getattr(opts, "device", None)
        core = self._core() if device is None or device.type == "cpu" else None
        if core is None:
            return self._inner(torch.device("cpu") if device is None else device, "barrier")(opts)
        core.barrier()
        return _Done([])

    # ---- Gloo's, behind a fence ----------------------------------------------------------------------------------------------
    def reduce(self, tensors, *args, **kwargs):
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        self._fence("reduce", tensors)
        return self._inner(tensors[0].device, "reduce")(tensors, *args, **kwargs)

    def gather(self, output_tensors, input_tensors, *args, **kwargs):
        first = input_tensors if isinstance(input_tensors, torch.Tensor) else input_tensors[0]
        self._fence("gather", [first])
        return self._inner(first.device, "gather")(output_tensors, input_tensors, *args, **kwargs)

    def scatter(self, output_tensors, input_tensors, *args, **kwargs):
        first = output_tensors if isinstance(output_tensors, torch.Tensor) else output_tensors[0]
        self._fence("scatter", [first])
        return self._inner(first.device, "scatter")(output_tensors, input_tensors, *args, **kwargs)

    def alltoall(self, output_tensors, input_tensors, *args, **kwargs):
        self._fence("all_to_all", input_tensors)
        return self._inner(input_tensors[0].device, "alltoall")(output_tensors, input_tensors, *args, **kwargs)


def _options(given: Any, kind: type) -> Any:
    return given if isinstance(given, kind) else kind()
