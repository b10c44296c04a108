"""Timeline and wall clock timers: files that Perfetto reads, lanes, waiting found across ranks, one clock, and nothing
at all while they are off."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import time

import pytest
import tiny
import torch
import torch.distributed as dist
from deepc import profile
from deepc.config import Config
from deepc.errors import ArgumentError, ConfigError, DeepcError
from deepc.observe.profile.recording import Recorder, _asked, timeline
from deepc.profile import check_trace, merge, trace
from ranks import placed, run_ranks


# ---- the file --------------------------------------------------------------------------------------------------------
def _event(**changes):
    return {"ph": "X", "name": "e", "cat": "c", "pid": 0, "tid": 1, "ts": 1.0, "dur": 2.0, **changes}


def _trace(*events):
    named = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "rank 0"}},
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 1, "args": {"name": "l"}},
    ]
    return {"traceEvents": named + list(events)}


@pytest.mark.parametrize(
    "events, wrong",
    [
        ([_event(), _event(ts=0.5)], "sorted"),
        ([_event(), _event(ts=2.0, dur=5.0)], "overlaps"),
        ([_event(dur=-1)], "duration"),
        ([_event(dur=None)], "duration"),
        ([_event(name="")], "name"),
        ([_event(ts="1")], "time"),
        ([_event(tid=7)], "thread 7"),
        ([_event(pid=3)], "process 3"),
        ([_event(ph="B")], "complete"),
        ([{"ph": "C", "name": "memory", "pid": 0, "ts": 1, "args": {"a": "x"}}], "numbers"),
    ],
)
def test_what_perfetto_would_not_read_is_refused(events, wrong):
    with pytest.raises(ArgumentError, match=wrong):
        check_trace(_trace(*events))
    check_trace(_trace(_event(), _event(ts=1.5, dur=1.5), _event(ts=1.5, dur=0.5), _event(ts=3.0)))
    with pytest.raises(ArgumentError, match="traceEvents"):
        check_trace([])


def test_slices_that_overlap_go_to_further_threads():
    rng = random.Random(0)
    for _ in range(20):
        events = []
        for _ in range(60):
            begin = rng.randrange(100)
            events.append(
                trace.Event(
                    rng.choice(("compute", "communication")), "e", begin * 1000, (begin + rng.randrange(30)) * 1000
                )
            )
        found = trace.to_json(0, 1, "host", events, [(5000, {"a": 1})], 0, 0, {})
        check_trace(found)
        kept = [e for e in found["traceEvents"] if e["ph"] == "X"]
        assert sorted((e["ts"], e["dur"]) for e in kept) == sorted(
            (e.begin / 1000, (e.end - e.begin) / 1000) for e in events
        )
    nested = [
        trace.Event("compute", "a", 0, 10),
        trace.Event("compute", "b", 2, 8),
        trace.Event("compute", "c", 8, 10),
        trace.Event("compute", "d", 10, 11),
    ]
    assert [thread for thread, _ in trace.place(nested)] == [0, 0, 0, 0]
    assert [thread for thread, _ in trace.place([*nested, trace.Event("compute", "x", 9, 12)])] == [0, 0, 0, 1, 0]


def test_merging_files(tmp_path):
    for rank in range(2):
        found = trace.to_json(
            rank, 2, "host", [trace.Event("compute", f"e{rank}", 1000 * (2 - rank), 5000)], [], 0, 0, {}
        )
        (tmp_path / f"trace.rank{rank}.json").write_text(json.dumps(found))
    whole = merge(tmp_path, tmp_path / "trace.json")
    check_trace(whole)
    assert [e["name"] for e in whole["traceEvents"] if e["ph"] == "X"] == ["e1", "e0"] and whole["otherData"][
        "ranks"
    ] == [0, 1]
    assert json.loads((tmp_path / "trace.json").read_text()) == whole
    with pytest.raises(ArgumentError, match="no traces"):
        merge([])
    with pytest.raises(ArgumentError, match="nowhere"):
        merge(tmp_path / "nowhere")
    (tmp_path / "trace.rank2.json").write_text("{")
    with pytest.raises(ArgumentError, match="trace.rank2"):
        merge(tmp_path)


# ---- one process, no engine ------------------------------------------------------------------------------------------
def _slices(found: dict, lane: str | None = None) -> list[dict]:
    names = {e["tid"]: e["args"]["name"] for e in found["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"}
    return [
        e for e in found["traceEvents"] if e["ph"] == "X" and (lane is None or names[e["tid"]].split(" ")[0] == lane)
    ]


def test_timeline_of_a_plain_loop(tmp_path):
    before = profile.hook_calls()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    loader = torch.utils.data.DataLoader(torch.ones(6, 4), batch_size=2)
    with profile.span("off"):
        model(torch.ones(1, 4))
    assert profile.hook_calls() == before
    with timeline(tmp_path, modules=model, memory_ms=1) as recorder:
        with pytest.raises(DeepcError, match="one at a time"):
            Recorder().start()
        for batch in loader:
            with profile.span("batch", size=2):
                model(batch.requires_grad_() * 1).sum().backward()
            with profile.span("write", "disk"):
                time.sleep(0.003)
        with pytest.raises(ArgumentError, match="lane"), profile.span("x", "gpu"):
            pass
    assert profile.recorder is None and not recorder.on
    found = json.loads((tmp_path / "trace.rank0.json").read_text())
    check_trace(found)
    check_trace(json.loads((tmp_path / "trace.json").read_text()))
    assert [e["name"] for e in _slices(found, "compute")] == ["batch"] * 3 and _slices(found, "compute")[0]["args"] == {
        "size": 2
    }
    assert [e["name"] for e in _slices(found, "disk")] == ["write"] * 3
    assert len([e for e in _slices(found, "waiting") if e["args"]["kind"] == "data"]) == 4  # three batches and the end
    modules = [e["name"] for e in _slices(found, "modules")]
    assert sorted(modules) == sorted(
        ["Sequential", "0", "1", "2", "Sequential backward", "0 backward", "1 backward", "2 backward"] * 3
    )
    samples = [e["args"] for e in found["traceEvents"] if e["ph"] == "C"]
    assert len(samples) >= 3 and all(
        set(s) == {"parameters", "gradients", "optimizer_states", "shared", "activations_and_other", "kept_free"}
        for s in samples
    )
    after = profile.hook_calls()
    for batch in loader:
        model(batch)
    assert profile.hook_calls() == after and not any(m._forward_hooks for m in model.modules())


def test_a_body_that_raises_still_leaves_its_file(tmp_path):
    with pytest.raises(ValueError, match="mine"), timeline(tmp_path):
        with profile.span("half"):
            raise ValueError("mine")
    assert [e["name"] for e in _slices(json.loads((tmp_path / "trace.rank0.json").read_text()))] == [
        "half"
    ] and profile.recorder is None


def _of_files() -> int:
    """Resident bytes of libraries and other files: the kernel takes some back, by tens of MiB, when it wants to."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("RssFile:"))


