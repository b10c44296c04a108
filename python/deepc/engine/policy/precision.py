"""Number formats of training: which one a configuration asks for, the loss scaler that goes with it, when
`"precision": "auto"` changes it, and what a device can compute in. Knows nothing of engines."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ...core import cpu
from ...core.cpu import ComputePath, bf16_arithmetic, cpu_flags, fp16_arithmetic
from ...core.dtypes import BFLOAT16, FLOAT16, TRAINED
from ...core.dtypes import dtype as dtype_named
from ...core.ops import dtype_of
from ...core.ops import torch_dtype as _torch_dtype
from ...errors import CheckpointError
from ...optim.scaling import AutocastLossScaler, DynamicLossScaler, LossScaleError, StaticLossScaler

if TYPE_CHECKING:
    import torch

    from ...config.tree import Config

__all__ = [
    "AutoPrecision",
    "ComputePath",
    "DynamicLossScaler",
    "LossScaleError",
    "StaticLossScaler",
    "bf16_arithmetic",
    "choose_dtype",
    "compute_path",
    "cpu_flags",
    "fast_matmul",
    "fp16_arithmetic",
    "make_scaler",
    "name_of",
    "recommended_dtype",
    "torch_dtype",
]


# ---- what a configuration asks for -----------------------------------------------------------------------------------
def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype of "fp32", "bf16" or "fp16"."""
    return _torch_dtype(dtype_named(name, TRAINED))


def name_of(dtype: torch.dtype) -> str:
    """The inverse of torch_dtype."""
    return dtype_of(dtype).short


def choose_dtype(config: Config) -> torch.dtype:
    """The dtype of parameters and activations that a configuration asks for."""
    return torch_dtype(config.dtype)


def make_scaler(config: Config) -> StaticLossScaler | DynamicLossScaler | None:
    """The scaler of a configuration; None when nothing is computed in fp16 (bf16 and fp32 need none)."""
    fp16 = config.fp16
    if not fp16.enabled:
        return AutocastLossScaler() if config.autocast == FLOAT16.short else None
    if not fp16.dynamic:
        return StaticLossScaler(fp16.loss_scale)
    return DynamicLossScaler(
        2.0**fp16.initial_scale_power,
        fp16.loss_scale_window,
        fp16.min_loss_scale,
        fp16.hysteresis,
        fp16.consecutive_hysteresis,
    )


def fast_matmul() -> bool:
    """Products of fp32 and bf16 matrices on CPUs are deepc's from now on, for the whole process, where that is faster:
    AMD's processors with AVX-512 (Zen 4 and 5, of which torch's MKL uses AVX2; bf16: Zen 4, and those without bf16
    instructions). Returns whether any are. deepc's engines and `deepc.fuse` do it themselves; `DEEPC_MATMUL=0` forbids
    it."""
    import torch

    from ...nn.aten import matmul

    return bool(matmul.choose_own(torch.device("cpu")))


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


# ---- what a device can do --------------------------------------------------------------------------------------------
def compute_path(dtype: str, device_type: str = "cpu") -> ComputePath:
    """The sane path for products in "fp32", "bf16" or "fp16" on "cpu" or "cuda"."""
    if device_type != "cuda" or dtype_named(dtype, TRAINED) not in (BFLOAT16, FLOAT16):
        return cpu.compute_path(dtype)
    import torch

    native = dtype == "fp16" or torch.cuda.is_bf16_supported(including_emulation=False)
    return ComputePath(dtype, native, "the GPU has it" if native else "the GPU is older than sm_80")


def recommended_dtype(device_type: str = "cpu") -> tuple[str, str]:
    """("bf16" or "fp32", why): bf16 where the hardware computes in it, else fp32."""
    path = compute_path("bf16", device_type)
    return ("bf16" if path.native else "fp32"), path.reason
