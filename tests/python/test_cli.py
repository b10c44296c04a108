"""The command line as a whole: the guide, help with examples, errors that name the fix; and `deepc bench`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import report_runs
from deepc import cli
from deepc.cli import main
from deepc.errors import ArgumentError
from deepc.observe.diagnose import bench, doctor
from programs import run_python

ROOT = Path(__file__).resolve().parents[2]


def test_without_arguments_a_guide(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(f"deepc {name}" in out for name in cli._COMMANDS) and "deepc.initialize" in out


@pytest.mark.parametrize("name", cli._COMMANDS)
def test_help_teaches(name, capsys):
    with pytest.raises(SystemExit) as exc:
        main([name, "--help"])
    out = capsys.readouterr().out
    assert exc.value.code == 0 and "examples:" in out and "exit code:" in out and f"deepc {name}" in out


# As the installed script; what it prints at its end is of its own process.
_SCRIPT = """import sys
from deepc.cli import main
try:
    main()
finally:
    print("torch:", "torch" in sys.modules)
    if sys.argv[-1] == "--version":
        import deepc
        print("later:", deepc.zero.Init is not None and "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    "words", [["--version"], *([n, "--help"] for n in cli._COMMANDS), ["ckpt", "export", "--help"]], ids=" ".join
)
def test_version_and_help_come_without_torch(words, tmp_path):
    (tmp_path / "deepc").write_text(_SCRIPT)
    done = subprocess.run([sys.executable, tmp_path / "deepc", *words], capture_output=True, text=True)
    assert done.returncode == 0 and "torch: False" in done.stdout, done.stdout + done.stderr
    if words == ["--version"]:
        import torch

        assert f"torch {torch.__version__}," in done.stdout and "later: True" in done.stdout


@pytest.mark.parametrize(
    "words, said",
    [
        (["config", "check", "ds.json"], "optimizer.params.lr"),
        (["config", "keys", "zero_optimization"], "zero_optimization.stage"),
        (["doctor", "nowhere"], "nowhere"),
        (["report", "run"], "report.html"),
    ],
    ids=["config check", "config keys", "doctor", "report"],
)
def test_what_asks_torch_nothing_comes_without_it(words, said, tmp_path):
    """Who asks about a run on a machine that is busy, or types many questions."""
    (tmp_path / "deepc").write_text(_SCRIPT)
    (tmp_path / "ds.json").write_text(json.dumps({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}))
    report_runs.whole(tmp_path / "run", steps=5)
    done = subprocess.run([sys.executable, tmp_path / "deepc", *words], cwd=tmp_path, capture_output=True, text=True)
    told = done.stdout + done.stderr
    assert done.returncode == 0 and "torch: False" in told and said in told, told


