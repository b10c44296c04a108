"""How long the parts of a chain of blocks take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ....errors import UnsupportedError
from ..deferred import in_checkpoint
from .calls import first_tensor, hidden_of, when_gradient_comes
from .chain import Chain, Unit


def clock(
    chain: Chain,
    units: Sequence[Unit],
    run: Callable[[], torch.Tensor],
    now: Callable[[], float] = time.perf_counter,
) -> tuple[list[float], set[int]]:
    """[before, each unit, after]: seconds by now() of one forward and backward of run()'s loss; and the blocks that
    recompute themselves, which can't be cut inside. UnsupportedError where it leaves out some."""
    marks: list[float] = []
    back: dict[int, float] = {}
    handles, recomputed = [], set()
    for i, unit in enumerate(units):
        block, point = chain.blocks[unit.block], chain.begin(unit)

        def begins(_: Any, args: Any, kwargs: Any, i: int = i, unit: Unit = unit) -> None:
            if unit.part and in_checkpoint():
                recomputed.add(unit.block)
            if len(marks) > i:
                return  # run again, in backward
            marks.append(now())
            when_gradient_comes(first_tensor(args, kwargs), lambda: back.setdefault(i, now()))

        at = block if point is None else block.get_submodule(point.name)
        if point is not None and point.outputs:
            handles.append(at.register_forward_hook(lambda m, a, out, b=begins: b(m, (hidden_of(out),), {})))
        else:
            handles.append(at.register_forward_pre_hook(begins, with_kwargs=True))

    def ends(_: Any, __: Any, out: Any) -> None:
        if len(marks) == len(units):
            marks.append(now())
            when_gradient_comes(hidden_of(out), lambda: back.setdefault(len(units), now()))

    handles.append(chain.blocks[-1].register_forward_hook(ends))
    try:
        began = now()
        loss = run()
        turned = now()
        loss.backward()
        ended = now()
    finally:
        for handle in handles:
            handle.remove()
    if len(marks) != len(units) + 1:
        raise UnsupportedError(
            f"pipeline.stages: in training the model's forward passed over some of the {len(chain.blocks)} blocks of"
            f" {chain.name}, which all ran in evaluation; a pipeline needs each of them for every micro-batch: switch"
            " off what leaves out some while it trains (layerdrop)"
        )
    forward = [b - a for a, b in zip([began, *marks], [*marks, turned])]
    # gradients come from the last unit to the first; where one needs none, its time counts to the one before
    came = [turned, *(back.get(i, ended) for i in range(len(units), -1, -1)), ended]
    backward = [b - a for a, b in zip(came, came[1:])][::-1]
    return [f + b for f, b in zip(forward, backward, strict=True)], recomputed
