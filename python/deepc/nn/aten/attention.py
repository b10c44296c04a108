"""scaled_dot_product_attention of 16 bits on CPUs without arithmetic for it, or where that is slow, by the core.

torch's kernel for CPUs makes its products in the dtype of its operands: 7 times the core's time forward and 20 times
backward in fp16 without arithmetic, 3 and 9 in bf16 (docs/lab/attention.md), where the core computes in fp32
(ops/cpu/attention.c). `install(dtype)` overrides aten's kernel and its gradient for that dtype: results have torch's
shapes and order in memory, and what the core does not take is torch's. Below autograd; process-wide; installed once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core import ops
from ...core.foreign import patches
from . import without_notice
from .matmul import why_slow

_NAME = "_scaled_dot_product_flash_attention_for_cpu"
# What is added to a score may hide its pair from here down: ATT_LOWEST of ops/ref/attention.h is -2^28.
_HIDES = -(2.0**27)
LEAST = 1024  # pairs of a head, from which on the core's gradient is the faster one
_core = torch.ops.deepc
_library: torch.library.Library | None = None
_dtypes: set[torch.dtype] = set()
calls = 0  # of either that the core took; for tests


def choose(dtype: torch.dtype, device: torch.device) -> None:
    """Installs `dtype` if `device` is a CPU on which torch's products of it are slow."""
    if why_slow(dtype, device):
        install(dtype)


def install(dtype: torch.dtype) -> None:
    """Attention in bfloat16 or float16 on CPUs is the core's from now on."""
    global _library
    _dtypes.add(dtype)
    if _library is not None:
        return
    patches.applied("attention")
    _library = torch.library.Library("aten", "IMPL")
    with without_notice():
        _override_forward(_library)
        _override_backward(_library)


def _override_forward(library: torch.library.Library) -> None:
    original = torch.library.get_kernel(f"aten::{_NAME}", "CPU")

    def kernel(
        keys: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout: float = 0.0,
        causal: bool = False,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Any:
        if not _takes(q, k, v, dropout, attn_mask, scale):
            return original.call_boxed(keys, q, k, v, dropout, causal, attn_mask=attn_mask, scale=scale)
        global calls
        calls += 1
        out, lse = _run("attention", (q, k, v), q, causal, attn_mask, scale)
        return out, _by_rows(lse)

    library.impl(_NAME, kernel, "CPU", with_keyset=True)


def _override_backward(library: torch.library.Library) -> None:
    original = torch.library.get_kernel(f"aten::{_NAME}_backward", "CPU")

    def kernel(
        keys: Any,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dropout: float,
        causal: bool,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Any:
        few = q.dim() == 4 and q.shape[2] * k.shape[2] < LEAST
        if few or dout.dtype != q.dtype or not _takes(q, k, v, dropout, attn_mask, scale):
            arguments = (dout, q, k, v, out, lse, dropout, causal)
            return original.call_boxed(keys, *arguments, attn_mask=attn_mask, scale=scale)
        global calls
        calls += 1
        given = (ops.inner_dense(dout), q, k, v, out, lse.contiguous())
        return tuple(map(_by_rows, _run("attention_grad", given, q, causal, attn_mask, scale)[:3]))

    library.impl(f"{_NAME}_backward", kernel, "CPU", with_keyset=True)


def _takes(q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Tensor | None, scale: float | None) -> bool:
    """Not what is torch's error, and no queries that see nothing by a mask of finite numbers: to torch they see all
    keys alike, to the core none."""
    if q.dtype not in _dtypes or any(t.dtype != q.dtype or t.dim() != 4 or not t.numel() for t in (q, k, v)):
        return False
    if any(t.shape[-1] != q.shape[-1] or t.shape[0] != q.shape[0] or t.stride(-1) != 1 for t in (q, k, v)):
        return False
    if q.shape[-1] > 256 or k.shape[:3] != v.shape[:3] or q.shape[1] % k.shape[1]:
        return False
    if dropout != 0 or (scale is not None and not scale > 0):
        return False
    return mask is None or _takes_mask(q, k, mask)


def _takes_mask(q: Tensor, k: Tensor, mask: Tensor) -> bool:
    if mask.dtype not in (torch.float32, torch.bfloat16, torch.float16) or mask.dim() not in (2, 4):
        return False
    scores = (*q.shape[:3], k.shape[2])[-mask.dim() :]
    if mask.shape[-1] != scores[-1] or any(n not in (1, most) for n, most in zip(mask.shape, scores, strict=True)):
        return False
    highest = mask.amax(-1)
    return not bool(((highest <= _HIDES) & (highest > -torch.inf)).any())


def _run(
    name: str, operands: tuple[Tensor, ...], q: Tensor, causal: bool, mask: Tensor | None, scale: float | None
) -> Any:
    """The core's "attention" or "attention_grad". With a mask it is a bias, which gets no gradient."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    if mask is None:
        return getattr(_core, name)(*operands, causal, factor)
    last = (False,) if name == "attention_grad" else ()
    given = ops.mask_arguments(q, bias=mask)
    return getattr(_core, f"block_sparse_{name}")(*operands, *given, causal, 0, 0, factor, *last)


def _by_rows(x: Tensor) -> Tensor:
    """[batch, heads, rows, ...] as torch's kernel lays gradients and sums out: the heads of a row side by side."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)
