"""Where a configuration comes from: a path, JSON text, base64 of it or a dict, read into a plain dict. JSON as
DeepSpeed takes it, with comments and trailing commas. What is wrong with the text is a ConfigError that names the
source, and line and column.
"""

from __future__ import annotations

import base64
import binascii
import copy
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError


def read(source: Any) -> tuple[dict[str, Any], str]:
    """The raw dict and a name of its source for messages."""
    if isinstance(source, Mapping):
        return _plain(source, "the configuration dict"), "the configuration dict"
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(f"the configuration must be a path, JSON text or a dict, not {type(source).__name__}")
    text = os.fspath(source)
    if not text.strip():
        raise ConfigError("the configuration is an empty text. Give the path of a JSON file, JSON text or a dict.")
    first = _TOKEN.sub(_blank, text).lstrip("\ufeff").lstrip()[:1]  # behind comments
    if isinstance(source, str) and (first == "{" or (first == "[" and not Path(text).exists())):
        return _parse(text, "the configuration text"), "the configuration text"
    try:
        content = Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as exc:
        decoded = _from_base64(text)
        if decoded is not None:
            return _parse(decoded, "the base64 configuration"), "the base64 configuration"
        shown = text if len(text) <= 200 else text[:200] + "..."
        raise ConfigError(
            f"can't read the configuration file {shown!r}: {getattr(exc, 'strerror', None) or exc}. Give the path of a"
            " JSON file, JSON text or a dict."
        ) from exc
    return _parse(content, text), text


def _from_base64(text: str) -> str | None:
    try:
        decoded = base64.b64decode(text.encode("ascii"), altchars=b"-_", validate=True).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return decoded if decoded.lstrip().startswith("{") else None


def _plain(value: Any, where: str) -> Any:
    """A deep copy of dicts and lists, so that the caller's object is never changed; keys must be strings."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"{where}: key {key!r} is {type(key).__name__}, keys are strings")
        return {k: _plain(v, where) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return (
            type(value)(_plain(v, where) for v in value)
            if type(value) in (list, tuple)
            else [_plain(v, where) for v in value]
        )
    return copy.copy(value)


_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|#[^\n]*|/\*.*?\*/', re.S)
_TRAILING = re.compile(r'("(?:\\.|[^"\\])*")|,(?=\s*[}\]])', re.S)


def _blank(match: re.Match[str]) -> str:
    token = match.group()
    return token if token.startswith('"') else re.sub(r"[^\n]", " ", token)  # keeps line and column of everything else


def _hjson(text: str, pairs: Callable[[list[tuple[str, Any]]], dict[str, Any]], problem: str) -> Any:
    """What is not JSON may be HJSON (no quotes, no commas), which DeepSpeed reads all configurations as. problem: why
    it is not JSON."""
    try:
        import hjson
    except ImportError:
        raise ConfigError(
            f"{problem}. If the file is HJSON, install the package that reads it: pip install hjson."
        ) from None
    try:
        return hjson.loads(text, object_pairs_hook=pairs)
    except hjson.HjsonDecodeError as exc:
        raise ConfigError(f"{problem}, and not HJSON either: {exc}.") from exc


def _parse(text: str, name: str) -> dict[str, Any]:
    """JSON with comments and trailing commas; duplicate keys, NaN and Infinity are errors."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        seen = dict(items)
        if len(seen) != len(items):
            keys = [k for k, _ in items]
            twice = sorted({k for k in keys if keys.count(k) > 1})
            raise ConfigError(
                f"{name}: the key {', '.join(map(repr, twice))} stands twice in one section. Remove one of them."
            )
        return seen

    def constant(word: str) -> None:
        raise ConfigError(f"{name}: {word} is not a JSON number. Write a finite number.")

    clean = _TRAILING.sub(lambda m: m.group(1) or " ", _TOKEN.sub(_blank, text.lstrip("\ufeff")))
    try:
        value = json.loads(clean, object_pairs_hook=pairs, parse_constant=constant)
    except json.JSONDecodeError as exc:
        value = _hjson(text, pairs, f"{name}, line {exc.lineno}, column {exc.colno}: not JSON: {exc.msg}")
    except RecursionError as exc:
        raise ConfigError(f"{name}: nested too deeply to be a configuration") from exc
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: the configuration must be a JSON object {{...}}, not {type(value).__name__}")
    return value
