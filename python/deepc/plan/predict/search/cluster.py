"""A cluster as its owner describes it: kinds of nodes, what a rank computes, what memory holds, how fast links are.
YAML or JSON, read without executing anything; docs/planner.md has the format."""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....core import lib as _lib
from ....errors import ArgumentError
from .space import MOST

_UNITS = {"": 1.0, "K": 1e3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_UNITS |= {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_QUANTITY = re.compile(r"\s*([0-9][0-9_.]*(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]*)\s*")

# What vendors print (NVIDIA's data sheets of V100, A100, H100 SXM, H200 SXM): dense FLOP/s of a device, its memory, and
# its links each way. attainable is ours: docs/planner.md compares what follows from it with published training runs.
_DEVICES: dict[str, dict[str, Any]] = {
    "v100-32gb": {
        "flops": {"fp16": "125 TFLOP/s", "fp32": "15.7 TFLOP/s"},
        "memory": {"device": "32 GiB"},
        "bandwidth": {"device": "0.9 TB/s", "host": "12 GB/s"},
        "link": {"bandwidth": "150 GB/s", "latency": "5 us"},
    },
    "a100-40gb": {
        "flops": {"bf16": "312 TFLOP/s", "fp16": "312 TFLOP/s", "fp32": "19.5 TFLOP/s"},
        "memory": {"device": "40 GiB"},
        "bandwidth": {"device": "1.555 TB/s", "host": "25 GB/s"},
        "link": {"bandwidth": "300 GB/s", "latency": "5 us"},
    },
    "a100-80gb": {
        "flops": {"bf16": "312 TFLOP/s", "fp16": "312 TFLOP/s", "fp32": "19.5 TFLOP/s"},
        "memory": {"device": "80 GiB"},
        "bandwidth": {"device": "2.039 TB/s", "host": "25 GB/s"},
        "link": {"bandwidth": "300 GB/s", "latency": "5 us"},
    },
    "h100-80gb": {
        "flops": {"bf16": "989 TFLOP/s", "fp16": "989 TFLOP/s", "fp32": "67 TFLOP/s"},
        "memory": {"device": "80 GiB"},
        "bandwidth": {"device": "3.35 TB/s", "host": "50 GB/s"},
        "link": {"bandwidth": "450 GB/s", "latency": "5 us"},
    },
    "h200-141gb": {
        "flops": {"bf16": "989 TFLOP/s", "fp16": "989 TFLOP/s", "fp32": "67 TFLOP/s"},
        "memory": {"device": "141 GB"},
        "bandwidth": {"device": "4.8 TB/s", "host": "50 GB/s"},
        "link": {"bandwidth": "450 GB/s", "latency": "5 us"},
    },
}
_COMMON: dict[str, Any] = {
    "attainable": 0.7,
    "start": "4 us",
    "reserve": "1.5 GiB",
    "memory": {"disk": 0},
    "bandwidth": {"disk": 0},
}
_NODE_KEYS: tuple[str, ...] = ("type", "count", "name", "ranks", "flops", "attainable", "memory", "bandwidth", "link")
_NODE_KEYS += ("network", "start", "reserve", "host_update")
_TOP_KEYS = ("name", "nodes", "network", "overlap", "update_traffic", "batch_traffic")
_KINDS_OF_NODES = 8  # DC_PLANNER_KINDS
_WANTED = "give name, network and nodes (docs/planner.md has an example)"


# What a value is, and how one is written. "/s" and seconds are looked at: 100 GB is no bandwidth.
_KINDS = {"bytes": "80 GiB", "rate": "25 GB/s", "flops": "312 TFLOP/s", "time": "5 us", "number": "0.7"}


def quantity(value: Any, what: str, kind: str = "", *, above: bool = False) -> float:
    """A number, or one with a unit: "80 GiB", "25 GB/s", "312 TFLOP/s", "5 us". kind: one of bytes, rate, flops, time,
    number, whose unit it must have if it has one. above: 0 is none either. ArgumentError names `what`."""
    such = _KINDS[kind] if kind else ", ".join(list(_KINDS.values())[:4])
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            found = float(value)
        except OverflowError:
            found = math.inf
    elif isinstance(value, str) and (m := _QUANTITY.fullmatch(value)):
        number, unit = m.groups()
        scale, meant = _unit(unit)
        if scale is None:
            bits = "; links are in bytes: 100 Gbit/s are 12.5 GB/s" if "b" in unit else ""
            raise ArgumentError(f"{what}: {value!r} has no unit that is known; write it as in {such}{bits}")
        if kind and meant and kind != meant:
            lacks = kind in ("rate", "flops") and _unit(unit + "/s")[1] == kind
            fix = f"write {value.strip() + '/s'!r}" if lacks else f"write it as in {such}"
            raise ArgumentError(f"{what}: {value!r} is {_NAMES[meant]} and must be {_NAMES[kind]}; {fix}")
        try:
            found = float(number.replace("_", "")) * scale
        except ValueError:
            raise ArgumentError(f"{what}: {value!r} is not a number with a unit; write it as in {such}") from None
    else:
        raise ArgumentError(f"{what}: {value!r} is not a number, or one with a unit; write it as in {such}")
    if not math.isfinite(found) or found < 0 or (above and found == 0):
        least = "above 0" if above else "of at least 0"
        raise ArgumentError(f"{what}: {value!r} must be a finite number {least}; write it as in {such}")
    return found


_NAMES = {
    "bytes": "a size in bytes",
    "rate": "bytes in a second",
    "flops": "operations in a second",
    "time": "a time",
    "number": "a number without a unit",
    "operations": "a number of operations",
}


def _unit(unit: str) -> tuple[float | None, str]:
    """(What it multiplies by, None if it is no unit; the kind it belongs to, "" if it says none)."""
    if unit in _TIMES:
        return _TIMES[unit], "time"
    prefix, each, meant = unit.removesuffix("/s"), unit.endswith("/s"), "rate" if unit.endswith("/s") else ""
    for end in ("FLOPs", "FLOPS", "FLOP", "flops", "B"):
        if prefix.endswith(end):
            prefix = prefix.removesuffix(end)
            if end == "B":
                meant = "rate" if each else "bytes"
            else:  # FLOPS is a rate by its name
                meant = "flops" if each or end in ("FLOPS", "flops") else "operations"
            break
    else:
        meant = ""
    return _UNITS.get(prefix), meant


@dataclass(frozen=True)
class Nodes:
    """`count` nodes of one kind with `ranks` ranks each. flops: attainable in matrix products, of a rank, by precision.
    Bytes, bytes/s, seconds. device_bytes 0: ranks are processes on the node's CPUs."""

    name: str
    count: int
    ranks: int
    flops: Mapping[str, float]
    start: float
    memory_rate: float
    device_bytes: float
    host_bytes: float
    host_rate: float
    host_update: float
    disk_bytes: float
    disk_rate: float
    link_rate: float
    link_latency: float
    net_rate: float
    net_latency: float
    reserve: float

    def core(self, precision: str) -> _lib.PlannerNodes:
        """As C takes it. ArgumentError for a precision whose rate the description has not."""
        if precision not in self.flops:
            raise ArgumentError(
                f"cluster, nodes {self.name!r}: flops has no {precision}; it has {', '.join(sorted(self.flops))}. Add"
                " it, or choose one of those with --precision"
            )
        same = [n for n, _ in _lib.PlannerNodes._fields_ if n not in ("nodes", "flops")]  # type: ignore[misc]
        return _lib.PlannerNodes(nodes=self.count, flops=self.flops[precision], **{n: getattr(self, n) for n in same})


@dataclass(frozen=True)
class Cluster:
    """Nodes in the order in which ranks are counted. overlap: the part of the computation beside which gradients and
    gathered parameters travel. update_traffic, batch_traffic: bytes that memory moves for each parameter in an update,
    and for each micro-batch's gradient."""

    name: str
    nodes: tuple[Nodes, ...]
    overlap: float
    update_traffic: float | None = None
    batch_traffic: float | None = None

    @property
    def ranks(self) -> int:
        return sum(n.count * n.ranks for n in self.nodes)

    @property
    def on_devices(self) -> bool:
        return self.nodes[0].device_bytes > 0

    @property
    def default_precision(self) -> str:
        wanted = ("bf16", "fp16", "fp32") if self.on_devices else ("fp32", "bf16", "fp16")
        return next((p for p in wanted if all(p in n.flops for n in self.nodes)), wanted[0])

    def places(self) -> list[tuple[int, Nodes]]:
        """Of each rank: the number of its node, and its kind."""
        out, node = [], 0
        for kind in self.nodes:
            for _ in range(kind.count):
                out += [(node, kind)] * kind.ranks
                node += 1
        return out

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Cluster:
        """From a file: .json, else YAML. ArgumentError says what is wrong, and where."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise ArgumentError(
                f"cluster {os.fspath(path)}: {exc}; --cluster names a description of nodes (docs/planner.md)"
            ) from exc
        where = f"cluster {os.fspath(path)}"
        if not text.strip():
            raise ArgumentError(f"{where}: the file is empty; {_WANTED}")
        return cls.of(_parsed(text, os.fspath(path)), Path(path).stem, where)

    @classmethod
    def of(cls, given: Any, name: str = "cluster", where: str = "cluster") -> Cluster:
        """From what a file holds. where: begins what errors say. ArgumentError for unknown or missing keys and values
        that are no sizes."""
        top = _mapping(given, where, _TOP_KEYS)
        rows = top.get("nodes")
        if not isinstance(rows, list) or not rows:
            raise ArgumentError(
                f"{where}: nodes must be a list of kinds of nodes, each with count, ranks, flops, memory; got {rows!r}"
            )
        if len(rows) > _KINDS_OF_NODES:
            raise ArgumentError(
                f"{where}: nodes has {len(rows)} kinds of nodes; at most {_KINDS_OF_NODES} are planned for. Give equal"
                " nodes once, with their count"
            )
        network = _mapping(top.get("network", {}), f"{where}: network", _PARTS["network"])
        nodes = tuple(_nodes(r, f"{where}: nodes[{i}]", f"kind {i}", network) for i, r in enumerate(rows))
        for i, n in enumerate(nodes):
            if (n.device_bytes > 0) != (nodes[0].device_bytes > 0):
                bare = i if n.device_bytes <= 0 else 0
                raise ArgumentError(
                    f"{where}: nodes[{bare}]: memory.device is 0 (ranks on CPUs), and nodes[{i if bare == 0 else 0}]"
                    " has devices. Give the device's memory, or plan for each kind by itself"
                )
        ranks = sum(n.count * n.ranks for n in nodes)
        if ranks > MOST:
            raise ArgumentError(
                f"{where}: count x ranks are {ranks} ranks; at most {MOST} are planned for. Describe fewer nodes"
            )
        overlap = quantity(top.get("overlap", 0.7 if nodes[0].device_bytes else 0.0), f"{where}: overlap", "number")
        if overlap > 1:
            raise ArgumentError(f"{where}: overlap {overlap:g} must be 0 to 1")
        traffic = {
            k: quantity(top[k], f"{where}: {k}") for k in ("update_traffic", "batch_traffic") if top.get(k) is not None
        }
        return cls(str(top.get("name", name)), nodes, overlap, **traffic)


def _parsed(text: str, path: str) -> Any:
    if path.endswith(".json"):
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise ArgumentError(f"cluster {path}: no JSON: {_line(exc)}; {_WANTED}") from exc
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as exc:
        raise ArgumentError(
            f"cluster {path}: YAML needs the package PyYAML (pip install pyyaml); or give JSON"
        ) from exc
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as exc:  # ValueError: a date that is none
        raise ArgumentError(f"cluster {path}: no YAML: {_line(exc)}; {_WANTED}") from exc


def _line(exc: Exception) -> str:
    """What a parser says, in one line."""
    return " ".join(str(exc).split())


def _mapping(given: Any, what: str, known: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        is_list = " (a list: leave the dash out)" if isinstance(given, list) else ""
        raise ArgumentError(f"{what}: expected a mapping with {', '.join(known)}; got {_short(given)}{is_list}")
    if unknown := [k for k in given if k not in known]:
        near = difflib.get_close_matches(str(unknown[0]), known, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ArgumentError(f"{what}: unknown key {unknown[0]!r}; {hint}Known are {', '.join(known)}")
    return dict(given)


def _short(given: Any) -> str:
    text = repr(given)
    return text if len(text) <= 60 else text[:60] + "..."


def _layered(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Later ones win, inside of mappings too."""
    out: dict[str, Any] = {}
    for layer in layers:
        for k, v in layer.items():
            both = isinstance(out.get(k), Mapping) and isinstance(v, Mapping)
            out[k] = _layered(out[k], v) if both else v
    return out


def _count(value: Any, what: str) -> int:
    if type(value) is not int or value < 1:
        raise ArgumentError(f"{what}: {value!r} must be a whole number of at least 1, without a unit")
    if value > MOST:
        raise ArgumentError(f"{what}: {value} must be at most {MOST}")
    return value


def _nodes(given: Any, what: str, name: str, network: Mapping[str, Any]) -> Nodes:
    own = _mapping(given, what, _NODE_KEYS)
    kind = own.get("type")
    if kind is not None and kind not in list(_DEVICES):
        near = difflib.get_close_matches(str(kind), _DEVICES, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ArgumentError(
            f"{what}: type {kind!r} is not known; {hint}Known are {', '.join(_DEVICES)}; or leave type out and give"
            " flops, memory, bandwidth and link"
        )
    row = _layered(_COMMON, _DEVICES.get(str(kind), {}), {"network": network}, own)

    def part(table: str, key: str, *, least: float | None = None, above: bool = False) -> float:
        values = _mapping(row.get(table, {}), f"{what}: {table}", _PARTS[table])
        if key not in values:
            if least is None:
                raise ArgumentError(
                    f"{what}: {table}.{key} is missing ({_MEANING[table, key]}); write it as in"
                    f" {table}: {{{key}: {_KINDS[_kind(table, key)]}}}"
                )
            return least
        return quantity(values[key], f"{what}: {table}.{key}", _kind(table, key), above=above)

    device_bytes = part("memory", "device", least=0.0, above=kind is not None)
    flops = row.get("flops")
    if not isinstance(flops, Mapping) or not flops:
        raise ArgumentError(
            f"{what}: flops {'is missing' if flops is None else f'is {_short(flops)}'}: FLOP/s of a rank by precision,"
            " such as {bf16: 312 TFLOP/s}"
        )
    share = row["attainable"]
    if isinstance(share, Mapping) and (stray := [k for k in share if k not in flops]):
        raise ArgumentError(f"{what}: attainable.{stray[0]}: flops has no such precision; it has {', '.join(flops)}")
    rates = {}
    for precision, value in flops.items():
        if precision not in ("fp32", "bf16", "fp16"):
            raise ArgumentError(f"{what}: flops.{precision}: precisions are fp32, bf16, fp16")
        one = share.get(precision, _COMMON["attainable"]) if isinstance(share, Mapping) else share
        part_of = quantity(one, f"{what}: attainable", "number")
        if not 0 < part_of <= 1:
            raise ArgumentError(f"{what}: attainable {part_of:g} must be above 0 and at most 1")
        rates[precision] = quantity(value, f"{what}: flops.{precision}", "flops", above=True) * part_of
    ranks = _count(row.get("ranks"), f"{what}: ranks (GPUs of a node, or processes of a CPU node)")
    memory_rate = part("bandwidth", "device", above=True)
    host_memory = part("bandwidth", "host_memory", least=100e9 if device_bytes else memory_rate * ranks, above=True)
    link = part("link", "bandwidth", above=True)
    return Nodes(
        name=str(row.get("name") or kind or name),
        count=_count(row.get("count", 1), f"{what}: count"),
        ranks=ranks,
        flops=rates,
        start=quantity(row["start"], f"{what}: start", "time"),
        memory_rate=memory_rate,
        device_bytes=device_bytes,
        host_bytes=part("memory", "host", above=True),
        host_rate=part("bandwidth", "host", least=memory_rate, above=True),
        # AdamW moves 28 bytes a parameter; what the host's memory gives is the limit (docs/optimizers.md)
        host_update=quantity(row["host_update"], f"{what}: host_update", above=True)
        if "host_update" in row
        else host_memory / 28,
        disk_bytes=part("memory", "disk"),
        disk_rate=part("bandwidth", "disk"),
        link_rate=link,
        link_latency=part("link", "latency", least=5e-6),
        net_rate=part("network", "bandwidth", least=link, above=True),
        net_latency=part("network", "latency", least=10e-6),
        reserve=quantity(row["reserve"], f"{what}: reserve", "bytes"),
    )


def _kind(table: str, key: str) -> str:
    return "bytes" if table == "memory" else "time" if key == "latency" else "rate"


_PARTS = {
    "memory": ("device", "host", "disk"),
    "bandwidth": ("device", "host", "host_memory", "disk"),
    "link": ("bandwidth", "latency"),
    "network": ("bandwidth", "latency"),
}
_MEANING = {
    ("memory", "host"): "bytes of the node's memory",
    ("memory", "disk"): "bytes of the node's disk, or 0",
    ("bandwidth", "device"): "bytes/s between a rank's processor and its memory",
    ("bandwidth", "disk"): "bytes/s of the node's disk",
    ("link", "bandwidth"): "bytes/s each way between ranks of a node, of each rank",
}
