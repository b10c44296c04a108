"""DynamicTensor: changes its leading sizes where it lies, is a tensor to torch and to autograd, and refuses what it
can't do before anything has changed."""

from __future__ import annotations

import copy
import gc
import math
import mmap
import pickle
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from deepc import DynamicTensor
from deepc.errors import ArgumentError, DeepcError, OutOfMemoryError, UnsupportedError
from deepc.nn.arena import Arena
from programs import run_python

PAGE = mmap.PAGESIZE


def test_it_grows_in_place_and_what_it_grows_by_is_zero():
    d = DynamicTensor((4, 3), most=(100_000, 3))
    before = d.tensor
    before.copy_(torch.arange(12.0).view(4, 3))
    after = d.resize(90_000)
    assert after.data_ptr() == before.data_ptr() and after.shape == (90_000, 3) and after.is_contiguous()
    assert torch.equal(after[:4], torch.arange(12.0).view(4, 3)) and not after[4:].any()
    assert before.shape == (4, 3), "what was there before is as it was"


def test_all_leading_sizes_may_change_and_the_rest_stays():
    d = DynamicTensor((2, 3, 4), most=(8, 8, 4), dtype=torch.bfloat16)
    assert d.resize(5).shape == (5, 3, 4)
    assert d.resize(1, 8).shape == (1, 8, 4) == d.shape
    assert d.resize(0).numel() == 0 and len(d) == 0
    assert d.resize(8, 8, 4).dtype == torch.bfloat16 == d.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_random_sizes_against_a_plain_tensor(dtype):
    """60 sizes: contents as Tensor.resize_ would keep them (zeros where that leaves anything), the address never
    changes, and what has memory is at most 1/32 more than what is used, or a page."""
    rng = random.Random(0)
    d = DynamicTensor((0, 24), most=(20_000, 24), dtype=dtype)
    plain, address = torch.zeros(0, 24, dtype=dtype), None
    for _ in range(60):
        rows = rng.randrange(20_000)
        kept = plain[:rows]
        plain = torch.zeros(rows, 24, dtype=dtype)
        plain[: len(kept)] = kept
        x = d.resize(rows)
        assert torch.equal(x, plain)
        assert address in (None, x.data_ptr()) or not rows
        address = x.data_ptr() if rows else address
        x[: rows // 2].fill_(rng.randrange(100))
        plain[: rows // 2] = x[: rows // 2]
        s = d.stats()
        assert s.used == x.nbytes and s.used <= s.committed <= s.used + max(s.used // 32, PAGE)
    assert s.granted - s.released == s.committed


def test_slack_keeps_what_was_used_and_takes_nothing_ahead():
    d = DynamicTensor((0, 256), most=(100_000, 256), slack=math.inf)
    assert d.resize(1_000).nbytes == 1_024_000 and d.stats().committed < 1_100_000
    d.resize(8_000)
    committed = d.stats().committed
    d.resize(10)
    assert d.stats().committed == committed and not d.resize(8_000).any()
    assert d.stats().commits == 2 and d.stats().releases == 0
    with pytest.raises(ArgumentError, match="slack is -1"):
        DynamicTensor((1,), most=(1,), slack=-1)
    with pytest.raises(ArgumentError, match=r"most is \(4611686018427388904,\), of 18446744073709555616 bytes"):
        DynamicTensor((1,), most=((1 << 62) + 1000,))  # of which 2^64 would be lost
    with pytest.raises(ArgumentError, match="dtype is 'float32'"):
        DynamicTensor((1,), most=(1,), dtype="float32")


def test_append_is_the_concatenation_and_takes_any_dtype():
    rows = [torch.randn(n, 2, 5) for n in (3, 0, 1, 700)]
    d = DynamicTensor((0, 2, 5), most=(1_000, 2, 5), dtype=torch.float64)
    for r in rows:
        x = d.append(r)
    assert torch.equal(x, torch.cat(rows).double())
    assert d.stats().grows == 3


class TestAutograd:
    def test_gradients_are_those_of_a_plain_tensor(self):
        d = DynamicTensor((6, 4), most=(64, 4), dtype=torch.float64)
        w = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
        x = d.resize(9)
        x.normal_()
        assert torch.autograd.gradcheck(lambda w: torch.tanh(torch.nn.functional.linear(d, w)), (w,))
        leaf = d.tensor.requires_grad_()
        (torch.tanh(leaf @ w) ** 2).sum().backward()
        plain = x.detach().clone().requires_grad_()
        (torch.tanh(plain @ w) ** 2).sum().backward()
        assert torch.equal(leaf.grad, plain.grad)

    def test_growing_and_appending_leave_a_graph_of_before_whole(self):
        d = DynamicTensor((6, 4), most=(100_000, 4))
        d.tensor.normal_()
        w = torch.randn(4, 4, requires_grad=True)
        wanted = torch.autograd.grad((d.tensor.clone() @ w).square().sum(), w)[0]
        loss = (d.tensor @ w).square().sum()
        d.append(torch.randn(50_000, 4))
        loss.backward()
        assert torch.equal(w.grad, wanted)

    def test_backward_after_a_shrinking_raises_and_is_never_wrong(self):
        d = DynamicTensor((6, 4), most=(64, 4))
        w = torch.randn(4, 4, requires_grad=True)
        loss = (d.tensor @ w).sum()
        d.resize(5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_a_write_into_it_is_seen_by_autograd(self):
        d = DynamicTensor((6, 4), most=(64, 4))
        w = torch.randn(4, 4, requires_grad=True)
        loss = (d.tensor @ w).sum()
        d.tensor.fill_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_torch_takes_it_for_its_tensor():
    d = DynamicTensor((3, 2), most=(9, 2))
    d.tensor.copy_(torch.arange(6.0).view(3, 2))
    assert torch.equal(torch.cat([d, d]), torch.cat([d.tensor, d.tensor]))
    assert torch.equal(torch.add(d, other=d), d.tensor * 2)
    layer = torch.nn.Linear(2, 5)
    assert torch.equal(layer(d), layer(d.tensor))
    assert "DynamicTensor((3, 2)" in repr(d)


def test_memory_lives_as_long_as_a_tensor_over_it():
    rows = DynamicTensor((1 << 20,), most=(1 << 22,)).tensor
    gc.collect()
    rows.fill_(3.0)
    assert rows.sum() == 3 * (1 << 20)


def _pickled(d):
    return pickle.loads(pickle.dumps(d))


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, _pickled])
def test_a_copy_has_memory_of_its_own(copied):
    """Of a model that holds one, too: when the copy goes, the original's addresses stay."""
    model = torch.nn.Linear(2, 2)
    model.cache = DynamicTensor((3, 2), most=(4096, 2), dtype=torch.bfloat16, slack=0.5)
    model.cache.tensor.copy_(torch.arange(6.0).view(3, 2)).requires_grad_()
    model.cache.name = "keys"
    d = copied(model.cache) if copied is copy.copy else copied(model).cache
    assert torch.equal(d.tensor, model.cache.tensor) and d.tensor.data_ptr() != model.cache.tensor.data_ptr()
    assert d.dtype == torch.bfloat16 and d.tensor.requires_grad and d.name == "keys" and repr(d) == repr(model.cache)
    d.append(torch.full((1000, 2), 7.0))
    assert len(model.cache) == 3 and d.stats().reserved == model.cache.stats().reserved
    with pytest.raises(ArgumentError, match="more than the 8192"):
        d.resize(4097)
    del d
    gc.collect()
    model.cache.append(torch.full((4000, 2), 9.0))
    assert model.cache.tensor[:3].flatten().tolist() == list(range(6)) and (model.cache.tensor[3:] == 9).all()


def test_copies_of_one_model_share_one_copy():
    model = torch.nn.Linear(2, 2)
    model.cache = model.again = DynamicTensor((3, 2), most=(9, 2))
    for made in (copy.deepcopy(model), _pickled(model)):
        assert made.cache is made.again is not model.cache


def test_what_owns_addresses_can_not_be_copied():
    for owner in (DynamicTensor((3,), most=(9,))._range, Arena(4096)):
        for copied in (copy.copy, copy.deepcopy, _pickled):
            with pytest.raises(UnsupportedError, match="can't be copied or pickled"):
                copied(owner)


def test_stats_of_all_are_the_sums_of_those_that_live():
    gc.collect()
    before = DynamicTensor.stats_of_all()
    a, b = DynamicTensor((100,), most=(1_000,)), DynamicTensor((PAGE,), most=(4 * PAGE,), dtype=torch.uint8)
    now = DynamicTensor.stats_of_all()
    assert now.used - before.used == 400 + PAGE and now.reserved - before.reserved == 4_000 + 4 * PAGE
    del a, b
    gc.collect()
    assert DynamicTensor.stats_of_all() == before


class TestRefusals:
    @pytest.mark.parametrize(
        ("wrong", "names"),
        [
            (lambda d: d.resize(65), "65.*260 elements.*256"),
            (lambda d: d.resize(), "1 to 2 leading sizes"),
            (lambda d: d.resize(1, 2, 3), r"\(1, 2, 3\)"),
            (lambda d: d.resize(-1), r"-1"),
            (lambda d: d.append(torch.zeros(4)), r"\(4,\)"),
            (lambda d: d.append(torch.zeros(1, 5)), r"\(1, 5\)"),
            (lambda d: d.append(torch.zeros(64, 4)), "70"),
            (lambda _: DynamicTensor((1,), most=(0,)), "most"),
            (lambda _: DynamicTensor((5,), most=(4,)), "5 elements.*4"),
            (lambda _: DynamicTensor((), most=(4,)), "size"),
            (lambda _: DynamicTensor(("a",), most=(4,)), "'a'"),
        ],
    )
    def test_a_wrong_size_is_named_and_nothing_changes(self, wrong, names):
        d = DynamicTensor((6, 4), most=(64, 4))
        d.tensor.fill_(2.0)
        before = d.stats()
        with pytest.raises(ArgumentError, match=names):
            wrong(d)
        assert d.stats() == before and d.shape == (6, 4) and (d.tensor == 2.0).all()

    def test_more_than_the_machine_has(self):
        d = DynamicTensor((8,), most=(1 << 42,))
        d.tensor.fill_(2.0)
        with pytest.raises(OutOfMemoryError, match="available"):
            d.resize(1 << 42)
        assert d.shape == (8,) and (d.tensor == 2.0).all()

    def test_more_addresses_than_there_are(self):
        with pytest.raises(DeepcError, match="reserve less|addresses"):
            DynamicTensor((8,), most=(1 << 59,))

    def test_devices_that_are_not_there(self):
        with pytest.raises(UnsupportedError, match="'meta'.*CPU or on an NVIDIA GPU"):
            DynamicTensor((8,), most=(8,), device="meta")
        if not torch.cuda.is_available():
            with pytest.raises(UnsupportedError, match="'cuda:1'.*sees no GPU here"):
                DynamicTensor((8,), most=(8,), device="cuda:1")


ON_A_STAND_IN = """
import ctypes, math, random, sys, types
gpu = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)         # "libcuda.so.1" from now on
room = ctypes.c_int64.in_dll(gpu, "stand_in_cuda")              # its first field
import torch
from deepc import DynamicTensor
from deepc.errors import DeepcError, OutOfMemoryError
from deepc.nn import dynamic

emptied = []
torch.cuda.is_available, torch.cuda.init, torch.cuda.current_device = lambda: True, lambda: None, lambda: 1
torch.cuda.current_stream = lambda device: types.SimpleNamespace(cuda_stream=0)
torch.cuda.empty_cache = lambda: emptied.append(room.value)
dynamic._CudaRange.tensor = dynamic._Range.tensor               # its memory is this process's

rng, all_of_it = random.Random(0), room.value
d = DynamicTensor((0, 24), most=(100_000, 24), device="cuda")
assert d.stats().used == 0 and d.stats().committed == 0
plain = torch.zeros(0, 24)
for _ in range(40):
    rows = rng.randrange(100_000)
    kept, plain = plain[:rows], torch.zeros(rows, 24)
    plain[: len(kept)] = kept
    x = d.resize(rows)
    assert torch.equal(x, plain)
    s = d.stats()
    assert s.used == x.nbytes <= s.committed <= s.used + max(s.used // 32, 2 << 20)
    x[rows // 2 :].fill_(float(rng.randrange(100)))
    plain[rows // 2 :] = x[rows // 2 :]
assert room.value == all_of_it - d.stats().committed and not emptied
assert torch.equal(d.resize(10), plain[:10])
d.append(torch.ones(5, 24))
assert torch.equal(d.tensor[10:], torch.ones(5, 24)) and len(d) == 15
assert DynamicTensor.stats_of_all().used == d.tensor.nbytes

torch.cuda.empty_cache = lambda: emptied.append(setattr(room, "value", 4 << 20))
room.value = 0                                                  # torch's allocator keeps all of it
d.resize(40_000)
assert len(emptied) == 1 and d.shape[0] == 40_000
try:
    d.resize(100_000)
    raise SystemExit("there was no memory for it")
except OutOfMemoryError as exc:
    assert "GPU 1" in str(exc) and len(emptied) == 2 and d.shape[0] == 40_000
room.value = all_of_it - d.stats().committed
del x, d
assert room.value == all_of_it
"""


def test_a_gpus_memory_grows_in_place_over_a_drivers_stand_in(tmp_path):
    """The driver is a stand-in over this process's memory (tests/c); what a GPU does is in test_gpu_dynamic.py."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    source = Path(__file__).parents[1] / "c" / "stand_in_cuda.c"
    library = tmp_path / "stand_in.so"
    options = "-std=c17 -D_GNU_SOURCE -O1 -fPIC -shared -Wl,-soname,libcuda.so.1".split()
    subprocess.run([compiler, *options, "-o", str(library), str(source)], check=True)
    done = run_python("-c", ON_A_STAND_IN, str(library))
    assert done.returncode == 0, done.stderr
