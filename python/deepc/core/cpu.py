"""What this processor can compute in: which 16-bit products run on instructions of its own."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from dataclasses import dataclass

from .dtypes import TRAINED
from .dtypes import dtype as dtype_named
from .lib import C, call

_ISA_AVX512_BF16 = 3  # enum dc_isa

# oneDNN's levels of ONEDNN_MAX_CPU_ISA, in rising order; an unknown value means no limit, as in oneDNN
_ONEDNN_LEVELS = (
    "SSE41",
    "AVX",
    "AVX2",
    "AVX2_VNNI",
    "AVX2_VNNI_2",
    "AVX512_CORE",
    "AVX512_CORE_VNNI",
    "AVX512_CORE_BF16",
    "AVX10_1_512",
    "AVX512_CORE_FP16",
    "AVX512_CORE_AMX",
    "AVX10_1_512_AMX",
    "AVX512_CORE_AMX_FP16",
    "AVX10_1_512_AMX_FP16",
)

# per dtype: (flag of /proc/cpuinfo, lowest oneDNN level that uses it)
_X86 = {
    "bf16": (("avx512_bf16", "AVX512_CORE_BF16"), ("amx_bf16", "AVX512_CORE_AMX")),
    "fp16": (("avx512_fp16", "AVX512_CORE_FP16"), ("amx_fp16", "AVX512_CORE_AMX_FP16")),
}
_ARM = {"bf16": ("bf16",), "fp16": ("asimdhp",)}
_ZEN_4 = "25"  # the family of Zen 3 and 4, of which the latter has AVX-512
# whose VDPBF16PS makes half as many products a cycle as VFMADD (docs/lab/kernels.md)
_SLOW_PAIRS = ("GenuineIntel", "avx512_bf16")


def _cpuinfo(path: str, *names: str) -> str:
    """What the first line with one of these names says; empty where there is none."""
    try:
        with open(path, encoding="ascii", errors="replace") as f:
            for line in f:
                name, _, rest = line.partition(":")
                if name.strip() in names:
                    return rest.strip()
    except OSError:
        pass
    return ""


def cpu_flags(path: str = "/proc/cpuinfo") -> frozenset[str]:
    """The processor's feature flags as the kernel names them; what the C core finds where there is no /proc/cpuinfo."""
    found = _cpuinfo(path, "flags", "Features")
    return frozenset(found.split() if found else ["avx512_bf16"] * C.dc_isa_available(_ISA_AVX512_BF16))


def cpu_vendor(path: str = "/proc/cpuinfo") -> str:
    """ "GenuineIntel", "AuthenticAMD", ...; empty where the kernel does not say."""
    return _cpuinfo(path, "vendor_id")


def left_out() -> str:
    """What a build of the core lacks that was made with DEEPC_NATIVE on another machine, in words; empty: nothing."""
    isa: int = C.dc_isa_left_out()
    name = C.dc_isa_name(isa).decode()
    return f"this build of deepc has no kernels for {name}, which this processor has" if isa >= 0 else ""


LEFT_OUT_FIX = "build it here (make build), or with DEEPC_NATIVE=OFF for all processors; a wheel has all"


def _arithmetic(dtype: str, flags: frozenset[str], machine: str, limit: str, vendor: str = "") -> tuple[bool, str]:
    """Pure part of *_arithmetic(): (whether it pays, why)."""
    if machine.lower() in ("aarch64", "arm64"):
        found = [f for f in _ARM[dtype] if f in flags]
        return bool(found), (
            f"the processor has {', '.join(found)}" if found else f"the processor has no {dtype} instructions"
        )
    rows = _X86[dtype]
    found = [f for f, _ in rows if f in flags]
    if not found:
        return False, f"the processor has neither {' nor '.join(f for f, _ in rows)}"
    level = _ONEDNN_LEVELS.index(limit.upper()) if limit.upper() in _ONEDNN_LEVELS else len(_ONEDNN_LEVELS)
    usable = [f for f, need in rows if f in flags and level >= _ONEDNN_LEVELS.index(need)]
    if not usable:
        return False, f"the processor has {', '.join(found)}, but ONEDNN_MAX_CPU_ISA={limit} forbids it"
    if (vendor, *usable) == _SLOW_PAIRS:
        return False, f"the processor has {usable[0]} without AMX, which on {vendor} is slower than fp32"
    return True, f"the processor has {', '.join(usable)}"


