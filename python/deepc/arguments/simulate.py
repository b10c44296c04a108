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
        ("sp", 1, "sequence-parallel ranks"),
        ("ep", 1, "ranks over which a block's experts are spread, of dp x sp"),
        ("stage", 0, "ZeRO stage"),
        ("micro-batches", 8, "of a step, of each replica"),
        ("samples", 1, "of a micro-batch"),
        ("steps", 2, "to train"),
        ("layers", 8, "blocks of the model"),
        ("hidden", 64, "its width"),
        ("heads", 8, "its heads"),
        ("vocab", 64, "its words"),
        ("seq", 8, "tokens of a sample"),
        ("experts", 0, "of each block; 0: none"),
        ("top", 1, "experts of a token, 1 or 2"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{what} ({default})")
    parser.add_argument(
        "--capacity", type=float, default=1.25, metavar="X", help="places of an expert, in its share of tokens (1.25)"
    )
    parser.add_argument("--schedule", choices=KINDS, default="1f1b", help="of the pipeline (1f1b)")
    parser.add_argument("--json", action="store_true", help="print JSON")
