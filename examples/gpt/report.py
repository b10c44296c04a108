"""What a run leaves behind: loss.csv, loss.png. matplotlib is used where it is, and not missed where not."""

from __future__ import annotations

import csv
from dataclasses import asdict, dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class Point:
    """One moment of training. Losses in bits per byte (validation: None where it was not taken), memory in bytes over
    all ranks."""

    step: int
    tokens: int
    seconds: float
    train: float
    validation: float | None
    lr: float
    tokens_per_second: float
    memory: int


def read_csv(path: Path, until_step: int) -> list[Point]:
    """The points of an earlier run up to `until_step`; none if there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="") as f:
        rows = [
            Point(
                int(r["step"]),
                int(r["tokens"]),
                float(r["seconds"]),
                float(r["train"]),
                float(r["validation"]) if r["validation"] else None,
                float(r["lr"]),
                float(r["tokens_per_second"]),
                int(r["memory"]),
            )
            for r in csv.DictReader(f)
        ]
    return [p for p in rows if p.step <= until_step]


def write_csv(path: Path, points: list[Point]) -> None:
    with path.open("w", newline="") as f:
        writer = csv.DictWriter(f, [c.name for c in fields(Point)])
        writer.writeheader()
        writer.writerows(asdict(p) for p in points)


def write_png(path: Path, points: list[Point], order0: float, title: str) -> str | None:
    """Draws both losses over the tokens seen. Returns None, or why there is no picture."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as exc:
        return f"matplotlib is not installed ({exc})"
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120)
    axes.plot([p.tokens for p in points], [p.train for p in points], color="#9ecae1", linewidth=1, label="training")
    taken = [p for p in points if p.validation is not None]
    axes.plot(
        [p.tokens for p in taken],
        [p.validation for p in taken],
        color="#08519c",
        marker="o",
        markersize=4,
        label="validation",
    )
    axes.axhline(order0, color="#777777", linestyle="--", linewidth=1, label=f"order-0 entropy, {order0:.2f}")
    if taken:
        axes.annotate(
            f"{taken[-1].validation:.2f}",
            (taken[-1].tokens, taken[-1].validation),
            textcoords="offset points",
            xytext=(0, -16),
            ha="center",
        )
    axes.set(xlabel="tokens (bytes) seen", ylabel="loss, bits per byte", title=title, ylim=(0, None))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
    return None
