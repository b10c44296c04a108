"""How much memory a training will take, before it starts: model states by arithmetic (the plan), activations, transient
gradients and what the heap keeps of them by a dry run (dryrun.py), per tier, per rank and per node.

    print(deepc.estimate(model, "ds_config.json", batch))          # or a function that makes the model: then nothing of
    it is allocated
    deepc estimate --config ds_config.json --model train:make_model --batch 8x1024:int64

Also DeepSpeed's helpers that need parameter counts only, under their names. Assumes ranks that do the same at about the
same time.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Union

from ...config.rules import default_optimizer
from ...config.tree import Config
from ...core import memory
from ...core.lib import call
from ...core.ops import torch_dtype
from ...errors import ArgumentError, ConfigError, OutOfMemoryError, UnsupportedError
from ...optim.factory import (
    check_format,
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
from ..derive import Machine, derive, meta_of
from ..mesh import Mesh
from ..plan import CONTROL_SLOT_BYTES, SLOTS
from . import timeline
from .search import command as search

if TYPE_CHECKING:
    import argparse

    import torch

    from ..plan import Plan

    Model = Union[torch.nn.Module, Callable[[], torch.nn.Module]]  # noqa: UP007
    ConfigSource = Union[str, os.PathLike[str], dict[str, Any], Config]  # noqa: UP007
    OptimizerLike = Union[torch.optim.Optimizer, Callable[[Any], torch.optim.Optimizer]]  # noqa: UP007
    Named = Sequence[tuple[str, torch.nn.Parameter]]

MIB, GIB = 2.0**20, 2.0**30
HUGE_PAGE = 2 << 20
PAGE = 4096
CODE_BYTES = (
    33 << 20
    # libraries' pages (17 MiB) and buffers that torch, oneDNN and MKL keep, first touched by a training step (measured,
    # torch 2.13)
)
CODE_BYTES_16BIT = 40 << 20  # the same with oneDNN's generated 16-bit kernels


@dataclass(frozen=True)
class Row:
    """Bytes of one kind: `host` and `device` on each rank, `shared` once per node."""

    name: str
    host: int = 0
    shared: int = 0
    device: int = 0


@dataclass(frozen=True)
class Option:
    """A change that makes a run smaller, and what it would take."""

    change: str
    rank_peak: int
    node_peak: int
    fits: bool


@dataclass(frozen=True)
class MemoryEstimate:
    """A prediction. All sizes in bytes, above what the process holds before deepc.initialize (the model is there then:
    what initialize frees of it counts negative).

    rows: what there is at the peak. rank_peak: of each rank, without what is shared. shared: once per node.
    device_peak: of each rank on its device. node_peak: ranks_per_node * rank_peak + shared. init_peak: of a rank while
    initialize moves the model. activations: held for backward after the forward; live_peak: most that tensors of a
    micro-step hold at once; heap_peak: most that the C library's heap keeps resident for them. between_steps: model
    states of a node. backward_bound: the most that a node holds of model states and gradients during backward.
    available: what the node has left, None if not asked. known: False without a sample batch (activations are not
    included then).
    """

    stage: int
    world: int
    ranks_per_node: int
    nodes: int
    dtype: str
    parameters: int
    device: str
    rows: tuple[Row, ...]
    rank_peak: int
    init_peak: int
    shared: int
    node_peak: int
    device_peak: int
    activations: int
    live_peak: int
    heap_peak: int
    largest_gradient: int
    between_steps: int
    backward_bound: int
    known: bool
    steps: int = 3
    available: int | None = None
    notes: tuple[str, ...] = ()
    options: tuple[Option, ...] = field(default=())

    @property
    def fits(self) -> bool:
        """Whether the node has room for its ranks, as far as that was asked."""
        return self.available is None or self.node_peak <= self.available

    def to_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return {**asdict(self), "fits": self.fits}

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> list[str]:
        ranks = f"{self.world} rank{'s' * (self.world > 1)}" + (f" on {self.nodes} nodes" if self.nodes > 1 else "")
        out = [
            f"memory: ZeRO stage {self.stage}, {ranks}, {self.parameters:,} parameters trained in {self.dtype}, on"
            f" {self.device}; peak above the process before initialize"
        ]
        device = any(r.device for r in self.rows)
        out.append(f"  {'MiB':<44}{'each rank':>12}{'shared, once a node':>22}" + (f"{'device':>12}" if device else ""))
        for r in self.rows:
            cells = [
                f"{r.host / MIB:>12.1f}" if r.host else " " * 12,
                f"{r.shared / MIB:>22.1f}" if r.shared else " " * 22,
            ]
            out.append(f"  {r.name:<44}" + "".join(cells) + (f"{r.device / MIB:>12.1f}" if device and r.device else ""))
        out.append(
            f"  {'peak' if self.known else 'peak without activations':<44}{self.rank_peak / MIB:>12.1f}{self.shared / MIB:>22.1f}"  # noqa: E501
            + (f"{self.device_peak / MIB:>12.1f}" if device else "")
        )
        out.append(
            f"  node: {self.ranks_per_node} x {self.rank_peak / MIB:.1f} + {self.shared / MIB:.1f} ="
            f" {self.node_peak / MIB:.1f} MiB"
            + (
                ""
                if self.available is None
                else f"; {self.available / MIB:.1f} MiB are left here (MemAvailable and memory cgroups)"
            )
        )
        per = self.between_steps / max(1, self.parameters)
        out.append(
            f"  between steps: model states {self.between_steps / MIB:.1f} MiB a node, {per:.2f} bytes a parameter"
            + (", whatever the number of ranks" if self.stage == 3 else "")
            + f"; during backward at most {self.backward_bound / MIB:.1f} MiB "
            f"(per rank two buckets and the largest gradient, {self.largest_gradient / MIB:.1f} MiB, more)"
        )
        out.extend(f"  note: {n}" for n in self.notes)
        if self.options:
            out.append("  what would take less (MiB a rank, a node):")
            out.extend(
                f"    {o.change:<62}{o.rank_peak / MIB:>10.1f}{o.node_peak / MIB:>10.1f} "
                f" {'fits' if o.fits else 'too much'}"
                for o in self.options
            )
        return out


# ---- arithmetic ------------------------------------------------------------------------------------------------------
def _block(nbytes: int, color: str) -> int:
    """What a state array takes of the machine's memory; `color` is its name in memory.COLORS."""
    taken = ctypes.c_size_t()
    call("dc_mem_alloc_bytes", nbytes, memory.COLORS[color], ctypes.byref(taken))
    return taken.value if nbytes else 0


