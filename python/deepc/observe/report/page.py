"""One HTML file with everything in it: page.html with page.css, page.js and the runs' figures as JSON. It loads
nothing, and its content security policy would not let it."""

from __future__ import annotations

import datetime
import html
import json
import math
import re
from importlib.resources import files
from typing import Any

_PART = re.compile(r"@(GENERATOR|TITLE|CSS|JS|DATA)@")


def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _plain(value: Any) -> Any:
    """JSON has no NaN: numbers that are not finite become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def embedded(data: Any) -> str:
    """JSON that may stand inside <script>: nothing in it can end the element."""
    text = json.dumps(_plain(data), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def page(runs: list[dict[str, Any]], *, version: str, theme: str | None = None) -> str:
    """The page of digests (digest.digest) of one or several runs. theme: "light" or "dark"; None: as the reader's
    system."""
    made = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")  # as the runs' own times
    title = runs[0]["name"] if len(runs) == 1 else f"{len(runs)} runs: " + ", ".join(r["name"] for r in runs)
    data = {"runs": runs, "version": version, "made": made, "theme": theme}
    parts = {
        "GENERATOR": html.escape(f"deepc {version}"),
        "TITLE": html.escape(f"{title} · deepc"),
        "CSS": _text("page.css").rstrip(),
        "JS": _text("page.js").rstrip(),
        "DATA": embedded(data),
    }
    return _PART.sub(lambda m: parts[m[1]], _text("page.html"))
