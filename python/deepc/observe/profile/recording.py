"""The timeline: what every rank does when, and its memory, as a trace for ui.perfetto.dev (trace.py).

    with deepc.profile.timeline("timeline"):            # or {"deepc": {"timeline": {"steps": [3, 5]}}}, or
    DEEPC_TIMELINE=3-5
        for batch in loader: ...

A Recorder collects events of one process while it is on: the events of the engines (probe.py), finished collectives
(comms_logger's tap on the C core's record), the data loader's and the disk's waiting, spans of the user, memory. At its
end the ranks tell each other when they came to each collective, so that every rank knows how long it waited for the
last one; each writes trace.rank<R>.json, rank 0 all of them in trace.json."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ...comm.calls import Finished, logger
from ...core import env
from ...core.foreign import patches, private
from ...core.telemetry import waits
from ...engine.base import say
from ...errors import ArgumentError, DeepcError
from ...zero.parameters import owners
from . import categories
from . import probe as shared
from .clock import Clock, align
from .probe import Listener, Probe, probe_of
from .scheduled import write_json
from .trace import Event, merge, to_json

_log = logging.getLogger("deepc")
FOLDER = "timeline"
_LEAST_WAIT_NS = 1000
_DISK = ("save_checkpoint", "load_checkpoint", "save_16bit_model", "write shard", "publish checkpoint")
_NOT_SHOWN = ("initialize", "discard")


def _world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class Recorder:
    """Records this process. modules: also every module's forward and backward, of the engines (True) or of a module
    given. memory_ms: time between samples of memory beside those at the borders of spans; 0: only those."""

    def __init__(self, modules: bool | torch.nn.Module = False, memory_ms: float = 5.0) -> None:
        self.rank, self.world = _world()
        self.events: list[Event] = []
        self.counters: list[tuple[int, dict[str, int]]] = []
        self.clock = Clock()
        self._modules, self._memory_s = modules, memory_ms / 1000
        self._calls: list[Finished] = []
        self._groups: dict[int, str] = {}
        self._listeners: list[tuple[weakref.ref[Any], Spans]] = []
        self._hooks: list[Any] = []
        self._end = threading.Event()
        self._sampler: threading.Thread | None = None
        self._next_batch: tuple[Any, Any] | None = None  # torch's, ours
        self._states: dict[int, int] = {}
        self.on = False

    # ---- switching ---------------------------------------------------------------------------------------------------
    def start(self, engines: Any = ()) -> None:
        """Begins. Collective over all ranks."""
        if shared.recorder is not None:
            raise DeepcError("a timeline is being recorded already in this process; one at a time")
        self.clock = align()
        shared.recorder, self.on = self, True
        logger.tap(self._calls.append)
        waits.tap(self._waited_for)
        self._watch_loaders()
        for engine in engines:
            self._listen_to(engine)
        if self._listeners:
            self.sample()  # not before all are known: it would be the memory of some
        if isinstance(self._modules, torch.nn.Module):
            self._hook_modules(self._modules)
        if self._memory_s > 0:
            self._sampler = threading.Thread(target=self._sample_on, name="deepc-timeline", daemon=True)
            self._sampler.start()

    def watch(self, engine: Any) -> None:
        """Also this engine."""
        self._listen_to(engine)
        self.sample()

    def _listen_to(self, engine: Any) -> None:
        spans = Spans(self, engine)
        probe_of(engine).add(spans)
        self._listeners.append((weakref.ref(engine), spans))
        self._states[id(engine)] = categories.optimizer_states(engine)
        if self._modules is True:
            self._hook_modules(engine.module)

    def stop(self) -> None:
        """Ends the recording of this process; nothing of it is left in it."""
        if not self.on:
            return
        self.on, shared.recorder = False, None
        self._end.set()
        if self._sampler is not None:
            self._sampler.join()
        self.sample()
        self._groups = _groups()
        logger.untap(self._calls.append)
        waits.untap(self._waited_for)
        self._leave_loaders()
        for handle in self._hooks:
            handle()
        self._hooks.clear()
        for engine, spans in self._listeners:
            if (alive := engine()) is not None and alive.profile is not None:
                alive.profile.drop(spans)

    # ---- events ------------------------------------------------------------------------------------------------------
    def add(
        self, lane: str, name: str, begin: int, end: int, args: dict[str, Any] | None = None, cat: str = ""
    ) -> None:
        """A slice, times of time.monotonic_ns()."""
        if self.on:
            self.events.append(Event(lane, name, begin, max(begin, end), args or {}, cat))

    @contextlib.contextmanager
    def span(self, name: str, lane: str = "compute", args: dict[str, Any] | None = None) -> Iterator[None]:
        """See deepc.profile.span."""
        if lane not in ("compute", "disk", "waiting"):
            raise ArgumentError(f"span {name!r}: lane {lane!r} is not one of compute, disk, waiting")
        begin = time.monotonic_ns()
        try:
            yield
        finally:
            self.add(lane, name, begin, time.monotonic_ns(), args)

    def sample(self) -> None:
        """The memory now."""
        engines = [e for e, _ in ((ref(), s) for ref, s in self._listeners) if e is not None]
        states = sum(self._states.get(id(e), 0) for e in engines)
        self.counters.append((time.monotonic_ns(), categories.sample(engines, states)))

    def _sample_on(self) -> None:
        while not self._end.wait(self._memory_s):
            with contextlib.suppress(
                RuntimeError
            ):  # a dictionary of gradients changed while it was copied: the next sample has it
                self.sample()

    def _watch_loaders(self) -> None:
        """Every DataLoader's next batch is a wait for data. torch has no hook for it: its iterators' class is patched
        while the recording lasts."""
        cls = private.loader_iterator()
        original = cls.__next__

        def timed(it: Any) -> Any:
            if not self.on:  # somebody has patched it once more, and still calls ours
                return original(it)
            shared.seen()
            begin = time.monotonic_ns()
            try:
                return original(it)
            finally:
                self.add("waiting", "data loader", begin, time.monotonic_ns(), {"kind": "data"})

        self._next_batch = original, timed
        patches.applied("data-loader")
        cls.__next__ = timed

    def _leave_loaders(self) -> None:
        """Takes the patch away, if it is still the last one: one that came later stays, and what it calls of ours does
        nothing any more."""
        cls = private.loader_iterator()
        if self._next_batch is not None and cls.__next__ is self._next_batch[1]:
            cls.__next__ = self._next_batch[0]
            patches.undone("data-loader")
        self._next_batch = None

    def _waited_for(self, name: str, begin: int, end: int, what: dict[str, Any]) -> None:
        """A wait that a part below the engine tells (core/telemetry/waits.py): a streamed unit's parameters."""
        shared.seen()
        self.add("waiting", name, begin, end, what)

    def _hook_modules(self, root: torch.nn.Module) -> None:
        from .modules import hook

        self._hooks.append(hook(root, self))

    # ---- the end -----------------------------------------------------------------------------------------------------
    def _shared_calls(self) -> list[tuple[tuple[str, int], str, int, int]]:
        """((group, number), operation, begin, end) of the collectives that other ranks know by the same key."""
        out = []
        for c in self._calls:
            group = c.label or self._groups.get(c.group, "")
            if group and c.seq >= 0 and c.op not in ("send", "recv"):
                out.append(((group, c.seq), c.op, c.begin_ns, c.end_ns))
        return out

    def settle(self, together: bool) -> None:
        """Turns calls into events. together: and finds out how long this rank waited for others in them; collective
        then."""
        for c in self._calls:
            args = {"bytes": c.nbytes, "ranks": c.ranks, **({"where": c.where} if c.where else {})}
            self.events.append(Event("communication", c.op, c.begin_ns, c.end_ns, args))
        if together and self.world > 1:
            self._find_waiting()
        self._calls.clear()

    def _find_waiting(self) -> None:
        mine = self._shared_calls()
        offset = self.clock.offset_ns
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, {key: begin + offset for key, _, begin, _ in mine})
        reduces = [(e.begin, e.end) for e in self.events if e.name == "reduce"]
        left: dict[tuple[int, int], tuple[int, int]] = {}
        for key, op, begin, end in mine:
            last, who = max((theirs[key] - offset, r) for r, theirs in enumerate(everyone) if key in theirs)
            if who == self.rank:
                continue
            if op == "reduce_bucket":  # it runs beside backward: only what is left of it at the end is waiting
                for span in reduces:
                    if span[0] < last < end and begin < span[1]:
                        left[span] = max(left.get(span, (0, 0)), (last, who))
            else:
                self._waited(begin, min(last, end), who, op)
        for (begin, end), (last, who) in left.items():
            self._waited(begin, min(last, end), who, "reduce_bucket")

    def _waited(self, begin: int, until: int, who: int, op: str) -> None:
        if until - begin > _LEAST_WAIT_NS:
            self.events.append(Event("waiting", f"waiting for rank {who}", begin, until, {"kind": "ranks", "op": op}))

    def trace(self, other: dict[str, Any] | None = None) -> dict[str, Any]:
        """This rank's trace."""
        clock = {"offset_ns": self.clock.offset_ns, "bound_ns": self.clock.bound_ns}
        return to_json(
            self.rank,
            self.world,
            socket.gethostname(),
            self.events,
            self.counters,
            self.clock.offset_ns,
            self.clock.start_ns,
            {"clock": clock, **(other or {})},
        )

    def finish(self, folder: str, *, together: bool = True, whole: bool = True, **other: Any) -> str:
        """As end. DeepcError if something can't be written; on all ranks if `together`."""
        path, failure = self.end(folder, together=together, whole=whole, **other)
        if failure:
            raise DeepcError(failure)
        return path

    def end(self, folder: str, *, together: bool = True, whole: bool = True, **other: Any) -> tuple[str, str]:
        """Stops, and writes trace.rank<R>.json into `folder`; whole: rank 0 also writes trace.json with all ranks
        (together, or if there is one rank). Returns this rank's path, and what could not be written: of any rank, and
        the same on all, if `together`, which is collective."""
        self.stop()
        self.settle(together)
        found = self.trace(other)
        path = os.path.join(folder, f"trace.rank{self.rank}.json")
        failure = ""
        try:
            write_json(path, found)
        except OSError as exc:
            failure = str(exc)
        several = together and self.world > 1
        if several and whole:
            everyone: list[Any] | None = [None] * self.world if self.rank == 0 else None
            dist.gather_object(found, everyone, dst=0)
        else:
            everyone = [found] if whole and self.world == 1 else None
        if everyone is not None and not failure:
            try:
                merge(everyone, os.path.join(folder, "trace.json"))
            except OSError as exc:
                failure = str(exc)
        told: list[Any] = [failure]
        if several:
            told = [None] * self.world
            dist.all_gather_object(told, failure)
        failed = [f"rank {r}: {f}" if several else f for r, f in enumerate(told) if f]
        if not failed:
            return path, ""
        more = f" (and {len(failed) - 1} other ranks')" if len(failed) > 1 else ""
        return path, (
            f"the timeline can't be written: {failed[0]}{more}; set deepc.timeline.folder (or the folder passed) to one"
            " that can be"
        )


