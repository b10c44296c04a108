"""The command `deepc` (also `python -m deepc`). One subcommand is one row of _COMMANDS; each imports what it needs when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from .errors import ArgumentError, CommError, ConfigError, UnsupportedError


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    import torch

    from ._lib import C

    core = C.dc_version().decode()
    try:
        package = version("deepc-torch")
    except PackageNotFoundError:  # imported from a source tree
        package = core
    return f"deepc {package} (C core {core}, torch {torch.__version__}, Python {sys.version.split()[0]})"


class _ShowVersion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(_version())
        parser.exit(0)


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    from .launch import add_arguments

    add_arguments(parser)


def _run(args: argparse.Namespace) -> int:
    from .launch import plan, run

    return run(plan(args))


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    from .doctor import add_arguments

    add_arguments(parser)


def _doctor(args: argparse.Namespace) -> int:
    from .doctor import run

    return run(args)


def _estimate_arguments(parser: argparse.ArgumentParser) -> None:
    from .estimate import add_arguments

    add_arguments(parser)


def _estimate(args: argparse.Namespace) -> int:
    from .estimate import run_estimate

    return run_estimate(args)


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    from .estimate import plan_arguments

    plan_arguments(parser)


def _plan(args: argparse.Namespace) -> int:
    from .estimate import run_plan

    return run_plan(args)


# name: (help, description, adds its arguments, runs and returns the exit code)
_COMMANDS: dict[str, tuple[str, str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]] = {
    "run": ("start a training script on several ranks of this machine",
            "Starts PROGRAM on every GPU, or on N ranks of the CPU, and waits. A rank that dies ends the run: its traceback is shown last, the "
            "exit code is its own, and no process is left. The script finds RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its "
            "environment, as under torchrun. Example: deepc run --num_gpus 2 train.py --deepspeed_config ds_config.json",
            _run_arguments, _run),
    "doctor": ("check this machine, or tell where the ranks of a run hang",
               "Without an argument: build, machine and limits, and a self-test of two ranks, with the fix for each thing that is wrong. With the pid of one "
               "rank, --all, or dumps: where every rank of the run is, which one is behind, and which call differs. Exit code: 0 all is well, 1 something is "
               "wrong, 2 the question can't be answered.",
               _doctor_arguments, _doctor),
    "estimate": ("predict the peak memory of a training",
                 "Model states by arithmetic, activations by a dry run of the model without values: per tier, per rank and per node. Exit code 1: it does not fit "
                 "here. Example: deepc estimate --config ds_config.json --model train:make_model --batch 8x1024:int64 8x1024:int64 --ranks 2",
                 _estimate_arguments, _estimate),
    "plan": ("print the plan: which part of the model states lies where",
             "The plan that deepc.initialize makes for these ranks, without allocating anything. Example: deepc plan --config ds_config.json --model "
             "train:make_model --ranks 2",
             _plan_arguments, _plan),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="deepc", description="Trains PyTorch models that one process can't hold or would take too long for.")
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="versions of deepc, its C core, torch and Python")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (short, long, add, _) in _COMMANDS.items():
        add(commands.add_parser(name, help=short, description=long, allow_abbrev=False))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 2 for what the command line asks in vain, else the subcommand's."""
    args = _parser().parse_args(argv)
    try:
        return _COMMANDS[args.command][3](args)
    except (ArgumentError, CommError, ConfigError, UnsupportedError) as exc:
        print(f"deepc {args.command}: error: {exc}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
