"""torch.ops.deepc.*: loads libdeepc_torch.so (C over torch's C shim) and gives each operator its fake kernel.

The kernels themselves are C; shapes for torch.compile and the formulas of the differentiable operators are here."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

from ..errors import ArgumentError, UnsupportedError
from . import dtypes
from .foreign import private
from .lib import call, call_cuda, library_dir

BLOCK = 4096  # DC_BLOCK of ops/ops.h: elements of one partial sum of a norm


def _load() -> ctypes.CDLL:
    path = library_dir() / "libdeepc_torch.so"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as exc:
        raise ImportError(f"deepc can't load its operators {path}: {exc}. Reinstall deepc-torch.") from exc
    library.dct_register.restype = ctypes.c_char_p
    if error := library.dct_register():
        raise ImportError(f"deepc can't register its operators with torch {torch.__version__}: {error.decode()}")
    library.dct_heap_use.argtypes, library.dct_heap_use.restype = [ctypes.c_int], ctypes.c_int
    return library


_library = _load()


def add_up(total: torch.Tensor | None, gradient: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The sum of gradients so far (None: there is none) with one more, in `dtype` (None: the wider of both); `total` is
    written where it has that dtype. torch's add_ gives the same bits, and makes an fp32 copy of a 16-bit gradient for
    it."""
    if total is None:
        return gradient.to(dtype or gradient.dtype)
    dtype = dtype or torch.promote_types(total.dtype, gradient.dtype)
    total = total.to(dtype)
    if dtype != torch.float32 or gradient.dtype == dtype or not (total.is_contiguous() and gradient.is_contiguous()):
        return total.add_(gradient)
    torch.ops.deepc.add_scaled(total, gradient, 1.0)
    return total


def use_heap(on: bool) -> bool:
    """Whether torch's CPU tensors of at least 128 KiB now come from the core's heap (shim/torch_heap.c)."""
    return bool(_library.dct_heap_use(int(on)))


# ---- torch's dtypes --------------------------------------------------------------------------------------------------
# Of dtypes.TABLE, what this torch has. torch < 2.3 lacks some of the unsigned and 8-bit ones.
_TORCH: dict[dtypes.DType, torch.dtype] = {d: getattr(torch, d.name) for d in dtypes.TABLE if hasattr(torch, d.name)}
_DTYPES: dict[torch.dtype, dtypes.DType] = {t: d for d, t in _TORCH.items()}
CODES: dict[torch.dtype, int] = {t: d.code for d, t in _TORCH.items() if d.code is not None}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def torch_dtype(dtype: dtypes.DType | str) -> torch.dtype:
    """torch's dtype of a table's row or of its name ("bf16", "bfloat16"). ArgumentError for other names."""
    return _TORCH[dtypes.dtype(dtype)]


def dtype_of(dtype: torch.dtype) -> dtypes.DType:
    """The inverse of `torch_dtype`. ArgumentError for what the table lacks (complex128 and quantised types)."""
    return _DTYPES[dtype] if dtype in _DTYPES else dtypes.dtype(dtype)


def autocast(dtype: dtypes.DType | str | None, device: torch.device | str) -> contextlib.AbstractContextManager[Any]:
    """torch.autocast in `dtype` on the kind of `device`; None: nothing changes."""
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(torch.device(device).type, dtype=torch_dtype(dtype))


def as_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As torch.autocast has the floating-point arguments of attention and of matrix products, where it is on."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t.to(dtype) for t in tensors)


def name_of(dtype: torch.dtype) -> str:
    """ "bfloat16" of torch.bfloat16; of any dtype."""
    return _DTYPES[dtype].name if dtype in _DTYPES else str(dtype).removeprefix("torch.")


def casts(t: torch.Tensor) -> bool:
    """Whether a parameter or buffer follows the dtype that its model computes in: floating-point ones do, but for those
    of 8 bits and less, which are codes, with scales elsewhere."""
    return t.is_floating_point() and t.itemsize > 1


