"""The log line and what a run leaves behind: figures against the loop's own clock and arithmetic, files, trackers,
failures that must not end training."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import logging
import math
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import deepc
import numpy as np
import pytest
import torch
from deepc.config import Config
from deepc.core.telemetry import waits
from deepc.engine.data import TimedLoader
from deepc.errors import ArgumentError, ConfigError
from deepc.observe.monitor import MonitorMaster, counts, experiments, line, sinks, tiers
from ranks import for_this_job, placed, run_ranks
from tiny import TinyGPT, config, make_batch, make_model
from torch import nn


def train(engine, steps, *, pause=0.0, log=None, start=0):
    losses = []
    for i in range(start, start + steps):
        x, y = make_batch(i, engine.train_micro_batch_size_per_gpu())
        time.sleep(pause)
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if log:
            engine.log(log(i))
    return losses


def make_engine(tmp=None, *, stage=0, micro=4, model=None, **extra):
    ours = dict(extra.pop("deepc", {}))
    if tmp is not None:
        ours["run_dir"] = str(tmp)
    cfg = config(stage, micro=micro, **extra)
    cfg["deepc"] = {**ours, "log": {"format": "none", **ours.get("log", {})}}
    return deepc.initialize(model=model or make_model(), config=cfg)[0]


def lines_of(path: Path) -> list[dict]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def steps_of(path: Path) -> list[dict]:
    return [r for r in lines_of(path) if "event" not in r]


# ---- the metrics stream ----------------------------------------------------------------------------------------------
def test_one_record_per_step_with_the_loops_own_figures(tmp_path):
    engine = make_engine(
        tmp_path, scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": 20, "warmup_num_steps": 4}}
    )
    rates, norms, began = [], [], time.perf_counter()
    losses = []
    for i in range(6):
        rates.append(engine.get_lr()[0])
        losses += train(engine, 1, start=i)
        norms.append(engine.get_global_grad_norm())
    rates = [*rates[1:], engine.get_lr()[0]]  # as in DeepSpeed: the rate after the step's schedule
    took = time.perf_counter() - began
    engine.destroy()
    records = steps_of(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6]
    assert (
        [r["loss"] for r in records] == losses
        and [r["grad_norm"] for r in records] == norms
        and [r["lr"] for r in records] == rates
    )
    assert [r["samples"] for r in records] == [4 * n for n in range(1, 7)] and [r["tokens"] for r in records] == [
        64 * n for n in range(1, 7)
    ]
    assert all(not r["skipped"] and r["loss_scale"] is None and r["precision"] == "fp32" for r in records)
    assert 0 < sum(r["time_s"] for r in records) <= took
    for r in records:
        assert r["tokens_per_s"] == pytest.approx(64 / r["time_s"]) and r["samples_per_s"] == pytest.approx(
            4 / r["time_s"]
        )
        parts = r["parts"]
        assert 0 < parts["forward_s"] + parts["backward_s"] + parts["step_s"] <= r["time_s"]
        assert r["memory"]["process"] > 10 << 20 and r["memory"]["process_peak"] >= r["memory"]["process"]
    assert records[-1]["total_steps"] == 20 and records[-1]["eta_s"] > 0


def test_run_json_says_what_was_started(tmp_path):
    engine = make_engine(
        tmp_path, stage=2, comet={"enabled": False, "api_key": "very-secret"}, zero_force_ds_cpu_optimizer=False
    )
    info = json.loads((tmp_path / "run.json").read_text())
    engine.destroy()
    assert (
        info["ranks"] == info["nodes"] == 1
        and info["stage"] == 2
        and info["precision"] == "fp32"
        and info["deepc"] == deepc.__version__
    )
    assert info["model"]["class"] == "TinyGPT" and info["model"]["parameters"] == info["model"]["trainable"] == sum(
        p.numel() for p in make_model().parameters()
    )
    assert info["batch"] == {"train": 4, "micro": 4, "accumulation": 1}
    assert info["config"]["comet"]["api_key"] == "***" and "very-secret" not in (tmp_path / "run.json").read_text()
    assert info["plan"]["text"].startswith("plan: ZeRO stage 2") and info["plan"]["bytes"]["node_total"] > 0
    assert info["inert"][0]["key"] == "zero_force_ds_cpu_optimizer"
    assert not (tmp_path / "metrics.jsonl").exists()  # no step, no metrics


def test_run_json_has_the_prediction_where_there_is_one(tmp_path):
    cfg = config(2, micro=4)
    cfg["deepc"] = {"run_dir": str(tmp_path), "log": {"format": "none"}}
    engine = deepc.initialize(model=make_model(), config=cfg, sample_batch=make_batch(0, 4))[0]
    info = json.loads((tmp_path / "run.json").read_text())
    assert info["predicted"]["rank_peak"] == engine.memory_plan.rank_peak > 0 and info["process_before"] > 10 << 20
    engine.destroy()


def test_nothing_is_written_unless_asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    engine = make_engine()
    train(engine, 2)
    engine.destroy()
    assert list(tmp_path.iterdir()) == []


def test_the_environment_names_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPC_RUN_DIR", str(tmp_path / "other"))
    engine = make_engine(tmp_path / "asked")
    train(engine, 1)
    engine.destroy()
    assert len(steps_of(tmp_path / "other" / "metrics.jsonl")) == 1 and not (tmp_path / "asked").exists()


def test_a_run_that_goes_on_appends_and_a_fresh_one_moves_the_old_aside(tmp_path):
    engine = make_engine(tmp_path / "run")
    train(engine, 3)
    engine.save_checkpoint(tmp_path / "ck")
    engine.destroy()
    first = json.loads((tmp_path / "run" / "run.json").read_text())

    engine = make_engine(tmp_path / "run")
    engine.load_checkpoint(tmp_path / "ck")
    train(engine, 2)
    engine.destroy()
    records = lines_of(tmp_path / "run" / "metrics.jsonl")
    assert [r["step"] for r in records if "event" not in r] == [1, 2, 3, 4, 5]
    assert [(r["samples"], r["tokens"]) for r in records if "event" not in r] == [(4 * i, 64 * i) for i in range(1, 6)]
    assert [r["event"] for r in records if "event" in r] == ["checkpoint", "resume", "checkpoint"]
    assert [r["at"] for r in records if "event" not in r] == sorted(r["at"] for r in records if "event" not in r)
    again = json.loads((tmp_path / "run" / "run.json").read_text())
    assert again["started"] == first["started"] and len(again["resumed"]) == 1

    engine = make_engine(tmp_path / "run")
    train(engine, 1)
    engine.destroy()
    assert [r["step"] for r in steps_of(tmp_path / "run" / "metrics.jsonl")] == [1]
    assert len(list((tmp_path / "run").glob("metrics.before-*.jsonl"))) == 1


def test_starts_that_end_without_a_record_leave_the_clock_of_the_first(tmp_path):
    """Each of them wrote its own start over the first one's, from which `at` then counted."""

    def start(began, step=None):
        folder = sinks.Folder(tmp_path, {"started": f"at {began}", "began": began}, began)
        if step is not None:
            folder.write([{"step": step, "at": 1.0}])
        folder.close()
        return json.loads((tmp_path / "run.json").read_text())

    start(100.0, step=1)
    for began in (200.0, 300.0):  # they go down in load_checkpoint, say
        assert start(began)["began"] == began
    run = start(400.0, step=2)
    assert (run["started"], run["began"], run["resumed"]) == ("at 100.0", 100.0, ["at 400.0"])
    start(500.0)
    run = start(600.0, step=3)
    assert (run["started"], run["began"], run["resumed"]) == ("at 100.0", 100.0, ["at 400.0", "at 600.0"])
    records = lines_of(tmp_path / "metrics.jsonl")
    assert [r["at"] for r in records] == [1.0, 300.0, 301.0, 500.0, 501.0]  # with two resume events
    assert "earlier" not in run

    start(700.0)
    run = start(800.0, step=1)  # a fresh one
    assert (run["started"], run["began"]) == ("at 800.0", 800.0) and not {"resumed", "earlier"} & set(run)
    assert [r["at"] for r in lines_of(tmp_path / "metrics.jsonl")] == [1.0]


