"""How an engine is made: a list of steps (`assemble`), each a function of what is there so far.

If a step fails, what the steps before it have opened is closed again, in reverse (the engine keeps the same list for
destroy()). Some steps are collective, so that ranks fail together where the reason is one that all see; a rank that
fails alone leaves its group, and its peers are told."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, Union, cast

import torch

from ...comm import start as comm
from ...config.rules import default_optimizer
from ...config.tree import Config
from ...core import cpu, env, memory
from ...core.ops import casts, dtype_of, name_of, torch_dtype
from ...errors import ArgumentError, ConfigError, DeepcError, DiskError, OutOfMemoryError, UnsupportedError
from ...optim.factory import check_on_disk, make_optimizer
from ...optim.kinds.muon import choose_by_name, in_both_kinds
from ...parallel.axes import axis_process_group
from ...parallel.mpu import as_mpu_says, refuse_another_order
from ...parallel.tensor.group import tensor_group
from ...parallel.tensor.rules import as_noted
from ...plan.derive import Machine, derive, meta_of
from ...plan.mesh import Mesh
from ...plan.plan import Plan
from ...plan.predict.estimate import FirstStep, check_plan, refuse_if_too_big
from ...zero.init import adopt
from ...zero.parameters import clipping, gathered, owners
from ...zero.parameters.alike import EqualSteps, NoneUnused, Ranks, refuse_sums, refuse_unequal
from ...zero.parameters.guard import ModelWatch, make_guard
from ...zero.resident import ResidentState
from ...zero.state import ModelState
from ...zero.step.hooks import GradientHooks
from ...zero.step.norm import Skips
from ...zero.step.update import ShardedOptimizer
from ...zero.tiers.agree import together
from ...zero.tiers.disk import DiskTier, open_tier, preflight
from ..base import EngineBase, say
from ..data import make_loader
from ..events import Events, Watcher
from ..policy import precision
from ..policy.choose import choose_policy
from ..states.activations import Activations, Moves
from ..states.curriculum import Curriculum
from ..states.recompute import Recomputation, largest_over
from .buffers import place_buffers
from .shares import (
    check_numbers,
    check_shards,
    check_stages,
    cut_as_asked,
    join_group,
    keep_comparing,
    leveller,
    mesh_asked,
    part_of,
    ranks_to_share,
    sharers_of,
)

if TYPE_CHECKING:
    from ...nn.fuse import FuseSummary
    from ...optim.schedules import Scheduler
    from ...parallel.pipeline.part import Part
    from ...zero.streamed.state import StreamedState
    from ..data import TimedLoader

    OptimizerLike = Union[torch.optim.Optimizer, Callable[[Any], torch.optim.Optimizer]]  # noqa: UP007
    Named = Sequence[tuple[str, torch.nn.Parameter]]

E = TypeVar("E", bound=EngineBase)
logger = logging.getLogger("deepc")


class Given(NamedTuple):
    """The arguments of deepc.initialize beside model and config. evaluates: without any optimizer the engine is for
    evaluation, as in DeepSpeed. part: of the model, where the ranks make a pipeline."""

    optimizer: OptimizerLike | None = None
    model_parameters: Iterable[Any] | None = None
    lr_scheduler: Any = None
    training_data: Any = None
    collate_fn: Callable[..., Any] | None = None
    device: torch.device | None = None
    sample_batch: Any = None
    loss_fn: Callable[..., Any] | None = None
    evaluates: bool = False
    part: Part | None = None


# ---- deepc.initialize ------------------------------------------------------------------------------------------------
def initialize(
    kind: type[E],
    pipelined: type[E] | None = None,
    *,
    watchers: Sequence[Watcher],
    model: Any,
    config: Any,
    args: Any = None,
    mpu: Any = None,
    device: Any = None,
    distributed_port: int | None = None,
    dist_init_required: bool | None = None,
    **given: Any,
) -> tuple[E, ShardedOptimizer, TimedLoader | None, Scheduler | None]:
    """See deepc.initialize. kind, pipelined: the engine's class, and that of a pipeline (deepc.compat has its own).
    given: the other fields of Given."""
    import torch.distributed as dist

    if model is None and isinstance(args, torch.nn.Module):
        raise ArgumentError(
            "initialize got a model as its first argument, which is args as in DeepSpeed; write initialize(model=...)"
        )
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(f"initialize needs model=, a torch.nn.Module, got {type(model).__name__}")
    source = config
    if source is None and args is not None:
        source = getattr(args, "deepspeed_config", None)
    if source is None:
        raise ConfigError(
            "no configuration: pass config= (a DeepSpeed JSON path or dict), or args with deepspeed_config"
        )
    if dist_init_required is False and not dist.is_initialized():
        raise ArgumentError(
            "initialize(dist_init_required=False) says that torch.distributed is initialised, and it is not; call"
            " deepc.init_distributed() first, or leave the argument out"
        )
    comm.init_distributed(distributed_port=distributed_port)
    device = torch.device(device) if device is not None else comm.default_device()
    if device == torch.device("cuda") and torch.cuda.is_available():
        device = comm.default_device()
    if device.type == "cuda" and not torch.cuda.is_available():
        why = "is built without CUDA" if torch.version.cuda is None else "sees no GPU (nvidia-smi says more)"
        raise ArgumentError(
            f"initialize(device='{device}'): torch {torch.__version__} {why}; leave device out, or mend that"
        )
    source = as_noted(model, source, mpu)
    replicas = False
    if mpu is not None:
        source, replicas = as_mpu_says(model, source, mpu)
    parsed = Config.load(source, world_size=ranks_to_share(model, source), device_type=device.type)
    parsed.require_resolved()
    if parsed.log_level:
        logger.setLevel(env.text("DEEPC_LOG_LEVEL", config=parsed.log_level.upper()))
    if device.type != "cpu" and not parsed.zero.parameters_leave(device.type):
        model.to(device)
    cut_as_asked(model, parsed, replicas, kind.whole_logits)
    part = part_of(model, parsed, given, device)
    if mpu is not None:
        refuse_another_order(mpu, part.mesh if part is not None else mesh_asked(parsed, 1))
    made = kind if part is None else pipelined
    if made is None:
        raise UnsupportedError("a PipelineModule is trained and evaluated (deepc.initialize, engine.eval_batch) only")
    engine = made(model, parsed, watchers=watchers, device=device, part=part, **given)
    if replicas:
        keep_comparing(engine)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


# ---- the steps -------------------------------------------------------------------------------------------------------
def assemble(
    engine: EngineBase, model: torch.nn.Module, config: Config, watchers: Sequence[Watcher], given: Given
) -> contextlib.ExitStack:
    """Makes the parts of `engine`. Returns what undoes it. Collective."""
    with contextlib.ExitStack() as undo:
        engine.module, engine._config = model, config
        engine.device = given.device or comm.default_device()
        engine.dtype = precision.choose_dtype(config)
        engine.averages, engine.norm_riders, engine.memory_plan, engine.first_step = {}, [], None, None
        engine.monitor = engine.profile = None
        open_events(engine, watchers, undo)
        undo.callback(owners.leave, engine)
        join_group(engine, given.part, undo)
        check_stages(engine)
        choose_attention(engine, undo)
        fused = fuse_model(engine, undo)
        base = make_base_optimizer(engine, given)
        engine.step_policy = choose_policy(engine, base)
        stage = config.zero.stage
        engine.optimizer = ShardedOptimizer(base, allow_untested=config.zero_allow_untested_optimizer, stage=stage)
        group_of = {} if is_for_evaluation(engine, given) else trained_groups(engine.optimizer.param_groups)
        named = own_parameters(engine, group_of)
        ranks = Ranks(engine.everyone, engine.mesh)
        if engine.everyone.world > 1:
            refuse_unequal(ranks, named, group_of, engine.optimizer, config, engine.dtype)
        engine.step_policy.check_optimizer()
        check_shards(engine)
        engine.optimizer.check_accumulator(config.data_types.grad_accum_dtype)
        if any(config.zero.on_disk):
            check_on_disk(engine.optimizer.base)
        plans = make_plans(engine, named, group_of)
        engine.optimizer.check_places(engine.plan)
        predict_memory(engine, plans, named, group_of, given)
        check_disk(engine)
        reordered = [n for n, p in named if not p.is_contiguous()]
        adopt(named, engine.plan.sharded or bool(engine.plan.parameters_on))
        place_buffers(engine)
        choose_kernels(engine)
        make_states(engine, named, group_of, undo)
        engine.equal_steps = EqualSteps(ranks, engine.optimizer, engine.state, config)
        if engine.everyone.world > 1:
            engine.norm_riders.append(engine.equal_steps)
            refuse_sums(ranks, engine.optimizer, engine.everyone.rank)
        engine.none_unused = None
        if stage == 2 and not config.zero.ignore_unused_parameters:
            engine.none_unused = NoneUnused(engine.everyone, engine.state, engine.hooks)
            engine.norm_riders.append(engine.none_unused)
        make_activations(engine, undo)
        sequence = axis_process_group(engine.mesh, "sp") if engine.mesh.sp > 1 else None
        engine.curriculum = Curriculum(config, engine.module, engine.part is not None, sequence)
        engine.scaler, engine.skips = precision.make_scaler(config), Skips(config.deepc.max_lost_steps)
        engine.optimizer.loss_scaler = engine.scaler or engine.optimizer.loss_scaler
        engine.lr_scheduler = make_scheduler(engine, given.lr_scheduler)
        engine.training_dataloader = make_loader(
            given.training_data,
            given.collate_fn,
            micro_batch=engine.train_micro_batch_size_per_gpu(),
            step=engine.train_batch_size(),
            drop_last=config.dataloader_drop_last,
            world=engine.mesh.dp,
            rank=engine.mesh.coordinates(engine.everyone.rank).dp,
            make_sampler=engine.step_policy.make_sampler,
        )
        if engine.training_dataloader is not None and engine.curriculum.metrics:
            engine.training_dataloader.changes = lambda batch: engine.curriculum.of_loader(
                engine.global_steps + 1, batch
            )
        hold_parameters(engine, undo)
        owners.enter(engine)
        clipping.watch(True)
        undo.callback(clipping.watch, False)
        engine.model_watch = ModelWatch(model)
        engine.guard.remember()
        if engine.device.type == "cpu":
            memory.trim_heap()  # what the set-up freed does not come again
        report(engine, given, fused, reordered)
        engine.events.end("initialize")
        return undo.pop_all()


def open_events(engine: EngineBase, watchers: Sequence[Watcher], undo: contextlib.ExitStack) -> None:
    engine.events = Events()
    undo.callback(engine.events.close)
    for watch in watchers:
        watch(engine)
    engine.events.begin("initialize")


def choose_attention(engine: EngineBase, undo: contextlib.ExitStack) -> None:
    """sparse_attention of the configuration; whoever ends the engine has the model's own attention back."""
    section = engine._config.sparse_attention
    if section is None:
        return
    from ...nn.attention import use_asked

    undo.callback(use_asked(engine.module, section))


