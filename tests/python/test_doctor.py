"""`deepc doctor`: what it says of records made by hand (no processes), of runs that hang, of dumps, and of this
machine."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
from deepc.errors import ArgumentError
from deepc.observe.diagnose import diagnosis, doctor, flight
from deepc.observe.diagnose.flight import CAPACITY, Call, Group, Member, Record
from ranks import run_ranks

NOW = 1_700_000_000.0


# ---- records made by hand --------------------------------------------------------------------------------------------
def call_of(
    seq,
    op="all_reduce",
    *,
    begin,
    took=0.001,
    count=8,
    dtype="fp32",
    group=0,
    status="",
    where="train.py:10",
    root=0,
    tag=0,
    red_op=0,
):
    """A call that began `begin` seconds before NOW; took None: it has not ended."""
    start = NOW - begin
    return Call(
        seq,
        seq,
        op,
        dtype,
        count,
        4 * count,
        red_op,
        root,
        tag,
        2,
        group,
        start,
        None if took is None else start + took,
        status,
        where,
    )


def record_of(rank, calls, *, world=2, live=True, groups=None, state="S", reason="", status=""):
    members = tuple(Member(r, 9_000_000 + r) for r in range(world))  # above every pid_max
    found = {0: Group(0, "aa", "default_pg", rank, members, False)} if groups is None else groups
    return Record(
        f"process {os.getpid()}" if live else f"dump{rank}",
        9_000_000 + rank,
        rank,
        world,
        "host",
        live,
        NOW,
        status,
        reason,
        len(calls),
        0,
        found,
        tuple(calls),
        state,
    )


def history(n, *, late=0.0):
    return [call_of(s, begin=100 - s * 0.1 - late) for s in range(1, n + 1)]


def only(report, kind):
    found = [f for f in report.findings if f.kind == kind]
    assert len(found) == 1, report.findings
    return found[0]


def test_all_is_well():
    records = [record_of(r, history(30)) for r in range(2)]
    report = diagnosis.diagnose(records)
    assert report.findings == []
    assert diagnosis.as_text(records, report).endswith("Nothing hangs.")
    assert diagnosis.as_dict(records, report)["ok"] is True


def test_a_call_that_has_just_begun_does_not_hang():
    records = [record_of(0, [*history(3), call_of(4, begin=0.2, took=None)]), record_of(1, history(3))]
    assert diagnosis.diagnose(records).findings == []
    assert only(diagnosis.diagnose(records, stuck_s=0.1), "behind").ranks == (1,)


def test_the_rank_that_is_behind():
    records = [
        record_of(0, [*history(3), call_of(4, "broadcast", begin=65, took=None, where="train.py:42", root=0)]),
        record_of(1, history(3), state="T"),
    ]
    finding = only(diagnosis.diagnose(records), "behind")
    assert finding.ranks == (1,) and finding.group == "default_pg"
    assert (
        "rank 0 (pid 9000000) waits in call 4, broadcast(fp32, count 8, root 0) at train.py:42, since 65.0 s"
        in finding.text
    )
    assert (
        "for rank 1 (pid 9000001): rank 1 (pid 9000001) is in no call of this group: "
        "its last was call 3, all_reduce(fp32, count 8, sum) at train.py:10" in finding.text
    )
    assert "kill -CONT 9000001" in finding.text


def test_a_group_whose_calls_a_long_run_no_longer_has():
    """They were told as if there had never been one."""
    members = (Member(0, 9_000_000), Member(1, 9_000_001))
    groups = {i: Group(i, name, name, 0, members, False) for i, name in enumerate(("default_pg", "engine1"))}
    rows = [call_of(s, begin=100 - s * 0.05, group=1) for s in range(500, 500 + CAPACITY)]
    few, many = record_of(0, rows[-3:], groups=groups), record_of(0, rows, groups=groups)
    said = [diagnosis.as_text([r], diagnosis.diagnose([r])) for r in (few, replace(many, calls=47_027))]
    assert "rank 0 (pid 9000000) has made no call" in said[0]
    assert "rank 0 (pid 9000000) has made none of its last 1,024 calls in this group" in said[1]


def test_two_groups_that_wait_for_each_other():
    members = (Member(0, 9_000_000), Member(1, 9_000_001))

    def groups(rank):
        return {0: Group(0, "aa", "tp", rank, members, False), 1: Group(1, "bb", "dp", rank, members, False)}

    records = [
        record_of(0, [call_of(1, begin=20, took=None, group=0, where="a.py:1")], groups=groups(0)),
        record_of(1, [call_of(1, "barrier", begin=20, took=None, group=1, where="b.py:2")], groups=groups(1)),
    ]
    found = [f.text for f in diagnosis.diagnose(records).findings if f.kind == "behind"]
    assert len(found) == 2
    assert any(
        "group tp: rank 0" in t and "meanwhile it is in barrier() at b.py:2 of group dp since 20.0 s" in t
        for t in found
    )
    assert any(
        "group dp: rank 1" in t and "meanwhile it is in all_reduce(fp32, count 8, sum) at a.py:1 of group tp" in t
        for t in found
    )


@pytest.mark.parametrize(
    "change", [{"op": "all_gather"}, {"count": 9}, {"dtype": "bf16"}, {"red_op": 3}, {"root": 1}, {"tag": 5}]
)
def test_a_desync(change):
    other = {"op": "all_reduce", **change}
    records = [
        record_of(0, [*history(3), call_of(4, begin=5, took=None, where="a.py:1")]),
        record_of(1, [*history(3), call_of(4, begin=5, took=None, where="b.py:2", **other)]),
        record_of(2, [*history(3), call_of(4, begin=5, took=None, where="a.py:1")]),
    ]
    records = [record_of(r.rank, r.rows, world=3) for r in records]
    finding = only(diagnosis.diagnose(records), "desync")
    assert finding.ranks == (0, 1, 2)
    assert re.search(
        r"as their call 4: rank 0 \(pid 9000000\) and rank 2 \(pid 9000002\) called all_reduce\(.*\) at a.py:1; "
        r"rank 1 \(pid 9000001\) called .* at b.py:2",
        finding.text,
    )


def test_blocks_of_different_sizes_are_no_desync():
    records = [
        record_of(r, [call_of(s, "all_to_allv", begin=50 - s, count=10 + r + s) for s in range(1, 5)]) for r in range(2)
    ]
    assert diagnosis.diagnose(records).findings == []


def test_a_process_that_is_gone():
    records = [record_of(0, [*history(3), call_of(4, begin=30, took=None)])]
    finding = only(diagnosis.diagnose(records), "missing")
    assert finding.ranks == (1,) and "rank 1 (pid 9000001) is gone: its process has ended" in finding.text


def test_a_rank_without_a_dump():
    rows = [*history(3), call_of(4, begin=30, took=29, status="E_TIMEOUT")]
    records = [record_of(0, rows, live=False, reason="group default_pg: time-out after 29 s", status="E_TIMEOUT")]
    report = diagnosis.diagnose(records)
    assert (
        "rank 0 (pid 9000000) waited in call 4" in only(report, "missing").text
        and "rank 1 (pid 9000001) left no flight record" in only(report, "missing").text
    )
    assert "rank 0 ended with E_TIMEOUT: group default_pg: time-out" in only(report, "error").text


def test_a_rank_that_left_the_group():
    members = (Member(0, 9_000_000), Member(1, 9_000_001))
    left = {0: Group(0, "aa", "default_pg", 1, members, True)}
    records = [record_of(0, [*history(3), call_of(4, begin=30, took=None)]), record_of(1, history(3), groups=left)]
    assert (
        "rank 1 (pid 9000001) left the group; its last was call 3" in only(diagnosis.diagnose(records), "missing").text
    )


def test_a_straggler():
    records = [
        record_of(0, history(40)),
        record_of(1, [call_of(c.seq, begin=NOW - c.begin - 0.004) for c in history(40)]),
    ]
    finding = only(diagnosis.diagnose(records), "straggler")
    assert (
        finding.ranks == (1,)
        and "comes last to 100 % of the last 40 calls, 4 ms after the first on average" in finding.text
    )
    noise = [
        record_of(0, history(40)),
        record_of(1, [call_of(c.seq, begin=NOW - c.begin + (0.004 if c.seq % 2 else -0.004)) for c in history(40)]),
    ]
    assert diagnosis.diagnose(noise).findings == []


def test_a_message_that_nobody_sends():
    records = [
        record_of(0, [call_of(1, "recv", begin=12, took=None, root=1, tag=7, where="pipe.py:5")]),
        record_of(1, [call_of(1, "send", begin=11, took=None, root=0, tag=8, where="pipe.py:9")]),
    ]
    found = {f.ranks: f.text for f in diagnosis.diagnose(records).findings if f.kind == "message"}
    assert (
        "rank 0 (pid 9000000) is in recv(fp32, count 8, tag 7) at pipe.py:5 from rank 1 (pid 9000001) since 12.0 s"
        in found[(0, 1)]
    )
    assert "rank 1 (pid 9000001) has open towards it: send(fp32, count 8, tag 8) at pipe.py:9" in found[(0, 1)]
    assert (1, 0) in found


# ---- runs that hang --------------------------------------------------------------------------------------------------
_HANG = """
    import datetime, os, pathlib, sys, time
    import torch, torch.distributed as dist
    import deepc
    deepc.init_distributed(timeout=datetime.timedelta(seconds=float(sys.argv[1])))
    rank = dist.get_rank()
    x = torch.ones(8)
    for _ in range(5):
        dist.all_reduce(x)  # line 9
    pathlib.Path(f"pid{rank}").write_text(str(os.getpid()))
    if rank == 1:
        while not os.path.exists("go"):
            time.sleep(0.05)
    dist.all_gather_into_tensor(torch.empty(16, dtype=torch.bfloat16), x.bfloat16())  # line 14
