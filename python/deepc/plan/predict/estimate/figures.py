"""What is predicted, and how it is told."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

MIB = 2.0**20


@dataclass(frozen=True)
class Row:
    """Bytes of one kind: `host` and `device` on each rank, `shared` once per node."""

    name: str
    host: int = 0
    shared: int = 0
    device: int = 0


@dataclass(frozen=True)
class Option:
    """A change that makes a run smaller, and what it would take."""

    change: str
    rank_peak: int
    node_peak: int
    fits: bool


@dataclass(frozen=True)
class MemoryEstimate:
    """A prediction. All sizes in bytes, above what the process holds before deepc.initialize (the model is there then:
    what initialize frees of it counts negative).

    rows: what there is at the peak. rank_peak: of each rank, without what is shared. shared: once per node.
    device_peak: of each rank on its device. node_peak: ranks_per_node * rank_peak + shared. init_peak: of a rank while
    initialize moves the model. activations: held for backward after the forward; live_peak: most that tensors of a
    micro-step hold at once; heap_peak: most that the C library's heap keeps resident for them. between_steps: model
    states of a node. backward_bound: the most that a node holds of model states and gradients during backward. tensor:
    ranks that share a model's tensors (figures are the first one's). experts: ranks that share its experts. stages:
    peaks of the ranks of each stage of a pipeline (the other figures are the dearest one's, and the node's). available:
    what the node has left, None if not asked. known: False without a sample batch (activations are not included then).
    """

    stage: int
    world: int
    ranks_per_node: int
    nodes: int
    dtype: str
    parameters: int
    device: str
    rows: tuple[Row, ...]
    rank_peak: int
    init_peak: int
    shared: int
    node_peak: int
    device_peak: int
    activations: int
    live_peak: int
    heap_peak: int
    largest_gradient: int
    between_steps: int
    backward_bound: int
    known: bool
    tensor: int = 1
    experts: int = 1
    stages: tuple[int, ...] = ()
    steps: int = 3
    available: int | None = None
    notes: tuple[str, ...] = ()
    options: tuple[Option, ...] = field(default=())

    @property
    def fits(self) -> bool:
        """Whether the node has room for its ranks, as far as that was asked."""
        return self.available is None or self.node_peak <= self.available

    def to_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return {**asdict(self), "fits": self.fits}

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> list[str]:
        ranks = f"{self.world} rank{'s' * (self.world > 1)}" + (f" on {self.nodes} nodes" if self.nodes > 1 else "")
        if self.stages:
            stage = self.stages.index(self.rank_peak) if self.rank_peak in self.stages else 0
            ranks += f" in pipelines of {len(self.stages)}, stage {stage} of which is shown"
        ranks += f", {self.tensor} of them share a model's tensors" if self.tensor > 1 else ""
        ranks += f", {self.experts} of them share a model's experts" if self.experts > 1 else ""
        out = [
            f"memory: ZeRO stage {self.stage}, {ranks}, {self.parameters:,} parameters trained in {self.dtype}, on"
            f" {self.device}; peak above the process before initialize"
        ]
        device = any(r.device for r in self.rows)
        out.append(f"  {'MiB':<44}{'each rank':>12}{'shared, once a node':>22}" + (f"{'device':>12}" if device else ""))
        for r in self.rows:
            cells = [
                f"{r.host / MIB:>12.1f}" if r.host else " " * 12,
                f"{r.shared / MIB:>22.1f}" if r.shared else " " * 22,
            ]
            out.append(f"  {r.name:<44}" + "".join(cells) + (f"{r.device / MIB:>12.1f}" if device and r.device else ""))
        out.append(
            f"  {'peak' if self.known else 'peak without activations':<44}{self.rank_peak / MIB:>12.1f}{self.shared / MIB:>22.1f}"  # noqa: E501
            + (f"{self.device_peak / MIB:>12.1f}" if device else "")
        )
        if self.stages:
            out.append("  ranks of each stage: " + ", ".join(f"{n / MIB:.1f}" for n in self.stages) + " MiB")
        each = f"{self.ranks_per_node} {'ranks' if self.stages else f'x {self.rank_peak / MIB:.1f}'}"
        out.append(
            f"  node: {each} + {self.shared / MIB:.1f} = {self.node_peak / MIB:.1f} MiB"
            + (
                ""
                if self.available is None
                else f"; {self.available / MIB:.1f} MiB are left here (MemAvailable and memory cgroups)"
            )
        )
        per = self.between_steps / max(1, self.parameters)
        out.append(
            f"  between steps: model states {self.between_steps / MIB:.1f} MiB a node, {per:.2f} bytes a parameter"
            + (", whatever the number of ranks" if self.stage == 3 else "")
            + f"; during backward at most {self.backward_bound / MIB:.1f} MiB "
            f"(per rank two buckets and the largest gradient, {self.largest_gradient / MIB:.1f} MiB, more)"
        )
        out.extend(f"  note: {n}" for n in self.notes)
        if self.options:
            out.append("  what would take less (MiB a rank, a node):")
            out.extend(
                f"    {o.change:<62}{o.rank_peak / MIB:>10.1f}{o.node_peak / MIB:>10.1f} "
                f" {'fits' if o.fits else 'too much'}"
                for o in self.options
            )
        return out


def changed(e: MemoryEstimate, **changes: Any) -> MemoryEstimate:
    return replace(e, **changes)


def from_dict(d: dict[str, Any]) -> MemoryEstimate:
    d = {k: v for k, v in d.items() if k != "fits"}
    return MemoryEstimate(
        **{
            **d,
            "rows": tuple(Row(**r) for r in d["rows"]),
            "notes": tuple(d["notes"]),
            "stages": tuple(d["stages"]),
            "options": (),
        }
    )
