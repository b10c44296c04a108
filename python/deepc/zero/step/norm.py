"""The judgement of a step: the global norm of the gradients, the factor that clips them, and if they are finite.

One message to all ranks carries the partial sums of the norm, what the ranks know of stray writes and of gradients that
no pass has taken, and what riders want to tell all ranks. It is also the fence after which nobody reads the old
parameters of stage 3.

A step whose gradients are not finite is skipped, which leaves the weights as they are. If those are not finite
themselves, every further step is skipped too: it is said which weight it is, and after some steps the run ends, on all
ranks (Skips)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from ...core.lib import C
from ...core.ops import casts
from ...errors import DiskError, NonFiniteError
from ..tiers.agree import together
from ..tiers.windows import Window
from .reducers.base import norm_order

if TYPE_CHECKING:
    from ..parameters.guard import Guard
    from ..state import ModelState
    from .hooks import GradientHooks
    from .reducers.base import Reducer


class Rider(Protocol):
    """Who sends numbers along with the norm."""

    def row(self) -> list[float]:
        """This rank's numbers, equally many on every rank. Asking twice in a step gives the same."""

    def put(self, row: torch.Tensor) -> None:
        """`row`: the message's place of these numbers, [n] fp64 where the states lie; may be written, which spares a
        wait for a device."""

    def take(self, rows: torch.Tensor) -> None:
        """rows: [ranks, n], what all ranks said."""


class Parts(Protocol):
    """The parts of a model, each with states of its own (the stages of a pipeline, the shards of tensors), whose steps
    are judged as one."""

    @property
    def here(self) -> int:
        """This rank's."""

    @property
    def repeated(self) -> frozenset[int]:
        """Trained parameters of this part that another one has too, and counts."""

    def together(self, failure: DiskError | None) -> None:
        """As zero/tiers/agree.py has it, collective over all ranks of all parts."""

    def totals(self, mine: float, riders: Sequence[Rider] = ()) -> list[float]:
        """What each part says: `mine` is the same on all ranks of a part. What riders say goes along, from all ranks
        to all. Collective over all ranks of all parts."""

    def name(self, part: int) -> str:
        """In words."""


class Norm(NamedTuple):
    """value: of the average gradient, unscaled, before clipping; NaN if the step must be skipped. reason: why, or "".
    bad: the first parameter, in flat order, whose gradient is not finite."""

    value: float
    reason: str = ""
    bad: str | None = None


def clip(unit: float, norm: float, limit: float) -> float:
    """The factor on every accumulated gradient: `unit`, smaller where the norm exceeds `limit` (0: no clipping), by
    torch.nn.utils.clip_grad_norm_'s rule. Clipping is no pass of its own over the gradients: the update multiplies each
    of them by one factor anyway (the mean over ranks, the loss scale)."""
    if limit > 0:
        excess = (norm + 1e-6) / limit
        if excess > 1.0:
            return unit / excess
    return unit


def judge(
    state: ModelState,
    reducer: Reducer,
    hooks: GradientHooks,
    guard: Guard,
    unit: float,
    complete: Callable[[], None],
    riders: Sequence[Rider] = (),
    parts: Parts | None = None,
) -> Norm:
    """unit: factor that turns an accumulated gradient into the average. complete: called before accumulators are read
    that no pass has made the norm of. Gradients that some rank still has get a pass first. parts: of the model, over
    which the norm goes. Raises StrayWriteError on all ranks if one wrote into shared parameters, and DiskError if
    one can't read its gradients from disk; then nothing has happened. What breaks off that pass is what hooks.passed
    raises. Collective."""
    plan, group = state.plan, guard.group
    remade = not hooks.norm_ready
    if remade:
        complete()
        reducer.settle()
    again, failure = 0.0, None
    try:
        if remade:
            state.remake_norm()
        if parts is not None and parts.repeated:
            again = state.squares_of(parts.repeated)
    except DiskError as exc:
        failure = exc
    if plan.gradients_on:
        together(group, failure) if parts is None else parts.together(failure)
    partial = state.partial
    whole = plan.own_all or plan.world == 1
    ride = Ride(riders if parts is None else ())
    own = torch.tensor([again, guard.stray_write(), hooks.left_behind], dtype=torch.float64, device="cpu")
    message = ride.message(own, partial.device)
    gathered = group.gather_all(message if whole else torch.cat([partial, message]))
    guard.raise_if_stray(gathered[:, -2].tolist())
    if any(gathered[:, -1].tolist()):
        hooks.flush()
        return judge(state, reducer, hooks, guard, unit, complete, riders, parts)
    if not whole:
        by_part = sorted(range(plan.world), key=group.part_of)
        partial = norm_order(plan, gathered[by_part, : -len(message)])
    ride.arrive(gathered[:, gathered.shape[1] - len(message) :])
    guard.verify()
    partial = partial.cpu().contiguous()
    mine = C.dc_sum_partials(partial.data_ptr(), partial.numel())
    if parts is None:
        totals = [mine]
    else:  # fp64: what is lost by the difference is nothing beside the sum, in which it is once
        again = again if whole else math.fsum(gathered[:, -3].tolist())
        totals = parts.totals(mine - again, riders)
    if not math.isfinite(total := sum(totals)):
        bad = in_a_part(lambda: first_not_finite(state, guard), totals, parts)
        return Norm(math.nan, f"gradients are not finite (first: {bad})", bad)
    return Norm(math.sqrt(total) * abs(unit))


