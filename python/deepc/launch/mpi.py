"""Runs that another launcher starts and watches: srun, mpirun. Its command line, and the socket to which the ranks send
the traceback of what ends them.

Each rank is `python rank.py ...`, which makes torchrun's variables of the launcher's (places.py). The environment goes
along as each of them does it."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import ArgumentError, UnsupportedError
from .failure import Failure
from .options import Launch
from .remote.environment import exported

RANK = str(Path(__file__).parent / "host" / "rank.py")
_MOST = 1 << 22  # of one report
_PROGRAM = {"slurm": "srun", "openmpi": "mpirun", "mpich": "mpirun", "impi": "mpirun", "mvapich": "mpirun"}
_INSTALL = {"slurm": "Slurm", "openmpi": "OpenMPI", "mpich": "MPICH", "impi": "Intel MPI", "mvapich": "MVAPICH"}


def rank_command(launch: Launch) -> list[str]:
    """What every rank executes."""
    return [sys.executable, "-u", RANK, launch.kind, *launch.command]


def _equal_slots(launch: Launch) -> int:
    """Ranks per host; these launchers take one number for all, and no device numbers."""
    for host in launch.hosts:
        if host.slots != tuple(range(host.ranks)):
            raise UnsupportedError(
                f"--launcher {launch.launcher} can't choose slots {','.join(map(str, host.slots))} of {host.name}: it "
                "counts from 0. Filter whole hosts, or use --launcher ssh"
            )
    counts = {host.ranks for host in launch.hosts}
    if len(counts) > 1:
        shown = ", ".join(f"{h.name} {h.ranks}" for h in launch.hosts)
        raise UnsupportedError(
            f"--launcher {launch.launcher} starts equally many ranks on every host, and these differ: {shown}. Use "
            "--launcher ssh or openmpi, or ask for as many on each with --num_gpus N"
        )
    return counts.pop()


def _program(launch: Launch) -> str:
    name = _PROGRAM[launch.launcher]
    candidates = {"mpich": ["mpirun.mpich", "mpiexec.hydra", name], "openmpi": ["mpirun.openmpi", name]}.get(
        launch.launcher, [name]
    )
    for candidate in candidates:
        if shutil.which(candidate):
            return candidate
    raise ArgumentError(
        f"--launcher {launch.launcher}: there is no `{name}` on this machine: install {_INSTALL[launch.launcher]} (or"
        " load its module), or use --launcher ssh"
    )


def _has(arguments: list[str], *names: str) -> bool:
    return any(a.split("=")[0] in names for a in arguments)


def _srun(launch: Launch, more: list[str], env: dict[str, str]) -> list[str]:
    """--kill-on-bad-exit: a rank that dies ends all. Before 22.05 srun took --cpus-per-task from sbatch by itself;
    since then it must be told."""
    per_node, nodes = _equal_slots(launch), len(launch.hosts)
    out = [
        _program(launch),
        f"--nodes={nodes}",
        f"--ntasks={per_node * nodes}",
        f"--ntasks-per-node={per_node}",
        "--kill-on-bad-exit=1",
        "--export=ALL",
    ]
    if nodes > 1 and not _has(more, "--label", "-l", "--unbuffered", "-u"):
        out.append("--label")
    if launch.named:
        out.append("--nodelist=" + ",".join(h.name for h in launch.hosts))
    cpus = os.environ.get("SLURM_CPUS_PER_TASK")
    if cpus and not _has(more, "--cpus-per-task", "-c"):
        out.append(f"--cpus-per-task={cpus}")
    if launch.bind and not _has(more, "--cpu-bind"):
        out.append("--cpu-bind=none")  # rank.py does it
    return out + more


def _openmpi(launch: Launch, more: list[str], env: dict[str, str]) -> list[str]:
    """Its own binding is off (a rank with several threads would have one core) unless it is asked for; the environment
    must be named."""
    out = [_program(launch), "-n", str(launch.ranks), "--host", ",".join(f"{h.name}:{h.ranks}" for h in launch.hosts)]
    if not _has(more, "--bind-to", "-bind-to", "--map-by", "-map-by"):
        out += ["--bind-to", "none", "--map-by", "slot"]
    if os.geteuid() == 0 and not _has(more, "--allow-run-as-root", "-allow-run-as-root"):
        out.append("--allow-run-as-root")
    if len(launch.hosts) > 1 and not _has(more, "--tag-output", "-tag-output"):
        out.append("--tag-output")
    for host in launch.hosts:
        if host.slots != tuple(range(host.ranks)):
            raise UnsupportedError(
                f"--launcher openmpi can't choose slots {','.join(map(str, host.slots))} of {host.name}: it counts from"
                " 0. Use --launcher ssh"
            )
    for name in sorted(env):
        out += ["-x", name]
    return out + more


def _hydra(launch: Launch, more: list[str], env: dict[str, str]) -> list[str]:
    """MPICH, Intel MPI and MVAPICH: mpirun is Hydra, which passes the whole environment on."""
    per_node = _equal_slots(launch)
    out = [
        _program(launch),
        "-n",
        str(launch.ranks),
        "-ppn",
        str(per_node),
        "-hosts",
        ",".join(h.name for h in launch.hosts),
    ]
    if len(launch.hosts) > 1 and not _has(more, "-l", "-prepend-rank", "-prepend-pattern"):
        out.append("-prepend-rank" if launch.launcher != "impi" else "-l")
    if launch.launcher == "impi" and not _has(more, "-genv"):
        out += ["-genv", "I_MPI_PIN", "0"]  # as OpenMPI's binding
    return out + more


_COMMANDS = {"slurm": _srun, "openmpi": _openmpi, "mpich": _hydra, "impi": _hydra, "mvapich": _hydra}


def environment(launch: Launch, report_to: str) -> dict[str, str]:
    """What is set on top of this process's environment for the launcher, and so for its ranks."""
    env = {**launch.env, **launch.rank_options()}
    env["DEEPC_REPORT_TO"] = report_to
    if launch.launcher != "slurm":  # Slurm's ranks see the list of hosts
        env["MASTER_ADDR"], env["MASTER_PORT"] = _meeting_point(launch)
    elif launch.master:
        address, port = launch.master
        env.update({**({"MASTER_ADDR": address} if address else {}), **({"MASTER_PORT": str(port)} if port else {})})
    return env