def test_short_runs_of_one_second_are_all_kept(tmp_path):
    for i in range(3):
        folder = sinks.Folder(tmp_path, {}, 0.0)
        folder.write([{"step": 1, "at": float(i)}])
        folder.close()
        os.utime(folder.path, (1e9, 1e9))
    kept = [lines_of(p)[0]["at"] for p in tmp_path.glob("metrics*.jsonl")]
    assert sorted(kept) == [0.0, 1.0, 2.0]


def test_a_fork_writes_nothing_of_its_parents(tmp_path):
    engine = make_engine(tmp_path)
    train(engine, 2)
    if (pid := os.fork()) == 0:
        engine.monitor.close()  # as at the end of every process
        os._exit(0)
    os.waitpid(pid, 0)
    engine.destroy()
    assert [r["step"] for r in steps_of(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_second_engine_writes_files_of_its_own(tmp_path):
    one, two = make_engine(tmp_path), make_engine(tmp_path, model=make_model(seed=1))
    train(one, 2)
    train(two, 3)
    one.destroy()
    two.destroy()
    assert len(steps_of(tmp_path / "metrics.jsonl")) == 2 and len(steps_of(tmp_path / "metrics.2.jsonl")) == 3
    assert (tmp_path / "run.2.json").exists()


def test_a_skipped_step_and_a_diverged_loss_are_json(tmp_path):
    engine = make_engine(tmp_path)
    x, y = make_batch(0, 4)
    loss = engine(x, y) * float("inf")
    engine.backward(loss)
    assert not engine.step().applied
    engine.destroy()
    (r,) = steps_of(tmp_path / "metrics.jsonl")
    assert (
        r["loss"] == "inf"
        and math.isinf(float(r["loss"]))
        and r["skipped"]
        and "not finite" in r["reason"]
        and r["grad_norm"] is None
        and r["skipped_steps"] == 1
    )


def test_accumulation_scaling_and_bare_backward_give_the_same_loss():
    x, y = make_batch(0, 8)

    def run(bare, micro, gas, precision="fp32"):
        engine = make_engine(micro=micro, gas=gas, precision=precision)
        losses = []
        for i in range(gas):
            loss = engine(x[i * micro : (i + 1) * micro], y[i * micro : (i + 1) * micro])
            losses.append(loss.item())
            loss.backward() if bare else engine.backward(loss)
            engine.step()
        last = engine.monitor.last
        engine.destroy()
        assert (
            last["loss"] == pytest.approx(sum(losses) / gas, rel=1e-6)
            and last["tokens"] == 128
            and last["samples"] == 8
        )
        return last

    whole, halves, bare, half = run(False, 8, 1), run(False, 4, 2), run(True, 4, 2), run(False, 8, 1, "fp16")
    assert halves["loss"] == pytest.approx(whole["loss"], rel=1e-5) and bare["loss"] == pytest.approx(
        halves["loss"], rel=1e-6
    )
    assert (
        half["loss"] == pytest.approx(whole["loss"], rel=2e-2)
        and half["loss_scale"] == 2**16
        and half["precision"] == "fp16"
    )


def test_waiting_for_data_is_the_loader_or_the_gap_and_evaluation_is_neither(tmp_path):
    engine = make_engine(tmp_path)
    train(engine, 2, pause=0.03)
    engine.eval()
    with torch.no_grad():
        time.sleep(0.05)
        engine(*make_batch(9, 4))
        time.sleep(0.05)
    engine.train()
    train(engine, 1, start=2)
    engine.destroy()
    one, two, three = steps_of(tmp_path / "metrics.jsonl")
    assert one["wait"]["data_s"] == 0.0  # nobody knows what was done before the first forward
    assert two["wait"]["data_s"] >= 0.03 and two["time_s"] >= two["wait"]["data_s"]
    assert three["wait"]["data_s"] < 0.02
    assert (
        three["at"] - two["at"] >= three["time_s"] + 0.099
    )  # both pauses of the evaluation lie between the steps, in neither


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        time.sleep(0.005)
        return tuple(t[0] for t in make_batch(i, 1))


def test_the_loader_tells_what_it_took(tmp_path):
    cfg = config(0, micro=4)
    cfg["deepc"] = {"run_dir": str(tmp_path), "log": {"format": "none"}}
    engine, _, loader, _ = deepc.initialize(model=make_model(), config=cfg, training_data=Slow())
    assert isinstance(loader, TimedLoader) and isinstance(loader, torch.utils.data.DataLoader) and len(loader) == 2
    for x, y in loader:
        engine.backward(engine(x, y))
        engine.step()
        time.sleep(0.03)  # the script's own work: outside, not data
    engine.destroy()
    for r in steps_of(tmp_path / "metrics.jsonl"):
        assert 0.02 <= r["wait"]["data_s"] <= r["time_s"]
    assert steps_of(tmp_path / "metrics.jsonl")[1]["parts"]["outside_s"] >= 0.03


def test_checkpoints_count_as_disk(tmp_path):
    before = waits.seconds["disk"]
    engine = make_engine(tmp_path / "run")
    train(engine, 1)
    engine.save_checkpoint(tmp_path / "ck")
    train(engine, 1)
    engine.destroy()
    records = lines_of(tmp_path / "run" / "metrics.jsonl")
    saved = next(r for r in records if r.get("event") == "checkpoint")
    assert saved["what"] == "save" and saved["path"] == str(tmp_path / "ck") and saved["step"] == 1
    one, two = (r["wait"] for r in steps_of(tmp_path / "run" / "metrics.jsonl"))
    # one interval of one clock, told three times: by the event, by the lane's total and by the step after it
    assert waits.seconds["disk"] - before == pytest.approx(saved["seconds"], abs=1e-5) and saved["seconds"] > 0
    assert one["disk_s"] == 0.0 and two["disk_s"] == pytest.approx(saved["seconds"], abs=1e-5)
    assert two["data_s"] == 0.0  # what lies between two steps with a save is no waiting for data


# ---- ranks -----------------------------------------------------------------------------------------------------------
def two_ranks(rank, world, folder, stage, nodes):
    with placed(rank, nodes):
        engine = make_engine(Path(folder), stage=stage, micro=4)
        mine = []
        for i in range(3):
            x, y = make_batch(i, 8)
            if rank == 1:
                time.sleep(0.03)
            loss = engine(x[4 * rank : 4 * rank + 4], y[4 * rank : 4 * rank + 4])
            mine.append(loss.item())
            engine.backward(loss)
            engine.step()
        last = engine.monitor.last
        engine.destroy()
    return mine, last


@pytest.mark.parametrize(
    "stage, nodes",
    [(0, ""), (2, ""), (3, ""), *(pytest.param(stage, "01", marks=pytest.mark.full) for stage in (0, 2, 3))],
)
def test_two_ranks_speak_as_one(tmp_path, stage, nodes):
    (a, last0), (b, last1) = run_ranks(two_ranks, 2, args=(str(tmp_path), stage, nodes))
    records = steps_of(tmp_path / "metrics.jsonl")
    info = json.loads((tmp_path / "run.json").read_text())
    assert (info["ranks"], info["nodes"]) == (2, 2 if nodes else 1)
    assert all((r.get("sent_bytes", 0) > 0) == bool(nodes) for r in records), records
    assert [r["loss"] for r in records] == [(x + y) / 2 for x, y in zip(a, b)]  # the mean of all ranks
    assert [r["tokens"] for r in records] == [128, 256, 384] and [r["samples"] for r in records] == [8, 16, 24]
    assert (
        last0["loss"] == last1["loss"]
        and last0["tokens"] == last1["tokens"]
        and last0["memory"]["process"] == last1["memory"]["process"]
    )
    # rank 1's, though rank 0 writes; at most the step's time on rank 0, which may leave the last step later than rank 1
    assert [r["wait"]["data_s"] for r in records[1:] if r["wait"]["data_s"] < min(0.03, r["time_s"])] == []
    if waits._WAIT_NS >= 0:
        assert sum(r["wait"]["communication_s"] for r in records) > 0.03  # rank 0 waits for rank 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "run.json"]


def sent_in_the_last(rank, world):
    with placed(rank, "01"):
        engine, told, sent = make_engine(micro=4), [], []
        for steps in (1, 2):
            train(engine, steps - 1)
            before = engine.comm_bytes["total"]
            train(engine, 1)
            told.append(engine.monitor.last["sent_bytes"])
            sent.append(engine.comm_bytes["total"] - before)
        engine.destroy()
    return told, sent


def test_who_asks_now_and_then_gets_figures_of_one_step():
    """They were of all steps since the question before, where no files are written; and of the first step also what
    initialize had sent, the model."""
    for told, sent in run_ranks(sent_in_the_last, 2):
        assert told == sent and min(sent) > 0


def test_disk_traffic_is_of_one_step_whenever_it_is_asked_for(tmp_path):
    zero = {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    engine = make_engine(zero_optimization=zero)
    train(engine, 1)
    one = engine.monitor.last["disk"]["written_bytes"]
    train(engine, 3)
    assert engine.monitor.last["disk"]["written_bytes"] == one > 0
    engine.destroy()


def gpt_lines(rank, world, how):
    stream = logging.StreamHandler(open(f"{how['out']}.{rank}", "w"))
    deepc._log.addHandler(stream)
    os.environ.update(how["env"])
    try:
        cfg = config(0, micro=4, steps_per_print=2)
        engine = deepc.initialize(model=make_model(), config=cfg)[0]
        for i in range(4):
            engine.backward(engine(*make_batch(i, 4)))
            engine.step()
        engine.destroy()
    finally:
        for k in how["env"]:
            os.environ.pop(k)
        deepc._log.removeHandler(stream)


def test_one_rank_prints_unless_asked(tmp_path):
    run_ranks(
        gpt_lines, 2, args=({"out": str(tmp_path / "one"), "env": {}},), fresh=True
    )  # other engines give lines a number
    said = [re.findall(r"^.*step \d+.*$", Path(f"{tmp_path}/one.{r}").read_text(), re.M) for r in range(2)]
    assert len(said[0]) == 2 and said[1] == [] and said[0][0].startswith("step 2  loss ")
    run_ranks(gpt_lines, 2, args=({"out": str(tmp_path / "all"), "env": {"DEEPC_LOG_RANKS": "all"}},), fresh=True)
    said = [re.findall(r"^.*step \d+.*$", Path(f"{tmp_path}/all.{r}").read_text(), re.M) for r in range(2)]
    assert all(len(s) == 2 and s[0].startswith(f"rank {r}: step 2  loss ") for r, s in enumerate(said))


# ---- the line --------------------------------------------------------------------------------------------------------
RECORD = {
    "step": 1200,
    "total_steps": 5000,
    "loss": 2.34567,
    "lr": 3e-4,
    "grad_norm": 0.91234,
    "loss_scale": 65536.0,
    "skipped_steps": 2,
    "tokens_per_s": 123456.7,
    "samples_per_s": 120.0,
    "tflops": 1.234,
    "fraction_of_peak": 0.456,
    "memory": {"process": 1 << 30, "shared": 96 << 20},
    "time_s": 10.0,
    "wait": {"data_s": 0.2, "communication_s": 1.0, "disk_s": 0.0},
    "eta_s": 3671.0,
    "scalars": {"acc": 0.5},
}


def test_the_line_says_it_all_and_fits():
    assert (
        line.text(RECORD)
        == "step 1200/5000  loss 2.3457  lr 3.00e-04  grad norm 0.9123  scale 65536  skipped 2  123,457 tokens/s  1.23"
        " TFLOP/s (46 % of peak)  mem 1.00 GiB + 96 MiB shared  waits: data 2 %, comm 10 %  acc 0.5  ETA 1:01:11"
    )
    assert line.text(RECORD, 75) == "step 1200/5000  loss 2.3457  lr 3.00e-04  123,457 tokens/s  ETA 1:01:11"
    assert line.text({"step": 1, "loss": float("nan")}) == "step 1  loss nan"
    assert line.text({"step": 1, "samples_per_s": 12.345}) == "step 1  12.35 samples/s"
    for width in range(20, 200):
        assert len(line.text(RECORD, width)) <= max(width, len("step 1200/5000  loss 2.3457"))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3600, "1:00:00"), (90061, "1d 01:01"), (-3, "0:00")],
)
def test_clock(seconds, text):
    assert line.clock(seconds) == text


