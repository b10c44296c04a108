"""Pipeline schedules: what each rank computes, in which order, for one step of several micro-batches. Frozen data,
made, checked and simulated by C (zero/schedule.h, which says what each kind is), without tensors and processes.

What travels between ranks is not listed, since it follows: forward of stage s needs what the rank of stage s - 1 made
of the same micro-batch, backward (B or I) of stage s what the rank of stage s + 1 made."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from ..core import lib as _lib
from ..core.lib import C, call
from ..errors import ArgumentError, numeric

Kind = Literal["F", "B", "I", "W"]
_LETTERS: tuple[Kind, ...] = ("F", "B", "I", "W")  # enum dc_schedule_work

# The names of schedules, in the order of enum dc_schedule_kind.
KINDS: tuple[str, ...] = tuple(
    name.decode() for name in itertools.takewhile(bool, map(C.dc_schedule_name, itertools.count()))
)
_DEFAULT_CHUNKS = {"interleaved": 2, "zb-v": 2}


class Action(NamedTuple):
    """One computation: F forward, B backward, or its halves I (gradients of inputs) and W (of weights). stage: counted
    along the whole model."""

    kind: Kind
    stage: int
    micro: int

    def __str__(self) -> str:
        """ "2F0", as in the files of torch.distributed.pipelining."""
        return f"{self.stage}{self.kind}{self.micro}"


def default_chunks(kind: str) -> int:
    """The fewest chunks of the model that a rank holds in schedules of this kind."""
    _number(kind)
    return _DEFAULT_CHUNKS.get(kind, 1)


@numeric
def actions(kind: str, *, stages: int, micro_batches: int, rank: int, chunks: int | None = None) -> tuple[Action, ...]:
    """What `rank` of `stages` ranks computes, in order; each rank holds `chunks` stages (None: as few as the kind has).
    ArgumentError for sizes that the kind does not have."""
    shape = (_number(kind), stages, _chunks(kind, chunks), micro_batches, rank)
    count = ctypes.c_int64()
    call("dc_schedule_actions", *shape, None, 0, ctypes.byref(count))
    out = (_lib.ScheduleAction * count.value)()
    call("dc_schedule_actions", *shape, out, count, ctypes.byref(count))
    return _taken(out)


def stage_rank(kind: str, *, stages: int, stage: int, chunks: int | None = None) -> int:
    """The rank that holds a stage (of stages x chunks in all)."""
    rank = ctypes.c_int64()
    call("dc_schedule_stage_rank", _number(kind), stages, _chunks(kind, chunks), stage, ctypes.byref(rank))
    return rank.value


class Span(NamedTuple):
    """When an action runs."""

    start: float
    end: float


class Load(NamedTuple):
    """Of a rank: the time in which it computes, when its first action begins and its last ends, and the most
    activations (of one micro-batch in one stage, from its F until its B or W) that it holds at a time."""

    busy: float
    first: float
    last: float
    peak: int


@dataclass(frozen=True)
class Forecast:
    """What a schedule takes: each rank's load, and when all is done."""

    loads: tuple[Load, ...]
    makespan: float

    @property
    def busy(self) -> tuple[float, ...]:
        return tuple(load.busy for load in self.loads)

    @property
    def peak(self) -> tuple[int, ...]:
        return tuple(load.peak for load in self.loads)

    @property
    def bubble(self) -> float:
        """The part of the makespan in which ranks wait, over all ranks."""
        return 1 - sum(self.busy) / (len(self.loads) * self.makespan) if self.makespan else 0.0

    @property
    def span(self) -> float:
        """The longest time between a rank's first action and its last: what a step costs where the next one may start
        on a rank while others are still in this one."""
        return max(load.last - load.first for load in self.loads)


@dataclass(frozen=True)
class Timeline(Forecast):
    """The same with the time of each action of each rank."""

    spans: tuple[tuple[Span, ...], ...]


class Costs(NamedTuple):
    """Times of one micro-batch in one stage. B: both halves together."""

    F: float = 1.0
    I: float = 1.0  # noqa: E741
    W: float = 1.0

    @property
    def B(self) -> float:
        return self.I + self.W


EQUAL = Costs()


