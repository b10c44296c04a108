"""A plan as a page that loads nothing: who holds what, over which links, when a step's ranks compute and wait, and how
full memory is."""

from __future__ import annotations

from html import escape

from ..timeline import svg as timeline_svg
from . import told
from .cluster import Nodes
from .planner import Found, Predicted

_STAGE = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#76b7b2", "#edc948", "#e15759", "#9c755f")
_PARTS = ("#4e79a7", "#a0cbe8", "#e15759", "#ff9d9a", "#b07aa1", "#f28e2b", "#bab0ac", "#59a14f", "#8cd17d", "#9c755f")
_CELL_W, _CELL_H = 74, 40
_NODES = 24  # nodes that the picture of ranks shows
_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.45 system-ui, sans-serif; color: #1c2733; background: #f5f6f8; margin: 0; }
main { max-width: 1240px; margin: 0 auto; padding: 24px 20px 48px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 0 0 10px; }
section { background: #fff; border: 1px solid #dfe3e8; border-radius: 8px; padding: 16px 18px; margin: 16px 0;
  overflow-x: auto; }
.figures { display: flex; flex-wrap: wrap; gap: 12px; margin: 16px 0 0; }
.figures div { background: #fff; border: 1px solid #dfe3e8; border-radius: 8px; padding: 10px 16px; }
.figures b { display: block; font-size: 20px; } .muted { color: #5b6773; }
table { border-collapse: collapse; }
td, th { text-align: right; padding: 3px 12px 3px 0; font-variant-numeric: tabular-nums; }
th { color: #5b6773; font-weight: 500; } td:first-child, th:first-child, .left { text-align: left; }
svg { display: block; max-width: 100%; height: auto; } svg text { font-family: system-ui, sans-serif; }
"""


def html(found: Found) -> str:
    """The page of the fastest layout."""
    p = found.best[0]
    case, cost = p.case, p.cost
    title = f"{case.model.name} on {case.cluster.name}"
    figures = [
        (told.seconds(cost.step), "a step"),
        (told.count(p.tokens_per_second), "tokens/s"),
        (f"{p.utilization:.0%}", "of the attainable FLOP/s"),
        (told.size(max(cost.device_bytes, 0) or cost.host_bytes), "a device" if cost.device_bytes else "a node"),
    ]
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<div class="muted">{told.count(case.model.parameters)} parameters, {case.batch} sequences of {case.model.seq}'
        f" tokens a step, {case.precision}, {case.cluster.ranks} ranks. Predicted, not measured.</div>",
        f'<div class="figures">{"".join(f"<div><b>{escape(v)}</b>{escape(w)}</div>" for v, w in figures)}</div>',
        _section("The layout", f"<p><b>{escape(str(p.layout))}</b></p><p>{escape(p.limit(found.fastest))}.</p>"),
        _section("Who stands where", _grid(p)),
        _section("Who holds what", _stages_table(p)),
        _section("Where a step's time goes", _time_bar(p)),
        _section("A step of the pipeline", _timeline(p)),
        _section("Memory", _memory(p)),
        _section("Links", _links(p)),
        _section("Runners-up", _runners(found)),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><main>{''.join(parts)}</main></body></html>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def _svg(width: float, height: float, body: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}"'
        f' font-size="12">{body}</svg>'
    )


def _grid(p: Predicted) -> str:
    """The picture of ranks, and what is to be said of it."""
    keys = {"dp": "d data", "sp": "s sequence", "tp": "t tensor"}
    axes = ", ".join(v for k, v in keys.items() if getattr(p.layout, k) > 1)
    note = f'<p class="muted">A box is a rank: its number, its place along {axes}.</p>' if axes else ""
    left = len({node for node, _ in p.case.cluster.places()}) - _NODES
    more = f'<p class="muted">and {left} nodes more, in the same way</p>' if left > 0 else ""
    return note + grid_svg(p) + more


def grid_svg(p: Predicted) -> str:
    """Ranks by node, a picture by itself: the colour is the pipeline's rank, the text the coordinates."""
    mesh, places = p.layout.mesh(), p.case.cluster.places()
    nodes: dict[int, list[int]] = {}
    for rank, (node, _) in enumerate(places):
        nodes.setdefault(node, []).append(rank)
    widest = max(len(r) for r in nodes.values())
    across = max(1, 16 // widest)  # nodes beside each other
    per_row = min(widest, 16)
    box_w, box_h = per_row * _CELL_W + 16, (-(-widest // per_row)) * _CELL_H + 34
    shown = list(nodes.items())[:_NODES]
    out = []
    for i, (node, ranks) in enumerate(shown):
        x, y = i % across * (box_w + 14), i // across * (box_h + 14)
        out.append(
            f'<rect x="{x + 1}" y="{y + 1}" width="{box_w - 2}" height="{box_h - 2}" rx="6" fill="#fafbfc"'
            ' stroke="#c5ccd3"/>'
            f'<text x="{x + 9}" y="{y + 18}" fill="#5b6773">node {node}, {escape(places[ranks[0]][1].name)}</text>'
        )
        for j, rank in enumerate(ranks):
            at = mesh.coordinates(rank)
            cx, cy = x + 8 + j % per_row * _CELL_W, y + 26 + j // per_row * _CELL_H
            name = " ".join(f"{a[0]}{getattr(at, a)}" for a in ("dp", "sp", "tp") if getattr(p.layout, a) > 1)
            where = ", ".join(f"{a} {getattr(at, a)}" for a in ("pp", "dp", "sp", "tp"))
            out.append(
                f"<g><title>rank {rank}: {where}</title>"
                f'<rect x="{cx + 1}" y="{cy + 1}" width="{_CELL_W - 4}" height="{_CELL_H - 4}" rx="4"'
                f' fill="{_STAGE[at.pp % len(_STAGE)]}"/>'
                f'<text x="{cx + _CELL_W / 2 - 1}" y="{cy + 16}" fill="#fff" text-anchor="middle">{rank}</text>'
                f'<text x="{cx + _CELL_W / 2 - 1}" y="{cy + 30}" fill="#fff" text-anchor="middle"'
                f' font-size="10">{name}</text></g>'
            )
    rows = -(-len(shown) // across)
    height = rows * (box_h + 14)
    width = min(across, len(shown)) * (box_w + 14)
    legend = []
    for s in range(min(p.layout.pp, len(_STAGE))):
        label = f"pipeline {s}" + (" (and every 8th from there)" if p.layout.pp > len(_STAGE) else "")
        x, y = s % 4 * 290, height + 4 + s // 4 * 22
        legend.append(f'<rect x="{x}" y="{y}" width="14" height="14" rx="3" fill="{_STAGE[s]}"/>')
        legend.append(f'<text x="{x + 20}" y="{y + 12}">{label}</text>')
    width = max(width, 290 * min(4, p.layout.pp) if p.layout.pp > 1 else width)
    height += 26 + (min(p.layout.pp, len(_STAGE)) - 1) // 4 * 22
    return _svg(width, height, "".join([*out, *legend]))


def _stages_table(p: Predicted) -> str:
    stages, micro = p.stages()
    head = ("holds", "pipeline rank", "parameters", "forward", "backward", "to the next", "states", "activations")
    rows = "".join(
        f"<tr><td>{told.layers_of(s, p.case.model.layers)}</td><td>{s.rank}</td><td>{told.count(s.params)}</td>"
        f"<td>{told.seconds(s.forward)}</td><td>{told.seconds(s.backward)}</td>"
        f"<td>{told.seconds(s.hop) if s.hop else ''}</td><td>{told.size(s.states_bytes)}</td>"
        f"<td>{told.size(s.activation_bytes)}</td></tr>"
        for s in stages[:64]
    )
    more = f'<p class="muted">and {len(stages) - 64} stages more</p>' if len(stages) > 64 else ""
    if len(set(micro)) > 1:
        more += (
            f"<p>Micro-batches of the replicas, in proportion to their nodes' speed: {', '.join(map(str, micro))}.</p>"
        )
    note = '<p class="muted">Times of one micro-batch; bytes of each rank, of all its stages.</p>'
    return f"{note}<table><tr>{''.join(f'<th>{h}</th>' for h in head)}</tr>{rows}</table>{more}"


def _time_bar(p: Predicted) -> str:
    x, out, rows = 0.0, [], []
    for (name, s), colour in zip(p.cost.parts().items(), _PARTS):
        if s <= 0:
            continue
        w = 1160 * s / p.cost.step
        out.append(
            f"<g><title>{name}: {told.seconds(s)}</title>"
            f'<rect x="{x:.2f}" y="0" width="{w:.2f}" height="34" fill="{colour}"/></g>'
        )
        rows.append(
            f'<tr><td><svg width="14" height="14" style="display:inline-block;vertical-align:-2px"><rect width="14"'
            f' height="14" rx="3" fill="{colour}"/></svg> {name}</td><td>{told.seconds(s)}</td>'
            f"<td>{s / p.cost.step:.1%}</td></tr>"
        )
        x += w
    return _svg(1160, 34, "".join(out)) + f'<table style="margin-top:10px">{"".join(rows)}</table>'


def _timeline(p: Predicted) -> str:
    if p.layout.pp == 1:
        return ""
    drawn = p.timeline()
    if drawn is None:
        return '<p class="muted">Too many micro-batches for a picture.</p>'
    schedule, time = drawn
    title = f"{p.layout.schedule}: {p.layout.pp} ranks, {p.layout.accumulation} micro-batches; seconds"
    return timeline_svg(schedule, time, title)


def _bar(name: str, parts: list[tuple[str, float, str]], room: float, y: int) -> str:
    out = [
        f'<text x="0" y="{y + 17}">{name}</text><rect x="170" y="{y}" width="800" height="24" fill="#eceff2" rx="3"/>'
    ]
    x, total = 170.0, sum(n for _, n, _ in parts)
    for what, n, colour in parts:
        w = 800 * n / room if room else 0
        out.append(
            f"<g><title>{what}: {told.size(n)}</title>"
            f'<rect x="{x:.2f}" y="{y}" width="{w:.2f}" height="24" fill="{colour}"/></g>'
        )
        x += w
    out.append(f'<text x="980" y="{y + 17}">{told.size(total)} of {told.size(room)}</text>')
    return "".join(out)


def _room(n: Nodes) -> float:
    """A rank's, of its device or of its node's memory."""
    return n.device_bytes or n.host_bytes / n.ranks


def _memory(p: Predicted) -> str:
    stages, _ = p.stages()
    cost, layout = p.cost, p.layout
    places = p.case.cluster.places()
    width = p.case.cluster.ranks // layout.pp
    bars, y = [], 0
    for rank in range(min(layout.pp, 16)):
        s = next(s for s in stages if s.rank == rank)
        kind = min((places[i][1] for i in range(rank * width, (rank + 1) * width)), key=lambda n: _room(n) - n.reserve)
        room = _room(kind)
        parts = [
            ("before training", kind.reserve, "#bab0ac"),
            ("model states", s.states_bytes, "#4e79a7"),
            ("activations", s.activation_bytes, "#f28e2b"),
        ]
        bars.append(_bar(f"rank of pipeline {rank}", parts, room, y))
        y += 32
    for name, need, room in (
        ("host of a node", cost.host_bytes, cost.host_room),
        ("disk of a node", cost.disk_bytes, cost.disk_room),
    ):
        if need and room:
            bars.append(_bar(name, [("in all", need, "#59a14f")], room, y))
            y += 32
    note = (
        '<p class="muted">Grey: before training; blue: parameters, gradients, optimizer states; orange: activations,'
        " all micro-batches that are under way.</p>"
    )
    more = f'<p class="muted">and {layout.pp - 16} pipeline ranks more</p>' if layout.pp > 16 else ""
    return note + _svg(1160, y, "".join(bars)) + more


def _links(p: Predicted) -> str:
    mesh, places = p.layout.mesh(), p.case.cluster.places()
    rows = []
    meaning = {
        "tp": "activations are summed, twice a block and pass",
        "sp": "queries, keys, values change hands, twice a block and pass",
        "ep": "tokens travel to their experts and back",
        "dp": "gradients are summed, updated parameters handed out",
        "pp": "activations and their gradients, each micro-batch",
    }
    for axis, what in meaning.items():
        n = getattr(p.layout, axis)
        if n == 1:
            continue
        group = mesh.group(axis, 0)
        nodes = {places[r][0] for r in group}
        kind = places[0][1]
        if len(nodes) == 1:
            link = f"inside of a node, {kind.link_rate / 1e9:.4g} GB/s a rank"
        else:
            link = f"over {len(nodes)} nodes, {kind.net_rate / 1e9:.4g} GB/s a node"
        shown = ", ".join(map(str, group[:8])) + (", ..." if n > 8 else "")
        rows.append(
            f"<tr><td>{axis} {n}</td>" + "".join(f'<td class="left">{t}</td>' for t in (link, shown, what)) + "</tr>"
        )
    if not rows:
        return ""
    titles = ("links", "rank 0's group", "what travels")
    head = "<tr><th>axis</th>" + "".join(f'<th class="left">{t}</th>' for t in titles) + "</tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def _runners(found: Found) -> str:
    best = found.best[0]
    rows = "".join(
        f"<tr><td>{escape(str(q.layout))}</td><td>{told.seconds(q.cost.step)}</td>"
        f"<td>{q.cost.step / best.cost.step:.2f} x</td></tr>"
        for q in found.best[1:]
    )
    return f"<table><tr><th>layout</th><th>step</th><th></th></tr>{rows}</table>" if rows else ""
