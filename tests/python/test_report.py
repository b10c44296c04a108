"""`deepc report`: what is read of a run folder, what is said of it, and the page in a real browser."""

from __future__ import annotations

import gc
import json
import math
import random
import re
import shutil
import statistics
import subprocess
import tracemalloc
from pathlib import Path

import pytest
import report_runs
from deepc.errors import ArgumentError
from deepc.observe.report.folder import Run, read_runs
from deepc.observe.report.page import embedded, page
from deepc.observe.report.seen import look
from deepc.observe.report.series import POINTS, Blocks, Curve, Point, Quantiles
from deepc.report import digest as d
from deepc.report import write_report


def read(folder: Path):
    return read_runs(folder)[0]


def data_of(path: Path) -> dict:
    """The JSON in a page."""
    text = path.read_text()
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])


# ---- reading ---------------------------------------------------------------------------------------------------------
def test_a_whole_folder_is_read(tmp_path):
    run = read(report_runs.whole(tmp_path / "a", steps=50))
    assert [s["step"] for s in run.steps] == list(range(1, 51))
    assert sorted(run.traces) == sorted(run.comms) == sorted(run.late) == [0, 1]
    assert run.info["model"]["class"] == "GPT" and "Flops Profiler" in run.flops and run.problems == []


def test_what_is_no_run_says_what_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match="there is no run folder 'none'.*run_dir"):
        read_runs("none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArgumentError, match="holds no run"):
        read_runs(tmp_path / "empty")
    report_runs.whole(tmp_path / "runs" / "one", steps=3)
    with pytest.raises(ArgumentError, match="Its folders one are runs"):
        read_runs(tmp_path / "runs")
    with pytest.raises(ArgumentError, match="Runs here: runs/one"):
        read_runs("nowhere")
    with pytest.raises(ArgumentError, match="is a file"):
        read_runs(tmp_path / "runs" / "one" / "run.json")


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "trace.rank0.json", "comms.rank1.json", "flops.txt"])
def test_a_page_is_made_of_any_one_file(tmp_path, name):
    whole = report_runs.whole(tmp_path / "whole", steps=20)
    (tmp_path / "part").mkdir()
    shutil.copy(whole / name, tmp_path / "part" / name)
    found = data_of(write_report(tmp_path / "part"))["runs"][0]
    there = {
        "run.json": found["config"],
        "metrics.jsonl": found["curves"],
        "trace.rank0.json": found["timeline"],
        "comms.rank1.json": found["communication"],
        "flops.txt": found["flops"],
    }
    assert [k for k, v in there.items() if v] == [name]


def test_a_run_that_was_killed_is_read_up_to_its_last_whole_line(tmp_path):
    folder = report_runs.whole(tmp_path / "a", steps=30)
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + lines[-1][:40])
    (folder / "trace.rank0.json").write_text('{"traceEvents": [{"ph": "X"')
    run = read(folder)
    assert [s["step"] for s in run.steps] == list(range(1, 31))  # the last line is the eval_loss of step 30
    assert any("cut off" in p for p in run.problems) and any(
        "trace.rank0.json can't be read" in p for p in run.problems
    )
    assert sorted(run.traces) == [0, 1] and run.traces[0] == []


def test_a_resumed_run_replaces_the_steps_that_it_repeats(tmp_path):
    rows = (
        [{"step": s, "loss": 1.0, "at": s} for s in range(1, 11)]
        + [{"event": "resume", "step": 6, "at": 11}]
        + [{"step": s, "loss": 2.0, "at": s + 10} for s in range(7, 9)]
    )
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    run = read(tmp_path)
    assert [(s["step"], s["loss"]) for s in run.steps] == [(s, 1.0) for s in range(1, 7)] + [(7, 2.0), (8, 2.0)]
    assert run.restarts == [7] and [e["kind"] for e in d.events(run)] == ["resume"]


def written(folder: Path, rows: list[dict]) -> Path:
    """A run folder with these lines of metrics.jsonl."""
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


def logged(step: int, at: float = 0.0, /, **scalars: float) -> dict:
    return {"event": "log", "step": step, "at": at, "scalars": scalars}


def test_what_a_resumed_run_logs_again_takes_the_place_of_what_was_logged(tmp_path):
    rows = [
        *({"step": s, "at": s} for s in range(1, 5)),
        *(logged(s, s, val_loss=1.0) for s in (2, 3, 4)),
        {"event": "resume", "step": 2, "at": 5},
        logged(2, 5, start=1.0),
        *({"step": s, "at": s + 5} for s in (3, 4)),
        *(logged(s, s + 5, val_loss=2.0) for s in (3, 4)),
    ]
    run = read(written(tmp_path, rows))
    found = d.curves(run)["val_loss"]
    assert found == {"step": [2, 3, 4], "time": [2.0, 8.0, 9.0], "value": [1.0, 2.0, 2.0]}
    assert d.curves(run)["start"]["value"] == [1.0] and d.summary(run)["validation"] == 2.0


