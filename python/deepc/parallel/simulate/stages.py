"""Pipelines on paper, for estimates: how a model would be cut into stages, and a batch through the stages of one rank
with messages that have shapes alone. In a child that is thrown away (plan/predict/dryrun)."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...core import memory, ops
from ...core.foreign import private
from ...core.foreign.buffers import buffer_dtypes
from ...plan.mesh import Mesh
from ...plan.predict.dryrun import FakeModel, ShadowHeap, empty_like, make_tracker
from ...plan.predict.shapes import WithoutValues, Work
from ...plan.schedule import Order
from ..expert.spread import SharedGradients, connect, shared_gradients
from ..pipeline.cutting import chain
from ..pipeline.cutting.calls import every_tensor, mapped
from ..pipeline.cutting.inside import Point
from ..pipeline.cutting.model import CutModel
from ..pipeline.hops import Hops
from ..pipeline.layers import PipelineModule
from ..pipeline.runtime import Stages

if TYPE_CHECKING:
    from ...config.tree import Config
    from ...plan.predict.dryrun import Reducer
    from ..pipeline.part import Part

# What goes from a stage to the next: is it a tuple, and its tensors' shapes, dtypes, whether a gradient comes back.
Boundary = tuple[bool, list[tuple[tuple[int, ...], torch.dtype, bool] | None]]


class HopsOnPaper(Hops):
    """What a rank sends is kept until it sends again: the receiver has read it by then. What it receives has the shapes
    of `boundaries`, of each stage but the last."""

    def __init__(self, boundaries: Sequence[Boundary], stage_of_tag: Callable[[int], int]) -> None:
        super().__init__(())
        self._boundaries, self._stage_of_tag = boundaries, stage_of_tag

    def receive(self, source: int, tag: int) -> Any:
        several, template = self._boundaries[self._stage_of_tag(tag)]
        out = [
            None if t is None else torch.empty(t[0], dtype=t[1], device="cpu").requires_grad_(t[2]) for t in template
        ]
        return tuple(out) if several else out[0]

    def finish(self) -> None:
        self._under_way.clear()

    def _start(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        if tensor.numel():
            self._under_way = [(tensor.contiguous(), to)]

    def _take(self, tensor: torch.Tensor, source: int, tag: int) -> torch.Tensor:
        return tensor


class StageOnPaper:
    """What the engine (engine/pipelined.py) does with a rank's stages, for plan/predict/dryrun.

    part: of the model that this rank holds. rank: of the pipeline. world: data-parallel ranks. micro_batches: of the
    engine's batch; self.micro_batches: those that are run. shared: of ranks that share experts. autocast: of the
    configuration."""

    def __init__(
        self,
        part: Part,
        rank: int,
        micro_batches: int,
        world: int,
        boundaries: Sequence[Boundary],
        shared: SharedGradients | None = None,
        autocast: str | None = None,
    ) -> None:
        count = part.order.stages
        hops = HopsOnPaper(boundaries, lambda tag: tag // Stages.KINDS % count)
        self._part, self._stages = part, Stages(part, range(part.mesh.pp), rank, hops)
        self.away, self._autocast = part.elsewhere, autocast
        self._shared = shared
        shares = world > 1 or shared is not None
        self.sums = shares or part.order.chunks > 1 or self._stages.splits(micro_batches)
        self.micro_batches = self._that_matter(micro_batches)
        ties = [(t, t.parameter) for t in part.ties if t.parameter is not None]
        self.copies = [p for t, p in ties if rank in t.holders]
        self._lent = [(p, len(t.holders)) for t, p in ties if t.owner == rank]
        self._copied: dict[int, torch.Tensor] = {}  # the sums of the copies' gradients

    def _that_matter(self, micro_batches: int) -> int:
        """So many that what is in flight at once is what it is with all of them: more add time to a dry run alone. A
        schedule that was given has no other number."""
        if self._part.order.given is not None:
            return micro_batches
        ranks = self._part.mesh.pp
        for some in range(2 * ranks, micro_batches, ranks):  # interleaved stages take whole rounds of them
            if self._stages.in_flight(some) == self._stages.in_flight(micro_batches):
                return some
        return micro_batches

    # ---- of the dry run ----------------------------------------------------------------------------------------------
    def blocks(self) -> list[torch.nn.Module]:
        return self._part.blocks()

    def begin(
        self,
        indices: Mapping[int, int],
        trained: Sequence[torch.nn.Parameter],
        copies: Sequence[Any],
        sums: torch.dtype,
        again: WithoutValues,
    ) -> None:
        """Once. indices: of the parameters that are trained here, by their ids; trained, copies: what stands for them
        and for `copies` now. sums: what gradients are added up in. again: which blocks are recomputed."""
        self._sums_in, self._copies, self._again = sums, copies, again
        self._indices = {id(p): i for i, p in enumerate(trained)}
        self._ids = {i: of for of, i in indices.items()}
        self._lent_here = [(trained[indices[id(p)]], holders) for p, holders in self._lent if id(p) in indices]
        for i, p in self._copies_that_learn():
            p.register_post_accumulate_grad_hook(functools.partial(self._add_copied, i))
        self._spread_ties()

    def train(self, model: torch.nn.Module, batch: Any, gradients: Reducer, live: Callable[[], int]) -> int:
        """All micro-batches of a batch. Returns the most that live() said after a forward."""
        self._model, self._gradients, self._live, self._saved = model, gradients, live, 0
        self._again.begin_batch(lambda: self._stages.in_flight(self.micro_batches))
        self._stages.train(self, [batch] * self.micro_batches, self._indices)
        for i, p in self._copies_that_learn():
            none = torch.zeros(p.shape, dtype=self._sums_in, device="cpu")
            self._stages.send_tie(i, self._copied.pop(i, none), 0)
            del none
        if self.sums:
            self._take_copied()
        self._stages.hops.finish()
        if (shared := self._shared) is not None:
            gradients.change_left(lambda i, g: shared.of(g, self._ids[i]), self._sums_in)
        if self.sums:
            gradients.flush()
        self._spread_ties()
        return self._saved

    # ---- of the runtime (parallel/pipeline/runtime.py) ---------------------------------------------------------------
    def run_stage(self, stage: int, received: Any, batch: Any) -> Any:
        model = self._model
        with self._again.around((received, self._part.inputs(batch)), stage), ops.autocast(self._autocast, "cpu"):
            out = self._part.run(lambda args, kwargs: model(*args, **kwargs), stage, received, batch)
        self._saved = max(self._saved, self._live())
        return out

    def backward_loss(self, loss: torch.Tensor) -> None:
        self._pass((loss / self.micro_batches).backward)

    def backward_stage(self, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        if outputs:
            self._pass(lambda: torch.autograd.backward(list(outputs), list(gradients)))

    def last_backward_comes(self) -> None:
        if not self.sums:
            self._take_copied()

    def bring(self, index: int, gradient: torch.Tensor) -> None:
        self._gradients.bring(index, gradient)

    def bring_product(self, index: int, a: torch.Tensor, b: torch.Tensor) -> None:
        self._gradients.bring_product(index, a, b)

    # ---- inside ------------------------------------------------------------------------------------------------------
    def _pass(self, backward: Callable[[], None]) -> None:
        if self.sums:
            backward()
            return
        self._gradients.begin()
        backward()
        self._gradients.finish()

    def _copies_that_learn(self) -> list[tuple[int, torch.Tensor]]:
        """Numbered: of a tie that is frozen no gradient goes to who has the first of it."""
        return [(i, p) for i, p in enumerate(self._copies) if p.requires_grad]

    def _add_copied(self, i: int, p: torch.Tensor) -> None:
        if p.grad is not None:
            grad, p.grad = p.grad, None
            self._copied[i] = ops.add_up(self._copied.get(i), grad, self._sums_in)

    def _take_copied(self) -> None:
        for p, holders in self._lent_here:
            like = torch.empty(p.shape, dtype=self._sums_in, device="cpu")
            for _ in range(holders):
                self._gradients.bring(self._indices[id(p)], self._stages.receive_tie(0, like, 0))

    def _spread_ties(self) -> None:
        """Copies get new values, and new memory with them."""
        for p in self._copies:
            p.data = self._stages.receive_tie(0, torch.empty(p.shape, dtype=p.dtype, device="cpu"), 0)


class CutOnPaper(CutModel):
    """A model cut as CutModel cuts it, on tensors without values. What costs time there is arithmetic here; the model
    is whole until `stage` is asked for that of a rank. batch: a micro-batch. looked: bytes of the peak of what
    initialize runs to see how the model is to be cut. dtype: what it is trained in."""

    def __init__(
        self,
        model: torch.nn.Module,
        config: Config,
        batch: Any,
        loss_fn: Callable[[Any, Any], Any] | None,
        world: int,
        dtype: torch.dtype,
    ) -> None:
        asked, self._world = config.deepc.pipeline, world
        order = Order.of(asked.schedule, config.pipeline.stages or 1, asked.chunks)
        self._open(model, Mesh(pp=order.ranks, dp=world), order, loss_fn, 0)
        self._micro_batches, self._work, self.looked = config.gradient_accumulation_steps or 1, Work(), 0
        dummy = getattr(model, "dummy_inputs", None)
        with _without_values(model, None) as heap:
            given = empty_like(self._to_look_at(batch if dummy is None else dummy))
            heap.rebase(0)
            self._chain, _ = chain.trace(model, lambda: self._call_whole(given), functools.partial(_points, heap))
            with self._work:
                units, costs = self._weighed(given if dummy is None else None)
            self.looked = heap.peak
        self._choose(units, costs)
        self._take_over()
        self._boundaries: list[Boundary] = []
        if batch is not None:
            self._boundaries = _boundaries(self, model, config, batch, dtype)
        self._shared, self._autocast = shared_gradients(model, config), config.autocast
        memory.trim_heap()  # what is freed from here on is the model's

    def stage(self, rank: int) -> StageOnPaper:
        """That of a rank of the pipeline. The model is spoilt: what is another's is on the meta device."""
        self._here = rank
        self.ties, self.elsewhere = self._share_out()
        return StageOnPaper(
            self, rank, self._micro_batches, self._world, self._boundaries, self._shared, self._autocast
        )

    def _now_s(self) -> float:
        return self._work.seconds

    def _of_all(self, costs: list[float]) -> list[float]:
        return costs


