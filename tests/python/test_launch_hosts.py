"""`deepc run` on several hosts: hostfile and filters, agents through a real sshd between network namespaces and through
a fake `ssh`, what a lost host, connection or launcher does, and the command lines of srun and mpirun."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from deepc.errors import ArgumentError, UnsupportedError
from deepc.launch import driver, mpi, options
from deepc.launch.host import bind, frames, places
from deepc.launch.remote import environment as export
from deepc.launch.remote import hosts, ssh
from nethosts import Hosts, needs_hosts
from test_launch import Run, no_run_outlives_its_test, wait_for  # noqa: F401

AGENT = Path(ssh.AGENT)


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


def plan(*argv: str) -> options.Launch:
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    return options.plan(parser.parse_args(["--cpu", *argv]))


@pytest.fixture
def hostfile(tmp_path: Path) -> str:
    path = tmp_path / "hosts"
    text = "\ufeffworker-1 slots=2  # first\r\n\r\n# none\r\nworker-2\tslots=3 max_slots=4\nlocalhost slots = 1\n"
    path.write_text(text, encoding="utf-8")  # as editors of Windows leave it
    return str(path)


# ---- hosts and filters -----------------------------------------------------------------------------------------------
def test_hostfile(hostfile, script):
    launch = plan("--hostfile", hostfile, script)
    assert [(h.name, h.ranks, h.local) for h in launch.hosts] == [
        ("worker-1", 2, False),
        ("worker-2", 3, False),
        ("localhost", 1, True),
    ]
    assert (launch.launcher, launch.ranks) == ("ssh", 6)
    assert "6 ranks on 3 hosts through ssh: worker-1 (2), worker-2 (3), localhost (1)" in launch.describe()


@pytest.mark.parametrize(
    "argv, left",
    [
        (["--include", "worker-2@worker-1:1"], {"worker-1": (1,), "worker-2": (0, 1, 2)}),
        (["--include", "worker-2:2,0"], {"worker-2": (2, 0)}),
        (["--exclude", "worker-2:1@localhost"], {"worker-1": (0, 1), "worker-2": (0, 2)}),
        (["--num_nodes", "2"], {"worker-1": (0, 1), "worker-2": (0, 1, 2)}),
        (["--num_nodes", "2", "--num_gpus", "1"], {"worker-1": (0,), "worker-2": (0,)}),
        (["--include", "worker-2:0@worker-2:1"], {"worker-2": (0, 1)}),
    ],
)
def test_filters(argv, left, hostfile, script):
    launch = plan("--hostfile", hostfile, *argv, script)
    assert {h.name: h.slots for h in launch.hosts} == left and launch.launcher == "ssh"


@pytest.mark.parametrize(
    "argv, text",
    [
        (["--include", "worker-3"], "no host 'worker-3'; there are worker-1, worker-2, localhost"),
        (["--include", "worker-1:2"], "no slot 2 on worker-1"),
        (["--include", "worker-1:"], "not of the form"),
        (["--include", "worker-1:1@worker-1:1"], "twice"),
        (["--num_nodes", "4"], "names only 3 hosts"),
        (["--num_gpus", "3"], "gives worker-1 only 2 slots"),
        (["--exclude", "worker-1@worker-2@localhost"], "leaves nothing"),
    ],
)
def test_filters_that_are_refused(argv, text, hostfile, script):
    with pytest.raises(ArgumentError, match=text):
        plan("--hostfile", hostfile, *argv, script)


def test_one_remote_host_still_needs_ssh_and_this_one_only_if_asked(hostfile, script):
    assert plan("--hostfile", hostfile, "--include", "worker-1", script).launcher == "ssh"
    assert plan("--hostfile", hostfile, "--include", "localhost", script).launcher == "local"
    forced = plan("--hostfile", hostfile, "--include", "localhost", "--force_multi", script)
    assert forced.launcher == "ssh" and not forced.hosts[0].local


def test_this_machine_by_name_and_address():
    assert all(hosts.is_this_machine(n) for n in ("localhost", os.uname().nodename, "127.0.0.1", "127.0.0.5"))
    assert not any(hosts.is_this_machine(n) for n in ("some-other-host", "192.0.2.77", "2001:db8::1"))


# ---- cores -----------------------------------------------------------------------------------------------------------
def machine(root: Path, nodes: list[str], siblings: dict[int, str]) -> str:
    """A sysfs of a machine: the cores of each memory node, the hardware threads of each core."""
    for i, cores in enumerate(nodes):
        (root / "node" / f"node{i}").mkdir(parents=True)
        (root / "node" / f"node{i}" / "cpulist").write_text(cores + "\n")
    for cpu, text in siblings.items():
        (root / "cpu" / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (root / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(text + "\n")
    return str(root)


def test_cores_follow_memory_nodes_and_take_one_thread_of_each(tmp_path):
    # 2 nodes with interleaved cores, 2 threads each: cpu 0-3 are the first threads, 4-7 the second; a third node
    # without cores (HBM).
    sys_ = machine(tmp_path, ["0,2,4,6", "1,3,5,7", ""], {c: f"{c % 4},{c % 4 + 4}" for c in range(8)})
    everything = set(range(8))
    assert bind.physical_cores(everything, sys_) == [0, 2, 1, 3]
    assert [bind.cores_of(r, 2, "all", everything, sys_) for r in range(2)] == [[0, 2], [1, 3]]
    assert [bind.cores_of(r, 4, "all", everything, sys_) for r in range(4)] == [[0], [2], [1], [3]]
    assert bind.cores_of(1, 2, "1,3-5", everything, sys_) == [4, 5]
    assert bind.physical_cores({5, 6}, sys_) == [6, 5]  # a cpuset with only second threads
    assert bind.node_of([1, 3], sys_) == 1 and bind.node_of([0, 1], sys_) is None
    with pytest.raises(ValueError, match="5 ranks can't be bound to 4 cores"):
        bind.cores_of(0, 5, "all", everything, sys_)
    with pytest.raises(ValueError, match="core 9 is not among"):
        bind.cores_of(0, 1, "9", everything, sys_)


def test_core_lists():
    assert bind.parse_cores("1,3-5,7") == [1, 3, 4, 5, 7] and bind.compact([5, 1, 3, 4, 7]) == "1,3-5,7"
    for wrong in ("", "a", "3-1", "1,1", "2-4,3", "1-", "-1"):
        with pytest.raises(ValueError):
            bind.parse_cores(wrong)


SHOW = """
    import json, os, pathlib
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "FROM_FILE"]
    shown = {n: os.environ.get(n) for n in names}
    shown.update(cores=sorted(os.sched_getaffinity(0)), left=sorted(n for n in os.environ if n.startswith("DEEPC_") and "TEST" not in n and n not in ("DEEPC_LIBRARY_DIR", "DEEPC_ISA")))
    pathlib.Path("shown" + shown["RANK"]).write_text(json.dumps(shown))
    print("rank", shown["RANK"], "speaks")