def fuse_model(engine: EngineBase, undo: contextlib.ExitStack) -> FuseSummary | None:
    """deepc.fuse of the configuration: modules get other classes, so parameters, hooks and names stay what they are,
    and whoever ends the engine has the model back as it was."""
    asked = engine._config.deepc.fuse
    if asked is False:
        return None
    from ...nn.fuse import fuse_as_asked

    fused = fuse_as_asked(engine.module, asked)
    if fused is not None:
        undo.callback(fused.undo)
    return fused


# ---- the optimizer ---------------------------------------------------------------------------------------------------
def is_for_evaluation(engine: EngineBase, given: Given) -> bool:
    """Without an optimizer DeepSpeed makes an engine for evaluation: ZeRO-3 without gradients and states."""
    return given.evaluates and given.optimizer is None and engine._config.optimizer is None


def make_base_optimizer(engine: EngineBase, given: Given) -> torch.optim.Optimizer:
    """The optimizer over the model's own parameters: the one given, the configuration's, or AdamW."""
    cfg, optimizer = engine._config.optimizer, given.optimizer
    if is_for_evaluation(engine, given):
        return torch.optim.SGD(
            list(engine.module.parameters()) or [torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))],
            lr=0.0,
        )
    params = (
        list(given.model_parameters)
        if given.model_parameters is not None
        else [p for p in engine.module.parameters() if p.requires_grad]
    )
    elsewhere = engine.elsewhere()
    if engine.part is not None:
        elsewhere |= engine.part.let_go()
    params = without(params, elsewhere)
    if optimizer is not None:
        if cfg is not None:
            say(engine, "an optimizer object was passed: the config's optimizer section is not used")
        made = (
            optimizer(params) if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer) else optimizer
        )
        if isinstance(made, ShardedOptimizer):
            raise ArgumentError("this optimizer already belongs to another engine")
        if not isinstance(made, torch.optim.Optimizer):
            raise ArgumentError(
                "optimizer must be a torch.optim.Optimizer or a function that makes one from parameters, got"
                f" {type(made).__name__}"
            )
        for group in made.param_groups if elsewhere else ():
            group["params"] = without(group["params"], elsewhere)
        return made
    if not params:
        raise ArgumentError(
            "no parameters to train: model_parameters is empty and no parameter of the model requires a gradient"
        )
    if cfg is None:
        cfg = default_optimizer()
        say(
            engine,
            "no optimizer in the config and none passed: AdamW with DeepSpeed's defaults, "
            + ", ".join(f"{k} {v}" for k, v in cfg.params.items()),
        )
    if cfg.backend == "deepc" and cfg.type == "Muon":
        choose_by_name(engine.module.named_parameters())
        if engine.part is not None:
            params = cast("list[Any]", in_both_kinds(params))
    try:
        return make_optimizer(cfg.type, cfg.params, params, backend=cfg.backend)
    except (TypeError, ValueError) as exc:
        if isinstance(exc, DeepcError):
            raise
        raise ConfigError(f"optimizer {cfg.type} does not take {cfg.params!r}: {exc}") from exc