def said_by(capture, **extra):
    """The lines of a run of 7 steps."""
    ours = {"format": "plain", **extra.pop("log", {})}
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda r: records.append(r.getMessage())
    deepc._log.addHandler(handler)
    try:
        cfg = config(0, micro=4, **extra)
        cfg["deepc"] = {"log": ours}
        engine = deepc.initialize(model=make_model(), config=cfg)[0]
        train(engine, 7)
        engine.destroy()
    finally:
        deepc._log.removeHandler(handler)
    lines = [re.sub(r"^engine \d+: ", "", r) for r in records]  # other tests may have left engines that live
    return [r for r in lines if r.startswith("step ")]


def test_steps_per_print_decides(capfd):
    assert [s.split()[1] for s in said_by(capfd, steps_per_print=3)] == ["3", "6"]
    assert (
        said_by(capfd, steps_per_print=None) == []
        and said_by(capfd, steps_per_print=math.inf) == []
        and said_by(capfd, steps_per_print=100) == []
    )
    assert [s.split()[1] for s in said_by(capfd)] == ["1", "7"]  # by time: the first step, every 10 seconds, the last
    assert len(said_by(capfd, log={"seconds": 1e-9})) >= 2
    assert said_by(capfd, steps_per_print=1, log={"format": "none"}) == []


