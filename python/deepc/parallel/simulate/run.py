"""`deepc simulate`: a training of pp x dp x tp ranks with a ZeRO stage in one process. Every rank has its own weights,
gradients and states, cut as a real run cuts them (plan/layout.py), computes the actions of its schedule in their order
(plan/schedule.py), and gets what others have through memory operations of the C core."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ...errors import ArgumentError, DeepcError, UnsupportedError
from ...optim import AdamW
from ...plan.layout import Layout
from ...plan.mesh import Mesh
from ...plan.schedule import Action, Order
from . import model as parts
from .collectives import Traffic, copied, reduced

if TYPE_CHECKING:
    import argparse

_CLIP, _LR = 1.0, 1e-3


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
        """The largest relative difference of a loss."""
        return max(abs(a - b) / abs(b) for a, b in zip(self.losses, self.alone))


class Rank:
    """A virtual rank's memory. names: (layer, weight) in flat order. params: its weights, views of `flat`; with stage 3
    `flat` lasts while a micro-batch is under way, and `shard` is what the rank keeps."""

    def __init__(self, names: list[tuple[str, str]], whole: Mapping[tuple[str, str], torch.Tensor], dp: int, index: int,
                 stage: int) -> None:  # fmt: skip
        self.names, self.shapes = names, [whole[n].shape for n in names]
        self.layout, self.stage = Layout([whole[n].numel() for n in names], dp, 1 << 20), stage
        self.flat: torch.Tensor | None = torch.zeros(self.layout.total)
        for at, name in zip(self.layout.offsets, names):
            copied(self.flat, at, whole[name].contiguous(), 0, whole[name].numel())
        own_all = stage == 0
        self.slices = [(s.flat_begin, s.shard_begin, s.length) for s in self.layout.slices(index)]
        if own_all:
            self.slices = [(0, 0, self.layout.total)]
        self.shard = torch.nn.Parameter(torch.zeros(sum(n for _, _, n in self.slices)))
        for begin, at, n in self.slices:
            copied(self.shard.data, at, self.flat, begin, n)
        self.grad = torch.zeros(self.layout.total)
        self.optimizer = AdamW([self.shard], lr=_LR, weight_decay=0.01)
        if stage == 3:
            self.flat = None
        self.leaves: dict[str, dict[str, torch.Tensor]] = {}

    @property
    def state_bytes(self) -> int:
        """Between steps: weights, gradients, two moments."""
        weights = self.shard.nbytes if self.flat is None else self.flat.nbytes
        kept = self.shard.nbytes if self.stage >= 2 else self.grad.nbytes
        return weights + kept + 2 * self.shard.nbytes

    def lend(self, flat: torch.Tensor) -> None:
        """Leaves for autograd, as views of the whole weights."""
        self.leaves = {}
        for at, (layer, name), shape in zip(self.layout.offsets, self.names, self.shapes):
            view = flat[at : at + shape.numel()].view(shape)
            self.leaves.setdefault(layer, {})[name] = view.detach().requires_grad_()

    def collect(self) -> None:
        """Gradients of a micro-batch are added to what there is."""
        for at, (layer, name) in zip(self.layout.offsets, self.names):
            leaf = self.leaves[layer][name]
            if leaf.grad is not None:
                self.grad[at : at + leaf.numel()] += leaf.grad.flatten()
                leaf.grad = None


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
        if self.mesh.sp > 1 or self.mesh.ep > 1:
            raise UnsupportedError("simulate: sequence and expert parallelism are not simulated; use sp = ep = 1")
        if self.stage not in (0, 1, 2, 3):
            raise ArgumentError(f"simulate: ZeRO stage {self.stage} is none; it is 0 to 3")
        self.tiny.require(self.mesh.tp)
        order = Order.of(self.schedule, self.mesh.pp)
        self.pieces = order.stages
        self.holders = [order.rank_of(piece) for piece in range(self.pieces)]
        if self.pieces > self.tiny.layers:
            raise ArgumentError(
                f"simulate: {self.tiny.layers} blocks can't be cut into {self.pieces} stages; use --layers"
            )
        self.plan = order.schedule(self.micro_batches)
        self.traffic = Traffic()
        self.first_gradients: dict[tuple[int, int], torch.Tensor] = {}
        names, each = self.tiny.names(), self.tiny.layers / self.pieces
        cuts = [round(i * each) + 1 for i in range(self.pieces)] + [len(names)]
        self.layers = [names[0 if s == 0 else cuts[s] : cuts[s + 1]] for s in range(self.pieces)]
        self.layers[-1] = names[cuts[self.pieces - 1] if self.pieces > 1 else 0 :]
        whole = self.tiny.made()
        self.ranks = {r: self._rank(r, whole) for r in range(self.mesh.size)}

    def _rank(self, number: int, whole: Mapping[str, Mapping[str, torch.Tensor]]) -> Rank:
        at, tiny = self.mesh.coordinates(number), self.tiny
        mine = [s for s in range(self.pieces) if self.holders[s] == at.pp]
        names = [(layer, n) for s in mine for layer in self.layers[s] for n in whole[layer]]
        cut = {(a, b): tiny.part(a, b, whole[a][b], self.mesh.tp, at.tp) for a, b in names}
        return Rank(names, cut, self.mesh.dp, at.dp, self.stage)

    def _peers(self, pp: int, dp: int) -> list[Rank]:
        """The tensor-parallel ranks of a place."""
        return [self.ranks[self.mesh.rank(pp=pp, dp=dp, tp=t)] for t in range(self.mesh.tp)]

    def _replicas(self, pp: int, tp: int) -> list[Rank]:
        """The ranks that hold the same part of the model."""
        return [self.ranks[self.mesh.rank(pp=pp, dp=d, tp=tp)] for d in range(self.mesh.dp)]

    # ---- a step ------------------------------------------------------------------------------------------------------
    def step(self, ids: torch.Tensor, labels: torch.Tensor) -> float:
        """Trains on [dp, micro-batches, samples, seq] tokens; the mean loss."""
        for pp in range(self.mesh.pp):
            for tp in range(self.mesh.tp):
                self._lend(pp, tp)
        total = [self._pipeline(d, ids[d], labels[d]) for d in range(self.mesh.dp)]
        self._update()
        return sum(total) / self.mesh.dp

    def _lend(self, pp: int, tp: int) -> None:
        """Whole weights to compute with; with stage 3 gathered from the replicas' shards."""
        replicas = self._replicas(pp, tp)
        for r in replicas:
            if r.flat is not None:
                r.lend(r.flat)
                continue
            flat = torch.empty(r.layout.total)
            for other in replicas:
                for begin, at, n in other.slices:
                    copied(flat, begin, other.shard.data, at, n)
            r.lend(flat)
        if self.stage == 3:
            # real ranks gather for forward and for backward of each micro-batch; here once serves a step
            nbytes = 2 * self.micro_batches * replicas[0].layout.total * 4
            self.traffic.add("dp", len(replicas), nbytes, passes=1)

    def _pipeline(self, dp: int, ids: torch.Tensor, labels: torch.Tensor) -> float:
        """All actions of one replica: each rank's in its order, as early as what they need is there."""
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
                    out = self._forward(a, pp, dp, given, ids[a.micro], labels[a.micro])
                    under_way[a.stage, a.micro] = (given, out)
                    if a.stage < self.pieces - 1:
                        inbox["F", a.stage + 1, a.micro] = self._sent(a.stage, a.stage + 1, out)
                    else:
                        loss += out[0].item() / self.micro_batches
                else:
                    self._backward(a, pp, dp, inbox, under_way, waiting)
            if not moved:
                raise DeepcError(f"simulate: schedule {self.schedule} waits for ever at {next_of}")
        return loss

    def _sent(self, source: int, target: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Copies for the ranks of another stage, which share no memory with these."""
        if self.holders[source] != self.holders[target]:
            self.traffic.bytes["pp"] += sum(t.nbytes for t in tensors)
        return [t.detach().clone().requires_grad_() for t in tensors]

    def _forward(
        self, a: Action, pp: int, dp: int, given: list[torch.Tensor], ids: torch.Tensor, labels: torch.Tensor
    ) -> list[torch.Tensor]:
        peers, xs = self._peers(pp, dp), given
        for layer in self.layers[a.stage]:
            weights = [r.leaves[layer] for r in peers]
            if layer == "embed":
                xs = parts.embedded(weights, ids, self.traffic)
            elif layer == "head":
                xs = parts.losses(weights, xs, labels, self.traffic)
            else:
                xs = parts.block(self.tiny, weights, xs, self.traffic)
        return xs

    def _backward(
        self,
        a: Action,
        pp: int,
        dp: int,
        inbox: dict[tuple[str, int, int], list[torch.Tensor]],
        under_way: dict[tuple[int, int], tuple[list[torch.Tensor], list[torch.Tensor]]],
        waiting: dict[tuple[int, int], list[torch.Tensor]],
    ) -> None:
        """B, or its halves: I hands on the gradients of what came in, W makes those of the weights."""
        peers, key = self._peers(pp, dp), (a.stage, a.micro)
        given, out = under_way[key]
        leaves = [w for r in peers for layer in self.layers[a.stage] for w in r.leaves[layer].values()]
        if a.kind == "W":
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

    def _update(self) -> None:
        """Gradients are reduced to their owners, judged as one model's, and applied; weights go to all replicas."""
        square, mesh = 0.0, self.mesh
        keep = not self.first_gradients
        for pp in range(mesh.pp):
            for tp in range(mesh.tp):
                replicas = self._replicas(pp, tp)
                mean = reduced([r.grad for r in replicas]) / mesh.dp
                self.traffic.add("dp", mesh.dp, mean.nbytes, passes=2 if self.stage == 0 else 1)
                square += self._square(replicas[0], mean, tp)
                if keep:
                    self.first_gradients[pp, tp] = mean
                for r in replicas:
                    r.shard.grad = torch.empty_like(r.shard)
                    for begin, at, n in r.slices:
                        copied(r.shard.grad, at, mean, begin, n)
                    r.grad.zero_()
        factor = min(1.0, _CLIP / (square**0.5 + 1e-6))
        for r in self.ranks.values():
            assert r.shard.grad is not None
            r.shard.grad.mul_(factor)
            r.optimizer.step()
            r.shard.grad = None
            r.leaves = {}
        for pp in range(mesh.pp):
            for tp in range(mesh.tp):
                replicas = self._replicas(pp, tp)
                for r in replicas:
                    for other in [r] if self.stage == 0 else replicas:
                        for begin, at, n in other.slices if r.flat is not None else []:
                            assert r.flat is not None
                            copied(r.flat, begin, other.shard.data, at, n)
                if self.stage in (1, 2):
                    self.traffic.add("dp", mesh.dp, replicas[0].layout.total * 4, passes=1)

    def _square(self, rank: Rank, mean: torch.Tensor, tp: int) -> float:
        """Of the gradients that tensor-parallel rank `tp` counts: what all of them have counts once."""
        out = 0.0
        for at, (layer, name), shape in zip(rank.layout.offsets, rank.names, rank.shapes):
            if tp == 0 or self.tiny.shapes(layer)[name][1] is not None:
                out += float(mean[at : at + shape.numel()].double().square().sum())
        return out

    # ---- after -------------------------------------------------------------------------------------------------------
    def gradients(self) -> dict[str, dict[str, torch.Tensor]]:
        """Of the first step, whole, from the ranks."""
        out: dict[str, dict[str, torch.Tensor]] = {}
        for piece in range(self.pieces):
            pp = self.holders[piece]
            for layer in self.layers[piece]:
                for name, (_, dim) in self.tiny.shapes(layer).items():
                    found = [self._gradient(pp, tp, layer, name) for tp in range(self.mesh.tp)]
                    out.setdefault(layer, {})[name] = found[0] if dim is None else torch.cat(found, dim)
        return out

    def _gradient(self, pp: int, tp: int, layer: str, name: str) -> torch.Tensor:
        r = self._replicas(pp, tp)[0]
        i = r.names.index((layer, name))
        begin, shape = r.layout.offsets[i], r.shapes[i]
        return self.first_gradients[pp, tp][begin : begin + shape.numel()].view(shape)


def alone(tiny: parts.Tiny, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[list[float], Any]:
    """(losses, gradients of the first step) of one process in plain PyTorch, on [dp, micro-batches, samples, seq]
    tokens a step."""
    weights = {k: {n: w.requires_grad_() for n, w in v.items()} for k, v in tiny.made().items()}
    every = [w for v in weights.values() for w in v.values()]
    optimizer = torch.optim.AdamW(every, lr=_LR, weight_decay=0.01)
    out: list[float] = []
    gradients: dict[str, dict[str, torch.Tensor]] = {}
    for ids, labels in batches:
        loss = parts.whole_loss(tiny, weights, ids.flatten(0, 2), labels.flatten(0, 2))
        loss.backward()
        if not out:
            gradients = {k: {n: w.grad.clone() for n, w in v.items() if w.grad is not None} for k, v in weights.items()}
        torch.nn.utils.clip_grad_norm_(every, _CLIP)
        optimizer.step()
        optimizer.zero_grad()
        out.append(loss.item())
    return out, gradients


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
    """Trains `steps` steps on pp x dp x tp virtual ranks, each replica on `micro_batches` micro-batches of `samples`
    sequences, with AdamW and clipping, and the same in one process. ArgumentError for a layout that can't be,
    UnsupportedError for sp or ep above 1."""
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
        ids = torch.randint(0, simulation.tiny.vocab, shape, generator=draw)
        batches.append((ids[..., :-1], ids[..., 1:]))
    losses = tuple(simulation.step(*b) for b in batches)
    took = time.perf_counter() - begin
    whole, whole_gradients = alone(simulation.tiny, batches)
    fullest = max(r.state_bytes for r in simulation.ranks.values())
    sent = dict(simulation.traffic.bytes)
    return Result(mesh, stage, losses, tuple(whole), simulation.gradients(), whole_gradients, fullest, sent, took)


# ---- the command -----------------------------------------------------------------------------------------------------
def command(args: argparse.Namespace) -> int:
    """`deepc simulate`. Exit code 1: the losses differ from one process' by more than 1e-6 of themselves."""
    sizes = {n: getattr(args, n) for n in ("layers", "hidden", "heads", "vocab", "seq")}
    if wrong := [n for n, v in sizes.items() if v < 1]:
        raise ArgumentError(f"simulate: --{wrong[0]} {sizes[wrong[0]]} must be at least 1")
    mesh = Mesh(dp=args.dp, tp=args.tp, pp=args.pp)
    torch.set_num_threads(1)  # tensors are tiny
    found = run(mesh, stage=args.stage, schedule=args.schedule, micro_batches=args.micro_batches, samples=args.samples,
                steps=args.steps, tiny=parts.Tiny(**sizes))  # fmt: skip
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
