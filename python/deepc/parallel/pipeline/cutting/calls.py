"""Calls of modules: other ones in their place, and the tensors that go in and out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ....errors import ArgumentError
from ....zero.step.hooks import tensors_in

IN_CHECKPOINT = (
    "pipeline.stages: the model gives its blocks to torch.utils.checkpoint, which would run them again where the inputs"
    " of stages are gone. Call it in the forward of a block, as transformers' gradient_checkpointing_enable() does"
)


def call_instead(module: torch.nn.Module, instead: Callable[..., Any]) -> None:
    """module(...) is instead(real, args, kwargs), outside of its hooks and of what recomputes it."""
    kind = type(module)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return instead(lambda *a, **k: kind.__call__(self, *a, **k), args, kwargs)

    module.__class__ = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def when_gradient_comes(t: torch.Tensor, tell: Callable[[], Any]) -> None:
    if t.requires_grad:
        t.register_hook(lambda g: tell() and None)


def first_tensor(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """What a block works on: its first argument that is a tensor."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value
    raise ArgumentError("pipeline.stages: a block was called without a tensor")


def with_first(
    args: tuple[Any, ...], kwargs: dict[str, Any], tensor: torch.Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    for i, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            return (*args[:i], tensor, *args[i + 1 :]), kwargs
    name = next(k for k, value in kwargs.items() if isinstance(value, torch.Tensor))
    return args, {**kwargs, name: tensor}


def hidden_of(out: Any) -> Any:
    return out[0] if isinstance(out, (tuple, list)) else out


def every_tensor(value: Any) -> list[torch.Tensor]:
    return list(tensors_in(value, levels=16))


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or not a.is_floating_point():
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()) if b.numel() else 0.0, equal_nan=True)


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {k: mapped(v, change) for k, v in value.items()}
    return type(value)(mapped(v, change) for v in value) if type(value) in (list, tuple) else value


def to_meta(t: torch.Tensor) -> torch.Tensor:
    return t.to("meta")


def zeros(value: Any) -> Any:
    """Of the same shapes, in no memory of their own."""
    return mapped(value, lambda t: torch.zeros((), dtype=t.dtype, device="cpu").expand(t.shape))
