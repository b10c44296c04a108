"""One rank of collectives.py: the contenders of one op, dtype and size, their check, and timed loops, on command of the
conductor.

Started by collectives.py (through mpirun where the set has an MPI), never by hand. The conductor says over a local
socket what to do: prepare, verify a contender, run it; so that all ranks of all sets do the same thing at the same
time, and the others sleep.
"""

from __future__ import annotations

import ctypes
import datetime
import importlib.machinery
import importlib.util
import itertools
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client

from common import EXTENSIONS, cpu_flags, die_with_parent, require_deepc

OPS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_gather_in_place",
    "broadcast",
    "all_to_all",
    "reduce",
    "gather",
    "scatter",
    "send_recv",
    "barrier",
)
ROOTED = ("broadcast", "reduce", "gather", "scatter")
# of a rooted op: call i has root i % ranks, so that a loop measures how long a call takes, not how far the root can run
# ahead
TURNS = "_turns"
ROOT = 0
PYTHON_LIMIT = 64 << 10  # bytes up to which the Python overhead of mpi4py and of DeepSpeed's call shows
STAGGER = 36 << 10  # between the starts of registered arrays: equal addresses modulo 2 MiB would share cache sets
TINY = 2.0**-120  # sums start here and double or quadruple per call, until the refill


class Unsupported(Exception):
    """This contender does not do this call; the text says why."""


class Refused(Exception):
    """The core says that it can't run this call this way."""


# ---- calls in C ------------------------------------------------------------------------------------------------------
_KINDS = (
    "DC_BARRIER",
    "DC_REDUCES",
    "DC_MOVES",
    "DC_BROADCAST",
    "DC_REDUCE",
    "DC_ROOTED",
    "DC_PINGPONG",
    "MPI_BARRIER",
    "MPI_REDUCES",
    "MPI_MOVES",
    "MPI_BROADCAST",
    "MPI_REDUCE",
    "MPI_ROOTED",
    "MPI_PINGPONG",
    "COPY",
    "DC_COPY",
    "PEER_COPY",
)
KIND = {name: i for i, name in enumerate(_KINDS)}  # as in coll_loop.c
_SHAPE = {
    "all_reduce": "REDUCES",
    "reduce_scatter": "REDUCES",
    "all_gather": "MOVES",
    "all_gather_in_place": "MOVES",
    "all_to_all": "MOVES",
    "broadcast": "BROADCAST",
    "reduce": "REDUCE",
    "gather": "ROOTED",
    "scatter": "ROOTED",
    "send_recv": "PINGPONG",
    "barrier": "BARRIER",
}
_DC = {
    "all_reduce": "dc_all_reduce",
    "reduce_scatter": "dc_reduce_scatter",
    "all_gather": "dc_all_gather",
    "all_gather_in_place": "dc_all_gather",
    "all_to_all": "dc_all_to_all",
    "broadcast": "dc_broadcast",
    "reduce": "dc_reduce_to",
    "gather": "dc_gather",
    "scatter": "dc_scatter",
    "barrier": "dc_barrier",
}
_MPI = {
    "all_reduce": "Allreduce",
    "reduce_scatter": "Reduce_scatter_block",
    "all_gather": "Allgather",
    "all_gather_in_place": "Allgather",
    "all_to_all": "Alltoall",
    "broadcast": "Bcast",
    "reduce": "Reduce",
    "gather": "Gather",
    "scatter": "Scatter",
    "barrier": "Barrier",
}
COPIES = {"memcpy": "COPY", "dc_copy": "DC_COPY"}


class Call(ctypes.Structure):
    """bench_call of coll_loop.c."""

    _fields_ = (
        [(n, ctypes.c_ssize_t) for n in ("fn", "fn2", "comm", "dtype", "op")]
        + [(n, ctypes.c_void_p) for n in ("inp", "out")]
        + [(n, ctypes.c_int64) for n in ("count", "root", "ranks", "peer", "first")]
        + [(n, ctypes.c_void_p) for n in ("refill", "source")]
        + [(n, ctypes.c_int64) for n in ("bytes", "every")]
    )


