"""Where records go: lines on stderr, a live line on a terminal, the run folder. Experiment trackers are in
experiments.py.

A sink may fail (a full disk, a package that is not there, a server that is down): Guard says so once and training goes
on without it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.files import atomic_write
from . import line

logger = logging.getLogger("deepc")


class Sink:
    """records: dicts with the names of metrics.jsonl; those with "event" are not steps. Called on the rank that writes,
    between two steps."""

    name = "sink"

    def write(self, records: Sequence[dict[str, Any]]) -> None:
        """Takes records, oldest first, and hands them on to where they can be read."""

    def close(self) -> None:
        """The run is over."""


class Guard:
    """The sinks of one engine. One that raises is dropped, with a warning that says what is lost."""

    def __init__(self) -> None:
        self.sinks: list[Sink] = []

    def open(self, name: str, make: Any, *args: Any) -> Sink | None:
        """make(*args) -> Sink, kept; None (after a warning) if that raises."""
        try:
            sink: Sink = make(*args)
        except (Exception, SystemExit) as exc:
            logger.warning(f"{name} can't be opened, so nothing is written there and training goes on: {_why(exc)}")
            return None
        self.sinks.append(sink)
        return sink

    def write(self, records: Sequence[dict[str, Any]]) -> None:
        for sink in list(self.sinks):
            self._try(sink, sink.write, records)

    def close(self) -> None:
        while self.sinks:
            sink = self.sinks[-1]
            self._try(sink, sink.close)
            if sink in self.sinks:
                self.sinks.remove(sink)

    def _try(self, sink: Sink, what: Any, *args: Any) -> None:
        try:
            what(*args)
        except (Exception, SystemExit) as exc:
            self.sinks.remove(sink)
            logger.warning(
                f"{sink.name}: writing failed, so nothing more is written there and training goes on: {_why(exc)}"
            )


def _why(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__


# ---- lines -----------------------------------------------------------------------------------------------------------
class Lines:
    """A line per record, through the logger "deepc" (so its level counts)."""

    live = False

    def __init__(self, as_json: bool = False, prefix: str = "") -> None:
        self._json, self._prefix = as_json, prefix

    def show(self, record: dict[str, Any], keep: bool) -> None:
        """keep: False asks for a line that the next one replaces; here all stay."""
        if self._json:
            print(line.as_json(record), file=sys.stderr, flush=True)
        else:
            logger.info(self._prefix + line.text(record))

    def end(self, record: dict[str, Any] | None) -> None:
        """No more lines after this one."""
        if record is not None:
            self.show(record, True)


class LiveLine:
    """One line at the bottom of a terminal that every record replaces; those to keep scroll by above it. With rich a
    bar as well, and what the script prints meanwhile goes above; without, a carriage return."""

    live = True

    def __init__(self, stream: Any = None, prefix: str = "") -> None:
        self._stream, self._prefix = stream or sys.stderr, prefix
        self._bar: Any = None
        self._drawn = False
        self._handlers: list[tuple[logging.StreamHandler[Any], Any]] = []

    def show(self, record: dict[str, Any], keep: bool) -> None:
        if keep:
            self._say(self._prefix + line.text(record))
        if not (self._bar or (self._bar is None and self._start_bar())):
            width = shutil.get_terminal_size().columns - 1 - len(self._prefix)
            self._stream.write(f"\r{self._prefix}{line.text(record, width)}\x1b[K")
            self._stream.flush()
            self._drawn = True
            return
        total = record.get("total_steps")
        bar: Any = self._bar
        columns = bar.console.width - (25 if total else 1) - len(self._prefix)
        bar.update(
            self._task,
            total=total,
            completed=record["step"],
            visible=True,
            description=self._prefix + line.text(record, columns),
        )
        bar.refresh()

    def _say(self, text: str) -> None:
        if self._drawn:
            self._stream.write("\r\x1b[K")
            self._drawn = False
        logger.info(text)

    def _start_bar(self) -> bool:
        if self._bar is False:
            return False
        try:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
            from rich.text import Text
        except ImportError:
            self._bar = False
            return False

        class Bar(ProgressColumn):
            """A bar where the number of steps is known."""

            max_refresh = None

            def __init__(self) -> None:
                super().__init__()
                self._of = BarColumn(bar_width=22)

            def render(self, task: Any) -> Any:
                return self._of.render(task) if task.total else Text("")

        console = Console(file=self._stream)
        self._bar = Progress(
            Bar(), TextColumn("{task.description}", markup=False), console=console, auto_refresh=False, transient=True
        )
        self._task = self._bar.add_task("", total=None, visible=False)
        self._bar.start()
        console.show_cursor(True)  # a script that is killed must not leave a terminal without one
        self._redirect_logger()
        return True

    def _redirect_logger(self) -> None:
        """Messages go above the line as well: handlers have kept the stream that was there before."""
        for handler in [*logger.handlers, *logging.root.handlers]:
            if (
                isinstance(handler, logging.StreamHandler)
                and getattr(handler, "stream", None) is self._stream
                and sys.stderr is not self._stream
            ):
                self._handlers.append((handler, handler.setStream(sys.stderr)))

    def end(self, record: dict[str, Any] | None) -> None:
        """The live line goes; `record` stays in its place."""
        for handler, stream in self._handlers:
            handler.setStream(stream)
        self._handlers.clear()
        if self._bar:
            self._bar.stop()
            self._bar = False
        if record is not None:
            self._say(self._prefix + line.text(record))
        elif self._drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def choose_lines(form: str, prefix: str = "") -> Lines | LiveLine | None:
    """form: "auto" (a live line on a terminal, else plain), "plain", "rich", "json" or "none"."""
    if form == "none":
        return None
    if form == "rich" or (form == "auto" and _is_terminal() and not _has_other_bars()):
        return LiveLine(prefix=prefix)
    return Lines(form == "json", prefix)


def _is_terminal() -> bool:
    stream = sys.stderr
    return (
        bool(getattr(stream, "isatty", lambda: False)())
        and os.environ.get("TERM", "") != "dumb"
        and "ipykernel" not in sys.modules
    )


def _has_other_bars() -> bool:
    """tqdm draws already: two live lines would fight."""
    tqdm = sys.modules.get("tqdm")
    return bool(getattr(getattr(tqdm, "tqdm", None), "_instances", None))


# ---- the run folder --------------------------------------------------------------------------------------------------
_CLOCK = ("started", "began", "resumed")  # what run.json says of the times of a run's starts
_open_names: dict[str, set[int]] = {}  # by folder: the numbers of the engines that write there


class Folder(Sink):
    """run.json and metrics.jsonl in a folder; run.2.json and metrics.2.jsonl for a second engine of the process.

    A run that goes on (its first record is not step 1) is appended and keeps the clock of the first start. A fresh run
    moves the metrics of an earlier one aside, to metrics.before-<time>.jsonl."""

    def __init__(self, folder: str | os.PathLike[str], info: dict[str, Any], began: float) -> None:
        """info: what run.json holds. began: time.time() of record time 0."""
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._key = str(self._folder.resolve())
        taken = _open_names.setdefault(self._key, set())
        self._number = next(n for n in range(1, len(taken) + 2) if n not in taken)
        taken.add(self._number)
        dot = "" if self._number == 1 else f".{self._number}"
        self.run_path, self.path = self._folder / f"run{dot}.json", self._folder / f"metrics{dot}.jsonl"
        self.name = f"the run folder ({self.path})"
        self._began, self._shift = began, 0.0
        # The first record tells whether a run goes on. Until then the clock of the one before lies beside this one's: a
        # start that ends without a record must not take it away from the next.
        earlier = _read_json(self.run_path)
        unused = earlier.get("earlier")
        self._earlier: dict[str, Any] = unused if isinstance(unused, dict) else earlier
        self._info = info
        self._file: Any = None
        kept = {k: self._earlier[k] for k in _CLOCK if k in self._earlier}
        self._write_info({"earlier": kept} if kept else {})

    def _write_info(self, more: Mapping[str, Any]) -> None:
        info = line.plain({**self._info, **more})
        with atomic_write(self.run_path) as f:
            f.write((json.dumps(info, indent=2, allow_nan=False) + "\n").encode())

    def _open(self, first_step: int) -> None:
        had = self.path.exists() and self.path.stat().st_size > 0
        resumed = had and first_step > 1
        if had and not resumed:
            mark = time.strftime("%Y%m%dT%H%M%S", time.gmtime(self.path.stat().st_mtime))
            names = (f"{self.path.stem}.before-{mark}{more}.jsonl" for more in ("", *(f"-{n}" for n in range(2, 1000))))
            aside = next(p for name in names if not (p := self.path.with_name(name)).exists())  # of the same second
            os.replace(self.path, aside)
        if resumed and self._earlier.get("began"):
            self._shift = max(0.0, self._began - float(self._earlier["began"]))
            self._info = {
                **self._info,
                "started": self._earlier.get("started"),
                "began": self._earlier["began"],
                "resumed": [*self._earlier.get("resumed", ()), self._info.get("started")],
            }
        self._write_info({})
        self._file = open(self.path, "a", encoding="utf-8")
        if resumed:
            self._file.write(line.as_json({"event": "resume", "step": first_step - 1, "at": self._shift}) + "\n")

    def write(self, records: Sequence[dict[str, Any]]) -> None:
        if not records:
            return
        if self._file is None:
            # A checkpoint that was loaded before the first step says where the run is.
            step = next(
                (
                    r["step"] + 1 if r.get("event") else r["step"]
                    for r in records
                    if r.get("event") in (None, "checkpoint")
                ),
                None,
            )
            if step is None:
                step = records[0].get("step", 0) + 1
            self._open(step)
        if self._shift:
            records = [{**r, "at": r["at"] + self._shift} for r in records]
        self._file.write("".join(line.as_json(r) + "\n" for r in records))
        self._file.flush()

    def close(self) -> None:
        _open_names.get(self._key, set()).discard(self._number)
        if self._file is not None:
            self._file.close()
            self._file = None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return {}
