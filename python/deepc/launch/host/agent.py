"""On every host of a run, this one included: starts the host's ranks, watches them, and ends them all when one fails,
when the launcher says so, or when the launcher is no longer there (its pipe ends, or over a network its pings do).
Whatever happens, no process is left on the host.

Run by its path with `python -IS`, with the standard library only: it starts in 20 ms and holds 10 MB.
Usage: agent.py FD_IN FD_OUT        frames (frames.py) come on FD_IN and go to FD_OUT

The frame "start" has: cwd; env, for every rank; processes [{rank, argv, env}]; output "inherit" (ranks write where this
process does) or "frames"; logs (a folder: each rank's output goes to a file there) or null; script (a file that must be
there) or null; lost_after_s or null; gentle: the processes are launchers themselves (srun, mpirun)."""

from __future__ import annotations

import glob
import importlib.util
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

_POLL_S = 0.1
_GRACE_S = 10.0  # from SIGTERM to SIGKILL where nobody says otherwise
_DRAIN_S = 2.0  # for what is still in the pipes when all processes have ended, since something last came
_SLOW_S = 60.0  # for a launcher that does not read, since it last did


def _sibling(name: str) -> ModuleType:
    """A file beside this one, without importing the package deepc (and torch with it)."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), name + ".py")
    spec = importlib.util.spec_from_file_location("_deepc_launch_" + name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


frames = _sibling("frames")
reaper = _sibling("reaper")


def code_version() -> int:
    """A checksum of the launcher's files: two hosts with different ones have different deepcs."""
    total = 0
    for path in sorted(glob.glob(os.path.join(os.path.dirname(os.path.abspath(__file__)), "*.py"))):
        with open(path, "rb") as f:
            total = zlib.crc32(f.read(), total)
    return total


def _interface(address: str) -> str | None:
    """The network interface that has this IPv4 address."""
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                got = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
            except OSError:
                continue
            if socket.inet_ntoa(got[20:24]) == address:
                return name
    return None


def hello() -> dict[str, Any]:
    """What this host is: cores that may be used, GPUs, and the addresses of the connection that we were started over
    (its, ours)."""
    fields = os.environ.get("SSH_CONNECTION", "").split()
    theirs, ours = (fields[0], fields[2]) if len(fields) == 4 else (None, None)
    gpus = len(glob.glob("/dev/nvidia[0-9]*"))
    return {
        "host": os.uname().nodename,
        "cores": len(os.sched_getaffinity(0)),
        "gpus": gpus,
        "code": code_version(),
        "client": theirs,
        "address": ours,
        "interface": _interface(ours) if ours else None,
        "pid": os.getpid(),
    }


class Rank:
    """One process of the run and what is known of it. name: its number, or what else it is."""

    def __init__(self, name: int | str, process: subprocess.Popen[bytes], errors: str) -> None:
        self.name, self.process, self.errors = name, process, errors
        self.exit: int | None = None
        self.ended = 0.0  # time.time()
        self.killed = False  # by us: it did not end when it was told to

    def signal_group(self, sig: int) -> None:
        if self.process.returncode is None:
            try:
                os.killpg(self.process.pid, sig)
            except (ProcessLookupError, PermissionError):
                pass

    def _written(self) -> dict[str, Any]:
        """What the rank itself wrote of its end (rank.py record); {} if nothing, or a program's own elastic handler
        wrote another format."""
        try:
            with open(self.errors) as f:
                extra = json.load(f)["message"]["extraInfo"]
            return {"type": str(extra["type"]), "traceback": str(extra["py_callstack"]), "time": float(extra["time"])}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def failure(self, now: float) -> dict[str, Any]:
        """For the frame "ended". age: seconds since it happened, because hosts' clocks differ."""
        wrote = self._written()
        return {
            "rank": self.name,
            "pid": self.process.pid,
            "exit": self.exit,
            "age": now - wrote.pop("time", self.ended),
            "ours": self.killed,
            **wrote,
        }


