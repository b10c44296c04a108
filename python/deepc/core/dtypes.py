"""torch dtypes and the C core's dtype codes (enum dc_dtype in ops/base/base.h)."""

from __future__ import annotations

import torch

from ..errors import ArgumentError

CODES: dict[torch.dtype, int] = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float64: 3,
    torch.int8: 4,
    torch.uint8: 5,
    torch.int16: 6,
    torch.int32: 7,
    torch.int64: 8,
}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def code(dtype: torch.dtype, what: str = "tensor") -> int:
    """The C core's code of `dtype`; ArgumentError naming `what` if the core does not know it."""
    try:
        return CODES[dtype]
    except KeyError:
        raise ArgumentError(
            f"{what} has dtype {dtype}; deepc's core takes {', '.join(str(d) for d in CODES)}"
        ) from None