def test_a_name_that_steps_have_is_a_curve_of_its_own_when_it_is_logged(tmp_path):
    rows = [{"step": s, "at": s, "loss": 1.0, "samples": 8 * s} for s in range(1, 7)]
    rows += [logged(s, s + 0.5, loss=7.0, step=100.0, at=9.0, tokens=5.0) for s in (2, 4)]
    found = d.curves(read(written(tmp_path, rows)))
    assert found["loss"]["step"] == [1, 2, 3, 4, 5, 6] and set(found["loss"]["value"]) == {1.0}
    assert found["loss"]["time"] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    theirs = {"loss (engine.log)": 7.0, "step": 100.0, "at": 9.0, "tokens": 5.0}
    for name, value in theirs.items():
        assert found[name] == {"step": [2, 4], "time": [2.5, 4.5], "value": [value] * 2}, name
    assert set(found) == {"loss", *theirs}


def test_files_that_cannot_be_read_are_a_problem_and_the_rest_is_shown(tmp_path):
    folder = report_runs.whole(tmp_path / "a", steps=3)
    for name in ("metrics.jsonl", "flops.txt"):
        (folder / name).unlink()
        (folder / name).mkdir()
    run = read(folder)
    assert [p.split(":")[0] for p in run.problems] == ["metrics.jsonl can't be read", "flops.txt can't be read"]
    assert run.traces and d.digest(run)["memory"]["predicted"]


def test_engines_of_one_process_are_runs_of_their_own(tmp_path):
    folder = report_runs.whole(tmp_path / "gan", steps=5)
    shutil.copy(folder / "run.json", folder / "run.2.json")
    shutil.copy(folder / "metrics.jsonl", folder / "metrics.2.jsonl")
    runs = data_of(write_report(folder))["runs"]
    assert [r["name"] for r in runs] == ["gan", "gan (engine 2)"] and runs[1]["timeline"] is None


# ---- digesting -------------------------------------------------------------------------------------------------------
def curve(points) -> Curve:
    first, *others = (Point(step, 2.0 * step, value) for step, value in points)
    found = Curve(first)
    for p in others:
        found.add(p)
    return found


