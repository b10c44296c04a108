"""`deepc run`: what reaches the ranks, what a failing rank does to the run, and that no process outlives it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import pytest
from deepc.errors import ArgumentError, UnsupportedError
from deepc.launch import driver, options, runner
from deepc.launch.host import rank as rank_file
from programs import Program, run_python

TIMEOUT = 240  # of a whole run on a busy machine; nothing here takes more than seconds on an idle one


def plan(*argv: str, gpus: int = 0, monkeypatch: pytest.MonkeyPatch, cores: int = 4) -> options.Launch:
    monkeypatch.setattr(options, "_cuda_devices", lambda: gpus)
    monkeypatch.setattr(options, "cores", lambda: cores)
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    return options.plan(parser.parse_args(list(argv)))


# ---- the plan --------------------------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


@pytest.mark.parametrize(
    "argv, gpus, ranks, devices",
    [
        ([], 0, 1, ()),
        (["--num_gpus", "2"], 0, 2, ()),
        (["--num_ranks", "3"], 0, 3, ()),
        (["--nproc_per_node", "3"], 0, 3, ()),
        ([], 4, 4, (0, 1, 2, 3)),
        (["--num_gpus", "2"], 4, 2, (0, 1)),
        (["--include", "localhost:3,1"], 4, 2, (3, 1)),
        (["--exclude", "localhost:0"], 4, 3, (1, 2, 3)),
        (["--include", "localhost"], 2, 2, (0, 1)),
        (["--include", "localhost:0,1"], 0, 2, ()),
        (["--cpu", "--num_gpus", "2"], 4, 2, ()),
        (["--cpu"], 4, 1, ()),
        (["--num_gpus", "1", "--include", "localhost:2,3"], 4, 1, (2,)),
    ],
)
def test_ranks_and_devices(argv, gpus, ranks, devices, script, monkeypatch):
    launch = plan(*argv, script, gpus=gpus, monkeypatch=monkeypatch)
    assert (launch.ranks, launch.devices) == (ranks, devices)


def test_num_gpus_without_gpus_says_that_it_means_cpu_ranks(script, monkeypatch):
    launch = plan("--num_gpus", "2", script, monkeypatch=monkeypatch)
    assert "no GPU on this machine: --num_gpus 2 means 2 ranks on the CPU" in launch.describe()


def test_threads_are_shared_out_unless_set(script, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert plan("--num_ranks", "2", script, monkeypatch=monkeypatch).env["OMP_NUM_THREADS"] == "2"
    assert plan("--num_ranks", "9", script, monkeypatch=monkeypatch).env["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS" not in plan("--num_ranks", "2", script, monkeypatch=monkeypatch).env


def test_include_selects_among_the_visible_devices(script, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert (
        plan("--include", "localhost:2,0", script, gpus=3, monkeypatch=monkeypatch).env["CUDA_VISIBLE_DEVICES"] == "6,4"
    )


def test_hostfile_of_this_machine(script, tmp_path, monkeypatch):
    hosts = tmp_path / "hosts"
    hosts.write_text("# ours\nlocalhost slots=3\n")
    assert plan("--hostfile", str(hosts), script, monkeypatch=monkeypatch).ranks == 3


@pytest.mark.parametrize(
    "argv, error, text",
    [
        (["--num_nodes", "2"], ArgumentError, "which hosts"),
        (["--include", "elsewhere:0"], ArgumentError, "no host 'elsewhere'"),
        (["--include", "localhost:0@other:1"], ArgumentError, "no host 'other'"),
        (["--include", "localhost:7"], ArgumentError, r"no slot 7 on localhost; it has 2 \(0 to 1\)"),
        (["--include", "localhost:0,0"], ArgumentError, "twice"),
        (["--include", "localhost:a"], ArgumentError, "not of the form"),
        (["--include", "localhost:0", "--exclude", "localhost:1"], ArgumentError, "together"),
        (["--exclude", "localhost"], ArgumentError, "leaves nothing"),
        (["--num_gpus", "3"], ArgumentError, "only 2 GPUs"),
        (["--num_gpus", "1", "--num_ranks", "2"], ArgumentError, "give one"),
        (["--module", "--no_python"], ArgumentError, "together"),
        (["--hostfile", "/nowhere/hosts"], ArgumentError, "/nowhere/hosts"),
        (["--no_ssh"], ArgumentError, "--node_rank"),
        (["--node_rank", "0"], ArgumentError, "only with --no_ssh"),
        (["--no_ssh", "--node_rank", "1"], ArgumentError, "1 hosts"),
        (["--autotuning", "run"], UnsupportedError, "--autotuning"),
        (["--as-deepspeed", "--no_python"], UnsupportedError, "import deepc.compat.deepspeed"),
        (["--launcher_args", "it's"], ArgumentError, "--launcher_args"),
        (["--bind_core_list", "3-1"], ArgumentError, "ends before it begins"),
        (["--cpu", "--num_ranks", "2", "--bind_core_list", "4000,4001"], ArgumentError, "core 4000"),
        (["--launcher", "slurm", "--include", "a"], ArgumentError, "inside a Slurm allocation"),
    ],
)
def test_what_is_refused(argv, error, text, script, monkeypatch):
    with pytest.raises(error, match=text):
        plan(*argv, script, gpus=2, monkeypatch=monkeypatch)


@pytest.mark.parametrize(
    "content, text",
    [
        ("far\n", "line 1: 'far' is not of the form 'host slots=N'"),
        ("# a\na slots=0\n", "line 2"),
        ("\n# none\n", "names no host"),
        ("a slots=1\nb slots=2\na slots=3\n", "line 3: a is there twice"),
        ("-oProxyCommand=x slots=1\n", "no host name"),
    ],
)
def test_hostfiles_that_are_refused(content, text, script, tmp_path, monkeypatch):
    hosts = tmp_path / "hosts"
    hosts.write_text(content)
    with pytest.raises(ArgumentError, match=text):
        plan("--hostfile", str(hosts), script, monkeypatch=monkeypatch)


def test_missing_script_is_named(monkeypatch):
    with pytest.raises(ArgumentError, match="no script 'nowhere.py'"):
        plan("nowhere.py", monkeypatch=monkeypatch)


def test_lines_of_several_ranks_do_not_mix(tmp_path):
    run = Run(
        tmp_path,
        """
        import os, sys
        for i in range(300):
            print("rank", os.environ["RANK"], "says", i)
            print("rank", os.environ["RANK"], "warns", i, file=sys.stderr)
    """,
        launcher=("--num_ranks", "4", "--quiet"),
    )
    code, out, err = run.finish()
    assert code == 0
    assert sorted(out.splitlines()) == sorted(f"rank {r} says {i}" for r in range(4) for i in range(300))
    assert sorted(err.splitlines()) == sorted(f"rank {r} warns {i}" for r in range(4) for i in range(300))


@pytest.mark.parametrize("missing", [
    "ModuleNotFoundError: No module named 'deepspeed'",
    "ImportError: DeepSpeed is not installed => run `pip install deepspeed` or build it from source.",
    "importlib.metadata.PackageNotFoundError: No package metadata was found for The 'deepspeed>=0.9.3' distribution was"
    " not found and is required by this application.",
])  # fmt: skip
def test_a_script_that_wants_deepspeed_is_told_how(missing, capsys):
    """Accelerate and transformers say to install DeepSpeed."""
    other = missing.lower().replace("deepspeed", "numpy")
    missing, other = (f"Traceback (most recent call last):\n{said}" for said in (missing, other))
    runner.report([failure(0, 10.0, type="ModuleNotFoundError", traceback=missing)])
    assert "deepc run --as-deepspeed" in capsys.readouterr().err
    runner.report([failure(0, 10.0, type="ModuleNotFoundError", traceback=other)])
    assert "--as-deepspeed" not in capsys.readouterr().err


def failure(rank: int, when: float, exit: int | None = 1, type: str = "", traceback: str = "") -> runner.Failure:
    return runner.Failure(rank, 100 + rank, exit, when, type, traceback)


def test_the_cause_is_not_the_rank_that_heard_of_it_first():
    heard = failure(0, 10.0, type="RankDiedError", traceback="RankDiedError: rank 1 died")
    killed = failure(1, 11.0, exit=-9)
    assert runner.first_failure([heard, killed]) is killed
    assert runner.first_failure([heard]) is heard
    stopped = failure(2, 9.0, exit=-signal.SIGTERM)  # by the agent
    raised = failure(3, 12.0, type="ValueError", traceback="ValueError: x")
    assert runner.first_failure([stopped, heard, raised]) is raised
    late = failure(0, 10.0, type="CommTimeoutError", traceback="CommTimeoutError: rank 1 did not arrive")
    ours = dataclasses.replace(killed, killed=True)  # it did not end when the launcher told it to
    assert runner.first_failure([late, ours]) is late


# ---- whole runs ------------------------------------------------------------------------------------------------------


_runs: list[Run] = []


@pytest.fixture(autouse=True)
def no_run_outlives_its_test():
    """Also where the test itself fails."""
    yield
    while _runs:
        run = _runs.pop()
        run.process.kill()
        for pid in run.alive():
            with contextlib.suppress(ProcessLookupError):  # it has ended with its launcher
                os.kill(pid, signal.SIGKILL)
        run.process.wait()


class Run:
    """A `deepc run` of a script of these tests, with a marker in its environment by which its processes are found."""

    def __init__(
        self,
        tmp_path: Path,
        code: str,
        *arguments: str,
        launcher: tuple[str, ...] = ("--num_ranks", "2"),
        prefix: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
    ) -> None:
        self.marker = f"DEEPC_TEST_MARK={uuid.uuid4().hex}"
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(code))
        name, value = self.marker.split("=")
        env = {**os.environ, name: value, "TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", **(env or {})}
        env.pop("OMP_NUM_THREADS", None)
        _runs.append(self)
        command = ["-m", "deepc", "run", *launcher, str(script), *arguments]
        if not prefix:
            self.process: Program | subprocess.Popen = Program(command, cwd=tmp_path, env=env)
            return
        self.process = subprocess.Popen(
            [*prefix, sys.executable, *command],
            cwd=tmp_path,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )

    def finish(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=TIMEOUT)
        return self.process.returncode, out, err

    def alive(self) -> set[int]:
        """Processes (zombies have no environment and don't count) that carry the marker: what the launcher started."""
        found = set()
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            try:
                with open(f"/proc/{entry}/environ", "rb") as f:
                    if self.marker.encode() in f.read():
                        found.add(int(entry))
            except OSError:
                continue
        return found

    def wait_gone(self, seconds: float) -> set[int]:
        deadline = time.monotonic() + seconds
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left


def wait_for(files: list[Path], run: Run | None = None) -> None:
    """Until `run`'s ranks have written them."""
    deadline = time.monotonic() + TIMEOUT
    while not all(f.exists() for f in files):
        assert run is None or run.process.poll() is None, run.process.communicate()
        assert time.monotonic() < deadline, f"waiting for {files}"
        time.sleep(0.05)


# Data-loader workers that never end by themselves; each rank writes ready<rank> once it has them.
LOADERS = """
    import os, pathlib, signal, sys, time
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Endless(Dataset):
        def __len__(self):
            return 10 ** 9
        def __getitem__(self, i):
            time.sleep(0.005)
            return torch.tensor([i, os.getpid()])

    rank = int(os.environ["RANK"])
    batches = iter(DataLoader(Endless(), batch_size=2, num_workers=2))
    workers = {int(next(batches)[0, 1]) for _ in range(4)}
    assert len(workers) == 2 and os.getpid() not in workers
    pathlib.Path(f"ready{rank}").write_text(" ".join(map(str, workers)))
"""


def test_arguments_and_environment_reach_every_rank(tmp_path):
    code = """
        import json, os, sys
        names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS"]
        with open(f"rank{os.environ['RANK']}.json", "w") as f:
            json.dump([sys.argv[1:], {n: os.environ[n] for n in names}, __name__, sys.path[0], "torch" in sys.modules], f)
        assert int(os.environ["MASTER_PORT"]) > 0
    """  # noqa: E501
    arguments = ["--deepspeed_config", "ds config.json", "--num_gpus", "5", "$HOME ${local_rank} $$", "--", "-m"]
    exit_code, _, err = Run(tmp_path, code, *arguments).finish()
    assert exit_code == 0, err
    for rank in range(2):
        argv, env, name, folder, has_torch = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert argv == arguments
        assert name == "__main__" and folder == str(tmp_path)
        assert not has_torch  # what a rank pays before its own first line
        assert env["RANK"] == env["LOCAL_RANK"] == str(rank) and env["WORLD_SIZE"] == "2"
        assert env["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))


def test_module_executable_and_local_rank(tmp_path):
    code = "import sys; print('module got', sys.argv[1:])"
    (tmp_path / "some_module.py").write_text(code)
    env = {**os.environ}
    run = ["-m", "deepc", "run", "--num_ranks", "1"]
    done = run_python(*run, "--pass_local_rank", "-m", "some_module", "x", cwd=tmp_path, env=env, timeout=TIMEOUT)
    assert done.returncode == 0 and "module got ['--local_rank=0', 'x']" in done.stdout, done.stderr
    shell = "sh", "-c", "echo shell $RANK; exit 7"
    done = run_python(*run, "--no_python", *shell, cwd=tmp_path, env=env, timeout=TIMEOUT)
    assert done.returncode == 7 and "shell 0" in done.stdout
    assert "rank 0" in done.stderr and "ended with exit code 7" in done.stderr


def test_a_rank_that_raises_ends_the_run_with_its_traceback_last(tmp_path):
    code = """
        import os, sys, time
        def deep_inside():
            raise ValueError("boom on one")
        if os.environ["RANK"] == "1":
            deep_inside()
        time.sleep(1000)
    """
    run = Run(tmp_path, code)
    exit_code, _, err = run.finish()
    assert exit_code == 1
    report = err[err.index("deepc run: rank 1") :]
    assert "raised ValueError" in report and "in deep_inside" in report and "ValueError: boom on one" in report
    assert "rank.py" not in report  # the user's frames only
    assert "Also failed" not in report  # rank 0 was stopped, it did not fail
    assert run.wait_gone(20) == set()
    assert not list(tmp_path.glob("deepc-run-*"))


def test_exit_code_of_the_rank_is_the_runs(tmp_path):
    exit_code, _, err = Run(
        tmp_path, "import os, sys, time\nif os.environ['RANK'] == '0': sys.exit(17)\ntime.sleep(1000)"
    ).finish()
    assert exit_code == 17 and "rank 0" in err and "exit code 17" in err


def test_syntax_error_and_exit_text_are_shown(tmp_path):
    exit_code, _, err = Run(tmp_path, "x = = 1", launcher=("--num_ranks", "1")).finish()
    assert exit_code == 1 and err.rstrip().splitlines()[-2].startswith("SyntaxError")
    exit_code, _, err = Run(tmp_path, "import sys; sys.exit('no data today')", launcher=("--num_ranks", "1")).finish()
    assert exit_code == 1 and "SystemExit: no data today" in err


def unread(tmp_path: Path, *command: str) -> int:
    """The exit code of a program whose output nobody reads. A process of its own: what the interpreter writes at its
    end counts."""
    reader, writer = os.pipe()
    os.close(reader)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"} | {"CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=writer,
            timeout=TIMEOUT,
        )
    finally:
        os.close(writer)
    return done.returncode


def test_the_exit_code_is_the_runs_though_nobody_reads(tmp_path):
    (tmp_path / "script.py").write_text("import sys; sys.exit(17)")
    assert unread(tmp_path, "-m", "deepc", "run", "--cpu", "script.py") == 17


def test_streams_that_are_closed_are_none_of_the_ranks_files(tmp_path):
    """The report of a run whose stdout was closed ended in a traceback, with another exit code; and the ranks had no
    stdin and stdout, whose numbers the first files that they opened got."""
    (tmp_path / "script.py").write_text(
        "import os, sys\nfiles = [os.readlink(f'/proc/self/fd/{fd}') for fd in (0, 1)]\n"
        "sys.exit(17 if files == ['/dev/null'] * 2 else str(files))"
    )
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -m deepc run --cpu script.py <&- >&-', sys.executable],
        cwd=tmp_path, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT,
    )  # fmt: skip
    assert done.returncode == 17 and "ended with exit code 17. It ended the run." in done.stderr, done.stderr


