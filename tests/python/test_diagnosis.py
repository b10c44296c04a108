"""What an error says: time-outs, desyncs and deaths through torch.distributed, on every rank that is left."""

from __future__ import annotations

import datetime
import faulthandler
import json
import os
import random
import re
import signal
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from programs import run_python
from ranks import run_ranks

HERE = r"python/test_diagnosis\.py"


def _line(marker: str) -> str:
    """This file's line that holds `# <marker>`, as messages name it."""
    lines = Path(__file__).read_text().splitlines()
    return f"python/test_diagnosis.py:{1 + next(i for i, text in enumerate(lines) if text.endswith('# ' + marker))}"


# ---- time-outs -------------------------------------------------------------------------------------------------------
def wait_for_one_that_sleeps(rank, world):
    from deepc.errors import CommTimeoutError

    dist.barrier()  # all were here, however long that took
    dist.group.WORLD.set_timeout(datetime.timedelta(seconds=1.5))
    if rank == 1:
        time.sleep(4)
    try:
        dist.all_reduce(torch.ones(6, dtype=torch.bfloat16))  # sleeper
    except CommTimeoutError as exc:
        return str(exc)
    return "no error"


def test_a_timeout_tells_where_every_rank_is():
    out = run_ranks(wait_for_one_that_sleeps, 3)
    for text in out:  # the one that slept hears of it when it comes
        assert "group default_pg: time-out after 1500 ms: rank 1 did not arrive" in text
        assert re.search(r"rank 1 \(pid \d+\) has finished barrier", text), text
        for rank in (0, 2):
            assert re.search(
                rf"rank {rank} \(pid \d+\) is in all_reduce\(bf16, count 6, sum\) \[call \d+ at {_line('sleeper')}\]",
                text,
            ), text


# ---- desyncs ---------------------------------------------------------------------------------------------------------
def _wrong_op(rank):
    if rank == 1:
        dist.broadcast(torch.ones(7, dtype=torch.float64), 0)  # op one
    else:
        dist.all_reduce(torch.ones(7, dtype=torch.float64), op=dist.ReduceOp.MAX)  # op others


def _wrong_dtype(rank):
    if rank == 1:
        dist.all_reduce(torch.ones(7, dtype=torch.int32))  # dtype one
    else:
        dist.all_reduce(torch.ones(7))  # dtype others


def _wrong_count(rank):
    if rank == 1:
        dist.all_reduce(torch.ones(3, 3))  # count one
    else:
        dist.all_reduce(torch.ones(7))  # count others


def _wrong_reduction(rank):
    if rank == 1:
        dist.all_reduce(torch.ones(7), op=dist.ReduceOp.MIN)  # reduction one
    else:
        dist.all_reduce(torch.ones(7), op=dist.ReduceOp.MAX)  # reduction others


def _wrong_root(rank):
    if rank == 1:
        dist.broadcast(torch.ones(7), 1)  # root one
    else:
        dist.broadcast(torch.ones(7), 0)  # root others


_DESYNCS = {
    "op": (_wrong_op, r"broadcast\(fp64, count 7, root 0\)", r"all_reduce\(fp64, count 7, max\)"),
    "dtype": (_wrong_dtype, r"all_reduce\(int32, count 7, sum\)", r"all_reduce\(fp32, count 7, sum\)"),
    "count": (_wrong_count, r"all_reduce\(fp32, count 9, sum\)", r"all_reduce\(fp32, count 7, sum\)"),
    "reduction": (_wrong_reduction, r"all_reduce\(fp32, count 7, min\)", r"all_reduce\(fp32, count 7, max\)"),
    "root": (_wrong_root, r"broadcast\(fp32, count 7, root 1\)", r"broadcast\(fp32, count 7, root 0\)"),
}


def make_a_desync(rank, world, kind):
    from deepc.errors import MismatchError

    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    try:
        _DESYNCS[kind][0](rank)
    except MismatchError as exc:
        return str(exc)
    # a root that is through before the others come hears of it at its next call
    try:
        dist.barrier()
    except MismatchError as exc:
        return str(exc)
    return "no error"


def _complete(named: str, others: list[str], text: str) -> bool:
    """All that agree are named, or the text says that some had not arrived when the difference was seen."""
    return (named == ", ".join(others)) != ("Others have not arrived" in text)


