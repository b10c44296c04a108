"""The C core, libdeepc.so, as Python sees it: one ctypes handle, typed prototypes, statuses as exceptions.

`C.dc_xxx(...)` calls return the raw status; `call("dc_xxx", ...)` raises. ctypes releases the GIL during calls. Of
libdeepc_cuda.so, which is opened when it is needed, `call_cuda` has what no operator of torch.ops.deepc does."""

from __future__ import annotations

import ctypes
import functools
import os
import re
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int16, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

from .. import errors


def library_dir() -> Path:
    """Folder of libdeepc*.so: DEEPC_LIBRARY_DIR if set, else the package's own."""
    return Path(os.environ.get("DEEPC_LIBRARY_DIR") or Path(__file__).parents[1] / "lib")


def _load() -> ctypes.CDLL:
    path = library_dir() / "libdeepc.so"
    try:
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as exc:
        raise ImportError(
            f"deepc can't load its C core {path}: {exc}. Reinstall deepc-torch, or point DEEPC_LIBRARY_DIR to a build."
        ) from exc


C = _load()


class Sized(ctypes.Structure):
    """A struct that says in its first field how large it is, so that it may grow (ops/base/base.h)."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(struct_size=ctypes.sizeof(type(self)), **fields)

    @classmethod
    def array(cls, n: int) -> Any:
        """A ctypes array of n of them; its items are not made by __init__."""
        items = (cls * n)()
        for item in items:
            item.struct_size = ctypes.sizeof(cls)
        return items


class CommConfig(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("rank", c_int32),
        ("size", c_int32),
        ("address", c_char_p),
        ("label", c_char_p),
        ("global_rank", POINTER(c_int32)),
        ("timeout_ms", c_int64),
        ("slot_bytes", c_int64),
        ("slots", c_int32),
        ("flags", c_int32),
        ("secret", c_char_p),
        ("pid", POINTER(c_int32)),
    ]


class Call(ctypes.Structure):
    _fields_ = [(n, c_int32) for n in ("op", "dtype", "red_op", "root")] + [("count", c_int64), ("tag", c_int64)]


class HeapStats(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("base", c_void_p),
        *((n, c_int64) for n in ("limit", "extent", "in_use", "peak", "free", "free_blocks", "largest_free")),
        *((n, c_int64) for n in ("free_resident", "decayed", "refusals", "foreign_frees", "steps")),
        *((n, c_int64) for n in ("covered", "moved")),
    )


class DynamicStats(Sized):
    _fields_ = (
        ("struct_size", c_size_t),
        *((n, c_int64) for n in ("reserved", "used", "committed", "most_committed", "granted", "released")),
        *((n, c_int64) for n in ("grows", "shrinks", "commits", "releases")),
    )


class FlightRow(ctypes.Structure):
    _fields_ = (
        [("number", ctypes.c_uint64)]
        + [(n, c_int64) for n in ("begin_ns", "end_ns", "count", "tag", "seq")]
        + [(n, c_int32) for n in ("group", "op", "dtype", "red_op", "root", "status", "ranks", "reserved")]
        + [("where", ctypes.c_char * 64)]
    )


class Layout(ctypes.Structure):
    _fields_ = [
        ("nparams", c_int64),
        ("world", c_int64),
        ("total", c_int64),
        ("bucket_elems", c_int64),
        ("nbuckets", c_int64),
        ("shard_elems", c_int64),
        ("offset", POINTER(c_int64)),
        ("numel", POINTER(c_int64)),
    ]


class Segment(ctypes.Structure):
    _fields_ = [
        ("param", c_int64),
        ("param_begin", c_int64),
        ("flat_begin", c_int64),
        ("shard_begin", c_int64),
        ("len", c_int64),
    ]


class Action(ctypes.Structure):
    _fields_ = [("kind", c_int32), ("reserved", c_int32), ("unit", c_int64)]


class ScheduleAction(ctypes.Structure):
    _fields_ = [(n, c_int32) for n in ("work", "stage", "micro")]


class Schedule(ctypes.Structure):
    _fields_ = [
        ("actions", POINTER(ScheduleAction)),
        ("begin", POINTER(c_int64)),
        ("ranks", c_int64),
        ("stages", c_int64),
        ("micro_batches", c_int64),
    ]


class ScheduleSpan(ctypes.Structure):
    _fields_ = [("start", c_double), ("end", c_double)]


class ScheduleLoad(ctypes.Structure):
    _fields_ = [("busy", c_double), ("first", c_double), ("last", c_double), ("peak", c_int64)]


def _doubles(*names: str) -> list[tuple[str, Any]]:
    return [(n, c_double) for n in names]


def _longs(*names: str) -> list[tuple[str, Any]]:
    return [(n, c_int64) for n in names]


class PlannerNodes(ctypes.Structure):
    _fields_ = _longs("nodes", "ranks") + _doubles(
        *("flops", "start", "memory_rate", "device_bytes", "host_bytes", "host_rate", "host_update"),
        *("disk_bytes", "disk_rate", "link_rate", "link_latency", "net_rate", "net_latency", "reserve"),
    )


class PlannerLayer(ctypes.Structure):
    _fields_ = _doubles(
        *("params", "expert_params", "flops", "traffic", "traffic_whole", "saved", "saved_whole", "output"),
        *("tp_elems", "tp_calls", "sp_elems", "ep_elems", "calls", "block"),
    )


class PlannerModel(ctypes.Structure):
    _fields_ = (
        _longs("nlayers", "heads", "kv_heads", "seq", "experts", "batch")
        + [("layers", POINTER(PlannerLayer))]
        + [(n, c_int32) for n in ("item", "grad", "wire", "master", "state_size", "nstates")]
        + _doubles("overlap", "update_traffic", "batch_traffic")
    )


class PlannerLayout(ctypes.Structure):
    _fields_ = _longs(
        *("dp", "tp", "pp", "sp", "ep", "stage", "offload", "recompute", "schedule", "chunks", "micro", "accumulation")
    )


class PlannerCost(ctypes.Structure):
    _fields_ = _doubles(
        *("step", "compute", "recompute", "tensor", "sequence", "expert", "gather", "bubble", "data", "update"),
        *("offload", "device_bytes", "host_bytes", "disk_bytes", "device_room", "host_room", "disk_room", "overflow"),
    )


class PlannerStage(ctypes.Structure):
    _fields_ = _longs("begin", "end", "rank") + _doubles(
        "forward", "backward", "hop", "params", "states_bytes", "activation_bytes"
    )


class PlannerSpace(ctypes.Structure):
    _fields_ = _longs(
        *("dp", "tp", "pp", "sp", "ep", "micro", "stages", "offloads", "recomputes", "schedules", "uneven"),
        "exhaustive",
    )


class PlannerFound(ctypes.Structure):
    _fields_ = [("layout", PlannerLayout), ("cost", PlannerCost)]


class PlannerTold(ctypes.Structure):
    _fields_ = [*_longs("found", "visited", "fitting"), ("fastest", PlannerFound), ("closest", PlannerFound)]


class BytesIn(ctypes.Structure):
    _fields_ = (
        [(n, c_int64) for n in ("total", "shard", "frozen", "world", "ranks_per_node", "slots", "bucket_elems")]
        + [
            (n, c_int32)
            for n in (
                "stage",
                "param_size",
                "grad_wire_size",
                "master",
                "state_size",
                "nstates",
                "resident",
            )
        ]
        + [("grad_buffers", c_int16), ("acc_size", c_int16), ("exchange", c_int64), ("state_block", c_int64)]
    )


class Bytes(ctypes.Structure):
    _fields_ = [
        (n, c_int64)
        for n in (
            "params_private",
            "params_shared",
            "grads_private",
            "master_private",
            "states_private",
            "staging_shared",
            "rank_total",
            "node_total",
            "exchange_private",
        )
    ]


class ReducerConfig(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("comm", c_void_p),
        ("layout", POINTER(Layout)),
        ("dtype", c_int32),
        ("own_all", c_int32),
        ("rank", c_int32),
        ("ring", c_int32),
        ("pre_scale", c_float),
        ("tree", c_int32),
        ("pending_limit_bytes", c_int64),
        ("acc", c_void_p),
        ("partial", c_void_p),
        ("tree_acc", c_void_p),
        ("acc_dtype", c_int32),
    ]


class AdamWArgs(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("param", c_void_p),
        ("grad", c_void_p),
        ("exp_avg", c_void_p),
        ("exp_avg_sq", c_void_p),
        ("max_exp_avg_sq", c_void_p),
        ("lowp", c_void_p),
        ("n", c_int64),
        ("step", c_int64),
        ("lr", c_double),
        ("beta1", c_double),
        ("beta2", c_double),
        ("eps", c_double),
        ("weight_decay", c_double),
        ("grad_scale", c_double),
        ("param_dtype", c_int32),
        ("grad_dtype", c_int32),
        ("state_dtype", c_int32),
        ("lowp_dtype", c_int32),
        ("flags", c_int32),
    ]


class StepArgs(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("param", c_void_p),
        ("grad", c_void_p),
        ("state", c_void_p * 3),
        ("lowp", c_void_p),
        ("n", c_int64),
        ("step", c_int64),
        ("lr", c_double),
        ("beta1", c_double),
        ("beta2", c_double),
        ("eps", c_double),
        ("weight_decay", c_double),
        ("grad_scale", c_double),
        ("rule", c_int32),
        ("param_dtype", c_int32),
        ("grad_dtype", c_int32),
        ("state_dtype", c_int32),
        ("lowp_dtype", c_int32),
        ("flags", c_int32),
        ("format", c_int32),
        ("first", c_int64),
        ("scale", c_void_p * 2),
    ]


class LambArgs(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("param", c_void_p),
        ("grad", c_void_p),
        ("exp_avg", c_void_p),
        ("exp_avg_sq", c_void_p),
        ("lowp", c_void_p),
        ("param_sums", c_void_p),
        ("update_sums", c_void_p),
        ("n", c_int64),
        ("step", c_int64),
        ("first", c_int64),
        ("lr", c_double),
        ("beta1", c_double),
        ("beta2", c_double),
        ("eps", c_double),
        ("weight_decay", c_double),
        ("grad_scale", c_double),
        ("trust", c_double),
        ("param_dtype", c_int32),
        ("grad_dtype", c_int32),
        ("lowp_dtype", c_int32),
        ("format", c_int32),
        ("state", c_void_p * 2),
        ("scale", c_void_p * 2),
    ]


class AdafactorArgs(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("param", c_void_p),
        ("grad", c_void_p),
        ("lowp", c_void_p),
        ("variance", c_void_p),
        ("row_var", c_void_p),
        ("col_var", c_void_p),
        ("row_top", c_void_p),
        ("col_top", c_void_p),
        ("row_sum", c_void_p),
        ("col_sum", c_void_p),
        ("row_factor", c_void_p),
        ("param_sums", c_void_p),
        ("update_sums", c_void_p),
        ("n", c_int64),
        ("begin", c_int64),
        ("first", c_int64),
        ("matrices", c_int64),
        ("rows", c_int64),
        ("cols", c_int64),
        ("grad_scale", c_double),
        ("weight", c_double),
        ("eps", c_double),
        ("keep", c_double),
        ("rate", c_double),
        ("param_dtype", c_int32),
        ("grad_dtype", c_int32),
        ("lowp_dtype", c_int32),
        ("reserved", c_int32),
    ]


class FileConfig(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("path", c_char_p),
        ("flags", c_int32),
        ("ring", c_int32),
        ("depth", c_int32),
        ("threads", c_int32),
        ("block_bytes", c_int64),
        ("reserve_bytes", c_int64),
    ]


class FileInfo(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("size_bytes", c_int64),
        ("block_bytes", c_int64),
        ("registered_bytes", c_int64),
        ("depth", c_int32),
        ("direct", c_int32),
        ("ring", c_char_p),
        ("why", c_char_p),
    ]


class Piece(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("bytes", c_int64), ("offset", c_int64)]


class ExtentsInfo(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("count", c_int64),
        ("generation", c_int64),
        ("copies", c_int32),
        ("reserved", c_int32),
    ]


class ExtentInfo(Sized):
    _fields_ = [("struct_size", c_size_t), ("capacity", c_int64), ("bytes", c_int64), ("generation", c_int64)]


class StreamArray(ctypes.Structure):
    _fields_ = [("name", c_char_p), ("elem_bytes", c_int64)]


class StreamConfig(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("arrays", POINTER(StreamArray)),
        ("narrays", c_int64),
        ("elems", c_int64),
        ("cell_elems", c_int64),
        ("slots", c_int32),
        ("reserved", c_int32),
        ("per", POINTER(c_int64)),
    ]


class StreamInfo(Sized):
    _fields_ = (
        ("struct_size", c_size_t),
        *((n, c_int64) for n in ("cells", "cell_elems", "disk_bytes", "memory_bytes", "unsaved", "wait_ns")),
    )


class StreamCell(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("cell", c_int64),
        ("begin", c_int64),
        ("elems", c_int64),
        ("data", c_void_p * 16),
    ]


class DiskInfo(Sized):
    _fields_ = [
        ("struct_size", c_size_t),
        ("free_bytes", c_int64),
        ("lock_bytes", c_int64),
        ("direct", c_int32),
        ("uring", c_int32),
        ("file_system", ctypes.c_char * 16),
        ("why_not_direct", ctypes.c_char * 96),
        ("why_not_uring", ctypes.c_char * 160),
    ]


_P = POINTER
_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    # name: (result, *arguments)
    "dc_version": (c_char_p,),
    "dc_status_name": (c_char_p, c_int),
    "dc_status_text": (c_char_p, c_int),
    "dc_status_at": (c_int, c_int, _P(c_char_p), _P(c_int)),
    "dc_last_error": (c_char_p,),
    "dc_isa_name": (c_char_p, c_int),
    "dc_isa_available": (c_int, c_int),
    "dc_isa_left_out": (c_int,),
    "dc_isa_current": (c_int, _P(c_int)),
    "dc_isa_force": (c_int, c_int),
    "dc_set_num_threads": (c_int, c_int),
    "dc_num_threads": (c_int,),
    "dc_gemm_bytes": (c_int64, c_int, c_int64, c_int64, c_int64),
    "dc_mem_alloc": (c_int, c_size_t, c_int, _P(c_void_p)),
    "dc_mem_alloc_bytes": (c_int, c_size_t, c_int, _P(c_size_t)),
    "dc_mem_free": (c_int, c_void_p),
    "dc_mem_available": (c_int, _P(c_int64)),
    "dc_mem_huge_bytes": (c_int, c_void_p, c_size_t, _P(c_int64)),
    "dc_heap_take_high": (c_void_p, c_size_t),
    "dc_lease_open": (c_int, c_size_t, c_int, _P(c_void_p), _P(c_void_p)),
    "dc_lease_layout": (c_int, c_size_t, c_int, _P(c_size_t), _P(c_size_t)),
    "dc_lease_need": (c_int, c_void_p, c_size_t, c_size_t),
    "dc_lease_end": (c_int, c_void_p),
    "dc_lease_close": (c_int, c_void_p),
    "dc_lease_bytes": (c_int, c_void_p, _P(c_int64), _P(c_int64)),
    "dc_dynamic_open": (c_int, c_size_t, c_double, _P(c_void_p), _P(c_void_p)),
    "dc_dynamic_resize": (c_int, c_void_p, c_size_t),
    "dc_dynamic_read": (c_int, c_void_p, _P(DynamicStats)),
    "dc_dynamic_close": (c_int, c_void_p),
    "dc_dynamic_cuda_open": (c_int, c_int, c_size_t, c_double, _P(c_void_p), _P(c_void_p)),
    "dc_dynamic_cuda_resize": (c_int, c_void_p, c_size_t, c_void_p),
    "dc_dynamic_cuda_read": (c_int, c_void_p, _P(DynamicStats)),
    "dc_dynamic_cuda_close": (c_int, c_void_p),
    "dc_reducer_lease": (c_int, c_void_p, c_void_p),
    "dc_heap_keep_small": (c_int, c_int, _P(c_int)),
    "dc_heap_trim": (c_int,),
    "dc_heap_stats": (c_int, _P(HeapStats)),
    "dc_heap_step": (c_int,),
    "dc_heap_take": (c_void_p, c_size_t),
    "dc_heap_give": (c_int, c_void_p),
    "dc_heap_smallest": (c_size_t,),
    "dc_crc32c": (c_uint32, c_uint32, c_void_p, c_size_t),
    "dc_counter_get": (c_int64, c_int),
    "dc_counter_reset": (None,),
    "dc_counter_name": (c_char_p, c_int),
    "dc_env_at": (c_int, c_int, _P(c_char_p), _P(c_char_p), _P(c_char_p), _P(c_char_p)),
    "dc_cast": (c_int, c_void_p, c_int, c_void_p, c_int, c_float, c_int64),
    "dc_scale": (c_int, c_void_p, c_int, c_float, c_int64),
    "dc_axpy": (c_int, c_void_p, c_float, c_void_p, c_int, c_int64),
    "dc_sqnorm": (c_int, c_void_p, c_int, c_int64, c_void_p),
    "dc_sum_partials": (c_double, c_void_p, c_int64),
    "dc_find_nonfinite": (c_int, c_void_p, c_int, c_int64, _P(c_int64)),
    "dc_copy": (c_int, c_void_p, c_void_p, c_int64),
    "dc_reduce": (c_int, c_void_p, _P(c_void_p), c_int, c_int, c_int, c_int64),
    "dc_reduce_acc": (c_int, c_void_p, _P(c_void_p), c_int, c_int, c_int64, c_int, c_void_p),
    "dc_adamw": (c_int, _P(AdamWArgs), c_int64),
    "dc_step": (c_int, _P(StepArgs), c_int64),
    "dc_lamb_moments": (c_int, _P(LambArgs), c_int64),
    "dc_lamb_apply": (c_int, _P(LambArgs), c_int64),
    "dc_adafactor_tops": (c_int, _P(AdafactorArgs), c_int64),
    "dc_adafactor_sums": (c_int, _P(AdafactorArgs), c_int64),
    "dc_adafactor_factors": (c_int, _P(AdafactorArgs), c_int64),
    "dc_adafactor_norms": (c_int, _P(AdafactorArgs), c_int64),
    "dc_adafactor_apply": (c_int, _P(AdafactorArgs), c_int64),
    "dc_state_sizes": (c_int, c_int, c_int64, c_int64, _P(c_int64), _P(c_int64)),
    "dc_state_unpack": (c_int, c_void_p, c_void_p, c_void_p, c_int, c_int, c_int64, c_int64),
    "dc_state_pack": (c_int, c_void_p, c_void_p, c_void_p, c_int, c_int, c_int64, c_int64),
    "dc_step_state_name": (c_char_p, c_int, c_int),
    "dc_quantize_bytes": (c_int, c_int, c_int64, c_int64, _P(c_int64)),
    "dc_comm_open": (c_int, _P(CommConfig), _P(c_void_p)),
    "dc_comm_bytes": (c_int, c_int32, c_int32, c_int64, _P(c_int64)),
    "dc_comm_close": (c_int, c_void_p),
    "dc_comm_abort": (c_int, c_void_p, c_char_p),
    "dc_comm_waits": (c_int, c_void_p, c_int, c_char_p),
    "dc_comm_thread_serves": (None, c_void_p),
    "dc_comm_relate": (c_int, c_void_p, c_void_p),
    "dc_comm_meet": (c_int, c_void_p, c_void_p),
    "dc_comm_depend": (c_int, c_void_p, c_void_p),
    "dc_comm_fail": (c_int, c_void_p, c_int, c_char_p),
    "dc_comm_rank": (c_int, c_void_p),
    "dc_comm_size": (c_int, c_void_p),
    "dc_comm_set_caller": (c_int, c_void_p, c_char_p),
    "dc_comm_error": (c_char_p, c_void_p),
    "dc_comm_set_timeout": (c_int, c_void_p, c_int64),
    "dc_segment_create": (c_int, c_void_p, c_int64, _P(c_void_p), _P(c_void_p)),
    "dc_segment_free": (c_int, c_void_p),
    "dc_segment_info": (c_int, c_void_p, _P(c_int64), _P(c_int64)),
    "dc_barrier": (c_int, c_void_p, c_int64),
    "dc_all_reduce": (c_int, c_void_p, c_void_p, c_void_p, c_int64, c_int, c_int, c_int64),
    "dc_reduce_scatter": (c_int, c_void_p, c_void_p, c_void_p, c_int64, c_int, c_int, c_int64),
    "dc_all_gather": (c_int, c_void_p, c_void_p, c_void_p, c_int64, c_int, c_int64),
    "dc_broadcast": (c_int, c_void_p, c_void_p, c_int64, c_int, c_int, c_int64),
    "dc_all_to_all": (c_int, c_void_p, c_void_p, c_void_p, c_int64, c_int, c_int64),
    "dc_all_to_allv": (c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_int64),
    "dc_reduce_to": (c_int, c_void_p, c_void_p, c_void_p, c_int64, c_int, c_int, c_int, c_int64),
    "dc_gather": (c_int, c_void_p, c_void_p, c_void_p, c_int64, c_int, c_int, c_int64),
    "dc_scatter": (c_int, c_void_p, c_void_p, c_void_p, c_int64, c_int, c_int, c_int64),
    "dc_isend": (c_int, c_void_p, c_void_p, c_int64, c_int, c_int, c_int64, c_char_p, _P(c_void_p)),
    "dc_irecv": (c_int, c_void_p, c_void_p, c_int64, c_int, c_int, c_int64, c_char_p, _P(c_void_p)),
    "dc_request_test": (c_int, c_void_p, _P(c_int)),
    "dc_request_wait": (c_int, c_void_p, c_int64),
    "dc_request_source": (c_int, c_void_p),
    "dc_request_free": (c_int, c_void_p),
    "dc_send": (c_int, c_void_p, c_void_p, c_int64, c_int, c_int, c_int64),
    "dc_recv": (c_int, c_void_p, c_void_p, c_int64, c_int, c_int, c_int64, _P(c_int)),
    "dc_exchange_begin": (c_int, c_void_p, _P(c_int64), _P(c_void_p)),
    "dc_exchange_post": (c_int, c_void_p, _P(Call)),
    "dc_exchange_wait": (c_int, c_void_p, c_int64),
    "dc_exchange_peer": (c_void_p, c_void_p, c_int, c_int64),
    "dc_exchange_done": (c_int, c_void_p, c_int64),
    "dc_flight_read": (c_int, _P(FlightRow), c_int64, _P(c_int64)),
    "dc_flight_fd": (c_int,),
    "dc_flight_parse": (c_int, c_int, _P(FlightRow), c_int64, _P(c_int64), c_char_p, c_int64),
    "dc_flight_log": (c_int, c_int64),
    "dc_flight_log_take": (c_int, _P(FlightRow), c_int64, _P(c_int64), _P(c_int64)),
    "dc_call_name": (c_char_p, c_int),
    "dc_dtype_name": (c_char_p, c_int),
    "dc_dtype_size": (c_size_t, c_int),
    "dc_reducer_create": (c_int, _P(ReducerConfig), _P(c_void_p)),
    "dc_reducer_free": (c_int, c_void_p),
    "dc_reducer_begin": (c_int, c_void_p, c_int, c_int),
    "dc_reducer_add": (c_int, c_void_p, c_int64, c_void_p, c_int),
    "dc_reducer_released": (c_int, c_void_p, _P(c_int64), c_int64, _P(c_int64)),
    "dc_reducer_finish": (c_int, c_void_p),
    "dc_reducer_reduced": (c_int, c_void_p, _P(c_int64)),
    "dc_reducer_give_back": (c_int, c_void_p, c_int64),
    "dc_reducer_in_pass": (c_int, c_void_p),
    "dc_reducer_gather": (c_int, c_void_p, c_void_p, c_int),
    "dc_zero_layout_make": (c_int, _P(c_int64), c_int64, c_int64, c_int64, _P(_P(Layout))),
    "dc_zero_layout_free": (None, _P(Layout)),
    "dc_zero_bucket": (c_int, _P(Layout), c_int64, _P(c_int64), _P(c_int64)),
    "dc_zero_slice": (c_int, _P(Layout), c_int64, c_int64, _P(c_int64), _P(c_int64), _P(c_int64)),
    "dc_zero_locate": (c_int, _P(Layout), c_int64, _P(c_int64), _P(c_int64)),
    "dc_zero_segments": (c_int, _P(Layout), c_int64, _P(Segment), c_int64, _P(c_int64)),
    "dc_zero_prefetch": (
        c_int,
        _P(c_int64),
        c_int64,
        _P(c_int64),
        c_int64,
        c_int64,
        c_int64,
        c_int64,
        _P(Action),
        c_int64,
        _P(c_int64),
    ),
    "dc_zero_gather": (c_int, c_void_p, c_void_p, c_int64),
    "dc_zero_estimate": (c_int, _P(BytesIn), _P(Bytes)),
    "dc_planner_cost_of": (
        c_int,
        _P(PlannerNodes),
        c_int64,
        _P(PlannerModel),
        _P(PlannerLayout),
        c_int64,
        _P(PlannerCost),
        _P(PlannerStage),
        _P(c_int64),
    ),
    "dc_planner_search": (
        c_int,
        _P(PlannerNodes),
        c_int64,
        _P(PlannerModel),
        _P(PlannerSpace),
        _P(PlannerFound),
        c_int64,
        _P(PlannerTold),
    ),
    "dc_planner_collective_s": (c_double, c_int, _P(PlannerNodes), c_double, c_double, c_double, c_double),
    "dc_planner_pipeline_s": (
        c_double,
        c_int,
        c_int64,
        c_int64,
        c_double,
        _P(c_double),
        _P(c_double),
        _P(c_double),
    ),
    "dc_schedule_name": (c_char_p, c_int),
    "dc_schedule_actions": (
        c_int,
        c_int,
        c_int64,
        c_int64,
        c_int64,
        c_int64,
        _P(ScheduleAction),
        c_int64,
        _P(c_int64),
    ),
    "dc_schedule_stage_rank": (c_int, c_int, c_int64, c_int64, c_int64, _P(c_int64)),
    "dc_schedule_print": (c_int, _P(ScheduleAction), c_int64, c_char_p, c_int64, _P(c_int64)),
    "dc_schedule_parse": (c_int, c_char_p, _P(ScheduleAction), c_int64, _P(c_int64)),
    "dc_schedule_check": (c_int, _P(Schedule), _P(c_int64)),
    "dc_schedule_simulate": (
        c_int,
        _P(Schedule),
        _P(c_double),
        _P(c_double),
        _P(ScheduleSpan),
        _P(ScheduleLoad),
        _P(c_double),
    ),
    "dc_schedule_predict": (
        c_int,
        c_int,
        c_int64,
        c_int64,
        c_int64,
        _P(c_double),
        _P(c_double),
        _P(ScheduleLoad),
        _P(c_double),
    ),
    "dc_file_open": (c_int, _P(FileConfig), _P(c_void_p)),
    "dc_file_close": (c_int, c_void_p),
    "dc_file_get_info": (c_int, c_void_p, _P(FileInfo)),
    "dc_file_read_start": (c_int, c_void_p, _P(Piece), c_int64, _P(c_void_p)),
    "dc_file_write_start": (c_int, c_void_p, _P(Piece), c_int64, _P(c_void_p)),
    "dc_file_sync": (c_int, c_void_p),
    "dc_file_register": (c_int, c_void_p, c_void_p, c_int64, _P(c_int)),
    "dc_io_test": (c_int, c_void_p, _P(c_int)),
    "dc_io_wait": (c_int, c_void_p, c_int64),
    "dc_io_free": (c_int, c_void_p),
    "dc_blocks_sum": (c_int, c_void_p, c_int64, c_int64, c_void_p),
    "dc_blocks_check": (c_int, c_void_p, c_int64, c_int64, c_void_p, _P(c_int64)),
    "dc_extents_open": (c_int, _P(FileConfig), _P(c_int64), c_int64, c_int, _P(c_void_p)),
    "dc_extents_close": (c_int, c_void_p),
    "dc_extents_file": (c_void_p, c_void_p),
    "dc_extents_get_info": (c_int, c_void_p, _P(ExtentsInfo)),
    "dc_extent_get_info": (c_int, c_void_p, c_int64, _P(ExtentInfo)),
    "dc_extents_bytes": (c_int, _P(c_int64), c_int64, c_int, _P(c_int64)),
    "dc_extent_write_start": (c_int, c_void_p, c_int64, c_void_p, c_int64, _P(c_void_p)),
    "dc_extent_read_start": (c_int, c_void_p, c_int64, c_void_p, c_int64, _P(c_void_p)),
    "dc_extents_commit": (c_int, c_void_p, c_int),
    "dc_extents_rollback": (c_int, c_void_p),
    "dc_stream_bytes": (c_int, _P(StreamConfig), _P(c_int64), _P(c_int64)),
    "dc_stream_open": (c_int, _P(FileConfig), _P(StreamConfig), _P(c_void_p)),
    "dc_stream_close": (c_int, c_void_p),
    "dc_stream_file": (c_void_p, c_void_p),
    "dc_stream_get_info": (c_int, c_void_p, _P(StreamInfo)),
    "dc_stream_begin": (c_int, c_void_p, c_int64, c_int64, c_uint32),
    "dc_stream_next": (c_int, c_void_p, _P(StreamCell)),
    "dc_stream_done": (c_int, c_void_p, c_uint32),
    "dc_stream_end": (c_int, c_void_p),
    "dc_stream_read": (c_int, c_void_p, c_int, c_int64, c_int64, c_void_p),
    "dc_stream_write": (c_int, c_void_p, c_int, c_int64, c_int64, c_void_p),
    "dc_stream_flush": (c_int, c_void_p),
    "dc_stream_drop": (c_int, c_void_p, c_int, c_int64),
    "dc_disk_check": (c_int, c_char_p, c_int64, c_int64, _P(DiskInfo)),
}
for _name, (_res, *_args) in _PROTOTYPES.items():
    try:
        _fn = getattr(C, _name)
    except AttributeError as exc:
        raise ImportError(
            f"{library_dir()}/libdeepc.so lacks {_name}: it is not the library of this package version"
        ) from exc
    _fn.restype, _fn.argtypes = _res, _args

VERSION: str = C.dc_version().decode()

_EXCEPTIONS = {
    "E_INVALID": errors.ArgumentError,
    "E_DTYPE": errors.ArgumentError,
    "E_SHAPE": errors.ArgumentError,
    "E_NOMEM": errors.OutOfMemoryError,
    "E_ENV": errors.ConfigError,
    "E_MISMATCH": errors.MismatchError,
    "E_PEER_DIED": errors.RankDiedError,
    "E_TIMEOUT": errors.CommTimeoutError,
    "E_ABORTED": errors.AbortedError,
    "E_PEER": errors.CommError,
    "E_UNSUPPORTED": errors.UnsupportedError,
    "E_IO": errors.DiskError,
    "E_NOSPC": errors.DiskFullError,
    "E_CORRUPT": errors.DamagedError,
}


_IN_PYTHON = {  # what the core calls by the names of its flags
    "DC_FILE_WRITE": 'mode="r+"',
    "DC_FILE_CREATE": 'mode="c"',
    "DC_FILE_TRUNCATE": 'mode="w"',
    "DC_FILE_NAMELESS": 'mode="nameless"',
    "DC_FILE_BUFFERED": "direct=False",
}


def in_python(text: str) -> str:
    """The core's text with the arguments of deepc.offload in the place of its flags."""
    return re.sub("DC_FILE_[A-Z]+", lambda found: _IN_PYTHON.get(found[0], found[0]), text)


