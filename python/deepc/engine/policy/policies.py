"""How micro-batches become a step. One policy is chosen when the engine is built, and the loop asks it at the few
points where kinds of training differ; it has no switch of its own.

`Plain`: the mean over accumulation steps is taken of the losses. `DeterministicLayout`: sums in an order that no layout
changes ("deterministic": "layout", zero/step/tree.py). `AutomaticPrecision`: 16 bits, and fp32 where those fail
("precision": "auto", precision.py). Which one: choose.py."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any, cast

import torch

from ...core import memory
from ...core.foreign import private
from ...core.foreign.buffers import following
from ...core.ops import torch_dtype as tensor_dtype
from ...errors import ConfigError, DeepcError, OutOfMemoryError, UnsupportedError
from ...plan.derive import Machine, is_streamed
from ...plan.mesh import Mesh
from ...plan.plan import SLOTS, Plan
from ...zero.step.reducers.base import CoreReducer, TreeReducer
from ...zero.step.reducers.nodes import NodesReducer
from ...zero.step.tree import KEY, LayoutOrder, MicroBatchSampler
from ..base import EngineBase, StepResult, say
from ..data import cast_floats
from .precision import AutoPrecision, name_of, torch_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...comm.groups import MultiNodeGroup, NodeGroup
    from ...comm.shared import Comm
    from ...zero.step.hooks import GradientHooks
    from ...zero.step.norm import Parts, Rider
    from ...zero.step.reducers.base import Reducer
    from ...zero.streamed.state import StreamedState


class Plain:
    """What the loop asks; and the answers of ordinary training."""

    one_gradient = False  # of the hooks
    fixed_batch = False  # the number of micro-batches may not change

    def __init__(self, engine: EngineBase) -> None:
        self._engine = engine
        self.pre_scale = engine._config.pre_scale
        self.riders: list[Rider] = []
        self._bucket_comm: Comm | None = None
        fp16 = engine._config.fp16
        self._run = self._run_casting if fp16.enabled and fp16.auto_cast else self._run_plainly

    # ---- set-up ------------------------------------------------------------------------------------------------------
    @property
    def auto(self) -> AutoPrecision | None:
        """The state of automatic precision."""
        return None

    def check_optimizer(self) -> None:
        """Raises if the optimizer does not go with the policy."""

    def dtypes(self) -> list[torch.dtype]:
        """What the model may compute with, beginning with the present one."""
        return [self._engine.dtype]

    def take_plans(self, plans: dict[torch.dtype, Plan]) -> None:
        """One plan for each of `dtypes`."""

    def bytes_to_change(self, plans: dict[torch.dtype, Plan]) -> int:
        """Bytes of this node beyond the plan's that the policy needs for a while."""
        return 0

    def cast_buffers(self) -> None:
        """After those of the model's buffers that follow its parameters were cast to `buffer_dtype`."""

    @property
    def buffer_dtype(self) -> torch.dtype:
        return self._engine.dtype

    def make_reducer(self) -> Reducer:
        """The reducer of the plan. Its sums are divided by `pre_scale` and `divisor` where they are read. Collective
        between ranks that share memory."""
        engine, plan, state = self._engine, self._engine.plan, self._engine.state
        wire = tensor_dtype(plan.wire)
        if plan.transport == "nodes" and plan.gradients_on:
            group = cast("MultiNodeGroup", engine.group)
            return cast("StreamedState", state).disk_reducer_over_nodes(group, wire, self.pre_scale)
        if plan.transport == "nodes":
            return NodesReducer(plan, cast(Any, engine.group), state.acc, state.partial, wire, self.pre_scale)
        if not plan.core_reduces:
            return state.make_reducer(wire, self.pre_scale)
        self._bucket_comm = None
        if plan.transport == "node":
            nbytes = plan.layout.bucket_elems * max(wire.itemsize, engine.dtype.itemsize)
            self._bucket_comm = cast("NodeGroup", engine.group).open_comm("buckets", nbytes, SLOTS)
        if plan.gradients_on:
            return cast("StreamedState", state).disk_reducer(self._bucket_comm, wire, self.pre_scale)
        core = self._core_reducer(plan, wire)
        core.borrow(state.lease)
        return core

    def _core_reducer(self, plan: Plan, wire: torch.dtype) -> CoreReducer:
        state = self._engine.state
        return CoreReducer(plan, self._bucket_comm, state.acc, state.partial, wire, self.pre_scale)

    def make_sampler(self, data: Any) -> MicroBatchSampler | None:
        """Batches of indices into `data`, or None: DataLoader's own."""
        return None

    def describe(self) -> str:
        """For the log, or ""."""
        return ""

    # ---- the loop ----------------------------------------------------------------------------------------------------
    @property
    def divisor(self) -> int:
        """What the sum over ranks and micro-batches is divided by, beside the scales. A loss over sequences makes
        gradients for the mean over the ranks that share them (parallel/sequence/loss.py), of which a sum has one."""
        engine = self._engine
        return engine.mesh.sp if engine._config.gradient_allreduce_op == "sum" else engine.group.world

    @private.uncompiled_itself
    def forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._run(inputs, kwargs)

    @private.uncompiled_itself
    def _run_plainly(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._model()(*inputs, **kwargs)

    @private.uncompiled_itself
    def _run_casting(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Floating-point inputs are cast to what the model computes in."""
        inputs, kwargs = cast_floats((inputs, kwargs), self._engine.dtype)
        return self._model()(*inputs, **kwargs)

    @private.uncompiled_itself
    def _model(self) -> Callable[..., Any]:
        """The model, as torch.compile of the engine can see it."""
        module = self._engine.module
        return private.in_a_frame(module) if private.frame_callback() else module

    def losses(self, loss: torch.Tensor, scale_wrt_gas: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Before a backward: (what it is of, what engine.backward returns)."""
        gas = self._engine.gradient_accumulation_steps()
        out = loss / gas if scale_wrt_gas and gas > 1 else loss
        return out, out

    def after_backward(self, out: torch.Tensor) -> None:
        """out: what engine.backward returns, detached."""

    def bare(self, running: GradientHooks | None) -> tuple[bool, float]:
        """For the hooks: gradients come from a loss.backward() of the user, or (`running`) from the backward of another
        engine, whose loss went through a module of this one. They are divided by the accumulation steps here, as in
        DeepSpeed."""
        engine = self._engine
        boundary = engine.is_gradient_accumulation_boundary()
        if running is not None:
            return boundary, self.foreign_backward(running)
        if engine.scaler is not None and not engine._scaled:
            raise DeepcError(
                "fp16 training scales the loss, and loss.backward() was called without; call engine.backward(loss), or"
                " engine.scale(loss).backward()"
            )
        engine._scaled = False
        engine._backwards += 1
        return boundary, self.bare_backward()

    def bare_backward(self) -> float:
        """A loss.backward() of the script brings the first gradient: the factor on its gradients."""
        return 1.0 / self._engine.gradient_accumulation_steps()

    def foreign_backward(self, running: GradientHooks) -> float:
        """The same of a backward of another engine, whose loss went through this one's module."""
        return self._engine.loss_scale / running.scale

    def before_step(self) -> None:
        """engine.step() was called."""

    def complete(self) -> None:
        """Before accumulators are read that no pass has made the norm of."""

    def micro_batch_ends(self, last: bool) -> None:
        """The end of engine.step(). last: it was at an accumulation boundary."""

    def after_step(self, result: StepResult) -> StepResult:
        """After an update or a skipped step. Collective."""
        return result

    def discard(self, anew: bool = False) -> None:
        """The gradients since the last step are dropped. anew: and the next micro-batch is the step's first one."""

    @property
    def parts(self) -> Parts | None:
        """Over which the step is judged."""
        return self._engine.parts

    def loaded(self) -> None:
        """A checkpoint was loaded. Collective."""

    @property
    def exchanged(self) -> dict[str, float] | None:
        """For metrics: what the ranks of a 1-bit optimizer exchanged for the last step."""
        return None


# ---- deterministic order ---------------------------------------------------------------------------------------------
class DeterministicLayout(Plain):
    """Micro-batches are leaves of a tree and each has one pass; the mean is taken once, of the sum."""

    one_gradient = fixed_batch = True

    def __init__(self, engine: EngineBase) -> None:
        super().__init__(engine)
        self.pre_scale = 1.0

    def check_optimizer(self) -> None:
        engine, config = self._engine, self._engine._config
        engine.optimizer.check_layout()
        for key in ("zero_quantized_weights", "zero_quantized_gradients"):
            if getattr(config.zero, key):
                raise ConfigError(
                    f"zero_optimization.{key} rounds what crosses between nodes, so that the result depends on the"
                    ' nodes; remove it, or deepc.deterministic = "layout"'
                )
        if config.pre_scale != 1:
            say(
                engine,
                "config: prescale_gradients and gradient_predivide_factor have no effect with deepc.deterministic ="
                ' "layout": gradients are scaled once, after their sum',
            )
        self._order = LayoutOrder(engine.group, engine.device, engine.gradient_accumulation_steps())

    def _core_reducer(self, plan: Plan, wire: torch.dtype) -> CoreReducer:
        state = self._engine.state
        return TreeReducer(plan, self._bucket_comm, state.acc, state.partial, wire)

    def make_sampler(self, data: Any) -> MicroBatchSampler | None:
        engine = self._engine
        return MicroBatchSampler(
            data,
            engine.train_micro_batch_size_per_gpu(),
            engine.mesh.dp,  # ranks that share sequences get the same samples
            engine.mesh.coordinates(engine.everyone.rank).dp,
            per_step=self._order.passes * engine.mesh.dp,
            drop_last=engine._config.dataloader_drop_last,
        )

    def describe(self) -> str:
        return self._order.describe()

    @property
    def divisor(self) -> int:
        return self._order.divisor

    @private.uncompiled_itself
    def forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        engine = self._engine
        with self._order.forward(engine.global_steps, engine.module.training):
            return self._run(inputs, kwargs)

    def losses(self, loss: torch.Tensor, scale_wrt_gas: bool) -> tuple[torch.Tensor, torch.Tensor]:
        synchronising = self._engine.hooks.synchronising
        self._order.backward(scale_wrt_gas, synchronising)
        if synchronising:
            self._pay_passes()
        return loss, super().losses(loss, scale_wrt_gas)[1]

    def bare_backward(self) -> float:
        self._order.backward(True, True)
        self._pay_passes()
        return 1.0

    def foreign_backward(self, running: GradientHooks) -> float:
        raise UnsupportedError(
            f"gradients from the backward of another engine with {KEY}; detach them, or remove the key"
        )

    def before_step(self) -> None:
        """A micro-batch whose gradients no pass has taken yet (no_sync, or no loss on this rank) gets its pass now."""
        order, hooks = self._order, self._engine.hooks
        if order.passed:
            return
        if self._engine.group.world == 1 and not hooks.accumulated and not hooks.left_behind:
            order.owed += 1  # a step without any backward is a mistake of the script
            return
        self._pay_passes()
        hooks.empty_pass(self._engine.is_gradient_accumulation_boundary())

    def _pay_passes(self) -> None:
        for _ in range(self._order.owed):
            self._engine.hooks.empty_pass(False)
        self._order.owed = 0

    def complete(self) -> None:
        cast(TreeReducer, self._engine.reducer).tree.fold()

    def micro_batch_ends(self, last: bool) -> None:
        self._order.end_micro_batch(last)

    def discard(self, anew: bool = False) -> None:
        if anew:
            self._order.begin_anew()
        else:
            self._order.discard()


# ---- automatic precision ---------------------------------------------------------------------------------------------
class AutomaticPrecision(Plain):
    """Between two steps parameters, buffers and what carries gradients change their dtype; masters, accumulators,
    optimizer states and schedules stay. Rides in the message of the norm with this rank's losses, so that all ranks
    decide alike."""

    def __init__(self, engine: EngineBase) -> None:
        super().__init__(engine)
        self._run = self._run_casting
        config, group = engine._config, engine.group
        limits = {
            "on a GPU": engine.device.type != "cpu",
            "over several nodes": group.transport not in ("local", "node"),
            "with streamed parameters (DEEPC_STREAMED)": is_streamed(
                config, Mesh(dp=engine.group.world), Machine.here(engine.device, group)
            ),
            f"with {KEY}": config.deepc.deterministic is not None,
        }
        if found := [what for what, here in limits.items() if here]:
            raise UnsupportedError(
                f'"precision": "auto" {" and ".join(found)} does not exist; remove the key and set bf16.enabled, or'
                " nothing for fp32"
            )
        # the mode that training starts in is the fastest that all ranks' machines have
        slow = group.gather_all(torch.tensor([float(engine.dtype == torch.float32)], dtype=torch.float64, device="cpu"))
        if any(slow.view(-1).tolist()):
            engine.dtype = torch.float32
        c = config.deepc.precision
        self._auto = AutoPrecision(
            name_of(engine.dtype), c.overflow_steps, c.divergence_factor, c.divergence_steps, c.fp32_steps
        )
        self.riders = [self]
        self._losses: list[float] = []  # of this rank since the last step
        self._mean_loss: float | None = None  # of all ranks, of this step
        self._exact: list[tuple[torch.Tensor, torch.Tensor]] = []  # in 16 bits: (buffer, its fp32 values)

    # ---- set-up ------------------------------------------------------------------------------------------------------
    @property
    def auto(self) -> AutoPrecision:
        return self._auto

    def dtypes(self) -> list[torch.dtype]:
        return list(dict.fromkeys((self._engine.dtype, torch.float32)))

    def take_plans(self, plans: dict[torch.dtype, Plan]) -> None:
        self._plans = plans

    def bytes_to_change(self, plans: dict[torch.dtype, Plan]) -> int:
        if len(plans) < 2:
            return 0
        b = plans[torch.float32].bytes
        return b["params_private"] * self._engine.plan.ranks_per_node + b["params_shared"]

    @property
    def buffer_dtype(self) -> torch.dtype:
        return torch.float32

    def cast_buffers(self) -> None:
        if self._engine.dtype != torch.float32:
            self._recast_buffers(torch.float32, self._engine.dtype, None)

    # ---- the loop ----------------------------------------------------------------------------------------------------
    def after_backward(self, out: torch.Tensor) -> None:
        self._losses.append(float(out))

    def discard(self, anew: bool = False) -> None:
        self._losses.clear()

    def row(self) -> list[float]:
        finite = all(map(math.isfinite, self._losses))
        return [math.fsum(self._losses) if finite else math.nan, len(self._losses)]

    def put(self, row: torch.Tensor) -> None:
        """The numbers are there."""

    def take(self, rows: torch.Tensor) -> None:
        known = [total for total, count in rows.tolist() if count]
        self._mean_loss = sum(known) / len(known) if known else None

    def after_step(self, result: StepResult) -> StepResult:
        return result._replace(precision_change=self._follow(result.applied))

    def _follow(self, applied: bool) -> str:
        """Changes the precision if this step says so. Returns what changed, "" if nothing did. Collective."""
        engine, auto = self._engine, self.auto
        self._losses.clear()
        was, stay = auto.mode, auto.stay
        why = auto.after_step(applied, self._mean_loss)
        if why is None:
            return ""
        dtype = torch_dtype(auto.mode)
        if lacking := self._lacks_memory(dtype):
            say(
                engine,
                f"step {engine.global_steps}: precision stays {was} though {why}: {lacking}",
                logging.WARNING,
            )
            auto.mode, auto.stay = was, stay
            return ""
        text = f"{was} -> {auto.mode}: {why}"
        self._change(dtype)
        say(
            engine,
            f"step {engine.global_steps}: precision {text}",
            logging.WARNING if auto.mode == "fp32" else logging.INFO,
        )
        return text

    def resume(self) -> None:
        """After the state of `auto` was loaded: the mode that it has. Collective."""
        self._losses.clear()
        dtype = torch_dtype(self.auto.mode)
        if dtype != self._engine.dtype and (lacking := self._lacks_memory(dtype)):
            raise OutOfMemoryError(
                f"the checkpoint was saved in {self.auto.mode}, this engine computes in {self._engine.precision}, and"
                f" to change {lacking}; free memory, or pass load_optimizer_states=False"
            )
        self._change(dtype)

    def _lacks_memory(self, dtype: torch.dtype) -> str:
        """Why parameters (and masters) in `dtype` can't be made beside the present ones now, or "". Collective, so that
        all ranks give up alike."""
        b = self._plans[dtype].bytes
        need = (b["params_private"] + b["master_private"]) * self._engine.plan.ranks_per_node + b["params_shared"]
        mine = torch.tensor([memory.available()], dtype=torch.int64, device="cpu")
        have = float(self._engine.group.gather_all(mine).min())
        return (
            f"that needs {need / 2**30:.2f} GiB on this node for a moment and {have / 2**30:.2f} GiB are left"
            if need > have
            else ""
        )

    def _change(self, dtype: torch.dtype) -> None:
        """Collective, between two steps."""
        engine = self._engine
        if dtype == engine.dtype:
            return
        engine.guard.take_in_writes()
        engine.reducer.close()
        if self._bucket_comm is not None:
            cast("NodeGroup", engine.group).close_comm(self._bucket_comm)
        was, engine.dtype, engine.plan = engine.dtype, dtype, self._plans[dtype]
        engine.state.recast(engine.plan)
        engine.optimizer.follow_state()
        engine.reducer = engine.guard.reducer = self.make_reducer()
        engine.hooks.take_reducer(engine.reducer)
        state = engine.state
        self._recast_buffers(was, dtype, {id(p) for p in (*state.trained, *(p for _, p in state.frozen))})
        engine.guard.publish()

    @torch.no_grad()
    def _recast_buffers(self, was: torch.dtype, dtype: torch.dtype, ours: set[int] | None) -> None:
        """Buffers of dtype `was` that follow the parameters, and parameters that joined the model later (their ids are
        not in `ours`, if that is known), become `dtype`. fp32 values are kept through 16 bits, except where the buffer
        was written meanwhile."""
        module = self._engine.module
        exact = {id(b): values for b, values in self._exact}
        self._exact = []
        for b in following(module):
            if b.dtype != was:
                continue
            if dtype != torch.float32:
                self._exact.append((b, b.data))
                b.data = b.data.to(dtype)
                continue
            wide, kept = b.data.float(), exact.get(id(b))
            b.data = (
                wide if kept is None or kept.shape != wide.shape else torch.where(kept.to(was) == b.data, kept, wide)
            )
        for p in module.parameters() if ours is not None else ():
            if id(p) not in cast("set[int]", ours) and p.dtype == was:
                p.data = p.data.to(dtype)
