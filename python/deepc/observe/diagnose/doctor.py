"""`deepc doctor`: is this machine fit for deepc, and where do the ranks of a run stand.

    deepc doctor                 build, machine, limits, and a self-test of a few seconds on two ranks
    deepc doctor PID...          where the ranks of a run that hangs are (one pid of it is enough), which is behind,
    which call differs
    deepc doctor --all           the same of every run of this user
    deepc doctor FOLDER|FILE...  the same from dumps (DEEPC_FLIGHT_DIR)

Exit code: 0 all is well, 1 something is wrong, 2 the question can't be answered."""

from __future__ import annotations

import argparse
import ctypes
import difflib
import json
import os
import platform
import resource
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from ...core import cpu, env
from ...core.foreign import patches
from ...errors import ArgumentError, ConfigError, DeepcError
from . import diagnosis, flight

_SELF_TEST_S = 90.0  # most of it is importing torch, on a machine that is busy
_MIB = 1 << 20


class Check(NamedTuple):
    """One line of the report. state: "ok", "warn" (works, but slower or only just) or "fail" (will not work). fix: ""
    if ok."""

    name: str
    state: str
    value: str
    fix: str = ""


# ---- what is installed -----------------------------------------------------------------------------------------------
def _build() -> list[Check]:
    import torch

    from ...core.lib import C, library_dir

    where = library_dir()
    shim = (
        ""
        if (where / "libdeepc_torch.so").exists()
        else f"{where}/libdeepc_torch.so is missing: install deepc-torch again"
    )
    return [
        Check("deepc", "fail" if shim else "ok", f"{C.dc_version().decode()} in {where}{_libraries(where)}", shim),
        _isa(),
        Check("python", "ok", platform.python_version()),
        _torch(torch),
        _extras(),
    ]


def _libraries(where: Path) -> str:
    """Which of the libraries this build has, with the day they were made."""
    found = [(n, where / f"libdeepc{s}.so") for n, s in (("core", ""), ("torch", "_torch"), ("CUDA", "_cuda"))]
    there = [(n, p) for n, p in found if p.exists()]
    made = max((p.stat().st_mtime for _, p in there), default=0.0)
    return f" ({', '.join(n for n, _ in there)}; {time.strftime('%Y-%m-%d', time.localtime(made))})"


def _torch(torch: Any) -> Check:
    value = f"{torch.__version__}, {torch.get_num_threads()} threads"
    version = tuple(int(p) for p in torch.__version__.split("+")[0].split(".")[:2] if p.isdigit())
    if version < (2, 10):
        return Check("torch", "fail", value, "deepc needs torch 2.10 or later: pip install -U torch")
    return Check("torch", "ok", value)


_EXTRAS = (
    "numpy",
    "safetensors",
    "transformers",
    "accelerate",
    "peft",
    "datasets",
    "lightning",
    "tensorboard",
    "wandb",
    "comet_ml",
    "rich",
    "deepspeed",
)


def _extras() -> Check:
    """Packages that deepc works with where they are installed; asked of their metadata, not imported."""
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for name in _EXTRAS:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return Check("packages", "ok", ", ".join(found) or "none of those that deepc works with")


def _isa() -> Check:
    from ...core.lib import C

    current = ctypes.c_int(-1)
    if C.dc_isa_current(ctypes.byref(current)):
        return Check("instruction set", "fail", C.dc_last_error().decode(errors="replace"), "unset DEEPC_ISA")
    best = max(i for i in range(16) if C.dc_isa_available(i))  # 0 for what is none
    name = C.dc_isa_name(current.value).decode()
    if current.value != best:
        return Check(
            "instruction set",
            "warn",
            f"{name}, forced by DEEPC_ISA",
            f"unset DEEPC_ISA: this processor has {C.dc_isa_name(best).decode()}",
        )
    if lacks := cpu.left_out():
        return Check("instruction set", "warn", f"{name}: {lacks}", cpu.LEFT_OUT_FIX)
    return Check(
        "instruction set",
        "ok" if best else "warn",
        name,
        "" if best else "this processor has neither AVX2 nor AVX-512: ops run as scalar code",
    )


