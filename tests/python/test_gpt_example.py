"""examples/gpt: its data and model, and a whole tiny run of train.py through the launcher: plan, progress, picture,
sample, resume."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from programs import run_python

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "gpt"
TIMEOUT = 300


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch):
    """data and model of the example, imported as train.py imports them, and forgotten after the test."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.syspath_prepend(str(EXAMPLE))
    for name in ("data", "model", "report"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("data"), importlib.import_module("model")
    for name in ("data", "model", "report"):
        sys.modules.pop(name, None)
    torch.set_num_threads(threads)


# ---- data ------------------------------------------------------------------------------------------------------------


def test_standard_library_is_split_by_file(modules):
    data, _ = modules
    corpus = data.load(None, 256)
    assert corpus.files > 100 and len(corpus.train) > 10 * len(corpus.validation) > 0
    assert 0.01 < len(corpus.validation) / (len(corpus.train) + len(corpus.validation)) < 0.15
    # a validation file's text is nowhere in the training text
    head = bytes(corpus.validation[:400].tolist())
    assert head not in bytes(corpus.train.tolist())
    assert 4.0 < corpus.bits_per_byte_order0 < 5.5


def test_order0_entropy_is_that_of_the_definition(modules):
    data, _ = modules
    text = torch.tensor([0] * 4 + [1] * 2 + [2] + [3], dtype=torch.uint8)
    assert data.Corpus(text, text, 1, "").bits_per_byte_order0 == pytest.approx(1.75, abs=1e-12)


def test_one_file_is_split_at_its_end(modules, tmp_path):
    data, _ = modules
    file = tmp_path / "book.txt"
    file.write_bytes(bytes(range(1, 256)) * 100)
    corpus = data.load(str(file), 64)
    assert bytes(torch.cat([corpus.train, corpus.validation]).tolist()) == file.read_bytes()
    assert len(corpus.validation) == 1275


def test_folder_skips_hidden_and_binary_files(modules, tmp_path):
    data, _ = modules
    for i in range(60):
        (tmp_path / f"{i}.txt").write_bytes(b"text %02d\n" % i * 50)
    (tmp_path / "binary").write_bytes(b"\0" * 5000)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x").write_bytes(b"hidden" * 1000)
    corpus = data.load(str(tmp_path), 32)
    assert corpus.files == 60 and b"hidden" not in bytes(torch.cat([corpus.train, corpus.validation]).tolist())


def test_too_little_or_no_data_is_said(modules, tmp_path):
    data, _ = modules
    (tmp_path / "short").write_text("short")
    with pytest.raises(ValueError, match="5 bytes of text: at least 1028"):
        data.load(str(tmp_path / "short"), 256)
    with pytest.raises(FileNotFoundError, match="DATA=path"):
        data.load(str(tmp_path / "nowhere"), 256)


def test_batches_depend_on_seed_and_index_only(modules):
    data, _ = modules
    text = torch.arange(1000).to(torch.uint8)
    one, two = data.Sampler(text, 16, 4, seed=1), data.Sampler(text, 16, 4, seed=1)
    x, y = one.batch(7)
    one.batch(8)
    assert torch.equal(two.batch(7)[0], x) and x.shape == (4, 16)
    assert torch.equal(x[:, 1:], y[:, :-1])  # targets are the inputs shifted by one
    assert not torch.equal(one.batch(8)[0], x) and not torch.equal(data.Sampler(text, 16, 4, seed=2).batch(7)[0], x)


def test_validation_windows_cover_the_text(modules):
    data, _ = modules
    text = torch.zeros(10_000, dtype=torch.uint8)
    starts = data.validation_starts(text, 100, 32)
    assert len(starts) == 32 and starts[0] == 0 and starts[-1] == 10_000 - 101
    assert len(data.validation_starts(text, 100, 10**6)) == 99


# ---- model -----------------------------------------------------------------------------------------------------------


def test_model_sizes(modules):
    _, gpt = modules
    count = {name: sum(p.numel() for p in gpt.GPT(config).parameters()) for name, config in gpt.SIZES.items()}
    assert 9e6 < count["base"] < 12e6 and 24e6 < count["large"] < 27e6 and count["tiny"] < 2e5


def test_no_token_sees_a_later_one(modules):
    _, gpt = modules
    torch.manual_seed(0)
    model = gpt.GPT(gpt.SIZES["tiny"]).double()
    x = torch.randint(256, (1, 20))
    changed = x.clone()
    changed[0, 12] = (changed[0, 12] + 1) % 256
    a, b = model(x), model(changed)
    assert torch.equal(a[:, :12], b[:, :12]) and not torch.equal(a[:, 12], b[:, 12])


def test_loss_is_the_cross_entropy_of_the_logits(modules):
    _, gpt = modules
    torch.manual_seed(0)
    model = gpt.GPT(gpt.SIZES["tiny"])
    x, y = torch.randint(256, (2, 2, 16))
    logits = model(x).detach().double()
    expected = -logits.log_softmax(-1).gather(-1, y[..., None]).mean()
    assert float(model(x, y).detach()) == pytest.approx(float(expected), rel=1e-5)


def test_the_same_seed_writes_the_same_text(modules):
    _, gpt = modules
    torch.manual_seed(0)
    model = gpt.GPT(gpt.SIZES["tiny"])
    a = gpt.generate(model, b"def ", 30, context=64, seed=3)
    assert a == gpt.generate(model, b"def ", 30, context=64, seed=3) and len(a) == 34 and a.startswith(b"def ")
    assert a != gpt.generate(model, b"def ", 30, context=64, seed=4)


# ---- the run ---------------------------------------------------------------------------------------------------------


def train(*arguments: str, launcher: tuple[str, ...] = (), **env: str) -> tuple[str, str]:
    outer = {k: v for k, v in os.environ.items() if k != "DATA"}
    program = (*launcher, str(EXAMPLE / "train.py"), "--size", "tiny", "--device", "cpu", *arguments)
    done = run_python(*program, env={**outer, **env}, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


def losses(out: Path) -> list[dict[str, str]]:
    with (out / "loss.csv").open(newline="") as f:
        return list(csv.DictReader(f))


def test_two_ranks_train_report_save_and_resume(tmp_path):
    out = tmp_path / "run"
    text, err = train(
        "--ranks", "2", "--steps", "40", "--micro-batch", "8", "--lr", "3e-3", "--sample", "40", "--out", str(out)
    )
    assert "2 ranks on the CPU" in err
    assert "ZeRO stage 3, 2 ranks" in err and "optimizer states" in err  # the plan
    assert re.search(r"precision: (bf16|fp32) \(.+\)", text)  # which, and why
    assert re.search(r"deepc: step 1/40  loss \d+\.\d+ .* tokens/s", err) and re.search(
        r"deepc: step 40/40  loss \d+\.\d+ .* tokens/s .*val_loss .*ETA 0:00", err
    )
    assert (
        len((out / "metrics.jsonl").read_text().splitlines()) >= 40
        and json.loads((out / "run.json").read_text())["ranks"] == 2
    )
    assert re.search(
        r"validation \d+\.\d+ bits per byte; order-0 entropy of the same text \d+\.\d+: -?\d+\.\d+ below it", text
    )
    assert (out / "sample.txt").read_bytes().startswith(b"def ") and len((out / "sample.txt").read_bytes()) == 44
    if importlib.util.find_spec("matplotlib"):
        assert (out / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    else:
        assert "no picture, matplotlib is not installed" in text and not (out / "loss.png").exists()
    rows = losses(out)
    assert int(rows[-1]["step"]) == 40 and float(rows[-1]["validation"]) < 6.5  # an untrained model has 8
    summary = json.loads((out / "summary.json").read_text())
    assert (
        summary["steps"] == 40
        and summary["ranks"] == 2
        and summary["validation_bits_per_byte"] == float(rows[-1]["validation"])
    )

    # goes on where it was, on another number of ranks and another stage
    text, err = train(
        "--steps",
        "50",
        "--stage",
        "1",
        "--micro-batch",
        "16",
        "--lr",
        "3e-3",
        "--sample",
        "4",
        "--out",
        str(out),
        "--resume",
    )
    assert "resumed at step 40" in text and "trained 10 steps" in text
    rows = losses(out)
    assert [int(r["step"]) for r in rows] == sorted(int(r["step"]) for r in rows)
    assert int(rows[-1]["step"]) == 50 and float(rows[-1]["validation"]) < summary["validation_bits_per_byte"] + 0.05


@pytest.mark.full
def test_two_ranks_share_the_model_as_a_pipeline(tmp_path):
    out = tmp_path / "run"
    options = "--ranks 2 --pipeline 2 --steps 12 --lr 3e-3 --precision fp32 --sample 4 --out".split()
    text, err = train(*options, str(out))
    assert "pipeline: 2 ranks, 8 micro-batches a batch, schedule 1f1b; stages: blocks.0 | blocks.1" in err
    step = re.search(r"deepc: step 12/12  loss (\d+\.\d+) .* tokens/s", err)
    assert step is not None and float(step[1]) < 5  # ln 256 = 5.5 before training
    summary = json.loads((out / "summary.json").read_text())
    assert summary["ranks"] == summary["pipeline"] == 2 and summary["tokens"] == 12 * 8 * 2 * 64
    assert (out / "sample.txt").read_bytes().startswith(b"def ")


@pytest.mark.full
def test_two_ranks_share_every_layer(tmp_path):
    out = tmp_path / "run"
    text, err = train(*"--ranks 2 --tensor 2 --steps 12 --lr 3e-3 --precision fp32 --sample 4 --out".split(), str(out))
    assert "tensor parallelism over 2 ranks by tensor_parallel.partition_config: " in err
    assert "vocabulary 1, column 4, row 4, head 1" in err
    step = re.search(r"deepc: step 12/12  loss (\d+\.\d+) .* tokens/s", err)
    assert step is not None and float(step[1]) < 5  # ln 256 = 5.5 before training
    summary = json.loads((out / "summary.json").read_text())
    assert summary["ranks"] == summary["tensor"] == 2 and summary["tokens"] == 12 * 2 * 64
    assert (out / "sample.txt").read_bytes().startswith(b"def ")


def test_plain_python_trains_on_other_data_within_minutes(tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("the cat sat on the mat. " * 2000)
    text, _ = train(
        "--minutes",
        "0.02",
        "--precision",
        "fp32",
        "--accumulation",
        "2",
        "--sample",
        "4",
        "--data",
        str(book),
        "--out",
        str(tmp_path / "run"),
    )
    assert "precision: fp32 (asked for)" in text and str(book) in text
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] >= 1


@pytest.mark.full
def test_torchrun_runs_it_with_a_config_file(tmp_path):
    config = tmp_path / "ds_config.json"
    config.write_text(
        json.dumps({"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}})
    )
    text, err = train(
        "--steps",
        "3",
        "--sample",
        "4",
        "--precision",
        "fp32",
        "--deepspeed_config",
        str(config),
        "--out",
        str(tmp_path / "run"),
        launcher=("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
    )
    assert "ZeRO stage 2, 2 ranks" in err and "bfloat16" in err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["tokens"] == 3 * 2 * 3 * 64


def test_without_matplotlib_the_numbers_are_written(modules, tmp_path, monkeypatch):
    report = importlib.import_module("report")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    points = [
        report.Point(1, 64, 0.5, 7.9, None, 1e-3, 128.0, 1000),
        report.Point(2, 128, 1.0, 7.0, 7.25, 1e-3, 128.0, 1000),
    ]
    assert "matplotlib is not installed" in report.write_png(tmp_path / "loss.png", points, 4.9, "t")
    report.write_csv(tmp_path / "loss.csv", points)
    assert (
        report.read_csv(tmp_path / "loss.csv", 10) == points and report.read_csv(tmp_path / "loss.csv", 1) == points[:1]
    )


def test_resume_without_a_checkpoint_says_so(tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "DATA"}
    program = (str(EXAMPLE / "train.py"), "--size", "tiny", "--steps", "1", "--resume", "--out", str(tmp_path))
    done = run_python(*program, env=env, timeout=TIMEOUT)
    assert done.returncode != 0 and "there is no checkpoint" in done.stderr
