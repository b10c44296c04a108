"""deepc tune: what is tried, in which order, what is kept, and trials that die."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from deepc.cli import main
from deepc.errors import ArgumentError
from deepc.launch import tune
from deepc.launch.tune import Point, Space, Trial, Tuning, measure, options_of

BASE = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}


def speed(p: Point) -> Trial:
    """Best at micro-batch 8 of stage 1; 16 does not fit."""
    if p.micro > 8:
        return Trial(p, "out of memory", note="OutOfMemoryError: no")
    return Trial(p, "ok", 10.0 * p.micro - p.stage, 1.0)


def tuned(folder: Path, measured=speed, said=None, **more) -> tuple[Tuning, list[str]]:
    said = [] if said is None else said
    tuning = Tuning(folder, "key", overwrite=False)
    space = Space(BASE, 2, options_of({}), fuse=False)
    how = {"most": 50, "patience": 5, "grid": False} | more
    tuning.run(space, [space.first], measured, say=said.append, **how)
    return tuning, said


def test_the_best_is_found_and_the_batch_stays(tmp_path):
    tuning, said = tuned(tmp_path)
    best = tuning.best.point
    assert (best.micro, best.accumulation, best.stage) == (8, 2, 0)
    assert tuning.trials[0].point == Point(2, 8, 3)
    assert all(t.point.micro * t.point.accumulation * 2 == 32 for t in tuning.trials)
    assert len(tuning.trials) == len({t.point for t in tuning.trials}) < 15
    assert "out of memory: OutOfMemoryError" in tuning.table() and "best so far" in said[0]
    config = best.apply(BASE)
    assert config["gradient_accumulation_steps"] == 2 and config["train_batch_size"] == 32
    assert BASE["zero_optimization"] == {"stage": 3}


def test_a_grid_tries_everything(tmp_path):
    tuning, _ = tuned(tmp_path, grid=True, patience=10**9)
    assert len(tuning.trials) == 15  # micro-batches 1 to 16, stages 0, 1, 3


def test_it_goes_on_where_it_was_interrupted(tmp_path):
    left = 3

    def dies(p: Point) -> Trial:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return speed(p)

    told: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        tuned(tmp_path, dies, told)
    assert told[-1].startswith("stopped in micro-batch ")
    assert told[-1].endswith(f"the same command goes on after the 3 trials that {tmp_path / 'state.json'} has")
    before = json.loads((tmp_path / "state.json").read_text())["trials"]
    assert len(before) == 3
    tuning, said = tuned(tmp_path)
    assert "going on after 3 trials" in said[0]
    assert tuning.best.point.micro == 8
    assert [t.point for t in tuning.trials[:3]] == [Point(**t["point"]) for t in before]
    with pytest.raises(ArgumentError, match="of another configuration"):
        Tuning(tmp_path, "other", overwrite=False)
    assert Tuning(tmp_path, "other", overwrite=True).trials == []
    (tmp_path / "state.json").write_text('{"trials": [')
    with pytest.raises(ArgumentError, match="can't be read"):
        Tuning(tmp_path, "key", overwrite=False)


def test_where_nothing_fits_at_first_it_gets_smaller(tmp_path):
    def small(p: Point) -> Trial:
        return Trial(p, "ok", 1.0, 1.0) if (p.micro, p.stage) == (1, 3) else Trial(p, "out of memory")

    assert tuned(tmp_path, small)[0].best.point == Point(1, 16, 3)


PROGRAM = """
    import json, os, sys, time
    config = json.load(open(sys.argv[1]))
    micro = config["train_micro_batch_size_per_gpu"]
    if micro == 4:
        sys.exit("RuntimeError: something else")
    if micro == 8:
        sys.exit("deepc.errors.OutOfMemoryError: the plan needs more")
    os.makedirs(os.environ["DEEPC_RUN_DIR"])
    with open(os.environ["DEEPC_RUN_DIR"] + "/metrics.jsonl", "w", buffering=1) as f:
        for step in range(1, 3 if micro == 16 else 10**9):
            f.write(json.dumps({"step": step, "samples": 32 * step, "time_s": 0.5 / micro}) + "\\n")
            f.write('{"event": "log"}\\n' * (step % 2))
            time.sleep(0.002)
            if micro == 32 and step == 6:
                sys.exit("deepc.errors.OutOfMemoryError: in the sixth step")
