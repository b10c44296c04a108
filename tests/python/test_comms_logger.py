"""The comms logger: what is counted, DeepSpeed's figures, and both ways in which calls reach it (the C core's log, and
timing Gloo)."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from deepc.comm import calls
from deepc.config import Config
from deepc.errors import ArgumentError, ConfigError
from ranks import run_ranks


@pytest.mark.parametrize(
    "op, moved, bus",
    [
        ("all_reduce", 2.0, 1.5),
        ("all_gather", 4.0, 3.0),
        ("reduce_scatter", 4.0, 3.0),
        ("all_to_all", 1.0, 0.75),
        ("broadcast", 1.0, 1.0),
        ("send", 1.0, 1.0),
    ],
)
def test_bandwidth_is_that_of_nccl_tests(op, moved, bus):
    found = calls.bandwidth(op, 10**6, 8.0, 4)  # 1 MB in 8 ms on 4 ranks: 1 Gbit/s per S
    assert found == pytest.approx((moved, bus), rel=1e-12)
    assert calls.bandwidth(op, 10**6, 0.0, 4) == (0.0, 0.0)


def test_trimmed_mean_and_sizes():
    assert calls.trimmed_mean([]) == 0
    assert calls.trimmed_mean([3.0]) == 3
    assert calls.trimmed_mean([100.0, *[2.0] * 8, -50.0]) == 2
    assert [calls.size_text(n) for n in (0, 1, 1023, 1024, 1536, 3 << 20, 5 << 30)] == [
        "0B",
        "1.0 B",
        "1023.0 B",
        "1.0 KB",
        "1.5 KB",
        "3.0 MB",
        "5.0 GB",
    ]


def test_table_and_dict_without_processes(capsys):
    log = calls.CommsLogger()
    log.append("all_reduce", 4096, 1.0, 2)
    assert log.log_all(print_log=False, return_dict=True)["summary"] == {}  # it is off
    log.enabled = True
    log.drain = lambda: None
    for ms in (1.0, 1.0, 1.0):
        log.append("all_reduce", 4096, ms, 2)
    log.append("barrier", 0, 0.5, 2)
    out = log.log_all(show_straggler=True, return_dict=True)
    assert out["summary"]["all_reduce"][4096] == {
        "count": 3,
        "total_latency_ms": 3.0,
        "avg_latency_ms": 1.0,
        "tput_avg_gbps": pytest.approx(4096 * 2 * 8 / 1e6),
        "busbw_avg_gbps": pytest.approx(4096 * 8 / 1e6),
        "msg_size_bytes": 4096,
        "msg_size_str": "4.0 KB",
    }
    assert out["straggler_analysis"]["all_reduce"][4096]["total_straggler_ms"] == 0  # alone, one waits for nobody
    assert out["metadata"]["world_size"] == 1
    text = capsys.readouterr().out.splitlines()
    assert text[0].split("  ")[0] == "Comm. Op" and "busbw_avg (Gbps)" in text[0]
    assert text[1] == "all_reduce"
    assert text[2].split() == ["4.0", "KB", "3", "3.00", "1.00", "0.07", "0.03"]
    assert "Breakdown with straggler effect" in text


def test_what_is_logged_can_be_chosen():
    log = calls.CommsLogger()
    with pytest.raises(ArgumentError, match="'all_redduce'"):
        log.configure(True, prof_ops=["all_redduce"])
    assert not log.enabled
    log.drain = lambda: None
    log.enabled, log.prof_all, log.prof_ops = True, False, ["all_gather"]
    log.append("all_reduce", 8, 1.0, 2)
    log.append("all_gather", 8, 1.0, 2)
    assert list(log.summary()) == ["all_gather"]


def test_config_section():
    config = Config.load(
        {
            "train_batch_size": 1,
            "comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["all_reduce"], "debug": True},
        },
        world_size=1,
    )
    log = config.comms_logger
    assert (log.enabled, log.verbose, log.prof_all, log.debug) == (True, False, False, True) and list(log.prof_ops) == [
        "all_reduce"
    ]
    assert not Config.load({"train_batch_size": 1}, world_size=1).comms_logger.enabled
    with pytest.raises(ConfigError, match="comms_logger.prof_ops"):
        Config.load({"train_batch_size": 1, "comms_logger": {"prof_ops": 5}}, world_size=1)


def log_collectives(rank, world):
    from deepc import comm

    comm.configure(enabled=True)
    x = torch.ones(256)
    for _ in range(2000):  # more than the record itself holds
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
    dist.all_gather_into_tensor(torch.empty(world * 256), x)
    dist.reduce_scatter_tensor(torch.empty(256), torch.ones(world * 256))
    dist.all_to_all_single(torch.empty(512), torch.ones(512))
    dist.broadcast(torch.ones(3, dtype=torch.int64), 1)
    dist.barrier()
    out = comm.log_summary(show_straggler=True, return_dict=True)
    comm.configure(enabled=False)
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    calls.logger.drain()
    return out, calls.logger.lost


def test_every_call_of_the_core_is_counted():
    for rank, (out, lost) in enumerate(run_ranks(log_collectives, 2, fresh=True)):
        s = out["summary"]
        assert lost == 0
        assert s["all_reduce"][1024]["count"] == 2000
        assert s["all_gather"][1024]["count"] == 1 and s["reduce_scatter"][1024]["count"] == 1
        assert s["all_to_all"][2048]["count"] == 1, s["all_to_all"]
        assert s["broadcast"][24]["count"] == 1
        assert s["barrier"][0]["count"] >= 1
        one = s["all_reduce"][1024]
        assert 0 < one["avg_latency_ms"] <= one["total_latency_ms"] and one["tput_avg_gbps"] == pytest.approx(
            2 * one["busbw_avg_gbps"]
        )  # 2 ranks
        late = out["straggler_analysis"]["all_reduce"][1024]
        assert late["count"] == 2000 and late["total_straggler_ms"] >= 0
        assert late["total_comm_lat_ms"] + late["total_straggler_ms"] == pytest.approx(one["total_latency_ms"])
        assert out["metadata"]["rank"] == rank and out["metadata"]["world_size"] == 2


def log_debug(rank, world):
    calls.logger.configure(True, prof_all=False, prof_ops=["all_reduce_coalesced"], debug=True)
    dist.all_reduce(torch.ones(4))
    dist.barrier()
    names = list(calls.logger.summary())
    calls.logger.configure(False)
    return names


def test_debug_names_the_line_and_prof_ops_take_deepspeeds_names():
    for names in run_ranks(log_debug, 2, fresh=True):
        assert len(names) == 1 and names[0].startswith("all_reduce | [Caller: python/test_comms_logger.py:")


def log_beneath(rank, world):
    """Two "nodes" of one rank, and a tensor that the core does not take."""
    os.environ["DEEPC_NODE_ID"] = f"node{rank}"
    calls.logger.configure(True)
    x = torch.ones(300)
    dist.all_reduce(x)
    dist.broadcast(x, 0)
    work = dist.all_reduce(torch.sparse_coo_tensor([[rank]], [1.0], (4,)), async_op=True)
    work.wait()
    dist.barrier()
    end = time.monotonic() + 20  # the thread of Gloo that completed it may not have come to the log yet
    while 16 not in (out := calls.logger.summary())["all_reduce"] and time.monotonic() < end:
        time.sleep(0.01)
    calls.logger.configure(False)
    return out, x[0].item()


def test_calls_between_nodes_and_on_gloo_are_logged():
    for out, value in run_ranks(log_beneath, 2, fresh=True):
        assert value == 2
        assert out["all_reduce"][1200]["count"] == 1 and out["all_reduce"][1200]["tput_avg_gbps"] > 0
        assert out["broadcast"][1200]["count"] == 1
        assert out["all_reduce"][16]["count"] == 1


def train(rank, world):
    import deepc

    torch.manual_seed(0)
    engine, *_ = deepc.initialize(
        model=torch.nn.Linear(8, 4),
        config={
            "train_batch_size": 2 * world,
            "zero_optimization": {"stage": 1},
            "comms_logger": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        },
    )
    for _ in range(3):
        loss = engine(torch.ones(2, 8)).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
    counts = {
        op: sum(v["count"] for v in sizes.values())
        for op, sizes in deepc.comm.log_summary(return_dict=True)["summary"].items()
    }
    calls.logger.configure(False)
    return counts


def test_the_engine_logs_its_buckets():
    for counts in run_ranks(train, 2, fresh=True):
        assert counts["reduce_bucket"] >= 3 and counts["all_gather"] >= 3, counts
