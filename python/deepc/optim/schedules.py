"""The five learning-rate schedules of DeepSpeed, with its exact values, and the way from a configuration to a schedule.

Each value is a pure function of the step index (`ratio`/`rates` below), so resuming needs the index only. A schedule
works on anything that has `.param_groups` (a torch optimizer, an engine's optimizer, a plain object). The index begins
at -1 and is raised by one by `step()`, so the first two optimizer steps both run at the rate of index 0 (DeepSpeed's
convention, kept because users compare curves).

LRRangeTest: L. N. Smith, "Cyclical learning rates for training neural networks" (2017), section 3.3. OneCycle: L. N.
Smith, "A disciplined approach to neural network hyper-parameters: part 1" (2018), extended by a decay phase. The
arithmetic is written in DeepSpeed's order of operations where a different order would round differently."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..errors import ArgumentError, ConfigError, did_you_mean

VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
WARMUP_TYPES = ("log", "linear")

_log = logging.getLogger("deepc")


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    groups = getattr(optimizer, "param_groups", None)
    if not isinstance(groups, list) or not groups:
        raise ConfigError(f"a schedule needs an optimizer with param_groups, got {type(optimizer).__name__}")
    return groups


def _integer(name: str, value: Any, least: int) -> int:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or value != int(value)
        or value < least
    ):
        raise ConfigError(f"{name} = {value!r} must be an integer >= {least}")
    return int(value)


def _number(name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{name} = {value!r} must be a finite number")
    return value


def _flag(name: str, value: Any) -> bool:
    if value not in (True, False):
        raise ConfigError(f"{name} = {value!r} must be true or false")
    return bool(value)


def _numbers(name: str, value: Any) -> None:
    for v in value if isinstance(value, (list, tuple)) else (value,):
        _number(name, v)


def _per_group(groups: Sequence[Any], value: Any, name: str) -> list[Any]:
    """One value per parameter group: a number for all, or a list of that length."""
    _numbers(name, value)
    if not isinstance(value, (list, tuple)):
        return [value] * len(groups)
    if len(value) != len(groups):
        raise ConfigError(f"{name} has {len(value)} values, the optimizer has {len(groups)} parameter groups")
    return list(value)


def _warmup_type(value: Any) -> str:
    if value not in WARMUP_TYPES:
        raise ConfigError(f"warmup_type = {value!r} must be one of {', '.join(WARMUP_TYPES)}")
    return str(value)


class Scheduler(Protocol):
    """What a training loop may ask of a learning-rate schedule: of the five here, torch's, and a user's own, which need
    only step()."""

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Goes to the next rate."""

    def get_last_lr(self) -> list[Any]:
        """The rates that were set last, one per parameter group."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """The reverse."""


class NotSteppedError(ConfigError, AssertionError):
    """A schedule has set no rate yet. (DeepSpeed's is an AssertionError whose text integrations look for.)"""


def _put_rates(groups: Sequence[dict[str, Any]], rates: Sequence[Any]) -> None:
    for group, rate in zip(groups, rates, strict=False):
        if hasattr(group["lr"], "fill_"):  # a tensor: a compiled or capturable step holds on to it
            group["lr"].fill_(rate.squeeze() if hasattr(rate, "squeeze") else rate)
        else:
            group["lr"] = rate


def follow_loaded(schedule: Any, groups: Sequence[dict[str, Any]]) -> None:
    """The param groups get the rates of a schedule whose state was loaded without the optimizer's, which has them."""
    if not isinstance(schedule, _Schedule):
        _put_rates(groups, schedule.get_last_lr() if hasattr(schedule, "get_last_lr") else ())
    elif schedule.last_batch_iteration >= 0:
        schedule.step(schedule.last_batch_iteration)


class _Schedule:
    """Index, step, last rate and state of all five. A subclass gives `get_lr()`: the rates at
    `last_batch_iteration`."""

    def __init__(self, optimizer: Any, last_batch_iteration: int) -> None:
        self.optimizer = optimizer
        self.param_groups = _groups(optimizer)
        self.last_batch_iteration = _integer("last_batch_iteration", last_batch_iteration, -1)
        self._last_lr: list[Any] | None = None

    def get_lr(self) -> list[Any]:
        raise NotImplementedError

    def _apply(self, rates: Sequence[Any]) -> None:
        _put_rates(_groups(self.optimizer), rates)
        self._last_lr = [group["lr"] for group in _groups(self.optimizer)]

    def step(self, batch_iteration: int | None = None) -> None:
        """Goes to the next index, or to the given one, and sets the rate of every parameter group."""
        self.last_batch_iteration = self.last_batch_iteration + 1 if batch_iteration is None else batch_iteration
        self._apply(self.get_lr())

    def get_last_lr(self) -> list[Any]:
        """The rates that were set last, one per parameter group."""
        if self._last_lr is None:
            raise NotSteppedError(
                f"{type(self).__name__}.get_last_lr() was called before the first step(): need to call step() first"
            )
        return self._last_lr

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the index. The optimizer's own state carries the current rate, as in DeepSpeed."""
        self.last_batch_iteration = state["last_batch_iteration"]


class LRRangeTest(_Schedule):
    """Rate = min * (1 + step_rate * index / step_size), rising without end, to find the largest usable rate."""

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: float | list[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = _per_group(self.param_groups, lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size = _integer("lr_range_test_step_size", lr_range_test_step_size, 1)
        self.step_rate = _number("lr_range_test_step_rate", lr_range_test_step_rate)
        self.staircase = _flag("lr_range_test_staircase", lr_range_test_staircase)
        if last_batch_iteration == -1:
            self._apply(self.min_lr)

    def get_lr(self) -> list[Any]:
        interval = float(self.last_batch_iteration + 1) / self.step_size
        increase = 1 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [lr * increase for lr in self.min_lr]


class OneCycle(_Schedule):
    """Rate up from min to max and back over one cycle, momentum (betas[0]) the other way, then decay.

    Steps are counts of optimizer steps. Stair counts > 0 hold the rate on that many steps of each half. decay_step_size
    0: no decay.
    """

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: float | list[float],
        cycle_max_lr: float | list[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | list[float] = 0.8,
        cycle_max_mom: float | list[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        groups = self.param_groups
        first = float(_number("cycle_first_step_size", cycle_first_step_size))
        second = (
            first
            if cycle_second_step_size is None
            else float(_number("cycle_second_step_size", cycle_second_step_size))
        )
        if first <= 0 or second < 0:
            raise ConfigError(
                f"cycle_first_step_size = {cycle_first_step_size!r} must be > 0 and cycle_second_step_size = "
                f"{cycle_second_step_size!r} >= 0"
            )
        self.first, self.second, self.total = first, second, first + second
        self.peak = first / self.total
        stairs = _integer("cycle_first_stair_count", cycle_first_stair_count, 0)
        self.stairs = (
            stairs,
            stairs
            if cycle_second_stair_count is None
            else _integer("cycle_second_stair_count", cycle_second_stair_count, 0),
        )
        self.decay_step_size = _number("decay_step_size", decay_step_size)
        if decay_step_size < 0:
            raise ConfigError(f"decay_step_size = {decay_step_size!r} must be >= 0 (0: no decay)")
        self.decay_lr_rate = _number("decay_lr_rate", decay_lr_rate)
        self.decay_mom_rate = _number("decay_mom_rate", decay_mom_rate)
        no_decay = math.isclose(decay_step_size, 0)
        self.decays_lr = not no_decay and not math.isclose(decay_lr_rate, 0)
        self.decays_mom = not no_decay and not math.isclose(decay_mom_rate, 0)
        self.min_lrs = _per_group(groups, cycle_min_lr, "cycle_min_lr")
        self.max_lrs = _per_group(groups, cycle_max_lr, "cycle_max_lr")
        self.cycle_momentum = _flag("cycle_momentum", cycle_momentum)
        if self.cycle_momentum and not all("betas" in g for g in groups):
            _log.warning("OneCycle: cycle_momentum is off, because %s has no betas", type(optimizer).__name__)
            self.cycle_momentum = False
        if self.cycle_momentum:
            self.min_moms = _per_group(groups, cycle_min_mom, "cycle_min_mom")
            self.max_moms = _per_group(groups, cycle_max_mom, "cycle_max_mom")
        if last_batch_iteration == -1:
            for group, lr in zip(groups, self.min_lrs, strict=True):
                self._set_rate(group, lr)
            if self.cycle_momentum:
                self._set_momentum(self.min_moms)

    @staticmethod
    def _set_rate(group: dict[str, Any], lr: float) -> None:
        if hasattr(group["lr"], "fill_"):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr

    def _set_momentum(self, moms: Sequence[float]) -> None:
        for group, mom in zip(_groups(self.optimizer), moms, strict=False):
            group["betas"] = (mom, 0.99)  # DeepSpeed fixes the second beta

    def _scale(self) -> float:
        """Position between min (0) and max (1) at the current index."""
        i = self.last_batch_iteration + 1
        cycle = math.floor(1 + i / self.total)
        x = 1.0 + i / self.total - cycle
        rising = x <= self.peak
        stairs = self.stairs[0 if rising else 1]
        if stairs > 0:  # from the integer offset: the float position at a boundary may lie one stair too low
            offset = i % self.total
            up = offset <= self.first
            position = offset * stairs / self.first if up else (self.total - offset) * stairs / self.second
            return math.floor(position) / stairs
        return x / self.peak if rising else (x - 1) / (self.peak - 1)

    def _decay_interval(self) -> float:
        return float((self.last_batch_iteration - self.total + 1) / self.decay_step_size)

    def get_lr(self) -> list[Any]:
        if self.last_batch_iteration < self.total:
            scale = self._scale()
            return [low + (high - low) * scale for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        if not self.decays_lr:
            return self.min_lrs
        factor = 1 + self.decay_lr_rate * self._decay_interval()
        return [low / factor for low in self.min_lrs]

    def get_mom(self) -> list[Any] | None:
        """(beta1, 0.99) per parameter group, or None when momentum is not cycled."""
        if not self.cycle_momentum:
            return None
        if self.last_batch_iteration < self.total:
            scale = self._scale()
            return [(high - (high - low) * scale, 0.99) for low, high in zip(self.min_moms, self.max_moms, strict=True)]
        factor = 1 + self.decay_mom_rate * self._decay_interval() if self.decays_mom else None
        return [(high if factor is None else high * factor, 0.99) for high in self.max_moms]

    def step(self, batch_iteration: int | None = None) -> None:
        super().step(batch_iteration)
        if self.cycle_momentum:
            self._set_momentum([mom for mom, _ in self.get_mom() or ()])


class _Warmup(_Schedule):
    """The rising part that three schedules share: 0 at index 0, 1 at index warmup_num_steps."""

    def __init__(self, optimizer: Any, warmup_num_steps: int, warmup_type: str, last_batch_iteration: int) -> None:
        super().__init__(optimizer, last_batch_iteration)
        # 0 is what Hugging Face fills in for "auto" without warm-up; DeepSpeed warms up for two steps then, too.
        self.warmup_num_steps = max(2, _integer("warmup_num_steps", warmup_num_steps, 0))
        self.warmup_type = _warmup_type(warmup_type)
        self._inverse_log = 1.0 / math.log(self.warmup_num_steps)

    def step(self, last_batch_iteration: int | None = None) -> None:  # DeepSpeed's name of it here
        super().step(last_batch_iteration)

    def _rise(self) -> float:
        i = self.last_batch_iteration
        return self._inverse_log * math.log(i + 1) if self.warmup_type == "log" else i / self.warmup_num_steps


class WarmupLR(_Warmup):
    """min -> max over warmup_num_steps (logarithmic or linear), then constant. warmup_max_lr None: the optimizer's own
    rate."""

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: float | list[float] = 0.0,
        warmup_max_lr: float | list[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        groups = self.param_groups
        self.min_lrs = _per_group(groups, warmup_min_lr, "warmup_min_lr")
        self.max_lrs = (
            [g["lr"] for g in groups] if warmup_max_lr is None else _per_group(groups, warmup_max_lr, "warmup_max_lr")
        )
        self.max_lrs = [lr.clone() if hasattr(lr, "clone") else lr for lr in self.max_lrs]
        self.delta_lrs = [high - low for high, low in zip(self.max_lrs, self.min_lrs, strict=True)]
        if last_batch_iteration == -1:
            self._apply(self.get_lr())

    def _gamma(self) -> float:
        return self._rise() if self.last_batch_iteration < self.warmup_num_steps else 1.0

    def get_lr(self) -> list[Any]:
        if self.last_batch_iteration < 0:
            return self.min_lrs
        gamma = self._gamma()
        return [low + (delta * gamma) for low, delta in zip(self.min_lrs, self.delta_lrs, strict=True)]


class WarmupDecayLR(WarmupLR):
    """WarmupLR, then linearly down to min at total_num_steps."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: float | list[float] = 0.0,
        warmup_max_lr: float | list[float] | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _number("total_num_steps", total_num_steps)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        _warn_short(self.total_num_steps, self.warmup_num_steps)

    def _gamma(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return self._rise()
        left = float(self.total_num_steps - self.last_batch_iteration)
        return max(0.0, left / float(max(1.0, self.total_num_steps - self.warmup_num_steps)))


class WarmupCosineLR(_Warmup):
    """The optimizer's own rate times a ratio: warmup_min_ratio -> 1 over warmup_num_steps, then a half cosine down to
    cos_min_ratio."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        self.total_num_steps = _number("total_num_steps", total_num_steps)
        self.warmup_min_ratio = _number("warmup_min_ratio", warmup_min_ratio)
        self.cos_min_ratio = _number("cos_min_ratio", cos_min_ratio)
        self.org_lrs = [g["lr"].clone() if hasattr(g["lr"], "clone") else g["lr"] for g in self.param_groups]
        _warn_short(self.total_num_steps, self.warmup_num_steps)
        if last_batch_iteration == -1:
            self._apply(self.get_lr())

    def get_lr_ratio(self) -> float:
        """The factor of the optimizer's own rates at the current index."""
        i = self.last_batch_iteration
        if i < 0:
            return 0.0
        if i < self.warmup_num_steps:
            return float(self.warmup_min_ratio + self._rise() * (1.0 - self.warmup_min_ratio))
        done = min(1.0, (i - self.warmup_num_steps + 1) / max(1, self.total_num_steps - self.warmup_num_steps))
        cosine = (1 + math.cos(math.pi * done)) / 2
        return max(0.0, float(self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine))

    def get_lr(self) -> list[Any]:
        if self.last_batch_iteration < 0:
            return [0.0] * len(self.org_lrs)
        ratio = self.get_lr_ratio()
        return [lr * ratio for lr in self.org_lrs]


def _warn_short(total: float, warmup: int) -> None:
    if total < warmup:
        _log.warning(
            "total_num_steps %s is less than warmup_num_steps %s: the schedule never leaves its warm-up", total, warmup
        )


# ---- what a training loop calls --------------------------------------------------------------------------------------
@functools.lru_cache(maxsize=64)
def _signature(step: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(step)
    except (TypeError, ValueError):  # of a built-in
        return None


def stepper(schedule: Scheduler, arguments: dict[str, Any], samples: int) -> Callable[[], None]:
    """What calls schedule.step(**arguments). A step() that wants an argument (Megatron-LM's) gets the samples of a step
    where there are none, as in DeepSpeed, but no `metrics` (ReduceLROnPlateau's), which they are not. ArgumentError,
    before anything is done, if step() does not take these."""
    step = schedule.step
    signature = _signature(getattr(step, "__func__", step))
    if signature is None:
        return functools.partial(step, **arguments)
    of = (None,) * inspect.ismethod(step)
    try:
        signature.bind(*of, **arguments)
        return functools.partial(step, **arguments)
    except TypeError as exc:
        why = exc
    if not arguments and "metrics" in signature.parameters:
        raise ArgumentError(
            f"engine.step(): {type(schedule).__name__}.step(metrics) follows a value that a step does not know; give it"
            ' each time, alike on all ranks: engine.step(lr_kwargs={"metrics": loss}), or leave the schedule out of'
            " initialize and call its step(loss) yourself, after an evaluation for example"
        )
    if not arguments:
        with contextlib.suppress(TypeError):
            signature.bind(*of, samples)
            return functools.partial(step, samples)
    names = [n for n in signature.parameters if n != "self"]
    raise ArgumentError(
        f"engine.step(lr_kwargs={arguments!r}): {type(schedule).__name__}.step() does not take them ({why}); its"
        f" arguments are {', '.join(names) or 'none'}"
    ) from why


# ---- from the configuration ------------------------------------------------------------------------------------------


def scheduler_class(name: str) -> type[Any]:
    """The class of a schedule: one of the five, or a class of torch.optim.lr_scheduler. Raises ConfigError."""
    if name in VALID_LR_SCHEDULES:
        ours: type[_Schedule] = globals()[name]
        return ours
    from torch.optim import lr_scheduler

    known = [
        n
        for n, c in vars(lr_scheduler).items()
        if inspect.isclass(c)
        and issubclass(c, lr_scheduler.LRScheduler)
        and not n.startswith("_")
        and n != "LRScheduler"
    ]
    if name in known:
        theirs: type[lr_scheduler.LRScheduler] = getattr(lr_scheduler, name)
        return theirs
    raise ConfigError(
        f'scheduler.type = "{name}" is neither one of {", ".join(VALID_LR_SCHEDULES)} nor a class of '
        f"torch.optim.lr_scheduler.{did_you_mean(name, [*VALID_LR_SCHEDULES, *known])}"
    )


class _Probe:
    """An optimizer with nothing in it, for checking arguments before there is a model."""

    def __init__(self, ngroups: int) -> None:
        self.param_groups = [{"lr": 1e-3, "betas": (0.9, 0.999)} for _ in range(ngroups)]


def check_params(name: str, params: dict[str, Any]) -> None:
    """Raises ConfigError if one of the five schedules would refuse these arguments. Names are checked by the caller;
    arguments of torch's classes are checked when they are built."""
    if name not in VALID_LR_SCHEDULES:
        return
    cls = scheduler_class(name)
    try:
        inspect.signature(cls).bind(None, **params)
    except TypeError:
        return  # unknown or missing names: reported by the caller
    lists = [v for v in params.values() if isinstance(v, (list, tuple))]
    try:
        cls(_Probe(max(1, len(lists[0])) if lists else 1), **params)
    except ConfigError as exc:
        raise ConfigError(f"scheduler.params.{exc}") from exc


def build_scheduler(type: str, params: dict[str, Any] | None, optimizer: Any) -> Any:
    """The schedule of a configuration: `type` and `params` of its scheduler section, on an optimizer (for torch's
    classes a torch.optim.Optimizer). Raises ConfigError for an unknown type or wrong arguments."""
    cls = scheduler_class(type)
    try:
        return cls(optimizer, **(params or {}))
    except (TypeError, ValueError) as exc:
        if isinstance(exc, ConfigError):
            raise
        raise ConfigError(f"scheduler {type} does not take {params!r}: {exc}") from exc
