"""What the 1-bit optimizers share: the elements that are stepped, their states, and when the ranks exchange what.

A method steps fp32 tensors on one device; whoever has it (the drop-in of dropin.py, an engine's
zero/step/across/momentum.py) brings gradients, which are averaged over ranks before where `averages` says so and else
are each rank's own."""

from __future__ import annotations

import abc
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...core import ops as _ops  # noqa: F401  torch.ops.deepc
from ...errors import ArgumentError
from .exchange import Exchange
from .places import Places

logger = logging.getLogger("deepc")
NO_CORRECTION = 1 << 40  # a number of a step at which no bias is left to correct: the papers' Adam has none
Zeros = Callable[[int], torch.Tensor]  # [n] fp32, on the device of the parameters
_FRAME = {  # option -> what errors are of without it, and with it
    "rotated": ("of momentum that was not rotated", "of rotated momentum"),
    "preconditioned": ("of momentum", "of momentum over the variance's root"),
}


@dataclass
class Item:
    """One parameter, or where ranks share the states a piece of one. param: [n] fp32, what is stepped. group: its param
    group, as it is at each step. shape: of the whole parameter, of which this is from element `begin` on. whole: the
    parameter's number, the same on all ranks; None: the item's own place. grad: [n] fp32, for the next step. out: it is
    left out of the next step, on all ranks."""

    param: torch.Tensor
    group: Mapping[str, Any]
    shape: Sequence[int]
    name: str = ""
    begin: int = 0
    whole: int | None = None
    grad: torch.Tensor | None = None
    out: bool = False
    states: dict[str, torch.Tensor] = field(default_factory=dict)

    def masked(self, momentum: torch.Tensor) -> None:
        """Zeros where the group's exp_avg_mask has them: what never has a gradient there (rows of positions that are
        not used) would get the block's magnitude with a random sign."""
        mask = self.group.get("exp_avg_mask")
        if mask is not None:
            mask = torch.as_tensor(mask, dtype=momentum.dtype, device=momentum.device)
            try:
                whole = mask if mask.numel() == math.prod(self.shape) else mask.expand(tuple(self.shape))
                momentum.mul_(whole.reshape(-1)[self.begin : self.begin + momentum.numel()])
            except RuntimeError as exc:
                raise ArgumentError(
                    f"exp_avg_mask of shape {tuple(mask.shape)} does not fit a parameter of shape"
                    f" {tuple(self.shape)} ({self.name or 'of its param group'}); give such parameters a group each"
                ) from exc


