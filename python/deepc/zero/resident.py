"""Parameters that stay where they are: every one is a view of the flat space for good. At stage 3 of CPU nodes that is
memory which the node's ranks share, before it each rank's own replica."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, cast

import torch

from ..core.ops import casts
from ..errors import ArgumentError, UnsupportedError
from ..plan.layout import Segment, padded
from ..plan.plan import Plan
from .parameters.gathered import Params, SharedMemory, Whole, broadcast_bytes
from .parameters.param import share, unshare
from .state import Flats, ModelState

if TYPE_CHECKING:
    from ..comm.groups import MemoryGroup


class WholeFlats:
    """The whole flat space: in a segment that the node's ranks share (stage 3), which each node's leader writes, or in
    memory of this rank's own."""

    def make(self, state: ModelState) -> None:
        plan = state.plan
        total, size = plan.layout.total, plan.dtype.itemsize
        state.frozen_flat = None
        if plan.stage == 3 and plan.transport in ("node", "nodes"):
            # At least a page: an engine for evaluation may find every parameter in another engine.
            nbytes = max(4096, (total + plan.frozen_elems) * size)
            state.segment = cast("MemoryGroup", state.group).segment(nbytes)
            state.flat = state.segment.tensor(state.dtype, 0, total)
            if plan.frozen_elems:
                state.frozen_flat = state.segment.tensor(state.dtype, total * size, plan.frozen_elems)
        else:
            state.flat = state.parameters(total)
        made_here = total if plan.host_elems is None else plan.host_elems
        state.flat_host = state.zeros(made_here, state.dtype, "lowp") if state.sends_parameters else None
        self._frozen_at = 0

    def _writes(self, state: ModelState) -> bool:
        return state.group.leader or state.segment is None

    def value(self, state: ModelState, p: torch.nn.Parameter) -> torch.Tensor:
        value = p.data.reshape(-1)
        if state.master is not None and state.plan.world > 1:  # every rank starts from rank 0's values, unrounded
            value = value.to(device=state.device, dtype=torch.float32, copy=True)
            state.group.broadcast(value, 0)
        return value

    def put(self, state: ModelState, index: int, value: torch.Tensor, pieces: Sequence[Segment]) -> None:
        if self._writes(state):
            parameter(state, index).copy_(value)

    def home(self, state: ModelState, index: int, p: torch.nn.Parameter) -> torch.Tensor:
        return parameter(state, index).view(p.shape)

    def put_frozen(self, state: ModelState, p: torch.nn.Parameter) -> None:
        if state.frozen_flat is not None and casts(p):
            view = state.frozen_flat[self._frozen_at : self._frozen_at + p.numel()]
            self._frozen_at += padded(p.numel())
            if self._writes(state):
                view.copy_(p.data.reshape(-1))
            p.data = view.view(p.shape)
            share(p)
            return
        p.data = p.data.to(device=state.device, dtype=state.dtype if casts(p) else p.dtype)
        if state.plan.world > 1:
            broadcast_bytes(state.group, p.data, 0)

    def spread(self, state: ModelState) -> None:
        if state.segment is not None:
            if state.group.leader:
                for shared in (state.flat if state.master is None else None, state.frozen_flat):
                    if shared is not None:
                        state.group.spread(shared)
            state.group.barrier()  # rank 0's values are visible to all
        elif state.plan.world > 1:
            state.group.broadcast(state.flat, 0)

    def follow(self, state: ModelState, index: int) -> None:
        everywhere = state.plan.own_all or state.plan.world == 1
        for rank, s in state.owners(index):
            if rank == state.plan.rank:
                state.follow_piece(s)
            if not everywhere:
                view = state.flat[s.flat_begin : s.flat_begin + s.length]
                (state.group.broadcast if state.segment is None else state.group.spread)(view, rank)
        if state.segment is not None:
            state.group.barrier()


def parameter(state: ModelState, index: int) -> torch.Tensor:
    """[numel] trained parameter `index` in a whole flat space; a view."""
    offset = state.plan.layout.offsets[index]
    return state.flat[offset : offset + state.plan.layout.numels[index]]


