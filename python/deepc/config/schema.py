"""The JSON Schema of all keys, for editors and CI."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from .keys import ANY, KEYS, OPTIMIZER_PARAMS, RENAMED_SECTIONS, Key, State
from .values import AUTO

_JSON_TYPES = {
    "bool": "boolean",
    "int": "integer",
    "number": "number",
    "str": "string",
    "object": "object",
    "gated": "object",
}
_ITEMS = {"strings": "string", "ints": "integer", "numbers": "number"}


def _row_schema(row: Key) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if row.kind in _ITEMS:
        item: dict[str, Any] = {"type": _ITEMS[row.kind]}
        if row.kind != "strings":
            item.update(_bounds(row))
            out.update(minItems=len(row.default), maxItems=len(row.default))
        out.update(type="array", items=item)
        if row.kind == "strings":
            out = {"anyOf": [out, {"type": "string"}]}
    elif row.kind == "str" and row.choices:
        out.update(type="string", pattern="^(?:" + "|".join(_any_case(c) for c in row.choices) + ")$")
    elif row.kind == "pick":
        several = {"type": "array", "items": {"enum": list(row.choices)}, "minItems": 1}
        out = {"anyOf": [{"type": "boolean"}, {"const": AUTO}, several]}
    elif row.kind == "int" and row.state is State.INERT:
        out.update(type="number", **_bounds(row))  # a fraction of a hint is rounded
    elif row.kind != "any":
        out.update(type=_JSON_TYPES[row.kind], **(_bounds(row) if row.kind in ("int", "number") else {}))
    if row.kind == "gated":
        out = {
            "anyOf": [
                {"type": "object", "required": ["enabled"], "properties": {"enabled": {"const": False}}},
                {"const": {}},
            ]
        }
    elif row.state in (State.LATER, State.REMOVED) and row.ok is not ANY:
        accepted = [o for o in row.ok if o is not None]
        out = (
            {"enum": accepted}
            if not row.choices
            else (
                {"allOf": [out, {"pattern": "^(?:" + "|".join(map(_any_case, accepted)) + ")$"}]}
                if accepted
                else {"enum": []}
            )
        )
    options = [o for o in (out,) if o.get("enum", True) != []]
    if row.auto:
        options.append({"const": AUTO})
    if row.default is None or row.null:
        options.append({"type": "null"})
    schema: dict[str, Any] = dict(options[0]) if len(options) == 1 else {"anyOf": options}
    if row.path == "optimizer.params":
        schema = {
            "anyOf": [
                {"type": "object", "properties": {k: _row_schema(r) for k, r in OPTIMIZER_PARAMS.items()}},
                {"type": "null"},
            ]
        }
        schema["anyOf"][0]["description"] = (
            "For Adam and AdamW; other optimizers take the arguments of their torch class."
        )
        for r in OPTIMIZER_PARAMS.values():  # a torch class may use the same name for something wider
            if r.state is State.LATER:
                schema["anyOf"][0]["properties"].pop(r.path)
    schema["description"] = row.help + (f" Inert: {row.why}." if row.state is State.INERT else "")
    schema["x-deepc-state"] = row.state.value
    if row.default is not None and row.state is not State.REMOVED:
        schema["default"] = list(row.default) if isinstance(row.default, tuple) else row.default
    return schema


def _any_case(word: str) -> str:
    return "".join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else re.escape(c) for c in word)


def _bounds(row: Key) -> dict[str, float]:
    names = {"minimum": row.ge, "exclusiveMinimum": row.gt, "maximum": row.le, "exclusiveMaximum": row.lt}
    return {k: v for k, v in names.items() if v is not None}


def json_schema() -> dict[str, Any]:
    """A JSON Schema (draft 2020-12) of everything that Config.load accepts, for editors and CI."""
    root: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "deepc configuration (DeepSpeed JSON)",
        "type": "object",
        "additionalProperties": False,
        "properties": {},
    }
    for row in KEYS:
        node = root
        for part in row.path.split(".")[:-1]:
            entry = node["properties"].setdefault(
                part, {"anyOf": [{"type": "object", "additionalProperties": False, "properties": {}}, {"type": "null"}]}
            )
            node = entry["anyOf"][0]
        node["properties"][row.leaf] = _row_schema(row)
        if row.alias:
            node["properties"][row.alias] = {**_row_schema(row), "deprecated": True}
    root["properties"]["zero_optimization"]["anyOf"].append({"type": "boolean"})
    for old, new in RENAMED_SECTIONS.items():
        root["properties"][old] = {**root["properties"][new], "deprecated": True}
    return root


def write_schema(path: str | os.PathLike[str] | None = None) -> str:
    """The schema as JSON text; written to `path` if given."""
    text = json.dumps(json_schema(), indent=2) + "\n"
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text