@pytest.mark.parametrize("name", ["trace.rank0.json", "trace.json"])
def test_a_file_that_cannot_be_written_is_said_with_its_fix(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "full").write_text("")
    with pytest.raises(DeepcError, match="can't be written.*set deepc.timeline.folder"), timeline(tmp_path):
        pass
    assert profile.recorder is None


def samples_around_an_allocation(rank, world, folder):
    with timeline(folder, memory_ms=0) as recorder:
        files = _of_files()
        recorder.sample()
        block = torch.ones(64 << 20, dtype=torch.uint8)
        recorder.sample()
        files -= _of_files()
        assert block.sum()
    low, high = recorder.counters[0][1], recorder.counters[1][1]
    return high["activations_and_other"] - low["activations_and_other"] + files


def test_memory_counts_what_is_allocated(tmp_path):
    """In a process that has done nothing else: the kernel takes pages of zeros back from others when it is short."""
    (grown,) = run_ranks(samples_around_an_allocation, 1, args=(str(tmp_path),), fresh=True)
    assert grown > 60 << 20


@pytest.mark.parametrize(
    "steps, text, want",
    [
        ((3, 5), "", ((3, 5), False)),
        ((0, 4), "", ((1, 4), False)),
        ((0, 0), "7", ((7, 7), False)),
        ((1, 1), "2-4,modules", ((2, 4), True)),
    ],
)
def test_steps_that_are_asked_for(steps, text, want):
    assert _asked(type("Section", (), {"steps": steps}), text) == want


