"""A training step without its numbers: which memory it would take, allocation by allocation.

The model runs forward, backward and optimizer step on fake tensors (torch's FakeTensorMode: shapes and dtypes, no
data), in a forked child, so that nothing of it reaches the caller: no parameter, counter, random state or page. A
dispatch mode sees every storage come and go. For each, the child asks this process's own malloc for as many bytes and
never touches them: so the C library itself says which blocks fall into which holes, what goes back to the kernel and
what stays, and a map of pages says how much would be resident. That matters: with glibc's thresholds, which rise at the
first large frees, the heap of a CPU training holds 10 to 40 % more than its live tensors (measured on GPT-2 shapes),
and sums of live bytes miss it.

What it can't see: buffers inside of kernels, and models that read values of tensors (a loss's `.item()` gets a guess,
and a note says so). Tried before: replaying the recorded events in a fresh heap gave 2 % of holes where the real run
had 10 to 35 %, because the small objects of autograd, which split the holes, were missing."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import os
import select
import signal
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ...core import memory
from ...core.foreign import patches, private
from ...core.lib import C, call
from ...errors import ArgumentError, DeepcError, UnsupportedError
from .shapes import WithoutValues, Work

if TYPE_CHECKING:
    from ..layout import Layout

PAGE = 4096
_IS_MMAPPED = 2  # in the word before a block of glibc's
THP_BYTES = 2 << 20  # from here on torch aligns to pages where its huge-page switch is on (c10/core/impl/alloc_cpu.cpp)


# ---- in a child ------------------------------------------------------------------------------------------------------
def forked(
    work: Callable[[], dict[str, Any]], limit_s: float = 300.0, stuck_s: float = 10.0, tries: int = 3
) -> dict[str, Any]:
    """What `work` returns (JSON types) when a forked child calls it. Raises UnsupportedError with the reason if it
    fails, dies or takes longer.

    A fork may catch another thread of this process with a lock, which no thread of the child will ever release. A child
    that has slept for stuck_s without using its processor once waits for such a lock: it is ended, and another one is
    forked, `tries` in all."""
    for _ in range(tries):
        answer = _forked_once(work, limit_s, stuck_s)
        if answer is not None:
            return answer
        logging.getLogger("deepc").info("a dry run's process waited for a lock that it was forked with; once more")
    raise UnsupportedError(
        f"{tries} processes of the dry run stood still for {stuck_s:g} s each; estimate without a sample batch (model"
        " states only)"
    )


def _forked_once(work: Callable[[], dict[str, Any]], limit_s: float, stuck_s: float) -> dict[str, Any] | None:
    """As forked; None: the child stood still."""
    sys.stdout.flush()
    sys.stderr.flush()
    read, write = os.pipe()
    with contextlib.ExitStack() as stack:
        import warnings

        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # Python 3.12 warns of forks beside threads; the child uses none of them
        if gc.isenabled():
            stack.callback(gc.enable)
            gc.disable()
        pid = os.fork()
        if pid == 0:
            gc.freeze()
    if pid == 0:
        os.close(read)
        _child(work, write)
    os.close(write)
    try:
        text, stuck = _read_all(read, limit_s, _Standstill(pid, stuck_s))
    finally:
        os.close(read)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if stuck:
        return None
    if text is None:
        raise UnsupportedError(
            f"the dry run took longer than {limit_s:.0f} s; use a smaller sample batch, or estimate without one (model"
            " states only)"
        )
    if not text:
        raise UnsupportedError(
            f"the dry run's process ended without an answer (exit code {code}); estimate without a sample batch (model"
            " states only)"
        )
    answer: dict[str, Any] = json.loads(text)
    if "error" in answer:
        raise UnsupportedError(answer["error"])
    return answer


class _Standstill:
    """Tells when process `pid` has slept for `limit_s` without having run in between."""

    def __init__(self, pid: int, limit_s: float) -> None:
        self._path, self._limit_s = f"/proc/{pid}/stat", limit_s
        self._seen, self._since = "", time.monotonic()

    def __call__(self) -> bool:
        try:
            with open(self._path) as f:
                fields = f.read().rpartition(")")[2].split()  # proc(5): state, then utime and stime as 14th and 15th
        except OSError:
            return False
        now, seen = time.monotonic(), " ".join([fields[0], *fields[11:13]])
        if seen != self._seen or fields[0] != "S":
            self._seen, self._since = seen, now
        return now - self._since >= self._limit_s


def _child(work: Callable[[], dict[str, Any]], write: int) -> None:
    """Never returns, runs nothing of the parent's exit."""
    try:
        patches.applied("threads")
        torch.set_num_threads(1)  # a forked child has no OpenMP threads to wait for
        logging.getLogger("torch._subclasses.fake_tensor").setLevel(
            logging.CRITICAL
        )  # what fails is in the answer, without torch's traceback
        answer = work()
    except DeepcError as exc:
        answer = {"error": str(exc)}
    except BaseException as exc:
        answer = {
            "error": (
                f"the dry run failed with {type(exc).__name__}: {str(exc)[:600]} (at {_place(exc)}). A dry run has"
                " shapes but no values; estimate without a sample batch for the model states alone"
            )
        }
    try:
        with os.fdopen(write, "w") as f:
            f.write(json.dumps(answer))
    finally:
        os._exit(0)


