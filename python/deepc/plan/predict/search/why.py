"""Why nothing is left of a search: which want leaves no way to share the ranks, or how much memory is missing where."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

from .cluster import Cluster
from .models import Model
from .space import MOST, Space


class _Way(NamedTuple):
    """One way to share the ranks."""

    pp: int
    tp: int
    sp: int
    dp: int
    ep: int

    def __str__(self) -> str:
        return " x ".join(f"{n} {v}" for n, v in self._asdict().items() if v > 1) or "one rank"


def _divisors(n: int) -> list[int]:
    small = [i for i in range(1, int(n**0.5) + 1) if n % i == 0]
    return sorted({*small, *(n // i for i in small)})


def _ways(ranks: int, space: Space) -> Iterator[_Way]:
    """All that give each rank a place and have the wanted sizes of the axes but ep."""
    for pp in _divisors(ranks):
        for tp in _divisors(ranks // pp):
            for sp in _divisors(ranks // (pp * tp)):
                way = _Way(pp, tp, sp, ranks // (pp * tp * sp), 1)
                if all(getattr(space, n) in (0, getattr(way, n)) for n in ("pp", "tp", "sp", "dp")):
                    yield way


def _sharing(ranks: int, space: Space) -> str:
    """The wanted sizes do not share these ranks."""
    wanted = {n: v for n, v in space.fixed().items() if n in ("pp", "dp", "sp", "tp")}
    product = 1
    for v in wanted.values():
        product *= v
    text = " x ".join(f"{n} {v}" for n, v in wanted.items())
    if product > ranks:
        return (
            f"{text} needs {product} ranks, and the cluster has {ranks}. Ask for less, or describe more nodes (count)"
        )
    if len(wanted) == 4:
        return f"{text} is {product} of the {ranks} ranks. Leave one of them free, so that all ranks have a place"
    made = f"{text} = {product}" if len(wanted) > 1 else text
    return f"{made} does not divide the {ranks} ranks. The sizes that do are {_listed(_divisors(ranks))}"


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers)) if len(numbers) <= 12 else f"{', '.join(map(str, numbers[:12]))}, ..."


def impossible(cluster: Cluster, model: Model, batch: int, space: Space) -> str:
    """The first want that no way to share the ranks meets, of those that meet the ones before, and the fix."""
    ranks = cluster.ranks
    ways = list(_ways(ranks, space))
    if not ways:
        return _sharing(ranks, space)
    m = model
    experts = max(1, m.experts)
    if space.ep > experts or experts % max(1, space.ep):
        if not m.experts:
            return f"ep {space.ep}: {m.name} has no experts. Leave ep out, or give a mixture (experts=8)"
        have = f"the {m.experts} experts of {m.name}. Sizes that do: {_listed(_divisors(experts))}"
        return f"ep {space.ep} does not divide {have}"
    eps = [space.ep] if space.ep else _divisors(experts)
    ways = [w._replace(ep=ep) for w in ways for ep in eps if w.dp * w.sp % ep == 0 and ep <= experts] or ways
    rules: tuple[tuple[str, Callable[[_Way], bool]], ...] = (
        (
            f"pipeline stages (pp) are more than the {m.layers} blocks of {m.name}. Ask for at most {m.layers}, or let"
            " other axes have ranks",
            lambda w: w.pp == 1 or w.pp <= m.layers,
        ),
        (
            f"tensor-parallel ranks (tp) do not divide the {m.heads} heads ({m.kv_heads} of keys and values) of"
            f" {m.name}. Sizes that do: {_listed([t for t in _divisors(m.heads) if m.kv_heads % t == 0])}",
            lambda w: m.heads % w.tp == 0 and m.kv_heads % w.tp == 0,
        ),
        (
            f"tensor x sequence ranks (tp x sp) do not divide the {m.heads} heads of {m.name}. Products that do:"
            f" {_listed(_divisors(m.heads))}",
            lambda w: m.heads % (w.tp * w.sp) == 0,
        ),
        (
            f"sequence-parallel ranks (sp) do not divide the {m.seq} tokens of a sample. Change --seq, or sp",
            lambda w: m.seq % w.sp == 0,
        ),
        (
            f"ep {space.ep} does not divide the ranks that may share experts (dp x sp)",
            lambda w: w.dp * w.sp % max(1, space.ep) == 0,
        ),
        (
            f"data-parallel ranks (dp) do not divide the {batch} samples of a step. Choose a --batch that is a multiple"
            f" of {_listed(sorted({w.dp for w in ways}))}",
            lambda w: batch % w.dp == 0,
        ),
        (
            f"micro-batch {space.micro} does not divide the samples that a rank has of a step's {batch} (batch / dp)."
            " Choose a --batch that is a multiple of dp x micro",
            lambda w: batch // w.dp % max(1, space.micro) == 0,
        ),
        (
            f"a rank has more samples of a step's {batch} than micro-batches of at most {MOST}, and at most {MOST} of"
            " them, have. Choose a smaller --batch",
            lambda w: any(a <= MOST for a in _counts(batch, w, space)),
        ),
        (
            f"no schedule is left: {'; '.join(f'{s} {_NEEDS[s]}' for s in space.schedules)}. Choose 1f1b, fewer stages"
            " (pp), a larger --batch or a smaller --micro",
            lambda w: any(_runs(s, w, a, m.layers, space) for s in space.schedules for a in _counts(batch, w, space)),
        ),
    )
    for said, met in rules:
        left = [w for w in ways if met(w)]
        if not left:
            return f"{_several(ways)}: {said}"
        ways = left
    return _offload(cluster, space)


# What _runs asks for.
_NEEDS = {
    "gpipe": "needs a block for each stage",
    "1f1b": "needs a block for each stage",
    "interleaved": "needs two blocks or more for each rank of the pipeline, and micro-batches that these ranks divide",
    "zb-h1": "needs as many micro-batches as stages, and computes no block again",
    "zb-v": "needs two blocks for each rank of the pipeline, twice as many micro-batches, and computes no block again",
}


@lru_cache(maxsize=4)
def _sizes(batch: int) -> tuple[int, ...]:
    """The divisors of a step's samples up to the largest micro-batch; those of a rank's samples are among them."""
    return tuple(m for m in range(1, min(batch, MOST) + 1) if batch % m == 0)


def _micros(batch: int, way: _Way, space: Space) -> list[int]:
    """The micro-batches that a rank may have."""
    return [m for m in _sizes(batch) if batch // way.dp % m == 0 and space.micro in (0, m)]


def _counts(batch: int, way: _Way, space: Space) -> list[int]:
    return [batch // way.dp // m for m in _micros(batch, way, space)]


def _runs(schedule: str, way: _Way, accumulation: int, blocks: int, space: Space) -> bool:
    """As dc__shape_check has it; pipelines of one rank have no schedule."""
    if way.pp == 1:
        return True
    if schedule in ("zb-h1", "zb-v") and False not in space.recomputes:
        return False
    chunks = 2 if schedule in ("interleaved", "zb-v") else 1
    least = {"zb-h1": way.pp, "zb-v": 2 * way.pp}.get(schedule, 1)
    return (
        way.pp * chunks <= blocks
        and accumulation >= least
        and (schedule != "interleaved" or accumulation % way.pp == 0)
    )


def _several(ways: list[_Way]) -> str:
    """Whom it is about."""
    return f"with {ways[0]}" if len(ways) == 1 else f"of all {len(ways)} ways to share the ranks"


def _offload(cluster: Cluster, space: Space) -> str:
    wanted = f"offload {' or '.join(space.offloads)} with ZeRO stage {' or '.join(map(str, sorted(space.stages)))}"
    bare = [n.name for n in cluster.nodes if n.disk_rate <= 0]
    if set(space.offloads) == {"cpu"} and not cluster.on_devices:
        return f"{wanted}: ranks of CPUs have their states in the host's memory anyway. Choose none or nvme"
    if bare and all(o.startswith("nvme") for o in space.offloads):
        return f"{wanted}: nodes {bare[0]!r} have no disk. Describe it (memory.disk, bandwidth.disk), or choose none"
    return f"{wanted}: states are offloaded from stage 1 on, parameters at stage 3. Choose a higher stage, or none"


class Tier(NamedTuple):
    """A kind of memory: what is needed of it and what there is, in bytes."""

    name: str
    need: float
    room: float

    def __str__(self) -> str:
        def gib(n: float) -> str:
            return f"{n / 2**30:.4g}"

        lack = f"there are {gib(self.room)}: {gib(self.need - self.room)} GiB are missing"
        return f"{gib(self.need)} GiB of {self.name} ({lack})"


def missing(tiers: list[Tier]) -> str:
    """What does not fit, tier by tier."""
    return " and ".join(str(t) for t in tiers if t.need > t.room)
