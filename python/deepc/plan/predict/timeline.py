"""A pipeline schedule as a person sees it: a row for each rank, time to the right, as text or as an SVG picture.

    deepc plan --schedule 1f1b --stages 4 --micro-batches 8

Times are those of a simulation (zero/schedule.h) with equal stages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import ArgumentError
from ..schedule import KINDS, Action, Costs, Forecast, Schedule, Span, Timeline, default_chunks, predict

if TYPE_CHECKING:
    import argparse

_DEFAULTS = {
    "stages": 4,
    "micro_batches": 8,
    "chunks": None,
    "costs": "1,1,1",
    "hop": 0.0,
    "svg": None,
    "text": False,
}
_WIDEST = 1 << 17  # columns of a drawing
_COLOURS = {"F": "#4e79a7", "B": "#59a14f", "I": "#76b7b2", "W": "#f28e2b"}


def draw(schedule: Schedule, time: Timeline) -> str:
    """A line for each rank: "F0" and the like from where an action starts, dashes while it lasts, dots while the rank
    waits; then how much it computes and what it holds. The shortest action is as wide as its name. ArgumentError where
    it is so short beside the whole that no terminal shows that."""
    chunks = _chunks(schedule)
    names = [[_name(a, schedule) for a in rank] for rank in schedule.ranks]
    shortest = min((s.end - s.start for rank in time.spans for s in rank if s.end > s.start), default=1.0)
    scale = (1 + max(len(n) for rank in names for n in rank)) / shortest
    if not time.makespan * scale <= _WIDEST:
        raise ArgumentError(
            f"a drawing of {time.makespan * scale:.3g} columns, in which the shortest action ({shortest:g} of"
            f" {time.makespan:g}) is as wide as its name, is too wide: at most {_WIDEST} are drawn. Give times that are"
            " nearer to each other (--costs, --hop), fewer micro-batches, or --text"
        )
    lines = []
    for rank, (row, spans, peak) in enumerate(zip(names, time.spans, time.peak)):
        cells = ["."] * round(time.makespan * scale)
        for name, span in zip(row, spans):
            begin, end = round(span.start * scale), round(span.end * scale)
            cells[begin:end] = name[: end - begin].ljust(end - begin - 1, "-").ljust(end - begin)
        lines.append(
            f"rank {rank}  {''.join(cells)}  computes {time.busy[rank] / time.makespan:.1%}, holds"
            f" {peak / chunks:g} micro-batch{'es' * (peak != chunks)}"
        )
    return "\n".join(lines)


def summary(time: Forecast) -> str:
    """One sentence: how long it takes and how much of that is waiting."""
    work = max(time.busy)
    waited = f"{time.bubble:.1%} ({time.makespan / work - 1:.1%} of the work)"
    text = f"makespan {time.makespan:g}, of which ranks wait {waited}"
    if time.span < time.makespan:
        text += f"; a rank is done {time.span:g} after it began, {time.span / work - 1:.1%} more than its work"
    return text


def svg(schedule: Schedule, time: Timeline, title: str) -> str:
    """A picture that needs nothing else; each action says on hovering what it is and when."""
    left, width, row = 60, 1100, 30
    scale = width / time.makespan
    height = 40 + row * len(schedule.ranks)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 20} {height + 30}"'
        ' font-family="sans-serif" font-size="12">',
        f'<text x="{left}" y="20" font-size="14">{title}</text>',
    ]
    for rank, (actions, spans) in enumerate(zip(schedule.ranks, time.spans)):
        y = 40 + row * rank
        out.append(f'<text x="8" y="{y + 17}">rank {rank}</text>')
        out.append(f'<rect x="{left}" y="{y}" width="{width}" height="{row - 6}" fill="#eeeeee"/>')
        out += [
            _bar(a, s, schedule, left + s.start * scale, y, (s.end - s.start) * scale) for a, s in zip(actions, spans)
        ]
    out.append(f'<text x="{left}" y="{height + 18}">{summary(time)}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def _bar(action: Action, span: Span, schedule: Schedule, x: float, y: int, width: float) -> str:
    name = _name(action, schedule)
    shade = 1 - 0.5 * (action.stage // len(schedule.ranks)) / _chunks(schedule)
    label = f'<text x="{x + width / 2:.2f}" y="{y + 16}" text-anchor="middle" font-size="10">{name}</text>'
    return (
        f'<g><title>{name} in stage {action.stage}: {span.start:g} to {span.end:g}</title><rect x="{x:.2f}" y="{y}"'
        f' width="{width:.2f}" height="24" fill="{_COLOURS[action.kind]}" fill-opacity="{shade:g}" stroke="white"/>'
        f"{label if width > 7 * len(name) else ''}</g>"
    )


def _chunks(schedule: Schedule) -> int:
    return schedule.stages // len(schedule.ranks)


def _name(action: Action, schedule: Schedule) -> str:
    """ "F0", with a letter for the chunk where a rank has several: "F0b"."""
    chunk = action.stage // len(schedule.ranks)
    return f"{action.kind}{action.micro}" + (chr(ord("a") + chunk) if _chunks(schedule) > 1 else "")


# ---- the command -----------------------------------------------------------------------------------------------------
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `deepc plan --schedule`."""
    group = parser.add_argument_group("a pipeline schedule, instead of --config and --model")
    group.add_argument(
        "--schedule", choices=(*KINDS, "all"), help="draw what each rank of a pipeline computes when; all: compare them"
    )
    group.add_argument("--stages", type=int, metavar="P", help="ranks of the pipeline (4)")
    group.add_argument("--micro-batches", type=int, metavar="M", help="micro-batches of a step (8)")
    group.add_argument("--chunks", type=int, metavar="V", help="stages on each rank (as few as the schedule has)")
    group.add_argument(
        "--costs",
        metavar="F,I,W",
        help="times of a micro-batch in a rank's layers: forward, backward for inputs, for weights (1,1,1)",
    )
    group.add_argument("--hop", type=float, metavar="T", help="time of a message between two ranks (0)")
    group.add_argument("--svg", metavar="FILE", help="write a picture as well")
    group.add_argument("--text", action="store_true", help="print the actions instead, a line for each rank: 0F0 0B0")
    parser.set_defaults(**_DEFAULTS)


