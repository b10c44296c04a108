"""What an operator costs: floating-point operations and multiply-accumulates of one call, from the shapes of its
arguments.

Products (mm, convolution, attention, recurrent layers, deepc's fused operators) have formulas of their own; an operator
with torch's tag `pointwise` costs one operation per element of its result, a reduction one per element of its input.
Rates of norms and softmax are those of DeepSpeed's profiler (5 per element of a layer norm with weights, 1 of a
softmax), so that totals can be compared. What only moves or makes data costs nothing. Operators that nothing here knows
are looked up in torch.utils.flop_counter, which has those of newer torch and what users registered there.

A formula: (args, kwargs, result) -> (flops, macs). `cost_of(operator)` finds it once per operator."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import nn

from ....core.foreign import private

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Cost = Callable[[Args, Kwargs, Any], tuple[int, int]]


def _product(macs: int, more: int = 0) -> tuple[int, int]:
    return 2 * macs + more, macs


def _first(result: Any) -> torch.Tensor | None:
    """The first tensor of a result."""
    if isinstance(result, torch.Tensor):
        return result
    if isinstance(result, (list, tuple)):
        return next((t for t in map(_first, result) if t is not None), None)
    return None


def _numel(result: Any) -> int:
    t = _first(result)
    return 0 if t is None else t.numel()


def _argument(args: Args, kwargs: Kwargs, place: int, name: str, default: Any = None) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


# ---- products --------------------------------------------------------------------------------------------------------
def _mm(args: Args, kwargs: Kwargs, out: Any) -> tuple[int, int]:
    a, b = args[:2]
    return _product(a.shape[0] * a.shape[1] * b.shape[1])


def _addmm(args: Args, kwargs: Kwargs, out: Any) -> tuple[int, int]:
    return _mm(args[1:], kwargs, out)  # the bias is part of a linear layer, as in DeepSpeed's rate


def _bmm(args: Args, kwargs: Kwargs, out: Any) -> tuple[int, int]:
    a, b = args[:2]
    return _product(a.numel() * b.shape[-1])


def _baddbmm(args: Args, kwargs: Kwargs, out: Any) -> tuple[int, int]:
    return _product(args[1].numel() * args[2].shape[-1])


def _dot(args: Args, kwargs: Kwargs, out: Any) -> tuple[int, int]:
    return _product(args[0].numel())


def _mv(args: Args, kwargs: Kwargs, out: Any) -> tuple[int, int]:
    return _product(args[0].numel())


def _addmv(args: Args, kwargs: Kwargs, out: Any) -> tuple[int, int]:
    return _product(args[1].numel())


def _convolution(args: Args, kwargs: Kwargs, out: Any) -> tuple[int, int]:
    x, weight, bias = args[:3]
    transposed = bool(_argument(args, kwargs, 6, "transposed", False))
    grid = x if transposed else cast(torch.Tensor, _first(out))
    kernel, positions = math.prod(weight.shape[2:]), x.shape[0] * math.prod(grid.shape[2:])
    # weight: [out, in / groups, ...], transposed [in, out / groups, ...].
    macs = kernel * weight.shape[0] * weight.shape[1] * positions
    return _product(macs, 0 if bias is None else _numel(out))


def _attention(args: Args, kwargs: Kwargs, out: Any) -> tuple[int, int]:
    q, k, v = args[:3]  # [..., heads, length, width]; a causal mask is not taken off, as everywhere
    return _product(q.numel() * k.shape[-2] + math.prod(q.shape[:-1]) * k.shape[-2] * v.shape[-1])


def _attention_by_length(args: Args, kwargs: Kwargs, out: Any) -> tuple[int, int]:
    q, k, v = args[:3]  # [batch, length, heads, width]
    if q.dim() != 4:  # packed sequences of different lengths: torch's formula knows how to read them
        return cast(Cost, _from_torch(torch.ops.aten._flash_attention_forward))(args, kwargs, out)
    return _product(q.numel() * k.shape[1] + math.prod(q.shape[:-1]) * k.shape[1] * v.shape[-1])


def _rnn_layer(args: Args, kwargs: Kwargs, out: Any) -> tuple[int, int]:
    x, w_input, w_hidden = args[:3]  # [length, batch, width]; mkldnn_rnn_layer is an LSTM's
    steps = x.shape[0] * x.shape[1]
    return _product(steps * (w_input.numel() + w_hidden.numel()), steps * 10 * w_hidden.shape[-1])


def _cudnn_rnn(args: Args, kwargs: Kwargs, out: Any) -> tuple[int, int]:
    x, weights = args[0], args[1]
    return _product(x.shape[0] * x.shape[1] * sum(w.numel() for w in weights if w.dim() == 2))


def _lstm_cell(args: Args, kwargs: Kwargs, out: Any) -> tuple[int, int]:
    return 10 * _numel(out), 0


def _gru_cell(args: Args, kwargs: Kwargs, out: Any) -> tuple[int, int]:
    return 7 * _numel(out), 0


def _encoder_layer(args: Args, kwargs: Kwargs, out: Any) -> tuple[int, int]:
    x, qkv, projection, up, down = args[0], args[3], args[5], args[14], args[16]
    tokens = x.numel() // x.shape[-1]
    attention = 2 * tokens * x.shape[-2] * x.shape[-1]
    return _product(tokens * (qkv.numel() + projection.numel() + up.numel() + down.numel()) + attention)


def _multi_head_attention(args: Args, kwargs: Kwargs, out: Any) -> tuple[int, int]:
    q, k, qkv, projection = args[0], args[1], args[5], args[7]
    tokens = q.numel() // q.shape[-1]
    return _product(tokens * (qkv.numel() + projection.numel()) + 2 * tokens * k.shape[-2] * q.shape[-1])


def _linear_cross_entropy(args: Args, kwargs: Kwargs, out: Any) -> tuple[int, int]:
    hidden, weight = args[
        :2
    ]  # only what a forward is: that its gradients are made at once is backward's work, done early
    rows = hidden.numel() // hidden.shape[-1]
    return _product(rows * weight.numel(), rows * weight.shape[0])


# ---- so much per element ---------------------------------------------------------------------------------------------
def _per_input(rate: int = 1) -> Cost:
    return lambda args, kwargs, out: (rate * args[0].numel(), 0)


def _per_output(rate: int = 1) -> Cost:
    return lambda args, kwargs, out: (rate * _numel(out), 0)


def _norm(weight_at: int) -> Cost:
    def cost(args: Args, kwargs: Kwargs, out: Any) -> tuple[int, int]:
        return (5 if len(args) > weight_at and args[weight_at] is not None else 4) * args[0].numel(), 0

    return cost


def _batch_norm(training_at: int) -> Cost:
    def cost(args: Args, kwargs: Kwargs, out: Any) -> tuple[int, int]:
        affine, training = args[1] is not None, bool(args[training_at]) if training_at >= 0 else True
        return ((5 if affine else 4) if training else (2 if affine else 1)) * args[0].numel(), 0

    return cost


def _embedding_bag(args: Args, kwargs: Kwargs, out: Any) -> tuple[int, int]:
    return args[1].numel() * args[0].shape[-1], 0


def _free(args: Args, kwargs: Kwargs, out: Any) -> tuple[int, int]:
    return 0, 0


_INPUT = (
    "sum",
    "mean",
    "amax",
    "amin",
    "max",
    "min",
    "argmax",
    "argmin",
    "prod",
    "var",
    "std",
    "var_mean",
    "std_mean",
    "norm",
    "linalg_vector_norm",
    "logsumexp",
    "cumsum",
    "cumprod",
    "_softmax",
    "_log_softmax",
    "_safe_softmax",
    "nll_loss_forward",
    "nll_loss2d_forward",
    "mse_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "max_pool2d_with_indices",
    "max_pool3d_with_indices",
    "mkldnn_max_pool2d",
    "_adaptive_avg_pool2d",
    "_adaptive_avg_pool3d",
    "adaptive_max_pool2d",
    "adaptive_max_pool3d",
)
_OUTPUT = (
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_bicubic2d",
    "upsample_trilinear3d",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
)
_MOVES = (
    "clone",
    "where",
    "masked_fill",
    "masked_fill_",
    "fill",
    "fill_",
    "copy",
    "copy_",
    "_to_copy",
    "contiguous",
    "zero_",
    "zeros_like",
    "ones_like",
    "empty_like",
    "full_like",
    "bernoulli",
    "bernoulli_",
    "native_dropout",
    "normal_",
    "uniform_",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "logical_and",
    "logical_or",
    "logical_not",
    "logical_xor",
    "bitwise_and",
    "bitwise_or",
    "bitwise_not",
    "bitwise_xor",
    "isnan",
    "isinf",
    "alias",
    "lift_fresh",
    "_conj",
    "real",
    "imag",
    "view_as_real",
    "masked_scatter",
)

_TABLE: dict[str, Cost] = {
    **{f"aten::{n}": _per_input() for n in _INPUT},
    **{f"aten::{n}": _per_output() for n in _OUTPUT},
    **{f"aten::{n}": _free for n in _MOVES},
    "aten::mm": _mm,
    "aten::_int_mm": _mm,
    "aten::_scaled_mm": _mm,
    "aten::addmm": _addmm,
    "aten::_addmm_activation": _addmm,
    "aten::bmm": _bmm,
    "aten::baddbmm": _baddbmm,
    "aten::dot": _dot,
    "aten::vdot": _dot,
    "aten::mv": _mv,
    "aten::addmv": _addmv,
    "aten::convolution": _convolution,
    "aten::_convolution": _convolution,
    "aten::convolution_overrideable": _convolution,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention": _attention,
    "aten::_scaled_dot_product_efficient_attention": _attention,
    "aten::_scaled_dot_product_cudnn_attention": _attention,
    "aten::_scaled_dot_product_fused_attention_overrideable": _attention,
    "aten::_flash_attention_forward": _attention_by_length,
    "aten::_efficient_attention_forward": _attention_by_length,
    "aten::mkldnn_rnn_layer": _rnn_layer,
    "aten::_cudnn_rnn": _cudnn_rnn,
    "aten::_thnn_fused_lstm_cell": _lstm_cell,
    "aten::_thnn_fused_gru_cell": _gru_cell,
    "aten::_transformer_encoder_layer_fwd": _encoder_layer,
    "aten::_native_multi_head_attention": _multi_head_attention,
    "aten::native_layer_norm": _norm(2),
    "aten::native_group_norm": _norm(1),
    "aten::_fused_rms_norm": _per_input(4),
    "aten::native_batch_norm": _batch_norm(5),
    "aten::_native_batch_norm_legit": _batch_norm(5),
    "aten::_native_batch_norm_legit_functional": _batch_norm(5),
    "aten::cudnn_batch_norm": _batch_norm(5),
    "aten::miopen_batch_norm": _batch_norm(5),
    "aten::_batch_norm_with_update": _batch_norm(-1),
    "aten::_native_batch_norm_legit_no_training": lambda a, k, o: ((2 if a[1] is not None else 1) * a[0].numel(), 0),
    "aten::_embedding_bag": _embedding_bag,
    "aten::_embedding_bag_forward_only": _embedding_bag,
    "deepc::linear_cross_entropy": _linear_cross_entropy,
    "deepc::cross_entropy_rows": _per_input(),
    "deepc::rms_norm": _per_input(4),
    "deepc::add_rms_norm": _per_input(5),
    "deepc::layer_norm": _per_input(5),
    "deepc::add_layer_norm": _per_input(6),
    "deepc::swiglu": _per_input(2),
    "deepc::gelu": _per_input(2),
    "deepc::rotary": _per_input(3),
    "deepc::norm_squared": _per_input(2),
}


def _from_torch(packet: Any) -> Cost | None:
    """torch.utils.flop_counter's formula of an operator, which gives operations only."""
    from torch.utils.flop_counter import flop_registry

    found = flop_registry.get(packet)
    if found is None:
        return None

    def cost(args: Args, kwargs: Kwargs, out: Any) -> tuple[int, int]:
        flops = int(found(*args, **kwargs, out_val=out))
        return flops, flops // 2

    return cost


