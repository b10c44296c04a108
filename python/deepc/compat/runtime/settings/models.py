"""What deepspeed.initialize does with a model before an engine is made of it, as DeepSpeed does it: a model that an
earlier engine trains, one that has 16-bit weights already, modules marked as leaves."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from ....comm.start import default_device
from ....config.source import read
from ....config.tree import Config
from ....engine.assembly.shares import ranks_to_share
from ....errors import ArgumentError, ConfigError
from ....parallel.tensor.rules import as_noted
from ....zero.parameters import owners
from ...helpers.comm import get_world_size
from ...helpers.parallel import sequence_state
from ...helpers.utils import (
    log_dist,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
)
from .sections import DeepSpeedZeroLeafModuleConfig


def leave_earlier(model: Any, optimizer: Any, source: Any, mpu: Any) -> None:
    """An engine of the same model that still lives is destroyed: the new one trains it. One for evaluation (without any
    optimizer) leaves it alone, and sees what it trains. A wrong configuration is an error before: the earlier engine
    has the optimizer's states. Collective."""
    raw = source.raw if isinstance(source, Config) else read(source)[0]
    if optimizer is None and raw.get("optimizer") is None:
        return
    earlier = [engine for engine in owners.alive() if engine.module is model]
    if earlier and mpu is None:  # whose sizes would belong to the configuration
        world, device = ranks_to_share(model, source), default_device().type
        Config.load(as_noted(model, source, None), world_size=world, device_type=device)
    for engine in earlier:
        log_dist("the model belongs to an earlier engine, which is destroyed: the new one trains it", ranks=[0])
        engine.destroy()


def with_mesh(source: Any, mesh_param: Any) -> Any:
    """The configuration with the mesh (data-parallel ranks, ranks of a sequence) that initialize(mesh_param=) asks for,
    and without DeepSpeed's data_parallel_size, which says the same; both are checked against the number of ranks."""
    if isinstance(source, Config) and mesh_param is None:
        return source
    raw = dict(source.raw if isinstance(source, Config) else read(source)[0])
    data = raw.pop("data_parallel_size", None)
    if mesh_param is None and data is None:
        return source
    sequence = raw.get("sequence_parallel_size") or 1
    if mesh_param is not None:
        if not isinstance(mesh_param, (tuple, list)) or len(mesh_param) != 2:
            raise ArgumentError(
                f"initialize(mesh_param={mesh_param!r}): it is two numbers, of data-parallel ranks and of ranks that"
                " share a sequence"
            )
        if sequence not in (1, mesh_param[1]) or data not in (None, mesh_param[0]):
            raise ConfigError(
                f"initialize(mesh_param={tuple(mesh_param)}): the configuration has data_parallel_size = {data} and"
                f" sequence_parallel_size = {sequence}; make them equal, or leave one out"
            )
        data, sequence = mesh_param
    others = ((raw.get("tensor_parallel") or {}).get("autotp_size") or 1) * sequence
    if data * others != (world := get_world_size()):
        raise ConfigError(
            f"data_parallel_size = {data} with {others} ranks for each share of the data (sequence_parallel_size ="
            f" {sequence}) are {data * others} ranks, and there are {world}; leave data_parallel_size out"
        )
    return {**raw, "sequence_parallel_size": sequence}


def with_sequences(source: Any, mpu: Any) -> tuple[Any, Any]:
    """(the configuration, mpu), where mpu is parallel_state_sp: the configuration says what it does."""
    if not isinstance(mpu, ModuleType) or vars(mpu).get("_target", mpu) is not sequence_state:
        return source, mpu
    raw = dict(source.raw if isinstance(source, Config) else read(source)[0])
    size = sequence_state.get_sequence_parallel_world_size()
    if (asked := raw.setdefault("sequence_parallel_size", size)) != size:
        raise ConfigError(
            f"sequence_parallel_size = {asked}, and initialize_sequence_parallel got {size}; make them equal, or leave"
            " the key out"
        )
    return raw, None


def with_own_precision(model: Any, source: Any) -> Any:
    """The configuration; with the section of the model's own dtype if its weights are bf16 or fp16 and the
    configuration says nothing of precision. (fp16 then has a loss scale of 1.)"""
    if not isinstance(model, torch.nn.Module):
        return source
    kinds = {p.dtype for p in model.parameters() if p.requires_grad and p.is_floating_point()}
    if len(kinds) != 1 or not kinds <= {torch.bfloat16, torch.float16}:
        return source
    raw = source.raw if isinstance(source, Config) else read(source)[0]
    if "precision" in raw or any(_asks(raw.get(name)) for name in ("bf16", "bfloat16", "fp16")):
        return source
    name = "bf16" if kinds == {torch.bfloat16} else "fp16"
    log_dist(f"no precision in the configuration, and the model's weights are {name}: it is trained in {name}", [0])
    rest = {k: v for k, v in raw.items() if k not in ("bf16", "bfloat16", "fp16")}
    return {**rest, name: {"enabled": True} if name == "bf16" else {"enabled": True, "loss_scale": 1}}


def _asks(section: Any) -> bool:
    return section is not None and not (isinstance(section, dict) and section.get("enabled", False) is False)


def mark_leaves(model: Any, source: Any) -> None:
    """The modules that zero_optimization.leaf_module names, or that DeepSpeed's defaults name, at stage 3."""
    raw = source.raw if isinstance(source, Config) else read(source)[0]
    zero = raw.get("zero_optimization")
    if not isinstance(zero, dict) or zero.get("stage") != 3 or not isinstance(model, torch.nn.Module):
        return
    given = zero.get("leaf_module")
    leaf = DeepSpeedZeroLeafModuleConfig(**(given if isinstance(given, dict) else {}))
    set_z3_leaf_modules(model, leaf.classes, raise_if_not_found=False)
    _, names = set_z3_leaf_modules_by_name(model, leaf.names, raise_if_not_found=False)
    _, suffixes = set_z3_leaf_modules_by_suffix(model, leaf.name_suffixes, raise_if_not_found=False)
    if missing := names + suffixes:
        log_dist(f"zero_optimization.leaf_module: the model has no modules {', '.join(missing)}", ranks=[0])