class Method(abc.ABC):
    """States are made here, so that what travels lies in one buffer. steps: done so far. wholes: parameters that the
    items are of; of[i]: that of item i. Where ranks share the states each has an item of every one, if an empty one."""

    title: str
    names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def __init__(
        self, items: Sequence[Item], exchange: Exchange, zeros: Zeros, options: Mapping[str, Any], wholes: int = 0
    ) -> None:
        """wholes: 0: every item is one."""
        self.max_update = float(options["max_update"] or 0.0)
        self.rotated = bool(options["rotated"])
        self.preconditioned = bool(options.get("preconditioned", False))  # what travels is steps, not momentum
        self.items, self.exchange = list(items), exchange
        self.wholes, self.of = wholes or len(items), [i if x.whole is None else x.whole for i, x in enumerate(items)]
        self.steps = 0
        self.sent = [item for item in self.items if not item.group.get("non_freeze")]
        self.places = Places([item.param.numel() for item in self.sent], exchange.parts)
        self.buffer = zeros(self.places.total)
        for name in self.names:
            for i, item in enumerate(self.sent):
                here = name == self.travels
                item.states[name] = self.places.of(self.buffer, i) if here else zeros(item.param.numel())
        for item in self.items:
            if item.group.get("non_freeze"):
                item.states.update({name: zeros(item.param.numel()) for name in self.names})

    errors_in_warm_up = False
    """Whether something travels in 1 bit before the freeze."""

    travels = "exp_avg"
    """The state that lies in the buffer."""

    @property
    @abc.abstractmethod
    def averages(self) -> bool:
        """Whether the next step takes gradients that are averaged over ranks."""

    @property
    @abc.abstractmethod
    def phase(self) -> str:
        """What the ranks exchange now, for people."""

    @abc.abstractmethod
    def step(self, scale: float) -> None:
        """One step of every item that is not left out; `scale` multiplies the gradients. Collective."""

    @abc.abstractmethod
    def numbers(self) -> dict[str, Any]:
        """What a checkpoint has beside states: JSON types, the same on all ranks."""

    @abc.abstractmethod
    def load_numbers(self, saved: Mapping[str, Any]) -> None:
        """The reverse."""

    # ---- what only this rank has -------------------------------------------------------------------------------------
    def own(self) -> Iterator[tuple[str, Item, torch.Tensor]]:
        """(name, item, [n]) of what differs between ranks, without errors: nothing, unless ranks step by themselves."""
        yield from ()

    def errors(self) -> dict[str, torch.Tensor]:
        return self.exchange.errors()

    def frame(self) -> dict[str, Any]:
        """Of `numbers`: what the errors are of, where it is not momentum itself."""
        return {name: True for name in _FRAME if getattr(self, name)}

    def check_frame(self, saved: Mapping[str, Any]) -> None:
        """Before errors of a checkpoint are taken whose numbers are `saved`."""
        for name, words in _FRAME.items():
            mine, then = getattr(self, name), bool(saved.get(name))
            if then != mine and self.exchange.world > 1:
                raise ArgumentError(
                    f"{name}={mine}: the checkpoint was saved with {name}={then}, and what its ranks owe is"
                    f" {words[then]}. Load it with {name}={then}, or one of before the first exchange in 1 bit"
                )

    # ---- parts of a step ---------------------------------------------------------------------------------------------
    def stepped(self) -> list[tuple[int, Item]]:
        """(its index in items, item) of what takes part in this step: not what is empty."""
        return [
            (i, item)
            for i, item in enumerate(self.items)
            if not item.out and item.grad is not None and item.param.numel()
        ]

    def moving(self) -> dict[int, Item]:
        """parameter -> an item of it, of all that take part in this step: the same parameters on all ranks."""
        return {
            k: item
            for k, item in zip(self.of, self.items)
            if not item.out and item.grad is not None and 0 not in item.shape
        }

    @property
    def in_pieces(self) -> bool:
        """Whether ranks share the states, so that a parameter may lie in pieces on several of them."""
        return self.exchange.copies != self.exchange.world

    def over_pieces(
        self, found: Sequence[tuple[int, Sequence[float]]], width: int, most: int = 0
    ) -> Mapping[int, Sequence[float]]:
        """parameter -> of what is found of its pieces, (parameter, `width` numbers), the sums, and of the last `most`
        numbers the largest. Collective where ranks share the states."""
        if not self.in_pieces:
            return dict(found)
        start = [0.0] * (width - most) + [-math.inf] * most

        def add(to: list[float], row: Sequence[float]) -> list[float]:
            return [a + b if j < width - most else max(a, b) for j, (a, b) in enumerate(zip(to, row))]

        mine = {k: start for k in range(self.wholes)}
        for k, row in found:
            mine[k] = add(mine[k], row)
        total = {k: start for k in mine}
        for flat in self.exchange.shared([x for row in mine.values() for x in row]):
            total = {k: add(to, flat[k * width : (k + 1) * width]) for k, to in total.items()}
        return total

    def add_gradients(self, items: Sequence[Item], scale: float) -> None:
        """exp_avg = beta1 * exp_avg + (1 - beta1) * scale * grad."""
        for item in items:
            beta1 = float(item.group["betas"][0])
            item.states["exp_avg"].mul_(beta1).add_(gradient_of(item), alpha=(1 - beta1) * scale)

    def adam(self, items: Sequence[Item], scale: float) -> None:
        """Adam's step with decoupled decay and without corrections of the bias, by the C kernel."""
        for found in by_group(items):
            group = found[0].group
            torch.ops.deepc.step_adamw(
                [i.param for i in found],
                [gradient_of(i) for i in found],
                [i.states["exp_avg"] for i in found],
                [i.states["exp_avg_sq"] for i in found],
                [],
                [],
                float(group["lr"]),
                float(group["betas"][0]),
                float(group["betas"][1]),
                float(group["eps"]),
                float(group["weight_decay"]),
                scale,
                NO_CORRECTION,
                True,
            )

    def travel(self, moving: Sequence[Item]) -> None:
        """The buffer becomes the ranks' mean; what it has of items that are not `moving`, and what is owed of them,
        stays."""
        there = set(map(id, moving))
        views = [(item, self.places.of(self.buffer, i)) for i, item in enumerate(self.sent)]
        before = [(view, view.clone()) for item, view in views if id(item) not in there]
        still = {i for i, item in enumerate(self.sent) if id(item) not in there}
        owed = [errors.clone() for errors in self._owed(still)]
        turning = self.rotated and self.exchange.world > 1  # alone nothing is rounded
        for _, view in views if turning else ():
            torch.ops.deepc.rotate_blocks(view)
        self.places.fill(self.buffer)
        self.exchange.compressed(self.buffer)
        for item, view in views if turning else ():
            if id(item) in there:
                torch.ops.deepc.rotate_blocks(view)
        for view, values in before:
            view.copy_(values)
        for k, errors in enumerate(self._owed(still)):
            errors.copy_(owed[k]) if owed else errors.zero_()  # there were none before the first exchange

    def _owed(self, which: Collection[int]) -> list[torch.Tensor]:
        """Views of this rank's errors of these of `sent`."""
        errors = self.exchange.errors() if which else {}
        owned = self.exchange.owned(self.places.total) if errors else {}
        found = ((kind, *share) for kind, spans in owned.items() for share in self.places.shares(spans, rests=True))
        return [errors[kind][at : at + n] for kind, i, _, at, n in found if i in which]

    def bound(self, item: Item, momentum: torch.Tensor, times: float = 1.0) -> None:
        """Within max_update of the variance's root, times `times`: an element whose variance is much smaller than its
        block's magnitude, or than gradients after the freeze, would make a step of many times the learning rate."""
        if self.max_update:
            most = root_of(item).mul_(self.max_update * times)
            torch.minimum(momentum, most, out=momentum)
            torch.maximum(momentum, most.neg_(), out=momentum)

    def tell(self, text: str) -> None:
        if self.exchange.rank == 0:
            logger.info("%s: %s", self.title, text)


def by_group(items: Sequence[Item]) -> list[list[Item]]:
    """The items of each param group, in the order in which they come."""
    found: dict[int, list[Item]] = {}
    for item in items:
        found.setdefault(id(item.group), []).append(item)
    return list(found.values())


def gradient_of(item: Item) -> torch.Tensor:
    assert item.grad is not None  # stepped() has looked
    return item.grad


def root_of(item: Item) -> torch.Tensor:
    """[n] sqrt(exp_avg_sq) + eps."""
    return item.states["exp_avg_sq"].sqrt().add_(float(item.group["eps"]))


def apply_momentum(item: Item) -> None:
    """p = p - lr * (exp_avg / (sqrt(exp_avg_sq) + eps) + weight_decay * p)."""
    group, lr = item.group, float(item.group["lr"])
    if group["weight_decay"]:
        item.param.mul_(1 - lr * float(group["weight_decay"]))
    item.param.addcdiv_(item.states["exp_avg"], root_of(item), value=-lr)