"""


def deepc(*arguments: str) -> tuple[int, str]:
    """Exit code and output of `deepc doctor`."""
    from deepc.cli import main

    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        code = main(["doctor", *arguments])
    return code, text.getvalue()


def start_hanging(tmp_path: Path, timeout_s: float, **env: str) -> subprocess.Popen:
    (tmp_path / "hang.py").write_text(textwrap.dedent(_HANG))
    return subprocess.Popen(
        [sys.executable, "-m", "deepc", "run", "--num_ranks", "2", "--cpu", "hang.py", str(timeout_s)],
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "TMPDIR": str(tmp_path), **env},
    )


def pids_of(tmp_path: Path, run: subprocess.Popen) -> list[int]:
    end = time.monotonic() + 90
    files = [tmp_path / "pid0", tmp_path / "pid1"]
    while not all(f.exists() and f.read_text() for f in files):
        assert run.poll() is None and time.monotonic() < end, run.stdout.read() if run.poll() is not None else "no pids"
        time.sleep(0.05)
    return [int(f.read_text()) for f in files]


def test_a_run_that_hangs_is_read_from_outside_and_goes_on(tmp_path):
    run = start_hanging(tmp_path, 300)
    try:
        pids = pids_of(tmp_path, run)
        os.kill(pids[1], signal.SIGSTOP)
        time.sleep(1.5)
        code, said = deepc(str(pids[0]))  # one pid is enough
        assert code == 1, said
        assert re.search(
            rf"behind: group default_pg: rank 0 \(pid {pids[0]}\) waits in call \d+, all_gather\(bf16, count 8\) at"
            r" \S*hang.py:14, since",
            said,
        ), said
        assert re.search(
            rf"rank 1 \(pid {pids[1]}\) is in no call of this group: "
            r"its last was call \d+, all_reduce\(fp32, count 8, sum\) at \S*hang.py:9",
            said,
        )
        assert f"kill -CONT {pids[1]}" in said
        data = json.loads(deepc("--json", str(pids[1]))[1])
        assert (
            [f["kind"] for f in data["findings"]] == ["behind"]
            and data["findings"][0]["ranks"] == [1]
            and not data["ok"]
        )
        assert {r["pid"] for r in data["records"]} == set(pids)
        every = json.loads(deepc("--json", "--all")[1])
        assert set(pids) <= {r["pid"] for r in every["records"]}
        os.kill(pids[1], signal.SIGCONT)
        (tmp_path / "go").touch()
        out, _ = run.communicate(timeout=60)
        assert run.returncode == 0, out  # nobody was disturbed
    finally:
        if run.poll() is None:
            run.kill()
        run.communicate()
    assert deepc(str(pids[0]))[0] == 2  # no such process any more


@pytest.mark.full
def test_dumps_of_a_time_out(tmp_path):
    run = start_hanging(tmp_path, 20, DEEPC_FLIGHT_DIR=str(tmp_path / "dumps"))
    try:
        pids = pids_of(tmp_path, run)
        out, _ = run.communicate(timeout=90)
    finally:
        if run.poll() is None:
            run.kill()
            run.communicate()
    assert run.returncode != 0 and "time-out after 20000 ms" in out, out
    code, said = deepc(str(tmp_path / "dumps"))
    assert code == 1, said
    assert re.search(
        rf"rank 0 \(pid {pids[0]}\) ended call \d+, all_gather\(bf16, count 8\) at \S*hang.py:14, with E_TIMEOUT", said
    ), said
    assert "rank 1 did not arrive" in said
    file = next((tmp_path / "dumps").glob("*.bin"))
    assert json.loads(deepc("--json", str(file))[1])["records"][0]["status"] == "E_TIMEOUT"
    assert not list((tmp_path / "dumps").glob("*.part"))


def desync_with_dumps(rank, world):
    import torch
    import torch.distributed as dist
    from deepc.errors import MismatchError

    try:
        dist.all_reduce(torch.ones(5 + rank))
    except MismatchError:
        return True
    return False


def test_dumps_of_a_desync(tmp_path):
    assert run_ranks(desync_with_dumps, 2, fresh=True, env={"DEEPC_FLIGHT_DIR": str(tmp_path)}) == [True, True]
    records = flight.read_folder(tmp_path)
    assert [r.rank for r in records] == [0, 1] and all(r.status == "E_MISMATCH" for r in records)
    finding = only(diagnosis.diagnose(records), "desync")
    assert re.search(
        r"rank 0 \(pid \d+\) called all_reduce\(fp32, count 5, sum\) at python/test_doctor.py:\d+; "
        r"rank 1 \(pid \d+\) called all_reduce\(fp32, count 6, sum\) at python/test_doctor.py:\d+",
        finding.text,
    )


# ---- questions that can't be answered --------------------------------------------------------------------------------
def test_what_has_no_answer(tmp_path, capsys):
    from deepc.cli import main

    (tmp_path / "noise.bin").write_bytes(b"x" * 200_000)
    (tmp_path / "short").write_bytes(b"")
    other = subprocess.Popen(["sleep", "60"])  # this process itself may have a record, from another test
    for arguments, text in (
        ((str(tmp_path / "noise.bin"),), "noise.bin: this is no flight record"),
        ((str(tmp_path / "short"),), "is cut: it has 0 bytes"),
        ((str(tmp_path / "none"),), "No such file"),
        ((str(tmp_path),), "no deepc-flight-\\*.bin in this folder"),
        ((str(other.pid),), "neither process \\d+ nor one that it started has a flight record"),
        ((str(2**22 + 5),), "there is no process"),
        ((str(os.getpid()), str(tmp_path)), "not both"),
    ):
        assert main(["doctor", *arguments]) == 2
        assert re.search(text, capsys.readouterr().err)
    other.kill()
    other.wait()
    with pytest.raises(ArgumentError, match="there is no process"):
        flight.read_process(2**22 + 5)


# ---- this machine ----------------------------------------------------------------------------------------------------
def test_the_machine_and_the_self_test():
    done = subprocess.run(
        [sys.executable, "-m", "deepc", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    data = json.loads(done.stdout)
    assert done.returncode == (0 if data["ok"] else 1)
    checks = {c["name"]: c for c in data["checks"]}
    for name in (
        "deepc",
        "instruction set",
        "torch",
        "GPUs",
        "kernel",
        "cores",
        "memory",
        "open files",
        "locked memory",
        "memfd",
        "pidfd",
        "futex",
        "process_vm_readv",
        "huge pages",
        "collectives",
        "latency",
        "bandwidth",
        "huge shared pages",
    ):
        assert name in checks, sorted(checks)
    assert checks["collectives"]["state"] == "ok", checks
    assert all(c["fix"] for c in data["checks"] if c["state"] != "ok")


def test_each_fix_is_named(monkeypatch):
    """What is wrong is found, in a process that makes it wrong."""
    import resource

    monkeypatch.setenv("DEEPC_SPIN_USS", "5")
    spin = next(c for c in doctor._variables() if c.name == "DEEPC_SPIN_USS")
    assert spin.state == "warn" and spin.fix == "did you mean DEEPC_SPIN_US?"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        files = doctor._limits()[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert files.state == "warn" and "ulimit -n 1024" in files.fix and files.value.startswith("256 ")
    monkeypatch.setattr(doctor, "_quota", lambda: 0.5)
    assert doctor._cores().state == "warn" and "at most 1 ranks" in doctor._cores().fix
    monkeypatch.setattr(os, "memfd_create", lambda *_: (_ for _ in ()).throw(OSError(1, "Operation not permitted")))
    memfd = next(c for c in doctor._syscalls() if c.name == "memfd")
    assert memfd.state == "fail" and "seccomp" in memfd.fix
    monkeypatch.setattr(doctor.socket, "getaddrinfo", lambda *_, **__: (_ for _ in ()).throw(OSError("unknown")))
    assert doctor._hostname().state == "warn" and "/etc/hosts" in doctor._hostname().fix


def test_a_build_of_another_processor_is_told(monkeypatch, caplog):
    import deepc
    import tiny
    import torch
    from deepc.core.lib import C

    amx = 4  # in use, where the processor has it
    monkeypatch.setattr(C, "dc_isa_available", lambda isa: isa <= amx)
    monkeypatch.setattr(C, "dc_isa_current", lambda isa: setattr(isa._obj, "value", amx))
    monkeypatch.setattr(C, "dc_isa_left_out", lambda: -1)
    assert doctor._isa() == ("instruction set", "ok", "amx_bf16", "")
    monkeypatch.setattr(C, "dc_isa_left_out", lambda: 3)
    found = doctor._isa()
    assert found.state == "warn" and "no kernels for avx512_bf16" in found.value and "DEEPC_NATIVE=OFF" in found.fix
    deepc.initialize(model=torch.nn.Linear(2, 2), config=tiny.config(0, micro=1))[0].destroy()
    assert "no kernels for avx512_bf16, which this processor has: build it here" in caplog.text


def test_a_self_test_that_fails_says_what_failed(monkeypatch):
    monkeypatch.setattr(doctor, "_TEST_RANK", "import sys; print('the reason'); sys.exit(1)")
    (found,) = doctor.self_test()
    assert found.state == "fail" and "the reason" in found.fix
    monkeypatch.setattr(doctor, "_TEST_RANK", "import time; time.sleep(100)")
    (found,) = doctor.self_test(limit_s=0.5)
    assert found.state == "fail" and "did not finish within" in found.value
    right = {
        "wrong": [],
        "barrier_us": 1.0,
        "all_reduce_4k_us": 2.0,
        "torch_all_reduce_4k_us": 9.0,
        "all_reduce_16m_ms": 8.0,
        "segment_mib": 4.0,
        "huge_mib": 0.0,
        "on_core": True,
        "recorded": 200,
    }
    assert [c.state for c in doctor._judge([right, right])] == ["ok", "ok", "ok", "warn"]
    assert doctor._judge([right, {**right, "wrong": ["broadcast"]}])[0].state == "fail"
    assert doctor._judge([right, {**right, "on_core": False}])[0].state == "fail"


_ENDS = """
    import os, pathlib, sys, time
    import torch, torch.distributed as dist
    import deepc
    deepc.init_distributed()
    rank = dist.get_rank()
    dist.all_reduce(torch.ones(8))
    pathlib.Path(f"pid{rank}").write_text(str(os.getpid()))
    if rank == 1:
        os._exit(0)
    while not pathlib.Path("go").exists():
        time.sleep(0.05)
