"""Trainings whose states, parameters, gradients or activations lie on disk, and a disk that fails: each call that they
make of it, once in turn and in every way (errno, short, torn, lost, a flipped bit), and for good until the error has
been told; and processes that are killed at any moment and go on from their last checkpoint. Each time there is an
error of deepc.errors or none, and the weights, masters, moments and losses are those of a training that nothing
disturbed, bit for bit.

disk_fault.c makes the failures, beneath libdeepc, as the answers of the kernel. DISK_FAULTS: another number of cases of
the full class."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import datetime
import errno
import gc
import hashlib
import importlib
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
import tiny
import torch
import torch.distributed as dist
from ranks import on_nodes, run_ranks

SHORT, ODD, NOTHING, TORN, LOST, FLIPPED = -1, -2, -3, -4, -5, -6  # of disk_fault.c
FAULTS = {
    "EIO": errno.EIO,
    "ENOSPC": errno.ENOSPC,
    "EAGAIN": errno.EAGAIN,
    "short": SHORT,
    "short, odd": ODD,
    "nothing": NOTHING,
    "torn": TORN,
    "lost": LOST,
    "flipped": FLIPPED,
}
STEPS = 3
FOREVER = 1 << 40

ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}}
# name -> (precision, what lies on disk, optimizer, further sections)
TRAININGS = {
    "states": ("bf16", ("states",), ADAMW, {}),
    "all": ("bf16", ("states", "parameters"), ADAMW, {}),
    "all, deeper": ("bf16", ("states", "parameters"), ADAMW, {}),
    "all, fp32, accumulation": ("fp32", ("states", "parameters"), ADAMW, {"gradient_accumulation_steps": 2}),
    "parameters": ("fp32", ("parameters",), ADAMW, {}),
    "int8 states": ("bf16", ("states",), {"type": "AdamW", "params": {"lr": 1e-3, "state_dtype": "int8"}}, {}),
    "Lamb": ("fp32", ("states",), {"type": "Lamb", "params": {"lr": 1e-2}}, {}),
    "Muon": ("bf16", ("states",), {"type": "Muon", "params": {"lr": 2e-2, "ns_dtype": "float32"}}, {}),
    "Muon int8": (
        "bf16",
        ("states",),
        {"type": "Muon", "params": {"lr": 2e-2, "ns_dtype": "float32", "state_dtype": "int8"}},
        {},
    ),
    "Adafactor": ("bf16", ("states",), {"type": "Adafactor", "params": {"lr": 1e-2}}, {}),
    "Lamb int8, all": (
        "fp32",
        ("states", "parameters"),
        {"type": "Lamb", "params": {"lr": 1e-2, "state_dtype": "int8"}},
        {},
    ),
    "Lamb, all": ("fp32", ("states", "parameters"), {"type": "Lamb", "params": {"lr": 1e-2}}, {}),
    "Muon, all": (
        "bf16",
        ("states", "parameters"),
        {"type": "Muon", "params": {"lr": 2e-2, "ns_dtype": "float32"}},
        {},
    ),
    "Adafactor, all": ("bf16", ("states", "parameters"), {"type": "Adafactor", "params": {"lr": 1e-2}}, {}),
    "activations": ("fp32", ("activations",), ADAMW, {}),
}


def config(training, folder, disk=True):
    precision, places, optimizer, more = TRAININGS[training]
    place = {"device": "nvme", "nvme_path": folder}
    zero = {"stage": 3, "sub_group_size": 100, "stage3_param_persistence_threshold": 0}
    if disk and "states" in places:
        zero["offload_optimizer"] = place
    if disk and "parameters" in places:
        zero["offload_param"] = place
    out = tiny.config(3, micro=2, precision=precision, zero_optimization=zero, deepc={"bucket_elems": 8192}, **more)
    out["optimizer"] = optimizer
    if disk and "activations" in places:
        out["activation_checkpointing"] = {"cpu_checkpointing": True}
        out["deepc"]["activations"] = {"nvme_path": folder, "min_bytes": 512}
    return out


# More cells of states than memory has (32), so that they are read back: of 100 elements, or of blocks of 4,096 where
# the step or what lies beside them wants these. More activations than are on their way at a time.
SMALL, LARGE, DEEP = {"width": 16}, {"width": 96, "layers": 3}, {"width": 16, "layers": 8}
DEEPER = {"width": 96, "layers": 6}  # of which each of four ranks has as many
MODELS = {"states": SMALL, "Muon": SMALL, "parameters": SMALL, "activations": DEEP, "all, deeper": DEEPER}


def make_engine(training, cfg):
    import deepc

    model = tiny.make_model(recompute="non-reentrant", **MODELS.get(training, LARGE))
    engine = deepc.initialize(model=model, config=cfg)[0]
    if engine.plan.disk is not None:
        assert engine.state.tier.stream.cells > engine.plan.disk.slots, "states are read back"
    return engine


def values(engine):
    """All that a step changes: weights, masters and moments."""
    import deepc

    found = {}
    for name, p in engine.module.named_parameters():
        v = deepc.view(p)
        found[name], found[f"{name}/fp32"] = v.value, v.fp32
        for state in v.state:
            found[f"{name}/{state}"] = v.state[state]
    return found


class Trainer:
    """A loop that does what docs/tiers.md and docs/beyond-memory.md say after each error. told: (phase, class) of each
    error that came."""

    def __init__(self, training, folder, rank, world, checkpoints, after_error=lambda: None, disk=True):
        self._make = lambda: make_engine(training, config(training, folder, disk))
        self.rank, self.world, self.checkpoints = rank, world, checkpoints
        self.told, self.losses, self._after_error = [], {}, after_error
        self.engine = self._again("initialize", self._make)

    def _failed(self, phase, work):
        """Does `work`: (what it returns, None), or (None, the error of deepc.errors)."""
        from deepc.errors import CheckpointError, DiskError

        try:
            return work(), None
        except (DiskError, CheckpointError) as exc:
            assert str(exc), "an error says something"
            self.told.append((phase, type(exc).__name__))
            self._after_error()
            return None, exc

    def _again(self, phase, work):
        for _ in range(4):
            out, failure = self._failed(phase, work)
            if not self._some(failure):
                return out
        raise AssertionError(f"{phase} still fails: {failure}")

    def _some(self, failure):
        """How bad the failure of some rank is: 0 none, 1 a disk, 2 damage."""
        from deepc.errors import DamagedError

        bad = torch.tensor([0.0 if failure is None else 2.0 if isinstance(failure, DamagedError) else 1.0])
        if self.world > 1:
            dist.all_reduce(bad, dist.ReduceOp.MAX)
        return int(bad)

    def save(self):
        """What is damaged can't be saved, then the last checkpoint counts."""
        for _ in range(4):
            _, failure = self._failed("save", lambda: self.engine.save_checkpoint(self.checkpoints))
            if (bad := self._some(failure)) == 2 and self.engine.global_steps:
                self.load()
                return
            if not bad:
                return
            if bad == 2:  # before the first checkpoint
                self.engine.destroy()
                self.engine = self._again("initialize", self._make)
        raise AssertionError(f"save still fails: {failure}")

    def load(self):
        self._again("load", lambda: self.engine.load_checkpoint(self.checkpoints))

    def run(self, steps, save_each=1):
        """Until `steps` are made, with a checkpoint after each `save_each` of them."""
        for _ in range(4):
            while self.engine.global_steps < steps:
                step = self.engine.global_steps
                self._step(step)
                if self.engine.global_steps > step and self.engine.global_steps % save_each == 0:
                    self.save()
            found, failure = self._failed("read", lambda: values(self.engine))
            if not (bad := self._some(failure)):
                return found
            if bad == 2:
                self.load()
        raise AssertionError(f"reading still fails: {failure}")

    def _recover(self, bad):
        self.engine.zero_grad()
        if bad == 2:
            self.load()

    def _step(self, step):
        engine, gas = self.engine, self.engine.gradient_accumulation_steps()
        x, y = tiny.make_batch(step, 2 * self.world * gas, context=8)
        losses = []
        for m in range(gas):
            at = 2 * (m * self.world + self.rank)
            for _ in range(4):
                loss, failure = self._failed("forward", lambda at=at: engine(x[at : at + 2], y[at : at + 2]))
                if not (bad := self._some(failure)) or bad == 2:
                    break
            if bad:
                self._recover(bad)
                return
            _, failure = self._failed("backward", lambda loss=loss: engine.backward(loss))
            if bad := self._some(failure):
                self._recover(bad)
                return
            losses.append(loss.item())
            if m < gas - 1:
                engine.step()
        for _ in range(4):
            _, failure = self._failed("step", engine.step)
            if not (bad := self._some(failure)):
                self.losses[step] = losses
                return
            if bad == 2:
                self.load()
                return
        raise AssertionError(f"the step still fails: {failure}")