# `deepc run` that mentions ranks which ended before others at once; the file `told` is there when it has.
TELLS = """
import pathlib, sys
import deepc.launch.driver as d
from deepc.cli import main

tell = d.Driver._tell_finished

def and_note(driver):
    try:
        tell(driver)
    finally:
        if driver._told_finished:
            pathlib.Path("told").touch()

d.FINISHED_S, d.Driver._tell_finished = 0.0, and_note
sys.exit(main(["run", "--cpu", "--quiet", "--num_ranks", "2", "script.py"]))
"""


def test_ranks_go_on_though_nobody_reads_that_others_ended(tmp_path):
    (tmp_path / "script.py").write_text(
        "import os, sys, time\nwhile os.environ['RANK'] == '0':\n    if os.path.exists('told'): sys.exit(17)\n"
        "    time.sleep(0.01)"
    )
    assert unread(tmp_path, "-c", TELLS) == 17


def test_a_killed_rank_with_data_loaders_leaves_no_process(tmp_path):
    code = (
        LOADERS
        + """
    if rank == 1:
        while not os.path.exists("ready0"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)
"""
    )
    run = Run(tmp_path, code)
    exit_code, _, err = run.finish()
    assert exit_code == 128 + signal.SIGKILL, err
    assert "rank 1" in err and "killed by SIGKILL" in err
    assert run.wait_gone(4) == set()


