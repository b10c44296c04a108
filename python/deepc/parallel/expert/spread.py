"""A model whose experts are spread over neighbouring ranks (of those that hold the same stage and tensor shards): which
parameters those are, their numbers among all ranks' experts, and what gradients go through."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from ...errors import UnsupportedError
from ...plan.mesh import Mesh
from ...zero.parameters.gathered import is_zero_param
from ..axes import AxisGroup, axis_group
from .gate import TopKGate
from .group import ExpertGroup, expert_group, mesh_with_experts
from .layer import MoE

if TYPE_CHECKING:
    from ...config.tree import Config


def ranks_of_experts(model: torch.nn.Module) -> int:
    """ep_size of the model's layers; 1 without any. UnsupportedError for several sizes above 1."""
    return one_size(m.ep_size for m in model.modules() if isinstance(m, MoE))


def one_size(found: Iterable[int]) -> int:
    """The one size above 1 among those of a model's layers or stages; 1 without any. UnsupportedError for several."""
    sizes = sorted(set(found) - {1})
    if len(sizes) > 1:
        raise UnsupportedError(
            f"MoE: layers with ep_size {' and '.join(map(str, sizes))} in one model; use one size for all (beside it"
            " ep_size=1 is possible)"
        )
    return sizes[0] if sizes else 1


def refuse_experts(model: torch.nn.Module, size: int, device: torch.device) -> None:
    """UnsupportedError for experts that are spread over `size` ranks where deepc can't."""
    if size == 1:
        return
    if device.type != "cpu":
        raise UnsupportedError(f"MoE: ep_size = {size} with GPUs does not exist; use ep_size=1")
    if any(is_zero_param(p) for p in model.parameters()):
        raise UnsupportedError(f"MoE: ep_size = {size} under zero.Init does not exist; make the model without it")


def spread_tensors(model: torch.nn.Module) -> frozenset[int]:
    """ids of the parameters and buffers of experts that are spread over ranks."""
    experts = [m.deepspeed_moe.experts for m in model.modules() if isinstance(m, MoE) and m.ep_size > 1]
    return frozenset(id(t) for e in experts for t in (*e.parameters(), *e.buffers()))


def connected(model: torch.nn.Module, mesh: Mesh, device: torch.device) -> Mesh:
    """The mesh with the ranks that share the model's experts, which are connected where there are any, as are those
    that share a sequence. The errors are those of refuse_experts and mesh_with_experts. Collective."""
    share_sequences(model, mesh)
    refuse_experts(model, size := ranks_of_experts(model), device)
    if size > 1:
        mesh = mesh_with_experts(mesh, size)
        connect(model, expert_group(mesh))
    return mesh


class _Sequence(AxisGroup):
    """The ranks that share a sequence, as gates know them. A pickled model knows none: initialize connects it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def share_sequences(model: torch.nn.Module, mesh: Mesh) -> None:
    """Its gates' load-balance losses are of whole sequences. Collective, unless the mesh shares none."""
    group = axis_group(mesh, "sp", _Sequence.of) if mesh.sp > 1 else None
    for gate in model.modules():
        if isinstance(gate, TopKGate):
            gate.sequence = group


def connect(model: torch.nn.Module, group: ExpertGroup) -> None:
    """Its layers with spread experts send tokens through `group`."""
    for layer in model.modules():
        if isinstance(layer, MoE) and layer.ep_size > 1:
            layer.deepspeed_moe.group = group


class _Numbered(NamedTuple):
    """Where the name of a tensor of spread experts has the expert's number: before, number, after."""

    before: str
    number: int
    after: str
    group: ExpertGroup
    own: int  # experts of this rank

    @property
    def first(self) -> int:
        """This rank's first expert, among all."""
        return self.group.rank * self.own


