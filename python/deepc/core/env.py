"""The environment variables of deepc: one table (ops/base/env.def, which the C core holds), one parser, one precedence:
a function's argument, the environment, the configuration, the default.

Python reads a DEEPC_* variable here and nowhere else, with two exceptions: the folder of the C core, which is needed
before there is a table (lib.library_dir), and launch/host, which runs where deepc can't be imported. Variables are read
at each call, so that a program may set them before it makes what they are for. Set to nothing is not set."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import NamedTuple

from ..errors import ArgumentError, ConfigError
from .lib import C


class Variable(NamedTuple):
    """A row of the table."""

    name: str
    values: str  # the possible ones with | between them, "text", "number" or "internal": no user sets it
    help: str


def _row(i: int) -> tuple[Variable, str] | None:
    """(row, its value in the environment or its default), None past the end."""
    out = [ctypes.c_char_p() for _ in range(4)]
    if C.dc_env_at(i, *map(ctypes.byref, out)):
        return None
    name, values, value, text = (os.fsdecode(o.value or b"") for o in out)
    return Variable(name, values, text), value


@cache
def _table() -> dict[str, tuple[int, Variable]]:
    found: dict[str, tuple[int, Variable]] = {}
    while (row := _row(len(found))) is not None:
        found[row[0].name] = len(found), row[0]
    return found


def variables() -> dict[str, Variable]:
    """Every variable that deepc reads, by name, in the table's order."""
    return {name: row for name, (_, row) in _table().items()}


def given(name: str) -> str:
    """The variable as it is set, "" where it is not. Not checked."""
    if name not in _table():
        raise ArgumentError(f"{name} has no row in ops/base/env.def")
    return os.environ.get(name, "")


def text(name: str, argument: str | None = None, config: str | None = None) -> str:
    """What holds of argument, environment, config and default, in this order; None and "" pass the question on. Of a
    variable with a list of values one of them, as the table spells it. Raises ConfigError that names variable and value
    for another in the environment; argument and config are their owners' to check."""
    if argument:
        return argument
    if not (value := given(name)):
        default = _row(_table()[name][0])
        return config or (default[1] if default else "")
    values = _table()[name][1].values.split("|")
    if len(values) == 1:
        return value
    for known in values:
        if value.strip().lower() == known.lower():
            return known
    raise ConfigError(
        f"{name}={value!r} is not understood; set it to {', '.join(values[:-1])} or {values[-1]}, or unset it"
    )


def switch(name: str, argument: bool | None = None, config: bool | None = None) -> bool:
    """The same of a variable that is 0 or 1."""
    if argument is not None:
        return argument
    return text(name, config=None if config is None else str(int(config))) == "1"