def address(function) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value


# ---- buffers ---------------------------------------------------------------------------------------------------------
class Buffers:
    """inp and out of one op: `n` elements each or one part (n / world), by what the op takes."""

    def __init__(self, op: str, n: int, rank: int, world: int, a, b) -> None:
        """a, b: memory of n elements each."""
        part = n // world
        self.a, self.b = a, b
        if op == "all_gather_in_place":
            self.inp = b[rank * part : (rank + 1) * part]
        elif op in ("all_reduce", "broadcast"):
            self.inp = b
        else:
            self.inp = a[:part] if op in ("all_gather", "gather") else a
        self.out = b[:part] if op in ("reduce_scatter", "scatter") else b


class Rank:
    """The state of this process."""

    def __init__(self, rank: int, world: int, args) -> None:
        import torch
        import torch.distributed as dist
        from common import compiled

        self.rank, self.world, self.args = rank, world, args
        torch.set_num_threads(1)
        from deepc.comm import shared as node
        from deepc.comm.c10d.group import DEFAULT_STAGING
        from deepc.core.lib import C

        self.core = C
        path = compiled("coll_loop.c", "coll_loop.so", "-shared", "-fPIC")
        if path is None:
            raise SystemExit("bench: no C compiler: the collectives can't be measured without Python")
        self.loop = ctypes.CDLL(str(path))
        self.loop.bench_loop.argtypes = [
            ctypes.POINTER(Call),
            ctypes.c_int,
            ctypes.c_int64,
            ctypes.POINTER(ctypes.c_double),
        ]
        store = dist.FileStore(args.store, world)
        slot_bytes, slots = DEFAULT_STAGING

        def open_comm(label: str):
            return node.open_comm(
                dist.PrefixStore(label, store),
                rank,
                world,
                label=label,
                timeout=datetime.timedelta(seconds=args.limit),
                slot_bytes=slot_bytes,
                slots=slots,
            )

        self.comm = open_comm("bench")
        self.group = self.gloo = self.mpi = self.deepspeed = None
        wanted = set(args.contenders)
        if args.set == "main" and wanted & {"torch", "gloo"}:
            dist.init_process_group("deepc", store=dist.PrefixStore("pg", store), rank=rank, world_size=world)
            self.group = dist.group.WORLD
            self.gloo = dist.new_group(backend="gloo")
        if args.mpi and wanted & {"mpi", "mpi4py"}:
            self.mpi = Mpi(self, args.mpi)
        if args.set == "main" and args.deepspeed and "deepspeed" in wanted:
            self.deepspeed = load_deepspeed(rank, world)
        self.segment = None
        if "registered" in wanted:
            self.region = (max(args.bytes) + (2 << 20)) >> 21 << 21
            self.segment = self.comm.segment(self._segment_bytes())
        self.forced = {}  # row of the core's algorithm table -> a communicator that uses it, and its segment
        for row, value in (item.split(":") for item in args.rows_forced):
            os.environ["DEEPC_ALGO"] = value
            comm = open_comm(row)
            self.forced[row] = (comm, comm.segment(self._segment_bytes()))
        os.environ.pop("DEEPC_ALGO", None)
        self.calls: dict[str, Contender] = {}

    def _segment_bytes(self) -> int:
        return self.world * 2 * (self.region + STAGGER)

    # ---- one op, dtype and size --------------------------------------------------------------------------------------
    def prepare(self, op: str, dtype: str, nbytes: int) -> list[str]:
        """Names of this set's contenders."""
        import torch

        kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        self.calls = {}
        self.op, self.dtype, self.turns = op.removesuffix(TURNS), kind, op.endswith(TURNS)
        self.n = n = max(self.world, nbytes // kind.itemsize // self.world * self.world)
        self.fresh = None
        op = self.op
        if op == "all_reduce" and n * kind.itemsize <= 1 << 20:  # larger ones are called fewer times than the sums bear
            self.fresh = self._pattern(self.rank, n) * TINY
        memory = [("", torch.empty(n, dtype=kind), torch.empty(n, dtype=kind))]
        if self.segment is not None:
            memory.append((", registered", *self.registered(self.rank)))
        wanted, main = set(self.args.contenders), self.args.set == "main"
        for where, a, b in memory:
            if op in ("barrier", "send_recv") and where:
                continue  # barriers have no buffers, and messages no registered path of their own
            bufs = Buffers(op, n, self.rank, self.world, a, b)
            if main and "core" in wanted:
                self._add(f"deepc C core{where}", lambda: self._core(bufs), bufs)
            if main and not where and self.group is not None and "torch" in wanted:
                self._add("deepc", lambda: self._torch(bufs, self.group), bufs)
            if main and not where and self.gloo is not None and "gloo" in wanted:
                self._add("Gloo", lambda: self._torch(bufs, self.gloo), bufs)
            if self.mpi is not None and "mpi" in wanted:
                self._add(f"{self.mpi.name}{where}", lambda: self.mpi.compiled(bufs), bufs)
            if (
                self.mpi is not None
                and not where
                and "mpi4py" in wanted
                and (n * kind.itemsize <= PYTHON_LIMIT or op == "barrier")
            ):
                self._add(f"mpi4py ({self.mpi.name})", lambda: self.mpi.interpreted(bufs), bufs)
            if self.deepspeed is not None and op == "all_reduce" and not where:
                self._add("DeepSpeed", lambda: self._deepspeed_loop(bufs), bufs)
                if n * kind.itemsize <= PYTHON_LIMIT:
                    self._add("DeepSpeed (Python)", lambda: self._deepspeed(bufs), bufs)
            if main and "copy" in wanted and op != "barrier":
                for name in COPIES:
                    self._add(f"{name}{where}", lambda: self._copy(bufs, name), bufs)
                    if where and n * kind.itemsize >= 64 << 10:
                        self._add(f"{name} of a peer's{where}", lambda: self._peer_copy(bufs, name), bufs)
        return list(self.calls)

    def prepare_forced(self, op: str, dtype: str, nbytes: int, rows: list[str]) -> list[str]:
        """Contenders of thresholds.py: the core by each of these rows of its table, on ordinary and on registered
        memory."""
        import torch

        self.prepare(op, dtype, nbytes)
        self.calls = {}
        a, b = torch.empty(self.n, dtype=self.dtype), torch.empty(self.n, dtype=self.dtype)
        for row in rows:
            comm, segment = self.forced[row]
            for where, arrays in (("", (a, b)), (", registered", self.registered(self.rank, segment))):
                bufs = Buffers(self.op, self.n, self.rank, self.world, *arrays)
                self._add(row + where, lambda: self._core(bufs, comm), bufs)
        return list(self.calls)

    def _add(self, name: str, make: Callable, bufs: Buffers) -> None:
        try:
            self.calls[name] = Contender(self, make(), bufs, name)
        except Unsupported as exc:
            self.calls[name] = Contender(self, exc, bufs, name)

    def c_call(self, kind: str, bufs: Buffers, **fields) -> CLoop:
        """A loop in C over bufs; the count is that of one part for ops that work on parts."""
        call = Call(
            inp=bufs.inp.data_ptr(),
            out=bufs.out.data_ptr(),
            count=self.count(),
            root=ROOT,
            ranks=self.world if self.turns else 0,
            peer=self.rank ^ 1,
            first=int(self.rank % 2 == 0),
        )
        if self.fresh is not None:
            call.refill, call.source, call.bytes, call.every = (
                bufs.b.data_ptr(),
                self.fresh.data_ptr(),
                self.n * self.dtype.itemsize,
                self.every(),
            )
        for name, value in fields.items():
            setattr(call, name, value)
        return CLoop(self, KIND[kind], call)

    def registered(self, rank: int, segment=None) -> list:
        """The two registered arrays of `rank`."""
        starts = (2 * rank + i for i in range(2))
        return [(segment or self.segment).tensor(self.dtype, i * (self.region + STAGGER), self.n) for i in starts]

    def count(self) -> int:
        return (
            self.n if self.op in ("all_reduce", "broadcast", "reduce", "send_recv", "barrier") else self.n // self.world
        )

    def every(self) -> int:
        """Calls after which a sum that starts at TINY is still finite."""
        return int(230 / math.log2(self.world)) if self.world > 1 else 200

    def _core(self, bufs: Buffers, comm=None) -> CLoop:
        from deepc.core.ops import CODES

        names = ("dc_send", "dc_recv") if self.op == "send_recv" else (_DC[self.op],)
        fns = []
        for name in names:
            if not hasattr(self.core, name):
                raise Unsupported(f"libdeepc.so has no {name}")
            fns.append(address(getattr(self.core, name)))
        if self.op == "send_recv" and self.world % 2:
            raise Unsupported("ping-pong needs an even number of ranks")
        return self.c_call(
            "DC_" + _SHAPE[self.op],
            bufs,
            fn=fns[0],
            fn2=fns[-1],
            comm=(comm or self.comm).handle,
            dtype=CODES[self.dtype],
            op=0,
        )

    def _copy(self, bufs: Buffers, name: str) -> CLoop:
        return CLoop(
            self,
            KIND[COPIES[name]],
            Call(
                fn=address(self.core.dc_copy),
                inp=bufs.a.data_ptr(),
                out=bufs.b.data_ptr(),
                count=self.n * self.dtype.itemsize,
            ),
        )

    def _peer_copy(self, bufs: Buffers, name: str) -> CLoop:
        a, b = self.registered((self.rank + 1) % self.world)
        return CLoop(
            self,
            KIND["PEER_COPY"],
            Call(
                fn=address(self.core.dc_copy) if name == "dc_copy" else 0,
                inp=a.data_ptr(),
                out=bufs.b.data_ptr(),
                source=b.data_ptr(),
                refill=bufs.a.data_ptr(),
                count=self.n * self.dtype.itemsize,
            ),
        )

    def _torch(self, bufs: Buffers, pg) -> Callable[[], None]:
        import torch.distributed as dist

        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 has new names
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        inp, out, peer = bufs.inp, bufs.out, self.rank ^ 1
        parts_in, parts_out = list(inp.chunk(self.world)), list(out.chunk(self.world))

        def ping_pong():
            if self.rank % 2 == 0:
                dist.send(inp, peer, group=pg)
                dist.recv(out, peer, group=pg)
            else:
                dist.recv(out, peer, group=pg)
                dist.send(inp, peer, group=pg)

        if self.op in ROOTED:

            def call(root):
                mine = self.rank == root
                return {
                    "broadcast": lambda: dist.broadcast(out, root, group=pg),
                    "reduce": lambda: dist.reduce(
                        inp, root, group=pg
                    ),  # in place: grows from call to call, which costs nothing
                    "gather": lambda: dist.gather(inp, parts_out if mine else None, root, group=pg),
                    "scatter": lambda: dist.scatter(out, parts_in if mine else None, root, group=pg),
                }[self.op]

            return self.in_turns(call)
        return {
            "all_reduce": lambda: dist.all_reduce(out, group=pg),
            "reduce_scatter": lambda: scatter(out, inp, group=pg),
            "all_gather": lambda: gather(out, inp, group=pg),
            "all_gather_in_place": lambda: gather(out, inp, group=pg),
            "all_to_all": lambda: dist.all_to_all_single(out, inp, group=pg),
            "send_recv": ping_pong,
            "barrier": lambda: dist.barrier(pg),
        }[self.op]

    def in_turns(self, call: Callable[[int], Callable[[], None]]) -> Callable[[], None]:
        """call(root) for a fixed root, or for one root after the other."""
        return Turns([call(root) for root in range(self.world)]) if self.turns else call(ROOT)

    def _deepspeed_loop(self, bufs: Buffers) -> ScriptLoop:
        self._deepspeed_runs()
        return ScriptLoop(self, bufs.out)

    def _deepspeed_runs(self) -> None:
        if self.dtype.itemsize == 2 and cpu_flags() and "avx512f" not in cpu_flags():
            raise Unsupported("DeepSpeed's all-reduce of 16 bits dies of an illegal instruction without AVX-512")

    def _deepspeed(self, bufs: Buffers) -> Callable[[], None]:
        self._deepspeed_runs()
        out, op = bufs.out, self.deepspeed
        return lambda: op(out)

    # ---- checks ------------------------------------------------------------------------------------------------------
    def _pattern(self, rank: int, n: int, start: int = 0):
        """Elements start .. start + n of what `rank` puts in: small whole numbers, so that sums are exact in bf16."""
        import torch

        one = torch.arange(1, 6, dtype=torch.float32).roll(-(start % 5))
        return (one.repeat(n // 5 + 1)[:n] + rank).to(self.dtype)

    def _expected(self):
        """What `out` must hold after one call, or None where this rank gets nothing."""
        import torch

        n, part, rank, world = self.n, self.n // self.world, self.rank, self.world
        if self.op in ("all_reduce", "reduce"):
            return (
                None if self.op == "reduce" and rank != ROOT else self._pattern(0, n) * world + world * (world - 1) // 2
            )
        if self.op == "reduce_scatter":
            return self._pattern(0, part, rank * part) * world + world * (world - 1) // 2
        if self.op.startswith("all_gather") or (self.op == "gather" and rank == ROOT):
            starts = [r * part if self.op == "all_gather_in_place" else 0 for r in range(world)]
            return torch.cat([self._pattern(r, part, s) for r, s in enumerate(starts)])
        if self.op == "broadcast":
            return self._pattern(ROOT, n)
        if self.op == "all_to_all":
            return torch.cat([self._pattern(r, part, rank * part) for r in range(world)])
        if self.op == "scatter":
            return self._pattern(ROOT, part, rank * part)
        return self._pattern(rank ^ 1, n) if self.op == "send_recv" else None

    def fill(self, bufs: Buffers) -> None:
        fresh = self._pattern(self.rank, self.n)
        bufs.a.copy_(fresh)
        if bufs.inp.data_ptr() == bufs.a.data_ptr():
            bufs.b.fill_(-1)
        else:
            bufs.b.copy_(fresh)

    def verify(self, name: str) -> str:
        """ "" if one call gives the right answer, "unsupported: ..." or "wrong: ..."."""
        contender = self.calls[name]
        if isinstance(contender.call, Unsupported):
            return f"unsupported: {contender.call}"
        self.fill(contender.bufs)
        self.comm.barrier()
        try:
            contender.run(1)
        except (Unsupported, Refused) as exc:
            return f"unsupported: {exc}"
        if name.startswith(tuple(COPIES)) or self.op == "barrier":
            return ""
        import torch

        want = self._expected()
        got = (
            contender.bufs.inp if self.op == "reduce" and name in ("deepc", "Gloo") else contender.bufs.out
        )  # dist.reduce works in place
        if want is None or torch.equal(got, want):
            return ""
        at = int((got != want).nonzero()[0])
        return f"wrong: element {at} of {got.numel()} is {got[at].item()}, expected {want[at].item()}"

    def run(self, name: str, loops: int, warm: int) -> float:
        """Seconds of `loops` calls, started together."""
        contender = self.calls[name]
        if self.op == "all_reduce" and not name.startswith(tuple(COPIES)):
            contender.bufs.b.copy_(self.fresh) if self.fresh is not None else contender.bufs.b.fill_(TINY)
        if warm:
            contender.run(warm)
        self.comm.barrier()
        return contender.run(loops)

    def close(self) -> None:
        import torch.distributed as dist

        self.calls = {}
        self.segment = None
        for comm, _ in self.forced.values():
            comm.close()
        self.comm.barrier()
        self.comm.close()
        if self.group is not None:
            dist.destroy_process_group()
        if self.mpi is not None:
            self.mpi.finalize()


class CLoop:
    def __init__(self, rank: Rank, kind: int, call: Call) -> None:
        self._rank, self._kind, self._call = rank, kind, call

    def run(self, loops: int) -> float:
        took = ctypes.c_double()
        rc = self._rank.loop.bench_loop(ctypes.byref(self._call), self._kind, loops, ctypes.byref(took))
        if rc:
            text = f"status {rc}: {self._rank.core.dc_last_error().decode(errors='replace')}"
            raise Refused(text) if self._rank.core.dc_status_name(rc) == b"E_UNSUPPORTED" else RuntimeError(text)
        return took.value


class ScriptLoop:
    """DeepSpeed's all-reduce from a loop in TorchScript, which runs without Python. (Its C++ function takes a tensor:
    no loop in C.)"""

    _loop = None

    def __init__(self, rank: Rank, tensor) -> None:
        import torch

        if ScriptLoop._loop is None:
            ScriptLoop._loop = torch.jit.CompilationUnit(
                "def loop(x: Tensor, fresh: Tensor, every: int, n: int):\n"
                "    for i in range(n):\n"
                "        torch.ops.deepspeed.inference_all_reduce_(x)\n"
                "        if every > 0 and i % every == every - 1:\n"
                "            x.copy_(fresh)\n"
            ).loop
            for _ in range(3):
                ScriptLoop._loop(tensor, tensor, 0, 0)  # let it optimise before any rank is inside a call
        self._tensor, self._fresh, self._every = (
            tensor,
            tensor if rank.fresh is None else rank.fresh,
            0 if rank.fresh is None else rank.every(),
        )

    def run(self, loops: int) -> float:
        started = time.perf_counter()
        ScriptLoop._loop(self._tensor, self._fresh, self._every, loops)
        return time.perf_counter() - started


class Turns:
    """Calls one function after the other, from the first in every loop."""

    def __init__(self, calls: list[Callable[[], None]]) -> None:
        self._calls, self._next = calls, itertools.cycle(calls)

    def restart(self) -> None:
        self._next = itertools.cycle(self._calls)

    def __call__(self) -> None:
        next(self._next)()


class Contender:
    def __init__(self, rank: Rank, call, bufs: Buffers, name: str) -> None:
        self._rank, self.call, self.bufs, self.name = rank, call, bufs, name

    def run(self, loops: int) -> float:
        if isinstance(self.call, (CLoop, ScriptLoop)):
            return self.call.run(loops)
        call, fresh, to = self.call, self._rank.fresh, self.bufs.b
        if isinstance(call, Turns):
            call.restart()
        if fresh is None:
            started = time.perf_counter()
            for _ in range(loops):
                call()
            return time.perf_counter() - started
        every = self._rank.every()
        started = time.perf_counter()
        for i in range(1, loops + 1):
            call()
            if i % every == 0:
                to.copy_(fresh)
        return time.perf_counter() - started


# ---- peers -----------------------------------------------------------------------------------------------------------
class Mpi:
    """OpenMPI or MPICH: the same functions from a loop in C, and through mpi4py's upper-case methods with prepared
    buffer descriptions."""

    def __init__(self, rank: Rank, name: str) -> None:
        from mpi4py import rc

        rc.threads = False  # no locks in MPI's calls: the fastest that it has
        from mpi4py import MPI

        if MPI.COMM_WORLD.size != rank.world or MPI.COMM_WORLD.rank != rank.rank:
            raise RuntimeError(
                f"{name} sees rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}, expected {rank.rank} of"
                f" {rank.world}: mpirun and libmpi don't belong together"
            )
        self.name, self._rank, self._mpi, self._comm = name, rank, MPI, MPI.COMM_WORLD
        self._lib = ctypes.CDLL("libmpi.so.40" if name == "OpenMPI" else "libmpich.so.12")
        op = ctypes.c_ssize_t(0)
        if self._lib.MPI_Op_create(rank.loop.bench_sum_bf16, 1, ctypes.byref(op)):
            raise RuntimeError("MPI_Op_create failed")
        self._sum_bf16 = op.value
        self.version = " ".join(MPI.Get_library_version().splitlines()[0].split(",")[0].split())

    def _types(self):
        """(datatype, sum) for the call's dtype. MPI has no bf16: 16-bit elements with a sum of our own, vectorised."""
        import torch

        M = self._mpi
        return (M.FLOAT, M.SUM) if self._rank.dtype is torch.float32 else (M.UINT16_T, M.Op.fromhandle(self._sum_bf16))

    def compiled(self, bufs: Buffers) -> CLoop:
        rank, op = self._rank, self._rank.op
        dtype, sum_op = self._types()
        names = ("Send", "Recv") if op == "send_recv" else (_MPI[op],)
        fields = {}
        if op in ("all_reduce", "all_gather_in_place"):
            fields["inp"] = int(self._mpi.IN_PLACE) & (2**64 - 1)
        return rank.c_call(
            "MPI_" + _SHAPE[op],
            bufs,
            fn=address(getattr(self._lib, "MPI_" + names[0])),
            fn2=address(getattr(self._lib, "MPI_" + names[-1])),
            comm=self._comm.handle,
            dtype=dtype.handle,
            op=sum_op.handle,
            **fields,
        )

    def interpreted(self, bufs: Buffers) -> Callable[[], None]:
        import torch

        rank, op, comm, M = self._rank, self._rank.op, self._comm, self._mpi
        dtype, sum_op = self._types()
        n = rank.count()

        def spec(t):
            return [t.view(torch.uint8).numpy() if t.dtype is torch.bfloat16 else t.numpy(), n, dtype]

        inp, out, peer = spec(bufs.inp), spec(bufs.out), rank.rank ^ 1
        if op in ("all_reduce", "all_gather_in_place"):
            inp = M.IN_PLACE
        if op == "send_recv":
            send, recv = comm.Send, comm.Recv
            first = rank.rank % 2 == 0
            return (
                (lambda: (send(inp, peer), recv(out, peer))) if first else (lambda: (recv(out, peer), send(inp, peer)))
            )
        method = getattr(comm, _MPI[op])
        if op in ROOTED:

            def call(root):
                mine = rank.rank == root
                return {
                    "broadcast": lambda: method(out, root),
                    "reduce": lambda: method(inp, out if mine else None, sum_op, root),
                    "gather": lambda: method(inp, out if mine else None, root),
                    "scatter": lambda: method(inp if mine else None, out, root),
                }[op]

            return rank.in_turns(call)
        if op == "barrier":
            return lambda: method()
        return (lambda: method(inp, out, sum_op)) if _SHAPE[op] == "REDUCES" else (lambda: method(inp, out))

    def finalize(self) -> None:
        if not self._mpi.Is_finalized():
            self._mpi.Finalize()


def load_deepspeed(rank: int, world: int):
    """DeepSpeed's shared-memory all-reduce, from the library that peers.py has built; without importing DeepSpeed,
    which takes seconds."""
    import torch

    path = EXTENSIONS / "deepspeed_shm_comm" / "deepspeed_shm_comm.so"
    os.environ["LOCAL_SIZE"] = str(world)  # "all ranks are on this machine"
    loader = importlib.machinery.ExtensionFileLoader("deepspeed_shm_comm", str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("deepspeed_shm_comm", loader))
    loader.exec_module(module)
    module.initialize(world, rank)
    return torch.ops.deepspeed.inference_all_reduce_.default


# ---- commands --------------------------------------------------------------------------------------------------------
def serve(args) -> int:
    die_with_parent()
    rank = int(next(os.environ[k] for k in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK") if k in os.environ))
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    conductor = Client(("127.0.0.1", args.conductor), authkey=os.environ["BENCH_KEY"].encode())
    conductor.send(rank)
    try:
        require_deepc()
        me = Rank(rank, args.ranks, args)
        conductor.send(("ready", me.mpi.version if me.mpi else ""))
        while True:
            command, *rest = conductor.recv()
            if command == "close":
                me.close()
                conductor.send(("closed", None))
                return 0
            conductor.send((command, getattr(me, command)(*rest)))
    except EOFError:
        return 1  # the conductor is gone
    except BaseException as exc:
        conductor.send(("failed", f"{type(exc).__name__}: {exc}\n{traceback.format_exc()}"))
        sys.stderr.flush()
        os._exit(1)  # MPI's atexit would wait for ranks that wait for us
