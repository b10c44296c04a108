"""The loop: `loss = engine(x); engine.backward(loss); engine.step()`, and what else is done with an engine.

It is wired in assembly/, its parts and what scripts ask about them are in base.py, what differs between kinds of
training is in policy/. It decides nothing that the plan has decided."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from ..config.tree import Config
from ..core import memory
from ..core.foreign import private
from ..core.foreign.buffers import CAST_BUFFERS, mixing_is_told
from ..errors import (
    AbortedError,
    ArgumentError,
    CommError,
    DamagedError,
    DeepcError,
    DiskError,
    DiskFullError,
    UnsupportedError,
)
from ..optim.schedules import stepper
from ..zero.parameters.guard import casts_are_told
from ..zero.step.norm import clip, judge
from ..zero.tiers.agree import failures, said_once
from . import assembly
from .base import EngineBase, StepResult, say
from .states import access
from .states.saving import take_in_writes

if TYPE_CHECKING:
    from ..zero.streamed.state import StreamedState
    from .events import Watcher

__all__ = ["Engine", "StepResult"]


class Engine(EngineBase):
    """See deepc.initialize. `engine(...)` runs the model; backward, step and checkpoints are collective over the
    ranks."""

    def __init__(
        self, model: torch.nn.Module, config: Config, *, watchers: Sequence[Watcher] = (), **given: Any
    ) -> None:
        """given: the fields of assembly.Given. Collective."""
        super().__init__()
        self._undo = assembly.assemble(self, model, config, watchers, assembly.Given(**given))
        self.hooks.passed = self._pass_ended
        self.optimizer.dropped = self._dropped_by_optimizer
        self.optimizer.around_change = self._change_parameters

    def destroy(self) -> None:
        """Leaves the group and removes the hooks. Parameters stay readable, and the model runs; training and
        checkpoints are a MisuseError from then on."""
        self.destroyed = True
        self.events.close()
        self._undo.close()

    # ---- the loop ----------------------------------------------------------------------------------------------------
    @private.uncompiled_itself
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the model. With fp16.auto_cast, floating-point inputs are cast to fp16; with precision "auto" to what
        the model computes in."""
        self.require_whole_step()
        out = None
        if self.unequal_batches is not None and torch.is_grad_enabled():
            self.unequal_batches((inputs, kwargs))
            self.unequal_batches = None
        if self.unequal_replicas is not None and torch.is_grad_enabled():
            self.unequal_replicas(self.global_steps)
        if self.curriculum.scheduler is not None and self.module.training:
            inputs, kwargs = self.curriculum.forward(self.global_steps + 1, inputs, kwargs)
        self.events.begin("forward", (inputs, kwargs))
        try:
            with (
                self._death_is_told(),
                self._disk_is_told(),
                self._regions_are_left(),
                mixing_is_told(self.module, self.dtype, CAST_BUFFERS, (*inputs, *kwargs.values())),
                self.state.running(),
                self.activations.around(),
                self.recomputation.around((inputs, kwargs)),
                casts_are_told(self.module, self.state),
                self.autocast(),
            ):
                out = self.step_policy.forward(inputs, kwargs)
            if torch.is_grad_enabled():
                self.hooks.watch(out)
        finally:
            self.events.end("forward", out)
        return out

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Gradients of `loss` (a scalar), reduced over the ranks into their owners' accumulators. Scales by
        1/accumulation steps (unless scale_wrt_gas=False) and by the loss scale; returns the loss scaled by the former.
        May be called several times before step.
        """
        self.require_alive("backward")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ArgumentError(
                "backward takes a scalar loss tensor, got"
                f" {tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__}; reduce it first"
                " (loss.mean())"
            )
        if not loss.requires_grad:
            raise ArgumentError(
                "the loss does not depend on any parameter that requires a gradient (was the model run under no_grad?)"
            )
        told = None
        self.events.begin("backward", loss)
        try:
            whole, out = self.step_policy.losses(loss, scale_wrt_gas)
            scaled = whole.float() * self.scaler.loss_scale if self.scaler is not None else whole
            with self._death_is_told(), self.state.running():
                if self.hooks.synchronising:
                    self._backward_pass(lambda: scaled.backward(retain_graph=retain_graph))
                else:
                    with self.hooks.running(self.loss_scale):
                        scaled.backward(retain_graph=retain_graph)
                told = out.detach()
                self._backwards += 1
                self.step_policy.after_backward(told)
        finally:
            self.events.end("backward", told)
        return told

    def _backward_pass(self, backward: Callable[[], None]) -> None:
        """A pass of the hooks around it. Where parameters or activations lie on disk: if the disk of some rank breaks
        it off, the pass comes to its end, and the error is the same on all ranks."""
        boundary = self.is_gradient_accumulation_boundary()
        if not self._disk_in_passes:
            self.hooks.run(backward, boundary, self.loss_scale)
            return
        mine: DiskError | None = None
        try:
            with self._disk_is_told():
                self.hooks.run(backward, boundary, self.loss_scale)
        except DiskError as exc:
            mine = exc
            with contextlib.suppress(DiskError):
                self.hooks.give_up()
            if self._passes_together:
                raise
        self._tell_broken_pass(mine)

    @property
    def _disk_in_passes(self) -> bool:
        return bool(self.plan.parameters_on or self.activations.on_disk or self.recomputation.on_disk)

    def _pass_ended(self, mine: DiskError | None) -> None:
        """After a pass that `backward` did not make (hooks.py), which the disk of this rank, or of another one, may
        have broken off. Collective where there is a disk."""
        if self._disk_in_passes:
            self._tell_broken_pass(mine)
        elif mine is not None:
            raise mine

    def _tell_broken_pass(self, mine: DiskError | None) -> None:
        """If the disk of some rank broke off a pass that is at its end: the same error on all. Collective."""
        if told := failures(self.everyone, mine):
            self.hooks.give_up()
            self.broken_pass = True
            raise _kind_of(told)(
                "backward broke off, because what lies on disk could not be moved: "
                f"{said_once(told)}. The gradients since the last step are lost, and nothing else: call"
                " engine.zero_grad() on every rank and go on with the step's first micro-batch, or load a checkpoint if"
                " it is damage"
            ) from mine

    @property
    def _passes_together(self) -> bool:
        """Whether ranks wait for each other inside of forwards and backwards."""
        return max(self.mesh.tp, self.mesh.sp, self.mesh.ep) > 1

    @contextlib.contextmanager
    def _disk_is_told(self) -> Iterator[None]:
        """Where they do, one whose disk breaks it off there breaks their groups, so that all have an error at once; and
        so do those that are told: a rank may wait for one of them, and for none that the disk has failed."""
        try:
            yield
        except (DiskError, AbortedError) as exc:
            if self._passes_together:
                self.break_groups(f"rank {self.everyone.rank} broke off a pass", exc)
            raise

    @contextlib.contextmanager
    def _regions_are_left(self) -> Iterator[None]:
        """What a tensor-parallel rank draws inside of a region is its own. A forward that raises there leaves it here:
        a region can't tell that from a recomputation that ended early."""
        try:
            yield
        except BaseException:
            if self.mesh.tp > 1:
                from ..parallel.tensor.layers import break_off

                break_off(self.module)
            raise

    @contextlib.contextmanager
    def _death_is_told(self) -> Iterator[None]:
        """Along the axes of a mesh most ranks wait for others than the one that has died, or has called something else:
        who has been told tells all that wait for it."""
        try:
            yield
        except CommError as exc:
            if self.parts is not None:
                told = self.break_groups(f"rank {self.everyone.rank} broke off a step", exc)
                if told is not exc:
                    raise told from exc
            raise

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` times the loss scale of fp16 training, for scripts that call backward themselves:
        `engine.scale(loss).backward()`."""
        if self.scaler is None:
            return loss
        self._scaled = True
        return loss.float() * self.scaler.loss_scale

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> StepResult:
        """At an accumulation boundary: unscale, clip, update, publish the new parameters, advance the LR schedule.
        Collective. A step whose gradients are not finite is skipped, in every precision, and says so. After a DiskError
        of states on disk it is done in part: the next call does the rest. lr_kwargs: arguments of the schedule's step()
        ({"batch_iteration": index})."""
        self.require_alive("step")
        result = None
        self.events.begin("step")
        self._stepping = True
        try:
            with self._death_is_told():
                if self.broken_step:
                    advance = self._advance(lr_kwargs)
                    self.group.barrier()  # nobody reads parameters any more: there may have been a forward in between
                    result = self._conclude(self._finish_step(self._grad_norm, self.optimizer.finish), advance)
                    return result
                self.hooks.check()
                self.step_policy.before_step()
                if not self.is_gradient_accumulation_boundary():
                    self._end_micro_step()
                    self._last = StepResult(False, "accumulating")
                    return self._last
                result = self._step(self._advance(lr_kwargs))
        finally:
            self._stepping = False
            self.events.end("step", result)
        return result

    def _advance(self, lr_kwargs: dict[str, Any] | None) -> Callable[[], None]:
        """What advances the schedule when the step is done. ArgumentError while nothing is."""
        if self.lr_scheduler is None:
            return lambda: None
        return stepper(self.lr_scheduler, lr_kwargs or {}, self.train_batch_size())

    def _step(self, advance: Callable[[], None]) -> StepResult:
        self.model_watch.check()
        if not self.hooks.accumulated and not self.hooks.take_left_behind(self.averaging):
            raise DeepcError(
                "engine.step() at an accumulation boundary without a backward since the last step; call"
                " engine.backward(loss) first"
            )
        self.hooks.check_grads()
        self.optimizer.check_groups()
        return self._conclude(self._update(), advance)

    def _conclude(self, result: StepResult, advance: Callable[[], None]) -> StepResult:
        """What follows an update, made or skipped."""
        self.hooks.reset()
        self.state.gradients_end()
        self.global_steps += 1
        self.step_samples = self.samples_of_step()
        self.global_samples += self.step_samples
        self._backwards = 0
        if result.applied:
            self.skips.applied()
        else:
            self.skipped_steps += 1
            result = self._skipped(result)
        self._last = result = self.step_policy.after_step(result)
        self._end_micro_step()
        memory.heap_step()
        # Last, because these may raise: what they leave is a step that is whole.
        if not result.applied:
            self.skips.end()
        else:
            advance()
        return result

    def _update(self) -> StepResult:
        unit = self.gradient_unit()
        self.optimizer.overflow = False
        with self.events.span("gradient norm"):
            norm = judge(
                self.state,
                self.reducer,
                self.hooks,
                self.guard,
                unit,
                self.step_policy.complete,
                self.norm_riders,
                self.step_policy.parts,
            )
        self.equal_steps.check()
        if self.none_unused is not None:
            self.none_unused.check()
        reason = norm.reason
        if self.scaler is not None and reason:
            scale = self.scaler.loss_scale
            self._follow_scale(overflow=True)
            reason += f"; loss scale {scale:g} -> {self.scaler.loss_scale:g}"
        if reason and self._config.bf16.enabled and not self._config.bf16.check_grad_overflow:
            say(self, f"step {self.global_steps + 1}: {reason}, and bf16.check_grad_overflow is false", logging.WARNING)
        elif reason:
            self.optimizer.overflow = True
            return StepResult(False, reason, norm.bad, None)
        self._grad_norm = norm.value
        take_in_writes(self)
        self.optimizer.leave_out(frozenset(i for i, p in enumerate(self.state.trained) if not p.requires_grad))
        scale = clip(unit, norm.value, self.gradient_clipping())
        return self._finish_step(norm.value, lambda: self.optimizer.update(scale))

    def _finish_step(self, norm: float | None, update: Callable[[], None]) -> StepResult:
        try:
            with self.events.span("update"):
                if not self.plan.updates_on_disk:
                    update()
                else:
                    self._on_disk(update)
            self.state.break_off("")
            with self.events.span("publish"):
                if not self.plan.parameters_on:
                    self.publish()
                else:  # parameters that stay are read anew
                    self._on_disk(self.publish)
        except BaseException as exc:  # a notebook goes on behind ^C, a script behind an optimizer's own errors
            stopped = isinstance(exc, (KeyboardInterrupt, SystemExit))
            if stopped or not (self.broken_step or self.optimizer.unchanged or isinstance(exc, CommError)):
                text = (
                    f"step {self.global_steps + 1} was broken off in its update ({type(exc).__name__}), so that"
                    " parameters and states are changed in part: load a checkpoint, or make the engine anew."
                )
                self.left_in_part(text, True)
            raise
        self.step_is_whole()
        # Now: what is accumulated has the scale so far, and an update may be repeated.
        self._follow_scale(overflow=False)
        return StepResult(True, "", None, norm)

    def _follow_scale(self, overflow: bool) -> None:
        """The loss scale of the next step."""
        if self.scaler is not None:
            self.scaler.update_scale(overflow)

    def _on_disk(self, part: Callable[[], None]) -> None:
        """A part of the step, and if the disk of some rank breaks it off, the same error on all."""
        mine: DiskError | None = None
        try:
            part()
        except DiskError as exc:
            mine = exc
        told = failures(self.everyone, mine)
        if not told:
            return
        kind = _kind_of(told)
        if kind is DamagedError:
            advice = "What is damaged does not come back: load the last checkpoint (engine.load_checkpoint)."
        else:
            advice = "Nothing is lost: when the cause is gone, engine.step() does the rest; or load a checkpoint."
        self.broken_step = self.hooks.blocked = (
            f"step {self.global_steps + 1} is done in part, because what lies on disk could not be moved:"
            f" {said_once(told)}. {advice}"
        )
        self.state.break_off(self.broken_step)
        raise kind(self.broken_step) from mine

    def _skipped(self, result: StepResult) -> StepResult:
        skips = self.skips
        result = result._replace(reason=skips.skipped(result.reason, self.state, self.guard, self.parts))
        if self.scaler is not None:  # whose scale is new each time
            say(self, f"step {self.global_steps} skipped: {result.reason}", logging.WARNING)
        elif skips.telling:
            before = f", as the {skips.in_row - 1} before it" if skips.in_row > 1 else ""
            say(self, f"step {self.global_steps} skipped{before}: {result.reason}", logging.WARNING)
        return result

    def _end_micro_step(self) -> None:
        last = self.is_gradient_accumulation_boundary()
        self.step_policy.micro_batch_ends(last)
        self.micro_steps += 1
        if last and self.own_dataloader is not None:
            self.own_dataloader.stepped()

    # ---- accumulation ------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside keep their gradients on this rank, in `.grad`; the first one after reduces all of
        them."""
        before, self.hooks.synchronising = self.hooks.synchronising, False
        try:
            yield
        finally:
            self.hooks.synchronising = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discards what has been accumulated since the last step, and what a backward that raised has left (then
        collective). The step is of the micro-batches that are left to it; of the next ones, where all ranks know that
        it begins anew: a disk has broken the pass off, or there is one rank. See restart_step."""
        self._may_drop("zero_grad")
        self._drop_gradients(self.broken_pass or (self.hooks.broken and self.everyone.world == 1))

    def _dropped_by_optimizer(self) -> None:
        """optimizer.zero_grad() drops what was collected, as torch's does, but inside an accumulation, where loops call
        it for each micro-batch, and where ranks have to agree: those are for zero_grad and restart_step."""
        collected = self.hooks.accumulated or self.hooks.left_behind
        inside = self._last.reason == "accumulating" or self.broken_step or self.parked is not None
        if collected and not inside and not self.hooks.broken and not self.destroyed:
            self._drop_gradients(False)

    @torch.no_grad()
    def _change_parameters(self, change: Callable[[], None]) -> None:
        """What an optimizer makes of its shards in no step. Collective."""
        self.require_whole_step()
        self.require_weights("optimizer.train() or eval")
        self.guard.refuse_writes()
        self.guard.take_in_writes()
        self.group.barrier()  # nobody reads the old values any more
        change()
        self.publish()

    def restart_step(self) -> None:
        """The same on every rank, and the next micro-batch is the step's first one: after a backward that raised in the
        midst of an accumulation, or to try the step's micro-batches again. All ranks call it."""
        self._may_drop("restart_step")
        self._drop_gradients(True)

    def _may_drop(self, call: str) -> None:
        self.require_alive(call)
        self.require_states(call)
        if self.broken_step:
            raise DeepcError(self.broken_step)

    def _drop_gradients(self, anew: bool) -> None:
        """anew: the next micro-batch is the step's first one."""
        self.hooks.discard()
        self.step_policy.discard(anew)
        self._backwards = 0
        if anew:
            if self._config.managed_gradient_accumulation:
                self.micro_steps -= self.micro_steps % self.gradient_accumulation_steps()
            self.broken_pass = False
        self.events.end("discard")

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: Any) -> None:
        """The schedules of type custom: {metric: function}, or one function; of a step (the first is 1), the
        difficulty. For curriculum_learning the metric is its curriculum_type."""
        self.curriculum.set_custom(schedule_func_dict)

    def set_data_post_process_func(self, post_process_func: Callable[[Any, dict[str, Any]], Any]) -> None:
        """function(batch, {"current_difficulties": {metric: difficulty}, "curriculum_step"}) -> batch, of what the
        loader of training_data gives, with the metrics of data_efficiency."""
        self.curriculum.post_process = post_process_func

    def compile(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]  # torch has no annotation for its own
        """Compiles the module in place (torch.nn.Module.compile). Hooks stay outside of the graph. In streamed mode
        each block is compiled by itself, with its gathers outside."""
        if self.plan.mode == "streamed":
            cast("StreamedState", self.state).compile(*args, **kwargs)
        else:
            self.module.compile(*args, **kwargs)

    # ---- gradients and states, whole (collective): deepc.view(p) and access.py have more -----------------------------
    def full_grad(self, p: torch.Tensor) -> torch.Tensor | None:
        """Average gradient of `p`, unscaled and before clipping, fp32, on every rank; None before a backward.
        Collective."""
        return access._Access(self, p).grad(self.gradient_unit())

    def full_fp32_param(self, p: torch.Tensor) -> torch.Tensor:
        """fp32 master of `p`, whole, on every rank. Collective."""
        return access._Access(self, p).fp32()

    def full_optimizer_state(self, p: torch.Tensor, name: str) -> torch.Tensor:
        """Optimizer state `name` ("exp_avg", ...) of `p`, whole, fp32, on every rank. Collective."""
        return access._Access(self, p).state(name)

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The module's state_dict, whole, on every rank, in the training precision. Collective."""
        return access.module_state_dict(self, exclude_frozen_parameters)

    def load_module_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Loads the module's state_dict at any stage; fp32 masters follow. At stage 3 rank 0's values count.
        Collective."""
        self.require_weights("load_module_state_dict")
        access.load_module_state_dict(self, state_dict, strict)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """The module's weights, whole, on the CPU of rank 0 (None on the others); DeepSpeed's name, which accelerate
        calls. Collective."""
        return access.consolidated_state_dict(self, exclude_frozen_parameters)

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    # ---- memory ------------------------------------------------------------------------------------------------------
    def offload_states(
        self, nvme_path: str | None = None, *, include: Iterable[str] | None = None, locked: bool = True
    ) -> None:
        """Of a run on CPUs masters and moments go to disk, into `nvme_path` or the configuration's, and their memory is
        free; training goes on there, with the same bits (docs/tiers.md). Of a run on a GPU what `include` names, by
        DeepSpeed's names ("optim_states", "hp_params": fp32 masters, "lp_grads": accumulated gradients; None: all of
        these), goes to host memory, in locked pages unless told otherwise, and its memory on the GPU is free; training
        is a DeepcError until reload_states, forward goes on. Without effect where they are. Collective; after a
        DiskError or an OutOfMemoryError they are where they were."""
        from .states.moving import offload

        self.require_alive("offload_states")
        with self.events.span("offload_states"):
            offload(self, nvme_path, include, locked)

    def reload_states(self) -> None:
        """What offload_states has moved comes back. Collective; after an OutOfMemoryError another call goes on."""
        from .states.moving import reload

        self.require_alive("reload_states")
        with self.events.span("reload_states"):
            reload(self)

    # ---- checkpoints -------------------------------------------------------------------------------------------------
    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes `save_dir/<tag>` (default global_step<N>; rank 0's where ranks differ, see checkpoint.tag_validation):
        safetensors shards by their owners, an index, published by one rename. client_state: tensors, NumPy values and
        JSON types; anything else is a CheckpointTypeError. Collective."""
        from .states.saving import save

        self.require_alive("save_checkpoint")
        self.require_weights("save_checkpoint")

        if not save_dir:
            raise ArgumentError(
                f"save_checkpoint(save_dir={save_dir!r}): give the folder that is to hold the checkpoint"
            )
        tag = tag if tag is not None else f"global_step{self.global_steps}"
        with self.events.span("save_checkpoint", save_dir):
            save(self, save_dir, tag, client_state or {}, save_latest, exclude_frozen_parameters)
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Loads what save_checkpoint wrote, from any number of ranks and any stage. load_module_only: weights, buffers
        and averages; counts of steps and states of random generators stay as they are. Returns (path, client_state);
        (None, {}) if `load_dir` holds no checkpoint and no tag was given. What does not fit is an error before anything
        is overwritten. Collective."""
        from .states.loading import What, load

        self.require_alive("load_checkpoint")
        self.require_weights("load_checkpoint")

        if not isinstance(load_dir, (str, os.PathLike)):
            raise ArgumentError(f"load_checkpoint(load_dir={load_dir!r}): give the folder that holds the checkpoints")
        if custom_load_fn is not None:
            raise UnsupportedError(
                "custom_load_fn is not supported; change the module after load_checkpoint under GatheredParameters"
            )
        with self.events.span("load_checkpoint", load_dir):
            optimizer_states = load_optimizer_states and not load_module_only
            scheduler_states = load_lr_scheduler_states and not load_module_only
            what = What(load_module_strict, optimizer_states, scheduler_states, load_module_only)
            return load(self, load_dir, tag, what)

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes the module's weights, whole, in the training precision, as a Hugging Face checkpoint
        (`save_dir/model.safetensors`, in shards with an index when large). Rank 0 writes. Collective. The file name is
        Hugging Face's, whatever save_filename says: there is no pickled form.
        """
        from .states.saving import save_model

        with self.events.span("save_16bit_model", save_dir):
            save_model(self, save_dir, exclude_frozen_parameters)
        return True


def _kind_of(told: Sequence[DeepcError]) -> type[DiskError]:
    """The class that stands for the failures of several ranks."""
    return next((k for k in (DamagedError, DiskFullError) if any(isinstance(t, k) for t in told)), DiskError)
