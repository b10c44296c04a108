"""What one types wrong in the first hour, and what is said to it."""

from __future__ import annotations

import argparse
import os
import resource
import socket
import subprocess
import sys
import time

import deepc
import pytest
import torch
from deepc.config import Config
from deepc.config.explain import check
from deepc.errors import ArgumentError, CheckpointError, ConfigError
from deepc.launch import options
from programs import Program, run_python
from ranks import run_ranks


def _environment(**values: str) -> dict[str, str]:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    return {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1", **values}


def _script(text: str, **values: str) -> subprocess.CompletedProcess:
    return run_python("-c", text, env=_environment(**values))


@pytest.mark.parametrize(
    "rank, world, said",
    [("x", "2", "RANK='x'"), ("0", "two", "WORLD_SIZE='two'"), ("5", "2", "RANK=5 and WORLD_SIZE=2")],
)
def test_a_launchers_variables_that_make_no_sense(rank, world, said):
    done = _script("import deepc; deepc.init_distributed()", RANK=rank, WORLD_SIZE=world)
    assert done.returncode == 1 and said in done.stderr and "ConfigError" in done.stderr


@pytest.mark.parametrize("name, value", [("MASTER_PORT", "http"), ("WORLD_SIZE", "two")])
def test_a_launchers_number_that_is_none(name, value, monkeypatch):
    for known, text in {"WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", name: value}.items():
        monkeypatch.setenv(known, text)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)  # whatever other tests have made here
    monkeypatch.delenv("RANK", raising=False)
    if name == "MASTER_PORT":
        monkeypatch.setenv("RANK", "0")
    else:
        monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(ConfigError, match=f"{name}='{value}'"):
        deepc.init_distributed()


def test_a_rank_whose_peer_does_not_come_says_so():
    text = (
        "import datetime, deepc; from deepc.comm import start; start._PATIENCE_S = 0.2\n"
        "deepc.init_distributed(timeout=datetime.timedelta(seconds=2))"
    )
    done = _script(text, RANK="0", WORLD_SIZE="2")
    assert done.returncode == 1 and "rank 0 of 2 has waited 0.2 s for rank 1 at 127.0.0.1:" in done.stderr


_WAITS = """
import datetime, deepc, os, time
from deepc.comm import start
start._PATIENCE_S = 5.0
open(f"ready{os.environ['RANK']}", "w").close()
while not os.path.exists("go"):
    time.sleep(0.01)
deepc.init_distributed(timeout=datetime.timedelta(seconds=60))
"""


@pytest.mark.parametrize(
    "there, world, said",
    [
        pytest.param((0, 2), 4, "ranks 1 and 3", marks=pytest.mark.full),
        pytest.param((0,), 6, "ranks 1 to 5", marks=pytest.mark.full),
        ((1, 2), 4, "rank 0"),
    ],
)
def test_ranks_that_wait_name_those_that_do_not_come(there, world, said, tmp_path):
    """Those that are there begin to wait together, when all have imported what they need."""
    env = _environment(WORLD_SIZE=str(world))
    running = [Program(("-c", _WAITS), cwd=tmp_path, env={**env, "RANK": str(r)}) for r in there]

    def until(done) -> None:
        end = time.monotonic() + 120
        while not done() and all(p.poll() is None for p in running) and time.monotonic() < end:
            time.sleep(0.05)

    try:
        until(lambda: all((tmp_path / f"ready{r}").exists() for r in there))
        (tmp_path / "go").touch()
        until(lambda: all(" has waited " in p.said() for p in running))
    finally:
        for p in running:
            p.kill()
    lines = [p.communicate()[1] for p in running]
    for rank, line in zip(there, lines, strict=True):
        assert f"rank {rank} of {world} has waited 5 s for {said} at 127.0.0.1:" in line, lines


@pytest.mark.parametrize("limit", [10, *(pytest.param(n, marks=pytest.mark.full) for n in (12, 16, 18, 21))])
def test_too_few_open_files_are_said_before_anything_fails(limit, tmp_path):
    """With 10 the launcher aborted, with 18 it hung."""
    (tmp_path / "script.py").write_text("print('began')")
    command = [sys.executable, "-m", "deepc", "run", "--num_gpus", "2", "script.py"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)),
    )
    assert done.returncode == 2 and "began" not in done.stdout
    assert f"deepc run: error: ulimit -n is {limit}, and one of 2 ranks on a node needs 22 open files" in done.stderr


