"""How the networks of experts are cut over tensor-parallel ranks where a layer asks for it
(MoE(enable_expert_tensor_parallelism=True))."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...errors import UnsupportedError
from ..tensor.layers import is_conv1d
from .layer import MoE


def kinds_of_linears(model: torch.nn.Module, known: Callable[[str], bool]) -> dict[str, str]:
    """{name of a linear layer: "column" or "row"} of every expert, and the network beside experts, of the layers that
    ask for it, in the order in which a region is made of them; "skip" for what all ranks have whole (gates). known:
    whether a rule of the caller's takes a module: a network of which one does is left to these. UnsupportedError for an
    expert that is no MLP of two linear layers, or three (gate and up, multiplied, and down)."""
    kinds: dict[str, str] = {}
    for path, moe in model.named_modules():
        if not isinstance(moe, MoE) or not moe.enable_expert_tensor_parallelism:
            continue
        prefix = f"{path}." if path else ""
        experts = moe.deepspeed_moe.experts.deepspeed_experts
        networks = {f"{prefix}deepspeed_moe.experts.deepspeed_experts.{i}": e for i, e in enumerate(experts)}
        kinds[f"{prefix}deepspeed_moe.gate.wg"] = "skip"
        if moe.use_residual:
            networks[f"{prefix}mlp"] = moe.mlp
            kinds[f"{prefix}coefficient"] = "skip"
        width = moe.deepspeed_moe.gate.wg.in_features
        for name, network in networks.items():
            linears = {
                f"{name}.{own}" if own else name: m
                for own, m in network.named_modules()
                if isinstance(m, torch.nn.Linear) or is_conv1d(m)
            }
            if any(map(known, linears)):
                continue
            kinds.update(_of_mlp(name, network, linears, width))
    return kinds


def _of_mlp(name: str, network: torch.nn.Module, linears: dict[str, Any], width: int) -> dict[str, str]:
    sizes = {n: tuple(m.weight.shape) if is_conv1d(m) else tuple(m.weight.shape)[::-1] for n, m in linears.items()}
    names = list(sizes)
    told = ", ".join(f"{n.removeprefix(name + '.')} from {a} to {b}" for n, (a, b) in sizes.items()) or "none"
    own = {id(p) for m in linears.values() for p in m.parameters(recurse=False)}
    mirrored = [n for n, s in sizes.items() if s[1] == width and all(sizes[o] == s[::-1] for o in names if o != n)]
    down = mirrored[-1:] if len(names) == 2 else mirrored  # two of one width are in order, of three it can't be told
    why = None
    if len(own) < len(list(network.parameters())):
        why = "it has parameters beside them"
    elif len(names) not in (2, 3):
        why = "these are neither two nor three"
    elif len(down) != 1:
        why = f"just one must lead to the {width} features of a token, from what each other makes of these"
    if why is not None:
        raise UnsupportedError(
            f"MoE: enable_expert_tensor_parallelism=True, and {name} ({type(network).__name__}) is no MLP of two or"
            f" three linear layers ({told}): {why}. Say how it is cut by patterns in tensor_parallel.partition_config"
            " (docs/moe.md), or leave the argument False"
        )
    return {**{n: "column" for n in names if n not in down}, down[0]: "row"}