def code(dtype: torch.dtype, what: str = "tensor") -> int:
    """The C core's code of `dtype`; ArgumentError naming `what` if the core does not know it."""
    try:
        return CODES[dtype]
    except KeyError:
        raise ArgumentError(
            f"{what} has dtype {dtype}; deepc's core takes {', '.join(str(d) for d in CODES)}"
        ) from None


def run_on(device: torch.device, name: str, args: Any, count: int) -> None:
    """dc_`name`(args, count) of arrays on `device`; of CUDA's, on its current stream. Raises on failure."""
    if device.type == "cuda":
        call_cuda(f"dc_cuda_{name}", args, count, torch.cuda.current_stream(device).cuda_stream)
    else:
        call(f"dc_{name}", args, count)


# ---- operators without numbers ---------------------------------------------------------------------------------------
_F = TypeVar("_F", bound=Callable[..., Any])


_shapes = torch.library.Library("deepc", "FRAGMENT")


def fake(name: str) -> Callable[[_F], _F]:
    """Registers a function as operator `name` without numbers: torch.library.register_fake does the same in 15 times
    the time, which every `import deepc` would pay."""

    def register(function: _F) -> _F:
        _shapes.impl(name, function, "Meta")
        return function

    return register


@fake("cast_tensor")
def _(src: torch.Tensor, dst: torch.Tensor, scale: float) -> None:
    return None


@fake("scale_tensor")
def _(x: torch.Tensor, a: float) -> None:
    return None


@fake("add_scaled")
def _(y: torch.Tensor, x: torch.Tensor, a: float) -> None:
    return None


@fake("copy_tensor")
def _(src: torch.Tensor, dst: torch.Tensor) -> None:
    return None


@fake("reduce_tensors")
def _(dst: torch.Tensor, srcs: list[torch.Tensor], op: int) -> None:
    return None


@fake("accumulate_tensors")
def _(acc: torch.Tensor, srcs: list[torch.Tensor], assign: bool, partial: torch.Tensor) -> None:
    return None


