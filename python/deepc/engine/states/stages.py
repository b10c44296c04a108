"""The whole model of a pipeline, from its stages: each rank has the values of its own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...comm.groups import gather_texts
from ...parallel.expert.spread import gather_experts, name_among_all
from ...parallel.tensor.group import tensor_group, whole_state_dict

if TYPE_CHECKING:
    from ..base import EngineBase


class Told(NamedTuple):
    """A tensor that a rank has of the model's state_dict."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def of_all_stages(
    engine: EngineBase, own: dict[str, torch.Tensor], exclude_frozen_parameters: bool, keeps: bool
) -> dict[str, torch.Tensor]:
    """The state_dict of the whole model, copies, in the order of the stages; tied names have one tensor. Each tensor
    goes from the first rank of its stage to all. own: this rank's. keeps: this rank wants it; else it has one tensor
    at a time, and the result is empty. Collective."""
    mine = _own(engine, own, exclude_frozen_parameters)
    at = engine.mesh.coordinates(engine.everyone.rank)
    first = at.dp == at.sp == at.tp == 0
    whole: dict[str, torch.Tensor] = {}
    for rank, told in enumerate(_told(engine, mine if first else {})):
        for name, shape, dtype in told:
            value = (
                mine[name].detach().contiguous()
                if rank == engine.everyone.rank
                else torch.empty(shape, dtype=dtype, device="cpu")
            )
            if value.numel():
                engine.everyone.broadcast(value.view(-1).view(torch.uint8), rank)
            if keeps:
                whole[name] = value.clone() if rank == engine.everyone.rank else value
    assert engine.part is not None  # who asks has looked
    for name, stored in engine.part.names.items():
        if stored in whole:
            whole[name] = whole[stored]
    known = [n for n in own if n in whole]  # a model that is cut where it stands knows its order
    return {**{n: whole[n] for n in known}, **whole} if keeps else {}


def without_other_stages(engine: EngineBase, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state_dict of the whole model -> without what other ranks alone have. What nobody has stays in it, for
    load_state_dict to refuse. Collective."""
    module = engine.module
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    mine = {name_among_all(n, module): t for n, t in named}
    others = {t.name for told in _told(engine, mine) for t in told} - mine.keys()
    return {n: t for n, t in state_dict.items() if n not in others}


def _own(engine: EngineBase, out: dict[str, torch.Tensor], exclude_frozen_parameters: bool) -> dict[str, torch.Tensor]:
    """What this rank answers for: its parameters, those of all experts of the stage, and no copies of others';
    buffers that it saves. Collective over tensor-parallel ranks and those with the same stage."""
    assert engine.part is not None  # who asks has looked
    module, away = engine.module, engine.elsewhere()
    named = dict(module.named_parameters(remove_duplicate=False))
    if engine.cuts:
        here = {n: t for n, t in out.items() if n not in named or id(named[n]) not in away}
        out = {**here, **whole_state_dict(module, here, tensor_group(engine.mesh))}
    found = {}
    for name, t in out.items():
        p = named.get(name)
        if name in engine.part.names or not isinstance(t, torch.Tensor) or t.is_meta:
            continue
        if id(p) in away if p is not None else not engine.part.has_buffer(name):
            continue
        if p is None or p.requires_grad or not exclude_frozen_parameters:
            found[name] = t
    return gather_experts(found, module) if engine.mesh.ep > 1 else found


def _told(engine: EngineBase, mine: dict[str, torch.Tensor]) -> list[list[Told]]:
    """What each rank has to send. Collective."""
    rows = [[n, list(t.shape), str(t.dtype).removeprefix("torch.")] for n, t in mine.items()]
    texts = gather_texts(engine.everyone, json.dumps(rows))
    return [[Told(n, tuple(shape), getattr(torch, dtype)) for n, shape, dtype in json.loads(t)] for t in texts]