"""  # noqa: E501


def shown(folder: Path, ranks: int) -> list[dict]:
    return [json.loads((folder / f"shown{r}").read_text()) for r in range(ranks)]


def test_bound_ranks_run_on_their_cores(tmp_path):
    mine = sorted(os.sched_getaffinity(0))
    ranks = min(2, len(mine))
    run = Run(
        tmp_path,
        SHOW,
        launcher=(
            "--num_ranks",
            str(ranks),
            "--bind_cores_to_rank",
            "--bind_core_list",
            ",".join(map(str, mine[:ranks])),
        ),
    )
    code, _, err = run.finish()
    assert code == 0, err
    for rank, got in enumerate(shown(tmp_path, ranks)):
        assert got["cores"] == [mine[rank]] and got["OMP_NUM_THREADS"] == "1" and got["left"] == ["DEEPC_TRACER_PID"]


# ---- what other hosts get --------------------------------------------------------------------------------------------
def test_exported_variables(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".deepspeed_env").write_text("A=home\nB=home # not a comment\n")
    (tmp_path / ".deepspeed_env").write_bytes(b'\xef\xbb\xbfD=\xe9\r\n# ours\n\nA=x y=z\nexport C="quoted"\n')
    found = export.exported({"NCCL_DEBUG": "1", "CUDA_VISIBLE_DEVICES": "1", "SECRET": "1", "PYTHONPATH": "p"})
    assert found == {
        "NCCL_DEBUG": "1",
        "PYTHONPATH": "p",
        "A": "x y=z",
        "B": "home # not a comment",
        "C": "quoted",
        "D": "\udce9",
    }
    (tmp_path / ".deepspeed_env").write_text("A=1\nnonsense\n")
    with pytest.raises(ArgumentError, match=r"\.deepspeed_env, line 2: 'nonsense'"):
        export.from_files()
    monkeypatch.setenv("DS_ENV_FILE", "other")
    assert export.from_files() == {}


@pytest.mark.parametrize(
    "said, fix",
    [
        ("ssh: Could not resolve hostname w1: Name or service not known", "correct the name in the hostfile"),
        ("ssh: connect to host w1 port 22: Connection refused", "--ssh_port"),
        ("ssh: connect to host w1 port 22: Connection timed out", "is it up"),
        ("Host key verification failed.", "ssh-keyscan w1"),
        ("root@w1: Permission denied (publickey).", "ssh-copy-id w1"),
        (f"sh: 1: exec: {sys.executable}: not found", "same path on every host"),
        (f"python: can't open file '{AGENT}': [Errno 2] No such file or directory", "deepc is not installed there"),
        ("something else", "Try `ssh w1 true`"),
    ],
)
def test_what_ssh_says_becomes_a_fix(said, fix):
    text = ssh.explain("w1", 255, said)
    assert text.startswith("w1: ") and fix in text and "\n" not in text


# ---- frames ----------------------------------------------------------------------------------------------------------
def test_frames_survive_any_cut_and_what_a_login_shell_prints():
    sent = (
        b"Welcome!\n{motd}\n"
        + frames.MAGIC
        + frames.encode("hello", host="a\n\udc80")
        + frames.encode("out", bytes(range(256)), rank=3, fd=1)
        + frames.encode("out", b"", rank=0, fd=2)
    )
    for step in (1, 7, len(sent)):
        decoder = frames.Decoder(synced=False)
        got = [f for i in range(0, len(sent), step) for f in decoder.feed(sent[i : i + step])]
        assert decoder.noise == b"Welcome!\n{motd}\n"
        assert got == [
            ({"t": "hello", "host": "a\n\udc80"}, b""),
            ({"t": "out", "rank": 3, "fd": 1, "n": 256}, bytes(range(256))),
            ({"t": "out", "rank": 0, "fd": 2, "n": 0}, b""),
        ]
    with pytest.raises(frames.FrameError, match="is no frame"):
        list(frames.Decoder().feed(b"hello\n"))
    assert frames.Decoder(synced=False).feed(b"password: ") is not None


# ---- an agent alone --------------------------------------------------------------------------------------------------
class Talk:
    """An agent of a test, spoken to by hand."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-IS", str(AGENT), "0", "1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.decoder, self.queue = frames.Decoder(synced=False), []

    def send(self, kind: str, **fields) -> None:
        self.process.stdin.write(frames.encode(kind, **fields))
        self.process.stdin.flush()

    def next(self, kind: str) -> tuple[dict, bytes]:
        while True:
            while self.queue:
                frame = self.queue.pop(0)
                if frame[0]["t"] == kind:
                    return frame
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            assert data, f"it ended without {kind}"
            self.queue += self.decoder.feed(data)

    def start(self, tmp_path: Path, *programs: str, **fields) -> None:
        processes = [
            {"rank": i, "argv": [sys.executable, "-u", "-c", code], "env": {}} for i, code in enumerate(programs)
        ]
        self.send(
            "start",
            **{
                "cwd": str(tmp_path),
                "env": {},
                "processes": processes,
                "output": "frames",
                "logs": None,
                "logs_prefix": "",
                "script": None,
                "lost_after_s": None,
                **fields,
            },
        )

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def talk():
    made = Talk()
    made.next("hello")
    yield made
    made.end()


def test_an_agent_reports_exit_codes_and_output(talk, tmp_path):
    talk.start(tmp_path, "print('out'); import sys; print('err', file=sys.stderr)", "raise SystemExit(5)")
    assert talk.next("failed")[0]["rank"] == 1
    with contextlib.suppress(BrokenPipeError):  # both ranks may have ended by themselves, and the agent with them
        talk.send("stop", grace_s=5)
    failures = talk.next("ended")[0]["failures"]
    assert [(f["rank"], f["exit"]) for f in failures if f["exit"] != -signal.SIGTERM] == [(1, 5)] and 0 <= failures[-1][
        "age"
    ] < 60


