"""`deepc plan --cluster`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....errors import ArgumentError
from ...schedule import KINDS
from ..timeline import write
from . import page, planner, told
from .cluster import Cluster
from .models import model_of
from .space import MOST, OFFLOADS, SIZES, Space

if TYPE_CHECKING:
    from collections.abc import Callable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `deepc plan --cluster`."""
    group = parser.add_argument_group(
        "the fastest layout on a cluster (docs/planner.md); --model: a name, sizes, or config.json"
    )
    group.add_argument("--cluster", metavar="FILE", help="a description of the nodes, YAML or JSON")
    group.add_argument("--batch", type=int, metavar="N", help="samples of a step, over all ranks (4 for each rank)")
    group.add_argument("--seq", type=int, metavar="N", help="tokens of a sample (as many as the model takes)")
    group.add_argument("--precision", choices=("fp32", "bf16", "fp16"), help="(bf16 on devices, fp32 on CPUs)")
    for name in SIZES:
        group.add_argument(f"--{name}", type=int, metavar="N", help=f"fix {name} (any)")
    group.add_argument("--stage", type=int, choices=(0, 1, 2, 3), help="fix the ZeRO stage (any)")
    group.add_argument("--offload", choices=OFFLOADS, help="fix where optimizer states go (any)")
    group.add_argument("--recompute", choices=("yes", "no"), help="compute blocks again in backward, or not (any)")
    group.add_argument("--pipeline-schedule", choices=KINDS, help="fix the pipeline's schedule (any)")
    group.add_argument("--even", action="store_true", help="equal numbers of micro-batches on unequal nodes too")
    group.add_argument("--keep", type=int, default=8, metavar="N", help="layouts to show (8)")
    group.add_argument("--write", metavar="FILE", help="write the ds_config.json")
    group.add_argument("--html", metavar="FILE", help="write a page: who holds what, links, timeline, memory")
    group.add_argument("--json", action="store_true", dest="as_json", help="print JSON")


def stray(args: argparse.Namespace) -> str | None:
    """An option that was given and means nothing without --cluster."""
    given = {"--" + n: getattr(args, n) for n in ("batch", "seq", "precision", *SIZES, "stage", "offload", "recompute")}
    given |= {"--pipeline-schedule": args.pipeline_schedule, "--even": args.even, "--write": args.write}
    given |= {"--html": args.html, "--json": args.as_json}
    return next((name for name, value in given.items() if value is not None and value is not False), None)


def space_of(args: argparse.Namespace) -> Space:
    """ArgumentError for a size that is none."""
    free = Space()
    for name in SIZES:
        size = getattr(args, name)
        if size is not None and not 1 <= size <= MOST:
            raise ArgumentError(
                f"--{name} {size}: must be a whole number from 1 to {MOST}; leave --{name} out to have it chosen"
            )
    sizes: dict[str, Any] = {n: getattr(args, n) or 0 for n in SIZES}
    return Space(
        **sizes,
        stages=free.stages if args.stage is None else (args.stage,),
        offloads=free.offloads if args.offload is None else (args.offload,),
        recomputes=free.recomputes if args.recompute is None else (args.recompute == "yes",),
        schedules=free.schedules if args.pipeline_schedule is None else (args.pipeline_schedule,),
        uneven=not args.even,
    )


def run(args: argparse.Namespace, named: Callable[[str], Any]) -> int:
    """named: finds what "train.py:make_model" names."""
    if not args.model:
        raise ArgumentError(
            "--cluster needs --model: a name (gpt3-175b), sizes, or the path of a transformers config.json"
        )
    for name in ("keep", "batch", "seq"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ArgumentError(f"--{name} {value}: must be a whole number of at least 1")
    space = space_of(args)
    case = planner.case_of(Cluster.load(args.cluster), _model(args, named), args.batch, args.precision)
    found = planner.search(case, space, args.keep)
    best = planner.require_fit(found)
    config, notes = told.to_config(best)
    if args.write:
        write("--write", args.write, json.dumps(config, indent=2) + "\n")
    if args.html:
        write("--html", args.html, page.html(found))
    if args.as_json:
        print(
            json.dumps(
                {
                    **planner.to_dict(best),
                    "priced": found.visited,
                    "config": config,
                    "notes": notes,
                    "runners_up": [{"layout": asdict(q.layout), "step": q.cost.step} for q in found.best[1:]],
                },
                indent=2,
            )
        )
    else:
        print(told.text(found))
    return 0


def _model(args: argparse.Namespace, named: Callable[[str], Any]) -> Any:
    text: str = args.model
    where, _, what = text.partition(":")
    if not (what and (where.endswith(".py") or "=" not in text)) or Path(text).exists():
        return model_of(text, args.seq)
    made = named(text)()
    config = getattr(made, "config", made)
    if not hasattr(config, "to_dict") and not isinstance(config, dict):
        raise ArgumentError(
            f"--model {text}: {type(made).__name__} has no transformers config to take sizes from; give them:"
            " layers=12,hidden=768,heads=12,vocab=50257,seq=1024"
        )
    return model_of(config, args.seq)