def test_a_long_curve_keeps_spikes_both_ends_and_the_mean_of_each_stretch():
    ys = [1.0] * 100_000
    ys[77_777], ys[33] = 9.0, -9.0
    found = curve(enumerate(ys)).shown()
    at = dict(zip(found["step"], found["value"]))
    assert len(at) <= POINTS + 2 and list(at) == sorted(at) and {0, 99_999} <= set(at)
    assert at[77_777] == 9.0 and at[33] == -9.0 and found["time"] == [2.0 * s for s in found["step"]]
    means, width = found["mean"], found["per"]
    assert POINTS // 4 < len(means["value"]) <= POINTS // 2 and len(means["value"]) == -(-100_000 // width)
    odd = {33 // width: (width - 10) / width, 77_777 // width: (width + 8) / width}
    assert means["value"] == [pytest.approx(odd.get(k, 1.0)) for k in range(len(means["value"]))]
    assert all(k * width <= s < (k + 1) * width for k, s in enumerate(means["step"]))


def test_a_short_curve_is_as_it_was_logged():
    assert curve([(1, 3.0), (2, 4.0)]).shown() == {"step": [1, 2], "time": [2.0, 4.0], "value": [3.0, 4.0]}
    last_first = curve([(2, 4.0), (1, 3.0), (2, 5.0)])
    assert last_first.shown()["value"] == [3.0, 4.0, 5.0] and last_first.last.value == 5.0


def test_figures_of_many_values_are_exact_or_say_what_they_are_of():
    draw = random.Random(0)
    values = [draw.lognormvariate(0, 1) for _ in range(20_001)]
    found = Quantiles()
    for v in values:
        found.add(v)
    assert found.median() == pytest.approx(statistics.median(values), rel=1e-3)
    assert found.above(3.0) == pytest.approx(sum(v > 3.0 for v in values), rel=5e-3)
    blocks = Blocks(8)
    for i in range(100):
        blocks.add(i, float(i), 1.0)
    assert len(blocks.found) <= 8 and [f for _, f, _, _ in blocks.found] == list(range(0, 100, blocks.size))
    assert sum(n for n, *_ in blocks.found) == 100 and blocks.found[-1][2] == 99
    count, mean = blocks.tail(5)
    assert count >= 5 and mean == sum(range(100 - count, 100)) / count
    assert blocks.means(10) == (16, [7.5 + 16 * i for i in range(6)] + [pytest.approx(89.5)])


@pytest.mark.full  # counting memory is slow
def test_a_long_run_takes_no_more_memory_or_page_than_a_shorter_one(tmp_path):
    def seen(steps: int) -> tuple[Run, int]:
        """And the bytes that were taken at most."""
        rows = report_runs.metrics(tmp_path / "metrics.jsonl", steps, skipped=range(2, steps, 2))
        with (tmp_path / "metrics.jsonl").open("a") as f:
            f.writelines(json.dumps(logged(r["step"], r["at"], acc=r["loss"])) + "\n" for r in rows)
        del rows
        run = read(tmp_path)
        gc.collect()  # else what is measured depends on when the last one was
        tracemalloc.start()
        look(run)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return run, most

    run, short = seen(2500)
    page = len(json.dumps(d.digest(run)))
    run, long = seen(10_000)
    found = d.digest(run)
    assert long < 1.2 * short and len(json.dumps(found)) < 1.2 * page
    assert found["summary"]["steps"] == 10_000 and found["summary"]["skipped"] == len(found["skipped"]) == 4999


def test_curves_have_what_was_recorded_and_gaps_where_it_was_not_finite(tmp_path):
    rows = [
        {"step": 1, "at": 0.5, "loss": 2.0, "lr": 0.1, "wait": {"data_s": 1.0}, "skipped": False},
        {"step": 2, "at": 1.0, "loss": "nan", "lr": 0.2},
        {"event": "log", "step": 2, "at": 1.0, "scalars": {"acc": 0.9}},
        {"step": 3, "at": 1.5, "loss": 1.0, "lr": 0.3},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    found = d.curves(read(tmp_path))
    assert list(found) == ["loss", "lr", "acc"]
    assert found["loss"] == {"step": [1, 3], "time": [0.5, 1.5], "value": [2.0, 1.0]}
    assert found["acc"] == {"step": [2], "time": [1.0], "value": [0.9]}


def test_split_of_a_step_adds_up_to_its_time(tmp_path):
    rows = [
        {"step": s, "time_s": 1.0, "wait": {"data_s": 0.25, "communication_s": 0.125, "disk_s": None}}
        for s in range(1, 1001)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    found = d.split(read(tmp_path))
    assert (
        found["mean"] == {"compute": 0.625, "communication": 0.125, "data": 0.25, "disk": 0.0}
        and found["steps"] == 1000
    )
    assert len(found["step"]) <= 400 and found["to"][-1] == 1000
    assert all(sum(found["parts"][k][i] for k in d.SPLIT) == pytest.approx(1.0) for i in range(len(found["step"])))


def test_a_checkpoint_between_two_steps_takes_nothing_from_computing(tmp_path):
    rows = [
        {"step": 1, "time_s": 1.0, "wait": {"disk_s": 0.0}},
        {"event": "checkpoint", "step": 1, "at": 1, "seconds": 3.0, "what": "save", "path": "x"},
        {"step": 2, "time_s": 1.0, "wait": {"disk_s": 3.25, "data_s": 0.25}},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    found = d.split(read(tmp_path))["parts"]
    assert (found["compute"], found["disk"], found["data"]) == ([1.0, 0.5], [0.0, 3.25], [0.0, 0.25])


def test_summary_leaves_the_first_step_out_of_medians(tmp_path):
    rows = [
        {
            "step": s,
            "at": float(s),
            "time_s": 9.0 if s == 1 else 1.0,
            "loss": 10.0 - s,
            "tokens_per_s": 5.0 if s == 1 else 100.0,
        }
        for s in range(1, 6)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    s = d.summary(read(tmp_path))
    assert (s["step_s"], s["slowest_s"], s["tokens_per_s"], s["first_loss"], s["loss"], s["steps"]) == (
        1.0,
        1.0,
        100.0,
        9.0,
        5.0,
        5,
    )


@pytest.mark.parametrize("steps, last", [(3, 3), (40, 5), (400, 20)])
def test_the_headline_loss_is_a_mean_and_says_over_how_many_steps(tmp_path, steps, last):
    rows = report_runs.metrics(tmp_path / "metrics.jsonl", steps)
    s = d.summary(read(tmp_path))
    assert s["tail_steps"] == last
    assert math.isclose(s["tail_loss"], sum(r["loss"] for r in rows[-last:]) / last)


@pytest.mark.parametrize("name", ["eval_loss", "val_loss", "Val/Loss", "validation loss"])
def test_validation_is_what_the_loop_logged_under_a_usual_name(tmp_path, name):
    rows = [{"step": s, "at": float(s), "loss": 2.0} for s in (1, 2, 3)]
    logged = [
        {"event": "log", "step": s, "at": float(s), "scalars": {name: v, "bits/byte": 9.0}}
        for s, v in ((1, 2.5), (2, 2.1), (3, 2.3))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [*rows, *logged]))
    s = d.summary(read(tmp_path))
    assert (s["validation"], s["best_validation"], s["validation_name"]) == (2.3, 2.1, name)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    s = d.summary(read(tmp_path))
    assert s["validation"] is None and s["validation_name"] == ""


def test_every_run_has_the_plan_of_its_model_states(tmp_path):
    """A run that was started without a sample batch has no prediction."""
    import deepc
    import torch

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "deepc": {"run_dir": str(tmp_path), "log": {"format": "none"}},
    }
    engine, *_ = deepc.initialize(model=torch.nn.Linear(64, 64), config=config)
    engine.backward(engine(torch.ones(2, 64).bfloat16()).float().mean())
    engine.step()
    sizes = dict(engine.plan.bytes)
    engine.destroy()
    found = d.memory(read(tmp_path))
    assert found["predicted"] is None
    states = {r["name"]: (r["host"], r["shared"]) for r in found["states"]}
    assert states["fp32 masters"] == (sizes["master_private"], 0) and sizes["master_private"] > 0
    assert states["optimizer states"] == (sizes["states_private"], 0)
    assert sum(h for h, _ in states.values()) == sum(v for k, v in sizes.items() if k.endswith("_private"))


def test_memory_is_held_against_its_plan(tmp_path):
    mib = report_runs.MIB
    run = read(report_runs.whole(tmp_path / "a", steps=30, peak=800 * mib))
    found = d.memory(run)
    assert found["rank_peak"] == 224 * mib and found["planned"] == 210 * mib and d.peak_bytes(run) == 916 * mib
    assert any(
        "rank 0 took 224 MiB of its own at the peak of the first step, the memory plan said 210 (+6.7 %)" in f["text"]
        and f["level"] == "good"
        for f in d.findings(run)
    )
    over = d.findings(read(report_runs.whole(tmp_path / "b", steps=30, peak=900 * mib)))
    assert any("said 210 (+54.3 %)" in f["text"] and f["level"] == "note" for f in over)


def test_communication_is_averaged_over_ranks_with_its_waiting(tmp_path):
    found = d.communication(read(report_runs.whole(tmp_path / "a", steps=3)))
    first = found["rows"][0]
    assert (
        first["op"] == "reduce_bucket"
        and first["bytes"] == 2 * 2**20
        and first["ranks"] == 2
        and first["count"] == 4800
    )
    assert (
        first["total_ms"] == pytest.approx(4800 * 1.15)
        and first["waiting_ms"] == 1500.0
        and first["slowest_ms"] == pytest.approx(1.2)
    )
    assert [r["op"] for r in found["rows"]][1:] == ["barrier", "all_reduce", "all_reduce"]


def test_a_timeline_begins_at_zero_and_a_long_one_keeps_whole_last_steps(tmp_path, monkeypatch):
    folder = report_runs.whole(tmp_path / "a", steps=3)
    run = read(folder)
    whole = d.timeline(run)
    events = [e for found in run.traces.values() for e in found if e["ph"] == "X"]
    assert (
        whole["total"] == len(whole["events"]) == len(events) and whole["left_out"] == 0 and whole["events"][0][2] == 0
    )
    assert [(lane["rank"], lane["name"]) for lane in whole["lanes"]] == [
        (r, n) for r in (0, 1) for n in ("steps", "compute", "communication", "disk", "waiting")
    ]
    monkeypatch.setattr(d, "MAX_EVENTS", len(events) // 2)
    cut = d.timeline(run)
    assert len(cut["events"]) <= d.MAX_EVENTS and cut["left_out"] == len(events) - len(cut["events"])
    assert cut["steps"][-1][2] == "step 4" and cut["steps"][0][0] >= 0
    names = {cut["names"][e[1]] for e in cut["events"]}
    assert "step 4" in names and "step 1" not in names


def noted(folder: Path, *notes: dict, **info) -> Path:
    """A run folder with these notes."""
    folder.mkdir(exist_ok=True)
    report_runs.metrics(folder / "metrics.jsonl", 5)
    with (folder / "metrics.jsonl").open("a") as f:
        f.write("".join(json.dumps(n) + "\n" for n in notes))
    if info:
        (folder / "run.json").write_text(json.dumps(info))
    return folder


def test_the_last_batch_of_a_pipeline_is_shown_as_predicted_and_as_measured(tmp_path):
    """1F1B, 2 stages, 4 micro-batches of 30 and 60 ms: the second stage waits for one forward."""
    run = read(noted(tmp_path, report_runs.batch(step=3), report_runs.batch(step=5, late=1.5)))
    found = d.pipeline(run)
    assert (found["step"], found["ranks"], found["micro_batches"]) == (5, 2, 4)
    assert [a[0] for a in found["actions"][0]] == ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"]
    predicted, measured = found["predicted"], found["measured"]
    makespan = 10e3 + 4 * 60e3 + 20e3  # the first forward before it and the last backward behind it
    assert predicted["us"] == makespan and predicted["waits"] == pytest.approx(1 - 4 * 90e3 / (2 * makespan))
    last = predicted["spans"][0][-1]
    assert measured["spans"][0][-1] == [1.5 * last[0], 1.5 * last[0] + last[1] - last[0]]
    assert measured["us"] == 1.5 * 250e3 + 20e3 and measured["waits"] == pytest.approx(1 - 360 / (2 * 395))
    assert found["stages"] == [dict.fromkeys("FIW", 0.01), dict.fromkeys("FIW", 0.02)]
    said = [f["text"] for f in d.findings(run)]
    assert any("ranks of the pipeline wait 54 % of a batch" in t and "its schedule has 33 %" in t for t in said), said
    assert any("stage 1 of the pipeline takes 1.33 times the mean" in t for t in said)
    assert not any(e["kind"] == "pipeline" for e in d.events(run))


@pytest.mark.parametrize(
    "wrong",
    [{"schedule": "0F0 x"}, {"measured": [[[0, 1]]]}, {"predicted": None}, {"costs": [[1, 2]]}, {"schedule": 5}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_times_of_a_batch_that_are_not_whole_are_a_problem_and_no_picture(tmp_path, wrong):
    run = read(noted(tmp_path, {**report_runs.batch(), **wrong}))
    shown = d.digest(run)
    assert shown["pipeline"] is None and any("times of a pipeline's batch" in p for p in shown["problems"])


def test_what_stands_out(tmp_path):
    def texts(rows):
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        return {f["level"]: f["text"] for f in d.findings(read(tmp_path))}

    base = [{"step": s, "loss": 5 - s / 50, "time_s": 1.0, "at": s} for s in range(1, 101)]
    assert texts(base) == {}
    assert "not finite from step 50" in texts([{**r, "loss": "nan"} if r["step"] >= 50 else r for r in base])["bad"]
    assert "50 of 100 steps were skipped" in texts([{**r, "skipped": r["step"] % 2 == 0} for r in base])["bad"]
    assert "waiting for data" in texts([{**r, "wait": {"data_s": 0.4}} for r in base])["bad"]
    assert "ends higher" in texts([{**r, "loss": r["step"] / 50} for r in base])["bad"]
    assert "more than twice the median" in texts([{**r, "time_s": 5.0} if r["step"] == 70 else r for r in base])["note"]
    assert "compute" not in str(texts([{**r, "wait": {"data_s": 0.01}} for r in base]).get("bad"))


def test_a_loss_that_is_lost_is_no_good_figure(tmp_path):
    """What it was before stood as the run's loss, and was the best of a comparison."""
    rows = [{"step": s, "loss": 5 - s / 50 if s < 90 else "nan"} for s in range(1, 101)]
    found = d.summary(read(written(tmp_path, rows)))
    assert (found["loss"], found["tail_loss"], found["first_loss"]) == ("nan", None, 4.98)
    assert found["best_loss"] == pytest.approx(5 - 89 / 50)


@pytest.mark.parametrize(
    "skipped, level, text", [(False, "bad", "at step 50"), (True, "note", "at 2 steps, from 50 to 60")]
)
def test_a_loss_that_came_back_is_not_said_to_be_lost(tmp_path, skipped, level, text):
    rows = [{"step": s, "loss": 5 - s / 50} for s in range(1, 101)]
    for at in (50, 60)[: 1 + skipped]:
        rows[at - 1] |= {"loss": "inf", "skipped": skipped}
    said = [f for f in d.findings(read(written(tmp_path, rows))) if "finite" in f["text"]]
    assert [(f["level"], f["text"]) for f in said] == [(level, f"the loss was not finite {text}")]


def test_of_very_many_events_the_last_are_listed_and_the_others_counted(tmp_path):
    rows = [{"step": s, "skipped": True} for s in range(1, 1201)]
    rows.append({"event": "checkpoint", "step": 1200, "seconds": 1, "what": "save", "path": "x"})
    found = d.events(read(written(tmp_path, rows)))
    assert len(found) == 1001 and found[-1]["kind"] == "checkpoint"
    assert found[0]["text"] == "201 earlier ones are not listed (201 skipped steps)" and found[0]["step"] == 201


def test_counts_of_the_heap_are_no_bytes(tmp_path):
    rows = [{"step": s, "loss": 10**400, "memory": {"process": 5, "heap": {"live": 7, "refusals": 3}}} for s in (1, 2)]
    run = read(written(tmp_path, rows))
    found = d.memory(run)
    assert d.curves(run) == {}  # an integer that is no number for a page
    assert [r["name"] for r in found["rows"] if r["count"]] == ["heap.refusals"] and len(found["rows"]) == 3


def test_what_begins_together_is_shown_in_what_holds_it_and_a_step_that_is_too_long_is_said(tmp_path, monkeypatch):
    def span(name: str, ts: float, dur: float) -> dict:
        return {"ph": "X", "pid": 0, "tid": 1, "name": name, "ts": ts, "dur": dur}

    events = [span("inner", 5, 1), span("outer", 5, 9), span("ProfilerStep#3", 5, 20), span("later", 7, 1)]
    (tmp_path / "trace.rank0.json").write_text(json.dumps({"traceEvents": events}))
    found = d.timeline(read(tmp_path))
    assert [found["names"][e[1]] for e in found["events"]] == ["ProfilerStep#3", "outer", "inner", "later"]
    assert found["steps"] == [[0.0, 20.0, "ProfilerStep#3"]] and found["whole_steps"]
    monkeypatch.setattr(d, "MAX_EVENTS", 3)
    found = d.timeline(read(tmp_path))
    assert found["left_out"] == 1 and not found["whole_steps"]


# ---- the page --------------------------------------------------------------------------------------------------------
EVIL = "</script><script>document.title='owned'</script><!-- & \u2028"


def test_the_page_is_one_file_that_loads_nothing_and_text_of_a_run_stays_text(tmp_path):
    folder = report_runs.whole(tmp_path / "a", steps=5, name=EVIL, config={"note": EVIL, "big": math.inf})
    text = write_report(folder, tmp_path / "out.html").read_text()
    assert text.count("</script>") == 2 and "<script>document" not in text
    assert not re.search(r'(?:src|href)\s*=\s*"(?!#|data:)', text) and "@import" not in text and "url(http" not in text
    assert "default-src 'none'" in text
    assert data_of(tmp_path / "out.html")["runs"][0]["config"]["note"] == EVIL
    assert json.loads(embedded({"a": [math.nan, -math.inf], "b": EVIL})) == {"a": ["nan", "-inf"], "b": EVIL}


def test_a_title_can_not_break_the_template():
    text = page([{"name": "@DATA@ <b>", "path": "x"}], version="1")
    assert "<title>@DATA@ &lt;b&gt; · deepc</title>" in text


def test_command_line(tmp_path, capsys):
    from deepc.cli import main

    a, b = report_runs.whole(tmp_path / "x" / "a", steps=4), report_runs.whole(tmp_path / "y" / "a", steps=4, seed=1)
    assert main(["report", str(a)]) == 0 and (a / "report.html").stat().st_size > 50_000
    assert main(["report", str(a), str(b), "-o", str(tmp_path / "both.html")]) == 0
    assert [r["name"] for r in data_of(tmp_path / "both.html")["runs"]] == ["x/a", "y/a"]
    assert main(["report", str(a), "-o", str(tmp_path / "no" / "where.html")]) == 1
    assert main(["report", str(tmp_path / "nothing")]) == 2
    odd = report_runs.whole(tmp_path / "run\udcff", steps=2)  # a name that is no text
    assert main(["report", str(odd)]) == 0 and b"run? " in (odd / "report.html").read_bytes()
    out = capsys.readouterr()
    assert "both.html" in out.out and "Give another file with -o" in out.err and "there is no run folder" in out.err
    assert not list(a.glob(".*tmp"))


# ---- its script, without a browser -----------------------------------------------------------------------------------
def shown(page_file: Path, script: str | None = None):
    """The page's text; with a script what that returns (report_dom.js)."""
    if shutil.which("node") is None:
        pytest.skip("needs node (apt install nodejs)")
    command = ["node", str(Path(__file__).with_name("report_dom.js")), str(page_file), *([script] if script else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout) if script else done.stdout


CURVES = """
  return Object.fromEntries(all("div").filter((e) => e.attrs["data-curve"]).map((card) => {
    const nodes = [...card.all()];
    return [card.attrs["data-curve"], {
      title: nodes.find((e) => e.tag === "h3").textContent,
      log: nodes.find((e) => e.tag === "button").attrs["aria-pressed"],
      axis: nodes.filter((e) => e.attrs["text-anchor"] === "end").map((e) => e.textContent),
      marks: nodes.filter((e) => e.tag === "line" && e.attrs["stroke-width"] === "1.5").length,
      ys: nodes.filter((e) => e.tag === "path").map((e) => new Set(e.attrs.d.match(/ [^ML]+/g)).size),
    }];
  }));
"""


def test_curves_of_any_values_and_names_are_drawn(tmp_path):
    """A learning rate that is constant but for its last bit kept the page busy for ever; names of every object's
    properties ended it."""
    rows = [
        {
            "step": s,
            "at": s,
            "lr": 0.001 if s < 5 else math.nextafter(0.001, 1),
            "loss": 2.3 + 1e-5 * s,
            "grad_norm": 1e300 * (-1) ** s,
            "skipped": True,
        }
        for s in range(1, 4001)
    ]
    names = ("__proto__", "constructor", "valueOf", "<b>&", "perplexity")
    rows += [logged(s, s, **dict.fromkeys(names, float(s))) for s in (1, 2)]
    found = shown(write_report(written(tmp_path, rows)), CURVES)
    assert len(set(found["lr"]["axis"])) == len(found["lr"]["axis"]) >= 3 and found["lr"]["ys"] == [
        1,
        1,
    ]  # a flat line, of means
    assert len(set(found["loss"]["axis"])) == len(found["loss"]["axis"]) >= 3
    assert 100 < found["loss"]["marks"] < 1000  # one a pixel, of 4,000
    assert [found[n]["title"] for n in names if n != "__proto__"] == [n for n in names if n != "__proto__"]
    assert found["perplexity"]["log"] == "true" and found["loss"]["log"] == "false"


def test_figures_of_the_page(tmp_path):
    folder = written(tmp_path / "a", [{"step": s, "at": 60.0 * s - 0.3, "loss": "nan"} for s in (1, 2, 3)])
    (folder / "run.json").write_text(json.dumps({"started": "2026-11-21T20:00:00+00:00"}))
    text = shown(write_report(folder))
    assert "started 2026-11-21 20:00:00 UTC" in text and re.search(r"Made by .* on [-\d]+ [:\d]+ UTC\.", text)
    assert "none skipped, 3 min 0 s" in text and "Lossnan" in text
    worse = written(tmp_path / "b", [{"step": s, "loss": -3.0} for s in (1, 2, 3)])
    better = written(tmp_path / "c", [{"step": s, "loss": -4.5} for s in (1, 2, 3)])
    rows = 'return all("tr").map((r) => r.children.map((c) => c.textContent));'
    found = {r[0]: r[1:] for r in shown(write_report([worse, better, folder], tmp_path / "x.html"), rows)}
    assert found["last loss"] == ["-3", "-4.5−50.0 %", "nan"] and found["loss, mean of the last steps"][2] == "–"


def test_a_table_is_sorted_with_the_keyboard_and_says_so(tmp_path):
    folder = report_runs.whole(tmp_path / "a", steps=2)
    found = shown(
        write_report(folder),
        """
        const of = (tag) => [...find("comms").all()].filter((e) => e.tag === tag);
        const heads = () => of("th").map((h) => h.attrs["aria-sort"]);
        const first = heads();
        of("th")[0].fire("keydown", { key: " " });
        return [first, heads(), of("tr").slice(1).map((r) => r.children[0].textContent)];
        """,
    )
    assert set(found[0]) == {None} and found[1][:2] == ["ascending", "none"]
    assert found[2] == ["all_reduce", "all_reduce", "barrier", "reduce_bucket"]


# ---- in a browser ----------------------------------------------------------------------------------------------------
def _browser() -> str:
    found = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
    if found is None:
        pytest.skip("needs chromium (apt install chromium)")
    return found


def _headless(page_file: Path, size: str) -> list[str]:
    return [
        _browser(),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=5000",
        "--enable-logging=stderr",
        "--v=0",
        "--hide-scrollbars",
        f"--window-size={size}",
        f"--user-data-dir={page_file.parent / 'profile'}",
    ]


def dom(page_file: Path, *, size: str = "1280,900") -> tuple[str, str]:
    """(the page's DOM after its script, what the browser's console said)."""
    command = [*_headless(page_file, size), "--dump-dom", page_file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def missing(text: str) -> str:
    """What a page says is not in the run's folder."""
    return re.search(r'<div class="sub" id="missing">.*?</div>', text, re.S)[0]


@pytest.mark.full
def test_the_page_in_a_browser(tmp_path):
    folder = report_runs.whole(
        tmp_path / "run-a", steps=120, skipped=(3, 9), name=EVIL, config={"note": EVIL, "train_batch_size": 8}
    )
    text, console = dom(write_report(folder))
    assert console == ""
    assert 'data-ready="yes"' in text and "owned" not in re.search(r"<title>(.*?)</title>", text)[1]
    for curve in ("loss", "lr", "grad_norm", "tokens_per_s", "eval_loss"):
        card = re.search(rf'data-curve="{curve}".*?</svg>', text, re.S)[0]
        assert re.search(r'<path d="M[\d.]+ [\d.]+L', card) and "NaN" not in card, curve
    assert "reduce_bucket" in text and "2 of 120 steps were skipped" in text and 'id="against"' in text
    assert re.search(r"<canvas[^>]*height=\"\d{3}", text)
    assert text.count('class="pill skipped"') == 2 and "checkpoints/step100" in text


@pytest.mark.full
@pytest.mark.parametrize("size", [(1280, 900), (390, 800)])
def test_what_is_drawn(tmp_path, size):
    """A picture of the page: it has the window's size, and curves and text on it, not one colour."""
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    path = write_report(report_runs.whole(tmp_path / "run-a", steps=60, name="run-a"))
    picture = tmp_path / "page.png"
    subprocess.run(
        [*_headless(path, "{},{}".format(*size)), f"--screenshot={picture}", path.as_uri()],
        capture_output=True,
        timeout=120,
        check=True,
    )
    with image.open(picture) as shown:
        assert shown.size == size
        colours = shown.convert("RGB").getcolors(size[0] * size[1])
        bands = [shown.convert("RGB").crop((0, y, size[0], y + size[1] // 4)) for y in range(0, size[1], size[1] // 4)]
    background = max(colours)[0] / (size[0] * size[1])
    assert 0.3 < background < 0.99 and len(colours) > 50, (background, len(colours))
    assert all(len(b.getcolors(size[0] * size[1])) > 5 for b in bands[:4])  # from top to bottom


@pytest.mark.full
def test_a_comparison_in_a_browser(tmp_path):
    a = report_runs.whole(tmp_path / "a", steps=60, config={"zero_optimization": {"stage": 2}, "same": 1})
    b = report_runs.whole(
        tmp_path / "b", steps=60, seed=3, data_s=0.05, config={"zero_optimization": {"stage": 3}, "same": 1}
    )
    text, console = dom(write_report([a, b], tmp_path / "both.html"), size="390,800")
    assert console == "" and 'data-ready="yes"' in text
    differences = re.search(r'id="differences".*?</table>', text, re.S)[0]
    assert "zero_optimization.stage" in differences and "same" not in differences
    assert "waiting" in re.search(r'id="comparison".*?</table>', text, re.S)[0] and 'id="chooser"' in text


def test_sections_without_content_are_named_in_one_place_in_a_browser(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    rows = report_runs.metrics(folder / "metrics.jsonl", 60)
    text, console = dom(write_report(folder))
    assert console == "" and 'data-ready="yes"' in text

    def heading(name: str) -> str:
        return re.search(rf'<h2 id="{name}"[^>]*>', text)[0]

    assert not any("hidden" in heading(name) for name in ("time", "memory", "events", "configuration"))
    assert all('hidden=""' in heading(name) for name in ("timeline", "communication"))
    assert all(re.search(rf'<a href="#{name}" hidden="">', text) for name in ("timeline", "communication"))
    absent = missing(text)
    assert "a timeline" in absent and "comms_logger" in absent and "docs/" not in absent
    mean = sum(r["loss"] for r in rows[-5:]) / 5
    tile = re.search(r'<div class="label">Loss</div><div class="value">([\d.]+)</div><div class="more">([^<]*)', text)
    assert math.isclose(float(tile[1]), mean, rel_tol=1e-3) and tile[2].startswith("mean of the last 5 steps, from ")
    assert re.search(r'<div class="label">Validation loss</div><div class="value">3.1</div>', text)


def test_a_pipeline_in_a_browser(tmp_path):
    """The predicted schedule above the measured one, on one scale."""
    text, console = dom(write_report(noted(tmp_path / "run", report_runs.batch("zb-v", late=2.0))))
    assert console == "" and 'data-ready="yes"' in text
    both = re.findall(r'<g data-lanes="(\w+)">(.*?)</g>', text, re.S)
    assert [name for name, _ in both] == ["predicted", "measured"]
    ends = []
    for name, lanes in both:
        bars = re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="\d+" fill="#', lanes)
        rows = re.findall(rf">{name}: [^<]*, ranks wait [\d.]+ %<|>(rank \d)<", lanes)
        assert len(bars) == 2 * 4 * (2 * 3) + 2 and rows == ["", "rank 0", "rank 1"]
        ends.append((max(float(x) + float(w) for x, _, w in bars[1:]), {float(y) for _, y, _ in bars}))
    assert max(ends[0][1]) < min(ends[1][1]) and len(ends[0][1]) == len(ends[1][1]) == 2
    assert "the schedule of a pipeline" not in missing(text) and re.search(r'id="stages".*?stage 3</td>', text, re.S)


@pytest.mark.full
def test_a_pipeline_that_has_left_no_times_is_named_in_a_browser(tmp_path):
    text, console = dom(write_report(noted(tmp_path / "run", config={"pipeline": {"stages": 2}})))
    assert console == "" and "engine.measure_batch" in missing(text)
    text, _ = dom(write_report(noted(tmp_path / "other")))
    assert "engine.measure_batch" not in missing(text) and re.search(r'<h2 id="pipeline" hidden="">', text)


@pytest.mark.full
@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "trace.rank0.json", "comms.rank1.json", "flops.txt"])
def test_parts_of_a_run_in_a_browser(tmp_path, name):
    whole = report_runs.whole(tmp_path / "whole", steps=1)
    (tmp_path / "part").mkdir()
    shutil.copy(whole / name, tmp_path / "part" / name)
    text, console = dom(write_report(tmp_path / "part"))
    assert console == "" and 'data-ready="yes"' in text


_USER = """<script>
addEventListener("load", () => setTimeout(() => {
  const said = {}, all = (q) => [...document.querySelectorAll(q)], text = (q) => document.querySelector(q).textContent;
  const press = (label) => all("button").find((b) => b.textContent.trim() === label).click();
  const point = (node, kind, x, y, more) => { const r = node.getBoundingClientRect(); node.dispatchEvent(new PointerEvent(kind, { bubbles: true, clientX: r.left + x, clientY: r.top + y, pointerId: 1, pointerType: "mouse", ...more })); };
  const axis = () => all('[data-curve="loss"] .axis text').map((t) => t.textContent).join(" ");
  said.steps = axis();
  press("by time"); said.time = axis();
  press("by step");
  const chart = document.querySelector('[data-curve="loss"] .chart');
  point(chart, "pointermove", 200, 80); said.tip = text(".tip");
  point(chart, "pointerdown", 120, 80); point(chart, "pointermove", 220, 80); point(chart, "pointerup", 220, 80); said.zoomed = axis();
  press("whole run"); said.whole = axis();
  const range = document.querySelector('input[type="range"]'); range.value = 0.9; range.dispatchEvent(new Event("input")); said.smoothed = all('[data-curve="loss"] path[fill="none"]').length;
  document.querySelector('[data-curve="loss"] button').click(); said.log = document.querySelector('[data-curve="loss"] button').getAttribute("aria-pressed");
  const canvas = document.querySelector("canvas");
  canvas.setPointerCapture = () => {};
  for (const key of ["+", "+", "ArrowRight", "-", "0"]) canvas.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  point(canvas, "pointerdown", 400, 60); point(canvas, "pointermove", 300, 60); point(canvas, "pointerup", 300, 60);
  canvas.dispatchEvent(new WheelEvent("wheel", { ctrlKey: true, deltaY: -100, clientX: 500, bubbles: true, cancelable: true }));
  let hit = "";
  for (let x = 160; x < 900 && !hit; x += 7) { point(canvas, "pointermove", x, 46, { pointerId: 2 }); if (!document.querySelector(".tip").hidden) hit = text(".tip"); }
  said.event = hit;
  document.querySelector("#comms th").click(); said.sorted = all("#comms tbody tr").map((r) => r.firstChild.textContent);
  if (document.querySelector("#chooser")) { all("#chooser button")[1].click(); said.chosen = text("#measured"); }
  const before = document.documentElement.dataset.theme;
  document.querySelector("header button").click(); said.theme = document.documentElement.dataset.theme !== before;
  setTimeout(() => { said.view = text(".timeline th"); document.body.dataset.said = JSON.stringify(said); }, 300);
}, 50));
</script>"""  # noqa: E501


@pytest.mark.full
@pytest.mark.parametrize("runs", [1, 2])
def test_what_a_reader_does_works(tmp_path, runs):
    import html

    folders = [
        report_runs.whole(tmp_path / n, steps=80, seed=i, peak=(800 + 100 * i) * report_runs.MIB)
        for i, n in enumerate("ab"[:runs])
    ]
    path = write_report(folders, tmp_path / "page.html")
    path.write_text(path.read_text().replace("</body>", _USER + "</body>"))
    text, console = dom(path)
    assert console == ""
    said = json.loads(html.unescape(re.search(r'data-said="([^"]*)"', text)[1]))
    assert "80" in said["steps"].split() and " s" in said["time"] and said["whole"] == said["steps"] != said["zoomed"]
    assert (
        said["tip"].startswith("step")
        and said["smoothed"] == 2 * runs
        and said["log"] == "true"
        and said["theme"] is True
    )
    assert "rank 0" in said["event"] and said["sorted"] == sorted(said["sorted"]) and said["view"].startswith("in view")
    assert runs == 1 or "900 MiB" in said["chosen"]
