"""deepc bench cluster: what is made of measured seconds, and one run of the whole thing."""

from __future__ import annotations

import json

import pytest
from deepc.cli import main
from deepc.observe.diagnose import calibrate
from deepc.plan.predict.search.cluster import Cluster
from deepc.plan.predict.search.planner import Layout, case_of, price

MACHINE = {"processor": "test", "available_bytes": 16 * 2**30}


def test_a_description_gives_back_what_was_measured():
    """The cost model, asked for the block and the update that were measured, says their seconds."""
    alone = {"product_fp32": 0.1, "product_bf16": 0.05, "operation": 9e-6, "block": 0.5, "micro": 0.2, "update": 0.04}
    joined = {**alone, "micro": 0.25, "message": 3e-5}
    given = calibrate.assemble({**alone, "reserve": 3e8}, joined, 2, MACHINE, {"rate": 1e9, "free": 10**10})
    cluster = Cluster.of(given)
    assert (cluster.ranks, cluster.on_devices, cluster.overlap) == (2, False, 0.0)
    nodes, params = cluster.nodes[0], calibrate._LAYERS * calibrate._WIDTH**2
    assert nodes.flops["fp32"] == pytest.approx(calibrate.product_flops() / 0.1, rel=1e-3)
    assert cluster.update_traffic * params / nodes.memory_rate == pytest.approx(0.04, rel=0.01)
    assert (0.5 * params * 4) / nodes.link_rate == pytest.approx(0.05, rel=0.01)
    one = Cluster.of({**given, "nodes": [{**given["nodes"][0], "ranks": 1}], "update_traffic": 0, "batch_traffic": 0})
    cost = price(case_of(one, calibrate._BLOCK, 2), Layout(micro=2)).cost
    assert cost.compute == pytest.approx(0.5, rel=0.05)  # and the smallest of embeddings and heads


@pytest.mark.full
def test_this_machine(tmp_path, capsys):
    file = str(tmp_path / "cluster.yaml")
    assert main(["bench", "cluster", "--seconds", "4", "--threads", "1", "--folder", str(tmp_path), "-o", file]) == 0
    assert json.loads((tmp_path / "cluster.yaml").read_text())["nodes"][0]["ranks"] == 2
    assert main(["plan", "--cluster", file, "--model", "gpt2", "--seq", "128", "--batch", "8"]) == 0
    assert "fastest of" in capsys.readouterr().out


def test_options_of_another_part_are_refused(capsys):
    assert main(["bench", "--threads", "2"]) == 2
    assert main(["bench", "cluster", "--ranks", "0"]) == 2
    assert "at least 1" in capsys.readouterr().err
