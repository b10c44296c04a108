"""torch.ops.deepc.*: loads libdeepc_torch.so (C over torch's C shim) and gives each operator its fake kernel.

The kernels themselves are C; shapes for torch.compile and the one differentiable operator's formula are here."""

from __future__ import annotations

import ctypes

import torch

from ._lib import library_dir

BLOCK = 4096  # DC_BLOCK of ops/ops.h: elements of one partial sum of a norm


def _load() -> None:
    path = library_dir() / "libdeepc_torch.so"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as exc:
        raise ImportError(f"deepc can't load its operators {path}: {exc}. Reinstall deepc-torch.") from exc
    library.dct_register.restype = ctypes.c_char_p
    if error := library.dct_register():
        raise ImportError(f"deepc can't register its operators with torch {torch.__version__}: {error.decode()}")


_load()


@torch.library.register_fake("deepc::cast_tensor")
def _(src, dst, scale):
    return None


@torch.library.register_fake("deepc::scale_tensor")
def _(x, a):
    return None


@torch.library.register_fake("deepc::add_scaled")
def _(y, x, a):
    return None


@torch.library.register_fake("deepc::copy_tensor")
def _(src, dst):
    return None


@torch.library.register_fake("deepc::reduce_tensors")
def _(dst, srcs, op):
    return None


@torch.library.register_fake("deepc::accumulate_tensors")
def _(acc, srcs, assign, partial):
    return None


@torch.library.register_fake("deepc::step_adamw")
def _(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, lowps, lr, beta1, beta2, eps, weight_decay, grad_scale, step, decoupled):
    return None


@torch.library.register_fake("deepc::quantize_blocks")
def _(x, payload, error, bits, block):
    return None


@torch.library.register_fake("deepc::dequantize_blocks")
def _(payload, out, bits, block):
    return None


@torch.library.register_fake("deepc::add_dequantized")
def _(payload, acc, bits, block, factor):
    return None


@torch.library.register_fake("deepc::select_topk")
def _(x, payload, error, block, k):
    return None


@torch.library.register_fake("deepc::spread_topk")
def _(payload, out, block, k):
    return None


@torch.library.register_fake("deepc::add_topk")
def _(payload, acc, block, k, factor):
    return None


@torch.library.register_fake("deepc::norm_squared")
def _(x):
    return x.new_empty(((x.numel() + BLOCK - 1) // BLOCK,), dtype=torch.float64)


def _norm_setup(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


def _norm_backward(ctx, grad):
    (x,) = ctx.saved_tensors
    per_element = grad.repeat_interleave(BLOCK)[: x.numel()].view(x.shape)
    return (2 * x * per_element).to(x.dtype)


torch.library.register_autograd("deepc::norm_squared", _norm_backward, setup_context=_norm_setup)
