"""What the C core says that it will take (dc_mem_alloc_bytes, dc_lease_layout, dc_gemm_bytes, dc_comm_bytes) is what it
takes: the estimate of a run's memory stands on these."""

from __future__ import annotations

import ctypes
import re

import pytest
import torch
from deepc.core import memory
from deepc.core.lib import C, call
from deepc.errors import ArgumentError
from programs import run_python
from ranks import run_ranks

HUGE = 2 << 20


def taken(nbytes: int, color: int) -> int:
    out = ctypes.c_size_t()
    call("dc_mem_alloc_bytes", nbytes, color, ctypes.byref(out))
    return out.value


def mappings() -> dict[str, int]:
    """Bytes of this process's mappings by "first-last address path"."""
    out = {}
    with open("/proc/self/maps") as f:
        for line in f:
            begin, end, path = re.match(r"(\w+)-(\w+) \S+ \S+ \S+ \S+\s*(.*)", line).groups()
            out[f"{begin}-{end} {path}"] = int(end, 16) - int(begin, 16)
    return out


@pytest.mark.parametrize("color", [0, 3, 15])
@pytest.mark.parametrize("nbytes", [1 << 20, 3 * HUGE, 3 * HUGE - 15 * 4352, 3 * HUGE - 15 * 4352 + 1])
def test_a_block_ends_where_its_bytes_say(nbytes, color):
    begin, said = ctypes.c_void_p(), taken(nbytes, color)
    call("dc_mem_alloc", nbytes, color, ctypes.byref(begin))
    base = begin.value // HUGE * HUGE  # a large block starts on a huge page, its user's part `color` steps later
    assert said % HUGE == 0 and base + said - HUGE < begin.value + nbytes <= base + said
    resident = 0
    with open("/proc/self/pagemap", "rb") as f:
        f.seek(8 * (base // 4096))
        resident = sum(1 for e in f.read(8 * (said // 4096))[7::8] if e & 0xC0)
    assert resident * 4096 == said
    C.dc_mem_free(begin)


def test_small_blocks_are_whole_cache_lines():
    assert [taken(n, 0) for n in (0, 1, 64, 65, (1 << 20) - 1)] == [64, 64, 64, 128, 1 << 20]
    with pytest.raises(ArgumentError, match="color is 16"):
        taken(1, 16)


@pytest.mark.parametrize("color", [0, 1, 15])
def test_a_lease_takes_pieces(color):
    numel = 5 * HUGE // 4
    begin, piece = ctypes.c_size_t(), ctypes.c_size_t()
    call("dc_lease_layout", 4 * numel, color, ctypes.byref(begin), ctypes.byref(piece))
    lease = memory.Lease(numel, torch.float32, color)
    assert lease.tensor.data_ptr() % HUGE == begin.value and piece.value == HUGE and lease.nbytes() == 0
    border = piece.value - begin.value  # the first byte of the second piece
    call("dc_lease_need", lease.handle, 0, border)
    assert lease.nbytes() == piece.value
    call("dc_lease_need", lease.handle, border - 1, 2)
    assert lease.nbytes() == 2 * piece.value
    lease.end()
    big = ctypes.c_size_t()
    call("dc_lease_layout", 8193 * HUGE, 0, ctypes.byref(begin), ctypes.byref(big))
    assert big.value == 2 * HUGE


PRODUCT = """
import torch
from deepc.core import memory
from deepc.core.lib import C
from deepc.core.ops import dtype_of
torch.set_num_threads(1)
m, k, n = {shape}
dtype = torch.{dtype}
torch.ops.deepc.gemm(*(torch.ones(*s, dtype=dtype) for s in ((m, k), (k, n), (m, n), (m, n))), 0.0, 1.0)
print(C.dc_gemm_bytes(dtype_of(dtype).code, m, n, k), memory.heap_stats()["peak"], C.dc_heap_usable())
"""


@pytest.mark.parametrize("shape", [(500, 70, 1300), (1000, 900, 20)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_packs_what_it_said(shape, dtype):
    done = run_python("-c", PRODUCT.format(shape=shape, dtype=dtype))
    assert done.returncode == 0, done.stderr
    said, taken_by_it, usable = map(int, done.stdout.split())
    if not usable:
        pytest.skip("the heap is not there")
    assert said <= taken_by_it <= said + 2 * (16 << 10), "but for the heap's granules"


def comm_bytes(size: int, slots: int, slot_bytes: int) -> int:
    out = ctypes.c_int64()
    call("dc_comm_bytes", size, slots, slot_bytes, ctypes.byref(out))
    return out.value


def _open(rank, world):
    from deepc.comm import start
    from deepc.comm.groups import open_group

    group, found = open_group(torch.device("cpu"), start.DEFAULT_TIMEOUT), []
    for i, (slots, slot_bytes) in enumerate(((2, 4096), (2, 1 << 20), (5, 256 * 1024), (100, 8192))):
        before = mappings()
        comm = group.open_comm(f"sizes {i}", slot_bytes, slots)
        new = [n for k, n in mappings().items() if k not in before and "memfd:deepc" in k]
        found.append((comm_bytes(world, slots, slot_bytes), sum(new)))
        group.barrier()
        comm.close()
    group.close()
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_a_communicator_maps_what_it_said(world):
    for found in run_ranks(_open, world):
        assert all(said == mapped > 0 for said, mapped in found), found


def test_a_communicator_that_can_not_be_is_refused():
    for size, slots, slot_bytes, said in (
        (0, 2, 4096, "size 0"),
        (2, 1, 4096, "slots 1"),
        (2, 2, 100, "slot_bytes 100"),
    ):
        with pytest.raises(ArgumentError, match=said):
            comm_bytes(size, slots, slot_bytes)