def test_json_lines_on_request(capfd):
    said_by(capfd, steps_per_print=3, log={"format": "json"})
    found = [json.loads(text) for text in capfd.readouterr().err.splitlines() if text.startswith("{")]
    assert [r["step"] for r in found] == [3, 6] and all(r["tokens_per_s"] > 0 and r["loss"] > 0 for r in found)


def json_lines(rank, world):
    said = io.StringIO()
    log = {"format": "json", "ranks": "all" if world > 1 else "first"}
    with contextlib.redirect_stderr(said):
        engines = [make_engine(steps_per_print=1, deepc={"log": log}) for _ in range(2)]
        for engine in engines:
            train(engine, 1)
        for engine in engines:
            engine.destroy()
    return [json.loads(text) for text in said.getvalue().splitlines() if text.startswith("{")]


def test_json_lines_say_whose_they_are():
    """Those of two engines, or of two ranks with their own memory, could not be told apart."""
    first, second = json_lines(0, 1)
    assert second["engine"] != first.get("engine") and "rank" not in second
    for rank, (first, second) in enumerate(run_ranks(json_lines, 2)):
        assert (first["rank"], second["rank"]) == (rank, rank) and second["engine"] != first.get("engine")


SCRIPT = """
import sys; sys.path.insert(0, {tests!r})
import time, deepc, tiny
cfg = tiny.config(0, micro=4); cfg["deepc"] = {{"log": {{"total_steps": 40}}}}
engine = deepc.initialize(model=tiny.make_model(), config=cfg)[0]
for i in range(40):
    engine.backward(engine(*tiny.make_batch(i, 4))); engine.step(); time.sleep(0.03)
    if i == 30: print("the script says hello")
"""


@pytest.mark.parametrize("rich", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_terminal_gets_one_live_line(tmp_path, rich):
    if rich:
        pytest.importorskip("rich", reason="rich is not installed: its live line is not tested")
    script = SCRIPT.format(tests=str(Path(__file__).parent))
    if not rich:
        script = 'import sys; sys.modules["rich"] = sys.modules["rich.console"] = None\n' + script
    main, other = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "DEEPC_LOG_LEVEL": "INFO"}
    p = subprocess.Popen([sys.executable, "-c", script], stdin=other, stdout=other, stderr=other, env=env, cwd=tmp_path)
    os.close(other)
    out = b""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        if select.select([main], [], [], 1.0)[0]:
            try:
                part = os.read(main, 65536)
            except OSError:
                break
            if not part:
                break
            out += part
        elif p.poll() is not None:
            break
    assert p.wait(timeout=60) == 0, out.decode(errors="replace")
    os.close(main)
    text = out.decode(errors="replace")
    steps = re.findall(r"step (\d+)/40", text)
    assert steps[0] == "1" and steps[-1] == "40" and "loss" in text and "the script says hello" in text
    assert ("\x1b[2K" in text or "\x1b[1A" in text) if rich else "\x1b[K" in text  # drawn over
    assert not text.rstrip().endswith("\x1b[?25l")  # the cursor is there at the end


# ---- counting --------------------------------------------------------------------------------------------------------
def test_the_live_line_says_whose_it_is():
    stream = io.StringIO()
    live = sinks.LiveLine(stream, "engine 2: ")
    live._bar = False  # without rich
    live.show({"step": 7, "loss": 1.0}, False)
    assert stream.getvalue().startswith("\rengine 2: step 7")


def test_tokens_are_the_first_batch_by_length_integers():
    c = counts.TokenCounter()
    ids = torch.zeros(3, 7, dtype=torch.long)
    assert c((ids,), {}) == (21, 7) and c((ids[:, :5],), {}) == (15, 5)
    assert counts.TokenCounter()(
        (), {"attention_mask": torch.ones(3, 7, dtype=torch.long), "input_ids": ids[:, :4]}
    ) == (12, 4)
    assert counts.TokenCounter()(({"x": torch.zeros(2, 3), "tokens": ids},), {}) == (21, 7)
    assert counts.TokenCounter()((torch.zeros(3, 3, 8, 8), torch.zeros(3, dtype=torch.long)), {}) == (0, 0)
    assert counts.TokenCounter(encoder_decoder=True)((), {"input_ids": ids, "labels": ids[:, :2]}) == (27, 7)
    c = counts.TokenCounter()
    assert (
        c((ids,), {}) == (21, 7) and c((), {"input_ids": ids}) == (0, 0) and c((), {"input_ids": ids}) == (21, 7)
    )  # another form of call


