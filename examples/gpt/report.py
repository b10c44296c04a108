"""What a run shows and leaves behind: a progress line, loss.csv, loss.png. rich and matplotlib are used where they are, and not missed where not."""

from __future__ import annotations

import csv
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class Point:
    """One moment of training. Losses in bits per byte (validation: None where it was not taken), memory in bytes over all ranks."""

    step: int
    tokens: int
    seconds: float
    train: float
    validation: float | None
    lr: float
    tokens_per_second: float
    memory: int


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Progress:
    """One line that updates on a terminal (with a bar where rich is installed), a plain line every `interval` seconds elsewhere."""

    def __init__(self, interval: float = 5.0) -> None:
        self.interval, self.printed = interval, float("-inf")
        self.terminal = sys.stdout.isatty()
        self.bar = self._rich_bar() if self.terminal else None
        if self.bar:
            self.task = self.bar.add_task("", total=1.0)
            self.bar.start()

    @staticmethod
    def _rich_bar():
        try:
            from rich.progress import BarColumn, Progress as Bar, TextColumn
        except ImportError:
            return None
        return Bar(BarColumn(bar_width=20), TextColumn("{task.description}"), transient=False)

    def update(self, point: Point, total_steps: int | None, share: float, eta: float) -> None:
        """total_steps: None while it is not known. share: of the budget that is used up, 0 to 1. eta: seconds."""
        text = (f"step {point.step}/{total_steps or '?'}  loss {point.train:.3f} bits/byte  {point.tokens_per_second:,.0f} tokens/s  "
                f"{point.memory / 2**20:,.0f} MiB  ETA {_clock(eta)}")
        if self.bar:
            self.bar.update(self.task, completed=min(share, 1.0), description=text)
        elif self.terminal:
            print(f"\r{text}\x1b[K", end="", flush=True)
        elif time.monotonic() - self.printed >= self.interval:
            print(text, flush=True)
            self.printed = time.monotonic()

    def close(self) -> None:
        if self.bar:
            self.bar.stop()
        elif self.terminal:
            print()


def read_csv(path: Path, until_step: int) -> list[Point]:
    """The points of an earlier run up to `until_step`; none if there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="") as f:
        rows = [Point(int(r["step"]), int(r["tokens"]), float(r["seconds"]), float(r["train"]),
                      float(r["validation"]) if r["validation"] else None, float(r["lr"]), float(r["tokens_per_second"]), int(r["memory"]))
                for r in csv.DictReader(f)]
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
    axes.plot([p.tokens for p in taken], [p.validation for p in taken], color="#08519c", marker="o", markersize=4, label="validation")
    axes.axhline(order0, color="#777777", linestyle="--", linewidth=1, label=f"order-0 entropy, {order0:.2f}")
    if taken:
        axes.annotate(f"{taken[-1].validation:.2f}", (taken[-1].tokens, taken[-1].validation), textcoords="offset points", xytext=(0, -16), ha="center")
    axes.set(xlabel="tokens (bytes) seen", ylabel="loss, bits per byte", title=title, ylim=(0, None))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
    return None
