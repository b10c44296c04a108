"""deepspeed.module_inject.layers: the classes by which scripts make, or know, linear layers of which each rank has a
part. The modules are deepc's own (parallel.tensor.layers)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ....errors import ArgumentError, UnsupportedError
from ....parallel.tensor.cut import Cut
from ....parallel.tensor.group import TensorGroup, whole_of
from ....parallel.tensor.layers import Column, ParallelHead, Region, Row, cut_module
from ....parallel.tensor.rules import tp_model_init as _tp_model_init
from ....plan.mesh import shares

_training = False


def set_autotp_mode(training: bool = False) -> None:
    """What is_autotp_training_mode() says. Layers are the same in both modes: they can be trained."""
    global _training
    _training = training


def is_autotp_training_mode() -> bool:
    return _training


def tp_model_init(
    model: nn.Module,
    tp_size: int,
    dtype: torch.dtype | None = None,
    config: Mapping[str, Any] | None = None,
    tp_group: Any = None,
) -> nn.Module:
    """deepc.tp_model_init; from here on the mode is that of training."""
    made = _tp_model_init(model, tp_size, dtype, config, tp_group)
    set_autotp_mode(training=True)
    return made


class _Kind(type):
    """Calls make a module a rank's part of itself, and isinstance() knows such modules, whoever has made them."""

    cut: type | tuple[type, ...]
    parts = False  # of a weight that consists of several, each of which is cut

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.cut) and (not cls.parts or _has_parts(instance))


def _has_parts(module: Any) -> bool:
    return any(len(part) > 1 for part in module.cuts["weight"].parts)


def _made(
    module: Any, mp_group: Any, kind: str, blocks: Sequence[int] = (), gathers: bool = False, name: str | None = None
) -> Any:
    module.__dict__["name"] = name
    group = TensorGroup(None, 0, 1) if mp_group is None else TensorGroup.of(mp_group)
    cut_module(module, kind, Region(group), blocks, gathers)
    mark(module)
    return module


class LinearLayer(metaclass=_Kind):
    """LinearLayer(module, mp_group): a Linear of which each rank has some outputs. `module` itself becomes it."""

    cut = (Column, ParallelHead)

    def __new__(
        cls,
        module: nn.Module,
        mp_group: Any = None,
        skip_partition: bool = False,
        gather_output: bool = False,
        name: str | None = None,
        **_: Any,
    ) -> Any:
        if skip_partition:
            raise UnsupportedError(
                "LinearLayer(skip_partition=True) takes a weight that is cut already; give it the whole Linear"
            )
        return _made(module, mp_group, "column", gathers=gather_output, name=name)


class LinearAllreduce(metaclass=_Kind):
    """LinearAllreduce(module, mp_group): a Linear of which each rank has some inputs, and all the sum."""

    cut = Row

    def __new__(cls, module: nn.Module, mp_group: Any = None, name: str | None = None, **_: Any) -> Any:
        return _made(module, mp_group, "row", name=name)