"""


@pytest.mark.parametrize(
    "micro, status, said",
    [
        (2, "ok", ""),
        (4, "failed", "something else"),
        (8, "out of memory", "plan needs more"),
        (16, "failed", "ended"),
        (32, "out of memory", "in the sixth step"),  # it had the speed of its first steps, and was taken for the best
    ],
)
def test_a_trial_is_ended_and_told(tmp_path, micro, status, said):
    """The program stands in for `deepc run`; the endless one is ended when its steps are done."""
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    command = [sys.executable, "-S", str(tmp_path / "program.py"), "{config}"]
    trial = measure(Point(micro, 1, 0), {}, command, tmp_path / "trial", first=3, last=8, limit_s=60)
    assert trial.status == status and said in trial.note
    if status == "ok":
        assert trial.step_s == pytest.approx(0.25)
        assert trial.samples_per_s == pytest.approx(32 / 0.25)


def test_a_trial_that_never_gets_there_is_too_slow(tmp_path):
    (tmp_path / "program.py").write_text("import time\nwhile True:\n    time.sleep(0.01)\n")
    command = [sys.executable, "-S", str(tmp_path / "program.py")]
    assert measure(Point(1, 1, 0), {}, command, tmp_path / "t", first=1, last=2, limit_s=0.5).status == "too slow"


@pytest.mark.parametrize(
    "section, said",
    [
        ({"tuner_typo": 1}, "unknown"),
        ({"metric": "flops"}, "throughput or latency"),
        ({"end_profile_step": 2}, "above"),
        ({"tuner_num_trials": 0}, "at least 1"),
        ({"min_train_micro_batch_size_per_gpu": "auto"}, "min_train_micro_batch_size_per_gpu 'auto' must be a whole"),
        ({"overwrite": "false"}, "overwrite 'false' must be true or false"),
        ({"results_dir": 3}, "results_dir 3 must be"),
        ("yes", "must be an object"),
    ],
)
def test_a_wrong_section_says_what(section, said):
    with pytest.raises(ArgumentError, match=said):
        options_of({"autotuning": section})


def test_space():
    space = Space(
        {**BASE, "pipeline": {"stages": 2}, "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
        4, options_of({"autotuning": {"max_train_micro_batch_size_per_gpu": 4}}), fuse=True,
    )  # fmt: skip
    assert (space.micros, space.zero, space.fuses, len(space.schedules)) == ([1, 2, 4], [1, 3], [False, True], 5)
    assert space.first == Point(2, 8, 1, False, "1f1b")
    with pytest.raises(ArgumentError, match="widen"):
        Space(BASE, 2, options_of({"autotuning": {"min_train_micro_batch_size_per_gpu": 17}}), fuse=False)


def test_an_offload_to_nowhere_leaves_all_stages_open():
    """As DeepSpeed's own configurations have it; stage 3 alone was tried."""
    nowhere = {"stage": 1, "offload_optimizer": {"device": "none"}, "offload_param": {"device": "none"}}
    assert Space({**BASE, "zero_optimization": nowhere}, 2, options_of({}), fuse=False).zero == [0, 1, 3]


