"""Blocks that can be cut in two: most are one half and then another (attention, then a network of each token), with one
tensor between them.

The second half alone is the block's own forward, given that tensor as its input, with the modules of the first half
stood in for. Two ways exist. In the blocks of GPT-2 and Llama (normalized before), x + first(x) goes on: the stand-ins
give zeros, and x + 0 has the bits of x. In BERT's (normalized after), first(x) goes on: the stand-ins hand on what they
get. Which way it is, if any, is seen by trying."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from .calls import every_tensor, first_tensor, mapped, with_first


class Halves(NamedTuple):
    """first: the names of the block's children that run before the cut. turn: of the one whose first tensor is what
    goes from half to half. adds: the stand-ins of `first` give zeros; else they hand on their input. others: what they
    return besides, by name (None: they return the tensor alone)."""

    first: tuple[str, ...]
    turn: str
    adds: bool
    others: dict[str, tuple[Any, ...] | None]

    def stand_in(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the child returns where the second half runs alone."""
        given = first_tensor(args, kwargs)
        out = given.new_zeros(()).expand(given.shape) if self.adds else given
        others = self.others[name]
        return out if others is None else (out, *others)


class _Call(NamedTuple):
    name: str
    given: torch.Tensor
    tensors: list[torch.Tensor]
    out: Any


def find(block: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Halves | None:
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
                halves = Halves(tuple(names[:k]), turn.name, adds, {c.name: _others(c.out) for c in before})
                if proves(block, args, kwargs, halves):
                    sizes = {n: sum(p.numel() for p in m.parameters()) for n, m in block.named_children()}
                    first = sum(sizes[n] for n in halves.first)
                    found.append((max(first, sum(sizes.values()) - first), k, halves))
                    break
    return min(found, key=lambda f: f[:2])[2] if found else None


def _others(out: Any) -> tuple[Any, ...] | None:
    return tuple(None if isinstance(x, torch.Tensor) else x for x in out[1:]) if isinstance(out, tuple) else None


def _keeps_shape(call: _Call) -> bool:
    out = call.out[0] if isinstance(call.out, tuple) and call.out else call.out
    return isinstance(out, torch.Tensor) and out.shape == call.given.shape and out.dtype == call.given.dtype


def proves(block: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], halves: Halves) -> bool:
    """Whether the second half, given what goes between, does what it does in the whole block: each of its modules gets
    equal bits, and so comes out. The first half's modules give noise meanwhile."""

    def noise(name: str, real: Any, a: Any, k: Any) -> Any:
        return mapped(real(*a, **k), lambda t: torch.randn_like(t) if t.is_floating_point() else t)

    with torch.random.fork_rng(devices=[]):
        whole, wanted = _run(block, args, kwargs, dict.fromkeys(halves.first, noise))
    between = next((c.given for c in whole if c.name == halves.turn), None)
    if between is None:
        return False

    def stand_in(name: str, real: Any, a: Any, k: Any) -> Any:
        return halves.stand_in(name, a, k)

    alone, made = _run(block, *with_first(args, kwargs, between), dict.fromkeys(halves.first, stand_in))
    second, again = whole[len(halves.first) :], alone[len(halves.first) :]
    return (
        [c.name for c in whole] == [c.name for c in alone]
        and all(_same(a.tensors, b.tensors) for a, b in zip(second, again))
        and _same(every_tensor(wanted), every_tensor(made))
    )


def _same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def _run(block: torch.nn.Module, args: Any, kwargs: Any, instead: dict[str, Any]) -> tuple[list[_Call], Any]:
    """The calls of the children of the block, and what it returned; instead[name](name, child, args, kwargs) stands
    for a child."""
    calls: list[_Call] = []
    with contextlib.ExitStack() as stack:
        for name, child in block.named_children():
            stack.enter_context(_watched(name, child, instead.get(name), calls))
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