@fake("step_adamw")
def _(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    max_exp_avg_sqs: list[torch.Tensor],
    lowps: list[torch.Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_scale: float,
    step: int,
    decoupled: bool,
) -> None:
    return None


@fake("step_rule")
def _(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    states: list[torch.Tensor],
    lowps: list[torch.Tensor],
    rule: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_scale: float,
    step: int,
    nesterov: bool,
) -> None:
    return None


@fake("quantize_blocks")
def _(x: torch.Tensor, payload: torch.Tensor, error: torch.Tensor, bits: int, block: int) -> None:
    return None


@fake("dequantize_blocks")
def _(payload: torch.Tensor, out: torch.Tensor, bits: int, block: int) -> None:
    return None


@fake("average_signs")
def _(rows: torch.Tensor, payload: torch.Tensor, error: torch.Tensor, count: int, block: int, factor: float) -> None:
    return None


@fake("add_dequantized")
def _(payload: torch.Tensor, acc: torch.Tensor, bits: int, block: int, factor: float) -> None:
    return None


@fake("select_topk")
def _(x: torch.Tensor, payload: torch.Tensor, error: torch.Tensor, block: int, k: int) -> None:
    return None


@fake("spread_topk")
def _(payload: torch.Tensor, out: torch.Tensor, block: int, k: int) -> None:
    return None


@fake("add_topk")
def _(payload: torch.Tensor, acc: torch.Tensor, block: int, k: int, factor: float) -> None:
    return None


@fake("rotate_blocks")
def _(x: torch.Tensor) -> None:
    return None


@fake("cross_entropy_rows")
def _(
    logits: torch.Tensor,
    labels: torch.Tensor,
    row_scale: torch.Tensor,
    loss: torch.Tensor,
    classes: int,
    scale: float,
    label_smoothing: float,
    ignore_index: int,
    gradient: bool,
) -> None:
    return None


@fake("norm_squared")
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(((x.numel() + BLOCK - 1) // BLOCK,), dtype=torch.float64)


def _norm_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[0])


def _norm_backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    per_element = grad.repeat_interleave(BLOCK)[: x.numel()].view(x.shape)
    out: torch.Tensor = (x * (2 * per_element)).to(x.dtype)
    return out


torch.library.register_autograd("deepc::norm_squared", _norm_backward, setup_context=_norm_setup)


@fake("gemm")
def _(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, out: torch.Tensor, beta: float, alpha: float) -> None:
    return None


# ---- fused operators of a transformer block (ops/fused.h): docs/fused.md ---------------------------------------------
# An empty tensor stands for an absent weight, bias or gradient: torch's C shim has no optional tensors for boxed C
# kernels.
def _stats(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[:-1], dtype=torch.float32)


def _packed(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


@fake("rms_norm")
def _(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> tuple[torch.Tensor, torch.Tensor]:
    return _packed(x), _stats(x)


@fake("add_rms_norm")
def _(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _packed(x), _packed(x), _stats(x)


@fake("layer_norm")
def _(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _packed(x), _stats(x), _stats(x)


@fake("add_layer_norm")
def _(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return _packed(x), _packed(x), _stats(x), _stats(x)


@fake("norm_grad")
def _(
    dy: torch.Tensor,
    dsum: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    offset: float,
    dweight: bool,
    dbias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    cols = x.shape[-1]
    return _packed(x), weight.new_empty((cols if dweight else 0,)), weight.new_empty((cols if dbias else 0,))


@fake("swiglu")
def _(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return _packed(gate)


@fake("swiglu_grad")
def _(dout: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _packed(gate), _packed(gate)


@fake("gelu")
def _(x: torch.Tensor, bias: torch.Tensor, tanh: bool) -> torch.Tensor:
    return _packed(x)


@fake("gelu_grad")
def _(
    dout: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, tanh: bool, dbias: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return _packed(x), bias.new_empty((x.shape[-1] if dbias else 0,))


@fake("rotary")
def _(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool) -> torch.Tensor:
    return torch.empty_like(x)


@fake("attention")
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), _stats(q)


@fake("attention_grad")
def _(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


@fake("block_sparse_attention")
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: torch.Tensor,
    block: int,
    q_group: torch.Tensor,
    k_group: torch.Tensor,
    slope: torch.Tensor,
    bias: torch.Tensor,
    seed: torch.Tensor,
    dropout: float,
    batch: int,
    head: int,
    causal: bool,
    diagonal: int,
    window: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), _stats(q)


@fake("block_sparse_attention_grad")
def _(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    layout: torch.Tensor,
    block: int,
    q_group: torch.Tensor,
    k_group: torch.Tensor,
    slope: torch.Tensor,
    bias: torch.Tensor,
    seed: torch.Tensor,
    dropout: float,
    batch: int,
    head: int,
    causal: bool,
    diagonal: int,
    window: int,
    scale: float,
    dbias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    of_bias = bias.new_empty(bias.shape if dbias else (0,), dtype=torch.float32)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), of_bias


def _no_second(name: str) -> None:
    """No formula is registered for the gradients' own gradients; torch would return wrong numbers with a warning, this
    raises."""

    def backward(ctx: Any, *grads: Any) -> Any:
        raise UnsupportedError(
            f"deepc::{name} has no second derivative: the fused operators don't support create_graph=True. "
            "Use PyTorch's own operators where you need gradients of gradients (deepc.fuse is what puts ours in)"
        )

    torch.library.register_autograd(f"deepc::{name}", backward)


for _name in ("norm_grad", "swiglu_grad", "gelu_grad", "attention_grad", "block_sparse_attention_grad"):
    _no_second(_name)


# A torch.autograd.Function of the same formulas in place of register_autograd saved 6 of 86 us a call (measured): not
# worth a second path.
def _norm_formula(name: str, add: bool, center: bool) -> None:
    """Registers the gradient of one of the four norms."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, weight = inputs[0], inputs[2 if add else 1]
        bias = inputs[3 if add else 2] if center else None
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[2 if add else 1 :])
        ctx.offset, ctx.has_weight, ctx.has_bias = (
            0.0 if center else inputs[-1],
            weight.numel() > 0,
            bias is not None and bias.numel() > 0,
        )
        # like: its dtype is that of dbias
        like = weight if ctx.has_weight or bias is None or not ctx.has_bias else weight.new_empty(0, dtype=bias.dtype)
        ctx.save_for_backward(output[1] if add else x, like, *output[2 if add else 1 :])

    def backward(ctx: Any, dy: torch.Tensor | None, *more: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        x, weight, *stats = ctx.saved_tensors
        dsum = more[0] if add else None
        mean, rstd = stats if center else (x.new_empty(0, dtype=torch.float32), stats[0])
        needs = ctx.needs_input_grad
        dweight, dbias = ctx.has_weight and needs[2 if add else 1], ctx.has_bias and center and needs[3 if add else 2]
        dx = dw = db = None
        if dy is not None:
            more_dx = x.new_empty(0) if dsum is None else dsum.contiguous()
            dx, dw, db = torch.ops.deepc.norm_grad(
                dy.contiguous(), more_dx, x, weight, mean, rstd, ctx.offset, dweight, dbias
            )
        elif dsum is not None:
            dx = dsum
        tensors = [dx] * (2 if add else 1) + [dw if dweight else None] + ([db if dbias else None] if center else [])
        return (*tensors, *([None] * (1 if center else 2)))

    torch.library.register_autograd(f"deepc::{name}", backward, setup_context=setup)


_norm_formula("rms_norm", False, False)
_norm_formula("add_rms_norm", True, False)
_norm_formula("layer_norm", False, True)
_norm_formula("add_layer_norm", True, True)


def _swiglu_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _swiglu_backward(ctx: Any, grad: torch.Tensor) -> Any:
    return torch.ops.deepc.swiglu_grad(_rows(grad), *ctx.saved_tensors)


torch.library.register_autograd("deepc::swiglu", _swiglu_backward, setup_context=_swiglu_setup)


def _gelu_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, bias, ctx.tanh = inputs
    ctx.save_for_backward(x, bias)


def _gelu_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
    x, bias = ctx.saved_tensors
    dbias = bias.numel() > 0 and ctx.needs_input_grad[1]
    dx, db = torch.ops.deepc.gelu_grad(grad.contiguous(), x, bias, ctx.tanh, dbias)
    return dx, db if dbias else None, None


torch.library.register_autograd("deepc::gelu", _gelu_backward, setup_context=_gelu_setup)


def _rotary_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, cos, sin, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _rotary_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
        raise UnsupportedError(
            "deepc::rotary gives no gradient to cos and sin, and one of them requires it. Pass cos.detach() and "
            "sin.detach(), or use PyTorch's own operators if your model trains its positions"
        )
    cos, sin = ctx.saved_tensors
    return torch.ops.deepc.rotary(inner_dense(grad), cos, sin, not ctx.inverse), None, None, None


torch.library.register_autograd("deepc::rotary", _rotary_backward, setup_context=_rotary_setup)


def _attention_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, ctx.causal, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output)


def _attention_backward(ctx: Any, dout: torch.Tensor | None, _: Any) -> tuple[torch.Tensor | None, ...]:
    if dout is None:
        return None, None, None, None, None
    grads = torch.ops.deepc.attention_grad(inner_dense(dout), *ctx.saved_tensors, ctx.causal, ctx.scale)
    return *grads, None, None


torch.library.register_autograd("deepc::attention", _attention_backward, setup_context=_attention_setup)


def _sparse_attention_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, layout, ctx.block, q_group, k_group, slope, bias, seed, *ctx.plain = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, layout, q_group, k_group, slope, bias, seed)


def _sparse_attention_backward(ctx: Any, dout: torch.Tensor | None, _: Any) -> tuple[torch.Tensor | None, ...]:
    none = (None,) * 8
    if dout is None:
        return None, None, None, *none[:5], None, *none
    *tensors, layout, q_group, k_group, slope, bias, seed = ctx.saved_tensors
    wanted = ctx.needs_input_grad[8]
    dq, dk, dv, dbias = torch.ops.deepc.block_sparse_attention_grad(
        inner_dense(dout), *tensors, layout, ctx.block, q_group, k_group, slope, bias, seed, *ctx.plain, wanted
    )
    return dq, dk, dv, *none[:5], dbias.to(bias.dtype) if wanted else None, *none


torch.library.register_autograd(
    "deepc::block_sparse_attention", _sparse_attention_backward, setup_context=_sparse_attention_setup
)


def refuse_tangents(name: str, *tensors: torch.Tensor | None) -> None:
    """UnsupportedError for inputs with forward-mode derivatives (torch.func.jvp, torch.autograd.forward_ad). Where no
    input requires a gradient, torch passes by what is registered for autograd: the result's would be zero without a
    word."""
    if not private.forward_mode():
        return
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise UnsupportedError(
            f"deepc.ops.{name} has no forward-mode derivative (torch.func.jvp, torch.autograd.forward_ad). Use"
            " PyTorch's own operators where you need one (deepc.fuse is what puts ours in)"
        )


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x, or a contiguous copy if its rows (all dimensions but the last) don't lie evenly spaced with their elements
    side by side."""
    if x.is_contiguous():
        return x
    size, step, following = x.shape, x.stride(), -1
    even = size[-1] <= 1 or step[-1] == 1
    for k in range(x.dim() - 2, -1, -1):
        if size[k] == 1:
            continue
        even = even and step[k] >= size[-1] and following in (-1, step[k])
        following = step[k] * size[k]
    return x if even else x.contiguous()


def inner_dense(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy whose last dimension lies side by side."""
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


def _or_empty(t: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(0) if t is None else t.contiguous()


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6, offset: float = 0.0
) -> torch.Tensor:
    """x * rsqrt(mean(x^2) + eps) * (offset + weight) over the last dimension (arXiv:1910.07467); offset 1 is Gemma's
    form.

    x: [..., cols] float32, bfloat16 or float16, rows may have strides; weight: [cols] of any of them. Arithmetic is
    fp32 with one rounding, the result has x's shape and dtype. Differentiable once. RuntimeError for other dtypes and
    shapes that don't fit.
    """
    refuse_tangents("rms_norm", x, weight)
    out: torch.Tensor = torch.ops.deepc.rms_norm(_rows(x), _or_empty(weight, x), eps, offset)[0]
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(s), s) with s = x + residual, rounded to x's dtype, in one pass; residual: like x."""
    refuse_tangents("add_rms_norm", x, residual, weight)
    out: tuple[torch.Tensor, torch.Tensor] = torch.ops.deepc.add_rms_norm(
        _rows(x), _rows(residual), _or_empty(weight, x), eps, offset
    )[:2]
    return out


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """Layer norm over the last dimension (arXiv:1607.06450); weight and bias: [cols], of one dtype. Otherwise as
    `rms_norm`."""
    refuse_tangents("layer_norm", x, weight, bias)
    out: torch.Tensor = torch.ops.deepc.layer_norm(_rows(x), _or_empty(weight, x), _or_empty(bias, x), eps)[0]
    return out


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(layer_norm(s), s) with s = x + residual, rounded to x's dtype, in one pass; residual: like x."""
    refuse_tangents("add_layer_norm", x, residual, weight, bias)
    out: tuple[torch.Tensor, torch.Tensor] = torch.ops.deepc.add_layer_norm(
        _rows(x), _rows(residual), _or_empty(weight, x), _or_empty(bias, x), eps
    )[:2]
    return out


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up (arXiv:2002.05202); both of one shape and dtype, such as the halves of one tensor (x.chunk(2,
    -1), uncopied)."""
    refuse_tangents("swiglu", gate, up)
    out: torch.Tensor = torch.ops.deepc.swiglu(_rows(gate), _rows(up))
    return out


def gelu(x: torch.Tensor, bias: torch.Tensor | None = None, approximate: str = "none") -> torch.Tensor:
    """GELU of x + bias (arXiv:1606.08415); bias: [cols]; approximate: "none" or "tanh", as torch.nn.functional.gelu has
    it."""
    if approximate not in ("none", "tanh"):
        raise ArgumentError(f"deepc.ops.gelu: approximate={approximate!r}; it is 'none' or 'tanh'")
    refuse_tangents("gelu", x, bias)
    out: torch.Tensor = torch.ops.deepc.gelu(_rows(x), _or_empty(bias, x), approximate == "tanh")
    return out


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (arXiv:2104.09864) as transformers lays it out: x * cos + rotate_half(x) * sin.

    x: up to 4 dimensions, any strides but for the last; the result lies in memory as x does. cos, sin: [..., rotated],
    broadcast against x's leading dimensions; elements of x from `rotated` on pass through. The gradient is x's only;
    UnsupportedError if cos or sin need one.
    """
    refuse_tangents("rotary", x, cos, sin)
    out: torch.Tensor = torch.ops.deepc.rotary(inner_dense(x), inner_dense(cos), inner_dense(sin), False)
    return out


def apply_rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rotary` of queries and keys, with the arguments of transformers' apply_rotary_pos_emb: cos, sin [batch or 1,
    positions, rotated]."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return rotary(q, cos, sin), rotary(k, cos, sin)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    bias: torch.Tensor | None = None,
    dropout: float = 0.0,
    seed: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(q k^T * scale + bias) v by blocks (arXiv:1706.03762, arXiv:2205.14135), as
    torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=True) has it.

    q: [batch, heads, rows, dim]; k, v: [batch, kv_heads, keys, dim], heads a multiple of kv_heads, dim at most 256; on
    CPUs or a GPU, of one dtype (float32, bfloat16, float16; torch.autocast casts all three), any strides but for the
    last dimension. is_causal: query i
    sees keys up to i. scale: above 0; None: dim ** -0.5. bias, dropout, seed: as in `block_sparse_attention`. The
    result has q's shape, dtype and order in memory. Sums are fp32. Differentiable once. RuntimeError for other shapes
    and dtypes.
    """
    q, k, v = as_autocast(q, k, v)
    if bias is not None or dropout:
        return block_sparse_attention(q, k, v, is_causal=is_causal, scale=scale, bias=bias, dropout=dropout, seed=seed)
    refuse_tangents("attention", q, k, v)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    out: torch.Tensor = torch.ops.deepc.attention(inner_dense(q), inner_dense(k), inner_dense(v), is_causal, factor)[0]
    return out


def _seed(seed: int | torch.Tensor | None, dropout: float, like: torch.Tensor) -> torch.Tensor:
    """int64 [1] on the CPU, drawn by torch's generator where none is given; empty without dropout."""
    if not dropout:
        return like.new_empty(0, dtype=torch.int64)
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (1,), device="cpu")
    if isinstance(seed, torch.Tensor):
        return seed.reshape(1).to("cpu", torch.int64)
    return torch.tensor([(seed + 2**63) % 2**64 - 2**63], device="cpu")  # torch has no unsigned scalars of 64 bits


def _bias(bias: torch.Tensor) -> torch.Tensor:
    """[batch or 1, heads or 1, rows or 1, keys] whose last dimension lies side by side."""
    if bias.dtype not in (torch.bool, *FLOATS):
        raise ArgumentError(f"bias is {bias.dtype}; it must be bool, float32, bfloat16 or float16")
    if bias.dim() < 4:
        bias = bias.reshape((1,) * (4 - bias.dim()) + bias.shape)
    return bias if bias.shape[-1] == 1 or bias.stride(-1) == 1 else bias.contiguous()


def mask_arguments(
    q: torch.Tensor,
    layout: torch.Tensor | None = None,
    block: int = 64,
    groups: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    dropout: float = 0.0,
    seed: int | torch.Tensor | None = None,
    first: tuple[int, int] = (0, 0),
) -> tuple[Any, ...]:
    """Of torch.ops.deepc.block_sparse_attention and its gradient those from layout to head, of what
    `block_sparse_attention` takes; q: of queries, any."""
    none = q.new_empty(0, dtype=torch.uint8)
    of_q, of_k = groups if isinstance(groups, tuple) else (groups, groups)
    wide = none.view(torch.int32)
    return (
        none if layout is None else layout.to(q.device).ne(0).view(torch.uint8).contiguous(),
        block,
        wide if of_q is None else of_q.to(torch.int32).contiguous(),
        wide if of_k is None else of_k.to(torch.int32).contiguous(),
        q.new_empty(0, dtype=torch.float32) if slopes is None else slopes.float().contiguous(),
        q.new_empty(0, dtype=torch.float32) if bias is None else _bias(bias),
        _seed(seed, dropout, q),
        dropout,
        *first,
    )


def block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: torch.Tensor | None = None,
    block: int = 64,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    groups: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    window: int | None = None,
    dropout: float = 0.0,
    seed: int | torch.Tensor | None = None,
    first: tuple[int, int] = (0, 0),
    diagonal: int = 0,
) -> torch.Tensor:
    """`attention` of which whole blocks are left out (Child et al., arXiv:1904.10509): what is hidden costs nothing.

    q, k, v, scale and the result: as in `attention`. layout: [1 or heads, ceil(rows / block), ceil(keys / block)], bool
    or an integer type, where 0 hides a block; None: no block is hidden. block: a multiple of 16 from 16 to 128.
    is_causal: within visible blocks query i sees keys up to i + diagonal. window: query i sees keys from i + diagonal -
    window + 1 on. groups: int32 numbers between -2^24 and 2^24, [batch, rows] (or one such tensor for the rows and one
    [batch, keys] for the keys): a query sees the keys of its own number only: sequences packed in a row, padding.
    slopes: [heads] float32, adds slopes[h] * (key - query - diagonal) to the scores (ALiBi, arXiv:2108.12409).

    bias: [1 or batch, 1 or heads, 1 or rows, keys] (leading dimensions may be missing), read where something is
    visible: of a float type it is added to the scores and has a gradient, and -1e9 or less hides the pair; of bool,
    False does.

    dropout: the share of the probabilities, from 0 to below 1 in steps of 2^-16, that is dropped; those that are kept
    count 1 / (1 - dropout). Which ones is a function (Philox4x32-10) of the seed, entry of the batch, head, query and
    key alone: not of layout, threads, instruction set, nor, with first=(entry, head) of this call's first ones, of what
    which rank has. seed: 64 bits, or a tensor of one int64; None: drawn by torch's generator for CPUs, so that
    torch.manual_seed and recomputation repeat it.

    A query that sees no key has a result of 0. Memory is linear in rows and keys. Differentiable once in q, k, v and
    bias. RuntimeError for other shapes and dtypes.
    """
    refuse_tangents("block_sparse_attention", q, k, v, slopes, bias)
    q, k, v = as_autocast(q, k, v)
    out: torch.Tensor = torch.ops.deepc.block_sparse_attention(
        inner_dense(q),
        inner_dense(k),
        inner_dense(v),
        *mask_arguments(q, layout, block, groups, slopes, bias, dropout, seed, first),
        is_causal,
        diagonal,
        window or 0,
        q.shape[-1] ** -0.5 if scale is None else scale,
    )[0]
    return out
