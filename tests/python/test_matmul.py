"""Products on CPUs where torch's are slow: 16 bits through fp32, fp32 by the core: values, reach, and what is left
alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from deepc.core import cpu
from deepc.core.cpu import ComputePath
from deepc.core.lib import C
from deepc.core.ops import dtype_of
from deepc.nn.aten import matmul
from programs import run_python

SCRIPT = """
import json, torch
import deepc
from deepc import precision
from deepc.nn.aten import matmul
torch.manual_seed(0)
dtype = getattr(torch, {dtype!r})
native = (precision.bf16_arithmetic if dtype == torch.bfloat16 else precision.fp16_arithmetic)()[0]
model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 8))
key = {{"bfloat16": "bf16", "float16": "fp16"}}[{dtype!r}]
engine = deepc.initialize(model=model, config={{"train_batch_size": 4, key: {{"enabled": True}}}})[0]
x = torch.randn(4, 64).to(dtype)
engine.backward(engine(x).float().square().mean())
used = matmul.calls
engine.step()
worst = 0.0
for a, b, f in [((33, 65), (65, 17), torch.mm), ((3, 9, 65), (3, 65, 5), torch.bmm), ((5, 64), (64, 7), torch.matmul)]:
    a, b = torch.randn(a).to(dtype), torch.randn(b).to(dtype)
    want = f(a.double(), b.double()).to(dtype)
    worst = max(worst, float(((f(a, b).double() - want.double()).abs() / want.double().abs().clamp(min=1e-2)).max()))
big = torch.randn(5000, 8).to(dtype)
assert torch.equal(torch.addmm(torch.ones(3, dtype=dtype), big, big[:8, :3].contiguous()),
                   torch.addmm(torch.ones(3), big.float(), big[:8, :3].float()).to(dtype))
out = torch.empty(2, 2, dtype=dtype); torch.mm(big[:2], big[:2].t(), out=out)
mixed = 0
for f, operands in [(torch.mm, (big[:2].float(), big[:8])), (torch.addmm, (torch.ones(8), big[:2], big[:8])),
                    (torch.bmm, (big[None, :2].float(), big[None, :8]))]:
    try:
        f(*operands)
    except RuntimeError:
        mixed += 1
before, f32 = matmul.calls, 0.0
for f, a, b in [(torch.mm, (33, 65), (65, 17)), (torch.bmm, (3, 9, 65), (3, 65, 5))]:
    a, b = torch.randn(a), torch.randn(b)
    f32 = max(f32, float((f(a, b).double() - f(a.double(), b.double())).abs().max()))
print(json.dumps(dict(mixed=mixed, native=native, used=used, worst=worst, f32=f32, f32_calls=matmul.calls - before)))
"""


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.full)])
def test_products_without_16_bit_arithmetic(dtype):
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "DEEPC_LOG_LEVEL": "WARNING", "DEEPC_MATMUL": "0"}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(dtype=dtype)],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert "Overriding a previously registered kernel" not in run.stderr
    got = json.loads(run.stdout.splitlines()[-1])
    assert got["native"] is False
    assert got["mixed"] == 3, "operands of two dtypes are an error, as where there is the arithmetic"
    assert got["f32_calls"] == 0 and got["f32"] < 1e-4, "fp32 products are torch's own, in fp32"
    assert got["used"] >= 4, "forward and backward must take the fp32 path"
    assert got["worst"] <= (2**-7 if dtype == "bfloat16" else 2**-10)


PANELS = """
import torch
import deepc
from deepc.nn.aten import matmul
matmul.install(torch.bfloat16)
torch.manual_seed(0)
def random(*shape_and_columns):
    *shape, by_columns = shape_and_columns
    x = torch.randn(*shape).bfloat16()
    return x.mT.contiguous().mT if by_columns else x
def check(got, want):
    assert got.dtype == torch.bfloat16 and got.shape == want.shape
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=2**-7)  # rounded once; panels' sums stay in fp32
def products(m, k, n, b, by_columns):
    x, y, c = random(m, k, by_columns), random(k, n, not by_columns), random(m, n, False)
    check(torch.mm(x, y), x.double() @ y.double())
    check(torch.addmm(c, x, y, beta=0.5, alpha=-2), 0.5 * c.double() - 2 * (x.double() @ y.double()))
    check(torch.addmm(c[0], x, y), c[0].double() + x.double() @ y.double())
    check(c.clone().addmm_(x, y), c.double() + x.double() @ y.double())
    wide = torch.zeros(m, n + 3, dtype=torch.bfloat16)
    torch.mm(x, y, out=wide[:, :n])
    check(wide[:, :n], x.double() @ y.double())
    assert not wide[:, n:].any()
    x, y, c = random(b, m, k, by_columns), random(b, k, n, by_columns), random(b, m, n, False)
    check(torch.bmm(x, y), x.double() @ y.double())
    check(torch.baddbmm(c, x, y, beta=0.5), 0.5 * c.double() + x.double() @ y.double())
    return 7
