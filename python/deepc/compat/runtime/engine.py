"""DeepSpeedEngine: deepc's engine with DeepSpeed's remaining habits, and deepspeed.initialize that makes it.

What every user of deepc wants is in deepc.engine. Here is what only scripts written for DeepSpeed ask for: accessors of
the configuration, names of groups and ranks, files by DeepSpeed's names."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import weakref
from collections.abc import Callable, Iterator
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from ...core.foreign import private
from ...core.ops import torch_dtype
from ...engine import assembly, pipelined
from ...engine.engine import Engine, StepResult
from ...engine.states.saving import together
from ...errors import ArgumentError, CheckpointError, MisuseError, UnsupportedError
from ...observe import watch
from ..helpers import groups
from ..helpers.parallel import layers
from ..helpers.timer import EngineTimer
from ..helpers.utils import DeepSpeedDataLoader
from . import checkpointing, optimizers, zero_to_fp32
from .parameters import NoHooks
from .settings import autocast, models
from .zero import grad as zero_grad

# The optimizers whose names DeepSpeed gives in small letters, however the configuration has them; others' as they are.
_LOWER_NAMES = frozenset(("adagrad", "adam", "adamw", "lamb", "lion", "muadam", "muadamw", "muon", "musgd"))
_UNSUPPORTED_METHODS = {
    "train_batch": (
        "it belongs to engines of a deepspeed.pipe.PipelineModule; write the loop: loss = engine(batch);"
        " engine.backward(loss); engine.step()"
    ),
    "eval_batch": ("it belongs to engines of a deepspeed.pipe.PipelineModule; run engine(batch) under torch.no_grad()"),
    "register_compile_pass": "DeepCompile does not exist in deepc; use engine.compile() (torch.compile)",
    "sparse_allreduce": "gradients are reduced by backward",
    "allreduce_bucket": "gradients are reduced by backward",
}


def _flat_zero_keys() -> dict[str, str]:
    """DeepSpeed's accessor -> field of the zero section."""
    return {
        "zero_reduce_scatter": "reduce_scatter",
        "zero_overlap_comm": "overlap_comm",
        "zero_reduce_bucket_size": "reduce_bucket_size",
        "zero_allgather_bucket_size": "allgather_bucket_size",
        "zero_contiguous_gradients": "contiguous_gradients",
        "zero_sub_group_size": "sub_group_size",
        "zero_max_live_parameters": "stage3_max_live_parameters",
        "zero_max_reuse_distance": "stage3_max_reuse_distance",
        "zero_prefetch_bucket_size": "stage3_prefetch_bucket_size",
        "zero_param_persistence_threshold": "stage3_param_persistence_threshold",
        "zero_model_persistence_threshold": "stage3_model_persistence_threshold",
        "zero_round_robin_gradients": "round_robin_gradients",
        "zero_ignore_unused_parameters": "ignore_unused_parameters",
        "zero_hpz_partition_size": "zero_hpz_partition_size",
        "zero_quantized_weights": "zero_quantized_weights",
        "zero_quantized_gradients": "zero_quantized_gradients",
        "zero_offload_optimizer": "offload_optimizer",
        "zero_offload_param": "offload_param",
    }


class UnknownEngineNameError(UnsupportedError, AttributeError):
    """Neither deepc's DeepSpeedEngine nor the user's model has such an attribute."""


def _in_its_words(compare: Callable[[Any], None]) -> Callable[[Any], None]:
    """What scripts look for in the text of the error, for ranks whose batches differ. Its cause, which a traceback
    shows before it, names the rank and the way out."""

    def compared(batch: Any) -> None:
        try:
            compare(batch)
        except MisuseError as exc:
            raise MisuseError(
                "Data inconsistency within the TP group. Please check the Dataloader implementation to ensure"
                " consistency."
            ) from exc

    return compared


def _whole(size: Any) -> int:
    """A batch size, also numpy's; 0 if it is none."""
    return int(size) if isinstance(size, Integral) and not isinstance(size, bool) else 0


def _of_engine(engine: weakref.ref[Any], name: str) -> Callable[..., Any]:
    """The engine's method, for an object that the engine holds."""
    return lambda *args, **kwargs: getattr(engine(), name)(*args, **kwargs)


