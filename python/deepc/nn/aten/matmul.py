"""Matrix products on CPUs where torch's are slow: 16-bit ones through fp32, and fp32 by the core's kernel.

Without the arithmetic torch falls to a reference loop (measured on one AVX-512 thread limited to AVX2: bf16 2.1, fp16
2.4 GFLOP/s beside fp32's 131; with AVX-512 but no AVX512-BF16: bf16 34); with AVX512-BF16 and no AMX, Intel's bf16 runs
at 0.5 to 0.6 of fp32. `install(dtype)` overrides aten's mm, addmm, bmm and baddbmm for that dtype on the CPU key:
operands are widened to fp32 panel by panel, multiplied by the fp32 GEMM, summed in fp32, and the result is rounded
once. Every other dtype goes to torch's own kernel, and so do products that are too small to pay for the widening, where
there are instructions.

fp32 is torch's MKL, which runs its AVX2 loop on AMD's processors: 93 to 110 GFLOP/s of the 256 that a core of Zen 5
has, 73 to 100 of Zen 4's 117. There `install_own(torch.float32)` gives products to dc_gemm (206 to 241, 92 to 109;
ops/cpu/gemm.c), but small ones, and operands that lie neither by rows nor by columns. On Zen 4 bf16 as well, of whose
233 oneDNN makes 160 to 216, and on AMD's processors without bf16 arithmetic, where dc_gemm widens what it packs and
panels take up to 2.4 times as long.

Below autograd, so forward, backward, attention's products and torch.compile's extern calls all take it. Process-wide;
installed once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from ...core import cpu, env
from ...core.foreign import patches
from ...core.lib import C
from ...core.ops import dtype_of
from . import without_notice

PANEL = 4 << 20  # elements, of each fp32 copy: of either operand and of the result
_DIMS = {"mm": 2, "addmm": 2, "bmm": 3, "baddbmm": 3}
LEAST_OWN = 1 << 20  # multiplications of a product that the core makes: smaller ones are through before this is asked
PAYS = 40  # multiplications for each number that is widened or rounded, from which on fp32 beats slow instructions

# out [m, n] = beta c + alpha a [m, k] b [k, n]; c [m, n], may be out, or None with beta 0
_Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None", float, float], None]
_gemm = torch.ops.deepc.gemm.default  # of core.ops
_library: torch.library.Library | None = None
_least: dict[torch.dtype, int] = {}  # of each 16-bit dtype that takes the path, such multiplications
_own: set[torch.dtype] = set()  # whose products are the core's
calls = 0  # products that took the path; for tests


def install(dtype: torch.dtype) -> None:
    """Routes CPU matrix products of bfloat16 or float16 through fp32."""
    _least[dtype] = _least_of(dtype)
    _install()


def install_own(dtype: torch.dtype) -> None:
    """Routes CPU matrix products of float32 or bfloat16 to the core."""
    _own.add(dtype)
    _install()


def _install() -> None:
    global _library
    if _library is not None:
        return
    patches.applied("matmul")
    _library = torch.library.Library("aten", "IMPL")
    with without_notice():
        for name, dims in _DIMS.items():
            _override(name, _product if dims == 2 else _products)
            _override_out(name, _product if dims == 2 else _products)
        for name, impl in (("addmm_", _product), ("baddbmm_", _products)):
            _override_in_place(name, impl)


def _least_of(dtype: torch.dtype) -> int:
    return PAYS if cpu.has_instructions(dtype_of(dtype).short) else 0


def choose_own(device: torch.device) -> list[torch.dtype]:
    """Products by the core, if `device` is a CPU on which that is faster. Returns of which dtypes."""
    chosen = [dtype for dtype in (torch.float32, torch.bfloat16) if _is_own(dtype, device)]
    for dtype in chosen:
        install_own(dtype)
    return chosen


def _is_own(dtype: torch.dtype, device: torch.device) -> bool:
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16) or not env.switch("DEEPC_MATMUL"):
        return False
    peer = torch.backends.mkl if dtype == torch.float32 else torch.backends.mkldnn
    return bool(peer.is_available()) and cpu.fast_products(dtype_of(dtype).short)[0]


def choose(dtype: torch.dtype, device: torch.device) -> str:
    """Installs `dtype` if `device` is a CPU on which that is faster. Why it is, in words; empty: it is not."""
    why = why_slow(dtype, device)
    if why:
        install(dtype)
    return why


def why_slow(dtype: torch.dtype, device: torch.device) -> str:
    """Why products of 16 bits on `device` are faster through fp32 than torch's; empty: they are not."""
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return ""
    path = cpu.compute_path(dtype_of(dtype).short)
    return "" if path.native else path.reason


