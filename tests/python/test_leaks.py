"""A forward with gradients and without a backward leaves nothing behind, whatever hooks look at what autograd saves."""

from __future__ import annotations

import gc
import os
import weakref

import pytest
import torch
from ranks import run_quietly
from torch import nn


class Block(nn.Module):
    seen: list = []

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        h = torch.relu(self.up(x))  # which saves its own result
        Block.seen.append(weakref.ref(h))
        return x + self.down(torch.tanh(h))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def _forwards(rank, world, streamed, extra):
    import deepc

    if streamed:
        os.environ["DEEPC_STREAMED"] = "1"
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3 if streamed else 1},
        **extra,
    }
    engine = deepc.initialize(model=Net(), config=config)[0]
    x = torch.randn(16, 64)
    engine.backward(engine(x))
    engine.step()
    Block.seen.clear()
    for _ in range(3):
        engine(x)
    gc.collect()
    assert len(Block.seen) == 12 and not any(ref() is not None for ref in Block.seen)
    engine.backward(engine(x))
    assert engine.step().applied
    engine.destroy()
    return True


@pytest.mark.parametrize("streamed", [True, False])
def test_a_forward_without_a_backward_leaves_nothing(streamed, tmp_path):
    """In streamed mode, and with activations on disk."""
    extra = {
        "activation_checkpointing": {"cpu_checkpointing": True},
        "deepc": {"activations": {"nvme_path": str(tmp_path), "min_bytes": 1 << 20}},
    }
    assert all(run_quietly(_forwards, 1, streamed, {} if streamed else extra))