def cost_of(operator: Any) -> Cost | None:
    """The formula of a torch.ops overload; None if a call costs nothing."""
    name = operator._schema.name
    found = _TABLE.get(name)
    if found is None and name.endswith("_") and not name.endswith("__"):
        found = _TABLE.get(name[:-1])  # in place
    if found is None:
        found = _from_torch(operator.overloadpacket)
    if found is None and torch.Tag.pointwise in operator.tags:
        found = _per_output()
    return None if found is _free else found


def is_composite(operator: Any) -> bool:
    """True if the operator is made of others and has no formula of its own (under inference_mode such operators arrive
    whole)."""
    return operator._schema.name not in _TABLE and operator.has_kernel_for_dispatch_key(private.COMPOSITE)


# ---- what a profile has counted, on the modules ----------------------------------------------------------------------
class Counted(Protocol):
    """The attributes that a module has while a profile is there."""

    __flops__: int
    __macs__: int
    __params__: int
    __expert_params__: int
    __model_expert_params__: int
    __start_time__: float
    __duration__: float


def counted(module: nn.Module) -> Counted:
    """`module`, whose attributes torch declares to be tensors or modules."""
    return cast(Counted, module)


def get_module_flops(module: nn.Module) -> int:
    """Operations of a module and all inside it, while a profile is there."""
    return sum(counted(m).__flops__ for m in module.modules())


def get_module_macs(module: nn.Module) -> int:
    """Multiply-accumulates of a module and all inside it."""
    return sum(counted(m).__macs__ for m in module.modules())


def get_module_duration(module: nn.Module) -> float:
    """Seconds in a module's forward; of one that is not called itself (a ModuleList): its children's."""
    return counted(module).__duration__ or sum(map(get_module_duration, module.children()))
