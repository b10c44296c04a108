"""Two or more test hosts on one machine: network namespaces joined by links of a limited rate, and ranks that run in
them.

    def work(rank, world, x): ...                        # at module level of the test file, as with ranks.run_ranks
    with Hosts(2) as hosts:                              # 1 Gbit/s each way
        before = hosts.sent()
        results = hosts.run(work, [0, 0, 1, 1], args=(3,))   # rank r on host placement[r]
        crossed = [b - a for a, b in zip(before, hosts.sent())]

    @needs_hosts                                         # skips, with the reason, where namespaces can't be made
    def test_it() -> None: ...

The namespaces have no names: each belongs to a process that ends when this one does, however it ends, and the links go
with it. Tests in parallel don't meet, because every host has a network of its own. Needs root, ip and tc (iproute2),
nsenter, unshare (util-linux).

Hosts are joined by one veth pair (two hosts) or a bridge in a namespace of its own (more). Every host's way out is a
token bucket (tc tbf). A host's counters are those of its interface, headers included (see wire_bytes)."""

from __future__ import annotations

import os
import pickle
import shutil
import signal  # noqa: F401
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, lru_cache  # noqa: F401
from pathlib import Path
from typing import Any

import ranks
from ranks import RankFailure

INTERFACE = "eth0"
_TOOLS = ("ip", "tc", "unshare", "nsenter")


@cache
def why_not() -> str:
    """Why no test hosts can be made here, or ""."""
    if os.geteuid() != 0:
        return "needs root (network namespaces and tc)"
    missing = [t for t in _TOOLS if shutil.which(t) is None]
    if missing:
        return f"needs {', '.join(missing)} (iproute2, util-linux)"
    try:
        with Hosts(2):
            return ""
    except (RuntimeError, OSError) as exc:
        return f"needs network namespaces, veth and tc tbf: {exc}"


def needs_hosts(test):
    """Decorator: skips a test where hosts can't be made. Looked up when the test runs, not when it is collected."""
    import functools

    import pytest

    @functools.wraps(test)
    def run(*args, **kwargs):
        if why_not():
            pytest.skip(why_not())
        return test(*args, **kwargs)

    return run


def _do(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout


class _Namespace:
    """A network namespace that lives as long as the pipe to the process that holds it."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo made; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        if self._holder.stdout.readline() != b"made\n":
            said = self._holder.communicate()[1].decode(errors="replace").strip()
            raise RuntimeError(f"unshare --net failed: {said}")
        self.pid = self._holder.pid

    def enter(self, *command: str) -> list[str]:
        """`command` inside. The process started is the command itself."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", *command]

    def do(self, *command: str) -> str:
        return _do(*self.enter(*command))

    def traffic(self) -> tuple[int, int]:
        return traffic(self.pid)

    def close(self) -> None:
        self._holder.kill()
        self._holder.communicate()


