"""The ranks that compute every layer together, and what they tell each other."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ...core.lib import C
from ...errors import ArgumentError, MisuseError
from ...plan.mesh import Mesh
from ..axes import AxisGroup, axis_group, without_values
from .cut import Cut, cuts_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TensorGroup(AxisGroup):
    """The ranks that hold the shards of one model."""

    device_mesh: DeviceMesh | None = None  # dtensor.py's

    def gather(self, t: torch.Tensor, dim: int, widths: Sequence[int]) -> torch.Tensor:
        """All ranks' `t` one after the other along `dim`, of which rank r has widths[r]."""
        if self.size == 1:
            return t
        dim %= t.dim()
        if short := max(widths) - t.shape[dim]:
            t = F.pad(t, [0, 0] * (t.dim() - 1 - dim) + [0, short])
        t = t.contiguous()
        rows = torch.empty((self.size, *t.shape), dtype=t.dtype, device=t.device)
        if without_values(t):
            pass
        elif (core := self._core(t)) is not None:
            core.all_gather(rows, t)
        else:
            _all_gather(rows.view(-1), t.view(-1), group=self.process_group)
        return torch.cat([rows[r].narrow(dim, 0, w) for r, w in enumerate(widths)], dim)

    def gather_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """[n] -> [size, n], rows in the order of ranks."""
        return self.rows_of(tensor.contiguous()).view(self.size, -1)

    def rows_of(self, t: torch.Tensor) -> torch.Tensor:
        """[size * n]: all ranks' `t` [n] (contiguous), one after the other."""
        if self.size == 1:
            return t
        rows = torch.empty(self.size * t.numel(), dtype=t.dtype, device=t.device)
        if (core := self._core(t)) is not None:
            core.all_gather(rows, t)
        else:
            _all_gather(rows, t, group=self.process_group)
        return rows

    def scatter_sum(self, t: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's of equal parts, along `dim`, of all ranks' `t` added up."""
        if self.size == 1:
            return t
        parts = torch.stack(t.chunk(self.size, dim))
        out = torch.empty_like(parts[0])
        if without_values(t):
            pass
        elif (core := self._core(t)) is not None:
            core.reduce_scatter(out, parts)
        else:
            _reduce_scatter(out.view(-1), parts.view(-1), group=self.process_group)
        return out

    def part(self, t: torch.Tensor, dim: int, widths: Sequence[int]) -> torch.Tensor:
        """This rank's part of `t`, a copy."""
        return t.narrow(dim, sum(widths[: self.rank]), widths[self.rank]).contiguous()


def tensor_group(mesh: Mesh, backend: str = "deepc") -> TensorGroup:
    """That of this rank along the mesh's tensor axis; made once for a default group. Collective over all ranks."""
    if mesh.tp == 1:
        return TensorGroup(None, 0, 1)
    return axis_group(mesh, "tp", TensorGroup.of, backend)


def groups_of(model: torch.nn.Module) -> Iterator[TensorGroup]:
    """Those that the layers of a model are cut over."""
    for module in model.modules():
        if isinstance(group := getattr(getattr(module, "region", None), "group", None), TensorGroup):
            yield group


def group_of(model: torch.nn.Module) -> TensorGroup:
    """ArgumentError for a model that is not cut."""
    if (group := next(groups_of(model), None)) is None:
        raise ArgumentError(f"no module of {type(model).__name__} is cut over tensor-parallel ranks")
    return group


@torch.no_grad()
def whole_of(shard: torch.Tensor, cut: Cut, group: TensorGroup) -> torch.Tensor:
    """The parameter (or a tensor of its shape) of which `shard` is this rank's part. Collective over the group."""
    widths = tuple(cut.width(r) for r in range(cut.ranks))
    rows = group.gather(shard.detach(), cut.dim, widths)
    whole = torch.empty(cut.shape, dtype=shard.dtype, device=shard.device)
    for rank, part in enumerate(rows.split(widths, cut.dim)):
        cut.put(whole, part, rank)
    return whole


def whole_state_dict(
    model: torch.nn.Module, state_dict: Mapping[str, torch.Tensor], group: TensorGroup
) -> dict[str, torch.Tensor]:
    """Of the tensors of `state_dict` that are shards of the model's parameters: the wholes, by their names; what is
    tied has one. Collective over the group."""
    cuts, wholes, out = cuts_of(model), dict[int, torch.Tensor](), dict[str, torch.Tensor]()
    for name, p in model.named_parameters(remove_duplicate=False):
        if (cut := cuts.get(id(p))) is not None and name in state_dict:
            if id(p) not in wholes:
                wholes[id(p)] = whole_of(state_dict[name], cut, group)
            out[name] = wholes[id(p)]
    return out


def refuse_unequal(batch: Any, group: TensorGroup) -> None:
    """MisuseError, on all ranks of the group, if their batches (tensors in nested tuples, lists and dicts) are not
    equal: each would train on a part of another one's. Collective over the group."""
    found: list[torch.Tensor] = []

    def walk(x: Any) -> None:
        if isinstance(x, torch.Tensor):
            found.append(x.detach())
        elif isinstance(x, Mapping):
            for v in x.values():
                walk(v)
        elif isinstance(x, (list, tuple)):
            for v in x:
                walk(v)

    walk(batch)
    here = [t for t in found if t.device.type == "cpu" and t.layout is torch.strided and not without_values(t)]
    flat = [t.contiguous() for t in here if t.numel()]
    words = [C.dc_crc32c(0, t.data_ptr(), t.numel() * t.element_size()) for t in flat]
    mine = torch.tensor(
        [[zlib.crc32(str([*words, [tuple(t.shape) for t in found]]).encode())]], dtype=torch.int64, device="cpu"
    )
    told = group.gather(mine, 0, (1,) * group.size).view(-1).tolist()
    if other := [r for r, word in enumerate(told) if word != told[0]]:
        raise MisuseError(
            f"ranks that share a model's tensors got different batches: tensor-parallel rank {other[0]} another one"
            " than rank 0. They need equal ones: draw samples by engine.mesh.coordinates(rank).dp of engine.mesh.dp, or"
            " give training_data to initialize (docs/tensor-parallel.md)"
        )
