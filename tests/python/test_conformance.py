"""The backend "deepc" against Gloo in the same processes, on random programs of calls (conformance.py: what is called,
and the rule of comparison). Counters of the C core and Gloo's sequence number prove that the core did it.

A failure names its case as WORLD:SEED. Repeat it alone with

    DEEPC_CASE=3:1234 pytest tests/python/test_conformance.py -k repeat

DEEPC_CONFORMANCE_SEED moves all seeds, DEEPC_CONFORMANCE_CASES sets the number of cases per world of the full test."""

from __future__ import annotations

import collections
import contextlib
import os
import random
import time
import warnings
from typing import Any

import conformance
import pytest
import torch
import torch.distributed as dist
from conformance import Barrier, Call, Case, Messages, Objects, Placed
from ranks import run_ranks

QUICK = {2: 120, 3: 60, 4: 60}
FULL = 3500  # per world of 2, 3 and 4 ranks
KEEP = 20  # failures that are told
TIMEOUT_S = 30.0


class Groups:
    """For each set of ranks a deepc group and a Gloo group, made when first used. The set of all ranks is the default
    group."""

    def __init__(self, world: int) -> None:
        self.world, self.made = world, {}

    def of(self, members: tuple[int, ...], order: random.Random) -> tuple[Any, Any]:
        if members not in self.made:
            self.made[members] = self.make(members, order, whole=dist.group.WORLD)
        return self.made[members]

    def make(self, members: tuple[int, ...], order: random.Random, whole: Any = None) -> tuple[Any, Any]:
        """order: of the list of ranks that new_group gets (torch sorts it)."""
        ranks = order.sample(members, len(members))
        deepc = whole if whole is not None and len(members) == self.world else dist.new_group(ranks)
        return deepc, dist.new_group(ranks, backend="gloo")


def gloo_calls(group) -> int:
    """Calls that the Gloo beneath a deepc group has carried."""
    return group._get_backend(torch.device("cpu"))._get_sequence_number_for_group()


def finish(work: Any, how: str) -> None:
    for w in work if isinstance(work, list) else [work]:
        if how == "poll" and hasattr(w, "is_completed"):
            end = time.monotonic() + TIMEOUT_S
            while not w.is_completed():
                assert time.monotonic() < end, "is_completed() stays False though every rank has made its calls"
                time.sleep(0.0002)
        elif how == "future" and hasattr(w, "get_future"):
            with contextlib.suppress(RuntimeError):  # Gloo's messages have none: then deepc's need none
                w.get_future().wait()
        w.wait()


def run_on(case: Case, groups: list[Any], rank: int, *, dense: bool) -> list[list[Placed] | None]:
    """Makes the calls (dense: those for Gloo, blocking). Returns the buffers after all of them."""
    local, placed_of, waiting = case.local(rank), [], []
    for call, group in zip(case.calls, groups):
        if rank not in call.members or (dense and (not call.gloo() or isinstance(call, (Barrier, Objects)))):
            placed_of.append(None)
            continue
        r = call.members.index(rank)
        placed = [Placed(slot, dense) for slot in call.slots(r)]
        placed_of.append(placed)
        if dense:
            call.launch_gloo(group, r, [p.views for p in placed])
            continue
        for p in placed if call.grad else ():
            for view in p.views:
                view.requires_grad_(True)
        later = not isinstance(call, Objects) and local.random() < 0.5
        work = call.launch(group, r, [p.views for p in placed], later)
        if later:
            waiting.append((work, local.choice(("wait", "wait", "future", "poll"))))
    local.shuffle(waiting)
    for work, how in waiting:
        finish(work, how)
    return placed_of


def counted(case: Case, rank: int, before: dict[str, int], after: dict[str, int]) -> str:
    """ "" or which call the C core did not do. Calls without a byte, and of groups of one, need not reach it."""
    need: collections.Counter[tuple[str, ...]] = collections.Counter()
    for call in case.calls:
        if rank in call.members and call.n > 1 and busy(call, call.members.index(rank)):
            need[call.counters] += 1
    for names, count in need.items():
        got = sum(after[n] - before[n] for n in names if n in after)
        if got < count:
            return f"the C core did {got} of {count} calls that count as {' or '.join(names)}"
    return ""


def busy(call: Call, r: int) -> bool:
    if isinstance(call, Objects):
        return not call.idle(r)
    if isinstance(call, Barrier):
        return True
    return any(t.numel() for slot in call.slots(r) for t in slot.tensors)