def predict(
    kind: str,
    *,
    stages: int,
    micro_batches: int,
    chunks: int | None = None,
    costs: Costs | Sequence[Costs] = EQUAL,
    hop: float | Sequence[float] = 0.0,
) -> Forecast:
    """Schedule.make(...).simulate(costs, hop) without its actions: for a search among many."""
    number, chunks = _number(kind), _chunks(kind, chunks)
    total = max(1, stages) * max(1, chunks)
    loads = (_lib.ScheduleLoad * max(1, stages))()
    makespan = ctypes.c_double()
    times = _times(total, costs, hop)
    call("dc_schedule_predict", number, stages, chunks, micro_batches, *times, loads, ctypes.byref(makespan))
    return Forecast(_loads(loads), makespan.value)


@dataclass(frozen=True)
class Schedule:
    """The actions of all ranks, by whomever they were made. `stages` counts chunks: of the whole model."""

    ranks: tuple[tuple[Action, ...], ...]
    stages: int
    micro_batches: int

    @classmethod
    @numeric
    def make(cls, kind: str, *, stages: int, micro_batches: int, chunks: int | None = None) -> Schedule:
        """A schedule of one of KINDS over `stages` ranks."""
        ranks = tuple(
            actions(kind, stages=stages, micro_batches=micro_batches, rank=r, chunks=chunks)
            for r in range(max(1, stages))
        )
        return cls(ranks, stages * _chunks(kind, chunks), micro_batches)

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """From a line for each rank: what str() gives, or a file of torch.distributed.pipelining's without sends and
        receives. ArgumentError names line and column."""
        ranks = tuple(_parsed(line, number) for number, line in enumerate(text.strip("\n").split("\n"), 1))
        every = [a for rank in ranks for a in rank]
        if not every:
            raise ArgumentError("schedule: the text has no actions; write a line for each rank, as in '0F0 0B0'")
        return cls(ranks, 1 + max(a.stage for a in every), 1 + max(a.micro for a in every))

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, rank)) for rank in self.ranks)

    def check(self) -> tuple[int, ...]:
        """The most activations (of one micro-batch in one stage, from its F until its B or W) that each rank holds at a
        time. ArgumentError, naming rank, action and micro-batch, if this can't be executed with sends that do not
        block: an action is missing or there twice, or ranks wait for each other for ever."""
        peak = (ctypes.c_int64 * len(self.ranks))()
        call("dc_schedule_check", self._core, peak)
        return tuple(peak)

    def simulate(self, costs: Costs | Sequence[Costs] = EQUAL, hop: float | Sequence[float] = 0.0) -> Timeline:
        """Every action as early as it can be. costs: of all stages, or of each. hop: how long a message takes from one
        rank to the next: of all boundaries between stages, or of each. Any unit."""
        spans = (_lib.ScheduleSpan * max(1, sum(map(len, self.ranks))))()
        loads = (_lib.ScheduleLoad * len(self.ranks))()
        makespan = ctypes.c_double()
        times = _times(self.stages, costs, hop)
        call("dc_schedule_simulate", self._core, *times, spans, loads, ctypes.byref(makespan))
        every = iter(spans)
        timed = tuple(tuple(Span(s.start, s.end) for s in itertools.islice(every, len(r))) for r in self.ranks)
        return Timeline(_loads(loads), makespan.value, timed)

    @cached_property
    def _core(self) -> _lib.Schedule:
        """As C sees it; ctypes keeps the arrays alive."""
        every = [a for rank in self.ranks for a in rank]
        rows = (_lib.ScheduleAction * max(1, len(every)))(
            *(_lib.ScheduleAction(_LETTERS.index(a.kind), a.stage, a.micro) for a in every)
        )
        begin = (ctypes.c_int64 * (len(self.ranks) + 1))(0, *itertools.accumulate(map(len, self.ranks)))
        return _lib.Schedule(rows, begin, len(self.ranks), self.stages, self.micro_batches)


