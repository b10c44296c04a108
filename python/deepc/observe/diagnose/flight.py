"""The flight record (comm/flight.h) as Python sees it: of this process, of another one that runs or hangs, of a dump
file.

A record holds the last 1,024 calls of a process on all its groups. Knows nothing of what they mean: see diagnosis.py.
Imports no torch.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from ...core.lib import C, FlightRow, call
from ...errors import ArgumentError

CAPACITY = 1024  # DC_FLIGHT_CALLS
MESSAGES = ("send", "recv")  # between two ranks; their sequence numbers are not those of the group's collectives
_REDUCING = ("all_reduce", "reduce_scatter", "reduce")
_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_RED_OPS = ("sum", "avg", "min", "max", "prod", "band", "bor", "bxor")


@dataclass(frozen=True)
class Call:
    """One call. Times are seconds since the epoch; end is None while it is not finished. group: index into
    Record.groups, None if that group is not known any more. status: "" or the name of its error."""

    number: int
    seq: int
    op: str
    dtype: str
    count: int
    nbytes: int  # count elements
    red_op: int
    root: int
    tag: int
    ranks: int
    group: int | None
    begin: float
    end: float | None
    status: str
    where: str

    @property
    def fingerprint(self) -> tuple[str, str, int, int, int, int]:
        """What has to agree on all ranks."""
        return self.op, self.dtype, self.count if self.op != "all_to_allv" else 0, self.red_op, self.root, self.tag

    def __str__(self) -> str:
        parts = []
        if self.op not in ("barrier", "segment_create"):
            parts.append(self.dtype)
        if self.op != "barrier":
            parts.append(f"{'bytes' if self.op == 'segment_create' else 'count'} {self.count}")
        if self.op in _REDUCING and 0 <= self.red_op < len(_RED_OPS):
            parts.append(_RED_OPS[self.red_op])
        if self.op in _ROOTED:
            parts.append(f"root {self.root}")
        if self.op in MESSAGES and self.root < 0:
            parts.append("from any rank")
        if self.tag:
            parts.append(f"tag {self.tag}")
        return f"{self.op}({', '.join(parts)})" + (f" at {self.where}" if self.where else "")


@dataclass(frozen=True)
class Member:
    rank: int
    pid: int


@dataclass(frozen=True)
class Group:
    """One group of a process. id: the same on all its ranks. rank: this process's place in `members`."""

    index: int
    id: str
    label: str
    rank: int
    members: tuple[Member, ...]
    closed: bool

    @property
    def size(self) -> int:
        return len(self.members)


@dataclass(frozen=True)
class Record:
    """What one process recorded. taken: when (seconds since the epoch). live: read from a running process, else from a
    dump, which was written because of the error `status`, `reason`. state: of a running process, the letter of
    /proc/PID/status."""

    source: str
    pid: int
    rank: int
    world: int
    host: str
    live: bool
    taken: float
    status: str
    reason: str
    calls: int
    dropped: int
    groups: dict[int, Group] = field(default_factory=dict)
    rows: tuple[Call, ...] = ()
    state: str = ""


def _call_of(row: FlightRow, offset: float) -> Call:
    op = C.dc_call_name(row.op).decode()
    status = "" if row.status == 0 else C.dc_status_name(row.status).decode()
    return Call(
        row.number,
        row.seq,
        op,
        C.dc_dtype_name(row.dtype).decode(),
        row.count,
        row.count * C.dc_dtype_size(row.dtype),
        row.red_op,
        row.root,
        row.tag,
        row.ranks,
        row.group if row.group >= 0 else None,
        row.begin_ns / 1e9 + offset,
        row.end_ns / 1e9 + offset if row.end_ns else None,
        status,
        row.where.decode(errors="replace"),
    )


