"""1-bit optimizers in an engine: their warm-up is ordinary training; after it gradients stay on their rank, and what
the ranks exchange is inside the update (zero/step/across/momentum.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch

from ...comm.groups import MultiNodeGroup, SoloGroup, TorchGroup
from ...comm.internode.onebit import NodeExchange
from ...core.ops import torch_dtype as tensor_dtype
from ...errors import UnsupportedError
from ...optim.factory import check_alone
from ...plan.derive import beside_onebit
from ...plan.layout import Layout
from ...plan.mesh import Mesh
from ...plan.plan import Plan
from ...zero.parameters.gathered import broadcast_bytes
from ...zero.step.across.copies import CopiesReducer
from ...zero.step.across.momentum import MomentumUpdate
from ...zero.step.norm import Ride
from ...zero.step.reducers.base import CoreReducer
from ...zero.step.reducers.collective import TorchReducer
from ...zero.tiers.agree import together
from ..base import EngineBase, StepResult
from .policies import Plain

if TYPE_CHECKING:
    from ...comm.groups import Group
    from ...core import memory
    from ...errors import DiskError
    from ...optim.onebit.dropin import OneBitOptimizer
    from ...zero.step.norm import Parts, Rider
    from ...zero.step.reducers.base import Reducer, Tree


class EitherReducer:
    """Reducer: `averaging`, or `local`, which keeps the sums of this rank's gradients. Both fill the same
    accumulators; `keeps` changes between steps."""

    tree: Tree | None = None

    def __init__(self, averaging: Reducer, local: Reducer) -> None:
        self._averaging, self._local = averaging, local
        self.keeps = False

    @property
    def _now(self) -> Reducer:
        return self._local if self.keeps else self._averaging

    def borrow(self, lease: memory.Lease | None) -> None:
        for one in (self._averaging, self._local):
            one.borrow(lease)

    def begin(self, assign: bool, norm: bool) -> None:
        self._now.begin(assign, norm)

    def add(self, index: int, grad: torch.Tensor) -> None:
        self._now.add(index, grad)

    def released(self) -> list[int]:
        return self._now.released()

    def finish(self) -> None:
        self._now.finish()

    def settle(self) -> None:
        self._now.settle()

    def sums(self, begin: int, length: int) -> torch.Tensor:
        return self._now.sums(begin, length)

    def gather(self, flat: torch.Tensor) -> None:
        self._averaging.gather(flat)

    def stats(self) -> dict[str, int]:
        return self._averaging.stats()

    def close(self) -> None:
        for one in (self._averaging, self._local):
            one.close()


class RanksAsParts:
    """norm.py's Parts where gradients are each rank's own: the norm is the root of the mean over ranks of their
    squares, so that all clip by one factor, and a step is skipped on all ranks if one rank's are not finite."""

    repeated: frozenset[int] = frozenset()

    def __init__(self, group: Group) -> None:
        self._group, self.here = group, group.rank

    def together(self, failure: DiskError | None) -> None:
        together(self._group, failure)

    def totals(self, mine: float, riders: Sequence[Rider] = ()) -> list[float]:
        ride = Ride(riders)
        message = ride.message(
            torch.tensor([mine / self.count], dtype=torch.float64, device="cpu"), torch.device("cpu")
        )
        gathered = self._group.gather_all(message)
        ride.arrive(gathered)
        return gathered[self.speakers, -1].tolist()

    @property
    def count(self) -> int:
        """Of parts."""
        return self._group.world

    @property
    def speakers(self) -> list[int]:
        """A rank of each part."""
        return list(range(self._group.world))

    def name(self, part: int) -> str:
        return f"the gradients of rank {part}"


class NodesAsParts(RanksAsParts):
    """The same where the ranks of a node share gradients and states: a part is a node."""

    def __init__(self, group: MultiNodeGroup) -> None:
        super().__init__(group)
        self._nodes, self.here = group, group.node

    @property
    def count(self) -> int:
        return self._nodes.nodes

    @property
    def speakers(self) -> list[int]:
        return [self._nodes.ranks_of(n)[0] for n in range(self._nodes.nodes)]

    def name(self, part: int) -> str:
        return f"the gradients of node {part}"


