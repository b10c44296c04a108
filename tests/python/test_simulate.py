"""deepc simulate: virtual ranks against plain PyTorch in one process."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from deepc.cli import main
from deepc.errors import ArgumentError
from deepc.parallel.simulate import collectives
from deepc.parallel.simulate.model import Cell, Tiny
from deepc.parallel.simulate.run import Result, Simulation, run
from deepc.plan.mesh import Mesh
from deepc.plan.predict.search.models import Model

SMALL = Tiny(layers=4, hidden=32, heads=4, vocab=32, seq=6)
TOP1 = Tiny(layers=2, hidden=32, heads=4, vocab=32, seq=8, experts=4, top=1)
TOP2 = replace(TOP1, top=2, capacity=1.0)


def same(found: Result) -> None:
    """Losses within 1e-6 of one process', every gradient of the first step within 1e-5 of its tensor's largest."""
    assert len(found.losses) == len(found.alone) > 1
    assert found.difference <= 1e-6
    assert found.gradients.keys() == found.alone_gradients.keys()
    for layer, gradients in found.alone_gradients.items():
        for name, g in gradients.items():
            torch.testing.assert_close(
                found.gradients[layer][name], g, rtol=0, atol=1e-5 * float(g.abs().max()), msg=f"{layer}.{name}"
            )


FULL = pytest.mark.full


def case(sizes, stage, schedule="1f1b", tiny=SMALL, marks=FULL):
    return pytest.param(sizes, stage, schedule, tiny, marks=marks)


CASES = [
    case(dict(dp=2, tp=2, pp=2), 3, "zb-v", marks=()),
    case(dict(dp=2, sp=2, tp=2, pp=2, ep=2), 3, "zb-h1", TOP2, marks=()),
    case(dict(dp=3), 1),
    case(dict(tp=4), 0),
    case(dict(pp=4), 0, "gpipe"),
    case(dict(pp=2), 2, "interleaved"),
    case(dict(pp=4, tp=2), 0, "zb-h1"),
    case(dict(dp=2, tp=4), 3),
    case(dict(dp=4, pp=2), 2),
    case(dict(dp=2, tp=2, pp=4), 0),
    case(dict(sp=2), 0),
    case(dict(dp=2, sp=2, tp=2), 3),
    case(dict(), 0, tiny=TOP1),
    case(dict(), 0, tiny=TOP2),
    case(dict(dp=2, ep=2), 1, tiny=TOP2),
    case(dict(dp=2, tp=2, ep=2), 2, tiny=TOP1),
    case(dict(dp=2, sp=2, pp=2, ep=4), 3, "gpipe", TOP2),
    case(dict(dp=2, sp=4, ep=2), 0, tiny=TOP1),
    case(dict(dp=3, sp=2, ep=3), 3, tiny=replace(TOP2, experts=3)),
]


@pytest.mark.parametrize("sizes, stage, schedule, tiny", CASES, ids=str)
def test_virtual_ranks_train_as_one_process(sizes, stage, schedule, tiny):
    same(run(Mesh(**sizes), stage=stage, schedule=schedule, micro_batches=4, samples=2, steps=3, tiny=tiny))


@FULL
@pytest.mark.parametrize(
    "mesh, tiny",
    [
        (Mesh(dp=16, tp=8, pp=8), Tiny()),
        (Mesh(dp=16, sp=2, tp=4, pp=8, ep=8), Tiny(experts=8, top=2)),
    ],
    ids=str,
)
def test_a_thousand_ranks(mesh, tiny):
    found = run(mesh, stage=3, micro_batches=4, steps=2, tiny=tiny)
    assert found.mesh.size == 1024
    same(found)
    assert set(found.sent) == {"dp", "tp", "pp"} | ({"sp", "ep"} if tiny.experts else set())


# ---- who exchanges with whom, and how much ---------------------------------------------------------------------------
@pytest.mark.parametrize("sizes", [dict(dp=2, sp=2, tp=2, pp=2, ep=4), dict(dp=3, sp=2, tp=3, ep=3), dict(sp=4, ep=2)])
def test_groups_are_the_meshs(sizes):
    mesh = Mesh(**sizes)
    cell = Cell.of(mesh)
    begins = range(0, mesh.size, cell.size)  # cells are neighbours
    for axis, groups in (("tp", cell.tensor_groups), ("sp", cell.sequence_groups), ("ep", cell.expert_groups)):
        assert sorted(tuple(b + i for i in g) for b in begins for g in groups()) == sorted(mesh.groups(axis)), axis
    simulation = Simulation(mesh, tiny=Tiny(layers=2, hidden=24, heads=12, vocab=12, experts=12))
    of = {id(r): n for n, r in simulation.ranks.items()}
    for n, r in simulation.ranks.items():
        at = mesh.coordinates(n)
        holding = [of[id(other)] for other in simulation._holding[at.pp, at.tp, at.ep]]
        assert tuple(holding) == mesh.holders(n)
        assert r.layout.world == len(holding)
        assert r.slices == [(0, 0, r.used)]  # stage 0


def sent(axis: str, mesh: Mesh, tiny: Tiny, **options) -> int:
    """By the ranks in one step."""
    return run(mesh, steps=1, tiny=tiny, **options).sent[axis]


def planned(axis: str, mesh: Mesh, tiny: Tiny, micro_batches: int, samples: int) -> int:
    """By the planner's rows of a block and its formulas (zero/planner_cost.c, cost_layers_time)."""
    block = Model(
        "tiny", tiny.layers, tiny.hidden, tiny.heads, tiny.vocab, tiny.seq, experts=tiny.experts, top=tiny.top
    )
    row, n = block.rows()[1], getattr(mesh, axis)
    elems = {"sp": row["sp_elems"] / (mesh.tp * mesh.sp), "ep": row["ep_elems"] / mesh.sp,
             "tp": 2 * row["tp_elems"] / mesh.sp}[axis] if axis != "pp" else row["output"] / mesh.sp  # fmt: skip
    blocks = mesh.pp - 1 if axis == "pp" else tiny.layers  # hops
    share = 1 if axis == "pp" else (n - 1) / n
    ranks = mesh.size // mesh.pp  # of a stage
    return round(2 * blocks * elems * share * samples * micro_batches * 4 * ranks)