def _gpus() -> list[Check]:
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        seen = os.path.exists("/proc/driver/nvidia/version")
        if seen:
            return [
                Check(
                    "GPUs",
                    "warn",
                    f"none usable, though the NVIDIA driver is loaded (torch is built for {built or 'CPU only'})",
                    "install a torch built for CUDA, and look at CUDA_VISIBLE_DEVICES",
                )
            ]
        return [Check("GPUs", "ok", "none; training runs on the CPU")]
    from ...core.lib import library_dir

    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    free = [
        f"{f / 2**30:.0f} of {t / 2**30:.0f} GiB" for f, t in (torch.cuda.mem_get_info(i) for i in range(len(names)))
    ]
    value = f"{len(names)}: {', '.join(sorted(set(names)))}; free {', '.join(free)}; CUDA {torch.version.cuda}"
    if not (library_dir() / "libdeepc_cuda.so").exists():
        return [
            Check(
                "GPUs",
                "fail",
                value,
                "this build of deepc has no libdeepc_cuda.so: install the wheel, or build with DEEPC_CUDA=ON where"
                " nvcc is",
            )
        ]
    return [Check("GPUs", "ok", value)]


_NOT_OURS = ("DEEPC_TEST", "DEEPC_CUDA")  # of the build and of its tests


def _variables() -> list[Check]:
    """DEEPC_* of the environment; one that nobody reads is probably a typing error."""
    known = env.variables()
    found = []
    for name in sorted(v for v in os.environ if v.startswith("DEEPC_") and not v.startswith(_NOT_OURS)):
        value = os.environ[name]
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            fix = f"did you mean {near[0]}?" if near else "unset it"
            found.append(Check(name, "warn", f"{value} (no such variable)", fix))
        elif known[name].values != "internal":
            try:
                found.append(Check(name, "ok", env.text(name)))
            except ConfigError as exc:
                found.append(Check(name, "fail", value, str(exc)))
    return found


def _foreign() -> list[Check]:
    """What of torch's inside is missing, and each change that deepc makes to other libraries, with how to turn it
    off."""
    from ...core.foreign import private

    gone = private.missing()
    fix = "; ".join(f"{row.name}: {row.without}" for row in gone)
    text = f"all {len(private.NAMES)} are there" if not gone else f"{len(gone)} of {len(private.NAMES)} are missing"
    on = {p.name for p in patches.active()}
    return [
        Check("private names of torch", "warn" if gone else "ok", text, fix and f"use a torch that has them: {fix}"),
        *(
            Check(f"patch {p.name}", "ok", f"{'on' if p.name in on else 'off here'}: {p.changes}; to turn off: {p.off}")
            for p in patches.PATCHES
        ),
    ]


# ---- the machine -----------------------------------------------------------------------------------------------------
def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _kernel() -> Check:
    release = os.uname().release
    version = tuple(int(p) for p in release.split("-")[0].split(".")[:2] if p.isdigit())
    if version < (5, 3):
        return Check("kernel", "fail", release, "deepc's collectives need Linux 5.3 (pidfd_open, MADV_WIPEONFORK)")
    missing = [
        text
        for need, text in (
            ((5, 14), "MADV_POPULATE_WRITE (5.14)"),
            ((6, 1), "MADV_COLLAPSE (6.1): huge pages of shared memory depend on shmem_enabled"),
        )
        if version < need
    ]
    return Check("kernel", "warn" if missing else "ok", release, "older than " + ", ".join(missing) if missing else "")


