"""`deepc simulate`: a training of pp x dp x sp x tp ranks, with experts spread over ep of them, and a ZeRO stage in one
process. Every rank has its own weights, gradients and states, cut as a real run cuts them (plan/layout.py), computes
the actions of its schedule in their order (plan/schedule.py), and gets what others have through memory operations of
the C core."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ...errors import ArgumentError, DeepcError
from ...plan.mesh import Mesh
from ...plan.schedule import Action, Order
from . import model as parts
from .collectives import Traffic, copied, reduced
from .ranks import Rank
from .reference import CLIP, alone

if TYPE_CHECKING:
    import argparse


@dataclass(frozen=True)
class Result:
    """Losses of each step, as the ranks had them and as one process has them; gradients of the first step, whole,
    before clipping, of both; bytes of states that the fullest rank holds; bytes sent by axis, over all ranks and
    steps."""

    mesh: Mesh
    stage: int
    losses: tuple[float, ...]
    alone: tuple[float, ...]
    gradients: Mapping[str, Mapping[str, torch.Tensor]]
    alone_gradients: Mapping[str, Mapping[str, torch.Tensor]]
    rank_bytes: int
    sent: Mapping[str, int]
    seconds: float

    @property
    def difference(self) -> float:
        """The largest relative difference of a loss; NaN if one is."""
        each = [abs(a - b) / abs(b) for a, b in zip(self.losses, self.alone)]
        return next((d for d in each if d != d), max(each))


@dataclass
class Simulation:
    """See run."""

    mesh: Mesh
    stage: int = 0
    schedule: str = "1f1b"
    micro_batches: int = 8
    samples: int = 1
    tiny: parts.Tiny = field(default_factory=parts.Tiny)

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise ArgumentError(f"simulate: ZeRO stage {self.stage} is none; it is 0 to 3")
        self.tiny.require(self.mesh)
        order = Order.of(self.schedule, self.mesh.pp)
        self.pieces = order.stages
        self.holders = [order.rank_of(piece) for piece in range(self.pieces)]
        if self.pieces > self.tiny.layers:
            raise ArgumentError(
                f"simulate: {self.tiny.layers} blocks can't be cut into {self.pieces} stages; use --layers"
            )
        self.plan = order.schedule(self.micro_batches)
        self.cell = parts.Cell.of(self.mesh)
        self.traffic = Traffic()
        self.first_gradients: dict[tuple[int, int, int], torch.Tensor] = {}
        names, each = self.tiny.names(), self.tiny.layers / self.pieces
        cuts = [round(i * each) + 1 for i in range(self.pieces)] + [len(names)]
        self.layers = [names[0 if s == 0 else cuts[s] : cuts[s + 1]] for s in range(self.pieces)]
        self.layers[-1] = names[cuts[self.pieces - 1] if self.pieces > 1 else 0 :]
        whole = self.tiny.made()
        self.ranks = {r: self._rank(r, whole) for r in range(self.mesh.size)}
        # by (pp, tp, ep), what of the model they hold: ZeRO's shards are theirs
        self._holding: dict[tuple[int, int, int], list[Rank]] = {}
        for r in self.ranks:
            if (key := self._share(r)) not in self._holding:
                self._holding[key] = [self.ranks[i] for i in self.mesh.holders(r)]

    def _rank(self, number: int, whole: Mapping[str, Mapping[str, torch.Tensor]]) -> Rank:
        at, tiny, mesh = self.mesh.coordinates(number), self.tiny, self.mesh
        mine = [s for s in range(self.pieces) if self.holders[s] == at.pp]
        names = [(layer, n) for s in mine for layer in self.layers[s] for n in whole[layer]]
        cut = {(a, b): tiny.part(a, b, whole[a][b], mesh, at) for a, b in names}
        experts = frozenset((a, b) for a, b in names if tiny.shapes(a)[b].expert)
        world, index = mesh.dp * mesh.sp // mesh.ep, (at.dp * mesh.sp + at.sp) // mesh.ep
        return Rank(names, cut, experts, world, index, self.stage)

    def _peers(self, pp: int, first: int) -> list[Rank]:
        """The ranks that compute together, from replica `first` on."""
        begin = self.mesh.rank(pp=pp, dp=first)
        return [self.ranks[r] for r in range(begin, begin + self.cell.size)]

    def _share(self, number: int) -> tuple[int, int, int]:
        """(pp, tp, ep) of the part of the model that a rank holds."""
        at = self.mesh.coordinates(number)
        return at.pp, at.tp, at.ep

    # ---- a step ------------------------------------------------------------------------------------------------------
    def step(self, ids: torch.Tensor, labels: torch.Tensor) -> float:
        """Trains on [dp, micro-batches, samples, seq] tokens; the mean loss. Cells compute one after the other, so that
        what ranks have during a step is there for one of them at a time."""
        total, sums = 0.0, dict[tuple[int, int, int], torch.Tensor]()
        for first in range(0, self.mesh.dp, self.cell.replicas):
            self._lend(first)
            mine = slice(first, first + self.cell.replicas)
            total += self._pipeline(first, ids[mine].transpose(0, 1), labels[mine].transpose(0, 1))
            self._add_up(first, sums)
        self._update(sums)
        return total / self.mesh.dp

    def _lend(self, first: int) -> None:
        """Whole weights to compute with; with stage 3 gathered from the shards of the ranks that hold the same."""
        for pp in range(self.mesh.pp):
            for i, r in enumerate(self._peers(pp, first)):
                if r.flat is not None:
                    r.lend(r.flat)
                    continue
                share = self._share(self.mesh.rank(pp=pp, dp=first) + i)
                r.lend(r.gather(self._holding[share], torch.empty(r.used, dtype=torch.float32, device="cpu")))

    def _pipeline(self, first: int, ids: torch.Tensor, labels: torch.Tensor) -> float:
        """All actions of a cell's replicas, on [micro-batches, replicas, samples, seq] tokens: each rank's in its
        order, as early as what they need is there. The sum of the replicas' losses."""
        inbox: dict[tuple[str, int, int], list[torch.Tensor]] = {}
        under_way: dict[tuple[int, int], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        waiting: dict[tuple[int, int], list[torch.Tensor]] = {}
        next_of, loss = [0] * self.mesh.pp, 0.0

        def ready(a: Action) -> bool:
            if a.kind == "F":
                return a.stage == 0 or ("F", a.stage, a.micro) in inbox
            if a.kind == "W":
                return (a.stage, a.micro) in waiting
            return (a.stage == self.pieces - 1 or ("B", a.stage, a.micro) in inbox) and (a.stage, a.micro) in under_way

        while any(n < len(row) for n, row in zip(next_of, self.plan.ranks)):
            moved = False
            for pp, row in enumerate(self.plan.ranks):
                if next_of[pp] == len(row) or not ready(row[next_of[pp]]):
                    continue
                a = row[next_of[pp]]
                next_of[pp] += 1
                moved = True
                if a.kind == "F":
                    given = inbox.pop(("F", a.stage, a.micro), [])
                    out = self._forward(a, self._peers(pp, first), given, ids[a.micro], labels[a.micro])
                    under_way[a.stage, a.micro] = (given, out)
                    if a.stage < self.pieces - 1:
                        inbox["F", a.stage + 1, a.micro] = self._sent(a.stage, a.stage + 1, out)
                    else:
                        mean = sum(x.item() for x in out[:: self.mesh.tp]) / self.mesh.sp
                        loss += mean / self.micro_batches
                else:
                    self._backward(a, self._peers(pp, first), inbox, under_way, waiting)
            if not moved:
                raise DeepcError(f"simulate: schedule {self.schedule} waits for ever at {next_of}")
        return loss

    def _sent(self, source: int, target: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Copies for the ranks of another stage, which share no memory with these."""
        if self.holders[source] != self.holders[target]:
            self.traffic.sent("pp", sum(t.nbytes for t in tensors))
        return [t.detach().clone().requires_grad_() for t in tensors]

    def _forward(
        self, a: Action, peers: list[Rank], given: list[torch.Tensor], ids: torch.Tensor, labels: torch.Tensor
    ) -> list[torch.Tensor]:
        """Between stages goes each rank's output and, with experts, its load-balance loss so far."""
        n, tiny, cell = len(peers), self.tiny, self.cell
        xs, balance = given[:n], given[n:] or [torch.zeros((), dtype=torch.float32, device="cpu") for _ in peers]
        for layer in self.layers[a.stage]:
            weights = [r.leaves[layer] for r in peers]
            if layer == "embed":
                xs = parts.embedded(cell, weights, ids, self.traffic)
            elif layer == "head":
                return parts.losses(cell, weights, xs, balance, labels, self.traffic)
            else:
                xs, balance = parts.block(tiny, cell, weights, xs, balance, self.traffic)
        return [*xs, *balance] if tiny.experts else xs

    def _backward(
        self,
        a: Action,
        peers: list[Rank],
        inbox: dict[tuple[str, int, int], list[torch.Tensor]],
        under_way: dict[tuple[int, int], tuple[list[torch.Tensor], list[torch.Tensor]]],
        waiting: dict[tuple[int, int], list[torch.Tensor]],
    ) -> None:
        """B, or its halves: I hands on the gradients of what came in, W makes those of the weights."""
        key = (a.stage, a.micro)
        given, out = under_way[key]
        leaves = [w for r in peers for layer in self.layers[a.stage] for w in r.leaves[layer].values()]
        if a.kind == "W":
            # I has brought gradients through these layers already: a real rank has kept them
            with self.traffic.uncounted() if given else contextlib.nullcontext():
                self._weights(leaves, out, waiting.pop(key), peers)
            del under_way[key]
            return
        if a.stage == self.pieces - 1:
            grads = [torch.full_like(x, 1 / self.micro_batches) for x in out]
        else:
            grads = [g.detach() for g in inbox.pop(("B", a.stage, a.micro))]
        if a.kind == "I":
            waiting[key] = grads
            back = list(torch.autograd.grad(out, given, grads, retain_graph=True)) if given else []
        else:
            torch.autograd.backward(out, grads)
            back = [x.grad for x in given if x.grad is not None]
            for r in peers:
                r.collect()
            del under_way[key]
        if a.stage > 0:
            inbox["B", a.stage - 1, a.micro] = self._sent(a.stage, a.stage - 1, back)

    @staticmethod
    def _weights(
        leaves: list[torch.Tensor], out: list[torch.Tensor], grads: list[torch.Tensor], peers: list[Rank]
    ) -> None:
        for leaf, g in zip(leaves, torch.autograd.grad(out, leaves, grads, allow_unused=True)):
            if g is not None:
                leaf.grad = g
        for r in peers:
            r.collect()

    def _add_up(self, first: int, sums: dict[tuple[int, int, int], torch.Tensor]) -> None:
        """Gradients of a cell are added to those of the cells before: in the order of ranks. What is no expert's is
        summed over the ranks that share experts first."""
        ep = self.mesh.ep
        # a pipeline reduces once a step, others with every micro-batch
        times = 1 if self.mesh.pp > 1 else self.micro_batches
        for pp in range(self.mesh.pp):
            peers = self._peers(pp, first)
            for group in self.cell.expert_groups():
                ranks = [peers[i] for i in group]
                given = [r.take_gradients() for r in ranks]
                whole = reduced(given)
                self.traffic.add("dp", ep, times * (ranks[0].nbytes - ranks[0].expert_nbytes), passes=2)
                for e, (r, mine) in enumerate(zip(ranks, given)):
                    total = whole.clone() if ep > 1 else whole
                    for at, n in r.experts if ep > 1 else ():
                        copied(total, at, mine, at, n)
                    key = (pp, group[0] % self.mesh.tp, e)
                    if key in sums:
                        total = reduced([sums[key], total])
                        self.traffic.sent("dp", times * (2 if self.stage == 0 else 1) * r.nbytes)
                    sums[key] = total

    def _update(self, sums: dict[tuple[int, int, int], torch.Tensor]) -> None:
        """Gradients, on their owners, are judged as one model's and applied; weights go to all replicas."""
        square = 0.0
        for key, total in sums.items():
            total /= self.mesh.dp * self.mesh.sp
            square += self._square(key, total)
        if not self.first_gradients:
            self.first_gradients = {key: total.clone() for key, total in sums.items()}
        factor = min(1.0, CLIP / (square**0.5 + 1e-6))
        for share, holding in self._holding.items():
            gradients = sums.pop(share).mul_(factor)
            for r in holding:
                r.update(gradients)
            for r in holding:
                if r.flat is not None:
                    r.gather(holding, r.flat)
            # stage 3: real ranks gather for forward and for backward of each micro-batch; here once served the step
            gathers = 0 if self.stage == 0 else 1 if self.stage < 3 else 2 * self.micro_batches
            self.traffic.add("dp", len(holding), holding[0].nbytes, passes=gathers)

    def _square(self, key: tuple[int, int, int], mean: torch.Tensor) -> float:
        """Of the gradients of this part that no other has counted: what all ranks have counts once."""
        (_, tp, ep), rank, out = key, self._holding[key][0], 0.0
        for at, (layer, name), shape in zip(rank.layout.offsets, rank.names, rank.shapes):
            weight = self.tiny.shapes(layer)[name]
            if (tp == 0 or weight.tensor is not None) and (ep == 0 or weight.expert):
                out += float(mean[at : at + shape.numel()].double().square().sum())
        return out

    # ---- after -------------------------------------------------------------------------------------------------------
    def gradients(self) -> dict[str, dict[str, torch.Tensor]]:
        """Of the first step, whole, from the ranks."""
        out: dict[str, dict[str, torch.Tensor]] = {}
        for piece in range(self.pieces):
            pp = self.holders[piece]
            for layer in self.layers[piece]:
                for name, (_, dim, expert) in self.tiny.shapes(layer).items():
                    found = []
                    for ep in range(self.mesh.ep if expert else 1):
                        cut = [self._gradient((pp, tp, ep), layer, name) for tp in range(self.mesh.tp)]
                        found.append(cut[0] if dim is None else torch.cat(cut, dim))
                    out.setdefault(layer, {})[name] = torch.cat(found) if expert else found[0]
        return out

    def _gradient(self, key: tuple[int, int, int], layer: str, name: str) -> torch.Tensor:
        r = self._holding[key][0]
        i = r.names.index((layer, name))
        begin, shape = r.layout.offsets[i], r.shapes[i]
        return self.first_gradients[key][begin : begin + shape.numel()].view(shape)


def run(
    mesh: Mesh,
    *,
    stage: int = 0,
    schedule: str = "1f1b",
    micro_batches: int = 8,
    samples: int = 1,
    steps: int = 2,
    tiny: parts.Tiny | None = None,
) -> Result:
    """Trains `steps` steps on pp x dp x sp x tp virtual ranks, each replica on `micro_batches` micro-batches of
    `samples` sequences, with AdamW and clipping, and the same in one process. ArgumentError for a layout that can't
    be."""
    begin = time.perf_counter()
    if min(micro_batches, samples, steps) < 1:
        raise ArgumentError(
            f"simulate: {micro_batches} micro-batches of {samples}, {steps} steps: all must be at least 1"
        )
    simulation = Simulation(mesh, stage, schedule, micro_batches, samples, tiny or parts.Tiny())
    draw = torch.Generator().manual_seed(1)
    shape = (mesh.dp, micro_batches, samples, simulation.tiny.seq + 1)
    batches = []
    for _ in range(steps):
        ids = torch.randint(0, simulation.tiny.vocab, shape, generator=draw, device="cpu")
        batches.append((ids[..., :-1], ids[..., 1:]))
    losses = tuple(simulation.step(*b) for b in batches)
    took = time.perf_counter() - begin
    whole, whole_gradients = alone(simulation.tiny, batches, mesh.sp)
    fullest = max(r.state_bytes for r in simulation.ranks.values())
    sent = dict(simulation.traffic.bytes)
    return Result(mesh, stage, losses, tuple(whole), simulation.gradients(), whole_gradients, fullest, sent, took)


# ---- the command -----------------------------------------------------------------------------------------------------
def command(args: argparse.Namespace) -> int:
    """`deepc simulate`. Exit code 1: the losses differ from one process' by more than 1e-6 of themselves."""
    sizes = {n: getattr(args, n) for n in ("layers", "hidden", "heads", "vocab", "seq", "top")}
    if wrong := [n for n, v in sizes.items() if v < 1]:
        raise ArgumentError(f"simulate: --{wrong[0]} {sizes[wrong[0]]} must be at least 1")
    mesh = Mesh(dp=args.dp, tp=args.tp, pp=args.pp, sp=args.sp, ep=args.ep)
    tiny = parts.Tiny(**sizes, experts=args.experts, capacity=args.capacity)
    torch.set_num_threads(1)  # tensors are tiny
    found = run(mesh, stage=args.stage, schedule=args.schedule, micro_batches=args.micro_batches, samples=args.samples,
                steps=args.steps, tiny=tiny)  # fmt: skip
    if args.json:
        told = {"ranks": mesh.size, "losses": found.losses, "alone": found.alone, "difference": found.difference}
        print(json.dumps({**told, "rank_bytes": found.rank_bytes, "sent": found.sent, "seconds": found.seconds}))
    else:
        print(f"{mesh.size} ranks in one process: {mesh}, ZeRO {found.stage}, {args.schedule}; {found.seconds:.1f} s")
        for i, (a, b) in enumerate(zip(found.losses, found.alone)):
            print(f"  step {i + 1}: loss {a:.7f}, of one process {b:.7f}, difference {abs(a - b) / abs(b):.1e}")
        sent = ", ".join(f"{axis} {n / 2**20:.4g} MiB" for axis, n in sorted(found.sent.items())) or "nothing"
        print(f"  states of a rank {found.rank_bytes / 2**10:.4g} KiB; sent by all ranks: {sent}")
    return 0 if found.difference <= 1e-6 else 1