def test_wrong_requests_are_errors():
    for text in ("x", "5-3", "0-2", "1-2,everything"):
        with pytest.raises(ArgumentError, match="DEEPC_TIMELINE"):
            _asked(type("Section", (), {"steps": (0, 0)}), text)
    for steps, told in (
        ([6, 4], r"= \[6, 4\] must be two whole numbers"),  # as they were written, not 6.0 and 4.0
        ([1.5, 2], "must be an integer"),
        ([0, 2], "must be two whole numbers"),
        ([1], "must be a list of 2 integers"),
    ):
        with pytest.raises(ConfigError, match=f"deepc.timeline.steps {told}" if "=" in told else told):
            Config.load({"train_batch_size": 1, "deepc": {"timeline": {"steps": steps}}}, world_size=1)
    section = Config.load(
        {
            "train_batch_size": 1,
            "deepc": {"timeline": {"steps": [2, 3], "modules": True, "memory_ms": 1, "folder": "f"}},
        },
        world_size=1,
    ).deepc.timeline
    assert (section.steps, section.modules, section.memory_ms, section.folder) == ((2, 3), True, 1, "f")
    assert repr(section.steps) == "(2, 3)"


# ---- ranks -----------------------------------------------------------------------------------------------------------
def other_clock(rank, world):
    """Rank 1 pretends to be another machine, whose clock is 5 s ahead."""
    from deepc.observe.profile.clock import align

    ahead = 5_000_000_000 if rank == 1 else 0
    clock = align(lambda: time.monotonic_ns() + ahead, f"machine {rank}")
    same = align()
    return clock.offset_ns, clock.bound_ns, clock.start_ns, same.offset_ns, same.bound_ns


def test_clocks_of_other_machines_are_brought_to_rank_0s():
    (zero, none, start, *_), (offset, bound, seen, same, exact) = run_ranks(other_clock, 2)
    assert (zero, none) == (0, 0) and seen == start
    assert abs(offset + 5_000_000_000) <= bound and 0 < bound < 4_000_000_000
    assert (same, exact) == (0, 0)


def train_off(rank, world):
    """Hook calls of training, checkpoint and evaluation with everything off."""
    import deepc

    before = profile.hook_calls()
    engine, *_ = deepc.initialize(model=tiny.make_model(), config=tiny.config(3, micro=2))
    for step in range(3):
        engine.backward(engine(*tiny.make_batch(step, 2)))
        engine.step()
    added = [
        name
        for name in ("forward", "backward", "step", "_judge", "_publish", "save_checkpoint")
        if name in engine.__dict__
    ]
    hooked = [m for m in engine.module.modules() if m._forward_hooks or m._forward_pre_hooks]
    out = (
        profile.hook_calls() - before,
        added,
        len(hooked),
        engine.profile,
        engine.get_wall_clock_timers(),
        vars(engine.hooks).get("end_pass"),
    )
    engine.destroy()
    return out


def test_nothing_runs_while_everything_is_off():
    assert run_ranks(train_off, 2) == [(0, [], 0, None, {}, None)] * 2


def _until_rank_0_waits():
    """Its reduction is open, and it has slept for a while."""
    from deepc.observe.diagnose import flight

    pid = next(iter(flight.read_own().groups.values())).members[0].pid
    slept, end = 0, time.monotonic() + 60
    while slept < 5:
        assert time.monotonic() < end, "rank 0 does not come to its reduction"
        time.sleep(0.01)
        record = flight.read_process(pid)
        slept += any(c.op == "bucket" and c.end is None for c in record.rows) and record.state == "S"


