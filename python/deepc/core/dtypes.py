"""Element types by name, for every framework: one table with each type's names, size and code in the C core.

Imports none of the frameworks; `core.ops` has torch's side (`torch_dtype`, `dtype_of`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..errors import ArgumentError


@dataclass(frozen=True)
class DType:
    """One element type. Compares, hashes and prints by name.

    name: as torch, NumPy and JAX have it ("bfloat16"). itemsize: bytes. tag: in a safetensors header ("BF16"). code:
    the C core's (enum dc_dtype of ops/base/base.h), None if the core does not compute in it. short: as a configuration
    writes it ("bf16"), "" for types that none asks for."""

    name: str
    itemsize: int
    tag: str
    code: int | None = None
    short: str = ""

    def __str__(self) -> str:
        return self.name


TABLE = (
    DType("float32", 4, "F32", 0, "fp32"),
    DType("bfloat16", 2, "BF16", 1, "bf16"),
    DType("float16", 2, "F16", 2, "fp16"),
    DType("float64", 8, "F64", 3, "fp64"),
    DType("int8", 1, "I8", 4),
    DType("uint8", 1, "U8", 5),
    DType("int16", 2, "I16", 6),
    DType("int32", 4, "I32", 7),
    DType("int64", 8, "I64", 8),
    DType("uint16", 2, "U16"),
    DType("uint32", 4, "U32"),
    DType("uint64", 8, "U64"),
    DType("bool", 1, "BOOL"),
    DType("float8_e4m3fn", 1, "F8_E4M3"),
    DType("float8_e5m2", 1, "F8_E5M2"),
    DType("complex64", 8, "C64"),
)
FLOAT32, BFLOAT16, FLOAT16 = TABLE[:3]
# What a model is trained in; a configuration asks for one of these.
TRAINED = (FLOAT32, BFLOAT16, FLOAT16)
TRAINED_NAMES = tuple(d.short for d in TRAINED)


class StateFormat(NamedTuple):
    """How an optimizer state is stored (dc_state_format of ops/ops.h). bytes_of_256: of 256 elements, with their
    scales. arrays: on disk, the state itself and, if it is codes, its scales: type of an item, elements that share
    it."""

    bytes_of_256: int
    arrays: tuple[tuple[DType, int], ...]


_UINT8 = TABLE[5]
UNIT = 64  # elements: parameters begin at multiples of it, so that two blocks' scales never fall into one unit
STATE_FORMATS = {
    "fp32": StateFormat(1024, ((FLOAT32, 1),)),
    "bf16": StateFormat(512, ((BFLOAT16, 1),)),
    "int8": StateFormat(256 + 4, ((_UINT8, 1), (FLOAT32, UNIT))),
    "int4": StateFormat(128 + 8, ((_UINT8, 2), (FLOAT32, UNIT))),
}

_BY_NAME = {name: d for d in TABLE for name in (d.name, d.short) if name} | {
    "float": FLOAT32,
    "half": FLOAT16,
    "double": TABLE[3],
}


def find(name: object) -> DType | None:
    """The type of a name: "bf16", "bfloat16", "half", or a framework's dtype ("torch.bfloat16" is how torch's prints).
    None if it is none of the table's."""
    return name if isinstance(name, DType) else _BY_NAME.get(str(name).removeprefix("torch."))


def names_of(kind: DType) -> tuple[str, ...]:
    """All names that `find` knows it by, the one that a configuration writes first."""
    known = [n for n, d in _BY_NAME.items() if d == kind and n != kind.short]
    return (kind.short, *known, *(f"torch.{n}" for n in known))


def dtype(name: object, among: tuple[DType, ...] = TABLE) -> DType:
    """`find`, but ArgumentError naming those of `among` for any other."""
    found = find(name)
    if found is None or found not in among:
        raise ArgumentError(f"{name!r} is not one of {', '.join(d.short or d.name for d in among)}")
    return found
