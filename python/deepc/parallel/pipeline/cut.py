"""Any model that is a chain of blocks, cut into stages where it stands: nothing of it is rewritten.

Every stage runs the model's own forward, so that masks, positions and whatever else it makes of a micro-batch are made
where they are needed. What another rank has is stood in for: modules before the blocks give zeros of the right shape,
blocks before the stage's hand on what they get; the first block of the stage gets what the stage before has sent, and
after its last one forward is left. Parameters of other ranks are on the meta device. The sample goes through the cut
model once, and must come out as from the whole one."""

from __future__ import annotations

import contextlib
import inspect
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...errors import ArgumentError, DeepcError, UnsupportedError
from ...plan.mesh import Mesh
from ...plan.predict.dryrun import loss_of
from ...plan.schedule import default_chunks, stage_rank
from ...zero.step.hooks import tensors_in
from . import balance
from .deferred import in_checkpoint
from .part import Call, Tie, further_names
from .runtime import Stages

_ROUNDS = 3  # of measuring, after one to warm up
_IN_CHECKPOINT = (
    "pipeline.stages: the model gives its blocks to torch.utils.checkpoint, which would run them again where the inputs"
    " of stages are gone. Call it in the forward of a block, as transformers' gradient_checkpointing_enable() does"
)


class Chain(NamedTuple):
    """What a trace has found. name: of the list of blocks. blocks: its modules. before: the modules with parameters of
    their own that run before the first block; the others run after the last. pairs: whether a block returns a tuple,
    whose first element is what it hands on."""

    name: str
    blocks: list[torch.nn.Module]
    before: list[torch.nn.Module]
    after: list[torch.nn.Module]
    pairs: list[tuple[Any, ...] | None]


