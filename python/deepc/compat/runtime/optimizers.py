"""DeepSpeed's optimizer classes over deepc.optim: same arguments, one C call per step, nothing compiled on the
machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from ...errors import UnsupportedError
from ...optim import Adagrad, Adam, AdamW, Lamb, Lion, Muon, OneBitAdam, OneBitLamb
from ...optim import ZeroOneAdam as _ZeroOneAdam
from ...optim.onebit.adam import Frozen
from ...optim.onebit.dropin import OneBitOptimizer
from ...optim.onebit.freeze import check_freeze_step
from ...optim.scaling import DynamicLossScaler
from ...zero.step.update import ShardedOptimizer

if TYPE_CHECKING:
    from ...engine.base import EngineBase


def _plain(name: str, bias_correction: bool) -> None:
    if not bias_correction:
        raise UnsupportedError(
            f"{name}(bias_correction=False) does not exist in deepc; leave it True, or pass a torch optimizer with "
            "zero_allow_untested_optimizer"
        )


class _Adam(AdamW):
    """AdamW, or Adam with L2 decay, by an argument."""

    @property
    def adam_w_mode(self) -> bool:
        """Whether weight decay is decoupled."""
        return self._decoupled

    def _set_mode(self, decoupled: bool) -> None:
        self._decoupled = decoupled
        self.defaults["decoupled_weight_decay"] = decoupled
        for group in self.param_groups:
            group["decoupled_weight_decay"] = decoupled


class DeepSpeedCPUAdam(_Adam):
    """deepspeed.ops.adam.DeepSpeedCPUAdam. Betas and eps of param groups are kept (Accelerate passes groups).
    fp32_optimizer_states: the moments of 16-bit parameters are fp32; False: they have the parameter's dtype, rounded to
    nearest at every step. An engine's masters are fp32, and so are their moments, whatever this says."""

    fp32_optimizer_states = True

    def __init__(
        self,
        model_params: Any,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _plain("DeepSpeedCPUAdam", bias_correction)
        self.fp32_optimizer_states = self._fp32_moments = fp32_optimizer_states
        super().__init__(model_params, lr, betas, eps, weight_decay, amsgrad)
        self._set_mode(adamw_mode)


class FusedAdam(_Adam):
    """deepspeed.ops.adam.FusedAdam, on CPU and CUDA."""

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _plain("FusedAdam", bias_correction)
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad)
        self._set_mode(adam_w_mode)


