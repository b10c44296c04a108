"""Any model that is a chain of blocks, cut into stages where it stands: nothing of it is rewritten.

Every stage runs the model's own forward, so that masks, positions and whatever else it makes of a micro-batch are made
where they are needed. What another rank has is stood in for: modules before the blocks give zeros of the right shape,
blocks before the stage's hand on what they get; the first block of the stage gets what the stage before has sent, and
after its last one forward is left. Parameters of other ranks are on the meta device. The sample goes through the cut
model once, and must come out as from the whole one."""

from __future__ import annotations

import contextlib
import inspect
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from ....core import memory
from ....errors import ArgumentError, DeepcError, UnsupportedError
from ....plan.mesh import Mesh
from ....plan.predict.dryrun import loss_of
from ....plan.schedule import Order
from ....zero.parameters.gathered import broadcast_whole, is_zero_param
from ...axes import AxisGroup
from ...expert.spread import spread_tensors
from ...judged import refuse_released
from ..deferred import in_checkpoint
from ..part import Call, Tie, evaluating, further_names
from ..runtime import Stages
from ..timed import random_states_kept, untouched
from .calls import (
    IN_CHECKPOINT,
    call_instead,
    close,
    every_tensor,
    first_tensor,
    mapped,
    to_meta,
    with_first,
    zeros,
)
from .chain import Unit, trace
from .choose import best, costs_of, joined
from .clock import clock
from .inside import Point

_ROUNDS = 3  # of measuring, after one to warm up


