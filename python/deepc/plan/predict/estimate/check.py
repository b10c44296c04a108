"""The check of an engine's plan before it allocates, and of the prediction after its first step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ....config.tree import Config
from ....core import memory
from ....errors import DeepcError, OutOfMemoryError
from .case import Case, Divided, numel_trained, predict
from .figures import MIB, MemoryEstimate, Row, changed, from_dict
from .options import by_nodes, options_by_counts, options_of, refusal

if TYPE_CHECKING:
    import torch

    from ...plan import Plan
    from .. import dryrun
    from .case import Divide, Named


def refuse_if_too_big(plan: Plan, further: int = 0, groups: int = 1) -> None:
    """Raises OutOfMemoryError, before anything is allocated, if the model states (and `further` bytes) don't fit into
    what this node has left; says what would. groups: of ranks with different parts of the model on this node, of which
    each needs about as much."""
    if plan.device != "cpu":
        return
    have = memory.available()
    need = plan.bytes["node_total"] * groups
    if need + further > have:
        alone = groups == 1
        room = have - further  # which a change does not make less
        fix = (" or ".join(options_by_counts(plan, room)) if alone else "") or (
            f"nothing on this node; {by_nodes(plan, room)}"
            if alone
            else "more stages or tensor-parallel ranks, or bf16"
        )
        raise OutOfMemoryError(
            f"the plan needs {need / 2**30:.2f} GiB on this node for model"
            f" states{f' and {further / 2**30:.2f} GiB to change the precision' if further else ''}, and"
            f" {have / 2**30:.2f} GiB are left (memory cgroup and MemAvailable). What would fit:"
            f" {fix}.\n{plan.describe()}"
        )


class FirstStep:
    """The traced step: what the kernel's high-water mark says of a prediction after the first real one. Of this rank's
    own memory: shared memory is the node's, and part of what was there before goes (zero.Init's, which held the
    parameters)."""

    def __init__(self, prediction: MemoryEstimate) -> None:
        self.prediction, self.before = prediction, memory.process_bytes()
        self.measured = 0  # own bytes of this rank's peak above the process before initialize, once report() could tell

    def report(self) -> str:
        """In words: predicted and measured peak of this process; "" where the mark tells nothing, because it was higher
        before."""
        now, told = memory.process_bytes(), self.prediction
        if not told.known or told.device != "cpu" or now["peak_rss_bytes"] <= self.before["peak_rss_bytes"]:
            return ""
        before = self.before["rss_bytes"] - self.before["shared_bytes"]
        self.measured = now["peak_rss_bytes"] - now["shared_bytes"] - before
        return (
            f"memory: this rank's own peak so far {self.measured / MIB:.1f} MiB above the process before initialize;"
            f" predicted through {told.steps} steps: {told.rank_peak / MIB:.1f}, and {told.shared / MIB:.1f} shared by"
            " the ranks of a node"
        )


class Ranks(Protocol):
    """What the check asks of the group of all ranks that share the model."""

    @property
    def node(self) -> int:
        """This rank's node."""

    @property
    def rank(self) -> int: ...

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """`tensor` becomes rank `root`'s. Collective."""

    def gather_all(self, mine: torch.Tensor) -> torch.Tensor:
        """[ranks, n] of every rank's [n]. Collective."""


def _divided(experts: int) -> Divide:
    """The engine has divided the model already."""

    def as_it_is(model: torch.nn.Module, config: Config, replicas: int) -> Divided:
        return Divided(experts, numel_trained(model))

    return as_it_is


class _Told(NamedTuple):
    """What a rank says of itself. shared: where it counts that; known: its peak has activations in it."""

    private: int
    shared: int
    available: int
    node: int
    stage: int
    known: int


def _of_pipeline(e: MemoryEstimate, ranks: Sequence[_Told], here: Sequence[_Told]) -> MemoryEstimate:
    """A rank's estimate with what the other stages take. here: the ranks of its node."""
    shared = sum(r.shared for r in here)
    others = Row("of other stages on this node", shared=shared - e.shared)
    return changed(
        e,
        known=all(r.known for r in ranks),
        stages=tuple(max(r.private for r in ranks if r.stage == s) for s in range(1 + max(r.stage for r in ranks))),
        rows=(*e.rows, *([others] if others.shared > 0 else [])),
        shared=max(shared, e.shared),
    )


