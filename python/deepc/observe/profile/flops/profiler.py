"""The flops profiler: parameters, multiply-accumulates (MACs), operations and time of every module of a model, with the
API and output of DeepSpeed's.

    flops, macs, params = get_model_profile(model, input_shape=(8, 3, 224, 224))

    profiler = FlopsProfiler(model)
    profiler.start_profile()
    loss = model(batch)
    profiler.print_model_profile(); profiler.end_profile()

Operators are counted where torch dispatches them (costs.py), so what a model calls, and how, does not matter: F.linear
or `@`, attention, einsum, a fused operator of deepc's, a library's own. Hooks say to which module they belong. Counted
is what runs inside a module's forward; a forward that runs again in backward (activation checkpointing) is not.
Parameters are logical: with ZeRO-3 those of the whole model, wherever they lie.

While a profile runs modules have DeepSpeed's attributes: __params__, __flops__ and __macs__ (of a module's own
operators, without its children's) and __duration__ (seconds, children included)."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn

from ....core.foreign import private
from ....core.foreign.private import TorchDispatchMode
from ....errors import ArgumentError, numeric
from ....nn.aten.cross_entropy import logits_inside
from ....parallel.pipeline.part import called_to_evaluate
from .costs import Cost, cost_of, counted, get_module_duration, get_module_flops, get_module_macs, is_composite
from .text import (
    duration_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
    print_aggregated,
    print_profile,
)

__all__ = ["FlopsProfiler", "get_model_profile"]
_log = logging.getLogger("deepc")


_ATTRIBUTES = (
    "__flops__",
    "__macs__",
    "__params__",
    "__expert_params__",
    "__model_expert_params__",
    "__start_time__",
    "__duration__",
)
_UNKNOWN: Any = object()
_LOG_SOFTMAX, _NLL_LOSS = torch.ops.aten._log_softmax.default, torch.ops.aten.nll_loss_forward.default


class _Counter(TorchDispatchMode):
    """Adds what operators cost to the module that is running."""

    def __init__(self, running: list[tuple[nn.Module, float]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self._running = running
        self._cost: dict[Any, Cost | None] = {}
        self._composite: dict[Any, bool] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        composite = self._composite.get(func)
        if composite is None:
            composite = self._composite[func] = is_composite(func)
        if composite:
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        if (logits := logits_inside()) is not None:  # by chunks, it counts as torch's own, which is these two
            if func is not _NLL_LOSS:
                return out
            args = (logits,)
            self._add(_LOG_SOFTMAX, args, kwargs, out)
        self._add(func, args, kwargs, out)
        return out

    def _add(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        cost = self._cost.get(func, _UNKNOWN)
        if cost is _UNKNOWN:
            cost = self._cost[func] = cost_of(func)
        if cost is not None and self._running:
            flops, macs = cost(args, kwargs, out)
            module = counted(self._running[-1][0])
            module.__flops__ += flops
            module.__macs__ += macs


class FlopsProfiler:
    """model: the module. ds_engine: the engine that trains it, for the lines about ranks and backward.
    recompute_fwd_factor: how much of a forward runs again in backward (activation checkpointing of everything: 1.0).
    count: also operations, not only time (counting slows a forward down a little)."""

    def __init__(
        self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0, *, count: bool = True
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"FlopsProfiler takes a torch.nn.Module, got {type(model).__name__}")
        self.model, self.ds_engine, self.recompute_fwd_factor = model, ds_engine, recompute_fwd_factor
        self.started = False
        self.flops: int | str | None = None  # totals of the profile that was printed last
        self.macs: int | str | None = None
        self.params: int | str | None = None
        self._count = count
        self._handles: list[Any] = []
        self._running: list[tuple[nn.Module, float]] = []
        self._counter: _Counter | None = None
        self._stance: Any = None
        self._inside = 0
        self._gpus: set[torch.device] = set()  # that the model computes on: the current one may be another
        if count:  # the first operator under a mode has torch import its compiler: seconds, which no forward shall show
            with _Counter([]):
                torch.empty(0, dtype=torch.float32, device="cpu")

    # ---- recording ---------------------------------------------------------------------------------------------------
    def start_profile(self, ignore_list: Sequence[type] | None = None) -> None:
        """Forgets what was there and counts from now on. ignore_list: classes of modules without an entry of their own;
        their operators go to the module around them."""
        self.stop_profile()
        self.reset_profile()
        of_model = (*self.model.parameters(), *self.model.buffers())
        self._gpus = {t.device for t in of_model if t.device.type == "cuda"}
        for module in self.model.modules():
            if not (ignore_list and type(module) in ignore_list):
                self._handles.append(module.register_forward_pre_hook(self._enter))
                self._handles.append(module.register_forward_hook(self._leave, always_call=True))
        self._eager()
        self.started = True

    def _eager(self) -> None:
        """Compiled code has no modules: a compiled model runs eagerly while it is profiled."""
        if "torch._dynamo" in sys.modules:
            self._stance = torch.compiler.set_stance("force_eager")

    def stop_profile(self) -> None:
        """Stops counting; results stay."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._leave_counter()
        self._running.clear()
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None

    def reset_profile(self) -> None:
        """Zeroes all counts."""
        for module in map(counted, self.model.modules()):
            module.__flops__ = module.__macs__ = 0
            module.__params__ = sum(p.numel() for p in cast(nn.Module, module).parameters())
            module.__expert_params__ = module.__model_expert_params__ = 0
            module.__start_time__ = module.__duration__ = 0.0

    def end_profile(self) -> None:
        """Stops, and takes everything off the modules."""
        if not self.started:
            return
        self.stop_profile()
        self.started = False
        for module in self.model.modules():
            for name in _ATTRIBUTES:
                module.__dict__.pop(name, None)

    def _now(self) -> float:
        for device in self._gpus:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def _enter(self, module: nn.Module, _: Any) -> None:
        from ..probe import seen

        seen()
        if private.graph_task_id() != -1:  # a recomputation in backward
            return
        if not self._running and self._count:
            self._counter = _Counter(self._running)
            self._counter.__enter__()  # type: ignore[no-untyped-call]  # torch
        self._running.append((module, self._now()))

    def _leave(self, module: nn.Module, _: Any, __: Any) -> None:
        if private.graph_task_id() != -1:
            return
        now = self._now()
        while self._running:  # deeper ones are left over only if their hooks did not run
            last, began = self._running.pop()
            counted(last).__duration__ += now - began
            if last is module:
                break
        if not self._running:
            self._leave_counter()

    def _leave_counter(self) -> None:
        if self._counter is not None:
            self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch
            self._counter = None

    # ---- results -----------------------------------------------------------------------------------------------------
    def _check(self) -> None:
        if not self.started:
            raise ArgumentError(
                "there is no profile: call start_profile() and run the model before this, and end_profile() after it"
            )

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """Floating-point operations of the forward."""
        self._check()
        total = get_module_flops(self.model)
        return number_to_string(total) if as_string else total

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Multiply-accumulates of the forward."""
        self._check()
        total = get_module_macs(self.model)
        return macs_to_string(total) if as_string else total

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Seconds of the forward."""
        self._check()
        total = get_module_duration(self.model)
        return duration_to_string(total) if as_string else total

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Parameters of the model, each once, wherever ZeRO has put them."""
        self._check()
        model = counted(self.model)
        total = model.__params__ + model.__expert_params__
        return params_to_string(total) if as_string else total

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """The summary, the top modules of every depth, and (detailed) the model's tree with every module's figures; to
        standard output or to `output_file`, whose folders are made. module_depth: so many depths of the table, -1:
        all. The totals stay in `flops`, `macs` and `params` when the profile ends."""
        if self.started:
            self.flops, self.macs, self.params = self.get_total_flops(), self.get_total_macs(), self.get_total_params()
            print_profile(self, profile_step, module_depth, top_modules, detailed, output_file)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Only the table of top modules."""
        self._check()
        print_aggregated(self.model, module_depth, top_modules, sys.stdout)


