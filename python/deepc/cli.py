"""The command `deepc` (also `python -m deepc`). One subcommand is one row of _COMMANDS, whose module is imported when
the subcommand is used. What each does, with examples and exit codes: docs/cli.md. Help, versions and what is wrong in a
command line come without torch, and so does what asks it nothing (deepc.complete)."""

from __future__ import annotations

import argparse
import difflib
import importlib
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

from . import complete
from .core.telemetry import speak
from .errors import DeepcError


@dataclass(frozen=True)
class Command:
    """One subcommand. arguments, run: "module:function" of this package; run takes the parsed arguments and returns the
    exit code. needs_torch: False where what it does, or a part of that, does without: run calls deepc.complete itself
    before what does not. only_shows: whether the exit code says nothing of the answer, so that a reader may leave
    before its end."""

    help: str
    description: str
    examples: tuple[str, ...]
    exit_code: str
    arguments: str
    run: str
    needs_torch: bool = True
    only_shows: Callable[[argparse.Namespace], bool] = lambda _: False


_TWO = "2 the question can't be answered (a wrong argument, a file that is not there)"
_COMMANDS: dict[str, Command] = {
    "run": Command(
        "start a training script on several ranks, here and on other hosts",
        "Starts PROGRAM on every GPU, or on N ranks of the CPU, of this machine or of the hosts of a hostfile, and"
        " waits. A rank that dies ends the run: its traceback is shown last, the exit code is its own, and no process"
        " is left. The script finds RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment, as"
        " under torchrun.",
        (
            "deepc run --num_gpus 2 train.py --deepspeed_config ds_config.json",
            "deepc run --num_ranks 2 -m package.train --epochs 3",
            "deepc run --hostfile hosts --bind_cores_to_rank train.py",
            "deepc run --as-deepspeed train.py --deepspeed ds_config.json",
        ),
        "that of the first rank that failed; 0 if none did; 2 a wrong argument",
        "launch:add_arguments",
        "cli:_run",
    ),
    "plan": Command(
        "the fastest layout on a cluster; which part of the model states lies where; pipeline schedules",
        "The plan that deepc.initialize makes for these ranks, without allocating anything. With --cluster: the layout"
        " that is predicted fastest there (data, tensor, pipeline, sequence, expert parallelism, ZeRO stage, offload,"
        " micro-batch, schedule, recomputation), its time and memory. With --schedule: what each rank of a pipeline"
        " computes when, how long it waits and how many micro-batches it holds.",
        (
            "deepc plan --config ds_config.json --model train.py:make_model --ranks 2",
            "deepc plan --cluster cluster.yaml --model gpt3-175b --batch 1536 --write ds_config.json --html plan.html",
            "deepc plan --schedule 1f1b --stages 4 --micro-batches 8 --svg 1f1b.svg",
        ),
        f"0; {_TWO}",
        "arguments.estimate:plan_arguments",
        "parallel.simulate.onpaper:run_plan",
        only_shows=lambda args: not (args.svg or args.write or args.html),
    ),
    "tune": Command(
        "find the fastest configuration of a script by short trials",
        "Runs PROGRAM for a few steps with changed micro-batch, accumulation, ZeRO stage, pipeline schedule and fusion,"
        " the total batch as it is, and writes the fastest configuration. Goes on where it was interrupted; a trial"
        " that runs out of memory or dies is a line in the table.",
        (
            "deepc tune ds_config.json train.py --deepspeed_config ds_config.json",
            "deepc tune --num_ranks 2 --fuse --trials 12 ds_config.json train.py --config ds_config.json",
        ),
        f"0; 1 no trial trained; {_TWO}",
        "launch.tune:add_arguments",
        "launch.tune:run",
    ),
    "simulate": Command(
        "train a tiny model on many virtual ranks in one process, with real numbers",
        "Every rank of pp x dp x sp x tp has its own shards, and with --experts those of each block that are its among"
        " ep ranks; it follows its pipeline's schedule and exchanges what real ranks would. The losses are"
        " compared with those of one process. Also counts what each axis sends.",
        (
            "deepc simulate --dp 16 --tp 8 --pp 8 --stage 3",
            "deepc simulate --pp 4 --schedule zb-v --layers 8 --micro-batches 8",
            "deepc simulate --dp 16 --sp 2 --tp 4 --pp 8 --ep 8 --experts 8 --top 2 --stage 3 --micro-batches 4",
        ),
        f"0; 1 losses differ by more than 1e-6 of themselves; {_TWO}",
        "arguments.simulate:add_arguments",
        "parallel.simulate.run:command",
    ),
    "estimate": Command(
        "predict the peak memory of a training",
        "Model states by arithmetic, activations by a dry run of the model without values: per tier, per rank and per"
        " node.",
        (
            (
                "deepc estimate --config ds_config.json --model train.py:make_model --batch 8x1024:int64 8x1024:int64"
                " --ranks 2"
            ),
            "deepc estimate --params 7e9 --largest-layer 131072000 --ranks 8",
        ),
        f"0 it fits here, 1 it does not; {_TWO}",
        "arguments.estimate:add_arguments",
        "parallel.simulate.onpaper:run_estimate",
    ),
    "config": Command(
        "explain a ds_config.json, list all keys",
        "What a configuration means here, key by key, and what is wrong in it.",
        (
            "deepc config check ds_config.json --ranks 2",
            "deepc config keys zero_optimization",
            "deepc config schema -o deepc.schema.json",
        ),
        f"0; 1 the configuration is wrong; {_TWO}",
        "config.explain:add_arguments",
        "config.explain:run",
        needs_torch=False,
        only_shows=lambda args: args.config_command != "check",
    ),
    "report": Command(
        "make a page of a run, or compare several",
        "One HTML file that loads nothing: curves, time of a step, timeline, memory against its plan, communication,"
        " what happened, and what stands out. Of several runs: one page that compares them. A run writes its folder"
        ' when its configuration has {"deepc": {"run_dir": "runs/name"}}, or under DEEPC_RUN_DIR=runs/name.',
        ("deepc report runs/name", "deepc report runs/a runs/b -o compare.html", "deepc report runs/name --open"),
        f"0; 1 the page can't be written; {_TWO}",
        "observe.report:add_arguments",
        "observe.report:run",
        needs_torch=False,
    ),
    "ckpt": Command(
        "look into checkpoints, verify, compare, export them; import DeepSpeed's",
        "What is in a checkpoint, whether every byte is as it was written, what differs between two, and its weights as"
        " Hugging Face safetensors.",
        (
            "deepc ckpt ls checkpoints",
            "deepc ckpt verify checkpoints --all",
            "deepc ckpt export checkpoints model-folder --dtype bf16",
            "deepc ckpt diff a/step100 b/step100",
        ),
        f"0; 1 damaged (verify) or different (diff); {_TWO}",
        "arguments.ckpt:add_arguments",
        "checkpoint.tool:run",
        only_shows=lambda args: args.ckpt_command == "info",
    ),
    "bench": Command(
        "measure this machine in 20 seconds",
        "Matrix products, memory, the optimizer step against memory, collectives between ranks, disk. Medians; other"
        " processes make them worse.",
        (
            "deepc bench",
            "deepc bench --only collectives --ranks 4",
            "deepc bench --only disk --folder /data --json",
            "deepc bench io --folder /data",
            "deepc bench onebit --nodes 4 --rate 1gbit",
        ),
        f"0; 1 a part could not be measured; {_TWO}",
        "observe.diagnose.bench:add_arguments",
        "observe.diagnose.bench:run",
    ),
    "doctor": Command(
        "check this machine, or tell where the ranks of a run hang",
        "Without an argument: build, machine and limits, and a self-test of two ranks, with the fix for each thing that"
        " is wrong. With the pid of one rank, --all, or dumps: where every rank of the run is, which one is behind, and"
        " which call differs.",
        ("deepc doctor", "deepc doctor --no-test --json", "deepc doctor 12345", "deepc doctor --all"),
        f"0 all is well, 1 something is wrong; {_TWO}",
        "observe.diagnose.doctor:add_arguments",
        "cli:_doctor",
        needs_torch=False,
    ),
}