matmul._least[torch.bfloat16] = 0
for panel in (matmul.PANEL, 1000, 64):
    matmul.PANEL, before = panel, matmul.calls
    shapes = (9, 13, 21, 3), (1, 40, 7, 1), (30, 2, 3, 4)
    wanted = sum(products(*shape, by_columns) for shape in shapes for by_columns in (False, True))
    assert matmul.calls - before == wanted, panel
matmul._least[torch.bfloat16], before = matmul.PAYS, matmul.calls
small, large = torch.randn(4, 64).bfloat16(), torch.randn(256, 256).bfloat16()
small @ large[:64], large @ large, torch.mm(small, large[:64])
assert matmul.calls - before == 1, "a small product does not pay for widening its operands"
for f, x, y in ((torch.mm, small, small), (torch.bmm, large[None], large.expand(2, 256, 256)),
                (torch.mm, large[None], large[None])):
    try:
        f(x, y)
    except RuntimeError as exc:
        assert "cannot be multiplied" in str(exc) or "batch2" in str(exc) or "must be a matrix" in str(exc), exc
    else:
        raise AssertionError("shapes that don't fit")
print("fine")
"""


def test_products_by_panels_are_rounded_once_and_small_ones_stay():
    run = run_python("-c", PANELS, timeout=300)
    assert run.returncode == 0 and run.stdout.endswith("fine\n"), run.stderr


def test_the_memory_plan_knows_the_copies(monkeypatch):
    """Of a panel's sums and operands; the dry run holds them for a moment (tests of estimates measure that)."""

    def of(a, b, dtype=torch.bfloat16):
        return matmul.copies(*(torch.empty(*shape, dtype=dtype, device="cpu") for shape in (a, b)))

    monkeypatch.setattr(matmul.cpu, "compute_path", lambda dtype: ComputePath(dtype, False, "the test says so"))
    monkeypatch.setattr(matmul.cpu, "has_instructions", lambda dtype: True)
    monkeypatch.setattr(matmul.cpu, "fast_products", lambda dtype: (False, "the test says so"))
    assert of((512, 320), (320, 50257)) == [4 * 512 * 8192, 4 * 512 * 320, 4 * 320 * 8192]
    assert of((512, 320), (320, 640)) == [4 * 512 * 640, 4 * 512 * 320, 4 * 320 * 640]
    assert of((8, 256, 64), (8, 64, 256)) == [4 * 8 * 256 * 256, 4 * 8 * 256 * 64, 4 * 8 * 64 * 256]
    assert of((4, 320), (320, 640)) == [] and of((512, 320), (320, 640), torch.float32) == []
    monkeypatch.setattr(matmul.cpu, "fast_products", lambda dtype: (True, "the test says so"))
    for dtype, there in ((torch.float32, torch.backends.mkl), (torch.bfloat16, torch.backends.mkldnn)):
        own = [C.dc_gemm_bytes(dtype_of(dtype).code, 512, 640, 320)] * torch.get_num_threads()
        assert not there.is_available() or of((512, 320), (320, 640), dtype) == own
        assert of((4, 32), (32, 64), dtype) == []
    monkeypatch.setattr(matmul.cpu, "fast_products", lambda dtype: (False, "the test says so"))
    monkeypatch.setattr(matmul.cpu, "has_instructions", lambda dtype: False)
    assert of((4, 320), (320, 640)) == [4 * 4 * 640, 4 * 4 * 320, 4 * 320 * 640]
    monkeypatch.setattr(matmul.cpu, "compute_path", lambda dtype: ComputePath(dtype, True, "the test says so"))
    assert of((512, 320), (320, 50257)) == []