def _groups() -> dict[int, str]:
    """Index in the flight record -> name of a group that all its ranks know it by."""
    from ..diagnose.flight import read_own

    record = read_own()
    return {i: g.id for i, g in record.groups.items()} if record is not None else {}


class Spans(Listener):
    """An engine's events, and its steps."""

    def __init__(self, recorder: Recorder, engine: Any) -> None:
        self._recorder, self._engine = recorder, weakref.ref(engine)
        self._open: dict[str, int] = {}
        self._step_began = time.monotonic_ns()

    def begin(self, name: str, now: int) -> None:
        if name in _NOT_SHOWN:
            return
        self._open[name] = now
        if name in ("forward", "backward", "step"):
            self._recorder.sample()

    def end(self, name: str, now: int, stepped: bool) -> None:
        began = self._open.pop(name, None)
        if began is not None:
            self._recorder.add("disk" if name in _DISK else "compute", name, began, now)
        if name in ("forward", "backward", "step"):
            self._recorder.sample()
        if stepped and (engine := self._engine()) is not None:
            now = time.monotonic_ns()
            # Torch's optimizers make them at their first step.
            self._recorder._states[id(engine)] = categories.optimizer_states(engine)
            self._recorder.add(
                "steps", f"step {engine.global_steps}", self._step_began, now, {"step": engine.global_steps}, "step"
            )
            self._step_began = now