def refusal(case: Case, pair: tuple[Any, Any], rank: int) -> str:
    """A call that deepc may refuse: "" or what is wrong. Either all ranks are told, and the group works on, or the
    answer is right."""
    call = case.calls[0]
    said, placed = "", None
    try:
        placed = run_on(case, [pair[0]], rank, dense=False)[0]
    except Exception as exc:
        said = f"{type(exc).__name__}: {exc}"
    if rank not in call.members:
        return ""
    everyone: list[Any] = [None] * call.n
    dist.all_gather_object(everyone, said, group=pair[1])
    # in messages a rank may have no part
    took_part = [e for q, e in enumerate(everyone) if not isinstance(call, Messages) or call.mine(q)]
    if any(took_part) != all(took_part):
        return f"refused on some ranks only: {everyone}"
    if call.hopeless() and not said:
        return "has no meaning, and was not refused"
    if said:
        dist.distributed_c10d._world.pg_coalesce_state.pop(
            pair[0], None
        )  # torch leaves it behind when a call in the manager raises
        x = torch.ones(3)
        dist.all_reduce(x, group=pair[0])
        return "" if x.tolist() == [call.n] * 3 else f"after the refusal ({said}) all_reduce gave {x.tolist()}"
    return call.check(call.members.index(rank), placed, None)


def one_case(case: Case, groups: Groups, rank: int) -> list[str]:
    """What is wrong on this rank."""
    import deepc

    order = random.Random(case.seed)
    make = groups.make if case.fresh else groups.of
    pairs = {}
    for call in case.calls:
        if call.members not in pairs:
            pairs[call.members] = make(call.members, order)
    wrong = []
    if any(c.refusable() or c.hopeless() for c in case.calls):
        wrong.append(refusal(case, pairs[case.calls[0].members], rank))
    else:
        mine = [p[0] for m, p in pairs.items() if rank in m]
        gloo_before, before = [gloo_calls(g) for g in mine], deepc.counters()
        got = run_on(case, [pairs[c.members][0] for c in case.calls], rank, dense=False)
        after, gloo_after = deepc.counters(), [gloo_calls(g) for g in mine]
        wrong.append(counted(case, rank, before, after))
        if gloo_before != gloo_after:
            wrong.append(f"{sum(gloo_after) - sum(gloo_before)} calls went to Gloo")
        gloo = run_on(case, [pairs[c.members][1] for c in case.calls], rank, dense=True)
        for call, placed, theirs in zip(case.calls, got, gloo):
            if placed is not None and (bad := call.check(call.members.index(rank), placed, theirs)):
                wrong.append(f"call {call.index}: {bad}")
    if case.fresh:
        mine = [pair for members, pair in pairs.items() if rank in members]
        for deepc_group, _ in mine:
            dist.destroy_process_group(deepc_group)  # at once: peers may still be in its last call
        dist.barrier()  # Gloo's must wait: a peer may still be connecting
        for _, gloo_group in mine:
            dist.destroy_process_group(gloo_group)
    return [w for w in wrong if w]


def program(rank: int, world: int, seeds: list[int]) -> tuple[int, dict[str, int], list[str]]:
    """Runs the cases. Returns (calls made, of which kinds, what failed)."""
    warnings.simplefilter("ignore")  # torch announces new names
    groups, failures, kinds = Groups(world), [], collections.Counter()
    for seed in seeds:
        case = Case(world, seed)
        try:
            wrong = one_case(case, groups, rank)
        except Exception as exc:
            raise AssertionError(f"{case}\n    rank {rank}: {type(exc).__name__}: {exc}") from exc
        kinds.update(type(c).__name__ for c in case.calls)
        failures += [f"{case}\n    rank {rank}: {w}" for w in wrong]
        if len(failures) >= KEEP:
            break
    dist.barrier()
    return sum(kinds.values()), dict(kinds), failures


def verify(world: int, seeds: list[int], limit_s: float, env: dict[str, str] | None = None) -> dict[str, int]:
    out = run_ranks(program, world, args=(seeds,), timeout_s=TIMEOUT_S, limit_s=limit_s, env=env)
    failures = [f for _, _, fs in out for f in fs]
    assert not failures, f"{len(failures)} failures\n" + "\n".join(failures[:KEEP])
    return out[0][1]


def seeds(count: int) -> list[int]:
    first = int(os.environ.get("DEEPC_CONFORMANCE_SEED", "0"))
    return list(range(first, first + count))


@pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=pytest.mark.full)])
def test_random_programs_as_on_gloo(world):
    verify(world, seeds(QUICK[world]), 120)


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 3, 4])
def test_many_random_programs_as_on_gloo(world):
    count = int(os.environ.get("DEEPC_CONFORMANCE_CASES", FULL))
    kinds = verify(world, seeds(1_000_000 + count)[1_000_000:], 1800)
    assert set(kinds) == {k.__name__ for k in conformance.KINDS}, f"kinds of calls made: {kinds}"