def test_python_m_deepc_does_without_torch_too():
    """And who imports deepc has all of it at once."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "deepc", "--version"], capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.startswith("deepc ")
    assert "argparse" in done.stderr and not re.search(r"\| *torch$", done.stderr, re.M)
    done = run_python("-c", "import sys, deepc; print('deepc.nn.loss' in sys.modules)", "-m", "deepc")
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize("name", cli._COMMANDS)
def test_examples_are_valid_command_lines(name):
    parser = cli.make_parser(name)
    for example in cli._COMMANDS[name].examples:
        words = shlex.split(example)
        assert words[0] == "deepc" and parser.parse_args(words[1:]).command == name, example


def test_examples_of_second_level_commands_are_valid():
    for name in ("ckpt", "config"):
        parser = cli.make_parser(name)
        nested = next(
            a
            for a in cli._leaf(
                parser, parser.parse_args([name, *(["ls", "x"] if name == "ckpt" else ["keys"])])
            )._actions
            if a.dest != "help"
        )
        assert nested is not None
        top = next(a for a in parser._actions if a.dest == "command").choices[name]
        for sub in next(a for a in top._actions if a.dest == f"{name}_command").choices.values():
            for line in re.findall(r"^  (deepc .*)$", sub.epilog, re.M):
                assert parser.parse_args(shlex.split(line)[1:]).command == name, line


@pytest.mark.parametrize(
    "words, says",
    [
        (["reprot"], "Did you mean report?"),
        (["config", "chek"], "Did you mean check?"),
        (["ckpt", "verify", "x", "--al"], "Did you mean --all?"),
        (["bench", "--jsn"], "Did you mean --json?"),
        (["--vershun"], "Did you mean --version?"),
    ],
)
def test_wrong_words_get_the_nearest_spelling(words, says, capsys):
    with pytest.raises(SystemExit) as exc:
        main(words)
    assert exc.value.code == 2 and says in capsys.readouterr().err


@pytest.fixture
def folder_of_mistakes(tmp_path, monkeypatch):
    """A folder with a script, a good and a torn configuration, a module, an empty folder and a file of noise."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ok.py").write_text("print(1)\n")
    (tmp_path / "ok.json").write_text('{"train_batch_size": 4}')
    (tmp_path / "torn.json").write_text('{"train_batch_size": 4')
    (tmp_path / "mistakes.py").write_text(
        "import torch\nx = 3\n\ndef number():\n    return 3\n\ndef model():\n    return torch.nn.Linear(8, 4)\n"
    )
    (tmp_path / "empty").mkdir()
    (tmp_path / "noise.bin").write_bytes(bytes(range(256)))
    return tmp_path