@dataclass(frozen=True)
class Order:
    """How a pipeline of `ranks` ranks goes through its micro-batches: by a schedule of one of KINDS, or by one that is
    given, for its number of micro-batches. chunks: stages on each rank."""

    name: str
    ranks: int
    chunks: int
    given: Schedule | None = None

    @classmethod
    def of(cls, schedule: str | Schedule, ranks: int, chunks: int | None = None) -> Order:
        """chunks: None: as few as the kind has, or as the given schedule says. ArgumentError for a given schedule that
        can't be executed, is for other numbers of ranks or chunks, or has a stage on two ranks."""
        if isinstance(schedule, str):
            return cls(schedule, ranks, chunks or default_chunks(schedule))
        schedule.check()
        if len(schedule.ranks) != ranks or schedule.stages % ranks or chunks not in (None, schedule.stages // ranks):
            wanted = f"{ranks} ranks" + (f" with {chunks} chunks each" if chunks else "")
            raise ArgumentError(
                f"the schedule that was given is of {schedule.stages} stages on {len(schedule.ranks)} ranks; expected"
                f" one for {wanted}"
            )
        owners = {(a.stage, r) for r, row in enumerate(schedule.ranks) for a in row}
        if len(owners) != schedule.stages:
            twice = next(s for s, _ in sorted(owners) if sum(s == o for o, _ in owners) > 1)
            raise ArgumentError(f"the schedule that was given runs stage {twice} on two ranks; each has one")
        return cls("given", ranks, schedule.stages // ranks, schedule)

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    def rank_of(self, stage: int) -> int:
        """The rank that holds it."""
        if self.given is None:
            return stage_rank(self.name, stages=self.ranks, chunks=self.chunks, stage=stage)
        return next(r for r, row in enumerate(self.given.ranks) if any(a.stage == stage for a in row))

    def actions(self, rank: int, micro_batches: int) -> tuple[Action, ...]:
        """Those of a rank. ArgumentError if the given schedule is for another number of micro-batches."""
        if self.given is None:
            return actions(self.name, stages=self.ranks, micro_batches=micro_batches, rank=rank, chunks=self.chunks)
        return self.schedule(micro_batches).ranks[rank]

    def forwards(self, rank: int, micro_batches: int) -> tuple[Action, ...]:
        """The forward actions of a rank, for an evaluation: of any number of micro-batches."""
        if self.given is None:
            return tuple(a for a in self.actions(rank, micro_batches) if a.kind == "F")
        stages = [s for s in range(self.stages) if self.rank_of(s) == rank]
        return tuple(Action("F", stage, micro) for micro in range(micro_batches) for stage in stages)

    def schedule(self, micro_batches: int) -> Schedule:
        """That of all ranks."""
        if self.given is None:
            return Schedule.make(self.name, stages=self.ranks, micro_batches=micro_batches, chunks=self.chunks)
        if micro_batches != self.given.micro_batches:
            raise ArgumentError(
                f"the schedule that was given is for {self.given.micro_batches} micro-batches, and a batch has"
                f" {micro_batches}; set gradient_accumulation_steps to {self.given.micro_batches}"
            )
        return self.given


def _number(kind: str) -> int:
    if kind not in KINDS:
        raise ArgumentError(f"schedule: {kind!r} is none; the schedules are {', '.join(KINDS)}")
    return KINDS.index(kind)


def _chunks(kind: str, chunks: int | None) -> int:
    return default_chunks(kind) if chunks is None else chunks


def _times(
    stages: int, costs: Costs | Sequence[Costs], hop: float | Sequence[float]
) -> tuple[ctypes.Array[ctypes.c_double], ctypes.Array[ctypes.c_double]]:
    """Costs of the stages and hops between them, as C takes them."""
    each = [costs] * stages if isinstance(costs, Costs) else list(costs)
    hops = list(hop) if isinstance(hop, Sequence) else [hop] * (stages - 1)
    if len(each) != stages or len(hops) != stages - 1:
        raise ArgumentError(
            f"schedule: {len(each)} costs and {len(hops)} hops for {stages} stages; there is a cost for each stage and"
            " a hop for each boundary between two"
        )
    cost = (ctypes.c_double * (4 * stages))(*(t for c in each for t in (c.F, c.B, c.I, c.W)))
    return cost, (ctypes.c_double * max(1, len(hops)))(*hops)


def _loads(loads: ctypes.Array[_lib.ScheduleLoad]) -> tuple[Load, ...]:
    return tuple(Load(x.busy, x.first, x.last, x.peak) for x in loads)


def _taken(rows: ctypes.Array[_lib.ScheduleAction]) -> tuple[Action, ...]:
    return tuple(Action(_LETTERS[a.work], a.stage, a.micro) for a in rows)


def _parsed(line: str, number: int) -> tuple[Action, ...]:
    text, count = line.strip("\r").encode(), ctypes.c_int64()
    try:
        call("dc_schedule_parse", text, None, 0, ctypes.byref(count))
    except ArgumentError as exc:
        raise ArgumentError(f"schedule: line {number}, {exc}") from None
    out = (_lib.ScheduleAction * count.value)()
    call("dc_schedule_parse", text, out, count, ctypes.byref(count))
    return _taken(out)
