"""Loss scaling for fp16: P. Micikevicius et al., "Mixed precision training" (2018), section 3.2, with DeepSpeed
0.19.8's window, hysteresis and minimum. Pure arithmetic: no tensors, no engine."""

from __future__ import annotations

import logging
from typing import Any

from ..errors import ArgumentError, CheckpointError, DeepcError

_log = logging.getLogger("deepc")


class LossScaleError(DeepcError):
    """Gradients overflow at the smallest allowed loss scale: the run can't go on."""


class StaticLossScaler:
    """A fixed loss scale. An overflowed step is still skipped by the engine; the scale stays."""

    dynamic = False

    def __init__(self, scale: float = 1.0) -> None:
        if not scale > 0:
            raise ArgumentError(f"loss scale {scale!r} must be > 0")
        self.loss_scale = float(scale)

    @property
    def cur_scale(self) -> float:
        """loss_scale by DeepSpeed's name, as the other properties of scalers are."""
        return self.loss_scale

    def update_scale(self, overflow: bool) -> None:
        """Once per optimizer step; `overflow`: a gradient was not finite, and the step is skipped on every rank."""
        if overflow:
            _log.warning("gradients overflowed at the static loss scale %g: the step is skipped", self.loss_scale)

    def state_dict(self) -> dict[str, Any]:
        return {"loss_scale": self.loss_scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the scale of a static scaler; the state of a dynamic one is refused, because the configuration
        changed."""
        check_scaler_state(self, state)
        self.loss_scale = float(state["loss_scale"])


class DynamicLossScaler:
    """A loss scale that halves on overflow and doubles after `window` steps without one.

    The first `hysteresis` - 1 overflows only use up the hysteresis. It is refilled when the scale grows, or, with
    `consecutive_hysteresis`, at every step without overflow. An overflow at `min_scale` with the hysteresis used up
    raises LossScaleError, as DeepSpeed does with ZeRO; unless `raises` is False, as its stage 0: the step is skipped
    then, and the scale stays. All ranks must call update_scale with the same value."""

    dynamic = True
    raises = True
    FACTOR = 2.0

    def __init__(
        self,
        initial_scale: float = 2.0**16,
        window: int = 1000,
        min_scale: float = 1.0,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
    ) -> None:
        if not initial_scale > 0 or not min_scale > 0 or window < 1 or hysteresis < 1:
            raise ArgumentError(
                f"initial scale {initial_scale!r} and minimum {min_scale!r} must be > 0, window {window!r} and"
                f" hysteresis {hysteresis!r} >= 1"
            )
        self.loss_scale = float(initial_scale)
        self.window, self.min_scale, self.hysteresis = int(window), float(min_scale), int(hysteresis)
        self.consecutive_hysteresis = bool(consecutive_hysteresis)
        self.hysteresis_left = self.hysteresis
        self.step_count = 0
        self.last_overflow_step = -1

    @property
    def cur_scale(self) -> float:
        return self.loss_scale

    @property
    def cur_iter(self) -> int:
        return self.step_count

    @property
    def scale_window(self) -> int:
        return self.window

    def update_scale(self, overflow: bool) -> None:
        """Once per optimizer step, after the decision to apply (False) or to skip it (True)."""
        if overflow:
            self._overflowed()
            self.last_overflow_step = self.step_count
        else:
            self._stable()
        self.step_count += 1

    def _overflowed(self) -> None:
        if self.hysteresis > 1 and self.hysteresis_left > 1:
            self.hysteresis_left -= 1
            _log.info(
                "gradients overflowed at loss scale %g: the step is skipped, hysteresis %d left",
                self.loss_scale,
                self.hysteresis_left,
            )
            return
        if self.loss_scale == self.min_scale and not self.raises:
            _log.warning("gradients overflowed at the smallest loss scale %g: the step is skipped", self.loss_scale)
            return
        if self.loss_scale == self.min_scale:
            raise LossScaleError(
                f"gradients overflow in fp16 at the smallest loss scale (fp16.min_loss_scale = {self.min_scale:g}): the"
                " model diverges or its activations exceed 65504. Use bf16, a smaller learning rate, or a smaller"
                " fp16.min_loss_scale."
            )
        reduced = max(self.loss_scale / self.FACTOR, self.min_scale)
        _log.info("gradients overflowed: the step is skipped, loss scale %g -> %g", self.loss_scale, reduced)
        self.loss_scale = reduced

    def _stable(self) -> None:
        if self.consecutive_hysteresis:
            self.hysteresis_left = self.hysteresis
        interval = self.step_count - self.last_overflow_step - 1
        if interval > 0 and interval % self.window == 0:
            self.hysteresis_left = self.hysteresis
            self.loss_scale *= self.FACTOR

    def state_dict(self) -> dict[str, Any]:
        return {
            "loss_scale": self.loss_scale,
            "hysteresis_left": self.hysteresis_left,
            "step_count": self.step_count,
            "last_overflow_step": self.last_overflow_step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the running state; window, minimum and hysteresis are those of the present configuration."""
        check_scaler_state(self, state)
        self.loss_scale = float(state["loss_scale"])
        self.hysteresis_left = min(int(state["hysteresis_left"]), self.hysteresis)
        self.step_count, self.last_overflow_step = int(state["step_count"]), int(state["last_overflow_step"])


class AutocastLossScaler(DynamicLossScaler):
    """That of torch.amp.GradScaler, with its numbers: halves at every overflow, and doubles at every 2000th step
    without one since the last. DeepSpeed's has one step more."""

    def __init__(self) -> None:
        super().__init__(2.0**16, window=2000, min_scale=2.0**-126, hysteresis=1)

    def _stable(self) -> None:
        if (self.step_count - self.last_overflow_step) % self.window == 0:
            self.loss_scale *= self.FACTOR


def check_scaler_state(scaler: Any, state: dict[str, Any]) -> None:
    if set(state) != set(scaler.state_dict()):
        raise CheckpointError(
            f"the saved loss-scaler state has {sorted(state)}, {type(scaler).__name__} needs "
            f"{sorted(scaler.state_dict())}: it was saved with another fp16.loss_scale (0 is "
            "dynamic). Use the same, or don't load the optimizer state."
        )