def check(status: int) -> None:
    """Raises the exception of a negative status, with the C core's text of the failure."""
    if status:
        raise _exception_of(status)(in_python(C.dc_last_error().decode(errors="replace")))


def _exception_of(status: int) -> type[errors.DeepcError]:
    return _EXCEPTIONS.get(C.dc_status_name(status).decode(), errors.DeepcError)


def _statuses() -> dict[str, int]:
    out: dict[str, int] = {}
    name, value = c_char_p(), c_int()
    while C.dc_status_at(len(out), ctypes.byref(name), ctypes.byref(value)) == 0:
        out[(name.value or b"").decode()] = value.value
    return out


def status_of(kind: type[errors.DeepcError]) -> int:
    """The status that `check` raises `kind` for, or that of the next base which has one."""
    name = next((n for of in kind.__mro__ for n, e in _EXCEPTIONS.items() if e is of), "E_STATE")
    return _statuses()[name]


def without_place(text: str) -> str:
    """An error's text without the places of the C core that it was recorded at."""
    return re.sub(r"( \(\w+\.c:\d+, \w+\))+$", "", text)


def call(name: str, *args: Any) -> None:
    """Calls a function of the core that returns a status, and raises on failure."""
    check(getattr(C, name)(*args))


# Of ops/cuda/cuda_ops.h; the last argument is a stream.
_CUDA_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "dc_cuda_last_error": (c_char_p,),
    "dc_cuda_step": (c_int, _P(StepArgs), c_int64, c_void_p),
    "dc_cuda_lamb_moments": (c_int, _P(LambArgs), c_int64, c_void_p),
    "dc_cuda_lamb_apply": (c_int, _P(LambArgs), c_int64, c_void_p),
    "dc_cuda_adafactor_tops": (c_int, _P(AdafactorArgs), c_int64, c_void_p),
    "dc_cuda_adafactor_sums": (c_int, _P(AdafactorArgs), c_int64, c_void_p),
    "dc_cuda_adafactor_factors": (c_int, _P(AdafactorArgs), c_int64, c_void_p),
    "dc_cuda_adafactor_norms": (c_int, _P(AdafactorArgs), c_int64, c_void_p),
    "dc_cuda_adafactor_apply": (c_int, _P(AdafactorArgs), c_int64, c_void_p),
}