OWN = """
import torch
import deepc
from deepc.nn.aten import matmul
dtype = torch.{dtype}
matmul.install_own(dtype)
other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
torch.manual_seed(0)
def randn(*shape):
    return torch.randn(*shape).to(dtype)
def random(*shape_and_columns):
    *shape, by_columns = shape_and_columns
    x = randn(*shape)
    return x.mT.contiguous().mT if by_columns else x
def check(got, want, calls=1):
    global before
    assert matmul.calls - before == calls, matmul.calls - before
    before = matmul.calls
    assert got.dtype == dtype and got.is_contiguous()
    exact = dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-5 if exact else 2**-8, atol=2e-4)
before = matmul.calls
for m, k, n, by_columns in ((64, 400, 70, False), (33, 900, 65, True), (2, 2000, 300, False), (513, 16, 129, True)):
    x, y, c = random(m, k, by_columns), random(k, n, not by_columns), random(m, n, False)
    want = x.double() @ y.double()
    check(x @ y, want)
    check(torch.addmm(c, x, y, beta=0.5, alpha=-2), 0.5 * c.double() - 2 * want)
    check(torch.addmm(c[0], x, y), c[0].double() + want)
    check(torch.addmm(c[:, :1], x, y), c[:, :1].double() + want)
    row = c.clone()
    check(torch.addmm(row[:1].expand(m, n), x, y, out=row), c[0].double() + want)  # which lies in what is written
    check(torch.addmm(torch.full((1,), torch.nan, dtype=dtype), x, y, beta=0), want)
    check(c.clone().addmm_(x, y), c.double() + want)
    check(torch.mm(x, y, out=torch.full((m, n), torch.nan, dtype=dtype)), want)
    wide = torch.zeros(m, n + 3, dtype=dtype)
    check(torch.mm(x, y, out=wide[:, 1:n + 1]).contiguous(), want)
    assert not wide[:, 0].any() and not wide[:, n + 1:].any()
    check(torch.mm(x, y, out=torch.empty(n, m, dtype=dtype).t()).contiguous(), want, 0)
    check(torch.mm(x, y, out=torch.empty(0, dtype=dtype)), want, 0)
    b, c = torch.stack([x, -x, 2 * x]), randn(3, m, n)
    b = b.mT.contiguous().mT if by_columns else b
    check(torch.bmm(b, y.expand(3, k, n)), torch.stack([want, -want, 2 * want]))
    check(torch.baddbmm(c, b, y.expand(3, k, n), beta=2), torch.stack([want, -want, 2 * want]) + 2 * c.double())
    check(torch.mm(random(m, 2 * k, by_columns)[:, ::2], y) * 0, want * 0, int(by_columns))
square = randn(128, 128)
twice = square.clone()
if dtype == torch.float32:  # out is an operand: torch's, which in bf16 is wrong then (2.13)
    check(twice.addmm_(twice, square), square.double() + square.double() @ square.double(), 0)
torch.set_float32_matmul_precision("medium")  # bf16 inside is allowed: torch's
assert torch.allclose((square @ square).double(), square.double() @ square.double(), atol=0.5)
torch.set_float32_matmul_precision("highest")
assert matmul.calls - before == (dtype == torch.bfloat16)
before = matmul.calls
other_one = square.to(other)
check((other_one @ other_one).to(dtype) * 0, square.double() * 0, 0)
small = randn(64, 64)
check(small @ small, small.double() @ small.double(), 0)
layer, x = torch.nn.Linear(300, 200).to(dtype), randn(4, 50, 300).requires_grad_()
layer(x).square().sum().backward()
assert matmul.calls - before == 3, "forward and both gradients"
exact, y = torch.nn.Linear(300, 200).double(), x.detach().double().requires_grad_()
exact.load_state_dict(layer.state_dict())
exact(y).square().sum().backward()
for got, want in ((x.grad, y.grad), (layer.weight.grad, exact.weight.grad)):
    rounded = 2**-6 * want.abs().max().item()
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-3 if dtype == torch.float32 else rounded)
before = matmul.calls
assert torch.mm(torch.ones(2000, 0).to(dtype), torch.ones(0, 2000).to(dtype)).sum() == 0
for f, a, b in ((torch.mm, square, randn(127, 128)), (torch.mm, square.double(), square)):
    try:
        f(a, b)
    except RuntimeError:
        continue
    raise AssertionError("what does not fit is torch's error")
print("fine")
"""


@pytest.mark.parametrize("threads, dtype", [(1, "float32"), (3, "float32"), (2, "bfloat16")])
def test_the_cores_products(threads, dtype):
    script = OWN.replace("{dtype}", dtype)
    run = run_python("-c", script, timeout=300, env={**os.environ, "OMP_NUM_THREADS": str(threads)})
    assert run.returncode == 0 and run.stdout.endswith("fine\n"), run.stderr