@pytest.mark.parametrize("kind", list(_DESYNCS))
def test_a_desync_is_told_on_every_rank(kind):
    _, one, others = _DESYNCS[kind]
    for text in run_ranks(make_a_desync, 3, args=(kind,)):
        assert "different collectives in group default_pg" in text
        assert re.search(rf"rank 1 called {one} \[call (\d+) at {_line(kind + ' one')}\]", text), text
        found = re.search(rf"(rank [02](, rank 2)?) called {others} \[call \d+ at {_line(kind + ' others')}\]", text)
        assert found and _complete(found[1], ["rank 0", "rank 2"], text), text
        seqs = re.findall(r"\[call (\d+) at", text.split("All ranks")[0])
        assert len(set(seqs)) == 1 and int(seqs[0]) >= 4, text


def desync_in_a_subgroup(rank, world):
    from deepc.errors import MismatchError

    group = dist.new_group([0, 2])
    if rank == 1:
        dist.barrier()
        return ""
    text = "no error"
    try:
        dist.all_reduce(torch.ones(5 + rank), group=group)
    except MismatchError as exc:
        text = str(exc)
    dist.barrier()  # the other groups are sound
    return text


def test_a_subgroup_is_named_with_its_global_ranks():
    out = run_ranks(desync_in_a_subgroup, 3)
    assert out[1] == ""
    for text in (out[0], out[2]):
        assert re.search(r"rank 0 called all_reduce\(fp32, count 5, sum\)", text), text
        assert re.search(r"rank 2 \(1 in the group\) called all_reduce\(fp32, count 7, sum\)", text), text
        assert "default_pg" not in text


# ---- deaths ----------------------------------------------------------------------------------------------------------
_DEATHS = {
    "os.kill(os.getpid(), 9)": "died: killed by signal 9 (Killed)",
    "os._exit(3)": "died: it exited with code 3 without leaving the group",
    "ctypes.string_at(0)": "died: killed by signal 11 (Segmentation fault)",
    "sys.exit(3)": "left the group",
}

_VICTIM = """
    import ctypes, os, sys, faulthandler, pathlib
    import torch, torch.distributed as dist
    import deepc
    faulthandler.disable()
    deepc.init_distributed()
    rank = dist.get_rank()
    dist.barrier()
    if rank == 1:
        {how}
    try:
        dist.all_reduce(torch.ones(5))
    except deepc.DeepcError as exc:
        pathlib.Path(f"said{{rank}}").write_text(f"{{type(exc).__name__}}: {{exc}}")
        raise
"""


@pytest.mark.parametrize(
    "how", [h if h.startswith("os.kill") else pytest.param(h, marks=pytest.mark.full) for h in _DEATHS]
)
def test_a_death_under_the_launcher_is_told_by_all_survivors(tmp_path, how):
    (tmp_path / "script.py").write_text(textwrap.dedent(_VICTIM.format(how=how)))
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp_path)}
    done = run_python("-m", "deepc", "run", "--num_ranks", "3", "--cpu", "script.py", cwd=tmp_path, env=env)
    assert done.returncode != 0
    for rank in (0, 2):
        said = (tmp_path / f"said{rank}").read_text()
        assert said.startswith("RankDiedError"), said
        assert re.search(r"rank 1 \(pid \d+\) ", said) and _DEATHS[how] in said, said
        # the one who saw it first tells all; each adds what it was in itself
        assert re.search(
            r"rank [02] waits for it in all_reduce\(fp32, count 5, sum\) \[call \d+ at \S*script\.py:12\]", said
        ), said
        assert re.search(r"\[in all_reduce\(torch.float32 \(5,\)\) on default_pg at \S*script\.py:12\]$", said), said
        assert "rank 1 has finished barrier" in said, said
    if "kill" in how:
        assert (
            "rank 1 " in done.stderr[done.stderr.rindex("deepc run: rank") :]
            and done.returncode == 128 + signal.SIGKILL
        )


