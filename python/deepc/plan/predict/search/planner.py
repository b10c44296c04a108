"""Layouts and what they cost: C's search (zero/planner.h) with names."""

from __future__ import annotations

import ctypes
import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from ....core import lib as _lib
from ....core.lib import call
from ....errors import ArgumentError, OutOfMemoryError
from ...mesh import Mesh
from ...schedule import KINDS, Costs, Schedule, Timeline, default_chunks
from .cluster import Cluster
from .models import Model
from .space import OFFLOADS, Space
from .why import Tier, impossible, missing

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_KEPT = 10_000  # layouts that a search hands back at most
_BATCH = 1 << 51  # samples of a step: as many as the largest dp, micro-batch and accumulation make


@dataclass(frozen=True)
class Layout:
    """One way to train: sizes of the axes (mesh.py), the ZeRO stage, where optimizer states go (one of OFFLOADS), the
    micro-batch of a rank and how many of them a step has, the pipeline's schedule, whether blocks are computed
    again."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    sp: int = 1
    ep: int = 1
    stage: int = 0
    offload: str = "none"
    recompute: bool = False
    schedule: str = "1f1b"
    chunks: int = 1
    micro: int = 1
    accumulation: int = 1

    def core(self) -> _lib.PlannerLayout:
        """As C takes it. ArgumentError for a name that is none."""
        if self.offload not in OFFLOADS or self.schedule not in KINDS:
            raise ArgumentError(
                f"layout: offload {self.offload!r} or schedule {self.schedule!r} is none of {', '.join(OFFLOADS)};"
                f" {', '.join(KINDS)}"
            )
        same = {f.name: getattr(self, f.name) for f in fields(self)}
        same |= {"offload": OFFLOADS.index(self.offload), "schedule": KINDS.index(self.schedule)}
        return _lib.PlannerLayout(**{k: int(v) for k, v in same.items()})

    @classmethod
    def of(cls, c: _lib.PlannerLayout) -> Layout:
        same = {f.name: int(getattr(c, f.name)) for f in fields(cls)}
        named: dict[str, Any] = {
            "offload": OFFLOADS[same["offload"]],
            "schedule": KINDS[same["schedule"]],
            "recompute": bool(same["recompute"]),
        }
        return cls(**{**same, **named})

    def mesh(self, ranks_per_node: int = 0) -> Mesh:
        return Mesh(dp=self.dp, pp=self.pp, sp=self.sp, tp=self.tp, ep=self.ep, ranks_per_node=ranks_per_node)

    def __str__(self) -> str:
        sizes = [f"{a} {getattr(self, a)}" for a in ("pp", "dp", "sp", "tp", "ep") if getattr(self, a) > 1]
        out = [" x ".join(sizes) or "one rank", f"ZeRO {self.stage}", f"micro-batch {self.micro} x {self.accumulation}"]
        if self.pp > 1:
            out.append(self.schedule + (f" of {self.chunks}" if self.chunks > 1 else ""))
        if self.offload != "none":
            out.append(f"offload {self.offload}")
        if self.recompute:
            out.append("recompute")
        return ", ".join(out)


@dataclass(frozen=True)
class Cost:
    """Seconds of a step and of its parts (those of the slowest stage), bytes of the fullest rank's device, of the
    fullest node's host memory and disk, what there is of each, and the largest part of it that is asked for."""

    step: float
    compute: float
    recompute: float
    tensor: float
    sequence: float
    expert: float
    gather: float
    bubble: float
    data: float
    update: float
    offload: float
    device_bytes: float
    host_bytes: float
    disk_bytes: float
    device_room: float
    host_room: float
    disk_room: float
    overflow: float

    @property
    def fits(self) -> bool:
        return self.overflow <= 1

    def parts(self) -> dict[str, float]:
        """Seconds by what they go into; their sum is the step."""
        return {
            "compute": self.compute,
            "computing again": self.recompute,
            "tensor parallelism": self.tensor,
            "sequence parallelism": self.sequence,
            "expert parallelism": self.expert,
            "gathering parameters": self.gather,
            "pipeline bubble": self.bubble,
            "gradients and parameters over dp": self.data,
            "update": self.update,
            "offload": self.offload,
        }


