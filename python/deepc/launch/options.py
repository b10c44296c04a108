"""The command line of `deepc run`, and the plan that follows from it. Nothing here starts a process.

Takes DeepSpeed's launcher options; docs/launching.md has what each does here."""

from __future__ import annotations

import argparse
import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ArgumentError, UnsupportedError
from .host import bind, places
from .remote.hosts import Host, is_this_machine, read_hostfile, select, trim

LAUNCHERS = ("ssh", "slurm", "openmpi", "mpich", "impi", "mvapich")
_DEFAULT_HOSTFILE = "/job/hostfile"  # DeepSpeed's; job systems write it
_DEFAULT_PORT = 29500
_LOCAL = "localhost"


@dataclass(frozen=True)
class Launch:
    """What will be started: on each of `hosts` its ranks, each running `command` (without the interpreter) with `env`
    on top of the environment.

    launcher: "local" (one host, this one), "ssh" (an agent of deepc on every host) or the program that starts and
    watches the ranks. devices: the CUDA devices by index where the only host is this one, empty on CPU. master: address
    and port where the ranks meet, if given. node: with no_ssh, which of the hosts this one is. bind: "", "all" or a
    list of cores. cores: of this host, for its share of threads. notes: what the user should read first."""

    hosts: tuple[Host, ...]
    kind: str  # script | module | exec | call
    command: tuple[str, ...]
    launcher: str = "local"
    devices: tuple[int, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    master: tuple[str, int | None] | None = None
    node: int | None = None
    pass_local_rank: bool = False
    as_deepspeed: bool = False
    bind: str = ""
    cpu: bool = False
    launcher_args: str = ""
    ssh_port: int | None = None
    connect_s: float = 20.0
    venv_script: str | None = None
    logs: str | None = None
    pid_file: bool = False
    quiet: bool = False
    named: bool = True  # False: Slurm chooses the hosts
    notes: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        return sum(host.ranks for host in self.hosts)

    def rank_options(self) -> dict[str, str]:
        """What launch/rank.py reads of these options from its environment, whoever starts the rank."""
        asked = {
            "DEEPC_BIND": self.bind,
            "DEEPC_AS_DEEPSPEED": "deepc.compat.deepspeed" if self.as_deepspeed else "",
            "DEEPC_LOCAL_RANK_ARGUMENT": "1" if self.pass_local_rank else "",
        }
        return {name: value for name, value in asked.items() if value}

    def describe(self) -> str:
        sets = " ".join(f"{k}={v}" for k, v in sorted(self.env.items()))
        given = os.environ.get("OMP_NUM_THREADS")
        shown = f"; sets {sets}" if sets else f"; OMP_NUM_THREADS={given} as given" if given else ""
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        if self.launcher == "local":
            place = f"CUDA devices {','.join(map(str, self.devices))}" if self.devices else "the CPU"
        else:
            hosts = (
                ", ".join(f"{h.name} ({h.ranks})" for h in self.hosts) if self.named else f"{self.hosts[0].ranks} each"
            )
            place = f"{len(self.hosts)} host{'s' if len(self.hosts) > 1 else ''} through {self.launcher}: {hosts}"
        bound = (
            f"; bound to {'their share of the cores' if self.bind == 'all' else 'cores ' + self.bind}"
            if self.bind
            else ""
        )
        lines = [f"{ranks} on {place}{bound}{shown}", *self.notes]
        return "\n".join("deepc run: " + line for line in lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    ranks = parser.add_argument_group("how many ranks")
    ranks.add_argument(
        "--num_gpus",
        "--num-gpus",
        "--num_accelerators",
        type=_positive,
        metavar="N",
        help=(
            "ranks on each host, one per GPU; on a machine without GPUs N ranks on the CPU. Default: all GPUs, or the "
            "hostfile's slots, or 1"
        ),
    )
    ranks.add_argument(
        "--num_ranks",
        "--num-ranks",
        "--nproc",
        "--nproc_per_node",
        "--nproc-per-node",
        type=_positive,
        metavar="N",
        help="the same under the name that fits a CPU",
    )
    ranks.add_argument("--cpu", action="store_true", help="stay on the CPU even where there are GPUs")
    hosts = parser.add_argument_group("where")
    hosts.add_argument(
        "--hostfile",
        "-H",
        metavar="FILE",
        help="hosts to use, one line 'host slots=N' each (DeepSpeed's and MPI's format)",
    )
    hosts.add_argument(
        "--include",
        "-i",
        metavar="HOST:0,1@HOST",
        help="only these hosts, and of a host only these slots (GPUs); of this machine: localhost:0,1",
    )
    hosts.add_argument("--exclude", "-e", metavar="HOST:0@HOST", help="all but these")
    hosts.add_argument(
        "--num_nodes",
        "--num-nodes",
        "--nnodes",
        type=_positive,
        metavar="N",
        help="only the first N hosts of the hostfile",
    )
    hosts.add_argument(
        "--master_addr",
        "--master-addr",
        metavar="ADDRESS",
        help="address where the ranks meet; default: the first host's, as the others reach it",
    )
    hosts.add_argument("--master_port", "--master-port", type=_port, metavar="PORT", help="default: a free one")
    through = parser.add_argument_group("through what (several hosts)")
    through.add_argument(
        "--launcher",
        type=_launcher,
        metavar="{" + ",".join(LAUNCHERS) + "}",
        help=(
            "ssh: deepc starts and watches the ranks itself (default); else that launcher does, and deepc reports. pdsh"
            " means ssh"
        ),
    )
    through.add_argument(
        "--launcher_args",
        "--launcher-args",
        default="",
        metavar="'ARGS'",
        help="further arguments of ssh, srun or mpirun, in one string",
    )
    through.add_argument("--ssh_port", "--ssh-port", type=_port, metavar="PORT", help="port of the hosts' ssh servers")
    through.add_argument(
        "--connect_timeout",
        "--connect-timeout",
        type=_positive,
        default=20,
        metavar="S",
        help="seconds until a silent host counts as unreachable",
    )
    through.add_argument("--venv_script", "--venv-script", metavar="FILE", help="a script to source on each host first")
    through.add_argument(
        "--force_multi",
        "--force-multi",
        action="store_true",
        help="through ssh also where one host, or this one, would do without",
    )
    through.add_argument(
        "--no_ssh",
        "--no-ssh",
        action="store_true",
        help="start only this host's ranks: you run the same line, with its --node_rank, on each host",
    )
    through.add_argument(
        "--node_rank",
        "--node-rank",
        type=int,
        default=None,
        metavar="I",
        help="with --no_ssh: which host of the hostfile this is, from 0",
    )
    # DeepSpeed's extra connection; there is none here
    through.add_argument("--no_ssh_check", "--no-ssh-check", action="store_true", help=argparse.SUPPRESS)
    cores = parser.add_argument_group("cores")
    cores.add_argument(
        "--bind_cores_to_rank",
        "--bind-cores-to-rank",
        action="store_true",
        help="give each rank its own cores, and the memory beside them; OMP_NUM_THREADS becomes their number",
    )
    cores.add_argument(
        "--bind_core_list",
        "--bind-core-list",
        metavar="0-3,8",
        help="the cores of each host to share out; default: all physical ones",
    )
    what = parser.add_argument_group("what")
    what.add_argument("-m", "--module", action="store_true", help="the program is a module name, as in python -m")
    what.add_argument(
        "--no_python", "--no-python", action="store_true", help="the program is any executable, not a Python script"
    )
    what.add_argument(
        "--as-deepspeed",
        "--as_deepspeed",
        action="store_true",
        help=(
            "`import deepspeed` gives deepc in the program; it gets --local_rank=N as from DeepSpeed's launcher (unless"
            " --no_local_rank)"
        ),
    )
    what.add_argument(
        "--pass_local_rank",
        "--pass-local-rank",
        action="store_true",
        help="give --local_rank=N to the program (LOCAL_RANK is in the environment in any case)",
    )
    what.add_argument("--no_local_rank", "--no-local-rank", action="store_true", help="don't")
    what.add_argument(
        "--enable_each_rank_log",
        "--enable-each-rank-log",
        metavar="FOLDER",
        help="write each rank's output to a file of its own there",
    )
    what.add_argument(
        "--save_pid",
        "--save-pid",
        action="store_true",
        help="write the launcher's pid to <its parent's pid>.deepspeed in the folder for temporary files",
    )
    what.add_argument("--quiet", "-q", action="store_true", help="say only what went wrong")
    what.add_argument(
        "--log_level",
        "--log-level",
        choices=("debug", "info", "warning", "error", "critical"),
        default="info",
        help=argparse.SUPPRESS,
    )
    what.add_argument("--autotuning", choices=("tune", "run"), help=argparse.SUPPRESS)
    what.add_argument("program", metavar="PROGRAM", help="script to run on every rank")
    what.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments, passed on as they are")


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: a whole number from 1 to 65535")
    return int(text)


def _launcher(text: str) -> str:
    name = {"pdsh": "ssh"}.get(text.lower(), text.lower())
    if name not in LAUNCHERS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(LAUNCHERS)}")
    return name


def _cuda_devices() -> int:
    import torch

    return torch.cuda.device_count()


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


# ---- which hosts -----------------------------------------------------------------------------------------------------
def _on_this_machine(args: argparse.Namespace, wanted: int | None, gpus: int) -> tuple[Host, list[str]]:
    """Without a hostfile: the ranks of this machine, and notes."""
    if (args.num_nodes or 1) > 1:
        raise ArgumentError(
            f"--num_nodes {args.num_nodes}: which hosts? Name them in a file, one line 'host slots=N' each, and add "
            "--hostfile FILE (or, inside a Slurm allocation, --launcher slurm)"
        )
    pool = {_LOCAL: tuple(range(gpus or wanted or cores()))}
    chosen = select(pool, args.include, args.exclude)[_LOCAL]
    if gpus:
        return Host(_LOCAL, _first(chosen, wanted), True), []
    slots = chosen if args.include or args.exclude else tuple(range(wanted or 1))
    notes = []
    if args.num_gpus and not args.cpu:
        ranks = f"{len(slots)} rank{'s' if len(slots) > 1 else ''}"
        notes.append(f"no GPU on this machine: --num_gpus {args.num_gpus} means {ranks} on the CPU")
    nodes = int(os.environ.get("SLURM_NNODES", "1"))
    if nodes > 1:
        notes.append(
            f"this Slurm job has {nodes} nodes and only this one is used: add --launcher slurm for all of them"
        )
    return Host(_LOCAL, slots, True), notes


def _first(slots: tuple[int, ...], wanted: int | None) -> tuple[int, ...]:
    if wanted and wanted > len(slots):
        raise ArgumentError(
            f"{wanted} ranks asked for but there {'is' if len(slots) == 1 else 'are'} only {len(slots)} GPU"
            f"{'s' if len(slots) != 1 else ''} to run on: ask for fewer, or add --cpu"
        )
    return slots[:wanted] if wanted else slots


def _of_hostfile(args: argparse.Namespace, path: str, wanted: int | None) -> tuple[Host, ...]:
    pool = {name: tuple(range(slots)) for name, slots in read_hostfile(path).items()}
    pool = trim(select(pool, args.include, args.exclude), args.num_nodes, wanted, f"--hostfile {path}")
    return tuple(Host(name, slots, not args.force_multi and is_this_machine(name)) for name, slots in pool.items())


def _slurm_tasks(nodes: int) -> list[int]:
    """The allocation's tasks on each of its nodes; where it names none, a rank for each GPU."""
    env = os.environ
    try:
        counts = [places.tasks_on(i, env.get("SLURM_TASKS_PER_NODE", "")) for i in range(nodes)]
    except places.PlaceError:  # of a step on some of the nodes (srun --pty bash)
        counts = []
    if str(sum(counts)) == env.get("SLURM_NTASKS"):  # without that it counts CPUs
        return counts
    return [int(env.get("SLURM_NTASKS_PER_NODE") or env.get("SLURM_GPUS_ON_NODE") or 1)] * nodes


def _of_slurm(args: argparse.Namespace, wanted: int | None) -> tuple[tuple[Host, ...], bool]:
    """Without a hostfile: the allocation's hosts, or as many as Slurm shall find. The flag: their names are known."""
    names = places.expand(os.environ.get("SLURM_JOB_NODELIST", ""))
    nodes = len(names) or args.num_nodes or 1
    ranks = [wanted] * nodes if wanted else _slurm_tasks(nodes)
    if not names:
        if args.include or args.exclude:
            raise ArgumentError(
                "--include and --exclude need to know the hosts: add --hostfile, or run inside a Slurm allocation"
                " (salloc, sbatch)"
            )
        return tuple(Host(f"node {i}", tuple(range(n))) for i, n in enumerate(ranks)), False
    pool = select({name: tuple(range(n)) for name, n in zip(names, ranks)}, args.include, args.exclude)
    return (
        tuple(Host(name, slots) for name, slots in trim(pool, args.num_nodes, None, "the Slurm allocation").items()),
        True,
    )


_OURS = ("--num_gpus", "--num-gpus", "--num_nodes", "--num-nodes", "--hostfile", "--as-deepspeed", "--as_deepspeed")


def _behind_the_program(args: argparse.Namespace) -> list[str]:
    """Options of this command that the script gets: it may want them, more likely the order is wrong."""
    given = [a.split("=", 1)[0] for a in args.arguments]
    return [
        f"{name} stands behind {args.program} and goes to it; an option of deepc run stands before it"
        for name in _OURS
        if name in given
    ]


# ---- what the options mean together ----------------------------------------------------------------------------------
def _kind(args: argparse.Namespace) -> str:
    if args.module and args.no_python:
        raise ArgumentError("--module and --no_python can't be given together")
    kind = "module" if args.module else "exec" if args.no_python else "script"
    if kind == "script" and not Path(args.program).is_file():
        what = (
            f"{args.program!r} is a folder: name the script in it"
            if Path(args.program).is_dir()
            else f"there is no script {args.program!r}"
        )
        raise ArgumentError(f"{what} (looked in {os.getcwd()})")
    if args.as_deepspeed and kind == "exec":
        raise UnsupportedError(
            "--as-deepspeed with --no_python: an executable's imports can't be changed from outside. Give the Python "
            "script itself, or write `import deepc.compat.deepspeed` at its top"
        )
    return kind


def _check(args: argparse.Namespace) -> None:
    if args.num_gpus and args.num_ranks and args.num_gpus != args.num_ranks:
        raise ArgumentError(
            f"--num_gpus {args.num_gpus} and --num_ranks {args.num_ranks} say the same thing differently: give one"
        )
    if args.autotuning:
        raise UnsupportedError(
            "--autotuning is a command of its own here: deepc tune ds_config.json PROGRAM ... (docs/tuning.md)"
        )
    if args.no_ssh and args.node_rank is None:
        raise ArgumentError("--no_ssh needs --node_rank I: which host of the hostfile this is, from 0")
    if args.node_rank is not None and not args.no_ssh:
        raise ArgumentError(
            "--node_rank has a meaning only with --no_ssh; without it deepc run starts the ranks of all hosts"
        )
    try:
        shlex.split(args.launcher_args)
    except ValueError as exc:
        raise ArgumentError(f"--launcher_args {args.launcher_args!r}: {exc}") from None


def _bind(args: argparse.Namespace) -> str:
    """ "", "all" or the list of cores."""
    if not args.bind_core_list:
        return "all" if args.bind_cores_to_rank else ""
    try:
        bind.parse_cores(args.bind_core_list)
    except ValueError as exc:
        raise ArgumentError(f"--bind_core_list {args.bind_core_list!r}: {exc}") from None
    return str(args.bind_core_list)


def threads(ranks: int, its_cores: int, bound: str, notes: list[str] | None = None) -> dict[str, str]:
    """OMP_NUM_THREADS for `ranks` on a host where they may use `its_cores`, or nothing if the user has set it. A bound
    rank has a thread a core in any case."""
    given = os.environ.get("OMP_NUM_THREADS")
    if not bound:
        # else N ranks of as many threads as cores fight for them
        return {} if given else {"OMP_NUM_THREADS": str(max(1, its_cores // ranks))}
    if given and notes is not None:
        notes.append(f"OMP_NUM_THREADS={given} gives way to --bind_cores_to_rank: one thread for each core of a rank")
    return {}


def _check_binding(host: Host, bound: str) -> dict[str, str]:
    """Of this machine: what rank.py will do, so that it is refused here. Returns OMP_NUM_THREADS."""
    try:
        return {"OMP_NUM_THREADS": str(len(bind.cores_of(0, host.ranks, bound, os.sched_getaffinity(0))))}
    except ValueError as exc:
        raise ArgumentError(f"--bind_cores_to_rank: {exc}") from None


def _local_env(args: argparse.Namespace, host: Host, gpus: int, bound: str, notes: list[str]) -> dict[str, str]:
    env = {}
    if args.cpu:
        env["CUDA_VISIBLE_DEVICES"] = ""
    elif gpus and host.slots != tuple(range(gpus)):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(i) for i in range(gpus)]
        env["CUDA_VISIBLE_DEVICES"] = ",".join(names[i] for i in host.slots)
    env.update(threads(host.ranks, cores(), bound, notes))
    if bound:
        env.update(_check_binding(host, bound))
    elif host.ranks > cores():
        notes.append(f"{host.ranks} ranks share {cores()} cores")
    return env


def _master(args: argparse.Namespace) -> tuple[str, int | None] | None:
    if args.no_ssh or args.master_addr or args.master_port:
        return args.master_addr or "", args.master_port
    return None


def plan(args: argparse.Namespace) -> Launch:
    """What `args` (of add_arguments) asks for. Raises ArgumentError for what contradicts itself or is not there,
    UnsupportedError for what deepc lacks."""
    _check(args)
    kind, bound, wanted = _kind(args), _bind(args), args.num_gpus or args.num_ranks
    path = args.hostfile or (_DEFAULT_HOSTFILE if Path(_DEFAULT_HOSTFILE).is_file() else None)
    notes: list[str] = [] if args.hostfile or not path else [f"hosts from {path}"]
    notes += _behind_the_program(args)
    named = True
    if path:
        hosts = _of_hostfile(args, path, wanted)
    elif args.launcher == "slurm":
        hosts, named = _of_slurm(args, wanted)
    else:
        host, more = _on_this_machine(args, wanted, 0 if args.cpu else _cuda_devices())
        hosts, notes = (host,), notes + more
    launcher = args.launcher or "ssh"
    if launcher == "ssh" and len(hosts) == 1 and hosts[0].local and not args.force_multi:
        launcher = "local"
    if args.no_ssh and not 0 <= args.node_rank < len(hosts):
        raise ArgumentError(f"--node_rank {args.node_rank}: there are {len(hosts)} hosts, 0 to {len(hosts) - 1}")
    gpus = 0 if args.cpu or launcher != "local" else _cuda_devices()
    env = {"CUDA_VISIBLE_DEVICES": ""} if args.cpu else {}
    if launcher == "local" and args.venv_script:
        notes.append(
            f"--venv_script {args.venv_script} is for hosts that ssh reaches: this machine's ranks run in this"
            " environment"
        )
    if launcher == "local":
        if gpus and (wrong := [s for s in hosts[0].slots if s >= gpus]):
            raise ArgumentError(
                f"slot {wrong[0]} asked for, but there are only {gpus} GPUs on this machine: ask for fewer, or add"
                " --cpu"
            )
        env = _local_env(args, hosts[0], gpus, bound, notes)
    return Launch(
        hosts,
        kind,
        (args.program, *args.arguments),
        launcher,
        devices=hosts[0].slots if gpus else (),
        env=env,
        master=_master(args),
        node=args.node_rank,
        pass_local_rank=(args.pass_local_rank or args.as_deepspeed) and not args.no_local_rank,
        as_deepspeed=args.as_deepspeed,
        bind=bound,
        cpu=args.cpu,
        launcher_args=args.launcher_args,
        ssh_port=args.ssh_port,
        connect_s=args.connect_timeout,
        venv_script=args.venv_script,
        logs=args.enable_each_rank_log if args.enable_each_rank_log != "None" else None,
        pid_file=args.save_pid,
        quiet=args.quiet or args.log_level in ("error", "critical"),
        named=named,
        notes=tuple(notes),
    )