def test_the_launcher_leaves_a_failed_rank_readable_for_a_moment():
    from deepc.launch.runner import _LingeringPopen

    failed = _LingeringPopen([sys.executable, "-S", "-c", "import os; os._exit(3)"])
    os.waitid(os.P_PID, failed.pid, os.WEXITED | os.WNOWAIT)
    assert failed.poll() is None  # not collected: its state can be read
    assert Path(f"/proc/{failed.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    while failed.poll() is None:
        time.sleep(0.01)
    assert failed.returncode == 3
    fine = _LingeringPopen([sys.executable, "-S", "-c", ""])
    os.waitid(os.P_PID, fine.pid, os.WEXITED | os.WNOWAIT)
    assert fine.poll() == 0


# ---- many ------------------------------------------------------------------------------------------------------------
def _forked(world: int, body, limit_s: float = 30.0) -> list[str | None]:
    """body(rank) in forks of this process, which has imported torch: what each returned; None of one that died;
    "[hung]" if it hangs."""
    pipes, pids = [], []
    for rank in range(world):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            faulthandler.dump_traceback_later(limit_s - 5, file=write)  # where it hangs
            try:
                text = body(rank)
            except BaseException as exc:
                text = f"unexpected {type(exc).__name__}: {exc}"
            os.write(write, text.encode())
            os._exit(0)
        os.close(write)
        pipes.append(read)
        pids.append(pid)
    import select

    out, end, said = [b""] * world, time.monotonic() + limit_s, {fd: r for r, fd in enumerate(pipes)}
    while said and (left := end - time.monotonic()) > 0:
        for fd in select.select(list(said), [], [], left)[0]:
            got = os.read(fd, 1 << 16)
            out[said[fd]] += got
            if not got:
                del said[fd]
    for rank in said.values():
        os.kill(pids[rank], signal.SIGKILL)
        out[rank] += b" [hung]"
    for fd, pid in zip(pipes, pids):
        os.close(fd)
        os.waitpid(pid, 0)
    return [text.decode() or None for text in out]


def storm_of_deaths(rank, world, trials):
    """The driver: each trial is a run of its own, of two or three ranks; one of them dies somewhere."""
    from deepc.errors import RankDiedError

    rng, found = random.Random(4), []
    for trial in range(trials):
        ranks, how, at = (
            2 + trial % 2,
            rng.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, 3, 77]),
            rng.randrange(1, 30),
        )
        victim = rng.randrange(ranks)
        with tempfile.TemporaryDirectory() as folder:

            def body(r: int) -> str:
                dist.init_process_group(
                    "deepc",
                    init_method=f"file://{folder}/store",
                    rank=r,
                    world_size=ranks,
                    timeout=datetime.timedelta(seconds=25),
                )
                x = torch.ones(1 + 3000 * (trial % 3))
                try:
                    for i in range(40):
                        if i == at and r == victim:
                            Path(folder, "died").write_text(str(time.monotonic()))
                            if how < 32 and how != 3:
                                signal.signal(how, signal.SIG_DFL) if how != signal.SIGKILL else None
                                os.kill(os.getpid(), how)
                            os._exit(how)
                        [dist.all_reduce, dist.broadcast, lambda t, *_: dist.barrier()][i % 3](
                            *((x,) if i % 3 == 0 else (x, 0))
                        )
                except RankDiedError as exc:
                    when = time.monotonic() - float(Path(folder, "died").read_text())
                    return json.dumps([str(exc), when])
                return "no error"

            found.append((ranks, int(how), victim, _forked(ranks, body)))
    return found


