"""Block-sparse attention of long sequences: 65,536 tokens in a memory cgroup, memory that grows with the tokens."""

from __future__ import annotations

import subprocess
import sys

import pytest
from benches import FOLDER

pytestmark = pytest.mark.full

STEP = """
import sys
import torch
from deepc.core import ops

tokens, dtype = int(sys.argv[1]), getattr(torch, sys.argv[2])
torch.manual_seed(0)
torch.set_num_threads(2)
block, blocks = 64, tokens // 64
layout = torch.zeros(blocks, blocks, dtype=torch.uint8)
layout.scatter_(1, torch.rand(blocks, blocks).topk(blocks // 16, dim=1).indices, 1)
q, k, v = (torch.randn(1, 2, tokens, 64, dtype=dtype, requires_grad=True) for _ in range(3))
if sys.argv[3] == "dense":
    mask = layout.bool().repeat_interleave(block, 0).repeat_interleave(block, 1)
    torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).sum().backward()
else:
    out = ops.block_sparse_attention(q, k, v, layout.unsqueeze(0), block)
    g = torch.randn_like(out)
    out.backward(g)
    wide = [x.detach()[0].double() for x in (q, k, v, g, out)]
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    for row in torch.randint(tokens, (8,)).tolist():  # the results of some queries, and their gradients
        keys = layout[row // block].bool().repeat_interleave(block)
        own_q, own_k, own_v = wide[0][:, row, None], wide[1][:, keys], wide[2][:, keys]
        p = (own_q @ own_k.transpose(1, 2) / 8).softmax(-1)
        dp = wide[3][:, row, None] @ own_v.transpose(1, 2)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) / 8
        for got, want in ((wide[4][:, row, None], p @ own_v), (q.grad[0, :, row, None].double(), ds @ own_k)):
            assert (got - want).abs().max() <= bound * max(want.abs().max().item(), 1.0), row
with open("/proc/self/status") as f:  # not ru_maxrss, which begins with that of the process that forked this one
    print(next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmHWM:")))
"""


def _step(tokens: int, dtype: str, what: str, limit: int) -> tuple[int, int]:
    """One training step in a cgroup of `limit` bytes: exit status, and the peak of its own memory."""
    sys.path.insert(0, str(FOLDER))
    try:
        import limited

        group = limited.Cgroup(limit)
    except OSError as exc:
        pytest.skip(f"no memory cgroup can be made here: {exc}")
    finally:
        sys.path.remove(str(FOLDER))
    try:
        done = subprocess.run(
            [sys.executable, "-c", STEP, str(tokens), dtype, what],
            preexec_fn=group.join,
            capture_output=True,
            text=True,
        )
    finally:
        group.close()
    assert done.returncode in (0, -9) or "memory" in done.stderr, done.stderr
    return done.returncode, int(done.stdout) if done.returncode == 0 else 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_65536_tokens_where_dense_attention_is_killed(dtype):
    peaks = {}
    for tokens in (16384, 32768, 65536):
        ended, peaks[tokens] = _step(tokens, dtype, "ours", 1536 << 20)
        assert ended == 0
    # twice the tokens, twice the growth: what is quadratic here is a byte per block of 4,096 pairs, and its drawing
    assert peaks[65536] - peaks[32768] < 2.5 * (peaks[32768] - peaks[16384])
    assert _step(65536, dtype, "dense", 1536 << 20)[0] != 0