class Ride:
    """What riders say, in front of a message to all ranks."""

    def __init__(self, riders: Sequence[Rider]) -> None:
        self._rows = [(rider, rider.row()) for rider in riders]

    def message(self, own: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Their numbers, then `own`."""
        message = torch.cat(
            [torch.tensor([x for _, row in self._rows for x in row], dtype=own.dtype, device="cpu"), own]
        ).to(device)
        for rider, part in self._parts(message):
            rider.put(part)
        return message

    def arrive(self, gathered: torch.Tensor) -> None:
        """gathered: [ranks, n], the messages of all ranks."""
        for rider, part in self._parts(gathered):
            rider.take(part)

    def _parts(self, message: torch.Tensor) -> Iterator[tuple[Rider, torch.Tensor]]:
        at = 0
        for rider, row in self._rows:
            yield rider, message[..., at : at + len(row)]
            at += len(row)


def in_a_part(find: Callable[[], str], totals: Sequence[float], parts: Parts | None) -> str:
    """What `find`, collective within a part, finds in this one, whose total is not finite; else which part it is."""
    if parts is None or not math.isfinite(totals[parts.here]):
        return find()
    return f"in {parts.name(next(i for i, total in enumerate(totals) if not math.isfinite(total)))}"


def first_not_finite(state: ModelState, guard: Guard) -> str:
    """Name of the first parameter, in flat order, whose gradient is not finite; "unknown" if a disk does not tell.
    Collective at stages 1 to 3."""
    plan = state.plan
    found = at = -1
    with contextlib.suppress(DiskError):  # other ranks wait, and the step is skipped in any case
        at = state.first_bad_gradient()
    if at >= 0:
        found = next((s.param for s in plan.segments if s.shard_begin <= at < s.shard_begin + s.length), -1)
    if not plan.own_all and plan.world > 1:
        everyone = guard.group.gather_all(torch.tensor([found], dtype=torch.int64, device="cpu")).view(-1).tolist()
        found = min((f for f in everyone if f >= 0), default=-1)
    return state.names[found] if found >= 0 else "unknown"


# ---- steps that were skipped one after the other ---------------------------------------------------------------------
class Skips:
    """in_row: so many steps were skipped since the last that was applied. weight: the first parameter that was not
    finite when they began, or ""."""

    def __init__(self, most: int) -> None:
        """most: skipped steps in a row with weights that are not finite until NonFiniteError; 0: any number."""
        self._most = most
        self.in_row, self.weight = 0, ""

    def applied(self) -> None:
        """A step was, or other weights were loaded."""
        self.in_row, self.weight = 0, ""

    def skipped(self, reason: str, state: ModelState, guard: Guard, parts: Parts | None = None) -> str:
        """The reason with all that is known of it. Looks at the weights at the first skip of a row, and again before
        end() would raise. Collective."""
        self.in_row += 1
        if self.in_row == 1 or (self.weight and self.in_row == self._most):
            self.weight = weight = first_weight_not_finite(state, guard)
            if parts is not None:
                totals = parts.totals(math.nan if weight else 0.0)
                self.weight = in_a_part(lambda: weight, totals, parts) if any(map(math.isnan, totals)) else ""
        return f"{reason}; the weights themselves are not finite: {self.weight}" if self.weight else reason

    @property
    def telling(self) -> bool:
        """Whether a line of the same reason tells something new: the 1st, 10th, 100th ... of a row."""
        return str(self.in_row).strip("0") == "1"

    def end(self) -> None:
        """Raises NonFiniteError if it is time, on all ranks alike."""
        if self.weight and self.in_row == self._most:
            raise NonFiniteError(
                f"the last {self._most} steps were skipped, and parameter '{self.weight}' is not finite: no step can"
                " mend that. Load a checkpoint from before, or find what wrote it (a bad initialization, a bad file, a"
                " learning rate that is too high); deepc.max_lost_steps = 0 goes on all the same"
            )


def first_weight_not_finite(state: ModelState, guard: Guard) -> str:
    """Name of a parameter, trained or frozen, that is not finite; "" if there is none, or if a disk does not tell: a
    forward will find that. Every rank looks at its part. Collective."""
    plan, group = state.plan, guard.group
    found = at = -1
    own = (
        s.param
        for s in plan.segments
        if not all(_finite(part.read()) for part in Window(state.flat, s.flat_begin, s.length).parts())
    )
    # Streamed parameters are read by all ranks together, others lie on every node.
    mine = range(len(state.frozen)) if plan.mode == "streamed" else range(group.rank, len(state.frozen), group.world)
    with contextlib.suppress(DiskError):  # other ranks wait
        found = next(own, -1)
        at = next((i for i in mine if not _finite(state.frozen_value(state.frozen[i][1]))), -1)
    if found < 0 <= at:
        found = len(state.names) + at
    everyone = group.gather_all(torch.tensor([found], dtype=torch.int64, device="cpu")).view(-1).tolist()
    found = min((f for f in everyone if f >= 0), default=-1)
    names = [*state.names, *(name for name, _ in state.frozen)]
    return names[found] if found >= 0 else ""


def _finite(values: torch.Tensor) -> bool:
    return not casts(values) or bool(torch.isfinite(values).all())
