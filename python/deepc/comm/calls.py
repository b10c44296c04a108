"""The communication logger: per collective and message size the number of calls, latency and bandwidth, as DeepSpeed's
`comms_logger` section and `log_summary` give them.

Calls of the C core come from its flight record (dc_flight_log): nothing of Python runs in a call. What Gloo and NCCL
carry, and collectives over several nodes, are timed here: CPU calls when their future completes, CUDA calls by waiting
for the device, as DeepSpeed does.

Units as in DeepSpeed: latency in milliseconds, bandwidth in Gbit/s; averages without the lowest and highest tenth.
Bandwidth as in nccl-tests: for n ranks and a message of S bytes, all_reduce moves 2 S (bus: 2 S (n - 1) / n),
all_gather and reduce_scatter n S (bus: S (n - 1)), all_to_all S (bus: S (n - 1) / n), all others S. The message is what
one rank gives (all_reduce, all_gather, all_to_all, send) or gets (reduce_scatter). A gradient bucket ("reduce_bucket")
is a reduce_scatter that runs beside backward: its latency is from the post of this rank to the end of its reduction."""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..core.lib import C, FlightRow, call
from ..errors import ArgumentError

_log = logging.getLogger("deepc")
_RING = 1 << 16  # calls between two looks; older ones are lost, and counted
_TAKE = 4096
OPS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "all_to_all",
    "reduce",
    "gather",
    "scatter",
    "barrier",
    "send",
    "recv",
    "reduce_bucket",
)
# DeepSpeed's and torch's names of the same
_ALIASES = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "isend": "send",
    "irecv": "recv",
    "all_reduce_coalesced": "all_reduce",
    "inference_all_reduce": "all_reduce",
    "allgather_fn": "all_gather",
    "reduce_scatter_fn": "reduce_scatter",
    "all_gather_coalesced": "all_gather",
    "monitored_barrier": "barrier",
    "batch_isend_irecv": "send",
    "broadcast_object_list": "broadcast",
}


def bandwidth(op: str, nbytes: float, ms: float, ranks: int) -> tuple[float, float]:
    """(algorithm, bus) bandwidth in Gbit/s of one call; see the module."""
    if ms <= 0:
        return 0.0, 0.0
    share = (ranks - 1) / ranks
    if op == "all_reduce":
        moved, bus = 2 * nbytes, 2 * nbytes * share
    elif op in ("all_gather", "reduce_scatter", "reduce_bucket"):
        moved, bus = nbytes * ranks, nbytes * ranks * share
    elif op == "all_to_all":
        moved, bus = nbytes, nbytes * share
    else:
        moved = bus = nbytes
    return moved * 8 / ms / 1e6, bus * 8 / ms / 1e6


def trimmed_mean(values: Sequence[float], part: float = 0.1) -> float:
    """The mean without the lowest and highest `part` of the values; 0 of none."""
    if not values:
        return 0.0
    k = round(len(values) * part)
    kept = sorted(values)[k : len(values) - k] or sorted(values)
    return sum(kept) / len(kept)


def size_text(nbytes: int) -> str:
    """ "1.5 MB"; powers of 1024, as DeepSpeed."""
    if nbytes == 0:
        return "0B"
    i = min(int(math.log(nbytes, 1024)), 8)
    return f"{round(nbytes / 1024**i, 2)} {('B', 'KB', 'MB', 'GB', 'TB', 'PB', 'EB', 'ZB', 'YB')[i]}"


@dataclass
class _Calls:
    """All calls of one name and size."""

    ms: list[float] = field(default_factory=list)
    algorithm: list[float] = field(default_factory=list)
    bus: list[float] = field(default_factory=list)


class Finished(NamedTuple):
    """One finished call, for taps. Times are CLOCK_MONOTONIC. group: index in the flight record (-1: not in it); label:
    of a group over several nodes. seq: number of the call in its group, the same on all its ranks; -1: not known."""

    op: str
    nbytes: int
    begin_ns: int
    end_ns: int
    ranks: int
    where: str
    group: int = -1
    seq: int = -1
    label: str = ""