@dataclass(frozen=True)
class Stage:
    """A part of the model: its layers [begin, end), the rank of the pipeline that has it, seconds of a micro-batch,
    bytes on each of its ranks (of all the stages it has)."""

    begin: int
    end: int
    rank: int
    forward: float
    backward: float
    hop: float
    params: float
    states_bytes: float
    activation_bytes: float


@dataclass(frozen=True)
class Case:
    """What is planned for. batch: samples of a step."""

    cluster: Cluster
    model: Model
    batch: int
    precision: str

    def core(self) -> tuple[Any, int, _lib.PlannerModel]:
        kinds = (_lib.PlannerNodes * len(self.cluster.nodes))(*(n.core(self.precision) for n in self.cluster.nodes))
        rows, m, item = self.model.core_rows(), self.model, _BYTES[self.precision]
        # AdamW: fp32 gradient, moments and parameters are read, the latter three and a 16-bit copy written; a gradient
        # is read and added to its accumulator
        update = self.cluster.update_traffic if self.cluster.update_traffic is not None else (28 if item == 4 else 30)
        batch = self.cluster.batch_traffic if self.cluster.batch_traffic is not None else item + 8
        model = _lib.PlannerModel(
            nlayers=len(rows),
            heads=m.heads,
            kv_heads=m.kv_heads,
            seq=m.seq,
            experts=m.experts,
            batch=self.batch,
            layers=rows,
            item=item,
            grad=4,
            wire=item,
            master=int(item < 4),
            state_size=4,
            nstates=2,
            overlap=self.cluster.overlap,
            update_traffic=update,
            batch_traffic=batch,
        )
        return kinds, len(kinds), model


@dataclass(frozen=True)
class Predicted:
    """A layout with its cost. uneven: as of Space, which says how it was priced."""

    case: Case
    layout: Layout
    cost: Cost
    uneven: bool = True

    @property
    def tokens_per_second(self) -> float:
        return self.case.batch * self.case.model.seq / self.cost.step

    @property
    def utilization(self) -> float:
        """Part of the attainable FLOP/s that the model's own products take (nothing computed again)."""
        rate = sum(n.count * n.ranks * n.flops[self.case.precision] for n in self.case.cluster.nodes)
        return self.case.model.flops() * self.case.batch / self.cost.step / rate

    def stages(self) -> tuple[tuple[Stage, ...], tuple[int, ...]]:
        """Its stages along the model, and the micro-batches of each of the dp replicas."""
        return _explained(self.case, self.layout, self.uneven)[1:]

    def timeline(self) -> tuple[Schedule, Timeline] | None:
        """The pipeline's schedule with the times of its stages; None for more actions than a picture has."""
        lay = self.layout
        if lay.pp * lay.chunks * lay.accumulation > 1 << 14:
            return None
        schedule = Schedule.make(lay.schedule, stages=lay.pp, micro_batches=lay.accumulation, chunks=lay.chunks)
        stages = self.stages()[0]
        costs = [Costs(s.forward, s.backward / 2, s.backward / 2) for s in stages]
        return schedule, schedule.simulate(costs, [s.hop for s in stages[:-1]] if len(stages) > 1 else 0.0)

    def limit(self, unlimited: Predicted | None = None) -> str:
        """One sentence: what the step's time goes into, beside computing, and whether memory is in the way."""
        parts = {k: v for k, v in self.cost.parts().items() if k != "compute"}
        worst = max(parts, key=lambda k: parts[k])
        share = self.cost.compute / self.cost.step
        text = f"{share:.0%} of the step is computing"
        if parts[worst] > 0.02 * self.cost.step:
            text += f", {parts[worst] / self.cost.step:.0%} is {worst}"
        if unlimited is not None and not unlimited.cost.fits and unlimited.cost.step < 0.98 * self.cost.step:
            text += (
                f"; memory is in the way of a step of {unlimited.cost.step:.3g} s ({unlimited.layout}), which needs"
                f" {unlimited.cost.overflow:.2g} times what there is"
            )
        return text


@dataclass(frozen=True)
class Found:
    """What a search gives: the layouts that fit, fastest first; how many it priced; the fastest whatever it needs, and
    the one that needs least of what there is (its overflow says how much)."""

    best: tuple[Predicted, ...]
    visited: int
    fastest: Predicted
    closest: Predicted


