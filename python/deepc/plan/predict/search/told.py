"""A plan as a person reads it in a terminal: the layout, who stands where, what a step's time goes into, what memory
holds, what limits it, and the runners-up. And as a ds_config.json."""

from __future__ import annotations

from typing import Any

from .planner import Found, Predicted, Stage

_GRID_NODES = 16  # nodes that a grid shows


def seconds(s: float) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if s >= scale:
            return f"{s / scale:.3g} {unit}"
    return f"{s * 1e6:.2g} us"


def size(nbytes: float) -> str:
    for scale, unit in ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB")):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes / 2**10:.3g} KiB"


def count(n: float) -> str:
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if n >= scale:
            return f"{n / scale:.3g} {unit}"
    return f"{n:.0f}"


def layers_of(s: Stage, layers: int) -> str:
    """ "embedding, blocks 0 to 5": the first layer is the embedding, the last the head."""
    first, last = max(0, s.begin - 1), min(layers, s.end - 1) - 1
    out = ["embedding"] if s.begin == 0 else []
    if first <= last:
        out.append(f"blocks {first} to {last}" if first < last else f"block {first}")
    return ", ".join([*out, *(["head"] if s.end == layers + 2 else [])])


def grid(p: Predicted) -> str:
    """A line for each node: the ranks on it and their coordinates, as p(ipeline)d(ata)s(equence)t(ensor)."""
    mesh = p.layout.mesh()
    axes = [a for a in ("pp", "dp", "sp", "tp") if getattr(p.layout, a) > 1] or ["dp"]
    rows: dict[int, list[str]] = {}
    names = {}
    for rank, (node, kind) in enumerate(p.case.cluster.places()):
        at = mesh.coordinates(rank)._asdict()
        rows.setdefault(node, []).append("".join(f"{a[0]}{at[a]}" for a in axes))
        names[node] = kind.name
    lines = [
        f"  node {node:<4}{names[node]:<14}" + "  ".join(cells)
        for node, cells in rows.items()
        if node < _GRID_NODES or node == len(rows) - 1
    ]
    if len(rows) > _GRID_NODES + 1:
        lines.insert(_GRID_NODES, f"  ... {len(rows) - _GRID_NODES - 1} nodes more")
    return "\n".join(lines)


def stages_text(p: Predicted) -> str:
    stages, micro = p.stages()
    lines = [
        f"  {'rank':<6}{'holds':<34}{'parameters':>11}{'forward':>10}{'backward':>10}{'states':>10}{'activations':>13}"
    ]
    shown = stages if len(stages) <= 24 else (*stages[:12], *stages[-12:])
    for i, s in enumerate(shown):
        if len(shown) < len(stages) and i == 12:
            lines.append(f"  ... {len(stages) - 24} stages more")
        lines.append(
            f"  {s.rank:<6}{layers_of(s, p.case.model.layers):<34}{count(s.params):>11}{seconds(s.forward):>10}"
            f"{seconds(s.backward):>10}{size(s.states_bytes):>10}{size(s.activation_bytes):>13}"
        )
    if len(set(micro)) > 1:
        lines.append(
            f"  micro-batches of the data-parallel replicas, in proportion to their nodes' speed: {list(micro)}"
        )
    return "\n".join(lines)


def memory_text(p: Predicted) -> str:
    rows = [
        ("device of a rank", p.cost.device_bytes, p.cost.device_room),
        ("host of a node", p.cost.host_bytes, p.cost.host_room),
        ("disk of a node", p.cost.disk_bytes, p.cost.disk_room),
    ]
    return "; ".join(f"{name} {size(need)} of {size(room)} ({need / room:.0%})" for name, need, room in rows if need)