class DeepSpeedEngine(Engine):
    """The engine that deepspeed.initialize returns under deepc."""

    resumes_data = False  # scripts written for DeepSpeed skip what they had themselves
    whole_logits = True  # and read outputs.logits beside the loss
    _coalescing = False  # inside coalesce_grad_reduction
    _in_no_sync = _step_raised = False

    def __init__(self, model: torch.nn.Module, config: Any, *, optimizer: Any = None, **options: Any) -> None:
        self.__dict__["_inference_only"] = optimizer is None and config.optimizer is None
        super().__init__(model, config, optimizer=optimizer, evaluates=True, **options)
        if self.unequal_batches is not None:
            self.unequal_batches = _in_its_words(self.unequal_batches)
        self.world_size, self.global_rank = self.everyone.world, self.everyone.rank  # of all ranks, as there
        self.client_optimizer = optimizer
        self.tput_timer = EngineTimer(self.module, self.train_batch_size())
        self.events.add(self.tput_timer)
        if self.torch_autocast_enabled():
            autocast.init_autocast_params(
                self, self.torch_autocast_dtype(), self.torch_autocast_lower_precision_safe_modules()
            )
        if not self._inference_only:  # else it would stand for the one that trains the model
            zero_grad.follow(self)
        if optimizer is None:
            optimizers.name_configured(self)
        optimizers.show_as_client(self)
        optimizers.scale_as_stage_0(self)
        for name in ("offload_states", "reload_states"):  # DeepSpeed's optimizers have these too
            setattr(self.optimizer, name, _of_engine(weakref.ref(self), name))
        if self.zero_optimization_stage() == 3:
            self.optimizer.parameter_offload = NoHooks()  # type: ignore[attr-defined]  # DeepSpeed's name

    def module_zero_grad(self) -> None:
        """What the user's `module.zero_grad()` means for gradients that are with the engine: they go, as from
        DeepSpeed's `.grad` at stage 0. In the middle of an accumulation at stages 1 to 3 they stay, as there."""
        if not self._zero_grad_keeps():
            super().zero_grad()

    def _zero_grad_keeps(self) -> bool:
        if self.part is not None or self._step_raised or self.zero_optimization_stage() == 0:
            return False
        return self._config.managed_gradient_accumulation and self.in_accumulation

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `module.zero_grad()`, like DeepSpeed's. In the middle of an accumulation it can't drop what a backward has
        left that raised: other ranks would keep theirs."""
        known = self.broken_pass or (self.hooks.broken and self.everyone.world == 1)  # on all ranks
        if known or not self._zero_grad_keeps():
            super().zero_grad(set_to_none)
            self._step_raised = False
        else:
            self.hooks.check()
            self.module.zero_grad(set_to_none)

    def restart_step(self) -> None:
        super().restart_step()
        self._step_raised = False

    # ---- without an optimizer: for evaluation ------------------------------------------------------------------------
    def _refuse_to_train(self, what: str) -> None:
        if self._inference_only:
            raise MisuseError(
                f"engine.{what}() needs an optimizer: this engine was made without one, for evaluation. Add an"
                " optimizer section to the configuration, or pass optimizer= to initialize"
            )

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **other: Any
    ) -> torch.Tensor:  # type: ignore[override]
        """As deepc's. allreduce_gradients and release_loss, of older releases, are without effect, as they were
        there."""
        self._refuse_to_train("backward")
        if unknown := sorted(other.keys() - {"allreduce_gradients", "release_loss"}):
            raise ArgumentError(
                f"engine.backward() does not take {', '.join(unknown)}: it takes loss, retain_graph and scale_wrt_gas;"
                " call loss.backward(...) for torch's arguments"
            )
        return super().backward(loss, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas)

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> StepResult:
        self._refuse_to_train("step")
        if self._in_no_sync:
            raise MisuseError(
                "It is illegal to call Engine.step() inside no_sync context manager: the gradients of this rank's"
                " backward passes are not reduced yet; leave the with block, and run the last backward outside"
            )
        if self._coalescing:
            raise MisuseError(
                "engine.step() inside engine.coalesce_grad_reduction(): its gradients are not reduced yet, as inside"
                " no_sync; call step() after the with block"
            )
        self._step_raised = True
        result = super().step(lr_kwargs)
        self._step_raised = False
        return result

    # ---- accumulation ------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """As deepc's: backward passes inside keep their gradients on this rank; step() comes after the block. At every
        stage."""
        if self._coalescing:
            raise MisuseError("engine.no_sync() inside engine.coalesce_grad_reduction(), which keeps gradients already")
        before, self._in_no_sync = self._in_no_sync, True
        try:
            with super().no_sync():
                yield
        finally:
            self._in_no_sync = before

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """The gradients of all backward calls inside are reduced once, at the end of the with block: one block per
        step(), which comes after it. Until then they are summed in data_types.grad_accum_dtype. At every stage.
        Collective; if the block raises nothing is reduced, and the gradients stay for the next reduction (or
        engine.zero_grad())."""
        self._refuse_to_train("coalesce_grad_reduction")
        if self._coalescing or not self.hooks.synchronising:
            raise MisuseError(
                "engine.coalesce_grad_reduction() can't be nested in no_sync or in itself: gradients are kept already"
            )
        with super().no_sync():
            self._coalescing, self.hooks.sums_in = True, torch_dtype(self.plan.accumulator)
            try:
                yield
            finally:
                self._coalescing, self.hooks.sums_in = False, None
        if not self.step_policy.one_gradient:  # else each micro-batch has its pass, which step() makes
            self.hooks.check()
            self.hooks.flush()

    # ---- ranks and groups --------------------------------------------------------------------------------------------
    @property
    def dp_world_size(self) -> int:
        return self.mesh.dp

    @property
    def seq_dp_world_size(self) -> int:
        return self.mesh.dp * self.mesh.sp

    @property
    def sequence_parallel_size(self) -> int:
        return self.mesh.sp

    @property
    def mp_world_size(self) -> int:
        return self.mesh.tp

    def autotp_size(self) -> int:
        return self.mesh.tp

    @property
    def data_parallel_group(self) -> Any:
        return groups._get_data_parallel_group()

    @property
    def seq_data_parallel_group(self) -> Any:
        return groups._get_sequence_data_parallel_group()

    @property
    def seq_parallel_group(self) -> Any:
        return groups._get_sequence_parallel_group()

    def get_sequence_parallel_group(self) -> Any:
        return self.seq_parallel_group

    @property
    def mpu(self) -> None:
        return None

    def get_data_parallel_rank(self) -> int:
        return self.mesh.coordinates(self.everyone.rank).dp

    def get_model_parallel_rank(self) -> int:
        return self.mesh.coordinates(self.everyone.rank).tp

    get_tensor_parallel_rank = get_model_parallel_rank

    @property
    def checkpoint_mp_rank(self) -> int:
        return self.get_model_parallel_rank()

    # ---- the configuration -------------------------------------------------------------------------------------------
    def zero_optimization(self) -> bool:
        return self._config.zero.stage > 0

    def zero_optimization_partition_gradients(self) -> bool:
        return self._config.zero.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        return self._config.zero.stage >= 3

    def zero_cpu_offload(self) -> bool:
        return self._config.zero.offload_optimizer.device == "cpu"

    def zero_use_cpu_optimizer(self) -> bool:
        return self._config.zero.offload_optimizer.device != "none"

    def zero_allow_untested_optimizer(self) -> bool:
        return self._config.zero_allow_untested_optimizer

    def fp16_enabled(self) -> bool:
        return self._config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        return self.dtype == torch.bfloat16

    def fp16_auto_cast(self) -> bool:
        return self._config.fp16.auto_cast

    def dynamic_loss_scale(self) -> bool:
        return self._config.fp16.enabled and self._config.fp16.loss_scale == 0

    def initial_dynamic_scale(self) -> float:
        return 2.0**self._config.fp16.initial_scale_power

    def torch_autocast_enabled(self) -> bool:
        return self._config.torch_autocast.enabled

    def torch_autocast_dtype(self) -> torch.dtype:
        return torch_dtype(self._config.torch_autocast.dtype)

    def torch_autocast_lower_precision_safe_modules(self) -> list[str]:
        given = self._section("torch_autocast").get("lower_precision_safe_modules")
        return autocast.get_default_autocast_lower_precision_modules() if given is None else given

    def managed_gradient_accumulation(self) -> bool:
        return self._config.managed_gradient_accumulation

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """(of the model, of the gradients' accumulation)."""
        return self.dtype, torch_dtype(self.plan.accumulator)

    def steps_per_print(self) -> int | None:
        return self._config.steps_per_print

    def log_level(self) -> str | None:
        return self._config.log_level and self._config.log_level.upper()

    def wall_clock_breakdown(self) -> bool:
        return self._config.wall_clock_breakdown

    def memory_breakdown(self) -> bool:
        return self._config.memory_breakdown

    def dump_state(self) -> bool:
        return self._config.dump_state

    def dataloader_drop_last(self) -> bool:
        return self._config.dataloader_drop_last

    def postscale_gradients(self) -> bool:
        return not self._config.prescale_gradients

    def gradient_predivide_factor(self) -> float:
        return self._config.gradient_predivide_factor

    @property
    def communication_data_type(self) -> torch.dtype:
        return torch_dtype(self.plan.wire)

    # ---- curriculum --------------------------------------------------------------------------------------------------
    def curriculum_enabled_legacy(self) -> bool:
        return self._config.curriculum_learning.enabled

    def curriculum_params_legacy(self) -> dict[str, Any]:
        return {k: v for k, v in self._section("curriculum_learning").items() if k != "enabled"}

    @property
    def curriculum_scheduler_legacy(self) -> Any:
        return self.curriculum.scheduler

    def data_efficiency_enabled(self) -> bool:
        return self._config.data_efficiency.enabled

    def curriculum_learning_enabled(self) -> bool:
        return bool(self.curriculum.metrics)

    def curriculum_learning_config(self) -> dict[str, Any]:
        section = self._section("data_efficiency").get("data_sampling", {}).get("curriculum_learning", {})
        return dict(section)

    def random_ltd_enabled(self) -> bool:
        return False

    def _section(self, name: str) -> dict[str, Any]:
        section = self.config.get(name)
        return section if isinstance(section, dict) else {}

    @property
    def basic_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer over the model's parameters, of which `optimizer` has the param groups."""
        return self.optimizer.base

    def optimizer_name(self) -> str | None:
        if self.client_optimizer is not None:
            return type(self.optimizer.base).__name__
        kind = self._section("optimizer").get("type")
        if not isinstance(kind, str):
            return None
        return kind.lower() if kind.lower() in _LOWER_NAMES else kind

    def optimizer_params(self) -> dict[str, Any] | None:
        return self._section("optimizer").get("params")

    def scheduler_name(self) -> str | None:
        return self._section("scheduler").get("type")

    def scheduler_params(self) -> dict[str, Any] | None:
        return self._section("scheduler").get("params")

    def checkpoint_tag_validation_enabled(self) -> bool:
        return self._config.checkpoint.tag_validation != "Ignore"

    def get_mom(self) -> list[Any]:
        key = "momentum" if (self.optimizer_name() or "").lower() in ("sgd", "rmsprop") else "betas"
        return [g.get(key, 0.0) for g in self.optimizer.param_groups]

    def get_type(self) -> list[Any]:
        return [g.get("type", 0.0) for g in self.optimizer.param_groups]

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps)."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the number of micro-batches of a step, from the next step on."""
        per_pass, size = self.train_micro_batch_size_per_gpu() * self.mesh.dp, _whole(train_batch_size)
        if size <= 0 or size % per_pass:
            raise ArgumentError(
                f"set_train_batch_size({train_batch_size}): it must be an integer, a multiple of micro-batch x ranks,"
                f" {per_pass}"
            )
        self._set_batch(train_batch_size=size, gradient_accumulation_steps=size // per_pass)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Changes the micro-batch, keeping the accumulation."""
        if (size := _whole(micro_batch_size)) <= 0:
            raise ArgumentError(f"set_train_micro_batch_size({micro_batch_size}): it must be a positive integer")
        self._set_batch(
            train_micro_batch_size_per_gpu=size,
            train_batch_size=size * self.gradient_accumulation_steps() * self.mesh.dp,
        )

    def _set_batch(self, **sizes: int) -> None:
        if self.step_policy.fixed_batch:
            raise UnsupportedError('the batch is fixed with deepc.deterministic = "layout"')
        if self.in_accumulation:
            raise ArgumentError("batch sizes can be changed between two optimizer steps, not inside an accumulation")
        given: dict[str, Any] = {**sizes}
        self._config = dataclasses.replace(self._config, **given)
        self.micro_steps = self.global_steps * self.gradient_accumulation_steps()  # where whole steps end from now on

    def get_global_grad_norm(self) -> float | None:
        """Norm of the average gradient of the last step; inf if it was skipped, as in DeepSpeed."""
        return float("inf") if self.optimizer.overflow else super().get_global_grad_norm()

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    # ---- data --------------------------------------------------------------------------------------------------------
    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """A DataLoader over this rank's part of `dataset`, in micro-batches."""
        if (
            data_sampler is None
            and route in ("predict", "eval")
            and not isinstance(dataset, torch.utils.data.IterableDataset)
        ):
            data_sampler = torch.utils.data.DistributedSampler(
                dataset, num_replicas=self.mesh.dp, rank=self.mesh.coordinates(self.everyone.rank).dp, shuffle=False
            )
        return DeepSpeedDataLoader(
            dataset,
            batch_size or self.train_micro_batch_size_per_gpu(),
            pin_memory=pin_memory,
            data_sampler=data_sampler,
            collate_fn=collate_fn,
            num_local_io_workers=num_local_io_workers,
            data_parallel_world_size=self.mesh.dp,
            data_parallel_rank=self.mesh.coordinates(self.everyone.rank).dp,
            dataloader_drop_last=self.dataloader_drop_last(),
        )

    # ---- moving states: they are in host memory already on a CPU -----------------------------------------------------
    def offload_states(  # type: ignore[override]  # DeepSpeed's arguments
        self, include: Any = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """device nvme: masters and moments go to disk (Engine.offload_states). "cpu": of a run on a GPU what `include`
        names goes to host memory, None for all but parameters in the model's dtype, which stay; without effect on a
        CPU, where all states are in host memory. non_blocking is accepted; they are there when it returns."""
        if device == "nvme":
            if self.device.type != "cpu":
                raise UnsupportedError(
                    'offload_states of a GPU run goes to host memory: pass device="cpu", or set'
                    " zero_optimization.offload_optimizer {device: nvme}"
                )
            super().offload_states()
        elif self.device.type != "cpu":
            super().offload_states(include=include, locked=pin_memory)

    def reload_states(self, non_blocking: bool = False) -> None:
        """The counterpart of offload_states. What the configuration puts on disk stays there."""
        if self._config.zero.offload_optimizer.device != "nvme":
            super().reload_states()

    def empty_partition_cache(self) -> None:
        """Nothing is cached between steps."""

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Nothing to do: backward has reduced them."""

    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,  # type: ignore[override]
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """torch.compile of the module, in place. schedule and compiled_autograd_enabled belong to DeepCompile:
        UnsupportedError."""
        if schedule is not None or compiled_autograd_enabled:
            raise UnsupportedError(
                "engine.compile(schedule=..., compiled_autograd_enabled=True): DeepCompile does not exist in deepc;"
                " leave them out, torch.compile runs"
            )
        super().compile(backend=backend, **(compile_kwargs or {}))

    @property
    def is_compiled(self) -> bool:
        return getattr(self.module, "_compiled_call_impl", None) is not None

    # ---- files -------------------------------------------------------------------------------------------------------
    def save_checkpoint(
        self,
        save_dir: Any,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """deepc's checkpoint; beside it the script zero_to_fp32.py, which makes one model of it."""
        super().save_checkpoint(save_dir, tag, client_state, save_latest, exclude_frozen_parameters)
        if self.global_rank == 0:
            zero_to_fp32.leave_script(save_dir)
        return True

    def load_checkpoint(
        self,
        load_dir: Any,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """As deepc's. An engine for evaluation has no optimizer, and takes the rest of what a training has saved."""
        return super().load_checkpoint(
            load_dir,
            tag,
            load_module_strict,
            load_optimizer_states and not self._inference_only,
            load_lr_scheduler_states and not self._inference_only,
            load_module_only,
            custom_load_fn,
        )

    def save_16bit_model(
        self, save_dir: Any, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Writes the module's weights, whole, in the training precision, as `save_dir/save_filename`: torch.save's
        format, or safetensors for a name that ends so. Rank 0 writes. Collective."""
        if save_filename.endswith(".safetensors"):
            return super().save_16bit_model(save_dir, save_filename, exclude_frozen_parameters)
        state = self._consolidated_16bit_state_dict(exclude_frozen_parameters)
        failure: Exception | None = None
        try:
            if self.global_rank == 0:
                Path(save_dir).mkdir(parents=True, exist_ok=True)
                zero_to_fp32.write_pickled(os.path.join(save_dir, save_filename), state)
        except OSError as exc:  # told to the other ranks, then raised
            failure = CheckpointError(f"can't write {os.path.join(save_dir, save_filename)}: {exc}")
            failure.__cause__ = exc
        except Exception as exc:
            failure = exc
        together(self, f"writing {save_filename}", failure)
        return True

    save_fp16_model = save_16bit_model

    @private.uncompiled
    def __getattr__(self, name: str) -> Any:
        field = _flat_zero_keys().get(name)
        if field is not None:
            value = getattr(self._config.zero, field)
            if getattr(value, "device", "") == "none":  # offload_*: None where nothing is asked for, as in DeepSpeed
                value = None
            return lambda: value
        if name in _UNSUPPORTED_METHODS:
            raise UnsupportedError(f"engine.{name}: {_UNSUPPORTED_METHODS[name]}")
        try:
            return super().__getattr__(name)
        except AttributeError as exc:
            module = self.__dict__.get("_modules", {}).get("module")
            if name.startswith("__") or module is None or name in dir(module):  # a property of the model that failed
                raise
            raise UnknownEngineNameError(
                f"engine.{name}: deepc's DeepSpeedEngine has no attribute of this name, nor has the model"
                f" ({type(module).__name__}). docs/compat.md lists what deepc has of DeepSpeed's; if your script needs"
                " it, please report it"
            ) from exc


class PipelineEngine(pipelined.PipelineEngine, DeepSpeedEngine):
    """That of a deepspeed.pipe.PipelineModule. training_data comes in its own order, as DeepSpeed's pipelines read it
    (samples whose sizes go together lie together)."""

    def __init__(self, model: torch.nn.Module, config: Any, **options: Any) -> None:
        super().__init__(model, config, **options)
        if self.training_dataloader is not None:
            self.training_dataloader.keep_order()

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        raise UnsupportedError(
            "engine.coalesce_grad_reduction() of a pipeline: train_batch reduces the gradients of a batch once, at its"
            " end, as it is; leave the with block out"
        )
        yield  # what makes it a context manager


def initialize(
    args: Any = None,
    model: Any = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """deepspeed.initialize: (engine, optimizer, training_dataloader, lr_scheduler). As deepc.initialize; without any
    optimizer the engine is for evaluation (as in DeepSpeed). mesh_param: (data-parallel ranks, ranks of a sequence),
    as sequence_parallel_size of the configuration says it."""
    from ..helpers.comm import init_distributed

    if model is None:
        raise MisuseError("initialize needs model=, a torch.nn.Module, got None")
    given = config if config is not None else config_params
    named = next(filter(None, (getattr(args, f"{n}_config", None) for n in ("deepspeed", "deepscale"))), None)
    if given is None and named is None:
        raise MisuseError(
            "no configuration: pass config= (a DeepSpeed JSON path or dict), or args with deepspeed_config"
        )
    if given is not None and named is not None:
        raise MisuseError(
            "the configuration is given twice, as initialize(config=...) and as args.deepspeed_config; keep one"
        )
    init_distributed(distributed_port=distributed_port or 29500, dist_init_required=dist_init_required)
    given, mpu = models.with_sequences(given if given is not None else named, mpu)
    given = models.with_mesh(given, mesh_param)
    models.leave_earlier(model, optimizer, given, mpu)
    given = models.with_own_precision(model, given)
    models.mark_leaves(model, given)
    made = assembly.initialize(
        DeepSpeedEngine,
        PipelineEngine,
        watchers=(watch,),
        args=args,
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        mpu=mpu,
        dist_init_required=dist_init_required,
        collate_fn=collate_fn,
        config=given,
    )
    experts_cut = any(getattr(m, "enable_expert_tensor_parallelism", False) for m in made[0].module.modules())
    groups.engine_has(made[0].mesh, experts_cut)
    if made[0].mesh.tp > 1:
        layers.set_autotp_mode(training=True)
        layers.mark(made[0].module)
    checkpointing.follow(made[0]._config.activation_checkpointing)
    return made
