"""The tables of train.py's rows in docs/bench.md: per precision a headline from the peer that is the fastest with what
a user can give it, a table per group that took turns, and how far the losses lie apart."""

from __future__ import annotations

from typing import Any

from common import number, value

SPEED, PSS, RESIDENT = "tokens/s", "MiB, sum over ranks", "MiB, sum of VmHWM"
LOSSES, SCREENING = "largest relative difference of losses", "s, screening"
Row = dict[str, Any]


def tables(rows: list[Row]) -> list[str]:
    out: list[str] = []
    for figure in dict.fromkeys(r["figure"] for r in rows):
        here = [r for r in rows if r["figure"] == figure]
        out += [f"**{figure}**", "", *headlines(here), ""]
        groups = dict.fromkeys((r.get("process"), r["group"]) for r in here if "group" in r)
        for group in groups:
            own = [r for r in here if "group" in r and (r.get("process"), r["group"]) == group]
            out += [*_group(own), "", *_losses(own), ""]
        out += _screening([r for r in here if r["unit"] == SCREENING])
    return out


# ---- the headline ----------------------------------------------------------------------------------------------------
def best_peer(rows: list[Row], mine: str, fused: bool, as_it_comes: bool) -> Row | None:
    """The row of `mine` in speed against the peer that loses the least to it. fused: among those with operators of
    deepc's (deepc.fuse, fast_matmul()), else among the others. as_it_comes: only those without an allocator that a user
    gave them."""
    rivals = [
        r
        for r in rows
        if r["what"] == mine
        and r["unit"] == SPEED
        and r.get("ratio") is not None
        and "peer_allocator" in r
        and r["peer_fused"] == fused
        and not (as_it_comes and r["peer_allocator"])
    ]
    return min(rivals, key=lambda r: r["ratio"], default=None)


def headlines(rows: list[Row]) -> list[str]:
    """One line per deepc contender: its ratio to the best peer, named; to the best as it comes; to the limit."""
    out = []
    for mine in dict.fromkeys(r["what"] for r in rows if r["unit"] == SPEED and r.get("ratio") is not None):
        told = []
        for fused, as_it_comes, what in (
            (False, False, "the best peer with what a user can give it"),
            (True, False, "the best with operators of deepc's too"),
            (False, True, "the best as it comes"),
        ):
            if r := best_peer(rows, mine, fused, as_it_comes):
                memory = [_of(rows, r, unit) for unit in (PSS, RESIDENT)]
                less = " and ".join(f"{1 / m:.2f} ({n})" for m, n in zip(memory, ("PSS", "VmHWM")) if m)
                told.append(f"{_ratio(r)} {what}, {r['peer']}, in {less} of its memory")
        for r in rows:
            if r["what"] == mine and r["unit"] == SPEED and (r.get("peer") or "").startswith("limit"):
                told.append(f"{r['ratio']:.2f} of the {r['peer']}")
                break
        if told:
            out.append(f"- {mine}: {'; '.join(told)}.")
    return out


def _of(rows: list[Row], speed: Row, unit: str) -> float | None:
    """The ratio in another unit to the same peer in the same group."""
    same = ("what", "peer", "group", "process")
    found = (r for r in rows if r["unit"] == unit and all(r.get(k) == speed.get(k) for k in same))
    return next((r["ratio"] for r in found), None)


def _ratio(r: Row) -> str:
    return f"{r['ratio']:.2f}x" + (f" ({r['ratio_q1']:.2f} to {r['ratio_q3']:.2f})" if r["n"] > 1 else "")


# ---- a group ---------------------------------------------------------------------------------------------------------
def _group(rows: list[Row]) -> list[str]:
    mine = list(dict.fromkeys(r["what"] for r in rows if r.get("ratio") is not None))
    names = [f"× {m.removeprefix('deepc ')}" for m in mine]
    head = ["", SPEED, *names, "PSS, MiB", *names, "VmHWM, MiB", *names, "faults a step", "loss at the end"]
    out = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    own = {(r["what"], r["unit"]): r for r in rows if r.get("ratio") is None}
    for what in dict.fromkeys(what for what, unit in own if unit == SPEED):
        speed = own[what, SPEED]
        chosen = any(r.get("peer_is_best") and r["peer"] == what for r in rows)
        cells = [what + (" (chosen)" if chosen else "")]
        for unit in (SPEED, PSS, RESIDENT):
            cells.append(value(own[what, unit]) if (what, unit) in own else "")
            cells += [_against(rows, m, what, unit) for m in mine]
        out.append("| " + " | ".join([*cells, number(speed["faults_per_step"]), f"{speed['loss']:.5f}"]) + " |")
    for m in mine:
        if limit := next((r for r in rows if r["what"] == m and (r.get("peer") or "").startswith("limit")), None):
            out += ["", f"{m}: {limit['ratio']:.2f} of the {limit['peer']}."]
    return out


def _against(rows: list[Row], mine: str, peer: str, unit: str) -> str:
    for r in rows:
        if (r["what"], r.get("peer"), r["unit"]) == (mine, peer, unit):
            return _ratio(r) if "ratio_q1" in r else f"{r['ratio']:.2f}"
    return ""


def _losses(rows: list[Row]) -> list[str]:
    told = {r["what"]: r for r in rows if r["unit"] == LOSSES}
    if not told:
        return []
    parts = [f"{what} by at most {r['max']:.1e}" for what, r in told.items()]
    return [f"Losses at the ends of {next(iter(told.values()))['n']} bursts part: {', '.join(parts)}."]


def _screening(rows: list[Row]) -> list[str]:
    if not rows:
        return []
    out = ["| screening: the shortest step, s | | |", "|---|---|---|"]
    for r in rows:
        out.append(f"| {r['what']} | {number(r['median'])} | {'chosen' if r['chosen'] else ''} |")
    return [*out, ""]