def traffic(pid: int | str = "self", interface: str = INTERFACE) -> tuple[int, int]:
    """(bytes received, bytes sent) by the interface of the network namespace of process `pid`."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == interface:
            fields = rest.split()
            return int(fields[0]), int(fields[8])
    raise RuntimeError(f"process {pid} has no interface {interface}")


class Hosts:
    """`count` hosts at 10.77.0.1, 10.77.0.2, ... whose interface sends at most `rate` (tc's notation). Use as a
    context."""

    def __init__(self, count: int = 2, rate: str = "1gbit") -> None:
        self.count, self.rate = count, rate
        self._spaces: list[_Namespace] = []
        self._workers: dict[int, list[_HostWorker]] = {}
        self._port = 29500
        try:
            for _ in range(count):
                self._spaces.append(_Namespace())
            self._join()
            for host, space in enumerate(self._spaces[:count]):
                self._configure(host, space)
        except BaseException:
            self.close()
            raise

    def _join(self) -> None:
        if self.count == 2:
            a, b = (str(s.pid) for s in self._spaces)
            _do("ip", "link", "add", INTERFACE, "netns", a, "type", "veth", "peer", "name", INTERFACE, "netns", b)
            return
        hub = _Namespace()
        self._spaces.append(hub)
        hub.do("ip", "link", "add", "hub", "type", "bridge")
        hub.do("ip", "link", "set", "hub", "up")
        for host in range(self.count):
            _do(
                "ip",
                "link",
                "add",
                INTERFACE,
                "netns",
                str(self._spaces[host].pid),
                "type",
                "veth",
                "peer",
                "name",
                f"port{host}",
                "netns",
                str(hub.pid),
            )
            hub.do("ip", "link", "set", f"port{host}", "master", "hub", "up")

    def _configure(self, host: int, space: _Namespace) -> None:
        space.do("ip", "link", "set", "lo", "up")
        space.do("ip", "address", "add", f"{self.address(host)}/24", "dev", INTERFACE)
        space.do("ip", "link", "set", INTERFACE, "up")
        # Small bucket: no message of interest fits into what is free of charge. Long queue: TCP never loses a packet,
        # so bytes are not sent twice.
        space.do(
            "tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", "rate", self.rate, "burst", "128kb", "limit", "16mb"
        )

    @staticmethod
    def address(host: int) -> str:
        return f"10.77.0.{host + 1}"

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills the workers, then lets the namespaces go."""
        self._end_workers()
        while self._spaces:
            self._spaces.pop().close()

    def _end_workers(self) -> None:
        for workers in self._workers.values():
            for w in workers:
                w.end()
        self._workers.clear()

    # ---- counters ----------------------------------------------------------------------------------------------------
    def sent(self) -> list[int]:
        """Bytes that each host has sent, headers included."""
        return [s.traffic()[1] for s in self._spaces[: self.count]]

    def received(self) -> list[int]:
        return [s.traffic()[0] for s in self._spaces[: self.count]]

    # ---- ranks -------------------------------------------------------------------------------------------------------
    def environment(self, placement: Sequence[int], rank: int) -> dict[str, str]:
        """torchrun's variables for `rank`, and Gloo's interface."""
        host = placement[rank]
        local = [r for r, h in enumerate(placement) if h == host]
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(placement)),
            "LOCAL_RANK": str(local.index(rank)),
            "LOCAL_WORLD_SIZE": str(len(local)),
            "GROUP_RANK": str(host),
            "GROUP_WORLD_SIZE": str(len(set(placement))),
            "MASTER_ADDR": self.address(placement[0]),
            "MASTER_PORT": str(self._port),
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }

    def run(
        self,
        fn: Callable,
        placement: Sequence[int],
        *,
        args: Sequence[Any] = (),
        backend: str | None = "deepc",
        timeout_s: float = 60.0,
        limit_s: float = ranks.LIMIT_S,
        may_die: Sequence[int] = (),
        env: dict[str, str] | None = None,
    ) -> list[Any]:
        """fn(rank, world, *args) as rank r on host placement[r]; returns what the ranks returned, in rank order.
        backend, timeout_s: of the default group (None: none is made). may_die: ranks that may end or be killed. env:
        further variables, set during the job. Workers are used again by the next job unless one failed. Raises
        ranks.RankFailure with every rank's output if a rank fails or hangs.
        """
        workers = [self._worker(placement, r) for r in range(len(placement))]
        self._port += 1
        with tempfile.TemporaryDirectory() as folder:
            for r in range(len(placement)):
                job = {
                    "module": fn.__module__,
                    "name": fn.__qualname__,
                    "args": tuple(args),
                    "backend": backend,
                    "timeout_s": timeout_s,
                    "may_die": list(may_die),
                    "env": {**(env or {}), **self.environment(placement, r)},
                }
                Path(folder, f"job{r}").write_bytes(pickle.dumps(job))
            codes: list[int | None] = [None] * len(placement)
            try:
                for r, w in enumerate(workers):
                    w.start(folder, r)
                codes = ranks._await(workers, limit_s, may_die)
                text = [w.text() for w in workers]
            finally:
                if any(c != 0 for c in codes) or may_die or any(w.has_looked for w in workers):
                    self._end_workers()
            if any(c != 0 for r, c in enumerate(codes) if r not in may_die):
                raise RankFailure(codes, text)
            return [
                pickle.loads(f.read_bytes()) if (f := Path(folder, f"out{r}")).exists() else None
                for r in range(len(placement))
            ]

    def _worker(self, placement: Sequence[int], rank: int) -> _HostWorker:
        host = placement[rank]
        pool = self._workers.setdefault(host, [])
        index = list(placement[:rank]).count(host)
        while len(pool) <= index:
            pool.append(_HostWorker(self._spaces[host]))
        return pool[index]

    def run_script(
        self,
        command: Sequence[str],
        placement: Sequence[int],
        *,
        env: dict[str, str] | None = None,
        limit_s: float = 300.0,
    ) -> list[str]:
        """Runs [python, *command] once per rank with torchrun's variables. Returns what each rank printed; RankFailure
        if one fails or hangs."""
        self._port += 1
        base = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **(env or {})}
        with tempfile.TemporaryDirectory() as folder:
            started = []
            try:
                for r, host in enumerate(placement):
                    with open(Path(folder, f"log{r}"), "wb") as log:
                        inside = self._spaces[host].enter(*_ends_with_us(), sys.executable, *command)
                        started.append(
                            subprocess.Popen(
                                inside,
                                stdin=subprocess.DEVNULL,
                                stdout=log,
                                stderr=subprocess.STDOUT,
                                env={**base, **self.environment(placement, r)},
                            )
                        )
                codes = _await_all(started, limit_s)
            finally:
                for p in started:
                    p.kill()
                    p.wait()
            text = [Path(folder, f"log{r}").read_text(errors="replace") for r in range(len(placement))]
        if any(codes):
            raise RankFailure(codes, text)
        return text