class Agent:
    """The life of one host's ranks: step() until over."""

    def __init__(self, fd_in: int, fd_out: int) -> None:
        self.fd_in, self.out = fd_in, frames.Sender(fd_out)
        self.decoder = frames.Decoder()
        self.ranks: list[Rank] = []
        self.store: Rank | None = None
        self.started = False
        self.over = False
        self.kill_at: float | None = None  # of the ranks that don't end after SIGTERM
        self.lost_after: float | None = None
        self.heard = time.monotonic()
        self.listening: socket.socket | None = None
        self.folder = tempfile.mkdtemp(prefix="deepc-run-")
        self.terminated = False
        self.gentle = self.abandoned = False
        self.selector = selectors.DefaultSelector()
        self.selector.register(fd_in, selectors.EVENT_READ, "control")
        self._read_ranks = True

    # ---- what the launcher asks for ----------------------------------------------------------------------------------
    def control(self) -> None:
        try:
            data = os.read(self.fd_in, 1 << 16)
        except BlockingIOError:  # sshd may give one socket as both our descriptors
            return
        except OSError:
            data = b""
        if not data:
            self.abandon()
            return
        self.heard = time.monotonic()
        for head, _ in self.decoder.feed(data):
            kind = head["t"]
            if kind == "pause":
                self.lost_after = None
            elif kind == "resume":
                self.lost_after = head["lost_after_s"]
            elif self.over:
                continue  # nothing begins any more, and all has ended
            elif kind == "store":
                self.open_store(head)
            elif kind == "start":
                self.start(head)
            elif kind == "stop":
                self.stop(head["grace_s"])

    def error(self, text: str) -> None:
        self.out.send("error", text=text)
        self.over = True

    def open_store(self, asked: dict[str, Any]) -> None:
        """The listening socket is opened here and handed to torch's store in a process of its own (store.py)."""
        try:
            self.listening = socket.create_server(("", asked["port"]), backlog=1024)
        except OSError as exc:
            self.error(f"port {asked['port']} for the ranks' meeting point could not be opened: {exc.strerror or exc}")
            return
        port = self.listening.getsockname()[1]
        path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "store.py")
        listening = self.listening.fileno()
        process = subprocess.Popen(
            [sys.executable, path, str(listening), str(port), str(os.getpid())],
            pass_fds=[listening],
            stdin=subprocess.DEVNULL,
            stdout=2,
            start_new_session=True,
            env={**os.environ, **asked["env"]},
        )
        self.store = Rank("store", process, "")
        self.out.send("store", port=port)

    def start(self, spec: dict[str, Any]) -> None:
        try:
            os.chdir(spec["cwd"])
        except OSError as exc:
            self.error(
                f"there is no folder {spec['cwd']} ({exc.strerror}): the working folder must be the same on every host"
                " (a shared file system, or a copy)"
            )
            return
        if spec["script"] and not os.path.isfile(spec["script"]):
            self.error(
                f"there is no script {spec['script']!r} in {spec['cwd']}: it must be on every host (a shared file"
                " system, or a copy)"
            )
            return
        try:
            if spec["logs"]:
                os.makedirs(spec["logs"], exist_ok=True)
        except OSError as exc:
            self.error(f"the folder {spec['logs']} for the ranks' logs can't be made: {exc.strerror}; give another one")
            return
        self.started, self.lost_after, self.gentle = True, spec["lost_after_s"], spec.get("gentle", False)
        for process in spec["processes"]:
            try:
                self._start_one(process, spec)
            except OSError as exc:
                what = f"{exc.filename}: " if exc.filename and exc.filename != process["argv"][0] else ""
                self.error(f"{process['argv'][0]} could not be started: {what}{exc.strerror or exc}")
                return

    def _start_one(self, wanted: dict[str, Any], spec: dict[str, Any]) -> None:
        number = wanted["rank"]
        errors = os.path.join(self.folder, str(number), "error.json")
        env = {
            **os.environ,
            **spec["env"],
            **wanted["env"],
            "TORCHELASTIC_ERROR_FILE": errors,
            "DEEPC_LAUNCHER_PID": str(os.getpid()),
            "DEEPC_TRACER_PID": str(os.getpid()),
        }
        stdin: Any = None
        out: Any = None
        err: Any = None
        if spec["output"] == "frames":
            stdin, out, err = subprocess.DEVNULL, subprocess.PIPE, subprocess.PIPE
        if spec["logs"]:
            out = err = open(os.path.join(spec["logs"], f"{spec['logs_prefix']}_rank{number}.log"), "ab")
        try:
            process = reaper.LingeringPopen(
                wanted["argv"],
                env=env,
                stdin=stdin,
                stdout=out,
                stderr=err,
                start_new_session=True,
                pass_fds=spec.get("pass_fds", ()),
            )
        finally:
            if spec["logs"]:
                out.close()
        self.ranks.append(Rank(number, process, errors))
        for fd, pipe in ((1, process.stdout), (2, process.stderr)):
            if pipe is not None:
                self.selector.register(pipe, selectors.EVENT_READ, (number, fd))

    def stop(self, grace_s: float) -> None:
        """SIGTERM now, SIGKILL after grace_s. A second call can only shorten it."""
        if self.kill_at is None:
            for rank in self.ranks:
                rank.signal_group(signal.SIGTERM)
        at = time.monotonic() + grace_s
        self.kill_at = at if self.kill_at is None else min(self.kill_at, at)
        if not self.started:
            self.over = True

    def abandon(self) -> None:
        """Nobody is there any more: end all at once; srun and mpirun (gentle) are given the time to end what they
        started on other hosts."""
        if self.abandoned:
            return
        self.abandoned = self.out.broken = True
        if self.gentle and self.started:
            self.selector.unregister(self.fd_in)
            self.stop(_GRACE_S)
            return
        for rank in self.ranks:
            rank.signal_group(signal.SIGKILL)
        self.over = True

    # ---- the ranks ---------------------------------------------------------------------------------------------------
    def collect(self) -> None:
        """Notes who has ended, and collects what nobody else does."""
        for rank in self.ranks:
            if rank.exit is None and (code := rank.process.poll()) is not None:
                rank.exit, rank.ended = code, time.time()
                self.out.send("failed" if code != 0 else "finished", rank=rank.name)
        if self.store is not None and self.store.exit is None and (code := self.store.process.poll()) is not None:
            self.store.exit = code
            self.error(f"the ranks' meeting point ended with exit code {code}; its output is above")
        started = [*self.ranks, *([self.store] if self.store is not None else [])]
        reaper.reap_orphans({rank.process.pid for rank in started if rank.process.returncode is None})

    def forward(self, pipe: Any, number: int | str, fd: int) -> None:
        data = os.read(pipe.fileno(), 1 << 16)
        if data:
            self.out.send("out", data, rank=number, fd=fd)
        else:
            self.selector.unregister(pipe)
            pipe.close()

    def _move(self, timeout: float) -> None:
        """What has arrived, and what must go out."""
        for key, _ in self.selector.select(timeout):
            if key.data == "control":
                self.control()
            elif key.data != "writable" and self.out.waiting < self.out.FULL:
                self.forward(key.fileobj, *key.data)
        self._keep_sending()

    def step(self, timeout: float = _POLL_S) -> None:
        """One round: what has arrived, what must go out, who has ended, what time it is."""
        self._move(timeout)
        self.collect()
        now = time.monotonic()
        if self.out.broken or self._silent():
            self.abandon()
        if self.terminated and self.kill_at is None:
            self.stop(_GRACE_S)
        if self.kill_at is not None and now > self.kill_at:
            for rank in self.ranks:
                rank.killed = rank.killed or rank.exit is None
                rank.signal_group(signal.SIGKILL)
        if self.started and all(rank.exit is not None for rank in self.ranks):
            self.over = True

    def _keep_sending(self) -> None:
        """While the launcher does not read, its descriptor is watched, and the ranks' pipes wait."""
        self.out.flush()
        if self.out.waiting and self._read_ranks:
            self.selector.register(self.out.fd, selectors.EVENT_WRITE, "writable")
        elif not self.out.waiting and not self._read_ranks:
            self.selector.unregister(self.out.fd)
        self._read_ranks = not self.out.waiting
        if self.out.waiting >= self.out.FULL:
            time.sleep(0.01)  # the pipes stay readable meanwhile

    def finish(self) -> None:
        """After the last step: nothing lives, what was printed is on its way, the launcher knows."""
        self.store = None
        reaper.kill_descendants()
        self.collect()
        self._drain(self._open_pipes)
        now = time.time()
        self.out.send("ended", failures=[r.failure(now) for r in self.ranks if r.exit != 0])
        self._drain(lambda: self.out.waiting > 0)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _drain(self, wanted: Callable[[], bool]) -> None:
        """While `wanted()`: what was printed goes to the launcher, as long as that is there and goes on reading."""
        since, seen = time.monotonic(), -1
        while wanted() and not self.out.broken:
            if self.out.told != seen:
                since, seen = time.monotonic(), self.out.told
            patience = _SLOW_S if self.out.waiting and not self.terminated else _DRAIN_S
            if time.monotonic() - since > patience or self._silent():
                return
            self._move(0.05)

    def _silent(self) -> bool:
        """Whether the launcher has not been heard of for as long as it said."""
        return self.lost_after is not None and time.monotonic() - self.heard > self.lost_after

    def _open_pipes(self) -> bool:
        return any(isinstance(key.data, tuple) for key in self.selector.get_map().values())


def main() -> None:
    agent = Agent(int(sys.argv[1]), int(sys.argv[2]))

    def terminate(_signal: int, _frame: FrameType | None) -> None:
        agent.terminated = True

    signal.signal(signal.SIGTERM, terminate)
    for sig in (
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGTSTP,
    ):  # a handler, for what we start it is the default again
        signal.signal(sig, lambda *_: None)
    reaper.become_subreaper()
    for fd in (agent.fd_in, agent.out.fd):
        os.set_inheritable(fd, False)
    agent.out.raw(frames.MAGIC)
    agent.out.send("hello", **hello())
    try:
        while not agent.over:
            agent.step()
    finally:
        agent.finish()


if __name__ == "__main__":
    main()
