"""Weight-only int8: one symmetric scale per output channel, and the layers that compute with it.

A weight w of a linear layer becomes q = round(w / s), int8 in [-127, 127], with s = max|w| / 127 over each output
channel, in fp32. Then
|w - s q| <= s / 2 for every element (and 2^-15 s for the roundings of fp32), so an output differs from that of the
weights by at most

    (1/2 + 2^-15) s_o * sum_i |x_i|          for output channel o and input x

besides the rounding of the product itself. q is exact in bf16, fp16 and fp32 and the scale comes after the product, so
the product rounds as with weights of that dtype. In fp16, which ends at 65504, q gets the power of two below its scale
before, which is exact as well: the product is never larger than the result, and overflows where that does. Memory of a
weight: 1 byte an element and 4 a channel; the product widens a block of channels at a time.

What becomes int8: nn.Linear and transformers' Conv1D, and an nn.Embedding that is tied to one (a row of it is an output
channel of the other, so both share the same int8 values). A weight that some other module uses as well stays as it
is."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ArgumentError, did_you_mean

SCALE = "_scale"  # the scale of `weight` is stored as `weight_scale`
BLOCK_BYTES = 1 << 20  # of widened weights at a time: they stay in the second-level cache


def quantize(weight: Tensor, axis: int, name: str = "weight") -> tuple[Tensor, Tensor]:
    """(q int8, scale fp32) of a 2-D floating-point `weight` whose dimension `axis` counts output channels; q * scale
    broadcasts to it. ArgumentError if a value is not finite, which has no scale."""
    wide = weight.detach().float()
    most = wide.abs().amax(dim=1 - axis, keepdim=True)
    if not bool(torch.isfinite(most).all()):
        raise ArgumentError(
            f"{name} has a value that is not finite: it can't be quantised to int8. Did the training diverge? Load an "
            "earlier checkpoint"
        )
    scale = torch.where(most > 0, (most / 127).clamp_min(torch.finfo(torch.float32).tiny), 1.0)
    return (wide / scale).round_().clamp_(-127, 127).to(torch.int8), scale


def dequantize(q: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight that (q, scale) stand for."""
    return (q.float() * scale).to(dtype)


def _power_below(scale: Tensor) -> Tensor:
    """The largest power of two that is not above each scale, within what times 1 and 127 is in fp16."""
    return (scale / torch.frexp(scale)[0] / 2).clamp(2.0**-24, 2.0**9)  # the mantissa is from 1 / 2 to 1


