"""Whether the ranks that hold the same part of a model train it alike: one model and one set of numbers, when the
engine is made and at each step; and all of it, where the configuration wants that.

Nothing else would notice ranks that differ: shards of one weight stepped at two rates, or weights that took each
other's values because modules were made in another order (of a set of names, which differs between processes)."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...comm.groups import gather_texts
from ...errors import ArgumentError, MisuseError

if TYPE_CHECKING:
    from ...comm.groups import Group
    from ...config.tree import Config
    from ...plan.mesh import Mesh
    from ..state import ModelState
    from ..step.hooks import GradientHooks
    from ..step.update import ShardedOptimizer

Row = tuple[str, str]  # what, its value in words
_NOT_COMPARED = frozenset({"params", "param_names"})


class Ranks:
    """All ranks, and for each the first one that holds the same part of the model."""

    def __init__(self, everyone: Group, mesh: Mesh) -> None:
        self._everyone = everyone
        self._firsts = [mesh.holders(r)[0] for r in range(everyone.world)]

    def alike(self, told: Sequence[float]) -> bool:
        """Whether every rank has told what its first one has."""
        return all(told[r] == told[first] for r, first in enumerate(self._firsts))

    def equal(self, rows: Sequence[Row]) -> bool:
        """Whether every rank has the rows of its first one. Collective."""
        mine = torch.tensor([zlib.crc32(json.dumps(rows).encode())], dtype=torch.int64, device="cpu")
        return self.alike(self._everyone.gather_all(mine).view(-1).tolist())

    def difference(self, rows: Sequence[Row]) -> str:
        """The first row in which a rank differs from its first one, in words. Collective."""
        texts = gather_texts(self._everyone, json.dumps(rows))
        for rank, first in enumerate(self._firsts):
            if texts[rank] != texts[first]:
                return _first_of(json.loads(texts[first]), json.loads(texts[rank]), first, rank)
        return "their numbers differ"


def _first_of(ours: list[list[str]], theirs: list[list[str]], first: int, rank: int) -> str:
    nothing = ["nothing more", ""]
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
    (what, one), (other, two) = (rows[at] if at < len(rows) else nothing for rows in (ours, theirs))
    if what == other:
        return f"{what} is {one} on rank {first} and {two} on rank {rank}"
    return f"rank {first} has {what} {one}, where rank {rank} has {other} {two}".rstrip()


def refuse_unequal(
    ranks: Ranks,
    named: Sequence[tuple[str, torch.nn.Parameter]],
    group_of: Mapping[int, int],
    optimizer: ShardedOptimizer,
    config: Config,
    dtype: torch.dtype,
) -> None:
    """ArgumentError, on all ranks, if ranks that hold the same part came with different models, optimizers or settings.
    Before anything is shared: what ranks do next depends on these. Collective."""
    rows = [
        ("zero_optimization.stage", str(config.zero.stage)),
        ("gradient_accumulation_steps", str(config.gradient_accumulation_steps)),
        ("managed_gradient_accumulation", str(config.managed_gradient_accumulation)),
        ("the training precision", str(dtype)),
        ("torch_autocast", str(config.autocast)),
        ("the optimizer", type(optimizer.base).__name__),
    ]
    for i, (name, p) in enumerate(named):
        group = group_of.get(id(p))
        kind = "frozen" if group is None else f"of param group {group}"
        rows.append((f"parameter {i}", f"'{name}' {tuple(p.shape)}, {kind}"))
    rows += _rows(optimizer, config)
    if ranks.equal(rows):
        return
    raise ArgumentError(
        f"the ranks were given different models or settings: {ranks.difference(rows)}. All ranks make the same modules"
        " in the same order (a set of names has another order in each process: sort it) and pass the same configuration"
        " and optimizer"
    )


def _numbers(groups: Sequence[Mapping[str, Any]]) -> list[tuple[int, str, Any]]:
    """(param group, key, value) of what a step is made with."""
    return [
        (i, key, _plain(value))
        for i, group in enumerate(groups)
        for key, value in group.items()
        if key not in _NOT_COMPARED and _is_number(value)
    ]


def _in_words(groups: Sequence[Mapping[str, Any]]) -> list[Row]:
    return [(f"{key} of param group {i}", repr(value)) for i, key, value in _numbers(groups)]


def _rows(optimizer: ShardedOptimizer, config: Config) -> list[Row]:
    return [*_in_words(optimizer.param_groups), ("gradient_clipping", repr(config.gradient_clipping))]


def refuse_sums(ranks: Ranks, optimizer: ShardedOptimizer, rank: int) -> None:
    """ArgumentError, on all ranks, if the optimizer's class steps shards with what it sums up over all parameters, as
    far as a trial with gradients of each rank's own shows it (EqualSteps finds the rest, after a step). Collective."""
    groups = optimizer.tried(rank)
    if not ranks.equal([("tried", str(groups is not None))]) or groups is None:
        return
    if not ranks.equal(rows := _in_words(groups)):
        raise _of_a_part(
            "deepc.initialize", optimizer, f"of a trial with gradients of their own {ranks.difference(rows)}"
        )


