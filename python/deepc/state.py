"""The model states of one rank: flat parameters, fp32 masters, gradient accumulators, moments; and how the model's parameters
become views of the flat space. Follows the plan."""

from __future__ import annotations

from typing import Sequence

import torch
from torch.autograd.graph import increment_version

from . import memory
from .errors import ConfigError
from .nodes import published
from .param import share
from .partition import BLOCK
from .plan import Plan

# Colors stagger the arrays that the optimizer walks together (ops/base/base.h).
_COLOR = {"params": 0, "acc": 1, "exp_avg": 2, "exp_avg_sq": 3, "master": 4, "max_exp_avg_sq": 5, "lowp": 6}


class ModelState:
    """Owns this rank's share of the model states, as `plan` says.

    flat: [total] plan.dtype, the parameters; node-shared at stage 3, a private replica before. acc, master, moments: [owned]
    fp32. On CPU all lie on huge pages; with `host` (offloaded optimizer on a GPU) all but `flat` lie in host memory."""

    def __init__(self, plan: Plan, named: Sequence[tuple[str, torch.nn.Parameter]], group, device: torch.device, *, host: bool) -> None:
        self.plan, self.group, self.device = plan, group, device
        self.state_device = torch.device("cpu") if host else device
        by_index = sorted(((info.index, p, info.name) for info, (_, p) in zip(plan.params, named) if info.index is not None), key=lambda t: t[0])
        self.trained: list[torch.nn.Parameter] = [p for _, p, _ in by_index]
        self.names: list[str] = [n for _, _, n in by_index]
        self.frozen = [(info.name, p) for info, (_, p) in zip(plan.params, named) if info.index is None]
        owned = plan.owned_elems
        self.segment = None
        self.acc = self.zeros(owned, torch.float32, "acc")
        self.partial = torch.zeros(owned // BLOCK, dtype=torch.float64, device=self.state_device)
        self.master = self.zeros(owned, torch.float32, "master") if plan.has_master else None
        self._make_flat()
        self._bind()

    def zeros(self, numel: int, dtype: torch.dtype, what: str) -> torch.Tensor:
        """A zeroed state array where the states lie; `what` gives it its place among the arrays that are walked together."""
        if self.state_device.type == "cpu":
            return memory.zeros(numel, dtype, _COLOR[what])
        return torch.zeros(numel, dtype=dtype, device=self.state_device)

    def _make_flat(self) -> None:
        plan = self.plan
        frozen_bytes = plan.frozen_elems * plan.dtype.itemsize
        self.frozen_flat = None
        if plan.mode == "resident" and plan.transport in ("node", "nodes"):
            self.segment = self.group.segment(plan.layout.total * plan.dtype.itemsize + frozen_bytes)
            self.flat = self.segment.tensor(plan.dtype, 0, plan.layout.total)
            if plan.frozen_elems:
                self.frozen_flat = self.segment.tensor(plan.dtype, plan.layout.total * plan.dtype.itemsize, plan.frozen_elems)
        elif self.device.type == "cpu":
            self.flat = memory.zeros(plan.layout.total, plan.dtype, _COLOR["params"])
        else:
            self.flat = torch.zeros(plan.layout.total, dtype=plan.dtype, device=self.device)
        host_copy = self.state_device != self.device
        self.flat_host = memory.zeros(plan.layout.total, plan.dtype, _COLOR["lowp"]) if host_copy else None

    @torch.no_grad()
    def _bind(self) -> None:
        """Moves the parameters' values (rank 0's) into the flat space and makes each parameter a view of it, one at a time, so
        that at no time two whole copies exist in this process. Node-shared memory is written by each node's leader; at last rank 0's goes
        to all nodes."""
        plan, seen = self.plan, {}
        writer = self.group.leader or self.segment is None
        for i, p in enumerate(self.trained):
            key = (p.data_ptr(), p.device) if p.numel() else (id(p), None)
            if key in seen and not p.is_meta:
                raise ConfigError(f"parameters '{seen[key]}' and '{self.names[i]}' share memory but are different Parameter objects; tie them by assigning "
                                  "the same Parameter to both modules")
            seen[key] = self.names[i]
        pieces = self._segments_by_param()
        for i, p in enumerate(self.trained):
            offset, n = plan.layout.offsets[i], plan.layout.numels[i]
            value = p.data.reshape(-1)
            view = self.flat[offset: offset + n]
            if self.master is not None and plan.world > 1:  # every rank starts from rank 0's values, unrounded
                value = value.to(device=self.device, dtype=torch.float32, copy=True)
                self.group.broadcast(value, 0)
            if writer:
                view.copy_(value)
            if self.master is not None:
                for s in pieces[i]:
                    self.master[s.shard_begin: s.shard_begin + s.length].copy_(value[s.param_begin: s.param_begin + s.length])
            p.data = view.view(p.shape)
        at = 0
        for _, p in self.frozen:
            if self.frozen_flat is not None and p.is_floating_point():
                view = self.frozen_flat[at: at + p.numel()]
                at += (p.numel() + 63) // 64 * 64
                if writer:
                    view.copy_(p.data.reshape(-1))
                p.data = view.view(p.shape)
            else:
                p.data = p.data.to(device=self.device, dtype=plan.dtype if p.is_floating_point() else p.dtype)
                if plan.world > 1:
                    self._broadcast_any(p.data)
        if self.segment is not None or self.master is not None:  # writes of others must be seen: to refuse them, or to follow
            for p in self.trained:
                share(p)
        if self.segment is not None:
            if self.group.leader:
                for shared in (self.flat if self.master is None else None, self.frozen_flat):
                    if shared is not None:
                        self.group.spread(shared)
            self.group.barrier()  # rank 0's values are visible to all
        elif plan.world > 1:
            self.group.broadcast(self.flat, 0)
        self.versions = [p._version for p in self.trained]

    def _broadcast_any(self, tensor: torch.Tensor) -> None:
        if tensor.is_contiguous():
            self.group.broadcast(tensor.view(-1), 0)
        else:
            copy = tensor.contiguous()
            self.group.broadcast(copy.view(-1), 0)
            tensor.copy_(copy)

    def _segments_by_param(self) -> list[list]:
        out: list[list] = [[] for _ in self.trained]
        for s in self.plan.segments:
            out[s.param].append(s)
        return out

    def runs(self, group_of: Sequence[int]) -> list[tuple[int, int, int, int]]:
        """(optimizer group, flat_begin, owned_begin, length): the longest stretches of this rank's share that belong to one
        group, padding between parameters included (it is zero and stays zero)."""
        runs: list[list[int]] = []
        for s in self.plan.segments:
            g = group_of[s.param]
            if runs:
                last = runs[-1]
                gap = s.flat_begin - (last[1] + last[3])
                if last[0] == g and 0 <= gap < 64 and s.shard_begin - (last[2] + last[3]) == gap:
                    last[3] += gap + s.length
                    continue
            runs.append([g, s.flat_begin, s.shard_begin, s.length])
        return [tuple(r) for r in runs]

    def owned_views(self, owned: torch.Tensor):
        """(segment, view of `owned`) for each of this rank's segments."""
        return [(s, owned[s.shard_begin: s.shard_begin + s.length]) for s in self.plan.segments]

    def bump_versions(self) -> None:
        """Makes autograd see that the parameters were written (C writes, and other ranks' writes, are invisible to it)."""
        increment_version(self.trained)
        self.versions = [p._version for p in self.trained]

    def stray_write(self) -> int:
        """Index of the first trained parameter that was written since the last step by someone else, or -1."""
        return next(iter(self.changed()), -1)

    def changed(self) -> list[int]:
        """Indices of the trained parameters that were written since the last step by someone else."""
        return [i for i, p in enumerate(self.trained) if p._version != self.versions[i]]

    @torch.no_grad()
    def master_from_params(self, indices: Sequence[int]) -> None:
        """fp32 masters of these parameters follow their 16-bit values where a user changed them; elsewhere they keep their precision."""
        if self.master is None or not indices:
            return
        chosen = set(indices)
        rounded = published(self.plan, self.master, self.plan.dtype) if self.plan.parameters_as else None
        for s in self.plan.segments:
            if s.param in chosen:
                master = self.master[s.shard_begin: s.shard_begin + s.length]
                now = self.flat[s.flat_begin: s.flat_begin + s.length].to(master.device)
                was = master.to(now.dtype) if rounded is None else rounded[s.shard_begin: s.shard_begin + s.length]
                master.copy_(torch.where(was == now, master, now.float()))