def without(params: list[Any], elsewhere: frozenset[int]) -> list[Any]:
    """Parameters, or groups of them ({"params": [...], ...}), that are not among those ids. A group stays, were it
    empty: schedules and checkpoints count them."""
    return [
        {**p, "params": without(_listed(p["params"]), elsewhere)} if isinstance(p, dict) else p
        for p in params
        if isinstance(p, dict) or id(p if not isinstance(p, tuple) else p[1]) not in elsewhere
    ]


def _listed(params: Any) -> list[Any]:
    """Those of a group, which may be one tensor, as torch has it."""
    return [params] if isinstance(params, torch.Tensor) else list(params)


def trained_groups(param_groups: list[dict[str, Any]]) -> dict[int, int]:
    """id(parameter) -> index of its param group, of those that require a gradient."""
    return {id(p): g for g, group in enumerate(param_groups) for p in group["params"] if p.requires_grad}


def make_scheduler(engine: EngineBase, given: Any) -> Scheduler | None:
    """The one given, made of the optimizer if it is a function; else the configuration's."""
    from ...optim.schedules import build_scheduler

    cfg = engine._config.scheduler
    if given is not None:
        if cfg is not None:
            say(engine, "an LR schedule was passed: the config's scheduler section is not used")
        if callable(given) and not hasattr(given, "step"):
            given = given(engine.optimizer)
        made: Scheduler = given
        groups = getattr(getattr(made, "optimizer", None), "param_groups", None)
        ours = {id(g) for g in engine.optimizer.param_groups}
        if isinstance(groups, list) and ours.isdisjoint(map(id, groups)):
            say(
                engine,
                f"the {type(made).__name__} that was passed is of another optimizer, whose rates this engine does not"
                " train with: pass that optimizer too, or a function of the optimizer that makes the schedule",
                logging.WARNING,
            )
        return made
    return build_scheduler(cfg.type, dict(cfg.params), engine.optimizer) if cfg is not None else None


