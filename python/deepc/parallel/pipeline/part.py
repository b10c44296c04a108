"""What a pipeline's engine asks of the part of a model that a rank holds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ...plan.mesh import Mesh
from ...plan.schedule import Order

Call = Callable[[tuple[Any, ...], dict[str, Any]], Any]  # runs the engine's module on (inputs, kwargs)


def further_names(model: torch.nn.Module) -> dict[str, str]:
    """Further names of parameters and buffers that modules share -> the first, under which they are stored."""
    first: dict[int, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: first[id(t)] for name, t in named if first.setdefault(id(t), name) != name}


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """The model is in evaluation mode, and then each of its modules as it was: some may be in evaluation mode in a
    model that trains."""
    training = [m for m in model.modules() if m.training]
    for m in training:
        m.training = False
    try:
        yield
    finally:
        for m in training:
            m.training = True


@contextlib.contextmanager
def called_to_evaluate(model: torch.nn.Module) -> Iterator[None]:
    """The same by model.eval() and train(), which modules may have overridden to do more."""
    were = [(m, m.training) for m in model.modules()]
    trains = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(trains)
        for m, training in were:
            m.training = training


class Tie(NamedTuple):
    """A parameter that several ranks of a pipeline compute with. The first one trains it; the others hold copies: their
    gradients go to it before it reduces its own, and new values come from it after a step. owner, holders: ranks of the
    pipeline. parameter: this rank's, None if it has none."""

    name: str
    owner: int
    holders: tuple[int, ...]
    parameter: torch.nn.Parameter | None


class Part(Protocol):
    """mesh: of all ranks. order: of the pipeline's stages and micro-batches.
    elsewhere: ids of parameters of the module that other ranks hold. names: further names of parameters -> the name
    under which they are stored, of the whole model. wants_batch: every stage reads the micro-batch, not only the first
    and the last."""

    @property
    def mesh(self) -> Mesh: ...
    @property
    def order(self) -> Order: ...
    @property
    def ties(self) -> Sequence[Tie]: ...
    @property
    def elsewhere(self) -> frozenset[int]: ...
    @property
    def names(self) -> dict[str, str]: ...
    @property
    def wants_batch(self) -> bool: ...

    def let_go(self) -> frozenset[int]:
        """ids of parameters that the model had before it was cut and other ranks hold now, as far as somebody still
        has them: an optimizer, or a list of what is to be trained."""

    def blocks(self) -> list[torch.nn.Module]:
        """What a budget of recomputation may compute again here: modules that repeat a class, whose calls run whole.
        ConfigError where the whole model has none."""

    def describe(self) -> str:
        """What each stage of the whole model is, for the log."""

    def inputs(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the first stage reads of a micro-batch, as (arguments, keyword arguments)."""

    def has_buffer(self, name: str) -> bool:
        """Whether this rank saves a buffer of the module, of which others may have the same."""

    def run(self, call: Call, stage: int, received: Any, batch: Any, wants_loss: bool = True) -> Any:
        """What stage `stage` returns for a micro-batch: an activation, of the last one the loss (wants_loss), or what
        the model returns. received: of the stage before; None in the first."""
