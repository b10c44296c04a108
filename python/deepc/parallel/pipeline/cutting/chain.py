"""A model as a chain of blocks, seen by running it once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ....errors import ArgumentError, UnsupportedError
from ..deferred import in_checkpoint
from ..part import evaluating
from . import inside
from .calls import IN_CHECKPOINT, every_tensor, first_tensor

LONE = -1  # in place of a number: a block returns the tensor itself


class Unit(NamedTuple):
    """What a stage has all of or nothing: block number `block`, or part number `part` of it (None: the whole)."""

    block: int
    part: int | None = None


class Chain(NamedTuple):
    """What a trace has found. name: of the list of blocks. blocks: its modules. before: the modules with parameters of
    their own that run before the first block; the others run after the last. slots: which arguments of a block are what
    the one before returned: numbers, or names of keywords. links: of each block but the last, which elements of what it
    returns they are (LONE: it returns the one tensor). others: what it returns besides, with None in their places.
    points: where the blocks can be cut inside, by their numbers."""

    name: str
    blocks: list[torch.nn.Module]
    before: list[torch.nn.Module]
    after: list[torch.nn.Module]
    slots: tuple[int | str, ...]
    links: list[tuple[int, ...]]
    others: list[tuple[Any, ...]]
    points: dict[int, list[inside.Point]]

    def units(self) -> list[Unit]:
        """The blocks, in parts where they can be cut inside."""
        return [
            unit
            for i in range(len(self.blocks))
            for unit in ([Unit(i, k) for k in range(len(self.points[i]) + 1)] if i in self.points else [Unit(i)])
        ]

    def handed_on(self, i: int, out: Any) -> Any:
        """What goes from block `i`, which returned `out`, to the next one: a tensor, or a tuple of several."""
        values = tuple(out if j == LONE else out[j] for j in self.links[i])
        return values if len(values) > 1 else values[0]

    def passed_by(self, i: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What block `i` returns where it does not run: what it got."""
        values = [args[slot] if isinstance(slot, int) else kwargs[slot] for slot in self.slots]
        if self.links[i] == (LONE,):
            return values[0]
        out = list(self.others[i])
        for value, j in zip(values, self.links[i]):
            out[j] = value
        return tuple(out)

    def given(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], received: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a block with what the stage before has sent."""
        values = received if isinstance(received, tuple) else (received,)
        new, named = list(args), dict(kwargs)
        for slot, value in zip(self.slots, values):
            if isinstance(slot, int):
                new[slot] = value
            else:
                named[slot] = value
        return tuple(new), named

    def begin(self, unit: Unit) -> inside.Point | None:
        """The place inside of a block at which a unit begins; None: it begins a block."""
        return self.points[unit.block][unit.part - 1] if unit.part else None

    def modules(self, unit: Unit) -> list[torch.nn.Module]:
        """Those of a unit, with all inside of them."""
        block, points = self.blocks[unit.block], self.points.get(unit.block, [])
        if unit.part is None:
            return list(block.modules())

        def before(point: inside.Point) -> list[torch.nn.Module]:
            return [m for name in point.before for m in block.get_submodule(name).modules()]

        behind = {id(m) for m in before(points[unit.part - 1])} if unit.part else set()
        here = before(points[unit.part]) if unit.part < len(points) else list(block.modules())
        return [m for m in here if id(m) not in behind]

    def parameters(self, unit: Unit) -> list[torch.nn.Parameter]:
        return [p for m in self.modules(unit) for p in m._parameters.values() if p is not None]


Calls = list[tuple[Any, Any]]  # arguments
Points = dict[int, list[inside.Point]]


def points_of(blocks: list[torch.nn.Module], calls: Calls) -> Points:
    """Where blocks can be cut inside. Looked for in the first block of each kind, and tried in the others."""
    kinds: dict[Any, list[inside.Point]] = {}
    points = {}
    for i, (block, call) in enumerate(zip(blocks, calls)):
        kind = kind_of(block)
        if kind not in kinds:
            found = kinds[kind] = inside.find(block, *call)
        else:
            found = [point for point in kinds[kind] if inside.proves(block, *call, point)]
        if found:
            points[i] = found
    return points


def kind_of(block: torch.nn.Module) -> Any:
    return type(block), tuple((name, p.shape) for name, p in block.named_parameters())


def trace(
    model: torch.nn.Module, run: Callable[[], Any], find: Callable[[list[torch.nn.Module], Calls], Points] = points_of
) -> tuple[Chain, list[torch.Tensor]]:
    """Runs the model once, for evaluation. Returns also the tensors that it returned. find: of blocks and what they
    were called with. ArgumentError if it has no list of blocks, each of which gets what the one before returned, with
    all other parameters used before the first or after the last."""
    name, blocks = _longest_list(model)
    within = {id(m) for block in blocks for m in block.modules()}
    alone = [m for m in model.modules() if id(m) not in within and any(p is not None for p in m._parameters.values())]
    if around := [m for m in alone if any(x is blocks[0] for x in m.modules())]:
        raise UnsupportedError(
            f"pipeline.stages: {type(around[0]).__name__}, which contains the blocks {name}, has parameters of its own;"
            " a pipeline needs them in one place. deepc.pipe.PipelineModule takes models as layers"
        )
    seen = _Seen(name, blocks)
    whole = seen.run(model, run, alone)
    slots, links = _links(name, seen.outs, seen.calls)
    before, after = seen.sides(model)
    unused = [m for m in alone if not any(m is x for x in seen.order)]
    others = [_others(name, i, out, taken) for i, (out, taken) in enumerate(zip(seen.outs, links))]
    with evaluating(model):
        one = len(slots) == 1 and all(_slot(call, slots[0]) is first_tensor(*call) for call in seen.calls)
        points = find(blocks, seen.calls) if one else {}
    return Chain(
        name, blocks, list(dict.fromkeys(before)), list(dict.fromkeys([*after, *unused])), slots, links, others, points
    ), whole


class _Seen:
    """What one run of a model has shown of its blocks. order: their numbers, and other modules, as they ran."""

    def __init__(self, name: str, blocks: list[torch.nn.Module]) -> None:
        self._name, self._blocks = name, blocks
        self.order: list[Any] = []
        self.outs: list[Any] = []  # of the blocks
        self.calls: Calls = []

    def run(self, model: torch.nn.Module, run: Callable[[], Any], alone: list[torch.nn.Module]) -> list[torch.Tensor]:
        """Returns the tensors that `run` did. ArgumentError for blocks that it does not call one after the other."""
        handles = [
            *(b.register_forward_hook(self._hook(i), with_kwargs=True) for i, b in enumerate(self._blocks)),
            *(m.register_forward_pre_hook(lambda m, _: self.order.append(m)) for m in alone),
        ]
        try:
            with evaluating(model), torch.enable_grad():
                whole = [t.detach() for t in every_tensor(run())]
        finally:
            for handle in handles:
                handle.remove()
        numbers = [x for x in self.order if isinstance(x, int)]
        if numbers != list(range(len(self._blocks))):
            raise ArgumentError(
                f"pipeline.stages: the blocks of {self._name} ran in the order {numbers[:12]}; a pipeline needs each of"
                " them once, one after the other"
            )
        return whole

    def _hook(self, i: int) -> Callable[..., None]:
        def ran(_: Any, args: Any, kwargs: Any, out: Any) -> None:
            if in_checkpoint():
                raise UnsupportedError(IN_CHECKPOINT)
            self.order.append(i)
            given = every_tensor((args, kwargs))
            known = {id(t) for t in (every_tensor(self.outs[-1]) if self.outs else given)}
            self.outs.append(out)
            self.calls.append((args, kwargs))
            if self.order[-2:] != [i - 1, i] or all(not t.requires_grad or id(t) in known for t in given):
                return
            if known.intersection(map(id, given)):  # else said below
                raise UnsupportedError(
                    f"pipeline.stages: {self._name}.{i} gets another tensor that depends on parameters, besides what"
                    " the block before it returned. deepc.pipe.PipelineModule takes models as layers"
                )

        return ran

    def sides(self, model: torch.nn.Module) -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
        """The other modules that ran before the blocks, and after them. UnsupportedError for any that did neither."""
        first, last = self.order.index(0), self.order.index(len(self._blocks) - 1)
        middle = [m for m in self.order[first:last] if not isinstance(m, int)]
        before = [m for m in self.order[:first] if not isinstance(m, int)]
        after = [m for m in self.order[last:] if not isinstance(m, int)]
        both = [m for m in after if any(m is b for b in before)]
        if wrong := [*middle, *both]:
            names = {id(m): n for n, m in model.named_modules()}
            raise UnsupportedError(
                f"pipeline.stages: {names[id(wrong[0])]} runs between the blocks of {self._name}, or before and after"
                " them, and has parameters; a pipeline needs them in one place. deepc.pipe.PipelineModule takes models"
                " as layers"
            )
        return before, after


def _slot(call: tuple[Any, Any], slot: int | str) -> Any:
    args, kwargs = call
    if isinstance(slot, int):
        return args[slot] if slot < len(args) else None
    return kwargs.get(slot)


def _links(name: str, outs: list[Any], calls: list[tuple[Any, Any]]) -> tuple[tuple[int | str, ...], list[Any]]:
    """(slots, links) of a Chain. ArgumentError where a block gets nothing of what the one before returned, or has it
    elsewhere among its arguments than the others."""
    slots: tuple[int | str, ...] = ()
    links = []
    for i, (out, (args, kwargs)) in enumerate(zip(outs, calls[1:])):
        elements = list(out) if isinstance(out, (tuple, list)) else [out]
        where = {id(t): j for j, t in enumerate(elements) if isinstance(t, torch.Tensor)}
        given = [*enumerate(args), *kwargs.items()]
        found = {key: where[id(t)] for key, t in given if isinstance(t, torch.Tensor) and id(t) in where}
        if not found:
            raise ArgumentError(
                f"pipeline.stages: {name}.{i + 1} does not get what {name}.{i} returned; a pipeline needs a chain of"
                " blocks. deepc.pipe.PipelineModule takes models as layers"
            )
        slots = slots or tuple(found)
        if tuple(found) != slots or not all(isinstance(_slot(calls[0], s), torch.Tensor) for s in slots):
            raise ArgumentError(
                f"pipeline.stages: {name}.{i + 1} gets what {name}.{i} returned as its arguments {list(found)}, another"
                f" block as {list(slots)}; a pipeline needs blocks that are called alike. deepc.pipe.PipelineModule"
                " takes models as layers"
            )
        links.append(tuple(found.values()) if isinstance(out, (tuple, list)) else (LONE,))
    return slots, links


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


def _others(name: str, i: int, out: Any, taken: tuple[int, ...]) -> tuple[Any, ...]:
    """What a block returns besides what it hands on, with None in the places of that."""
    if isinstance(out, torch.Tensor):
        return ()
    rest = [None if j in taken else x for j, x in enumerate(out)]
    if type(out) is not tuple or any(every_tensor(x) for x in rest):
        raise UnsupportedError(
            f"pipeline.stages: {name}.{i} returns {type(out).__name__} with a tensor that the next block does not get;"
            " between stages goes what blocks get. deepc.pipe.PipelineModule takes models as layers"
        )
    return tuple(rest)
