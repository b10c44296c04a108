"""Curriculum learning: what a training step gets of its samples (docs/curriculum.md). The schedules are
config/curriculum.py's; here is what they are applied to."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ...config.curriculum import CurriculumScheduler
from ...errors import ArgumentError, ConfigError, UnsupportedError
from ...parallel.sequence.shards import each_tensor, shorter

if TYPE_CHECKING:
    from ...config.tree import Config

SEQLEN = "curriculum_seqlen"  # DeepSpeed's name of the argument
_TRUNCATES = "seqlen_truncate"  # Megatron's name of the metric


class Curriculum:
    """The schedules of an engine: `scheduler`, of curriculum_learning, or None; `metrics`, of data_efficiency, by name.

    post_process: function(batch, {"current_difficulties", "curriculum_step"}) of what the loader of training_data
    gives, of which the user makes what the difficulties mean; without one a metric "seqlen_truncate" cuts it."""

    def __init__(self, config: Config, module: torch.nn.Module, pipelined: bool, sequence: Any = None) -> None:
        """sequence: the process group of the ranks that share sequences, or None."""
        legacy, sampling = config.curriculum_learning, config.data_efficiency
        self.scheduler = CurriculumScheduler(legacy.schedule) if legacy.enabled else None
        self.by_length = legacy.enabled and legacy.curriculum_type == "seqlen"
        self.metrics = {n: CurriculumScheduler(m) for n, m in sampling.metrics.items()}
        self.post_process: Callable[[Any, dict[str, Any]], Any] | None = None
        self._sequence = sequence
        self._to_forward = self.by_length and _to_forward(config.deepc.curriculum, module, pipelined)
        self._names = {legacy.curriculum_type: self.scheduler} if self.scheduler is not None else {}

    @property
    def active(self) -> bool:
        return self.scheduler is not None or bool(self.metrics)

    def describe(self) -> str:
        """What it does with lengths, for the log; "" without."""
        if not self.by_length:
            return ""
        return "curriculum by length: " + (
            f"the model's forward gets {SEQLEN}" if self._to_forward else "batches are truncated"
        )

    # ---- in the loop -------------------------------------------------------------------------------------------------
    def forward(self, step: int, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The inputs of a training forward of `step` (the first is 1)."""
        if self.scheduler is None:
            return inputs, kwargs
        length = self._difficulty(self.scheduler, step)
        if not self.by_length:
            return inputs, kwargs
        if self._to_forward:
            return inputs, {**kwargs, SEQLEN: length}
        cut: tuple[Any, dict[str, Any]] = self._truncated((inputs, kwargs), length)
        return cut

    def micro_batches(self, step: int, batches: list[Any]) -> list[Any]:
        """Those of a pipeline's step; None where this rank reads none."""
        if self.scheduler is None:
            return batches
        length = self._difficulty(self.scheduler, step)
        if not self.by_length:
            return batches
        return [b if b is None else self._truncated(b, length) for b in batches]

    def _difficulty(self, scheduler: CurriculumScheduler, step: int) -> Any:
        value = scheduler.update_difficulty(step)
        if self.by_length and (not hasattr(value, "__index__") or value < 1):
            raise ConfigError(
                f"a curriculum by length comes to {value!r} positions at step {step}; choose min_difficulty as a"
                " multiple of difficulty_step above 0, or let a schedule of your own give whole numbers above 0"
            )
        return value

    def _truncated(self, given: Any, length: int) -> Any:
        """A batch of the model. Of sequences that ranks share `length` is that of the whole; collective over them."""
        if self._sequence is None:
            return truncated(given, length)
        return shorter(given, _positions(given), length, self._sequence)

    def of_loader(self, step: int, batch: Any) -> Any:
        """What the loader gives in `step`."""
        if not self.metrics:
            return batch
        now = {name: m.update_difficulty(step) for name, m in self.metrics.items()}
        if self.post_process is not None:
            return self.post_process(batch, {"current_difficulties": now, "curriculum_step": step})
        return truncated(batch, now[_TRUNCATES]) if _TRUNCATES in now else batch

    def set_custom(self, given: Any) -> None:
        """See Engine.set_custom_curriculum_learning_schedule."""
        known = {**self.metrics, **self._names}
        if callable(given):
            given = dict.fromkeys(known, given)
        if not isinstance(given, Mapping) or not all(map(callable, given.values())):
            raise ArgumentError(
                "set_custom_curriculum_learning_schedule takes a function of the step, or a dict of them, got"
                f" {given!r}"
            )
        custom = [n for n, s in known.items() if s.kind == "custom"]
        if missing := [n for n in given if n not in custom]:
            raise ArgumentError(
                f"set_custom_curriculum_learning_schedule: {missing[0]!r} is no curriculum of schedule_type custom;"
                f" there {'are ' + ', '.join(custom) if custom else 'is none'} in the configuration"
            )
        for name, function in given.items():
            known[name].set_custom_get_difficulty(function)

    # ---- checkpoints -------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """The difficulties that were reached, by name."""
        return {name: s.get_current_difficulty() for name, s in {**self.metrics, **self._names}.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Schedules that the checkpoint does not know begin where the step is."""
        for name, s in {**self.metrics, **self._names}.items():
            if name in state:
                s.set_current_difficulty(min(state[name], s.state["max_difficulty"]))


def _to_forward(asked: str, module: torch.nn.Module, pipelined: bool) -> bool:
    """Whether the model's forward gets the length, instead of a shorter batch."""
    if pipelined:
        if asked == "forward":
            raise UnsupportedError(
                'deepc.curriculum = "forward" with pipelines does not exist: stages run parts of the model. Set it to'
                ' "truncate"'
            )
        return False
    own = getattr(module, "_orig_mod", module)  # of a module of torch.compile's
    parameters = inspect.signature(own.forward).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if asked == "forward":
        if SEQLEN not in parameters and not takes_any:
            raise ConfigError(
                f'deepc.curriculum = "forward", and the forward of {type(module).__name__} takes no {SEQLEN}; add the'
                ' argument, or set "truncate"'
            )
        return True
    if asked == "truncate":
        return False
    # transformers' models hand any keyword on to nobody who would look at it, and so does what is around one (peft's)
    foreign = any(k.__name__ == "PreTrainedModel" for m in module.modules() for k in type(m).__mro__)
    return SEQLEN in parameters or (takes_any and not foreign)


def truncated(given: Any, length: int) -> Any:
    """Tensors in nested tuples, lists, dicts and dataclasses, none longer than `length`. The first tensor of
    integers [batch, positions, ...] says how long sequences are. Of every tensor its second size is cut where it is
    that, of integers and booleans all behind the first, and of four sizes the last two where both are (masks)."""
    whole = _positions(given)
    return given if whole <= length else each_tensor(given, lambda t: _narrowed(t, whole, length))


def _positions(given: Any) -> int:
    """How long its sequences are here."""
    found = _length(given)
    if found is None:
        raise ArgumentError(
            "a curriculum by length truncates batches, and this one has no tensor of integers [batch, positions]; give"
            f" the model a forward that takes {SEQLEN}"
        )
    return found


def _length(given: Any) -> int | None:
    if isinstance(given, torch.Tensor):
        integers = not given.is_floating_point() and not given.is_complex() and given.dtype != torch.bool
        return given.shape[1] if given.dim() > 1 and integers else None
    inside = given.values() if isinstance(given, Mapping) else given if isinstance(given, (list, tuple)) else ()
    if dataclasses.is_dataclass(given) and not isinstance(given, type):
        inside = [getattr(given, f.name, None) for f in dataclasses.fields(given)]
    return next((n for n in map(_length, inside) if n is not None), None)


def _narrowed(t: torch.Tensor, whole: int, length: int) -> torch.Tensor:
    if not t.is_floating_point() and not t.is_complex():
        dims = range(1, t.dim())
    else:
        square = t.dim() == 4 and t.shape[2] == t.shape[3] == whole
        dims = range(2, 4) if square else range(1, min(2, t.dim()))
    for dim in dims:
        if t.shape[dim] == whole:
            t = t.narrow(dim, 0, length)
    return t
