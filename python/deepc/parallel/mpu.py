"""`initialize(mpu=)`: an object with Megatron-LM's questions about who shares a model, get_{model,data}_parallel_{rank,
group,world_size}(), whose layers have cut the model already. It is asked once: the ranks must stand as deepc's mesh has
them (tensor-parallel ranks next to each other), and parameters that say how they are cut (`tensor_model_parallel`,
`partition_dim`, `partition_stride`) get a Cut, by which norms count and checkpoints know the whole.

A model none of whose parameters says so is taken if the ranks that share it have equal bits: replicas. Shards that say
nothing may begin equal as well (equal seeds), so the ranks compare again while they train."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..config.source import read
from ..config.tree import Config
from ..core.lib import C
from ..errors import ArgumentError, ConfigError, MisuseError, UnsupportedError
from ..plan.mesh import Mesh
from ..zero.parameters.gathered import is_zero_param
from .tensor.cut import Cut, cuts_of

_TENSOR = ("tensor_model", "slice", "model")  # Megatron's name, that of DeepSpeed's grids, and the old one of both
_STAGES = ("pipeline_model", "pipe")


def _ask(mpu: Any, kinds: tuple[str, ...], what: str) -> Any:
    """What the first of get_<kind>_parallel_<what>() that there is says; None: there is none."""
    for kind in kinds:
        if callable(question := getattr(mpu, f"get_{kind}_parallel_{what}", None)):
            return question()
    return None


def as_mpu_says(model: torch.nn.Module, source: Any, mpu: Any) -> tuple[Any, bool]:
    """(the configuration with mpu's number of tensor-parallel ranks, whether these hold replicas), and the model with
    the cuts that its parameters tell of. ArgumentError, ConfigError where they contradict each other. Collective."""
    source, sequence = _with_sequences(source, mpu)
    if sequence > 1 and _ask(mpu, ("data",), "world_size") is None:
        return source, False  # DeepSpeed's parallel_state_sp: of sequences alone, under the names of models
    size, rank = _ask(mpu, _TENSOR, "world_size"), _ask(mpu, _TENSOR, "rank")
    asked = {
        "model_parallel_world_size": size,
        "data_parallel_world_size": _ask(mpu, ("data",), "world_size"),
        "model_parallel_rank": 0 if size == 1 else rank,
    }
    if lacks := [what for what, said in asked.items() if said is None]:
        raise ArgumentError(
            f"initialize(mpu=...) takes an object with get_model_parallel_world_size(), get_data_parallel_world_size()"
            f" and the rank and group of each, as Megatron-LM's mpu; {type(mpu).__name__} lacks get_{lacks[0]}"
        )
    raw = dict(read(source.raw if isinstance(source, Config) else source)[0])
    section: Mapping[str, Any] = raw.get("tensor_parallel") or {}
    wanted = section.get("autotp_size") or size
    if wanted != size:
        raise ConfigError(
            f"tensor_parallel.autotp_size = {wanted}, and mpu has {size} model-parallel rank{'s' * (size != 1)}; make"
            " them equal, or leave the key out"
        )
    if size == 1:
        return source, False
    _take_cuts(model, size, rank)
    replicas = "autotp_size" not in section and not cuts_of(model)
    section = {**section, "autotp_size": size}
    if replicas:
        told = f"initialize(mpu=...) has {size} model-parallel ranks, and no parameter of {type(model).__name__} says"
        _refuse_shards(model, _ask(mpu, _TENSOR, "group"), f"{told} that it is cut")
        if rest := _beside_cut_experts(model):
            specs = [{"patterns": rest, "partition_type": "skip"}]
            section.setdefault("partition_config", {"use_default_specs": False, "layer_specs": specs})
    return {**raw, "tensor_parallel": section}, replicas


_FIX = (
    "set tensor_model_parallel = True and partition_dim on every parameter that is cut, as Megatron-LM's layers do; set"
    " tensor_parallel.autotp_size, and deepc cuts the model; or make replicas with equal seeds on these ranks"
)


def _refuse_shards(model: torch.nn.Module, group: Any, told: str) -> None:
    """ArgumentError, on all ranks, unless the ranks of each model-parallel group have equal parameters. Collective over
    all ranks."""
    ranks = dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else None
    named = [(n, p) for n, p in model.named_parameters() if not is_zero_param(p)]  # of these a node has one
    rows = {n: (tuple(p.shape), str(p.dtype), w) for (n, p), w in zip(named, _checksums(p for _, p in named))}
    given: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(given, (ranks, rows))
    for ranks, first in given:
        if ranks is None:
            raise ArgumentError(f"{told}, and its get_model_parallel_group() is no process group; {_FIX}")
        for other in ranks[1:]:
            rows, first = given[other][1], given[ranks[0]][1]
            if rows == first:
                continue
            name = next(n for n in (*first, *rows) if first.get(n) != rows.get(n))
            what = [f"shape {r[name][0]}" if name in r else "no such parameter" for r in (first, rows)]
            raise ArgumentError(
                f"{told}, but {name} differs between the ranks {ranks[0]} and {other}, which share the model"
                f" ({what[0]} and {what[1]}): it is a shard or has another seed; {_FIX}"
            )


def _checksums(tensors: Iterable[torch.Tensor]) -> list[int]:
    flat = [t.detach().cpu().contiguous() for t in tensors]
    return [C.dc_crc32c(0, t.data_ptr(), t.numel() * t.element_size()) if t.numel() else 0 for t in flat]


def _beside_cut_experts(model: torch.nn.Module) -> list[str]:
    """Patterns of all that is not to be cut where layers ask for experts that are; empty: none asks."""
    from .expert.linears import kinds_of_linears

    cut = {n for n, kind in kinds_of_linears(model, lambda name: False).items() if kind != "skip"}
    rest = [n for n, _ in model.named_modules() if n and n not in cut] if cut else []
    return [f"{re.escape(n)}(\\.weight|\\.bias)?$" for n in rest]


def compare_again(
    gather_all: Callable[[torch.Tensor], torch.Tensor],
    groups: Sequence[Sequence[int]],
    parameters: Callable[[], Iterable[tuple[str, torch.Tensor]]],
) -> Callable[[int], None]:
    """What an engine calls with its number of steps before a forward: after 1, 2, 4, 8, ... steps it compares the
    replicas. MisuseError on all ranks, also where one has none that differs, for it would wait for the others.
    gather_all: [n] -> [ranks, n], of all ranks. groups: of those that share a model. Collective over all ranks."""
    due = 1

    def look(steps: int) -> None:
        nonlocal due
        if steps < due:
            return
        due = 1 << steps.bit_length()
        named = list(parameters())
        told = gather_all(torch.tensor(_checksums(t for _, t in named), device="cpu"))
        for ranks in groups:
            for at, rank in enumerate(ranks):
                if torch.equal(told[rank], told[ranks[0]]):
                    continue
                name = named[int((told[rank] != told[ranks[0]]).nonzero()[0])][0]
                raise MisuseError(
                    f"initialize(mpu=...): {name} was equal on the ranks that share the model, and after {steps}"
                    f" step{'s' * (steps != 1)} differs between model-parallel ranks 0 and {at}: it is a shard that"
                    f" does not say so, or these ranks computed different gradients; {_FIX}"
                )

    return look


def _with_sequences(source: Any, mpu: Any) -> tuple[Any, int]:
    """(the configuration with mpu's number of ranks that share a sequence, the number)."""
    size = _ask(mpu, ("sequence",), "world_size") or 1
    if size == 1:
        return source, 1
    raw = dict(read(source.raw if isinstance(source, Config) else source)[0])
    if (asked := raw.setdefault("sequence_parallel_size", size)) != size:
        raise ConfigError(
            f"sequence_parallel_size = {asked}, and mpu has {size} ranks of a sequence; make them equal, or leave the"
            " key out"
        )
    return raw, size


def _take_cuts(model: torch.nn.Module, ranks: int, rank: int) -> None:
    """From the marks that Megatron-LM's layers leave on parameters."""
    for path, module in model.named_modules():
        cuts: dict[str, Cut] = dict(getattr(module, "cuts", None) or {})
        for name, p in module._parameters.items():
            if p is None or name in cuts or not _is_cut(p):
                continue
            if is_zero_param(p):
                raise UnsupportedError(
                    f"initialize(mpu=...): {f'{path}.' if path else ''}{name} is cut, and made under zero.Init, which"
                    " keeps the first rank's values for all ranks: the other ranks' shards are gone. Make the model"
                    " outside of zero.Init, or whole, and set tensor_parallel.autotp_size, with which deepc cuts it"
                )
            dim = getattr(p, "partition_dim", -1)
            parts = getattr(p, "partition_stride", getattr(p, "stride", 1) if hasattr(p, "model_parallel") else 1)
            if not isinstance(dim, int) or not 0 <= dim < p.dim():
                raise UnsupportedError(
                    f"initialize(mpu=...): {path}.{name} is cut, and its partition_dim is {dim!r}: a dimension from 0"
                    f" to {p.dim() - 1} is needed to know the whole"
                )
            shape = [n * ranks if i == dim else n for i, n in enumerate(p.shape)]
            blocks = [shape[dim] // parts] * parts if isinstance(parts, int) and parts > 1 else []
            cuts[name] = Cut.even(shape, dim, ranks, rank, blocks)
        if cuts:
            module.cuts = cuts  # type: ignore[assignment]  # cut.py's


def _is_cut(p: torch.Tensor) -> bool:
    return bool(getattr(p, "tensor_model_parallel", getattr(p, "model_parallel", False)))


def refuse_another_order(mpu: Any, mesh: Mesh) -> None:
    """ConfigError if mpu has the ranks elsewhere than the mesh."""
    rank = dist.get_rank()
    sequence = _ask(mpu, ("sequence",), "world_size") or 1
    data = mesh.dp * mesh.sp if sequence == 1 else mesh.dp  # Megatron's are of samples, if it knows of sequences
    sizes = {"ranks of a sequence": (sequence, mesh.sp if sequence > 1 else 1)}
    if _ask(mpu, ("data",), "world_size") is not None:
        sizes |= {
            "model-parallel ranks": (_ask(mpu, _TENSOR, "world_size"), mesh.tp),
            "pipeline stages": (_ask(mpu, _STAGES, "world_size") or mesh.pp, mesh.pp),
            "data-parallel ranks": (_ask(mpu, ("data",), "world_size"), data),
        }
    if found := [f"{theirs} {what} (here {ours})" for what, (theirs, ours) in sizes.items() if theirs != ours]:
        raise ConfigError(
            f"initialize(mpu=...) has {', '.join(found)}; the configuration's tensor_parallel.autotp_size,"
            f" pipeline.stages and sequence_parallel_size give the mesh {mesh}"
        )
    groups = {"sequence": (_ask(mpu, ("sequence",), "group") if sequence > 1 else None, mesh.group("sp", rank))}
    if "data-parallel ranks" in sizes:
        replicas = mesh.replicas(rank) if sequence == 1 else mesh.group("dp", rank)
        groups |= {
            "model": (_ask(mpu, _TENSOR, "group"), mesh.group("tp", rank)),
            "data": (_ask(mpu, ("data",), "group"), replicas),
        }
    for kind, (group, ours) in groups.items():
        if len(ours) == 1:  # shared with nobody: objects that have no such ranks give any group
            continue
        theirs = tuple(dist.get_process_group_ranks(group)) if isinstance(group, dist.ProcessGroup) else ours
        if sorted(theirs) != sorted(ours):
            raise ConfigError(
                f"initialize(mpu=...): rank {rank} is {kind}-parallel with the ranks {list(theirs)}, and in deepc's"
                f" order with {list(ours)}: ranks that share tensors are neighbours, then come those of a sequence,"
                " then data-parallel ranks, then stages (Megatron-LM's order tp-cp-dp-pp)"
            )