def stray(args: argparse.Namespace) -> str | None:
    """An option that was given and means nothing without --schedule."""
    given = [name for name, default in _DEFAULTS.items() if not args.schedule and getattr(args, name) != default]
    return f"--{given[0].replace('_', '-')}" if given else None


def run(args: argparse.Namespace) -> int:
    """`deepc plan --schedule`."""
    size = f"{args.stages} rank{'s' * (args.stages > 1)}, {args.micro_batches} micro-batch"
    size += "es" * (args.micro_batches > 1)
    if args.schedule == "all":
        print(f"{size}\n{_comparison(args)}")
        return 0
    chunks = default_chunks(args.schedule) if args.chunks is None else args.chunks
    schedule = Schedule.make(args.schedule, stages=args.stages, micro_batches=args.micro_batches, chunks=chunks)
    time = schedule.simulate(_costs(args.costs, chunks), args.hop)
    title = f"{args.schedule}: {size}" + f", {chunks} stages on each rank (a, b, ...)" * (chunks > 1)
    print(schedule if args.text else f"{title}\n{draw(schedule, time)}\n{summary(time)}")
    if args.svg:
        write("--svg", args.svg, svg(schedule, time, title))
    return 0


def write(option: str, path: str, text: str) -> None:
    """The file that an option names."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as exc:
        raise ArgumentError(f"{option} {path}: {exc.strerror}; name a file in a folder that can be written") from exc


def _comparison(args: argparse.Namespace) -> str:
    """A row for each kind, with as few stages on a rank as it has."""
    if args.chunks or args.svg or args.text:
        raise ArgumentError("--schedule all compares: --chunks, --svg and --text are for one schedule; name it")
    lines = [
        f"{'schedule':<13}{'stages on a rank':>17}{'makespan':>10}{'waiting, of work':>18}{'within a rank':>15}"
        f"{'holds':>8}"
    ]
    for kind in KINDS:
        chunks = default_chunks(kind)
        time = predict(
            kind,
            stages=args.stages,
            micro_batches=args.micro_batches,
            costs=_costs(args.costs, chunks),
            hop=args.hop,
        )
        work = max(time.busy)
        lines.append(
            f"{kind:<13}{chunks:>17}{time.makespan:>10g}{time.makespan / work - 1:>18.1%}{time.span / work - 1:>15.1%}"
            f"{max(time.peak) / chunks:>8g}"
        )
    return "\n".join(lines)


def _costs(text: str, chunks: int) -> Costs:
    """Of one stage, from "F,I,W" of a rank's."""
    try:
        forward, inputs, weights = (float(t) / chunks for t in text.split(","))
    except ValueError:
        raise ArgumentError(f"--costs {text}: give three times, F,I,W, such as 1,1,1") from None
    if min(forward, inputs, weights) <= 0:
        raise ArgumentError(f"--costs {text}: each time must be above 0")
    return Costs(forward, inputs, weights)