class ResidentState(ModelState):
    """The model states of a rank whose parameters stay."""

    def _choose_flats(self) -> Flats:
        return WholeFlats()

    def _bind(self) -> None:
        super()._bind()
        self._remember_places()

    def _remember_places(self) -> None:
        self._flat_at, self._addresses = self.flat.data_ptr(), [p.data_ptr() for p in self.trained]

    def watches(self, p: torch.nn.Parameter) -> bool:
        return self.segment is not None and casts(p)

    def full_param(self, index: int) -> torch.Tensor:
        return parameter(self, index)

    def whole(self, params: Params, writer: int | None) -> Whole:
        return SharedMemory(self.group, params, writer, private=[p for p in params if not self.watches(p)])

    def is_available(self, p: torch.nn.Parameter) -> bool:
        return True

    # ---- memory that users replace -----------------------------------------------------------------------------------
    def _replaced(self, among: Iterable[int] | None = None) -> set[int]:
        if self.flat.data_ptr() != self._flat_at:
            raise UnsupportedError(
                "the memory of the parameters was moved under the engine: by model.share_memory(), or by sending the"
                " model or one of its tensors through torch.multiprocessing. Send copies: {name: t.clone() for name, t"
                " in model.state_dict().items()}"
            )
        indices = range(len(self.trained)) if among is None else among
        return {i for i in indices if not self._is_in_place(i)}

    def _is_in_place(self, i: int) -> bool:
        p = self.trained[i]
        return p.data_ptr() == self._addresses[i] and p.shape == self.shapes[i] and p.is_contiguous()

    @torch.no_grad()
    def take_in_replaced(self, among: Iterable[int] | None = None) -> None:
        for i in self._replaced(among):
            p, shape = self.trained[i], tuple(self.shapes[i])
            if p.shape != shape or p.dtype != self.dtype or p.device != self.flat.device:
                raise ArgumentError(
                    f"the data of parameter '{self.names[i]}' was replaced by a tensor of shape {tuple(p.shape)} in"
                    f" {p.dtype} on {p.device}; after deepc.initialize its shape must stay {shape}, in {self.dtype}"
                    f" on {self.flat.device} (was the model moved, cast or reshaped?)"
                )
            view = parameter(self, i)
            view.copy_(p.data.reshape(-1))
            p.data = view.view(p.shape)

    # ---- another dtype -----------------------------------------------------------------------------------------------
    @torch.no_grad()
    def recast(self, plan: Plan) -> None:
        old, old_frozen = self.flat, self.frozen_flat
        master = cast("torch.Tensor | None", self.master)  # precision "auto" keeps its states in memory
        self.plan = plan
        self.flats.make(self)
        new = self.zeros(plan.owned_elems, torch.float32, "master") if plan.has_master else None
        self.master = new
        for flat, shard, n in plan.slices:
            exact = old[flat : flat + n] if master is None else master[shard : shard + n]
            self.flat[flat : flat + n].copy_(exact)
            if new is not None:
                new[shard : shard + n].copy_(exact)
        for i, p in enumerate(self.trained):
            _replace(p, parameter(self, i).view(p.shape))
            if plan.stage < 3:
                (unshare if self.master is None else share)(p)
        self._remember_places()
        if old_frozen is not None and self.group.leader:
            cast(torch.Tensor, self.frozen_flat).copy_(old_frozen)
        for p, at in self._frozen_places():
            if old_frozen is not None and at is not None and p.data_ptr() == old_frozen[at:].data_ptr():
                _replace(p, cast(torch.Tensor, self.frozen_flat)[at : at + p.numel()].view(p.shape))
            elif p.dtype == old.dtype:
                _replace(p, p.data.to(self.dtype))

    def _frozen_places(self) -> Iterator[tuple[torch.nn.Parameter, int | None]]:
        """The frozen parameters, and where each would lie in frozen_flat."""
        at = 0
        for _, p in self.frozen:
            yield p, at if casts(p) else None
            at += padded(p.numel()) if casts(p) else 0


def _replace(p: torch.nn.Parameter, data: torch.Tensor) -> None:
    """`p` gets this memory and dtype; a gradient that lies in `.grad` follows."""
    grad, p.grad = p.grad, None
    p.data = data
    if grad is not None:
        p.grad = grad.to(data.dtype)