class CommsLogger:
    """One per process: `logger` below. enabled, verbose, prof_all, prof_ops, debug: the keys of DeepSpeed's section."""

    def __init__(self) -> None:
        self.enabled = self.verbose = self.debug = False
        self.prof_all = True
        self.prof_ops: list[str] = []
        self.lost = 0  # calls that were overwritten before they were read
        self._calls: dict[str, dict[int, _Calls]] = {}
        self._rows: Any = None  # an array of FlightRow, from the first drain on
        self._lock = threading.Lock()
        self._taps: list[Callable[[Finished], None]] = []

    # ---- switching ---------------------------------------------------------------------------------------------------
    def configure(
        self,
        enabled: bool,
        prof_all: bool = True,
        prof_ops: Iterable[str] | None = None,
        verbose: bool = False,
        debug: bool = False,
    ) -> None:
        """Starts or stops logging. prof_all: all operations, else those of prof_ops. verbose: a line per call. debug:
        the caller's line is part of the name. What was logged stays."""
        wanted = [_ALIASES.get(op, op) for op in prof_ops or ()]
        unknown = [op for op in wanted if op not in OPS]
        if unknown:
            raise ArgumentError(
                f"comms_logger.prof_ops: unknown operation {', '.join(map(repr, unknown))}; expected some of"
                f" {', '.join(OPS)}"
            )
        if self.enabled and not enabled:
            self.drain()
        call("dc_flight_log", _RING if enabled or self._taps else 0)
        self.enabled, self.prof_all, self.prof_ops, self.verbose, self.debug = (
            bool(enabled),
            prof_all,
            wanted,
            verbose,
            debug,
        )

    def tap(self, take: Callable[[Finished], None]) -> None:
        """From now on `take` gets every finished call of this process, whatever is logged (a timeline does this)."""
        self.drain()
        call("dc_flight_log", _RING)
        self._taps.append(take)

    def untap(self, take: Callable[[Finished], None]) -> None:
        """The end of that; calls that have finished are given first."""
        self.drain()
        self._taps.remove(take)
        if not self._taps and not self.enabled:
            call("dc_flight_log", 0)

    @property
    def active(self) -> bool:
        """Somebody wants to know of calls."""
        return self.enabled or bool(self._taps)

    def wants(self, op: str) -> bool:
        return self.enabled and (self.prof_all or op in self.prof_ops)

    # ---- feeding -----------------------------------------------------------------------------------------------------
    def finished(self, done: Finished) -> None:
        """One finished call, for the log and for taps."""
        for take in self._taps:
            take(done)
        self.append(done.op, done.nbytes, (done.end_ns - done.begin_ns) / 1e6, done.ranks, done.where)

    def append(self, op: str, nbytes: int, ms: float, ranks: int, where: str = "") -> None:
        """One finished call."""
        if not self.wants(op):
            return
        name = f"{op} | [Caller: {where or '?'}]" if self.debug else op
        algorithm, bus = bandwidth(op, nbytes, ms, ranks)
        with self._lock:
            calls = self._calls.setdefault(name, {}).setdefault(nbytes, _Calls())
            calls.ms.append(ms)
            calls.algorithm.append(algorithm)
            calls.bus.append(bus)
        if self.verbose:
            _log.info(
                "comm op: %s | time (ms): %.2f | msg size: %s | algbw (Gbps): %.2f | busbw (Gbps): %.2f",
                name,
                ms,
                size_text(nbytes),
                algorithm,
                bus,
            )

    def drain(self) -> None:
        """Takes what the C core has recorded since the last time. The engine calls it at every step, log_summary before
        it prints."""
        if not self.active:
            return
        if self._rows is None:
            self._rows = (FlightRow * _TAKE)()
        count, lost = ctypes.c_int64(_TAKE), ctypes.c_int64()
        while count.value == _TAKE:
            call("dc_flight_log_take", self._rows, _TAKE, ctypes.byref(count), ctypes.byref(lost))
            self.lost += lost.value
            for row in self._rows[: count.value]:
                self._take(row)

    def _take(self, row: FlightRow) -> None:
        op, nbytes = C.dc_call_name(row.op).decode(), row.count * C.dc_dtype_size(row.dtype)
        if row.status or (op == "barrier" and row.tag):  # failed, or a meeting inside another call
            return
        if op == "bucket":
            op, nbytes = "reduce_bucket", nbytes // row.ranks
        elif op == "all_to_all":
            nbytes *= row.ranks
        elif op == "all_to_allv":  # its count is that of all blocks
            op = "all_to_all"
        if op in OPS:
            self.finished(
                Finished(
                    op,
                    nbytes,
                    row.begin_ns,
                    row.end_ns,
                    row.ranks,
                    row.where.decode(errors="replace"),
                    row.group,
                    row.seq,
                )
            )

    # ---- reading -----------------------------------------------------------------------------------------------------
    def reset(self) -> None:
        """Forgets everything."""
        self.drain()
        with self._lock:
            self._calls.clear()
            self.lost = 0

    def _latencies(self) -> dict[str, dict[int, list[float]]]:
        with self._lock:
            return {
                name: {size: list(c.ms) for size, c in sorted(sizes.items())} for name, sizes in self._calls.items()
            }

    def summary(self) -> dict[str, dict[int, dict[str, Any]]]:
        """name -> message bytes -> count, total_latency_ms, avg_latency_ms, tput_avg_gbps, busbw_avg_gbps,
        msg_size_bytes, msg_size_str."""
        self.drain()
        with self._lock:
            return {
                name: {
                    size: {
                        "count": len(c.ms),
                        "total_latency_ms": sum(c.ms),
                        "avg_latency_ms": trimmed_mean(c.ms),
                        "tput_avg_gbps": trimmed_mean(c.algorithm),
                        "busbw_avg_gbps": trimmed_mean(c.bus),
                        "msg_size_bytes": size,
                        "msg_size_str": size_text(size),
                    }
                    for size, c in sorted(sizes.items())
                }
                for name, sizes in self._calls.items()
            }

    def straggler(self) -> dict[str, dict[int, dict[str, Any]]]:
        """Collective over all ranks. Of the k-th call of a name and size the shortest latency of any rank is
        communication, what this rank took beyond it is waiting for a straggler. Only calls that all ranks that know the
        name and size have."""
        import torch.distributed as dist

        self.drain()
        mine = self._latencies()
        everyone: list[Any] = [mine]
        if dist.is_initialized() and dist.get_world_size() > 1:
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, mine)
        out: dict[str, dict[int, dict[str, Any]]] = {}
        for name, sizes in mine.items():
            for size, ms in sizes.items():
                others = [theirs[name][size] for theirs in everyone if size in theirs.get(name, ())]
                least = [min(column) for column in zip(*others)]
                beyond = [a - b for a, b in zip(ms, least)]
                out.setdefault(name, {})[size] = {
                    "count": len(least),
                    "total_comm_lat_ms": sum(least),
                    "total_straggler_ms": sum(beyond),
                    "avg_comm_lat_ms": trimmed_mean(least),
                    "avg_straggler_ms": trimmed_mean(beyond),
                    "msg_size_bytes": size,
                    "msg_size_str": size_text(size),
                }
        return out

    def log_all(
        self, print_log: bool = True, show_straggler: bool = False, return_dict: bool = False
    ) -> dict[str, Any] | None:
        """Prints the table (and that of the stragglers: collective then) and returns it if asked for, in DeepSpeed's
        form."""
        import datetime

        import torch.distributed as dist

        summary = self.summary()
        late = self.straggler() if show_straggler else None
        up = dist.is_initialized()
        if print_log:
            print(self._table(summary, late), flush=True)
        if not return_dict:
            return None
        return {
            "summary": summary,
            "straggler_analysis": late,
            "metadata": {
                "world_size": dist.get_world_size() if up else 1,
                "rank": dist.get_rank() if up else 0,
                "timestamp": datetime.datetime.now().isoformat(),
            },
        }

    def _table(self, summary: dict[str, Any], late: dict[str, Any] | None) -> str:
        def row(*cells: Any) -> str:
            return "".join(f"{f'{c:.2f}' if isinstance(c, float) else c!s:<20}" for c in cells)

        lines = [
            row(
                "Comm. Op",
                "Message Size",
                "Count",
                "Total Latency(ms)",
                "Avg Latency(ms)",
                "tput_avg (Gbps)",
                "busbw_avg (Gbps)",
            )
        ]
        for name, sizes in summary.items():
            lines.append(name)
            lines += [
                row(
                    "",
                    v["msg_size_str"],
                    v["count"],
                    v["total_latency_ms"],
                    v["avg_latency_ms"],
                    v["tput_avg_gbps"],
                    v["busbw_avg_gbps"],
                )
                for v in sizes.values()
            ]
        if late is not None:
            lines += [
                "_______________________________",
                "Breakdown with straggler effect",
                "-------------------------------",
                row(
                    "Comm. Op",
                    "Message Size",
                    "Count",
                    "Total comm lat(ms)",
                    "Total straggler(ms)",
                    "Avg comm lat(ms)",
                    "Avg straggler(ms)",
                ),
            ]
            for name, sizes in late.items():
                lines.append(name)
                lines += [
                    row(
                        "",
                        v["msg_size_str"],
                        v["count"],
                        v["total_comm_lat_ms"],
                        v["total_straggler_ms"],
                        v["avg_comm_lat_ms"],
                        v["avg_straggler_ms"],
                    )
                    for v in sizes.values()
                ]
        if self.lost:
            lines.append(f"{self.lost} calls are missing: more than {_RING} were made between two steps or summaries")
        return "\n".join(lines)


