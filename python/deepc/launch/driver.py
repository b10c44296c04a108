"""The launcher's side of a run: one agent (agent.py) per host, here through a pipe, elsewhere through ssh. Starts all
at once, and the ranks only when every host has answered; prints what they print; when one fails ends all."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..core.telemetry.speak import tell
from ..errors import CommError, DeepcError
from .failure import Failure
from .host.frames import Decoder, FrameError, Sender
from .options import Launch, threads
from .remote import ssh
from .remote.environment import exported, from_files
from .remote.hosts import Host

GRACE_S = 10.0  # from SIGTERM to SIGKILL of ranks that don't end by themselves
FINISHED_S = 30.0  # from the last rank that ended well until the others are mentioned
LOST_AFTER_S = 60.0  # without a sign of the launcher an agent ends its ranks; over a network only
_RANK = str(Path(__file__).parent / "host" / "rank.py")
_SETTLE_S = 1.5  # for the other hosts' verdicts, when one can't be reached

Sink = Callable[[int | str, int, bytes], None]  # rank, fd, what it wrote


class Connection:
    """An agent, and the process through which it is reached."""

    def __init__(self, host: Host, process: subprocess.Popen[bytes], read_fd: int, sender: Sender) -> None:
        self.host, self.process, self.read_fd, self.sender = host, process, read_fd, sender
        self.decoder = Decoder(synced=False)
        self.hello: dict[str, Any] | None = None
        self.said = b""  # on ssh's stderr, until the ranks start
        self.failures: list[dict[str, Any]] | None = None  # of the frame "ended"
        self.error = ""
        self.store_port = 0
        self.closed = False

    @property
    def over(self) -> bool:
        return self.closed or self.failures is not None

    @property
    def remote(self) -> bool:
        return not self.host.local


def _open_local(host: Host, pass_fds: Sequence[int]) -> Connection:
    """An agent on this machine; its ranks write where this process does."""
    to_agent, ours_out = os.pipe()
    ours_in, from_agent = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-IS", ssh.AGENT, str(to_agent), str(from_agent)],
            pass_fds=[to_agent, from_agent, *pass_fds],
        )
    finally:
        os.close(to_agent)
        os.close(from_agent)
    return Connection(host, process, ours_in, Sender(ours_out))


def _open_ssh(host: Host, launch: Launch) -> Connection:
    """A session of its own: ^C reaches us and not ssh, and ssh asks nobody for a password."""
    command = ssh.command(host.name, port=launch.ssh_port, arguments=launch.launcher_args, before=launch.venv_script)
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except FileNotFoundError:
        raise CommError(
            "there is no `ssh` on this machine: install openssh-client, or start with srun or mpirun (--launcher)"
        ) from None
    assert process.stdin is not None and process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    return Connection(host, process, process.stdout.fileno(), Sender(process.stdin.fileno()))


class Driver:
    """Use as a context: leaving it ends whatever still runs.

    commands: instead of the launch's ranks, processes [{rank, argv, env}] of the one local host. sink: gets the output
    of local ranks too. single: this host's part of a run that is started on each host by hand (no_ssh)."""

    def __init__(
        self,
        launch: Launch,
        *,
        commands: list[dict[str, Any]] | None = None,
        sink: Sink | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.launch, self._commands, self._sink, self._pass_fds = launch, commands, sink, list(pass_fds)
        self.nodes = range(len(launch.hosts)) if launch.node is None else range(launch.node, launch.node + 1)
        self.connections: list[Connection] = []
        self.failures: list[Failure] = []
        self.suspend = False  # set by a handler of SIGTSTP
        self._selector = selectors.DefaultSelector()
        self._store: Any = None
        self._stopping: float | None = None  # when the hosts that say nothing are given up
        self._pinged = time.monotonic()
        self._finished: dict[int | str, float] = {}  # ranks that ended with exit code 0, and when
        self._told_finished = False
        self._printers: dict[tuple[int, int | str, int], Printer] = {}

    # ---- connecting --------------------------------------------------------------------------------------------------
    def __enter__(self) -> Driver:
        try:
            for node in self.nodes:
                host = self.launch.hosts[node]
                local = host.local or self.launch.launcher != "ssh" or self.launch.node is not None
                host = Host(host.name, host.slots, local)
                connection = _open_local(host, self._pass_fds) if local else _open_ssh(host, self.launch)
                self.connections.append(connection)
                self._selector.register(connection.read_fd, selectors.EVENT_READ, (connection, "frames"))
                if connection.process.stderr is not None:
                    self._selector.register(connection.process.stderr, selectors.EVENT_READ, (connection, "text"))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connect(self) -> None:
        """Waits until every host has answered. Raises CommError that names those that don't, and why."""
        deadline = time.monotonic() + self.launch.connect_s
        while not all(c.hello for c in self.connections) and time.monotonic() < deadline:
            self._step(0.2)
            if any(c.closed for c in self.connections):
                deadline = min(deadline, time.monotonic() + _SETTLE_S)
                if all(c.closed or c.hello for c in self.connections):
                    break
        missing = [c for c in self.connections if not c.hello]
        if not missing:
            return
        texts = [self._why(c) for c in missing]
        many = len(self.connections) > 1
        whom = f"{len(missing)} of {len(self.connections)} hosts" if many else "the host"
        raise CommError(
            f"{whom} could not be reached; nothing was started\n  " + "\n  ".join(texts if many else texts[:1])
        )

    def _why(self, c: Connection) -> str:
        if not c.closed and c.process.poll() is None:
            return ssh.explain(
                c.host.name, None, f"connection timed out (no answer within {self.launch.connect_s:g} s)"
            )
        said = (c.said + c.decoder.unsynced()).decode(errors="replace")
        code = c.process.wait()
        return (
            ssh.explain(c.host.name, code, said)
            if c.remote
            else f"{c.host.name}: its agent ended with exit code {code}: {said.strip()}"
        )

    # ---- starting ----------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Starts the ranks of all hosts. Raises CommError if a host can't (a folder or script that is not there, GPUs
        that are not)."""
        for c in self.connections:
            self._compare(c)
        address, port = ("", 0) if self._commands is not None else self._meeting_point()
        for node, c in zip(self.nodes, self.connections):
            c.sender.send("start", **self._spec(node, c, address, port))

    def _compare(self, c: Connection) -> None:
        hello = c.hello or {}
        mine = next((d.hello for d in self.connections if d.hello), {})
        if hello.get("code") != mine.get("code"):
            first = self.connections[0].host.name
            tell(f"deepc run: {c.host.name} has another version of deepc than {first}; install the same on all")
        gpus = hello.get("gpus", 0)
        if c.remote and gpus and not self.launch.cpu and max(c.host.slots) >= gpus:
            raise CommError(
                f"{c.host.name} has {gpus} GPUs and slot {max(c.host.slots)} was asked for: correct its slots in the"
                " hostfile, or add --cpu"
            )

    def _uses_gpus(self, c: Connection) -> bool:
        return bool(c.hello and c.hello["gpus"]) and not self.launch.cpu

    def _address(self) -> str:
        """Of the first host, as the others reach it."""
        first = self.connections[0]
        if len(self.launch.hosts) == 1 and first.host.local:
            return "127.0.0.1"
        if self.launch.node is not None:
            return self.launch.hosts[0].name
        if first.remote:
            return first.hello["address"] or first.host.name if first.hello else first.host.name
        seen = [c.hello["client"] for c in self.connections if c.remote and c.hello and c.hello["client"]]
        return str(seen[0]) if seen else socket.gethostname()

    def _meeting_point(self) -> tuple[str, int]:
        """Opens the ranks' store on the first host."""
        address, port = self.launch.master or ("", None)
        address = address or self._address()
        if self.launch.master and port is None:
            port = 29500
        if self.launch.node:  # another host has it
            return address, port or 29500
        first = self.connections[0]
        try:
            if not first.remote:
                return address, self._open_store(address, port or 0)
            first.sender.send("store", port=port or 0, env=exported(os.environ))
            self._wait(lambda: bool(first.store_port), "the ranks' meeting point was not opened")
        except (OSError, CommError, DeepcError) as exc:
            where = f"{address}:{port}" if port else address
            reason = exc.strerror or str(exc) if isinstance(exc, OSError) else str(exc)
            raise CommError(
                f"the ranks' meeting point on {where} could not be opened: {reason}. Is the network up, and the port"
                " free? --master_port chooses another"
            ) from exc
        return address, first.store_port

    def _open_store(self, address: str, port: int) -> int:
        """In this process, which has torch already; it outlives every rank. On a port that was listened to first: none
        can take it in between."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        loopback = address == "localhost" or address.startswith("127.")
        with socket.create_server(("127.0.0.1" if loopback else "", port), backlog=1024) as listening:
            port = listening.getsockname()[1]
            self._store = TCPStore(
                "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listening.fileno())
            )
        return port

    def _spec(self, node: int, c: Connection, address: str, port: int) -> dict[str, Any]:
        """The frame "start" for one host (agent.py)."""
        launch, several = self.launch, len(self.launch.hosts) > 1
        env = dict(launch.env)
        if several or c.remote:
            env = {**(exported(os.environ) if c.remote else from_files()), **env}
            env = {**threads(c.host.ranks, c.hello["cores"] if c.hello else 1, launch.bind), **env}  # a file may set it
            if self._uses_gpus(c):
                env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, c.host.slots))
            if c.remote and c.hello and c.hello["interface"] and "GLOO_SOCKET_IFNAME" not in env:
                env["GLOO_SOCKET_IFNAME"] = c.hello[
                    "interface"
                ]  # else Gloo takes the one of the host's name, often 127.0.1.1
        framed = several or c.remote or self._sink is not None
        logs = os.path.abspath(launch.logs) if launch.logs else None
        processes = self._commands if self._commands is not None else self._processes(node, address, port)
        return {
            "cwd": os.getcwd(),
            "env": env,
            "processes": processes,
            "output": "frames" if framed else "inherit",
            "logs": logs,
            "logs_prefix": time.strftime("%Y%m%d%H%M%S"),
            "script": launch.command[0] if launch.kind == "script" else None,
            "lost_after_s": LOST_AFTER_S if c.remote else None,
            "pass_fds": self._pass_fds,
            "gentle": self._commands is not None,
        }

    def _processes(self, node: int, address: str, port: int) -> list[dict[str, Any]]:
        """torchrun's variables for each rank of a host, and DeepSpeed's."""
        launch = self.launch
        hosts, host = launch.hosts, launch.hosts[node]
        before = sum(h.ranks for h in hosts[:node])
        common = {
            "WORLD_SIZE": launch.ranks,
            "LOCAL_WORLD_SIZE": host.ranks,
            "GROUP_RANK": node,
            "NODE_RANK": node,
            "GROUP_WORLD_SIZE": len(hosts),
            "LOCAL_SIZE": host.ranks,
            "CROSS_RANK": node,
            "CROSS_SIZE": len(hosts),
            "ROLE_NAME": "default_role",
            "ROLE_WORLD_SIZE": launch.ranks,
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_RUN_ID": self._run_id(),
            "TORCHELASTIC_MAX_RESTARTS": 0,
            "TORCHELASTIC_RESTART_COUNT": 0,
            **launch.rank_options(),
        }
        argv = [sys.executable, "-u", _RANK, launch.kind, *launch.command]

        def environment(i: int) -> dict[str, str]:
            own = {"RANK": before + i, "ROLE_RANK": before + i, "LOCAL_RANK": i}
            return {k: str(v) for k, v in {**common, **own}.items()}

        return [{"rank": before + i, "argv": argv, "env": environment(i)} for i in range(host.ranks)]

    def _run_id(self) -> str:
        return (
            uuid.uuid5(uuid.NAMESPACE_OID, " ".join(self.launch.command)).hex
            if self.launch.node is not None
            else uuid.uuid4().hex
        )

    # ---- running -----------------------------------------------------------------------------------------------------
    def wait(self) -> list[Failure]:
        """Until all hosts are done. Returns what failed; [] if nothing did. Raises CommError for what an agent could
        not do."""
        while not all(c.over for c in self.connections):
            self._step(0.5)
        for c in self.connections:
            if c.error:
                raise CommError(f"{c.host.name}: {c.error}" if c.remote or len(self.connections) > 1 else c.error)
        return self.failures

    def _wait(self, done: Callable[[], bool], what: str, limit_s: float = 30.0) -> None:
        end = time.monotonic() + limit_s
        while not done():
            self._step(0.2)
            for c in self.connections:
                if c.error or c.over:
                    raise CommError(c.error or f"the connection to {c.host.name} was lost")
            if time.monotonic() > end:
                raise CommError(what)

    def stop(self, grace_s: float = GRACE_S) -> None:
        """Tells all hosts to end their ranks."""
        for c in self.connections:
            if c.over:
                continue
            if c.hello:
                c.sender.send("stop", grace_s=grace_s)
            else:  # nothing was started there, and nobody may hear it
                c.process.kill()
        at = time.monotonic() + grace_s + 5.0
        self._stopping = at if self._stopping is None else min(self._stopping, at)

    def _step(self, timeout: float) -> None:
        for key, _ in self._selector.select(timeout):
            connection, kind = key.data
            self._read(connection, key, kind)
        self._keep_alive()
        self._tell_finished()
        if self._stopping is not None and time.monotonic() > self._stopping:
            for c in self.connections:
                if not c.over:
                    c.process.kill()

    def _tell_finished(self) -> None:
        """Says once that some ranks have ended while others go on for long: those may wait for them."""
        ranks = sum(self.launch.hosts[n].ranks for n in self.nodes)
        if self._told_finished or not 0 < len(self._finished) < ranks or self._stopping is not None:
            return
        if time.monotonic() - max(self._finished.values()) < FINISHED_S:
            return
        self._told_finished = True
        names = ", ".join(map(str, sorted(self._finished, key=str)[:8])) + (" ..." if len(self._finished) > 8 else "")
        tell(
            f"deepc run: rank {names} ended with exit code 0 more than {FINISHED_S:.0f} s ago, and "
            f"{ranks - len(self._finished)} of {ranks} ranks still run. If they wait, `deepc doctor {os.getpid()}` says"
            " for what"
        )

    def _keep_alive(self) -> None:
        """Pings; and while this process is suspended the agents must not take it for dead."""
        remote = [c for c in self.connections if c.remote and not c.over and c.hello]
        for c in self.connections:
            c.sender.flush()
        if self.suspend:
            self.suspend = False
            for c in remote:
                c.sender.send("pause")
            os.kill(os.getpid(), signal.SIGSTOP)
            for c in remote:
                c.sender.send("resume", lost_after_s=LOST_AFTER_S)
        now = time.monotonic()
        if now - self._pinged > LOST_AFTER_S / 6:
            self._pinged = now
            for c in remote:
                c.sender.send("ping")

    def _read(self, c: Connection, key: selectors.SelectorKey, kind: str) -> None:
        try:
            data = os.read(key.fd, 1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if kind == "text":
            self._ssh_said(c, key, data)
        elif data:
            self._frames(c, data)
        else:
            self._selector.unregister(key.fileobj)
            self._lost(c)

    def _ssh_said(self, c: Connection, key: selectors.SelectorKey, data: bytes) -> None:
        if not data:
            self._selector.unregister(key.fileobj)
        c.said = (c.said + data)[-8192:]
        if c.hello and data:
            self._print(c, "ssh", 2, data)

    def _frames(self, c: Connection, data: bytes) -> None:
        try:
            for head, payload in c.decoder.feed(data):
                self._frame(c, head, payload)
        except FrameError as exc:
            c.error = f"what came from its agent makes no sense: {exc}"
            self.stop(0.0)

    def _frame(self, c: Connection, head: dict[str, Any], payload: bytes) -> None:
        kind = head["t"]
        if kind == "hello":
            c.hello = head
        elif kind == "store":
            c.store_port = head["port"]
        elif kind == "out":
            self._print(c, head["rank"], head["fd"], payload)
        elif kind == "finished":
            self._finished[head["rank"]] = time.monotonic()
        elif kind == "failed":
            self.stop()
        elif kind == "error":
            c.error = head["text"]
            self.stop()
        elif kind == "ended":
            c.failures = head["failures"]
            self.failures += [self._failure(c, f) for f in c.failures]

    def _failure(self, c: Connection, f: dict[str, Any]) -> Failure:
        where = c.host.name if len(self.launch.hosts) > 1 or c.remote else ""
        told, text, killed = f.get("type", ""), f.get("traceback", ""), f.get("ours", False)
        return Failure(f["rank"], f["pid"], f["exit"], time.time() - f["age"], told, text, where, killed=killed)

    def _lost(self, c: Connection) -> None:
        """The agent's pipe has ended. Without a word before: it, the connection or the host died."""
        c.closed = True
        if c.failures is not None or c.hello is None:
            return
        code = c.process.wait() if not c.remote else _wait_a_moment(c.process)
        first = sum(h.ranks for h in self.launch.hosts[: self.launch.hosts.index(self._planned(c))])
        ranks = f"rank{'s' if c.host.ranks > 1 else ''} {first}" + (
            f" to {first + c.host.ranks - 1}" if c.host.ranks > 1 else ""
        )
        said = c.said.decode(errors="replace").strip().splitlines()[-1:]
        what = (
            f"the connection to {c.host.name} ({ranks}) was lost"
            if c.remote
            else f"the agent that watched {ranks} ended unexpectedly"
        )
        self.failures.append(
            Failure(
                c.host.name,
                c.process.pid,
                1,
                time.time(),
                host=c.host.name,
                what=f"{what} ({'; '.join([*said, f'exit code {code}'])})",
            )
        )
        self.stop()

    def _planned(self, c: Connection) -> Host:
        return next(h for h in self.launch.hosts if h.name == c.host.name)

    # ---- output ------------------------------------------------------------------------------------------------------
    def _print(self, c: Connection, rank: int | str, fd: int, data: bytes) -> None:
        if self._sink is not None:
            self._sink(rank, fd, data)
            return
        key = (id(c), rank, fd)
        if key not in self._printers:
            self._printers[key] = Printer(f"[{c.host.name}:{rank}] ", fd)
        self._printers[key].write(data)

    # ---- the end -----------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """No agent, and so no rank, lives afterwards: an agent whose pipe ends kills what it started."""
        for c in self.connections:
            try:
                if c.process.stdin is not None:
                    c.process.stdin.close()
                else:
                    os.close(c.sender.fd)
            except OSError:
                pass
            c.sender.broken = True
            if not c.hello:  # nothing was started there, and nobody may hear it
                c.process.kill()
        end = time.monotonic() + 15.0
        for c in self.connections:
            self._drain(c, end)
            try:
                c.process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                c.process.kill()
                c.process.wait()
            for pipe in (c.process.stdout, c.process.stderr):
                if pipe is not None:
                    pipe.close()
            if c.process.stdout is None:
                os.close(c.read_fd)
        for printer in self._printers.values():
            printer.finish()
        self.connections.clear()
        self._selector.close()
        self._store = None

    def _drain(self, c: Connection, end: float) -> None:
        """An ssh that waits for its output to be read would not end."""
        if c.process.stdout is None:
            return
        os.set_blocking(c.read_fd, False)
        while c.process.poll() is None and time.monotonic() < end:
            try:
                if not os.read(c.read_fd, 1 << 16):
                    return
            except BlockingIOError:
                time.sleep(0.02)
            except OSError:
                return