def _limit() -> str:
    return os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "ALL"


def _here(dtype: str) -> tuple[bool, str]:
    return _arithmetic(dtype, _flags_here(), platform.machine(), _limit(), _vendor_here())


@functools.cache
def _flags_here() -> frozenset[str]:
    return cpu_flags()


@functools.cache
def _vendor_here() -> str:
    return cpu_vendor()


def has_instructions(dtype: str) -> bool:
    """Whether products in "bf16" or "fp16" have instructions of this CPU at all, be they slower than fp32's."""
    return _arithmetic(dtype, _flags_here(), platform.machine(), _limit())[0]


def bf16_arithmetic() -> tuple[bool, str]:
    """(whether matrix products in bf16 are best left to instructions of this CPU, the reason in words). Without them
    torch's product is emulated or runs its reference loop, up to 100 times slower than fp32, and Intel's without AMX
    take 1.7 times as long as fp32's: take compute_path() instead."""
    return _here("bf16")


def fp16_arithmetic() -> tuple[bool, str]:
    """The same for fp16."""
    return _here("fp16")


def _fast_products(
    dtype: str, vendor: str, family: str, flags: frozenset[str], isa: int, limit: str = "ALL"
) -> tuple[bool, str]:
    """Pure part of fast_products()."""
    amd = vendor == "AuthenticAMD" and "avx512f" in flags
    if dtype == "bf16":
        instructions = _arithmetic(dtype, flags, "x86_64", limit, vendor)[0]
        if vendor == "AuthenticAMD" and "avx2" in flags and not instructions and isa > 0:
            return True, "this processor has no bf16 arithmetic, and the core widens numbers while it packs them"
        if not amd or family != _ZEN_4 or not instructions:
            return False, "oneDNN's products of bf16 were not found slower than the core's on this processor"
        if isa < _ISA_AVX512_BF16:
            return False, "DEEPC_ISA asks for kernels without AVX512-BF16"
        return True, "oneDNN's large and small ones leave a part of Zen 4's AVX512-BF16"
    if not amd:
        return False, "MKL's products of fp32 are as fast as the core's on this processor"
    if isa == 0:
        return False, "DEEPC_ISA asks for the scalar kernels"
    return True, "MKL takes AMD's processors for AVX2's, and this one has AVX-512"


@functools.cache
def fast_products(dtype: str = "fp32") -> tuple[bool, str]:
    """(whether products of matrices in "fp32" or "bf16" are best made by the core's dc_gemm instead of torch's library,
    why). The processor decides and no measurement: bits depend on no clock."""
    isa = ctypes.c_int()
    call("dc_isa_current", ctypes.byref(isa))
    family = _cpuinfo("/proc/cpuinfo", "cpu family")
    return _fast_products(dtype, _vendor_here(), family, _flags_here(), isa.value, _limit())


@dataclass(frozen=True)
class ComputePath:
    """How products of a dtype are best computed. `native`: hand torch the tensors as they are. Otherwise "upcast":
    convert panels of the operands to fp32, multiply in fp32, round the result once to `dtype`; same memory for
    parameters, at least half of fp32's speed.
    """

    dtype: str
    native: bool
    reason: str

    @property
    def name(self) -> str:
        return "native" if self.native else "upcast"

    def __str__(self) -> str:
        how = "native products" if self.native else "operands are converted to fp32 panel by panel"
        return f"{self.dtype}: {how} ({self.reason})"


def compute_path(dtype: str) -> ComputePath:
    """The sane path for products in "fp32", "bf16" or "fp16" on this CPU."""
    if dtype == "fp32":
        return ComputePath(dtype, True, "fp32 is native everywhere")
    native, reason = _here(dtype_named(dtype, TRAINED).short)
    return ComputePath(dtype, native, reason)


def recommended_dtype() -> tuple[str, str]:
    """("bf16" or "fp32", why): bf16 where this CPU computes in it, else fp32."""
    path = compute_path("bf16")
    return ("bf16" if path.native else "fp32"), path.reason