def text(found: Found) -> str:
    """All of it."""
    p = found.best[0]
    case, cost = p.case, p.cost
    lines = [
        f"{case.model.name}: {count(case.model.parameters)} parameters, {case.batch} sequences of {case.model.seq}"
        f" tokens a step, {case.precision}, on {case.cluster.name}: {case.cluster.ranks} ranks",
        "",
        f"fastest of {found.visited:,} layouts that were priced: {p.layout}",
        f"  step {seconds(cost.step)}, {count(p.tokens_per_second)} tokens/s,"
        f" {p.utilization:.0%} of the attainable FLOP/s",
        f"  memory: {memory_text(p)}",
        f"  {p.limit(found.fastest)}",
        "",
        "time of a step:",
    ]
    for name, s in cost.parts().items():
        if s > 0:
            lines.append(f"  {name:<36}{seconds(s):>10}{s / cost.step:>7.1%}  {'#' * round(40 * s / cost.step)}")
    lines += ["", f"who stands where (rank 0 first; {_axes(p)}):", grid(p), "", "stages:", stages_text(p)]
    if len(found.best) > 1:
        lines += ["", "runners-up:"]
        lines += [f"  {q.cost.step / cost.step:>6.2f} x  {seconds(q.cost.step):>9}  {q.layout}" for q in found.best[1:]]
    notes = to_config(p)[1]
    lines += ["", *(f"note: {n}" for n in notes)] if notes else []
    return "\n".join(lines)


def _axes(p: Predicted) -> str:
    names = {"pp": "p pipeline", "dp": "d data", "sp": "s sequence", "tp": "t tensor"}
    return (
        ", ".join(n for a, n in names.items() if getattr(p.layout, a) > 1 or (a == "dp" and p.case.cluster.ranks == 1))
        or "d data"
    )


def to_config(p: Predicted) -> tuple[dict[str, Any], list[str]]:
    """(the ds_config.json of a plan, what it can't say or what deepc does not do yet)."""
    lay, notes = p.layout, []
    zero: dict[str, Any] = {"stage": lay.stage}
    if lay.offload != "none":
        where: dict[str, Any] = {"device": "cpu" if lay.offload == "cpu" else "nvme"}
        if where["device"] == "nvme":
            where["nvme_path"] = "/local_nvme"
            notes.append("zero_optimization.*.nvme_path: put the folder of the nodes' disk there")
        zero["offload_optimizer"] = where
        if lay.offload == "nvme+parameters":
            zero["offload_param"] = dict(where)
    config: dict[str, Any] = {
        "train_batch_size": p.case.batch,
        "train_micro_batch_size_per_gpu": lay.micro,
        "gradient_accumulation_steps": lay.accumulation,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    if p.case.precision != "fp32":
        config[p.case.precision] = {"enabled": True}
    if lay.pp > 1:
        config["pipeline"] = {"stages": lay.pp}
        config["deepc"] = {"pipeline": {"schedule": lay.schedule, **({"chunks": lay.chunks} if lay.chunks > 1 else {})}}
        if p.case.cluster.on_devices:
            notes.append("pipelines on GPUs do not exist in deepc yet (docs/pipeline.md)")
    if lay.tp > 1:
        config["tensor_parallel"] = {"autotp_size": lay.tp}
    if lay.sp > 1:
        config["sequence_parallel_size"] = lay.sp
    if lay.ep > 1:
        notes.append(f"experts: give ep_size={lay.ep} to the model's MoE layers")
    if lay.recompute:
        notes.append(
            "blocks are computed again in backward: model.gradient_checkpointing_enable(), or torch.utils.checkpoint"
        )
    if len(set(p.stages()[1])) > 1:
        notes.append(
            "replicas with different numbers of micro-batches do not exist in deepc yet: with equal ones the step takes"
            " as long as its slowest replica (plan with --even)"
        )
    try:
        from ....config.tree import Config

        Config.load(config, world_size=p.case.cluster.ranks, device_type="cuda" if p.case.cluster.on_devices else "cpu")
    except Exception as exc:  # what deepc does not do yet says so itself
        from ....errors import DeepcError

        if not isinstance(exc, DeepcError):
            raise
        wrong = [line.strip() for line in str(exc).splitlines()]
        notes += [f"deepc does not run this yet: {line}" for line in (wrong[1:] or wrong)]
    return config, notes