def parse(fd: int, source: str, state: str = "") -> Record:
    """The record behind an open descriptor (borrowed). ArgumentError naming what is wrong with it."""
    rows, count = (FlightRow * CAPACITY)(), ctypes.c_int64()
    room = 1 << 22  # more than the largest header: 256 groups of 256 ranks
    text = ctypes.create_string_buffer(room)
    try:
        call("dc_flight_parse", fd, rows, CAPACITY, ctypes.byref(count), text, room)
    except ArgumentError as exc:
        raise ArgumentError(f"{source}: {exc}") from None
    h = json.loads(text.value.decode(errors="replace"))
    offset = (h["start_real_ns"] - h["start_ns"]) / 1e9
    groups = {
        g["index"]: Group(
            g["index"],
            g["id"],
            g["label"],
            g["rank"],
            tuple(Member(m["rank"], m["pid"]) for m in g["members"]),
            g["closed_ns"] != 0,
        )
        for g in h["groups"]
    }
    live = h["dump_ns"] == 0
    taken = time.time() if live else h["dump_ns"] / 1e9 + offset
    return Record(
        source,
        h["pid"],
        h["rank"],
        h["world"],
        h["host"],
        live,
        taken,
        "" if h["status"] == "OK" else h["status"],
        h["reason"],
        h["calls"],
        h["dropped"],
        groups,
        tuple(_call_of(rows[i], offset) for i in range(count.value)),
        state,
    )


def read_own() -> Record | None:
    """Of this process; None before its first group."""
    fd = C.dc_flight_fd()
    return None if fd < 0 else parse(fd, "this process", "R")


def read_file(path: str | os.PathLike[str]) -> Record:
    """Of a dump."""
    try:
        with open(path, "rb") as f:
            return parse(f.fileno(), str(path))
    except OSError as exc:
        raise ArgumentError(
            f"{path}: {exc.strerror or exc}. Give the pid of a rank, or a dump (deepc-flight-*.bin) or a folder of them"
        ) from exc


def read_folder(path: str | os.PathLike[str]) -> list[Record]:
    """All dumps of a folder (deepc-flight-*.bin), by name."""
    return [read_file(p) for p in sorted(Path(path).glob("deepc-flight-*.bin"))]


def process_status(pid: int) -> dict[str, str]:
    """/proc/PID/status; empty if there is no such process."""
    try:
        with open(f"/proc/{pid}/status") as f:
            return {k: v.strip() for k, _, v in (line.partition(":") for line in f)}
    except OSError:
        return {}


def read_process(pid: int) -> Record | None:
    """Of a process of this user that runs, hangs or is stopped; None if it has no record. ArgumentError if there is no
    such process or it can't be looked into."""
    status = process_status(pid)
    if not status:
        raise ArgumentError(f"there is no process {pid}")
    own_pid = int(status.get("NSpid", str(pid)).split()[-1])  # as the process itself sees it
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except PermissionError as exc:
        raise ArgumentError(
            f"process {pid} can't be looked into ({exc.strerror}): it belongs to another user, or is not dumpable; run "
            "`deepc doctor` as that user or as root"
        ) from exc
    except OSError:  # it ended meanwhile
        return None
    for name in names:
        try:
            if not os.readlink(f"{folder}/{name}").startswith("/memfd:deepc-flight"):
                continue
            fd = os.open(f"{folder}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            found = parse(fd, f"process {pid}", status.get("State", "?")[:1])
        except ArgumentError:  # of another version of deepc, or somebody else's memfd of this name
            continue
        finally:
            os.close(fd)
        if found.pid == own_pid:  # else the parent's, in a forked child that uses no deepc
            return found
    return None


def read_descendants(pid: int) -> list[Record]:
    """Of the processes that `pid` started, and those that they started, as far as this user may look into them."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (parent := process_status(int(name)).get("PPid")) is not None:
            children.setdefault(int(parent), []).append(int(name))
    found, look = [], list(children.get(pid, []))
    while look:
        at = look.pop()
        look += children.get(at, [])
        try:
            record = read_process(at)
        except ArgumentError:
            continue
        if record is not None:
            found.append(record)
    return sorted(found, key=lambda r: (r.rank, r.pid))


def read_all() -> list[Record]:
    """Of all processes that this user may look into."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            record = read_process(int(name))
        except ArgumentError:
            continue
        if record is not None and record.pid != os.getpid():
            found.append(record)
    return sorted(found, key=lambda r: (r.rank, r.pid))
