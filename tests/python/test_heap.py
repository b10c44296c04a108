"""A training step takes no fresh memory from the system after the first ones: the heap and malloc keep what is freed
(ops/base/heap.c).

What the process was given is counted: the extent of the core's heap, exactly, and malloc's bytes from the system. Page
faults are compared with those of a process that returns its memory, since the kernel adds some of its own (migration,
library pages under pressure, Python's object arenas).
"""

from __future__ import annotations

import ctypes
import platform
import resource
import subprocess
import sys
from typing import Any

import pytest
from ranks import run_ranks

SETTLE, STEPS = 6, 5


class Mallinfo2(ctypes.Structure):
    """malloc.h of glibc >= 2.33. arena: bytes from brk and of heaps, hblkhd: bytes of mapped blocks."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def bytes_from_system() -> tuple[int, int]:
    """(extent of the core's heap, bytes that malloc has from the system or 0 where it can't say)."""
    from deepc import memory

    libc = ctypes.CDLL(None)
    if platform.libc_ver()[0] != "glibc" or not hasattr(libc, "mallinfo2"):
        return memory.heap()["extent"], 0
    libc.mallinfo2.restype = Mallinfo2
    info = libc.mallinfo2()
    return memory.heap()["extent"], info.arena + info.hblkhd


def steps(rank: int, world: int, stage: int, bf16: bool) -> tuple[list[int], list[tuple[int, int]]]:
    """(minor faults of this process in each of STEPS steps, bytes_from_system after each), after SETTLE others."""
    import deepc
    import torch
    from tiny import TinyGPT

    torch.manual_seed(0)
    model = TinyGPT(width=128, layers=2, vocab=8192, context=128)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
        "gradient_clipping": 1.0,
    }
    engine = deepc.initialize(model=model, config=config)[0]
    x = torch.randint(8192, (4, 129), generator=torch.Generator().manual_seed(rank))
    faults, held = [], []
    for _ in range(SETTLE + STEPS):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        engine.backward(engine(x[:, :-1], x[:, 1:]))
        engine.step()
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        held.append(bytes_from_system())
    engine.destroy()
    return faults[SETTLE:], held[SETTLE - 1 :]


def median(values: list[int]) -> int:
    return sorted(values)[len(values) // 2]


RETURNED = {"DEEPC_KEEP_HEAP": "0"}


@pytest.mark.parametrize("stage, bf16, world", [(3, False, 2), (3, True, 2), (0, False, 1)])
def test_a_step_takes_no_fresh_memory(stage: int, bf16: bool, world: int) -> None:
    for faults, held in run_ranks(steps, world, args=(stage, bf16), fresh=True):
        extents, from_malloc = zip(*held)
        assert len(set(extents)) == 1 and extents[0] > 0, held
        assert max(from_malloc) - from_malloc[0] <= 2 << 20, (
            held
        )  # Python's and autograd's small objects; a tensor of logits is 16 MiB
        assert median(faults) < 1000, faults


def test_a_step_faults_a_tenth_of_what_returned_memory_costs() -> None:
    ((kept, _),) = run_ranks(steps, 1, args=(0, False), fresh=True)
    ((returned, _),) = run_ranks(steps, 1, args=(0, False), fresh=True, env=RETURNED)
    assert median(kept) * 10 < median(returned), (kept, returned)


@pytest.mark.parametrize("env", [RETURNED, {"MALLOC_MMAP_THRESHOLD_": "131072"}])
def test_who_wants_it_returned_gets_it_returned(env: dict[str, str]) -> None:
    ((faults, _),) = run_ranks(steps, 1, args=(0, False), fresh=True, env=env)
    assert median(faults) > 100, faults


def trimmed(rank: int, world: int) -> tuple[int, int]:
    import torch
    from deepc import memory

    memory.keep_heap()
    tensor = torch.ones(16 << 20)
    del tensor
    kept = memory.process_bytes()["rss_bytes"]
    memory.trim_heap()
    return kept, memory.process_bytes()["rss_bytes"]


def test_trim_gives_back() -> None:
    ((kept, after),) = run_ranks(trimmed, 1, fresh=True)
    assert kept - after > 50 << 20


def after_an_evaluation(rank: int, world: int) -> dict[str, Any]:
    """Bytes given back, resident bytes and the meter's figures around an evaluation on a batch eight times as large."""
    import deepc
    import torch
    from deepc import memory
    from tiny import TinyGPT

    torch.manual_seed(0)
    engine = deepc.initialize(
        model=TinyGPT(width=128, layers=2, vocab=8192, context=128),
        config={"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
    )[0]
    x = torch.randint(8192, (8, 129))

    def train(steps: int) -> dict[str, int]:
        for _ in range(steps):
            engine.backward(engine(x[:1, :-1], x[:1, 1:]))
            engine.step()
        return {**memory.heap_stats(), "rss": memory.process_bytes()["rss_bytes"]}

    out: dict[str, Any] = {"steady": train(45)}
    with torch.no_grad():
        engine(x[:, :-1], x[:, 1:])
    out["evaluated"] = {**memory.heap_stats(), "rss": memory.process_bytes()["rss_bytes"]}
    out["soon"] = train(24)
    out["later"] = train(20)
    out["meter"] = engine.monitor.last["memory"]["heap"]
    engine.destroy()
    return out


def test_what_steps_do_not_use_goes_back_and_what_they_use_stays() -> None:
    (found,) = run_ranks(after_an_evaluation, 1, fresh=True)
    steady, evaluated, soon, later = (found[k] for k in ("steady", "evaluated", "soon", "later"))
    assert steady["decayed"] <= 8 << 20 and steady["steps"] == 45  # of the set-up, not of steps
    grown = evaluated["extent"] - steady["extent"]
    assert grown > 24 << 20  # logits alone are 32 MiB
    assert soon["decayed"] == evaluated["decayed"]
    assert later["decayed"] - soon["decayed"] > grown // 2
    assert soon["rss"] - later["rss"] > grown // 2
    assert later["free_resident"] < soon["free_resident"]
    meter = found["meter"]
    assert meter["extent"] == meter["live"] + meter["free"] > 0 and meter["free_resident"] <= meter["free"]


DOUBLE_FREE = """
import ctypes, glob, os, torch
from deepc.core import memory
assert memory.keep_heap()
free = ctypes.CDLL(glob.glob(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))[0])._ZN3c108free_cpuEPv
free.argtypes = [ctypes.c_void_p]
kept = torch.full((1 << 20,), 3.0)
for _ in range(3):
    free(kept.data_ptr() + 64)  # from inside of a tensor
assert float(kept.sum()) == 3 * 2**20
print(memory.heap_stats()["foreign_frees"])
"""


def test_a_pointer_that_is_no_block_is_told_once_and_harms_nobody() -> None:
    done = subprocess.run([sys.executable, "-c", DOUBLE_FREE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3"]
    assert done.stderr.count("deepc: torch freed 0x") == 1, done.stderr