def _numbered(name: str, model: torch.nn.Module) -> _Numbered | None:
    before, mark, after = name.partition(".deepspeed_moe.experts.deepspeed_experts.")
    if not mark and (mark := "deepspeed_moe.experts.deepspeed_experts.") and name.startswith(mark):
        before, after = "", name.removeprefix(mark)
    number, _, rest = after.partition(".")
    try:
        layer = model.get_submodule(before) if mark in name else None
    except AttributeError:
        return None
    if not isinstance(layer, MoE) or layer.deepspeed_moe.group is None or not number.isdecimal():
        return None
    return _Numbered(before + mark, int(number), f".{rest}", layer.deepspeed_moe.group, layer.num_local_experts)


def name_among_all(name: str, model: torch.nn.Module) -> str:
    """Of a parameter: the same with an expert's number among all ranks' experts, which is what checkpoints know."""
    if (found := _numbered(name, model)) is None:
        return name
    return f"{found.before}{found.number + found.first}{found.after}"


def is_spread(name: str, model: torch.nn.Module) -> bool:
    """Whether it is the name of something inside of an expert that is spread over ranks."""
    return _numbered(name, model) is not None


def gather_experts(state_dict: dict[str, torch.Tensor], model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A state_dict of this rank -> that of the whole model (or stage), all experts in it. Collective."""
    whole = {}
    for name, t in state_dict.items():
        if (found := _numbered(name, model)) is None:
            whole[name] = t
            continue
        before, number, rest, group, own = found
        parts: list[Any]
        if isinstance(t, torch.Tensor):
            parts = [torch.empty_like(t, memory_format=torch.contiguous_format) for _ in range(group.size)]
            dist.all_gather(parts, t.detach().contiguous(), group=group.process_group)
        else:  # a module's further state (get_extra_state)
            parts = [None] * group.size
            dist.all_gather_object(parts, t, group=group.process_group)
        whole.update({f"{before}{number + r * own}{rest}": part for r, part in enumerate(parts)})
    return whole


def own_experts(state_dict: dict[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    """A state_dict of the whole model -> this rank's: its experts, by their numbers here."""
    mine = {}
    for name, t in state_dict.items():
        if (found := _numbered(name, model)) is None:
            mine[name] = t
        elif 0 <= (number := found.number - found.first) < found.own:
            mine[f"{found.before}{number}{found.after}"] = t
    return mine


def group_of_experts(model: torch.nn.Module) -> ExpertGroup | None:
    """That of the model's layers with spread experts, which are connected; None: it has no such."""
    groups = (m.deepspeed_moe.group for m in model.modules() if isinstance(m, MoE))
    return next((g for g in groups if g is not None), None)


def shared_gradients(model: torch.nn.Module, config: Config) -> SharedGradients | None:
    """Of a model whose experts are spread and connected; None of others."""
    if (group := group_of_experts(model)) is None:
        return None
    return SharedGradients(spread_tensors(model), group, config)


class SharedGradients:
    """Gradients over the ranks that share a model's experts: an expert's has all their tokens, the others' are added up
    over them; where the configuration averages gradients both are divided by their number. Then the mean (or sum) over
    ranks with the same experts is that over all."""

    def __init__(self, spread: frozenset[int], group: ExpertGroup, config: Config) -> None:
        self._spread, self.group, self._means = spread, group, config.gradient_allreduce_op != "sum"

    def of(self, gradient: torch.Tensor, p: int) -> torch.Tensor:
        """Of the parameter with id `p`, in new memory, or `gradient` itself. Collective: all ranks of the group come
        with the same parameters in the same order."""
        if gradient.layout == torch.sparse_coo:  # of an embedding; a hook gives back what it got
            return self.of(gradient.to_dense(), p).to_sparse(gradient.sparse_dim())
        if p in self._spread:
            return gradient / self.group.size if self._means else gradient
        total = self.group.sum_of(gradient)
        return total.div_(self.group.size) if self._means else total

    def hook(self, parameters: Iterable[torch.nn.Parameter]) -> list[Any]:
        """Every gradient that reaches one of them goes through `of`. Handles whose remove() ends it. Backwards of the
        ranks must reach the same parameters."""
        return [p.register_hook(functools.partial(self.of, p=id(p))) for p in parameters if p.requires_grad]
