"""deepc simulate: virtual ranks against plain PyTorch in one process."""

from __future__ import annotations

import json

import pytest
import torch
from deepc.cli import main
from deepc.errors import ArgumentError, UnsupportedError
from deepc.parallel.simulate import collectives
from deepc.parallel.simulate.model import Tiny
from deepc.parallel.simulate.run import Result, run
from deepc.plan.mesh import Mesh

SMALL = Tiny(layers=4, hidden=32, heads=4, vocab=32, seq=6)


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


full = pytest.mark.full
CASES = [
    (dict(dp=2, tp=2, pp=2), 3, "zb-v"),
    pytest.param(dict(dp=3), 1, "1f1b", marks=full),
    pytest.param(dict(tp=4), 0, "1f1b", marks=full),
    pytest.param(dict(pp=4), 0, "gpipe", marks=full),
    pytest.param(dict(pp=2), 2, "interleaved", marks=full),
    pytest.param(dict(pp=4, tp=2), 0, "zb-h1", marks=full),
    pytest.param(dict(dp=2, tp=4), 3, "1f1b", marks=full),
    pytest.param(dict(dp=4, pp=2), 2, "1f1b", marks=full),
    pytest.param(dict(dp=2, tp=2, pp=4), 0, "1f1b", marks=full),
]


@pytest.mark.parametrize("sizes, stage, schedule", CASES, ids=str)
def test_virtual_ranks_train_as_one_process(sizes, stage, schedule):
    same(run(Mesh(**sizes), stage=stage, schedule=schedule, micro_batches=4, samples=2, steps=3, tiny=SMALL))


@pytest.mark.full
def test_a_thousand_ranks():
    found = run(Mesh(dp=16, tp=8, pp=8), stage=3, micro_batches=4, steps=2)
    assert found.mesh.size == 1024
    same(found)
    assert set(found.sent) == {"dp", "tp", "pp"}


def test_stages_hold_less():
    held = [run(Mesh(dp=2), stage=s, micro_batches=1, steps=1, tiny=SMALL).rank_bytes for s in range(4)]
    whole = held[0]
    assert held == [whole, whole * 3 // 4, whole * 5 // 8, whole // 2]


def test_collectives_are_in_rank_order():
    parts = [torch.tensor([1e8, 1.0]), torch.tensor([1.0, 2.0]), torch.tensor([-1e8, 3.0])]
    assert torch.equal(collectives.reduced(parts), (parts[0] + parts[1]) + parts[2])
    assert torch.equal(collectives.largest(parts), torch.tensor([1e8, 3.0]))


def test_what_it_can_not_do():
    with pytest.raises(UnsupportedError, match="sequence and expert"):
        run(Mesh(sp=2))
    with pytest.raises(ArgumentError, match="can't be cut into tp = 3"):
        run(Mesh(tp=3))
    with pytest.raises(ArgumentError, match="use --layers"):
        run(Mesh(pp=16))
    with pytest.raises(ArgumentError, match="at least 1"):
        run(Mesh(), steps=0)
    with pytest.raises(ArgumentError, match="stage 4"):
        run(Mesh(), stage=4)


def test_the_command(capsys):
    sizes = ["--layers", "2", "--hidden", "16", "--heads", "2", "--vocab", "16", "--seq", "4", "--micro-batches", "2"]
    assert main(["simulate", "--dp", "2", "--tp", "2", *sizes, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ranks"] == 4 and told["difference"] <= 1e-6
    assert main(["simulate", "--pp", "2", *sizes]) == 0
    assert "2 ranks in one process" in capsys.readouterr().out
    assert main(["simulate", "--tp", "3"]) == 2
