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