def check_deaths(trials: int) -> None:
    late = []
    for ranks, how, victim, said in run_ranks(
        storm_of_deaths, 1, args=(trials,), backend=None, fresh=True, limit_s=300 + 10 * trials
    )[0]:
        assert said[victim] is None
        for text in (t for r, t in enumerate(said) if r != victim):
            error, when = json.loads(text)
            end = (
                f"killed by signal {how} "
                if how in (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)
                else f"exited with code {how} "
            )
            assert re.search(rf"rank {victim} \(pid \d+\) died: (it )?{end}", error), error
            assert re.search(r"waits for it in (all_reduce|broadcast|barrier)\(", error) and re.search(
                rf"at {HERE}:\d+\]", error
            ), error
            late.append(when)
    # The time-out is 25 s; tests/fault/test_storm.py holds the 100 ms.
    assert sorted(late)[len(late) // 2] < 1 and max(late) < 20
    print(
        "survivors knew after", f"median {sorted(late)[len(late) // 2] * 1e3:.1f} ms, at most {max(late) * 1e3:.1f} ms"
    )


def test_deaths_are_diagnosed():
    check_deaths(5)


@pytest.mark.full
def test_50_deaths_are_diagnosed():
    check_deaths(50)


def storm_of_desyncs(rank, world, trials):
    from deepc.errors import MismatchError

    rng, texts = random.Random(9), []
    for trial in range(trials):
        group = dist.new_group(list(range(world)))
        for _ in range(
            1 + rng.randrange(4)
        ):  # at least one: else a quick rank can break the group while a slow one still opens it, in new_group
            dist.all_reduce(torch.ones(10), group=group)
        kind, odd = rng.randrange(4), rng.randrange(world)
        differs = rank == odd
        try:
            if kind == 0:
                dist.all_reduce(torch.ones(10 + differs), group=group)
            elif kind == 1:
                dist.all_reduce(torch.ones(10, dtype=torch.int64 if differs else torch.float32), group=group)
            elif kind == 2:
                (dist.barrier if differs else lambda group: dist.all_reduce(torch.ones(10), group=group))(group=group)
            else:
                dist.all_reduce(torch.ones(10), op=dist.ReduceOp.MIN if differs else dist.ReduceOp.SUM, group=group)
            texts.append((odd, "no error"))
        except MismatchError as exc:
            texts.append((odd, str(exc)))
    dist.barrier()
    return texts


def check_desyncs(trials: int) -> None:
    out = run_ranks(storm_of_desyncs, 3, args=(trials,), limit_s=300 + 5 * trials)
    for rank in range(3):
        for odd, text in out[rank]:
            assert re.search(rf"rank {odd} called \w+\(", text), text
            others = [f"rank {r}" for r in range(3) if r != odd]
            named = re.search(rf"({others[0]}(, {others[1]})?|{others[1]}) called ", text)
            assert named and _complete(named[1], others, text), text
            assert len(re.findall(rf"\[call \d+ at {HERE}:\d+\]", text)) >= 2, text


def test_desyncs_are_diagnosed():
    check_desyncs(6)


@pytest.mark.full
def test_50_desyncs_are_diagnosed():
    check_desyncs(50)


# ---- ranks of one engine that wait in different groups --------------------------------------------------------------
def _save_on_one(engine, rank, folder):
    if rank == 0:
        engine.save_checkpoint(folder)


def _skip_a_step(engine, rank, folder):
    if rank == 0:
        engine.step()


def _meet_on_one(engine, rank, folder):
    if rank == 0:
        dist.barrier()


def leave_a_call_out(rank, world, mistake, stage, folder):
    """What `mistake` raises, and the training after it."""
    import deepc
    from deepc.errors import MismatchError
    from tiny import TinyGPT

    torch.manual_seed(0)
    engine = deepc.initialize(
        model=TinyGPT(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW"},
        },
    )[0]
    x = torch.randint(61, (1, 16))
    try:
        for i in range(4):
            engine.backward(engine(x, x))
            if i != 1 or mistake is not _skip_a_step:
                engine.step()
            if i == 1:
                mistake(engine, rank, folder)
    except MismatchError as exc:
        return str(exc)
    return "no error"


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.full), 3])
@pytest.mark.parametrize("mistake", [_save_on_one, _skip_a_step, _meet_on_one])
def test_a_rank_that_leaves_a_call_out_is_told_on_every_rank(mistake, stage, tmp_path):
    for text in run_ranks(leave_a_call_out, 2, args=(mistake, stage, str(tmp_path))):
        assert "ranks wait for each other in different groups" in text, text
        where = "default_pg" if mistake is _meet_on_one else r"engine\d+/control"
        assert re.search(rf"rank 0 is in .*of group {where} and waits for rank 1", text), text
        assert re.search(r"rank 1 is in .*of group engine\d+/buckets and waits for rank 0", text), text
        assert "Does one rank alone save or load a checkpoint, skip a step, or call torch.distributed?" in text