def _place(exc: BaseException) -> str:
    """The innermost frame outside of torch."""
    import traceback

    frames = [
        f
        for f in traceback.extract_tb(exc.__traceback__)
        if f"{os.sep}torch{os.sep}" not in f.filename and f.filename != __file__
    ]
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else "the dry run"


def _read_all(fd: int, limit_s: float, stands_still: _Standstill) -> tuple[str | None, bool]:
    """(what was written until the end, False); (None, False) after limit_s; (None, True): who writes stands still."""
    parts: list[bytes] = []
    end = time.monotonic() + limit_s
    while (left := end - time.monotonic()) > 0:
        if select.select([fd], [], [], min(left, 0.5))[0]:
            part = os.read(fd, 1 << 16)
            if not part:
                return b"".join(parts).decode(), False
            parts.append(part)
        elif stands_still():
            return None, True
    return None, False


def load_compiler() -> int:
    """Imports what the first optimizer of torch.optim in a process imports (torch's compiler, some 65 MB; deepc's own
    do without); returns the memory that this took."""
    before = anonymous_bytes()
    return max(0, anonymous_bytes() - before) if private.load_compiler() else 0


def anonymous_bytes() -> int:
    """Resident private memory of this process that no file backs."""
    with open("/proc/self/status") as f:
        for line in f:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


# ---- malloc's own answer ---------------------------------------------------------------------------------------------
class _Pages:
    """Which pages of a range of addresses are resident, from page number `start` on."""

    def __init__(self, start: int, count: int) -> None:
        self.start = start
        self._resident = self._read(count)

    def _read(self, count: int) -> bytearray:
        with open("/proc/self/pagemap", "rb") as f:
            f.seek(8 * self.start)
            entries = f.read(8 * count)
        pages = bytearray(1 if high & 0xC0 else 0 for high in entries[7::8])  # bits 63 and 62: present, swapped out
        pages.extend(bytes(count - len(pages)))
        return pages

    def look(self, count: int) -> None:
        self._resident = self._read(count)

    def touch(self, begin: int, end: int) -> int:
        """Makes pages [begin, end) resident; returns how many were not."""
        begin, end = begin - self.start, end - self.start
        if end > len(self._resident):
            self._resident.extend(bytes(end - len(self._resident) + 16384))
        new = self._resident.count(0, begin, end)
        if new:
            self._resident[begin:end] = b"\1" * (end - begin)
        return new

    def drop(self, begin: int, end: int) -> int:
        """Gives pages [begin, end) back; returns how many were resident."""
        begin, end = begin - self.start, min(end - self.start, len(self._resident))
        gone = self._resident.count(1, begin, end)
        self._resident[begin:end] = bytes(end - begin)
        return gone