# ---- checks ----------------------------------------------------------------------------------------------------------
def own_parameters(engine: EngineBase, group_of: dict[int, int]) -> Named:
    """(name, parameter) of what this engine will hold; raises for what can't be trained here. What another engine
    trains is frozen here, and stays where it is."""
    elsewhere = engine.elsewhere()
    named = [(n, p) for n, p in engine.module.named_parameters() if id(p) not in elsewhere]
    known = {id(p) for _, p in named}
    if missing := [i for i in group_of if i not in known]:
        raise ArgumentError(
            f"the optimizer has {len(missing)} parameter(s) that are not parameters of the model passed to initialize"
        )
    for name, p in named:
        check_parameter(engine, name, p, id(p) in group_of)
    for other in owners.alive():
        if engine.auto_precision is None and other.auto_precision is None:
            continue
        theirs = {id(p) for p in (*other.state.trained, *(p for _, p in other.state.frozen))}
        if (shared := next((n for n, p in named if id(p) in theirs), None)) is not None:
            raise UnsupportedError(
                f"parameter '{shared}' belongs to two engines, and precision \"auto\" of one of them would change"
                " its dtype under the other; set bf16.enabled (or nothing, for fp32) for both"
            )
    return [(n, p) for n, p in named if owners.trainer(p) is None]