def _of_a_part(where: str, optimizer: ShardedOptimizer, found: str) -> ArgumentError:
    name = type(optimizer.base).__name__
    return ArgumentError(
        f"{where}: {name} steps each rank's part of the weights with other numbers: {found}. What {name} sums up over"
        " whole parameters does not lie in shards: use zero_optimization.stage 0, where every rank has all of them, or"
        " an optimizer that takes each element alone"
    )


class EqualSteps:
    """Rides with the norm of each step (zero/step/norm.py), as one number: a sum over what the step is made with."""

    def __init__(self, ranks: Ranks, optimizer: ShardedOptimizer, state: ModelState, config: Config) -> None:
        self._ranks, self._optimizer, self._state, self._config = ranks, optimizer, state, config
        self._alike = True
        # label -> (updates, resets, decay of the last update): engine/states
        self.averages: dict[str, tuple[int, int, Any]] = {}

    def row(self) -> list[float]:
        """See Rider."""
        frozen = [i for i, p in enumerate(self._state.trained) if not p.requires_grad]
        numbers = _numbers(self._optimizer.param_groups)
        made_with = (frozen, numbers, self._config.gradient_clipping, sorted(self.averages.items()))
        return [float(zlib.crc32(repr(made_with).encode()))]

    def put(self, row: torch.Tensor) -> None:
        """See Rider: it is there."""

    def take(self, rows: torch.Tensor) -> None:
        """See Rider."""
        self._alike = self._ranks.alike(rows[:, 0].tolist())

    def check(self) -> None:
        """ArgumentError, on all ranks, if the step would be made with different numbers. Collective if so."""
        if self._alike:
            return
        self._alike = True
        frozen = [n for n, p in zip(self._state.names, self._state.trained) if not p.requires_grad]
        rows = [*_rows(self._optimizer, self._config), ("what is frozen", ", ".join(frozen) or "nothing")]
        for label, said in sorted(self.averages.items()):
            of = zip(("updates", "resets", "decay"), said)
            rows += [(f"{what} of average '{label}'", str(value)) for what, value in of]
        found = self._ranks.difference(rows)
        if " of average '" in found:
            raise ArgumentError(
                f"engine.step(): the ranks average different weights: {found}. Each rank averages its part of the"
                " weights, so make every deepc.EMA on all ranks, with one decay, call its update() and reset() on all"
                " of them (not on rank 0 alone), and step() again: nothing was stepped"
            )
        if any(found.startswith(f"{key} of param group {i} ") for i, key in self._optimizer.written):
            raise _of_a_part(
                "engine.step()", self._optimizer, f"{found}, which its last step has made of the part alone"
            )
        raise ArgumentError(
            f"engine.step(): the ranks would make different steps: {found}. Each rank steps its"
            " part of the weights, so set it alike on all ranks (an LR schedule that follows a loss takes the mean over"
            " the ranks) and call step() again: nothing was stepped"
        )


class NoneUnused:
    """Rides with the norm of each step too, where unused parameters are not ignored: the first one of this rank that
    got no gradient since the last step."""

    def __init__(self, everyone: Group, state: ModelState, hooks: GradientHooks) -> None:
        self._everyone, self._state, self._hooks = everyone, state, hooks
        self._found = False

    def row(self) -> list[float]:
        """See Rider."""
        return [float(self._unused())]

    def _unused(self) -> int:
        trained = enumerate(self._state.trained)
        return next((i for i, p in trained if p.requires_grad and i not in self._hooks.used), -1)

    def put(self, row: torch.Tensor) -> None:
        """See Rider: it is there."""

    def take(self, rows: torch.Tensor) -> None:
        """See Rider."""
        self._found = bool((rows >= 0).any())

    def check(self) -> None:
        """MisuseError, on all ranks, if there is one. Collective if so."""
        if not self._found:
            return
        self._found = False
        mine = self._unused()
        names = gather_texts(self._everyone, self._state.names[mine] if mine >= 0 else "")
        rank = next(r for r, name in enumerate(names) if name)
        raise MisuseError(
            f"engine.step(): parameter '{names[rank]}' got no gradient on rank {rank} since the last step, and"
            " zero_optimization.ignore_unused_parameters is false. Let the loss depend on it, freeze it"
            " (requires_grad_(False)) before deepc.initialize, or leave that key out; nothing was stepped, and"
            " engine.zero_grad() drops the gradients"
        )


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and value.device.type == "cpu"  # another would be waited for
    if isinstance(value, (list, tuple)):
        return all(map(_is_number, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value