def test_bytes_are_the_planners():
    given = dict(micro_batches=2, samples=2)
    dense = Tiny(layers=2, hidden=32, heads=8, vocab=32, seq=8)
    # every token goes to both experts, and all have a place
    mixture = replace(dense, experts=2, top=2, capacity=2.0)
    mesh = Mesh(dp=2, sp=2, tp=2)
    assert sent("sp", mesh, dense, **given) == planned("sp", mesh, dense, **given)
    longer = replace(dense, layers=3)  # the embedding and the head have some too
    more = sent("tp", mesh, longer, **given) - sent("tp", mesh, dense, **given)
    assert more == planned("tp", mesh, longer, **given) - planned("tp", mesh, dense, **given)
    mesh = Mesh(pp=2, sp=2, tp=2)
    assert sent("pp", mesh, dense, **given) == planned("pp", mesh, dense, **given)
    for mesh in (Mesh(dp=2, tp=2, ep=2), Mesh(sp=2, dp=2, ep=2)):
        assert sent("ep", mesh, mixture, **given) == planned("ep", mesh, mixture, **given)
    # tokens that are left out do not travel
    few = replace(mixture, capacity=0.5)
    assert 0 < sent("ep", mesh, few, **given) < planned("ep", mesh, mixture, **given)


@pytest.mark.parametrize("pp", [1, 2])
def test_gradients_and_shards_go_over_data_and_sequence_ranks(pp):
    """Reduced once a step in a pipeline, else with every micro-batch; gathered for each micro-batch with stage 3."""
    mesh, micro = Mesh(dp=2, sp=2, pp=pp), 3
    tiny = Tiny(layers=2, hidden=16, heads=2, vocab=16, seq=4)
    whole = 4 * sum(w.numel() for layer in tiny.made().values() for w in layer.values())
    times = 1 if pp > 1 else micro
    wanted = {0: 2 * times, 1: times + 1, 2: times + 1, 3: times + 2 * micro}
    for stage, passes in wanted.items():
        assert sent("dp", mesh, tiny, stage=stage, micro_batches=micro) == passes * 3 * whole, stage


def test_what_spread_experts_reduce():
    """Experts over the ranks that hold them; the rest over those that share experts, then over copies of these."""
    mesh, tiny = Mesh(dp=4, pp=2, ep=2), replace(TOP1, experts=2)
    made = [w for layer in tiny.made().items() for w in ((tiny.shapes(layer[0])[n], t) for n, t in layer[1].items())]
    expert, rest = (4 * sum(t.numel() for w, t in made if w.expert == is_it) for is_it in (True, False))
    wanted = expert + 2 * rest + 2 * 2 * rest  # 2 copies of all experts; 2 pairs that share
    assert sent("dp", mesh, tiny, stage=2, micro_batches=2) == wanted + expert + 2 * rest  # parameters come back


def test_schedules_send_the_same():
    """Gradients of weights that wait are computed without the messages that brought those of inputs."""
    mesh = Mesh(dp=2, sp=2, tp=2, pp=2, ep=2)
    first, *others = (run(mesh, schedule=s, micro_batches=4, steps=1, tiny=TOP2).sent for s in ("1f1b", "zb-h1"))
    assert others == [first]


def test_experts_leave_out_tokens_beyond_their_places():
    few, many = (run(Mesh(dp=2, ep=2), micro_batches=1, steps=2, tiny=replace(TOP1, capacity=c)) for c in (0.5, 4.0))
    same(few)
    same(many)
    assert abs(few.losses[0] - many.losses[0]) > 1e-4
    assert few.sent["ep"] < many.sent["ep"]