class OneBitSteps(Plain):
    """Chosen for optimizers of optim/onebit."""

    _sent = 0  # bytes, up to the last step
    _kept = False  # gradients of the step at hand stay on their rank
    _exchanged: dict[str, float] | None = None

    def check_optimizer(self) -> None:
        engine, config = self._engine, self._engine._config
        mesh, on_gpus, stage = engine.mesh, engine.device.type == "cuda", config.zero.stage
        beside = {
            f"ranks on {engine.device.type}": engine.device.type not in ("cpu", "cuda"),
            f"ZeRO stage {stage} and several ranks on GPUs": on_gpus and stage > 0 and engine.everyone.world > 1,
            "offload_optimizer on a GPU": on_gpus and config.zero.offload_optimizer.device != "none",
        }
        beside |= beside_onebit(config, staged=engine.part is not None, tp=mesh.tp, sp=mesh.sp, ep=mesh.ep)
        check_alone(engine.optimizer.base, beside)

    @property
    def update(self) -> MomentumUpdate:
        return cast(MomentumUpdate, self._engine.optimizer.across)

    @property
    def _keeps(self) -> bool:
        """Whether the gradients of the next step are each worker's own."""
        return self._engine.group.world > 1 and not self.update.method.averages

    def make_reducer(self) -> Reducer:
        engine, plan, state = self._engine, self._engine.plan, self._engine.state
        averaging = super().make_reducer()
        if plan.world == 1:
            return averaging
        layout = Layout(plan.layout.numels, 1, plan.layout.bucket_elems)
        alone: Plan = dataclasses.replace(plan, layout=layout, mesh=Mesh(dp=1), rank=0, part=0)
        wire = tensor_dtype(plan.wire)
        local: Reducer
        if engine.device.type == "cpu":
            local = CoreReducer(alone, None, state.acc, state.partial, wire, self.pre_scale)
        else:
            local = TorchReducer(alone, engine.device, state.acc, state.partial, wire, self.pre_scale)
        local.borrow(state.lease)
        self._either = EitherReducer(averaging, local)
        self._either.keeps = self._keeps
        self._parts = RanksAsParts(engine.group)
        return self._either

    def describe(self) -> str:
        method = self.update.method
        return f"{method.title}: a buffer of {method.places.total:,} elements travels in 1 bit ({method.phase} now)"

    @property
    def divisor(self) -> int:
        return 1 if self._keeps else super().divisor

    @property
    def parts(self) -> Parts | None:
        return self._parts if self._keeps else super().parts

    def after_step(self, result: StepResult) -> StepResult:
        exchange = self.update.method.exchange
        sent, whole = exchange.sent_bytes, float(exchange.dense_bytes(sum(self._engine.plan.layout.numels)))
        self._exchanged = {
            "bytes": sent - self._sent + (0.0 if self._kept else whole),
            "uncompressed_bytes": whole,
            "frozen_after": float(getattr(self.update.method, "frozen_at", 0)),
        }
        self._sent = sent
        self.loaded()
        return super().after_step(result)

    @property
    def exchanged(self) -> dict[str, float] | None:
        """bytes: of a rank for the last step; uncompressed_bytes: of an all-reduce of fp32 gradients, which is also
        what a step of the warm-up is counted as. frozen_after: the last step of the warm-up, 0 in it."""
        return self._exchanged

    def loaded(self) -> None:
        self._kept = self._keeps
        if self._engine.group.world > 1:
            self._either.keeps = self._keeps


class OneBitShards(OneBitSteps):
    """ZeRO stages 1 and 2. The ranks of a node are one worker: they share its states, each has a part of them, and what
    they need of each other they get through the node's memory, uncompressed. Every node has a copy of all states, and
    rank k of a node exchanges momentum in 1 bit with the ranks k of the others: what crosses the network is what
    crosses it at stage 0."""

    def __init__(self, engine: EngineBase, base: OneBitOptimizer) -> None:
        super().__init__(engine)
        everyone, name, stage = engine.everyone, type(base).__name__, engine._config.zero.stage
        self._copies: CopiesReducer | None = None
        self._nodes = everyone if isinstance(everyone, MultiNodeGroup) else None
        if engine.group is not everyone or isinstance(everyone, TorchGroup) and not everyone.uneven:
            return  # check_optimizer says what does not exist
        if isinstance(everyone, TorchGroup):
            raise UnsupportedError(
                f"{name} at ZeRO stage {stage} on nodes with different numbers of ranks ({everyone.uneven}) does not"
                " exist: each rank exchanges the momentum of its part of the states with one rank on every other node."
                " Start equally many ranks on each node, or use stage 0"
            )
        if not base.hierarchical and everyone.world > 1:
            raise UnsupportedError(
                f"{name}(hierarchical=False) at ZeRO stage {stage} does not exist: every rank would be a worker with"
                " states of its own, and the ranks of a node share theirs. Remove the argument, or use stage 0"
            )
        if everyone.world == 1:
            return  # as at stage 0: nothing is sent, so nothing is rounded
        base.exchange = NodeExchange(everyone, engine.device)
        if self._nodes is None:
            return
        engine.copy, engine.averaging = everyone.node, everyone
        engine.group = self._nodes.inside if everyone.ranks_per_node > 1 else SoloGroup()
        engine.world_size, engine.global_rank = engine.group.world, engine.group.rank
        for t in (*engine.module.parameters(), *engine.module.buffers()):
            if t.layout == torch.strided:
                broadcast_bytes(everyone, t.data, 0)  # within a node the states do it

    @property
    def _keeps(self) -> bool:
        return self._nodes is not None and not self.update.method.averages

    def make_reducer(self) -> Reducer:
        inside, state = Plain.make_reducer(self), self._engine.state
        if self._nodes is None:
            return inside
        self._copies = CopiesReducer(inside, self._engine.plan, self._nodes, state.acc, state.partial)
        self._copies.keeps = self._keeps
        self._parts = NodesAsParts(self._nodes)
        return self._copies

    def describe(self) -> str:
        nodes, ranks = self._engine.everyone.nodes, self._engine.group.world
        where = f"each of {nodes} nodes has all states, in {ranks} part{'s' * (ranks > 1)}"
        return f"{super().describe()}; {where if nodes > 1 else 'one node has all ranks, and nothing is sent'}"

    def before_step(self) -> None:
        if self._nodes is not None and self._engine.is_gradient_accumulation_boundary():
            self._engine.hooks.take_left_behind(self._nodes)  # a pass of one node alone would wait for the others

    @property
    def divisor(self) -> int:
        return self._engine.group.world if self._keeps else self._engine.everyone.world

    @property
    def parts(self) -> Parts | None:
        return self._parts if self._nodes is not None else self._engine.parts

    def loaded(self) -> None:
        self._kept = self._keeps
        if self._copies is not None:
            self._copies.keeps = self._keeps
