"""Hugging Face's Trainer with deepc's engine, without the name `deepspeed`.

    import deepc
    from deepc.integrations.hf import EngineTrainer

    deepc.init_distributed()                                   # the ranks that `deepc run` or torchrun started
    args = TrainingArguments(output_dir="out", use_cpu=True, ...)
    trainer = EngineTrainer(
        model=model, args=args, train_dataset=data, deepc_config={"zero_optimization": {"stage": 3}}
    )
    trainer.train()

The optimizer and the schedule are Trainer's (TrainingArguments), states and gradients are deepc's: sharded as
zero_optimization says, saved by engine.save_checkpoint. EngineTrainerMixin does the same to another subclass of
Trainer: `class Mine(EngineTrainerMixin, Seq2SeqTrainer)`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer

import deepc

from ..engine.engine import Engine
from ..engine.states.access import consolidated_state_dict
from ..engine.states.saving import together
from ..errors import CheckpointError, ConfigError, UnsupportedError

if TYPE_CHECKING:
    from transformers import Trainer as _Base  # what the mixin stands before
else:
    _Base = object


class _Stepped(torch.optim.Optimizer):
    """What Trainer takes for the optimizer: the param groups of the engine's. The engine has stepped when step() is
    called; its states are in the engine's checkpoints."""

    _is_accelerate_prepared = True  # Accelerate takes it as it is, and asks it whether a step was skipped

    state: Any

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.defaults, self.param_groups, self.state = engine.optimizer.defaults, engine.optimizer.param_groups, {}
        type(engine.optimizer)._hook_tables(self)

    @property
    def step_was_skipped(self) -> bool:
        """Gradients were not finite: the schedule waits too."""
        return bool(self.engine.optimizer.overflow)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no loss to return
        """The engine has stepped."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients have gone to their owners."""

    def state_dict(self) -> dict[str, Any]:
        return {"state": {}, "param_groups": []}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """States come with the engine's checkpoint."""


def _has_states(folder: str) -> bool:
    """Whether the engine has saved a checkpoint in `folder` (not with save_only_model)."""
    return Path(folder, "latest").exists()


