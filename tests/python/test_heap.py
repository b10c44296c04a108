"""A training step takes no fresh memory from the system after the first ones: the heap and malloc keep what is freed
(ops/base/heap.c).

What the process was given is counted: the extent of the core's heap, exactly, and malloc's bytes from the system. Page
faults are compared with those of a process that returns its memory, since the kernel adds some of its own (migration,
library pages under pressure, Python's object arenas).
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import platform
import re
import resource
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from programs import run_python
from ranks import run_ranks

SETTLE, STEPS = 2, 7


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


def steps(rank: int, world: int, stage: int, bf16: bool, count: int = STEPS) -> tuple[list[int], list[tuple[int, int]]]:
    """(minor faults of this process in each of `count` steps, bytes_from_system after each), after SETTLE others."""
    import deepc
    import torch
    from tiny import TinyGPT

    torch.manual_seed(0)
    model = TinyGPT(width=128, layers=2, vocab=8192, context=128)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
        "gradient_clipping": 1.0,
    }
    engine = deepc.initialize(model=model, config=config)[0]
    x = torch.randint(8192, (2, 129), generator=torch.Generator().manual_seed(rank))
    faults, held = [], []
    for _ in range(SETTLE + count):
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


def ranks_of(world: int, stage: int, bf16: bool) -> list[tuple[list[int], list[tuple[int, int]]]]:
    return run_ranks(steps, world, args=(stage, bf16), executes=True)


@functools.cache
def one_rank() -> list[tuple[list[int], list[tuple[int, int]]]]:
    """Run once for the tests that look at it."""
    return ranks_of(1, 0, False)


@pytest.mark.parametrize(
    "stage, bf16, world",
    [
        pytest.param(3, False, 2, marks=pytest.mark.full),
        (3, True, 2),
        pytest.param(0, False, 1, marks=pytest.mark.full),
    ],
)
def test_a_step_takes_no_fresh_memory(stage: int, bf16: bool, world: int) -> None:
    for faults, held in one_rank() if (stage, bf16, world) == (0, False, 1) else ranks_of(world, stage, bf16):
        extents, from_malloc = zip(*held)
        assert len(set(extents)) == 1 and extents[0] > 0, held
        # Python's and autograd's small objects (2.3 MiB were seen under load); a tensor of logits is 8 MiB
        assert max(from_malloc) - from_malloc[0] <= 4 << 20, held
        assert median(faults) < 20, faults


@pytest.mark.full
def test_a_step_faults_a_tenth_of_what_returned_memory_costs() -> None:
    ((kept, _),) = one_rank()
    ((returned, _),) = run_ranks(steps, 1, args=(0, False), executes=True, env=RETURNED)
    assert median(kept) * 10 < median(returned), (kept, returned)


@pytest.mark.parametrize(
    "env",
    [pytest.param(RETURNED, marks=pytest.mark.full), {"MALLOC_MMAP_THRESHOLD_": "131072"}],  # the first: above as well
)
def test_who_wants_it_returned_gets_it_returned(env: dict[str, str]) -> None:
    ((faults, _),) = run_ranks(steps, 1, args=(0, False, 3), executes=True, env=env)
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
    """Bytes given back, resident ones and the meter's around an evaluation on a batch twelve times as large."""
    import deepc
    import torch
    from deepc import memory
    from tiny import TinyGPT

    torch.manual_seed(0)
    engine = deepc.initialize(
        model=TinyGPT(width=32, layers=1, vocab=8192, context=128),  # what is large is its logits
        config={"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
    )[0]
    x = torch.randint(8192, (12, 129))

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
    assert grown > 24 << 20  # logits alone are 48 MiB
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
    done = run_python("-c", DOUBLE_FREE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3"]
    assert done.stderr.count("deepc: torch freed 0x") == 1, done.stderr


SMALLEST = """
import torch
from deepc.core import memory
assert memory.keep_heap()
def taken(nbytes):
    before = memory.heap_stats()["in_use"]
    tensor = torch.empty(nbytes, dtype=torch.uint8)
    return memory.heap_stats()["in_use"] > before
print([taken(n) for n in (131071, 131072, 1048575, 1048576)])
"""


@pytest.mark.parametrize(
    "env, taken",
    [
        ({}, [False, True, True, True]),
        ({"MALLOC_MMAP_THRESHOLD_": "131072"}, [False, False, False, True]),
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}, [False, False, False, True]),
    ],
)
def test_tensors_of_128_kib_are_the_heaps_but_not_where_the_user_chose(env: dict[str, str], taken: list[bool]) -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k != "GLIBC_TUNABLES"}
    done = run_python("-c", SMALLEST, env={**clean, **env})
    assert done.stdout.strip() == str(taken), done.stderr