def test_flops_are_six_per_parameter_that_multiplies():
    width, layers, vocab, context = 32, 2, 61, 16
    model = TinyGPT(width, layers, vocab, context)
    n = {id(p): (p.numel(), True) for p in model.parameters()}
    flops = counts.token_flops(model, n)
    assert flops.constant == 6 * (
        sum(p.numel() for p in model.parameters()) - context * width
    )  # positions are looked up; the tied table multiplies
    assert flops.per_length == 0  # no config tells of its attention
    model.config = type("C", (), {"n_layer": layers, "n_embd": width})()
    assert counts.token_flops(model, n).of(10, 5) == 10 * (flops.constant + 12 * layers * width * 5)
    frozen = {id(p): (p.numel(), p is not model.head.weight) for p in model.parameters()}
    assert counts.token_flops(model, frozen).constant == flops.constant - 2 * vocab * width
    untied = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3, bias=False), nn.MultiheadAttention(4, 2))
    assert counts.token_flops(untied, {id(p): (p.numel(), True) for p in untied.parameters()}).constant == 6 * (
        12 + sum(p.numel() for p in untied[2].parameters())
    )
    assert counts.attention_size(untied) == 4
    both = nn.ModuleList(nn.MultiheadAttention(4, 2) for _ in range(2))  # the second one is another stage's
    assert counts.token_flops(both, {id(p): (p.numel(), True) for p in both[0].parameters()}, False).per_length == 48


def test_flops_of_torchs_counter_agree_for_a_transformer():
    """Against the matrix products that torch itself counts."""
    from torch.utils.flop_counter import FlopCounterMode

    model = make_model(width=64, layers=3, context=32)
    x, y = make_batch(0, 4, context=32)
    with FlopCounterMode(display=False) as counter:
        model(x, y).backward()
    model.config = type("C", (), {"num_hidden_layers": 3, "hidden_size": 64})()
    ours = counts.token_flops(model, {id(p): (p.numel(), True) for p in model.parameters()}).of(128, 32)
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.1)


def test_a_given_figure_replaces_the_count():
    engine = make_engine()
    train(engine, 1)
    counted = engine.monitor.last["tflops"]
    assert counted == pytest.approx(64 * engine.monitor.flops_per_token / engine.monitor.last["time_s"] / 1e12)
    for given, flops in (({"per_step": 1e9}, 1e9), ({"per_token": 2e6}, 64 * 2e6), ({"per_sample": 1e8}, 4e8)):
        engine.monitor.set_flops(**given)
        train(engine, 1)
        assert engine.monitor.last["tflops"] == pytest.approx(flops / engine.monitor.last["time_s"] / 1e12)
    with pytest.raises(ArgumentError, match="one of"):
        engine.monitor.set_flops(per_step=1.0, per_token=1.0)
    for wrong in ("1e9", -1.0, float("nan")):
        with pytest.raises(ArgumentError, match=r"set_flops\(per_token="):
            engine.monitor.set_flops(per_token=wrong)
    engine.destroy()


def test_rates_are_of_the_batch_that_each_step_had(deepspeed, tmp_path, capsys):
    """A script that changes it had the rates of the first one for ever."""
    cfg = config(0, micro=4, steps_per_print=2)
    cfg["deepc"] = {"run_dir": str(tmp_path), "log": {"format": "json"}}
    engine = deepspeed.initialize(model=make_model(), config=cfg)[0]
    engine.monitor.set_flops(per_sample=1e8)
    train(engine, 1)
    engine.set_train_batch_size(8)
    assert engine.monitor.last["samples_per_s"] == pytest.approx(4 / engine.monitor.last["time_s"])
    train(engine, 2)
    engine.set_train_micro_batch_size(6)
    train(engine, 4, start=2)
    engine.destroy()
    records = steps_of(tmp_path / "metrics.jsonl")
    assert [r["samples"] for r in records] == [4, 12, 24, 36]
    for r, samples in zip(records, (4, 8, 12, 12), strict=True):
        assert r["samples_per_s"] == pytest.approx(samples / r["time_s"])
        assert r["tflops"] == pytest.approx(samples * 1e8 / r["time_s"] / 1e12)
    said = [json.loads(text) for text in capsys.readouterr().err.splitlines() if text.startswith("{")]
    for r, samples in zip(said, (12, 24), strict=True):  # of two steps each
        assert r["samples_per_s"] == pytest.approx(samples / r["time_s"])


class Attended(nn.TransformerEncoderLayer):
    def __init__(self):
        super().__init__(16, 2, 32, 0.0, batch_first=True)


def pipeline_figures(rank, world, of_config, pipe, nodes=""):
    """(tokens, FLOPs) of two batches, by this rank's own monitor, and its FLOPs of a token. nodes: of the stages."""
    with placed(rank, nodes):
        return _pipeline_figures(rank, world, of_config, pipe, nodes)


def _pipeline_figures(rank, world, of_config, pipe, nodes):
    from deepc.pipe import PipelineModule

    def loss(logits, y):
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    parts = [nn.Embedding(61, 16), *(Attended() for _ in range(4)), nn.Linear(16, 61)]
    model = PipelineModule(layers=parts, num_stages=world, loss_fn=loss, partition_method="uniform", **pipe)
    if of_config:
        model.config = {"num_hidden_layers": 4, "hidden_size": 16}
    cfg = {**config(0, micro=2, gas=2), "deepc": {"log": {"format": "none"}}}
    engine = deepc.initialize(model=model, config=cfg)[0]
    out = []
    data = iter([make_batch(i, 2) for i in range(4)])
    for _ in range(2):
        engine.train_batch(data)
        last = engine.monitor.last
        out.append((last["tokens"], round(last["tflops"] * last["time_s"] * 1e12)))
        # two micro-batches of activations there, or their gradients back, and what all ranks tell each other
        assert ("sent_bytes" in last) == bool(nodes)
        assert not nodes or 2 * 2 * 16 * 16 * 4 < last["sent_bytes"] < 2 * 2 * 16 * 16 * 4 + 8192
    sent = engine.comm_bytes
    assert (sent["activations"] > 4 * 2 * 16 * 16 * 4) == bool(nodes and rank == 0), "with a header before each"
    assert (sent["total"] > 0) == bool(nodes) and sent["total"] == sum(n for k, n in sent.items() if k != "total")
    per_token = engine.monitor.flops_per_token
    engine.destroy()
    return out, per_token