def _blocks(module: Any, shape: Any, dim: int) -> tuple[int, ...]:
    """DeepSpeed's shape: ((q, k, v), -1) are parts of these sizes, (3, -1) three equal ones."""
    parts = shape[dim] if isinstance(shape, (tuple, list)) and len(shape) == 2 else None
    features = module.weight.shape[dim]
    if isinstance(parts, int) and parts > 0 and features % parts == 0:
        return (features // parts,) * parts
    if isinstance(parts, (tuple, list)) and all(isinstance(n, int) for n in parts):
        return tuple(parts)
    raise ArgumentError(
        f"shape = {shape!r}: two dimensions of a weight {list(module.weight.shape)}, of which number {dim} is a number"
        " of equal parts or their sizes, and the other -1"
    )


class SubParamLinearLayer(metaclass=_Kind):
    """SubParamLinearLayer(module, mp_group, shape): a LinearLayer whose outputs are several parts, as q, k and v."""

    cut, parts = Column, True

    def __new__(
        cls, module: nn.Module, mp_group: Any, shape: Any, partition_dim: int = 0, name: str | None = None, **_: Any
    ) -> Any:
        if partition_dim != 0:
            raise ArgumentError(f"SubParamLinearLayer(partition_dim={partition_dim}): outputs are dimension 0")
        return _made(module, mp_group, "column", _blocks(module, shape, 0), name=name)


class SubParamLinearAllreduce(metaclass=_Kind):
    """The same of the inputs."""

    cut, parts = Row, True

    def __new__(
        cls, module: nn.Module, mp_group: Any, shape: Any, partition_dim: int = 1, name: str | None = None, **_: Any
    ) -> Any:
        if partition_dim != 1:
            raise ArgumentError(f"SubParamLinearAllreduce(partition_dim={partition_dim}): inputs are dimension 1")
        return _made(module, mp_group, "row", _blocks(module, shape, 1), name=name)


class GateUpPack_LinearLayer(metaclass=_Kind):  # DeepSpeed's name
    """A SubParamLinearLayer of two equal parts."""

    cut, parts = Column, True

    def __new__(cls, module: nn.Module, mp_group: Any = None, name: str | None = None, **_: Any) -> Any:
        return _made(module, mp_group, "column", _blocks(module, (2, -1), 0), name=name)


# ---- the whole of a parameter ----------------------------------------------------------------------------------------
def mark(model: nn.Module) -> None:
    """The parameters that are shards say so (tensor_model_parallel), and can be made whole and a part again, as
    DeepSpeed's: p.gather_params([p]), p._tp_partition([p]). Layers of deepc's gain the same for several."""
    for module in model.modules():
        cuts = getattr(module, "cuts", None)
        group = getattr(getattr(module, "region", None), "group", None)
        if not isinstance(cuts, dict) or group is None:
            continue
        whole = _Whole(module, cuts, group)
        for name, cut in cuts.items():
            if (p := module._parameters.get(name)) is not None:
                p.tensor_model_parallel, p.partition_dim = group.size > 1, cut.dim  # type: ignore[attr-defined]
                p.gather_params = whole.gather  # type: ignore[attr-defined]
                p._tp_partition = whole.part  # type: ignore[attr-defined]
        own = module.__dict__
        own["gather_params"], own["_tp_partition"] = whole.gather, whole.part
        own["gather_output"] = getattr(module, "gathers", False) or isinstance(module, ParallelHead)
        own.setdefault("name", None)


class _Whole:
    """Between the shards of a module's parameters and the whole. A shard's memory is kept: an engine's may be part of
    something else, and what is changed in the whole goes there."""

    def __init__(self, module: nn.Module, cuts: dict[str, Cut], group: TensorGroup) -> None:
        self.module, self.cuts, self.group = module, cuts, group
        self.shards: dict[int, torch.Tensor] = {}

    def _cuts_of(self, parameters: Iterable[torch.Tensor | None]) -> list[tuple[torch.Tensor, Cut]]:
        known = {id(self.module._parameters[n]): cut for n, cut in self.cuts.items()}
        return [(p, known[id(p)]) for p in parameters if p is not None and id(p) in known]

    @torch.no_grad()
    def gather(self, parameters: Iterable[torch.Tensor | None]) -> None:
        """Each of these that is a shard becomes whole. Collective over the group."""
        for p, cut in self._cuts_of(parameters):
            if id(p) not in self.shards:
                self.shards[id(p)], p.data = p.data, whole_of(p.data, cut, self.group)

    @torch.no_grad()
    def part(self, parameters: Iterable[torch.Tensor | None]) -> None:
        """Back."""
        for p, cut in self._cuts_of(parameters):
            if (shard := self.shards.pop(id(p), None)) is not None:
                p.data = shard.copy_(cut.take(p.data))

    def __deepcopy__(self, memo: dict[int, Any]) -> _Whole:
        return _Whole(memo.get(id(self.module), self.module), self.cuts, self.group)


class GatherReplacedLayerParams:
    """with GatherReplacedLayerParams(params, module): those of them that are shards are whole inside. Collective."""

    def __init__(self, params: Iterable[torch.Tensor] | torch.Tensor, module: nn.Module, enabled: bool = True) -> None:
        given: list[Any] = [params] if isinstance(params, torch.Tensor) else list(params)
        self.params = [p for p in given if hasattr(p, "gather_params")] if enabled else []

    def __enter__(self) -> None:
        for p in self.params:
            p.gather_params([p])

    def __exit__(self, *exc: Any) -> None:
        for p in self.params:
            p._tp_partition([p])


def get_shard_size_list(
    total_size: int, mp_size: int, name: str | None = None, num_kv_heads: int | None = None
) -> list[int]:
    """How many of `total_size` features each of mp_size ranks has: whole heads where num_kv_heads says how many there
    are. `name`, of DeepSpeed's rules, makes no difference."""
    if num_kv_heads and total_size % num_kv_heads == 0:
        return [n * (total_size // num_kv_heads) for n in shares(num_kv_heads, mp_size)]
    return [Cut.even((total_size,), 0, mp_size, 0).width(r) for r in range(mp_size)]


def get_shard_size(
    total_size: int,
    mp_size: int,
    name: str | None = None,
    rank: int | None = None,
    mp_group: Any = None,
    num_kv_heads: int | None = None,
) -> int:
    """That of a rank; rank: in its group (None: this one's in mp_group, or of all)."""
    here = torch.distributed.get_rank(mp_group) if rank is None else rank
    return get_shard_size_list(total_size, mp_size, name, num_kv_heads)[here]
