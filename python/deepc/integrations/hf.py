"""Hugging Face's Trainer with deepc's engine, without the name `deepspeed`.

    import deepc
    from deepc.integrations.hf import EngineTrainer

    deepc.init_distributed()                                   # the ranks that `deepc run` or torchrun started
    args = TrainingArguments(output_dir="out", use_cpu=True, ...)
    trainer = EngineTrainer(model=model, args=args, train_dataset=data, deepc_config={"zero_optimization": {"stage": 3}})
    trainer.train()

The optimizer and the schedule are Trainer's (TrainingArguments), states and gradients are deepc's: sharded as zero_optimization says, saved
by engine.save_checkpoint. EngineTrainerMixin does the same to another subclass of Trainer: `class Mine(EngineTrainerMixin, Seq2SeqTrainer)`."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Mapping

import torch
from transformers import Trainer

import deepc

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..engine import Engine

    _Base = Trainer  # what the mixin stands before
else:
    _Base = object


class _Stepped(torch.optim.Optimizer):
    """What Trainer takes for the optimizer: the param groups of the engine's. The engine has stepped when step() is called; its states are in the
    engine's checkpoints."""

    state: Any

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.defaults, self.param_groups, self.state = engine.optimizer.defaults, engine.optimizer.param_groups, {}
        type(engine.optimizer)._hook_tables(self)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no loss to return
        """The engine has stepped."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients have gone to their owners."""

    def state_dict(self) -> dict[str, Any]:
        return {"state": {}, "param_groups": []}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """States come with the engine's checkpoint."""


class EngineTrainerMixin(_Base):
    """Before a subclass of transformers.Trainer in the list of bases. deepc_config: a DeepSpeed configuration as a dict (or a path) without
    optimizer and scheduler; batch sizes, accumulation and clipping are filled from TrainingArguments where they are missing or "auto"."""

    def __init__(self, *args: Any, deepc_config: Mapping[str, Any] | str | None = None, **kwargs: Any) -> None:
        self.engine: Any = None
        self._deepc_config = deepc_config
        super().__init__(*args, **kwargs)
        if self.is_deepspeed_enabled:
            raise ConfigError("TrainingArguments(deepspeed=...) and EngineTrainer are two ways to the same thing; keep deepc_config= and remove deepspeed=")
        self.accelerator.backward = self._backward

    # ---- the engine ------------------------------------------------------------------------------------------------------
    def _configuration(self) -> dict[str, Any]:
        from ..config import _read

        args = self.args
        config = copy.deepcopy(_read(self._deepc_config or {})[0])
        for section in ("optimizer", "scheduler"):
            if section in config:
                raise ConfigError(f"deepc_config has the section {section}: Trainer makes it (optim, learning_rate, lr_scheduler_type of TrainingArguments). Remove "
                                  "it, or use TrainingArguments(deepspeed=...) with deepc.compat.deepspeed")
        known = {"train_micro_batch_size_per_gpu": args.per_device_train_batch_size, "gradient_accumulation_steps": args.gradient_accumulation_steps,
                 "gradient_clipping": args.max_grad_norm}
        if config.get("train_batch_size") == "auto":
            del config["train_batch_size"]
        for key, value in known.items():
            if config.get(key, "auto") == "auto":
                config[key] = value
        return config

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        """For training: the engine, made of the model and the optimizer that Trainer has just made."""
        if not training:
            return model
        if model is self.engine:
            self.optimizer = _Stepped(self.engine)
            return model
        self.engine, *_ = deepc.initialize(model=self.model, optimizer=self.optimizer, config=self._configuration())
        self.accelerator._models.append(self.engine)  # prepared: else evaluation prepares the model again
        self.optimizer = _Stepped(self.engine)
        return self.engine

    def _backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Trainer has divided the loss by the accumulation already."""
        self.engine.set_gradient_accumulation_boundary(self.accelerator.sync_gradients)
        self.engine.backward(loss, scale_wrt_gas=False)
        if not self.accelerator.sync_gradients:
            self.engine.step()

    def _clip_grad_norm(self, model: Any) -> None:
        """The engine clips."""
        return None

    def _get_grad_norm(self, model: Any, grad_norm: float | None = None) -> float | None:
        """Trainer asks before its optimizer.step(): the engine steps here, and knows the norm then."""
        norm: float | None = self.engine.step().grad_norm
        return norm

    def _schedule(self) -> torch.optim.lr_scheduler.LRScheduler:
        """Trainer's, which it has made before the first step."""
        assert self.lr_scheduler is not None
        return self.lr_scheduler

    # ---- files -----------------------------------------------------------------------------------------------------------
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.engine.save_checkpoint(output_dir, client_state={"lr_scheduler": self._schedule().state_dict()})

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            _, client = self.engine.load_checkpoint(checkpoint)
            self._schedule().load_state_dict(client["lr_scheduler"])

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Whole weights, in Hugging Face's format, from rank 0. Collective."""
        if self.engine is None:
            super().save_model(output_dir, _internal_call)
            return
        state = self.engine._zero3_consolidated_16bit_state_dict()
        if self.args.should_save:
            self._save(output_dir or self.args.output_dir, state_dict=state)
        self.accelerator.wait_for_everyone()


class EngineTrainer(EngineTrainerMixin, Trainer):
    """transformers.Trainer on deepc's engine."""


__all__ = ["EngineTrainer", "EngineTrainerMixin"]