def expect_equal(found, wanted):
    assert found.keys() == wanted.keys()
    wrong = [n for n in wanted if not torch.equal(found[n], wanted[n])]
    assert not wrong, f"{len(wrong)} of {len(wanted)} differ: {wrong[:5]}"


def fault_library():
    lib = ctypes.CDLL(None)
    lib.disk_fault_arm.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int]
    lib.disk_fault_calls.restype = lib.disk_fault_hits.restype = ctypes.c_int64
    return lib


def one_case(training, folder, rank, world, at, n, fault, target="nvme"):
    """A training whose calls [at, at + n) of the disk fail on the last rank. Returns (losses, values, what was told,
    calls, hits)."""
    lib = fault_library()
    nvme, saves = os.path.join(folder, "nvme"), os.path.join(folder, "checkpoints", "run")
    if rank == 0:
        shutil.rmtree(saves, ignore_errors=True)
    if world > 1:
        dist.barrier()
    bad = rank == world - 1
    if bad:
        lib.disk_fault_arm(os.path.realpath(os.path.join(folder, target)).encode(), at, n, fault)
    try:
        trainer = Trainer(training, nvme, rank, world, saves, lib.disk_fault_disarm if bad else lambda: None)
        try:
            trainer.save()
            found = trainer.run(STEPS)
            if target != "nvme":
                trainer.load()
                expect_equal(values(trainer.engine), found)
        finally:
            trainer.engine.destroy()
        return trainer.losses, found, trainer.told, lib.disk_fault_calls(), lib.disk_fault_hits()
    finally:
        lib.disk_fault_disarm()


