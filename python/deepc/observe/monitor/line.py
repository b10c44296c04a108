"""The text of a record (the names are those of metrics.jsonl, see docs/logging.md): one line, which fits the terminal
by leaving out what matters least."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

Record = Mapping[str, Any]


def plain(value: Any) -> Any:
    """`value` in JSON's types: numbers that are not finite become "nan", "inf", "-inf"."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if value is None or isinstance(value, (str, int, bool)):
        return value
    return str(value)


def as_json(record: Record) -> str:
    """One line of JSON."""
    try:
        return json.dumps(record, allow_nan=False)  # nearly always
    except (ValueError, TypeError):
        return json.dumps(plain(record), allow_nan=False)


# ---- pieces ----------------------------------------------------------------------------------------------------------
def number(x: float) -> str:
    """About four digits: 12,345  1,234  123.4  1.234  0.1234; thousands as k from a million on."""
    if not math.isfinite(x):
        return str(x)
    if abs(x) >= 1e6:
        return f"{x / 1000:,.0f}k"
    if abs(x) >= 1000:
        return f"{x:,.0f}"
    return f"{x:.1f}" if abs(x) >= 100 else f"{x:.2f}" if abs(x) >= 10 else f"{x:.4g}"


def size(nbytes: float) -> str:
    """ "96 MiB", "1.24 GiB"."""
    mib = nbytes / 2**20
    return f"{mib:.0f} MiB" if mib < 1000 else f"{mib / 1024:.2f} GiB" if mib < 100 * 1024 else f"{mib / 1024:.0f} GiB"


def clock(seconds: float) -> str:
    """ "0:42", "12:05", "3:04:05", "2d 03:04"."""
    s = max(0, int(seconds + 0.5))
    if s >= 86400:
        return f"{s // 86400}d {s % 86400 // 3600:02d}:{s % 3600 // 60:02d}"
    return f"{s // 3600}:{s % 3600 // 60:02d}:{s % 60:02d}" if s >= 3600 else f"{s // 60}:{s % 60:02d}"


def _step(r: Record) -> str:
    total = r.get("total_steps")
    return f"step {r['step']}/{'~' * bool(r.get('total_about'))}{total}" if total else f"step {r['step']}"


def _flops(r: Record) -> str | None:
    tflops = r.get("tflops")
    if not tflops:
        return None
    text = f"{tflops:.3g} TFLOP/s" if tflops >= 0.1 else f"{1000 * tflops:.3g} GFLOP/s"
    return f"{text} ({100 * r['fraction_of_peak']:.0f} % of peak)" if r.get("fraction_of_peak") else text


def _memory(r: Record) -> str | None:
    m = r.get("memory") or {}
    parts = [size(m["process"])] if m.get("process") else []
    if m.get("shared"):
        parts.append(f"{size(m['shared'])} shared")
    if m.get("gpu"):
        parts.append(f"{size(m['gpu'])} GPU")
    return "mem " + " + ".join(parts) if parts else None


def _wait(r: Record) -> str | None:
    """Shares of the time, checkpoints included; those below half a percent are left out."""
    wait = r.get("wait") or {}
    seconds = (r.get("time_s") or 0.0) + wait.get("disk_s", 0.0)
    if not seconds:
        return None
    shares = [
        (name, 100 * wait.get(key, 0.0) / seconds)
        for name, key in (("data", "data_s"), ("comm", "communication_s"), ("disk", "disk_s"))
    ]
    shown = [f"{name} {share:.0f} %" for name, share in shares if share >= 0.5]
    return "waits: " + ", ".join(shown) if shown else None


def _scalars(r: Record) -> str | None:
    given = r.get("scalars") or {}
    return "  ".join(f"{k} {number(v)}" for k, v in list(given.items())[:6]) or None


# (what matters least is left out first: higher number; text of the record or None)
_PARTS = (
    (0, _step),
    (0, lambda r: f"loss {r['loss']:.4f}" if r.get("loss") is not None else None),
    (2, lambda r: f"lr {r['lr']:.2e}" if r.get("lr") is not None else None),
    (3, lambda r: f"grad norm {number(r['grad_norm'])}" if r.get("grad_norm") is not None else None),
    (5, lambda r: f"scale {r['loss_scale']:g}" if r.get("loss_scale") is not None else None),
    (6, lambda r: f"skipped {r['skipped_steps']}" if r.get("skipped_steps") else None),
    (6, lambda r: r["mode"] if r.get("mode") else None),
    (1, lambda r: f"{number(r['tokens_per_s'])} tokens/s" if r.get("tokens_per_s") else None),
    (
        1,
        lambda r: (
            f"{number(r['samples_per_s'])} samples/s" if r.get("samples_per_s") and not r.get("tokens_per_s") else None
        ),
    ),
    (4, _flops),
    (5, _memory),
    (7, _wait),
    (4, _scalars),
    (1, lambda r: f"ETA {clock(r['eta_s'])}" if r.get("eta_s") is not None else None),
)


def text(record: Record, width: int | None = None) -> str:
    """The line. width: characters at most, reached by leaving parts out (the step and the loss always stay)."""
    parts = [(rank, said) for rank, make in _PARTS if (said := make(record))]
    while width is not None and len(parts) > 2 and sum(len(t) + 2 for _, t in parts) - 2 > width:
        worst = max(rank for rank, _ in parts)
        if worst == 0:
            break
        at = max(i for i, (rank, _) in enumerate(parts) if rank == worst)
        del parts[at]
    return "  ".join(t for _, t in parts)
