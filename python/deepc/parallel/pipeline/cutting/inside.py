"""Blocks that can be cut inside: most are one half and then another (attention, then a network of each token), with one
tensor between them, and the network is two halves itself (up and down), with two: what the network is added to, and
what it is made of.

The second half alone is the block's own forward, given that tensor as its input, with the modules of the first half
stood in for. Two ways exist. In the blocks of GPT-2 and Llama (normalized before), x + first(x) goes on: the stand-ins
give zeros, and x + 0 has the bits of x. In BERT's (normalized after), first(x) goes on: the stand-ins hand on what they
get. Which way it is, if any, is seen by trying.

Inside of the network the same is done, its first modules give zeros, and the module behind the cut gets the second
tensor instead of what they made. Inside of attention, behind the products that make queries, keys and values, what they
made goes along, and they give that."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from .calls import every_tensor, first_tensor, mapped, with_first

_WORTH = 0.15  # of the second half's weights, at least, between two places


class Point(NamedTuple):
    """A place inside of a block. first: the names of the block's children that run before its second half. turn: of the
    one whose first tensor is what goes from half to half. adds: the stand-ins of `first` give zeros; else they hand on
    their input. others: what they return besides, by name (None: they return the tensor alone).

    at: the module whose first tensor goes along, where the place is inside of the second half ("": it is between the
    halves). outputs: the modules whose tensors go along, where it is inside of the first half, behind the last of them
    (then `first` and `turn` are empty: what goes is the block's input). skipped: the modules of that half that have run
    then, and the features that each one makes."""

    first: tuple[str, ...]
    turn: str
    adds: bool
    others: dict[str, tuple[Any, ...] | None]
    at: str = ""
    skipped: dict[str, int] = {}  # nobody changes it
    outputs: tuple[str, ...] = ()

    @property
    def before(self) -> tuple[str, ...]:
        """The modules that run before, with all in them."""
        return (*self.first, *self.skipped)

    @property
    def name(self) -> str:
        """The module before which it is, or behind which."""
        return self.at or self.turn or self.outputs[-1]

    @property
    def halves(self) -> bool:
        """Whether it is between the halves."""
        return not self.at and not self.outputs

    def stand_in(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], along: Sequence[Any] = ()) -> Any:
        """What a module of `before` returns where what comes behind runs alone. along: what has come of `outputs`."""
        if name in self.outputs:
            return along[self.outputs.index(name)]
        given = first_tensor(args, kwargs)
        if name in self.skipped:
            return given.new_zeros(()).expand(*given.shape[:-1], self.skipped[name])
        out = given.new_zeros(()).expand(given.shape) if self.adds else given
        others = self.others[name]
        return out if others is None else (out, *others)


class _Call(NamedTuple):
    name: str
    given: torch.Tensor
    tensors: list[torch.Tensor]
    out: Any


def find(block: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Point]:
    """The places at which `block`, called with these arguments for evaluation, can be cut, in the order in which they
    come: inside of its first half, between its halves, and inside of the second. Inside not where tensor parallelism
    has cut the block: ranks draw other random numbers between those modules (parallel/tensor/random.py)."""
    halves = find_halves(block, args, kwargs)
    if halves is None:
        return []
    if any(hasattr(m, "cuts") for m in block.modules()):
        return [halves]
    calls, _ = _run(block, args, kwargs, {}, _leaves(block))
    if len({c.name for c in calls}) != len(calls):
        return [halves]
    weights = [sum(p.numel() for p in block.get_submodule(c.name).parameters()) for c in calls]
    inner = [_is_in(c.name, halves.first) for c in calls]

    def proven(point: Point) -> bool:
        return proves(block, args, kwargs, point)

    one, two = ([(c, w) for c, w, i in zip(calls, weights, inner) if i is first] for first in (True, False))
    return [*_in_first(one, proven), halves, *_in_second(two, halves, proven)]


def _leaves(block: torch.nn.Module) -> list[str]:
    return [n for n, m in block.named_modules() if n and not any(True for _ in m.children())]


def _in_first(calls: list[tuple[_Call, int]], proven: Callable[[Point], bool]) -> list[Point]:
    """The last place in the first half, behind modules with weights, that leaves weights on both sides: what up to
    three modules made goes along."""
    total = sum(w for _, w in calls)
    for end in range(len(calls), 0, -1):
        run, done = [c for c, _ in calls[:end]], sum(w for _, w in calls[:end])
        if calls[end - 1][1] and _WORTH * total <= done <= (1 - _WORTH) * total and all(map(_is_by_row, run)):
            for n in range(1, 4):
                along = tuple(c.name for c in run[-n:])
                point = Point((), "", True, {}, skipped={c.name: c.out.shape[-1] for c in run}, outputs=along)
                if proven(point):
                    return [point]
    return []


def _in_second(calls: list[tuple[_Call, int]], halves: Point, proven: Callable[[Point], bool]) -> list[Point]:
    """Places in the second half: before a module with weights, where the weights on both sides are worth a cut."""
    total = sum(w for _, w in calls)
    found, least, done = [], _WORTH * total, 0
    for i, (call, weight) in enumerate(calls):
        before = [c for c, _ in calls[:i]]
        if weight and min(done, total - done) >= least and all(map(_is_by_row, before)):
            point = halves._replace(at=call.name, skipped={c.name: c.out.shape[-1] for c in before})
            if proven(point):
                found.append(point)
                least = done + _WORTH * total
        done += weight
    return found


def _is_in(name: str, parents: tuple[str, ...]) -> bool:
    return any(name == p or name.startswith(f"{p}.") for p in parents)


def _is_by_row(call: _Call) -> bool:
    """Whether what it returns has the shape of what it got but for the features, and its dtype."""
    out = call.out
    return isinstance(out, torch.Tensor) and out.shape[:-1] == call.given.shape[:-1] and out.dtype == call.given.dtype


def find_halves(block: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Point | None:
    """How `block`, called with these arguments for evaluation, can be cut in two with the parameters of its halves as
    equal as can be; None: it can't. It is run several times, with other values in the place of what the first half
    makes, so that a network that adds nothing yet (initialized with zeros) is not taken for none. A block with
    parameters of its own, whose children run twice, or which recomputes itself, is left whole."""
    if any(p is not None for p in block._parameters.values()) or getattr(block, "gradient_checkpointing", False):
        return None
    calls, _ = _run(block, args, kwargs, {})
    names = [c.name for c in calls]
    if len(set(names)) != len(names):
        return None
    hidden = first_tensor(args, kwargs)
    found = []
    for k, turn in enumerate(calls[1:], 1):
        before = calls[:k]
        if turn.given.shape == hidden.shape and all(_keeps_shape(c) for c in before):
            for adds in (True, False):
                halves = Point(tuple(names[:k]), turn.name, adds, {c.name: _others(c.out) for c in before})
                if proves(block, args, kwargs, halves):
                    sizes = {n: sum(p.numel() for p in m.parameters()) for n, m in block.named_children()}
                    first, whole = sum(sizes[n] for n in halves.first), sum(sizes.values())
                    if 0 < first < whole:  # a stage with the other half alone would have nothing to train
                        found.append((max(first, whole - first), k, halves))
                    break
    return min(found, key=lambda f: f[:2])[2] if found else None


def _others(out: Any) -> tuple[Any, ...] | None:
    return tuple(None if isinstance(x, torch.Tensor) else x for x in out[1:]) if isinstance(out, tuple) else None


def _keeps_shape(call: _Call) -> bool:
    out = call.out[0] if isinstance(call.out, tuple) and call.out else call.out
    return isinstance(out, torch.Tensor) and out.shape == call.given.shape and out.dtype == call.given.dtype


def proves(block: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], point: Point) -> bool:
    """Whether what comes behind a place, given what goes over it, does what it does in the whole block: each of its
    modules gets equal bits, and so comes out. The modules before give noise meanwhile. Nor may what is before it draw
    anything in training that goes over it: a stage would drop out again what the one before has."""
    names = [n for n, _ in block.named_children()]
    if not point.halves:
        behind_it = [n for n in _leaves(block) if not _is_in(n, point.before)]
        names = [*dict.fromkeys([*([point.turn] if point.turn else []), *point.before, *behind_it])]

    def noise(name: str, real: Any, a: Any, k: Any) -> Any:
        return mapped(real(*a, **k), lambda t: torch.randn_like(t) if t.is_floating_point() else t)

    with torch.random.fork_rng(devices=[]):
        whole, wanted = _run(block, args, kwargs, dict.fromkeys(point.before, noise), names)
    first = {c.name: c for c in reversed(whole)}
    if any(name not in first for name in (point.turn, point.name, *point.outputs) if name):
        return False
    between = first[point.turn].given if point.turn else first_tensor(args, kwargs)
    inner, along = first[point.name].given, [first[name].out for name in point.outputs]

    def stand_in(name: str, real: Any, a: Any, k: Any) -> Any:
        return point.stand_in(name, a, k, along)

    def behind(name: str, real: Any, a: Any, k: Any) -> Any:
        a, k = with_first(a, k, inner)
        return real(*a, **k)

    instead = {**dict.fromkeys(point.before, stand_in), **({point.at: behind} if point.at else {})}
    alone, made = _run(block, *with_first(args, kwargs, between), instead, names)
    if not point.halves:  # what it gets instead is seen by what comes of it
        second, again = ([c for c in calls if c.name not in (*point.before, point.at)] for calls in (whole, alone))
    else:
        second, again = whole[len(point.first) :], alone[len(point.first) :]
    return (
        [c.name for c in whole] == [c.name for c in alone]
        and all(_same(a.tensors, b.tensors) for a, b in zip(second, again))
        and _same(every_tensor(wanted), every_tensor(made))
        and _draws_behind(block, with_first(args, kwargs, between), instead, point.name)
    )


def _draws_behind(block: torch.nn.Module, given: tuple[Any, Any], instead: dict[str, Any], place: str) -> bool:
    """Whether all random numbers that change what the block returns in training are drawn behind the call of `place`:
    those before are others in a second run. instead: as of _run."""

    def begins(name: str, real: Any, a: Any, k: Any) -> Any:
        torch.default_generator.manual_seed(0)
        return instead[name](name, real, a, k) if name in instead else real(*a, **k)

    resting = [m for m in block.modules() if not m.training]
    made = []
    try:
        for m in resting:
            m.training = True
        with torch.random.fork_rng(devices=[]):
            for seed in (1, 2):
                torch.default_generator.manual_seed(seed)
                made.append(every_tensor(_run(block, *given, {**instead, place: begins}, [*instead, place])[1]))
    except Exception:
        return False  # what it says of itself in training is raised there
    finally:
        for m in resting:
            m.training = False
    return _same(*made)


def _same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def _run(
    block: torch.nn.Module, args: Any, kwargs: Any, instead: dict[str, Any], names: list[str] | None = None
) -> tuple[list[_Call], Any]:
    """The calls of the modules `names` of the block (None: its children), and what it returned; instead[name](name,
    module, args, kwargs) stands for a module."""
    calls: list[_Call] = []
    with contextlib.ExitStack() as stack:
        for name in names if names is not None else [n for n, _ in block.named_children()]:
            stack.enter_context(_watched(name, block.get_submodule(name), instead.get(name), calls))
        with torch.enable_grad():  # torch's own layers take a fused path without
            out = block(*args, **kwargs)
    return calls, mapped(out, torch.Tensor.detach)


@contextlib.contextmanager
def _watched(name: str, child: torch.nn.Module, instead: Any, calls: list[_Call]) -> Iterator[None]:
    forward = child.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs) if instead is None else instead(name, forward, args, kwargs)
        tensors = [t.detach() for t in every_tensor((args, kwargs))]
        if tensors:
            calls.append(_Call(name, first_tensor(args, kwargs).detach(), tensors, mapped(out, torch.Tensor.detach)))
        return out

    had = "forward" in child.__dict__
    child.forward = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        if had:
            child.forward = forward  # type: ignore[method-assign]
        else:
            del child.__dict__["forward"]
