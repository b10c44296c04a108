"""Where the buffers of a model lie while it trains, and in which dtype."""

from __future__ import annotations

import torch

from ...core.foreign.buffers import buffer_dtypes
from ...zero.parameters import gathered
from ..base import EngineBase


@torch.no_grad()
def place_buffers(engine: EngineBase) -> None:
    """The model's buffers go to the device, with rank 0's values. They keep their dtype (in 16 bits rotary frequencies
    are wrong by whole turns, and a router's biases are equal) unless data_types.buffer_dtype says another; see
    `following` for those that cannot. Collective."""
    asked = engine._config.data_types.buffer_dtype
    wanted = buffer_dtypes(engine.module, engine.dtype, asked, engine.step_policy.buffer_dtype)
    for b in engine.module.buffers():
        b.data = b.data.to(device=engine.device, dtype=wanted.get(id(b), b.dtype))
    if engine.group.world > 1:
        for _, b in engine.module.named_buffers():
            gathered.broadcast_whole(engine.group, b, 0)
    engine.step_policy.cast_buffers()
