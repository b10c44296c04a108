"""The command line of `deepc run`, and the plan that follows from it. Nothing here starts a process.

Takes DeepSpeed's launcher options as far as they mean something on one machine; what asks for several hosts is refused."""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ArgumentError, UnsupportedError

_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Launch:
    """What will be started: `ranks` processes running `command` (without the interpreter), each with `env` on top of this
    process's own environment. `devices`: the CUDA devices by index, empty on CPU. `notes`: what the user should read first."""

    ranks: int
    kind: str  # script | module | exec
    command: tuple[str, ...]
    devices: tuple[int, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    master: tuple[str, int] | None = None
    pass_local_rank: bool = False
    notes: tuple[str, ...] = ()

    def describe(self) -> str:
        place = f"CUDA devices {','.join(map(str, self.devices))}" if self.devices else "CPU"
        shown = " ".join(f"{k}={v}" for k, v in sorted(self.env.items()))
        lines = [f"{self.ranks} rank{'s' if self.ranks > 1 else ''} on {place}; sets {shown or 'nothing'}", *self.notes]
        return "\n".join("deepc run: " + line for line in lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    ranks = parser.add_argument_group("how many ranks")
    ranks.add_argument("--num_gpus", "--num-gpus", type=_positive, metavar="N",
                       help="ranks, one per GPU; on a machine without GPUs N ranks on the CPU. Default: all GPUs, or 1 rank")
    ranks.add_argument("--num_ranks", "--num-ranks", "--nproc", "--nproc_per_node", "--nproc-per-node", type=_positive, metavar="N",
                       help="the same under the name that fits a CPU")
    ranks.add_argument("--cpu", action="store_true", help="stay on the CPU even where there are GPUs")
    ranks.add_argument("--include", metavar="localhost:0,1", help="only these GPUs of this machine")
    ranks.add_argument("--exclude", metavar="localhost:0", help="all GPUs of this machine but these")
    hosts = parser.add_argument_group("where")
    hosts.add_argument("--num_nodes", "--num-nodes", "--nnodes", type=_positive, default=1, metavar="1", help="machines; only 1 is supported")
    hosts.add_argument("--hostfile", "-H", metavar="FILE", help="DeepSpeed hostfile ('host slots=N'); only one that names this machine alone")
    hosts.add_argument("--master_addr", "--master-addr", metavar="ADDRESS", help="address of the rendezvous; default: a free port of this machine")
    hosts.add_argument("--master_port", "--master-port", type=_positive, metavar="PORT")
    what = parser.add_argument_group("what")
    what.add_argument("-m", "--module", action="store_true", help="the program is a module name, as in python -m")
    what.add_argument("--no_python", "--no-python", action="store_true", help="the program is any executable, not a Python script")
    what.add_argument("--pass_local_rank", "--pass-local-rank", action="store_true",
                      help="append --local_rank=N to the program's arguments (LOCAL_RANK is in the environment in any case)")
    what.add_argument("--no_local_rank", "--no-local-rank", action="store_true", help=argparse.SUPPRESS)  # DeepSpeed's; already so here
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


def _cuda_devices() -> int:
    import torch

    return torch.cuda.device_count()


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _check_hosts(args: argparse.Namespace) -> int | None:
    """Refuses what needs several machines. Returns the slots that a hostfile gives this one."""
    if args.num_nodes > 1:
        raise UnsupportedError(f"--num_nodes {args.num_nodes}: deepc run starts ranks on this machine only. For several, start "
                               "`torchrun --nnodes N ...` on each of them: scripts that use deepc run under it unchanged")
    if not args.hostfile:
        return None
    try:
        text = Path(args.hostfile).read_text()
    except OSError as exc:
        raise ArgumentError(f"--hostfile {args.hostfile}: {exc.strerror or exc}") from exc
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    hosts = [line for line in lines if line]
    if len(hosts) != 1:
        raise UnsupportedError(f"--hostfile {args.hostfile} names {len(hosts)} hosts: deepc run starts ranks on this machine only. Start "
                               "`torchrun --nnodes N ...` on each of them: scripts that use deepc run under it unchanged")
    match = re.fullmatch(r"(\S+)\s+slots\s*=\s*([1-9]\d*)", hosts[0])
    if not match:
        raise ArgumentError(f"--hostfile {args.hostfile}: {hosts[0]!r} is not of the form 'host slots=N'")
    _check_this_machine("--hostfile", match[1])
    return int(match[2])


def _check_this_machine(option: str, host: str) -> None:
    names = _THIS_MACHINE + (os.uname().nodename, os.uname().nodename.split(".")[0])
    if host not in names:
        raise UnsupportedError(f"{option} names the host {host!r}, which is not this machine ({os.uname().nodename}): deepc run starts no "
                               "ranks elsewhere. Write localhost, or start `torchrun --nnodes N ...` on each host")


def _slots(option: str, text: str, available: int) -> list[int]:
    """DeepSpeed's filter 'host:0,1[@host:...]' for this machine -> device indices in the order given."""
    if "@" in text:
        raise UnsupportedError(f"{option} {text!r} names several hosts: deepc run starts ranks on this machine only")
    host, _, numbers = text.partition(":")
    _check_this_machine(option, host)
    if not numbers:
        return list(range(available))
    try:
        slots = [int(n) for n in numbers.split(",")]
    except ValueError:
        raise ArgumentError(f"{option} {text!r} is not of the form localhost:0,1") from None
    for slot in slots:
        if not 0 <= slot < available:
            raise ArgumentError(f"{option} {text!r}: there is no slot {slot}; this machine has {available} (0 to {available - 1})")
    if len(set(slots)) != len(slots):
        raise ArgumentError(f"{option} {text!r} names a slot twice")
    return slots


def _choose(args: argparse.Namespace, wanted: int | None, gpus: int) -> tuple[int, tuple[int, ...], list[str]]:
    """Ranks, CUDA devices, notes."""
    if args.include and args.exclude:
        raise ArgumentError("--include and --exclude can't be given together")
    slots = gpus or wanted or cores()
    chosen = list(range(slots))
    if args.include:
        chosen = _slots("--include", args.include, slots)
    elif args.exclude:
        out = _slots("--exclude", args.exclude, slots)
        chosen = [s for s in chosen if s not in out]
        if not chosen:
            raise ArgumentError(f"--exclude {args.exclude!r} leaves nothing to run on")
    filtered = bool(args.include or args.exclude)
    if gpus:
        if wanted and wanted > len(chosen):
            raise ArgumentError(f"{wanted} ranks asked for but there {'is' if len(chosen) == 1 else 'are'} only {len(chosen)} GPU"
                                f"{'s' if len(chosen) != 1 else ''} to run on: ask for fewer, or add --cpu")
        chosen = chosen[:wanted] if wanted else chosen
        return len(chosen), tuple(chosen), []
    ranks = len(chosen) if filtered else wanted or 1
    notes = []
    if args.num_gpus and not args.cpu:
        notes.append(f"no GPU on this machine: --num_gpus {args.num_gpus} means {ranks} rank{'s' if ranks > 1 else ''} on the CPU")
    if ranks > cores():
        notes.append(f"{ranks} ranks share {cores()} cores")
    return ranks, (), notes


def plan(args: argparse.Namespace) -> Launch:
    """What `args` (of add_arguments) asks for on this machine. Raises UnsupportedError for several hosts, ArgumentError for what
    contradicts itself or is not there."""
    if args.num_gpus and args.num_ranks and args.num_gpus != args.num_ranks:
        raise ArgumentError(f"--num_gpus {args.num_gpus} and --num_ranks {args.num_ranks} say the same thing differently: give one")
    if args.module and args.no_python:
        raise ArgumentError("--module and --no_python can't be given together")
    kind = "module" if args.module else "exec" if args.no_python else "script"
    if kind == "script" and not Path(args.program).is_file():
        raise ArgumentError(f"there is no script {args.program!r} (looked in {os.getcwd()})")
    slots = _check_hosts(args)
    gpus = 0 if args.cpu else _cuda_devices()
    ranks, devices, notes = _choose(args, args.num_gpus or args.num_ranks or slots, gpus)
    env = {}
    if args.cpu:
        env["CUDA_VISIBLE_DEVICES"] = ""
    elif devices and devices != tuple(range(gpus)):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(i) for i in range(gpus)]
        env["CUDA_VISIBLE_DEVICES"] = ",".join(names[i] for i in devices)
    if "OMP_NUM_THREADS" not in os.environ:  # else N ranks of as many threads as cores fight for them
        env["OMP_NUM_THREADS"] = str(max(1, cores() // ranks))
    master = (args.master_addr or "127.0.0.1", args.master_port or 29500) if args.master_addr or args.master_port else None
    return Launch(ranks, kind, (args.program, *args.arguments), devices, env, master, args.pass_local_rank, tuple(notes))