def check_parameter(engine: EngineBase, name: str, p: torch.nn.Parameter, trained: bool) -> None:
    if torch.nn.parameter.is_lazy(p):
        raise ArgumentError(
            f"parameter '{name}' of a lazy module has no shape yet; run the model once (a dummy forward) before"
            " initialize"
        )
    if p.is_meta:
        raise ArgumentError(
            f"parameter '{name}' is on the meta device and has no values; materialise it first (model.to_empty and"
            " init)"
        )
    other = owners.trainer(p)
    if other is not None and trained:
        raise UnsupportedError(
            f"parameter '{name}' is already trained by another engine; two engines can't own one parameter. It"
            " may be frozen in one of them (requires_grad_(False), or model_parameters= without it), or"
            " destroy that engine first"
        )
    if trained and any(e.plan.mode == "streamed" and any(p is q for _, q in e.state.frozen) for e in owners.alive()):
        raise UnsupportedError(
            f"parameter '{name}' is frozen in an engine that streams its parameters (ZeRO-3 without shared"
            " memory), which can't hand it over; make the engine that trains it first"
        )
    if other is not None and other.dtype != engine.dtype:
        raise ConfigError(
            f"parameter '{name}' is trained by another engine in {other.dtype} and this one computes in"
            f" {engine.dtype}; a parameter has one dtype: use the same precision for both"
        )
    plain_fp32 = engine.dtype == torch.float32 and engine.auto_precision is None
    if plain_fp32 and casts(p) and p.dtype not in (torch.float32,) and trained:
        raise ConfigError(
            f"parameter '{name}' is {p.dtype} and the config asks for fp32 training; set bf16.enabled or"
            " fp16.enabled, or pass model.float()"
        )
    if trained and not casts(p):
        way = (
            "keep it as a real one, [..., 2] (torch.view_as_real), and compute with torch.view_as_complex in forward"
            if p.is_complex()
            else "set requires_grad_(False), or give it another dtype"
        )
        raise ConfigError(
            f"parameter '{name}' is {p.dtype}; only floating-point parameters of 16 bits and more can be trained: {way}"
        )


# ---- the plan --------------------------------------------------------------------------------------------------------
def make_plans(engine: EngineBase, named: Named, group_of: dict[int, int]) -> dict[torch.dtype, Plan]:
    """The engine's plan, and one for each other dtype that its policy may change to."""
    group, rank = engine.group, engine.group.rank
    mesh = Mesh(dp=engine.group.world, ranks_per_node=group.ranks_per_node)
    meta, machine = meta_of(named, group_of), Machine.here(engine.device, group)
    plans = {
        dtype: derive(
            engine._config,
            meta,
            mesh,
            machine,
            rank=rank,
            part=group.part_of(rank),
            moments=engine.optimizer.moments,
            state_bytes=engine.optimizer.state_bytes,
            on_disk=engine.optimizer.form_on_disk,
            whole_blocks=engine.optimizer.whole_blocks,
            dtype=dtype_of(dtype),
        )
        for dtype in engine.step_policy.dtypes()
    }
    engine.plan = plans[engine.dtype]
    engine.step_policy.take_plans(plans)
    return plans