@pytest.mark.parametrize(
    "of_config, pipe",
    [(False, {}), (True, {}), pytest.param(False, {"schedule": "interleaved"}, marks=pytest.mark.full)],
)
def test_a_pipelines_flops_are_those_of_all_stages(of_config, pipe):
    """Only the first stage sees tokens, and the others counted nothing. Stages on nodes of their own had no
    sent_bytes."""
    (alone,) = run_ranks(pipeline_figures, 1, args=(of_config, {}))
    weights = sum(p.numel() for m in (*(Attended() for _ in range(4)), nn.Linear(16, 61)) for p in m.parameters())
    flops = 64 * (6 * weights + 12 * 4 * 16 * 16)
    assert alone == ([(64, flops), (128, flops)], 6 * weights)
    assert run_ranks(pipeline_figures, 2, args=(of_config, pipe, "01" * of_config)) == [alone] * 2


class Table(nn.Embedding):
    def __init__(self):
        super().__init__(61, 16)


def tied_figure(rank, world, folder=None):
    from deepc.pipe import PipelineModule, TiedLayerSpec

    def head(table, x):
        return x @ table.weight.t()

    def loss(logits, y):
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    parts = [TiedLayerSpec("table", Table), nn.Linear(16, 16), nn.Linear(16, 16)]
    parts.append(TiedLayerSpec("table", Table, forward_fn=head))
    model = PipelineModule(layers=parts, num_stages=world, loss_fn=loss, partition_method="uniform")
    cfg = {**config(0, micro=2, gas=1), "deepc": {"log": {"format": "none"}, "run_dir": folder}}
    engine = deepc.initialize(model=model, config=cfg)[0]
    per_token, asked = engine.monitor.flops_per_token, []
    for_this_job(counts, "job_peak", lambda *of: asked.append(of[2:]) or 1e18)
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    engine.train_batch(iter([(tokens, tokens)]))
    engine.monitor._averaged()
    engine.destroy()
    assert asked == [((2,),)]  # ranks on the node: of all stages, whose FLOPs they have
    return per_token


def test_a_head_that_is_tied_to_another_stages_table_multiplies(tmp_path):
    assert run_ranks(tied_figure, 2, args=(str(tmp_path),)) == [6 * (2 * (16 * 16 + 16) + 61 * 16)] * 2
    told = json.loads((tmp_path / "run.json").read_text())  # of the whole model
    assert (told["ranks"], told["nodes"], told["ranks_per_node"]) == (2, 1, 2)
    assert told["model"]["parameters"] == told["model"]["trainable"] == 2 * (16 * 16 + 16) + 61 * 16