def storm(rank, world, training, folder, cases, seed, target="nvme", nodes=1):
    """`cases` cases, spread evenly over the calls of a training and over FAULTS. Returns a count of what was seen."""
    with on_nodes(rank, world, nodes):
        return _storm(rank, world, training, folder, cases, seed, target)


def _storm(rank, world, training, folder, cases, seed, target):
    trainer = Trainer(training, "", rank, world, os.path.join(folder, "memory"), disk=False)
    wanted = trainer.run(STEPS, save_each=FOREVER)
    losses = trainer.losses
    trainer.engine.destroy()
    dist.barrier()
    _, found, told, calls, _ = one_case(training, folder, rank, world, FOREVER, 1, errno.EIO, target)
    expect_equal(found, wanted)
    assert not told
    both = torch.tensor([calls])
    dist.broadcast(both, world - 1)
    calls = int(both)
    assert calls > 3
    seen, draw = collections.Counter(calls=calls), random.Random(seed)
    kinds = [k for k in FAULTS if target == "nvme" or FAULTS[k] >= NOTHING]
    for case in range(cases):
        kind = kinds[case % len(kinds)]
        at = (case * calls // cases + draw.randrange(max(1, calls // cases))) % calls
        n = FOREVER if FAULTS[kind] >= NOTHING and case // len(kinds) % 3 == 2 else 1
        name = f"case {case}: call {at} of {calls} and {n - 1} more: {kind}"
        try:
            mine, found, told, _, hits = one_case(training, folder, rank, world, at, n, FAULTS[kind], target)
            assert mine == losses, "losses differ"
            expect_equal(found, wanted)
        except BaseException as exc:
            raise AssertionError(f"{training}: {name}") from exc
        seen[f"{kind}: {'told' if told else 'unnoticed'}" if hits else "not met"] += 1
        for phase, error in told:
            seen[f"{error} in {phase}"] += 1
    return seen


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The library that makes calls fail."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler (cc)")
    out = tmp_path_factory.mktemp("faulty") / "disk_fault.so"
    flags = ["-std=gnu17", "-O1", "-fno-builtin", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    source = Path(__file__).with_name("disk_fault.c")
    subprocess.run([compiler, *flags, "-o", str(out), str(source), "-ldl", "-lpthread"], check=True)
    return str(out)


@contextlib.contextmanager
def in_memory():
    """A folder in memory, as in the C tests of faults: nothing here loses its power, and syncs would take most of the
    time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        yield os.path.realpath(folder)


def run_storm(faulty, ring, world, training, cases, target, nodes=1):
    env = {"LD_PRELOAD": faulty, "DEEPC_RING": ring, "DEEPC_LOG_LEVEL": "ERROR"}
    with in_memory() as folder:
        for name in ("nvme", "checkpoints"):
            os.mkdir(os.path.join(folder, name))
        args = (training, folder, cases, 7, target, nodes)
        seen = run_ranks(storm, world, args=args, env=env, limit_s=60 + 30 * cases)[-1]
    print(
        json.dumps(
            {
                "training": training,
                "ring": ring,
                "ranks": world,
                "nodes": nodes,
                "target": target,
                "cases": cases,
                **seen,
            }
        )
    )
    assert sum(n for k, n in seen.items() if k.endswith(": told")) >= cases // 4, seen


# ---- killed processes ------------------------------------------------------------------------------------------------
KILLED = -7  # of disk_fault.c


def digest(found):
    """Of all values."""
    out = hashlib.sha256()
    for name in sorted(found):
        out.update(name.encode())
        out.update(found[name].detach().contiguous().view(torch.uint8).numpy().tobytes())
    return out.hexdigest()


def live(training, folder, rank, world, store, at, out):
    """The life of a rank, a process of its own: from the last checkpoint to the end, if nobody kills it (at: the disk's
    call at which it dies). Writes to `out` what it came to."""
    from deepc.errors import RankDiedError

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    timeout = datetime.timedelta(seconds=20)
    host, port, prefix = store
    try:
        client = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        dist.init_process_group(
            "deepc", store=dist.PrefixStore(prefix, client), rank=rank, world_size=world, timeout=timeout
        )
    except RuntimeError as exc:  # torch's, whose group of all ranks could not be made
        os.write(out, f"never began: {exc}".encode()[:100])
        return
    lib = fault_library()
    lib.disk_fault_arm(folder.encode(), at, 1, KILLED)
    try:
        trainer = Trainer(training, os.path.join(folder, "nvme"), rank, world, os.path.join(folder, "saves"))
        resume(trainer)
        begun = trainer.engine.global_steps
        found = trainer.run(STEPS)
        assert not trainer.told
    except RankDiedError:
        os.write(out, b"another rank died")
        return
    except dist.DistStoreError as exc:  # torch's store, in which a rank that died before it came there has no key
        os.write(out, f"never began: {exc}".encode()[:100])
        return
    os.write(out, f"{digest(found)} {begun} {lib.disk_fault_calls()}".encode())


def resume(trainer):
    """From the last checkpoint. A save that was killed just before its name was written into `latest`, the first in its
    folder, is named by the error."""
    from deepc.errors import CheckpointError

    try:
        trainer.engine.load_checkpoint(trainer.checkpoints)
    except CheckpointError as exc:
        tags = os.listdir(trainer.checkpoints)
        assert "latest" not in tags and "['global_step1']" in str(exc), exc
        trainer.engine.load_checkpoint(trainer.checkpoints, "global_step1")


def born(training, folder, rank, world, store, at):
    """(pid, the descriptor of what it will say) of a new life."""
    theirs, out = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(theirs)
            live(training, folder, rank, world, store, at, out)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    os.close(out)
    return pid, theirs


def lives(rank, world_of_one, training, world, folder, deaths, seed):
    """Trainings that are killed `deaths` times in all: every second time when they come to some call of the disk, else
    after some time. Each training is killed until it comes to its end. Returns a count of what was seen."""
    importlib.import_module("preloaded")  # before the forks
    gc.enable()
    draw, seen = random.Random(seed), collections.Counter()
    nvme, saves = os.path.join(folder, "nvme"), os.path.join(folder, "saves")
    os.makedirs(nvme, exist_ok=True)
    wanted, calls, seconds = None, 0, 0.0
    # Of this process, which nobody kills: a FileStore that a rank died in while it wrote is read for ever, at full
    # speed and past any timeout (torch 2.13).
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    while wanted is None or seen["deaths"] < deaths:
        shutil.rmtree(saves, ignore_errors=True)
        done = False
        while not done:
            first = wanted is None  # a life that nobody ends, to know what it comes to
            by_call = not first and draw.random() < 0.5
            victim, all_die = draw.randrange(world), draw.random() < 0.5
            at = draw.randrange(calls) if by_call else FOREVER
            store = (server.host, server.port, f"life{seen['lives']}")
            begun = time.monotonic()
            ranks = [born(training, folder, r, world, store, at if r == victim else FOREVER) for r in range(world)]
            if not first and not by_call:
                readable, _, _ = select.select([fd for _, fd in ranks], [], [], draw.uniform(0, seconds))
                for r, (pid, _) in enumerate(ranks):
                    if (r == victim or all_die) and not readable:
                        os.kill(pid, signal.SIGKILL)
            said = []
            for pid, fd in ranks:
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                text = os.read(fd, 200).decode()
                os.close(fd)
                assert code in (0, -signal.SIGKILL), f"{training}: a rank ended with {code}, seed {seed}, {dict(seen)}"
                said.append("died" if code else text)
            seconds = max(0.8 * seconds, time.monotonic() - begun)
            assert os.listdir(nvme) == [], "nothing of a life is left"
            seen["lives"] += 1
            seen["deaths"] += said.count("died")
            if "died" in said:
                seen["at a call" if by_call else "at a time"] += 1
            seen["survivors that were told"] += said.count("another rank died")
            alone = [text for text in said if text.startswith("never began")]
            assert not alone or "died" in said, alone
            seen["survivors that never began"] += len(alone)
            done = not alone and not any(text in ("died", "another rank died") for text in said)
            for text in said if done else ():
                made, step, count = text.split()
                wanted, calls = wanted or made, max(calls, int(count))
                assert made == wanted, f"{training}: other weights after {seen['deaths']} deaths, seed {seed}"
                seen[f"ends from step {step}"] += 1
    return seen


# ---- what is run -----------------------------------------------------------------------------------------------------
def cases_of(cases):
    """Of the full class."""
    return max(9, cases * int(os.environ.get("DISK_FAULTS", "100")) // 100)


@pytest.mark.parametrize(
    "training, ring, world, target, cases",
    [
        ("parameters", "uring", 1, "nvme", 5),
        *(
            pytest.param(*row, marks=pytest.mark.full)
            for row in (
                ("Muon", "uring", 2, "nvme", 90),
                ("Muon int8", "uring", 2, "nvme", 90),
                ("Adafactor", "uring", 2, "nvme", 90),
                ("Lamb, all", "uring", 2, "nvme", 90),
                ("Lamb int8, all", "uring", 2, "nvme", 90),
                ("Muon, all", "threads", 1, "nvme", 90),
                ("Muon, all", "uring", 2, "nvme", 90),
                ("Adafactor, all", "uring", 2, "nvme", 90),
                ("all", "uring", 1, "nvme", 180),
                ("all", "threads", 2, "nvme", 90),
                ("all, fp32, accumulation", "uring", 1, "nvme", 90),
                ("parameters", "threads", 1, "nvme", 90),
                ("states", "threads", 1, "nvme", 180),
                ("states", "uring", 2, "nvme", 90),
                ("int8 states", "uring", 1, "nvme", 90),
                ("Lamb", "uring", 2, "nvme", 90),
                ("activations", "uring", 1, "nvme", 90),
                ("all", "uring", 1, "checkpoints", 90),
            )
        ),
    ],
)
def test_every_call_of_the_disk_fails_once(faulty, training, ring, world, target, cases):
    run_storm(faulty, ring, world, training, cases if cases < 10 else cases_of(cases), target)


@pytest.mark.parametrize(
    "training, world, cases",
    [
        ("states", 2, 90),
        ("all", 2, 90),
        ("all, deeper", 4, 90),
        ("all, fp32, accumulation", 2, 90),
        ("Muon, all", 2, 90),
    ],
)
@pytest.mark.full
def test_the_disk_of_one_node_fails(faulty, training, world, cases):
    """Two nodes (simulated: shared memory in each, Gloo across), each with its files: what the last rank's disk does
    reaches the ranks of the other node as it does on one."""
    run_storm(faulty, "uring", world, training, cases_of(cases), "nvme", nodes=2)


@pytest.mark.parametrize(
    "training, world, deaths",
    [
        ("all", 1, 400),
        ("states", 2, 300),
        ("all, fp32, accumulation", 2, 300),
    ],
)
@pytest.mark.full
def test_killed_at_any_moment(faulty, training, world, deaths):
    deaths = cases_of(deaths)
    env = {"LD_PRELOAD": faulty, "DEEPC_LOG_LEVEL": "ERROR"}
    with in_memory() as folder:
        args = (training, world, folder, deaths, 11)
        (seen,) = run_ranks(lives, 1, args=args, backend=None, env=env, limit_s=120 + 30 * deaths)
    print(json.dumps({"training": training, "ranks": world, **seen}))
    assert seen["deaths"] >= deaths and seen["at a call"] and seen["at a time"]