def train_recorded(rank, world, folder, cases, nodes=""):
    """On one node rank 1 comes late to each last backward."""
    import deepc

    found = {}
    for name, (stage, streamed) in cases.items():
        os.environ["DEEPC_STREAMED"] = "1" if streamed else "0"
        few = {"stage": stage, "stage3_param_persistence_threshold": 0}  # streamed: everything comes and goes
        cfg = tiny.config(
            stage,
            micro=2,
            gas=2,
            zero_optimization=few,
            deepc={"timeline": {"steps": [2, 3], "folder": f"{folder}/{name}", "modules": name == "modules"}},
        )
        with placed(rank, nodes):
            engine, *_ = deepc.initialize(model=tiny.make_model(), config=cfg)
        for step in range(4):
            for m in range(2):
                loss = engine(*tiny.make_batch(step, 2))
                if rank == 1 and m == 1 and not nodes:
                    _until_rank_0_waits()
                loss.backward() if name == "bare" else engine.backward(loss)
                engine.step()
            if step == 2 - 1:
                engine.save_checkpoint(f"{folder}/checkpoint-{name}")
        found[name] = engine.profile, "forward" in engine.__dict__, len(engine.state.trained)
        engine.destroy()
    os.environ["DEEPC_STREAMED"] = "0"
    return found


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("timeline")
    # fresh: memory is that of all engines of the process, and a test that never ends its engine leaves it there
    return folder, run_ranks(train_recorded, 2, args=(str(folder), CASES), fresh=True)


CASES = {"zero": (0, False), "bare": (2, False), "modules": (3, False), "streamed": (3, True)}
NAMES = tuple(CASES)


def _read(folder, name: str, rank: int | None) -> dict:
    found = json.loads((folder / name / ("trace.json" if rank is None else f"trace.rank{rank}.json")).read_text())
    check_trace(found)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_engines_record_the_steps_asked_for(recorded, name):
    folder, results = recorded
    check_steps(folder, results, name)


@pytest.mark.full
def test_engines_record_the_steps_on_two_nodes(tmp_path):
    results = run_ranks(train_recorded, 2, args=(str(tmp_path), CASES, "01"), fresh=True)
    for name in NAMES:
        check_steps(tmp_path, results, name)


def check_steps(folder, results, name):
    for rank, found in enumerate(results):
        assert found[name][:2] == (None, False)  # the engine is as it was
        t = _read(folder, name, rank)
        assert (t["otherData"]["first_step"], t["otherData"]["last_step"], t["otherData"]["rank"]) == (2, 3, rank)
        steps = _slices(t, "steps")
        assert [(e["cat"], e["args"]["step"]) for e in steps] == [("step", 2), ("step", 3)]
        compute = [e["name"] for e in _slices(t, "compute")]
        assert {n: compute.count(n) for n in ("forward", "backward", "reduce", "step", "update", "gradient norm")} == {
            "forward": 4,
            "backward": 4,
            "reduce": 4,
            "step": 4,
            "update": 2,
            "gradient norm": 2,
        }, name
        disk = [e["name"] for e in _slices(t, "disk")]
        assert disk == ["save_checkpoint", "write shard", *(["publish checkpoint"] if rank == 0 else [])]
        assert sum(e["name"] == "reduce_bucket" for e in _slices(t, "communication")) >= 4
        for outer, inner in (("backward", "reduce"), ("step", "update")):  # nested as they ran
            spans = [e for e in _slices(t, "compute") if e["name"] == outer]
            assert all(
                any(o["ts"] <= i["ts"] and i["ts"] + i["dur"] <= o["ts"] + o["dur"] + 0.01 for o in spans)
                for i in _slices(t, "compute")
                if i["name"] == inner
            )
    whole = _read(folder, name, None)
    assert {e["pid"] for e in whole["traceEvents"]} == {0, 1} and whole["otherData"]["ranks"] == [0, 1]
    assert len(_slices(whole)) == sum(len(_slices(_read(folder, name, r))) for r in (0, 1))


@pytest.mark.parametrize("name", NAMES)
def test_waiting_ends_when_the_last_rank_comes(recorded, name):
    folder, _ = recorded
    first, late = _read(folder, name, 0), _read(folder, name, 1)
    came = {
        op: [e["ts"] for e in _slices(late, "communication") if e["name"] == op]
        for op in ("reduce_bucket", "all_gather", "barrier")
    }
    waits = [e for e in _slices(first, "waiting") if e["args"]["kind"] == "ranks"]
    long = [e for e in waits if e["name"] == "waiting for rank 1" and e["args"]["op"] == "reduce_bucket"]
    assert len(long) >= 2  # rank 1 begins its second backward of each of the two steps when rank 0 waits
    done = {op: [e["ts"] + e["dur"] for e in _slices(first, "communication") if e["name"] == op] for op in came}
    for e in waits:  # a call may be over before the last rank has written down that it came
        ends = came[e["args"]["op"]] + (done[e["args"]["op"]] if e not in long else [])
        assert any(abs(e["ts"] + e["dur"] - t) < 0.01 for t in ends), e


