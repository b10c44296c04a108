"""What flight records say together: where every rank of a group is, which one is behind, which call differs, who is
missing.

Pure functions over records (flight.py): the same for processes that hang and for dumps."""

from __future__ import annotations

import datetime
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from .flight import CAPACITY, MESSAGES, Call, Group, Member, Record, process_status

STUCK_S = 1.0  # a call of a live process that takes longer counts as hanging
_LATE_S = 50e-6  # a rank that comes this much later than the first, on average, may be a straggler
_STATES = {
    "T": "it is stopped (continue it with kill -CONT {pid})",
    "t": "a debugger holds it",
    "Z": "it has ended and is not yet collected by its parent",
    "X": "it has ended",
    "D": "it waits for a disk or driver, in the kernel",
}


@dataclass(frozen=True)
class Place:
    """Where one rank of a group is. what: "in" a call, "failed" in one, "between" calls, "closed" (left the group),
    "gone" (no process), "silent" (no record of it). call: that call, or the last one; None if none is recorded. kept:
    how many calls of all groups the record still has, if there were more."""

    member: Member
    what: str
    call: Call | None = None
    elsewhere: Call | None = None  # what it is in meanwhile, in another group
    elsewhere_label: str = ""
    state: str = ""
    kept: int = 0

    @property
    def seq(self) -> int:
        return self.call.seq if self.call else 0

    @property
    def arrived(self) -> bool:
        """It is in its newest call, or ended there with an error."""
        return self.what in ("in", "failed")


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. kind: desync, behind, missing, message, straggler, error."""

    kind: str
    group: str
    ranks: tuple[int, ...]
    text: str

    def as_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "group": self.group, "ranks": list(self.ranks), "text": self.text}


@dataclass
class GroupView:
    """One group, over all its ranks. lateness: per rank, seconds that it came after the first one, on average over
    `common` calls."""

    id: str
    label: str
    places: list[Place]
    lateness: dict[int, float] = field(default_factory=dict)
    last_share: dict[int, float] = field(default_factory=dict)
    common: int = 0
    live: bool = True
    now: float = 0.0


@dataclass
class Report:
    groups: list[GroupView]
    findings: list[Finding]


def _ago(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def _clock(t: float) -> str:
    return datetime.datetime.fromtimestamp(t).strftime("%H:%M:%S")


def _since(t: float, now: float) -> str:
    return f"since {_ago(max(0.0, now - t))} ({_clock(t)})"


def _who(m: Member) -> str:
    return f"rank {m.rank} (pid {m.pid})"


def _names(members: Sequence[Member]) -> str:
    shown = [_who(m) for m in members[:8]]
    if len(members) > 8:
        shown.append(f"{len(members) - 8} more")
    return shown[0] if len(shown) == 1 else ", ".join(shown[:-1]) + " and " + shown[-1]


def _collectives(record: Record, group: Group) -> list[Call]:
    """By sequence number."""
    return sorted(
        (c for c in record.rows if c.group == group.index and c.op not in MESSAGES), key=lambda c: (c.seq, c.number)
    )


def _open_calls(record: Record, but: int | None = None) -> list[Call]:
    return [c for c in record.rows if c.end is None and c.group is not None and c.group != but]


def _process_gone(member: Member, near: Record) -> bool:
    """Only where the pids of the record are pids here: same host, same pid namespace."""
    if not near.live:
        return False
    pid = near.source.removeprefix("process ")
    try:
        if os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid"):
            return False
    except OSError:
        return False
    return not process_status(member.pid)


def _place(member: Member, record: Record | None, group: Group | None, near: Record) -> Place:
    if record is None or group is None:
        return Place(
            member,
            "gone" if _process_gone(member, near) else "silent",
            state=process_status(member.pid).get("State", "")[:1] if near.live else "",
        )
    calls = _collectives(record, group)
    last = calls[-1] if calls else None
    waiting = [c for c in calls if c.end is None]
    elsewhere = _open_calls(record, group.index)
    other = min(elsewhere, key=lambda c: c.begin) if elsewhere else None
    what = (
        "in" if waiting else "closed" if group.closed else "failed" if last is not None and last.status else "between"
    )
    if what == "in":
        last = waiting[0]  # of several steps the oldest is what it waits for
    label = record.groups[cast(int, other.group)].label if other else ""
    kept = CAPACITY if record.calls > CAPACITY else 0
    return Place(member, what, last, other, label, record.state, kept)


# ---- sentences -------------------------------------------------------------------------------------------------------
def describe(place: Place, now: float) -> str:
    """Where a rank is, as half a sentence behind its name."""
    call: Any = place.call  # a call that is open or failed is there, and one that has ended has an end
    if place.what == "gone":
        return "is gone: its process has ended"
    if place.what == "silent":
        return "left no flight record" + (
            f"; {_STATES[place.state].format(pid=place.member.pid)}" if place.state in _STATES else ""
        )
    if place.what == "in":
        text = f"is in call {call.seq}, {call}, {_since(call.begin, now)}"
    elif place.what == "failed":
        text = f"ended call {call.seq}, {call}, with {call.status} at {_clock(call.end)}"
    elif call is None:
        none = f"has made none of its last {place.kept:,} calls in this group" if place.kept else "has made no call"
        text = "left the group" if place.what == "closed" else none
    else:
        text = (
            "left the group; its" if place.what == "closed" else "is in no call of this group: its"
        ) + f" last was call {call.seq}, {call}, finished {_ago(max(0.0, now - call.end))} ago ({_clock(call.end)})"
    if place.elsewhere is not None:
        text += (
            f"; meanwhile it is in {place.elsewhere} of group {place.elsewhere_label}"
            f" {_since(place.elsewhere.begin, now)}"
        )
    if place.state in _STATES:
        text += "; " + _STATES[place.state].format(pid=place.member.pid)
    return text


def _desync(view: GroupView, calls: dict[int, dict[int, Call]]) -> Finding | None:
    """The first call that ranks made differently. calls: seq -> group rank -> call."""
    for seq in sorted(calls):
        kinds: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for rank, call in calls[seq].items():
            kinds[call.fingerprint].append(rank)
        if len(kinds) < 2:
            continue
        sides = []
        for ranks in kinds.values():
            members = [view.places[r].member for r in ranks]
            sides.append(f"{_names(members)} called {calls[seq][ranks[0]]}")
        named = tuple(sorted(view.places[r].member.rank for ranks in kinds.values() for r in ranks))
        return Finding(
            "desync",
            view.label,
            named,
            f"group {view.label}: ranks made different calls as their call {seq}: {'; '.join(sides)}. All ranks of "
            "a group must make the same calls in the same order with the same dtype, count and reduction",
        )
    return None


def _hanging(view: GroupView, stuck_s: float) -> list[Place]:
    """Ranks that wait too long, or ended there with an error."""

    def is_late(p: Place) -> bool:
        return not view.live or view.now - cast(Call, p.call).begin >= stuck_s

    return [p for p in view.places if p.what == "failed" or (p.what == "in" and is_late(p))]


def _gone(view: GroupView) -> list[Finding]:
    """Nobody waits in this group, but some of its processes have ended without leaving it: who is still there can't
    call it any more, and may wait for them elsewhere."""
    gone = [p for p in view.places if p.what == "gone"]
    here = [p for p in view.places if p.what in ("in", "between")]
    if not view.live or not gone or not here:
        return []
    left, still = _names([p.member for p in gone]), _names([p.member for p in here])
    return [
        Finding(
            "missing",
            view.label,
            tuple(p.member.rank for p in gone),
            f"group {view.label}: {left} ended without leaving it, and {still} still run{'s' * (len(here) == 1)}",
        )
    ]


def _absent(view: GroupView, stuck_s: float) -> list[Finding]:
    waiting = _hanging(view, stuck_s)
    found: list[Finding] = []
    if not waiting:
        return _gone(view)
    front = max(p.seq for p in waiting)
    ahead = [p for p in waiting if p.seq == front]
    call, since = ahead[0].call, min(cast(Call, p.call).begin for p in ahead)
    verb = "waited" if ahead[0].what == "failed" else "waits" if len(ahead) == 1 else "wait"
    waits = f"{_names([p.member for p in ahead])} {verb} in call {front}, {call}, {_since(since, view.now)}"
    for kind, words in (("gone", "missing"), ("silent", "missing"), ("closed", "missing")):
        absent = [p for p in view.places if p.what == kind and not (kind == "closed" and p.seq >= front)]
        if absent:
            said = "; ".join(f"{_who(p.member)} {describe(p, view.now)}" for p in absent[:8])
            found.append(
                Finding(words, view.label, tuple(p.member.rank for p in absent), f"group {view.label}: {waits}; {said}")
            )
    behind = [p for p in view.places if p.what in ("in", "between", "failed") and p.seq < front]
    if behind:
        said = "; ".join(f"{_who(p.member)} {describe(p, view.now)}" for p in behind[:8])
        found.append(
            Finding(
                "behind",
                view.label,
                tuple(p.member.rank for p in behind),
                f"group {view.label}: {waits}, for {_names([p.member for p in behind])}: {said}",
            )
        )
    return found


def _common_calls(view_calls: dict[int, dict[int, Call]], size: int) -> Iterable[dict[int, Call]]:
    for by_rank in view_calls.values():
        if len(by_rank) == size and all(c.end is not None and not c.status for c in by_rank.values()):
            yield by_rank


def _measure_lateness(view: GroupView, calls: dict[int, dict[int, Call]]) -> None:
    """How much later than the first each rank came, over the calls that all records still hold."""
    total: dict[int, float] = defaultdict(float)
    last: Counter[int] = Counter()
    for by_rank in _common_calls(calls, len(view.places)):
        first = min(c.begin for c in by_rank.values())
        for rank, c in by_rank.items():
            total[rank] += c.begin - first
        last[max(by_rank, key=lambda r: by_rank[r].begin)] += 1
        view.common += 1
    if view.common:
        view.lateness = {view.places[r].member.rank: t / view.common for r, t in total.items()}
        view.last_share = {view.places[r].member.rank: last[r] / view.common for r in total}


def _straggler(view: GroupView) -> Finding | None:
    """One rank that comes last nearly always, by more than noise."""
    if view.common < 20:
        return None
    worst = max(view.lateness, key=lambda r: view.lateness[r])
    others = [t for r, t in view.lateness.items() if r != worst]
    if (
        view.lateness[worst] < _LATE_S
        or view.last_share[worst] < 0.8
        or not others
        or view.lateness[worst] < 3 * max(others)
    ):
        return None
    member = next(p.member for p in view.places if p.member.rank == worst)
    return Finding(
        "straggler",
        view.label,
        (worst,),
        f"group {view.label}: {_who(member)} comes last to {view.last_share[worst] * 100:.0f} % of the last "
        f"{view.common} calls, {_ago(view.lateness[worst])} after the first on average: the others wait for it",
    )


def _messages(records: Sequence[Record], stuck_s: float) -> list[Finding]:
    """Sends and receives that hang."""
    found = []
    for record in records:
        for c in _open_calls(record):
            if c.op not in MESSAGES or (record.live and record.taken - c.begin < stuck_s):
                continue
            group = record.groups[cast(int, c.group)]
            me = group.members[group.rank]
            peer = group.members[c.root] if 0 <= c.root < group.size else None
            other = "any rank" if peer is None else _who(peer)
            word = "to" if c.op == "send" else "from"
            found.append(
                Finding(
                    "message",
                    group.label,
                    (me.rank,) if peer is None else (me.rank, peer.rank),
                    f"group {group.label}: {_who(me)} is in {c} {word} {other} {_since(c.begin, record.taken)}"
                    + _candidates(records, group, me, peer, c),
                )
            )
    return found


def _candidates(records: Sequence[Record], group: Group, me: Member, peer: Member | None, c: Call) -> str:
    """What the peer has open towards us, which may be what was meant."""
    want = "recv" if c.op == "send" else "send"
    for record in records:
        theirs = next((g for g in record.groups.values() if g.id == group.id), None)
        if theirs is None or peer is None or theirs.members[theirs.rank] != peer:
            continue
        open_calls = [
            o for o in _open_calls(record) if o.group == theirs.index and o.op == want and o.root in (group.rank, -1)
        ]
        if open_calls:
            return f"; {_who(peer)} has open towards it: " + ", ".join(map(str, open_calls[:4]))
        return f"; {_who(peer)} has no {want} open towards it"
    return ""


# ---- the whole -------------------------------------------------------------------------------------------------------
def _view(group: Group, owners: dict[int, tuple[Record, Group]]) -> tuple[GroupView, dict[int, dict[int, Call]]]:
    near = next(iter(owners.values()))[0]
    nobody: tuple[Record | None, Group | None] = (None, None)
    places = [_place(m, *(owners[i] if i in owners else nobody), near) for i, m in enumerate(group.members)]
    view = GroupView(
        group.id,
        group.label,
        places,
        live=all(r.live for r, _ in owners.values()),
        now=max(r.taken for r, _ in owners.values()),
    )
    calls: dict[int, dict[int, Call]] = defaultdict(dict)
    for i, (record, own) in owners.items():
        for c in _collectives(record, own):
            calls[c.seq][i] = c
    return view, calls


def diagnose(records: Sequence[Record], stuck_s: float = STUCK_S) -> Report:
    """What these records of one run (or of several) say. stuck_s: how long a call of a live process may take."""
    owners: dict[str, dict[int, tuple[Record, Group]]] = {}
    for record in records:
        for group in record.groups.values():
            owners.setdefault(group.id, {})[group.rank] = (record, group)
    report = Report([], [])
    for of_group in owners.values():
        group = next(iter(of_group.values()))[1]
        view, calls = _view(group, of_group)
        if all(p.what in ("closed", "silent", "gone") for p in view.places):
            continue  # over, and nobody waits
        report.groups.append(view)
        desync = _desync(view, calls)
        if desync is not None:
            report.findings.append(desync)
            continue  # who is behind follows from it
        absent = _absent(view, stuck_s)
        report.findings += absent
        _measure_lateness(view, calls)
        if not absent and (late := _straggler(view)) is not None:
            report.findings.append(late)
    report.findings += _messages(records, stuck_s)
    told = {r.reason for r in records if r.reason}
    for reason in sorted(told):
        ranks = tuple(sorted(r.rank for r in records if r.reason == reason))
        report.findings.append(
            Finding(
                "error",
                "",
                ranks,
                f"rank {', '.join(map(str, ranks))} ended with {next(r.status for r in records if r.reason == reason)}:"
                f" {reason}",
            )
        )
    order = {"desync": 0, "missing": 1, "behind": 2, "message": 3, "straggler": 4, "error": 5}
    report.findings.sort(key=lambda f: order[f.kind])
    return report


def as_text(records: Sequence[Record], report: Report) -> str:
    """For people."""
    lines = []
    for view in report.groups:
        lines.append(f"group {view.label} ({len(view.places)} rank{'s' if len(view.places) != 1 else ''})")
        for p in view.places:
            late = view.lateness.get(p.member.rank)
            tail = (
                f"; comes {_ago(late)} after the first on average"
                if late is not None and view.common >= 20 and len(view.places) > 1
                else ""
            )
            lines.append(f"  {_who(p.member)} {describe(p, view.now)}{tail}")
    for record in records:
        if record.dropped:
            lines.append(
                f"rank {record.rank} (pid {record.pid}): {record.dropped} calls are not in the record: too many were"
                " open at a time"
            )
    lines.append("")
    if not report.findings:
        lines.append("Nothing hangs." if all(r.live for r in records) else "No error is recorded.")
    lines += [f"{f.kind}: {f.text}." for f in report.findings]
    return "\n".join(lines)


def as_dict(records: Sequence[Record], report: Report) -> dict[str, Any]:
    """For programs: the same."""

    def call(c: Call | None) -> dict[str, Any] | None:
        return (
            None
            if c is None
            else {
                "seq": c.seq,
                "op": c.op,
                "dtype": c.dtype,
                "count": c.count,
                "red_op": c.red_op,
                "root": c.root,
                "tag": c.tag,
                "begin": c.begin,
                "end": c.end,
                "status": c.status,
                "where": c.where,
            }
        )

    return {
        "records": [
            {
                "source": r.source,
                "pid": r.pid,
                "rank": r.rank,
                "world": r.world,
                "host": r.host,
                "live": r.live,
                "taken": r.taken,
                "calls": r.calls,
                "dropped": r.dropped,
                "state": r.state,
                "status": r.status,
                "reason": r.reason,
            }
            for r in records
        ],
        "groups": [
            {
                "id": v.id,
                "label": v.label,
                "common_calls": v.common,
                "ranks": [
                    {
                        "rank": p.member.rank,
                        "pid": p.member.pid,
                        "is": p.what,
                        "call": call(p.call),
                        "elsewhere": call(p.elsewhere),
                        "state": p.state,
                        "late_s": v.lateness.get(p.member.rank),
                    }
                    for p in v.places
                ],
            }
            for v in report.groups
        ],
        "findings": [f.as_dict() for f in report.findings],
        "ok": not report.findings,
    }