def test_a_rank_that_another_launcher_started_says_it_too():
    text = "import deepc, resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (25, 25))\ndeepc.init_distributed()"
    done = _script(text, RANK="0", WORLD_SIZE="4", LOCAL_WORLD_SIZE="4")
    assert done.returncode == 1 and "ConfigError: ulimit -n is 25, and one of 4 ranks" in done.stderr


def _refused(config: dict, model: torch.nn.Module) -> str:
    with pytest.raises(ConfigError) as caught:
        deepc.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1, **config})
    return str(caught.value)


def test_pipeline_stages_divide_the_ranks():
    said = _refused({"pipeline": {"stages": 2}}, torch.nn.Linear(1, 1))
    assert "pipeline.stages = 2 does not divide the 1 rank(s). Start a multiple of 2, or use fewer stages" in said
    for nothing in ("auto", 0, 1, None):
        Config.load({"train_batch_size": 1, "pipeline": {"stages": nothing}}, world_size=1)


def test_float64_models_are_told_what_to_do():
    said = _refused({}, torch.nn.Linear(1, 1).double())
    assert "'weight' is torch.float64 and the config asks for fp32 training" in said and "model.float()" in said


def test_another_memory_format_is_said(caplog):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.LazyLinear(2))
    model(torch.zeros(1, 3, 6, 6))
    x = torch.randn(1, 3, 6, 6)
    want = model(x)
    for kind, told in ((torch.contiguous_format, 0), (torch.channels_last, 1)):
        caplog.clear()
        with caplog.at_level("WARNING", logger="deepc"):
            engine, *_ = deepc.initialize(
                model=model.to(memory_format=kind), config={"train_micro_batch_size_per_gpu": 1}
            )
        lines = [r.getMessage() for r in caplog.records if "memory format" in r.getMessage()]
        assert len(lines) == told and all("1 parameter (0.weight)" in t for t in lines)
        torch.testing.assert_close(engine(x), want)
        assert model[0](x.to(memory_format=torch.channels_last)).is_contiguous(memory_format=torch.channels_last)
        engine.destroy()


def test_names_that_come_later_are_in_dir():
    assert {"EMA", "notebook", "initialize", "zero"} <= set(dir(deepc)) and not {"Any", "os", "sys"} & set(dir(deepc))
    assert all(hasattr(deepc, name) for name in dir(deepc))


def test_a_model_without_its_keyword():
    with pytest.raises(ArgumentError, match=r"write initialize\(model=...\)"):
        deepc.initialize(torch.nn.Linear(1, 1))


@pytest.mark.parametrize("name, meant", [("learning_rate", "lr"), ("epsilon", "eps"), ("weight_decy", "weight_decay")])
def test_other_names_of_an_argument(name, meant):
    with pytest.raises(ConfigError, match=f'Did you mean "{meant}"'):
        Config.load({"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {name: 0.1}}}, world_size=1)


def test_a_configuration_out_of_a_pipe_or_of_nothing(tmp_path):
    read, write = os.pipe()
    with os.fdopen(write, "w") as out:
        out.write('{"train_batch_size": 3}')
    command = [sys.executable, "-m", "deepc", "config", "check", f"/dev/fd/{read}"]
    done = subprocess.run(command, capture_output=True, text=True, pass_fds=[read], timeout=100)
    os.close(read)
    assert done.returncode == 0 and "train_batch_size 3" in done.stdout, done.stdout + done.stderr
    assert "an empty text" in check("").errors[0].message


def test_options_behind_the_script(tmp_path):
    (tmp_path / "train.py").write_text("")
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    for given, noted in ((["--num_gpus", "2"], True), (["--num_gpus=2"], True), (["--lr", "2"], False)):
        found = options.plan(parser.parse_args(["--cpu", str(tmp_path / "train.py"), *given]))
        assert any("--num_gpus stands behind" in note for note in found.notes) == noted


def _unwritable(rank: int, world: int, folder: str) -> str:
    config = {"train_micro_batch_size_per_gpu": 1}
    engine = deepc.initialize(model=torch.nn.Linear(2, 2), config=config)[0]
    with pytest.raises(CheckpointError) as error:
        engine.save_16bit_model(folder)
    engine.destroy()
    return str(error.value)


def test_a_model_that_can_not_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    first, second = run_ranks(_unwritable, 2, args=(str(tmp_path / "file" / "model"),))
    assert f"can't write the model into {tmp_path}/file/model: Not a directory" in first and "rank 0" in second