class _ReachedError(Exception):
    """The stage's last block has run."""

    def __init__(self, hidden: torch.Tensor) -> None:
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
        schedule: str,
        chunks: int | None,
        sample: Any,
        loss_fn: Callable[[Any, Any], Any] | None,
    ) -> None:
        self.mesh, self.schedule, self.chunks = mesh, schedule, chunks or default_chunks(schedule)
        self._model, self._loss_fn = model, loss_fn
        self._without_cache = "use_cache" in inspect.signature(model.forward).parameters
        dummy = getattr(model, "dummy_inputs", None) if sample is None else None
        if sample is None and dummy is None:
            raise ArgumentError(
                "pipeline.stages: to see how the model runs, initialize needs sample_batch=, a micro-batch as in"
                " model(*batch) or model(**batch)"
            )
        _take_from_rank_0(model)
        batch = sample if dummy is None else dummy
        with torch.random.fork_rng(devices=[]), _buffers_kept(model):
            self._chain, whole = trace(model, lambda: self._call_whole(batch))
            costs = _parameters(self._chain) if dummy is not None else self._measured(sample)
        stages = mesh.pp * self.chunks
        self.cuts = balance.cut(costs, stages)
        self._rank_of = [stage_rank(schedule, stages=mesh.pp, chunks=self.chunks, stage=s) for s in range(stages)]
        self._here = mesh.coordinates(dist.get_rank()).pp
        self._running: tuple[int, Any] | None = None
        self.names = further_names(model)
        self.ties, self.elsewhere = self._share_out()
        self._take_over()
        self._prove(batch, whole)

    # ---- cutting -----------------------------------------------------------------------------------------------------
    def _call_whole(self, batch: Any) -> Any:
        args, kwargs = self.inputs(batch)
        return self._model(*args, **kwargs)

    def _measured(self, sample: Any) -> list[float]:
        """Seconds of each block, forward and backward, with what comes before the first and after the last counted
        to these; the mean of all ranks, so that all cut alike. Blocks of one class and size count alike. Collective."""
        rounds = [self._clock(sample) for _ in range(1 + _ROUNDS)][1:]
        costs = [statistics.median(times) for times in zip(*rounds)]
        first, blocks, last = costs[0], costs[1:-1], costs[-1]
        kinds: dict[Any, list[int]] = {}
        for i, block in enumerate(self._chain.blocks):
            kinds.setdefault((type(block), sum(p.numel() for p in block.parameters())), []).append(i)
        for alike in kinds.values():
            mean = statistics.median(blocks[i] for i in alike)
            for i in alike:
                blocks[i] = mean
        blocks[0] += first
        blocks[-1] += last
        total = torch.tensor(blocks, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def _clock(self, sample: Any) -> list[float]:
        """[before, each block, after]: seconds of one forward and backward."""
        marks: list[float] = []
        back: dict[int, float] = {}
        handles, blocks = [], len(self._chain.blocks)
        for i, block in enumerate(self._chain.blocks):

            def begins(_: Any, args: Any, kwargs: Any, i: int = i) -> None:
                marks.append(time.perf_counter())
                hidden = _first_tensor(args, kwargs)
                _when_gradient_comes(hidden, lambda: back.setdefault(i, time.perf_counter()))

            handles.append(block.register_forward_pre_hook(begins, with_kwargs=True))

        def ends(_: Any, __: Any, out: Any) -> None:
            marks.append(time.perf_counter())
            _when_gradient_comes(_hidden_of(out), lambda: back.setdefault(blocks, time.perf_counter()))

        handles.append(self._chain.blocks[-1].register_forward_hook(ends))
        try:
            began = time.perf_counter()
            loss = loss_of(self._call_whole(sample), sample, self._loss_fn)
            turned = time.perf_counter()
            loss.backward()
            ended = time.perf_counter()
        finally:
            for handle in handles:
                handle.remove()
            self._model.zero_grad(set_to_none=True)
        forward = [b - a for a, b in zip([began, *marks], [*marks, turned])]
        # gradients come from the last block to the first; where one needs none, its time counts to the one before
        at = [turned, *(back.get(i, ended) for i in range(blocks, -1, -1)), ended]
        backward = [b - a for a, b in zip(at, at[1:])][::-1]
        return [f + b for f, b in zip(forward, backward, strict=True)]

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
            copy = torch.nn.Parameter(p.detach().clone(), p.requires_grad) if self._here in ranks else None
            away = torch.nn.Parameter(p.detach().to("meta"), p.requires_grad)
            for module, attribute, stage in uses[key]:
                module._parameters[attribute] = copy if self._rank_of[stage] == self._here else away
            elsewhere.update({id(away), *([id(copy)] if copy is not None else [])})
            ties += [Tie(full[key], ranks[0], tuple(ranks[1:]), copy)] if len(ranks) > 1 else []
        return ties, frozenset(elsewhere)

    def _stage_of_modules(self) -> Iterator[tuple[torch.nn.Module, int]]:
        """The modules with parameters of their own, with their stages; together they have all of the model."""
        chain, last = self._chain, len(self.cuts) - 2
        for stage, (begin, end) in enumerate(zip(self.cuts, self.cuts[1:])):
            for block in chain.blocks[begin:end]:
                for module in block.modules():
                    yield module, stage
        for module in chain.before:
            yield module, 0
        for module in chain.after:
            yield module, last

    def _prove(self, batch: Any, whole: Sequence[torch.Tensor]) -> None:
        """DeepcError if the stages together do not make of `batch` what the whole model made. Collective."""
        training = self._model.training
        self._model.eval()
        try:
            with torch.no_grad():
                made = Stages(self, self.mesh.group("pp", dist.get_rank()), self._here).evaluate(_Alone(self), [batch])
        finally:
            self._model.train(training)
        same = not made or all(map(_close, _every_tensor(made[0]), whole))
        wrong = torch.tensor([float(not same)])
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
            _call_instead(block, lambda real, args, kwargs, i=i: self._block(i, real, args, kwargs))
        for module in self._chain.before:
            here = not any(p.is_meta for p in module._parameters.values() if p is not None)
            _call_instead(
                module, lambda real, args, kwargs, m=module, here=here: self._before(m, here, real, args, kwargs)
            )

    def _block(self, i: int, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stage, received = self._now()
        begin, end = self.cuts[stage], self.cuts[stage + 1]
        if i < begin:
            hidden, others = _first_tensor(args, kwargs), self._chain.pairs[i]
            return hidden if others is None else (hidden, *others)
        if i in (begin, end - 1) and in_checkpoint():
            raise UnsupportedError(_IN_CHECKPOINT)
        if i == begin and stage > 0:
            args, kwargs = _with_first(args, kwargs, received)
        out = real(*args, **kwargs)
        if i == end - 1 and stage < len(self.cuts) - 2:
            raise _ReachedError(_hidden_of(out))
        return out

    def _before(
        self,
        module: torch.nn.Module,
        here: bool,
        real: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """here: its parameters are on this rank. Only the first stage changes buffers."""
        if self._now()[0] == 0:
            return real(*args, **kwargs)
        with torch.no_grad(), _other_buffers(module, torch.clone if here else _to_meta):
            return real(*args, **kwargs) if here else _zeros(real(*_map(args, _to_meta), **_map(kwargs, _to_meta)))

    def _now(self) -> tuple[int, Any]:
        if self._running is None:
            raise DeepcError(
                "this model is cut into the stages of a pipeline, and runs by engine.train_batch and engine.eval_batch"
                " only"
            )
        return self._running

    @contextlib.contextmanager
    def _at(self, stage: int, received: Any) -> Iterator[None]:
        self._running = stage, received
        try:
            yield
        finally:
            self._running = None

    # ---- as a part of a pipeline -------------------------------------------------------------------------------------
    def describe(self) -> str:
        return " | ".join(
            f"{self._chain.name}.{begin} to {end - 1}" if end - begin > 1 else f"{self._chain.name}.{begin}"
            for begin, end in zip(self.cuts, self.cuts[1:])
        )

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
            block = int(name[len(prefix) :].split(".", 1)[0])
            return next(s for s, end in enumerate(self.cuts[1:]) if block < end)
        module = self._model.get_submodule(name.rpartition(".")[0])
        return len(self.cuts) - 2 if any(module is m for m in self._chain.after) else 0

    def run(self, call: Call, stage: int, received: Any, batch: Any, wants_loss: bool = True) -> Any:
        args, kwargs = self.inputs(batch)
        with self._at(stage, received):
            try:
                out = call(args, kwargs)
            except _ReachedError as reached:
                return reached.hidden
        if stage < len(self.cuts) - 2:
            raise DeepcError(
                f"the model's forward ended before block {self._chain.name}.{self.cuts[stage + 1] - 1} ran, at which"
                " its pipeline is cut: all blocks must run for every micro-batch"
            )
        return loss_of(out, batch, self._loss_fn) if wants_loss else out


# ---- the chain -------------------------------------------------------------------------------------------------------
def trace(model: torch.nn.Module, run: Callable[[], Any]) -> tuple[Chain, list[torch.Tensor]]:
    """Runs the model once, for evaluation. Returns also the tensors that it returned. ArgumentError if it has no list
    of blocks, each of which gets what the one before returned, with all other parameters used before the first or after
    the last."""
    name, blocks = _longest_list(model)
    inside = {id(m) for block in blocks for m in block.modules()}
    alone = [m for m in model.modules() if id(m) not in inside and any(p is not None for p in m._parameters.values())]
    if around := [m for m in alone if any(x is blocks[0] for x in m.modules())]:
        raise UnsupportedError(
            f"pipeline.stages: {type(around[0]).__name__}, which contains the blocks {name}, has parameters of its own;"
            " a pipeline needs them in one place. deepc.pipe.PipelineModule takes models as layers"
        )
    order: list[Any] = []  # block numbers, and other modules
    seen: list[tuple[Any, Any]] = []  # (first tensor, output) of the blocks
    handles = []
    for i, block in enumerate(blocks):

        def ran(_: Any, args: Any, kwargs: Any, out: Any, i: int = i) -> None:
            if in_checkpoint():
                raise UnsupportedError(_IN_CHECKPOINT)
            order.append(i)
            hidden = _first_tensor(args, kwargs)
            seen.append((hidden, out))
            if any(t.requires_grad and t is not hidden for t in _every_tensor((args, kwargs))):
                raise UnsupportedError(
                    f"pipeline.stages: {name}.{i} gets another tensor that depends on parameters, besides what the"
                    " block before it returned. deepc.pipe.PipelineModule takes models as layers"
                )

        handles.append(block.register_forward_hook(ran, with_kwargs=True))
    for module in alone:
        handles.append(module.register_forward_pre_hook(lambda m, _: order.append(m)))
    was = model.training
    model.eval()
    try:
        with torch.enable_grad():
            whole = [t.detach() for t in _every_tensor(run())]
    finally:
        model.train(was)
        for handle in handles:
            handle.remove()
    numbers = [x for x in order if isinstance(x, int)]
    if numbers != list(range(len(blocks))):
        raise ArgumentError(
            f"pipeline.stages: the blocks of {name} ran in the order {numbers[:12]}; a pipeline needs each of them"
            " once, one after the other"
        )
    for i, ((_, out), (given, _)) in enumerate(zip(seen, seen[1:])):
        if _hidden_of(out) is not given:
            raise ArgumentError(
                f"pipeline.stages: {name}.{i + 1} does not get what {name}.{i} returned; a pipeline needs a chain of"
                " blocks. deepc.pipe.PipelineModule takes models as layers"
            )
    first, last = order.index(0), order.index(len(blocks) - 1)
    middle = [m for m in order[first:last] if not isinstance(m, int)]
    before = [m for m in order[:first] if not isinstance(m, int)]
    after = [m for m in order[last:] if not isinstance(m, int)]
    both = [m for m in after if any(m is b for b in before)]
    if wrong := [*middle, *both]:
        names = {id(m): n for n, m in model.named_modules()}
        raise UnsupportedError(
            f"pipeline.stages: {names[id(wrong[0])]} runs between the blocks of {name}, or before and after them, and"
            " has parameters; a pipeline needs them in one place. deepc.pipe.PipelineModule takes models as layers"
        )
    unused = [m for m in alone if not any(m is x for x in order)]
    pairs = [_others(name, i, out) for i, (_, out) in enumerate(seen)]
    return Chain(name, blocks, list(dict.fromkeys(before)), list(dict.fromkeys([*after, *unused])), pairs), whole


def _longest_list(model: torch.nn.Module) -> tuple[str, list[torch.nn.Module]]:
    lists = [
        (name, list(module))
        for name, module in model.named_modules()
        if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)) and len(module) > 1
    ]
    if not lists:
        raise ArgumentError(
            f"pipeline.stages: {type(model).__name__} has no torch.nn.ModuleList or Sequential of blocks to cut;"
            " deepc.pipe.PipelineModule takes models as layers"
        )
    return max(lists, key=lambda found: sum(p.numel() for block in found[1] for p in block.parameters()))


def _others(name: str, i: int, out: Any) -> tuple[Any, ...] | None:
    """What a block returns besides what it hands on."""
    if isinstance(out, torch.Tensor):
        return None
    if type(out) is not tuple or any(isinstance(x, torch.Tensor) for x in out[1:]):
        raise UnsupportedError(
            f"pipeline.stages: {name}.{i} returns {type(out).__name__} with more than one tensor; between stages goes"
            " one. deepc.pipe.PipelineModule takes models as layers"
        )
    return out[1:]


def _parameters(chain: Chain) -> list[float]:
    """A cost of each block: the parameters of products, which is what computing takes. Those before the blocks are
    looked up."""
    costs = [float(sum(p.numel() for p in block.parameters() if p.dim() > 1)) for block in chain.blocks]
    costs[-1] += sum(p.numel() for m in chain.after for p in m._parameters.values() if p is not None and p.dim() > 1)
    return costs


@torch.no_grad()
def _take_from_rank_0(model: torch.nn.Module) -> None:
    """What the model has on rank 0 counts, as without a pipeline. Collective."""
    for t in (*model.parameters(), *model.buffers()):
        if t.numel():
            whole = t.detach().contiguous()
            dist.broadcast(whole, 0)
            if whole.data_ptr() != t.data_ptr() and not any(s == 0 and n > 1 for s, n in zip(t.stride(), t.shape)):
                t.copy_(whole)


class _Alone:
    """Who asks the stages of a cut model for what it returns (runtime.py's Loop, for an evaluation)."""

    def __init__(self, cut: CutModel) -> None:
        self._cut = cut

    def run_stage(self, stage: int, received: Any, batch: Any) -> Any:
        model = self._cut._model
        return self._cut.run(lambda args, kwargs: model(*args, **kwargs), stage, received, batch, wants_loss=False)


@contextlib.contextmanager
def _buffers_kept(model: torch.nn.Module) -> Iterator[None]:
    """Runs inside leave no trace in running statistics."""
    kept = [(b, b.clone()) for b in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


@contextlib.contextmanager
def _other_buffers(module: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """What change makes of its buffers is in their place."""
    before = [(m, dict(m._buffers)) for m in module.modules() if m._buffers]
    try:
        for m, buffers in before:
            m._buffers.update((name, change(b)) for name, b in buffers.items() if b is not None)
        yield
    finally:
        for m, buffers in before:
            m._buffers.update(buffers)


# ---- calls -----------------------------------------------------------------------------------------------------------
def _call_instead(module: torch.nn.Module, instead: Callable[..., Any]) -> None:
    """module(...) is instead(real, args, kwargs), outside of its hooks and of what recomputes it."""
    kind = type(module)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return instead(lambda *a, **k: kind.__call__(self, *a, **k), args, kwargs)

    module.__class__ = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def _when_gradient_comes(t: torch.Tensor, tell: Callable[[], Any]) -> None:
    if t.requires_grad:
        t.register_hook(lambda g: tell() and None)


def _first_tensor(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """What a block works on: its first argument that is a tensor."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value
    raise ArgumentError("pipeline.stages: a block was called without a tensor")


def _with_first(
    args: tuple[Any, ...], kwargs: dict[str, Any], tensor: torch.Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    for i, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            return (*args[:i], tensor, *args[i + 1 :]), kwargs
    name = next(k for k, value in kwargs.items() if isinstance(value, torch.Tensor))
    return args, {**kwargs, name: tensor}


def _hidden_of(out: Any) -> Any:
    return out[0] if isinstance(out, (tuple, list)) else out


def _every_tensor(value: Any) -> list[torch.Tensor]:
    return list(tensors_in(value, levels=16))


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or not a.is_floating_point():
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()) if b.numel() else 0.0, equal_nan=True)


def _map(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {k: _map(v, change) for k, v in value.items()}
    return type(value)(_map(v, change) for v in value) if type(value) in (list, tuple) else value


def _to_meta(t: torch.Tensor) -> torch.Tensor:
    return t.to("meta")


def _zeros(value: Any) -> Any:
    """Of the same shapes, in no memory of their own."""
    return _map(value, lambda t: torch.zeros((), dtype=t.dtype).expand(t.shape))