class DeepSpeedCPUAdagrad(Adagrad):
    """deepspeed.ops.adagrad.DeepSpeedCPUAdagrad. fp32_optimizer_states=False: bf16, rounded stochastically."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        form = None if fp32_optimizer_states else "bf16"
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay, state_dtype=form)


class DeepSpeedCPULion(Lion):
    """deepspeed.ops.lion.DeepSpeedCPULion, with its defaults. fp32_optimizer_states=False: bf16, rounded
    stochastically."""

    def __init__(
        self,
        model_params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr, betas, weight_decay, state_dtype="fp32" if fp32_optimizer_states else "bf16")


class FusedLion(Lion):
    """deepspeed.ops.lion.FusedLion, on CPU and CUDA."""

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, weight_decay)


class FusedLamb(Lamb):
    """deepspeed.ops.lamb.FusedLamb. Moments are divided by their bias corrections before the norm is taken,
    as in the paper; DeepSpeed corrects the step length."""

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        _plain("FusedLamb", bias_correction)
        for name, asked in (
            ("eps_inside_sqrt", eps_inside_sqrt),
            ("max_grad_norm", max_grad_norm),
            ("amsgrad", amsgrad),
        ):
            if asked:
                raise UnsupportedError(
                    f"FusedLamb({name}={asked!r}) does not exist in deepc; clip with gradient_clipping"
                )
        super().__init__(params, lr, betas, eps, weight_decay, max_coeff=max_coeff, min_coeff=min_coeff)


# ---- 1 bit -----------------------------------------------------------------------------------------------------------
class _Named(OneBitOptimizer):
    """deepspeed: the engine, which is not needed."""

    deepspeed: Any = None

    @property
    def size(self) -> int:
        """Ranks that exchange momentum."""
        return int(self._made().exchange.world)

    @property
    def freeze_step(self) -> int | str:
        """The last step of the warm-up; may be set until then, and before a checkpoint is loaded."""
        return cast("int | str", self.options["freeze_step"])

    @freeze_step.setter
    def freeze_step(self, step: int) -> None:
        check_freeze_step("freeze_step", step)
        self.options["freeze_step"] = step
        if isinstance(self.method, Frozen):
            self.method.freeze.step = step

    @property
    def worker_errors(self) -> list[torch.Tensor]:
        """What this rank's payloads have not carried yet. A checkpoint has it (DeepSpeed's list is empty after one)."""
        return self._errors_of("worker")

    @property
    def server_errors(self) -> list[torch.Tensor]:
        """The same of the slices that this rank adds up."""
        return self._errors_of("server")

    def _errors_of(self, whose: str) -> list[torch.Tensor]:
        errors = {} if self.method is None else self.method.errors()
        return [errors[whose]] if errors else []

    @property
    def _compresses(self) -> bool:
        return self.method is not None and bool(getattr(self.method, "frozen_at", 0))


class OnebitAdam(_Named, OneBitAdam):
    """deepspeed.runtime.fp16.onebit.adam.OnebitAdam."""

    def __init__(self, params: Any, deepspeed: Any = None, *args: Any, **kwargs: Any) -> None:
        self.deepspeed = deepspeed
        OneBitAdam.__init__(self, params, *args, **kwargs)

    @property
    def adam_freeze_key(self) -> bool:
        """Whether the warm-up is over."""
        return self._compresses


class OnebitLamb(_Named, OneBitLamb):
    """deepspeed.runtime.fp16.onebit.lamb.OnebitLamb."""

    def __init__(self, params: Any, deepspeed: Any = None, *args: Any, **kwargs: Any) -> None:
        self.deepspeed = deepspeed
        OneBitLamb.__init__(self, params, *args, **kwargs)
        self.leave_out_empty()

    def leave_out_empty(self) -> None:
        """Parameters without elements are in no param group, as in DeepSpeed 0.19.6."""
        for group in self.param_groups:
            group["params"] = [p for p in group["params"] if p.numel()]

    @property
    def lamb_coeffs(self) -> list[float]:
        """The factors on lr of the last step."""
        found: list[float] = self.__dict__.get("_coefficients", getattr(self.method, "coefficients", []))
        return found

    @lamb_coeffs.setter
    def lamb_coeffs(self, coefficients: list[float]) -> None:
        self.__dict__["_coefficients"] = coefficients

    def get_lamb_coeffs(self) -> list[float]:
        """A copy of lamb_coeffs."""
        return list(self.lamb_coeffs)

    @property
    def lamb_freeze_key(self) -> bool:
        """Whether the warm-up is over."""
        return self._compresses


class ZeroOneAdam(_Named, _ZeroOneAdam):
    """deepspeed.runtime.fp16.onebit.zoadam.ZeroOneAdam."""

    def __init__(self, params: Any, deepspeed: Any = None, *args: Any, **kwargs: Any) -> None:
        self.deepspeed = deepspeed
        _ZeroOneAdam.__init__(self, params, *args, **kwargs)

    @property
    def freeze_key(self) -> bool:
        """Whether the variance is frozen."""
        return self.method is not None and bool(getattr(self.method, "frozen", False))


# ---- the engine's ----------------------------------------------------------------------------------------------------
class ClientOptimizer(ShardedOptimizer):
    """An engine's optimizer where DeepSpeed returns the script's own: it is equal to that, and an instance of its
    class. (It is not that object: its states are the engine's.)"""

    @property  # type: ignore[misc]  # isinstance asks it; object's has a setter, which nobody calls
    def __class__(self) -> type:
        kind = type(self.base)
        return FusedAdam if kind is AdamW else kind

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.base

    def __hash__(self) -> int:
        return hash(self.base)


def name_configured(engine: EngineBase) -> None:
    """The optimizer that a configuration asks for is of DeepSpeed's class: Adam and Lion by whether its states are
    offloaded, Lamb, 1-bit optimizers; and Muon's param groups have DeepSpeed's names."""
    base = engine.optimizer.base
    offloads = engine._config.zero.offload_optimizer.device != "none"
    if type(base) in (Adam, AdamW):
        decoupled = bool(base.defaults["decoupled_weight_decay"])
        base.__class__ = DeepSpeedCPUAdam if offloads else FusedAdam
        cast(_Adam, base)._set_mode(decoupled)
    if isinstance(base, Muon):
        for group in base.param_groups:
            group.setdefault("name", "muon-params" if group["use_muon"] else "adam-params")
    named = {
        Lion: DeepSpeedCPULion if offloads else FusedLion,
        Lamb: FusedLamb,
        OneBitAdam: OnebitAdam,
        OneBitLamb: OnebitLamb,
        _ZeroOneAdam: ZeroOneAdam,
    }
    base.__class__ = named.get(type(base), type(base))
    if isinstance(base, OnebitLamb):
        base.leave_out_empty()
        engine.optimizer.take_groups()


def show_as_client(engine: EngineBase) -> None:
    """At stage 0 in fp32 DeepSpeed wraps the optimizer in nothing."""
    if engine.plan.stage == 0 and engine.dtype == torch.float32:
        engine.optimizer.__class__ = ClientOptimizer


def scale_as_stage_0(engine: EngineBase) -> None:
    """At stage 0 DeepSpeed halves the loss scale at every overflow, whatever fp16.hysteresis says, and goes on where
    gradients overflow at the smallest one; with ZeRO the hysteresis counts, and that ends the run."""
    scaler = engine.scaler
    if engine.plan.stage == 0 and isinstance(scaler, DynamicLossScaler):
        scaler.raises = False
        scaler.hysteresis = scaler.hysteresis_left = 1
