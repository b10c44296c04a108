"""DynamicTensor on a GPU: it grows where it lies, gives memory back to the driver, is a tensor to autograd, and asks
torch's allocator for what that keeps. Over a stand-in for the driver: test_dynamic.py, test_dynamic_cuda.cpp."""

from __future__ import annotations

import gc
import random

import pytest
import torch
from deepc import DynamicTensor
from deepc.errors import OutOfMemoryError

pytestmark = pytest.mark.gpu
MIB = 1 << 20


def free() -> int:
    return torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_random_sizes_against_a_plain_tensor(dtype):
    rng = random.Random(0)
    d = DynamicTensor((0, 512), most=(100_000, 512), dtype=dtype, device="cuda")
    plain, address = torch.zeros(0, 512, dtype=dtype, device="cuda"), None
    for _ in range(60):
        rows = rng.randrange(100_000)
        kept, plain = plain[:rows], torch.zeros(rows, 512, dtype=dtype, device="cuda")
        plain[: len(kept)] = kept
        x = d.resize(rows)
        assert torch.equal(x, plain) and x.is_cuda and x.dtype == dtype
        assert address in (None, x.data_ptr()) or not rows
        address = x.data_ptr() if rows else address
        s = d.stats()
        assert s.used == x.nbytes <= s.committed <= s.used + max(s.used // 32, 2 * MIB)
        x[rows // 2 :].fill_(rng.randrange(100))
        plain[rows // 2 :] = x[rows // 2 :]
    assert s.granted - s.released == s.committed


def test_what_it_leaves_is_the_drivers_again():
    d = DynamicTensor((0,), most=(1 << 36,), dtype=torch.uint8, device="cuda")  # 64 GiB of addresses
    before = free()
    d.resize(1 << 30)
    assert before - free() == pytest.approx(1 << 30, rel=0.05)
    d.resize(1)
    assert before - free() <= 8 * MIB
    del d
    gc.collect()
    assert before - free() <= 0


def test_autograd_sees_growth_as_nothing_and_a_shrinking_as_a_change():
    d = DynamicTensor((4, 64), most=(100_000, 64), device="cuda")
    d.tensor.normal_()
    w = torch.randn(64, 8, device="cuda", requires_grad=True)
    loss = (d.tensor @ w).sum()
    rows = d.tensor.clone()
    d.resize(90_000)
    d.append(torch.ones(3, 64, device="cuda"))
    loss.backward()
    torch.testing.assert_close(w.grad, rows.sum(0)[:, None].expand(64, 8))
    loss = (d.tensor @ w).sum()
    d.resize(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_zeros_come_in_the_order_of_the_current_stream():
    d, stream = DynamicTensor((1 << 20,), most=(1 << 26,), device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for n in (1 << 24, 1 << 20, 1 << 25):
            x = d.resize(n)
            assert not x.any()
            x.fill_(1.0)
            d.resize(0)


def test_torchs_allocator_gives_what_it_keeps_before_a_size_is_refused():
    kept = torch.empty(int(free() * 0.9), dtype=torch.uint8, device="cuda")
    size = kept.numel() // 2
    del kept  # torch's allocator has it
    d = DynamicTensor((0,), most=(1 << 40,), dtype=torch.uint8, device="cuda")
    d.resize(size)
    assert d.tensor[-1].item() == 0
    with pytest.raises(OutOfMemoryError, match=r"GPU 0 has no memory for \d+ bytes"):
        d.resize(1 << 40)
    assert d.shape == (size,) and not d.tensor[::4096].any()