# ---- what the heap forwards ------------------------------------------------------------------------------------------
# Another allocator, and a libc10.so that is bound to it as torch's may be (found before the C library's).
OTHER = r"""
#include <stddef.h>
static _Alignas(4096) char arena[16 << 20];
static size_t used;
int other_took, other_got, other_strange;
int posix_memalign(void **out, size_t alignment, size_t bytes) {
  used = (used + alignment - 1) / alignment * alignment;
  if (bytes > sizeof arena - used) return 12;
  *out = arena + used, used += bytes, other_took++;
  return 0;
}
void free(void *p) {
  if (p && (char *)p >= arena && (char *)p < arena + sizeof arena) other_got++;
  else if (p) other_strange++;
}
"""
STAND_IN = r"""
#include <stddef.h>
extern int posix_memalign(void **, size_t, size_t);
extern void free(void *);
void *c10_take(size_t bytes) { void *p = 0; return posix_memalign(&p, 64, bytes) ? 0 : p; }
void c10_give(void *p) { free(p); }
"""
CHILD = r"""
import ctypes, os, sys
from ctypes import c_int, c_int64, c_size_t, c_void_p

folder, libraries, binding = sys.argv[1:]
system = ctypes.CDLL(None)
system.dlopen.argtypes, system.dlopen.restype = [ctypes.c_char_p, c_int], c_void_p
early = binding == "other"
mode = os.RTLD_NOW | os.RTLD_DEEPBIND if early else os.RTLD_LAZY
handle = system.dlopen(f"{folder}/libc10.so".encode(), mode | os.RTLD_LOCAL)
assert handle
c10 = ctypes.CDLL("libc10.so", handle=handle)
c10.c10_take.argtypes, c10.c10_take.restype = [c_size_t], c_void_p
c10.c10_give.argtypes, c10.c10_give.restype = [c_void_p], None
core = ctypes.CDLL(f"{libraries}/libdeepc.so", mode=ctypes.RTLD_GLOBAL)
use = ctypes.CDLL(f"{libraries}/libdeepc_torch.so").dct_heap_use

class Stats(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("base", c_void_p), ("limit", c_int64), ("extent", c_int64)]
    _fields_ += [("in_use", c_int64), ("others", c_int64 * 9)]

def in_use():
    stats = Stats(ctypes.sizeof(Stats))
    assert core.dc_heap_stats(ctypes.byref(stats)) == 0
    return stats.in_use

def others():
    return [c_int.in_dll(c10, f"other_{n}").value for n in ("took", "got", "strange")] if early else None

def expect(want):
    assert not early or others() == want, (others(), want)

LARGE = 2 << 20
before = [c10.c10_take(100), c10.c10_take(LARGE)] if early else []
expect([2, 0, 0])
assert use(1) == 1
small = c10.c10_take(100)  # forwarded: not the heap's size
expect([3, 0, 0])
large, held = c10.c10_take(LARGE), c10.c10_take(LARGE)
both = in_use()  # whole granules
assert both >= 2 * LARGE, both
expect([3, 0, 0])
c10.c10_give(large)
assert in_use() == both // 2
expect([3, 0, 0])
for p in (*before, small):  # each to who gave it
    c10.c10_give(p)
expect([3, 3, 0])
assert use(0) == 0
later = c10.c10_take(LARGE)
assert in_use() == both // 2
expect([4, 3, 0])
c10.c10_give(later)
c10.c10_give(held)  # the heap's, after the wish for it has ended
assert in_use() == 0
expect([4, 4, 0])
print("fine")
"""


@pytest.mark.parametrize("binding", ["other", "lazy"])
def test_what_is_not_the_heaps_goes_to_the_allocator_before_it(binding: str, tmp_path: Path) -> None:
    """other: the slots hold another allocator's functions, in pages that are read-only. lazy: nothing is bound yet."""
    from deepc.core.lib import library_dir

    (tmp_path / "other.c").write_text(OTHER)
    (tmp_path / "c10.c").write_text(STAND_IN)
    link = ["-lother", "-Wl,-rpath,$ORIGIN", "-Wl,-z,relro,-z,now"] if binding == "other" else ["-Wl,-z,lazy"]
    for command in (
        ["-o", "libother.so", "other.c"],
        ["-o", "libc10.so", "c10.c", "-L.", "-Wl,--no-as-needed", *link],
    ):
        command = ["cc", "-shared", "-fPIC", "-O1", "-fno-builtin", *command]
        if subprocess.run(command, cwd=tmp_path, capture_output=True).returncode:
            pytest.skip("cc makes no shared library here")
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path), str(library_dir()), binding],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and done.stdout == "fine\n", done.stderr