def predict_memory(
    engine: EngineBase, plans: dict[torch.dtype, Plan], named: Named, group_of: dict[int, int], given: Given
) -> None:
    """Refuses a plan that does not fit. With a sample batch also predicts the peak, refuses what does not fit, and
    prints it."""
    if engine.device.type == "cpu":
        memory.keep_heap()  # before the prediction, which follows what the heap does
        memory.trim_heap()  # what an earlier engine's steps left free is available
    everyone = engine.everyone
    ranks_here = everyone.node_sizes[everyone.node]
    groups = -(-ranks_here // engine.plan.ranks_per_node) if engine.parts is not None else 1
    failure: Exception | None = None
    try:
        refuse_if_too_big(engine.plan, engine.step_policy.bytes_to_change(plans), groups)
    except OutOfMemoryError as exc:
        failure = exc
    if engine.device.type == "cpu":  # elsewhere none refuses
        # None allocates before all have looked: what it takes would not be available to those that look later.
        together(everyone, failure)
    if given.sample_batch is None or engine._config.deepc.memory_plan == "states":
        return
    staged, stage = None, engine.mesh.coordinates(everyone.rank).pp
    if engine.part is not None:
        from ...parallel.simulate.stages import on_paper

        staged = functools.partial(
            on_paper,
            engine.part,
            engine.module,
            stage,
            engine._config,
            engine.group.world,
            engine.dtype,
            shared=engine.shared_gradients,
        )
    engine.memory_plan = check_plan(
        engine.plan,
        engine.module,
        engine.optimizer.base,
        engine._config,
        named,
        group_of,
        everyone,
        given.sample_batch,
        given.loss_fn,
        engine.group.leader,
        stage,
        staged,
        engine.mesh.ep,
    )
    say(engine, str(engine.memory_plan))
    engine.first_step = FirstStep(engine.memory_plan)


def check_disk(engine: EngineBase) -> None:
    """Whether there is room for what the plan puts on disk, and an optimizer that can be stepped there. The same on all
    ranks of a node, and nothing is allocated yet."""
    plan = engine.plan
    if engine._config.zero.offload_optimizer.device == "nvme" and plan.disk is None and plan.layout.total:
        say(
            engine,
            f"zero_optimization.offload_optimizer.device nvme: {type(engine.optimizer.base).__name__} has nothing that"
            " would lie there; without masters (fp32) what it keeps is in memory",
        )
    if not plan.updates_on_disk:
        return
    if plan.disk is not None and not engine.optimizer.core:
        raise UnsupportedError(
            f"zero_optimization.offload_optimizer.device nvme with {type(engine.optimizer.base).__name__}: torch steps"
            " whole tensors in memory; use an optimizer that deepc's core steps (docs/optimizers.md), such as AdamW, or"
            ' set the device to "none"'
        )
    failure: Exception | None = None
    try:
        for place in preflight(plan):
            for what in (place.why_not_direct, place.why_not_io_uring):
                if what:
                    say(engine, f"what lies on disk will come slower than it could: {what}", logging.WARNING)
    except DiskError as exc:
        failure = exc
    together(engine.everyone, failure)


# ---- the model and its states ----------------------------------------------------------------------------------------
def choose_kernels(engine: EngineBase) -> None:
    """Of torch's operators on a CPU: products of fp32 and bf16 are the core's where torch's are slow, other 16-bit ones
    without the arithmetic, or where it is slow, go through fp32, so does attention, and the loss goes by rows."""
    from ...nn.aten import attention, cross_entropy, matmul, upcast

    if engine.device.type == "cpu":
        cross_entropy.install()
        upcast.install()
    dtype = torch_dtype(engine.plan.computes_in)
    own, why = matmul.choose_own(engine.device), matmul.choose(dtype, engine.device)
    if dtype in own:
        name, other = dtype_of(dtype).short, "through fp32" if why else "torch's"
        say(engine, f"matrix products in {name} are deepc's ({cpu.fast_products(name)[1]}; DEEPC_MATMUL=0: {other})")
    elif why:
        say(engine, f"matrix products in {name_of(dtype)} are computed in fp32 and rounded ({why})")
    attention.choose(dtype, engine.device)


def state_class(plan: Plan) -> type[ModelState]:
    if plan.mode != "streamed":
        return ResidentState
    from ...zero.streamed.state import StreamedState

    return StreamedState


def make_states(engine: EngineBase, named: Named, group_of: dict[int, int], undo: contextlib.ExitStack) -> None:
    """States, reducer, guard and hooks; the parameters move into the flat space. Collective."""
    config, plan = engine._config, engine.plan
    tier = None
    if plan.disk is not None:
        failure: Exception | None = None
        try:
            tier = open_tier(plan, engine.optimizer.names_on_disk)
            undo.callback(tier.close)
        except DeepcError as exc:
            failure = exc
        together(engine.everyone, failure)
    engine.state = make_state(engine, named, tier)
    check_numbers(engine)
    engine.optimizer.attach(engine.state, [group_of[id(p)] for p in engine.state.trained], sharers_of(engine))
    if engine.parts is not None:
        engine.parts.repeated = frozenset(i for i, p in enumerate(engine.state.trained) if not engine.answers_for(p))
    engine.reducer = engine.step_policy.make_reducer()
    undo.callback(lambda: engine.reducer.close())  # the policy may have exchanged it
    undo.callback(engine.state.close)
    engine.guard = make_guard(engine.state, engine.group, engine.reducer, env.switch("DEEPC_DEBUG"))
    engine.hooks = GradientHooks(
        engine.state, engine.reducer, engine.step_policy.bare, engine.events, engine.step_policy.one_gradient
    )
    undo.callback(engine.hooks.remove)
    engine.norm_riders.extend(engine.step_policy.riders)
    if plan.mode == "streamed":
        cast("StreamedState", engine.state).stream(engine.module, config.zero, engine.everyone.ranks_per_node)
    if plan.parameters_as:
        engine.guard.publish()  # from the start on the parameters are what other nodes get of the masters


def make_state(engine: EngineBase, named: Named, tier: DiskTier | None) -> ModelState:
    """Collective. What the disk of some rank refuses is an error on the ranks of all parts of the model."""
    config, failure, state = engine._config, None, None
    try:
        state = state_class(engine.plan)(
            engine.plan,
            named,
            engine.group,
            engine.device,
            host=engine.device.type == "cuda" and config.zero.offload_optimizer.device != "none",
            accumulates=config.accumulates,
            tier=tier,
        )
    except DiskError as exc:
        failure = exc
    try:
        if engine.plan.parameters_on:
            together(engine.everyone, failure)
    except DeepcError:
        if state is not None:
            state.close()
        raise
    if state is None:
        raise cast(DiskError, failure)
    return state


def make_activations(engine: EngineBase, undo: contextlib.ExitStack) -> None:
    """Where what autograd saves goes, and what it does not save. Fails on all ranks."""
    section, asked, mesh = engine._config.activation_checkpointing, engine._config.deepc.activations, engine.mesh
    failure: Exception | None = None
    moves: Moves | None = None
    try:
        engine.activations = Activations(
            engine.module, engine._config, engine.device, tensor_group(mesh) if mesh.tp > 1 else None
        )
        undo.callback(engine.activations.close)
        moves_blocks = engine.plan.mode != "streamed" and engine.device.type == "cpu"
        if section.budget is not None and asked.nvme_path and moves_blocks:
            moves = Moves(asked.nvme_path, asked.min_bytes)
            undo.callback(moves.close)
    except DeepcError as exc:
        failure = exc
    if asked.nvme_path:
        together(engine.everyone, failure)
    blocks = engine.part.blocks() if section.budget is not None and engine.part is not None else None
    most = largest_over(mesh) if section.budget is not None else None
    engine.recomputation = Recomputation(engine.module, section.budget, most, moves, blocks, own_data=mesh.ep > 1)
    undo.callback(engine.recomputation.close)


def hold_parameters(engine: EngineBase, undo: contextlib.ExitStack) -> None:
    """Stage 3: GatheredParameters finds the engine by its parameters."""
    if engine.plan.stage == 3:
        state, guard = engine.state, engine.guard
        held = gathered.Held(state, guard.refuse_writes, guard.modified, leveller(engine))
        undo.callback(lambda: gathered.let_go([*state.trained, *(p for _, p in state.frozen)], held))
        gathered.hold([*state.trained, *(p for _, p in state.frozen)], held)


def tell_defaults(engine: EngineBase, given: Given) -> None:
    """Which defaults decide what this training learns; an optimizer that was passed, or that is nobody's choice, has
    told its own."""
    config = engine._config
    ours = given.optimizer is None and config.optimizer is not None
    if not is_for_evaluation(engine, given) and (
        told := [d for d in config.defaults if ours or not d.key.startswith("optimizer.")]
    ):
        say(engine, "by default: " + "; ".join(f"{d.key} {d.value}, {d.says}" for d in told))


def norms_its_rows(module: torch.nn.Module) -> bool:
    """Whether it is an embedding that is trained and writes its weight in every forward."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return isinstance(module, kinds) and module.max_norm is not None and module.weight.requires_grad


def warn_of_attention(engine: EngineBase) -> None:
    """Of ranks that share sequences."""
    from ...parallel.sequence.models import attends_alone

    if attends_alone(engine.module):
        say(
            engine,
            f"sequence_parallel_size is {engine.mesh.sp} and the attention of {type(engine.module).__name__} is not"
            " shared: each rank attends to its own positions alone, which is another model; call"
            " deepc.parallel.sequence.share(model, group) before initialize (docs/sequence-parallel.md)",
            logging.WARNING,
        )


def report(engine: EngineBase, given: Given, fused: FuseSummary | None, reordered: list[str]) -> None:
    """What was made, in the log."""
    if engine._config.dump_state:
        say(engine, engine._config.explain())
    say(engine, engine.plan.describe())
    if lacks := cpu.left_out():
        say(engine, f"{lacks}: {cpu.LEFT_OUT_FIX}", logging.WARNING)
    tell_defaults(engine, given)
    if fused is not None:
        loss = "\n  outputs.logits is None while the model trains on labels" if fused.replaced["loss"] else ""
        say(engine, f"{fused}{loss}")
    for note in engine.plan.notes:
        say(engine, note)
    if reordered:
        say(
            engine,
            f"{len(reordered)} parameter{'s' * (len(reordered) > 1)} ({reordered[0]}"
            f"{', ...' if len(reordered) > 1 else ''}) had another memory format (channels_last) and lie in the"
            " standard one from here on: results are the same; give the model its inputs in channels_last, and"
            " convolutions still run in it",
            logging.WARNING,
        )
    writing = [n for n, m in engine.module.named_modules() if norms_its_rows(m)]
    if writing and engine.group.world > 1 and engine.plan.stage < 3:
        say(
            engine,
            f"'{writing[0]}' has max_norm: each forward writes the rows of its weight that this rank's batch has, so"
            " that the ranks' weights part, as under DDP; norm them in the model instead (docs/any-model.md)",
            logging.WARNING,
        )
    if engine.mesh.sp > 1:
        warn_of_attention(engine)
    if told := engine.step_policy.describe():
        say(engine, told)
    if told := engine.curriculum.describe():
        say(engine, told)
    for key, value, reason in engine.state.inert(engine._config.inert):
        say(engine, f"config: {key} = {value!r} has no effect here: {reason}")
    if engine.state.segment is not None:
        total, huge = engine.state.segment.info()
        say(engine, f"shared parameters: {total / 2**20:.1f} MiB, {huge / 2**20:.1f} MiB of them on huge pages")