def test_modules_and_gathers(recorded):
    folder, _ = recorded
    t = _read(folder, "modules", 0)
    names = [e["name"] for e in _slices(t, "modules")]
    assert names.count("blocks.1.up") == 4 and names.count("blocks.1.up backward") == 4 and names.count("TinyGPT") == 4
    assert not _slices(_read(folder, "zero", 0), "modules")
    gathers = [e for e in _slices(_read(folder, "streamed", 0), "waiting") if e["args"]["kind"] == "parameters"]
    assert len(gathers) >= 4 and all(e["args"]["elements"] > 0 and e["name"].startswith("gather ") for e in gathers)


def test_memory_by_category(recorded):
    folder, _ = recorded
    size = 27_744 * 4
    for name, private, states in (("zero", 1, 2), ("bare", 1, 1), ("modules", 0, 1)):
        samples = [e["args"] for e in _read(folder, name, 0)["traceEvents"] if e["ph"] == "C" and e["name"] == "memory"]
        assert len(samples) >= 24  # at the borders of 4 forwards, backwards and steps
        for s in samples:
            assert private * size <= s["parameters"] <= private * size * 1.5, name
            assert states * size <= s["optimizer_states"] <= states * size * 1.5, name
            assert s["shared"] > 0 and s["activations_and_other"] > 10 << 20
    streamed = [e["args"]["parameters"] for e in _read(folder, "streamed", 0)["traceEvents"] if e["ph"] == "C"]
    assert min(streamed) < max(streamed) <= size * 1.5


def two_engines(rank, world, folder):
    """Every sample's bytes of parameters, and those of the two engines."""
    import deepc

    engines = [
        deepc.initialize(model=model, config=tiny.config(0, micro=2))[0]
        for model in (torch.nn.Linear(8, 8), tiny.make_model())
    ]
    with timeline(folder, memory_ms=0) as recorder:
        engines[1](*tiny.make_batch(0, 2))
    sizes = [e.state.flat.numel() * e.state.flat.element_size() for e in engines]
    for engine in engines:
        engine.destroy()
    return [s["parameters"] for _, s in recorder.counters], sizes


def test_a_sample_has_all_engines(tmp_path):
    samples, sizes = run_ranks(two_engines, 1, args=(str(tmp_path),), fresh=True)[0]
    assert min(sizes) > 0 and set(samples) == {sum(sizes)} and len(samples) >= 3


def ends_early(rank, world, folder):
    import deepc

    engine, *_ = deepc.initialize(
        model=tiny.make_model(),
        config=tiny.config(0, micro=2, deepc={"timeline": {"steps": [1, 100], "folder": folder}}),
    )
    engine.backward(engine(*tiny.make_batch(0, 2)))
    engine.step()
    if rank == 1:
        engine.profile.listeners[0].close()  # what runs at the end of the process
    engine.destroy()
    early = profile.recorder, os.path.exists(os.path.join(folder, "trace.json"))
    return early, unwritable(rank, os.path.join(folder, "full"))


def unwritable(rank, folder):
    """Rank 1 can't write its timeline of two steps: the steps of a training that goes on, what each rank says of it,
    and the files. Then both can't, at the end of an engine."""
    import deepc

    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    log = logging.getLogger("deepc")
    log.addHandler(handler)
    os.makedirs(os.path.join(folder, "trace.rank1.json", "in the way"), exist_ok=True)
    try:
        for steps in ([1, 2], [1, 100]):
            cfg = tiny.config(0, micro=2, deepc={"timeline": {"steps": steps, "folder": folder}})
            engine, *_ = deepc.initialize(model=tiny.make_model(), config=cfg)
            for step in range(4):
                engine.backward(engine(*tiny.make_batch(step, 2)))
                engine.step()
            done = engine.global_steps
            engine.destroy()
            dist.barrier()  # the other one writes as well
    finally:
        log.removeHandler(handler)
    return done, [s for s in said if "can't be written" in s], sorted(os.listdir(folder))


