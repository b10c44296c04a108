"""Of `deepc estimate` and `deepc plan`."""

from __future__ import annotations

import argparse

from ..plan.predict import timeline
from ..plan.predict.search import command as search


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `deepc estimate`, which plan.predict.estimate.command runs."""
    _plan_arguments(parser)
    parser.add_argument(
        "--batch",
        nargs="+",
        default=[],
        metavar="[NAME=]SHAPE:DTYPE",
        help=(
            "one rank's micro-batch, a tensor each, in the order of forward's arguments or by name: 8x1024:int64 or"
            " input_ids=8x1024:int64"
        ),
    )
    parser.add_argument(
        "--loss", metavar="MODULE:FUNCTION", help="loss_fn(output, batch), where the model's output is not the loss"
    )
    parser.add_argument("--steps", type=_count, default=3, metavar="N", help="steps of the dry run (3)")
    parser.add_argument("--suggest", action="store_true", help="also what would take less, with its figures")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--params", type=float, metavar="N", help="instead of --model: number of parameters (model states only)"
    )
    parser.add_argument(
        "--largest-layer", type=float, default=0, metavar="N", help="with --params: parameters of the largest layer"
    )


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `deepc plan`, which it runs too."""
    _plan_arguments(parser)
    timeline.add_arguments(parser)
    search.add_arguments(parser)


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="the DeepSpeed JSON")
    parser.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="a function without arguments that makes the model; MODULE: package.module, or train.py",
    )
    parser.add_argument("--ranks", type=_count, default=1, metavar="N", help="ranks of a node (1)")
    parser.add_argument("--nodes", type=_count, default=1, metavar="N", help="nodes (1)")


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