def test_one_cell_at_a_time_has_gradients(monkeypatch):
    found, before = [], Simulation._pipeline

    def watched(self, first, *args):
        found.append([n for n, r in self.ranks.items() if r.grad is not None])
        return before(self, first, *args)

    monkeypatch.setattr(Simulation, "_pipeline", watched)
    mesh = Mesh(dp=4, pp=2, ep=2)
    run(mesh, stage=3, micro_batches=2, steps=1, tiny=TOP1)
    assert found == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_stages_hold_less():
    held = [run(Mesh(dp=2), stage=s, micro_batches=1, steps=1, tiny=SMALL).rank_bytes for s in range(4)]
    whole = held[0]
    assert held == [whole, whole * 3 // 4, whole * 5 // 8, whole // 2]


def test_collectives_are_in_rank_order():
    parts = [torch.tensor([1e8, 1.0]), torch.tensor([1.0, 2.0]), torch.tensor([-1e8, 3.0])]
    assert torch.equal(collectives.reduced(parts), (parts[0] + parts[1]) + parts[2])
    assert torch.equal(collectives.largest(parts), torch.tensor([1e8, 3.0]))


def test_all_to_all():
    rows = [torch.arange(6.0).view(3, 2).requires_grad_(), torch.arange(6.0, 12.0).view(3, 2).requires_grad_()]
    traffic = collectives.Traffic()
    first, second = collectives.exchanged(traffic, "ep", rows, [[1, 2], [0, 3]])
    assert torch.equal(first, rows[0][:1]) and torch.equal(second, torch.cat([rows[0][1:], rows[1]]))
    assert traffic.bytes == {"ep": 2 * 2 * 4}
    torch.autograd.backward([first, second], [10 * first.detach(), 100 * second.detach()])
    assert torch.equal(rows[0].grad, rows[0].detach() * torch.tensor([[10.0], [100.0], [100.0]]))
    assert torch.equal(rows[1].grad, 100 * rows[1].detach())
    assert traffic.bytes == {"ep": 2 * 2 * 2 * 4}


def test_what_it_can_not_do():
    with pytest.raises(ArgumentError, match="can't be cut into tp x sp = 4 x 4"):
        run(Mesh(sp=4, tp=4))
    with pytest.raises(ArgumentError, match="samples of 6 tokens can't be cut into sp = 4; use --seq"):
        run(Mesh(sp=4), tiny=SMALL)
    with pytest.raises(ArgumentError, match="0 experts can't be spread over ep = 2 ranks; use --experts"):
        run(Mesh(dp=2, ep=2))
    with pytest.raises(ArgumentError, match="4 experts can't be spread over ep = 3"):
        run(Mesh(dp=3, ep=3), tiny=TOP1)
    with pytest.raises(ArgumentError, match="2 experts, 3 of them for a token"):
        run(Mesh(), tiny=Tiny(experts=2, top=3))
    with pytest.raises(ArgumentError, match="--capacity 0.0"):
        run(Mesh(), tiny=Tiny(experts=2, capacity=0.0))
    with pytest.raises(ArgumentError, match="can't be cut into tp = 3"):
        run(Mesh(tp=3))
    with pytest.raises(ArgumentError, match="use --layers"):
        run(Mesh(pp=16))
    with pytest.raises(ArgumentError, match="at least 1"):
        run(Mesh(), steps=0)
    with pytest.raises(ArgumentError, match="stage 4"):
        run(Mesh(), stage=4)
    with pytest.raises(ArgumentError, match="over 1 word is always 0; use --vocab 2"):
        run(Mesh(), tiny=Tiny(vocab=1))
    nan = Result(Mesh(), 0, (1.0, float("nan")), (1.0, 1.0), {}, {}, 0, {}, 0.0)
    assert nan.difference != nan.difference, "it hid behind the step before"


def test_the_command(capsys):
    sizes = ["--layers", "2", "--hidden", "16", "--heads", "2", "--vocab", "16", "--seq", "4", "--micro-batches", "2"]
    assert main(["simulate", "--dp", "2", "--tp", "2", *sizes, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ranks"] == 4 and told["difference"] <= 1e-6
    assert main(["simulate", "--pp", "2", *sizes]) == 0
    assert "2 ranks in one process" in capsys.readouterr().out
    ranks = ["--dp", "2", "--sp", "2", "--ep", "4", "--experts", "4", "--top", "2", "--capacity", "1", "--stage", "3"]
    assert main(["simulate", *ranks, *sizes, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ranks"] == 4 and told["difference"] <= 1e-6 and {"sp", "ep"} <= told["sent"].keys()
    assert main(["simulate", "--tp", "3"]) == 2
    assert main(["simulate", "--dp", "2", "--ep", "2"]) == 2