def _meeting_point(launch: Launch) -> tuple[str, str]:
    address, port = launch.master or ("", None)
    first = launch.hosts[0]
    if not address:
        address = (
            "127.0.0.1"
            if len(launch.hosts) == 1 and first.local
            else socket.gethostname()
            if first.local
            else first.name
        )
    if port is None:
        port = 29500
        if first.local:  # a free one; somewhere else it can't be asked for
            with socket.create_server(("", 0)) as probe:
                port = probe.getsockname()[1]
    return address, str(port)


def command(launch: Launch, env: dict[str, str]) -> list[str]:
    """The launcher's command line. env: of environment(); with it and the user's own the ranks are to run."""
    if launch.logs:
        raise UnsupportedError(
            f"--enable_each_rank_log does not exist for --launcher {launch.launcher}: give the launcher's own option in"
            " --launcher_args (srun --output=rank%t.log, mpirun --output-filename FOLDER), or use --launcher ssh"
        )
    if launch.venv_script or launch.ssh_port:
        raise UnsupportedError(f"--venv_script and --ssh_port belong to --launcher ssh, not to {launch.launcher}")
    return [
        *_COMMANDS[launch.launcher](launch, shlex.split(launch.launcher_args), {**exported(os.environ), **env}),
        *rank_command(launch),
    ]


class Reports:
    """Where ranks that another launcher started hand in their traceback (rank.py send_record). Only with the run's
    token."""

    def __init__(self) -> None:
        self._token = secrets.token_hex(16)
        self._socket = socket.create_server(("", 0), backlog=128)
        self.failures: list[Failure] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """For DEEPC_REPORT_TO."""
        return " ".join([self._token, str(self._socket.getsockname()[1]), *_addresses()])

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            with connection:
                try:
                    connection.settimeout(5.0)
                    self._take(connection)
                except OSError:
                    continue

    def _take(self, connection: socket.socket) -> None:
        import json

        data = b""
        while len(data) < _MOST and (got := connection.recv(1 << 16)):
            data += got
        token, _, text = data.partition(b"\n")
        if not secrets.compare_digest(token, self._token.encode()):
            return
        try:
            extra = json.loads(text)["message"]["extraInfo"]
            self.failures.append(
                Failure(
                    int(extra["rank"]),
                    int(extra["pid"]),
                    int(extra.get("exit", 1)),
                    time.time(),
                    str(extra["type"]),
                    str(extra["py_callstack"]),
                )
            )
        except (ValueError, KeyError, TypeError):
            return
        connection.sendall(b"ok")

    def close(self) -> None:
        self._socket.close()


def _addresses() -> Iterator[str]:
    """Of this host, for its ranks and for those on others: loopback first."""
    yield "127.0.0.1"
    name = socket.gethostname()
    seen = {"127.0.0.1", "127.0.1.1"}
    try:
        found = [str(info[4][0]) for info in socket.getaddrinfo(name, None, socket.AF_INET)]
    except OSError:
        found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; tells the address of the way out
            found.append(probe.getsockname()[0])
        except OSError:
            pass
    for address in found:
        if address not in seen:
            seen.add(address)
            yield address


@contextmanager
def reports() -> Iterator[Reports]:
    made = Reports()
    try:
        yield made
    finally:
        made.close()