logger = CommsLogger()


# ---- what does not run in the C core ---------------------------------------------------------------------------------
def observed(run: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of internode.executor.Executor._run(self, call, plan_of, source, target, unit, ...): logs it as one
    call over self.size ranks."""

    @functools.wraps(run)
    def timed(self: Any, c: Any, plan_of: Any, source: int, target: int, unit: int, *rest: Any) -> Any:
        if not logger.active or (c.name == "barrier" and c.tag):
            return run(self, c, plan_of, source, target, unit, *rest)
        begin = time.monotonic_ns()
        out = run(self, c, plan_of, source, target, unit, *rest)
        op = _ALIASES.get(c.name, c.name)
        nbytes = c.count * unit * (self.size if op == "all_to_all" else 1)
        logger.finished(
            Finished(op, nbytes, begin, time.monotonic_ns(), self.size, "", seq=self._seq, label=self.label)
        )
        return out

    return timed


# Method of a torch backend: (operation, index of the argument whose bytes are the message). Messages between two ranks
# are missing: to wait for one of them could wait for ever.
_BACKEND = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "reduce": ("reduce", 0),
    "broadcast": ("broadcast", 0),
    "allgather": ("all_gather", 1),
    "allgather_coalesced": ("all_gather", 1),
    "_allgather_base": ("all_gather", 1),
    "reduce_scatter": ("reduce_scatter", 0),
    "_reduce_scatter_base": ("reduce_scatter", 0),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "alltoall_base": ("all_to_all", 1),
    "alltoall": ("all_to_all", 1),
    "barrier": ("barrier", -1),
}


def _nbytes(found: Any) -> int:
    if isinstance(found, (list, tuple)):
        return sum(map(_nbytes, found))
    return int(found.numel()) * int(found.element_size())


def backend_method(name: str, method: Callable[..., Any], device: Any, ranks: int) -> Callable[..., Any]:
    """`method` of Gloo or NCCL, with its calls logged if that is on and they are of a kind that is."""
    known = _BACKEND.get(name)
    if known is None or not (logger._taps or logger.wants(known[0])):
        return method
    op, which = known

    def timed(*args: Any) -> Any:
        begin = time.monotonic_ns()
        work = method(*args)
        nbytes = 0 if which < 0 else _nbytes(args[which])

        def done(_: Any = None) -> None:
            logger.finished(Finished(op, nbytes, begin, time.monotonic_ns(), ranks, ""))

        if device.type == "cuda":
            import torch

            if work is not None:  # NCCL's has none where the call is synchronous
                work.wait()
            torch.cuda.synchronize(device)
            done()
        else:
            try:
                work.get_future().add_done_callback(done)
            except RuntimeError:  # a work without a future: a barrier
                work.wait()
                done()
        return work

    return timed