def test_an_agent_that_hears_nothing_ends_its_ranks(talk, tmp_path):
    talk.start(tmp_path, "import os, time; print(os.getpid()); time.sleep(1000)", lost_after_s=1000)
    pid = int(talk.next("out")[1])  # however long it takes to start
    talk.send("resume", lost_after_s=2)
    for _ in range(12):  # pings keep it alive
        time.sleep(0.2)
        talk.send("ping")
        assert Path(f"/proc/{pid}").exists()
    assert talk.process.wait(30) == 0 and not Path(f"/proc/{pid}").exists()


def test_a_suspended_launcher_is_not_a_lost_one(talk, tmp_path):
    talk.start(tmp_path, "import os, time; print(os.getpid()); time.sleep(1000)", lost_after_s=1000)
    pid = int(talk.next("out")[1])  # however long it takes to start
    talk.process.stdin.write(
        frames.encode("resume", lost_after_s=0.5) + frames.encode("pause")
    )  # it hears both at once
    talk.process.stdin.flush()
    time.sleep(1.0)
    assert Path(f"/proc/{pid}").exists()
    talk.send("resume", lost_after_s=0.5)
    assert talk.process.wait(30) == 0 and not Path(f"/proc/{pid}").exists()


def test_an_agent_kills_what_ignores_sigterm_and_what_left_its_session(talk, tmp_path):
    stubborn = (
        "import os, signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); p ="
        " subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'], start_new_session=True);"
        " print(os.getpid(), p.pid); time.sleep(1000)"
    )
    talk.start(tmp_path, stubborn)
    pids = talk.next("out")[1].split()
    talk.send("stop", grace_s=0.3)
    (failed,) = talk.next("ended")[0]["failures"]
    assert failed["exit"] == -signal.SIGKILL and failed["ours"]
    assert not any(Path(f"/proc/{int(p)}").exists() for p in pids)


def test_an_agent_collects_what_its_ranks_leave_behind(talk, tmp_path):
    """Each helper that a script put into the background stayed a zombie to the end of the run."""
    code = """
import os, subprocess, time
agent = os.getppid()
for _ in range(5):
    subprocess.run(["sh", "-c", "sleep 0 &"])
def parent(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return int(f.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0
def children():
    return [p for p in os.listdir("/proc") if p.isdigit() and parent(p) == agent]
end = time.monotonic() + 30
while children() != [str(os.getpid())] and time.monotonic() < end:
    time.sleep(0.05)
print(children() == [str(os.getpid())])
os._exit(5)
"""
    talk.start(tmp_path, code)
    assert talk.next("out")[1] == b"True\n"
    (failed,) = talk.next("ended")[0]["failures"]
    assert failed["exit"] == 5


def test_an_agent_says_what_is_not_there(tmp_path):
    for fields, text in (
        ({"cwd": "/nowhere/at/all"}, "there is no folder /nowhere/at/all"),
        ({"script": "train.py"}, "there is no script 'train.py'"),
        ({"logs": "/dev/null/logs"}, "the folder /dev/null/logs for the ranks' logs can't be made: Not a directory"),
        ({"processes": [{"rank": 0, "argv": ["/no/python"], "env": {}}]}, "/no/python could not be started"),
    ):
        talk = Talk()
        talk.start(tmp_path, **fields)
        assert text in talk.next("error")[0]["text"]
        talk.end()


def test_a_slow_reader_does_not_lose_output(talk, tmp_path):
    talk.start(tmp_path, "import sys; sys.stdout.write('x' * (6 << 20)); sys.stdout.flush()")
    time.sleep(1.0)
    total = 0
    while total < 6 << 20:
        total += len(talk.next("out")[1])
    assert total == 6 << 20 and talk.next("ended")[0]["failures"] == []


def test_a_reader_that_pauses_does_not_lose_the_end(talk, tmp_path):
    talk.start(tmp_path, "import sys; sys.stdout.write('x' * (1 << 20)); sys.exit('the reason')")
    time.sleep(5.0)  # the program has ended: its output waits in the agent, and in pipes
    total, said = 0, b""
    while total < 1 << 20 or not said.endswith(b"\n"):
        frame, data = talk.next("out")
        total, said = total + len(data) * (frame["fd"] == 1), said + data * (frame["fd"] == 2)
    assert total == 1 << 20 and said == b"the reason\n" and talk.next("ended")[0]["failures"][0]["exit"] == 1


def test_an_agent_whose_launcher_is_gone_does_not_wait_for_it_to_read(talk, tmp_path):
    talk.start(tmp_path, "import sys; sys.stdout.write('x' * (1 << 20))")
    talk.next("out")
    talk.process.stdin.close()
    began = time.monotonic()
    assert talk.process.wait(60) == 0 and time.monotonic() - began < 30
    talk.process.stdin = None


# ---- hosts behind a fake ssh -----------------------------------------------------------------------------------------
FAKE = """#!{python} -IS
# Hosts named h1, h2, ... are this machine. Everything else fails as ssh would.
import json, os, sys
with open({log!r}, "a") as f:
    f.write(json.dumps(sys.argv[1:]) + "\\n")
host, command = sys.argv[sys.argv.index("--") + 1:]
if host == "unknown":
    sys.exit(print(f"ssh: Could not resolve hostname {{host}}: Name or service not known", file=sys.stderr) or 255)
if host == "silent":
    import time
    time.sleep(1000)
print("Welcome to", host, flush=True)
os.environ["SSH_CONNECTION"] = "127.0.0.1 1 127.0.0.1 22"
os.execv("/bin/sh", ["sh", "-c", command])
"""