def emulated(dtype: torch.dtype) -> bool:
    """Whether all products of the dtype go through fp32 copies, because this CPU has no arithmetic for them."""
    return _least.get(dtype) == 0 and dtype not in _own


def _way(operands: tuple[torch.Tensor, ...], dims: int, out: torch.Tensor | None = None) -> _Way | None:
    """How a product is made, into `out` if that is given; None: by torch, as are those of mixed dtypes and of shapes
    that don't fit, which are its errors."""
    a, b = operands[-2:]
    least = _least.get(b.dtype)
    if (b.dtype not in _own and least is None) or any(t.dtype != b.dtype for t in operands):
        return None
    if a.dim() != dims or b.dim() != dims or a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2]:
        return None
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    if b.dtype in _own and m * k * n >= _least_own(least, dims):
        if _in_lines(a) and _in_lines(b) and not _in_bf16(b.dtype) and (out is None or _fits(out, a, b)):
            return _by_the_core
    return through_fp32 if least is not None and _pays(m, k, n, least) else None


def _least_own(least: int | None, dims: int) -> int:
    """Multiplications of the smallest product by the core; least: of `_least`. Copies cost more than a call of it, but
    not than one for each product of a batch."""
    return 1 if least == 0 and dims == 2 else LEAST_OWN


def _in_bf16(dtype: torch.dtype) -> bool:
    """Whether the program has allowed bf16 inside of fp32 products (torch.set_float32_matmul_precision("medium")),
    which are faster still."""
    if dtype != torch.float32:
        return False
    allowed: str = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]  # set at import
    return allowed == "bf16"


def _in_lines(x: torch.Tensor) -> bool:
    """Whether matrices lie by rows or by columns."""
    return x.stride(-1) == 1 or x.stride(-2) == 1