def open_an_engine_alone(rank, world, peer):
    """The driver: rank 0 opens an engine, and rank 1 does what `peer` says. What each rank raised."""
    import deepc
    import deepc.engine.assembly  # once, and not in each child, which would take long on a loaded machine
    from deepc.errors import CommError
    from tiny import TinyGPT

    def engine():
        return deepc.initialize(model=TinyGPT(), config={"train_micro_batch_size_per_gpu": 1})[0]

    with tempfile.TemporaryDirectory() as folder:

        def body(r: int) -> str:
            dist.init_process_group("deepc", init_method=f"file://{folder}/store", rank=r, world_size=2)
            first = engine() if peer == "trains" else None
            try:
                if r == 0:
                    engine()
                elif peer == "trains":
                    x = torch.randint(61, (1, 16))
                    first.backward(first(x, x))
                    first.step()
                elif peer == "meets":
                    dist.barrier()
            except CommError as exc:
                said = f"{type(exc).__name__}: {exc}"
                told(r)
                return said
            return "no error"

        def told(r: int) -> None:
            """Who was told stays until the other one was: on a loaded machine its exit would be seen first."""
            Path(folder, f"told{r}").touch()
            end = time.monotonic() + 60
            while peer != "ends" and not Path(folder, f"told{1 - r}").exists() and time.monotonic() < end:
                time.sleep(0.02)

        return _forked(2, body, 110.0)


@pytest.mark.parametrize("peer", ["trains", "meets", "ends"])
def test_an_engine_that_one_rank_opens_alone_is_told(peer):
    said = run_ranks(open_an_engine_alone, 1, args=(peer,), backend=None, fresh=True)[0]
    if peer == "ends":
        assert re.match(
            r"RankDiedError: rank 1 \(pid \d+\) died: it exited with code 0 without leaving the group", said[0]
        )
        assert (
            "rank 0 waits for it to open group engine1: deepc.initialize() and zero.Init are for all ranks" in said[0]
        )
        return
    for text in said:
        assert text.startswith("MismatchError: ranks wait for each other in different groups"), text
        assert re.search(r"rank 1 is in .* and waits for rank 0", text), text


def open_different_groups(rank, world):
    """Over a default group of Gloo, which shows no waits: rank 0 makes a module under zero.Init, the others go on."""
    import deepc
    from deepc.errors import MismatchError

    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    try:
        if rank == 0:
            with deepc.zero.Init(config_dict_or_path=config):
                torch.nn.Linear(8, 8)
        deepc.initialize(model=torch.nn.Linear(8, 8), config=config)
    except MismatchError as exc:
        return str(exc)
    return "no error"


def test_ranks_that_open_different_groups_are_told_without_a_communicator():
    for text in run_ranks(open_different_groups, 2, backend="gloo"):
        assert text.startswith("ranks wait for each other to open different groups, so none can be opened"), text
        assert re.search(r"rank 0 waits for rank 1 to open group init\d+", text), text
        assert re.search(r"rank 1 waits for rank 0 to open group engine\d+", text), text


def be_stopped(rank, world):
    """Rank 1 stops rank 0 (as a debugger or a freezer does) in the wait for rank 1, comes, and waits for it meanwhile:
    that rank 0 still shows its wait is no deadlock."""
    pids = [None, None]
    dist.all_gather_object(pids, os.getpid())
    x = torch.ones(1)
    if rank == 1:
        status = Path(f"/proc/{pids[0]}/status")
        slept = _number(status, "voluntary_ctxt_switches")
        while _number(status, "voluntary_ctxt_switches") < slept + 10:  # it sleeps for 20 ms each time
            time.sleep(0.001)
        os.kill(pids[0], signal.SIGSTOP)
        threading.Timer(3.0, os.kill, (pids[0], signal.SIGCONT)).start()  # longer than a circle may stand
    dist.all_reduce(x)
    dist.all_reduce(x)
    assert x.item() == 4


def _number(status: Path, name: str) -> int:
    return int(re.search(rf"^{name}:\s*(\d+)", status.read_text(), re.M)[1])


@pytest.mark.full
def test_a_rank_that_is_stopped_is_waited_for():
    run_ranks(be_stopped, 2)


def come_late(rank, world):
    """Rank 0's asynchronous call waits for rank 1, which waits for rank 0 elsewhere: no deadlock, for it comes."""
    import deepc

    x, config = torch.ones(1), {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
        time.sleep(3)  # longer than a circle may stand
        deepc.initialize(model=torch.nn.Linear(2, 2), config=config)
        work.wait()
    else:
        deepc.initialize(model=torch.nn.Linear(2, 2), config=config)
        dist.all_reduce(x)
    assert x.item() == 2


@pytest.mark.full
def test_a_caller_that_comes_after_its_asynchronous_call_is_waited_for():
    run_ranks(come_late, 2, env={"DEEPC_PROGRESS": "auto"})
