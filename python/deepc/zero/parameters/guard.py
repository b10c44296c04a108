"""What happens to writes into parameters that the optimizer step did not make, and to a model that changed under its
engine.

At ZeRO stages 0 to 2 every rank has a replica of its own and a user's write counts (`Guard`). At stage 3 the ranks of a
node read one copy, so that a write would act once per rank: it is refused, on all ranks (`SharedGuard`). A guard takes
(state, group, reducer) and knows no engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...core.lib import C
from ...core.ops import casts
from ...errors import ArgumentError, DeepcError, StrayWriteError, UnsupportedError
from ..step import publish
from ..tiers.agree import run_together
from . import owners
from .param import Released

if TYPE_CHECKING:
    from ...comm.groups import Group
    from ..state import ModelState
    from ..step.reducers.base import Reducer


def make_guard(state: ModelState, group: Group, reducer: Reducer, debug: bool) -> Guard:
    """The guard of a plan's stage. debug: at stage 3 on a CPU also checksums, which see the writes of C code."""
    return (SharedGuard if state.plan.stage == 3 else Guard)(state, group, reducer, debug)


class Guard:
    """Stages 0 to 2. `reducer` is exchanged by who exchanges the engine's."""

    def __init__(self, state: ModelState, group: Group, reducer: Reducer, debug: bool = False) -> None:
        self.state, self.group, self.reducer = state, group, reducer
        self._send = publish.choose(state.plan)

    def publish(self) -> None:
        """Makes the owners' parameters every rank's (zero/step/publish.py). Collective."""
        self._send(self.state, self.group, self.reducer)
        self.state.bump_versions()
        self.remember()

    def take_in_writes(self) -> None:
        """Before an update: a user's writes to the replicas count, as under DDP; on every rank alike is the user's
        part."""
        changed = self.state.changed()
        self.state.take_in_replaced()
        self.state.master_from_params(changed)

    def modified(self, params: Iterable[torch.nn.Parameter]) -> None:
        """After a write that was allowed (GatheredParameters with a modifier): masters follow where the values changed.
        Collective."""
        indices = {id(p): i for i, p in enumerate(self.state.trained)}
        written = [indices[id(p)] for p in params if id(p) in indices]
        if self.state.plan.updates_on_disk:
            run_together(self.group, lambda: self.state.master_from_params(written))
        else:
            self.state.master_from_params(written)
        self.group.barrier()
        if self.state.plan.parameters_as:
            self.publish()
            return
        self.state.bump_versions()
        self.remember()

    # ---- writes that nobody may make: none here ----------------------------------------------------------------------
    def stray_write(self) -> int:
        """The index (ModelState.name_at) of a parameter that this rank wrote since the last step and must not have, or
        -1."""
        return -1

    def raise_if_stray(self, by_rank: Sequence[float]) -> None:
        """by_rank: what stray_write gave on each rank. Raises StrayWriteError for the first that is not -1."""

    def refuse_writes(self) -> None:
        """Raises on all ranks if some rank wrote a parameter of stage 3. Collective there."""

    def remember(self) -> None:
        """The values are what they should be now. Collective where there are checksums."""

    def verify(self) -> None:
        """Raises on all ranks if checksums differ from what was remembered. Collective where there are any."""