CHOICE = """
import torch
import deepc
from deepc.core.cpu import ComputePath
from deepc.nn.aten import matmul
matmul.cpu.fast_products = lambda dtype: (True, "the test says so")
matmul.cpu.compute_path = lambda dtype: ComputePath(dtype, True, "the test says so")  # not through fp32
bf16 = {bf16}
config = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "bf16": {"enabled": bf16}}
engine = deepc.initialize(model=torch.nn.Linear(1024, 1024), config=config)[0]
engine.backward(engine(torch.randn(4, 1024).to(engine.dtype)).square().mean())
engine.step()
print(matmul.calls, deepc.precision.fast_matmul())
"""


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("switch, calls", [("", "2 True"), ("0", "0 False")])
def test_an_engine_has_them_where_the_processor_asks_for_it(switch, calls, bf16):
    run = run_python(
        "-c",
        CHOICE.replace("{bf16}", str(bf16)),
        env={**os.environ, "DEEPC_MATMUL": switch, "DEEPC_LOG_LEVEL": "WARNING"},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == calls


BOTH = """
import torch
import deepc
from deepc.nn.aten import matmul
torch.manual_seed(0)
ways = []
def spied(way, name):
    def spy(*args):
        ways.append(name)
        return way(*args)
    return spy
core, copies = matmul._by_the_core, matmul.through_fp32
matmul._by_the_core, matmul.through_fp32 = spied(core, "core"), spied(copies, "fp32")
matmul.install_own(torch.bfloat16)
matmul._least[torch.bfloat16] = 0  # as without bf16 arithmetic
matmul._install()
assert not matmul.emulated(torch.bfloat16)
def random(*shape):
    return torch.randn(*shape).bfloat16()
def check(got, want, way):
    assert set(ways) == way, (ways, way)
    ways.clear()
    torch.testing.assert_close(got.double(), want, rtol=2**-7, atol=2**-6)
x, y, c = random(5, 64), random(64, 7), random(5, 7)
want = x.double() @ y.double()
check(x @ y, want, {"core"})
check(torch.addmm(c, x, y), c.double() + want, {"core"})
check(torch.mm(random(5, 128)[:, ::2] * 0 + x, y), want, {"core"})
check(torch.mm(torch.stack([x, x], 2).view(5, 128)[:, ::2], y), want, {"fp32"})  # neither by rows nor by columns
columns = torch.empty(7, 5).bfloat16().t()
check(torch.mm(x, y, out=columns), want, {"fp32"})
check(columns.copy_(c).addmm_(x, y), c.double() + want, {"fp32"})
check(torch.bmm(x[None], y[None])[0], want, set())  # small ones of a batch: through fp32, all at once
x, y = random(2, 128, 80), random(2, 80, 128)
check(torch.bmm(x, y), x.double() @ y.double(), {"core"})
print("fine")
"""


def test_what_the_core_does_not_take_goes_through_fp32_where_there_is_no_bf16_arithmetic():
    run = run_python("-c", BOTH, timeout=300)
    assert run.returncode == 0 and run.stdout.endswith("fine\n"), run.stderr


def test_which_processors_ask_for_it():
    zen_3, zen_4 = frozenset({"avx2", "fma"}), frozenset({"avx2", "fma", "avx512f", "avx512_bf16"})
    for dtype in ("fp32", "bf16"):
        assert cpu._fast_products(dtype, "AuthenticAMD", "25", zen_4, 3)[0]
        assert cpu._fast_products(dtype, "AuthenticAMD", "25", zen_3, 1)[0] == (dtype == "bf16")
        assert not cpu._fast_products(dtype, "AuthenticAMD", "25", zen_3, 0)[0], "scalar kernels are for comparisons"
        assert not cpu._fast_products(dtype, "GenuineIntel", "6", zen_3, 1)[0], "not measured"
        assert not cpu._fast_products(dtype, "", "", zen_4, 3)[0]
        assert not cpu._fast_products(dtype, "GenuineIntel", "6", zen_4, 3)[0]
        assert not cpu._fast_products(dtype, "AuthenticAMD", "25", zen_4, 0)[0], "scalar kernels are for comparisons"
        assert cpu.fast_products(dtype)[1]
    assert cpu._fast_products("fp32", "AuthenticAMD", "25", zen_4, 1)[0], "DEEPC_ISA: the same bits"
    assert cpu._fast_products("fp32", "AuthenticAMD", "26", zen_4, 3)[0], "Zen 5"
    assert not cpu._fast_products("bf16", "AuthenticAMD", "26", zen_4, 3)[0], "Zen 5: not measured"
    assert not cpu._fast_products("bf16", "AuthenticAMD", "25", zen_4, 2)[0], "without AVX512-BF16: slow"
    assert cpu._fast_products("bf16", "AuthenticAMD", "25", zen_4, 3, "AVX2")[0], "oneDNN has no instructions then"