class ShadowHeap:
    """Blocks from this process's malloc, and from the core's heap where the engine uses it, that stand for tensors.
    `resident`: how many more bytes would be resident than at the start if every block were written from end to end;
    `peak`: the most of it. Pages of a heap count from their first use until they go back to the system.

    Only for the main thread of glibc (its mmap flag and program break are read); `usable` says if that is what runs
    here.
    """

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        self.usable = (
            hasattr(libc, "gnu_get_libc_version")
            and hasattr(libc, "posix_memalign")
            and not os.environ.get("LD_PRELOAD")
        )
        self.resident = self.peak = self._mapped = self._heap = self._base = 0
        self._blocks: dict[int, tuple[int, int]] = {}  # key -> (address, or 0 if it has a mapping of its own; bytes)
        self._huge = os.environ.get("THP_MEM_ALLOC_ENABLE") == "1"
        self._core: _Pages | None = None
        if not self.usable:
            return
        self._free, self._memalign, self._sbrk = libc.free, libc.posix_memalign, libc.sbrk
        self._free.argtypes, self._free.restype = [ctypes.c_void_p], None
        self._memalign.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t]
        self._sbrk.argtypes, self._sbrk.restype = [ctypes.c_ssize_t], ctypes.c_void_p
        self._pointer = ctypes.c_void_p()
        self._top = self._sbrk(0) // PAGE
        start = _heap_start() // PAGE or self._top
        self._pages = _Pages(start, self._top - start)

    def look(self) -> None:
        """Reads from the kernel which pages of the heap are resident now."""
        if self.usable:
            self._top = self._sbrk(0) // PAGE
            self._pages.look(max(0, self._top - self._pages.start))

    def use_core(self) -> None:
        """From here on large blocks come from the core's heap, as the engine's do."""
        if self.usable and memory.keep_heap():
            stats = memory.heap()
            self._core = _Pages(stats["base"] // PAGE, stats["extent"] // PAGE)

    def alloc(self, key: int, nbytes: int) -> None:
        if nbytes == 0:
            return
        if not self.usable:
            self._blocks[key] = (0, nbytes)
            self._mapped += nbytes
        elif self._core is None or nbytes < THP_BYTES // 2 or not self._from_core(key, nbytes):
            self._from_malloc(key, nbytes)
        self._note()

    @property
    def in_core(self) -> bool:
        """Whether large blocks come from the core's heap."""
        return self._core is not None

    def alloc_high(self, key: int, nbytes: int) -> None:
        """Whole huge pages of the core's heap, as a lease takes them (ops/base/lease.c)."""
        if not self._from_core(key, nbytes, C.dc_heap_take_high):
            self._blocks[key] = (0, nbytes)
            self._mapped += nbytes
        self._note()

    def _from_core(self, key: int, nbytes: int, take: Callable[[int], int | None] = C.dc_heap_take) -> bool:
        at = take(nbytes)
        if not at:
            return False
        self._blocks[key] = (at, -nbytes)
        unit = THP_BYTES // PAGE if self._huge else 1  # a huge page is resident as a whole
        assert self._core is not None
        self._heap += PAGE * self._core.touch(at // PAGE // unit * unit, -(-(at + nbytes) // (PAGE * unit)) * unit)
        return True

    def _from_malloc(self, key: int, nbytes: int) -> None:
        huge = self._huge and nbytes >= THP_BYTES
        if self._memalign(ctypes.byref(self._pointer), PAGE if huge else 64, nbytes):  # more than the machine has
            self._blocks[key] = (0, nbytes)
            self._mapped += nbytes
            return
        at = self._pointer.value or 0
        self._follow_top()
        # A mapping of its own, or in another arena than the one that grows by the program break: glibc goes there, and
        # stays there, once the break could not grow. Its addresses are a terabyte away from the heap's, which is no
        # place for a map of pages.
        own = (
            bool(ctypes.c_size_t.from_address(at - 8).value & _IS_MMAPPED)
            or not self._pages.start <= at // PAGE < self._top
        )
        self._blocks[key] = (at, nbytes if own else -nbytes)
        if own:
            self._mapped += nbytes
        else:
            self._heap += PAGE * self._pages.touch(at // PAGE, (at + nbytes + PAGE - 1) // PAGE)

    def free(self, key: int) -> None:
        if key not in self._blocks:
            return
        at, nbytes = self._blocks.pop(key)
        if nbytes > 0:
            self._mapped -= nbytes
        if at and not (self._core is not None and C.dc_heap_give(at)):
            self._free(at)
            self._follow_top()
        self._note()

    def hold(self, nbytes: int) -> None:
        """A block for a moment: a kernel's workspace."""
        self.alloc(-1, nbytes)
        self.free(-1)

    def rebase(self, keep: int) -> None:
        """Counts from here on, with `keep` bytes that are there already."""
        if self.usable:
            self._follow_top()
        self._base = self._mapped + self._heap - keep
        self.resident = self.peak = keep

    def come_and_go(self, sizes: list[int]) -> int:
        """Blocks that are all allocated and then all freed, as a model's parameters are. Returns how much `resident`
        falls at the end."""
        for i, n in enumerate(sizes):
            self.alloc(-2 - i, n)
        most = self.resident
        for i in reversed(range(len(sizes))):
            self.free(-2 - i)
        return self.resident - most

    def _note(self) -> None:
        self.resident = self._mapped + self._heap - self._base
        self.peak = max(self.peak, self.resident)

    def _follow_top(self) -> None:
        top = self._sbrk(0) // PAGE
        if top < self._top:
            self._heap -= PAGE * self._pages.drop(top, self._top)
        self._top = top


def _heap_start() -> int:
    with open("/proc/self/maps") as f:
        for line in f:
            if line.rstrip().endswith("[heap]"):
                return int(line.split("-")[0], 16)
    return 0


# ---- storages, born and gone -----------------------------------------------------------------------------------------
def _guess(func: Any, args: tuple[Any, ...]) -> Any:
    """What a model gets that asks a fake tensor for a value: masks are full, numbers are 1."""
    dtype = args[0].dtype if args and isinstance(args[0], torch.Tensor) else torch.bool
    if "equal" in str(func) or "nonzero" in str(func) or dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1


def _make_tracker() -> type[Any]:
    from ...core.foreign.private import TorchDispatchMode, tree_leaves

    class Tracker(TorchDispatchMode):
        """Follows every storage that an operation makes; each lies in `heap` from its birth to its death."""

        def __init__(self, heap: ShadowHeap) -> None:
            super().__init__()  # type: ignore[no-untyped-call]  # torch
            self.heap, self.live, self.peak, self.peak_op, self.op = heap, 0, 0, "", ""
            self.guesses: list[str] = []
            self._sizes: dict[int, int] = {}  # of living storages, by their address
            self._keys: dict[int, int] = {}
            self._count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            self.op = str(func)
            if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
                raise UnsupportedError(
                    f"the model calls the collective {func} in its forward, which a dry run of one rank can't do"
                )
            if func in _READS:
                self.guesses.append(self.op)
                return _guess(func, args)
            if (workspace := _WORKSPACE.get(func)) is not None:
                self.heap.hold(workspace(*args, **(kwargs or {})))
            out = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    self.add(leaf)
            return out

        def known(self, tensor: torch.Tensor) -> None:
            """`tensor` lies in memory that is counted elsewhere."""
            self._sizes[tensor.untyped_storage()._cdata] = 0

        def add(self, tensor: torch.Tensor) -> None:
            storage = tensor.untyped_storage()
            address = storage._cdata
            if address in self._sizes:
                return
            nbytes = storage.nbytes()
            self._count += 1
            self._sizes[address], self._keys[address] = nbytes, self._count
            self.live += nbytes
            self.heap.alloc(self._count, nbytes)
            weakref.finalize(storage, self._gone, address).atexit = False
            if self.live > self.peak:
                self.peak, self.peak_op = self.live, self.op

        def _gone(self, address: int) -> None:
            self.live -= self._sizes.pop(address)
            self.heap.free(self._keys.pop(address))

    return Tracker


_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default, torch.ops.aten.equal.default}
_WORKSPACE: dict[Any, Callable[..., int]] = {}  # bytes of a kernel's own buffers, where they matter


class _Accumulators:
    """Accumulators that borrow their memory from the heap, bucket by bucket, until the step ends
    (state.leases_gradients)."""

    _FIRST_KEY = -(1 << 40)

    def __init__(self, heap: ShadowHeap, layout: Layout, own_all: bool, color: int, size: int) -> None:
        self._heap, self._slice = heap, layout.bucket_elems // (1 if own_all else layout.world) * size
        self._bytes = (layout.total if own_all else layout.shard_elems) * size
        begin, piece = ctypes.c_size_t(), ctypes.c_size_t()
        call("dc_lease_layout", self._bytes, color, ctypes.byref(begin), ctypes.byref(piece))
        self._begin, self._piece = begin.value, piece.value
        self._held: set[int] = set()
        self._buckets = range(layout.nbuckets)

    def finish(self) -> None:
        """The end of a pass: zeros stand for what has not come."""
        for b in self._buckets:
            self.need(b)

    def need(self, bucket: int) -> None:
        begin = self._begin + bucket * self._slice
        end = min(begin + self._slice, self._begin + self._bytes)
        for k in range(begin // self._piece, (end - 1) // self._piece + 1):
            if k not in self._held:
                self._held.add(k)
                self._heap.alloc_high(self._FIRST_KEY - k, self._piece)

    def end(self) -> None:
        for k in self._held:
            self._heap.free(self._FIRST_KEY - k)
        self._held.clear()


def buckets_of_params(layout: Layout) -> list[range]:
    """Which buckets each parameter lies in."""
    b = layout.bucket_elems
    return [range(o // b, (o + n - 1) // b + 1) if n else range(0) for o, n in zip(layout.offsets, layout.numels)]


class _Window:
    """Which gradients the reducer still holds (comm/bucket_reduce.c) when all ranks are equally far."""

    def __init__(self, layout: Layout, slots: int) -> None:
        self._l, self._slots = layout, slots
        self._buckets = buckets_of_params(layout)
        self.begin()

    def begin(self) -> None:
        self._missing = [0] * self._l.nbuckets
        for buckets in self._buckets:
            for b in buckets:
                self._missing[b] += 1
        self.reduced = 0
        self._given: set[int] = set()

    def add(self, index: int) -> list[int]:
        """Gives the gradient of parameter `index`; returns whose gradients are all written now."""
        self._given.add(index)
        open_until, moved = self.reduced + self._slots, True
        left = {i: self._buckets[i] for i in self._given}
        for b in self._buckets[index]:
            self._missing[b] -= 1
        while moved:
            moved = False
            while self.reduced < self._l.nbuckets and self.reduced < open_until and self._missing[self.reduced] == 0:
                self.reduced += 1
                moved = True
            open_until = self.reduced + self._slots
        done = [i for i, buckets in left.items() if not buckets or buckets[-1] < open_until]
        self._given.difference_update(done)
        return done


# ---- the run ---------------------------------------------------------------------------------------------------------
def loss_of(output: Any, batch: Any, loss_fn: Callable[..., Any] | None) -> torch.Tensor:
    """The scalar to call backward on: loss_fn(output, batch), or the output itself, its `.loss`, ["loss"] or first
    element."""
    if loss_fn is not None:
        output = loss_fn(output, batch)
    elif not isinstance(output, torch.Tensor):
        if getattr(output, "loss", None) is not None:
            output = output.loss
        elif isinstance(output, Mapping) and "loss" in output:
            output = output["loss"]
        elif isinstance(output, (tuple, list)) and output:
            output = output[0]
    if not isinstance(output, torch.Tensor) or output.numel() != 1:
        what = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise ArgumentError(
            f"the model's output ({what}) is no scalar loss and has none as .loss; give a function of (output, batch) "
            "that makes it: loss_fn=, or --loss MODULE:FUNCTION of the command"
        )
    return output


def call_model(model: Callable[..., Any], batch: Any) -> Any:
    """model(**batch) for a mapping, model(*batch) for a tuple or list, else model(batch)."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def first_rows(batch: Any, rows: int) -> Any:
    """The first `rows` samples of every tensor of a batch (dimension 0)."""
    from ...core.foreign.private import tree_map_only

    return tree_map_only(torch.Tensor, lambda t: t[:rows] if t.dim() else t, batch)


def checkpoint_blocks(model: torch.nn.Module) -> str:
    """Recomputes the model's repeated blocks in backward (in place): by its own method if it has one, else every
    element of its largest ModuleList or Sequential. Returns what was done, "" if there is nothing to recompute."""
    own = getattr(model, "gradient_checkpointing_enable", None)
    if callable(own):
        with contextlib.suppress(ValueError):  # transformers: this architecture can't
            own(gradient_checkpointing_kwargs={"use_reentrant": False})
            return "model.gradient_checkpointing_enable()"
    from torch.utils.checkpoint import checkpoint

    lists = [
        (n, m)
        for n, m in model.named_modules()
        if isinstance(m, (torch.nn.ModuleList, torch.nn.Sequential)) and len(m) > 1
    ]
    if not lists:
        return ""
    name, blocks = max(lists, key=lambda item: sum(p.numel() for p in item[1].parameters()))
    for block in blocks:

        def recomputed(*args: Any, _forward: Any = block.forward, **kwargs: Any) -> Any:
            return checkpoint(_forward, *args, use_reentrant=False, **kwargs)

        block.forward = recomputed
    return f"torch.utils.checkpoint around each of {name}"


class _FakeModel:
    """Puts fake tensors in the place of a model's parameters and buffers, in this process for good, and frees the real
    ones."""

    def __init__(
        self,
        model: torch.nn.Module,
        mode: Any,
        tracker: Any,
        dtype: torch.dtype,
        trained: list[torch.nn.Parameter],
        keeps_frozen: bool,
    ) -> None:
        self._mode, self._tracker, self._dtype, self._keeps_frozen = mode, tracker, dtype, keeps_frozen
        self._trained = {id(p) for p in trained}
        self._swapped: dict[int, torch.Tensor] = {}
        self._originals: list[torch.Tensor] = []
        for module in model.modules():
            tables: tuple[tuple[dict[str, Any], bool], ...] = ((module._parameters, True), (module._buffers, False))
            for table, trains in tables:
                for name, value in table.items():
                    if value is not None:
                        table[name] = self._fake(value, trains)
        self.trained = [self._swapped[id(p)] for p in trained]
        for p in self._originals:
            if id(p) in self._trained and not _is_fake(p):
                with contextlib.suppress(RuntimeError):  # memory that torch does not own
                    p.untyped_storage().resize_(0)
        self.never_real = [
            p for p in self._originals if id(p) in self._trained and _is_fake(p)
        ]  # of a model that was made without memory

    def _fake(self, value: torch.Tensor, parameter: bool) -> torch.Tensor:
        if id(value) not in self._swapped:
            dtype = self._dtype if value.is_floating_point() else value.dtype
            device = value.device if value.device.type != "meta" else torch.device("cpu")
            with self._mode, torch.no_grad():
                new = torch.empty_strided(value.shape, value.stride(), dtype=dtype, device=device)
            counted = id(value) in self._trained or dtype == value.dtype or (parameter and not self._keeps_frozen)
            self._tracker.known(new) if counted else self._tracker.add(new)
            self._swapped[id(value)] = torch.nn.Parameter(new, value.requires_grad) if parameter else new
            self._originals.append(value)  # its id stays taken
        return self._swapped[id(value)]


def _is_fake(t: torch.Tensor) -> bool:
    from ...core.foreign.private import FakeTensor

    return isinstance(t, FakeTensor)


def run(
    model: torch.nn.Module,
    batch: Any,
    loss_fn: Callable[..., Any] | None,
    *,
    dtype: torch.dtype,
    trained: list[torch.nn.Parameter],
    layout: Layout,
    slots: int,
    own_all: bool,
    leases: bool,
    acc_color: int,
    acc_size: int,
    accumulation: int,
    steps: int,
    update: Callable[..., Callable[[], Any]] | None,
    keeps_frozen: bool,
    cast_inputs: bool = False,
    budget: int | None = None,
) -> dict[str, Any]:
    """`steps` steps of `accumulation` micro-batches each, as the engine does them. Only in a child: the model is
    spoilt.

    trained: the model's trained parameters in flat order. slots: of the reducer's window, 0 for one rank. own_all,
    acc_color, acc_size (bytes of an element): of the accumulators, which borrow their memory if `leases` and the heap
    is there. update(fake parameters, known) makes a function that does a torch optimizer's step on shards, or None.
    Returns bytes: "freed" by the model's move into the flat space (negative: less resident memory), "live" and
    "resident" peaks (with "leased" accumulators in the latter) above what is left then, "saved" at the end of the first
    forward, "gradients" the largest one.
    """
    from ...core.foreign.private import FakeTensorMode, tree_map_only

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    heap = ShadowHeap()
    tracker = _make_tracker()(heap)
    before = anonymous_bytes()
    fake = _FakeModel(model, mode, tracker, dtype, trained, keeps_frozen)
    memory.trim_heap()  # as initialize does
    freed = anonymous_bytes() - before
    heap.look()
    heap.rebase(tracker.live)  # what went back to the kernel is in `freed`
    freed += heap.come_and_go([p.numel() * p.dtype.itemsize for p in fake.never_real])
    heap.use_core()
    heap.rebase(tracker.live)
    sums = _Accumulators(heap, layout, own_all, acc_color, acc_size) if leases and heap.in_core else None
    reducer = _Reducer(fake.trained, layout, slots, sums)
    for i, p in enumerate(fake.trained):
        p.register_post_accumulate_grad_hook(reducer.hook(i))
    saved = largest = 0
    step = update(fake.trained, mode, tracker) if update is not None else None
    work = Work()
    again = WithoutValues(model, budget, work)
    with mode, tracker, contextlib.nullcontext() if budget is None else work:
        batch = tree_map_only(
            torch.Tensor,
            lambda t: torch.empty_strided(
                t.shape,
                t.stride(),
                device=t.device if t.device.type != "meta" else "cpu",
                dtype=dtype if cast_inputs and t.is_floating_point() else t.dtype,
            ),
            batch,
        )
        tracker.peak = tracker.live
        for _ in range(steps):
            for _ in range(accumulation):
                reducer.begin()
                with again.around(batch):
                    loss = loss_of(call_model(model, batch), batch, loss_fn)
                if not saved or budget is not None:  # the first forward recomputes all
                    saved = max(saved, tracker.live)
                (loss / accumulation if accumulation > 1 else loss).backward()
                reducer.finish()
                del loss
            if step is not None:
                step()
            if sums is not None:
                sums.end()
    largest = max((p.numel() for p in fake.trained), default=0) * dtype.itemsize
    return {
        "freed": freed,
        "live": tracker.peak,
        "resident": heap.peak,
        "saved": saved,
        "largest_gradient": largest,
        "at": tracker.peak_op,
        "malloc": heap.usable,
        "leased": sums is not None,
        "guesses": sorted(set(tracker.guesses)),
    }


class _Reducer:
    """What becomes of gradients: they go when the reducer would let them go, and what they are added to gets memory."""

    def __init__(self, params: list[torch.Tensor], layout: Layout, slots: int, sums: _Accumulators | None) -> None:
        self._params, self._sums, self._buckets = params, sums, buckets_of_params(layout)
        self._window = _Window(layout, slots) if slots else None

    def begin(self) -> None:
        if self._window is not None:
            self._window.begin()

    def hook(self, index: int) -> Callable[[torch.Tensor], None]:
        """For the parameter at `index`, when its gradient is there."""

        def take(p: torch.Tensor) -> None:
            if p.grad is not None and not p.grad.is_contiguous():
                p.grad = p.grad.contiguous()
            for i in self._take(index):
                self._params[i].grad = None

        return take

    def _take(self, index: int) -> list[int]:
        if self._window is None:
            self._need(self._buckets[index])
            return [index]
        before = self._window.reduced
        done = self._window.add(index)
        self._need(range(before, self._window.reduced))
        return done

    def _need(self, buckets: range) -> None:
        if self._sums is not None:
            for b in buckets:
                self._sums.need(b)

    def finish(self) -> None:
        if self._sums is not None:
            self._sums.finish()
        for p in self._params:
            p.grad = None
