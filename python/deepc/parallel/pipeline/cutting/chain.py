"""A model as a chain of blocks, seen by running it once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ....errors import ArgumentError, UnsupportedError
from ..deferred import in_checkpoint
from . import inside
from .calls import IN_CHECKPOINT, evaluating, every_tensor, first_tensor, hidden_of


class Unit(NamedTuple):
    """What a stage has all of or nothing: block number `block`, or a half of it (0 or 1; None: the whole)."""

    block: int
    half: int | None = None


class Chain(NamedTuple):
    """What a trace has found. name: of the list of blocks. blocks: its modules. before: the modules with parameters of
    their own that run before the first block; the others run after the last. pairs: whether a block returns a tuple,
    whose first element is what it hands on. halves: of the blocks that can be cut inside, by their numbers."""

    name: str
    blocks: list[torch.nn.Module]
    before: list[torch.nn.Module]
    after: list[torch.nn.Module]
    pairs: list[tuple[Any, ...] | None]
    halves: dict[int, inside.Halves]

    def units(self) -> list[Unit]:
        """The blocks, in halves where they can be cut inside."""
        return [
            unit
            for i in range(len(self.blocks))
            for unit in ((Unit(i, 0), Unit(i, 1)) if i in self.halves else (Unit(i),))
        ]

    def modules(self, unit: Unit) -> list[torch.nn.Module]:
        """Those of a unit, with all inside of them."""
        block = self.blocks[unit.block]
        if unit.half is None:
            return list(block.modules())
        first = [m for name in self.halves[unit.block].first for m in block.get_submodule(name).modules()]
        known = {id(m) for m in first}
        return first if unit.half == 0 else [m for m in block.modules() if id(m) not in known]

    def parameters(self, unit: Unit) -> list[torch.nn.Parameter]:
        return [p for m in self.modules(unit) for p in m._parameters.values() if p is not None]


def trace(model: torch.nn.Module, run: Callable[[], Any]) -> tuple[Chain, list[torch.Tensor]]:
    """Runs the model once, for evaluation. Returns also the tensors that it returned. ArgumentError if it has no list
    of blocks, each of which gets what the one before returned, with all other parameters used before the first or after
    the last."""
    name, blocks = _longest_list(model)
    within = {id(m) for block in blocks for m in block.modules()}
    alone = [m for m in model.modules() if id(m) not in within and any(p is not None for p in m._parameters.values())]
    if around := [m for m in alone if any(x is blocks[0] for x in m.modules())]:
        raise UnsupportedError(
            f"pipeline.stages: {type(around[0]).__name__}, which contains the blocks {name}, has parameters of its own;"
            " a pipeline needs them in one place. deepc.pipe.PipelineModule takes models as layers"
        )
    order: list[Any] = []  # block numbers, and other modules
    seen: list[tuple[Any, Any]] = []  # (first tensor, output) of the blocks
    calls: list[tuple[Any, Any]] = []  # their arguments
    handles = []
    for i, block in enumerate(blocks):

        def ran(_: Any, args: Any, kwargs: Any, out: Any, i: int = i) -> None:
            if in_checkpoint():
                raise UnsupportedError(IN_CHECKPOINT)
            order.append(i)
            hidden = first_tensor(args, kwargs)
            seen.append((hidden, out))
            calls.append((args, kwargs))
            if any(t.requires_grad and t is not hidden for t in every_tensor((args, kwargs))):
                raise UnsupportedError(
                    f"pipeline.stages: {name}.{i} gets another tensor that depends on parameters, besides what the"
                    " block before it returned. deepc.pipe.PipelineModule takes models as layers"
                )

        handles.append(block.register_forward_hook(ran, with_kwargs=True))
    for module in alone:
        handles.append(module.register_forward_pre_hook(lambda m, _: order.append(m)))
    try:
        with evaluating(model), torch.enable_grad():
            whole = [t.detach() for t in every_tensor(run())]
    finally:
        for handle in handles:
            handle.remove()
    numbers = [x for x in order if isinstance(x, int)]
    if numbers != list(range(len(blocks))):
        raise ArgumentError(
            f"pipeline.stages: the blocks of {name} ran in the order {numbers[:12]}; a pipeline needs each of them"
            " once, one after the other"
        )
    for i, ((_, out), (given, _)) in enumerate(zip(seen, seen[1:])):
        if hidden_of(out) is not given:
            raise ArgumentError(
                f"pipeline.stages: {name}.{i + 1} does not get what {name}.{i} returned; a pipeline needs a chain of"
                " blocks. deepc.pipe.PipelineModule takes models as layers"
            )
    first, last = order.index(0), order.index(len(blocks) - 1)
    middle = [m for m in order[first:last] if not isinstance(m, int)]
    before = [m for m in order[:first] if not isinstance(m, int)]
    after = [m for m in order[last:] if not isinstance(m, int)]
    both = [m for m in after if any(m is b for b in before)]
    if wrong := [*middle, *both]:
        names = {id(m): n for n, m in model.named_modules()}
        raise UnsupportedError(
            f"pipeline.stages: {names[id(wrong[0])]} runs between the blocks of {name}, or before and after them, and"
            " has parameters; a pipeline needs them in one place. deepc.pipe.PipelineModule takes models as layers"
        )
    unused = [m for m in alone if not any(m is x for x in order)]
    pairs = [_others(name, i, out) for i, (_, out) in enumerate(seen)]
    with evaluating(model):
        halves = _halves(blocks, calls)
    return Chain(
        name, blocks, list(dict.fromkeys(before)), list(dict.fromkeys([*after, *unused])), pairs, halves
    ), whole


def _halves(blocks: list[torch.nn.Module], calls: list[tuple[Any, Any]]) -> dict[int, inside.Halves]:
    """Looked for in the first block of each kind, and tried in the others."""
    kinds: dict[Any, inside.Halves | None] = {}
    halves = {}
    for i, (block, call) in enumerate(zip(blocks, calls)):
        kind = type(block), tuple((name, p.shape) for name, p in block.named_parameters())
        if kind not in kinds:
            found = kinds[kind] = inside.find(block, *call)
        elif (found := kinds[kind]) is not None and not inside.proves(block, *call, found):
            found = None
        if found is not None:
            halves[i] = found
    return halves


def _longest_list(model: torch.nn.Module) -> tuple[str, list[torch.nn.Module]]:
    lists = [
        (name, list(module))
        for name, module in model.named_modules()
        if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)) and len(module) > 1
    ]
    if not lists:
        raise ArgumentError(
            f"pipeline.stages: {type(model).__name__} has no torch.nn.ModuleList or Sequential of blocks to cut;"
            " deepc.pipe.PipelineModule takes models as layers"
        )
    return max(lists, key=lambda found: sum(p.numel() for block in found[1] for p in block.parameters()))


def _others(name: str, i: int, out: Any) -> tuple[Any, ...] | None:
    """What a block returns besides what it hands on."""
    if isinstance(out, torch.Tensor):
        return None
    if type(out) is not tuple or any(isinstance(x, torch.Tensor) for x in out[1:]):
        raise UnsupportedError(
            f"pipeline.stages: {name}.{i} returns {type(out).__name__} with more than one tensor; between stages goes"
            " one. deepc.pipe.PipelineModule takes models as layers"
        )
    return out[1:]
