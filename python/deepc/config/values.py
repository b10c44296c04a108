"""One key and one value of a configuration: the canonical form of a value, or what is wrong with it; and which known
key an unknown one may have meant."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any

from ..errors import did_you_mean
from .keys import ANY, KEYS, OLD_NAMES, RENAMED_SECTIONS, TABLE, Key

AUTO = "auto"

_ALIASES = {f"{k.section}.{k.alias}": k.path for k in KEYS if k.alias}
_SECOND = {**_ALIASES, **OLD_NAMES, **RENAMED_SECTIONS}
_SECTIONS = {".".join(k.path.split(".")[:i]) for k in KEYS for i in range(1, k.path.count(".") + 1)}


def suggest(key: str) -> str:
    """' Did you mean "..."?' of the table's keys, or ''."""
    return did_you_mean(key, [*TABLE, *_ALIASES, *RENAMED_SECTIONS, *_SECTIONS], _SECOND)


def _auto_message(source: str, keys: Any) -> str:
    return (
        f'{source}: these keys are still "auto": {", ".join(keys)}. An integration (Hugging Face Trainer, Accelerate)'
        " fills them before initialize(); without one, write values, or remove the keys to get the defaults."
    )


def is_auto_a_value(row: Key) -> bool:
    """Whether "auto" is a value of the key, and does not stand for what an integration fills in."""
    return row.kind in ("any", "pick") or (row.kind == "str" and (row.ok is ANY or AUTO in row.choices))


# ---- one value -------------------------------------------------------------------------------------------------------

_KIND_WORDS = {
    "bool": "true or false",
    "int": "an integer",
    "number": "a number",
    "str": "a string",
    "strings": "a list of strings",
    "ints": "a list of integers",
    "numbers": "a list of numbers",
    "object": "an object {...}",
    "gated": "an object {...}",
    "pick": 'true, false, "auto" or a list',
}


class BadValue(Exception):
    """The text after 'key = value'."""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _range_text(row: Key) -> str:
    return " and ".join(
        f"{op} {b:g}" for op, b in ((">=", row.ge), (">", row.gt), ("<=", row.le), ("<", row.lt)) if b is not None
    )


def _in_range(row: Key, value: float) -> bool:
    return not (
        (row.ge is not None and value < row.ge)
        or (row.gt is not None and value <= row.gt)
        or (row.le is not None and value > row.le)
        or (row.lt is not None and value >= row.lt)
    )


def _check_number(row: Key, value: Any, integer: bool) -> Any:
    word = _KIND_WORDS["int" if integer else "number"]
    if isinstance(value, str):
        raise BadValue(f"is a string, but must be {word}; write it without quotes")
    if not _is_number(value):
        raise BadValue(f"must be {word}")
    if not math.isfinite(value):
        raise BadValue("must be finite")
    if integer and value != int(value):
        raise BadValue("must be an integer")
    if not _in_range(row, value):
        raise BadValue(f"is out of range, it must be {_range_text(row)}")
    return int(value) if integer else float(value)


def check_value(row: Key, value: Any) -> Any:
    """The value in its canonical form. Raises BadValue."""
    if value is None and (row.default is None or row.null):
        return None
    kind = row.kind
    if kind == "any":
        return value
    if kind in ("int", "number"):
        return _check_number(row, value, kind == "int")
    if kind == "bool":
        if not isinstance(value, bool):
            raise BadValue("must be true or false" + (", without quotes" if isinstance(value, str) else ""))
        return value
    if kind == "str":
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if not isinstance(value, str):
            raise BadValue("must be a string" + (f", one of {', '.join(row.choices)}" if row.choices else ""))
        if row.choices:
            spelled = {c.lower(): c for c in row.choices}
            if value.lower() not in spelled:
                raise BadValue(f"must be one of {', '.join(row.choices)}")
            return spelled[value.lower()]
        return value
    if kind == "strings":
        if isinstance(value, str):
            return [value]
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            raise BadValue("must be a list of strings")
        return list(value)
    if kind in ("ints", "numbers"):
        word = "integers" if kind == "ints" else "numbers"
        if not isinstance(value, (list, tuple)) or len(value) != len(row.default):
            raise BadValue(f"must be a list of {len(row.default)} {word}")
        return tuple(_check_number(row, v, kind == "ints") for v in value)
    if kind == "pick":
        if isinstance(value, bool) or (isinstance(value, str) and value == AUTO):
            return value
        if isinstance(value, (list, tuple)) and value and all(isinstance(v, str) and v in row.choices for v in value):
            return tuple(dict.fromkeys(value))
        raise BadValue(f'must be true, false, "auto" or a list of {", ".join(row.choices)}')
    if not isinstance(value, Mapping):
        raise BadValue("must be an object {...}")
    return dict(value)


def _show(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 120 else text[:117] + "..."