def check_plan(
    plan: Plan,
    model: torch.nn.Module,
    base: torch.optim.Optimizer,
    config: Config,
    named: Named,
    group_of: dict[int, int],
    group: Ranks,
    sample_batch: Any,
    loss_fn: Callable[..., Any] | None,
    counts_shared: bool,
    stage: int = 0,
    staged: Callable[[Any], dryrun.Staged] | None = None,
    experts: int = 1,
) -> MemoryEstimate:
    """For the engine, before it allocates: the prediction for its plan, refused with the same OutOfMemoryError on every
    rank if it does not fit on some node. counts_shared: this rank is the first on its node of those that hold the same
    part of the model, and share memory. stage: of a pipeline, whose micro-batches go through this rank as staged(a
    batch) says. experts: ranks that share them. Collective."""
    import torch

    from .. import dryrun

    def work() -> dict[str, Any]:
        # Not what the fake tensors import, but what a step will: before them, with what it takes.
        shapes = 0 if staged is None else dryrun.load_symbolic_shapes()
        loaded = 0 if sample_batch is None else dryrun.load_compiler()
        through = None if staged is None else staged(sample_batch)
        told = predict(
            model,
            plan,
            base,
            config,
            sample_batch,
            loss_fn,
            named=named,
            group_of=group_of,
            loaded=loaded,
            staged=through,
            shapes=shapes,
        )
        return told.to_dict()

    failure = ""
    try:
        e = from_dict(work() if sample_batch is None else dryrun.forked(work))
    except DeepcError as exc:  # on some ranks, perhaps, and the others wait below
        failure = str(exc)
        e = predict(model, plan, base, config, None, None, named=named, group_of=group_of)
        e = changed(e, notes=(*e.notes, failure))
    if plan.device != "cpu":
        return e
    have = memory.available()
    told = [e.rank_peak, e.shared if counts_shared else 0, have, group.node, stage, not failure]
    rows = [
        _Told(*map(int, r)) for r in group.gather_all(torch.tensor(told, dtype=torch.float64, device="cpu")).tolist()
    ]
    nodes = [[r for r in rows if r.node == n] for n in dict.fromkeys(r.node for r in rows)]
    mine = [r for r in rows if r.node == group.node]
    e = changed(
        e,
        world=len(rows),
        ranks_per_node=len(mine),
        nodes=len(nodes),
        node_peak=sum(r.private + r.shared for r in mine),
        available=min(r.available for r in mine),
    )
    if staged is not None:
        e = _of_pipeline(e, rows, mine)
    full = [n for n in nodes if sum(r.private + r.shared for r in n) > min(r.available for r in n)]
    if not full:
        return e
    first, said = rows.index(full[0][0]), ""
    if group.rank == first:  # what would fit is worked out once: a dry run for each change
        even = all(len(n) == len(mine) for n in nodes)  # of others an estimate does not know
        asked = sample_batch is not None and not failure and staged is None and even
        if asked:
            ranks, divide = len(mine), _divided(experts)
            case = Case(model, config, sample_batch, loss_fn, ranks, len(nodes), base, plan.device, 3, divide=divide)
            e = changed(e, options=tuple(options_of(case, e, e.available or 0)))
        said = f"rank {first}: " * (len(rows) > 1) + refusal(e, asked)
    raise OutOfMemoryError(_told_by(group, first, said))


def _told_by(group: Ranks, root: int, text: str) -> str:
    """What rank `root` says. Collective."""
    import torch

    said = bytearray(text.encode())
    size = torch.tensor([len(said)], dtype=torch.int64, device="cpu")
    group.broadcast(size, root)
    letters = torch.frombuffer(said.ljust(int(size)), dtype=torch.uint8)
    group.broadcast(letters, root)
    return bytes(letters.tolist()).decode()
