"""In which dtypes the buffers of a model are while it trains: which of those of torch's own modules can't differ from
the parameters, and which transformers' classes list to be kept in fp32."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn.utils.spectral_norm import SpectralNorm as SpectralNormHook

from ..ops import casts, dtype_of, name_of, torch_dtype
from .private import BatchNorm, SpectralNorm

CAST_BUFFERS = '"data_types": {{"buffer_dtype": "{}"}}'  # see mixing_is_told; of an engine
_MIXED = re.compile(r"dtype|scalar type|type .* should be the same")  # torch's words


def following(model: torch.nn.Module) -> list[torch.Tensor]:
    """The buffers that have to follow the parameters' dtype, each once, because torch computes with both of one dtype
    only: statistics of batch norms with weights, the vectors of spectral norms."""
    found = (b for b in _following(model) if b is not None and casts(b))
    return list({id(b): b for b in found}.values())


def _following(model: torch.nn.Module) -> Iterator[torch.Tensor | None]:
    for m in model.modules():
        if isinstance(m, SpectralNorm) or (isinstance(m, BatchNorm) and m.weight is not None):
            yield from m._buffers.values()
        for hook in m._forward_pre_hooks.values():
            if isinstance(hook, SpectralNormHook):
                yield from (m._buffers.get(f"{hook.name}_{vector}") for vector in "uv")


def buffer_dtypes(
    model: torch.nn.Module, dtype: torch.dtype, asked: str | None, follow: torch.dtype | None = None
) -> dict[int, torch.dtype]:
    """By id of each floating-point buffer the dtype that it has in training in `dtype`: its own, or what is
    `asked` by data_types.buffer_dtype. follow: of those that follow the parameters; None: `dtype`."""
    same, listed = {id(b) for b in following(model)}, _listed(model, dtype)
    out = {}
    for name, b in model.named_buffers():
        if not casts(b):
            continue
        if id(b) in same:
            out[id(b)] = follow or dtype
        elif listed is not None and listed.search(name):
            out[id(b)] = torch.float32
        else:
            out[id(b)] = b.dtype if asked is None else torch_dtype(asked)
    return out


@contextlib.contextmanager
def mixing_is_told(model: torch.nn.Module, dtype: torch.dtype, cure: str, inputs: Iterable[Any] = ()) -> Iterator[None]:
    """torch's error of a forward that mixes dtypes says which buffer it may be, that kept its own beside parameters in
    `dtype`, and whether one of `inputs` has another. cure: what casts all buffers, with the dtype's name in the place
    of {}."""
    try:
        yield
    except RuntimeError as exc:
        if dtype != torch.float32 and _MIXED.search(str(exc)) and hasattr(exc, "add_note"):  # Python 3.11
            same = {id(b) for b in following(model)}
            own = ((n, b) for n, b in model.named_buffers() if casts(b) and b.dtype != dtype and id(b) not in same)
            if (found := next(own, None)) is not None:
                name, b = found
                exc.add_note(
                    f"buffers keep their dtype: {name!r} is {name_of(b.dtype)}, and what the model makes of it meets"
                    f" parameters of {name_of(dtype)}. Cast it there (self.{name.rpartition('.')[2]}.to(x.dtype)),"
                    f" or cast all buffers: {cure.format(dtype_of(dtype).short)}"
                )
            others = (x.dtype for x in inputs if isinstance(x, torch.Tensor) and casts(x) and x.dtype != dtype)
            if (other := next(others, None)) is not None:
                exc.add_note(
                    f"an input of the model is {name_of(other)} and its parameters are {name_of(dtype)}: the script"
                    " casts floating-point inputs, x.to(engine.dtype)"
                )
        raise


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