def test_a_run_that_ends_early_leaves_every_ranks_file_and_one_that_cannot_write_them_goes_on(tmp_path):
    found = run_ranks(ends_early, 2, args=(str(tmp_path),))
    assert [early for early, _ in found] == [(None, False)] * 2
    for rank, (_, (steps, said, files)) in enumerate(found):
        assert steps == 4 and files == ["trace.json", "trace.rank0.json", "trace.rank1.json"]  # no half-written ones
        assert len(said) == 1 and "trace.rank1.json" in said[0] and "Training goes on without it" in said[0]
        assert ("can't be written: rank 1: " in said[0]) == (rank == 0)
    whole = merge(tmp_path)
    check_trace(whole)
    assert [(e["pid"], e["args"]["step"]) for e in sorted(_slices(whole, "steps"), key=lambda e: e["pid"])] == [
        (0, 1),
        (1, 1),
    ]


def over_nodes(rank, world, folder, late_s):
    """Two "nodes" of one rank: collectives go over Gloo. Rank 1 comes late_s late to the second."""
    os.environ["DEEPC_NODE_ID"] = f"node{rank}"
    try:
        x = torch.ones(300)
        with timeline(folder):
            dist.all_reduce(x)
            if rank == 1:
                time.sleep(late_s)
            dist.all_reduce(x)
        return x[0].item()
    finally:
        del os.environ["DEEPC_NODE_ID"]


def test_collectives_between_nodes_and_who_waited(tmp_path):
    for late_s in (0.05, 1.0, 10.0):  # on a busy machine rank 0 may come later than that
        assert run_ranks(over_nodes, 2, args=(str(tmp_path), late_s)) == [4, 4]
        first, late = (json.loads((tmp_path / f"trace.rank{r}.json").read_text()) for r in (0, 1))
        went, came = (
            [e["ts"] for e in _slices(r, "communication") if e["name"] == "all_reduce"] for r in (first, late)
        )
        waits = [
            e
            for e in _slices(first, "waiting")
            if e["args"] == {"kind": "ranks", "op": "all_reduce"} and e["name"] == "waiting for rank 1"
        ]
        if found := len(came) == 2 and any(abs(e["ts"] + e["dur"] - came[1]) < 1e4 * late_s for e in waits):
            break
    assert found, (went, came, [(e["ts"], e["dur"]) for e in waits])


# ---- wall clock ------------------------------------------------------------------------------------------------------
_LINE = r"time \(ms\)((?: \| \w+: \d+\.\d\d)+)$"


def timers(rank, world):
    """Log lines, and the timers after each step, of an engine with gas 2; bare: loss.backward()."""
    import logging

    import deepc

    lines: list[str] = []
    handler, log = logging.Handler(), logging.getLogger("deepc")
    handler.emit = lambda record: lines.append(record.getMessage())
    log.addHandler(handler)
    before = log.level
    log.setLevel(logging.INFO)
    found = []
    for bare in (False, True):
        engine, *_ = deepc.initialize(
            model=tiny.make_model(),
            config=tiny.config(2, micro=2, gas=2, wall_clock_breakdown=True, steps_per_print=1000),
        )
        for step in range(2):
            for _ in range(2):
                loss = engine(*tiny.make_batch(step, 2))
                loss.backward() if bare else engine.backward(loss)
                engine.step()
                found.append(engine.get_wall_clock_timers())
        engine.destroy()
    log.removeHandler(handler)
    log.setLevel(before)
    return [line for line in lines if line.startswith("time (ms)")], found, "forward" in engine.__dict__


