"""16-bit matrix products on a CPU without 16-bit arithmetic.

There, torch falls to a reference loop (measured on one AVX-512 thread limited to AVX2: bf16 2.1, fp16 2.4 GFLOP/s
beside fp32's 131; with AVX-512 but no AVX512-BF16: bf16 34). `install(dtype)` overrides aten's mm, addmm, bmm and
baddbmm for that dtype on the CPU key: operands are widened to fp32 by panels of rows, multiplied by the fp32 GEMM, and
the result is rounded once. Every other dtype goes to torch's own kernel. Below autograd, so forward, backward,
attention's products and torch.compile's extern calls all take it. Process-wide; installed once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, cast

import torch

from ..core.foreign import patches

PANEL_ROWS = 4096  # bounds the fp32 copies of the left operand and of the result

_library: torch.library.Library | None = None
_dtypes: set[torch.dtype] = set()
calls = 0  # products that took the path; for tests


def install(dtype: torch.dtype) -> None:
    """Routes CPU matrix products of `dtype` (bfloat16 or float16) through fp32."""
    global _library
    _dtypes.add(dtype)
    if _library is not None:
        return
    patches.applied("matmul")
    _library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():  # torch says once in a process that a kernel is another one, on every rank
        warnings.filterwarnings("ignore", message="Warning only once for all operators", category=UserWarning)
        for name, impl in (("mm", _mm), ("addmm", _addmm), ("bmm", _bmm), ("baddbmm", _baddbmm)):
            _override(name, impl)
            _override_out(name)


def installed() -> tuple[torch.dtype, ...]:
    """The dtypes that take the path."""
    return tuple(sorted(_dtypes, key=str))


def _takes(operands: tuple[torch.Tensor, ...]) -> bool:
    """Not of mixed dtypes, which are torch's error."""
    dtype = operands[-1].dtype
    return dtype in _dtypes and all(t.dtype == dtype for t in operands)


def _override(name: str, impl: Callable[..., torch.Tensor]) -> None:
    original = torch.library.get_kernel(f"aten::{name}", "CPU")

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if _takes(args):
            global calls
            calls += 1
            return impl(*args, **kwargs)
        return original.call_boxed(keys, *args, **kwargs)

    cast(torch.library.Library, _library).impl(name, kernel, "CPU", with_keyset=True)


def _override_out(name: str) -> None:
    original = torch.library.get_kernel(f"aten::{name}.out", "CPU")
    impls: dict[str, Callable[..., torch.Tensor]] = {"mm": _mm, "addmm": _addmm, "bmm": _bmm, "baddbmm": _baddbmm}
    impl = impls[name]

    def kernel(keys: Any, *args: Any, out: torch.Tensor, **kwargs: Any) -> Any:
        if _takes(args):
            global calls
            calls += 1
            result = impl(*args, **kwargs)
            out.resize_(result.shape).copy_(result)
            return out
        return original.call_boxed(keys, *args, out=out, **kwargs)

    cast(torch.library.Library, _library).impl(f"{name}.out", kernel, "CPU", with_keyset=True)


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    wide = b.float()
    if a.shape[0] <= PANEL_ROWS:
        return (a.float() @ wide).to(a.dtype)
    out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    for i in range(0, a.shape[0], PANEL_ROWS):
        out[i : i + PANEL_ROWS].copy_(a[i : i + PANEL_ROWS].float() @ wide)
    return out


def _addmm(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    wide = b.float()
    bias = c.float()
    if a.shape[0] <= PANEL_ROWS:
        return torch.addmm(bias, a.float(), wide, beta=beta, alpha=alpha).to(a.dtype)
    out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    bias = bias.expand(a.shape[0], b.shape[1])
    for i in range(0, a.shape[0], PANEL_ROWS):
        out[i : i + PANEL_ROWS].copy_(
            torch.addmm(bias[i : i + PANEL_ROWS], a[i : i + PANEL_ROWS].float(), wide, beta=beta, alpha=alpha)
        )
    return out


def _bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.bmm(a.float(), b.float()).to(a.dtype)


def _baddbmm(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    return torch.baddbmm(c.float(), a.float(), b.float(), beta=beta, alpha=alpha).to(a.dtype)
