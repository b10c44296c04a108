"""The GPU of the tests: CUDA's, or under tests/simgpu/plugin.py the one without hardware."""

from __future__ import annotations

import torch

GPU = "simgpu" if hasattr(torch, "simgpu") else "cuda"
gpu = getattr(torch, GPU)  # torch.cuda's names
