"""What the layers of a list cost: seconds of forward and backward with a sample, one layer in memory at a time."""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...core import memory
from ...errors import ArgumentError, MisuseError

_ROUNDS = 4  # the first finds nothing warm


class Candidate(NamedTuple):
    """A layer that can be made. name: for messages. make(): its module (None: it is a function), and what to call.
    kind: layers of one kind that get inputs of the same shapes count alike; None: it is like no other. again(module):
    whether backward computes it again."""

    name: str
    make: Callable[[], tuple[torch.nn.Module | None, Callable[[Any], Any]]]
    kind: Hashable
    again: Callable[[torch.nn.Module | None], bool]


def costs(
    layers: Sequence[Candidate], sample: Any, loss_fn: Callable[[Any, Any], Any] | None, now: Callable[[], float]
) -> list[float]:
    """Of each layer, the least of the rounds, summed over all ranks, so that all cut alike; loss_fn counts to the last
    one. sample: (inputs, labels). now: seconds. Random states, buffers and gradients are as before. Collective: what
    fails on one rank is an error on all."""
    mine, failure = [0.0] * len(layers), None
    try:
        mine = _measured(layers, *_pair(sample), loss_fn, now)
    except Exception as exc:  # told to the other ranks, then raised
        failure = exc
    failed = torch.zeros(dist.get_world_size(), dtype=torch.float32, device="cpu")
    failed[dist.get_rank()] = float(failure is not None)
    dist.all_reduce(failed)
    if failure is not None:
        raise failure
    if bad := [str(rank) for rank, one in enumerate(failed.tolist()) if one]:
        raise MisuseError(
            f'partition_method="time": rank {", ".join(bad)} could not time the layers (its own message tells why), so'
            " no rank cuts them"
        )
    total = torch.tensor(mine, dtype=torch.float64, device="cpu")
    dist.all_reduce(total)
    return total.tolist()


def _pair(sample: Any) -> tuple[Any, Any]:
    if sample is None:
        raise ArgumentError(
            'partition_method="time" measures the layers with a micro-batch: pass sample_batch=(inputs, labels), as'
            " train_batch reads it"
        )
    if not isinstance(sample, (tuple, list)) or len(sample) != 2:
        raise ArgumentError(
            f"sample_batch is a micro-batch as train_batch reads it, (inputs, labels); got {type(sample).__name__}"
            + (f" of {len(sample)}" if isinstance(sample, (tuple, list)) else "")
        )
    return sample[0], sample[1]


def _measured(
    layers: Sequence[Candidate],
    inputs: Any,
    labels: Any,
    loss_fn: Callable[[Any, Any], Any] | None,
    now: Callable[[], float],
) -> list[float]:
    memory.keep_heap()  # as training has it: pages that come and go are no layer's time
    found, kinds = [], dict[Hashable, list[int]]()
    inputs = _one_alone(inputs)
    with random_states_kept(), torch.enable_grad():
        for i, layer in enumerate(layers):
            loss = None if loss_fn is None or i < len(layers) - 1 else lambda out: loss_fn(out, labels)
            kinds.setdefault(i if layer.kind is None or loss else (layer.kind, _shapes(inputs)), []).append(i)
            module, call = layer.make()
            try:
                forward, backward, inputs = _of_one(module, call, inputs, loss, now)
            except Exception as exc:
                raise ArgumentError(
                    f'partition_method="time": layer {i} ({layer.name}) can\'t be timed with sample_batch:'
                    f" {type(exc).__name__}: {exc}. It is (inputs, labels) as train_batch reads it; layers that can't"
                    ' run before initialize are cut by partition_method="parameters"'
                ) from exc
            found.append(forward * (2 if layer.again(module) else 1) + backward)
            del module, call  # before the next one is made
    for alike in kinds.values():
        middle = statistics.median(found[i] for i in alike)
        for i in alike:
            found[i] = middle
    return found


def _of_one(
    module: torch.nn.Module | None,
    call: Callable[[Any], Any],
    inputs: Any,
    loss: Callable[[Any], Any] | None,
    now: Callable[[], float],
) -> tuple[float, float, Any]:
    """(seconds of forward, of backward, what the layer returned)."""
    forward = backward = math.inf
    with untouched(module):
        for _ in range(_ROUNDS):
            for p in module.parameters() if module is not None else ():
                p.grad = None
            leaves = _each(inputs, _leaf)
            given = _each(leaves, torch.clone)  # which it may write
            began = now()
            made = call(given)
            out = made if loss is None else loss(made)
            turned = now()
            forward, backward = min(forward, turned - began), min(backward, _backward(module, leaves, out, now))
    return forward, backward, _one_alone(_each(made, _leaf))


def _backward(module: torch.nn.Module | None, leaves: Any, out: Any, now: Callable[[], float]) -> float:
    """Seconds. A function may compute with parameters that nobody names here: their gradients are not asked for."""
    grown = [t for t in _tensors(out) if t.requires_grad]
    wanted = [t for t in _tensors(leaves) if t.requires_grad]
    if not grown or (module is None and not wanted):
        return 0.0
    ones = [torch.ones_like(t) for t in grown]
    began = now()
    if module is None:
        torch.autograd.grad(grown, wanted, ones, allow_unused=True)
    else:  # recomputation of its own may be of the kind that takes no list of inputs
        torch.autograd.backward(grown, ones)
    return now() - began


@contextlib.contextmanager
def untouched(module: torch.nn.Module | None) -> Iterator[None]:
    """Its buffers and gradients are afterwards what they were."""
    if module is None:
        yield
        return
    buffers = [(m._buffers, dict(m._buffers)) for m in module.modules()]
    values = [(b, b.clone()) for b in module.buffers()]
    gradients = [(p, p.grad) for p in module.parameters()]
    try:
        yield
    finally:
        for live, before in buffers:
            live.clear()
            live.update(before)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)
        for p, gradient in gradients:
            p.grad = gradient


@contextlib.contextmanager
def random_states_kept() -> Iterator[None]:
    """Of torch, Python and numpy: what is drawn afterwards is what would have been drawn without the block."""
    numpy = sys.modules.get("numpy")
    theirs = numpy.random.get_state() if numpy is not None else None
    own = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(own)
        if numpy is not None:
            numpy.random.set_state(theirs)


def _each(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """With every tensor changed, in tuples, lists and dicts too."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is dict:
        return {key: _each(v, change) for key, v in value.items()}
    return type(value)(_each(v, change) for v in value) if type(value) in (tuple, list) else value


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _each(value, lambda t: found.append(t) or t)  # type: ignore[func-returns-value]
    return found


def _leaf(t: torch.Tensor) -> torch.Tensor:
    return t.detach().requires_grad_(t.requires_grad)


def _one_alone(value: Any) -> Any:
    """A layer gets a tuple of one as that one."""
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value


def _shapes(value: Any) -> Hashable:
    return tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in _tensors(value))