def test_the_steps_of_the_whole_run(tmp_path):
    engine = make_engine(scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": 20, "warmup_num_steps": 4}})
    assert engine.monitor.last == {}
    train(engine, 2)
    for given, total in ((None, 20), (50, 50), (0, None), (None, 20)):
        engine.monitor.set_total_steps(given)
        last = engine.monitor.last
        assert last["total_steps"] == total and (last["eta_s"] is None) == (total is None)
        assert "total_about" not in last
    engine.monitor.set_total_steps(50, about=True)
    assert line.text(engine.monitor.last).startswith("step 2/~50  ")
    engine.monitor.set_total_steps(50)
    for wrong in ("50", 50.5, -1):
        with pytest.raises(ArgumentError, match=rf"set_total_steps\({wrong!r}\): a whole number"):
            engine.monitor.set_total_steps(wrong)
    assert line.text(engine.monitor.last).startswith("step 2/50  ")
    engine.destroy()


def test_peaks(monkeypatch):
    assert (
        counts.known_peak("NVIDIA H100 80GB HBM3", torch.bfloat16) == 989e12
        and counts.known_peak("NVIDIA A100-SXM4-80GB", torch.float32) == 19.5e12
    )
    for other in ("Something else", "NVIDIA RTX A4000", "Quadro T400"):  # no A40, no T4
        assert counts.known_peak(other, torch.float32) is None
    assert counts.known_peak("NVIDIA GH200 480GB", torch.bfloat16) == 989e12
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    assert counts.measured_peak(torch.float32, torch.device("cpu"), 0.001) > 1e8
    assert torch.equal(before, torch.random.get_rng_state())  # a run stays what it is
    assert counts.job_peak(torch.float32, torch.device("cpu"), (4, 4), lambda *_: 10.0) <= 80.0
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU that nobody knows")
    assert counts.job_peak(torch.bfloat16, torch.device("cuda", 0), (1,) * 4, lambda *_: 10.0) == 40.0


def test_the_peak_is_measured_once_and_only_for_a_line_that_is_shown(monkeypatch):
    measured, logger = [], logging.getLogger("deepc")
    monkeypatch.setattr(counts, "measured_peak", lambda *of: measured.append(of) or 1e12)
    monkeypatch.setattr(counts, "_measured", {})
    before = logger.level
    try:
        for level, times in ((logging.WARNING, 0), (logging.INFO, 1), (logging.INFO, 1)):
            logger.setLevel(level)
            engine = make_engine(steps_per_print=1, deepc={"log": {"format": "plain"}})
            train(engine, 2)
            engine.destroy()
            assert len(measured) == times, logging.getLevelName(level)
    finally:
        logger.setLevel(before)


@pytest.mark.parametrize("later, at_most", [(1e15, 2), (1.0, 4)])
def test_a_peak_that_other_work_has_slowed_is_measured_again(monkeypatch, tmp_path, later, at_most):
    measured = []
    monkeypatch.setattr(counts, "measured_peak", lambda *of: measured.append(of) or (later if measured[1:] else 1.0))
    monkeypatch.setattr(counts, "_measured", {})
    engine = make_engine(steps_per_print=1, deepc={"log": {"format": "plain"}, "run_dir": str(tmp_path)})
    train(engine, 6)
    engine.destroy()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    shares = [r["fraction_of_peak"] for r in records if "fraction_of_peak" in r]
    assert shares and max(shares) <= 1.0 and 1 < len(measured) <= at_most
    assert later == 1.0 or max(shares[-3:]) < 0.5


def test_memory_tiers(tmp_path):
    status = tmp_path / "status"
    status.write_text(
        "Name:\tx\nVmHWM:\t  5000 kB\nVmRSS:\t 4000 kB\nRssAnon:\t  1000 kB\nRssFile:\t  500 kB\nRssShmem:\t  250 kB\n"
    )
    assert tiers.read_status(str(status)) == {
        "peak": 5000 << 10,
        "anonymous": 1000 << 10,
        "file": 500 << 10,
        "shared": 250 << 10,
    }
    assert tiers.read_status(str(tmp_path / "none")) == {}
    private, peak, shared = tiers.process()
    held = torch.ones(8 << 20)
    assert tiers.process()[0] >= private + (24 << 20) and peak >= private > 0 and shared >= 0
    del held


# ---- trackers --------------------------------------------------------------------------------------------------------
def read_csv(path):
    with open(path, newline="") as f:
        return list(csv.reader(f))


def test_csv_files_are_deepspeeds(tmp_path):
    engine = make_engine(
        csv_monitor={"enabled": True, "output_path": str(tmp_path / "logs"), "job_name": "job"},
        fp16={"enabled": True, "initial_scale_power": 4},
    )
    losses = train(engine, 3, log=lambda i: {"Eval/my score": torch.tensor(i / 2)})
    engine.destroy()
    folder = tmp_path / "logs" / "job"
    assert read_csv(folder / "Train_Samples_train_loss.csv") == [
        ["step", "train_loss"],
        *([str(4 * (i + 1)), str(v)] for i, v in enumerate(losses)),
    ]
    assert read_csv(folder / "Train_Samples_lr.csv") == [
        ["step", "lr"],
        ["4", "0.001"],
        ["8", "0.001"],
        ["12", "0.001"],
    ]
    assert read_csv(folder / "Train_Samples_loss_scale.csv") == [
        ["step", "loss_scale"],
        ["4", "16.0"],
        ["8", "16.0"],
        ["12", "16.0"],
    ]
    assert read_csv(folder / "Eval_my_score.csv") == [["step", "my score"], ["4", "0.0"], ["8", "0.5"], ["12", "1.0"]]


def test_csv_equals_deepspeeds_own_monitor(tmp_path):
    pytest.importorskip("deepspeed", reason="deepspeed is not installed: its files are not compared")
    from deepspeed.monitor.config import get_monitor_config
    from deepspeed.monitor.csv_monitor import csvMonitor as Theirs

    sections = [
        {"csv_monitor": {"enabled": True, "output_path": str(tmp_path / who), "job_name": "j"}}
        for who in ("theirs", "ours")
    ]
    events = [
        ("Train/Samples/train_loss", 1.5, 8),
        ("Train/Samples/lr", 1e-3, 8),
        ("Train/Samples/train_loss", 1.25, 16),
        ("a b", 2, 16),
    ]
    theirs = Theirs.__new__(Theirs)
    theirs.filenames, theirs.enabled, theirs.log_dir = [], True, str(tmp_path / "theirs" / "j")
    os.makedirs(theirs.log_dir)
    import deepspeed.comm as ds_comm

    rank, ds_comm.get_rank = ds_comm.get_rank, lambda: 0
    try:
        assert get_monitor_config(sections[0]).csv_monitor.enabled
        theirs.write_events(events)
    finally:
        ds_comm.get_rank = rank
    MonitorMaster(sections[1]).write_events(events)
    names = sorted(p.name for p in (tmp_path / "theirs" / "j").iterdir())
    assert names == sorted(p.name for p in (tmp_path / "ours" / "j").iterdir()) and len(names) == 3
    for name in names:
        assert (tmp_path / "theirs" / "j" / name).read_bytes() == (tmp_path / "ours" / "j" / name).read_bytes()


def test_tensorboard_event_files(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    engine = make_engine(
        tensorboard={"enabled": True, "output_path": str(tmp_path), "job_name": "job"}, wall_clock_breakdown=True
    )
    losses = train(engine, 3)
    engine.destroy()
    events = EventAccumulator(str(tmp_path / "job"))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert {
        "Train/Samples/train_loss",
        "Train/Samples/lr",
        "Train/Samples/grad_norm",
        "Train/Speed/tokens_per_s",
        "Train/Samples/elapsed_time_ms_forward",
    } <= set(tags)
    assert [(e.step, e.value) for e in events.Scalars("Train/Samples/train_loss")] == [
        (4 * (i + 1), pytest.approx(v, rel=1e-6)) for i, v in enumerate(losses)
    ]


def test_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    for k, v in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(k, v)
    logged = []
    engine = make_engine(wandb={"enabled": True, "project": "p", "group": "g"})
    (sink,) = engine.monitor._guard.sinks
    assert sink._run.project == "p" and sink._run.settings._offline
    real = sink._wandb.log
    monkeypatch.setattr(
        sink,
        "log",
        lambda data, step=None, commit=None: (logged.append((step, dict(data))), real(data, step=step, commit=commit)),
    )
    losses = train(engine, 2)
    engine.destroy()
    assert [step for step, _ in logged] == [4, 8] and [d["Train/Samples/train_loss"] for _, d in logged] == losses
    assert list(tmp_path.rglob("*.wandb"))


def test_comet_offline(tmp_path, monkeypatch):
    pytest.importorskip("comet_ml", reason="comet_ml is not installed")
    for k, v in {
        "COMET_OFFLINE_DIRECTORY": str(tmp_path),
        "COMET_LOGGING_CONSOLE": "ERROR",
        "COMET_DISABLE_AUTO_LOGGING": "1",
    }.items():
        monkeypatch.setenv(k, v)
    engine = make_engine(
        comet={"enabled": True, "online": False, "project": "p", "samples_log_interval": 8, "experiment_name": "n"}
    )
    (sink,) = engine.monitor._guard.sinks
    assert sink.experiment.get_name() == "n"
    logged = []
    monkeypatch.setattr(
        sink.experiment,
        "__internal_api__log_metric__",
        lambda name, value, step: logged.append((name, step)),
        raising=False,
    )
    train(engine, 4)
    engine.destroy()
    assert [s for n, s in logged if n == "Train/Samples/train_loss"] == [4, 12]  # once in 8 samples
    assert list(tmp_path.rglob("*.zip"))


# ---- the user's own --------------------------------------------------------------------------------------------------
def test_own_scalars(tmp_path):
    engine = make_engine(tmp_path)
    train(engine, 1)
    value = torch.tensor(0.25)
    engine.log({"acc": value, "n": 3})
    train(engine, 1, start=1)
    for bad in ({"x": "text"}, {"x": torch.zeros(2)}, {1: 2.0}, [0.5], 0.5):
        with pytest.raises(ArgumentError, match="engine.log"):
            engine.log(bad)
    engine.destroy()
    (r,) = [r for r in lines_of(tmp_path / "metrics.jsonl") if r.get("event") == "log"]
    assert r["scalars"] == {"acc": 0.25, "n": 3.0} and r["step"] == 1


def test_own_scalars_are_what_they_were_when_they_were_logged(tmp_path):
    """Sums that the script goes on adding to, in place."""
    engine = make_engine(tmp_path)
    total, seen = torch.zeros(()), np.zeros(1)
    for i in range(3):
        total += i
        seen += 2
        engine.log({"total": total, "seen": seen})
        train(engine, 1, start=i)
    for bad in ({"x": torch.tensor(1j)}, {"x": np.array("text")}, {"x": 10**400}):
        with pytest.raises(ArgumentError, match="engine.log takes .* got 'x'"):
            engine.log(bad)
    engine.destroy()
    logged = [r["scalars"] for r in lines_of(tmp_path / "metrics.jsonl") if r.get("event") == "log"]
    assert logged == [{"total": t, "seen": n} for t, n in ((0.0, 2.0), (1.0, 4.0), (3.0, 6.0))]
    assert len(steps_of(tmp_path / "metrics.jsonl")) == 3


def test_monitor_master_takes_deepspeeds_forms(tmp_path):
    raw = {"train_batch_size": 1, "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "a"}}
    for form in (raw, Config.load(raw, world_size=1)):
        master = MonitorMaster(form)
        assert master.enabled and master.csv_monitor is not None and master.tb_monitor is None
        master.write_events([("Test/x", 1.0, 1)])
        master.close()
    assert read_csv(tmp_path / "a" / "Test_x.csv") == [["step", "x"], ["1", "1.0"]] * 2
    assert not MonitorMaster({}).enabled


def test_monitor_master_tells_what_it_does_not_know(tmp_path, caplog):
    section = {"enabled": True, "output_path": str(tmp_path)}
    MonitorMaster({"train_batch_size": 1, "bfloat16": {}, "csv_monitor": None, "csv_monitr": section})
    told = [r.getMessage() for r in caplog.records if "unknown section" in r.getMessage()]
    assert len(told) == 1 and '"csv_monitr"' in told[0] and 'Did you mean "csv_monitor"?' in told[0]
    for wrong, why in (
        ({"output_pth": "x"}, r'unknown key "csv_monitor.output_pth". Did you mean "csv_monitor.output_path"'),
        ({"enabled": "false"}, r'csv_monitor.enabled = "false" must be true or false'),
        (True, r"csv_monitor = true must be an object"),
    ):
        with pytest.raises(ConfigError, match=why):
            MonitorMaster({"csv_monitor": wrong})


# ---- failures --------------------------------------------------------------------------------------------------------
@pytest.fixture
def warnings_of():
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda r: records.append(r.getMessage())
    deepc._log.addHandler(handler)
    yield records
    deepc._log.removeHandler(handler)


def test_a_full_disk_is_said_once_and_training_goes_on(tmp_path, warnings_of):
    engine = make_engine(tmp_path)
    train(engine, 1)
    engine.monitor.flush()
    engine.monitor._guard.sinks[0]._file.close()
    engine.monitor._guard.sinks[0]._file = open("/dev/full", "w")
    for i in range(3):
        train(engine, 1, start=1 + i)
        engine.monitor.flush()
    assert (
        engine.global_steps == 4
        and len([w for w in warnings_of if "No space left" in w and "training goes on" in w]) == 1
    )
    engine.destroy()


def test_a_folder_that_cannot_be_made_is_said(tmp_path, warnings_of):
    (tmp_path / "file").write_text("")
    engine = make_engine(tmp_path / "file" / "run")
    train(engine, 1)
    engine.destroy()
    assert len(warnings_of) == 1 and str(tmp_path / "file" / "run") in warnings_of[0]


def test_other_files_of_a_folder_that_cannot_be_made_end_no_training(tmp_path, warnings_of, monkeypatch, capsys):
    """The flops profile and the communication of a rank."""
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("deepc.observe.profile.scheduled._COMMS_EVERY_S", 0.0)
    flops = {"enabled": True, "profile_step": 1}
    engine = make_engine(tmp_path / "file" / "run", comms_logger={"enabled": True}, flops_profiler=flops)
    train(engine, 3)
    engine.destroy()
    for name in ("flops.txt", "comms.rank0.json"):
        assert [w for w in warnings_of if name in w and "training goes on" in w], warnings_of
    assert len(warnings_of) == 3 and engine.global_steps == 3
    engine = make_engine(flops_profiler=flops | {"output_file": str(tmp_path / "file" / "mine.txt")})
    train(engine, 3)
    engine.destroy()
    assert "mine.txt can't be written" in warnings_of[3] and engine.global_steps == 3


def test_a_missing_package_is_said(monkeypatch, warnings_of):
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "wandb" else found(name, *a))
    engine = make_engine(wandb={"enabled": True})
    train(engine, 1)
    engine.destroy()
    assert len(warnings_of) == 1 and "pip install wandb" in warnings_of[0] and "training goes on" in warnings_of[0]


def test_a_tracker_that_fails_is_dropped_and_the_others_stay(tmp_path, warnings_of):
    class Broken(sinks.Sink):
        name = "the broken one"

        def write(self, records):
            raise SystemExit(3)

    engine = make_engine(tmp_path)
    engine.monitor._guard.sinks.insert(0, Broken())
    train(engine, 2)
    engine.destroy()
    assert [w for w in warnings_of if w.startswith("the broken one")] and len(warnings_of) == 1
    assert len(steps_of(tmp_path / "metrics.jsonl")) == 2


def test_a_broken_stream_does_not_end_training(monkeypatch, warnings_of):
    engine = make_engine(steps_per_print=1, deepc={"log": {"format": "json"}})

    class Closed:
        def write(self, text):
            raise BrokenPipeError("nobody reads")

        flush = isatty = lambda self: False

    monkeypatch.setattr(sys, "stderr", Closed())
    train(engine, 3)
    monkeypatch.undo()
    assert engine.global_steps == 3 and any("nobody reads" in w for w in warnings_of)
    engine.destroy()


def test_wrong_settings_are_refused():
    for ours in (
        {"log": {"format": "xml"}},
        {"log": {"ranks": "some"}},
        {"log": {"seconds": 0}},
        {"log": {"total_steps": 0}},
        {"run_dir": 3},
    ):
        with pytest.raises(ConfigError, match="deepc."):
            Config.load({"train_batch_size": 1, "deepc": ours}, world_size=1)


def test_events_are_deepspeeds_tags():
    record = {
        "samples": 8,
        "loss": 1.0,
        "lr": 0.1,
        "loss_scale": None,
        "grad_norm": 2.0,
        "parts": {"forward_s": 0.001, "backward_s": 0.002, "step_s": 0.003},
    }
    assert experiments.events_of(record, False, True) == [
        ("Train/Samples/train_loss", 1.0, 8),
        ("Train/Samples/lr", 0.1, 8),
        ("Train/Samples/grad_norm", 2.0, 8),
        ("Train/Samples/elapsed_time_ms_forward", 1.0, 8),
        ("Train/Samples/elapsed_time_ms_backward", 2.0, 8),
        ("Train/Samples/elapsed_time_ms_step", 3.0, 8),
    ]