def _wait_a_moment(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(2.0)
    except subprocess.TimeoutExpired:
        return None


class Printer:
    """Whole lines of one rank, each with a prefix, to stdout or stderr. A carriage return ends a line too: progress
    bars."""

    def __init__(self, prefix: str, fd: int) -> None:
        self._prefix, self._rest = prefix.encode(), b""
        self._stream = sys.stdout if fd == 1 else sys.stderr

    def write(self, data: bytes) -> None:
        *lines, self._rest = (
            (self._rest + data)
            .replace(b"\r\n", b"\n")
            .replace(b"\r", b"\r\x00")
            .replace(b"\n", b"\n\x00")
            .split(b"\x00")
        )
        if len(self._rest) > 1 << 16:
            lines, self._rest = [*lines, self._rest + b"\n"], b""
        self._out(lines)

    def finish(self) -> None:
        if self._rest:
            self._out([self._rest + b"\n"])
            self._rest = b""

    def _out(self, lines: list[bytes]) -> None:
        if not lines or self._stream is None:
            return
        data = b"".join(self._prefix + line for line in lines)
        try:
            buffer = getattr(self._stream, "buffer", None)
            if buffer is not None:
                buffer.write(data)
            else:
                self._stream.write(data.decode(errors="replace"))
            self._stream.flush()
        except (OSError, ValueError):  # nobody reads our output any more; the run goes on
            pass
