"""scaled_dot_product_attention of 16 bits by the core, where torch's products of them are slow: values, shapes and
strides as torch's, what stays torch's, and which engines have it."""

from __future__ import annotations

import os

import pytest
import torch
from deepc.core.cpu import ComputePath
from deepc.nn.aten import attention, matmul
from programs import run_python

VALUES = """
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
import deepc
from deepc.nn.aten import attention
dtype = torch.{dtype}
torch.manual_seed(0)

def of(batch, heads, rows, dim, turned):
    x = torch.randn(batch, rows, heads, dim).transpose(1, 2) if turned else torch.randn(batch, heads, rows, dim)
    return x.to(dtype)

def run(q, k, v, **how):
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    out = sdpa(q, k, v, **how)
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out) + out.detach().flip(-1))
    return [out.detach(), *grads]

def case(rows, keys, dim, turned, **how):
    q, k, v = (of(2, 3, n, dim, turned) for n in (rows, keys, keys))
    wide = [t.double() for t in (q, k, v)]
    if how.get("attn_mask") is not None:
        mask = how["attn_mask"]
        exact = run(*wide, **{**how, "attn_mask": mask if mask.dtype == torch.bool else mask.double()})
    else:
        exact = run(*wide, **how)
    return (q, k, v), exact

masks = {}
masks["padding"] = torch.ones(2, 1, 1, 70, dtype=torch.bool)
masks["padding"][1, :, :, 50:] = False
masks["added"] = torch.randn(70, 70).to(dtype)
masks["rows that see nothing"] = torch.ones(1, 1, 70, 70, dtype=torch.bool).tril().clone()
masks["rows that see nothing"][:, :, 5] = False
cases = [((70, 70, 40, turned), dict(is_causal=causal)) for turned in (False, True) for causal in (False, True)]
cases += [((rows, keys, 33, True), dict(is_causal=True)) for rows, keys in ((65, 300), (300, 65))]
cases += [((1, 90, 64, False), {}), ((70, 70, 24, True), dict(scale=0.3))]
cases += [((70, 70, 24, True), dict(attn_mask=mask)) for mask in masks.values()]
made = [(how, *case(*shape, **how)) for shape, how in cases]
torchs = [run(*operands, **how) for how, operands, _ in made]
attention.install(dtype)
for (how, operands, exact), plain in zip(made, torchs):
    before = attention.calls
    got = run(*operands, **how)
    few = operands[0].shape[2] * operands[1].shape[2] < attention.LEAST
    assert attention.calls - before == 2 - few, (how, attention.calls - before)
    for name, x, y, want in zip("out dq dk dv".split(), got, plain, exact):
        assert x.dtype == dtype and x.shape == y.shape and x.stride() == y.stride(), (how, name, x.stride(), y.stride())
        worst, torchs_worst = ((t.double() - want).abs().max() / want.abs().max() for t in (x, y))
        assert worst <= max(3 * torchs_worst, 2**-7), (how, name, float(worst), float(torchs_worst))

def torchs_own(q, k, v, **how):
    before = attention.calls
    try:
        result = sdpa(q, k, v, **how)
    except RuntimeError as error:
        result = error
    assert attention.calls == before, how
    return result

q, k, v = (of(2, 3, 70, 40, True) for _ in range(3))
hidden = torch.zeros(70, 70, dtype=dtype)
for much in (torch.finfo(dtype).min, -1e9, -5e8) if dtype == torch.bfloat16 else ():  # (fp16 has no numbers that hide)
    hidden[5] = much
    assert torchs_own(q, k, v, attn_mask=hidden)[:, :, 5].abs().max() > 0, "all keys alike, as torch has it"
torchs_own(q.float(), k.float(), v.float())
torchs_own(q, k, v, dropout_p=0.5)
wide = of(1, 1, 70, 264, True)
torchs_own(wide, wide, wide)
torchs_own(q[0], k[0], v[0, :, :, :])
assert isinstance(torchs_own(q, k.float(), v), RuntimeError)
assert isinstance(torchs_own(q, k[:1, :2], v), RuntimeError)
before = attention.calls
compiled = torch.compile(lambda *x: sdpa(*x, is_causal=True) * 2, backend="aot_eager")
torch.testing.assert_close(compiled(q, k, v), 2 * sdpa(q, k, v, is_causal=True))
assert attention.calls == before + 2
print("fine")
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_cores_attention_is_torchs(dtype):
    run = run_python("-c", VALUES.replace("{dtype}", dtype), timeout=300)
    assert run.returncode == 0 and run.stdout.endswith("fine\n"), run.stderr


ENGINE = """
import torch
import deepc
from deepc.core.cpu import ComputePath
from deepc.nn.aten import attention, matmul
matmul.cpu.compute_path = lambda dtype: ComputePath(dtype, {native}, "the test says so")

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(64, 192)
    def forward(self, x):
        q, k, v = self.qkv(x).view(2, 40, 3, 4, 16).permute(2, 0, 3, 1, 4)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "bf16": {"enabled": True}}
engine = deepc.initialize(model=Model(), config=config)[0]
loss = engine(torch.randn(2, 40, 64).bfloat16()).square().mean()
engine.backward(loss)
engine.step()
print(attention.calls, loss.isfinite().item())
"""


@pytest.mark.parametrize("native, calls", [(False, "2 True"), (True, "0 True")])
def test_an_engine_has_it_where_products_are_slow(native, calls):
    run = run_python(
        "-c", ENGINE.replace("{native}", str(native)), env={**os.environ, "DEEPC_LOG_LEVEL": "WARNING"}, timeout=300
    )
    assert run.returncode == 0 and run.stdout.splitlines()[-1] == calls, run.stderr


def test_where_it_is_chosen(monkeypatch):
    chosen = []
    monkeypatch.setattr(attention, "install", chosen.append)
    for native in (True, False):
        monkeypatch.setattr(matmul.cpu, "compute_path", lambda dtype, native=native: ComputePath(dtype, native, "so"))
        for device in ("cpu", "meta"):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                attention.choose(dtype, torch.device(device))
    assert chosen == [torch.bfloat16, torch.float16]
