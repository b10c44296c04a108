"""Number formats of training: which one a configuration asks for, what this machine can compute in, and loss scaling
for fp16.

Loss scaling: P. Micikevicius et al., "Mixed precision training" (2018), section 3.2, with DeepSpeed 0.19.8's window,
hysteresis and minimum. Knows nothing of engines; torch is imported when a torch object is asked for."""

from __future__ import annotations

import functools
import logging
import math
import os
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, CheckpointError, DeepcError

if TYPE_CHECKING:
    import torch

    from ..config.tree import Config

_log = logging.getLogger("deepc")


# ---- loss scaling ----------------------------------------------------------------------------------------------------


class LossScaleError(DeepcError):
    """Gradients overflow at the smallest allowed loss scale: the run can't go on."""


class StaticLossScaler:
    """A fixed loss scale. An overflowed step is still skipped by the engine; the scale stays."""

    dynamic = False

    def __init__(self, scale: float = 1.0) -> None:
        if not scale > 0:
            raise ArgumentError(f"loss scale {scale!r} must be > 0")
        self.loss_scale = float(scale)

    def update_scale(self, overflow: bool) -> None:
        """Once per optimizer step; `overflow`: a gradient was not finite, and the step is skipped on every rank."""
        if overflow:
            _log.warning("gradients overflowed at the static loss scale %g: the step is skipped", self.loss_scale)

    def state_dict(self) -> dict[str, Any]:
        return {"loss_scale": self.loss_scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the scale of a static scaler; the state of a dynamic one is refused, because the configuration
        changed."""
        _same_keys(self, state)
        self.loss_scale = float(state["loss_scale"])


class DynamicLossScaler:
    """A loss scale that halves on overflow and doubles after `window` steps without one.

    The first `hysteresis` - 1 overflows only use up the hysteresis. It is refilled when the scale grows, or, with
    `consecutive_hysteresis`, at every step without overflow. An overflow at `min_scale` with the hysteresis used up
    raises LossScaleError, as DeepSpeed does. All ranks must call update_scale with the same value."""

    dynamic = True
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
        _same_keys(self, state)
        self.loss_scale = float(state["loss_scale"])
        self.hysteresis_left = min(int(state["hysteresis_left"]), self.hysteresis)
        self.step_count, self.last_overflow_step = int(state["step_count"]), int(state["last_overflow_step"])


def _same_keys(scaler: Any, state: dict[str, Any]) -> None:
    if set(state) != set(scaler.state_dict()):
        raise CheckpointError(
            f"the saved loss-scaler state has {sorted(state)}, {type(scaler).__name__} needs "
            f"{sorted(scaler.state_dict())}: it was saved with another fp16.loss_scale (0 is "
            "dynamic). Use the same, or don't load the optimizer state."
        )


def make_scaler(config: Config) -> StaticLossScaler | DynamicLossScaler | None:
    """The scaler of a configuration; None when fp16 is off (bf16 and fp32 need none)."""
    fp16 = config.fp16
    if not fp16.enabled:
        return None
    if not fp16.dynamic:
        return StaticLossScaler(fp16.loss_scale)
    return DynamicLossScaler(
        2.0**fp16.initial_scale_power,
        fp16.loss_scale_window,
        fp16.min_loss_scale,
        fp16.hysteresis,
        fp16.consecutive_hysteresis,
    )


# ---- changing the precision while training ---------------------------------------------------------------------------


class AutoPrecision:
    """When `"precision": "auto"` computes in `fast` ("bf16") and when in fp32. Pure arithmetic on what all ranks know
    of each step, so that all decide alike.

    From fast to fp32: `overflow_steps` steps in a row that were skipped or had a loss that is not finite, or
    `divergence_steps` steps in a row whose loss exceeds the median of the last WINDOW by more than (`divergence_factor`
    - 1) times its magnitude. Back: after `fp32_steps` steps, the last of which was good; that number doubles with every
    fall, and is as configured again after as many good steps in the fast mode as the last stay took."""

    WINDOW = 64  # losses that the median is of
    ENOUGH = 16  # with fewer nothing is called divergence

    def __init__(
        self,
        fast: str,
        overflow_steps: int = 2,
        divergence_factor: float = 2.0,
        divergence_steps: int = 10,
        fp32_steps: int = 100,
    ) -> None:
        self.fast, self.mode = fast, fast
        self.overflow_steps, self.fp32_steps = overflow_steps, fp32_steps
        self.divergence_factor, self.divergence_steps = divergence_factor, divergence_steps
        self.stay = fp32_steps  # of the next fall
        self.in_mode = 0  # steps since the last change; in the fast mode, good ones
        self.bad = self.high = 0  # in a row
        self.losses: list[float] = []

    def after_step(self, applied: bool, loss: float | None) -> str | None:
        """Once per optimizer step: was it applied; the mean loss of all ranks, None if unknown. Returns why `mode` has
        changed, or None."""
        good = applied and (loss is None or math.isfinite(loss))
        self.bad = 0 if good else self.bad + 1
        if self.mode == self.fast == "fp32":
            return None
        if good and loss is not None:
            self._note(loss)
        if self.mode != self.fast:
            self.in_mode += 1
            return self._back() if good and self.in_mode >= self.stay // 2 else None
        self.in_mode += good
        if self.in_mode >= self.stay // 2:
            self.stay = self.fp32_steps
        if self.bad >= self.overflow_steps:
            return self._fall(
                f"{self.bad} step{'s' * (self.bad > 1)} in a row with gradients or a loss that are not finite"
            )
        if self.high >= self.divergence_steps:
            return self._fall(
                f"the loss has been above {self.divergence_factor:g} times the median of the last {len(self.losses)}"
                f" for {self.high} steps"
            )
        return None

    def _note(self, loss: float) -> None:
        """In fp32 every loss counts: after it, the median is of what fp32 gives."""
        import statistics  # 3 ms, for this policy alone

        middle = statistics.median(self.losses) if len(self.losses) >= self.ENOUGH else math.inf
        diverging = (
            self.mode == self.fast
            and self.divergence_factor > 0
            and loss - middle > (self.divergence_factor - 1) * abs(middle)
        )
        self.high = self.high + 1 if diverging else 0
        if not diverging:
            self.losses = [*self.losses[1 - self.WINDOW :], loss]

    def _fall(self, why: str) -> str:
        why = f"{why}; {self.stay} steps in fp32, then {self.fast} again"
        self._enter("fp32")
        self.stay *= 2
        return why

    def _back(self) -> str:
        why = f"{self.in_mode} steps in fp32 are over"
        self._enter(self.fast)
        return why

    def _enter(self, mode: str) -> None:
        self.mode, self.in_mode, self.bad, self.high = mode, 0, 0, 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "stay": self.stay,
            "in_mode": self.in_mode,
            "bad": self.bad,
            "high": self.high,
            "losses": list(self.losses),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the running state; the thresholds are those of the present configuration. Where the fastest mode is
        fp32, that stays the mode."""
        if set(state) != set(self.state_dict()):
            raise CheckpointError(
                f'the saved state of precision "auto" has {sorted(state)} and needs {sorted(self.state_dict())}; it was'
                " saved by another version of deepc: pass load_optimizer_states=False"
            )
        self.mode = state["mode"] if state["mode"] in (self.fast, "fp32") else self.fast
        self.stay, self.in_mode, self.bad, self.high = (int(state[k]) for k in ("stay", "in_mode", "bad", "high"))
        self.losses = [float(x) for x in state["losses"]]


# ---- dtypes ----------------------------------------------------------------------------------------------------------


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype of "fp32", "bf16" or "fp16"."""
    import torch

    try:
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
    except KeyError:
        raise ArgumentError(f"{name!r} is not one of fp32, bf16, fp16") from None


def name_of(dtype: torch.dtype) -> str:
    """The inverse of torch_dtype."""
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[str(dtype).removeprefix("torch.")]


def choose_dtype(config: Config) -> torch.dtype:
    """The dtype of parameters and activations that a configuration asks for."""
    return torch_dtype(config.dtype)


# ---- what the processor can do ---------------------------------------------------------------------------------------

# oneDNN's levels of ONEDNN_MAX_CPU_ISA, in rising order; an unknown value means no limit, as in oneDNN
_ONEDNN_LEVELS = (
    "SSE41",
    "AVX",
    "AVX2",
    "AVX2_VNNI",
    "AVX2_VNNI_2",
    "AVX512_CORE",
    "AVX512_CORE_VNNI",
    "AVX512_CORE_BF16",
    "AVX10_1_512",
    "AVX512_CORE_FP16",
    "AVX512_CORE_AMX",
    "AVX10_1_512_AMX",
    "AVX512_CORE_AMX_FP16",
    "AVX10_1_512_AMX_FP16",
)

# per dtype: (flag of /proc/cpuinfo, lowest oneDNN level that uses it)
_X86 = {
    "bf16": (("avx512_bf16", "AVX512_CORE_BF16"), ("amx_bf16", "AVX512_CORE_AMX")),
    "fp16": (("avx512_fp16", "AVX512_CORE_FP16"), ("amx_fp16", "AVX512_CORE_AMX_FP16")),
}
_ARM = {"bf16": ("bf16",), "fp16": ("asimdhp",)}


def cpu_flags(path: str = "/proc/cpuinfo") -> frozenset[str]:
    """The processor's feature flags as the kernel names them; torch's own list where there is no /proc/cpuinfo."""
    try:
        with open(path, encoding="ascii", errors="replace") as f:
            for line in f:
                name, _, rest = line.partition(":")
                if name.strip() in ("flags", "Features"):
                    return frozenset(rest.split())
    except OSError:
        pass
    import torch

    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return frozenset(k.lower() for k, v in capabilities.items() if v is True)


def _arithmetic(dtype: str, flags: frozenset[str], machine: str, limit: str) -> tuple[bool, str]:
    """Pure part of *_arithmetic(): (has it, why)."""
    if machine.lower() in ("aarch64", "arm64"):
        found = [f for f in _ARM[dtype] if f in flags]
        return bool(found), (
            f"the processor has {', '.join(found)}" if found else f"the processor has no {dtype} instructions"
        )
    rows = _X86[dtype]
    found = [f for f, _ in rows if f in flags]
    if not found:
        return False, f"the processor has neither {' nor '.join(f for f, _ in rows)}"
    level = _ONEDNN_LEVELS.index(limit.upper()) if limit.upper() in _ONEDNN_LEVELS else len(_ONEDNN_LEVELS)
    usable = [f for f, need in rows if f in flags and level >= _ONEDNN_LEVELS.index(need)]
    if not usable:
        return False, f"the processor has {', '.join(found)}, but ONEDNN_MAX_CPU_ISA={limit} forbids it"
    return True, f"the processor has {', '.join(usable)}"


def _here(dtype: str) -> tuple[bool, str]:
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "ALL"
    return _arithmetic(dtype, _flags_here(), platform.machine(), limit)


@functools.cache
def _flags_here() -> frozenset[str]:
    return cpu_flags()


def bf16_arithmetic() -> tuple[bool, str]:
    """(whether matrix products in bf16 run on instructions of this CPU, the reason in words). Without them torch's
    product is emulated or runs its reference loop, up to 100 times slower than fp32: take compute_path() instead."""
    return _here("bf16")


def fp16_arithmetic() -> tuple[bool, str]:
    """The same for fp16."""
    return _here("fp16")


@dataclass(frozen=True)
class ComputePath:
    """How products of a dtype are best computed. `native`: hand torch the tensors as they are. Otherwise "upcast":
    convert panels of the operands to fp32, multiply in fp32, round the result once to `dtype`; same memory for
    parameters, at least half of fp32's speed.
    """

    dtype: str
    native: bool
    reason: str

    @property
    def name(self) -> str:
        return "native" if self.native else "upcast"

    def __str__(self) -> str:
        how = "native products" if self.native else "operands are converted to fp32 panel by panel"
        return f"{self.dtype}: {how} ({self.reason})"


def compute_path(dtype: str, device_type: str = "cpu") -> ComputePath:
    """The sane path for products in "fp32", "bf16" or "fp16" on "cpu" or "cuda"."""
    if dtype == "fp32":
        return ComputePath(dtype, True, "fp32 is native everywhere")
    if dtype not in _X86:
        raise ArgumentError(f"{dtype!r} is not one of fp32, bf16, fp16")
    if device_type == "cuda":
        import torch

        native = dtype == "fp16" or torch.cuda.is_bf16_supported(including_emulation=False)
        return ComputePath(dtype, native, "the GPU has it" if native else "the GPU is older than sm_80")
    native, reason = _here(dtype)
    return ComputePath(dtype, native, reason)


def recommended_dtype(device_type: str = "cpu") -> tuple[str, str]:
    """("bf16" or "fp32", why): bf16 where the hardware computes in it, else fp32."""
    path = compute_path("bf16", device_type)
    return ("bf16" if path.native else "fp32"), path.reason