@pytest.mark.parametrize("sig", [pytest.param(signal.SIGINT, marks=pytest.mark.full), signal.SIGTERM])
def test_stopping_the_launcher_stops_everything(tmp_path, sig):
    run = Run(tmp_path, LOADERS + "\n    time.sleep(1000)\n")
    wait_for([tmp_path / "ready0", tmp_path / "ready1"], run)
    assert len(run.alive()) >= 6  # two ranks, two workers each
    run.process.send_signal(sig)
    exit_code, _, err = run.finish()
    assert exit_code == 128 + sig and f"stopped by {sig.name}" in err
    assert run.wait_gone(4) == set()


def test_signals_that_were_ignored_stay_so(tmp_path):
    """nohup ignores SIGHUP, a script's `&` SIGINT and SIGQUIT. The rank sends them to its launcher (its parent's
    parent), then one that is not ignored."""
    code = """
        import os, signal, time
        with open(f"/proc/{os.getppid()}/stat") as f:
            launcher = int(f.read().rpartition(")")[2].split()[1])
        with open(f"/proc/{launcher}/status") as f:
            ignored = int(next(line for line in f if line.startswith("SigIgn:")).split()[1], 16)
        for sig in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
            assert ignored >> sig - 1 & 1, sig
            os.kill(launcher, sig)
        os.kill(launcher, signal.SIGTERM)
        time.sleep(1000)
    """
    prefix = ("sh", "-c", 'trap "" HUP INT QUIT; exec "$0" "$@"')
    exit_code, _, err = Run(tmp_path, code, launcher=("--num_ranks", "1"), prefix=prefix).finish()
    assert exit_code == 128 + signal.SIGTERM and "stopped by SIGTERM" in err, err


