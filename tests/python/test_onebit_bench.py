"""deepc bench onebit: the model of volume, bandwidth and computing, what is made of measured seconds, and both ways to
measure."""

from __future__ import annotations

import dataclasses
import json

import pytest
from deepc.cli import main
from deepc.observe.diagnose import onebit
from deepc.plan.predict.onebit import BACKWARD, PAYLOAD, Forecast, Kernels, Network, break_even, forecast
from ranks import on_nodes, run_ranks

KERNELS = Kernels(1e-9, 2e-9, 0.5e-9)
COSTS = {"pack": 1e-9, "serve": 2e-9, "unpack": 0.5e-9, "rotate": 0.4e-9, "flops": 5e10}


def test_the_model_by_hand():
    network = Network(nodes=4, ranks=2, bandwidth=12.5e6, latency=1e-3)
    f = forecast(25e6, 2.0, network, KERNELS)
    assert f.fp32 == pytest.approx(2 * 3 / 4 * 4 * 25e6 / 12.5e6 + 2e-3)
    chunks = 6  # 25 M elements in rounds of 4 Mi
    wire = 2 * 3 / 4 * PAYLOAD * 25e6 / 12.5e6 + 2 * chunks * 1e-3
    own = 25e6 / 2 * 1e-9 + 25e6 / 8 * 2e-9 + 25e6 * 0.5e-9
    assert f.onebit == pytest.approx(wire + own / chunks)  # the wire is slower
    assert f.speedup == pytest.approx((2 + f.fp32) / (2 + f.onebit)) and f.hidden == pytest.approx(2 * BACKWARD)
    assert f.least == pytest.approx((2 + f.fp32 - 2 * BACKWARD) / (2 + f.onebit))
    whole = 0.15 * (2 + f.fp32) + 0.85 * (2 + f.onebit)
    assert f.of_a_run(0.15) == pytest.approx((2 + f.fp32) / whole) and f.of_a_run(1.0) == pytest.approx(1.0)
    turning = forecast(25e6, 2.0, network, dataclasses.replace(KERNELS, rotate=0.4e-9))
    assert turning.onebit == pytest.approx(f.onebit + 2 * 25e6 * 0.4e-9) and turning.fp32 == f.fp32
    fast = forecast(25e6, 2.0, Network(4, 2, 1e12), KERNELS)
    assert fast.onebit == pytest.approx(own, rel=1e-3) and fast.least < 1 < f.least  # packing costs, and nothing is won
    assert forecast(25e6, 2.0, Network(1, 8, 12.5e6), KERNELS).fp32 == 0.0


def test_break_even_is_where_the_gain_is():
    network = Network(4, 2, 1.0, 50e-6)
    rate = break_even(25e6, 1.0, network, KERNELS, 1.1)
    for factor, pays in ((0.99, True), (1.01, False)):
        f = forecast(25e6, 1.0, Network(4, 2, rate * factor, 50e-6), KERNELS)
        assert (f.least >= 1.1) == pays
    assert break_even(25e6, 1.0, Network(1, 8, 1.0), KERNELS) == 0.0
    assert Forecast(0.0, 1.0, 0.5).speedup == 2.0


def test_rates_are_read_and_shown():
    assert [onebit.parse_rate(t) for t in ("100mbit", "1Gbit/s", "2.5 gbps")] == [12.5e6, 125e6, 312.5e6]
    assert [onebit.show_rate(r) for r in (12.5e6, 125e6, 1.0)] == ["100 Mbit/s", "1 Gbit/s", "8 bit/s"]
    for wrong in ("fast", "0gbit", "1.2.3gbit"):
        assert main(["bench", "onebit", "--rate", wrong]) == 2


def test_what_is_shown_of_a_measurement():
    exchange = {"elements": 1 << 20, "fp32": 0.7, "onebit": 0.02, "sent_fp32": 4 << 20, "sent_onebit": 133120}
    found = {"nodes": 2, "ranks_per_node": 2, "costs": COSTS, "exchange": exchange}
    done = onebit.conclude({**found, "network": {"bandwidth": 12.5e6, "latency": 1e-4}}, 25e6, None, 1000, 0.15)
    assert done["job"]["compute"] == pytest.approx(6 * 25e6 * 1000 / 5e10) and len(done["rows"]) == 1
    assert done["exchange"]["model_fp32"] == pytest.approx(4 * (1 << 20) / 12.5e6 + 2e-4)
    text = onebit.show(done)
    for part in ("100 Mbit/s of a node", "1 / 31.5", "25 M parameters", "pays"):
        assert part in text
    paper = onebit.conclude({**found, "network": None, "exchange": None}, 25e6, 0.5, 1000, 0.15)
    assert [r["bandwidth"] for r in paper["rows"]] == [onebit.parse_rate(t) for t in onebit.RATES]
    assert paper["rows"][0]["speedup"] > paper["rows"][-1]["speedup"] and "on paper" in onebit.show(paper)
    turned = onebit.conclude({**found, "network": {"bandwidth": 12.5e6, "latency": 0.0}}, 25e6, 0.5, 1000, 0.15, True)
    plain = onebit.conclude({**found, "network": {"bandwidth": 12.5e6, "latency": 0.0}}, 25e6, 0.5, 1000, 0.15)
    assert turned["rows"][0]["onebit"] == pytest.approx(plain["rows"][0]["onebit"] + 2 * 25e6 * 0.4e-9)
    assert turned["exchange"] == plain["exchange"]  # what was measured is not rotated
    assert "twice a step" in onebit.show(turned) and "not counted" in onebit.show(plain)


@pytest.mark.full
def test_on_paper(capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    words = "bench onebit --nodes 3 --rate 1gbit --ranks 1 --seconds 0.5 --parameters 1e6 --step 0.1 --json"
    assert main(words.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["nodes"] == 3 and found["rows"][0]["bandwidth"] == 125e6 and found["job"]["compute"] == 0.1
    assert (
        all(0 < found["costs"][k] < 1e-6 for k in ("pack", "serve", "unpack", "rotate"))
        and found["costs"]["flops"] > 1e8
    )
    for wrong in ("--nodes 1", "--parameters 0", "--warm-up 2", "--seconds -1", "--ranks 0"):
        assert main(["bench", "onebit", *wrong.split()]) == 2
    assert main(["bench", "--rate", "1gbit"]) == 2


def _measured(rank, world):
    with on_nodes(rank, world, 2):
        return onebit.on_the_network(0.5)


def test_on_the_network(monkeypatch):
    for found in run_ranks(_measured, 2):
        exchange = found["exchange"]
        assert (found["nodes"], found["ranks_per_node"]) == (2, 1) and exchange["elements"] >= 1 << 18
        assert exchange["sent_fp32"] / exchange["sent_onebit"] == pytest.approx(31.5, rel=0.01)
        assert found["network"]["bandwidth"] > 0 and found["network"]["latency"] > 0
        assert onebit.conclude(found, 1e6, None, 100, 0.15)["rows"][0]["speedup"] > 0
