"""What must hold of the planner on any cluster: a better machine is not predicted to be slower, and the order in which
equal nodes are listed does not matter."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from deepc.plan.predict.search.planner import Space, price, search
from test_planner import random_case

RANKS = ("flops", "memory_rate", "start")
BANDWIDTH = ("link_rate", "net_rate", "host_rate", "host_update", "disk_rate", "link_latency", "net_latency")
MEMORY = ("device_bytes", "host_bytes", "disk_bytes", "reserve")
LESS_IS_BETTER = ("start", "link_latency", "net_latency", "reserve")


def better(draw: random.Random, case, field: str):
    """The case on a cluster of which some kinds of nodes, or all, have more of `field`."""
    nodes = list(case.cluster.nodes)
    for i in range(len(nodes)) if draw.random() < 0.5 else [draw.randrange(len(nodes))]:
        factor = draw.choice([1.01, 1.1, 1.5, 2, 4])
        was = getattr(nodes[i], field)
        more = {k: v * factor for k, v in was.items()} if field == "flops" else was * factor
        nodes[i] = replace(nodes[i], **{field: was / factor if field in LESS_IS_BETTER else more})
    return replace(case, cluster=replace(case.cluster, nodes=tuple(nodes)))


@pytest.mark.parametrize(
    "space, fields, within",
    [
        # One stage, equal shares: everything, to rounding.
        (Space(pp=1, uneven=False), (*RANKS, *BANDWIDTH, *MEMORY), 1e-9),
        (Space(), MEMORY, 1e-9),
        # Shares in whole micro-batches let the last be done soonest, and the number of reductions follows from them.
        (Space(pp=1), RANKS, 0.02),
    ],
    ids=["one-stage", "memory", "shares"],
)
@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(400), marks=pytest.mark.full)], ids=["30", "400"])
def test_a_better_machine_is_not_slower(space, fields, within, seeds):
    looked = 0
    for seed in seeds:
        draw = random.Random(seed)
        case = random_case(draw)
        if not (before := search(case, space, 1).best):
            continue
        for field in fields:
            looked += 1
            after = search(better(draw, case, field), space, 1).best
            assert after, f"{seed}: what fitted does not with more of {field}"
            assert after[0].cost.step <= before[0].cost.step * (1 + within), (seed, field, str(after[0].layout))
    assert looked > len(seeds)


@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(400), marks=pytest.mark.full)], ids=["30", "400"])
def test_the_order_of_nodes_does_not_matter(seeds):
    """Equal nodes may be one row or several, under any names; unequal ones stand in any order where they are replicas
    (stages of a pipeline are on their own nodes, in their order)."""
    turned_about = 0
    for seed in seeds:
        draw = random.Random(seed)
        case = random_case(draw)
        rows = []
        for n in case.cluster.nodes:
            first = draw.randint(1, n.count)
            rows += [replace(n, count=c, name=f"{n.name}, {c}") for c in (first, n.count - first) if c]
        split = replace(case, cluster=replace(case.cluster, nodes=tuple(rows)))
        whole, parts = search(case), search(split)
        assert [p.layout for p in whole.best] == [p.layout for p in parts.best], seed
        for p, q in zip(whole.best, parts.best, strict=True):
            assert q.cost.step == pytest.approx(p.cost.step, rel=1e-9), (seed, str(p.layout))
            assert q.cost.overflow == pytest.approx(p.cost.overflow, rel=1e-9), (seed, str(p.layout))
        ranks = {n.ranks for n in rows}
        turned = replace(case, cluster=replace(case.cluster, nodes=tuple(draw.sample(rows, len(rows)))))
        for p in search(case, Space(pp=1)).best:
            # a replica on one node: what it has does not depend on its neighbours
            if any(r % (p.layout.tp * p.layout.sp) for r in ranks):
                continue
            turned_about += len(case.cluster.nodes) > 1
            q = price(turned, p.layout)
            assert q.cost.step == pytest.approx(p.cost.step, rel=1e-9), (seed, str(p.layout))
            assert q.cost.overflow == pytest.approx(p.cost.overflow, rel=1e-9), (seed, str(p.layout))
    assert turned_about > len(seeds) / 2