def _quota() -> float | None:
    """Cores that the cgroup's CPU quota is worth, v2 or v1; None without one."""
    for line in _read("/proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            folder = Path("/sys/fs/cgroup" + path)
            for up in [folder, *folder.parents]:
                parts = _read(str(up / "cpu.max")).split()
                if len(parts) == 2 and parts[0] != "max":
                    return int(parts[0]) / int(parts[1])
        elif "cpu" in controllers.split(","):
            quota, period = _read("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), _read("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
            if quota not in ("", "-1") and period:
                return int(quota) / int(period)
    return None


def _cores() -> Check:
    may, has, quota = len(os.sched_getaffinity(0)), os.cpu_count() or 1, _quota()
    value = f"{may} of {has}" + (f", CPU quota {quota:.3g}" if quota else "")
    if quota is not None and quota < may:
        return Check(
            "cores",
            "warn",
            value,
            f"start at most {max(1, int(quota))} ranks x threads: beyond the quota the kernel stops all of them",
        )
    if may < has:
        return Check(
            "cores", "warn", value, "this shell is bound to some cores (taskset, cpuset): ranks that it starts are too"
        )
    return Check("cores", "ok", value)


def _memory() -> Check:
    from ...core.lib import call

    free = ctypes.c_int64()
    call("dc_mem_available", ctypes.byref(free))
    meminfo = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines() if ":" in line)
    available = int(meminfo.get("MemAvailable", "0 kB").split()[0]) * 1024
    by = "the memory cgroup's limit" if free.value < 0.95 * available else "MemAvailable"
    value = f"{free.value / 2**30:.1f} GiB available (by {by}; MemAvailable {available / 2**30:.1f} GiB)"
    if free.value < 256 * _MIB:
        return Check(
            "memory", "fail", value, "free memory or raise the limit: deepc refuses what the kernel would kill for"
        )
    return Check(
        "memory", "warn" if free.value < 2**30 else "ok", value, "less than 1 GiB is left" if free.value < 2**30 else ""
    )


def _limit(name: str, kind: int, least: int, unit: int, flag: str, why: str, state: str = "warn") -> Check:
    soft, hard = resource.getrlimit(kind)

    def shown(n: int) -> str:
        return "unlimited" if n == resource.RLIM_INFINITY else f"{n // unit}{' KiB' if unit == 1024 else ''}"

    enough = soft == resource.RLIM_INFINITY or soft >= least
    fix = "" if enough else f"ulimit {flag} {'unlimited' if least == resource.RLIM_INFINITY else least // unit} ({why})"
    return Check(name, "ok" if enough else state, f"{shown(soft)} (hard {shown(hard)})", fix)


def _shm() -> Check:
    """deepc's own shared memory has no name and needs no /dev/shm; torch's DataLoader workers and NCCL use it."""
    try:
        stat = os.statvfs("/dev/shm")
    except OSError as exc:
        return Check(
            "/dev/shm", "warn", str(exc), "mount a tmpfs there: DataLoader workers need it (deepc itself does not)"
        )
    size, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    value = f"{free / _MIB:,.0f} of {size / _MIB:,.0f} MiB free"
    if free < 256 * _MIB:
        fix = (
            "start the container with --shm-size=1g or more: DataLoader workers hand batches over there (deepc itself"
            " does not use it)"
        )
        return Check("/dev/shm", "warn", value, fix)
    return Check("/dev/shm", "ok", value)


def _io_uring() -> Check:
    """Tried by opening a ring. Nothing needs it yet (offload to disk would), so that its absence is no warning."""
    number = 425  # of io_uring_setup, on every architecture
    libc, params = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(120)
    fd = libc.syscall(number, 1, params)
    if fd >= 0:
        os.close(fd)
        return Check("io_uring", "ok", "works")
    reason, off = os.strerror(ctypes.get_errno()), _read("/proc/sys/kernel/io_uring_disabled")
    why = f", kernel.io_uring_disabled = {off}" if off not in ("", "0") else ""
    return Check("io_uring", "ok", f"not available ({reason}{why}); deepc does without it")


def _limits() -> list[Check]:
    return [
        _limit("open files", resource.RLIMIT_NOFILE, 1024, 1, "-n", "a group of n ranks holds 2 n descriptors in each"),
        _limit(
            "locked memory", resource.RLIMIT_MEMLOCK, 8 * _MIB, 1024, "-l", "only pinned host memory and RDMA need it"
        ),
        _limit("file size", resource.RLIMIT_FSIZE, 1 << 34, 1024, "-f", "shared segments count as files", "fail"),
        _shm(),
        _io_uring(),
    ]


def _syscalls() -> list[Check]:
    """What shared memory stands on, tried out."""

    def attempt(name: str, what: Callable[[], Any], fix: str) -> Check:
        try:
            what()
        except (OSError, AttributeError) as exc:
            return Check(name, "fail", str(exc), fix)
        return Check(name, "ok", "works")

    def memfd() -> None:
        os.close(os.memfd_create("deepc-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))

    def abstract() -> None:
        with socket.socket(socket.AF_UNIX) as s:
            s.bind("\0deepc-doctor-" + os.urandom(8).hex())

    def futex() -> None:
        word = ctypes.c_uint32()
        number = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
        libc = ctypes.CDLL(None, use_errno=True)
        if number is not None and libc.syscall(number, ctypes.byref(word), 1, 1, None, None, 0) < 0:  # FUTEX_WAKE
            raise OSError(ctypes.get_errno(), "futex: " + os.strerror(ctypes.get_errno()))

    allow = "allow it in the container's seccomp profile"
    return [
        attempt("memfd", memfd, allow),
        attempt("pidfd", lambda: os.close(os.pidfd_open(os.getpid())), allow + " (Linux 5.3)"),
        attempt("futex", futex, allow),
        attempt("abstract sockets", abstract, "ranks meet on an abstract Unix socket: allow AF_UNIX"),
    ]


_LENDER = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(0x59616d61, os.getppid(), 0, 0, 0)  # PR_SET_PTRACER, as ranks do (comm/probe.c)
buffer = ctypes.create_string_buffer(b"deepc", 8)
print(ctypes.addressof(buffer), flush=True)
sys.stdin.read()
"""
_BORROWER = """
import ctypes, os, sys
class iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("len", ctypes.c_size_t)]
libc, to = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(8)
local, remote = iovec(ctypes.addressof(to), 8), iovec(int(sys.argv[2]), 8)
n = libc.process_vm_readv(int(sys.argv[1]), ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
print("read" if n == 8 and to.value == b"deepc" else os.strerror(ctypes.get_errno()))
"""


def _single_copy() -> Check:
    """Two children, because a parent may read its child where siblings may not read each other. Under yama's scope 1
    they may if the one that is read has named a common ancestor."""
    scope = _read("/proc/sys/kernel/yama/ptrace_scope")
    lender = subprocess.Popen(
        [sys.executable, "-S", "-c", _LENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        address = cast(IO[str], lender.stdout).readline().strip()
        done = subprocess.run(
            [sys.executable, "-S", "-c", _BORROWER, str(lender.pid), address],
            capture_output=True,
            text=True,
            timeout=20,
        )
        said = done.stdout.strip() or done.stderr.strip()[-200:]
    except subprocess.TimeoutExpired:
        said = "no answer within 20 s"
    finally:
        lender.kill()
        lender.communicate()
    yama = f"ptrace_scope {scope}" if scope else "no yama"
    if said == "read":
        return Check("process_vm_readv", "ok", f"between ranks: permitted ({yama})")
    fix = (
        "sysctl kernel.yama.ptrace_scope=1 (2 and 3 forbid it also to those that a process admits)"
        if scope in ("2", "3")
        else "give the container CAP_SYS_PTRACE, or allow the call in its seccomp profile"
    )
    return Check(
        "process_vm_readv",
        "warn",
        f"between ranks: {said} ({yama})",
        f"{fix}: else large tensors that lie in private memory are copied twice",
    )


def _huge_pages() -> Check:
    def chosen(path: str) -> str:
        text = _read(path)
        return text[text.find("[") + 1 : text.find("]")] if "[" in text else "?"

    own, shared = (
        chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
    )
    value = f"private memory: {own}; shared memory: {shared}"
    if own == "never":
        return Check("huge pages", "warn", value, "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled")
    return Check("huge pages", "ok", value)


def _heap() -> Check:
    """Whether the memory of large tensors is kept between the steps of a CPU run."""
    from ...core import memory

    if memory.keep_heap():
        memory.keep_heap(False)
        return Check("kept heap", "ok", "works: a step finds the memory of the one before, without page faults")
    if not env.switch("DEEPC_KEEP_HEAP"):
        return Check("kept heap", "ok", "off (DEEPC_KEEP_HEAP=0)")
    return Check(
        "kept heap",
        "warn",
        "not with this build of torch",
        "install torch's own wheel: large tensors are mapped anew at every step else",
    )


def _hostname() -> Check:
    """Gloo, beneath the backend, listens on the address of the host's name."""
    name = socket.gethostname()
    try:
        addresses = {str(a[4][0]) for a in socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)}
    except OSError as exc:
        return Check(
            "host name",
            "warn",
            f"{name} has no address ({exc})",
            f"add '127.0.0.1 {name}' to /etc/hosts, or set GLOO_SOCKET_IFNAME",
        )
    return Check("host name", "ok", f"{name}: {', '.join(sorted(addresses))}")


def machine_checks() -> list[Check]:
    """Everything that needs no second process of deepc."""
    return [
        *_build(),
        *_gpus(),
        *_variables(),
        *_foreign(),
        _kernel(),
        _cores(),
        _memory(),
        *_limits(),
        *_syscalls(),
        _single_copy(),
        _huge_pages(),
        _heap(),
        _hostname(),
    ]


# ---- the self-test ---------------------------------------------------------------------------------------------------
_TEST_RANK = (
    "import sys; from deepc.observe.diagnose.doctor import _test_rank; _test_rank(int(sys.argv[1]), sys.argv[2])"
)


def _test_rank(rank: int, folder: str) -> None:
    """One of the two ranks of the self-test. Prints its results as JSON."""
    import datetime

    import torch
    import torch.distributed as dist

    from ...comm import shared
    from ...comm.c10d.backend import register_backend
    from ...core.foreign import private
    from ...core.lib import counters

    register_backend()

    dist.init_process_group(
        "deepc", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=30)
    )
    wrong = _wrong_collectives(rank)
    comm = shared.open_comm(
        dist.PrefixStore("doctor", private.default_store()),
        rank,
        2,
        label="doctor",
        timeout=datetime.timedelta(seconds=30),
        slot_bytes=512 << 10,
        slots=3,
    )
    small = torch.zeros(1024, dtype=torch.float32, device="cpu")
    large = small.new_zeros(4 << 20)
    out = {
        "wrong": wrong,
        "barrier_us": _median_us(comm.barrier, 300),
        "all_reduce_4k_us": _median_us(lambda: comm.all_reduce(small), 300),
        "torch_all_reduce_4k_us": _median_us(lambda: dist.all_reduce(small), 200),
        "all_reduce_16m_ms": _median_us(lambda: comm.all_reduce(large), 7) / 1e3,
    }
    segment = comm.segment(4 << 20)
    out["segment_mib"], out["huge_mib"] = (n / _MIB for n in segment.info())
    out["on_core"] = counters()["coll_all_reduce"] > 0
    record = flight.read_own()
    out["recorded"] = 0 if record is None else sum(c.op == "all_reduce" for c in record.rows)
    comm.close()
    dist.destroy_process_group()
    print(json.dumps(out), flush=True)


def _wrong_collectives(rank: int) -> list[str]:
    """Names of the collectives whose result differs from what it must be, elementwise."""
    import torch
    import torch.distributed as dist

    wrong = []

    def expect(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
        if not torch.equal(got, want):
            wrong.append(name)

    n = 70001  # more than one chunk, and odd
    mine, other = (torch.arange(n, device="cpu") % 97 + r * 3 for r in (rank, 1 - rank))
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        t = mine.to(dtype, copy=True)
        dist.all_reduce(t)
        expect(f"all_reduce of {dtype}", t, (mine + other).to(dtype))
    both = [mine, other] if rank == 0 else [other, mine]
    gathered = [torch.zeros(n, dtype=torch.int64, device="cpu") for _ in range(2)]
    dist.all_gather(gathered, mine)
    expect("all_gather", torch.stack(gathered), torch.stack(both))
    part = torch.zeros(n, dtype=torch.float32, device="cpu")
    dist.reduce_scatter(part, [b.float() for b in both])
    expect("reduce_scatter", part, 2 * both[rank].float())
    t = mine.clone()
    dist.broadcast(t, 1)
    expect("broadcast", t, both[1])
    swapped = torch.zeros(10, dtype=torch.int64, device="cpu")
    dist.all_to_all_single(swapped, torch.arange(10, device="cpu") + 100 * rank)
    expect(
        "all_to_all",
        swapped,
        torch.cat([torch.arange(5, device="cpu") + 5 * rank, torch.arange(5, device="cpu") + 5 * rank + 100]),
    )
    t = mine.clone()
    if rank == 0:
        dist.send(t, 1)
    else:
        dist.recv(t, 0)
        expect("send and recv", t, both[0])
    return wrong


def _median_us(what: Callable[[], Any], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        begin = time.perf_counter_ns()
        what()
        times.append(time.perf_counter_ns() - begin)
    return sorted(times)[rounds // 2] / 1e3


def _await_ranks(ranks: list[subprocess.Popen[bytes]], limit_s: float) -> tuple[list[str], bool]:
    """What each printed, and whether all came to their end."""
    end, text = time.monotonic() + limit_s, ["", ""]
    open_pipes = {cast(IO[bytes], p.stdout).fileno(): i for i, p in enumerate(ranks)}
    while open_pipes and (left := end - time.monotonic()) > 0:
        for fd in select.select(list(open_pipes), [], [], left)[0]:
            got = os.read(fd, 1 << 16)
            if got:
                text[open_pipes[fd]] += got.decode(errors="replace")
            else:
                del open_pipes[fd]
    return text, not open_pipes


def self_test(limit_s: float = _SELF_TEST_S) -> list[Check]:
    """Two ranks on this machine: right results, latency, bandwidth. A rank that hangs is told about and killed."""
    with tempfile.TemporaryDirectory(prefix="deepc-doctor-") as folder:
        env = {
            k: v
            for k, v in os.environ.items()
            if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        }
        env.update(
            CUDA_VISIBLE_DEVICES="",
            OMP_NUM_THREADS="1",
            DEEPC_LOG_LEVEL="WARNING",
            PYTHONPATH=os.pathsep.join(
                [str(Path(__file__).resolve().parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
        )
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", _TEST_RANK, str(r), folder],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=env,
            )
            for r in range(2)
        ]
        try:
            text, finished = _await_ranks(ranks, limit_s)
            where = "" if finished else _where_they_hang(ranks)
        finally:
            for p in ranks:
                p.kill()
                p.wait()
                cast(IO[bytes], p.stdout).close()
    if not finished:
        return [
            Check(
                "self-test",
                "fail",
                f"two ranks did not finish within {limit_s:.0f} s",
                where or "no rank came as far as a group; see the host name above",
            )
        ]
    try:
        results = [json.loads(t.strip().splitlines()[-1]) for t in text]
    except (IndexError, ValueError):
        said = next(t for t, p in zip(text, ranks) if p.returncode or not t.strip().startswith("{"))
        return [Check("self-test", "fail", "a rank failed", said.strip()[-1500:])]
    return _judge(results)


def _where_they_hang(ranks: list[subprocess.Popen[bytes]]) -> str:
    records = []
    for p in ranks:
        try:
            records.append(flight.read_process(p.pid))
        except ArgumentError:
            continue
    found = [r for r in records if r is not None]
    return diagnosis.as_text(found, diagnosis.diagnose(found)) if found else ""


def _judge(results: list[dict[str, Any]]) -> list[Check]:
    wrong = sorted({w for r in results for w in r["wrong"]})
    if wrong:
        return [
            Check(
                "self-test",
                "fail",
                f"wrong results: {', '.join(wrong)}",
                "please report this with the output of `deepc doctor --json`",
            )
        ]
    if not all(r["on_core"] and r["recorded"] for r in results):
        return [
            Check(
                "self-test",
                "fail",
                "the collectives did not run in deepc's core, or were not recorded",
                "see the limits above",
            )
        ]
    worst = {k: max(r[k] for r in results) for k in results[0] if k.endswith(("_us", "_ms"))}
    checks = [
        Check(
            "collectives",
            "ok",
            "right on 2 ranks: all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, send and recv",
        )
    ]
    slow = worst["all_reduce_4k_us"] > 100
    checks.append(
        Check(
            "latency",
            "warn" if slow else "ok",
            f"barrier {worst['barrier_us']:.2g} us, all_reduce of 4 KiB {worst['all_reduce_4k_us']:.2g} us from Python,"
            f" {worst['torch_all_reduce_4k_us']:.3g} us through torch.distributed",
            "two ranks wait for a core: other processes use them, or there is only one" if slow else "",
        )
    )
    ms = worst["all_reduce_16m_ms"]
    checks.append(Check("bandwidth", "ok", f"all_reduce of 16 MiB {ms:.3g} ms, {16 * _MIB / ms / 1e6:.3g} GB/s"))
    huge, total = results[0]["huge_mib"], results[0]["segment_mib"]
    fix = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
    fix += "; memory may also be too fragmented (echo 1 > /proc/sys/vm/compact_memory)"
    checks.append(
        Check(
            "huge shared pages",
            "ok" if huge >= total else "warn",
            f"{huge:.0f} of {total:.0f} MiB",
            "" if huge >= total else fix,
        )
    )
    return checks


# ---- runs ------------------------------------------------------------------------------------------------------------
def _with_peers(pids: list[int]) -> list[flight.Record]:
    """The records of these processes and of the other members of their groups, where their pids are pids here."""
    found: dict[int, flight.Record] = {}
    for pid in pids:
        record = flight.read_process(pid)
        own = [record] if record is not None else flight.read_descendants(pid)  # of a launcher: its ranks
        if not own:
            raise ArgumentError(
                f"neither process {pid} nor one that it started has a flight record: they have opened no group of deepc"
                " (see `deepc doctor --all`)"
            )
        found.update((r.pid, r) for r in own)
    for record in list(found.values()):
        for group in record.groups.values():
            for member in group.members:
                if member.pid in found or member.pid in {r.pid for r in found.values()}:
                    continue
                try:
                    other = flight.read_process(member.pid)
                except ArgumentError:
                    continue
                if other is not None and any(g.id == group.id for g in other.groups.values()):
                    found[member.pid] = other
    return sorted(found.values(), key=lambda r: (r.rank, r.pid))


def _records(args: argparse.Namespace) -> list[flight.Record]:
    if args.all:
        records = flight.read_all()
        if not records:
            raise ArgumentError("no process of this user has a flight record: none has opened a group of deepc")
        return records
    pids = [int(t) for t in args.targets if t.isdigit() and not os.path.exists(t)]
    if pids and len(pids) != len(args.targets):
        raise ArgumentError("give pids or dumps, not both")
    if pids:
        return _with_peers(pids)
    records = []
    for target in args.targets:
        if not os.path.isdir(target):
            records.append(flight.read_file(target))
            continue
        here = flight.read_folder(target)
        if not here:
            raise ArgumentError(
                f"{target}: no deepc-flight-*.bin in this folder. Ranks write them when a group breaks and"
                " DEEPC_FLIGHT_DIR names it"
            )
        records += here
    return records


def _doctor_of_runs(args: argparse.Namespace) -> int:
    records = _records(args)
    report = diagnosis.diagnose(records, args.stuck)
    if args.json:
        print(json.dumps(diagnosis.as_dict(records, report), indent=1))
    else:
        print(diagnosis.as_text(records, report))
    return 1 if report.findings else 0


def _print_check(check: Check) -> None:
    mark = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL"}[check.state]
    print(f"{mark} {check.name:<18} {check.value}", flush=True)
    for line in check.fix.splitlines():
        print(f"     {'':<18} -> {line}", flush=True)


def _doctor_of_machine(args: argparse.Namespace) -> int:
    checks: list[Check] = []
    for part in (machine_checks, *(() if args.no_test else (self_test,))):
        for check in part():
            checks.append(check)
            if not args.json:
                _print_check(check)
    failed = [c for c in checks if c.state == "fail"]
    if args.json:
        print(json.dumps({"checks": [c._asdict() for c in checks], "ok": not failed}, indent=1))
    else:
        warned = sum(c.state == "warn" for c in checks)
        print(
            f"\n{len(failed)} failed, {warned} warning{'s' if warned != 1 else ''}"
            if failed or warned
            else "\nAll is well."
        )
    return 1 if failed else 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "targets", nargs="*", metavar="PID|FOLDER|FILE", help="ranks of a run, or dumps of one; nothing: this machine"
    )
    parser.add_argument("--all", action="store_true", help="all runs of this user on this machine")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--stuck",
        type=float,
        default=diagnosis.STUCK_S,
        metavar="SECONDS",
        help="a call that takes longer counts as hanging (default %(default)s)",
    )
    parser.add_argument("--no-test", action="store_true", help="without the self-test")


def run(args: argparse.Namespace) -> int:
    """The exit code."""
    try:
        return _doctor_of_runs(args) if args.targets or args.all else _doctor_of_machine(args)
    except ArgumentError:
        raise
    except DeepcError as exc:
        print(f"deepc doctor: {exc}", file=sys.stderr)
        return 2
