"""The GPU of the tests: CUDA's, or under tests/simgpu/plugin.py the one without hardware."""

from __future__ import annotations

import torch

GPU = "mtia" if hasattr(torch.mtia, "is_locked") else "cuda"
gpu = getattr(torch, GPU)  # torch.cuda's names


def is_locked(t: torch.Tensor) -> bool:
    """Whether the GPU reaches this memory of the host."""
    return t.is_pinned() if GPU == "cuda" else gpu.is_locked(t)
