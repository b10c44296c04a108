"""One question, and the dry run that answers it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, Union

from ....config.rules import default_optimizer
from ....config.tree import Config
from ....core import memory, ops
from ....core.dtypes import dtype as dtype_named
from ....core.ops import torch_dtype
from ....errors import ArgumentError, UnsupportedError
from ....optim.factory import (
    check_alone,
    check_on_disk,
    check_optimizer,
    copies_per_node,
    form_on_disk,
    make_optimizer,
    moments_of,
    state_bytes_of,
    steps_whole_blocks,
    takes_core_path,
    twin_over,
)
from ...derive import Machine, beside_onebit, derive, meta_of
from ...mesh import Mesh
from ...plan import SLOTS
from .figures import MemoryEstimate, Row, changed, from_dict
from .states import assembled, control_bytes

if TYPE_CHECKING:
    import torch

    from ...plan import Plan
    from .. import dryrun

    Model = Union[torch.nn.Module, Callable[[], torch.nn.Module]]  # noqa: UP007
    ConfigSource = Union[str, os.PathLike[str], dict[str, Any], Config]  # noqa: UP007
    OptimizerLike = Union[torch.optim.Optimizer, Callable[[Any], torch.optim.Optimizer]]  # noqa: UP007
    Named = Sequence[tuple[str, torch.nn.Parameter]]


class Divided(NamedTuple):
    """experts: ranks that share a model's experts. parameters: trained ones of the whole model."""

    experts: int
    parameters: int


class Divide(Protocol):
    """How a model is divided over ranks, without them (parallel/simulate/onpaper.py)."""

    def __call__(self, model: torch.nn.Module, config: Config, replicas: int) -> Divided:
        """Makes `model` what one rank of those that share its tensors and experts holds of it, in place. replicas:
        ranks with the same shards of tensors, over which experts may be spread."""


class Cutting(Protocol):
    """A model that is cut into the stages of pipelines. looked: peak of what initialize runs to see how, in bytes."""

    looked: int

    def stage(self, rank: int) -> dryrun.Staged:
        """Makes the model what a rank of the pipeline holds of it, in place."""

    def describe(self) -> str:
        """What each stage has of the model."""


T = TypeVar("T")


class Cutter(Protocol):
    """How a model is cut into stages, without their ranks (parallel/simulate/onpaper.py)."""

    def __call__(
        self,
        model: torch.nn.Module,
        config: Config,
        batch: Any,
        loss_fn: Callable[..., Any] | None,
        world: int,
        dtype: torch.dtype,
    ) -> Cutting:
        """batch: a micro-batch. world: data-parallel ranks. dtype: what is trained in."""


