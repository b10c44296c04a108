"""Which hosts a run takes and how many ranks each gets: DeepSpeed's hostfile and its filters. Pure data, nothing is
started.

worker-1 slots=4        # hostfile: one host a line
worker-2 slots=4

--include worker-1@worker-2:0,2       all of worker-1, slots 0 and 2 of worker-2
--exclude worker-2:1                  everything but that slot"""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from ...errors import ArgumentError

_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Host:
    """Ranks on one host. slots: their numbers there, in rank order; on a host with GPUs the devices. local: started
    without a remote shell."""

    name: str
    slots: tuple[int, ...]
    local: bool = False

    @property
    def ranks(self) -> int:
        return len(self.slots)


def is_this_machine(name: str) -> bool:
    """By name, or because the address belongs to one of this machine's interfaces."""
    node = os.uname().nodename
    if name in _THIS_MACHINE or name in (node, node.split(".")[0]):
        return True
    family = socket.AF_INET6 if ":" in name else socket.AF_INET
    try:
        packed = socket.inet_pton(family, name)
    except OSError:  # a name that is not ours
        return False
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((socket.inet_ntop(family, packed), 0))
        except OSError:
            return False
    return True


def read_hostfile(path: str) -> dict[str, int]:
    """host -> slots, in the order of the file. Raises ArgumentError with the line that is wrong."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ArgumentError(f"--hostfile {path}: {getattr(exc, 'strerror', None) or exc}") from exc
    found: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        # What follows (max_slots of OpenMPI) means nothing here.
        match = re.fullmatch(r"(\S+)\s+slots\s*=\s*(\d+)(\s.*)?", text)
        if not match or int(match[2]) < 1:
            raise ArgumentError(f"--hostfile {path}, line {number}: {text!r} is not of the form 'host slots=N'")
        if match[1].startswith("-"):  # it would be an option of ssh
            raise ArgumentError(f"--hostfile {path}, line {number}: {match[1]!r} is no host name")
        if match[1] in found:
            raise ArgumentError(
                f"--hostfile {path}, line {number}: {match[1]} is there twice; give it once, with all its slots"
            )
        found[match[1]] = int(match[2])
    if not found:
        raise ArgumentError(f"--hostfile {path} names no host; write one line 'host slots=N' for each")
    return found


def _parse_filter(option: str, text: str) -> dict[str, list[int] | None]:
    """'a@b:0,2' -> {a: None, b: [0, 2]}; None stands for every slot."""
    wanted: dict[str, list[int] | None] = {}
    for part in text.split("@"):
        match = re.fullmatch(r"(\[[^\]]+\]|[^:\s]+)(?::(\d+(?:,\d+)*))?", part)  # an IPv6 address is in brackets
        if not match:
            raise ArgumentError(f"{option} {text!r} is not of the form host:0,1[@host:...]")
        name = match[1].strip("[]")
        if match[2] is None:
            wanted[name] = None
            continue
        slots = [int(n) for n in match[2].split(",")]
        before = wanted.get(name, [])
        if before is None:
            continue
        if len(set(slots + before)) != len(slots) + len(before):
            raise ArgumentError(f"{option} {text!r} names a slot of {name} twice")
        wanted[name] = before + slots
    return wanted


def _match(option: str, text: str, name: str, pool: dict[str, tuple[int, ...]]) -> str:
    """The name that the pool has for `name`: a run of this machine alone may call it by any of its names."""
    if name in pool:
        return name
    if len(pool) == 1 and is_this_machine(name) and is_this_machine(next(iter(pool))):
        return next(iter(pool))
    raise ArgumentError(
        f"{option} {text!r}: there is no host {name!r}; there {'is' if len(pool) == 1 else 'are'} {', '.join(pool)}. "
        "Other hosts need --hostfile"
    )


def select(pool: dict[str, tuple[int, ...]], include: str | None, exclude: str | None) -> dict[str, tuple[int, ...]]:
    """The slots that the filters leave, in the hosts' order. The slots of an included host are taken in the order
    given."""
    if include and exclude:
        raise ArgumentError("--include and --exclude can't be given together")
    if not include and not exclude:
        return pool
    option, text = ("--include", include) if include else ("--exclude", exclude or "")
    chosen: dict[str, tuple[int, ...]] = {} if include else dict(pool)
    for given, slots in _parse_filter(option, text).items():
        name = _match(option, text, given, pool)
        has = pool[name]
        for slot in slots or ():
            if slot not in has:
                raise ArgumentError(
                    f"{option} {text!r}: there is no slot {slot} on {name}; it has {len(has)} (0 to {len(has) - 1})"
                )
        if include:
            chosen[name] = has if slots is None else tuple(slots)
        else:
            chosen[name] = () if slots is None else tuple(s for s in has if s not in slots)
    left = {name: chosen[name] for name in pool if chosen.get(name)}
    if not left:
        raise ArgumentError(f"{option} {text!r} leaves nothing to run on")
    return left


def trim(
    pool: dict[str, tuple[int, ...]], nodes: int | None, per_node: int | None, where: str
) -> dict[str, tuple[int, ...]]:
    """The first `nodes` hosts and the first `per_node` slots of each. where: what named the hosts, for the error."""
    if nodes and nodes > len(pool):
        raise ArgumentError(
            f"--num_nodes {nodes}: {where} names only {len(pool)} host{'s' if len(pool) > 1 else ''}"
            f" ({', '.join(pool)})"
        )
    kept = dict(list(pool.items())[:nodes]) if nodes else dict(pool)
    for name, slots in kept.items():
        if per_node and per_node > len(slots):
            raise ArgumentError(
                f"{per_node} ranks a host asked for, but {where} gives {name} only {len(slots)} "
                f"slot{'s' if len(slots) > 1 else ''}"
            )
    return {name: slots[:per_node] if per_node else slots for name, slots in kept.items()}
