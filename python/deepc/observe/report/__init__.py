"""`deepc report RUN...`: a run's folder as one HTML page, from which engineers see how a training went. `folder` reads
it, `digest` says what is shown of it, `page` puts it into the page."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...core.files import atomic_write
from ...errors import ArgumentError, DeepcError


def write_report(
    runs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str] | None = None,
    *,
    theme: str | None = None,
) -> Path:
    """Writes the page of one run folder, or the comparison of several, and returns its path.

    out: default report.html in the folder of the run; of several runs in the current folder. theme: "light", "dark" or
    None (as the reader's system). Raises ArgumentError for a folder that is no run, DeepcError if the page can't be
    written."""
    from ...core.lib import C
    from .digest import digest
    from .folder import read_runs
    from .page import page

    folders = [runs] if isinstance(runs, (str, os.PathLike)) else list(runs)
    if not folders:
        raise ArgumentError("give at least one run folder")
    found = [r for f in folders for r in read_runs(f)]
    _distinguish(found)
    target = Path(out) if out is not None else (Path(folders[0]) if len(folders) == 1 else Path()) / "report.html"
    if target.is_dir():
        target = target / "report.html"
    text = page([digest(r) for r in found], version=C.dc_version().decode(), theme=theme)
    try:
        with atomic_write(target) as file:
            file.write(text.encode(errors="replace"))  # a folder's name may be no text
    except OSError as exc:
        raise DeepcError(f"can't write {target}: {exc.strerror}. Give another file with -o.") from exc
    return target


def _distinguish(runs: list[Any]) -> None:
    """Names of the runs in one page: the last parts of their paths that make them differ, and which engine."""
    for depth in range(1, 6):
        names = [
            "/".join(Path(r.path).resolve().parts[-depth:]) + (f" (engine {r.engine})" if r.engine > 1 else "")
            for r in runs
        ]
        if len(set(names)) == len(names) or depth == 5:
            for r, n in zip(runs, names):
                r.name = n
            return


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="folder of a run (deepc.run_dir in the configuration); several: one page that compares them",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="the page; default RUN/report.html, of several runs report.html"
    )
    parser.add_argument("--theme", choices=("light", "dark"), help="default: as the reader's system")
    parser.add_argument("--open", action="store_true", help="show it in the browser")


def run(args: argparse.Namespace) -> int:
    """`deepc report`. Exit code 0, or 1 if the page could not be written."""
    try:
        path = write_report(args.runs, args.output, theme=args.theme)
    except ArgumentError:
        raise
    except DeepcError as exc:
        print(f"deepc report: {exc}", file=sys.stderr)
        return 1
    print(f"{os.fsencode(path).decode(errors='replace')} ({path.stat().st_size / 2**20:.2f} MiB)")
    if args.open:
        import webbrowser

        if not webbrowser.open(path.resolve().as_uri()):
            print(
                "deepc report: no browser found here; copy the file to where there is one, it needs nothing else",
                file=sys.stderr,
            )
    return 0