def test_wall_clock_breakdown_prints_deepspeeds_lines():
    lines, found, left = run_ranks(timers, 2)[0]
    names = ["fwd", "bwd", "bwd_inner", "bwd_allreduce", "step"]
    micro = [f"{n}_microstep" for n in names]
    shown = [re.findall(r"(\w+): ", re.fullmatch(_LINE, line).group(1)) for line in lines]
    assert shown == [micro, micro, names] * 4 and not left
    for at, t in enumerate(found):
        assert list(t) == micro + names and min(t.values()) >= 0 and t["fwd"] > 0 and t["bwd"] > 0
        assert t["bwd_microstep"] == pytest.approx(t["bwd_inner_microstep"] + t["bwd_allreduce_microstep"])
        before = found[at - 1] if at % 2 else dict.fromkeys(names, 0.0)
        for n in names:  # the sum over the accumulation so far
            assert t[n] == pytest.approx(before[n] + t[f"{n}_microstep"]), (at, n)
        assert f"fwd_microstep: {t['fwd_microstep']:.2f}" in lines[at // 2 * 3 + at % 2]


# ---- the communication logger's file ---------------------------------------------------------------------------------
def logged(rank, world, folder):
    import deepc
    from deepc.comm import calls

    calls.logger.reset()
    cfg = tiny.config(1, micro=2, comms_logger={"enabled": True}, deepc={"run_dir": folder, "log": {"format": "none"}})
    engine, *_ = deepc.initialize(model=tiny.make_model(), config=cfg)
    for step in range(3):
        engine.backward(engine(*tiny.make_batch(step, 2)))
        engine.step()
    summary = calls.logger.summary()
    from deepc import comm

    assert comm.has_comm_data() and set(comm.get_logged_comm_ops()) >= set(summary)
    assert comm.get_comm_operation_count() >= sum(v["count"] for sizes in summary.values() for v in sizes.values())
    engine.destroy()
    calls.logger.configure(False)
    return {op: {str(size): v["count"] for size, v in sizes.items()} for op, sizes in summary.items()}


def test_the_comms_logger_writes_its_summary_into_the_run_folder(tmp_path):
    for rank, counts in enumerate(run_ranks(logged, 2, args=(str(tmp_path),))):
        found = json.loads((tmp_path / f"comms.rank{rank}.json").read_text())
        assert found["metadata"]["rank"] == rank and found["lost"] == 0 and counts["reduce_bucket"]
        for op, sizes in counts.items():
            assert all(found["summary"][op][size]["count"] >= n for size, n in sizes.items())


def table(rank, world):
    """The same calls' tables, by DeepSpeed's logger and ours; straggler too."""
    import contextlib
    import io

    from deepc.comm.calls import CommsLogger as Ours
    from deepspeed import comm as ds_comm
    from deepspeed.utils.comms_logging import CommsLogger as Theirs

    ds_comm.init_distributed("gloo", dist_init_required=False)
    ours, theirs = Ours(), Theirs()
    ours.enabled, ours.drain = True, lambda: None
    for op, size, ms in [
        *(("all_reduce", 4096, 1.0 + 0.25 * i + rank) for i in range(12)),
        ("all_gather", 1 << 20, 2.5),
        ("broadcast", 0, 0.125 + rank),
    ]:
        ours.append(op, size, ms, world)
        theirs.append(op, op, ms, size)
    texts = []
    for logger in (ours, theirs):
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            found = logger.log_all(print_log=True, show_straggler=True, return_dict=True)
        texts.append(
            (text.getvalue(), {op: {s: sorted(v) for s, v in sizes.items()} for op, sizes in found["summary"].items()})
        )
    dist.barrier()
    return texts


@pytest.mark.full
def test_the_comms_loggers_tables_are_deepspeeds():
    pytest.importorskip("deepspeed")
    for (ours, our_keys), (theirs, their_keys) in run_ranks(
        table, 2, backend="gloo", fresh=True, env={"DS_ACCELERATOR": "cpu"}, limit_s=170
    ):
        assert [line.rstrip() for line in ours.splitlines()] == [line.rstrip() for line in theirs.splitlines()]
        assert our_keys == their_keys


def test_a_later_patch_of_the_loaders_stays():
    """Who patched DataLoader's iterators after the timeline keeps the patch when it ends."""
    from deepc.observe.profile.recording import Recorder

    cls = torch.utils.data.dataloader._BaseDataLoaderIter
    before = cls.__next__
    recorder = Recorder(memory_ms=0)
    recorder.start()
    ours, seen = cls.__next__, []

    def theirs(it):
        seen.append(it)
        return ours(it)

    cls.__next__ = theirs
    try:
        recorder.stop()
        assert cls.__next__ is theirs
        events = len(recorder.events)
        assert len(list(torch.utils.data.DataLoader(range(4)))) == 4
        assert seen and len(recorder.events) == events  # what they call of ours does nothing any more
    finally:
        cls.__next__ = before
