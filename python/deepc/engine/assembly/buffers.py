"""Where the buffers of a model lie while it trains, and in which dtype."""

from __future__ import annotations

import re

import torch

from ...core.foreign.buffers import buffer_dtypes, following
from ...core.ops import casts, dtype_of, name_of
from ...zero.parameters import gathered
from ..base import EngineBase

_MIXED = re.compile(r"dtype|scalar type|type .* should be the same")  # torch's words


@torch.no_grad()
def place_buffers(engine: EngineBase) -> None:
    """The model's buffers go to the device, with rank 0's values. They keep their dtype (in 16 bits rotary frequencies
    are wrong by whole turns, and a router's biases are equal) unless data_types.buffer_dtype says another; see
    `following` for those that cannot. Collective."""
    asked = engine._config.data_types.buffer_dtype
    wanted = buffer_dtypes(engine.module, engine.dtype, asked, engine.step_policy.buffer_dtype)
    for b in (b for m in engine.module.modules() for b in m._buffers.values() if b is not None):
        b.data = b.data.to(device=engine.device, dtype=wanted.get(id(b), b.dtype))
    if engine.group.world > 1:
        for _, b in engine.module.named_buffers():
            gathered.broadcast_whole(engine.group, b, 0)
    engine.step_policy.cast_buffers()


def note_buffers(engine: EngineBase, exc: RuntimeError) -> None:
    """torch's error of a forward that mixes dtypes says whether it may be a buffer that kept its own."""
    if engine.dtype == torch.float32 or _MIXED.search(str(exc)) is None or not hasattr(exc, "add_note"):
        return
    follow = {id(b) for b in following(engine.module)}
    for name, b in engine.module.named_buffers():
        if casts(b) and b.dtype != engine.dtype and id(b) not in follow:
            exc.add_note(
                f"buffers keep their dtype: {name!r} is {name_of(b.dtype)}, and what the model makes of it meets"
                f" parameters of {name_of(engine.dtype)}. Cast it there (self.{name.rpartition('.')[2]}.to(x.dtype)),"
                f' or cast all buffers: "data_types": {{"buffer_dtype": "{dtype_of(engine.dtype).short}"}}'
            )
            return