def _round(n: int, to: int) -> int:
    return -(-n // to) * to


def _comm_bytes(ranks: int, slot_bytes: int, slots: int) -> int:
    """Shared memory of one communicator."""
    found = ctypes.c_int64()
    call("dc_comm_bytes", ranks, slots, _round(slot_bytes, PAGE), ctypes.byref(found))
    return found.value


def state_rows(
    plan: Plan, moments: int, host_states: bool, leased: bool = False, state_bytes: int = 1024
) -> tuple[list[Row], int]:
    """(rows of what initialize allocates for `plan`, bytes of them that are there before the moments). moments: of our
    own optimizer's arrays; 0 for a torch optimizer, whose states the dry run finds. leased: the accumulators' memory is
    the heap's (state.leases_gradients), whose peak has it.
    """
    b, gpu, rows = plan.bytes, plan.device != "cpu", []
    item = plan.dtype.itemsize

    def put(name: str, nbytes: int, *, host: bool) -> None:
        if nbytes:
            rows.append(Row(name, host=nbytes if host else 0, device=0 if host else nbytes))

    in_host = not gpu
    if plan.parameters_on:
        pass  # on disk; what is gathered at a time is the run's matter
    elif plan.stage == 3 and plan.transport in ("node", "nodes"):
        rows.append(Row("parameters", shared=_round((plan.layout.total + plan.frozen_elems) * item, HUGE_PAGE)))
    else:
        put(
            "parameters",
            _block((plan.layout.shard_elems if plan.sharded else plan.layout.total) * item, "params"),
            host=in_host,
        )
    states_in_host = in_host or host_states
    if leased:
        one = plan.owned_elems * plan.accumulator.itemsize
        put("gradients (fp32) of the tree of micro-batches", b["grads_private"] - one, host=True)
    else:
        put(f"gradients ({plan.accumulator.short})", _block(b["grads_private"], "acc"), host=states_in_host)
    put("norm", plan.owned_elems // 4096 * 8, host=states_in_host)
    if plan.disk is not None:
        moments = moments if b["states_private"] else 0
        put("cells of states on disk", _block(plan.disk.buffer_bytes, "master"), host=True)
    elif plan.has_master:
        put("fp32 masters", _block(b["master_private"], "master"), host=states_in_host)
    if host_states and gpu:
        put("parameters on their way to the device", _block(plan.layout.total * item, "lowp"), host=True)
    early = sum(r.host for r in rows)
    for _, color in zip(range(moments), ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")):
        put("optimizer states", _block(plan.owned_elems * state_bytes // 256, color), host=states_in_host)
    put("on the way between nodes", b["exchange_private"], host=in_host)
    if plan.transport in ("node", "nodes"):
        n = plan.ranks_per_node
        wire = max(plan.wire.itemsize, item)
        rows.append(
            Row(
                "gradient buckets and control",
                shared=_comm_bytes(n, CONTROL_SLOT_BYTES, 2) + _comm_bytes(n, plan.layout.bucket_elems * wire, SLOTS),
            )
        )
    return _merge(rows), early


def _merge(rows: Sequence[Row]) -> list[Row]:
    out: dict[str, Row] = {}
    for r in rows:
        o = out.get(r.name, Row(r.name))
        out[r.name] = Row(r.name, o.host + r.host, o.shared + r.shared, o.device + r.device)
    return list(out.values())


def _assemble(
    plan: Plan,
    moments: int,
    torch_states: bool,
    host_states: bool,
    run: dict[str, Any] | None,
    loaded: int,
    steps: int,
    state_bytes: int = 1024,
) -> MemoryEstimate:
    leased = run is not None and run["leased"]
    rows, early = state_rows(plan, moments, host_states, leased, state_bytes)
    gpu, notes = plan.device != "cpu", []
    trained = sum(p.numel for p in plan.params if p.index is not None)
    largest = max((p.numel for p in plan.params if p.index is not None), default=0)
    shared = sum(r.shared for r in rows)
    host = sum(r.host for r in rows)
    freed = run["freed"] if run is not None else -trained * 4
    code = 0 if gpu else CODE_BYTES if plan.dtype.itemsize == 4 else CODE_BYTES_16BIT
    copy_ = (
        largest * 4 if plan.has_master and plan.world > 1 else 0
    )  # one parameter at a time goes to all ranks in fp32
    init = (early + copy_ if not gpu else 0) + loaded
    rows.append(Row("the model's own parameters, freed", host=0 if gpu else freed, device=freed if gpu else 0))
    live = heap = saved = 0
    if run is not None and gpu:
        notes.append("activations are those that the CPU's kernels save")
    if run is not None:
        live, saved = run["live"], run["saved"]
        heap = max(run["resident"], live) if not gpu else live
        rows.append(Row("activations, saved for backward", host=0 if gpu else saved, device=saved if gpu else 0))
        more = live - saved
        what = "more at the peak" + (", with optimizer states" if torch_states else "")
        rows.append(Row(what, host=0 if gpu else more, device=more if gpu else 0))
        if heap > live:
            rows.append(
                Row(
                    f"gradients ({plan.accumulator.short}) in the heap's free memory, holes"
                    if leased
                    else "holes that the heap keeps",
                    host=heap - live,
                )
            )
        notes.append(f"the peak of live tensors is in {run['at']}")
        if not run["malloc"]:
            notes.append("the C library's malloc is replaced here: what its heap keeps is not predicted")
        if run["guesses"]:
            notes.append(
                f"the model reads values of tensors ({', '.join(run['guesses'])}); full masks and ones were assumed"
            )
    else:
        notes.append("activations are not included: pass a sample batch")
        if torch_states:
            notes.append("states of a torch optimizer are not included: pass a sample batch")
    if loaded or code:
        rows.append(Row("Python modules and kernels, loaded once", host=loaded + code))
    rank = max(init, host + (0 if gpu else freed + heap) + loaded) + code
    device = sum(r.device for r in rows if r.device) if gpu else 0
    return MemoryEstimate(
        stage=plan.stage,
        world=plan.world,
        ranks_per_node=plan.ranks_per_node,
        nodes=plan.nodes,
        dtype=plan.dtype.name,
        parameters=trained,
        device=plan.device,
        rows=tuple(_merge(rows)),
        rank_peak=rank,
        init_peak=init,
        shared=shared,
        node_peak=rank * plan.ranks_per_node + shared,
        device_peak=device,
        activations=saved,
        live_peak=live,
        heap_peak=heap,
        largest_gradient=largest * plan.dtype.itemsize,
        between_steps=plan.node_states,
        backward_bound=plan.backward_bound,
        known=run is not None,
        steps=steps,
        notes=tuple(notes),
    )


# ---- the prediction --------------------------------------------------------------------------------------------------
def estimate(
    model: Model,
    config: ConfigSource,
    sample_batch: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    *,
    ranks_per_node: int = 1,
    nodes: int = 1,
    optimizer: OptimizerLike | None = None,
    device: str = "cpu",
    steps: int = 3,
    suggest: bool = False,
    check: bool = False,
) -> MemoryEstimate:
    """Predicts the peak memory of training `model` with `config` through `steps` steps, before anything of it is
    allocated.

    model: a torch.nn.Module, or a function that makes one (it is then made of fake tensors: a model that does not fit
    can be asked for). config: as for deepc.initialize. sample_batch: one rank's micro-batch: a mapping is passed as
    keywords, a tuple or list as arguments; only shapes and dtypes count (tensors of device "meta" will do). None: model
    states only. loss_fn(output, batch): makes the scalar loss; default: the output, or its `.loss`. optimizer: as for
    deepc.initialize (an object needs a model that is an object). suggest: also predict what would make it smaller (each
    a dry run). check: raise OutOfMemoryError, with suggestions, if the node has not enough left.

    The dry run happens in a forked child: the caller's model is as before. Raises UnsupportedError if the model can't
    run without values.
    """
    import torch

    from . import dryrun

    if not callable(model):
        raise ArgumentError(
            f"estimate takes a torch.nn.Module or a function that makes one, got {type(model).__name__}"
        )
    if ranks_per_node < 1 or nodes < 1:
        raise ArgumentError(f"ranks_per_node {ranks_per_node} and nodes {nodes} must be at least 1")
    world = ranks_per_node * nodes
    parsed = Config.load(config, world_size=world, device_type=torch.device(device).type, allow_auto=True)
    case = _Case(model, parsed, sample_batch, loss_fn, ranks_per_node, nodes, optimizer, device, steps)
    result = _from_dict(dryrun.forked(case.work))
    if check or suggest:
        have = memory.available()
        result = _with(result, available=have)
        if suggest or not result.fits:
            result = _with(result, options=tuple(_options(case, have)))
    if check and not result.fits:
        raise OutOfMemoryError(_refusal(result))
    return result


def _refusal(e: MemoryEstimate) -> str:
    fitting = [o for o in e.options if o.fits]
    fix = (
        "; this would fit: " + "; or ".join(f"{o.change} ({o.node_peak / GIB:.2f} GiB)" for o in fitting[:4])
        if fitting
        else "; nothing that deepc knows to change makes it fit: " + _nearest(e)
    )
    return (
        f"the run needs {e.node_peak / GIB:.2f} GiB on this node and {(e.available or 0) / GIB:.2f} GiB are left"
        f" (memory cgroup and MemAvailable){fix if e.options else ''}.\n{e}"
    )


def _nearest(e: MemoryEstimate) -> str:
    """The change that comes nearest, and what is missing then."""
    best = min(e.options, key=lambda o: o.node_peak, default=None)
    if best is None or best.node_peak >= e.node_peak:
        return f"free or add {(e.node_peak - (e.available or 0)) / GIB:.2f} GiB, or use more nodes"
    return (
        f"{best.change} comes nearest with {best.node_peak / GIB:.2f} GiB; free or add"
        f" {(best.node_peak - (e.available or 0)) / GIB:.2f} GiB then, or use more nodes"
    )


def _with(e: MemoryEstimate, **changes: Any) -> MemoryEstimate:
    from dataclasses import replace

    return replace(e, **changes)


def _from_dict(d: dict[str, Any]) -> MemoryEstimate:
    d = {k: v for k, v in d.items() if k != "fits"}
    return MemoryEstimate(
        **{**d, "rows": tuple(Row(**r) for r in d["rows"]), "notes": tuple(d["notes"]), "options": ()}
    )


@dataclass
class _Case:
    """One question. `work` answers it, in a child."""

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

    def work(self) -> dict[str, Any]:
        from ...nn.fuse import fuse_as_asked
        from . import dryrun

        loaded = dryrun.load_compiler()  # here already, for the fake tensors
        model = self._make()
        fuse_as_asked(model, self.config.deepc.fuse)  # in a child: nobody sees it
        if self.recompute and not dryrun.checkpoint_blocks(model):
            raise UnsupportedError("the model has no list of blocks to recompute")
        base, named, group_of = self._optimizer(model)
        plan = self._plan(base, named, group_of)
        found = predict(
            model,
            plan,
            base,
            self.config,
            self.batch,
            self.loss_fn,
            named=named,
            group_of=group_of,
            steps=self.steps,
            loaded=loaded,
        )
        return _with(found, nodes=self.nodes).to_dict()

    def describe(self) -> dict[str, Any]:
        """The plan in words. In a child as well: the model may be one of fake tensors."""
        return {"text": self._plan(*self._optimizer(self._make())).describe()}

    def _make(self) -> torch.nn.Module:
        import torch

        from ...core.foreign.private import FakeTensorMode

        if isinstance(self.model, torch.nn.Module):
            return self.model
        with FakeTensorMode():
            model = self.model()
        if not isinstance(model, torch.nn.Module):
            raise ArgumentError(
                f"the function that makes the model returned {type(model).__name__}, not a torch.nn.Module"
            )
        return model

    def _optimizer(self, model: torch.nn.Module) -> tuple[torch.optim.Optimizer, Named, dict[int, int]]:
        import torch

        named = list(model.named_parameters())
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
        check_format(base, self.device, *self.config.zero.on_disk)
        group_of = {id(p): g for g, group in enumerate(base.param_groups) for p in group["params"] if p.requires_grad}
        return base, named, group_of

    def _plan(self, base: torch.optim.Optimizer, named: Named, group_of: dict[int, int]) -> Plan:
        # what copies_per_node says every node has all of, cut over its ranks
        nodes = 1 if copies_per_node(base, self.config.zero.stage) else self.nodes
        mesh = Mesh(dp=self.ranks_per_node * nodes, ranks_per_node=self.ranks_per_node)
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
) -> MemoryEstimate:
    """The prediction for a plan that is made. With a batch only in a child (dryrun.forked): the model is spoilt.
    loaded: what torch's compiler takes, which torch's own optimizers and its checkpoint import, and nothing else."""
    from ...core.foreign.private import has_checkpointed
    from ...optim.states.dense import Optimizer
    from . import dryrun

    core = takes_core_path(base)
    host_states = plan.device != "cpu" and config.zero.offload_optimizer.device == "cpu"
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
            leases=gas == 1 and plan.core_reduces,
            acc_color=memory.COLORS["acc"],
            acc_size=plan.accumulator.itemsize,
            accumulation=gas if gas <= 4 else 4,
            steps=steps,
            update=update,
            keeps_frozen=plan.stage < 3,
            cast_inputs=config.fp16.enabled and config.fp16.auto_cast,
        )
    if isinstance(base, Optimizer) and not has_checkpointed():
        loaded = 0
    moments = moments_of(base) if core else 0
    return _assemble(plan, moments, not core, host_states, run, loaded, steps, state_bytes_of(base))


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
                source, grad = torch.empty(shape), torch.empty(shape)
                tracker.known(source), tracker.known(grad)
                p = torch.nn.Parameter(source)
                p.grad = grad
                groups[group_of[id(trained[s.param])]].append(p)
            twin = twin_over(base, groups)
        return twin.step

    return make


# ---- what would fit --------------------------------------------------------------------------------------------------
def _options(case: _Case, have: int) -> list[Option]:
    """Changes that exist and their predicted figures, the least intrusive first, then all of them together."""
    import torch

    from ...core.foreign.private import tree_leaves

    tensors = [t for t in tree_leaves(case.batch) if isinstance(t, torch.Tensor) and t.dim()]
    rows = min((t.shape[0] for t in tensors), default=1)
    out: list[Option] = []
    tries: list[tuple[str, dict[str, Any], int, bool]] = []
    smaller = rows
    while smaller > 1 and rows // smaller < 8:
        smaller = (smaller + 1) // 2
        tries.append(
            (
                f"micro-batch {smaller} instead of {rows}, gradient_accumulation_steps x {-(-rows // smaller)}",
                {},
                smaller,
                False,
            )
        )
    stage, world = case.config.zero.stage, case.ranks_per_node * case.nodes
    if world > 1 and stage < 3 and (case.device == "cpu" or stage < 2):
        better = 3 if case.device == "cpu" else 2
        tries.append((f"zero_optimization.stage {better}", {"zero_optimization": {"stage": better}}, rows, False))
    if case.batch is not None:
        tries.append(("activation checkpointing of the blocks", {}, rows, True))
    if case.config.dtype == "fp32":
        tries.append(("bf16.enabled", {"bf16": {"enabled": True}}, rows, False))
    if case.device != "cpu" and case.config.zero.offload_optimizer.device != "cpu":
        tries.append(
            (
                "zero_optimization.offload_optimizer.device cpu",
                {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
                rows,
                False,
            )
        )
    if len(tries) > 1:
        together: dict[str, Any] = {}
        for _, change, _, _ in tries:
            together = _merged(together, change)
        least = min(t[2] for t in tries)
        tries.append(("all of these", together, least, case.batch is not None))
    for name, change, take, recompute in tries:
        option = _try(case, name, change, take if take != rows else None, recompute, have)
        if option is not None:
            out.append(option)
    return out


def _merged(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    out = copy.deepcopy(a)
    for k, v in b.items():
        out[k] = _merged(out[k], v) if isinstance(v, dict) and isinstance(out.get(k), dict) else v
    return out


def _try(case: _Case, name: str, change: dict[str, Any], rows: int | None, recompute: bool, have: int) -> Option | None:
    """None if the change can't be made to this model or configuration."""
    from dataclasses import replace

    from . import dryrun

    with contextlib.suppress(UnsupportedError, ConfigError):
        raw = _merged(case.config.raw, change)
        config = Config.load(
            raw, world_size=case.ranks_per_node * case.nodes, device_type=case.config.device_type, allow_auto=True
        )
        batch = case.batch if rows is None else dryrun.first_rows(case.batch, rows)
        e = _from_dict(dryrun.forked(replace(case, config=config, batch=batch, recompute=recompute).work))
        return Option(name, e.rank_peak, e.node_peak, e.node_peak <= have)
    return None


def options_by_counts(plan: Plan, have: int) -> list[str]:
    """Changes of stage and precision whose model states would fit into `have` bytes of this node, each with its figure;
    the least change first."""
    total = sum(p.numel for p in plan.params)
    kind = {4: "fp32"}.get(plan.dtype.itemsize, "bf16")
    out = []
    for dtype in dict.fromkeys((kind, "bf16")):
        for stage in range(plan.stage, 4):
            private, shared = model_states_bytes(
                total, stage=stage, ranks_per_node=plan.ranks_per_node, nodes=plan.nodes, dtype=dtype
            )
            need = private * plan.ranks_per_node + shared + plan.bytes["staging_shared"]
            if (dtype, stage) != (kind, plan.stage) and need <= have and need < plan.bytes["node_total"]:
                out.append(
                    f"zero_optimization.stage {stage}{' with bf16.enabled' if dtype != kind else ''} ({need / GIB:.2f}"
                    " GiB)"
                )
                break
    return out


def _by_nodes(plan: Plan, have: int) -> str:
    """What would take the least on this node, and how many nodes like it have room for that."""
    total = sum(p.numel for p in plan.params)
    kinds = ("bf16",) if plan.dtype.itemsize < 4 else ("fp32", "bf16")

    def need(dtype: str, nodes: int) -> float:
        private, shared = model_states_bytes(
            total, stage=3, ranks_per_node=plan.ranks_per_node, nodes=nodes, dtype=dtype
        )
        return float(private * plan.ranks_per_node + shared + plan.bytes["staging_shared"])

    least = need(kinds[-1], plan.nodes)
    out = f"the least is zero_optimization.stage 3 in {kinds[-1]}, {least / GIB:.2f} GiB: free or add {(least - have) / GIB:.2f} GiB"  # noqa: E501
    for nodes in range(plan.nodes + 1, 1025):
        kind = next((k for k in kinds if need(k, nodes) <= have), None)
        if kind is not None:
            return f"{out}, or use {nodes} nodes like this one at stage 3 in {kind} ({need(kind, nodes) / GIB:.2f} GiB on each)"  # noqa: E501
    return f"{out}; up to 1,024 nodes like this one are too few as well"


def refuse_if_too_big(plan: Plan, further: int = 0) -> None:
    """Raises OutOfMemoryError, before anything is allocated, if the model states (and `further` bytes) don't fit into
    what this node has left; says what would."""
    if plan.device != "cpu":
        return
    have = memory.available()
    if plan.bytes["node_total"] + further > have:
        fix = " or ".join(options_by_counts(plan, have)) or f"nothing on this node; {_by_nodes(plan, have)}"
        raise OutOfMemoryError(
            f"the plan needs {plan.bytes['node_total'] / 2**30:.2f} GiB on this node for model"
            f" states{f' and {further / 2**30:.2f} GiB to change the precision' if further else ''}, and"
            f" {have / 2**30:.2f} GiB are left (memory cgroup and MemAvailable). What would fit:"
            f" {fix}.\n{plan.describe()}"
        )


def plan_text(
    model: Model,
    config: ConfigSource,
    *,
    ranks_per_node: int = 1,
    nodes: int = 1,
    optimizer: OptimizerLike | None = None,
    device: str = "cpu",
) -> str:
    """The plan that deepc.initialize would make for these ranks, in words. Arguments as for estimate."""
    import torch

    from . import dryrun

    parsed = Config.load(
        config, world_size=ranks_per_node * nodes, device_type=torch.device(device).type, allow_auto=True
    )
    text: str = dryrun.forked(_Case(model, parsed, None, None, ranks_per_node, nodes, optimizer, device, 1).describe)[
        "text"
    ]
    return text


class FirstStep:
    """The traced step: what the kernel's high-water mark says of a prediction after the first real one."""

    def __init__(self, prediction: MemoryEstimate) -> None:
        self.prediction, self.before = prediction, memory.process_bytes()
        self.measured = 0  # bytes of this rank's peak above the process before initialize, once report() could tell

    def report(self) -> str:
        """In words: predicted and measured peak of this process; "" where the mark tells nothing, because it was higher
        before."""
        now, told = memory.process_bytes(), self.prediction
        if not told.known or told.device != "cpu" or now["peak_rss_bytes"] <= self.before["peak_rss_bytes"]:
            return ""
        self.measured = now["peak_rss_bytes"] - self.before["rss_bytes"]
        return (
            f"memory: peak of this rank so far {self.measured / MIB:.1f} MiB above the process before initialize;"
            f" predicted through {told.steps} steps: {told.rank_peak / MIB:.1f} + {told.shared / MIB:.1f} shared"
        )


class Ranks(Protocol):
    """What the check asks of the engine's group."""

    @property
    def node(self) -> int:
        """This rank's node."""

    def gather_all(self, mine: torch.Tensor) -> torch.Tensor:
        """[ranks, n] of every rank's [n]. Collective."""


def check_plan(
    plan: Plan,
    model: torch.nn.Module,
    base: torch.optim.Optimizer,
    config: Config,
    named: Named,
    group_of: dict[int, int],
    group: Ranks,
    sample_batch: Any,
    loss_fn: Callable[..., Any] | None,
) -> MemoryEstimate:
    """For the engine, before it allocates: the prediction for its plan, refused with OutOfMemoryError on every rank of
    a node if it does not fit there. Collective."""
    import torch

    from . import dryrun

    def work() -> dict[str, Any]:
        return predict(model, plan, base, config, sample_batch, loss_fn, named=named, group_of=group_of).to_dict()

    failure = ""
    try:
        e = _from_dict(work() if sample_batch is None else dryrun.forked(work))
    except UnsupportedError as exc:
        failure = str(exc)
        e = predict(model, plan, base, config, None, None, named=named, group_of=group_of)
        e = _with(e, notes=(*e.notes, failure))
    if plan.device != "cpu":
        return e
    have = memory.available()
    rows = group.gather_all(
        torch.tensor([float(e.rank_peak), float(have), float(group.node)], dtype=torch.float64)
    ).tolist()
    mine = [r for r in rows if r[2] == group.node]
    e = _with(e, node_peak=int(sum(r[0] for r in mine)) + e.shared, available=int(min(r[1] for r in mine)))
    if all(
        sum(r[0] for r in rows if r[2] == n) + e.shared <= min(r[1] for r in rows if r[2] == n)
        for n in {r[2] for r in rows}
    ):
        return e
    if sample_batch is not None and not failure:
        case = _Case(model, config, sample_batch, loss_fn, plan.ranks_per_node, plan.nodes, base, plan.device, 3)
        e = _with(e, options=tuple(_options(case, e.available or 0)))
    raise OutOfMemoryError(_refusal(e))


# ---- the commands ----------------------------------------------------------------------------------------------------
def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `deepc estimate`."""
    _plan_arguments(parser)
    parser.add_argument(
        "--batch",
        nargs="+",
        default=[],
        metavar="[NAME=]SHAPE:DTYPE",
        help=(
            "one rank's micro-batch, a tensor each, in the order of forward's arguments or by name: 8x1024:int64 or"
            " input_ids=8x1024:int64"
        ),
    )
    parser.add_argument(
        "--loss", metavar="MODULE:FUNCTION", help="loss_fn(output, batch), where the model's output is not the loss"
    )
    parser.add_argument("--steps", type=_count, default=3, metavar="N", help="steps of the dry run (3)")
    parser.add_argument("--suggest", action="store_true", help="also what would take less, with its figures")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--params", type=float, metavar="N", help="instead of --model: number of parameters (model states only)"
    )
    parser.add_argument(
        "--largest-layer", type=float, default=0, metavar="N", help="with --params: parameters of the largest layer"
    )


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Of `deepc plan`."""
    _plan_arguments(parser)
    timeline.add_arguments(parser)
    search.add_arguments(parser)


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="the DeepSpeed JSON")
    parser.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="a function without arguments that makes the model; MODULE: package.module, or train.py",
    )
    parser.add_argument("--ranks", type=_count, default=1, metavar="N", help="ranks of a node (1)")
    parser.add_argument("--nodes", type=_count, default=1, metavar="N", help="nodes (1)")


def _count(text: str) -> int:
    import argparse

    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def run_estimate(args: argparse.Namespace) -> int:
    """`deepc estimate`. Exit code 1: it does not fit here."""
    import json

    if args.params is not None:
        if not 1 <= args.params < float("inf") or not 0 <= args.largest_layer <= args.params:
            raise ArgumentError(
                f"--params {args.params:g} --largest-layer {args.largest_layer:g}: parameters are counted from 1 on,"
                " and a layer has at most all of them"
            )
        estimate_zero2_model_states_mem_needs_all_cold(args.params, args.ranks, args.nodes, 1.0)
        estimate_zero3_model_states_mem_needs_all_cold(args.params, args.largest_layer, args.ranks, args.nodes, 1.0)
        return 0
    if not args.model or not args.config:
        raise ArgumentError(
            "give --model and --config, or --params. For example: deepc estimate --config ds_config.json --model"
            " train.py:make_model"
        )
    result = estimate(
        _named(args.model),
        args.config,
        _batch(args.batch),
        _named(args.loss) if args.loss else None,
        ranks_per_node=args.ranks,
        nodes=args.nodes,
        steps=args.steps,
        suggest=args.suggest,
    )
    result = _with(result, available=result.available if result.available is not None else memory.available())
    print(json.dumps(result.to_dict(), indent=2) if args.json else result)
    return 0 if result.fits else 1


def run_plan(args: argparse.Namespace) -> int:
    """`deepc plan`."""
    if args.schedule:
        return timeline.run(args)
    if option := timeline.stray(args):
        raise ArgumentError(f"{option} is an option of --schedule; name a schedule, or leave it out")
    if args.cluster:
        return search.run(args, _named)
    if option := search.stray(args):
        raise ArgumentError(f"{option} is an option of --cluster; give a cluster's description, or leave it out")
    if not args.model or not args.config:
        raise ArgumentError(
            "give --config and --model, or --cluster and --model, or --schedule. For example: deepc plan --config"
            " ds_config.json --model train.py:make_model"
        )
    print(plan_text(_named(args.model), args.config, ranks_per_node=args.ranks, nodes=args.nodes))
    return 0


def _named(text: str) -> Any:
    """The object that "package.module:attribute" or "file.py:attribute" names."""
    import importlib
    import importlib.util

    where, _, what = text.partition(":")
    if not where or not what:
        raise ArgumentError(
            f"{text!r} is not MODULE:FUNCTION, such as train.py:make_model or package.module:make_model"
        )
    if where.endswith(".py") and not os.path.isfile(where):
        raise ArgumentError(f"can't find {text!r}: there is no file {where} (looked in {os.getcwd()})")
    sys.path.insert(0, os.path.dirname(os.path.abspath(where)) if where.endswith(".py") else os.getcwd())
    try:
        found = importlib.import_module(os.path.basename(where)[:-3] if where.endswith(".py") else where)
        for part in what.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as exc:
        raise ArgumentError(f"can't find {text!r}: {exc}") from exc
    finally:
        sys.path.pop(0)
    if not callable(found):
        raise ArgumentError(f"{text!r} is a value ({type(found).__name__}), and must be a function")
    return found


def _batch(specs: Sequence[str]) -> Any:
    """Tensors without values: a dict if they have names, a tuple if not, None if there are none."""
    import torch

    named: dict[str, torch.Tensor] = {}
    plain: list[torch.Tensor] = []
    for spec in specs:
        name, _, rest = spec.rpartition("=")
        shape, _, dtype = rest.partition(":")
        try:
            sizes = [int(n) for n in shape.split("x")]
            kind = getattr(torch, dtype or "float32")
            if not isinstance(kind, torch.dtype) or min(sizes) < 1:
                raise ValueError
        except (ValueError, AttributeError):
            raise ArgumentError(
                f"--batch {spec!r} is not [NAME=]SHAPE:DTYPE, such as 8x1024:int64 (sizes of at least 1, a dtype of"
                " torch)"
            ) from None
        tensor = torch.empty(sizes, dtype=kind, device="meta")
        named.update({name: tensor}) if name else plain.append(tensor)
    if named and plain:
        raise ArgumentError("--batch mixes tensors with and without names")
    return named or tuple(plain) or None


# ---- by counts alone: DeepSpeed's helpers ----------------------------------------------------------------------------
def _counts(model: torch.nn.Module) -> tuple[int, int]:
    """(parameters, those of the largest layer: a module's own, without its children)."""
    total = sum(p.numel() for p in model.parameters())
    return total, max((sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules()), default=0)


def model_states_bytes(
    total_params: int, *, stage: int, ranks_per_node: int = 1, nodes: int = 1, dtype: str = "fp32"
) -> tuple[int, int]:
    """(bytes private to a rank, bytes shared by a node's ranks) of model states with AdamW on CPU ranks: parameters,
    fp32 gradients and two moments, and fp32 masters where dtype is 16-bit. Without buckets and activations."""
    if stage not in (0, 1, 2, 3):
        raise ArgumentError(f"stage {stage!r}: it must be 0, 1, 2 or 3")
    if total_params < 0 or ranks_per_node < 1 or nodes < 1:
        raise ArgumentError(
            f"total_params {total_params}, ranks_per_node {ranks_per_node} and nodes {nodes} must be positive"
        )
    item = {"fp32": 4, "bf16": 2, "fp16": 2}[dtype]
    owned = total_params if stage == 0 else -(-total_params // (ranks_per_node * nodes))
    states = owned * (12 if item == 4 else 16)
    params = total_params * item
    return (states, params) if stage == 3 else (states + params, 0)


def _mem_needs(title: str, total: int, largest: int, stage: int, ranks: int, nodes: int, factor: float) -> None:
    print(
        f"Estimated memory needed for params, optim states and gradients for a:\nHW: Setup with {nodes}"
        f" node{'s' * (nodes > 1)}, {ranks} rank{'s' * (ranks > 1)} per node.\nSW: {title}, ZeRO stage {stage}."
    )
    print(
        f"  {'per rank':>10} | {'per node':>10} | Options (private x ranks + shared once a node, then x {factor:g} for"
        " buffers)"
    )
    for dtype in ("fp32", "bf16"):
        private, shared = model_states_bytes(total, stage=stage, ranks_per_node=ranks, nodes=nodes, dtype=dtype)
        largest_gradient = largest * (4 if dtype == "fp32" else 2)
        rank = private + largest_gradient
        print(
            f"  {factor * rank / GIB:>8.2f}GB | {factor * (ranks * rank + shared) / GIB:>8.2f}GB | dtype={dtype},"
            f" largest layer's gradient {largest_gradient / GIB:.2f}GB, shared {shared / GIB:.2f}GB"
        )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """DeepSpeed's helper of this name: prints what model states need at stage 2, from the number of parameters. Ranks
    are the "gpus"."""
    _mem_needs(
        f"Model with {int(total_params / 1e6)}M total params",
        int(total_params),
        0,
        2,
        num_gpus_per_node,
        num_nodes,
        additional_buffer_factor,
    )


def estimate_zero2_model_states_mem_needs_all_live(
    model: torch.nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """The same from a model."""
    estimate_zero2_model_states_mem_needs_all_cold(
        _counts(model)[0], num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """DeepSpeed's helper of this name: prints what model states need at stage 3, from the number of parameters and
    those of the largest layer."""
    _mem_needs(
        f"Model with {int(total_params / 1e6)}M total params, {int(largest_layer_params / 1e6)}M largest layer params",
        int(total_params),
        int(largest_layer_params),
        3,
        num_gpus_per_node,
        num_nodes,
        additional_buffer_factor,
    )


def estimate_zero3_model_states_mem_needs_all_live(
    model: torch.nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """The same from a model."""
    total, largest = _counts(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )
