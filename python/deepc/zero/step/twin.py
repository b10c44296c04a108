"""The update of an optimizer that the core does not step: one of its kind, a twin, over views of this rank's shards.
The user's object keeps the model's parameters, so that schedulers and code see them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...errors import OutOfMemoryError, UnsupportedError
from ...optim.factory import twin_over
from ..tiers.windows import Window

if TYPE_CHECKING:
    from ...plan.layout import Segment
    from ..state import ModelState
    from .publish import Sender


class Like(NamedTuple):
    """A tensor of a checkpoint, without its values."""

    shape: Sequence[int]
    dtype: torch.dtype


def tried(base: torch.optim.Optimizer, device: torch.device, seed: int) -> list[dict[str, Any]] | None:
    """The param groups of another one of its kind after a few steps of parameters of a few numbers, with gradients
    drawn by `seed`: what of them is another with other gradients is a sum over parameters. None: it steps no such
    parameters."""
    drawn = torch.Generator(device="cpu").manual_seed(seed)
    with torch.random.fork_rng(devices=[]):  # what the steps draw
        try:
            params = [
                torch.nn.Parameter(torch.ones(4, 4, dtype=torch.float32, device=device)) for _ in base.param_groups
            ]
            twin = twin_over(base, [[p] for p in params])
            for group in twin.param_groups:  # what base keeps there, such as a count in a tensor, stays as it is
                group.update({k: deepcopy(v) for k, v in group.items() if k != "params"})
            for _ in range(3):
                for p in params:
                    p.grad = torch.randn(4, 4, dtype=torch.float32, device="cpu", generator=drawn).to(device)
                twin.step()
        except Exception:  # whatever a class of a user's finds wrong with them
            return None
    return twin.param_groups


class TwinUpdate:
    """The update of `base` on one rank's share: one fp32 parameter per segment of the shard, with the accumulator as
    its gradient. group_of[i]: param group of flat parameter i. shares: other ranks hold other shards of parameters that
    are cut. sender: of the state."""

    def __init__(
        self, state: ModelState, base: torch.optim.Optimizer, group_of: Sequence[int], shares: bool, sender: Sender
    ) -> None:
        self._state, self._name, self._sender = state, type(base).__name__, sender
        self._whole = state.plan.own_all and not shares
        self.unchanged = True  # whether an update that raised has left all as it was
        self.written: set[tuple[int, str]] = set()  # (param group, key): what its steps have set there
        groups: list[list[torch.nn.Parameter]] = [[] for _ in base.param_groups]
        self._shards: list[tuple[Segment, torch.nn.Parameter]] = []
        self._grads: list[torch.Tensor] = []  # what is accumulated of each
        for s in state.plan.segments:
            source = state.piece(s)
            grad = state.acc[s.shard_begin : s.shard_begin + s.length]
            shape = state.shapes[s.param]
            if s.length == state.plan.layout.numels[s.param] and shape:
                # Whole: it keeps its shape, for optimizers that look at it. One without dimensions is a vector, so that
                # its states are no scalars.
                source, grad = source.view(shape), grad.view(shape)
            shard = torch.nn.Parameter(source)
            groups[group_of[s.param]].append(shard)
            self._shards.append((s, shard))
            self._grads.append(grad)
        self._twin = twin_over(base, groups)

    def follow_state(self) -> None:
        """The state's parameters or masters lie elsewhere now."""
        for s, shard in self._shards:
            shard.data = self._state.piece(s).view(shard.shape)

    # ---- the update --------------------------------------------------------------------------------------------------
    def update(self, grad_scale: float, groups: Sequence[dict[str, Any]], left_out: frozenset[int]) -> None:
        """One step; `grad_scale` multiplies every accumulated gradient. groups: hyper-parameters, which the step may
        change. left_out: flat parameters that are not stepped."""
        self.unchanged = True
        st = self._state
        if grad_scale != 1.0:
            torch.ops.deepc.scale_tensor(st.acc, grad_scale)
        self._tell(groups)
        # An optimizer may have put another tensor in the place of a gradient, or none.
        for (s, shard), grad in zip(self._shards, self._grads):
            shard.grad = None if s.param in left_out else grad
        before = self._marks()
        try:
            self._twin.step()
        except BaseException:  # who tries again scales them again
            self.unchanged = self._marks() == before
            if grad_scale != 1.0:
                torch.ops.deepc.scale_tensor(st.acc, 1.0 / grad_scale)
            raise
        self.unchanged = False
        self._take(groups)

    def change(self, method: str, groups: Sequence[dict[str, Any]]) -> None:
        """Calls a method of the optimizer that changes parameters, by its name."""
        self._tell(groups)
        getattr(self._twin, method)()
        self._take(groups)

    def _tell(self, groups: Sequence[dict[str, Any]]) -> None:
        for mine, twin in zip(groups, self._twin.param_groups):
            twin.update({k: v for k, v in mine.items() if k != "params"})

    def _take(self, groups: Sequence[dict[str, Any]]) -> None:
        """What the optimizer has made of the groups and the shards."""
        st = self._state
        for i, (mine, twin) in enumerate(zip(groups, self._twin.param_groups)):
            for k, v in twin.items():
                if k != "params" and (k not in mine or mine[k] is not v):  # some keep states there: Prodigy its `d`
                    self.written.add((i, k))
                    mine[k] = v
        for (s, shard), grad in zip(self._shards, self._grads):
            piece = st.piece(s)
            if shard.data_ptr() != piece.data_ptr():  # `p.data = ...`
                piece.copy_(shard.detach().reshape(-1))
                shard.data = piece.view(grad.shape)
        if st.master is not None and not st.plan.parameters_as:
            for s, shard in self._shards:
                st.flat[s.flat_begin : s.flat_begin + s.length].copy_(shard.data.view(-1))
        else:
            self._sender.send_all()

    def _marks(self) -> list[Any]:
        """They differ from what they were if parameters, gradients, states or groups were changed in between."""
        twin, places = self._twin, zip(self._shards, self._grads)
        own = [(shard.data_ptr(), shard._version, grad._version) for (_, shard), grad in places]
        states = [_mark(twin.state.get(shard)) for _, shard in self._shards]
        return [own, states, [_mark({k: v for k, v in g.items() if k != "params"}) for g in twin.param_groups]]

    # ---- its states --------------------------------------------------------------------------------------------------
    def _states(self) -> Iterator[tuple[Segment, torch.nn.Parameter, str, Any]]:
        for s, shard in self._shards:
            for name, value in self._twin.state.get(shard, {}).items():
                yield s, shard, name, value

    def owned_states(self) -> Iterator[tuple[str, Segment, Window]]:
        """See ShardedOptimizer."""
        for s, shard, name, value in self._states():
            if torch.is_tensor(value) and value.dim() > 0 and self._in_shards(s, shard, value):
                yield name, s, Window(value.view(-1))

    def whole_states(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """See ShardedOptimizer."""
        self._require_shards()
        for s, shard, name, value in self._states():
            if torch.is_tensor(value) and value.dim() > 0 and not self._in_shards(s, shard, value):
                yield name, s.param, value

    def state_names(self) -> list[str]:
        """Of the per-element states that there are so far on this rank."""
        return sorted({n for n, _, _ in self.owned_states()})

    def scalar_states(self) -> Iterator[tuple[str, int, Any]]:
        """See ShardedOptimizer."""
        self._require_shards()
        firsts = {s.param: shard for s, shard in reversed(self._shards)}  # a parameter may lie here in several pieces
        for param, shard in firsts.items():
            for name, value in self._twin.state.get(shard, {}).items():
                if (torch.is_tensor(value) and value.dim() == 0) or isinstance(value, (int, float)):
                    yield name, param, value

    def _in_shards(self, s: Segment, shard: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether a state has a number for each element of the shard of segment `s`. Where every rank has whole
        parameters, of their shape: what Hugging Face's Adafactor keeps of the columns of a matrix of one row is as
        long, and is to be a vector again."""
        return value.shape == shard.shape if self._whole else value.numel() == s.length

    def _require_shards(self) -> None:
        """UnsupportedError if states are neither a number for each of a shard's elements nor one number."""
        for s, shard, name, value in () if self._state.plan.own_all else self._states():
            has = f"has shape {tuple(value.shape)}" if torch.is_tensor(value) else f"is a {type(value).__name__}"
            fits = value is None or isinstance(value, (int, float))
            if not fits and not (torch.is_tensor(value) and (not value.dim() or self._in_shards(s, shard, value))):
                raise UnsupportedError(
                    f"optimizer state '{name}' of '{self._state.names[s.param]}' {has} beside {s.length} elements"
                    f" of the parameter: what {self._name} keeps does not lie in shards; use"
                    " zero_optimization.stage 0"
                )

    def trees(self) -> dict[str, dict[str, Any]]:
        """Where every rank has all of them: parameter -> states that are neither tensors nor numbers (a list of
        factors, None)."""
        out: dict[str, dict[str, Any]] = {}
        for s, _, name, value in self._states() if self._state.plan.own_all else ():
            if not isinstance(value, (torch.Tensor, int, float)):
                out.setdefault(self._state.names[s.param], {})[name] = _copied(value)
        return out

    # ---- loading -----------------------------------------------------------------------------------------------------
    def prepare(self, has: Callable[[int], Mapping[str, Like]]) -> None:
        """See ShardedOptimizer.prepare_states."""
        plan = self._state.plan
        for s, shard in self._shards:
            self._twin.state.pop(shard, None)
            for name, (shape, dtype) in has(s.param).items():
                alike = tuple(shape) == tuple(self._state.shapes[s.param])
                alike |= not plan.own_all and math.prod(shape) == plan.layout.numels[s.param]
                state = shard.new_zeros(shard.shape if alike else tuple(shape), dtype=dtype)
                self._twin.state[shard][name] = state

    def load_scalars(self, saved: Mapping[str, Any], scalars: Sequence[tuple[str, int, Any]]) -> None:
        """What is not of an element each. saved: a hyper_state; scalars: (state name, parameter, value)."""
        # of all, as before 0.1.0
        common = {
            k: torch.tensor(v, dtype=torch.float32 if isinstance(v, float) else None, device="cpu")
            for k, v in saved.get("scalars", {}).items()
        }
        loaded = bool(self.state_names())
        for s, shard in self._shards:
            own = {name: v for name, i, v in scalars if i == s.param}
            if shard in self._twin.state or not loaded:  # one without the others' states was never stepped
                own = {**common, **own}
            if own:
                self._twin.state[shard].update({k: _own(k, v, shard.device) for k, v in own.items()})
            for k, v in saved.get("trees", {}).get(self._state.names[s.param], {}).items():
                self._twin.state[shard][k] = _copied(v, shard.device)

    def named(self, there: Mapping[int, Mapping[str, Like]]) -> Iterator[tuple[str, Segment]]:
        """(state name, segment) of the states that are `there` of a parameter."""
        for s, _ in self._shards:
            for name in there.get(s.param, ()):
                yield name, s

    # ---- moving ------------------------------------------------------------------------------------------------------
    def move(self, device: torch.device) -> None:
        """Its states with dimensions lie on `device` from now on."""
        for state in self._twin.state.values():
            for name, value in state.items():
                if torch.is_tensor(value) and value.dim() > 0:
                    state[name] = value.to(device)

    def bring(self) -> None:
        """They are on the state's device again. OutOfMemoryError: another call goes on."""
        try:
            self.move(self._state.state_device)
        except torch.OutOfMemoryError as exc:
            raise OutOfMemoryError(
                f"engine.reload_states(): the states of {self._name} do not fit on the device: {exc}."
                " Free memory there, and call it again"
            ) from exc


def _own(name: str, value: Any, device: torch.device) -> Any:
    """A scalar state that is one parameter's alone; as torch's load_state_dict has it, only `step` may stay on the
    host."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.clone() if name == "step" else value.clone().to(device)


def _copied(value: Any, device: torch.device | None = None) -> Any:
    """A state that is no tensor, with tensors in it on `device`."""
    if isinstance(value, torch.Tensor):
        return value.to(value.device if device is None else device, copy=True)
    if type(value) in (list, tuple):
        return type(value)(_copied(v, device) for v in value)
    return {k: _copied(v, device) for k, v in value.items()} if type(value) is dict else deepcopy(value)


def _mark(value: Any) -> Any:
    """See TwinUpdate._marks."""
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    if isinstance(value, dict):
        return {k: _mark(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mark(v) for v in value]
    return value if isinstance(value, (int, float, str)) else id(value)