def test_ranks_die_with_a_launcher_that_is_killed(tmp_path):
    run = Run(tmp_path, LOADERS + "\n    time.sleep(1000)\n", launcher=("--num_ranks", "1"))  # each by itself
    wait_for([tmp_path / "ready0"], run)
    run.process.kill()
    run.process.wait()
    left = run.wait_gone(60)  # ranks at once, by the kernel; torch's workers look for their parent every 5 s
    assert left == set()


def test_a_process_that_left_its_session_is_killed_too(tmp_path):
    code = """
        import os, pathlib, subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
        pathlib.Path("child").write_text(str(child.pid))
    """
    run = Run(tmp_path, code, launcher=("--num_ranks", "1"))
    exit_code, _, err = run.finish()
    assert exit_code == 0, err
    assert (tmp_path / "child").exists() and run.wait_gone(4) == set()


def test_the_script_may_spawn_processes_that_import_it(tmp_path):
    code = """
        import multiprocessing, sys
        def square(x):
            return x * x
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print("squares", pool.map(square, [2, 3]))
    """
    exit_code, out, err = Run(tmp_path, code, launcher=("--num_ranks", "1")).finish()
    assert exit_code == 0 and "squares [4, 9]" in out, err


def test_a_script_finds_what_python_gives_it(tmp_path):
    """A link to a script beside its modules, which changes the folder: the same as `python SCRIPT`. Executed, since the
    interpreter is what it is held against; without torch."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "beside.py").write_text("here = True")
    (tmp_path / "project" / "train.py").write_text(
        textwrap.dedent("""
            import os, sys
            import beside
            class Options:
                steps: int = 1
            os.chdir("/")
            print(__file__, sys.argv, sys.path[0], Options.__annotations__, os.path.exists(__file__))
        """)
    )
    (tmp_path / "train.py").symlink_to("project/train.py")
    for script in ("train.py", "project/train.py"):
        said = [
            subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT)
            for command in ([script, "x"], ["-u", driver._RANK, "script", script, "x"])
        ]
        assert said[0].stdout == said[1].stdout and "True" in said[1].stdout, said


def test_frames_of_a_script_whose_name_looks_like_runpys_are_shown():
    scope: dict[str, object] = {}
    exec(compile("def fails():\n    raise ValueError", "/home/me/myrunpy/train.py", "exec"), scope)
    with pytest.raises(ValueError) as found:
        scope["fails"]()
    found.value.__traceback__ = found.value.__traceback__.tb_next  # without this file's
    assert rank_file.own_frames_cut(found.value) is found.value.__traceback__


def test_an_exception_without_a_text_is_handed_over(tmp_path, monkeypatch):
    class Wordless(Exception):
        def __str__(self):
            raise RuntimeError("no words")

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "error.json"))
    rank_file.record(Wordless())
    told = json.loads((tmp_path / "0" / "error.json").read_text())["message"]
    assert told["extraInfo"]["type"] == "Wordless" and "Wordless: <exception str() failed>" in told["message"]


def test_command_line_errors_are_one_line(tmp_path):
    done = run_python("-m", "deepc", "run", "--num_nodes", "3", "x.py", cwd=tmp_path, timeout=TIMEOUT)
    assert done.returncode == 2 and done.stderr.startswith("deepc run: error:") and "Traceback" not in done.stderr


def test_a_port_in_use_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        exit_code, _, err = Run(
            tmp_path, "", launcher=("--master_addr", "127.0.0.1", "--master_port", str(port))
        ).finish()
    assert exit_code == 2 and f"127.0.0.1:{port} could not be opened" in err and "Traceback" not in err


def test_version(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "deepc", "--version"], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 0 and done.stdout.startswith("deepc ") and "torch" in done.stdout
