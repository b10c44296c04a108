"""One question, and the dry run that answers it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Union

from ....config.rules import default_optimizer
from ....config.tree import Config
from ....core import memory
from ....core.ops import torch_dtype
from ....errors import ArgumentError, UnsupportedError
from ....optim.factory import (
    check_format,
    check_optimizer,
    form_on_disk,
    make_optimizer,
    moments_of,
    state_bytes_of,
    steps_whole_blocks,
    takes_core_path,
    twin_over,
)
from ...derive import Machine, derive, meta_of
from ...mesh import Mesh
from ...plan import SLOTS
from .figures import MemoryEstimate, changed
from .states import assembled

if TYPE_CHECKING:
    import torch

    from ...plan import Plan

    Model = Union[torch.nn.Module, Callable[[], torch.nn.Module]]  # noqa: UP007
    ConfigSource = Union[str, os.PathLike[str], dict[str, Any], Config]  # noqa: UP007
    OptimizerLike = Union[torch.optim.Optimizer, Callable[[Any], torch.optim.Optimizer]]  # noqa: UP007
    Named = Sequence[tuple[str, torch.nn.Parameter]]


@dataclass
class Case:
    """One question. `work` answers it, in a child."""

    model: Any
    config: Any
    batch: Any
    loss_fn: Callable[..., Any] | None
    ranks_per_node: int
    nodes: int
    optimizer: Any
    device: str
    steps: int
    recompute: bool = False

    def work(self) -> dict[str, Any]:
        from ....nn.fuse import fuse_as_asked
        from .. import dryrun

        loaded = dryrun.load_compiler()  # here already, for the fake tensors
        model = self._make()
        fuse_as_asked(model, self.config.deepc.fuse)  # in a child: nobody sees it
        if self.recompute and not dryrun.checkpoint_blocks(model):
            raise UnsupportedError("the model has no list of blocks to recompute")
        base, named, group_of = self._optimizer(model)
        plan = self._plan(base, named, group_of)
        found = predict(
            model,
            plan,
            base,
            self.config,
            self.batch,
            self.loss_fn,
            named=named,
            group_of=group_of,
            steps=self.steps,
            loaded=loaded,
        )
        return changed(found, nodes=self.nodes).to_dict()

    def describe(self) -> dict[str, Any]:
        """The plan in words. In a child as well: the model may be one of fake tensors."""
        return {"text": self._plan(*self._optimizer(self._make())).describe()}

    def _make(self) -> torch.nn.Module:
        import torch

        from ....core.foreign.private import FakeTensorMode

        if isinstance(self.model, torch.nn.Module):
            return self.model
        with FakeTensorMode():
            model = self.model()
        if not isinstance(model, torch.nn.Module):
            raise ArgumentError(
                f"the function that makes the model returned {type(model).__name__}, not a torch.nn.Module"
            )
        return model

    def _optimizer(self, model: torch.nn.Module) -> tuple[torch.optim.Optimizer, Named, dict[int, int]]:
        import torch

        named = list(model.named_parameters())
        params = [p for _, p in named if p.requires_grad]
        if not params:
            raise ArgumentError("no parameters to train: no parameter of the model requires a gradient")
        base = self.optimizer
        if base is None:
            cfg = self.config.optimizer or default_optimizer()
            base = make_optimizer(cfg.type, cfg.params, params, backend=cfg.backend)
        elif not isinstance(base, torch.optim.Optimizer):
            base = base(params)
        check_optimizer(base, self.config.zero.stage, allow_untested=True)
        check_format(base, self.device, *self.config.zero.on_disk)
        group_of = {id(p): g for g, group in enumerate(base.param_groups) for p in group["params"] if p.requires_grad}
        return base, named, group_of

    def _plan(self, base: torch.optim.Optimizer, named: Named, group_of: dict[int, int]) -> Plan:
        mesh = Mesh(dp=self.ranks_per_node * self.nodes, ranks_per_node=self.ranks_per_node)
        machine = Machine.here(self.device)
        return derive(
            self.config,
            meta_of(named, group_of),
            mesh,
            machine,
            moments=moments_of(base),
            state_bytes=state_bytes_of(base),
            on_disk=form_on_disk(base),
            whole_blocks=steps_whole_blocks(base),
        )


def predict(
    model: torch.nn.Module,
    plan: Plan,
    base: torch.optim.Optimizer,
    config: Config,
    batch: Any,
    loss_fn: Callable[..., Any] | None,
    *,
    named: Named,
    group_of: dict[int, int],
    steps: int = 3,
    loaded: int = 0,
) -> MemoryEstimate:
    """The prediction for a plan that is made. With a batch only in a child (dryrun.forked): the model is spoilt.
    loaded: what torch's compiler takes, which torch's own optimizers and its checkpoint import, and nothing else."""
    from ....core.foreign.private import has_checkpointed
    from ....optim.states.dense import Optimizer
    from .. import dryrun

    core = takes_core_path(base)
    host_states = plan.device != "cpu" and config.zero.offload_optimizer.device == "cpu"
    run = None
    if batch is not None and plan.mode == "streamed":
        raise UnsupportedError(
            "a dry run of the streamed mode does not exist; estimate without a sample batch (model states only)"
        )
    if batch is not None:
        gas = config.gradient_accumulation_steps or 1
        trained = [p for _, p in reversed(named) if id(p) in group_of]
        update = None if core else _torch_update(plan, base, group_of, trained)
        run = dryrun.run(
            model,
            batch,
            loss_fn,
            dtype=torch_dtype(plan.dtype),
            trained=trained,
            layout=plan.layout,
            slots=SLOTS if plan.world > 1 else 0,
            own_all=plan.own_all,
            leases=gas == 1 and plan.core_reduces,
            acc_color=memory.COLORS["acc"],
            acc_size=plan.accumulator.itemsize,
            accumulation=gas if gas <= 4 else 4,
            steps=steps,
            update=update,
            keeps_frozen=plan.stage < 3,
            cast_inputs=config.fp16.enabled and config.fp16.auto_cast,
            budget=config.activation_checkpointing.budget,
        )
    if isinstance(base, Optimizer) and not has_checkpointed():
        loaded = 0
    moments = moments_of(base) if core else 0
    return assembled(plan, moments, not core, host_states, run, loaded, steps, state_bytes_of(base))


def _torch_update(
    plan: Plan, base: torch.optim.Optimizer, group_of: dict[int, int], trained: Sequence[torch.nn.Parameter]
) -> Callable[[Any, Any, Any], Callable[[], Any]]:
    """For dryrun.run: the step of a torch optimizer on fake shards, as the engine makes them."""

    def make(_: Any, mode: Any, tracker: Any) -> Callable[[], Any]:
        import torch

        groups: list[list[Any]] = [[] for _ in base.param_groups]
        with mode:
            for s in plan.segments:
                shape = trained[s.param].shape if s.length == plan.layout.numels[s.param] else (s.length,)
                source, grad = torch.empty(shape), torch.empty(shape)
                tracker.known(source), tracker.known(grad)
                p = torch.nn.Parameter(source)
                p.grad = grad
                groups[group_of[id(trained[s.param])]].append(p)
            twin = twin_over(base, groups)
        return twin.step

    return make
