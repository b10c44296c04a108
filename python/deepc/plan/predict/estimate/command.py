"""`deepc estimate` and `deepc plan`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ....core import memory
from ....errors import ArgumentError
from .. import timeline
from ..search import command as search
from .ask import estimate, plan_text
from .counts import estimate_zero2_model_states_mem_needs_all_cold, estimate_zero3_model_states_mem_needs_all_cold
from .figures import changed

if TYPE_CHECKING:
    import argparse

    import torch

    from .case import Cutter, Divide


def run_estimate(args: argparse.Namespace, divide: Divide | None = None, cut: Cutter | None = None) -> int:
    """`deepc estimate`. Exit code 1: it does not fit here."""
    import json

    if args.params is not None:
        _refuse_beside("--params", args, ("model", "config", "batch", "loss"), "model states follow from it alone")
        if not 1 <= args.params < float("inf") or not 0 <= args.largest_layer <= args.params:
            raise ArgumentError(
                f"--params {args.params:g} --largest-layer {args.largest_layer:g}: parameters are counted from 1 on,"
                " and a layer has at most all of them"
            )
        estimate_zero2_model_states_mem_needs_all_cold(args.params, args.ranks, args.nodes, 1.0)
        estimate_zero3_model_states_mem_needs_all_cold(args.params, args.largest_layer, args.ranks, args.nodes, 1.0)
        return 0
    if not args.model or not args.config:
        raise ArgumentError(
            "give --model and --config, or --params. For example: deepc estimate --config ds_config.json --model"
            " train.py:make_model"
        )
    result = estimate(
        _named(args.model),
        args.config,
        _batch(args.batch),
        _named(args.loss) if args.loss else None,
        ranks_per_node=args.ranks,
        nodes=args.nodes,
        steps=args.steps,
        suggest=args.suggest,
        divide=divide,
        cut=cut,
    )
    result = changed(result, available=result.available if result.available is not None else memory.available())
    print(json.dumps(result.to_dict(), indent=2) if args.json else result)
    return 0 if result.fits else 1


def run_plan(args: argparse.Namespace, divide: Divide | None = None, cut: Cutter | None = None) -> int:
    """`deepc plan`."""
    if args.schedule:
        others = ("cluster", "config", "model", "ranks", "nodes")
        _refuse_beside("--schedule", args, others, "--stages and --micro-batches say of what it is")
        return timeline.run(args)
    if option := timeline.stray(args):
        raise ArgumentError(f"{option} is an option of --schedule; name a schedule, or leave it out")
    if args.cluster:
        what = "the file has the nodes and their ranks, and the search chooses the rest (--dp, --stage, ... fix it)"
        _refuse_beside("--cluster", args, ("config", "ranks", "nodes"), what)
        return search.run(args, _named)
    if option := search.stray(args):
        raise ArgumentError(f"{option} is an option of --cluster; give a cluster's description, or leave it out")
    if not args.model or not args.config:
        raise ArgumentError(
            "give --config and --model, or --cluster and --model, or --schedule. For example: deepc plan --config"
            " ds_config.json --model train.py:make_model"
        )
    print(
        plan_text(_named(args.model), args.config, ranks_per_node=args.ranks, nodes=args.nodes, divide=divide, cut=cut)
    )
    return 0


def _refuse_beside(option: str, args: argparse.Namespace, others: Sequence[str], why: str) -> None:
    """ArgumentError where one of `others` is given, which `option` does not look at."""
    for name in others:
        if (given := getattr(args, name)) and not (name in ("ranks", "nodes") and given == 1):
            raise ArgumentError(f"--{name} means nothing beside {option}: {why}; leave it out")


def _named(text: str) -> Any:
    """The object that "package.module:attribute" or "file.py:attribute" names. What lies beside it can be imported from
    then on, as from a script: a function may import when it is called."""
    import importlib

    where, _, what = text.partition(":")
    if not where or not what:
        raise ArgumentError(
            f"{text!r} is not MODULE:FUNCTION, such as train.py:make_model or package.module:make_model"
        )
    is_file = where.endswith(".py")
    if is_file and not os.path.isfile(where):
        raise ArgumentError(f"can't find {text!r}: there is no file {where} (looked in {os.getcwd()})")
    beside = os.path.dirname(os.path.abspath(where)) if is_file else os.getcwd()
    if beside not in sys.path:
        sys.path.insert(0, beside)
    try:
        found = _of_file(os.path.abspath(where)) if is_file else importlib.import_module(where)
        for part in what.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as exc:
        raise ArgumentError(f"can't find {text!r}: {exc}") from exc
    if not callable(found):
        raise ArgumentError(f"{text!r} is a value ({type(found).__name__}), and must be a function")
    return found


def _of_file(path: str) -> Any:
    """The module of a file, whatever it is called and whoever has a module of that name."""
    import importlib.util

    name = os.path.basename(path)[:-3]
    if (there := sys.modules.get(name)) is not None and getattr(there, "__file__", None) == path:
        return there
    name = name if name.isidentifier() and there is None else f"deepc file {path}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no module")
    found = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(found)
    except BaseException:
        del sys.modules[name]
        raise
    return found


def _batch(specs: Sequence[str]) -> Any:
    """Tensors without values: a dict if they have names, a tuple if not, None if there are none."""
    import torch

    named: dict[str, torch.Tensor] = {}
    plain: list[torch.Tensor] = []
    for spec in specs:
        name, _, rest = spec.rpartition("=")
        shape, _, dtype = rest.partition(":")
        try:
            sizes = [int(n) for n in shape.split("x")]
            kind = getattr(torch, dtype or "float32")
            if not isinstance(kind, torch.dtype) or min(sizes) < 1:
                raise ValueError
        except (ValueError, AttributeError):
            raise ArgumentError(
                f"--batch {spec!r} is not [NAME=]SHAPE:DTYPE, such as 8x1024:int64 (sizes of at least 1, a dtype of"
                " torch)"
            ) from None
        tensor = torch.empty(sizes, dtype=kind, device="meta")
        named.update({name: tensor}) if name else plain.append(tensor)
    if named and plain:
        raise ArgumentError("--batch mixes tensors with and without names")
    return named or tuple(plain) or None