class SharedGuard(Guard):
    """Stage 3."""

    def __init__(self, state: ModelState, group: Group, reducer: Reducer, debug: bool = False) -> None:
        super().__init__(state, group, reducer)
        self._sums: list[int] | None = None
        plan = state.plan
        self._checks = debug and plan.device_type == "cpu" and not plan.sharded and not plan.parameters_on

    def take_in_writes(self) -> None:
        """There are none: they are refused."""

    def stray_write(self) -> int:
        return self.state.stray_write()

    def raise_if_stray(self, by_rank: Sequence[float]) -> None:
        for rank, index in enumerate(by_rank):
            if index >= 0:
                name = self.state.name_at(int(index))
                raise StrayWriteError(
                    f"parameter '{name}' was written (in place, by load_state_dict, by the forward of an nn.Embedding"
                    " with max_norm, or by a cast of the model: half(), float(), to(dtype)) outside GatheredParameters"
                    f" on rank {rank} since the last step. At ZeRO stage"
                    " 3 its memory is shared by all ranks of the node, so every rank's write would act. Write it under"
                    " deepc.zero.GatheredParameters(params, modifier_rank=0) or with engine.load_module_state_dict;"
                    " cast a copy.deepcopy(model); or use stage 2."
                )

    def refuse_writes(self) -> None:
        self._tell_all(self.state.stray_write())
        self.verify()

    def _tell_all(self, mine: int) -> None:
        everyone = self.group.gather_all(torch.tensor([float(mine)], dtype=torch.float64, device="cpu"))
        self.raise_if_stray(everyone.view(-1).tolist())

    # ---- checksums ---------------------------------------------------------------------------------------------------
    def _my_params(self) -> range:
        return range(self.group.local_rank, len(self.state.trained), self.group.ranks_per_node)

    def _checksum(self, i: int) -> int:
        offset, n = self.state.plan.layout.offsets[i], self.state.plan.layout.numels[i]
        view = self.state.flat[offset : offset + n]
        crc: int = C.dc_crc32c(0, view.data_ptr(), view.numel() * view.element_size())
        return crc

    def remember(self) -> None:
        if self._checks:
            self._sums = [self._checksum(i) for i in self._my_params()]
            self.group.barrier()

    def verify(self) -> None:
        if self._sums is not None:
            differ = (i for i, crc in zip(self._my_params(), self._sums) if self._checksum(i) != crc)
            self._tell_all(next(differ, -1))


@contextlib.contextmanager
def casts_are_told(
    model: torch.nn.Module, state: ModelState, elsewhere: frozenset[int] = frozenset()
) -> Iterator[None]:
    """An error of torch in a forward over parameters that were cast or moved since the engine was made names the first
    of them. elsewhere: ids of those that other ranks have (stages of a pipeline)."""
    try:
        yield
    except RuntimeError as exc:
        if isinstance(exc, (DeepcError, torch.OutOfMemoryError)):
            raise
        for name, p in model.named_parameters():
            away = p.device.type != state.device.type and not isinstance(p, Released)
            if id(p) not in elsewhere and (away or (casts(p) and p.dtype != state.dtype)):
                raise ArgumentError(
                    f"the forward raised {type(exc).__name__} ({exc}), and parameter '{name}' is {p.dtype} on"
                    f" {p.device.type}, which the engine has made {state.dtype} on {state.device.type}: it was cast or"
                    " moved (module.double(), module.to(...)) since deepc.initialize. Remove that, or do it before;"
                    " cast a copy.deepcopy(model)"
                ) from exc
        raise


class ModelWatch:
    """Whether a model is still the one that was laid out: states are made once, and training without a parameter that
    joined later would be silent."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._params: dict[int, torch.nn.Parameter] = {}
        self._remember()

    def _parts_now(self) -> list[int]:
        """The identities of all submodules and parameters, in order."""
        return [id(x) for registry in self._registries for x in registry.values()]

    def _remember(self) -> None:
        modules = list(self._model.modules())
        self._registries: list[dict[str, Any]] = [r for m in modules for r in (m._parameters, m._modules)]
        self._parts = self._parts_now()
        self._params.update((id(p), p) for p in self._model.parameters())  # holds them: an id stays theirs
        self._was_frozen = [(n, p) for n, p in self._model.named_parameters() if not p.requires_grad]

    def check(self) -> None:
        """Raises UnsupportedError if a parameter that should be trained joined the model since. Frozen ones may come,
        and any may go."""
        if self._parts_now() != self._parts:
            for name, p in self._model.named_parameters():
                if p.requires_grad and id(p) not in self._params and owners.trainer(p) is None:
                    raise UnsupportedError(
                        f"parameter '{name}' was added to the model (or replaced) after deepc.initialize and would not"
                        " be trained: states are laid out once. Build the whole model first (adapters and heads too),"
                        " or call engine.destroy() and initialize again, or set requires_grad_(False)"
                    )
            self._remember()
        for name, p in self._was_frozen:
            if p.requires_grad and p.grad is not None and owners.trainer(p) is None:
                raise UnsupportedError(
                    f"parameter '{name}' was frozen at deepc.initialize, requires a gradient now and would not be"
                    " trained: states are laid out once. Call engine.destroy() and initialize again, or initialize"
                    " with everything that is ever trained and freeze by requires_grad_(False) later"
                )