@pytest.fixture
def fake_ssh(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(FAKE.format(python=sys.executable, log=str(tmp_path / "ssh.log")))
    (folder / "ssh").chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def write_hosts(tmp_path: Path, *lines: str) -> str:
    (tmp_path / "hosts").write_text("\n".join(lines) + "\n")
    return str(tmp_path / "hosts")


def test_two_hosts_through_ssh(tmp_path, fake_ssh):
    file = write_hosts(tmp_path, "h1 slots=1", "h2 slots=2")
    (tmp_path / ".deepspeed_env").write_text("FROM_FILE=yes\n")
    run = Run(
        tmp_path,
        SHOW,
        launcher=("--hostfile", file, "--ssh_port", "2222", "--launcher_args", "-o Compression=yes", "--cpu"),
        env=fake_ssh,
    )
    code, out, err = run.finish()
    assert code == 0, err
    assert sorted(out.splitlines()) == ["[h1:0] rank 0 speaks", "[h2:1] rank 1 speaks", "[h2:2] rank 2 speaks"]
    got = shown(tmp_path, 3)
    assert [(g["LOCAL_RANK"], g["LOCAL_WORLD_SIZE"], g["GROUP_RANK"], g["WORLD_SIZE"]) for g in got] == [
        ("0", "1", "0", "3"),
        ("0", "2", "1", "3"),
        ("1", "2", "1", "3"),
    ]
    assert len({(g["MASTER_ADDR"], g["MASTER_PORT"]) for g in got}) == 1 and got[0]["MASTER_ADDR"] == "127.0.0.1"
    cores = len(os.sched_getaffinity(0))
    assert [g["OMP_NUM_THREADS"] for g in got] == [str(cores), *[str(max(1, cores // 2))] * 2]
    assert all(g["FROM_FILE"] == "yes" and g["left"] == ["DEEPC_TRACER_PID"] for g in got)
    for argv in map(json.loads, (tmp_path / "ssh.log").read_text().splitlines()):
        assert (
            argv[:2] == ["-o", "Compression=yes"]
            and argv[argv.index("-p") :][:2] == ["-p", "2222"]
            and "BatchMode=yes" in argv
        )
    assert run.wait_gone(20) == set()


def test_threads_that_a_file_sets_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    two = (hosts.Host("localhost", (0, 1), True), hosts.Host("h2", (0, 1), False))
    run = driver.Driver(options.Launch(two, "script", ("train.py",), "ssh"))

    def threads() -> list[str]:
        hello = {"cores": 8, "gpus": 0, "interface": None}
        made = [types.SimpleNamespace(host=h, remote=not h.local, hello=hello) for h in two]
        return [run._spec(i, c, "h1", 1)["env"]["OMP_NUM_THREADS"] for i, c in enumerate(made)]

    assert threads() == ["4", "4"]
    (tmp_path / ".deepspeed_env").write_text("OMP_NUM_THREADS=3\n")
    assert threads() == ["3", "3"]


def test_hosts_that_cannot_be_reached_are_named_and_nothing_starts(tmp_path, fake_ssh):
    file = write_hosts(tmp_path, "h1 slots=1", "unknown slots=1", "silent slots=1")
    run = Run(tmp_path, SHOW, launcher=("--hostfile", file, "--cpu", "--connect_timeout", "2"), env=fake_ssh)
    code, _, err = run.finish()
    assert code == 2 and "2 of 3 hosts could not be reached; nothing was started" in err and "Traceback" not in err
    assert "unknown: ssh: Could not resolve hostname" in err and "correct the name in the hostfile" in err
    assert "silent: connection timed out" in err and not (tmp_path / "shown0").exists()
    assert run.wait_gone(20) == set()


FAIL = """
    import os, pathlib, sys, time
    rank = os.environ["RANK"]
    pathlib.Path("new" + rank).write_text(str(os.getpid()))
    os.replace("new" + rank, "ready" + rank)
    if len(sys.argv) > 1 and rank == "1":
        while not os.path.exists("ready0"):
            time.sleep(0.01)
        if sys.argv[1] == "raise":
            raise ValueError("boom on host 2")
        sys.exit(int(sys.argv[1]))
    time.sleep(1000)
"""


@pytest.mark.parametrize(
    "how, code, text",
    [("raise", 1, "rank 1 (pid "), pytest.param("23", 23, "ended with exit code 23", marks=pytest.mark.full)],
)
def test_a_rank_that_fails_on_one_host_ends_all(tmp_path, fake_ssh, how, code, text):
    file = write_hosts(tmp_path, "h1 slots=1", "h2 slots=1")
    run = Run(tmp_path, FAIL, how, launcher=("--hostfile", file, "--cpu"), env=fake_ssh)
    got, _, err = run.finish()
    report = err[err.rindex("deepc run: rank 1") :]
    assert got == code and text in report and " on h2)" in report and "Also failed" not in report
    if how == "raise":
        assert (
            report.rstrip().splitlines()[-2] == "ValueError: boom on host 2"
            and "[h2:1] ValueError: boom on host 2" in err
        )
    assert run.wait_gone(20) == set()


@pytest.mark.parametrize("victim", ["launcher", pytest.param("ssh", marks=pytest.mark.full), "agent"])
def test_whatever_is_killed_nothing_is_left(tmp_path, fake_ssh, victim):
    """SIGKILL to the launcher, to one host's ssh, to one host's agent. (With the fake ssh these two are one process:
    `agent` is that of h1, `ssh` that of h2.)"""
    file = write_hosts(tmp_path, "h1 slots=1", "h2 slots=2")
    run = Run(tmp_path, FAIL, launcher=("--hostfile", file, "--cpu"), env=fake_ssh)
    wait_for([tmp_path / f"ready{r}" for r in range(3)], run)
    parent = {
        n: int(
            Path(f"/proc/{int((tmp_path / f'ready{r}').read_text())}/stat").read_text().rpartition(")")[2].split()[1]
        )
        for n, r in (("agent", 0), ("ssh", 1))
    }
    os.kill(parent.get(victim, run.process.pid), signal.SIGKILL)
    code, _, err = run.finish()
    assert run.wait_gone(20) == set()
    if victim != "launcher":
        assert code == 1 and ("h1 (rank 0) was lost" if victim == "agent" else "h2 (ranks 1 to 2) was lost") in err, err


@pytest.mark.full
def test_interrupting_the_launcher_ends_all_hosts(tmp_path, fake_ssh):
    file = write_hosts(tmp_path, "h1 slots=1", "h2 slots=1")
    run = Run(tmp_path, FAIL, launcher=("--hostfile", file, "--cpu"), env=fake_ssh)
    wait_for([tmp_path / "ready0", tmp_path / "ready1"], run)
    run.process.send_signal(signal.SIGINT)
    code, _, err = run.finish()
    assert code == 130 and "stopped by SIGINT" in err and run.wait_gone(20) == set()


def test_each_rank_log(tmp_path):
    run = Run(tmp_path, SHOW, launcher=("--num_ranks", "2", "--enable_each_rank_log", "logs", "--save_pid", "-q"))
    code, out, err = run.finish()
    assert code == 0 and out == "" and err == ""
    texts = {f.name[-len("rank0.log") :]: f.read_text() for f in (tmp_path / "logs").iterdir()}
    assert texts == {"rank0.log": "rank 0 speaks\n", "rank1.log": "rank 1 speaks\n"} and not list(
        tmp_path.glob("*.deepspeed")
    )


@pytest.mark.full
def test_no_ssh_starts_this_hosts_part(tmp_path):
    file = write_hosts(tmp_path, "127.0.0.1 slots=1", "localhost slots=1")
    common = ("--hostfile", file, "--no_ssh", "--master_addr", "127.0.0.1", "--master_port", "29713", "--cpu")
    code = (
        SHOW
        + """
    from torch.distributed import TCPStore
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store.add("met", 1)
    while store.add("met", 0) < 2:
        pass
    store.add("left", 1)
    while int(os.environ["RANK"]) == 0 and store.add("left", 0) < 2:
        pass
"""
    )
    runs = [Run(tmp_path, code, launcher=(*common, "--node_rank", str(i))) for i in range(2)]
    for run in runs:
        exit_code, _, err = run.finish()
        assert exit_code == 0, err
    assert [(g["RANK"], g["GROUP_RANK"], g["WORLD_SIZE"], g["MASTER_PORT"]) for g in shown(tmp_path, 2)] == [
        ("0", "0", "2", "29713"),
        ("1", "1", "2", "29713"),
    ]


# ---- hosts behind a real ssh server ----------------------------------------------------------------------------------
def needs_sshd(test):
    """Skips where there is no OpenSSH server or namespaces can't be made."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        if (
            not shutil.which("sshd", path=os.environ["PATH"] + ":/usr/sbin:/sbin")
            or not shutil.which("ssh")
            or not shutil.which("ssh-keygen")
        ):
            pytest.skip("needs OpenSSH's sshd, ssh and ssh-keygen (apt-get install openssh-server)")
        return test(*args, **kwargs)

    return needs_hosts(run)


class Servers:
    """Two hosts, each with an sshd; the launcher runs on the first."""

    def __init__(self, folder: Path) -> None:
        self.net, self.folder = Hosts(2), folder
        self.servers: list[subprocess.Popen] = []
        sshd = shutil.which("sshd", path=os.environ["PATH"] + ":/usr/sbin:/sbin")
        os.makedirs("/run/sshd", exist_ok=True)
        for key in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
        (folder / "sshd_config").write_text(
            f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\nStrictModes no\nUsePAM no\nPermitRootLogin"
            " yes\nPidFile none\nPasswordAuthentication no\nLogLevel ERROR\n"
        )
        (folder / "ssh_config").write_text(
            f"Host *\n  IdentityFile {folder}/user\n  UserKnownHostsFile {folder}/known\n  StrictHostKeyChecking no\n "
            " LogLevel ERROR\n  User root\n"
        )
        for host in range(2):
            command = self.net._spaces[host].enter(
                "setpriv", "--pdeathsig", "KILL", sshd, "-D", "-e", "-f", str(folder / "sshd_config")
            )
            self.servers.append(subprocess.Popen(command, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL))
        self.arguments = f"-F {folder}/ssh_config"

    def wait_up(self) -> None:
        for host in range(2):
            end = time.monotonic() + 60
            while subprocess.run(
                self.net._spaces[0].enter("ssh", "-F", str(self.folder / "ssh_config"), self.net.address(host), "true"),
                capture_output=True,
            ).returncode:
                assert time.monotonic() < end, "sshd does not come up"
                time.sleep(0.1)

    def run(
        self, tmp_path: Path, code: str, *arguments: str, lines: tuple[str, ...], options: tuple[str, ...] = ()
    ) -> Run:
        return Run(
            tmp_path,
            code,
            *arguments,
            launcher=(
                "--hostfile",
                write_hosts(tmp_path, *lines),
                "--launcher_args",
                self.arguments,
                "--cpu",
                *options,
            ),
            prefix=tuple(self.net._spaces[0].enter()),
        )

    def close(self) -> None:
        for server in self.servers:
            server.kill()
            server.wait()
        self.net.close()


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    made = Servers(tmp_path_factory.mktemp("ssh"))
    made.wait_up()
    yield made
    made.close()


TRAIN = (
    SHOW
    + """
    import torch, torch.distributed as dist, deepc
    torch.set_num_threads(1)
    deepc.init_distributed()
    x = torch.full((1000,), float(dist.get_rank() + 1))
    dist.all_reduce(x)
    print("sum", x[0].item())
    dist.destroy_process_group()
"""
)


@needs_sshd
@pytest.mark.parametrize("options", [(), pytest.param(("--force_multi",), marks=pytest.mark.full)])
def test_ranks_of_two_real_hosts_meet(tmp_path, request, options):
    servers = request.getfixturevalue("servers")
    run = servers.run(tmp_path, TRAIN, lines=("10.77.0.1 slots=1", "10.77.0.2 slots=1"), options=options)
    code, out, err = run.finish()
    assert code == 0, err
    assert "[10.77.0.1:0] sum 3.0" in out and "[10.77.0.2:1] sum 3.0" in out
    assert {g["MASTER_ADDR"] for g in shown(tmp_path, 2)} == {"10.77.0.1"} and shown(tmp_path, 2)[1][
        "GLOO_SOCKET_IFNAME"
    ] == "eth0"
    assert run.wait_gone(20) == set()


@pytest.mark.full
@needs_sshd
def test_a_real_host_that_is_not_there(tmp_path, request):
    servers = request.getfixturevalue("servers")
    run = servers.run(tmp_path, SHOW, lines=("10.77.0.1 slots=1", "10.77.0.99 slots=1"))
    code, _, err = run.finish()
    assert (
        code == 2
        and "10.77.0.99: ssh: connect to host 10.77.0.99 port 22: " in err
        and "is it up" in err
        and not (tmp_path / "shown0").exists()
    )
    run = servers.run(tmp_path, SHOW, lines=("10.77.0.2 slots=1",), options=("--ssh_port", "2299"))
    code, _, err = run.finish()
    assert code == 2 and "Connection refused" in err and "--ssh_port" in err


@needs_sshd
@pytest.mark.full
def test_a_failure_on_a_real_host(tmp_path, request):
    servers = request.getfixturevalue("servers")
    run = servers.run(tmp_path, FAIL, "raise", lines=("10.77.0.1 slots=1", "10.77.0.2 slots=2"))
    code, _, err = run.finish()
    assert (
        code == 1
        and err.rstrip().splitlines()[-2] == "ValueError: boom on host 2"
        and "on 10.77.0.2) raised ValueError" in err
    )
    assert run.wait_gone(20) == set()


def connections(run: Run) -> list[int]:
    """ssh clients of a run."""
    return [pid for pid in run.alive() if Path(f"/proc/{pid}/comm").read_text().strip() == "ssh"]


@needs_sshd
@pytest.mark.full
@pytest.mark.parametrize("victim", ["launcher", "ssh"])
def test_a_real_host_left_alone_cleans_up(tmp_path, request, victim):
    servers = request.getfixturevalue("servers")
    run = servers.run(tmp_path, FAIL, lines=("10.77.0.1 slots=1", "10.77.0.2 slots=1"))
    wait_for([tmp_path / "ready0", tmp_path / "ready1"], run)
    os.kill(run.process.pid if victim == "launcher" else connections(run)[0], signal.SIGKILL)
    code, _, err = run.finish()
    assert run.wait_gone(20) == set()
    assert victim == "launcher" or (code == 1 and "the connection to 10.77.0.2 (rank 1) was lost" in err), err


# ---- srun and mpirun -------------------------------------------------------------------------------------------------
@pytest.fixture
def programs(tmp_path, monkeypatch) -> Path:
    """A folder on the PATH with programs of these names that record their arguments and environment, and run the ranks'
    command once."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in ("srun", "mpirun"):
        (folder / name).write_text(
            f"#!{sys.executable} -IS\nimport json, os, sys\nopen({str(tmp_path / 'called')!r},"
            " 'w').write(json.dumps([sys.argv, dict(os.environ)]))\nat = sys.argv.index(next(a for a in sys.argv if"
            " a.endswith('rank.py'))) - 2\nos.environ.update(SLURM_PROCID='0', SLURM_STEP_ID='0',"
            " SLURM_STEP_NUM_TASKS='1')\nos.execv(sys.argv[at], sys.argv[at:])\n"
        )
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return folder


def command(*argv: str) -> list[str]:
    launch = plan(*argv)
    made = mpi.command(launch, mpi.environment(launch, "r"))
    return made[: made.index(mpi.RANK) - 2]


def test_srun(programs, hostfile, script, monkeypatch):
    base = ["srun", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--kill-on-bad-exit=1", "--export=ALL", "--label"]
    assert command(
        "--launcher", "slurm", "--num_nodes", "2", "--num_ranks", "2", "--launcher_args", "-p gpu", script
    ) == [*base, "-p", "gpu"]
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[01-02]")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "2")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "4")
    assert command("--launcher", "SLURM", script) == [*base, "--nodelist=n01,n02", "--cpus-per-task=4"]
    assert command("--launcher", "slurm", "--bind_cores_to_rank", "--include", "n02", script) == [
        "srun",
        "--nodes=1",
        "--ntasks=2",
        "--ntasks-per-node=2",
        *base[4:6],
        "--nodelist=n02",
        "--cpus-per-task=4",
        "--cpu-bind=none",
    ]
    with pytest.raises(
        UnsupportedError, match="equally many ranks on every host, and these differ: worker-1 2, worker-2 3"
    ):
        command("--launcher", "slurm", "--hostfile", hostfile, "--num_nodes", "2", script)
    with pytest.raises(UnsupportedError, match="can't choose slots 2 of worker-2"):
        command("--launcher", "slurm", "--hostfile", hostfile, "--include", "worker-2:2", script)


def test_the_tasks_of_a_slurm_job_are_its_ranks(programs, script, monkeypatch):
    """SLURM_TASKS_PER_NODE counts CPUs where no tasks were asked for, and in a step those of the step."""
    for name in ("SLURM_NTASKS_PER_NODE", "SLURM_GPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "4(x2)")
    assert "2 ranks on 2 hosts" in plan("--launcher", "slurm", script).describe()
    monkeypatch.setenv("SLURM_NTASKS", "8")
    launch = plan("--launcher", "slurm", script)
    assert "8 ranks on 2 hosts through slurm: n1 (4), n2 (4)" in launch.describe()
    assert {"--ntasks=8", "--ntasks-per-node=4"} <= set(command("--launcher", "slurm", script))
    assert plan("--launcher", "slurm", "--num_ranks", "3", script).ranks == 6
    monkeypatch.setenv("SLURM_NTASKS", "7")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "4,3")
    assert "--ntasks=3" in command("--launcher", "slurm", "--include", "n2", script)
    with pytest.raises(UnsupportedError, match="these differ: n1 4, n2 3. Use .* --num_gpus N"):
        command("--launcher", "slurm", script)
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "1")
    assert plan("--launcher", "slurm", script).ranks == 2


def test_mpirun(programs, hostfile, script, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    made = command("--launcher", "openmpi", "--hostfile", hostfile, "--exclude", "localhost", script)
    assert (
        made[:9] == ["mpirun", "-n", "5", "--host", "worker-1:2,worker-2:3", "--bind-to", "none", "--map-by", "slot"]
        and "--tag-output" in made
    )
    named = {made[i + 1] for i, a in enumerate(made) if a == "-x"}
    assert {"NCCL_DEBUG", "MASTER_ADDR", "MASTER_PORT", "DEEPC_REPORT_TO", "PATH"} <= named
    assert "--map-by" not in command(
        "--launcher", "openmpi", "--hostfile", hostfile, "--launcher_args", "--bind-to core", script
    )
    made = command("--launcher", "mpich", "--hostfile", hostfile, "--include", "worker-1@worker-2:0,1", script)
    assert made == ["mpirun", "-n", "4", "-ppn", "2", "-hosts", "worker-1,worker-2", "-prepend-rank"]
    assert command("--launcher", "impi", "--hostfile", hostfile, "--include", "worker-1", script)[-3:] == [
        "-genv",
        "I_MPI_PIN",
        "0",
    ]
    launch = plan("--launcher", "openmpi", "--hostfile", hostfile, "--bind_cores_to_rank", "--pass_local_rank", script)
    env = mpi.environment(launch, "r")
    assert (env["MASTER_ADDR"], env["DEEPC_BIND"], env["DEEPC_LOCAL_RANK_ARGUMENT"]) == ("worker-1", "all", "1")
    with pytest.raises(UnsupportedError, match="--enable_each_rank_log"):
        command(
            "--launcher",
            "mpich",
            "--enable_each_rank_log",
            "logs",
            "--hostfile",
            hostfile,
            "--include",
            "worker-1",
            script,
        )


def test_a_launcher_that_is_not_installed_is_named(script, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ArgumentError, match="there is no `srun` on this machine: install Slurm"):
        command("--launcher", "slurm", script)


@pytest.mark.full
def test_a_rank_under_srun_reports_its_traceback_to_the_launcher(tmp_path, programs):
    code = """
        import os, sys
        print("I am", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv)
        raise KeyError("under srun")
    """
    run = Run(tmp_path, code, "x", launcher=("--launcher", "slurm", "--pass_local_rank", "--cpu"))
    exit_code, out, err = run.finish()
    assert exit_code == 1 and "I am 0 of 1" in out and "'--local_rank=0', 'x']" in out
    report = err[err.rindex("deepc run: rank 0") :]
    assert "raised KeyError" in report and report.rstrip().splitlines()[-2] == "KeyError: 'under srun'"
    assert run.wait_gone(20) == set()


@pytest.mark.parametrize("asked, code", [(-1, 255), (-9, 247), (256, 0)])
def test_an_exit_code_reaches_the_launcher_as_the_system_has_it(tmp_path, asked, code):
    """Behind srun and mpirun; a negative one would stand for a signal."""
    (tmp_path / "script.py").write_text(f"import sys; sys.exit({asked})")
    with mpi.reports() as reports:
        env = {**os.environ, "RANK": "0", "DEEPC_REPORT_TO": reports.address}
        done = subprocess.run([sys.executable, mpi.RANK, "script", "script.py"], cwd=tmp_path, env=env)
        assert done.returncode == code
        told = [f.headline() for f in reports.failures]
    assert [text.partition(") ")[2] for text in told] == ([f"ended with exit code {code}"] if code else [])


def _mpirun(*candidates: str) -> str:
    found = next((c for c in candidates if shutil.which(c)), None)
    if found is None:
        pytest.skip(f"needs {candidates[0]}")
    return found


@pytest.mark.parametrize(
    "launcher, program", [("openmpi", "mpirun.openmpi"), pytest.param("mpich", "mpirun.mpich", marks=pytest.mark.full)]
)
def test_real_mpirun_through_deepc_run(tmp_path, launcher, program):
    _mpirun(program)
    run = Run(
        tmp_path,
        TRAIN + "\n    assert shown['RANK'] == '0', 'only 0 may live'",
        launcher=("--launcher", launcher, "--num_ranks", "2", "--cpu"),
    )
    code, out, err = run.finish()
    assert code == 1 and out.count("sum 3.0") == 2, err
    assert err.rstrip().splitlines()[-2] == "AssertionError: only 0 may live" and "deepc run: rank 1 (pid " in err
    assert [(g["LOCAL_RANK"], g["LOCAL_WORLD_SIZE"], g["MASTER_ADDR"]) for g in shown(tmp_path, 2)] == [
        ("0", "2", "127.0.0.1"),
        ("1", "2", "127.0.0.1"),
    ]
    assert run.wait_gone(20) == set()


@pytest.mark.full
@pytest.mark.parametrize("program", ["mpirun.openmpi", "mpirun.mpich"])
def test_plain_mpirun_finds_its_ranks(tmp_path, program):
    more = ["--allow-run-as-root", "--oversubscribe"] if "openmpi" in program else []
    (tmp_path / "script.py").write_text(
        "import torch, deepc, torch.distributed as d; deepc.init_distributed(); x = torch.ones(3); d.all_reduce(x); "
        "print(f'sum {x[0].item()} {d.get_rank()}\\n', end=''); d.destroy_process_group()"
    )
    done = subprocess.run(
        [_mpirun(program), *more, "-n", "2", sys.executable, "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0 and done.stdout.count("sum 2.0") == 2, done.stderr


SLURM_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldPort={ports[0]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=1000
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@pytest.fixture
def cluster(tmp_path: Path):
    """A Slurm of two nodes on this machine; the environment that leads there."""
    daemons = [shutil.which(n, path=os.environ["PATH"] + ":/usr/sbin:/sbin") for n in ("slurmctld", "slurmd")]
    if not all(daemons) or not shutil.which("srun") or os.geteuid() != 0:
        pytest.skip("needs root and Slurm (apt-get install slurmctld slurmd slurm-client)")
    folder = tmp_path / "slurm"
    (folder / "state").mkdir(parents=True)
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    (folder / "slurm.conf").write_text(
        SLURM_CONF.format(host=os.uname().nodename.split(".")[0], folder=folder, ports=ports)
    )
    env = {"SLURM_CONF": str(folder / "slurm.conf"), "MASTER_ADDR": "127.0.0.1"}  # the nodes' names can't be resolved
    commands = [[daemons[0], "-D"], [daemons[1], "-D", "-N", "n1"], [daemons[1], "-D", "-N", "n2"]]
    started = [
        subprocess.Popen(
            c, env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for c in commands
    ]
    try:
        end = time.monotonic() + 60
        while subprocess.run(
            ["srun", "-N2", "-n2", "--immediate=2", "true"], env={**os.environ, **env}, capture_output=True
        ).returncode:
            if time.monotonic() > end:
                pytest.skip("Slurm's daemons don't come up here")
            time.sleep(0.5)
        yield env
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(20)


@pytest.mark.full
def test_real_slurm(tmp_path, cluster):
    """Ranks of two nodes meet; a failing one is reported; a killed launcher leaves no rank and no job."""
    run = Run(
        tmp_path, TRAIN, launcher=("--launcher", "slurm", "--num_nodes", "2", "--num_ranks", "2", "--cpu"), env=cluster
    )
    code, out, err = run.finish()
    assert (
        code == 0
        and out.count("sum 10.0") == 4
        and {f"{r}: rank {r} speaks" for r in range(4)} <= set(out.splitlines())
    ), (out, err)
    assert [(g["RANK"], g["LOCAL_RANK"], g["LOCAL_WORLD_SIZE"]) for g in shown(tmp_path, 4)] == [
        ("0", "0", "2"),
        ("1", "1", "2"),
        ("2", "0", "2"),
        ("3", "1", "2"),
    ]
    pmi2 = "--launcher_args=--mpi=pmi2"  # sets rank and size as MPICH does, and no more
    run = Run(tmp_path, FAIL, "raise", launcher=("--launcher", "slurm", "--num_nodes", "2", "--cpu", pmi2), env=cluster)
    code, _, err = run.finish()
    assert (
        code == 1 and err.rstrip().splitlines()[-2] == "ValueError: boom on host 2" and "deepc run: rank 1 (pid " in err
    )
    for file in tmp_path.glob("ready*"):
        file.unlink()
    run = Run(tmp_path, FAIL, launcher=("--launcher", "slurm", "--num_nodes", "2", "--cpu"), env=cluster)
    wait_for([tmp_path / "ready0", tmp_path / "ready1"], run)
    run.process.kill()
    run.finish()
    assert run.wait_gone(30) == set()


# ---- which rank am I -------------------------------------------------------------------------------------------------
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[08-10],login",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "123",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def test_places():
    name, found = places.discover(SLURM)
    assert (
        name == "Slurm"
        and found.pop("MASTER_PORT") == places.discover({**SLURM, "SLURM_PROCID": "0"})[1]["MASTER_PORT"]
    )
    assert found == {"RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "gpu08"}
    name, found = places.discover({**SLURM, **OPENMPI})
    assert (
        name == "OpenMPI"
        and [found[v] for v in places.VARIABLES[:5]] == ["3", "4", "3", "4", "127.0.0.1"]
        and 12000 <= int(found["MASTER_PORT"]) < 30000
    )
    assert places.discover(MPICH)[1]["RANK"] == "1"
    two = {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert (
        places.discover({**two, "MASTER_ADDR": "head"})[1]["MASTER_ADDR"] == "head"
        and places.discover({**two, "MASTER_ADDR": "head"})[1]["MASTER_PORT"] == "29500"
    )
    with pytest.raises(places.PlaceError, match="export MASTER_ADDR"):
        places.discover(two)
    with pytest.raises(places.PlaceError, match="MPI_LOCALRANKID is not"):
        places.discover({"PMI_RANK": "0", "PMI_SIZE": "2"})


def test_pmi2_of_slurm_leaves_the_place_to_slurm():
    """It sets rank and size alone."""
    pmi2 = {"PMI_FD": "9", "PMI_JOBID": "77.0", "PMI_RANK": "5", "PMI_SIZE": "7"}
    assert places.discover({**SLURM, **pmi2}) == places.discover(SLURM)
    for other in ({"PMI_RANK": "4"}, {"PMI_SIZE": "14"}):  # of an mpirun inside
        with pytest.raises(places.PlaceError, match="MPI_LOCALRANKID is not"):
            places.discover({**SLURM, **pmi2, **other})
    assert places.discover({**SLURM, **MPICH})[0] == "MPICH"


def test_no_place():
    assert places.discover({}) is None
    assert (
        places.discover({"SLURM_PROCID": "0", "SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}) is None
    )  # the shell of sbatch: one process


@pytest.mark.parametrize(
    "text, names",
    [
        ("a", ["a"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,2]-x,b", ["n08-x", "n09-x", "n10-x", "n2-x", "b"]),
        ("r[1-2]c[1-2]", ["r1c1", "r1c2", "r2c1", "r2c2"]),
        ("", []),
    ],
)
def test_host_lists_of_slurm(text, names):
    assert places.expand(text) == names


def test_a_launcher_that_tells_too_little_is_an_error_of_init_distributed(monkeypatch):
    from deepc import comm
    from deepc.errors import ConfigError

    for name, value in {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="export MASTER_ADDR"):
        comm.init_distributed()


@pytest.mark.parametrize("port", [29500, 23456])
def test_the_name_deepspeed_finds_the_same_place(deepspeed, monkeypatch, port):
    """With MASTER_ADDR from the job's script: each rank of `srun --mpi=pmi2` was local rank 0."""
    from deepc.comm import start

    for name in places.VARIABLES:
        monkeypatch.setenv(name, "")  # to be forgotten after the test
        monkeypatch.delenv(name)
    pmi2 = {"PMI_RANK": "5", "PMI_SIZE": "7"}
    for name, value in {**SLURM, **pmi2, "MASTER_ADDR": "gpu08"}.items():
        monkeypatch.setenv(name, value)
    met = []
    monkeypatch.setattr(start.dist, "is_initialized", lambda: False)
    monkeypatch.setattr(start.dist, "init_process_group", lambda *_, **__: met.append(dict(os.environ)))
    found = places.discover({**SLURM, **pmi2, **({"MASTER_PORT": str(port)} if port != 29500 else {})})[1]
    deepspeed.init_distributed(distributed_port=port)
    assert {name: met[0][name] for name in places.VARIABLES} == found and found["LOCAL_RANK"] == "1"


# ---- the recipes -----------------------------------------------------------------------------------------------------
DOC = Path(__file__).parents[2] / "docs" / "launching.md"


def blocks(language: str) -> list[str]:
    import re

    return re.findall(rf"```{language}\n(.*?)```", DOC.read_text(), re.S)


def test_shell_recipes_are_shell():
    found = blocks("bash")
    assert len(found) >= 5 and any("#SBATCH" in b for b in found)
    for text in found:
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
        assert done.returncode == 0, (text, done.stderr)


def test_python_recipes_compile():
    assert len([compile(b, "recipe", "exec") for b in blocks("python")]) >= 2


def test_yaml_recipes_parse():
    yaml = pytest.importorskip("yaml")
    (job,) = (yaml.safe_load(b) for b in blocks("yaml"))
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert job["kind"] == "PyTorchJob" and (replicas["Master"]["replicas"], replicas["Worker"]["replicas"]) == (1, 3)
    assert replicas["Worker"]["template"]["spec"]["containers"][0]["name"] == "pytorch"  # the operator looks for it


def test_every_command_line_of_the_recipes_is_accepted(tmp_path, monkeypatch):
    """All `deepc run` lines: each becomes a plan."""
    import shlex

    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "hosts").write_text(next(b for b in blocks("text") if "slots=" in b))
    lines = [line for b in blocks("bash") for line in b.splitlines() if line.startswith("deepc run")]
    assert len(lines) >= 10
    for line in lines:
        assert plan(*shlex.split(line, comments=True)[2:]).ranks >= 1, line


def test_every_option_of_the_table_exists():
    import re

    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    known = {o for a in parser._actions for o in a.option_strings}
    named = {
        o
        for row in DOC.read_text().splitlines()
        if row.startswith("| `-")
        for o in re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", row.split(" | ")[0])
    }
    assert len(named) > 20 and named <= known, named - known