_GUIDE = """deepc trains PyTorch models that one process can't hold or would take too long for.

  In a script:   import deepc
                 engine, optimizer, loader, scheduler = deepc.initialize(model=model, config="ds_config.json", training_data=data)
  On two ranks:  deepc run --num_gpus 2 train.py

{commands}

  deepc COMMAND --help    options, examples, exit codes
  deepc --version         versions of deepc, its C core, torch and Python
  New here?               deepc doctor   checks this machine in half a minute"""  # noqa: E501


def _resolve(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(f".{module}", __package__), function)
    return found


def _run(args: argparse.Namespace) -> int:
    from .launch import plan, run

    return run(plan(args))


def _doctor(args: argparse.Namespace) -> int:
    from .observe.diagnose import doctor

    if not (args.targets or args.all):  # this machine; a run's records are read without torch
        complete()
    return doctor.run(args)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    from .core.lib import C

    core = C.dc_version().decode()
    try:
        package = version("deepc-torch")
    except PackageNotFoundError:  # imported from a source tree
        package = core
    try:
        below = version("torch")
    except PackageNotFoundError:  # torch without its metadata says it itself
        import torch

        below = torch.__version__
    return f"deepc {package} (C core {core}, torch {below}, Python {sys.version.split()[0]})"


class _ShowVersion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(_version())
        parser.exit(0)