@pytest.mark.parametrize(
    "line, says",
    [
        ("run", "required: PROGRAM."),
        ("run none.py", "there is no script 'none.py'"),
        ("run empty", "'empty' is a folder: name the script in it"),
        ("run --num_gpus two ok.py", "'two' is not a whole number of at least 1"),
        ("run --master_port 99999999 ok.py", "'99999999' is not a port: a whole number from 1 to 65535"),
        ("run --hostfile none ok.py", "--hostfile none: No such file"),
        ("plan --config ok.json --model mistakes", "'mistakes' is not MODULE:FUNCTION, such as train.py:make_model"),
        ("plan --config ok.json --model none.py:f", "there is no file none.py"),
        ("plan --config ok.json --model mistakes.py:f", "can't find 'mistakes.py:f'"),
        ("plan --config ok.json --model mistakes.py:x", "'mistakes.py:x' is a value (int), and must be a function"),
        pytest.param(
            "plan --config ok.json --model mistakes.py:number",
            "returned int, not a torch.nn.Module",
            marks=pytest.mark.full,
        ),
        (
            "plan --config ok.json --model mistakes.py:model --ranks 0",
            "--ranks: '0' is not a whole number of at least 1",
        ),
        ("plan --config torn.json --model mistakes.py:model", "torn.json, line 1, column 23: not JSON"),
        ("estimate", "give --model and --config, or --params"),
        ("estimate --params -5", "--params -5"),
        (
            "estimate --config ok.json --model mistakes.py:model --batch 4x8:floof",
            "--batch '4x8:floof' is not [NAME=]SHAPE:DTYPE",
        ),
        pytest.param(
            "estimate --config ok.json --model mistakes.py:model --batch 4x8",
            "--loss MODULE:FUNCTION",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "estimate --config ok.json --model mistakes.py:model --batch 4x9",
            "the dry run failed with RuntimeError",
            marks=pytest.mark.full,
        ),
        ("config check none.json", "there is no file 'none.json'"),
        ("config check empty", "'empty' is a folder"),
        ("config keys nothing_like_it", "no key contains 'nothing_like_it'"),
        ("config schema -o none/schema.json", "--output none/schema.json: No such file"),
        ("report none", "there is no run folder 'none'"),
        ("report empty", "empty holds no run"),
        ("report ok.json", "ok.json is a file"),
        ("ckpt ls none", "there is no folder 'none'"),
        ("ckpt info ok.json", "'ok.json' is a file"),
        ("ckpt verify empty", "empty holds no deepc checkpoint"),
        ("ckpt export empty out --dtype int3", "invalid choice: 'int3'"),
        ("plan --schedule 1f1b --stages 2 --micro-batches 4 --svg none/x.svg", "none/x.svg: No such file"),
        ("tune -o none/x.json --num_ranks 2 ok.json ok.py ok.json", "there is no folder 'none'"),
        ("tune --results noise.bin --num_ranks 2 ok.json ok.py ok.json", "noise.bin: File exists"),
        ("bench cluster -o none/cluster.yaml", "--output none/cluster.yaml: there is no folder 'none'"),
        ("bench cluster --seconds -1", "seconds -1.0 must be a positive number"),
        ("bench --only speed", "unknown part 'speed'"),
        ("bench --seconds -1", "seconds -1.0 must be a positive number"),
        ("doctor none", "none: No such file or directory. Give the pid of a rank"),
        ("doctor noise.bin", "noise.bin: this flight record"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(line, says, folder_of_mistakes, capfd):
    try:
        code = main(shlex.split(line))
    except SystemExit as exc:
        code = exc.code
    printed = capfd.readouterr()
    assert code == 2 and says in printed.err, printed.err
    assert "Traceback" not in printed.err and f"deepc {line.split()[0]}" in printed.err


@pytest.mark.parametrize(
    "line, code",
    [
        ("config keys", 0),
        ("plan --schedule 1f1b --stages 2 --micro-batches 4", 0),
        ("plan --schedule 1f1b --stages 2 --micro-batches 4 --svg 1f1b.svg", 141),  # not written
        ("config check ok.json --ranks 2", 141),
        ("estimate --params 7e9", 141),
        ("run none.py", 2),
    ],
)
def test_a_check_is_not_passed_by_a_reader_that_leaves(line, code, folder_of_mistakes, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with contextlib.suppress(BrokenPipeError), open(writer, "w", buffering=1) as nobody_reads:
        monkeypatch.setattr(sys, "stdout", nobody_reads)
        monkeypatch.setattr(sys, "stderr", nobody_reads)
        assert main(shlex.split(line)) == code
    assert not (folder_of_mistakes / "1f1b.svg").exists()


def test_an_interrupt_that_an_import_catches_counts(monkeypatch, capfd):
    """torch's imports catch ^C at times: the ranks were started all the same."""

    def imports():
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(cli, "complete", imports)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever started the tests
    try:
        assert main(["estimate", "--params", "1e6"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "deepc estimate: interrupted\n")


def test_the_documentation_has_every_command():
    text = (ROOT / "docs" / "cli.md").read_text()
    assert [n for n in cli._COMMANDS if f"deepc {n}" not in text] == []
    for line in re.findall(r"^deepc (.*)$", text, re.M):
        words = shlex.split(line, comments=True)
        if words and words[0] in cli._COMMANDS:
            assert cli.make_parser(words[0]).parse_args(words).command == words[0], line


# ---- bench -----------------------------------------------------------------------------------------------------------
def test_bench_measures_the_parts_of_one_process(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "_elements", lambda per, wanted: 1 << 20)
    assert (
        main(["bench", "--seconds", "0.1", "--folder", str(tmp_path), "--only", "gemm,memory,optimizer,disk", "--json"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"machine", *bench.PARTS} - {"collectives"}
    assert (
        all(r["tflops"] > 0 for r in found["gemm"])
        and found["memory"]["gb_per_s"] > 0
        and found["disk"]["write_mb_per_s"] > 0
    )
    o = found["optimizer"]
    assert o["gb_per_s"] == pytest.approx(28 * o["parameters"] / o["seconds"] / 1e9) and o["of_memory_rate"] > 0
    assert list(tmp_path.iterdir()) == []
    for part, value in found.items():
        bench._print(part, value)
    out = capsys.readouterr().out
    assert "GB/s" in out and "TFLOP/s" in out and "disk at" in out


@pytest.mark.full
def test_bench_measures_collectives(capsys):
    assert main(["bench", "--seconds", "1", "--only", "collectives", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["collectives"]
    assert {(r["op"], r["bytes"]) for r in rows} == {(op, n) for op in bench._OPS for n in bench._SIZES} | {
        ("barrier", 0)
    }
    assert all(r["seconds"] > 0 for r in rows) and sum(r["gloo_seconds"] is not None for r in rows) == 2
    bench._print("collectives", rows)
    assert "all_reduce" in capsys.readouterr().out


def test_bench_io_sets_deepc_beside_plain_calls(tmp_path, capsys, monkeypatch):
    from deepc.observe.diagnose import disk

    monkeypatch.setattr(disk, "size_for", lambda folder, wanted: 9 << 20)
    assert main(["bench", "io", "--folder", str(tmp_path), "--seconds", "0.1"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {r["figure"] for r in rows} == {"write", "read"} and {r["bytes"] for r in rows} == {9 << 20}
    for how in ("write", "read"):
        found = {r["what"]: r for r in rows if r["figure"] == how}
        assert found[disk.PLAIN]["ratio"] is None and found["deepc, threads"]["ratio"] > 0
        assert ("deepc, io_uring" in found) == (not found[disk.PLAIN]["why_not_io_uring"])
        assert all(r["n"] >= 3 and r["min"] <= r["median"] <= r["max"] for r in found.values())
    assert list(tmp_path.iterdir()) == []


def test_bench_io_refuses(tmp_path, capsys):
    assert main(["bench", "io", "--folder", str(tmp_path / "none")]) == 2
    assert main(["bench", "io", "--seconds", "-1"]) == 2
    said = capsys.readouterr().err
    assert "there is no folder" in said and "seconds -1.0" in said


def test_bench_refuses_what_it_does_not_know(tmp_path):
    with pytest.raises(ArgumentError, match="unknown part 'gem'"):
        bench.measure(("gem",))
    with pytest.raises(ArgumentError, match="at least 2"):
        bench.measure(("collectives",), ranks=1)
    with pytest.raises(ArgumentError, match="there is no folder"):
        bench.measure(("disk",), folder=str(tmp_path / "none"))


def test_bench_tells_a_part_that_can_not_be_measured(monkeypatch, capsys):
    from deepc import memory

    monkeypatch.setattr(memory, "available", lambda: 1 << 20)
    assert main(["bench", "--only", "memory,optimizer", "--seconds", "0.1"]) == 1
    assert capsys.readouterr().out.count("not measured") == 2


# ---- doctor's further lines ------------------------------------------------------------------------------------------
def test_doctor_tells_of_shm_io_uring_packages_and_libraries():
    checks = {c.name: c for c in doctor.machine_checks()}
    assert {"/dev/shm", "io_uring", "packages", "kept heap", "locked memory", "deepc", "torch", "GPUs"} <= set(checks)
    assert "core, torch" in checks["deepc"].value and "numpy" in checks["packages"].value
    assert checks["io_uring"].value == "works" or "deepc does without it" in checks["io_uring"].value


def test_doctor_of_a_small_shm(monkeypatch):
    import os

    real = os.statvfs

    def small(path):
        return (
            os.statvfs_result((4096, 4096, 16384, 16384, 16384, 0, 0, 0, 0, 255)) if path == "/dev/shm" else real(path)
        )

    monkeypatch.setattr(os, "statvfs", small)
    check = doctor._shm()
    assert check.state == "warn" and "--shm-size" in check.fix and check.value == "64 of 64 MiB free"


def test_doctor_of_an_old_torch():
    class Old:
        __version__ = "2.4.1+cpu"

        @staticmethod
        def get_num_threads() -> int:
            return 1

    check = doctor._torch(Old)
    assert check.state == "fail" and "2.10" in check.fix