def _is_read(c: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether the core can read c as it lies: rows one behind the other, or all the same (a bias), and either other
    memory than out's or the same places."""
    if c.stride(-1) != 1 or 0 < c.stride(-2) < c.shape[-1]:
        return False
    if c.untyped_storage().data_ptr() != out.untyped_storage().data_ptr():
        return True
    return c.data_ptr() == out.data_ptr() and c.stride() == out.stride()


def _fits(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the core can write `out`: rows with their elements side by side, in other memory than the operands'."""
    if out.shape != (*a.shape[:-1], b.shape[-1]) or out.stride(-1) != 1 or out.stride(-2) < out.shape[-1]:
        return False
    return all(out.untyped_storage().data_ptr() != t.untyped_storage().data_ptr() for t in (a, b))


def _pays(m: int, k: int, n: int, least: int) -> bool:
    return m * k * n >= least * (m * k + k * n + m * n)


def _override(name: str, impl: Callable[..., None]) -> None:
    original, dims = torch.library.get_kernel(f"aten::{name}", "CPU"), _DIMS[name]

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        way = _way(args, dims)
        if way is not None:
            global calls
            calls += 1
            a, b = args[-2:]
            out = torch.empty((*a.shape[:-1], b.shape[-1]), dtype=a.dtype, device=a.device)
            impl(way, out, *args, **kwargs)
            return out
        return original.call_boxed(keys, *args, **kwargs)

    cast(torch.library.Library, _library).impl(name, kernel, "CPU", with_keyset=True)


def _override_out(name: str, impl: Callable[..., None]) -> None:
    original, dims = torch.library.get_kernel(f"aten::{name}.out", "CPU"), _DIMS[name]

    def kernel(keys: Any, *args: Any, out: torch.Tensor, **kwargs: Any) -> Any:
        way = _way((out, *args), dims, out)
        if way is not None:
            global calls
            calls += 1
            a, b = args[-2:]
            impl(way, out.resize_((*a.shape[:-1], b.shape[-1])), *args, **kwargs)
            return out
        return original.call_boxed(keys, *args, out=out, **kwargs)

    cast(torch.library.Library, _library).impl(f"{name}.out", kernel, "CPU", with_keyset=True)


def _override_in_place(name: str, impl: Callable[..., None]) -> None:
    original, dims = torch.library.get_kernel(f"aten::{name}", "CPU"), _DIMS[name[:-1]]

    def kernel(keys: Any, c: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        a, b = args
        way = _way((c, a, b), dims, c)
        if way is not None and c.shape == (*a.shape[:-1], b.shape[-1]):
            global calls
            calls += 1
            impl(way, c, c, a, b, **kwargs)
            return c
        return original.call_boxed(keys, c, *args, **kwargs)

    cast(torch.library.Library, _library).impl(name, kernel, "CPU", with_keyset=True)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """[..., m, k] in fp32, laid out as it is by rows or by columns."""
    return x.mT.float().mT if x.stride(-2) == 1 else x.float()


def _panel(m: int, k: int, n: int) -> tuple[int, int, int]:
    """Rows, depth and columns of the panels of a product [m, k] x [k, n]."""
    side = int(PANEL**0.5)
    rows = min(m, max(side, PANEL // max(1, min(k, side), min(n, side)))) or 1
    columns = min(n, max(side, PANEL // max(1, min(k, side), min(m, side)))) or 1
    return rows, min(k, PANEL // max(rows, columns)) or 1, columns


def _by_the_core(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, beta: float, alpha: float
) -> None:
    if c is not None and not _is_read(c, out):
        c = out.copy_(c)
    _gemm(a, b, out if c is None else c, out, float(beta), float(alpha))


def through_fp32(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, beta: float, alpha: float
) -> None:
    """Copies are of panels, which are as square as PANEL lets them be, and the sums of one are complete before the
    next."""
    (m, k), n = a.shape, b.shape[1]
    rows, depth, columns = _panel(m, k, n)
    for i in range(0, m, rows):
        for j in range(0, n, columns):
            part = slice(i, i + rows), slice(j, j + columns)
            if c is None or beta == 0:
                sums = (torch.empty if k else torch.zeros)(out[part].shape, dtype=torch.float32, device=out.device)
            else:
                sums = c[part].float()
            for d in range(0, k, depth):
                left, right = a[part[0], d : d + depth], b[d : d + depth, part[1]]
                sums.addmm_(_wide(left), _wide(right), beta=beta if d == 0 else 1, alpha=alpha)
            out[part] = sums if k else sums.mul_(beta)
            del sums  # before those of the next


def _product(way: _Way, out: torch.Tensor, *operands: torch.Tensor, beta: float = 1, alpha: float = 1) -> None:
    """mm, addmm. operands: c, where there is one, a and b."""
    *rest, a, b = operands
    c = rest[0].expand(out.shape) if rest else None
    way(out, a, b, c, 0 if c is None else beta, alpha)


def _batches(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many of the products [m, k] x [k, n] have copies of at most PANEL elements."""
    return PANEL // max(1, a.shape[1] * a.shape[2], b.shape[1] * b.shape[2], a.shape[1] * b.shape[2])


def copies(a: torch.Tensor, b: torch.Tensor) -> list[int]:
    """Bytes of the fp32 copies that a product of two tensors on this CPU has at a time, once its dtype is installed, or
    of what the core packs; nothing if it needs none. For the memory plan: a and b may be fake."""
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    if a.dtype != b.dtype:
        return []
    least = _least_of(a.dtype) if why_slow(a.dtype, a.device) else None
    if _is_own(a.dtype, a.device) and m * k * n >= _least_own(least, a.dim()):
        return [C.dc_gemm_bytes(dtype_of(a.dtype).code, m, n, k)] * torch.get_num_threads()
    if least is None or not _pays(m, k, n, least):
        return []
    together = min(len(a), _batches(a, b)) if a.dim() == 3 else 0
    if not together:
        m, k, n = _panel(m, k, n)
    return [4 * max(1, together) * size for size in (m * n, m * k, k * n)]


def _products(way: _Way, out: torch.Tensor, *operands: torch.Tensor, beta: float = 1, alpha: float = 1) -> None:
    """bmm, baddbmm: as many at a time as their copies allow, or one by one."""
    *rest, a, b = operands
    c = rest[0].expand(out.shape) if rest else None
    step = _batches(a, b) if way is through_fp32 else 0
    for i in range(0, len(a), max(1, step)):
        part = slice(i, i + step)
        if not step:
            way(out[i], a[i], b[i], None if c is None else c[i], 0 if c is None else beta, alpha)
        elif c is None:
            out[part] = torch.bmm(_wide(a[part]), _wide(b[part]))
        else:
            out[part] = torch.baddbmm(c[part].float(), _wide(a[part]), _wide(b[part]), beta=beta, alpha=alpha)
