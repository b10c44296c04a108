"""A cluster as its owner describes it: kinds of nodes, what a rank computes, what memory holds, how fast links are.
YAML or JSON, read without executing anything; docs/planner.md has the format."""

from __future__ import annotations

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


def quantity(value: Any, what: str) -> float:
    """A number, or one with a unit: "80 GiB", "25 GB/s", "312 TFLOP/s", "5 us". ArgumentError names `what`."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        found = float(value)
    elif isinstance(value, str) and (m := _QUANTITY.fullmatch(value)):
        number, unit = m.groups()
        unit = unit.removesuffix("/s")
        for end in ("FLOPs", "FLOPS", "FLOP", "flops", "B"):
            if unit.endswith(end):
                unit = unit.removesuffix(end)
                break
        scale = _TIMES.get(unit) if unit in _TIMES else _UNITS.get(unit)
        if scale is None:
            raise ArgumentError(f"{what}: {value!r} has no unit that is known; write as in 80 GiB, 25 GB/s, 5 us")
        try:
            found = float(number.replace("_", "")) * scale
        except ValueError:
            raise ArgumentError(f"{what}: {value!r} is not a number with a unit") from None
    else:
        raise ArgumentError(f"{what}: {value!r} is not a number, or one with a unit such as 80 GiB, 25 GB/s, 5 us")
    if not math.isfinite(found) or found < 0:
        raise ArgumentError(f"{what}: {value!r} must be a finite number of at least 0")
    return found


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
            raise ArgumentError(f"cluster {os.fspath(path)}: {exc}") from exc
        return cls.of(_parsed(text, os.fspath(path)), Path(path).stem)

    @classmethod
    def of(cls, given: Any, name: str = "cluster") -> Cluster:
        """From what a file holds. ArgumentError for unknown or missing keys and values that are no sizes."""
        top = _mapping(given, "cluster", _TOP_KEYS)
        rows = top.get("nodes")
        if not isinstance(rows, list) or not rows:
            raise ArgumentError(
                "cluster: nodes must be a list of kinds of nodes, each with count, ranks, flops, memory"
            )
        network = top.get("network", {})
        nodes = tuple(_nodes(r, i, network) for i, r in enumerate(rows))
        overlap = quantity(top.get("overlap", 0.7 if nodes[0].device_bytes else 0.0), "cluster: overlap")
        if overlap > 1:
            raise ArgumentError(f"cluster: overlap {overlap:g} must be 0 to 1")
        traffic = {
            k: quantity(top[k], f"cluster: {k}") for k in ("update_traffic", "batch_traffic") if top.get(k) is not None
        }
        return cls(str(top.get("name", name)), nodes, overlap, **traffic)


def _parsed(text: str, path: str) -> Any:
    if path.endswith(".json"):
        try:
            return json.loads(text)
        except ValueError as exc:
            raise ArgumentError(f"cluster {path}: no JSON: {exc}") from exc
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as exc:
        raise ArgumentError(
            f"cluster {path}: YAML needs the package PyYAML (pip install pyyaml); or give JSON"
        ) from exc
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as exc:
        raise ArgumentError(f"cluster {path}: no YAML: {exc}") from exc


def _mapping(given: Any, what: str, known: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise ArgumentError(f"{what}: expected a mapping with {', '.join(known)}; got {given!r}")
    if unknown := [k for k in given if k not in known]:
        raise ArgumentError(f"{what}: unknown key {unknown[0]!r}; known are {', '.join(known)}")
    return dict(given)


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
        raise ArgumentError(f"{what}: {value!r} must be a whole number of at least 1")
    return value


def _nodes(given: Any, number: int, network: Any) -> Nodes:
    what = f"cluster: nodes[{number}]"
    own = _mapping(given, what, _NODE_KEYS)
    kind = own.get("type")
    if kind is not None and kind not in _DEVICES:
        raise ArgumentError(f"{what}: type {kind!r} is not known; known are {', '.join(_DEVICES)}, or give the figures")
    row = _layered(_COMMON, _DEVICES.get(str(kind), {}), {"network": network}, own)

    def part(name: str, key: str, *, least: float | None = None) -> float:
        table = _mapping(row.get(name, {}), f"{what}: {name}", _PARTS[name])
        if key not in table:
            if least is None:
                raise ArgumentError(f"{what}: {name}.{key} is missing ({_MEANING[name, key]})")
            return least
        return quantity(table[key], f"{what}: {name}.{key}")

    device_bytes = part("memory", "device", least=0.0)
    flops = row.get("flops")
    if not isinstance(flops, Mapping) or not flops:
        raise ArgumentError(f"{what}: flops is missing: FLOP/s of a rank by precision, such as {{bf16: 312 TFLOP/s}}")
    share = row["attainable"]
    rates = {}
    for precision, value in flops.items():
        if precision not in ("fp32", "bf16", "fp16"):
            raise ArgumentError(f"{what}: flops.{precision}: precisions are fp32, bf16, fp16")
        one = share.get(precision, 1.0) if isinstance(share, Mapping) else share
        part_of = quantity(one, f"{what}: attainable")
        if not 0 < part_of <= 1:
            raise ArgumentError(f"{what}: attainable {part_of:g} must be above 0 and at most 1")
        rates[precision] = quantity(value, f"{what}: flops.{precision}") * part_of
    ranks = _count(row.get("ranks"), f"{what}: ranks (GPUs of a node, or processes of a CPU node)")
    memory_rate = part("bandwidth", "device")
    host_memory = part("bandwidth", "host_memory", least=100e9 if device_bytes else memory_rate * ranks)
    return Nodes(
        name=str(row.get("name") or kind or f"kind {number}"),
        count=_count(row.get("count", 1), f"{what}: count"),
        ranks=ranks,
        flops=rates,
        start=quantity(row["start"], f"{what}: start"),
        memory_rate=memory_rate,
        device_bytes=device_bytes,
        host_bytes=part("memory", "host"),
        host_rate=part("bandwidth", "host", least=memory_rate),
        # AdamW moves 28 bytes a parameter; what the host's memory gives is the limit (docs/optimizers.md)
        host_update=quantity(row["host_update"], f"{what}: host_update") if "host_update" in row else host_memory / 28,
        disk_bytes=part("memory", "disk"),
        disk_rate=part("bandwidth", "disk"),
        link_rate=part("link", "bandwidth"),
        link_latency=part("link", "latency", least=5e-6),
        net_rate=part("network", "bandwidth", least=part("link", "bandwidth")),
        net_latency=part("network", "latency", least=10e-6),
        reserve=quantity(row["reserve"], f"{what}: reserve"),
    )


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