class Int8Linear(nn.Module):
    """y = x W^T + b, W = weight * weight_scale. weight: int8 [out, in], or [in, out] if `transposed` (transformers'
    Conv1D); weight_scale: fp32 [out, 1] or [1, out]; bias: [out] or None. x: [..., in] in a floating dtype, y: [...,
    out] in the same. Gradients reach x, not W."""

    def __init__(
        self, weight: nn.Parameter, weight_scale: nn.Parameter, bias: nn.Parameter | None, transposed: bool = False
    ) -> None:
        super().__init__()
        self.weight, self.weight_scale, self.bias, self.transposed = weight, weight_scale, bias, transposed
        self.in_features, self.out_features = weight.shape if transposed else weight.shape[::-1]

    def forward(self, x: Tensor) -> Tensor:
        step = max(1, BLOCK_BYTES // max(1, self.in_features * x.element_size()))
        q = self.weight.t() if self.transposed else self.weight
        scale = self.weight_scale.view(-1)
        if x.dtype == torch.float16:
            before = _power_below(scale)
            scale = scale / before
            blocks = zip(q.split(step), before.to(x.dtype).unsqueeze(1).split(step))
            parts = [F.linear(x, rows.to(x.dtype) * power) for rows, power in blocks]
        else:
            parts = [F.linear(x, rows.to(x.dtype)) for rows in q.split(step)]
        y = (torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]) * scale  # fp32: the scale is not rounded
        return (y if self.bias is None else y + self.bias).to(x.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, int8"


class Int8Embedding(nn.Module):
    """Rows of weight * weight_scale (int8 [rows, width], fp32 [rows, 1]) in `dtype`."""

    def __init__(self, weight: nn.Parameter, weight_scale: nn.Parameter, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.weight_scale, self.dtype = weight, weight_scale, dtype
        self.num_embeddings, self.embedding_dim = weight.shape

    def forward(self, x: Tensor) -> Tensor:
        return (F.embedding(x, self.weight).float() * F.embedding(x, self.weight_scale)).to(self.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, int8"


# ---- which weights ---------------------------------------------------------------------------------------------------
def _axis(module: nn.Module, name: str) -> int | None:
    """The dimension that counts output channels if parameter `name` of `module` can be int8 (an embedding: if it is
    tied), else None."""
    if name != "weight":
        return None
    if type(module) is nn.Linear or (type(module) is nn.Embedding and module.max_norm is None):
        return 0
    return 1 if _is_conv1d(module) else None


def _is_conv1d(module: nn.Module) -> bool:
    return (
        type(module).__name__ == "Conv1D"
        and type(module).__module__.startswith("transformers.")
        and hasattr(module, "nf")
    )


def quantizable(model: nn.Module, keep: Sequence[str] = ()) -> dict[int, int]:
    """id(parameter) -> dimension of its output channels, of the weights that become int8. keep: patterns (fnmatch) of
    parameter names that don't. ArgumentError for one that no parameter has."""
    if isinstance(keep, str):
        raise ArgumentError(f"keep={keep!r} is one text; give a list of patterns: keep=[{keep!r}]")
    axes: dict[int, set[int | None]] = {}
    names: list[str] = []
    dense: set[int] = set()
    for prefix, module in model.named_modules():
        for name, p in module._parameters.items():
            if p is None:
                continue
            names.append(f"{prefix}.{name}" if prefix else name)
            kept = any(fnmatch.fnmatchcase(names[-1], pattern) for pattern in keep)
            axes.setdefault(id(p), set()).add(
                None if kept or p.dim() != 2 or not p.is_floating_point() else _axis(module, name)
            )
            if type(module) is not nn.Embedding:
                dense.add(id(p))
    for pattern in keep:  # it would let the weight that is meant become int8
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise ArgumentError(f"keep: no parameter is called {pattern!r}.{did_you_mean(pattern, names)}")
    one = {i: next(iter(found)) for i, found in axes.items() if i in dense and len(found) == 1}
    return {i: axis for i, axis in one.items() if axis is not None}


def _places(model: nn.Module, chosen: dict[int, int]) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """(parent, attribute, layer) of every layer whose weight is chosen; a layer that has two parents comes twice."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and id(child._parameters.get("weight")) in chosen:
                yield parent, name, child


def convert(
    model: nn.Module, dtype: torch.dtype, chosen: dict[int, int], *, values: bool = True
) -> list[tuple[nn.Parameter, nn.Parameter, nn.Parameter]]:
    """Replaces the layers of the `chosen` weights, in place, by int8 ones; embeddings give `dtype`. values=False: the
    int8 values are still to be loaded. Returns (weight, its int8 values, their scales) of each. Raises ArgumentError if
    the model itself is such a layer."""
    if id(model._parameters.get("weight")) in chosen:
        raise ArgumentError(
            f"the model is a {type(model).__name__} itself and can't be replaced in place; put it into a module "
            "(nn.Sequential(model))"
        )
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    weights: dict[int, nn.Parameter] = {}
    layers: dict[int, nn.Module] = {}
    kept: list[nn.Module] = []  # an id stays that of its layer
    for parent, name, child in _places(model, chosen):
        if id(child) not in layers:
            weight = cast(nn.Parameter, child.weight)
            if id(weight) not in made:
                weights[id(weight)] = weight
                made[id(weight)] = _int8_of(weight, chosen[id(weight)], values)
            layers[id(child)] = _int8_layer(child, *made[id(weight)], dtype)
            kept.append(child)
        parent._modules[name] = layers[id(child)]
    call_modules(model)
    return [(weights[i], *pair) for i, pair in made.items()]


def _int8_of(weight: nn.Parameter, axis: int, values: bool) -> tuple[nn.Parameter, nn.Parameter]:
    if values:
        q, scale = quantize(weight, axis)
    else:
        shape = [1, 1]
        shape[axis] = weight.shape[axis]
        q, scale = (
            torch.empty(weight.shape, dtype=torch.int8, device=weight.device),
            torch.empty(shape, dtype=torch.float32, device=weight.device),
        )
    return nn.Parameter(q, requires_grad=False), nn.Parameter(scale, requires_grad=False)


def _int8_layer(layer: nn.Module, q: nn.Parameter, scale: nn.Parameter, dtype: torch.dtype) -> nn.Module:
    if type(layer) is nn.Embedding:
        made: nn.Module = Int8Embedding(q, scale, dtype)
    else:
        made = Int8Linear(q, scale, cast("nn.Parameter | None", layer.bias), transposed=_is_conv1d(layer))
    return made.train(layer.training)


def call_modules(model: nn.Module) -> None:
    """torch's encoders in `model`, which in evaluation read weights past the modules that have them, call these: they
    are no longer torch's."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # which its layers take on that path alone
