"""The C core has floors: a file calls only functions of files that stand before it. The order is that of the source
lists in ops/, zero/ and comm/CMakeLists.txt. A folder includes only headers of its own and of the folders below it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLOORS = ["ops/base", "ops", "zero", "comm"]  # lowest first


def _listed(folder: str) -> list[Path]:
    """The sources of a folder's CMakeLists.txt, in its order."""
    text = re.sub(r"#.*", "", (ROOT / folder / "CMakeLists.txt").read_text(encoding="utf-8"))
    lists = re.findall(r"deepc_layer\s*\(\s*\S+([^)]*)\)", text)
    return [ROOT / folder / name for sources in lists for name in re.findall(r"[\w/]+\.c\b", sources)]


def _code(path: Path) -> str:
    """Without comments and strings."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", path.read_text(encoding="utf-8"), flags=re.S)
    return re.sub(r'"(?:\\.|[^"\\\n])*"', '""', text)


NAME = r"dc_\w+"


def _defined(code: str) -> set[str]:
    """Functions and variables that other files can see, as they stand in the text (not what macros make of it)."""
    functions = re.findall(
        rf"^(?!static|typedef|extern|#|\s)[^\n;={{}}()]*?\b({NAME})\s*\([^;{{}}]*\)\s*\{{", code, flags=re.M
    )
    variables = re.findall(
        rf"^(?!static|typedef|extern|#|\s)[^\n;={{}}]*?\b({NAME})\)?(?:\[[^\]]*\])?(?:\(void\))?\s*(?:=[^;]*)?;",
        code,
        flags=re.M,
    )
    return set(functions) | set(variables)


def _order() -> list[Path]:
    order = _listed("ops") + _listed("zero") + _listed("comm")
    assert len(order) == len(set(order)), "a source is listed twice"
    return order


def test_every_source_of_comm_and_zero_is_listed() -> None:
    listed = set(_order())
    for folder in ("zero", "comm"):
        assert {p for p in (ROOT / folder).glob("*.c")} <= listed


def test_no_file_uses_what_a_later_one_defines() -> None:
    order = _order()
    code = {path: _code(path) for path in order}
    home: dict[str, int] = {}
    for at, path in enumerate(order):
        for name in _defined(code[path]):
            assert name not in home, f"{name} is defined in {order[home[name]]} and {path}"
            home[name] = at
    assert {"dc_all_reduce", "dc__await", "dc__unfinished", "dc__serve"} <= set(home), "the search finds nothing"
    upward = [
        f"{path.relative_to(ROOT)} uses {name} of {order[home[name]].relative_to(ROOT)}"
        for at, path in enumerate(order)
        for name in sorted(set(re.findall(rf"\b{NAME}\b", code[path])))
        if home.get(name, at) > at
    ]
    assert not upward, "\n".join(upward)


@pytest.mark.parametrize("folder", FLOORS)
def test_includes_go_down(folder: str) -> None:
    allowed = FLOORS[: FLOORS.index(folder) + 1]
    for path in sorted([*(ROOT / folder).glob("*.[ch]")]):
        for name in re.findall(r'^#include "([^"]+)"', path.read_text(encoding="utf-8"), flags=re.M):
            roots = [path.parent, ROOT, ROOT / "ops"]
            found = next((r / name for r in roots if (r / name).exists()), None)
            assert found is not None, f"{path.relative_to(ROOT)} includes {name}, which is nowhere"
            where = found.resolve().relative_to(ROOT)
            top = "ops/base" if where.parts[:2] == ("ops", "base") else where.parts[0]
            assert top in allowed, f"{path.relative_to(ROOT)} includes {where}"
