"""Codecs that turn numbers into short payloads.

A codec encodes x [n] (fp32, bf16 or fp16, contiguous) into a uint8 payload of nbytes(n) bytes and decodes it again; the
work is done by torch.ops.deepc.* (ops/ops.h has the formats and bounds). With an error tensor (fp32 [n]), x + error is
what is encoded, and error gets in the same pass what the payload did not carry, so that the sum of what was decoded
over many steps follows the sum of what was put in (error feedback: Seide et al., Interspeech 2014; Karimireddy et al.,
arXiv:1901.09847)."""

from __future__ import annotations

import abc

import torch

from ..core import ops as _ops  # noqa: F401
from ..errors import ArgumentError, numeric

_NO_ERROR = torch.empty(0, dtype=torch.float32, device="cpu")


def _fed(x: torch.Tensor, error: torch.Tensor | None) -> torch.Tensor:
    """The error as the operators take it: an empty tensor beside x where there is none."""
    if error is not None:
        return error
    return _NO_ERROR if x.is_cpu else x.new_empty(0, dtype=torch.float32)


# ---- codecs ----------------------------------------------------------------------------------------------------------
class Codec(abc.ABC):
    """What a payload looks like. Immutable, comparable, and without state: the same object serves any number of tensors
    and threads."""

    @abc.abstractmethod
    def nbytes(self, n: int) -> int:
        """Bytes of the payload of n elements; a multiple of 4."""

    @abc.abstractmethod
    def encode(self, payload: torch.Tensor, x: torch.Tensor, error: torch.Tensor | None = None) -> None:
        """x [n] (fp32, bf16, fp16) into payload, uint8 [nbytes(n)], 4-aligned. error: fp32 [n], read and rewritten
        (error feedback), or None. All contiguous and on one device: the CPU, or CUDA where the codec has kernels there
        (blocks, not top-k). Raises RuntimeError naming the argument that does not fit."""

    @abc.abstractmethod
    def decode(self, out: torch.Tensor, payload: torch.Tensor) -> None:
        """payload into out [n] (fp32, bf16, fp16)."""

    @abc.abstractmethod
    def decode_add(self, acc: torch.Tensor, payload: torch.Tensor, scale: float = 1.0) -> None:
        """acc [n], fp32, += scale * what payload holds; one rounding per element (fused multiply-add)."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *sorted(vars(self).items())))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in vars(self).items())})"


def _check_block(block: int, most: int) -> int:
    if not 64 <= block <= most or block % 64:
        raise ArgumentError(f"block={block}: it must be a multiple of 64 from 64 to {most}")
    return int(block)


class _Blocks(Codec):
    """Codes of `bits` and one fp32 scale for each `block` elements."""

    bits: int

    @numeric
    def __init__(self, block: int) -> None:
        self.block = _check_block(block, 1 << 20)

    def nbytes(self, n: int) -> int:
        return 4 * -(-n // self.block) + -(-n * self.bits // 32) * 4

    def encode(self, payload: torch.Tensor, x: torch.Tensor, error: torch.Tensor | None = None) -> None:
        torch.ops.deepc.quantize_blocks(x, payload, _fed(x, error), self.bits, self.block)

    def decode(self, out: torch.Tensor, payload: torch.Tensor) -> None:
        torch.ops.deepc.dequantize_blocks(payload, out, self.bits, self.block)

    def decode_add(self, acc: torch.Tensor, payload: torch.Tensor, scale: float = 1.0) -> None:
        torch.ops.deepc.add_dequantized(payload, acc, self.bits, self.block, scale)


class Plain(Codec):
    """No compression: elements in `dtype`. fp16 travels as 1/`shares`: what is sent is a sum of so many numbers, each
    within fp16's range, and the sum need not be."""

    def __init__(self, dtype: torch.dtype, shares: int = 1) -> None:
        self.dtype, self.shares = dtype, shares if dtype == torch.float16 else 1

    def nbytes(self, n: int) -> int:
        return -(-n * self.dtype.itemsize // 4) * 4

    def encode(self, payload: torch.Tensor, x: torch.Tensor, error: torch.Tensor | None = None) -> None:
        x = x if error is None else x.float() + error
        sent = payload.view(self.dtype)[: x.numel()]
        sent.copy_(x if self.shares == 1 else x / self.shares)
        if error is not None:
            error.copy_(torch.nan_to_num(x - sent.float() * self.shares, 0.0, 0.0, 0.0))

    def decode(self, out: torch.Tensor, payload: torch.Tensor) -> None:
        sent = payload.view(self.dtype)[: out.numel()]
        out.copy_(sent if self.shares == 1 else sent.float() * self.shares)

    def decode_add(self, acc: torch.Tensor, payload: torch.Tensor, scale: float = 1.0) -> None:
        acc.add_(payload.view(self.dtype)[: acc.numel()], alpha=scale * self.shares)


class Int8Blocks(_Blocks):
    """Symmetric 8-bit integers, scale = max|x| / 127 per block: 1.002 bytes an element; error <= about scale / 2."""

    bits = 8

    def __init__(self, block: int = 2048) -> None:
        super().__init__(block)


class Int4Blocks(_Blocks):
    """Symmetric 4-bit integers, scale = max|x| / 7 per block: 0.516 bytes an element; error <= about scale / 2. The
    smaller block keeps one outlier from taking the few levels away from many elements."""

    bits = 4

    def __init__(self, block: int = 256) -> None:
        super().__init__(block)


class OneBit(_Blocks):
    """The sign, and per block the mean of |x|: 0.127 bytes an element. Only with error feedback."""

    bits = 1

    def __init__(self, block: int = 2048) -> None:
        super().__init__(block)

    def average(self, payload: torch.Tensor, rows: torch.Tensor, error: torch.Tensor) -> None:
        """payload = encoded average of what the payloads rows [count, bytes] hold, plus error [n], which gets what is
        left; a row may be longer than its payload. One pass over error, with the bits of decode, decode_add, a product
        with 1 / count and encode."""
        count = rows.shape[0]
        torch.ops.deepc.average_signs(rows.view(-1), payload, error, count, self.block, 1.0 / count)


class TopK(Codec):
    """The largest magnitudes of each block, fraction of it, exactly (fp32 values and 16-bit indices): 6 * fraction
    bytes an element. Only with error feedback (Lin et al., arXiv:1712.01887)."""

    @numeric
    def __init__(self, fraction: float = 0.01, block: int = 4096) -> None:
        self.block = _check_block(block, 4096)
        if not 0.0 < fraction <= 1.0:
            raise ArgumentError(f"fraction={fraction}: it must be in (0, 1]")
        self.fraction = float(fraction)

    @property
    def k(self) -> int:
        """Elements chosen of each block."""
        return max(1, round(self.fraction * self.block))

    def nbytes(self, n: int) -> int:
        chosen = n // self.block * self.k + min(n % self.block, self.k)
        return -(-6 * chosen // 4) * 4

    def encode(self, payload: torch.Tensor, x: torch.Tensor, error: torch.Tensor | None = None) -> None:
        torch.ops.deepc.select_topk(x, payload, _fed(x, error), self.block, self.k)

    def decode(self, out: torch.Tensor, payload: torch.Tensor) -> None:
        torch.ops.deepc.spread_topk(payload, out, self.block, self.k)

    def decode_add(self, acc: torch.Tensor, payload: torch.Tensor, scale: float = 1.0) -> None:
        torch.ops.deepc.add_topk(payload, acc, self.block, self.k, scale)