def case_of(cluster: Cluster, model: Model, batch: int | None = None, precision: str | None = None) -> Case:
    """batch: samples of a step; None: 4 for each rank. precision: fp32, bf16 or fp16; None: what the cluster has."""
    precision = precision or cluster.default_precision
    if precision not in _BYTES:
        raise ArgumentError(f"precision {precision!r} is none of {', '.join(_BYTES)}")
    batch = 4 * cluster.ranks if batch is None else batch
    if type(batch) is not int or not 1 <= batch <= _BATCH:
        raise ArgumentError(f"batch {batch!r} must be a whole number from 1 to {_BATCH}: samples of a step")
    if model.value_dim != model.head_dim and not cluster.on_devices:
        model = replace(model, scores=True, score_elems=1.0)  # on CPUs torch has no fused attention for these
    return Case(cluster, model, batch, precision)


def _cost(c: _lib.PlannerCost) -> Cost:
    return Cost(**{f.name: float(getattr(c, f.name)) for f in fields(Cost)})


def _explained(case: Case, layout: Layout, uneven: bool) -> tuple[Cost, tuple[Stage, ...], tuple[int, ...]]:
    kinds, n, model = case.core()
    cost, stages = _lib.PlannerCost(), (_lib.PlannerStage * max(1, layout.pp * layout.chunks))()
    micro, core = (ctypes.c_int64 * max(1, layout.dp))(), layout.core()
    call("dc_planner_cost_of", kinds, n, model, core, int(uneven), ctypes.byref(cost), stages, micro)
    told = tuple(Stage(**{f.name: getattr(s, f.name) for f in fields(Stage)}) for s in stages)
    return _cost(cost), told, tuple(micro)


def price(case: Case, layout: Layout, uneven: bool = True) -> Predicted:
    """What one layout costs. ArgumentError says why the model or the cluster can't have it."""
    return Predicted(case, layout, _explained(case, layout, uneven)[0], uneven)


def search(case: Case, space: Space | None = None, keep: int = 8) -> Found:
    """The `keep` fastest layouts that fit. ArgumentError if none is possible at all, whatever it needs."""
    if not 1 <= keep <= _KEPT:
        raise ArgumentError(f"keep {keep} must be 1 to {_KEPT} layouts")
    space = space or Space()
    kinds, n, model = case.core()
    found, told = (_lib.PlannerFound * keep)(), _lib.PlannerTold()
    call("dc_planner_search", kinds, n, model, space.core(), found, keep, ctypes.byref(told))
    if not told.visited:
        raise ArgumentError(
            f"no layout of {case.cluster.ranks} ranks is possible for {case.model.name}:"
            f" {impossible(case.cluster, case.model, case.batch, space)}"
        )

    def of(f: _lib.PlannerFound) -> Predicted:
        return Predicted(case, Layout.of(f.layout), _cost(f.cost), space.uneven)

    best = tuple(of(f) for f in found[: told.found])
    return Found(best, told.visited, of(told.fastest), of(told.closest))


def require_fit(found: Found) -> Predicted:
    """The fastest layout that fits. OutOfMemoryError names the closest one and what would make it fit."""
    if found.best:
        return found.best[0]
    near, cost = found.closest, found.closest.cost
    tiers = [
        Tier("memory of a device", cost.device_bytes, cost.device_room),
        Tier("memory of a node", cost.host_bytes, cost.host_room),
        Tier("disk of a node", cost.disk_bytes, cost.disk_room),
    ]
    nodes = f"about {max(2, math.ceil(cost.overflow))} times the nodes, " if math.isfinite(cost.overflow) else ""
    raise OutOfMemoryError(
        f"no layout of {near.case.model.name} fits on {near.case.cluster.name}. Closest: {near.layout}; it needs"
        f" {missing(tiers)}. What would make it fit: that much memory, {nodes}fewer samples or shorter sequences, or a"
        " disk (memory.disk, bandwidth.disk) to offload to"
    )


def default_layout(**sizes: Any) -> Layout:
    """A Layout whose chunks follow from its schedule."""
    sizes.setdefault("chunks", default_chunks(str(sizes.get("schedule", "1f1b"))))
    return Layout(**sizes)


def to_dict(p: Predicted) -> dict[str, Any]:
    """JSON types only."""
    stages, micro = p.stages()
    return {
        "layout": asdict(p.layout),
        "cost": {**asdict(p.cost), "fits": p.cost.fits},
        "tokens_per_second": p.tokens_per_second,
        "utilization": p.utilization,
        "stages": [asdict(s) for s in stages],
        "micro_batches_of_replicas": list(micro),
    }
