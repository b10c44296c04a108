"""What would make a run smaller, with its figures, and the words of a refusal."""

from __future__ import annotations

import contextlib
import copy
from typing import TYPE_CHECKING, Any

from ....config.tree import Config
from ....errors import DeepcError
from ...layout import padded
from .case import Case
from .counts import GIB, model_states_bytes
from .figures import MemoryEstimate, Option, from_dict

if TYPE_CHECKING:
    from ...plan import Plan


def options_of(case: Case, now: MemoryEstimate, have: int) -> list[Option]:
    """Changes that take less than `now` and their predicted figures, the least intrusive first, then all of them
    together. A smaller micro-batch comes with as much accumulation, for which gradients have memory of their own."""
    import torch

    from .. import dryrun

    counts: list[int] = []

    def seen(t: torch.Tensor) -> torch.Tensor:
        counts.extend(t.shape[:1])
        return t

    dryrun.with_tensors(case.batch, seen)
    rows = min(counts, default=1)
    out: list[Option] = []
    tries: list[tuple[str, dict[str, Any], int, bool]] = []
    smaller = rows
    while smaller > 1 and rows // smaller < 8:
        smaller = (smaller + 1) // 2
        tries.append(
            (
                f"micro-batch {smaller} instead of {rows}, gradient_accumulation_steps x {-(-rows // smaller)}",
                {},
                smaller,
                False,
            )
        )
    stage, world = case.config.zero.stage, case.ranks_per_node * case.nodes
    if world > 1 and stage < 3 and (case.device == "cpu" or stage < 2):
        better = 3 if case.device == "cpu" else 2
        tries.append((f"zero_optimization.stage {better}", {"zero_optimization": {"stage": better}}, rows, False))
    if case.batch is not None and case.config.activation_checkpointing.budget is None:
        tries.append(("activation checkpointing of the blocks", {}, rows, True))
    if case.config.dtype == "fp32":
        tries.append(("bf16.enabled", {"bf16": {"enabled": True}}, rows, False))
    if case.device != "cpu" and case.config.zero.offload_optimizer.device == "none":
        tries.append(
            (
                "zero_optimization.offload_optimizer.device cpu",
                {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
                rows,
                False,
            )
        )
    if len(tries) > 1:
        together: dict[str, Any] = {}
        for _, change, _, _ in tries:
            together = _merged(together, change)
        least = min(t[2] for t in tries)
        tries.append(("all of these", together, least, any(t[3] for t in tries)))
    for name, change, take, recompute in tries:
        option = _try(case, name, change, rows, take, recompute, have)
        if option is not None and (option.node_peak < now.node_peak or option.rank_peak < now.rank_peak):
            out.append(option)
    return out


def _merged(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    out = copy.deepcopy(a)
    for k, v in b.items():
        out[k] = _merged(out[k], v) if isinstance(v, dict) and isinstance(out.get(k), dict) else v
    return out


def _try(
    case: Case, name: str, change: dict[str, Any], rows: int, take: int, recompute: bool, have: int
) -> Option | None:
    """None if the change can't be made to this model or configuration. take: of the `rows` samples of a micro-batch."""
    from dataclasses import replace

    from .. import dryrun

    with contextlib.suppress(DeepcError):
        raw = _merged(case.config.raw, change)
        config = Config.load(
            raw, world_size=case.ranks_per_node * case.nodes, device_type=case.config.device_type, allow_auto=True
        )
        times = -(-rows // take) * (config.gradient_accumulation_steps or 1)
        config = replace(config, gradient_accumulation_steps=times)
        batch = case.batch if take == rows else dryrun.first_rows(case.batch, take)
        e = from_dict(dryrun.forked(replace(case, config=config, batch=batch, recompute=recompute).work))
        return Option(name, e.rank_peak, e.node_peak, e.node_peak <= have)
    return None


def _need(plan: Plan, stage: int, dtype: str, nodes: int | None = None) -> int:
    """Bytes of model states of this node, at that stage in that precision. nodes: so many like it; None: those that
    there are. Frozen parameters have no gradients, moments and masters, and are whole where the model is."""
    trained = sum(p.numel for p in plan.params if p.index is not None)
    frozen = sum(padded(p.numel) for p in plan.params if p.index is None)
    keep = plan.frozen_elems != frozen  # some have their bytes whatever the precision (layout.keep_bytes)
    size = plan.dtype.itemsize if keep else {"fp32": 4, "bf16": 2}[dtype]
    ranks, frozen_bytes = plan.ranks_per_node, plan.frozen_elems * size
    if nodes is None and plan.transport == "c10d":  # nodes with different numbers of ranks, which share no memory
        private, whole = model_states_bytes(trained, stage=stage, nodes=plan.world, dtype=dtype)
        return ranks * (private + (whole + frozen_bytes) // (plan.world if stage == 3 else 1))
    private, shared = model_states_bytes(
        trained, stage=stage, ranks_per_node=ranks, nodes=nodes or plan.nodes, dtype=dtype
    )
    copies = 1 if stage == 3 else ranks
    return private * ranks + shared + frozen_bytes * copies + plan.bytes["staging_shared"]


def options_by_counts(plan: Plan, have: int) -> list[str]:
    """Changes of stage and precision whose model states would fit into `have` bytes of this node, each with its figure;
    the least change first."""
    kind = {4: "fp32"}.get(plan.dtype.itemsize, "bf16")
    out = []
    for dtype in dict.fromkeys((kind, "bf16")):
        for stage in range(plan.stage, 4):
            need = _need(plan, stage, dtype)
            if (dtype, stage) != (kind, plan.stage) and need <= have and need < plan.bytes["node_total"]:
                out.append(
                    f"zero_optimization.stage {stage}{' with bf16.enabled' if dtype != kind else ''} ({need / GIB:.2f}"
                    " GiB)"
                )
                break
    return out


def by_nodes(plan: Plan, have: int) -> str:
    """What would take the least on this node, and how many nodes like it have room for that."""
    kinds = ("bf16",) if plan.dtype.itemsize < 4 else ("fp32", "bf16")

    is_least = plan.stage == 3 and plan.dtype.itemsize < 4
    least = plan.bytes["node_total"] if is_least else _need(plan, 3, kinds[-1])
    out = f"the least is zero_optimization.stage 3 in {kinds[-1]}, {least / GIB:.2f} GiB: free or add {(least - have) / GIB:.2f} GiB"  # noqa: E501
    for nodes in range(plan.nodes + 1, 1025):
        kind = next((k for k in kinds if _need(plan, 3, k, nodes) <= have), None)
        if kind is not None:
            return f"{out}, or use {nodes} nodes like this one at stage 3 in {kind} ({_need(plan, 3, kind, nodes) / GIB:.2f} GiB on each)"  # noqa: E501
    return f"{out}; up to 1,024 nodes like this one are too few as well"


def refusal(e: MemoryEstimate, asked: bool = True) -> str:
    """asked: whether its options were looked for."""
    fitting = [o for o in e.options if o.fits]
    fix = (
        "; this would fit: " + "; or ".join(f"{o.change} ({o.node_peak / GIB:.2f} GiB)" for o in fitting[:4])
        if fitting
        else "; nothing that deepc knows to change makes it fit: " + _nearest(e)
    )
    if e.stages and not e.options:
        fix = (
            "; a smaller micro-batch, more stages, a higher zero_optimization.stage, activation checkpointing or bf16"
            " take less (deepc.estimate(suggest=True) says how much)"
        )
    return (
        f"the run needs {e.node_peak / GIB:.2f} GiB on this node and {(e.available or 0) / GIB:.2f} GiB are left"
        f" (memory cgroup and MemAvailable){fix if asked or e.stages else ''}.\n{e}"
    )


def _nearest(e: MemoryEstimate) -> str:
    """The change that comes nearest, and what is missing then."""
    best = min(e.options, key=lambda o: o.node_peak, default=None)
    if best is None or best.node_peak >= e.node_peak:
        return f"free or add {(e.node_peak - (e.available or 0)) / GIB:.2f} GiB, or use more nodes"
    return (
        f"{best.change} comes nearest with {best.node_peak / GIB:.2f} GiB; free or add"
        f" {(best.node_peak - (e.available or 0)) / GIB:.2f} GiB then, or use more nodes"
    )