@numeric
def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Sequence[type] | None = None,
    mode: str = "forward",
) -> tuple[int, int, int] | tuple[str, str, str]:
    """(flops, macs, parameters) of one forward of `model` (numbers, or text with as_string), and the printed profile.

    input_shape: of a single tensor input, made of ones in the model's dtype; or args, kwargs: the inputs. mode:
    "forward" or "generate". The model runs warm_up + 2 times in eval mode: once for time, once for counts. Its modules
    then have the modes that they had."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"get_model_profile takes a torch.nn.Module, got {type(model).__name__}")
    if mode not in ("forward", "generate"):
        raise ArgumentError(f'mode={mode!r}; it must be "forward" or "generate"')
    if input_shape is not None:
        if not isinstance(input_shape, tuple) or not input_shape:
            raise ArgumentError(f"input_shape={input_shape!r}; it must be a tuple with at least one size, batch first")
        usual = torch.empty((), dtype=torch.get_default_dtype(), device=torch.get_default_device())
        like = next(model.parameters(), usual)
        args = [torch.ones(input_shape, dtype=like.dtype, device=like.device)]
    if not isinstance(args, Sequence) or isinstance(args, str):
        raise ArgumentError(f"get_model_profile: args is the list of the model's inputs, got {type(args).__name__}")
    if not args and not kwargs:
        raise ArgumentError("get_model_profile needs input_shape=, or the model's inputs as args= or kwargs=")
    run: Callable[..., Any] = model if mode == "forward" else cast(Any, model).generate
    profiler = FlopsProfiler(model, count=False)
    with called_to_evaluate(model):
        try:
            for _ in range(warm_up):
                run(*args, **(kwargs or {}))
            profiler.start_profile(ignore_list=ignore_modules)
            run(*args, **(kwargs or {}))
            durations = [counted(m).__duration__ for m in model.modules()]
            profiler._count = True
            profiler.start_profile(ignore_list=ignore_modules)
            run(*args, **(kwargs or {}))
            profiler.stop_profile()
            for module, duration in zip(model.modules(), durations):
                counted(module).__duration__ = duration
            found = (
                get_module_flops(model),
                get_module_macs(model),
                counted(model).__params__ + counted(model).__expert_params__,
            )
            if print_profile:
                profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
        finally:  # a forward that raises leaves no hooks behind
            profiler.end_profile()
    return (number_to_string(found[0]), macs_to_string(found[1]), params_to_string(found[2])) if as_string else found
