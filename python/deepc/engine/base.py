"""What an engine is made of, and what scripts ask about it.

The parts are made by assembly/ and used by the loop (engine.py) and by what reads and writes them (access, averages,
saving, policy), which therefore need not import the loop. The questions are one line each, under DeepSpeed's names
where it has them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from ..comm.groups import end_with
from ..core import memory, ops
from ..core.foreign import private
from ..errors import DeepcError, MisuseError, UnsupportedError
from ..parallel.axes import opened_comms
from ..parallel.pipeline.part import further_names
from ..zero.tiers.parked import AWAY
from .data import TimedLoader
from .policy.precision import name_of

if TYPE_CHECKING:
    from ..comm.groups import Group
    from ..config.tree import Config
    from ..optim.schedules import Scheduler
    from ..parallel.expert.spread import SharedGradients
    from ..parallel.judged import Parts
    from ..parallel.pipeline.part import Part
    from ..parallel.tensor.cut import Cut
    from ..plan.mesh import Mesh
    from ..plan.plan import Plan
    from ..plan.predict.estimate import FirstStep, MemoryEstimate
    from ..zero.parameters.alike import EqualSteps, NoneUnused
    from ..zero.parameters.guard import Guard, ModelWatch
    from ..zero.state import ModelState
    from ..zero.step.hooks import GradientHooks
    from ..zero.step.norm import Parts as NormParts
    from ..zero.step.norm import Rider, Skips
    from ..zero.step.reducers.base import Reducer
    from ..zero.step.tree import MicroBatchSampler
    from ..zero.step.update import ShardedOptimizer
    from ..zero.tiers.parked import HostCopies
    from .events import Events
    from .policy.precision import AutoPrecision, DynamicLossScaler, StaticLossScaler
    from .states.activations import Activations
    from .states.curriculum import Curriculum
    from .states.recompute import Recomputation

logger = logging.getLogger("deepc")


class StepResult(NamedTuple):
    """What engine.step() did. `applied` is False for a micro-batch inside an accumulation and for a skipped step."""

    applied: bool
    reason: str  # "", "accumulating", or why the step was skipped
    bad_parameter: str | None = None  # the first parameter with a gradient that is not finite
    grad_norm: float | None = None
    precision_change: str = ""  # precision "auto": "bf16 -> fp32: why" if it changed after this step


class ModelWrapper(torch.nn.Module):
    """A module around `self.module`: attributes that it has not are the model's (`engine.config`,
    `engine.generate`)."""

    @private.uncompiled
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:
                raise
            return getattr(module, name)


class Served(ModelWrapper):
    """A model that is used, not trained (serve/inference.py). trainer: the engine whose weights these are, or None."""

    trainer: EngineBase | None


def say(engine: EngineBase, text: str, level: int = logging.INFO) -> None:
    """A line of the log, from rank 0 (of a pipeline's first stage)."""
    if engine.everyone.rank == 0:
        logger.log(level, text)


class Policy(Protocol):
    """How micro-batches become a step: what the loop, and the building of an engine, ask of a policy (policy/, whose
    class Plain says what each means)."""

    one_gradient: bool
    fixed_batch: bool
    pre_scale: float
    riders: list[Rider]

    # when the engine is built
    @property
    def auto(self) -> AutoPrecision | None: ...
    @property
    def buffer_dtype(self) -> torch.dtype: ...
    def check_optimizer(self) -> None: ...
    def dtypes(self) -> list[torch.dtype]: ...
    def take_plans(self, plans: dict[torch.dtype, Plan]) -> None: ...
    def bytes_to_change(self, plans: dict[torch.dtype, Plan]) -> int: ...
    def cast_buffers(self) -> None: ...
    def make_reducer(self) -> Reducer: ...
    def make_sampler(self, data: Any) -> MicroBatchSampler | None: ...
    def describe(self) -> str: ...

    # in the loop
    @property
    def divisor(self) -> int: ...
    def forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def losses(self, loss: torch.Tensor, scale_wrt_gas: bool) -> tuple[torch.Tensor, torch.Tensor]: ...
    def after_backward(self, out: torch.Tensor) -> None: ...
    def bare(self, running: GradientHooks | None) -> tuple[bool, float]: ...
    def before_step(self) -> None: ...
    def complete(self) -> None: ...
    def micro_batch_ends(self, last: bool) -> None: ...
    def after_step(self, result: StepResult) -> StepResult: ...
    def discard(self, anew: bool = False) -> None: ...
    @property
    def parts(self) -> NormParts | None: ...
    def loaded(self) -> None: ...
    @property
    def exchanged(self) -> dict[str, float] | None: ...


class EngineBase(ModelWrapper):
    """The parts, in the order in which assembly/ makes them."""

    module: torch.nn.Module
    _config: Config
    device: torch.device
    events: Events
    mesh: Mesh  # of all ranks
    unequal_batches: Callable[[Any], None] | None = None  # called with the first batch of tensor-parallel ranks
    unequal_replicas: Callable[[int], None] | None = None  # called with the steps so far, before a forward
    group: Group  # the ranks that hold the same part of the model: data and sequence parallelism, the same experts
    part: Part | None  # of a pipeline: what of the model is here
    everyone: Group  # all ranks that share the model
    averaging: Group  # the ranks whose gradients are averaged: `group`, or all where each node has all states
    copy = 0  # which of several copies of all states this rank has a part of
    parts: Parts | None  # of the model, where the ranks hold different ones
    cuts: dict[int, Cut]  # id(parameter) -> how it is cut over tensor-parallel ranks
    spread: frozenset[int]  # ids of the parameters and buffers of experts that are spread over ranks
    shared_gradients: SharedGradients | None  # over the ranks that share the experts; None: nothing is spread
    world_size: int  # of `group`, as the next two; of all ranks in DeepSpeed's engine: inside, ask the group
    global_rank: int
    local_rank: int
    dtype: torch.dtype  # what the model computes with now
    step_policy: Policy  # how micro-batches become a step
    optimizer: ShardedOptimizer
    plan: Plan
    memory_plan: MemoryEstimate | None  # with a sample batch
    first_step: FirstStep | None  # what the first step shows of memory_plan
    state: ModelState
    reducer: Reducer
    guard: Guard
    hooks: GradientHooks
    activations: Activations  # where what autograd saves goes
    recomputation: Recomputation  # what it does not save
    curriculum: Curriculum  # what of its batches a step gets
    scaler: StaticLossScaler | DynamicLossScaler | None
    lr_scheduler: Scheduler | None
    skips: Skips  # the steps that were skipped since the last applied one
    training_dataloader: Any  # a TimedLoader, or what a script has put in its place (set_dataloader); None: no data
    model_watch: ModelWatch
    norm_riders: list[Rider]  # who sends numbers along with the norm
    equal_steps: EqualSteps  # one of them
    none_unused: NoneUnused | None  # one, where unused parameters are not ignored
    averages: dict[str, Any]  # label -> EMA
    monitor: Any  # the meter, if somebody listens (observe/monitor)
    profile: Any  # what observe/profile has on this engine, or None

    _undo: contextlib.ExitStack  # what destroy() undoes
    destroyed = False  # by destroy()
    parked: HostCopies | None = None  # what offload_states has moved from a GPU to host memory
    _stands: dict[str, Any]  # the state's arrays for which others stand then
    resumes_data = True  # load_checkpoint takes training_dataloader to where it was
    whole_logits = False  # of a vocabulary that is cut, beside the loss, where tensor_parallel says nothing of it

    # Counters of the loop. _scaled: engine.scale was called, and a bare backward follows. _stepping: inside of step().
    global_steps = global_samples = micro_steps = skipped_steps = 0
    global_tokens = 0  # by the meter, of all ranks
    step_samples = 0  # of the last step, on all ranks
    _backwards = 0  # since it
    _boundary: bool | None = None
    _scaled = _stepping = _said_autocast = False
    _grad_norm: float | None = None
    _last = StepResult(False, "no step yet")
    broken_pass = False  # the disk broke a backward off, and nobody has called zero_grad since
    broken_load = "", False  # why load_checkpoint (or ^C in a step) left a mixture; whether of optimizer states as well
    broken_step = ""  # why the last step is done in part (its states on disk could not be moved), or ""

    @private.uncompiled
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as exc:
            if name not in ("train_batch", "eval_batch", "measure_batch"):
                raise
            raise AttributeError(
                f"engine.{name} is of pipelines, and this model has one stage: set pipeline.stages to 2 or more, or"
                " write the loop: loss = engine(...); engine.backward(loss); engine.step() (docs/pipeline.md)"
            ) from exc

    def require_states(self, call: str) -> None:
        """DeepcError while offload_states has states of a GPU in host memory."""
        if self.parked is not None:
            raise DeepcError(f"engine.{call}(): {AWAY}")

    def require_weights(self, call: str) -> None:
        """The same, and while the model has an average's values (EMA.applied)."""
        self.require_states(call)
        for label, average in self.averages.items():
            if average.inside:
                raise DeepcError(
                    f"engine.{call}() inside of applied() of average '{label}': the model has its values, which would"
                    " be taken for the weights; leave the context first (save_16bit_model writes the average)"
                )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """UnsupportedError: what copy.deepcopy, pickle and torch.save would take includes the ranks' group."""
        raise UnsupportedError(
            "an engine can't be copied or pickled: it holds the ranks' group and memory that they share. Copy the model"
            " (copy.deepcopy(engine.module)), average it (deepc.EMA), or save it (engine.save_checkpoint,"
            " torch.save(engine.module_state_dict(), path) on one rank, the call on all)"
        )

    def forget_batches(self) -> None:
        """The loader of training_data is somewhere else: who has begun to read it begins again."""

    @property
    def own_dataloader(self) -> TimedLoader | None:
        """training_dataloader, if that counts the engine's steps and a checkpoint can keep its place: a loader that a
        script has put in its place does neither."""
        return self.training_dataloader if isinstance(self.training_dataloader, TimedLoader) else None

    def require_alive(self, call: str) -> None:
        """MisuseError if the engine was destroyed."""
        if self.destroyed:
            raise MisuseError(
                f"engine.{call}() of an engine that was destroyed (by engine.destroy(), or by deepspeed.initialize of"
                " the same model, whose newer engine trains it); use the newer engine, or make one"
            )

    @private.uncompiled
    def require_whole_step(self) -> None:
        """DeepcError, the same on all ranks, while parameters lie on disk in part as a step was to write them: ranks
        that wait for each other in a forward then need not be told."""
        if self.broken_step and self.plan.parameters_on:
            raise DeepcError(self.broken_step)

    # ---- the configuration -------------------------------------------------------------------------------------------
    @property
    def config(self) -> dict[str, Any]:
        """The configuration as the dictionary it came from."""
        return self._config.raw

    def train_batch_size(self) -> int:
        return self._config.train_batch_size  # type: ignore[return-value]  # resolved: see initialize

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._config.train_micro_batch_size_per_gpu  # type: ignore[return-value]  # resolved: see initialize

    def gradient_accumulation_steps(self) -> int:
        return self._config.gradient_accumulation_steps  # type: ignore[return-value]  # resolved: see initialize

    def gradient_clipping(self) -> float:
        return self._config.gradient_clipping

    def zero_optimization_stage(self) -> int:
        return self.plan.stage

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Always True: whole weights cost no extra memory here."""
        return True

    # ---- the state of the loop ---------------------------------------------------------------------------------------
    def is_gradient_accumulation_boundary(self) -> bool:
        """True if the next step() updates the parameters. With managed_gradient_accumulation false every one does, and
        this is True while it runs, as in DeepSpeed: no backward is known to be the last."""
        if not self._config.managed_gradient_accumulation:
            return self._stepping
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def samples_of_step(self) -> int:
        """On all ranks, of the step at hand: train_batch_size, or where the script says what a step is, the
        micro-batches that had a backward."""
        if self._config.managed_gradient_accumulation:
            return self.train_batch_size()
        return self._backwards * self.train_micro_batch_size_per_gpu() * self.mesh.dp

    @property
    def in_accumulation(self) -> bool:
        """Whether there were micro-batches of a step that has not been made."""
        if self._config.managed_gradient_accumulation:
            return self.micro_steps % self.gradient_accumulation_steps() != 0
        return self.hooks.accumulated or self.hooks.left_behind

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Overrides the count of micro-batches until called again."""
        if not self._config.managed_gradient_accumulation:
            raise MisuseError(
                f"engine.set_gradient_accumulation_boundary({is_boundary}) with managed_gradient_accumulation false:"
                " every engine.step() is a boundary; leave the call out, or the key"
            )
        self._boundary = is_boundary

    @property
    def last_step(self) -> StepResult:
        """What the last step() returned."""
        return self._last

    def was_step_applied(self) -> bool:
        """Whether the last step() has changed the parameters: not inside an accumulation, nor if it was skipped."""
        return self._last.applied

    def get_lr(self) -> list[float]:
        return [float(g["lr"]) for g in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """Norm of the average gradient of the last applied step, before clipping."""
        return self._grad_norm

    @property
    def loss_scale(self) -> float:
        return self.scaler.loss_scale if self.scaler is not None else 1.0

    @property
    def precision(self) -> str:
        """ "bf16", "fp16" or "fp32": what the model computes in now."""
        return name_of(self.dtype)

    @property
    def precision_in_words(self) -> str:
        """The same, with what forwards compute in under torch.autocast."""
        return self.precision if self.auto_precision is not None else self._config.precision_in_words

    @private.uncompiled
    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """What a forward runs in: torch.autocast where the configuration asks for it, whatever the script has
        entered."""
        asked, kind = self._config.autocast, self.device.type
        if asked is not None and not self._said_autocast and torch.is_autocast_enabled(kind):
            outside, inside = torch.get_autocast_dtype(kind), ops.torch_dtype(asked)
            if outside != inside:
                self._said_autocast = True
                text = f"torch.autocast in {ops.name_of(outside)} is entered around the engine: its forwards run in"
                say(self, f"{text} {ops.name_of(inside)} (torch_autocast.dtype)")
        return ops.autocast(asked, kind)

    @property
    def auto_precision(self) -> AutoPrecision | None:
        """The state of `"precision": "auto"`, or None."""
        return self.step_policy.auto

    def publish(self) -> None:
        """What reads parameters sees the new ones. Collective."""
        torch.clear_autocast_cache()  # which is kept as long as a script stays in torch.autocast
        self.guard.publish()

    def ties(self) -> dict[str, str]:
        """Further names of parameters and buffers that modules share -> the name that they are stored under."""
        return self.part.names if self.part is not None else further_names(self.module)

    def elsewhere(self) -> frozenset[int]:
        """ids of the module's parameters that are not this engine's: other ranks hold them, or trained copies of
        them."""
        return self.part.elsewhere if self.part is not None else frozenset()

    def answers_for(self, p: torch.Tensor) -> bool:
        """Of ranks that have the same values of `p` because they share a model's tensors or experts: whether this one
        counts, and saves, them."""
        at = self.mesh.coordinates(self.everyone.rank)
        return (at.tp == 0 or id(p) in self.cuts) and (at.ep == 0 or id(p) in self.spread)

    def break_groups(self, what: str, error: BaseException, more: str = "") -> BaseException:
        """Ranks that wait for this one get an error at once: `error` if that came from a group, else an AbortedError of
        what this rank broke off, and more. Returns what to raise. The engine must be made again."""
        reason = f"{what}: {type(error).__name__}: {error}{more and f' ({more})'}"
        return end_with([self.everyone, self.group], opened_comms(self.mesh), error, reason)

    def left_in_part(self, why: str, of_states: bool) -> None:
        """What the engine has is of two states, because of `why`: nothing is trained or saved until a checkpoint is
        loaded, of_states: with the optimizer's. "": it is whole again."""
        self.broken_load, self.hooks.blocked = (why, of_states), why

    def step_is_whole(self) -> None:
        """A step that was broken off is finished, or undone by a checkpoint."""
        if self.broken_step:
            self.broken_step = self.hooks.blocked = ""
            self.optimizer.forget_unfinished()

    def gradient_unit(self) -> float:
        """Factor that turns an accumulated gradient (a sum over ranks, loss-scaled, predivided) into the average
        gradient."""
        return 1.0 / (self.step_policy.divisor * self.loss_scale * self.step_policy.pre_scale)

    # ---- what it costs -----------------------------------------------------------------------------------------------
    @property
    def comm_bytes(self) -> dict[str, int]:
        """Bytes that this rank has sent to other nodes so far: "gradients", "parameters", "control" (norms,
        broadcasts), "activations" (what stages, and ranks that share tensors, experts or sequences, tell each other in
        forward and backward; of groups that several engines have in common, for all of these) and "total". Payload:
        without the headers of the network. All 0 on one node."""
        sent = {"gradients": 0, "parameters": 0, "control": 0, "activations": self._activations_sent()}
        for group in {id(g): g for g in (self.averaging, self.everyone)}.values():
            sent.update({what: sent[what] + n for what, n in group.sent_bytes.items()})
        return {**sent, "total": sum(sent.values())}

    def _activations_sent(self) -> int:
        if self.mesh.tp * self.mesh.sp * self.mesh.ep == 1 or not torch.distributed.is_initialized():
            return 0
        return sum(getattr(comm, "sent_bytes", 0) for comm in opened_comms(self.mesh))

    def memory_summary(self) -> dict[str, int]:
        """Bytes of this process now (rss, pss, peak) and of the plan."""
        return {**memory.process_bytes(), **{f"plan_{k}": v for k, v in self.plan.bytes.items()}}

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Milliseconds of the last step() by DeepSpeed's timer names ("fwd_microstep", "bwd", ...); empty without
        wall_clock_breakdown."""
        return self.profile.wall_clock() if self.profile is not None else {}

    def log(self, scalars: dict[str, Any]) -> None:
        """Numbers of the script's own, {"accuracy": 0.9}, for the next log line, metrics.jsonl and the trackers of the
        configuration (docs/logging.md)."""
        if self.monitor is not None:
            self.monitor.log(scalars)

    def keep_gathered(self) -> contextlib.AbstractContextManager[None]:
        """Context in which ZeRO-3's parameters are gathered once and stay, for many forward calls in a row (generate).
        Collective; no effect where they are always there."""
        return self.state.keep_gathered()