def _ends_with_us() -> list[str]:
    """Prefix of a command whose process must not outlive the test."""
    return ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []


def _await_all(processes: Sequence[subprocess.Popen], limit_s: float) -> list[int | None]:
    """Exit codes; None for who was still running at the limit, or 20 s after another one failed."""
    import time

    end = time.monotonic() + limit_s
    while time.monotonic() < end and any(p.poll() is None for p in processes):
        time.sleep(0.05)
        if any(p.returncode for p in processes):
            end = min(end, time.monotonic() + 20)
    return [p.poll() for p in processes]


# ---- headers on the wire ---------------------------------------------------------------------------------------------
def wire_bytes(payload: int, mtu: int = 1500) -> tuple[int, int]:
    """(least, most) bytes that an interface counts for `payload` bytes of TCP over IPv4: the payload in segments with
    66 bytes of headers each (14 Ethernet, 20 IP, 32 TCP with time stamps). Between namespaces the kernel hands on
    segments of up to 64 KiB with one header (GSO); at most, every segment is one MTU. Acknowledgements of what comes
    the other way are not in it: they ride on the data, or cost at most 66 bytes per two segments."""
    head = 66
    full = mtu - 52
    return payload + head * -(-payload // 65483), payload + head * -(-payload // full)


# ---- the worker ------------------------------------------------------------------------------------------------------
class _HostWorker(ranks._Worker):
    """A ranks._Worker inside a host."""

    def __init__(self, space: _Namespace) -> None:
        program = space.enter(*_ends_with_us(), sys.executable, __file__) if ranks.EXECUTES else ()
        super().__init__({}, command=program, host=space.pid)


def run_job(rank: int, folder: str) -> None:
    """ranks._run_job for a rank inside a host."""
    import datetime
    import importlib

    import torch.distributed as dist

    job = pickle.loads(Path(folder, f"job{rank}").read_bytes())
    os.environ.update(job["env"])
    world = int(job["env"]["WORLD_SIZE"])
    fn = importlib.import_module(job["module"])
    for part in job["name"].split("."):
        fn = getattr(fn, part)
    if job["backend"]:
        dist.init_process_group(job["backend"], timeout=datetime.timedelta(seconds=job["timeout_s"]))
    out = fn(rank, world, *job["args"])
    Path(folder, f"out{rank}.new").write_bytes(pickle.dumps(out))
    os.replace(Path(folder, f"out{rank}.new"), Path(folder, f"out{rank}"))
    _await_others(folder, set(range(world)) - set(job["may_die"]))
    if dist.is_initialized():
        dist.destroy_process_group()


def _await_others(folder: str, others: set[int], limit_s: float = 20.0) -> None:
    """Nobody leaves before all are done: rank 0 has the store. A rank that fails before has no file: then after the
    limit."""
    import time

    end = time.monotonic() + limit_s
    while time.monotonic() < end and not all(Path(folder, f"out{r}").exists() for r in others):
        time.sleep(0.01)


if __name__ == "__main__":
    ranks._serve(int(sys.argv[1]), run_job)