@functools.cache
def _cuda() -> ctypes.CDLL:
    """libdeepc_cuda.so. UnsupportedError if this build has none, or one of another version."""
    path = library_dir() / "libdeepc_cuda.so"
    try:
        found = ctypes.CDLL(str(path))
    except OSError as exc:
        raise errors.UnsupportedError(
            f"this build of deepc has no CUDA kernels ({exc}): install the wheel, or build with DEEPC_CUDA=ON where"
            " nvcc is"
        ) from exc
    for name, (res, *args) in _CUDA_PROTOTYPES.items():
        try:
            fn = getattr(found, name)
        except AttributeError as exc:
            raise errors.UnsupportedError(
                f"{path} lacks {name}: it is not the library of this package version. Reinstall deepc-torch, or build"
                " both libraries together"
            ) from exc
        fn.restype, fn.argtypes = res, args
    return found


def call_cuda(name: str, *args: Any) -> None:
    """Calls a function of libdeepc_cuda.so that returns a status, and raises on failure with that library's text."""
    library = _cuda()
    if status := getattr(library, name)(*args):
        raise _exception_of(status)(library.dc_cuda_last_error().decode(errors="replace"))


def counters() -> dict[str, int]:
    """All counters of this process, by name (see ops/base/counters.def)."""
    out, i = {}, 0
    while (name := C.dc_counter_name(i)) is not None:
        out[name.decode()] = C.dc_counter_get(i)
        i += 1
    return out
