"""Draws when 1-bit exchange pays: the speed-up of a step over the bandwidth of a node, by the model of
deepc.plan.predict.onebit with the costs that this machine has.

    python tests/bench/onebit_model.py --svg docs/pictures/onebit-pays.svg [--json COSTS]

Four nodes of two ranks; models of 25 M and 350 M parameters, steps that compute for 1 and for 10 s. Solid: nothing
overlaps; dashed: uncompressed gradients cross beside backward as far as they can. --json: costs that an earlier run
printed, instead of measuring."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from common import cpu_model, require_deepc

CASES = [(25e6, 1.0, "#1f77b4"), (25e6, 10.0, "#7fb3d9"), (350e6, 1.0, "#d62728"), (350e6, 10.0, "#f4a582")]
NODES, RANKS = 4, 2
LOW, HIGH, TOP = 7, 11, 40.0  # decades of bit/s; the largest speed-up drawn
WIDTH, HEIGHT, LEFT, RIGHT, UPPER, LOWER = 860, 420, 60, 230, 30, 50


def x_of(bits: float) -> float:
    from math import log10

    return LEFT + (log10(bits) - LOW) / (HIGH - LOW) * (WIDTH - LEFT - RIGHT)


def y_of(speedup: float) -> float:
    from math import log

    low, high = log(0.8), log(TOP)
    return HEIGHT - LOWER - (log(max(0.8, speedup)) - low) / (high - low) * (HEIGHT - UPPER - LOWER)


def text(x: float, y: float, words: str, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{words}</text>'


def draw(costs: dict[str, float], machine: str) -> str:
    from deepc.plan.predict.onebit import Kernels, Network, forecast

    kernels = Kernels(costs["pack"], costs["serve"], costs["unpack"])
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
        ' font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    right, bottom = WIDTH - RIGHT, HEIGHT - LOWER
    names = {7: "10 Mbit/s", 8: "100 Mbit/s", 9: "1 Gbit/s", 10: "10 Gbit/s", 11: "100 Gbit/s"}
    for decade, name in names.items():
        x = x_of(10.0**decade)
        out.append(f'<line x1="{x:.1f}" y1="{UPPER}" x2="{x:.1f}" y2="{bottom}" stroke="#ddd"/>')
        out.append(text(x, bottom + 18, name))
    for value in (1, 2, 5, 10, 20, 30):
        y, color = y_of(value), "#888" if value == 1 else "#ddd"
        out.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="{color}"/>')
        out.append(text(LEFT - 8, y + 4, f"{value} x", "end"))
    out.append(text((LEFT + right) / 2, HEIGHT - 10, f"bandwidth of a node; {NODES} nodes of {RANKS} ranks"))
    out.append(text(LEFT, UPPER - 12, "speed-up of a step after the warm-up", "start"))
    for k, (n, compute, color) in enumerate(CASES):
        points: dict[str, list[str]] = {"": [], "5 4": []}
        for i in range(161):
            bits = 10.0 ** (LOW + (HIGH - LOW) * i / 160)
            f = forecast(n, compute, Network(NODES, RANKS, bits / 8, 50e-6), kernels)
            for dash, value in (("", f.speedup), ("5 4", f.least)):
                points[dash].append(f"{x_of(bits):.1f},{y_of(value):.1f}")
        for dash, row in points.items():
            style = f' stroke-dasharray="{dash}"' if dash else ""
            out.append(f'<polyline points="{" ".join(row)}" fill="none" stroke="{color}" stroke-width="1.8"{style}/>')
        y = UPPER + 20 + 22 * k
        out.append(
            f'<line x1="{right + 14}" y1="{y - 4}" x2="{right + 40}" y2="{y - 4}" stroke="{color}" stroke-width="2"/>'
        )
        out.append(text(right + 48, y, f"{n / 1e6:.0f} M parameters, {compute:g} s a step", "start"))
    for k, words in enumerate(("solid: nothing overlaps", "dashed: fp32 beside backward")):
        out.append(text(right + 14, UPPER + 120 + 18 * k, words, "start", 'fill="#555"'))
    out.append(text(right + 14, bottom, machine, "start", 'fill="#555" font-size="10"'))
    return "\n".join([*out, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--svg", required=True)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json")
    args = parser.parse_args()
    require_deepc()
    from deepc.observe.diagnose.onebit import on_paper

    if args.json:
        found = json.loads(Path(args.json).read_text())
    else:
        found = {"costs": on_paper(NODES, RANKS, None, args.seconds)["costs"], "processor": cpu_model()}
        print(json.dumps(found))
    Path(args.svg).write_text(draw(found["costs"], found["processor"]))


if __name__ == "__main__":
    main()