def test_everything_is_everything(tmp_path, monkeypatch, capsys):
    """A configuration's gridsearch ended when 5 in a row were no better."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tune, "measure", lambda point, *_, **__: Trial(point, "ok", float(point.micro == 2), 1.0))
    words = ["tune", "--num_ranks", "2", "ds.json", "train.py", "ds.json"]

    def trials(section: dict, *more: str) -> int:
        Path("ds.json").write_text(json.dumps({**BASE, "autotuning": {"overwrite": True, **section}, "deepc": None}))
        assert main([words[0], *more, *words[1:]]) == 0, capsys.readouterr().err
        return len(json.loads(Path("autotuning_results/state.json").read_text())["trials"])

    assert trials({"tuner_type": "gridsearch"}) == 15
    assert "trial 15 of at most 15" in capsys.readouterr().out
    assert trials({}) == 5  # nothing next to the best is untried
    assert trials({"tuner_early_stopping": 3}, "--grid") == 15
    assert trials({"tuner_type": "gridsearch", "tuner_early_stopping": 3}) == 4
    assert trials({"tuner_type": "gridsearch", "tuner_num_trials": 7}) == 7


def test_sections_that_are_null_and_a_given_fusion_are_where_it_starts():
    base = {**BASE, "zero_optimization": None, "deepc": None, "pipeline": {"stages": 2}}
    space = Space(base, 4, options_of({}), fuse=True)
    made = space.first.apply(base)
    assert made["zero_optimization"] == {"stage": 0}
    assert made["deepc"] == {"fuse": False, "pipeline": {"schedule": "1f1b"}} and base["deepc"] is None
    fused = {**BASE, "deepc": {"fuse": "auto"}}
    assert Space(fused, 2, options_of({}), fuse=True).first.apply(fused)["deepc"] == {"fuse": "auto"}


def test_the_command_refuses(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(json.dumps(BASE))
    assert main(["tune", "none.json", "train.py"]) == 2
    assert main(["tune", "--num_ranks", "2", "ds.json", "train.py", "--lr", "1"]) == 2
    assert "--deepspeed_config ds.json" in capsys.readouterr().err
    assert main(["tune", "--num_ranks", "2", "--model", "gpt2", "ds.json", "train.py", "ds.json"]) == 2
    assert "belong together" in capsys.readouterr().err


TRAINING = """
    import sys, torch, deepc
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    engine, *_ = deepc.initialize(model=model, config=sys.argv[sys.argv.index("--config") + 1])
    for _ in range(10**6):
        loss = engine(torch.ones(engine.train_micro_batch_size_per_gpu(), 64)).square().mean()
        engine.backward(loss)
        engine.step()
"""


@pytest.mark.full
def test_a_script_is_tuned(tmp_path, capsys, monkeypatch):
    """Real trials on two ranks, and once more from the state file."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(textwrap.dedent(TRAINING))
    Path("ds.json").write_text(json.dumps({**BASE, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}))
    command = ["tune", "--num_ranks", "2", "--trials", "3", "ds.json", "train.py", "--config", "ds.json"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "trial 3 of at most 3" in shown and "best so far" in shown
    best = json.loads(Path("autotuning_results/ds_config.json").read_text())
    assert best["train_batch_size"] == 32 and "autotuning" not in best
    assert main(command) == 0
    assert "going on after 3 trials" in capsys.readouterr().out
    assert tune._steps(next(Path("autotuning_results").glob("*/run/metrics.jsonl")))[-1]["step"] >= 8


def _that_train(folder):
    """Processes whose command names the folder's script."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and str(folder / "train.py") in (entry / "cmdline").read_text():
                found.append(int(entry.name))
    return found


@pytest.mark.full
def test_a_tuning_that_is_killed_trains_no_further_and_goes_on_where_it_was(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script, state = tmp_path / "train.py", tmp_path / "results"
    script.write_text(textwrap.dedent(TRAINING))
    Path("ds.json").write_text(json.dumps({**BASE, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}))
    options = ["--num_ranks", "2", "--trials", "3", "--results", str(state)]
    command = ["tune", *options, "ds.json", str(script), "--config", "ds.json"]

    def done():
        return [t for f in state.glob("*.json") for t in json.loads(f.read_text()).get("trials", ())]

    with subprocess.Popen([sys.executable, "-m", "deepc", *command], stdout=subprocess.DEVNULL) as tuning:
        while not (done() and len(list(state.glob("*/run/metrics.jsonl"))) > 1):  # in the second trial
            assert tuning.poll() is None
            time.sleep(0.05)
        tuning.kill()
    before = done()
    assert 1 <= len(before) < 3
    while _that_train(tmp_path):  # a hang is what fails
        time.sleep(0.05)
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert f"going on after {len(before)} trials" in shown and "trial 3 of at most 3" in shown
    assert done()[: len(before)] == before and len(done()) == 3