# Every way in which calls can be carried out gives the same answers.
MOVES = ("reduce_scatter", "all_gather", "gather", "scatter", "broadcast", "all_to_all", "all_to_allv")
WAYS = [
    "DEEPC_PROGRESS=inline",
    "DEEPC_PROGRESS=thread",
    "DEEPC_CMA=0",
    "DEEPC_SPIN_US=0",
    "DEEPC_MEMBARRIER=0",
    "DEEPC_HUGEPAGES=0",
    "DEEPC_ISA=scalar",
    *(
        f"DEEPC_ALGO={','.join(f'{op}={row}' for op in ops)}"
        for row, ops in (
            ("staged", ("all_reduce", "reduce", *MOVES)),
            ("direct", ("all_reduce", "reduce", *MOVES)),
            ("two_phase", ("all_reduce", "reduce")),
        )
    ),
]


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS, ids=[w.split("_", 1)[1].split(",")[0] for w in WAYS])
def test_every_way_gives_the_same(way):
    name, value = way.split("=", 1)
    verify(3, [2_000_000 + s for s in seeds(300)], 600, {name: value})


def registered(rank, world, rounds):
    """Tensors in memory that all ranks map, mixed with private ones: the same bits as from private ones alone."""
    import deepc

    warnings.simplefilter("ignore")
    room = 12 << 20  # per rank; the ranks map one segment
    arena = dist.group.WORLD._comm.segment(world * room)
    before = deepc.counters()["coll_bytes_mapped"]
    for i in range(rounds):
        rng = random.Random(f"{world} {i}")  # the same on all ranks
        dtype, op = rng.choice((torch.float32, torch.bfloat16, torch.float64)), rng.choice(("SUM", "AVG", "MAX"))
        n = rng.choice((1, 7, 1000, 4099, 65_537, 100_001))
        inputs = [conformance.values(1000 * i + r, (world, n), dtype, "plain") for r in range(world)]
        gap = rng.randrange(500)
        local, at = random.Random(f"{world} {i} {rank}"), rank * room

        def place(t: torch.Tensor) -> torch.Tensor:
            nonlocal at
            if local.random() < 0.3:
                return t.clone()
            view = arena.tensor(t.dtype, at, t.numel()).view(t.shape)
            at += (t.numel() * t.itemsize + gap + 63) // 64 * 64
            return view.copy_(t)

        whole, want = place(inputs[rank]), conformance.reduce_reference(inputs, op, 1.0)
        out, gathered, swapped = (place(torch.zeros(shape, dtype=dtype)) for shape in ((n,), (world, n), (world, n)))
        dist.reduce_scatter_tensor(out, whole, getattr(dist.ReduceOp, op))
        dist.all_gather_into_tensor(gathered, out)
        dist.all_to_all_single(swapped, whole)
        for r in range(world):
            assert torch.equal(swapped[r], inputs[r][rank]), f"round {i}: all_to_all, block {r} of {n} {dtype}"
        dist.broadcast(swapped, i % world)
        assert torch.equal(swapped, torch.stack([inputs[q][i % world] for q in range(world)])), (
            f"round {i}: broadcast of {n} {dtype}"
        )
        dist.all_reduce(whole, getattr(dist.ReduceOp, op))
        bad = conformance.differs(
            gathered, whole, f"round {i}: all_gather of reduce_scatter against all_reduce, {op} of {n} {dtype}"
        )
        if not bad and op == "AVG":
            bad = conformance.outside(whole, want, conformance.ulp(want, dtype), f"round {i}: {op}")
        elif not bad:
            bad = conformance.differs(whole, want, f"round {i}: {op}")
        assert not bad, bad
        dist.barrier()
    return deepc.counters()["coll_bytes_mapped"] - before


@pytest.mark.parametrize("world, rounds", [(2, 15), *(pytest.param(w, 150, marks=pytest.mark.full) for w in (3, 4))])
def test_registered_buffers(world, rounds):
    assert all(run_ranks(registered, world, args=(rounds,), timeout_s=TIMEOUT_S)), "no byte went through mapped memory"


@pytest.mark.skipif("DEEPC_CASE" not in os.environ, reason="repeats one case: needs DEEPC_CASE=WORLD:SEED")
def test_repeat():
    world, seed = (int(x) for x in os.environ["DEEPC_CASE"].split(":"))
    verify(world, [seed], 120)
