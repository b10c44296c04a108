"""A tiny GPT as the ranks of a stage have it: tensor parallelism cuts its weights, sequence parallelism its positions,
and its experts are spread over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ...errors import ArgumentError
from ...plan.mesh import Coordinates, Mesh
from ..expert.dispatch import combine, dispatch
from ..expert.gate import balance_of, capacity_of, route
from .collectives import Traffic, exchanged, largest, spread, summed

Weights = Mapping[str, torch.Tensor]
BALANCE = 0.01  # of the load-balance losses, in the loss


class Weight(NamedTuple):
    """tensor: the dimension that tensor parallelism cuts (None: every rank has all). expert: the first dimension is
    that of experts."""

    shape: tuple[int, ...]
    tensor: int | None = None
    expert: bool = False


@dataclass(frozen=True)
class Tiny:
    """Sizes. A layer is "embed", "0", "1", ... or "head". experts: of each block (0: a network for all tokens), of
    which a token goes to `top` (1 or 2); capacity: their places, in tokens x top / experts of a rank."""

    layers: int = 8
    hidden: int = 64
    heads: int = 8
    vocab: int = 64
    seq: int = 8
    experts: int = 0
    top: int = 1
    capacity: float = 1.25

    def names(self) -> list[str]:
        return ["embed", *map(str, range(self.layers)), "head"]

    def require(self, mesh: Mesh) -> None:
        """ArgumentError if these ranks can't share it."""
        tp, sp, ep = mesh.tp, mesh.sp, mesh.ep
        if self.heads % (tp * sp) or self.vocab % tp or self.hidden % self.heads:
            cut = f"tp = {tp}" if sp == 1 else f"tp x sp = {tp} x {sp}"
            raise ArgumentError(
                f"simulate: {self.heads} heads and {self.vocab} words can't be cut into {cut}, or {self.hidden}"
                " into heads; use --hidden, --heads, --vocab"
            )
        if self.vocab < 2:
            raise ArgumentError(f"simulate: the loss over {self.vocab} word is always 0; use --vocab 2 or more")
        if self.seq % sp:
            raise ArgumentError(f"simulate: samples of {self.seq} tokens can't be cut into sp = {sp}; use --seq")
        if self.experts < 0 or (self.experts and self.top not in (1, 2)) or (self.experts and self.experts < self.top):
            raise ArgumentError(
                f"simulate: {self.experts} experts, {self.top} of them for a token: --experts is 0 or more, --top is 1"
                " or 2 and not above it"
            )
        if self.experts and not 0 < self.capacity < math.inf:
            raise ArgumentError(f"simulate: --capacity {self.capacity} must be a number above 0")
        if ep > 1 and (not self.experts or self.experts % ep):
            raise ArgumentError(f"simulate: {self.experts} experts can't be spread over ep = {ep} ranks; use --experts")

    def places(self, tokens: int) -> int:
        """Of an expert, for `tokens` tokens of a rank."""
        return capacity_of(tokens, self.experts, self.capacity * self.top, 1)

    def shapes(self, layer: str) -> dict[str, Weight]:
        h, v, e = self.hidden, self.vocab, self.experts
        if layer == "embed":
            return {"tokens": Weight((v, h), 0), "places": Weight((self.seq, h))}
        if layer == "head":
            return {"norm": Weight((h,)), "norm_bias": Weight((h,)), "words": Weight((v, h), 0)}
        found = {n: Weight((h,)) for n in ("norm1", "norm1_bias", "norm2", "norm2_bias")}
        found |= {
            "q": Weight((h, h), 0),
            "k": Weight((h, h), 0),
            "v": Weight((h, h), 0),
            "mix": Weight((h, h), 1),
            "mix_bias": Weight((h,)),
        }
        if not e:
            return found | {
                "up": Weight((4 * h, h), 0),
                "up_bias": Weight((4 * h,), 0),
                "down": Weight((h, 4 * h), 1),
                "down_bias": Weight((h,)),
            }
        return found | {
            "gate": Weight((e, h)),
            "up": Weight((e, 4 * h, h), 1, True),
            "up_bias": Weight((e, 4 * h), 1, True),
            "down": Weight((e, h, 4 * h), 2, True),
            "down_bias": Weight((e, h), None, True),
        }

    def made(self, seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
        """Weights of all layers."""
        draw = torch.Generator().manual_seed(seed)
        out: dict[str, dict[str, torch.Tensor]] = {}
        for layer in self.names():
            out[layer] = {
                name: torch.ones(w.shape, dtype=torch.float32, device="cpu")
                if name.startswith("norm") and "bias" not in name
                else 0.05 * torch.randn(w.shape, generator=draw, dtype=torch.float32, device="cpu")
                for name, w in self.shapes(layer).items()
            }  # fmt: skip
        return out

    def part(self, layer: str, name: str, whole: torch.Tensor, mesh: Mesh, at: Coordinates) -> torch.Tensor:
        """What a rank has of a weight."""
        w = self.shapes(layer)[name]
        if w.expert:
            whole = whole.chunk(mesh.ep, 0)[at.ep]
        return (whole if w.tensor is None else whole.chunk(mesh.tp, w.tensor)[at.tp]).contiguous()


@dataclass(frozen=True)
class Cell:
    """The ranks of a stage that compute together: `replicas` data-parallel ones whose experts are shared, each of sp
    sequence x tp tensor-parallel ranks, in the order of the mesh."""

    replicas: int
    sp: int
    tp: int
    ep: int

    @classmethod
    def of(cls, mesh: Mesh) -> Cell:
        """`ep` neighbours may be parts of several replicas: as many as make whole groups of them."""
        return cls(math.lcm(mesh.ep, mesh.sp) // mesh.sp, mesh.sp, mesh.tp, mesh.ep)

    @property
    def size(self) -> int:
        return self.replicas * self.sp * self.tp

    def tensor_groups(self) -> Iterator[list[int]]:
        """Of ranks' indices in the cell; so are the others."""
        return (list(range(i, i + self.tp)) for i in range(0, self.size, self.tp))

    def sequence_groups(self) -> Iterator[list[int]]:
        width = self.sp * self.tp
        for begin in range(0, self.size, width):
            yield from (list(range(begin + t, begin + width, self.tp)) for t in range(self.tp))

    def expert_groups(self) -> Iterator[list[int]]:
        width = self.ep * self.tp
        for begin in range(0, self.size, width):
            yield from (list(range(begin + t, begin + width, self.tp)) for t in range(self.tp))

    def positions(self, whole: torch.Tensor, place: int) -> torch.Tensor:
        """What tensor-parallel group `place` has of [replicas, samples, positions]."""
        replica, s = divmod(place, self.sp)
        return whole[replica].chunk(self.sp, -1)[s]


def over(
    groups: Iterable[list[int]],
    tensors: Sequence[torch.Tensor],
    run: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
) -> list[torch.Tensor]:
    """run(those of a group) -> one for each of them; each group's."""
    out = list(tensors)
    for group in groups:
        for i, t in zip(group, run([tensors[i] for i in group])):
            out[i] = t
    return out


def _own_words(ids: torch.Tensor, rank: int, each: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(numbers among the `each` words that a tensor-parallel rank has, 0 for others'; which are its own)."""
    here = (ids >= rank * each) & (ids < (rank + 1) * each)
    return torch.where(here, ids - rank * each, torch.zeros_like(ids)), here


def embedded(cell: Cell, ranks: Sequence[Weights], ids: torch.Tensor, traffic: Traffic) -> list[torch.Tensor]:
    """The embedding's output on each rank, whose words are a slice of the vocabulary. ids: [replicas, samples,
    positions]."""
    out = []
    for place, group in enumerate(cell.tensor_groups()):
        mine, found = cell.positions(ids, place), []
        for t, i in enumerate(group):
            local, here = _own_words(mine, t, ranks[i]["tokens"].shape[0])
            found.append(F.embedding(local, ranks[i]["tokens"]) * here.unsqueeze(-1))
        part = place % cell.sp
        out += [x + ranks[i]["places"].chunk(cell.sp)[part] for x, i in zip(summed(traffic, found), group)]
    return out


def block(
    tiny: Tiny,
    cell: Cell,
    ranks: Sequence[Weights],
    given: Sequence[torch.Tensor],
    balance: Sequence[torch.Tensor],
    traffic: Traffic,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A block on each rank: columns of its first products, rows of its second (arXiv:1909.08053, section 3), a part of
    the heads with all positions in attention (arXiv:2309.14509). balance: the load-balance losses so far."""
    h = given[0].shape[-1]
    normed = [F.layer_norm(x, (h,), w["norm1"], w["norm1_bias"]) for x, w in zip(given, ranks)]
    normed = over(cell.tensor_groups(), normed, lambda some: spread(traffic, some))
    qkv = [torch.stack([F.linear(y, w[n]) for n in "qkv"]) for y, w in zip(normed, ranks)]
    mixed = [F.linear(z, w["mix"]) for z, w in zip(_attended(tiny, cell, qkv, traffic), ranks)]
    mixed = over(cell.tensor_groups(), mixed, lambda some: summed(traffic, some))
    xs = [x + z + w["mix_bias"] for x, z, w in zip(given, mixed, ranks)]
    normed = [F.layer_norm(x, (h,), w["norm2"], w["norm2_bias"]) for x, w in zip(xs, ranks)]
    if tiny.experts:
        outputs, losses = through_experts(tiny, cell, ranks, normed, traffic)
        return [x + z for x, z in zip(xs, outputs)], [a + b for a, b in zip(balance, losses)]
    normed = over(cell.tensor_groups(), normed, lambda some: spread(traffic, some))
    inner = [F.linear(F.gelu(F.linear(y, w["up"], w["up_bias"])), w["down"]) for y, w in zip(normed, ranks)]
    inner = over(cell.tensor_groups(), inner, lambda some: summed(traffic, some))
    return [x + z + w["down_bias"] for x, z, w in zip(xs, inner, ranks)], list(balance)


def _attended(tiny: Tiny, cell: Cell, qkv: Sequence[torch.Tensor], traffic: Traffic) -> list[torch.Tensor]:
    """Of queries, keys and values [3, samples, own positions, heads' width] of each rank: the mixed values of its
    positions and heads. Heads are exchanged for positions before, and back after."""
    n = cell.sp
    _, b, own, width = qkv[0].shape
    heads, depth = tiny.heads // (cell.tp * n), tiny.hidden // tiny.heads
    equal = [[1] * n for _ in range(n)]

    def swap(some: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return exchanged(traffic, "sp", some, equal)

    parts = [t.view(3, b, own, n, heads, depth).permute(3, 0, 1, 4, 2, 5) for t in qkv]  # by whose heads
    parts = over(cell.sequence_groups(), parts, swap)  # now by whose positions
    whole = [t.permute(1, 2, 3, 0, 4, 5).reshape(3, b, heads, n * own, depth) for t in parts]
    mixed = [F.scaled_dot_product_attention(t[0], t[1], t[2], is_causal=True) for t in whole]
    parts = [t.view(b, heads, n, own, depth).permute(2, 0, 3, 1, 4) for t in mixed]
    parts = over(cell.sequence_groups(), parts, swap)
    return [t.permute(1, 2, 0, 3, 4).reshape(b, own, width) for t in parts]


# ---- experts ---------------------------------------------------------------------------------------------------------
def through_experts(
    tiny: Tiny, cell: Cell, ranks: Sequence[Weights], xs: Sequence[torch.Tensor], traffic: Traffic
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(output, load-balance loss) of each rank, which gates its own tokens: they travel to their experts' ranks and
    back, as between real ones (parallel/expert/group.py). The loss is that of the ranks of a sequence together, whose
    few numbers are not counted as traffic."""
    tokens = [x.reshape(-1, x.shape[-1]) for x in xs]
    places, own = tiny.places(len(tokens[0])), tiny.experts // cell.ep
    routes = [route(F.linear(t, w["gate"]), tiny.top, capacity=places) for t, w in zip(tokens, ranks)]
    wanted = [r.rows.view(cell.ep, own) for r in routes]  # of a rank, for each rank of its group: rows of its experts
    given = [w.sum(1).tolist() for w in wanted]
    asked = list(wanted)  # of a rank, from each rank of its group: rows of its own experts
    ways: list[tuple[list[int], list[list[int]]]] = []
    for group in cell.expert_groups():
        ways.append((group, [given[i] for i in group]))
        for e, i in enumerate(group):
            asked[i] = torch.stack([wanted[j][e] for j in group])

    rows = [dispatch(t, r) for t, r in zip(tokens, routes)]
    for group, counts in ways:
        for i, t in zip(group, exchanged(traffic, "ep", [rows[i] for i in group], counts)):
            rows[i] = t
    orders = [
        torch.arange(own, device="cpu").repeat(cell.ep).repeat_interleave(a.view(-1)).argsort(stable=True)
        for a in asked
    ]
    rows = [t.index_select(0, order) for t, order in zip(rows, orders)]
    rows = over(cell.tensor_groups(), rows, lambda some: spread(traffic, some))
    sizes = [a.sum(0).tolist() for a in asked]
    outs = [_computed(w, t, n) for w, t, n in zip(ranks, rows, sizes)]
    outs = over(cell.tensor_groups(), outs, lambda some: summed(traffic, some))
    outs = [
        torch.cat([part + bias for part, bias in zip(t.split(n), w["down_bias"].unbind())])
        for t, n, w in zip(outs, sizes, ranks)
    ]
    outs = [t.index_select(0, order.argsort()) for t, order in zip(outs, orders)]
    for group, counts in ways:
        back = [list(to) for to in zip(*counts)]
        for i, t in zip(group, exchanged(traffic, "ep", [outs[i] for i in group], back)):
            outs[i] = t
    found = [combine(torch.cat([t, t.new_zeros(1, t.shape[1])]), r) for t, r in zip(outs, routes)]
    loads = over(cell.sequence_groups(), [r.loads for r in routes], lambda some: [torch.stack(some).sum(0)] * len(some))
    return [y.view(x.shape) for y, x in zip(found, xs)], [balance_of(t) for t in loads]


def _computed(w: Weights, rows: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """What a rank's experts make of their rows, which lie one expert's after another's; without the last bias."""
    experts = zip(rows.split(sizes), w["up"].unbind(), w["up_bias"].unbind(), w["down"].unbind())
    return torch.cat([F.linear(F.gelu(F.linear(part, up, bias)), down) for part, up, bias, down in experts])


# ---- the loss --------------------------------------------------------------------------------------------------------
def losses(
    cell: Cell,
    ranks: Sequence[Weights],
    xs: Sequence[torch.Tensor],
    balance: Sequence[torch.Tensor],
    labels: torch.Tensor,
    traffic: Traffic,
) -> list[torch.Tensor]:
    """The mean loss of each rank's positions, whose logits are a slice of the vocabulary: no rank has all of them.
    labels: [replicas, samples, positions], the next tokens."""
    h = xs[0].shape[-1]
    normed = [F.layer_norm(x, (h,), w["norm"], w["norm_bias"]) for x, w in zip(xs, ranks)]
    found = []
    for place, group in enumerate(cell.tensor_groups()):
        mine = cell.positions(labels, place)
        inputs = spread(traffic, [normed[i] for i in group])
        logits = [F.linear(y, ranks[i]["words"]) for y, i in zip(inputs, group)]
        top = largest([z.detach().amax(-1) for z in logits])
        traffic.add("tp", cell.tp, top.nbytes, passes=2)
        shifted = [z - top.unsqueeze(-1) for z in logits]
        sums = summed(traffic, [z.exp().sum(-1) for z in shifted])
        targets = []
        for t, z in enumerate(shifted):
            local, here = _own_words(mine, t, z.shape[-1])
            targets.append(z.gather(-1, local.unsqueeze(-1)).squeeze(-1) * here)
        found += [(total.log() - t).mean() for total, t in zip(sums, summed(traffic, targets))]
    return [loss + BALANCE * b for loss, b in zip(found, balance)]