# A program with fixed addresses that takes the address of free, as Debian's python3 does: what libc10 takes the address
# of is an entry of the program's PLT, what it calls the C library's function.
FIXED = r"""
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
int main(int argc, char **argv) {
  void (*volatile taken)(void *) = free; /* in code: data could be given the function's own address */
  char core[4096], shim[4096], c10[4096];
  snprintf(core, sizeof core, "%s/libdeepc.so", argv[2]), snprintf(shim, sizeof shim, "%s/libdeepc_torch.so", argv[2]);
  snprintf(c10, sizeof c10, "%s/libc10.so", argv[1]);
  void *torch = dlopen(c10, RTLD_NOW | RTLD_LOCAL);
  void *ours = argc == 3 && dlopen(core, RTLD_NOW | RTLD_GLOBAL) ? dlopen(shim, RTLD_NOW) : NULL;
  if (!torch || !ours) return puts(dlerror()), 1;
  void *(*take)(size_t) = (void *(*)(size_t))dlsym(torch, "c10_take");
  void (*give)(void *) = (void (*)(void *))dlsym(torch, "c10_give");
  void *(*address)(void) = (void *(*)(void))dlsym(torch, "c10_free");
  int (*use)(int) = (int (*)(int))dlsym(ours, "dct_heap_use");
  int entry = address() == (void *)taken && address() != dlsym(dlopen("libc.so.6", RTLD_NOW), "free");
  void *before = take(4 << 20);
  int on = use(1);
  void *large = take(4 << 20), *small = take(100);
  give(before), give(large), give(small);
  use(0);
  printf("%d %d %d\n", entry, on, address() != (void *)taken);
  return 0;
}
"""


def test_a_program_with_fixed_addresses(tmp_path: Path) -> None:
    from deepc.core.lib import library_dir

    (tmp_path / "c10.c").write_text(STAND_IN + "void *c10_free(void) { return (void *)free; }\n")
    (tmp_path / "fixed.c").write_text(FIXED)
    for command in (  # gold: a slot for each, as torch's has; ld makes one of them
        ["-shared", "-fPIC", "-fuse-ld=gold", "-o", "libc10.so", "c10.c"],
        ["-no-pie", "-fno-pie", "-o", "fixed", "fixed.c", "-ldl"],
    ):
        if subprocess.run(["cc", "-O1", "-fno-builtin", *command], cwd=tmp_path, capture_output=True).returncode:
            pytest.skip("cc makes no such program here")
    done = subprocess.run([tmp_path / "fixed", tmp_path, library_dir()], capture_output=True, text=True, timeout=120)
    if done.stdout.startswith("0 1"):
        pytest.skip("the linker gives such a program no PLT entry of free here")
    assert done.returncode == 0 and done.stdout == "1 1 1\n", (done.returncode, done.stdout, done.stderr)


# ---- plain programs (docs/keep-heap.md) ------------------------------------------------------------------------------
_PLAIN = """
import json
{page}
def large():
    block = torch.empty(1 << 22)
    return memory.heap_stats()["in_use"]

told = [memory.heap_kept(), memory.heap_stats()["extent"]]
for step in range(3):
{step}
    told.append(memory.heap_stats()["extent"])
told.append(large() > memory.heap_stats()["in_use"])
told.append(memory.keep_heap(False))
told.append(large() > memory.heap_stats()["in_use"])
print(json.dumps(told))
"""


@pytest.mark.full
@pytest.mark.parametrize("switch", ["1", pytest.param("0", marks=pytest.mark.full)])
def test_the_page_for_plain_programs_says_what_happens(switch: str) -> None:
    """Its programs as they stand: the first steps make the heap, further ones take nothing; off is off."""
    text = (Path(__file__).parents[2] / "docs/keep-heap.md").read_text()
    first, second = re.findall(r"```python\n(.*?)```", text, re.S)
    script = _PLAIN.format(page=first, step=textwrap.indent(second, "    "))
    env = {**os.environ, "DEEPC_KEEP_HEAP": switch, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    kept, extent, *further, inside, off, outside = json.loads(done.stdout)
    assert (kept, inside) == (switch == "1", switch == "1") and not off and not outside
    assert (extent > 0) == (switch == "1")
    assert further[1] == further[2], "gradients of the step before are there from the second one on"