"""


@pytest.mark.full
def test_a_rank_that_ended_beside_one_that_runs_is_a_finding_and_the_launchers_pid_is_enough(tmp_path):
    (tmp_path / "ends.py").write_text(textwrap.dedent(_ENDS))
    command = ["run", "--num_ranks", "2", "--cpu", "ends.py"]
    start = "import sys, deepc.launch.driver as d; d.FINISHED_S = 0.1; from deepc.cli import main; "
    start += f"sys.exit(main({command}))"
    run = subprocess.Popen(
        [sys.executable, "-c", start],
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    try:
        pids = pids_of(tmp_path, run)
        while os.path.exists(f"/proc/{pids[1]}"):
            time.sleep(0.05)
        code, said = deepc(str(run.pid))
        assert code == 1, said
        assert (
            f"missing: group default_pg: rank 1 (pid {pids[1]}) ended without leaving it, and rank 0 (pid {pids[0]})"
            " still runs" in said
        ), said
        time.sleep(1.5)  # the launcher's loop comes round in half a second
        (tmp_path / "go").touch()
        out, _ = run.communicate(timeout=60)
    finally:
        if run.poll() is None:
            run.kill()
            run.communicate()
    assert run.returncode == 0, out
    assert out.count("deepc run: rank 1 ended with exit code 0 more than 0 s ago, and 1 of 2 ranks still run.") == 1, (
        out
    )
    assert f"`deepc doctor {run.pid}`" in out