class AtSteps(Listener):
    """Records the steps that the configuration (or DEEPC_TIMELINE) names, then writes. Steps are counted as in the log:
    step 1 is the first."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        section = probe.engine._config.deepc.timeline
        (self._first, self._last), modules = _asked(section, env.given("DEEPC_TIMELINE"))
        self._folder = section.folder or shared.run_folder(probe.engine._config) or FOLDER
        self._make: Callable[[], Recorder] = lambda: Recorder(section.modules or modules, section.memory_ms)
        self._recorder: Recorder | None = None
        _unfinished.add(self)
        probe.add(self)  # before the recorder's listener: that one hears of a step's end first
        self._at_border()

    def _at_border(self) -> None:
        """Before the first step, and after each."""
        step = self._probe.engine.global_steps + 1
        if self._recorder is None and self._first <= step <= self._last:
            if shared.recorder is not None:  # another engine of this process was first, and all are recorded there
                self._probe.drop(self)
                return
            self._recorder = self._make()
            self._began = step
            self._recorder.start(owners.alive())
        elif self._recorder is not None and step > self._last:
            self._write(together=True)
        if self._recorder is None and step > self._last:
            self._probe.drop(self)

    def end(self, name: str, now: int, stepped: bool) -> None:
        if stepped:
            if self._recorder is not None:
                logger.drain()
            self._at_border()

    def _write(self, together: bool) -> None:
        recorder, self._recorder = self._recorder, None
        assert recorder is not None
        engine = self._probe.engine
        steps = {"first_step": self._began, "last_step": engine.global_steps}
        path, failure = recorder.end(self._folder, together=together, **steps)
        if failure:  # not worth the run, whose loop this is inside of
            if engine.everyone.rank == 0 or not together:
                _log.warning(f"{failure}. Training goes on without it")
            return
        whole = os.path.join(os.path.dirname(path), "trace.json") if together or recorder.world == 1 else path
        say(engine, f"timeline of steps {self._began} to {engine.global_steps}: {whole} (open it in ui.perfetto.dev)")

    def close(self) -> None:
        _unfinished.discard(self)
        if self._recorder is not None:  # the engine ended before the last step; other ranks need not be here
            self._write(together=False)


_unfinished: weakref.WeakSet[AtSteps] = weakref.WeakSet()


@atexit.register
def _at_exit() -> None:
    """Scripts that end before the last step, without engine.destroy()."""
    for one in list(_unfinished):
        with contextlib.suppress(Exception):  # the process ends: what is half gone by now must not change how
            one.close()


def _asked(section: Any, text: str) -> tuple[tuple[int, int], bool]:
    """((first step, last step), modules). DEEPC_TIMELINE, "3-5", "3" or "3-5,modules", comes before the
    configuration."""
    if not text:
        begin, end = section.steps
        return (max(1, begin), end), False
    steps, _, more = text.partition(",")
    first, _, last = steps.partition("-")
    if (
        not first.isdigit()
        or not (last or first).isdigit()
        or more not in ("", "modules")
        or not 1 <= int(first) <= int(last or first)
    ):
        raise ArgumentError(
            f'DEEPC_TIMELINE={text!r}: expected steps as "3-5" or "3" (the first step is 1), and ",modules" for every'
            " module's times"
        )
    return (int(first), int(last or first)), more == "modules"


@contextlib.contextmanager
def timeline(
    folder: str | os.PathLike[str] = FOLDER,
    *,
    modules: bool | torch.nn.Module = False,
    memory_ms: float = 5.0,
    whole: bool = True,
) -> Iterator[Recorder]:
    """Records what runs inside, of all engines of this process, and writes `folder`/trace.rank<R>.json, and with
    `whole` trace.json with all ranks. modules: also every module's forward and backward: of the engines (True) or of
    this one. memory_ms: see Recorder. Collective over all ranks; if the body raises, this rank's file is written
    without the others."""
    recorder = Recorder(modules, memory_ms)
    recorder.start(owners.alive())
    try:
        yield recorder
    except BaseException:
        with contextlib.suppress(DeepcError):  # the body's own error is the one to see
            recorder.finish(os.fspath(folder), together=False, whole=False)
        raise
    recorder.finish(os.fspath(folder), whole=whole)