class EngineTrainerMixin(_Base):
    """Before a subclass of transformers.Trainer in the list of bases. deepc_config: a DeepSpeed configuration as a dict
    (or a path) without optimizer and scheduler; batch sizes, accumulation, clipping and precision are filled from
    TrainingArguments where they are missing or "auto".
    """

    optimizer: Any  # Trainer's own until the engine is made

    def __init__(self, *args: Any, deepc_config: Mapping[str, Any] | str | None = None, **kwargs: Any) -> None:
        self.engine: Any = None
        self._of: Any = None  # the model that it was made of
        self._deepc_config = deepc_config
        super().__init__(*args, **kwargs)
        if self.is_deepspeed_enabled:
            raise ConfigError(
                "TrainingArguments(deepspeed=...) and EngineTrainer are two ways to the same thing; keep deepc_config="
                " and remove deepspeed="
            )

    def create_accelerator_and_postprocess(self) -> None:
        """Accelerate moves data and gathers; precision, accumulation and backward are the engine's."""
        precision, self.args.mixed_precision = self.args.mixed_precision, "no"
        try:
            super().create_accelerator_and_postprocess()
        finally:
            self.args.mixed_precision = precision
        accelerator, unwrap = self.accelerator, self.accelerator.unwrap_model
        accelerator.backward = self._backward
        # The engine counts micro-batches; its gradients go to their owners at once.
        accelerator.no_sync = lambda model=None: contextlib.nullcontext()
        accelerator.unwrap_model = lambda model, *args, **kwargs: unwrap(
            model.module if isinstance(model, Engine) else model, *args, **kwargs
        )

    # ---- samples ----------------------------------------------------------------------------------------------------
    def _each_rank_its_own(self) -> None:
        """Accelerate deals every rank samples of its own, which ranks that share a sequence or the model must not have.
        A subclass that deals them itself does not come here."""
        from ..config.source import read

        config = read(self._deepc_config or {})[0]
        tensor = config.get("tensor_parallel")
        sizes = {
            "sequence_parallel_size": config.get("sequence_parallel_size"),
            "tensor_parallel.autotp_size": tensor.get("autotp_size") if isinstance(tensor, Mapping) else None,
        }
        for key, size in sizes.items():
            if isinstance(size, int) and size > 1:
                way = "parallelism_config" if key == "sequence_parallel_size" else "tensor_parallel"
                raise UnsupportedError(
                    f"deepc_config has {key} = {size}, whose ranks need the same samples, and EngineTrainer gives each"
                    f" rank its own: use TrainingArguments(deepspeed=...) with {way} (docs/huggingface.md), or override"
                    " get_train_dataloader and get_eval_dataloader so that these ranks get the same"
                )

    def get_train_dataloader(self) -> Any:
        self._each_rank_its_own()
        return super().get_train_dataloader()

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        self._each_rank_its_own()
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        self._each_rank_its_own()
        return super().get_test_dataloader(test_dataset)

    # ---- the engine --------------------------------------------------------------------------------------------------
    def _configuration(self) -> dict[str, Any]:
        from ..config.source import read

        args = self.args
        config = copy.deepcopy(read(self._deepc_config or {})[0])
        for section in ("optimizer", "scheduler"):
            if section in config:
                raise ConfigError(
                    f"deepc_config has the section {section}: Trainer makes it (optim, learning_rate, lr_scheduler_type"
                    " of TrainingArguments). Remove it, or use TrainingArguments(deepspeed=...) with"
                    " deepc.compat.deepspeed"
                )
        known = {
            "train_micro_batch_size_per_gpu": self._train_batch_size,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "gradient_clipping": args.max_grad_norm,
        }
        if config.get("train_batch_size") == "auto":
            del config["train_batch_size"]
        for key, value in known.items():
            given = config.get(key, "auto")
            if given == "auto":
                config[key] = value
            elif given != value and key != "gradient_clipping":  # which is the engine's; Trainer counts micro-batches
                named = key.replace("train_micro_batch_size_per_gpu", "per_device_train_batch_size")
                raise ConfigError(
                    f"deepc_config has {key} = {given!r}, and TrainingArguments say {named} = {value!r}; make them"
                    ' equal, or set the first to "auto"'
                )
        for key, asked in (("bf16", args.bf16), ("fp16", args.fp16)):
            self._fill_precision(config, key, asked)
        return config

    @staticmethod
    def _fill_precision(config: dict[str, Any], key: str, asked: bool) -> None:
        section = config.get(key) or {}
        if section.get("enabled", "auto") == "auto":
            if asked or key in config:
                config[key] = {**section, "enabled": asked}
        elif asked and not section["enabled"]:
            raise ConfigError(
                f"TrainingArguments({key}=True), and deepc_config has {key}.enabled = false; remove one, or set it to"
                ' "auto"'
            )

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        """For training: the engine, made of the model and the optimizer that Trainer has just made; the same one when
        train() is called again."""
        if not training:
            return model
        if self.engine is not None and self._of is not self.model:  # model_init: another trial
            self._forget_engine()
        if self.engine is None:
            self._of = self.model
            self.engine, *_ = deepc.initialize(model=self.model, optimizer=self.optimizer, config=self._configuration())
            if self.args.torch_compile:
                self.engine.compile(
                    backend=self.args.torch_compile_backend,
                    **({"mode": m} if (m := self.args.torch_compile_mode) else {}),
                )
            self.accelerator._models.append(self.engine)  # prepared: else evaluation prepares the model again
            self.optimizer = _Stepped(self.engine)
        return self.engine

    def _update_auto_batch_size(self, batch_size: int) -> None:
        """auto_find_batch_size: the next try makes an engine of its own."""
        if self.engine is not None:
            self._forget_engine()
            self.optimizer = self.lr_scheduler = None
        super()._update_auto_batch_size(batch_size)  # type: ignore[no-untyped-call]  # transformers

    def _forget_engine(self) -> None:
        self.engine.destroy()
        self.accelerator._models.clear()
        self.accelerator._optimizers.clear()
        self.engine = None

    def _prepare_input(self, data: Any) -> Any:
        """Floating-point inputs (speech, pictures) come in the dtype that the engine computes in, as Trainer has them
        with DeepSpeed: there is no autocast."""
        from ..engine.data import cast_floats

        data = super()._prepare_input(data)
        if self.engine is None or self.engine.dtype == torch.float32:
            return data
        return cast_floats(data, self.engine.dtype) if isinstance(data, torch.Tensor) else data

    def _backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Trainer has divided the loss by the accumulation already."""
        self.engine.set_gradient_accumulation_boundary(self.accelerator.sync_gradients)
        self.engine.backward(loss, scale_wrt_gas=False)
        if not self.accelerator.sync_gradients:
            self.engine.step()

    def _clip_grad_norm(self, model: Any) -> None:
        """The engine clips."""
        return None

    def _get_grad_norm(self, model: Any, grad_norm: float | None = None) -> float:
        """Trainer asks before its optimizer.step(): the engine steps here, and knows the norm then; inf if it skipped
        the step."""
        result = self.engine.step()
        return result.grad_norm if result.applied else float("inf")

    # ---- files -------------------------------------------------------------------------------------------------------
    def _schedule(self) -> torch.optim.lr_scheduler.LRScheduler:
        """Trainer's, which it has made before the first step."""
        assert self.lr_scheduler is not None
        return self.lr_scheduler

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.engine.save_checkpoint(output_dir, client_state={"lr_scheduler": self._schedule().state_dict()})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """The engine's checkpoint has the weights (_load_optimizer_and_scheduler). Without one they are loaded before
        the engine is made."""
        if _has_states(resume_from_checkpoint):
            return
        if self.engine is not None:
            raise UnsupportedError(
                f"resume_from_checkpoint={resume_from_checkpoint!r} holds weights only (save_only_model=True), and this"
                " trainer has an engine already; make a new model and a new trainer, and resume with those"
            )
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and _has_states(checkpoint):
            _, client = self.engine.load_checkpoint(checkpoint)
            if "lr_scheduler" not in client:
                raise CheckpointError(
                    f"{checkpoint} has no state of the schedule: it was not saved by an EngineTrainer. Resume it where"
                    " it was saved (TrainingArguments(deepspeed=...), or the engine's own loop)"
                )
            self._schedule().load_state_dict(client["lr_scheduler"])

    def _load_best_model(self) -> None:
        """Weights, and states with them, of the best checkpoint. Collective."""
        best = self.state.best_model_checkpoint
        if best is None or not _has_states(best):
            raise UnsupportedError(
                f"load_best_model_at_end with save_only_model=True: {best} holds no checkpoint of the engine; leave"
                " save_only_model out"
            )
        self.engine.load_checkpoint(best)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Whole weights, in Hugging Face's format, from rank 0. Collective."""
        if self.engine is None:
            super().save_model(output_dir, _internal_call)
            return
        state, where = consolidated_state_dict(self.engine, copies=False), output_dir or self.args.output_dir
        failure = None
        if self.args.should_save:
            try:
                self._save(where, state_dict=state)
            except Exception as exc:  # the others wait, and are told
                failure = CheckpointError(f"save_model: the model can't be written to {where}: {exc}")
                failure.__cause__ = exc
        together(self.engine, f"save_model to {where}", failure)


class EngineTrainer(EngineTrainerMixin, Trainer):
    """transformers.Trainer on deepc's engine."""


__all__ = ["EngineTrainer", "EngineTrainerMixin"]