class _Parser(argparse.ArgumentParser):
    """Its errors name the nearest spelling and where the help is."""

    def error(self, message: str) -> NoReturn:
        known = [o for a in self._actions for o in a.option_strings]
        known += [c for a in self._actions if isinstance(a, argparse._SubParsersAction) for c in a.choices]
        wrong = re.match(r"(?:argument COMMAND: )?invalid choice: '([^']*)'", message) or re.match(
            r"unrecognized arguments: (\S+)", message
        )
        near = difflib.get_close_matches(wrong[1].split("=")[0], known, 1, 0.5) if wrong else []
        hint = f" Did you mean {near[0]}?" if near else ""
        message = message.removesuffix(", ...").rstrip(".")  # argparse lists `PROGRAM ...` as two
        self.exit(2, f"{self.prog}: error: {message}.{hint}\n{self.prog} --help shows options and examples.\n")


def epilog(command: Command) -> str:
    """The end of a subcommand's help."""
    return "examples:\n" + "".join(f"  {e}\n" for e in command.examples) + f"\nexit code: {command.exit_code}"


def _wrap(text: str) -> str:
    import textwrap

    return textwrap.fill(text, 100)


def make_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser of all subcommands; `only`: just that one's arguments are added (their modules are not free to
    import)."""
    parser = _Parser(
        prog="deepc",
        description="Trains PyTorch models that one process can't hold or would take too long for.",
        epilog="deepc COMMAND --help shows examples and exit codes.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action=_ShowVersion, nargs=0, help="versions of deepc, its C core, torch and Python"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, c in _COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=c.help,
            description=_wrap(c.description),
            epilog=epilog(c),
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if only in (None, name):
            _resolve(c.arguments)(sub)
    return parser


def _leaf(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.ArgumentParser:
    """The parser of the innermost subcommand that was given: its options are the ones to suggest."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and (chosen := getattr(args, action.dest, None)) is not None:
            return _leaf(action.choices[chosen], args)
    return parser


def guide() -> str:
    """What `deepc` alone shows."""
    return _GUIDE.format(commands="\n".join(f"  deepc {n:<10}{c.help}" for n, c in _COMMANDS.items()))


@contextmanager
def _interrupts_last() -> Iterator[None]:
    """A ^C inside is raised at the end too: what torch imports catches any exception here and there, and the command
    went on."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    came = False

    def note(sig: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        signal.default_int_handler(sig, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 2 for what the command line asks in vain, 130 after ^C, 141 where the reader left
    before the answer was known, else the subcommand's."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _main(words)
    except KeyboardInterrupt:
        speak.tell(f"{' '.join(['deepc', *words[:1]])}: interrupted")
        speak.drop_unread()
        return 128 + signal.SIGINT


def _main(words: list[str]) -> int:
    if not words:
        print(guide())
        return 0
    parser = make_parser(words[0] if words[0] in _COMMANDS else "")
    args, unknown = parser.parse_known_args(words)
    if unknown:
        _leaf(parser, args).error(f"unrecognized arguments: {' '.join(unknown)}")
    if args.command is None:
        print(guide())
        return 0
    command = _COMMANDS[args.command]
    try:
        if command.needs_torch:
            with _interrupts_last():
                complete()
        code = int(_resolve(command.run)(args))
    except DeepcError as exc:
        speak.tell(f"deepc {args.command}: error: {exc}")
        code = 2
    except BrokenPipeError:  # the reader (head, less) has seen enough; a check is not passed by that
        code = 0 if command.only_shows(args) else 128 + signal.SIGPIPE
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, FileExistsError, PermissionError) as exc:
        if exc.filename is None:  # of no file that was named
            raise
        speak.tell(f"deepc {args.command}: error: {exc.filename}: {exc.strerror}")
        code = 2
    speak.drop_unread()
    return code


if __name__ == "__main__":
    sys.exit(main())