class _Live:
    """Bytes of tensors that are there, in the place of a ShadowHeap: real ones would take the holes of that."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._now = self.peak = 0

    def alloc(self, key: int, nbytes: int) -> None:
        self._sizes[key] = nbytes
        self._now += nbytes
        self.peak = max(self.peak, self._now)

    def free(self, key: int) -> None:
        self._now -= self._sizes.pop(key, 0)

    def hold(self, nbytes: int) -> None:
        self.alloc(-1, nbytes)
        self.free(-1)

    def come_and_go(self, sizes: list[int]) -> None:
        self.hold(sum(sizes))


def _points(heap: ShadowHeap, blocks: list[torch.nn.Module], calls: chain.Calls) -> chain.Points:
    """Where blocks can be cut inside is seen by their values: one block of each kind gets some for that. What its runs
    make counts too: all that the forward has saved is there beside it."""
    kinds: dict[Any, list[Point]] = {}
    points = {}
    for i, (block, call) in enumerate(zip(blocks, calls)):
        if (kind := chain.kind_of(block)) not in kinds:
            with private.without_modes(), torch.random.fork_rng(devices=[]):
                tensors = [*block.parameters(), *block.buffers()]
                real = copy.deepcopy(block, {id(t): _with_values(t) for t in tensors})
                values, live = mapped(call, _with_values), _Live()
                tracker = make_tracker()(live, values=True)
                for t in (*real.parameters(), *real.buffers(), *every_tensor(values)):
                    tracker.known(t)
                with tracker:
                    kinds[kind] = chain.points_of([real], [values]).get(0, [])
            heap.hold(live.peak)
        if kinds[kind]:
            points[i] = kinds[kind]
    return points


def _with_values(t: torch.Tensor) -> torch.Tensor:
    floats = t.dtype.is_floating_point
    made = (
        torch.randn(t.shape, dtype=t.dtype, device="cpu") * 0.1
        if floats
        else torch.zeros(t.shape, dtype=t.dtype, device="cpu")
    )
    return torch.nn.Parameter(made, t.requires_grad) if isinstance(t, torch.nn.Parameter) else made


def on_paper(
    part: Part,
    model: torch.nn.Module,
    rank: int,
    config: Config,
    world: int,
    dtype: torch.dtype,
    batch: Any,
    shared: SharedGradients | None = None,
) -> StageOnPaper:
    """For deepc.initialize: the stages of rank `rank` of a pipeline, of a model that is cut already. world: of its
    data-parallel ranks. dtype: what the model is trained in. batch: a micro-batch. shared: of ranks that share
    experts."""
    boundaries = _boundaries(part, model, config, batch, dtype, shared)
    return StageOnPaper(part, rank, config.gradient_accumulation_steps or 1, world, boundaries, shared, config.autocast)


@contextlib.contextmanager
def _without_values(
    model: torch.nn.Module, dtype: torch.dtype | None, buffers: str | None = None
) -> Iterator[ShadowHeap]:
    """The model's tensors have none, and are in this dtype (None: in their own), buffers as in training that casts them
    to `buffers`. Those of other ranks are here too.
    Gives the heap in which what is made inside lies."""
    heap, mode = ShadowHeap(), private.FakeTensorMode(allow_non_fake_inputs=True)
    tracker = make_tracker()(heap)
    fake = FakeModel(model, mode, tracker, dtype, (), False, buffers=buffers)
    heap.look()
    try:
        with mode, tracker:
            yield heap
    finally:
        fake.undo()
        del fake
        gc.collect()


def _boundaries(
    part: Part,
    model: torch.nn.Module,
    config: Config,
    batch: Any,
    dtype: torch.dtype,
    shared: SharedGradients | None = None,
) -> list[Boundary]:
    """What goes from each stage but the last to the next."""
    found: list[Boundary] = []
    received: Any = None
    buffers = config.data_types.buffer_dtype
    with _without_values(model, dtype, buffers), _all_layers(model, dtype, buffers, shared):
        casts = config.fp16.enabled and config.fp16.auto_cast
        batch = empty_like(batch, dtype if casts else None)
        for stage in range(part.order.stages - 1):
            with ops.autocast(config.autocast, "cpu"):
                out = part.run(lambda args, kwargs: model(*args, **kwargs), stage, received, batch)
            tensors = out if isinstance(out, tuple) else (out,)
            template = [None if t is None else (tuple(t.shape), t.dtype, t.requires_grad) for t in tensors]
            found.append((isinstance(out, tuple), template))
            received = mapped(out, lambda t: t.detach().requires_grad_(t.requires_grad))
    return found


def _all_layers(
    model: torch.nn.Module, dtype: torch.dtype, buffers: str | None, shared: SharedGradients | None
) -> contextlib.AbstractContextManager[None]:
    if not isinstance(model, PipelineModule):
        return contextlib.nullcontext()

    def prepare(made: torch.nn.Module) -> None:
        _cast(made, dtype, buffers)
        if shared is not None:
            connect(made, shared.group)

    return model.all_layers(prepare)


def _cast(module: torch.nn.Module, dtype: torch.dtype, buffers: str | None) -> None:
    """As `_without_values` has it; module.to(dtype) is what fake tensors don't allow."""
    of_buffers = buffer_dtypes(module, dtype, buffers)
    for m in module.modules():
        for name, p in m._parameters.items():
            if p is not None and ops.casts(p):
                m._parameters[name] = torch.nn.Parameter(p.detach().to(dtype), p.requires_grad)
        for name, b in m._buffers.items():
            if b is not None:
                m._buffers[name] = b.to(of_buffers.get(id(b), b.dtype))
