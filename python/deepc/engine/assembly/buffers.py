"""Where the buffers of a model lie while it trains, and in which dtype."""

from __future__ import annotations

import re

import torch

from ...core.ops import casts, dtype_of, name_of, statistics, torch_dtype
from ...zero.parameters import gathered
from ..base import EngineBase

_MIXED = re.compile(r"dtype|scalar type|type .* should be the same")  # torch's words


@torch.no_grad()
def place_buffers(engine: EngineBase) -> None:
    """The model's buffers go to the device, with rank 0's values. They keep their dtype (in 16 bits rotary frequencies
    are wrong by whole turns, and a router's biases are equal) unless data_types.buffer_dtype says another; see
    `statistics` for those that cannot. Collective."""
    asked = engine._config.data_types.buffer_dtype
    follow = {id(b) for b in statistics(engine.module)}
    listed = _listed(engine.module, engine.dtype)
    for prefix, module in engine.module.named_modules():
        for name, b in module._buffers.items():
            if b is None:
                continue
            wanted = b.dtype
            if casts(b) and id(b) in follow:
                wanted = engine.step_policy.buffer_dtype
            elif casts(b) and listed is not None and listed.search(f"{prefix}.{name}" if prefix else name):
                wanted = torch.float32
            elif casts(b) and asked is not None:
                wanted = torch_dtype(asked)
            b.data = b.data.to(device=engine.device, dtype=wanted)
    if engine.group.world > 1:
        for _, b in engine.module.named_buffers():
            gathered.broadcast_whole(engine.group, b, 0)
    engine.step_policy.cast_buffers()


def _listed(model: torch.nn.Module, dtype: torch.dtype) -> re.Pattern[str] | None:
    """The names of what transformers' classes list to be kept in fp32 while the rest is in `dtype`, matched as
    transformers does: anywhere in the name, "*" being any characters."""
    if dtype == torch.float32:
        return None
    lists = ("_keep_in_fp32_modules_strict", *(("_keep_in_fp32_modules",) if dtype == torch.float16 else ()))
    found = set()
    for prefix, module in model.named_modules():
        for name in (n for of in lists for n in getattr(module, of, None) or ()):
            inside = name.replace("*", ".*")
            found.add(rf"^{re.escape(prefix)}\..*{inside}" if prefix else inside)
    return re.compile("|".join(sorted(found))) if found else None


def note_buffers(engine: EngineBase, exc: RuntimeError) -> None:
    """torch's error of a forward that mixes dtypes says whether it may be a buffer that kept its own."""
    if engine.dtype == torch.float32 or _MIXED.search(str(exc)) is None or not hasattr(exc, "add_note"):
        return
    follow = {id(b) for b in statistics(engine.module)}
    for name, b in engine.module.named_buffers():
        if casts(b) and b.dtype != engine.dtype and id(b) not in follow:
            exc.add_note(
                f"buffers keep their dtype: {name!r} is {name_of(b.dtype)}, and what the model makes of it meets"
                f" parameters of {name_of(engine.dtype)}. Cast it there (self.{name.rpartition('.')[2]}.to(x.dtype)),"
                f' or cast all buffers: "data_types": {{"buffer_dtype": "{dtype_of(engine.dtype).short}"}}'
            )
            return
