"""Of `deepc simulate`."""

from __future__ import annotations

import argparse

from ..plan.schedule import KINDS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """parallel.simulate.run runs what they say."""
    for name, default, what in (
        ("dp", 1, "data-parallel ranks"),
        ("tp", 1, "tensor-parallel ranks"),
        ("pp", 1, "ranks of a pipeline"),
        ("stage", 0, "ZeRO stage"),
        ("micro-batches", 8, "of a step, of each replica"),
        ("samples", 1, "of a micro-batch"),
        ("steps", 2, "to train"),
        ("layers", 8, "blocks of the model"),
        ("hidden", 64, "its width"),
        ("heads", 8, "its heads"),
        ("vocab", 64, "its words"),
        ("seq", 8, "tokens of a sample"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{what} ({default})")
    parser.add_argument("--schedule", choices=KINDS, default="1f1b", help="of the pipeline (1f1b)")
    parser.add_argument("--json", action="store_true", help="print JSON")