@dataclass
class Case:
    """One question. `work` answers it, in a child. divide, cut: for configurations that divide a model over ranks."""

    model: Any
    config: Any
    batch: Any
    loss_fn: Callable[..., Any] | None
    ranks_per_node: int
    nodes: int
    optimizer: Any
    device: str
    steps: int
    recompute: bool = False
    divide: Divide | None = None
    cut: Cutter | None = None
    experts: int = 1  # ranks that share them, once the model is made

    @property
    def stages(self) -> int:
        """Ranks of a pipeline."""
        return self.config.pipeline.stages or 1

    @property
    def tensor(self) -> int:
        """Ranks that share a model's tensors."""
        return self.config.tensor_parallel.autotp_size or 1

    @property
    def groups(self) -> int:
        """Of ranks with the same shards and experts, on a node."""
        return min(self.tensor * self.experts, self.ranks_per_node)

    def work(self) -> dict[str, Any]:
        from ....nn.fuse import fuse_as_asked
        from .. import dryrun

        if self.stages > 1:
            return self._work_in_stages()
        loaded = dryrun.load_compiler()  # here already, for the fake tensors
        model, whole, gone = self._make()
        fuse_as_asked(model, self.config.deepc.fuse)  # in a child: nobody sees it
        self._recompute_blocks(model)
        found = self._predict(model, loaded=loaded, gone=gone)
        return among(changed(found, world=self.ranks_per_node * self.nodes, nodes=self.nodes), self, whole).to_dict()

    def _predict(self, model: torch.nn.Module, staged: dryrun.Staged | None = None, **found: int) -> MemoryEstimate:
        """Of what this rank holds of the model. found: as of `predict`."""
        base, named, group_of = self._optimizer(model, staged)
        return predict(
            model,
            self._plan(base, named, group_of),
            base,
            self.config,
            self.batch,
            self.loss_fn,
            named=named,
            group_of=group_of,
            steps=self.steps,
            staged=staged,
            **found,
        )

    def _recompute_blocks(self, model: torch.nn.Module) -> None:
        from .. import dryrun

        if self.recompute and not dryrun.checkpoint_blocks(model):
            raise UnsupportedError("the model has no list of blocks to recompute")

    def _goes(self, model: torch.nn.Module, cut: Callable[[], T]) -> tuple[T, int]:
        """(cut(), by how much resident memory changes when the rest of the model goes: negative)."""
        import torch

        from .. import dryrun

        held, before = _bytes(model), dryrun.anonymous_bytes()
        out = cut()
        real = isinstance(self.model, torch.nn.Module)
        return out, dryrun.anonymous_bytes() - before if real else _bytes(model) - held

    def describe(self) -> dict[str, Any]:
        """The plan in words. In a child as well: the model may be one of fake tensors."""
        from .. import dryrun

        if self.stages > 1:
            model = self._make()[0]
            cut = self._cut(model)
            share = self.tensor * self.experts
            shared = f", {share} ranks to each, the first of which is shown" if share > 1 else ""
            texts = [f"Pipelines of {self.stages} ranks: {cut.describe()}{shared}"]
            for rank in range(self.stages):

                def describe(rank: int = rank) -> dict[str, Any]:
                    return {"text": self._plan(*self._optimizer(model, cut.stage(rank))).describe()}

                texts.append(f"Stage {rank}, and its data-parallel ranks:\n{dryrun.forked(describe)['text']}")
            return {"text": "\n".join(texts)}
        text = self._plan(*self._optimizer(self._make()[0])).describe()
        if self.tensor > 1:
            text = (
                f"The shard of the first of {self.tensor} tensor-parallel ranks, and its data-parallel ranks:\n{text}"
            )
        if self.experts > 1:
            text = f"Of the first of {self.experts} ranks that share experts, and those with the same ones:\n{text}"
        return {"text": text}

    # ---- pipelines ---------------------------------------------------------------------------------------------------
    def _work_in_stages(self) -> dict[str, Any]:
        """Each stage in a child of its own, of what this process has seen of the whole."""
        from .. import dryrun

        shapes, loaded = dryrun.load_symbolic_shapes(), dryrun.load_compiler()
        model, whole, gone = self._make()
        self._recompute_blocks(model)
        cut = self._cut(model)
        each = []
        for rank in range(self.stages):

            def work(rank: int = rank) -> dict[str, Any]:
                return self._work_of_stage(model, cut, rank, shapes, loaded, gone)

            each.append(among(from_dict(dryrun.forked(work)), self, whole))
        notes = [f"stages: {cut.describe()}"]
        return over_stages(each, self.ranks_per_node, self.nodes, whole, notes).to_dict()

    def _cut(self, model: torch.nn.Module) -> Cutting:
        if self.cut is None:
            raise UnsupportedError(f"pipeline.stages = {self.stages}: ask deepc.estimate, which can cut models")
        if self.device != "cpu":
            raise UnsupportedError(f"pipeline.stages = {self.stages} on {self.device}: pipelines are for CPUs only")
        dtype = torch_dtype(dtype_named(self.config.dtype))
        return self.cut(model, self.config, self.batch, self.loss_fn, self._data_ranks(), dtype)

    def _replicas(self) -> int:
        """Ranks with the same shards of a stage."""
        return self.ranks_per_node * self.nodes // (self.stages * self.tensor)

    def _data_ranks(self) -> int:
        """Those with the same experts too."""
        return self._replicas() // self.experts

    def _work_of_stage(
        self, model: torch.nn.Module, cut: Cutting, rank: int, shapes: int, loaded: int, gone: int
    ) -> dict[str, Any]:
        """gone: when tensors were divided, before the model was cut."""
        from ....nn.fuse import fuse_as_asked

        staged, further = self._goes(model, lambda: cut.stage(rank))
        fuse_as_asked(model, self.config.deepc.fuse)
        looked = max(0, cut.looked + gone)
        found = self._predict(model, staged, loaded=loaded, shapes=shapes, gone=gone + further, looked=looked)
        return found.to_dict()

    def _make(self) -> tuple[torch.nn.Module, int, int]:
        """(what the first rank holds of the model, trained parameters of the whole, change of resident memory when the
        rest goes: negative)."""
        model, divide = self._whole(), self.divide
        if divide is None and self.tensor > 1:
            raise UnsupportedError(
                f"tensor_parallel.autotp_size = {self.tensor}: ask deepc.estimate, which can cut models"
            )
        if divide is None:
            return model, numel_trained(model), 0
        found, gone = self._goes(model, lambda: divide(model, self.config, self._replicas()))
        self.experts = found.experts
        return model, found.parameters, gone if self.tensor > 1 else 0

    def _whole(self) -> torch.nn.Module:
        import torch

        from ....core.foreign.private import FakeTensorMode

        if isinstance(self.model, torch.nn.Module):
            return self.model
        with FakeTensorMode():
            model = self.model()
        if not isinstance(model, torch.nn.Module):
            raise ArgumentError(
                f"the function that makes the model returned {type(model).__name__}, not a torch.nn.Module"
            )
        return model

    def _optimizer(
        self, model: torch.nn.Module, staged: dryrun.Staged | None = None
    ) -> tuple[torch.optim.Optimizer, Named, dict[int, int]]:
        import torch

        away = frozenset() if staged is None else staged.away
        named = [(n, p) for n, p in model.named_parameters() if id(p) not in away]
        params = [p for _, p in named if p.requires_grad]
        if not params:
            raise ArgumentError("no parameters to train: no parameter of the model requires a gradient")
        base = self.optimizer
        if base is None:
            cfg = self.config.optimizer or default_optimizer()
            base = make_optimizer(cfg.type, cfg.params, params, backend=cfg.backend)
        elif not isinstance(base, torch.optim.Optimizer):
            base = base(params)
        check_optimizer(base, self.config.zero.stage, allow_untested=True)
        sp = self.config.sequence_parallel_size
        beside = beside_onebit(self.config, staged=self.stages > 1, tp=self.tensor, sp=sp, ep=self.experts)
        check_alone(base, beside)
        if any(self.config.zero.on_disk):
            check_on_disk(base)
        group_of = {id(p): g for g, group in enumerate(base.param_groups) for p in group["params"] if p.requires_grad}
        return base, named, group_of

    def _plan(self, base: torch.optim.Optimizer, named: Named, group_of: dict[int, int]) -> Plan:
        if self.stages > 1:
            world, here = self._data_ranks(), max(1, self.ranks_per_node // (self.tensor * self.experts))
            ranks, nodes = min(world, here), -(-world // here)
            if world % ranks or (here % ranks and nodes == 1) or self.ranks_per_node % self.groups:
                raise UnsupportedError(
                    f"{self.ranks_per_node} ranks a node and {world} for each of {self.stages} stages: an estimate of"
                    " stages that share nodes unevenly does not exist; use a number of ranks a node that one divides"
                )
            mesh = Mesh(dp=ranks * nodes, ranks_per_node=ranks)
            return self._derived(base, named, group_of, mesh)
        share = self.tensor * self.experts
        if self.ranks_per_node % self.groups:
            raise UnsupportedError(
                f"{self.ranks_per_node} ranks a node, and {share} that share a model"
                f" ({'tensor_parallel.autotp_size' if self.tensor > 1 else 'ep_size'}): nodes would have different"
                " numbers of ranks with the same shards, which a run refuses; use a number of ranks a node that one"
                " divides"
            )
        ranks = max(1, self.ranks_per_node // share)
        # what copies_per_node says every node has all of, cut over its ranks
        nodes = 1 if copies_per_node(base, self.config.zero.stage) else self.nodes
        mesh = Mesh(dp=self.ranks_per_node * nodes // share, ranks_per_node=ranks)
        return self._derived(base, named, group_of, mesh)

    def _derived(self, base: torch.optim.Optimizer, named: Named, group_of: dict[int, int], mesh: Mesh) -> Plan:
        machine = Machine.here(self.device)
        return derive(
            self.config,
            meta_of(named, group_of),
            mesh,
            machine,
            moments=moments_of(base),
            state_bytes=state_bytes_of(base),
            on_disk=form_on_disk(base),
            whole_blocks=steps_whole_blocks(base),
        )


def numel_trained(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def _bytes(model: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.device.type != "meta")


def over_stages(
    each: Sequence[MemoryEstimate], ranks_per_node: int, nodes: int, whole: int, notes: Sequence[str] = ()
) -> MemoryEstimate:
    """The estimates of a pipeline's stages as one of all ranks, of the node that needs most. whole: trained parameters
    of the model."""
    stages, world = len(each), ranks_per_node * nodes
    wide = world // stages  # ranks of a stage, next to each other
    here = [[e for s, e in enumerate(each) if _ranks(s, wide, node, ranks_per_node)] for node in range(nodes)]
    control = _control_of_all(ranks_per_node)
    peaks = [
        sum(e.rank_peak * _ranks(s, wide, node, ranks_per_node) for s, e in enumerate(each))
        + sum(e.shared for e in here[node])
        + control.shared
        for node in range(nodes)
    ]
    most = here[peaks.index(max(peaks))]
    dearest = max(most, key=lambda e: e.rank_peak)
    names = dict.fromkeys(r.name for e in (dearest, *most) for r in e.rows)
    rows = {r.name: r for r in dearest.rows}
    shared = {n: sum(r.shared for e in most for r in e.rows if r.name == n) for n in names}
    told = [f"stage {s} of {stages}: {n}" for s, e in enumerate(each) for n in e.notes]
    return changed(
        dearest,
        world=world,
        ranks_per_node=ranks_per_node,
        nodes=nodes,
        parameters=whole,
        rows=(*(replace(rows.get(n, Row(n)), shared=shared[n]) for n in names if n in rows or shared[n]), control),
        init_peak=max(e.init_peak for e in each),
        shared=sum(e.shared for e in most) + control.shared,
        node_peak=max(peaks),
        largest_gradient=max(e.largest_gradient for e in each),
        between_steps=sum(e.between_steps for e in most),
        backward_bound=sum(e.backward_bound for e in most),
        stages=tuple(e.rank_peak for e in each),
        notes=(*notes, *told),
    )


def _control_of_all(ranks_per_node: int) -> Row:
    """Of the group of all ranks of a node, where data-parallel ones are others."""
    return Row("control of all ranks", shared=control_bytes(ranks_per_node))


def _ranks(stage: int, wide: int, node: int, ranks_per_node: int) -> int:
    """Of a stage, `wide` in all, on a node."""
    first, begin = stage * wide, node * ranks_per_node
    return max(0, min(first + wide, begin + ranks_per_node) - max(first, begin))


def among(e: MemoryEstimate, case: Case, whole: int) -> MemoryEstimate:
    """The estimate of a rank's shard as one of all ranks (of its stage, in a pipeline: over_stages knows how many those
    are). whole: trained parameters of the model."""
    if case.tensor * case.experts == 1:
        return e
    groups, on_the_way = case.groups, []
    for name, size, others in (
        ("sums over tensor-parallel ranks", case.tensor, case.experts),
        ("tokens between ranks that share experts", case.experts, case.tensor),
    ):
        if size > 1:
            of_one = control_bytes(min(size, case.ranks_per_node))
            on_the_way.append(Row(name, shared=of_one * e.ranks_per_node * others))
    if case.stages == 1:
        on_the_way.append(_control_of_all(case.ranks_per_node))
    shared = e.shared * groups + sum(r.shared for r in on_the_way)
    return changed(
        e,
        world=case.ranks_per_node * case.nodes,
        ranks_per_node=case.ranks_per_node,
        tensor=case.tensor,
        experts=case.experts,
        parameters=whole,
        rows=(*(replace(r, shared=r.shared * groups) for r in e.rows), *on_the_way),
        shared=shared,
        node_peak=e.rank_peak * case.ranks_per_node + shared,
        between_steps=e.between_steps * groups,
        backward_bound=e.backward_bound * groups,
    )


def predict(
    model: torch.nn.Module,
    plan: Plan,
    base: torch.optim.Optimizer,
    config: Config,
    batch: Any,
    loss_fn: Callable[..., Any] | None,
    *,
    named: Named,
    group_of: dict[int, int],
    steps: int = 3,
    loaded: int = 0,
    shapes: int = 0,
    gone: int = 0,
    looked: int = 0,
    staged: dryrun.Staged | None = None,
) -> MemoryEstimate:
    """The prediction for a plan that is made. With a batch only in a child (dryrun.forked): the model is spoilt.
    loaded: what torch's compiler takes, which torch's own optimizers and its checkpoint import, and nothing else. gone:
    change of resident memory before, when the model was divided over ranks. looked: peak of what was run for that.
    shapes: what a pipeline's first backward imports. staged: how a batch goes through the rank's stages of one."""
    from ....core.foreign.private import has_checkpointed
    from ....optim.states.dense import Optimizer
    from .. import dryrun

    core = takes_core_path(base)
    host_states = plan.device != "cpu" and config.zero.offload_optimizer.device != "none"
    run = None
    if batch is not None and plan.mode == "streamed":
        raise UnsupportedError(
            "a dry run of the streamed mode does not exist; estimate without a sample batch (model states only)"
        )
    if batch is not None:
        gas = config.gradient_accumulation_steps or 1
        trained = [p for _, p in reversed(named) if id(p) in group_of]
        update = None if core else _torch_update(plan, base, group_of, trained)
        run = dryrun.run(
            model,
            batch,
            loss_fn,
            dtype=torch_dtype(plan.dtype),
            trained=trained,
            layout=plan.layout,
            slots=SLOTS if plan.world > 1 else 0,
            own_all=plan.own_all,
            leases=not config.accumulates and plan.core_reduces,
            acc_color=memory.COLORS["acc"],
            acc_size=plan.accumulator.itemsize,
            accumulation=gas if gas <= 4 else 4,
            steps=steps,
            update=update,
            keeps_frozen=plan.stage < 3,
            handed=plan.has_master and plan.world > 1,
            cast_inputs=config.fp16.enabled and config.fp16.auto_cast,
            autocast=functools.partial(ops.autocast, config.autocast, plan.device),
            budget=config.activation_checkpointing.budget,
            staged=staged,
            sums_in=torch_dtype(plan.accumulator),
            buffers=config.data_types.buffer_dtype,
            computes_in=torch_dtype(plan.computes_in),
        )
    if isinstance(base, Optimizer) and not has_checkpointed():
        loaded = 0
    moments = moments_of(base) if core else 0
    return assembled(
        plan, moments, not core, host_states, run, loaded, steps, state_bytes_of(base), gone, looked, shapes
    )


def _torch_update(
    plan: Plan, base: torch.optim.Optimizer, group_of: dict[int, int], trained: Sequence[torch.nn.Parameter]
) -> Callable[[Any, Any, Any], Callable[[], Any]]:
    """For dryrun.run: the step of a torch optimizer on fake shards, as the engine makes them."""

    def make(_: Any, mode: Any, tracker: Any) -> Callable[[], Any]:
        import torch

        groups: list[list[Any]] = [[] for _ in base.param_groups]
        with mode:
            for s in plan.segments:
                shape = trained[s.param].shape if s.length == plan.layout.numels[s.param] else (s.length,)
                source = torch.empty(shape, dtype=torch.float32, device="cpu")
                grad = torch.empty_like(source)
                tracker.known(source), tracker.known(grad)
                p = torch.nn.Parameter(source)
                p.grad = grad
                groups[group_of[id(trained[s.param])]].append(p)
            twin = twin_over(base, groups)
        return twin.step

    return make