class _ReachedError(Exception):
    """What the stage has of the blocks has run. hidden: what goes to the next stage, a tensor or several."""

    def __init__(self, hidden: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        self.hidden = hidden


class CutModel:
    """The part of `model` that this rank of a pipeline holds (part.py). sample: a micro-batch, passed as in
    model(*sample) or model(**sample), by which stages are cut so that they take equal time; None: transformers' dummy
    inputs, and stages are cut by their parameters. loss_fn(output, batch): the loss, where the model's output is or has
    none. Collective. ArgumentError for a model that is no chain of blocks."""

    wants_batch = True  # masks and positions are made of it in every stage

    def __init__(
        self,
        model: torch.nn.Module,
        mesh: Mesh,
        order: Order,
        sample: Any,
        loss_fn: Callable[[Any, Any], Any] | None,
    ) -> None:
        self._open(model, mesh, order, loss_fn, dist.get_rank())
        batch = self._to_look_at(sample)
        if mesh.tp == 1:  # else who cut its tensors has
            take_from_firsts(model, mesh)
        with random_states_kept(), untouched(model):
            self._chain, whole = trace(model, lambda: self._call_whole(batch))
            units, costs = self._weighed(sample)
        self._choose(units, costs)
        _let_go_of_graphs(model)
        self.ties, self.elsewhere = self._share_out()
        for of in self._let_go:
            if (p := of()) is not None and not is_zero_param(p):
                p.data = p.data.new_empty(0)  # a list of parameters may keep it
        self._take_over()
        with random_states_kept(), untouched(model):
            self._prove(batch, whole)

    def _open(
        self, model: torch.nn.Module, mesh: Mesh, order: Order, loss_fn: Callable[[Any, Any], Any] | None, rank: int
    ) -> None:
        self.mesh, self.order = mesh, order
        self._model, self._loss_fn = model, loss_fn
        self._without_cache = "use_cache" in inspect.signature(model.forward).parameters
        self._rank_of = [order.rank_of(s) for s in range(order.stages)]
        self._here = mesh.coordinates(rank).pp
        self._running: tuple[int, Any] | None = None
        self._taken = False  # whether the stage that runs has begun at what the one before sent
        self._between: torch.Tensor | None = None  # what goes from half to half of the block in which the stage ends
        self._entered = torch.empty(0, dtype=torch.float32, device="cpu")  # what that block got
        self._made: dict[str, Any] = {}  # by the modules of it behind which the stage ends
        self.names = further_names(model)
        self._let_go: list[weakref.ref[torch.nn.Parameter]] = []  # that the model had, and another stage has

    def _to_look_at(self, sample: Any) -> Any:
        """The batch with which the model is run once."""
        batch = sample if sample is not None else getattr(self._model, "dummy_inputs", None)
        if batch is None:
            raise ArgumentError(
                "pipeline.stages: to see how the model runs, initialize (and deepc.estimate) needs sample_batch=, a"
                " micro-batch as in model(*batch) or model(**batch)"
            )
        return batch

    def _choose(self, units: list[Unit], costs: list[float]) -> None:
        self._chain, self._units, self._cuts = best(self._chain, units, costs, self.order.stages)

    # ---- cutting -----------------------------------------------------------------------------------------------------
    def _call_whole(self, batch: Any) -> Any:
        args, kwargs = self.inputs(batch)
        return self._model(*args, **kwargs)

    def _weighed(self, sample: Any) -> tuple[list[Unit], list[float]]:
        """What each unit costs. Measured with the sample, as seconds of forward and backward, with what comes before
        the first and after the last counted to these: the mean of all ranks, so that all cut alike (collective); units
        of one class and size count alike. Without a sample: the parameters of products, which is what computing takes;
        those before the blocks are looked up."""
        chain = self._chain
        units = chain.units()
        if sample is None:
            costs = [float(sum(p.numel() for p in chain.parameters(unit) if p.dim() > 1)) for unit in units]
            after = [p for m in chain.after for p in m._parameters.values() if p is not None]
            costs[-1] += sum(p.numel() for p in after if p.dim() > 1)
            return units, costs

        def run() -> torch.Tensor:
            return loss_of(self._call_whole(sample), sample, self._loss_fn)

        memory.keep_heap()  # as training has it: pages that come and go are no unit's time
        rounds = []
        self._model.zero_grad(set_to_none=True)
        for _ in range(1 + _ROUNDS):
            times, recomputed = clock(chain, units, run, self._now_s)
            rounds.append(times)
            self._model.zero_grad(set_to_none=True)
        costs = costs_of(chain, units, rounds[1:])
        total = self._of_all(costs)
        return joined(units, total, lambda i: () if i in recomputed else range(len(chain.points.get(i, ()))))

    def _now_s(self) -> float:
        return time.perf_counter()

    def _of_all(self, costs: list[float]) -> list[float]:
        """The sum over the ranks. Collective."""
        total = torch.tensor(costs, dtype=torch.float64, device="cpu")
        dist.all_reduce(total)
        return total.tolist()

    def _share_out(self) -> tuple[list[Tie], frozenset[int]]:
        """Which ranks have a parameter, and what of the model goes to the meta device here."""
        uses: dict[int, list[tuple[torch.nn.Module, str, int]]] = {}
        parameters: dict[int, torch.nn.Parameter] = {}
        for module, stage in self._stage_of_modules():
            for attribute, p in module._parameters.items():
                if p is not None:
                    parameters[id(p)] = p
                    uses.setdefault(id(p), []).append((module, attribute, stage))
        full = {id(p): name for name, p in self._model.named_parameters()}
        ties, elsewhere = [], set()
        for key, p in parameters.items():
            ranks = list(dict.fromkeys(self._rank_of[stage] for stage in sorted(stage for *_, stage in uses[key])))
            if ranks[0] == self._here:
                ties += [Tie(full[key], ranks[0], tuple(ranks[1:]), p)] if len(ranks) > 1 else []
                continue
            self._let_go.append(weakref.ref(p))
            copy = torch.nn.Parameter(p.detach().clone(), p.requires_grad) if self._here in ranks else None
            away = torch.nn.Parameter(p.detach().to("meta"), p.requires_grad)
            for module, attribute, stage in uses[key]:
                module._parameters[attribute] = copy if self._rank_of[stage] == self._here else away
            elsewhere.update({id(away), *([id(copy)] if copy is not None else [])})
            ties += [Tie(full[key], ranks[0], tuple(ranks[1:]), copy)] if len(ranks) > 1 else []
        return ties, frozenset(elsewhere)

    def let_go(self) -> frozenset[int]:
        return frozenset(id(p) for of in self._let_go if (p := of()) is not None)

    def _stage_of_modules(self) -> Iterator[tuple[torch.nn.Module, int]]:
        """The modules with parameters of their own, with their stages; together they have all of the model."""
        chain, last = self._chain, len(self._cuts) - 2
        for stage, (begin, end) in enumerate(zip(self._cuts, self._cuts[1:])):
            for unit in self._units[begin:end]:
                for module in chain.modules(unit):
                    yield module, stage
        for module in chain.before:
            yield module, 0
        for module in chain.after:
            yield module, last

    def _prove(self, batch: Any, whole: Sequence[torch.Tensor]) -> None:
        """DeepcError if the stages together do not make of `batch` what the whole model made. Collective."""
        with evaluating(self._model), torch.no_grad():
            made = Stages(self, self.mesh.group("pp", dist.get_rank()), self._here).evaluate(_Alone(self), [batch])
        same = not made or all(map(close, every_tensor(made[0]), whole))
        wrong = torch.tensor([float(not same)], dtype=torch.float32, device="cpu")
        dist.all_reduce(wrong)
        if wrong.item():
            raise DeepcError(
                "pipeline.stages: cut into stages, the model makes something else of the sample than as a whole; what"
                " runs before its blocks goes into them by another way than from block to block, or they are not the"
                " same in each run. deepc.pipe.PipelineModule takes models as layers"
            )

    # ---- running -----------------------------------------------------------------------------------------------------
    def _take_over(self) -> None:
        for i, block in enumerate(self._chain.blocks):
            call_instead(block, lambda real, args, kwargs, i=i: self._block(i, real, args, kwargs))
        begun = [self._units[u] for u in self._cuts[1:-1]]
        for number in dict.fromkeys(unit.block for unit in begun if unit.part):
            self._take_over_inside(number, [unit for unit in begun if unit.block == number and unit.part])
        for module in self._chain.before:
            call_instead(module, lambda real, args, kwargs, m=module: self._before(m, real, args, kwargs))

    def _take_over_inside(self, number: int, units: Sequence[Unit]) -> None:
        """These units of block `number` begin stages inside of it."""
        block = self._chain.blocks[number]
        points = [point for unit in units if (point := self._chain.begin(unit)) is not None]

        def call(name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            begin, end, received = self._edges(number)
            if begin is not None and name in begin.before:
                return begin.stand_in(name, args, kwargs, received[1:] if begin.outputs else ())
            if begin is not None and name == begin.at:
                args, kwargs = with_first(args, kwargs, received[1])
            if end is not None and name in (end.turn, end.at):
                if in_checkpoint():
                    raise UnsupportedError(IN_CHECKPOINT)
                if name == end.turn:
                    self._between = first_tensor(args, kwargs)
                if name == end.name:
                    between = received[0] if self._between is None else self._between  # the stage began behind the turn
                    raise _ReachedError((between, first_tensor(args, kwargs)) if end.at else between)
            out = real(*args, **kwargs)
            if end is not None and name in end.outputs:
                self._made[name] = out
                if name == end.name:
                    if in_checkpoint():
                        raise UnsupportedError(IN_CHECKPOINT)
                    raise _ReachedError((self._entered, *(self._made.pop(n) for n in end.outputs)))
            return out

        names = dict.fromkeys(name for point in points for name in (*point.before, point.turn, point.at) if name)
        for name in names:
            call_instead(block.get_submodule(name), lambda real, args, kwargs, n=name: call(n, real, args, kwargs))

    def _edges(self, number: int) -> tuple[Point | None, Point | None, Any]:
        """Where the stage that runs begins and where it ends inside of block `number`, and what it has received."""
        stage, received = self._now()
        begin, end = self._units[self._cuts[stage]], self._cuts[stage + 1]
        after = self._units[end] if end < len(self._units) else None
        return (
            self._chain.begin(begin) if begin.block == number else None,
            self._chain.begin(after) if after is not None and after.block == number else None,
            received,
        )

    def _block(self, i: int, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stage, received = self._now()
        units = self._units[self._cuts[stage] : self._cuts[stage + 1]]
        first, last = units[0].block, units[-1].block
        if i < first:
            return self._chain.passed_by(i, args, kwargs)
        if i in (first, last) and in_checkpoint():
            raise UnsupportedError(IN_CHECKPOINT)
        if i == first:
            self._taken = True
        elif not self._taken or i > last:
            raise self._passed_over(last if self._taken else first)
        if i == first and stage > 0:
            inside = self._chain.begin(units[0])
            alone = inside is not None and not inside.halves
            args, kwargs = self._chain.given(args, kwargs, received[0] if alone else received)
        if i == last:
            self._entered = first_tensor(args, kwargs)
        out = real(*args, **kwargs)
        if i == last and stage < len(self._cuts) - 2:
            raise _ReachedError(self._chain.handed_on(i, out))
        return out

    def _before(
        self,
        module: torch.nn.Module,
        real: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Only the first stage changes buffers. Inside of another one that has shapes alone here, so has this one."""
        if self._now()[0] == 0:
            return real(*args, **kwargs)
        inside = any(t.device.type == "meta" for t in every_tensor((args, kwargs)))  # not is_meta: fake ones may be it
        here = not inside and not any(p.device.type == "meta" for p in module._parameters.values() if p is not None)
        if here:
            with torch.no_grad(), _other_tensors(module, torch.clone):
                return real(*args, **kwargs)
        with torch.no_grad(), _other_tensors(module, to_meta, parameters=True):
            made = real(*mapped(args, to_meta), **mapped(kwargs, to_meta))
        return made if inside else zeros(made)

    def _now(self) -> tuple[int, Any]:
        if self._running is None:
            raise DeepcError(
                "this model is cut into the stages of a pipeline, and runs by engine.train_batch and engine.eval_batch"
                " only"
            )
        return self._running

    @contextlib.contextmanager
    def _at(self, stage: int, received: Any) -> Iterator[None]:
        self._running, self._between, self._taken = (stage, received), None, stage == 0
        try:
            yield
        finally:
            self._running = self._between = None
            self._made.clear()
            self._entered = torch.empty(0, dtype=torch.float32, device="cpu")

    # ---- as a part of a pipeline -------------------------------------------------------------------------------------
    def blocks(self) -> list[torch.nn.Module]:
        """All but those in which a stage begins or ends."""
        parts = {u.block for u in (self._units[at] for at in self._cuts[1:-1]) if u.part}
        mine: dict[int, None] = {}
        for stage, (begin, end) in enumerate(zip(self._cuts, self._cuts[1:])):
            if self._rank_of[stage] == self._here:
                mine.update((unit.block, None) for unit in self._units[begin:end] if unit.block not in parts)
        return [self._chain.blocks[i] for i in mine]

    def describe(self) -> str:
        return " | ".join(self._describe(begin, end - 1) for begin, end in zip(self._cuts, self._cuts[1:]))

    def _describe(self, first: int, last: int) -> str:
        a, b = self._units[first], self._units[last]
        point = self._chain.begin(a)
        begin = "" if point is None else f" {'behind' if point.outputs else 'from'} {point.name}"
        end = ""
        if b.part is not None and b.part < len(self._chain.points[b.block]):
            point = self._chain.points[b.block][b.part]
            end = f" {'to' if point.outputs else 'before'} {point.name}"
        whole = f"{self._chain.name}.{a.block}{begin}"
        return f"{whole}{end}" if a.block == b.block else f"{whole} to {b.block}{end}"

    def inputs(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        kwargs: dict[str, Any] = {}
        if isinstance(batch, Mapping):
            args, kwargs = (), dict(batch)
        else:
            args = tuple(batch) if isinstance(batch, (list, tuple)) else (batch,)
        if self._without_cache:
            kwargs.setdefault("use_cache", False)  # of generation
        return args, kwargs

    def has_buffer(self, name: str) -> bool:
        return self._rank_of[self._stage_of_buffer(name)] == self._here

    def _stage_of_buffer(self, name: str) -> int:
        """The one that changes it, if any does."""
        if name.startswith(prefix := f"{self._chain.name}."):
            block, _, inside = name[len(prefix) :].partition(".")
            whole = self._chain.blocks[int(block)]
            owner = whole.get_submodule(inside.rpartition(".")[0])
            found = (stage for module, stage in self._stage_of_modules() if module is owner)
            return next(found, 0)  # one that joined the block late: the first stage's values
        module = self._model.get_submodule(name.rpartition(".")[0])
        return len(self._cuts) - 2 if any(module is m for m in self._chain.after) else 0

    def run(self, call: Call, stage: int, received: Any, batch: Any, wants_loss: bool = True) -> Any:
        args, kwargs = self.inputs(batch)
        with self._at(stage, received):
            try:
                out = call(args, kwargs)
            except _ReachedError as reached:
                return reached.hidden
        if not self._taken:
            raise self._passed_over(self._units[self._cuts[stage]].block)
        if stage < len(self._cuts) - 2:
            raise self._passed_over(self._units[self._cuts[stage + 1] - 1].block)
        return loss_of(out, batch, self._loss_fn) if wants_loss else out

    def _passed_over(self, block: int) -> DeepcError:
        """For a block that hands on to another stage, or takes what one hands on, and that the model left out."""
        return DeepcError(
            f"the model's forward passed over block {self._chain.name}.{block}, at which its pipeline is cut: all"
            " blocks must run for every micro-batch; switch off what leaves out some while it trains (layerdrop)"
        )


# ---- the chain -------------------------------------------------------------------------------------------------------
@torch.no_grad()
def take_from_firsts(model: torch.nn.Module, mesh: Mesh) -> None:
    """What the model has on rank 0 counts, as without a pipeline; of experts that are spread over ranks, what the first
    rank that has them has. Collective over all ranks of the mesh."""
    refuse_released(model, "pipeline.stages")
    spread, mine = spread_tensors(model), mesh.coordinates(dist.get_rank()).ep
    everyone = AxisGroup.of(cast(dist.ProcessGroup, dist.group.WORLD))
    for t in (*model.parameters(), *model.buffers()):
        if is_zero_param(t):  # of those under zero.Init the ranks of a node share the first one's
            continue
        for number, source in enumerate(mesh.group("ep", 0) if id(t) in spread else (0,)):
            others = id(t) in spread and number != mine
            broadcast_whole(everyone, t.detach().clone() if others else t, source)


class _Alone:
    """Who asks the stages of a cut model for what it returns (runtime.py's Loop, for an evaluation)."""

    def __init__(self, cut: CutModel) -> None:
        self._cut = cut

    def run_stage(self, stage: int, received: Any, batch: Any) -> Any:
        model = self._cut._model
        return self._cut.run(lambda args, kwargs: model(*args, **kwargs), stage, received, batch, wants_loss=False)


def _let_go_of_graphs(model: torch.nn.Module) -> None:
    """What modules keep of the runs as attributes (a load-balance loss) hangs in a graph, which would hold the
    parameters that go to other ranks: layers of other stages don't run again."""
    for module in model.modules():
        for name, t in vars(module).items():
            if isinstance(t, torch.Tensor) and t.grad_fn is not None:
                vars(module)[name] = t.detach()


@contextlib.contextmanager
def _other_tensors(
    module: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor], parameters: bool = False
) -> Iterator[None]:
    """What change makes of its buffers is in their place, and of its parameters, if asked."""
    tables = [table for m in module.modules() for table in (m._buffers, m._parameters)[: 1 + parameters] if table]
    before: list[tuple[dict[str, Any], dict[str, Any]]] = [(table, dict(table)) for table in tables]
    try:
        for table, tensors in before:
            table.update((name, change(t)) for name, t in tensors.items() if t is not None)
        yield
    finally:
        for table, tensors in before:
            table.update(tensors)


# ---- calls -----------------------------------------------------------------------------------------------------------
