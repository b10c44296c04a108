"""The engine: wires configuration, plan, states, hooks, optimizer and checkpoints into the loop
`loss = engine(x); engine.backward(loss); engine.step()`. It decides nothing that the plan has decided."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Union, cast

import torch

from ..comm import calls
from ..comm import start as comm
from ..comm.groups import open_group
from ..config.rules import default_optimizer
from ..config.tree import Config
from ..core import env, memory
from ..core.lib import C, call
from ..core.ops import code, dtype_of, torch_dtype
from ..errors import ArgumentError, ConfigError, DeepcError, OutOfMemoryError, StrayWriteError, UnsupportedError
from ..observe import profile
from ..observe.monitor.meter import Meter
from ..observe.profile.timers import wall_clock
from ..optim.factory import make_optimizer
from ..plan.derive import Machine, derive, is_streamed, meta_of
from ..plan.mesh import Mesh
from ..plan.plan import Plan
from ..plan.predict.estimate import FirstStep, MemoryEstimate, check_plan, refuse_if_too_big
from ..zero import gathered
from ..zero.init import adopt
from ..zero.param import unshare
from ..zero.resident import ResidentState
from ..zero.state import ModelState
from ..zero.step.hooks import GradientHooks
from ..zero.step.nodes import NodesReducer
from ..zero.step.reducer import CoreReducer, TreeReducer, norm_order
from ..zero.step.tree import LayoutOrder, MicroBatchSampler
from ..zero.step.update import ShardedOptimizer
from . import access, precision
from .data import TimedLoader
from .wrapper import ModelWrapper

if TYPE_CHECKING:
    from ..comm.groups import NodeGroup
    from ..observe.profile.probe import Probe
    from ..optim.schedules import Scheduler
    from ..zero.step.reducer import Reducer
    from ..zero.streamed.state import StreamedState

    OptimizerLike = Union[torch.optim.Optimizer, Callable[[Any], torch.optim.Optimizer]]  # noqa: UP007
    Named = Sequence[tuple[str, torch.nn.Parameter]]

logger = logging.getLogger("deepc")


class StepResult(NamedTuple):
    """What engine.step() did. `applied` is False for a micro-batch inside an accumulation and for a skipped step."""

    applied: bool
    reason: str  # "", "accumulating", or why the step was skipped
    bad_parameter: str | None = None  # the first parameter with a gradient that is not finite
    grad_norm: float | None = None
    precision_change: str = ""  # precision "auto": "bf16 -> fp32: why" if it changed after this step


class Engine(ModelWrapper):
    """See deepc.initialize. `engine(...)` runs the model; backward, step and checkpoints are collective over the
    ranks."""

    def __init__(
        self,
        model: torch.nn.Module,
        config: Config,
        *,
        optimizer: OptimizerLike | None = None,
        model_parameters: Iterable[Any] | None = None,
        lr_scheduler: Any = None,
        training_data: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        device: torch.device | None = None,
        sample_batch: Any = None,
        loss_fn: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        self.module = model
        self._config = config
        self.device = device or comm.default_device()
        log = config.comms_logger
        if log.enabled:
            calls.logger.configure(True, log.prof_all, log.prof_ops, log.verbose, log.debug)
        self.group = open_group(self.device, comm.DEFAULT_TIMEOUT)
        self.world_size, self.global_rank = self.group.world, self.group.rank
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.global_rank))
        self.dtype = precision.choose_dtype(config)
        self.auto_precision = self._auto_precision()
        self._losses: list[float] = []  # of this rank since the last step, for precision "auto"
        self._mean_loss: float | None = None  # of all ranks, of this step
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        self._boundary: bool | None = None
        self._scaled = False  # engine.scale was called: a bare backward follows
        self._grad_norm: float | None = None
        self._last = StepResult(False, "no step yet")
        self._debug = env.switch("DEEPC_DEBUG")
        self._checksums: list[int] | None = None
        self.averages: dict[str, Any] = {}  # label -> EMA

        self.memory_plan: MemoryEstimate | None = None  # with a sample batch
        base = self._make_base_optimizer(optimizer, model_parameters)
        stage = config.zero.stage
        self.optimizer = ShardedOptimizer(base, allow_untested=config.zero_allow_untested_optimizer, stage=stage)
        group_of = self._groups(self.optimizer.param_groups)
        named = list(model.named_parameters())
        self._check_model(named, group_of)
        named = [
            (n, p) for n, p in named if id(p) not in _owner_of
        ]  # another engine's, frozen here: they stay where they are
        self.same = self._layout_order()
        mesh = Mesh(dp=self.world_size, ranks_per_node=self.group.ranks_per_node)
        meta = meta_of(named, group_of)

        def plan_in(dtype: torch.dtype) -> Plan:
            return derive(
                config,
                meta,
                mesh,
                Machine.here(self.device, self.group),
                rank=self.global_rank,
                part=self.group.part_of(self.global_rank),
                moments=self.optimizer.moments,
                dtype=dtype_of(dtype),
            )

        self.plan: Plan = plan_in(self.dtype)
        self._plans = {self.dtype: self.plan}
        if self.auto_precision is not None:
            self._plans[torch.float32] = plan_in(torch.float32)
        if self.device.type == "cpu":
            memory.keep_heap()  # before the prediction, which follows what the heap does
            memory.trim_heap()  # what an earlier engine's steps left free is available
        refuse_if_too_big(self.plan, self._bytes_to_change())
        self._first_step = self._check_memory(named, group_of, sample_batch, loss_fn)
        adopt(named, self.plan.sharded)
        self._cast_buffers()
        self._choose_matmul()
        host = self.device.type == "cuda" and config.zero.offload_optimizer.device == "cpu"
        self.state = self._state_class()(
            self.plan,
            named,
            self.group,
            self.device,
            host=host,
            accumulates=(config.gradient_accumulation_steps or 1) > 1,
        )
        self.optimizer.attach(self.state, [group_of[id(p)] for p in self.state.trained])
        self.reducer = self._make_reducer()
        self.hooks = GradientHooks(self.state, self.reducer, self._bare_backward)
        self.hooks.one_gradient = self.same is not None
        if self.plan.mode == "streamed":
            cast("StreamedState", self.state).stream(model, config.zero)
        if self.plan.parameters_as:
            self._publish()  # from the start on the parameters are what other nodes get of the masters
        self.scaler = precision.make_scaler(config)
        self.lr_scheduler = self._make_scheduler(lr_scheduler)
        self.training_dataloader = self._make_loader(training_data, collate_fn)
        if stage == 3:
            self._holds = gathered.Held(self.state, self._raise_stray_writes, self._parameters_modified)
            gathered.hold([*self.state.trained, *(p for _, p in self.state.frozen)], self._holds)
        for p in self.state.trained:
            _owner_of[id(p)] = self
        for other in _engines:  # what was frozen in another engine and is trained here has moved here
            other.state.let_go(_owner_of)
        _engines.add(self)
        self._remember_model()
        self._remember_checksums()
        if self.device.type == "cpu":
            memory.trim_heap()  # what the set-up freed does not come again
        self._report()
        self.monitor = Meter(self)
        self.profile: Probe | None = profile.attach(
            self
        )  # None, and nothing of it runs, unless the configuration asks for some of it

    # ---- set-up ------------------------------------------------------------------------------------------------------
    def _make_base_optimizer(
        self, optimizer: OptimizerLike | None, model_parameters: Iterable[Any] | None
    ) -> torch.optim.Optimizer:
        cfg = self._config.optimizer
        params = (
            list(model_parameters)
            if model_parameters is not None
            else [p for p in self.module.parameters() if p.requires_grad]
        )
        if optimizer is not None:
            if cfg is not None:
                self._say("an optimizer object was passed: the config's optimizer section is not used")
            made = (
                optimizer(params)
                if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer)
                else optimizer
            )
            if isinstance(made, ShardedOptimizer):
                raise ArgumentError("this optimizer already belongs to another engine")
            if not isinstance(made, torch.optim.Optimizer):
                raise ArgumentError(
                    "optimizer must be a torch.optim.Optimizer or a function that makes one from parameters, got"
                    f" {type(made).__name__}"
                )
            return made
        if not params:
            raise ArgumentError(
                "no parameters to train: model_parameters is empty and no parameter of the model requires a gradient"
            )
        if cfg is None:
            cfg = default_optimizer()
            self._say(
                "no optimizer in the config and none passed: AdamW with DeepSpeed's defaults, "
                + ", ".join(f"{k} {v}" for k, v in cfg.params.items())
            )
        return make_optimizer(cfg.type, cfg.params, params, backend=cfg.backend)

    def _groups(self, param_groups: list[dict[str, Any]]) -> dict[int, int]:
        group_of: dict[int, int] = {}
        for g, group in enumerate(param_groups):
            for p in group["params"]:
                if p.requires_grad:
                    group_of[id(p)] = g
        return group_of

    def _check_model(self, named: Named, group_of: dict[int, int]) -> None:
        known = {id(p) for _, p in named}
        if missing := [i for i in group_of if i not in known]:
            raise ArgumentError(
                f"the optimizer has {len(missing)} parameter(s) that are not parameters of the model passed to"
                " initialize"
            )
        for name, p in named:
            if torch.nn.parameter.is_lazy(p):
                raise ArgumentError(
                    f"parameter '{name}' of a lazy module has no shape yet; run the model once (a dummy forward) before"
                    " initialize"
                )
            if p.is_meta:
                raise ArgumentError(
                    f"parameter '{name}' is on the meta device and has no values; materialise it first (model.to_empty"
                    " and init)"
                )
            if id(p) in _owner_of and id(p) in group_of:
                raise UnsupportedError(
                    f"parameter '{name}' is already trained by another engine; two engines can't own one parameter. It"
                    " may be frozen in one of them (requires_grad_(False), or model_parameters= without it), or"
                    " destroy that engine first"
                )
            if id(p) in group_of and any(
                e.plan.mode == "streamed" and any(p is q for _, q in e.state.frozen) for e in _engines
            ):
                raise UnsupportedError(
                    f"parameter '{name}' is frozen in an engine that streams its parameters (ZeRO-3 without shared"
                    " memory), which can't hand it over; make the engine that trains it first"
                )
            if (other := _owner_of.get(id(p))) is not None and other.dtype != self.dtype:
                raise ConfigError(
                    f"parameter '{name}' is trained by another engine in {other.dtype} and this one computes in"
                    f" {self.dtype}; a parameter has one dtype: use the same precision for both"
                )
            plain_fp32 = self.dtype == torch.float32 and self.auto_precision is None
            if plain_fp32 and p.is_floating_point() and p.dtype not in (torch.float32,) and id(p) in group_of:
                raise ConfigError(
                    f"parameter '{name}' is {p.dtype} and the config asks for fp32 training; set bf16.enabled or"
                    " fp16.enabled, or pass model.float()"
                )
            if id(p) in group_of and not p.is_floating_point():
                raise ConfigError(f"parameter '{name}' is {p.dtype}; only floating-point parameters can be trained")

        for other in _engines:
            if self.auto_precision is None and other.auto_precision is None:
                continue
            theirs = {id(p) for p in (*other.state.trained, *(p for _, p in other.state.frozen))}
            if (shared := next((n for n, p in named if id(p) in theirs), None)) is not None:
                raise UnsupportedError(
                    f"parameter '{shared}' belongs to two engines, and precision \"auto\" of one of them would change"
                    " its dtype under the other; set bf16.enabled (or nothing, for fp32) for both"
                )

    def _auto_precision(self) -> precision.AutoPrecision | None:
        """The policy of `"precision": "auto"`. Collective: the mode that training starts in is the fastest that all
        ranks' machines have."""
        config, group = self._config, self.group
        if config.precision is None:
            return None
        streamed = is_streamed(config, Mesh(dp=self.world_size), Machine.here(self.device, group))
        limits = {
            "on a GPU": self.device.type != "cpu",
            "over several nodes": group.transport not in ("local", "node"),
            "with streamed parameters (DEEPC_STREAMED)": streamed,
            'with deepc.deterministic = "layout"': config.deepc.deterministic is not None,
        }
        if found := [what for what, here in limits.items() if here]:
            raise UnsupportedError(
                f'"precision": "auto" {" and ".join(found)} does not exist; remove the key and set bf16.enabled, or'
                " nothing for fp32"
            )
        slow = group.gather_all(torch.tensor([float(self.dtype == torch.float32)], dtype=torch.float64))
        if any(slow.view(-1).tolist()):
            self.dtype = torch.float32
        c = config.deepc.precision
        return precision.AutoPrecision(
            precision.name_of(self.dtype), c.overflow_steps, c.divergence_factor, c.divergence_steps, c.fp32_steps
        )

    def _bytes_to_change(self) -> int:
        """Of this node: what a change of precision needs beyond the states of 16-bit training, while it lasts."""
        if len(self._plans) < 2:
            return 0
        b = self._plans[torch.float32].bytes
        return b["params_private"] * self.plan.ranks_per_node + b["params_shared"]

    def _state_class(self) -> type[ModelState]:
        if self.plan.mode != "streamed":
            return ResidentState
        from ..zero.streamed.state import StreamedState

        return StreamedState

    def _check_memory(
        self, named: Named, group_of: dict[int, int], sample_batch: Any, loss_fn: Callable[..., Any] | None
    ) -> FirstStep | None:
        """With a sample batch: predicts the peak, refuses what does not fit, and prints it. What the first step shows
        of it."""
        if sample_batch is None:
            return None
        self.memory_plan = check_plan(
            self.plan,
            self.module,
            self.optimizer.base,
            self._config,
            named,
            group_of,
            self.group,
            sample_batch,
            loss_fn,
        )
        self._say(str(self.memory_plan))
        return FirstStep(self.memory_plan)

    def _layout_order(self) -> LayoutOrder | None:
        """The order of micro-batches if the result must not depend on the layout."""
        config = self._config
        if config.deepc.deterministic is None:
            return None
        self.optimizer.check_layout()
        for key in ("zero_quantized_weights", "zero_quantized_gradients"):
            if getattr(config.zero, key):
                raise ConfigError(
                    f"zero_optimization.{key} rounds what crosses between nodes, so that the result depends on the"
                    ' nodes; remove it, or deepc.deterministic = "layout"'
                )
        if config.pre_scale != 1:
            self._say(
                "config: prescale_gradients and gradient_predivide_factor have no effect with deepc.deterministic ="
                ' "layout": gradients are scaled once, after their sum'
            )
        return LayoutOrder(self.group, self.device, self.gradient_accumulation_steps())

    @torch.no_grad()
    def _cast_buffers(self) -> None:
        dtype = self.dtype if self.auto_precision is None else torch.float32
        for module in self.module.modules():
            for name, b in module._buffers.items():  # noqa: B007
                if b is None:
                    continue
                b.data = b.data.to(device=self.device, dtype=dtype if b.is_floating_point() else b.dtype)
        if self.world_size > 1:
            for _, b in self.module.named_buffers():
                if b.numel() and (b.is_floating_point() or b.dtype in (torch.int32, torch.int64)):
                    flat = b.data.contiguous().view(-1)
                    self.group.broadcast(flat, 0)
                    if any(stride == 0 and n > 1 for stride, n in zip(b.stride(), b.shape)):
                        b.data = flat.view(b.shape)  # expanded: it can't be written
                    elif flat.data_ptr() != b.data_ptr():
                        b.data.copy_(flat.view(b.shape))
        self._exact_buffers: list[
            tuple[torch.Tensor, torch.Tensor]
        ] = []  # in 16 bits with precision "auto": (buffer, its fp32 values)
        if self.auto_precision is not None and self.dtype != torch.float32:
            self._recast_buffers(torch.float32, self.dtype)

    @torch.no_grad()
    def _recast_buffers(self, was: torch.dtype, dtype: torch.dtype) -> None:
        """Buffers of dtype `was`, and parameters that joined the model later, become `dtype`. fp32 values are kept
        through 16 bits, except where the buffer was written meanwhile."""
        exact = {id(b): values for b, values in self._exact_buffers}
        self._exact_buffers = []
        for b in {id(b): b for b in self.module.buffers()}.values():
            if b.dtype != was:
                continue
            if dtype != torch.float32:
                self._exact_buffers.append((b, b.data))
                b.data = b.data.to(dtype)
                continue
            wide, kept = b.data.float(), exact.get(id(b))
            b.data = (
                wide if kept is None or kept.shape != wide.shape else torch.where(kept.to(was) == b.data, kept, wide)
            )
        ours = (
            {id(p) for p in (*self.state.trained, *(p for _, p in self.state.frozen))}
            if hasattr(self, "state")
            else None
        )
        for p in self.module.parameters():
            if ours is not None and id(p) not in ours and p.dtype == was:
                p.data = p.data.to(dtype)

    def _choose_matmul(self) -> None:
        """16-bit training on a CPU without the arithmetic: products go through fp32 instead of torch's reference
        loop."""
        if self.device.type != "cpu" or self.dtype == torch.float32:
            return
        native, why = (precision.bf16_arithmetic if self.dtype == torch.bfloat16 else precision.fp16_arithmetic)()
        if not native:
            from ..nn import matmul

            matmul.install(self.dtype)
            self._say(
                f"this CPU has no {str(self.dtype).removeprefix('torch.')} arithmetic ({why}): matrix products are"
                " computed in fp32 and rounded"
            )

    def _make_reducer(self) -> Reducer:
        wire, pre = torch_dtype(self.plan.wire), self._config.pre_scale if self.same is None else 1.0
        self._pre_scale = pre
        st = self.state
        if self.group.transport == "nodes":
            return NodesReducer(self.plan, self.group, st.acc, st.partial, wire, pre)
        if self.plan.core_reduces:
            bucket_comm = self._bucket_comm = None
            if self.group.transport == "node":
                from ..plan.plan import SLOTS

                elem_bytes = max(wire.itemsize, self.dtype.itemsize)
                bucket_comm = self.group.open_comm("buckets", self.plan.layout.bucket_elems * elem_bytes, SLOTS)
                self._bucket_comm = bucket_comm
            if self.same is not None:
                core: CoreReducer = TreeReducer(self.plan, bucket_comm, st.acc, st.partial, wire)
            else:
                core = CoreReducer(self.plan, bucket_comm, st.acc, st.partial, wire, pre)
            core.borrow(st.lease)
            return core
        return st.make_reducer(wire, pre)

    def _make_scheduler(self, lr_scheduler: Any) -> Scheduler | None:
        from ..optim.schedules import build_scheduler

        cfg = self._config.scheduler
        if lr_scheduler is not None:
            if callable(lr_scheduler) and not hasattr(lr_scheduler, "step"):
                lr_scheduler = lr_scheduler(self.optimizer)
            given: Scheduler = lr_scheduler
            return given
        return build_scheduler(cfg.type, dict(cfg.params), self.optimizer) if cfg is not None else None

    def _make_loader(self, data: Any, collate_fn: Callable[..., Any] | None) -> TimedLoader | None:
        if data is None:
            return None
        sampler: torch.utils.data.Sampler[int] | None = None
        if self.same is not None and not isinstance(data, torch.utils.data.IterableDataset):
            dealt = MicroBatchSampler(
                data,
                self.train_micro_batch_size_per_gpu(),
                self.world_size,
                self.global_rank,
                per_step=self.same.passes * self.world_size,
                drop_last=self._config.dataloader_drop_last,
            )
            return TimedLoader(data, batch_sampler=dealt, collate_fn=collate_fn)
        if self.world_size > 1 and not isinstance(data, torch.utils.data.IterableDataset):
            sampler = torch.utils.data.DistributedSampler(data, self.world_size, self.global_rank, shuffle=True)
        shuffle = None if isinstance(data, torch.utils.data.IterableDataset) or sampler is not None else True
        return TimedLoader(
            data,
            batch_size=self._config.train_micro_batch_size_per_gpu,
            sampler=sampler,
            shuffle=shuffle,
            collate_fn=collate_fn,
            drop_last=self._config.dataloader_drop_last,
        )

    def _say(self, text: str, level: int = logging.INFO) -> None:
        if self.global_rank == 0:
            logger.log(level, text)

    def _report(self) -> None:
        self._say(self.plan.describe())
        for note in self.plan.notes:
            self._say(note)
        if self.same is not None:
            self._say(self.same.describe())
        for key, value, reason in self.state.inert(self._config.inert):
            self._say(f"config: {key} = {value!r} has no effect here: {reason}")
        if self.state.segment is not None:
            total, huge = self.state.segment.info()
            self._say(f"shared parameters: {total / 2**20:.1f} MiB, {huge / 2**20:.1f} MiB of them on huge pages")

    # ---- the loop ----------------------------------------------------------------------------------------------------
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the model. With fp16.auto_cast, floating-point inputs are cast to fp16; with precision "auto" to what
        the model computes in."""
        self.monitor.forward_begins(inputs, kwargs)
        if self.auto_precision is not None or (self._config.fp16.enabled and self._config.fp16.auto_cast):
            inputs = tuple(_cast(x, self.dtype) for x in inputs)
            kwargs = {k: _cast(v, self.dtype) for k, v in kwargs.items()}
        if self.same is None:
            out = self.module(*inputs, **kwargs)
        else:
            with self.same.forward(self.global_steps, self.module.training):
                out = self.module(*inputs, **kwargs)
        if torch.is_grad_enabled():
            self.hooks.watch(out)
        self.monitor.forward_ends(out)
        return out

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Gradients of `loss` (a scalar), reduced over the ranks into their owners' accumulators. Scales by
        1/accumulation steps (unless scale_wrt_gas=False) and by the loss scale; returns the loss scaled by the former.
        May be called several times before step.
        """
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ArgumentError(
                "backward takes a scalar loss tensor, got"
                f" {tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__}; reduce it first"
                " (loss.mean())"
            )
        if not loss.requires_grad:
            raise ArgumentError(
                "the loss does not depend on any parameter that requires a gradient (was the model run under no_grad?)"
            )
        self.monitor.backward_begins()
        gas = self.gradient_accumulation_steps()
        out = whole = loss / gas if scale_wrt_gas and gas > 1 else loss
        if self.same is not None:
            self.same.backward(scale_wrt_gas, self.hooks.synchronising)
            whole = loss  # divided once, after the sum
            if self.hooks.synchronising:
                self._pay_passes()
        scaled = whole.float() * self.scaler.loss_scale if self.scaler is not None else whole
        if self.hooks.synchronising:
            self.hooks.run(
                lambda: scaled.backward(retain_graph=retain_graph),
                self.is_gradient_accumulation_boundary(),
                self.loss_scale,
            )
        else:
            scaled.backward(retain_graph=retain_graph)
        if self.auto_precision is not None:
            self._losses.append(float(out.detach()))
        out = out.detach()
        self.monitor.backward_ends(out)
        return out

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` times the loss scale of fp16 training, for scripts that call backward themselves:
        `engine.scale(loss).backward()`."""
        if self.scaler is None:
            return loss
        self._scaled = True
        return loss.float() * self.scaler.loss_scale

    def _bare_backward(self, running: GradientHooks | None) -> tuple[bool, float]:
        """For the hooks: gradients come from a loss.backward() of the user, or (`running`) from the backward of another
        engine, whose loss went through a module of this one. They are divided by the accumulation steps here, as in
        DeepSpeed."""
        boundary, scale = self.is_gradient_accumulation_boundary(), self.loss_scale
        if running is not None:
            if self.same is not None:
                raise UnsupportedError(
                    'gradients from the backward of another engine with deepc.deterministic = "layout"; detach them, or'
                    " remove the key"
                )
            return boundary, scale / running.scale
        if self.scaler is not None and not self._scaled:
            raise DeepcError(
                "fp16 training scales the loss, and loss.backward() was called without; call engine.backward(loss), or"
                " engine.scale(loss).backward()"
            )
        self._scaled = False
        if self.same is not None:
            self.same.backward(True, True)
            self._pay_passes()
            return boundary, 1.0
        return boundary, 1.0 / self.gradient_accumulation_steps()

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> StepResult:
        """At an accumulation boundary: unscale, clip, update, publish the new parameters, advance the LR schedule.
        Collective. A step whose gradients are not finite is skipped, in every precision, and says so."""
        self.hooks.check()
        if self.same is not None:
            self._one_pass()
        if not self.is_gradient_accumulation_boundary():
            self._end_micro_step()
            return StepResult(False, "accumulating")
        self._check_still_the_model()
        if not self.hooks.accumulated and not self._take_left_behind():
            raise DeepcError(
                "engine.step() at an accumulation boundary without a backward since the last step; call"
                " engine.backward(loss) first"
            )
        self.monitor.step_begins()
        result = self._update()
        self.hooks.reset()
        self.state.gradients_end()
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        if result.applied:
            if self.lr_scheduler is not None:
                self.lr_scheduler.step(**(lr_kwargs or {}))
        else:
            self.skipped_steps += 1
            self._say(f"step {self.global_steps} skipped: {result.reason}", logging.WARNING)
        if self.auto_precision is not None:
            result = result._replace(precision_change=self._follow_policy(result.applied))
        self._end_micro_step()
        self._last = result
        calls.logger.drain()
        self.monitor.step_ends(result)
        self._print_step()
        return result

    def _follow_policy(self, applied: bool) -> str:
        """precision "auto": changes the precision if this step says so. Returns what changed, "" if nothing did.
        Collective."""
        self._losses.clear()
        policy = cast(precision.AutoPrecision, self.auto_precision)
        was = policy.mode
        why = policy.after_step(applied, self._mean_loss)
        if why is None:
            return ""
        dtype = precision.torch_dtype(policy.mode)
        if lacking := self._lacks_memory(dtype):
            self._say(f"step {self.global_steps}: precision stays {was} though {why}: {lacking}", logging.WARNING)
            policy.mode = was
            return ""
        text = f"{was} -> {policy.mode}: {why}"
        self._change_precision(dtype)
        self._say(
            f"step {self.global_steps}: precision {text}", logging.WARNING if policy.mode == "fp32" else logging.INFO
        )
        return text

    def _lacks_memory(self, dtype: torch.dtype) -> str:
        """Why parameters (and masters) in `dtype` can't be made beside the present ones now, or "". Collective, so that
        all ranks give up alike."""
        b = self._plans[dtype].bytes
        need = (b["params_private"] + b["master_private"]) * self.plan.ranks_per_node + b["params_shared"]
        have = float(self.group.gather_all(torch.tensor([memory.available()], dtype=torch.int64)).min())
        return (
            f"that needs {need / 2**30:.2f} GiB on this node for a moment and {have / 2**30:.2f} GiB are left"
            if need > have
            else ""
        )

    def _change_precision(self, dtype: torch.dtype) -> None:
        """Between two steps: parameters, buffers and what carries gradients in `dtype`, made of the fp32 masters.
        Masters, accumulators, optimizer states and schedules stay. Collective."""
        if dtype == self.dtype:
            return
        self._take_in_writes()
        self.reducer.close()
        if self._bucket_comm is not None:
            cast("NodeGroup", self.group).close_comm(self._bucket_comm)
        was, self.dtype, self.plan = self.dtype, dtype, self._plans[dtype]
        self.state.recast(self.plan)
        self.optimizer.follow_state()
        self.reducer = self._make_reducer()
        self.hooks.take_reducer(self.reducer)
        self._recast_buffers(was, dtype)
        self._publish()

    def take_precision(self) -> None:
        """After the policy's state was loaded: the mode that it has. Collective."""
        self._losses.clear()
        mode = cast(precision.AutoPrecision, self.auto_precision).mode
        dtype = precision.torch_dtype(mode)
        if dtype != self.dtype and (lacking := self._lacks_memory(dtype)):
            raise OutOfMemoryError(
                f"the checkpoint was saved in {mode}, this engine computes in {self.precision}, and to change "
                f"{lacking}; free memory, or pass load_optimizer_states=False"
            )
        self._change_precision(dtype)

    def _one_pass(self) -> None:
        """deterministic: a micro-batch whose gradients no pass has taken yet (no_sync, or no loss on this rank) gets
        its pass now."""
        hooks, same = self.hooks, cast(LayoutOrder, self.same)
        if same.passed:
            return
        if self.world_size == 1 and not hooks.accumulated and not hooks.left_behind:
            same.owed += 1  # a step without any backward is a mistake of the script
            return
        self._pay_passes()
        hooks.begin_pass(self.is_gradient_accumulation_boundary())
        hooks.end_pass()

    def _pay_passes(self) -> None:
        same = cast(LayoutOrder, self.same)
        for _ in range(same.owed):
            self.hooks.begin_pass(False)
            self.hooks.end_pass()
        same.owed = 0

    def _end_micro_step(self) -> None:
        if self.same is not None:
            self.same.end_micro_batch(self.is_gradient_accumulation_boundary())
        self.micro_steps += 1
        self.monitor.micro_step_ends()

    def _update(self) -> StepResult:
        self.optimizer.overflow = False
        norm, reason, bad = self._judge()
        if self.scaler is not None:
            scale = self.scaler.loss_scale
            self.scaler.update_scale(reason != "")
            self.optimizer.loss_scale = self.scaler.loss_scale
            if reason:
                reason += f"; loss scale {scale:g} -> {self.scaler.loss_scale:g}"
        if reason:
            self.optimizer.overflow = True
            return StepResult(False, reason, bad, None)
        self._take_in_writes()
        self.optimizer.leave_out(frozenset(i for i, p in enumerate(self.state.trained) if not p.requires_grad))
        self.optimizer.update(self._grad_scale(norm))
        self._publish()
        return StepResult(True, "", None, norm)

    def _take_in_writes(self) -> None:
        """Stages 0 to 2: a user's writes to the replicas count, as under DDP; on every rank alike is the user's
        part."""
        if self.plan.stage < 3:
            changed = self.state.changed()
            self.state.take_in_replaced()
            self.state.master_from_params(changed)

    def _unit(self) -> float:
        """Factor that turns an accumulated gradient (a sum over ranks, loss-scaled, predivided) into the average
        gradient."""
        scale = self.scaler.loss_scale if self.scaler is not None else 1.0
        return 1.0 / ((self.world_size if self.same is None else self.same.divisor) * scale * self._pre_scale)

    def _grad_scale(self, norm: float) -> float:
        unit, clip = self._unit_now, self._config.gradient_clipping
        if clip > 0:
            excess = (norm + 1e-6) / clip
            if excess > 1.0:
                return unit / excess
        return unit

    def _judge(self) -> tuple[float, str, str | None]:
        """The global gradient norm of this step, or why it must be skipped. One message to all ranks, which is also the
        fence after which nobody reads the old parameters of stage 3. Gradients that some rank still has get a pass
        first."""
        st, plan = self.state, self.plan
        if not self.hooks.norm_ready:
            if self.same is not None:
                cast(TreeReducer, self.reducer).tree.fold()
            self.reducer.settle()
            st.partial.copy_(torch.ops.deepc.norm_squared(st.acc))
        partial = st.partial
        whole = plan.own_all or self.world_size == 1
        loss = (
            []
            if self.auto_precision is None
            else [math.fsum(self._losses) if all(map(math.isfinite, self._losses)) else math.nan, len(self._losses)]
        )
        row = self.monitor.row()
        flags = torch.tensor(
            [*row, *loss, st.stray_write() if plan.stage == 3 else -1, self.hooks.left_behind],
            dtype=torch.float64,
            device=partial.device,
        )
        self.monitor.put_loss(flags)
        gathered = self.group.gather_all(flags if whole else torch.cat([partial, flags]))
        self._raise_if_stray(gathered[:, -2].tolist())
        if any(gathered[:, -1].tolist()):
            self.hooks.flush()
            return self._judge()
        if not whole:
            by_part = sorted(range(self.world_size), key=self.group.part_of)
            partial = norm_order(plan, gathered[by_part, : -len(flags)])
        self.monitor.take(gathered[:, -len(flags) : gathered.shape[1] - len(flags) + len(row)])
        if loss:
            known = [total for total, count in gathered[:, -4:-2].tolist() if count]
            self._mean_loss = sum(known) / len(known) if known else None
        self._verify_checksums()
        partial = partial.cpu().contiguous()
        total = C.dc_sum_partials(partial.data_ptr(), partial.numel())
        self._unit_now = self._unit()
        if not math.isfinite(total):
            bad = self._first_bad()
            return math.nan, f"gradients are not finite (first: {bad})", bad
        self._grad_norm = math.sqrt(total) * abs(self._unit_now)
        return self._grad_norm, "", None

    def _first_bad(self) -> str:
        """Name of the first parameter, in flat order, whose gradient is not finite. Collective at stages 1 to 3."""
        st, plan = self.state, self.plan
        found = -1
        if st.acc.device.type == "cpu":
            index = ctypes.c_int64()
            call("dc_find_nonfinite", st.acc.data_ptr(), code(st.acc.dtype), st.acc.numel(), ctypes.byref(index))
            at = index.value
        else:
            where = torch.nonzero(~torch.isfinite(st.acc))
            at = int(where[0]) if where.numel() else -1
        if at >= 0:
            found = next((s.param for s in plan.segments if s.shard_begin <= at < s.shard_begin + s.length), -1)
        if not plan.own_all and self.world_size > 1:
            everyone = self.group.gather_all(torch.tensor([found], dtype=torch.int64)).view(-1).tolist()
            found = min((f for f in everyone if f >= 0), default=-1)
        return st.names[found] if found >= 0 else "unknown"

    def _publish(self) -> None:
        """Makes the new parameters every rank's: at stage 3 they already are on their node (a fence), at stages 1 and 2
        replicas are completed; between nodes the owners' shards travel first."""
        plan = self.plan
        if plan.nodes > 1 and plan.stage > 0:
            cast(NodesReducer, self.reducer).publish(self.state.flat, self.state.master, plan.stage == 3)
        if plan.stage == 3 and self.world_size > 1:
            self.group.node_barrier()
        elif plan.stage in (1, 2) and self.world_size > 1 and plan.nodes == 1:
            self.reducer.gather(self.state.flat)
        self.state.bump_versions()
        self._remember_checksums()

    # ---- stray writes ------------------------------------------------------------------------------------------------
    def _raise_if_stray(self, by_rank: Sequence[float]) -> None:
        for rank, index in enumerate(by_rank):
            if index >= 0:
                name = self.state.name_at(int(index))
                raise StrayWriteError(
                    f"parameter '{name}' was written (in place, by load_state_dict, or by a cast of the model: half(),"
                    f" float(), to(dtype)) outside GatheredParameters on rank {rank} since the last step. At ZeRO stage"
                    " 3 its memory is shared by all ranks of the node, so every rank's write would act. Write it under"
                    " deepc.zero.GatheredParameters(params, modifier_rank=0) or with engine.load_module_state_dict;"
                    " cast a copy.deepcopy(model); or use stage 2."
                )

    def _raise_stray_writes(self) -> None:
        """Raises on all ranks if some rank wrote a parameter of stage 3. Collective."""
        if self.plan.stage == 3:
            mine = torch.tensor([float(self.state.stray_write())], dtype=torch.float64)
            self._raise_if_stray(self.group.gather_all(mine).view(-1).tolist())
            self._verify_checksums()

    def _my_params(self) -> range:
        return range(self.group.local_rank, len(self.state.trained), self.group.ranks_per_node)

    def _checksum(self, i: int) -> int:
        offset, n = self.plan.layout.offsets[i], self.plan.layout.numels[i]
        view = self.state.flat[offset : offset + n]
        crc: int = C.dc_crc32c(0, view.data_ptr(), view.numel() * view.element_size())
        return crc

    def _remember_checksums(self) -> None:
        if self._debug and self.plan.stage == 3 and self.device.type == "cpu" and not self.plan.sharded:
            self._checksums = [self._checksum(i) for i in self._my_params()]
            self.group.barrier()

    def _verify_checksums(self) -> None:
        if self._checksums is None:
            return
        stray = next((i for i, crc in zip(self._my_params(), self._checksums) if self._checksum(i) != crc), -1)
        everyone = self.group.gather_all(torch.tensor([float(stray)], dtype=torch.float64)).view(-1).tolist()
        self._raise_if_stray(everyone)

    def _parameters_modified(self, params: Sequence[torch.nn.Parameter]) -> None:
        """After GatheredParameters with a modifier: masters follow where the values changed."""
        indices = {id(p): i for i, p in enumerate(self.state.trained)}
        self.state.master_from_params([indices[id(p)] for p in params if id(p) in indices])
        self.group.barrier()
        if self.plan.parameters_as:
            self._publish()
            return
        self.state.bump_versions()
        self._remember_checksums()

    # ---- gradients and parameters that are not where they were -------------------------------------------------------
    def _take_left_behind(self) -> bool:
        """Reduces gradients that some rank has kept (after no_sync; a module used again under reentrant checkpointing).
        Collective; True if there were any."""
        mine = torch.tensor([float(self.hooks.left_behind)], dtype=torch.float64)
        if not any(self.group.gather_all(mine).view(-1).tolist()):
            return False
        self.hooks.flush()
        return True

    def _parts_of_model(self) -> list[int]:
        """The identities of all submodules and parameters, in order."""
        return [id(x) for registry in self._registries for x in registry.values()]

    def _remember_model(self) -> None:
        modules = list(self.module.modules())
        self._registries = [r for m in modules for r in (m._parameters, m._modules)]
        self._parts = self._parts_of_model()
        self._model_params = {id(p): p for p in self.module.parameters()}  # holds them: an id stays theirs
        self._was_frozen = [(n, p) for n, p in self.module.named_parameters() if not p.requires_grad]

    def _check_still_the_model(self) -> None:
        """Raises if a parameter that should be trained joined the model after initialize: the flat space is laid out,
        and training without it would be silent. Frozen ones may come, and any may go."""
        if self._parts_of_model() != self._parts:
            for name, p in self.module.named_parameters():
                if p.requires_grad and id(p) not in self._model_params and id(p) not in _owner_of:
                    raise UnsupportedError(
                        f"parameter '{name}' was added to the model (or replaced) after deepc.initialize and would not"
                        " be trained: states are laid out once. Build the whole model first (adapters and heads too),"
                        " or call engine.destroy() and initialize again, or set requires_grad_(False)"
                    )
            known = self._model_params
            self._remember_model()
            self._model_params.update(known)
        for name, p in self._was_frozen:
            if p.requires_grad and p.grad is not None and id(p) not in _owner_of:
                raise UnsupportedError(
                    f"parameter '{name}' was frozen at deepc.initialize, requires a gradient now and would not be"
                    " trained: states are laid out once. Call engine.destroy() and initialize again, or initialize"
                    " with everything that is ever trained and freeze by requires_grad_(False) later"
                )

    # ---- accumulation ------------------------------------------------------------------------------------------------
    def is_gradient_accumulation_boundary(self) -> bool:
        """True if the next step() updates the parameters."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Overrides the count of micro-batches until called again."""
        self._boundary = is_boundary

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside keep their gradients on this rank, in `.grad`; the first one after reduces all of
        them."""
        before, self.hooks.synchronising = self.hooks.synchronising, False
        try:
            yield
        finally:
            self.hooks.synchronising = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discards what has been accumulated since the last step, and what a backward that raised has left (then
        collective)."""
        self.hooks.discard()
        self._losses.clear()
        self.monitor.discard()
        if self.same is not None:
            self.same.discard()

    # ---- what scripts ask --------------------------------------------------------------------------------------------
    def train_batch_size(self) -> int:
        return self._config.train_batch_size  # type: ignore[return-value]  # resolved: see initialize

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._config.train_micro_batch_size_per_gpu  # type: ignore[return-value]  # resolved: see initialize

    def gradient_accumulation_steps(self) -> int:
        return self._config.gradient_accumulation_steps  # type: ignore[return-value]  # resolved: see initialize

    def gradient_clipping(self) -> float:
        return self._config.gradient_clipping

    def zero_optimization_stage(self) -> int:
        return self.plan.stage

    def get_lr(self) -> list[float]:
        return [float(g["lr"]) for g in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """Norm of the average gradient of the last applied step, before clipping."""
        return self._grad_norm

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as the dictionary it came from."""
        return self._config.raw

    @property
    def loss_scale(self) -> float:
        return self.scaler.loss_scale if self.scaler is not None else 1.0

    @property
    def precision(self) -> str:
        """ "bf16", "fp16" or "fp32": what the model computes in now."""
        return precision.name_of(self.dtype)

    @property
    def last_step(self) -> StepResult:
        return self._last

    def was_step_applied(self) -> bool:
        return self._last.applied

    def compile(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]  # torch has no annotation for its own
        """Compiles the module in place (torch.nn.Module.compile). Hooks stay outside of the graph. In streamed mode
        each block is compiled by itself, with its gathers outside."""
        if self.plan.mode == "streamed":
            cast("StreamedState", self.state).compile(*args, **kwargs)
        else:
            self.module.compile(*args, **kwargs)

    def keep_gathered(self) -> contextlib.AbstractContextManager[None]:
        """Context in which ZeRO-3's parameters are gathered once and stay, for many forward calls in a row (generate).
        Collective; no effect where they are always there."""
        return self.state.keep_gathered()

    @property
    def comm_bytes(self) -> dict[str, int]:
        """Bytes that this rank has sent to other nodes so far: "gradients", "parameters", "control" (norms, broadcasts)
        and "total". Payload: without the headers of the network. All 0 on one node."""
        sent = {"gradients": 0, "parameters": 0, "control": 0, **self.group.sent_bytes}
        return {**sent, "total": sum(sent.values())}

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Milliseconds of the last step() by DeepSpeed's timer names ("fwd_microstep", "bwd", ...); empty without
        wall_clock_breakdown."""
        return wall_clock(self) if self.profile is not None else {}

    def memory_summary(self) -> dict[str, int]:
        """Bytes of this process now (rss, pss, peak) and of the plan."""
        return {**memory.process_bytes(), **{f"plan_{k}": v for k, v in self.plan.bytes.items()}}

    # ---- gradients and states, whole (collective): deepc.view(p) and access.py have more -----------------------------
    def full_grad(self, p: torch.Tensor) -> torch.Tensor | None:
        """Average gradient of `p`, unscaled and before clipping, fp32, on every rank; None before a backward.
        Collective."""
        return access._Access(self, p).grad(self._unit())

    def full_fp32_param(self, p: torch.Tensor) -> torch.Tensor:
        """fp32 master of `p`, whole, on every rank. Collective."""
        return access._Access(self, p).fp32()

    def full_optimizer_state(self, p: torch.Tensor, name: str) -> torch.Tensor:
        """Optimizer state `name` ("exp_avg", ...) of `p`, whole, fp32, on every rank. Collective."""
        return access._Access(self, p).state(name)

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The module's state_dict, whole, on every rank, in the training precision. Collective."""
        return access.module_state_dict(self, exclude_frozen_parameters)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """The module's weights, whole, on the CPU of rank 0 (None on the others); DeepSpeed's name, which accelerate
        calls. Collective."""
        return access.consolidated_state_dict(self, exclude_frozen_parameters)

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Always True: whole weights cost no extra memory here."""
        return True

    # ---- checkpoints -------------------------------------------------------------------------------------------------
    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes `save_dir/<tag>` (default global_step<N>): safetensors shards by their owners, an index, published by
        one rename. client_state: tensors, NumPy values and JSON types; anything else is a CheckpointTypeError.
        Collective."""
        from .saving import save

        with self.monitor.disk("save", save_dir):
            save(
                self,
                save_dir,
                tag if tag is not None else f"global_step{self.global_steps}",
                client_state or {},
                save_latest,
                exclude_frozen_parameters,
            )
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Loads what save_checkpoint wrote, from any number of ranks and any stage. Returns (path, client_state);
        (None, {}) if `load_dir` holds no checkpoint and no tag was given. Collective."""
        from .saving import load

        if custom_load_fn is not None:
            raise UnsupportedError(
                "custom_load_fn is not supported; change the module after load_checkpoint under GatheredParameters"
            )
        with self.monitor.disk("load", load_dir):
            return load(
                self,
                load_dir,
                tag,
                load_module_strict,
                load_optimizer_states and not load_module_only,
                load_lr_scheduler_states and not load_module_only,
            )

    def load_module_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Loads the module's state_dict at any stage; fp32 masters follow. At stage 3 rank 0's values count.
        Collective."""
        access.load_module_state_dict(self, state_dict, strict)

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes the module's weights, whole, in the training precision, as a Hugging Face checkpoint
        (`save_dir/model.safetensors`, in shards with an index when large). Rank 0 writes. Collective. The file name is
        Hugging Face's, whatever save_filename says: there is no pickled form.
        """
        from .saving import save_model

        save_model(self, save_dir, exclude_frozen_parameters)
        return True

    # ---- printing ----------------------------------------------------------------------------------------------------
    def log(self, scalars: dict[str, Any]) -> None:
        """Numbers of the script's own, {"accuracy": 0.9}, for the next log line, metrics.jsonl and the trackers of the
        configuration (docs/logging.md)."""
        self.monitor.log(scalars)

    def _print_step(self) -> None:
        if self._first_step is not None and self.global_steps == 1 and (told := self._first_step.report()):
            self._say(told)
            self.monitor.note("memory", text=told, peak_bytes=self._first_step.measured)
        every = self._config.steps_per_print
        if self._config.memory_breakdown and (not every or self.global_steps % every == 0):
            m = memory.process_bytes()
            self._say(
                f"memory (MiB): rss {m['rss_bytes'] >> 20}, pss {m['pss_bytes'] >> 20}, peak rss"
                f" {m['peak_rss_bytes'] >> 20}"
            )

    def destroy(self) -> None:
        """Leaves the group and removes the hooks. Parameters stay readable."""
        self.monitor.close()
        _engines.discard(self)
        self.hooks.remove()
        self.state.close()
        self.reducer.close()
        self.group.close()
        if self.plan.stage == 3:
            gathered.let_go([*self.state.trained, *(p for _, p in self.state.frozen)], self._holds)
        for p in self.state.trained:
            _owner_of.pop(id(p), None)
            unshare(p)


# id(parameter) -> engine that trains it; entries go with the engine, which holds its parameters.
_owner_of: weakref.WeakValueDictionary[int, Engine] = weakref.WeakValueDictionary()
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _cast(x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, torch.Tensor) and x.is_floating_point():
        return x.to(dtype)
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*(_cast(v, dtype) for v in x))
    if isinstance(x, (list, tuple)):
        return type(x)(_cast(v, dtype) for v in x)
    if isinstance(x, dict):
        return {k: _cast(v, dtype) for k, v in x.items()}
    return x
